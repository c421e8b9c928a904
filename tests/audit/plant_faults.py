"""Plants faults in a file, one at a time, and prints those that no test sees.

    python tests/audit/plant_faults.py --script ppo --function gae             # whatever can be turned in this function
    python tests/audit/plant_faults.py --script ppo --sample 100 --seed 1      # a hundred drawn from the whole script
    python tests/audit/plant_faults.py --script sft --own --sample 50          # from what no other script has
    python tests/audit/plant_faults.py --listed                                # those of tests/audit/faults.toml

Faults are drawn from the syntax tree: two arguments of a call exchanged, a keyword argument dropped, an operator, a
comparison or a condition turned, a constant changed, a division, a sign or a method such as `detach` or `masked_fill`
removed, a statement left out. What no such operator would draw stands in tests/audit/faults.toml, by function and
expression.
A function that has the same text in several scripts is changed in all of them.

First the suite runs once, and tests/audit/reach.py writes down which lines each test executes. Then each fault is
tried in a copy of the repository, by a process forked from this one, which has imported the libraries: it runs the
tests that execute the line, up to the first that fails. Those that execute few lines come first; those that start
processes, which may execute any line, come last. In the end the tests that saw a fault run without one: a test that is
red anyway saw nothing. The exit code is 1 if a fault lived.
"""

import ast
import difflib
import hashlib
import importlib
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import suppress
from copy import copy
from multiprocessing import get_context
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]  # not that of sources.py, which the tests import from the copy
SCRIPTS = ["ppo", "rloo", "grpo", "dpo", "sft", "reward_model", "ddpo"]
SCRIPT = re.compile(r"reward_model|\b(?:ppo|rloo|grpo|ddpo|dpo|sft)\b")
COPIED = ("tests", "lecture", "tools", "rewards", "exercises")  # folders with Python

# --- Faults


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function that decide what it does: no annotations, and nothing that is only printed."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            called = ast.unparse(child.func) if isinstance(child, ast.Call) else ""
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                if called not in ("print", "tqdm", "warnings.warn"):
                    yield from walk(child)


TURNED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.And: ast.Or,
    ast.Or: ast.And, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
REMOVED = ("detach", "masked_fill", "abs", "clamp", "exp")


def changed(node: ast.AST, **fields) -> str:
    """The text of a node with other fields."""
    other = copy(node)
    vars(other).update(fields)
    return ast.unparse(other)


def turn(node: ast.AST, bound: set[str]) -> Iterator[str]:
    """Other texts for a node of a function that has bound these names before."""
    match node:
        case ast.BinOp(left=left, op=op) if type(op) in TURNED:
            yield changed(node, op=TURNED[type(op)]())
            if isinstance(op, (ast.Div, ast.FloorDiv)):
                yield ast.unparse(left)
        case ast.BoolOp(op=op):
            yield changed(node, op=TURNED[type(op)]())
        case ast.Compare(ops=[op]):
            yield changed(node, ops=[TURNED[type(op)]()])
        case ast.UnaryOp(operand=operand):
            yield ast.unparse(operand)
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield str(value + 1 if isinstance(value, int) or not value else 2 * value)
        case ast.IfExp(test=test):
            yield changed(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.Call(func=func, args=args, keywords=keywords):
            is_ordered = ast.unparse(func) not in ("max", "min", "torch.max")
            for i in range(len(args) - 1 if is_ordered else 0):
                yield changed(node, args=[*args[:i], args[i + 1], args[i], *args[i + 2 :]])
            for i in range(len(keywords)):
                yield changed(node, keywords=keywords[:i] + keywords[i + 1 :])
            if isinstance(func, ast.Attribute) and func.attr in REMOVED:
                yield ast.unparse(func.value)
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Continue() | ast.Break() | ast.Return(value=None):
            yield "pass"
        case ast.Assign(targets=[target]) if not isinstance(target, ast.Name) or target.id in bound:
            yield "pass"


def functions(text: str) -> dict[str, ast.stmt]:
    """The functions of a file, methods as Class.method, and the `loop` of a short file."""
    found = {}
    for top in ast.parse(text).body:
        for node in top.body if isinstance(top, ast.ClassDef) else [top]:
            if isinstance(node, (ast.FunctionDef, ast.For)):
                prefix = f"{top.name}." if node is not top else ""
                name = prefix + getattr(node, "name", "loop")
                if name == "loop" and "loop" in found and len(ast.unparse(node)) < len(ast.unparse(found[name])):
                    continue  # the longest is the training
                found[name] = node
    return found


def lines_of(text: str, node: ast.AST) -> str:
    return "".join(text.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno])


