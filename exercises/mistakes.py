"""Common mistakes in the exercises: for each exercise, sentences and functions that make the mistake.

grading.py prints a sentence if its function returns what the student's returns, in every case. Such a function may
return a dict with only those results that the mistake changes.

Most of these functions are one step away from a solution. So a student's folder has their results (mistakes.json) in
place of this file: see release.py.
"""

import torch
import torch.nn.functional as F


def masked_mean():
    def of_rows(x, m):
        return ((x * m).sum(1) / m.sum(1).clamp(min=1)).mean()

    return {
        "Padding is counted: the sum is right, but it is divided by all positions.": lambda x, m: (x * m).mean(),
        "Padding is added and counted: this is the mean of everything.": lambda x, m: x.mean(),
        "This is the mean of the rows' means. Each row has the same weight; each token should have it.": of_rows,
    }


def response_mask():
    def mask(function, output="mask"):
        return lambda responses, stops: {output: function(torch.isin(responses, torch.tensor(stops)))}

    return {
        "The stop token is not in the mask. It is real: the policy chose it, and has to learn when to choose it.": mask(
            lambda stop: stop.cumsum(1) == 0
        ),
        "Only the stop tokens are left out. Everything after the first of them should be.": mask(lambda stop: ~stop),
        "The response ends with the last stop token. It should end with the first.": mask(
            lambda stop: (stop.flip(1).cumsum(1).flip(1) > 0) | ~stop.any(1, keepdim=True)
        ),
        "The mask is inverted: true is for real tokens, false for what comes after them.": mask(
            lambda stop: stop.cumsum(1) - stop.long() > 0
        ),
        "A row without a stop token ends after its first token, because argmax is 0 if nothing is found. All of it is "
        "real.": mask(lambda stop: torch.arange(stop.shape[1]) <= stop.long().argmax(1, keepdim=True)),
        "`ended` is inverted: true is for rows that have a stop token.": mask(lambda stop: ~stop.any(1), "ended"),
    }


def pick(logprobs, tokens):
    """The entries of the tokens."""
    return logprobs.gather(-1, tokens[..., None]).squeeze(-1)


def token_logprobs():
    return {
        "These are the tokens' logits. Log-probabilities are normalised.": pick,
        "These are probabilities. Return their logarithms.": lambda x, t: pick(x.softmax(-1), t),
        "The sign is wrong: cross-entropy is minus the log-probability.": lambda x, t: -pick(x.log_softmax(-1), t),
        "It is normalised over the positions, dimension 1. Normalise over the vocabulary, the last one.": lambda x, t: (
            pick(x.log_softmax(1), t)
        ),
        "It shifts by one position. These logits predict these tokens; the next exercise shifts.": lambda x, t: pick(
            x[:, :-1].log_softmax(-1), t[:, 1:]
        ),
    }


def response_logprobs():
    def taken(cut_logits, cut_tokens=lambda t, P: t[:, P:]):
        return lambda x, t, P, temperature: pick((cut_logits(x, P) / temperature).log_softmax(-1), cut_tokens(t, P))

    right = taken(lambda x, P: x[:, P - 1 : -1])
    return {
        "It is shifted by one: the logits at a token's own position predict the next token.": taken(
            lambda x, P: x[:, P:]
        ),
        "The first token of the response is missing: the last position of the prompt predicts it.": taken(
            lambda x, P: x[:, P:-1], lambda t, P: t[:, P + 1 :]
        ),
        "It includes tokens of the prompt. Return those of the response.": taken(
            lambda x, P: x[:, :-1], lambda t, P: t[:, 1:]
        ),
        "The temperature is missing.": lambda x, t, P, temperature: right(x, t, P, 1.0),
        "The logits are multiplied by the temperature. Divide them by it.": lambda x, t, P, temperature: right(
            x, t, P, 1 / temperature
        ),
        "The log-probabilities are divided by the temperature. Divide the logits, before they are normalised.": (
            lambda x, t, P, temperature: right(x, t, P, 1.0) / temperature
        ),
    }


