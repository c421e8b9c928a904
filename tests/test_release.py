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


def test_everything_that_is_asked_for_has_a_place(folder):
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {"README.md", "handout.md", "algorithms.md", "functions.py", "answers.toml", "grpo.py"} <= names
    assert not [name for name in names if re.search("lecture|bugs|mark|release|mistakes.py|rubric|diffs|trace", name)]


def test_no_function_has_a_body(folder):
    """Those of the exercises are only in functions.py, and raise an error there."""
    for file in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name in mark.FUNCTIONS:
                assert file == folder / "functions.py" and ast.unparse(node.body[1:]).startswith("raise"), node.name


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


def test_links_and_commands_of_the_pages_stay_in_the_folder(folder):
    for page in folder.glob("*.md"):
        text = page.read_text("utf-8")
        for target in re.findall(r"\]\(([^)#\s]+)", text):
            assert "://" in target or (folder / target).exists(), (page.name, target)
        for target in re.findall(r"python ([\w/]+\.py)", text):
            assert (folder / target).exists(), (page.name, target)
    assert "```bash" not in (folder / "algorithms.md").read_text("utf-8")


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


def test_the_tests_fail_before_and_pass_after(folder):
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "exercises", "-m", "not capstone"]
    before = run(folder, *words)
    assert before.returncode == 1 and f" 0 done, 0 wrong, {len(mark.FUNCTIONS)} not done yet" in before.stdout, before
    text = (folder / "functions.py").read_text("utf-8")
    solve(folder)
    after = run(folder, *words)
    assert after.returncode == 0 and f" {len(mark.FUNCTIONS)} done, 0 wrong, 0 not done yet" in after.stdout, after
    (folder / "functions.py").write_text(text, "utf-8")


def test_a_mistake_is_named_without_the_functions_that_make_it(folder, monkeypatch):
    """By the results in mistakes.json."""
    stored = json.loads((folder / "exercises/mistakes.json").read_text("utf-8"))
    assert set(stored) == set(mark.FUNCTIONS) and all(stored.values())
    import grading
    import test_functions
    from types import SimpleNamespace

    monkeypatch.setattr(grading, "STORED", folder / "exercises/mistakes.json")
    monkeypatch.setattr(grading, "results_of_mistakes", None)
    wrong = SimpleNamespace(group_advantages=lambda scores, G, scale: scores - scores.mean())
    with pytest.raises(pytest.fail.Exception, match="The mean is that of the batch"):
        test_functions.test_group_advantages(wrong)
    wrong = SimpleNamespace(kl_estimate=lambda p, q, estimator: q - p)
    with pytest.raises(pytest.fail.Exception, match="k1 has the wrong sign"):
        test_functions.test_kl_estimate(wrong)


def answer(folder, numbers):
    """Writes the right answers to these numbers below the name."""
    lines = [f"{name} = {right:.4g}\n" for name, (right, _) in mark.right_answers(numbers).items()]
    (folder / "answers.toml").write_text(release.blank_answers(ADA) + "".join(lines), "utf-8")


def test_only_the_right_numbers_are_marked_as_right(folder):
    assert mark.draw(ADA) == mark.draw(" ada  LOVELACE") != mark.draw(BOB)
    text = (folder / "answers.toml").read_text("utf-8")
    assert sum(points for points, _, _ in mark.answers(folder).values()) == 0
    answer(folder, mark.draw(ADA))
    assert sum(points for points, _, _ in mark.answers(folder).values()) == 16
    answer(folder, mark.draw(BOB))
    assert sum(points for points, _, _ in mark.answers(folder).values()) <= 6  # some may be the same by chance
    (folder / "answers.toml").write_text("best_baseline = 3/4", "utf-8")
    assert "cannot be read" in mark.answers(folder)["best_baseline"][2]
    (folder / "answers.toml").write_text(text, "utf-8")


@pytest.mark.parametrize("student", ["", *map(str, range(40))])
def test_no_mistake_is_marked_as_right(student):
    for right, mistakes in mark.right_answers(mark.draw(student)).values():
        assert all(abs(wrong / right - 1) > 0.006 for wrong in mistakes) and right > 0


@pytest.mark.slow
def test_the_scripts_of_the_folder_train(folder):
    """With the student's functions, from the folder alone; the other tools find them, too."""
    before = run(folder, "exercises/train.py", "grpo", "--output-dir", "runs/early")
    assert "group_advantages, which is not done yet" in before.stderr or "response_mask, which" in before.stderr, before
    text = (folder / "functions.py").read_text("utf-8")
    solve(folder)
    few = ["--total-episodes", "64", "--response-length", "8"]
    done = run(folder, "exercises/train.py", "grpo", "--output-dir", "runs/group-1", *few)
    assert done.returncode == 0, done
    args = json.loads((folder / "runs/group-1/args.json").read_text())
    rows = [json.loads(line) for line in Path(folder, "runs/group-1/metrics.jsonl").read_text().splitlines()]
    assert args["total_episodes"] == 64 and len(rows) == 1 and 0 < rows[0]["eval/pass@1"] <= rows[0]["eval/pass@8"]
    sides = ["grpo.py --total-episodes 64", "grpo.py --total-episodes 64 --scale-rewards mean"]
    done = run(folder, "tools/seeds.py", *sides, "--seeds", "2")
    assert done.returncode == 0 and "the same on both sides" in done.stdout, done
    (folder / "functions.py").write_text(text, "utf-8")
