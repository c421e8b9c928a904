"""A museum of bugs that shipped in libraries. Each is planted in a short file, for you to find.

python exercises/bugs/play.py                      lists the bugs, with their symptoms
python exercises/bugs/play.py 3                    trains with and without number 3, a minute or two, and draws both
python exercises/bugs/play.py 3 --answer sample:90  is it in this function and line? (outside of functions: loop:300)
python exercises/bugs/play.py 3 --check            tests your repair
python exercises/bugs/play.py 3 --reveal           prints the change, where it shipped, and why it has these symptoms

The file with the bug is in runs/bugs/3. Repair it there, and `play.py 3` trains with your repair. The answers are in
bugs.toml, so do not open it before.
"""

import ast
import difflib
import json
import os
import sys
import tempfile
import tomllib
from argparse import ArgumentParser
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from functools import cache, partial
from pathlib import Path
from textwrap import fill
from unittest import mock

from checks import PROPERTIES, SMALL

ROOT = Path(__file__).resolve().parent.parent.parent
BUGS = tomllib.loads((Path(__file__).resolve().parent / "bugs.toml").read_text("utf-8"))["bug"]
FOLDER = ROOT / "runs/bugs"
RUNS = {  # settings for runs of half a minute at most
    "sft": {"num_lines": 4000},
    "reward_model": {"num_lines": 4000},
    "ppo": {"total_episodes": 1024},
    "rloo": {"total_episodes": 1024},
    "grpo": {"total_episodes": 3200},
    "dpo": {"num_lines": 256, "batch_size": 32, "num_train_epochs": 5},
}
DATA = {"sft": "sft", "reward_model": "preferences", "dpo": "preferences"}


def healthy(script: str) -> str:
    """The text of a short file."""
    return (ROOT / f"lecture/{script}.py").read_text("utf-8")


def plant(bug: dict) -> str:
    """The text of a short file with the bug in it."""
    text = healthy(bug["script"])
    for old, new in bug["edits"]:
        if text.count(old) != 1:
            raise ValueError(f"lecture/{bug['script']}.py has this text {text.count(old)} times, not once:\n{old}")
        text = text.replace(old, new)
    return text


def run(script: str, text: str, quiet: bool = False, **settings) -> dict:
    """Runs a short file; returns its variables, with the metrics in `history`.

    `num_lines` limits the data, since encoding all of them takes longer than these runs.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if lines := settings.pop("num_lines", None):
            data = (ROOT / f"toy/data/{DATA[script]}/train.jsonl").read_text("utf-8").splitlines(keepends=True)
            Path(folder, "train.jsonl").write_text("".join(data[:lines]), "utf-8")
            settings["dataset"] = folder
        settings = {"output_dir": f"{folder}/model"} | settings
        words = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        names = {"__name__": "__main__", "__file__": str(ROOT / f"lecture/{script}.py")}
        stack.enter_context(mock.patch.object(sys, "argv", [f"{script}.py", *words]))
        stack.enter_context(mock.patch.multiple("wandb", init=mock.DEFAULT, log=mock.DEFAULT))
        if quiet:
            nowhere = stack.enter_context(open(os.devnull, "w"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        exec(compile(text, f"{script}.py", "exec"), names)
    return names


def changed(before: str, after: str) -> list[int]:
    """The numbers of the lines that differ from the text before; if lines are missing, their neighbours' numbers."""
    matcher = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    parts = [part for part in matcher.get_opcodes() if part[0] != "equal"]
    return [line for _, _, _, first, end in parts for line in range(first + (end > first), max(end, first + 1) + 1)]


def place(text: str, line: int) -> str:
    """The top-level function that contains a line, or "loop"."""
    return next((node.name for node in functions(text) if node.lineno <= line <= node.end_lineno), "loop")


@cache
def functions(text: str) -> list[ast.FunctionDef]:
    """The top-level functions of a file."""
    return [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]


def judge(bug: dict, answer: str) -> str:
    """The reply to FUNCTION:LINE. A line is right if it is at most two lines off."""
    text = plant(bug)
    lines = changed(healthy(bug["script"]), text)
    function, _, line = answer.partition(":")
    if function not in {place(text, n) for n in range(1, 1 + text.count("\n"))}:
        return f"{bug['script']}.py has no function {function}; code outside of functions is called loop."
    if function not in {place(text, right) for right in lines}:
        return f"No, {function} is correct."
    if not line.isdigit() or all(abs(int(line) - right) > 2 for right in lines):
        return f"{function} is the right place, but not that line."
    return "Yes. Now repair it and use --check, or use --reveal."


