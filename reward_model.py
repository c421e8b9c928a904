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
"""Reward modelling: pairs of a preferred and a rejected text -> a model that gives any text a number.

For each batch of pairs (chosen, rejected) with the same prompt:
  1. encode   both texts, each with its EOS (end of sequence)
  2. read     r = w . h, with h the last layer at the last real token and w a new head
  3. loss     -log sigmoid(r_chosen - r_rejected - margin) + c (r_chosen + r_rejected)^2
  4. update   AdamW, with the learning rate warmed up and annealed
At the end the rewards are shifted to mean 0 over the first 2,000 training pairs: the loss leaves their zero open.

  text          The  film  |  is   a    joy   .   EOS   -   -
  reward                                           *             one per text, on its last real token

The loss is the likelihood of the Bradley-Terry model, in which a text is preferred with the odds exp(r_chosen) to
exp(r_rejected). So differences of rewards mean something: the sigmoid of a difference is a probability that can be
compared with what people chose ("calibration"). Christiano et al. 2017 (arXiv 1706.03741, sec. 2.2.3); Stiennon et al.
2020 (2009.01325); Ouyang et al. 2022 (InstructGPT, 2203.02155, eq. 1); Huang et al. 2024 (the N+ details, 2403.17031:
the head's initialisation, one epoch, rewards of mean 0). The margin is Llama 2's (Touvron et al. 2023, 2307.09288,
eq. 2), the centring term Eisenstein et al. 2023's (2312.09244). docs/reward_model.md has a glossary of the metrics.

  python reward_model.py                             # the toy world: offline, a minute on a CPU
  python reward_model.py --model gpt2 --dataset D    # D has `chosen` and `rejected`, with or without `prompt`

Shapes: B pairs, S tokens (right-padded), D hidden size.
"""

import ctypes
import json
import math
import os
import shlex
import signal
import sys
import time
import traceback
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import asdict, dataclass, field, fields
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Annotated, Literal

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # before torch: waiting threads would spin, and starve a busy machine
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # Ctrl-C while the libraries load: no traceback

import datasets
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from datasets.fingerprint import Hasher
from filelock import FileLock
from huggingface_hub import ModelCard, ModelCardData, constants, get_session
from pydantic import Field, TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel
from transformers import get_scheduler, set_seed
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

# Under torchrun, the number of this process and how many there are; one alone is number 0 of 1. All read the same data
# and draw the same random numbers; of every batch, each computes its share
RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))

# --- Arguments. The type of a setting says which values are allowed; the comment beside or above it is its help text

Positive = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1, lt=2**63)]
Natural = Annotated[int, Field(ge=0, lt=2**63)]
Name = Annotated[str, Field(min_length=1)]


@dataclass
class Args:
    # --- Reward model ---
    # c of the loss: pulls each pair's rewards towards a sum of 0 (TRL)
    center_rewards_coefficient: NonNegative = 0.0
    eos_dropout: Share = 0.0  # share of training pairs shown without EOS: then responses that were cut off can be read
    max_length: Count = 512  # longer texts lose their end, and are counted (TRL drops them)

    # --- Optimisation ---
    # AdamW's; by default from the size of the model, ten times as high with LoRA
    learning_rate: Positive | None = None
    lr_scheduler_type: Name = "cosine"  # any name that transformers.get_scheduler knows (N+ details: cosine)
    warmup_ratio: Share = 0.03  # share of the run in which the learning rate rises to its value
    weight_decay: NonNegative = 0.0  # AdamW's
    max_grad_norm: Positive = 1.0  # the gradient is clipped to this norm

    # --- Batch sizes ---
    # pairs per optimiser step, on all GPUs together; by default 64
    batch_size: Count | None = None
    micro_batch_size: Count | None = None  # pairs per forward/backward pass; affects rounding and dropout only
    # TRL's way: this is micro_batch_size, and * gradient_accumulation_steps * GPUs is batch_size
    per_device_train_batch_size: Count | None = None
    gradient_accumulation_steps: Count = 1  # with per_device_train_batch_size (TRL)

    # --- Model: a folder, or a name on the hub ---
    # the model to start from, ideally the policy that sft.py made; any causal architecture
    model: Name = "toy/sft"
    lora_r: Natural = 0  # rank of LoRA adapters (Hu et al. 2021), 0 for none; the head is trained whole
    lora_alpha: Positive = 32.0  # the adapter's output is scaled by lora_alpha / lora_r
    lora_target_modules: Name | None = None  # regular expression for their layers, or all-linear; default: peft's
    bf16: bool = False  # run the models in bfloat16 (autocast); trained weights and optimiser state stay in float32
    attn_implementation: Name | None = None  # eager, sdpa, flash_attention_2, ...; by default transformers' own choice
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: far less memory, a third slower
    trust_remote_code: bool = False  # run Python code that comes with a model; only if you have read that code

    # --- Data ---
    # folder, file (jsonl, json, csv, parquet) or hub name
    dataset: Name = "toy/data/preferences"
    dataset_config: Name | None = None  # configuration of a hub dataset that has several
    dataset_train_split: Name = "train"  # split to train on
    dataset_test_split: Name | None = None  # split to evaluate on, or none; by default validation, if there is one
    chosen_column: Name = "chosen"  # preferred texts, or lists of {role, content} messages
    rejected_column: Name = "rejected"  # the other texts
    prompt_column: Name = "prompt"  # what both texts continue, if there is such a column
    margin_column: Name = "margin"  # how much better the chosen text is (Llama 2, eq. 2), if there is such a column
    seed: Natural = 1  # seed of the order of pairs, of dropout, and of the new head

    # --- Run. Settings from here on may change when a run is resumed ---
    # a run's folder or one of its checkpoints: continue, with the settings of that run
    resume: Name | None = None
    num_train_epochs: Positive = 1.0  # passes over the pairs (N+ details: 1; large models overfit with more)
    exp_name: Name = "reward_model"  # name of this run, in its folder and on W&B
    output_dir: Name | None = None  # where everything goes; by default a new folder runs/NAME__SEED__TIME
    device: Name | None = None  # cpu, cuda, mps; by default the best there is
    save_steps: Count = 100  # steps between checkpoints, each of which holds everything that a run consists of
    save_total_limit: Count = 2  # number of checkpoints to keep, the newest
    eval_steps: Count = 100  # steps between evaluations; there is one at the end, too
    num_sample_generations: Natural = 2  # how often a table of pairs with their rewards is printed
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works without an account)
    wandb_project_name: Name = "rlhf"  # W&B project, with --track
    wandb_entity: Name | None = None  # W&B team, with --track

    # --- Many GPUs: torchrun --nproc-per-node N ---
    # shards: 0 none, 2 of gradients and optimiser state, 3 of weights too (FSDP2)
    zero_stage: Literal[0, 2, 3] = 0
    shard_size: Count | None = None  # GPUs that hold one set of shards, such as those of a node (ZeRO++); default: all
    offload: bool = False  # keep the shards in CPU memory until they are needed: slow, for models that do not fit

    # --- Computed
    num_steps: int = field(init=False, default=0)
    steps_per_epoch: int = field(init=False, default=0)
    torch_device: str = field(init=False, default="cpu")  # where the models are


# --- The loop: its numbers are those of the steps above ---------------------------------------------------------------


