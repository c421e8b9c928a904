"""The pure functions of the scripts, held to the numbers that other libraries return for the same inputs.

The numbers are in tests/golden, whose README says where they come from. Where a library follows another convention or
has a fault, a comment says so and the test compares through the relation that has to hold exactly.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ppo
import reward_model
import sft

FOLDER = Path(__file__).parent / "golden"
FLOAT32 = {"rtol": 1e-5, "atol": 1e-6}  # for functions that go through float32 logits, whatever they are given


def to_tensor(x):
    """Lists of numbers as a tensor; anything else as it is."""
    if not isinstance(x, list):
        return x
    try:
        array = np.array(x)
    except ValueError:  # rows of different lengths
        return x
    return torch.from_numpy(array) if array.dtype.kind in "fib" else x


def token_entropy(logits):
    """The entropy that the update logs."""
    return ppo.token_logprobs_and_entropy(logits, torch.zeros(logits.shape[:-1], dtype=torch.long))[1]


def golden(name):
    """Inputs and outputs of one file, in float64."""
    data = json.loads((FOLDER / f"{name}.json").read_text(), object_hook=lambda d: {k: to_tensor(d[k]) for k in d})
    return data["inputs"], data["outputs"]


def names(pattern):
    """The files of a pattern; a pattern without files is an error, not an empty test."""
    found = sorted(path.stem for path in FOLDER.glob(f"{pattern}.json"))
    assert found, pattern
    return found


def close(ours, theirs, mask=None, rtol=1e-6, atol=1e-9):
    """Equal where the mask is true. The libraries' own float32 factors allow for no more than six digits."""
    ours, theirs = (torch.as_tensor(x, dtype=torch.float64) for x in (ours, theirs))
    if mask is not None:
        ours, theirs = ours[mask], theirs[mask]
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


def row_mean(x, mask):
    """OpenRLHF's mean: over the tokens of each row, then over rows. Ours is over all tokens of the batch."""
    return torch.stack([row[real].mean() for row, real in zip(x, mask)]).mean()


def leaf(x):
    """A copy that collects its gradient."""
    return x.clone().requires_grad_()


# --- advantages and whitening


def trl07_advantages(rewards, values, mask, gamma, lam, whiten_rewards):
    """Whitened advantages, and returns, as TRL 0.7 computes them, put together from our functions."""
    if not whiten_rewards:
        advantages, returns = ppo.gae(rewards, values, mask, gamma, lam)
        return ppo.masked_whiten(advantages, mask), returns
    # TRL 0.7 whitens the padding along with the rest: the zeros there become mean - mean / std, and GAE carries them
    # into the real tokens. So they are put back by hand, and GAE is told that nothing is padding.
    mean, var = ppo.masked_mean(rewards, mask), ppo.masked_var(rewards, mask)
    leak = mean - mean * torch.rsqrt(var + 1e-8)
    rewards = torch.where(mask, ppo.masked_whiten(rewards, mask, shift_mean=False), leak)
    advantages, returns = ppo.gae(rewards, values * mask, torch.ones_like(mask), gamma, lam)
    return ppo.masked_whiten(advantages, mask), returns


@pytest.mark.parametrize("name", names("trl07_gae_*"))
def test_gae_against_trl07(name):
    """GAE, reward and advantage whitening against TRL 0.7.11."""
    i, o = golden(name)
    mask = i["mask"].bool()
    advantages, returns = trl07_advantages(i["rewards"], i["values"], mask, i["gamma"], i["lam"], i["whiten_rewards"])
    close(returns, o["returns"], mask)
    close(advantages, o["advantages_whitened"], mask)


@pytest.mark.parametrize("case", range(4))
def test_gae_after_a_masked_prompt_against_trl07(case):
    """The same with rows whose mask starts late, the prompt being masked too."""
    i, o = golden("trl0711_gae_whiten")
    mask, o = i["mask"].bool(), o["cases"][case]
    advantages, returns = trl07_advantages(i["rewards"], i["values"], mask, o["gamma"], o["lam"], o["whiten_rewards"])
    close(returns, o["returns"], mask)
    close(advantages, o["advantages_whitened_unmasked_positions_garbage"], mask)


@pytest.mark.parametrize("case", range(2))
def test_whitened_rewards_do_not_leak(case):
    """Our own order of steps against TRL 0.7.11's numbers with the leak from the padding removed."""
    i, o = golden("trl0711_gae_whiten")
    mask, o = i["mask"].bool(), o["corrected_whiten_rewards_pads_rezeroed"][case]
    rewards = ppo.masked_whiten(i["rewards"], mask, shift_mean=False)
    advantages, returns = ppo.gae(rewards, i["values"], mask, o["gamma"], o["lam"])
    close(rewards, o["rewards_whitened"])  # on the padding as well: 0
    close(advantages, o["advantages_raw"], mask)
    close(returns, o["returns"], mask)
    close(ppo.masked_whiten(advantages, mask), o["advantages_whitened"])


def test_gae_against_openrlhf():
    """Advantages and returns against OpenRLHF 0.3.8."""
    i, o = golden("openrlhf_gae")
    mask = i["mask"].bool()
    advantages, returns = ppo.gae(i["rewards"], i["values"], mask, i["gamma"], i["lam"])
    close(advantages, o["advantages"], mask)
    close(returns, o["returns"], mask)


