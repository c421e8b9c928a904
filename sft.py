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
"""Supervised fine-tuning: texts -> policy.

For each batch of texts x_1..x_n, each with an EOS (end of sequence) at its end:
  1. encode   prompt tokens, completion tokens, EOS; completion and EOS are the labels (without a prompt, all tokens)
  2. loss     -mean_t log pi(x_t | x_<t) over the labels
  3. update   one AdamW step; the learning rate is warmed up, then annealed

  text          The  film  |  is   a    joy   .   EOS
  label          -    -    |  *    *     *    *    *       read from the logits one position to the left

EOS is a label like any other: without it, the policy would never end a text, and all responses of a later RLHF run
would be cut off. By default, prompt tokens are not labels: the policy should answer prompts, not invent them.
Papers: Ouyang et al. 2022 (InstructGPT, arXiv 2203.02155, sec. 3.5); Huang et al. 2024 (the N+ implementation details,
2403.17031). docs/sft.md has a glossary of the metrics.

  python sft.py                              # a small GPT-2 from scratch on the toy corpus: offline, a minute on a CPU
  python sft.py --model gpt2 --dataset D     # fine-tunes GPT-2; D has `text`, `prompt` + `completion`, or `messages`

Shapes: B rows, S tokens (right-padded), V vocabulary.
"""

import ctypes
import glob
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import asdict, field, replace
from datetime import datetime, timedelta
from functools import cache, lru_cache, partial
from itertools import groupby
from pathlib import Path
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
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers import get_scheduler, set_seed
from transformers.activations import ACT2FN, GELUTanh
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D
from transformers.utils import find_adapter_config_file, logging

VERSION = "2026.11"  # as in CITATION.cff

# The rank of this process and the number of processes under torchrun; otherwise 0 and 1. All processes read the same
# data and draw the same random numbers; each computes its share of every batch
RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))

# --- Settings. A type limits the values; the comment beside or above a setting is its help text

Positive = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0, lt=2**32)]
Name = Annotated[str, Field(min_length=1)]


