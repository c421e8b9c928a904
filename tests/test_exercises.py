"""exercises/: the short files solve them, mistakes are named, marks are right, a student's folder holds no solution."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from types import SimpleNamespace

import pytest
import torch
from sources import ROOT, SCRIPTS, defined_in, source_of, text_of

sys.path[:0] = [str(ROOT / "exercises"), str(ROOT / "exercises/bugs")]
import checks  # noqa: E402
import mark  # noqa: E402
import play  # noqa: E402
import release  # noqa: E402
import test_functions as graders  # noqa: E402

NAMES = [name.removeprefix("test_") for name in vars(graders) if name.startswith("test_")]


def solution(name):
    """The function of the short file that the exercise names."""
    file = re.search(r"Solution: (\S+)", ast.get_docstring(defined_in("exercises/functions.py")[name]))[1]
    functions = {"torch": torch, "F": torch.nn.functional}
    for node in defined_in(file).values():
        if isinstance(node, ast.FunctionDef):
            exec(source_of(file, node), functions)
    return functions[name]


RIGHT = SimpleNamespace(**{name: solution(name) for name in NAMES})


def grade(name, function):
    getattr(graders, f"test_{name}")(SimpleNamespace(**{name: function}))


@pytest.mark.parametrize("name", NAMES)
def test_the_short_files_solve_the_exercises(name):
    grade(name, getattr(RIGHT, name))


def mask_without_the_stop_token(tokens, stop_token_ids):
    mask, ended = RIGHT.response_mask(tokens, stop_token_ids)
    return mask & ~torch.isin(tokens, torch.tensor(stop_token_ids)), ended


def loss_without_a_gradient(*args):
    losses, ratio, clipped = RIGHT.policy_loss(*args)
    return losses.detach(), ratio, clipped


WRONG = [  # exercise, what a student writes instead, what the grader says
    ("masked_mean", lambda x, mask: x[mask].sum() / mask.numel(), "Padding is counted"),
    ("response_mask", mask_without_the_stop_token, "The stop token is not in the mask"),
    ("preference_loss", lambda a, b, *rest: RIGHT.preference_loss(b, a, *rest), "exchanged"),
    ("dpo_loss", lambda a, b, c, d, beta: RIGHT.dpo_loss(b, a, d, c, beta), "exchanged"),
    ("kl_estimate", lambda p, q, kind: RIGHT.kl_estimate(q, p, kind), "k1 has the wrong sign"),
    ("leave_one_out", lambda x, k: (x.view(-1, k) - x.view(-1, k).mean(1, True)).flatten(), "includes the reward"),
    ("group_advantages", lambda x, G, scale: x - x.mean(), "The mean is that of the batch"),
    ("token_weights", lambda mask, num_rows, *args: RIGHT.token_weights(mask, len(mask), *args), "of 3 rows"),
    ("masked_whiten", lambda x, mask, *rest: RIGHT.masked_whiten(x, mask, *rest) + 0 * x, "NaN * 0 is NaN"),
    ("policy_loss", loss_without_a_gradient, "No gradient flows"),
    ("value_loss", lambda v, old, *rest: RIGHT.value_loss(v, v, *rest[:2], 1.0), "The clip is missing"),
]


@pytest.mark.parametrize(("name", "function", "words"), WRONG)
def test_a_mistake_is_named(name, function, words):
    with pytest.raises(pytest.fail.Exception) as failure:
        grade(name, function)
    assert words in str(failure.value)


@pytest.mark.slow
def test_a_file_half_done(tmp_path):
    """The student's line is shown, and none of the grader's."""
    bodies = {"gae": "return rewards, 1 / 0", "dpo_loss": "raise SystemExit(0)"}
    bodies["masked_mean"] = "return x[mask].sum() / max(mask.sum(), 1)"
    text = text_of("exercises/functions.py")
    for name, body in bodies.items():
        text = text.replace(f'raise NotImplementedError("{name}")', body)
    (tmp_path / "functions.py").write_text(text, "utf-8")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--solutions={tmp_path}/functions.py"]
    done = subprocess.run([*command, ROOT / "exercises"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and f" 1 done, 2 wrong, {len(NAMES) - 3} not done yet" in done.stdout, done.stdout
    assert "return rewards, 1 / 0" in done.stdout and "grading.py" not in done.stdout


# --- Marks


@pytest.fixture
def handed_in(tmp_path):
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


def test_right_answers_and_runs_get_all_points_and_wrong_ones_none(handed_in):
    """The mistake is named."""
    assert points(mark.answers(handed_in)) == (16, 16) and points(mark.runs(handed_in)) == (21, 21)
    for name, (_, mistakes) in mark.right_answers(mark.draw("")).items():
        for x, sentence in mistakes.items():
            (handed_in / "answers.toml").write_text(f"{name} = {x:.4g}\n")
            marks = mark.answers(handed_in)
            assert marks[name][0] == 0 and sentence in marks[name][2] and points(marks) == (0, 16)


# --- A student's folder

ADA, BOB = "Ada Lovelace", "Bob"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of Ada, as it was released."""
    folder = tmp_path_factory.mktemp("students") / "ada"
    release.release(folder, ADA)
    return folder


def test_no_text_has_a_line_of_a_solution(folder):
    """Of the longer lines of code in lecture/ and in the scripts."""
    lines = set()
    for file in [*SCRIPTS, *(str(path.relative_to(ROOT)) for path in (ROOT / "lecture").glob("*.py"))]:
        for name in mark.FUNCTIONS.keys() & defined_in(file).keys():
            for statement in ast.parse(source_of(file, defined_in(file)[name])).body[0].body[1:]:
                lines |= {line.strip() for line in ast.unparse(statement).splitlines() if len(line.strip()) > 24}
    assert len(lines) > 40
    for file in [*folder.rglob("*.py"), *folder.glob("*.md"), *folder.glob("*.json")]:
        text = file.read_text("utf-8")
        if file.suffix == ".py":
            text = ast.unparse(ast.parse(text))  # as the lines above are written
        found = [line for line in lines if line in text]
        assert not found, (file.name, found)


# --- The museum of bugs

BUGS = tomllib.loads(text_of("exercises/bugs/bugs.toml"))["bug"]


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug["name"])
def test_a_planted_bug_is_caught_and_the_healthy_file_is_not(bug):
    """By the property that the gallery names. All other checks of the file hold, so that its sentence comes alone."""
    holds = getattr(checks, bug["property"])
    for text, is_healthy in ((play.healthy(bug["script"]), True), (play.plant(bug), False)):
        assert is_healthy == holds(lambda text=text, **settings: play.small(bug["script"], text, **settings))
