"""tools/trace.py and xray.py: the numbers on a page are those of the run, and it loads nothing."""

import json
import re
import runpy
import sys

import pytest
import torch
from elements import Elements
from runs import write_rows
from safetensors.torch import save_file
from sources import ROOT, text_of
from transformers import AutoTokenizer

sys.path.insert(0, str(ROOT / "tools"))
import recorder  # noqa: E402
import xray  # noqa: E402

trace = runpy.run_path(str(ROOT / "tools/trace.py"), run_name="tools.trace")  # the name is that of a module of Python's

FILE = """
import torch
from dataclasses import dataclass
@dataclass
class Batch: responses: object; mask: object
def add(x):
    x = x.clone()
    for t in reversed(range(2)):
        x[:, t] += 10 * x[:, t + 1]
    return x
def update(batch):
    for index in torch.tensor([1, 0]).split(1):
        part = batch.total[index] / 4  # (b, T)
def train(args):
    for step in range(args):
        batch = Batch(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[True] * 3, [True, True, False]]))
        batch.total = add(batch.responses)
        words = "</script><b>"
        update(batch)
def read_command_line():
    return 3
"""


def record(folder):
    (folder / "file.py").write_text(FILE, "utf-8")
    return recorder.Recorder(folder / "file.py").run()


def test_a_record_has_each_line_and_what_it_made(tmp_path):
    """One pass of the loop; a number that is changed later stays in the record as it was. Micro-batches have the rows,
    tokens and mask that they have in the batch."""
    seen = record(tmp_path)

    def made(line):
        steps = [step for step in seen.steps if seen.text.splitlines()[step.line - 1].strip().startswith(line)]
        return [[seen.values[x].x.tolist() for x in step.made.values() if isinstance(x, int)] for step in steps]

    assert made("x[:, t]") == [[[[1, 32, 3], [4, 65, 6]]], [[[321, 32, 3], [654, 65, 6]]]]
    assert made("batch.total") == made("return x") == [[[[321, 32, 3], [654, 65, 6]]]]
    assert made("part") == [[[[163.5, 16.25, 1.5]]], [[[80.25, 8, 0.75]]]]
    assert [step.made for step in seen.steps if "step" in step.made] == [{"step": "0"}]
    parts = [seen.values[step.made["part"]] for step in seen.steps if "part" in step.made]
    assert [(part.rows, part.tokens.tolist()) for part in parts] == [([1], [[4, 5, 6]]), ([0], [[1, 2, 3]])]
    assert parts[0].mask.tolist() == [[True, True, False]]


def check_page(page, num_scripts):
    """It loads nothing, and what the world writes is a text in it."""
    elements = Elements(page)
    assert elements.tags.count("script") == page.count("</script>") == num_scripts and "img" not in elements.tags
    assert not {"src", "href", "onerror"} & elements.attributes and "default-src 'none'" in page
    assert not re.search(r"https?:|//\w+\.|@import|url\(|fetch\(|import\(|XMLHttp|innerHTML|insertAdjacent", page)


def test_the_page_of_a_record(tmp_path):
    data = trace["read_record"](record(tmp_path), "<img src=x>", "")
    shown = [data["values"][made["part"]] for *_, made in data["steps"] if "part" in made]
    assert [x["shape"] for x in shown] == [["b", "T"]] * 2 and shown[0]["x"] == [[163.5, 16.25, 1.5]]
    check_page(trace["make_page"](data), 1)


@pytest.mark.parametrize("name", trace["PAGES"])
def test_the_pages_of_docs(name):
    """They are small, and of the files as they stand: else `python tools/trace.py --docs`."""
    page = text_of(f"docs/trace/{name}.html")
    assert len(page.encode()) < 500_000
    data = json.loads(re.search(r"^const data = (.*)$", page, re.M)[1])
    assert data["source"] == text_of(f"lecture/{name}.py").splitlines()


# --- tools/xray.py: whatever a model writes reaches the page as text

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


def test_the_page_of_a_run(tmp_path):
    """It loads nothing. Each number of a token is a colour, cut to the mask; NaN and infinities are none, and what an
    environment wrote has none."""
    tokenizer.save_pretrained(tmp_path)
    hostile = tokenizer.convert_tokens_to_ids(HOSTILE)
    nan = torch.nan
    advantages = torch.tensor([[-3.0, 2.0, nan, torch.inf, 0.5, 0.123456], [1.0, *[9.0] * 5]])
    tensors = dict(advantages=advantages, alike=torch.tensor([[0.5], [-0.5]]), scores=torch.tensor([1.0, nan]))
    tensors |= dict(old_logprobs=-torch.ones(2, 6), loss_mask=torch.ones(2, 6, dtype=torch.bool))
    write_samples(tmp_path, 1, [hostile, hostile[:1]], **tensors)
    written = torch.tensor([[True, False, True]])
    write_samples(tmp_path, 7, [hostile[:3]], written=written, advantages=torch.ones(1, 1))
    write_rows(tmp_path / "metrics.jsonl", [{"objective/scores": float(i), "objective/kl": None} for i in range(8)])

    page = xray.make_page(tmp_path)
    check_page(page, 3)
    data = json.loads(re.search(r'runs\.set\("\w+", (.*)\)', page)[1])
    first, second, third = data["samples"]
    assert [x["tokens"] for x in (first, second, third)] == [HOSTILE, HOSTILE[:1], HOSTILE[:3]]
    assert first["prompt"] == "<img src=x>" and (first["update"], third["update"]) == (1, 7)
    assert first["columns"]["advantages"] == [-3, 2, None, None, 0.5, 0.1235] and first["columns"]["alike"] == [0.5] * 6
    assert second["columns"] == {"advantages": [1], "old_logprobs": [-1], "alike": [-0.5]}
    assert first["scores"] == {"scores": 1} and second["scores"] == {"scores": None}
    assert third["told"] == [1] and third["columns"] == {"advantages": [1, None, 1]} and not first["told"]
    assert data["last"] == 8
