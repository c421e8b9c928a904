"""PPO for language models, in short: ../ppo.py without what only large models and long runs need.

A policy pi (a language model) answers prompts, and a reward model scores each answer. Each update
makes the tokens of good answers a little more likely. An update, on a batch of B prompts:

  1. sample     response y_1..y_T ~ pi(. | prompt), up to and including the stop token
  2. score      ref_logprobs of the reference, a frozen copy of the first pi; values V_old,t of the
                critic, which predicts the rewards still to come; one score for each response,
                reduced if it never stops
  3. reward     r_t = -kl_coef * KL_t, plus the score at the end; KL_t = log(pi(y_t) / pi_ref(y_t))
  4. advantage  delta_t = r_t + gamma V_old,t+1 - V_old,t,  A_t = delta_t + gamma lam A_t+1;
                return R_t = A_t + V_old,t;  then whiten A
  5. loss       ratio_t = pi(y_t) / pi_old(y_t), with pi_old and V_old from steps 1 and 2
                policy: mean_t max(-A_t ratio_t, -A_t clip(ratio_t, 1-eps, 1+eps))
                value:  mean_t 1/2 max((V_t - R_t)^2, (clip(V_t, V_old,t -+ eps_v) - R_t)^2)
  6. update     `num_ppo_epochs` passes over the batch, one optimiser step for each mini-batch

The layout of the tensors, for a prompt of 3 tokens (left-padded to P = 4) and a response that stops
after 4 tokens (the longest has T = 6). A dot is padding: it may hold any number, and is masked.

  input_ids     PAD  p1  p2  p3 | y1  y2  y3  EOS  .   .    prompts (B, P), then responses (B, T)
  mask                          |  1   1   1   1   0   0    true up to and including the stop token
  logprobs, KL                  |  *   *   *   *   .   .    of y_t, read one position to the left
  values                        |  *   *   *   *   .   .    of the text before y_t, read there, too
  score                         |              *            one per text, on the last real token

  python lecture/ppo.py    # the toy world: a minute on a CPU, score 0 -> 5.3, KL 0 -> 21 nats
  python lecture/ppo.py --model gpt2 --learning-rate 1e-5 --reward-model MINE --dataset MINE.jsonl

Papers: PPO 1707.06347, GAE 1506.02438, KL in the reward 1909.08593, InstructGPT 2203.02155 (arXiv).
"""

# %% Settings, with the names and defaults of ../ppo.py
import time
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import tyro
import wandb
from datasets import load_dataset
from tqdm import trange
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

HERE = Path(globals().get("__file__", "this.py")).resolve().parent  # in a notebook: where it runs
TOY = (HERE if Path(HERE, "toy").exists() else HERE.parent) / "toy"


@dataclass
class Args:
    num_ppo_epochs: int = 4  # passes over each batch
    num_mini_batches: int = 1  # optimiser steps in one pass
    cliprange: float = 0.2  # eps: where a ratio has moved further, its loss is flat
    cliprange_value: float = 0.2  # eps_v: the same for a value, in units of the reward
    vf_coef: float = 0.1  # weight of the value loss; hardly matters, since Adam rescales gradients
    gamma: float = 1.0  # discount; 1 because an episode is short
    lam: float = 0.95  # GAE's lambda: 0 trusts the critic, 1 the sampled return
    missing_eos_penalty: float = 1.0  # subtracted from the score of a response that never stops
    kl_coef: float = 0.05  # weight of KL in the reward. 0: the reward model is exploited
    response_length: int = 53  # maximum number of tokens in a response
    temperature: float = 0.7  # divides the logits, wherever they are used. Lower: less exploration
    learning_rate: float = 3.1e-4  # at the start; it falls linearly to 0. For GPT-2: 1e-5
    batch_size: int = 64  # B, the responses of an update
    total_episodes: int = 2048  # responses in the whole run
    model: str = f"{TOY}/sft"  # the policy to start from: a folder, or a name on the hub
    reward_model: str = f"{TOY}/reward_model"  # a classifier with one label, for the same tokens
    dataset: str = f"{TOY}/data/prompts"  # folder, .jsonl, hub name; texts in a column `prompt`
    output_dir: str = f"runs/lecture_ppo__{time.strftime('%Y%m%d-%H%M%S')}"  # a new folder
    seed: int = 1  # of the order of prompts, the responses and the mini-batches
    track: bool = False  # log to Weights & Biases


