# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0", "transformers==5.23.0", "datasets==5.2.0", "tyro==1.0.17", "wandb==0.31.0",
#     "matplotlib==3.11.2", "pydantic==2.14.3", "tqdm==4.70.1",
# ]
# ///
"""GRPO with an environment (a game, a tool or a user), over several turns: policy + environment -> better policy.

An environment starts from a row of the data. The policy pi, a language model, writes a turn, the environment answers,
and so on, until the episode is over. For each batch of rows, G episodes from each (`num_generations`):
  1. play       one stream of tokens per episode: the policy samples y_t ~ pi(. | all tokens before), at the given
                temperature, up to a stop token; then the environment's answer is appended, and so on
  2. score      the sum of the rewards of all turns
  3. advantage  A_i = (score_i - mean of its group) / standard deviation of the batch (`scale_rewards`, `credit`)
  4. loss       ratio_t = pi(y_t) / pi_old(y_t), where pi_old is the policy of step 1;
                loss_t = max(-A_i ratio_t, -A_i clip(ratio_t, 1-eps, 1+eps_high)) [+ beta ratio_t KL_t];
                KL_t = q/p - 1 - log(q/p), q = pi_ref(y_t), p = pi(y_t)
                the loss is a weighted sum over the tokens that the policy wrote; `loss_type` sets the weights
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

Papers: GRPO 2402.03300; several turns: RAGEN 2504.20073, Search-R1 2503.09516; losses: DAPO 2503.14476, Dr. GRPO
2503.20783, MaxRL 2602.02710. In short: lecture/agent.py, 310 lines.

  python agent.py    # guess a number: offline, two minutes on a CPU, guesses 4.3 -> 3.7, in likely play 3.3
  python agent.py --env rewards/calculator.py:Calculator --dataset problems.jsonl --model Qwen/Qwen3-0.6B --bf16 \\
      --num-generations 8 --batch-size 64 --response-length 1024 --max-turns 6
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
from transformers import AutoModelForCausalLM, AutoTokenizer, StaticCache, get_scheduler, logging, set_seed
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
    # --- GRPO ---
    num_generations: Annotated[int, Field(ge=2)] = 32  # G, episodes per row; more: a better baseline
    credit: Literal["episode", "turn"] = "episode"  # one advantage per episode, or per turn
    # divides advantages by: the standard deviation of the group or batch; the group's mean (MaxRL, for scores of 0 or
    # more); 1 (none, Dr. GRPO)
    scale_rewards: Literal["group", "batch", "mean", "none"] = "batch"
    # weights of tokens. dapo: all equal; grpo: equal sums for all episodes; dr_grpo: a constant
    loss_type: Literal["dapo", "grpo", "dr_grpo"] = "dapo"
    epsilon: Positive = 0.2  # the ratio is clipped to 1 - epsilon ... 1 + epsilon_high
    epsilon_high: Positive | None = None  # by default epsilon (DAPO: 0.28). With one step per batch, the ratio is 1
    num_ppo_epochs: Annotated[Count, alias("--num-iterations")] = 1  # passes over each batch. More: further off policy
    num_mini_batches: Count = 1  # optimiser steps in one pass over the batch (TRL 0.16)
    beta: NonNegative = 0.0  # weight of the KL in the loss. 0: no reference is loaded (TRL: 0; DeepSeekMath: 0.04)
    mask_truncated_completions: bool = False  # exclude episodes that a limit cut off from the loss (DAPO)
    # --- Episodes ---
    env: str = f"{TOY}/guess/make.py:Game"  # file.py:name of a class, with step(text) -> answer, reward, is_over
    response_length: Annotated[Count, alias("--max-completion-length")] = 24  # maximum tokens per episode, answers too
    max_turns: Count | None = None  # maximum turns of the policy in an episode
    temperature: Positive = 1.0  # divides the logits in rollout, reference and loss (TRL). Lower: less exploration
    local_rollout_forward_batch_size: Count | None = None  # episodes played at once; by default 4 x micro_batch_size
    # --- Optimisation ---
    learning_rate: Positive | None = None  # by default from the policy's size, and ten times as high with LoRA
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup", "polynomial"] = "linear"  # TRL's
    warmup_ratio: Share = 0.0  # share of the run in which the learning rate warms up from 0
    weight_decay: NonNegative = 0.0  # weight decay of AdamW
    adam_betas: tuple[Share, Share] = (0.9, 0.999)  # betas of AdamW (OpenRLHF: 0.9 0.95)
    adam_epsilon: Positive = 1e-8  # epsilon of AdamW (torch and TRL; N+ details: 1e-5)
    max_grad_norm: Positive = 1.0  # the gradient is clipped to this norm
    # --- Batch sizes ---
    batch_size: Count = 512  # episodes per update, on all GPUs together
    micro_batch_size: Count | None = None  # episodes per pass; by default 2048 tokens on a CPU, 8192 on a GPU
    # --- Models: a folder, or a name on the hub ---
    model: Annotated[str, alias("--model-name-or-path")] = f"{TOY}/guess/sft"  # policy to start from
    lora_r: Natural = 0  # rank of LoRA adapters (peft), 0 for none
    bf16: bool = False  # run the models in bfloat16 (autocast); trained weights and optimiser state stay in float32
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: far less memory, a third slower
    # --- Data. A row has `prompt`, a text or messages that end with the user's; the environment gets all columns ---
    max_prompt_length: Count = 512  # prompts with more tokens are dropped; their number is printed (N+ details: 512)
    # folder of SPLIT.jsonl or SPLIT.parquet, one such file, or a name on the hub
    dataset: Annotated[str, alias("--dataset-name")] = f"{TOY}/guess/data/prompts"
    dataset_config: Annotated[str | None, alias("--dataset-config-name")] = None  # of a hub dataset that has several
    dataset_train_split: str = "train"  # split to train on
    # --- Run ---
    seed: Natural = 1  # seed of episodes, order of rows, mini-batches, and adapters
    total_episodes: Count = 51_200  # number of episodes to train on
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
    policy, reference = load_models(args)
    prompts = load_prompts(args, policy.tokenizer)
    args = choose_sizes(args, policy, prompts)  # from here on, all sizes are set
    B = args.batch_size
    G = args.num_generations
    num_updates = args.total_episodes // B
    passes = range(1 + args.total_episodes // (G * len(prompts)))
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
    run = Run(args, num_updates, optimizer, schedule, {}, model=policy)
    for step in run.steps():
        set_seed(make_seed(args.seed, step))

        # 1. Play, and 2. score
        numbers = order[(step - 1) * B // G : step * B // G]
        rows = [prompts[i] for i in numbers for _ in range(G)]
        rollout = play_batch(policy, rows, args)
        if args.bf16 or args.device != "cpu":  # the sampler reads token by token: its rounding would matter
            rollout.old_logprobs = read_logprobs(policy, rollout, args)
        if args.beta:
            rollout.ref_logprobs = read_logprobs(reference, rollout, args)

        # 3. Advantage
        require(args.scale_rewards != "mean" or rollout.scores.min() >= 0, "--scale-rewards mean needs scores >= 0")
        rollout.advantages = group_advantages(rollout.scores, G, args.scale_rewards)[:, None]  # (B, 1)
        if args.credit == "turn":
            rollout.advantages = turn_advantages(rollout.rewards, rollout.turn, rollout.written, G)  # (B, T)
        rollout.loss_mask = rollout.written  # (B, T)
        if args.mask_truncated_completions:
            rollout.loss_mask = rollout.written & rollout.ended[:, None]

        # 4. Loss, and 5. update
        stats = update(policy, optimizer, rollout, args)
        stats |= rollout_stats(rollout, G)
        is_one = step > 1 or stats["policy/first_ratio_error"] < 0.1  # bfloat16 has 8 bits
        require(is_one, "the first ratio is not 1: does the model ignore the attention mask, or have dropout?")

        stats["learning_rate"] = optimizer.param_groups[0]["lr"]
        stats["episode"] = step * B
        run.log(stats, "reward", "turns")
        if args.num_sample_generations and (step == 1 or run.is_due(num_updates // args.num_sample_generations)):
            show_samples(run, rollout, policy.tokenizer)
        schedule.step()
    run.finish()


# --- 1. Play ----------------------------------------------------------------------------------------------------------
@dataclass
class Rollout:
    """A batch of episodes: B prompts, and the stream that follows each of them. Later steps add their results: scores
    (B,), ref_logprobs (B, T) with --beta, and advantages (B, 1), or (B, T) with --credit turn."""

    prompts: Tensor  # (B, P), left-padded
    prompt_mask: Tensor  # (B, P), true on real tokens
    responses: Tensor  # (B, T), the streams, right-padded
    old_logprobs: Tensor  # (B, T), under the policy that sampled the responses
    mask: Tensor  # (B, T), true until the episode is over
    written: Tensor  # (B, T), true on tokens from the policy, not from the environment
    turn: Tensor  # (B, T), number of turns that the policy has finished
    rewards: Tensor  # (B, T), the reward of a turn, on its last token
    ended: Tensor  # (B,), true if the environment ended the episode, after a stop token
    rows: list[dict]  # the B rows of the dataset

    def joined(self):
        """Ids and attention mask (B, P+T) of prompts and streams, as a model reads them."""
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


def forward(model, input_ids, attention_mask, **options):
    """Output for texts (B, S), or for their newest tokens. Positions count real tokens alone."""
    options["position_ids"] = (attention_mask.cumsum(1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
    return model(input_ids=input_ids, attention_mask=attention_mask, **options)


def sample_categorical(logits, uniforms):
    """One token per row of logits (B, V), and its log-probability, from uniform numbers (B,).

    The token is the first whose cumulative probability exceeds the number: with probabilities .2 .5 .3, the number .6
    gives the second. The caller draws the numbers, so a response does not depend on the other rows or the batch size.
    """
    logprobs = logits.log_softmax(1)
    cdf = logprobs.exp().cumsum(1)
    threshold = uniforms[:, None] * cdf[:, -1:]  # (B, 1), scaled because the sum of the probabilities is not exactly 1
    tokens = torch.searchsorted(cdf, threshold, right=True).clamp(max=logits.shape[1] - 1)  # (B, 1)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)


@torch.no_grad()
def play(policy, rows, prompts, prompt_mask, uniforms, args):
    """Streams (B, T) after prompts (B, P), one per row of the dataset, from uniforms (B, T).

    Also returns logprobs, mask, written, turn and rewards, all (B, T), and ended (B,). In each step, the next token of
    a row comes from the environment's answer, if some of it is left, and else from the policy. Tokens after the end of
    an episode do not count. Sampled tokens are never encoded again: only the answer is encoded. A turn that the end of
    the stream cuts off goes to the game as it is, and the episode keeps its rewards.
    """
    B, T = uniforms.shape
    games = [policy.environment(deepcopy(row)) for row in rows]
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
    tokens = prompts  # (B, P), then (B, 1): the cache keeps the rest
    attention_mask = prompt_mask.long()  # (B, P), one column more after each pass
    for t in range(T):
        output = forward(policy, tokens, attention_mask, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits = output.logits[:, -1].float() / args.temperature  # (B, V)
        drawn, logprob = sample_categorical(logits, uniforms[:, t])
        writes = ~over & torch.tensor([not answer for answer in answers])  # (B,)
        columns.append((logprob.cpu(), ~over, writes, turn.clone()))
        pairs = zip(answers, drawn.tolist())
        stream[:, t] = torch.tensor([answer.pop(0) if answer else token for answer, token in pairs])
        tokens = stream[:, [t]].to(prompts.device)  # (B, 1)

        turn_ends = writes & (torch.isin(stream[:, t], stops) | (t == T - 1))  # (B,)
        turn += turn_ends
        for i in turn_ends.nonzero().flatten().tolist():
            text = policy.tokenizer.decode(stream[i, starts[i] : t + 1], skip_special_tokens=True)
            answer, reward, is_over = games[i].step(text)
            rewards[i, t] = reward or 0.0  # None counts as 0
            ended[i] = is_over and stream[i, t] in stops
            over[i] = is_over or turn[i] == args.max_turns
            if not over[i]:
                answers[i] = encode_answer(answer, games[i], rows[i], policy)
            starts[i] = t + 1 + len(answers[i])
        if over.all():
            break
        attention_mask = F.pad(attention_mask, (0, 1), value=1)
    columns = [F.pad(torch.stack(column, 1), (0, T - 1 - t)) for column in zip(*columns)]  # (B, T) each
    return [x.to(prompts.device) for x in (stream, *columns, rewards, ended)]


def encode_answer(answer, game, row, policy):
    """Token ids of an environment's answer. In a conversation, with the chat template's text around it; its role is the
    environment's `role`, by default "user".

    To find this text, the template renders a placeholder for the policy's turn, with and without the answer. It has a
    thought, so that a template that deletes earlier thoughts is refused: the policy has read them.
    """
    tokenizer = policy.tokenizer
    if isinstance(row["prompt"], list):
        turns = [*row["prompt"], {"role": "assistant", "content": "<think>\nSo?\n</think>\n\nSo."}]
        before = render_answer(turns, row, tokenizer)  # up to and including the token that ends the turn
        turns.append({"role": getattr(game, "role", "user"), "content": answer})
        text = render(turns, row, tokenizer, add_generation_prompt=True)
        is_stop = tokenizer.encode(before, add_special_tokens=False)[-1] in policy.stop_token_ids
        is_fit = is_stop and text.startswith(before) and answer.strip() in text.removeprefix(before)
        require(is_fit, "--env: the chat template changes earlier turns, has another stop token, or drops an answer")
        answer = text.removeprefix(before)
    return tokenizer.encode(answer, add_special_tokens=False)


def play_batch(policy, rows, args):
    """Steps 1 and 2: plays an episode from each row, and adds up the rewards of its turns."""
    prompts, prompt_mask = pad([row["input_ids"] for row in rows], policy.tokenizer, args, "left")  # (B, P)
    uniforms = torch.rand(len(rows), args.response_length).to(prompts.device)  # drawn on the CPU, for any device
    share = torch.arange(len(rows)).tensor_split(WORLD_SIZE)[RANK]  # row numbers of this process
    parts = []
    with autocast(args), torch.random.fork_rng(devices=[]):  # games may draw numbers, too
        for index in share.split(args.local_rollout_forward_batch_size):
            some = [rows[i] for i in index]
            part = play(policy, some, prompts[index], prompt_mask[index], uniforms[index], args)
            parts.append(part)
    columns = [all_gather(torch.cat(x)) for x in zip(*parts)]
    rollout = Rollout(prompts, prompt_mask, *columns, rows)
    rollout.scores = rollout.rewards.sum(1)
    require(rollout.scores.isfinite().all(), "--env: a reward is not a finite number")
    return rollout.select(torch.arange(len(rows), device=prompts.device))  # all rows, without padding columns


# --- Log-probabilities ------------------------------------------------------------------------------------------------
def response_forward(model, r, args):
    """(b, T, V) logits / temperature of the response tokens, in float32.

    Position P-1+t of the input predicts response token t, both counted from 0.
    """
    P, T = r.prompts.shape[1], r.responses.shape[1]
    keep = torch.arange(P - 1, P + T - 1, device=r.mask.device)
    logits = forward(model, *r.joined(), use_cache=False, logits_to_keep=keep).logits
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


def turn_advantages(rewards, turn, written, G):
    """(B, T) reward from each turn on, minus the mean of the group, divided by the scores' std.

    A turn is not credited with the rewards before it, and is compared only with the episodes of its group that reach
    this turn.
    """
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
    """Clipped losses (B, T) (PPO, eq. 7), the ratio, and where the clipped loss was the larger.

    The gradient is 0 where the ratio has left the clip range in the direction that the advantage favours. If it left in
    the other direction, the loss is not clipped, and its gradient moves the ratio back.
    """
    ratio = (logprobs - old_logprobs).masked_fill(~mask, 0.0).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(lower, upper)
    return torch.max(unclipped, clipped), ratio, clipped > unclipped


def token_weights(mask, num_rows, num_tokens, args):
    """(b, T) weights of the tokens' losses. The loss of a mini-batch is the weighted sum.

    grpo: all episodes have the same weight, so a token of a long one has a lower one. In the others, all tokens have
    the same weight: a constant (dr_grpo), or 1 / tokens of an average mini-batch (dapo).
    """
    lengths = mask.sum(1, keepdim=True).clamp(min=1)  # (b, 1)
    if args.loss_type == "grpo":
        return mask / (num_rows * lengths)
    if args.loss_type == "dr_grpo":
        return mask / (num_rows * args.response_length)
    return mask / num_tokens


# --- 5. Update --------------------------------------------------------------------------------------------------------
def update(policy, optimizer, rollout, args):
    """Steps 4 and 5: `num_ppo_epochs` passes over the batch, with one optimiser step for each mini-batch.

    The gradient of a mini-batch is a weighted sum over its tokens, however it is split into micro-batches and among
    processes: clip_gradient averages over processes, so the weights use the numbers of rows and tokens per process.
    """
    bounds = 1 - args.epsilon, 1 + (args.epsilon_high or args.epsilon)
    num_parts = args.num_mini_batches * WORLD_SIZE
    num_rows = args.batch_size / num_parts
    num_tokens = rollout.loss_mask.sum().clamp(min=1) / num_parts  # on average
    logs = []  # means over the tokens of each mini-batch
    num_skipped = args.num_ppo_epochs * args.num_mini_batches
    for _ in range(args.num_ppo_epochs):
        order = torch.randperm(args.batch_size).to(args.device)
        for rows in order.tensor_split(args.num_mini_batches):  # (b,) row numbers
            optimizer.zero_grad()
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
                losses, ratio, clipped = policy_loss(logprobs, r.old_logprobs, r.advantages, r.loss_mask, *bounds)
                kl = torch.zeros_like(losses)  # (b, T)
                if args.beta:  # Schulman's k3, times the ratio, so that its gradient is that of the KL
                    k1 = (logprobs - r.ref_logprobs).masked_fill(~r.loss_mask, 0.0)
                    kl = (torch.expm1(-k1) + k1) * ratio
                weights = token_weights(r.loss_mask, num_rows, num_tokens, args)  # (b, T)
                loss = masked_sum((losses + args.beta * kl) * weights, r.loss_mask)
                loss.backward()
                seen = {
                    "kl": kl,
                    "entropy": entropy,
                    "val/ratio": ratio,
                    "clip_ratio/region_mean": clipped,
                    "policy/first_ratio_error": (ratio - 1).abs(),
                    "tokens": torch.ones_like(ratio),
                }
                sums.update({name: masked_sum(x.detach(), r.loss_mask) for name, x in seen.items()})  # a Counter adds
            reduced = all_reduce(torch.stack(list(sums.values()))).tolist()
            sums = dict(zip(sums, reduced))
            log = {name: x / max(1, sums["tokens"]) for name, x in sums.items()}
            log["grad_norm"] = clip_gradient(optimizer.param_groups[0]["params"], args.max_grad_norm).item()
            logs.append(log)
            if math.isfinite(log["grad_norm"]):  # otherwise the step would turn the weights into NaN
                optimizer.step()
                num_skipped -= 1
    optimizer.zero_grad()
    stats = {name: sum(log[name] for log in logs) / len(logs) for name in seen | log if name != "tokens"}
    stats["policy/first_ratio_error"] = logs[0]["policy/first_ratio_error"]  # before the first step
    return stats | {"val/skipped_steps": num_skipped}


# === End of the algorithm. Next: its metrics, then what every program of this kind needs ==============================
def rollout_stats(rollout, G):
    """The metrics of a batch before the update, under TRL's names."""
    scores = rollout.scores
    written = rollout.written
    is_equal = scores.view(-1, G) == scores[::G, None]  # (B/G, G)
    stats = {
        "reward": scores.mean(),
        "reward_std": scores.std(),
        "objective/scores": scores.mean(),
        "frac_reward_zero_std": is_equal.all(1).float().mean(),
        "turns": (rollout.turn * written).amax(1).add(1).float().mean(),
        "ended": rollout.ended.float().mean(),
        "completions/mean_length": written.sum(1).float().mean(),
    }
    if hasattr(rollout, "ref_logprobs"):
        k1 = rollout.old_logprobs - rollout.ref_logprobs
        stats["objective/kl"] = masked_sum(k1, written) / len(k1)
    return {name: x.item() for name, x in stats.items()}


