# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.23.0", "datasets==5.2.0", "tyro==1.0.17", "wandb==0.31.0",
#     "pydantic==2.14.3", "tqdm==4.70.1"]
# ///
"""Reward modelling: pairs of a preferred and a rejected answer -> a model that scores any text.

For each batch of B pairs (chosen, rejected) with the same prompt:
  1. encode   prompt + answer + EOS (end of sequence); in conversations, up to the token that ends the answer
  2. read     r = w . h, with h the last hidden state at the last real token, and w a new head
  3. loss     -log sigmoid(r_chosen - r_rejected - margin) + c (r_chosen + r_rejected)^2
  4. update   one AdamW step; the learning rate is warmed up, then annealed
If c is 0, a constant added to all rewards does not change the loss. At the end one is added that makes the mean reward
of training texts 0.

  input_ids     p1  p2  w1  w2  w3  EOS      texts (2B, S), right-padded: all chosen ones, then all rejected ones
                p1  p2  l1  l2  EOS  .       (a dot is padding)
  reward                             *       one for each text, at its last real token: only there has a causal model
                                 *           read the whole text

This is the negative log-likelihood of Bradley and Terry's model: the chosen answer is preferred with probability
sigmoid(r_chosen - r_rejected). Calibration compares this probability with how often it was preferred.

Papers: InstructGPT 2203.02155 (eq. 1); Llama 2 2307.09288 (eq. 2, margin); centring 2312.09244; the N+ implementation
details 2403.17031 (first weights of the head, one epoch, mean 0). In short: lecture/reward_model.py, 190 lines.

  python reward_model.py                                      # the toy world: offline, a minute on two CPU cores
  python reward_model.py --model gpt2 --dataset pairs.jsonl   # rows with prompt, chosen, rejected
"""

import ctypes
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
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
from torch import nn
from torch.distributed._composable import checkpoint as recompute_activations
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
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
    # --- Reward model ---
    center_rewards_coefficient: NonNegativeFloat = 0.0  # c: pulls the sum of each pair's rewards towards 0 (TRL)
    eos_dropout: Share = 0.0  # share of training texts without EOS, so that the model learns to judge cut-off answers
    max_length: PositiveInt = 512  # longer texts are cut at the end; their number is printed (TRL drops them)
    # --- Optimisation ---
    # by default from the model's size, and ten times as high with LoRA
    learning_rate: Annotated[PositiveFloat | None, alias("--lr")] = None
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup", "polynomial"] = "cosine"  # N+
    warmup_ratio: Share = 0.03  # share of the run in which the learning rate warms up from 0
    weight_decay: NonNegativeFloat = 0.0  # weight decay of AdamW
    max_grad_norm: PositiveFloat = 1.0  # the gradient is clipped to this norm
    # --- Batch sizes ---
    batch_size: PositiveInt | None = None  # pairs per step, on all GPUs; by default 64, or less to have a hundred steps
    micro_batch_size: PositiveInt | None = None  # pairs per pass; by default 16 on a CPU, 8192 tokens on a GPU
    # --- Model: a folder, or a name on the hub ---
    model: Annotated[str, alias("--model-name-or-path", "--sft-model-path")] = f"{TOY}/sft"  # to start from
    lora_r: NonNegativeInt = 0  # rank of LoRA adapters (peft), 0 for none; all weights of the head are trained
    bf16: bool = False  # models run in bfloat16 (autocast), trained weights stay in float32. Slow on most CPUs
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: far less memory, a third slower
    zero_stage: Literal[2, 3] = 2  # processes divide gradients and moments among them; 3: weights, too
    # --- Data. A row has `prompt`, `chosen`, `rejected`, texts or messages; or two conversations; perhaps `margin` ---
    dataset: Annotated[str, alias("--dataset-name")] = f"{TOY}/data/preferences"  # folder of SPLIT.jsonl, or hub name
    dataset_config: Annotated[str | None, alias("--dataset-config-name")] = None  # which configuration of a hub dataset
    dataset_train_split: str = "train"  # split to train on
    dataset_test_split: str | None = "validation"  # split to evaluate on, if there is one
    # --- Run ---
    seed: NonNegativeInt = 1  # seed of the head, of adapters, the order of pairs, and dropout
    num_train_epochs: PositiveFloat = 1.0  # passes over the pairs (N+ details: 1; large models overfit with more)
    output_dir: str | None = None  # folder for all output; by default a new folder runs/SCRIPT__SEED__TIME
    resume: Annotated[str | None, alias("--resume-from-checkpoint")] = None  # folder of a run to continue
    device: str = "cuda" if torch.cuda.is_available() else "cpu"  # cpu, cuda, mps; by default cuda if there is one
    save_steps: PositiveInt = 100  # steps between checkpoints, which hold the full state of the run
    save_total_limit: PositiveInt = 1  # checkpoints to keep
    eval_steps: PositiveInt = 100  # steps between evaluations; the last step is always followed by one
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works without an account)


