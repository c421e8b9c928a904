"""benchmarks/winrate.py: it counts right, no judge can stop the run, and nothing stored steers the samples."""

import asyncio
import importlib.util
import json
import re
import shutil
import sys
import threading
import time
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import datasets
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks/winrate.py"
GOLD = "toy/make.py:gold_score"
KEY = "sk-test-0123456789abcdef"


def load():
    """The script as a module; dataclasses look theirs up in sys.modules."""
    spec = importlib.util.spec_from_file_location("winrate", SCRIPT)
    module = sys.modules["winrate"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


winrate = load()


@pytest.fixture(autouse=True)
def at_home(monkeypatch):
    """Paths are relative to the root, and data are read. No test sends a key of this machine, and none asks a proxy."""
    monkeypatch.setattr(datasets, "load_dataset", datasets.load.load_dataset)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(winrate, "KEY", "")
    monkeypatch.setenv("no_proxy", "*")


def write_rows(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(folder, **settings):
    """Compares in this process; returns winrate.json, and pairs.jsonl in the order of the prompts."""
    defaults = dict(device="cpu", num_prompts=12, temperature=0.0, response_length=16, output_dir=str(folder))
    winrate.compare(winrate.Args(**defaults | settings))
    return json.loads((folder / "winrate.json").read_text()), read_pairs(folder)


def read_pairs(folder):
    return sorted(map(json.loads, open(folder / "pairs.jsonl")), key=lambda pair: pair["row"])


@pytest.fixture
def says(monkeypatch):
    """says(a_texts, b_texts): the two sides say this, and nothing is sampled."""

    def use(a, b):
        answers = {"A": a, "B": b}
        monkeypatch.setattr(winrate, "respond", lambda side, *rest: [(t, len(t), True) for t in answers[side.name]])

    return use


def copy_of(name, folder, file, **changes):
    """A copy of a toy model with changes to one of its json files; its path."""
    shutil.copytree(ROOT / "toy" / name, folder)
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | changes))
    return str(folder)


def scaled(folder, factor):
    """The toy policy with its last norm's output scaled: with -1, it takes the least likely tokens."""
    copy_of("sft", folder, "config.json")
    weights = load_file(folder / "model.safetensors")
    weights = {name: w * factor if "ln_f" in name else w for name, w in weights.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


# ---------------------------------------------------------------------------------------------------------------------
# Counting


@pytest.mark.parametrize(
    ("wins", "n", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611),
     (1, 29, 0.0061, 0.1718)],
)  # fmt: skip
def test_wilson_interval_against_published_values(wins, n, low, high):
    """The first from R's prop.test(correct = FALSE), the others from Newcombe 1998, table I, method 3."""
    assert winrate.wilson_interval(wins, n) == pytest.approx((low, high), abs=6e-5)


def test_wilson_interval_is_the_inverted_score_test_and_mirrors():
    """At its bounds the share is 1.96 standard errors away, the error taken at the bound; rounding is no exception."""
    assert winrate.wilson_interval(0, 0) == (0, 1)
    for n in range(1, 60):
        for wins in (half / 2 for half in range(2 * n + 1)):
            low, high = winrate.wilson_interval(wins, n)
            assert 0 <= low <= wins / n <= high <= 1
            assert winrate.wilson_interval(n - wins, n) == pytest.approx((1 - high, 1 - low), abs=1e-12)
            for p in (low, high):
                assert abs(wins / n - p) == pytest.approx(1.959963985 * (p * (1 - p) / n) ** 0.5, abs=1e-7)


def pair(winner, a="aa", b="bb", **known):
    return winrate.Pair(0, "p", a, 3, True, b, 5, False, winner, **known)


def test_summary_by_hand():
    """Three wins, a tie, a loss, one not judged; A is the longer one in two of its wins."""
    pairs = [pair("a", a="aaa"), pair("a", a="aaaa"), pair("a"), pair("tie"), pair("b"), pair(None, error="late")]
    s = winrate.summarize(pairs)
    assert (s["wins"], s["ties"], s["losses"], s["unjudged"], s["pairs"]) == (3, 1, 1, 1, 6)
    assert s["win_rate"] == 3.5 / 5
    assert (s["win_rate_low"], s["win_rate_high"]) == winrate.wilson_interval(3.5, 5)
    assert s["pairs_a_not_longer"] == 3 and s["win_rate_a_not_longer"] == 1.5 / 3
    assert (s["tokens_a"], s["tokens_b"], s["eos_share_a"], s["eos_share_b"]) == (3, 5, 1, 0)
    assert s["characters_a"] == (3 + 4 + 2 * 4) / 6 and s["characters_b"] == 2
    assert s["last_error"] == "late"


