# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0",
#     "transformers==5.23.0",
#     "datasets==5.2.0",
#     "tyro==1.0.17",
#     "wandb==0.31.0",
#     "matplotlib==3.11.2",
#     "rich==15.0.0",
#     "tqdm==4.70.1",
# ]
# ///
"""PPO for language models: policy + reward -> better policy.

For each batch of prompts:
  1. sample     response y_1..y_T ~ pi(. | prompt), at the given temperature, up to and including the stop token
  2. score      ref_logprobs of a frozen copy of the initial policy; values V_t of the critic; one score for the whole
                text, less `missing_eos_penalty` if the response never stops
  3. reward     r_t = -kl_coef * KL_t; the score is added to r at the last real token
  4. advantage  delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lam A_{t+1},  R_t = A_t + V_t;  whiten A
  5. loss       ratio_t = pi(y_t) / pi_old(y_t);  policy: mean_t max(-A_t ratio_t, -A_t clip(ratio_t, 1-eps, 1+eps))
                value: mean_t 1/2 max((V_t - R_t)^2, (V_old,t + clip(V_t - V_old,t, +-eps_v) - R_t)^2)
  6. update     `num_ppo_epochs` passes over the batch, one optimiser step for each of its `num_mini_batches`
  7. adapt      kl_coef, if asked, so that the KL approaches a target

Where everything stands, for a prompt of 3 tokens (left-padded to 4), T = 6, and a response that stops after 4 tokens:

  model input   PAD  p1  p2  p3 | y1  y2  y3  EOS  -   -      prompts (B, P) and responses (B, T)
  mask                          |  1   1   1   1   0   0      true up to and including the stop token
  logprobs                      |  *   *   *   *   .   .      of y_t, read from the logits one position to the left
  values                        |  *   *   *   *   .   .      of the state before y_t, also one position to the left
  -kl_coef*KL                   |  *   *   *   *   .   .      one per token
  score                         |              *              one per response, on its last real token

The policy pi is the language model in training, a rollout a batch of its responses, the critic a network that predicts
the reward still to come. KL, in nats, measures how far pi has moved from the reference, its frozen first self. Here it
is subtracted from the reward (InstructGPT): a token pays for its own KL and, through the advantages, for that of later
tokens. GRPO adds a KL term to the loss instead, which pulls on each token alone.

How this departs from the textbook: there is no environment, and an episode is one response; the state is the text so
far; every token has an advantage, although there is one score; means over tokens never count padding; and tokens are
drawn from softmax(logits / temperature) alone (no top-k, no top-p), since that is the distribution in the loss.
Papers: Schulman et al. 2017 (arXiv 1707.06347, eq. 7, 11-12); Schulman et al. 2016 (GAE, 1506.02438, eq. 16);
Ziegler et al. 2019 (1909.08593, sec. 2.2); Ouyang et al. 2022 (InstructGPT, 2203.02155, sec. 3.5); Huang et al. 2024
(the N+ implementation details, 2403.17031).

  python ppo.py                       # the toy world: offline, half a minute on two CPU cores, score from 0 to about 5
  python ppo.py --model gpt2 --bf16   # GPT-2 on a GPU, with the same prompts and reward (on a CPU, without --bf16)

Shapes: B rows of a batch, b of a micro-batch, P prompt tokens (left-padded), T response tokens (right-padded), S tokens
of any text, V vocabulary, D hidden size.
"""

import ctypes
import inspect
import json
import math
import os
import random
import runpy
import shlex
import signal
import sys
import time
import traceback
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import copy, deepcopy
from dataclasses import asdict, dataclass, field, fields
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Literal, get_args, get_type_hints

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # before torch: threads that wait spin for ever on a busy machine

import datasets
import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from filelock import FileLock
from huggingface_hub import ModelCard, ModelCardData, constants, get_session
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence
from torch.optim.swa_utils import get_ema_multi_avg_fn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel
from transformers import StaticCache, get_scheduler
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import Conv1D
from transformers.utils import ModelOutput, logging

# --- Arguments. The type of a setting says which values are allowed; the comment beside or above it is its help text

Positive = Annotated[float, "above 0", lambda x: 0 < x < math.inf]
Finite = Annotated[float, "finite", math.isfinite]
NonNegative = Annotated[float, "0 or more", lambda x: 0 <= x < math.inf]
Share = Annotated[float, "between 0 and 1", lambda x: 0 <= x <= 1]
Decay = Annotated[float, "at least 0 and below 1", lambda x: 0 <= x < 1]
Count = Annotated[int, "1 or more", lambda x: x >= 1]
Natural = Annotated[int, "0 or more, and below 2**63", lambda x: 0 <= x < 2**63]


@dataclass
class Args:
    # --- PPO
    num_ppo_epochs: Count = 4  # passes over each batch. More: faster, until the ratio is clipped everywhere (TRL: 4)
    num_mini_batches: Count = 1  # optimiser steps in one pass over the batch (TRL 0.16)
    cliprange: Positive = 0.2  # eps of the clipped ratio (PPO, eq. 7)
    cliprange_value: Positive = 0.2  # eps_v of the clipped value (TRL, N+ details)
    vf_coef: NonNegative = 0.1  # weight of the value loss (TRL); a separate critic feels it in gradient clipping alone
    gamma: Share = 1.0  # discount; 1 because an episode is short
    lam: Share = 0.95  # GAE's lambda: 0 trusts the critic, 1 the sampled return
    whiten_rewards: bool = False  # scale per-token rewards to variance 1, keeping their mean (TRL)
    whiten_advantages: bool = True  # shift and scale advantages to mean 0, variance 1 over the batch (TRL: always)
    use_score_scaling: bool = False  # divide scores by their running standard deviation (TRL 0.7)
    use_score_norm: bool = False  # with use_score_scaling: subtract their running mean first (TRL 0.7)
    score_clip: Positive | None = None  # clip scores, scaled or not, to +- this (TRL 0.7)
    ratio_threshold: Positive = 10.0  # skip and count the step of a mini-batch whose mean ratio exceeds this (TRL 0.7)
    target_kl: Positive | None = None  # stop updating on a batch once approxkl exceeds 1.5 times this (TRL 0.7)

    # --- KL to the reference
    kl_coef: NonNegative = 0.05  # weight of KL in the reward (TRL 0.16). 0: the reward is exploited; high: little moves
    # per-token estimate: k1 = kl = log-ratio; abs; k2 = mse = half its square; k3; full = exact, over the vocabulary
    kl_estimator: Literal["k1", "kl", "abs", "k2", "mse", "k3", "full"] = "k1"
    adaptive_kl: bool = False  # let kl_coef follow kl_target (Ziegler et al. 2019, sec. 2.2)
    kl_target: Positive = 6.0  # KL in nats per response that the controller aims at (TRL 0.7)
    kl_horizon: Count = 10_000  # episodes over which the controller reacts (TRL 0.7)

    # --- Rollout
    response_length: Count = 53  # maximum tokens in a response (TRL 0.16). More: slower, and harder to assign credit
    response_length_min: Count | None = None  # draw each rollout's limit from here to response_length (cf. TRL 0.7)
    temperature: Positive = 0.7  # divides the logits in rollout, reference and loss (TRL 0.16). Lower: less exploration
    stop_token: str = "eos"  # the token that ends a response: eos, none, its number, or a text that is one token
    missing_eos_penalty: NonNegative | None = None  # subtracted from scores of responses that never stop (TRL)
    local_rollout_forward_batch_size: Count = 64  # responses sampled at once (TRL); no effect on the result

    # --- Optimisation
    learning_rate: Positive | None = None  # AdamW's; by default from the policy's size, ten times as high with LoRA
    critic_learning_rate: Positive | None = None  # the critic's; by default the policy's
    critic_warmup_updates: Natural = 0  # first updates, in which only the critic learns
    lr_scheduler_type: str = "linear"  # any name that transformers.get_scheduler knows (TRL: linear to 0)
    warmup_ratio: Share = 0.0  # share of the run in which the learning rate rises to its value
    weight_decay: NonNegative = 0.0  # AdamW's
    adam_betas: tuple[Decay, Decay] = (0.9, 0.999)  # AdamW's (OpenRLHF: 0.9 0.95)
    adam_epsilon: Positive = 1e-8  # AdamW's (torch and TRL; the N+ details take 1e-5)
    max_grad_norm: Positive = 1.0  # the gradients of policy and critic are each clipped to this norm

    # --- Batch sizes
    batch_size: Count | None = None  # responses per update, on all GPUs together; by default 64 (on a CPU over 30M: 8)
    micro_batch_size: Count | None = None  # responses per forward/backward pass; no effect on the result
    # TRL's way: the micro_batch_size; times gradient_accumulation_steps, num_mini_batches and GPUs, the batch_size
    per_device_train_batch_size: Count | None = None
    gradient_accumulation_steps: Count = 1  # with per_device_train_batch_size (TRL)

    # --- Models: a folder, or a name on the hub
    model: str = "toy/sft"  # the policy to start from, which is also the reference that KL is measured against
    reward_model: str = "toy/reward_model"  # a sequence classifier; its tokenizer may differ from the policy's
    reward_label: str | None = None  # the label whose logit is the reward, for a classifier that has several
    reward_fn: tuple[str, ...] = ("reward_model",)  # reward_model, or file.py:name of a function; of several, the sum
    reward_weights: tuple[Finite, ...] = ()  # the weights of their sum; by default all 1 (TRL)
    gold_reward_fn: str | None = None  # a second opinion, logged as objective/gold_scores and never trained on
    critic: Literal["separate", "shared"] = "separate"  # its own network, or a head on the policy's trunk (TRL 0.7)
    lora_r: Natural = 0  # rank of LoRA adapters (Hu et al. 2021), 0 for none; the reference is the policy without them
    lora_alpha: Positive = 32.0  # the adapter's output is scaled by lora_alpha / lora_r
    lora_target_modules: str | None = None  # regular expression for their layers, or all-linear; default: peft's
    bf16: bool = False  # run the models in bfloat16 (autocast); trained weights and optimiser state stay in float32
    attn_implementation: str | None = None  # eager, sdpa, flash_attention_2, ...; by default transformers' own choice
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: far less memory, a third slower
    trust_remote_code: bool = False  # run Python code that comes with a model; only if you have read that code

    # --- Data
    dataset: str = "toy/data/prompts"  # folder, file (jsonl, json, csv, parquet) or hub name
    dataset_config: str | None = None  # configuration of a hub dataset that has several
    dataset_train_split: str = "train"  # split to train on
    dataset_test_split: str | None = None  # split to evaluate on, or none; by default validation, if there is one
    prompt_column: str = "prompt"  # texts, or lists of {role, content} messages for the tokenizer's chat template
    max_prompt_length: Count = 512  # longer prompts, in tokens, are dropped and counted (N+ details: 512)

    # --- Additions to PPO
    pretrain_data: str | None = None  # folder, file or hub name of texts (column text, split train): PPO-ptx
    ptx_coef: NonNegative = 0.0  # weight of their language-modelling loss (InstructGPT, eq. 2: 27.8; OpenRLHF: 0.05)
    ema_decay: Decay = 0.0  # keep a moving average of the policy, saved in ema/; 0 for none (InstructGPT: 0.992)
    aux_loss_coef: NonNegative = 0.0  # weight of a mixture of experts' load-balancing loss; depends on micro-batches
    num_eval_prompts: Count = 64  # prompts of the test split that are answered in an evaluation
    eval_temperature: Positive = 0.01  # temperature of these answers (TRL samples its tables at 0.01)
    seed: Natural = 1  # seed of responses, order of prompts, mini-batches, and adapters

    # --- Run. Settings from here on may change when a run is resumed
    resume: str | None = None  # a run's folder or one of its checkpoints: continue, with the settings of that run
    total_episodes: Count | None = None  # responses sampled in the whole run; by default 2048
    num_train_epochs: Positive | None = None  # passes over the prompts; total_episodes wins over it
    exp_name: str = "ppo"  # name of this run, in its folder and on W&B
    output_dir: str | None = None  # where everything goes; by default a new folder runs/NAME__SEED__TIME
    device: str | None = None  # cpu, cuda, mps; by default the best there is
    save_steps: Count = 10  # updates between checkpoints, each of which holds everything that a run consists of
    save_total_limit: Count = 2  # number of checkpoints to keep, the newest
    eval_steps: Count = 10  # updates between evaluations; there is one at the end, too
    num_sample_generations: Natural = 10  # tables of responses to print, besides one after the first update (TRL)
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works without an account)
    wandb_project_name: str = "rlhf"  # W&B project, with --track
    wandb_entity: str | None = None  # W&B team, with --track

    # --- Many GPUs: torchrun --nproc-per-node N
    zero_stage: Literal[0, 2, 3] = 0  # shards: 0 none, 2 of gradients and optimiser state, 3 of weights too (FSDP2)
    shard_size: Count | None = None  # GPUs that hold one set of shards, such as those of a node (ZeRO++); default: all
    offload: bool = False  # keep the shards in CPU memory until they are needed: slow, for models that do not fit
    gather_for_rollout: bool = True  # with zero_stage 3: gather the weights once per rollout, not for every token

    # --- Computed
    stop_token_id: int | None = field(init=False, default=None)
    num_updates: int = field(init=False, default=0)
    torch_device: str = field(init=False, default="cpu")  # where the models are