# --- The loop, with the steps of the docstring ------------------------------------------------------------------------
def train(args):
    """Trains the reward model. Saves it in the run's folder, with its metrics."""
    args = start(args)
    tokenizer = load_tokenizer(args.model)
    config = AutoConfig.from_pretrained(args.model).get_text_config()
    context = getattr(config, "max_position_embeddings", args.max_length)
    args = replace(args, max_length=min(args.max_length, context))
    pairs = load_pairs(args, tokenizer, args.dataset_train_split)
    eval_pairs = load_pairs(args, tokenizer, args.dataset_test_split)
    model = load_classifier(args)
    choose_pad_token(model, pairs)
    place(model, args)
    rate = 1e-4 * (124e6 / model.num_parameters()) ** 0.346  # TRL's for GPT-2's size; 7e-4 for 0.4M, 2.5e-5 for 7B
    args = choose_sizes(args, model, pairs, rate, 8192)  # from here on, all sizes are set
    batches, steps_per_pass = length_grouped_batches(pairs, args)
    num_steps = math.ceil(args.num_train_epochs * steps_per_pass)

    weights = [p for p in model.parameters() if p.requires_grad]
    # fused: ten times as fast on a CPU
    optimizer = torch.optim.AdamW(weights, lr=args.learning_rate, weight_decay=args.weight_decay, fused=True)
    schedule = get_scheduler(args.lr_scheduler_type, optimizer, int(args.warmup_ratio * num_steps), num_steps)
    run = Run(args, num_steps, optimizer, schedule, {}, model=model)
    for step in run.steps():
        set_seed(make_seed(args.seed, step, RANK))  # of dropout

        # 1. Encode: load_pairs did, but some texts may lose their end
        batch = [pairs[i] for i in batches[step - 1]]
        if args.eos_dropout:
            batch = drop_eos(batch, model.tokenizer, args.eos_dropout, make_seed(args.seed, step))

        # 2. Read, 3. loss, and 4. update
        stats = update(model, optimizer, batch, args)

        stats["step"] = step
        stats["epoch"] = step / steps_per_pass
        stats["lr"] = optimizer.param_groups[0]["lr"]
        if eval_pairs and (step % args.eval_steps == 0 or step == num_steps):
            stats |= evaluate(model, eval_pairs, args)
        run.log(stats, "loss", "accuracy")
        schedule.step()
    # moves the mean reward of training texts to 0. Only these scripts know this entry of config.json
    model.config.reward_bias -= all_rewards(model, pairs[:2000], args).mean().item()
    run.finish()


# --- 1. Encode --------------------------------------------------------------------------------------------------------
def cut_to_fit(pair, args):
    """Cuts the ends of both texts, so that each has at most max_length tokens."""
    room = max(0, args.max_length - len(pair.prompt))
    return Pair(pair.prompt[: args.max_length], pair.chosen[:room], pair.rejected[:room], pair.margin)


def drop_eos(pairs, tokenizer, share, seed):
    """Removes EOS, or the token that ends a turn, from a random share of the texts. Each is drawn by itself: from pairs
    with one complete text the model learns that a missing EOS makes a text neither better nor worse."""
    ends = tokenizer.added_tokens_decoder.keys() | {tokenizer.eos_token_id}  # a text cut to max_length has none
    generator = torch.Generator().manual_seed(seed)  # the same in all processes
    drawn = torch.rand(len(pairs), 2, generator=generator) < share
    shown = []
    for pair, is_drawn in zip(pairs, drawn.tolist()):
        answers = [pair.chosen, pair.rejected]
        for i, ids in enumerate(answers):
            if is_drawn[i] and ids[-1] in ends:
                answers[i] = ids[:-1]
        shown.append(Pair(pair.prompt, *answers, pair.margin))
    return shown


