"""exercises/mark.py: right work gets its points, and a message names what is missing."""

import json
import sys

import pytest
from sources import ROOT

sys.path.insert(0, str(ROOT / "exercises"))
import mark  # noqa: E402


@pytest.fixture
def folder(tmp_path):
    """A student's folder with all answers, to the numbers of handout.md, and with runs that end as ours do."""
    answers = "".join(f"{name} = {right:.4g}\n" for name, (right, _) in mark.right_answers(mark.draw("")).items())
    (tmp_path / "answers.toml").write_text(answers)
    for name, ends in json.loads(mark.OURS.read_text()).items():
        for seed, end in enumerate(ends, 1):
            run = tmp_path / f"runs/{name}-{seed}"
            run.mkdir(parents=True)
            (run / "args.json").write_text(json.dumps(mark.RUNS[name] | {"seed": seed}))
            rows = [{mark.METRIC: 0.0}, {mark.METRIC: end}, {}]
            (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_the_handout_has_the_thresholds_and_numbers():
    page = mark.HANDOUT.read_text("utf-8")
    assert mark.with_table(page, "thresholds", mark.table()) == page
    assert mark.with_table(page, "numbers", mark.number_table(mark.draw(""))) == page


def points(marks):
    """Got, and of how many."""
    return tuple(sum(x[i] for x in marks.values()) for i in (0, 1))


def test_right_answers_and_runs_get_all_points(folder):
    assert points(mark.answers(folder)) == (16, 16) and points(mark.runs(folder)) == (21, 21)


def test_a_wrong_number_is_named(folder):
    for name, (_, mistakes) in mark.right_answers(mark.draw("")).items():
        for x, sentence in mistakes.items():
            (folder / "answers.toml").write_text(f"{name} = {x:.4g}\n")
            marks = mark.answers(folder)
            assert marks[name][0] == 0 and sentence in marks[name][2] and points(marks) == (0, 16)


@pytest.mark.slow
def test_functions_are_graded(folder):
    """Those of the short files are right; one is emptied, another wrong."""
    text = (ROOT / "exercises/functions.py").read_text("utf-8")
    text = text.replace('raise NotImplementedError("masked_mean")', "return x[mask].mean()")
    text = text.replace('raise NotImplementedError("leave_one_out")', "return rewards - rewards.mean()")
    (folder / "functions.py").write_text(text)
    marks = mark.functions(folder, no_capstone=True)
    assert points(marks) == (1, sum(mark.FUNCTIONS.values()))
    assert "that of the batch" in marks["leave_one_out"][2] and marks["gae"][2] == "not done yet"