def test_scores_and_places_by_hand():
    """Differences 1, 3, -1: deviation 2. Of five pairs two are agreed on, two go to the first, one to the second."""
    scores = {"a": (2.0, 1.0), "tie": (5.0, 2.0), "b": (0.0, 1.0)}
    s = winrate.summarize([pair(w, score_a=a, score_b=b) for w, (a, b) in scores.items()])
    assert (s["score_a"], s["score_b"], s["score_difference"]) == pytest.approx((7 / 3, 4 / 3, 1))
    assert s["score_difference_error"] == pytest.approx(2 / 3**0.5)
    assert winrate.summarize([pair("a", score_a=2.0, score_b=1.0)])["score_difference_error"] is None
    verdicts = [["A", "B"], ["B", "A"], ["A", "A"], ["B", "B"], ["A", "A"]]
    s = winrate.summarize([pair("tie", verdicts=v) for v in verdicts] + [pair("tie")])
    assert s["order_disagreement"] == 3 / 5 and s["first_shown_won"] == 6 / 10


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("A", "A"), ("B", "B"), (" b.\n", "B"), ("(A)", "A"), ("**B**", "B"), ("[[A]]", "A"), ("Answer: B.", "B"),
        ('{"winner": "A"}', "A"), ("```json\n{\"answer\": \"B\", \"why\": \"shorter\"}\n```", "B"), ("answer: b", "B"),
        ("**Answer:** B", "B"), ("The better response is A.", "A"), ("I prefer response B because it ends.", "B"),
        ("I would choose A", "A"), ("Response A is clearly better.", "A"), ("Text B is the better one", "B"),
        ("B. It is more to the point.", "B"), ("A: it answers the question", "A"), ("B - shorter", "B"),
        ("Response B", "B"), ("Both are fine.\nA", "A"), ("A is dull. B is better than A.", None), ("A wins.", "A"),
        ("My first choice: A. But on reflection, answer: B", None), ("Which is better, A or B? Answer: B", None),
        ("<think>Answer: A? No.</think>B", "B"), ("long thoughts, answer: A</think>\n\nB", "B"),
        ("", None), ("C", None), ("Neither.", None), ("Neither A nor B", None), ("A or B", None),
        ("Answer: A or B", None), ("Answer: A/B", None), ("A and B are equally good", None), ("Bananas", None),
        ("A better text would be shorter.", None), ("A is not better.", None), ("A: good\nB: bad", None),
        ("<think>Answer: A, since", None), ("I cannot judge.", None), ("a response that is good", None),
        ("The answer is: A", "A"), ("(B) because it ends", "B"), ("**A** is the better response", "A"),
        ("Verdict - A", "A"), ("I'd go with A", "A"), ("My answer would be 'B'.", "B"), ("B because it ends", "B"),
        ("I prefer (A).", "A"), ("Answer A is good.", None), ("A film is better than no film", None),
        ("The better of A and B? Hard to say", None),
    ],
)  # fmt: skip
def test_parse_verdict(answer, letter):
    assert winrate.parse_verdict(answer) == letter


@pytest.mark.parametrize(
    "piece", [" ", "answer is ", "the ", "answer", "*", "answer: A ", "A. ", "A is ", "<think>", "</think>", "\n", "a:"]
)
def test_a_verdict_takes_time_in_proportion_to_its_length(piece):
    for times in (4_000, 400_000):
        start = time.process_time()
        for text in (f"{piece * times}x", f"answer{piece * times}y", f"x\n{piece * times}"):
            winrate.parse_verdict(text)
        assert time.process_time() - start < 0.5 * max(1, times / 100_000)


# ---------------------------------------------------------------------------------------------------------------------
# Sampling


def test_a_model_against_itself_is_a_tie(tmp_path):
    """At temperature 0 all texts are equal. The first prompts are taken, and only they."""
    summary, pairs = run(tmp_path, other="toy/sft", reward_model="toy/reward_model", batch_size=5)
    assert summary["win_rate"] == 0.5 and summary["ties"] == len(pairs) == 12
    assert all(p["a"] == p["b"] and p["score_a"] == p["score_b"] for p in pairs)
    assert summary["score_difference"] == 0 and summary["eos_share_a"] > 0
    rows = (ROOT / "toy/data/prompts/validation.jsonl").read_text().splitlines()
    assert [p["prompt"] for p in pairs] == [json.loads(row)["prompt"] for row in rows[:12]]


def test_the_sides_are_sampled_apart(tmp_path):
    """At temperature 1 a policy does not repeat itself; the same seed repeats the run, another one does not."""
    settings = dict(other="toy/sft", reward_fn=GOLD, temperature=1.0)
    first, again, other = (run(tmp_path / n, seed=s, **settings)[1] for n, s in (("1", 1), ("2", 1), ("3", 7)))
    assert sum(p["a"] == p["b"] for p in first) < 4
    assert first == again != other


