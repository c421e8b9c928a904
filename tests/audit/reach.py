"""A plugin of pytest that writes down which lines of the repository each test executes, and how long it takes.

A line of JSON per test, in the folder of $REACH. What a fixture executes counts for all tests that use it. Of the
processes that a test starts, nothing is known but that it starts some.
"""

import json
import os
import re
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = re.compile("reward_model|ppo|rloo|grpo|ddpo|dpo|sft")
seen = set()  # (code object, line) since the test began
starts_processes = False
of_fixtures = defaultdict(set)  # the same, by fixture
seconds = defaultdict(float)  # by test
found = []


@cache
def file_of(name: str) -> str | None:
    """A file of the repository, but not of the tests; None for any other. A copy of a script counts as the script."""
    path = ROOT / name
    if path.is_relative_to(ROOT / "tests"):
        return None
    if path.is_relative_to(ROOT) and path.exists():
        return path.relative_to(ROOT).as_posix()
    return path.name if NAMES.fullmatch(path.stem) else None


def see(frame, event: str, arg):
    """Called by Python for each call of a function: has it call `see_line` for each line of a function of ours."""
    return see_line if file_of(frame.f_code.co_filename) else None


def see_line(frame, event: str, arg):
    """Called by Python for each line."""
    seen.add((frame.f_code, frame.f_lineno))
    return see_line


def listen(event: str, args: tuple) -> None:
    """Called by Python for each audited event: looks for processes of Python, not for those of git."""
    global starts_processes
    starts_processes |= event == "os.fork" or event == "subprocess.Popen" and "python" in str(args[:2])


sys.addaudithook(listen)


def fixtures_of(item) -> list[tuple]:
    """The fixtures of a test, with the scripts that the test names: a fixture may run another script for each."""
    names = tuple(sorted(set(NAMES.findall(item.name))))
    return [(fixture, names) for all_of in item._fixtureinfo.name2fixturedefs.values() for fixture in all_of[-1:]]


@pytest.hookimpl(hookwrapper=True)
def pytest_fixture_setup(fixturedef, request):
    """What a fixture executes."""
    before = set(seen)
    seen.clear()
    yield
    of_fixtures[fixturedef, tuple(sorted(set(NAMES.findall(request.node.name))))] |= seen
    seen.update(before)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    """What a test executes."""
    global starts_processes
    seen.clear()
    starts_processes = False
    sys.settrace(see)
    yield
    sys.settrace(None)
    own = set(seen)
    for key in fixtures_of(item):
        fixture = key[0]
        value = fixture.cached_result[0] if fixture.cached_result else None
        if fixture.scope in ("module", "session") and callable(value):  # it may keep what its first call returned
            of_fixtures[key] |= own
    found.append((item, own, starts_processes))


def pytest_runtest_logreport(report) -> None:
    """How long a test takes, with the fixtures that it is the first to use."""
    seconds[report.nodeid] += report.duration


def pytest_sessionfinish() -> None:
    """Writes what was seen, in this process of pytest."""
    if found:
        with open(Path(os.environ["REACH"], f"{os.getpid()}.jsonl"), "w") as file:
            for item, own, starts in found:
                lines = defaultdict(set)
                for code, line in own.union(*(of_fixtures[key] for key in fixtures_of(item))):
                    lines[file_of(code.co_filename)].add(line)
                lines = {name: sorted(some) for name, some in lines.items()}
                about = {"id": item.nodeid, "seconds": seconds[item.nodeid], "starts": starts, "lines": lines}
                print(json.dumps(about), file=file)
