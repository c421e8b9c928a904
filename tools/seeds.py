"""Is it better? Compares two programs, or two settings of one, over the same seeds.

  1. run      each side with seeds 1, 2, ..., `--jobs` runs at once; a run that exists is not repeated
  2. pair     per seed and metric, d = B - A at the end of the runs: what the seed does to both sides cancels
  3. judge    mean of d, its standard error sd(d) / sqrt(n), and Student's 95 % confidence interval

  python tools/seeds.py lecture/ppo.py lecture/fork.py --seeds 10
  python tools/seeds.py grpo.py "grpo.py --scale-rewards none --loss-type dr_grpo" --seeds 10 --jobs 2

An interval without 0 has a star: the difference is significant. (Of twenty metrics without a difference, one gets a
star by chance, so choose the metric before the runs.) The last column is the number of seeds that detect a difference
of this size in four of five experiments, (1.96 + .84)^2 (sd(d) / d)^2 by the normal distribution.

A side is a script that takes --seed and --output-dir, with its flags. Each run saves its metrics in a file named after
the script and a digest of the command, the script, and the files in its flags. So a changed fork or a changed reward
runs again, and the original does not.
"""

import argparse
import contextlib
import hashlib
import io
import json
import math
import multiprocessing
import os
import re
import runpy
import shlex
import signal
import statistics
import sys
import tempfile
import traceback
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from tqdm import tqdm

LAST = 5  # a run's result is its mean over the last updates
PANELS = 4  # of the picture, if no metrics are named


class Run(NamedTuple):
    """A command, its seed, and the file of its metrics."""

    command: str
    seed: int
    file: Path


def plan(command: str, seeds: int, folder: Path) -> list[Run]:
    """The runs of a side."""
    words = shlex.split(command)
    files = [Path(part) for word in words for part in re.split("[=:]", word)]  # the script, and files of file.py:name
    texts = [file.read_bytes() for file in files if file.is_file()]
    digest = hashlib.sha256(b"".join(texts) + command.encode()).hexdigest()[:8]
    name = f"{Path(words[0]).stem}-{digest}"
    return [Run(command, seed, folder / f"{name}-{seed}.jsonl") for seed in range(1, seeds + 1)]


def train(run: Run) -> None:
    """Makes a run and writes its metrics, one line per update. A short file's metrics are what it logs to W&B."""
    script, *flags = shlex.split(run.command)
    lines = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()), "run")
        argv = [script, *flags, "--seed", str(run.seed), "--output-dir", str(folder)]
        stack.enter_context(mock.patch("sys.argv", argv))
        stack.enter_context(mock.patch("sys.path", [str(Path(script).resolve().parent), *sys.path]))
        # So that Ctrl-C ends the run with an error: a script that handles it ends as if the run were complete
        stack.enter_context(mock.patch("signal.getsignal", return_value=signal.SIG_IGN))
        stack.enter_context(
            mock.patch.multiple("wandb", init=mock.DEFAULT, log=lambda stats, **_: lines.append(dict(stats)))
        )
        said = io.StringIO()
        stack.enter_context(contextlib.redirect_stdout(said))
        stack.enter_context(contextlib.redirect_stderr(said))
        try:
            runpy.run_path(script, run_name="__main__")
        except (SystemExit, Exception) as error:
            print(error.code if isinstance(error, SystemExit) else traceback.format_exc())
            sys.exit("\n".join(said.getvalue().strip().splitlines()[-20:]))
        if (folder / "metrics.jsonl").exists():
            lines = read(folder / "metrics.jsonl")
    if not lines:
        sys.exit("It logged no metrics, neither in metrics.jsonl nor by wandb.log")
    part = run.file.with_suffix(".part")
    part.write_text("".join(json.dumps(line) + "\n" for line in lines))
    part.rename(run.file)  # only a complete file gets this name


def make(runs: list[Run], jobs: int) -> None:
    """Makes some runs at once, each in a process of its own, since sides may have different modules of one name. If one
    fails, the others end, too."""
    context = multiprocessing.get_context("spawn")
    waiting, running = list(reversed(runs)), {}
    try:
        with tqdm(total=len(runs), disable=False) as bar:
            while waiting or running:
                while waiting and len(running) < jobs:
                    run = waiting.pop()
                    process = context.Process(target=train, args=(run,))
                    process.start()
                    running[process.sentinel] = process, run
                for sentinel in wait(list(running)):
                    process, run = running.pop(sentinel)
                    process.join()
                    if process.exitcode:
                        sys.exit(f"error: `{run.command} --seed {run.seed}` failed with status {process.exitcode}")
                    bar.update()
    finally:
        for process, _ in running.values():
            process.terminate()


