"""Writes the tables and charts of README and docs from benchmarks/results/learning.jsonl.

    python benchmarks/tables.py            # what stands between <!-- NAME --> and <!-- /NAME -->, and the charts
    python benchmarks/tables.py --check    # only says which tables are not those of the results

A cell is the mean over the seeds ± their standard deviation; where there is one seed, its number.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

from learning import BY_MODEL, DEFAULTS, GOLD, PRICE, RUNS, SHAPES, Run, read_record

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "toy/README.md", ROOT / "benchmarks/README.md", *sorted((ROOT / "docs").glob("*.md"))]
Column = tuple[str, str, int]  # heading, metric, digits
SCORE = ("score", "end objective/scores", 2)
ENDS = [("gold score", "end objective/gold_scores", 2), ("KL", "end objective/kl", 1), ("EOS share", "end val/eos_share", 2)]
CPU = ("CPU seconds", "cpu_seconds", 0)
THEIRS = {"ppo": "TRL 0.16.1", "rloo": "TRL 0.16.1", "ddpo": "TRL 0.23"}  # the others: TRL 1.16
RECORD: dict[str, list[dict]] = {}  # name -> the runs of its seeds


def fill_record() -> None:
    """Reads the results."""
    RECORD.clear()
    for line in sorted(read_record(), key=lambda line: line["seed"]):
        RECORD.setdefault(line["run"], []).append(line)


def values(name: str, metric: str) -> list[float]:
    """A metric of the runs of a name: `end reward`, `start reward`, `answers gold`, `cpu_seconds`."""
    part, _, key = metric.partition(" ")
    runs = RECORD.get(name, [])
    return [run[part][key] if key else run[part] for run in runs if not key or key in run.get(part, {})]


def number(numbers: list[float], digits: int) -> str:
    """Mean ± standard deviation; a dash where there is nothing."""
    if not numbers:
        return "–"
    spread = f" ± {statistics.stdev(numbers):.{digits}f}" if len(numbers) > 1 else ""
    return f"{statistics.fmean(numbers):.{digits}f}{spread}".replace("-", "−")


def mean(name: str, metric: str, digits: int = 1) -> str:
    """The mean alone, for a sentence."""
    return number(values(name, metric), digits).split(" ± ")[0]


def table(heading: str, rows: dict[str, str], columns: list[Column], seeds: int | None = None) -> str:
    """Markdown: a row for each label -> name of a run. With `seeds`, of that many of its runs."""
    lines = [[heading, *(title for title, _, _ in columns)], ["---"] + ["---:"] * len(columns)]
    for label, name in rows.items():
        lines.append([label, *(number(values(name, metric)[:seeds], digits) for _, metric, digits in columns)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def default(script: str) -> str:
    """The name of its default run."""
    return Run(script, DEFAULTS[script]).name


def both(script: str) -> dict[str, str]:
    """The rows of ours and of TRL's."""
    return {f"`{script}.py`": default(script), THEIRS.get(script, "TRL 1.16"): f"TRL {default(script)}"}


def sweep(script: str, heading: str, rows: dict[str, str], columns: list[Column], own: str = "") -> str:
    """A table of label -> flags beside the default flags."""
    base = DEFAULTS[script]
    return table(heading, {label: f"{script} {base} {flags}".strip().replace("  ", " ") for label, flags in rows.items()}, columns)


def compare(runs: list[Run]) -> str:
    """For learning.py --compare."""
    fill_record()
    first = RECORD[runs[0].name][0]["curves"]
    columns = [(name, f"end {name}", 2) for name in list(first)[1:]]
    return table("", {run.name: run.name for run in runs}, columns)