def edit(text: str, function: ast.FunctionDef, node: ast.AST, new: str) -> str | None:
    """The lines of the function with another text for a node; None if that is no Python, or nothing new."""
    lines = lines_of(text, function).encode().splitlines(keepends=True)
    place = lambda line, column: sum(map(len, lines[: line - function.lineno])) + column  # noqa: E731
    begin = place(node.lineno, node.col_offset)
    end = place(node.end_lineno, node.end_col_offset)
    whole = b"".join(lines)
    if isinstance(node, ast.expr) and not isinstance(ast.parse(new).body[0].value, (ast.Name, ast.Constant, ast.Call)):
        new = f"({new})"
    edited = (whole[:begin] + new.encode() + whole[end:]).decode()
    try:
        ast.parse("if True:\n" + edited if edited[0] == " " else edited)
    except SyntaxError:
        return None
    return edited if ast.unparse(node) != new else None


def place_of(function: ast.stmt, node: ast.AST) -> tuple[int, int]:
    """The lines of a node and of the beginning of its statement, counted from that of the function."""
    around = [x for x in ast.walk(function) if isinstance(x, ast.stmt) and x.lineno <= node.lineno <= x.end_lineno]
    return max(x.lineno for x in around) - function.lineno, node.end_lineno - function.lineno


def draw_faults(script: str, only: str | None) -> list[dict]:
    """All that can be turned in the functions of a script, or in one of them."""
    text = (ROOT / f"{script}.py").read_text("utf-8")
    faults = []
    for name, function in functions(text).items():
        if only not in (None, name):
            continue
        before = lines_of(text, function)
        fault = {"script": script, "name": name, "title": "", "old": before}
        names = {x.arg: x.lineno for x in ast.walk(function) if isinstance(x, ast.arg)}
        for x in ast.walk(function):
            if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store):
                names[x.id] = min(x.lineno, names.get(x.id, x.lineno))
        for node in walk(function):
            bound = {name for name, line in names.items() if line < getattr(node, "lineno", 0)}
            for new in turn(node, bound):
                edited = edit(text, function, node, new)
                if edited:
                    faults.append(fault | {"new": edited, "place": place_of(function, node)})
    return faults


def listed_faults() -> list[dict]:
    """Those of tests/audit/faults.toml that can be planted; says which cannot."""
    faults = []
    for fault in tomllib.loads((ROOT / "tests/audit/faults.toml").read_text("utf-8"))["fault"]:
        script, name = fault["at"].split()
        text = (ROOT / f"{script}.py").read_text("utf-8")
        function = functions(text).get(name, ast.Module([]))
        old = ast.unparse(ast.parse(fault["old"]))
        places = [x for x in ast.walk(function) if hasattr(x, "lineno") and ast.unparse(x) == old]
        edited = edit(text, function, places[0], fault["new"] or "pass") if places else None
        if edited is None:
            print(f"CANNOT BE PLANTED  {fault['at']}: {fault['name']}")
            continue
        place = place_of(function, places[0])
        before = lines_of(text, function)
        about = {"script": script, "name": name, "title": fault["name"], "place": place}
        faults.append(about | {"old": before, "new": edited})
    return faults


# --- Tests


