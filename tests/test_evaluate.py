"""tools/evaluate.py, and tools/chat.py: numbers by hand, rewards as in training, wrong inputs in one sentence."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from families import FAMILIES, save_family
from runs import run as train
from runs import write_rows
from sources import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(ROOT / "tools"))
import evaluate  # noqa: E402

import agent  # noqa: E402
import ppo  # noqa: E402

GOLD = "toy/gold_score.py:gold_score"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Names such as toy/sft are those of the project's folder wherever one is."""
    monkeypatch.chdir(tmp_path)


def run(model="toy/sft", **settings):
    defaults = dict(device="cpu", num_prompts=6, response_length=16)
    return evaluate.evaluate(evaluate.Args(model, **defaults | settings))


def main(monkeypatch, *words):
    """Runs the tool; the lines of answers.jsonl."""
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, words), "--device", "cpu", "--output-dir", "out"])
    evaluate.main()
    return [json.loads(line) for line in Path("out/answers.jsonl").read_text("utf-8").splitlines()]


def other_policy(name, folder):
    """A toy policy that is a little different; its path."""
    policy = AutoModelForCausalLM.from_pretrained(ROOT / name)
    with torch.no_grad():
        policy.transformer.ln_f.weight.mul_(0.8)
    policy.save_pretrained(folder)
    AutoTokenizer.from_pretrained(ROOT / name).save_pretrained(folder)
    return str(folder)


def assert_kl(row, models, tokenizer, temperature):
    """Against one text at a time, without padding: k1 and k3 over what the policy wrote, which is not in «»."""
    parts = [tokenizer(part)["input_ids"] for part in re.split("[«»]", row["response"])]
    written = torch.tensor([i % 2 == 0 for i, part in enumerate(parts) for _ in part])
    response = sum(parts, [])
    ids = torch.tensor([tokenizer(row["prompt"])["input_ids"] + response])
    if written.sum() != row["response_length"]:
        return False  # a sampled text may be cut otherwise when it is read again
    logits = [model(ids).logits[0, -len(response) - 1 : -1] / temperature for model in models]
    first, second = (x.log_softmax(1)[torch.arange(len(response)), response] for x in logits)
    difference = (first - second)[written]
    assert row["kl"] == pytest.approx(difference.sum().item(), abs=1e-4)
    assert row["kl_k3"] == pytest.approx((torch.exp(-difference) - 1 + difference).sum().item(), abs=1e-4)
    return True


def test_kl_by_hand(tmp_path):
    """At the temperature of the sampling."""
    other = other_policy("toy/sft", tmp_path / "other")
    _, answers = run(other, reference="toy/sft", temperature=0.5, batch_size=4)
    tokenizer = AutoTokenizer.from_pretrained(other)
    models = [AutoModelForCausalLM.from_pretrained(name) for name in (other, ROOT / "toy/sft")]
    texts = [row | {"response": row["response"] + tokenizer.eos_token * int(row["eos_share"])} for row in answers]
    assert sum(assert_kl(row, models, tokenizer, 0.5) for row in texts) > 2


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_means_and_groups(batch_size, tmp_path):
    """A reward function sees all answers to a prompt at once, however many are sampled at once. Their mean counts, but
    for those of which it says nothing (of n = 1 the second, of n = 3 both); the standard error is over prompts."""
    (tmp_path / "r.py").write_text(
        "def f(n, **_):\n"
        "    places = [n[:i].count(x) for i, x in enumerate(n)]\n"
        "    return [None if x == 3 or x == 1 and i else x * 10 + i for x, i in zip(n, places)]\n"
    )
    data = write_rows(tmp_path / "d.jsonl", [{"prompt": "The film", "n": n} for n in range(4)])
    summary, answers = run(dataset=data, reward_fn=("r.py:f",), num_generations=2, batch_size=batch_size)
    assert [(row["n"], row["r.py:f"]) for row in answers[:5]] == [(0, 0), (0, 1), (1, 10), (1, None), (2, 20)]
    means = torch.tensor([0.5, 10.0, 20.5])
    assert summary.loc["r.py:f"].tolist() == pytest.approx([means.mean().item(), means.std().item() / 3**0.5])
    assert summary.loc["pass@2", "mean"] == 1


def test_the_columns_of_a_row_stay_as_they_are(tmp_path):
    """Whatever a reward function does to them, and if a number has the same name."""
    (tmp_path / "r.py").write_text("def spoil(facts, **_):\n    return [x.pop() + len(x) for x in facts]\n")
    (tmp_path / "s.py").write_text("def count(facts, **_):\n    return map(len, facts)\n")
    rows = [{"prompt": "The film", "facts": [1, 2], "response": "human", "kl": "small", "id": 2**60 + 1}] * 3
    settings = dict(reference="toy/sft", reward_fn=("r.py:spoil", "s.py:count"), num_generations=2)
    _, answers = run(dataset=write_rows(tmp_path / "d.jsonl", rows), **settings)
    for line in answers:
        assert (line["r.py:spoil"], line["s.py:count"], line["kl"]) == (3, 2, 0) and line["response"] != "human"
        own = {name.removeprefix("row/"): line[name] for name in ("prompt", "facts", "row/response", "row/kl", "id")}
        assert own == rows[0]


