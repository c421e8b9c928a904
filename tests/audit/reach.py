"""A plugin of pytest that writes down which functions of the repository each test calls, and how long the test takes.

A line of JSON per test, in the folder of $REACH. What a fixture calls counts for all tests that use it. A test that
starts processes of Python is said to call every function of the scripts that it names, or of all scripts.
"""

import json
import os
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = re.compile("reward_model|ppo|rloo|grpo|ddpo|dpo|sft")
seen = set()  # code objects that were called since the begin of the test
starts_processes = False
of_fixtures = defaultdict(set)  # code objects, by fixture
seconds = defaultdict(float)  # by test
lines = []


def see(frame, event: str, arg) -> None:
    """Called by Python for each call of a function. Returns nothing, so that no line of the function is traced."""
    seen.add(frame.f_code)


def listen(event: str, args: tuple) -> None:
    """Called by Python for each audited event: looks for processes of Python, not for those of git."""
    global starts_processes
    starts_processes |= event == "os.fork" or event == "subprocess.Popen" and "python" in str(args[:2])


sys.addaudithook(listen)


def fixtures_of(item) -> list[tuple]:
    """The fixtures of a test, with the scripts that the test names: `run` is another one for ppo than for sft."""
    names = tuple(sorted(set(NAMES.findall(item.name))))
    return [(fixture, names) for all_of in item._fixtureinfo.name2fixturedefs.values() for fixture in all_of[-1:]]


@pytest.hookimpl(hookwrapper=True)
def pytest_fixture_setup(fixturedef, request):
    """What a fixture calls."""
    before = set(seen)
    seen.clear()
    yield
    of_fixtures[fixturedef, tuple(sorted(set(NAMES.findall(request.node.name))))] |= seen
    seen.update(before)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    """What a test calls."""
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
    lines.append({"id": item.nodeid, "item": item, "own": own, "starts": starts_processes})


def pytest_runtest_logreport(report) -> None:
    """How long a test takes, with the fixtures that it is the first to use."""
    seconds[report.nodeid] += report.duration


def function_of(code) -> str | None:
    """FILE NAME of a function of the repository, a method as Class.method; None of any other."""
    path = ROOT / code.co_filename
    if path.is_relative_to(ROOT) and path.exists():
        file = path.relative_to(ROOT).as_posix()
    elif NAMES.fullmatch(path.stem):  # a copy of a script counts as the script
        file = path.name
    else:
        return None
    return f"{file.removesuffix('.py')} {code.co_qualname.split('.<locals>')[0]}"


def pytest_sessionfinish() -> None:
    """Writes what was seen, in this process of pytest."""
    if lines:
        with open(Path(os.environ["REACH"], f"{os.getpid()}.jsonl"), "w") as file:
            for line in lines:
                codes = line["own"].union(*(of_fixtures[key] for key in fixtures_of(line["item"])))
                called = sorted(filter(None, set(map(function_of, codes))))
                found = {"id": line["id"], "seconds": seconds[line["id"]], "starts": line["starts"], "called": called}
                print(json.dumps(found), file=file)
