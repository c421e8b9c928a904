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
"""Supervised fine-tuning: texts -> policy.

For each batch of texts x_1..x_n, of which the last tokens are the completion and its EOS (end of sequence):
  1. encode   prompt tokens, completion tokens, EOS; the labels are completion and EOS (without a prompt: everything)
  2. loss     -mean_t log pi(x_t | x_<t), over the labels alone
  3. update   AdamW, with the learning rate warmed up and annealed

  text          The  film  |  is   a    joy   .   EOS
  label          -    -    |  *    *     *    *    *       read from the logits one position to the left

EOS is a label like any other: a policy that is never shown where texts end will never end one, and an RLHF run that
follows would see only cut-off responses. Prompt tokens carry no loss by default: the policy is asked to answer prompts,
not to invent them. Ouyang et al. 2022 (InstructGPT, arXiv 2203.02155, sec. 3.5); Huang et al. 2024 (the N+
implementation details, 2403.17031). docs/sft.md has a glossary of the metrics.

  python sft.py                              # a small GPT-2 from scratch on the toy corpus: offline, a minute on a CPU
  python sft.py --model gpt2 --dataset D     # fine-tunes GPT-2; D has `text`, `prompt` + `completion`, or `messages`

Shapes: B rows, S tokens (right-padded), V vocabulary.
"""

import ctypes
import json
import math
import os
import random
import shlex
import signal
import sys
import time
import traceback
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
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
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers import get_scheduler
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

# --- Arguments. The type of a setting says which values are allowed; the comment beside or above it is its help text

Positive = Annotated[float, "above 0", lambda x: 0 < x < math.inf]
NonNegative = Annotated[float, "0 or more", lambda x: 0 <= x < math.inf]
Share = Annotated[float, "between 0 and 1", lambda x: 0 <= x <= 1]
Count = Annotated[int, "1 or more", lambda x: x >= 1]
Natural = Annotated[int, "0 or more, and below 2**63", lambda x: 0 <= x < 2**63]
Length = Annotated[int, "2 or more, since nothing predicts the first token", lambda x: x >= 2]