def preference_loss():
    def loss(score=lambda a, b, m: a - b - m, centring=lambda a, b: (a + b) ** 2, of=F.logsigmoid, sign=-1):
        return lambda a, b, m, c: sign * of(score(a, b, m)) + c * centring(a, b)

    return {
        "Chosen and rejected are exchanged: this loss prefers the rejected text.": loss(lambda a, b, m: b - a - m),
        "The margin has the wrong sign: a margin should make the loss larger.": loss(lambda a, b, m: a - b + m),
        "The margin is missing.": loss(lambda a, b, m: a - b),
        "The centring term is missing.": loss(centring=lambda a, b: 0.0),
        "The centring term has the difference of the rewards. It should have their sum.": loss(
            centring=lambda a, b: (a - b) ** 2
        ),
        "The sign is wrong: the log of a probability is negative, and the loss is minus that.": loss(sign=1),
        "This is the mean over pairs. Return one loss for each pair.": lambda *inputs: loss()(*inputs).mean(),
    }


def dpo_loss():
    def loss(delta, of=lambda delta, beta: -F.logsigmoid(beta * delta)):
        return lambda a, b, ra, rb, beta: (of(delta(a, b, ra, rb), beta), a, b)

    def right_delta(a, b, ra, rb):
        return a - ra - (b - rb)

    return {
        "Chosen and rejected are exchanged: this loss prefers the rejected responses.": loss(
            lambda a, b, ra, rb: b - rb - (a - ra)
        ),
        "beta is missing from the loss.": loss(right_delta, lambda delta, beta: -F.logsigmoid(delta)),
        "beta is outside of the log-sigmoid. It should be inside.": loss(
            right_delta, lambda delta, beta: -beta * F.logsigmoid(delta)
        ),
        "The reference is missing: the loss contains only the policy's log-probabilities.": loss(
            lambda a, b, ra, rb: a - b
        ),
        "The sign of the loss is wrong: a log-probability is negative, and the loss is minus that.": loss(
            right_delta, lambda delta, beta: F.logsigmoid(beta * delta)
        ),
        "beta is missing from the rewards.": lambda a, b, ra, rb, beta: (a, a - ra, b - rb),
        "No gradient flows through the losses: `detach` (or `no_grad`) is on the wrong tensor.": lambda a, *others: (
            a.detach(),
            a,
            a,
        ),
    }


def kl_estimate():
    def of(estimator, function):
        return lambda p, q, name: function(p - q) if name == estimator else torch.zeros(0)

    return {
        "k1 has the wrong sign: it is log p - log q, the policy's minus the reference's.": of("k1", lambda d: -d),
        "k1 is a quotient of two logarithms. The logarithm of a quotient is a difference.": lambda p, q, name: p / q,
        "k2 lacks its factor 1/2.": of("k2", lambda d: d**2),
        "k3 has the wrong sign in each logarithm: q / p is exp(ref_logprobs - logprobs).": of(
            "k3", lambda d: d.exp() - 1 - d
        ),
        "k3 has the wrong sign before its last term: - log(q / p) is + (log p - log q).": of(
            "k3", lambda d: (-d).exp() - 1 - d
        ),
        "k3 has p / q in place of q / p.": of("k3", lambda d: d.exp() - 1 + d),
        "k3 lacks its -1: it should be 0 if both models agree.": of("k3", lambda d: (-d).exp() + d),
    }


