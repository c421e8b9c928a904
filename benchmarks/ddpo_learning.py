"""Learning: reward, gold score and KL of ddpo.py on the world of shapes, over several seeds.

    python benchmarks/ddpo_learning.py                  # five seeds; six minutes on two CPU cores
    python benchmarks/ddpo_learning.py --work FOLDER    # keeps the runs there, and draws those that are there already

The chart shows mean and range over the seeds. (TRL's trainer is compared step by step, in tests/test_ddpo.py.)
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from learning import COLOURS, band, run_process
from throughput import RESULTS, ROOT, figure_of

METRICS = {
    "reward_mean": "reward: ink on the left less ink on the right",
    "objective/gold_scores": "gold score: still the shape that was asked for",
    "objective/kl": "KL to the first model, nats an image",
}


def run(seed: int, work: Path) -> list[dict]:
    """The metrics of one run."""
    output = work / f"ddpo-{seed}"
    if not (output / "model_index.json").exists():
        gold = ROOT / "toy/shapes/make.py:same_shape"
        command = [sys.executable, ROOT / "ddpo.py", "--seed", seed, "--gold-reward-fn", gold, "--output-dir", output]
        run_process([str(word) for word in command], work / f"ddpo-{seed}.log")
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    print(f"seed {seed}: {', '.join(f'{name} {lines[-1][name]:.3g}' for name in METRICS)}", flush=True)
    return lines


def main() -> None:
    """Runs all, draws, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="1,2,3,4,5", help="with commas between them")
    parser.add_argument("--work", type=Path, help="folder for the runs, which then stay there")
    parser.add_argument("--output", type=Path, default=RESULTS / "learning-ddpo.png", help="the chart")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ddpo-learning-") as folder:
        work = args.work or Path(folder)
        work.mkdir(parents=True, exist_ok=True)
        runs = [run(int(seed), work) for seed in args.seeds.split(",")]
    figure, axes = figure_of(1, len(METRICS), 11, 3)
    print("| metric | first epoch | last epoch |\n|---|---:|---:|")
    for panel, (name, title) in zip(axes[0], METRICS.items()):
        x, y = band(runs, "epoch", name)
        panel.plot(x, y.mean(0), color=COLOURS["ours"])
        panel.fill_between(x, y.min(0), y.max(0), color=COLOURS["ours"], alpha=0.2, linewidth=0)
        panel.set_title(title, fontsize=10), panel.set_xlabel("epochs", fontsize=9)
        ends = [[lines[i][name] for lines in runs] for i in (0, -1)]
        spread = lambda values: statistics.stdev(values) if len(values) > 1 else 0.0
        print(f"| {name} | {' | '.join(f'{statistics.fmean(v):.3g} ± {spread(v):.2g}' for v in ends)} |")
    axes[0, 1].set_ylim(0, 1)
    figure.savefig(args.output, dpi=100)


if __name__ == "__main__":
    main()
