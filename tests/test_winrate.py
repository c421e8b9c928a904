"""benchmarks/winrate.py: it counts right, no judge can stop the run, and nothing stored steers the samples."""

import ast
import dataclasses
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "benchmarks/winrate.py"
GOLD = "toy/make.py:gold_score"
KEY = "sk-test-0123456789abcdef"


def load_script():
    """The module, under a name of its own: dataclasses look it up in sys.modules."""
    spec = importlib.util.spec_from_file_location("winrate", SCRIPT)
    module = sys.modules["winrate"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


winrate = load_script()


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    """No test sends a key of the machine it runs on, and none asks a proxy."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("no_proxy", "*")


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read_pairs(folder):
    """The lines of pairs.jsonl in the order of the prompts."""
    lines = [json.loads(line) for line in (Path(folder) / "pairs.jsonl").read_text().splitlines()]
    return sorted(lines, key=lambda line: line["row"])


def run(folder, **settings):
    """Compares in this process; returns winrate.json and the pairs."""
    defaults = dict(device="cpu", num_prompts=12, temperature=0.0, response_length=16, output_dir=str(folder))
    winrate.compare(winrate.Args(**defaults | settings))
    return json.loads((Path(folder) / "winrate.json").read_text()), read_pairs(folder)


@pytest.fixture
def says(monkeypatch):
    """says(a_texts, b_texts): the two sides say this, and nothing is sampled."""

    def use(a, b):
        answers = {"A": a, "B": b}
        monkeypatch.setattr(
            winrate, "respond", lambda side, *rest: [winrate.Response(t, len(t), True) for t in answers[side.name]]
        )

    return use


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


def bisect(f, low, high):
    """The point between low and high where the increasing function f is 0."""
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if f(middle) > 0 else (middle, high)
    return low


@pytest.mark.parametrize(("wins", "n"), [(8, 10), (3.5, 7), (1, 200), (99.5, 100), (1, 1)])
def test_wilson_interval_by_inverting_the_score_test(wins, n):
    """The bounds are where the observed share is 1.96 standard errors away, the error taken at the bound itself."""
    share, z = wins / n, 1.959963984540054
    low = bisect(lambda p: z * (p * (1 - p) / n) ** 0.5 - (share - p), 0, share)
    high = bisect(lambda p: (p - share) - z * (p * (1 - p) / n) ** 0.5, share, 1)
    assert winrate.wilson_interval(wins, n) == pytest.approx((low, high), abs=1e-9)


def test_wilson_interval_mirrors_when_the_sides_change_places():
    for wins, n in [(8, 10), (0, 5), (2.5, 9), (50, 50)]:
        low, high = winrate.wilson_interval(wins, n)
        assert winrate.wilson_interval(n - wins, n) == pytest.approx((1 - high, 1 - low), abs=1e-12)
    for n in range(1, 60):  # the picture's error bars must not be negative, not even by rounding
        for wins in range(n + 1):
            low, high = winrate.wilson_interval(wins, n)
            assert 0 <= low <= wins / n <= high <= 1
    assert winrate.wilson_interval(0, 0) == (0, 1)
    assert winrate.wilson_interval(5, 10, confidence=0.99)[0] < winrate.wilson_interval(5, 10)[0]


def pair(winner, a="aa", b="bb", **known):
    return winrate.Pair(0, "p", winrate.Response(a, 3, True), winrate.Response(b, 5, False), winner, **known)


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


def test_paired_difference_by_hand():
    s = winrate.summarize([pair("a", scores=(2.0, 1.0)), pair("a", scores=(5.0, 2.0)), pair("b", scores=(0.0, 1.0))])
    assert (s["score_a"], s["score_b"], s["score_difference"]) == pytest.approx((7 / 3, 4 / 3, 1))
    assert s["score_difference_error"] == pytest.approx(2 / 3**0.5)  # differences 1, 3, -1: deviation 2
    assert winrate.summarize([pair("a", scores=(2.0, 1.0))])["score_difference_error"] is None


def test_position_figures_by_hand():
    """Of four pairs two are agreed on (different letters), one stands with the first shown, one with the second."""
    verdicts = [["A", "B"], ["B", "A"], ["A", "A"], ["B", "B"], ["A", "A"]]
    s = winrate.summarize([pair(winrate.combine_verdicts(*v), verdicts=v) for v in verdicts] + [pair("tie")])
    assert s["order_disagreement"] == 3 / 5 and s["first_shown_won"] == 6 / 10


@pytest.mark.parametrize(
    ("forward", "swapped", "winner"),
    [("A", "B", "a"), ("B", "A", "b"), ("A", "A", "tie"), ("B", "B", "tie"), (None, "A", None), ("A", None, None)],
)
def test_combine_verdicts(forward, swapped, winner):
    assert winrate.combine_verdicts(forward, swapped) == winner


@pytest.mark.parametrize(
    ("answer", "letter"),
    [
        ("A", "A"), ("B", "B"), (" b.\n", "B"), ("(A)", "A"), ("**B**", "B"), ("[[A]]", "A"), ("Answer: B.", "B"),
        ('{"winner": "A"}', "A"), ("```json\n{\"answer\": \"B\", \"why\": \"shorter\"}\n```", "B"), ("answer: b", "B"),
        ("**Answer:** B", "B"), ("The better response is A.", "A"), ("I prefer response B because it ends.", "B"),
        ("I would choose A", "A"), ("Response A is clearly better.", "A"), ("Text B is the better one", "B"),
        ("B. It is more to the point.", "B"), ("A: it answers the question", "A"), ("B - shorter", "B"),
        ("Response B", "B"), ("Both are fine.\nA", "A"), ("A is dull. B is better than A.", "B"), ("A wins.", "A"),
        ("My first choice: A. But on reflection, answer: B", "B"), ("Which is better, A or B? Answer: B", "B"),
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


def test_template_is_filled_in_one_pass():
    """A response that contains a field's name is shown as it is, and braces of the template's own stay."""
    filled = winrate.fill_template('{"q": "{prompt}"} {first} | {second} {x}', "P {second}", "{second}{prompt}", " S ")
    assert filled == '{"q": "P {second}"} {second}{prompt} | S {x}'


# ---------------------------------------------------------------------------------------------------------------------
# Sampling


def test_a_model_against_itself_is_a_tie(tmp_path):
    """At temperature 0 all texts are equal, and equal texts have equal rewards whatever batch they are scored in."""
    summary, pairs = run(tmp_path, other="toy/sft", reward_model="toy/reward_model", batch_size=5)
    assert summary["win_rate"] == 0.5 and summary["ties"] == len(pairs) == 12
    assert all(p["a"] == p["b"] and p["score_a"] == p["score_b"] for p in pairs)
    assert summary["score_difference"] == 0 and summary["eos_share_a"] > 0
    assert (tmp_path / "winrate.png").read_bytes().startswith(b"\x89PNG")


def test_the_sides_are_sampled_apart(tmp_path):
    """At temperature 1 a policy does not repeat itself; the same seed repeats the run, another one does not."""
    settings = dict(other="toy/sft", reward_fn=GOLD, temperature=1.0)
    first, again, other = (run(tmp_path / n, seed=s, **settings)[1] for n, s in (("1", 1), ("2", 1), ("3", 7)))
    assert sum(p["a"] == p["b"] for p in first) < 4
    assert first == again != other


def scaled(folder, factor):
    """The toy policy with its last norm's output scaled: with -1, a policy that takes the least likely tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(ROOT / "toy/sft")
    with torch.no_grad():
        model.transformer.ln_f.weight *= factor
        model.transformer.ln_f.bias *= factor
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / "toy/sft").save_pretrained(folder)
    return str(folder)


