"""Writes a function that several scripts share from one script into the others.

    python tools/sync.py encode                   # from ppo.py into each script that has a function of this name
    python tools/sync.py encode --script sft.py   # from sft.py
    python tools/sync.py --all                    # all functions of ppo.py that stand behind its mark

tests/test_scripts.py fails while the copies differ.
"""

import argparse
import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = sorted(ROOT.glob("[a-z]*.py"))
MARK = "the same text in all scripts"


def definitions(text: str) -> dict[str, tuple[int, int]]:
    """The first line, counted from 0, and the line after the last one, of each function and class."""
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    starts = {node.name: min([node.lineno, *(x.lineno for x in node.decorator_list)]) - 1 for node in nodes}
    return {node.name: (starts[node.name], node.end_lineno) for node in nodes}


def shared(text: str) -> list[str]:
    """The names of the functions behind the mark."""
    line = text[: text.index(MARK)].count("\n")
    return [name for name, (start, _) in definitions(text).items() if start > line]


def copy(name: str, source: str, target: str) -> str:
    """The target with the source's text of a function."""
    start, end = definitions(source)[name]
    own_start, own_end = definitions(target)[name]
    lines = target.splitlines(keepends=True)
    lines[own_start:own_end] = source.splitlines(keepends=True)[start:end]
    return "".join(lines)


def main() -> None:
    """Rewrites the scripts whose copies differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="*", help="a function or class at the top of the script")
    parser.add_argument("--script", default="ppo.py", help="the script that has the text")
    parser.add_argument("--all", action="store_true", help="all functions behind the script's mark")
    args = parser.parse_args()
    source = (ROOT / args.script).read_text("utf-8")
    names = shared(source) if args.all else args.name
    for file in SCRIPTS:
        old = new = file.read_text("utf-8")
        for name in set(names) & definitions(old).keys():
            new = copy(name, source, new)
        if new != old:
            file.write_text(new, "utf-8")
            print(f"written: {file.name}")


if __name__ == "__main__":
    main()