@pydantic.dataclasses.dataclass  # checks the values
class Args:
    # --- Supervised fine-tuning ---
    # only completions, or the assistant's messages, are labels (TRL)
    completion_only_loss: bool = True
    max_length: Count = 512  # longer texts are cut at the end, and counted; with packing, the length of a block
    packing: bool = False  # join all texts, each with its EOS, and cut them into blocks of max_length: no padding (TRL)

    # --- Optimisation ---
    # learning rate of AdamW; by default 2e-5 (TRL), with LoRA 2e-4, from scratch 3e-3
    learning_rate: Positive | None = None
    lr_scheduler_type: Name = "cosine"  # name of a transformers schedule that depends only on the step (N+ details)
    warmup_ratio: Share = 0.03  # share of the run in which the learning rate warms up from 0
    weight_decay: NonNegative = 0.0  # weight decay of AdamW
    max_grad_norm: Positive = 1.0  # the gradient is clipped to this norm

    # --- Batch sizes ---
    # rows per optimiser step, on all GPUs together; by default 64, or fewer if that makes fewer than 100 steps
    batch_size: Count | None = None
    micro_batch_size: Count | None = None  # rows per forward/backward pass; affects rounding and dropout only
    # TRL's name for micro_batch_size; batch_size is then this x gradient_accumulation_steps x GPUs
    per_device_train_batch_size: Count | None = None
    gradient_accumulation_steps: Count = 1  # with per_device_train_batch_size: passes per optimiser step (TRL)

    # --- Model: a folder, or a name on the hub ---
    # the pretrained model to fine-tune; by default one with random weights
    model: Name | None = None
    from_scratch: Name = "toy/base"  # without --model: use the config and the tokenizer of this model
    lora_r: Natural = 0  # rank of LoRA adapters (Hu et al. 2021), 0 for none
    lora_alpha: Positive = 32.0  # the adapter's output is scaled by lora_alpha / lora_r
    lora_target_modules: Name = "all-linear"  # layers to adapt: all-linear, or a regular expression for their names
    bf16: bool = False  # run the models in bfloat16 (autocast); trained weights and optimiser state stay in float32
    attn_implementation: Name | None = None  # eager, sdpa, flash_attention_2, ...; by default transformers' own choice
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: far less memory, a third slower
    trust_remote_code: bool = False  # run Python code that comes with a model; only if you have read that code

    # --- Data ---
    # folder, file (jsonl, json, csv, parquet) or hub name
    dataset: Name = "toy/data/sft"
    dataset_config: Name | None = None  # configuration of a hub dataset that has several
    dataset_train_split: Name = "train"  # split to train on
    dataset_test_split: Name | None = None  # split to evaluate on, or none; by default validation, if there is one
    # conversations: lists of {role, content} messages, rendered by the tokenizer's chat template. By default, the first
    # of the columns messages, completion and text that exists is read
    messages_column: Name | None = None
    completion_column: Name | None = None  # completions: texts, or lists of messages
    prompt_column: Name = "prompt"  # prompts of the completions: texts, or lists of messages
    text_column: Name | None = None  # texts to train on
    seed: Natural = 1  # seed of the order of texts, of dropout, and of random weights

    # --- Run ---
    # folder of a run to continue. It keeps its settings, except those given on the command line
    resume: Name | None = None
    num_train_epochs: Positive = 1.0  # passes over the data (N+ details: 1)
    exp_name: Name = "sft"  # name of this run, in its folder and on W&B
    output_dir: Name | None = None  # folder for all output; by default a new folder runs/NAME__SEED__TIME
    # cpu, cuda, mps; by default cuda if there is one
    device: Name = field(default_factory=lambda: "cuda" if torch.cuda.is_available() else "cpu")
    save_steps: Count = 100  # steps between checkpoints, which hold the full state of the run
    save_total_limit: Count = 2  # number of newest checkpoints to keep
    eval_steps: Count = 100  # steps between evaluations; the last step is always followed by one
    num_sample_generations: Natural = 3  # number of tables of sampled completions to print (TRL)
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works without an account)
    wandb_project_name: Name = "rlhf"  # W&B project, with --track
    wandb_entity: Name | None = None  # W&B team, with --track

    # --- Many GPUs: torchrun --nproc-per-node N ---
    # sharding over GPUs (FSDP2): 0 none; 2 gradients and optimiser state; 3 also the weights
    zero_stage: Literal[0, 2, 3] = 0
    shard_size: Count | None = None  # GPUs that together hold one copy, e.g. those of a node (ZeRO++); default: all
    offload: bool = False  # keep the shards in CPU memory until they are needed: slow, for models that do not fit


# --- The loop, with the steps of the docstring ------------------------------------------------------------------------


def train(args: Args) -> None:
    """Trains the policy, and saves it with its metrics, curves and model card in the run's folder."""
    check_args(args)
    start(args)
    asked = args

    policy = load_policy(args)
    place(policy, args)

    rows, eval_rows = load_texts(args, policy)  # 1
    lengths = list(rows["length"])
    longest = max([*lengths, *(len(ids) for ids, _ in eval_rows)])
    args = choose_sizes(args, policy, len(rows), longest)
    is_label = [label != IGNORE for label in rows[0]["labels"]]
    show_first_row({"text, with its labels in green": as_read(rows[0]["ids"], policy.tokenizer, is_label)})
    steps_per_epoch = math.ceil(len(rows) / args.batch_size)
    num_steps = math.ceil(args.num_train_epochs * steps_per_epoch)

    optimizer = make_optimizer(args, policy)
    schedule = get_scheduler(args.lr_scheduler_type, optimizer, int(args.warmup_ratio * num_steps), num_steps)
    memory = {"num_tokens": 0}  # in checkpoints, besides weights and moments
    run = Run(args, num_steps, optimizer, schedule, memory, asked, model=policy)
    for step in run.steps():
        set_seed(make_seed(args.seed, step))
        separate_dropout(args, step)
        texts = as_rows(rows[random_batch(lengths, step - 1, args.batch_size, args.seed)])
        with run.clock("step"):
            stats, num_labels = update(policy, optimizer, texts, args)  # 2 and 3
        memory["num_tokens"] += num_labels
        stats |= {
            "step": step,
            "epoch": step / steps_per_epoch,
            "num_tokens": memory["num_tokens"],
            "lr": optimizer.param_groups[0]["lr"],
            "perf/tokens_per_second": num_labels / run.seconds["step"],
        }
        if eval_rows and run.is_due(args.eval_steps):
            stats |= evaluate(policy, eval_rows, args)
        run.log(stats, "loss", "mean_token_accuracy")
        if run.is_one_of(args.num_sample_generations):
            show_samples(run, policy, eval_rows or as_rows(rows[:3]), args)
        schedule.step()
    run.finish()