def show_samples(run, rollout, tokenizer):
    """Prints four episodes, and saves their tensors for tools/xray.py."""
    r = rollout.select(torch.arange(len(rollout.rows))[:4])
    prompts = tokenizer.batch_decode([row["input_ids"] for row in r.rows])
    episodes = [transcript(*row, tokenizer) for row in zip(r.responses, r.mask, r.written)]
    scores = [f"{score:.2f}" for score in r.scores.tolist()]
    run.show({"prompt": prompts, "episode": episodes, "score": scores}, vars(r))


def transcript(ids, mask, written, tokenizer):
    """Decodes a stream. Answers of the environment are in «guillemets»."""
    is_own, sizes = written[mask].unique_consecutive(return_counts=True)
    texts = tokenizer.batch_decode(ids[mask].split(sizes.tolist()))
    return "".join(text if own else f" «{text.strip()}» " for text, own in zip(texts, is_own))


# --- Models and data --------------------------------------------------------------------------------------------------
CURVES = "scores$|turns$|entropy"  # metrics of curves.png


def load_models(args):
    """Loads the policy, its stop tokens and its environment, and with --beta makes a copy, the reference. Neither has
    dropout: rollout and loss use one distribution."""
    policy = load_model(AutoModelForCausalLM, args.model)
    policy.stop_token_ids = eos_tokens(policy)
    policy.generation_config.eos_token_id = policy.stop_token_ids  # for programs that sample from it later
    policy.generation_config.do_sample = True  # the library refuses to save a temperature without it
    file, _, name = args.env.rpartition(":")
    require(Path(file).is_file(), f"--env {args.env}: should be file.py:name, of a file that exists")
    policy.environment = load_function(file, name)
    reference = deepcopy(policy).requires_grad_(False) if args.beta else None
    if args.lora_r:  # trains adapters of all linear layers, and nothing else (Hu et al. 2021)
        from peft import LoraConfig

        config = LoraConfig(r=args.lora_r, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        policy.add_adapter(config)
    place(policy, args)
    if reference is not None:
        place(reference, args)
    return policy, reference


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
    num_tokens = 2048 if args.device == "cpu" else 8192
    rows = args.micro_batch_size or max(1, num_tokens // longest)
    parts = math.lcm(args.num_generations, args.num_mini_batches * WORLD_SIZE)
    num_updates = args.total_episodes // args.batch_size
    fits = args.batch_size % parts == 0
    require(fits, f"{args.batch_size} episodes are no multiple of {parts} (group, mini-batches x processes)")
    require(num_updates, f"--total-episodes {args.total_episodes} is less than a batch of {args.batch_size}")
    print(f"policy: {args.model}, {size / 1e6:.2f}M parameters on {args.device}, learning rate {rate:.2g}")
    per_prompt = num_updates * args.batch_size / len(prompts)
    print(f"{num_updates} updates of {args.batch_size} episodes, {rows} at a time; {per_prompt:.1f} for each prompt")
    sizes = {"learning_rate": rate, "micro_batch_size": rows}
    sizes["local_rollout_forward_batch_size"] = args.local_rollout_forward_batch_size or 4 * rows
    return replace(args, **sizes)


# === From here on, a function has the same text in all scripts that have it ==========================================
# --- Rewards ----------------------------------------------------------------------------------------------------------
def load_function(file, name):
    """Imports a function of a Python file, which finds the files beside it."""
    path = Path(file).resolve()
    sys.path.insert(0, str(path.parent))
    sys.modules.pop(path.stem, None)  # another file may have this name
    return getattr(importlib.import_module(path.stem), name)


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


def render_answer(messages, row, tokenizer):
    """Renders messages up to and including the token that ends the last one, such as <|im_end|>, or else EOS."""
    content = messages[-1]["content"].strip()
    head, _, tail = render(messages, row, tokenizer).rpartition(content)
    ends = [str(token) for token in tokenizer.added_tokens_decoder.values()]
    found = [end for end in ends if end in tail]
    end = min(found, key=tail.find, default=tokenizer.eos_token)
    return head + content + tail.partition(end)[0] + end


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
