"""What test_processes.py starts with torchrun: on_many_processes.py JOBS.json, where each job is a script and its
settings, or the words of a command line, which comes last.

All jobs run in one group of processes, one after the other, as a group takes seconds to start.
"""

import importlib
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
Figure.savefig = lambda *_, **__: None  # as in conftest.py


def note(module):
    """From here on the script says in OUTPUT_DIR.loaded where the weights of each model are that it has loaded."""
    load = module.load_model

    def load_and_note(auto_class, name, args, **options):
        model = load(auto_class, name, args, **options)
        Path(args.output_dir).parent.mkdir(exist_ok=True)
        with open(f"{args.output_dir}.loaded", "a") as file:
            file.writelines(f"{os.environ['RANK']} {kind}\n" for kind in {p.device.type for p in model.parameters()})
        return model

    module.load_model = load_and_note


if __name__ == "__main__":
    for script, job in json.loads(Path(sys.argv[1]).read_text()):
        is_new = script not in sys.modules
        module = importlib.import_module(script)
        if is_new and script != "ddpo":
            note(module)
        if isinstance(job, dict):
            module.train(module.Args(**job))
        else:
            sys.argv = [f"{script}.py", *job]
            with suppress(SystemExit):
                module.main()