def read_reach(marks: str) -> list[dict]:
    """Which lines each test executes. Runs the suite, minutes, unless it did so for the same files before."""
    files = sorted([*ROOT.glob("*.py"), *(file for folder in COPIED for file in ROOT.glob(f"{folder}/*.py"))])
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files) + marks.encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir(), f"reach_{digest}")
    if not folder.exists():
        print("the suite runs once, to see which lines each test executes", flush=True)
        unfinished = Path(tempfile.mkdtemp())
        variables = os.environ | {"REACH": str(unfinished), "PYTHONPATH": str(Path(__file__).parent)}
        command = [sys.executable, "-m", "pytest", "-p", "reach", "-m", marks]
        subprocess.run(command, cwd=ROOT, env=variables, check=False)
        unfinished.rename(folder)
    return [json.loads(line) for file in folder.iterdir() for line in file.read_text().splitlines()]


def tests_of(fault: dict, reach: list[dict], alone: bool) -> list[str]:
    """The tests that execute the line of a fault in its script, and those of other scripts that have its function,
    unless the same test was already asked for another script. Those that execute few lines come first."""
    found = {}  # a test without the name of its script -> the test
    for script in sorted(having(fault), key=lambda script: script != fault["script"]):
        text = (ROOT / f"{script}.py").read_text("utf-8")
        start = text[: text.index(fault["old"])].count("\n") + 1
        first, last = fault["place"]
        here = range(start + first, start + last + 1)
        chosen = []
        for test in reach:
            executed = test["lines"].get(f"{script}.py", [])
            file, _, name = test["id"].partition("::")
            may_execute = test["starts"] and not alone and script in (SCRIPT.findall(name) or SCRIPTS)
            if may_execute or any(line in here for line in executed):
                size = int(math.log2(1 + sum(map(len, test["lines"].values()))))
                chosen.append((test["starts"], size, file, test["seconds"], test["id"]))
        for *_, test in sorted(chosen):
            found.setdefault(SCRIPT.sub("*", test), test)
    return list(found.values())


class Watch:
    """Writes down the first test that fails."""

    def __init__(self, names: list[str]):
        self.names = names

    def pytest_collection_modifyitems(self, items: list) -> None:
        """Called by pytest with what it has found."""
        by_name = {item.nodeid: item for item in items}
        items[:] = [by_name[name] for name in self.names if name in by_name]

    def pytest_runtest_logreport(self, report) -> None:
        """Called by pytest after each test."""
        if report.failed:
            Path("seen_by").write_text(report.nodeid)


