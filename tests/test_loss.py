"""Step 5: the losses of ppo.py and dpo.py, token by token or pair by pair, and their gradients."""

import json

import pytest
import torch
from numbers_of_others import MASK, close, golden, leaf, randn, spoil
from runs import script
from sources import ROOT

import ppo


def policy_gradient(logprobs, old, advantages):
    """Of the mean over tokens, with respect to the log-probabilities."""
    logprobs = leaf(logprobs)
    loss, _, _ = ppo.policy_loss(logprobs, old, advantages, MASK, 0.2)
    (ppo.masked_sum(loss, MASK) / MASK.sum()).backward()
    return logprobs.grad


def test_losses_and_gradients_ignore_padding():
    logprobs, old, advantages = -randn(3, *MASK.shape).abs()
    expected = policy_gradient(logprobs, old, advantages)
    close(policy_gradient(spoil(logprobs), spoil(old), spoil(advantages)), expected)
    values, old_values, returns = randn(3, *MASK.shape)
    expected, _ = ppo.value_loss(values, old_values, returns, MASK, 0.2)
    spoiled, _ = ppo.value_loss(spoil(values), spoil(old_values), spoil(returns), MASK, 0.2)
    close(spoiled, expected * MASK)


# --- SlicedLogprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens_of_a_slice", [1, 4, 99])
def test_slices_of_logits_are_the_whole(tokens_of_a_slice, dtype, monkeypatch):
    """Log-probabilities, entropies and the gradient are those of log_softmax, which sees all logits at once."""
    logits, weights = randn(3, 5, 17).to(dtype), randn(3, 5)
    tokens = torch.randint(17, (3, 5))
    plain, sliced = leaf(logits), leaf(logits)
    log_softmax = (plain.float() / 0.7).log_softmax(-1)
    expected = log_softmax.gather(-1, tokens[..., None])[..., 0]
    (expected * weights).sum().backward()
    monkeypatch.setattr("builtins.max", lambda *_: tokens_of_a_slice)
    logprobs, entropy = ppo.SlicedLogprobs.apply(sliced * 1, tokens, 0.7, True)
    monkeypatch.undo()
    (logprobs * weights).sum().backward()
    close(logprobs.detach(), expected.detach())
    close(entropy, -(log_softmax.exp() * log_softmax).sum(-1).detach())
    close(sliced.grad.float(), plain.grad.float(), rtol=1e-5 if dtype is torch.float32 else 1e-2, atol=1e-6)


def test_a_model_that_needs_its_logits_again_is_refused():
    """The gradient takes their memory. A head such as tanh keeps its result for its own gradient."""
    logits = randn(2, 3, 17).requires_grad_().tanh()
    logprobs, _ = ppo.SlicedLogprobs.apply(logits, torch.ones(2, 3, dtype=torch.long), 1.0, False)
    with pytest.raises(RuntimeError, match="inplace"):
        logprobs.sum().backward()


# --- dpo_loss

SIDES = ("policy_chosen_logps", "policy_rejected_logps", "reference_chosen_logps", "reference_rejected_logps")
VARIANTS = json.loads((ROOT / "tests/golden/trl0711_dpo.json").read_text())["outputs"]["variants"]
DPO = [variant for variant in VARIANTS if variant.startswith("sigmoid") and "ls=0.0" in variant]


@pytest.mark.parametrize("variant", DPO)
def test_dpo_gradients_against_trl07(variant):
    """The mean of the losses, and its gradient with respect to the policy's log-probabilities."""
    assert_trl07(variant, lambda *logps, beta, **_: script("dpo").dpo_loss(*logps, beta))


def assert_trl07(variant, dpo_loss):
    i, o = golden("trl0711_dpo")
    theirs = o["variants"][variant]
    kind, *rest = variant.split("|")
    beta, smoothing, free = (text.split("=")[1] for text in rest)
    chosen, rejected = (leaf(i[side]) for side in SIDES[:2])
    reference = [i[side] for side in SIDES[2:]]
    if free == "True" and kind != "kto_pair":
        reference = [torch.zeros_like(x) for x in reference]
    settings = dict(beta=float(beta), loss_type=kind, label_smoothing=float(smoothing))
    losses, chosen_rewards, rejected_rewards = dpo_loss(chosen, rejected, *reference, **settings)
    losses.mean().backward()
    close(losses.mean().detach(), theirs["loss_mean"])
    close(chosen.grad, theirs["grad_chosen"])
    close(rejected.grad, theirs["grad_rejected"])
    if free == "False":  # theirs keep the reference in the metrics where the loss leaves it out
        close((chosen_rewards > rejected_rewards).double().mean(), theirs["accuracy"])
        close((chosen_rewards - rejected_rewards).mean(), theirs["margin"])