TALKER = """
class Talker:
    def __init__(self, row):
        self.left = row["n"]

    def step(self, said):
        self.left -= 1
        return "higher", 0.5, self.left == 0
"""


def test_episodes_by_hand(tmp_path):
    """A talk of n turns, each of which earns a half."""
    (tmp_path / "e.py").write_text(TALKER)
    reference = other_policy("toy/guess/sft", tmp_path / "reference")
    models = [AutoModelForCausalLM.from_pretrained(name) for name in (ROOT / "toy/guess/sft", reference)]
    tokenizer = AutoTokenizer.from_pretrained(reference)
    data = write_rows(tmp_path / "d.jsonl", [{"prompt": "1 to 15 :", "n": n} for n in (1, 2, 3)])
    settings = dict(env="e.py:Talker", dataset=data, temperature=1.0, num_generations=2, response_length=30)
    summary, answers = run("toy/guess/sft", reference=reference, batch_size=4, **settings)

    assert [row["e.py:Talker"] for row in answers] == [0.5, 0.5, 1, 1, 1.5, 1.5]
    assert [row["turns"] for row in answers] == [1, 1, 2, 2, 3, 3]
    assert summary.loc["e.py:Talker"].tolist() == pytest.approx([1, 0.5 / 3**0.5])
    assert summary.loc["pass@2", "mean"] == pytest.approx(2 / 3) and summary.loc["eos_share", "mean"] == 1
    assert all(assert_kl(row, models, tokenizer, 1.0) for row in answers)


QUICK = ["llama 3", "qwen 3", "gemma 3", "gpt-oss"]
FAMILY = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
NOTE = """
def note(prompts, prompts_text, completions, completion_ids, **columns):
    with open("notes", "a") as file:
        print(prompts, prompts_text, completions, completion_ids, sorted(columns.items()), file=file)
    return [len(x[0]["content"]) for x in completions]
"""


@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("judge", ["its own", "gemma 3"])
def test_rewards_are_those_of_training(family, judge, tmp_path):
    """Of the same responses, from the first update of a run, before its first step: a reward function gets the same
    values, and the reward model reads the same tokens, or its own template of the messages. The answers end at any of
    the tokens that ended them in training."""
    policy, own = save_family(family, tmp_path / "policy")
    folder = own if judge == "its own" else save_family(judge, tmp_path / "judge")[1]
    if folder is None:
        pytest.skip("the library has no reward model of this family")
    (tmp_path / "r.py").write_text(NOTE)
    talk = zip(["user", "assistant", "user"], ["The film?", "It is good.", "Why?"])
    talk = [{"role": role, "content": text} for role, text in talk]
    rows = [{"prompt": talk[: 1 + 2 * (i % 2)], "n": i} for i in range(8)]
    data = write_rows(tmp_path / "d.jsonl", rows)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    words = {tokenizer.decode([i]): i for i in range(300, 900)}
    stops = tuple(word for word, i in words.items() if tokenizer.encode(word, add_special_tokens=False) == [i])
    settings = dict(batch_size=8, total_episodes=8, num_ppo_epochs=1, learning_rate=1e-12, temperature=0.7)
    settings |= dict(model=policy, reward_model=folder, dataset=data, stop_token=stops, response_length=4)
    (line,) = train(ppo, "run", reward_fn=("reward_model", "r.py:note"), **settings)
    data = write_rows(tmp_path / "e.jsonl", [rows[i] for i in ppo.shuffled(8, 1, 0)])
    settings = dict(dataset=data, seed=ppo.make_seed(1, 1), response_length=4, num_prompts=8)
    summary, _ = run("run", reward_fn=(folder, "r.py:note"), **settings)
    trained, evaluated = Path("notes").read_text().splitlines()
    assert trained == evaluated
    assert summary.loc[folder, "mean"] == pytest.approx(line["rewards/reward_model/mean"], abs=1e-5)
    assert 0 < summary.loc["eos_share", "mean"] == line["val/eos_share"] < 1


def test_a_policy_answers_what_it_was_trained_on(tmp_path, monkeypatch):
    """The settings of its run are the default; those of the command line win."""
    data = write_rows(tmp_path / "mine.jsonl", [{"prompt": "I saw", "n": 1}] * 3)
    game = agent.Args(response_length=24, max_turns=5, dataset_test_split="train")
    review = ppo.Args(dataset=data, response_length=8, dataset_test_split="train")
    for name, model, trained in (("game", "toy/guess/sft", game), ("review", "toy/sft", review)):
        shutil.copytree(ROOT / model, tmp_path / name)
        (tmp_path / name / "args.json").write_text(json.dumps(asdict(trained)))

    def answers(*words):
        shutil.rmtree("out", ignore_errors=True)
        return main(monkeypatch, *words)

    assert len(answers("game")) == 15 and max(x["turns"] for x in answers("game", "--temperature", "0")) == 5
    assert {x["turns"] for x in answers("game", "--max-turns", "1")} == {1}
    assert [(x["prompt"], x["n"]) for x in answers("review", "--reward-fn", GOLD)] == [("I saw", 1)] * 3