# --- 2. Read ----------------------------------------------------------------------------------------------------------
def read_reward(model, input_ids, attention_mask):
    """(b,) output of the head at the last real token of each text (b, S)."""
    output = model.base_model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
    states = output.last_hidden_state  # (b, S, D)
    last = attention_mask.sum(1) - 1  # (b,)
    states = states[torch.arange(len(last), device=last.device), last]  # (b, D)
    with torch.autocast(states.device.type, enabled=False):  # bfloat16 is too coarse for a reward
        return model.score(states.float()).squeeze(1) + model.config.reward_bias


def pair_rewards(model, pairs, args):
    """(b,) rewards of the chosen and of the rejected texts, from one forward pass over all of them."""
    texts = [np.append(pair.prompt, pair.chosen) for pair in pairs]
    texts += [np.append(pair.prompt, pair.rejected) for pair in pairs]
    ids, mask = pad(texts, model.tokenizer, args)  # (2b, S)
    with autocast(args):
        rewards = read_reward(model, ids, mask.long())  # (2b,)
    return rewards.split(len(pairs))


# --- 3. Loss ----------------------------------------------------------------------------------------------------------
def preference_loss(chosen, rejected, margin, center_rewards_coefficient):
    """(b,) losses. With rewards 1 and -1 and margin 0: sigmoid(2) = .88, and -log .88 = .13

    The margin (b,) says how much better the chosen text is, where people were asked."""
    centring = center_rewards_coefficient * (chosen + rejected) ** 2
    return -F.logsigmoid(chosen - rejected - margin) + centring


# --- 4. Update --------------------------------------------------------------------------------------------------------
def update(model, optimizer, batch, args):
    """Makes one optimiser step on a batch of pairs. Returns its metrics. The loss is the mean over all pairs of the
    batch, however they are split into micro-batches and among processes."""
    sums = Counter()
    model.train()  # with dropout, if the model's config has any
    optimizer.zero_grad()
    for pairs, mask in micro_batches(batch, args):
        chosen, rejected = pair_rewards(model, pairs, args)  # (b,) each
        margin = torch.tensor([pair.margin for pair in pairs], device=args.device)  # (b,)
        losses = preference_loss(chosen, rejected, margin, args.center_rewards_coefficient)
        loss = (losses * mask).sum() / len(batch)
        (WORLD_SIZE * loss).backward()  # gradients are averaged over processes
        metrics = {"loss": losses, "accuracy": chosen > rejected, "margin": chosen - rejected}
        sums.update({name: (x.detach() * mask).sum() for name, x in metrics.items()})  # a Counter adds
    model.eval()
    means = all_reduce(torch.stack(list(sums.values()))) / len(batch)
    stats = dict(zip(sums, means.tolist()))
    stats["grad_norm"] = nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], args.max_grad_norm).item()
    if math.isfinite(stats["grad_norm"]):  # otherwise the step would turn the weights into NaN
        optimizer.step()
    return stats


# === End of the algorithm. Next: its metrics, then what every program of this kind needs =============================
@torch.no_grad()
def all_rewards(model, pairs, args):
    """(N, 2) rewards of the chosen and the rejected text of all pairs."""
    parts = [torch.stack(pair_rewards(model, some, args), 1) for some, _ in micro_batches(pairs, args)]  # (b, 2) each
    return all_gather(torch.cat(parts))[: len(pairs)].cpu()  # the last one may repeat the first rows


def evaluate(model, pairs, args):
    """Metrics of the test split. The loss is without margin and centring. The calibration error is the mean over ten
    bins of |predicted - observed share of pairs in which the text with the higher reward was chosen|."""
    rewards = all_rewards(model, pairs, args)  # (N, 2)
    gaps = rewards[:, 0] - rewards[:, 1]
    surplus = (gaps > 0).float() - gaps.abs().sigmoid()  # (N,) observed - predicted
    bins = surplus[gaps.abs().argsort()].tensor_split(10)
    return {
        "eval/loss": preference_loss(*rewards.unbind(1), 0.0, 0.0).mean().item(),
        "eval/accuracy": (gaps > 0).float().mean().item(),
        "eval/margin": gaps.mean().item(),
        "eval/calibration_error": sum(x.sum().abs().item() for x in bins) / len(pairs),
        "eval/std_reward": rewards.std().item(),
    }