@dataclass
class Args:
    # --- Supervised fine-tuning
    completion_only_loss: bool = True  # no loss on prompts, nor on messages that are not the assistant's (TRL)
    max_length: Length = 512  # longer texts lose their end, and are counted; with packing, the length of a block
    packing: bool = False  # join all texts, EOS between them, and cut them into blocks of max_length: no padding (TRL)

    # --- Optimisation
    learning_rate: Positive | None = None  # AdamW's; by default 2e-5 (TRL), with LoRA 2e-4, from scratch 3e-3
    lr_scheduler_type: str = "cosine"  # any name that transformers.get_scheduler knows (N+ details: cosine)
    warmup_ratio: Share = 0.03  # share of the run in which the learning rate rises to its value
    weight_decay: NonNegative = 0.0  # AdamW's
    max_grad_norm: Positive = 1.0  # the gradient is clipped to this norm

    # --- Batch sizes
    batch_size: Count | None = None  # rows per optimiser step, on all GPUs together; by default 64
    micro_batch_size: Count | None = None  # rows per forward/backward pass; affects rounding and dropout only
    # TRL's way: this is micro_batch_size, and * gradient_accumulation_steps * GPUs is batch_size
    per_device_train_batch_size: Count | None = None
    gradient_accumulation_steps: Count = 1  # with per_device_train_batch_size (TRL)

    # --- Model: a folder, or a name on the hub
    model: str = ""  # the pretrained model to fine-tune
    from_scratch: str | None = None  # instead: random weights, with the config and tokenizer of this; default toy/base
    lora_r: Natural = 0  # rank of LoRA adapters (Hu et al. 2021), 0 for none
    lora_alpha: Positive = 32.0  # the adapter's output is scaled by lora_alpha / lora_r
    lora_target_modules: str | None = None  # regular expression for their layers, or all-linear; default: peft's
    bf16: bool = False  # run the models in bfloat16 (autocast); trained weights and optimiser state stay in float32
    attn_implementation: str | None = None  # eager, sdpa, flash_attention_2, ...; by default transformers' own choice
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: far less memory, a third slower
    trust_remote_code: bool = False  # run Python code that comes with a model; only if you have read that code

    # --- Data
    dataset: str = "toy/data/sft"  # folder, file (jsonl, json, csv, parquet) or hub name
    dataset_config: str | None = None  # configuration of a hub dataset that has several
    dataset_train_split: str = "train"  # split to train on
    dataset_test_split: str | None = None  # split to evaluate on, or none; by default validation, if there is one
    text_column: str = "text"  # whole texts
    prompt_column: str = "prompt"  # prompts, beside completions: texts, or lists of {role, content} messages
    completion_column: str = "completion"  # completions: texts, or lists of messages
    messages_column: str = "messages"  # conversations: lists of messages, for the tokenizer's chat template
    seed: Natural = 1  # seed of the order of texts, of dropout, and of the weights with from_scratch

    # --- Run. From here on, a resumed run may differ from what it was
    resume: str | None = None  # a run's folder or one of its checkpoints: continue, with the settings of that run
    num_train_epochs: Positive = 1.0  # passes over the texts (N+ details: 1)
    exp_name: str = "sft"  # name of this run, in its folder and on W&B
    output_dir: str | None = None  # where everything goes; by default a new folder runs/NAME__SEED__TIME
    device: str | None = None  # cpu, cuda, mps; by default the best there is
    save_steps: Count = 100  # steps between checkpoints, each of which holds everything that a run consists of
    save_total_limit: Count = 2  # number of checkpoints to keep, the newest
    eval_steps: Count = 100  # steps between evaluations; there is one at the end, too
    num_sample_generations: Natural = 3  # how often a table of sampled completions is printed (TRL)
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works without an account)
    wandb_project_name: str = "rlhf"  # W&B project, with --track
    wandb_entity: str | None = None  # W&B team, with --track

    # --- Many GPUs: torchrun --nproc-per-node N
    zero_stage: Literal[0, 2, 3] = 0  # shards: 0 none, 2 of gradients and optimiser state, 3 of weights too (FSDP2)
    shard_size: Count | None = None  # GPUs that hold one set of shards, such as those of a node (ZeRO++); default: all
    offload: bool = False  # keep the shards in CPU memory until they are needed: slow, for models that do not fit
    gather_for_rollout: bool = True  # with zero_stage 3: gather the weights once per rollout, not for every token

    # --- Computed
    torch_device: str = field(init=False, default="cpu")  # where the models are


# --- The loop: its numbers are those of the steps above ---------------------------------------------------------------


def train(args: Args) -> None:
    """Trains the policy; leaves it, its metrics, curves and model card in args.output_dir."""
    start_run(args)
    model = load_language_model(args)
    models = place(args, model)
    limits = (None, context_length(model)) if args.packing else (args.max_length, args.max_length)  # None: packed
    splits = zip(load_data(args), limits)
    rows, test_rows = (encode_texts(x, model.tokenizer, args, limit) if x else [] for x, limit in splits)  # 1
    longest = max(len(ids) for ids, _ in rows)
    row_size = longest * model.config.get_text_config().vocab_size  # of the logits; in all, at most 32 MB
    num_steps, steps_per_epoch = plan_steps(args, model, len(rows), fits_cpu=2**23 // row_size)
    use_fast_kernels(args, models, args.micro_batch_size, longest)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, args.learning_rate, weight_decay=args.weight_decay, fused=True)
    schedule = make_schedule(args, optimizer, num_steps)
    check_padding(model, args)
    state = {"rows": []}  # what else changes during the run
    run = Run(args, {"model": model}, optimizer, schedule, state)
    batches = random_batches(rows, state["rows"], args.batch_size)
    separate_dropout(args)
    try:
        for step, batch in zip(run.steps(num_steps), batches):
            with run.clock("step"):
                sums = text_gradient(model, batch, args)  # 2
                grad_norm = clip_gradient(trained, args.max_grad_norm)  # 3
                if grad_norm.isfinite():  # else the weights would be NaN for good
                    optimizer.step()
                optimizer.zero_grad()
            stats = {
                "step": step,
                "epoch": step / steps_per_epoch,
                "num_tokens": run.metrics.get("num_tokens", 0) + sums["tokens"],
                "lr": schedule.get_last_lr()[0],
                "loss": sums["loss"] / sums["tokens"],
                "mean_token_accuracy": sums["hits"] / sums["tokens"],
                "grad_norm": float(grad_norm),
                "perf/tokens_per_second": sums["tokens"] / run.seconds["step"],
            }
            schedule.step()
            if test_rows and (step % args.eval_steps == 0 or step == num_steps):
                stats |= evaluate_policy(model, test_rows, args)
            run.write(step, stats, "loss", "eval/perplexity")
            if run.is_turn(step, args.num_sample_generations):
                show_samples(run, step, model, test_rows or rows, args)
    finally:  # after an error or Ctrl-C, too: what was trained is on disk
        run.finish(model, CURVES)


