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
"""Supervised fine-tuning: texts -> policy.

For each batch of texts x_1..x_n, of which the last tokens are the completion and its EOS:
  1. encode   prompt tokens, completion tokens, EOS; the labels are the completion and EOS (without prompt: everything)
  2. loss     -mean_t log pi(x_t | x_<t), over the labels alone
  3. update   AdamW, with the learning rate warmed up and annealed

  text          The  film  |  is   a    joy   .   EOS
  label          -    -    |  *    *     *    *    *       read from the logits one position to the left

EOS is a label like any other: a policy that is never shown where texts end will never end one, and an RLHF run that
follows would see only cut-off responses. Prompt tokens carry no loss by default: the policy is asked to answer prompts,
not to invent them. Ouyang et al. 2022 (InstructGPT, arXiv 2203.02155, sec. 3.5); Huang et al. 2024 (the N+
implementation details, 2403.17031).

  python sft.py                              # a small GPT-2 from scratch on the toy corpus: offline, a minute on a CPU
  python sft.py --model gpt2 --dataset D     # fine-tunes GPT-2; D has `text`, `prompt` + `completion`, or `messages`

Shapes: B rows, S tokens (right-padded), V vocabulary.
"""

import ctypes
import html
import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, get_scheduler
from transformers.activations import NewGELUActivation
from transformers.utils import logging
from tyro.conf import arg

# ---------------------------------------------------------------------------------------------------------------------
# Arguments


@dataclass
class Args:
    # --- Run
    exp_name: str = "sft"
    """name of this run, in its folder and on W&B"""
    output_dir: str | None = None
    """where everything goes; by default a new folder runs/NAME__SEED__TIME"""
    seed: int = 1
    """seed of the order of texts, and of the weights with --from-scratch"""
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
    num_sample_generations: int = 3
    """how often in the run a table of sample completions is printed; 0 for never"""

    # --- Survival
    save_steps: int = 100
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

    # --- Model: a folder, or a name on the hub
    model: Annotated[str | None, arg(aliases=["--model-name-or-path"])] = None
    """the pretrained model to fine-tune"""
    from_scratch: str | None = None
    """start from random weights, with the config and tokenizer of this folder or name; without --model, toy/base"""
    trust_remote_code: bool = False
    """run Python code that comes with a model; leave it off unless you have read that code"""
    attn_implementation: str | None = None
    """eager, sdpa, flash_attention_2, ...; by default what transformers takes for the model"""
    gradient_checkpointing: bool = False
    """compute activations again in the backward pass: far less memory, a third more time, the same numbers"""

    # --- Data
    dataset: Annotated[str, arg(aliases=["--dataset-name"])] = "toy/data/sft"
    """folder, file (jsonl, csv, parquet) or hub name, with columns messages, or prompt + completion, or text"""
    dataset_config: Annotated[str | None, arg(aliases=["--dataset-config-name"])] = None
    """configuration of a hub dataset that has several"""
    dataset_train_split: str = "train"
    """split to train on"""
    dataset_test_split: str | None = None
    """split to evaluate on; by default validation where the data have one; none for no evaluation"""
    text_column: Annotated[str, arg(aliases=["--dataset-text-field"])] = "text"
    """column of whole texts"""
    prompt_column: str = "prompt"
    """column of prompts, beside completions"""
    completion_column: str = "completion"
    """column of completions"""
    messages_column: str = "messages"
    """column of conversations: lists of {role, content}, through the tokenizer's chat template"""
    completion_only_loss: bool = True
    """no loss on prompts, nor on messages that are not the assistant's (TRL's default)"""
    max_length: Annotated[int, arg(aliases=["--max-seq-length"])] = 512
    """longer texts are cut at the end, and counted; with --packing, the length of a block"""
    packing: bool = False
    """join all texts, EOS between them, and cut them into blocks of max_length: no padding, no short rows (TRL)"""

    # --- Optimisation
    num_train_epochs: float = 1.0
    """passes over the texts (N+ details: 1)"""
    per_device_train_batch_size: int = 64
    """texts, or blocks, in one forward/backward"""
    gradient_accumulation_steps: int = 1
    """micro-batches in an optimiser step; changes memory, not the result"""
    learning_rate: float | None = None
    """AdamW's; by default 2e-5 from a pretrained model (TRL), 3e-3 from scratch"""
    lr_scheduler_type: str = "cosine"
    """any name that transformers.get_scheduler knows (N+ details: cosine)"""
    warmup_ratio: float = 0.03
    """share of the run in which the learning rate rises to its value"""
    weight_decay: float = 0.0
    """AdamW's"""
    max_grad_norm: float = 1.0
    """the gradient is clipped to this norm"""
    eval_steps: int = 100
    """optimiser steps between evaluations; there is one at the end too"""


