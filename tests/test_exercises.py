"""The exercises: lecture/ and the scripts solve them, an edit is named for what it is, an empty file is not red."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import dpo
import grpo
import ppo
import reward_model
import rloo

ROOT = Path(__file__).resolve().parent.parent
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


def value_loss_without_the_clip(values, old_values, returns, mask, _):
    return ppo.value_loss(values, values, returns, mask, 1.0)


def loss_without_a_gradient(*args):
    losses, ratio, clipped = ppo.policy_loss(*args)
    return losses.detach(), ratio, clipped


def loss_that_writes(logprobs, *args):
    return ppo.policy_loss(logprobs.sub_(0.1), *args)


def mask_of_one_stop_token(tokens, stop_token_ids):
    return ppo.response_mask(tokens, stop_token_ids[:1])


def mask_that_asks_its_length(tokens, stop_token_ids):
    mask, _ = ppo.response_mask(tokens, stop_token_ids)
    return mask, mask.sum(1) < tokens.shape[1]


def logprobs_of_rounded_probabilities(logits, tokens):
    return (logits.softmax(-1) + 1e-10).log().gather(-1, tokens[..., None]).squeeze(-1)


def dpo_loss_in_two_steps(chosen, rejected, ref_chosen, ref_rejected, beta):
    a, b = beta * (chosen - ref_chosen), beta * (rejected - ref_rejected)
    return -(a - b).sigmoid().log(), a.detach(), b.detach()


def weights_of_these_rows(mask, num_rows, *args):
    return grpo.token_weights(mask, len(mask), *args)


WRONG = [  # exercise, what a student writes instead, what the grader says
    ("masked_mean", lambda x, mask: x[mask].sum() / mask.numel(), "Padding is counted"),
    ("response_mask", mask_without_the_stop_token, "The stop token is not in the mask"),
    ("response_mask", mask_of_one_stop_token, "two stop tokens"),
    ("response_mask", mask_that_asks_its_length, "two stop tokens"),
    ("token_logprobs", lambda *args: None, "Is the `return` missing?"),
    ("token_logprobs", logprobs_of_rounded_probabilities, "should be -1000"),
    ("dpo_loss", dpo_loss_in_two_steps, "should be 1000"),
    ("token_weights", weights_of_these_rows, "of 3 rows"),
    ("preference_loss", lambda a, b, *rest: reward_model.preference_loss(b, a, *rest), "exchanged"),
    ("dpo_loss", lambda a, b, c, d, beta: solution("dpo_loss")(b, a, d, c, beta), "exchanged"),
    ("kl_estimate", lambda p, q, kind: ppo.kl_estimate(q, p, kind), "k1 has the wrong sign"),
    ("leave_one_out", lambda x, k: (x.view(-1, k) - x.view(-1, k).mean(1, True)).flatten(), "includes the reward"),
    ("leave_one_out", lambda x, k: x - x.mean(), "The mean is that of the batch"),
    ("group_advantages", lambda x, G, scale: x - x.mean(), "The mean is that of the batch"),
    ("masked_whiten", lambda x, mask, *rest: ppo.masked_whiten(x, mask, *rest) + 0 * x, "NaN * 0 is NaN"),
    ("gae", lambda rewards, *args: rewards[:, 99], "It stopped with"),
    ("policy_loss", loss_without_a_gradient, "No gradient flows"),
    ("policy_loss", loss_that_writes, "It changes its argument number 1"),
    ("value_loss", value_loss_without_the_clip, "The clip is missing"),
]


@pytest.mark.parametrize(("name", "function", "words"), WRONG)
def test_a_mistake_is_named(name, function, words):
    with pytest.raises(pytest.fail.Exception) as failure:
        grade(name, function)
    assert words in str(failure.value)


@pytest.fixture
def run(capsys, tmp_path, monkeypatch):
    """run(*options) -> exit code and output of pytest on the folder, in this process, which has loaded torch already.

    At its end pytest would collect all garbage of this process several times, to warn of errors in it.
    """
    monkeypatch.setenv("EXERCISE_UNDER_WAY", str(tmp_path / "under_way"))  # as if in the process that is started for it

    def call(*options):
        options = ["-p", "no:cacheprovider", "-p", "no:unraisableexception", *options]
        code = pytest.main([str(ROOT / "exercises"), *options])
        return code, capsys.readouterr().out

    return call


def solved(path, **bodies):
    """The option for a copy of the file, written there, in which some functions have these bodies."""
    text = (ROOT / "exercises/functions.py").read_text("utf-8")
    for name, body in bodies.items():
        text = text.replace(f'raise NotImplementedError("{name}")', body)
    path.write_text(text, "utf-8")
    return f"--solutions={path}"


def test_a_file_half_done(run, tmp_path):
    """The student's line is shown, and none of the grader's."""
    bodies = {"gae": "return rewards, 1 / 0", "dpo_loss": "raise SystemExit(0)"}
    half = solved(tmp_path / "half.py", masked_mean="return x[mask].sum() / max(mask.sum(), 1)", **bodies)
    code, text = run(half)
    assert code == 1 and f" 1 done, 2 wrong, {len(NAMES) - 3} not done yet, first mend dpo_loss " in text, text
    assert "ZeroDivisionError: division by zero" in text and "return rewards, 1 / 0" in text
    assert "It stopped with SystemExit: 0" in text
    assert "Traceback" not in text and "grading.py" not in text, text


NO_END = [
    ("import os; os._exit(0)", 60, "ended Python with exit code 0"),
    ("\n    while True:\n        pass", 1, "took more than 1 seconds (line "),
]


@pytest.mark.parametrize("body, seconds, words", NO_END)
def test_a_function_that_ends_python_or_never_ends_is_named(tmp_path, body, seconds, words):
    command = [sys.executable, "-m", "pytest", ROOT / "exercises", "-p", "no:cacheprovider", "-k", "gae"]
    command.append(f"--seconds={seconds}")
    done = subprocess.run([*command, solved(tmp_path / "a.py", gae=body)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and f"The exercise gae {words}" in done.stderr, done


SOLUTIONS = """
from ppo import gae, masked_mean, masked_whiten, policy_loss, response_mask, shape_rewards, token_logprobs
from ppo import value_loss


