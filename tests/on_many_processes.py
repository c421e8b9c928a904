"""What test_processes.py starts with torchrun: on_many_processes.py JOBS.json, where a job is a script and the words of
its command line. All jobs run in one group of processes, one after the other, as a group takes seconds to start.
"""

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runs import main  # noqa: E402 (it imports what stands in the folder above)

if __name__ == "__main__":
    if os.environ["RANK"] != "0":
        sys.stdout = open(os.devnull, "w")  # as in the scripts
    for name, words in json.loads(Path(sys.argv[1]).read_text()):
        if "--zero-stage" not in words:  # nothing keeps these processes together: one may be late
            time.sleep(0.5 * int(os.environ["RANK"]))
        main(name, *words)
