# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "transformers==5.23.0", "datasets==5.2.0", "tyro==1.0.17", "wandb==0.31.0",
#     "pydantic==2.14.3", "tqdm==4.70.1"]
# ///
"""Supervised fine-tuning: texts -> policy.

For each batch of texts x_1..x_n:
  1. encode     prompt tokens, completion tokens, EOS (end of sequence)
  2. loss       -mean_t log pi(x_t | x_1..x_{t-1}), over the labels: the tokens of completions, and EOS
  3. update     one AdamW step; the learning rate is warmed up, then annealed

Shapes: B texts in a batch (b in a micro-batch), S tokens of a text, V vocabulary. Below, prompts of 3 and 2 tokens with
completions of 2 and 1.

  input_ids     p1  p2  p3  y1  y2  EOS      texts (B, S), right-padded
                p1  p2  y1  EOS PAD PAD
  is_label       0   0   0   1   1   1       true on the tokens that have a loss; each is predicted by the logits one
                 0   0   1   1   0   0       position to its left, and nothing predicts the first token

Prompts have no loss: the policy should answer them, not invent them. EOS has one: a policy that never sees where texts
end never ends one. In conversations, the token that ends a turn takes its place, and each answer is a text of its own,
after all that comes before it. So the policy reads what it reads in a rollout.

Papers: InstructGPT 2203.02155 (sec. 3.5); the N+ implementation details 2403.17031. In short: lecture/sft.py

  python sft.py                                           # the toy world, from random weights: a minute on a CPU
  python sft.py --model gpt2 --bf16 --dataset MINE.jsonl  # fine-tunes GPT-2 on a GPU (on a CPU, without --bf16)
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
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pyarrow.parquet
import pydantic
import torch
import torch.distributed as dist
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
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
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
    # --- Supervised fine-tuning ---
    max_length: Annotated[PositiveInt, alias("--max-seq-length")] = 512  # longer texts lose their end
    # --- Optimisation ---
    # its maximum; by default 2e-5 (TRL), with LoRA 2e-4, from scratch 3e-3
    learning_rate: Annotated[PositiveFloat | None, alias("--lr")] = None
    # schedule of the learning rate (N+ details: cosine)
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup", "polynomial"] = "cosine"
    warmup_ratio: Share = 0.03  # share of the run in which the learning rate warms up from 0
    weight_decay: NonNegativeFloat = 0.0  # weight decay of AdamW
    max_grad_norm: PositiveFloat = 1.0  # the gradient is clipped to this norm
    # --- Batch sizes ---
    batch_size: PositiveInt | None = None  # texts per step, on all GPUs; by default 64, or less to have a hundred steps
    micro_batch_size: PositiveInt | None = None  # texts per pass; by default 16 on a CPU, 8192 tokens on a GPU
    # --- Model: a folder, or a name on the hub ---
    model: Annotated[str | None, alias("--model-name-or-path")] = None  # to fine-tune; by default, random weights
    from_scratch: str = f"{TOY}/base"  # without --model: the config and the tokenizer are those of this model
    lora_r: NonNegativeInt = 0  # rank of LoRA adapters (peft), 0 for none
    bf16: bool = False  # models run in bfloat16 (autocast), trained weights stay in float32. Slow on most CPUs
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: far less memory, a third slower
    zero_stage: Literal[2, 3] = 2  # processes divide gradients and moments among them; 3: weights, too
    # --- Data. A row has `text`; or `prompt` and `completion`, both texts or both messages; or `messages` ---
    dataset: Annotated[str, alias("--dataset-name")] = f"{TOY}/data/sft"  # folder of SPLIT.jsonl, or hub name
    dataset_config: Annotated[str | None, alias("--dataset-config-name")] = None  # which configuration of a hub dataset
    dataset_train_split: str = "train"  # split to train on
    dataset_test_split: str | None = "validation"  # split to evaluate on, if there is one
    # --- Run ---
    seed: NonNegativeInt = 1  # seed of the order of texts, of dropout, of random weights, and of adapters
    num_train_epochs: PositiveFloat = 1.0  # passes over the texts (N+ details: 1)
    output_dir: str | None = None  # folder for all output; by default a new folder runs/SCRIPT__SEED__TIME
    resume: Annotated[str | None, alias("--resume-from-checkpoint")] = None  # folder of a run to continue
    device: str = "cuda" if torch.cuda.is_available() else "cpu"  # cpu, cuda, mps; by default cuda if there is one
    save_steps: PositiveInt = 100  # steps between checkpoints, which hold the full state of the run
    save_total_limit: PositiveInt = 1  # checkpoints to keep
    eval_steps: PositiveInt = 100  # steps between evaluations; the last step is always followed by one
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works without an account)


# --- The loop, with the steps of the docstring ------------------------------------------------------------------------
def train(args):
    """Trains the policy. Saves it in the run's folder, with its metrics."""
    args = start(args)
    require(args.model or not args.lora_r, "--lora-r trains adapters of a pretrained model: set --model")
    name = args.model or args.from_scratch
    tokenizer = load_tokenizer(name)
    config = AutoConfig.from_pretrained(name).get_text_config()
    context = getattr(config, "max_position_embeddings", args.max_length)
    args = replace(args, max_length=min(args.max_length, context))
    texts = load_texts(args, tokenizer, args.dataset_train_split)
    require(texts, f"no text has a label within {args.max_length} tokens: see --max-length")
    eval_texts = load_texts(args, tokenizer, args.dataset_test_split)
    policy = load_policy(args)
    place(policy, args)
    args = choose_sizes(args, policy, texts)  # from here on, all sizes are set
    B = args.batch_size
    orders = [shuffled(len(texts), args.seed, number) for number in range(math.ceil(args.num_train_epochs))]
    batches = [order[i : i + B] for order in orders for i in range(0, len(texts), B)]  # numbers of texts
    steps_per_pass = len(batches) // len(orders)
    num_steps = math.ceil(args.num_train_epochs * steps_per_pass)

    weights = [p for p in policy.parameters() if p.requires_grad]
    # fused: ten times as fast on a CPU
    optimizer = torch.optim.AdamW(weights, lr=args.learning_rate, weight_decay=args.weight_decay, fused=True)
    schedule = get_scheduler(args.lr_scheduler_type, optimizer, int(args.warmup_ratio * num_steps), num_steps)
    state = {"num_tokens": 0}
    run = Run(args, num_steps, optimizer, schedule, state, model=policy)
    for step in run.steps():
        set_seed(make_seed(args.seed, step, RANK))  # of dropout

        # 1. Encode: load_texts did. Sorted by length, the micro-batches of a batch need little padding. Were batches
        # of similar length, each step would have one kind of text, and a policy from scratch would learn less
        batch = [texts[i] for i in batches[step - 1]]
        batch.sort(key=lambda text: len(text[0]))

        # 2. Loss, and 3. update
        stats, num_labels = update(policy, optimizer, batch, args)

        state["num_tokens"] += num_labels
        stats |= {"step": step, "epoch": step / steps_per_pass, "num_tokens": state["num_tokens"]}
        stats["lr"] = optimizer.param_groups[0]["lr"]
        stats["perf/tokens_per_second"] = num_labels / (time.perf_counter() - run.step_started)
        if eval_texts and (step % args.eval_steps == 0 or step == num_steps):
            stats |= evaluate(policy, eval_texts, args)
        run.log(stats, "loss", "mean_token_accuracy")
        schedule.step()
    run.finish()