def response_logprobs(logits, tokens, P, temperature):
    return token_logprobs(logits[:, P - 1 : -1] / temperature, tokens[:, P:])
"""


def test_the_capstone_trains_with_the_students_functions(run, tmp_path, monkeypatch, pictures):
    """A small run with our solutions gets as far as the script itself; with a wrong sign it does not, and says so."""
    metric, words, _ = capstone.RUNS["ppo"]
    small = {"total_episodes": 128, "batch_size": 16, "response_length": 10}
    monkeypatch.setattr(capstone, "RUNS", {"ppo": (metric, words, small)})
    monkeypatch.setattr(capstone, "FOLDER", tmp_path / "capstone")  # is not there yet
    monkeypatch.setattr(capstone, "OURS", tmp_path / "ours.json")
    ours = [capstone.train("ppo", {}), [0.0, 0.1]]
    capstone.OURS.write_text(json.dumps({"ppo": ours}))
    (tmp_path / "right.py").write_text(SOLUTIONS)
    code, text = run(f"--solutions={tmp_path}/right.py", "-k", "capstone and ppo")
    end = f"{capstone.end_of(ours[0]):.2f}"
    assert f"from {ours[0][0]:.2f} to {end}; ours ends between 0.10 and {end}, by seed. The curves: " in text, text
    assert code == 0 and " the capstone: 1 done, 0 wrong, 0 not done yet " in text, text
    assert (tmp_path / "capstone/ppo.png").exists()
    turned = lambda *args: (-ppo.policy_loss(*args)[0], *ppo.policy_loss(*args)[1:])  # noqa: E731
    wrong = capstone.train("ppo", {"policy_loss": turned})
    assert not capstone.verdict("ppo", wrong, ours[:1])[0]
