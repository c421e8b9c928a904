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
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, get_scheduler
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

# --- Arguments. The type of a setting says which values are allowed; the comment beside or above it is its help text

Positive = Annotated[float, "above 0", lambda x: 0 < x < math.inf]
NonNegative = Annotated[float, "0 or more", lambda x: 0 <= x < math.inf]
Share = Annotated[float, "between 0 and 1", lambda x: 0 <= x <= 1]
Count = Annotated[int, "1 or more", lambda x: x >= 1]
Natural = Annotated[int, "0 or more, and below 2**63", lambda x: 0 <= x < 2**63]


@dataclass
class Args:
    # --- Reward model
    center_rewards_coefficient: NonNegative = 0.0  # c of the loss: pulls each pair's rewards towards a sum of 0 (TRL)
    eos_dropout: Share = 0.0  # share of training pairs shown without EOS: then responses that were cut off can be read
    max_length: Count = 512  # longer texts lose their end, and are counted (TRL drops them)

    # --- Optimisation
    learning_rate: Positive | None = None  # AdamW's; by default from the size of the model, ten times as high with LoRA
    lr_scheduler_type: str = "cosine"  # any name that transformers.get_scheduler knows (N+ details: cosine)
    warmup_ratio: Share = 0.03  # share of the run in which the learning rate rises to its value
    weight_decay: NonNegative = 0.0  # AdamW's
    max_grad_norm: Positive = 1.0  # the gradient is clipped to this norm

    # --- Batch sizes
    batch_size: Count | None = None  # pairs per optimiser step, on all GPUs together; by default 64
    micro_batch_size: Count | None = None  # pairs per forward/backward pass; affects rounding and dropout only
    # TRL's way: this is micro_batch_size, and * gradient_accumulation_steps * GPUs is batch_size
    per_device_train_batch_size: Count | None = None
    gradient_accumulation_steps: Count = 1  # with per_device_train_batch_size (TRL)

    # --- Model: a folder, or a name on the hub
    model: str = "toy/sft"  # the model to start from, ideally the policy that sft.py made; any causal architecture
    lora_r: Natural = 0  # rank of LoRA adapters (Hu et al. 2021), 0 for none; the head is trained whole
    lora_alpha: Positive = 32.0  # the adapter's output is scaled by lora_alpha / lora_r
    lora_target_modules: str | None = None  # regular expression for their layers, or all-linear; default: peft's
    bf16: bool = False  # run the models in bfloat16 (autocast); trained weights and optimiser state stay in float32
    attn_implementation: str | None = None  # eager, sdpa, flash_attention_2, ...; by default transformers' own choice
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: far less memory, a third slower
    trust_remote_code: bool = False  # run Python code that comes with a model; only if you have read that code

    # --- Data
    dataset: str = "toy/data/preferences"  # folder, file (jsonl, json, csv, parquet) or hub name
    dataset_config: str | None = None  # configuration of a hub dataset that has several
    dataset_train_split: str = "train"  # split to train on
    dataset_test_split: str | None = None  # split to evaluate on, or none; by default validation, if there is one
    chosen_column: str = "chosen"  # preferred texts, or lists of {role, content} messages
    rejected_column: str = "rejected"  # the other texts
    prompt_column: str = "prompt"  # what both texts continue, if there is such a column
    margin_column: str = "margin"  # how much better the chosen text is (Llama 2, eq. 2), if there is such a column
    seed: Natural = 1  # seed of the order of pairs, of dropout, and of the new head

    # --- Run. From here on, a resumed run may differ from what it was
    resume: str | None = None  # a run's folder or one of its checkpoints: continue, with the settings of that run
    num_train_epochs: Positive = 1.0  # passes over the pairs (N+ details: 1; more overfits at once)
    exp_name: str = "reward_model"  # name of this run, in its folder and on W&B
    output_dir: str | None = None  # where everything goes; by default a new folder runs/NAME__SEED__TIME
    device: str | None = None  # cpu, cuda, mps; by default the best there is
    save_steps: Count = 100  # steps between checkpoints, each of which holds everything that a run consists of
    save_total_limit: Count = 2  # number of checkpoints to keep, the newest
    eval_steps: Count = 100  # steps between evaluations; there is one at the end, too
    num_sample_generations: Natural = 2  # how often a table of pairs with their rewards is printed
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works without an account)
    wandb_project_name: str = "rlhf"  # W&B project, with --track
    wandb_entity: str | None = None  # W&B team, with --track

    # --- Many GPUs: torchrun --nproc-per-node N
    zero_stage: Literal[0, 2, 3] = 0  # shards: 0 none, 2 of gradients and optimiser state, 3 of weights too (FSDP2)
    shard_size: Count | None = None  # GPUs that hold one set of shards, such as those of a node (ZeRO++); default: all
    offload: bool = False  # keep the shards in CPU memory until they are needed: slow, for models that do not fit

    # --- Computed
    torch_device: str = field(init=False, default="cpu")  # where the models are