def train(args: Args) -> None:
    """Trains the reward model; leaves it, its metrics, curves and model card in args.output_dir."""
    with setting_up():
        args = start_run(args)

        model = load_reward_model(args)
        shard(model, args)
        check_causal(model, args)

        pairs, eval_pairs = load_pairs(args, model)  # 1
        lengths = [max(len(pair.chosen), len(pair.rejected)) for pair in pairs]
        args = choose_sizes(args, model, len(pairs), fits_cpu=8192 // max(lengths))

        optimizer = make_optimizer(args, model)
        schedule = make_schedule(args, optimizer, args.num_steps)
        data = Hasher.hash([sum(pair.chosen) - sum(pair.rejected) for pair in pairs])
        state = {"data": data, "reward_bias": 0.0}  # also in a checkpoint
        run = Run(args, args.num_steps, model, optimizer, state)
        model.config.reward_bias = state["reward_bias"]
    with run:
        for step in run.steps():
            set_learning_rates(schedule, step)
            rows = length_grouped_batch(lengths, step - 1, args.batch_size, args.seed)
            mini_batch = [pairs[i] for i in rows]
            if args.eos_dropout:
                mini_batch = drop_eos(mini_batch, model.tokenizer.eos_token_id, args.eos_dropout)
            separate_dropout(args, step)
            with run.clock("step"):
                stats = mini_batch_gradient(model, mini_batch, args)  # 2 and 3
                grad_norm = clip_gradient(optimizer.param_groups[0]["params"], args.max_grad_norm)  # 4
                if grad_norm.isfinite():  # else the weights would be NaN for good
                    optimizer.step()
                optimizer.zero_grad()
            stats["step"] = step
            stats["epoch"] = step / args.steps_per_epoch
            stats["lr"] = optimizer.param_groups[0]["lr"]
            stats["grad_norm"] = grad_norm.item()
            if step == args.num_steps:
                chosen, rejected = all_rewards(model, pairs[:2000], args)
                shift_rewards(model, -torch.cat([chosen, rejected]).mean().item())
                state["reward_bias"] = model.config.reward_bias
            if eval_pairs and run.is_due(args.eval_steps):
                eval_stats, bins = evaluate(model, eval_pairs, args)
                stats |= eval_stats
            run.write(stats, "loss", "eval/accuracy")
            if run.is_turn(args.num_sample_generations):
                show_samples(run, model, eval_pairs or pairs, args)
                if eval_pairs and step == args.num_steps:
                    show_calibration(run, bins)
            run.save()
            run.stop()


# --- 1. Encode --------------------------------------------------------------------------------------------------------


@dataclass
class Pair:
    """Token ids of two texts with the same prompt, and by how much the first is better."""

    chosen: list[int]
    rejected: list[int]
    margin: float = 0.0


def encode_text(prompt: str, text: str, tokenizer: AutoTokenizer) -> list[int]:
    """Token ids of prompt + text + EOS; prompt and text are encoded apart, as in a rollout."""
    if not prompt:
        return with_eos(tokenizer(text)["input_ids"], tokenizer)
    ids = tokenizer(prompt)["input_ids"] + tokenizer(text, add_special_tokens=False)["input_ids"]
    return with_eos(ids, tokenizer)


def encode_pair(
    prompt: str | list[dict], chosen: str | list[dict], rejected: str | list[dict], tokenizer: AutoTokenizer
) -> Pair:
    """Two texts, or, if any of the three is a list of messages, two conversations."""
    encode = encode_text
    if any(isinstance(x, list) for x in (prompt, chosen, rejected)):
        encode = encode_conversation
    return Pair(encode(prompt, chosen, tokenizer), encode(prompt, rejected, tokenizer))


def drop_eos(pairs: list[Pair], eos_token_id: int | None, share: float) -> list[Pair]:
    """The pairs, a random share of them as they would look cut off just before their EOS."""

    def cut(ids: list[int]) -> list[int]:
        """Without its EOS, unless that is all."""
        if len(ids) > 1 and ids[-1] == eos_token_id:
            return ids[:-1]
        return ids

    shown = []
    for pair, x in zip(pairs, torch.rand(len(pairs))):
        if x < share:
            pair = Pair(cut(pair.chosen), cut(pair.rejected), pair.margin)
        shown.append(pair)
    return shown


# --- 2. Read ----------------------------------------------------------------------------------------------------------


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
    return rewards + getattr(model.config, "reward_bias", 0.0)  # where reward_model.py may put its shift


def pair_rewards(model: nn.Module, pairs: list[Pair], args: Args) -> tuple[Tensor, Tensor]:
    """(B,) rewards of the chosen and of the rejected texts, in one forward pass over all of them."""
    chosen = [pair.chosen for pair in pairs]
    rejected = [pair.rejected for pair in pairs]
    ids, mask = pad(chosen + rejected, model.tokenizer.pad_token_id, args)  # (2B, S)
    with autocast(args):
        rewards = read_reward(model, ids, mask.long())  # (2B, 1)
    return rewards.squeeze(1).split(len(pairs))


def init_reward_head(head: nn.Linear) -> None:
    """Weights of standard deviation 1/sqrt(D+1), so that rewards begin with a deviation of about 1 (N+ details)."""
    nn.init.normal_(head.weight, std=1 / math.sqrt(head.in_features + 1))


def shift_rewards(model: nn.Module, shift: float) -> None:
    """Adds a constant to every reward, in a way that is saved with the model.

    The head of transformers' classifiers has no bias. But if the last layer is h = norm(x) g + c, moving c by
    shift w / |w|^2 moves every w . h by the shift: a plain weight that any program which loads the model sees. If that
    norm has no c (RMSNorm) or is frozen (LoRA), the config holds the shift as `reward_bias`, which read_reward adds.
    """
    norms = [m for m in model.base_model.children() if isinstance(m, nn.LayerNorm) and m.bias is not None]
    if len(norms) != 1 or not norms[0].weight.requires_grad:
        model.config.reward_bias += shift
        return
    everywhere = dcp.StateDictOptions(full_state_dict=True)  # put together from shards, in every process
    w = dcp.get_model_state_dict(model.score, options=everywhere)["weight"][0]  # (D,)
    norm = dcp.get_model_state_dict(norms[0], options=everywhere)
    norm["bias"] = norm["bias"] + shift * w / w.square().sum()
    dcp.set_model_state_dict(norms[0], norm, options=everywhere)


# --- 3. Loss ----------------------------------------------------------------------------------------------------------


def preference_loss(chosen: Tensor, rejected: Tensor, margin: Tensor, center_rewards_coefficient: float) -> Tensor:
    """(B,) losses: -log sigmoid(chosen - rejected - margin) + c (chosen + rejected)^2, all of shape (B,)."""
    return -F.logsigmoid(chosen - rejected - margin) + center_rewards_coefficient * (chosen + rejected) ** 2


# --- 4. Update --------------------------------------------------------------------------------------------------------


def mini_batch_gradient(model: nn.Module, mini_batch: list[Pair], args: Args) -> dict[str, float]:
    """Adds up the gradient of the mean loss over a batch of pairs; returns means over them of what is logged.

    How the batch is cut, into micro-batches and among processes, changes nothing.
    """
    model.train()
    n = len(mini_batch)
    sums = defaultdict(float)
    for pairs, counts in micro_batches(mini_batch, args):
        chosen, rejected = pair_rewards(model, pairs, args)  # (b,) each
        margin = torch.tensor([pair.margin for pair in pairs], device=args.torch_device)
        losses = preference_loss(chosen, rejected, margin, args.center_rewards_coefficient)
        loss = (losses * counts).sum() / n
        (WORLD_SIZE * loss).backward()  # gradients become means over processes
        pair_stats = {
            "loss": losses,
            "accuracy": chosen > rejected,
            "margin": chosen - rejected,
        }
        for name, x in pair_stats.items():
            sums[name] += (x.detach() * counts).sum()
    model.eval()
    means = all_reduce(torch.stack(list(sums.values()))) / n
    return dict(zip(sums, means.tolist()))


# === The algorithm ends here. Next: its metrics and options, then what every program of this kind needs =============


@torch.no_grad()
def all_rewards(model: nn.Module, pairs: list[Pair], args: Args) -> tuple[Tensor, Tensor]:
    """(N,) rewards of all chosen and all rejected texts."""
    parts = []
    for some, _ in micro_batches(pairs, args):
        chosen, rejected = pair_rewards(model, some, args)
        parts.append(torch.stack([chosen, rejected], 1))  # (b, 2)
    rewards = all_gather(torch.cat(parts))[: len(pairs)]  # (N, 2)
    return rewards.cpu().unbind(1)


def calibration(differences: Tensor) -> list[tuple[float, float, int]]:
    """For ten bins of |r_chosen - r_rejected|, equally full: mean predicted probability that the higher reward was
    chosen, the share of pairs in which it was, and their number. A calibrated model has the first two equal."""
    ordered = differences[differences.abs().argsort()]
    bins = []
    for part in ordered.tensor_split(min(10, len(ordered))):
        predicted = part.abs().sigmoid().mean()
        observed = (part > 0).float().mean()
        bins.append((predicted.item(), observed.item(), len(part)))
    return bins


def evaluate(
    model: nn.Module, pairs: list[Pair], args: Args
) -> tuple[dict[str, float], list[tuple[float, float, int]]]:
    """Loss (without margin and centring), accuracy and calibration over the test split, and the calibration's bins."""
    chosen, rejected = all_rewards(model, pairs, args)
    both = torch.cat([chosen, rejected])
    losses = preference_loss(chosen, rejected, torch.zeros(()), 0.0)
    bins = calibration(chosen - rejected)
    error = sum(n * abs(predicted - observed) for predicted, observed, n in bins)
    stats = {
        "eval/loss": losses.mean().item(),
        "eval/accuracy": (chosen > rejected).float().mean().item(),
        "eval/margin": (chosen - rejected).mean().item(),
        "eval/calibration_error": error / len(pairs),
        "eval/mean_reward": both.mean().item(),
        "eval/std_reward": both.std().item(),
    }
    return stats, bins


def show_samples(run: "Run", model: nn.Module, pairs: list[Pair], args: Args) -> None:
    """A table of four pairs with their rewards."""
    chosen, rejected = all_rewards(model, pairs[:4], args)
    table = []
    for pair, a, b in zip(pairs, chosen, rejected):
        better = model.tokenizer.decode(pair.chosen, skip_special_tokens=True)
        worse = model.tokenizer.decode(pair.rejected, skip_special_tokens=True)
        is_right = "yes" if a > b else "no"
        table.append([better, f"{a:.2f}", worse, f"{b:.2f}", is_right])
    run.table(f"step {run.step} of {run.num_steps}", ["chosen", "reward", "rejected", "reward", "right"], table)


def show_calibration(run: "Run", bins: list[tuple[float, float, int]]) -> None:
    """A table of the calibration's bins."""
    table = [[f"{predicted:.2f}", f"{observed:.2f}", str(n)] for predicted, observed, n in bins]
    run.table("calibration on the test split", ["predicted", "observed", "pairs"], table)


# --- Models and data --------------------------------------------------------------------------------------------------


def load_reward_model(args: Args) -> nn.Module:
    """The model with a new head of one output, in float32; it keeps the dropout of its config."""
    model = load_model(AutoModelForSequenceClassification, args.model, args, new_head=True, num_labels=1)
    require(hasattr(model, "score"), f"{args.model} ({type(model).__name__}) is no causal language model: it has no "
            "last token to read")  # fmt: skip
    init_reward_head(model.score)
    model.config.reward_bias = 0.0  # which shift_rewards may change
    model.config.pad_token_id = model.tokenizer.pad_token_id  # for programs that use the library's own pooling
    model.config.id2label = {0: "reward"}
    model.config.label2id = {"reward": 0}
    if args.lora_r:
        add_adapter(model, args, task_type="SEQ_CLS", modules_to_save=["score"])
    if args.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model.eval()


def encode_pairs(data, tokenizer: AutoTokenizer, args: Args, limit: int) -> list[Pair]:
    """All pairs of a split, cut to `limit` tokens."""
    pairs = [encode_pair(*row, tokenizer) for row in read_pairs(data, args)]
    if args.margin_column in data.column_names:
        margins = read_column(data, args.margin_column, args.dataset, "--margin-column", (int, float))
        for pair, margin in zip(pairs, margins):
            require(math.isfinite(margin), f"--dataset {args.dataset}: {margin} in {args.margin_column!r}")
            pair.margin = float(margin)
    last = max(max(pair.chosen + pair.rejected, default=0) for pair in pairs)
    require(last < tokenizer.num_embeddings, f"--dataset {args.dataset}: the model embeds no token {last}")
    cut = [Pair(pair.chosen[:limit], pair.rejected[:limit], pair.margin) for pair in pairs]
    return keep_different(pairs, cut, limit, args)


# --- Settings and checks ----------------------------------------------------------------------------------------------

ALIASES = {  # other libraries' spellings
    "--model-name-or-path": "--model", "--sft-model-path": "--model", "--dataset-name": "--dataset",
    "--dataset-config-name": "--dataset-config", "--resume-from-checkpoint": "--resume",
}  # fmt: skip
LENGTH = "num_train_epochs"  # the setting that says how long a run is
CURVES = [["loss", "eval/loss"], ["accuracy", "eval/accuracy"], ["margin", "eval/margin"]]


def default_rate(args: Args, model: nn.Module) -> float:
    """The learning rate, if none is given: 1e-5 for a model of GPT-2's size, higher for smaller ones, never below 3e-6
    (the N+ details' rate from 1B up); ten times as high with LoRA."""
    rate = max(3e-6, 1e-5 * (124e6 / model.num_parameters()) ** 0.75)
    if args.lora_r:
        rate *= 10
    return float(f"{rate:.2g}")


# --- The same text in sft.py, reward_model.py and dpo.py --------------------------------------------------------------


def apply_template(messages: list[dict], tokenizer: AutoTokenizer, **options) -> list[int]:
    """Token ids of a conversation through the tokenizer's chat template."""
    require(tokenizer.chat_template, "the dataset holds messages, but the tokenizer has no chat template")
    require(all("role" in message for message in messages), f"a message without a role: {messages!r}")
    with explain(f"the tokenizer's chat template refuses {messages!r}"):
        return tokenizer.apply_chat_template(messages, return_dict=False, **options)


def as_turns(text: str | list[dict], role: str) -> list[dict]:
    """Messages as they are; a text becomes one message of this role."""
    if isinstance(text, list):
        return text
    return [{"role": role, "content": text}]


def with_eos(ids: list[int], tokenizer: AutoTokenizer) -> list[int]:
    """The tokens, and EOS behind them unless they end with it, or there is none."""
    eos = tokenizer.eos_token_id
    if eos is None or ids[-1:] == [eos]:
        return ids
    return ids + [eos]


def encode_conversation(prompt: str | list[dict], text: str | list[dict], tokenizer: AutoTokenizer) -> list[int]:
    """Token ids of a conversation: the prompt's turns if it has any, then those of the text, or the text as a turn."""
    turns = as_turns(prompt, "user") if prompt else []
    answer = as_turns(text, "assistant")
    if answer[: len(turns)] != turns:  # some hold the prompt, too
        answer = turns + answer
    ids = apply_template(answer, tokenizer)
    if ids[-2:-1] == [tokenizer.eos_token_id]:  # ChatML writes a newline behind EOS
        return ids[:-1]
    return ids


def load_pairs(args: Args, model: nn.Module) -> tuple[list, list]:
    """The pairs to train on, and those to evaluate on."""
    train, test = load_data(args)
    limit = min(args.max_length, context_length(model))
    pairs = encode_pairs(train, model.tokenizer, args, limit)
    if test is None:
        return pairs, []
    return pairs, encode_pairs(test, model.tokenizer, args, limit)


def read_pairs(data, args: Args) -> Iterator[tuple]:
    """Prompt, or "" without that column, chosen and rejected text of each row of a split."""
    name = args.dataset
    kind = (str, list)
    chosen = read_column(data, args.chosen_column, name, "--chosen-column", kind)
    rejected = read_column(data, args.rejected_column, name, "--rejected-column", kind)
    prompts = [""] * len(chosen)
    if args.prompt_column in data.column_names:
        prompts = read_column(data, args.prompt_column, name, "--prompt-column", kind)
    rows = list(zip(prompts, chosen, rejected))
    return tqdm(rows, desc="encoding pairs", leave=False, disable=None)


def keep_different(pairs: list, cut: list, limit: int, args: Args) -> list:
    """Of the pairs, after they were cut, those whose texts differ; the others teach nothing, and are counted."""
    num_cut = sum(pair != after for pair, after in zip(pairs, cut))
    if num_cut:
        print(f"cut {num_cut} of {len(pairs)} pairs to --max-length {limit} tokens")
    kept = [pair for pair in cut if pair.chosen != pair.rejected]
    num_dropped = len(pairs) - len(kept)
    num_same = sum(pair.chosen == pair.rejected for pair in pairs)
    dropped = (f"{num_dropped} of {len(pairs)} pairs: both texts are the same ({num_same}), or become so when cut to "
               f"--max-length {limit} ({num_dropped - num_same})")  # fmt: skip
    require(kept, f"--dataset {args.dataset}: dropped {dropped}")
    if num_dropped:
        print(f"dropped {dropped}")
    return kept


def length_grouped_batch(lengths: list[int], number: int, size: int, seed: int) -> list[int]:
    """The rows of batch `number` (0, 1, ...) of endless passes over all rows. Those of a batch are of similar length.

    In each pass the rows are shuffled and cut into groups of 50 batches; a group is sorted by length, so that there is
    little padding; and the batches come in an order of their own, so that it is random enough.
    """
    num_batches = math.ceil(len(lengths) / size)  # of a pass; one of them holds what is left
    pass_number, place = divmod(number, num_batches)
    rows = shuffled(len(lengths), seed, 2 * pass_number)
    batches = shuffled(num_batches, seed, 2 * pass_number + 1)
    group, index = divmod(batches[place], 50)
    group_size = 50 * size
    start = group * group_size
    by_length = sorted(rows[start : start + group_size], key=lengths.__getitem__)
    start = index * size
    return by_length[start : start + size]


def choose_sizes(args: Args, model: nn.Module, num_rows: int, fits_cpu: int) -> Args:
    """The settings with learning rate, batch sizes and number of steps filled in; prints them in words.

    `fits_cpu` rows at a time go through the model on a CPU, unless the settings say otherwise.
    """
    args = copy(args)
    per_device = args.per_device_train_batch_size
    require(per_device or args.gradient_accumulation_steps == 1, "--gradient-accumulation-steps goes with "
            "--per-device-train-batch-size; or give --batch-size and --micro-batch-size")  # fmt: skip
    if args.learning_rate is None:
        args.learning_rate = default_rate(args, model)
    if args.batch_size is None and per_device:
        args.batch_size = per_device * args.gradient_accumulation_steps * WORLD_SIZE
    elif args.batch_size is None:
        args.batch_size = 64
    if args.micro_batch_size is None:
        share = math.ceil(args.batch_size / WORLD_SIZE)  # rows of a batch that each process computes
        if args.torch_device == "cpu":
            share = max(1, min(share, fits_cpu))
        args.micro_batch_size = per_device or share
    args.steps_per_epoch = math.ceil(num_rows / args.batch_size)
    args.num_steps = math.ceil(args.num_train_epochs * args.steps_per_epoch)
    print(f"model: {model.name_or_path}, {model.num_parameters() / 1e6:.2f}M parameters on {args.torch_device}, "
          f"learning rate {args.learning_rate:.2g}")  # fmt: skip
    print(f"batch: {args.batch_size} of {num_rows} rows per step, {args.micro_batch_size} at a time; "
          f"{args.num_steps} steps")  # fmt: skip
    return args


def make_optimizer(args: Args, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW on what is trained of the model."""
    weights = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(
        weights, lr=args.learning_rate, weight_decay=args.weight_decay,
        fused=True,  # ten times as fast on a CPU
    )  # fmt: skip


@torch.no_grad()
def check_causal(model: nn.Module, args: Args) -> None:
    """Refuses a model that reads the start of a text otherwise if the text goes on, or is padded behind, than alone.

    A text of any tokens tells. If a trained model looks ahead or does not heed the attention mask, its output is off by
    a tenth of its standard deviation or more, an untrained one's by a hundredth; by rounding, by a millionth (on a GPU
    and in bfloat16 by up to a hundredth).
    """
    body = model
    if hasattr(model, "score"):
        body = model.base_model
    ids = torch.arange(5, 14, device=args.torch_device).repeat(2, 1)  # (2, 9)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    with autocast(args):
        alone = body(input_ids=ids[:, :5])[0].float()  # (2, 5, V or D)
        beside = body(input_ids=ids, attention_mask=mask)[0][:, :5].float()  # likewise
    reshard(model)
    error = ((beside - alone).abs().mean() / alone.std()).item()
    bound = 1e-3
    if args.bf16 or args.torch_device != "cpu":
        bound = 0.05
    require(not error > bound, f"{model.name_or_path} ({type(model).__name__}) reads a text beside padding or further "
            f"tokens not as alone, by {error:.2g} of the outputs' deviation: it cannot be used here")  # fmt: skip


def separate_dropout(args: Args, step: int) -> None:
    """From here to the end of the step, processes draw different random numbers."""
    if RANK:
        set_seed(make_seed(args.seed, step, 2, RANK))


def shard_rows(n: int) -> Tensor:
    """(m,) numbers of those of n rows that this process computes: every WORLD_SIZE-th.

    m is the same everywhere, since passes over sharded weights must be equally many. If n does not divide, the last
    numbers are n or more: they stand for rows 0, 1, ... again, for want of others, and do not count.
    """
    return torch.arange(RANK, math.ceil(n / WORLD_SIZE) * WORLD_SIZE, WORLD_SIZE)


def micro_batches(rows: Sequence, args: Args) -> Iterator[tuple[list, Tensor]]:
    """This process's share of the rows, `micro_batch_size` at a time, and (b,) whether they count."""
    n = len(rows)
    for numbers in shard_rows(n).split(args.micro_batch_size):
        counts = numbers < n
        some = [rows[i] for i in numbers % n]
        yield some, counts.to(args.torch_device)


# --- The same text in every script, from here to the end: mistakes, models and data by name, processes, the run -------

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
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        reason = " ".join(str(error.__cause__ or error).split())[:500]  # its cause tells more
        known = (__file__, "<", os.path.dirname(os.__file__), sys.prefix)  # this file, Python and the libraries
        frames = traceback.extract_tb(error.__traceback__)
        user = [frame for frame in frames if not frame.filename.startswith(known)]
        where = f" ({user[-1].filename}, line {user[-1].lineno})" if user else ""
        raise UserError(f"{sentence}: {type(error).__name__}: {reason}{where}") from error


@contextmanager
def setting_up() -> Iterator[None]:
    """A library's complaint about the settings becomes one sentence. An error in a line of this script is a bug, or a
    fork's, and keeps its traceback."""
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if traceback.extract_tb(error.__traceback__)[-1].filename == __file__:
            raise
        with explain("the run could not start"):
            raise


@cache
def hub_answers() -> bool:
    """Asks the hub once; if it cannot be reached, its libraries, which would retry for minutes, read their caches."""
    with suppress(Exception):
        if not get_session().head(constants.ENDPOINT, timeout=5).is_error:
            return True
    constants.HF_HUB_OFFLINE = True
    datasets.config.HF_HUB_OFFLINE = True
    return False


def on_disk(name: str) -> Path | None:
    """The file or folder of that name, here or beside this script."""
    for folder in (Path(), Path(__file__).resolve().parent):
        if name and (folder / name).exists():
            return folder / name
    return None


def locate(name: str) -> str:
    """The file or folder of that name, here or beside this script; any other name is taken for one on the hub."""
    if on_disk(name):
        return str(on_disk(name))
    is_path = name.startswith((".", "/", "~", "toy/")) or name.endswith((".py", *DATA_FILES)) or "\\" in name
    require(name and not is_path and name.count("/") < 2, f"{name!r}: there is no such file or folder")
    if not hub_answers():
        is_cached = any(Path(constants.HF_HUB_CACHE).glob(f"*--{name.replace('/', '--')}"))
        require(is_cached, f"{name!r} is neither a folder here nor in the cache, and the hub cannot be reached; python "
                f"{Path(__file__).name} without flags runs offline")  # fmt: skip
    return name


def load_model(auto_class: type, name: str, args: Args, new_head: bool = False, **options) -> nn.Module:
    """A model from a folder or the hub, with float32 weights, and with its tokenizer as `model.tokenizer`.

    Refuses one that lacks weights, which the library would draw at random, or has others; a new head's may be missing.
    """
    path = locate(name)
    is_adapter = Path(path, "adapter_config.json").exists()
    require(not is_adapter, f"{name!r} holds a LoRA adapter alone; the whole model is in {name}/merged")
    options |= {"attn_implementation": args.attn_implementation, "trust_remote_code": args.trust_remote_code}
    wrong = set()
    with explain(f"the model {name!r} could not be loaded (from safetensors; save_pretrained makes them)"):
        if RANK and args.zero_stage:  # process 0 alone reads the weights; `shard` sends them
            with torch.device("meta"):
                config = AutoConfig.from_pretrained(path, **options)
                model = auto_class.from_config(config, dtype=torch.float32)
        else:
            options |= {"ignore_mismatched_sizes": True, "output_loading_info": True}  # reported below
            model, info = auto_class.from_pretrained(path, dtype=torch.float32, use_safetensors=True, **options)
            wrong = info["missing_keys"] | info["unexpected_keys"] | {key for key, *_ in info["mismatched_keys"]}
    if new_head:
        wrong = {key for key in wrong if key.startswith(f"{model.base_model_prefix}.")}
    require(not wrong, f"{name!r} was not saved as a {type(model).__name__}: these do not fit: {sorted(wrong)[:3]}")
    model.auto_class = auto_class
    model.tokenizer = load_tokenizer(name, args, model)
    return model


def load_tokenizer(name: str, args: Args, model: nn.Module) -> AutoTokenizer:
    """The tokenizer of a model; if it has no pad token, EOS stands in, since padding is known by position only."""
    tokenizer = AutoTokenizer.from_pretrained(locate(name), trust_remote_code=args.trust_remote_code)
    require(tokenizer("a text")["input_ids"], f"{name} holds no tokenizer; save the one of its base model beside it")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    require(tokenizer.pad_token is not None, f"the tokenizer of {name} has neither a pad nor an EOS token")
    template = tokenizer(f"{tokenizer.chat_template}")["input_ids"]
    last = max(tokenizer.vocab_size - 1, tokenizer.pad_token_id, tokenizer.eos_token_id or 0, *template)
    rows = model.get_input_embeddings().num_embeddings
    require(last < rows, f"{name} embeds {rows} tokens, but its tokenizer has one with id {last}; call "
            "model.resize_token_embeddings and save it, or take the tokenizer that it was trained with")  # fmt: skip
    tokenizer.num_embeddings = rows
    return tokenizer


def use_bfloat16(model: nn.Module) -> None:
    """Casts once what autocast would cast at each use: the weights of matrix products, but for those of embeddings."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        is_product = isinstance(module, (nn.Linear, Conv1D))
        if is_product and id(module.weight) not in embeddings:
            module.to(torch.bfloat16)


def add_adapter(model: nn.Module, args: Args, **options) -> None:
    """Freezes the model and gives it LoRA adapters to train (Hu et al. 2021)."""
    with explain(f"--lora-r {args.lora_r} --lora-target-modules {args.lora_target_modules} (pip install peft?)"):
        from peft import LoraConfig

        model.add_adapter(LoraConfig(
            r=args.lora_r, lora_alpha=args.lora_alpha, target_modules=args.lora_target_modules, **options,
            fan_in_fan_out=any(isinstance(m, Conv1D) for m in model.modules()),  # GPT-2 keeps its weights transposed
        ))  # fmt: skip


def context_length(model: nn.Module) -> int:
    """Most tokens that the model can read at once, as far as it and its tokenizer tell."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    return min(positions, model.tokenizer.model_max_length)


def load_split(name: str, config: str | None, split: str):
    """One split of a dataset: a folder, a jsonl/json/csv/parquet file (which is its split train), or a hub name."""
    path = locate(name)
    source = {"path": path, "name": config}
    if Path(path).is_file():
        kind = DATA_FILES.get(Path(path).suffix)
        require(kind, f"the dataset {name}: a file must be jsonl, json, csv or parquet")
        source = {"path": kind, "data_files": path}
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    data = []
    with explain(f"the dataset {name}, split {split!r}, could not be loaded"), suppress(StopIteration):  # if empty
        data = datasets.load_dataset(**source, split=split)
    require(len(data), f"the dataset {name}, split {split!r}, is empty")
    return data


def load_data(args: Args) -> tuple:
    """The split to train on, and the one to evaluate on or None: by default `validation`, if the data have one."""
    train = load_split(args.dataset, args.dataset_config, args.dataset_train_split)
    test = args.dataset_test_split
    if test is None:
        test = "validation" if "validation" in train.info.splits else "none"
    if test == "none":
        return train, None
    return train, load_split(args.dataset, args.dataset_config, test)


def read_column(data, column: str, name: str, flag: str, kind=str) -> list:
    """A column of a dataset; raises UserError if it is missing, or if a row holds something of another kind."""
    there = ", ".join(data.column_names)
    require(column in data.column_names, f"the dataset {name} has no column {column!r}; it has {there} (set {flag})")
    rows = list(data[column])
    for i, row in enumerate(rows):
        require(isinstance(row, kind), f"the dataset {name}: row {i} of {column!r} holds {row!r} (set {flag})")
    return rows


@lru_cache(maxsize=2)
def shuffled(n: int, seed: int, number: int) -> list[int]:
    """The numbers below n in a random order, which follows from the seed and the number of the pass."""
    generator = torch.Generator().manual_seed(make_seed(seed, number, 1))
    return torch.randperm(n, generator=generator).tolist()


def make_seed(*numbers: int) -> int:
    """One seed made of several numbers. All randomness is a function of --seed and the number of a step or a pass: what
    a step draws depends on no step before it."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def pad(rows: list[list[int]], value: int, args: Args, left: bool = False) -> tuple[Tensor, Tensor]:
    """Token lists as one tensor (B, S), and its mask (B, S), true on real tokens."""
    side = "left" if left else "right"
    tokens = [torch.tensor(row, dtype=torch.long) for row in rows]
    ids = pad_sequence(tokens, True, value, side)
    mask = pad_sequence([torch.ones(len(row), dtype=torch.bool) for row in rows], True, False, side)
    return ids.to(args.torch_device), mask.to(args.torch_device)


def autocast(args: Args) -> torch.autocast:
    """bfloat16 if --bf16 asks for it; weights, losses and everything after the logits stay float32."""
    return torch.autocast(torch.device(args.torch_device).type, torch.bfloat16, enabled=args.bf16)


def make_schedule(args: Args, optimizer: torch.optim.Optimizer, num_steps: int) -> LambdaLR:
    """The course of the learning rate, by the name that transformers gives it."""
    warmup_steps = int(args.warmup_ratio * num_steps)
    schedule = get_scheduler(args.lr_scheduler_type, optimizer, warmup_steps, num_steps)
    is_plain = isinstance(schedule, LambdaLR)
    require(is_plain, f"--lr-scheduler-type {args.lr_scheduler_type}: take one that depends on the step alone")
    return schedule


def set_learning_rates(schedule: LambdaLR, step: int) -> None:
    """The learning rates of step 1, 2, ...: nothing but the number of the step is remembered of a schedule."""
    for group, peak, share in zip(schedule.optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas):
        group["lr"] = peak * share(step - 1)


# Many processes


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


def shard(model: nn.Module | None, args: Args) -> None:
    """Moves a model to the device; with --zero-stage, torch's FSDP2 shards it, a layer at a time.

    Stage 2 shards what is trained, and keeps gathered weights until the backward pass. The gradient of a shard becomes
    the mean over processes.
    """
    if model is None or any(isinstance(module, FSDPModule) for module in model.modules()):
        return
    is_trained = any(p.requires_grad for p in model.parameters())
    if args.bf16 and not is_trained:
        use_bfloat16(model)
    if args.zero_stage == 0:
        model.to(args.torch_device)
        return
    weights = model.state_dict()
    buffers = dict(model.named_buffers())
    model.to("meta")  # process 0, too, which alone holds the weights
    tie(model)
    if is_trained or args.zero_stage == 3:
        split(model, args)
    options = dcp.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=args.offload)
    dcp.set_model_state_dict(model, {} if RANK else weights, options=options)
    for name, buffer in buffers.items():  # those that no state dict holds, such as rotary frequencies
        owner = model.get_submodule(name.rpartition(".")[0])
        if owner._buffers[name.rpartition(".")[2]].is_meta:
            received = torch.empty_like(buffer, device=args.torch_device) if RANK else buffer.to(args.torch_device)
            dist.broadcast(received, 0)
            owner._buffers[name.rpartition(".")[2]] = received
    tie(model)


def reshard(model: nn.Module) -> None:
    """Gives back the weights that a pass through a sharded model has gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def tie(model: nn.Module) -> None:
    """Ties again the weights that share one tensor: a move from `meta` separates them."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.tie_weights()


def split(model: nn.Module, args: Args) -> None:
    """Shards a model by torch's FSDP2, a layer at a time."""
    device_type = torch.device(args.torch_device).type
    size = args.shard_size or WORLD_SIZE
    mesh = init_device_mesh(device_type, (WORLD_SIZE // size, size), mesh_dim_names=("replicate", "shard"))
    options = {"mesh": mesh["shard"] if size == WORLD_SIZE else mesh, "reshard_after_forward": args.zero_stage == 3}
    if args.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=device_type == "cuda")
    layers = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or []}
    for module in list(model.modules()):
        if type(module).__name__ in layers:
            fully_shard(module, **options)
    roots = [model.base_model, model.score] if hasattr(model, "score") else [model]  # what read_reward calls
    for root in roots:
        fully_shard(root, **options)


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


def start_run(args: Args) -> Args:
    """Checks the settings and joins the processes; returns the settings with output_dir and torch_device filled in."""
    args = copy(args)
    logging.set_verbosity_error()  # of transformers, to which a fresh head is news
    logging.disable_progress_bar()
    check_values(args)
    is_sharded = args.zero_stage or args.shard_size or args.offload
    can_shard = "RANK" in os.environ and args.zero_stage and WORLD_SIZE % (args.shard_size or 1) == 0
    require(can_shard or not is_sharded, "--zero-stage, --shard-size and --offload are for runs under torchrun "
            "--nproc-per-node N; with stage 2 or 3, and a shard size that divides N")  # fmt: skip
    args.output_dir = args.output_dir or f"runs/{args.exp_name}__{args.seed}__{time.strftime('%Y%m%d-%H%M%S')}"
    check_unused(args)
    with explain(f"--device {args.device} cannot be used on this machine"):
        device = torch.empty(0, device=args.device or torch.accelerator.current_accelerator(True) or "cpu").device
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", device.index)))
            torch.cuda.set_device(device)
    args.torch_device = str(device)
    if device.type != "cpu":
        torch.set_float32_matmul_precision("high")  # TF32; plain float32 does not use the tensor cores
    elif sys.platform == "linux":
        keep_freed_memory()
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group()
        print(f"processes: {WORLD_SIZE}, --zero-stage {args.zero_stage}")
    set_seed(args.seed % 2**32)  # of adapters and heads; each step has its own
    return args


def keep_freed_memory() -> None:
    """Else glibc returns large tensors to the system and gets them back page by page: up to half of the time, where the
    vocabulary is large. The numbers are those of glibc's malloc.h."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-4, 0)  # M_MMAP_MAX
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def check_unused(args: Args) -> None:
    """Raises UserError if the output folder holds something, and this is not the run that goes on with it."""
    files = [Path(args.output_dir, name) for name in ("metrics.jsonl", "config.json", "model_index.json", "README.md")]
    is_used = any(file.exists() and file.stat().st_size for file in files)
    require(args.resume or RANK or not is_used, f"--output-dir {args.output_dir} already holds a run or a model; name "
            f"another, or go on with that run: --resume {shlex.quote(args.output_dir)}")  # fmt: skip


def check_values(args: Args) -> None:
    """Raises UserError for a value that its type in Args does not allow."""
    values = {f.name: getattr(args, f.name) for f in fields(Args) if f.init}
    try:
        TypeAdapter(Args).validate_python(values)
    except ValidationError as error:
        wrong = error.errors()[0]  # for instance "Input should be greater than 0"
        raise UserError(f"--{wrong['loc'][0].replace('_', '-')} {wrong['input']}: {wrong['msg']}") from error


class Run:
    """What a run shows and leaves: progress bar, tables, metrics.jsonl, W&B, checkpoints; in the end model and curves.

    A number is logged by putting it into the stats, under any name. A checkpoint is one dict: weights and optimiser,
    whole, however they are sharded; `state`, the dict of what else changes during the run; and the length of
    metrics.jsonl, to which the file is cut when the run goes on. On a CPU a resumed run is, bit for bit, the one that
    was never interrupted. `with run:` saves what was trained, also after an error or Ctrl-C.
    """

    def __init__(
        self, args: Args, num_steps: int, model: nn.Module, optimizer: torch.optim.Optimizer, state: dict, **others
    ):
        self.args = args
        self.num_steps = num_steps
        models = {"model": model, **others}  # others: a critic, a moving average
        self.models = nn.ModuleDict({name: model for name, model in models.items() if model is not None})
        self.optimizer = optimizer
        self.state = state
        self.output = Path(args.output_dir)
        self.step = 0  # the one that is being made
        self.written = 0  # steps that are done
        self.start = time.perf_counter()
        self.seconds = {}  # of each phase of this step
        self.broken = 0  # steps in a row without a finite gradient
        self.warned = set()
        self.signal = None
        self.must_stop = False
        self.wandb = None
        self.wandb_id = None
        self.file = open(os.devnull, "w")
        if not RANK:
            self.open_folder()
        if args.resume:
            self.restore(Path(args.resume))
        if args.track and not RANK:
            self.start_wandb()
        print(f"output: {self.output}")
        self.bar = tqdm(total=num_steps, initial=self.step, dynamic_ncols=True)

    def open_folder(self) -> None:
        """Makes the folder, with its lock, metrics.jsonl and args.json."""
        with explain(f"--output-dir {self.output} cannot be used (is another run writing there?)"):
            (self.output / "checkpoints").mkdir(parents=True, exist_ok=True)
            self.lock = FileLock(self.output / ".lock", timeout=0).acquire()  # let go of when the process ends
            check_unused(self.args)  # another run may have ended here while this one was loading
            self.file = open(self.output / "metrics.jsonl", "a")
            (self.output / "args.json").write_text(json.dumps(asdict(self.args), indent=2) + "\n")

    def start_wandb(self) -> None:
        """Opens the W&B run; one that is resumed is continued."""
        names = {"project": self.args.wandb_project_name, "entity": self.args.wandb_entity, "name": self.output.name}
        os.environ.setdefault("WANDB_INIT_TIMEOUT", "15")  # W&B's own 90 seconds are long for a wrong address
        with explain("W&B did not start; log in with `wandb login`, set WANDB_MODE=offline (`wandb sync` uploads it "
                     "later) or, for a slow server, WANDB_INIT_TIMEOUT=90, or leave out --track"):  # fmt: skip
            import wandb

            config = asdict(self.args)
            self.wandb = wandb.init(**names, config=config, dir=self.output, id=self.wandb_id, resume="allow")
            self.wandb_id = self.wandb.id

    def __enter__(self) -> "Run":
        """Ctrl-C, SIGTERM and SIGHUP end the run after the step it is in, unless they are ignored, as by nohup."""
        numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
        heeded = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
        self.handlers = {number: signal.signal(number, self.heed) for number in heeded}
        return self

    def heed(self, number: int, frame) -> None:
        """The handler. A second signal does not wait for the end of the step; but torchrun passes each one on twice."""
        if self.signal and WORLD_SIZE == 1:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number)
        print(f"\n{self.signal.name}: stopping after this step; send it again to stop at once", file=sys.stderr)

    def __exit__(self, kind: type | None, error: BaseException | None, trace) -> None:
        """Saves what was trained, if a step was made. An error in saving does not hide the one from before.

        Nothing is saved if another process has failed: the model cannot be put together without it.
        """
        if kind is KeyboardInterrupt:
            error.add_note(f"to resume: {self.resume_command()}")
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        self.bar.close()
        with suppress(OSError):  # what a full disk did not take was reported where it was written
            self.file.close()
        try:
            if self.written and (WORLD_SIZE == 1 or kind in (None, KeyboardInterrupt)):
                self.finish()
        except Exception as second:
            if error is None:
                raise
            error.add_note(f"then: {str(second) or type(second).__name__}")
        if self.wandb:
            self.wandb.finish()
        if error is None:
            self.show_commands()

    def resume_command(self) -> str:
        """The command line that continues this run."""
        launcher = "python" if WORLD_SIZE == 1 else f"torchrun --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']}"
        return f"{launcher} {Path(__file__).name} --resume {shlex.quote(str(self.output))}"

    def show_commands(self) -> None:
        """The command lines that look at a run that has ended, and that make one of twice the length out of it."""
        files = Path(__file__).with_name("docs") / "xray.py", self.output / "samples.jsonl"
        if all(file.exists() for file in files):
            print(f"to look at its tokens: python docs/xray.py {shlex.quote(str(self.output))}")
        length = getattr(self.args, LENGTH) or self.num_steps * self.args.batch_size
        print(f"to go on for as long again: {self.resume_command()} --{LENGTH.replace('_', '-')} {2 * length}")

    def steps(self) -> Iterator[int]:
        """The numbers of the steps that are left, each begun with its own seed."""
        for step in range(self.step + 1, self.num_steps + 1):
            self.step = step
            set_seed(make_seed(self.args.seed, step))
            yield step

    @contextmanager
    def clock(self, phase: str) -> Iterator[None]:
        """Takes the seconds of a phase of this step."""
        start = time.perf_counter()
        yield
        if self.args.torch_device != "cpu":
            torch.accelerator.synchronize()
        self.seconds[phase] = time.perf_counter() - start

    def write(self, stats: dict[str, float], *shown: str) -> None:
        """Ends a step: one line of metrics.jsonl, W&B, and the metrics named in `shown` beside the bar."""
        stats |= {f"time/{phase}": seconds for phase, seconds in self.seconds.items()}
        stats["perf/peak_memory_mb"] = peak_memory_mb()
        line = {name: x if math.isfinite(x) else None for name, x in stats.items()}  # JSON has no NaN
        with explain(f"{self.output}/metrics.jsonl could not be written"):
            print(json.dumps(line), file=self.file, flush=True)
        if self.wandb:
            self.wandb.log(stats, step=self.step)
        beside = [f"{name.split('/')[-1]} {stats[name]:.2f}" for name in shown if name in stats]
        self.bar.set_postfix_str(", ".join(beside), refresh=False)
        self.bar.update()
        self.written += 1
        is_finite = all(math.isfinite(x) for name, x in stats.items() if name.endswith("grad_norm"))
        self.broken = 0 if is_finite else self.broken + 1
        require(self.broken < 5, "the gradient was NaN or infinite five times in a row (most often the "
                "--learning-rate is too high; ddpo.py: --train-learning-rate); no such step was made")  # fmt: skip

    def keep_samples(self, samples: list[dict]) -> None:
        """Appends to samples.jsonl. If a run is resumed, the last line of a step and row counts."""
        with suppress(OSError):  # a disk that is full, a folder that is gone: the run itself goes on
            if not RANK:
                with open(self.output / "samples.jsonl", "a", encoding="utf-8") as file:
                    file.writelines(json.dumps({"update": self.step, **sample}) + "\n" for sample in samples)

    def is_due(self, every: int) -> bool:
        """True after every so many steps, and after the last one."""
        return self.step % every == 0 or self.step == self.num_steps

    def is_turn(self, times: int) -> bool:
        """True after `times` evenly spread steps, the last one included."""
        return self.step * times // self.num_steps > (self.step - 1) * times // self.num_steps

    def warn(self, sentence: str) -> None:
        """Prints a warning, once per run."""
        if sentence not in self.warned and not RANK:
            self.bar.write(f"warning: {sentence}", file=sys.stderr)
        self.warned.add(sentence)

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """Shows a table. Markup and control characters in its cells are shown, not obeyed."""
        table = Table(title=title, show_lines=True)
        for name in columns:
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*(Text(printable(cell)) for cell in row))
        with self.bar.external_write_mode():
            Console(quiet=RANK > 0).print(table)

    def save(self) -> None:
        """Writes a checkpoint, if it is time or a signal came; it is renamed into place when it is whole."""
        self.must_stop = bool(all_reduce(torch.tensor(int(self.signal is not None))))  # in one process, so in all
        if not self.must_stop and not self.is_due(self.args.save_steps):
            return
        models, optimizer = dcp.get_state_dict(self.models, self.optimizer, options=WHOLE)
        if RANK:
            return
        state = {
            "script": Path(__file__).name, "step": self.step, "models": models, "optimizer": optimizer,
            "state": self.state, "bytes": self.file.tell(), "seconds": time.perf_counter() - self.start,
            "machine": machine(), "wandb_id": self.wandb_id,
        }  # fmt: skip
        folder = self.output / "checkpoints"
        try:
            os.fsync(self.file.fileno())
            with open(folder / "unfinished", "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            (folder / "unfinished").replace(folder / f"step-{self.step:08d}.pt")
            for old in sorted(folder.glob("step-*.pt"))[: -self.args.save_total_limit]:
                old.unlink()
        except (OSError, RuntimeError) as error:  # a disk that is full, a folder that is gone: the run itself goes on
            (folder / "unfinished").unlink(missing_ok=True)
            print(f"warning: no checkpoint after step {self.step} (is the disk full?): {error}", file=sys.stderr)

    def stop(self) -> None:
        """Ends the run if a signal has asked for it."""
        if self.must_stop and self.step < self.num_steps:
            raise KeyboardInterrupt(f"stopped by a signal after step {self.step} of {self.num_steps}")

    def restore(self, path: Path) -> None:
        """Brings everything back to a checkpoint and removes what came after it; without any, the run starts over."""
        files = [path] if path.is_file() else sorted((self.output / "checkpoints").glob("step-*.pt"), reverse=True)
        file, state = read_checkpoint(files)
        if not files:
            if not RANK:
                self.file.truncate(0)
            return
        require(state, f"--resume {path}: there is no checkpoint that can be read; start a new run")
        script = Path(__file__).name
        require(state["script"] == script, f"--resume {path}: that is a checkpoint of {state['script']}, not {script}")
        metrics = self.output / "metrics.jsonl"
        is_whole = metrics.stat().st_size >= state["bytes"]
        require(is_whole, f"{metrics} is shorter than when {file.name} was written; start a new run")
        with explain(f"--resume {path}: this checkpoint does not fit the model"):
            # The optimiser first: to have moments to fill in, it is made to take a step, and the average follows
            dcp.set_optimizer_state_dict(self.models, self.optimizer, state["optimizer"], options=WHOLE)
            dcp.set_model_state_dict(self.models, state["models"], options=WHOLE)
        same = state["state"].get("data") == self.state.get("data")
        require(same, f"--resume {path}: the dataset is not the one that the run began with; start a new run")
        if state["machine"] != machine():
            print(f"continues on {machine()}, after {state['machine']}: the numbers will differ in their last bits")
        self.state.update(state["state"])
        self.step = self.written = state["step"]
        self.start -= state["seconds"]
        self.wandb_id = state["wandb_id"]
        if not RANK:
            self.file.truncate(state["bytes"])
            for later in (self.output / "checkpoints").glob("step-*.pt"):
                if later.name > file.name:
                    later.unlink()
        print(f"continues after step {self.step}, from {file}")

    def finish(self) -> None:
        """Saves the model, and its moving average in ema/; beside it the card and the curves."""
        with explain(f"the model could not be saved in {self.output}"):
            save_model(self.models["model"], self.output, self.args)
            if "ema" in self.models:
                save_model(self.models["ema"], self.output / "ema", self.args)
        if not RANK:
            with explain(f"the model is saved in {self.output}, but its card or curves could not be made"):
                lines = [json.loads(line) for line in open(self.output / "metrics.jsonl")]
                write_card(self.output, self.args, lines)
                draw_curves(self.output, lines)
            print(f"saved in {self.output}: the model, its card, metrics.jsonl and curves.png")


def read_checkpoint(files: list[Path]) -> tuple[Path | None, dict | None]:
    """The first of the files that is whole and a checkpoint, and what it holds."""
    for file in files:
        with suppress(Exception):  # whatever a damaged file, or somebody else's, makes of it
            state = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
            if zipfile.ZipFile(file).testzip() is None and "wandb_id" in state:  # right checksums, the last key
                return file, state
        print(f"warning: {file} is damaged, or no checkpoint, and cannot be read", file=sys.stderr)
    return None, None


def machine() -> str:
    """What the last bits of a sum depend on."""
    return f"{WORLD_SIZE} process(es) of {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"


def printable(text: str) -> str:
    """Text without control characters: what a model writes must not steer the reader's terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)


def peak_memory_mb() -> float:
    """Peak memory in MB: of the GPU on CUDA, else of this process; 0 on Windows, which keeps no such figure."""
    if torch.cuda.max_memory_allocated() or sys.platform == "win32":  # 0 if there is none, or it is not used
        return torch.cuda.max_memory_allocated() / 2**20
    import resource

    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def save_model(model: nn.Module, folder: Path, args: Args) -> None:
    """Model (safetensors) and tokenizer; beside an adapter, in merged/, the whole model."""
    weights = dcp.get_model_state_dict(model, options=WHOLE)
    if RANK:
        return
    tied = model.all_tied_weights_keys
    model.save_pretrained(folder, state_dict={name: x for name, x in weights.items() if name not in tied})
    require(any(folder.glob("*.safetensors")), f"{folder} holds no weights")  # the library only logs that it is a file
    model.tokenizer.save_pretrained(folder)
    if getattr(model, "peft_config", None):
        from peft import PeftModel

        whole = load_model(model.auto_class, args.model, args, new_head=True, config=model.config)
        merged = PeftModel.from_pretrained(whole, folder)
        merged.merge_and_unload().save_pretrained(folder / "merged")
        model.tokenizer.save_pretrained(folder / "merged")


def write_card(output: Path, args: Args, lines: list[dict[str, float]], library: str = "transformers") -> None:
    """README.md, the model card: the last metrics and all settings, as JSON, in which no name is taken for markup."""
    data = ModelCardData(library_name=library, tags=[Path(__file__).stem])
    if args.model and not on_disk(args.model):  # a name on the hub, to which the card then links
        data.base_model = args.model
    if args.dataset and not on_disk(args.dataset):
        data.datasets = args.dataset
    last = {}
    for line in lines:
        last |= {name: value for name, value in line.items() if value is not None}
    rows = "\n".join(f"| `{name}` | {value:.6g} |" for name, value in last.items())
    text = f"Made by `{Path(__file__).name}`.\n\n## Last metrics\n\n| metric | value |\n|---|---|\n{rows}\n"
    settings = f"\n## Settings\n\n```json\n{json.dumps(asdict(args), indent=2)}\n```\n"
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}{settings}").save(output / "README.md")