METRICS = {
    "step": "optimiser steps so far",
    "epoch": "passes over the texts so far",
    "num_tokens": "tokens with a label so far",
    "lr": "learning rate",
    "loss": "-log-probability of a label token, mean over the labels of the step, nats",
    "mean_token_accuracy": "share of labels that were the likeliest token",
    "grad_norm": "norm of the gradient before clipping",
    "eval/loss": "the loss on the test split",
    "eval/perplexity": "exp(eval/loss)",
    "eval/mean_token_accuracy": "share of labels of the test split that were the likeliest token",
    "eval/eos_loss": "the loss on EOS labels alone: does the policy know where texts end?",
    "time/step": "seconds of this step",
    "perf/tokens_per_second": "tokens with a label / seconds of this step",
    "perf/peak_memory_mb": "peak memory so far: of the GPU on CUDA, else of the process",
}

# ---------------------------------------------------------------------------------------------------------------------
# 1. Encode

IGNORE = -100  # a label that carries no loss (torch's own convention)


def encode_pair(
    prompt: str | list[dict], completion: str | list[dict], tokenizer: AutoTokenizer, completion_only: bool
) -> tuple[list[int], list[int]]:
    """Token ids and labels of prompt + completion + EOS. An empty prompt makes it a plain text, all of it labelled.

    Prompt and completion are encoded apart, as in a rollout, where the prompt is encoded before its completion exists.
    A prompt that is a list of messages goes through the chat template; its completion is the assistant's next turn.
    """
    if isinstance(prompt, list):
        turn = completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
        ids, labels = encode_messages(prompt + turn, tokenizer, completion_only)
        start = len(apply_template(prompt, tokenizer)) if completion_only else 0
        return ids, [IGNORE] * start + labels[start:]
    start = tokenizer(prompt)["input_ids"] if prompt else []
    end = tokenizer(completion, add_special_tokens=not prompt)["input_ids"]
    if end[-1:] != [tokenizer.eos_token_id]:
        end = end + [tokenizer.eos_token_id]
    return start + end, ([IGNORE] * len(start) if completion_only else start) + end


def encode_messages(
    messages: list[dict], tokenizer: AutoTokenizer, completion_only: bool
) -> tuple[list[int], list[int]]:
    """Token ids and labels of a conversation: the assistant's turns and what ends them are labelled."""
    ids: list[int] = []
    labels: list[int] = []
    for i, message in enumerate(messages):
        whole = apply_template(messages[: i + 1], tokenizer)
        require(
            whole[: len(ids)] == ids,
            "this chat template rewrites earlier turns when a later one is added, so a loss on single turns has no "
            "meaning; use prompt and completion columns",
        )
        start = len(whole) if completion_only else len(ids)  # of what is labelled in this turn
        if message["role"] == "assistant" and completion_only:  # all but the header, which a rollout is given
            head = apply_template(messages[:i], tokenizer, add_generation_prompt=True)
            start = len(os.path.commonprefix([head, whole]))  # less a last token that merges with the first word
        labels += [IGNORE] * (start - len(ids)) + whole[start:]
        ids = whole
    return ids, labels


