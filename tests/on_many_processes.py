"""What test_processes.py starts with torchrun: on_many_processes.py JOBS.json, where each job is [script, settings].

All jobs run in one group of processes, one after the other, as a group takes seconds to start.
"""

import importlib
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if __name__ == "__main__":
    for script, settings in json.loads(Path(sys.argv[1]).read_text()):
        module = importlib.import_module(script)
        module.train(module.Args(**settings))