# --- 1. Encode --------------------------------------------------------------------------------------------------------

IGNORE = -100  # a label that carries no loss (torch's own convention)
Row = tuple[list[int], list[int]]  # token ids and labels of a text


def encode_pair(
    prompt: str | list[dict], completion: str | list[dict], tokenizer: AutoTokenizer, completion_only: bool
) -> Row:
    """Prompt + completion + EOS, or what the chat template writes. An empty prompt makes it a plain text, all labelled.

    Prompt and completion are encoded apart, as in a rollout, where the prompt is encoded before its completion exists.
    A prompt that is a list of messages goes through the chat template; its completion is the assistant's next turn.
    """
    if list in (type(prompt), type(completion)):
        turns = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}] if prompt else []
        turn = completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
        ids, labels = encode_messages(turns + turn, tokenizer, completion_only)
        start = len(apply_template(turns, tokenizer)) if completion_only and turns else 0
        return ids, [IGNORE] * start + labels[start:]
    head = tokenizer(prompt)["input_ids"] if prompt else []
    tail = tokenizer(completion, add_special_tokens=not prompt)["input_ids"]
    if tail[-1:] != [tokenizer.eos_token_id]:
        tail = tail + [tokenizer.eos_token_id]
    return head + tail, ([IGNORE] * len(head) if completion_only else head) + tail


def encode_messages(messages: list[dict], tokenizer: AutoTokenizer, completion_only: bool) -> Row:
    """A conversation; with completion_only, the labels are the assistant's turns and what ends them."""
    ids, labels = [], []
    for i, message in enumerate(messages):
        whole = apply_template(messages[: i + 1], tokenizer)
        require(whole[: len(ids)] == ids, "this chat template rewrites earlier turns when a later one is added, so a "
                "loss on single turns has no meaning; use prompt and completion columns")  # fmt: skip
        start = len(whole) if completion_only else len(ids)  # of what is labelled in this turn
        if message["role"] == "assistant" and completion_only:  # all but the header, which a rollout is given
            head = apply_template(messages[:i], tokenizer, add_generation_prompt=True)
            start = len(os.path.commonprefix([head, whole]))  # less a last token that merges with the first word
        labels += [IGNORE] * (start - len(ids)) + whole[start:]
        ids = whole
    return ids, labels


def encode_texts(data, tokenizer: AutoTokenizer, args: Args, limit: int | None) -> list[Row]:
    """All texts of a split, in whichever of the three formats its columns are: cut to `limit` tokens, or packed."""
    name, completion_only = args.dataset, args.completion_only_loss
    if args.messages_column in data.column_names:
        conversations = read_column(data, args.messages_column, name, "--messages-column", list)
        rows = [encode_messages(messages, tokenizer, completion_only) for messages in conversations]
    elif args.completion_column in data.column_names:
        prompts = read_column(data, args.prompt_column, name, "--prompt-column", (str, list))
        completions = read_column(data, args.completion_column, name, "--completion-column", (str, list))
        rows = [encode_pair(p, c, tokenizer, completion_only) for p, c in zip(prompts, completions)]
    else:
        texts = read_column(data, args.text_column, name, "--text-column, --completion-column or --messages-column")
        rows = [encode_pair("", text, tokenizer, False) for text in texts]
    has_label = lambda row: set(row[1][1:]) - {IGNORE}  # noqa: E731 - nothing predicts the first token
    kept = [row for row in ((ids[:limit], labels[:limit]) for ids, labels in rows) if has_label(row)]
    if limit and (too_long := sum(len(ids) > limit for ids, _ in rows)):
        print(f"cut {too_long} of {len(rows)} texts to {limit} tokens; they lose their EOS")
    if len(kept) < len(rows):
        print(f"dropped {len(rows) - len(kept)} of {len(rows)} texts: empty, or with nothing left to predict")
    if limit is None:
        kept = [row for row in pack(kept, args.max_length) if has_label(row)]
    require(kept, f"--dataset {name}: no text of two or more tokens has a completion within --max-length "
            f"{args.max_length}" + (limit is None) * ", or all together do not fill a block of it")  # fmt: skip
    return kept


