"""The pure functions of the algorithm, held to what the mathematics says of them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_golden import token_entropy

import ppo
import reward_model
import sft

B, T = 5, 7
MASK = torch.arange(T) < torch.tensor([7, 1, 4, 6, 2])[:, None]
NAN = float("nan")


@pytest.fixture(autouse=True)
def same_chance():
    """Each test draws the same numbers in whatever order they run, and gives the generator back as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def spoil(x):
    """x with NaN on the padding."""
    return x.masked_fill(~MASK, NAN)


# --- advantages


def test_gae_lambda_1_is_the_sum_of_rewards_to_come():
    rewards, values, gamma = randn(B, T), randn(B, T), 0.9
    _, returns = ppo.gae(rewards, values, MASK, gamma, 1.0)
    for i in range(B):
        n = int(MASK[i].sum())
        for t in range(n):
            expected = sum(gamma ** (s - t) * rewards[i, s] for s in range(t, n))
            torch.testing.assert_close(returns[i, t], expected)


def test_gae_lambda_0_is_the_one_step_error():
    rewards, values, gamma = randn(B, T), randn(B, T), 0.9
    advantages, _ = ppo.gae(rewards, values, MASK, gamma, 0.0)
    for i in range(B):
        n = int(MASK[i].sum())
        for t in range(n):
            following = values[i, t + 1] if t + 1 < n else 0.0
            torch.testing.assert_close(advantages[i, t], rewards[i, t] + gamma * following - values[i, t])


def test_gae_is_zero_when_the_critic_is_right():
    """With V_t the true return and gamma = 1, nothing is better than expected."""
    rewards = randn(B, T) * MASK
    values = rewards.flip(1).cumsum(1).flip(1)
    advantages, returns = ppo.gae(rewards, values, MASK, 1.0, 0.7)
    torch.testing.assert_close(advantages, torch.zeros_like(advantages))
    torch.testing.assert_close(returns, values * MASK)


def test_gae_ignores_padding_and_treats_rows_alone():
    rewards, values, order = randn(B, T), randn(B, T), torch.randperm(B)
    clean = ppo.gae(rewards, values, MASK, 0.99, 0.95)
    for got, want in zip(ppo.gae(spoil(rewards), spoil(values), MASK, 0.99, 0.95), clean):
        torch.testing.assert_close(got, want)
    for got, want in zip(ppo.gae(rewards[order], values[order], MASK[order], 0.99, 0.95), clean):
        torch.testing.assert_close(got, want[order])


# --- whitening and masked moments


@pytest.mark.parametrize("shift", [True, False])
def test_whitening_gives_the_moments_it_promises(shift):
    x = randn(B, T) * 3 + 5
    real = ppo.masked_whiten(spoil(x), MASK, shift)[MASK]
    torch.testing.assert_close(real.var(), torch.ones((), dtype=torch.float64))
    torch.testing.assert_close(real.mean(), torch.zeros((), dtype=torch.float64) if shift else x[MASK].mean())
    assert (ppo.masked_whiten(spoil(x), MASK, shift)[~MASK] == 0).all()


def test_a_single_token_is_no_reason_for_nan():
    mask = torch.zeros(2, 3, dtype=torch.bool)
    mask[0, 0] = True
    assert ppo.masked_whiten(randn(2, 3), mask).isfinite().all()


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 10_000))
def test_masked_moments_equal_those_of_the_real_tokens(rows, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, dtype=torch.float64, generator=generator)
    mask = torch.rand(rows, columns, generator=generator) < 0.6
    mask[0, 0] = True
    torch.testing.assert_close(ppo.masked_mean(x.masked_fill(~mask, NAN), mask), x[mask].mean())
    if mask.sum() > 1:
        torch.testing.assert_close(ppo.masked_var(x.masked_fill(~mask, NAN), mask), x[mask].var())


# --- KL and reward shaping


