"""What the pages show is what the record of the runs says."""

import json
import math
import re
import sys

import pytest
from sources import ROOT, text_of

sys.path.insert(0, str(ROOT / "benchmarks"))
import learning
import tables

RECORD = [json.loads(line) for line in text_of("benchmarks/results/learning.jsonl").splitlines()]


@pytest.fixture
def record(monkeypatch):
    """Puts runs in the place of the record."""
    monkeypatch.setattr(tables, "RECORD", {})

    def put(*runs):
        tables.fill_record(runs)

    return put


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_the_tables_are_those_of_the_record(page):
    """Else run benchmarks/tables.py."""
    tables.fill_record()
    text = page.read_text("utf-8")
    assert tables.rewritten(text) == text


def test_each_table_stands_in_one_page():
    places = [name for page in tables.PAGES for name in re.findall(r"^<!-- ([\w-]+) -->$", page.read_text("utf-8"), re.M)]
    assert sorted(name for name in places if name in tables.TABLES) == sorted(tables.TABLES)


def test_each_run_says_how_and_where_it_was_made():
    known = {(run.name, seed) for run in learning.RUNS for seed in run.seeds}
    there = [(line["run"], line["seed"]) for line in RECORD]
    assert len(there) == len(set(there)) and set(there) <= known
    for line in RECORD:
        assert line["command"].startswith("python ") and re.match(r"[0-9a-f]{7}", line["commit"]), line["run"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", line["date"]) and line["machine"] and line["cpu_seconds"] > 0


AFTER = {  # what the first command in a short form's docstring comes to
    "sft": ["loss", "end eval/perplexity"], "reward_model": ["accuracy", "end eval/accuracy"],
    "ppo": ["score", "end objective/scores", "KL", "end objective/kl"],
    "rloo": ["score", "end objective/scores", "KL", "end objective/kl"], "grpo": ["right answers", "answers greedy"],
    "dpo": ["accuracy", "end eval/rewards/accuracies"], "ddpo": ["reward", "end reward_mean"],
}  # fmt: skip


@pytest.mark.parametrize("script", AFTER)
def test_docstrings_say_what_comes_out(script):
    """To a tenth."""
    tables.fill_record()
    line = next(x for x in text_of(f"lecture/{script}.py").splitlines() if x.startswith(f"  python lecture/{script}.py"))
    for what, metric in zip(*[iter(AFTER[script])] * 2):
        said = float(re.search(rf"{what} [\d. ]*-> ([\d.]*\d)", line)[1])
        found = tables.values(tables.default(script), metric)
        found = [math.log(x) for x in found] if what == "loss" else found
        assert said == pytest.approx(sum(found) / len(found), rel=0.1), what


def test_cells(record):
    """Mean and standard deviation over the seeds, of time the least; one number has none; a dash for nothing."""
    run = lambda seed, score: {"run": "ppo", "seed": seed, "end": {"a": score}, "curves": {"episode": [1, 2, 3, 4],
                               "a": [0, score, score, score]}, "cpu_seconds": 6 + seed}  # fmt: skip
    record(run(1, 1.0), run(2, 3.0))
    assert tables.table("x", {"y": "ppo", "z": "no"}, [("A", "end a", 2), ("s", "cpu_seconds", 0)]).splitlines()[2:] == [
        "| y | 2.00 ± 1.41 | 7 |", "| z | – | – |",
    ]  # fmt: skip
    assert tables.reached("ppo", "a", 2.5) == "4 (1 of 2 seeds)" and tables.reached("ppo", "a", 4) == "never"
    assert tables.number([-1.0], 1) == "−1.0"


def test_a_run_in_short():
    """Means of the last five updates, the last of evaluations; what began, and the curves."""
    lines = [{"episode": 8 * i, "objective/scores": float(i), "objective/kl": 1.0, "val/eos_share": 0.5,
              "objective/gold_scores": 2.0} | ({"eval/scores": i} if i % 4 == 0 else {}) for i in range(1, 9)]  # fmt: skip
    short = learning.summarize("ppo", lines)
    assert short["start"]["objective/scores"] == 1 and short["end"]["objective/scores"] == 6
    assert short["end"]["eval/scores"] == 8 and short["curves"]["episode"] == [8 * i for i in range(1, 9)]