def draw_curves(output: Path, lines: list[dict[str, float]]) -> None:
    """curves.png: one panel for each list of metrics in CURVES."""
    from matplotlib.figure import Figure

    x = "episode" if "episode" in lines[0] else "step"
    figure = Figure((5 * len(CURVES), 3.2), layout="constrained")
    axes = figure.subplots(1, len(CURVES), squeeze=False)[0]
    for axis, names in zip(axes, CURVES):
        for name in names:
            points = [(line[x], line[name]) for line in lines if line.get(name) is not None]
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
    args = read()
    if args.resume is None:
        return args
    path = Path(args.resume)
    folder = path.parent.parent if path.is_file() else path
    names = [f.name for f in fields(Args) if f.init]
    with explain(f"--resume {args.resume}: its args.json cannot be read (is it a run of {Path(__file__).name}?)"):
        saved = json.loads((folder / "args.json").read_text())
        before = TypeAdapter(Args).validate_python({name: saved[name] for name in names})
    args = read(default=before)
    for name in names[: names.index("resume")]:
        old = getattr(before, name)
        new = getattr(args, name)
        flag = f"--{name.replace('_', '-')}"
        require(old == new, f"{flag} {new} is not what the run in {folder} was made with, {old}; start a new run")
    same = args.output_dir in (before.output_dir, str(folder))
    require(same, f"--output-dir {args.output_dir}: a run that is resumed stays in its folder, {folder}")
    args.output_dir = str(folder)
    return args