def apply_template(messages: list[dict], tokenizer: AutoTokenizer, **options) -> list[int]:  # same in all scripts
    """Token ids of a conversation through the tokenizer's chat template."""
    require(tokenizer.chat_template, "the dataset holds messages, but the tokenizer has no chat template")
    try:
        return tokenizer.apply_chat_template(messages, return_dict=False, **options)
    except Exception as error:  # a template is a program of somebody else's
        raise UserError(f"the tokenizer's chat template refuses {messages!r}: {error}") from error


def encode_completions(data, tokenizer: AutoTokenizer, args: Args) -> list[tuple[list[int], list[int]]]:
    """All rows of a dataset as (ids, labels), in whichever of the three formats its columns are."""
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
    too_long = sum(len(ids) > args.max_length for ids, _ in rows)
    if too_long and not args.packing:
        print(f"cut {too_long} of {len(rows)} texts to --max-length {args.max_length} tokens; they lose their EOS")
        rows = [(ids[: args.max_length], labels[: args.max_length]) for ids, labels in rows]
    kept = [row for row in rows if any(label != IGNORE for label in row[1])]
    if len(kept) < len(rows):
        print(f"dropped {len(rows) - len(kept)} of {len(rows)} texts: empty, or no completion within --max-length")
    require(kept, f"--dataset {args.dataset}: no text has a completion within --max-length {args.max_length} tokens")
    return kept


def pack(rows: list[tuple[list[int], list[int]]], length: int) -> list[tuple[list[int], list[int]]]:
    """Joins texts (each ends with its EOS) and cuts them into blocks of `length` tokens; the remainder is dropped.

    [[a b EOS], [c d e EOS], [f EOS]] at length 4 -> [a b EOS c], [d e EOS f]
    """
    ids = [token for row, _ in rows for token in row]
    labels = [label for _, row in rows for label in row]
    return [(ids[i : i + length], labels[i : i + length]) for i in range(0, len(ids) - length + 1, length)]


def length_grouped_batches(lengths: list[int], queue: list[list[int]], batch_size: int) -> Iterator[list[int]]:
    """Endless passes over all rows in batches of like length, in random order: little padding, yet random enough.

    Rows are shuffled, cut into groups of 50 batches, sorted by length inside a group, and the batches shuffled again.
    `queue` holds the batches that this pass has yet to give. It is the caller's, so that a checkpoint can hold it.
    """
    while True:
        while queue:
            yield queue.pop(0)
        order = from_first(torch.randperm(len(lengths))).tolist()
        groups = [order[i : i + 50 * batch_size] for i in range(0, len(order), 50 * batch_size)]
        ordered = [row for group in groups for row in sorted(group, key=lengths.__getitem__)]
        batches = [ordered[i : i + batch_size] for i in range(0, len(ordered), batch_size)]
        queue += [batches[i] for i in from_first(torch.randperm(len(batches))).tolist()]


# ---------------------------------------------------------------------------------------------------------------------
# 2. Loss


def label_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """(B, S-1) cross-entropy of labels[:, 1:] under logits[:, :-1], which predict them; 0 where there is no label."""
    targets = labels[:, 1:]
    logits = logits[:, :-1].flatten(0, 1).float()
    return F.cross_entropy(logits, targets.flatten(), reduction="none", ignore_index=IGNORE).view_as(targets)


def forward(
    model: nn.Module, rows: list[tuple[list[int], list[int]]], tokenizer: AutoTokenizer, args: Args
) -> dict[str, Tensor]:
    """Sums over the labels of each row (B,): loss, number, hits of the likeliest token, and loss and number of EOS."""
    ids, attention_mask = pad([ids for ids, _ in rows], tokenizer.pad_token_id, model.device)
    labels, _ = pad([labels for _, labels in rows], IGNORE, model.device)
    with autocast(args, model.device):
        logits = model(input_ids=ids, attention_mask=attention_mask, use_cache=False).logits  # (B, S, V)
    losses, targets = label_losses(logits, labels), labels[:, 1:]
    is_eos = targets == tokenizer.eos_token_id
    return {
        "loss": losses.sum(1),
        "tokens": (targets != IGNORE).sum(1),
        "hits": (logits[:, :-1].detach().argmax(-1) == targets).sum(1),
        "eos_loss": losses.detach().masked_fill(~is_eos, 0.0).sum(1),
        "eos_tokens": is_eos.sum(1),
    }