def test_the_better_policy_wins_from_either_side(tmp_path):
    """By a reward that counts the words of the toy world, against a policy that was turned upside down."""
    (tmp_path / "r.py").write_text(
        "def f(completions, **_):\n    words = ('is', 'a', 'It', 'The')\n"
        "    return [sum(w in words for w in x.split()) for x in completions]\n"
    )
    bad, reward = scaled(tmp_path / "bad", -1), f"{tmp_path}/r.py:f"
    s, _ = run(tmp_path / "1", model="toy/sft", other=bad, reward_fn=reward)
    assert s["wins"] == 12 and s["win_rate"] == 1 and s["win_rate_low"] == pytest.approx(12 / (12 + 1.96**2), abs=1e-4)
    assert s["score_a"] > s["score_b"]
    s, _ = run(tmp_path / "2", model=bad, other="toy/sft", reward_fn=reward)
    assert s["losses"] == 12 and s["win_rate"] == 0 and s["score_difference"] < 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stored_generation_settings_are_ignored(tmp_path, temperature):
    """Each of these alone would change the samples of a plain generate()."""
    hostile = {
        "do_sample": True, "temperature": 9.0, "top_k": 1, "top_p": 0.1, "repetition_penalty": 9.0, "max_new_tokens": 2,
        "no_repeat_ngram_size": 1, "min_new_tokens": 16, "suppress_tokens": list(range(2, 900)), "min_p": 0.9,
        "eos_token_id": 5, "pad_token_id": 7, "bad_words_ids": [[300]], "typical_p": 0.2, "stop_strings": [" is"],
    }  # fmt: skip
    model = copy_of("sft", tmp_path / "sft", "generation_config.json", **hostile)
    results = [run(tmp_path / str(i), model=name, other="toy/sft", reward_fn=GOLD, temperature=temperature)[1]
               for i, name in enumerate(("toy/sft", model))]  # fmt: skip
    assert results[0] == results[1]


def test_all_tokens_can_be_drawn():
    """No top-k (50 is the library's default), no top-p: the first tokens of many responses to one prompt."""
    args = winrate.Args(response_length=1, temperature=50.0, batch_size=300)
    side = winrate.load_side("A", "toy/sft", ["The film"] * 300, args)
    assert len({text for text, *_ in winrate.respond(side, 1, args, torch.device("cpu"))}) > 200  # of 3072


@pytest.mark.parametrize("pad_token", ["<|pad|>", None])
def test_batch_size_changes_nothing(tmp_path, pad_token):
    """At temperature 0: left padding is not seen, also where EOS has to stand in for a pad token."""
    model = copy_of("sft", tmp_path / "sft", "tokenizer_config.json", pad_token=pad_token)
    one, five, all_ = (run(tmp_path / str(n), batch_size=n, model=model, other="toy/sft", reward_fn=GOLD)[1]
                       for n in (1, 5, 64))  # fmt: skip
    assert one == five == all_ and len({len(p["prompt"].split()) for p in one}) > 2


def test_responses_end_where_they_end_and_rewards_are_those_of_the_library(tmp_path):
    """Token counts include the stop token, if there is one; then the reward model reads its own EOS."""
    reward_model = copy_of("reward_model", tmp_path / "rm", "tokenizer_config.json", pad_token="<|end|>")
    settings = dict(reward_model=reward_model, response_length=9, temperature=1.0)
    _, pairs = run(tmp_path / "out", other="toy/sft", **settings)
    model = AutoModelForSequenceClassification.from_pretrained("toy/reward_model")
    tokenizer = AutoTokenizer.from_pretrained("toy/reward_model")
    assert {p["ended_a"] for p in pairs} == {True, False}
    for p in pairs:
        for side in "ab":
            text = p["prompt"] + p[side] + tokenizer.eos_token * p[f"ended_{side}"]
            tokens = len(tokenizer(p["prompt"] + p[side])["input_ids"]) - len(tokenizer(p["prompt"])["input_ids"])
            assert p[f"tokens_{side}"] == (tokens + 1 if p[f"ended_{side}"] else 9) and "<|" not in p[side]
            reward = model(**tokenizer(text, return_tensors="pt")).logits.item()
            assert p[f"score_{side}"] == pytest.approx(reward, abs=1e-4)
        assert p["winner"] == ("a" if p["score_a"] > p["score_b"] else "b" if p["score_a"] < p["score_b"] else "tie")


