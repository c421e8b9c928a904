# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0",
#     "transformers==5.23.0",
#     "datasets==5.2.0",
#     "tyro==1.0.17",
#     "wandb==0.31.0",
#     "matplotlib==3.11.2",
#     "pydantic==2.14.3",
#     "rich==15.0.0",
#     "tqdm==4.70.1",
# ]
# ///
"""GRPO for language models: policy + reward -> better policy, with the mean score of a group as the baseline.

For each batch of prompts, G responses to each (`num_generations`):
  1. sample     response y_1..y_T ~ pi(. | prompt), at the given temperature, up to and including the stop token
  2. score      one number per response, usually from a check of its answer; --dynamic-sampling replaces groups with
                equal scores
  3. advantage  A_i = (score_i - mean of the group's scores) / their standard deviation (`scale_rewards`)
  4. loss       ratio_t = pi(y_t) / pi_old(y_t), or its geometric mean over the response (GSPO);
                loss_t = max(-A_i ratio_t, -A_i clip(ratio_t, 1-eps, 1+eps_high)) [+ beta ratio_t KL_t];
                pi_old: the policy of step 1; KL_t = q/p - 1 - log(q/p), q = pi_ref(y_t), p = pi(y_t)
                the loss is a weighted sum of all loss_t; `loss_type` sets the weights (`token_weights`)
  5. update     `num_ppo_epochs` passes over the batch, each with `num_mini_batches` optimiser steps

Tensor layout for G = 2, a prompt of 3 tokens (left-padded to 4), T = 6, and responses of 4 and 6 tokens:

  model input   PAD  p1  p2  p3 | y1  y2  y3  EOS  -   -      row 0; the responses to a prompt are neighbouring rows
                PAD  p1  p2  p3 | z1  z2  z3  z4   z5  z6     row 1
  mask                          |  1   1   1   1   0   0      true up to and including the stop token
  logprobs, ratio, loss         |  *   *   *   *   .   .      one per token
  score, A                                                    one per row, the same for all of its tokens

The policy pi is the language model being trained. A rollout is a batch of its responses. The KL, in nats, measures how
far pi has moved from the reference, a frozen copy of the initial policy. By default the loss has no KL term, and no
reference is loaded.

Differences from RLOO: the group's mean includes the response itself. Division by the standard deviation raises the
weight of prompts that are nearly always or nearly never answered right. Each token is an action, with its own clipped
ratio. If all G scores of a group are equal, the group's advantages are 0, and it gives no gradient:
`frac_reward_zero_std` is the share of these groups.
Papers: Shao et al. 2024 (GRPO, arXiv 2402.03300, eq. 3 and 19); Liu et al. 2025 (Dr. GRPO, 2503.20783); Yu et al. 2025
(DAPO, 2503.14476); Zheng et al. 2025 (GSPO, 2507.18071); MiniMax 2025 (CISPO, 2506.13585); Tajwar et al. 2026 (MaxRL,
2602.02710). docs/grpo.md has a glossary of the metrics.

  python grpo.py                       # the toy task: offline, half a minute on two CPU cores, right answers .4 to 1.0
  python grpo.py --model Qwen/Qwen3-0.6B --bf16 --dataset problems.jsonl --response-length 1024 \\
      --reward-fn rewards/verifiers.py:right_number    # on one GPU; problems.jsonl has the columns prompt and answer

The programs in tools/ that judge a policy use this file's functions for prompts, settings and rewards, whatever script
trained it.

Shapes: B rows in a batch (G per prompt), b in a micro-batch, P prompt tokens (left-padded), T response tokens
(right-padded), S tokens of any text, V vocabulary, D hidden size.
"""

import ctypes
import glob
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy, deepcopy
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from functools import cache, lru_cache, partial
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # before importing torch: limits how long idle threads spin

import datasets
import numpy as np
import pandas
import pydantic
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import tyro
from filelock import FileLock
from huggingface_hub import constants, get_session
from matplotlib.figure import Figure
from pydantic import Field
from rich.console import Console
from rich.table import Table
from rich.text import Text
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as recompute_activations
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel, StaticCache, get_scheduler, set_seed
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.activations import ACT2FN, GELUTanh
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D
from transformers.utils import ModelOutput, find_adapter_config_file, logging

VERSION = "2026.11"  # as in CITATION.cff

# The rank of this process and the number of processes under torchrun; otherwise 0 and 1. All processes read the same
# data and draw the same random numbers; each computes its share of every batch
RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))

# --- Settings. A type limits the values; the comment beside or above a setting is its help text

Positive = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0, lt=2**32)]
Name = Annotated[str, Field(min_length=1)]


@pydantic.dataclasses.dataclass  # checks the values
class Args:
    # --- GRPO ---
    # responses per prompt. More: a better baseline
    num_generations: Annotated[int, Field(ge=2)] = 8
    # weights of tokens. dapo, cispo: all equal; grpo: equal sums for all responses; dr_grpo: a constant; bnpo: as dapo,
    # but within each micro-batch
    loss_type: Literal["dapo", "grpo", "dr_grpo", "bnpo", "cispo"] = "dapo"
    # level of the ratio: token, or sequence (GSPO; use it with loss_type grpo)
    importance_sampling_level: Literal["token", "sequence"] = "token"
    # divides advantages by: the standard deviation of the group or batch; the group's mean (MaxRL, for scores of 0 or
    # more); 1 (none, Dr. GRPO)
    scale_rewards: Literal["group", "batch", "mean", "none"] = "group"
    # mean: subtract the group's mean from each score; none: the scores are the advantages, without scaling (RFT)
    baseline: Literal["mean", "none"] = "mean"
    epsilon: Positive = 0.2  # the ratio is clipped to 1 - epsilon ... 1 + epsilon_high (GSPO: 3e-4)
    # by default epsilon (DAPO: 0.28, GSPO: 4e-4); cispo: upper bound, default 5. With one step per batch, the ratio is 1
    epsilon_high: Positive | None = None
    delta: Positive | None = None  # upper bound of the ratio where A < 0; by default there is none (INTELLECT-2: 4)
    num_ppo_epochs: Count = 1  # passes over each batch (TRL: num_iterations). More: faster, but further off policy
    num_mini_batches: Count = 1  # optimiser steps in one pass over the batch (TRL 0.16)
    beta: NonNegative = 0.0  # weight of the KL in the loss. 0: no reference is loaded (TRL: 0; DeepSeekMath: 0.04)
    use_bias_correction_kl: bool = True  # multiply the KL by the ratio, for an unbiased gradient (TRL, from 1.13 on)
    mask_truncated_completions: bool = False  # exclude responses without a stop token from the loss (DAPO)
    dynamic_sampling: Natural = 0  # maximum number of extra batches, to replace groups with equal scores (DAPO)

    # --- Rollout ---
    # maximum tokens in a response (TRL: max_completion_length); dr_grpo divides the loss by it
    response_length: Count = 16
    # if set, each rollout has a random limit, from this to response_length (cf. TRL 0.7)
    response_length_min: Count | None = None
    temperature: Positive = 1.0  # divides the logits in rollout, reference and loss (TRL). Lower: less exploration
    # tokens that end a response: eos (all EOS tokens of the model), none, token ids, or texts of one token each
    stop_token: tuple[Name, ...] = ("eos",)
    missing_eos_penalty: NonNegative = 0.0  # subtracted from the score of a response without a stop token (TRL)
    # responses sampled at once (TRL); by default computed from free memory; changes only the rounding
    local_rollout_forward_batch_size: Count | None = None

    # --- Optimisation ---
    # learning rate of AdamW; by default computed from the policy's size, and ten times as high with LoRA
    learning_rate: Positive | None = None
    lr_scheduler_type: Name = "linear"  # name of a transformers schedule that depends only on the step (TRL: linear)
    warmup_ratio: Share = 0.0  # share of the run in which the learning rate warms up from 0
    weight_decay: NonNegative = 0.0  # weight decay of AdamW
    adam_betas: tuple[Decay, Decay] = (0.9, 0.999)  # betas of AdamW (OpenRLHF: 0.9 0.95)
    adam_epsilon: Positive = 1e-8  # epsilon of AdamW (torch and TRL; N+ details: 1e-5)
    max_grad_norm: Positive = 1.0  # the gradient is clipped to this norm

    # --- Batch sizes ---
    # responses per update, on all GPUs together; by default 64
    batch_size: Count | None = None
    micro_batch_size: Count | None = None  # responses per forward/backward pass; only bnpo depends on it
    # TRL's name for micro_batch_size. If batch_size is not set, it becomes this x gradient_accumulation_steps x
    # num_mini_batches x GPUs
    per_device_train_batch_size: Count | None = None
    gradient_accumulation_steps: Count = 1  # with per_device_train_batch_size: passes per optimiser step (TRL)

    # --- Models: a folder, or a name on the hub ---
    # the initial policy, which is also the reference of the KL
    model: Name = "toy/shells/sft"
    reward_model: Name = "toy/reward_model"  # a classifier with one label; its tokenizer may differ from the policy's
    # reward_model, or file.py:name of a function; several are added up
    reward_fn: tuple[Name, ...] = ("rewards/verifiers.py:right_number",)
    reward_weights: tuple[Weight, ...] = ()  # weights of these rewards; by default all 1 (TRL); 0: only logged
    lora_r: Natural = 0  # rank of LoRA adapters (peft), 0 for none; the reference is the policy without them
    lora_alpha: Positive = 32.0  # the adapter's output is scaled by lora_alpha / lora_r
    lora_target_modules: Name = "all-linear"  # layers to adapt: all-linear, or a regular expression for their names
    bf16: bool = False  # run the models in bfloat16 (autocast); trained weights and optimiser state stay in float32
    attn_implementation: Name | None = None  # eager, sdpa, flash_attention_2, ...; by default transformers' own choice
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: far less memory, a third slower
    trust_remote_code: bool = False  # run Python code that comes with a model; only if you have read that code

    # --- Data ---
    # folder, file (jsonl, json, csv, parquet) or hub name
    dataset: Name = "toy/shells/data/prompts"
    dataset_config: Name | None = None  # configuration of a hub dataset that has several
    dataset_train_split: Name = "train"  # split to train on
    dataset_test_split: Name | None = None  # split to evaluate on, or none; by default validation, if there is one
    prompt_column: Name = "prompt"  # prompts: texts, or lists of {role, content} messages for the chat template
    max_prompt_length: Count = 512  # prompts with more tokens are dropped; their number is printed (N+ details: 512)

    # --- Additions to GRPO ---
    # file.py:name of an environment, a class with step(text) -> answer, reward, is_over; replaces --reward-fn
    env: Name | None = None
    max_turns: Count | None = None  # with --env: maximum turns in an episode; --response-length includes the answers
    # weight of a mixture of experts' load-balancing loss, computed per micro-batch
    aux_loss_coef: NonNegative = 0.0
    num_eval_prompts: Count = 256  # test prompts in an evaluation; each gets num_generations + 1 answers
    eval_temperature: Positive = 0.01  # sampling temperature in evaluations (TRL: 0.01, for its tables)
    seed: Natural = 1  # seed of responses, order of prompts, mini-batches, and adapters

    # --- Run ---
    # folder of a run to continue. It keeps its settings, except those given on the command line
    resume: Name | None = None
    # number of responses to train on; 12,800 are one pass over the toy prompts
    total_episodes: Count = 12_800
    # passes over the prompts, without those that dynamic_sampling replaces; if set, total_episodes is ignored
    num_train_epochs: Positive | None = None
    exp_name: Name = "grpo"  # name of this run, in its folder and on W&B
    output_dir: Name | None = None  # folder for all output; by default a new folder runs/NAME__SEED__TIME
    # cpu, cuda, mps; by default cuda if there is one
    device: Name = field(default_factory=lambda: "cuda" if torch.cuda.is_available() else "cpu")
    save_steps: Count = 50  # updates between checkpoints, which hold the full state of the run
    save_total_limit: Count = 2  # number of newest checkpoints to keep
    eval_steps: Count = 50  # updates between evaluations; the last update is always followed by one
    num_sample_generations: Natural = 10  # number of tables of responses to print, plus one after update 1 (TRL)
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works without an account)
    wandb_project_name: Name = "rlhf"  # W&B project, with --track
    wandb_entity: Name | None = None  # W&B team, with --track

    # --- Many GPUs: torchrun --nproc-per-node N ---
    # sharding over GPUs (FSDP2): 0 none; 2 gradients and optimiser state; 3 also the weights
    zero_stage: Literal[0, 2, 3] = 0
    shard_size: Count | None = None  # GPUs that together hold one copy, e.g. those of a node (ZeRO++); default: all
    offload: bool = False  # keep the shards in CPU memory until they are needed: slow, for models that do not fit
    gather_for_rollout: bool = True  # with zero_stage 3: gather the weights once per rollout, not for every token


# --- The loop, with the steps of the docstring ------------------------------------------------------------------------


def train(args: Args) -> None:
    """Trains the policy. Saves it in the run's folder, with metrics, curves and a model card."""
    check_args(args)
    start(args)
    asked = args

    policy = load_policy(args)
    reference = place(make_reference(args, policy) if args.beta else None, args)  # before the next model: saves memory
    place(policy, args)
    reward_model = place(load_reward_model(args, policy), args)

    prompts, eval_prompts = load_prompts(args, policy, reward_model)
    G = args.num_generations
    args = choose_sizes(args, policy, prompts, G)
    require(args.batch_size % G == 0, f"--num-generations {G} does not divide a batch of {args.batch_size} responses")
    if args.env:
        reward_fns = {"env": lambda r: r.rewards.sum(1)}
    else:
        reward_fns = make_reward_fns(args, policy, reward_model)
        try_reward_fns(reward_fns, prompts, policy, args)
    show_first_row({"prompt": as_read(prompts[0]["input_ids"], policy.tokenizer).append("⟨answer⟩", "green")})
    num_updates = args.total_episodes // args.batch_size

    optimizer = make_optimizer(args, policy)
    schedule = get_scheduler(args.lr_scheduler_type, optimizer, int(args.warmup_ratio * num_updates), num_updates)
    memory = {"num_draws": 0, "num_tokens": 0}  # saved in checkpoints, besides the weights
    run = Run(args, num_updates, optimizer, schedule, memory, asked, model=policy)
    for step in run.steps():
        set_seed(make_seed(args.seed, step))

        # 1. Sample, and 2. score
        with run.clock("rollout"):
            rollout, num_draws = sample_groups(policy, prompts, reward_fns, memory["num_draws"], args)
            memory["num_draws"] += num_draws

        # 3. Advantage
        if args.baseline == "mean":
            advantages = group_advantages(rollout.scores, G, args.scale_rewards)  # (B,)
        else:
            is_unscored = unscored(rollout.rewards_by_name, args.reward_weights)
            advantages = rollout.scores.masked_fill(is_unscored, 0.0)
        rollout.advantages = advantages[:, None]  # (B, 1)
        rollout.loss_mask = rollout.written
        if args.mask_truncated_completions:
            rollout.loss_mask = rollout.written & rollout.ended[:, None]

        # Log-probabilities, for ratio and KL
        with run.clock("score"):
            stats = read_logprobs(policy, reference, rollout, step, args)

        # 4. Loss, and 5. update
        with run.clock("update"):
            stats |= update(policy, optimizer, rollout, args)
        check_first_ratio(stats["policy/first_ratio_error"], step, args)
        stats |= rollout_stats(rollout, args)
        memory["num_tokens"] += rollout.inputs()["attention_mask"].sum().item()
        stats["sampled_batches"] = num_draws
        stats["num_tokens"] = memory["num_tokens"]
        stats["learning_rate"] = optimizer.param_groups[0]["lr"]

        if eval_prompts and run.is_due(args.eval_steps):
            stats |= evaluate(policy, reward_fns, eval_prompts, args)
        report(run, stats, rollout, policy, args)
        schedule.step()
    run.finish()


# --- 1. Sample --------------------------------------------------------------------------------------------------------


