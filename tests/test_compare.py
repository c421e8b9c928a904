"""tools/compare.py: it counts right, and no judge can stop the run."""

import asyncio
import json
import re
import sys
from functools import partial

import httpx2
import pytest
from families import save_family
from runs import GOLD, write_rows
from sources import ROOT, load
from transformers import AutoTokenizer

sys.path.insert(0, str(ROOT / "tools"))
compare = load("tools/compare.py", "tools_compare")
KEY = "sk-test-0123456789abcdef"
# What judges say, by the verdict that it is
SAID = {
    "A": """A | (A) | [[A]] | {"winner": "A"} | I would choose A | A: it answers the question | Both are fine.\\nA""",
    "B": """b. | ```json\\n{"answer": "B", "why": "shorter"}\\n``` | **Answer:** B | B. It covers plan A: the film
| <think>Answer: A? No.</think>B""",
    None: """A is dull. B is better than A. | | C | Neither A nor B | A is not better. | A: 7/10, B: 9/10
| <think>Answer: A, since | A film is better""",
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


def test_summary_by_hand():
    """A is the longer one in two of its wins. At the bounds of the interval, the rate is 1.96 standard errors away, the
    error taken there. Differences 1, 3, -1 deviate by 2. Of five pairs two are agreed on."""

    def pair(winner, a="aa", **known):
        return compare.Pair(0, "p", a, "bb", 3, 5, True, False, winner, **known)

    pairs = [pair("a", a="aaa"), pair("a", a="aaaa"), pair("a", score_a=2.0, score_b=1.0)]
    pairs += [pair("tie", score_a=5.0, score_b=2.0), pair("b", score_a=0.0, score_b=1.0), pair(None, error="late")]
    for one, verdicts in zip(pairs, ["AB", "BA", "AA", "BB", "AA"]):
        one.verdicts = list(verdicts)
    wanted = dict(wins=3, ties=1, losses=1, unjudged=1, win_rate=0.7, win_rate_a_not_longer=0.5, eos_share_a=1)
    wanted |= dict(score_difference=1, score_difference_error=2 / 3**0.5, order_disagreement=0.6, first_shown_won=0.6)
    found = compare.summarize(pairs)
    assert {name: found[name] for name in wanted} == {name: pytest.approx(x) for name, x in wanted.items()}


def test_a_policy_against_itself(tmp_path):
    """At temperature 0 all pairs are ties. The folder of another comparison is not overwritten."""
    assert run(tmp_path / "out", other="toy/sft", reward_fn=GOLD)[0]["ties"] == 12
    with pytest.raises(SystemExit, match="out exists"):
        run(tmp_path / "out", other="toy/sft", reward_fn=GOLD)


def test_a_reference_is_the_answer_alone(tmp_path):
    """As a text without its prompt, or as the message behind those of the prompt, and the token that ends it."""
    talk = [{"role": "user", "content": "The film"}, {"role": "assistant", "content": "It is not good."}]
    (tmp_path / "r.py").write_text("def f(completions, **_):\n    return [len(str(text)) for text in completions]\n")
    policy = save_family("llama 3", tmp_path)[0]
    tokenizer = AutoTokenizer.from_pretrained(policy)
    for number, (model, prompt, answer, text) in enumerate([
        ("toy/sft", "The film", "The film It is not good.", " It is not good."),
        (policy, talk[:1], talk, "It is not good."),
    ]):  # fmt: skip
        data = write_rows(tmp_path / "d.jsonl", [{"prompt": prompt, "answer": answer}] * 3)
        settings = dict(model=model, dataset=data, reference_column="answer", reward_fn="r.py:f")
        _, (one, *_) = run(tmp_path / f"out {number}", **settings)
        assert one["b"] == text and one["score_b"] == len(text if model == "toy/sft" else str(talk[1:]))
        assert one["tokens_b"] == len(tokenizer(text, add_special_tokens=False)["input_ids"]) + 1


@pytest.mark.parametrize("letter", SAID)
def test_a_verdict_is_read_from_what_a_judge_says(letter):
    for answer in re.split(r"\s*\|\s?", SAID[letter].replace("\\n", "\n")):
        assert compare.parse_verdict(answer) == letter, answer


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """ask(a_texts, b_texts, judge): the two sides say this. judge(first, second) -> text, (status, body) or "hang" is
    an OpenAI-compatible API. `ask.requests` are those that it got."""

    def use(a, b, judge, **settings):
        texts = iter((a, b))

        def answer_all(policy, rows, *_):
            return [compare.Answer(row["prompt"], text, 1, True) for row, text in zip(rows, next(texts))]

        async def reply(request):
            use.requests.append(request)
            said = judge(*shown(request))
            if said == "hang":
                await asyncio.sleep(40)
            message = {"choices": [{"message": {"role": "assistant", "content": said}}]}
            status, text = said if isinstance(said, tuple) else (200, json.dumps(message))
            return httpx2.Response(status, text=text)

        client = partial(httpx2.AsyncClient, transport=httpx2.MockTransport(reply))
        monkeypatch.setattr(compare, "answer_all", answer_all)
        monkeypatch.setattr(compare.httpx2, "AsyncClient", client)
        api = dict(judge_model="judge-1", judge_retries=0, judge_url="http://judge/v1")
        return run(tmp_path / "out", other="toy/sft", num_prompts=len(a), **api, **settings)

    use.requests = []
    return use


def shown(request):
    """The two answers in a question of the default template."""
    question = json.loads(request.content)["messages"][0]["content"]
    return re.search(r"--- Response A\n(.*?)\n\n--- Response B\n(.*?)\n\n--- End", question, re.S).groups()


def test_the_better_text_wins_from_either_place_and_silent_judges_are_counted(ask):
    """Whoever is good wins, from either place; each pair is asked in both orders, at temperature 0. Of the last pairs
    some end in an error, in silence, in chatter, in replies of another form."""
    replies = {
        "five": ((500, "out of memory"), "HTTP 500: out of memory"),
        "hang": ("hang", "TimeoutError"),
        "form": ((200, '{"choices": []}'), "IndexError"),
    }

    def judge(first, second):
        said = "Answer: A." if "good" in first else "Answer: B." if "good" in second else "Neither."
        return replies.get(first, replies.get(second, [said]))[0]

    a, b = ["a good film", "dull", "same"], ["bad", "one good thing", "same "]  # nobody is asked about the last
    summary, pairs = ask([*a, *replies], [*b, *"---"], judge, judge_timeout=1.0)
    assert [p["winner"] for p in pairs] == ["a", "b", "tie", *[None] * 3] and summary["unjudged"] == 3
    assert [p["verdicts"] for p in pairs[:3]] == [["A", "B"], ["B", "A"], []] and summary["win_rate"] == 0.5
    assert all(reason in p["error"] for p, (_, reason) in zip(pairs[3:], replies.values()))
    assert {str(request.url) for request in ask.requests} == {"http://judge/v1/chat/completions"}
    assert all(json.loads(request.content)["temperature"] == 0 for request in ask.requests)
    assert {shown(request) for request in ask.requests} >= {(a[0], b[0]), (b[0], a[0]), (a[1], b[1]), (b[1], a[1])}


def test_the_key_is_sent_and_kept_nowhere(ask, monkeypatch, capfd, tmp_path):
    """Not even where the server repeats it, in full or at the end of a long answer."""
    replies = {"1": f"I got {KEY}, no letter", "2": (401, f"bad key {KEY}"), "3": (500, "x" * 175 + f"wrong key {KEY}")}
    monkeypatch.setattr(compare, "KEY", KEY)
    with pytest.raises(SystemExit, match=r"wrong key \*\*\*"):
        ask([*replies], [*"---"], lambda first, second: replies.get(first, "A"), judge_concurrency=1)
    written = "".join(path.read_text() for path in (tmp_path / "out").iterdir())
    assert "bad key ***" in written and "I got ***" in written and KEY[:10] not in written + "".join(capfd.readouterr())
    assert {request.headers["Authorization"] for request in ask.requests} == {f"Bearer {KEY}"}
