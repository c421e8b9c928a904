"""Step 6: steps that are not made, and the first ratio."""

from itertools import cycle

import pytest
import torch
from runs import run, watch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import GPT2LMHeadModel

import grpo
import ppo
import rloo

SCRIPTS = {"ppo": ppo, "rloo": rloo, "grpo": grpo}

# --- steps that are left out


def mini_batches(script, folder, settings, monkeypatch, ratios=None):
    """Of each update of a run, for each of its six mini-batches: approximate KL, and whether a step was made.

    With `ratios` the script sees these as the mean ratios of its mini-batches.
    """
    updates = []
    coming = cycle(ratios or [])
    policy_loss = script.policy_loss

    def noted(logprobs, old_logprobs, advantages, mask, cliprange):
        losses, ratio, clipped = policy_loss(logprobs, old_logprobs, advantages, mask, cliprange)
        kl = 0.5 * ((logprobs - old_logprobs)[mask] ** 2).mean().item()
        updates[-1].append([kl, False])
        if ratios:
            ratio = torch.full_like(ratio, next(coming))
        return losses, ratio, clipped

    def note_step(*_):
        updates[-1][-1][1] = True

    settings = settings | dict(num_ppo_epochs=3, num_mini_batches=2, micro_batch_size=8, dataset_test_split="none")
    hook = register_optimizer_step_pre_hook(note_step)
    with monkeypatch.context() as patch:
        patch.setattr(script, "policy_loss", noted)
        watch(patch, script, "sample_batch", lambda *_: updates.append([]))
        lines = run(script, folder, **settings)
    hook.remove()
    assert [line["val/skipped_steps"] for line in lines] == [6 - sum(made for _, made in x) for x in updates]
    return updates


@pytest.mark.parametrize("name", ["ppo", "rloo"])
def test_after_one_and_a_half_times_the_target_there_are_no_more_steps(name, tiny, tmp_path, monkeypatch):
    settings = tiny[name] | dict(model="toy/sft", learning_rate=3e-3)
    free = mini_batches(SCRIPTS[name], tmp_path / "free", settings, monkeypatch)
    assert all(made for update in free for _, made in update) and {len(update) for update in free} == {6}
    limit = 0.99 * free[0][3][0]
    settings["target_kl"] = limit / 1.5
    stopped = mini_batches(SCRIPTS[name], tmp_path / "stopped", settings, monkeypatch)
    assert len(stopped[0]) <= 4
    for update in stopped:
        *before, (last, made) = update
        assert all(kl <= limit and made for kl, made in before)
        assert made == (last <= limit) and (len(update) == 6 or not made)


@pytest.mark.parametrize("name", ["ppo", "rloo"])
def test_a_ratio_beyond_the_threshold_costs_its_own_step(name, tiny, tmp_path, monkeypatch):
    settings = tiny[name] | dict(model="toy/sft", ratio_threshold=2.5)
    ratios = [1.0, 3.0, 1.0, 9.0, 2.0, 1.0]
    for update in mini_batches(SCRIPTS[name], tmp_path / "run", settings, monkeypatch, ratios):
        assert [made for _, made in update] == [ratio <= 2.5 for ratio in ratios]


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