def work(folder: str, tests: list[str], marks: str) -> None:
    """In a process of its own: pytest in the copy; its exit code is the process's."""
    os.setpgrp()
    os.chdir(folder)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    sys.dont_write_bytecode = True
    said = os.open("said", os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(said, number)
    options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-p", "no:unraisableexception", "-m", marks]
    files = dict.fromkeys(name.partition("::")[0] for name in tests)
    os._exit(pytest.main([*options, "--basetemp", f"{folder}/of_tests", *files], plugins=[Watch(tests)]))


def having(fault: dict) -> list[str]:
    """The scripts with the text of a fault's function."""
    others = [] if fault["script"] not in SCRIPTS else SCRIPTS
    return [x for x in {fault["script"], *others} if fault["old"] in (ROOT / f"{x}.py").read_text("utf-8")]


def copy_repository(folder: Path, fault: dict) -> None:
    """Folders with Python as copies, since a program may write beside itself; the data as links."""
    for path in ROOT.iterdir():
        if path.name in COPIED:
            shutil.copytree(path, folder / path.name)
        elif path.is_file():
            shutil.copy2(path, folder)
        elif path.name not in (".git", "runs") and not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    for script in having(fault):
        file = folder / f"{script}.py"
        file.write_text(file.read_text("utf-8").replace(fault["old"], fault["new"], 1), "utf-8")


def try_fault(fault: dict, tests: list[str], marks: str, limit: float) -> dict:
    """Runs the tests of a fault, for `limit` seconds. What came of it: `result`, `seen_by`, and `seconds`."""
    since = time.time()
    folder = Path(tempfile.mkdtemp(prefix="fault_"))
    copy_repository(folder, fault)
    result = "NO TEST"
    for some in filter(None, (tests[:12], tests[12:])):  # few files are soon collected
        process = get_context("fork").Process(target=work, args=(str(folder), some, marks))
        process.start()
        process.join(max(1, limit - time.time() + since))
        is_late = process.is_alive()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what the tests started, too
        process.join()
        # 1: a test failed; 2: so did an import; 3 and 4: pytest itself did; negative: the process crashed
        result = {0: "LIVED", 3: "ERROR", 4: "ERROR", 5: "NO TEST"}.get(process.exitcode, "caught")
        result = "TIMEOUT" if is_late else result
        if result != "LIVED":
            break
    seen = folder / "seen_by"
    seen_by = seen.read_text() if seen.exists() else ""
    said = (folder / "said").read_text(errors="replace") if tests else ""
    shutil.rmtree(folder, ignore_errors=True)
    return fault | {"result": result, "seen_by": seen_by, "said": said, "seconds": time.time() - since}


def main() -> int:
    """Plants the faults that are asked for; the exit code."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--script", help="ppo, lecture/ppo, tools/evaluate, ...")
    parser.add_argument("--function", help="of this function alone; a method is Class.method")
    parser.add_argument("--own", action="store_true", help="of functions that no other script has")
    parser.add_argument("--sample", type=int, help="so many of them, drawn")
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    parser.add_argument("--listed", action="store_true", help="those of tests/audit/faults.toml")
    parser.add_argument("--alone", action="store_true", help="without tests that execute it only in other processes")
    parser.add_argument("--limit", type=float, default=400, help="seconds for the tests of a fault; then: TIMEOUT")
    parser.add_argument("--slow", action="store_true", help="the tests that are marked as slow, too")
    asked = parser.parse_args()
    if asked.listed:
        faults = [fault for fault in listed_faults() if asked.script in (None, fault["script"])]
    else:
        faults = draw_faults(asked.script, asked.function)
    if asked.own:
        faults = [fault for fault in faults if having(fault) == [asked.script]]
    if asked.sample and asked.sample < len(faults):
        faults = random.Random(asked.seed).sample(faults, asked.sample)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["HF_HUB_OFFLINE"] = "1"
    marks = "not real" if asked.slow else "not slow and not real"
    reach = read_reach(marks)
    cache = tempfile.TemporaryDirectory(prefix="cache_of_faults_")  # shared by all, as in tests/conftest.py
    os.environ["HF_HOME"] = os.environ["CACHE_OF_TESTS"] = cache.name
    sys.path.insert(0, str(ROOT))
    for script in SCRIPTS:  # and with it the libraries; the script itself is forgotten
        importlib.import_module(script)
        del sys.modules[script]
    sys.path.pop(0)
    results = []
    for fault in faults:
        tests = tests_of(fault, reach, asked.alone)
        fault = try_fault(fault, tests, marks, asked.limit)
        results.append(fault)
        place = fault["seen_by"] or (fault["said"].strip().splitlines() or [""])[-1][:90]
        name = f"{fault['script']} {fault['name']} {fault['title']}".strip()
        print(f"{fault['result']:8s}{fault['seconds']:5.0f} s {len(tests):4} tests  {name}  {place}", flush=True)
        if fault["result"] != "caught":
            lines = difflib.unified_diff(fault["old"].splitlines(), fault["new"].splitlines(), lineterm="", n=1)
            print(*list(lines)[2:], sep="\n")
    for test in sorted({fault["seen_by"] for fault in results if fault["seen_by"]}):
        control = try_fault({"script": "ppo", "old": "", "new": ""}, [test], marks, asked.limit)
        if control["result"] != "LIVED":
            print(f"RED WITHOUT A FAULT: {test}\n{control['said'][-2000:]}")
            results = [x | {"result": "unknown"} if x["seen_by"] == test else x for x in results]
    caught = sum(fault["result"] == "caught" for fault in results)
    print(f"{caught} of {len(results)} caught")
    return int(caught < len(results))


if __name__ == "__main__":
    sys.exit(main())
