"""What further libraries say of formulas that test_loss.py and test_advantages.py hold to one already."""

from types import SimpleNamespace

import pytest
from numbers_of_others import close, golden, leaf, row_mean
from torch import nn

import ppo
import reward_model
import rloo


def policy_loss_of_openrlhf():
    i, o = golden("openrlhf_policy_loss_sequence_mean")
    logprobs = leaf(i["logprobs"])
    losses, *_ = ppo.policy_loss(logprobs, i["old_logprobs"], i["advantages"], i["mask"].bool(), i["cliprange"])
    loss = row_mean(losses, i["mask"].bool())
    loss.backward()
    yield loss.detach(), o["policy_loss"]
    yield logprobs.grad, o["grad_logprobs"]


def value_loss_of_openrlhf():
    i, o = golden("openrlhf_value_loss_sequence_mean")
    values = leaf(i["values"])
    losses, _ = ppo.value_loss(values, i["old_values"], i["returns"], i["mask"].bool(), i["cliprange_value"])
    loss = row_mean(losses, i["mask"].bool())
    loss.backward()
    yield loss.detach(), o["value_loss"]
    yield values.grad, o["grad_values"]


def gae_of_openrlhf():
    i, o = golden("openrlhf_gae")
    mask = i["mask"].bool()
    advantages, returns = ppo.gae(i["rewards"], i["values"], mask, i["gamma"], i["lam"])
    yield advantages, o["advantages"], mask
    yield returns, o["returns"], mask


def rewards_of_openrlhf():
    """No score of this file reaches its clamp at 10."""
    i, o = golden("openrlhf_reward_shaping")
    mask = i["mask"].bool()
    kl = ppo.kl_estimate(i["logprobs"], i["ref_logprobs"], "k1")
    yield kl, o["kl"], mask
    yield ppo.shape_rewards(i["scores"], kl, mask, i["kl_coef"]), o["rewards"]


def leave_one_out_of_openrlhf():
    i, o = golden("openrlhf059_reinforce")
    groups = i["rloo_scores_prompt_major"]
    yield rloo.leave_one_out(groups.flatten(), groups.shape[1]), o["rloo_shaped_scores"].flatten()


def pair_loss_of_openrlhf():
    i, o = golden("openrlhf_pairwise_loss")
    for margin, key in ((0 * i["margin"], "loss"), (i["margin"], "loss_margin")):
        yield reward_model.preference_loss(i["chosen"], i["rejected"], margin, 0.0).mean(), o[key]


def rloo_loss_of_trl_1_16():
    i, o = golden("trl1160_rloo_loss")
    log_ratio = leaf(i["log_ratio"])
    new, advantages = log_ratio[:, None], i["advantages"][:, None]
    loss, _, clipped = rloo.policy_loss(new, 0 * new.detach(), advantages, advantages < 9, i["epsilon_low"])
    loss.mean().backward()
    yield loss.mean().detach(), o["loss"]
    yield log_ratio.grad, o["grad_log_ratio"]
    yield clipped.double().mean(), o["clip_ratio_region"]


def whitening_of_trl07():
    """Rows whose mask starts late."""
    i, o = golden("trl0711_gae_whiten")
    mask = i["mask"].bool()
    yield ppo.masked_whiten(i["values"], mask), o["masked_whiten"], mask
    yield ppo.masked_whiten(i["values"], mask) + ppo.masked_mean(i["values"], mask), o["masked_whiten_noshift"], mask


def whitening_of_nplus():
    """By the biased deviation: ours is smaller by sqrt((n-1)/n)."""
    i, o = golden("nplus_whiten_eos")
    mask = i["mask"].bool()
    factor = ((mask.sum() - 1) / mask.sum().double()).sqrt()
    yield ppo.masked_whiten(i["values"], mask), o["whiten_shift"] * factor, mask


class Stub(nn.Module):
    """The reward model of trl0161_get_reward_index: its output says which token it read, at which position."""

    def forward(self, input_ids, attention_mask, position_ids, **_):
        outputs = input_ids * attention_mask + 100 * position_ids + 10_000 * attention_mask
        return SimpleNamespace(last_hidden_state=outputs.float()[..., None])


def where_rewards_are_read_of_trl_0_16():
    """At the last real token, an empty response included."""
    i, o = golden("trl0161_get_reward_index")
    model = SimpleNamespace(base_model=Stub(), score=nn.Identity(), config=SimpleNamespace())
    for ids, theirs in (("query_responses", o["final_rewards"]), ("query_responses_empty_case", o["empty_case_final"])):
        yield ppo.read_reward(model, i[ids], (i[ids] != i["pad_token_id"]).long()), theirs


def where_values_are_read_of_trl_0_16():
    """One position before the response token."""
    i, o = golden("trl0161_get_reward_index")
    ids = i["query_responses"]
    real = ids != i["pad_token_id"]
    n = i["context_length"]
    r = ppo.Rollout(ids[:, :n], real[:, :n], ids[:, n:], real[:, n:], None, None, [])
    yield ppo.Critic(Stub(), nn.Identity())(r).detach(), o["value_slice_response"], real[:, n:]


def response_mask_of_trl_0_16():
    """Ours does not depend on the padding token."""
    i, o = golden("trl0161_truncate_response")
    for theirs in o["cases"].values():
        mask, ended = ppo.response_mask(i["responses"], [theirs["stop"]])
        yield i["responses"].masked_fill(~mask, theirs["pad"]), theirs["postprocessed"]
        yield mask.sum(1), (theirs["trunc_idx"] + 1).clamp(max=i["responses"].shape[1])
        yield ended, theirs["contain_eos"]


def inputs_of_openrlhf_0_3():
    """It writes EOS over the last token of a response that did not end; ours keeps what was drawn."""
    i, o = golden("openrlhf031_process_sequences")
    prompts, responses = i["sequences"].split([i["input_len"], i["sequences"].shape[1] - i["input_len"]], 1)
    mask, ended = ppo.response_mask(responses, [i["eos"]])
    inputs = ppo.Rollout(prompts, prompts != i["pad"], responses, mask, ended, None, []).inputs()
    yield mask, o["action_mask"].bool()
    yield inputs["attention_mask"], o["attention_mask"]
    inputs["input_ids"][~ended, -1] = i["eos"]
    yield inputs["input_ids"], o["sequences"]


CASES = [f for name, f in list(globals().items()) if "_of_" in name]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_it_is_theirs(case):
    for pair in case():
        close(*pair)
