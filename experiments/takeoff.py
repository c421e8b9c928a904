"""docs/findings/takeoff.md: what is kept of its runs, which take off, what foretells it, what a few seeds would show.

A run has taken off if more than half of its last answers are right: no guess reaches that.
"""

import math
import random
import statistics

from forks import train
from record import Run, by_name

UPDATES, BATCH = 80, 64
ARMS = ("GRPO", "batch's deviation", "Dr. GRPO", "leave one out", "MaxRL", "RFT")
LAST = 10  # updates at the end of a run, whose share of right answers is its outcome
SIGNS = {"right": "right answers so far", "worked": "worked out so far"}
SIGNS |= {"length": "length now", "entropy": "entropy now"}
GROUP = 4  # seeds of those who published a ranking


def look(names: dict, stats: dict[str, float]) -> dict[str, float]:
    """Of an update: how many answers are right, and worked out; tokens of an answer, and nats of a token."""
    return {
        "right": int(names["scores"].sum()),
        "worked": sum(len(text.split()) > 3 for text in names["texts"]),
        "length": round(stats["completions/mean_length"], 1),
        "entropy": round(-names["old_logprobs"][names["mask"]].mean().item(), 2),
    }


def measure(run: Run) -> dict:
    """Its curves."""
    updates, _ = train(run, look)
    return {"curves": {metric: [update[metric] for update in updates] for metric in updates[0]}}


def outcome(run: dict) -> float:
    """The share of right answers in the last updates (of batches of 64; as many answers of others)."""
    right = run["curves"]["right"]
    return sum(right[-LAST * len(right) // UPDATES :]) / (LAST * BATCH)


def arms() -> dict[str, list[dict]]:
    """The runs of each arm, of the seeds that all arms have."""
    runs = {arm: {run["seed"]: run for run in by_name("takeoff")[arm]} for arm in ARMS}
    common = sorted(set.intersection(*map(set, runs.values())))
    return {arm: [of[seed] for seed in common] for arm, of in runs.items()}


def sign(run: dict, name: str, update: int) -> float:
    """What one may read of a run after an update."""
    points = run["curves"][name]
    return sum(points[:update]) if name in ("right", "worked") else statistics.fmean(points[update - 5 : update])


def foretold(runs: dict[str, list[dict]], name: str, update: int) -> float:
    """How often, of two runs of an arm of which one will take off, that one shows more of the sign; ties count half."""
    pairs = []
    for of in runs.values():
        values = {True: [], False: []}
        for one in of:
            values[outcome(one) > 0.5].append(sign(one, name, update))
        pairs += [(x > y) + (x == y) / 2 for x in values[True] for y in values[False]]
    return statistics.fmean(pairs)


def rankings(a: list[float], b: list[float], draws: int = 10_000) -> tuple[float, float, float]:
    """Two groups run four seeds of A and of B each. How often do their means rank these in opposite ways, how often
    does a group's 95 % interval leave out 0, and how often does it do so for the one that is worse?"""
    from scipy.stats import t

    rng = random.Random(1)
    margin = t.ppf(0.975, GROUP - 1) / math.sqrt(GROUP)  # in standard deviations
    opposite, shown, wrong = 0, 0, 0
    is_lower = statistics.fmean(b) < statistics.fmean(a)
    for _ in range(draws):
        gaps = []
        for _ in range(2):
            differences = [y - x for x, y in zip(rng.choices(a, k=GROUP), rng.choices(b, k=GROUP))]
            gaps.append(statistics.fmean(differences))
            if abs(gaps[-1]) > margin * statistics.stdev(differences):
                shown += 1
                wrong += (gaps[-1] > 0) == is_lower
        opposite += gaps[0] * gaps[1] < 0
    return opposite / draws, shown / draws / 2, wrong / draws / 2
