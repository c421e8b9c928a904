"""GRPO for language models, in short: ../grpo.py without what only large models and long runs need.

A policy pi (a language model) answers each prompt G times, and a function scores each answer. Each
update makes answers more likely that score higher than the mean of the answers to the same prompt,
and the rest less likely. An update, on a batch of B responses:

  1. sample     response y_1..y_T ~ pi(. | prompt), up to and including the stop token
  2. score      one number for each response, here 1 if its answer is right, otherwise 0
  3. advantage  A_i = score_i - mean of the group's scores, divided by their standard deviation
  4. loss       ratio_t = pi(y_t) / pi_old(y_t), with pi_old from step 1
                loss_t = max(-A_i ratio_t, -A_i clip(ratio_t, 1-eps, 1+eps)) [+ beta ratio_t KL_t]
                KL_t = q/p - 1 - log(q/p), q = pi_ref(y_t), p = pi(y_t); pi_ref is a frozen first pi
                the loss is a weighted sum of all loss_t; `loss_type` sets the weights
  5. update     `num_ppo_epochs` passes over the batch, one optimiser step for each mini-batch

The layout of the tensors, for G = 2, a prompt of 3 tokens (left-padded to P = 4) and responses of 4
and 6 tokens (T = 6). A dot is padding: it may hold any number, and is masked.

  input_ids     PAD  p1  p2  p3 | y1  y2  y3  EOS  .   .    row 0: prompt (B, P), response (B, T)
                PAD  p1  p2  p3 | z1  z2  z3  z4  z5  EOS   row 1: a group's rows are neighbours
  mask                          |  1   1   1   1   0   0    true up to and including the stop token
  logprobs, ratio, loss         |  *   *   *   *   .   .    one per token
  score, A                                                  one per row, the same for all its tokens

In RLOO a response is one action, and KL is part of its reward. Here each token is an action with
its own clipped ratio, and KL is a term of the loss (if beta > 0). Equal scores give no gradient.

  python lecture/grpo.py    # the shell game: half a minute on a CPU, right answers .4 -> 1.0
  python lecture/grpo.py --model Qwen/Qwen3-0.6B --learning-rate 3e-6 --dataset MINE.jsonl \\
      --reward-fn mine.py:reward --response-length 1024

Papers (arXiv): GRPO 2402.03300 (eq. 3, 19), Dr. GRPO 2503.20783, DAPO 2503.14476, MaxRL 2602.02710.
"""

# %% Settings, with the names and defaults of ../grpo.py
import runpy
import time
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
import tyro
import wandb
from datasets import load_dataset
from tqdm import trange
from transformers import AutoModelForCausalLM, AutoTokenizer

HERE = Path(globals().get("__file__", "this.py")).resolve().parent  # in a notebook: where it runs
TOY = (HERE if Path(HERE, "toy").exists() else HERE.parent) / "toy"


@dataclass
class Args:
    num_generations: int = 8  # G, the number of responses to each prompt. More: a better baseline
    loss_type: Literal["dapo", "grpo", "dr_grpo"] = "dapo"  # weights: see token_weights
    # divide advantages by a deviation, by the group's mean (MaxRL), or by nothing (Dr. GRPO)
    scale_rewards: Literal["group", "batch", "mean", "none"] = "group"
    epsilon: float = 0.2  # eps: where a ratio has moved further, its loss is flat
    num_ppo_epochs: int = 1  # passes over each batch
    num_mini_batches: int = 1  # optimiser steps in one pass
    beta: float = 0.0  # weight of KL in the loss. 0: no reference is loaded
    response_length: int = 16  # maximum number of tokens in a response
    temperature: float = 1.0  # divides the logits, wherever they are used. Lower: less exploration
    learning_rate: float = 7e-4  # at the start; it falls linearly to 0. For GPT-2: 1e-5
    batch_size: int = 64  # B, the responses of an update, G to a prompt
    total_episodes: int = 12800  # responses in the whole run
    model: str = f"{TOY}/shells/sft"  # the policy to start from: a folder, or a name on the hub
    reward_fn: str = f"{TOY.parent}/rewards/verifiers.py:right_number"  # FILE:FUNCTION
    dataset: str = f"{TOY}/shells/data/prompts"  # folder, .jsonl, hub name; has a column `prompt`
    output_dir: str = f"runs/lecture_grpo__{time.strftime('%Y%m%d-%H%M%S')}"  # a new folder
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


