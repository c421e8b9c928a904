"""The loops of sft.py and reward_model.py, done once more by hand.

`replay` trains a copy of the model in the plainest way there is: one text at a time, without padding, formulas from the
papers, torch's own AdamW. Every line of metrics.jsonl must agree with it.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from runs import watch
from sources import ROOT, lines_of
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, GPT2Model, LlamaConfig
from transformers import LlamaForCausalLM

SETTINGS = dict(
    per_device_train_batch_size=3,
    gradient_accumulation_steps=2,
    learning_rate=1e-2,
    weight_decay=0.3,
    num_train_epochs=1.75,
    warmup_ratio=0.3,
    eval_steps=4,
    max_length=36,
)
TOKENIZER = AutoTokenizer.from_pretrained(ROOT / "toy/sft")
EOS = TOKENIZER.eos_token_id


def write_model(folder: Path, kind: str) -> str:
    """A tiny model with random weights: gpt2, gpt2 with much dropout, or llama, which has as much."""
    torch.manual_seed(7)
    tokens = dict(vocab_size=len(TOKENIZER), bos_token_id=0, eos_token_id=0, initializer_range=0.2)
    if kind == "llama":
        sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
        model = LlamaForCausalLM(LlamaConfig(**tokens, **sizes, max_position_embeddings=64, attention_dropout=0.5))
    else:
        p = 0.3 if kind == "dropout" else 0.0
        drops = dict(resid_pdrop=p, embd_pdrop=p, attn_pdrop=p)
        model = GPT2LMHeadModel(GPT2Config(**tokens, **drops, n_embd=16, n_layer=2, n_head=2, n_positions=64))
    model.config.initializer_range = 0.02  # as usual, of what is added to it later
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return str(folder)


def saved(folder: Path | str) -> nn.Module:
    """The model that a run has left, or begun with, dropout off."""
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def toy_rows(name: str, split: str, n: int) -> list[dict]:
    """The first n rows of a part of the toy data."""
    return [json.loads(line) for line in lines_of(f"toy/data/{name}/{split}.jsonl")[:n]]


def write_data(folder: Path, **splits: list[dict]) -> str:
    folder.mkdir()
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(folder)


def ids_of(prompt: str, text: str) -> tuple[list[int], list[int]]:
    """Prompt and text, encoded apart, and EOS."""
    start = TOKENIZER(prompt)["input_ids"] if prompt else []
    return start, TOKENIZER(text, add_special_tokens=False)["input_ids"] + [EOS]


def read_text(model: nn.Module, ids: list[int], start: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities of a text's tokens from `start` on, and which were likeliest. Nothing predicts the first."""
    start = max(start, 1)
    logits = model(torch.tensor([ids])).logits[0, start - 1 : -1]
    tokens = torch.tensor(ids[start:])
    return logits.log_softmax(-1)[range(len(tokens)), tokens], logits.argmax(-1) == tokens


def note_sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From here on: how many texts each forward pass with a gradient reads."""
    sizes = []

    def note(output, model, input_ids=None, **_):
        if torch.is_grad_enabled():
            sizes.append(len(input_ids))

    watch(monkeypatch, GPT2Model, "forward", note)
    return sizes


def share_of_rate(kind: str, done: int, n: int, warmup: int) -> float:
    """Of the learning rate, after so many of n steps: a line up to 1, then down, straight or along a cosine."""
    if done < warmup:
        return done / warmup
    part = (done - warmup) / (n - warmup)
    return {"linear": 1 - part, "cosine": (1 + math.cos(math.pi * part)) / 2}[kind]


def replay(args, lines, model, batch, read_step, evaluate) -> None:
    """Makes the steps of a run by hand; each line must say what they say.

    batch(number) gives what a step is about, read_step(model, batch) its loss and the stats of its line,
    evaluate(model, is_last) those of the test split. `args` has per_pass, the number of steps in a pass.
    """
    n = math.ceil(args.num_train_epochs * args.per_pass)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=args.weight_decay)
    norms = []
    assert len(lines) == n
    for number, line in enumerate(lines):
        loss, stats = read_step(model, batch(number))
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item())
        for p in model.parameters():
            p.grad *= min(1.0, args.max_grad_norm / norms[-1])
        share = share_of_rate(args.lr_scheduler_type, number, n, int(args.warmup_ratio * n))
        lr = args.learning_rate * share
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        stats |= {"step": number + 1, "epoch": (number + 1) / args.per_pass, "lr": lr}
        stats |= {"loss": loss.item(), "grad_norm": norms[-1]}
        is_last = number + 1 == n
        if is_last or (number + 1) % args.eval_steps == 0:
            stats |= evaluate(model, is_last)
        agree(line, stats)
    is_clipped = [norm > args.max_grad_norm for norm in norms]
    assert any(is_clipped) and not all(is_clipped)  # or it would not be seen whether the gradient is clipped


def agree(line: dict, stats: dict) -> None:
    """A line of metrics.jsonl has these numbers, and no others but those of the clock."""
    line = {name: x for name, x in line.items() if not name.startswith(("time/", "perf/"))}
    assert line == pytest.approx(stats, rel=2e-3, abs=5e-4)


def evaluated(line: dict) -> dict:
    return {name: x for name, x in line.items() if name.startswith("eval/")}
