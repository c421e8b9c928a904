"""sft.py: which tokens have a loss, dropout, evaluation. Its whole loop is compared in test_lecture.py."""

import json
import math

import pytest
import torch
from families import make_tokenizer
from runs import run, watch, write_rows
from sources import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

import sft

TOKENIZER = AutoTokenizer.from_pretrained(ROOT / "toy/sft")


def test_dropout_is_drawn_anew_in_each_step_and_process(tmp_path, tiny, monkeypatch):
    seeds = []
    watch(monkeypatch, sft, "update", lambda *_: seeds.append(torch.initial_seed()))
    for rank in (0, 1):
        monkeypatch.setattr(sft, "RANK", rank)
        sft.train(sft.Args(**tiny["sft"], device="cpu", output_dir=f"{tmp_path}/{rank}"))
    assert len(set(seeds)) == len(seeds) == 8


def read(tmp_path, rows, tokenizer=TOKENIZER, **settings):
    """The texts that are trained on, as (text without a loss, text with a loss)."""
    args = sft.Args(dataset=write_rows(tmp_path / "rows.jsonl", rows), device="cpu", **settings)
    texts = sft.load_texts(args, tokenizer, "train")
    return [(tokenizer.decode(ids[~is_label]), tokenizer.decode(ids[is_label])) for ids, is_label in texts]


def test_only_the_completion_and_its_end_have_a_loss(tmp_path):
    row = {"prompt": "The film", "completion": " is a gem."}
    assert read(tmp_path, [row]) == [("The film", f" is a gem.{TOKENIZER.eos_token}")]
    text = "", f"The film is a gem.{TOKENIZER.eos_token}"
    assert read(tmp_path, [{"text": "The film is a gem."}] * 1001) == [text] * 1001


def test_a_template_that_changes_the_prompt_is_refused(tmp_path):
    """It opens <think> where the assistant is to answer, and does not write it before an answer."""
    tokenizer = make_tokenizer("qwen 2.5")
    tokenizer.chat_template += "{% if add_generation_prompt %}<think>{% endif %}"
    messages = [{"role": "user", "content": "The film?"}, {"role": "assistant", "content": "It is good."}]
    with pytest.raises(SystemExit, match="^error: row 1 of .*<think>"):
        read(tmp_path, [{"messages": messages}], tokenizer=tokenizer)


def test_evaluation_by_hand(tmp_path, tiny):
    """Of all labels of the test split, one text at a time, without padding."""
    settings = tiny["sft"] | dict(model="toy/sft", micro_batch_size=5, num_train_epochs=2)
    line = run(sft, tmp_path / "run", **settings)[-1]
    assert line["epoch"] == 2
    policy = AutoModelForCausalLM.from_pretrained(tmp_path / "run").eval()
    losses, hits, ends = [], [], []
    for row in map(json.loads, open(f"{tiny['sft']['dataset']}/validation.jsonl")):
        start = len(TOKENIZER(row["prompt"])["input_ids"])
        ids = torch.tensor(TOKENIZER(row["prompt"] + row["completion"])["input_ids"] + [TOKENIZER.eos_token_id])
        with torch.no_grad():
            logprobs = policy(ids[None]).logits[0, start - 1 : -1].log_softmax(-1)  # (T, V)
        losses.extend(-logprobs[range(len(logprobs)), ids[start:]])
        hits.extend(logprobs.argmax(-1) == ids[start:])
        ends.append(losses[-1])
    loss, accuracy, eos_loss = (torch.stack(x).float().mean().item() for x in (losses, hits, ends))
    expected = {"loss": loss, "perplexity": math.exp(loss), "mean_token_accuracy": accuracy, "eos_loss": eos_loss}
    assert {f"eval/{name}": pytest.approx(x, rel=1e-4) for name, x in expected.items()}.items() <= line.items()