# ---------------------------------------------------------------------------------------------------------------------
# 3. Update


def train(args: Args) -> None:
    """Trains the policy and leaves it, its metrics and its model card in args.output_dir."""
    check_numbers(
        args,
        positive="max_length num_train_epochs per_device_train_batch_size gradient_accumulation_steps learning_rate "
        "max_grad_norm eval_steps save_steps save_total_limit",
        shares="warmup_ratio",
    )
    device = start_run(args)
    model, tokenizer = load_language_model(args)
    place(args, device, model)
    separate_dropout(args)
    rows = encode_completions(load_split(args.dataset, args.dataset_config, args.dataset_train_split), tokenizer, args)
    if args.packing:
        rows = pack(rows, args.max_length)
        require(rows, f"the texts do not fill one block of --max-length {args.max_length}; lower it, or do not pack")
    test_rows = load_test_rows(args, tokenizer)
    batch_size = args.per_device_train_batch_size * args.gradient_accumulation_steps * num_processes()
    steps_per_epoch = math.ceil(len(rows) / batch_size)
    num_steps = math.ceil(args.num_train_epochs * steps_per_epoch)
    use_fast_kernels(args, max(len(ids) for ids, _ in rows), model)
    optimizer = torch.optim.AdamW(model.parameters(), args.learning_rate, weight_decay=args.weight_decay, fused=True)
    schedule = make_schedule(args, optimizer, num_steps)
    print(f"data: {len(rows)} {'blocks' if args.packing else 'texts'}, {len(test_rows)} for evaluation")
    describe_training(args.from_scratch or args.model, model, num_steps, args)
    batches = length_grouped_batches([len(ids) for ids, _ in rows], queue := [], batch_size)
    log = SFTLog(args, num_steps)
    checkpoints = Checkpoints(args, log, model=model, optimizer=optimizer, schedule=schedule, batches=queue)
    try:
        for step, batch in zip(checkpoints.steps(num_steps), batches):
            with memory_for("update"):
                sums = text_gradient(model, [rows[i] for i in batch], tokenizer, args)
            grad_norm = clip_gradient(model.parameters(), args.max_grad_norm)
            if grad_norm.isfinite():  # else the weights would be NaN for good
                optimizer.step()
            optimizer.zero_grad()
            stats = {
                "epoch": step / steps_per_epoch,
                "lr": schedule.get_last_lr()[0],
                "loss": sums["loss"] / sums["tokens"],
                "mean_token_accuracy": sums["hits"] / sums["tokens"],
                "grad_norm": float(grad_norm),
            }
            schedule.step()
            if test_rows and (step % args.eval_steps == 0 or step == num_steps):
                stats |= evaluate_policy(model, test_rows, tokenizer, args)
            log.write(step, stats, int(sums["tokens"]))
            log.show_samples(step, model, tokenizer, test_rows or rows)
    finally:  # also after an error or Ctrl-C: what was trained is on disk
        log.finish(model, tokenizer)


def text_gradient(
    model: nn.Module, batch: list[tuple[list[int], list[int]]], tokenizer: AutoTokenizer, args: Args
) -> dict[str, float]:
    """Adds up the gradient of the mean loss over a batch's labels; returns sums over them of what is logged.

    The gradient is a sum over labels divided by their number, so how the batch is cut, into micro-batches and among
    processes, changes nothing. A row that is computed only so that all processes are equally busy does not count.
    """
    num_labels = sum(label != IGNORE for _, labels in batch for label in labels[1:])  # nothing predicts the first
    sums = torch.zeros(2, device=model.device)
    for index in own_rows(len(batch)).split(args.per_device_train_batch_size):
        output = forward(model, [batch[i % len(batch)] for i in index], tokenizer, args)
        counts = (index < len(batch)).to(model.device)
        loss = (output["loss"] * counts).sum()
        (num_processes() * loss / num_labels).backward()  # FSDP takes the mean over processes
        sums += torch.stack([loss.detach(), (output["hits"] * counts).sum()])
    loss, hits = add_up(sums).tolist()
    return {"loss": loss, "hits": hits, "tokens": num_labels}