class Terminal:
    """A stream that may end before the run does, as behind `| head`: what it no longer takes is dropped."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name: str):
        return getattr(self.stream, name)

    def write(self, text: str) -> None:
        """Writes at once, so that an error comes here."""
        with suppress(OSError):
            self.stream.write(text)
            self.stream.flush()


def main() -> None:
    """Reads the command line and trains; a user's mistake ends in one sentence and exit code 2."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout = Terminal(sys.stdout)
    sys.stderr = terminal = Terminal(sys.stderr)
    if RANK:  # only the first process writes to the terminal
        sys.stdout = sys.stderr = open(os.devnull, "w")
    try:
        train(read_command_line())
        if dist.is_initialized():
            dist.barrier()  # nobody leaves while another still waits for what it sent
            dist.destroy_process_group()
    except KeyboardInterrupt as stop:
        print("; ".join([str(stop) or "interrupted", *getattr(stop, "__notes__", [])]), file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        sys.stderr = terminal
        if "by peer" in str(error):
            sys.exit(f"process {RANK} stops: another one, which shows its own error, has closed the connection")
        sentence = "; ".join([str(error), *getattr(error, "__notes__", [])])
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in sentence:
            sentence = "out of memory: lower --micro-batch-size (ddpo.py: --train-batch-size); more in docs/guide.md"
        elif not isinstance(error, UserError):
            raise
        time.sleep(5 * (RANK > 0))  # an error that all processes find is reported by the first
        print(printable(f"{Path(__file__).name}: error: {sentence}"), file=terminal)
        sys.exit(2)


if __name__ == "__main__":
    main()
