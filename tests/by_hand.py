"""Tiny models and rows for sft.py, reward_model.py and dpo.py; texts are read one at a time, without padding."""

import json
from pathlib import Path

import pytest
import torch
from sources import ROOT, lines_of
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig
from transformers import LlamaForCausalLM

SETTINGS = dict(batch_size=6, micro_batch_size=3, learning_rate=1e-2, eval_steps=4)
SETTINGS |= dict(weight_decay=0.3, num_train_epochs=1.75, warmup_ratio=0.3, max_length=36)
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


def agree(line: dict, stats: dict) -> None:
    """A line of metrics.jsonl has these numbers, and no others but those of the clock."""
    line = {name: x for name, x in line.items() if not name.startswith(("time/", "perf/"))}
    assert line == pytest.approx(stats, rel=2e-3, abs=5e-4)


def evaluated(line: dict) -> dict:
    return {name: x for name, x in line.items() if name.startswith("eval/")}