def test_reference_column(tmp_path):
    """The texts of the column are side B as they stand; the reward model reads the end of one that is too long."""
    text = " It is a masterpiece, and it is wonderful, and it is superb from the first minute to the very last one." * 9
    rows = {"prompt": "The film", "completion": text}, {"prompt": "A book", "completion": ""}
    settings = dict(reference_column="completion", reward_model="toy/reward_model", num_prompts=2)
    summary, pairs = run(tmp_path / "out", dataset=write_rows(tmp_path / "d.jsonl", *rows), **settings)
    assert [p["b"] for p in pairs] == [text, ""] and pairs[0]["tokens_b"] > 160 and pairs[0]["ended_b"]
    assert summary["pairs_a_not_longer"] == 1
    model = AutoModelForSequenceClassification.from_pretrained("toy/reward_model")
    ids = AutoTokenizer.from_pretrained("toy/reward_model")(f"The film{text}<|end|>", return_tensors="pt")["input_ids"]
    assert pairs[0]["score_b"] == pytest.approx(model(ids[:, -160:]).logits.item(), abs=1e-4)
    _, rough = run(tmp_path / "bf16", dataset=str(tmp_path / "d.jsonl"), bf16=True, **settings)
    assert 0 < abs(pairs[0]["score_b"] - rough[0]["score_b"]) < 0.2
    side = winrate.load_side("A", "toy/sft", ["A film"], winrate.Args(attn_implementation="eager"))
    assert side.policy.config._attn_implementation == "eager"


def test_chat_messages_go_through_the_template(tmp_path):
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}" \
               "{% if add_generation_prompt %}The{% endif %}" \
               "{% if messages|length > 1 %}{{ raise_exception('one turn') }}{% endif %}"  # fmt: skip
    chat = copy_of("sft", tmp_path / "chat", "tokenizer_config.json", chat_template=template)
    turn = {"role": "user", "content": "Write about a film."}
    data = write_rows(tmp_path / "d.jsonl", {"prompt": [turn]}, {"prompt": [turn]})
    (tmp_path / "r.py").write_text(
        "def f(prompts, completions, **_):\n    assert all(x[-1]['role'] == 'user' for x in prompts)\n"
        "    return [len(turn['content']) for (turn,) in completions if turn['role'] == 'assistant']\n"
    )
    settings = dict(model=chat, dataset=data, reward_fn=f"{tmp_path}/r.py:f")
    _, pairs = run(tmp_path / "out", other=chat, **settings)
    assert [p["prompt"] for p in pairs] == ["user: Write about a film.The"] * 2 and pairs[0]["a"]
    with pytest.raises(winrate.UserError, match="chat_template is not set"):
        run(tmp_path / "out2", other="toy/sft", **settings)
    write_rows(tmp_path / "d.jsonl", {"prompt": [turn, turn]})
    with pytest.raises(winrate.UserError, match="cannot be used for the prompts.*one turn"):
        run(tmp_path / "out3", other=chat, **settings)


# ---------------------------------------------------------------------------------------------------------------------
# A language model as judge


@contextmanager
def server(answer):
    """A stand-in for an OpenAI-compatible API; answer(question, number of the request) -> text, (status, body), "hang"
    or "drip". Yields its address and the list of requests: (path, headers, body)."""
    requests, lock, closing = [], threading.Lock(), threading.Event()

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
            status, text = said if isinstance(said, tuple) else (200, json.dumps(message))
            self.send_response(status)
            if status == 429:
                self.send_header("Retry-After", "7")
            if status == 302:
                self.send_header("Location", text)
            self.end_headers()
            with suppress(OSError):  # the client may have left
                for _ in range(400 if said == "drip" else 0):
                    self.wfile.write(b" ")
                    if closing.wait(0.1):
                        return
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
    """The two responses in a question of the default template."""
    return re.search(r"--- Response A\n(.*?)\n\n--- Response B\n(.*?)\n\n--- End", question, re.S).groups()


def prefers_good(question, number):
    first, second = shown(question)
    return "Answer: A." if "good" in first else "Answer: B." if "good" in second else "Neither."


def ask(folder, url, **settings):
    defaults = dict(other="toy/sft", judge_url=url, judge_model="judge-1", judge_retries=0, judge_timeout=30.0)
    return run(folder, **defaults | settings)


GOOD, BAD = ["a good film", "a good book", "dull", "dull"], ["bad", "worse", "one good thing", "good enough"]


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
    assert {shown(body["messages"][0]["content"]) for *_, body in requests} == {
        places for both in zip(GOOD, BAD) for places in (both, both[::-1])
    }
    assert any(pairs[0]["prompt"] in body["messages"][0]["content"] for *_, body in requests)


@pytest.mark.parametrize(("letter", "share"), [("A", 1), ("B", 0)])
def test_a_judge_that_looks_at_places_alone(tmp_path, says, letter, share):
    says(GOOD, BAD)
    with server(lambda *_: letter) as (url, _):
        summary, pairs = ask(tmp_path, url, num_prompts=4)
    assert summary["ties"] == 4 and summary["win_rate"] == 0.5
    assert summary["order_disagreement"] == 1 and summary["first_shown_won"] == share