def test_expectations_of_the_estimators():
    """Over the policy's own distribution, k1 and k3 average to the exact KL, k2 does not."""
    logits, ref_logits = randn(1, 1, 11) * 2, randn(1, 1, 11) * 2
    p, q = logits.log_softmax(-1).flatten(), ref_logits.log_softmax(-1).flatten()
    exact = ppo.full_kl(logits, ref_logits).squeeze()
    torch.testing.assert_close(exact, torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum"))
    for name, unbiased in (("k1", True), ("kl", True), ("k3", True), ("k2", False), ("mse", False), ("abs", False)):
        mean = (p.exp() * ppo.kl_estimate(p, q, name)).sum()
        assert torch.allclose(mean, exact) == unbiased, name


def test_k3_is_never_negative_and_all_vanish_when_nothing_moved():
    p, q = -randn(100).abs() * 5, -randn(100).abs() * 5
    assert (ppo.kl_estimate(p, q, "k3") >= 0).all() and (ppo.kl_estimate(p, q, "k1") < 0).any()
    for name in ("k1", "abs", "k2", "k3"):
        assert (ppo.kl_estimate(p, p, name) == 0).all()


def test_rewards_add_up_to_the_score_less_the_kl():
    scores, kl = randn(B), randn(B, T)
    rewards = ppo.shape_rewards(scores, spoil(kl), MASK, 0.3)
    torch.testing.assert_close(rewards.sum(1), scores - 0.3 * (kl * MASK).sum(1))
    last = MASK.sum(1) - 1
    torch.testing.assert_close((rewards + 0.3 * kl)[torch.arange(B), last], scores)
    assert (rewards[~MASK] == 0).all()


def test_eos_penalty_is_subtracted_where_there_is_no_stop():
    scores, ended = torch.tensor([1.0, 2.0]), torch.tensor([True, False])
    assert ppo.penalize_missing_eos(scores, ended, 0.5).tolist() == [1.0, 1.5]


def test_controller_raises_the_coefficient_above_the_target_only():
    args = ppo.Args(kl_target=6.0, kl_horizon=1000, batch_size=100)
    assert ppo.adapt_kl_coef(0.1, 12.0, args) == pytest.approx(0.1 * 1.02)
    assert ppo.adapt_kl_coef(0.1, 6.0, args) == pytest.approx(0.1)
    assert ppo.adapt_kl_coef(0.1, 0.0, args) == pytest.approx(0.1 * 0.98)


# --- losses


def policy_gradient(logprobs, old, advantages, mask=MASK, cliprange=0.2):
    logprobs = logprobs.clone().requires_grad_()
    loss, ratio, clipped = ppo.policy_loss(logprobs, old, advantages, mask, cliprange)
    ppo.masked_mean(loss, mask).backward()
    return logprobs.grad, ratio, clipped


def test_at_ratio_1_the_gradient_is_the_policy_gradient():
    """d/d logprob of -A ratio is -A where nothing has moved yet, whatever the clip range."""
    logprobs, advantages = -randn(B, T).abs(), randn(B, T)
    grad, ratio, clipped = policy_gradient(logprobs, logprobs, advantages)
    torch.testing.assert_close(grad, -advantages * MASK / MASK.sum())
    assert (ratio == 1).all() and not clipped.any()


def test_clipping_stops_rewarded_moves_and_no_others():
    old = torch.zeros(1, 4, dtype=torch.float64)
    mask = torch.ones(1, 4, dtype=torch.bool)
    logprobs = torch.tensor([[1.5, 1.5, 0.5, 0.5]], dtype=torch.float64).log()  # the ratios
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]], dtype=torch.float64)
    grad, _, clipped = policy_gradient(logprobs, old, advantages, mask)
    assert clipped.tolist() == [[True, False, False, True]]
    torch.testing.assert_close(grad, torch.tensor([[0.0, 1.5, -0.5, 0.0]], dtype=torch.float64) / 4)


def test_losses_and_gradients_ignore_padding():
    logprobs, old, advantages = -randn(B, T).abs(), -randn(B, T).abs(), randn(B, T)
    clean = policy_gradient(logprobs, old, advantages)[0]
    torch.testing.assert_close(policy_gradient(spoil(logprobs), spoil(old), spoil(advantages))[0], clean)
    values, old_values, returns = randn(B, T), randn(B, T), randn(B, T)
    losses = ppo.value_loss(values, old_values, returns, MASK, 0.2)[0]
    spoiled = ppo.value_loss(spoil(values), spoil(old_values), spoil(returns), MASK, 0.2)[0]
    torch.testing.assert_close(spoiled[MASK], losses[MASK])
    assert (spoiled[~MASK] == 0).all()


def test_values_in_range_are_not_counted_as_clipped():
    """Not even for rounding, where old + (new - old) would be another number than new."""
    values = torch.randn(1000) / 10
    old_values = (values.double() + torch.randn(1000).double() / 30).float()
    mask = torch.ones(1000, dtype=torch.bool)
    assert not ppo.value_loss(values, old_values, torch.randn(1000), mask, 0.5)[1].any()


def test_value_loss_without_clipping_is_half_the_squared_error():
    values, old_values, returns = randn(B, T), randn(B, T), randn(B, T)
    loss, _ = ppo.value_loss(values, old_values, returns, MASK, 1e9)
    torch.testing.assert_close(loss, 0.5 * (values - returns) ** 2 * MASK)


def test_value_clipping_never_lowers_the_loss():
    values, old_values, returns = randn(B, T), randn(B, T), randn(B, T)
    loss, clipped = ppo.value_loss(values, old_values, returns, MASK, 0.1)
    plain = 0.5 * (values - returns) ** 2 * MASK
    assert (loss >= plain).all() and torch.equal(loss > plain, clipped & MASK)


def test_token_functions_against_torch_distributions():
    logits, tokens = randn(B, T, 9), torch.randint(0, 9, (B, T))
    distribution = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(ppo.token_logprobs(logits, tokens), distribution.log_prob(tokens))
    torch.testing.assert_close(token_entropy(logits), distribution.entropy())