# %% 3. Advantage
def group_advantages(scores, G, scale):
    """(B,) each score minus the group's mean, divided by a deviation or by that mean.

    With G = 4 and scale none: [1, 0, 0, 0] -> [.75, -.25, -.25, -.25]. Divided by the group's
    deviation, .5: [1.5, -.5, -.5, -.5]. Rare successes and rare failures get a higher weight.
    Divided by the group's mean, .25: [3, -1, -1, -1]. Only rare successes get a higher weight, as
    in the gradient of log P(right answer).
    """
    groups = scores.view(-1, G)  # (B/G, G): the rows of a group are neighbours
    groups = groups - groups[:, :1]  # so that equal scores give exactly 0, in spite of rounding
    advantages = groups - groups.mean(1, keepdim=True)
    if scale == "group":
        advantages = advantages / (groups.std(1, keepdim=True) + 1e-4)  # 1e-4: never 0 (TRL)
    if scale == "batch":
        advantages = advantages / (scores.std() + 1e-4)
    if scale == "mean":
        advantages = advantages / (scores.view(-1, G).mean(1, keepdim=True) + 1e-4)
    return advantages.flatten()


# %% 4. Loss
def policy_loss(logprobs, old_logprobs, advantages, mask, cliprange):
    """Clipped losses (B, T) (PPO, eq. 7), the ratio, and where the clipped loss was the larger.

    The gradient is 0 where the ratio has left the clip range in the direction that A favours. In
    the other direction it is not clipped, and moves the ratio back.
    """
    ratio = (logprobs - old_logprobs).masked_fill(~mask, 0.0).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    return torch.max(unclipped, clipped), ratio, clipped > unclipped


def kl_estimate(logprobs, ref_logprobs, estimator):
    """(B, T) estimate of KL(policy || reference) from the sampled token alone (Schulman 2020)."""
    k1 = logprobs - ref_logprobs
    return {"k1": k1, "k2": 0.5 * k1**2, "k3": torch.expm1(-k1) + k1}[estimator]


def token_weights(mask, num_rows, num_tokens, loss_type, max_length):
    """(b, T) weights of the tokens' losses. The loss of a mini-batch is the weighted sum.

    grpo: all responses have the same weight, so a token of a long response has a lower one. In the
    others, all tokens have the same weight: a constant (dr_grpo), or 1 / tokens of an average
    mini-batch (dapo).
    """
    lengths = mask.sum(1, keepdim=True).clamp(min=1)  # (b, 1)
    if loss_type == "grpo":
        return mask / (num_rows * lengths)
    if loss_type == "dr_grpo":
        return mask / (num_rows * max_length)
    return mask / num_tokens


