"""exercises/release.py: a student's folder has no solution, runs by itself, and is marked with its own numbers."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from sources import ROOT, SCRIPTS, defined_in, source_of

sys.path.insert(0, str(ROOT / "exercises"))
import mark  # noqa: E402
import release  # noqa: E402

ADA, BOB = "Ada Lovelace", "Bob"
SOLVERS = {name: "lecture/ppo.py" for name in mark.FUNCTIONS} | {
    "preference_loss": "lecture/reward_model.py",
    "dpo_loss": "lecture/dpo.py",
    "leave_one_out": "lecture/rloo.py",
    **dict.fromkeys(("kl_estimate", "group_advantages", "token_weights"), "lecture/grpo.py"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of Ada, as it was released."""
    folder = tmp_path_factory.mktemp("students") / "ada"
    release.release(folder, ADA)
    return folder


def lines_of_solutions():
    """The longer lines of code in the solutions, in lecture/ and in the scripts."""
    for file in [*SCRIPTS, *(str(path.relative_to(ROOT)) for path in (ROOT / "lecture").glob("*.py"))]:
        for name, node in defined_in(file).items():
            if name in mark.FUNCTIONS:
                body = ast.parse(source_of(file, node)).body[0].body[1:]
                for statement in body:
                    yield from (line.strip() for line in ast.unparse(statement).splitlines() if len(line.strip()) > 24)


def test_no_text_has_a_line_of_a_solution(folder):
    lines = set(lines_of_solutions())
    assert len(lines) > 40
    for file in [*folder.rglob("*.py"), *folder.glob("*.md"), *folder.glob("*.json")]:
        text = file.read_text("utf-8")
        if file.suffix == ".py":
            text = ast.unparse(ast.parse(text))  # as the lines above are written
        found = [line for line in lines if line in text]
        assert not found, (file.name, found)


def test_no_page_has_a_right_number(folder):
    numbers = mark.draw(ADA)
    for name in ("README.md", "handout.md", "answers.toml"):
        text = (folder / name).read_text("utf-8")
        for question, (right, _) in mark.right_answers(numbers).items():
            assert not re.search(rf"(?<![\d.]){re.escape(f'{right:.3g}'.lstrip('0'))}(?!\d)", text), (name, question)
    assert mark.number_table(numbers) in (folder / "handout.md").read_text("utf-8")


def run(folder, *words):
    """Runs Python in the folder, with nothing of this repository on its path."""
    environment = {name: x for name, x in os.environ.items() if name not in ("PYTHONPATH", "EXERCISE_UNDER_WAY")}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


def solve(folder):
    """Fills functions.py with the functions of lecture/."""
    text = (folder / "functions.py").read_text("utf-8")
    for name, file in SOLVERS.items():
        node = defined_in(file)[name]
        body = source_of(file, node).split('"""', 2)[2]
        text = text.replace(f'\n    raise NotImplementedError("{name}")', body)
    (folder / "functions.py").write_text(text, "utf-8")


def test_only_a_students_own_numbers_are_marked_as_right(folder):
    assert mark.draw(ADA) == mark.draw(" ada  LOVELACE") != mark.draw(BOB)
    for student, least, most in ((None, 0, 0), (ADA, 16, 16), (BOB, 0, 6)):  # some may be the same by chance
        answers = mark.right_answers(mark.draw(student)).items() if student else ()
        lines = "".join(f"{name} = {right:.4g}\n" for name, (right, _) in answers)
        (folder / "answers.toml").write_text(release.blank_answers(ADA) + lines, "utf-8")
        assert least <= sum(points for points, _, _ in mark.answers(folder).values()) <= most


def test_no_mistake_is_marked_as_right():
    for student in ("", *map(str, range(40))):
        for right, mistakes in mark.right_answers(mark.draw(student)).values():
            assert all(abs(wrong / right - 1) > 0.006 for wrong in mistakes) and right > 0


@pytest.mark.slow
def test_tests_and_scripts_of_the_folder_run_once_its_functions_are_filled(folder):
    """With the student's functions, from the folder alone."""
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "exercises", "-m", "not capstone"]
    train = ["exercises/train.py", "grpo", "--output-dir", "runs/group-1"]
    before = run(folder, *tests)
    assert before.returncode == 1 and f" 0 done, 0 wrong, {len(mark.FUNCTIONS)} not done yet" in before.stdout, before
    assert "which is not done yet" in run(folder, *train).stderr
    solve(folder)
    after = run(folder, *tests)
    assert after.returncode == 0 and f" {len(mark.FUNCTIONS)} done, 0 wrong, 0 not done yet" in after.stdout, after
    done = run(folder, *train, "--total-episodes", "64", "--response-length", "8")
    assert done.returncode == 0, done
    (row,) = map(json.loads, Path(folder, "runs/group-1/metrics.jsonl").read_text().splitlines())
    assert 0 < row["eval/pass@1"] <= row["eval/pass@8"]