def shape_rewards():
    def on(position):
        """The score is on one position of a row, computed from the mask; the rest is right."""

        def rewards(scores, kl, mask, kl_coef):
            return -kl_coef * kl * mask + F.one_hot(position(mask), mask.shape[1]) * scores[:, None]

        return rewards

    def penalty(function):
        """The score is right, and the rest is wrong."""

        def rewards(scores, kl, mask, kl_coef):
            last = F.one_hot(mask.sum(1) - 1, mask.shape[1])
            return function(kl, mask, kl_coef) + scores[:, None] * last

        return rewards

    def score(function):
        """The score is in the wrong place: a function of the score, the rest, and the mask."""
        return lambda scores, kl, mask, kl_coef: function(scores[:, None], -kl_coef * kl * mask, mask)

    return {
        "The score is on the last position of the row, which may be padding. It belongs on the last real token.": on(
            lambda m: torch.full_like(m.sum(1), m.shape[1] - 1)
        ),
        "The score is one position too late, after the last real token.": on(
            lambda m: m.sum(1).clamp(max=m.shape[1] - 1)
        ),
        "The score is one position too early.": on(lambda m: (m.sum(1) - 2).clamp(min=0)),
        "The score is on every real token. It belongs only on the last one.": score(lambda s, r, m: r + s * m),
        "The score is missing: this is the penalty for KL alone.": score(lambda s, r, m: r),
        "The score is missing in full rows. It belongs on their last token, too.": score(
            lambda s, r, m: r + s * (m & ~F.pad(m, (0, 1), value=True)[:, 1:])
        ),
        "The KL has the wrong sign: it is a cost, so it is subtracted.": penalty(lambda kl, m, c: c * kl * m),
        "kl_coef is missing.": penalty(lambda kl, m, c: -kl * m),
    }


def leave_one_out():
    def others(x):
        return (x.sum(1, keepdim=True) - x) / (x.shape[1] - 1)

    def of_batch(r, k):
        return r - others(r[None])[0]

    def of_columns(r, k):
        return (r.view(k, -1).T - others(r.view(k, -1).T)).T.flatten()

    return {
        "The mean includes the reward itself. It should be the mean of the k - 1 others.": lambda r, k: (
            r.view(-1, k) - r.view(-1, k).mean(1, keepdim=True)
        ).flatten(),
        "The sum of the others is divided by k. There are k - 1 of them.": lambda r, k: (
            r.view(-1, k) - others(r.view(-1, k)) * (k - 1) / k
        ).flatten(),
        "The mean is that of the batch. It should be the mean of the others in the group.": lambda r, k: r - r.mean(),
        "The mean is that of all others in the batch. It should be the mean of the others in the group.": of_batch,
        "The groups are wrong: k neighbouring rows are a group: use `view(-1, k)` and not `view(k, -1)`.": of_columns,
        "This is the mean of the others. Subtract it from the reward.": lambda r, k: others(r.view(-1, k)).flatten(),
        "The sign is wrong: a reward above those of the others has a positive advantage.": lambda r, k: (
            others(r.view(-1, k)) - r.view(-1, k)
        ).flatten(),
    }


def group_advantages():
    def scaled(**divisors):
        """Wrong divisors, for some of the scales."""

        def advantages(scores, G, scale):
            x = scores.view(-1, G)
            if scale not in divisors:
                return torch.zeros(0)
            return ((x - x.mean(1, keepdim=True)) / divisors[scale](x)).flatten()

        return advantages

    def of_columns(s, G, scale):
        return (s.view(G, -1) - s.view(G, -1).mean(0)).flatten()

    def without_itself(s, G, scale):
        return (s.view(-1, G) - s.view(-1, G).mean(1, keepdim=True)).flatten() * G / (G - 1)

    return {
        "The groups are wrong: G neighbouring rows are a group: use `view(-1, G)` and not `view(G, -1)`.": of_columns,
        "The mean leaves out the score itself, as in leave_one_out. In GRPO the mean includes it.": without_itself,
        "The mean is that of the batch. It should be the mean of the group.": lambda s, G, scale: s - s.mean(),
        "A group whose scores are all equal gives 0 / 0, which is NaN: the 0.0001 is missing.": scaled(
            group=lambda x: x.std(1, keepdim=True), batch=lambda x: x.std()
        ),
        "A group whose scores are all 0 gives 0 / 0, which is NaN: the 0.0001 is missing.": scaled(
            mean=lambda x: x.mean(1, keepdim=True)
        ),
        "The deviation is the biased one, with n under the root instead of n - 1.": scaled(
            group=lambda x: x.std(1, keepdim=True, correction=0) + 1e-4, batch=lambda x: x.std(correction=0) + 1e-4
        ),
        "It is divided by the variance. Divide by its root.": scaled(
            group=lambda x: x.var(1, keepdim=True) + 1e-4, batch=lambda x: x.var() + 1e-4
        ),
        "Nothing is divided, as if scale were none.": scaled(
            **dict.fromkeys(("group", "batch", "mean"), lambda x: 1.0)
        ),
        'With "group" it is divided by the deviation of the batch.': scaled(group=lambda x: x.std() + 1e-4),
        'With "batch" it is divided by the deviation of the group.': scaled(
            batch=lambda x: x.std(1, keepdim=True) + 1e-4
        ),
        'With "batch" it is divided by the deviation of the advantages, not of the scores.': scaled(
            batch=lambda x: (x - x.mean(1, keepdim=True)).std() + 1e-4
        ),
        'With "batch" it is divided by the mean of the groups\' deviations, not by that of all scores.': scaled(
            batch=lambda x: x.std(1).mean() + 1e-4
        ),
        'With "batch" it is divided by the deviation of the groups\' means, not of all scores.': scaled(
            batch=lambda x: x.mean(1).std() + 1e-4 if len(x) > 1 else torch.nan
        ),
        'With "mean" it is divided by the mean of the batch. It should be the mean of the group.': scaled(
            mean=lambda x: x.mean() + 1e-4
        ),
        'With "mean" it is divided by the sum of the group. It should be its mean.': scaled(
            mean=lambda x: x.sum(1, keepdim=True) + 1e-4
        ),
        'With "mean" it is also divided by the deviation.': scaled(
            mean=lambda x: (x.mean(1, keepdim=True) + 1e-4) * (x.std(1, keepdim=True) + 1e-4)
        ),
    }