# --- 1. Encode --------------------------------------------------------------------------------------------------------
def load_texts(args, tokenizer, split):
    """The texts of a split: pairs of token ids (S,) and a mask of labels (S,), cut to max_length tokens.

    A text is encoded as a whole: the completion alone could have other tokens, since SentencePiece puts a space before
    every text. Its first tokens have to be those of the prompt alone, because these are what a rollout reads."""
    rows = read_rows(args, split)
    if not rows:
        return []
    where = f"{args.dataset}, {split}"
    is_chat = isinstance(rows[0].get("messages") or rows[0].get("prompt"), list)
    of_rows = parse(rows, partial(read_texts, is_chat=is_chat, tokenizer=tokenizer), where)
    pairs = [(number, *pair) for number, of_row in enumerate(of_rows, 1) for pair in of_row]
    numbers, prompts, wholes = map(list, zip(*pairs))
    texts = []
    num_cut = 0
    encoded = encode(prompts, tokenizer, is_chat), encode(wholes, tokenizer, is_chat)
    for number, prompt_ids, ids in zip(numbers, *encoded):
        has_prompt = np.array_equal(ids[: len(prompt_ids)], prompt_ids)
        message = "a token of the text holds the end of its prompt: does the prompt end with a space?"
        require(has_prompt, f"row {number} of {where}: {message} (recipes/data.py converts other forms)")
        if not is_chat and ids[-1] != tokenizer.eos_token_id:
            ids = np.append(ids, np.int32(tokenizer.eos_token_id))
        is_label = np.arange(len(ids)) >= len(prompt_ids)
        texts.append((ids[: args.max_length], is_label[: args.max_length]))
        num_cut += len(ids) > args.max_length
    kept = [(ids, is_label) for ids, is_label in texts if is_label[1:].any()]  # nothing predicts the first token
    print(f"{split}: {len(kept)} of {len(texts)} texts have labels within {args.max_length} tokens; {num_cut} were cut")
    for ids, is_label in kept[:1]:
        print(f"the first one, as the policy reads it: {tokenizer.decode(ids[~is_label])!r}")
        print(f"its labels: {tokenizer.decode(ids[is_label])!r}")
    return kept


