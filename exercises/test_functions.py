"""The exercises, in the order of functions.py.

Each function is compared with an example that can be checked by hand, with the numbers of other libraries, and with
what the mathematics demands.
"""

import json
import math
from functools import partial
from math import log

import torch
import torch.nn.functional as F
from grading import EXAMPLE, GOLDEN, bits, case, golden, grade, must, numbers, read_loss, row

# --- Reading


def test_masked_mean(student):
    where, i, o = golden("trl07_masked_whiten")
    example = numbers([[1, 2, 3], [4, 9, 9]]), bits("111", "100")
    cases = [case(EXAMPLE, *example, mean=2.5), case(where, i["values"], i["mask"].bool(), mean=o["mean"])]
    grade(student, "masked_mean", ("mean",), cases)


def test_response_mask(student):
    where, i, o = golden("trl016_truncate_response")
    responses, T = i["responses"].long(), i["responses"].shape[1]
    first = o["first_true"].long().tolist()  # position of the first stop token, T if there is none
    mask = bits(*(("1" * (n + 1)).ljust(T, "0")[:T] for n in first))
    ended = bits("".join(str(int(n != T)) for n in first))[0]
    example = torch.tensor([[5, 6, 9, 7, 9], [5, 6, 7, 8, 5]])
    cases = [
        case(EXAMPLE, example, [9], mask=bits("11100", "11111"), ended=bits("10")[0]),
        case(where, responses, [i["stop_token_id"]], mask=mask, ended=ended),
        case(
            "two stop tokens",
            torch.tensor([[5, 6, 9], [8, 5, 9]]),
            [8, 9],
            mask=bits("111", "100"),
            ended=bits("11")[0],
        ),
    ]
    grade(student, "response_mask", ("mask", "ended"), cases)


def test_token_logprobs(student):
    where, i, o = golden("trl0161_logprob_temperature")
    logits, tokens = i["logits"] / (1 + 1e-7), i["index"].long()  # TRL 0.16 adds 1e-7 to its temperature of 1
    quarter = numbers([[[0, log(3)], [0, log(3)]]])
    cases = [
        case(EXAMPLE, quarter, torch.tensor([[1, 0]]), logprobs=row(log(3 / 4), log(1 / 4))),
        case(where, logits, tokens, logprobs=o["1.0"]["logprobs"]),
    ]
    logprobs = grade(student, "token_logprobs", ("logprobs",), cases)
    extreme = logprobs(numbers([[[1000.0, 0.0]]]), torch.tensor([[1]]))
    must(
        (extreme + 1000).abs().max() < 1e-3,
        "With logits 1000 and 0 it should be -1000: exp(1000) is too large for a float, or a probability was rounded "
        "to 0 before its log was taken. One function of torch avoids both.",
    )


def test_response_logprobs(student):
    where, i, o = golden("trl0161_ppo_loss_metrics")
    P, mask, temperature = i["context_length"], i["padding_mask"] == 0, i["temperature"] + 1e-7  # as TRL 0.16
    text = F.pad(i["responses"].long(), (P, 0))  # the logits are given, so any tokens will do for the prompt
    logits, tokens = numbers([[[0, 0], [0, log(3)], [log(4), 0], [0, log(9)]]]), torch.tensor([[0, 1, 1, 0]])
    cases = [
        case(f"{EXAMPLE}, temperature 1", logits, tokens, 2, 1.0, logprobs=row(log(3 / 4), log(4 / 5))),
        case(f"{EXAMPLE}, temperature .5", logits, tokens, 2, 0.5, logprobs=row(log(9 / 10), log(16 / 17))),
        case(f"{where}, padding set to 0", i["logits_full"], text, P, temperature, logprobs=o["new_logprobs"] * mask),
    ]

    def read(function, logits, tokens, P, temperature):
        """The results, with 0 on padding."""
        logprobs = function(logits, tokens, P, temperature)
        return {"logprobs": logprobs * mask if logprobs.shape == mask.shape else logprobs}

    grade(student, "response_logprobs", ("logprobs",), cases, read)