# --- The loop: its numbers are those of the steps above ---------------------------------------------------------------


def train(args: Args) -> None:
    """Trains the reward model; leaves it, its metrics, curves and model card in args.output_dir."""
    start_run(args)
    model = load_classifier(args)
    models = place(args, model)
    pairs, test_pairs = (encode_pairs(x, model.tokenizer, args) if x else [] for x in load_data(args))  # 1
    lengths = [max(len(p.chosen), len(p.rejected)) for p in pairs]
    num_steps, steps_per_epoch = plan_steps(args, model, len(pairs), fits_cpu=8192 // max(lengths))
    use_fast_kernels(args, models, 2 * args.micro_batch_size, max(lengths))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, args.learning_rate, weight_decay=args.weight_decay, fused=True)
    schedule = make_schedule(args, optimizer, num_steps)
    check_padding(model, args)
    state = {"batches": [], "config": {}}  # what else changes during the run; config: what centring sets there
    run = Run(args, {"model": model}, optimizer, schedule, state)
    batches = length_grouped_batches(lengths, state["batches"], args.batch_size)
    model.config.update(state["config"])
    separate_dropout(args)
    try:
        for step, rows in zip(run.steps(num_steps), batches):
            with run.clock("step"):
                batch = drop_eos([pairs[i] for i in rows], model.tokenizer.eos_token_id, args)
                stats = pair_gradient(model, batch, args)  # 2 and 3
                grad_norm = clip_gradient(trained, args.max_grad_norm)  # 4
                if grad_norm.isfinite():  # else the weights would be NaN for good
                    optimizer.step()
                optimizer.zero_grad()
            stats |= {"step": step, "epoch": step / steps_per_epoch, "lr": schedule.get_last_lr()[0]}
            stats |= {"grad_norm": float(grad_norm)}
            schedule.step()
            if step == num_steps:
                chosen, rejected = all_rewards(model, pairs[:2000], args)
                state["config"] = shift_rewards(model, -torch.cat([chosen, rejected]).mean().item())
            if test_pairs and (step % args.eval_steps == 0 or step == num_steps):
                test_stats, bins = evaluate_rewards(model, test_pairs, args)
                stats |= test_stats
            run.write(step, stats, "loss", "eval/accuracy")
            if run.is_turn(step, args.num_sample_generations):
                show_pairs(run, step, model, test_pairs or pairs, args)
                if test_pairs and step == num_steps:
                    run.table("calibration on the test split", ["predicted", "observed", "pairs"],
                              [[f"{p:.2f}", f"{share:.2f}", str(n)] for p, share, n in bins])  # fmt: skip
    finally:  # after an error or Ctrl-C, too: what was trained is on disk
        run.finish(model, CURVES)


# --- 1. Encode --------------------------------------------------------------------------------------------------------


@dataclass
class Pair:
    """Token ids of two texts with the same prompt, and by how much the first is better."""

    chosen: list[int]
    rejected: list[int]
    margin: float = 0.0


def encode_text(prompt: str, text: str, tokenizer: AutoTokenizer) -> list[int]:
    """Token ids of prompt + text + EOS; prompt and text are encoded apart, as in a rollout."""
    ids = tokenizer(prompt)["input_ids"] if prompt else []
    ids = ids + tokenizer(text, add_special_tokens=not prompt)["input_ids"]
    if tokenizer.eos_token_id is None or ids[-1:] == [tokenizer.eos_token_id]:
        return ids
    return ids + [tokenizer.eos_token_id]


