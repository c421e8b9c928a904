"""What test_processes.py starts with torchrun: on_many_processes.py JOBS.json, where a job is a script and the words of
its command line.

All jobs run in one group of processes, one after the other, as a group takes seconds to start.
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def note(module):
    """From here on the script says in FOLDER.loaded where the weights of each model are that it has loaded."""
    load = module.load_model

    def load_and_note(auto_class, name, args, **options):
        model = load(auto_class, name, args, **options)
        folder = Path(args.output_dir or args.resume)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{folder}.loaded", "a") as file:
            for device in {p.device.type for p in model.parameters()}:
                print(os.environ["RANK"], device, file=file)
        return model

    module.load_model = load_and_note


if __name__ == "__main__":
    for script, words in json.loads(Path(sys.argv[1]).read_text()):
        is_new = script not in sys.modules
        module = importlib.import_module(script)
        if is_new:
            module.draw_curves = lambda *_: None  # as in conftest.py
        if is_new and script != "ddpo":
            note(module)
        if "--zero-stage" not in words:  # the processes do not meet before there is a folder: one may be late
            time.sleep(int(os.environ["RANK"]))
        sys.argv = [f"{script}.py", *words]
        try:
            module.train(module.read_command_line())
        except SystemExit as error:  # of all processes; the next job may go on with the run
            print(error)
