# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch==2.13.0", "transformers==5.23.0", "datasets==5.2.0", "tyro==1.0.17", "wandb==0.31.0",
#     "matplotlib==3.11.2", "pydantic==2.14.3", "tqdm==4.70.1",
# ]
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
import shutil
import signal
import sys
import time
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pydantic
import torch
import torch.distributed as dist
import tyro
from jinja2 import TemplateError
from pydantic import Field
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as recompute_activations
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, get_scheduler, logging, set_seed
from transformers.activations import ACT2FN, GELUTanh
from transformers.modeling_layers import GradientCheckpointingLayer

VERSION = "2026.11"  # as in CITATION.cff
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
    # --- Supervised fine-tuning ---
    completion_only_loss: bool = True  # only completions are labels (TRL); otherwise prompts are labels, too
    max_length: Annotated[Count, alias("--max-seq-length")] = 512  # longer texts lose their end; length of a block
    packing: bool = False  # join all texts, and cut them into blocks of max_length: no padding (TRL 0.7)
    # --- Optimisation ---
    learning_rate: Positive | None = None  # its maximum; by default 2e-5 (TRL), with LoRA 2e-4, from scratch 3e-3
    # schedule of the learning rate (N+ details: cosine)
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup", "polynomial"] = "cosine"
    warmup_ratio: Share = 0.03  # share of the run in which the learning rate warms up from 0
    weight_decay: NonNegative = 0.0  # weight decay of AdamW
    max_grad_norm: Positive = 1.0  # the gradient is clipped to this norm
    # --- Batch sizes ---
    batch_size: Count | None = None  # texts per step, on all GPUs; by default 64, or less to have a hundred steps
    micro_batch_size: Count | None = None  # texts per pass; by default 16 on a CPU, 8192 tokens on a GPU
    # TRL's way to set both: micro_batch_size is this; batch_size, this x accumulation x GPUs
    per_device_train_batch_size: Count | None = None
    gradient_accumulation_steps: Count = 1  # with per_device_train_batch_size: passes per optimiser step (TRL)
    # --- Model: a folder, or a name on the hub ---
    model: Annotated[str | None, alias("--model-name-or-path")] = None  # to fine-tune; by default, random weights
    from_scratch: str = f"{TOY}/base"  # without --model: the config and the tokenizer are those of this model
    lora_r: Natural = 0  # rank of LoRA adapters (peft), 0 for none
    bf16: bool = False  # run the model in bfloat16 (autocast); trained weights and optimiser state stay in float32
    gradient_checkpointing: bool = False  # recompute activations in the backward pass: far less memory, a third slower
    # --- Data. A row has `text`; or `prompt` and `completion`, both texts or both messages; or `messages` ---

    # folder of SPLIT.jsonl or SPLIT.parquet, one such file, or a name on the hub
    dataset: Annotated[str, alias("--dataset-name")] = f"{TOY}/data/sft"
    dataset_config: Annotated[str | None, alias("--dataset-config-name")] = None  # of a hub dataset that has several
    dataset_train_split: str = "train"  # split to train on
    dataset_test_split: str | None = "validation"  # split to evaluate on, if there is one
    # --- Run ---
    seed: Natural = 1  # seed of the order of texts, of dropout, of random weights, and of adapters
    num_train_epochs: Positive = 1.0  # passes over the texts (N+ details: 1)
    output_dir: str | None = None  # folder for all output; by default a new folder runs/SCRIPT__SEED__TIME
    resume: Annotated[str | None, alias("--resume-from-checkpoint")] = None  # folder of a run to continue
    device: str = "cuda" if torch.cuda.is_available() else "cpu"  # cpu, cuda, mps; by default cuda if there is one
    save_steps: Count = 100  # steps between checkpoints, which hold the full state of the run
    save_total_limit: Count | None = None  # checkpoints to keep, also after the run; by default one, and none after it
    eval_steps: Count = 100  # steps between evaluations; the last step is always followed by one
    num_sample_generations: Natural = 3  # how often to print sampled completions (TRL)
    track: bool = False  # also log to Weights & Biases (WANDB_MODE=offline works without an account)