def encode_conversation(prompt: str | list[dict], text: str | list[dict], tokenizer: AutoTokenizer) -> list[int]:
    """Token ids of a conversation: the prompt's turns if it has any, then those of the text, or the text as a turn."""
    turns = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}] if prompt else []
    turn = text if isinstance(text, list) else [{"role": "assistant", "content": text}]
    ids = apply_template(turn if turn[: len(turns)] == turns else turns + turn, tokenizer)  # some hold the prompt, too
    return ids[:-1] if ids[-2:-1] == [tokenizer.eos_token_id] else ids  # ChatML writes a newline behind EOS


def encode_pairs(data, tokenizer: AutoTokenizer, args: Args) -> list[Pair]:
    """All pairs of a split, cut to max_length; pairs whose texts are then equal teach nothing: dropped and counted."""
    chosen = read_column(data, args.chosen_column, args.dataset, "--chosen-column", (str, list))
    rejected = read_column(data, args.rejected_column, args.dataset, "--rejected-column", (str, list))
    prompts, margins = [""] * len(chosen), [0.0] * len(chosen)
    if args.prompt_column in data.column_names:
        prompts = read_column(data, args.prompt_column, args.dataset, "--prompt-column", (str, list))
    if args.margin_column in data.column_names:
        margins = read_column(data, args.margin_column, args.dataset, "--margin-column", (int, float))
    require(all(map(math.isfinite, margins)), f"--dataset {args.dataset}: NaN or infinity in {args.margin_column!r}")
    pairs, limit = [], args.max_length
    rows = tqdm(zip(prompts, margins, chosen, rejected), total=len(prompts), desc="encoding", leave=False)
    for prompt, margin, *texts in rows:
        encode = encode_conversation if list in map(type, (prompt, *texts)) else encode_text
        pairs.append(Pair(*(encode(prompt, text, tokenizer) for text in texts), float(margin)))
    kept = [Pair(p.chosen[:limit], p.rejected[:limit], p.margin) for p in pairs]
    kept = [p for p in kept if p.chosen != p.rejected]
    same = sum(p.chosen == p.rejected for p in pairs)
    too_long = sum(len(ids) > limit for p in pairs for ids in (p.chosen, p.rejected))
    if too_long:
        print(f"cut {too_long} of {2 * len(pairs)} texts to --max-length {limit} tokens")
    dropped = (f"{len(pairs) - len(kept)} of {len(pairs)} pairs: in {same} both texts are the same, in "
               f"{len(pairs) - len(kept) - same} after they were cut to --max-length {limit} tokens")  # fmt: skip
    require(kept, f"--dataset {args.dataset}: dropped {dropped}")
    if len(kept) < len(pairs):
        print(f"dropped {dropped}")
    return kept


def drop_eos(batch: list[Pair], eos_token_id: int | None, args: Args) -> list[Pair]:
    """The batch with a random share `eos_dropout` of its pairs as they would look cut off just before their EOS."""
    if not args.eos_dropout:
        return batch
    dropped = (broadcast(torch.rand(len(batch))) < args.eos_dropout).tolist()
    cut = lambda ids: ids[:-1] if len(ids) > 1 and ids[-1] == eos_token_id else ids  # noqa: E731
    return [Pair(cut(p.chosen), cut(p.rejected), p.margin) if d else p for p, d in zip(batch, dropped)]


def length_grouped_batches(lengths: list[int], queue: list[list[int]], batch_size: int) -> Iterator[list[int]]:
    """Endless passes over all rows in batches of similar length, in random order: little padding, yet random enough.

    Rows are shuffled, cut into groups of 50 batches, sorted by length within a group, and the batches shuffled again.
    `queue` holds the batches that this pass has yet to give. It is the caller's, so that a checkpoint can hold it.
    """
    while True:
        while queue:
            yield queue.pop(0)
        order = broadcast(torch.randperm(len(lengths))).tolist()
        groups = [order[i : i + 50 * batch_size] for i in range(0, len(order), 50 * batch_size)]
        ordered = [row for group in groups for row in sorted(group, key=lengths.__getitem__)]
        batches = [ordered[i : i + batch_size] for i in range(0, len(ordered), batch_size)]
        queue += [batches[i] for i in broadcast(torch.randperm(len(batches))).tolist()]


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
    return rewards + getattr(model.config, "reward_bias", 0.0)


