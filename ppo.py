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
"""PPO for language models: policy + reward -> better policy.

For each batch of prompts:
  1. sample     response y_1..y_T ~ pi(. | prompt), at the given temperature, up to and including the stop token
  2. score      ref_logprobs of a frozen copy of the initial policy; values V_old,t of the critic; one score per
                text, minus `missing_eos_penalty` if it has no stop token
  3. reward     r_t = -kl_coef * KL_t; the score is added to r at the last real token
  4. advantage  delta_t = r_t + gamma V_old,t+1 - V_old,t;  A_t = delta_t + gamma lam A_{t+1};  R_t = A_t + V_old,t
                whiten A
  5. loss       ratio_t = pi(y_t) / pi_old(y_t);  policy: mean_t max(-A_t ratio_t, -A_t clip(ratio_t, 1-eps, 1+eps))
                value: mean_t 1/2 max((V_t - R_t)^2, (clip(V_t, V_old,t -+ eps_v) - R_t)^2)
                total: policy + vf_coef * value
  6. update     `num_ppo_epochs` passes over the batch, each with `num_mini_batches` optimiser steps
  7. adapt      with --adaptive-kl: kl_coef, to keep the KL near a target

Tensor layout for a prompt of 3 tokens (left-padded to 4), T = 6, and a response that stops after 4 tokens. A dot is
padding, which may have any value and is masked.

  model input   PAD  p1  p2  p3 | y1  y2  y3  EOS  .   .      prompts (B, P) and responses (B, T)
  mask                          |  1   1   1   1   0   0      true up to and including the stop token
  logprobs                      |  *   *   *   *   .   .      of y_t, read from the logits one position to the left
  values                        |  *   *   *   *   .   .      of the state before y_t, also one position to the left
  -kl_coef*KL                   |  *   *   *   *   .   .      one per token
  score                         |              *              one per response, on its last real token

The policy pi is the language model being trained. A rollout is a batch of its responses. The critic predicts the sum of
future rewards. The KL, in nats, measures how far pi has moved from the reference, a frozen copy of the initial policy.
Here the KL is subtracted from the reward (InstructGPT), so a token's advantage includes the KL of this token and of all
later ones. GRPO instead adds a KL term to the loss of each token, which does not affect other tokens.

Differences from textbook PPO: there is no environment; an episode is one response, and the state is the text so far.
Every token has an advantage, although there is only one score. Means over tokens exclude padding. Tokens are sampled
from softmax(logits / temperature) without top-k or top-p, because the loss uses that distribution.
Papers: Schulman et al. 2017 (arXiv 1707.06347, eq. 7, 11-12); Schulman et al. 2016 (GAE, 1506.02438, eq. 16); Ziegler
et al. 2019 (1909.08593, sec. 2.2); Ouyang et al. 2022 (InstructGPT, 2203.02155, sec. 3.5); Huang et al. 2024 (the N+
implementation details, 2403.17031).

  python ppo.py                       # the toy world: offline, half a minute on two CPU cores, score from 0 to about 5
  python ppo.py --model gpt2 --bf16   # GPT-2 on a GPU, with the same prompts and reward (on a CPU, without --bf16)

Shapes: B rows in a batch, b in a micro-batch, P prompt tokens (left-padded), T response tokens (right-padded), S tokens
of any text, V vocabulary, D hidden size.
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
from collections import Counter, defaultdict
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
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers import Cache, GenerationConfig, PreTrainedModel, StaticCache, get_scheduler, set_seed
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
    # --- PPO ---
    # passes over each batch. More: faster learning, until most ratios are clipped (TRL: 4)
    num_ppo_epochs: Count = 4
    num_mini_batches: Count = 1  # optimiser steps in one pass over the batch (TRL 0.16)
    cliprange: Positive = 0.2  # eps of the clipped ratio (PPO, eq. 7)
    cliprange_value: Positive = 0.2  # eps_v of the clipped value (TRL, N+ details)
    # weight of the value loss (TRL); has little effect on a separate critic, since AdamW rescales its gradient
    vf_coef: NonNegative = 0.1
    gamma: Share = 1.0  # discount; 1 because an episode is short
    lam: Share = 0.95  # GAE's lambda: 0 relies on the critic, 1 on the sampled return
    whiten_rewards: bool = False  # scale per-token rewards to variance 1, keeping their mean (TRL)
    whiten_advantages: bool = True  # shift and scale advantages to mean 0, variance 1 over the batch (TRL: always)
    use_score_scaling: bool = False  # divide scores by their running standard deviation (TRL 0.7)
    use_score_norm: bool = False  # with use_score_scaling: first subtract their running mean (TRL 0.7)
    score_clip: Positive | None = None  # clip scores, after any scaling, to +- this (TRL 0.7)
    ratio_threshold: Positive = 10.0  # skip the step of a mini-batch if its mean ratio exceeds this (TRL 0.7)
    target_kl: Positive | None = None  # end an update once policy/approxkl_avg exceeds 1.5 times this (TRL 0.7)

    # --- KL to the reference ---
    # weight of the KL in the reward (TRL 0.16). Too low: the policy exploits the reward; too high: it hardly moves
    kl_coef: NonNegative = 0.05
    # per token, with d = log(pi/ref): k1 or kl: d; abs: |d|; k2 or mse: d^2 / 2; k3: exp(-d) - 1 + d; full: exact
    kl_estimator: Literal["k1", "kl", "abs", "k2", "mse", "k3", "full"] = "k1"
    adaptive_kl: bool = False  # adapt kl_coef to keep the KL near kl_target (Ziegler et al. 2019, sec. 2.2)
    kl_target: Positive = 6.0  # with adaptive_kl: the target, in nats per response (TRL 0.7)
    kl_horizon: Count = 10_000  # with adaptive_kl: kl_coef changes by up to about 20 % in this many episodes (TRL 0.7)

    # --- Rollout ---
    # maximum tokens in a response (TRL 0.16). More: slower, and harder to tell which tokens earned the score
    response_length: Count = 53
    # if set, each rollout has a random limit, from this to response_length (cf. TRL 0.7)
    response_length_min: Count | None = None
    temperature: Positive = 0.7  # divides the logits in rollout, reference and loss (TRL 0.16). Lower: less exploration
    # tokens that end a response: eos (all EOS tokens of the model), none, token ids, or texts of one token each
    stop_token: tuple[Name, ...] = ("eos",)
    # subtracted from the score if there is no stop token (TRL's examples: 1). 0: the policy may never learn to stop
    missing_eos_penalty: NonNegative = 1.0
    # responses sampled at once (TRL); by default computed from free memory; changes only the rounding
    local_rollout_forward_batch_size: Count | None = None

    # --- Optimisation ---
    # learning rate of AdamW; by default computed from the policy's size, and ten times as high with LoRA
    learning_rate: Positive | None = None
    # learning rate of the critic; by default the policy's, or a tenth of it with LoRA and a separate critic
    critic_learning_rate: Positive | None = None
    critic_warmup_updates: Natural = 0  # number of first updates that train only the critic
    lr_scheduler_type: Name = "linear"  # name of a transformers schedule that depends only on the step (TRL: linear)
    warmup_ratio: Share = 0.0  # share of the run in which the learning rate warms up from 0
    weight_decay: NonNegative = 0.0  # weight decay of AdamW
    adam_betas: tuple[Decay, Decay] = (0.9, 0.999)  # betas of AdamW (OpenRLHF: 0.9 0.95)
    adam_epsilon: Positive = 1e-8  # epsilon of AdamW (torch and TRL; N+ details: 1e-5)
    max_grad_norm: Positive = 1.0  # the gradients of policy and critic are each clipped to this norm

    # --- Batch sizes ---
    # responses per update, on all GPUs together; by default 64
    batch_size: Count | None = None
    micro_batch_size: Count | None = None  # responses per forward/backward pass; changes only the rounding
    # TRL's name for micro_batch_size. If batch_size is not set, it becomes this x gradient_accumulation_steps x
    # num_mini_batches x GPUs
    per_device_train_batch_size: Count | None = None
    gradient_accumulation_steps: Count = 1  # with per_device_train_batch_size: passes per optimiser step (TRL)

    # --- Models: a folder, or a name on the hub ---
    # the initial policy, which is also the reference of the KL
    model: Name = "toy/sft"
    reward_model: Name = "toy/reward_model"  # a classifier with one label; its tokenizer may differ from the policy's
    reward_fn: tuple[Name, ...] = ("reward_model",)  # reward_model, or file.py:name of a function; several are added up
    reward_weights: tuple[Weight, ...] = ()  # weights of these rewards; by default all 1 (TRL); 0: only logged
    critic: Literal["separate", "shared"] = "separate"  # a separate network, or a value head on the policy (TRL 0.7)
    lora_r: Natural = 0  # rank of LoRA adapters (peft), 0 for none; the reference is the policy without them
    lora_alpha: Positive = 32.0  # the adapter's output is scaled by lora_alpha / lora_r
    lora_target_modules: Name = "all-linear"  # layers to adapt: all-linear, or a regular expression for their names
    bf16: bool = False  # run the models in bfloat16 (autocast); trained weights and optimiser state stay in float32
    attn_implementation: Name | None = None  # eager, sdpa, flash_attention_2, ...; by default transformers' own choice
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: far less memory, a third slower
    trust_remote_code: bool = False  # run Python code that comes with a model; only if you have read that code

    # --- Data ---
    # folder, file (jsonl, json, csv, parquet) or hub name
    dataset: Name = "toy/data/prompts"
    dataset_config: Name | None = None  # configuration of a hub dataset that has several
    dataset_train_split: Name = "train"  # split to train on
    dataset_test_split: Name | None = None  # split to evaluate on, or none; by default validation, if there is one
    prompt_column: Name = "prompt"  # prompts: texts, or lists of {role, content} messages for the chat template
    max_prompt_length: Count = 512  # prompts with more tokens are dropped; their number is printed (N+ details: 512)

    # --- Additions to PPO ---
    # texts for PPO-ptx: folder, file or hub name; needs a column `text` and a split `train`
    pretrain_data: Name | None = None
    ptx_coef: NonNegative = 0.0  # weight of the loss on pretrain_data (InstructGPT, eq. 2: 27.8; OpenRLHF: 0.05)
    ema_decay: Decay = 0.0  # keep a moving average of the policy, saved in ema/; 0 for none (InstructGPT: 0.992)
    aux_loss_coef: NonNegative = 0.0  # weight of a mixture of experts' load-balancing loss, computed per micro-batch
    num_eval_prompts: Count = 64  # number of test prompts in an evaluation
    eval_temperature: Positive = 0.01  # sampling temperature in evaluations (TRL: 0.01, for its tables)
    seed: Natural = 1  # seed of responses, order of prompts, mini-batches, and adapters

    # --- Run ---
    # folder of a run to continue. It keeps its settings, except those given on the command line
    resume: Name | None = None
    total_episodes: Count = 2048  # number of responses sampled in the run
    num_train_epochs: Positive | None = None  # passes over the prompts; if set, total_episodes is ignored
    exp_name: Name = "ppo"  # name of this run, in its folder and on W&B
    output_dir: Name | None = None  # folder for all output; by default a new folder runs/NAME__SEED__TIME
    # cpu, cuda, mps; by default cuda if there is one
    device: Name = field(default_factory=lambda: "cuda" if torch.cuda.is_available() else "cpu")
    save_steps: Count = 10  # updates between checkpoints, which hold the full state of the run
    save_total_limit: Count = 2  # number of newest checkpoints to keep
    eval_steps: Count = 10  # updates between evaluations; the last update is always followed by one
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
    ema = place(deepcopy(policy) if args.ema_decay else None, args)  # before the next model is made, to save memory
    reference = place(make_reference(args, policy), args)
    place(policy, args)
    reward_model = load_reward_model(args, policy)
    critic = place(make_critic(args, policy, reward_model), args)
    place(reward_model, args)

    prompts, eval_prompts = load_prompts(args, policy, reward_model)
    texts = load_pretrain_texts(args, policy)
    args = choose_sizes(args, policy, prompts)  # from here on, all sizes are set
    reward_fns = make_reward_fns(args, policy, reward_model)
    try_reward_fns(reward_fns, prompts, policy, args)
    show_first_row({"prompt": as_read(prompts[0]["input_ids"], policy.tokenizer).append("⟨answer⟩", "green")})
    num_updates = args.total_episodes // args.batch_size

    optimizer = make_optimizer(args, policy, critic)
    policy_group, _ = optimizer.param_groups
    schedule = get_scheduler(args.lr_scheduler_type, optimizer, int(args.warmup_ratio * num_updates), num_updates)
    # saved in checkpoints: the scores' count, mean and sum of squared deviations. Step 7 adds kl_factor, the change of
    # kl_coef so far
    memory = {"scores": [0, 0.0, 0.0]}
    run = Run(args, num_updates, optimizer, schedule, memory, asked, model=policy, critic=critic, ema=ema)
    for step in run.steps():
        set_seed(make_seed(args.seed, step))
        if step <= args.critic_warmup_updates:
            policy_group["lr"] = 0.0  # until schedule.step(): only the policy's Adam moments change

        # 1. Sample
        examples = batch(prompts, step - 1, args.batch_size, args.seed)
        with run.clock("rollout"):
            rollout = sample_batch(policy, examples, args)

        # 2. Score
        with run.clock("score"):
            stats = read_logprobs(policy, reference, rollout, step, args)
            rollout.kl = rollout.in_micro_batches(lambda r: response_kl(policy, reference, r, args), args)
            rollout.values = rollout.in_micro_batches(lambda r: critic_values(policy, critic, r), args)
            rollout.rewards_by_name, rollout.scores = score_responses(rollout, reward_fns, args)
        mask, old_values, kl = rollout.mask, rollout.values, rollout.kl  # (B, T) each
        scores = scale_scores(rollout.scores, memory["scores"], args)  # (B,)

        # 3. Reward
        rollout.kl_coef = args.kl_coef
        if args.adaptive_kl:
            rollout.kl_coef *= memory.get("kl_factor", 1.0)
        rewards = shape_rewards(scores, kl, mask, rollout.kl_coef)  # (B, T)
        if args.whiten_rewards:
            rewards = masked_whiten(rewards, mask) + masked_mean(rewards, mask) * mask  # with the old mean

        # 4. Advantage
        advantages, returns = gae(rewards, old_values, mask, args.gamma, args.lam)  # (B, T) each
        if args.whiten_advantages:
            advantages = masked_whiten(advantages, mask)
        rollout.rewards, rollout.advantages, rollout.returns = rewards, advantages, returns

        # 5. Loss, and 6. update
        with run.clock("update"):
            stats |= update(policy, critic, ema, optimizer, rollout, texts, args)
        check_first_ratio(stats["policy/first_ratio_error"], step, args)
        stats |= rollout_stats(rollout, args)
        stats["val/explained_variance"] = explained_variance(rollout)
        stats["lr"] = policy_group["lr"]

        # 7. Adapt
        if args.adaptive_kl:
            memory["kl_factor"] = adapt_kl_coef(rollout.kl_coef, stats["objective/kl"], args) / args.kl_coef

        if eval_prompts and run.is_due(args.eval_steps):
            stats |= evaluate(policy, reference, reward_fns, eval_prompts, args)
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
    mask: Tensor  # (B, T), true up to and including the stop token
    ended: Tensor  # (B,), true if the response has a stop token
    old_logprobs: Tensor  # (B, T), under the policy that sampled the responses; see read_logprobs
    examples: list[dict]  # the B rows of the dataset that the prompts come from
    rewards_by_name: dict[str, Tensor] = field(default_factory=dict)  # (B,) for each reward function, NaN for None
    scores: Tensor | None = None  # (B,), weighted sum of rewards, minus the penalty
    ref_logprobs: Tensor | None = None  # (B, T)
    kl: Tensor | None = None  # (B, T), by the chosen estimator
    kl_coef: float = 0.0  # the weight of the KL in the rewards
    rewards: Tensor | None = None  # (B, T)
    values: Tensor | None = None  # (B, T)
    advantages: Tensor | None = None  # (B, T)
    returns: Tensor | None = None  # (B, T)

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
        """Sorts row numbers by length, so that neighbouring rows need little padding."""
        lengths = self.prompt_mask.sum(1) + self.mask.sum(1)
        return rows[lengths[rows].argsort(stable=True)]

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


# --- 2. Score ---------------------------------------------------------------------------------------------------------


def response_forward(model: nn.Module, r: Rollout, args: Args, **options) -> tuple[Tensor, ModelOutput]:
    """Returns logits / temperature (B, T, V) that predict the response tokens, in float32, and the model's output.

    Position P-1+t of the input predicts response token t, both counted from 0.
    """
    P = r.prompts.shape[1]
    T = r.responses.shape[1]
    positions = torch.arange(P - 1, P + T - 1, device=r.mask.device)
    output = model(**r.inputs(), use_cache=False, logits_to_keep=positions, **options)
    return output.logits.float().div_(args.temperature), output  # in place, since the logits are the largest tensor


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
    return [index for rows in mini_batches for index in deal(rollout.by_length(rows), args)[RANK::WORLD_SIZE]]


def read_logprobs(policy: nn.Module, reference: nn.Module, rollout: Rollout, step: int, args: Args) -> dict[str, float]:
    """Adds the reference's log-probabilities (B, T) to the rollout. With bf16 or TF32, also replaces the sampler's by
    the policy's.

    The sampler reads token by token, which rounds differently. Here complete responses are read in the micro-batches of
    the update, with the same padding, so the ratio before its first step is exactly 1. With bf16 or TF32, also returns
    the sampler's error, the mean of |ratio - 1|.
    """
    stats = {}
    micro_batches = None
    if ratio_rounding(args) > 1e-3:
        micro_batches = first_pass(rollout, args)
        logprobs = rollout.in_micro_batches(lambda r: logprobs_under(policy, r, args), args, micro_batches)
        ratio = (logprobs - rollout.old_logprobs)[rollout.mask].exp()
        stats["policy/sampler_error"] = (ratio - 1).abs().mean().item()
        check_first_ratio(stats["policy/sampler_error"], step, args)
        rollout.old_logprobs = logprobs
    with adapter_off(policy, reference):
        rollout.ref_logprobs = rollout.in_micro_batches(
            lambda r: logprobs_under(reference, r, args), args, micro_batches
        )
    return stats


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """(B, T) estimate of KL(policy || reference) from the sampled token alone (Schulman 2020, "Approximating KL").

    k1 is unbiased and often negative; k2 is biased and has little variance; k3 is unbiased and never negative. Padding
    is not masked: set it to 0 before you use the estimate in a loss.
    """
    d = logprobs - ref_logprobs
    match estimator:
        case "k1" | "kl":
            return d
        case "abs":
            return d.abs()
        case "k2" | "mse":
            return 0.5 * d**2
        case "k3":
            return torch.expm1(-d) + d


def response_kl(policy: nn.Module, reference: nn.Module, r: Rollout, args: Args) -> Tensor:
    """(b, T) KL between policy and reference, by the chosen estimator."""
    if args.kl_estimator != "full":
        return kl_estimate(r.old_logprobs, r.ref_logprobs, args.kl_estimator)
    logits, _ = response_forward(policy, r, args)  # (b, T, V)
    with adapter_off(policy, reference):
        ref_logits, _ = response_forward(reference, r, args)
    return full_kl(logits, ref_logits)


def full_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """(B, T) exact KL(policy || reference) over the vocabulary, from logits (B, T, V)."""
    logprobs = logits.log_softmax(-1)
    ref_logprobs = ref_logits.log_softmax(-1)
    return (logprobs.exp() * (logprobs - ref_logprobs)).sum(-1)


class Critic(nn.Module):
    """Predicts V_t, the expected return before response token t: a transformer body and a head with one output. With
    --critic shared, there is no body, and the head reads the policy's last hidden states (B, P+T, D)."""

    def __init__(self, body: nn.Module | None, head: nn.Module):
        super().__init__()
        self.body = body
        self.head = head

    def forward(self, r: Rollout, states: Tensor | None = None) -> Tensor:
        """(B, T) values, each read one position before its token."""
        if self.body is not None:
            states = self.body(**r.inputs(), use_cache=False).last_hidden_state
        T = r.mask.shape[1]
        with torch.autocast(states.device.type, enabled=False):  # bfloat16 is too coarse for a value (8 bits)
            values = self.head(states[:, -T - 1 : -1].float())
        return values.squeeze(-1).clone()  # FSDP warns about views


