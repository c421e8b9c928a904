# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.23.0", "datasets==5.2.0", "tyro==1.0.17", "wandb==0.31.0",
#     "pydantic==2.14.3", "tqdm==4.70.1"]
# ///
"""GRPO with an environment (a game, a tool or a user), over several turns: policy + environment -> better policy.

An environment starts from a row of the data. The policy pi, a language model, writes a turn, the environment answers,
and so on, until the episode is over. For each batch of rows, G episodes from each (`num_generations`):
  1. play       one stream of tokens per episode: the policy samples y_t ~ pi(. | all tokens before), at the given
                temperature, up to a stop token; then the environment's answer is appended, and so on
  2. score      the sum of the rewards of all turns; with `beta`, ref_logprobs of a frozen copy of the first pi
  3. advantage  A_i = (score_i - mean of its group) / standard deviation of the batch (`scale_rewards`, `credit`)
  4. loss       ratio_t = pi(y_t) / pi_old(y_t), where pi_old is the policy of step 1;
                loss_t = max(-A_i ratio_t, -A_i clip(ratio_t, 1-eps, 1+eps_high)) [+ beta ratio_t KL_t];
                KL_t = q/p - 1 - log(q/p), q = pi_ref(y_t), p = pi(y_t)
                the loss is the mean over the tokens that the policy wrote (DAPO, TRL)
  5. update     `num_ppo_epochs` passes over the batch, each with `num_mini_batches` optimiser steps

Shapes: B episodes in a batch (b in a micro-batch), P prompt tokens, T tokens of a stream, V vocabulary. Below, a group
of two games in which the policy guesses a number, 6. E is EOS, which ends a turn of the policy, not the episode. The
values at the dots do not matter: they are masked.

  input_ids  1 to 15 : | 8  E lower   4   E  higher  6   E    row 0: prompt (B, P), stream (B, T)
             1 to 15 : | 4  E higher  6   E    .     .   .    row 1: a group's rows are neighbours
  mask                 | 1  1   1     1   1    1     1   1    until the episode is over
                       | 1  1   1     1   1    0     0   0
  written              | 1  1   0     1   1    0     1   1    the policy's tokens: only these are in the loss
                       | 1  1   0     1   1    0     0   0
  turn                 | 0  0   1     1   1    2     2   2    number of turns that are finished
                       | 0  0   1     1   1    .     .   .
  rewards              | 0  0   0     0   0    0     0  .75   on the token that ends a turn
                       | 0  0   0     0  .88   0     0   0

Papers: GRPO 2402.03300; several turns: RAGEN 2504.20073, Search-R1 2503.09516; DAPO 2503.14476; KL: DeepSeek-V3.2
2512.02556. In short: lecture/agent.py, 310 lines.

  python agent.py    # guess a number: offline, two minutes on a CPU, guesses 4.3 -> 3.7, in likely play 3.3
  python agent.py --env rewards/calculator.py:Calculator --dataset problems.jsonl --model Qwen/Qwen3-0.6B --bf16 \\
      --num-generations 8 --batch-size 64 --response-length 1024 --max-turns 6
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
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, StaticCache
from transformers import get_scheduler, logging, set_seed
from transformers.activations import ACT2FN, GELUTanh
from transformers.modeling_layers import GradientCheckpointingLayer

TOY = Path(__file__).resolve().parent / "toy"  # the embedded models and data

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
    num_generations: Annotated[int, Field(ge=2)] = 32  # G, episodes per row; more: a better baseline
    credit: Literal["episode", "turn"] = "episode"  # one advantage per episode, or per turn (then scaled by the batch)
    scale_rewards: Literal["group", "batch", "none"] = "batch"  # whose standard deviation divides advantages
    epsilon: PositiveFloat = 0.2  # the ratio is clipped to 1 - epsilon ... 1 + epsilon_high
    epsilon_high: PositiveFloat | None = None  # by default epsilon (DAPO: 0.28). With one step a batch, the ratio is 1
    num_ppo_epochs: Annotated[PositiveInt, alias("--num-iterations")] = 1  # passes over each batch. Many: off policy
    num_mini_batches: PositiveInt = 1  # optimiser steps in one pass over the batch (TRL 0.16)
    beta: NonNegativeFloat = 0.0  # weight of the KL in the loss. 0: no reference is loaded (TRL: 0; DeepSeekMath: 0.04)
    # --- Rollout ---
    env: str = f"{TOY}/guess/make.py:Game"  # file.py:name of a class, with step(text) -> answer, reward, is_over
    response_length: Annotated[PositiveInt, alias("--max-completion-length")] = 24  # tokens of an episode, answers too
    max_turns: PositiveInt | None = None  # maximum turns of the policy in an episode
    temperature: PositiveFloat = 1.0  # divides the logits in rollout, reference and loss (TRL). Lower explores less
    local_rollout_forward_batch_size: PositiveInt | None = None  # episodes played at once; by default 4 micro-batches
    # --- Optimisation ---
    learning_rate: Annotated[PositiveFloat | None, alias("--lr")] = None  # None: by the model's size; LoRA: 10 times
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup", "polynomial"] = "linear"  # TRL's
    warmup_ratio: Share = 0.0  # share of the run in which the learning rate warms up from 0
    weight_decay: NonNegativeFloat = 0.0  # weight decay of AdamW
    adam_betas: tuple[Share, Share] = (0.9, 0.999)  # betas of AdamW (OpenRLHF: 0.9 0.95)
    adam_epsilon: PositiveFloat = 1e-8  # epsilon of AdamW (torch and TRL; N+ details: 1e-5)
    max_grad_norm: PositiveFloat = 1.0  # the gradient is clipped to this norm
    # --- Batch sizes ---
    batch_size: PositiveInt = 512  # episodes per update, on all GPUs together
    micro_batch_size: PositiveInt | None = None  # episodes per pass; by default 2048 tokens on a CPU, 8192 on a GPU
    # --- Models: a folder, or a name on the hub ---
    model: Annotated[str, alias("--model-name-or-path")] = f"{TOY}/guess/sft"  # policy to start from
    lora_r: NonNegativeInt = 0  # rank of LoRA adapters (peft), 0 for none
    bf16: bool = False  # models run in bfloat16 (autocast), trained weights stay in float32. Slow on most CPUs
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: far less memory, a third slower
    zero_stage: Literal[2, 3] = 2  # processes divide gradients and moments among them; 3: weights, too
    # --- Data. A row has `prompt`, a text or messages that end with the user's; the environment gets all columns ---
    dataset: Annotated[str, alias("--dataset-name")] = f"{TOY}/guess/data/prompts"  # folder of SPLIT.jsonl, or hub
    dataset_config: Annotated[str | None, alias("--dataset-config-name")] = None  # which configuration of a hub dataset
    dataset_train_split: str = "train"  # split to train on
    dataset_test_split: str | None = "validation"  # split to evaluate on, if there is one
    max_prompt_length: PositiveInt = 512  # in tokens; longer prompts are dropped, and their number printed (N+ details)
    # --- Run ---
    seed: NonNegativeInt = 1  # seed of episodes, order of rows, mini-batches, and adapters
    total_episodes: PositiveInt = 51_200  # number of episodes to train on
    output_dir: str | None = None  # folder for all output; by default a new folder runs/SCRIPT__SEED__TIME
    resume: Annotated[str | None, alias("--resume-from-checkpoint")] = None  # folder of a run to continue
    device: str = "cuda" if torch.cuda.is_available() else "cpu"  # cpu, cuda, mps; by default cuda if there is one
    eval_steps: PositiveInt = 10  # updates between evaluations; there is one before the first update and after the last
    num_eval_prompts: NonNegativeInt = 16  # held-out rows of an evaluation, with G episodes from each; 0 for none
    save_steps: PositiveInt = 10  # updates between checkpoints, which hold the full state of the run
    save_total_limit: PositiveInt = 1  # checkpoints to keep
    num_sample_generations: NonNegativeInt = 10  # about how many times to print four episodes (TRL)
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works without an account)


# --- The loop, with the steps of the docstring ------------------------------------------------------------------------
def train(args):
    """Trains the policy. Saves it in the run's folder, with its metrics."""
    require(args.credit == "episode" or args.scale_rewards == "batch", "--credit turn goes with --scale-rewards batch")
    args = start(args)
    tokenizer = load_tokenizer(args.model)
    prompts = load_prompts(args, tokenizer, args.dataset_train_split)
    eval_prompts = load_prompts(args, tokenizer, args.dataset_test_split)[: args.num_eval_prompts]
    eval_prompts = eval_prompts[len(eval_prompts) % WORLD_SIZE :]  # all processes have equal shares
    run_file.cache_clear()  # of an earlier run in this process
    policy, reference = load_models(args)
    policy.environment = load_function(args.env, "--env")
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
        first = evaluate(policy, reference, eval_prompts, args)
        if first["eval/reward_std"] == 0 or first["eval/ended"] < 0.5:
            print("held-out scores are all equal (see --env), or few episodes end (see --response-length)")
        run.log(first, "eval/reward", "eval/turns")
    for step in run.steps():
        set_seed(make_seed(args.seed, step))

        # 1. Play
        examples = [prompts[i] for i in order[(step - 1) * B // G : step * B // G]]
        rollout = sample_batch(policy, examples, args)

        # 2. Score
        stats = reread_logprobs(policy, rollout, args)
        if args.beta:
            rollout.ref_logprobs = read_logprobs(reference, rollout, args)
        rollout.scores = rollout.rewards.sum(1)

        # 3. Advantage
        rollout.advantages = group_advantages(rollout.scores, G, args.scale_rewards)[:, None]  # (B, 1)
        if args.credit == "turn":
            rollout.advantages = turn_advantages(rollout.rewards, rollout.turn, rollout.written, G)  # (B, T)

        # 4. Loss, and 5. update
        stats |= update(policy, optimizer, rollout, args)
        require(step > 1 or stats["policy/first_ratio_error"] < 0.1, "the first ratio is not 1: is a mask ignored?")

        stats |= rollout_stats(rollout, args)
        stats |= {"learning_rate": optimizer.param_groups[0]["lr"], "episode": step * B}
        if step % args.eval_steps == 0 or step == num_updates:
            stats |= evaluate(policy, reference, eval_prompts, args)
        run.log(stats, "reward", "turns", "eval/reward", "eval/turns")
        if args.num_sample_generations and (step - 1) % max(1, num_updates // args.num_sample_generations) == 0:
            show_samples(run, rollout, tokenizer)
        schedule.step()
    run.finish()


# --- 1. Play ----------------------------------------------------------------------------------------------------------
@dataclass
class Rollout:
    """A batch of episodes: B prompts, and the stream that follows each. A field is None until its step has run."""

    prompts: Tensor  # (B, P), left-padded
    prompt_mask: Tensor  # (B, P), true on real tokens
    responses: Tensor  # (B, T), the streams, right-padded
    old_logprobs: Tensor  # (B, T), under the policy that sampled the responses
    mask: Tensor  # (B, T), true until the episode is over
    written: Tensor  # (B, T), true on tokens from the policy, not from the environment
    turn: Tensor  # (B, T), number of turns that the policy has finished
    rewards: Tensor  # (B, T), the reward of a turn, on its last token
    ended: Tensor  # (B,), true if the environment ended the episode, after a stop token
    examples: list[dict]  # the B rows of the dataset
    ref_logprobs: Tensor | None = None  # (B, T), under the reference, with --beta
    scores: Tensor | None = None  # (B,), the sum of the rewards
    advantages: Tensor | None = None  # (B, 1), or (B, T) with --credit turn

    # the fields with a column for each token, which `select` shortens
    PROMPT_FIELDS = ("prompts", "prompt_mask")
    TOKEN_FIELDS = ("responses", "old_logprobs", "mask", "written", "turn", "rewards")
    TOKEN_FIELDS += ("ref_logprobs", "advantages")

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


@torch.no_grad()
def play(policy, examples, prompts, prompt_mask, uniforms, args):
    """Streams (B, T) after prompts (B, P), one for each example, from uniforms (B, T). Also returns logprobs, mask,
    written, turn and rewards, all (B, T), and ended (B,).

    In each step, the next token of a row comes from the environment's answer, if some of it is left, and else from the
    policy. Only the answer is encoded, never a sampled token. A turn that the end of the stream cuts off goes to the
    game as it is. Two games of the number 6:
        stream   8  E  lower  4  E ...   At t = 1, E ends a turn: answers [["lower"], []], over [0, 1], starts [3, 2].
                 6  E  .      .  .       So at t = 2, row 0 reads: writes [0, 0]; and at t = 3 it writes: [1, 0]."""
    B, T = uniforms.shape
    games = [policy.environment(deepcopy(example)) for example in examples]
    answers = [[] for _ in games]  # tokens of each row's answer that are still to be added
    starts = [0] * B  # where the current turn of each row begins
    over = torch.zeros(B, dtype=torch.bool)  # whether the episode is over
    ended = torch.zeros(B, dtype=torch.bool)  # whether the game ended it, after a stop token
    turn = torch.zeros(B, dtype=torch.long)  # number of turns that the policy has finished
    stream = torch.zeros(B, T, dtype=torch.long)
    rewards = torch.zeros(B, T)
    columns = []  # of logprobs, mask, written and turn, (B,) each
    stops = torch.tensor(policy.stop_token_ids)
    cache = OneTypeCache(config=policy.config, max_cache_len=prompts.shape[1] + T)
    options = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    tokens = prompts  # (B, P), then (B, 1): the cache keeps the rest
    attention_mask = prompt_mask.long()  # (B, P), one column more after each pass
    for t in range(T):
        logits = forward(policy, tokens, attention_mask, **options).logits  # (B, 1, V)
        scaled = logits[:, -1].float() / args.temperature  # (B, V)
        drawn, logprob = sample_categorical(scaled, uniforms[:, t])  # (B,) each
        writes = ~over & torch.tensor([not answer for answer in answers])  # (B,)
        columns.append((logprob.cpu(), ~over, writes, turn.clone()))
        pairs = zip(answers, drawn.tolist())
        added = [answer.pop(0) if answer else token for answer, token in pairs]
        stream[:, t] = torch.tensor(added)
        tokens = stream[:, [t]].to(prompts.device)  # (B, 1)

        is_end = torch.isin(stream[:, t], stops) | (t == T - 1)  # (B,)
        turn_ends = writes & is_end
        turn += turn_ends
        for i in turn_ends.nonzero().flatten().tolist():
            text = policy.tokenizer.decode(stream[i, starts[i] : t + 1], skip_special_tokens=True)
            answer, reward, is_over = games[i].step(text)
            rewards[i, t] = reward or 0.0  # None counts as 0
            ended[i] = is_over and stream[i, t] in stops
            over[i] = is_over or turn[i] == args.max_turns
            if not over[i]:
                answers[i] = encode_answer(answer, games[i], examples[i], policy)
            starts[i] = t + 1 + len(answers[i])
        if over.all():
            break
        attention_mask = F.pad(attention_mask, (0, 1), value=1)
    columns = [torch.stack(column, 1) for column in zip(*columns)]
    columns = [F.pad(column, (0, T - 1 - t)) for column in columns]  # (B, T) each
    return [x.to(prompts.device) for x in (stream, *columns, rewards, ended)]


def encode_answer(answer, game, example, policy):
    """Token ids of an environment's answer. In a conversation, with the chat template's text around it; its role is the
    environment's `role`, by default "user". To find this text, the template renders a turn of the policy, with and
    without the answer. It has a thought: a template that deletes thoughts, which the policy has read, is refused."""
    tokenizer = policy.tokenizer
    if isinstance(example["prompt"], list):
        turns = [*example["prompt"], {"role": "assistant", "content": "<think>\nSo?\n</think>\n\nSo."}]
        before = render_answer(turns, example, tokenizer)  # up to and including the token that ends the turn
        turns.append({"role": getattr(game, "role", "user"), "content": answer})
        text = render(turns, example, tokenizer, add_generation_prompt=True)
        is_told = text.startswith(before) and answer.strip() in text.removeprefix(before)
        require(is_told, "--env: the chat template changes earlier turns, or drops an answer")
        answer = text.removeprefix(before)
    return tokenizer.encode(answer, add_special_tokens=False)


def sample_batch(policy, examples, args):
    """Step 1: plays G episodes from each example."""
    examples = [example for example in examples for _ in range(args.num_generations)]
    ids = [example["input_ids"] for example in examples]
    prompts, prompt_mask = pad(ids, policy.tokenizer, args, "left")  # (B, P)
    uniforms = torch.rand(len(ids), args.response_length).to(prompts.device)  # drawn on the CPU, for any device
    share = torch.arange(len(ids)).tensor_split(WORLD_SIZE)[RANK]  # row numbers of this process
    parts = []
    with autocast(args), gathered(policy, args), torch.random.fork_rng(devices=[]):  # games may draw numbers, too
        for index in share.split(args.local_rollout_forward_batch_size):
            rows = [examples[i] for i in index]
            part = play(policy, rows, prompts[index], prompt_mask[index], uniforms[index], args)
            parts.append(part)
    columns = [all_gather(torch.cat(x)) for x in zip(*parts)]  # the streams, and what play returns with them
    rollout = Rollout(prompts, prompt_mask, *columns, examples)
    require(rollout.rewards.isfinite().all(), "--env: a reward is not a finite number")
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
    P-1+t of the input predicts response token t, both counted from 0."""
    P, T = r.prompts.shape[1], r.responses.shape[1]
    positions = torch.arange(P - 1, P + T - 1, device=r.mask.device)
    with autocast(args):
        logits = forward(model, *r.joined(), use_cache=False, logits_to_keep=positions).logits  # (b, T, V)
    return SlicedLogprobs.apply(logits, r.responses, args.temperature, with_entropy)


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
    differences = (rollout.old_logprobs - sampled)[rollout.written].abs()
    require(differences.mean() < 0.3, "sampler and trainer differ: does the model ignore its cache, or positions?")
    name = "sampling/sampling_logp_difference"
    return {f"{name}/mean": differences.mean().item(), f"{name}/max": differences.max().item()}


# --- 3. Advantage -----------------------------------------------------------------------------------------------------
def group_advantages(scores, G, scale):
    """(B,) each score minus the mean of its group, G neighbouring rows, divided by the standard deviation of the group
    or of the batch. With G = 4 and scale none, scores [1, 0, 0, 0] give [.75, -.25, -.25, -.25]. Divided by the group's
    deviation, .5: [1.5, -.5, -.5, -.5]. Rare successes and rare failures weigh more."""
    groups = scores.view(-1, G)
    groups = groups - groups[:, :1]  # so that equal scores give exactly 0, in spite of rounding
    advantages = groups - groups.mean(1, keepdim=True)  # (B/G, G)
    if scale == "group":
        advantages = advantages / (groups.std(1, keepdim=True) + 1e-4)  # 1e-4: never 0 (TRL)
    if scale == "batch":
        advantages = advantages / (scores.std() + 1e-4)
    return advantages.flatten()


def turn_advantages(rewards, turn, written, G):
    """(B, T) reward from each turn on, minus the mean of the episodes of its group that reach this turn, divided by the
    scores' std. A turn is not credited with the rewards before it."""
    K = turn.max().item() + 1
    by_turn = rewards.new_zeros(len(turn), K).scatter_add(1, turn, rewards)  # (B, K)
    from_turn_on = by_turn.flip(1).cumsum(1).flip(1)  # (B, K)
    lengths = rewards.new_zeros(len(turn), K).scatter_add(1, turn, written.to(rewards))  # (B, K)
    groups = from_turn_on.masked_fill(lengths == 0, torch.nan).view(-1, G, K)
    advantages = (groups - groups.nanmean(1, keepdim=True)).view(-1, K).nan_to_num()
    return advantages.gather(1, turn) / (rewards.sum(1).std() + 1e-4)


# --- 4. Loss ----------------------------------------------------------------------------------------------------------
def masked_sum(x, mask):
    """Sums over real tokens. Values on padding are ignored, even NaN."""
    return x.masked_fill(~mask, 0.0).sum()


def policy_loss(logprobs, old_logprobs, advantages, mask, lower, upper):
    """Clipped losses (B, T) (PPO, eq. 7), the ratio, and where the clipped loss was the larger. There the gradient is
    0: the ratio has left the clip range in the direction that the advantage favours."""
    ratio = (logprobs - old_logprobs).masked_fill(~mask, 0.0).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(lower, upper)
    return torch.max(unclipped, clipped), ratio, clipped > unclipped


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

    The gradient of a mini-batch is a sum over its tokens, divided by the tokens of an average mini-batch, however it is
    split into micro-batches and among processes: gradients are averaged over processes, so each divides by its share.
    """
    bounds = 1 - args.epsilon, 1 + (args.epsilon_high or args.epsilon)
    num_tokens = rollout.written.sum().clamp(min=1) / (args.num_mini_batches * WORLD_SIZE)  # on average
    logs = []  # the metrics of each mini-batch
    for _ in range(args.num_ppo_epochs):
        order = torch.randperm(args.batch_size).to(args.device)
        for mini_batch in order.split(args.batch_size // args.num_mini_batches):  # row numbers
            optimizer.zero_grad()
            meter = Meter()
            for index in rollout.micro_batches(mini_batch, args):
                r = rollout.select(index)
                mask = r.written
                logprobs, entropy = logprobs_under(policy, r, args, with_entropy=True)  # (b, T) each
                losses, ratio, clipped = policy_loss(logprobs, r.old_logprobs, r.advantages, mask, *bounds)
                kl = torch.zeros_like(logprobs)
                if args.beta:
                    log_ratio = r.ref_logprobs.where(mask, logprobs) - logprobs  # (b, T) 0 outside the loss
                    kl = torch.expm1(log_ratio) - log_ratio  # k3: unbiased, and never negative (Schulman 2020)
                    kl = kl * ratio  # so that its gradient is an unbiased estimate of the KL's (DeepSeek-V3.2)
                loss = masked_sum((losses + args.beta * kl) / num_tokens, mask)
                loss.backward()
                metrics = {
                    "kl": kl,
                    "entropy": entropy,
                    "val/ratio": ratio,
                    "clip_ratio/region_mean": clipped,
                    "policy/first_ratio_error": (ratio - 1).abs(),
                }
                meter.add(metrics, mask)
            norm = nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], args.max_grad_norm).item()
            if math.isfinite(norm):  # otherwise the step would turn the weights into NaN
                optimizer.step()
            logs.append(meter.means() | {"grad_norm": norm})
    optimizer.zero_grad()
    stats = {name: np.mean([log[name] for log in logs]).item() for name in logs[0]}  # as in TRL
    stats["policy/first_ratio_error"] = logs[0]["policy/first_ratio_error"]  # before the first step
    stats["val/skipped_steps"] = sum(not math.isfinite(log["grad_norm"]) for log in logs)
    return stats


# === End of the algorithm. Next: its metrics, then what every program of this kind needs =============================
def rollout_stats(rollout, args):
    """The metrics of a batch before the update, under TRL's names."""
    scores, written = rollout.scores, rollout.written
    groups = scores.view(-1, args.num_generations)  # (B/G, G)
    stats = {
        "reward": scores.mean(),
        "reward_std": scores.std(),
        "objective/scores": scores.mean(),
        "frac_reward_zero_std": (groups == groups[:, :1]).all(1).float().mean(),
        "turns": (rollout.turn * written).amax(1).add(1).float().mean(),
        "ended": rollout.ended.float().mean(),
        "completions/mean_length": written.sum(1).float().mean(),
    }
    if args.beta:
        k1 = rollout.old_logprobs - rollout.ref_logprobs
        stats["objective/kl"] = masked_sum(k1, written) / len(k1)
    return {name: x.item() for name, x in stats.items()}


def evaluate(policy, reference, prompts, args):
    """Metrics of G episodes from each held-out row, eval/NAME. The random numbers are the same in each evaluation."""
    if not prompts:
        return {}
    set_seed(make_seed(args.seed, 0))
    rollout = sample_batch(policy, prompts, args)
    reread_logprobs(policy, rollout, args)
    if args.beta:
        rollout.ref_logprobs = read_logprobs(reference, rollout, args)
    rollout.scores = rollout.rewards.sum(1)
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
    if args.lora_r:
        add_adapters(policy, args.lora_r)
    return policy, reference


def choose_sizes(args, policy, prompts, eval_prompts):
    """Returns the settings with learning rate and batch sizes filled in, and prints them."""
    longest = max(len(row["input_ids"]) for row in prompts + eval_prompts) + args.response_length
    config = policy.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", longest)
    require(longest <= limit, f"a prompt and --response-length have {longest} tokens, but {args.model} reads {limit}")
    size = policy.num_parameters()
    # 1e-5 for a model of GPT-2's size, more for smaller ones, at least 3e-6 (the N+ details' rate from 1B up)
    rate = max(3e-6, 1e-5 * (124e6 / size) ** 0.6) * (10 if args.lora_r else 1)
    rate = args.learning_rate or float(f"{rate:.2g}")
    tokens = 2048 if args.device == "cpu" else min(8192, 2**29 // config.vocab_size)  # of a pass: at most 2**29 logits
    rows = args.micro_batch_size or max(1, tokens // longest)
    parts = math.lcm(args.num_mini_batches * WORLD_SIZE, args.num_generations)
    require(args.batch_size % parts == 0, f"--batch-size {args.batch_size} is no multiple of {parts}, for whole groups")
    num_updates = args.total_episodes // args.batch_size
    require(num_updates, f"--total-episodes {args.total_episodes} is less than a batch of {args.batch_size}")
    sampled = args.local_rollout_forward_batch_size or 4 * rows
    print(f"policy: {args.model}, {size / 1e6:.2f}M parameters on {args.device}, learning rate {rate:.2g}")
    print(f"{num_updates} updates of {args.batch_size} episodes, at most {sampled} played, {rows} trained on at once")
    return replace(args, learning_rate=rate, micro_batch_size=rows, local_rollout_forward_batch_size=sampled)


# === From here on, a function has the same text in all scripts that have it ==========================================
# --- Rewards ----------------------------------------------------------------------------------------------------------
def load_function(spec, flag):
    """The function or class that file.py:name stands for. The file imports from this folder and from PYTHONPATH."""
    file, _, name = spec.rpartition(":")
    require(Path(file).is_file(), f"{flag} {spec}: should be file.py:name, of a file that exists")
    members = run_file(file)
    require(name in members, f"{flag} {spec}: {file} has no {name}, only {[x for x in members if x[0] != '_']}")
    return members[name]


run_file = cache(runpy.run_path)  # once for all functions of a file: a judge is loaded once


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


def render_answer(messages, row, tokenizer):
    """Renders messages up to and including the token that ends the last one, such as <|im_end|>, or else EOS."""
    tail, end = turn_end(tokenizer)
    text = render(messages, row, tokenizer)
    require(text.endswith(tail), f"the chat template ends this answer in another way than others: {text[-60:]!r}")
    return text.removesuffix(tail) + end


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