# --- Preferences


def test_preference_loss(student):
    log3, none = numbers([log(3)]), numbers([0])
    cases = [
        case(f"{EXAMPLE}, first line", log3, none, none, 0.0, losses=[-log(3 / 4)]),
        case(f"{EXAMPLE}, with a margin", log3, none, log3, 0.0, losses=[log(2)]),
        case(f"{EXAMPLE}, with c = .1", log3, none, none, 0.1, losses=[log(3) ** 2 / 10 - log(3 / 4)]),
    ]
    for n in range(4):
        where, i, o = golden(f"trl016_reward_loss_{n}")
        margin = torch.zeros(6, 1) if i["margin"] is None else i["margin"]
        inputs = [x.double().squeeze(1) for x in (i["rewards_chosen"], i["rewards_rejected"], margin)]
        right = {"mean_loss": o["loss"], "gradient": o["grad_chosen"].squeeze(1)}
        cases += [case(where, *inputs, i["center_rewards_coefficient"] or 0.0, **right)]
    losses = grade(student, "preference_loss", ("losses",), cases, partial(read_loss, ("losses",)))
    must(
        (losses(numbers([-1000]), none, none, 0.0) - 1000).abs().max() < 1e-3,
        "With rewards -1000 and 0 it should be 1000: the sigmoid is rounded to 0, and its log is -inf. One function of "
        "torch does both in one step.",
    )


def test_dpo_loss(student):
    outputs = ("losses", "chosen_rewards", "rejected_rewards")
    right = dict(losses=[math.log1p(math.exp(-1.5))], chosen_rewards=[1], rejected_rewards=[-0.5])
    cases = [case(EXAMPLE, *numbers([[-10], [-8], [-12], [-7]]), 0.5, **right)]
    sides = [f"{model}_{text}_logps" for model in ("policy", "reference") for text in ("chosen", "rejected")]
    where, i, o = golden("trl07_dpo_sigmoid_smoothing_0.0")
    cases += [case(where, *(i[side] for side in sides), i["beta"], **{name: o[name] for name in outputs})]
    where, i, o = golden("trl0711_dpo")
    theirs = o["variants"]["sigmoid|beta=0.5|ls=0.0|reference_free=False"]
    cases += [case(where, *(i[side] for side in sides), 0.5, gradient=theirs["grad_chosen"])]
    dpo = grade(student, "dpo_loss", outputs, cases, partial(read_loss, outputs))
    none = numbers([0])
    loss = dpo(none - 1000, none, none, none, 1.0)[0]
    must(
        (loss - 1000).abs().max() < 1e-3, "With a margin of -1000 the loss should be 1000: the sigmoid is rounded to 0."
    )
    policy = numbers([-3, -5]).requires_grad_()
    _, *rewards = dpo(policy, policy - 1, policy.detach(), policy.detach() - 1, 0.1)
    must(not any(x.requires_grad for x in rewards), "A gradient can flow through the rewards: `detach` is missing.")


# --- Rewards


def test_kl_estimate(student):
    where, i, o = golden("trl0711_kl_penalty_modes")
    half, quarter = row(log(1 / 2)), row(log(1 / 4))
    names = ("k1", "k2", "k3")
    cases = [
        case(EXAMPLE, half, quarter, k1=row(log(2)), k2=row(log(2) ** 2 / 2), k3=row(1 / 2 - 1 + log(2))),
        case(where, i["logprobs"], i["ref_logprobs"], **{name: o[name] for name in names}),
    ]

    def read(function, p, q):
        """The results of all estimators, by name."""
        return {name: function(p, q, name) for name in names}

    kl = grade(student, "kl_estimate", ("estimate",), cases, read)
    p, q = numbers([[6, 1, 0, 2], [1, 1, 6, 0]]).softmax(-1)  # the probabilities of a vocabulary of four tokens
    exact = (p * (p / q).log()).sum()
    for name in ("k1", "k3"):
        mean = (p * kl(p.log()[None], q.log()[None], name)).sum()
        must((mean - exact).abs() < 1e-6, f"Averaged over a vocabulary, with p as weights, {name} should be the KL.")