@dataclass
class Rollout:
    """A batch of episodes: B prompts, one response to each, and the results of later steps."""

    prompts: Tensor  # (B, P), left-padded
    prompt_mask: Tensor  # (B, P), true on real tokens
    responses: Tensor  # (B, T), right-padded
    mask: Tensor  # (B, T), true up to and including the stop token; with --env, up to the end of the episode
    ended: Tensor  # (B,), true if there is a stop token; with --env, if the environment ended the episode with it
    old_logprobs: Tensor  # (B, T), under the policy that sampled the responses; see read_logprobs
    examples: list[dict]  # the B rows of the dataset that the prompts come from
    rewards_by_name: dict[str, Tensor] = field(default_factory=dict)  # (B,) for each reward function, NaN for None
    scores: Tensor | None = None  # (B,), weighted sum of rewards, minus the penalty
    ref_logprobs: Tensor | None = None  # (B, T), if KL is in the loss
    advantages: Tensor | None = None  # (B, 1), the same for all tokens of a response
    written: Tensor | None = None  # (B, T), true on tokens from the policy, not from the environment (--env)
    loss_mask: Tensor | None = None  # (B, T), true on tokens in the loss, which are a subset of `written`
    rewards: Tensor | None = None  # (B, T), with --env: the reward of a turn, on its last token
    num_turns: Tensor | None = None  # (B,), with --env

    def __post_init__(self):
        if self.written is None:
            self.written = self.mask

    def inputs(self) -> dict[str, Tensor]:
        """Joins prompts and responses into a model input (B, P+T). Positions count real tokens only."""
        attention_mask = torch.cat([self.prompt_mask, self.mask], 1).long()
        return {
            "input_ids": torch.cat([self.prompts, self.responses], 1),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),  # GPT-2 would also count padding
        }

    def select(self, index: Tensor) -> "Rollout":
        """Selects episodes by row number, and removes columns that are padding in all of them.

        Widths are rounded up to multiples of 8: on some devices each new shape costs time.
        """
        P = math.ceil(self.prompt_mask[index].sum(1).max() / 8) * 8
        T = math.ceil(self.mask[index].sum(1).max() / 8) * 8
        part = copy(self)
        part.examples = [self.examples[i] for i in index.tolist()]
        part.rewards_by_name = {name: x[index] for name, x in self.rewards_by_name.items()}
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

    def by_length(self, rows: Tensor) -> Tensor:
        """Sorts row numbers by length, so that neighbouring rows need little padding. Rows with the same prompt stay
        together, in the place of their longest row."""
        lengths = self.prompt_mask.sum(1) + self.mask.sum(1)
        prompt_of = self.prompts.cpu().unique(dim=0, return_inverse=True)[1].to(rows.device)  # (B,)
        longest = torch.zeros_like(lengths).scatter_reduce(0, prompt_of, lengths, "amax")[prompt_of]
        rows = rows[prompt_of[rows].argsort(stable=True)]
        return rows[longest[rows].argsort(stable=True)]

    @torch.no_grad()
    def in_micro_batches(
        self, function: Callable[["Rollout"], Tensor], args: Args, micro_batches: list[Tensor] | None = None
    ) -> Tensor:
        """Applies a function to micro-batches of b episodes, and joins the results (b, T) or (b,) for all B episodes.

        The function runs without gradient, under autocast. By default, the rows of a micro-batch have similar lengths,
        which saves padding. Each process computes its share.
        """
        B, T = self.mask.shape
        if micro_batches is None:
            rows = torch.arange(B, device=self.mask.device)
            micro_batches = deal(self.by_length(rows), args)[RANK::WORLD_SIZE]
        parts = []
        for index in micro_batches:
            with autocast(args):
                x = function(self.select(index))
            if x.dim() == 2:
                x = F.pad(x, (0, T - x.shape[1]))
            parts.append(x)
        share = torch.cat(parts)
        result = share.new_zeros(B, *share.shape[1:])
        result[torch.cat(micro_batches)] = share
        return all_reduce(result)  # a sum: each process has zeros in the rows of the others


RewardFns = dict[str, Callable[[Rollout], Tensor]]  # reward functions by name: each returns rewards (B,), NaN for none


def deal(rows: Tensor, args: Args) -> tuple[Tensor, ...]:
    """Splits row numbers into micro-batches of nearly equal size, the same number for each process. Process r takes
    micro-batches r, r + WORLD_SIZE, ..."""
    num_rounds = math.ceil(len(rows) / (WORLD_SIZE * args.micro_batch_size))
    return rows.tensor_split(num_rounds * WORLD_SIZE)


def response_mask(responses: Tensor, stop_token_ids: list[int]) -> tuple[Tensor, Tensor]:
    """Returns a mask (B, T), true up to and including the first stop token, and `ended` (B,), true where there is a
    stop token.

    The pad token plays no role, so it may be equal to the stop token. With stop token 0:
        responses [[5, 0, 7, 0], [5, 6, 7, 8]]  ->  mask [[1, 1, 0, 0], [1, 1, 1, 1]], ended [1, 0]
    """
    is_stop = torch.isin(responses, responses.new_tensor(stop_token_ids)).long()
    stops_before = is_stop.cumsum(1) - is_stop
    return stops_before == 0, is_stop.any(1)


