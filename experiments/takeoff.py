"""What decides a run? Six ways to weigh answers, from a start that is seldom right, over many seeds.

    python experiments/takeoff.py --seeds 100          # 600 runs of 4 CPU seconds; goes on where it stopped
    python experiments/takeoff.py --sweep 30           # 30 seeds of each setting that might raise the share
    python experiments/takeoff.py --seeds 100 --list   # only says how many are missing
    python experiments/takeoff.py --seeds 0            # only writes tables and pictures

The start is toy/shells/sft, fine-tuned once more, on texts that mostly give no answer: it seldom guesses, and works out
the steps still more seldom. A run has taken off if more than half of its last answers are right: no guess reaches that.

What comes out: results/takeoff.jsonl, to which each run is added as it ends, and what docs/takeoff.md shows of it.
"""

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import random
import runpy
import statistics
import sys
import time

from forks import LEARNED, ROOT, describe_ours, put_tables, run
from tables import figure_of, markdown
from tqdm import tqdm

OUTPUT = LEARNED / "takeoff.jsonl"
PAGE = ROOT / "docs/takeoff.md"
START = ROOT / "runs/takeoff/start"
GRPO = "lecture/grpo.py"
UPDATES, BATCH = 80, 64
TEXTS, ANSWERED = 1300, 0.04  # of the fine-tuning: their number, and the share that gives an answer
ARMS = {  # name -> flags
    "GRPO": "",
    "batch's deviation": "--scale-rewards batch",
    "Dr. GRPO": "--scale-rewards none --loss-type dr_grpo",
    "leave one out": "--scale-rewards none",  # times G / (G - 1)
    "MaxRL": "--scale-rewards mean",
    "RFT": "--baseline none",
}
SWEEP = {  # what might raise the share of runs that take off, beside GRPO: name -> flags
    "groups of 4": "--num-generations 4",
    "groups of 16": "--num-generations 16",
    "batches of 32": "--batch-size 32",
    "batches of 128": "--batch-size 128",
    "half the learning rate": "--learning-rate 3.5e-4",
    "twice the learning rate": "--learning-rate 1.4e-3",
    "temperature .8": "--temperature 0.8",
    "temperature 1.25": "--temperature 1.25",
    "four passes": "--num-ppo-epochs 4",
    "four passes, clipped above at 1.28": "--num-ppo-epochs 4",
    "no reward for under 6 tokens": "",
}
MEAN = "group_advantages(scores, G, args.scale_rewards)"
CHANGES = {  # what no flag of the short file says: name -> text, and what stands in its place
    "leave one out": (MEAN, f"G / (G - 1) * {MEAN}"),
    "four passes, clipped above at 1.28": ("1 + cliprange)", "1.28)"),
    "no reward for under 6 tokens": (MEAN, MEAN.replace("scores", "scores * (mask.sum(1) > 5)", 1)),
}
LAST = 10  # updates at the end of a run, whose share of right answers is its outcome
GROUP = 4  # seeds of those who published a ranking
WHEN = (5, 10, 20, 30, 40, 50)  # updates after which an outcome is foretold
SIGNS = {
    "right": "right answers so far",
    "worked": "worked out so far",
    "length": "length now",
    "entropy": "entropy now",
}
COLOURS = ("#444444", "#b58900", "#3b6ea8", "#8e5ba6", "#c0563f", "#5b8c3e")


def make_start() -> None:
    """Fine-tunes the policy that all runs start from, unless it is there."""
    if START.exists():
        return
    shells = runpy.run_path(str(ROOT / "toy/shells/make.py"))
    rng = random.Random(9)
    lines = []
    for _ in range(TEXTS):
        row = shells["make_row"](rng)
        answer = row["answer"] if rng.random() < ANSWERED else "--"
        lines.append(json.dumps({"prompt": row["prompt"], "completion": f" #### {answer}"}) + "\n")
    data = START.parent / "texts"
    data.mkdir(parents=True)
    (data / "train.jsonl").write_text("".join(lines))
    flags = f"--model {ROOT}/toy/shells/sft --dataset {data} --output-dir {START} --learning-rate 1e-3 --batch-size 32"
    run("lecture/sft.py", (ROOT / "lecture/sft.py").read_text("utf-8"), flags.split(), lambda *_: {})