def test_shape_rewards(student):
    where, i, o = golden("trl07_rewards_kl_penalty_kl")
    mask = i["mask"].bool()
    example = numbers([5]), row(1, 2, 3, 7), bits("1110"), 0.1
    cases = [
        case(EXAMPLE, *example, rewards=row(-0.1, -0.2, 4.7, 0)),
        case(where, i["scores"], o["kl"], mask, i["kl_coef"], rewards=o["rewards"].masked_fill(~mask, 0.0)),
    ]
    grade(student, "shape_rewards", ("rewards",), cases)


# --- Advantages


def test_leave_one_out(student):
    where, i, o = golden("openrlhf059_reinforce")
    theirs = i["rloo_scores_prompt_major"]
    cases = [
        case(EXAMPLE, numbers([0, 3, 9, 1, 1, 4]), 3, advantages=[-6, -1.5, 7.5, -1.5, -1.5, 3]),
        case(where, theirs.flatten(), theirs.shape[1], advantages=o["rloo_shaped_scores"].flatten()),
    ]
    grade(student, "leave_one_out", ("advantages",), cases)


def test_group_advantages(student):
    data, raw = json.loads((GOLDEN / "trl116_grpo.json").read_text()), (GOLDEN / "trl116_grpo.safetensors").read_bytes()
    head = 8 + int.from_bytes(raw[:8], "little")  # a safetensors file: the header's length, the header, the numbers

    def theirs(run):
        """The advantages of a run of TRL."""
        place = json.loads(raw[8:head])[f"{run}/advantages"]["data_offsets"][0]
        return torch.frombuffer(bytearray(raw), dtype=torch.float32, count=12, offset=head + place)

    names = ("group", "batch", "mean", "none")
    example = numbers([1, 0, 0, 0, 1, 1, 1, 1])
    deviation, mean = (numbers([x, 1]).repeat_interleave(4) for x in (0.5001, 0.2501))
    centred = numbers([0.75, -0.25, -0.25, -0.25, 0, 0, 0, 0])
    cases = [
        case(EXAMPLE, example, 4, none=centred, group=centred / deviation, mean=centred / mean),
        case("a group whose scores are all 0", numbers([0, 0, 0, 0]), 4, none=[0.0] * 4, mean=[0.0] * 4),
        case(
            "the numbers of TRL 1.16 (tests/golden/trl116_grpo.safetensors)",
            numbers(data["rewards"][0]),
            4,
            none=theirs("none"),
            group=theirs("dapo"),
            batch=theirs("batch"),
        ),
    ]

    def read(function, scores, G):
        """The results of all scales, by name."""
        return {name: function(scores, G, name) for name in names}

    grade(student, "group_advantages", ("advantages",), cases, read)


def test_masked_whiten(student):
    where, i, o = golden("trl07_masked_whiten")
    mask = i["mask"].bool()
    cases = [
        case(EXAMPLE, row(2, 4, 6, 100), bits("1110"), whitened=row(-1, 0, 1, 0)),
        case(where, i["values"], mask, whitened=o["shift_mean_true"] * mask),
    ]
    grade(student, "masked_whiten", ("whitened",), cases)


