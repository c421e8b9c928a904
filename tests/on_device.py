"""What test_device.py starts, in a process that knows the pretend device, as PyTorch never forgets one of this kind:
on_device.py JOBS.json trains, and writes into found.json how often the host waited for the device, and where."""

import importlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pretend_device import NAME, count  # noqa: E402 (they import what stands in the folder above)
from runs import run  # noqa: E402

if __name__ == "__main__":
    found = {}
    for script, settings, output in json.loads(Path(sys.argv[1]).read_text()):
        with count() as reads:
            run(importlib.import_module(script), output, device=NAME, **settings)
        found[Path(output).name] = reads
    Path(sys.argv[1]).with_name("found.json").write_text(json.dumps(found))
