"""docs/xray.py: whatever a model writes reaches the page as text, the page loads nothing, and a browser draws it."""

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
HOSTILE = ["</script>", "<script>document.title='broken'</script>", " <!--", "<b>", "&lt;", "\n", "\x1b", "�", "", "写"]
CHROMIUM = shutil.which("chromium")


def xray(*words):
    """The finished process of docs/xray.py with these words on its command line."""
    return subprocess.run([sys.executable, ROOT / "docs/xray.py", *words], capture_output=True, text=True)


def sample(tokens, update=1, **columns):
    """A line of samples.jsonl."""
    named = {"<i>fn</i>": None, "length": 2.0}
    line = {"update": update, "prompt": "<img src=x>", "response": "".join(tokens), "score": 1.0, "tokens": tokens}
    return json.dumps(line | {"rewards_by_name": named} | columns)


@pytest.fixture
def run(tmp_path):
    """A run with hostile texts, numbers that are none, an empty response and a column that no script writes."""
    advantages = [-1.0, 2.0, float("nan"), None, float("inf"), 0.5, 0.25, 0.125, -3.0, 0.123456789]
    lines = [
        sample(HOSTILE, 1, advantages=advantages, old_logprobs=[-0.5] * 10),
        sample([], 3, advantages=[]),
        sample([" a", "b"], 7, advantages=[1.0, -2.0], old_logprobs=[-1.0, -2.0], centred=[0.0, 0.0]),
    ]
    (tmp_path / "samples.jsonl").write_text("\n".join(lines) + "\n")
    metrics = [{"objective/scores": float(i), "objective/kl": float("nan"), "loss": 1.0} for i in range(8)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics))
    return tmp_path