# --- 1. Encode --------------------------------------------------------------------------------------------------------

IGNORE = -100  # the label of a token without loss (PyTorch's convention)
Row = tuple[list[int], list[int]]  # token ids and labels of a text


def encode_pair(
    prompt: str | list[dict],
    completion: str | list[dict],
    tokenizer: AutoTokenizer,
    completion_only: bool,
    options: dict = {},
) -> Row:
    """Encodes prompt + completion + EOS, or a conversation. Of a text without a prompt, all tokens are labels.

    In plain text, the prompt's tokens are those of the prompt encoded alone, as in a rollout; a token that spans the
    end of the prompt and the start of the completion is a label. If the prompt or the completion is a list of messages,
    the prompt is the start of a conversation, and the completion is the turns after it.
    """
    if isinstance(prompt, list) or isinstance(completion, list):
        turns = whole_turns(prompt, completion)
        given = as_turns(prompt, "user") if prompt else []
        num_given = len(given) + (turns[:1] != given[:1])  # the completion may add a system message before the prompt
        return encode_messages(turns, tokenizer, completion_only, options, num_given)
    require(not options, "the columns tools and chat_template_kwargs need conversations, but the rows are texts")
    warn_of_plain_texts(tokenizer)
    ids = with_eos(encode_text(prompt + completion, tokenizer), tokenizer)
    if not prompt or not completion_only:
        return ids, ids
    alone = encode_text(prompt, tokenizer)
    start = shared_length(alone, ids)
    warn_of_joined_tokens(len(alone) - start)
    return ids, [IGNORE] * start + ids[start:]


def encode_messages(
    messages: list[dict], tokenizer: AutoTokenizer, completion_only: bool, options: dict = {}, num_given: int = 0
) -> Row:
    """Encodes a conversation. With completion_only, the labels are the assistant's turns after the first num_given
    messages, each with the token that ends it.

    The rendered conversation is encoded as one text, in which each turn is located. A token that spans the start of a
    turn is a label; a token that spans its end is not.
    """
    turns = as_turns(messages, "user")
    if not turns:
        return [], []
    end, after_end = turn_end(tokenizer)
    text = render_whole(turns, tokenizer, options)
    check_rendered(text, turns, tokenizer, options)
    encode = partial(tokenizer, add_special_tokens=False)
    ids = encode(text)["input_ids"]
    labels = [IGNORE] * len(ids)
    for i in range(max(1, num_given), len(turns)):
        if turns[i]["role"] != "assistant":
            continue
        head = render(turns[:i], tokenizer, options, is_prompt=True)  # the prompt of a rollout
        before = render(turns[:i], tokenizer, options).removesuffix(after_end)
        turn = text
        if i < len(turns) - 1:
            turn = render(turns[: i + 1], tokenizer, options).removesuffix(after_end)
        if not turn.startswith(before) or not text.startswith(turn):
            warnings.warn("the chat template changes turns that other turns follow: changed turns have no labels")
            continue
        prompt = encode(head)["input_ids"]
        first = shared_length(prompt, ids)
        warn_of_joined_tokens(len(prompt) - first)
        last = shared_length(encode(turn)["input_ids"], ids)
        labels[first:last] = ids[first:last]
    if not completion_only:
        labels = ids
    if end or turns[-1]["role"] != "assistant":
        return ids, labels
    return with_eos(ids, tokenizer), with_eos(labels, tokenizer)


