"""Step 6: mini-batches, gradients as sums over micro-batches, and steps that are not made."""

from types import SimpleNamespace

import pytest
import torch
from runs import run, watch
from torch import nn
from transformers import GPT2LMHeadModel

import grpo
import ppo
import rloo

SCRIPTS = {"ppo": ppo, "rloo": rloo, "grpo": grpo}

# --- steps that are left out


def steps_made(monkeypatch, script, mini_batches, **settings):
    """Of six mini-batches with these approximate KL and mean ratio, the numbers of those that made a step."""
    policy = nn.Linear(1, 1, bias=False)
    critic = nn.Linear(1, 1, bias=False)
    models = [policy, critic] if script is ppo else [policy]
    coming = iter(mini_batches)
    seen = []
    made = []

    def gradient(*_):
        kl, ratio = next(coming)
        seen.append(kl)
        for model in models:
            model.weight.grad = torch.ones(1, 1)
        stats = {"policy/approxkl_avg": 2 * kl, "val/ratio": 2 * ratio, "ratio_squared": 2 * ratio**2}
        return stats | {"policy/entropy_avg": 0.0, "ratio_error": 0.0, "token_error": 0.0, "tokens": 2, "actions": 2}

    monkeypatch.setattr(script, "gradient_and_sums", gradient)
    optimizer = torch.optim.SGD([{"params": model.parameters()} for model in models], lr=1.0)
    optimizer.register_step_pre_hook(lambda *_: made.append(len(seen) - 1))
    args = script.Args(num_ppo_epochs=3, num_mini_batches=2, micro_batch_size=4, **settings)
    mask = torch.ones(4, 2).bool()
    rollout = SimpleNamespace(mask=mask, by_length=lambda index: index)
    stats = script.optimize(*models, None, optimizer, rollout, [], args)
    assert stats["val/skipped_steps"] == 6 - len(made)
    return made


@pytest.mark.parametrize("name", ["ppo", "rloo"])
def test_steps_that_are_left_out(monkeypatch, name):
    """After 1.5 times the target nothing more; a ratio beyond the threshold costs its own step."""
    script = SCRIPTS[name]
    kls = [(kl, 1.0) for kl in (0.1, 0.14, 0.2, 0.16, 0.1, 0.1)]
    assert steps_made(monkeypatch, script, kls, target_kl=0.1) == [0, 1]
    assert steps_made(monkeypatch, script, kls, target_kl=0.14) == [0, 1, 2, 3, 4, 5]
    ratios = [(0.0, ratio) for ratio in (1.0, 3.0, 1.0, 9.0, 2.0, 1.0)]
    assert steps_made(monkeypatch, script, ratios, ratio_threshold=2.5) == [0, 2, 4, 5]


# --- the first ratio


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_policy_that_samples_otherwise_is_caught(tmp_path, tiny, monkeypatch, name, bf16):
    """Dropout in the update but not in the rollout: the first ratio is off, and the run stops and says so. One that has
    trained already goes on, with a warning."""
    forward = GPT2LMHeadModel.forward
    script = SCRIPTS[name]
    logged = []
    first = 0  # updates before it

    def with_dropout(*args, **kwargs):
        output = forward(*args, **kwargs)
        if torch.is_grad_enabled() and len(logged) >= first:
            output.logits = torch.dropout(output.logits, 0.2, True)
        return output

    monkeypatch.setattr(GPT2LMHeadModel, "forward", with_dropout)
    watch(monkeypatch, script.Run, "log", lambda *_: logged.append(1))
    settings = tiny[name] | dict(model="toy/sft", bf16=bf16)
    with pytest.raises(SystemExit, match="ratio"):
        run(script, tmp_path / "run", **settings)
    first = 1
    with pytest.warns(UserWarning, match="first_ratio_error"):
        lines = run(script, tmp_path / "other", **settings)
    assert len(lines) == 3
    errors = [line["policy/first_ratio_error"] for line in lines]
    assert errors[0] < script.ratio_rounding(script.Args(bf16=bf16)) < errors[1]
