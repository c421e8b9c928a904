"""What test_processes.py starts with torchrun: on_many_processes.py JOBS.json, where each job is a script and its
settings, or the words of a command line, which comes last.

All jobs run in one group of processes, one after the other, as a group takes seconds to start.
"""

import importlib
import json
import sys
from contextlib import suppress
from pathlib import Path

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
Figure.savefig = lambda *_, **__: None  # as in conftest.py

if __name__ == "__main__":
    for script, job in json.loads(Path(sys.argv[1]).read_text()):
        module = importlib.import_module(script)
        if isinstance(job, dict):
            module.train(module.Args(**job))
        else:
            sys.argv = [f"{script}.py", *job]
            with suppress(SystemExit):
                module.main()