# %% Models and data
args = Args() if "get_ipython" in globals() else tyro.cli(Args)  # a notebook has no command line
assert not Path(args.output_dir).exists(), f"output_dir: {args.output_dir} is there already"
assert args.num_generations > 1 and args.batch_size % args.num_generations == 0, "groups: 2 or more"
device = "cuda" if torch.cuda.is_available() else "cpu"
# from_pretrained turns dropout off: sampling, reference and loss must use one distribution
policy = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device)
reference = deepcopy(policy) if args.beta else None
tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")  # responses begin at P
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
file, _, function = args.reward_fn.rpartition(":")
reward = runpy.run_path(file)[function]  # f(prompts, completions, and the columns of the dataset)
optimizer = torch.optim.AdamW(policy.parameters(), lr=args.learning_rate, weight_decay=0.0)
files = args.dataset if args.dataset.endswith(".jsonl") else None  # or a folder, or a hub name
data = load_dataset("json" if files else args.dataset, data_files=files, split="train")
examples = data.to_list()
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
B, G = args.batch_size, args.num_generations
num_updates = args.total_episodes // B
assert num_updates, "total_episodes: at least batch_size"
history = []  # of the metrics, one dict for each update
for update in (bar := trange(1, num_updates + 1)):
    torch.manual_seed(make_seed(args.seed, update))
    optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - (update - 1) / num_updates)

    # 1. Sample
    drawn = [i for i in order[(update - 1) * B // G : update * B // G] for _ in range(G)]  # (B,)
    token_lists = [prompts[i] for i in drawn]
    batch = tokenizer.pad({"input_ids": token_lists}, return_tensors="pt").to(device)
    ids, attention_mask = batch["input_ids"], batch["attention_mask"]  # (B, P)
    P, stop = ids.shape[1], tokenizer.eos_token_id
    uniforms = torch.rand(B, args.response_length).to(device)  # drawn on the CPU, for any device
    responses, old_logprobs = sample(policy, ids, attention_mask, uniforms, args.temperature, stop)
    mask, ended = response_mask(responses, [stop])  # (B, T), (B,)
    ids = torch.cat([ids, responses], 1)  # (B, P+T)
    attention_mask = torch.cat([attention_mask, mask], 1)  # (B, P+T)

    # 2. Score
    starts = tokenizer.batch_decode(token_lists, skip_special_tokens=True)
    token_lists = [row[real.bool()] for row, real in zip(ids, attention_mask)]
    texts = tokenizer.batch_decode(token_lists, skip_special_tokens=True)  # prompts and responses
    texts = [text.removeprefix(start) for start, text in zip(starts, texts)]  # with a first space
    columns = {name: [examples[i][name] for i in drawn] for name in examples[0]}
    rewards = reward(prompts=columns["prompt"], completions=texts, **columns)
    scores = torch.tensor([float(x) for x in rewards], device=device)  # (B,)
    if args.beta:
        with torch.no_grad():
            logits = forward(reference, ids, attention_mask).logits  # (B, P+T, V)
            ref_logprobs = response_logprobs(logits, ids, P, args.temperature)  # (B, T)

    # 3. Advantage
    advantages = group_advantages(scores, G, args.scale_rewards)[:, None]  # (B, 1)

    # 4. Loss, and 5. update
    num_tokens = mask.sum() / args.num_mini_batches  # in a mini-batch, on average
    logs = []  # means over tokens, for each optimiser step
    for _ in range(args.num_ppo_epochs):
        for rows in torch.randperm(B).to(device).tensor_split(args.num_mini_batches):  # (b,)
            logits = forward(policy, ids[rows], attention_mask[rows]).logits  # (b, P+T, V)
            logprobs = response_logprobs(logits, ids[rows], P, args.temperature)  # (b, T)
            losses, ratio, clipped = policy_loss(
                logprobs, old_logprobs[rows], advantages[rows], mask[rows], args.epsilon
            )
            kl = torch.zeros_like(losses)  # (b, T)
            if args.beta:  # times the ratio, so that its gradient is that of the KL
                kl = kl_estimate(logprobs, ref_logprobs[rows], "k3") * ratio
            weights = token_weights(  # (b, T)
                mask[rows], len(rows), num_tokens, args.loss_type, args.response_length
            )
            loss = ((losses + args.beta * kl) * weights).sum()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            seen = {"clip_ratio/region_mean": clipped, "val/ratio": ratio, "kl": kl}  # (b, T) each
            logs.append({name: x.detach()[mask[rows]].float().mean() for name, x in seen.items()})

    stats = {name: torch.stack([log[name] for log in logs]).mean().item() for name in seen}
    stats["reward"] = scores.mean().item()
    is_equal = scores.view(-1, G) == scores[::G, None]  # (B/G, G)
    stats["frac_reward_zero_std"] = is_equal.all(1).float().mean().item()
    stats["completions/mean_length"] = mask.sum(1).float().mean().item()
    history.append(stats)
    wandb.log(stats, step=update)
    bar.set_postfix_str(f"reward {stats['reward']:.2f}")

# %% The trained policy
policy.save_pretrained(args.output_dir)
tokenizer.save_pretrained(args.output_dir)
for i in range(0, B, G)[:3]:  # one response of each group
    print(f"{scores[i]:.2f}  {tokenizer.decode(ids[i][attention_mask[i].bool()])}")
for name, first in history[0].items():
    print(f"{name:23s} {first:9.3g} -> {history[-1][name]:9.3g}")