def test_the_better_policy_wins_from_either_side(tmp_path):
    """By a reward that counts the words of the toy world, against a policy that was turned upside down."""
    (tmp_path / "r.py").write_text(
        "def stops(texts):\n    return [float(sum(w in ('is', 'a', 'It', 'The') for w in t.split())) for t in texts]\n"
    )
    settings = dict(reward_fn=f"{tmp_path}/r.py:stops")
    bad = scaled(tmp_path / "bad", -1)
    s, pairs = run(tmp_path / "1", model="toy/sft", other=bad, **settings)
    assert s["wins"] == 12 and s["win_rate"] == 1 and s["win_rate_low"] == pytest.approx(12 / (12 + 1.96**2), abs=1e-4)
    assert s["score_a"] > s["score_b"] and all(p["winner"] == "a" for p in pairs)
    s, pairs = run(tmp_path / "2", model=bad, other="toy/sft", **settings)
    assert s["losses"] == 12 and s["win_rate"] == 0 and s["score_difference"] < 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stored_generation_settings_are_ignored(tmp_path, temperature):
    """Each of these alone would change the samples of a plain generate()."""
    hostile = {
        "do_sample": True, "temperature": 9.0, "top_k": 1, "top_p": 0.1, "repetition_penalty": 9.0, "max_new_tokens": 2,
        "no_repeat_ngram_size": 1, "min_new_tokens": 16, "suppress_tokens": list(range(2, 900)), "min_p": 0.9,
        "eos_token_id": 5, "pad_token_id": 7, "bad_words_ids": [[300]], "typical_p": 0.2, "stop_strings": [" is"],
    }  # fmt: skip
    shutil.copytree(ROOT / "toy/sft", tmp_path / "sft")
    (tmp_path / "sft/generation_config.json").write_text(json.dumps(hostile))
    settings = dict(other="toy/sft", reward_fn=GOLD, temperature=temperature)
    _, plain = run(tmp_path / "1", **settings)
    _, pairs = run(tmp_path / "2", model=str(tmp_path / "sft"), **settings)
    assert [p["a"] for p in pairs] == [p["a"] for p in plain]