def pack(rows: list[Row], length: int) -> list[Row]:
    """Joins texts (each ends with its EOS) and cuts them into blocks of `length` tokens; the remainder is dropped.

    [[a b EOS], [c d e EOS], [f EOS]] at length 4 -> [a b EOS c], [d e EOS f]
    """
    ids = [token for row, _ in rows for token in row]
    labels = [label for _, row in rows for label in row]
    return [(ids[i : i + length], labels[i : i + length]) for i in range(0, len(ids) - length + 1, length)]


def random_batches(rows: list[Row], queue: list[int], batch_size: int) -> Iterator[list[Row]]:
    """Endless passes over all rows in random order; a batch is sorted by length, so that its parts need little padding.

    Batches are not made of rows of similar length: with them, the toy policy ends at perplexity 35 instead of 25.
    `queue` holds the rows that this pass has yet to give. It is the caller's, so that a checkpoint can hold it.
    """
    while True:
        if not queue:
            queue += broadcast(torch.randperm(len(rows))).tolist()
        batch, queue[:] = queue[:batch_size], queue[batch_size:]
        yield sorted((rows[i] for i in batch), key=lambda row: len(row[0]))


# --- 2. Loss ----------------------------------------------------------------------------------------------------------


def label_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """(B, S-1) cross-entropy of labels[:, 1:] under logits[:, :-1], which predict them; 0 where there is no label."""
    targets = labels[:, 1:]
    logits = logits[:, :-1].flatten(0, 1).float()
    return F.cross_entropy(logits, targets.flatten(), reduction="none", ignore_index=IGNORE).view_as(targets)


def label_sums(model: nn.Module, rows: list[Row], args: Args) -> dict[str, Tensor]:
    """Sums over the labels of each row (B,): loss, number, hits of the likeliest token, and loss and number of EOS."""
    ids, mask = pad([ids for ids, _ in rows], model.tokenizer.pad_token_id, args)
    labels, _ = pad([labels for _, labels in rows], IGNORE, args)
    with autocast(args):
        logits = model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits  # (B, S, V)
    losses, targets = label_losses(logits, labels), labels[:, 1:]
    is_eos = targets == model.tokenizer.eos_token_id
    return {
        "loss": losses.sum(1),
        "tokens": (targets != IGNORE).sum(1),
        "hits": (logits[:, :-1].detach().argmax(-1) == targets).sum(1),
        "eos_loss": losses.detach().masked_fill(~is_eos, 0.0).sum(1),
        "eos_tokens": is_eos.sum(1),
    }


# --- 3. Update --------------------------------------------------------------------------------------------------------


def text_gradient(model: nn.Module, batch: list[Row], args: Args) -> dict[str, float]:
    """Adds up the gradient of the mean loss over a batch's labels; returns sums over them of what is logged.

    The gradient is a sum over labels divided by their number, so how the batch is cut, into micro-batches and among
    processes, changes nothing.
    """
    num_labels = sum(label != IGNORE for _, labels in batch for label in labels[1:])
    sums = torch.zeros(2, device=args.torch_device)
    for rows, counts in micro_batches(batch, args):
        output = label_sums(model, rows, args)
        loss = (output["loss"] * counts).sum()
        (WORLD_SIZE * loss / num_labels).backward()  # gradients become means over processes
        sums += torch.stack([loss.detach(), (output["hits"] * counts).sum()])
    loss, hits = all_reduce(sums).tolist()
    return {"loss": loss, "hits": hits, "tokens": num_labels}


# === The algorithm ends here. What follows is needed by every program of this kind ====================================