@pytest.mark.parametrize("name", ["trl07_masked_whiten", "trl016_masked_whiten"])
def test_whitening_against_trl(name):
    """Whitening with and without shifting the mean against TRL 0.7.11 and 0.16.1."""
    i, o = golden(name)
    mask = i["mask"].bool()
    close(ppo.masked_whiten(i["values"], mask), o["shift_mean_true"], mask)
    close(ppo.masked_whiten(i["values"], mask, shift_mean=False), o["shift_mean_false"], mask)


def test_mean_and_variance_against_trl07():
    """Masked mean and Bessel-corrected variance against TRL 0.7.11."""
    i, o = golden("trl07_masked_whiten")
    mask = i["mask"].bool()
    close(ppo.masked_mean(i["values"], mask), o["mean"])
    close(ppo.masked_var(i["values"], mask), o["var_unbiased"])


def test_moments_after_a_masked_prompt_against_trl07():
    """Mean, variance and whitening against TRL 0.7.11, for rows whose mask starts late and for a full mask."""
    i, o = golden("trl0711_gae_whiten")
    mask, x = i["mask"].bool(), i["values"]
    n = mask.sum()
    close(ppo.masked_mean(x, mask), o["masked_mean"])
    close(torch.stack([ppo.masked_mean(row, real) for row, real in zip(x, mask)]), o["masked_mean_axis1"])
    close(ppo.masked_var(x, mask), o["masked_var_unbiased"])
    close(ppo.masked_var(x, mask) * (n - 1) / n, o["masked_var_biased"])
    close(ppo.masked_whiten(x, mask), o["masked_whiten"], mask)
    close(ppo.masked_whiten(x, mask, shift_mean=False), o["masked_whiten_noshift"], mask)
    example = o["whiten_example_in"]
    full = torch.ones_like(example, dtype=torch.bool)
    close(ppo.masked_whiten(example, full, shift_mean=False), o["whiten_unbiased_noshift"])


def test_whitening_against_nplus():
    """Whitening against the N+ details, which divide by the biased deviation: ours is smaller by sqrt((n-1)/n)."""
    i, o = golden("nplus_whiten_eos")
    mask, x = i["mask"].bool(), i["values"]
    n, mean = mask.sum(), ppo.masked_mean(x, mask)
    factor = ((n - 1) / n.double()).sqrt()
    close(ppo.masked_whiten(x, mask), o["whiten_shift"] * factor, mask)
    # Without the shift the mean stays in both, so only the distance from it is scaled.
    close(ppo.masked_whiten(x, mask, shift_mean=False) - mean, (o["whiten_noshift"] - mean) * factor, mask)


# --- KL and rewards


@pytest.mark.parametrize("name", names("trl07_rewards_kl_penalty_*"))
def test_rewards_against_trl07(name):
    """KL, its penalty, and the score on the last real token, under each of TRL 0.7.11's KL penalties."""
    i, o = golden(name)
    mask = i["mask"].bool()
    if i["kl_penalty"] == "full":  # log-probabilities (B, T, V), which are logits too
        kl = ppo.full_kl(i["logprobs"], i["ref_logprobs"])
    else:
        kl = ppo.kl_estimate(i["logprobs"], i["ref_logprobs"], i["kl_penalty"])
    close(kl, o["kl"], mask)
    close(ppo.shape_rewards(i["scores"], kl, mask, i["kl_coef"]), o["rewards"], mask)
    close(ppo.shape_rewards(0 * i["scores"], kl, mask, i["kl_coef"]), o["non_score_reward"], mask)


def make_rollout(mask, logprobs, **others):
    """A rollout of which only what is given means anything."""
    zeros = torch.zeros_like(logprobs)
    defaults = {"prompts": None, "prompt_mask": None, "responses": None, "ended": mask.any(1), "ref_logprobs": zeros}
    defaults |= {"kl": zeros, "values": zeros, "advantages": zeros, "returns": zeros}
    return ppo.Rollout(mask=mask, old_logprobs=logprobs, **(defaults | others))


@pytest.mark.parametrize("mode", ["kl", "abs", "mse", "full"])
def test_kl_modes_and_their_metrics_against_trl07(mode):
    """KL penalties after a masked prompt, and what is logged of them, against TRL 0.7.11."""
    i, o = golden("trl0711_kl_penalty_modes")
    mask, theirs = i["mask"].bool(), o["modes"][mode]
    if mode == "full":
        kl = ppo.full_kl(i["logits"], i["ref_logits"])
    else:
        kl = ppo.kl_estimate(i["logprobs"], i["ref_logprobs"], mode)
    close(kl, theirs["kl"])
    close(ppo.shape_rewards(i["scores"], kl, mask, i["kl_coef"]), theirs["rewards"], mask)
    close(ppo.shape_rewards(0 * i["scores"], kl, mask, i["kl_coef"]), theirs["non_score_reward"], mask)
    stats = ppo.rollout_stats(make_rollout(mask, i["logprobs"], kl=kl, scores=i["scores"], kl_coef=i["kl_coef"]))
    close(stats["objective/kl"], theirs["objective_kl"])
    close(stats["objective/entropy"], o["objective_entropy_0711"])
    # TRL 0.7 takes this one mean over tokens; ours, like the others, sums over a row first.
    close(stats["objective/non_score_reward"] * len(mask) / mask.sum(), theirs["ppo_mean_non_score_reward"])


@pytest.mark.parametrize("estimators, key", [(("k1", "kl"), "k1"), (("k2", "mse"), "k2"), (("k3",), "k3")])
def test_kl_estimators_against_trl(estimators, key):
    """k1 and k3 against TRL 0.17, k2 against the mse penalty of TRL 0.7.11, under both of our names for them."""
    i, o = golden("trl0711_kl_penalty_modes")
    for estimator in estimators:
        close(ppo.kl_estimate(i["logprobs"], i["ref_logprobs"], estimator), o[key])


