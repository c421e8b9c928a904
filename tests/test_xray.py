"""tools/xray.py: whatever a model writes reaches the page as text, and the page loads nothing."""

import json
import re
import sys

import torch
from elements import Elements
from safetensors.torch import save_file
from sources import ROOT
from transformers import AutoTokenizer

sys.path.insert(0, str(ROOT / "tools"))
import xray  # noqa: E402

HOSTILE = ["</script>", "<script>document.title='broken'</script>", "<!--", "&lt;", "\n", "\x1b"]
tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/sft")
tokenizer.add_tokens(HOSTILE)  # each is one token


def write_samples(run, step, responses, **tensors):
    """A file of samples of a run: one prompt, and responses as lists of tokens."""
    ids = tokenizer.pad({"input_ids": responses}, padding_side="right", return_tensors="pt")
    prompts = torch.tensor([[0, *tokenizer("<img src=x>")["input_ids"]]] * len(responses))
    prompt_mask = torch.arange(prompts.shape[1]).expand_as(prompts) > 0
    tensors |= dict(prompts=prompts, prompt_mask=prompt_mask)
    tensors |= dict(responses=ids["input_ids"], mask=ids["attention_mask"].bool())
    (run / "samples").mkdir(exist_ok=True)
    save_file({name: x.contiguous() for name, x in tensors.items()}, run / f"samples/step-{step:08d}.safetensors")


def data_of(text):
    """The data in a page."""
    return json.loads(re.search(r'runs\.set\("\w+", (.*)\)', text)[1])


def test_the_page_of_a_run(tmp_path):
    """It loads nothing. Each number of a token is a colour, cut to the mask; NaN and infinities are none, and what an
    environment wrote has none."""
    tokenizer.save_pretrained(tmp_path)
    hostile = tokenizer.convert_tokens_to_ids(HOSTILE)
    nan = torch.nan
    advantages = torch.tensor([[-3.0, 2.0, nan, torch.inf, 0.5, 0.123456], [1.0, 9.0, 9.0, 9.0, 9.0, 9.0]])
    tensors = dict(advantages=advantages, alike=torch.tensor([[0.5], [-0.5]]), scores=torch.tensor([1.0, nan]))
    tensors |= dict(old_logprobs=-torch.ones(2, 6), loss_mask=torch.ones(2, 6, dtype=torch.bool))
    write_samples(tmp_path, 1, [hostile, hostile[:1]], **tensors)
    written = torch.tensor([[True, False, True]])
    write_samples(tmp_path, 7, [hostile[:3]], written=written, advantages=torch.ones(1, 1))
    metrics = [{"objective/scores": float(i), "rewards/fn/mean": float(i), "objective/kl": None} for i in range(8)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))

    page = xray.make_page(tmp_path)
    elements = Elements(page)
    assert not re.search(r"https?:|//\w+\.|@import|url\(|fetch\(|import\(|XMLHttp|innerHTML|insertAdjacent", page)
    assert not {"src", "href", "onerror"} & elements.attributes and "default-src 'none'" in page
    assert elements.tags.count("script") == page.count("</script>") == 3 and "img" not in elements.tags
    data = data_of(page)
    first, second, third = data["samples"]
    assert first["tokens"] == HOSTILE and second["tokens"] == HOSTILE[:1] and third["tokens"] == HOSTILE[:3]
    assert first["prompt"] == "<img src=x>" and (first["update"], third["update"]) == (1, 7)
    assert first["columns"]["advantages"] == [-3, 2, None, None, 0.5, 0.1235] and first["columns"]["alike"] == [0.5] * 6
    assert second["columns"] == {"advantages": [1], "old_logprobs": [-1], "alike": [-0.5]}
    assert first["scores"] == {"scores": 1} and second["scores"] == {"scores": None}
    assert third["told"] == [1] and third["columns"] == {"advantages": [1, None, 1]} and not first["told"]
    assert data["last"] == 8


def test_a_run_that_goes_on_without_rewards(tmp_path):
    """That of dpo.py: the tokenizer is that of the model that it began with; the log ratio is made here."""
    (tmp_path / "args.json").write_text('{"model": "toy/sft"}')
    (tmp_path / "metrics.jsonl").write_text("")
    logprobs = torch.full((1, 1), -1.0)
    write_samples(tmp_path, 3, [[5]], logprobs=logprobs, ref_logprobs=logprobs * 3)
    data = data_of(xray.make_page(tmp_path))
    assert data["samples"][0]["columns"]["log_ratio"] == [2] and data["is_trained_by_reward"] and data["last"] == 3