def critic_values(policy: nn.Module, critic: Critic, r: Rollout) -> Tensor:
    """(b, T) values of the critic; a shared critic needs a forward pass of the policy."""
    if critic.body is not None:
        return critic(r)
    output = policy(**r.inputs(), use_cache=False, logits_to_keep=1, output_hidden_states=True)
    return critic(r, output.hidden_states[-1])


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


# --- 3. Reward --------------------------------------------------------------------------------------------------------


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    """Sums over real tokens. Values on padding are ignored, even NaN."""
    return x.masked_fill(~mask, 0.0).sum()


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over real tokens."""
    return x[mask].mean()


def masked_whiten(x: Tensor, mask: Tensor) -> Tensor:
    """Shifts and scales x (B, T) to mean 0 and variance 1 over real tokens (TRL). Padding becomes 0."""
    real = x[mask]
    variance = real.var(correction=min(1, len(real) - 1))  # with Bessel's correction; 0 for a single token
    return ((x - real.mean()) * torch.rsqrt(variance + 1e-8)).masked_fill(~mask, 0.0)


def shape_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """(B, T) rewards: -kl_coef * KL for each token, plus the score (B,) on the last real token; 0 on padding.

    OpenAI's code and TRL 0.7 put the score on the same token, TRL 0.16 one position later.
    """
    is_last = mask & ~F.pad(mask, (0, 1))[:, 1:]  # (B, T) true where the next position is padding or the end
    return (scores[:, None] * is_last - kl_coef * kl).masked_fill(~mask, 0.0)


# --- 4. Advantage -----------------------------------------------------------------------------------------------------


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16): advantages and returns (B, T), 0 on padding.

    The episode ends with the last real token, so the value after it is 0. With lam = 1 the returns are discounted sums
    of rewards and do not depend on the critic. For gamma = 1, lam = .5, values of .5:
        rewards [0, 0, 1]  ->  deltas [0, 0, .5], advantages [.125, .25, .5], returns [.625, .75, 1]
    """
    rewards = rewards.masked_fill(~mask, 0.0)
    values = values.masked_fill(~mask, 0.0)
    advantages = rewards + gamma * F.pad(values, (0, 1))[:, 1:] - values  # so far, delta_t
    for t in reversed(range(rewards.shape[1] - 1)):
        advantages[:, t] += gamma * lam * advantages[:, t + 1]
    return advantages, advantages + values