def test_rewards_against_openrlhf():
    """KL and rewards against OpenRLHF 0.3.8; no score of this file reaches its clamp at 10."""
    i, o = golden("openrlhf_reward_shaping")
    mask = i["mask"].bool()
    kl = ppo.kl_estimate(i["logprobs"], i["ref_logprobs"], "k1")
    rewards = ppo.shape_rewards(i["scores"], kl, mask, i["kl_coef"])
    close(kl, o["kl"], mask)
    close(rewards, o["rewards"])


def test_rewards_and_gae_against_openrlhf031():
    """KL, rewards, GAE and normalised advantages against OpenRLHF 0.3.1."""
    i, o = golden("openrlhf031_losses_rewards_gae")
    mask = i["action_mask"].bool()
    kl = ppo.kl_estimate(i["log_probs"], i["base_log_probs"], "k1")
    scores = i["rm_reward"].clamp(-10, 10)  # OpenRLHF clamps scores, ours leaves them alone
    rewards = ppo.shape_rewards(scores, kl, mask, i["kl_coef"])
    close(kl, o["kl_per_token"], mask)
    close(rewards, o["rewards"])
    close(rewards.sum(1), o["info_return"])
    # What OpenRLHF logs as KL is a mean over tokens; our objective/kl sums over a response.
    close(torch.stack([ppo.masked_mean(row, real) for row, real in zip(kl, mask)]), o["info_kl_token_mean"])
    close(ppo.masked_mean(kl, mask), o["logged_kl"])
    advantages, returns = ppo.gae(rewards, i["old_values"], mask, i["gamma"], i["lambd"])
    close(advantages, o["gae_advantages"])
    close(returns, o["gae_returns"])
    n = mask.sum().double()  # the deviation without Bessel's correction, as in the N+ details
    whitened = ppo.masked_whiten(advantages, mask)
    close(whitened, o["advantages_normalized_biased_std"] * ((n - 1) / n).sqrt(), mask)


@pytest.mark.parametrize("case", range(4))
def test_rewards_and_gae_against_trl016(case):
    """EOS penalty, rewards, whitening and GAE against TRL 0.16.1, from the responses on."""
    i, o = golden("trl0161_ppo_rewards_gae")
    theirs, a = o["cases"][case], o["cases"][case]["args"]
    mask, ended = ppo.response_mask(i["responses"], i["eos_id"])
    assert torch.equal(mask, ~theirs["padding_mask"]) and torch.equal(ended, theirs["contain_eos"])
    scores = ppo.penalize_missing_eos(i["scores"], ended, a["missing_eos_penalty"] or 0.0)
    kl = ppo.kl_estimate(i["logprobs"], i["ref_logprobs"], "k1")
    close(scores, theirs["scores_after_penalty"])
    close(kl, theirs["kl"], mask)
    # TRL 0.16 counts one position after the last real token as part of the episode, where there is room for it, and
    # puts the score there. So the score is moved, and the mask is one longer, until the advantages are whitened.
    longer = F.pad(mask, (1, 0), value=True)[:, :-1]
    last = longer.sum(1) - 1
    assert torch.equal(longer, ~theirs["padding_mask_p1"]) and torch.equal(last, theirs["actual_end"])
    rewards = ppo.shape_rewards(0 * scores, kl, mask, a["kl_coef"]) + F.one_hot(last, mask.shape[1]) * scores[:, None]
    if a["whiten_rewards"]:
        rewards = ppo.masked_whiten(rewards, longer, shift_mean=False)
    advantages, returns = ppo.gae(rewards, i["values"], longer, a["gamma"], a["lam"])
    close(rewards, theirs["rewards_after_step5"])
    close(advantages, theirs["advantages_raw"])
    close(returns, theirs["returns"])
    close(ppo.masked_whiten(advantages, mask), theirs["advantages"])


@pytest.mark.parametrize("case", range(2))
def test_rewards_and_gae_with_the_score_on_the_last_token(case):
    """Our own steps 3 and 4 against the inputs of TRL 0.16.1, with the score where TRL 0.7 and OpenRLHF put it."""
    i, o = golden("trl0161_ppo_rewards_gae")
    theirs, a = o["alternative_score_at_last_token"][case], o["cases"][0]["args"]
    mask, ended = ppo.response_mask(i["responses"], i["eos_id"])
    scores = ppo.penalize_missing_eos(i["scores"], ended, theirs["missing_eos_penalty"] or 0.0)
    kl = ppo.kl_estimate(i["logprobs"], i["ref_logprobs"], "k1")
    rewards = ppo.shape_rewards(scores, kl, mask, a["kl_coef"])
    advantages, returns = ppo.gae(rewards, i["values"], mask, a["gamma"], a["lam"])
    close(rewards, theirs["rewards"])
    close(advantages, theirs["advantages_raw"])
    close(returns, theirs["returns"])
    close(ppo.masked_whiten(advantages, mask), theirs["advantages_whitened"])


