"""docs/findings/overoptimization.md: the laws of Gao, Schulman and Hilton (2022, arXiv 2210.10760), and their fit.

The gold score is held against d, the square root of the KL divergence from the initial policy. For the best of n
responses, R(d) = d (alpha - beta d); for PPO, R(d) = d (alpha - beta log d).
"""

import math
import statistics
from functools import cache

import numpy as np
from record import by_name

BEST_OF = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
FORMS = {"best of n": "quadratic", "ppo": "logarithmic"}  # the two ways to optimise, and the law of each
SMOOTH = 3  # updates of PPO whose mean is a point of the charts


@cache
def weights(n: int, total: int) -> np.ndarray:
    """Of n drawn from `total` without replacement, the probability that the best is the one of rank 1, 2, ..., total.

    The others must then be among the ranks below: C(rank - 1, n - 1) of C(total, n) choices.
    """
    return np.array([math.comb(below, n - 1) / math.comb(total, n) for below in range(total)])


def best_of_n(proxy: np.ndarray, values: np.ndarray, n: int) -> float:
    """Mean value of the response with the highest proxy score of n, over all choices of n from these responses."""
    return float(weights(n, len(proxy)) @ values[np.argsort(proxy, kind="stable")])


def best_of_n_kl(n: int) -> float:
    """KL of the best of n from the initial policy, if no two responses are the same (else it is an upper bound)."""
    return math.log(n) - (n - 1) / n


def slowdown(form: str, d: np.ndarray) -> np.ndarray:
    """What is subtracted from alpha in R(d) = d (alpha - beta slowdown)."""
    return d if form == "best of n" else np.log(d)


def fit(form: str, d: np.ndarray, gain: np.ndarray) -> dict[str, float]:
    """alpha and beta by least squares, and the share of the variance that they explain."""
    d, gain = np.array(d), np.array(gain)
    d, gain = d[d > 0], gain[d > 0]  # where d is 0 the law says 0
    terms = np.stack([d, -d * slowdown(form, d)], 1)
    (alpha, beta), *_ = np.linalg.lstsq(terms, gain, rcond=None)
    residual = gain - terms @ [alpha, beta]
    return {"alpha": float(alpha), "beta": float(beta), "r2": float(1 - np.mean(residual**2) / gain.var())}


def law(form: str, d: np.ndarray, alpha: float, beta: float) -> np.ndarray:
    """The gold score, less its start."""
    return d * (alpha - beta * slowdown(form, d))


def peak(form: str, alpha: float, beta: float) -> float:
    """The d at which the law is highest; infinite if it only rises, or begins by falling."""
    if alpha <= 0 or beta <= 0:
        return math.inf
    return alpha / (2 * beta) if form == "best of n" else math.exp(min(alpha / beta - 1, 700))


def smooth(values: list[float]) -> np.ndarray:
    """Means of neighbours."""
    return np.convolve(values, np.ones(SMOOTH) / SMOOTH, "valid")


def groups() -> dict[tuple[str, int], list[dict]]:
    """(size, pairs) -> the runs, one for each seed."""
    return {(runs[0]["size"], runs[0]["pairs"]): runs for runs in by_name("overoptimization").values()}


def all_runs() -> list[dict]:
    """In that order."""
    return [run for runs in groups().values() for run in runs]


@cache
def start_gold() -> float:
    """The gold score of the initial policy, over all prompts."""
    return statistics.fmean(run["start_gold"] for run in all_runs())


def points(run: dict, method: str) -> tuple[np.ndarray, np.ndarray]:
    """d, and the gold score less its start, of one run; best of n starts at its own prompts' mean."""
    if method == "best of n":
        gold = np.array(run["best_of_n"]["gold"])
        return np.sqrt([best_of_n_kl(n) for n in BEST_OF]), gold - gold[0]
    kl = np.clip(run["ppo"]["kl"], 0, None)  # an estimate, which may be negative at first
    return np.sqrt(kl), np.array(run["ppo"]["gold"]) - start_gold()


def pooled_fit(runs: list[dict], method: str, form: str) -> dict[str, float]:
    """The law through the points of all seeds."""
    return fit(form, *(np.concatenate(x) for x in zip(*(points(run, method) for run in runs))))


def first_at(run: dict, along: str, level: float, want: str) -> float | None:
    """Where a smoothed metric of PPO first reaches a level: another metric there; None if it never does."""
    is_reached = smooth(run["ppo"][along]) >= level
    return float(smooth(run["ppo"][want])[is_reached.argmax()]) if is_reached.any() else None
