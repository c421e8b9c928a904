"""Shared by all benchmarks and experiments: folders, descriptions of machine and revision, tables."""

import os
import platform
import shlex
import subprocess
from pathlib import Path

# Only the standard library here: this file is also imported in TRL's environments, by processes that must stay small.

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results"  # of speed and memory
LEARNED = ROOT / "experiments/results"


class BenchmarkError(SystemExit):
    """An error of the user, or two sides that did not do the same work. A program ends with its sentence."""


def require(condition: object, sentence: str) -> None:
    """Raises BenchmarkError with the sentence unless the condition holds."""
    if not condition:
        raise BenchmarkError(sentence)


def output_of(command: list[str]) -> str:
    """The output of a command; raises BenchmarkError with its error message if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    require(done.returncode == 0, f"`{shlex.join(command)}` failed: {done.stderr.strip()}")
    return done.stdout


def describe_machine() -> dict:
    """Name, processor (one name may cover several kinds), cores and memory. A caller with torch adds the GPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    pairs = (line.partition(":") for line in lines)
    core = {name.strip(): value.strip() for name, _, value in pairs}  # the last core
    cpu = core.get("model name", platform.processor())
    kind = f"family {core.get('cpu family')}, model {core.get('model')}{', AVX-512' if 'avx512f' in str(core) else ''}"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    machine = {"name": platform.node(), "cpu": cpu, "kind": kind, "cores": os.cpu_count()}
    return machine | {"memory_gb": round(memory, 1), "gpu": None}


def describe_ours(folder: Path) -> dict:
    """The commit, with -dirty if there are uncommitted changes outside the folders of results."""
    git = ["git", "-C", str(folder)]
    changes = output_of([*git, "status", "--porcelain", "--untracked-files=no", "--", ".", ":!*/results/*"])
    return {"commit": output_of([*git, "describe", "--always"]).strip() + ("-dirty" if changes else "")}


def markdown(lines: list[list[str]], align: str = "") -> str:
    """A table, whose first line is the heading. `align` has l or r for each column; by default only the first is l."""
    align = align or "l" + "r" * (len(lines[0]) - 1)
    rule = [{"l": "---", "r": "---:"}[letter] for letter in align]
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], rule, *lines[1:]])