def test_a_judge_with_gaps_does_not_stop_the_run(tmp_path, says, capsys):
    """One pair ends in an error 500, one in silence, one in chatter, one in a reply of another form; two are judged."""
    says(["good", "five", "hang", "chat", "form", "bad"], ["-", "-", "-", "-", "-", "good"])

    def answer(question, number):
        if "five" in question:
            return 500, "out of memory \x1b[31m"
        if "form" in question:
            return 200, '{"choices": []}'
        return "hang" if "hang" in question else "Well now." if "chat" in question else prefers_good(question, number)

    with server(answer) as (url, _):
        summary, pairs = ask(tmp_path, url, num_prompts=6, judge_timeout=3.0)
    assert [p["winner"] for p in pairs] == ["a", None, None, None, None, "b"]
    assert summary["unjudged"] == 4 and summary["wins"] == summary["losses"] == 1 and summary["win_rate"] == 0.5
    reasons = "HTTP 500", "TimeoutError", "neither A nor B", "no chat completion: IndexError"
    assert all(reason in p["error"] for p, reason in zip(pairs[1:5], reasons))
    out, err = capsys.readouterr()
    assert "not judged: " in err and "\x1b[31m" not in out + err and "unjudged" in out


DEEP = "[" * 100_000
HOSTILE = {"drip": "TimeoutError", DEEP: "RecursionError", "9" * 5_000: "ValueError",
           f'{{"choices": {DEEP}': "RecursionError", " " * 2**21: "longer than 1 MiB"}  # fmt: skip


@pytest.mark.parametrize("reply", HOSTILE, ids=lambda reply: f"{reply[-10:]}{len(reply)}")
def test_a_hostile_judge_is_left_in_time(tmp_path, says, reply):
    """A reply that drips, is too long, or nests too deeply costs its own pair and no other."""
    says(["good", "hostile"], ["bad", "bad"])

    def answer(question, number):
        if "hostile" in question:
            return reply if HOSTILE[reply] == "TimeoutError" else (200, reply)
        return prefers_good(question, number)

    start = time.monotonic()
    with server(answer) as (url, _):
        _, pairs = ask(tmp_path, url, num_prompts=2, judge_timeout=3.0 if HOSTILE[reply] == "TimeoutError" else 30.0)
        assert time.monotonic() - start < 25
    assert [p["winner"] for p in pairs] == ["a", None] and HOSTILE[reply] in pairs[1]["error"]


def test_retries_wait_and_then_succeed(tmp_path, says, monkeypatch):
    """Errors of the server are tried again after 1, 2, 4 seconds, or as long as it asks for; a wrong name is not."""
    waits = []
    says(["good"], ["bad"])

    async def sleep(seconds, *rest):
        waits.append(seconds) if seconds else await really_sleep(0)

    really_sleep = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", sleep)
    with server(lambda q, n: (503, "busy") if n <= 3 else prefers_good(q, n)) as (url, requests):
        summary, _ = ask(tmp_path / "1", url, num_prompts=1, judge_retries=3)
    assert summary["wins"] == 1 and waits == [1, 2, 4] and len(requests) == 5
    with server(lambda q, n: (503, "busy")) as (url, requests), pytest.raises(SystemExit):
        ask(tmp_path / "2", url, num_prompts=1, judge_retries=2)
    assert len(requests) == 3 and waits == [1, 2, 4, 1, 2]
    with server(lambda q, n: (404, "no such model")) as (url, requests), pytest.raises(SystemExit) as exit_info:
        ask(tmp_path / "3", url, num_prompts=1, judge_retries=2)
    assert len(requests) == 1 and "404" in exit_info.value.code and "no such model" in exit_info.value.code
    waits.clear()
    with server(lambda q, n: (429, "slower") if n == 1 else prefers_good(q, n)) as (url, requests):
        ask(tmp_path / "4", url, num_prompts=1, judge_retries=1)
    assert waits == [7] and len(requests) == 3


def test_pairs_are_asked_side_by_side(tmp_path, says):
    """Four requests meet at a barrier: one at a time they would wait for each other until it breaks."""
    says(GOOD, BAD)
    barrier = threading.Barrier(4, timeout=20)

    def answer(question, number):
        barrier.wait()
        return prefers_good(question, number)

    with server(answer) as (url, _):
        summary, _ = ask(tmp_path, url, num_prompts=4, judge_concurrency=4)
    assert summary["unjudged"] == 0


def test_own_template(tmp_path, says):
    """It is filled in one pass: what a response says in braces stays as it is."""
    says([" good {second} "], ["bad"])
    (tmp_path / "t.txt").write_text("{second} against {first}, about {prompt} {x}")
    with server(lambda q, n: "A" if q.split(" against ")[1].startswith("good") else "B") as (url, requests):
        summary, pairs = ask(tmp_path / "out", url, num_prompts=1, judge_template=str(tmp_path / "t.txt"))
    assert summary["wins"] == 1
    assert [body["messages"][0]["content"] for *_, body in requests] == [
        f"{x}, about {pairs[0]['prompt']} {{x}}" for x in ("bad against good {second}", "good {second} against bad")
    ]


