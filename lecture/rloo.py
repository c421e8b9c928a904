"""RLOO for language models, in short: ../rloo.py without what only large models and long runs need.

A policy pi (a language model) answers each prompt K times, and a reward model scores each answer.
Each update makes answers more likely that score higher than the others to the same prompt, and the
rest less likely. An update, on a batch of B responses:

  1. sample     response y_1..y_T ~ pi(. | prompt), up to and including the stop token
  2. score      ref_logprobs of the reference, a frozen copy of the first pi; one score for each
                response, reduced if it never stops
  3. reward     R_i = score_i - kl_coef * sum_t KL_t: one number for the whole response
  4. advantage  A_i = R_i - mean of R over the other K-1 responses to the same prompt
  5. loss       ratio_i = exp(sum_t log pi(y_t) - log pi_old(y_t)), with pi_old from step 1
                mean_i max(-A_i ratio_i, -A_i clip(ratio_i, 1-eps, 1+eps))
  6. update     `num_ppo_epochs` passes over the batch, one optimiser step for each mini-batch

The layout of the tensors, for K = 2, a prompt of 3 tokens (left-padded to P = 4) and responses of 4
and 6 tokens (T = 6). A dot is padding: it may hold any number, and is masked.

  input_ids     PAD  p1  p2  p3 | y1  y2  y3  EOS  .   .    row 0: prompt (B, P), response (B, T)
                PAD  p1  p2  p3 | z1  z2  z3  z4  z5  EOS   row 1: a group's rows are neighbours
  mask                          |  1   1   1   1   0   0    true up to and including the stop token
  logprobs, KL                  |  *   *   *   *   .   .    one per token, then summed over the row
  R, A, ratio                                               one per row: A_0 = R_0 - R_1 = -A_1

The baseline of PPO is the critic. Here it is the mean reward of the other responses to the prompt.
They do not depend on this response, so the gradient is unbiased. The response is one action.

  python lecture/rloo.py    # the toy world: a minute on a CPU, score 0 -> 4.4, KL 0 -> 17 nats
  python lecture/rloo.py --model gpt2 --learning-rate 1e-5 --reward-model MINE --dataset MINE.jsonl

Papers: RLOO 2402.14740, REINFORCE with a leave-one-out baseline (Kool et al. 2019), PPO 1707.06347.
"""

# %% Settings, with the names and defaults of ../rloo.py
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
    rloo_k: int = 2  # K, the number of responses to each prompt. More: a better baseline
    num_ppo_epochs: int = 4  # passes over each batch
    num_mini_batches: int = 1  # optimiser steps in one pass
    cliprange: float = 0.2  # eps: where a ratio has moved further, its loss is flat
    missing_eos_penalty: float = 1.0  # subtracted from the score of a response that never stops
    kl_coef: float = 0.05  # weight of KL in the reward. 0: the reward model is exploited
    response_length: int = 53  # maximum number of tokens in a response
    temperature: float = 0.7  # divides the logits, wherever they are used. Lower: less exploration
    learning_rate: float = 3.1e-4  # at the start; it falls linearly to 0. For GPT-2: 1e-5
    batch_size: int = 64  # B, the responses of an update, K to a prompt
    total_episodes: int = 2048  # responses in the whole run
    model: str = f"{TOY}/sft"  # the policy to start from: a folder, or a name on the hub
    reward_model: str = f"{TOY}/reward_model"  # a classifier with one label, for the same tokens
    dataset: str = f"{TOY}/data/prompts"  # folder, .jsonl, hub name; texts in a column `prompt`
    output_dir: str = f"runs/lecture_rloo__{time.strftime('%Y%m%d-%H%M%S')}"  # a new folder
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
    """(B, S) a number for each position, by the linear head of a reward model."""
    states = forward(model.base_model, input_ids, attention_mask).last_hidden_state  # (B, S, D)
    return model.score(states).squeeze(-1)


# %% 3. Reward, and 4. advantage
def leave_one_out(rewards, k):
    """(B,) each reward minus the mean of the other k-1 in its group (Ahmadian et al. 2024, sec. 3).

    A group is k neighbouring rows. With k = 3: [1, 2, 6, 0, 0, 0] -> [-3, -1.5, 4.5, 0, 0, 0]
    """
    groups = rewards.view(-1, k)  # (B/k, k)
    others = (groups.sum(1, keepdim=True) - groups) / (k - 1)
    return (groups - others).flatten()