def test_all_tokens_can_be_drawn():
    """No top-k (50 is the library's default), no top-p: the first tokens of many responses to one prompt."""
    side = winrate.load_side("A", "toy/sft", ["The film"] * 300, winrate.Args())
    args = winrate.Args(response_length=1, temperature=50.0, batch_size=300)
    texts = {response.text for response in winrate.respond(side, 1, args, torch.device("cpu"))}
    assert len(texts) > 200  # of 3072 nearly equally likely ones


@pytest.mark.parametrize("pad_token", ["<|pad|>", None])
def test_batch_size_changes_nothing(tmp_path, pad_token):
    """At temperature 0: left padding is not seen, also where EOS has to stand in for a pad token."""
    shutil.copytree(ROOT / "toy/sft", tmp_path / "sft")
    config = json.loads((tmp_path / "sft/tokenizer_config.json").read_text()) | {"pad_token": pad_token}
    (tmp_path / "sft/tokenizer_config.json").write_text(json.dumps(config))
    settings = dict(model=str(tmp_path / "sft"), other="toy/sft", reward_model="toy/reward_model")
    results = [run(tmp_path / str(n), batch_size=n, **settings)[1] for n in (1, 5, 64)]
    texts = [[(p["a"], p["tokens_a"], p["ended_a"]) for p in pairs] for pairs in results]
    assert texts[0] == texts[1] == texts[2] and len({len(p["prompt"].split()) for p in results[0]}) > 2
    scores = [[p["score_a"] for p in pairs] for pairs in results]
    for other in scores[1:]:
        assert scores[0] == pytest.approx(other, abs=1e-4)


def test_responses_end_where_they_end(tmp_path):
    """Token counts have the stop token in them; cut-off responses have none, and are of full length."""
    _, pairs = run(tmp_path, other="toy/sft", reward_fn=GOLD, response_length=9)
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/sft")
    assert {p["ended_a"] for p in pairs} == {True, False}
    for p in pairs:
        assert p["tokens_a"] == len(tokenizer(p["a"])["input_ids"]) + p["ended_a"]
        assert p["ended_a"] or p["tokens_a"] == 9
        assert "<|" not in p["a"]


def test_rewards_are_those_of_the_library(tmp_path):
    """Prompt + response + EOS where there is one, read by the library's own class, row by row."""
    _, pairs = run(tmp_path, other="toy/sft", reward_model="toy/reward_model", response_length=9, temperature=1.0)
    model = AutoModelForSequenceClassification.from_pretrained(ROOT / "toy/reward_model")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/reward_model")
    assert {p["ended_a"] for p in pairs} == {True, False}
    for p in pairs:
        for side in "ab":
            text = p["prompt"] + p[side] + tokenizer.eos_token * p[f"ended_{side}"]
            reward = model(**tokenizer(text, return_tensors="pt")).logits.item()
            assert p[f"score_{side}"] == pytest.approx(reward, abs=1e-4)
        assert p["winner"] == ("a" if p["score_a"] > p["score_b"] else "b" if p["score_a"] < p["score_b"] else "tie")