def read(file: Path) -> list[dict[str, float]]:
    """The metrics of a run's updates."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def end(lines: list[dict[str, float]], metric: str) -> float | None:
    """The mean of a metric over those of the last updates that have it; None if none has it."""
    values = [line[metric] for line in lines[-LAST:] if line.get(metric) is not None]
    return statistics.fmean(values) if values else None


def judge(a: list[float], b: list[float]) -> dict[str, float]:
    """Statistics of B - A over paired seeds.

    >>> {name: round(x, 2) for name, x in judge([1, 2, 3], [2, 4, 6]).items()}
    {'difference': 2.0, 'error': 0.58, 'low': -0.48, 'high': 4.48, 'higher': 3, 'needed': 2}
    """
    from scipy.stats import norm, t

    differences = [y - x for x, y in zip(a, b, strict=True)]
    n, mean, spread = len(differences), statistics.fmean(differences), statistics.stdev(differences)
    error = spread / math.sqrt(n)
    margin = t.ppf(0.975, n - 1) * error
    found = {"difference": mean, "error": error, "low": mean - margin, "high": mean + margin}
    found["higher"] = sum(d > 0 for d in differences)
    needed = ((norm.ppf(0.975) + norm.ppf(0.8)) * spread / mean) ** 2 if mean else math.inf
    return found | {"needed": max(2, math.ceil(needed)) if math.isfinite(needed) else math.inf}


def compare(runs: tuple[list, list], metrics: list[str]) -> dict[str, tuple[list[float], list[float]]]:
    """Maps each metric to its results for the seeds of A and of B. Without names, these are all metrics that both log
    and that differ."""
    names = metrics or [name for name in runs[0][0][-1] if not name.startswith(("perf/", "eps"))]
    found = {name: tuple([end(lines, name) for lines in side] for side in runs) for name in names}
    if metrics:
        unknown = [name for name, (a, b) in found.items() if None in a + b]
        return found if not unknown else sys.exit(f"not in all runs: {unknown}")
    return {name: (a, b) for name, (a, b) in found.items() if None not in a + b and a != b}


def show(ends: dict[str, tuple[list[float], list[float]]]) -> None:
    """Prints the table."""
    from rich.box import MARKDOWN
    from rich.console import Console
    from rich.table import Table

    table = Table("metric", "A", "B", "B − A", "95 % interval", "B higher", "seeds needed", box=MARKDOWN)
    for name, (a, b) in ends.items():
        found = judge(a, b)
        sides = [f"{statistics.fmean(x):.4g} ± {statistics.stdev(x):.2g}" for x in (a, b)]
        star = " *" if found["low"] > 0 or found["high"] < 0 else ""
        table.add_row(
            name,
            *sides,
            f"{found['difference']:+.3g} ± {found['error']:.2g}",
            f"{found['low']:+.3g} to {found['high']:+.3g}{star}",
            f"{found['higher']} of {len(a)}",
            f"{found['needed']}",
        )
    Console(width=200).print(table)


def draw(runs: tuple[list, list], commands: list[str], metrics: list[str], file: Path) -> None:
    """Draws each metric against updates: the mean over seeds, plus and minus one standard error. A run of one update is
    a point."""
    from matplotlib.figure import Figure

    figure = Figure((4.5 * len(metrics), 3.4), layout="constrained")
    axes = figure.subplots(1, len(metrics), squeeze=False)[0]
    for axis, metric in zip(axes, metrics):
        for side, command, colour in zip(runs, commands, ("0.5", "C3")):
            rows = zip(*([line.get(metric) for line in lines] for lines in side))
            points = [(x, row) for x, row in enumerate(rows, 1) if None not in row]
            means = [statistics.fmean(row) for _, row in points]
            errors = [statistics.stdev(row) / math.sqrt(len(row)) for _, row in points]
            x = [x for x, _ in points]
            axis.plot(x, means, "o" if len(x) == 1 else "-", color=colour, label=command)
            bounds = [[m + sign * e for m, e in zip(means, errors)] for sign in (-1, 1)]
            axis.fill_between(x, *bounds, color=colour, alpha=0.2, linewidth=0)
        axis.set_title(metric, fontsize=10)
        axis.set_xlabel("update")
    axes[0].legend(frameon=False, fontsize=7)
    figure.savefig(file, dpi=120)


def main() -> None:
    """Makes the missing runs, and compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sides", nargs=2, metavar="FILE", help="A and B: scripts, or a script with flags in quotes")
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds, at least two")
    parser.add_argument("--jobs", type=int, default=1, help="number of runs at once; they share the cores")
    parser.add_argument("--metrics", nargs="+", default=[], help="metrics to show; by default all")
    parser.add_argument("--output-dir", type=Path, default=Path("runs/seeds"))
    args = parser.parse_args()
    if args.seeds < 2 or args.jobs < 1 or args.sides[0] == args.sides[1]:
        parser.error("at least two seeds and one job are needed, and two different sides")
    for side in args.sides:
        try:
            words = shlex.split(side)
        except ValueError as error:
            parser.error(f"{side}: {error}")
        if not words or not Path(words[0]).is_file():
            parser.error(f"{side!r} should begin with the path of a script")
        if {"--seed", "--output-dir"} & {word.partition("=")[0] for word in words}:
            parser.error(f"{side!r}: the seed and the folder of a run are set here")
    args.output_dir.mkdir(parents=True, exist_ok=True)
    sides = [plan(command, args.seeds, args.output_dir) for command in args.sides]
    missing = [run for pair in zip(*sides) for run in pair if not run.file.exists()]
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, os.cpu_count() // args.jobs)))  # before torch is imported
    os.environ["TQDM_DISABLE"] = "1"  # for the runs
    make(missing, args.jobs)
    runs = tuple([read(run.file) for run in side] for side in sides)
    ends = compare(runs, args.metrics)
    print(f"A: {args.sides[0]}\nB: {args.sides[1]}")
    if not ends:
        return print("All metrics are the same on both sides.")
    show(ends)
    print("± after a mean: standard deviation over seeds; after B − A: standard error. *: the interval has no 0 in it")
    picture = args.output_dir / f"{sides[0][0].file.stem[:-2]}-{sides[1][0].file.stem[:-2]}.png"
    draw(runs, args.sides, args.metrics or list(ends)[:PANELS], picture)
    print(f"curves: {picture}")


if __name__ == "__main__":
    main()