def pack(rows: list[Row], length: int) -> list[Row]:
    """Joins texts, each with its EOS, and cuts them into blocks of `length` tokens. The remainder is dropped.

    [[a b EOS], [c d e EOS], [f EOS]] at length 4 -> [a b EOS c], [d e EOS f]
    """
    all_ids = [token for ids, _ in rows for token in ids]
    all_labels = [label for _, labels in rows for label in labels]
    blocks = []
    for start in range(0, len(all_ids) - length + 1, length):
        end = start + length
        blocks.append((all_ids[start:end], all_labels[start:end]))
    return blocks


def random_batch(lengths: list[int], number: int, size: int, seed: int) -> list[int]:
    """Returns the numbers of a batch's rows. Batches are counted from 0 across passes; each pass has its own random
    order.

    The last batch of a pass may be smaller. Each batch is sorted by length, so that its micro-batches need little
    padding. If batches grouped rows of similar length, each step would have one kind of text, and a policy trained from
    scratch would learn less.
    """
    pass_number, offset = divmod(number, math.ceil(len(lengths) / size))
    order = shuffled(len(lengths), seed, pass_number)
    start = offset * size
    return sorted(order[start : start + size], key=lengths.__getitem__)


# --- 2. Loss ----------------------------------------------------------------------------------------------------------