# --- The loop, with the steps of the docstring ------------------------------------------------------------------------
def train(args):
    """Trains the policy. Saves it in the run's folder, with metrics, curves and a model card."""
    start(args)
    policy = load_policy(args)
    if args.lora_r:  # trains adapters of all linear layers, and nothing else (Hu et al. 2021)
        from peft import LoraConfig

        config = LoraConfig(r=args.lora_r, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        policy.add_adapter(config)
    place(policy, args)

    context = getattr(policy.config.get_text_config(), "max_position_embeddings", args.max_length)
    limit = min(args.max_length, context)
    uncut = math.inf if args.packing else limit
    texts = load_texts(args, args.dataset_train_split, policy.tokenizer, uncut)
    if args.packing and texts:
        texts = pack(texts, limit)
    require(texts, f"--dataset {args.dataset} has nothing to train on (recipes/data.py converts csv and others)")
    eval_texts = load_texts(args, args.dataset_test_split, policy.tokenizer, limit)
    args = choose_sizes(args, policy, texts)  # from here on, all sizes are set
    B = args.batch_size
    passes = range(math.ceil(args.num_train_epochs))
    batches = []  # of numbers of texts
    for number in passes:
        order = shuffled(len(texts), args.seed, number)
        batches += [order[i : i + B] for i in range(0, len(texts), B)]
    num_steps = math.ceil(args.num_train_epochs * len(batches) / len(passes))

    # fused: ten times as fast on a CPU
    options = {"lr": args.learning_rate, "weight_decay": args.weight_decay, "fused": True}
    optimizer = torch.optim.AdamW(policy.parameters(), **options)
    schedule = get_scheduler(args.lr_scheduler_type, optimizer, int(args.warmup_ratio * num_steps), num_steps)
    carry = {"num_tokens": 0}  # what a step hands to the next; in checkpoints
    run = Run(args, num_steps, optimizer, schedule, carry, model=policy)
    for step in run.steps():
        set_seed(make_seed(args.seed, step, RANK))  # of dropout

        # 1. Encode: load_texts did. Sorted by length, the micro-batches of a batch need little padding. Were batches
        # of similar length, each step would have one kind of text, and a policy from scratch would learn less
        batch = [texts[i] for i in batches[step - 1]]
        batch.sort(key=lambda text: len(text[0]))

        # 2. Loss, and 3. update
        stats, num_labels = update(policy, optimizer, batch, args)

        carry["num_tokens"] += num_labels
        stats["step"] = step
        stats["epoch"] = step * len(passes) / len(batches)
        stats["num_tokens"] = carry["num_tokens"]
        stats["lr"] = optimizer.param_groups[0]["lr"]
        stats["perf/tokens_per_second"] = num_labels / (time.perf_counter() - run.step_started)
        if eval_texts and run.is_due(args.eval_steps):
            stats |= evaluate(policy, eval_texts, args)
        run.log(stats, "loss", "mean_token_accuracy")
        if args.num_sample_generations and run.is_due(num_steps // args.num_sample_generations):
            show_samples(run, policy, (eval_texts or texts)[:3], limit, args)
        schedule.step()
    run.finish()


# --- 1. Encode --------------------------------------------------------------------------------------------------------
# The forms of a row: the type of its values, and their columns. If several fit, the first one is read
FORMS = ((list, "messages"), (list, "prompt", "completion"), (str, "prompt", "completion"), (str, "text"))


def load_texts(args, split, tokenizer, limit):
    """The texts of a split: pairs of token ids (S,) and a mask of labels (S,), cut to `limit` tokens.

    A text is encoded as a whole: the completion alone could have other tokens, since SentencePiece puts a space before
    every text. Its first tokens have to be those of the prompt alone, because these are what a rollout reads.
    """
    rows = read_rows(args.dataset, args.dataset_config, split)
    if not rows:
        return []
    where = f"{args.dataset}, {split}"
    fitting = (form for form in FORMS if has_form(rows[0], *form))
    kind, *columns = next(fitting, FORMS[-1])
    read = partial(read_texts, kind=kind, columns=columns, tokenizer=tokenizer, args=args)
    texts = []
    for number, pairs in enumerate(parse(rows, read, where), 1):
        texts += [(number, prompt, answer) for prompt, answer in pairs]
    unread = rows[0].keys() - {*columns, "tools", "chat_template_kwargs"}
    del rows  # below, each text gives way to its tokens, which take less memory
    num_cut = 0
    starts = range(0, len(texts), 1000)
    for first in tqdm(starts, desc="encoding", disable=len(texts) < 20_000):
        part = texts[first : first + 1000]
        heads = encode([prompt for _, prompt, _ in part], tokenizer, is_chat=kind is list)
        wholes = encode([prompt + answer for _, prompt, answer in part], tokenizer, is_chat=kind is list)
        for i, ((number, prompt, _), head, ids) in enumerate(zip(part, heads, wholes), first):
            has_prompt = np.array_equal(ids[: len(head)], head)
            message = "a token of the text holds the end of its prompt: does the prompt end with a space?"
            require(has_prompt, f"row {number} of {where}: {message} (recipes/data.py converts other forms)")
            if kind is str and ids[-1] != tokenizer.eos_token_id:
                ids = np.append(ids, np.int32(tokenizer.eos_token_id))
            start = len(head) if prompt and args.completion_only_loss else 0
            size = min(len(ids), limit)
            num_cut += size < len(ids)
            texts[i] = ids[:size].copy(), np.arange(size) >= start
    kept = [(ids, is_label) for ids, is_label in texts if is_label[1:].any()]  # nothing predicts the first token
    print(f"{split}: {len(kept)} of {len(texts)} texts have a label within {limit} tokens; {num_cut} were cut")
    if unread:
        print(f"{split}: columns that are not read: {', '.join(sorted(unread))}")
    for ids, is_label in kept[:1]:
        print(f"the first one, as the policy reads it: {tokenizer.decode(ids[~is_label])!r}")
        print(f"its labels: {tokenizer.decode(ids[is_label])!r}")
    return kept


def has_form(row, kind, *columns):
    """Whether a row has values of this type in these columns."""
    return isinstance(row, dict) and all(isinstance(row.get(name), kind) for name in columns)


def read_texts(row, kind, columns, tokenizer, args):
    """The texts of a row as pairs of prompt and answer: one, or one for each answer of the assistant in `messages`."""
    message = "there is no `text`, or `prompt` and `completion`, or `messages`, of the same type in all rows"
    require(has_form(row, kind, *columns), message)
    if kind is str:
        prompt = row["prompt"] if "prompt" in columns else ""
        answer = row[columns[-1]]
        require(answer.strip(), f"its {columns[-1]} is empty")
        return [(prompt, answer)]
    messages = [message for name in columns for message in row[name]]
    roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
    answers = [i for i, role in enumerate(roles) if role == "assistant"]
    if "completion" in columns:
        require(len(row["completion"]) == 1, "its completion is not one message")
        answers = [len(messages) - 1]
    end = 1 + max(answers, default=len(messages))
    check_messages(messages[:end], last="assistant")
    if not args.completion_only_loss:
        answers = answers[-1:]  # whose text has the tokens of all others
    texts = []
    for i in answers:
        require(i and roles[i - 1] == "user", "an answer does not follow a message of the user")
        prompt = render(messages[:i], row, tokenizer, add_generation_prompt=True)
        whole = render_answer(messages[: i + 1], row, tokenizer)
        require(whole.startswith(prompt), f"the chat template does not write {prompt[-30:]!r} before an answer")
        texts.append((prompt, whole.removeprefix(prompt)))
    return texts


def pack(texts, length):
    """Joins texts, each with its EOS, and cuts them into blocks of `length` tokens, without the remainder (TRL 0.7).
    Blocks without a label are dropped.

    [[a b EOS], [c d e EOS], [f EOS]] at length 4 -> [a b EOS c], [d e EOS f]
    """
    ids, is_label = (np.concatenate(parts) for parts in zip(*texts))
    end = len(ids) // length * length
    ids = ids[:end].reshape(-1, length)  # (number of blocks, length)
    is_label = is_label[:end].reshape(-1, length)
    return [block for block in zip(ids, is_label) if block[1][1:].any()]


# --- 2. Loss ----------------------------------------------------------------------------------------------------------
def read_labels(policy, texts, args):
    """For the n labels of some texts: their losses -log pi (n,), their tokens (n,), and whether each was the likeliest.

    L counts the positions where at least one text has a label: logits, the largest tensor, are computed only there.
    """
    ids, mask = pad([ids for ids, _ in texts], policy.tokenizer, args)  # (b, S) each
    labels = [torch.from_numpy(is_label) for _, is_label in texts]
    is_label = nn.utils.rnn.pad_sequence(labels, batch_first=True).to(args.device)
    positions = is_label[:, 1:].any(0).nonzero().squeeze(1)  # (L,)
    with autocast(args):
        output = policy(input_ids=ids, attention_mask=mask.long(), use_cache=False, logits_to_keep=positions)
    logits = output.logits.float()  # (b, L, V), each predicts the next token
    is_label = is_label[:, positions + 1]  # (b, L), like the next ones
    targets = ids[:, positions + 1]
    losses = -token_logprobs(logits, targets)
    is_hit = logits.argmax(-1) == targets
    return losses[is_label], targets[is_label], is_hit[is_label]


def token_logprobs(logits, tokens):
    """(B, T) log-probability of each token under logits (B, T, V)."""
    return logits.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)


# --- 3. Update --------------------------------------------------------------------------------------------------------
def update(policy, optimizer, batch, args):
    """Steps 2 and 3: one optimiser step on a batch of texts. Returns its metrics and the number of its labels.

    The loss is the mean over all labels of the batch, however it is split into micro-batches and among processes. In a
    mean of micro-batches' means, labels in a micro-batch with few would weigh more.
    """
    num_labels = int(sum(is_label[1:].sum() for _, is_label in batch))
    sums = torch.zeros(2, device=args.device)  # of losses, and of likeliest tokens that were right
    policy.train()  # with dropout, if the model's config has any
    optimizer.zero_grad()
    for texts in micro_batches(batch, args):
        losses, _, is_hit = read_labels(policy, texts, args)  # (n,) each
        loss = losses.sum() / num_labels
        (WORLD_SIZE * loss).backward()  # clip_gradient averages over processes
        sums += torch.stack([loss.detach(), is_hit.sum() / num_labels])
    policy.eval()
    grad_norm = clip_gradient(optimizer.param_groups[0]["params"], args.max_grad_norm).item()
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
    losses, tokens, is_hit = (torch.cat(x) for x in zip(*parts))
    is_eos = torch.isin(tokens, tokens.new_tensor(policy.generation_config.eos_token_id))
    ones = torch.ones_like(losses)
    sums = [losses.sum(), ones.sum(), is_hit.sum(), losses[is_eos].sum(), is_eos.sum()]
    sums = all_reduce(torch.stack(sums))
    total, num_labels, num_hits, eos_total, num_eos = sums.tolist()
    loss = total / num_labels
    return {
        "eval/loss": loss,
        "eval/perplexity": math.exp(min(loss, 700.0)),  # exp of more overflows
        "eval/mean_token_accuracy": num_hits / num_labels,
        "eval/eos_loss": eos_total / max(1.0, num_eos),
    }


def show_samples(run, policy, texts, limit, args):
    """Prints prompts, each with a completion sampled from the policy and the one in the dataset. The prompt
    of a text without one is its first eight tokens, or half of a short text."""
    tokenizer = policy.tokenizer
    columns = {"prompt": [], "sampled completion": [], "completion in the dataset": []}
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
    options |= {"eos_token_id": policy.generation_config.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    set_seed(args.seed)  # all processes draw the same completions
    for ids, is_label in texts:
        start = int(is_label.argmax()) or min(8, len(ids) // 2)
        options["max_new_tokens"] = min(53, limit - start)
        prompt = torch.tensor(ids[None, :start], device=args.device)  # (1, P)
        with autocast(args):
            text = policy.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0]
        parts = [ids[:start], text[start:], ids[start:]]
        for column, part in zip(columns.values(), parts):
            column.append(tokenizer.decode(part))
    run.show(columns, {})


# --- Models and data --------------------------------------------------------------------------------------------------
CURVES = "loss$|accuracy$|grad_norm$"  # metrics of curves.png


def load_policy(args):
    """Loads the model to train, or draws its weights at random; with the dropout of its config."""
    require(args.model or not args.lora_r, "--lora-r trains adapters of a pretrained model: set --model")
    if args.model:
        policy = load_model(AutoModelForCausalLM, args.model)
    else:
        config = AutoConfig.from_pretrained(args.from_scratch)
        policy = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        policy.tokenizer = AutoTokenizer.from_pretrained(args.from_scratch)
        policy.tokenizer.pad_token = policy.tokenizer.pad_token or policy.tokenizer.eos_token
    ends = {*eos_tokens(policy), end_of_turn(policy.tokenizer)}
    policy.generation_config.eos_token_id = sorted(ends)  # for programs that sample from it later
    policy.generation_config.do_sample = True  # the library refuses to save a temperature without it
    return policy


def choose_sizes(args, policy, texts):
    """Returns the settings with learning rate and batch sizes filled in, and prints them."""
    rate = 2e-4 if args.lora_r else 2e-5
    if not args.model:
        rate = 3e-3
    rate = args.learning_rate or rate
    batch_size = args.batch_size
    per_device = args.per_device_train_batch_size
    if per_device:
        batch_size = per_device * args.gradient_accumulation_steps * WORLD_SIZE
    num_texts = args.num_train_epochs * len(texts)
    batch_size = batch_size or next((size for size in (64, 32, 16, 8) if num_texts / size >= 100), 4)
    longest = max(len(ids) for ids, _ in texts)
    b = 16 if args.device == "cpu" else max(1, 8192 // longest)
    b = args.micro_batch_size or per_device or b
    name = args.model or args.from_scratch
    size = policy.num_parameters() / 1e6
    print(f"policy: {name}, {size:.2f}M parameters on {args.device}, learning rate {rate:.2g}")
    print(f"each step: {batch_size} of {len(texts)} texts, {b} at a time")
    sizes = {"learning_rate": rate, "batch_size": batch_size, "micro_batch_size": b}
    return replace(args, per_device_train_batch_size=None, **sizes)


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


def end_of_turn(tokenizer):
    """Id of the token that ends an answer: with a chat template that of its turns, such as <|im_end|>, else EOS."""
    if not tokenizer.chat_template:
        return tokenizer.eos_token_id
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    text = render_answer(turns, {}, tokenizer)
    return tokenizer.encode(text, add_special_tokens=False)[-1]


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