def look(names: dict, stats: dict[str, float]) -> dict[str, float]:
    """Of an update: how many answers are right, and worked out; tokens of an answer, and nats of a token."""
    worked = sum(len(text.split()) > 3 for text in names["texts"])
    entropy = -names["old_logprobs"][names["mask"]].mean().item()
    length = stats["completions/mean_length"]
    return {
        "right": int(names["scores"].sum()),
        "worked": worked,
        "length": round(length, 1),
        "entropy": round(entropy, 2),
    }


def measure(key: tuple[str, str, int]) -> dict:
    """A run: its curves."""
    arm, flags, seed = key
    source = (ROOT / GRPO).read_text("utf-8")
    source = source.replace(*CHANGES.get(arm, ("", "")))
    flags = f"--model {START} --total-episodes {UPDATES * BATCH} --response-length 12 --seed {seed} {flags}"
    start = time.process_time()
    with contextlib.redirect_stdout(None):
        updates, _ = run(GRPO, source, flags.split(), look)
    found = {"arm": arm, "seed": seed, "flags": flags.partition(f" --seed {seed} ")[2]}
    found |= {"cpu_seconds": round(time.process_time() - start, 1)}
    return found | {metric: [update[metric] for update in updates] for metric in updates[0]}


def read_record() -> list[dict]:
    """The runs."""
    return [json.loads(line) for line in OUTPUT.read_text().splitlines()] if OUTPUT.exists() else []


# ---------------------------------------------------------------------------------------------------------------------
# What comes out


def outcome(run: dict) -> float:
    """The share of right answers in the last updates (of batches of 64; as many answers of others)."""
    last = LAST * len(run["right"]) // UPDATES
    return sum(run["right"][-last:]) / (LAST * BATCH)


def by_arm(record: list[dict]) -> dict[str, dict[int, dict]]:
    """Arm -> seed -> run, of the seeds that all arms have."""
    runs = {arm: {run["seed"]: run for run in record if run["arm"] == arm} for arm in ARMS}
    common = sorted(set.intersection(*map(set, runs.values())))
    return {arm: {seed: of[seed] for seed in common} for arm, of in runs.items()}


def error(values: list[float]) -> float:
    """The standard error of their mean."""
    return statistics.stdev(values) / math.sqrt(len(values))


def shares_table(runs: dict) -> str:
    """Of each arm: how many runs take off, and how many more than of GRPO's; when; and what a table of means says."""
    heads = ["", "take off", "share", "less GRPO's, paired", "half right after", "right in the end"]
    lines = [heads, ["---", *["---:"] * 5]]
    off = {arm: [float(outcome(run) > 0.5) for run in of.values()] for arm, of in runs.items()}
    for arm, of in runs.items():
        n, share = len(of), statistics.fmean(off[arm])
        differences = [x - y for x, y in zip(off[arm], off["GRPO"])]
        paired = f"{statistics.fmean(differences):+.2f} ± {error(differences):.2f}".replace("-", "−")
        ends = [outcome(run) for run in of.values()]
        times = [half(run) for run, is_off in zip(of.values(), off[arm]) if is_off]
        lines.append([arm, f"{sum(off[arm]):.0f} of {n}", f"{share:.2f} ± {math.sqrt(share * (1 - share) / n):.2f}"])
        lines[-1] += ["" if arm == "GRPO" else paired, f"{statistics.median(times):.0f} updates" if times else "–"]
        lines[-1].append(f"{statistics.fmean(ends):.2f} ± {statistics.stdev(ends):.2f}")
    return markdown(lines)


def half(run: dict) -> int:
    """The update after which the answers of five updates are first half right."""
    return next(x for x in range(5, UPDATES + 1) if sum(run["right"][x - 5 : x]) >= 2.5 * BATCH)


def sign(run: dict, name: str, update: int) -> float:
    """What one may read of a run after an update."""
    return sum(run[name][:update]) if name in ("right", "worked") else statistics.fmean(run[name][update - 5 : update])


def foretold(runs: dict, name: str, update: int) -> float:
    """How often, of two runs of an arm of which one will take off, that one shows more of the sign; ties count half."""
    pairs = []
    for of in runs.values():
        values = {True: [], False: []}
        for one in of.values():
            values[outcome(one) > 0.5].append(sign(one, name, update))
        pairs += [(x > y) + (x == y) / 2 for x in values[True] for y in values[False]]
    return statistics.fmean(pairs)


def signs_table(runs: dict) -> str:
    """How well each sign foretells the outcome after so many updates: .5 is no better than chance."""
    lines = [["after", *(f"{update} updates" for update in WHEN)], ["---", *["---:"] * len(WHEN)]]
    for name, text in SIGNS.items():
        lines.append([text, *(f"{foretold(runs, name, update):.2f}" for update in WHEN)])
    return markdown(lines)


