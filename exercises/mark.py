"""Marks what a student hands in for handout.md: points for functions, numbers, runs and the capstone, and why not more.

    python exercises/mark.py ada             # ada/functions.py, ada/answers.toml, ada/runs/group-1, ...
    python exercises/mark.py ada bob --no-capstone
    python exercises/mark.py --ours DIR      # what runs like DIR/group-1 are held to, in handout.json and handout.md

Nothing that is handed in is trusted to say how well it did: functions are graded by their results, and a run's settings
are read from its args.json. (Who wants to cheat can edit metrics.jsonl; the seeds make it cheap to run one again.)
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Callable
from math import comb, isclose, sqrt
from pathlib import Path

HERE = Path(__file__).resolve().parent
OURS, HANDOUT = HERE / "handout.json", HERE / "handout.md"
FUNCTIONS = {  # points
    "masked_mean": 1,
    "response_mask": 2,
    "token_logprobs": 2,
    "response_logprobs": 3,
    "preference_loss": 3,
    "dpo_loss": 4,
    "kl_estimate": 3,
    "shape_rewards": 3,
    "leave_one_out": 3,
    "group_advantages": 5,
    "masked_whiten": 2,
    "gae": 5,
    "policy_loss": 4,
    "value_loss": 2,
    "token_weights": 3,
}
CAPSTONE = {"ppo": 2, "grpo": 2, "dpo": 2}


def second_moment(p: float, b: float) -> float:
    """Of (r - b) d log pi / d theta, where pi says the right thing with p = sigmoid(theta), and r is 1 then."""
    return p * ((1 - b) * (1 - p)) ** 2 + (1 - p) * (b * p) ** 2


def variance(p: float, b: float) -> float:
    """Of the same; its mean is p (1 - p) for any b."""
    return second_moment(p, b) - (p * (1 - p)) ** 2


P, G, RARE = 1 / 4, 8, 1 / 10  # of the handout's questions
# question -> the right number, and what other numbers mean
ANSWERS: dict[str, tuple[float, dict[float, str]]] = {
    "variance_without_baseline": (
        variance(P, 0),
        {second_moment(P, 0): "that is the mean of the square; the square of the mean is to be subtracted"},
    ),
    "variance_with_mean_baseline": (
        variance(P, P),
        {second_moment(P, P): "that is the mean of the square; the square of the mean is to be subtracted"},
    ),
    "best_baseline": (1 - P, {P: "that is the mean reward, which is good, and not the best"}),
    "shrinkage": (
        (G - 1) / G,
        {G / (G - 1): "that is the factor that repairs it", 1 / G: "that is how far it shrinks; the factor is wanted"},
    ),
    "silent_groups": (
        P**4 + (1 - P) ** 4,
        {
            (1 - P) ** 4: "groups that are all right are silent, too",
            1 - P**4 - (1 - P) ** 4: "those are the groups that say something",
        },
    ),
    "weight_deviation": (
        1 / sqrt(RARE * (1 - RARE)),
        {1 / (RARE * (1 - RARE)): "that is divided by the variance", sqrt(RARE * (1 - RARE)): "that is the deviation"},
    ),
    "weight_mean": (1 / RARE, {1 / (1 - RARE): "that divides by the share of wrong answers"}),
    "pass_at_2": (
        1 - comb(6, 2) / comb(8, 2),
        {1 - (6 / 8) ** 2: "that draws with replacement; the unbiased estimate draws two of the eight"},
    ),
}
ANSWER = 2  # points for each
RUNS = {  # run -> settings that it must have
    "group": {"scale_rewards": "group", "baseline": "mean", "num_ppo_epochs": 1},
    "constant": {"scale_rewards": "none", "loss_type": "dr_grpo"},
    "mean": {"scale_rewards": "mean"},
    "rft": {"baseline": "none"},
    "clipped": {"num_ppo_epochs": 4, "epsilon": 0.2},
    "unclipped": {"num_ppo_epochs": 4, "epsilon": 1000.0},
    "sequence": {"importance_sampling_level": "sequence", "loss_type": "grpo"},
}
METRIC = "eval/pass@1"  # by which they are judged, at their end
RUN = 3  # points for each
SEEDS = 3


def functions(folder: Path, no_capstone: bool) -> dict[str, tuple[int, int, str]]:
    """Exercise -> points, of how many, and what the grader says."""
    file = (folder / "functions.py").resolve()
    points = FUNCTIONS | ({} if no_capstone else CAPSTONE)
    if not file.exists():
        return {name: (0, n, f"{file} is missing") for name, n in points.items()}
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary, "report.xml")
        words = ["-m", "not capstone"] if no_capstone else []
        command = [sys.executable, "-m", "pytest", HERE, f"--solutions={file}", f"--junitxml={report}", *words]
        done = subprocess.run(command, capture_output=True, text=True)
        if not report.exists():  # a function never ended, or ended Python
            return {name: (0, n, done.stderr.strip().splitlines()[-1]) for name, n in points.items()}
        cases = {case.get("name"): case for case in ET.parse(report).iter("testcase")}
    marks = {}
    for name, n in points.items():
        case = cases.get(f"test_{name}" if name in FUNCTIONS else f"test_capstone[{name}]")
        wrong = case.find("failure") if case is not None else None
        undone = case is None or case.find("skipped") is not None
        said = "not done yet" if undone else "" if wrong is None else wrong.get("message", "").strip()
        said = said.splitlines()[0].removeprefix("Failed: ") if said else ""
        marks[name] = (0 if said else n, n, said)
    return marks


def answers(folder: Path) -> dict[str, tuple[int, int, str]]:
    """The same of the numbers in answers.toml, which may be off by half a hundredth of their size."""
    file = folder / "answers.toml"
    given = tomllib.loads(file.read_text("utf-8")) if file.exists() else {}

    def mark(name: str) -> str:
        right, mistakes = ANSWERS[name]
        if name not in given:
            return "not answered"
        if isclose(given[name], right, rel_tol=0.005, abs_tol=1e-6):
            return ""
        known = [text for x, text in mistakes.items() if isclose(given[name], x, rel_tol=0.005)]
        return f"{given[name]} is not right" + (f": {known[0]}" if known else "")

    said = {name: mark(name) for name in ANSWERS}
    return {name: (0 if text else ANSWER, ANSWER, text) for name, text in said.items()}


def end_of(run: Path) -> float:
    """The metric's last number."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [row[METRIC] for row in rows if row.get(METRIC) is not None][-1]