@pytest.mark.parametrize("case", range(4))
def test_objective_metrics_against_trl016(case):
    """What is logged of a batch before its update against TRL 0.16.1."""
    i, o = golden("trl0161_ppo_rewards_gae")
    a, theirs = o["cases"][case]["args"], o["cases"][case]["stats"]
    mask, ended = ppo.response_mask(i["responses"], i["eos_id"])
    scores = ppo.penalize_missing_eos(i["scores"], ended, a["missing_eos_penalty"] or 0.0)
    kl = ppo.kl_estimate(i["logprobs"], i["ref_logprobs"], "k1")
    known = dict(kl=kl, ended=ended, scores=scores, kl_coef=a["kl_coef"])
    stats = ppo.rollout_stats(make_rollout(mask, i["logprobs"], **known))
    close(stats["objective/kl"], theirs["objective_kl"])
    close(stats["objective/non_score_reward"], theirs["objective_non_score_reward"])
    close(stats["objective/scores"], theirs["objective_scores"])
    close(stats["objective/rlhf_reward"], theirs["objective_rlhf_reward"])
    assert stats["val/num_eos_tokens"] == theirs["num_eos_after_truncation"]
    # TRL 0.16 marks padding by a log-probability of 1 and then sums that too.
    close(stats["objective/entropy"] - (~mask).sum() / len(mask), theirs["objective_entropy_TRL_BUGGY"])
    close(stats["objective/entropy"], theirs["objective_entropy_CORRECT"])


def test_missing_eos_against_nplus():
    """The EOS penalty is subtracted, as in TRL; the N+ details replace the score by -1 instead."""
    i, o = golden("nplus_whiten_eos")
    ended = i["contain_eos"]
    ours = ppo.penalize_missing_eos(i["scores"], ended, 1.0)
    close(ours, o["scores_trl_subtract_1p0"])
    # Replacing the score of a row is subtracting what it is above the new one; one row of the file has no EOS.
    penalty = (i["scores"] - i["penalty_reward_value"])[~ended].item()
    close(ppo.penalize_missing_eos(i["scores"], ended, penalty), o["scores_replaced"])


def test_adaptive_kl_controller_against_trl07():
    """The coefficient after each of 40 updates against TRL 0.7.11."""
    i, o = golden("trl07_adaptive_kl_controller")
    kl_coef = i["init_kl_coef"]
    for kl, episodes, coefficient in o["kl_nsteps_coef"].tolist():
        args = ppo.Args(kl_target=i["target"], kl_horizon=i["horizon"], batch_size=episodes)
        kl_coef = ppo.adapt_kl_coef(kl_coef, kl, args)
        assert kl_coef == pytest.approx(coefficient, rel=1e-9)


def test_kl_controller_at_its_bounds_against_trl07():
    """At the target, inside the clip and far outside it, against TRL 0.7.11."""
    i, o = golden("trl0711_kl_controller")
    for step in o["sequence"]:
        args = ppo.Args(kl_target=i["target"], kl_horizon=i["horizon"], batch_size=step["n_steps"])
        after = ppo.adapt_kl_coef(step["value_before"], step["current_kl"], args)
        assert after == pytest.approx(step["value_after"], rel=1e-9)


# --- policy and value loss


@pytest.mark.parametrize("name", names("trl07_ppo_loss_*"))
def test_losses_and_gradients_against_trl07(name):
    """Policy and value loss, their gradients and their metrics against TRL 0.7.11."""
    i, o = golden(name)
    mask, logprobs, values = i["mask"].bool(), leaf(i["logprobs"]), leaf(i["values"])
    pg_loss, ratio, pg_clipped = ppo.policy_loss(logprobs, i["old_logprobs"], i["advantages"], mask, i["cliprange"])
    vf_loss, vf_clipped = ppo.value_loss(values, i["old_values"], i["returns"], mask, i["cliprange_value"])
    policy, value = ppo.masked_mean(pg_loss, mask), i["vf_coef"] * ppo.masked_mean(vf_loss, mask)
    (policy + value).backward()
    close(policy.detach(), o["policy_loss"])
    close(value.detach(), o["value_loss_times_vf_coef"])
    close(logprobs.grad, o["grad_logprobs"])
    close(values.grad, o["grad_values"])
    close(ppo.masked_mean(pg_clipped.double(), mask), o["policy_clipfrac"])
    close(ppo.masked_mean(vf_clipped.double(), mask), o["value_clipfrac"])
    close(ppo.masked_mean(token_entropy(i["logits"]), mask), o["entropy"])
    close(ppo.masked_mean(ppo.kl_estimate(i["logprobs"], i["old_logprobs"], "k2"), mask), o["approxkl"])
    close(ppo.masked_mean(ppo.kl_estimate(i["old_logprobs"], i["logprobs"], "k1"), mask), o["policykl"])
    close(ppo.masked_mean((i["values"] - i["returns"]) ** 2, mask), o["value_error"])
    close(ppo.masked_var(i["returns"], mask), o["returns_var"])


def test_losses_after_a_masked_prompt_against_trl07():
    """The same from labels and logits on, for rows whose mask starts late."""
    i, o = golden("trl0711_ppo_loss")
    mask, logprobs, values = i["mask"].bool(), leaf(i["logprobs"]), leaf(i["vpreds"])
    config, theirs = i["config"], o["stats"]
    close(ppo.token_logprobs(i["logits"], i["labels"]), i["logprobs"], atol=1e-5)  # the file has them to five digits
    pg_loss, ratio, pg_clipped = ppo.policy_loss(
        logprobs, i["old_logprobs"], i["advantages"], mask, config["cliprange"]
    )
    vf_loss, vf_clipped = ppo.value_loss(values, i["values"], i["returns"], mask, config["cliprange_value"])
    policy, value = ppo.masked_mean(pg_loss, mask), ppo.masked_mean(vf_loss, mask)
    (policy + config["vf_coef"] * value).backward()
    close(policy.detach(), theirs["loss/policy"])
    close(value.detach(), theirs["loss/value"])
    close(logprobs.grad, o["grad_logprobs"])
    close(values.grad, o["grad_vpreds"])
    close(ratio.detach(), theirs["policy/ratio"], mask)
    close(ppo.masked_mean(pg_clipped.double(), mask), theirs["policy/clipfrac"])
    close(ppo.masked_mean(vf_clipped.double(), mask), theirs["val/clipfrac"])
    close(ppo.masked_mean(i["vpreds"], mask), theirs["val/vpred"])
    close(ppo.masked_var(i["values"], mask), theirs["val/var"])
    close(ppo.masked_var(i["returns"], mask), theirs["returns/var"])


