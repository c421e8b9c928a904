"""Plants faults in the scripts, one at a time, and shows which of them no test sees.

    python tests/plant_faults.py                          # all of tests/faults/*.toml; exit code 1 if one lived
    python tests/plant_faults.py --script ppo --jobs 2    # those of one script, two at once
    python tests/plant_faults.py --name gamma             # those with the word in their name
    python tests/plant_faults.py --test test_settings     # those that tests of that file are to see
    python tests/plant_faults.py --quick                  # what the tests see that are not marked as slow

A file of faults is named after its script (lecture/ppo.toml after lecture/ppo.py) and holds entries such as

    [[fault]]
    name = "gamma and lam exchanged"
    old = "args.gamma, args.lam)"       # stands in the script exactly once
    new = "args.lam, args.gamma)"
    tests = ["tests/test_loops.py::test_gae"]    # arguments of pytest: files, node ids, "-k words"

The tests run in a copy of the repository. They run first without any fault: a test that is red anyway sees nothing.
Each fault then has a process of its own, forked from the one in which they ran, where all libraries are imported.
"""

import gc
import multiprocessing
import os
import shlex
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from argparse import ArgumentParser
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FAULTS = Path(__file__).resolve().parent / "faults"
LONGEST = 600  # seconds that the tests of a fault may take
TIMEOUT = 124  # the code of a fault whose tests took longer: nobody knows whether they would see it


def read_faults() -> list[dict]:
    """All faults, each with the script that it belongs to."""
    faults = []
    for file in sorted(FAULTS.rglob("*.toml")):
        script = file.relative_to(FAULTS).with_suffix("").as_posix()
        faults += [fault | {"script": script} for fault in tomllib.loads(file.read_text("utf-8"))["fault"]]
    return faults


def plant(source: str, fault: dict) -> str:
    """The script's text with the fault in it."""
    count = source.count(fault["old"])
    if count != 1:
        raise ValueError(f"{fault['script']}: {fault['name']}: the old text occurs {count} times, not once")
    if fault["old"] == fault["new"]:
        raise ValueError(f"{fault['script']}: {fault['name']}: old and new text are the same")
    return source.replace(fault["old"], fault["new"])


def copy_repository(folder: Path) -> None:
    """Scripts and tests as copies, with what Python has compiled of them; the rest as links."""
    for path in ROOT.iterdir():
        if path.name in ("tests", "lecture", "__pycache__"):
            shutil.copytree(path, folder / path.name)
        elif path.is_file():
            shutil.copy2(path, folder)
        elif not path.name.startswith("."):
            (folder / path.name).symlink_to(path)


def call_pytest(tests: list[str], folder: str, quick: bool) -> int:
    """pytest's exit code; what it says goes to a file in the folder."""
    import pytest

    options = "-x -q -n 0 -p no:cacheprovider -p no:unraisableexception"
    words = shlex.split(" ".join([options, f"--basetemp {folder}/runs_of_tests", *tests]))
    streams = {number: os.dup(number) for number in (1, 2)}
    sys.stdout.flush()
    with open(f"{folder}/said", "w") as said:
        for number in streams:
            os.dup2(said.fileno(), number)
        code = pytest.main([*words, "-m", "not slow" if quick else ""])
        sys.stdout.flush()
    for number, before in streams.items():
        os.dup2(before, number)
    return int(code)


def run(fault: dict, quick: bool) -> tuple[int, float, str]:
    """pytest's exit code, the seconds it took, and what it said. What it imported from the copy is forgotten."""
    import pytest

    begin = time.time()
    with tempfile.TemporaryDirectory(prefix="fault_") as folder:
        copy_repository(Path(folder))
        if "old" in fault:
            script = Path(folder, f"{fault['script']}.py")
            script.write_text(plant(script.read_text("utf-8"), fault), "utf-8")
            signal.signal(signal.SIGALRM, lambda *_: pytest.exit("too long", TIMEOUT))
            signal.alarm(LONGEST)
        os.chdir(folder)
        os.environ["TMPDIR"] = tempfile.tempdir = folder  # where the tests of this fault leave their runs
        code = call_pytest(fault["tests"], folder, quick)
        signal.alarm(0)
        words = Path("said").read_text("utf-8", errors="replace")
        os.chdir(ROOT)
    tempfile.tempdir = None
    del os.environ["TMPDIR"]
    sys.path[:] = [path for path in sys.path if not path.startswith(folder)]
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(folder):
            del sys.modules[name]
    return code, time.time() - begin, words


def outcome(code: int, quick: bool) -> str:
    """What pytest's exit code says of a fault. 5: nothing was run, and that may be because all its tests are slow."""
    if code == 0 or (code == 5 and quick):
        return "LIVED"
    names = {1: "caught", TIMEOUT: "TIMEOUT"}
    return names.get(code, f"BROKEN: pytest ends with {code}, no test was run")


def main() -> int:
    """Plants the faults that are asked for; the exit code."""
    from rich.console import Console
    from rich.table import Table

    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--script", help="ppo, lecture/ppo, rloo, ...; by default all")
    parser.add_argument("--name", default="", help="only faults with this in their name")
    parser.add_argument("--test", default="", help="only faults with this in the names of their tests")
    parser.add_argument("--quick", action="store_true", help="without the tests that are marked as slow")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once")
    asked = parser.parse_args()
    faults = [f for f in read_faults() if asked.script in (None, f["script"]) and asked.name in f["name"]]
    faults = [f for f in faults if asked.test in " ".join(f["tests"])]
    for fault in faults:
        plant((ROOT / f"{fault['script']}.py").read_text("utf-8"), fault)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["HF_HUB_OFFLINE"] = "1"
    cache = tempfile.TemporaryDirectory(prefix="cache_of_faults_")  # shared by all, as in conftest.py
    os.environ["HF_HOME"] = os.environ["CACHE_OF_TESTS"] = cache.name
    sys.path.insert(0, "")
    control = sorted({test for fault in faults for test in fault["tests"]})
    code, seconds, words = run({"tests": control}, asked.quick)
    is_red = outcome(code, asked.quick) != "LIVED"
    print(
        f"without a fault {'RED' if is_red else 'green'}{seconds:6.0f} s", words[-3000:] if is_red else "", flush=True
    )
    gc.freeze()  # a process that collects garbage would copy all of what it was forked with
    table = Table("script", "fault", "", "s", title=f"{len(faults)} faults")
    results = []
    with multiprocessing.get_context("fork").Pool(asked.jobs, maxtasksperchild=1) as pool:
        for fault, (code, seconds, words) in zip(faults, pool.imap(partial(run, quick=asked.quick), faults)):
            result = outcome(code, asked.quick)
            results.append(result)
            if result != "caught":
                print(words[-3000:])
            print(f"{fault['script']:14s}{result:8s}{seconds:6.0f} s  {fault['name']}", flush=True)
            table.add_row(fault["script"], fault["name"], result, f"{seconds:.0f}")
    Console().print(table)
    caught = results.count("caught")
    print(f"{caught} of {len(faults)} caught{' by quick tests' if asked.quick else ''}")
    return int(is_red or caught < len(faults))


if __name__ == "__main__":
    sys.exit(main())
