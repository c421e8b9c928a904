"""Runs the grading in a process of its own, and writes the last lines of the report."""

import faulthandler
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from capstone import FILE


def pytest_addoption(parser):
    parser.addoption("--solutions", default=str(FILE), help="the file to grade, by default functions.py")
    parser.addoption("--seconds", default=30.0, type=float, help="time limit of an exercise")


def pytest_cmdline_main(config):
    """Grades in a second process, since a function may exit, crash, or never end.

    The second process writes what it is doing to a file, and removes it at the end; the first process reads it.
    """
    if "EXERCISE_UNDER_WAY" in os.environ:
        return None
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "under_way")
        command = [sys.executable, "-m", "pytest", *config.invocation_params.args]
        spin = {"GOMP_SPINCOUNT": "10000"}  # else waiting threads spin, which is slow on a busy machine
        process = subprocess.Popen(command, env=spin | os.environ | {"EXERCISE_UNDER_WAY": str(file)})
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the second process, which writes the report
        code = process.wait()
        if not file.exists():
            return code
        what, seconds, *stack = file.read_text("utf-8", "replace").splitlines()
    solutions = config.getoption("--solutions")
    own = [line.rpartition("line ")[2] for line in stack if f'"{solutions}"' in line]  # "30 in gae", innermost first
    place = f" (line {own[0]})" if own else ""
    happened = f"took more than {seconds} seconds{place}" if stack else f"ended Python with exit code {code}"
    print(f"\n{what} {happened}. The exercises after it are not graded.", file=sys.stderr)
    return 2


def begin(config, what: str, times: int = 1) -> None:
    """Writes what is under way to the file. At the time limit, the process appends its traceback and exits."""
    if file := os.environ.get("EXERCISE_UNDER_WAY"):
        seconds = times * config.getoption("--seconds")
        Path(file).write_text(f"{what}\n{seconds:g}\n", "utf-8")
        faulthandler.dump_traceback_later(seconds, exit=True, file=open(file, "a"))


def pytest_runtest_call(item):
    name = item.name.removeprefix("test_")
    if item.get_closest_marker("capstone"):
        begin(item.config, f"The {name}", times=20)
    else:
        begin(item.config, f"The exercise {name}")


def pytest_enter_pdb():
    """No time limit in the debugger."""
    faulthandler.cancel_dump_traceback_later()


def pytest_configure(config):
    config.option.reportchars = ""  # no second list of failures


@pytest.fixture(scope="session")
def student(request):
    """The functions of the graded file."""
    file = request.config.getoption("--solutions", str(FILE))
    begin(request.config, f"Reading {file}")
    try:
        return SimpleNamespace(**runpy.run_path(file))
    except (Exception, SystemExit) as error:
        pytest.exit(f"{file} cannot be read: {type(error).__name__}: {error}", returncode=2)


def names_of(config, outcome: str, file: str = "test_functions.py") -> list[str]:
    """The names of the exercises, or of another file's tests, with this outcome."""
    reports = config.pluginmanager.get_plugin("terminalreporter").stats.get(outcome, [])
    names = [report.nodeid.partition("::test_") for report in reports]
    return [name for path, _, name in names if Path(path).name == file]


def pytest_terminal_summary(terminalreporter, config):
    reports = [x for outcome in ("passed", "skipped") for x in terminalreporter.stats.get(outcome, [])]
    for result in (value for report in reports for key, value in report.user_properties if key == "result"):
        terminalreporter.write_line(result)
    outcomes = ("passed", "failed", "skipped")
    done, wrong, undone = (names_of(config, outcome) for outcome in outcomes)
    what, begin = "", f", {undone[0]} is the next" if undone else ""
    if wrong:
        begin = f", first mend {wrong[0]}"
    if not done + wrong + undone:  # -k capstone
        done, wrong, undone = (names_of(config, outcome, "test_training.py") for outcome in outcomes)
        what = "the capstone: "
    terminalreporter.section(f"{what}{len(done)} done, {len(wrong)} wrong, {len(undone)} not done yet{begin}")


def pytest_sessionfinish(session):
    """Sets the exit code to 1 if exercises are not done."""
    faulthandler.cancel_dump_traceback_later()
    if file := os.environ.get("EXERCISE_UNDER_WAY"):
        Path(file).unlink(missing_ok=True)
    files = "test_functions.py", "test_training.py"
    if session.exitstatus == 0 and any(names_of(session.config, "skipped", file) for file in files):
        session.exitstatus = 1