@torch.no_grad()
def evaluate_policy(
    model: nn.Module, rows: list[tuple[list[int], list[int]]], tokenizer: AutoTokenizer, args: Args
) -> dict[str, float]:
    """Loss, perplexity and accuracy over all labels of the test split."""
    model.eval()
    by_length = sorted(rows, key=lambda row: len(row[0]))
    parts = [
        forward(model, [by_length[i % len(rows)] for i in index], tokenizer, args)
        for index in own_rows(len(rows)).split(args.per_device_train_batch_size)
    ]
    model.train()
    sums = {name: join_shares(torch.cat([part[name] for part in parts]), len(rows)).double().sum().item()
            for name in parts[0]}  # fmt: skip
    loss = sums["loss"] / sums["tokens"]
    return {
        "eval/loss": loss,
        "eval/perplexity": math.exp(loss),
        "eval/mean_token_accuracy": sums["hits"] / sums["tokens"],
        "eval/eos_loss": sums["eos_loss"] / max(1.0, sums["eos_tokens"]),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Plumbing of this script


def load_language_model(args: Args) -> tuple[nn.Module, AutoTokenizer]:
    """The model to train, pretrained or with random weights, and its tokenizer; fills in the settings left to it."""
    both = args.model and args.from_scratch
    require(not both, f"--model {args.model} and --from-scratch {args.from_scratch} exclude each other; give one")
    if not args.model and not args.from_scratch:
        args.from_scratch = "toy/base"
    tokenizer = load_tokenizer(args.from_scratch or args.model, args.trust_remote_code)
    name, has_eos = args.from_scratch or args.model, tokenizer.eos_token_id is not None
    require(has_eos, f"the tokenizer of {name} has no EOS token, which every text must end with")
    if args.from_scratch:
        config = load(AutoConfig, args.from_scratch, args.trust_remote_code)
        options = {"trust_remote_code": args.trust_remote_code, "attn_implementation": args.attn_implementation}
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **options)
    else:
        model = load_weights(AutoModelForCausalLM, args.model, args)
    args.learning_rate = args.learning_rate or (3e-3 if args.from_scratch else 2e-5)
    if args.max_length > context_length(model):
        print(f"--max-length lowered from {args.max_length} to {context_length(model)}, the context of this model")
        args.max_length = context_length(model)
    if args.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    return model.train(), tokenizer


def load_test_rows(args: Args, tokenizer: AutoTokenizer) -> list[tuple[list[int], list[int]]]:
    """The test split, encoded; [] without one."""
    data = load_test_split(args)
    return encode_completions(data, tokenizer, args) if data else []


def describe_training(name: str, model: nn.Module, num_steps: int, args: Args) -> None:
    """Prints what is about to happen."""
    size, lr = f"{model.num_parameters() / 1e6:.2f}M parameters", f"learning rate {args.learning_rate:.2g}"
    print(f"model: {name}, {size} on {model.device}, {lr}")
    micro_batch = args.per_device_train_batch_size
    print(f"batch: {args.gradient_accumulation_steps} micro-batches of {micro_batch} rows; {num_steps} steps")
    print(f"output: {args.output_dir}")


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


MEMORY_ADVICE = {
    "update": "lower --per-device-train-batch-size and raise --gradient-accumulation-steps as much, or add "
    "--gradient-checkpointing",
    "run": "lower --per-device-train-batch-size, or take more GPUs with --zero-stage 3",
}