def label_logits(policy: nn.Module, rows: list[Row], args: Args) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (b, L, V), the tokens that they predict (b, L), and which of these are labels (b, L).

    L counts the positions where at least one row has a label: logits are computed only there.
    """
    ids, is_real = pad([ids for ids, _ in rows], policy.tokenizer, args)  # (b, S)
    labels, _ = pad([labels for _, labels in rows], policy.tokenizer, args)
    mask = (is_real & (labels != IGNORE))[:, 1:]  # nothing predicts the first token
    positions = mask.any(0).nonzero().squeeze(1)  # (L,)
    with autocast(args):
        output = policy(input_ids=ids, attention_mask=is_real.long(), use_cache=False, logits_to_keep=positions)
    return output.logits, ids[:, 1:][:, positions], mask[:, positions]


def token_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """(B, T) log-probability of each token under logits (B, T, V)."""
    return logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


# --- 3. Update --------------------------------------------------------------------------------------------------------


def update(
    policy: nn.Module, optimizer: torch.optim.Optimizer, texts: list[Row], args: Args
) -> tuple[dict[str, float], int]:
    """Makes one optimiser step on a batch of texts. Returns its metrics and the number of labels.

    The loss is the mean over all labels of the batch, however it is split into micro-batches and among processes.
    """
    policy.train()
    num_labels = sum(label != IGNORE for _, labels in texts for label in labels[1:])
    sums = torch.zeros(2, device=args.device)
    optimizer.zero_grad()
    for part, counts in micro_batches(texts, args):
        logits, targets, mask = label_logits(policy, part, args)  # (b, L, V), (b, L), (b, L)
        mask &= counts[:, None]
        losses = -token_logprobs(logits.float(), targets)
        part_loss = torch.where(mask, losses, 0.0).sum() / num_labels
        (WORLD_SIZE * part_loss).backward()  # gradients are averaged over processes
        is_hit = mask & (logits.argmax(-1) == targets)
        sums += torch.stack([part_loss.detach(), is_hit.sum() / num_labels])
    policy.eval()
    grad_norm = clip_gradient(optimizer.param_groups[0]["params"], args.max_grad_norm)
    if grad_norm.isfinite():  # otherwise all weights would become NaN
        optimizer.step()
    loss, accuracy = all_reduce(sums).tolist()
    return {"loss": loss, "mean_token_accuracy": accuracy, "grad_norm": grad_norm.item()}, num_labels


# === End of the algorithm. Next: its metrics and options, then the code that every training script needs ============


@torch.no_grad()
def evaluate(policy: nn.Module, rows: list[Row], args: Args) -> dict[str, float]:
    """Loss, perplexity, accuracy, and the loss on EOS, over all labels of the test split."""
    sums = torch.zeros(5, device=args.device)
    for part, counts in micro_batches(sorted(rows, key=lambda row: len(row[0])), args):
        logits, targets, mask = label_logits(policy, part, args)
        mask &= counts[:, None]
        losses = -token_logprobs(logits.float(), targets)
        is_hit = logits.argmax(-1) == targets
        is_eos = mask & torch.isin(targets, targets.new_tensor(policy.generation_config.eos_token_id))
        of_labels = [losses[mask], mask, is_hit[mask], losses[is_eos], is_eos]
        sums += torch.stack([x.sum() for x in of_labels])
    loss, num_labels, hits, eos_loss, num_eos = all_reduce(sums).tolist()
    return {
        "eval/loss": loss / num_labels,
        "eval/perplexity": math.exp(min(loss / num_labels, 700.0)),  # exp of more overflows
        "eval/mean_token_accuracy": hits / num_labels,
        "eval/eos_loss": eos_loss / max(1.0, num_eos),
    }


def show_samples(run: "Run", policy: nn.Module, examples: list[Row], args: Args) -> None:
    """Prints a table of three prompts, with a completion sampled from the policy and the one in the dataset.

    The prompt is the tokens before the first label; if there are none, the first eight tokens, or half of a short text.
    """
    tokenizer = policy.tokenizer
    heads = []
    tails = []
    for ids, labels in examples[:3]:
        start = next(i for i, label in enumerate(labels) if label != IGNORE) or min(8, len(ids) // 2)
        heads.append(ids[:start])
        tails.append(ids[start:])
    prompts, prompt_mask = pad(heads, tokenizer, args, "left")  # (3, P)
    torch.manual_seed(args.seed)  # all processes draw the same completions
    stored = policy.generation_config
    policy.generation_config = GenerationConfig()  # otherwise its settings would be added to those below
    with autocast(args):
        output = policy.generate(
            prompts,
            attention_mask=prompt_mask.long(),
            max_new_tokens=min(53, context_length(policy) - prompts.shape[1]),
            do_sample=True,
            temperature=1.0,  # with the next two lines: the policy's own distribution
            top_k=0,
            top_p=1.0,
            eos_token_id=stored.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            return_dict_in_generate=True,
            output_logits=True,
        )
    policy.generation_config = stored
    responses = output.sequences[:, prompts.shape[1] :]  # (3, T)
    logits = torch.stack(output.logits, 2).float()  # (3, V, T)
    is_eos = torch.isin(responses, responses.new_tensor(stored.eos_token_id)).long()
    tensors = {
        "prompts": prompts,
        "prompt_mask": prompt_mask,
        "responses": responses,
        "mask": is_eos.cumsum(1) - is_eos == 0,  # true up to the stop token, inclusive
        "logprobs": -F.cross_entropy(logits, responses, reduction="none"),
    }
    columns = {
        "prompt": tokenizer.batch_decode(heads),
        "sampled completion": [tokenizer.decode(row[real]) for row, real in zip(responses, tensors["mask"])],
        "completion in the dataset": tokenizer.batch_decode(tails),
    }
    run.show(columns, tensors)


# --- Models and data --------------------------------------------------------------------------------------------------


def load_policy(args: Args) -> nn.Module:
    """Loads the model to train, or draws its weights at random; in float32, with the dropout of its config."""
    if args.model is not None:
        policy = load_model(AutoModelForCausalLM, args.model, args)
    else:
        require(not args.lora_r, "--lora-r trains an adapter of a pretrained model, which --model must name")
        path = locate(args.from_scratch)
        options = {"trust_remote_code": args.trust_remote_code}
        config = AutoConfig.from_pretrained(path, **options)
        tokenizer = AutoTokenizer.from_pretrained(path, **options)
        options |= {"attn_implementation": args.attn_implementation, "dtype": torch.float32}
        with torch.device("meta" if RANK and args.zero_stage else "cpu"):  # process 0 draws weights; `place` sends them
            policy = AutoModelForCausalLM.from_config(config, **options).eval()
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        policy.tokenizer = tokenizer
    has_eos = policy.tokenizer.eos_token_id is not None
    require(has_eos, f"the tokenizer of {args.model or args.from_scratch} has no EOS token to end completions with")
    stored = policy.generation_config  # saved with the policy, for programs that sample from it later
    stored.eos_token_id = eos_tokens(policy)
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


def load_texts(args: Args, policy: nn.Module) -> tuple[datasets.Dataset, list[Row]]:
    """Loads the training rows (ids, labels and length), and the test rows, which are not packed."""
    train, test = load_data(args)
    limit = min(args.max_length, context_length(policy))
    rows = read_texts(train, policy.tokenizer, args, sys.maxsize if args.packing else limit)
    if args.packing:
        rows = pack_rows(rows, limit)
    reason = "all texts together are shorter than one block" if args.packing else "no text has a label"
    require(len(rows), f"--dataset {args.dataset}: {reason} (--max-length {limit})")
    if test is None:
        return rows, []
    eval_rows = as_rows(read_texts(test, policy.tokenizer, args, limit)[:])
    require(eval_rows, f"--dataset {args.dataset}: no text of the test split has a label (--max-length {limit})")
    return rows, eval_rows


def as_rows(columns: dict[str, list]) -> list[Row]:
    """Turns columns of `read_texts` into rows."""
    return list(zip(columns["ids"], columns["labels"]))


def read_texts(data: datasets.Dataset, tokenizer: AutoTokenizer, args: Args, limit: int) -> datasets.Dataset:
    """Encodes the texts of a split in any of the three formats, and cuts them to `limit` tokens. Texts without a label
    are dropped, and their number is printed."""
    completion_only = args.completion_only_loss
    prompt = args.prompt_column
    kind, column = text_column(data, args)
    is_pair = kind == "completion"
    hold_prompt = is_pair and texts_hold_prompt(data, prompt, column)

    def encode(row: dict) -> dict:
        """Encodes one row."""
        text = read_value(row, column)
        options = template_options(row)
        if is_pair:
            start = read_value(row, prompt)
            if hold_prompt and start.strip():
                start = start.rstrip()
                text = text.lstrip().removeprefix(start.lstrip())
            ids, labels = encode_pair(start, text, tokenizer, completion_only, options)
        elif isinstance(text, list):
            ids, labels = encode_messages(text, tokenizer, completion_only, options)
        else:
            ids, labels = encode_pair("", text, tokenizer, False, options)
        return {
            "ids": ids[:limit],
            "labels": labels[:limit],
            "length": min(len(ids), limit),
            "is_cut": len(ids) > limit,
        }

    rows = encode_rows(data, encode)
    # nothing predicts the first token
    is_kept = np.array([any(label != IGNORE for label in labels[1:]) for labels in rows["labels"]])
    num_cut = sum(rows["is_cut"])
    num_dropped = len(rows) - is_kept.sum()
    notes = [
        f"cut {num_cut} of {len(rows)} to {limit} tokens, so they lost their EOS" if num_cut else "",
        f"dropped {num_dropped} of {len(rows)}, which have no labels" if num_dropped else "",
    ]
    rows = rows.select(np.flatnonzero(is_kept))
    if len(rows):
        print_lengths(f"{rows.split} texts", rows["length"], *notes)
    return rows


def text_column(data: datasets.Dataset, args: Args) -> tuple[str, str]:
    """Returns the format of the rows (messages, completion or text) and its column: the one that a flag names, or the
    first that the data has. Checks the columns, and prints those that are not read."""
    columns = {"messages": args.messages_column, "completion": args.completion_column, "text": args.text_column}
    named = {kind: column for kind, column in columns.items() if column}
    flags = {f"--{kind}-column": column for kind, column in named.items()}
    require(len(flags) < 2, f"give only one of {', '.join(flags)}")
    check_columns(data, flags)
    found = named or {kind: kind for kind in columns if kind in data.column_names}
    names = ", ".join(data.column_names)
    require(found, f"the dataset has the columns {names}: set --messages-column, --completion-column or --text-column")
    kind, column = next(iter(found.items()))
    is_unused = kind != "completion" and args.prompt_column != Args.prompt_column
    require(not is_unused, f"--prompt-column has no effect, since the column {column!r} is read")
    if kind != "completion":
        print_unread(data, column)
        return kind, column
    check_columns(data, {"--prompt-column": args.prompt_column})
    print_unread(data, args.prompt_column, column)
    is_paired = str(data.features.get("label")) != "Value('bool')"
    require(is_paired, "the column 'label' (TRL's unpaired preferences) marks good completions: keep only those")
    return kind, column


def pack_rows(rows: datasets.Dataset, length: int) -> datasets.Dataset:
    """Packs texts into blocks of `length` tokens, 10,000 texts at a time."""

    def encode(batch: dict) -> dict:
        """Packs some texts, and drops blocks without a label."""
        blocks = pack(list(zip(batch["ids"], batch["labels"])), length)
        blocks = [(ids, labels) for ids, labels in blocks if any(label != IGNORE for label in labels[1:])]
        return {
            "ids": [ids for ids, _ in blocks],
            "labels": [labels for _, labels in blocks],
            "length": [length] * len(blocks),
        }

    return rows.map(encode, batched=True, batch_size=10_000, remove_columns=rows.column_names)


# --- Settings ---------------------------------------------------------------------------------------------------------

ALIASES = {  # other libraries' spellings
    "--model-name-or-path": "--model",
    "--dataset-name": "--dataset",
    "--dataset-config-name": "--dataset-config",
    "--dataset-text-field": "--text-column",
    "--max-seq-length": "--max-length",
    "--resume-from-checkpoint": "--resume",
}
CURVES = {  # title of a panel: pattern of the metrics in it
    "loss, nats per token": "loss$",
    "share of tokens right": "token_accuracy$",
    "norm of the gradient": "grad_norm$",
}


def check_args(args: Args) -> None:
    """Exits if settings contradict each other, or if a setting has no effect."""
    check_common_args(args)
    refuse_unused(args, "from_scratch", args.model is None, "with --model")


def default_rate(args: Args, policy: nn.Module) -> float:
    """The default learning rate: TRL's for a pretrained model, ten times as high with LoRA."""
    if args.model is None:
        return 3e-3
    if args.lora_r:
        return 2e-4
    return 2e-5


