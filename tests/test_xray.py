"""tools/xray.py: whatever a model writes reaches the page as text, and the page loads nothing."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from browser import Elements
from safetensors.torch import save_file
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import xray  # noqa: E402

HOSTILE = ["</script>", "<script>document.title='broken'</script>", "<!--", "&lt;", "\n", "\x1b"]


def write_samples(run, step, tokenizer, responses, prompt="<img src=x>", **tensors):
    """A file of samples of a run: one prompt, and responses as lists of tokens."""
    ids = tokenizer.pad({"input_ids": responses}, padding_side="right", return_tensors="pt")
    prompts = torch.tensor([[0, *tokenizer(prompt)["input_ids"]]] * len(responses))
    tensors |= {
        "prompts": prompts,
        "prompt_mask": torch.arange(prompts.shape[1]).expand_as(prompts) > 0,
        "responses": ids["input_ids"],
        "mask": ids["attention_mask"].bool(),
    }
    (run / "samples").mkdir(exist_ok=True)
    save_file({name: x.contiguous() for name, x in tensors.items()}, run / f"samples/step-{step:08d}.safetensors")


@pytest.fixture
def tokenizer():
    """The toy world's, for which each hostile text is one token."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/sft")
    tokenizer.add_tokens(HOSTILE)
    return tokenizer


@pytest.fixture
def run(tmp_path, tokenizer):
    """A run that has ended: hostile texts, numbers that are none, and tensors that no script saves."""
    tokenizer.save_pretrained(tmp_path)
    hostile = tokenizer.convert_tokens_to_ids(HOSTILE)
    write_samples(
        tmp_path,
        1,
        tokenizer,
        [hostile, hostile[:1]],
        advantages=torch.tensor([[-3.0, 2.0, torch.nan, torch.inf, 0.5, 0.123456], [1.0, 9.0, 9.0, 9.0, 9.0, 9.0]]),
        old_logprobs=-torch.ones(2, 6),
        alike=torch.tensor([[0.5], [-0.5]]),
        loss_mask=torch.ones(2, 6, dtype=torch.bool),
        scores=torch.tensor([1.0, torch.nan]),
        **{"rewards/<i>fn</i>": torch.tensor([2.0, 3.0])},
    )
    write_samples(tmp_path, 7, tokenizer, [hostile[:1]], advantages=torch.ones(1, 1))
    metrics = [{"objective/scores": float(i), "rewards/fn/mean": float(i), "objective/kl": None} for i in range(8)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    return tmp_path


def data_of(text):
    """The data in a page."""
    return json.loads(re.search(r'runs\.set\("\w+", (.*)\)', text)[1])


def test_what_a_model_writes_is_data(run):
    """And the page loads nothing."""
    page = xray.make_page(run)
    elements = Elements(page)
    assert not re.search(r"https?:|//\w+\.|@import|url\(|fetch\(|import\(|XMLHttp|innerHTML|insertAdjacent", page)
    assert not {"src", "href", "onerror"} & elements.attributes and "default-src 'none'" in page
    assert elements.tags.count("script") == page.count("</script>") == 3 and "img" not in elements.tags
    first, second, third = data_of(page)["samples"]
    assert first["tokens"] == HOSTILE and second["tokens"] == third["tokens"] == HOSTILE[:1]
    assert first["prompt"] == "<img src=x>" and (first["update"], third["update"]) == (1, 7)


def test_every_number_of_a_token_is_a_colour(run):
    """Cut to the mask; of those alike for a response, one for each token; NaN and infinities are none."""
    data = data_of(xray.make_page(run))
    assert [x["name"] for x in data["quantities"]] == ["advantages", "old_logprobs", "alike"]
    assert [x["signed"] for x in data["quantities"]] == [True, False, True]
    first, second, _ = data["samples"]
    assert first["columns"]["advantages"] == [-3, 2, None, None, 0.5, 0.1235]
    assert second["columns"] == {"advantages": [1], "old_logprobs": [-1], "alike": [-0.5]}
    assert first["columns"]["alike"] == [0.5] * 6
    assert list(first["scores"].items()) == [("scores", 1), ("<i>fn</i>", 2)] and second["scores"]["scores"] is None


def test_what_the_policy_was_told_has_no_numbers(run, tokenizer):
    """That of a run with an environment: it is grey."""
    written = torch.tensor([[True, False, True]])
    write_samples(run, 9, tokenizer, [[5, 6, 7]], written=written, advantages=torch.ones(1, 1))
    *others, last = data_of(xray.make_page(run))["samples"]
    assert last["told"] == [1] and last["columns"] == {"advantages": [1, None, 1]}
    assert not any(sample["told"] for sample in others)


def test_a_run_that_goes_on_without_rewards(tmp_path, tokenizer):
    """That of dpo.py: the tokenizer is that of the model that it began with; the log ratio is made here."""
    (tmp_path / "args.json").write_text('{"model": "toy/sft"}')
    (tmp_path / "metrics.jsonl").write_text("")
    ids = tokenizer(" A film.")["input_ids"]
    logprobs = torch.full((1, len(ids)), -1.0)
    write_samples(tmp_path, 3, tokenizer, [ids], prompt="It", logprobs=logprobs)
    data = data_of(xray.make_page(tmp_path))
    assert "".join(data["samples"][0]["tokens"]) == " A film." and data["samples"][0]["prompt"] == "It"
    assert data["samples"][0]["scores"] == {} and not data["is_trained_by_reward"] and data["last"] == 3
    write_samples(tmp_path, 3, tokenizer, [ids], logprobs=logprobs, ref_logprobs=logprobs * 3)
    data = data_of(xray.make_page(tmp_path))
    assert data["samples"][0]["columns"]["log_ratio"] == [2.0] * len(ids) and data["is_trained_by_reward"]


def test_the_page_of_docs_has_its_data():
    """And is as it is: else run tools/xray.py --docs."""
    page = (ROOT / "docs/xray/index.html").read_text("utf-8")
    scripts = re.findall(r"^<script>runs\.set.*\n", page, re.M)
    assert page == xray.fill_in("".join(scripts))
    for script, text in zip(xray.SCRIPTS, scripts, strict=True):
        data = data_of(text)
        assert data["run"] == f"python {script}.py" and data["samples"] and data["quantities"] and data["curves"]
