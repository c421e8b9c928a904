"""tools/trace.py: the numbers on a page are those of the run, and it loads nothing."""

import json
import re
import runpy
import sys

import pytest
from elements import Elements
from sources import ROOT, text_of

sys.path.insert(0, str(ROOT / "tools"))
import recorder  # noqa: E402

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
SHORT = ("def train(args):\n    for step in range(args)", "for step in range(3)")  # what makes a short file of it


def record(folder, old="", new="", name="file.py"):
    """Records the file, or that file with something in place of something else."""
    (folder / name).write_text(FILE.replace(old, new) if old else FILE, "utf-8")
    return recorder.Recorder(folder / name).run()


@pytest.mark.parametrize("change", [("", ""), SHORT], ids=["a script", "a short file"])
def test_a_record_has_each_line_and_what_it_made(change, tmp_path):
    """One pass of the loop; a number that is changed later stays in the record as it was. Micro-batches have the rows,
    tokens and mask that they have in the batch."""
    seen = record(tmp_path, *change)

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


def test_the_first_difference_of_two_files_is_found(tmp_path):
    for old, new, found in (  # a line is rewritten, or one more
        ("+= 10", "+= 11", "x[:, t] += 11 * x[:, t + 1]\n  x[0, 1] is 35, and was 32"),
        ("x.clone()\n", "x.clone()\n    x[0, 0] = 5\n", "x[0, 0] = 5\n  x[0, 0] is 5, and was 1"),
    ):
        fork = record(tmp_path, old, new, "fork.py")
        assert trace["compare"](fork, record(tmp_path), {"values": [], "layouts": []}).endswith(found)


def test_the_page_loads_nothing_and_shows_text_as_text(tmp_path):
    data = trace["read_record"](record(tmp_path), "<img src=x>", "")
    shown = [data["values"][made["part"]] for *_, made in data["steps"] if "part" in made]
    assert [x["shape"] for x in shown] == [["b", "T"]] * 2 and shown[0]["x"] == [[163.5, 16.25, 1.5]]
    page = trace["make_page"](data)
    elements = Elements(page)
    assert elements.tags.count("script") == page.count("</script>") == 1 and "img" not in elements.tags
    assert not {"src", "onerror"} & elements.attributes and "default-src 'none'" in page
    assert not re.search(r"https?:|@import|url\(|fetch\(|import\(|innerHTML|insertAdjacent", page)


@pytest.mark.parametrize("name", trace["PAGES"])
def test_the_pages_of_docs(name):
    """They are small, and of the files as they stand: else `python tools/trace.py --docs`."""
    page = text_of(f"docs/trace/{name}.html")
    assert len(page.encode()) < 500_000
    assert (
        json.loads(re.search(r"^const data = (.*)$", page, re.M)[1])["source"]
        == text_of(f"lecture/{name}.py").splitlines()
    )
