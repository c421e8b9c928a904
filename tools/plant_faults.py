"""Plants faults in a script, one at a time, and prints those that no test sees.

    python tools/plant_faults.py ppo.py tests/test_additions.py tests/test_parity.py --number 50 --seed 1
    python tools/plant_faults.py ppo.py tests/test_loss.py --function policy_loss    # whatever can be turned in there
    python tools/plant_faults.py ppo.py tests -m "slow or not slow"                  # other flags are pytest's

A fault is a small change somewhere in the syntax tree: an operator turned, a constant changed, arguments exchanged, a
keyword argument, a sign or a statement left out. Each is planted in a copy of the repository, where the tests run until
one fails, for at most ten minutes. Some faults change nothing (`max(1, n)` where n is always larger), so look at each
one that lived.
"""

import ast
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from copy import copy
from multiprocessing.pool import ThreadPool
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
import datasets  # noqa: E402, F401 (imported once, for all processes)
import diffusers  # noqa: E402, F401
import pytest  # noqa: E402
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification  # noqa: E402, F401

ROOT = Path(__file__).resolve().parent.parent
TURNED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.And: ast.Or,
    ast.Or: ast.And, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
SAID = ("print", "warn", "tqdm", "require", "check")  # calls whose texts are for people


def turn(node):
    """Other texts for a node of the syntax tree."""

    def changed(**fields):
        other = copy(node)
        vars(other).update(fields)
        return ast.unparse(other)

    match node:
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.AugAssign(op=op) if type(op) in TURNED:
            yield changed(op=TURNED[type(op)]())
        case ast.Compare(ops=[op]):
            yield changed(ops=[TURNED[type(op)]()])
        case ast.UnaryOp(operand=operand):
            yield ast.unparse(operand)
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield str(value + 1 if isinstance(value, int) or not value else 2 * value)
        case ast.IfExp(test=test):
            yield changed(test=ast.UnaryOp(ast.Not(), test))
        case ast.Call(args=args, keywords=keywords):
            for i in range(len(args) - 1):
                yield changed(args=[*args[:i], args[i + 1], args[i], *args[i + 2 :]])
            for i in range(len(keywords)):
                yield changed(keywords=keywords[:i] + keywords[i + 1 :])
            if isinstance(node.func, ast.Attribute) and not keywords and len(args) < 2:
                yield ast.unparse(node.func.value)
    if isinstance(node, (ast.Expr, ast.AugAssign, ast.Continue, ast.Break)):
        yield "pass"


def faults(text, function):
    """(line, old text, new text of the file) of all faults, in one function or in all."""
    tops = [top for top in ast.parse(text).body if getattr(top, "name", "Args") != "Args"]
    todo = [node for top in tops for node in ast.walk(top) if isinstance(node, ast.FunctionDef)]
    lines = text.encode().splitlines(keepends=True)
    place = lambda line, column: sum(map(len, lines[: line - 1])) + column  # noqa: E731
    while todo:
        node = todo.pop()
        if isinstance(node, ast.FunctionDef) and function not in (None, node.name):
            continue
        name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        children = node.body if isinstance(node, ast.FunctionDef) else ast.iter_child_nodes(node)
        todo += [x for x in children if not isinstance(x, (ast.FunctionDef, ast.JoinedStr)) and name not in SAID]
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not hasattr(node, "end_lineno") or is_text or isinstance(node, ast.FunctionDef) or name in SAID:
            continue
        old = ast.unparse(node)
        begin, end = place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset)
        for new in turn(node):
            new = f"({new})" if isinstance(node, ast.expr) else new
            whole = text.encode()
            yield node.lineno, f"{old}  ->  {new}", (whole[:begin] + new.encode() + whole[end:]).decode()


def run_tests(folder, options):
    """Exits with pytest's code. It prints nothing."""
    os.chdir(folder)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    os._exit(pytest.main(["-x", "-q", "-n", "0", "-p", "no:cacheprovider", *options]))


def fails(script, text, options):
    """Whether tests fail in a copy of the repository where the script has this text."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT, f"{folder}/x", ignore=shutil.ignore_patterns(".*", "runs", "models", "__pycache__"))
        file = Path(folder, "x", script)
        file.write_text(text, "utf-8")
        process = multiprocessing.get_context("fork").Process(target=run_tests, args=(file.parent, options))
        process.start()
        process.join(600)
        process.kill()
        process.join()
        return process.exitcode != 0


def main():
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("script")
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--function", help="plant in this function alone, everything that can be turned")
    parser.add_argument("--number", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    args, options = parser.parse_known_args()
    text = (ROOT / args.script).read_text("utf-8")
    drawn = list(faults(text, args.function))
    if not args.function:
        lines = sorted({line for line, *_ in drawn})  # a line with many places is as likely as one with few
        chance = random.Random(args.seed)
        lines = chance.sample(lines, min(args.number, len(lines)))
        drawn = [chance.choice([fault for fault in drawn if fault[0] == line]) for line in lines]

    if fails(args.script, text, args.tests + options):
        sys.exit("error: tests fail without a fault")

    def lives(fault):
        line, change, planted = fault
        is_seen = fails(args.script, planted, args.tests + options)
        print("seen" if is_seen else "LIVES", f"{args.script}:{line}", change, flush=True)
        return not is_seen

    with ThreadPool(args.jobs) as pool:
        alive = sum(pool.map(lives, drawn, chunksize=1))
    print(f"{len(drawn) - alive} of {len(drawn)} faults were seen")


if __name__ == "__main__":
    main()
