"""What the pages show is what the record of the runs says."""

import json
import math
import re
import sys

import pytest
from sources import ROOT, text_of

sys.path.insert(0, str(ROOT / "experiments"))
import learning
import tables

RECORD = [json.loads(line) for line in text_of("experiments/results/learning.jsonl").splitlines()]


@pytest.fixture
def record(monkeypatch):
    """Puts runs in the place of the record."""
    monkeypatch.setattr(tables, "RECORD", {})

    def put(*runs):
        tables.fill_record(runs)

    return put


def test_the_tables_are_those_of_the_results(monkeypatch):
    """Else run experiments/tables.py, or the program whose page it names."""
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    with pytest.raises(SystemExit) as done:
        tables.main()
    assert done.value.code == 0


def test_each_run_says_how_and_where_it_was_made():
    known = {(run.name, seed) for run in learning.RUNS for seed in run.seeds}
    there = [(line["run"], line["seed"]) for line in RECORD]
    assert len(there) == len(set(there))
    assert set(there) <= known
    for line in RECORD:
        assert line["command"].startswith("python ")
        assert re.match(r"[0-9a-f]{7}", line["commit"])
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", line["date"])
        assert line["machine"]
        assert line["cpu_seconds"] > 0


@pytest.mark.parametrize(
    "script, what, metric",
    [
        ("sft", "loss", "end eval/perplexity"),
        ("reward_model", "accuracy", "end eval/accuracy"),
        ("ppo", "score", "end objective/scores"),
        ("ppo", "KL", "end objective/kl"),
        ("rloo", "score", "end objective/scores"),
        ("rloo", "KL", "end objective/kl"),
        ("grpo", "right answers", "answers greedy"),
        ("dpo", "accuracy", "end eval/rewards/accuracies"),
        ("ddpo", "reward", "end reward_mean"),
    ],
)
def test_docstrings_say_what_comes_out(script, what, metric):
    """The first command of a short form, to a tenth."""
    tables.fill_record()
    lines = text_of(f"lecture/{script}.py").splitlines()
    line = next(line for line in lines if line.startswith(f"  python lecture/{script}.py"))
    said = float(re.search(rf"{what} [\d. ]*-> ([\d.]*\d)", line)[1])
    found = tables.values(script, metric)
    if what == "loss":
        found = [math.log(x) for x in found]
    assert said == pytest.approx(sum(found) / len(found), rel=0.1)


def some_run(seed, score):
    """A line of the record."""
    curves = {"episode": [1, 2, 3, 4], "a": [0, score, score, score]}
    return {"run": "ppo", "seed": seed, "end": {"a": score}, "curves": curves, "cpu_seconds": 6 + seed}


def test_cells(record):
    """Mean and standard deviation over the seeds, of time the least; one number has none; a dash for nothing."""
    record(some_run(1, 1.0), some_run(2, 3.0))
    columns = [("A", "end a", 2), ("s", "cpu_seconds", 0)]
    lines = tables.table("x", {"y": "ppo", "z": "no"}, columns).splitlines()
    assert lines[2:] == ["| y | 2.00 ± 1.41 | 7 |", "| z | – | – |"]
    assert tables.number([-1.0], 1) == "−1.0"


def test_where_a_curve_reaches_its_goal(record):
    record(some_run(1, 1.0), some_run(2, 3.0))
    assert tables.reached("ppo", "a", 2.5) == "4 (1 of 2 seeds)"
    assert tables.reached("ppo", "a", 4) == "never"


def test_a_run_in_short():
    """Means of the last five updates, the last of evaluations; what began, and the curves."""
    lines = []
    for i in range(1, 9):
        lines.append({"episode": 8 * i, "objective/scores": float(i), "objective/kl": 1.0, "val/eos_share": 0.5})
    lines[3]["eval/scores"] = 4
    lines[7]["eval/scores"] = 8
    short = learning.summarize("ppo", lines)
    assert short["start"]["objective/scores"] == 1
    assert short["end"]["objective/scores"] == 6
    assert short["end"]["eval/scores"] == 8
    assert short["curves"]["episode"] == [8 * i for i in range(1, 9)]


@pytest.mark.parametrize("script", learning.SCRIPTS)
def test_our_runs_are_commands_that_are_understood(script, monkeypatch):
    module = __import__(script)
    for run in learning.RUNS:
        if run.script == script and run.side == "ours":
            command = [str(word) for word in learning.our_command(run, 1, "runs/x")]
            monkeypatch.setattr(sys, "argv", command[1:])
            assert module.read_command_line().seed == 1