def test_losses_and_gradients_against_trl016():
    """From logits at a temperature to loss and gradient against TRL 0.16.1."""
    i, o = golden("trl0161_ppo_loss_metrics")
    mask, longer, start = ~i["padding_mask"], ~i["padding_mask_p1"], i["context_length"] - 1
    all_logits, all_values = leaf(i["logits_full"]), leaf(i["vpred_full"])
    logits = all_logits[:, start:-1] / (i["temperature"] + 1e-7)  # TRL 0.16 adds 1e-7, which ours does not
    logprobs = ppo.token_logprobs(logits, i["responses"])
    pg_loss, ratio, pg_clipped = ppo.policy_loss(logprobs, i["old_logprobs"], i["advantages"], mask, i["cliprange"])
    # TRL 0.16 trains the value one position beyond the last real token, where it also puts the score.
    vf_loss, vf_clipped = ppo.value_loss(
        all_values[:, start:-1], i["values"], i["returns"], longer, i["cliprange_value"]
    )
    policy, value = ppo.masked_mean(pg_loss, mask), ppo.masked_mean(vf_loss, longer)
    (policy + i["vf_coef"] * value).backward()
    close(logprobs.detach(), o["new_logprobs"], mask)
    close(ratio.detach(), o["ratio"])  # on the padding as well: 1
    close(policy.detach(), o["pg_loss"])
    close(value.detach(), o["vf_loss"])
    close(all_logits.grad, o["grad_logits"])
    close(all_values.grad, o["grad_vpred"])
    close(ppo.masked_mean(pg_clipped.double(), mask), o["pg_clipfrac"])
    close(ppo.masked_mean(vf_clipped.double(), longer), o["vf_clipfrac"])


class Table(nn.Module):
    """A model whose output for a row is looked up: the prompt holds the row's number."""

    def __init__(self, outputs):
        super().__init__()
        self.outputs = nn.Parameter(outputs.clone())

    def forward(self, input_ids, logits_to_keep=slice(None), **_):
        outputs = self.outputs[input_ids[:, 0], : input_ids.shape[1]]
        return SimpleNamespace(logits=outputs[:, logits_to_keep], last_hidden_state=outputs[..., None])


def optimize_once(monkeypatch, logits, values, prompt_length, rollout, **args):
    """ppo.optimize with one step over the whole batch: its metrics and both gradients."""
    monkeypatch.setattr(ppo, "check_first_ratio", lambda *_: None)  # the files begin with a policy that has moved
    rows = torch.arange(len(logits))[:, None].expand(-1, prompt_length)
    rollout.prompts, rollout.prompt_mask = rows, torch.ones_like(rows, dtype=torch.bool)
    policy, body = Table(logits), Table(values)
    sgd = torch.optim.SGD([{"params": [x.outputs]} for x in (policy, body)], lr=1.0)
    args = ppo.Args(num_ppo_epochs=1, max_grad_norm=float("inf"), **args)
    stats = ppo.optimize(policy, ppo.Critic(body, nn.Identity()), sgd, rollout, [], args)
    return stats, logits - policy.outputs.detach(), values - body.outputs.detach()


def test_optimize_against_trl07(monkeypatch):
    """The update itself, metrics and gradients, against TRL 0.7.11."""
    i, o = golden("trl0711_ppo_loss")
    mask, theirs, config = i["mask"].bool(), o["stats"], i["config"]
    rollout = make_rollout(mask, i["old_logprobs"], responses=i["labels"], values=i["values"])
    rollout.advantages, rollout.returns = i["advantages"], i["returns"]
    logits, values = F.pad(i["logits"], (0, 0, 0, 1)), F.pad(i["vpreds"], (0, 1))  # behind a prompt of one token
    # One micro-batch, since a part of a batch is cut to its longest response, which would cut rows that start late.
    args = {"temperature": 1.0, "micro_batch_size": len(mask), **config}
    stats, _, values_grad = optimize_once(monkeypatch, logits, values, 1, rollout, **args)
    pairs = {"loss/policy_avg": "loss/policy", "loss/value_avg": "loss/value", "policy/approxkl_avg": "policy/approxkl"}
    pairs |= {"policy/clipfrac_avg": "policy/clipfrac", "val/clipfrac_avg": "val/clipfrac"}
    pairs |= {"policy/entropy_avg": "policy/entropy"}
    for ours, key in pairs.items():
        close(stats[ours], theirs[key], **FLOAT32)
    close(stats["val/ratio"], ppo.masked_mean(theirs["policy/ratio"], mask), **FLOAT32)
    close(values_grad[:, :-1], o["grad_vpreds"], **FLOAT32)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_optimize_against_trl016(monkeypatch, size):
    """The update itself, metrics and gradients, in micro-batches of any size, against TRL 0.16.1."""
    i, o = golden("trl0161_ppo_loss_metrics")
    mask, longer, start = ~i["padding_mask"], ~i["padding_mask_p1"], i["context_length"] - 1
    rollout = make_rollout(mask, i["old_logprobs"], responses=i["responses"], values=i["values"])
    rollout.advantages, rollout.returns = i["advantages"], i["returns"]
    args = {key: i[key] for key in ("temperature", "vf_coef", "cliprange", "cliprange_value")}
    stats, logits_grad, values_grad = optimize_once(
        monkeypatch, i["logits_full"], i["vpred_full"], i["context_length"], rollout, micro_batch_size=size, **args
    )
    close(stats["loss/policy_avg"], o["pg_loss"], **FLOAT32)
    close(stats["policy/clipfrac_avg"], o["pg_clipfrac"], **FLOAT32)
    close(logits_grad, o["grad_logits"], **FLOAT32)
    # TRL 0.16 has one value more in a row that ends early; on the others the gradient differs by the count alone.
    close(values_grad[:, start:-1], o["grad_vpred"][:, start:-1] * longer.sum() / mask.sum(), mask, **FLOAT32)
    # TRL 0.16 takes these means over padding too, where the log-ratio is 0 and the ratio 1.
    diluted, correct = o["metrics_TRL_unmasked"], o["metrics_CORRECT_masked"]
    share = mask.double().mean()
    close(stats["policy/approxkl_avg"] * share, diluted["approxkl"], **FLOAT32)
    close(stats["val/ratio"] * share + (1 - share), diluted["ratio"], **FLOAT32)
    entropy = token_entropy(i["logits_full"][:, start:-1] / i["temperature"])
    close(entropy.mean(), diluted["entropy"])
    close(stats["policy/entropy_avg"], correct["entropy"], **FLOAT32)
    close(stats["policy/approxkl_avg"], correct["approxkl"], **FLOAT32)
    close(stats["val/ratio"], correct["ratio"], **FLOAT32)


