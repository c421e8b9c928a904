"""Runs of the scripts, in this process or as a user starts them, and what they leave."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import ModuleType

from sources import ROOT

GOLD = "toy/make.py:gold_score"


def run(module: ModuleType, output: Path | str, **settings) -> list[dict]:
    """Trains in this process; returns the lines of metrics.jsonl. An empty folder makes way for that of the run."""
    with suppress(OSError):
        Path(output).rmdir()
    if hasattr(module.Args, "num_sample_generations"):
        settings = {"num_sample_generations": 0} | settings
    settings = {"device": "cpu"} | settings
    module.train(module.Args(output_dir=str(output), **settings))
    return lines_of(output)


def lines_of(output: Path | str) -> list[dict]:
    """What a run has logged."""
    text = Path(output, "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def untimed(lines: list[dict]) -> list[dict]:
    """Metrics without those that depend on the clock."""
    clocks = ("time/", "perf/", "eps")
    return [{name: x for name, x in line.items() if not name.startswith(clocks)} for line in lines]


def command(script: str, **settings) -> list[str]:
    """The words of a command line, "ppo" and settings as in Args."""
    words = [sys.executable, str(ROOT / f"{script}.py")]
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, (tuple, list)):
            words += [f"--{flag}", *map(str, value)]
        else:
            words += [f"--{flag}", str(value)]
    return words


def start(script: str, before: str = "", **settings) -> subprocess.Popen:
    """A run as a process of its own, on a CPU; `before` is Python that is executed in it first."""
    words = command(script, device="cpu", **settings)
    if before:
        program = f"import runpy, sys; sys.argv = {words[1:]!r}\n{before}\nrunpy.run_path(sys.argv[0], run_name='__main__')"
        words = [sys.executable, "-c", program]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, env=environment, cwd=ROOT)
