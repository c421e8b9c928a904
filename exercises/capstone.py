"""The capstone: scripts of lecture/ train in the toy world, with your functions in place of theirs.

python -m pytest exercises        ends with it, for each script whose functions you have all written
python exercises/capstone.py      runs the original scripts (or those named after it) and saves their metrics in
                                  capstone.json, for comparison with yours

A student's folder has ppo.py, grpo.py and dpo.py beside this folder, without the functions that the exercises ask for.
"""

import ast
import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FILE = next(file for file in (HERE / "functions.py", ROOT / "functions.py") if file.exists())  # the second: a student's
OURS = HERE / "capstone.json"  # the metric after each update of our runs, a list for each seed
SEEDS = (1, 2, 3)  # on another processor, rounding acts like another seed
FOLDER = ROOT / "runs/capstone"  # for curves and trained models
RUNS = {  # the metric, its meaning, and settings for a run of less than half a minute
    "ppo": ("objective/scores", "the score", {"total_episodes": 1024}),
    "grpo": ("reward", "the share of right answers", {"total_episodes": 6400}),
    "dpo": ("rewards/margins", "the margin of chosen answers", {"num_train_epochs": 6, "batch_size": 32}),
}


def path_of(script: str) -> Path:
    """The file of a script."""
    file = ROOT / f"lecture/{script}.py"
    return file if file.parent.exists() else ROOT / file.name


def scripts() -> list[str]:
    """The scripts that exist."""
    return [script for script in RUNS if path_of(script).exists()]


def functions_of(text: str) -> list[str]:
    """The names of the functions that a text defines, or imports from functions.py."""
    nodes = ast.parse(text).body
    imported = [x.name for node in nodes if getattr(node, "module", "") == "functions" for x in node.names]
    return imported + [node.name for node in nodes if isinstance(node, ast.FunctionDef)]


def some_pairs() -> Path:
    """A folder with a few pairs of the toy world, so that half a minute of training is enough to fit them."""
    folder = FOLDER / "pairs"
    folder.mkdir(parents=True, exist_ok=True)
    lines = (ROOT / "toy/data/preferences/train.jsonl").read_text("utf-8").splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join(lines[:256]), "utf-8")
    return folder


def run(script: str, functions: dict, flags: list[str], on_update: Callable | None = None) -> dict:
    """Runs a script with these functions in place of its own; returns its variables.

    The script runs cell by cell, as in a notebook. Functions are replaced after the cell that defines or imports them.
    After each update `on_update` is called with the variables, the number of the update and its metrics.
    """
    file = str(path_of(script))
    text = path_of(script).read_text("utf-8")
    names = {"__file__": file, "__name__": "__main__"}
    lines = 0
    with patch.object(sys, "argv", [file, *flags]), patch("wandb.init"), patch("wandb.log") as log:
        if on_update:
            log.side_effect = lambda stats, step: on_update(names, step, stats)
        for cell in re.split("^(?=# %%)", text, flags=re.M):
            exec(compile("\n" * lines + cell, file, "exec"), names)
            names.update({name: functions[name] for name in functions_of(cell) if name in functions})
            lines += cell.count("\n")
    return names


def train(script: str, functions: dict, **settings) -> list[float]:
    """Trains with these functions for less than half a minute; returns the metric after each update."""
    metric, _, usual = RUNS[script]
    settings = usual | {"output_dir": Path(tempfile.mkdtemp(), script)} | settings
    if script == "dpo":
        settings["dataset"] = some_pairs()
    flags = [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return [line[metric] for line in run(script, functions, flags)["history"]]


def end_of(curve: list[float]) -> float:
    """The mean of the curve's last eighth, since a single batch is noisy."""
    last = curve[-max(1, len(curve) // 8) :]
    return sum(last) / len(last)


def verdict(script: str, curve: list[float], ours: list[list[float]]) -> tuple[bool, str]:
    """Whether a run improved by at least 70 % of what our worst run did, and a sentence about both."""
    ends = [end_of(own) for own in ours]
    change = f"took {RUNS[script][1]} from {curve[0]:.2f} to {end_of(curve):.2f}"
    sentence = f"your {script.upper()} {change}; ours ends between {min(ends):.2f} and {max(ends):.2f}, by seed"
    start = sum(own[0] for own in ours) / len(ours)
    return end_of(curve) - start > 0.7 * (min(ends) - start), sentence


def draw(script: str, curve: list[float], ours: list[list[float]]) -> Path:
    """Draws all curves; returns the file."""
    from matplotlib.figure import Figure

    figure = Figure((5, 3.2), layout="constrained")
    axis = figure.add_subplot()
    for own in ours:
        axis.plot(range(1, len(own) + 1), own, color="0.7", label="ours, by seed" if own is ours[0] else None)
    axis.plot(range(1, len(curve) + 1), curve, label="yours")
    axis.set(xlabel="update", ylabel=RUNS[script][0])
    axis.legend(frameon=False)
    FOLDER.mkdir(parents=True, exist_ok=True)
    file = FOLDER / f"{script}.png"
    figure.savefig(file, dpi=120)
    return file


if __name__ == "__main__":
    if not (ROOT / "lecture").exists():
        sys.exit("error: this folder has no scripts with functions of their own")
    curves = json.loads(OURS.read_text("utf-8"))
    for script in sys.argv[1:] or scripts():
        curves[script] = []
        for seed in SEEDS:
            curve = train(script, {}, seed=seed)
            curves[script].append([round(x, 2) for x in curve])
            print(f"{script}, seed {seed}: {RUNS[script][1]} from {curve[0]:.2f} to {end_of(curve):.2f}", flush=True)
        OURS.write_text(json.dumps(curves) + "\n", "utf-8")