def pair_rewards(model: nn.Module, pairs: list[Pair], args: Args) -> tuple[Tensor, Tensor]:
    """(B,) rewards of the chosen and of the rejected texts, in one forward pass over all of them."""
    ids, mask = pad([p.chosen for p in pairs] + [p.rejected for p in pairs], model.tokenizer.pad_token_id, args)
    with autocast(args):
        rewards = read_reward(model, ids, mask.long()).squeeze(1)  # (2B,)
    return rewards[: len(pairs)], rewards[len(pairs) :]


def init_reward_head(head: nn.Linear) -> None:
    """Weights of standard deviation 1/sqrt(D+1), so that rewards begin with a deviation of about 1 (N+ details)."""
    nn.init.normal_(head.weight, std=1 / math.sqrt(head.in_features + 1))


def shift_rewards(model: nn.Module, shift: float) -> dict[str, float]:
    """Adds a constant to every reward, in a way that is saved with the model; returns what it sets in the config.

    The head of transformers' classifiers has no bias. But if the last layer is h = norm(x) g + c, moving c by
    shift w / |w|^2 moves every w . h by the shift: a plain weight that any program which loads the model sees. If that
    norm has no c (RMSNorm) or is frozen (LoRA), the config holds the shift as `reward_bias`, which read_reward adds.
    """
    norms = [m for m in model.base_model.children() if isinstance(m, nn.LayerNorm) and m.bias is not None]
    if len(norms) != 1 or not norms[0].weight.requires_grad:
        model.config.reward_bias = getattr(model.config, "reward_bias", 0.0) + shift
        return {"reward_bias": model.config.reward_bias}
    everywhere = dcp.StateDictOptions(full_state_dict=True)  # put together from shards, in every process
    w, norm = (dcp.get_model_state_dict(part, options=everywhere) for part in (model.score, norms[0]))
    norm["bias"] = norm["bias"] + shift * w["weight"][0] / w["weight"][0].square().sum()
    dcp.set_model_state_dict(norms[0], norm, options=everywhere)
    return {}


# --- 3. Loss ----------------------------------------------------------------------------------------------------------


def preference_loss(chosen: Tensor, rejected: Tensor, margin: Tensor, center_rewards_coefficient: float) -> Tensor:
    """(B,) losses: -log sigmoid(chosen - rejected - margin) + c (chosen + rejected)^2, all of shape (B,)."""
    return -F.logsigmoid(chosen - rejected - margin) + center_rewards_coefficient * (chosen + rejected) ** 2


# --- 4. Update --------------------------------------------------------------------------------------------------------


def pair_gradient(model: nn.Module, batch: list[Pair], args: Args) -> dict[str, float]:
    """Adds up the gradient of the mean loss over a batch of pairs; returns means over them of what is logged.

    How the batch is cut, into micro-batches and among processes, changes nothing.
    """
    sums = torch.zeros(3, device=args.torch_device)
    for pairs, counts in micro_batches(batch, args):
        chosen, rejected = pair_rewards(model, pairs, args)  # (b,) each
        margin = torch.tensor([p.margin for p in pairs], device=args.torch_device)
        losses = preference_loss(chosen, rejected, margin, args.center_rewards_coefficient) * counts
        (WORLD_SIZE * losses.sum() / len(batch)).backward()  # gradients become means over processes
        stats = losses.detach(), (chosen > rejected) * counts, (chosen - rejected).detach() * counts
        sums += torch.stack([x.sum() for x in stats])
    return dict(zip(("loss", "accuracy", "margin"), (all_reduce(sums) / len(batch)).tolist()))


# === The algorithm ends here. What follows is needed by every program of this kind ====================================


