# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0", "transformers==5.23.0", "datasets==5.2.0", "tyro==1.0.17", "wandb==0.31.0",
#     "matplotlib==3.11.2", "pydantic==2.14.3", "tqdm==4.70.1",
# ]
# ///
"""PPO for language models: policy + reward -> better policy.

For each batch of prompts:
  1. sample     response y_1..y_T ~ pi(. | prompt), at the given temperature, up to and including the stop token
  2. score      ref_logprobs of a frozen copy of the first pi, the reference; values V_old,t of the critic; one score
                for each response, minus `missing_eos_penalty` if it has no stop token
  3. reward     r_t = -kl_coef * KL_t; the score is added to r at the last real token
  4. advantage  delta_t = r_t + gamma V_old,t+1 - V_old,t;  A_t = delta_t + gamma lam A_{t+1};  R_t = A_t + V_old,t
                whiten A
  5. loss       ratio_t = pi(y_t) / pi_old(y_t);  policy: mean_t max(-A_t ratio_t, -A_t clip(ratio_t, 1-eps, 1+eps))
                plus vf_coef * mean_t 1/2 max((V_t - R_t)^2, (clip(V_t, V_old,t -+ eps_v) - R_t)^2)
  6. update     `num_ppo_epochs` passes over the batch, each with `num_mini_batches` optimiser steps
  7. adapt      with --kl-target: kl_coef, to keep the KL near the target

Shapes: B rows in a batch (b in a micro-batch), P prompt tokens, T response tokens, S tokens of any text, V vocabulary,
D hidden size. Below, a prompt of 3 tokens, left-padded to P = 4, and a response that stops after 4 tokens, where the
longest has T = 6. A dot is padding: it may hold any number, and is masked.

  input_ids     PAD  p1  p2  p3 | y1  y2  y3  EOS  .   .      prompts (B, P), then responses (B, T)
  mask                          |  1   1   1   1   0   0      true up to and including the stop token
  logprobs, KL                  |  *   *   *   *   .   .      of y_t, read from the logits one position to the left
  values                        |  *   *   *   *   .   .      of the text before y_t, also one position to the left
  score                         |              *              one for each response, on its last real token

Differences from textbook PPO: an episode is one response, and the state is the text so far. Every token has an
advantage, although there is only one score. Means over tokens exclude padding. Tokens are sampled from softmax(logits /
temperature) without top-k or top-p, because the loss uses that distribution. The KL is part of the reward, so the
advantage of a token includes the KL of all later ones.

Papers: PPO 1707.06347 (eq. 7, 11-12); GAE 1506.02438 (eq. 16); KL in the reward 1909.08593 (sec. 2.2); InstructGPT
2203.02155 (sec. 3.5); the N+ implementation details 2403.17031. In short: lecture/ppo.py, 320 lines.

  python ppo.py                       # the toy world: offline, half a minute on two CPU cores, score from 0 to about 5
  python ppo.py --model gpt2 --bf16   # GPT-2 on a GPU, with the same prompts and reward (on a CPU, without --bf16)
"""

import ctypes
import importlib
import json
import math
import os
import shutil
import signal
import sys
import time
from collections import Counter
from copy import copy, deepcopy
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pydantic
import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from jinja2 import TemplateError
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as recompute_activations
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers import StaticCache, get_scheduler, logging, set_seed
from transformers.activations import ACT2FN, GELUTanh
from transformers.modeling_layers import GradientCheckpointingLayer

TOY = Path(__file__).resolve().parent / "toy"  # the embedded models and data

# Processes of torchrun. All read the same data and draw the same random numbers; each computes its share of a batch
RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))

# --- Settings. A type limits the values; the comment beside a setting is its help text
Positive = pydantic.PositiveFloat
NonNegative = pydantic.NonNegativeFloat
Share = Annotated[float, Field(ge=0, le=1)]
Count = pydantic.PositiveInt
Natural = pydantic.NonNegativeInt


def alias(*flags):
    """Other names of a flag, as TRL spells them."""
    return tyro.conf.arg(aliases=flags)


@pydantic.dataclasses.dataclass(config={"allow_inf_nan": False})  # checks the values
class Args:
    # --- PPO ---
    num_ppo_epochs: Annotated[Count, alias("--ppo-epochs")] = 4  # passes over each batch (TRL: 4). Many: clipped ratios
    num_mini_batches: Count = 1  # optimiser steps in one pass over the batch (TRL 0.16)
    cliprange: Positive = 0.2  # eps of the clipped ratio (PPO, eq. 7)
    cliprange_value: Positive = 0.2  # eps_v of the clipped value (TRL, N+ details)
    vf_coef: NonNegative = 0.1  # weight of the value loss (TRL); hardly matters, since AdamW rescales gradients
    gamma: Share = 1.0  # discount; 1 because an episode is short
    lam: Share = 0.95  # GAE's lambda: 0 relies on the critic, 1 on the sampled return
    whiten_rewards: bool = False  # scale per-token rewards to variance 1, keeping their mean (TRL)
    # --- KL to the reference ---
    kl_coef: Annotated[NonNegative, alias("--init-kl-coef")] = 0.05  # weight of the KL in the reward (TRL 0.16)
    kl_estimator: Annotated[Literal["k1", "abs", "k2", "k3"], alias("--kl-penalty")] = "k1"  # see kl_estimate
    kl_target: Annotated[Positive | None, alias("--target")] = None  # adapt kl_coef to this KL, in nats per response
    kl_horizon: Annotated[Count, alias("--horizon")] = 10_000  # episodes in which kl_coef changes by up to about 20 %
    # --- Rollout ---
    response_length: Count = 53  # maximum tokens in a response (TRL 0.16)
    temperature: Positive = 0.7  # divides the logits in rollout, reference and loss (TRL 0.16). Lower: less exploration
    stop_token: tuple[str, ...] = ("eos",)  # end of a response: eos (all of the model's), or tokens as texts
    missing_eos_penalty: NonNegative = 1.0  # subtracted from the score of a response without stop token (TRL)
    local_rollout_forward_batch_size: Count | None = None  # responses sampled at once; by default 4 x micro_batch_size
    # --- Optimisation ---
    learning_rate: Positive | None = None  # by default from the policy's size, and ten times as high with LoRA
    critic_learning_rate: Positive | None = None  # by default that of the policy without LoRA
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup", "polynomial"] = "linear"  # TRL's
    warmup_ratio: Share = 0.0  # share of the run in which the learning rate warms up from 0
    weight_decay: NonNegative = 0.0  # weight decay of AdamW
    adam_betas: tuple[Share, Share] = (0.9, 0.999)  # betas of AdamW (OpenRLHF: 0.9 0.95)
    adam_epsilon: Positive = 1e-8  # epsilon of AdamW (torch and TRL; N+ details: 1e-5)
    max_grad_norm: Positive = 1.0  # the gradients of policy and critic are each clipped to this norm
    # --- Batch sizes ---
    batch_size: Count = 64  # responses per update, on all GPUs together
    micro_batch_size: Count | None = None  # responses per pass; by default 16 on a CPU, 8192 tokens on a GPU
    per_device_train_batch_size: Count | None = None  # TRL: x accumulation x num_mini_batches x GPUs = batch_size
    gradient_accumulation_steps: Count = 1  # with per_device_train_batch_size: passes per optimiser step (TRL)
    # --- Models: a folder, or a name on the hub ---
    model: Annotated[str, alias("--model-name-or-path", "--sft-model-path")] = f"{TOY}/sft"  # policy to start from
    reward_model: Annotated[str, alias("--reward-model-path")] = f"{TOY}/reward_model"  # a classifier with one label
    reward_fn: Annotated[tuple[str, ...], alias("--reward-funcs")] = ("reward_model",)  # or file.py:name; they add up
    reward_weights: tuple[float, ...] = ()  # of these rewards; by default all 1 (TRL); 0: only logged
    lora_r: Natural = 0  # rank of LoRA adapters (peft), 0 for none
    bf16: bool = False  # run the models in bfloat16 (autocast); trained weights and optimiser state stay in float32
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: far less memory, a third slower
    # --- Data. A row has `prompt`, a text or messages that end with the user's; reward functions get all columns ---
    dataset: Annotated[str, alias("--dataset-name")] = f"{TOY}/data/prompts"  # folder of SPLIT.jsonl, or hub name
    dataset_config: Annotated[str | None, alias("--dataset-config-name")] = None  # of a hub dataset that has several
    dataset_train_split: str = "train"  # split to train on
    max_prompt_length: Count = 512  # prompts with more tokens are dropped; their number is printed (N+ details: 512)
    # --- Run ---
    seed: Natural = 1  # seed of responses, order of prompts, mini-batches, and adapters
    total_episodes: Count = 2048  # number of responses sampled in the run
    output_dir: str | None = None  # folder for all output; by default a new folder runs/SCRIPT__SEED__TIME
    resume: Annotated[str | None, alias("--resume-from-checkpoint")] = None  # folder of a run to continue
    device: str = "cuda" if torch.cuda.is_available() else "cpu"  # cpu, cuda, mps; by default cuda if there is one
    save_steps: Count = 10  # updates between checkpoints, which hold the full state of the run
    save_total_limit: Count | None = None  # checkpoints to keep, also after the run; by default one, and none after it
    num_sample_generations: Natural = 10  # how often to print four episodes, besides after update 1 (TRL)
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works without an account)


