"""tools/trace.py: the numbers on a page are those of the run, it loads nothing, and a browser steps through it."""

import json
import re
import runpy
import sys

import pytest
import torch
from browser import Elements, dom_of, needs_browser
from sources import ROOT, text_of

sys.path.insert(0, str(ROOT / "tools"))
import recorder  # noqa: E402

trace = runpy.run_path(str(ROOT / "tools/trace.py"), run_name="tools.trace")  # the name is that of a module of Python's

FILE = '''
import torch
from types import SimpleNamespace

policy = SimpleNamespace(config=SimpleNamespace(vocab_size=7))
P = B = 2


def add(x, mask):
    """Right to left."""
    x = x.clone()
    for t in reversed(range(x.shape[1] - 1)):
        x[:, t] += 10 * x[:, t + 1]
    return x * mask


for update in range(3):
    responses = torch.tensor([[1, 2, 3], [4, 5, 6]])
    mask = responses < 6
    score = float(responses.sum())
    total = add(responses, mask)  # (B, T)
    for i in torch.tensor([1, 0]).split(2):
        part = total[i] / 4
    logs = [part]
    words = ["</script>", "<b>"]
print("never reached")
'''


@pytest.fixture
def record(tmp_path):
    """A function that records the file, or that file with something in place of something else."""

    def make(old="", new="", name="file.py"):
        (tmp_path / name).write_text(FILE.replace(old, new) if old else FILE, "utf-8")
        return recorder.Recorder(tmp_path / name).run()

    return make


def made(record, line):
    """What the steps of a line made, in turn: numbers as lists."""
    return [
        {name: record.values[x].x.tolist() if isinstance(x, int) else x for name, x in step.made.items()}
        for step in record.steps
        if FILE.splitlines()[step.line - 1].strip().startswith(line)
    ]


def test_each_line_and_what_it_made(record):
    """One pass of the loop; a number that is changed later stays in the record as it was."""
    seen = record()
    assert made(seen, "for update") == [{"update": "0"}] and made(seen, "score") == [{"score": "21"}]
    assert made(seen, "def add") == [{"x": [[1, 2, 3], [4, 5, 6]], "mask": [[True] * 3, [True, True, False]]}]
    assert made(seen, "x[:, t]") == [{"x": [[1, 32, 3], [4, 65, 6]]}, {"x": [[321, 32, 3], [654, 65, 6]]}]
    assert made(seen, "return") == [{"returned": [[321, 32, 3], [654, 65, 0]]}]
    assert made(seen, "part") == [{"part": [[163.5, 16.25, 0], [80.25, 8, 0.75]]}]
    assert all((step.parent is None) == (step.place == "loop") for step in seen.steps)
    [caller] = {step.parent for step in seen.steps if step.place == "add"}
    assert list(seen.steps[caller].made) == ["total"] and set(seen.steps[caller].read) == {"responses", "mask"}


@pytest.mark.parametrize("name", recorder.ROW_NUMBERS)
def test_what_stands_over_the_numbers(record, name):
    seen = record(
        "    for i in torch.tensor([1, 0]).split(2):\n        part = total[i] / 4",
        f"""\
    for {name} in torch.tensor([1, 0]).split(2):
        part = total[{name}] / 4""",
    )
    [part] = [seen.values[step.made["part"]] for step in seen.steps if "part" in step.made]
    assert part.rows == [1, 0] and part.tokens.tolist() == [[4, 5, 6], [1, 2, 3]]
    assert part.mask.tolist() == [[True, True, False], [True] * 3]
    data = trace["read_record"](seen, "a title", "a command")
    assert data["values"][[s for s in data["steps"] if "part" in s[4]][0][4]["part"]]["x"][0] == [163.5, 16.25, 0]
    assert ["B", "T"] in [x["shape"] for x in data["values"]]


