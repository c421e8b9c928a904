"""Marks a student's work on handout.md: points for functions, numbers, runs and the capstone, with reasons.

    python exercises/mark.py ada             # ada/functions.py, ada/answers.toml, ada/runs/group-1, ...
    python exercises/mark.py ada bob --no-capstone
    python exercises/mark.py --ours DIR      # writes thresholds from runs like DIR/group-1 to handout.json, handout.md

Functions are graded by their results, and the settings of runs are read from args.json. (A student could edit
metrics.jsonl; since the seeds are known, it is cheap to repeat a run.)
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
    """E[x^2] of x = (r - b) d log pi / d theta, where pi is right with p = sigmoid(theta), and r is 1 then, else 0."""
    return p * ((1 - b) * (1 - p)) ** 2 + (1 - p) * (b * p) ** 2


def variance(p: float, b: float) -> float:
    """The variance of the same x. Its mean is p (1 - p) for any b."""
    return second_moment(p, b) - (p * (1 - p)) ** 2


P, G, RARE = 1 / 4, 8, 1 / 10  # in the handout's questions
# question -> the right number, and the mistakes behind other numbers
ANSWERS: dict[str, tuple[float, dict[float, str]]] = {
    "variance_without_baseline": (
        variance(P, 0),
        {second_moment(P, 0): "that is the mean of the square; subtract the square of the mean"},
    ),
    "variance_with_mean_baseline": (
        variance(P, P),
        {second_moment(P, P): "that is the mean of the square; subtract the square of the mean"},
    ),
    "best_baseline": (1 - P, {P: "that is the mean reward, which is good but not the best"}),
    "shrinkage": (
        (G - 1) / G,
        {G / (G - 1): "that is the factor that corrects it", 1 / G: "that is one minus the factor"},
    ),
    "silent_groups": (
        P**4 + (1 - P) ** 4,
        {
            (1 - P) ** 4: "groups with only right answers are silent, too",
            1 - P**4 - (1 - P) ** 4: "those are the groups with a gradient",
        },
    ),
    "weight_deviation": (
        1 / sqrt(RARE * (1 - RARE)),
        {1 / (RARE * (1 - RARE)): "that is divided by the variance", sqrt(RARE * (1 - RARE)): "that is the deviation"},
    ),
    "weight_mean": (1 / RARE, {1 / (1 - RARE): "that is divided by the share of wrong answers"}),
    "pass_at_2": (
        1 - comb(6, 2) / comb(8, 2),
        {1 - (6 / 8) ** 2: "that samples with replacement; the unbiased estimate takes two of the eight"},
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
METRIC = "eval/pass@1"  # which is compared, at the end of the runs
RUN = 3  # points for each
SEEDS = 3


def functions(folder: Path, no_capstone: bool) -> dict[str, tuple[int, int, str]]:
    """For each exercise: its points, the maximum, and the grader's message."""
    file = (folder / "functions.py").resolve()
    points = FUNCTIONS | ({} if no_capstone else CAPSTONE)
    if not file.exists():
        return {name: (0, n, f"{file} is missing") for name, n in points.items()}
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary, "report.xml")
        words = ["-m", "not capstone"] if no_capstone else []
        command = [sys.executable, "-m", "pytest", HERE, f"--solutions={file}", f"--junitxml={report}", *words]
        done = subprocess.run(command, capture_output=True, text=True)
        if not report.exists():  # a function did not end, or it ended Python
            return {name: (0, n, done.stderr.strip().splitlines()[-1]) for name, n in points.items()}
        cases = {case.get("name"): case for case in ET.parse(report).iter("testcase")}
    marks = {}
    for name, n in points.items():
        case = cases.get(f"test_{name}" if name in FUNCTIONS else f"test_capstone[{name}]")
        wrong = case.find("failure") if case is not None else None
        undone = case is None or case.find("skipped") is not None
        message = "not done yet" if undone else "" if wrong is None else wrong.get("message", "").strip()
        message = message.splitlines()[0].removeprefix("Failed: ") if message else ""
        marks[name] = (0 if message else n, n, message)
    return marks


def answers(folder: Path) -> dict[str, tuple[int, int, str]]:
    """The same for the numbers in answers.toml, with a relative tolerance of 0.5 %."""
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

    messages = {name: mark(name) for name in ANSWERS}
    return {name: (0 if text else ANSWER, ANSWER, text) for name, text in messages.items()}


def end_of(run: Path) -> float:
    """The last value of the metric."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [row[METRIC] for row in rows if row.get(METRIC) is not None][-1]


def threshold(name: str) -> float:
    """The threshold of a run: our worst seed, minus the range of our seeds, minus .03."""
    ends = json.loads(OURS.read_text("utf-8"))[name]
    return min(ends) - (max(ends) - min(ends)) - 0.03


def table() -> str:
    """The thresholds, for the handout."""
    ours = json.loads(OURS.read_text("utf-8"))
    rows = [f"| {name} | {min(x):.3f} to {max(x):.3f} | {threshold(name):.2f} |" for name, x in ours.items()]
    return "\n".join([f"| run | `{METRIC}` at the end, ours | yours, at least |", "|---|---:|---:|", *rows])


def runs(folder: Path) -> dict[str, tuple[int, int, str]]:
    """The same for the runs: enough seeds, the required settings, and the last value of the metric."""

    def mark(name: str) -> str:
        found = sorted((folder / "runs").glob(f"{name}-*/args.json"))
        args = [json.loads(file.read_text("utf-8")) for file in found]
        for file, own in zip(found, args):
            for key, x in RUNS[name].items():
                if own[key] != x:
                    return f"{file.parent.name} has {key} {own[key]} instead of {x}"
        if len({own["seed"] for own in args}) < SEEDS:
            return f"{len({own['seed'] for own in args})} seeds, of {SEEDS}"
        for file in found:
            if (end := end_of(file.parent)) < threshold(name):
                return f"{file.parent.name} ends at {METRIC} {end:.2f}; at least {threshold(name):.2f} is required"
        return ""

    messages = {name: mark(name) for name in RUNS}
    return {name: (0 if text else RUN, RUN, text) for name, text in messages.items()}


def report(folder: Path, no_capstone: bool) -> str:
    """A student's points, with the reasons for missing ones."""
    parts: dict[str, Callable] = {"functions": lambda f: functions(f, no_capstone), "answers": answers, "runs": runs}
    lines = []
    total = most = 0
    for part, mark in parts.items():
        marks = mark(folder)
        got, of = (sum(x[i] for x in marks.values()) for i in (0, 1))
        total, most = total + got, most + of
        lines += [f"  {part:10s}{got:4d} of {of}"]
        lines += [f"      {name}: {message}" for name, (_, _, message) in marks.items() if message]
    return "\n".join([f"{folder}: {total} of {most}", *lines])


def main() -> None:
    """Reads the command line and prints a report for each folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="*", help="folders of students' work")
    parser.add_argument("--no-capstone", action="store_true", help="skip the trainings, which take minutes")
    parser.add_argument("--ours", type=Path, metavar="DIR", help="write handout.json from the runs in this folder")
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