def test_reference_column(tmp_path):
    """The texts of the column are side B as they stand, and are not cut to the response length."""
    text = (
        " It is a masterpiece, and it is wonderful, and it is superb from the first minute to the very last one of all."
    )
    data = write_rows(
        tmp_path / "d.jsonl", [{"prompt": "The film", "completion": text}, {"prompt": "A book", "completion": ""}]
    )
    summary, pairs = run(
        tmp_path / "out", dataset=data, dataset_split="train", reference_column="completion", reward_fn=GOLD
    )
    assert [p["b"] for p in pairs] == [text, ""] and pairs[0]["winner"] == "b"
    assert pairs[0]["tokens_b"] > 20 and summary["pairs_a_not_longer"] == 1 and pairs[0]["ended_b"]


def test_chat_messages_go_through_the_template(tmp_path):
    policy, tokenizer = tmp_path / "chat", AutoTokenizer.from_pretrained(ROOT / "toy/sft")
    shutil.copytree(ROOT / "toy/sft", policy)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}The{% endif %}"
        "{% if messages|length > 1 %}{{ raise_exception('one turn') }}{% endif %}"
    )
    tokenizer.save_pretrained(policy)
    turn = {"role": "user", "content": "Write about a film."}
    data = write_rows(tmp_path / "d.jsonl", [{"prompt": [turn]}, {"prompt": [turn]}])
    settings = dict(model=str(policy), dataset=data, dataset_split="train", reward_fn=GOLD)
    _, pairs = run(tmp_path / "out", other=str(policy), **settings)
    assert [p["prompt"] for p in pairs] == ["user: Write about a film.The"] * 2 and pairs[0]["a"]
    with pytest.raises(winrate.UserError, match="no chat template"):
        run(tmp_path / "out2", other="toy/sft", **settings)
    data = write_rows(tmp_path / "d2.jsonl", [{"prompt": [turn, turn]}])
    with pytest.raises(winrate.UserError, match="chat template.*one turn"):
        run(tmp_path / "out3", other=str(policy), **settings | {"dataset": data})


def test_bf16_and_attention(tmp_path):
    """Both reach the model: near the same rewards in bfloat16, and attention by the named implementation."""
    data = write_rows(
        tmp_path / "d.jsonl", [{"prompt": "The film", "completion": " is a wonderful and warm story."}] * 2
    )
    settings = dict(dataset=data, dataset_split="train", reference_column="completion", reward_model="toy/reward_model")
    _, plain = run(tmp_path / "1", **settings)
    _, pairs = run(tmp_path / "2", bf16=True, **settings)
    assert 0 < abs(pairs[0]["score_b"] - plain[0]["score_b"]) < 0.2
    side = winrate.load_side("A", "toy/sft", ["A film"], winrate.Args(attn_implementation="eager"))
    assert side.policy.config._attn_implementation == "eager"


def test_only_the_first_prompts_are_taken(tmp_path):
    rows = [json.loads(line) for line in open(ROOT / "toy/data/prompts/validation.jsonl")]
    _, pairs = run(tmp_path, other="toy/sft", reward_fn=GOLD, num_prompts=3)
    assert [p["prompt"] for p in pairs] == [row["prompt"] for row in rows[:3]]


# ---------------------------------------------------------------------------------------------------------------------
# A language model as judge