# %% 5. Loss
def policy_loss(logprobs, old_logprobs, advantages, mask, cliprange):
    """Clipped losses (B, 1) (PPO, eq. 7), the ratio, and where the clipped loss was the larger.

    The gradient is 0 where the ratio has left the clip range in the direction that A favours. In
    the other direction it is not clipped, and moves the ratio back.
    """
    ratio = (logprobs - old_logprobs).masked_fill(~mask, 0.0).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    return torch.max(unclipped, clipped), ratio, clipped > unclipped


# %% Models and data
args = Args() if "get_ipython" in globals() else tyro.cli(Args)  # a notebook has no command line
assert not Path(args.output_dir).exists(), f"output_dir: {args.output_dir} is there already"
assert args.batch_size % args.rloo_k == 0 and args.rloo_k > 1, "batch_size: a multiple of rloo_k > 1"
device = "cuda" if torch.cuda.is_available() else "cpu"
# from_pretrained turns dropout off: sampling, reference and loss must use one distribution
policy = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).to(device)
reference = deepcopy(policy)
reward_model = AutoModelForSequenceClassification.from_pretrained(
    args.reward_model, dtype=torch.float32
).to(device)
bias = getattr(reward_model.config, "reward_bias", 0.0)  # the shift that it stores, or 0
reward_model.score.bias = torch.nn.Parameter(torch.tensor([bias], device=device))
tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")  # responses begin at P
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
assert reward_model.config.vocab_size == policy.config.vocab_size, "tokens differ (see ../rloo.py)"

optimizer = torch.optim.AdamW(policy.parameters(), lr=args.learning_rate, weight_decay=0.0)
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
B, K = args.batch_size, args.rloo_k
num_updates = args.total_episodes // B
assert num_updates, "total_episodes: at least batch_size"
history = []  # of the metrics, one dict for each update
for update in (bar := trange(1, num_updates + 1)):
    torch.manual_seed(make_seed(args.seed, update))
    optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - (update - 1) / num_updates)

    # 1. Sample
    drawn = order[(update - 1) * B // K : update * B // K]
    token_lists = [prompts[i] for i in drawn for _ in range(K)]
    batch = tokenizer.pad({"input_ids": token_lists}, return_tensors="pt").to(device)
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
        last = P + mask.sum(1, keepdim=True) - 1  # (B, 1) position of the last real token
        scores = read_head(reward_model, ids, attention_mask).gather(1, last).squeeze(1)  # (B,)
    scores = torch.where(ended, scores, scores - args.missing_eos_penalty)  # (B,)

    # 3. Reward
    kl = old_logprobs - ref_logprobs  # (B, T) of the sampled tokens; its expectation is the KL
    rewards = scores - args.kl_coef * (kl * mask).sum(1)  # (B,)

    # 4. Advantage
    advantages = leave_one_out(rewards, K)[:, None]  # (B, 1)
    old = (old_logprobs * mask).sum(1, keepdim=True)  # (B, 1) the response as one action
    real = torch.ones_like(old, dtype=torch.bool)  # (B, 1) no response is padding

    # 5. Loss, and 6. update
    logs = []  # of all responses, for each optimiser step
    for _ in range(args.num_ppo_epochs):
        for rows in torch.randperm(B).to(device).tensor_split(args.num_mini_batches):  # (b,)
            logits = forward(policy, ids[rows], attention_mask[rows]).logits  # (b, P+T, V)
            logprobs = response_logprobs(logits, ids[rows], P, args.temperature)  # (b, T)
            new = (logprobs * mask[rows]).sum(1, keepdim=True)  # (b, 1)
            pg_loss, ratio, clipped = policy_loss(
                new, old[rows], advantages[rows], real[rows], args.cliprange
            )
            loss = pg_loss.mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen = {"loss/policy_avg": pg_loss, "policy/clipfrac_avg": clipped, "val/ratio": ratio}
            logs.append({name: x.detach().float() for name, x in seen.items()})  # (b, 1) each

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
for i in range(0, B, K)[:3]:  # one response of each group
    print(f"{scores[i]:.2f}  {tokenizer.decode(ids[i][attention_mask[i].bool()])}")
for name, first in history[0].items():
    print(f"{name:20s} {first:9.3g} -> {history[-1][name]:9.3g}")