# --- Model ------------------------------------------------------------------------------------------------------------
def load_classifier(args):
    """Loads the model. A language model gets a new head; its first rewards have a deviation of about 1 (N+ details)."""
    one_label = partial(AutoModelForSequenceClassification.from_pretrained, num_labels=1)
    heads = ("score.weight", "lm_head.weight", "lm_head.bias", "embed_out.weight")  # the new one, and those that go
    model = load_model(SimpleNamespace(from_pretrained=one_label), args.model, heads)
    if type(model).__name__ not in (model.config.architectures or []):
        nn.init.normal_(model.score.weight, std=1 / math.sqrt(model.score.in_features + 1))
        model.config.architectures = [type(model).__name__]
    model.config.reward_bias = getattr(model.config, "reward_bias", 0.0)  # the last step changes it
    model.config.problem_type = "regression"  # otherwise pipeline("text-classification") applies a sigmoid to a reward
    if args.lora_r:
        from peft import LoraConfig

        options = {"target_modules": "all-linear", "task_type": "SEQ_CLS", "modules_to_save": ["score"]}
        model.add_adapter(LoraConfig(r=args.lora_r, lora_alpha=32, **options))
    return model


def choose_pad_token(model, pairs):
    """Takes another pad token if a text holds it, such as EOS. The library's classifiers read the last token that is
    not the pad token: they would read the token before EOS. (Ours find the last token by its position.)"""
    tokenizer = model.tokenizer
    num_tokens = min(len(tokenizer), model.get_input_embeddings().num_embeddings)
    free = set(range(num_tokens))
    for pair in pairs:
        free.difference_update(pair.prompt.tolist(), pair.chosen.tolist(), pair.rejected.tolist())
    if tokenizer.pad_token_id not in free and free:
        added = free & tokenizer.added_tokens_decoder.keys()
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(max(added or free))  # the last ones are rare
        print(f"the pad token is now {tokenizer.pad_token!r}, which no text holds")
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id


# === From here on, a function has the same text in all scripts that have it ==========================================
# --- Rows -------------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class Pair:
    """Token ids (int32) of a prompt and of two answers to it, each with the token that ends it."""

    prompt: np.ndarray
    chosen: np.ndarray
    rejected: np.ndarray
    margin: float  # how much better the chosen answer is, 0 if unknown; only reward_model.py uses it

    def __len__(self):
        """Number of tokens of the prompt with its longer answer."""
        return len(self.prompt) + max(len(self.chosen), len(self.rejected))


def load_pairs(args, tokenizer, split):
    """The pairs of a split, cut to max_length tokens. Those whose answers are then equal are dropped."""

    def texts_of(row):
        """The prompt, and the prompt with either answer, as the model reads them."""
        prompt = row.get("prompt")
        chosen = row.get("chosen")
        rejected = row.get("rejected")
        require(chosen and rejected, "a pair has 'chosen' and 'rejected'")
        if not is_chat:
            check_text(prompt, "prompt")
            check_completion(prompt, chosen, "chosen")
            check_completion(prompt, rejected, "rejected")
            return prompt, prompt + chosen, prompt + rejected
        is_single = isinstance(prompt, list) and len(chosen) == len(rejected) == 1
        require(prompt is None or is_single, "beside 'prompt', a list, 'chosen' and 'rejected' are one message each")
        both = [[*(prompt or []), *(answer or [])] for answer in (chosen, rejected)]
        for messages in both:
            check_messages(messages, last="assistant")
        prompt = both[0][:-1]
        require(prompt == both[1][:-1], "'chosen' and 'rejected' differ before their last messages")
        check_messages(prompt, last="user")
        start = render(prompt, row, tokenizer, add_generation_prompt=True)
        texts = [render_answer(messages, row, tokenizer) for messages in both]
        has_prompt = all(text.startswith(start) for text in texts)
        require(has_prompt, f"the chat template does not write {start[-30:]!r} before an answer")
        return start, *texts

    def pair_of(columns):
        """The ids of a row's texts, divided where the prompt ends."""
        row, prompt, *texts = columns
        for i, ids in enumerate(texts):
            has_prompt = np.array_equal(ids[: len(prompt)], prompt)
            require(has_prompt, "a token of the text holds the end of its prompt: does the prompt end with a space?")
            if not is_chat and ids[-1] != tokenizer.eos_token_id:
                ids = np.append(ids, np.int32(tokenizer.eos_token_id))
            texts[i] = ids[len(prompt) :]
        require(not np.array_equal(*texts), "'chosen' and 'rejected' are the same")
        margin = row.get("margin") or 0.0
        require(isinstance(margin, (int, float)) and math.isfinite(margin), f"'margin' is no number: {margin!r:.60}")
        return Pair(prompt, *texts, margin)

    rows = read_rows(args, split)
    is_chat = isinstance(rows[0].get("chosen") if rows else None, list)
    texts = parse(rows, texts_of, f"{args.dataset}, {split}")
    ids = [encode(list(column), tokenizer, is_chat) for column in zip(*texts)]
    whole = parse(zip(rows, *ids), pair_of, f"{args.dataset}, {split}")
    pairs = [cut_to_fit(pair, args) for pair in whole]
    pairs = [pair for pair in pairs if not np.array_equal(pair.chosen, pair.rejected)]
    num_cut = sum(len(pair) > args.max_length for pair in whole)
    print(f"{split}: {len(pairs)} of {len(whole)} pairs differ within {args.max_length} tokens; {num_cut} were cut")
    require(pairs or not rows, f"no two answers differ within --max-length {args.max_length}")
    for pair in pairs[:1]:
        texts = tokenizer.batch_decode([pair.prompt, pair.chosen, pair.rejected])
        print("the first one, as the model reads it:", *map(repr, texts), sep="\n  ")
    return pairs