@pytest.mark.parametrize(
    "old, new, line, name",
    [
        ("x[:, t] += 10", "x[:, t] += 11", "x[:, t] +=", "x"),  # rewritten
        ("    x = x.clone()\n", "    x = x.clone()\n    x[0, 0] = 5\n", "x[0, 0]", "x"),  # one more
        ("        x[:, t] += 10 * x[:, t + 1]\n", "        pass\n", "return", "returned"),  # gone
    ],
)
def test_the_first_difference(record, old, new, line, name):
    fork, original = record(old, new, "fork.py"), record()
    found = trace["first_difference"](fork, original)
    assert fork.text.splitlines()[fork.steps[found.step].line - 1].strip().startswith(line) and found.name == name
    assert trace["first_difference"](record("never", "ever", "other.py"), original) is None


@pytest.fixture(scope="module")
def ppo():
    torch.manual_seed(0)  # the file seeds itself
    return recorder.Recorder(ROOT / "lecture/ppo.py", ["--response-length", "22"]).run()


def test_the_numbers_are_those_of_the_run(ppo, tmp_path, monkeypatch):
    """Of the file run as it is, without being watched, for an update: with what it left behind."""
    data = ROOT / "toy/data/prompts/train.jsonl"
    (tmp_path / "train.jsonl").write_text("".join(data.read_text().splitlines(keepends=True)[:64]))
    words = f"--batch-size 4 --total-episodes 4 --response-length 22 --dataset {tmp_path} --output-dir {tmp_path}/model"
    monkeypatch.setattr(sys, "argv", ["ppo.py", *words.split()])
    run = runpy.run_path(str(ROOT / "lecture/ppo.py"))
    last = {name: x for step in ppo.steps if step.place == "loop" for name, x in step.made.items()}
    page = trace["read_record"](ppo, "", "")
    for name in ("responses", "mask", "scores", "rewards", "advantages", "returns", "ratio", "values", "loss"):
        torch.testing.assert_close(ppo.values[last[name]].x, run[name].detach(), rtol=1e-5, atol=1e-6)
        shown = torch.tensor(page["values"][last[name]]["x"], dtype=torch.float64)
        torch.testing.assert_close(shown.flatten(), run[name].detach().double().flatten(), rtol=1e-3, atol=1e-6)
    first = next(step.made["ratio"] for step in ppo.steps if "ratio" in step.made)
    torch.testing.assert_close(ppo.values[first].x, torch.ones(4, 22))


SCRIPT_FILE = """
from dataclasses import dataclass
import torch
from types import SimpleNamespace


@dataclass
class Batch:
    responses: torch.Tensor
    mask: torch.Tensor
    scores: torch.Tensor | None = None


class Run:
    def steps(self):
        hidden = torch.zeros(1)
        yield from range(3)


def score(responses):
    return responses.sum(1)


def update(policy, batch):
    for index in torch.tensor([1, 0]).split(1):
        part = batch.responses[index] / 4
    return part


def train(args):
    assert args == ("settings",)
    policy = SimpleNamespace(config=SimpleNamespace(vocab_size=7))
    early = score(torch.ones(1, 1))
    for step in Run().steps():
        batch = Batch(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[True] * 3, [True, True, False]]))
        batch.scores = score(batch.responses)
        last = update(policy, batch)


def read_command_line():
    return ("settings",)


if __name__ == "__main__":
    raise AssertionError("the recorder calls train itself")
"""


def test_a_script(tmp_path):
    """Its loop is in a function, and its tensors in a dataclass, whose micro-batches have the right rows and tokens."""
    file, fork = tmp_path / "script.py", tmp_path / "fork.py"
    file.write_text(SCRIPT_FILE)
    fork.write_text(SCRIPT_FILE.replace("responses.sum(1)", "responses.sum(1) + 1"))
    seen = recorder.Recorder(file).run()
    names = {step.place: set() for step in seen.steps}
    for step in seen.steps:
        names[step.place] |= step.made.keys()
    assert set(names) == {"loop", "score", "update"}
    assert names["loop"] == {"step", "batch.responses", "batch.mask", "batch.scores", "last"}
    [call] = [step for step in seen.steps if "batch.scores" in step.made and step.place == "loop"]
    assert list(call.made) == ["batch.scores"] and list(call.read) == ["batch.responses"]
    parts = [seen.values[step.made["part"]] for step in seen.steps if "part" in step.made]
    assert [(part.rows, part.tokens.tolist()) for part in parts] == [([1], [[4, 5, 6]]), ([0], [[1, 2, 3]])]
    assert parts[0].mask.tolist() == [[True, True, False]]
    assert "update" in trace["make_page"](trace["read_record"](seen, "a title", "a command"))
    found = trace["compare"](recorder.Recorder(fork).run(), seen, {"values": [], "layouts": []})
    assert found.endswith("in score: return responses.sum(1) + 1\n  returned[0] is 7, and was 6")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "reward_model", "ppo", "rloo", "grpo", "dpo", "ddpo"])