# --- Identical in sft.py, reward_model.py and dpo.py ------------------------------------------------------------------


def with_eos(ids: list[int], tokenizer: AutoTokenizer) -> list[int]:
    """Appends EOS, unless the tokens end with it or the tokenizer has none."""
    eos = tokenizer.eos_token_id
    if eos is None or ids[-1:] == [eos]:
        return ids
    return ids + [eos]


def warn_of_plain_texts(tokenizer: AutoTokenizer) -> None:
    """Warns if a chat model is trained on plain texts."""
    if tokenizer.chat_template:
        warnings.warn("the rows are plain texts, so the chat template is not used: for a chat model, write messages")


def texts_hold_prompt(data: datasets.Dataset, prompt_column: str, *columns: str) -> bool:
    """Whether all texts of these columns begin with their prompt, which is then removed. Warns if only some do. For
    conversations, `whole_turns` checks each row."""
    if not isinstance(data[0][prompt_column], str) or not isinstance(data[0][columns[0]], str):
        return False
    begins = []
    for column in columns:
        for prompt, text in zip(data[prompt_column], data[column]):
            if str(prompt).strip():
                begins.append(str(text).lstrip().startswith(str(prompt).strip()))
    if any(begins) and not all(begins):
        warnings.warn(f"{sum(begins)} of {len(begins)} texts begin with their prompt: in these it is read twice")
    return bool(begins) and all(begins)


