# /// script
# requires-python = ">=3.10"
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
  1. sample     response y_1..y_T ~ pi(. | prompt), temperature as asked, up to and including the stop token
  2. score      ref_logprobs of a frozen copy of the first policy; values V_t of the critic; one score for the text as
                a whole, less `missing_eos_penalty` where the response never stops
  3. reward     r_t = -kl_coef * KL_t, and the score is added to r of the last real token
  4. advantage  delta_t = r_t + gamma V_{t+1} - V_t,  A_t = delta_t + gamma lam A_{t+1},  R_t = A_t + V_t;  whiten A
  5. loss       ratio_t = pi(y_t) / pi_old(y_t);  policy: mean_t max(-A_t ratio_t, -A_t clip(ratio_t, 1-eps, 1+eps))
                value: mean_t 1/2 max((V_t - R_t)^2, (V_old,t + clip(V_t - V_old,t, +-eps_v) - R_t)^2)
  6. update     `num_ppo_epochs` times over the batch, one optimiser step for each of its `num_mini_batches`
  7. adapt      kl_coef, if asked, so that KL approaches a target

Where things stand, for a prompt of 3 tokens (left-padded to 4), T = 6, and a response that stops after 4 tokens:

  model input   PAD  p1  p2  p3 | y1  y2  y3  EOS  -   -      prompts (B, P) and responses (B, T)
  mask                          |  1   1   1   1   0   0      true up to and including the stop token
  logprobs                      |  *   *   *   *   .   .      of y_t, read from the logits one position to the left
  values                        |  *   *   *   *   .   .      of the state before y_t, also one position to the left
  -kl_coef*KL                   |  *   *   *   *   .   .      one a token
  score                         |              *              one a response, on its last real token

How it departs from the textbook: no environment, an episode is one response; the state is the text so far; an advantage
is taken for every token although the score comes once; and all means over tokens are over real tokens, never padding.
Papers: Schulman et al. 2017 (arXiv 1707.06347, eq. 7, 11-12); Schulman et al. 2016 (GAE, 1506.02438, eq. 16);
Ziegler et al. 2019 (1909.08593, sec. 2.2); Ouyang et al. 2022 (InstructGPT, 2203.02155, sec. 3.5); Huang et al. 2024
(the N+ implementation details, 2403.17031). The README has a glossary of the metrics.

  python ppo.py                 # the toy world: offline, a minute on two CPU cores, the score rises from 0 to nearly 5
  python ppo.py --model gpt2    # GPT-2 on the same prompts and reward; on a CPU it says at once how long it will take

Shapes: B rows, P prompt tokens (left-padded), T response tokens (right-padded), V vocabulary, D hidden size.
"""

import ctypes
import html
import importlib.util
import json
import math
import os
import random
import signal
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, StaticCache, get_scheduler,
)  # fmt: skip
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import Conv1D
from transformers.utils import ModelOutput, logging
from tyro.conf import arg

# ---------------------------------------------------------------------------------------------------------------------
# Arguments


@dataclass
class Args:
    # --- Run
    exp_name: str = "ppo"
    """name of this run, in its folder and on W&B"""
    output_dir: str | None = None
    """where everything goes; by default a new folder runs/NAME__SEED__TIME"""
    seed: int = 1
    """seed of the sampling, the order of prompts and the head of a new critic"""
    device: str | None = None
    """cpu, cuda, mps; by default the best there is"""
    bf16: bool = False
    """run the models under bfloat16 autocast; weights and optimiser stay float32"""
    track: bool = False
    """also log to Weights & Biases (WANDB_MODE=offline works without an account)"""
    wandb_project_name: str = "rlhf"
    """W&B project, with --track"""
    wandb_entity: str | None = None
    """W&B team, with --track"""
    num_sample_generations: int = 10
    """how often after the first update a table of sample responses is printed; 0 for never (TRL)"""

    # --- Survival
    save_steps: int = 10
    """steps (of PPO and RLOO: updates) between checkpoints, each of which holds all that a run consists of"""
    save_total_limit: int = 2
    """checkpoints that are kept, the newest"""
    resume: Annotated[str | None, arg(aliases=["--resume-from-checkpoint"])] = None
    """a run's folder, or one of its checkpoints: goes on from there, with the settings of that run"""

    # --- Many processes: torchrun --nproc-per-node N
    zero_stage: Literal[0, 2, 3] = 0
    """0: all of a model on each GPU; 2: shards of gradients and optimiser state; 3: of weights too (ZeRO, by FSDP2)"""
    shard_size: int | None = None
    """GPUs that hold one set of shards, such as those of a node (ZeRO++); by default all"""
    offload: bool = False
    """keep the shards in CPU memory, from where they come to the GPU when needed: slow, for models that do not fit"""
    gather_for_rollout: bool = True
    """with --zero-stage 3 sample from whole weights, gathered once a batch, or slowly, layer by layer for each token"""

    # --- Models: a folder, or a name on the hub
    model: Annotated[str, arg(aliases=["--model-name-or-path", "--sft-model-path"])] = "toy/sft"
    """the policy to start from, which is also the reference that KL is measured against"""
    reward_model: Annotated[str, arg(aliases=["--reward-model-path"])] = "toy/reward_model"
    """a sequence classifier with one label; it may have another tokenizer than the policy"""
    reward_label: str | None = None
    """the label whose logit is the reward, for a classifier that has several"""
    reward_fn: str | None = None
    """file.py:name, a function from a list of texts to a list of floats; used instead of the reward model"""
    reward_timeout: float | None = None
    """seconds that a reward function may take for a batch; by default as many as it likes"""
    gold_reward_fn: str | None = None
    """file.py:name, a second opinion that is logged as objective/gold_scores and never trained on"""
    critic: Literal["separate", "shared"] = "separate"
    """a network of its own (InstructGPT), or a value head on the policy's trunk (TRL 0.7): half the memory and time"""
    trust_remote_code: bool = False
    """run Python code that comes with a model; leave it off unless you have read that code"""
    attn_implementation: str | None = None
    """eager, sdpa, flash_attention_2, ...; by default what transformers takes for the model"""
    gradient_checkpointing: bool = False
    """compute activations again in the backward pass: far less memory, a third more time, the same numbers"""
    lora_r: int = 0
    """rank of LoRA adapters (Hu et al. 2021), 0 for none; the reference is then the policy with its adapter off"""
    lora_alpha: float = 32.0
    """the adapter's output is scaled by lora_alpha / lora_r"""
    lora_target_modules: str | None = None
    """regular expression of the layers that get one, or all-linear; by default what peft takes for the model"""

    # --- Data
    dataset: Annotated[str, arg(aliases=["--dataset-name"])] = "toy/data/prompts"
    """folder, file (jsonl, csv, parquet) or hub name of the prompts"""
    dataset_config: Annotated[str | None, arg(aliases=["--dataset-config-name"])] = None
    """configuration of a hub dataset that has several"""
    dataset_train_split: str = "train"
    """split to take prompts from"""
    dataset_test_split: str | None = None
    """split to evaluate on; by default validation where the data have one; none for no evaluation"""
    prompt_column: Annotated[str, arg(aliases=["--dataset-text-field"])] = "prompt"
    """column of prompts: texts, or lists of {role, content} messages for the tokenizer's chat template"""
    max_prompt_length: int = 512
    """prompts of more tokens are dropped, and counted (N+ details: 512)"""

    # --- Rollout
    response_length: int = 53
    """most tokens in a response (TRL 0.16, from the TL;DR task). More: longer rollouts, a harder credit assignment"""
    temperature: float = 0.7
    """logits are divided by this in rollout, reference and loss alike (TRL 0.16). Lower: less exploration"""
    response_length_min: int | None = None
    """the limit is drawn for each rollout, from here to response_length inclusive (after TRL 0.7's length_sampler)"""
    min_new_tokens: int = 0
    """the stop token cannot be drawn before so many others"""
    top_k: int = 0
    """draw from the k likeliest tokens only, 0 for all. The loss and the reference keep to the same tokens"""
    top_p: float = 1.0
    """draw from the fewest tokens that hold so much probability (Holtzman et al. 2020). As with top_k"""
    stop_token: str = "eos"
    """the token that ends a response: eos, none, or a text that is one token"""
    stop_token_id: int | None = None
    """its id, instead of --stop-token"""
    missing_eos_penalty: float | None = None
    """subtracted from the score of a response without stop token (TRL). Higher: shorter responses, sooner"""

    # --- Batch geometry: batch = per_device_train_batch_size * gradient_accumulation_steps * num_mini_batches, times the
    # number of processes
    per_device_train_batch_size: int | None = None
    """responses in one forward/backward of the update; by default 64, or 8 for a model over 30M on a CPU"""
    gradient_accumulation_steps: int = 1
    """micro-batches in a mini-batch; changes memory, not the result"""
    num_mini_batches: int = 1
    """optimiser steps in one pass over the batch (TRL 0.16)"""
    batch_size: int | None = None
    """episodes in an update, of all processes (TRL 0.7's name); per_device_train_batch_size then follows from it"""
    local_rollout_forward_batch_size: int = 64
    """responses sampled at once (TRL); changes memory and speed, not the result"""
    micro_batch_size: int | None = None
    """rows of like length in one pass; by default per_device_train_batch_size, on a CPU 16 or what the logits allow"""
    total_episodes: int | None = None
    """responses sampled in the whole run, in whole batches; by default 2048"""
    num_train_epochs: float | None = None
    """passes over the prompts, instead of total_episodes (TRL: which wins where both are given)"""

    # --- Optimisation
    learning_rate: float | None = None
    """AdamW's; by default from the size of the policy (see default_learning_rate), ten times as high with LoRA"""
    critic_learning_rate: float | None = None
    """the critic's; by default the policy's"""
    critic_warmup_updates: int = 0
    """first updates in which only the critic learns"""
    lr_scheduler_type: str = "linear"
    """any name that transformers.get_scheduler knows (TRL: linear to 0)"""
    warmup_ratio: float = 0.0
    """share of the run in which the learning rate rises to its value"""
    weight_decay: float = 0.0
    """AdamW's"""
    adam_betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's (OpenRLHF: 0.9 0.95)"""
    adam_epsilon: float = 1e-8
    """Adam's epsilon (torch and TRL; the N+ details take 1e-5)"""
    max_grad_norm: float = 1.0
    """the gradients of policy and critic are each clipped to this norm"""

    # --- PPO
    num_ppo_epochs: Annotated[int, arg(aliases=["--ppo-epochs"])] = 4
    """passes over each batch. More: faster, until the ratio is clipped everywhere (TRL: 4)"""
    cliprange: float = 0.2
    """eps of the clipped ratio (PPO, eq. 7)"""
    cliprange_value: float = 0.2
    """eps_v of the clipped value (TRL, N+ details)"""
    vf_coef: float = 0.1
    """weight of the value loss (TRL, N+ details). For a separate critic Adam undoes it: set critic_learning_rate"""
    gamma: float = 1.0
    """discount; 1 because an episode is short"""
    lam: float = 0.95
    """GAE's lambda: 0 trusts the critic, 1 the sampled return"""
    whiten_rewards: bool = False
    """divide per-token rewards by their deviation, keeping the mean (TRL)"""
    whiten_advantages: bool = True
    """shift and scale advantages to mean 0 and variance 1 over the whole batch (TRL does it always)"""
    use_score_scaling: bool = False
    """divide scores by their running standard deviation (TRL 0.7)"""
    use_score_norm: bool = False
    """with use_score_scaling: subtract their running mean before (TRL 0.7)"""
    score_clip: float | None = None
    """clip scores, scaled or not, to +- this (TRL 0.7)"""
    ratio_threshold: float = 10.0
    """a mini-batch whose mean ratio is above makes no step, and is counted (TRL 0.7)"""
    target_kl: float | None = None
    """no more steps on a batch once a mini-batch's policy/approxkl exceeds 1.5 times this (after TRL 0.7)"""

    # --- KL to the reference
    kl_coef: Annotated[float, arg(aliases=["--init-kl-coef"])] = 0.05
    """weight of the KL penalty (TRL 0.16). 0 lets the policy exploit the reward; high keeps it where it began"""
    kl_estimator: Annotated[Literal["k1", "kl", "abs", "k2", "mse", "k3", "full"], arg(aliases=["--kl-penalty"])] = "k1"
    """per-token estimate: k1 = kl = log-ratio; abs; k2 = mse = half its square; k3; full = over the vocabulary"""
    adaptive_kl: Annotated[bool, arg(aliases=["--adap-kl-ctrl"])] = False
    """let kl_coef follow kl_target (Ziegler et al. 2019, sec. 2.2)"""
    kl_target: Annotated[float, arg(aliases=["--target"])] = 6.0
    """KL in nats a response that the controller aims at (TRL 0.7)"""
    kl_horizon: Annotated[int, arg(aliases=["--horizon"])] = 10_000
    """episodes over which the controller reacts (TRL 0.7)"""

    # --- Beside PPO
    pretrain_data: str | None = None
    """folder, file or hub name of texts (column text, split train): PPO-ptx (InstructGPT, eq. 2)"""
    ptx_coef: float = 0.0
    """weight of the language-modelling loss on them (InstructGPT 27.8, OpenRLHF 0.05)"""
    ema_decay: float = 0.0
    """keep a moving average of the policy, saved in ema/; 0 for none (InstructGPT, OpenRLHF 0.992)"""
    aux_loss_coef: float = 0.0
    """weight of the router's load-balancing loss in mixture-of-experts models (OpenRLHF)"""

    # --- Evaluation on the test split
    eval_steps: int = 10
    """updates between evaluations; there is one at the end too"""
    num_eval_prompts: int = 64
    """prompts of the test split that are answered"""
    eval_temperature: float = 0.01
    """temperature of these answers (TRL samples its tables at 0.01)"""