def masked_whiten():
    def whiten(mean=lambda x, m: x[m].mean(), scale=lambda x, m: x[m].std(), clean=True):
        def whitened(x, m):
            y = (x - mean(x, m)) / scale(x, m)
            return y * m if clean else y

        return whitened

    return {
        "Padding is not 0.": whiten(clean=False),
        "The variance is the biased one: with Bessel's correction the sum of squares is divided by n - 1.": whiten(
            scale=lambda x, m: x[m].std(correction=0)
        ),
        "It is divided by the variance. Divide by its root.": whiten(scale=lambda x, m: x[m].var()),
        "Padding is counted in mean and variance.": whiten(lambda x, m: x.mean(), lambda x, m: x.std()),
        "Each row is whitened separately. Use mean and variance of all real tokens of the batch.": lambda x, m: (
            torch.cat([whiten()(*pair) for pair in zip(x.split(1), m.split(1))])
        ),
        "The mean is not subtracted.": whiten(mean=lambda x, m: 0.0),
    }


def gae():
    def estimate(
        delta=lambda r, v, w, gamma: r + gamma * w - v,
        decay=lambda gamma, lam: gamma * lam,
        after=lambda v, m: F.pad(v * m, (0, 1))[:, 1:],
        returns=lambda A, v, w: A + v,
    ):
        """The estimate with one part replaced. w are the values of the next token."""

        def advantages_and_returns(rewards, values, mask, gamma, lam):
            r, v, w = rewards * mask, values * mask, after(values, mask)
            deltas, A, advantage = delta(r, v, w, gamma), torch.zeros_like(r), 0.0
            for t in reversed(range(r.shape[1])):
                A[:, t] = advantage = deltas[:, t] + decay(gamma, lam) * advantage
            return A, returns(A, v, w)

        return advantages_and_returns

    def forwards(*inputs):
        return tuple(x.flip(1) for x in estimate()(*(x.flip(1) for x in inputs[:3]), *inputs[3:]))

    return {
        "The value after the last real token is taken from the padding. It is 0: the episode is over.": estimate(
            after=lambda v, m: F.pad(v, (0, 1))[:, 1:] * m
        ),
        "In a full row the last value is used again as the one after it. That one is 0: the episode is over.": estimate(
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
        "gamma is missing everywhere.": estimate(lambda r, v, w, gamma: r + w - v, lambda gamma, lam: lam),
        "The loop runs forwards. A_t needs A_{t+1}, so it has to start at the end.": forwards,
        "The returns are the advantages. R_t = A_t + V_t.": estimate(returns=lambda A, v, w: A),
        "The returns add V_{t+1}. R_t = A_t + V_t.": estimate(returns=lambda A, v, w: A + w),
    }


def policy_loss():
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

    return {
        "`clipped` is true where the ratio is out of range. It should be true where the clipped branch is the larger "
        "loss.": loss(flag=lambda a, b, r, eps: (r - 1).abs() > eps),
        "`clipped` is inverted: it should be true where the clipped branch is the larger loss.": loss(
            flag=lambda a, b, r, eps: a > b
        ),
        "The sign is wrong: this is what the paper maximises. A loss is minus that.": loss(sign=1, choose=torch.min),
        "The sign of A is wrong, but the maximum is right.": loss(sign=1),
        "This is the minimum of the two losses. After the change of sign it has to be the maximum.": loss(
            choose=torch.min
        ),
        "The clip is missing: this is -A ratio.": loss(choose=lambda a, b: a),
        "This is always the clipped branch. Return the larger of the two.": loss(choose=lambda a, b: b),
        "The log-ratio is clipped to +- cliprange. Clip the ratio, to 1 +- cliprange.": log_clip,
        "The ratio is inverted: it is pi / pi_old.": loss(lambda new, old: (old - new).exp()),
        "The ratio is a quotient of two logarithms. It is the exponential of their difference.": loss(
            lambda new, old: new / old
        ),
        "This is the log-ratio. Use its exponential.": loss(lambda new, old: new - old),
        "No gradient flows: the ratio was detached, or computed without a gradient.": loss(
            lambda new, old: (new - old).exp().detach()
        ),
    }


def value_loss():
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

    return {
        "The factor 1/2 is missing.": loss(factor=1.0),
        "This is the smaller of the two errors. It has to be the larger.": loss(choose=torch.min),
        "The clip is missing, or it is around the returns instead of the old values, where it has no effect.": loss(
            choose=lambda a, b: a
        ),
        "This is always the clipped branch. Return the larger of the two.": loss(choose=lambda a, b: b),
        "The old value is not added after the clip of the difference.": loss(
            lambda v, old, R, eps: (v - old).clamp(-eps, eps)
        ),
        "`clipped` is true where the value is out of range. It should be true where the clipped branch is the larger "
        "loss.": loss(flag=lambda a, b, v, old, eps: (v - old).abs() > eps),
        "No gradient flows: the values were detached.": loss(error=lambda x: x.detach() ** 2),
    }


def token_weights():
    def of(**rules):
        """Wrong weights for some of the types: functions of mask, number of tokens and maximum length."""

        def weights(mask, num_rows, num_tokens, loss_type, max_length):
            rule = rules.get(loss_type)
            return rule(mask, num_tokens, max_length) if rule else torch.zeros(0)

        return weights

    return {
        "Padding has a weight. It should be 0.": of(
            dapo=lambda m, n, L: torch.full(m.shape, 1 / n),
            grpo=lambda m, n, L: (1 / m.sum(1, keepdim=True) / len(m)).expand(m.shape),
            dr_grpo=lambda m, n, L: torch.full(m.shape, 1 / (len(m) * L)),
        ),
        "dapo is divided by the number of tokens of these rows. In a mini-batch of short responses each token would "
        "then have a higher weight: divide by num_tokens, the average of the mini-batches.": of(
            dapo=lambda m, n, L: m / m.sum()
        ),
        "dapo is computed like grpo: every response has the same weight.": of(
            dapo=lambda m, n, L: m / m.sum(1, keepdim=True) / len(m)
        ),
        "grpo is computed like dapo: every token has the same weight.": of(grpo=lambda m, n, L: m / n),
        "grpo is not divided by the number of responses.": of(grpo=lambda m, n, L: m / m.sum(1, keepdim=True)),
        "grpo is divided by T, padding included, and not by the number of tokens of the row.": of(
            grpo=lambda m, n, L: m / m.numel()
        ),
        "dr_grpo is divided by the T of this batch, which depends on the longest response. It should be a constant, "
        "max_length.": of(dr_grpo=lambda m, n, L: m / m.numel()),
        "dr_grpo is not divided by the number of responses.": of(dr_grpo=lambda m, n, L: m / L),
    }