@contextmanager
def server(answer):
    """A stand-in for an OpenAI-compatible API; answer(question, number of the request) -> text, or (status, body).

    Yields its address and the list of requests: (path, headers, body).
    """
    requests, lock, closing = [], threading.Lock(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                requests.append((self.path, dict(self.headers), body))
                number = len(requests)
            said = answer(body["messages"][0]["content"], number)
            if said == "hang":
                closing.wait(20)
                return
            status, text = said if isinstance(said, tuple) else (200, None)
            reply = {"choices": [{"message": {"role": "assistant", "content": said}}]} if text is None else text
            self.send_response(status)
            if status == 429:
                self.send_header("Retry-After", "7")
            if status == 302:
                self.send_header("Location", text)
            self.end_headers()
            self.wfile.write(reply.encode() if isinstance(reply, str) else json.dumps(reply).encode())

        def do_GET(self):
            requests.append((self.path, dict(self.headers), None))
            self.send_response(404)
            self.end_headers()

        def log_message(self, *args):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
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
    defaults = dict(other="toy/sft", judge_url=url, judge_model="judge-1", judge_retries=0, judge_timeout=5.0)
    return run(folder, **defaults | settings)


GOOD, BAD = ["a good film", "a good book", "dull", "dull"], ["bad", "worse", "one good thing", "good enough"]


def test_a_judge_with_a_taste(tmp_path, says):
    """Whoever is good wins, from either place; each pair is asked in both orders, at temperature 0."""
    says(GOOD, BAD)
    with server(prefers_good) as (url, requests):
        summary, pairs = ask(tmp_path, url, num_prompts=4)
    assert [p["winner"] for p in pairs] == ["a", "a", "b", "b"] and summary["win_rate"] == 0.5
    assert [p["verdicts"] for p in pairs] == [["A", "B"], ["A", "B"], ["B", "A"], ["B", "A"]]
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


def test_equal_texts_are_a_tie_that_nobody_is_asked_about(tmp_path, says):
    says(["same", "good"], ["same ", "bad"])
    with server(prefers_good) as (url, requests):
        summary, pairs = ask(tmp_path, url, num_prompts=2)
    assert [p["winner"] for p in pairs] == ["tie", "a"] and len(requests) == 2


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
        summary, pairs = ask(tmp_path, url, num_prompts=6, judge_timeout=0.5)
    assert [p["winner"] for p in pairs] == ["a", None, None, None, None, "b"]
    assert summary["unjudged"] == 4 and summary["wins"] == summary["losses"] == 1 and summary["win_rate"] == 0.5
    for p, reason in zip(pairs[1:5], ("HTTP 500", "time", "neither A nor B", "no chat completion")):
        assert reason in p["error"].lower() or reason in p["error"], p["error"]
    out, err = capsys.readouterr()
    assert "4 of 6 pairs were not judged" in " ".join(out.split()) and summary["last_error"].split()[0] in out
    assert "the run goes on" in err and "\x1b[31m" not in out + err


def test_retries_wait_and_then_succeed(tmp_path, says, monkeypatch):
    """Errors of the server are tried again after 1, 2, 4 seconds, or as long as it asks for; a wrong name is not."""
    waits = []
    says(["good"], ["bad"])
    monkeypatch.setattr(winrate.time, "sleep", waits.append)
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
    barrier = threading.Barrier(4, timeout=5)

    def answer(question, number):
        barrier.wait()
        return prefers_good(question, number)

    with server(answer) as (url, _):
        summary, _ = ask(tmp_path, url, num_prompts=4, judge_concurrency=4)
    assert summary["unjudged"] == 0


def test_own_template(tmp_path, says):
    says(["good"], ["bad"])
    (tmp_path / "t.txt").write_text("{second} against {first}, about {prompt}")
    with server(lambda q, n: "A" if q.split(" against ")[1].startswith("good") else "B") as (url, requests):
        summary, pairs = ask(tmp_path / "out", url, num_prompts=1, judge_template=str(tmp_path / "t.txt"))
    assert summary["wins"] == 1
    assert [body["messages"][0]["content"] for *_, body in requests] == [
        f"{x} about {pairs[0]['prompt']}" for x in ("bad against good,", "good against bad,")
    ]


def command(*arguments, key=None):
    """The script as a process of its own; returns it when it has ended."""
    env = {k: v for k, v in os.environ.items() if k != "OPENAI_API_KEY"} | ({"OPENAI_API_KEY": key} if key else {})
    line = [sys.executable, SCRIPT, "--device", "cpu", "--num-prompts", "4", "--response-length", "8", *arguments]
    return subprocess.run(list(map(str, line)), cwd=ROOT, capture_output=True, text=True, env=env | {"no_proxy": "*"})


def test_the_key_is_sent_and_kept_nowhere(tmp_path):
    """Not even where the server repeats it, in an error or an answer, in full or at the end of a long one."""

    def answer(question, number):
        key_at_the_end = "x" * 175 + f"wrong key {KEY}"
        return [f"I got {KEY}, no letter", (500, key_at_the_end), (401, f"bad key {KEY}"), "A"][number % 4]

    with server(answer) as (url, requests):
        process = command(
            "--other", scaled(tmp_path / "b", -1), "--judge-url", url, "--judge-model", "m", "--judge-retries", 0,
            "--judge-concurrency", 1, "--num-prompts", 9, "--output-dir", tmp_path / "out", key=f" {KEY}\n",
        )  # fmt: skip
    assert {headers["Authorization"] for _, headers, _ in requests} == {f"Bearer {KEY}"}
    written = "".join(path.read_bytes().decode("latin-1") for path in (tmp_path / "out").iterdir())
    assert "bad key ***" in written and "I got ***" in written
    for part in (KEY, KEY[:10]):
        assert part not in written + process.stdout + process.stderr, part


def test_the_key_does_not_follow_a_redirect(tmp_path, says, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    says(["good"], ["bad"])
    with server(prefers_good) as (there, seen), server(lambda q, n: (302, there)) as (url, requests):
        with pytest.raises(SystemExit):
            ask(tmp_path, url, num_prompts=1)
    assert requests[0][1]["Authorization"] == f"Bearer {KEY}" and len(seen) == 1
    assert not [headers for _, headers, _ in seen if "Authorization" in headers]


def test_a_judge_that_never_answers(tmp_path):
    """Exit code 1, one sentence with the reason; what was sampled is in pairs.jsonl, and the counts in winrate.json."""
    with server(lambda q, n: "hang") as (url, _):
        process = command(
            "--other", scaled(tmp_path / "b", -1), "--judge-url", url, "--judge-model", "m", "--judge-retries", 0,
            "--judge-timeout", 0.3, "--output-dir", tmp_path / "out",
        )  # fmt: skip
    assert process.returncode == 1 and "Traceback" not in process.stderr, process.stderr
    last = process.stderr.strip().splitlines()[-1]
    assert "not one of 4 pairs was judged" in last and "timed out" in last.lower()
    assert [p["winner"] for p in read_pairs(tmp_path / "out")] == [None] * 4 and read_pairs(tmp_path / "out")[0]["a"]


def test_the_example_from_the_root(tmp_path):
    """As the README would have it; and from another folder the paths are still found."""
    arguments = ("--model", "toy/sft", "--other", "toy/sft", "--reward-model", "toy/reward_model", "--dataset",
                 "toy/data/prompts", "--temperature", 0)  # fmt: skip
    process = command(*arguments, "--output-dir", tmp_path / "out")
    assert process.returncode == 0, process.stderr
    assert "50.0 % [15.0, 85.0]" in process.stdout and {p.name for p in (tmp_path / "out").iterdir()} == {
        "pairs.jsonl", "winrate.json", "winrate.png"
    }  # fmt: skip


def test_paths_are_found_under_the_root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    winrate.compare(winrate.Args(device="cpu", other="toy/sft", reward_fn=GOLD, num_prompts=2, temperature=0.0))
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("winrate__") and json.loads((folder / "winrate.json").read_text())["ties"] == 2


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


FAIR = ("--other", "toy/sft", "--reward-fn", GOLD)
JUDGE = ("--other", "toy/sft", "--judge-url", "http://localhost:1/v1", "--judge-model", "m")


def test_one_judge(error):
    assert "needs one judge" in (message := error("--other", "toy/sft")) and "none" in message
    message = error(*FAIR, "--reward-model", "toy/reward_model")
    assert "--reward-model and --reward-fn" in message
    assert "--judge-model" in error("--other", "toy/sft", "--judge-url", "http://localhost:1/v1")
    assert "--judge-model" in error(*FAIR, "--judge-model", "m")


def test_one_other_side(error):
    assert "neither is given" in error("--reward-fn", GOLD)
    assert "both are given" in error(*FAIR, "--reference-column", "completion")


@pytest.mark.parametrize("url", ["localhost:8000/v1", "file:///etc/passwd", "ftp://host/v1", "http://"])
def test_judge_url_of_another_kind(error, url):
    assert repr(url) in error("--other", "toy/sft", "--judge-url", url, "--judge-model", "m")


@pytest.mark.parametrize("url", [f"http://user:{KEY}@host/v1", f"http://host/v1?key={KEY}"])
def test_a_secret_in_the_judge_url(error, url):
    message = error("--other", "toy/sft", "--judge-url", url, "--judge-model", "m")
    assert "OPENAI_API_KEY" in message and KEY not in message


@pytest.mark.parametrize("key", [f"{KEY}\x00{KEY}", "sk\u2026"])
def test_a_key_with_characters_that_no_header_can_have(error, monkeypatch, key):
    monkeypatch.setattr(winrate, "api_key", lambda: key)
    assert "OPENAI_API_KEY" in (message := error(*JUDGE)) and key not in message


def test_missing_columns(error, tmp_path):
    data = write_rows(tmp_path / "d.jsonl", [{"question": "Why?", "answer": "So."}])
    place = ("--dataset", data, "--dataset-split", "train")
    message = error(*FAIR, *place)
    assert "'prompt'" in message and "question, answer" in message and "--prompt-column" in message
    message = error("--reward-fn", GOLD, *place, "--prompt-column", "question", "--reference-column", "completion")
    assert "'completion'" in message and "question, answer" in message and "--reference-column" in message


def test_empty_dataset_and_empty_prompt(error, tmp_path):
    (tmp_path / "d.jsonl").write_text("")
    assert "empty" in error(*FAIR, "--dataset", tmp_path / "d.jsonl")
    data = write_rows(tmp_path / "e.jsonl", [{"prompt": "A"}, {"prompt": ""}])
    assert "row 1" in error(*FAIR, "--dataset", data, "--dataset-split", "train")
    assert "'nosuch'" in error(*FAIR, "--dataset-split", "nosuch")


@pytest.mark.parametrize("text", ["{prompt} {first}", "{first} {second}", "plain"])
def test_template_without_its_fields(error, tmp_path, text):
    (tmp_path / "t.txt").write_text(text)
    message = error(*JUDGE, "--judge-template", tmp_path / "t.txt")
    missing = [field for field in ("{prompt}", "{first}", "{second}") if field not in text]
    assert f"lacks {' and '.join(missing)};" in message
    assert "no.txt" in error(*JUDGE, "--judge-template", tmp_path / "no.txt")


def test_models_out_of_reach(error):
    assert "'no/such'" in error(*FAIR, "--model", "no/such")
    assert "'no/other'" in error("--other", "no/other", "--reward-fn", GOLD)
    assert "'no/judge'" in error("--other", "toy/sft", "--reward-model", "no/judge")
    assert "no.py" in error("--other", "toy/sft", "--reward-fn", "no.py:f")


def test_pickled_weights_are_refused(error, tmp_path):
    shutil.copytree(ROOT / "toy/sft", tmp_path / "sft")
    (tmp_path / "sft/model.safetensors").unlink()
    torch.save({}, tmp_path / "sft/pytorch_model.bin")
    assert "safetensors" in error(*FAIR, "--model", tmp_path / "sft")


def test_code_that_comes_with_a_model_is_not_run(error, tmp_path):
    shutil.copytree(ROOT / "toy/sft", tmp_path / "sft")
    config = json.loads((tmp_path / "sft/config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (tmp_path / "sft/config.json").write_text(json.dumps(config))
    (tmp_path / "sft/own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert "sft" in error(*FAIR, "--model", tmp_path / "sft") and not (tmp_path / "ran").exists()


def test_beyond_the_context(error):
    message = error(*FAIR, "--response-length", 159)
    assert "159" in message and "160" in message


def test_weights_that_are_not_finite(error, tmp_path):
    assert "not finite" in error(*FAIR, "--model", scaled(tmp_path / "nan", float("nan")))


def test_label_that_the_classifier_does_not_have(error, tmp_path):
    model = AutoModelForSequenceClassification.from_pretrained(
        ROOT / "toy/reward_model", num_labels=2, id2label={0: "BAD", 1: "GOOD"}, ignore_mismatched_sizes=True
    )
    model.save_pretrained(tmp_path / "rm")
    AutoTokenizer.from_pretrained(ROOT / "toy/reward_model").save_pretrained(tmp_path / "rm")
    judge = ("--other", "toy/sft", "--reward-model", tmp_path / "rm")
    assert "BAD, GOOD" in error(*judge) and "BAD, GOOD" in error(*judge, "--reward-label", "FINE")


def test_reward_label_picks_the_column(tmp_path, says):
    """The same classifier judges the other way round by its other label."""
    model = AutoModelForSequenceClassification.from_pretrained(
        ROOT / "toy/reward_model", num_labels=2, id2label={0: "BAD", 1: "GOOD"}, ignore_mismatched_sizes=True
    )
    with torch.no_grad():
        model.score.weight[1] = torch.arange(80) / 80 - 0.5
        model.score.weight[0] = -model.score.weight[1]
    model.save_pretrained(tmp_path / "rm")
    AutoTokenizer.from_pretrained(ROOT / "toy/reward_model").save_pretrained(tmp_path / "rm")
    says(GOOD, BAD)
    results = [run(tmp_path / x, other="toy/sft", reward_model=str(tmp_path / "rm"), reward_label=x, num_prompts=4)[1]
               for x in ("BAD", "GOOD")]  # fmt: skip
    assert [{"a": "b", "b": "a"}[p["winner"]] for p in results[0]] == [p["winner"] for p in results[1]]


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--temperature", -1), ("--response-length", 0), ("--batch-size", 0), ("--num-prompts", 0), ("--judge-timeout", 0),
     ("--judge-retries", -1), ("--judge-concurrency", 0)],
)  # fmt: skip
def test_numbers_out_of_range(error, flag, value):
    message = error(*FAIR, flag, value)
    assert flag in message and str(value) in message


def test_unknown_device(error):
    assert "nosuch" in error(*FAIR, "--device", "nosuch")


def test_an_output_folder_in_use_and_one_that_cannot_be_written(error, tmp_path):
    (tmp_path / "used").mkdir()
    (tmp_path / "used/pairs.jsonl").write_text("{}\n")
    assert "already holds" in error(*FAIR, "--output-dir", tmp_path / "used")
    (tmp_path / "file").write_text("")
    assert "cannot be written" in error(*FAIR, "--output-dir", tmp_path / "file/out")
    assert (tmp_path / "used/pairs.jsonl").read_text() == "{}\n"


def test_a_wrong_reward_function_is_found_at_once(error, tmp_path):
    (tmp_path / "r.py").write_text("def one(texts):\n    return [1.0]\n")
    assert "1 scores for 2 texts" in error("--other", "toy/sft", "--reward-fn", f"{tmp_path}/r.py:one")


def test_nan_reward_names_the_text_and_keeps_what_was_judged(error, tmp_path, says):
    (tmp_path / "r.py").write_text("def f(texts):\n    return [float('nan') if 'bad' in t else 1.0 for t in texts]\n")
    says(["x", "y", "bad \x1b[2J"], ["1", "2", "3"])
    message = error(
        "--other", "toy/sft", "--reward-fn", f"{tmp_path}/r.py:f", "--num-prompts", 3, "--batch-size", 1, sampling=True
    )
    assert "nan for the text" in message and "bad" in message and "\x1b" not in message
    assert [p["winner"] for p in read_pairs(tmp_path / "out")] == ["tie", "tie"]


def test_control_characters_stay_off_the_terminal(tmp_path, says, capsys):
    says(["\x1b]0;owned\x07 [red]x[/red]"], ["plain"])
    _, pairs = run(tmp_path, other="toy/sft", reward_fn=GOLD, num_prompts=1)
    out = capsys.readouterr().out
    assert "\x1b]" not in out and "\x07" not in out and "[red]x[/red]" in out
    assert pairs[0]["a"].startswith("\x1b]0;owned")


# ---------------------------------------------------------------------------------------------------------------------
# The file


def definitions(path):
    """Top-level functions and classes of a script: name -> (node, source)."""
    source = path.read_text()
    return {
        node.name: (node, ast.get_source_segment(source, node))
        for node in ast.parse(source).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }


def test_same_name_same_text_as_in_ppo():
    ours, theirs = definitions(SCRIPT), definitions(ROOT / "ppo.py")
    shared = set(ours) & set(theirs) - {"Args", "check_args"}
    assert len(shared) >= 15
    assert not [name for name in shared if ours[name][1] != theirs[name][1]]


def test_the_script_is_one_to_read():
    """Functions fit a screen and say what they do, every argument is read and has a sentence, no line is too long."""
    tree = ast.parse(SCRIPT.read_text())
    assert max(map(len, SCRIPT.read_text().splitlines())) <= 120
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno < 60, node.name
    for name, (node, _) in definitions(SCRIPT).items():
        assert name == "Args" or ast.get_docstring(node), name
    read = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
    assert {f.name for f in dataclasses.fields(winrate.Args)} <= read
    body = definitions(SCRIPT)["Args"][0].body
    for field, sentence in zip(body[::2], body[1::2], strict=True):
        assert isinstance(field, ast.AnnAssign) and isinstance(sentence, ast.Expr), ast.unparse(field)
