"""tools/compare.py: it counts right, and no judge can stop the run."""

import json
import re
import sys
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from sources import ROOT, load
from transformers import AutoModelForSequenceClassification, AutoTokenizer

sys.path.insert(0, str(ROOT / "tools"))
compare = load("tools/compare.py", "tools_compare")
GOLD = "toy/gold_score.py:gold_score"
KEY = "sk-test-0123456789abcdef"


@pytest.fixture(autouse=True)
def at_home(monkeypatch):
    """Paths are relative to the root. No test sends a key of this machine, and none asks a proxy."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(compare, "KEY", "")
    monkeypatch.setenv("no_proxy", "*")


def run(folder, **settings):
    """Compares in this process; returns compare.json and the lines of pairs.jsonl in the order of the prompts."""
    defaults = dict(model="toy/sft", device="cpu", num_prompts=12, temperature=0.0, response_length=16)
    compare.compare(compare.Args(**defaults | settings, output_dir=str(folder)))
    return json.loads((folder / "compare.json").read_text()), read_pairs(folder)


def read_pairs(folder):
    return sorted(map(json.loads, open(folder / "pairs.jsonl")), key=lambda pair: pair["row"])


@pytest.fixture
def says(monkeypatch):
    """says(a_texts, b_texts): the two sides say this, and nothing is sampled."""

    def use(a, b):
        texts = iter((a, b))

        def answer_all(name, rows, seed, args):
            return [compare.Answer(row, row["prompt"], [1], text, [2], True) for row, text in zip(rows, next(texts))]

        monkeypatch.setattr(compare, "answer_all", answer_all)

    return use


def test_a_policy_of_an_environment_is_refused(tmp_path):
    (tmp_path / "args.json").write_text('{"env": "toy/guess/make.py:Game"}')
    with pytest.raises(SystemExit, match="evaluate.py"):
        run(tmp_path / "out", model=str(tmp_path), other="toy/sft", reward_fn=GOLD)


# --- Counting ---------------------------------------------------------------------------------------------------------


def test_wilson_interval_is_the_inverted_score_test():
    """At its bounds the share is 1.96 standard errors away, the error taken at the bound; rounding is no exception."""
    assert compare.wilson_interval(0, 0) == (0, 1)
    for n in range(1, 60):
        for wins in (half / 2 for half in range(2 * n + 1)):
            low, high = compare.wilson_interval(wins, n)
            assert 0 <= low <= wins / n <= high <= 1
            for p in (low, high):
                assert abs(wins / n - p) == pytest.approx(1.959963985 * (p * (1 - p) / n) ** 0.5, abs=1e-7)


def pair(winner, a="aa", b="bb", **known):
    return compare.Pair(0, "p", a, b, 3, 5, True, False, winner, **known)


def test_summary_by_hand():
    """Three wins, a tie, a loss, one not judged; A is the longer one in two of its wins."""
    pairs = [pair("a", a="aaa"), pair("a", a="aaaa"), pair("a"), pair("tie"), pair("b"), pair(None, error="late")]
    s = compare.summarize(pairs)
    assert (s["wins"], s["ties"], s["losses"], s["unjudged"], s["pairs"]) == (3, 1, 1, 1, 6)
    assert s["win_rate"] == 3.5 / 5
    assert (s["win_rate_low"], s["win_rate_high"]) == compare.wilson_interval(3.5, 5)
    assert s["pairs_a_not_longer"] == 3 and s["win_rate_a_not_longer"] == 1.5 / 3
    assert (s["tokens_a"], s["tokens_b"], s["eos_share_a"], s["eos_share_b"]) == (3, 5, 1, 0)
    assert s["characters_a"] == (3 + 4 + 2 * 4) / 6 and s["characters_b"] == 2
    assert s["last_error"] == "late"


def test_scores_and_places_by_hand():
    """Differences 1, 3, -1: deviation 2. Of five pairs two are agreed on, two go to the first, one to the second."""
    scores = {"a": (2.0, 1.0), "tie": (5.0, 2.0), "b": (0.0, 1.0)}
    s = compare.summarize([pair(w, score_a=a, score_b=b) for w, (a, b) in scores.items()])
    assert (s["score_a"], s["score_b"], s["score_difference"]) == pytest.approx((7 / 3, 4 / 3, 1))
    assert s["score_difference_error"] == pytest.approx(2 / 3**0.5)
    verdicts = [["A", "B"], ["B", "A"], ["A", "A"], ["B", "B"], ["A", "A"]]
    s = compare.summarize([pair("tie", verdicts=v) for v in verdicts] + [pair("tie")])
    assert s["order_disagreement"] == 3 / 5 and s["first_shown_won"] == 6 / 10


# What judges say, by the verdict that it is
SAID = {
    "A": (
        'A | (A) | [[A]] | {"winner": "A"} | The better response is A. | I would choose A | '
        "Response A is clearly better. | A: it answers the question | Both are fine.\nA | A wins. | "
        "The answer is: A | **A** is the better response | Verdict - A | I'd go with A | I prefer (A)."
    ),
    "B": (
        'B |  b.\n | **B** | Answer: B. | ```json\n{"answer": "B", "why": "shorter"}\n``` | answer: b | '
        "**Answer:** B | I prefer response B because it ends. | Text B is the better one | "
        "B. It is more to the point. | B - shorter | Response B | <think>Answer: A? No.</think>B | "
        "B. It covers plan A: the film | **B**. In contrast to A: it ends. | long thoughts, answer: A</think>\n\nB | (B) because it ends | My answer would be 'B'. | B because it ends"
    ),
    None: (
        "A is dull. B is better than A. | My first choice: A. But on reflection, answer: B | "
        "Which is better, A or B? Answer: B |  | C | Neither. | Neither A nor B | A or B | Answer: A or B | "
        "Answer: A/B | A and B are equally good | Bananas | A better text would be shorter. | A is not better. | "
        "A: 7/10, B: 9/10 | A: short. B: complete. The better one is B. | A: good\nB: bad | <think>Answer: A, since | I cannot judge. | a response that is good | Answer A is good. | "
        "A film is better than no film | The better of A and B? Hard to say"
    ),
}


@pytest.mark.parametrize(
    ("answer", "letter"), [(answer, letter) for letter, said in SAID.items() for answer in said.split(" | ")]
)
def test_parse_verdict(answer, letter):
    assert compare.parse_verdict(answer) == letter


# --- Policies and rewards ---------------------------------------------------------------------------------------------


def test_reference_column(tmp_path):
    """The texts of the column are side B as they stand; the reward model reads the end of one that is too long."""
    text = " It is a masterpiece, and it is wonderful, and it is superb from the first minute to the very last one." * 9
    said = [{"role": "assistant", "content": ""}]
    rows = {"prompt": "The film", "completion": text}, {"prompt": "A book", "completion": said}
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = dict(dataset=str(tmp_path / "d.jsonl"), reference_column="completion", reward_fn="toy/reward_model")
    summary, pairs = run(tmp_path / "out", **settings)
    assert [p["b"] for p in pairs] == [text, ""] and pairs[0]["tokens_b"] > 160 and pairs[0]["ended_b"]
    assert summary["pairs_a_not_longer"] == 1
    model = AutoModelForSequenceClassification.from_pretrained("toy/reward_model")
    ids = AutoTokenizer.from_pretrained("toy/reward_model")(f"The film{text}<|end|>", return_tensors="pt")["input_ids"]
    assert pairs[0]["score_b"] == pytest.approx(model(ids[:, -160:]).logits.item(), abs=1e-4)


def test_a_text_that_ends_is_not_the_one_that_was_cut_off():
    pairs = [compare.Pair(0, "", "same", "same", 1, 1, ended, False) for ended in (True, False)]
    scores = iter([[2.0, 1.0 + 1e-7], [1.0, 1.0]])
    compare.judge_by_reward(pairs, [], [], lambda _: next(scores), lambda _: None, compare.Args("a"))
    assert [pair.winner for pair in pairs] == ["a", "tie"]


def test_a_reward_that_says_nothing_leaves_its_pair_open(tmp_path, says):
    (tmp_path / "r.py").write_text(
        "said = {'none': None, 'nan': float('nan'), 'high': 2.0, 'low': 1}\n"
        "def f(completions, **_):\n    return [said[text] for text in completions]\n"
    )
    says(["none", "nan", "high", "low", "low"], ["low", "low", "low", "high", "low"])
    summary, pairs = run(tmp_path / "out", other="b", reward_fn=f"{tmp_path}/r.py:f", num_prompts=5, batch_size=2)
    assert [p["winner"] for p in pairs] == [None, None, "a", "b", "tie"] and "None" in pairs[1]["error"]
    assert summary["win_rate"] == 0.5 and summary["score_difference"] == 0


# --- A language model as judge ----------------------------------------------------------------------------------------


@contextmanager
def server(answer):
    """A stand-in for an OpenAI-compatible API; answer(question, number of the request) -> text, (status, body),
    (status, body, seconds of Retry-After) or "hang". Yields its address and the list of requests: (path, headers,
    body)."""
    requests = []
    lock = threading.Lock()
    closing = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                requests.append((self.path, dict(self.headers), body))
                number = len(requests)
            said = answer(body["messages"][0]["content"], number)
            if said == "hang":
                closing.wait(40)
                return
            message = {"choices": [{"message": {"role": "assistant", "content": said}}]}
            status, text, *wait = said if isinstance(said, tuple) else (200, json.dumps(message))
            self.send_response(status)
            for seconds in wait:
                self.send_header("Retry-After", seconds)
            self.end_headers()
            with suppress(OSError):  # the client may have left
                self.wfile.write(text.encode())

        def log_message(self, *args):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{httpd.server_address[1]}/v1", requests
    finally:
        closing.set()
        httpd.shutdown()
        httpd.server_close()


def shown(question):
    """The two answers in a question of the default template."""
    return re.search(r"--- Response A\n(.*?)\n\n--- Response B\n(.*?)\n\n--- End", question, re.S).groups()


def prefers_good(question, number):
    first, second = shown(question)
    return "Answer: A." if "good" in first else "Answer: B." if "good" in second else "Neither."


def ask(folder, url, **settings):
    defaults = dict(other="b", judge_url=url, judge_model="judge-1", judge_retries=0, judge_timeout=30.0)
    return run(folder / "out", **defaults | settings)


GOOD = ["a good film", "a good book", "dull", "dull"]
BAD = ["bad", "worse", "one good thing", "good enough"]


def test_a_judge_with_a_taste(tmp_path, says):
    """Whoever is good wins, from either place; each pair is asked in both orders, at temperature 0."""
    says([*GOOD, "same"], [*BAD, "same "])  # nobody is asked about the last
    with server(prefers_good) as (url, requests):
        summary, pairs = ask(tmp_path, url, num_prompts=5)
    assert [p["winner"] for p in pairs] == ["a", "a", "b", "b", "tie"] and summary["win_rate"] == 0.5
    assert [p["verdicts"] for p in pairs[:4]] == [["A", "B"], ["A", "B"], ["B", "A"], ["B", "A"]]
    assert summary["order_disagreement"] == 0 and summary["first_shown_won"] == 0.5 and summary["unjudged"] == 0
    assert len(requests) == 8
    for path, headers, body in requests:
        assert path == "/v1/chat/completions" and body["model"] == "judge-1" and body["temperature"] == 0
        assert "Authorization" not in headers
    places = {places for both in zip(GOOD, BAD) for places in (both, both[::-1])}
    assert {shown(body["messages"][0]["content"]) for *_, body in requests} == places
    assert any(pairs[0]["prompt"] in body["messages"][0]["content"] for *_, body in requests)


def test_a_judge_with_gaps_does_not_stop_the_run(tmp_path, says):
    """Of the pairs some end in an error, in silence, in chatter, in replies of another form; two are judged."""
    replies = {
        "five": ((500, "out of memory"), "HTTP 500: out of memory"),
        "hang": ("hang", "TimeoutError"),
        "chat": ("Well now.", "neither A nor B"),
        "form": ((200, '{"choices": []}'), "IndexError"),
        "deep": ((200, "[" * 100_000), "RecursionError"),
    }
    says(["good", *replies, "bad"], ["-", *("-" for _ in replies), "good"])

    def answer(question, number):
        found = [reply for word, (reply, _) in replies.items() if word in shown(question)]
        return found[0] if found else prefers_good(question, number)

    with server(answer) as (url, _):
        summary, pairs = ask(tmp_path, url, num_prompts=7, judge_timeout=3.0)
    assert [p["winner"] for p in pairs] == ["a", *(None for _ in replies), "b"]
    assert summary["unjudged"] == 5 and summary["wins"] == summary["losses"] == 1 and summary["win_rate"] == 0.5
    for p, (_, reason) in zip(pairs[1:], replies.values()):
        assert reason in p["error"]


def test_a_judge_who_is_asked_too_often(tmp_path, says, monkeypatch):
    """It says so, and is asked again after as long as it wants, else after 1, 2, 4, ... seconds; a wrong name stays
    wrong."""
    says(["good", "good"], ["bad", "bad"])
    waits = []

    async def sleep(seconds):
        waits.append(seconds)

    monkeypatch.setattr(compare.asyncio, "sleep", sleep)
    replies = {1: (429, "slow down", "7"), 2: (503, "busy"), 5: (404, "no such judge"), 6: (404, "no such judge")}
    with server(lambda question, number: replies.get(number) or prefers_good(question, number)) as (url, requests):
        _, pairs = ask(tmp_path, url, num_prompts=2, judge_retries=2, judge_concurrency=1)
    assert waits == [7, 2]
    assert pairs[0]["winner"] == "a" and "404" in pairs[1]["error"] and len(requests) == 5


def test_the_key_is_sent_and_kept_nowhere(tmp_path, says, monkeypatch, capfd):
    """Not even where the server repeats it, in an error or an answer, in full or at the end of a long one."""
    replies = [f"I got {KEY}, no letter", (500, "x" * 175 + f"wrong key {KEY}"), (401, f"bad key {KEY}"), "A"]
    monkeypatch.setattr(compare, "KEY", KEY)
    says(["good"] * 4, ["bad"] * 4)
    with server(lambda question, number: replies[number % 4]) as (url, requests):
        with pytest.raises(SystemExit, match=r"wrong key \*\*\*"):
            ask(tmp_path, url, num_prompts=4, judge_concurrency=1)
    assert {headers["Authorization"] for _, headers, _ in requests} == {f"Bearer {KEY}"}
    written = "".join(path.read_text() for path in (tmp_path / "out").iterdir())
    assert "bad key ***" in written and "I got ***" in written
    assert KEY[:10] not in written + "".join(capfd.readouterr())