# %% 1. Sample
def forward(model, input_ids, attention_mask, **options):
    """Output for texts (B, S), or for their newest tokens. Positions count real tokens alone."""
    options["position_ids"] = (attention_mask.cumsum(1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
    return model(input_ids=input_ids, attention_mask=attention_mask, **options)


def sample_categorical(logits, uniforms):
    """One token per row of logits (B, V), and its log-probability, from uniform numbers (B,).

    The token is the first whose cumulative probability exceeds the number. With probabilities
    .2 .5 .3, cumulative .2 .7 1, the number .6 gives the second token.
    """
    logprobs = logits.log_softmax(1)
    cdf = logprobs.exp().cumsum(1)
    threshold = uniforms[:, None] * cdf[:, -1:]  # (B, 1) rounding lets the sum end slightly off 1
    tokens = torch.searchsorted(cdf, threshold, right=True).clamp(max=logits.shape[1] - 1)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)


@torch.no_grad()
def sample(policy, prompts, prompt_mask, uniforms, temperature, stop_token_id):
    """Responses (B, T) to prompts (B, P), and logprobs (B, T), from uniforms (B, response_length).

    Drawn from softmax(logits / temperature) alone, without top-k or top-p, as the loss has neither.
    """
    responses, logprobs = [], []
    tokens = prompts  # (B, P), then (B, 1): the cache keeps the rest
    attention_mask = prompt_mask  # (B, P), after each pass one wider
    cache = None
    for u in uniforms.unbind(1):  # (B,)
        output = forward(policy, tokens, attention_mask, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        token, logprob = sample_categorical(output.logits[:, -1] / temperature, u)  # (B,) each
        tokens = token[:, None]  # (B, 1)
        responses.append(tokens)
        logprobs.append(logprob[:, None])
        if (torch.cat(responses, 1) == stop_token_id).any(1).all():
            break
        attention_mask = F.pad(attention_mask, (0, 1), value=1)
    return torch.cat(responses, 1), torch.cat(logprobs, 1)


def response_mask(responses, stop_token_ids):
    """(B, T) true up to and including the first stop token, and (B,) whether there is one.

    Found by position, not by the pad token: after the stop token, sampling goes on with arbitrary
    tokens, and where the pad token is EOS (GPT-2), the sampled EOS is real. With stop token 0:
        responses [[5, 0, 7, 0], [5, 6, 7, 8]]  ->  mask [[1, 1, 0, 0], [1, 1, 1, 1]], ended [1, 0]
    """
    is_stop = torch.isin(responses, responses.new_tensor(stop_token_ids)).long()
    stops_before = is_stop.cumsum(1) - is_stop
    return stops_before == 0, is_stop.any(1)


# %% 2. Score
def token_logprobs(logits, tokens):
    """(B, T) log-probability of each token under logits (B, T, V)."""
    return logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


def response_logprobs(logits, tokens, prompt_length, temperature):
    """(B, T) log-probabilities of the responses, from logits (B, P+T, V) and tokens (B, P+T). The
    logits at a position predict the next token: those of the responses begin at P-1."""
    logits = logits[:, prompt_length - 1 : -1] / temperature
    return token_logprobs(logits, tokens[:, prompt_length:])


def read_head(model, input_ids, attention_mask):
    """(B, S) a number for each position, by the linear head of a critic or reward model."""
    states = forward(model.base_model, input_ids, attention_mask).last_hidden_state  # (B, S, D)
    return model.score(states).squeeze(-1)


# %% 3. Reward
def shape_rewards(scores, kl, mask, kl_coef):
    """(B, T) rewards: -kl_coef * KL, plus the score (B,) on the last real token; 0 on padding."""
    is_last = mask & ~F.pad(mask, (0, 1))[:, 1:]  # real, and the next one is not
    return (scores[:, None] * is_last - kl_coef * kl).masked_fill(~mask, 0.0)


# %% 4. Advantage
def gae(rewards, values, mask, gamma, lam):
    """Generalised advantage estimation (2016, eq. 16): advantages and returns (B, T).

    A response that was cut off counts as ended: the value after it is 0. Its score is final, so a
    value for the missing rest would stand for rewards that never come.
    For gamma = 1, lam = .5, values .5: rewards [0, 0, 1] -> deltas [0, 0, .5], A [.125, .25, .5]
    """
    rewards = rewards.masked_fill(~mask, 0.0)
    values = values.masked_fill(~mask, 0.0)
    advantages = rewards + gamma * F.pad(values, (0, 1))[:, 1:] - values  # so far, delta_t
    for t in reversed(range(rewards.shape[1] - 1)):
        advantages[:, t] += gamma * lam * advantages[:, t + 1]
    return advantages, advantages + values


def masked_mean(x, mask):
    """Mean over all real tokens. Each has the same weight, in long and in short responses."""
    return x[mask].mean()


def masked_whiten(x, mask):
    """(B, T) shifted and scaled to mean 0 and variance 1 over real tokens; 0 on padding."""
    real = x[mask]
    variance = real.var(correction=min(1, len(real) - 1))  # Bessel's, but 0 for a single token
    return ((x - real.mean()) * torch.rsqrt(variance + 1e-8)).masked_fill(~mask, 0.0)


# %% 5. Loss
def policy_loss(logprobs, old_logprobs, advantages, mask, cliprange):
    """Clipped losses (B, T) (PPO, eq. 7), the ratio, and where the clipped loss was the larger.

    The gradient is 0 where the ratio has left the clip range in the direction that A favours. In
    the other direction it is not clipped, and moves the ratio back.
    """
    ratio = (logprobs - old_logprobs).masked_fill(~mask, 0.0).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    return torch.max(unclipped, clipped), ratio, clipped > unclipped


def value_loss(values, old_values, returns, mask, cliprange_value):
    """Clipped squared errors (B, T), halved, and where the clipped one was the larger.

    The gradient is 0 where a value has moved further than eps_v from V_old towards its return.
    """
    near_values = values.clamp(old_values - cliprange_value, old_values + cliprange_value)
    unclipped = (values - returns).masked_fill(~mask, 0.0) ** 2
    clipped = (near_values - returns).masked_fill(~mask, 0.0) ** 2
    return 0.5 * torch.max(unclipped, clipped), clipped > unclipped


# %% Models and data
args = Args() if "get_ipython" in globals() else tyro.cli(Args)  # a notebook has no command line
assert not Path(args.output_dir).exists(), f"output_dir: {args.output_dir} is there already"
device = "cuda" if torch.cuda.is_available() else "cpu"
# from_pretrained turns dropout off: sampling, reference and loss must use one distribution
policy = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device)
reference = deepcopy(policy)
reward_model = AutoModelForSequenceClassification.from_pretrained(
    args.reward_model, dtype=torch.float32
).to(device)
# The head of a classifier has no bias. It gets one here: the shift that a reward model stores to
# centre its rewards, or 0. The critic, a copy, learns the mean return with it
bias = getattr(reward_model.config, "reward_bias", 0.0)
reward_model.score.bias = torch.nn.Parameter(torch.tensor([bias], device=device))
critic = deepcopy(reward_model)  # a start that knows the rewards; rloo.py has no critic
tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")  # responses begin at P
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
assert reward_model.config.vocab_size == policy.config.vocab_size, "tokens differ (see ../ppo.py)"
optimizer = torch.optim.AdamW(
    [*policy.parameters(), *critic.parameters()], lr=args.learning_rate, weight_decay=0.0
)
files = args.dataset if args.dataset.endswith(".jsonl") else None  # or a folder, or a hub name
data = load_dataset("json" if files else args.dataset, data_files=files, split="train")
prompts = tokenizer(list(data["prompt"]))["input_ids"]


def make_seed(*numbers):
    """One seed from several numbers. The draws of a step do not depend on the steps before it."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def shuffled(n, seed, number):
    """The numbers below n, in an order that depends on the seed and the number of the pass."""
    generator = torch.Generator().manual_seed(make_seed(seed, number, 1))
    return torch.randperm(n, generator=generator).tolist()


passes = range(1 + args.total_episodes // len(prompts))
order = [i for number in passes for i in shuffled(len(prompts), args.seed, number)]

# %% The loop, with the steps of the docstring
wandb.init(project="rlhf", config=vars(args), mode=None if args.track else "disabled")
B = args.batch_size
num_updates = args.total_episodes // B
assert num_updates, "total_episodes: at least batch_size"
history = []  # of the metrics, one dict for each update
for update in (bar := trange(1, num_updates + 1)):
    torch.manual_seed(make_seed(args.seed, update))
    optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - (update - 1) / num_updates)

    # 1. Sample
    texts = [prompts[i] for i in order[(update - 1) * B : update * B]]
    batch = tokenizer.pad({"input_ids": texts}, return_tensors="pt").to(device)
    ids, attention_mask = batch["input_ids"], batch["attention_mask"]  # (B, P)
    P, stop = ids.shape[1], tokenizer.eos_token_id
    uniforms = torch.rand(B, args.response_length).to(device)  # drawn on the CPU, for any device
    responses, old_logprobs = sample(policy, ids, attention_mask, uniforms, args.temperature, stop)
    mask, ended = response_mask(responses, [stop])  # (B, T), (B,)
    ids = torch.cat([ids, responses], 1)  # (B, P+T)
    attention_mask = torch.cat([attention_mask, mask], 1)  # (B, P+T)

    # 2. Score
    with torch.no_grad():
        logits = forward(reference, ids, attention_mask).logits  # (B, P+T, V)
        ref_logprobs = response_logprobs(logits, ids, P, args.temperature)  # (B, T)
        old_values = read_head(critic, ids, attention_mask)[:, P - 1 : -1]  # (B, T)
        last = P + mask.sum(1, keepdim=True) - 1  # (B, 1) position of the last real token
        scores = read_head(reward_model, ids, attention_mask).gather(1, last).squeeze(1)  # (B,)
    scores = torch.where(ended, scores, scores - args.missing_eos_penalty)  # (B,)

    # 3. Reward
    kl = old_logprobs - ref_logprobs  # (B, T) of the sampled tokens; its expectation is the KL
    rewards = shape_rewards(scores, kl, mask, args.kl_coef)  # (B, T)

    # 4. Advantage
    advantages, returns = gae(rewards, old_values, mask, args.gamma, args.lam)  # (B, T) each
    advantages = masked_whiten(advantages, mask)  # so that the scale of the rewards does not matter

    # 5. Loss, and 6. update
    logs = []  # of all tokens, for each optimiser step
    for _ in range(args.num_ppo_epochs):
        for rows in torch.randperm(B).to(device).tensor_split(args.num_mini_batches):  # (b,)
            logits = forward(policy, ids[rows], attention_mask[rows]).logits  # (b, P+T, V)
            logprobs = response_logprobs(logits, ids[rows], P, args.temperature)  # (b, T)
            pg_loss, ratio, pg_clipped = policy_loss(
                logprobs, old_logprobs[rows], advantages[rows], mask[rows], args.cliprange
            )
            loss = masked_mean(pg_loss, mask[rows])
            values = read_head(critic, ids[rows], attention_mask[rows])[:, P - 1 : -1]  # (b, T)
            vf_loss, vf_clipped = value_loss(
                values, old_values[rows], returns[rows], mask[rows], args.cliprange_value
            )
            loss = loss + args.vf_coef * masked_mean(vf_loss, mask[rows])
            optimizer.zero_grad()
            loss.backward()
            for model in (policy, critic):  # apart, or one large gradient would shrink both
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            seen = {"loss/policy_avg": pg_loss, "policy/clipfrac_avg": pg_clipped}  # (b, T) each
            seen |= {"loss/value_avg": vf_loss, "val/clipfrac_avg": vf_clipped, "val/ratio": ratio}
            logs.append({name: x.detach()[mask[rows]].float() for name, x in seen.items()})

    stats = {name: torch.cat([log[name] for log in logs]).mean().item() for name in seen}
    stats["objective/scores"] = scores.mean().item()
    stats["objective/kl"] = (kl * mask).sum(1).mean().item()
    stats["val/eos_share"] = ended.float().mean().item()
    history.append(stats)
    wandb.log(stats, step=update)
    bar.set_postfix_str(f"score {stats['objective/scores']:.2f}, KL {stats['objective/kl']:.2f}")

# %% The trained policy
policy.save_pretrained(args.output_dir)
tokenizer.save_pretrained(args.output_dir)
for i in range(3):
    print(f"{scores[i]:.2f}  {tokenizer.decode(ids[i][attention_mask[i].bool()])}")
for name, first in history[0].items():
    print(f"{name:20s} {first:9.3g} -> {history[-1][name]:9.3g}")
