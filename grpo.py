# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.23.0", "datasets==5.2.0", "tyro==1.0.17", "wandb==0.31.0",
#     "pydantic==2.14.3", "tqdm==4.70.1"]
# ///
"""GRPO for language models: policy + answers that can be checked -> better policy.

For each batch of prompts, G responses to each (`num_generations`):
  1. sample     response y_1..y_T ~ pi(. | prompt), at the given temperature, up to and including the stop token
  2. score      one number for each response, usually from a check of its answer
  3. advantage  A_i = (score_i - mean of the group's scores) / their standard deviation (`scale_rewards`)
  4. loss       ratio_t = pi(y_t) / pi_old(y_t), or its geometric mean over the response (GSPO)
                loss_t = max(-A_i ratio_t, -A_i clip(ratio_t, 1-eps, 1+eps_high)) [+ beta ratio_t KL_t]
                KL_t = q/p - 1 - log(q/p), q = pi_ref(y_t), p = pi(y_t) (DeepSeek-V3.2); pi_ref is a frozen first pi
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
no KL, and with `beta` it is part of the loss. A group with equal scores gives no gradient.

Papers: GRPO 2402.03300 (eq. 3, 19); Dr. GRPO 2503.20783; DAPO 2503.14476; GSPO 2507.18071; CISPO 2506.13585; MaxRL
2602.02710; DeepSeek-V3.2 2512.02556. In short: lecture/grpo.py, 310 lines. Over several turns: agent.py.

  python grpo.py                       # the toy task: offline, half a minute on two CPU cores, right answers .4 to 1.0
  python grpo.py --model Qwen/Qwen3-0.6B --bf16 --dataset problems.jsonl --response-length 1024 \\
      --reward-fn rewards/verifiers.py:right_number    # on one GPU; problems.jsonl has the columns prompt and answer
"""

import ctypes
import json
import math
import os
import runpy
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pyarrow.parquet
import pydantic
import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from filelock import FileLock
from jinja2 import TemplateError
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as recompute_activations
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig, StaticCache
from transformers import get_scheduler, logging, set_seed
from transformers.activations import ACT2FN, GELUTanh
from transformers.cache_utils import LinearAttentionCacheLayerMixin
from transformers.modeling_layers import GradientCheckpointingLayer

TOY = Path(__file__).resolve().parent / "toy"  # the embedded models and data
VERIFIER = f"{TOY.parent}/rewards/verifiers.py:right_number"

# Processes of torchrun. All read the same data and draw the same random numbers; each computes its share of a batch
RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))

# --- Settings. A type limits the values; the comment beside a setting is its help text
Share = Annotated[float, Field(ge=0, le=1)]


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
    epsilon: PositiveFloat = 0.2  # the ratio is clipped to 1 - epsilon ... 1 + epsilon_high (GSPO: 3e-4)
    epsilon_high: PositiveFloat | None = None  # by default epsilon (DAPO: 0.28, GSPO: 4e-4); cispo's bound: 5
    num_ppo_epochs: Annotated[PositiveInt, alias("--num-iterations")] = 1  # passes over each batch. Many: off policy
    num_mini_batches: PositiveInt = 1  # optimiser steps in one pass over the batch (TRL 0.16)
    beta: NonNegativeFloat = 0.0  # weight of the KL in the loss. 0: no reference is loaded (TRL: 0; DeepSeekMath: 0.04)
    mask_truncated_completions: bool = False  # exclude responses without a stop token from the loss (DAPO)
    # --- Rollout ---
    response_length: Annotated[PositiveInt, alias("--max-completion-length")] = 16  # maximum tokens in a response
    temperature: PositiveFloat = 1.0  # divides the logits in rollout, reference and loss (TRL). Lower explores less
    missing_eos_penalty: NonNegativeFloat = 0.0  # subtracted from the score of a response without stop token (TRL)
    local_rollout_forward_batch_size: PositiveInt | None = None  # responses sampled at once; by default 4 micro-batches
    # --- Optimisation ---
    learning_rate: Annotated[PositiveFloat | None, alias("--lr")] = None  # None: by the model's size; LoRA: 10 times
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup", "polynomial"] = "linear"  # TRL's
    warmup_ratio: Share = 0.0  # share of the run in which the learning rate warms up from 0
    weight_decay: NonNegativeFloat = 0.0  # weight decay of AdamW
    adam_betas: tuple[Share, Share] = (0.9, 0.999)  # betas of AdamW (OpenRLHF: 0.9 0.95)
    adam_epsilon: PositiveFloat = 1e-8  # epsilon of AdamW (torch and TRL; N+ details: 1e-5)
    max_grad_norm: PositiveFloat = 1.0  # the gradient is clipped to this norm
    # --- Batch sizes ---
    batch_size: PositiveInt = 64  # responses per update, on all GPUs together
    micro_batch_size: PositiveInt | None = None  # responses per pass; by default 2048 tokens on a CPU, 8192 on a GPU
    # --- Models: a folder, or a name on the hub ---
    model: Annotated[str, alias("--model-name-or-path")] = f"{TOY}/shells/sft"  # policy to start from
    reward_fn: Annotated[tuple[str, ...], alias("--reward-funcs")] = (VERIFIER,)  # functions, as file.py:name
    reward_weights: tuple[float, ...] = ()  # weights of the rewards; by default 1 (TRL); 0: only logged
    lora_r: NonNegativeInt = 0  # rank of LoRA adapters (peft), 0 for none
    bf16: bool = False  # models run in bfloat16 (autocast), trained weights stay in float32. Slow on most CPUs
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: far less memory, a third slower
    zero_stage: Literal[2, 3] = 2  # processes divide gradients and moments among them; 3: weights, too
    # --- Data. A row has `prompt`, a text or messages that end with the user's; reward functions get all columns ---
    dataset: Annotated[str, alias("--dataset-name")] = f"{TOY}/shells/data/prompts"  # folder of SPLIT.jsonl, or hub
    dataset_config: Annotated[str | None, alias("--dataset-config-name")] = None  # which configuration of a hub dataset
    dataset_train_split: str = "train"  # split to train on
    dataset_test_split: str | None = "validation"  # split to evaluate on, if there is one
    max_prompt_length: PositiveInt = 512  # in tokens; longer prompts are dropped, and their number printed (N+ details)
    # --- Run ---
    seed: NonNegativeInt = 1  # seed of responses, order of prompts, mini-batches, and adapters
    total_episodes: PositiveInt = 12_800  # number of responses to train on; 12,800 are one pass over the toy prompts
    output_dir: str | None = None  # folder for all output; by default a new folder runs/SCRIPT__SEED__TIME
    resume: Annotated[str | None, alias("--resume-from-checkpoint")] = None  # folder of a run to continue
    device: str = "cuda" if torch.cuda.is_available() else "cpu"  # cpu, cuda, mps; by default cuda if there is one
    eval_steps: PositiveInt = 50  # updates between evaluations; there is one before the first update and after the last
    num_eval_prompts: NonNegativeInt = 32  # held-out prompts of an evaluation, with G responses to each; 0 for none
    save_steps: PositiveInt = 50  # updates between checkpoints, which hold the full state of the run
    save_total_limit: PositiveInt = 1  # checkpoints to keep
    num_sample_generations: NonNegativeInt = 10  # about how many times to print four episodes (TRL)
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works without an account)


