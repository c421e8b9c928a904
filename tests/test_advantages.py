"""Steps 3 and 4: from scores to per-token rewards and advantages, with a critic (GAE) or against a group."""

import pytest
import torch
from numbers_of_others import MASK, close, randn, spoil

import agent
import grpo
import ppo
import rloo

# --- masked_sum, masked_whiten


@pytest.mark.parametrize("rows", range(1, 5))
@pytest.mark.parametrize("columns", range(1, 5))
def test_masked_moments_equal_those_of_the_real_tokens(rows, columns):
    x = torch.randn(rows, columns)
    mask = torch.rand(rows, columns) < 0.6
    mask[0, 0] = True
    spoilt = x.masked_fill(~mask, float("nan"))
    torch.testing.assert_close(ppo.masked_sum(spoilt, mask), x[mask].sum())
    whitened = ppo.masked_whiten(spoilt, mask)
    assert not whitened[~mask].any()
    n = int(mask.sum())
    expected = (x[mask] - x[mask].mean()) / (x[mask].var(correction=min(1, n - 1)) + 1e-8).sqrt()
    torch.testing.assert_close(whitened[mask], expected)


# --- gae


def test_gae_ignores_padding_and_treats_rows_alone():
    rewards, values = randn(2, *MASK.shape)
    order = torch.randperm(5)
    clean = ppo.gae(rewards, values, MASK, 0.99, 0.95)
    spoilt = ppo.gae(spoil(rewards), spoil(values), MASK, 0.99, 0.95)
    mixed = ppo.gae(rewards[order], values[order], MASK[order], 0.99, 0.95)
    for ours, other, expected in zip(spoilt, mixed, clean):
        close(ours, expected)
        close(other, expected[order])


# --- responses without a reward


@pytest.mark.parametrize("script", [rloo, grpo])
def test_a_response_without_a_reward(script):
    """It is as if it were not in its group: the others have the baseline that they would have alone, and it has no
    advantage. Where a whole group has none, nothing is learnt from it."""
    none = float("nan")
    rewards = torch.tensor([1.0, none, 0.0, 0.0, none, none, none, none, 57.1, 57.1, none, 57.1])
    ids = torch.arange(12)[:, None]
    rollout = script.Rollout(ids, ids > -1, ids, ids > -1, ids[:, 0] > -1, ids / 8, [{}] * 12, 4)
    script.score_batch(rollout, {"f": lambda *_: rewards}, None, script.Args(device="cpu"))
    filled = rollout.scores
    close(grpo.group_advantages(filled, 4, "none"), torch.tensor([2 / 3, 0, -1 / 3, -1 / 3, *[0.0] * 8]))
    close(grpo.group_advantages(filled, 4, "group")[4:], torch.zeros(8), rtol=0, atol=0)
    alone = rloo.leave_one_out(torch.tensor([1.0, 0.0, 0.0]), 3)
    ours = rloo.leave_one_out(filled, 4)
    close(ours[[0, 2, 3]] / ours[0], alone / alone[0])
    assert ours[1].abs() < 1e-6 and ours[4:].abs().max() < 1e-5


def test_advantages_of_turns():
    """Of three episodes with the scores 3, 4 and 5, whose deviation is 1; the last one has no second turn."""
    turn = torch.tensor([[0, 1], [0, 1], [0, 0]])
    written = torch.tensor([[True, True], [True, True], [True, False]])
    advantages = agent.turn_advantages(torch.tensor([[1.0, 2], [0, 4], [5, 0]]), turn, written, 3)
    close(advantages, torch.tensor([[-1.0, -1], [0, 1], [1, 0]]) / 1.0001, written)