def test_the_command_leaves_its_results(monkeypatch, capsys):
    """From any folder. A second one does not overwrite them."""
    words = ["toy/sft", "--reference", "toy/sft", "--reward-fn", GOLD, "toy/reward_model", "--num-prompts", "4"]
    lines = main(monkeypatch, *words)
    results = json.loads(Path("out/evaluation.json").read_text())
    assert results["figures"][GOLD]["mean"] == pytest.approx(sum(line[GOLD] for line in lines) / 4)
    assert list(results["figures"]) == [GOLD, "toy/reward_model", "kl", "kl_k3", "eos_share", "response_length"]
    assert results["args"]["temperature"] == 0.7 and "gold_score" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="out exists"):
        main(monkeypatch, *words)


def test_a_pad_token_without_an_embedding(tmp_path):
    """As a tokenizer has it to which somebody added one."""
    for name in ("sft", "reward_model"):
        shutil.copytree(ROOT / "toy" / name, name)
        tokenizer = AutoTokenizer.from_pretrained(name)
        tokenizer.add_special_tokens({"pad_token": "<pad>"})
        tokenizer.save_pretrained(name)
    plain = run(reference="toy/sft", reward_fn=("toy/reward_model",))[1]
    padded = run("sft", reference="sft", reward_fn=("reward_model",))[1]
    assert [[*row.values()] for row in padded] == [[*row.values()] for row in plain]


WRONG = {
    "no folder, and no such name": (
        dict(model="nosuch/model"),
        "nosuch/model should be a folder, or a name on the hub",
    ),
    "no data": (dict(dataset="nosuch/data"), "nosuch/data should be a folder, or a name on the hub"),
    "no reward model": (dict(reward_fn=("nosuch/model",)), "nosuch/model should be a folder"),
    "no reward function": (dict(reward_fn=("nosuch.py:f",)), "nosuch.py:f should be file.py:name"),
    "no model in the folder": (dict(model="."), r"\. should be a folder, or a name"),
    "no such split": (dict(split="test"), "no prompts of --split test"),
    "another tokenizer": (dict(reference="toy/guess/sft"), "toy/guess/sft has another tokenizer than toy/sft"),
    "too long": (dict(response_length=160), "but .*toy/sft reads 160"),
    "another form": (dict(dataset="d.jsonl"), r"row 1 of d.jsonl.* \(recipes/data.py converts other forms\)"),
    "two judges": (dict(env="e.py:E", reward_fn=(GOLD,)), "--reward-fn: not with --env"),
    "turns of what": (dict(max_turns=2), "--max-turns: only with --env"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_inputs_end_in_one_sentence(what, tmp_path):
    settings, sentence = WRONG[what]
    write_rows(tmp_path / "d.jsonl", [{"prompt": [{"from": "human", "value": "Hi"}]}])
    with pytest.raises(SystemExit, match=f"^error: .*{sentence}.*$"):
        run(**settings)


@pytest.mark.xfail(reason="ppo.load_function gives the second file the helper of the first", strict=False)
def test_reward_files_have_their_own_neighbours(tmp_path):
    """Though files and neighbours have the same names."""
    for side in ("one", "two"):
        (tmp_path / side).mkdir()
        (tmp_path / side / "helper.py").write_text(f"VALUE = {len(side + '!' * (side == 'two'))}")
        (tmp_path / side / "reward.py").write_text(
            "from helper import VALUE\ndef f(prompts, **_):\n    return [VALUE] * len(prompts)\n"
        )
    _, answers = run(reward_fn=("one/reward.py:f", "two/reward.py:f", "one/reward.py:f"))
    assert {(row["one/reward.py:f"], row["two/reward.py:f"]) for row in answers} == {(3, 4)}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["toy/sft", "policy"])
def test_a_talk_in_the_terminal(model, tmp_path):
    """chat.py answers each text, in a conversation if there is a chat template, and ends where the input does."""
    save_family("qwen 3", tmp_path)
    command = [sys.executable, ROOT / "tools/chat.py", model, "--temperature", "0", "--response-length", "16"]
    command += ["--chat-template-kwargs", '{"enable_thinking": false}'] if model == "policy" else []
    lines = "The film\n\nA book by\n" + "why " * 600 + "\n"
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.count("> ") == 5 and "that is too long" in done.stdout
    if model == "toy/sft":
        (row,) = run(dataset=write_rows(tmp_path / "d.jsonl", [{"prompt": "A book by"}]), temperature=0)[1]
        assert row["response"].strip() in done.stdout