# --- The loop, with the steps of the docstring ------------------------------------------------------------------------
def train(args):
    """Trains the policy. Saves it in the run's folder, with its metrics."""
    args = start(args)
    tokenizer = load_tokenizer(args.model)
    prompts = load_prompts(args, tokenizer, args.dataset_train_split)
    eval_prompts = load_prompts(args, tokenizer, args.dataset_test_split)[: args.num_eval_prompts]
    eval_prompts = eval_prompts[len(eval_prompts) % WORLD_SIZE :]  # all processes have equal shares
    reward_fns = load_reward_fns(args)
    policy, reference = load_models(args)
    set_stop_tokens(policy, isinstance(prompts[0]["prompt"], list), args.temperature)
    for model in (policy, reference):
        if isinstance(model, nn.Module):  # with LoRA, the reference is a function
            place(model, args)
    args = choose_sizes(args, policy, prompts, eval_prompts)  # from here on, all sizes are set
    B, G = args.batch_size, args.num_generations
    num_updates = args.total_episodes // B
    passes = range(1 + args.total_episodes // (G * len(prompts)))
    order = [i for number in passes for i in shuffled(len(prompts), args.seed, number)]

    options = {"betas": args.adam_betas, "eps": args.adam_epsilon, "weight_decay": args.weight_decay, "fused": True}
    optimizer = torch.optim.AdamW(policy.parameters(), args.learning_rate, **options)  # fused: faster on a CPU
    schedule = get_scheduler(args.lr_scheduler_type, optimizer, int(args.warmup_ratio * num_updates), num_updates)
    run = Run(args, num_updates, optimizer, schedule, {}, model=policy)
    if run.step == 0 and eval_prompts:
        first = evaluate(policy, reference, reward_fns, eval_prompts, args)
        if first["eval/reward_std"] == 0 or first["eval/completions/clipped_ratio"] > 0.5:
            print("held-out scores are all equal (see --reward-fn), or few responses end (see --response-length)")
        run.log(first, "eval/reward")
    for step in run.steps():
        set_seed(make_seed(args.seed, step))

        # 1. Sample
        examples = [prompts[i] for i in order[(step - 1) * B // G : step * B // G]]
        rollout = sample_batch(policy, examples, args)

        # 2. Score
        stats = reread_logprobs(policy, rollout, args)
        if args.beta:
            rollout.ref_logprobs = read_logprobs(reference, rollout, args)
        score_batch(rollout, reward_fns, tokenizer, args)

        # 3. Advantage
        require(args.scale_rewards != "mean" or rollout.scores.min() >= 0, "--scale-rewards mean needs scores >= 0")
        rollout.advantages = group_advantages(rollout.scores, G, args.scale_rewards)[:, None]  # (B, 1)
        rollout.loss_mask = rollout.mask  # (B, T)
        if args.mask_truncated_completions:
            rollout.loss_mask = rollout.mask & rollout.ended[:, None]

        # 4. Loss, and 5. update
        stats |= update(policy, optimizer, rollout, args)
        require(step > 1 or stats["policy/first_ratio_error"] < 0.1, "the first ratio is not 1: is a mask ignored?")

        stats |= rollout_stats(rollout, args)
        num_tokens = rollout.joined()[1].sum().item()
        stats["num_tokens"] = run.state["num_tokens"] = run.state.get("num_tokens", 0) + num_tokens
        stats |= {"learning_rate": optimizer.param_groups[0]["lr"], "episode": step * B}
        if step % args.eval_steps == 0 or step == num_updates:
            stats |= evaluate(policy, reference, reward_fns, eval_prompts, args)
        run.log(stats, "objective/scores", "frac_reward_zero_std", "eval/reward")
        if args.num_sample_generations and (step - 1) % max(1, num_updates // args.num_sample_generations) == 0:
            show_samples(run, rollout, tokenizer)
        schedule.step()
    run.finish()


# --- 1. Sample --------------------------------------------------------------------------------------------------------
@dataclass
class Rollout:
    """A batch of episodes: B rows. The k responses to a prompt, a group, are neighbours. A field is None until its step
    has run."""

    prompts: Tensor  # (B, P), left-padded
    prompt_mask: Tensor  # (B, P), true on real tokens
    responses: Tensor  # (B, T), right-padded
    mask: Tensor  # (B, T), true up to and including the stop token
    ended: Tensor  # (B,), true if the response has a stop token
    old_logprobs: Tensor  # (B, T), under the policy that sampled the responses
    examples: list[dict]  # the B rows of the dataset
    k: int  # responses to each prompt
    ref_logprobs: Tensor | None = None  # (B, T), under the reference, with --beta
    reward_table: Tensor | None = None  # (B, n), of n reward functions, NaN for None
    scores: Tensor | None = None  # (B,), the weighted sum of the rewards, minus the penalty for a missing stop token
    advantages: Tensor | None = None  # (B, 1)
    loss_mask: Tensor | None = None  # (B, T), true on tokens that are in the loss

    # the fields with a column for each token, which `select` shortens
    PROMPT_FIELDS = ("prompts", "prompt_mask")
    TOKEN_FIELDS = ("responses", "mask", "old_logprobs", "ref_logprobs", "loss_mask")

    def joined(self):
        """Ids and attention mask (B, P+T) of prompts and responses, as a model reads them."""
        ids = torch.cat([self.prompts, self.responses], 1)
        mask = torch.cat([self.prompt_mask, self.mask], 1)
        return ids, mask.long()

    def select(self, index):
        """Selects episodes by row number, without columns that are padding in all of them."""
        P = self.prompt_mask[index].sum(1).max().item()
        T = self.mask[index].sum(1).max().item()
        part = {name: x[index] for name, x in vars(self).items() if isinstance(x, Tensor)}
        part |= {name: part[name][:, -P:] for name in self.PROMPT_FIELDS}
        part |= {name: part[name][:, :T] for name in self.TOKEN_FIELDS if name in part}
        return replace(self, examples=[self.examples[i] for i in index.tolist()], **part)

    def micro_batches(self, index, args):
        """Splits row numbers into this process's micro-batches of groups of similar lengths, to save padding."""
        lengths = self.prompt_mask.sum(1) + self.mask.sum(1)
        lengths = lengths.view(-1, self.k).amax(1)  # (B/k,) of the longest row of each group
        index = index.sort().values
        index = index[lengths[index // self.k].argsort(stable=True)]
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
        responses [[5, 0, 7, 0], [5, 6, 7, 8]]  ->  mask [[1, 1, 0, 0], [1, 1, 1, 1]], ended [1, 0]"""
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
    caller draws the numbers, so a response does not depend on the other rows or the batch size."""
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
    options = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    rows = torch.arange(B, device=prompts.device)  # numbers of the rows in the cache; those that have ended leave it
    has_ended = torch.zeros_like(rows, dtype=torch.bool)
    attention_mask = prompt_mask.long()  # (rows, P), then one wider after each token
    logits = read_prompts(policy, prompts, prompt_mask, cache)  # (rows, 1, V)
    for t in range(T):
        token, logprob = sample_categorical(logits[:, -1].float() / temperature, uniforms[rows, t])  # (rows,) each
        responses[rows, t] = token
        logprobs[rows, t] = logprob
        has_ended |= torch.isin(token, stops)
        attention_mask = F.pad(attention_mask, (0, 1), value=1)
        if rows.is_cpu or t % 8 == 7:  # reading a result makes a GPU wait
            kept = (~has_ended).nonzero().squeeze(1)
            if len(kept) < 0.75 * len(rows):  # the cache is copied, so only if it becomes much smaller
                cache.reorder_cache(kept)
                rows, has_ended, token, attention_mask = (x[kept] for x in (rows, has_ended, token, attention_mask))
        if t == T - 1 or len(rows) == 0:
            break
        logits = forward(policy, token[:, None], attention_mask, **options).logits
    mask, ended = response_mask(responses, policy.stop_token_ids)  # false on tokens sampled after the stop token
    responses = responses.masked_fill(~mask, policy.tokenizer.pad_token_id)
    return responses, mask, ended, logprobs.masked_fill(~mask, 0.0)


def sample_batch(policy, examples, args):
    """Step 1: samples G responses to the prompt of each example. Each process samples those to some of the prompts."""
    examples = [example for example in examples for _ in range(args.num_generations)]
    ids = [example["input_ids"] for example in examples]
    prompts, prompt_mask = pad(ids, policy.tokenizer, args, "left")  # (B, P)
    uniforms = torch.rand(len(ids), args.response_length).to(prompts.device)  # drawn on the CPU, for any device
    share = torch.arange(len(ids)).tensor_split(WORLD_SIZE)[RANK]  # row numbers of this process
    parts = []
    with autocast(args), gathered(policy, args):
        for index in share.split(args.local_rollout_forward_batch_size):
            part = sample(policy, prompts[index], prompt_mask[index], uniforms[index], args.temperature)
            parts.append(part)
    columns = [all_gather(torch.cat(x)) for x in zip(*parts)]  # responses, mask, ended, logprobs
    rollout = Rollout(prompts, prompt_mask, *columns, examples, args.num_generations)
    return rollout.select(torch.arange(len(ids), device=prompts.device))  # all rows, without padding columns


# --- 2. Score ---------------------------------------------------------------------------------------------------------
def token_logprobs(logits, tokens, temperature=1.0, with_entropy=False):
    """(b, T) log-probabilities of tokens under softmax(logits / temperature), from logits (b, T, V), and the entropies
    (b, T), which are 0 unless they are asked for."""
    scaled = logits.float() if temperature == 1 else logits.float() / temperature
    log_softmax = scaled.log_softmax(-1)
    logprobs = log_softmax.gather(-1, tokens[..., None]).squeeze(-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1) if with_entropy else torch.zeros_like(logprobs)
    return logprobs, entropy.detach()


class SlicedLogprobs(torch.autograd.Function):
    """token_logprobs of logits (b, T, V), in slices of 8 MB: no other tensor has the size of the logits."""

    @staticmethod
    def forward(ctx, logits, tokens, temperature, with_entropy):
        """Log-probabilities (b, T), and entropies (b, T), which have no gradient."""
        logits = logits.contiguous()
        ctx.save_for_backward(logits, tokens)
        ctx.temperature = temperature
        ctx.n = 2**21 // logits.shape[-1]  # tokens of a slice
        slices = zip(logits.flatten(0, 1).split(ctx.n), tokens.flatten().split(ctx.n))
        parts = [token_logprobs(*x, temperature, with_entropy) for x in slices]
        logprobs, entropy = [torch.cat(x).view(tokens.shape) for x in zip(*parts)]
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad, _):
        """Writes the gradient over the logits. If another operation needs them, autograd raises an error."""
        logits, tokens = ctx.saved_tensors
        columns = [x.reshape(-1, 1).split(ctx.n) for x in (tokens, grad / ctx.temperature)]
        for x, token, slope in zip(logits.flatten(0, 1).split(ctx.n), *columns):  # (n, V), (n, 1), (n, 1)
            scaled = x.float() if ctx.temperature == 1 else x.float() / ctx.temperature
            gradient = scaled.softmax(-1).mul_(-slope)
            x.copy_(gradient.scatter_add_(1, token, slope))  # slope * (one_hot - softmax)
        return logits, None, None, None


def logprobs_under(model, r, args, with_entropy=False):
    """(b, T) log-probabilities of the response tokens under a model, and the entropies of its distributions. Position
    P-1+t of the input predicts response token t, both counted from 0. A prompt is read once for its rows, and the
    backward pass sums their gradients; not if recomputed layers would fill the cache twice, or if layers other than
    attention keep a state."""
    P, T = r.prompts.shape[1], r.responses.shape[1]
    positions = torch.arange(P - 1, P + T - 1, device=r.mask.device)
    ids, mask = r.joined()  # (b, P+T) each
    cache = DynamicCache(config=model.config)
    has_states = any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers)
    if args.gradient_checkpointing or has_states:
        with autocast(args):
            logits = forward(model, ids, mask, use_cache=False, logits_to_keep=positions).logits  # (b, T, V)
        return SlicedLogprobs.apply(logits, r.responses, args.temperature, with_entropy)
    options = {"past_key_values": cache, "use_cache": True, "logits_to_keep": positions[1:] - P}
    with autocast(args):
        first = read_prompts(model, r.prompts, r.prompt_mask, cache)  # (b, 1, V)
        others = forward(model, r.responses, mask, **options).logits  # (b, T-1, V)
    of_first = SlicedLogprobs.apply(first, r.responses[:, :1], args.temperature, with_entropy)
    of_others = SlicedLogprobs.apply(others, r.responses[:, 1:], args.temperature, with_entropy)
    return [torch.cat(columns, 1) for columns in zip(of_first, of_others)]


def read_logprobs(model, rollout, args):
    """(B, T) log-probabilities of the responses under a model, read in micro-batches."""
    return rollout.in_micro_batches(lambda r: logprobs_under(model, r, args)[0], args)


def reread_logprobs(policy, rollout, args):
    """With bfloat16 or TF32, replaces the sampler's log-probabilities by those of the trainer, which rounds otherwise.
    Returns the differences (TRL). In bfloat16 their mean is up to .04 (SmolLM2); if they were two models, about 1."""
    if not args.bf16 and args.device == "cpu":
        return {}
    sampled = rollout.old_logprobs
    rollout.old_logprobs = read_logprobs(policy, rollout, args)
    differences = (rollout.old_logprobs - sampled)[rollout.mask].abs()
    require(differences.mean() < 0.3, "sampler and trainer differ: does the model ignore its cache, or positions?")
    name = "sampling/sampling_logp_difference"
    return {f"{name}/mean": differences.mean().item(), f"{name}/max": differences.max().item()}


def score_batch(rollout, reward_fns, tokenizer, args):
    """Adds the rewards (B, n) of n functions to the rollout, and the scores (B,): the weighted sum of the rewards,
    minus the penalty for a missing stop token. A None counts as 0; if all are None, the score is the group's mean."""
    table = torch.stack([reward_of(rollout, tokenizer, args) for reward_of in reward_fns.values()], 1)
    weights = table.new_tensor(args.reward_weights or [1.0] * len(reward_fns))
    scores = (table * weights).nansum(1) - args.missing_eos_penalty * ~rollout.ended
    unscored = table[:, weights != 0].isnan().all(1)
    groups = scores.masked_fill(unscored, math.nan).view(-1, rollout.k)
    means = groups.cpu().double().nanmean(1, keepdim=True)  # in double, the mean of equal scores is exact
    means = means.nan_to_num().to(groups)  # 0 in a group without any: its advantages are 0
    rollout.reward_table = table
    rollout.scores = groups.where(~groups.isnan(), means).flatten()


# --- 3. Advantage -----------------------------------------------------------------------------------------------------
def group_advantages(scores, G, scale):
    """(B,) each score minus the group's mean, divided by a standard deviation (TRL) or by that mean (MaxRL).

    A group is G neighbouring rows. With G = 4, scores [1, 0, 0, 0] give
        none   [.75, -.25, -.25, -.25]
        group  [1.5, -.5, -.5, -.5]: divided by .5. Rare successes and rare failures weigh more (see Dr. GRPO)
        mean   [3, -1, -1, -1]: only rare successes weigh more, as in the gradient of log P(right answer)"""
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


def surrogate_loss(ratio, logprobs, advantages, lower, upper, loss_type):
    """The clipped loss of each token (B, T), or of each response (B, 1) with sequence-level ratios. Its gradient is 0
    where the ratio has left the clip range in the direction that the advantage favours. CISPO keeps every gradient,
    weighted by the clipped ratio (MiniMax-M1, eq. 4; without a lower bound, as in TRL)."""
    clipped_ratio = ratio.clamp(lower, upper)
    if loss_type == "cispo":
        return -clipped_ratio.detach() * advantages * logprobs
    return torch.max(-advantages * ratio, -advantages * clipped_ratio)


def token_weights(mask, num_rows, num_tokens, loss_type, max_length):
    """(b, T) weights of the tokens' losses. The loss of a mini-batch is the weighted sum.

    grpo: all responses have the same weight, so a token of a long response has a lower one, and wrong responses become
    longer (Dr. GRPO, sec. 3.1). In the others, all tokens have the same weight: a constant (dr_grpo), or 1 / tokens of
    an average mini-batch (dapo, cispo). num_rows and num_tokens: of the batch / (mini-batches x processes)."""
    lengths = mask.sum(1, keepdim=True).clamp(min=1)  # (b, 1)
    if loss_type == "grpo":
        return mask / (num_rows * lengths)
    if loss_type == "dr_grpo":
        return mask / (num_rows * max_length)
    return mask / num_tokens


# --- 5. Update --------------------------------------------------------------------------------------------------------
class Meter(Counter):
    """Means of metrics over the real tokens of all micro-batches that were added, in all processes."""

    def add(self, metrics, mask):
        """Adds metrics of tokens (b, T), or of responses (b, 1), where the mask (b, T) is true."""
        for name, x in metrics.items():
            real = mask[:, : x.shape[1]]
            self[name] += torch.stack([masked_sum(x.detach(), real), real.sum()])

    def means(self):
        """Metric -> mean. The device is read once."""
        sums, counts = all_reduce(torch.stack(list(self.values()))).unbind(1)
        return dict(zip(self, (sums / counts.clamp(min=1)).tolist()))


def update(policy, optimizer, rollout, args):
    """Steps 4 and 5: passes over the batch, with one optimiser step for each mini-batch. Returns the metrics.

    The gradient of a mini-batch is a weighted sum over its tokens, however it is split into micro-batches and among
    processes: gradients are averaged over processes, so the weights use the numbers of rows and tokens per process."""
    lower, upper = 1 - args.epsilon, 1 + (args.epsilon_high or args.epsilon)
    if args.loss_type == "cispo":  # it has only an upper bound, by default 5 (as TRL advises)
        lower, upper = 0.0, args.epsilon_high or 5.0
    num_parts = args.num_mini_batches * WORLD_SIZE
    num_rows = args.batch_size / num_parts
    num_tokens = rollout.loss_mask.sum().clamp(min=1) / num_parts  # on average
    logs = []  # the metrics of each mini-batch
    for _ in range(args.num_ppo_epochs):
        order = torch.randperm(args.batch_size).to(args.device)
        for mini_batch in order.split(args.batch_size // args.num_mini_batches):  # row numbers
            optimizer.zero_grad()
            meter = Meter()
            total = torch.zeros((), device=args.device)  # the sum of the losses
            for index in rollout.micro_batches(mini_batch, args):
                r = rollout.select(index)
                mask = r.loss_mask
                logprobs, entropy = logprobs_under(policy, r, args, with_entropy=True)  # (b, T) each
                ratio = importance_ratio(logprobs, r.old_logprobs, mask, args.importance_sampling_level)  # or (b, 1)
                losses = surrogate_loss(ratio, logprobs, r.advantages, lower, upper, args.loss_type)
                kl = torch.zeros_like(logprobs)
                if args.beta:
                    log_ratio = r.ref_logprobs.where(mask, logprobs) - logprobs  # (b, T) 0 outside the loss
                    kl = torch.expm1(log_ratio) - log_ratio  # k3: unbiased, and never negative (Schulman 2020)
                    kl = kl * ratio  # so that its gradient is an unbiased estimate of the KL's (DeepSeek-V3.2)
                weights = token_weights(mask, num_rows, num_tokens, args.loss_type, args.response_length)  # (b, T)
                loss = masked_sum((losses + args.beta * kl) * weights, mask)
                loss.backward()
                total += loss.detach()
                is_low = (ratio < lower) & (r.advantages < 0)  # clipped: no gradient from the advantage, but with cispo
                is_high = (ratio > upper) & (r.advantages > 0)
                change = logprobs - r.old_logprobs
                metrics = {
                    "kl": kl,
                    "entropy": entropy,
                    "val/ratio": ratio,
                    "clip_ratio/low_mean": is_low,
                    "clip_ratio/high_mean": is_high,
                    "clip_ratio/region_mean": is_low | is_high,
                    "policy/approxkl_avg": 0.5 * change**2,
                    "policy/first_ratio_error": (change.exp() - 1).abs(),
                }
                meter.add(metrics, mask)
            norm = nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], args.max_grad_norm).item()
            if math.isfinite(norm):  # otherwise the step would turn the weights into NaN
                optimizer.step()
            logs.append(meter.means() | {"loss": all_reduce(total).item() / WORLD_SIZE, "grad_norm": norm})
    optimizer.zero_grad()
    stats = {name: np.mean([log[name] for log in logs]).item() for name in logs[0]}  # as in TRL
    stats["policy/first_ratio_error"] = logs[0]["policy/first_ratio_error"]  # before the first step
    stats["val/skipped_steps"] = sum(not math.isfinite(log["grad_norm"]) for log in logs)
    return stats


# === End of the algorithm. Next: its metrics, then what every program of this kind needs =============================
def rollout_stats(rollout, args):
    """The metrics of a batch before the update, under TRL's names."""
    scores, ended, lengths = rollout.scores, rollout.ended, rollout.mask.sum(1).float()
    terminated = lengths[ended] if ended.any() else torch.zeros(1)
    groups = scores.view(-1, rollout.k)  # (B/k, k)
    right = rollout.reward_table[:, 0].view_as(groups) >= 1  # by the first function
    stats = {
        "reward": scores.mean(),
        "reward_std": scores.std(),
        "objective/scores": scores.mean(),
        "frac_reward_zero_std": (groups == groups[:, :1]).all(1).float().mean(),
        "completions/mean_length": lengths.mean(),
        "completions/min_length": lengths.min(),
        "completions/max_length": lengths.max(),
        "completions/clipped_ratio": 1 - ended.float().mean(),
        "completions/mean_terminated_length": terminated.mean(),
        "completions/min_terminated_length": terminated.min(),
        "completions/max_terminated_length": terminated.max(),
        f"pass@{rollout.k}": right.any(1).float().mean(),
    }
    if args.beta:
        k1 = rollout.old_logprobs - rollout.ref_logprobs
        stats["objective/kl"] = masked_sum(k1, rollout.mask) / len(k1)
    for spec, rewards in zip(args.reward_fn, rollout.reward_table.T):
        name = spec.rpartition(":")[2]
        known = rewards[~rewards.isnan()]
        stats[f"rewards/{name}/mean"] = known.mean()
        stats[f"rewards/{name}/std"] = known.std()  # with Bessel's correction, as in TRL
    return {name: x.item() for name, x in stats.items()}


def evaluate(policy, reference, reward_fns, prompts, args):
    """Metrics of G responses to each held-out prompt, eval/NAME. The random numbers are the same in each evaluation."""
    if not prompts:
        return {}
    set_seed(make_seed(args.seed, 0))
    rollout = sample_batch(policy, prompts, args)
    reread_logprobs(policy, rollout, args)
    if args.beta:
        rollout.ref_logprobs = read_logprobs(reference, rollout, args)
    score_batch(rollout, reward_fns, policy.tokenizer, args)
    return {f"eval/{name}": x for name, x in rollout_stats(rollout, args).items()}


def show_samples(run, rollout, tokenizer):
    """Prints four episodes, and saves their tensors in samples/, for tools/xray.py."""
    if RANK:
        return
    r = rollout.select(torch.arange(len(rollout.examples))[:4])
    for example, response, mask, score in zip(r.examples, r.responses, r.mask, r.scores):
        run.bar.write(f"prompt: {tokenizer.decode(example['input_ids'])}")
        run.bar.write(f"response: {tokenizer.decode(response[mask])}")
        run.bar.write(f"score: {score:.2f}\n")
    tensors = {name: x.cpu().contiguous() for name, x in vars(r).items() if isinstance(x, Tensor)}
    (run.output / "samples").mkdir(exist_ok=True)
    save_file(tensors, run.output / f"samples/step-{run.step:08d}.safetensors")


# --- Models and data --------------------------------------------------------------------------------------------------
def load_models(args):
    """Loads the policy, and with --beta makes the reference, a copy; with LoRA, it is the policy without its adapters.
    They have no dropout: rollout and loss use one distribution."""
    policy = load_model(AutoModelForCausalLM, args.model)
    reference = None
    if args.beta:
        reference = deepcopy(policy).requires_grad_(False) if not args.lora_r else partial(without_adapters, policy)
        reference.config = policy.config
    if args.lora_r:
        add_adapters(policy, args.lora_r)
    return policy, reference


def choose_sizes(args, policy, prompts, eval_prompts):
    """Returns the settings with learning rate and batch sizes filled in, and prints them."""
    G = args.num_generations
    config = policy.config.get_text_config()
    prompt_length = max(len(row["input_ids"]) for row in prompts + eval_prompts)
    longest = prompt_length + args.response_length
    limit = getattr(config, "max_position_embeddings", longest)
    require(longest <= limit, f"a prompt and --response-length have {longest} tokens, but {args.model} reads {limit}")
    size = policy.num_parameters()
    # 1e-5 for a model of GPT-2's size, more for smaller ones, at least 3e-6 (the N+ details' rate from 1B up)
    rate = max(3e-6, 1e-5 * (124e6 / size) ** 0.6) * (10 if args.lora_r else 1)
    rate = args.learning_rate or float(f"{rate:.2g}")
    tokens = 2048 if args.device == "cpu" else min(8192, 2**29 // config.vocab_size)  # of a pass: at most 2**29 logits
    rows = max(1, tokens // (args.response_length + prompt_length // G))  # a prompt is read once for its G rows
    rows = args.micro_batch_size or (rows // G * G or rows)  # whole groups, if one fits
    parts = math.lcm(args.num_mini_batches, G) * WORLD_SIZE
    require(args.batch_size % parts == 0, f"--batch-size {args.batch_size} is no multiple of {parts}, for whole groups")
    num_updates = args.total_episodes // args.batch_size
    require(num_updates, f"--total-episodes {args.total_episodes} is less than a batch of {args.batch_size}")
    sampled = args.local_rollout_forward_batch_size or 4 * rows
    print(f"policy: {args.model}, {size / 1e6:.2f}M parameters on {args.device}, learning rate {rate:.2g}")
    print(f"{num_updates} updates of {args.batch_size} responses, at most {sampled} sampled, {rows} trained on at once")
    return replace(args, learning_rate=rate, micro_batch_size=rows, local_rollout_forward_batch_size=sampled)


# === From here on, a function has the same text in all scripts that have it ==========================================
# --- Rewards ----------------------------------------------------------------------------------------------------------
def decode(r, tokenizer):
    """Responses as texts, without special tokens. A response is decoded behind its prompt, since SentencePiece drops a
    first space; in conversations, without the white space that some templates write around it."""
    P = r.prompts.shape[1]
    ids, mask = (x.cpu() for x in r.joined())  # the GPU is read once, not for each row
    texts = []
    for example, episode, real in zip(r.examples, ids, mask.bool()):
        prompt = tokenizer.decode(episode[:P][real[:P]], skip_special_tokens=True)
        text = tokenizer.decode(episode[real], skip_special_tokens=True).removeprefix(prompt)
        texts.append(text.strip() if isinstance(example["prompt"], list) else text)
    return texts


def load_reward_fns(args):
    """The functions of --reward-fn by name, each a function of (rollout, tokenizer, args)."""
    reward_fns = {}
    run_file.cache_clear()  # of an earlier run in this process
    for spec in args.reward_fn:
        file = f"{TOY.parent}/rewards/model.py:" if spec == "reward_model" else ""
        name = spec.rpartition(":")[2]
        require(name not in reward_fns, f"--reward-fn: two functions have the name {name!r}")
        reward_fns[name] = partial(function_reward, load_function(file + spec, "--reward-fn"))
    require(len(args.reward_weights) in (0, len(reward_fns)), "--reward-weights needs a number for each --reward-fn")
    return reward_fns


def load_function(spec, flag):
    """The function or class that file.py:name stands for. The file imports from this folder and from PYTHONPATH."""
    file, _, name = spec.rpartition(":")
    require(Path(file).is_file(), f"{flag} {spec}: should be file.py:name, of a file that exists")
    members = run_file(file)
    require(name in members, f"{flag} {spec}: {file} has no {name}, only {[x for x in members if x[0] != '_']}")
    return members[name]


run_file = cache(runpy.run_path)  # once for all functions of a file: a judge is loaded once


def function_reward(function, rollout, tokenizer, args):
    """(B,) rewards of a user's function, with TRL's signature: f(prompts, completions, **columns) -> numbers or None.

    All arguments are lists with one value per row: prompts, prompts_text (as the policy read them), completions (texts
    or messages, as the prompts), prompt_ids, completion_ids, ended, and the dataset's columns; in a process, its share.
    """
    share = torch.arange(len(rollout.mask)).tensor_split(WORLD_SIZE)[RANK]
    r = rollout.select(share)
    columns = {name: [deepcopy(example[name]) for example in r.examples] for name in r.examples[0]}
    columns["prompts"] = columns["prompt"]
    columns["prompt_ids"] = [ids.tolist() for ids in columns.pop("input_ids")]
    columns["prompts_text"] = tokenizer.batch_decode(columns["prompt_ids"])
    columns["completions"] = decode(r, tokenizer)
    columns["completion_ids"] = [ids[real].tolist() for ids, real in zip(r.responses.cpu(), r.mask.cpu())]
    columns["ended"] = r.ended.tolist()
    if isinstance(columns["prompt"][0], list):
        columns["completions"] = [[{"role": "assistant", "content": text}] for text in columns["completions"]]
    with torch.random.fork_rng(devices=[]):  # the function's random numbers do not change the run's
        returned = function(**columns)
    rewards = read_rewards(returned, len(r.examples), getattr(function, "__name__", function))
    return all_gather(rewards.to(args.device))


def read_rewards(returned, n, name):
    """(n,) the rewards that a function returned: finite numbers, or None, which becomes NaN."""
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    values = values if isinstance(values, (list, tuple)) else []
    rewards = torch.tensor([0.0 if x is None else x for x in values], dtype=torch.float32)
    is_right = rewards.shape == (n,) and rewards.isfinite().all()
    require(is_right, f"{name} should return {n} numbers or None, one per row, not {len(values)}: {returned!r:.60}")
    return rewards.masked_fill(torch.tensor([x is None for x in values]), math.nan)


# --- Rows -------------------------------------------------------------------------------------------------------------
def load_prompts(args, tokenizer, split):
    """The rows of a split, each with the ids of its prompt as `input_ids`, without prompts that are too long."""
    rows = read_rows(args, split)
    if not rows:
        return []
    is_chat = isinstance(rows[0].get("prompt"), list)

    def text_of(row):
        """The prompt as the policy reads it. Messages are rendered up to where the assistant's answer begins."""
        prompt = row.get("prompt")
        if is_chat:
            check_messages(prompt, last="user")
            return render(prompt, row, tokenizer, add_generation_prompt=True)
        check_text(prompt, "prompt")
        return prompt

    ids = encode(parse(rows, text_of, f"{args.dataset}, {split}"), tokenizer, is_chat)
    prompts = [row | {"input_ids": x} for row, x in zip(rows, ids) if len(x) <= args.max_prompt_length]
    require(prompts, f"the shortest prompt has {min(map(len, ids))} tokens, more than --max-prompt-length")
    read = tokenizer.decode(prompts[0]["input_ids"])
    print(f"{split}: {len(prompts)} of {len(rows)} prompts are short enough. As the policy reads the first: {read!r}")
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
        except (SystemExit, TypeError, ValueError, TemplateError) as error:
            reason = str(error).removeprefix("error: ")
            sys.exit(f"error: row {number} of {where}: {reason} (recipes/data.py converts other forms)")
    return parsed


def read_rows(args, split):
    """The rows of SPLIT.jsonl or SPLIT.parquet in a folder, of one such file (its split is train), or of a split on the
    hub; [] if there is no validation. All rows have the same columns: None where the file has no value."""
    path = Path(args.dataset)
    if path.exists():
        files = path.iterdir() if path.is_dir() else [path]
        files = [file for file in files if file.suffix in (".jsonl", ".parquet")]
        splits = {"train" if file == path else file.stem: file for file in files}
    else:
        import datasets

        is_path = path.suffix in (".jsonl", ".parquet") or Path(args.dataset.split("/")[0]).expanduser().is_dir()
        require(not is_path, f"--dataset {path}: there is no such file or folder")
        splits = dict.fromkeys(datasets.get_dataset_split_names(args.dataset, args.dataset_config), path)
    if split not in splits and split in (None, "validation"):
        return []
    require(split in splits, f"{path} has no {split}.jsonl or .parquet, only {list(splits)}: see recipes/data.py")
    file = splits[split]
    if file.suffix == ".jsonl":
        rows = parse(file.read_bytes().splitlines(), lambda line: {**json.loads(line)}, file)
    else:  # a schema puts nulls, at any depth, where a row has no such key
        if file.suffix == ".parquet":
            rows = pyarrow.parquet.read_table(file).to_pylist()
        else:
            rows = datasets.load_dataset(args.dataset, args.dataset_config, split=split).to_list()
        text = json.dumps(rows, default=str)  # dates as texts
        rows = json.loads(text, object_hook=lambda x: {key: value for key, value in x.items() if value is not None})
    require(rows, f"{file} has no rows")
    print(f"{split}: {len(rows)} rows of {file}")
    columns = dict.fromkeys(column for row in rows for column in row)
    return [{column: row.get(column) for column in columns} for row in rows]


def check_text(text, column):
    """Refuses what is no text, is empty, or is a conversation as JSON text."""
    is_text = isinstance(text, str) and text.strip()
    is_text = is_text and not "".join(text[:40].split()).startswith(('[{"role"', '[{"content"'))
    require(is_text, f"{column!r} should be a text in all rows, or messages in all rows, but this is {text!r:.60}")


def check_messages(messages, last):
    """Refuses what is not a list of {role, content} that ends with a message of the role `last`."""
    require(isinstance(messages, list) and messages, f"these are no messages, as in other rows: {messages!r:.60}")
    for message in messages:
        is_message = isinstance(message, dict) and message.keys() == {"role", "content"}
        is_message = is_message and message["role"] in ("system", "user", "assistant")
        require(is_message, f"a message has a role (system, user, assistant) and a content, not {message!r:.60}")
        check_text(message["content"], "content")
    require(messages[-1]["role"] == last, f"the last message should be the {last}'s")


def render(messages, row, tokenizer, **options):
    """Renders messages with the chat template, which gets the row's `tools` and `chat_template_kwargs` (as in TRL).
    Refuses a row of which the template leaves something out."""
    options |= {"tools": row.get("tools"), "tokenize": False, "chat_template": None}  # a row cannot change these
    text = tokenizer.apply_chat_template(messages, **options, **(row.get("chat_template_kwargs") or {}))
    for message in messages:
        require(message["content"].strip() in text, f"the chat template leaves out {message['content']!r:.60}")
    return text


@cache
def turn_end(tokenizer):
    """What the chat template writes behind an answer, and its part up to the token that ends the turn, such as
    <|im_end|>, or else EOS. A placeholder shows it: an answer could hold these texts."""
    question = {"role": "user", "content": "Hi"}
    answer = {"role": "assistant", "content": "PLACEHOLDER"}
    tail = tokenizer.apply_chat_template([question, answer], tokenize=False).rpartition("PLACEHOLDER")[2]
    tokens = [str(token) for token in tokenizer.added_tokens_decoder.values()]
    ends = [tail.index(token) + len(token) for token in tokens if token in tail]
    return tail, tail[: min(ends)] if ends else tokenizer.eos_token


def encode(texts, tokenizer, is_chat=False):
    """Token ids of texts that may go on, without the EOS that some tokenizers add. A chat template has its BOS."""
    adds_eos = not is_chat and tokenizer("a")["input_ids"][-1] == tokenizer.eos_token_id
    unknown = {tokenizer.unk_token_id} - {tokenizer.eos_token_id}  # one token in GPT-2, which has a token for any text
    rows = []
    for start in tqdm(range(0, len(texts), 1000), desc="encoding", disable=len(texts) < 20_000):
        batch = tokenizer(texts[start : start + 1000], add_special_tokens=not is_chat)["input_ids"]
        for ids in batch:
            text = texts[len(rows)]
            require(unknown.isdisjoint(ids), f"row {len(rows) + 1}: --model has no token for a part of {text!r:.60}")
            rows.append(np.array(ids[:-1] if adds_eos else ids, np.int32))
    return rows


def pad(rows, tokenizer, args, side="right"):
    """Pads rows of token ids to one tensor (B, S); returns it, and its mask (B, S), true on real tokens."""
    options = {"padding_side": side, "return_attention_mask": True, "return_tensors": "pt"}
    padded = tokenizer.pad({"input_ids": rows}, **options).to(args.device)
    return padded["input_ids"].long(), padded["attention_mask"].bool()


def shuffled(n, seed, number):
    """The numbers below n, in an order that depends on the seed and the number of the pass."""
    generator = torch.Generator().manual_seed(make_seed(seed, number, 1))
    return torch.randperm(n, generator=generator).tolist()


def make_seed(*numbers):
    """One seed from several numbers; zeros at the end do not count. The draws of a step depend on no other step."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


# --- Models -----------------------------------------------------------------------------------------------------------
def load_tokenizer(name):
    """Loads a tokenizer from a folder or the hub."""
    is_path = Path(name.split("/")[0]).expanduser().is_dir()  # the library would look for a wrong path on the hub
    require(Path(name).exists() or not is_path, f"there is no folder {name}")
    tokenizer = AutoTokenizer.from_pretrained(name)
    require(tokenizer.eos_token_id is not None, f"the tokenizer of {name} has no EOS token, which ends a text")
    return tokenizer


def load_model(auto_class, name, new_weights=()):
    """Loads a model from a folder or the hub, in float32, with its tokenizer as `model.tokenizer`. Exits if weights are
    missing, which the library would draw at random; those of a new head may be."""
    require(not Path(name, "adapter_config.json").exists(), f"{name} is an adapter: see tools/merge.py")
    tokenizer = load_tokenizer(name)
    require(not hasattr(AutoConfig.from_pretrained(name), "quantization_config"), f"{name} is quantised: unsupported")
    options = {"dtype": torch.float32, "use_safetensors": True, "output_loading_info": True}
    model, info = auto_class.from_pretrained(name, **options)
    wrong = (info["missing_keys"] | info["unexpected_keys"]) - set(new_weights)
    require(not wrong, f"{name} is not a {type(model).__name__}: weights are missing or unexpected: {list(wrong)[:3]}")
    if tokenizer.pad_token_id not in range(model.get_input_embeddings().num_embeddings):
        tokenizer.pad_token = tokenizer.eos_token  # any token will do, since padding is masked
    model.tokenizer = tokenizer
    return model.eval()


def set_stop_tokens(model, is_chat, temperature):
    """Sets the tokens that end a text: EOS; those of the generation config that are added tokens (a default may be any
    token); in chats, the end of the template's turns. Other programs sample from the saved model as the run does."""
    tokenizer = model.tokenizer
    stored = model.generation_config.eos_token_id  # an int, a list, or None
    ids = {tokenizer.eos_token_id, *(stored if isinstance(stored, list) else [stored])}
    ids &= tokenizer.added_tokens_decoder.keys()
    if is_chat:
        ids.add(tokenizer.encode(turn_end(tokenizer)[1], add_special_tokens=False)[-1])
    model.stop_token_ids = sorted(ids)
    print(f"a text ends at one of {tokenizer.convert_ids_to_tokens(model.stop_token_ids)}")
    special = {"eos_token_id": model.stop_token_ids, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = GenerationConfig(do_sample=True, temperature=temperature, top_k=0, **special)


def add_adapters(model, r):
    """Freezes a model, and adds trained adapters of rank r to all of its linear layers (LoRA, Hu et al. 2021)."""
    from peft import LoraConfig

    model.add_adapter(LoraConfig(r=r, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))


def without_adapters(model, **inputs):
    """The output of a model with LoRA as it was before training, without a copy: its adapters are scaled by 0."""
    from peft.helpers import rescale_adapter_scale

    with rescale_adapter_scale(model, 0.0):
        return model(**inputs)


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
    """Makes the run's folder, joins torchrun's processes, and configures the libraries. Returns the settings."""
    name = f"runs/{Path(__file__).stem}__{args.seed}__{datetime.now():%Y%m%d-%H%M%S-%f}"
    folder = Path(args.resume or args.output_dir or name)
    if not RANK and not args.resume:
        folder.mkdir(parents=True, exist_ok=True)
        others = {file.name for file in folder.iterdir()} - {"args.json", ".lock", "wandb"}  # of a run without a step
        require(not others, f"--output-dir {folder} has files: {sorted(others)[:3]}")
    device_type = torch.device(args.device).type
    if "RANK" in os.environ and not dist.is_initialized():
        if device_type == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "gloo"  # Run.steps sums on the CPU
        if device_type != "cpu":
            backend = f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"
        dist.init_process_group(backend, timeout=timedelta(hours=2))  # a process may wait for a slow reward function
    ACT2FN["gelu_new"] = GELUTanh  # GPT-2's activation, in one operator instead of eight
    set_seed(args.seed)  # all processes draw the same new weights
    logging.set_verbosity_error()  # transformers would report each new head
    if device_type != "cpu":
        torch.set_float32_matmul_precision("high")  # TF32; plain float32 does not use the tensor cores
    if sys.platform == "linux":  # glibc keeps freed memory; asking for it again would take a tenth of a run
        ctypes.CDLL(None).mallopt(-4, 0)  # M_MMAP_MAX
        ctypes.CDLL(None).mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
    return replace(args, output_dir=str(folder))


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
    """Moves a model to the device. Recomputes its layers, or runs them in bfloat16, as the settings say. With several
    processes, each keeps a share of its weights, gradients and moments (ZeRO, 1910.02054), by torch's fully_shard."""
    is_trained = any(p.requires_grad for p in model.parameters())
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for layer in layers:
        if args.gradient_checkpointing and is_trained:
            recompute_activations(layer)
        for module in layer.modules():
            if args.bf16 and isinstance(module, nn.Linear) and not module.weight.requires_grad:
                module.bfloat16()  # once: autocast would cast a frozen weight at each use
    if WORLD_SIZE > 1 and (is_trained or args.zero_stage == 3):
        mesh = dist.init_device_mesh(torch.device(args.device).type, (WORLD_SIZE,))
        roots = [model.base_model, model.score] if hasattr(model, "score") else [model]  # what is called
        norms = [module for module in model.modules() if "Norm" in type(module).__name__]  # one group, in float32
        for module in ([norms] if norms else []) + layers + roots:
            sent = torch.bfloat16 if args.bf16 and module in layers else None  # the type of what is gathered
            precision = MixedPrecisionPolicy(sent, torch.float32, cast_forward_inputs=False)
            fully_shard(module, mesh=mesh, reshard_after_forward=args.zero_stage == 3, mp_policy=precision)
    model.to(args.device)


def shards(model):
    """The parts of a model that are divided among processes."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@contextmanager
def gathered(model, args):
    """Within this context, a process keeps the weights that it gathers: they are sent once, not for each token."""
    for module in shards(model):
        module.set_reshard_after_forward(False, recurse=False)
    yield
    for module in shards(model):
        module.set_reshard_after_forward(args.zero_stage == 3, recurse=False)
        module.reshard()


# --- The run
class Run:
    """The output of a run: progress bar, metrics.jsonl, W&B, checkpoints, and at the end the model.
    `state` is what one step hands to the next. On a CPU, a resumed run equals an uninterrupted one bit for bit."""

    def __init__(self, args, num_steps, optimizer, schedule, state, **models):
        self.args = args
        self.num_steps = num_steps
        self.optimizer = optimizer
        self.state = state
        self.models = nn.ModuleDict(models)
        self.step = 0
        self.stop_requested = False
        self.lines = []  # of metrics.jsonl; that of step 0 waits for step 1
        self.output = Path(args.output_dir)  # only process 0 writes to it
        self.lock = FileLock(self.output / ".lock")  # until the process ends
        if not RANK:
            self.lock.acquire(timeout=0)  # or another run writes to the folder
        if args.resume:
            self.restore()
        for _ in range(self.step):
            schedule.step()
        # after an optimiser step, gathered weights are out of date
        optimizer.register_step_post_hook(lambda *_: [part.reshard() for part in shards(self.models)])
        self.bar = tqdm(total=num_steps, initial=self.step, dynamic_ncols=True, disable=RANK > 0)
        self.wandb = None
        if RANK:
            return
        revision = subprocess.getoutput(f"git -C '{TOY.parent}' describe --always --dirty")  # or git's error
        (self.output / "args.json").write_text(json.dumps(asdict(args) | {"revision": revision}, indent=2))
        if args.track:
            import wandb

            self.wandb = wandb.init(id=self.output.name, resume="allow", dir=self.output, config=asdict(args))

    def steps(self):
        """Yields the remaining steps, and saves checkpoints. Ctrl-C, SIGTERM and SIGHUP end the loop after a step."""
        numbers = [number for number in signal.Signals if number.name in ("SIGINT", "SIGTERM", "SIGHUP")]
        numbers = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]  # which nohup sets
        handlers = {number: signal.signal(number, self.on_signal) for number in numbers}
        while self.step < self.num_steps and not self.stop_requested:
            self.step += 1
            self.step_started = time.perf_counter()
            yield self.step
            self.stop_requested = all_reduce(torch.tensor(int(self.stop_requested))).item() > 0  # in any process
            if self.stop_requested or self.step % self.args.save_steps == 0:
                self.save()
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def on_signal(self, number, _):
        """Ends the run after this step; a second signal of the kind ends it at once."""
        self.stop_requested = True
        signal.signal(number, signal.SIG_DFL)
        self.bar.write(f"{signal.Signals(number).name}: ends after this step, with a checkpoint. Once more: ends now")

    def log(self, stats, *shown):
        """Logs to metrics.jsonl and W&B, and shows the metrics named in `shown` beside the bar."""
        stats["perf/peak_memory_mb"] = torch.cuda.max_memory_allocated() / 2**20  # 0 on a CPU
        self.bar.set_postfix({name: stats[name] for name in shown if name in stats}, refresh=False)
        self.bar.update(self.step - self.bar.n)
        line = {name: x if math.isfinite(x) else None for name, x in stats.items()}  # JSON has no NaN
        self.lines.append(json.dumps(line) + "\n")
        if self.step and not RANK:
            with open(self.output / "metrics.jsonl", "a") as file:
                file.writelines(self.lines)
            self.lines.clear()
        if self.wandb:
            self.wandb.log(stats, step=self.step)

    def save(self):
        """Writes a checkpoint, under another name until it is complete, and removes old ones."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
        weights, optimizer = get_state_dict(self.models, self.optimizer, options=options)
        if RANK:
            return
        num_bytes = (self.output / "metrics.jsonl").stat().st_size
        weights = {name: weights[name] for name, p in self.models.named_parameters() if p.requires_grad}  # tied: once
        saved = {"step": self.step, "state": self.state, "num_bytes": num_bytes}
        saved |= {"weights": weights, "moments": optimizer["state"]}
        folder = self.output / "checkpoints"
        folder.mkdir(exist_ok=True)
        unfinished = folder / "unfinished.pt"
        try:
            torch.save(saved, unfinished)
            unfinished.rename(folder / f"step-{self.step:08d}.pt")
        finally:
            unfinished.unlink(missing_ok=True)  # if the disk is full
        for old in sorted(folder.glob("step-*.pt"))[: -self.args.save_total_limit]:
            old.unlink()

    def restore(self):
        """Continues from the newest checkpoint, with the settings of this run."""
        found = sorted(self.output.glob("checkpoints/step-*.pt"))
        require(found, f"{self.output} has no checkpoint")
        saved = torch.load(found[-1], map_location="cpu", weights_only=True)
        options = StateDictOptions(full_state_dict=True, strict=False)  # it has the trained weights alone
        _, optimizer = get_state_dict(self.models, self.optimizer, options=options)
        optimizer["state"] = saved["moments"]
        both = {"model_state_dict": saved["weights"], "optim_state_dict": optimizer}
        wrong = set_state_dict(self.models, self.optimizer, **both, options=options).unexpected_keys
        require(not wrong, f"the model has no weights of these names, which the checkpoint has: {wrong[:3]}")
        self.step = saved["step"]
        self.state.update(saved["state"])
        if not RANK:
            os.truncate(self.output / "metrics.jsonl", saved["num_bytes"])  # without what came after the checkpoint

    def finish(self):
        """Saves the model."""
        self.bar.close()
        save_model(self.models["model"], self.output)
        print(f"saved in {self.output}: the model, and metrics.jsonl (tools/card.py draws it)")
        if self.step < self.num_steps:
            print(f"to continue from step {self.step}: --resume {self.output}")
        self.lock.release()


def save_model(model, folder):
    """Saves the model (safetensors) and its tokenizer; with LoRA the adapter alone (see tools/merge.py)."""
    is_adapter = hasattr(model, "peft_config")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=is_adapter)
    weights = get_model_state_dict(model, options=options)  # the shares of all processes
    weights = {name: x for name, x in weights.items() if name not in model.all_tied_weights_keys}
    if not RANK:
        model.save_pretrained(folder, state_dict=weights)
        model.config.save_pretrained(folder)
        model.tokenizer.save_pretrained(folder)


def read_command_line():
    """Reads the settings from the command line. A resumed run keeps its settings, except those on the command line. Its
    files of code run only if the command line names them again: someone else may have written the folder."""
    read = partial(tyro.cli, Args, description=__doc__.splitlines()[0])
    given = read()
    if not given.resume:
        return given
    saved = json.loads(Path(given.resume, "args.json").read_text())
    args = read(default=Args(**saved))
    for name in {"reward_fn", "env"} & saved.keys():
        is_named = getattr(args, name) == getattr(given, name)
        require(is_named, f"--resume: give the option that names code again: {name} {getattr(args, name)}")
    return args


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a letter that the terminal lacks ends no run
    if RANK:
        sys.stdout = open(os.devnull, "w")  # only process 0 prints
    args = read_command_line()
    try:
        train(args)
    finally:
        print(file=sys.stderr)  # ends the line of the progress bar
    if dist.is_initialized():
        dist.destroy_process_group()