@torch.no_grad()
def all_rewards(model: nn.Module, pairs: list[Pair], args: Args) -> tuple[Tensor, Tensor]:
    """(N,) rewards of all chosen and all rejected texts, dropout off."""
    model.eval()
    parts = [pair_rewards(model, part, args) for part, _ in micro_batches(pairs, args)]
    model.train()
    chosen, rejected = (all_gather(torch.cat(x))[: len(pairs)].cpu() for x in zip(*parts))
    return chosen, rejected


def calibration(differences: Tensor) -> list[tuple[float, float, int]]:
    """For ten bins of |r_chosen - r_rejected|, equally full: mean predicted probability that the higher reward was
    chosen, the share of pairs in which it was, and their number. A calibrated model has the first two equal."""
    ordered = differences[differences.abs().argsort()]
    bins = [b for b in ordered.tensor_split(10) if len(b)]
    return [(b.abs().sigmoid().mean().item(), (b > 0).float().mean().item(), len(b)) for b in bins]


def evaluate_rewards(
    model: nn.Module, pairs: list[Pair], args: Args
) -> tuple[dict[str, float], list[tuple[float, float, int]]]:
    """Loss (without margin and centring), accuracy and calibration over the test split, and the calibration's bins."""
    chosen, rejected = all_rewards(model, pairs, args)
    bins = calibration(chosen - rejected)
    stats = {
        "eval/loss": preference_loss(chosen, rejected, torch.zeros(()), 0.0).mean().item(),
        "eval/accuracy": (chosen > rejected).float().mean().item(),
        "eval/margin": (chosen - rejected).mean().item(),
        "eval/calibration_error": sum(n * abs(p - share) for p, share, n in bins) / len(chosen),
        "eval/mean_reward": torch.cat([chosen, rejected]).mean().item(),
        "eval/std_reward": torch.cat([chosen, rejected]).std().item(),
    }
    return stats, bins


def show_pairs(run: "Run", step: int, model: nn.Module, pairs: list[Pair], args: Args) -> None:
    """A table of four pairs with their rewards."""
    chosen, rejected = all_rewards(model, pairs[:4], args)
    rows = []
    for pair, a, b in zip(pairs, chosen.tolist(), rejected.tolist()):
        texts = [model.tokenizer.decode(ids, skip_special_tokens=True) for ids in (pair.chosen, pair.rejected)]
        rows.append([texts[0], f"{a:.2f}", texts[1], f"{b:.2f}", "yes" if a > b else "no"])
    run.table(f"step {step} of {run.bar.total}", ["chosen", "reward", "rejected", "reward", "right"], rows)


def load_classifier(args: Args) -> nn.Module:
    """The model with a new head of one output."""
    model = load_model(AutoModelForSequenceClassification, args.model, args, new_head=True, num_labels=1)
    require(hasattr(model, "score"), f"{args.model} ({type(model).__name__}) is no causal language model: it has no "
            "last token to read")  # fmt: skip
    init_reward_head(model.score)
    model.config.pad_token_id = model.tokenizer.pad_token_id  # for programs that use the library's own pooling
    model.config.id2label, model.config.label2id = {0: "reward"}, {"reward": 0}
    # 1e-5 for a model of GPT-2's size, higher for smaller ones, never below 3e-6 (the N+ details' rate from 1B up)
    default = max(3e-6, 1e-5 * (124e6 / model.num_parameters()) ** 0.75) * (10 if args.lora_r else 1)
    args.learning_rate = args.learning_rate or default
    if args.lora_r:
        add_adapter(model, args, task_type="SEQ_CLS", modules_to_save=["score"])
    args.max_length = min(args.max_length, context_length(model))
    return model.train()


# --- Settings and checks ----------------------------------------------------------------------------------------------

ALIASES = {  # other libraries' spellings
    "--model-name-or-path": "--model", "--sft-model-path": "--model", "--dataset-name": "--dataset",
    "--dataset-config-name": "--dataset-config", "--resume-from-checkpoint": "--resume",
}  # fmt: skip
CURVES = [["loss", "eval/loss"], ["accuracy", "eval/accuracy"], ["margin", "eval/margin"]]


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