def read_texts(row, is_chat, tokenizer):
    """The texts of a row, each as its prompt and the whole: one, or one for each answer of the assistant."""
    require(row.get("label") is not False, "its `label` is false: a bad completion is not to be learned")
    match row:
        case {"messages": list(messages)} if is_chat:
            answers = [i for i, x in enumerate(messages) if isinstance(x, dict) and x.get("role") == "assistant"]
            messages = messages[: 1 + max(answers, default=len(messages))]
        case {"prompt": list(prompt), "completion": [message]} if is_chat:
            messages = [*prompt, message]
            answers = [len(prompt)]
        case {"prompt": str(prompt), "completion": completion} if not is_chat:
            if prompt:
                check_text(prompt, "prompt")
            check_completion(prompt, completion, "completion")
            return [(prompt, prompt + completion)]
        case {"text": text} if not is_chat:
            check_text(text, "text")
            return [("", text)]
        case _:
            sys.exit("there is no `text`, or `prompt` and `completion`, or `messages`, of the same type in all rows")
    check_messages(messages, last="assistant")
    texts = []
    for i in answers:
        require(i and messages[i - 1]["role"] == "user", "an answer does not follow a message of the user")
        prompt = render(messages[:i], row, tokenizer, add_generation_prompt=True)
        whole = render_answer(messages[: i + 1], row, tokenizer)
        require(whole.startswith(prompt), f"the chat template does not write {prompt[-30:]!r} before an answer")
        texts.append((prompt, whole))
    return texts


# --- 2. Loss ----------------------------------------------------------------------------------------------------------
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


def read_labels(policy, texts, args):
    """For the n labels of some texts: their losses -log pi (n,), their tokens (n,), and whether each was the likeliest.

    L counts the positions where at least one text has a label: logits, the largest tensor, are computed only there."""
    ids, mask = pad([ids for ids, _ in texts], policy.tokenizer, args)  # (b, S) each
    labels = [torch.from_numpy(is_label) for _, is_label in texts]
    is_label = nn.utils.rnn.pad_sequence(labels, batch_first=True).to(args.device)
    positions = is_label[:, 1:].any(0).nonzero().squeeze(1)  # (L,)
    with autocast(args):
        output = policy(input_ids=ids, attention_mask=mask.long(), use_cache=False, logits_to_keep=positions)
    is_label = is_label[:, positions + 1]  # (b, L), like the next one; each logit predicts the next token
    targets = ids[:, positions + 1]
    is_hit = output.logits.argmax(-1) == targets  # (b, L)
    logprobs, _ = SlicedLogprobs.apply(output.logits, targets, 1.0, False)  # (b, L)
    return -logprobs[is_label], targets[is_label], is_hit[is_label]


