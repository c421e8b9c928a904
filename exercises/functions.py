"""The core functions of the scripts, with empty bodies. Write them from top to bottom: they get harder.

  python -m pytest exercises            grades all of them; one that still raises NotImplementedError is not done yet
  python -m pytest exercises -k gae     grades one

Shapes: B rows of a batch, P tokens of a prompt, T tokens of a response, V tokens in the vocabulary. `mask` (B, T) is a
boolean tensor, true on real tokens and false on padding. On padding, the outputs of models (log-probabilities, KL,
values) have no meaning: they may be any number, even NaN, and NaN * 0 is NaN. The outputs of functions in this file
(rewards, advantages, returns) are 0 on padding. No function may change its arguments.

In the examples 1 and 0 stand for true and false, and most numbers are rounded to three digits. All logarithms are
natural: log 2 = .693, log 3 = 1.099. sigmoid(x) = 1 / (1 + exp(-x)).
"""

import torch  # noqa: F401 (for you to use)
import torch.nn.functional as F  # noqa: F401
from torch import Tensor

# --- Reading: which tokens are real, and how likely they were ---------------------------------------------------------


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """The mean of x (B, T) over all real tokens of the batch, one number.

        sum of x over real tokens / number of real tokens

    Example: x = [[1, 2, 3],    mask = [[1, 1, 1],    gives (1 + 2 + 3 + 4) / 4 = 2.5
                  [4, 9, 9]]            [1, 0, 0]]

    Every loss of the scripts ends in a mean like this one. Padding must be neither added nor counted.

    Hint: x[mask] has the elements of x where the boolean tensor `mask` is true.
    Solution: lecture/ppo.py
    """
    raise NotImplementedError("masked_mean")


def response_mask(responses: Tensor, stop_token_ids: list[int]) -> tuple[Tensor, Tensor]:
    """Which tokens of the responses (B, T) are real: mask (B, T), and whether a response ended: (B,), both boolean.

    Sampling fills all T positions of a row. The response ends with the first stop token (some models have several),
    which is part of it: the policy chose that token, too, and has to learn when to choose it.

    Example, with stop tokens [9]: responses = [[5, 6, 9, 7, 9],    mask = [[1, 1, 1, 0, 0],    ended = [1, 0]
                                                [5, 6, 7, 8, 5]]            [1, 1, 1, 1, 1]]

    Hint: a token is real if no stop token precedes it. `torch.isin` finds stop tokens, `cumsum` counts them.
    Paper: Huang et al. 2024 (the N+ implementation details, arXiv 2403.17031).
    Solution: lecture/ppo.py
    """
    raise NotImplementedError("response_mask")


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """(B, T) log-probability of each of the tokens (B, T), from the logits (B, T, V) that predict them.

        log p(token) = logit of the token - log(sum over the vocabulary of exp(logit))

    Example, with V = 2: the logits [0, log 3] are the probabilities exp(0) / 4 = 1/4 and exp(log 3) / 4 = 3/4.
        logits = [[[0, log 3], [0, log 3]]], tokens = [[1, 0]]  ->  [[log 3/4, log 1/4]] = [[-.288, -1.386]]

    Hint: one function of torch turns logits into log-probabilities; a softmax followed by a log gives -inf if a
    probability is too small for a float. `gather` picks elements; its index needs as many dimensions as its input.
    Solution: lecture/ppo.py
    """
    raise NotImplementedError("token_logprobs")


def response_logprobs(logits: Tensor, tokens: Tensor, prompt_length: int, temperature: float) -> Tensor:
    """(B, T) log-probabilities of the response, from a model's logits for prompt and response.

    The tokens (B, P+T) are prompt and response in one row. The logits (B, P+T, V) at position s were computed from the
    tokens up to s, and predict token s + 1. The response was sampled from softmax(logits / temperature).

        position           0     1     2     3            P = 2, T = 2
        token              p1    p2    y1    y2
        logits predict     p2    y1    y2    the next token

    Example, with V = 2 and that text: tokens = [[0, 1, 1, 0]], logits = [[[0, 0], [0, log 3], [log 4, 0], [0, log 9]]]
        temperature 1:   p(y1 = 1) = 3/4 and p(y2 = 0) = 4/5      ->  [[-.288, -.223]]
        temperature .5:  p(y1 = 1) = 9/10 and p(y2 = 0) = 16/17   ->  [[-.105, -.061]]

    Hint: select the logits that predict the T response tokens; the function above does the rest.
    Solution: lecture/ppo.py
    """
    raise NotImplementedError("response_logprobs")


