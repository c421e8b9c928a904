"""What the programs of this folder share: the runs of runs.toml, the records in results/, and the cells of tables.

A record is a file of JSON lines, results/GROUP.jsonl. Each line is a run: its name, seed, command, revision, date,
machine and CPU seconds, and what was measured (`start`, `end`, `curves` and so on).
"""

import hashlib
import json
import re
import statistics
import sys
import tomllib
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parent.parent / folder) for folder in ("", "benchmarks", "tools", "toy")]
from common import LEARNED, ROOT
from make_fork import read_diffs
from seeds import judge

RUNS = Path(__file__).resolve().with_name("runs.toml")
GOLD = "rewards/gold_score/mean"  # the metric of the toy world's gold score
LAST = 5  # updates at the end of a run whose mean is its result


@dataclass
class Run:
    """A training, of one seed."""

    group: str
    name: str
    seed: int
    command: list[str]  # a script with its flags, but for --seed and --output-dir
    options: dict = field(default_factory=dict)  # what else runs.toml says of it, and of its group

    @property
    def folder(self) -> Path:
        """Where it goes, relative to the project's folder."""
        name = re.sub(r"[^\w.]+", "-", self.name).strip("-")
        return Path("runs", self.group, f"{name}-{self.seed}")

    @property
    def digest(self) -> str:
        """It changes with the command, and with the diff or replacement that makes a fork of its script."""
        parts = [*self.command, diff_of(self), *self.options.get("replace", [])]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


@cache
def read_toml() -> dict[str, dict]:
    """The groups of runs.toml, with its {words} filled in. These may contain other words."""
    text = RUNS.read_text("utf-8")
    words = tomllib.loads(text)["words"]
    while any(f"{{{word}}}" in text for word in words):
        for word, meaning in words.items():
            text = text.replace(f"{{{word}}}", meaning)
    groups = tomllib.loads(text)
    groups.pop("words")
    return groups


def runs_of_group(group: str) -> list[Run]:
    """The runs of a group, seed by seed. A run without a command has one in its name: `ppo --kl-coef 0`."""
    shared = {name: x for name, x in read_toml()[group].items() if name not in ("runs", "needs")}
    found = []
    for entry in read_toml()[group]["runs"]:
        own = shared | entry
        script, _, flags = entry["run"].removeprefix("TRL ").partition(" ")
        words = own.get("command", f"{script}.py {flags}").split() + own.get("flags", "").split()
        of_script = own.get("flags_of", {}).get(script, {})
        words += of_script.get("flags", "").split()
        words += of_script.get("reward", "").split() if "--reward-fn" not in words else []
        seeds = own.get("seeds", 1)
        for seed in range(1, seeds + 1) if isinstance(seeds, int) else seeds:
            found.append(Run(group, entry["run"], seed, words, own))
    return sorted(found, key=lambda run: (run.options.get("last", False), run.seed))


def diff_of(run: Run) -> str:
    """The diff of its page that makes a fork of its script; most runs have none."""
    if "fork" not in run.options:
        return ""
    return read_diffs((ROOT / run.options["page"]).read_text("utf-8"))[run.options["fork"]]


def read_record(group: str) -> list[dict]:
    """The runs on record, by seed."""
    file = LEARNED / f"{group}.jsonl"
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []
    return sorted(lines, key=lambda line: line["seed"])


@cache
def by_name(group: str) -> dict[str, list[dict]]:
    """Maps each name to its runs on record. (The answers take long to read, and are not to be changed.)"""
    found = {}
    for line in read_record(group):
        found.setdefault(line["run"], []).append(line)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Cells and curves


def minus(text: str) -> str:
    """With a minus sign in place of a hyphen."""
    return text.replace("-", "−")


def number(values: list[float], digits: int, nothing: str = "–") -> str:
    """Mean ± standard deviation; without the latter for one value."""
    if not values:
        return nothing
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return minus(f"{statistics.fmean(values):.{digits}f}{spread}")


def difference(a: list[float], b: list[float], digits: int) -> str:
    """B - A, paired: mean ± standard error."""
    found = judge(a, b)
    return minus(f"{found['difference']:+.{digits}f} ± {found['error']:.{digits}f}")


def verdict(ours: dict[int, float], theirs: dict[int, float], digits: int) -> str:
    """The difference, by seed. It is shown if 0 lies outside Student's 95 % interval."""
    seeds = sorted(ours.keys() & theirs.keys())
    if len(seeds) < 2:
        return "–"
    sides = [[side[seed] for seed in seeds] for side in (theirs, ours)]
    found = judge(*sides)
    is_shown = found["low"] > 0 or found["high"] < 0
    return difference(*sides, digits) + ("" if is_shown else ", not shown")


def until(axis: list[float], points: list[float], goal: float, width: int = 3) -> float | None:
    """Where the mean of `width` neighbouring points first reaches the goal; None if it never does."""
    for i in range(width, len(points) + 1):
        if statistics.fmean(points[i - width : i]) >= goal:
            return axis[i - 1]
    return None


def reached(found: list[float | None], digits: int = 0) -> str:
    """A cell: where the seeds reached something, and how many did if not all."""
    there = [x for x in found if x is not None]
    if not there:
        return "never" if found else "–"
    return number(there, digits) + (f" ({len(there)} of {len(found)} seeds)" if len(there) < len(found) else "")


def smooth(points: list[float], width: int = 5) -> list[float]:
    """Means of neighbours."""
    return [statistics.fmean(points[i : i + width]) for i in range(len(points) - width + 1)]


def with_tables(page: str, tables: dict[str, str]) -> str:
    """The page with each table between its marks, <!-- name --> and <!-- /name -->, if it has them."""
    for name, table in tables.items():
        before, mark, rest = page.partition(f"<!-- {name} -->\n")
        if mark:
            page = f"{before}{mark}{table}\n{rest[rest.index(f'<!-- /{name} -->') :]}"
    return page