def test_policy_loss_against_openrlhf():
    """Policy loss and gradient against OpenRLHF 0.3.8, through its mean over rows."""
    i, o = golden("openrlhf_policy_loss_sequence_mean")
    mask, logprobs = i["mask"].bool(), leaf(i["logprobs"])
    losses, _, _ = ppo.policy_loss(logprobs, i["old_logprobs"], i["advantages"], mask, i["cliprange"])
    loss = row_mean(losses, mask)
    loss.backward()
    close(loss.detach(), o["policy_loss"])
    close(logprobs.grad, o["grad_logprobs"])


def test_value_loss_against_openrlhf():
    """Value loss and gradient against OpenRLHF 0.3.8, through its mean over rows."""
    i, o = golden("openrlhf_value_loss_sequence_mean")
    mask, values = i["mask"].bool(), leaf(i["values"])
    losses, _ = ppo.value_loss(values, i["old_values"], i["returns"], mask, i["cliprange_value"])
    loss = row_mean(losses, mask)
    loss.backward()
    close(loss.detach(), o["value_loss"])
    close(values.grad, o["grad_values"])


def test_losses_against_openrlhf031():
    """Both losses and gradients against OpenRLHF 0.3.1, and the value loss without its clip."""
    i, o = golden("openrlhf031_losses_rewards_gae")
    mask, logprobs, values = i["action_mask"].bool(), leaf(i["log_probs"]), leaf(i["values"])
    pg_loss, _, _ = ppo.policy_loss(logprobs, i["old_log_probs"], i["advantages"], mask, i["eps_clip"])
    vf_loss, _ = ppo.value_loss(values, i["old_values"], i["returns"], mask, i["value_clip"])
    free_loss, _ = ppo.value_loss(i["values"], i["old_values"], i["returns"], mask, float("inf"))
    policy, value = row_mean(pg_loss, mask), row_mean(vf_loss, mask)
    (policy + value).backward()
    close(policy.detach(), o["policy_loss"])
    close(value.detach(), o["value_loss"])
    close(row_mean(free_loss, mask), o["value_loss_noclip"])
    close(logprobs.grad, o["policy_grad"])
    close(values.grad, o["value_grad"])


# --- log-probabilities, entropy, masks, read-out


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropy_with_temperature_against_trl016(temperature):
    """Log-probabilities and entropy of logits / temperature, also as read from a model, against TRL 0.16.1."""
    i, o = golden("trl0161_logprob_temperature")
    theirs = o[str(temperature)]
    logits = i["logits"] / (temperature + 1e-7)  # TRL 0.16 adds 1e-7, which ours does not
    close(ppo.token_logprobs(logits, i["index"]), theirs["logprobs"])
    close(token_entropy(logits), theirs["entropy"])
    model = Table(F.pad(i["logits"], (0, 0, 0, 1)))  # behind a prompt of one token
    real, rows = torch.ones_like(i["index"], dtype=torch.bool), torch.arange(len(logits))[:, None]
    r = make_rollout(real, i["index"], prompts=rows, prompt_mask=real[:, :1], responses=i["index"])
    read = ppo.response_forward(model, r, temperature)[0].detach()
    close(ppo.token_logprobs(read, i["index"]), theirs["logprobs"], **FLOAT32)
    close(token_entropy(read), theirs["entropy"], **FLOAT32)


def test_entropy_against_trl016():
    """Entropy of logits against TRL 0.16.1."""
    i, o = golden("trl016_entropy")
    close(token_entropy(i["logits"]), o["entropy"])


def test_response_mask_against_trl016():
    """Where a response ends against what TRL 0.16.1 makes padding."""
    i, o = golden("trl016_truncate_response")
    mask, ended = ppo.response_mask(i["responses"], i["stop_token_id"])
    assert torch.equal(i["responses"].masked_fill(~mask, i["pad_token_id"]), o["truncated"])
    T = i["responses"].shape[1]
    assert torch.equal(mask.sum(1), (o["first_true"] + 1).clamp(max=T))
    assert torch.equal(ended, o["first_true"] < T)


