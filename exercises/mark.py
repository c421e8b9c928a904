"""Marks a student's folder (see handout.md): points for functions, numbers, runs and the capstone, with reasons.

    python exercises/mark.py ada             # ada/functions.py, ada/answers.toml, ada/runs/group-1, ...
    python exercises/mark.py ada bob --no-capstone
    python exercises/mark.py --ours DIR      # writes thresholds from runs like DIR/group-1 to handout.json, handout.md

The right numbers are computed from the name in answers.toml, as release.py did for the questions. Functions are graded
by the tests of this folder, not by those in the student's. The settings of runs are read from args.json. (A student
could edit metrics.jsonl. The seeds are known, so a run is easily repeated.)
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
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
NUMBERS: dict[str, tuple[float, list[float]]] = {  # symbol of handout.md -> its number there, and those of students
    "p": (0.25, [n / 100 for n in range(30, 45)]),
    "G": (8, [5, 6, 7, *range(9, 17)]),
    "H": (4, [3, 5, 6]),
    "q": (0.1, [n / 100 for n in range(2, 21) if n != 10]),
    "n": (8, [6, 7, 9, 10, 11, 12]),
    "c": (2, [2, 3]),
    "k": (2, [2, 3]),
}


def draw(student: str) -> dict[str, float]:
    """The numbers of a student, drawn from the name. Without a name, those of handout.md."""
    name = " ".join(student.lower().split())
    if not name:
        return {symbol: x for symbol, (x, _) in NUMBERS.items()}
    digests = {symbol: int.from_bytes(sha256(f"{name} {symbol}".encode()).digest()) for symbol in NUMBERS}
    return {symbol: choices[digests[symbol] % len(choices)] for symbol, (_, choices) in NUMBERS.items()}


def number_table(numbers: dict[str, float]) -> str:
    """The numbers, for the handout."""
    rows = numbers, ["---:"] * len(numbers), (f"{x:g}" for x in numbers.values())
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def second_moment(p: float, b: float) -> float:
    """E[g^2] of g = (r - b) d log pi / d theta: the answer is right (r = 1) with p = sigmoid(theta), else r = 0."""
    return p * ((1 - b) * (1 - p)) ** 2 + (1 - p) * (b * p) ** 2


def variance(p: float, b: float) -> float:
    """The variance of the same g. Its mean is p (1 - p) for any b."""
    return second_moment(p, b) - (p * (1 - p)) ** 2


def right_answers(numbers: dict[str, float]) -> dict[str, tuple[float, dict[float, str]]]:
    """Maps each question to the right number, and to the mistakes behind other numbers."""
    p, G, H, q, n, c, k = numbers.values()
    square = "that is the mean of the square; subtract the square of the mean"
    return {
        "variance_without_baseline": (variance(p, 0), {second_moment(p, 0): square}),
        "variance_with_mean_baseline": (variance(p, p), {second_moment(p, p): square}),
        "best_baseline": (1 - p, {p: "that is the mean reward, and the question says that it is another number"}),
        "shrinkage": (
            (G - 1) / G,
            {G / (G - 1): "that is the factor that corrects it", 1 / G: "that is one minus the factor"},
        ),
        "equal_groups": (
            p**H + (1 - p) ** H,
            {
                (1 - p) ** H: "the scores of a group with only right answers are equal, too",
                1 - p**H - (1 - p) ** H: "that is the share of groups with a gradient",
            },
        ),
        "weight_deviation": (
            1 / sqrt(q * (1 - q)),
            {1 / (q * (1 - q)): "that is divided by the variance", sqrt(q * (1 - q)): "that is the deviation"},
        ),
        "weight_mean": (1 / q, {1 / (1 - q): "that is divided by the share of wrong answers"}),
        "pass_at_k": (
            1 - comb(n - c, k) / comb(n, k),
            {1 - (1 - c / n) ** k: "that samples with replacement; the unbiased estimate takes k different answers"},
        ),
    }


ANSWER = 2  # points for each
LONG, SHORT = {"total_episodes": 6400}, {"total_episodes": 3200, "num_ppo_epochs": 4}
RUNS = {  # run -> settings that it must have
    "group": LONG | {"scale_rewards": "group", "num_ppo_epochs": 1, "loss_type": "dapo"},
    "constant": LONG | {"scale_rewards": "none", "loss_type": "dr_grpo"},
    "mean": LONG | {"scale_rewards": "mean"},
    "batch": LONG | {"scale_rewards": "batch"},
    "response": LONG | {"loss_type": "grpo"},
    "clipped": SHORT | {"epsilon": 0.2},
    "unclipped": SHORT | {"epsilon": 1000.0},
}
METRIC = "eval/pass@1"  # at the end of the runs
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


def read_answers(folder: Path) -> tuple[dict, str]:
    """What answers.toml contains, and a message if it cannot be read."""
    file = folder / "answers.toml"
    try:
        return tomllib.loads(file.read_text("utf-8")), ""
    except (OSError, ValueError) as error:
        return {}, f"{file} cannot be read: {error}"


def student_of(folder: Path) -> str:
    """The name in answers.toml, or an empty text."""
    return str(read_answers(folder)[0].get("student", ""))


def answers(folder: Path) -> dict[str, tuple[int, int, str]]:
    """The same for the numbers in answers.toml, with a relative tolerance of 0.5 %."""
    given, trouble = read_answers(folder)
    right_and_wrong = right_answers(draw(student_of(folder)))

    def mark(name: str) -> str:
        right, mistakes = right_and_wrong[name]
        x = given.get(name)
        if x is None:
            return trouble or "not answered"
        if not isinstance(x, (int, float)):
            return f"{x!r} is not a number"
        if isclose(x, right, rel_tol=0.005, abs_tol=1e-6):
            return ""
        known = [text for wrong, text in mistakes.items() if isclose(x, wrong, rel_tol=0.005)]
        return f"{x} is not right" + (f": {known[0]}" if known else "")

    messages = {name: mark(name) for name in right_and_wrong}
    return {name: (0 if text else ANSWER, ANSWER, text) for name, text in messages.items()}


def end_of(run: Path) -> float:
    """The last value of the metric; 0 if there is none."""
    file = run / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []
    return next((row[METRIC] for row in reversed(rows) if row.get(METRIC) is not None), 0.0)


def threshold(name: str) -> float:
    """The threshold of a run: our worst seed, minus the range of our seeds, minus .03."""
    ends = json.loads(OURS.read_text("utf-8"))[name]
    return min(ends) - (max(ends) - min(ends)) - 0.03


def table() -> str:
    """The thresholds, for the handout."""
    ours = json.loads(OURS.read_text("utf-8"))
    rows = [f"| {name} | {min(x):.3f} to {max(x):.3f} | {threshold(name):.2f} |" for name, x in ours.items()]
    return "\n".join([f"| run | `{METRIC}` at the end, ours | yours, at least |", "|---|---:|---:|", *rows])


def with_table(page: str, name: str, rows: str) -> str:
    """A page with another table between its markers of this name."""
    part = f"<!-- {name} -->\n{rows}\n<!-- /{name} -->"
    return re.sub(f"<!-- {name} -->.*<!-- /{name} -->", lambda _: part, page, flags=re.S)


def runs(folder: Path) -> dict[str, tuple[int, int, str]]:
    """The same for the runs: enough seeds, the required settings, and the last value of the metric."""

    def mark(name: str) -> str:
        found = sorted((folder / "runs").glob(f"{name}-*/args.json"))
        args = [json.loads(file.read_text("utf-8")) for file in found]
        for file, own in zip(found, args):
            for key, x in RUNS[name].items():
                if own.get(key) != x:
                    return f"{file.parent.name} has {key} {own.get(key)} instead of {x}"
        seeds = {own.get("seed") for own in args}
        if len(seeds) < SEEDS:
            return f"{len(seeds)} seeds, of {SEEDS}"
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
    student = student_of(folder)
    whose = f"the numbers of {student}" if student else "answers.toml names no student: the numbers of handout.md"
    left_out = " (the trainings have 6 more)" if no_capstone else ""
    return "\n".join([f"{folder}: {total} of {most}{left_out} ({whose})", *lines])


def main() -> None:
    """Reads the command line and prints a report for each folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="*", help="folders of students' work")
    parser.add_argument("--no-capstone", action="store_true", help="skip the trainings, which take minutes")
    parser.add_argument("--ours", type=Path, metavar="DIR", help="write handout.json from the runs in this folder")
    args = parser.parse_args()
    if args.ours:
        ends = {name: [round(end_of(run), 4) for run in sorted(args.ours.glob(f"{name}-*"))] for name in RUNS}
        OURS.write_text(json.dumps(ends) + "\n", "utf-8")
        HANDOUT.write_text(with_table(HANDOUT.read_text("utf-8"), "thresholds", table()), "utf-8")
    for folder in args.folders:
        print(report(folder, args.no_capstone))
    names = Counter(" ".join(student_of(folder).lower().split()) for folder in args.folders)
    for name in (name for name, n in names.items() if name and n > 1):
        print(f"{names[name]} folders have the numbers of {name!r}: answers.toml of some of them names another student")


if __name__ == "__main__":
    main()