# --- Preferences: losses of pairs -------------------------------------------------------------------------------------


def preference_loss(chosen: Tensor, rejected: Tensor, margin: Tensor, center_rewards_coefficient: float) -> Tensor:
    """(B,) losses of a reward model on pairs of texts, from its rewards of the chosen and the rejected text, (B,) each.

        loss = -log sigmoid(chosen - rejected - margin) + c (chosen + rejected)^2

    Bradley and Terry's model: the probability that people prefer a text is the sigmoid of the difference in reward. The
    margin (B,) is the difference in reward that the pair should have at least. The second term, with a small c, keeps
    rewards near 0; without it, any constant could be added to all of them.

    Example: chosen = [log 3], rejected = [0], margin = [0], c = 0  ->  sigmoid = 3/4, loss = -log 3/4 = [.288]
             the same with margin = [log 3]                         ->  sigmoid(0) = 1/2, loss = log 2 = [.693]
             the first with c = .1                                  ->  .288 + .1 * 1.099^2 = [.408]

    Hint: sigmoid(-1000) is 0 in floating point, and its log is -inf. torch has one function for log sigmoid.
    Paper: Ouyang et al. 2022 (InstructGPT, 2203.02155, eq. 1).
    Solution: lecture/reward_model.py
    """
    raise NotImplementedError("preference_loss")


