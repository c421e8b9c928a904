"""What to watch: five runs of ppo.py that go wrong, each beside one that does not, on the metric that shows it.

    python experiments/watch.py      # seven runs, forty seconds each on one thread; goes on where it stopped

What comes out: results/watch.json, to which each run is added as it ends, and docs/watch.png, drawn from it. A run whose
flags have changed is made again. To make all of them again, delete the file.
"""

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
from common import LEARNED, ROOT, describe_machine, describe_ours, figure_of
from learning import run_process
from tables import OTHERS, OURS

OUTPUT = LEARNED / "watch.json"
FIGURE = ROOT / "docs/watch.png"
SEED = 1
SCORE, GOLD = "objective/scores", "rewards/gold_score/mean"
COMMON = f"--dataset-test-split none --total-episodes 1280 --seed {SEED} --missing-eos-penalty 0"
FAST = "--learning-rate 1e-3"  # at which a lack of KL shows within so few episodes


class Row(NamedTuple):
    """A row of the figure: what goes wrong, the flags of that run and of the one beside it, and two panels."""

    title: str
    wrong: str
    right: str
    result: str  # the score; the gold score where the two runs have different rewards
    metric: str  # the metric that shows the fault
    bound: float  # of its healthy values, as in docs/ppo.md
    scale: str = "linear"


ROWS = [
    Row("KL is too cheap", f"{FAST} --kl-coef 0", FAST, SCORE, "objective/kl", 50),
    Row("the learning rate is too high", "--learning-rate 1e-2", "", SCORE, "policy/approxkl_avg", 0.1, "log"),
    Row(
        "the reward does not tell responses apart",
        "--reward-fn rewards/verifiers.py:tagged",
        "",
        GOLD,
        "objective/scores_std",
        0,
    ),
    Row("responses never end", "--response-length 24", "", SCORE, "val/eos_share", 0.5),
    Row("the critic does not learn", "--critic-learning-rate 1e-9", "", SCORE, "val/explained_variance", 0),
]
METRICS = [SCORE, GOLD, *(row.metric for row in ROWS)]


def command_of(flags: str) -> str:
    """The command line of a run, which logs the gold score beside its reward."""
    if "--reward-fn" not in flags:
        flags = f"{flags} --reward-fn reward_model".strip()
    return f"python ppo.py {COMMON} {flags} toy/make.py:gold_score --reward-weights 1 0"


def run(flags: str) -> dict:
    """The metrics of a run, update by update."""
    command = command_of(flags)
    with tempfile.TemporaryDirectory(prefix="watch-") as folder:
        output = Path(folder, "run")
        start = time.perf_counter()
        run_process([sys.executable, *shlex.split(command)[1:], "--output-dir", str(output)], Path(folder, "log"))
        seconds = round(time.perf_counter() - start)
        updates = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    metrics = {name: [round(update[name], 5) for update in updates] for name in METRICS}
    return {
        "flags": flags,
        "command": command,
        "seconds": seconds,
        "episode": [update["episode"] for update in updates],
        **metrics,
    }


def draw(runs: list[dict]) -> None:
    """A row of panels for each fault: what came out, and what shows it. Dotted: the bound of healthy values."""
    by_flags = {run["flags"]: run for run in runs}
    blue, orange = OURS, OTHERS
    figure, axes = figure_of(len(ROWS), 2, 8, 11)
    for row, panels in zip(ROWS, axes):
        for panel, metric in zip(panels, (row.result, row.metric)):
            for flags, colour in ((row.right, blue), (row.wrong, orange)):
                lines = by_flags[flags]
                panel.plot(lines["episode"], lines[metric], color=colour, label=flags or "the default")
            panel.set_ylabel(metric, fontsize=8)
        panels[0].set_title(row.title, fontsize=10, loc="left", weight="bold")
        panels[1].axhline(row.bound, color="black", linewidth=0.8, linestyle=":")
        panels[1].set_yscale(row.scale)
        panels[1].legend(frameon=False, fontsize=7, loc="lower left", bbox_to_anchor=(0, 1), borderpad=0)
    for panel in axes[-1]:
        panel.set_xlabel("responses sampled", fontsize=8)
    figure.savefig(FIGURE, dpi=100)


def main() -> None:
    """Makes the runs that are missing, and draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="only say how many runs are missing")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the runs
    all_flags = dict.fromkeys(flags for row in ROWS for flags in (row.right, row.wrong))
    runs = json.loads(OUTPUT.read_text())["runs"] if OUTPUT.exists() else []
    runs = [run for run in runs if run["flags"] in all_flags]
    results = {"command": "python experiments/watch.py", **describe_ours(ROOT), "date": time.strftime("%Y-%m-%d")}
    results |= {"machine": describe_machine(), "seed": SEED, "runs": runs}
    there = {run["flags"] for run in runs}
    wanted = [flags for flags in all_flags if flags not in there]
    print(f"{len(wanted)} runs, about {len(wanted) / 2:.0f} minutes")
    if args.list:
        return
    for number, flags in enumerate(wanted, 1):
        print(f"run {number} of {len(wanted)}: {command_of(flags)}", flush=True)
        runs.append(run(flags))
        OUTPUT.write_text(json.dumps(results) + "\n")
    draw(runs)


if __name__ == "__main__":
    main()