def test_each_script_has_a_page(name):
    seen = recorder.Recorder(ROOT / f"{name}.py").run()
    assert {"loop", "update"} <= {step.place for step in seen.steps}
    assert len(trace["make_page"](trace["read_record"](seen, name, ""))) < 2_000_000


def test_the_page_loads_nothing_and_shows_text_as_text(record):
    page = trace["make_page"](trace["read_record"](record(), "<img src=x>", ""))
    elements = Elements(page)
    assert elements.tags.count("script") == page.count("</script>") == 1 and "img" not in elements.tags
    assert not {"src", "onerror"} & elements.attributes and "default-src 'none'" in page
    assert not re.search(r"https?:|@import|url\(|fetch\(|import\(|innerHTML|insertAdjacent", page)


def data_of(name):
    return json.loads(re.search(r"^const data = (.*)$", text_of(f"docs/trace/{name}.html"), re.M)[1])


@pytest.mark.parametrize("name", trace["PAGES"])
def test_the_pages_of_docs(name):
    """They are small, and of the files as they stand: else `python tools/trace.py --docs`."""
    assert len(text_of(f"docs/trace/{name}.html").encode()) < 500_000
    assert data_of(name)["source"] == text_of(f"lecture/{name}.py").splitlines()


def test_links_into_pages_lead_somewhere():
    """To a name that is made there, often enough, or to a function."""
    for file in [*ROOT.glob("*/*.md"), ROOT / "README.md"]:
        for page, name, nth in re.findall(r"trace/(\w+)\.html#(\w+)(?:\.(\d+))?", file.read_text("utf-8")):
            steps = data_of(page)["steps"]
            times = max(sum(name in made for *_, made in steps), int(name in {place for _, place, *_ in steps}))
            assert times >= int(nth or 1), (file.name, page, name)


SCRIPT = """
<script>
const told = [], say = x => told.push(x)
addEventListener("error", event => say("error: " + event.message))
const press = key => document.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }))
const state = () => $("where").textContent + " | " + location.hash
setTimeout(() => {
  for (const key of KEYS) { press(key); say(state()) }
  document.title = JSON.stringify(told)
}, 100)
</script>
"""


@needs_browser
def test_a_browser_steps(record, tmp_path):
    """By keys through the loop, into a call and out of it; a link leads to a line, and nothing is an error."""
    keys = [f"Arrow{key}" for key in "Down Down Down Down Right Down Down Down Left Down Up".split()]
    page = trace["make_page"](trace["read_record"](record(), "a title", "a command"))
    page += SCRIPT.replace("KEYS", json.dumps(keys))
    (tmp_path / "page.html").write_text(page, "utf-8")
    dom = dom_of((tmp_path / "page.html").as_uri(), tmp_path)
    told = json.loads(re.search("<title>(.*)</title>", dom)[1])
    where = [re.match(r"Line (\d+) in ([^:,]*)", x).groups() for x in told]
    line = {text.strip(): str(n) for n, text in enumerate(FILE.splitlines(), 1)}
    call, changed = line["total = add(responses, mask)  # (B, T)"], line["x[:, t] += 10 * x[:, t + 1]"]
    assert where[3] == where[8] == where[10] == (call, "loop") and where[4] == (line["def add(x, mask):"], "loop › add")
    assert where[7] == (changed, "loop › add") and told[7].endswith(f"changed x. | #L{changed}")