def dpo_loss(
    chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor, beta: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Direct preference optimisation: losses (B,), and the rewards of the chosen and the rejected responses, (B,) each.

    All four inputs are log-probabilities of complete responses (B,): of the policy, and of the frozen reference.

        reward = beta (log pi(y) - log pi_ref(y))        loss = -log sigmoid(chosen reward - rejected reward)

    It is the loss of a reward model whose reward is computed from the policy. The two rewards are returned for logging:
    they must not have a gradient, and the losses must.

    Example, with beta = .5: chosen = [-10], ref_chosen = [-12], rejected = [-8], ref_rejected = [-7]
        rewards [.5 * 2] = [1] and [.5 * -1] = [-.5], losses [-log sigmoid(1.5)] = [.201]

    Hint: compute the two log-ratios first. The rewards for logging need `detach`.
    Paper: Rafailov et al. 2023 (2305.18290, eq. 7).
    Solution: lecture/dpo.py
    """
    raise NotImplementedError("dpo_loss")


# --- Rewards: what a token earns --------------------------------------------------------------------------------------


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """(B, T) estimate of KL(policy || reference) from the sampled tokens; estimator is "k1", "k2" or "k3".

    p is the policy's probability of the token, q the reference's. The token was sampled from p.

        k1 = log(p / q)             on average the KL, but often negative
        k2 = 1/2 log(p / q)^2       never negative, but only near the KL
        k3 = q / p - 1 - log(q / p) on average the KL, and never negative

    Example: p = 1/2, q = 1/4, so that logprobs = [[-.693]] and ref_logprobs = [[-1.386]]
        k1 = log 2 = [[.693]],   k2 = .693^2 / 2 = [[.240]],   k3 = 1/2 - 1 + .693 = [[.193]]

    Hint: the inputs are logarithms, so q / p is the exponential of a difference. Check which one to subtract.
    Paper: Schulman 2020, "Approximating KL divergence".
    Solution: lecture/grpo.py
    """
    raise NotImplementedError("kl_estimate")


def shape_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Rewards of the tokens (B, T), 0 on padding.

        r_t = -kl_coef * KL_t,   and on the last real token of a row the score (B,) is added

    Each token has a penalty for its distance from the reference; the complete text has one score, at its end.

    Example: scores = [5], kl = [[1, 2, 3, 7]], mask = [[1, 1, 1, 0]], kl_coef = .1
        rewards = [[-.1, -.2, 5 - .3, 0]] = [[-.1, -.2, 4.7, 0]]

    Hint: a token is the last if it is real and the next one is not. In a full row there is no next token: F.pad can add
    one.
    Paper: Ziegler et al. 2019 (1909.08593, sec. 2.2).
    Solution: lecture/ppo.py
    """
    raise NotImplementedError("shape_rewards")


# --- Advantages: how much better than expected ------------------------------------------------------------------------


def leave_one_out(rewards: Tensor, k: int) -> Tensor:
    """(B,) advantages: each reward (B,) less the mean of the other k - 1 rewards of its group.

    The k responses to one prompt are a group, in neighbouring rows: with k = 3, rows 0 to 2, rows 3 to 5, ...
    The mean of the others is the baseline. It does not depend on this response, so the gradient stays unbiased.

    Example, with k = 3: rewards = [0, 3, 9, 1, 1, 4]
        first group    0 - (3 + 9) / 2 = -6,     3 - (0 + 9) / 2 = -1.5,   9 - (0 + 3) / 2 = 7.5
        second group   1 - (1 + 4) / 2 = -1.5,   1 - (1 + 4) / 2 = -1.5,   4 - (1 + 1) / 2 = 3

    Hint: one `view` makes each group a row. The sum of the others is the sum of all minus this one.
    Paper: Ahmadian et al. 2024 (2402.14740, sec. 3).
    Solution: lecture/rloo.py
    """
    raise NotImplementedError("leave_one_out")


def group_advantages(scores: Tensor, G: int, scale: str) -> Tensor:
    """(B,) advantages of GRPO: each score (B,) less the mean of its group of G neighbouring rows, divided by a scale.

        (score - mean of the group) / (deviation + 0.0001)

    where the deviation is that of the group (scale "group") or of all scores (scale "batch"), both with n - 1 under the
    root. With scale "mean" the mean of the group replaces the deviation; with "none" there is no division. Unlike in
    leave_one_out, the mean includes the score itself.

    Example, with G = 4: scores = [1, 0, 0, 0, 1, 1, 1, 1]. The means are 1/4 and 1, the deviation of the first group
    is sqrt((.75^2 + 3 * .25^2) / 3) = .5, that of the second 0.
        "none"   [.75, -.25, -.25, -.25, 0, 0, 0, 0]
        "group"  [1.4997, -.4999, -.4999, -.4999, 0, 0, 0, 0]
        "mean"   [2.9988, -.9996, -.9996, -.9996, 0, 0, 0, 0]

    Hint: with `keepdim=True`, one number per group can be subtracted from all scores of the group.
    Paper: Shao et al. 2024 (2402.03300); "none" is Dr. GRPO (Liu et al. 2025, 2503.20783), and
    "mean" MaxRL (2602.02710).
    Solution: lecture/grpo.py
    """
    raise NotImplementedError("group_advantages")


def masked_whiten(x: Tensor, mask: Tensor) -> Tensor:
    """(B, T) x, shifted and scaled to mean 0 and variance 1 over the real tokens of the batch; 0 on padding.

        (x - mean) / sqrt(variance + 1e-8)

    with Bessel's correction: the variance is the sum of (x - mean)^2 over n - 1, for n real tokens.

    Example: x = [[2, 4, 6, 100]], mask = [[1, 1, 1, 0]]: mean 4, variance (4 + 0 + 4) / 2 = 4, so [[-1, 0, 1, 0]]

    Hint: the variance is masked_mean of something, times n / (n - 1), or a method of x[mask].
    Solution: lecture/ppo.py
    """
    raise NotImplementedError("masked_whiten")


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation: advantages and returns, (B, T) each, both 0 on padding.

    V_t, the value, is the critic's prediction of the rewards from token t on.

        delta_t = r_t + gamma V_{t+1} - V_t         A_t = delta_t + gamma lam A_{t+1}         return R_t = A_t + V_t

    After the last real token of a row the episode is over: there V_{t+1} and A_{t+1} are 0, whatever `values` contains.

    Example, with gamma = 1 and lam = .5: rewards = [[0, 0, 1, 0]], values = [[0, .4, .6, 9]], mask = [[1, 1, 1, 0]]
        delta_2 = 1 + 0 - .6 = .4       A_2 = .4                      R_2 = .4 + .6 = 1
        delta_1 = 0 + .6 - .4 = .2      A_1 = .2 + .5 * .4 = .4       R_1 = .4 + .4 = .8
        delta_0 = 0 + .4 - 0 = .4       A_0 = .4 + .5 * .4 = .6       R_0 = .6 + 0 = .6

    Hint: A_t needs A_{t+1}, so go from the last column to the first. Rewards are 0 on padding; if values are, too, the
    last token is no special case.
    Paper: Schulman et al. 2016 (1506.02438, eq. 16).
    Solution: lecture/ppo.py
    """
    raise NotImplementedError("gae")


# --- Losses: how far to follow the advantages -------------------------------------------------------------------------


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, cliprange: float
) -> tuple[Tensor, Tensor, Tensor]:
    """PPO's clipped loss: losses (B, T), the ratio (B, T), and where the clipped branch was the larger one (B, T).

    The advantages are (B, T), or (B, 1) if all tokens of a response have the same advantage, as in GRPO.

        ratio = pi(y_t) / pi_old(y_t)
        loss = max(-A ratio, -A clip(ratio, 1 - cliprange, 1 + cliprange))

    The paper maximises a minimum. A loss is minimised, so the signs change and the minimum becomes a maximum. The
    larger of the two losses is flat if the update has already moved the ratio beyond the range in the direction of the
    advantage; it has a gradient if the ratio moved in the wrong direction. `clipped` is boolean. The results on padding
    do not matter, since a mean over real tokens follows, but they must not make its gradient NaN.

    Example, with cliprange .2 and the ratios 1.5, .5, 1.5, .5 (logprobs are their logarithms, old_logprobs are zeros):
        A       =   1      1     -1     -1
        losses  =  -1.2   -.5    1.5    .8
        clipped =   1      0      0      1

    Hint: a ratio of probabilities is the exponential of a difference. Set the difference to 0 on padding, so that its
    exponential is finite.
    Paper: Schulman et al. 2017 (1707.06347, eq. 7).
    Solution: lecture/ppo.py
    """
    raise NotImplementedError("policy_loss")


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, cliprange_value: float
) -> tuple[Tensor, Tensor]:
    """The critic's clipped loss: losses (B, T), and where the clipped branch was the larger one (B, T, boolean).

        near = old value + clip(value - old value, -cliprange_value, +cliprange_value)
        loss = 1/2 max((value - return)^2, (near - return)^2)

    As for the policy, a value beyond the clip range has no gradient that would move it further towards its return. The
    results on padding do not matter, but must not make the gradient NaN.

    Example, with cliprange_value .2, old values 1 and returns 2:
        values  =  1.1               1.5               .5
        near    =  1.1               1.2               .8
        losses  =  .81 / 2 = .405    .64 / 2 = .32     2.25 / 2 = 1.125
        clipped =  0                 1                 0

    Hint: `clamp` takes tensors as bounds, too.
    Paper: none; the clip of values is from OpenAI's code of PPO.
    Solution: lecture/ppo.py
    """
    raise NotImplementedError("value_loss")


def token_weights(mask: Tensor, num_rows: float, num_tokens: float, loss_type: str, max_length: int) -> Tensor:
    """(B, T) weights of the tokens' losses, whose weighted sum is the loss of a mini-batch; 0 on padding.

        loss_type  "dapo"      1 / num_tokens: every token has the same weight
                   "grpo"      1 / (num_rows * tokens of the row): every response has the same weight
                   "dr_grpo"   1 / (num_rows * max_length): like dapo, but with a constant

    num_rows is the number of responses in a mini-batch, num_tokens the number of their real tokens, both averaged over
    the mini-batches of the batch. max_length is the maximum number of tokens in a response.

    Example: mask = [[1, 1, 0, 0], [1, 1, 1, 1]], num_rows = 2, num_tokens = 6, max_length = 5
        dapo     [[1/6,  1/6,  0, 0],  [1/6,  1/6,  1/6,  1/6]]
        grpo     [[1/4,  1/4,  0, 0],  [1/8,  1/8,  1/8,  1/8]]
        dr_grpo  [[1/10, 1/10, 0, 0],  [1/10, 1/10, 1/10, 1/10]]

    With grpo, a token of a long wrong answer has less weight than one of a short wrong answer. Does the policy learn to
    write long wrong answers?

    Hint: a mask divided by a number is a tensor of numbers.
    Paper: Liu et al. 2025 (2503.20783, sec. 3.1), Yu et al. 2025 (2503.14476, sec. 3.3).
    Solution: lecture/grpo.py
    """
    raise NotImplementedError("token_weights")