def rankings(a: list[float], b: list[float], draws: int = 10_000) -> tuple[float, float, float]:
    """Two groups run four seeds of A and of B each. How often do their means rank these in opposite ways, how often
    does a group's 95 % interval leave out 0, and how often does it do so for the one that is worse?"""
    from scipy.stats import t

    rng = random.Random(1)
    errors = t.ppf(0.975, GROUP - 1)  # on each side of the mean
    opposite, shown, wrong = 0, 0, 0
    is_lower = statistics.fmean(b) < statistics.fmean(a)
    for _ in range(draws):
        gaps = []
        for _ in range(2):
            differences = [y - x for x, y in zip(rng.choices(a, k=GROUP), rng.choices(b, k=GROUP))]
            gap = statistics.fmean(differences)
            gaps.append(gap)
            if abs(gap) > errors * error(differences):
                shown += 1
                wrong += (gap > 0) == is_lower
        opposite += gaps[0] * gaps[1] < 0
    return opposite / draws, shown / draws / 2, wrong / draws / 2


def rankings_table(runs: dict) -> str:
    """Each arm beside GRPO."""
    heads = [
        "beside GRPO",
        "two groups rank in opposite ways",
        "a group's 95 % interval leaves out 0",
        "the wrong way round",
    ]
    lines = [heads, ["---", *["---:"] * 3]]
    ends = {arm: [outcome(run) for run in of.values()] for arm, of in runs.items()}
    for arm in list(ends)[1:]:
        lines.append([arm, *(f"{100 * share:.0f} %" for share in rankings(ends["GRPO"], ends[arm]))])
    return markdown(lines)


def sweep_table(record: list[dict]) -> str:
    """Of each setting: how many runs take off. Other batches are not paired with GRPO's, whose seeds are all here."""
    heads = ["", "take off", "share", "right in the end"]
    lines = [heads, ["---", *["---:"] * 3]]
    for arm in ("GRPO", *SWEEP):
        ends = [outcome(run) for run in record if run["arm"] == arm]
        n, count = len(ends), sum(end > 0.5 for end in ends)
        share = count / n
        lines.append([arm, f"{count} of {n}", f"{share:.2f} ± {math.sqrt(share * (1 - share) / n):.2f}"])
        lines[-1].append(f"{statistics.fmean(ends):.2f} ± {statistics.stdev(ends):.2f}")
    return markdown(lines)


TABLES = {"takeoff": shares_table, "takeoff-signs": signs_table, "takeoff-rankings": rankings_table}


def tables(record: list[dict]) -> dict[str, str]:
    """All that the page has."""
    runs = by_arm(record)
    return {name: table(runs) for name, table in TABLES.items()} | {"takeoff-sweep": sweep_table(record)}


def draw_outcomes(runs: dict) -> None:
    """Each run's outcome; all runs of GRPO; and how soon an outcome can be foretold."""
    figure, axes = figure_of(1, 3, 13, 3.6)
    rng = random.Random(1)
    for place, (of, colour) in enumerate(zip(runs.values(), COLOURS)):
        ends = [outcome(run) for run in of.values()]
        axes[0, 0].plot([place + rng.uniform(-0.3, 0.3) for _ in ends], ends, ".", color=colour, alpha=0.6)
        axes[0, 0].plot([place - 0.35, place + 0.35], [statistics.fmean(ends)] * 2, color="black", linewidth=1)
    axes[0, 0].set_xticks(range(len(runs)), [arm.replace(" ", "\n", 1) for arm in runs], fontsize=8)
    axes[0, 0].set_title("right answers in the end, a dot a run; line: mean", fontsize=10)
    for one in runs["GRPO"].values():
        shares = [sum(one["right"][x - 5 : x]) / (5 * BATCH) for x in range(5, UPDATES + 1)]
        axes[0, 1].plot(range(5, UPDATES + 1), shares, linewidth=0.6, color="#c0563f" if outcome(one) > 0.5 else "0.7")
    axes[0, 1].set_title("right answers, GRPO, a line a run", fontsize=10)
    for (name, text), colour in zip(SIGNS.items(), COLOURS):
        x = range(5, UPDATES + 1, 5)
        axes[0, 2].plot(x, [foretold(runs, name, update) for update in x], color=colour, label=text)
    axes[0, 2].axhline(0.5, color="0.8", linewidth=1)
    axes[0, 2].set_title("how often a sign tells which of two runs takes off", fontsize=10)
    axes[0, 2].legend(frameon=False, fontsize=8)
    for axis in axes[0, 1:]:
        axis.set_xlabel("updates", fontsize=9)
    figure.savefig(ROOT / "docs/questions-takeoff.png", dpi=100)