def threshold(name: str) -> float:
    """What a run is held to: our worst seed, less as much again as our seeds lie apart, and .03."""
    ends = json.loads(OURS.read_text("utf-8"))[name]
    return min(ends) - (max(ends) - min(ends)) - 0.03


def table() -> str:
    """The thresholds, for the handout."""
    ours = json.loads(OURS.read_text("utf-8"))
    rows = [f"| {name} | {min(x):.3f} to {max(x):.3f} | {threshold(name):.2f} |" for name, x in ours.items()]
    return "\n".join([f"| run | `{METRIC}` at the end, ours | yours, at least |", "|---|---:|---:|", *rows])


def runs(folder: Path) -> dict[str, tuple[int, int, str]]:
    """The same of the runs: enough seeds, the settings that were asked for, and the end of a metric."""

    def mark(name: str) -> str:
        found = sorted((folder / "runs").glob(f"{name}-*/args.json"))
        args = [json.loads(file.read_text("utf-8")) for file in found]
        for file, own in zip(found, args):
            for key, x in RUNS[name].items():
                if own[key] != x:
                    return f"{file.parent.name} has {key} {own[key]}, and not {x}"
        if len({own["seed"] for own in args}) < SEEDS:
            return f"{len({own['seed'] for own in args})} seeds, of {SEEDS}"
        for file in found:
            if (end := end_of(file.parent)) < threshold(name):
                return f"{file.parent.name} ends at {METRIC} {end:.2f}; {threshold(name):.2f} is asked for"
        return ""

    said = {name: mark(name) for name in RUNS}
    return {name: (0 if text else RUN, RUN, text) for name, text in said.items()}


def report(folder: Path, no_capstone: bool) -> str:
    """A student's points, and what was said where some are missing."""
    parts: dict[str, Callable] = {"functions": lambda f: functions(f, no_capstone), "answers": answers, "runs": runs}
    lines = []
    total = most = 0
    for part, mark in parts.items():
        marks = mark(folder)
        got, of = (sum(x[i] for x in marks.values()) for i in (0, 1))
        total, most = total + got, most + of
        lines += [f"  {part:10s}{got:4d} of {of}"]
        lines += [f"      {name}: {said}" for name, (_, _, said) in marks.items() if said]
    return "\n".join([f"{folder}: {total} of {most}", *lines])


def main() -> None:
    """Reads the command line, and prints a report for each folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="*", help="what students handed in")
    parser.add_argument("--no-capstone", action="store_true", help="leave out what trains, which takes minutes")
    parser.add_argument("--ours", type=Path, metavar="DIR", help="write handout.json from the runs in it")
    args = parser.parse_args()
    if args.ours:
        ends = {name: [end_of(run) for run in sorted(args.ours.glob(f"{name}-*"))] for name in RUNS}
        OURS.write_text(json.dumps(ends) + "\n", "utf-8")
        page = HANDOUT.read_text("utf-8")
        part = f"<!-- thresholds -->\n{table()}\n<!-- /thresholds -->"
        HANDOUT.write_text(
            re.sub("<!-- thresholds -->.*<!-- /thresholds -->", lambda _: part, page, flags=re.S), "utf-8"
        )
    for folder in args.folders:
        print(report(folder, args.no_capstone))


if __name__ == "__main__":
    main()