# --- 3. Update --------------------------------------------------------------------------------------------------------
def update(policy, optimizer, batch, args):
    """Steps 2 and 3: one optimiser step on a batch of texts. Returns its metrics and the number of its labels.

    The loss is the mean over all labels of the batch, however it is split into micro-batches and among processes. In a
    mean of micro-batches' means, labels in a micro-batch with few would weigh more."""
    num_labels = int(sum(is_label[1:].sum() for _, is_label in batch))
    sums = torch.zeros(2, device=args.device)  # of losses, and of likeliest tokens that were right
    policy.train()  # with dropout, if the model's config has any
    optimizer.zero_grad()
    for texts in micro_batches(batch, args):
        losses, _, is_hit = read_labels(policy, texts, args)  # (n,) each
        loss = losses.sum() / num_labels
        (WORLD_SIZE * loss).backward()  # gradients are averaged over processes
        sums += torch.stack([loss.detach(), is_hit.sum() / num_labels])
    policy.eval()
    grad_norm = nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], args.max_grad_norm).item()
    if math.isfinite(grad_norm):  # otherwise the step would turn the weights into NaN
        optimizer.step()
    loss, accuracy = all_reduce(sums).tolist()
    return {"loss": loss, "mean_token_accuracy": accuracy, "grad_norm": grad_norm}, num_labels


def micro_batches(texts, args):
    """Splits texts into this process's micro-batches. Copies of the first text, without labels, fill up the last ones:
    every process has equally many."""
    ids, is_label = texts[0]
    copies = [(ids, np.zeros_like(is_label))] * (-len(texts) % WORLD_SIZE)
    share = (texts + copies)[RANK::WORLD_SIZE]
    return [share[i : i + args.micro_batch_size] for i in range(0, len(share), args.micro_batch_size)]


# === End of the algorithm. Next: its metrics, then what every program of this kind needs ==============================
@torch.no_grad()
def evaluate(policy, texts, args):
    """Loss, perplexity, accuracy, and the loss on EOS, over all labels of the test split."""
    texts = sorted(texts, key=lambda text: len(text[0]))
    parts = [read_labels(policy, part, args) for part in micro_batches(texts, args)]
    losses, tokens, is_hit = (torch.cat(x) for x in zip(*parts))  # (N,) each
    is_eos = torch.isin(tokens, tokens.new_tensor(policy.stop_token_ids))
    columns = torch.ones_like(losses), losses, is_hit, is_eos, losses * is_eos
    sums = all_reduce(torch.stack([x.sum() for x in columns]))
    num_labels, total, num_hits, num_eos, eos_total = sums.tolist()
    return {
        "eval/loss": total / num_labels,
        "eval/perplexity": math.exp(min(total / num_labels, 700.0)),  # exp of more overflows
        "eval/mean_token_accuracy": num_hits / num_labels,
        "eval/eos_loss": eos_total / max(1.0, num_eos),
    }


# --- Models and data --------------------------------------------------------------------------------------------------
def load_policy(args):
    """Loads the model to train, or draws its weights at random; with the dropout of its config."""
    if args.model:
        policy = load_model(AutoModelForCausalLM, args.model)
    else:
        config = AutoConfig.from_pretrained(args.from_scratch)
        vars(config).pop("quantization_config", None)  # new weights are float32
        policy = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        policy.tokenizer = load_tokenizer(args.from_scratch)
        policy.tokenizer.pad_token = policy.tokenizer.pad_token or policy.tokenizer.eos_token
    set_stop_tokens(policy, bool(policy.tokenizer.chat_template), 1.0)
    if args.lora_r:
        add_adapters(policy, args.lora_r)
    return policy


def choose_sizes(args, policy, texts):
    """Returns the settings with learning rate and batch sizes filled in, and prints them."""
    rate = 2e-4 if args.lora_r else 2e-5
    if not args.model:
        rate = 3e-3
    rate = args.learning_rate or rate
    num_texts = args.num_train_epochs * len(texts)
    batch_size = args.batch_size or next((size for size in (64, 32, 16, 8) if num_texts / size >= 100), 4)
    longest = max(len(ids) for ids, _ in texts)
    tokens = min(8192, 2**29 // policy.config.get_text_config().vocab_size)  # of a pass on a GPU: at most 2**29 logits
    b = args.micro_batch_size or (16 if args.device == "cpu" else max(1, tokens // longest))
    name = args.model or args.from_scratch
    size = policy.num_parameters() / 1e6
    print(f"policy: {name}, {size:.2f}M parameters on {args.device}, learning rate {rate:.2g}")
    print(f"each step: {batch_size} of {len(texts)} texts, {b} at a time")
    return replace(args, learning_rate=rate, batch_size=batch_size, micro_batch_size=b)


# === From here on, a function has the same text in all scripts that have it ==========================================
# --- Rows -------------------------------------------------------------------------------------------------------------
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