def draw_coin(groups: int = 200_000, G: int = 8) -> None:
    """A policy of one parameter, right with probability p = sigmoid(theta): by what each way to scale multiplies the
    gradient of p, and the variance of the estimate. Lines by formula, points from groups of answers."""
    import torch

    sys.path.append(str(ROOT))
    from grpo import group_advantages

    generator = torch.Generator().manual_seed(1)
    figure, axes = figure_of(1, 2, 9, 3.6)
    points = torch.tensor([0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 0.99])
    p = torch.linspace(0.005, 0.995, 199)
    weights = {"none": torch.ones_like(p), "group": (p * (1 - p)) ** -0.5, "mean": 1 / p}
    texts = {"none": "1 (none)", "group": "1/√(p(1 − p)) (group)", "mean": "1/p (mean)"}
    measured = {name: [] for name in (*weights, "no baseline", "the group's mean", "leave one out")}
    for x in points:
        right = (torch.rand(groups, G, generator=generator) < x).float()  # (groups, G)
        slopes = right - x  # d log pi / d theta
        for scale in weights:
            advantages = group_advantages(right.flatten(), G, scale).view(-1, G)
            measured[scale].append((advantages * slopes).mean() / (x * (1 - x)))
        centred = right - right.mean(1, keepdim=True)
        for name, advantages in {
            "no baseline": right,
            "the group's mean": centred,
            "leave one out": centred * G / (G - 1),
        }.items():
            measured[name].append(G * (advantages * slopes).mean(1).var() / (x * (1 - x)))
    for (scale, line), colour in zip(weights.items(), COLOURS[2:]):
        axes[0, 0].plot(p, line, color=colour, label=texts[scale])
        axes[0, 0].plot(points, measured[scale], "o", color=colour, markersize=4)
    axes[0, 0].set_yscale("log"), axes[0, 0].set_ylim(0.5, 200)
    axes[0, 0].set_title("weight of a prompt; points: groups of eight", fontsize=10)
    for (name, line), colour in zip(
        {"no baseline": (1 - p) ** 2, "the group's mean": None, "leave one out": (1 - 2 * p) ** 2}.items(), COLOURS[2:]
    ):
        if line is not None:
            axes[0, 1].plot(p, line, color=colour)
        axes[0, 1].plot(points, measured[name], "o", color=colour, markersize=4, label=name)
    axes[0, 1].set_title("variance of one answer's gradient, over p(1 − p)", fontsize=10)
    for axis in axes[0]:
        axis.set_xlabel("p, the chance of a right answer", fontsize=9), axis.legend(frameon=False, fontsize=8)
    figure.savefig(ROOT / "docs/questions-coin.png", dpi=100)


def main() -> None:
    """Makes the runs that are missing, and writes tables and pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=100, help="of each arm")
    parser.add_argument("--sweep", type=int, default=0, help="seeds of each setting that might raise the share")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, one thread each")
    parser.add_argument("--list", action="store_true", help="only say how many runs are missing")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}  # before torch is imported
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    there = {(run["arm"], run["flags"], run["seed"]) for run in read_record()}
    wanted = [("before", "--learning-rate 0", seed) for seed in (1, 2)]
    wanted += [(arm, flags, seed) for seed in range(1, args.seeds + 1) for arm, flags in ARMS.items()]
    wanted += [(arm, flags, seed) for seed in range(1, args.sweep + 1) for arm, flags in SWEEP.items()]
    missing = [key for key in wanted if key not in there]
    print(f"{len(missing)} runs, about {len(missing) * 4 / 60 / args.jobs:.0f} minutes")
    if args.list:
        return
    if missing:
        make_start()
    origin = {**describe_ours(ROOT), "date": time.strftime("%Y-%m-%d")}
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool, open(OUTPUT, "a") as file:
        for found in tqdm(pool.imap_unordered(measure, missing), total=len(missing), disable=False):
            print(json.dumps(found | origin, separators=(",", ":")), file=file, flush=True)
    record = read_record()
    runs = by_arm(record)
    put_tables(PAGE, tables(record))
    draw_outcomes(runs)
    draw_coin()


if __name__ == "__main__":
    main()
