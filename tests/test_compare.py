"""tools/compare.py: it counts right, and no judge can stop the run."""

import json
import re
import shutil
import sys
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from families import save_family
from runs import GOLD, write_rows
from sources import ROOT, load
from transformers import AutoModelForSequenceClassification, AutoTokenizer

sys.path.insert(0, str(ROOT / "tools"))
compare = load("tools/compare.py", "tools_compare")
KEY = "sk-test-0123456789abcdef"
# What judges say, by the verdict that it is
SAID = {
    "A": 'A | (A) | [[A]] | {"winner": "A"} | The better response is A. | I would choose A | Response A is clearly better. '
    "| A: it answers the question | Both are fine.\nA | A wins. | The answer is: A | **A** is the better response | "
    "Verdict - A | I'd go with A | I prefer (A).",
    "B": 'B |  b.\n | **B** | Answer: B. | ```json\n{"answer": "B", "why": "shorter"}\n``` | answer: b | **Answer:** B | '
    "I prefer response B because it ends. | Text B is the better one | B. It is more to the point. | B - shorter | "
    "Response B | <think>Answer: A? No.</think>B | B. It covers plan A: the film | **B**. In contrast to A: it ends. | "
    "long thoughts, answer: A</think>\n\nB | (B) because it ends | My answer would be 'B'. | B because it ends",
    None: "A is dull. B is better than A. | My first choice: A. But on reflection, answer: B | Which is better, A or B? "
    "Answer: B |  | C | Neither. | Neither A nor B | A or B | Answer: A or B | Answer: A/B | A and B are equally good | "
    "Bananas | A better text would be shorter. | A is not better. | A: 7/10, B: 9/10 | A: short. B: complete. The better "
    "one is B. | A: good\nB: bad | <think>Answer: A, since | I cannot judge. | a response that is good | Answer A is good."
    " | A film is better than no film | The better of A and B? Hard to say",
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Names such as toy/sft are those of the project's folder. No test sends a key, or asks a proxy."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare, "KEY", "")
    monkeypatch.setenv("no_proxy", "*")


def run(folder, **settings):
    """Compares in this process; returns compare.json and the lines of pairs.jsonl in the order of the prompts."""
    defaults = dict(model="toy/sft", device="cpu", num_prompts=12, temperature=0.0, response_length=16)
    compare.compare(compare.Args(**defaults | settings, output_dir=str(folder)))
    pairs = sorted(map(json.loads, open(folder / "pairs.jsonl")), key=lambda pair: pair["row"])
    return json.loads((folder / "compare.json").read_text()), pairs


def pair(winner=None, a="aa", b="bb", **known):
    return compare.Pair(0, "p", a, b, 3, 5, True, False, winner, **known)


def test_wilson_interval_is_the_inverted_score_test():
    """At its bounds the share is 1.96 standard errors away, the error taken at the bound; rounding is no exception."""
    assert compare.wilson_interval(0, 0) == (0, 1)
    for wins, n in ((half / 2, n) for n in range(1, 60) for half in range(2 * n + 1)):
        low, high = compare.wilson_interval(wins, n)
        assert 0 <= low <= wins / n <= high <= 1
        for p in (low, high):
            assert abs(wins / n - p) == pytest.approx(1.959963985 * (p * (1 - p) / n) ** 0.5, abs=1e-7)


def test_summary_by_hand():
    """Three wins, a tie, a loss, one not judged; A is the longer one in two of its wins. Differences of scores 1, 3, -1
    deviate by 2. Of five pairs two are agreed on, two go to the first, one to the second."""
    pairs = [pair("a", a="aaa"), pair("a", a="aaaa"), pair("a"), pair("tie"), pair("b"), pair(None, error="late")]
    for one, one.score_a, one.score_b in zip(pairs[2:5], (2.0, 5.0, 0.0), (1.0, 2.0, 1.0)):
        pass
    for one, verdicts in zip(pairs, ["AB", "BA", "AA", "BB", "AA"]):
        one.verdicts = list(verdicts)
    s = compare.summarize(pairs)
    assert (s["wins"], s["ties"], s["losses"], s["unjudged"], s["pairs"]) == (3, 1, 1, 1, 6)
    assert (s["win_rate"], s["win_rate_low"], s["win_rate_high"]) == (0.7, *compare.wilson_interval(3.5, 5))
    assert s["pairs_a_not_longer"] == 3 and s["win_rate_a_not_longer"] == 1.5 / 3 and s["last_error"] == "late"
    assert (s["tokens_a"], s["tokens_b"], s["eos_share_a"], s["eos_share_b"]) == (3, 5, 1, 0)
    assert s["characters_a"] == (3 + 4 + 2 * 4) / 6 and s["characters_b"] == 2
    assert (s["score_a"], s["score_b"], s["score_difference"]) == pytest.approx((7 / 3, 4 / 3, 1))
    assert s["score_difference_error"] == pytest.approx(2 / 3**0.5)
    assert s["order_disagreement"] == 3 / 5 and s["first_shown_won"] == 6 / 10


def test_the_higher_reward_wins():
    """Not for a text that ends against the same one cut off; without a reward there is no winner."""
    scores = {(2.0, 1.0): "a", (1, 2.0): "b", (1.0, 1.0): "tie", (None, 1.0): None, (1.0, float("inf")): None}
    pairs = [pair(score_a=a, score_b=b) for a, b in scores] + [pair(b="aa", score_a=2.0, score_b=1.0)] * 2
    for one in pairs[:-1]:
        compare.judge_by_reward(one)
    assert [one.winner for one in pairs] == [*scores.values(), "a", "a"]
    assert [bool(one.error) for one in pairs] == [one.winner is None for one in pairs]
    same = compare.Pair(0, "p", "aa", "aa", 3, 3, True, True, score_a=1 + 1e-7, score_b=1.0)
    compare.judge_by_reward(same)
    assert same.winner == "tie"


def test_two_policies(tmp_path):
    """Against itself with a pad token that has no embedding, a policy ties: equal texts do. The folder of another
    comparison, and a policy that plays, are refused."""
    shutil.copytree(ROOT / "toy/sft", "padded")
    tokenizer = AutoTokenizer.from_pretrained("padded")
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    tokenizer.save_pretrained("padded")
    summary, _ = run(tmp_path / "out", other="padded", reward_fn=GOLD)
    assert summary["ties"] == 12 and summary["score_difference"] == 0
    with pytest.raises(SystemExit, match="out exists"):
        run(tmp_path / "out", other="padded", reward_fn=GOLD)
    (tmp_path / "padded/args.json").write_text('{"env": "toy/guess/make.py:Game"}')
    with pytest.raises(SystemExit, match="evaluate.py"):
        run(tmp_path / "other", other="padded", reward_fn=GOLD)


TEXT = " It is not good."
TURNS = [{"role": "user", "content": "The film"}, {"role": "assistant", "content": TEXT.strip()}]
FORMS = {"text": TEXT, "with its prompt": "The film" + TEXT, "message": TURNS[1:], "conversation": TURNS}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("prompt", ["The film", TURNS[:1]], ids=["of a text", "of messages"])
def test_a_reference_is_the_answer_alone(prompt, form, tmp_path):
    """The judge reads it without the prompt; the reward model behind the prompt, up to the token that ends it."""
    is_chat = isinstance(prompt, list)
    policy, reward = save_family("llama 3", tmp_path) if is_chat else ("toy/sft", "toy/reward_model")
    (tmp_path / "r.py").write_text("def f(completions, **_):\n    return [len(str(text)) for text in completions]\n")
    rows = [
        {"prompt": prompt, "answer": FORMS["text" if is_chat and "its" in form else form], "n": n} for n in range(3)
    ]
    settings = dict(model=policy, dataset=write_rows(tmp_path / "d.jsonl", rows), reference_column="answer")
    _, (one, *_) = run(tmp_path / "function", reward_fn="r.py:f", **settings)
    text = TEXT if form in ("text", "with its prompt") else TEXT.strip()
    assert one["b"] == text and one["score_b"] == len(str(TURNS[1:])) if is_chat else len(text)
    _, (one, *_) = run(tmp_path / "model", reward_fn=reward, **settings)
    reward, policy = (ROOT / name if name.startswith("toy") else name for name in (reward, policy))
    tokenizer, model = AutoTokenizer.from_pretrained(policy), AutoModelForSequenceClassification.from_pretrained(reward)
    whole = tokenizer.apply_chat_template(TURNS, tokenize=False) if is_chat else f"The film{text}<|end|>"
    ids = tokenizer(whole, add_special_tokens=False, return_tensors="pt")["input_ids"]
    states = model.base_model(ids).last_hidden_state[0, -1]
    assert one["score_b"] == pytest.approx(model.score(states).item(), abs=1e-4) and one["ended_b"]


WRONG = {
    "ShareGPT": ([{"from": "gpt", "value": "It is."}], "a message has a role and a content"),
    "another prompt": ([{"role": "user", "content": "A book"}, TURNS[1]], "has another prompt"),
    "nothing": (None, "neither a text nor messages"),
}


@pytest.mark.parametrize("what", WRONG)
def test_other_references_are_refused(what, tmp_path):
    reference, reason = WRONG[what]
    rows = [{"prompt": "The film", "chosen": text} for text in (TEXT, reference)]
    settings = dict(dataset=write_rows(tmp_path / "d.jsonl", rows), reward_fn=GOLD)
    with pytest.raises(SystemExit, match=f"row 2 of .*{reason}.*recipes/data.py converts other forms"):
        run(tmp_path / "out", reference_column="chosen", **settings)
    with pytest.raises(SystemExit, match="there is no column 'rejected', only prompt, chosen"):
        run(tmp_path / "out", reference_column="rejected", **settings)


@pytest.mark.parametrize(
    ("answer", "letter"), [(x, letter) for letter, said in SAID.items() for x in said.split(" | ")]
)
def test_parse_verdict(answer, letter):
    assert compare.parse_verdict(answer) == letter


@contextmanager
def server(answer):
    """A stand-in for an OpenAI-compatible API; answer(question, number of the request) -> text, (status, body) or
    "hang". Yields its address and the list of requests: (path, headers, body)."""
    requests = []
    lock, closing = threading.Lock(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                requests.append((self.path, dict(self.headers), body))
                number = len(requests)
            said = answer(body["messages"][0]["content"], number)
            if said == "hang":
                return closing.wait(40)
            message = {"choices": [{"message": {"role": "assistant", "content": said}}]}
            status, text = said if isinstance(said, tuple) else (200, json.dumps(message))
            self.send_response(status)
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


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """ask(a_texts, b_texts, url): the two sides say this, and nothing is sampled."""

    def use(a, b, url, **settings):
        texts = iter((a, b))
        answer = lambda policy, rows, *_: [
            compare.Answer(row["prompt"], x, 1, True) for row, x in zip(rows, next(texts))
        ]
        monkeypatch.setattr(compare, "answer_all", answer)
        settings = dict(judge_model="judge-1", judge_retries=0, judge_timeout=30.0) | settings
        return run(tmp_path / "out", other="toy/sft", judge_url=url, num_prompts=len(a), **settings)

    return use


def prefers_good(question, number):
    """A judge that looks for a word in the two answers of the default template."""
    first, second = shown(question)
    return "Answer: A." if "good" in first else "Answer: B." if "good" in second else "Neither."


def shown(question):
    return re.search(r"--- Response A\n(.*?)\n\n--- Response B\n(.*?)\n\n--- End", question, re.S).groups()


def test_a_judge_with_a_taste(ask):
    """Whoever is good wins, from either place; each pair is asked in both orders, at temperature 0."""
    good, bad = ["a good film", "a good book", "dull", "dull"], ["bad", "worse", "one good thing", "good enough"]
    with server(prefers_good) as (url, requests):
        summary, pairs = ask([*good, "same"], [*bad, "same "], url)  # nobody is asked about the last
    assert [p["winner"] for p in pairs] == ["a", "a", "b", "b", "tie"] and summary["win_rate"] == 0.5
    assert [p["verdicts"] for p in pairs[:4]] == [["A", "B"], ["A", "B"], ["B", "A"], ["B", "A"]]
    assert {path for path, *_ in requests} == {"/v1/chat/completions"} and len(requests) == 8
    assert all(body["temperature"] == 0 and "Authorization" not in headers for _, headers, body in requests)
    places = {places for both in zip(good, bad) for places in (both, both[::-1])}
    assert {shown(body["messages"][0]["content"]) for *_, body in requests} == places


def test_a_judge_with_gaps_does_not_stop_the_run(ask):
    """Of the pairs some end in an error, in silence, in chatter, in replies of another form; two are judged."""
    replies = {
        "five": ((500, "out of memory"), "HTTP 500: out of memory"),
        "hang": ("hang", "TimeoutError"),
        "chat": ("Well now.", "neither A nor B"),
        "form": ((200, '{"choices": []}'), "IndexError"),
        "deep": ((200, "[" * 100_000), "RecursionError"),
    }

    def answer(question, number):
        found = [reply for word, (reply, _) in replies.items() if word in shown(question)]
        return found[0] if found else prefers_good(question, number)

    with server(answer) as (url, _):
        summary, pairs = ask(["good", *replies, "bad"], [*"------", "good"], url, judge_timeout=3.0)
    assert [p["winner"] for p in pairs] == ["a", *[None] * 5, "b"] and summary["unjudged"] == 5
    assert all(reason in p["error"] for p, (_, reason) in zip(pairs[1:], replies.values()))


def test_the_key_is_sent_and_kept_nowhere(ask, monkeypatch, capfd, tmp_path):
    """Not even where the server repeats it, in an error or an answer, in full or at the end of a long one."""
    replies = [f"I got {KEY}, no letter", (500, "x" * 175 + f"wrong key {KEY}"), (401, f"bad key {KEY}"), "A"]
    monkeypatch.setattr(compare, "KEY", KEY)
    with server(lambda question, number: replies[number % 4]) as (url, requests):
        with pytest.raises(SystemExit, match=r"wrong key \*\*\*"):
            ask(["good"] * 4, ["bad"] * 4, url, judge_concurrency=1)
    assert {headers["Authorization"] for _, headers, _ in requests} == {f"Bearer {KEY}"}
    written = "".join(path.read_text() for path in (tmp_path / "out").iterdir())
    assert "bad key ***" in written and "I got ***" in written
    assert KEY[:10] not in written + "".join(capfd.readouterr())
