# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0", "transformers==5.23.0", "datasets==5.2.0", "tyro==1.0.17", "wandb==0.31.0",
#     "matplotlib==3.11.2", "pydantic==2.14.3", "tqdm==4.70.1",
# ]
# ///
"""RLOO for language models: policy + reward -> better policy, with a leave-one-out baseline instead of a critic.

For each batch of prompts, K responses to each:
  1. sample     response y_1..y_T ~ pi(. | prompt), at the given temperature, up to and including the stop token
  2. score      ref_logprobs of a frozen copy of the first pi, the reference; one score for each response, minus
                `missing_eos_penalty` if it has no stop token
  3. reward     R_i = score_i - kl_coef * sum_t KL_t: one number for the whole response
  4. advantage  A_i = R_i - mean of R over the other K-1 responses to the same prompt
  5. loss       ratio_i = exp(sum_t log pi(y_t) - log pi_old(y_t))
                mean_i max(-A_i ratio_i, -A_i clip(ratio_i, 1-eps, 1+eps))
  6. update     `num_ppo_epochs` passes over the batch, each with `num_mini_batches` optimiser steps

Shapes: B rows in a batch (b in a micro-batch), P prompt tokens, T response tokens, S tokens of any text, V vocabulary,
D hidden size. Below, K = 2, a prompt of 3 tokens, left-padded to P = 4, and responses of 4 and 6 tokens. A dot is
padding: it may hold any number, and is masked.

  input_ids     PAD  p1  p2  p3 | y1  y2  y3  EOS  .   .      row 0; the rows of a group, a prompt's, are neighbours
                PAD  p1  p2  p3 | z1  z2  z3  z4  z5  z6      row 1
  mask                          |  1   1   1   1   0   0      true up to and including the stop token
  logprobs, KL                  |  *   *   *   *   .   .      one for each token, summed over the response
  R, A, ratio                                                 one for each row: A_0 = R_0 - R_1, A_1 = R_1 - R_0

Differences from PPO: a response is one action, and there is no critic. The baseline of a response is the mean reward of
the others to its prompt. It is unbiased, because they do not depend on this response. If all scores of a group are
equal, only the KL gives a gradient: `objective/equal_groups` is the share of these groups. With --token-level-kl each
token is an action (REINFORCE++): A_t = A_i - kl_coef sum_{s>=t} KL_s, where A_i is computed from the scores alone.

Papers: RLOO 2402.14740 (sec. 3); REINFORCE with this baseline (Kool et al. 2019); REINFORCE++ 2501.03262 (sec. 3); PPO
1707.06347 (eq. 7). In short: lecture/rloo.py, 280 lines.

  python rloo.py                       # the toy world: offline, half a minute on two CPU cores, score from 0 to about 4
  python rloo.py --model gpt2 --bf16   # GPT-2 on a GPU, with the same prompts and reward (on a CPU, without --bf16)
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
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, StaticCache
from transformers import get_scheduler, logging, set_seed
from transformers.activations import ACT2FN, GELUTanh
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.modeling_layers import GradientCheckpointingLayer

TOY = Path(__file__).resolve().parent / "toy"  # the embedded models and data
SCORE = f"{TOY.parent}/rewards/model.py:score"  # the reward of a reward model

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
    # --- RLOO ---
    rloo_k: Annotated[int, Field(ge=2), alias("--num-generations")] = 2  # responses to each prompt (TRL: 2)
    num_ppo_epochs: Annotated[Count, alias("--ppo-epochs", "--num-iterations")] = 4  # passes over each batch (TRL: 4)
    num_mini_batches: Count = 1  # optimiser steps in one pass over the batch (TRL 0.16)
    cliprange: Annotated[Positive, alias("--epsilon")] = 0.2  # eps of the clipped ratio (PPO, eq. 7)
    token_level_kl: bool = False  # each token is an action, with its own and later KL in its advantage (REINFORCE++)
    kl_coef: Annotated[NonNegative, alias("--beta")] = 0.05  # weight of the KL in the reward (TRL 0.16)
    # --- Rollout ---
    response_length: Annotated[Count, alias("--max-completion-length")] = 53  # maximum tokens in a response (TRL 0.16)
    temperature: Positive = 0.7  # divides the logits in rollout, reference and loss (TRL 0.16). Lower: less exploration
    stop_token: tuple[str, ...] = ("eos",)  # end of a response: eos (all of the model's), or tokens as texts
    missing_eos_penalty: NonNegative = 1.0  # subtracted from the score of a response without stop token (TRL)
    local_rollout_forward_batch_size: Count | None = None  # responses sampled at once; by default 4 x micro_batch_size
    # --- Optimisation ---
    learning_rate: Positive | None = None  # by default from the policy's size, and ten times as high with LoRA
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup", "polynomial"] = "linear"  # TRL's
    warmup_ratio: Share = 0.0  # share of the run in which the learning rate warms up from 0
    weight_decay: NonNegative = 0.0  # weight decay of AdamW
    adam_betas: tuple[Share, Share] = (0.9, 0.999)  # betas of AdamW (OpenRLHF: 0.9 0.95)
    adam_epsilon: Positive = 1e-8  # epsilon of AdamW (torch and TRL; N+ details: 1e-5)
    max_grad_norm: Positive | None = None  # clip the gradient to this norm; by default not, as TRL 0.16 (docs/rloo.md)
    # --- Batch sizes ---
    batch_size: Count = 64  # responses per update, on all GPUs together
    micro_batch_size: Count | None = None  # responses per pass; by default 2048 tokens on a CPU, 8192 on a GPU
    per_device_train_batch_size: Count | None = None  # TRL: x accumulation x num_mini_batches x GPUs = batch_size
    gradient_accumulation_steps: Count = 1  # with per_device_train_batch_size: passes per optimiser step (TRL)
    # --- Models: a folder, or a name on the hub ---
    model: Annotated[str, alias("--model-name-or-path", "--sft-model-path")] = f"{TOY}/sft"  # policy to start from
    reward_model: Annotated[str, alias("--reward-model-path")] = f"{TOY}/reward_model"  # of rewards/model.py:score
    reward_fn: Annotated[tuple[str, ...], alias("--reward-funcs")] = (SCORE,)  # file.py:name; they add up
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
    os.environ["REWARD_MODEL"] = args.reward_model  # for rewards/model.py
    policy, reference = load_models(args)
    reward_fns = load_functions(args)
    prompts = load_prompts(args, policy.tokenizer)
    K = args.rloo_k
    args = choose_sizes(args, policy, prompts, K)  # from here on, all sizes are set
    B = args.batch_size
    num_updates = args.total_episodes // B
    order = []
    for number in range(1 + args.total_episodes // (K * len(prompts))):  # passes over the prompts
        order += shuffled(len(prompts), args.seed, number)

    options = {
        "betas": args.adam_betas,
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
        "fused": True,  # ten times as fast on a CPU
    }
    optimizer = torch.optim.AdamW(policy.parameters(), args.learning_rate, **options)
    schedule = get_scheduler(args.lr_scheduler_type, optimizer, int(args.warmup_ratio * num_updates), num_updates)
    run = Run(args, num_updates, optimizer, schedule, {}, model=policy)
    for step in run.steps():
        set_seed(make_seed(args.seed, step))

        # 1. Sample
        numbers = order[(step - 1) * B // K : step * B // K]
        rows = [prompts[i] for i in numbers]
        rollout = sample_batch(policy, rows, K, args)

        # 2. Score
        if args.bf16 or args.device != "cpu":  # the sampler reads token by token: its rounding would matter
            rollout.old_logprobs = read_logprobs(policy, rollout, args)
        rollout.ref_logprobs = read_logprobs(reference, rollout, args)
        rollout.kl = rollout.old_logprobs - rollout.ref_logprobs  # of the sampled tokens; its expectation is the KL
        score_groups(rollout, reward_fns, policy.tokenizer, args)

        # 3. Reward
        non_score_reward = -args.kl_coef * rollout.kl.masked_fill(~rollout.mask, 0.0)  # (B, T)

        # 4. Advantage
        rollout.actions = rollout.mask.any(1, keepdim=True)  # (B, 1), or each token, (B, T)
        if args.token_level_kl:
            rollout.actions = rollout.mask
        rollout.advantages = rloo_advantages(rollout.scores, non_score_reward, K, args.token_level_kl)  # as actions

        # 5. Loss, and 6. update
        stats = update(policy, optimizer, rollout, args)
        stats |= rollout_stats(rollout, args.kl_coef)
        is_one = step > 1 or stats["policy/first_ratio_error"] < 0.1  # bfloat16 has 8 bits
        require(is_one, "the first ratio is not 1: does the model ignore the attention mask, or have dropout?")

        stats["lr"] = optimizer.param_groups[0]["lr"]
        stats["episode"] = step * B
        stats["eps"] = B / (time.perf_counter() - run.step_started)  # episodes per second
        run.log(stats, "objective/scores", "objective/kl")
        if args.num_sample_generations and (step == 1 or run.is_due(num_updates // args.num_sample_generations)):
            show_samples(run, rollout, policy.tokenizer)
        schedule.step()
    run.finish()


# --- 1. Sample --------------------------------------------------------------------------------------------------------
@dataclass
class Rollout:
    """A batch of episodes: B rows. The k responses to a prompt, a group, are neighbours. Later steps add their results:
    reward_table, the rewards (B,) of each function, NaN for None; scores (B,); and others, (B,) or (B, T)."""

    prompts: Tensor  # (B, P), left-padded
    prompt_mask: Tensor  # (B, P), true on real tokens
    responses: Tensor  # (B, T), right-padded
    mask: Tensor  # (B, T), true up to and including the stop token
    ended: Tensor  # (B,), true if the response has a stop token
    old_logprobs: Tensor  # (B, T), under the policy that sampled the responses
    rows: list[dict]  # the B rows of the dataset
    k: int  # responses to each prompt

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
        """Splits row numbers into this process's micro-batches of groups of similar lengths, to save padding."""
        lengths = self.prompt_mask.sum(1) + self.mask.sum(1)  # (B,)
        lengths = lengths.view(-1, self.k).amax(1)  # (B/k,) of the longest row of each group
        index = index.sort().values
        by_length = lengths[index // self.k].argsort(stable=True)
        index = index[by_length]
        num_rounds = math.ceil(len(index) / (WORLD_SIZE * args.micro_batch_size))  # equal in all processes
        return index.tensor_split(num_rounds * WORLD_SIZE)[RANK::WORLD_SIZE]


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


def read_prompts(model, prompts, prompt_mask, cache):
    """Reads each distinct prompt (B, P) once, and gives the key-value cache a copy of it for each row. Returns the
    logits (B, 1, V) of the first response token."""
    marked = prompts.where(prompt_mask, -1).cpu()  # -1: padding. Some devices do not support unique
    distinct, prompt_of = marked.unique(dim=0, return_inverse=True)
    distinct = distinct.to(prompts.device)
    prompt_of = prompt_of.to(prompts.device)  # (B,) numbers of distinct prompts
    mask = (distinct >= 0).long()
    output = forward(model, distinct.clamp(min=0), mask, past_key_values=cache, use_cache=True, logits_to_keep=1)
    cache.reorder_cache(prompt_of)
    return output.logits[prompt_of]


@torch.no_grad()
def sample(policy, prompts, prompt_mask, uniforms, temperature):
    """Samples one response to each prompt (B, P) from softmax(logits / temperature), by the random numbers `uniforms`
    (B, T). Returns responses (B, T), mask (B, T), ended (B,), and the logprobs (B, T) of the tokens, 0 on padding."""
    B, T = uniforms.shape
    responses = prompts.new_zeros(B, T)
    logprobs = torch.zeros_like(uniforms)  # (B, T)
    stops = prompts.new_tensor(policy.stop_token_ids)
    cache = OneTypeCache(config=policy.config, max_cache_len=prompts.shape[1] + T)
    look_every = 1 if prompts.device.type == "cpu" else 8  # steps between checks; each check waits for the GPU
    rows = torch.arange(B, device=prompts.device)  # the rows in the cache; rows that have ended leave it
    has_ended = torch.zeros_like(rows, dtype=torch.bool)
    attention_mask = prompt_mask.long()  # (rows, P), after each pass one wider
    options = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    logits = read_prompts(policy, prompts, prompt_mask, cache)  # (rows, 1, V)
    for t in range(T):
        if t > 0:
            logits = forward(policy, token[:, None], attention_mask, **options).logits  # noqa: F821
        logits = logits[:, -1].float() / temperature  # (rows, V)
        token, logprobs[rows, t] = sample_categorical(logits, uniforms[rows, t])
        responses[rows, t] = token
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
            token = token[unfinished]
            attention_mask = attention_mask[unfinished]
    mask, ended = response_mask(responses, policy.stop_token_ids)  # false on tokens sampled after the stop token
    responses = responses.masked_fill(~mask, policy.tokenizer.pad_token_id)
    return responses, mask, ended, logprobs.masked_fill(~mask, 0.0)


def sample_batch(policy, rows, k, args):
    """Step 1: samples k responses to the prompt of each row. Each process samples those to some of the prompts."""
    rows = [row for row in rows for _ in range(k)]
    prompts, prompt_mask = pad([row["input_ids"] for row in rows], policy.tokenizer, args, "left")  # (B, P)
    uniforms = torch.rand(len(rows), args.response_length).to(prompts.device)  # drawn on the CPU, for any device
    share = torch.arange(len(rows)).tensor_split(WORLD_SIZE)[RANK]  # row numbers of this process: whole groups
    parts = []
    with autocast(args):
        for index in share.split(args.local_rollout_forward_batch_size or 4 * args.micro_batch_size):
            part = sample(policy, prompts[index], prompt_mask[index], uniforms[index], args.temperature)
            parts.append(part)
    columns = [all_gather(torch.cat(x)) for x in zip(*parts)]  # responses, mask, ended, logprobs
    return Rollout(prompts, prompt_mask, *columns, rows, k)


# --- 2. Score ---------------------------------------------------------------------------------------------------------
def can_share_prompts(model, args):
    """Whether a model can read a prompt once for its rows: not if recomputed layers would fill the cache twice, or if
    layers other than attention keep a state."""
    layers = DynamicCache(config=model.config).layers
    return not args.gradient_checkpointing and not any(isinstance(x, LinearAttentionCacheLayerMixin) for x in layers)


def response_forward(model, r, args):
    """(b, T, V) logits / temperature of the response tokens, in float32. Position P-1+t of the input predicts response
    token t, both counted from 0. A prompt is read once for its rows; the backward pass sums the gradients."""
    P, T = r.prompts.shape[1], r.responses.shape[1]
    ids, mask = r.joined()  # (b, P+T) each
    if can_share_prompts(model, args):
        cache = DynamicCache(config=model.config)
        first = read_prompts(model, r.prompts, r.prompt_mask, cache)  # (b, 1, V)
        keep = torch.arange(T - 1, device=mask.device)  # the last token predicts nothing
        rest = forward(model, r.responses, mask, past_key_values=cache, use_cache=True, logits_to_keep=keep)
        logits = torch.cat([first, rest.logits], 1)
    else:
        keep = torch.arange(P - 1, P + T - 1, device=mask.device)
        logits = forward(model, ids, mask, use_cache=False, logits_to_keep=keep).logits
    return logits.float().div_(args.temperature)  # in place, since it is the largest tensor


def token_logprobs(logits, tokens):
    """(B, T) log-probability of each token under logits (B, T, V)."""
    return logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


@torch.no_grad()
def read_logprobs(model, rollout, args):
    """(B, T) log-probabilities of the responses under a model, read in micro-batches of b rows."""
    logprobs = torch.zeros(rollout.mask.shape, device=args.device)
    rows = torch.arange(len(logprobs), device=args.device)
    for index in rollout.micro_batches(rows, args):
        r = rollout.select(index)
        with autocast(args):
            logits = response_forward(model, r, args)  # (b, T, V)
        logprobs[index, : r.mask.shape[1]] = token_logprobs(logits, r.responses)
    return all_reduce(logprobs)  # a sum: each process has zeros in the rows of the others


def score_groups(rollout, reward_fns, tokenizer, args):
    """Adds the rewards (B,) of each function to the rollout, and the scores (B,): the weighted sum of the rewards,
    minus the penalty for a missing stop token. A None counts as 0; if all are None, the score is the group's mean."""
    rollout.reward_table = {name: f(rollout, tokenizer, args) for name, f in reward_fns.items()}
    table = torch.stack(list(rollout.reward_table.values()))  # (functions, B)
    require(not table.isinf().any(), "a function of --reward-fn returned an infinite reward")
    weights = table.new_tensor(args.reward_weights or [1.0] * len(table))
    scores = (table * weights[:, None]).nansum(0)
    if args.stop_token:  # without stop tokens, no response ends
        scores = torch.where(rollout.ended, scores, scores - args.missing_eos_penalty)
    rollout.unscored = table[weights != 0].isnan().all(0)
    known = scores.masked_fill(rollout.unscored, math.nan)
    known = known.cpu().double().view(-1, rollout.k)  # a mean of equal scores is then exact
    means = known.nanmean(1, keepdim=True).nan_to_num()  # 0 in a group without any: its advantages are 0
    rollout.scores = known.where(known.isfinite(), means).flatten().to(scores)


# --- 3. Reward, and 4. advantage --------------------------------------------------------------------------------------
def masked_sum(x, mask):
    """Sums over real tokens. Values on padding are ignored, even NaN."""
    return x.masked_fill(~mask, 0.0).sum()


def leave_one_out(rewards, k):
    """(B,) each reward minus the mean of the other k-1 in its group (Ahmadian et al. 2024, sec. 3).

    A group is k neighbouring rows. With k = 3: [1, 2, 6, 0, 0, 0] -> [-3, -1.5, 4.5, 0, 0, 0]
    """
    groups = rewards.view(-1, k)  # (B/k, k)
    others = (groups.sum(1, keepdim=True) - groups) / (k - 1)
    return (groups - others).flatten()


def rloo_advantages(scores, non_score_reward, k, token_level_kl):
    """Advantages from the scores (B,) and the KL part of the reward, -kl_coef * KL (B, T).

    If a response is one action, (B, 1): its KL is part of its reward, and of the others' baselines (TRL). If each token
    is one, (B, T): its KL and that of later tokens are added to an advantage of the scores (REINFORCE++, OpenRLHF).
    """
    if not token_level_kl:
        return leave_one_out(scores + non_score_reward.sum(1), k)[:, None]
    kl_to_go = non_score_reward.flip(1).cumsum(1).flip(1)  # (B, T)
    return leave_one_out(scores, k)[:, None] + kl_to_go


# --- 5. Loss ----------------------------------------------------------------------------------------------------------
def action_logprobs(logprobs, mask, token_level_kl):
    """Log-probabilities of the actions: of tokens (B, T), without masking padding, or of responses (B, 1)."""
    if token_level_kl:
        return logprobs
    return logprobs.masked_fill(~mask, 0.0).sum(1, keepdim=True)


def policy_loss(logprobs, old_logprobs, advantages, mask, cliprange):
    """Clipped losses (B, T) (PPO, eq. 7), the ratio, and where the clipped loss was the larger. There the gradient is
    0: the ratio has left the clip range in the direction that the advantage favours."""
    ratio = (logprobs - old_logprobs).masked_fill(~mask, 0.0).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    return torch.max(unclipped, clipped), ratio, clipped > unclipped


# --- 6. Update --------------------------------------------------------------------------------------------------------
def update(policy, optimizer, rollout, args):
    """Steps 5 and 6: `num_ppo_epochs` passes over the batch, with one optimiser step for each mini-batch.

    The gradient of a mini-batch is that of the mean loss over its actions, however it is split into micro-batches and
    among processes: clip_gradient averages over processes, so each divides its sum by the actions / WORLD_SIZE.
    """
    totals = Counter()  # over actions or tokens
    norms = []  # of the gradients
    for _ in range(args.num_ppo_epochs):
        order = torch.randperm(args.batch_size).to(args.device)
        for rows in order.split(args.batch_size // args.num_mini_batches):  # (b,) row numbers
            optimizer.zero_grad()
            num_actions = rollout.actions[rows].sum() / WORLD_SIZE
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
                new = action_logprobs(logprobs, r.mask, args.token_level_kl)  # (b, 1), or (b, T)
                old = action_logprobs(r.old_logprobs, r.mask, args.token_level_kl)
                pg_loss, ratio, pg_clipped = policy_loss(new, old, r.advantages, r.actions, args.cliprange)
                loss = masked_sum(pg_loss, r.actions) / num_actions
                loss.backward()
                seen = {
                    "loss/policy_avg": pg_loss,
                    "policy/clipfrac_avg": pg_clipped,
                    "policy/approxkl_avg": 0.5 * (new - old) ** 2,
                    "val/ratio": ratio,
                    "ratio_squared": ratio**2,
                    "actions": torch.ones_like(ratio),
                }
                sums.update({name: masked_sum(x.detach(), r.actions) for name, x in seen.items()})  # a Counter adds
                error = ((logprobs.detach() - r.old_logprobs).exp() - 1).abs()
                seen = {"entropy": entropy, "error": error, "tokens": torch.ones_like(error)}
                sums.update({name: masked_sum(x, r.mask) for name, x in seen.items()})
            reduced = all_reduce(torch.stack(list(sums.values()))).tolist()
            sums = dict(zip(sums, reduced))
            if not norms:
                first_error = sums["error"] / sums["tokens"]
            totals.update(sums)
            norm = clip_gradient(optimizer.param_groups[0]["params"], args.max_grad_norm or math.inf)
            norms.append(norm.item())
            if math.isfinite(norms[-1]):  # otherwise the step would turn the weights into NaN
                optimizer.step()
    optimizer.zero_grad()
    stats = {name: x / totals["actions"] for name, x in totals.items() if "/" in name}
    stats["val/ratio_var"] = max(0.0, totals["ratio_squared"] / totals["actions"] - stats["val/ratio"] ** 2)
    stats["policy/entropy_avg"] = totals["entropy"] / totals["tokens"]
    stats["policy/first_ratio_error"] = first_error  # before the first step
    stats["policy/grad_norm"] = sum(norms) / len(norms)
    stats["val/skipped_steps"] = len(norms) - sum(map(math.isfinite, norms))
    return stats


# === End of the algorithm. Next: its metrics, then what every program of this kind needs =============================
def rollout_stats(rollout, kl_coef):
    """The metrics of a batch before the update, under TRL's names."""
    mask = rollout.mask
    score = rollout.scores.mean()
    kl = masked_sum(rollout.kl, mask) / len(mask)
    groups = rollout.scores.view(-1, rollout.k)  # (B/k, k)
    stats = {
        "objective/kl": kl,
        "objective/entropy": masked_sum(-rollout.old_logprobs, mask) / len(mask),  # from the sampled tokens
        "objective/non_score_reward": -kl_coef * kl,
        "objective/rlhf_reward": score - kl_coef * kl,
        "objective/scores": score,
        "objective/scores_std": rollout.scores.std(correction=0),
        "objective/equal_groups": (groups == groups[:, :1]).all(1).float().mean(),
        "val/num_eos_tokens": rollout.ended.sum(),
        "val/eos_share": rollout.ended.float().mean(),
        "val/response_length": mask.sum(1).float().mean(),
    }
    for name, rewards in rollout.reward_table.items():
        known = rewards[~rewards.isnan()]
        stats[f"rewards/{name}/mean"] = known.mean()
        stats[f"rewards/{name}/std"] = known.std()  # with Bessel's correction, as in TRL
    return {name: x.item() for name, x in stats.items()}


def show_samples(run, rollout, tokenizer):
    """Prints four episodes, and saves their tensors for tools/xray.py."""
    r = rollout.select(torch.arange(len(rollout.rows))[:4])
    prompts = tokenizer.batch_decode([row["input_ids"] for row in r.rows])
    responses = [tokenizer.decode(ids[real]) for ids, real in zip(r.responses, r.mask)]
    scores = [f"{score:.2f}" for score in r.scores.tolist()]
    run.show({"prompt": prompts, "response": responses, "score": scores}, vars(r))


# --- Models and data --------------------------------------------------------------------------------------------------
CURVES = "scores$|/mean$|objective/kl$|eos_share$"  # metrics of curves.png


def load_models(args):
    """Loads the policy, and makes a copy, the reference. Without dropout, rollout and loss use one distribution."""
    policy = load_model(AutoModelForCausalLM, args.model)
    policy.stop_token_ids = []
    for text in args.stop_token:
        ids = eos_tokens(policy) if text == "eos" else policy.tokenizer.encode(text, add_special_tokens=False)
        require(text == "eos" or len(ids) == 1, f"--stop-token {text!r} is not one token of {args.model}, but {ids}")
        policy.stop_token_ids += ids
    print(f"a response ends at one of {policy.tokenizer.convert_ids_to_tokens(policy.stop_token_ids)}")
    policy.generation_config.eos_token_id = policy.stop_token_ids or None  # for programs that sample from it later
    policy.generation_config.do_sample = True  # the library refuses to save a temperature without it
    reference = deepcopy(policy).requires_grad_(False)
    if args.lora_r:  # trains adapters of all linear layers, and nothing else (Hu et al. 2021)
        from peft import LoraConfig

        config = LoraConfig(r=args.lora_r, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        policy.add_adapter(config)
    place(policy, args)
    place(reference, args)
    return policy, reference


def load_functions(args):
    """The functions of --reward-fn by name, each a function of (rollout, tokenizer, args)."""
    reward_fns = {}
    for spec in args.reward_fn:
        file, _, name = spec.rpartition(":")
        require(Path(file).is_file(), f"--reward-fn {spec}: should be file.py:name, of a file that exists")
        require(name not in reward_fns, f"--reward-fn: two functions have the name {name!r}")
        reward_fns[name] = partial(function_reward, load_function(file, name))
    is_one_each = len(args.reward_weights or reward_fns) == len(reward_fns)
    require(is_one_each, "--reward-weights needs one number for each function of --reward-fn")
    return reward_fns


def choose_sizes(args, policy, prompts, k):
    """Returns the settings with learning rate and batch sizes filled in, and prints them. k: responses to a prompt."""
    prompt_length = max(len(row["input_ids"]) for row in prompts)
    longest = prompt_length + args.response_length
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
    tokens_of_a_row = args.response_length + prompt_length // k  # a prompt is read once for its k rows
    rows = max(1, (2048 if args.device == "cpu" else 8192) // tokens_of_a_row)
    rows = args.micro_batch_size or per_device or (rows // k * k or rows)  # whole groups, if one fits
    num_updates = args.total_episodes // batch_size
    is_whole = batch_size % parts == batch_size % (k * WORLD_SIZE) == 0
    require(is_whole, f"{batch_size} responses cannot be split into mini-batches, groups of {k}, and processes")
    require(num_updates, f"--total-episodes {args.total_episodes} is less than a batch of {batch_size}")
    print(f"policy: {args.model}, {size / 1e6:.2f}M parameters on {args.device}, learning rate {rate:.2g}")
    print(f"{num_updates} updates of {batch_size} responses, {rows} at a time")
    sizes = {"learning_rate": rate, "batch_size": batch_size, "micro_batch_size": rows}
    return replace(args, per_device_train_batch_size=None, **sizes)


# === From here on, a function has the same text in all scripts that have it ==========================================
# --- Rewards ----------------------------------------------------------------------------------------------------------
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