# --- reward model


def test_preference_loss_depends_on_differences_alone():
    chosen, rejected, margin = randn(B), randn(B), randn(B).abs()
    loss = reward_model.preference_loss(chosen, rejected, margin, 0.0)
    torch.testing.assert_close(reward_model.preference_loss(chosen + 3, rejected + 3, margin, 0.0), loss)
    same = reward_model.preference_loss(chosen, chosen, torch.zeros(B), 0.0)
    torch.testing.assert_close(same, torch.full((B,), 0.6931471805599453, dtype=torch.float64))


def test_probabilities_of_both_outcomes_add_up():
    a, b, zero = randn(B), randn(B), torch.zeros(B, dtype=torch.float64)
    total = sum((-reward_model.preference_loss(*pair, zero, 0.0)).exp() for pair in ((a, b), (b, a)))
    torch.testing.assert_close(total, torch.ones_like(total))


def test_calibration_of_perfect_and_of_overconfident_rewards():
    """Outcomes drawn with the probability that the model states, and rewards five times too large."""
    d = torch.randn(200_000) * 1.5
    outcome = torch.where(torch.rand(len(d)) < d.abs().sigmoid(), d.abs(), -d.abs())
    for scale, calibrated in ((1, True), (5, False)):
        error = max(abs(p - share) for p, share, _ in reward_model.calibration(outcome * scale))
        assert (error < 0.015) == calibrated


def test_reward_head_begins_with_the_deviation_of_the_n_details():
    head = torch.nn.Linear(99, 400)
    reward_model.init_reward_head(head)
    assert head.weight.std().item() == pytest.approx(0.1, rel=0.02)  # 1 / sqrt(99 + 1)


# --- supervised fine-tuning


def test_packing_keeps_every_token_in_order_but_the_remainder():
    rows = [([i] * n, [-i] * n) for i, n in enumerate((3, 5, 1, 8, 2))]
    blocks = sft.pack(rows, 4)
    joined = [x for ids, _ in rows for x in ids]
    assert [x for ids, _ in blocks for x in ids] == joined[: len(joined) // 4 * 4]
    assert all(len(ids) == len(labels) == 4 and [-x for x in ids] == labels for ids, labels in blocks)


def test_length_grouped_batches_hold_every_row_once_and_pad_less():
    lengths = torch.randint(1, 100, (1000,)).tolist()
    batch = lambda number, seed: reward_model.length_grouped_batch(lengths, number, 10, seed)  # noqa: E731
    passes = ((0, 1), (100, 1), (0, 2))  # the number of a first batch, and a seed; 100 batches are a pass
    batches, second, other = ([batch(first + i, seed) for i in range(100)] for first, seed in passes)
    assert len({frozenset(map(tuple, some)) for some in (batches, second, other)}) == 3  # whatever their order
    for some in (batches, second, other):
        assert sorted(i for batch in some for i in batch) == list(range(1000))
    grouped = sum(len(b) * max(lengths[i] for i in b) for b in batches)
    plain = sum(10 * max(lengths[i : i + 10]) for i in range(0, 1000, 10))
    assert grouped < 0.7 * plain
    half = [max(lengths[i] for i in b) for b in batches[:50]]
    assert half != sorted(half)  # the order of batches is random


def test_random_batches_hold_every_row_once_sorted_by_length():
    """The last batch of a pass has what is left; texts of all lengths meet in a batch, in which they are sorted."""
    rows = [([i] * n, []) for i, n in enumerate(torch.randint(1, 100, (999,)).tolist())]
    passes = ((0, 1), (100, 1), (0, 2))  # the number of a first batch, and a seed
    first, second, other = ([sft.random_batch(rows, n + i, 10, seed) for i in range(100)] for n, seed in passes)
    for batches in (first, second, other):
        assert sorted(row[0][0] for batch in batches for row in batch) == list(range(999)) and len(batches[-1]) == 9
        assert all(batch == sorted(batch, key=lambda row: len(row[0])) for batch in batches)
        assert sum(len(batch[-1][0]) - len(batch[0][0]) > 50 for batch in batches) > 80
    assert first != second and first != other


def test_labels_are_scored_by_the_logits_before_them():
    """A model that is certain of the next token has no loss; what stands under IGNORE has none either."""
    ids = torch.tensor([[4, 2, 0, 1]])
    logits = torch.nn.functional.one_hot(ids.roll(-1, 1), 5).double() * 1e3
    assert sft.label_losses(logits, ids).sum() == 0
    assert sft.label_losses(-logits, torch.full_like(ids, sft.IGNORE)).sum() == 0
    losses = sft.label_losses(-logits, torch.tensor([[sft.IGNORE, sft.IGNORE, 0, 1]]))[0]
    assert losses.gt(1).tolist() == [False, True, True]
