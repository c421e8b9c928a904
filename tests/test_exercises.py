"""The exercises: lecture/ and the scripts solve them, an edit is named for what it is, an empty file is not red."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from sources import ROOT

import dpo
import grpo
import ppo
import reward_model
import rloo

sys.path.insert(0, str(ROOT / "exercises"))

import capstone  # noqa: E402
import test_functions as graders  # noqa: E402

SCRIPTS = {"leave_one_out": rloo, "group_advantages": grpo, "preference_loss": reward_model, "dpo_loss": dpo}
SCRIPTS |= {"token_weights": grpo}
NAMES = [name.removeprefix("test_") for name in vars(graders) if name.startswith("test_")]


def solution(name):
    script = SCRIPTS.get(name, ppo)
    if name == "response_logprobs":
        return lambda logits, tokens, P, T: ppo.token_logprobs(logits[:, P - 1 : -1] / T, tokens[:, P:])
    return getattr(script, name)


def grade(name, function):
    getattr(graders, f"test_{name}")(SimpleNamespace(**{name: function}))


@pytest.mark.parametrize("name", NAMES)
def test_the_scripts_solve_the_exercises(name):
    grade(name, solution(name))


def mask_without_the_stop_token(tokens, stop_token_ids):
    mask, ended = ppo.response_mask(tokens, stop_token_ids)
    return mask & ~torch.isin(tokens, torch.tensor(stop_token_ids)), ended


def loss_without_a_gradient(*args):
    losses, ratio, clipped = ppo.policy_loss(*args)
    return losses.detach(), ratio, clipped


WRONG = [  # exercise, what a student writes instead, what the grader says
    ("masked_mean", lambda x, mask: x[mask].sum() / mask.numel(), "Padding is counted"),
    ("response_mask", mask_without_the_stop_token, "The stop token is not in the mask"),
    ("response_mask", lambda tokens, stops: ppo.response_mask(tokens, stops[:1]), "two stop tokens"),
    ("token_logprobs", lambda *args: None, "Is the `return` missing?"),
    ("preference_loss", lambda a, b, *rest: reward_model.preference_loss(b, a, *rest), "exchanged"),
    ("dpo_loss", lambda a, b, c, d, beta: dpo.dpo_loss(b, a, d, c, beta), "exchanged"),
    ("kl_estimate", lambda p, q, kind: ppo.kl_estimate(q, p, kind), "k1 has the wrong sign"),
    ("leave_one_out", lambda x, k: (x.view(-1, k) - x.view(-1, k).mean(1, True)).flatten(), "includes the reward"),
    ("group_advantages", lambda x, G, scale: x - x.mean(), "The mean is that of the batch"),
    ("token_weights", lambda mask, num_rows, *args: grpo.token_weights(mask, len(mask), *args), "of 3 rows"),
    ("masked_whiten", lambda x, mask, *rest: ppo.masked_whiten(x, mask, *rest) + 0 * x, "NaN * 0 is NaN"),
    ("gae", lambda rewards, *args: rewards[:, 99], "It stopped with"),
    ("policy_loss", loss_without_a_gradient, "No gradient flows"),
    ("policy_loss", lambda logprobs, *args: ppo.policy_loss(logprobs.sub_(0.1), *args), "changes its argument"),
    ("value_loss", lambda v, old, *rest: ppo.value_loss(v, v, *rest[:2], 1.0), "The clip is missing"),
]


@pytest.mark.parametrize(("name", "function", "words"), WRONG)
def test_a_mistake_is_named(name, function, words):
    with pytest.raises(pytest.fail.Exception) as failure:
        grade(name, function)
    assert words in str(failure.value)


def graded(folder, *options, **bodies):
    """Exit code, output and errors of pytest on the exercises, in which some functions have these bodies."""
    text = (ROOT / "exercises/functions.py").read_text("utf-8")
    for name, body in bodies.items():
        text = text.replace(f'raise NotImplementedError("{name}")', body)
    (folder / "functions.py").write_text(text, "utf-8")
    command = [sys.executable, "-m", "pytest", ROOT / "exercises", "-p", "no:cacheprovider", *options]
    command.append(f"--solutions={folder / 'functions.py'}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def test_a_file_half_done(tmp_path):
    """The student's line is shown, and none of the grader's."""
    bodies = {"gae": "return rewards, 1 / 0", "dpo_loss": "raise SystemExit(0)"}
    code, text, _ = graded(tmp_path, masked_mean="return x[mask].sum() / max(mask.sum(), 1)", **bodies)
    assert code == 1 and f" 1 done, 2 wrong, {len(NAMES) - 3} not done yet, first mend dpo_loss " in text, text
    assert "return rewards, 1 / 0" in text and "It stopped with SystemExit: 0" in text and "grading.py" not in text, (
        text
    )


@pytest.mark.slow
def test_a_function_that_ends_python_or_never_ends_is_named(tmp_path):
    for body, words in (
        ("import os; os._exit(0)", "ended Python"),
        ("\n    while True:\n        pass", "took more than"),
    ):
        code, _, said = graded(tmp_path, "-k", "gae", "--seconds=5", gae=body)
        assert code == 2 and f"The exercise gae {words}" in said


@pytest.mark.slow
def test_the_capstone_trains_with_the_students_functions(tmp_path, monkeypatch):
    """A small run with our solutions gets as far as the script itself; with a wrong sign it does not."""
    metric, words, _ = capstone.RUNS["ppo"]
    small = {"total_episodes": 128, "batch_size": 16, "response_length": 10}
    monkeypatch.setitem(capstone.RUNS, "ppo", (metric, words, small))
    ours = [capstone.train("ppo", {}), [0.0, 0.1]]
    assert capstone.verdict("ppo", capstone.train("ppo", {"gae": ppo.gae, "policy_loss": ppo.policy_loss}), ours)[0]
    turned = lambda *args: (-ppo.policy_loss(*args)[0], *ppo.policy_loss(*args)[1:])  # noqa: E731
    assert not capstone.verdict("ppo", capstone.train("ppo", {"policy_loss": turned}), ours[:1])[0]