def whole_turns(prompt: str | list[dict], text: str | list[dict]) -> list[dict]:
    """Joins the turns of the prompt and of the text. Turns of the prompt that the text repeats at its start occur once.

    u, a, s: messages of user, assistant, system. [u] + [s u a] -> [s u a]; [s u] + [u a] -> [s u a];
    [u1 a1 u2] + [u2 a2] -> [u1 a1 u2 a2]
    """
    turns = as_turns(prompt, "user") if prompt else []
    answer = as_turns(text, "assistant")
    is_system = lambda x: x[:1] and x[0]["role"] == "system"  # noqa: E731
    system = [x[0] for x in (turns, answer) if is_system(x)]
    require(system[:1] == system[-1:], "prompt and text begin with different system messages")
    head = turns[1:] if is_system(turns) else turns
    tail = answer[1:] if is_system(answer) else answer
    if not head or not tail or tail[0]["role"] == "assistant":
        return system[:1] + head + tail
    words = lambda x: [(turn["role"], turn["content"].strip(), turn.get("tool_calls")) for turn in x]  # noqa: E731
    repeated = max(n for n in range(len(head) + 1) if words(head[len(head) - n :]) == words(tail[:n]))
    is_next = repeated > 0 or head[-1]["role"] == "assistant"
    require(is_next, "the text begins with a user's message, but not with that of the prompt")
    return system[:1] + head[: len(head) - repeated] + tail