# --- The loop, with the steps of the docstring ------------------------------------------------------------------------
def train(args):
    """Trains the policy. Saves it in the run's folder, with metrics, curves and a model card."""
    start(args)
    policy, reference, critic, reward_model = load_models(args)
    reward_fns = load_reward_fns(args, reward_model)
    prompts = load_prompts(args, policy.tokenizer)
    args = choose_sizes(args, policy, prompts)  # from here on, all sizes are set
    B = args.batch_size
    num_updates = args.total_episodes // B
    passes = range(1 + args.total_episodes // len(prompts))
    order = [i for number in passes for i in shuffled(len(prompts), args.seed, number)]

    critic_rate = args.critic_learning_rate or args.learning_rate / (10 if args.lora_r else 1)  # see choose_sizes
    policy_group = {"params": list(policy.parameters()), "lr": args.learning_rate}
    critic_group = {"params": list(critic.parameters()), "lr": critic_rate}
    options = {"betas": args.adam_betas, "eps": args.adam_epsilon, "weight_decay": args.weight_decay, "fused": True}
    optimizer = torch.optim.AdamW([policy_group, critic_group], **options)  # fused: ten times as fast on a CPU
    schedule = get_scheduler(args.lr_scheduler_type, optimizer, int(args.warmup_ratio * num_updates), num_updates)
    carry = {"kl_coef": args.kl_coef}  # what an update hands to the next; in checkpoints
    run = Run(args, num_updates, optimizer, schedule, carry, model=policy, critic=critic)
    for step in run.steps():
        set_seed(make_seed(args.seed, step))

        # 1. Sample
        numbers = order[(step - 1) * B : step * B]
        rows = [prompts[i] for i in numbers]
        rollout = sample_batch(policy, rows, args)

        # 2. Score
        read_logprobs(policy, reference, rollout, args)
        old_values = rollout.in_micro_batches(lambda r: critic_values(critic, r), args)  # (B, T)
        score_responses(rollout, reward_fns, policy.tokenizer, args)

        # 3. Reward
        mask = rollout.mask
        kl_coef = carry["kl_coef"]
        rewards = shape_rewards(rollout.scores, rollout.kl, mask, kl_coef)  # (B, T)
        if args.whiten_rewards:
            rewards = masked_whiten(rewards, mask) + rewards[mask].mean() * mask  # with the old mean

        # 4. Advantage
        advantages, returns = gae(rewards, old_values, mask, args.gamma, args.lam)  # (B, T) each
        advantages = masked_whiten(advantages, mask)
        rollout.rewards = rewards
        rollout.values = old_values
        rollout.advantages = advantages
        rollout.returns = returns

        # 5. Loss, and 6. update
        stats = update(policy, critic, optimizer, rollout, args)
        stats |= rollout_stats(rollout, kl_coef)
        is_one = step > 1 or stats["policy/first_ratio_error"] < 0.1  # bfloat16 has 8 bits
        require(is_one, "the first ratio is not 1: does the model ignore the attention mask, or have dropout?")

        # 7. Adapt (Ziegler et al. 2019, sec. 2.2)
        if args.kl_target:
            error = max(-0.2, min(0.2, stats["objective/kl"] / args.kl_target - 1))
            carry["kl_coef"] *= 1 + error * B / args.kl_horizon

        stats |= {"lr": optimizer.param_groups[0]["lr"], "episode": step * B}
        stats["eps"] = B / (time.perf_counter() - run.step_started)  # episodes per second
        run.log(stats, "objective/scores", "objective/kl")
        if args.num_sample_generations and (step == 1 or run.is_due(num_updates // args.num_sample_generations)):
            show_samples(run, rollout, policy.tokenizer)
        schedule.step()
    run.finish()


# --- 1. Sample --------------------------------------------------------------------------------------------------------
@dataclass
class Rollout:
    """A batch of episodes: B prompts, one response to each. Later steps add scores (B,), ref_logprobs, kl, values,
    rewards, advantages and returns (B, T), and reward_table: the rewards (B,) of each function, NaN for None."""

    prompts: Tensor  # (B, P), left-padded
    prompt_mask: Tensor  # (B, P), true on real tokens
    responses: Tensor  # (B, T), right-padded
    mask: Tensor  # (B, T), true up to and including the stop token
    ended: Tensor  # (B,), true if the response has a stop token
    old_logprobs: Tensor  # (B, T), under the policy that sampled the responses
    rows: list[dict]  # the B rows of the dataset

    def joined(self):
        """Ids and attention mask (B, P+T) of prompts and responses, as a model reads them."""
        ids = torch.cat([self.prompts, self.responses], 1)
        mask = torch.cat([self.prompt_mask, self.mask], 1)
        return ids, mask.long()

    def select(self, index):
        """Selects episodes by row number, without columns that are padding in all of them."""
        P = self.prompt_mask[index].sum(1).max().item()
        T = self.mask[index].sum(1).max().item()
        part = copy(self)
        part.rows = [self.rows[i] for i in index.tolist()]
        for name, x in vars(self).items():
            if not isinstance(x, Tensor):
                continue
            x = x[index]
            if name in ("prompts", "prompt_mask"):
                x = x[:, -P:]
            elif x.dim() == 2:
                x = x[:, :T]
            setattr(part, name, x)
        return part

    def micro_batches(self, index, args):
        """Splits row numbers into this process's micro-batches, each of similar lengths, to save padding."""
        lengths = self.prompt_mask.sum(1) + self.mask.sum(1)
        index = index[lengths[index].argsort(stable=True)]
        num_rounds = math.ceil(len(index) / (WORLD_SIZE * args.micro_batch_size))  # equal in all processes
        return index.tensor_split(num_rounds * WORLD_SIZE)[RANK::WORLD_SIZE]

    @torch.no_grad()
    def in_micro_batches(self, function, args):
        """Applies a function without gradient to micro-batches of b episodes. Joins its results (b, T) to (B, T)."""
        joined = torch.zeros(self.mask.shape, device=args.device)
        for index in self.micro_batches(torch.arange(len(joined), device=args.device), args):
            with autocast(args):
                x = function(self.select(index))
            joined[index, : x.shape[1]] = x
        return all_reduce(joined)  # a sum: each process has zeros in the rows of the others


def response_mask(responses, stop_token_ids):
    """(B, T) true up to and including the first stop token, and (B,) whether there is one. The pad token plays no role,
    so it may be equal to the stop token. With stop token 0:
        responses [[5, 0, 7, 0], [5, 6, 7, 8]]  ->  mask [[1, 1, 0, 0], [1, 1, 1, 1]], ended [1, 0]
    """
    is_stop = torch.isin(responses, responses.new_tensor(stop_token_ids)).long()
    stops_before = is_stop.cumsum(1) - is_stop
    return stops_before == 0, is_stop.any(1)


def forward(model, input_ids, attention_mask, **options):
    """Output for texts (B, S), or for their newest tokens. Positions count real tokens alone."""
    options["position_ids"] = (attention_mask.cumsum(1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
    return model(input_ids=input_ids, attention_mask=attention_mask, **options)


def sample_categorical(logits, uniforms):
    """One token per row of logits (B, V), and its log-probability, from uniform numbers (B,): the first token whose
    cumulative probability exceeds the number. With probabilities .2 .5 .3, the number .6 gives the second one. The
    caller draws the numbers, so a response does not depend on the other rows or the batch size.
    """
    logprobs = logits.log_softmax(1)
    cdf = logprobs.exp().cumsum(1)
    threshold = uniforms[:, None] * cdf[:, -1:]  # (B, 1), scaled because the sum of the probabilities is not exactly 1
    tokens = torch.searchsorted(cdf, threshold, right=True).clamp(max=logits.shape[1] - 1)  # (B, 1)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)


@torch.no_grad()
def sample(policy, prompts, prompt_mask, uniforms, temperature):
    """Samples one response to each prompt (B, P) from softmax(logits / temperature); ignores the generation config.

    `uniforms` (B, T) are the random numbers. Returns responses (B, T), mask (B, T), ended (B,), and the logprobs (B, T)
    of the sampled tokens, 0 on padding.
    """
    B, T = uniforms.shape
    responses = prompts.new_zeros(B, T)
    logprobs = torch.zeros_like(uniforms)  # (B, T)
    stops = prompts.new_tensor(policy.stop_token_ids)
    cache = OneTypeCache(config=policy.config, max_cache_len=prompts.shape[1] + T)
    look_every = 1 if prompts.device.type == "cpu" else 8  # steps between checks; each check waits for the GPU
    rows = torch.arange(B, device=prompts.device)  # the rows in the cache; rows that have ended leave it
    has_ended = torch.zeros_like(rows, dtype=torch.bool)
    tokens = prompts  # (rows, P), then (rows, 1): the cache keeps the others
    attention_mask = prompt_mask.long()  # (rows, P), after each pass one wider
    for t in range(T):
        output = forward(policy, tokens, attention_mask, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits = output.logits[:, -1].float() / temperature  # (rows, V)
        token, logprobs[rows, t] = sample_categorical(logits, uniforms[rows, t])
        responses[rows, t] = token
        tokens = token[:, None]
        attention_mask = F.pad(attention_mask, (0, 1), value=1)
        has_ended |= torch.isin(token, stops)
        if (t + 1) % look_every:
            continue
        unfinished = (~has_ended).nonzero().squeeze(1)
        if not len(unfinished):
            break
        if len(unfinished) < 0.75 * len(rows):  # copying the cache costs less than computing ended rows
            cache.reorder_cache(unfinished)
            rows = rows[unfinished]
            has_ended = has_ended[unfinished]
            tokens = tokens[unfinished]
            attention_mask = attention_mask[unfinished]
    mask, ended = response_mask(responses, policy.stop_token_ids)  # false on tokens sampled after the stop token
    responses = responses.masked_fill(~mask, policy.tokenizer.pad_token_id)
    logprobs = logprobs.masked_fill(~mask, 0.0)
    return responses, mask, ended, logprobs


def sample_batch(policy, rows, args):
    """Step 1: samples a response to the prompt of each row."""
    ids = [row["input_ids"] for row in rows]
    prompts, prompt_mask = pad(ids, policy.tokenizer, args, "left")  # (B, P)
    uniforms = torch.rand(len(rows), args.response_length).to(prompts.device)  # drawn on the CPU, for any device
    share = torch.arange(len(rows)).tensor_split(WORLD_SIZE)[RANK]  # row numbers of this process
    parts = []
    with autocast(args):
        for index in share.split(args.local_rollout_forward_batch_size or 4 * args.micro_batch_size):
            part = sample(policy, prompts[index], prompt_mask[index], uniforms[index], args.temperature)
            parts.append(part)
    columns = [all_gather(torch.cat(x)) for x in zip(*parts)]  # responses, mask, ended, logprobs
    rollout = Rollout(prompts, prompt_mask, *columns, rows)
    return rollout.select(torch.arange(len(rows), device=prompts.device))  # all rows, without padding columns


# --- 2. Score ---------------------------------------------------------------------------------------------------------
def response_forward(model, r, args):
    """(b, T, V) logits / temperature of the response tokens, in float32. Position P-1+t of the input predicts response
    token t, both counted from 0."""
    P, T = r.prompts.shape[1], r.responses.shape[1]
    positions = torch.arange(P - 1, P + T - 1, device=r.mask.device)
    logits = forward(model, *r.joined(), use_cache=False, logits_to_keep=positions).logits
    return logits.float().div_(args.temperature)  # in place, since it is the largest tensor


def token_logprobs(logits, tokens):
    """(B, T) log-probability of each token under logits (B, T, V)."""
    return logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


def logprobs_under(model, r, args):
    """(b, T) log-probabilities of the response tokens under a model."""
    return token_logprobs(response_forward(model, r, args), r.responses)


def read_logprobs(policy, reference, rollout, args):
    """Adds the reference's log-probabilities and the KL (B, T) to the rollout."""
    if args.bf16 or args.device != "cpu":  # the sampler reads token by token: with bf16 or TF32 its rounding matters
        rollout.old_logprobs = rollout.in_micro_batches(lambda r: logprobs_under(policy, r, args), args)
    rollout.ref_logprobs = rollout.in_micro_batches(lambda r: logprobs_under(reference, r, args), args)
    rollout.kl = kl_estimate(rollout.old_logprobs, rollout.ref_logprobs, args.kl_estimator)


def kl_estimate(logprobs, ref_logprobs, estimator):
    """(B, T) estimate of KL(policy || reference) from the sampled token alone (Schulman 2020, "Approximating KL").
    k1 is unbiased and often negative; k2 is biased and has little variance; k3 is unbiased and never negative."""
    d = logprobs - ref_logprobs
    if estimator == "k1":
        return d
    if estimator == "abs":
        return d.abs()
    if estimator == "k2":
        return 0.5 * d**2
    return torch.expm1(-d) + d  # k3


def read_head(model, input_ids, attention_mask):
    """(B, S) a number for each position, by the linear head of a critic or reward model."""
    states = forward(model.base_model, input_ids, attention_mask).last_hidden_state  # (B, S, D)
    with torch.autocast(states.device.type, enabled=False):  # bfloat16 is too coarse for a value or a reward
        return model.score(states.float()).squeeze(-1)


def critic_values(critic, r):
    """(b, T) values, each read one position before its token."""
    T = r.mask.shape[1]
    values = read_head(critic, *r.joined())  # (b, P+T)
    return values[:, -T - 1 : -1]


# --- 3. Reward --------------------------------------------------------------------------------------------------------
def masked_sum(x, mask):
    """Sums over real tokens. Values on padding are ignored, even NaN."""
    return x.masked_fill(~mask, 0.0).sum()


def masked_whiten(x, mask):
    """Shifts and scales x (B, T) to mean 0 and variance 1 over real tokens (TRL). Padding becomes 0."""
    real = x[mask]
    variance = real.var(correction=min(1, len(real) - 1))  # with Bessel's correction; 0 for a single token
    return ((x - real.mean()) * torch.rsqrt(variance + 1e-8)).masked_fill(~mask, 0.0)


def shape_rewards(scores, kl, mask, kl_coef):
    """(B, T) rewards: -kl_coef * KL for each token, plus the score (B,) on the last real token (as in OpenAI's code;
    TRL 0.16: one position later); 0 on padding."""
    is_last = mask & ~F.pad(mask, (0, 1))[:, 1:]  # (B, T) true where the next position is padding or the end
    return (scores[:, None] * is_last - kl_coef * kl).masked_fill(~mask, 0.0)


# --- 4. Advantage -----------------------------------------------------------------------------------------------------
def gae(rewards, values, mask, gamma, lam):
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16): advantages and returns (B, T), 0 on padding.

    The episode ends with the last real token, so the value after it is 0. For gamma = 1, lam = .5, values of .5:
        rewards [0, 0, 1]  ->  deltas [0, 0, .5], advantages [.125, .25, .5], returns [.625, .75, 1]
    """
    rewards = rewards.masked_fill(~mask, 0.0)
    values = values.masked_fill(~mask, 0.0)
    advantages = rewards + gamma * F.pad(values, (0, 1))[:, 1:] - values  # so far, delta_t
    for t in reversed(range(rewards.shape[1] - 1)):
        advantages[:, t] += gamma * lam * advantages[:, t + 1]
    return advantages, advantages + values


# --- 5. Loss ----------------------------------------------------------------------------------------------------------
def policy_loss(logprobs, old_logprobs, advantages, mask, cliprange):
    """Clipped losses (B, T) (PPO, eq. 7), the ratio, and where the clipped loss was the larger. There the gradient is
    0: the ratio has left the clip range in the direction that the advantage favours."""
    ratio = (logprobs - old_logprobs).masked_fill(~mask, 0.0).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    return torch.max(unclipped, clipped), ratio, clipped > unclipped


def value_loss(values, old_values, returns, mask, cliprange_value):
    """Clipped squared errors (B, T), halved (TRL, OpenAI's code), and where the clipped one was the larger. There the
    gradient is 0: the value has moved by more than cliprange_value towards its return."""
    near_values = values.clamp(old_values - cliprange_value, old_values + cliprange_value)
    unclipped = (values - returns).masked_fill(~mask, 0.0) ** 2
    clipped = (near_values - returns).masked_fill(~mask, 0.0) ** 2
    return 0.5 * torch.max(unclipped, clipped), clipped > unclipped


# --- 6. Update --------------------------------------------------------------------------------------------------------
def update(policy, critic, optimizer, rollout, args):
    """Steps 5 and 6: passes over the batch, with one optimiser step for each mini-batch. Returns means over its tokens.

    The gradient of a mini-batch is that of the mean loss over its tokens, however it is split into micro-batches and
    among processes: clip_gradient averages over processes, so each divides its sum by the tokens / WORLD_SIZE.
    """
    trained = [group["params"] for group in optimizer.param_groups]  # the policy's, and the critic's
    totals = Counter()  # over tokens
    norms = []  # of the gradients of policy and critic
    num_steps = 0
    for _ in range(args.num_ppo_epochs):
        order = torch.randperm(args.batch_size).to(args.device)
        for rows in order.split(args.batch_size // args.num_mini_batches):  # (b,) row numbers
            optimizer.zero_grad()
            num_tokens = rollout.mask[rows].sum() / WORLD_SIZE
            sums = Counter()
            for index in rollout.micro_batches(rows, args):
                r = rollout.select(index)
                with autocast(args):
                    logits = response_forward(policy, r, args)  # (b, T, V)
                log_softmax = logits.log_softmax(-1)  # as in token_logprobs, but once for the entropy, too
                logprobs = log_softmax.gather(-1, r.responses[..., None]).squeeze(-1)  # (b, T)
                with torch.no_grad():
                    entropy = -log_softmax.exp().mul_(log_softmax).sum(-1)  # (b, T)
                del logits, log_softmax  # the largest tensors of the update: the graph keeps what it needs
                pg_loss, ratio, pg_clipped = policy_loss(logprobs, r.old_logprobs, r.advantages, r.mask, args.cliprange)
                loss = masked_sum(pg_loss, r.mask) / num_tokens
                loss.backward()  # frees the activations of the policy
                with autocast(args):
                    values = critic_values(critic, r)  # (b, T)
                vf_loss, vf_clipped = value_loss(values, r.values, r.returns, r.mask, args.cliprange_value)
                loss = args.vf_coef * masked_sum(vf_loss, r.mask) / num_tokens
                loss.backward()
                seen = {
                    "loss/policy_avg": pg_loss,
                    "loss/value_avg": vf_loss,
                    "policy/clipfrac_avg": pg_clipped,
                    "policy/entropy_avg": entropy,
                    "policy/approxkl_avg": 0.5 * (logprobs - r.old_logprobs) ** 2,
                    "val/clipfrac_avg": vf_clipped,
                    "val/ratio": ratio,
                    "ratio_squared": ratio**2,
                    "ratio_error": (ratio - 1).abs(),
                    "tokens": torch.ones_like(ratio),
                }
                sums.update({name: masked_sum(x.detach(), r.mask) for name, x in seen.items()})  # a Counter adds
            reduced = all_reduce(torch.stack(list(sums.values()))).tolist()
            sums = dict(zip(sums, reduced))
            if not totals:
                first_error = sums["ratio_error"] / sums["tokens"]
            totals.update(sums)
            both = [clip_gradient(parameters, args.max_grad_norm).item() for parameters in trained]
            norms.append(both)
            if math.isfinite(sum(both)):  # otherwise the step would turn the weights into NaN
                optimizer.step()
                num_steps += 1
    optimizer.zero_grad()
    means = {name: x / totals["tokens"] for name, x in totals.items()}
    stats = {name: x for name, x in means.items() if "/" in name}
    stats["val/ratio_var"] = max(0.0, means["ratio_squared"] - means["val/ratio"] ** 2)
    stats["policy/first_ratio_error"] = first_error  # before the first step
    stats["policy/grad_norm"], stats["val/grad_norm"] = np.mean(norms, 0).tolist()
    stats["val/skipped_steps"] = args.num_ppo_epochs * args.num_mini_batches - num_steps
    return stats


# === End of the algorithm. Next: its metrics, then what every program of this kind needs =============================
def rollout_stats(rollout, kl_coef):
    """The metrics of a batch before the update, under TRL's names."""
    mask = rollout.mask
    B = len(mask)
    score = rollout.scores.mean().item()
    kl = masked_sum(rollout.kl, mask).item() / B
    returns = rollout.returns[mask]
    residuals = returns - rollout.values[mask]
    unexplained = residuals.var() / returns.var().clamp(min=1e-8)  # of a constant critic: 1
    stats = {
        "objective/kl": kl,
        "objective/kl_coef": kl_coef,
        "objective/entropy": masked_sum(-rollout.old_logprobs, mask).item() / B,  # from the sampled tokens
        "objective/non_score_reward": -kl_coef * kl,
        "objective/rlhf_reward": score - kl_coef * kl,
        "objective/scores": score,
        "objective/scores_std": rollout.scores.std(correction=0).item(),
        "val/num_eos_tokens": rollout.ended.sum().item(),
        "val/eos_share": rollout.ended.float().mean().item(),
        "val/response_length": mask.sum(1).float().mean().item(),
        "val/explained_variance": 1 - unexplained.item(),
    }
    for name, rewards in rollout.reward_table.items():
        known = rewards[~rewards.isnan()]
        stats[f"rewards/{name}/mean"] = known.mean().item()
        stats[f"rewards/{name}/std"] = known.std().item()  # with Bessel's correction, as in TRL
    return stats


def show_samples(run, rollout, tokenizer):
    """Prints four episodes, and saves their tensors for tools/xray.py."""
    r = rollout.select(torch.arange(len(rollout.rows))[:4])
    prompts = tokenizer.batch_decode([row["input_ids"] for row in r.rows])
    pairs = zip(r.responses, r.mask)
    responses = [tokenizer.decode(ids[real]) for ids, real in pairs]
    scores = [f"{score:.2f}" for score in r.scores.tolist()]
    run.show({"prompt": prompts, "response": responses, "score": scores}, vars(r))


# --- Models and data --------------------------------------------------------------------------------------------------
CURVES = "scores$|/mean$|objective/kl$|eos_share$"  # metrics of curves.png


def load_models(args):
    """Loads policy and reward model, and makes the others of them: the reference, a copy, and the critic. None
    has dropout: rollout, scoring and loss use one distribution."""
    policy = load_model(AutoModelForCausalLM, args.model)
    policy.stop_token_ids = []
    for text in args.stop_token:
        ids = eos_tokens(policy) if text == "eos" else policy.tokenizer.encode(text, add_special_tokens=False)
        require(text == "eos" or len(ids) == 1, f"--stop-token {text!r} is not one token of {args.model}, but {ids}")
        policy.stop_token_ids += ids
    print(f"a response ends at one of {policy.tokenizer.convert_ids_to_tokens(policy.stop_token_ids)}")
    policy.generation_config.eos_token_id = policy.stop_token_ids or None  # for programs that sample from it later
    policy.generation_config.do_sample = True  # the library refuses to save a temperature without it
    reward_model = load_reward_model(args, policy)
    if reward_model:
        critic = deepcopy(reward_model).requires_grad_(True)  # as in the N+ details
    else:  # a head on a copy of the policy: V starts at 0. In OPT-350m, states have half of hidden_size
        head = nn.Linear(policy.get_output_embeddings().weight.shape[1], 1)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        critic = nn.ModuleDict({"base_model": deepcopy(policy.base_model), "score": head})
        critic.base_model.config.use_cache = False
    reference = deepcopy(policy).requires_grad_(False)
    if args.lora_r:  # trains adapters of all linear layers, and nothing else (Hu et al. 2021)
        from peft import LoraConfig

        config = LoraConfig(r=args.lora_r, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        policy.add_adapter(config)
    models = [policy, reference, critic, reward_model]
    for model in filter(None, models):
        place(model, args)
    return models


def choose_sizes(args, policy, prompts):
    """Returns the settings with learning rate and batch sizes filled in, and prints them."""
    longest = max(len(row["input_ids"]) for row in prompts) + args.response_length
    limit = getattr(policy.config.get_text_config(), "max_position_embeddings", longest)
    require(longest <= limit, f"a prompt and --response-length have {longest} tokens, but {args.model} reads {limit}")
    size = policy.num_parameters()
    # 1e-5 for a model of GPT-2's size, more for smaller ones, at least 3e-6 (the N+ details' rate from 1B up)
    rate = max(3e-6, 1e-5 * (124e6 / size) ** 0.6)
    if args.lora_r:
        rate *= 10
    rate = args.learning_rate or float(f"{rate:.2g}")
    parts = args.num_mini_batches * WORLD_SIZE
    per_device = args.per_device_train_batch_size
    batch_size = per_device * args.gradient_accumulation_steps * parts if per_device else args.batch_size
    rows = 16 if args.device == "cpu" else max(1, 8192 // longest)
    rows = args.micro_batch_size or per_device or rows
    num_updates = args.total_episodes // batch_size
    require(batch_size % parts == 0, f"{batch_size} responses are no multiple of {parts} (mini-batches x processes)")
    require(num_updates, f"--total-episodes {args.total_episodes} is less than a batch of {batch_size}")
    print(f"policy: {args.model}, {size / 1e6:.2f}M parameters on {args.device}, learning rate {rate:.2g}")
    per_prompt = num_updates * batch_size / len(prompts)
    print(f"{num_updates} updates of {batch_size} responses, {rows} at a time; {per_prompt:.1f} for each prompt")
    sizes = {"learning_rate": rate, "batch_size": batch_size, "micro_batch_size": rows}
    return replace(args, per_device_train_batch_size=None, **sizes)


# === From here on, a function has the same text in all scripts that have it ==========================================
# --- Rewards ----------------------------------------------------------------------------------------------------------
def load_reward_model(args, policy):
    """Loads the reward model; None if --reward-fn does not name it, or its tokens are not the policy's. The bias of its
    head is the shift that centres the rewards, which reward_model.py stores in the config."""
    if "reward_model" not in args.reward_fn:
        return None
    a = policy.tokenizer
    b = AutoTokenizer.from_pretrained(args.reward_model)
    has_same_tokens = a.get_vocab() == b.get_vocab() and a.eos_token_id == b.eos_token_id
    if not has_same_tokens or b.chat_template not in (None, a.chat_template):
        return None
    model = load_model(AutoModelForSequenceClassification, args.reward_model)
    is_causal = model.config.num_labels == 1 and hasattr(model, "score")
    require(is_causal, f"{args.reward_model} is not a causal model with one label: see rewards/classifier.py")
    bias = getattr(model.config, "reward_bias", 0.0)
    model.score.bias = nn.Parameter(torch.tensor([bias]))
    model.config.use_cache = False
    return model.requires_grad_(False)


def score_responses(rollout, reward_fns, tokenizer, args):
    """Adds the rewards (B,) of each function to the rollout, and the scores (B,): the weighted sum of the rewards,
    minus the penalty for a missing stop token. A None counts as 0; if all are None, the score is the mean score."""
    rollout.reward_table = {name: reward_of(rollout, tokenizer, args) for name, reward_of in reward_fns.items()}
    table = torch.stack(list(rollout.reward_table.values()))  # (K, B)
    require(not table.isinf().any(), "a function of --reward-fn returned an infinite reward")
    weights = table.new_tensor(args.reward_weights or [1.0] * len(table))
    scores = (table * weights[:, None]).nansum(0)
    if args.stop_token:  # without stop tokens, no response ends
        scores = torch.where(rollout.ended, scores, scores - args.missing_eos_penalty)  # in the N+ details: -1
    unscored = table[weights != 0].isnan().all(0)
    mean = scores[~unscored].mean().nan_to_num()
    rollout.scores = torch.where(unscored, mean, scores)


def model_reward(model, rollout, tokenizer, args):
    """(B,) rewards of a reward model."""

    def read(r):
        """(b, 1) the model's head at the last token of each episode."""
        ids, mask = r.joined()
        last = mask.cumsum(1).argmax(1, keepdim=True)  # (b, 1) where all real tokens are counted
        return read_head(model, ids, mask).gather(1, last)

    return rollout.in_micro_batches(read, args)[:, 0]


def decode(r, tokenizer):
    """Responses as texts, without special tokens. A response is decoded behind its prompt, since SentencePiece drops a
    first space; in conversations, without the white space that some templates write around it."""
    P = r.prompts.shape[1]
    ids, mask = (x.cpu() for x in r.joined())  # the GPU is read once, not for each row
    texts = []
    for row, episode, real in zip(r.rows, ids, mask.bool()):
        prompt = tokenizer.decode(episode[:P][real[:P]], skip_special_tokens=True)
        text = tokenizer.decode(episode[real], skip_special_tokens=True).removeprefix(prompt)
        texts.append(text.strip() if isinstance(row["prompt"], list) else text)
    return texts


def load_reward_fns(args, reward_model):
    """The rewards of --reward-fn by name, each a function of (rollout, tokenizer, args)."""
    reward_fns = {}
    for spec in args.reward_fn:
        file, _, name = spec.rpartition(":")
        is_known = Path(file).is_file() or spec == "reward_model"
        require(is_known, f"--reward-fn {spec}: should be file.py:name, of a file that exists, or reward_model")
        require(name not in reward_fns, f"--reward-fn: two functions have the name {name!r}")
        if file:
            reward_fns[name] = partial(function_reward, load_function(file, name))
        elif reward_model:
            reward_fns[name] = partial(model_reward, reward_model)
        else:  # a reward model with another tokenizer is a function, which reads the texts
            os.environ["REWARD_MODEL"] = args.reward_model
            reward_fns[name] = partial(function_reward, load_function(TOY.parent / "rewards/model.py", "score"))
    is_one_each = len(args.reward_weights or reward_fns) == len(reward_fns)
    require(is_one_each, "--reward-weights needs one number for each function of --reward-fn")
    return reward_fns


def load_function(file, name):
    """Imports a function of a Python file, which finds the files beside it."""
    path = Path(file).resolve()
    sys.path.insert(0, str(path.parent))
    sys.modules.pop(path.stem, None)  # another file may have this name
    return getattr(importlib.import_module(path.stem), name)


def function_reward(function, rollout, tokenizer, args):
    """(B,) rewards of a user's function, with TRL's signature: f(prompts, completions, **columns) -> numbers or None.

    All arguments are lists with one value per row: prompts, prompts_text (as the policy read them), completions (like
    the prompts, texts or messages), completion_ids, ended, and the dataset's columns. A process passes its share.
    """
    share = torch.arange(len(rollout.mask)).tensor_split(WORLD_SIZE)[RANK]
    r = rollout.select(share)
    columns = {}
    for name in r.rows[0]:
        columns[name] = [deepcopy(row[name]) for row in r.rows]
    columns["prompts"] = columns["prompt"]
    columns["prompts_text"] = tokenizer.batch_decode(columns.pop("input_ids"))
    columns["completions"] = decode(r, tokenizer)
    responses = zip(r.responses.cpu(), r.mask.cpu())  # the GPU is read once, not for each row
    columns["completion_ids"] = [ids[real].tolist() for ids, real in responses]
    columns["ended"] = r.ended.tolist()
    if isinstance(columns["prompt"][0], list):
        messages = [{"role": "assistant", "content": text} for text in columns["completions"]]
        columns["completions"] = [[message] for message in messages]
    with torch.random.fork_rng(devices=[]):  # the function's random numbers do not change the run's
        rewards = function(**columns)
    rewards = [math.nan if x is None else x for x in rewards]
    require(len(rewards) == len(r.rows), f"{function.__name__} returned {len(rewards)} rewards for {len(r.rows)} rows")
    return all_gather(torch.tensor(rewards, dtype=torch.float32, device=args.device))


# --- Rows -------------------------------------------------------------------------------------------------------------
def load_prompts(args, tokenizer):
    """The rows of the dataset, each with the ids of its prompt as `input_ids`, without prompts that are too long."""
    rows = read_rows(args.dataset, args.dataset_config, args.dataset_train_split)
    form = list if rows and isinstance(rows[0].get("prompt"), list) else str  # messages or texts

    def text_of(row):
        """The prompt as the policy reads it. Messages are rendered up to where the assistant's answer begins."""
        prompt = row.get("prompt")
        is_one = prompt and isinstance(prompt, form)
        require(is_one, f"'prompt' should be a text in all rows, or messages in all rows, but this is {prompt!r:.60}")
        if form is str:
            return prompt
        check_messages(prompt, last="user")
        return render(prompt, row, tokenizer, add_generation_prompt=True)

    texts = parse(rows, text_of, args.dataset)
    for row, ids in zip(rows, encode(texts, tokenizer, is_chat=form is list)):
        row["input_ids"] = ids
    prompts = [row for row in rows if len(row["input_ids"]) <= args.max_prompt_length]
    print(f"{len(prompts)} of {len(rows)} prompts have at most {args.max_prompt_length} tokens")
    require(prompts, f"{args.dataset} has no prompts to train on (recipes/data.py converts csv and others)")
    print(f"the first one, as the policy reads it: {tokenizer.decode(prompts[0]['input_ids'])!r}")
    return prompts


def require(condition, message):
    """Exits with the message unless the condition holds. It is for errors that no library reports clearly."""
    if not condition:
        sys.exit(f"error: {message}")


def parse(rows, function, where):
    """Applies a function to each row. An error ends the run and names the row."""
    parsed = []
    for number, row in enumerate(rows, 1):
        try:
            parsed.append(function(row))
        except (SystemExit, ValueError, TypeError, TemplateError) as error:
            reason = str(error).removeprefix("error: ")
            sys.exit(f"error: row {number} of {where}: {reason} (recipes/data.py converts other forms)")
    return parsed


def read_rows(name, config, split):
    """The rows of SPLIT.jsonl or SPLIT.parquet in a folder, of one such file (its split is train), or of a split on the
    hub. Values stay as they are in the file. Without such a split, an empty list. train[:9] is the first nine rows."""
    import datasets

    path = Path(name)
    part, _, end = str(split).partition("[:")
    files = [path] if path.suffix in (".jsonl", ".parquet") and path.is_file() and part == "train" else []
    files += [file for file in (path / f"{part}.jsonl", path / f"{part}.parquet") if file.exists()]
    if files and files[0].suffix == ".jsonl":
        with open(files[0], "rb") as lines:
            rows = parse(lines, json.loads, files[0])
    elif files:
        rows = datasets.Dataset.from_parquet(str(files[0])).to_list()
    elif not path.exists() and part in datasets.get_dataset_split_names(name, config):
        rows = datasets.load_dataset(name, config, split=part).to_list()
    else:
        return []
    print(f"{split}: reads {(files + [name])[0]}")
    return rows[: int(end[:-1])] if end else rows


def check_messages(messages, last):
    """Refuses what is not a list of {role, content} that ends with a message of the role `last`."""
    for message in messages:
        is_message = isinstance(message, dict) and message.keys() == {"role", "content"}
        require(is_message, f"a message has a role and a content, but this is {message!r:.60}")
        require(message["role"] in ("system", "user", "assistant"), f"there is no role {message['role']!r:.60}")
        is_text = isinstance(message["content"], str) and message["content"].strip()
        require(is_text, f"the content of a message is empty, or not a text: {message['content']!r:.60}")
    require(messages and messages[-1]["role"] == last, f"the last message is not one of the {last}")


def render(messages, row, tokenizer, **options):
    """Renders messages with the chat template, which gets the row's `tools` and `chat_template_kwargs` (as in TRL).
    Refuses a row of which the template leaves something out."""
    require(tokenizer.chat_template, "the rows are messages, but the model has no chat template: use a chat model")
    options |= row.get("chat_template_kwargs") or {}
    text = tokenizer.apply_chat_template(messages, tools=row.get("tools"), tokenize=False, **options)
    for message in messages:
        require(message["content"].strip() in text, f"the chat template leaves out {message['content']!r:.60}")
    return text


def encode(texts, tokenizer, is_chat=False):
    """Token ids of texts that go on: without the EOS that some tokenizers add. A chat template writes BOS itself."""
    rows = []
    starts = range(0, len(texts), 1000)
    for start in tqdm(starts, desc="encoding", disable=len(texts) < 20_000):
        batch = tokenizer(texts[start : start + 1000], add_special_tokens=not is_chat)["input_ids"]
        rows += [np.array(ids, np.int32) for ids in batch]
    adds_eos = not is_chat and tokenizer("a")["input_ids"][-1] == tokenizer.eos_token_id
    if adds_eos:
        rows = [ids[:-1] for ids in rows]
    return rows


def pad(rows, tokenizer, args, side="right"):
    """Pads rows of token ids to one tensor (B, S); returns it, and its mask (B, S), true on real tokens."""
    padded = tokenizer.pad({"input_ids": rows}, padding_side=side, return_tensors="pt").to(args.device)
    return padded["input_ids"].long(), padded["attention_mask"].bool()


def shuffled(n, seed, number):
    """The numbers below n, in an order that depends on the seed and the number of the pass."""
    generator = torch.Generator().manual_seed(make_seed(seed, number, 1))
    return torch.randperm(n, generator=generator).tolist()


def make_seed(*numbers):
    """One seed from several numbers. The draws of a step do not depend on the steps before it."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


# --- Models -----------------------------------------------------------------------------------------------------------
def load_model(auto_class, name, new_weights=()):
    """Loads a model from a folder or the hub, in float32, with its tokenizer as `model.tokenizer`. Exits if weights are
    missing, which the library would draw at random; those of a new head may be."""
    require(not Path(name, "adapter_config.json").exists(), f"{name} is an adapter: see tools/merge.py")
    options = {"dtype": torch.float32, "use_safetensors": True, "output_loading_info": True}
    model, info = auto_class.from_pretrained(name, **options)
    wrong = (info["missing_keys"] | info["unexpected_keys"]) - set(new_weights)
    require(not wrong, f"{name} is not a {type(model).__name__}: weights are missing or unexpected: {list(wrong)[:3]}")
    model.tokenizer = AutoTokenizer.from_pretrained(name)
    if model.tokenizer.pad_token_id not in range(model.get_input_embeddings().num_embeddings):
        model.tokenizer.pad_token = model.tokenizer.eos_token  # any token will do, since padding is masked
    return model.eval()


def eos_tokens(model):
    """Ids of the tokens that end a text: EOS, and those of the generation config, such as <|im_end|>. Only added tokens
    count, since a config's default can be any token."""
    stored = model.generation_config.eos_token_id  # an int, a list, or None
    ids = {model.tokenizer.eos_token_id, *(stored if isinstance(stored, list) else [stored])}
    return sorted(ids & model.tokenizer.added_tokens_decoder.keys())


class OneTypeCache(StaticCache):
    def update(self, keys, values, *others, **options):
        """Keeps one dtype: under autocast, rotary keys are float32 and values bfloat16."""
        return super().update(keys.to(values.dtype), values, *others, **options)


def autocast(args):
    """Autocast to bfloat16 with --bf16. Trained weights, losses and everything after the logits stay in float32. It
    keeps a bfloat16 copy of the weights until the context ends, but not with --gradient-checkpointing."""
    device_type = torch.device(args.device).type
    return torch.autocast(device_type, torch.bfloat16, args.bf16, cache_enabled=not args.gradient_checkpointing)


# --- Processes
def start(args):
    """Joins the processes of torchrun, if it started this one, and configures the libraries."""
    ACT2FN["gelu_new"] = GELUTanh  # GPT-2's activation, in one operator instead of eight
    set_seed(args.seed)  # all processes draw the same new weights
    logging.set_verbosity_error()  # transformers would report each new head
    logging.disable_progress_bar()
    if args.device.startswith("cuda") and "LOCAL_RANK" in os.environ:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    if args.device != "cpu":
        torch.set_float32_matmul_precision("high")  # TF32; plain float32 does not use the tensor cores
    elif sys.platform == "linux" and WORLD_SIZE == 1:
        # glibc keeps freed memory: with a large vocabulary, asking the system again takes up to half of the time
        glibc = ctypes.CDLL(None)
        glibc.mallopt(-4, 0)  # M_MMAP_MAX
        glibc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group(timeout=timedelta(hours=2))  # a process may wait for a slow reward function


def all_reduce(x):
    """Sums x over all processes, in place."""
    if WORLD_SIZE > 1:
        dist.all_reduce(x)
    return x


def all_gather(x):
    """Joins the rows x (B/WORLD_SIZE, ...) of all processes, in the order of the processes, to (B, ...)."""
    if WORLD_SIZE == 1:
        return x
    shares = [torch.empty_like(x) for _ in range(WORLD_SIZE)]
    dist.all_gather(shares, x.contiguous())
    return torch.cat(shares)


def place(model, args):
    """Moves a model to the device. Recomputes its layers, or runs them in bfloat16, as the settings say."""
    is_trained = any(p.requires_grad for p in model.parameters())
    for layer in model.modules():
        if not isinstance(layer, GradientCheckpointingLayer):
            continue
        if args.gradient_checkpointing and is_trained:
            recompute_activations(layer)
        for module in layer.modules():
            if args.bf16 and isinstance(module, nn.Linear) and not module.weight.requires_grad:
                module.bfloat16()  # once: autocast would cast a frozen weight at each use
    model.to(args.device)


def clip_gradient(parameters, max_norm):
    """Averages the gradient over processes, clips it to max_norm, and returns its norm before."""
    for p in parameters:
        if WORLD_SIZE > 1 and p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= WORLD_SIZE
    return nn.utils.clip_grad_norm_(parameters, max_norm)


# --- The run
class Run:
    """The output of a run: progress bar, metrics.jsonl, W&B, samples, checkpoints, and at the end model and curves.
    `carry` is what one step hands to the next. On a CPU, a resumed run equals an uninterrupted one bit for bit."""

    def __init__(self, args, num_steps, optimizer, schedule, carry, **models):
        self.args = args
        self.num_steps = num_steps
        self.optimizer = optimizer
        self.carry = carry
        self.models = nn.ModuleDict(models)
        self.step = 0
        self.stop_requested = False
        self.saved_at = time.time()
        script = Path(__file__).stem
        new_folder = f"runs/{script}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
        self.output = Path(args.resume or args.output_dir or new_folder)  # only process 0 writes to it
        if args.resume:
            self.restore()
        for _ in range(self.step):
            schedule.step()
        self.bar = tqdm(total=num_steps, initial=self.step, dynamic_ncols=True, disable=RANK > 0)
        self.wandb = None
        if RANK:
            return
        self.output.mkdir(parents=True, exist_ok=bool(args.resume))
        (self.output / "args.json").write_text(json.dumps(asdict(args), indent=2))
        self.file = open(self.output / "metrics.jsonl", "a")
        if args.track:
            import wandb

            options = {"id": self.output.name, "resume": "allow", "dir": self.output, "config": asdict(args)}
            self.wandb = wandb.init(**options)

    def steps(self):
        """Yields the numbers of the remaining steps, and saves checkpoints. Ctrl-C and SIGTERM end the loop after the
        current step."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: setattr(self, "stop_requested", True))
        while self.step < self.num_steps and not self.stop_requested:
            self.step += 1
            self.step_started = time.perf_counter()
            yield self.step
            is_late = time.time() - self.saved_at > 600
            wishes = torch.tensor([int(self.stop_requested), int(is_late)])
            stops, lates = all_reduce(wishes).tolist()
            self.stop_requested = stops > 0  # in any process
            if stops or lates or self.step % self.args.save_steps == 0:
                self.save()

    def log(self, stats, *shown):
        """Logs to metrics.jsonl and W&B, and shows the metrics named in `shown` beside the bar."""
        stats["perf/peak_memory_mb"] = torch.cuda.max_memory_allocated() / 2**20  # 0 on a CPU
        values = {name.split("/")[-1]: stats[name] for name in shown}
        self.bar.set_postfix(values, refresh=False)
        self.bar.update()
        if not RANK:
            line = {name: x if math.isfinite(x) else None for name, x in stats.items()}  # JSON has no NaN
            print(json.dumps(line), file=self.file, flush=True)
        if self.wandb:
            self.wandb.log(stats, step=self.step)

    def is_due(self, every):
        """Whether this step is a multiple of `every`, or the last one."""
        return self.step % max(1, every) == 0 or self.step == self.num_steps

    def show(self, columns, tensors):
        """Prints rows of texts, and saves the tensors that belong to them in samples/, for tools/xray.py."""
        if RANK:
            return
        for row in zip(*columns.values()):
            for name, text in zip(columns, row):
                self.bar.write(f"{name}: {text}")
            self.bar.write("")
        tensors = {name: x.cpu().contiguous() for name, x in tensors.items() if isinstance(x, Tensor)}
        (self.output / "samples").mkdir(exist_ok=True)
        save_file(tensors, self.output / f"samples/step-{self.step:08d}.safetensors")

    def save(self):
        """Writes a checkpoint, under another name until it is complete, and removes old ones."""
        self.saved_at = time.time()
        if RANK:
            return
        folder = self.output / "checkpoints"
        folder.mkdir(exist_ok=True)
        weights = {name: p.data for name, p in self.models.named_parameters() if p.requires_grad}
        state = {"step": self.step, "carry": self.carry, "weights": weights, "optimizer": self.optimizer.state_dict()}
        torch.save(state, folder / "unfinished.pt")
        (folder / "unfinished.pt").rename(folder / f"step-{self.step:08d}.pt")
        files = sorted(folder.glob("step-*.pt"))
        for old in files[: -(self.args.save_total_limit or 1)]:
            old.unlink()

    def restore(self):
        """Continues from the newest checkpoint."""
        found = sorted(self.output.glob("checkpoints/step-*.pt"))
        require(found, f"{self.output} has no checkpoint (see --save-steps and --save-total-limit)")
        print(f"reading {found[-1]} (if it is damaged, remove it)")
        state = torch.load(found[-1], map_location="cpu", weights_only=True)
        self.models.load_state_dict(state["weights"], strict=False)  # it has the trained weights alone
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        self.carry.update(state["carry"])
        if not RANK:
            file = self.output / "metrics.jsonl"
            lines = file.read_text().splitlines(keepends=True)
            file.write_text("".join(lines[: self.step]))  # one line for each step

    def finish(self):
        """Saves the model, the model card and the curves."""
        self.bar.close()
        if RANK:
            return
        save_model(self.models["model"], self.output)
        self.file.close()
        describe(self.output, self.args)
        print(f"saved in {self.output}: the model, its card, metrics.jsonl and curves.png")
        if self.step < self.num_steps:
            print(f"to continue from step {self.step}: --resume {self.output}")
        elif not self.args.save_total_limit:
            shutil.rmtree(self.output / "checkpoints", ignore_errors=True)


def save_model(model, folder):
    """Saves the model (safetensors) and its tokenizer; with LoRA the adapter alone (see tools/merge.py)."""
    model.save_pretrained(folder)
    model.config.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)


def describe(folder, args):
    """Writes curves.png, with a panel for each metric of CURVES, and README.md, the model card."""
    import pandas

    lines = pandas.read_json(folder / "metrics.jsonl", lines=True)
    lines.index += 1  # steps count from 1
    curves = lines.filter(regex=CURVES).astype(float)
    axes = curves.plot(subplots=True, layout=(-1, 3), figsize=(15, 8), style=".-")
    axes.flat[0].figure.savefig(folder / "curves.png", bbox_inches="tight")
    settings = (folder / "args.json").read_text()
    card = f"---\ntags: [{Path(__file__).stem}]\n---\nTrained from {args.model or 'scratch'} on {args.dataset}.\n"
    card += f"## Settings\n```\n{settings}\n```\n## Last metrics\n```\n{lines.ffill().iloc[-1].to_string()}\n```\n"
    (folder / "README.md").write_text(card)


def read_command_line():
    """Reads the settings from the command line. A resumed run keeps its settings, except those on the command line."""
    read = partial(tyro.cli, Args, description=__doc__.splitlines()[0])
    args = read()
    if args.resume:
        file = Path(args.resume, "args.json")
        require(file.exists(), f"--resume {args.resume}: there is no run in this folder")
        args = read(default=Args(**json.loads(file.read_text())))
    return args


if __name__ == "__main__":
    if RANK:
        sys.stdout = open(os.devnull, "w")  # only process 0 prints
    train(read_command_line())
    if dist.is_initialized():
        dist.destroy_process_group()
