"""The exercises, in the order of functions.py. Each is held to an example that can be checked by hand, to the numbers
of other people's code, and to properties that the mathematics demands. If it is wrong, it is held to usual mistakes.

Whoever reads on finds solutions here, or something very like them.
"""

import json
import math
from functools import partial
from math import log
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from grading import EXAMPLE, GOLDEN, bits, case, golden, grade, must, numbers, read_loss, row

# --- Reading


def test_masked_mean(student):
    where, i, o = golden("trl07_masked_whiten")
    example = numbers([[1, 2, 3], [4, 9, 9]]), bits("111", "100")
    cases = [case(EXAMPLE, *example, mean=2.5), case(where, i["values"], i["mask"].bool(), mean=o["mean"])]
    mistakes = {
        "Padding is counted: the sum is right, but it is divided by all positions.": lambda x, m: (x * m).mean(),
        "Padding is added and counted: this is the mean of everything.": lambda x, m: x.mean(),
        "This is a mean over rows of their means. There every row counts alike; every token should.": lambda x, m: (
            (x * m).sum(1) / m.sum(1).clamp(min=1)
        ).mean(),
    }
    grade(student, "masked_mean", ("mean",), cases, mistakes)


def test_response_mask(student):
    where, i, o = golden("trl016_truncate_response")
    responses, T, first = i["responses"].long(), i["responses"].shape[1], o["first_true"]  # T if nothing stops it
    example = torch.tensor([[5, 6, 9, 7, 9], [5, 6, 7, 8, 5]])
    cases = [
        case(EXAMPLE, example, [9], mask=bits("11100", "11111"), ended=bits("10")[0]),
        case(where, responses, [i["stop_token_id"]], mask=torch.arange(T) <= first[:, None], ended=first < T),
    ]

    def mask(function, output="mask"):
        return lambda responses, stops: {output: function(torch.isin(responses, torch.tensor(stops)))}

    mistakes = {
        "The stop token is not in the mask. It is real: the policy chose it, and has to learn when to.": mask(
            lambda stop: stop.cumsum(1) == 0
        ),
        "Only the stop tokens are left out. Out is whatever comes after the first of them.": mask(lambda stop: ~stop),
        "It ends at the last stop token. The first one ends the response.": mask(
            lambda stop: (stop.flip(1).cumsum(1).flip(1) > 0) | ~stop.any(1, keepdim=True)
        ),
        "The mask is turned round: true is for real tokens, false for what comes after them.": mask(
            lambda stop: stop.cumsum(1) - stop.long() > 0
        ),
        "A row without a stop token ends after its first token: argmax is 0 where nothing is found. It is all real.": mask(
            lambda stop: torch.arange(stop.shape[1]) <= stop.long().argmax(1, keepdim=True)
        ),
        "`ended` is turned round: true is for rows that have a stop token.": mask(lambda stop: ~stop.any(1), "ended"),
    }
    grade(student, "response_mask", ("mask", "ended"), cases, mistakes)


def pick(logprobs, tokens):
    """The entries of the tokens."""
    return logprobs.gather(-1, tokens[..., None]).squeeze(-1)


def test_token_logprobs(student):
    where, i, o = golden("trl0161_logprob_temperature")
    logits, tokens = i["logits"] / (1 + 1e-7), i["index"].long()  # TRL 0.16 adds 1e-7 to its temperature of 1
    quarter = numbers([[[0, log(3)], [0, log(3)]]])
    cases = [
        case(EXAMPLE, quarter, torch.tensor([[1, 0]]), logprobs=row(log(3 / 4), log(1 / 4))),
        case(where, logits, tokens, logprobs=o["1.0"]["logprobs"]),
    ]
    mistakes = {
        "These are the tokens' logits. They have to be normalised to be log-probabilities.": pick,
        "These are probabilities. Their logarithms are wanted.": lambda x, t: pick(x.softmax(-1), t),
        "The sign is turned: cross-entropy is minus the log-probability.": lambda x, t: -pick(x.log_softmax(-1), t),
        "It is normalised over the positions, dimension 1. It should be over the vocabulary, the last one.": lambda x, t: (
            pick(x.log_softmax(1), t)
        ),
        "It shifts by one position. These logits are already those of their tokens; the next exercise shifts.": lambda x, t: (
            pick(x[:, :-1].log_softmax(-1), t[:, 1:])
        ),
    }
    logprobs = grade(student, "token_logprobs", ("logprobs",), cases, mistakes)
    extreme = logprobs(numbers([[[1000.0, 0.0]]]), torch.tensor([[1]]))
    must(
        extreme.isfinite().all(),
        "With logits 1000 and 0 it is not finite: exp(1000) is too large for a float, or a "
        "probability was rounded to 0 before its log was taken. log_softmax avoids both.",
    )