# --- 5. Loss ----------------------------------------------------------------------------------------------------------


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, cliprange: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns clipped losses (B, T) (PPO, eq. 7), the ratio, and a mask that is true where clipping raised the loss.

    The gradient is 0 where the ratio has left the clip range in the direction that the advantage favours. If it left in
    the other direction, the loss is not clipped, and its gradient moves the ratio back.
    """
    ratio = (logprobs - old_logprobs).masked_fill(~mask, 0.0).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    return torch.max(unclipped, clipped), ratio, clipped > unclipped


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, cliprange_value: float
) -> tuple[Tensor, Tensor]:
    """Returns half the clipped squared errors (B, T) (TRL, OpenAI's code), and a mask that is true where clipping
    raised them.

    The gradient is 0 where a value has moved by more than cliprange_value towards the return. This limits how far one
    noisy batch can move the critic, as the clipped ratio does for the policy.
    """
    near_values = values.clamp(old_values - cliprange_value, old_values + cliprange_value)
    unclipped = (values - returns).masked_fill(~mask, 0.0) ** 2
    clipped = (near_values - returns).masked_fill(~mask, 0.0) ** 2
    return 0.5 * torch.max(unclipped, clipped), clipped > unclipped


# --- 6. Update --------------------------------------------------------------------------------------------------------


def update(
    policy: nn.Module,
    critic: Critic,
    ema: nn.Module | None,
    optimizer: torch.optim.Optimizer,
    rollout: Rollout,
    texts: list[list[int]],
    args: Args,
) -> dict[str, float]:
    """Steps 5 and 6: `num_ppo_epochs` passes over the batch, with one optimiser step for each mini-batch. Returns means
    over tokens or optimiser steps, and the number of skipped steps.

    The gradient of a mini-batch is that of the mean loss over its tokens, however it is split into micro-batches. Each
    process computes the gradient of its share. clip_gradient then averages over processes, so each process divides its
    sum by the tokens of the mini-batch / WORLD_SIZE.
    """
    B, device = len(rollout.mask), rollout.mask.device
    policy_group, critic_group = optimizer.param_groups
    options = {}  # of the policy's forward pass
    if args.aux_loss_coef:
        options["output_router_logits"] = True
    if args.critic == "shared":
        options["output_hidden_states"] = True
    totals = Counter()  # sums over tokens
    per_gradient = Counter()  # sums over gradients, each of a mini-batch
    steps = 0  # number of optimiser steps
    for _ in range(args.num_ppo_epochs):
        for rows in torch.randperm(B).to(device).split(B // args.num_mini_batches):  # (b,) row numbers
            optimizer.zero_grad()
            num_tokens = rollout.mask[rows].sum() / WORLD_SIZE
            sums = defaultdict(float)
            for index in deal(rollout.by_length(rows), args)[RANK::WORLD_SIZE]:
                r = rollout.select(index)
                with autocast(args):
                    logits, output = response_forward(policy, r, args, **options)  # (b, T, V)
                logprobs, entropy = token_logprobs_and_entropy(logits, r.responses)  # (b, T) each
                aux_loss = output.aux_loss if args.aux_loss_coef else 0.0
                states = output.hidden_states[-1] if args.critic == "shared" else None  # (b, P+T, D)
                del logits, output  # the largest tensor of the update: the graph only needs its log-softmax
                pg_loss, ratio, pg_clipped = policy_loss(logprobs, r.old_logprobs, r.advantages, r.mask, args.cliprange)
                # aux_loss is a scalar: added to every token, it is weighted by the micro-batch's share of the tokens
                policy_term = masked_sum(pg_loss + args.aux_loss_coef * aux_loss, r.mask) / num_tokens
                if args.critic == "separate":
                    policy_term.backward()  # frees the policy's activations before the critic's forward pass
                with autocast(args):
                    values = critic(r, states)  # (b, T)
                vf_loss, vf_clipped = value_loss(values, r.values, r.returns, r.mask, args.cliprange_value)
                loss = args.vf_coef * masked_sum(vf_loss, r.mask) / num_tokens
                if args.critic == "shared":
                    loss = loss + policy_term
                loss.backward()
                seen = {
                    "loss/policy_avg": pg_loss,
                    "loss/value_avg": vf_loss,
                    "policy/approxkl_avg": 0.5 * (logprobs - r.old_logprobs) ** 2,
                    "policy/clipfrac_avg": pg_clipped,
                    "policy/entropy_avg": entropy,
                    "val/clipfrac_avg": vf_clipped,
                    "val/ratio": ratio,
                    "ratio_squared": ratio**2,
                    "ratio_error": (ratio - 1).abs(),
                    "tokens": torch.ones_like(ratio),
                }
                for name, x in seen.items():
                    sums[name] += masked_sum(x.detach(), r.mask)
            sums = dict(zip(sums, all_reduce(torch.stack(list(sums.values()))).tolist()))
            means = {name: x / sums["tokens"] for name, x in sums.items()}
            if not totals:
                first_error = means["ratio_error"]  # only rounding, since no step has been made
            totals.update(sums)  # a Counter adds
            is_too_far = args.target_kl and means["policy/approxkl_avg"] > 1.5 * args.target_kl
            if is_too_far:  # also ends the outer loop
                break
            if means["val/ratio"] > args.ratio_threshold:
                continue
            if args.ptx_coef:
                per_gradient["loss/ptx"] += pretrain_gradient(policy, texts, args)
            policy_norm = clip_gradient(policy_group["params"], args.max_grad_norm).item()
            critic_norm = clip_gradient(critic_group["params"], args.max_grad_norm).item()
            per_gradient.update({"policy/grad_norm": policy_norm, "val/grad_norm": critic_norm, "gradients": 1})
            if math.isfinite(policy_norm + critic_norm):  # otherwise the step would turn the weights into NaN
                optimizer.step()
                steps += 1
                if ema is not None:
                    move_average(ema, policy, args.ema_decay)
        if is_too_far:
            break
    optimizer.zero_grad()
    means = {name: x / totals["tokens"] for name, x in totals.items() if name not in ("tokens", "ratio_error")}
    means["policy/first_ratio_error"] = first_error
    means["val/ratio_var"] = max(0.0, means.pop("ratio_squared") - means["val/ratio"] ** 2)
    means["val/skipped_steps"] = args.num_ppo_epochs * args.num_mini_batches - steps
    num_gradients = per_gradient.pop("gradients", 1)
    return means | {name: x / num_gradients for name, x in per_gradient.items()}


# === End of the algorithm. Next: its metrics and options, then the code that every training script needs ============


def rollout_stats(rollout: Rollout, args: Args) -> dict[str, float]:
    """Computes the metrics of a batch before the update, under TRL's names.

    The formulas repeat those of step 3: if you change one, change the other. The scores are those before scaling and
    clipping.
    """
    B = len(rollout.mask)
    kl = masked_sum(rollout.kl, rollout.mask).item() / B
    k3 = kl_estimate(rollout.old_logprobs, rollout.ref_logprobs, "k3")  # (B, T)
    score = rollout.scores.mean().item()
    stats = {
        "objective/kl": kl,
        "objective/kl_k3": masked_sum(k3, rollout.mask).item() / B,
        "objective/kl_coef": rollout.kl_coef,
        # an estimate from the sampled tokens
        "objective/entropy": masked_sum(-rollout.old_logprobs, rollout.mask).item() / B,
        "objective/non_score_reward": -rollout.kl_coef * kl,
        "objective/rlhf_reward": score - rollout.kl_coef * kl,
        "objective/scores": score,
        "objective/scores_std": rollout.scores.std(correction=0).item(),
        "val/num_eos_tokens": rollout.ended.sum().item(),
        "val/eos_share": rollout.ended.float().mean().item(),
        "val/response_length": rollout.mask.sum(1).float().mean().item(),
        "rewards/unscored": unscored(rollout.rewards_by_name, args.reward_weights).sum().item(),
    }
    return stats | reward_stats(rollout)


def reward_stats(rollout: Rollout) -> dict[str, float]:
    """Computes mean and standard deviation (with Bessel's correction, as in TRL) of each reward function's rewards;
    ignores None."""
    stats = {}
    for name, rewards in rollout.rewards_by_name.items():
        known = rewards[~rewards.isnan()]
        stats[f"rewards/{name}/mean"] = known.mean().item()
        stats[f"rewards/{name}/std"] = known.std().item()
    return stats


def explained_variance(rollout: Rollout) -> float:
    """Returns 1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for a constant critic."""
    returns = rollout.returns[rollout.mask]
    residuals = returns - rollout.values[rollout.mask]
    return 1 - (residuals.var(correction=0) / returns.var(correction=0).clamp(min=1e-8)).item()


def evaluate(
    policy: nn.Module, reference: nn.Module, reward_fns: RewardFns, prompts: list[dict], args: Args
) -> dict[str, float]:
    """Samples answers to the test prompts at a low temperature, as a user might, and scores them.

    The log-ratio to the reference is computed at the training temperature, since at a low temperature nearly all
    probability is on one token. It is not a KL, because the answers were sampled at another temperature.
    """
    eval_args = replace(args, temperature=args.eval_temperature, response_length_min=None)
    extra = -len(prompts) % WORLD_SIZE  # all processes need the same number of prompts
    rollout = sample_batch(policy, (prompts * WORLD_SIZE)[: len(prompts) + extra], eval_args)
    rollout.old_logprobs = rollout.in_micro_batches(lambda r: logprobs_under(policy, r, args), args)
    with adapter_off(policy, reference):
        rollout.ref_logprobs = rollout.in_micro_batches(lambda r: logprobs_under(reference, r, args), args)
    rollout.rewards_by_name, rollout.scores = score_responses(rollout, reward_fns, args)
    r = rollout.select(torch.arange(len(prompts), device=rollout.mask.device))
    means = {f"eval/rewards/{name}/mean": x.nanmean().item() for name, x in r.rewards_by_name.items()}
    return means | {
        "eval/scores": r.scores.mean().item(),
        "eval/log_ratio": masked_sum(r.old_logprobs - r.ref_logprobs, r.mask).item() / len(prompts),
        "eval/eos_share": r.ended.float().mean().item(),
        "eval/response_length": r.mask.sum(1).float().mean().item(),
    }


def report(run: "Run", stats: dict[str, float], rollout: Rollout, policy: nn.Module, args: Args) -> None:
    """Logs the metrics of an update, and warns of common problems. Shows a table of four responses after the first
    update and `num_sample_generations` times in the run."""
    seconds = sum(run.seconds.values())
    stats["episode"] = run.step * args.batch_size
    stats["eps"] = args.batch_size / seconds
    stats["perf/tokens_per_second"] = rollout.mask.sum().item() / seconds
    run.log(stats, "objective/scores", "objective/kl")
    warn_about(rollout, policy, args)
    is_first = run.step == 1 and args.num_sample_generations > 0
    if is_first or run.is_one_of(args.num_sample_generations):
        show_samples(run, rollout.select(torch.arange(min(4, args.batch_size), device=args.device)), policy.tokenizer)


def show_samples(run: "Run", rollout: Rollout, tokenizer: AutoTokenizer) -> None:
    """Prints a few episodes as a table. Saves all their tensors in a file for tools/xray.py."""
    texts = lambda ids, mask: [tokenizer.decode(row[real]) for row, real in zip(ids, mask)]  # noqa: E731
    columns = {
        "prompt": texts(rollout.prompts, rollout.prompt_mask),
        "response": texts(rollout.responses, rollout.mask),
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


# --- Additions to PPO: score scaling, adaptive KL, pretraining texts, a moving average --------------------------------


def scale_scores(scores: Tensor, moments: list[float], args: Args) -> Tensor:
    """Scales and clips scores (B,) for the reward (TRL 0.7). By default, returns them unchanged.

    --use-score-scaling divides by the standard deviation of all scores so far; --use-score-norm subtracts their mean
    first. Updates `moments` in place: the number of scores, their mean, and the sum of squared deviations.
    """
    if args.use_score_scaling:
        count, mean, squares = moments
        new = scores.cpu().double()
        shift = new.mean().item() - mean
        total = count + len(new)
        squares += new.var(correction=0).item() * len(new) + shift**2 * count * len(new) / total
        mean += shift * len(new) / total
        moments[:] = total, mean, squares
        if args.use_score_norm:
            scores = scores - mean
        std = math.sqrt(squares / max(1, total - 1))
        scores = scores / (std + torch.finfo(scores.dtype).eps)
    if args.score_clip is not None:
        scores = scores.clamp(-args.score_clip, args.score_clip)
    return scores


def adapt_kl_coef(kl_coef: float, kl: float, args: Args) -> float:
    """Returns the next kl_coef, which moves the KL towards its target (Ziegler et al. 2019, sec. 2.2). It changes by at
    most 20 % * batch_size / kl_horizon."""
    error = max(-0.2, min(0.2, kl / args.kl_target - 1))
    return kl_coef * (1 + error * args.batch_size / args.kl_horizon)


def pretrain_gradient(policy: nn.Module, texts: list[list[int]], args: Args) -> float:
    """Adds the gradient of the language-modelling loss on pretraining texts, times ptx_coef (InstructGPT, eq. 2).

    Draws as many texts as a mini-batch has responses. Returns the loss, the mean of -log pi over tokens.
    """
    drawn = torch.randint(len(texts), (args.batch_size // args.num_mini_batches,)).tolist()
    ids, mask = pad([texts[i] for i in drawn], policy.tokenizer, args)  # (B, S)
    num_tokens = mask[:, 1:].sum()
    total = torch.zeros((), device=ids.device)
    for rows in torch.arange(len(ids))[RANK::WORLD_SIZE].split(args.micro_batch_size):
        with autocast(args):
            logits = policy(input_ids=ids[rows], attention_mask=mask[rows].long(), use_cache=False).logits
        logprobs = token_logprobs(logits[:, :-1].float(), ids[rows, 1:])  # (b, S-1)
        loss = -logprobs[mask[rows, 1:]].sum() / num_tokens
        (WORLD_SIZE * args.ptx_coef * loss).backward()  # times WORLD_SIZE, since gradients are averaged over processes
        total += loss.detach()
    return all_reduce(total).item()


def load_pretrain_texts(args: Args, policy: nn.Module) -> list[list[int]]:
    """Loads the texts of --pretrain-data for PPO-ptx. Returns their token ids, with EOS at the end, cut to what the
    policy can read; without --pretrain-data, an empty list."""
    if args.pretrain_data is None:
        return []
    data = load_split(args.pretrain_data, None, "train")
    check_columns(data, {"--pretrain-data": "text"})
    limit = min(args.max_prompt_length + args.response_length, context_length(policy))
    end = [policy.tokenizer.eos_token_id]
    texts = list(data["text"])
    require(all(isinstance(text, str) for text in texts), "--pretrain-data: the column 'text' must hold texts")
    return [(encode_text(text, policy.tokenizer) + end)[:limit] for text in texts if text]


@torch.no_grad()
def move_average(ema: nn.Module, policy: nn.Module, decay: float) -> None:
    """Updates the moving average in place: ema = decay * ema + (1 - decay) * policy."""
    for kept, p in zip(ema.parameters(), policy.parameters()):
        kept.lerp_(p, 1 - decay)


# --- Models and rewards -----------------------------------------------------------------------------------------------


def load_policy(args: Args) -> nn.Module:
    """Loads the policy in float32 and finds its stop tokens.

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


def make_critic(args: Args, policy: nn.Module, reward_model: nn.Module | None) -> Critic:
    """Makes the critic: a copy of the reward model if it has the policy's tokenizer (N+ details), otherwise of the
    initial policy; with --critic shared, only a head on the policy. In the last two cases, V starts at 0."""
    head = nn.Linear(policy.get_output_embeddings().weight.shape[1], 1)  # in OPT-350m, half of hidden_size
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    if args.critic == "shared":
        print("critic: a value head on the policy")
        body = None
    elif same_tokens(policy, reward_model):
        print("critic: starts from the reward model")
        critic = deepcopy(reward_model)
        if critic.score.bias is None:  # as in transformers' classifiers
            critic.score.bias = nn.Parameter(torch.tensor([getattr(reward_model.config, "reward_bias", 0.0)]))
        body, head = critic.base_model, critic.score
    else:
        print("critic: starts from the policy, since no reward model has the policy's tokenizer")
        body = load_model(AutoModelForCausalLM, args.model, args).base_model
    if body is not None and args.gradient_checkpointing:
        checkpoint_layers(body)
    return Critic(body, head).eval().requires_grad_(True)


def make_optimizer(args: Args, policy: nn.Module, critic: Critic) -> torch.optim.Optimizer:
    """AdamW with two groups of parameters, the policy's and the critic's."""
    policy_group = {"params": [p for p in policy.parameters() if p.requires_grad], "lr": args.learning_rate}
    only_policy_has_lora = args.lora_r and args.critic == "separate"  # LoRA's default rate is ten times as high
    critic_rate = args.critic_learning_rate or args.learning_rate / (10 if only_policy_has_lora else 1)
    critic_group = {"params": list(critic.parameters()), "lr": critic_rate}
    return torch.optim.AdamW(
        [policy_group, critic_group],
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
        return read_reward(model, ids, mask.long())

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


def read_reward(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """(B,) output of a reward model's head at the last real token, found by the attention mask (B, S).

    transformers' classifiers read the last token that is not the pad token. If the pad token is also EOS, they read the
    token before EOS.
    """
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    hidden = model.base_model(
        input_ids=input_ids, attention_mask=attention_mask, position_ids=positions, use_cache=False
    ).last_hidden_state  # (B, S, D)
    last = attention_mask.cumsum(1).argmax(1)  # (B,), the first position at which all real tokens are counted
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
    "--sft-model-path": "--model",
    "--reward-model-path": "--reward-model",
    "--dataset-name": "--dataset",
    "--dataset-config-name": "--dataset-config",
    "--dataset-text-field": "--prompt-column",
    "--stop-token-id": "--stop-token",
    "--ppo-epochs": "--num-ppo-epochs",
    "--init-kl-coef": "--kl-coef",
    "--kl-penalty": "--kl-estimator",
    "--adap-kl-ctrl": "--adaptive-kl",
    "--target": "--kl-target",
    "--horizon": "--kl-horizon",
    "--resume-from-checkpoint": "--resume",
}
CURVES = {  # title of a panel: pattern of the metrics in it
    "score": "scores$|/mean$",
    "KL, nats": "objective/kl$",
    "share that end": "eos_share$",
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
    require(bool(args.pretrain_data) == bool(args.ptx_coef), "--ptx-coef and --pretrain-data: give both, or neither")
    refuse_unused(args, "reward_model", "reward_model" in args.reward_fn, "unless --reward-fn names reward_model")
    refuse_unused(args, "missing_eos_penalty", args.stop_token != ("none",), "with --stop-token none")
    is_evaluated = args.dataset_test_split != "none"
    refuse_unused(args, "num_eval_prompts eval_temperature", is_evaluated, "with --dataset-test-split none")
    refuse_unused(args, "kl_target kl_horizon", args.adaptive_kl, "without --adaptive-kl")
    refuse_unused(args, "adaptive_kl", args.kl_coef, "with --kl-coef 0, since it multiplies kl_coef")
    refuse_unused(args, "use_score_norm", args.use_score_scaling, "without --use-score-scaling")
    of_critic = "cliprange_value critic_learning_rate critic_warmup_updates"
    refuse_unused(args, of_critic, args.vf_coef, "with --vf-coef 0: the critic is not trained")
    has_all_weights = len(args.reward_weights) in (0, len(args.reward_fn))
    require(
        has_all_weights,
        f"--reward-weights has {len(args.reward_weights)} values, but --reward-fn has {len(args.reward_fn)}",
    )
    is_in_order = (args.response_length_min or 0) <= args.response_length
    require(is_in_order, f"--response-length-min is greater than --response-length {args.response_length}")


def choose_sizes(args: Args, policy: nn.Module, prompts: datasets.Dataset) -> Args:
    """Returns the settings with learning rate, batch sizes and number of episodes filled in, and prints them."""
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
    longest = longest_prompt(prompts) + args.response_length
    fitting = min(batch_size // parts, rows_that_fit(policy, longest, args))
    micro_batch_size = args.micro_batch_size or per_device or fitting
    rollout_batch_size = args.local_rollout_forward_batch_size or rows_that_fit(policy, longest, args, is_trained=False)

    episodes = args.total_episodes
    if args.num_train_epochs:
        episodes = max(batch_size, round(len(prompts) * args.num_train_epochs))
    num_updates = episodes // batch_size
    require(num_updates, f"--total-episodes {episodes} is less than one batch of {batch_size} responses")
    trains_policy = args.critic_warmup_updates < num_updates
    require(trains_policy, f"--critic-warmup-updates {args.critic_warmup_updates}: the run has {num_updates} updates")
    print(f"policy: {args.model}, {size / 1e6:.2f}M parameters on {args.device}, learning rate {learning_rate:.2g}")
    print(
        f"batch: {batch_size} responses per update, {args.num_ppo_epochs} epochs x {args.num_mini_batches} "
        f"mini-batches, {micro_batch_size} rows at a time; {num_updates} updates = {num_updates * batch_size} episodes"
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
