"""The exercises: lecture/ and the scripts solve them, an edit is named for what it is, an empty file is not red."""

import ast
import inspect
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import dpo
import grpo
import ppo
import reward_model
import rloo

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "exercises"))

import capstone  # noqa: E402
import functions  # noqa: E402
import test_functions as graders  # noqa: E402

SCRIPTS = {"leave_one_out": rloo, "group_advantages": grpo, "preference_loss": reward_model, "dpo_loss": dpo}
SCRIPTS |= {"token_weights": grpo}
NAMES = [name.removeprefix("test_") for name in vars(graders) if name.startswith("test_")]


def response_logprobs(script, logits, tokens, prompt_length, temperature):
    """The script's function asks a model for the logits that it needs."""
    responses = tokens[:, prompt_length:]
    real = torch.ones_like(tokens, dtype=torch.bool)
    masks = real[:, :prompt_length], real[:, prompt_length:]
    rollout = script.Rollout(tokens[:, :prompt_length], masks[0], responses, masks[1], None, None, [])

    def model(logits_to_keep, **_):
        return SimpleNamespace(logits=logits[:, logits_to_keep])

    return script.token_logprobs(script.response_forward(model, rollout, temperature)[0], responses)


def solution(name, *edits):
    """The function of a script that solves an exercise, after edits of its text: pairs of old and new."""
    script = SCRIPTS.get(name, ppo)
    original = "response_forward" if name == "response_logprobs" else name
    text, space = inspect.getsource(getattr(script, original)), dict(vars(script))
    for old, new in edits:
        assert old in text, (old, text)
        text = new.join(text.rsplit(old, 1))  # the last one, which is not that of a docstring
    exec(text, space)
    if name == "token_weights":
        return lambda mask, num_tokens, args: mask * space[name](mask, len(mask), num_tokens, args)
    if name == "dpo_loss":
        return lambda *logps_and_beta: space[name](*logps_and_beta[:4], dpo.Args(beta=logps_and_beta[4]))
    return partial(response_logprobs, SimpleNamespace(**space)) if name == "response_logprobs" else space[name]


def grade(name, function):
    """Grades one function; raises what a student would read."""
    getattr(graders, f"test_{name}")(SimpleNamespace(**{name: function}))


@pytest.mark.parametrize("name", NAMES)
def test_the_scripts_solve_the_exercises(name):
    grade(name, solution(name))


OF_THE_LECTURE = [
    (file.stem, name)
    for file in sorted(ROOT.glob("lecture/*.py"))
    for name in capstone.functions_of(file.read_text("utf-8"))
    if name in NAMES
    and file.stem != "ddpo"  # images have no padding
    and (file.stem, name) != ("agent", "group_advantages")  # it does not divide by means
]


@pytest.mark.parametrize(("script", "name"), OF_THE_LECTURE)
def test_the_lecture_solves_the_exercises(script, name):
    """Its functions as they are pasted, beside those that they call."""
    tree = ast.parse(capstone.path_of(script).read_text("utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    names = {"torch": torch, "F": F}
    exec(compile(tree, script, "exec"), names)
    grade(name, names[name])
    assert list(inspect.signature(names[name]).parameters) == list(inspect.signature(vars(functions)[name]).parameters)


# exercise | a part of its solution | what a student writes instead | what the grader says
PLANTED = r"""
masked_mean | x[mask].mean() | x[mask].sum() / mask.numel() | Padding is counted
response_mask | cumsum(1) - is_stop | cumsum(1) | The stop token is not in the mask
token_logprobs | .log_softmax(-1) | .softmax(-1).log() | not finite
token_logprobs | return  |  | Is the `return` missing?
response_logprobs | torch.arange(P - 1, P + T - 1 | torch.arange(P, P + T | shifted by one
preference_loss | chosen - rejected - margin | rejected - chosen - margin | exchanged
dpo_loss | chosen_ratio - rejected_ratio | rejected_ratio - chosen_ratio | exchanged
kl_estimate | logprobs - ref_logprobs | ref_logprobs - logprobs | k1 has the wrong sign
shape_rewards | mask & ~F.pad(mask, (0, 1))[:, 1:] | torch.arange(len(mask[0])) == len(mask[0]) - 1 | last position
leave_one_out | groups.sum(1, keepdim=True) - groups) / (k - 1) | groups.mean(1, keepdim=True)) | includes the reward
group_advantages | .std(1, keepdim=True) + 1e-4 | .std(1, keepdim=True) | 0 / 0
masked_whiten | whitened.masked_fill(~mask, 0.0) | whitened * mask | NaN * 0 is NaN
policy_loss | .masked_fill(~mask, 0.0)\n    advantages |  * mask\n    advantages | or into its gradient
gae | rewards.masked_fill(~mask, 0.0)\n    values = values.masked_fill(~mask, 0.0) | rewards | What stands on padding
gae | rewards[:, t] | rewards[t] | It stopped with
policy_loss | torch.max(unclipped | torch.min(unclipped | The minimum is taken
policy_loss | log_ratio.exp() | log_ratio.exp().detach() | No gradient flows
policy_loss | logprobs - old_logprobs | logprobs.sub_(old_logprobs) | It changes its argument number 1
value_loss | torch.max(unclipped, clipped) | unclipped | The clip is forgotten
"""


@pytest.mark.parametrize("mistake", PLANTED.strip().splitlines())
def test_a_planted_mistake_is_named(mistake):
    name, old, new, words = mistake.replace("\\n", "\n").split(" | ")
    with pytest.raises(pytest.fail.Exception) as failure:
        grade(name, solution(name, (old, new)))
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
    assert code == 1 and f" 1 done, 2 wrong, {len(NAMES) - 3} not done yet, response_mask is the next " in text, text
    assert "ZeroDivisionError: division by zero" in text and "return rewards, 1 / 0" in text
    assert "It stopped with SystemExit: 0" in text
    assert "Traceback" not in text and "grading.py" not in text, text


NO_END = [
    ("import os; os._exit(0)", "ended Python with exit code 0"),
    ("\n    while True:\n        pass", "took more than 1 seconds (line "),
]


@pytest.mark.parametrize("body, words", NO_END)
def test_a_function_that_ends_python_or_never_ends_is_named(tmp_path, body, words):
    command = [sys.executable, "-m", "pytest", ROOT / "exercises", "-p", "no:cacheprovider", "--seconds=1", "-k", "gae"]
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
    assert code == 0, text
    assert (tmp_path / "capstone/ppo.png").exists()
    wrong = capstone.train("ppo", {"policy_loss": solution("policy_loss", ("torch.max(", "-torch.max("))})
    assert not capstone.verdict("ppo", wrong, ours[:1])[0]