@torch.no_grad()
def evaluate_policy(model: nn.Module, rows: list[Row], args: Args) -> dict[str, float]:
    """Loss, perplexity, accuracy, and the loss on EOS, over all labels of the test split."""
    model.eval()
    rows = sorted(rows, key=lambda row: len(row[0]))
    parts = [label_sums(model, part, args) for part, _ in micro_batches(rows, args)]
    model.train()
    sums = {name: all_gather(torch.cat([part[name] for part in parts]))[: len(rows)].double().sum().item()
            for name in parts[0]}  # fmt: skip
    loss = sums["loss"] / sums["tokens"]
    return {
        "eval/loss": loss,
        "eval/perplexity": math.exp(min(loss, 700.0)),  # no float holds more
        "eval/mean_token_accuracy": sums["hits"] / sums["tokens"],
        "eval/eos_loss": sums["eos_loss"] / max(1.0, sums["eos_tokens"]),
    }


def show_samples(run: "Run", step: int, model: nn.Module, examples: list[Row], args: Args) -> None:
    """A table of prompts, sampled completions and the texts' own.

    The prompt is what stands before the first label; if nothing does, eight tokens, or half of a shorter text.
    """
    tokenizer, new_tokens, rows = model.tokenizer, min(53, args.max_length // 2), []
    stored, model.generation_config = model.generation_config, GenerationConfig()  # else it fills in what is unset
    config = GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=new_tokens,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    gpus = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(gpus), gathered(model.eval(), args):  # training must not notice
        torch.manual_seed(args.seed)  # and all processes draw the same completions
        for ids, labels in examples[:3]:
            start = next(i for i, label in enumerate(labels) if label != IGNORE) or min(8, max(1, len(ids) // 2))
            prompt = torch.tensor([ids[max(0, start + new_tokens - args.max_length) : start]], device=args.torch_device)
            output = model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=config)[0]
            rows.append([tokenizer.decode(x) for x in (prompt[0], output[prompt.shape[1] :], ids[start:])])
    model.train().generation_config = stored
    run.table(f"step {step} of {run.bar.total}", ["prompt", "sampled completion", "the text's own"], rows)


def load_language_model(args: Args) -> nn.Module:
    """The model to train, pretrained or with random weights."""
    require(not (args.model and args.from_scratch), f"--model {args.model} and --from-scratch {args.from_scratch}: "
            "give one of them")  # fmt: skip
    if args.model:
        model = load_model(AutoModelForCausalLM, args.model, args)
    else:
        args.from_scratch = args.from_scratch or "toy/base"
        options = {"trust_remote_code": args.trust_remote_code}
        with explain(f"the config {args.from_scratch!r} could not be loaded"):
            config = AutoConfig.from_pretrained(locate(args.from_scratch), **options)
            options |= {"attn_implementation": args.attn_implementation, "dtype": torch.float32}
            model = AutoModelForCausalLM.from_config(config, **options)
        model.tokenizer = load_tokenizer(args.from_scratch, args, model)
    require(args.model or not args.lora_r, "--lora-r trains an adapter of a pretrained model; name it with --model")
    if args.lora_r:
        add_adapter(model, args, task_type="CAUSAL_LM")
    has_eos = model.tokenizer.eos_token_id is not None
    require(has_eos, f"the tokenizer of {args.model or args.from_scratch} has no EOS token, with which texts must end")
    args.learning_rate = args.learning_rate or (3e-3 if args.from_scratch else 2e-4 if args.lora_r else 2e-5)
    args.max_length = min(args.max_length, context_length(model))
    return model.train()


# --- Settings and checks ----------------------------------------------------------------------------------------------

ALIASES = {  # other libraries' spellings
    "--model-name-or-path": "--model", "--dataset-name": "--dataset", "--dataset-config-name": "--dataset-config",
    "--dataset-text-field": "--text-column", "--max-seq-length": "--max-length", "--resume-from-checkpoint": "--resume",
}  # fmt: skip
CURVES = [["loss", "eval/loss"], ["eval/perplexity"], ["eval/eos_loss"]]


def plan_steps(args: Args, model: nn.Module, num_rows: int, fits_cpu: int) -> tuple[int, int]:
    """Fills in the batch sizes and prints them; returns the number of steps in the run, and in one pass over the rows.

    `fits_cpu` rows at a time go through the model on a CPU, unless the settings say otherwise.
    """
    per_device, on_cpu = args.per_device_train_batch_size, args.torch_device == "cpu"
    require(per_device or args.gradient_accumulation_steps == 1, "--gradient-accumulation-steps goes with "
            "--per-device-train-batch-size; or give --batch-size and --micro-batch-size")  # fmt: skip
    args.batch_size = args.batch_size or (per_device or 0) * args.gradient_accumulation_steps * WORLD_SIZE or 64
    share = -(-args.batch_size // WORLD_SIZE)  # rows of a batch that each process computes
    args.micro_batch_size = args.micro_batch_size or per_device or (max(1, min(share, fits_cpu)) if on_cpu else share)
    steps_per_epoch = math.ceil(num_rows / args.batch_size)
    num_steps = math.ceil(args.num_train_epochs * steps_per_epoch)
    print(f"model: {model.name_or_path}, {model.num_parameters() / 1e6:.2f}M parameters on {args.torch_device}, "
          f"learning rate {args.learning_rate:.2g}")  # fmt: skip
    print(f"batch: {args.batch_size} of {num_rows} rows per step, {args.micro_batch_size} at a time; {num_steps} steps")
    return num_steps, steps_per_epoch


@torch.no_grad()
def check_padding(model: nn.Module, args: Args) -> None:
    """Refuses a model that reads the start of a row otherwise if the row goes on, or is padded, than alone.

    A row of any tokens tells. If a trained model looks ahead or does not heed the attention mask, its output is off by
    a tenth of its standard deviation or more, an untrained one's by a hundredth; by rounding, by a millionth (on a GPU,
    with TF32's or flash attention's products, by up to a hundredth).
    """
    body, n = model.base_model if hasattr(model, "score") else model, 5
    ids = torch.arange(5, 14, device=args.torch_device).repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[1, n:] = 0
    needs_bf16 = "flash" in (args.attn_implementation or "")
    model.eval()
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=needs_bf16):
        alone = body(input_ids=ids[:1, :n], use_cache=False)[0].float()  # (1, n, V or D)
        beside = body(input_ids=ids, attention_mask=mask, use_cache=False)[0][:, :n].float()  # (2, n, V or D)
    model.train()
    error, bound = ((beside - alone).abs().mean() / alone.std()).item(), 1e-3 if args.torch_device == "cpu" else 0.05
    require(not error > bound, f"{model.name_or_path} ({type(model).__name__}) reads a text beside padding or further "
            f"tokens not as alone, by {error:.2g} of the outputs' deviation: it cannot be used here")  # fmt: skip


# Many processes, each with its own dropout: what they must agree on is drawn by the first


def broadcast(x: Tensor) -> Tensor:
    """x of the first process."""
    if WORLD_SIZE > 1:
        dist.broadcast(x, 0)
    return x


def separate_dropout(args: Args) -> None:
    """From here on, processes draw different random numbers."""
    if RANK:
        torch.manual_seed(args.seed + RANK)


def shard_rows(n: int) -> Tensor:
    """(m,) numbers of those of n rows that this process computes: every WORLD_SIZE-th.

    m is the same everywhere, since passes over sharded weights must be equally many. If n does not divide, the last
    process or processes begin again with row 0, ... for want of another.
    """
    return torch.arange(RANK, -(-n // WORLD_SIZE) * WORLD_SIZE, WORLD_SIZE) % n


def micro_batches(rows: Sequence, args: Args) -> Iterator[tuple[list, Tensor]]:
    """This process's share of the rows, `micro_batch_size` at a time, and (b,) which of them are not there twice."""
    own = [rows[i] for i in shard_rows(len(rows))]
    counts = torch.arange(len(own), device=args.torch_device) < len(range(RANK, len(rows), WORLD_SIZE))
    for i in range(0, len(own), args.micro_batch_size):
        yield own[i : i + args.micro_batch_size], counts[i : i + args.micro_batch_size]


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


def apply_template(messages: list[dict], tokenizer: AutoTokenizer, **options) -> list[int]:
    """Token ids of a conversation through the tokenizer's chat template."""
    require(tokenizer.chat_template, "the dataset holds messages, but the tokenizer has no chat template")
    with explain(f"the tokenizer's chat template refuses {messages!r}"):
        return tokenizer.apply_chat_template(messages, return_dict=False, **options)


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