def test_the_key_is_sent_and_kept_nowhere(tmp_path, monkeypatch, capfd):
    """Not even where the server repeats it, in an error or an answer, in full or at the end of a long one."""

    def answer(question, number):
        key_at_the_end = "x" * 175 + f"wrong key {KEY}"
        escaped = '{"choices": [{"message": {"content": "I got ' + "".join(f"\\u{ord(c):04x}" for c in KEY) + '"}}]}'
        return [f"I got {KEY}, no letter", (500, key_at_the_end), (401, f"bad key {KEY}"), (200, escaped)][number % 4]

    monkeypatch.setitem(sys.modules, "winrate", winrate)
    monkeypatch.setenv("OPENAI_API_KEY", f" {KEY}\n")
    with server(answer) as (url, requests):
        line = [
            SCRIPT, "--device", "cpu", "--num-prompts", 9, "--response-length", 8, "--judge-url", url,
            "--judge-model", "m", "--judge-retries", 0, "--judge-concurrency", 1, "--output-dir", tmp_path / "out",
            "--other", scaled(tmp_path / "b", -1),
        ]  # fmt: skip
        monkeypatch.setattr(sys, "argv", list(map(str, line)))
        with suppress(SystemExit):
            load().command_line()
    said = "".join(capfd.readouterr())
    assert {headers["Authorization"] for _, headers, _ in requests} == {f"Bearer {KEY}"}
    written = "".join(path.read_text() for path in (tmp_path / "out").iterdir())
    assert "bad key ***" in written and "I got ***" in written
    for part in (KEY, KEY[:10]):
        assert part not in written + said, part


def test_the_key_does_not_follow_a_redirect(tmp_path, says, monkeypatch):
    monkeypatch.setattr(winrate, "KEY", KEY)
    says(["good"], ["bad"])
    with server(prefers_good) as (there, seen), server(lambda q, n: (302, there)) as (url, requests):
        with pytest.raises(SystemExit):
            ask(tmp_path, url, num_prompts=1)
    assert requests[0][1]["Authorization"] == f"Bearer {KEY}" and not seen


def test_a_judge_that_never_answers(tmp_path, says):
    """Exit code 1, one sentence with the reason; what was sampled is in pairs.jsonl, and the counts in winrate.json."""
    says(["good"] * 4, ["bad"] * 4)
    with server(lambda q, n: "hang") as (url, _), pytest.raises(SystemExit) as exit_info:
        ask(tmp_path, url, num_prompts=4, judge_timeout=0.3)
    assert "not one of 4 pairs was judged" in exit_info.value.code and "TimeoutError" in exit_info.value.code
    assert [p["winner"] for p in read_pairs(tmp_path)] == [None] * 4 and read_pairs(tmp_path)[0]["a"] == "good"
    assert json.loads((tmp_path / "winrate.json").read_text())["unjudged"] == 4


# ---------------------------------------------------------------------------------------------------------------------
# What goes wrong


@pytest.fixture
def error(monkeypatch, capsys, tmp_path):
    """error(*arguments) -> the sentence, having checked that it is one, that the exit code is 2, and no sampling."""

    def sampled(*_):
        raise AssertionError("the mistake should have been found before anything was sampled")

    def call(*arguments, sampling=False):
        if not sampling:
            monkeypatch.setattr(winrate, "respond", sampled)
        given = ["--device", "cpu", "--num-prompts", "4", "--output-dir", tmp_path / "out", *arguments]
        monkeypatch.setattr(sys, "argv", ["winrate.py", *map(str, given)])
        with pytest.raises(SystemExit) as exit_info:
            winrate.command_line()
        err = capsys.readouterr().err.strip()
        assert exit_info.value.code == 2 and "Traceback" not in err, err
        lines = [line for line in err.splitlines() if line.startswith("winrate.py: error: ")]
        assert len(lines) == 1 and err.endswith(lines[0]), err
        return lines[0]

    return call