def draw(ours: list[dict], theirs: list[dict], file: Path) -> None:
    """Draws all metrics of two runs, the healthy one in grey."""
    from matplotlib.figure import Figure

    figure = Figure((12, 2.4 * -(-len(ours[0]) // 3)), layout="constrained")
    for i, name in enumerate(ours[0]):
        axis = figure.add_subplot(-(-len(ours[0]) // 3), 3, i + 1, title=name)
        for history, style in ((ours, {"c": "0.8", "lw": 4, "label": "healthy"}), (theirs, {"label": "this file"})):
            axis.plot(range(1, len(history) + 1), [stats[name] for stats in history], **style)
    figure.axes[0].legend(frameon=False)
    figure.savefig(file, dpi=100)


def small(script: str, text: str, **settings) -> dict:
    """Makes a run of a second."""
    return run(script, text, quiet=True, **SMALL[script] | settings)


def check(script: str, text: str) -> list[str]:
    """The properties that fail, as sentences; if there are none, the numbers that differ from the healthy file's."""
    run_it = partial(small, script, text)
    sentences = [" ".join(holds.__doc__.split()) for holds in PROPERTIES[script] if not holds(run_it)]
    if not sentences:
        ours = small(script, healthy(script))["history"]
        for step, (a, b) in enumerate(zip(ours, run_it()["history"]), 1):
            far = [name for name in a if abs(a[name] - b[name]) > 1e-4 * max(1, abs(a[name]))]
            sentences += [
                f"All checks pass, but {n} of step {step} is {b[n]:.4g}; it should be {a[n]:.4g}." for n in far
            ]
    return sentences[:3]


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("number", nargs="?", type=int, help="which bug")
    parser.add_argument("--answer", metavar="FUNCTION:LINE", help="is it there?")
    parser.add_argument("--check", metavar="FILE", nargs="?", const="", help="test the file in runs/bugs, or another")
    parser.add_argument("--reveal", action="store_true", help="show the bug")
    args = parser.parse_args()
    if args.number not in range(1, len(BUGS) + 1):
        for number, bug in enumerate(BUGS, 1):
            print(f"{number:2d}  lecture/{bug['script']}.py: {bug['complaint']}")
        return
    bug = BUGS[args.number - 1]
    script = bug["script"]
    folder = FOLDER / str(args.number)
    file = Path(args.check or folder / f"{script}.py")
    if not file.exists() and not args.check:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(plant(bug), "utf-8")
    if args.answer:
        print(reply := judge(bug, args.answer))
        if reply.startswith("Yes"):
            flags = " ".join(f"--{name} {x}" for name, x in bug.get("flags", {}).items())
            print(f"What it does: python tools/trace.py {file} --against lecture/{script}.py {flags}")
    elif args.check is not None:
        print(
            "\n".join(check(script, file.read_text("utf-8")))
            or "All checks pass, and the numbers are those of the healthy file."
        )
    elif args.reveal:
        lines = difflib.unified_diff(
            healthy(script).splitlines(), plant(bug).splitlines(), f"lecture/{script}.py", "", n=1
        )
        print(
            "\n".join(lines),
            *(fill(" ".join(bug[key].split()), 100) for key in ("giveaway", "source", "why")),
            sep="\n\n",
        )
    else:
        settings = RUNS[script] | bug.get("flags", {})
        print(
            f"“{bug['complaint']}”\nTwo runs of {script}.py with {json.dumps(settings)}; the second is the healthy one."
        )
        theirs, ours = (run(script, text, **settings)["history"] for text in (file.read_text("utf-8"), healthy(script)))
        draw(ours, theirs, folder / "curves.png")
        print(f"\nThe curves: {folder}/curves.png\nThe file:   {file}\nWhere is it? --answer FUNCTION:LINE")
        print("(outside of functions loop:LINE; if a line is missing, the one that should follow it)")


if __name__ == "__main__":
    main()