@pytest.mark.parametrize("case", ["pad_distinct", "pad_equals_eos"])
def test_response_mask_with_either_padding_against_trl016(case):
    """The mask does not depend on the padding token; TRL 0.16.1's row length does."""
    i, o = golden("trl0161_truncate_response")
    theirs, T = o["cases"][case], i["responses"].shape[1]
    mask, ended = ppo.response_mask(i["responses"], theirs["stop"])
    truncated = i["responses"].masked_fill(~mask, theirs["pad"])
    assert torch.equal(truncated, theirs["postprocessed"])
    assert torch.equal(mask.sum(1), (theirs["trunc_idx"] + 1).clamp(max=T))
    assert torch.equal(ended, theirs["contain_eos"])
    # TRL 0.16 takes the first padding token for the end of a row: with pad = EOS the stop token is lost, and a padding
    # token that was drawn cuts the response.
    is_pad = F.pad(truncated == theirs["pad"], (0, 1), value=True)
    assert torch.equal(is_pad.long().argmax(1) - 1, theirs["sequence_length_index_of_last_token"])


def test_sequences_against_openrlhf031():
    """Input, attention mask and mask of the response against OpenRLHF 0.3.1."""
    i, o = golden("openrlhf031_process_sequences")
    prompts, responses = i["sequences"].split([i["input_len"], i["sequences"].shape[1] - i["input_len"]], 1)
    mask, ended = ppo.response_mask(responses, i["eos"])
    inputs = ppo.Rollout(prompts, prompts != i["pad"], responses, mask, ended, None).inputs()
    assert torch.equal(mask, o["action_mask"].bool())
    assert torch.equal(inputs["attention_mask"], o["attention_mask"])
    # OpenRLHF writes EOS over the last token of a response that did not end; ours keeps what was drawn.
    overwritten = inputs["input_ids"].clone()
    overwritten[~ended, -1] = i["eos"]
    assert torch.equal(overwritten, o["sequences"])


class Stub(nn.Module):
    """The reward model of trl0161_get_reward_index: its output says which token it read, at which position."""

    def forward(self, input_ids, attention_mask, position_ids, **_):
        outputs = input_ids * attention_mask + 100 * position_ids + 10_000 * attention_mask
        return SimpleNamespace(last_hidden_state=outputs.double()[..., None])


@pytest.mark.parametrize(
    "ids, rewards, lengths",
    [
        ("query_responses", "final_rewards", "sequence_lengths"),
        ("query_responses_empty_case", "empty_case_final", "empty_case_sequence_lengths"),
    ],
)
def test_reward_index_against_trl016(ids, rewards, lengths):
    """The reward is read at the last real token, an empty response included, as in TRL 0.16.1."""
    i, o = golden("trl0161_get_reward_index")
    mask = (i[ids] != i["pad_token_id"]).long()
    model = SimpleNamespace(base_model=Stub(), score=nn.Identity(), config=SimpleNamespace())
    close(ppo.read_reward(model, i[ids], mask).squeeze(1), o[rewards])
    assert torch.equal(mask.shape[1] - 1 - mask.flip(1).argmax(1), o[lengths])  # the file means the same positions


def test_value_positions_against_trl016():
    """The value of a response token is read one position before it, as in TRL 0.16.1."""
    i, o = golden("trl0161_get_reward_index")
    real, n = i["query_responses"] != i["pad_token_id"], i["context_length"]
    (prompts, responses), (prompt_mask, mask) = ((x[:, :n], x[:, n:]) for x in (i["query_responses"], real))
    r = ppo.Rollout(prompts, prompt_mask, responses, mask, None, None)
    close(ppo.Critic(Stub(), nn.Identity())(r).detach(), o["value_slice_response"], mask)
    close(Stub()(**r.inputs()).last_hidden_state.squeeze(-1), o["reward_logits"], real)


# --- reward model


@pytest.mark.parametrize("name", names("trl016_reward_loss_*"))
def test_preference_loss_and_gradients_against_trl016(name):
    """The pair loss, with and without margin and centring, and its gradients against TRL 0.16.1."""
    i, o = golden(name)
    chosen, rejected = leaf(i["rewards_chosen"].squeeze(1)), leaf(i["rewards_rejected"].squeeze(1))
    margin = torch.zeros_like(chosen) if i["margin"] is None else i["margin"].squeeze(1)
    losses = reward_model.preference_loss(chosen, rejected, margin, i["center_rewards_coefficient"] or 0.0)
    losses.mean().backward()
    close(losses.mean().detach(), o["loss"])
    close(chosen.grad, o["grad_chosen"].squeeze(1))
    close(rejected.grad, o["grad_rejected"].squeeze(1))


def test_preference_loss_against_trl():
    """The pair loss against TRL 0.7.11, each pair with its own margin, and its centring term against 0.16.1."""
    i, o = golden("trl_reward_model_loss")
    chosen, rejected, margin = i["rewards_chosen"], i["rewards_rejected"], i["margin"]
    loss, none = reward_model.preference_loss, torch.zeros_like(margin)
    close(loss(chosen, rejected, none, 0.0).mean(), o["loss_no_margin"])
    close(loss(chosen, rejected, margin, 0.0), o["per_pair_losses_margin"])
    close(loss(chosen, rejected, margin, 0.0).mean(), o["loss_margin_per_pair_CORRECT"])
    close(loss(chosen, rejected, none, i["center_rewards_coefficient"]).mean(), o["center_0p01_loss_no_margin"])
    # TRL subtracts margins (B,) from rewards (B, 1), so that every pair meets every margin.
    close(loss(chosen[:, None], rejected[:, None], margin[None], 0.0).mean(), o["loss_margin_trl_broadcast_BUG_BxB"])