class SFTLog:
    """Everything a run leaves behind: metrics.jsonl, the progress bar, sample tables, W&B, curves, the model."""

    def __init__(self, args: Args, num_steps: int):
        self.args, self.num_steps, self.num_tokens, self.last = args, num_steps, 0, time.perf_counter()
        self.metrics: dict[str, float] = {}
        self.file, self.wandb, self.broken = open_metrics(args), start_wandb(args), 0
        self.bar = tqdm(total=num_steps, unit="step", dynamic_ncols=True)

    def write(self, step: int, stats: dict, num_labels: int) -> None:
        """Ends a step: one line of metrics.jsonl, the bar, W&B."""
        self.broken = count_broken(self.broken, not math.isfinite(stats["grad_norm"]))
        now = time.perf_counter()
        self.num_tokens += num_labels
        stats |= {"step": step, "num_tokens": self.num_tokens, "time/step": now - self.last}
        stats |= {"perf/tokens_per_second": num_labels / (now - self.last), "perf/peak_memory_mb": peak_memory_mb()}
        self.last = now
        line = {name: stats[name] for name in METRICS if name in stats}
        self.metrics |= line
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()
        if self.wandb:
            self.wandb.log(line, step=step)
        test = f", test perplexity {self.metrics['eval/perplexity']:.2f}" if "eval/perplexity" in self.metrics else ""
        self.bar.set_postfix_str(f"loss {stats['loss']:.3f}{test}")
        self.bar.update()

    def show_samples(
        self, step: int, model: nn.Module, tokenizer: AutoTokenizer, examples: list[tuple[list[int], list[int]]]
    ) -> None:
        """A table of prompts, sampled completions and the texts' own, `num_sample_generations` times in the run.

        The prompt is what stands before the first label; where nothing does, the first eight tokens.
        """
        if not is_turn(step, self.num_steps, self.args.num_sample_generations):
            return
        new_tokens = min(53, self.args.max_length // 2)
        stored, model.generation_config = model.generation_config, GenerationConfig()  # it would fill in what is unset
        config = GenerationConfig(
            do_sample=True, top_k=0, max_new_tokens=new_tokens,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        rows = []
        with (
            torch.random.fork_rng(),
            gathered(model, self.args.zero_stage),
        ):  # training draws the same numbers however often
            for ids, labels in examples[:3]:
                start = next(i for i, label in enumerate(labels) if label != IGNORE) or min(8, max(1, len(ids) // 2))
                prompt = torch.tensor(
                    [ids[max(0, start + new_tokens - self.args.max_length) : start]], device=model.device
                )
                output = model.eval().generate(
                    prompt, attention_mask=torch.ones_like(prompt), generation_config=config
                )[0]
                rows.append([tokenizer.decode(x) for x in (prompt[0], output[prompt.shape[1] :], ids[start:])])
        model.train()
        model.generation_config = stored
        with self.bar.external_write_mode():
            print_table(f"step {step} of {self.num_steps}", ["prompt", "sampled completion", "the text's own"], rows)
        self.last = time.perf_counter()

    def state_dict(self) -> dict:
        """What a checkpoint keeps of it."""
        return {"num_tokens": self.num_tokens, "metrics": self.metrics}

    def load_state_dict(self, state: dict) -> None:
        """Takes that up again."""
        vars(self).update(state)

    def finish(self, model: nn.Module, tokenizer: AutoTokenizer) -> None:
        """Closes the files and, unless not one step was made, saves the model with its card and draws the curves.

        Not so when one of many processes has failed: the others cannot put the model together without it.
        """
        self.bar.close()
        self.file.close()
        if self.metrics and can_gather():
            save_model(model, tokenizer, self.args, self.metrics)
            panels = [["loss", "eval/loss"], ["eval/perplexity"], ["eval/eos_loss"]]
            draw_curves(Path(self.args.output_dir), "step", panels)
        if self.wandb:
            self.wandb.finish()


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


def separate_dropout(args: Args) -> None:  # same in all scripts
    """From here on processes draw different random numbers; where they must be equal, the first one's are taken."""
    if process_index():
        torch.manual_seed(args.seed + process_index())


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


class UserError(Exception):
    """A mistake in the input: shown as one sentence, exit code 2, no traceback."""


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


def peak_memory_mb() -> float:  # same in all scripts
    """Peak memory in MB: of the GPU on CUDA, else of this process; 0 on Windows, which keeps no such figure."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**20
    if sys.platform == "win32":
        return 0.0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


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