def sample_categorical(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Samples one token per row of logits (B, V), from uniform numbers (B,). Returns tokens and logprobs (B,).

    The token is the first whose cumulative probability exceeds the uniform number. With probabilities .2 .5 .3, the
    number .6 gives the second token, since .2 <= .6 < .7. torch.multinomial would draw its own random numbers. Here the
    caller draws one per token, so a response does not depend on the other rows or the batch size.
    """
    logprobs = logits.log_softmax(1)
    cdf = logprobs.exp().cumsum(1)
    threshold = uniforms[:, None] * cdf[:, -1:]  # (B, 1), scaled because the sum of the probabilities is not exactly 1
    tokens = torch.searchsorted(cdf, threshold, right=True).clamp(max=logits.shape[1] - 1)  # (B, 1)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)


class OneTypeCache(StaticCache):
    """A static key-value cache with one dtype. Under autocast, keys with rotary embeddings are float32 and values are
    bfloat16; attention converts both to bfloat16."""

    def update(self, keys: Tensor, values: Tensor, *others, **options) -> tuple[Tensor, Tensor]:
        """Adds the keys and values of new tokens to a layer. Returns all keys and values of the layer."""
        return super().update(keys.to(values.dtype), values, *others, **options)


def prefill(
    model: nn.Module, prompts: Tensor, prompt_mask: Tensor, cache: Cache, **options
) -> tuple[ModelOutput, Tensor]:
    """Fills a key-value cache with prompts (B, P). Equal prompts are computed once: returns the output for the b
    distinct prompts, and for each of the B rows the index of its prompt among them."""
    columns = torch.stack([prompts, prompt_mask]).cpu()  # (2, B, P), on the CPU: some devices do not support unique
    different, row_of = columns.unique(dim=1, return_inverse=True)
    ids, mask = different.to(prompts.device)  # (b, P) each
    row_of = row_of.to(prompts.device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    output = model(**inputs, past_key_values=cache, use_cache=True, **options)
    cache.reorder_cache(row_of)  # (b, ...) -> (B, ...)
    return output, row_of


@torch.no_grad()
def sample(
    policy: nn.Module, prompts: Tensor, prompt_mask: Tensor, uniforms: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Samples one response to each prompt (B, P) from softmax(logits / temperature), with a key-value cache.

    Ignores the model's generation config (top_p, ...). `uniforms` (B, T) are the random numbers.
    Returns responses (B, T), mask (B, T), ended (B,), and the logprobs (B, T) of the sampled tokens, 0 on padding.
    """
    B, T = uniforms.shape
    P = prompts.shape[1]
    tokens = F.pad(prompts[:, -1:], (0, T))  # (B, 1 + T): the last prompt token, and the response as it grows
    logprobs = torch.zeros_like(uniforms)  # (B, T)
    attention_mask = F.pad(prompt_mask.long(), (0, T), value=1)  # (B, P + T)
    positions = attention_mask.cumsum(1)[:, P - 1 :] - 1  # (B, 1 + T)
    has_stopped = torch.zeros_like(prompt_mask[:, 0])  # (B,)
    stops = prompts.new_tensor(policy.stop_token_ids)
    cache = OneTypeCache(config=policy.config, max_cache_len=P + T)  # allocated once, at full size
    if P > 1:  # all but the last token, with which the loop starts
        prefill(policy, prompts[:, :-1], prompt_mask[:, :-1], cache, logits_to_keep=1)
    rows = torch.arange(B, device=prompts.device)  # rows still in the forward pass, and in the cache
    look_every = 1 if prompts.device.type == "cpu" else 8  # steps between checks; each check waits for the GPU
    for t in range(T):
        output = policy(
            input_ids=tokens[rows, t : t + 1],
            attention_mask=attention_mask[rows, : P + t],  # the P + t tokens so far: sliding windows count columns
            position_ids=positions[rows, t : t + 1],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits = output.logits[:, -1].float() / temperature  # (rows, V)
        tokens[rows, t + 1], logprobs[rows, t] = sample_categorical(logits, uniforms[rows, t])
        has_stopped[rows] |= torch.isin(tokens[rows, t + 1], stops)
        if (t + 1) % look_every:
            continue
        unfinished = (~has_stopped[rows]).nonzero().squeeze(1)
        if not all_reduce(torch.tensor(len(unfinished))):  # sharded weights need all processes in each pass
            break
        if 0 < len(unfinished) < 0.75 * len(rows):  # copying the cache costs less than computing ended rows
            cache.reorder_cache(unfinished)
            rows = rows[unfinished]
    responses = tokens[:, 1:]
    mask, ended = response_mask(responses, policy.stop_token_ids)  # false on tokens sampled after the stop token
    return responses.masked_fill(~mask, policy.tokenizer.pad_token_id), mask, ended, logprobs.masked_fill(~mask, 0.0)


def repeat(examples: list[dict], k: int) -> list[dict]:
    """Repeats each example k times. The k neighbouring rows are a group."""
    return [example for example in examples for _ in range(k)]


def sample_batch(policy: nn.Module, examples: list[dict], args: Args) -> Rollout:
    """Step 1: samples a response to each prompt of a batch, `local_rollout_forward_batch_size` rows at a time."""
    rows = [example["input_ids"] for example in examples]
    prompts, prompt_mask = pad(rows, policy.tokenizer, args, "left")  # (B, P)
    T = args.response_length
    if args.response_length_min:
        T = int(torch.randint(args.response_length_min, T + 1, ()))
    uniforms = torch.rand(len(examples), T).to(prompts.device)
    parts = []
    with autocast(args), gathered(policy, args):
        share = torch.arange(len(examples))[RANK::WORLD_SIZE]
        for index in share.split(args.local_rollout_forward_batch_size):
            part = sample(policy, prompts[index], prompt_mask[index], uniforms[index], args.temperature)
            parts.append(part)
    responses, mask, ended, logprobs = (all_gather(torch.cat(x)) for x in zip(*parts))
    rollout = Rollout(prompts, prompt_mask, responses, mask, ended, logprobs, examples)
    return rollout.select(torch.arange(len(examples), device=prompts.device))  # all rows, without padding columns


def equal_groups(scores: Tensor, k: int) -> Tensor:
    """Returns (B/k,), true where all k scores of a group are equal. Such a group has no gradient, unless a KL or a
    router's loss adds one."""
    groups = scores.view(-1, k)
    return (groups == groups[:, :1]).all(1)


def useless_groups(rollout: Rollout, args: Args) -> Tensor:
    """Returns (B/G,), true for groups whose scores give no gradient: all are equal, or no response is in the loss."""
    is_useless = equal_groups(rollout.scores, args.num_generations)
    if args.mask_truncated_completions:
        is_useless |= ~rollout.ended.view(-1, args.num_generations).any(1)
    return is_useless


def sample_groups(
    policy: nn.Module, prompts: list[dict], reward_fns: RewardFns, first_draw: int, args: Args
) -> tuple[Rollout, int]:
    """Steps 1 and 2: samples G responses to each prompt and scores them. Also returns the number of batches drawn.

    With --dynamic-sampling, groups whose scores give no gradient are replaced by groups from further batches (DAPO, sec.
    3.2). If there are still too few, they fill the batch.
    """
    G = args.num_generations
    num_groups = args.batch_size // G
    parts = []
    num_useful = 0
    draw_batch = play_batch if args.env else sample_batch
    for draw in range(1 + args.dynamic_sampling):
        examples = batch(prompts, first_draw + draw, num_groups, args.seed)
        part = draw_batch(policy, repeat(examples, G), args)
        part.rewards_by_name, part.scores = score_responses(part, reward_fns, args, G)
        can_divide = args.scale_rewards != "mean" or part.scores.min() >= 0  # a negative mean would reverse the signs
        require(can_divide, "--scale-rewards mean needs scores of 0 or more")
        parts.append(part)
        num_useful += int((~useless_groups(part, args)).sum())
        if num_useful >= num_groups:
            break
    rollout = parts[0]
    if args.dynamic_sampling:
        rollout = join(parts)
        is_useless = useless_groups(rollout, args).repeat_interleave(G)  # (rows,)
        rows = is_useless.long().argsort(stable=True)  # the other groups come first
        rollout = rollout.select(rows[: args.batch_size])
    return rollout, len(parts)


def join(parts: list[Rollout]) -> Rollout:
    """Joins rollouts into one, padded to the greatest width."""
    joined = copy(parts[0])
    joined.examples = [row for part in parts for row in part.examples]
    joined.rewards_by_name = {
        name: torch.cat([part.rewards_by_name[name] for part in parts]) for name in parts[0].rewards_by_name
    }
    for name, x in vars(parts[0]).items():
        if not isinstance(x, Tensor):
            continue
        rows = [row for part in parts for row in getattr(part, name)]
        if x.dim() == 1:
            x = torch.stack(rows)
        else:
            side = "left" if name in ("prompts", "prompt_mask") else "right"
            x = pad_sequence(rows, batch_first=True, padding_side=side)
        setattr(joined, name, x)
    return joined


# --- 2. Score ---------------------------------------------------------------------------------------------------------


def can_share_prompts(model: nn.Module, args: Args) -> bool:
    """Whether the model can compute a prompt once for all of its rows. It cannot with layers other than attention, with
    --gradient-checkpointing or with --aux-loss-coef."""
    layers = DynamicCache(config=model.config).layers
    is_attention = not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)
    return is_attention and not args.gradient_checkpointing and not args.aux_loss_coef


def shares_prompts(model: nn.Module, r: Rollout, args: Args) -> bool:
    """Whether to compute each distinct prompt only once. The model must support it, and a prompt must occur more than
    once in these rows. Several processes do so even without repeats: with sharded weights, all of them must make the
    same forward passes."""
    return can_share_prompts(model, args) and (WORLD_SIZE > 1 or len(r.prompts.cpu().unique(dim=0)) < len(r.prompts))


def response_forward(model: nn.Module, r: Rollout, args: Args, **options) -> tuple[Tensor, Tensor | float]:
    """Returns logits / temperature (b, T, V) that predict the response tokens, in float32, and the load-balancing loss
    of a mixture of experts, or 0.

    The logits at position P-1+t predict response token t, counted from 0. Each token attends only to earlier tokens, so
    all rows of a group have the same states on the prompt. If `shares_prompts`, each prompt goes through the model
    once, and its keys and values are copied to its rows. The backward pass of the copy sums the gradients of these
    rows.
    """
    P = r.prompts.shape[1]
    T = r.responses.shape[1]
    inputs = r.inputs()
    if shares_prompts(model, r, args):
        cache = DynamicCache(config=model.config)
        output, row_of = prefill(model, r.prompts, r.prompt_mask, cache, logits_to_keep=1)
        first_logits = output.logits[row_of]  # (b, 1, V), at the last prompt token
        inputs |= {"input_ids": r.responses, "position_ids": inputs["position_ids"][:, P:]}  # the mask covers both
        keep = torch.arange(T - 1, device=r.mask.device)  # the last token predicts nothing
        output = model(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=keep, **options)
        logits = torch.cat([first_logits, output.logits], 1)
    else:
        keep = torch.arange(P - 1, P + T - 1, device=r.mask.device)
        output = model(**inputs, use_cache=False, logits_to_keep=keep, **options)
        logits = output.logits
    logits = logits.float().div_(args.temperature)  # in place, since it is the largest tensor
    return logits, output.get("aux_loss", 0.0)


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """(B, T) log-probability of each token under logits (B, T, V)."""
    return logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


def token_logprobs_and_entropy(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Returns token_logprobs, and the entropy (B, T) in nats, which has no gradient."""
    logprobs = logits.log_softmax(-1)  # once for both
    with torch.no_grad():
        entropy = -logprobs.exp().mul_(logprobs).sum(-1)
    return logprobs.gather(-1, tokens[..., None]).squeeze(-1), entropy


def logprobs_under(model: nn.Module, r: Rollout, args: Args) -> Tensor:
    """Returns the log-probabilities (b, T) of the response tokens under a model."""
    logits, _ = response_forward(model, r, args)
    return token_logprobs(logits, r.responses)


def first_pass(rollout: Rollout, args: Args) -> list[Tensor]:
    """Returns the micro-batches of the first epoch of `update`, in the same order. Does not change the random state."""
    with torch.random.fork_rng(devices=[]):
        order = torch.randperm(len(rollout.mask)).to(rollout.mask.device)
    mini_batches = order.split(len(order) // args.num_mini_batches)
    return [index for rows in mini_batches for index, _ in with_gradient_first(rollout, rows, args)]


def read_logprobs(
    policy: nn.Module, reference: nn.Module | None, rollout: Rollout, step: int, args: Args
) -> dict[str, float]:
    """With --beta, adds the reference's log-probabilities (B, T) to the rollout. With bf16 or TF32, replaces the
    sampler's by the policy's.

    The sampler reads token by token, which rounds differently. Here complete responses are read in the micro-batches of
    the update, with the same padding, so the ratio before its first step is exactly 1. With bf16 or TF32, also returns
    the sampler's error, the mean of |ratio - 1|.
    """
    stats = {}
    micro_batches = None
    if ratio_rounding(args) > 1e-3:
        micro_batches = first_pass(rollout, args)
        logprobs = rollout.in_micro_batches(lambda r: logprobs_under(policy, r, args), args, micro_batches)
        ratio = (logprobs - rollout.old_logprobs)[rollout.written].exp()
        stats["policy/sampler_error"] = (ratio - 1).abs().mean().item()
        check_first_ratio(stats["policy/sampler_error"], step, args)
        rollout.old_logprobs = logprobs
    if args.beta:
        with adapter_off(policy, reference):
            rollout.ref_logprobs = rollout.in_micro_batches(
                lambda r: logprobs_under(reference, r, args), args, micro_batches
            )
    return stats


def score_responses(
    rollout: Rollout, reward_fns: RewardFns, args: Args, G: int = 1
) -> tuple[dict[str, Tensor], Tensor]:
    """Returns the rewards (B,) of each reward function, by name, and the scores (B,). G is the number of rows per
    prompt.

    A score is the weighted sum of the rewards, minus the penalty for a missing stop token.
    """
    rewards = {name: function(rollout) for name, function in reward_fns.items()}
    is_unscored = unscored(rewards, args.reward_weights)
    scores = weighted_sum(rewards, args.reward_weights)
    require(scores.isfinite().all(), "a function of --reward-fn returned an infinite reward")
    if args.stop_token != ("none",):  # with none, no response has a stop token
        # as in TRL; in the N+ details, such scores become -1
        scores = torch.where(rollout.ended, scores, scores - args.missing_eos_penalty)
    if is_unscored.any():
        scores = fill_in(scores, is_unscored, G)
    return rewards, scores


def unscored(rewards: dict[str, Tensor], weights: tuple[float, ...]) -> Tensor:
    """Returns (B,), true where no reward function returned a reward. Functions of weight 0 do not count."""
    table = torch.stack(list(rewards.values()))  # (K, B)
    if weights:
        table = table[table.new_tensor(weights) != 0]
    return table.isnan().all(0)


def fill_in(scores: Tensor, is_unscored: Tensor, G: int) -> Tensor:
    """Gives unscored responses the mean score of the other responses to the same prompt, or of the batch if there are
    none, or 0. The group's mean does not change. G = 4: [1, ?, 0, 0] -> [1, 1/3, 0, 0]"""
    known = scores.masked_fill(is_unscored, math.nan).cpu().double()  # in float64 the mean of equal scores is exact
    means = known.view(-1, G).nanmean(1).repeat_interleave(G)
    means = means.where(means.isfinite(), known.nanmean().nan_to_num())
    return torch.where(is_unscored, means.to(scores), scores)


def weighted_sum(rewards: dict[str, Tensor], weights: tuple[float, ...]) -> Tensor:
    """Returns the weighted sum (B,) of several rewards (B,). By default all weights are 1. NaN counts as 0."""
    table = torch.stack(list(rewards.values()))  # (K, B)
    if weights:
        table = table * table.new_tensor(weights)[:, None]
    return table.nansum(0)


# --- 3. Advantage -----------------------------------------------------------------------------------------------------


def group_advantages(scores: Tensor, G: int, scale: str) -> Tensor:
    """Subtracts the group's mean from each score (B,), then divides by a standard deviation (TRL, `scale_rewards`) or
    by the mean (MaxRL).

    A group is G neighbouring rows. With G = 4, scores [1, 0, 0, 0] give
        none   [.75, -.25, -.25, -.25]
        group  [1.5, -.5, -.5, -.5]: divided by the group's standard deviation, .5. Rare successes get a higher weight,
               and so do rare failures (criticised in Dr. GRPO)
        mean   [3, -1, -1, -1]: divided by the group's mean, .25. Only rare successes get a higher weight. This is the
               gradient of log p, where p is the probability of a right answer
    1e-4 avoids a division by 0 in groups with equal scores.
    """
    groups = scores.view(-1, G)
    groups = groups - groups[:, :1]  # so that equal scores give exactly 0, in spite of rounding in the mean
    advantages = groups - groups.mean(1, keepdim=True)  # (B/G, G)
    if scale == "group":
        advantages = advantages / (groups.std(1, keepdim=True) + 1e-4)
    if scale == "batch":
        advantages = advantages / (scores.std() + 1e-4)
    if scale == "mean":
        advantages = advantages / (scores.view(-1, G).mean(1, keepdim=True) + 1e-4)
    return advantages.flatten()


# --- 4. Loss ----------------------------------------------------------------------------------------------------------


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sums over real tokens. Values on padding are ignored, even NaN."""
    return x.masked_fill(~mask, 0.0).sum()


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, level: str) -> Tensor:
    """Returns pi / pi_old of each token (B, T), or its geometric mean over a response (B, 1) (GSPO, eq. 7)."""
    log_ratio = (logprobs - old_logprobs).masked_fill(~mask, 0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return log_ratio.exp()


def clip_bounds(args: Args) -> tuple[float, float]:
    """Returns the bounds of the ratio. CISPO has only an upper bound, by default 5 (as TRL advises)."""
    if args.loss_type == "cispo":
        return 0.0, args.epsilon_high or 5.0
    return 1 - args.epsilon, 1 + (args.epsilon_high or args.epsilon)


def surrogate_loss(ratio: Tensor, logprobs: Tensor, advantages: Tensor, args: Args) -> Tensor:
    """Returns the clipped loss of each token (B, T), or of each response (B, 1) with sequence-level ratios.

    Its gradient is 0 where the ratio has left the clip range in the direction that the advantage favours. In the other
    direction, the loss is not clipped; for A < 0, it has no upper limit unless `delta` is set. CISPO keeps the gradient
    of every token: an ordinary policy gradient, weighted by the clipped and detached ratio (MiniMax-M1, eq. 4; without
    a lower bound, as in TRL).
    """
    lower, upper = clip_bounds(args)
    clipped_ratio = ratio.clamp(lower, upper)
    if args.loss_type == "cispo":
        return -clipped_ratio.detach() * advantages * logprobs
    if args.delta is not None:
        ratio = ratio.clamp(max=args.delta)
    return torch.max(-advantages * ratio, -advantages * clipped_ratio)


def token_weights(mask: Tensor, num_rows: float, num_tokens: float, args: Args) -> Tensor:
    """Returns the weights (b, T) of the tokens' losses. The loss of a mini-batch is the weighted sum.

    dapo, cispo  1 / tokens: all tokens of the batch have the same weight, so a long response counts more
    grpo         1 / (rows * tokens of the row): all responses have the same weight. The tokens of a long wrong response
                 are penalised less than those of a short one, so wrong responses become longer (Dr. GRPO, sec. 3.1)
    dr_grpo      1 / (rows * response_length): all tokens have the same weight, which does not depend on the batch
    bnpo         1 / (micro-batches * tokens of the micro-batch): the result depends on the micro-batch size

    `num_rows` and `num_tokens` are the numbers in the batch, divided by (mini-batches * processes). So all mini-batches
    are divided by the same number. If each were divided by its own number of tokens, a token would count more in a
    mini-batch of short responses. With one response per mini-batch, dapo would then equal grpo.
    """
    lengths = mask.sum(1, keepdim=True).clamp(min=1)  # (b, 1)
    if args.loss_type == "grpo":
        return mask / (num_rows * lengths)
    if args.loss_type == "dr_grpo":
        return mask / (num_rows * args.response_length)
    if args.loss_type == "bnpo":
        return mask * len(mask) / (num_rows * mask.sum().clamp(min=1))
    return mask / num_tokens


def k3_estimate(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Estimates KL(policy || reference) from the sampled token alone, by k3 (B, T) (Schulman 2020, "Approximating KL").

    It is unbiased and never negative.
    """
    log_ratio = logprobs - ref_logprobs
    return torch.expm1(-log_ratio) + log_ratio


# --- 5. Update --------------------------------------------------------------------------------------------------------


def with_gradient_first(rollout: Rollout, rows: Tensor, args: Args) -> list[tuple[Tensor, bool]]:
    """Splits a mini-batch into micro-batches. Returns those of this process, and whether each needs a backward pass.

    Rows with advantage 0 (groups with equal scores) have no gradient, unless the loss has a KL or a router's term. They
    come last, and have only a forward pass, for their metrics. Not with bnpo, where a token's weight depends on the
    other rows of its micro-batch. The first micro-batch always has a backward pass, so that each weight has a gradient,
    even if it is 0.
    """
    has_gradient = rollout.advantages[:, 0] != 0
    if args.beta or args.aux_loss_coef or args.loss_type == "bnpo":
        has_gradient = torch.ones_like(has_gradient)
    rows = rollout.by_length(rows)
    rows = rows[has_gradient[rows].long().argsort(descending=True, stable=True)]
    parts = deal(rows, args)
    first_rows = torch.stack([part[0] for part in parts[::WORLD_SIZE]])  # if one has no gradient, no later row has one
    needs_backward = has_gradient[first_rows].tolist()  # the device is read once
    needs_backward[0] = True
    return list(zip(parts[RANK::WORLD_SIZE], needs_backward))


def policy_forward(policy: nn.Module, r: Rollout, args: Args) -> tuple[Tensor, Tensor, Tensor | float]:
    """Returns log-probabilities (b, T) of the responses, the policy's entropy (b, T), and the router's loss or 0.

    The logits (b, T, V) are the largest tensor of an update. They are freed here: the graph only needs their
    log-softmax.
    """
    options = {"output_router_logits": True} if args.aux_loss_coef else {}
    with autocast(args):
        logits, aux_loss = response_forward(policy, r, args, **options)
    logprobs, entropy = token_logprobs_and_entropy(logits, r.responses)
    return logprobs, entropy, aux_loss


def row_share(where: Tensor, mask: Tensor) -> Tensor:
    """Returns the share (b,) of each row's tokens for which `where`, (b, T) or (b, 1), is true; NaN in rows without
    tokens."""
    return (where & mask).sum(1) / mask.sum(1)


def update(policy: nn.Module, optimizer: torch.optim.Optimizer, rollout: Rollout, args: Args) -> dict[str, float]:
    """Steps 4 and 5: `num_ppo_epochs` passes over the batch, with one optimiser step for each mini-batch. Returns means
    over the steps, the number of skipped steps, and the error of the first ratio.

    The gradient of a mini-batch is a weighted sum over its tokens, however it is split into micro-batches (except with
    bnpo). Each process computes the gradient of its share. clip_gradient averages over processes, so the weights use
    the numbers of rows and tokens per process.
    """
    B, device = len(rollout.mask), rollout.mask.device
    num_parts = args.num_mini_batches * WORLD_SIZE
    num_rows = B / num_parts
    num_tokens = rollout.loss_mask.sum().clamp(min=1) / num_parts  # on average
    lower, upper = clip_bounds(args)
    logs = []  # a dict for each mini-batch
    steps = 0  # number of optimiser steps
    for _ in range(args.num_ppo_epochs):
        for rows in torch.randperm(B).to(device).split(B // args.num_mini_batches):  # (b,) row numbers
            optimizer.zero_grad()
            total_loss = torch.zeros((), device=device)
            sums = defaultdict(float)  # metric -> [sum, number of tokens]
            shares = []  # (b, 2) shares of each row's tokens that are clipped, below and above
            for index, needs_backward in with_gradient_first(rollout, rows, args):
                r = rollout.select(index)
                mask = r.loss_mask
                with torch.set_grad_enabled(needs_backward):
                    logprobs, entropy, aux_loss = policy_forward(policy, r, args)  # (b, T)
                ratio = importance_ratio(logprobs, r.old_logprobs, mask, args.importance_sampling_level)  # or (b, 1)
                losses = surrogate_loss(ratio, logprobs, r.advantages, args)
                kl = torch.zeros_like(logprobs)
                if args.beta:
                    kl = k3_estimate(logprobs, r.ref_logprobs.where(mask, logprobs))  # 0 outside the loss
                    if args.use_bias_correction_kl:
                        kl = kl * ratio  # its gradient is then an unbiased estimate of the gradient of the KL
                weights = token_weights(mask, num_rows, num_tokens, args)  # (b, T)
                loss = masked_sum((losses + args.beta * kl) * weights, mask)
                if needs_backward:
                    (loss + args.aux_loss_coef * aux_loss * len(index) / num_rows).backward()

                total_loss += loss.detach()
                # Clipped: no gradient from the advantage, except with cispo
                is_low = (ratio < lower) & (r.advantages < 0)
                is_high = (ratio > upper) & (r.advantages > 0)
                shares.append(torch.stack([row_share(is_low, mask), row_share(is_high, mask)], 1))
                seen = {
                    "kl": kl,
                    "entropy": entropy,
                    "policy/approxkl_avg": 0.5 * (logprobs - r.old_logprobs) ** 2,
                    "val/ratio": ratio,
                    "clip_ratio/low_mean": is_low,
                    "clip_ratio/high_mean": is_high,
                    "clip_ratio/region_mean": is_low | is_high,
                    "policy/first_ratio_error": ((logprobs - r.old_logprobs).exp() - 1).abs(),
                }
                for name, x in seen.items():  # (b, T), or (b, 1) with sequence-level ratios
                    where = mask if x.shape == mask.shape else mask.any(1, keepdim=True)
                    sums[name] += torch.stack([masked_sum(x.detach(), where), where.sum()])

            totals, counts = all_reduce(torch.stack(list(sums.values()))).unbind(1)
            stats = dict(zip(sums, (totals / counts.clamp(min=1)).tolist()))
            stats["loss"] = all_reduce(total_loss).item() / WORLD_SIZE
            low, high = all_gather(torch.cat(shares)).cpu().unbind(1)  # (rows,)
            stats["clip_ratio/low_min"] = min(low[low >= 0].tolist(), default=0.0)
            stats["clip_ratio/high_max"] = max(high[high >= 0].tolist(), default=0.0)
            stats["grad_norm"] = clip_gradient(optimizer.param_groups[0]["params"], args.max_grad_norm).item()
            if math.isfinite(stats["grad_norm"]):  # otherwise the step would turn the weights into NaN
                reshard(policy)  # frees gathered weights, which the step does not change
                optimizer.step()
                steps += 1
            logs.append(stats)
    optimizer.zero_grad()
    means = {name: sum(log[name] for log in logs) / len(logs) for name in logs[0]}
    means["policy/first_ratio_error"] = logs[0]["policy/first_ratio_error"]  # only rounding: before any step
    return means | {"val/skipped_steps": len(logs) - steps}


# === End of the algorithm. Next: its metrics and options, then the code that every training script needs ============


def rollout_stats(rollout: Rollout, args: Args) -> dict[str, float]:
    """Computes the metrics of a batch before the update, under TRL's names."""
    scores = rollout.scores
    lengths = rollout.written.sum(1).float()
    terminated = lengths[rollout.ended]
    if len(terminated) == 0:
        terminated = torch.zeros(1)
    stats = {
        "reward": scores.mean(),
        "reward_std": scores.std(),
        "objective/scores": scores.mean(),
        "objective/scores_std": scores.std(correction=0),
        "frac_reward_zero_std": equal_groups(scores, args.num_generations).float().mean(),
        "completions/mean_length": lengths.mean(),
        "completions/min_length": lengths.min(),
        "completions/max_length": lengths.max(),
        "completions/clipped_ratio": 1 - rollout.ended.float().mean(),
        "completions/mean_terminated_length": terminated.mean(),
        "completions/min_terminated_length": terminated.min(),
        "completions/max_terminated_length": terminated.max(),
        "rewards/unscored": unscored(rollout.rewards_by_name, args.reward_weights).sum(),
    }
    if args.beta:
        k1 = rollout.old_logprobs - rollout.ref_logprobs
        stats["objective/kl"] = k1.masked_fill(~rollout.written, 0.0).sum(1).mean()
    return {name: x.item() for name, x in stats.items()} | reward_stats(rollout) | turn_stats(rollout)


def reward_stats(rollout: Rollout) -> dict[str, float]:
    """Computes mean and standard deviation (with Bessel's correction, as in TRL) of each reward function's rewards;
    ignores None."""
    stats = {}
    for name, rewards in rollout.rewards_by_name.items():
        known = rewards[~rewards.isnan()]
        stats[f"rewards/{name}/mean"] = known.mean().item()
        stats[f"rewards/{name}/std"] = known.std().item()
    return stats


def evaluate(policy: nn.Module, reward_fns: RewardFns, prompts: list[dict], args: Args) -> dict[str, float]:
    """Scores answers to the test prompts: one answer at a low temperature, and G answers at the training temperature.
    pass@G is the share of prompts with at least one right answer among the G."""
    G = args.num_generations
    seed = torch.initial_seed()  # a seed each: the first draws more numbers with more processes
    torch.manual_seed(seed + 1)
    likeliest = scored_answers(policy, reward_fns, prompts, 1, args.eval_temperature, args)
    torch.manual_seed(seed + 1 + G)
    sampled = scored_answers(policy, reward_fns, prompts, G, args.temperature, args)
    are_right = right_answers(sampled).view(-1, G)  # (N, G)
    is_judged = ~are_right.isnan().all(1)  # (N,), false if no answer has a reward
    stats = {
        "eval/scores": likeliest.scores.mean().item(),
        "eval/accuracy": right_answers(likeliest).nanmean().item(),
        "eval/pass@1": are_right.nanmean().item(),
        f"eval/pass@{G}": are_right[is_judged].nan_to_num(0.0).amax(1).mean().item(),
    }
    stats |= {f"eval/rewards/{name}/mean": x.nanmean().item() for name, x in likeliest.rewards_by_name.items()}
    return stats | {f"eval/{name}": x for name, x in turn_stats(likeliest).items()}


def right_answers(rollout: Rollout) -> Tensor:
    """Returns (B,): 1 if the reward of the first function is 1 or more, 0 if it is less, NaN if it is None."""
    rewards = next(iter(rollout.rewards_by_name.values()))
    return torch.where(rewards.isnan(), rewards, (rewards >= 1).float())


def scored_answers(
    policy: nn.Module, reward_fns: RewardFns, prompts: list[dict], k: int, temperature: float, args: Args
) -> Rollout:
    """Samples and scores k answers to each of N prompts: N * k rows."""
    N = len(prompts)
    eval_args = replace(args, temperature=temperature, response_length_min=None)
    extra = -N % WORLD_SIZE  # all processes need the same number of prompts
    examples = (prompts * WORLD_SIZE)[: N + extra]
    draw_batch = play_batch if args.env else sample_batch
    rollout = draw_batch(policy, repeat(examples, k), eval_args)
    rollout.rewards_by_name, rollout.scores = score_responses(rollout, reward_fns, args, k)
    return rollout.select(torch.arange(N * k, device=rollout.mask.device))


def report(run: "Run", stats: dict[str, float], rollout: Rollout, policy: nn.Module, args: Args) -> None:
    """Logs the metrics of an update, and warns of common problems. Shows a table of four responses after the first
    update and `num_sample_generations` times in the run."""
    seconds = sum(run.seconds.values())
    stats["episode"] = run.step * args.batch_size
    stats["eps"] = args.batch_size / seconds
    stats["perf/tokens_per_second"] = rollout.mask.sum().item() / seconds
    run.log(stats, "objective/scores", "frac_reward_zero_std")
    warn_about(rollout, policy, args)
    is_first = run.step == 1 and args.num_sample_generations > 0
    if is_first or run.is_one_of(args.num_sample_generations):
        show_samples(run, rollout.select(torch.arange(min(4, args.batch_size), device=args.device)), policy.tokenizer)


def show_samples(run: "Run", rollout: Rollout, tokenizer: AutoTokenizer) -> None:
    """Prints a few episodes as a table. Saves all their tensors in a file for tools/xray.py."""
    columns = {
        "prompt": [tokenizer.decode(row[real]) for row, real in zip(rollout.prompts, rollout.prompt_mask)],
        "response": [transcript(*row, tokenizer) for row in zip(rollout.responses, rollout.mask, rollout.written)],
        "score": [f"{score:.2f}" for score in rollout.scores.tolist()],
    }
    rewards = {f"rewards/{name}": x for name, x in rollout.rewards_by_name.items()}
    run.show(columns, vars(rollout) | rewards)


def warn_about(rollout: Rollout, policy: nn.Module, args: Args) -> None:
    """Warns if few responses have a stop token, no response has a reward, or all scores are equal. Each warning appears
    once."""
    if policy.stop_token_ids and rollout.ended.float().mean() < 0.5:
        warnings.warn(
            "most responses of the batch have no stop token: raise --response-length, set --missing-eos-penalty or "
            "--stop-token, or check that the policy was trained to end its texts"
        )
    if unscored(rollout.rewards_by_name, args.reward_weights).all():
        warnings.warn("no response of the batch has a reward: all functions of --reward-fn returned None or NaN")
    if rollout.scores.std(correction=0) < 1e-6:
        warnings.warn("all scores of the batch are equal, so none of its responses is better: check the reward")


# --- Additions: --env, several turns, as in lecture/agent.py ----------------------------------------------------------


def play_batch(policy: nn.Module, examples: list[dict], args: Args) -> Rollout:
    """Replaces `sample_batch` with --env. Each episode has an environment object, made from a row of the dataset."""
    prompts, prompt_mask = pad([x["input_ids"] for x in examples], policy.tokenizer, args, "left")  # (B, P)
    uniforms = torch.rand(len(examples), args.response_length).to(prompts.device)
    parts = []
    with autocast(args), gathered(policy, args), torch.random.fork_rng(devices=[]):  # see `function_reward`
        for index in torch.arange(len(examples))[RANK::WORLD_SIZE].split(args.local_rollout_forward_batch_size):
            rows = [examples[i] for i in index]
            parts.append(play(policy, rows, prompts[index], prompt_mask[index], uniforms[index], args))
    *drawn, written, rewards, num_turns = (all_gather(torch.cat(x)) for x in zip(*parts))
    turns = {"written": written, "rewards": rewards, "num_turns": num_turns}
    rollout = Rollout(prompts, prompt_mask, *drawn, examples, **turns)
    return rollout.select(torch.arange(len(examples), device=prompts.device))


@torch.no_grad()
def play(
    policy: nn.Module, examples: list[dict], prompts: Tensor, prompt_mask: Tensor, uniforms: Tensor, args: Args
) -> list[Tensor]:
    """Replaces `sample` with --env. Returns responses (B, T), mask, ended, logprobs, written, rewards and num_turns.

    In each step, a row's next token is sampled, comes from an answer of the environment, or is padding after the end of
    the episode. So all rows share one cache, and no text is encoded again. A turn ends with the stop token, or at
    --response-length. An episode that a limit cuts off, even in its last turn, is not `ended`, but keeps its rewards.
    """
    B, T = uniforms.shape
    games = [policy.environment(deepcopy(example)) for example in examples]
    queues = [[] for _ in games]  # for each row, the tokens of an answer that are still to be added
    starts = [0] * B  # for each row, the position where its turn starts
    active = torch.ones(B, dtype=torch.bool)  # on the CPU, like the environments, which need each token
    ended = ~active
    num_turns, rewards, logprobs = torch.zeros(B), torch.zeros(B, T), torch.zeros_like(uniforms)
    responses = torch.zeros(B, T, dtype=torch.long)
    mask, written = torch.zeros(2, B, T, dtype=torch.bool)
    stops = responses.new_tensor(policy.stop_token_ids)
    cache = OneTypeCache(config=policy.config, max_cache_len=prompts.shape[1] + T)  # allocated once, at full size
    if prompts.shape[1] > 1:  # all but the last token, with which the loop starts
        prefill(policy, prompts[:, :-1], prompt_mask[:, :-1], cache, logits_to_keep=1)
    options = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    tokens = prompts[:, -1:]  # (B, 1), like `positions`
    positions = prompt_mask.sum(1, keepdim=True) - 1
    attention_mask = prompt_mask.long()  # (B, P + t), as in `sample`
    for t in range(T):
        output = policy(input_ids=tokens, attention_mask=attention_mask, position_ids=positions, **options)
        drawn, logprobs[:, t] = sample_categorical(output.logits[:, -1].float() / args.temperature, uniforms[:, t])
        given = torch.tensor([queue.pop(0) if queue else -1 for queue in queues])  # (B,)
        responses[:, t] = torch.where(given < 0, drawn.cpu(), given)
        mask[:, t] = active
        written[:, t] = active & (given < 0)
        ends = written[:, t] & (torch.isin(responses[:, t], stops) | (t == T - 1))
        for i in ends.nonzero().flatten().tolist():
            text = policy.tokenizer.decode(responses[i, starts[i] : t + 1], skip_special_tokens=True)
            answer, reward, is_over = games[i].step(text)
            rewards[i, t] = reward or 0.0  # None counts as 0
            num_turns[i] += 1
            ended[i] = is_over and int(responses[i, t]) in policy.stop_token_ids
            active[i] = not is_over and num_turns[i] != args.max_turns
            if active[i]:
                queues[i] = encode_answer(answer, games[i], examples[i], policy, args)
            starts[i] = t + 1 + len(queues[i])
        if not all_reduce(active.sum()):  # sharded weights need all processes in each pass
            break
        tokens = responses[:, [t]].to(prompts.device)
        positions = positions + 1
        attention_mask = F.pad(attention_mask, (0, 1), value=1)
    responses = responses.masked_fill(~mask, policy.tokenizer.pad_token_id)
    found = responses, mask, ended, logprobs.cpu().masked_fill(~written, 0.0), written, rewards, num_turns
    return [x.to(prompts.device) for x in found]


def encode_answer(answer: str, game: object, example: dict, policy: nn.Module, args: Args) -> list[int]:
    """Encodes an answer of the environment. In a conversation, adds the chat template's text around it.

    To find this text, the template renders a conversation with and without the answer. A placeholder stands for the
    policy's turn; it contains a thought, because some templates delete thoughts from earlier turns. The answer has the
    environment's `role`, by default "user".
    """
    prompt = example[args.prompt_column]
    if isinstance(prompt, list):
        write = partial(render, tokenizer=policy.tokenizer, options=template_options(example), is_prompt=True)
        turns = as_turns(prompt, "user")
        turn = {"role": "assistant", "content": "<think>\nSo?\n</think>\n\nSo."}
        begun = write(turns).removesuffix("<think>\n")  # some templates begin every turn with this
        stops = policy.tokenizer.batch_decode([[stop] for stop in policy.stop_token_ids])
        after = write([*turns, turn, {"role": getattr(game, "role", "user"), "content": answer}])
        before = max((begun + turn["content"] + stop for stop in stops), key=after.startswith)  # the one that fits
        is_fit = after.startswith(before) and after != write([*turns, turn])
        require(is_fit, "--env: the chat template changes earlier turns, has another stop token, or drops an answer")
        answer = after.removeprefix(before)
    return policy.tokenizer(answer, add_special_tokens=False)["input_ids"]


def turn_stats(rollout: Rollout) -> dict[str, float]:
    """Computes, with --env, the mean number of turns, and the share of episodes that the environment ended."""
    if rollout.num_turns is None:
        return {}
    return {"turns": rollout.num_turns.mean().item(), "ended": rollout.ended.float().mean().item()}


def transcript(ids: Tensor, mask: Tensor, written: Tensor, tokenizer: AutoTokenizer) -> str:
    """Decodes a response. Answers of the environment are in «guillemets»."""
    is_own, sizes = written[mask].unique_consecutive(return_counts=True)
    texts = tokenizer.batch_decode(ids[mask].split(sizes.tolist()))
    return "".join(text if own else f" «{text.strip()}» " for text, own in zip(texts, is_own))


# --- Models and rewards -----------------------------------------------------------------------------------------------


def load_policy(args: Args) -> nn.Module:
    """Loads the policy in float32, finds its stop tokens, and imports the environment of --env.

    The policy stays in evaluation mode: with dropout, rollout, scoring and loss would use different distributions.
    """
    policy = load_model(AutoModelForCausalLM, args.model, args)
    has_router = hasattr(policy.config.get_text_config(), "output_router_logits")
    require(has_router or not args.aux_loss_coef, f"--aux-loss-coef: {args.model} is not a mixture of experts")
    policy.stop_token_ids = find_stop_tokens(args, policy)
    stored = policy.generation_config  # saved with the policy, for programs that sample from it later
    stored.eos_token_id = policy.stop_token_ids or None
    try:
        stored.validate(strict=True)  # fails now rather than when the policy is saved
    except ValueError:
        stored.do_sample = True  # the library saves a temperature, a top_p, ... only with do_sample
        stored.validate(strict=True)
    policy.environment = load_function(args.env) if args.env else None
    if args.lora_r:
        add_adapter(policy, args, task_type="CAUSAL_LM")
    if args.gradient_checkpointing:
        checkpoint_layers(policy)
    return policy


def find_stop_tokens(args: Args, policy: nn.Module) -> list[int]:
    """The ids of the stop tokens; an empty list if responses end only at response_length."""
    if args.stop_token == ("none",):
        return []
    tokenizer = policy.tokenizer
    found = []
    for text in args.stop_token:
        if text == "eos":
            found += eos_tokens(policy)
            continue
        ids = [int(text)] if text.isdecimal() else tokenizer.encode(text, add_special_tokens=False)
        # an unknown word becomes unk_token, which is also the EOS token in GPT-2 and SmolLM2
        is_known = text.isdecimal() or text == tokenizer.unk_token or ids != [tokenizer.unk_token_id]
        is_one_token = len(ids) == 1 and ids[0] < len(tokenizer)
        require(
            is_known and is_one_token,
            f"--stop-token {text!r} is not one token of {args.model}, but {ids}: choose another, or --stop-token none",
        )
        found += ids
    require(found, f"{args.model} has no EOS token: choose another with --stop-token, or none")
    return found


def load_reward_model(args: Args, policy: nn.Module) -> nn.Module | None:
    """Loads the reward model and freezes it; None if --reward-fn does not name it."""
    if "reward_model" not in args.reward_fn:
        return None
    model = load_model(AutoModelForSequenceClassification, args.reward_model, args)
    has_one_label = model.config.num_labels == 1 and hasattr(model, "score")
    require(has_one_label, f"{args.reward_model} is not a causal model with one label: see rewards/classifier.py")
    rows = policy.get_input_embeddings().num_embeddings
    if same_tokens(policy, model) and rows > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(rows, mean_resizing=False)  # the policy can sample ids that have no text
    return model.requires_grad_(False)


def make_optimizer(args: Args, policy: nn.Module) -> torch.optim.Optimizer:
    """AdamW for the policy's trainable weights."""
    return torch.optim.AdamW(
        [p for p in policy.parameters() if p.requires_grad],
        lr=args.learning_rate,
        betas=args.adam_betas,
        eps=args.adam_epsilon,
        weight_decay=args.weight_decay,
        fused=True,  # ten times as fast on a CPU
    )


def make_reference(args: Args, policy: nn.Module) -> nn.Module:
    """A frozen copy of the policy; with LoRA the policy itself, which is the reference while its adapter is off."""
    return policy if args.lora_r else deepcopy(policy).requires_grad_(False)


@contextmanager
def adapter_off(policy: nn.Module, reference: nn.Module) -> Iterator[None]:
    """With LoRA, turns off the policy's adapter within this context, which makes the policy the reference."""
    if reference is not policy:
        yield
        return
    reshard(policy)  # switching sets requires_grad, which has to happen on shards, not on gathered weights
    policy.disable_adapters()
    try:
        yield
    finally:
        reshard(policy)
        policy.enable_adapters()


def same_tokens(policy: nn.Module, reward_model: nn.Module | None) -> bool:
    """Whether the reward model has the policy's tokenizer (the same vocabulary and EOS); False if it is None."""
    if reward_model is None:
        return False
    a, b = policy.tokenizer, reward_model.tokenizer
    return a.get_vocab() == b.get_vocab() and a.eos_token_id == b.eos_token_id


def make_reward_fns(args: Args, policy: nn.Module, reward_model: nn.Module | None) -> RewardFns:
    """The reward functions of --reward-fn, by name. Each maps a rollout to rewards (B,), NaN where it returned None."""
    reward_fns = {}
    for spec in args.reward_fn:
        name = spec.rpartition(":")[2]
        require(name not in reward_fns, f"--reward-fn: two functions have the name {name!r}; rename one")
        if spec == "reward_model":
            reward_fns[name] = model_reward(reward_model, policy, args)
        else:
            reward_fns[name] = function_reward(spec, policy, args)
    return reward_fns


def model_reward(model: nn.Module, policy: nn.Module, args: Args) -> Callable[[Rollout], Tensor]:
    """Makes a reward function of a reward model. If the reward model has another tokenizer or chat template than the
    policy, texts are encoded again. Of a text longer than its context, it then reads only the end."""
    has_same_tokens = same_tokens(policy, model)
    has_same_template = model.tokenizer.chat_template in (None, policy.tokenizer.chat_template)

    def reward(r: Rollout) -> Tensor:
        """(b,) rewards of a part of the rollout."""
        inputs = r.inputs()
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        is_text = isinstance(r.examples[0][args.prompt_column], str)
        reads_same_ids = has_same_tokens and (is_text or has_same_template)
        if not reads_same_ids:
            rows = encode_again(r, policy.tokenizer, model.tokenizer, args)
            ids, mask = pad([row[-context_length(model) :] for row in rows], model.tokenizer, args)
        cache = None
        if reads_same_ids and shares_prompts(model, r, args):
            ids = r.responses
            cache = DynamicCache(config=model.config)
            prefill(model.base_model, r.prompts, r.prompt_mask, cache)
        return read_reward(model, ids, mask.long(), cache)

    def rewards_of_all(rollout: Rollout) -> Tensor:
        """(B,) rewards. Equal texts get the same reward: in different micro-batches, they are rounded differently."""
        rewards = rollout.in_micro_batches(reward, args)
        texts = torch.cat(list(rollout.inputs().values()), 1).cpu()
        _, text_of = texts.unique(dim=0, return_inverse=True)  # (B,) the number of each row's text
        text_of = text_of.to(rewards.device)
        return rewards.scatter_reduce(0, text_of, rewards, "amax", include_self=False)[text_of]

    return rewards_of_all


def encode_again(r: Rollout, ours: AutoTokenizer, other: AutoTokenizer, args: Args) -> list[list[int]]:
    """Encodes prompts and responses again, with another tokenizer.

    A text is decoded without special tokens, and gets the other tokenizer's EOS if its response ended. A conversation
    is rendered by the other chat template.
    """
    eos = [] if other.eos_token_id is None else [other.eos_token_id]
    end, _ = turn_end(other)
    prompts = [ids[real] for ids, real in zip(r.prompts.cpu(), r.prompt_mask.cpu())]
    heads = ours.batch_decode(prompts, skip_special_tokens=True)
    rows = []
    for example, head, text, ended in zip(r.examples, heads, response_texts(r, ours, args), r.ended.tolist()):
        prompt = example[args.prompt_column]
        if isinstance(prompt, list) and other.chat_template:
            turns = [*as_turns(prompt, "user"), {"role": "assistant", "content": text}]
            text = render_whole(turns, other, template_options(example))
            ids = other(text if ended else text.removesuffix(end), add_special_tokens=False)["input_ids"]
            rows.append(ids if end or not ended else ids + eos)
            continue
        ids = encode_text(head + text, other)
        rows.append(ids + eos if ended else ids)
    return rows


def response_texts(r: Rollout, tokenizer: AutoTokenizer, args: Args) -> list[str]:
    """Decodes the responses without special tokens; in conversations, also without the white space that some chat
    templates write before an answer."""
    blank = ""
    if isinstance(r.examples[0][args.prompt_column], list):
        blank = blank_before_answer(tokenizer)
    texts = []
    for prompt, is_prompt, ids, real in zip(r.prompts.cpu(), r.prompt_mask.cpu(), r.responses.cpu(), r.mask.cpu()):
        text = decode_after(prompt[is_prompt].tolist(), ids[real].tolist(), tokenizer)
        texts.append(text.removeprefix(blank))
    return texts


@cache
def blank_before_answer(tokenizer: AutoTokenizer) -> str:
    """The white space that the chat template writes between prompt and answer (Mistral: a space); empty if none."""
    if not tokenizer.chat_template:
        return ""
    turns = [{"role": "user", "content": "So?"}, {"role": "assistant", "content": "So."}]
    head = render(turns[:1], tokenizer, {}, is_prompt=True)
    start, _, _ = render(turns, tokenizer, {}).removeprefix(head).rpartition("So.")
    return start if start.isspace() else ""


def read_reward(model: nn.Module, input_ids: Tensor, attention_mask: Tensor, cache: Cache | None = None) -> Tensor:
    """(B,) output of a reward model's head at the last real token of texts (B, S). If a cache holds the first tokens of
    the texts, `input_ids` are the other S; the attention mask covers all tokens.

    transformers' classifiers read the last token that is not the pad token. If the pad token is also EOS, they read the
    token before EOS.
    """
    S = input_ids.shape[1]
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)[:, -S:]
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": positions}
    hidden = model.base_model(
        **inputs, past_key_values=cache, use_cache=cache is not None
    ).last_hidden_state  # (B, S, D)
    last = (attention_mask[:, -S:] * torch.arange(S, device=input_ids.device)).argmax(1)  # (B,)
    with torch.autocast(hidden.device.type, enabled=False):  # bfloat16 is too coarse for a reward (8 bits)
        rewards = model.score(hidden[torch.arange(len(last), device=last.device), last].float())  # (B, 1)
    return rewards.squeeze(1) + getattr(model.config, "reward_bias", 0.0)  # reward_model.py may store its shift there


def function_reward(spec: str, policy: nn.Module, args: Args) -> Callable[[Rollout], Tensor]:
    """A user's reward function, with TRL's signature: f(prompts, completions, **columns) -> a number or None per row.

    All arguments are passed by keyword, as lists with one value per row: prompts, prompts_text (as the policy read
    them), completions, completion_ids, the prompts' input_ids, and the columns of the dataset. If the prompts are
    messages, so are the completions. The function gets copies, so it may change them.
    """
    function = load_function(spec)

    def reward(rollout: Rollout) -> Tensor:
        """(B,) rewards of a rollout, NaN for None. Each process calls the function for its share of the rows."""
        r = rollout.select(torch.arange(RANK, len(rollout.mask), WORLD_SIZE, device=rollout.mask.device))
        rows = [deepcopy(example) for example in r.examples]  # the rows of a group share one object
        given = {name: [row[name] for row in rows] for name in rows[0]}
        given["prompts"] = given[args.prompt_column]
        given["prompts_text"] = policy.tokenizer.batch_decode(given["input_ids"])
        given["completion_ids"] = [ids[real].tolist() for ids, real in zip(r.responses.cpu(), r.mask.cpu())]
        given["completions"] = response_texts(r, policy.tokenizer, args)
        if isinstance(given["prompts"][0], list):
            given["completions"] = [[{"role": "assistant", "content": text}] for text in given["completions"]]
        with torch.random.fork_rng(devices=[]):  # the function's random numbers do not change the run's
            values = function(**given)
        return all_gather(torch.tensor(check_rewards(values, len(rows), spec), device=args.device))

    return reward


def check_rewards(values: object, n: int, spec: str) -> list[float]:
    """The rewards that a function returned for n rows, NaN for None. Exits unless they are n numbers."""
    is_list = hasattr(values, "__iter__") and not isinstance(values, (str, dict))
    rewards = list(values) if is_list else []
    require(len(rewards) == n, f"{spec} should return a list of {n} rewards, not {values!r:.80}")
    has_text = any(isinstance(x, str) for x in rewards)
    require(not has_text, f"{spec} should return numbers, not texts: {values!r:.80}")
    return [math.nan if x is None else float(x) for x in rewards]


def try_reward_fns(reward_fns: RewardFns, prompts: datasets.Dataset, policy: nn.Module, args: Args) -> None:
    """Calls each reward function once, with a prompt as the response, to find errors before the first rollout."""
    example = prompts[0]
    ids = torch.tensor([example["input_ids"]] * WORLD_SIZE, device=args.device)  # (WORLD_SIZE, P), one row per process
    mask = torch.ones_like(ids, dtype=torch.bool)
    responses = ids[:, : args.response_length]
    drawn = responses, mask[:, : args.response_length], mask[:, 0], torch.zeros_like(responses)
    rollout = Rollout(ids, mask, *drawn, [example] * WORLD_SIZE)
    for reward in reward_fns.values():
        reward(rollout)


# --- Data and settings ------------------------------------------------------------------------------------------------

ALIASES = {  # other libraries' spellings
    "--reward-funcs": "--reward-fn",
    "--model-name-or-path": "--model",
    "--reward-model-path": "--reward-model",
    "--dataset-name": "--dataset",
    "--dataset-config-name": "--dataset-config",
    "--dataset-text-field": "--prompt-column",
    "--num-iterations": "--num-ppo-epochs",
    "--max-completion-length": "--response-length",
    "--router-aux-loss-coef": "--aux-loss-coef",
    "--resume-from-checkpoint": "--resume",
}
CURVES = {  # title of a panel: pattern of the metrics in it
    "reward": "^reward$|/mean$|accuracy$|pass@1$",
    "shares": "zero_std$|clipped_ratio$",
    "tokens": "mean_length$",
    "entropy of a token, nats": "^entropy$",
}


def load_prompts(args: Args, policy: nn.Module, reward_model: nn.Module | None) -> tuple[datasets.Dataset, list[dict]]:
    """Returns the training rows and the test rows, each with its prompt's token ids as `input_ids`."""
    train, test = load_data(args)
    prompts = encode_prompts(train, policy.tokenizer, args)
    test_prompts = encode_prompts(test, policy.tokenizer, args) if test else prompts.select([])
    for name in set(prompts.features) & set(test_prompts.features):
        kinds = {getattr(data.features[name], "dtype", "") for data in (prompts, test_prompts)}
        if "string" in kinds and kinds & {"int64", "float64"}:  # of csv files, whose types are guessed for each split
            warnings.warn(f"the column {name!r} has texts in one split, and numbers in the other")
    longest = max(longest_prompt(prompts), longest_prompt(test_prompts))
    limit = context_length(policy)
    if same_tokens(policy, reward_model):
        limit = min(limit, context_length(reward_model))
    require(
        longest + args.response_length <= limit,
        f"the longest prompt ({longest} tokens) and --response-length {args.response_length} exceed the {limit} tokens "
        "that policy and reward model can read",
    )
    kinds = {column: getattr(kind, "dtype", type(kind).__name__) for column, kind in prompts.features.items()}
    others = [f"{name} ({kind})" for name, kind in kinds.items() if name not in (args.prompt_column, "input_ids")]
    print("columns for reward functions:", ", ".join(others) or "none")
    return prompts, test_prompts.take(args.num_eval_prompts).to_list()


def encode_prompts(data: datasets.Dataset, tokenizer: AutoTokenizer, args: Args) -> datasets.Dataset:
    """Adds the prompts' token ids to the rows of a split, as `input_ids`. Drops and counts rows whose prompt is empty,
    or longer than max_prompt_length."""
    column = args.prompt_column
    check_columns(data, {"--prompt-column": column})
    data = with_numbers(data, column)
    # the arguments of reward functions that are not columns
    reserved = {"input_ids", "prompts", "prompts_text", "completions", "completion_ids"} - {column}
    clash = sorted(reserved & set(data.column_names))
    require(
        not clash, f"--dataset {args.dataset}: rename the columns {clash}: reward functions have arguments of that name"
    )

    def encode(row: dict) -> dict:
        """Returns the column to add to a row."""
        return {"input_ids": encode_prompt(read_value(row, column), tokenizer, template_options(row))}

    data = encode_rows(data, encode, keep=True)
    unknown = sum(tokenizer.unk_token_id in ids for ids in data["input_ids"])
    if unknown and tokenizer.unk_token != tokenizer.eos_token:  # in GPT-2 they are one token
        warnings.warn(f"{unknown} of {len(data)} prompts have unknown words, encoded as {tokenizer.unk_token}")
    if isinstance(data[0][column], str) and tokenizer.chat_template:
        warnings.warn(
            "the prompts are plain texts, so this chat model continues them instead of answering them: for answers, "
            'write them as messages, [{"role": "user", "content": ...}]'
        )
    lengths = [len(ids) for ids in data["input_ids"]]
    fits = [0 < length <= args.max_prompt_length for length in lengths]
    dropped = f"dropped {fits.count(False)} of {len(fits)}: empty, or over {args.max_prompt_length} tokens"
    require(any(fits), f"--dataset {args.dataset}: {dropped} (set --max-prompt-length)")
    kept = [length for length, fit in zip(lengths, fits) if fit]
    print_lengths(f"{data.split} prompts", kept, "" if all(fits) else dropped)
    return data.select(np.flatnonzero(fits))


def longest_prompt(prompts: datasets.Dataset) -> int:
    """The number of tokens in the longest prompt."""
    return max(map(len, prompts["input_ids"]), default=0)


def check_args(args: Args) -> None:
    """Exits if settings contradict each other, or if a setting has no effect."""
    check_common_args(args)
    can_end = args.stop_token != ("none",) or not (args.mask_truncated_completions or args.env)
    require(can_end, "--stop-token none: no response ends, but --mask-truncated-completions and --env need an end")
    require(not (args.env and args.response_length_min), "--response-length-min: not with --env")
    refuse_unused(args, "reward_model", "reward_model" in args.reward_fn, "unless --reward-fn names reward_model")
    refuse_unused(args, "missing_eos_penalty", args.stop_token != ("none",), "with --stop-token none")
    is_evaluated = args.dataset_test_split != "none"
    refuse_unused(args, "num_eval_prompts eval_temperature", is_evaluated, "with --dataset-test-split none")
    refuse_unused(args, "max_turns", args.env, "without --env")
    refuse_unused(args, "reward_fn", not args.env, "with --env, which gives the reward")
    has_baseline = args.baseline != "none"
    refuse_unused(args, "scale_rewards", has_baseline, "with --baseline none")
    refuse_unused(args, "dynamic_sampling", has_baseline, "with --baseline none, where groups of equal scores count")
    refuse_unused(args, "epsilon delta", args.loss_type != "cispo", "with --loss-type cispo: set --epsilon-high")
    _, upper = clip_bounds(args)
    is_beyond = args.delta is None or args.delta > upper
    require(is_beyond, f"--delta must be greater than the upper bound of the clip range, {upper:g}")
    has_all_weights = len(args.reward_weights) in (0, len(args.reward_fn))
    require(
        has_all_weights,
        f"--reward-weights has {len(args.reward_weights)} values, but --reward-fn has {len(args.reward_fn)}",
    )
    is_in_order = (args.response_length_min or 0) <= args.response_length
    require(is_in_order, f"--response-length-min is greater than --response-length {args.response_length}")


def choose_sizes(args: Args, policy: nn.Module, prompts: datasets.Dataset, G: int) -> Args:
    """Returns the settings with learning rate, batch sizes and number of episodes filled in, and prints them. G is the
    number of responses to each prompt."""
    size = policy.num_parameters()
    # 1e-5 for a model of GPT-2's size, more for smaller ones, at least 3e-6 (the N+ details' rate from 1B up)
    rate = max(3e-6, 1e-5 * (124e6 / size) ** 0.6) * (10 if args.lora_r else 1)
    learning_rate = args.learning_rate or float(f"{rate:.2g}")

    parts = args.num_mini_batches * WORLD_SIZE
    per_device = args.per_device_train_batch_size
    batch_size = args.batch_size or 64
    if per_device and args.batch_size is None:
        batch_size = per_device * args.gradient_accumulation_steps * parts
    divisor = f"{args.num_mini_batches} mini-batches x {WORLD_SIZE} process(es)"
    require(batch_size % parts == 0, f"--batch-size {batch_size} is not divisible by {divisor}")
    rows = batch_size // parts
    prompt_length = longest_prompt(prompts)
    longest = prompt_length + args.response_length
    fitting = rows_that_fit(policy, longest, args)
    is_shared = can_share_prompts(policy, args)
    if is_shared:
        fitting = shared_rows_that_fit(policy, prompt_length, rows, G, args)
    micro_batch_size = args.micro_batch_size or per_device or min(rows, fitting)
    rollout_batch_size = args.local_rollout_forward_batch_size or rows_that_fit(policy, longest, args, is_trained=False)

    episodes = args.total_episodes
    if args.num_train_epochs:
        episodes = max(batch_size, round(len(prompts) * G * args.num_train_epochs))
    num_updates = episodes // batch_size
    require(num_updates, f"--total-episodes {episodes} is less than one batch of {batch_size} responses")
    print(f"policy: {args.model}, {size / 1e6:.2f}M parameters on {args.device}, learning rate {learning_rate:.2g}")
    print(
        f"batch: {batch_size} responses per update, {args.num_ppo_epochs} epochs x {args.num_mini_batches} "
        f"mini-batches, {micro_batch_size} rows at a time, {'prompts shared' if is_shared else 'prompts not shared'}; "
        f"{num_updates} updates = {num_updates * batch_size} episodes"
    )
    return replace(
        args,
        learning_rate=learning_rate,
        batch_size=batch_size,
        micro_batch_size=micro_batch_size,
        local_rollout_forward_batch_size=rollout_batch_size,
        total_episodes=episodes,
        num_train_epochs=None,  # otherwise it would override --total-episodes of a resumed run
    )


def shared_rows_that_fit(policy: nn.Module, prompt_length: int, num_rows: int, G: int, args: Args) -> int:
    """Like rows_that_fit, if each prompt is computed once for its rows. If possible, returns a multiple of G that
    divides the num_rows of a mini-batch.

    A prompt is computed once for the rows of its group in a mini-batch, G / num_mini_batches on average. So a row needs
    memory for num_mini_batches / G of a prompt, for a copy of the prompt's keys and values (0.2 of a prompt), and for
    its response.
    """
    share = min(1.0, args.num_mini_batches / G + 0.2)
    num_tokens = math.ceil(prompt_length * share) + args.response_length
    fitting = rows_that_fit(policy, num_tokens, args, num_targets=args.response_length)
    limit = max(fitting, min(G, 2 * fitting))  # a group that is split computes its prompt twice
    return max([n for n in range(G, limit + 1, G) if num_rows % n == 0], default=fitting)


def ratio_rounding(args: Args) -> float:
    """Returns the limit for the mean of |ratio - 1| before the first step, where only rounding moves the ratio:
    bfloat16 has 8 bits of precision, TF32 has 11.

    Measured with bf16: .021 to .036 for SmolLM2, at temperatures of .5 to 1 and lengths of 16 to 200 tokens, on CPUs
    with and without bfloat16 matrix products. Its largest logits are 10 to 40. Rounding errors grow in proportion to
    the logits."""
    if args.bf16:
        return 1e-1
    return 6e-3 if torch.get_float32_matmul_precision() == "high" else 1e-3


def check_first_ratio(error: float, step: int, args: Args) -> None:
    """Checks that the ratio is 1 before the first step, up to rounding. Otherwise the update and the sampler use
    different distributions. Exits in the first update of a run; in later updates, only warns."""
    if error <= ratio_rounding(args):
        return
    require(
        step > 1,
        f"the ratio pi/pi_old is off by {error:.2g} before any step was made (allowed: {ratio_rounding(args):g}): "
        "rollout and update use different distributions. Usual causes: a model that ignores position_ids or the "
        "attention mask, dropout that is on, different temperatures, weights that are not finite; with bf16, rounding",
    )
    warnings.warn("rollout and update use different distributions: see policy/first_ratio_error and sampler_error")


# --- From here on, a function is identical in all scripts that have it: models, data, processes, the run --------------


def require(condition: object, message: str) -> None:
    """Exits with the message unless the condition holds. It is for errors that no library reports clearly."""
    if not condition:
        sys.exit(f"error: {message}")


def refuse_unused(args: Args, names: str, is_used: object, where: str) -> None:
    """Exits if one of these settings was changed but has no effect. A setting that is off (0, none, False) passes."""
    for name in names.split():
        value = getattr(args, name)
        is_default_or_off = value in (getattr(Args, name), "none") or not value
        require(is_used or is_default_or_off, f"--{name.replace('_', '-')} has no effect {where}")


def check_common_args(args: Args) -> None:
    """Checks the settings that all scripts but ddpo.py share. A resumed run may have both --batch-size and the settings
    from which it was computed."""
    sets_batch_size = args.resume or not args.batch_size
    is_used = sets_batch_size or not args.micro_batch_size
    refuse_unused(args, "per_device_train_batch_size", is_used, "beside --batch-size and --micro-batch-size")
    refuse_unused(args, "gradient_accumulation_steps", sets_batch_size, "beside --batch-size")
    per_device = args.per_device_train_batch_size
    refuse_unused(args, "gradient_accumulation_steps", per_device, "without --per-device-train-batch-size")
    is_constant = args.lr_scheduler_type == "constant"
    refuse_unused(args, "warmup_ratio", not is_constant, "with --lr-scheduler-type constant: use constant_with_warmup")
    refuse_unused(args, "lora_alpha lora_target_modules", args.lora_r, "without --lora-r")
    refuse_unused(args, "eval_steps", args.dataset_test_split != "none", "with --dataset-test-split none")
    refuse_unused(args, "dataset_config", not Path(args.dataset).is_file(), "if --dataset is a file")
    refuse_unused(args, "wandb_project_name wandb_entity", args.track, "without --track")
    refuse_unused(args, "exp_name", not args.output_dir, "with --output-dir, which names the folder")


@cache
def ask_hub() -> None:
    """Tries once to reach the hub. If that fails, the libraries use their caches instead of retrying for minutes."""
    try:
        get_session().head(constants.ENDPOINT, timeout=5)
    except Exception:  # its type depends on the HTTP library
        print(f"{constants.ENDPOINT} does not answer: using models and data downloaded earlier")
        constants.HF_HUB_OFFLINE = True
        datasets.config.HF_HUB_OFFLINE = True


def locate(name: str) -> str:
    """Finds a file or folder in the working directory or beside this script. Returns any other name unchanged: it may
    be on the hub."""
    for folder in (Path(), Path(__file__).resolve().parent):
        if (folder / name).exists():
            return str(folder / name)
    is_file = Path(name).suffix in (".jsonl", ".json", ".csv", ".parquet", ".py")
    is_path = is_file or name.startswith(".") or name.count("/") > 1  # names on the hub are NAME or OWNER/NAME
    require(not is_path, f"there is no {name}")
    ask_hub()
    return name


def load_model(auto_class: type, name: str, args: Args, new_head: bool = False, **options) -> nn.Module:
    """Loads a model from a folder or the hub, with weights in float32 and its tokenizer as `model.tokenizer`.

    Exits if weights are missing (the library would initialise them at random) or unexpected. With `new_head`, weights
    of the head may be missing.
    """
    path = locate(name)
    adapter = find_adapter_config_file(path)
    require(adapter is None, f"{name} is an adapter: use the merged model (these scripts save it in {name}/merged)")
    options |= {"attn_implementation": args.attn_implementation, "trust_remote_code": args.trust_remote_code}
    if RANK and args.zero_stage:  # only process 0 reads the weights; `place` sends them to the others
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(path, **options)
            model = auto_class.from_config(config, dtype=torch.float32, trust_remote_code=args.trust_remote_code)
        with suppress(OSError):  # a model may have no such file
            model.generation_config = GenerationConfig.from_pretrained(path)
    else:
        options |= {"dtype": torch.float32, "use_safetensors": True, "output_loading_info": True}
        model, info = auto_class.from_pretrained(path, **options)
        wrong = sorted(info["missing_keys"] | info["unexpected_keys"])
        if new_head:
            wrong = [key for key in wrong if key.startswith(f"{model.base_model_prefix}.")]
        require(not wrong, f"{name!r} is not a {type(model).__name__}: missing or unexpected weights: {wrong[:3]}")
    model.auto_class = auto_class
    model.tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=args.trust_remote_code)
    words = set(model.tokenizer.get_vocab()) - set(model.tokenizer.all_special_tokens)
    require(words, f"{name} has no tokenizer: save its base model's tokenizer beside the weights")
    padding = model.tokenizer.pad_token_id
    if padding is None or padding >= model.get_input_embeddings().num_embeddings:
        first = model.tokenizer.convert_ids_to_tokens(0)
        tokens = [model.tokenizer.eos_token, model.tokenizer.unk_token, first]
        model.tokenizer.pad_token = next(filter(None, tokens))  # any token will do, since masks mark padding
    return model.eval()


def checkpoint_layers(model: nn.Module) -> None:
    """Turns on gradient checkpointing: each layer recomputes its activations in the backward pass."""
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            recompute_activations(module)


def rows_that_fit(
    model: nn.Module, num_tokens: int, args: Args, is_trained: bool = True, num_targets: int | None = None
) -> int:
    """Returns the number of rows, each of `num_tokens` tokens, that may go through the model at once.

    For the backward pass, a token needs about 20 numbers per layer and hidden unit (2 with --gradient-checkpointing),
    and 3 per logit. For sampling it needs 2, for its key and its value. The rows may fill an eighth of the free GPU
    memory. On a CPU, large batches are slow, so the limit is 64 MB. For large models it is four times the weights, up
    to 2 GB, because each micro-batch updates the gradient of all weights.
    """
    config = model.config.get_text_config()
    per_unit = 20 if is_trained and not args.gradient_checkpointing else 2
    head = model.get_output_embeddings()
    num_logits = len(head.weight) if head is not None and is_trained else 0
    num_targets = num_targets or num_tokens  # tokens that have logits
    numbers = num_tokens * per_unit * config.num_hidden_layers * config.hidden_size + 3 * num_targets * num_logits
    limit = max(2**24, min(4 * model.num_parameters(), 2**29))
    if torch.device(args.device).type == "cuda":
        free = torch.tensor(torch.cuda.mem_get_info(args.device)[0])
        if WORLD_SIZE > 1:
            dist.all_reduce(free, dist.ReduceOp.MIN)  # so that all processes have the same number of micro-batches
        limit = int(free) // 32  # an eighth, in numbers of 4 bytes
    return max(1, limit // numbers)


def use_bfloat16(model: nn.Module) -> None:
    """Casts frozen weights of matrix products to bfloat16 once. Otherwise autocast would cast them at each use.

    Weights of experts (E, D, D) are cast, too: autocast does not cover grouped products. Embeddings and heads with one
    output stay in float32.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            is_product = isinstance(module, (nn.Linear, Conv1D)) or p.dim() == 3
            if is_product and not p.requires_grad and id(p) not in embeddings and len(p) > 1:
                p.data = p.data.bfloat16()


def add_adapter(model: nn.Module, args: Args, **options) -> None:
    """Freezes the model and adds trainable LoRA adapters (Hu et al. 2021)."""
    from peft import LoraConfig

    config = LoraConfig(r=args.lora_r, lora_alpha=args.lora_alpha, target_modules=args.lora_target_modules, **options)
    model.add_adapter(config)
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    is_shared = model.all_tied_weights_keys and any(hasattr(module, "base_layer") for module in ends)
    require(not is_shared, "--lora-target-modules: embeddings and head share their weight, so neither can be adapted")


def context_length(model: nn.Module) -> int:
    """The maximum number of tokens in the model's input, according to its config and its tokenizer."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    return min(positions, model.tokenizer.model_max_length)


def eos_tokens(model: nn.Module) -> list[int]:
    """Ids of the tokens that end a text: the tokenizer's EOS, the chat template's end of a turn, and the EOS tokens of
    the generation config. Tokens of the ordinary vocabulary are left out, since the config's default can be any
    token."""
    tokenizer = model.tokenizer
    stored = model.generation_config.eos_token_id  # an int, a list, or None
    ids = {tokenizer.eos_token_id, *(stored if isinstance(stored, list) else [stored])}
    end, _ = turn_end(tokenizer)
    if end:
        ids.add(tokenizer.convert_tokens_to_ids(end))
    return sorted(ids & set(tokenizer.added_tokens_decoder))


@cache
def turn_end(tokenizer: AutoTokenizer) -> tuple[str, str]:
    """The special token that ends a turn in the chat template, and the text after it; both are empty if there is none.

    Qwen's template writes "<|im_start|>assistant\\nSo.<|im_end|>\\n", so this returns "<|im_end|>" and "\\n". The text
    after the token is not part of an answer: it is not sampled, not trained on, and not read by a reward model.
    """
    if not tokenizer.chat_template:
        return "", ""
    turns = [{"role": "user", "content": "So?"}, {"role": "assistant", "content": "So."}]
    _, _, tail = tokenizer.apply_chat_template(turns, tokenize=False).rpartition("So.")
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    ends = [token for token in special if token in tail]
    if not ends:
        return "", ""
    end = min(ends, key=tail.find)
    return end, tail.partition(end)[2]


def load_function(spec: str) -> Callable:
    """Imports the function that `file.py:name` names."""
    file, _, name = spec.rpartition(":")
    require(file, f"{spec!r} should be file.py:name")
    module = import_file(str(Path(locate(file)).resolve()))
    require(hasattr(module, name), f"{file} has no {name!r}")
    return getattr(module, name)


@cache
def import_file(path: str) -> ModuleType:
    """Imports a Python file under its own name, so that worker processes can unpickle what it defines."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)
    sys.path.insert(0, str(Path(path).parent))  # so that the file can import its neighbours
    spec.loader.exec_module(module)
    return module


def load_split(name: str, config: str | None, split: str) -> datasets.Dataset:
    """Loads one split of a dataset: a folder, a jsonl/json/csv/parquet file (its split is train), or a hub name.

    Values stay as they are in the file, if all values of a column have one type. By default, the library reads the JSON
    text "2024-01-05" as a date, and 72 as 72.0 if another row has 3.5. All values of a csv file are texts.
    """
    for module in (datasets.features.features, datasets.packaged_modules.json, datasets.utils.json):
        module.ujson_dumps = json.dumps  # the library's own keeps ten decimals
        module.ujson_loads = partial(json.loads, parse_constant=lambda _: None)  # NaN is None
    formats = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
    path = Path(locate(name))
    options = {"path": str(path), "name": config, "split": split}
    if path.is_file():
        kinds = [formats[suffix] for suffix in path.suffixes if suffix in formats]
        require(kinds, f"{name} is not a {', '.join(formats)} file")
        require(path.stat().st_size, f"{name} is empty")
        options = {"path": kinds[-1], "data_files": glob.escape(str(path.resolve())), "split": split}
    else:
        has_no_pattern = not path.exists() or glob.escape(str(path.resolve())) == str(path.resolve())
        require(has_no_pattern, f"rename {name}: the library reads [, ] and * in the path of a folder as a pattern")
    files = [file for file in [path, *path.rglob("*")] if file.is_file() and formats.keys() & set(file.suffixes)]
    csv_files = [file for file in files if ".csv" in file.suffixes]
    for file in csv_files:
        has_names = isinstance(pandas.read_csv(file, nrows=1).index, pandas.RangeIndex)
        require(has_names, f"{file} has more cells in a row than names: put texts that have a comma in quotes")
    if csv_files and csv_files == files:
        options |= csv_options(pandas.read_csv(csv_files[0], nrows=0).columns)
    try:
        data = datasets.load_dataset(**options)
        if data.info.builder_name == "csv" and "features" not in options:
            data = datasets.load_dataset(**options, **csv_options(data.column_names))
    except datasets.exceptions.DatasetGenerationError as error:
        sys.exit(f"error: {name} cannot be read: {error.__cause__ or error}")
    if data.info.builder_name == "json" and "Json(" in str(data.features):
        warnings.warn(
            f"{name} has values of several types in one place. The library reads a text there that is valid JSON, such "
            'as "72" or "true", as a number or a truth value: give all values one type'
        )
    is_exact = lambda kind: not re.search("time|date|float", str(kind))  # noqa: E731
    if data.info.builder_name != "json" or all(map(is_exact, data.features.values())):
        return data
    features = {column: kind if is_exact(kind) else datasets.Json() for column, kind in data.features.items()}
    return datasets.load_dataset(**options, features=datasets.Features(features))


def csv_options(columns: Sequence[str]) -> dict:
    """Returns the library's options for reading these csv columns as texts. Empty cells are None; the words NA and None
    are texts."""
    features = datasets.Features(dict.fromkeys(columns, datasets.Value("string")))
    return {"features": features, "keep_default_na": False, "na_values": [""]}


def with_numbers(data: datasets.Dataset, text_column: str) -> datasets.Dataset:
    """Converts columns of a csv file, except the text column, to numbers if Python prints them exactly as they are
    written: 007 and 1.50 stay texts."""
    if data.info.builder_name != "csv":
        return data
    for kind, number in (("int64", int), ("float64", float)):
        for column, feature in data.features.items():
            texts = data[column] if feature.dtype == "string" and column != text_column else []
            with suppress(ValueError, TypeError):  # a text that is not a number, or an empty cell
                if texts and all(str(number(x)) == x and abs(number(x)) < 2**63 for x in texts):
                    data = data.cast_column(column, datasets.Value(kind))
    return data


def load_data(args: Args) -> tuple[datasets.Dataset, datasets.Dataset | None]:
    """Loads the training split and the test split, which is by default `validation`, or None if there is none."""
    train = load_split(args.dataset, args.dataset_config, args.dataset_train_split)
    test = args.dataset_test_split
    if test is None:
        test = "validation" if "validation" in train.info.splits else "none"
        if test == "none":
            print("no evaluations, since there is no validation split: see --dataset-test-split")
    if test == "none":
        return train, None
    return train, load_split(args.dataset, args.dataset_config, test)


def check_columns(data: datasets.Dataset, columns: dict[str, str]) -> None:
    """Exits if a dataset lacks one of the columns (a dict from flags to columns), or has images, videos or audio."""
    names = ", ".join(data.column_names)
    for flag, column in columns.items():
        require(column in data.column_names, f"the dataset has no column {column!r}, only {names}: set {flag}")
    unread = {"image", "images", "video", "videos", "audio", "audios"} & set(data.column_names)
    require(not unread, f"the dataset has the columns {sorted(unread)}, but this script reads only texts: remove them")


def encode_rows(data: datasets.Dataset, encode: Callable[[dict], dict], keep: bool = False) -> datasets.Dataset:
    """Applies `encode` to each row; with `keep`, the row's own columns stay. The result is a memory-mapped file. Later
    runs use the same file, unless the data or `encode` have changed. (So `encode` must not refer to args: any other
    setting would make a new file.)
    """
    split = str(data.split)

    def encode_row(row: dict, number: int) -> dict:
        """Calls `encode`. Adds the number of the row to its errors, and its warnings as a column."""
        with warnings.catch_warnings(record=True) as caught:
            try:
                encoded = encode(row)
            except SystemExit as error:
                sys.exit(f"{error} (row {number} of {split})")
        return encoded | {"encoding_warnings": "\n".join(str(warning.message) for warning in caught)}

    if data.data.nbytes > 2e6:  # encoding takes some seconds
        datasets.enable_progress_bars()
    columns = [] if keep else data.column_names
    encoded = data.map(encode_row, with_indices=True, remove_columns=columns, desc="encoding")
    datasets.disable_progress_bars()
    for messages in encoded.unique("encoding_warnings"):
        if messages:
            warnings.warn(messages)
    return encoded.remove_columns("encoding_warnings")


def read_value(row: dict, column: str) -> str | list[dict]:
    """The text or the list of messages in a column of a row; exits if the value is neither."""
    value = row[column]
    is_text_or_list = isinstance(value, (str, list))
    require(is_text_or_list, f"{column!r} holds {value!r:.80}, which is neither a text nor a list of messages")
    is_json = isinstance(value, str) and re.match(r"""\s*\[\s*\{\s*["'](role|content|from)["']\s*:""", value)
    require(not is_json, f"{column!r} holds a conversation as one text: convert it to a list of messages")
    return value


def template_options(row: dict) -> dict:
    """The chat template's options for a row: its columns `tools` and `chat_template_kwargs` (as in TRL), which may be
    JSON texts."""
    given = {}
    for column, kind in (("tools", list), ("chat_template_kwargs", dict)):
        value = row.get(column) or kind()
        if isinstance(value, str):
            with suppress(ValueError):  # it is not JSON
                value = json.loads(value)
        has_type = isinstance(value, kind) and all(isinstance(x, dict) for x in value if kind is list)
        require(
            has_type, f"the column {column!r} goes to the chat template (as in TRL), which cannot use {value!r:.80}"
        )
        given[column] = without_none(value)
    options = given["chat_template_kwargs"]
    if given["tools"]:
        options["tools"] = given["tools"]
    return options


def without_none(x: object) -> object:
    """Copies x without dict keys whose value is None, at any depth. Datasets add such keys to rows that lack them."""
    if isinstance(x, dict):
        return {key: without_none(value) for key, value in x.items() if value is not None}
    if isinstance(x, list):
        return [without_none(value) for value in x]
    return x


def as_turns(text: str | list[dict], role: str) -> list[dict]:
    """Converts a conversation to the messages that chat templates expect; a text becomes one message of this role.

    ShareGPT's keys `from` and `value` become `role` and `content`. The roles `human`, `gpt` and `developer` become
    `user`, `assistant` and `system`. A content that is a list of texts is joined.
    """
    if isinstance(text, str):
        return [{"role": role, "content": text}]
    standard = {"human": "user", "gpt": "assistant", "developer": "system"}
    turns = []
    for message in text:
        require(isinstance(message, dict), f"a conversation is a list of messages, but {message!r:.80} is not one")
        turn = without_none(message)
        role = turn.pop("from", turn.get("role"))
        content = turn.pop("value", turn.get("content"))
        if isinstance(content, list):
            content = [part.get("text") if isinstance(part, dict) else None for part in content]
            is_text = None not in content
            require(is_text, f"the message of {role!r} has parts that are not texts: this script reads only texts")
            content = "".join(content)
        if content is None and "tool_calls" in turn:
            content = ""
        is_message = isinstance(role, str) and isinstance(content, str)
        require(is_message, f"{message!r:.80} is not a message: it needs a role and a content, both texts")
        turns.append(turn | {"role": standard.get(role, role), "content": content})
    return turns


def render(turns: list[dict], tokenizer: AutoTokenizer, options: dict, is_prompt: bool = False) -> str:
    """Renders a conversation with the chat template. With is_prompt, it ends where the assistant is to answer."""
    require(tokenizer.chat_template, "the rows are conversations, but the model has no chat template: use a chat model")
    try:
        return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=is_prompt, **options)
    except Exception as error:  # of any type: a template is a program
        roles = ", ".join(turn["role"] for turn in turns)
        sys.exit(f"error: the chat template refuses a conversation of {roles}: {error}")


def check_rendered(text: str, turns: list[dict], tokenizer: AutoTokenizer, options: dict) -> None:
    """Exits if the chat template drops a content, a tool call, a tool or an option. It may drop the thoughts of earlier
    answers, as most templates do. Warns if it drops other keys of messages."""
    written = "".join(text.split())
    thoughts = ("reasoning_content", "reasoning", "thinking")

    def is_there(x: object) -> bool:
        """Whether x is in the rendered text, ignoring white space. Of a list or dict, every part must be there. False
        if the template prints it in Python's notation, {'a': 1}."""
        if isinstance(x, dict):
            parts = [value for key, value in x.items() if key not in ("type", "id", "index")]
        elif isinstance(x, list):
            parts = x
        else:
            plain = x if isinstance(x, str) else json.dumps(x)
            forms = [plain, json.dumps(plain, ensure_ascii=False)[1:-1]]
            return any("".join(form.split()) in written for form in forms)
        is_as_printed = "'" in repr(x) and "".join(repr(x).split()) in written
        return all(map(is_there, parts)) and not is_as_printed

    for number, turn in enumerate(turns):
        message = dict(turn)
        role = message.pop("role")
        if role == "assistant" and number < len(turns) - 1:
            message = {key: value for key, value in message.items() if key not in thoughts}
            message["content"] = message["content"].rpartition("</think>")[2]
        for call in message.get("tool_calls", []):
            arguments = call.get("function", call).get("arguments")
            quoted = "".join(json.dumps(arguments, ensure_ascii=False).split())
            is_quoted = isinstance(arguments, str) and quoted in written
            require(not is_quoted, "the chat template writes the arguments of a tool call in quotes: make them a dict")
        for key, value in message.items():
            if key in ("content", "tool_calls", *thoughts):
                where = f"{key!r} of message {number}, of role {role!r}"
                require(is_there(value), f"the chat template leaves out {where}, or a part of it")
            elif key not in ("name", "tool_call_id") and not is_there(value):
                warnings.warn(f"the chat template ignores the key {key!r} of messages, so the model does not read it")
    for tool in options.get("tools", []):
        name = tool.get("function", tool).get("name")
        require(is_there(name), f"the chat template leaves out the tool {name!r}")
    for option in options:
        require(option in str(tokenizer.chat_template), f"the chat template has no option {option!r}")


def render_whole(turns: list[dict], tokenizer: AutoTokenizer, options: dict) -> str:
    """Renders a conversation up to the token that ends its last turn. If that turn is an answer, the text before it is
    exactly the prompt of a rollout.

    Mistral's template writes a system message into the last user turn, but drops it if an answer follows. In that case
    the prompt is rendered alone, and the answer as in a conversation without the system message.
    """
    _, after_end = turn_end(tokenizer)
    text = render(turns, tokenizer, options).removesuffix(after_end)
    others = [turn for turn in turns if turn["role"] != "system"]
    if len(others) in (0, 1, len(turns)) or turns[-1]["role"] != "assistant":
        return text
    head = render(turns[:-1], tokenizer, options, is_prompt=True)
    short_head = render(others[:-1], tokenizer, options, is_prompt=True)
    short = render(others, tokenizer, options).removesuffix(after_end)
    if text.startswith(head) or not short.startswith(short_head):
        return text
    return head + short.removeprefix(short_head)


def encode_text(text: str, tokenizer: AutoTokenizer) -> list[int]:
    """Token ids of a text, so that it can be continued. Keeps one BOS if the tokenizer adds it; removes an EOS that the
    tokenizer adds."""
    ids = tokenizer(text)["input_ids"]
    if ids[:2] == [tokenizer.bos_token_id] * 2:  # the text already starts with BOS
        ids = ids[1:]
    for end in (tokenizer.eos_token, tokenizer.sep_token):
        is_of_text = end and text.endswith(end) and ids[-2:-1] != ids[-1:]
        if len(ids) > 1 and tokenizer.decode(ids[-1]) == end and not is_of_text:
            ids = ids[:-1]
    return ids


def encode_prompt(prompt: str | list[dict], tokenizer: AutoTokenizer, options: dict = {}) -> list[int]:
    """Token ids of a text, or of a conversation up to where the assistant's answer begins. `options` are those of the
    chat template."""
    if isinstance(prompt, str):
        require(
            not options, "the columns tools and chat_template_kwargs are for conversations, but the prompt is a text"
        )
        return encode_text(prompt, tokenizer)
    turns = as_turns(prompt, "user")
    if not turns:
        return []
    is_question = turns[-1]["role"] != "assistant"
    require(is_question, "the prompt ends with a message of the assistant, so there is nothing to answer")
    text = render(turns, tokenizer, options, is_prompt=True)
    check_rendered(text, turns, tokenizer, options)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def print_lengths(what: str, lengths: Sequence[int], *notes: str) -> None:
    """Prints one line: the number of rows, their lengths, and notes on rows that were cut or dropped."""
    sizes = f"{what}: {len(lengths)}, of {min(lengths)} to {max(lengths)} tokens, median {int(np.median(lengths))}"
    print("; ".join(filter(None, [sizes, *notes])))


def show_first_row(columns: dict[str, Text]) -> None:
    """Prints a table of the first row, as the model reads it."""
    table = Table(*columns, title="the first row, as the model reads it", min_width=40)
    table.add_row(*columns.values())
    Console().print(table)


def as_read(ids: list[int], tokenizer: AutoTokenizer, is_green: Sequence[bool] = ()) -> Text:
    """Decodes tokens, including special ones, with some in green. Leaves out the middle of a long text."""
    text = Text()
    start = 0
    for green, tokens in groupby(is_green or [False] * len(ids)):
        end = start + len(list(tokens))
        text.append(tokenizer.decode(ids[:end])[len(text) :], style="green" if green else "")
        start = end
    if len(text) > 1200:
        text = text[:600] + Text(" … ", style="bold") + text[-600:]
    return text


def decode_after(prompt: list[int], response: list[int], tokenizer: AutoTokenizer) -> str:
    """Decodes a response after its prompt, without special tokens. (SentencePiece drops the first space of a response
    that is decoded without its prompt.)"""
    head = tokenizer.decode(prompt, skip_special_tokens=True)
    text = tokenizer.decode([*prompt, *response], skip_special_tokens=True)
    if not text.startswith(head):  # the prompt ends in the middle of a character
        return tokenizer.decode(response, skip_special_tokens=True)
    return text.removeprefix(head)


def batch(rows: list, number: int, size: int, seed: int) -> list:
    """Returns batch `number` (0, 1, ...) of an endless sequence of passes over the rows, each in a new order."""
    positions = range(number * size, (number + 1) * size)
    n = len(rows)
    order = [shuffled(n, seed, i // n)[i % n] for i in positions]
    return [rows[i] for i in order]


@lru_cache(maxsize=2)
def shuffled(n: int, seed: int, number: int) -> list[int]:
    """The numbers from 0 to n-1 in a random order, which depends on the seed and the number, for example of a pass."""
    # The 1 makes this seed differ from that of a step
    generator = torch.Generator().manual_seed(make_seed(seed, number, 1))
    return torch.randperm(n, generator=generator).tolist()


def make_seed(*numbers: int) -> int:
    """Combines numbers into one seed. Random numbers depend on --seed and the number of a step or pass (dropout also on
    the process), not on earlier steps."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def pad(rows: list[list[int]], tokenizer: AutoTokenizer, args: Args, side: str = "right") -> tuple[Tensor, Tensor]:
    """Pads lists of token ids to one tensor (B, S); returns it, and its mask (B, S), true on real tokens."""
    padded = tokenizer.pad({"input_ids": rows}, padding_side=side, return_tensors="pt").to(args.device)
    return padded["input_ids"], padded["attention_mask"].bool()


def autocast(args: Args) -> torch.autocast:
    """Autocast to bfloat16 with --bf16. Trained weights, losses and everything after the logits stay in float32.

    Within the context, autocast keeps a bfloat16 copy of all trained weights, but not with --gradient-checkpointing,
    which saves memory.
    """
    keeps_copies = not args.gradient_checkpointing
    return torch.autocast(torch.device(args.device).type, torch.bfloat16, args.bf16, keeps_copies)


# --- Processes


def start(args: Args) -> None:
    """Joins the processes of torchrun, if it started this one, and configures the libraries."""
    ACT2FN["gelu_new"] = GELUTanh  # GPT-2's activation, in one operator instead of eight
    logging.set_verbosity_error()  # transformers would report each new head
    logging.disable_progress_bar()
    datasets.disable_progress_bars()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # when one process saves a checkpoint
    is_sharded = args.zero_stage or args.shard_size or args.offload
    can_shard = args.zero_stage and "RANK" in os.environ
    require(can_shard or not is_sharded, "sharding needs torchrun --nproc-per-node N, and --zero-stage 2 or 3")
    is_new = not args.resume and not RANK  # process 0 creates the folder, perhaps before another gets here
    is_taken = is_new and args.output_dir and Path(args.output_dir).exists()
    require(not is_taken, f"{args.output_dir} exists: choose another --output-dir, or continue with --resume")
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", device.index or 0)))
    if device.type != "cpu":
        torch.set_float32_matmul_precision("high")  # TF32; plain float32 does not use the tensor cores
    elif sys.platform == "linux" and WORLD_SIZE == 1:
        keep_freed_memory()
    if "RANK" in os.environ and not dist.is_initialized():
        backends = {kind: dist.get_default_backend_for_device(kind) for kind in ("cpu", device.type)}
        timeout = timedelta(hours=2)  # one process may load a large model, or wait for a slow reward function
        dist.init_process_group(",".join(f"{kind}:{name}" for kind, name in backends.items()), timeout=timeout)
    set_seed(args.seed)  # for adapters and heads; each step sets its own seed


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory. By default it returns large tensors to the system and requests them again page by
    page, which takes up to half of the time if the vocabulary is large. The numbers are from glibc's malloc.h."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def all_reduce(x: Tensor) -> Tensor:
    """Sums x over all processes, in place."""
    if WORLD_SIZE > 1:
        dist.all_reduce(x)
    return x


def all_gather(x: Tensor) -> Tensor:
    """Returns all rows (B, ...). Each process passes its own, RANK, RANK + WORLD_SIZE, ..., as x (B/WORLD_SIZE,
    ...)."""
    shares = [x.clone() for _ in range(WORLD_SIZE)]
    if WORLD_SIZE > 1:
        dist.all_gather(shares, x.contiguous())
    return torch.stack(shares, 1).flatten(0, 1)


def place(model: nn.Module | None, args: Args) -> nn.Module | None:
    """Moves a model to the device and returns it. With --zero-stage, torch's FSDP2 shards it, layer by layer.

    Stage 2 shards only models in training, and keeps gathered weights until the backward pass. FSDP2 averages the
    gradients of shards over the processes.
    """
    if model is None or any(isinstance(module, FSDPModule) for module in model.modules()):
        return model
    is_trained = any(p.requires_grad for p in model.parameters())
    if args.bf16:
        use_bfloat16(model)
    if args.zero_stage == 0:
        return model.to(args.device)
    weights = model.state_dict()
    buffers = dict(model.named_buffers())
    model.to("meta")  # also on process 0, which keeps the weights in `weights`
    tie(model)
    if is_trained or args.zero_stage == 3:
        shard_layers(model, args)
    else:
        model.to_empty(device=args.device)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=args.offload)
    set_model_state_dict(model, {} if RANK else weights, options=options)
    for name, buffer in buffers.items():  # a state dict lacks some buffers, such as rotary frequencies
        owner, _, last = name.rpartition(".")
        received = torch.empty_like(buffer, device=args.device) if RANK else buffer.to(args.device)
        dist.broadcast(received, 0)
        model.get_submodule(owner)._buffers[last] = received
    tie(model)
    return model


def reshard(model: nn.Module) -> None:
    """Frees the weights that a pass through a sharded model has gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def tie(model: nn.Module) -> None:
    """Shares tied weights again: a move from `meta` separates them."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.tie_weights()


def shard_layers(model: nn.Module, args: Args) -> None:
    """Shards a model with torch's FSDP2, layer by layer."""
    device_type = torch.device(args.device).type
    size = args.shard_size or WORLD_SIZE
    mesh = init_device_mesh(device_type, (WORLD_SIZE // size, size), mesh_dim_names=("replicate", "shard"))
    options = {"mesh": mesh["shard"] if size == WORLD_SIZE else mesh, "reshard_after_forward": args.zero_stage == 3}
    if args.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device_type == "cuda")
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]  # its blocks
    roots = [model.base_model, model.score] if hasattr(model, "score") else [model]  # read_reward calls these two
    for module in layers + roots:
        fully_shard(module, **options)


@contextmanager
def gathered(model: nn.Module, args: Args) -> Iterator[None]:
    """Within this context, each process has all weights of a sharded model: they are sent once, not for each token.
    Autocast keeps a bfloat16 copy of them, unless only shards fit."""
    torch.set_autocast_cache_enabled(args.gather_for_rollout or args.zero_stage < 3)
    parts = [module for module in model.modules() if isinstance(module, FSDPModule) and args.gather_for_rollout]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(args.zero_stage == 3, recurse=False)
            part.reshard()


def clip_gradient(parameters: list[Tensor], max_norm: float) -> Tensor:
    """Clips the gradient to max_norm. Returns its norm before clipping.

    Gradients are first averaged over processes, unless FSDP2 has already averaged them.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if WORLD_SIZE > 1 and not isinstance(gradients[0], DTensor):
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient /= WORLD_SIZE
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


# --- The run


class Run:
    """The output of a run: progress bar, tables, metrics.jsonl, W&B, checkpoints, and at the end model and curves.

    A step is one update. To log a number, put it into the stats, under any name; names that end in grad_norm are
    checked for NaN and infinity. A checkpoint is a folder: each process writes its shards of weights and moments, as
    safetensors; then process 0 adds state.json and renames the folder. On a CPU, a resumed run equals an uninterrupted
    run bit for bit.
    """

    def __init__(
        self,
        args: Args,
        num_steps: int,
        optimizer: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LRScheduler,
        memory: dict,
        asked: Args,
        **models: nn.Module | None,
    ):
        """`memory` holds what one step passes to the next, besides weights and moments, as JSON values. `asked` are the
        settings before sizes were chosen. At the end, `model` is saved, and `ema` beside it."""
        self.args = args
        self.asked = asked
        self.num_steps = num_steps
        self.optimizer = optimizer
        self.schedule = schedule
        self.memory = memory
        self.models = nn.ModuleDict({name: model for name, model in models.items() if model is not None})
        self.step = 0
        self.seconds = {}  # of each phase of this step
        self.num_broken = 0  # updates in a row with a non-finite gradient
        self.stop_requested = False
        self.is_logged = False  # whether any step was logged
        self.saved_step = 0  # the step of the newest checkpoint
        now = datetime.now().strftime("%Y%m%d-%H%M%S-%f")  # many runs may start in one second
        self.output = Path(args.resume or args.output_dir or f"runs/{args.exp_name}__{args.seed}__{now}")
        if not RANK:
            self.open_folder()
        if WORLD_SIZE > 1:
            received = [self.output]
            dist.broadcast_object_list(received)  # takes the folder of process 0, since clocks may differ
            self.output = received[0]
            require(self.output.exists(), f"process {RANK} finds no {self.output}: all nodes must share this folder")
        if args.resume:
            self.restore()
        if not RANK:
            settings = code_version() | {"chosen_here": chosen_here(self.asked)} | asdict(args)
            (self.output / "args.new").write_text(json.dumps(settings, indent=2) + "\n")
            (self.output / "args.new").replace(self.output / "args.json")  # a crash leaves the old file or the new one
        self.wandb = None
        if args.track and not RANK:
            self.start_wandb()
        print(f"output: {self.output}")
        self.bar = tqdm(total=num_steps, initial=self.step, dynamic_ncols=True, disable=RANK > 0)

    def open_folder(self) -> None:
        """Creates the run's folder, or opens it again with --resume. Two runs cannot have the same folder."""
        if not self.args.resume:
            self.output.mkdir(parents=True)
        self.lock = FileLock(self.output / ".lock", timeout=0).acquire()  # released when the process ends
        self.file = open(self.output / "metrics.jsonl", "a")
        shutil.rmtree(self.output / "checkpoints/unfinished", ignore_errors=True)

    def start_wandb(self) -> None:
        """Starts the W&B run, or continues it in a resumed run."""
        import wandb

        self.wandb = wandb.init(
            project=self.args.wandb_project_name,
            entity=self.args.wandb_entity,
            name=self.output.name,
            config=asdict(self.args),
            dir=self.output,
            id=self.memory.get("wandb_id"),
            resume="allow",
        )
        self.memory["wandb_id"] = self.wandb.id

    def steps(self) -> Iterator[int]:
        """Yields the numbers of the remaining steps, and saves a checkpoint after a step if one is due. Ctrl-C and
        SIGTERM end the loop after the current step, unless they are ignored, as Ctrl-C is in background jobs of a shell
        script."""
        handlers = {
            number: signal.signal(number, self.request_stop)
            for number in (signal.SIGINT, signal.SIGTERM)
            if signal.getsignal(number) != signal.SIG_IGN
        }
        hook = self.optimizer.register_step_post_hook(lambda *_: setattr(self, "state", "changing"))
        try:
            while self.step < self.num_steps:
                self.step += 1
                self.state = "unchanged"  # the weights; "changing" in the update, then "updated"
                self.memory_before = deepcopy(self.memory)
                yield self.step
                must_stop = self.must_stop()
                if must_stop or self.is_due(self.args.save_steps):
                    self.save()
                if must_stop:
                    break
        except BaseException:  # an error in the body of the loop arrives here as GeneratorExit
            self.rescue()
            raise
        finally:
            hook.remove()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def rescue(self) -> None:
        """Saves a checkpoint when an error ends the loop, and prints how to resume. After a complete update, it saves
        this step; before the update, the previous one. It saves nothing if the error came during the update, or before
        the first step was logged."""
        if self.saved_step == self.step or (self.step == 1 and not self.is_logged):
            return
        prints_message = not RANK
        try:
            if self.state == "unchanged":
                self.step -= 1
                self.memory = self.memory_before
            if self.state != "changing" and self.saved_step != self.step:
                self.wait_for_all()
                self.save()
        except BaseException as error:  # torch has an error that is not an Exception
            print(f"no checkpoint was written: {error!r:.500}", file=sys.stderr)
            prints_message = True  # process 0 may never get here
        if self.saved_step and prints_message:
            print(f"\nto continue from step {self.saved_step}: --resume {self.output}", file=sys.stderr)

    def wait_for_all(self) -> None:
        """Waits up to 20 seconds for all processes: after an error in one of them, the others may never get here."""
        if WORLD_SIZE > 1:
            store = dist.distributed_c10d._get_default_store()
            store.set(f"ended {RANK}", "")
            store.wait([f"ended {rank}" for rank in range(WORLD_SIZE)], timedelta(seconds=20))

    def request_stop(self, number: int, frame) -> None:
        """Handles Ctrl-C and SIGTERM. (torchrun gives the step 30 seconds to end: see its --shutdown-timeout.)"""
        self.stop_requested = True
        print("\nstopping after this step (Ctrl-\\ stops at once)", file=sys.stderr)

    def must_stop(self) -> bool:
        """Whether any process was asked to stop. Then all processes stop after this step."""
        return bool(all_reduce(torch.tensor(int(self.stop_requested))))

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Times one phase of the step."""
        start = time.perf_counter()
        yield
        if self.args.device != "cpu":
            torch.accelerator.synchronize()
        self.seconds[phase] = time.perf_counter() - start
        if self.state == "changing":
            self.state = "updated"

    def log(self, stats: dict[str, float], *shown: str) -> None:
        """Logs to metrics.jsonl and W&B, and shows the metrics named in `shown` beside the bar. Exits after five
        updates in a row with non-finite gradients."""
        norms = [x for name, x in stats.items() if name.endswith("grad_norm")]
        self.num_broken = 0 if all(map(math.isfinite, norms)) else self.num_broken + 1
        stats |= {f"time/{phase}": seconds for phase, seconds in self.seconds.items()}
        stats["perf/peak_memory_mb"] = peak_memory_mb()
        self.bar.set_postfix({name.split("/")[-1]: stats[name] for name in shown}, refresh=False)
        self.bar.update()
        if not RANK:
            line = {name: x if math.isfinite(x) else None for name, x in stats.items()}  # JSON has no NaN
            print(json.dumps(line), file=self.file, flush=True)
        self.is_logged = True
        self.state = "updated"
        if self.wandb:
            self.wandb.log(stats, step=self.step)
        require(
            self.num_broken < 5,
            "the gradient was NaN or infinite in five updates in a row, and their optimiser steps were skipped: "
            "the learning rate may be too high",
        )

    def is_due(self, every: int) -> bool:
        """Whether this step is a multiple of `every`, or the last one."""
        return self.step % every == 0 or self.step == self.num_steps

    def is_one_of(self, times: int) -> bool:
        """Whether this is one of `times` evenly spaced steps, which include the last one."""
        return self.step * times // self.num_steps > (self.step - 1) * times // self.num_steps

    def show(self, columns: dict[str, list[str]], tensors: dict[str, object]) -> None:
        """Prints texts as a table, and saves the tensors that belong to them in samples/."""
        if RANK:
            return
        table = Table(*columns, title=f"update {self.step} of {self.num_steps}", show_lines=True)
        for row in zip(*columns.values()):
            table.add_row(*map(Text, row))  # a Text shows markup as it is
        with self.bar.external_write_mode():
            Console().print(table)
        tensors = {name: x.cpu().contiguous() for name, x in tensors.items() if isinstance(x, Tensor)}
        folder = self.output / "samples"
        folder.mkdir(exist_ok=True)
        save_file(tensors, folder / f"step-{self.step:08d}.safetensors")

    def tensors(self, create_moments: bool = False) -> dict[str, Tensor]:
        """Returns all trainable weights and the optimiser's moments by name; if sharded, this process's shards. The
        optimiser has no moments before its first step; `create_moments` creates them, so that a checkpoint can be
        loaded into them."""
        reshard(self.models)
        weights = {name: p for name, p in self.models.named_parameters() if p.requires_grad}
        if not self.optimizer.state and not create_moments:
            return weights
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        moments = get_optimizer_state_dict(self.models, self.optimizer, options=options)
        return weights | {name: x for name, x in moments.items() if isinstance(x, Tensor)}

    def save(self) -> None:
        """Writes a checkpoint, under another name until it is complete, and removes old ones."""
        folder = self.output / "checkpoints"
        unfinished = folder / "unfinished"
        tensors = self.tensors()
        files, size = {}, 0
        for name, x in tensors.items():
            size += x.nbytes
            files[name] = 1 + size // 2**28  # a new file for each 256 MB, since the writer keeps a file in memory
        dcp.save(tensors, storage_writer=HuggingFaceStorageWriter(unfinished, files, save_distributed=True))
        if RANK:
            self.saved_step = self.step
            return
        num_files = len(list(unfinished.iterdir()))
        state = {"step": self.step, "files": num_files, "bytes_of_metrics": self.file.tell(), "memory": self.memory}
        (unfinished / "state.json").write_text(json.dumps(state))
        unfinished.rename(folder / f"step-{self.step:08d}")
        self.saved_step = self.step
        for old in sorted(folder.glob("step-*"))[: -self.args.save_total_limit]:
            shutil.rmtree(old)

    def restore(self) -> None:
        """Restores the newest checkpoint, or starts from scratch if there is none."""
        state = {"step": 0, "bytes_of_metrics": 0, "memory": {}}
        for folder in sorted((self.output / "checkpoints").glob("step-*"))[-1:]:
            print(f"reading {folder} (if it is damaged, remove it)")
            state = self.load(folder)
        self.memory.update(state["memory"])
        self.step = state["step"]
        for _ in range(self.step):
            self.schedule.step()
        self.saved_step = self.step
        if not RANK:
            lines = (self.output / "metrics.jsonl").read_bytes()
            if len(lines) < state["bytes_of_metrics"]:
                warnings.warn("metrics.jsonl lacks lines: was the folder copied during the run?")
            self.file.truncate(lines.rfind(b"\n", 0, state["bytes_of_metrics"]) + 1)
            self.file.seek(0, os.SEEK_END)  # truncate does not move the position
        print(f"continues after step {self.step}")

    def load(self, folder: Path) -> dict:
        """Reads a checkpoint into weights and moments, in place; returns its state.json.

        Raises if the checkpoint is incomplete. All weights must be there, but unused weights have no moments.
        """
        state = json.loads((folder / "state.json").read_text())
        files = len(list(folder.glob("*.safetensors")))
        if files != state["files"]:
            raise OSError(f"{folder} has {files} of its {state['files']} files of weights")
        reader = HuggingFaceStorageReader(folder)
        stored = reader.read_metadata().state_dict_metadata
        tensors = self.tensors(create_moments=True)
        unknown = sorted(set(stored) - set(tensors))
        require(
            not unknown,
            f"{folder} has weights that this run does not train, such as {unknown[:2]}: resume with the same settings",
        )
        tensors = {name: x for name, x in tensors.items() if name in stored or not name.startswith("state.")}
        dcp.load(tensors, storage_reader=reader)
        for name, p in self.models.named_parameters():
            if f"state.{name}.step" not in stored:
                self.optimizer.state.pop(p, None)
        return state

    def finish(self) -> None:
        """Saves the model, its moving average in ema/, the model card and the curves."""
        self.bar.close()
        save_model(self.models["model"], self.output, self.args)
        if "ema" in self.models:
            save_model(self.models["ema"], self.output / "ema", self.args)
        if RANK:
            return
        self.file.close()
        self.write_card()
        draw_curves(self.output)
        if self.wandb:
            self.wandb.finish()
        print(f"saved in {self.output}: the model, its card, metrics.jsonl and curves.png")
        if self.step < self.num_steps:
            print(f"to continue from step {self.step}: --resume {self.output}")

    def write_card(self) -> None:
        """Writes README.md: base model, data, settings that are not the default, last metrics. Its header, for Hugging
        Face, has the script, and the base model if it is on the hub."""
        made = code_version()
        base = self.args.model
        is_on_hub = base and locate(base) == base and not Path(base).exists()
        defaults = asdict(Args())
        changed = [f"{name}={x!r}" for name, x in asdict(self.asked).items() if x != defaults[name]]
        lines = pandas.read_json(self.output / "metrics.jsonl", lines=True)
        last = lines.filter(regex="|".join(CURVES.values())).ffill().iloc[-1]  # not every line has an evaluation
        metrics = [f"{name} {x:.4g}" for name, x in last.items()]
        card = [
            f"---\ntags: [{Path(__file__).stem}]",
            f"base_model: {base}\n---" if is_on_hub else "---",
            f"Made by {made['script']}, version {made['version']} (revision {made['revision']}).\n",
            f"Base model: {base or 'none'}. Data: {self.args.dataset}.\n",
            f"Settings that are not the default: {', '.join(changed) or 'none'} (args.json has all).\n",
            f"After {self.step} of {self.num_steps} steps: {', '.join(metrics)} (metrics.jsonl has all).\n",
        ]
        (self.output / "README.md").write_text("\n".join(card))


def peak_memory_mb() -> float:
    """Peak memory in MB: of the GPU with CUDA, otherwise of this process; 0 on Windows, which does not report it."""
    if torch.cuda.max_memory_allocated() or sys.platform == "win32":  # 0 without a GPU, or if it is not used
        return torch.cuda.max_memory_allocated() / 2**20
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def save_model(model: nn.Module, folder: Path, args: Args) -> None:
    """Saves the model (safetensors) and its tokenizer; with LoRA the adapter, and in merged/ the complete model."""
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if RANK:
        return
    tied = model.all_tied_weights_keys
    model.save_pretrained(folder, state_dict={name: x for name, x in weights.items() if name not in tied})
    model.tokenizer.save_pretrained(folder)
    if args.lora_r:
        from peft import PeftModel

        base = load_model(model.auto_class, args.model, args, new_head=True, config=model.config)
        base.generation_config = getattr(model, "generation_config", None)  # a reward model has none
        PeftModel.from_pretrained(base, folder).merge_and_unload().save_pretrained(folder / "merged")
        model.tokenizer.save_pretrained(folder / "merged")


def code_version() -> dict[str, str]:
    """The name of this script, its version, and the git revision of its folder, if it has one."""
    command = "git describe --always --dirty"  # dirty: with uncommitted changes
    git = subprocess.run(command, shell=True, cwd=Path(__file__).parent, capture_output=True, text=True)
    return {"script": Path(__file__).name, "version": VERSION, "revision": git.stdout.strip()}


def chosen_here(asked: Args) -> list[str]:
    """Names of settings that the user did not set and that depend on the machine. A resumed run, which may be on
    another machine, chooses them again."""
    sizes = ("micro_batch_size", "local_rollout_forward_batch_size")
    names = [name for name, x in asdict(asked).items() if name in sizes and x is None]
    if asked.device == Args().device:
        names.append("device")
    return names


def draw_curves(folder: Path) -> None:
    """Draws curves.png: for each title in CURVES, a panel of the metrics that match its pattern. Evaluations are
    points."""
    figure = Figure((5 * len(CURVES), 3.2), layout="constrained")
    lines = pandas.read_json(folder / "metrics.jsonl", lines=True)
    lines.index += 1
    for axis, (title, pattern) in zip(figure.subplots(1, len(CURVES)), CURVES.items()):
        shown = lines.filter(regex=pattern)
        styles = ["o" if name.startswith("eval") else "-" for name in shown]
        shown.plot(ax=axis, style=styles, title=title, xlabel="step")
        axis.legend(fontsize=7)
    figure.savefig(folder / "curves.png", dpi=120)


def read_command_line() -> Args:
    """Reads the settings from the command line; with --resume, the others come from that run."""
    flags = [word.partition("=") for word in sys.argv[1:]]
    words = [ALIASES.get(flag.replace("_", "-"), flag) + equals + value for flag, equals, value in flags]
    read = partial(tyro.cli, Args, args=words, description=__doc__.splitlines()[0])
    args = read()
    if args.resume is None:
        return args
    settings = json.loads(Path(args.resume, "args.json").read_text())
    script = settings.get("script", Path(__file__).name)
    require(script == Path(__file__).name, f"{args.resume} is a run of {script}: resume it with that script")
    dropped = ["script", "version", "revision", "chosen_here", *settings.get("chosen_here", [])]
    args = read(default=Args(**{name: x for name, x in settings.items() if name not in dropped}))
    require(args.output_dir == settings["output_dir"], "a resumed run stays in its folder: remove --output-dir")
    is_same_size = getattr(args, "batch_size", None) == settings.get("batch_size")
    require(is_same_size, "a resumed run keeps its --batch-size; to save memory, set --micro-batch-size")
    return args


def main() -> None:
    """Trains with the settings of the command line. Under torchrun, only process 0 prints to standard output."""
    if RANK:
        sys.stdout = open(os.devnull, "w")
    train(read_command_line())
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