def length_grouped_batches(pairs, args):
    """The batches of all passes, as numbers of pairs, and how many make a pass. The pairs of a batch have similar
    lengths, to save padding: in each pass they are shuffled, split into groups of 50 batches, and sorted within a
    group; then the batches are shuffled."""
    lengths = torch.tensor(list(map(len, pairs)))
    batches = []
    for number in range(math.ceil(args.num_train_epochs)):
        rows = torch.tensor(shuffled(len(pairs), args.seed, 2 * number))
        of_pass = []
        for group in rows.split(50 * args.batch_size):
            group = group[lengths[group].argsort(stable=True)]
            of_pass += group.split(args.batch_size)
        batches += [of_pass[i].tolist() for i in shuffled(len(of_pass), args.seed, 2 * number + 1)]
    return batches, len(of_pass)


def micro_batches(rows, args):
    """This process's share of the rows, micro_batch_size at a time, each with a mask (b,). Processes have equally many,
    so the last one may repeat some of the first rows: there the mask is false."""
    n = len(rows)
    numbers = torch.arange(n + -n % WORLD_SIZE)  # n or more: repeated
    parts = numbers.tensor_split(WORLD_SIZE)[RANK].split(args.micro_batch_size)
    return [([rows[i] for i in part % n], (part < n).to(args.device)) for part in parts]


def choose_sizes(args, model, pairs, rate, num_tokens):
    """Returns the settings with learning rate and batch sizes filled in, and prints them. A pass on a GPU has at most
    num_tokens tokens."""
    if args.lora_r:
        rate *= 10
    rate = args.learning_rate or float(f"{rate:.2g}")
    num_pairs = args.num_train_epochs * len(pairs)
    batch_size = args.batch_size or next((size for size in (64, 32, 16, 8) if num_pairs / size >= 100), 4)
    longest = 2 * max(map(len, pairs))  # tokens of a pair
    b = args.micro_batch_size or (16 if args.device == "cpu" else max(1, num_tokens // longest))
    print(f"model: {args.model}, {model.num_parameters() / 1e6:.2f}M parameters on {args.device}, learning rate {rate}")
    print(f"each step: {batch_size} of {len(pairs)} pairs, {b} at a time")
    return replace(args, learning_rate=rate, batch_size=batch_size, micro_batch_size=b)


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


def check_completion(prompt, completion, column):
    """Refuses what is no text, or begins with its prompt (of two words or more), which would then be read twice."""
    check_text(completion, column)
    start, text = prompt.strip(), completion.strip()
    edge = text[len(start) - 1 : len(start) + 1]  # the last letter of the prompt, and the next one
    repeats = len(start.split()) > 1 and text.startswith(start) and not re.fullmatch(r"\w\w", edge)
    require(not repeats, f"{column!r} begins with the prompt: {completion!r:.60}")


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