# --- The loop: its numbers are those of the steps above ---------------------------------------------------------------


def train(args: Args) -> None:
    """Trains the policy; leaves it, its metrics, curves and model card in args.output_dir."""
    check_args(args)
    start_run(args)
    policy = load_policy(args)
    reward_model = load_reward_model(args, policy)
    critic = make_critic(args, policy, reward_model)
    reference = make_reference(policy, args)
    ema = deepcopy(policy) if args.ema_decay else None
    models = place(args, policy, critic, reference, reward_model, ema)
    prompts, eval_prompts = load_prompts(args, policy, reward_model)
    reward = make_reward(args, policy, reward_model, prompts)
    gold_reward = args.gold_reward_fn and function_reward(args.gold_reward_fn, prompts, policy, args)
    set_batch_sizes(args, policy, len(prompts))
    texts = load_pretrain_texts(args, policy) if args.pretrain_data else None
    length = max(len(x["input_ids"]) for x in prompts) + args.response_length
    use_fast_kernels(args, models, args.micro_batch_size, length)
    check_policy(policy, args)
    optimizer = make_optimizer(args, policy, critic)
    schedule = make_schedule(args, optimizer, args.num_updates)
    follow(ema, policy, optimizer, args)
    state = {"kl_coef": args.kl_coef, "scores": [], "prompts": [], "texts": []}  # what else changes during the run
    run = Run(args, {"policy": policy, "critic": critic, "ema": ema}, optimizer, schedule, state)
    prompt_batches = batches(prompts, state["prompts"], args.batch_size)
    text_batches = texts and batches(texts, state["texts"], args.batch_size // args.num_mini_batches)
    try:
        for update in run.steps(args.num_updates):
            if update <= args.critic_warmup_updates:
                optimizer.param_groups[0]["lr"] = 0.0  # the policy's
            with run.clock("rollout"):
                rollout = sample_batch(policy, next(prompt_batches), args)  # 1
            with run.clock("score"):
                score_reference(rollout, policy, reference, args)  # 2
                rollout.values = rollout.map(lambda r: critic_values(policy, critic, r), args)
                scores = score_responses(rollout, reward, args)
            used_scores = scale_scores(scores, state["scores"], args)  # 3
            rollout.kl_coef = state["kl_coef"]
            rewards, non_score_reward = shape_rewards(used_scores, rollout.kl, rollout.mask, rollout.kl_coef)
            rollout.rewards = masked_whiten(rewards, rollout.mask, shift_mean=False) if args.whiten_rewards else rewards
            advantages, rollout.returns = gae(rollout.rewards, rollout.values, rollout.mask, args.gamma, args.lam)  # 4
            rollout.advantages = masked_whiten(advantages, rollout.mask) if args.whiten_advantages else advantages
            with run.clock("update"):
                stats = optimize(policy, critic, optimizer, rollout, args, text_batches)  # 5 and 6
            stats |= rollout_stats(rollout, scores, non_score_reward)
            stats |= {"val/explained_variance": explained_variance(rollout), "lr": optimizer.param_groups[0]["lr"]}
            if gold_reward:
                stats["objective/gold_scores"] = gold_reward(rollout).nanmean().item()
            if eval_prompts and (update % args.eval_steps == 0 or update == args.num_updates):
                stats |= evaluate(policy, reference, reward, eval_prompts, args)
            report(run, update, stats, rollout, scores, policy.tokenizer, args)
            if args.adaptive_kl:
                state["kl_coef"] = adapt_kl_coef(rollout.kl_coef, stats["objective/kl"], args)  # 7
            schedule.step()
    finally:  # after an error or Ctrl-C, too: what was trained is on disk
        run.finish(policy, CURVES, ema=ema)


# --- 1. Sample --------------------------------------------------------------------------------------------------------


@dataclass
class Rollout:
    """A batch of episodes: B prompts, one response to each, and what the later steps find out about them."""

    prompts: Tensor  # (B, P) left-padded
    prompt_mask: Tensor  # (B, P) true on real tokens
    responses: Tensor  # (B, T) right-padded
    mask: Tensor  # (B, T) true up to and including the stop token
    ended: Tensor  # (B,) whether there is a stop token
    old_logprobs: Tensor  # (B, T) under the policy that drew the responses
    examples: list[dict] = field(default_factory=list)  # B rows of the dataset, those of the prompts
    rewards_by_name: dict[str, Tensor] = field(default_factory=dict)  # (B,) of each reward function, NaN for None
    ref_logprobs: Tensor | None = None  # (B, T)
    kl: Tensor | None = None  # (B, T) by the chosen estimator
    kl_coef: float = 0.0  # the weight of KL when these responses were rewarded
    rewards: Tensor | None = None  # (B, T)
    values: Tensor | None = None  # (B, T)
    advantages: Tensor | None = None  # (B, T)
    returns: Tensor | None = None  # (B, T)

    def inputs(self) -> dict[str, Tensor]:
        """Prompt and response as one model input (B, P+T). Positions count real tokens only."""
        attention_mask = torch.cat([self.prompt_mask, self.mask], 1).long()
        return {
            "input_ids": torch.cat([self.prompts, self.responses], 1),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),  # GPT-2 would count the padding
        }

    def select(self, index: Tensor) -> "Rollout":
        """The episodes with these row numbers, without columns in which none of them has a token: the same numbers.

        Widths are rounded up to multiples of 8 to limit the number of shapes: each shape needs its own kernel.
        """
        P, T = (min(-(-int(m[index].sum(1).max()) // 8) * 8, m.shape[1]) for m in (self.prompt_mask, self.mask))
        part = {name: x[index] if isinstance(x, Tensor) else x for name, x in vars(self).items()}
        part["examples"] = self.examples and [self.examples[i] for i in index.tolist()]
        part["rewards_by_name"] = {name: x[index] for name, x in self.rewards_by_name.items()}
        for name, x in part.items():
            if isinstance(x, Tensor) and x.dim() == 2:
                part[name] = x[:, -P:] if "prompt" in name else x[:, :T]
        return Rollout(**part)

    def by_length(self, index: Tensor) -> Tensor:
        """The row numbers in the order of their lengths, so that neighbours need little padding."""
        lengths = self.prompt_mask.sum(1) + self.mask.sum(1)
        return index[lengths[index].argsort(stable=True)]

    @torch.no_grad()
    def map(self, function: Callable[["Rollout"], Tensor], args: Args) -> Tensor:
        """(B, T) from a function of b episodes to (b, T) or (b, 1): micro-batches of them, each process its share."""
        result = torch.zeros_like(self.old_logprobs)
        order = self.by_length(torch.arange(len(result), device=result.device))
        for index in order[RANK::WORLD_SIZE].split(args.micro_batch_size):  # of every batch, each process has its share
            part = self.select(index)
            with autocast(args):
                result[index, : part.mask.shape[1]] = function(part)
        return all_reduce(result)


def response_mask(responses: Tensor, stop_token_id: int | None) -> tuple[Tensor, Tensor]:
    """(B, T) true up to and including the first stop token, and (B,) whether there is one.

    Made from positions, so that it is right even if the padding token is the stop token. With stop token 0:
        responses [[5, 0, 7, 0], [5, 6, 7, 8]]  ->  mask [[1, 1, 0, 0], [1, 1, 1, 1]], ended [1, 0]
    """
    is_stop = torch.zeros_like(responses) if stop_token_id is None else (responses == stop_token_id).long()
    return is_stop.cumsum(1) - is_stop == 0, is_stop.any(1)


def sample_categorical(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row of logits (B, V), and its logprob, by inverting the distribution function at uniforms (B,).

    The token is the first whose cumulative probability exceeds the uniform number. Probabilities .2 .5 .3 and .6 give
    the second token, since .2 <= .6 < .7. Unlike torch.multinomial this takes one random number per token, drawn
    beforehand, so that what a row gets depends neither on its neighbours nor on how a batch is cut.
    """
    logprobs = logits.log_softmax(1)
    cdf = logprobs.exp().cumsum(1)
    threshold = uniforms[:, None] * cdf[:, -1:]  # (B, 1), scaled because rounding lets the sum end slightly off 1
    tokens = torch.searchsorted(cdf, threshold, right=True).clamp(max=logits.shape[1] - 1)  # (B, 1)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)


@torch.no_grad()
def sample(
    policy: nn.Module, prompts: Tensor, prompt_mask: Tensor, uniforms: Tensor, temperature: float,
    stop_token_id: int | None, pad_token_id: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Draws one response to each prompt (B, P) from softmax(logits / temperature), with a key-value cache.

    Nothing else shapes the distribution: no generation config is read. All randomness is in `uniforms` (B, T).
    Returns responses (B, T), mask (B, T), ended (B,), and the logprobs (B, T) of the tokens drawn, 0 on padding.
    """
    (B, T), device = uniforms.shape, prompts.device
    responses, logprobs = prompts.new_full((B, T), pad_token_id), torch.zeros(B, T, device=device)  # (B, T)
    rows = torch.arange(B, device=device)  # rows still in the forward pass; the next four tensors have one row for each
    tokens, positions = prompts, (prompt_mask.cumsum(1) - 1).clamp(min=0)  # (rows, P), after the first pass (rows, 1)
    attention_mask = F.pad(prompt_mask.long(), (0, T), value=1)  # (rows, P+T): causality hides what is not yet written
    going = torch.ones(B, dtype=torch.bool, device=device)  # (rows,) those without a stop token so far
    cache = OneTypeCache(config=policy.config, max_cache_len=attention_mask.shape[1])  # allocated once: it never grows
    for t in range(T):
        output = policy(
            input_ids=tokens, attention_mask=attention_mask, position_ids=positions,
            past_key_values=cache, use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        token, logprob = sample_categorical(output.logits[:, -1].float() / temperature, uniforms[rows, t])  # (rows,)
        responses[rows, t], logprobs[rows, t] = token, logprob
        if stop_token_id is not None:
            going &= token != stop_token_id
        if not all_reduce(going.any().int()):  # all processes stop together, since sharded weights need all of them
            break
        if 0 < going.float().mean() < 0.75:  # a forward pass over ended rows costs more than copying the cache once
            rows, token, positions, attention_mask = (x[going] for x in (rows, token, positions, attention_mask))
            cache.reorder_cache(going.nonzero().squeeze(1))
            going = going[going]
        tokens, positions = token[:, None], positions[:, -1:] + 1
    mask, ended = response_mask(responses, stop_token_id)  # what an ended row drew while it waited is erased here
    return responses.masked_fill(~mask, pad_token_id), mask, ended, logprobs.masked_fill(~mask, 0.0)


def sample_batch(policy: nn.Module, examples: list[dict], args: Args) -> Rollout:
    """Step 1 for a whole batch of prompts, `local_rollout_forward_batch_size` of them at a time."""
    T, B, tokenizer = args.response_length, len(examples), policy.tokenizer
    prompts, prompt_mask = pad([x["input_ids"] for x in examples], tokenizer.pad_token_id, args, left=True)  # (B, P)
    if args.response_length_min:
        T = int(torch.randint(args.response_length_min, T + 1, ()))
    inputs = prompts, prompt_mask, torch.rand(B, T).to(prompts.device)
    with autocast(args), gathered(policy, args):
        parts = [
            sample(policy, *part, args.temperature, args.stop_token_id, tokenizer.pad_token_id)
            for part in zip(*(x[RANK::WORLD_SIZE].split(args.local_rollout_forward_batch_size) for x in inputs))
        ]
    rollout = Rollout(prompts, prompt_mask, *(all_gather(torch.cat(x)) for x in zip(*parts)), examples)
    finite = rollout.old_logprobs.isfinite().all(1)
    prompt = tokenizer.decode(prompts[finite.long().argmin()], skip_special_tokens=True)  # the first bad one, if any
    require(finite.all(), f"the policy's logits are not finite (NaN or inf) after the prompt {prompt!r}: the model is "
            "broken, or a --learning-rate that is too high has broken it")  # fmt: skip
    return rollout.select(torch.arange(B, device=prompts.device))


# --- 2. Score ---------------------------------------------------------------------------------------------------------


def response_forward(model: nn.Module, r: Rollout, temperature: float, **options) -> tuple[Tensor, ModelOutput]:
    """(B, T, V) float32 logits / temperature that predict the response tokens, and the model's whole output.

    Position P-1+t of the input predicts response token t.
    """
    P, T = r.prompts.shape[1], r.responses.shape[1]
    positions = torch.arange(P - 1, P + T - 1, device=r.mask.device)
    output = model(**r.inputs(), use_cache=False, logits_to_keep=positions, **options)
    return output.logits.float().div_(temperature), output  # in place: it is the largest tensor of all


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """(B, T) log-probability of each token under logits (B, T, V)."""
    return logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


def compute_logprobs(model: nn.Module, rollout: Rollout, args: Args) -> Tensor:
    """(B, T) log-probabilities of the responses under a model."""
    return rollout.map(lambda r: token_logprobs(response_forward(model, r, args.temperature)[0], r.responses), args)


def score_reference(rollout: Rollout, policy: nn.Module, reference: nn.Module, args: Args) -> None:
    """The reference's part of step 2: fills in ref_logprobs and kl, (B, T) each."""
    with adapter_off(policy, reference):
        rollout.ref_logprobs = compute_logprobs(reference, rollout, args)
    if args.kl_estimator == "full":
        rollout.kl = rollout.map(partial(response_kl, policy, reference, args), args)
    else:
        rollout.kl = kl_estimate(rollout.old_logprobs, rollout.ref_logprobs, args.kl_estimator)


class Critic(nn.Module):
    """V_t, the expected return before response token t is drawn: a transformer body and a head with one output. With
    --critic shared it has no body, and its head reads the states (B, P+T, D) of the policy's last layer."""

    def __init__(self, body: nn.Module | None, head: nn.Module):
        super().__init__()
        self.body, self.head = body, head

    def forward(self, r: Rollout, states: Tensor | None = None) -> Tensor:
        """(B, T) values, each read one position before its token."""
        if self.body is not None:
            states = self.body(**r.inputs(), use_cache=False).last_hidden_state
        T = r.mask.shape[1]
        return self.head(states[:, -T - 1 : -1]).float().sum(-1)  # over one output: not a view, which FSDP warns of


def critic_values(policy: nn.Module, critic: Critic, r: Rollout) -> Tensor:
    """(b, T) values of the critic; a shared one needs a pass through the policy."""
    if critic.body is not None:
        return critic(r)
    output = policy(**r.inputs(), use_cache=False, logits_to_keep=1, output_hidden_states=True)
    return critic(r, output.hidden_states[-1])


def penalize_missing_eos(scores: Tensor, ended: Tensor, penalty: float | None) -> Tensor:
    """(B,) scores, less `penalty` where a response has no stop token (TRL subtracts; the N+ details replace by -1)."""
    return scores - (penalty or 0.0) * (~ended).float()


def score_responses(rollout: Rollout, reward: Callable[[Rollout], Tensor], args: Args) -> Tensor:
    """(B,) scores of the responses, in training and evaluation alike."""
    return penalize_missing_eos(reward(rollout), rollout.ended, args.missing_eos_penalty)


# --- 3. Reward --------------------------------------------------------------------------------------------------------


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over real tokens. Whatever stands on padding, even NaN, does not enter."""
    return x.masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)


def masked_var(x: Tensor, mask: Tensor) -> Tensor:
    """Variance over real tokens with Bessel's correction (TRL); the uncorrected one, 0, for a single token."""
    n = mask.sum()
    return masked_mean((x - masked_mean(x, mask)) ** 2, mask) * n / (n - 1).clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """(B, T) scaled to variance 1 over real tokens, and to mean 0 unless the mean is to stay; 0 on padding."""
    mean = masked_mean(x, mask)
    whitened = (x - mean) * torch.rsqrt(masked_var(x, mask) + 1e-8)
    return (whitened if shift_mean else whitened + mean).masked_fill(~mask, 0.0)


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str) -> Tensor:
    """(B, T) estimate of KL(policy || reference) from the drawn token alone (Schulman 2020, "Approximating KL").

    k1 is unbiased and often negative; k2 is biased, with little variance; k3 is unbiased and never negative.
    """
    k1 = logprobs - ref_logprobs
    k2, k3 = 0.5 * k1**2, torch.expm1(-k1) + k1
    return {"k1": k1, "kl": k1, "abs": k1.abs(), "k2": k2, "mse": k2, "k3": k3}[estimator]


def shape_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> tuple[Tensor, Tensor]:
    """Per-token rewards (B, T), and their part without the score, -kl_coef * KL; 0 on padding.

    The score (B,) stands on the last real token, as in OpenAI's code and TRL 0.7 (in TRL 0.16: one position further).
    """
    non_score_reward = -kl_coef * kl.masked_fill(~mask, 0.0)  # (B, T)
    is_last = mask & ~F.pad(mask, (0, 1))[:, 1:]  # (B, T) true where the next position is padding or the end
    return non_score_reward + scores[:, None] * is_last, non_score_reward


# --- 4. Advantage -----------------------------------------------------------------------------------------------------


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16): advantages and returns (B, T), 0 on padding.

    Nothing follows the last real token: the value after it is 0, since the episode is over. With lam = 1 the returns
    are the discounted sums of the rewards to come, whatever the critic says. For gamma = 1, lam = .5, values of .5:
        rewards [0, 0, 1]  ->  deltas [0, 0, .5], advantages [.125, .25, .5], returns [.625, .75, 1]
    """
    rewards, values = rewards.masked_fill(~mask, 0.0), values.masked_fill(~mask, 0.0)
    advantages, advantage, next_value = torch.zeros_like(rewards), 0.0, 0.0
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]  # (B,)
        advantage = delta + gamma * lam * advantage
        advantages[:, t], next_value = advantage, values[:, t]
    return advantages, advantages + values


# --- 5. Loss ----------------------------------------------------------------------------------------------------------


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, cliprange: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Clipped surrogate (PPO, eq. 7), negated: losses (B, T), the ratio, and where the clipped branch was the larger.

    The larger loss is taken, so that moving beyond cliprange never lowers the loss, but can still raise it.
    """
    log_ratio = (logprobs - old_logprobs).masked_fill(~mask, 0.0)
    advantages = advantages.masked_fill(~mask, 0.0)
    ratio = log_ratio.exp()
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    return torch.max(unclipped, clipped), ratio, clipped > unclipped


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, cliprange_value: float
) -> tuple[Tensor, Tensor]:
    """Clipped squared error (TRL, OpenAI's code): losses (B, T) with their 1/2, and where the clipped was the larger.

    The returns were computed from the old values. The clip keeps the critic from chasing one noisy batch, as the
    ratio's clip does for the policy: beyond cliprange_value from its old value, an improvement earns nothing more.
    """
    values, old_values, returns = (x.masked_fill(~mask, 0.0) for x in (values, old_values, returns))
    near_values = values.clamp(old_values - cliprange_value, old_values + cliprange_value)
    unclipped, clipped = (values - returns) ** 2, (near_values - returns) ** 2
    return 0.5 * torch.max(unclipped, clipped), clipped > unclipped


# --- 6. Update --------------------------------------------------------------------------------------------------------


def token_logprobs_and_entropy(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(B, T) log-probability of each token under logits (B, T, V), and, without gradient, the entropy there in nats."""
    logprobs = logits.log_softmax(-1)  # once for both
    with torch.no_grad():
        entropy = -logprobs.exp().mul_(logprobs).sum(-1)
    return logprobs.gather(-1, tokens[..., None]).squeeze(-1), entropy


def mini_batches(rollout: Rollout, args: Args) -> Iterator[tuple[Tensor, ...]]:
    """A random partition of the batch into mini-batches of row numbers, each cut into micro-batches; once per epoch.

    The rows of a micro-batch are of similar length, so that little is computed on padding. The gradient of a mini-batch
    is a sum over its rows: how it is cut changes nothing. Each process gets its share.
    """
    B, device = len(rollout.mask), rollout.mask.device
    for _ in range(args.num_ppo_epochs):
        for mini_batch in torch.randperm(B).to(device).split(B // args.num_mini_batches):
            yield rollout.by_length(mini_batch)[RANK::WORLD_SIZE].split(args.micro_batch_size)


def policy_forward(
    policy: nn.Module, r: Rollout, args: Args, **options
) -> tuple[Tensor, Tensor, Tensor | float, Tensor | None]:
    """Logprobs (b, T) of the responses under the policy as it is now, its entropy (b, T), the loss of its router
    and the states (b, P+T, D) of its last layer, each if asked for.

    The logits (b, T, V), the largest tensor of an update, end here: the graph needs only their log-softmax.
    """
    options |= {"output_router_logits": True} if args.aux_loss_coef else {}
    with autocast(args):
        logits, output = response_forward(policy, r, args.temperature, **options)
    states = output.hidden_states[-1] if options.get("output_hidden_states") else None
    return *token_logprobs_and_entropy(logits, r.responses), output.aux_loss if args.aux_loss_coef else 0.0, states


def mini_batch_gradient(
    policy: nn.Module, critic: Critic, rollout: Rollout, mini_batch: tuple[Tensor, ...], args: Args
) -> dict[str, Tensor]:
    """Adds up the gradient of a mini-batch; returns sums over its tokens of what is logged.

    The gradient is a sum over the tokens of the mini-batch divided by their number. So each micro-batch divides by the
    number of tokens in the whole mini-batch, and how a mini-batch is cut changes nothing. If several processes share
    it, that is the mean number per process, because gradients become means over processes.
    """
    sums, is_shared = defaultdict(float), args.critic == "shared"
    num_tokens = all_reduce(rollout.mask[torch.cat(mini_batch)].sum()) / WORLD_SIZE
    for index in mini_batch:
        r = rollout.select(index)
        mean = lambda x: x.masked_fill(~r.mask, 0.0).sum() / num_tokens  # noqa: B023, E731 - this micro-batch's part
        logprobs, entropy, aux_loss, states = policy_forward(policy, r, args, output_hidden_states=is_shared)  # (b, T)
        pg_loss, ratio, pg_clipped = policy_loss(logprobs, r.old_logprobs, r.advantages, r.mask, args.cliprange)
        loss = pg_loss + args.aux_loss_coef * aux_loss
        if not is_shared:
            mean(loss).backward()  # now, so that the policy's activations are gone when the critic's are made
            loss = 0.0
        with autocast(args):
            values = critic(r, states)  # (b, T)
        vf_loss, vf_clipped = value_loss(values, r.values, r.returns, r.mask, args.cliprange_value)
        mean(loss + args.vf_coef * vf_loss).backward()
        with torch.no_grad():
            token_stats = {
                "tokens": torch.ones_like(ratio), "loss/policy_avg": pg_loss, "loss/value_avg": vf_loss,
                "policy/clipfrac_avg": pg_clipped, "val/clipfrac_avg": vf_clipped, "val/ratio": ratio,
                "ratio_squared": ratio**2, "ratio_error": (ratio - 1).abs(),
                "policy/approxkl_avg": 0.5 * (logprobs - r.old_logprobs) ** 2, "policy/entropy_avg": entropy,
            }  # fmt: skip
            for name, x in token_stats.items():
                sums[name] += x.masked_fill(~r.mask, 0.0).sum()
    return dict(zip(sums, all_reduce(torch.stack(list(sums.values())))))


def optimize(
    policy: nn.Module, critic: Critic, optimizer: torch.optim.Optimizer, rollout: Rollout, args: Args,
    texts: Iterator[list[list[int]]] | None = None,
) -> dict[str, float]:  # fmt: skip
    """`num_ppo_epochs` passes over the rollout, one optimiser step per mini-batch; means over all tokens seen."""
    policy.train(args.gradient_checkpointing)  # dropout is off in both modes
    critic.train(args.gradient_checkpointing)
    sums, steps, per_step = {}, 0, defaultdict(float)
    for mini_batch in mini_batches(rollout, args):
        batch = mini_batch_gradient(policy, critic, rollout, mini_batch, args)
        ratio, approxkl = (float(batch[name] / batch["tokens"]) for name in ("val/ratio", "policy/approxkl_avg"))
        if not sums:
            check_first_ratio(float(batch["ratio_error"] / batch["tokens"]), args)  # it is 1: nothing has moved yet
        sums = {name: sums[name] + x if sums else x for name, x in batch.items()}
        if args.target_kl and approxkl > 1.5 * args.target_kl:
            break
        if ratio <= args.ratio_threshold:
            if texts:
                text_batch = pad(next(texts), policy.tokenizer.pad_token_id, args)
                per_step["loss/ptx"] += pretrain_gradient(policy, *text_batch, args)
            norms = [clip_gradient(group["params"], args.max_grad_norm) for group in optimizer.param_groups]
            per_step["policy/grad_norm"] += norms[0]
            per_step["val/grad_norm"] += norms[1]
            if all(norm.isfinite() for norm in norms):  # else the weights would be NaN for good
                optimizer.step()
                steps += 1
        optimizer.zero_grad()
    optimizer.zero_grad()
    policy.eval()
    critic.eval()
    tokens = sums.pop("tokens")
    means = {name: float(x / tokens) for name, x in sums.items() if name != "ratio_error"}
    means |= {name: float(x / max(1, steps)) for name, x in per_step.items()}
    means["val/ratio_var"] = max(0.0, means.pop("ratio_squared") - means["val/ratio"] ** 2)
    means["val/skipped_steps"] = args.num_ppo_epochs * args.num_mini_batches - steps
    return means


# === The algorithm ends here. Next: its metrics and options, then what every program of this kind needs =============


def rollout_stats(rollout: Rollout, scores: Tensor, non_score_reward: Tensor) -> dict[str, float]:
    """The metrics that describe a batch before the update."""
    per_row = lambda x: x.masked_fill(~rollout.mask, 0.0).sum(1).mean().item()  # noqa: E731
    return {
        "objective/kl": per_row(rollout.kl),
        "objective/kl_k3": per_row(kl_estimate(rollout.old_logprobs, rollout.ref_logprobs, "k3")),
        "objective/kl_coef": rollout.kl_coef,
        "objective/entropy": per_row(-rollout.old_logprobs),
        "objective/non_score_reward": per_row(non_score_reward),
        "objective/rlhf_reward": scores.mean().item() + per_row(non_score_reward),
        "objective/scores": scores.mean().item(),
        "objective/scores_std": scores.std(correction=0).item(),
        "val/num_eos_tokens": rollout.ended.sum().item(),
        "val/eos_share": rollout.ended.float().mean().item(),
        "val/response_length": rollout.mask.sum(1).float().mean().item(),
    } | reward_stats(rollout)


def reward_stats(rollout: Rollout) -> dict[str, float]:
    """Mean and deviation of what each of --reward-fn gave, over the rows of which it had something to say."""
    said = {name: x[~x.isnan()] for name, x in rollout.rewards_by_name.items()}
    stats = {f"rewards/{name}/mean": x.mean().item() for name, x in said.items() if len(x)}
    return stats | {f"rewards/{name}/std": x.std().item() for name, x in said.items() if len(x) > 1}


def explained_variance(rollout: Rollout) -> float:
    """1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for a constant one."""
    residual_var = masked_var(rollout.returns - rollout.values, rollout.mask)
    return 1 - (residual_var / masked_var(rollout.returns, rollout.mask).clamp(min=1e-8)).item()


def evaluate(
    policy: nn.Module, reference: nn.Module, reward: Callable[[Rollout], Tensor], prompts: list[dict], args: Args
) -> dict[str, float]:
    """What a user of the policy would see: answers at low temperature to prompts that it is not trained on.

    Their KL is taken at the training temperature; on distributions sharpened to one token it would say little.
    """
    answers, extra = copy(args), -len(prompts) % WORLD_SIZE
    answers.temperature, answers.response_length_min = args.eval_temperature, None
    with torch.random.fork_rng(devices=[]):  # all numbers are drawn on the CPU; training must not notice
        rollout = sample_batch(policy, (prompts * WORLD_SIZE)[: len(prompts) + extra], answers)
    rollout.old_logprobs = compute_logprobs(policy, rollout, args)
    score_reference(rollout, policy, reference, args)
    scores = score_responses(rollout, reward, args)[: len(prompts)]
    once = rollout.select(torch.arange(len(prompts), device=args.torch_device))  # without the prompts that fill up
    stats = rollout_stats(once, scores, torch.zeros_like(once.kl))
    names = "objective/scores", "objective/kl", "val/eos_share", "val/response_length"
    return {f"eval/{name.split('/')[1]}": stats[name] for name in names}


def report(
    run: "Run", update: int, stats: dict, rollout: Rollout, scores: Tensor, tokenizer: AutoTokenizer, args: Args
) -> None:
    """Logs an update, warns of what looks wrong, and now and then shows four responses in a table."""
    episode, seconds = update * args.batch_size, time.perf_counter() - run.start
    stats |= {"episode": episode, "eps": episode / seconds}
    stats["perf/tokens_per_second"] = rollout.mask.sum().item() / sum(run.seconds.values())
    run.write(update, stats, "objective/scores", "objective/kl")
    warn_about(run, rollout, stats, args)
    if run.is_turn(update, args.num_sample_generations) or (update == 1 and args.num_sample_generations):
        rows = []
        for i in range(min(4, len(scores))):
            prompt = tokenizer.decode(rollout.prompts[i][rollout.prompt_mask[i]], skip_special_tokens=True)
            rows.append([prompt, tokenizer.decode(rollout.responses[i][rollout.mask[i]]), f"{scores[i].item():.2f}"])
        run.table(f"update {update} of {args.num_updates}", ["prompt", "response", "score"], rows)
        save_samples(Path(args.output_dir, "samples.jsonl"), update, rollout, scores, tokenizer)


def save_samples(file: Path, update: int, rollout: Rollout, scores: Tensor, tokenizer: AutoTokenizer) -> None:
    """Adds the responses of the table to samples.jsonl: texts, rewards, and each number that there is of each token."""
    with suppress(OSError):  # a disk that is full, a folder that is gone: the run itself goes on
        lines = file.read_text("utf-8").splitlines() if file.exists() else []
        lines = [line for line in lines if json.loads(line)["update"] < update]  # else from before a resume
        for i in range(min(4, len(scores))):
            ids, prompt = rollout.responses[i][rollout.mask[i]], rollout.prompts[i][rollout.prompt_mask[i]]
            line = {"update": update, "prompt": tokenizer.decode(prompt), "response": tokenizer.decode(ids)}
            line |= {"score": scores[i].item(), "tokens": [tokenizer.decode(token) for token in ids]}
            named = {name: x[i].item() for name, x in rollout.rewards_by_name.items()}
            line["rewards_by_name"] = {name: None if math.isnan(x) else x for name, x in named.items()}
            for name, x in vars(rollout).items():
                if isinstance(x, Tensor) and x.dim() == 2 and x.is_floating_point():
                    line[name] = x[i].expand(len(rollout.mask[i]))[rollout.mask[i]].tolist()
            lines.append(json.dumps(line))
        if not RANK:
            unfinished = file.with_suffix(".unfinished")
            unfinished.write_text("\n".join(lines) + "\n", "utf-8")
            unfinished.replace(file)  # whole, if the run is killed meanwhile


def warn_about(run: "Run", rollout: Rollout, stats: dict[str, float], args: Args) -> None:
    """What a library leaves to its users to notice, each in one sentence, once per run."""
    if rollout.ref_logprobs is not None:
        k1 = (rollout.old_logprobs - rollout.ref_logprobs).masked_fill(~rollout.mask, 0.0).sum(1)  # (B,)
        if k1.mean() < -0.1 - 3 * k1.std() / len(k1) ** 0.5:
            run.warn("the KL to the reference is clearly negative, which a true KL never is: sampling and scoring "
                     "probably use different distributions (temperature, dropout, padding).")  # fmt: skip
    if args.stop_token_id is not None and not rollout.ended.any():
        run.warn("no response ends with the stop token: raise --response-length, set --missing-eos-penalty or "
                 "--stop-token, or check that the policy was taught to end its texts.")  # fmt: skip
    if stats["objective/scores_std"] < 1e-6:
        run.warn("all scores of the batch are equal, so there is nothing to learn from: look at the reward.")


# --- Additions to PPO: score scaling, adaptive KL, pretraining texts --------------------------------------------------


def adapt_kl_coef(kl_coef: float, kl: float, args: Args) -> float:
    """The next kl_coef: moved by at most 20 % * episodes / horizon towards the KL target (Ziegler et al. 2019, 2.2)."""
    error = max(-0.2, min(0.2, kl / args.kl_target - 1))
    return kl_coef * (1 + error * args.batch_size / args.kl_horizon)


def scale_scores(scores: Tensor, history: list[float], args: Args) -> Tensor:
    """(B,) scores as they enter the reward: shifted by the mean of all scores so far, divided by their standard
    deviation (TRL 0.7) and clipped, each only if asked. With scaling, adds the scores to the history."""
    if args.use_score_scaling:
        history += scores.tolist()
        std, mean = torch.std_mean(torch.tensor(history), correction=min(1, len(history) - 1))
        scores = (scores - mean.item() * args.use_score_norm) / (std.item() + torch.finfo(scores.dtype).eps)
    return scores if args.score_clip is None else scores.clamp(-args.score_clip, args.score_clip)


def pretrain_gradient(policy: nn.Module, ids: Tensor, mask: Tensor, args: Args) -> float:
    """Adds the gradient of ptx_coef * mean(-log pi) on texts (B, S), and returns that mean (InstructGPT, eq. 2)."""
    num_tokens, total, size = mask[:, 1:].sum(), torch.zeros((), device=ids.device), args.micro_batch_size
    for ids, mask in zip(*(x[RANK::WORLD_SIZE].split(size) for x in (ids, mask))):
        with autocast(args):
            logits = policy(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits
        logprobs = token_logprobs(logits[:, :-1].float(), ids[:, 1:])
        loss = -logprobs.masked_fill(~mask[:, 1:], 0.0).sum() / num_tokens
        (WORLD_SIZE * args.ptx_coef * loss).backward()  # gradients become means over processes
        total += loss.detach()
    return all_reduce(total).item()


# --- Models and rewards -----------------------------------------------------------------------------------------------


def load_policy(args: Args) -> nn.Module:
    """The policy in float32. Dropout stays off: rollout, scoring and loss see one distribution."""
    policy = load_model(AutoModelForCausalLM, args.model, args)
    args.stop_token_id = find_stop_token(args, policy.tokenizer)
    has_router = hasattr(policy.config, "output_router_logits")
    require(has_router or not args.aux_loss_coef, f"--aux-loss-coef {args.aux_loss_coef}: {args.model} has no router")
    return policy.eval()


def find_stop_token(args: Args, tokenizer: AutoTokenizer) -> int | None:
    """The id of the stop token, or None if a response may only end at response_length."""
    text = args.stop_token
    if text == "none":
        return None
    number = int(text) if text.isdecimal() else tokenizer.eos_token_id
    ids = [number] if text.isdecimal() or text == "eos" else tokenizer.encode(text, add_special_tokens=False)
    is_one = len(ids) == 1 and ids[0] is not None and ids[0] < len(tokenizer)
    require(is_one, f"--stop-token {text!r} is not one token of {args.model}, but {ids}; name another, or none")
    return ids[0]


def load_reward_model(args: Args, policy: nn.Module) -> nn.Module | None:
    """The reward model, frozen; None if a function gives the reward."""
    if "reward_model" not in args.reward_fn:
        return None
    model = load_model(AutoModelForSequenceClassification, args.reward_model, args)
    labels = list(model.config.id2label.values())
    args.reward_label = args.reward_label or (labels[0] if len(labels) == 1 else None)
    require(args.reward_label in labels, f"the reward model {args.reward_model} has the labels {labels}; name with "
            "--reward-label the one whose logit is the reward")  # fmt: skip
    rows, own_rows = (m.get_input_embeddings().num_embeddings for m in (policy, model))
    if same_tokens(policy, model) and rows > own_rows:
        model.resize_token_embeddings(rows, mean_resizing=False)  # ids without a text, which the policy can draw
    return model.eval().requires_grad_(False)


def make_critic(args: Args, policy: nn.Module, reward_model: nn.Module | None) -> Critic:
    """A copy of the reward model if it reads the policy's tokens (N+ details), else of the policy, or with --critic
    shared a head on the policy's own trunk; V then starts at 0."""
    fits = same_tokens(policy, reward_model) and hasattr(reward_model, "score") and reward_model.config.num_labels == 1
    if args.critic == "separate" and fits:
        print("critic: starts from the reward model")
        body, head = deepcopy(reward_model.base_model), deepcopy(reward_model.score)
        if head.bias is None:  # as in transformers' classifiers
            head.bias = nn.Parameter(torch.tensor([getattr(reward_model.config, "reward_bias", 0.0)]))
    else:
        print("critic: a value head on the policy's trunk" if args.critic == "shared" else "critic: starts from the "
              "policy, since there is no reward model with one label that reads the same tokens")  # fmt: skip
        body = None if args.critic == "shared" else deepcopy(policy.base_model)
        head = nn.Linear(policy.get_output_embeddings().weight.shape[1], 1)  # OPT-350m: half its hidden_size
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
    return Critic(body, head).requires_grad_(True)


def make_optimizer(args: Args, policy: nn.Module, critic: Critic) -> torch.optim.Optimizer:
    """AdamW with two groups of parameters, the policy's and the critic's."""
    policy_group = {"params": [p for p in policy.parameters() if p.requires_grad]}
    critic_group = {"params": list(critic.parameters()), "lr": args.critic_learning_rate or args.learning_rate}
    settings = args.learning_rate, args.adam_betas, args.adam_epsilon, args.weight_decay
    return torch.optim.AdamW([policy_group, critic_group], *settings, fused=True)  # fused: ten times as fast on a CPU


# --- From here to the end: the same text as in rloo.py, but for one of the checks in check_args


def follow(ema: nn.Module | None, policy: nn.Module, optimizer: torch.optim.Optimizer, args: Args) -> None:
    """Makes `ema` the policy's moving average: after each step, ema_decay * itself + (1 - ema_decay) * the policy."""
    if ema is not None:
        move, pair = get_ema_multi_avg_fn(args.ema_decay), [list(model.parameters()) for model in (ema, policy)]
        optimizer.register_step_post_hook(lambda *_: move(*pair, None))


class OneTypeCache(StaticCache):
    """A static key-value cache in one type: under autocast, rotary embeddings leave the keys in float32, while the
    values are bfloat16, the type in which attention reads both."""

    def update(self, keys: Tensor, values: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Takes in the keys and values of a layer's new tokens; returns all of that layer."""
        return super().update(keys.to(values.dtype), values, *args, **kwargs)


def full_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """(B, T) exact KL(policy || reference) over the vocabulary, from logits (B, T, V)."""
    logprobs, ref_logprobs = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return (logprobs.exp() * (logprobs - ref_logprobs)).sum(-1)


def response_kl(policy: nn.Module, reference: nn.Module, args: Args, r: Rollout) -> Tensor:
    """(b, T) exact KL of policy and reference for some episodes."""
    logits, _ = response_forward(policy, r, args.temperature)  # (b, T, V)
    with adapter_off(policy, reference):
        return full_kl(logits, response_forward(reference, r, args.temperature)[0])


@torch.no_grad()
def check_policy(policy: nn.Module, args: Args) -> None:
    """Refuses a model that reads a text differently beside padding, or with a cache, than alone; two short rows tell.

    If it does not heed positions, attention mask or cache, log-probabilities are off by a tenth of the logits' standard
    deviation or more; by rounding, by a millionth of it (on a GPU, with TF32 or flash attention, by up to a hundredth).
    """
    prompts, mask = pad([list(range(5, 8)), list(range(5, 12))], 0, args, left=True)
    uniforms, needs_bf16 = torch.linspace(0.1, 0.9, 8).view(2, 4), "flash" in (args.attn_implementation or "")
    with explain(f"{args.model} ({type(policy).__name__}) cannot be sampled from with a key-value cache, as GPT-2 can"):
        with torch.autocast(prompts.device.type, torch.bfloat16, enabled=needs_bf16), gathered(policy, args):
            r = Rollout(prompts, mask, *sample(policy, prompts, mask, uniforms.to(prompts.device), 1.0, None, 0))
            beside = token_logprobs(response_forward(policy, r, 1.0)[0], r.responses)
            text = r.inputs()["input_ids"][:1, 4:]  # the first row, whose prompt has 3 tokens, without its padding
            logits = policy(input_ids=text, use_cache=False).logits[:, -5:-1].float()  # (1, 4, V)
            alone = token_logprobs(logits, r.responses[:1])[0]
    errors = torch.stack([r.old_logprobs[0], beside[0]]) - alone
    error, bound = (errors.abs().mean() / logits.std()).item(), 1e-3 if prompts.device.type == "cpu" else 0.05
    require(error <= bound, f"{args.model} ({type(policy).__name__}) reads a text differently beside padding or "
            f"with a cache than alone, by {error:.2g} of its logits' deviation: it cannot be used here")  # fmt: skip


def make_reference(policy: nn.Module, args: Args) -> nn.Module:
    """A frozen copy of the policy; with LoRA the policy itself, which is then given its adapter."""
    if not args.lora_r:
        return deepcopy(policy).requires_grad_(False)
    add_adapter(policy, args, task_type="CAUSAL_LM")
    return policy


@contextmanager
def adapter_off(policy: nn.Module, reference: nn.Module) -> Iterator[None]:
    """With LoRA, the policy without its adapter serves as the reference within this context."""
    is_adapter, shards = reference is policy, [module for module in policy.modules() if isinstance(module, FSDPModule)]
    if is_adapter:  # the switch changes requires_grad, which must be that of the shards
        for shard in shards:
            shard.reshard()
        policy.disable_adapters()
    yield
    if is_adapter:
        for shard in shards:
            shard.reshard()
        policy.enable_adapters()


def same_tokens(policy: nn.Module, reward_model: nn.Module | None) -> bool:
    """Whether there is a reward model whose tokenizer gives the same ids, as far as the vocabularies tell."""
    if reward_model is None:
        return False
    a, b = policy.tokenizer, reward_model.tokenizer
    return a.get_vocab() == b.get_vocab() and a.eos_token_id == b.eos_token_id


def read_reward(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """(B, labels) output of a sequence classifier's head at the last real token, found from the attention mask (B, S).

    The library's own pooling looks for the last token that is not the pad token: if padding and EOS are one token, it
    reads the token before EOS. A classifier that pools elsewhere (at BERT's first token, say) has no `score` head over
    a causal body; its own logits are taken.
    """
    if not hasattr(model, "score"):
        return model(input_ids=input_ids, attention_mask=attention_mask).logits.float()
    positions = (attention_mask.cumsum(1) - 1).clamp(min=0)
    hidden = model.base_model(
        input_ids=input_ids, attention_mask=attention_mask, position_ids=positions, use_cache=False
    ).last_hidden_state  # (B, S, D)
    last = (attention_mask * torch.arange(attention_mask.shape[1], device=input_ids.device)).argmax(1)  # (B,)
    rewards = model.score(hidden[torch.arange(len(last), device=last.device), last]).float()
    return rewards + getattr(model.config, "reward_bias", 0.0)


def make_reward(
    args: Args, policy: nn.Module, reward_model: nn.Module | None, examples: list[dict]
) -> Callable[[Rollout], Tensor]:
    """The function from a rollout to its rewards (B,), the weighted sum of what --reward-fn names.

    What each of them gave is kept in rollout.rewards_by_name; NaN, where it said None, is left out of the sum.
    """
    specs, functions = args.reward_fn, {}
    weights = args.reward_weights or (1.0,) * len(specs)
    require(len(weights) == len(specs), f"--reward-weights: {len(weights)} numbers for {len(specs)} of --reward-fn")
    for spec in specs:
        is_model, name = spec == "reward_model", spec.rpartition(":")[2]
        require(name not in functions, f"--reward-fn {' '.join(specs)}: two of them are called {name!r}; rename one")
        make = partial(model_reward, reward_model) if is_model else partial(function_reward, spec, examples)
        functions[name] = make(policy, args)

    def reward(rollout: Rollout) -> Tensor:
        """(B,) rewards; raises UserError if there is none at all for a response."""
        rollout.rewards_by_name = {name: function(rollout) for name, function in functions.items()}
        rewards = torch.stack(list(rollout.rewards_by_name.values()))  # (K, B)
        silent = rewards.isnan().all(0)
        prompt = rollout.examples[int(silent.long().argmax())][args.prompt_column]
        require(not silent.any(), f"every reward function said None of a response to {prompt!r}")
        return weighted_sum(rewards, weights)

    return reward


def weighted_sum(rewards: Tensor, weights: tuple[float, ...]) -> Tensor:
    """(B,) sums of rewards (K, B) times K weights; a NaN has nothing to say of its row."""
    return (rewards * rewards.new_tensor(weights)[:, None]).nansum(0)


def model_reward(model: nn.Module, policy: nn.Module, args: Args) -> Callable[[Rollout], Tensor]:
    """The reward model's logit. If it does not read the policy's tokens, the text is decoded and encoded again."""
    label, is_ours = list(model.config.id2label.values()).index(args.reward_label), same_tokens(policy, model)
    texts_of = partial(decode, tokenizer=policy.tokenizer)

    def reward(r: Rollout) -> Tensor:
        """(b, 1) rewards of some episodes."""
        ids, mask = r.inputs()["input_ids"], r.inputs()["attention_mask"]
        if not is_ours:
            rows, eos = model.tokenizer(texts_of(r))["input_ids"], model.tokenizer.eos_token_id
            if eos is not None and hasattr(model, "score"):
                rows = [row + [eos] * ended for row, ended in zip(rows, r.ended.tolist())]
            ids, mask = pad([row[-context_length(model) :] for row in rows], model.tokenizer.pad_token_id, args)
        return read_reward(model, ids, mask.long())[:, [label]]

    return lambda rollout: check_rewards(rollout.map(reward, args)[:, 0], texts_of(rollout))


def function_reward(spec: str, examples: list[dict], policy: nn.Module, args: Args) -> Callable[[Rollout], Tensor]:
    """A user's function: f(texts), of prompt and response as one text, or f(prompts, completions, **columns) as in TRL.

    The second is told by the names of its arguments, and gets what it asks for: the prompts and completions (messages,
    if the prompts are), completion_ids, and columns of the dataset, one value per row. It may say None of a row.
    """
    function, tokenizer = load_function(spec), policy.tokenizer
    parameters = [] if inspect.isbuiltin(function) else list(inspect.signature(function).parameters.values())
    names, takes_all = {p.name for p in parameters}, any(p.kind is p.VAR_KEYWORD for p in parameters)
    is_trl = takes_all or not names.isdisjoint({"completions", "completion_ids"})
    there = {"prompts", "completions", "completion_ids", *examples[0]}
    needed = {p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    lacks = is_trl and ", ".join(sorted(needed - there))
    require(not lacks, f"the reward function {spec} asks for {lacks}, and the data have {', '.join(sorted(there))}")

    def ask(r: Rollout) -> list[float | None]:
        """What the function says of some episodes."""
        if not is_trl:
            return list(function(decode(r, tokenizer)))
        given = {name: [x[name] for x in r.examples] for name in r.examples[0]}
        given["prompts"] = given[args.prompt_column]
        given["completion_ids"] = [ids[real].tolist() for ids, real in zip(r.responses, r.mask)]
        given["completions"] = tokenizer.batch_decode(given["completion_ids"], skip_special_tokens=True)
        if isinstance(given["prompts"][0], list):
            given["completions"] = [[{"role": "assistant", "content": text}] for text in given["completions"]]
        return list(function(**{name: x for name, x in given.items() if takes_all or name in names}))

    def reward(rollout: Rollout) -> Tensor:
        """(B,) rewards of a rollout, of which each process asks for its share."""
        r = rollout.select(torch.arange(RANK, len(rollout.mask), WORLD_SIZE, device=rollout.mask.device))
        texts = decode(r, tokenizer)
        with explain(f"the reward function {spec} failed"):
            try:
                values = ask(r)
            except Exception:
                for i, text in enumerate(texts):  # which row was it?
                    with explain(f"the reward function {spec} failed on {text!r}"):
                        ask(r.select(torch.tensor([i])))
                raise
            rewards = torch.tensor([0.0 if x is None else float(x) for x in values])
        n = len(rewards)
        require(n == len(texts), f"the reward function {spec} gave {n} rewards for {len(texts)} texts")
        rewards = check_rewards(rewards, texts).masked_fill(torch.tensor([x is None for x in values]), math.nan)
        return all_gather(rewards.to(args.torch_device))

    texts = ["A first text.", "A second."] * WORLD_SIZE  # a wrong function fails now
    ids, mask = pad(tokenizer(texts)["input_ids"], tokenizer.pad_token_id, args)
    reward(Rollout(ids[:, :0], mask[:, :0], ids, mask, mask.any(1), ids * 0.0, (examples * len(texts))[: len(texts)]))
    return reward


def decode(rollout: Rollout, tokenizer: AutoTokenizer) -> list[str]:
    """Prompt and response of each row as one text, without padding and special tokens."""
    rows = zip(rollout.inputs()["input_ids"], rollout.inputs()["attention_mask"].bool())
    return [tokenizer.decode(row[real], skip_special_tokens=True) for row, real in rows]


def check_rewards(rewards: Tensor, texts: list[str]) -> Tensor:
    """The rewards (B,) themselves; raises UserError with the text for one that is NaN or infinite."""
    bad = int(rewards.isfinite().long().argmin())
    require(rewards.isfinite().all(), f"the reward is {rewards[bad].item()} for the text {texts[bad]!r}")
    return rewards


# --- Data -------------------------------------------------------------------------------------------------------------


def load_prompts(args: Args, policy: nn.Module, reward_model: nn.Module | None) -> tuple[list[dict], list[dict]]:
    """The rows to train on, and those to evaluate on, each with its prompt's token ids as `input_ids`."""
    train, test = (encode_prompts(data, policy.tokenizer, args) if data else [] for data in load_data(args))
    readers = [policy] + [reward_model] * same_tokens(policy, reward_model)
    longest, limit = max(len(x["input_ids"]) for x in train + test), min(map(context_length, readers))
    require(longest + args.response_length <= limit, f"the longest prompt ({longest} tokens) and --response-length "
            f"{args.response_length} exceed the {limit} tokens that policy and reward model can read")  # fmt: skip
    return train, test[: args.num_eval_prompts]


def encode_prompts(data, tokenizer: AutoTokenizer, args: Args) -> list[dict]:
    """The rows of a split; those with an empty prompt, or one over max_prompt_length, are dropped and counted."""
    texts = read_column(data, args.prompt_column, args.dataset, "--prompt-column", (str, list))
    prompts = [encode_prompt(text, tokenizer) for text in tqdm(texts, desc="encoding prompts", leave=False)]
    kept = [row | {"input_ids": p} for row, p in zip(data.to_list(), prompts) if 0 < len(p) <= args.max_prompt_length]
    dropped = f"{len(prompts) - len(kept)} of {len(prompts)} prompts: empty, or over {args.max_prompt_length} tokens"
    require(kept, f"--dataset {args.dataset}: dropped {dropped} (set --max-prompt-length)")
    if len(kept) < len(prompts):
        print(f"dropped {dropped}")
    return kept


def load_pretrain_texts(args: Args, policy: nn.Module) -> list[list[int]]:
    """Token ids of texts with their EOS, for PPO-ptx."""
    rows = read_column(load_split(args.pretrain_data, None, "train"), "text", args.pretrain_data, "--pretrain-data")
    limit = min(args.max_prompt_length + args.response_length, context_length(policy))
    end = [] if policy.tokenizer.eos_token_id is None else [policy.tokenizer.eos_token_id]
    texts = [(encode_prompt(text, policy.tokenizer) + end)[:limit] for text in rows if text]
    require(texts, f"--pretrain-data {args.pretrain_data} holds no text that is not empty")
    return texts


def batches(rows: list, queue: list[int], batch_size: int) -> Iterator[list]:
    """Endless batches of rows; each pass over them is in a new random order.

    `queue` holds those that this pass has yet to give. It is the caller's, so that a checkpoint can hold it.
    """
    while True:
        while len(queue) < batch_size:
            queue += torch.randperm(len(rows)).tolist()
        batch, queue[:] = queue[:batch_size], queue[batch_size:]
        yield [rows[i] for i in batch]


# --- Settings and checks ----------------------------------------------------------------------------------------------

ALIASES = {  # other libraries' spellings
    "--reward-funcs": "--reward-fn",
    "--model-name-or-path": "--model", "--sft-model-path": "--model", "--reward-model-path": "--reward-model",
    "--dataset-name": "--dataset", "--dataset-config-name": "--dataset-config",
    "--dataset-text-field": "--prompt-column", "--stop-token-id": "--stop-token", "--ppo-epochs": "--num-ppo-epochs",
    "--init-kl-coef": "--kl-coef", "--kl-penalty": "--kl-estimator", "--adap-kl-ctrl": "--adaptive-kl",
    "--target": "--kl-target", "--horizon": "--kl-horizon", "--resume-from-checkpoint": "--resume",
}  # fmt: skip
CURVES = [["objective/scores", "objective/gold_scores", "eval/scores"], ["objective/kl", "objective/kl_k3"],
          ["val/eos_share"]]  # fmt: skip


def check_args(args: Args) -> None:
    """Raises UserError for settings that make no sense together."""
    T, shortest = args.response_length, args.response_length_min or args.response_length
    require(shortest <= T, f"--response-length-min {shortest} is above --response-length {T}")
    data, coef, penalty = args.pretrain_data, args.ptx_coef, args.missing_eos_penalty
    require(bool(data) == bool(coef), f"--ptx-coef {coef} and --pretrain-data {data}: give both, or neither")
    all_pay = args.stop_token == "none" and penalty
    require(not all_pay, f"--missing-eos-penalty {penalty}: with --stop-token none every response would pay it")
    is_whole = args.use_score_scaling or not args.use_score_norm
    require(is_whole, "--use-score-norm shifts scores before --use-score-scaling divides them; give both")


def set_batch_sizes(args: Args, policy: nn.Module, num_prompts: int) -> None:
    """Fills in the learning rate, the batch sizes and the number of updates, and prints them in words."""
    size, on_cpu = policy.num_parameters(), args.torch_device == "cpu"
    # 1e-5 for a model of GPT-2's size, higher for smaller ones, never below 3e-6 (the N+ details' rate from 1B up)
    args.learning_rate = args.learning_rate or max(3e-6, 1e-5 * (124e6 / size) ** 0.6) * (10 if args.lora_r else 1)
    parts, per_device = args.num_mini_batches * WORLD_SIZE, args.per_device_train_batch_size
    require(per_device or args.gradient_accumulation_steps == 1, "--gradient-accumulation-steps goes with "
            "--per-device-train-batch-size; or give --batch-size and --micro-batch-size")  # fmt: skip
    trl_size = (per_device or 0) * args.gradient_accumulation_steps * parts
    args.batch_size = args.batch_size or trl_size or (8 if on_cpu and size > 30e6 else 64)
    require(args.batch_size % parts == 0, f"--batch-size {args.batch_size} is not divisible by {args.num_mini_batches} "
            f"mini-batches x {WORLD_SIZE} process(es); {-(-args.batch_size // parts) * parts} is")  # fmt: skip
    logits_mb = args.response_length * policy.config.get_text_config().vocab_size * 4 / 2**20  # of one row
    fits_cpu = max(1, int(min(16, max(4, 16 / logits_mb), 64 / logits_mb)))  # 4 to 16 rows, by their memory
    args.micro_batch_size = args.micro_batch_size or per_device or (fits_cpu if on_cpu else args.batch_size // parts)
    by_epochs = args.num_train_epochs and max(args.batch_size, round(args.num_train_epochs * num_prompts))
    episodes = args.total_episodes or by_epochs or 2048
    args.num_updates = episodes // args.batch_size
    require(args.num_updates, f"--total-episodes {episodes} is less than one batch of {args.batch_size} responses")
    print(f"policy: {args.model}, {size / 1e6:.2f}M parameters on {args.torch_device}, "
          f"learning rate {args.learning_rate:.2g}")  # fmt: skip
    print(f"batch: {args.batch_size} responses per update, {args.num_ppo_epochs} epochs x {args.num_mini_batches} "
          f"mini-batches, {args.micro_batch_size} rows at a time; "
          f"{args.num_updates} updates = {args.num_updates * args.batch_size} episodes")  # fmt: skip


def check_first_ratio(error: float, args: Args) -> None:
    """Raises UserError if the mean of |ratio - 1| before the first step is more than rounding: the policy in the update
    must be the one that sampled. With bf16 the logits have 8 binary digits, with TF32 the factors have 11."""
    bound = 5e-2 if args.bf16 else 6e-3 if torch.get_float32_matmul_precision() == "high" else 1e-3
    require(error <= bound, f"the ratio pi/pi_old is off by {error:.2g} before any step was made (allowed: {bound:g}): "
            "rollout and update see different distributions. Usual causes: dropout that is on, a model that ignores "
            "position_ids or the attention mask, different temperatures; with bf16, rounding")  # fmt: skip


# --- The same text in every script, from here to the end: mistakes, models and data by name, processes, the run -------

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # as torchrun sets them
DATA_FILES = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}  # and what datasets calls them
WHOLE = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)  # the state of a model, put together from shards


class UserError(Exception):
    """A mistake in the input: shown as one sentence, exit code 2, no traceback."""


def require(condition: object, sentence: str) -> None:
    """Raises UserError with the sentence unless the condition holds."""
    if not condition:
        raise UserError(sentence)


@contextmanager
def explain(sentence: str) -> Iterator[None]:
    """Runs other people's code: an error in it ends in one sentence, ours followed by the error's own."""
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error.__cause__ or error).split())[:500]  # its cause tells more
        known = (__file__, "<", os.path.dirname(os.__file__), sys.prefix)  # this file, Python and the libraries
        user = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(known)]
        where = f" ({user[-1].filename}, line {user[-1].lineno})" if user else ""
        raise UserError(f"{sentence}: {type(error).__name__}: {reason}{where}") from error


@cache
def hub_answers() -> bool:
    """Asks the hub once; if it cannot be reached, its libraries, which would retry for minutes, read their caches."""
    with suppress(Exception):
        get_session().head(constants.ENDPOINT, timeout=5)
        return True
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    return False


def locate(name: str) -> str:
    """The file or folder of that name, here or beside this script; any other name is taken for one on the hub."""
    here = next((path for path in (Path(name), Path(__file__).resolve().parent / name) if path.exists()), None)
    is_path = name.startswith((".", "/", "~", "toy/")) or name.endswith(tuple(DATA_FILES)) or "\\" in name
    is_path = is_path or name.count("/") > 1
    require(here or (name and not is_path), f"{name!r}: there is no such file or folder")
    if here is None and not hub_answers():
        is_cached = any(Path(constants.HF_HUB_CACHE).glob(f"*--{name.replace('/', '--')}"))
        require(is_cached, f"{name!r} is neither a folder here nor in the cache, and the hub cannot be reached; python "
                f"{Path(__file__).name} without flags runs offline")  # fmt: skip
    return str(here or name)


def load_model(auto_class: type, name: str, args: Args, new_head: bool = False, **options) -> nn.Module:
    """A model from a folder or the hub, with float32 weights, and with its tokenizer as `model.tokenizer`.

    Refuses one that lacks weights, which the library would draw at random, except for those of a new head.
    """
    options |= {"attn_implementation": args.attn_implementation, "output_loading_info": True}
    options |= {"dtype": torch.float32, "use_safetensors": True}
    with explain(f"the model {name!r} could not be loaded (from safetensors; save_pretrained makes them)"):
        model, info = auto_class.from_pretrained(locate(name), trust_remote_code=args.trust_remote_code, **options)
    missing = [x for x in info["missing_keys"] if not new_head or x.startswith(f"{model.base_model_prefix}.")]
    require(not missing, f"{name!r} has no weights {sorted(missing)[:3]}: it was not saved as a {type(model).__name__}")
    model.auto_class, model.tokenizer = auto_class, load_tokenizer(name, args, model)
    return model


def load_tokenizer(name: str, args: Args, model: nn.Module) -> AutoTokenizer:
    """The tokenizer of a model; if it has no pad token, EOS stands in, since padding is known by position only."""
    with explain(f"the tokenizer of {name!r} could not be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(locate(name), trust_remote_code=args.trust_remote_code)
    require(tokenizer("a text")["input_ids"], f"{name} holds no tokenizer; save the one of its base model beside it")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    require(tokenizer.pad_token is not None, f"the tokenizer of {name} has neither a pad nor an EOS token")
    template, rows = tokenizer(f"{tokenizer.chat_template}")["input_ids"], model.get_input_embeddings().num_embeddings
    last = max(tokenizer.vocab_size - 1, tokenizer.pad_token_id, tokenizer.eos_token_id or 0, *template)
    require(last < rows, f"{name} embeds {rows} tokens, but its tokenizer has one with id {last}; call "
            "model.resize_token_embeddings and save it, or take the tokenizer that it was trained with")  # fmt: skip
    return tokenizer


def add_adapter(model: nn.Module, args: Args, **options) -> None:
    """Freezes the model and gives it LoRA adapters to train (Hu et al. 2021)."""
    with explain(f"--lora-r {args.lora_r} --lora-target-modules {args.lora_target_modules} (pip install peft?)"):
        from peft import LoraConfig

        model.add_adapter(LoraConfig(
            r=args.lora_r, lora_alpha=args.lora_alpha, target_modules=args.lora_target_modules, **options,
            fan_in_fan_out=any(isinstance(m, Conv1D) for m in model.modules()),  # GPT-2 keeps its weights transposed
        ))  # fmt: skip


def context_length(model: nn.Module) -> int:
    """Most tokens that the model can read at once. RoBERTa's positions begin behind that of its padding."""
    tables = [module for name, module in model.named_modules() if name.endswith(".position_embeddings")]
    first = max(((getattr(module, "padding_idx", None) or -1) + 1 for module in tables), default=0)
    return (getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize) - first


def load_function(spec: str) -> Callable:
    """file.py:name -> the function."""
    file, _, name = spec.rpartition(":")
    require(file.endswith(".py") and name, f"{spec!r} should be file.py:name")
    print(f"runs the code in {locate(file)}")  # which may be somebody else's, with --resume
    with explain(f"{file} could not be imported"):
        names = runpy.run_path(locate(file))
    require(callable(names.get(name)), f"{file} defines no function {name!r}")
    return names[name]


def load_split(name: str, config: str | None, split: str):
    """One split of a dataset: a folder, a jsonl/json/csv/parquet file (which is its split train), or a hub name."""
    path, data = locate(name), []
    kind = DATA_FILES.get(Path(path).suffix)
    require(kind or not Path(path).is_file(), f"the dataset {name}: a file must be jsonl, json, csv or parquet")
    source = {"path": kind, "data_files": path} if Path(path).is_file() else {"path": path, "name": config}
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    with explain(f"the dataset {name}, split {split!r}, could not be loaded"), suppress(StopIteration):  # if empty
        data = datasets.load_dataset(**source, split=split)
    require(len(data), f"the dataset {name}, split {split!r}, is empty")
    return data


def load_data(args: Args) -> tuple:
    """The split to train on, and the one to evaluate on or None: by default `validation`, if the data have one."""
    train, test = load_split(args.dataset, args.dataset_config, args.dataset_train_split), args.dataset_test_split
    test = test or ("validation" if "validation" in train.info.splits else "none")
    return train, None if test == "none" else load_split(args.dataset, args.dataset_config, test)


def read_column(data, column: str, name: str, flag: str, kind=str) -> list:
    """A column of a dataset; raises UserError if it is missing, or if a row holds something of another kind."""
    there = ", ".join(data.column_names)
    require(column in data.column_names, f"the dataset {name} has no column {column!r}; it has {there} (set {flag})")
    with explain(f"the dataset {name}, column {column!r}, could not be read"):
        rows = list(data[column])
    for i, row in enumerate(rows):
        require(isinstance(row, kind), f"the dataset {name}: row {i} of {column!r} holds {row!r} (set {flag})")
    return rows


def encode_prompt(prompt: str | list[dict], tokenizer: AutoTokenizer) -> list[int]:
    """Token ids of a text, or of a conversation, by the chat template, up to where the assistant is to speak."""
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    require(tokenizer.chat_template, "the dataset holds messages, but the tokenizer has no chat template")
    with explain(f"the tokenizer's chat template refuses {prompt!r}"):
        return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)


def pad(rows: list[list[int]], value: int, args: Args, left: bool = False) -> tuple[Tensor, Tensor]:
    """Token lists as one tensor (B, S), and its mask (B, S), true on real tokens."""
    ids, ones = [torch.tensor(row, dtype=torch.long) for row in rows], [torch.ones(len(row)).bool() for row in rows]
    ids, mask = (pad_sequence(x, True, y, "left" if left else "right") for x, y in ((ids, value), (ones, False)))
    return ids.to(args.torch_device), mask.to(args.torch_device)


def autocast(args: Args) -> torch.autocast:
    """bfloat16 if --bf16 asks for it; weights, losses and everything after the logits stay float32."""
    return torch.autocast(torch.device(args.torch_device).type, torch.bfloat16, enabled=args.bf16)


def use_fast_kernels(args: Args, models: list[nn.Module], rows: int, length: int) -> None:
    """The same functions, equal to rounding, in fewer or faster kernels, for passes over `rows` x `length` tokens."""
    modules = [module for model in models for module in model.modules()]
    for module in modules:
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):  # GPT-2's: six kernels, a third of its update on a CPU
                setattr(module, name, nn.GELU(approximate="tanh"))
    if args.torch_device != "cpu":
        return torch.set_float32_matmul_precision("high")  # TF32; plain float32 does not use the tensor cores
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):  # glibc: freed memory is kept, since
        M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # getting it back page by page takes a tenth of the time, or half of it
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    shape = models[0].config.get_text_config()
    heads = getattr(shape, "num_attention_heads", 1) * shape.num_hidden_layers
    if args.attn_implementation or rows * length**2 * heads > 2**24:
        return  # eager attention, below, would keep all attention weights in memory until the backward pass
    for name, size in (("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "192"), ("LRU_CACHE_CAPACITY", "96")):
        os.environ.setdefault(name, size)  # oneDNN keeps a megabyte for each shape that it has seen, and 1,024 of them
    torch.set_float32_matmul_precision("medium")  # products go through oneDNN: twice as fast on AMD processors
    a = torch.linspace(-1, 1, 64**2).view(64, 64).sin()
    if ((a @ a).double() - a.double() @ a.double()).abs().max() > 1e-4:  # in bfloat16, as on Intel's AMX: undone
        torch.set_float32_matmul_precision("highest")
        return
    for module in modules:  # the backward pass of flash attention would take five times as long for texts so short
        if isinstance(module, PreTrainedModel):
            module.set_attn_implementation("eager")


def make_schedule(args: Args, optimizer: torch.optim.Optimizer, num_steps: int):
    """The course of the learning rate, by the name that transformers gives it."""
    with explain(f"--lr-scheduler-type {args.lr_scheduler_type}"):
        schedule = get_scheduler(args.lr_scheduler_type, optimizer, int(args.warmup_ratio * num_steps), num_steps)
    is_plain = isinstance(schedule, torch.optim.lr_scheduler.LambdaLR)
    require(is_plain, f"--lr-scheduler-type {args.lr_scheduler_type}: take one that depends on the step alone")
    return schedule


# Many processes: all read the same data and draw the same numbers; of every batch, each computes its share


def all_reduce(x: Tensor) -> Tensor:
    """The sum of x over all processes."""
    if WORLD_SIZE > 1:
        dist.all_reduce(x)
    return x


def all_gather(x: Tensor) -> Tensor:
    """(B, ...) all rows, of which each process has the rows RANK, RANK + WORLD_SIZE, ... as x (B/WORLD_SIZE, ...)."""
    shares = [x.clone() for _ in range(WORLD_SIZE)]
    if WORLD_SIZE > 1:
        dist.all_gather(shares, x.contiguous())
    return torch.stack(shares, 1).flatten(0, 1)


def place(args: Args, *models: nn.Module | None) -> list[nn.Module]:
    """Moves the models to the device, and returns those that exist, without duplicates.

    With --zero-stage they are sharded by torch's FSDP2, a layer at a time; with stage 2 only those in training, and
    gathered weights are kept until the backward pass. The gradient of a shard becomes the mean over processes.
    """
    models, size = list(dict.fromkeys(model for model in models if model is not None)), args.shard_size or WORLD_SIZE
    device_type = torch.device(args.torch_device).type
    for model in models:
        is_trained = any(p.requires_grad for p in model.parameters())
        modules = list(model.modules())
        embeddings = [module.weight for module in modules if isinstance(module, nn.Embedding)]
        if args.gradient_checkpointing and is_trained:  # in training mode only, which must not bring dropout back
            for module in modules:
                dropouts = [x for x in vars(module) if "drop" in x or (x == "p" and isinstance(module, nn.Dropout))]
                off = [x for x in dropouts if not module.training and isinstance(getattr(module, x), float)]
                vars(module).update(dict.fromkeys(off, 0.0))
                getattr(module, "activation_checkpointing_enable", lambda _: None)({"use_reentrant": False})
        for module in modules if args.bf16 and not is_trained else []:  # what autocast would cast at each use
            if isinstance(module, (nn.Linear, Conv1D)) and not any(module.weight is x for x in embeddings):
                module.to(torch.bfloat16)
        if args.zero_stage == 0 or (args.zero_stage == 2 and not is_trained):
            model.to(args.torch_device)
            continue
        mesh = init_device_mesh(device_type, (WORLD_SIZE // size, size), mesh_dim_names=("replicate", "shard"))
        options = {"mesh": mesh["shard"] if size == WORLD_SIZE else mesh, "reshard_after_forward": args.zero_stage == 3}
        options |= {"offload_policy": CPUOffloadPolicy(device_type == "cuda")} if args.offload else {}
        layers = {name for module in modules for name in getattr(module, "_no_split_modules", None) or []}
        roots = [model.base_model, model.score] if hasattr(model, "score") else [model]  # what read_reward calls
        for module in [module for module in modules if type(module).__name__ in layers] + roots:
            fully_shard(module, **options)
    return models


@contextmanager
def gathered(model: nn.Module, args: Args) -> Iterator[None]:
    """Within this context each process holds a sharded model whole: weights are sent once, not for every token."""
    parts = [module for module in model.modules() if isinstance(module, FSDPModule) and args.gather_for_rollout]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    yield
    for part in parts:
        part.set_reshard_after_forward(args.zero_stage == 3, recurse=False)
        part.reshard()


def clip_gradient(parameters: list[Tensor], max_norm: float) -> Tensor:
    """Scales the gradient down to a norm of max_norm; returns the norm that it had.

    Whole gradients are first averaged over the processes, as those of shards already are.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    if WORLD_SIZE > 1 and not isinstance(gradients[0], DTensor):
        for work in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
            work.wait()
        torch._foreach_div_(gradients, WORLD_SIZE)
    norm = nn.utils.clip_grad_norm_(parameters, max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def start_run(args: Args) -> None:
    """Checks the settings, joins the processes, seeds everything, fills in args.output_dir and args.torch_device."""
    logging.set_verbosity_error()  # of transformers, to which a fresh head is news
    logging.disable_progress_bar()
    for name, hint in get_type_hints(Args, include_extras=True).items():
        value = getattr(args, name)
        for kind in (hint, *get_args(hint)):
            if hasattr(kind, "__metadata__") and value is not None:
                allowed, holds = kind.__metadata__
                fits = all(map(holds, value if isinstance(value, tuple) else [value]))
                require(fits, f"--{name.replace('_', '-')} {value} must be {allowed}")
    is_sharded = args.zero_stage or args.shard_size or args.offload
    can_shard = "RANK" in os.environ and args.zero_stage and WORLD_SIZE % (args.shard_size or 1) == 0
    require(can_shard or not is_sharded, "--zero-stage, --shard-size and --offload are for runs under torchrun "
            "--nproc-per-node N; with stage 2 or 3, and a shard size that divides N")  # fmt: skip
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group()
        print(f"processes: {WORLD_SIZE}, --zero-stage {args.zero_stage}")
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    args.output_dir = args.output_dir or f"runs/{args.exp_name}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    files = [Path(args.output_dir, name) for name in ("metrics.jsonl", "config.json", "README.md")]
    is_used = any(file.exists() and file.stat().st_size for file in files)
    require(args.resume or RANK or not is_used, f"--output-dir {args.output_dir} already holds a run or a model; name "
            f"another, or go on with that run: --resume {shlex.quote(args.output_dir)}")  # fmt: skip
    with explain(f"--device {args.device} cannot be used on this machine"):
        device = torch.empty(0, device=args.device or torch.accelerator.current_accelerator(True) or "cpu").device
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", device.index)))
            torch.cuda.set_device(device)
    args.torch_device = str(device)


class Run:
    """What a run shows and leaves: progress bar, tables, metrics.jsonl, W&B, checkpoints; in the end model and curves.

    A number is logged by putting it into the stats, under any name. A checkpoint is one dict: weights and optimiser,
    whole, however they are sharded; `state`, the lists and dicts that change during the run; the random state; and the
    length of metrics.jsonl, to which the file is cut when the run goes on. On a CPU a resumed run is, bit for bit, the
    one that was never interrupted.
    """

    def __init__(self, args: Args, models: dict, optimizer: torch.optim.Optimizer, schedule, state: dict):
        self.args, self.optimizer, self.schedule, self.state = args, optimizer, schedule, state
        self.models = nn.ModuleDict({name: model for name, model in models.items() if model is not None})
        self.output, self.metrics, self.seconds, self.warned = Path(args.output_dir), {}, {}, set()
        self.step, self.signal, self.broken, self.start = 0, None, 0, time.perf_counter()
        self.wandb, self.wandb_id, self.file = None, None, open(os.devnull, "w")
        if not RANK:
            with explain(f"--output-dir {self.output} cannot be used (is another run writing there?)"):
                (self.output / "checkpoints").mkdir(parents=True, exist_ok=True)
                self.lock = FileLock(self.output / ".lock", timeout=0).acquire()  # let go of when the process ends
                self.file = open(self.output / "metrics.jsonl", "a")
                (self.output / "args.json").write_text(json.dumps(asdict(args), indent=2) + "\n")
        if args.resume:
            self.restore(Path(args.resume))
        if args.track and not RANK:
            with explain("W&B did not start; log in with `wandb login`, set WANDB_MODE=offline, or leave out --track"):
                import wandb

                names = {"project": args.wandb_project_name, "entity": args.wandb_entity, "name": self.output.name}
                names |= {"dir": self.output, "id": self.wandb_id, "resume": "allow"}
                self.wandb = wandb.init(**names, config=asdict(args))
        print(f"output: {self.output}")

    def steps(self, num_steps: int) -> Iterator[int]:
        """The numbers of the steps that are left. Ctrl-C, SIGTERM or SIGHUP end the run after the step it is in."""
        self.bar = tqdm(total=num_steps, initial=self.step, dynamic_ncols=True)
        numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
        heeded = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
        before = {number: signal.signal(number, self.stop) for number in heeded}
        try:
            for step in range(self.step + 1, num_steps + 1):
                yield step
                is_asked = bool(all_reduce(torch.tensor(int(self.signal is not None))))  # in one process, so in all
                if step % self.args.save_steps == 0 or step == num_steps or is_asked:
                    self.save(step)
                if is_asked and step < num_steps:
                    raise KeyboardInterrupt(f"stopped by a signal after step {step} of {num_steps}")
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def stop(self, number: int, frame) -> None:
        """The handler. A second signal does not wait for the end of the step; but torchrun passes each one on twice."""
        if self.signal and WORLD_SIZE == 1:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        print(f"\n{self.signal.name}: stopping after this step; send it again to stop at once", file=sys.stderr)

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Takes the seconds of a phase of this step."""
        start = time.perf_counter()
        yield
        if self.args.torch_device != "cpu":
            torch.accelerator.synchronize()
        self.seconds[phase] = time.perf_counter() - start

    def write(self, step: int, stats: dict[str, float], *shown: str) -> None:
        """Ends a step: one line of metrics.jsonl, W&B, and the metrics named in `shown` beside the bar."""
        stats |= {f"time/{phase}": seconds for phase, seconds in self.seconds.items()}
        stats["perf/peak_memory_mb"] = peak_memory_mb()
        self.metrics |= stats
        with explain(f"{self.output}/metrics.jsonl could not be written"):
            print(json.dumps(stats), file=self.file, flush=True)
        if self.wandb:
            self.wandb.log(stats, step=step)
        beside = [f"{name.split('/')[-1]} {self.metrics[name]:.2f}" for name in shown if name in self.metrics]
        self.bar.set_postfix_str(", ".join(beside), refresh=False)
        self.bar.update()
        is_finite = all(math.isfinite(x) for name, x in stats.items() if name.endswith("grad_norm"))
        self.broken = 0 if is_finite else self.broken + 1
        require(self.broken < 5, "the gradient was NaN or infinite in five steps in a row (most often the "
                "learning rate is too high); the weights from before are saved")  # fmt: skip

    def is_turn(self, step: int, times: int) -> bool:
        """True at `times` evenly spread steps, the last one included."""
        return step * times // self.bar.total > (step - 1) * times // self.bar.total

    def warn(self, sentence: str) -> None:
        """Prints a warning, once per run."""
        if sentence not in self.warned and not RANK:
            self.bar.write(f"warning: {sentence}", file=sys.stderr)
        self.warned.add(sentence)

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """Shows a table. Markup and control characters in its cells are shown, not obeyed."""
        table = Table(*(Column(name, overflow="fold") for name in columns), title=title, show_lines=True)
        for row in rows:
            table.add_row(*(Text(printable(cell)) for cell in row))
        with self.bar.external_write_mode():
            Console(quiet=RANK > 0).print(table)

    def save(self, step: int) -> None:
        """Writes a checkpoint beside the others and renames it into place, so that none is ever half written."""
        models, optimizer = dcp.get_state_dict(self.models, self.optimizer, options=WHOLE)
        state = {
            "script": Path(__file__).name, "step": step, "models": models, "optimizer": optimizer, "state": self.state,
            "torch_random": torch.get_rng_state(), "python_random": random.getstate(), "bytes": self.file.tell(),
            "seconds": time.perf_counter() - self.start, "wandb_id": self.wandb and self.wandb.id,
        }  # fmt: skip
        folder = self.output / "checkpoints"
        try:
            if not RANK:
                os.fsync(self.file.fileno())
                with open(folder / "unfinished", "wb") as file:
                    torch.save(state, file)
                    file.flush()
                    os.fsync(file.fileno())
                (folder / "unfinished").replace(folder / f"step-{step:08d}.pt")
                for old in sorted(folder.glob("step-*.pt"))[: -self.args.save_total_limit]:
                    old.unlink()
        except (OSError, RuntimeError) as error:  # a disk that is full, a folder that is gone: the run itself goes on
            (folder / "unfinished").unlink(missing_ok=True)
            print(f"warning: no checkpoint after step {step} (is the disk full?): {error}", file=sys.stderr)

    def restore(self, path: Path) -> None:
        """Brings everything back to a checkpoint and removes what came after it; without any, the run starts over."""
        files = [path] if path.is_file() else sorted((self.output / "checkpoints").glob("step-*.pt"), reverse=True)
        metrics, script = self.output / "metrics.jsonl", Path(__file__).name
        for file in files:
            with suppress(Exception):  # whatever a damaged file makes of it
                if zipfile.ZipFile(file).testzip() is None:  # its checksums
                    state = torch.load(file, map_location="cpu", weights_only=True)
                    break
            print(f"warning: {file} is damaged and cannot be read", file=sys.stderr)
        else:
            require(not files, f"--resume {path}: there is no checkpoint that can be read; start a new run")
            return None if RANK else self.file.truncate(0)
        require(state["script"] == script, f"--resume {path}: that is a checkpoint of {state['script']}, not {script}")
        is_whole = metrics.stat().st_size >= state["bytes"]
        require(is_whole, f"{metrics} is shorter than when {file.name} was written; start a new run")
        with explain(f"--resume {path}: this checkpoint does not fit the model"):
            # The optimiser first: to have moments to fill in, it is made to take a step, and the average follows
            dcp.set_optimizer_state_dict(self.models, self.optimizer, state["optimizer"], options=WHOLE)
            dcp.set_model_state_dict(self.models, state["models"], options=WHOLE)
        self.state.update(state["state"])
        random.setstate(state["python_random"])
        torch.set_rng_state(state["torch_random"])
        self.step, self.start, self.wandb_id = state["step"], self.start - state["seconds"], state["wandb_id"]
        self.schedule.last_epoch = self.step - 1
        self.schedule.step()  # the rate of the next step, which is another one if the run is now longer
        if not RANK:
            self.file.truncate(state["bytes"])
            for later in (self.output / "checkpoints").glob("step-*.pt"):
                if later.name > file.name:
                    later.unlink()
        for line in metrics.read_bytes()[: state["bytes"]].splitlines():
            self.metrics |= json.loads(line)
        print(f"continues after step {self.step}, from {file}")

    def finish(self, model: nn.Module, panels: list[list[str]], **others) -> None:
        """Closes the files; unless no step was made, saves the model, its card and curves, and others in subfolders.

        Not if another process has failed: the model cannot be put together without it.
        """
        self.bar.close()
        with suppress(OSError):  # what a full disk did not take was reported where it was written
            self.file.close()
        if self.metrics and (WORLD_SIZE == 1 or sys.exc_info()[0] in (None, KeyboardInterrupt)):
            with explain(f"the model could not be saved in {self.output}"):
                for name, part in {"": model, **others}.items():
                    if part is not None:
                        save_model(part, self.output / name, self.args)
            if not RANK:
                with explain(f"the model is saved in {self.output}, but its card or curves could not be made"):
                    write_card(self.output, self.args, self.metrics)
                    draw_curves(self.output, panels)
                print(f"saved in {self.output}: the model, its card, metrics.jsonl and curves.png")
        if self.wandb:
            self.wandb.finish()


def printable(text: str) -> str:
    """Text without control characters: what a model writes must not steer the reader's terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def peak_memory_mb() -> float:
    """Peak memory in MB: of the GPU on CUDA, else of this process; 0 on Windows, which keeps no such figure."""
    if torch.cuda.max_memory_allocated() or sys.platform == "win32":  # 0 if there is none, or it is not used
        return torch.cuda.max_memory_allocated() / 2**20
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def save_model(model: nn.Module, folder: Path, args: Args) -> None:
    """Model (safetensors) and tokenizer; beside an adapter, in merged/, the whole model."""
    weights, tied = dcp.get_model_state_dict(model, options=WHOLE), model.all_tied_weights_keys
    if RANK:
        return
    model.save_pretrained(folder, state_dict={name: x for name, x in weights.items() if name not in tied})
    model.tokenizer.save_pretrained(folder)
    if getattr(model, "peft_config", None):
        from peft import PeftModel

        whole = load_model(model.auto_class, args.model, args, new_head=True, config=model.config)
        merged = PeftModel.from_pretrained(whole, folder)
        merged.merge_and_unload().save_pretrained(folder / "merged")
        model.tokenizer.save_pretrained(folder / "merged")


def write_card(output: Path, args: Args, metrics: dict[str, float], library: str = "transformers") -> None:
    """README.md, the model card: the last metrics and all settings, as JSON, in which no name is taken for markup."""
    names = {"base_model": args.model, "datasets": args.dataset}
    hub = {key: name for key, name in names.items() if name and not Path(locate(name)).exists()}
    data = ModelCardData(library_name=library, tags=[Path(__file__).stem], **hub)
    rows = "\n".join(f"| `{name}` | {value:.6g} |" for name, value in metrics.items())
    text = f"Made by `{Path(__file__).name}`.\n\n## Last metrics\n\n| metric | value |\n|---|---|\n{rows}\n"
    settings = f"\n## Settings\n\n```json\n{json.dumps(asdict(args), indent=2)}\n```\n"
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}{settings}").save(output / "README.md")


def draw_curves(output: Path, panels: list[list[str]]) -> None:
    """curves.png: one panel for each list of metric names, from metrics.jsonl."""
    from matplotlib.figure import Figure

    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    x, figure = "episode" if "episode" in lines[0] else "step", Figure((5 * len(panels), 3.2), layout="constrained")
    for axis, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        for name in panel:
            points = [(line[x], line[name]) for line in lines if name in line]
            if points:
                axis.plot(*zip(*points), label=name)
        axis.set_xlabel(x)
        axis.spines[["top", "right"]].set_visible(False)
        if axis.lines:
            axis.legend(frameon=False)
    figure.savefig(output / "curves.png", dpi=120)


def read_command_line() -> Args:
    """The settings. With --resume, those of that run, except for what may differ (in Args, from `resume` on)."""
    flags = [word.partition("=") for word in sys.argv[1:]]
    words = [ALIASES.get(flag.replace("_", "-"), flag) + equals + value for flag, equals, value in flags]
    read = partial(tyro.cli, Args, args=words, description=__doc__.splitlines()[0])
    if (args := read()).resume is None:
        return args
    path, names = Path(args.resume), [f.name for f in fields(Args) if f.init]
    folder = path.parent.parent if path.is_file() else path
    with explain(f"--resume {args.resume}: its args.json cannot be read (is it a run of {Path(__file__).name}?)"):
        saved = json.loads((folder / "args.json").read_text())
        before = Args(**{name: tuple(saved[name]) if isinstance(saved[name], list) else saved[name] for name in names})
    args = read(default=before)
    for name in names[: names.index("resume")]:
        old, new, flag = getattr(before, name), getattr(args, name), f"--{name.replace('_', '-')}"
        require(old == new, f"{flag} {new} is not what the run in {folder} was made with, {old}; start a new run")
    same = args.output_dir in (before.output_dir, str(folder))
    require(same, f"--output-dir {args.output_dir}: a run that is resumed stays in its folder, {folder}")
    args.output_dir = str(folder)
    return args


def main() -> None:
    """Reads the command line and trains; a user's mistake ends in one sentence and exit code 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    args, terminal, script = None, sys.stderr, Path(__file__).name
    if RANK:  # only the first process writes to the terminal
        sys.stdout = sys.stderr = open(os.devnull, "w")
    try:
        train(args := read_command_line())
        if dist.is_initialized():
            dist.destroy_process_group()
    except KeyboardInterrupt as stop:
        launcher = "python" if WORLD_SIZE == 1 else f"torchrun --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']}"
        command = f"; to resume: {launcher} {script} --resume {shlex.quote(args.output_dir or '')}" if args else ""
        has_run = args and args.output_dir and Path(args.output_dir, "args.json").exists()
        print(f"{str(stop) or 'interrupted'}{command if has_run else ''}", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        sys.stderr = terminal
        if "by peer" in str(error):
            sys.exit(f"process {RANK} stops: another one, which shows its own error, has closed the connection")
        is_full = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
        if not (is_full or isinstance(error, UserError)):
            raise
        time.sleep(2 * (RANK > 0))  # an error that all processes find is reported by the first
        full = "out of memory: lower --micro-batch-size (of images --train-batch-size); more in docs/guide.md"
        print(printable(f"{script}: error: {full if is_full else error}"), file=terminal)
        sys.exit(2)


if __name__ == "__main__":
    main()