def shared_length(*texts: list[int]) -> int:
    """Number of tokens that all texts share at the start."""
    return len(os.path.commonprefix(texts))  # works on any lists


def warn_of_joined_tokens(n: int) -> None:
    """Warns if the last n tokens of a prompt, encoded alone, are not tokens of the complete text."""
    if n:
        warnings.warn(
            "some prompts end within a token of the complete text (does the prompt end with a space, or does the chat "
            "template write something else before an answer?): training uses that token, but a rollout, which encodes "
            "the prompt alone, does not"
        )


def default_batch_size(num_rows: float) -> int:
    """The largest power of two, from 4 to 64, that gives at least 100 steps. num_rows counts a row once per epoch."""
    sizes = [size for size in (4, 8, 16, 32, 64) if num_rows / size >= 100]
    return max(sizes, default=4)


def choose_sizes(args: Args, model: nn.Module, num_rows: int, num_tokens: int) -> Args:
    """Fills in the learning rate and the batch sizes, for rows of at most num_tokens tokens, and prints them."""
    learning_rate = args.learning_rate or default_rate(args, model)
    per_device = args.per_device_train_batch_size
    batch_size = args.batch_size or default_batch_size(args.num_train_epochs * num_rows)
    if per_device and args.batch_size is None:
        batch_size = per_device * args.gradient_accumulation_steps * WORLD_SIZE
    share = math.ceil(batch_size / WORLD_SIZE)  # rows of a batch that each process computes
    micro_batch_size = args.micro_batch_size or per_device or min(share, rows_that_fit(model, num_tokens, args))
    size = model.num_parameters() / 1e6
    print(f"model: {model.name_or_path}, {size:.2f}M parameters on {args.device}, learning rate {learning_rate:.2g}")
    num_steps = math.ceil(args.num_train_epochs * math.ceil(num_rows / batch_size))
    print(f"batch: {batch_size} of {num_rows} rows per step, {micro_batch_size} at a time, {num_steps} steps")
    if num_steps < 50:
        warnings.warn(f"few optimiser steps ({num_steps}): choose a smaller --batch-size, or more data or epochs")
    return replace(args, learning_rate=learning_rate, batch_size=batch_size, micro_batch_size=micro_batch_size)


def make_optimizer(args: Args, model: nn.Module) -> torch.optim.Optimizer:
    """AdamW for the model's trainable weights."""
    weights = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(
        weights,
        lr=args.learning_rate,
        weight_decay=args.weight_decay,
        fused=True,  # ten times as fast on a CPU
    )


def separate_dropout(args: Args, step: int) -> None:
    """From here to the end of the step, each process draws its own random numbers (for dropout)."""
    if RANK:
        set_seed(make_seed(args.seed, step, 2, RANK))


def micro_batches(rows: Sequence, args: Args) -> Iterator[tuple[list, Tensor]]:
    """Yields this process's rows, micro_batch_size at a time, with a mask (b,) that is false on repeated rows.

    Process RANK takes the rows RANK, RANK + WORLD_SIZE, ... Sharded weights need the same number of passes in all
    processes. So if WORLD_SIZE does not divide the number of rows, some processes repeat one of the first rows.
    """
    n = len(rows)
    numbers = torch.arange(RANK, math.ceil(n / WORLD_SIZE) * WORLD_SIZE, WORLD_SIZE)  # n or more: repeated
    for part in numbers.split(args.micro_batch_size):
        yield [rows[i] for i in part % n], (part < n).to(args.device)


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


def print_unread(data: datasets.Dataset, *columns: str) -> None:
    """Prints the names of all columns but these and the options of the chat template."""
    unread = [name for name in data.column_names if name not in (*columns, "tools", "chat_template_kwargs")]
    if unread:
        print(f"{data.split} columns that are not read:", ", ".join(unread))


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
