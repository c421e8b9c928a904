# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0", "transformers==5.23.0", "datasets==5.2.0", "tyro==1.0.17", "wandb==0.31.0",
#     "matplotlib==3.11.2", "pydantic==2.14.3", "tqdm==4.70.1",
# ]
# ///
"""GRPO for language models: policy + answers that can be checked -> better policy.

For each batch of prompts, G responses to each (`num_generations`):
  1. sample     response y_1..y_T ~ pi(. | prompt), at the given temperature, up to and including the stop token
  2. score      one number for each response, usually from a check of its answer
  3. advantage  A_i = (score_i - mean of the group's scores) / their standard deviation (`scale_rewards`)
  4. loss       ratio_t = pi(y_t) / pi_old(y_t), or its geometric mean over the response (GSPO)
                loss_t = max(-A_i ratio_t, -A_i clip(ratio_t, 1-eps, 1+eps_high)) [+ beta ratio_t KL_t]
                KL_t = q/p - 1 - log(q/p), q = pi_ref(y_t), p = pi(y_t); pi_ref is a frozen first pi
                the loss is a weighted sum of all loss_t; `loss_type` sets the weights (`token_weights`)
  5. update     `num_ppo_epochs` passes over the batch, each with `num_mini_batches` optimiser steps

Shapes: B rows in a batch (b in a micro-batch), P prompt tokens, T response tokens, S tokens of any text, V vocabulary,
D hidden size. Below, G = 2, a prompt of 3 tokens, left-padded to P = 4, and responses of 4 and 6 tokens. A dot is
padding: it may hold any number, and is masked.

  input_ids     PAD  p1  p2  p3 | y1  y2  y3  EOS  .   .      row 0; the rows of a group, a prompt's, are neighbours
                PAD  p1  p2  p3 | z1  z2  z3  z4  z5  z6      row 1
  mask                          |  1   1   1   1   0   0      true up to and including the stop token
  logprobs, ratio, loss         |  *   *   *   *   .   .      one for each token
  score, A                                                    one for each row, the same for all of its tokens

Differences from RLOO: the mean includes the response itself; division by the standard deviation raises the weight of
prompts that are nearly always or nearly never answered right; each token has its own clipped ratio; by default there is
no KL. A group with equal scores gives no gradient.

Papers: GRPO 2402.03300 (eq. 3, 19); Dr. GRPO 2503.20783; DAPO 2503.14476; GSPO 2507.18071; CISPO 2506.13585; MaxRL
2602.02710. In short: lecture/grpo.py, 310 lines. Over several turns: agent.py.

  python grpo.py                       # the toy task: offline, half a minute on two CPU cores, right answers .4 to 1.0
  python grpo.py --model Qwen/Qwen3-0.6B --bf16 --dataset problems.jsonl --response-length 1024 \\
      --reward-fn rewards/verifiers.py:right_number    # on one GPU; problems.jsonl has the columns prompt and answer
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
from collections import defaultdict
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
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers import DynamicCache, StaticCache, get_scheduler, logging, set_seed
from transformers.activations import ACT2FN, GELUTanh
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.modeling_layers import GradientCheckpointingLayer

TOY = Path(__file__).resolve().parent / "toy"  # the embedded models and data
VERIFIER = f"{TOY.parent}/rewards/verifiers.py:right_number"

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
    # --- GRPO ---
    num_generations: Annotated[int, Field(ge=2)] = 8  # responses to each prompt. More: a better baseline
    loss_type: Literal["dapo", "grpo", "dr_grpo", "cispo"] = "dapo"  # see token_weights, surrogate_loss
    importance_sampling_level: Literal["token", "sequence"] = "token"  # of the ratio. GSPO: sequence, loss_type grpo
    scale_rewards: Literal["group", "batch", "mean", "none"] = "group"  # what divides advantages: see group_advantages
    baseline: Literal["mean", "none"] = "mean"  # of the scores of a group; none: the scores are the advantages (RFT)
    epsilon: Positive = 0.2  # the ratio is clipped to 1 - epsilon ... 1 + epsilon_high (GSPO: 3e-4)
    epsilon_high: Positive | None = None  # by default epsilon (DAPO: 0.28, GSPO: 4e-4); cispo: upper bound, default 5
    num_ppo_epochs: Annotated[Count, alias("--num-iterations")] = 1  # passes over each batch. Many: off policy
    num_mini_batches: Count = 1  # optimiser steps in one pass over the batch (TRL 0.16)
    beta: NonNegative = 0.0  # weight of the KL in the loss. 0: no reference is loaded (TRL: 0; DeepSeekMath: 0.04)
    mask_truncated_completions: bool = False  # exclude responses without a stop token from the loss (DAPO)
    dynamic_sampling: Natural = 0  # maximum number of extra batches, to replace groups with equal scores (DAPO)
    # --- Rollout ---
    response_length: Annotated[Count, alias("--max-completion-length")] = 16  # maximum tokens in a response
    temperature: Positive = 1.0  # divides the logits in rollout, reference and loss (TRL). Lower: less exploration
    stop_token: tuple[str, ...] = ("eos",)  # end of a response: eos (all of the model's), or tokens as texts
    missing_eos_penalty: NonNegative = 0.0  # subtracted from the score of a response without stop token (TRL)
    # --- Optimisation ---
    learning_rate: Positive | None = None  # by default from the policy's size, and ten times as high with LoRA
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup", "polynomial"] = "linear"  # TRL's
    warmup_ratio: Share = 0.0  # share of the run in which the learning rate warms up from 0
    weight_decay: NonNegative = 0.0  # weight decay of AdamW
    adam_betas: tuple[Share, Share] = (0.9, 0.999)  # betas of AdamW (OpenRLHF: 0.9 0.95)
    adam_epsilon: Positive = 1e-8  # epsilon of AdamW (torch and TRL; N+ details: 1e-5)
    max_grad_norm: Positive = 1.0  # the gradient is clipped to this norm
    # --- Batch sizes ---
    batch_size: Count = 64  # responses per update, on all GPUs together
    micro_batch_size: Count | None = None  # responses per pass; by default 2048 tokens on a CPU, 8192 on a GPU
    # --- Models: a folder, or a name on the hub ---
    model: Annotated[str, alias("--model-name-or-path")] = f"{TOY}/shells/sft"  # policy to start from
    reward_fn: Annotated[tuple[str, ...], alias("--reward-funcs")] = (VERIFIER,)  # functions, as file.py:name
    reward_weights: tuple[float, ...] = ()  # of these rewards; by default all 1 (TRL); 0: only logged
    lora_r: Natural = 0  # rank of LoRA adapters (peft), 0 for none
    bf16: bool = False  # run the models in bfloat16 (autocast); trained weights and optimiser state stay in float32
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: far less memory, a third slower
    # --- Data. A row has `prompt`, a text or messages that end with the user's; reward functions get all columns ---
    dataset: Annotated[str, alias("--dataset-name")] = f"{TOY}/shells/data/prompts"  # folder of SPLIT.jsonl, or hub
    dataset_config: Annotated[str | None, alias("--dataset-config-name")] = None  # of a hub dataset that has several
    dataset_train_split: str = "train"  # split to train on
    max_prompt_length: Count = 512  # prompts with more tokens are dropped; their number is printed (N+ details: 512)
    # --- Run ---
    seed: Natural = 1  # seed of responses, order of prompts, mini-batches, and adapters
    total_episodes: Count = 12_800  # number of responses to train on; 12,800 are one pass over the toy prompts
    output_dir: str | None = None  # folder for all output; by default a new folder runs/SCRIPT__SEED__TIME
    resume: Annotated[str | None, alias("--resume-from-checkpoint")] = None  # folder of a run to continue
    device: str = "cuda" if torch.cuda.is_available() else "cpu"  # cpu, cuda, mps; by default cuda if there is one
    save_steps: Count = 50  # updates between checkpoints, which hold the full state of the run
    save_total_limit: Count | None = None  # checkpoints to keep, also after the run; by default one, and none after it
    num_sample_generations: Natural = 10  # how often to print four episodes, besides after update 1 (TRL)
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works without an account)


# --- The loop, with the steps of the docstring ------------------------------------------------------------------------
def train(args):
    """Trains the policy. Saves it in the run's folder, with metrics, curves and a model card."""
    start(args)
    policy, reference = load_models(args)
    reward_fns = load_functions(args)
    prompts = load_prompts(args, policy.tokenizer)
    G = args.num_generations
    args = choose_sizes(args, policy, prompts, G)  # from here on, all sizes are set
    B = args.batch_size
    num_updates = args.total_episodes // B
    passes = range(1 + args.total_episodes * (1 + args.dynamic_sampling) // (G * len(prompts)))
    order = []
    for number in passes:
        order += shuffled(len(prompts), args.seed, number)

    options = {
        "betas": args.adam_betas,
        "eps": args.adam_epsilon,
        "weight_decay": args.weight_decay,
        "fused": True,  # ten times as fast on a CPU
    }
    optimizer = torch.optim.AdamW(policy.parameters(), args.learning_rate, **options)
    schedule = get_scheduler(args.lr_scheduler_type, optimizer, int(args.warmup_ratio * num_updates), num_updates)
    carry = {"num_draws": 0, "num_tokens": 0}  # what an update hands to the next; in checkpoints
    run = Run(args, num_updates, optimizer, schedule, carry, model=policy)
    for step in run.steps():
        set_seed(make_seed(args.seed, step))

        # 1. Sample, and 2. score
        first_draw = carry["num_draws"]
        rollout = sample_groups(policy, reward_fns, prompts, order, carry, args)
        if args.bf16 or args.device != "cpu":  # the sampler reads token by token: its rounding would matter
            rollout.old_logprobs = read_logprobs(policy, rollout, args)
        if args.beta:
            rollout.ref_logprobs = read_logprobs(reference, rollout, args)

        # 3. Advantage
        advantages = rollout.scores.masked_fill(rollout.unscored, 0.0)  # (B,)
        if args.baseline == "mean":
            require(args.scale_rewards != "mean" or advantages.min() >= 0, "--scale-rewards mean needs scores >= 0")
            advantages = group_advantages(rollout.scores, G, args.scale_rewards)
        rollout.advantages = advantages[:, None]  # (B, 1)
        rollout.loss_mask = rollout.mask  # (B, T)
        if args.mask_truncated_completions:
            rollout.loss_mask = rollout.mask & rollout.ended[:, None]

        # 4. Loss, and 5. update
        stats = update(policy, optimizer, rollout, args)
        stats |= rollout_stats(rollout, args)
        is_one = step > 1 or stats["policy/first_ratio_error"] < 0.1  # bfloat16 has 8 bits
        require(is_one, "the first ratio is not 1: does the model ignore the attention mask, or have dropout?")
        carry["num_tokens"] += (rollout.prompt_mask.sum() + rollout.mask.sum()).item()
        stats["num_tokens"] = carry["num_tokens"]
        stats["sampled_batches"] = carry["num_draws"] - first_draw
        stats["learning_rate"] = optimizer.param_groups[0]["lr"]
        stats["episode"] = step * B
        run.log(stats, "objective/scores", "frac_reward_zero_std")
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

    def micro_batches(self, index, args, is_first=None):
        """Splits row numbers into micro-batches of groups of similar lengths, to save padding; the processes take them
        in turns. Rows for which `is_first` (B,) is true come first."""
        lengths = self.prompt_mask.sum(1) + self.mask.sum(1)  # (B,)
        lengths = lengths.view(-1, self.k).amax(1)  # (B/k,) of the longest row of each group
        index = index.sort().values
        by_length = lengths[index // self.k].argsort(stable=True)
        index = index[by_length]
        if is_first is not None:
            index = index[is_first[index].long().argsort(descending=True, stable=True)]
        return index.tensor_split(WORLD_SIZE * math.ceil(len(index) / (WORLD_SIZE * args.micro_batch_size)))


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
        for index in share.split(4 * args.micro_batch_size):  # without gradients, there is room for more
            part = sample(policy, prompts[index], prompt_mask[index], uniforms[index], args.temperature)
            parts.append(part)
    columns = [all_gather(torch.cat(x)) for x in zip(*parts)]  # responses, mask, ended, logprobs
    padding = args.max_prompt_length - prompts.shape[1]  # so that all batches have the same width
    prompts = F.pad(prompts, (padding, 0))
    prompt_mask = F.pad(prompt_mask, (padding, 0))
    return Rollout(prompts, prompt_mask, *columns, rows, k)


def sample_groups(policy, reward_fns, prompts, order, carry, args):
    """Steps 1 and 2: samples and scores G responses to each prompt.

    With --dynamic-sampling, groups without a gradient (their scores are equal, or no response is in the loss) are
    replaced by groups from further batches (DAPO, sec. 3.2), as far as there are enough.
    """
    G = args.num_generations
    num_groups = args.batch_size // G
    parts = []
    useful = []  # (B/G,) for each part
    for _ in range(1 + args.dynamic_sampling):
        draw = carry["num_draws"]
        carry["num_draws"] += 1
        rows = [prompts[i] for i in order[draw * num_groups : (draw + 1) * num_groups]]
        rollout = sample_batch(policy, rows, G, args)
        score_groups(rollout, reward_fns, policy.tokenizer, args)
        parts.append(rollout)
        useful.append(~is_equal(rollout.scores, G))
        if args.mask_truncated_completions:
            useful[-1] &= rollout.ended.view(-1, G).any(1)
        if args.dynamic_sampling and torch.cat(useful).sum() >= num_groups:
            break
    joined = copy(rollout)
    joined.rows = [row for part in parts for row in part.rows]
    for name, x in vars(rollout).items():
        if isinstance(x, Tensor):
            columns = [getattr(part, name) for part in parts]
            setattr(joined, name, torch.cat(columns))
    is_useless = ~torch.cat(useful).repeat_interleave(G)
    kept = is_useless.long().argsort(stable=True)[: args.batch_size].sort().values
    for name in reward_fns:
        rewards = torch.cat([part.reward_table[name] for part in parts])
        joined.reward_table[name] = rewards[kept]
    return joined.select(kept)  # without columns that are padding in all rows


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
    for index in rollout.micro_batches(rows, args)[RANK::WORLD_SIZE]:
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


def is_equal(scores, k):
    """(B/k,) true where all k scores of a group are equal: then no response is better than another."""
    groups = scores.view(-1, k)
    return (groups == groups[:, :1]).all(1)


# --- 3. Advantage -----------------------------------------------------------------------------------------------------
def group_advantages(scores, G, scale):
    """(B,) each score minus the group's mean, divided by a standard deviation (TRL) or by that mean (MaxRL).

    A group is G neighbouring rows. With G = 4, scores [1, 0, 0, 0] give
        none   [.75, -.25, -.25, -.25]
        group  [1.5, -.5, -.5, -.5]: divided by .5. Rare successes and rare failures weigh more (see Dr. GRPO)
        mean   [3, -1, -1, -1]: only rare successes weigh more, as in the gradient of log P(right answer)
    """
    groups = scores.view(-1, G)
    groups = groups - groups[:, :1]  # so that equal scores give exactly 0, in spite of rounding
    advantages = groups - groups.mean(1, keepdim=True)  # (B/G, G)
    if scale == "group":
        advantages = advantages / (groups.std(1, keepdim=True) + 1e-4)  # 1e-4: never 0 (TRL)
    if scale == "batch":
        advantages = advantages / (scores.std() + 1e-4)
    if scale == "mean":
        advantages = advantages / (scores.view(-1, G).mean(1, keepdim=True) + 1e-4)
    return advantages.flatten()


# --- 4. Loss ----------------------------------------------------------------------------------------------------------
def masked_sum(x, mask):
    """Sums over real tokens. Values on padding are ignored, even NaN."""
    return x.masked_fill(~mask, 0.0).sum()


def importance_ratio(logprobs, old_logprobs, mask, level):
    """pi / pi_old of each token (B, T), or its geometric mean over a response (B, 1) (GSPO, eq. 7)."""
    log_ratio = (logprobs - old_logprobs).masked_fill(~mask, 0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return log_ratio.exp()


def clip_bounds(args):
    """The bounds of the ratio. CISPO has only an upper bound, by default 5 (as TRL advises)."""
    if args.loss_type == "cispo":
        return 0.0, args.epsilon_high or 5.0
    return 1 - args.epsilon, 1 + (args.epsilon_high or args.epsilon)


def surrogate_loss(ratio, logprobs, advantages, args):
    """The clipped loss of each token (B, T), or of each response (B, 1) with sequence-level ratios.

    Its gradient is 0 where the ratio has left the clip range in the direction that the advantage favours. CISPO keeps
    every gradient, weighted by the clipped ratio (MiniMax-M1, eq. 4; without a lower bound, as in TRL).
    """
    clipped_ratio = ratio.clamp(*clip_bounds(args))
    if args.loss_type == "cispo":
        return -clipped_ratio.detach() * advantages * logprobs
    return torch.max(-advantages * ratio, -advantages * clipped_ratio)


def token_weights(mask, num_rows, num_tokens, args):
    """(b, T) weights of the tokens' losses. The loss of a mini-batch is the weighted sum.

    grpo: all responses have the same weight, so a token of a long response has a lower one, and wrong responses become
    longer (Dr. GRPO, sec. 3.1). In the others, all tokens have the same weight: a constant (dr_grpo), or 1 / tokens of
    an average mini-batch (dapo, cispo). num_rows and num_tokens: of the batch / (mini-batches x processes).
    """
    lengths = mask.sum(1, keepdim=True).clamp(min=1)  # (b, 1)
    if args.loss_type == "grpo":
        return mask / (num_rows * lengths)
    if args.loss_type == "dr_grpo":
        return mask / (num_rows * args.response_length)
    return mask / num_tokens


def k3_estimate(logprobs, ref_logprobs):
    """(B, T) estimate of KL(policy || reference) from the sampled token alone, by k3, which is unbiased and never
    negative (Schulman 2020, "Approximating KL")."""
    log_ratio = logprobs - ref_logprobs
    return torch.expm1(-log_ratio) + log_ratio


# --- 5. Update --------------------------------------------------------------------------------------------------------
def with_gradient_first(rollout, rows, args):
    """This process's micro-batches of a mini-batch, and whether each needs a backward pass. Rows without gradient come
    last, with a forward pass for the metrics. The first one always has both, so that each weight has a gradient."""
    has_gradient = (rollout.advantages[:, 0] != 0) | (args.beta > 0)  # (B,), false where all scores are equal
    parts = rollout.micro_batches(rows, args, has_gradient)
    first_rows = torch.stack([index[0] for index in parts[::WORLD_SIZE]])  # if one has no gradient, no later row has it
    needs_backward = has_gradient[first_rows].tolist()  # the device is read once
    needs_backward[0] = True
    return list(zip(parts[RANK::WORLD_SIZE], needs_backward))


def update(policy, optimizer, rollout, args):
    """Steps 4 and 5: passes over the batch, with one optimiser step for each mini-batch. Its gradient is a weighted sum
    over its tokens, however they are split: clip_gradient averages over processes, so the weights are those of one."""
    num_parts = args.num_mini_batches * WORLD_SIZE
    num_rows = args.batch_size / num_parts
    num_tokens = rollout.loss_mask.sum().clamp(min=1) / num_parts  # on average
    lower, upper = clip_bounds(args)
    logs = []  # a dict for each mini-batch
    for _ in range(args.num_ppo_epochs):
        order = torch.randperm(args.batch_size).to(args.device)
        for rows in order.split(args.batch_size // args.num_mini_batches):  # (b,) row numbers
            optimizer.zero_grad()
            sums = defaultdict(float)  # metric -> [sum, number of tokens]
            for index, needs_backward in with_gradient_first(rollout, rows, args):
                r = rollout.select(index)
                mask = r.loss_mask
                with torch.set_grad_enabled(needs_backward), autocast(args):
                    logits = response_forward(policy, r, args)  # (b, T, V)
                log_softmax = logits.log_softmax(-1)  # as in token_logprobs, but once for the entropy, too
                logprobs = log_softmax.gather(-1, r.responses[..., None]).squeeze(-1)  # (b, T)
                with torch.no_grad():
                    entropy = -log_softmax.exp().mul_(log_softmax).sum(-1)  # (b, T)
                del logits, log_softmax  # the largest tensors of the update: the graph keeps what it needs
                ratio = importance_ratio(logprobs, r.old_logprobs, mask, args.importance_sampling_level)  # or (b, 1)
                losses = surrogate_loss(ratio, logprobs, r.advantages, args)
                kl = torch.zeros_like(logprobs)
                if args.beta:
                    kl = k3_estimate(logprobs, r.ref_logprobs.where(mask, logprobs))  # 0 outside the loss
                    kl = kl * ratio  # its gradient is then an unbiased estimate of the gradient of the KL (TRL, 1.13)
                weights = token_weights(mask, num_rows, num_tokens, args)  # (b, T)
                loss = masked_sum((losses + args.beta * kl) * weights, mask)
                if needs_backward:
                    loss.backward()
                is_low = (ratio < lower) & (r.advantages < 0)  # clipped: no gradient from the advantage, but with cispo
                is_high = (ratio > upper) & (r.advantages > 0)
                log_ratio = logprobs - r.old_logprobs
                seen = {
                    "kl": kl,
                    "entropy": entropy,
                    "val/ratio": ratio,
                    "clip_ratio/low_mean": is_low,
                    "clip_ratio/high_mean": is_high,
                    "clip_ratio/region_mean": is_low | is_high,
                    "policy/approxkl_avg": 0.5 * log_ratio**2,
                    "policy/first_ratio_error": (log_ratio.exp() - 1).abs(),
                }
                for name, x in seen.items():  # (b, T), or (b, 1) with sequence-level ratios
                    where = mask if x.shape == mask.shape else mask.any(1, keepdim=True)
                    sums[name] += torch.stack([masked_sum(x.detach(), where), where.sum()])
                sums["loss"] += torch.stack([loss.detach(), torch.zeros_like(loss)]) / WORLD_SIZE
            totals, counts = all_reduce(torch.stack(list(sums.values()))).unbind(1)
            means = totals / counts.clamp(min=1)
            log = dict(zip(sums, means.tolist()))
            log["grad_norm"] = clip_gradient(optimizer.param_groups[0]["params"], args.max_grad_norm).item()
            if math.isfinite(log["grad_norm"]):  # otherwise the step would turn the weights into NaN
                optimizer.step()
            logs.append(log)
    optimizer.zero_grad()
    stats = {name: sum(log[name] for log in logs) / len(logs) for name in logs[0]}
    stats["policy/first_ratio_error"] = logs[0]["policy/first_ratio_error"]  # before any step
    stats["val/skipped_steps"] = sum(not math.isfinite(log["grad_norm"]) for log in logs)
    return stats


# === End of the algorithm. Next: its metrics, then what every program of this kind needs =============================
def rollout_stats(rollout, args):
    """The metrics of a batch before the update, under TRL's names."""
    scores, ended, lengths = rollout.scores, rollout.ended, rollout.mask.sum(1).float()
    terminated = lengths[ended] if ended.any() else torch.zeros(1)
    stats = {
        "reward": scores.mean(),
        "reward_std": scores.std(),
        "objective/scores": scores.mean(),
        "frac_reward_zero_std": is_equal(scores, rollout.k).float().mean(),
        "completions/mean_length": lengths.mean(),
        "completions/min_length": lengths.min(),
        "completions/max_length": lengths.max(),
        "completions/clipped_ratio": 1 - ended.float().mean(),
        "completions/mean_terminated_length": terminated.mean(),
        "completions/min_terminated_length": terminated.min(),
        "completions/max_terminated_length": terminated.max(),
    }
    if args.beta:
        k1 = (rollout.old_logprobs - rollout.ref_logprobs).masked_fill(~rollout.mask, 0.0)
        stats["objective/kl"] = k1.sum(1).mean()
    right = next(iter(rollout.reward_table.values())).view(-1, rollout.k) >= 1  # by the first function
    stats[f"pass@{rollout.k}"] = right.any(1).float().mean()
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
CURVES = "^reward$|/mean$|zero_std$|clipped_ratio$|mean_length$|^entropy$"  # metrics of curves.png


def load_models(args):
    """Loads the policy, and with --beta makes a copy, the reference. They have no dropout: rollout and loss use one
    distribution."""
    policy = load_model(AutoModelForCausalLM, args.model)
    policy.stop_token_ids = []
    for text in args.stop_token:
        ids = eos_tokens(policy) if text == "eos" else policy.tokenizer.encode(text, add_special_tokens=False)
        require(text == "eos" or len(ids) == 1, f"--stop-token {text!r} is not one token of {args.model}, but {ids}")
        policy.stop_token_ids += ids
    print(f"a response ends at one of {policy.tokenizer.convert_ids_to_tokens(policy.stop_token_ids)}")
    policy.generation_config.eos_token_id = policy.stop_token_ids or None  # for programs that sample from it later
    policy.generation_config.do_sample = True  # the library refuses to save a temperature without it
    reference = deepcopy(policy).requires_grad_(False) if args.beta else None
    if args.lora_r:  # trains adapters of all linear layers, and nothing else (Hu et al. 2021)
        from peft import LoraConfig

        config = LoraConfig(r=args.lora_r, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        policy.add_adapter(config)
    for model in filter(None, [policy, reference]):
        place(model, args)
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
    tokens_of_a_row = args.response_length + prompt_length // k  # a prompt is read once for its k rows
    rows = max(1, (2048 if args.device == "cpu" else 8192) // tokens_of_a_row)
    rows = args.micro_batch_size or (rows // k * k or rows)  # whole groups, if one fits
    num_updates = args.total_episodes // args.batch_size
    parts = math.lcm(args.num_mini_batches * WORLD_SIZE, k * WORLD_SIZE)
    require(args.batch_size % parts == 0, f"{args.batch_size} responses are no multiple of {parts}: see --batch-size")
    require(num_updates, f"--total-episodes {args.total_episodes} is less than a batch of {args.batch_size}")
    print(f"policy: {args.model}, {size / 1e6:.2f}M parameters on {args.device}, learning rate {rate:.2g}")
    print(f"{num_updates} updates of {args.batch_size} responses, {rows} at a time")
    return replace(args, learning_rate=rate, micro_batch_size=rows)


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