def test_response_logprobs(student):
    where, i, o = golden("trl0161_ppo_loss_metrics")
    P, mask, temperature = i["context_length"], i["padding_mask"] == 0, i["temperature"] + 1e-7  # as TRL 0.16
    text = F.pad(i["responses"].long(), (P, 0))  # the logits are given, so that any tokens do for the prompt
    logits, tokens = numbers([[[0, 0], [0, log(3)], [log(4), 0], [0, log(9)]]]), torch.tensor([[0, 1, 1, 0]])
    cases = [
        case(f"{EXAMPLE}, temperature 1", logits, tokens, 2, 1.0, logprobs=row(log(3 / 4), log(4 / 5))),
        case(f"{EXAMPLE}, temperature .5", logits, tokens, 2, 0.5, logprobs=row(log(9 / 10), log(16 / 17))),
        case(f"{where}, padding set to 0", i["logits_full"], text, P, temperature, logprobs=o["new_logprobs"] * mask),
    ]

    def read(function, logits, tokens, P, temperature):
        logprobs = function(logits, tokens, P, temperature)
        return {"logprobs": logprobs * mask if logprobs.shape == mask.shape else logprobs}

    def taken(cut_logits, cut_tokens=lambda t, P: t[:, P:]):
        return lambda x, t, P, temperature: pick((cut_logits(x, P) / temperature).log_softmax(-1), cut_tokens(t, P))

    mistakes = {
        "It is shifted by one: the logits at a token's own position predict the token after it.": taken(
            lambda x, P: x[:, P:]
        ),
        "The first token of the response is missing: it is predicted at the last position of the prompt.": taken(
            lambda x, P: x[:, P:-1], lambda t, P: t[:, P + 1 :]
        ),
        "The prompt's tokens are in it, too. Those of the response are wanted.": taken(
            lambda x, P: x[:, :-1], lambda t, P: t[:, 1:]
        ),
        "The temperature is forgotten.": lambda x, t, P, temperature: pick(x[:, P - 1 : -1].log_softmax(-1), t[:, P:]),
        "The logits are multiplied by the temperature. They should be divided by it.": lambda x, t, P, temperature: (
            taken(lambda x, P: x[:, P - 1 : -1])(x, t, P, 1 / temperature)
        ),
        "The log-probabilities are divided by the temperature. The logits should be, before they are normalised.": lambda x, t, P, temperature: (
            pick(x[:, P - 1 : -1].log_softmax(-1), t[:, P:]) / temperature
        ),
    }
    grade(student, "response_logprobs", ("logprobs",), cases, mistakes, read)


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

    def loss(score=lambda a, b, m: a - b - m, centring=lambda a, b: (a + b) ** 2, of=F.logsigmoid, sign=-1):
        return lambda a, b, m, c: sign * of(score(a, b, m)) + c * centring(a, b)

    mistakes = {
        "Chosen and rejected are exchanged: this loss prefers the rejected text.": loss(lambda a, b, m: b - a - m),
        "The margin has the wrong sign: a margin should make the loss larger.": loss(lambda a, b, m: a - b + m),
        "The margin is forgotten.": loss(lambda a, b, m: a - b),
        "The centring term is forgotten.": loss(centring=lambda a, b: 0.0),
        "The centring term has the difference of the rewards. It wants their sum.": loss(
            centring=lambda a, b: (a - b) ** 2
        ),
        "The sign is turned: the log of a probability is negative, and the loss is minus that.": loss(sign=1),
        "This is the mean over pairs. Their losses are wanted one by one.": lambda *inputs: loss()(*inputs).mean(),
    }
    losses = grade(student, "preference_loss", ("losses",), cases, mistakes, partial(read_loss, ("losses",)))
    must(
        losses(numbers([-1000]), none, none, 0.0).isfinite().all(),
        "With rewards -1000 and 0 it is not finite: the "
        "sigmoid is rounded to 0, and its log is -inf. F.logsigmoid does both in one step.",
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

    def loss(delta, of=lambda delta, beta: -F.logsigmoid(beta * delta)):
        return lambda a, b, ra, rb, beta: (of(delta(a, b, ra, rb), beta), a, b)

    def right_delta(a, b, ra, rb):
        return a - ra - (b - rb)

    mistakes = {
        "Chosen and rejected are exchanged: this loss prefers the rejected responses.": loss(
            lambda a, b, ra, rb: b - rb - (a - ra)
        ),
        "beta is missing from the loss.": loss(right_delta, lambda delta, beta: -F.logsigmoid(delta)),
        "beta stands outside of the log-sigmoid. It belongs inside.": loss(
            right_delta, lambda delta, beta: -beta * F.logsigmoid(delta)
        ),
        "The reference is missing: only the policy's log-probabilities enter the loss.": loss(
            lambda a, b, ra, rb: a - b
        ),
        "The sign of the loss is turned: a log-probability is negative, and the loss is minus that.": loss(
            right_delta, lambda delta, beta: F.logsigmoid(beta * delta)
        ),
        "beta is missing from the rewards.": lambda a, b, ra, rb, beta: (a, a - ra, b - rb),
        "No gradient flows through the losses: `detach` (or `no_grad`) is on the wrong tensor.": lambda a, *others: (
            a.detach(),
            a,
            a,
        ),
    }
    dpo = grade(student, "dpo_loss", outputs, cases, mistakes, partial(read_loss, outputs))
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
        return {name: function(p, q, name) for name in names}

    def of(estimator, function):
        return lambda p, q, name: function(p - q) if name == estimator else torch.zeros(0)

    mistakes = {
        "k1 has the wrong sign: it is log p - log q, policy less reference.": of("k1", lambda d: -d),
        "k1 is a quotient of two logarithms. The logarithm of a quotient is a difference.": lambda p, q, name: p / q,
        "k2 lacks its factor 1/2.": of("k2", lambda d: d**2),
        "k3 has the sign of its logarithm turned throughout: q / p is exp(ref_logprobs - logprobs).": of(
            "k3", lambda d: d.exp() - 1 - d
        ),
        "k3 has the wrong sign before its last term: - log(q / p) is + (log p - log q).": of(
            "k3", lambda d: (-d).exp() - 1 - d
        ),
        "k3 has p / q where it should have q / p.": of("k3", lambda d: d.exp() - 1 + d),
        "k3 lacks its -1: where the models agree it should be 0.": of("k3", lambda d: (-d).exp() + d),
    }
    kl = grade(student, "kl_estimate", ("estimate",), cases, mistakes, read)
    p, q = numbers([[6, 1, 0, 2], [1, 1, 6, 0]]).log_softmax(-1)
    exact = (p.exp() * (p - q)).sum()
    for name in ("k1", "k3"):
        mean = (p.exp() * kl(p[None], q[None], name)).sum()
        must((mean - exact).abs() < 1e-6, f"Averaged over a vocabulary, with p as weights, {name} should be the KL.")


def test_shape_rewards(student):
    where, i, o = golden("trl07_rewards_kl_penalty_kl")
    mask = i["mask"].bool()
    example = numbers([5]), row(1, 2, 3, 7), bits("1110"), 0.1
    cases = [
        case(EXAMPLE, *example, rewards=row(-0.1, -0.2, 4.7, 0)),
        case(where, i["scores"], o["kl"], mask, i["kl_coef"], rewards=o["rewards"].masked_fill(~mask, 0.0)),
    ]

    def on(position):
        """The score on one position of a row, given its mask; the rest is right."""

        def rewards(scores, kl, mask, kl_coef):
            return -kl_coef * kl * mask + F.one_hot(position(mask), mask.shape[1]) * scores[:, None]

        return rewards

    def penalty(function):
        """A mistake in the part without the score; the score is on its place."""

        def rewards(scores, kl, mask, kl_coef):
            last = F.one_hot(mask.sum(1) - 1, mask.shape[1])
            return function(kl, mask, kl_coef) + scores[:, None] * last

        return rewards

    def score(function):
        """A mistake in where the score goes, given the score, the part without it, and the mask."""
        return lambda scores, kl, mask, kl_coef: function(scores[:, None], -kl_coef * kl * mask, mask)

    mistakes = {
        "The score is on the last position of the row, which may be padding. It belongs on the last real token.": on(
            lambda m: torch.full_like(m.sum(1), m.shape[1] - 1)
        ),
        "The score is one position too late, behind the last real token.": on(
            lambda m: m.sum(1).clamp(max=m.shape[1] - 1)
        ),
        "The score is one position too early.": on(lambda m: (m.sum(1) - 2).clamp(min=0)),
        "The score is on every real token. It is given once, on the last one.": score(lambda s, r, m: r + s * m),
        "The score is missing: this is what the tokens pay for their KL.": score(lambda s, r, m: r),
        "The score is missing in some rows: in a full row, too, the last token gets it.": score(
            lambda s, r, m: r + s * (m & ~F.pad(m, (0, 1), value=True)[:, 1:])
        ),
        "The KL has the wrong sign: it is a cost, to be subtracted.": penalty(lambda kl, m, c: c * kl * m),
        "kl_coef is missing.": penalty(lambda kl, m, c: -kl * m),
    }
    grade(student, "shape_rewards", ("rewards",), cases, mistakes)


# --- Advantages


def test_leave_one_out(student):
    where, i, o = golden("openrlhf059_reinforce")
    theirs = i["rloo_scores_prompt_major"]
    cases = [
        case(EXAMPLE, numbers([0, 3, 9, 1, 1, 4]), 3, advantages=[-6, -1.5, 7.5, -1.5, -1.5, 3]),
        case(where, theirs.flatten(), theirs.shape[1], advantages=o["rloo_shaped_scores"].flatten()),
    ]

    def others(x):
        return (x.sum(1, keepdim=True) - x) / (x.shape[1] - 1)

    mistakes = {
        "The mean includes the reward itself. It should be of the k - 1 others.": lambda r, k: (
            r.view(-1, k) - r.view(-1, k).mean(1, keepdim=True)
        ).flatten(),
        "The sum of the others is divided by k. They are k - 1.": lambda r, k: (
            r.view(-1, k) - others(r.view(-1, k)) * (k - 1) / k
        ).flatten(),
        "The groups are the wrong ones: k neighbouring rows are a group, so `view(-1, k)` and not `view(k, -1)`.": lambda r, k: (
            (r.view(k, -1).T - others(r.view(k, -1).T)).T.flatten()
        ),
        "This is the mean of the others. It has to be subtracted from the reward.": lambda r, k: others(
            r.view(-1, k)
        ).flatten(),
        "The sign is turned: a reward above those of the others is a positive advantage.": lambda r, k: (
            others(r.view(-1, k)) - r.view(-1, k)
        ).flatten(),
    }
    grade(student, "leave_one_out", ("advantages",), cases, mistakes)


def test_group_advantages(student):
    data, raw = json.loads((GOLDEN / "trl116_grpo.json").read_text()), (GOLDEN / "trl116_grpo.safetensors").read_bytes()
    head = 8 + int.from_bytes(raw[:8], "little")  # safetensors: the header's length, the header, and the numbers

    def theirs(run):
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
        return {name: function(scores, G, name) for name in names}

    def scaled(**divisors):
        """Mistakes in what divides, for some of the scales."""

        def advantages(scores, G, scale):
            x = scores.view(-1, G)
            if scale not in divisors:
                return torch.zeros(0)
            return ((x - x.mean(1, keepdim=True)) / divisors[scale](x)).flatten()

        return advantages

    mistakes = {
        "The groups are the wrong ones: G neighbouring rows are a group, so `view(-1, G)` and not `view(G, -1)`.": lambda s, G, scale: (
            (s.view(G, -1) - s.view(G, -1).mean(0)).flatten()
        ),
        "The mean leaves the score itself out, as leave_one_out does. GRPO's includes it.": lambda s, G, scale: (
            (s.view(-1, G) - s.view(-1, G).mean(1, keepdim=True)).flatten() * G / (G - 1)
        ),
        "A group whose scores are all equal gives 0 / 0, which is NaN: the 0.0001 is missing.": scaled(
            group=lambda x: x.std(1, keepdim=True), batch=lambda x: x.std()
        ),
        "A group whose scores are all 0 gives 0 / 0, which is NaN: the 0.0001 is missing.": scaled(
            mean=lambda x: x.mean(1, keepdim=True)
        ),
        "The deviation is the biased one, with n under the root instead of n - 1.": scaled(
            group=lambda x: x.std(1, keepdim=True, correction=0) + 1e-4, batch=lambda x: x.std(correction=0) + 1e-4
        ),
        "It is divided by the variance. It should be divided by its root.": scaled(
            group=lambda x: x.var(1, keepdim=True) + 1e-4, batch=lambda x: x.var() + 1e-4
        ),
        "Nothing is divided, as if scale were none.": scaled(
            **dict.fromkeys(("group", "batch", "mean"), lambda x: 1.0)
        ),
        'With "group" it is divided by the deviation of the whole batch.': scaled(group=lambda x: x.std() + 1e-4),
        'With "batch" it is divided by the deviation of the group.': scaled(
            batch=lambda x: x.std(1, keepdim=True) + 1e-4
        ),
        'With "batch" it is divided by the deviation of the advantages. It should be that of the scores.': scaled(
            batch=lambda x: (x - x.mean(1, keepdim=True)).std() + 1e-4
        ),
        'With "batch" it is divided by the mean of the groups\' deviations. It should be that of all scores.': scaled(
            batch=lambda x: x.std(1).mean() + 1e-4
        ),
        'With "batch" it is divided by the deviation of the groups\' means. It should be that of all scores.': scaled(
            batch=lambda x: x.mean(1).std() + 1e-4 if len(x) > 1 else torch.nan
        ),
        'With "mean" it is divided by the mean of the whole batch. It should be that of the group.': scaled(
            mean=lambda x: x.mean() + 1e-4
        ),
        'With "mean" it is divided by the sum of the group. It should be its mean.': scaled(
            mean=lambda x: x.sum(1, keepdim=True) + 1e-4
        ),
        'With "mean" it is divided by the deviation, too.': scaled(
            mean=lambda x: (x.mean(1, keepdim=True) + 1e-4) * (x.std(1, keepdim=True) + 1e-4)
        ),
    }
    grade(student, "group_advantages", ("advantages",), cases, mistakes, read)


def test_masked_whiten(student):
    where, i, o = golden("trl07_masked_whiten")
    mask = i["mask"].bool()
    cases = [
        case(EXAMPLE, row(2, 4, 6, 100), bits("1110"), whitened=row(-1, 0, 1, 0)),
        case(where, i["values"], mask, whitened=o["shift_mean_true"] * mask),
    ]

    def whiten(mean=lambda x, m: x[m].mean(), scale=lambda x, m: x[m].std(), clean=True):
        def whitened(x, m):
            y = (x - mean(x, m)) / scale(x, m)
            return y * m if clean else y

        return whitened

    mistakes = {
        "Padding is not 0.": whiten(clean=False),
        "The variance is the biased one: with Bessel's correction the sum of squares is divided by n - 1.": whiten(
            scale=lambda x, m: x[m].std(correction=0)
        ),
        "It is divided by the variance. It should be divided by its root.": whiten(scale=lambda x, m: x[m].var()),
        "Padding is counted in mean and variance.": whiten(lambda x, m: x.mean(), lambda x, m: x.std()),
        "Each row is whitened by itself. Mean and variance should be those of all real tokens of the batch.": lambda x, m: (
            torch.cat([whiten()(*pair) for pair in zip(x.split(1), m.split(1))])
        ),
        "The mean is not subtracted.": whiten(mean=lambda x, m: 0.0),
    }
    grade(student, "masked_whiten", ("whitened",), cases, mistakes)


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

    def estimate(
        delta=lambda r, v, w, gamma: r + gamma * w - v,
        decay=lambda gamma, lam: gamma * lam,
        after=lambda v, m: F.pad(v * m, (0, 1))[:, 1:],
        returns=lambda A, v, w: A + v,
    ):
        """The estimate with one part replaced: w are the values one token further on."""

        def advantages_and_returns(rewards, values, mask, gamma, lam):
            r, v, w = rewards * mask, values * mask, after(values, mask)
            deltas, A, advantage = delta(r, v, w, gamma), torch.zeros_like(r), 0.0
            for t in reversed(range(r.shape[1])):
                A[:, t] = advantage = deltas[:, t] + decay(gamma, lam) * advantage
            return A, returns(A, v, w)

        return advantages_and_returns

    def forwards(*inputs):
        return tuple(x.flip(1) for x in estimate()(*(x.flip(1) for x in inputs[:3]), *inputs[3:]))

    mistakes = {
        "The value after the last real token is taken from the padding. It is 0: the episode is over.": estimate(
            after=lambda v, m: F.pad(v, (0, 1))[:, 1:] * m
        ),
        "In a full row the last value is used again as the one after it. That is 0: the episode is over.": estimate(
            after=lambda v, m: torch.cat([v[:, 1:] * m[:, 1:], v[:, -1:] * m[:, -1:]], 1)
        ),
        "delta lacks the value of the next token, gamma V_{t+1}.": estimate(lambda r, v, w, gamma: r - v),
        "delta lacks - V_t: an advantage is what is earned beyond the value.": estimate(
            lambda r, v, w, gamma: r + gamma * w
        ),
        "gamma is missing before V_{t+1}.": estimate(lambda r, v, w, gamma: r + w - v),
        "gamma is missing before A_{t+1}: the sum decays with gamma times lam.": estimate(decay=lambda gamma, lam: lam),
        "lam is missing before A_{t+1}: the sum decays with gamma times lam.": estimate(decay=lambda gamma, lam: gamma),
        "These are the deltas alone. A_t adds gamma lam A_{t+1}.": estimate(decay=lambda gamma, lam: 0.0),
        "gamma is missing altogether.": estimate(lambda r, v, w, gamma: r + w - v, lambda gamma, lam: lam),
        "The loop runs forwards. A_t needs A_{t+1}, so it has to start at the end.": forwards,
        "The returns are the advantages. R_t = A_t + V_t.": estimate(returns=lambda A, v, w: A),
        "The returns add V_{t+1}. R_t = A_t + V_t.": estimate(returns=lambda A, v, w: A + w),
    }
    gae = grade(student, "gae", outputs, cases, mistakes, clean=(0,))
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

    def loss(
        ratio=lambda new, old: (new - old).exp(),
        clip=lambda r, eps: r.clamp(1 - eps, 1 + eps),
        choose=torch.max,
        sign=-1,
        flag=lambda a, b, r, eps: b > a,
    ):
        """The loss with one part replaced."""

        def losses(new, old, A, mask, eps):
            new, old, A = new * mask, old * mask, A * mask
            r = ratio(new, old)
            a, b = sign * A * r, sign * A * clip(r, eps)
            return choose(a, b), r, flag(a, b, r, eps)

        return losses

    def log_clip(new, old, A, mask, eps):
        d = (new - old) * mask
        return torch.max(-A * mask * d.exp(), -A * mask * d.clamp(-eps, eps).exp()), d.exp(), mask

    mistakes = {
        "`clipped` says where the ratio is out of range. It should say where the clipped branch is the larger loss.": loss(
            flag=lambda a, b, r, eps: (r - 1).abs() > eps
        ),
        "`clipped` is turned: it should be true where the clipped branch is the larger loss.": loss(
            flag=lambda a, b, r, eps: a > b
        ),
        "The sign is turned: this is what the paper maximises. A loss is minus that.": loss(sign=1, choose=torch.min),
        "The sign of A is turned, but the maximum is kept.": loss(sign=1),
        "The minimum is taken of the two losses. With turned signs it has to be the maximum.": loss(choose=torch.min),
        "The clip is forgotten: this is -A ratio.": loss(choose=lambda a, b: a),
        "The clipped branch is always taken. The larger of the two is wanted.": loss(choose=lambda a, b: b),
        "The log-ratio is clipped to +- cliprange. The ratio has to be, to 1 +- cliprange.": log_clip,
        "The ratio is turned: it is pi / pi_old.": loss(lambda new, old: (old - new).exp()),
        "The ratio is a quotient of two logarithms. It is the exponential of their difference.": loss(
            lambda new, old: new / old
        ),
        "This is the log-ratio. Its exponential is wanted.": loss(lambda new, old: new - old),
        "No gradient flows: the ratio was detached, or computed without one.": loss(
            lambda new, old: (new - old).exp().detach()
        ),
    }
    alike = [
        case(
            "a row of advantages that are all 1, given as (B, 1)",
            logs,
            logs * 0,
            row(1),
            bits("11111"),
            0.2,
            losses=row(-1.2, -0.5, -1.2, -0.5, -1.2),
        )
    ]
    grade(student, "policy_loss", outputs, cases + alike, mistakes, partial(read_loss, outputs), clean=(2,))


def test_value_loss(student):
    outputs = ("losses", "clipped")
    values, returns, mask = row(1.1, 1.5, 0.5, 7), row(2, 2, 2, 0), bits("1110")
    example = values, torch.ones(1, 4), returns, mask, 0.2
    cases = [case(f"{EXAMPLE}, with padding", *example, losses=row(0.405, 0.32, 1.125, 0), clipped=bits("0100"))]
    where, i, o = golden("trl07_ppo_loss_0")
    inputs = i["values"], i["old_values"], i["returns"], i["mask"].bool(), i["cliprange_value"]
    right = {"mean_loss": o["value_loss_times_vf_coef"] / i["vf_coef"], "gradient": o["grad_values"] / i["vf_coef"]}
    cases += [case(where, *inputs, **right, share_clipped=o["value_clipfrac"])]

    def loss(
        near=lambda v, old, R, eps: old + (v - old).clamp(-eps, eps),
        choose=torch.max,
        factor=0.5,
        error=torch.square,
        flag=lambda a, b, v, old, eps: b > a,
    ):
        """The loss with one part replaced."""

        def losses(v, old, R, mask, eps):
            v, old, R = v * mask, old * mask, R * mask
            a, b = error(v - R), error(near(v, old, R, eps) - R)
            return factor * choose(a, b), flag(a, b, v, old, eps)

        return losses

    mistakes = {
        "The factor 1/2 is missing.": loss(factor=1.0),
        "The smaller of the two errors is taken. It has to be the larger.": loss(choose=torch.min),
        "The clip is forgotten, or is around the returns instead of the old values, where it has no effect.": loss(
            choose=lambda a, b: a
        ),
        "The clipped branch is always taken. The larger of the two is wanted.": loss(choose=lambda a, b: b),
        "The old value is not added again after the clip of the difference.": loss(
            lambda v, old, R, eps: (v - old).clamp(-eps, eps)
        ),
        "`clipped` says where the value is out of range. It should say where the clipped branch is the larger loss.": loss(
            flag=lambda a, b, v, old, eps: (v - old).abs() > eps
        ),
        "No gradient flows: the values were detached.": loss(error=lambda x: x.detach() ** 2),
    }
    grade(student, "value_loss", outputs, cases, mistakes, partial(read_loss, outputs), clean=(2,))


def test_token_weights(student):
    mask, types = bits("1100", "1111"), ("dapo", "grpo", "dr_grpo")
    right = {"dapo": mask / 6, "grpo": mask * numbers([[1 / 4], [1 / 8]]), "dr_grpo": mask / 10}
    cases = [
        case(EXAMPLE, mask, 6, 5, **right),
        case("the same in a step with more tokens, 8 in each mini-batch", mask, 8, 7, dapo=mask / 8, dr_grpo=mask / 14),
    ]

    def read(function, mask, num_tokens, response_length):
        def args(name):
            return SimpleNamespace(loss_type=name, response_length=response_length)

        return {name: function(mask, len(mask), num_tokens, args(name)) for name in types}

    def of(**rules):
        """Mistakes in some of the types, of the mask, the number of tokens and the response's length."""
        return lambda mask, _, n, args: rules.get(args.loss_type, lambda *_: torch.zeros(0))(mask, n, args.response_length)

    mistakes = {
        "Padding has a weight, too. It is 0 there.": of(
            dapo=lambda m, n, L: torch.full(m.shape, 1 / n),
            grpo=lambda m, n, L: (1 / m.sum(1, keepdim=True) / len(m)).expand(m.shape),
            dr_grpo=lambda m, n, L: torch.full(m.shape, 1 / (len(m) * L)),
        ),
        "dapo is divided by the tokens of these rows. In a mini-batch of short responses they would count for more: "
        "num_tokens is what mini-batches have on average.": of(dapo=lambda m, n, L: m / m.sum()),
        "dapo is what grpo should be: every response counts alike.": of(
            dapo=lambda m, n, L: m / m.sum(1, keepdim=True) / len(m)
        ),
        "grpo is what dapo should be: every token counts alike.": of(grpo=lambda m, n, L: m / n),
        "grpo is not divided by the number of responses.": of(grpo=lambda m, n, L: m / m.sum(1, keepdim=True)),
        "grpo is divided by T, padding included, and not by the tokens of the row.": of(
            grpo=lambda m, n, L: m / m.numel()
        ),
        "dr_grpo is divided by the T of this batch, which depends on the longest response. It should be a constant, "
        "response_length.": of(dr_grpo=lambda m, n, L: m / m.numel()),
        "dr_grpo is not divided by the number of responses.": of(dr_grpo=lambda m, n, L: m / L),
    }
    grade(student, "token_weights", ("weights",), cases, mistakes, read)