def test_gae(student):
    outputs, example = ("advantages", "returns"), (row(0, 0, 1, 0), row(0, 0.4, 0.6, 9), bits("1110"), 1.0, 0.5)
    cases = [case(EXAMPLE, *example, advantages=row(0.6, 0.4, 0.4, 0), returns=row(0.6, 0.8, 1, 0))]
    where, i, o = golden("openrlhf_gae")
    mask = i["mask"].bool()
    inputs = i["rewards"] * mask, i["values"], mask, i["gamma"], i["lam"]
    cases += [case(where, *inputs, **{name: o[name] * mask for name in outputs})]
    where, j, o = golden("trl07_gae_whiten_rewards_False_gamma_0.97_lam_0.9")
    mask = j["mask"].bool()
    cases += [case(where, j["rewards"] * mask, j["values"], mask, j["gamma"], j["lam"], returns=o["returns"] * mask)]
    gae = grade(student, "gae", outputs, cases, clean=(0,))
    rewards, values, mask, gamma, _ = inputs
    (_, a), (_, b) = (gae(rewards, x, mask, gamma, 1.0) for x in (values, values + 1))
    must((a - b).abs().max() < 1e-6, "With lam = 1 the returns, sums of rewards, should not depend on the values.")


# --- Losses


def test_policy_loss(student):
    outputs = ("losses", "ratio", "clipped")
    logs = numbers([[1.5, 0.5, 1.5, 0.5, 3]]).log()
    example = logs, torch.zeros(1, 5), row(1, 1, -1, -1, 0), bits("11110"), 0.2
    right = dict(losses=row(-1.2, -0.5, 1.5, 0.8, 0), ratio=row(1.5, 0.5, 1.5, 0.5, 0), clipped=bits("10010"))
    cases = [case(f"{EXAMPLE}, with padding", *example, **right)]
    for n in (0, 1):
        where, i, o = golden(f"trl07_ppo_loss_{n}")
        mask = i["mask"].bool()
        inputs = i["logprobs"], i["old_logprobs"], i["advantages"] * mask, mask, i["cliprange"]
        right = {"mean_loss": o["policy_loss"], "gradient": o["grad_logprobs"], "share_clipped": o["policy_clipfrac"]}
        cases += [case(where, *inputs, **right)]
    same = logs, logs * 0, row(1), bits("11111"), 0.2
    losses = row(-1.2, -0.5, -1.2, -0.5, -1.2)
    cases += [case("a row of advantages that are all 1, given as (B, 1)", *same, losses=losses)]
    grade(student, "policy_loss", outputs, cases, partial(read_loss, outputs), clean=(2,))


def test_value_loss(student):
    outputs = ("losses", "clipped")
    values, returns, mask = row(1.1, 1.5, 0.5, 7), row(2, 2, 2, 0), bits("1110")
    example = values, torch.ones(1, 4), returns, mask, 0.2
    cases = [case(f"{EXAMPLE}, with padding", *example, losses=row(0.405, 0.32, 1.125, 0), clipped=bits("0100"))]
    where, i, o = golden("trl07_ppo_loss_0")
    inputs = i["values"], i["old_values"], i["returns"], i["mask"].bool(), i["cliprange_value"]
    right = {"mean_loss": o["value_loss_times_vf_coef"] / i["vf_coef"], "gradient": o["grad_values"] / i["vf_coef"]}
    cases += [case(where, *inputs, **right, share_clipped=o["value_clipfrac"])]
    grade(student, "value_loss", outputs, cases, partial(read_loss, outputs), clean=(2,))


def test_token_weights(student):
    mask, types = bits("1100", "1111"), ("dapo", "grpo", "dr_grpo")
    right = {"dapo": mask / 6, "grpo": mask * numbers([[1 / 4], [1 / 8]]), "dr_grpo": mask / 10}
    where = "the same in a step with other mini-batches, of 3 rows and 8 tokens on average"
    larger = {"dapo": mask / 8, "grpo": mask * numbers([[1 / 6], [1 / 12]]), "dr_grpo": mask / 21}
    cases = [case(EXAMPLE, mask, 2, 6, 5, **right), case(where, mask, 3, 8, 7, **larger)]

    def read(function, mask, num_rows, num_tokens, max_length):
        """The results of all loss types, by name."""
        return {name: function(mask, num_rows, num_tokens, name, max_length) for name in types}

    grade(student, "token_weights", ("weights",), cases, read)