FAIR = ["--other", "toy/sft", "--reward-fn", GOLD]
JUDGE = ["--other", "toy/sft", "--judge-model", "m", "--judge-url"]
LOCAL = [*JUDGE, "http://localhost:1/v1"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--other", "toy/sft"], "one judge"),
        ([*FAIR, "--reward-model", "toy/reward_model"], "one judge"),
        (["--other", "toy/sft", "--judge-url", "http://localhost:1/v1"], "--judge-model"),
        ([*FAIR, "--judge-model", "m"], "--judge-url"),
        (["--reward-fn", GOLD], "one side B"),
        ([*FAIR, "--reference-column", "completion"], "one side B"),
        ([*JUDGE, "localhost:8000/v1"], "must be like http"),
        ([*JUDGE, "file:///etc/passwd"], "must be like http"),
        ([*JUDGE, "http://"], "must be like http"),
        ([*JUDGE, f"http://user:{KEY}@host/v1"], "OPENAI_API_KEY"),
        ([*JUDGE, f"http://host/v1?key={KEY}"], "OPENAI_API_KEY"),
        ([*FAIR, "--temperature", -1], "--temperature"),
        ([*FAIR, "--temperature", "nan"], "--temperature"),
        ([*FAIR, "--response-length", 0], "--response-length"),
        ([*FAIR, "--num-prompts", 0], "--num-prompts"),
        ([*LOCAL, "--judge-timeout", 0], "--judge-timeout"),
        ([*LOCAL, "--judge-retries", -1], "--judge-retries"),
        ([*FAIR, "--device", "nosuch"], "--device nosuch"),
        ([*FAIR, "--dataset-split", "nosuch"], "'nosuch'"),
        ([*FAIR, "--prompt-column", "question"], "question"),
        (["--reward-fn", GOLD, "--reference-column", "completion"], "completion"),
        ([*FAIR, "--model", "./sfft"], "'./sfft' could not be loaded, as a folder"),
        (["--other", "no/other", "--reward-fn", GOLD], "'no/other' could not be loaded"),
        (["--other", "toy/sft", "--reward-model", "no/judge"], "'no/judge' could not be loaded"),
        (["--other", "toy/sft", "--reward-fn", "no.py:f"], "no.py:f could not be loaded"),
        (["--other", "toy/sft", "--reward-fn", "toy/make.py:f"], "KeyError: 'f'"),
        (["--other", "toy/sft", "--reward-model", "toy/reward_model", "--reward-label", "FINE"], "reward, the labels"),
        ([*LOCAL, "--judge-template", "no.txt"], "no.txt"),
        ([*LOCAL, "--judge-template", "LICENSE"], "LICENSE cannot be used: it lacks {prompt}"),
        ([*FAIR, "--response-length", 159], "toy/sft reads 160"),
        ([*FAIR, "--output-dir", "LICENSE/out"], "cannot be written"),
        ([*FAIR, "--model", "", "--judge-template", ""], "--model, --judge-template must not be empty"),
        ([*FAIR, "--seed", 10**30], "--seed"),
    ],
)  # fmt: skip
def test_mistakes(error, arguments, sentence):
    message = error(*arguments)
    assert sentence in message and KEY not in message, message


@pytest.mark.parametrize("key", [f"{KEY}\x00{KEY}", "sk\u2026"])
def test_a_key_with_characters_that_no_header_can_have(error, monkeypatch, key):
    monkeypatch.setattr(winrate, "KEY", key)
    assert "OPENAI_API_KEY" in (message := error(*LOCAL)) and key not in message


def test_faulty_files(error, tmp_path):
    """An empty file, an empty prompt, a message without a role, weights that are NaN or not those of a policy."""
    (tmp_path / "d.jsonl").write_text("")
    assert "is empty" in error(*FAIR, "--dataset", tmp_path / "d.jsonl")
    data = write_rows(tmp_path / "e.jsonl", {"prompt": "A"}, {"prompt": ""})
    assert "row 1" in error(*FAIR, "--dataset", data)
    assert "not finite" in error(*FAIR, "--model", scaled(tmp_path / "nan", float("nan")))
    data = write_rows(tmp_path / "m.jsonl", {"prompt": [{"role": "user", "content": "A"}, {"content": "B"}]})
    assert "row 0 has a message without a role" in error(*FAIR, "--dataset", data)
    assert "not saved as a GPT2LMHeadModel" in error(*FAIR, "--model", "toy/reward_model")
    assert "not saved as a GPT2ForSeq" in error("--other", "toy/sft", "--reward-model", "toy/sft")


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("return [1.0]", "1 numbers for 2 texts"),
        ("return None", "'NoneType' object is not iterable"),
        ("return {0.0: 1, 1.0: 2}", "it gave a dict; it is to give a list of one number for each text"),
        ("return '10'", "it gave a str; "),
        ("return [None, None]", "not 'NoneType'"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("raise BaseException('enough')", "BaseException: enough"),
    ],
)
def test_faulty_reward_functions(error, tmp_path, body, sentence):
    (tmp_path / "r.py").write_text(f"def f(**_):\n    {body}\n")
    message = error("--other", "toy/sft", "--reward-fn", f"{tmp_path}/r.py:f")
    assert f"the reward {tmp_path}/r.py:f cannot be used: " in message and sentence in message


def test_reward_label_picks_the_column(tmp_path, says):
    """The same classifier judges the other way round by its other label."""
    labels = {"id2label": {"0": "BAD", "1": "GOOD"}, "label2id": {"BAD": 0, "GOOD": 1}}
    judge = copy_of("reward_model", tmp_path / "rm", "config.json", **labels)
    weights = load_file(tmp_path / "rm/model.safetensors")
    weights["score.weight"] = torch.cat([-weights["score.weight"], weights["score.weight"]])
    save_file(weights, tmp_path / "rm/model.safetensors", metadata={"format": "pt"})
    says(GOOD, BAD)
    settings = dict(other="toy/sft", reward_model=judge, num_prompts=4)
    results = [run(tmp_path / label, reward_label=label, **settings)[1] for label in ("BAD", "GOOD")]
    assert [{"a": "b", "b": "a"}[p["winner"]] for p in results[0]] == [p["winner"] for p in results[1]]
    with pytest.raises(winrate.UserError, match="BAD, GOOD"):
        run(tmp_path / "none", **settings)