class Elements(HTMLParser):
    """Tags and attributes of a page, and the text of its data, as an HTML parser sees them."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.data, self.inside = [], [], "", False
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [name for name, _ in attributes]
        self.inside = ("id", "data") in attributes

    def handle_data(self, text):
        self.data += text if self.inside else ""


def page_of(run):
    """The page, after a run of the script that must go well."""
    done = xray(str(run))
    assert done.returncode == 0, done.stderr
    return (run / "xray.html").read_text("utf-8")


def test_what_a_model_writes_is_data(run):
    page = page_of(run)
    elements = Elements(page)
    assert elements.tags.count("script") == page.count("</script>") == 2 and "img" not in elements.tags
    data = json.loads(elements.data)
    assert [s["tokens"] for s in data["samples"]] == [HOSTILE, [], [" a", "b"]]
    assert [s["update"] for s in data["samples"]] == [1, 3, 7]
    assert [q["name"] for q in data["quantities"]] == ["advantages", "old_logprobs", "centred"]
    assert data["samples"][0]["columns"]["advantages"] == [-1, 2, None, None, None, 0.5, 0.25, 0.125, -3, 0.1235]
    assert [curve["title"] for curve in data["curves"]] == ["score"]  # KL is NaN throughout, length missing


def test_the_page_loads_nothing(run):
    page = page_of(run)
    assert not re.search(r"https?:|//\w+\.|@import|url\(|fetch\(|import\(|XMLHttp|innerHTML|insertAdjacent", page)
    assert not {"src", "href", "onerror"} & set(Elements(page).attributes)
    assert "default-src 'none'" in page  # nor may it


def test_a_run_without_metrics_has_a_page_all_the_same(run):
    (run / "metrics.jsonl").unlink()
    assert json.loads(Elements(page_of(run)).data)["curves"] == []


def test_a_run_that_was_resumed(run):
    """The last line of a sample counts; one that was cut off, even within a letter, is left out."""
    parts = ([" a"], 0, 1.0), ([" b"], 1, 2.0), ([" c"], 0, 3.0)
    first, second, third = (sample(tokens, row=row, advantages=[x]) for tokens, row, x in parts)
    lines = [first, '{"update": 1', second, '{"update": 1, "prompt": "\udcff', third]
    (run / "samples.jsonl").write_text("\n".join(lines) + "\n", "utf-8", "surrogateescape")
    samples = json.loads(Elements(page_of(run)).data)["samples"]
    assert [(x["tokens"], x["columns"]["advantages"]) for x in samples] == [([" c"], [3]), ([" b"], [2])]


def test_damaged_lines_are_left_out_and_counted(run):
    """What cannot be a number is none. A metric that is lost leaves a gap, and does not move those after it."""
    damaged = [
        "[]", "{", "[" * 10**5, sample([" a"], advantages=[1.0, 2.0]), sample([" a"], advantages="x"),
        sample([" a"], "1", advantages=[1.0]), sample([" a"], advantages=[1.0], rewards_by_name=[1]),
    ]  # fmt: skip
    good = sample([" a", "b"], row=[], advantages=[10**400, 1.0])
    (run / "samples.jsonl").write_text("\n".join([*damaged, good]))
    (run / "metrics.jsonl").write_text('{"objective/scores": 1}\n{"objec\n{"objective/scores": 3}\n')
    done = xray(str(run))
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert "samples.jsonl: 7 of 8 lines cannot be used; line 1: not a" in done.stderr
    data = json.loads(Elements((run / "xray.html").read_text("utf-8")).data)
    assert [x["columns"] for x in data["samples"]] == [{"advantages": [None, 1]}]
    assert data["curves"][0]["lines"] == {"score": [1, None, 3]}


def test_a_run_without_rewards(tmp_path):
    """That of sft.py: no score is shown, and nothing is said of blame."""
    line = {"update": 1, "row": 0, "prompt": "a", "response": "b", "tokens": ["b"], "logprobs": [-0.5]}
    (tmp_path / "samples.jsonl").write_text(json.dumps(line) + "\n")
    data = json.loads(Elements(page_of(tmp_path)).data)
    assert data["samples"][0]["scores"] == {} and not data["is_trained_by_reward"] and not data["links"]
    (tmp_path / "samples.jsonl").write_text(json.dumps(line | {"implicit_rewards": [0.1]}) + "\n")
    data = json.loads(Elements(page_of(tmp_path)).data)
    assert data["quantities"][0]["label"] == "implicit reward" and data["is_trained_by_reward"]


@pytest.mark.parametrize(
    "text, words",
    [
        (None, "has no samples.jsonl"),
        ("", "no response with numbers"),
        ("[1, 2]\n\udcff\n", "2 of 2 lines cannot be used; line 1: not a JSON object"),
        ('{"update": 1}\n', "line 1: there is no update, or there are no tokens"),
        (sample([" a"]) + "\n", "no response with numbers"),
    ],
)
def test_mistakes_end_in_one_sentence(tmp_path, text, words):
    if text is not None:
        (tmp_path / "samples.jsonl").write_text(text, "utf-8", "surrogateescape")
    done = xray(str(tmp_path))
    assert done.returncode == 2 and not (tmp_path / "xray.html").exists()
    assert done.stderr.startswith("xray.py: error: ") and words in done.stderr and done.stderr.count("\n") == 1


def test_a_folder_that_is_not_there(tmp_path):
    done = xray(str(tmp_path / "nowhere"))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "there is no such folder" in done.stderr


def test_an_output_that_cannot_be_written(run):
    done = xray(str(run), "--output", str(run / "no" / "such.html"))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "such.html" in done.stderr


@pytest.mark.skipif(not CHROMIUM, reason="no browser here: install chromium to see the page's own code run")
def test_a_browser_draws_the_page(run, tmp_path):
    page_of(run)
    quiet = ["quic", "background-networking", "component-update", "sync", "gpu"]
    command = [CHROMIUM, "--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{name}" for name in quiet)]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000", "--dump-dom"]
    done = subprocess.run([*command, (run / "xray.html").as_uri()], capture_output=True, text=True, timeout=120)
    dom = done.stdout
    shown = re.findall(r'<span class="token"([^>]*)>([^<]*)</span>', dom)
    assert [text for _, text in shown] == [
        "&lt;/script&gt;", "&lt;script&gt;document.title='broken'&lt;/script&gt;", " &lt;!--", "&lt;b&gt;",
        "&amp;lt;", "⏎", "�", "�", "∅", "写",
    ]  # fmt: skip
    low, high, none = (attributes for attributes, _ in shown[:3])
    assert "var(--low)" in low and "var(--high)" in high and "background" not in none
    readout = re.search(r'<div id="readout".*?</div>', dom)[0]
    assert "∅" in readout and "−3.000" in readout and "token 9 of 10" in readout  # the lowest advantage
    assert '<output id="update">1 of 8</output>' in dom and "<title>Which token" in dom
    assert "&lt;img src=x&gt;" in dom and "&lt;i&gt;fn&lt;/i&gt; none" in dom and "<path " in dom