# ---------------------------------------------------------------------------------------------------------------------
# 1. Sample


def join(prompts: Tensor, prompt_mask: Tensor, responses: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Prompt (B, P) and response (B, T) as one model input (B, P+T). Positions count real tokens only."""
    attention_mask = torch.cat([prompt_mask, mask], 1).long()
    return {
        "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),  # GPT-2 would count the padding
    }


def response_mask(responses: Tensor, stop_token_id: int | None) -> tuple[Tensor, Tensor]:
    """(B, T) true up to and including the first stop token, and (B,) whether there is one.

    Made from positions, so that it is right where the padding token is the stop token. With stop token 0:
        responses [[5, 0, 7, 0], [5, 6, 7, 8]]  ->  mask [[1, 1, 0, 0], [1, 1, 1, 1]], ended [1, 0]
    """
    is_stop = torch.zeros_like(responses) if stop_token_id is None else (responses == stop_token_id).long()
    return is_stop.cumsum(1) - is_stop == 0, is_stop.any(1)


def draw(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """One token for each row of logits (B, V), and its logprob: the distribution function inverted at uniform (B,)."""
    logprobs = logits.log_softmax(1)
    cdf = logprobs.exp().cumsum(1)
    threshold = uniform[:, None] * cdf[:, -1:]  # (B, 1), scaled because rounding lets the sum end a little off 1
    tokens = torch.searchsorted(cdf, threshold, right=True).clamp(max=logits.shape[1] - 1)  # (B, 1)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)


FORBIDDEN = -1e9  # the logit of a token that may not be drawn: probability 0, and unlike -inf no NaN in an entropy


def allowed_tokens(
    logits: Tensor, t: int, top_k: int, top_p: float, min_new_tokens: int, stop_token_id: int | None
) -> Tensor:
    """(B, V) true where token t may be drawn: no early stop token, and of the rest the likeliest of logits (B, V).

    top_p keeps a token while those likelier than it hold less than top_p: V = 4, probabilities .5 .3 .1 .1 and top_p
    .7 keep the first two. The likeliest token always stays.
    """
    allowed = torch.ones_like(logits, dtype=torch.bool)
    if stop_token_id is not None and t < min_new_tokens:
        allowed[:, stop_token_id] = False
    ordered, tokens = logits.masked_fill(~allowed, FORBIDDEN).softmax(1).sort(descending=True)
    likelier = ordered.cumsum(1) - ordered  # (B, V) probability of all tokens that are likelier
    if top_p < 1:
        allowed &= torch.zeros_like(allowed).scatter(1, tokens, likelier < top_p)
    if top_k:
        allowed &= torch.zeros_like(allowed).scatter(1, tokens[:, :top_k], True)
    return allowed


@torch.no_grad()
def sample(
    policy: nn.Module, prompts: Tensor, prompt_mask: Tensor, uniforms: Tensor, temperature: float,
    stop_token_id: int | None, pad_token_id: int, restrict: Callable[[Tensor, int], Tensor] | None = None,
) -> dict[str, Tensor]:  # fmt: skip
    """Draws one response for each prompt (B, P) from softmax(logits / temperature), with a key-value cache.

    Nothing else shapes the distribution, unless `restrict` says which tokens may be drawn: no generation config is
    read. All chance is in `uniforms` (B, T), drawn ahead from [0, 1), so that no response depends on its neighbours.
    Returns responses (B, T), mask (B, T), logprobs (B, T) of the drawn tokens (0 on padding), ended (B,), and with
    `restrict` allowed (B, T, V): the loss must describe the distribution that was sampled from.
    """
    (B, T), device = uniforms.shape, prompts.device
    V = policy.config.get_text_config().vocab_size
    allowed = torch.ones(B, T, V, dtype=torch.bool, device=device) if restrict else None
    responses = prompts.new_full((B, T), pad_token_id)  # (B, T)
    logprobs = torch.zeros(B, T, device=device)  # (B, T)
    ended = torch.zeros(B, dtype=torch.bool, device=device)  # (B,)
    rows = torch.arange(B, device=device)  # the rows still in the forward pass; all arrays below have one line for each
    tokens, positions = prompts, (prompt_mask.cumsum(1) - 1).clamp(min=0)  # (rows, P), after the first pass (rows, 1)
    attention_mask = F.pad(prompt_mask.long(), (0, T), value=1)  # (rows, P+T): what is yet to come, causality hides
    cache = StaticCache(config=policy.config, max_cache_len=attention_mask.shape[1])  # one shape, and never copied
    for t in range(T):
        output = policy(
            input_ids=tokens, attention_mask=attention_mask, position_ids=positions,
            past_key_values=cache, use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        logits = output.logits[:, -1].float() / temperature  # (rows, V)
        if restrict:
            allowed[rows, t] = restrict(logits, t)
            logits = logits.masked_fill(~allowed[rows, t], FORBIDDEN)
        token, logprob = draw(logits, uniforms[rows, t])
        responses[rows, t], logprobs[rows, t] = token, logprob
        ended[rows] |= token == (-1 if stop_token_id is None else stop_token_id)
        going = ~ended[rows]
        if not add_up(going.any().int()):  # on no process: each needs the others while weights are sharded
            break
        if 0 < going.float().mean() < 0.75:  # a forward pass over ended rows costs more than copying the cache once
            rows, token, positions, attention_mask = (x[going] for x in (rows, token, positions, attention_mask))
            cache.reorder_cache(going.nonzero().squeeze(1))
        tokens, positions = token[:, None], positions[:, -1:] + 1
    mask, ended = response_mask(responses, stop_token_id)  # what an ended row drew while it waited is erased here
    mask &= torch.arange(T, device=device) <= t
    return {
        "responses": responses.masked_fill(~mask, pad_token_id),
        "mask": mask,
        "logprobs": logprobs.masked_fill(~mask, 0.0),
        "ended": ended,
        "allowed": allowed,
    }


@dataclass
class Rollout:
    """A batch of episodes."""

    prompts: Tensor  # (B, P) left-padded
    prompt_mask: Tensor  # (B, P) true on real tokens
    responses: Tensor  # (B, T) right-padded
    mask: Tensor  # (B, T) true up to and including the stop token
    logprobs: Tensor  # (B, T) of the policy that drew them
    ended: Tensor  # (B,) whether there is a stop token
    allowed: Tensor | None = None  # (B, T, V) tokens that could be drawn, where not all could
    ref_logprobs: Tensor | None = None  # (B, T)
    kl: Tensor | None = None  # (B, T) by the estimator asked for
    values: Tensor | None = None  # (B, T)
    advantages: Tensor | None = None  # (B, T)
    returns: Tensor | None = None  # (B, T)

    @property
    def text(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What a model reads."""
        return self.prompts, self.prompt_mask, self.responses, self.mask

    def rows(self, index: Tensor) -> "Rollout":
        """Some of the episodes, less the columns in which none of them has a token: fewer to compute, same numbers.

        Up to multiples of 8, so that there are few different shapes: a kernel is made, or chosen, for each.
        """
        P, T = (min(-(-int(m[index].sum(1).max()) // 8) * 8, m.shape[1]) for m in (self.prompt_mask, self.mask))
        part = {f.name: getattr(self, f.name) for f in fields(self)}
        part = {name: x if x is None else x[index] for name, x in part.items()}
        part = {name: x if x is None or x.dim() == 1 else x[:, -P:] if "prompt" in name else x[:, :T]
                for name, x in part.items()}  # fmt: skip
        return Rollout(**part)

    def by_length(self, rows: Tensor) -> Tensor:
        """The row numbers in the order of their lengths, so that neighbours need little padding."""
        lengths = self.prompt_mask.sum(1) + self.mask.sum(1)
        return rows[lengths[rows].argsort(stable=True)]

    def chunks(self, size: int) -> Iterator[tuple[Tensor, "Rollout"]]:
        """This process's share of the episodes, `size` of like length at a time: their row numbers and themselves."""
        order = self.by_length(torch.arange(len(self.mask), device=self.mask.device))
        for index in own_share(order).split(size):
            yield index, self.rows(index)

    def join_chunks(self, x: Tensor) -> Tensor:
        """(B, ...) x, in which each process has filled the rows of its chunks, filled in all rows."""
        order, result = self.by_length(torch.arange(len(self.mask), device=self.mask.device)), torch.empty_like(x)
        result[order] = join_shares(x[own_share(order)], len(order))
        return result


# ---------------------------------------------------------------------------------------------------------------------
# 2. Score


def response_forward(
    model: nn.Module, prompts: Tensor, prompt_mask: Tensor, responses: Tensor, mask: Tensor, temperature: float,
    allowed: Tensor | None = None, **options,
) -> tuple[Tensor, ModelOutput]:  # fmt: skip
    """(B, T, V) float32 logits / temperature from which response tokens are drawn, and the model's whole output.

    Position P-1+t predicts token t. Where sampling was restricted to allowed tokens (B, T, V), so are the logits: of
    the policy now, of the reference, and in the loss the same tokens as when the response was drawn.
    """
    P, T = prompts.shape[1], responses.shape[1]
    positions = torch.arange(P - 1, P + T - 1, device=prompts.device)
    output = model(**join(prompts, prompt_mask, responses, mask), use_cache=False, logits_to_keep=positions, **options)
    logits = output.logits.float().div_(temperature)  # in place: it is the largest tensor that there is
    return (logits if allowed is None else logits.masked_fill(~allowed, FORBIDDEN)), output


def response_logits(model: nn.Module, *inputs) -> Tensor:
    """The logits (B, T, V) of response_forward alone."""
    return response_forward(model, *inputs)[0]


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """(B, T) log-probability of each token under logits (B, T, V)."""
    return logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


def token_logprobs_and_entropy(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """(B, T) log-probability of each token under logits (B, T, V), and without gradient the entropy in nats there."""
    logprobs = logits.log_softmax(-1)  # once for both
    with torch.no_grad():
        entropy = -logprobs.exp().mul_(logprobs).sum(-1)
    return logprobs.gather(-1, tokens[..., None]).squeeze(-1), entropy


def read_reward(model: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """(B, labels) output of a sequence classifier's head at the last real token, found from the attention mask (B, S).

    The library's own pooling looks for the last token that is not the pad token: where padding and EOS are one token,
    it reads the token before EOS. A classifier that pools elsewhere (BERT's first token, say) has no `score` head over
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


class Critic(nn.Module):
    """A transformer body with a head of one output: V_t, the expected return before response token t is drawn.

    With --critic shared it has no body; its head reads what the policy's last layer gives.
    """

    def __init__(self, body: nn.Module | None, head: nn.Module):
        super().__init__()
        self.body, self.head = body, head

    def forward(self, prompts: Tensor, prompt_mask: Tensor, responses: Tensor, mask: Tensor) -> Tensor:
        """(B, T) values, each read one position before its token."""
        hidden = self.body(**join(prompts, prompt_mask, responses, mask), use_cache=False).last_hidden_state
        return self.read(hidden, responses.shape[1])

    def read(self, hidden: Tensor, T: int) -> Tensor:
        """(B, T) values from the last layer's states (B, P+T, D)."""
        return self.head(hidden[:, -T - 1 : -1]).float().sum(-1)  # over one output: not a view, which FSDP warns of


# ---------------------------------------------------------------------------------------------------------------------
# 3. Reward


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean over real tokens. What stands on padding, be it NaN, does not enter."""
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

    k1 is unbiased and often negative; k2 is biased and small in variance; k3 is unbiased and never negative.
    """
    log_ratio = logprobs - ref_logprobs
    if estimator in ("k1", "kl"):
        return log_ratio
    if estimator == "abs":
        return log_ratio.abs()
    if estimator in ("k2", "mse"):
        return 0.5 * log_ratio**2
    if estimator == "k3":
        return torch.expm1(-log_ratio) + log_ratio
    raise ValueError(f"no KL estimator is called {estimator!r}")


def full_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """(B, T) exact KL(policy || reference) over the vocabulary, from logits (B, T, V)."""
    logprobs, ref_logprobs = logits.log_softmax(-1), ref_logits.log_softmax(-1)
    return (logprobs.exp() * (logprobs - ref_logprobs)).sum(-1)


def penalize_missing_eos(scores: Tensor, ended: Tensor, penalty: float | None) -> Tensor:
    """(B,) scores, less `penalty` where a response has no stop token (TRL subtracts; the N+ details replace by -1)."""
    return scores - (penalty or 0.0) * (~ended).float()


class RunningMoments:
    """Mean and standard deviation of all scores so far (TRL 0.7; Chan et al. 1979 for joining two sets)."""

    def __init__(self):
        self.mean, self.std, self.squares, self.count = 0.0, 1.0, 0.0, 0

    def update(self, x: Tensor) -> None:
        """Takes in the scores (B,) of a batch."""
        n, shift = len(x), x.mean().item() - self.mean
        self.squares += (x - x.mean()).square().sum().item() + shift**2 * self.count * n / (self.count + n)
        self.count += n
        self.mean += shift * n / self.count
        self.std = (self.squares / max(1, self.count - 1)) ** 0.5


def scale_scores(scores: Tensor, moments: RunningMoments, args: Args) -> Tensor:
    """(B,) scores as they enter the reward: scaled and shifted by the moments so far, clipped, each where asked."""
    moments.update(scores)
    if args.use_score_scaling:
        scores = (scores - moments.mean * args.use_score_norm) / (moments.std + torch.finfo(scores.dtype).eps)
    return scores if args.score_clip is None else scores.clamp(-args.score_clip, args.score_clip)


def shape_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> tuple[Tensor, Tensor]:
    """Per-token rewards (B, T) and their part without the score, -kl_coef * KL; 0 on padding.

    The score (B,) stands on the last real token, as in OpenAI's code and TRL 0.7 (TRL 0.16 puts it one further).
    """
    non_score_reward = -kl_coef * kl.masked_fill(~mask, 0.0)  # (B, T)
    is_last = mask & ~F.pad(mask, (0, 1))[:, 1:]  # (B, T) true where the next position is padding or the end
    return non_score_reward + scores[:, None] * is_last, non_score_reward


class AdaptiveKLController:
    """Moves the coefficient by at most 20 % * episodes / horizon towards the KL target (Ziegler et al. 2019, 2.2)."""

    def __init__(self, kl_coef: float, target: float, horizon: int):
        self.value, self.target, self.horizon = kl_coef, target, horizon

    def update(self, kl: float, episodes: int) -> None:
        """`kl` is that of the last batch, in nats a response; `episodes` is the size of that batch."""
        error = max(-0.2, min(0.2, kl / self.target - 1))
        self.value *= 1 + error * episodes / self.horizon


# ---------------------------------------------------------------------------------------------------------------------
# 4. Advantage


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, eq. 16): advantages and returns (B, T), 0 on padding.

    Nothing follows the last real token: the value there is 0, since the episode is over. With lam = 1 the returns are
    the discounted sums of the rewards to come, whatever the critic says.
    """
    rewards, values = rewards.masked_fill(~mask, 0.0), values.masked_fill(~mask, 0.0)
    advantages, advantage, next_value = torch.zeros_like(rewards), 0.0, 0.0
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]  # (B,)
        advantage = delta + gamma * lam * advantage
        advantages[:, t], next_value = advantage, values[:, t]
    return advantages, advantages + values


# ---------------------------------------------------------------------------------------------------------------------
# 5. Loss


def policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, cliprange: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Clipped surrogate (PPO, eq. 7), negated: losses (B, T), the ratio, and where the clipped branch was the larger.

    The larger loss is taken, so that moving further than cliprange is never rewarded but still punished.
    """
    log_ratio = (logprobs - old_logprobs).masked_fill(~mask, 0.0)
    advantages = advantages.masked_fill(~mask, 0.0)
    ratio = log_ratio.exp()
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - cliprange, 1 + cliprange)
    return torch.max(unclipped, clipped), ratio, clipped > unclipped


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, cliprange_value: float
) -> tuple[Tensor, Tensor]:
    """Clipped squared error (TRL, OpenAI's code): losses (B, T) with their 1/2, and where the clipped was larger."""
    values, old_values, returns = (x.masked_fill(~mask, 0.0) for x in (values, old_values, returns))
    near_values = old_values + (values - old_values).clamp(-cliprange_value, cliprange_value)
    unclipped, clipped = (values - returns) ** 2, (near_values - returns) ** 2
    return 0.5 * torch.max(unclipped, clipped), clipped > unclipped


# ---------------------------------------------------------------------------------------------------------------------
# 6. Update


def mini_batches(rollout: Rollout, args: Args) -> Iterator[list[Tensor]]:
    """A random partition of the batch into mini-batches of row numbers, each cut into micro-batches; once an epoch.

    The rows of a micro-batch are of like length, so that little is computed on padding. The gradient of a mini-batch is
    a sum over its rows: how it is cut changes nothing. Of many processes each yields its share.
    """
    B, device = len(rollout.mask), rollout.mask.device
    for _ in range(args.num_ppo_epochs):
        for mini_batch in torch.randperm(B).to(device).split(B // args.num_mini_batches):
            yield list(own_share(rollout.by_length(mini_batch)).split(args.micro_batch_size))


def policy_forward(
    policy: nn.Module, r: Rollout, args: Args, **options
) -> tuple[Tensor, Tensor, Tensor | None, tuple[Tensor, ...] | None]:
    """Logprobs (b, T) of responses under the policy now, entropy (b, T), the router's loss, all layers' states.

    The logits (b, T, V), the largest tensor of an update, end here: the graph needs their log-softmax alone.
    """
    with autocast(args, r.mask.device):
        inputs = (*r.text, args.temperature, r.allowed)
        logits, output = response_forward(policy, *inputs, **options, **router_options(args))
    logprobs, entropy = token_logprobs_and_entropy(logits, r.responses)
    return logprobs, entropy, getattr(output, "aux_loss", None), getattr(output, "hidden_states", None)


def mini_batch_gradient(
    policy: nn.Module, critic: Critic, rollout: Rollout, mini_batch: list[Tensor], args: Args
) -> dict[str, Tensor]:
    """Adds up the gradient of a mini-batch; returns sums over its tokens of what is logged.

    The gradient is a sum over the tokens of the mini-batch divided by their number. So each micro-batch divides by the
    number of tokens in the whole mini-batch, and how a mini-batch is cut changes nothing. Where many processes have
    cut it among them, that is the mean number on a process, since gradients become means over processes.
    """
    sums, shared = defaultdict(float), args.critic == "shared"
    num_tokens = add_up(rollout.mask[torch.cat(mini_batch)].sum()) / num_processes()
    share = lambda x, mask: x.masked_fill(~mask, 0.0).sum() / num_tokens  # noqa: E731
    for index in mini_batch:
        r = rollout.rows(index)
        logprobs, entropy, aux_loss, states = policy_forward(policy, r, args, output_hidden_states=shared)  # (b, T)
        pg_loss, ratio, pg_clipped = policy_loss(logprobs, r.logprobs, r.advantages, r.mask, args.cliprange)
        loss = pg_loss + args.aux_loss_coef * aux_loss if args.aux_loss_coef else pg_loss
        if shared:
            values = critic.read(states[-1], r.mask.shape[1])  # (b, T)
        else:
            share(loss, r.mask).backward()  # now, so that the policy's activations are gone when the critic's are made
            with autocast(args, index.device):
                loss, values = 0.0, critic(*r.text)
        vf_loss, vf_clipped = value_loss(values, r.values, r.returns, r.mask, args.cliprange_value)
        share(loss + args.vf_coef * vf_loss, r.mask).backward()
        with torch.no_grad():
            token_stats = {
                "tokens": torch.ones_like(ratio), "loss/policy_avg": pg_loss, "loss/value_avg": vf_loss,
                "policy/clipfrac_avg": pg_clipped, "val/clipfrac_avg": vf_clipped, "val/ratio": ratio,
                "ratio_squared": ratio**2, "ratio_error": (ratio - 1).abs(),
                "policy/approxkl_avg": 0.5 * (logprobs - r.logprobs) ** 2, "policy/entropy_avg": entropy,
            }  # fmt: skip
            for name, x in token_stats.items():
                sums[name] += x.masked_fill(~r.mask, 0.0).sum()
    return dict(zip(sums, add_up(torch.stack(list(sums.values())))))


def optimize(
    policy: nn.Module, critic: Critic, optimizer: torch.optim.Optimizer, rollout: Rollout, args: Args,
    pretrain: Iterator[tuple[Tensor, Tensor]] | None = None,
) -> dict[str, float]:  # fmt: skip
    """`num_ppo_epochs` passes over the rollout, one optimiser step a mini-batch; returns means over all tokens seen."""
    policy.train(args.gradient_checkpointing), critic.train(args.gradient_checkpointing)  # dropout is off in both modes
    sums, steps, per_step = {}, 0, defaultdict(float)
    for mini_batch in mini_batches(rollout, args):
        batch = mini_batch_gradient(policy, critic, rollout, mini_batch, args)
        ratio, approxkl = (float(batch[name] / batch["tokens"]) for name in ("val/ratio", "policy/approxkl_avg"))
        if not sums:
            check_first_ratio(float(batch["ratio_error"] / batch["tokens"]), args)
        sums = {name: sums[name] + x if sums else x for name, x in batch.items()}
        if args.target_kl is not None and approxkl > 1.5 * args.target_kl:
            break
        if ratio <= args.ratio_threshold:
            if pretrain:
                per_step["loss/ptx"] += pretrain_gradient(policy, *next(pretrain), args)
            norms = [clip_gradient(group["params"], args.max_grad_norm) for group in optimizer.param_groups]
            for name, norm in zip(("policy/grad_norm", "val/grad_norm"), norms):
                per_step[name] += norm
            if all(norm.isfinite() for norm in norms):  # else the weights would be NaN for good
                optimizer.step()
                steps += 1
        optimizer.zero_grad()
    optimizer.zero_grad()
    policy.eval(), critic.eval()
    tokens = sums.pop("tokens")
    means = {name: float(x / tokens) for name, x in sums.items()}
    means |= {name: float(x / max(1, steps)) for name, x in per_step.items()}
    means["val/ratio_var"] = max(0.0, means["ratio_squared"] - means["val/ratio"] ** 2)
    means["val/skipped_steps"] = args.num_ppo_epochs * args.num_mini_batches - steps
    return means


def pretrain_gradient(policy: nn.Module, ids: Tensor, mask: Tensor, args: Args) -> float:
    """Adds the gradient of ptx_coef * mean(-log pi) on texts (B, S), and returns that mean (InstructGPT, eq. 2)."""
    ids, mask, num_tokens = own_share(ids), own_share(mask), mask[:, 1:].sum()
    with autocast(args, ids.device):
        logits = policy(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits
    logprobs = token_logprobs(logits[:, :-1].float(), ids[:, 1:])
    loss = -logprobs.masked_fill(~mask[:, 1:], 0.0).sum() / num_tokens
    (num_processes() * args.ptx_coef * loss).backward()  # FSDP takes the mean over processes
    return add_up(loss.detach()).item()


def check_first_ratio(error: float, args: Args) -> None:
    """Before the first step the policy is the one that sampled, so the ratio is 1; anything else is a bug to be found.

    `error` is the mean of |ratio - 1|. Raises UserError above 1e-3 (5e-2 under bf16, whose logits have three digits).
    """
    bound = 5e-2 if args.bf16 else 1e-3
    require(
        error <= bound,
        f"the ratio pi/pi_old is off by {error:.2g} before any step was made (allowed: {bound:g}): rollout and update "
        "see different distributions. Usual causes: dropout that is on, a model that ignores position_ids or the "
        "attention mask, different temperatures, a cache that this model handles differently; with bf16, rounding.",
    )


# ---------------------------------------------------------------------------------------------------------------------
# The loop


def train(args: Args) -> None:
    """Trains the policy and leaves it, its metrics and its model card in args.output_dir."""
    check_args(args)
    device = start_run(args)
    policy, tokenizer = load_policy(args)
    reward_model, reward_tokenizer = load_reward_model(args)
    critic = make_critic(args, policy, tokenizer, reward_model, reward_tokenizer)
    reference = make_reference(policy, args)
    ema = deepcopy(policy) if args.ema_decay else None
    place(args, device, policy, critic.head if args.critic == "shared" else critic, reference, reward_model, ema)
    score = make_scorer(args.reward_fn, tokenizer, args, reward_model, reward_tokenizer)
    gold_score = make_scorer(args.gold_reward_fn, tokenizer, args) if args.gold_reward_fn else None
    prompts, eval_prompts = load_prompts(args, tokenizer, policy)
    num_updates = set_defaults(args, policy, len(prompts))
    use_fast_kernels(args, max(map(len, prompts)) + args.response_length, policy, reference, critic.body, reward_model)
    queues = {"prompts": [], "pretrain": []}  # row numbers that the present pass over the data has yet to give
    prompts = batches(prompts, queues["prompts"], args.batch_size, tokenizer, device, left=True)
    pretrain = load_pretrain_texts(args, queues["pretrain"], tokenizer, policy) if args.pretrain_data else None
    optimizer = make_optimizer(args, policy, critic)
    schedule = make_schedule(args, optimizer, num_updates)
    follow(ema, policy, optimizer, args.ema_decay)
    kl_controller = AdaptiveKLController(args.kl_coef, args.kl_target, args.kl_horizon)
    moments = RunningMoments()
    describe_run(args, num_updates, policy, critic)
    log = RolloutLog(args, num_updates)
    checkpoints = Checkpoints(
        args, log, policy=policy, critic=critic, ema=ema, optimizer=optimizer, schedule=schedule,
        kl_controller=kl_controller, moments=moments, **queues,
    )  # fmt: skip
    try:
        for update in checkpoints.steps(num_updates):
            if update <= args.critic_warmup_updates:
                optimizer.param_groups[0]["lr"] = 0.0  # the policy's
            with log.clock("rollout"):
                rollout = sample_batch(policy, *next(prompts), tokenizer, args)  # step 1
            with log.clock("score"):
                score_reference(rollout, policy, reference, args)  # step 2
                rollout.values = by_chunks(lambda r: response_values(policy, critic, r), rollout, args)
                scores = penalize_missing_eos(score(rollout), rollout.ended, args.missing_eos_penalty)
            used_scores = scale_scores(scores, moments, args)  # step 3
            rewards, non_score_reward = shape_rewards(used_scores, rollout.kl, rollout.mask, kl_controller.value)
            if args.whiten_rewards:
                rewards = masked_whiten(rewards, rollout.mask, shift_mean=False)
            advantages, rollout.returns = gae(rewards, rollout.values, rollout.mask, args.gamma, args.lam)  # step 4
            rollout.advantages = masked_whiten(advantages, rollout.mask) if args.whiten_advantages else advantages
            with log.clock("update"):
                stats = optimize(policy, critic, optimizer, rollout, args, pretrain)  # steps 5 and 6
            stats |= rollout_stats(rollout, scores, non_score_reward)
            stats |= {"lr": optimizer.param_groups[0]["lr"], "objective/kl_coef": kl_controller.value}
            stats["val/explained_variance"] = explained_variance(rollout)
            if gold_score:
                stats["objective/gold_scores"] = gold_score(rollout).mean().item()
            if eval_prompts and (update % args.eval_steps == 0 or update == num_updates):
                stats |= evaluate(policy, reference, score, eval_prompts, tokenizer, args)
            log.write(update, stats, rollout, scores, tokenizer)
            if args.adaptive_kl:
                kl_controller.update(stats["objective/kl"], args.batch_size)  # step 7
            schedule.step()
    finally:  # also after an error or Ctrl-C: what was trained is on disk
        log.finish(policy, tokenizer, ema)


def sample_batch(
    policy: nn.Module, prompts: Tensor, prompt_mask: Tensor, tokenizer: AutoTokenizer, args: Args
) -> Rollout:
    """Step 1 for a whole batch, `local_rollout_forward_batch_size` prompts at a time."""
    T, restrict = args.response_length, None
    if args.response_length_min is not None:
        T = int(torch.randint(args.response_length_min, T + 1, ()))
    if args.top_k or args.top_p < 1 or args.min_new_tokens:
        limits = (args.top_k, args.top_p, args.min_new_tokens, args.stop_token_id)
        restrict = lambda logits, t: allowed_tokens(logits, t, *limits)  # noqa: E731
    inputs = prompts, prompt_mask, torch.rand(len(prompts), T, device=prompts.device)
    with autocast(args, prompts.device), gathered(policy, args.zero_stage, args.gather_for_rollout):
        parts = [
            sample(policy, *rows, args.temperature, args.stop_token_id, tokenizer.pad_token_id, restrict)
            for rows in zip(*(own_share(x).split(args.local_rollout_forward_batch_size) for x in inputs))
        ]
    drawn = {name: torch.cat([part[name] for part in parts]) for name, x in parts[0].items() if x is not None}
    rollout = Rollout(prompts, prompt_mask, **{name: join_shares(x, len(prompts)) for name, x in drawn.items()})
    bad = ~rollout.logprobs.isfinite().all(1)
    i = bad.long().argmax()
    prompt = tokenizer.decode(prompts[i][prompt_mask[i]])
    cause = "either the model is broken, or it was broken by a --learning-rate that is too high"
    require(not bad.any(), f"the policy's logits are not finite (NaN or inf) after the prompt {prompt!r}: {cause}")
    return rollout.rows(torch.arange(len(prompts), device=prompts.device))


@torch.no_grad()
def by_chunks(function: Callable[[Rollout], Tensor], rollout: Rollout, args: Args) -> Tensor:
    """(B, T) what the function gives for the rollout, `micro_batch_size` rows at a time."""
    result = torch.zeros_like(rollout.logprobs)
    for index, r in rollout.chunks(args.micro_batch_size):
        with autocast(args, rollout.mask.device):
            result[index, : r.mask.shape[1]] = function(r)
    return rollout.join_chunks(result)


def rollout_logprobs(model: nn.Module, rollout: Rollout, args: Args) -> Tensor:
    """(B, T) log-probabilities of the responses under a model."""

    def logprobs(r: Rollout) -> Tensor:
        """Those of some rows."""
        return token_logprobs(response_logits(model, *r.text, args.temperature, r.allowed), r.responses)

    return by_chunks(logprobs, rollout, args)


def score_reference(rollout: Rollout, policy: nn.Module, reference: nn.Module, args: Args) -> None:
    """Of step 2 the part of the reference: fills in ref_logprobs and kl, (B, T) each."""

    def kl(r: Rollout) -> Tensor:
        """Over the whole vocabulary, of some rows."""
        logits = response_logits(policy, *r.text, args.temperature, r.allowed)  # (b, T, V)
        with adapter_off(policy, reference):
            return full_kl(logits, response_logits(reference, *r.text, args.temperature, r.allowed))

    with adapter_off(policy, reference):
        rollout.ref_logprobs = rollout_logprobs(reference, rollout, args)
    if args.kl_estimator == "full":
        rollout.kl = by_chunks(kl, rollout, args)
    else:
        rollout.kl = kl_estimate(rollout.logprobs, rollout.ref_logprobs, args.kl_estimator)


def response_values(policy: nn.Module, critic: Critic, r: Rollout) -> Tensor:
    """(b, T) values of the critic; those of a shared one from a pass of the policy."""
    if critic.body is not None:
        return critic(*r.text)
    output = policy(**join(*r.text), use_cache=False, logits_to_keep=1, output_hidden_states=True)
    return critic.read(output.hidden_states[-1], r.mask.shape[1])


def evaluate(
    policy: nn.Module, reference: nn.Module, score: Callable[[Rollout], Tensor], prompts: list[list[int]],
    tokenizer: AutoTokenizer, args: Args,
) -> dict[str, float]:  # fmt: skip
    """What a user of the policy would see: answers at low temperature to prompts that it is not trained on.

    Their KL is that at the temperature of training: of distributions sharpened to one token it would say little.
    """
    ids, mask = pad(prompts, tokenizer.pad_token_id, policy.device, left=True)
    with torch.random.fork_rng():  # training draws the same numbers whether or not it is interrupted here
        answers = replace(args, temperature=args.eval_temperature, response_length_min=None)
        rollout = sample_batch(policy, ids, mask.bool(), tokenizer, answers)
    rollout.logprobs = rollout_logprobs(policy, rollout, args)
    score_reference(rollout, policy, reference, args)
    scores = penalize_missing_eos(score(rollout), rollout.ended, args.missing_eos_penalty)
    stats = rollout_stats(rollout, scores, torch.zeros_like(rollout.kl))
    return {
        f"eval/{name.split('/')[1]}": stats[name]
        for name in ("objective/scores", "objective/kl", "val/eos_share", "val/response_length")
    }


def rollout_stats(rollout: Rollout, scores: Tensor, non_score_reward: Tensor) -> dict[str, float]:
    """The metrics that describe a batch before the update."""
    mask, per_row = rollout.mask, lambda x: x.masked_fill(~rollout.mask, 0.0).sum(1).mean().item()
    return {
        "objective/kl": per_row(rollout.kl),
        "objective/kl_k3": per_row(kl_estimate(rollout.logprobs, rollout.ref_logprobs, "k3")),
        "objective/entropy": per_row(-rollout.logprobs),
        "objective/non_score_reward": per_row(non_score_reward),
        "objective/rlhf_reward": scores.mean().item() + per_row(non_score_reward),
        "objective/scores": scores.mean().item(),
        "objective/scores_std": scores.std(correction=0).item(),
        "val/num_eos_tokens": rollout.ended.sum().item(),
        "val/eos_share": rollout.ended.float().mean().item(),
        "val/response_length": mask.sum(1).float().mean().item(),
    }


def explained_variance(rollout: Rollout) -> float:
    """1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for a constant one."""
    residual_var = masked_var(rollout.returns - rollout.values, rollout.mask)
    return 1 - (residual_var / masked_var(rollout.returns, rollout.mask).clamp(min=1e-8)).item()


# ---------------------------------------------------------------------------------------------------------------------
# Models


def load_policy(args: Args) -> tuple[nn.Module, AutoTokenizer]:
    """The policy in float32 and its tokenizer. Dropout stays off: rollout, scoring and loss see one distribution."""
    tokenizer = load_tokenizer(args.model, args.trust_remote_code)
    args.stop_token_id = find_stop_token(args, tokenizer)
    policy = load_weights(AutoModelForCausalLM, args.model, args)
    has_router = hasattr(policy.config, "output_router_logits")
    require(has_router or not args.aux_loss_coef, f"--aux-loss-coef {args.aux_loss_coef}: {args.model} has no router")
    if args.gradient_checkpointing:
        enable_checkpointing(policy)
    return policy.eval(), tokenizer


def router_options(args: Args) -> dict[str, bool]:
    """What to ask of a mixture-of-experts model so that its output holds aux_loss."""
    return {"output_router_logits": True} if args.aux_loss_coef else {}


def enable_checkpointing(model: nn.Module) -> None:
    """Gradient checkpointing works in transformers' training mode only; so that mode must not bring dropout back."""
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and ("drop" in name or isinstance(module, nn.Dropout)):
                setattr(module, name, 0.0)
    model.activation_checkpointing_enable({"use_reentrant": False})


def make_reference(policy: nn.Module, args: Args) -> nn.Module:
    """A frozen copy of the policy; with LoRA the policy itself, which then is given its adapter."""
    if not args.lora_r:
        return deepcopy(policy).requires_grad_(False)
    require(find_spec("peft"), f"--lora-r {args.lora_r} needs the package peft: pip install peft")
    from peft import LoraConfig

    config = LoraConfig(
        task_type="CAUSAL_LM", r=args.lora_r, lora_alpha=args.lora_alpha, target_modules=args.lora_target_modules,
        fan_in_fan_out=any(isinstance(m, Conv1D) for m in policy.modules()),  # GPT-2 keeps its weights transposed
    )  # fmt: skip
    try:
        policy.add_adapter(config)
    except ValueError as error:  # it knows no layers of this architecture, or finds none of those named
        raise UserError(f"--lora-target-modules {args.lora_target_modules}: {error}") from error
    return policy


@contextmanager
def adapter_off(policy: nn.Module, reference: nn.Module) -> Iterator[None]:
    """In here the reference is what it should be: with LoRA, the policy without its adapter."""
    if reference is policy:
        reshard(policy), policy.disable_adapters()  # which changes requires_grad, and that must be of the shards
    yield
    if reference is policy:
        reshard(policy), policy.enable_adapters()


def follow(average: nn.Module | None, policy: nn.Module, optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Makes a copy of the policy its moving average: each optimiser step, decay * itself + (1 - decay) * the policy."""
    if average is None:
        return

    @torch.no_grad()
    def step(*_) -> None:
        """One step of the average."""
        for mean, weight in zip(average.parameters(), policy.parameters()):
            mean.lerp_(weight, 1 - decay)

    optimizer.register_step_post_hook(step)


def find_stop_token(args: Args, tokenizer: AutoTokenizer) -> int | None:
    """The id of the stop token, or None where a response may only end at response_length."""
    if args.stop_token_id is not None or args.stop_token == "none":
        last = len(tokenizer) - 1
        in_range = args.stop_token_id is None or 0 <= args.stop_token_id <= last
        require(
            in_range, f"--stop-token-id {args.stop_token_id} is no token of {args.model}, whose ids are 0 to {last}"
        )
        return args.stop_token_id
    if args.stop_token == "eos":
        require(
            tokenizer.eos_token_id is not None,
            f"the tokenizer of {args.model} has no EOS token for --stop-token eos; name the token that ends a response "
            "with --stop-token TEXT or --stop-token-id N, or sample to full length with --stop-token none",
        )
        return tokenizer.eos_token_id
    ids = tokenizer.encode(args.stop_token, add_special_tokens=False)
    require(
        len(ids) == 1, f"--stop-token {args.stop_token!r} is {len(ids)} tokens {ids} of this tokenizer; it must be one"
    )
    return ids[0]


def load_reward_model(args: Args) -> tuple[nn.Module | None, AutoTokenizer | None]:
    """The reward model, frozen, and its tokenizer; (None, None) where a function gives the reward."""
    if args.reward_fn is not None:
        return None, None
    model = load_weights(AutoModelForSequenceClassification, args.reward_model, args)
    labels = list(model.config.id2label.values())
    require(
        args.reward_label in labels or (len(labels) == 1 and args.reward_label is None),
        f"the reward model {args.reward_model} has the labels {', '.join(map(str, labels))}; choose with "
        "--reward-label the one whose logit is the reward",
    )
    return model.eval().requires_grad_(False), load_tokenizer(args.reward_model, args.trust_remote_code)


def make_critic(
    args: Args, policy: nn.Module, tokenizer: AutoTokenizer, reward_model: nn.Module | None,
    reward_tokenizer: AutoTokenizer | None,
) -> Critic:  # fmt: skip
    """A copy of the reward model where it reads the policy's tokens (N+ details), else of the policy; then V is 0.

    With --critic shared a head on the policy's own trunk, V = 0.
    """
    has_one_head = hasattr(reward_model, "score") and reward_model.config.num_labels == 1
    if args.critic == "separate" and has_one_head and same_tokens(tokenizer, reward_tokenizer):
        print("critic: starts from the reward model")
        body, head = deepcopy(reward_model.base_model), deepcopy(reward_model.score)
        if head.bias is None:  # as in transformers' classifiers
            head.bias = nn.Parameter(torch.tensor([getattr(reward_model.config, "reward_bias", 0.0)]))
        critic = Critic(body, head).requires_grad_(True)
    else:
        why = "since there is no reward model of one label that reads the same tokens"
        shared = args.critic == "shared"
        print("critic: a value head on the policy's trunk" if shared else f"critic: starts from the policy, {why}")
        head = nn.Linear(policy.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(head.weight), nn.init.zeros_(head.bias)
        critic = Critic(None if shared else deepcopy(policy.base_model), head)
    if args.gradient_checkpointing and args.critic == "separate":
        enable_checkpointing(critic.body)
    return critic


def make_optimizer(args: Args, policy: nn.Module, critic: Critic) -> torch.optim.Optimizer:
    """AdamW with two groups of parameters: the policy's and the critic's."""
    groups = [
        {"params": [p for p in policy.parameters() if p.requires_grad]},
        {"params": list(critic.parameters()), "lr": args.critic_learning_rate or args.learning_rate},
    ]
    return torch.optim.AdamW(
        groups, args.learning_rate, args.adam_betas, args.adam_epsilon, args.weight_decay, fused=True
    )  # fused: ten times as fast on a CPU


def same_tokens(a: AutoTokenizer, b: AutoTokenizer) -> bool:
    """Whether two tokenizers give the same ids to the same texts, as far as their vocabularies tell."""
    return a.get_vocab() == b.get_vocab() and a.eos_token_id == b.eos_token_id


def make_scorer(
    reward_fn: str | None, tokenizer: AutoTokenizer, args: Args, reward_model: nn.Module | None = None,
    reward_tokenizer: AutoTokenizer | None = None,
) -> Callable[[Rollout], Tensor]:  # fmt: skip
    """The function from a rollout to its scores (B,): `reward_fn` on its texts, else the reward model on its tokens."""
    if reward_fn is not None:
        function = load_function(reward_fn)
        if args.reward_timeout:
            function = partial(within, args.reward_timeout, function)
        call_reward_function(function, ["A first text.", "And a second one."])  # a wrong function fails now, not later

        def score_texts(rollout: Rollout) -> Tensor:
            """(B,) rewards of the function, to which each process shows its share of the texts."""
            B, device = len(rollout.mask), rollout.mask.device
            texts = decode(rollout.rows(own_share(torch.arange(B, device=device))), tokenizer)
            return join_shares(call_reward_function(function, texts).to(device), B)

        return score_texts
    label = list(reward_model.config.id2label.values()).index(args.reward_label) if args.reward_label else 0
    reads_our_tokens = same_tokens(tokenizer, reward_tokenizer)

    @torch.no_grad()
    def score(rollout: Rollout) -> Tensor:
        """(B,) rewards of the reward model."""
        scores = rollout.logprobs.new_zeros(len(rollout.mask))
        for index, r in rollout.chunks(args.micro_batch_size):
            if reads_our_tokens:
                inputs = join(*r.text)
                ids, mask = inputs["input_ids"], inputs["attention_mask"]
            else:
                ids, mask = encode_texts(decode(r, tokenizer), r.ended, reward_tokenizer, reward_model)
            with autocast(args, ids.device):
                scores[index] = read_reward(reward_model, ids, mask)[:, label]
        return check_scores(rollout.join_chunks(scores), decode(rollout, tokenizer), "the reward model")

    return score


def encode_texts(texts: list[str], ended: Tensor, tokenizer: AutoTokenizer, model: nn.Module) -> tuple[Tensor, Tensor]:
    """Texts in the reward model's own tokens, (B, S) with their mask; a response that ended gets that model's EOS."""
    rows = tokenizer(texts)["input_ids"]
    if tokenizer.eos_token_id is not None and hasattr(model, "score"):
        rows = [row + [tokenizer.eos_token_id] * stop for row, stop in zip(rows, ended.tolist())]
    limit = context_length(model)
    return pad([row[-limit:] for row in rows], tokenizer.pad_token_id, model.device)


def decode(rollout: Rollout, tokenizer: AutoTokenizer) -> list[str]:
    """Prompt and response of each row as one text, without padding and special tokens."""
    ids, mask = torch.cat([rollout.prompts, rollout.responses], 1), torch.cat([rollout.prompt_mask, rollout.mask], 1)
    return [tokenizer.decode(row[real], skip_special_tokens=True) for row, real in zip(ids, mask)]


def within(seconds: float, function: Callable, *inputs):
    """What the function gives; raises TimeoutError if it takes longer than so many seconds."""
    result = Future()

    def run() -> None:
        """Calls the function."""
        try:
            result.set_result(function(*inputs))
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)  # daemon: a function that hangs does not keep the process alive
    thread.start(), thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"it took longer than --reward-timeout {seconds:g} s")
    return result.result()


def call_reward_function(reward_fn: Callable[[list[str]], list[float]], texts: list[str]) -> Tensor:
    """(B,) scores of texts; raises UserError for a wrong number of scores or one that is not finite."""
    try:
        scores = [float(x) for x in reward_fn(texts)]
    except Exception as error:  # somebody else's code: whatever goes wrong in it, say what
        raise UserError(f"the reward function failed: {type(error).__name__}: {error}") from error
    require(
        len(scores) == len(texts),
        f"the reward function gave {len(scores)} scores for {len(texts)} texts, not one a text",
    )
    return check_scores(torch.tensor(scores), texts, "the reward function")


def check_scores(scores: Tensor, texts: list[str], source: str) -> Tensor:
    """The scores (B,) themselves; raises UserError with the text for one that is NaN or infinite."""
    bad = int(scores.isfinite().long().argmin())
    require(scores.isfinite().all(), f"{source} gave {scores[bad].item()} for the text {texts[bad]!r}")
    return scores


# ---------------------------------------------------------------------------------------------------------------------
# Data


def load_prompts(args: Args, tokenizer: AutoTokenizer, policy: nn.Module) -> tuple[list[list[int]], list[list[int]]]:
    """The prompts to train on and those to evaluate on, as token ids."""
    train = load_split(args.dataset, args.dataset_config, args.dataset_train_split)
    test = load_test_split(args)
    prompts = encode_prompts(train, args, tokenizer, policy)
    return prompts, encode_prompts(test, args, tokenizer, policy)[: args.num_eval_prompts] if test else []


def encode_prompts(data, args: Args, tokenizer: AutoTokenizer, policy: nn.Module) -> list[list[int]]:
    """Token ids of a split's prompts; those over max_prompt_length, and empty ones, are dropped and counted."""
    rows = read_column(data, args.prompt_column, args.dataset, "--prompt-column", (str, list))
    prompts = [encode_prompt(row, tokenizer) for row in tqdm(rows, desc="encoding prompts", leave=False)]
    kept = [p for p in prompts if 0 < len(p) <= args.max_prompt_length]
    reason = f"empty, or over --max-prompt-length {args.max_prompt_length} tokens"
    require(kept, f"all {len(prompts)} prompts are {reason}")
    if len(kept) < len(prompts):
        print(f"dropped {len(prompts) - len(kept)} of {len(prompts)} prompts: {reason}")
    longest, limit = max(map(len, kept)), context_length(policy)
    require(
        longest + args.response_length <= limit,
        f"the longest prompt ({longest} tokens) and --response-length {args.response_length} make "
        f"{longest + args.response_length} tokens, but {args.model} has a context of {limit}; lower "
        "--response-length, or drop long prompts with --max-prompt-length",
    )
    return kept


def encode_prompt(prompt: str | list[dict], tokenizer: AutoTokenizer) -> list[int]:  # same in all scripts
    """Token ids of a text, or of a conversation up to where the assistant is to speak."""
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    return apply_template(prompt, tokenizer, add_generation_prompt=True)


def apply_template(messages: list[dict], tokenizer: AutoTokenizer, **options) -> list[int]:  # same in all scripts
    """Token ids of a conversation through the tokenizer's chat template."""
    require(tokenizer.chat_template, "the dataset holds messages, but the tokenizer has no chat template")
    try:
        return tokenizer.apply_chat_template(messages, return_dict=False, **options)
    except Exception as error:  # a template is a program of somebody else's
        raise UserError(f"the tokenizer's chat template refuses {messages!r}: {error}") from error


def load_pretrain_texts(
    args: Args, queue: list[int], tokenizer: AutoTokenizer, policy: nn.Module
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless batches of texts with their EOS for PPO-ptx, of the size and length of a micro-batch of rollouts."""
    data = load_split(args.pretrain_data, None, "train")
    limit = min(args.max_prompt_length + args.response_length, context_length(policy))
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    texts = read_column(data, "text", args.pretrain_data, "--pretrain-data")
    rows = [(encode_prompt(text, tokenizer) + end)[:limit] for text in texts if text]
    return batches(rows, queue, args.per_device_train_batch_size * num_processes(), tokenizer, policy.device)


def batches(
    rows: list[list[int]], queue: list[int], batch_size: int, tokenizer: AutoTokenizer, device: torch.device,
    left: bool = False,
) -> Iterator[tuple[Tensor, Tensor]]:  # fmt: skip
    """Endless batches (B, S) of token lists and their mask; each pass over the rows is in a new random order.

    `queue` holds the rows that this pass has yet to give. It is the caller's, so that a checkpoint can hold it.
    """
    while True:
        while len(queue) < batch_size:
            queue += torch.randperm(len(rows)).tolist()
        batch, queue[:] = queue[:batch_size], queue[batch_size:]
        ids, mask = pad([rows[i] for i in batch], tokenizer.pad_token_id, device, left)
        yield ids, mask.bool()


# ---------------------------------------------------------------------------------------------------------------------
# Plumbing: settings that depend on the machine and the model


def check_args(args: Args) -> None:
    """Numbers that no run can have."""
    check_numbers(
        args,
        positive="response_length temperature per_device_train_batch_size gradient_accumulation_steps num_mini_batches "
        "batch_size local_rollout_forward_batch_size micro_batch_size total_episodes num_train_epochs learning_rate "
        "critic_learning_rate max_grad_norm num_ppo_epochs cliprange cliprange_value kl_target kl_horizon "
        "max_prompt_length response_length_min score_clip ratio_threshold target_kl eval_steps num_eval_prompts "
        "eval_temperature lora_alpha adam_epsilon top_p reward_timeout save_steps "
        "save_total_limit",
        natural="min_new_tokens top_k lora_r critic_warmup_updates weight_decay ptx_coef aux_loss_coef vf_coef",
        shares="gamma lam warmup_ratio top_p ema_decay",
    )
    check_combinations(args)
    is_whole = args.use_score_scaling or not args.use_score_norm
    require(is_whole, "--use-score-norm shifts scores before --use-score-scaling divides them; give both")


def check_combinations(args: Args) -> None:
    """Settings that make sense only together."""
    T, shortest, least = args.response_length, args.response_length_min or args.response_length, args.min_new_tokens
    require(shortest <= T, f"--response-length-min {shortest} is above --response-length {T}")
    no_room = f"--min-new-tokens {least} leaves no room for a stop token in responses of {shortest} tokens"
    require(least < shortest, no_room)
    data, coef = args.pretrain_data, args.ptx_coef
    both = f"--ptx-coef {coef} and --pretrain-data {data}: give both (a weight of 27.8 in InstructGPT), or neither"
    require(bool(data) == bool(coef), both)
    penalty, has_stop = args.missing_eos_penalty, args.stop_token != "none" or args.stop_token_id is not None
    require(
        has_stop or not penalty, f"--missing-eos-penalty {penalty} would meet every response with --stop-token none"
    )


def default_learning_rate(num_parameters: int) -> float:
    """1e-5 for a model of GPT-2's size, higher for smaller ones, never below 3e-6 (the N+ details' rate from 1B up)."""
    return max(3e-6, 1e-5 * (124e6 / num_parameters) ** 0.6)


def set_defaults(args: Args, policy: nn.Module, num_prompts: int) -> int:
    """Fills in what depends on model and machine, checks that the batch sizes fit; returns the number of updates."""
    size = policy.num_parameters()
    args.learning_rate = args.learning_rate or default_learning_rate(size) * (10 if args.lora_r else 1)
    parts = args.num_mini_batches * args.gradient_accumulation_steps * num_processes()
    if args.batch_size is not None:
        below = args.batch_size // parts * parts
        require(
            below == args.batch_size,
            f"--batch-size {args.batch_size} does not divide into {args.num_mini_batches} mini-batches of "
            f"{args.gradient_accumulation_steps} micro-batches on {num_processes()} processes; the nearest that do: "
            f"{', '.join(str(n) for n in (below, below + parts) if n)}",
        )
        given, args.per_device_train_batch_size = args.per_device_train_batch_size, args.batch_size // parts
        other = f"--batch-size {args.batch_size} makes --per-device-train-batch-size {args.per_device_train_batch_size}"
        require(given in (None, args.per_device_train_batch_size), f"{other}, not {given}; give one of them")
    if args.per_device_train_batch_size is None:
        args.per_device_train_batch_size = 8 if policy.device.type == "cpu" and size > 30e6 else 64
    args.batch_size = args.per_device_train_batch_size * parts
    if args.micro_batch_size is None:
        logits_mb = args.response_length * policy.config.get_text_config().vocab_size * 4 / 2**20  # of one row
        fits_cpu = max(1, int(min(16, max(4, 16 / logits_mb), 64 / logits_mb)))  # a compromise of speed and memory
        args.micro_batch_size = fits_cpu if policy.device.type == "cpu" else args.per_device_train_batch_size
    if args.total_episodes is None:
        epochs = args.num_train_epochs
        args.total_episodes = 2048 if epochs is None else max(args.batch_size, round(epochs * num_prompts))
    require(
        args.total_episodes >= args.batch_size,
        f"--total-episodes {args.total_episodes} is less than one batch of {args.batch_size} episodes; raise it, or "
        "lower --batch-size or --per-device-train-batch-size",
    )
    return args.total_episodes // args.batch_size


def describe_run(args: Args, num_updates: int, policy: nn.Module, *others: nn.Module) -> None:
    """Prints the batch geometry in words, and on a CPU how long training the policy and the others will take."""
    print(f"policy: {args.model}, {policy.num_parameters() / 1e6:.2f}M parameters on {policy.device}, "
          f"learning rate {args.learning_rate:.2g}")  # fmt: skip
    print(f"batch: {args.batch_size} responses an update, {args.num_ppo_epochs} epochs x {args.num_mini_batches} "
          f"mini-batches, {args.micro_batch_size} rows at a time; "
          f"{num_updates} updates = {num_updates * args.batch_size} episodes")  # fmt: skip
    print(f"output: {args.output_dir}")
    if policy.device.type == "cpu":
        tokens = args.response_length + 16
        passes = 3 + 3 * args.num_ppo_epochs  # sample, reference, reward or critic; forward and backward of each epoch
        weights = {p: p.numel() for model in (policy, *others) for p in model.parameters()}
        flops = 2 * tokens * passes * sum(weights.values())
        seconds = args.batch_size * flops / (0.7 * matmul_flops_per_second())  # 70 % of the peak, as measured on GPT-2
        print(f"on this CPU an update takes about {seconds:.0f} s, the run {seconds * num_updates / 60:.1f} min")


def matmul_flops_per_second() -> float:
    """Arithmetic rate of float32 matrix products on this CPU, from a product that takes some milliseconds."""
    a = torch.randn(768, 768)
    a @ a
    start = time.perf_counter()
    for _ in range(5):
        a @ a
    return 5 * 2 * 768**3 / (time.perf_counter() - start)


# ---------------------------------------------------------------------------------------------------------------------
# Plumbing: metrics, tables, curves, the model card

METRICS = {
    "eps": "episodes per second since the start",
    "episode": "episodes so far",
    "lr": "learning rate of the policy",
    "objective/kl": "KL to the reference by --kl-estimator, summed over a response, mean over responses",
    "objective/kl_k3": "the same by the estimator k3, which is never negative",
    "objective/kl_coef": "weight of the KL penalty in this update",
    "objective/entropy": "-logprobs summed over a response, mean over responses",
    "objective/non_score_reward": "-kl_coef * objective/kl",
    "objective/rlhf_reward": "objective/scores + objective/non_score_reward",
    "objective/scores": "mean score, after the EOS penalty",
    "objective/scores_std": "standard deviation of the scores in the batch",
    "objective/gold_scores": "mean of --gold-reward-fn, never trained on (only when it is given)",
    "policy/approxkl_avg": "half the squared log-ratio of new to old policy, mean over tokens and steps",
    "policy/clipfrac_avg": "share of tokens where clipping decides the policy loss",
    "policy/entropy_avg": "entropy of the policy's distribution, mean over tokens and steps",
    "policy/grad_norm": "norm of the policy's gradient before clipping, mean over steps",
    "loss/policy_avg": "clipped policy loss, mean over tokens and steps",
    "loss/value_avg": "clipped value loss (with its 1/2, without vf_coef), mean over tokens and steps",
    "val/clipfrac_avg": "share of tokens where clipping decides the value loss",
    "val/ratio": "pi / pi_old, mean over tokens and steps",
    "val/ratio_var": "variance of pi / pi_old over tokens and steps",
    "val/skipped_steps": "optimiser steps left out: --ratio-threshold, --target-kl, a gradient that is NaN or infinite",
    "val/explained_variance": "1 - Var(returns - values) / Var(returns) before the update",
    "val/grad_norm": "norm of the critic's gradient before clipping, mean over steps",
    "val/num_eos_tokens": "responses in the batch that contain the stop token",
    "val/eos_share": "the same as a share of the batch",
    "val/response_length": "tokens in a response with its stop token, mean",
    "loss/ptx": "language-modelling loss on --pretrain-data, mean over steps (only with PPO-ptx)",
    "eval/scores": "mean score of answers to held-out prompts at --eval-temperature",
    "eval/kl": "their KL at the temperature of training, summed over an answer, mean over answers",
    "eval/eos_share": "share of them that end with the stop token",
    "eval/response_length": "tokens in them, mean",
    "time/rollout": "seconds of this update spent sampling",
    "time/score": "seconds of this update spent on reference, critic and reward",
    "time/update": "seconds of this update spent on the gradient steps",
    "perf/tokens_per_second": "response tokens of this update / its seconds",
    "perf/peak_memory_mb": "peak memory so far: of the GPU on CUDA, else of the process",
}

MEMORY_ADVICE = {
    "rollout": "lower --local-rollout-forward-batch-size or --response-length",
    "score": "lower --micro-batch-size",
    "update": "lower --micro-batch-size, or add --gradient-checkpointing, --bf16 or --critic shared",
    "run": "the models do not fit; take --critic shared, --lora-r 16, or more GPUs with --zero-stage 3",
}


class RolloutLog:
    """What a run shows and leaves behind: metrics.jsonl, progress bar, tables, warnings, W&B, curves, the model."""

    def __init__(self, args: Args, num_updates: int):
        self.args, self.num_updates, self.start = args, num_updates, time.perf_counter()
        self.seconds, self.metrics, self.warned, self.broken = {}, {}, set(), 0
        self.file, self.wandb = open_metrics(args), start_wandb(args)
        self.bar = tqdm(total=num_updates, unit="update", dynamic_ncols=True)

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Takes the seconds of a phase of this update."""
        start = time.perf_counter()
        with memory_for(phase):
            yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase] = time.perf_counter() - start

    def write(self, update: int, stats: dict, rollout: Rollout, scores: Tensor, tokenizer: AutoTokenizer) -> None:
        """Ends an update: one line of metrics.jsonl, the bar, W&B, a table now and then."""
        episode = update * self.args.batch_size
        stats |= {f"time/{phase}": seconds for phase, seconds in self.seconds.items()}
        stats |= {"episode": episode, "eps": episode / (time.perf_counter() - self.start)}
        stats["perf/tokens_per_second"] = rollout.mask.sum().item() / sum(self.seconds.values())
        stats["perf/peak_memory_mb"] = peak_memory_mb()
        self.metrics = {name: stats[name] for name in METRICS if name in stats}
        self.file.write(json.dumps(self.metrics) + "\n")
        self.file.flush()
        if self.wandb:
            self.wandb.log(self.metrics, step=update)
        self.bar.set_postfix_str(f"score {stats['objective/scores']:.2f}, kl {stats['objective/kl']:.2f}")
        self.bar.update()
        self.broken = count_broken(self.broken, not math.isfinite(stats.get("policy/grad_norm", 0.0)))
        self.warn_about(stats, rollout)
        shows = self.args.num_sample_generations
        if is_turn(update, self.num_updates, shows) or (update == 1 and shows):
            self.show_samples(update, rollout, scores, tokenizer)

    def state_dict(self) -> dict:
        """What a checkpoint keeps of it."""
        return {"seconds": time.perf_counter() - self.start, "metrics": self.metrics}

    def load_state_dict(self, state: dict) -> None:
        """Takes that up again."""
        self.start, self.metrics = time.perf_counter() - state["seconds"], state["metrics"]

    def warn_about(self, stats: dict, rollout: Rollout) -> None:
        """What a library leaves to its users to notice; each warning is given once, in one sentence."""
        k1 = (rollout.logprobs - rollout.ref_logprobs).masked_fill(~rollout.mask, 0.0).sum(1)  # (B,)
        standard_error = k1.std() / len(k1) ** 0.5
        signs = {
            "the KL to the reference is clearly negative, which no true KL is: sampling and scoring probably use "
            "different distributions (temperature, top-k, dropout, padding).": k1.mean() < -0.1 - 3 * standard_error,
            "no response ends with the stop token: raise --response-length, set --missing-eos-penalty, or check that "
            "the policy was taught to end its texts.": self.args.stop_token_id is not None
            and stats["val/eos_share"] == 0,
            "all scores of the batch are equal, so there is nothing to learn from: look at the reward.": stats[
                "objective/scores_std"] < 1e-6,
        }  # fmt: skip
        for sentence, holds in signs.items():
            if holds and sentence not in self.warned:
                self.warned.add(sentence)
                self.bar.write(f"warning: {sentence}", file=sys.stderr)

    def show_samples(self, update: int, rollout: Rollout, scores: Tensor, tokenizer: AutoTokenizer) -> None:
        """A table of four prompts, responses and scores."""
        rows = []
        for i in range(min(4, len(scores))):
            prompt = tokenizer.decode(rollout.prompts[i][rollout.prompt_mask[i]], skip_special_tokens=True)
            response = tokenizer.decode(rollout.responses[i][rollout.mask[i]], skip_special_tokens=False)
            rows.append([prompt, response, f"{scores[i].item():.2f}"])
        with self.bar.external_write_mode():
            print_table(f"update {update} of {self.num_updates}", ["prompt", "response", "score"], rows)

    def finish(self, policy: nn.Module, tokenizer: AutoTokenizer, ema: nn.Module | None) -> None:
        """Closes the files and, unless not one update was made, saves the policy with its card and draws the curves.

        Not so when one of many processes has failed: the others cannot put the policy together without it.
        """
        self.bar.close()
        self.file.close()
        if self.metrics and can_gather():
            save_model(policy, tokenizer, self.args, self.metrics)
            save_variants(tokenizer, ema, self.args)
            draw_curves(
                Path(self.args.output_dir), "episode",
                [["objective/scores", "objective/gold_scores", "eval/scores"],
                 ["objective/kl", "objective/kl_k3"], ["val/eos_share"]],
            )  # fmt: skip
        if self.wandb:
            self.wandb.finish()


def save_variants(tokenizer: AutoTokenizer, ema: nn.Module | None, args: Args) -> None:
    """Beside the policy: its moving average in ema/; and where the policy is an adapter, the whole model in merged/."""
    output, weights = Path(args.output_dir), None if ema is None else whole_weights(ema)
    if process_index():
        return
    if ema is not None:
        ema.save_pretrained(output / "ema", state_dict=weights), tokenizer.save_pretrained(output / "ema")
    if args.lora_r:
        from peft import PeftModel

        merged = PeftModel.from_pretrained(load_weights(AutoModelForCausalLM, args.model, args), output)
        merged.merge_and_unload().save_pretrained(output / "merged"), tokenizer.save_pretrained(output / "merged")


# ---------------------------------------------------------------------------------------------------------------------
# Plumbing: checkpoints

HARMLESS = {  # settings that a resumed run may change: how much is shown and saved, and how long it goes on
    "output_dir", "exp_name", "resume", "device", "track", "wandb_project_name", "wandb_entity", "trust_remote_code",
    "num_sample_generations", "save_steps", "save_total_limit", "eval_steps", "total_episodes", "num_train_epochs",
    "zero_stage", "shard_size", "offload", "gather_for_rollout",
}  # fmt: skip


class Interrupted(Exception):  # same in all scripts
    """A signal asked the run to stop, and it has stopped between two steps."""


class Checkpoints:  # same in all scripts
    """Writes all that a run consists of to checkpoints/ now and then, and when a signal asks it to stop; reads it back.

    A part is a module, an optimiser or a schedule, a list, or an object that is its attributes. Beside the parts a
    checkpoint holds the random state and the length of metrics.jsonl, to which the file is cut when the run goes on.
    A resumed run is, bit for bit on a CPU, the one that was never interrupted. Of many processes the first writes what
    all have put together; each reads it, from a folder that they share, and keeps its shards.
    """

    def __init__(self, args: Args, log, **parts):
        self.args, self.log, self.step, self.signal = args, log, 0, None
        self.parts = {name: part for name, part in (parts | {"log": log}).items() if part is not None}
        self.folder = Path(args.output_dir) / "checkpoints"
        if args.resume:
            self.restore()

    def steps(self, num_steps: int) -> Iterator[int]:
        """The numbers of the steps that are left. Ctrl-C and SIGTERM end the run after the step that it is in."""
        if self.step >= num_steps:  # it may have been killed while it saved its model, which happens now
            print(
                f"the run in {self.args.output_dir} has made all its {num_steps} steps; ask for more of them to go on"
            )
            return
        before = {number: signal.signal(number, self.stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for step in range(self.step + 1, num_steps + 1):
                yield step
                is_asked = bool(add_up(torch.tensor(int(self.signal is not None))))  # in one process, so in all
                if step % self.args.save_steps == 0 or step == num_steps or is_asked:
                    self.save(step)
                if is_asked and step < num_steps:
                    name = self.signal.name if self.signal else "a signal to another process"
                    raise Interrupted(f"stopped by {name} after step {step} of {num_steps}")
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def stop(self, number: int, frame) -> None:
        """The handler. A second signal does not wait for the end of the step; but torchrun passes each one on twice."""
        if self.signal and num_processes() == 1:
            raise KeyboardInterrupt
        if not self.signal:
            self.signal = signal.Signals(number)
            print(f"\n{self.signal.name}: the run ends after this step; once more ends it at once", file=sys.stderr)

    def save(self, step: int) -> None:
        """Writes a checkpoint beside the others and renames it into place, so that none is ever half written."""
        state = {"step": step, "metrics_bytes": self.log.file.tell(), "python_random": random.getstate()}
        for name, random_state in self.random_states().items():
            state[name] = join_shares(random_state[None], num_processes())  # of every process
        for name, part in self.parts.items():
            state[name] = whole(part.state_dict() if hasattr(part, "state_dict") else getattr(part, "__dict__", part))
        if process_index():
            return
        self.log.file.flush(), os.fsync(self.log.file.fileno())
        temporary = self.folder / "unfinished"
        try:
            self.folder.mkdir(exist_ok=True)
            with open(temporary, "wb") as file:
                torch.save(state, file)
                file.flush(), os.fsync(file.fileno())
            temporary.replace(self.folder / f"step-{step:08d}.pt")
        except (OSError, RuntimeError) as error:  # a disk that is full, a folder that is gone: the run itself goes on
            temporary.unlink(missing_ok=True)
            reason = getattr(error, "strerror", None) or f"is the disk full? {str(error).strip().splitlines()[0]}"
            print(f"warning: the checkpoint after step {step} was not written: {reason}", file=sys.stderr)
        for file in sorted(self.folder.glob("step-*.pt"))[: -self.args.save_total_limit]:
            file.unlink()

    def random_states(self) -> dict[str, Tensor]:
        """Those of torch in this process, as bytes."""
        states = {"torch_random": torch.get_rng_state()}
        return states | ({"cuda_random": torch.cuda.get_rng_state()} if torch.cuda.is_initialized() else {})

    def restore(self) -> None:
        """Brings every part back to the newest checkpoint that can be read, or to the one that --resume names."""
        path, state = Path(self.args.resume), None
        for file in [path] if path.is_file() else sorted(self.folder.glob("step-*.pt"), reverse=True):
            try:
                state = torch.load(file, map_location="cpu", weights_only=True)
                break
            except Exception as error:  # whatever a damaged file makes of it
                print(f"warning: {file} cannot be read ({type(error).__name__}: it is damaged)", file=sys.stderr)
        require(state, f"--resume {path}: there is no checkpoint that can be read; start the run anew")
        metrics = Path(self.args.output_dir) / "metrics.jsonl"
        is_whole = metrics.stat().st_size >= state["metrics_bytes"]
        require(is_whole, f"{metrics} is shorter than when {file.name} was written; the run cannot go on without it")
        if process_index() == 0:
            self.log.file.truncate(state["metrics_bytes"])
        for name, part in self.parts.items():
            if hasattr(part, "load_state_dict"):
                part.load_state_dict(cut(state[name], part))
            elif isinstance(part, list):
                part[:] = state[name]
            else:
                vars(part).update(state[name])
        random.setstate(state["python_random"])
        torch.set_rng_state(
            state["torch_random"][process_index()].clone()
        )  # of a row that is a view torch 2.13 crashes
        if "cuda_random" in state and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(state["cuda_random"][process_index()].clone())
        self.step = state["step"]
        self.log.bar.n = self.log.bar.initial = self.step
        print(f"goes on after step {self.step}, from {file}")


def read_command_line() -> Args:  # same in all scripts
    """The settings. With --resume, those that are not given are the ones of that run, and few may differ from them."""
    description, words = __doc__.splitlines()[0], " ".join(sys.argv[1:]).replace("=", " ").split()
    resume = next((b for a, b in zip(words, words[1:]) if a in ("--resume", "--resume-from-checkpoint")), None)
    if resume is None:
        return tyro.cli(Args, description=description)
    path = Path(resume)
    folder = path.parent.parent if path.is_file() else path
    require((folder / "args.json").exists(), f"--resume {resume}: that is no run's folder, nor a checkpoint in one")
    values = json.loads((folder / "args.json").read_text())
    made_by = values.pop("num_processes", 1)
    is_same = made_by == num_processes()
    require(
        is_same, f"--resume {resume}: that run has {made_by} process(es); go on with as many, not {num_processes()}"
    )
    unknown = ", ".join(values.keys() ^ {f.name for f in fields(Args)})
    require(not unknown, f"--resume {resume}: that run was made by another version of this script, which differs in "
            f"the settings {unknown}")  # fmt: skip
    before = Args(**{name: tuple(x) if isinstance(x, list) else x for name, x in values.items()})
    args = tyro.cli(Args, description=description, default=before)
    for name, value in asdict(before).items():
        same = name in HARMLESS or getattr(args, name) == value
        require(same, f"--{name.replace('_', '-')} {getattr(args, name)} is not what the run in {folder} was made "
                f"with, {value}; leave it out, or start a new run")  # fmt: skip
    args.output_dir = str(folder)
    return args


# ---------------------------------------------------------------------------------------------------------------------
# Plumbing: many processes (torchrun). All read the same data; of every batch, each computes its share of the rows


def process_index() -> int:  # same in all scripts
    """Number of this process. The first, 0, which may be the only one, is the one that prints, logs and writes."""
    return int(os.environ.get("RANK", 0))


def num_processes() -> int:  # same in all scripts
    """How many processes share the work."""
    return int(os.environ.get("WORLD_SIZE", 1))


def own_rows(n: int) -> Tensor:  # same in all scripts
    """Numbers of those of n rows that this process computes, (m,): every num_processes()-th.

    m is the same everywhere: passes over sharded weights must be equally many, or a process would wait for ever for
    another. Where n does not divide, some numbers are beyond n; they stand for rows from the beginning, once more.
    """
    return torch.arange(process_index(), -(-n // num_processes()) * num_processes(), num_processes())


def own_share(x: Tensor) -> Tensor:  # same in all scripts
    """(m, ...) the rows of x (n, ...) that this process computes."""
    return x[own_rows(len(x)).to(x.device) % len(x)]


def join_shares(x: Tensor, n: int) -> Tensor:  # same in all scripts
    """(n, ...) rows put together from the shares x (m, ...) of all processes: the inverse of own_share."""
    if num_processes() == 1:
        return x
    x = x.contiguous()
    shares = [torch.empty_like(x) for _ in range(num_processes())]
    dist.all_gather(shares, x)
    return torch.stack(shares, 1).flatten(0, 1)[:n]


def add_up(x: Tensor) -> Tensor:  # same in all scripts
    """The sum of x over all processes."""
    if num_processes() > 1:
        dist.all_reduce(x)
    return x


def from_first(x: Tensor) -> Tensor:  # same in all scripts
    """x of the first process."""
    if num_processes() > 1:
        dist.broadcast(x, 0)
    return x


def place(args: Args, device: torch.device, *models: nn.Module | None) -> None:  # same in all scripts
    """Moves models to the device, whole or as shards; models without gradients are sharded by stage 3 alone."""
    for model in models:
        if model is None or hasattr(model, "unshard"):  # a policy that is its own reference comes twice
            continue
        is_trained = any(p.requires_grad for p in model.parameters())
        if args.zero_stage == 3 or (args.zero_stage == 2 and is_trained):
            shard(model, args, device)
        else:
            model.to(device)


def shard(model: nn.Module, args: Args, device: torch.device) -> None:  # same in all scripts
    """Spreads a model over the processes with torch's FSDP2, moving it there a layer at a time.

    Its weights are gathered layer by layer when they are needed, and with stage 2 kept until the backward pass; the
    gradient of a shard becomes the mean over processes.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    size = args.shard_size or num_processes()
    mesh = init_device_mesh(device.type, (num_processes() // size, size), mesh_dim_names=("replicate", "shard"))
    options = {
        "mesh": mesh["shard"] if size == num_processes() else mesh, "reshard_after_forward": args.zero_stage == 3,
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda") if args.offload else OffloadPolicy(),
    }  # fmt: skip
    layers = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or []}
    for module in [module for module in model.modules() if type(module).__name__ in layers]:
        fully_shard(module, **options)
    for root in [model.base_model, model.score] if hasattr(model, "score") else [model]:  # what read_reward calls
        fully_shard(root, **options)


@contextmanager
def gathered(model: nn.Module, stage: int, is_asked: bool = True) -> Iterator[None]:  # same in all scripts
    """In here each process has the whole of a sharded model: its weights travel once, and not for each token."""
    parts = [module for module in model.modules() if hasattr(module, "unshard") and is_asked]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False), part.unshard()
    yield
    for part in parts:
        part.set_reshard_after_forward(stage == 3, recurse=False), part.reshard()


def reshard(model: nn.Module) -> None:  # same in all scripts
    """Lets go of what is gathered of a sharded model: its parameters are the shards again, and can be changed."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()


def unsharded(x: Tensor) -> Tensor:  # same in all scripts
    """x, put together from the shards of all processes if it is one."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def sharded_like(x: Tensor, shard: Tensor) -> Tensor:  # same in all scripts
    """x, of which all processes have the whole, sharded as that tensor is, if it is and has its shape."""
    if not hasattr(shard, "full_tensor") or x.shape != shard.shape:
        return x
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(x.to(shard.device), shard.device_mesh, shard.placements, src_data_rank=None)


def clip_gradient(parameters: Iterable[Tensor], max_norm: float) -> Tensor:  # same in all scripts
    """Scales the gradient, sharded or not, down to a norm of max_norm; returns the norm that it had.

    Where each process has its own whole gradient, it becomes their mean before, as those of shards are already.
    """
    parameters = [p for p in parameters if p.grad is not None]
    if num_processes() > 1 and not hasattr(parameters[0], "full_tensor"):
        for work in [dist.all_reduce(p.grad, async_op=True) for p in parameters]:
            work.wait()
        torch._foreach_div_([p.grad for p in parameters], num_processes())
    return unsharded(nn.utils.clip_grad_norm_(parameters, max_norm))


def whole(state):  # same in all scripts
    """A state whose shards are put together, in CPU memory of the first process; the others get None for them."""
    if isinstance(state, dict):
        return {name: whole(x) for name, x in state.items()}
    if isinstance(state, list):
        return [whole(x) for x in state]
    if not hasattr(state, "full_tensor"):
        return state
    tensor = unsharded(state)  # all processes take part
    return None if process_index() else tensor.cpu()


def whole_weights(model: nn.Module) -> dict[str, Tensor]:  # same in all scripts
    """The weights of a model in the first process, once each: not under a second name too, as those of a tied head."""
    return whole({name: x for name, x in model.state_dict().items() if name not in model.all_tied_weights_keys})


def can_gather() -> bool:  # same in all scripts
    """Whether all processes are at the same place: there is but one, or no error is on its way out."""
    return num_processes() == 1 or sys.exc_info()[0] in (None, Interrupted)


def cut(state: dict, part) -> dict:  # same in all scripts
    """The whole state of a module or an optimiser, cut into the shards that this process holds of it."""
    if isinstance(part, nn.Module):
        shards = part.state_dict()
        return {name: sharded_like(x, shards[name]) for name, x in state.items()}
    if isinstance(part, torch.optim.Optimizer):
        shards = [p for group in part.param_groups for p in group["params"]]
        moments = {i: {name: sharded_like(x, shards[i]) for name, x in m.items()} for i, m in state["state"].items()}
        return state | {"state": moments}
    return state


@contextmanager
def first_speaks() -> Iterator[None]:  # same in all scripts
    """In here only the first process writes to the terminal."""
    if process_index() == 0:
        yield
        return
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield


# ---------------------------------------------------------------------------------------------------------------------
# Plumbing that stands in every script, word for word


class UserError(Exception):
    """A mistake in the input: shown as one sentence, exit code 2, no traceback."""


def require(condition: object, sentence: str) -> None:  # same in all scripts
    """Raises UserError with the sentence unless the condition holds."""
    if not condition:
        raise UserError(sentence)


def check_numbers(args: Args, positive: str, natural: str = "", shares: str = "") -> None:  # same in all scripts
    """The named arguments must be above 0, at least 0, or between 0 and 1; None is left alone."""
    for names, holds, range_ in (
        (positive, lambda x: x > 0, "above 0"),
        (natural, lambda x: x >= 0, "0 or more"),
        (shares, lambda x: 0 <= x <= 1, "between 0 and 1"),
    ):
        for name in names.split():
            value = getattr(args, name)
            require(value is None or holds(value), f"--{name.replace('_', '-')} {value} must be {range_}")


@contextmanager
def memory_for(phase: str) -> Iterator[None]:  # same in all scripts
    """Turns running out of memory into a sentence that names the phase and what to change."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        is_full = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)
        require(not is_full, f"out of memory in phase {phase!r}: {MEMORY_ADVICE[phase]} (README: when memory runs out)")
        raise


def count_broken(steps: int, is_broken: bool) -> int:  # same in all scripts
    """How many steps in a row had no finite gradient and changed nothing; raises UserError at the fifth."""
    steps = steps + 1 if is_broken else 0
    cause = "most often the --learning-rate is too high"
    sentence = f"the gradient was NaN or infinite in {steps} steps in a row ({cause}); the weights of before are saved"
    require(steps < 5, sentence)
    return steps


def start_run(args: Args) -> torch.device:  # same in all scripts
    """Seeds everything, names args.output_dir, picks the device; raises UserError where a run already is.

    Under torchrun (or accelerate launch, which sets the same variables) the processes find each other here.
    """
    logging.set_verbosity_error(), logging.disable_progress_bar()  # transformers': a fresh head is no news here
    check_processes(args)
    random.seed(args.seed)
    torch.manual_seed(args.seed)
    now = from_first(torch.tensor(time.time(), dtype=torch.float64)).item()
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    args.output_dir = args.output_dir or f"runs/{args.exp_name}__{args.seed}__{stamp}"
    output = Path(args.output_dir)
    metrics = output / "metrics.jsonl"
    is_used = metrics.exists() and metrics.stat().st_size > 0
    advice = f"name another, remove it, or go on with it: --resume {output}"
    is_free = args.resume or process_index() or not is_used  # the first process is asked: it may be writing already
    require(is_free, f"--output-dir {output} already holds a run (metrics.jsonl); {advice}")
    best = (
        f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        if torch.cuda.is_available()
        else "mps"
        if torch.backends.mps.is_available()
        else "cpu"
    )
    try:
        device = torch.empty(0, device=args.device or best).device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        return device
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"--device {args.device} cannot be used on this machine; leave it out to use {best}") from error


def check_processes(args: Args) -> None:  # same in all scripts
    """Joins the processes that torchrun has started; raises UserError where there are none for settings of many."""
    script, W = Path(__file__).name, num_processes()
    is_sharded = args.zero_stage or args.shard_size or args.offload
    how = f"torchrun --nproc-per-node N {script} ... (N = 1 for one GPU)"
    flags = "--zero-stage, --shard-size and --offload"
    require("RANK" in os.environ or not is_sharded, f"{flags} are for runs that are started as {how}")
    require(W % (args.shard_size or 1) == 0, f"--shard-size {args.shard_size} does not divide the {W} processes")
    whole = "--shard-size and --offload are about shards: they need --zero-stage 2 or 3"
    require(args.zero_stage or not (args.shard_size or args.offload), whole)
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group()
        print(f"processes: {W}, --zero-stage {args.zero_stage}")


def open_metrics(args: Args):  # same in all scripts
    """metrics.jsonl beside args.json in the output folder, made here: a run that failed before leaves nothing."""
    if process_index():
        return open(os.devnull, "w")
    try:
        Path(args.output_dir).mkdir(parents=True, exist_ok=True)
        settings = asdict(args) | {"num_processes": num_processes()}
        (Path(args.output_dir) / "args.json").write_text(json.dumps(settings, indent=2) + "\n")
        return open(Path(args.output_dir) / "metrics.jsonl", "a")
    except OSError as error:
        raise UserError(f"--output-dir {args.output_dir} cannot be written: {error.strerror}") from error


def autocast(args: Args, device: torch.device) -> torch.autocast:  # same in all scripts
    """bfloat16 where --bf16 asks for it; weights, losses and everything after the logits stay float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=args.bf16)


def local_path(name: str) -> Path | None:  # same in all scripts
    """The folder or file of that name, or the one beside this script; None where there is none."""
    return next((path for path in (Path(name), Path(__file__).resolve().parent / name) if path.exists()), None)


def locate(name: str, kind: str = "model") -> str:  # same in all scripts
    """A folder or file as given, or beside this script; else a name on the hub, if the hub or its cache has it."""
    if path := local_path(name):
        return str(path)
    from huggingface_hub import HfApi, try_to_load_from_cache

    if kind == "model" and isinstance(try_to_load_from_cache(name, "config.json"), str):
        return name
    try:
        HfApi().repo_info(name, repo_type=kind, timeout=10)
    except Exception as error:  # no network, no such name, no permission: all end in the same advice
        raise UserError(
            f"{name!r} is neither a folder or file here nor a {kind} that the hub can be asked for "
            f"({type(error).__name__}); offline, name a local one: python {Path(__file__).name} with no flags runs on "
            "toy/ without any network"
        ) from error
    return name


def load(auto_class: type, name: str, trust_remote_code: bool, **kwargs):  # same in all scripts
    """auto_class.from_pretrained for a folder or a hub name; Python code that comes with it runs only if asked for."""
    try:
        return auto_class.from_pretrained(locate(name), trust_remote_code=trust_remote_code, **kwargs)
    except Exception as error:  # of many classes: whatever is wrong with a checkpoint
        reason = str(error).strip().splitlines()[0]
        advice = "; once you have read that code, --trust-remote-code runs it" if "custom code" in reason else ""
        raise UserError(f"{name!r} could not be loaded: {reason}{advice}") from error


def load_weights(auto_class: type, name: str, args: Args, **kwargs) -> nn.Module:  # same in all scripts
    """A model with float32 weights, whatever precision its checkpoint was saved in."""
    kwargs |= {"dtype": torch.float32, "use_safetensors": True, "attn_implementation": args.attn_implementation}
    return load(auto_class, name, args.trust_remote_code, **kwargs)


def use_fast_kernels(args: Args, longest: int, *models: nn.Module | None) -> None:  # same in all scripts
    """The same functions, equal to rounding, in fewer or faster kernels; `longest` is that of the texts, in tokens."""
    models = [model for model in models if model is not None]
    for model in models:
        for module in list(model.modules()):
            for name, child in module.named_children():
                if isinstance(child, NewGELUActivation):  # GPT-2's: six kernels, a third of its update on a CPU
                    setattr(module, name, nn.GELU(approximate="tanh"))
    if models[0].device.type != "cpu":
        return
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):  # glibc: freed memory is kept. To get it back page by page takes
        M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # a tenth of the time, and half with a vocabulary of 50,000
        libc.mallopt(M_MMAP_MAX, 0), libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    if longest > 512 or args.attn_implementation:
        return
    for name, size in (("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "192"), ("LRU_CACHE_CAPACITY", "96")):
        os.environ.setdefault(name, size)  # oneDNN keeps a megabyte for each shape that it has seen, and 1,024 of them
    torch.set_float32_matmul_precision("medium")  # products go through oneDNN: twice as fast on AMD processors
    a = torch.linspace(-1, 1, 64**2).view(64, 64).sin()
    if ((a @ a).double() - a.double() @ a.double()).abs().max() > 1e-4:  # in bfloat16, as on Intel's AMX: undone
        torch.set_float32_matmul_precision("highest")
        return
    for model in models:  # the backward pass of flash attention would take five times as long, for texts so short
        model.set_attn_implementation("eager")


def load_tokenizer(name: str, trust_remote_code: bool) -> AutoTokenizer:  # same in all scripts
    """The tokenizer of a model; where it has no pad token, EOS stands in, since padding is known by position only."""
    tokenizer = load(AutoTokenizer, name, trust_remote_code)
    require(tokenizer("a text")["input_ids"], f"{name} holds no tokenizer; save the one of its base model beside it")
    if tokenizer.pad_token_id is None:
        require(tokenizer.eos_token_id is not None, f"the tokenizer of {name} has neither a pad nor an EOS token")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def context_length(model: nn.Module) -> int:  # same in all scripts
    """Most tokens that the model can read at once."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


def load_split(name: str, config: str | None, split: str):  # same in all scripts
    """One split of a dataset: a folder, a jsonl/json/csv/parquet file, or a name on the hub."""
    import datasets

    datasets.disable_progress_bars(), datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    path = locate(name, "dataset")
    kinds = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
    is_file, kind = Path(path).is_file(), kinds.get(Path(path).suffix)
    require(kind or not is_file, f"--dataset {name}: a file must be one of {', '.join(kinds)}")
    try:
        if is_file:
            data = datasets.load_dataset(kind, data_files={split.split("[")[0]: path}, split=split)
        else:
            data = datasets.load_dataset(path, config, split=split)
    except StopIteration:  # how an empty jsonl file shows itself
        data = []
    except Exception as error:  # of many classes: no such split, an unreadable file, no network
        reason = " ".join(str(error.__cause__ or error).split())
        raise UserError(f"--dataset {name}, split {split!r}, could not be loaded: {reason}") from error
    require(len(data), f"--dataset {name}, split {split!r}, is empty")
    return data


def load_test_split(args: Args):  # same in all scripts
    """The split to evaluate on, or None: by default `validation`, where the data have one."""
    from datasets import get_dataset_split_names

    split, path = args.dataset_test_split, locate(args.dataset, "dataset")
    if Path(path).is_file():
        no_split = split in (None, "none")
        require(no_split, f"--dataset {args.dataset} is one file, trained on as a whole; it has no split {split!r}")
        return None
    if split is None and "validation" in get_dataset_split_names(path, args.dataset_config):
        split = "validation"
    return None if split in (None, "none") else load_split(args.dataset, args.dataset_config, split)


def read_column(data, column: str, name: str, flag: str, kind=str) -> list:  # same in all scripts
    """A column of a dataset; raises UserError where it is missing, or has a row that is of another kind (no text)."""
    there = ", ".join(data.column_names)
    require(column in data.column_names, f"--dataset {name} has no column {column!r}; it has {there} (set {flag})")
    rows = list(data[column])
    bad = next((i for i, row in enumerate(rows) if not isinstance(row, kind)), None)
    wanted = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
    require(
        bad is None, f"--dataset {name}: row {bad} of {column!r} holds {rows[bad or 0]!r}, not a {wanted} (set {flag})"
    )
    return rows


def pad(rows: list[list[int]], pad_token_id: int, device: torch.device, left: bool = False) -> tuple[Tensor, Tensor]:
    """Token lists as one tensor (B, S), and its attention mask (B, S). Same in all scripts."""
    size = max(map(len, rows))
    fill = [[0] * (size - len(row)) for row in rows]
    ids = [[pad_token_id] * len(f) + row if left else row + [pad_token_id] * len(f) for f, row in zip(fill, rows)]
    mask = [f + [1] * len(row) if left else [1] * len(row) + f for f, row in zip(fill, rows)]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


def load_function(spec: str) -> Callable:  # same in all scripts
    """file.py:name -> the function."""
    file, _, name = spec.partition(":")
    path = local_path(file)
    require(path and path.is_file() and name, f"{spec!r} should be file.py:name, and the file should exist")
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:  # somebody else's code
        raise UserError(f"{path} could not be imported: {type(error).__name__}: {error}") from error
    require(callable(getattr(module, name, None)), f"{path} defines no function {name!r}")
    return getattr(module, name)


def peak_memory_mb() -> float:  # same in all scripts
    """Peak memory in MB: of the GPU on CUDA, else of this process; 0 on Windows, which keeps no such figure."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    if sys.platform == "win32":
        return 0.0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


def make_schedule(args: Args, optimizer: torch.optim.Optimizer, num_steps: int):  # same in all scripts
    """The learning rate's course, by the name that transformers gives it."""
    name = args.lr_scheduler_type
    try:
        schedule = get_scheduler(name, optimizer, int(args.warmup_ratio * num_steps), num_steps)
    except (ValueError, TypeError) as error:
        raise UserError(f"--lr-scheduler-type {name}: {error}") from error
    is_plain = isinstance(schedule, torch.optim.lr_scheduler.LambdaLR)
    require(is_plain, f"--lr-scheduler-type {name} wants to see a metric; take one that depends on the step alone")
    return schedule


def start_wandb(args: Args):  # same in all scripts
    """The W&B run, or None without --track."""
    if not args.track or process_index():
        return None
    import wandb

    folder = Path(args.output_dir)
    id_file = folder / "wandb_id"
    run_id = id_file.read_text() if args.resume and id_file.exists() else os.urandom(4).hex()
    id_file.write_text(run_id)
    try:
        return wandb.init(
            project=args.wandb_project_name, entity=args.wandb_entity, name=folder.name, config=asdict(args),
            dir=folder, id=run_id, resume="allow",
        )  # fmt: skip
    except wandb.Error as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"W&B did not start ({reason}); log in with `wandb login`, set WANDB_MODE=offline, or leave out --track"
        ) from error


def is_turn(step: int, num_steps: int, times: int) -> bool:  # same in all scripts
    """True at `times` of the steps 1..num_steps, evenly spread, the last one among them."""
    return step * times // num_steps > (step - 1) * times // num_steps


def printable(text: str) -> str:  # same in all scripts
    """Text without control characters: what a model writes must not steer the reader's terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:  # same in all scripts
    """A table on the terminal; markup in its cells is shown, not obeyed."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, show_lines=True)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(escape(printable(cell)) for cell in row))
    Console().print(table)


def save_model(model: nn.Module, tokenizer: AutoTokenizer, args: Args, metrics: dict) -> None:  # same in all scripts
    """Model (safetensors), tokenizer and a model card in args.output_dir."""
    output, weights = Path(args.output_dir), whole_weights(model)
    if process_index():
        return
    model.save_pretrained(output, state_dict=weights)
    tokenizer.save_pretrained(output)
    script, reward = Path(__file__).name, getattr(args, "reward_fn", None) or getattr(args, "reward_model", None)
    on_the_hub = {"base_model": args.model, "datasets": args.dataset}
    head = [f"{key}: [{json.dumps(name)}]" for key, name in on_the_hub.items() if name and not local_path(name)]
    shown = lambda text: f"`{html.escape(printable(str(text))).replace('`', chr(39))}`"  # noqa: E731 - never as markup
    rows = [f"| `{name}` | {value:.6g} |" for name, value in metrics.items()]
    card = [
        "---", "library_name: transformers", f"tags: [{script.removesuffix('.py')}]", *head, "---",
        f"# {shown(output.name)}", "",
        f"Made by `{script}` from {shown(args.model)} with the data {shown(args.dataset)}"
        + (f" and the reward {shown(reward)}." if reward else "."), "",
        "## Last metrics", "", "| metric | value |", "|---|---|", *rows, "",
        "## Arguments", "", "```json", json.dumps(asdict(args), indent=2), "```", "",
    ]  # fmt: skip
    (output / "README.md").write_text("\n".join(card))
    print(f"saved in {output}: the model, its card, metrics.jsonl and curves.png")


def draw_curves(output: Path, x: str, panels: list[list[str]]) -> None:  # same in all scripts
    """curves.png: one panel for each list of metric names, from metrics.jsonl."""
    if process_index():
        return
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    logged = {name for line in lines for name in line}
    panels = [names for names in ([name for name in panel if name in logged] for panel in panels) if names]
    figure, axes = plt.subplots(1, len(panels), figsize=(5 * len(panels), 3.2), layout="constrained", squeeze=False)
    for axis, names in zip(axes[0], panels):
        for name in names:
            axis.plot(*zip(*((line[x], line[name]) for line in lines if name in line)), label=name)
        axis.set_xlabel(x)
        axis.legend(frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(output / "curves.png", dpi=120)
    plt.close(figure)


def main() -> None:  # same in all scripts
    """Reads the command line and trains; a user's mistake ends in one sentence and exit code 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    args = None
    try:
        with first_speaks(), memory_for("run"):
            train(args := read_command_line())
        if dist.is_initialized():
            dist.destroy_process_group()
    except UserError as error:
        time.sleep(2 * (process_index() > 0))  # of what all find wrong, the first speaks; torchrun then ends the others
        print(printable(f"{Path(__file__).name}: error: {error}"), file=sys.stderr)
        sys.exit(2)
    except Interrupted as stop:
        here = os.environ.get("LOCAL_WORLD_SIZE", num_processes())
        launcher = "python" if num_processes() == 1 else f"torchrun --nproc-per-node {here}"
        command = f"{launcher} {Path(__file__).name} --resume {args.output_dir}"
        if process_index() == 0:
            print(f"{stop}; to go on from there: {command}", file=sys.stderr)
        sys.exit(130)
    except RuntimeError as error:
        if "by peer" not in str(error):
            raise
        sys.exit(f"process {process_index()} stops: another one, which shows its own error, has closed the connection")
    except KeyboardInterrupt:
        print(f"interrupted; what was trained is in {args.output_dir if args else 'no folder yet'}", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