def test_pickled_weights_are_refused(error, tmp_path):
    copy_of("sft", tmp_path / "sft", "config.json")
    (tmp_path / "sft/model.safetensors").unlink()
    torch.save({}, tmp_path / "sft/pytorch_model.bin")
    assert "safetensors" in error(*FAIR, "--model", tmp_path / "sft")


def test_code_that_comes_with_a_model_is_not_run(error, tmp_path):
    own = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    copy_of("sft", tmp_path / "sft", "config.json", model_type="own", auto_map=own)
    (tmp_path / "sft/own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert "sft" in error(*FAIR, "--model", tmp_path / "sft") and not (tmp_path / "ran").exists()


def test_an_output_folder_in_use(error, tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used/pairs.jsonl").write_text("{}\n")
    assert "is in use" in error(*FAIR, "--output-dir", tmp_path / "used")
    assert (tmp_path / "used/pairs.jsonl").read_text() == "{}\n"


@pytest.mark.parametrize("name", ["pairs.jsonl", "winrate.json"])
def test_results_that_cannot_be_written(error, tmp_path, monkeypatch, name):
    """Since a folder is in the place of the file from when the responses were drawn."""

    def respond(*_):
        shutil.rmtree(tmp_path / "out")
        (tmp_path / "out" / name).mkdir(parents=True)
        return [("x", 1, True)] * 4

    monkeypatch.setattr(winrate, "respond", respond)
    assert f"{name} cannot be written: " in error(*FAIR, sampling=True)


def test_nan_reward_names_the_text_and_keeps_what_was_judged(error, tmp_path, says):
    body = "def f(completions, **_):\n    return [float('nan') if 'bad' in x else 1.0 for x in completions]\n"
    (tmp_path / "r.py").write_text(body)
    says(["x", "y", "bad \x1b[2J"], ["1", "2", "3"])
    message = error(
        "--other", "toy/sft", "--reward-fn", f"{tmp_path}/r.py:f", "--num-prompts", 3, "--batch-size", 1, sampling=True
    )
    assert "r.py:f cannot be used: it is nan for the text" in message and "bad" in message and "\x1b" not in message
    assert [p["winner"] for p in read_pairs(tmp_path / "out")] == ["tie", "tie"]


def test_control_characters_stay_off_the_terminal(tmp_path, says, capsys):
    says(["\x1b]0;owned\x07 [red]x[/red]"], ["plain"])
    _, pairs = run(tmp_path, other="toy/sft", reward_fn=GOLD, num_prompts=1)
    out = capsys.readouterr().out
    assert "\x1b]" not in out and "\x07" not in out and "[red]x[/red]" in out
    assert pairs[0]["a"].startswith("\x1b]0;owned")


def test_every_argument_is_read_and_has_a_sentence():
    source = SCRIPT.read_text()
    for name in winrate.Args.__dataclass_fields__:
        assert re.search(rf"^    {name}: .* = .*  # \w", source, re.M) and f"args.{name}" in source, name


def test_a_reward_function_with_columns(tmp_path):
    """TRL's signature, as in the scripts: all columns, row by row; one that is not there, or not taken, is named. A
    function may change what it is given."""
    rows = [{"prompt": f"The film {i}", "answer": [f"answer {i}"], "n": i} for i in range(6)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "r.py").write_text(
        "def f(prompts, completions, answer, n, **_):\n"
        "    assert all(p == f'The film {i}' and a.pop() == f'answer {i}' for p, a, i in zip(prompts, answer, n))\n"
        "    return [float(len(c)) for c in completions]\n\n\n"
        "def g(completions, solution, **_):\n    return [0.0] * len(completions)\n\n\n"
        "def h(prompts, completions):\n    return [0.0] * len(completions)\n"
    )
    data = dict(dataset=str(tmp_path / "d.jsonl"), dataset_split="train", model="toy/sft", other="toy/sft", num_prompts=6)
    data["temperature"] = 1.0
    _, pairs = run(tmp_path / "out", reward_fn=f"{tmp_path}/r.py:f", batch_size=4, **data)
    assert all(p["score_a"] == len(p["a"]) and p["score_b"] == len(p["b"]) for p in pairs) and len(pairs) == 6
    for name, wrong in (("g", "missing a required .*: 'solution'"), ("h", "unexpected keyword argument 'prompt'")):
        with pytest.raises(winrate.UserError, match=f"r.py:{name} .* is to be f.prompts, comp.*{wrong}.*the data have prompt, answer, n"):
            run(tmp_path / name, reward_fn=f"{tmp_path}/r.py:{name}", **data)