def test_pair_accuracy_against_trl(monkeypatch):
    """A tie is not a hit, as in TRL 1.16; TRL 0.7.11 counts it as one."""
    i, o = golden("trl_reward_model_loss")
    chosen, rejected = i["rewards_chosen"], i["rewards_rejected"]
    monkeypatch.setattr(reward_model, "all_rewards", lambda *_: (chosen, rejected))
    stats, _ = reward_model.evaluate(None, chosen, None)
    ties = (chosen == rejected).double().mean()
    close(stats["eval/loss"], o["loss_no_margin"])
    close(stats["eval/accuracy"], o["accuracy_strict_gt"])
    close(stats["eval/accuracy"] + ties, o["compute_accuracy_0711"]["accuracy"])


@pytest.mark.parametrize(
    "name, plain, with_margin",
    [
        ("openrlhf_pairwise_loss", "loss", "loss_margin"),
        ("openrlhf031_losses_rewards_gae", "pairwise", "pairwise_margin"),
    ],
)
def test_preference_loss_against_openrlhf(name, plain, with_margin):
    """The pair loss with and without margin against OpenRLHF 0.3.8 and 0.3.1."""
    i, o = golden(name)
    none = torch.zeros_like(i["margin"])
    close(reward_model.preference_loss(i["chosen"], i["rejected"], none, 0.0).mean(), o[plain])
    close(reward_model.preference_loss(i["chosen"], i["rejected"], i["margin"], 0.0).mean(), o[with_margin])


# --- supervised fine-tuning


@pytest.mark.parametrize(
    "name, logits, labels, loss",
    [
        ("openrlhf_gpt_lm_loss", "logits", "labels", "loss"),
        ("openrlhf031_losses_rewards_gae", "lm_logits", "lm_labels", "gptlm_loss"),
    ],
)
def test_language_modelling_loss_against_openrlhf(name, logits, labels, loss):
    """The mean over labels against OpenRLHF 0.3.8 and 0.3.1."""
    i, o = golden(name)
    losses = sft.label_losses(i[logits], i[labels])
    close(losses.sum() / (i[labels][:, 1:] != sft.IGNORE).sum(), o[loss], **FLOAT32)


def packing_rows(texts, eos):
    """The texts of trl0711_sft_packing as rows of ids and labels, each with its EOS if there is one."""
    i, _ = golden("trl0711_sft_packing")
    ids = [i["tokenized"][text].tolist() + eos for text in texts]
    return [(row, row) for row in ids]


def packed_ids(blocks):
    """The ids of all blocks; their labels are the same ids."""
    assert all(ids == labels for ids, labels in blocks)
    return [ids for ids, _ in blocks]


@pytest.mark.parametrize("case, has_eos, passes", [("one_buffer", 1, 1), ("no_concat_token", 0, 1), ("infinite", 1, 2)])
def test_packing_against_trl07(case, has_eos, passes):
    """Blocks of constant length against TRL 0.7.11; its endless stream is two passes joined, cut off at 12 blocks."""
    i, o = golden("trl0711_sft_packing")
    theirs = o["packing"][case]
    theirs = (theirs["first_12"] if case == "infinite" else theirs["packed"]).tolist()
    rows = packing_rows(i["texts"] * passes, [i["eos_id"]] * has_eos)
    blocks = packed_ids(sft.pack(rows, i["seq_length"]))
    assert blocks[:12] == theirs


def test_packing_in_buffers_against_trl07():
    """TRL 0.7.11 drops the remainder of each of its buffers; ours is one buffer, and drops one remainder."""
    i, o = golden("trl0711_sft_packing")
    limit, buffers = o["packing"]["small_buffer"]["max_buffer_size_chars"], [[]]
    for text in i["texts"]:  # a buffer is full once its characters reach the limit
        if sum(map(len, buffers[-1])) >= limit:
            buffers.append([])
        buffers[-1].append(text)
    packed = [sft.pack(packing_rows(texts, [i["eos_id"]]), i["seq_length"]) for texts in buffers]
    assert packed_ids(sum(packed, [])) == o["packing"]["small_buffer"]["packed"].tolist()


class FakeTokenizer:
    """A tokenizer whose texts are their own ids."""

    def __init__(self, eos_token_id):
        self.eos_token_id = eos_token_id

    def __call__(self, text, **_):
        return {"input_ids": list(text)}


@pytest.mark.parametrize("row", [0, 2])
def test_completion_labels_against_trl07(row):
    """Labels on the completion alone against TRL 0.7.11, for its two rows that have a response template."""
    i, o = golden("trl0711_sft_packing")
    ids, template = i["completion_rows"][row], i["response_template_ids"].tolist()
    # TRL finds the completion behind the last template; ours is told the two parts.
    end = max(k for k in range(2, len(ids) + 1) if ids[k - 2 : k] == template)
    tokenizer = FakeTokenizer(i["eos_id"])
    ours, labels = sft.encode_pair(tuple(ids[:end]), tuple(ids[end:]), tokenizer, completion_only=True)
    eos = [] if ids[-1] == i["eos_id"] else [i["eos_id"]]  # ours always ends a text with EOS, and labels it
    theirs = o["completion_only"]
    assert ours == theirs["input_ids"][row].tolist() + eos
    assert labels == theirs["labels"][row].tolist() + eos
