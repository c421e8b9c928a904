"""tools/evaluate.py, and tools/chat.py: numbers by hand, rewards as in training, wrong inputs in one sentence."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from families import save_family
from runs import GOLD, slow_but, watch, write_rows
from runs import run as train
from sources import ROOT, load
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(ROOT / "tools"))
import evaluate  # noqa: E402

import ppo  # noqa: E402


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Names such as toy/sft are those of the project's folder wherever one is."""
    monkeypatch.chdir(tmp_path)


def run(model="toy/sft", **settings):
    defaults = dict(device="cpu", num_prompts=6, response_length=16)
    return evaluate.evaluate(evaluate.Args(model, **defaults | settings))


@pytest.mark.parametrize("env", [None, "toy/guess/make.py:Game"])
def test_kl_and_episodes_by_hand(env, tmp_path):
    """k1 and k3 over what the policy wrote, which is not in «», at the temperature of the sampling: against one text at
    a time, without padding. The reward of a game is 1 - (n - 1) / 8 if the n-th guess is right."""
    policy, reference = (AutoModelForCausalLM.from_pretrained(ROOT / "toy/guess/sft") for _ in range(2))
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/guess/sft")
    with torch.no_grad():
        reference.transformer.ln_f.weight.mul_(0.8)
    reference.save_pretrained("other")
    tokenizer.save_pretrained("other")
    settings = dict(env=env, dataset="toy/guess/data/prompts", split="train", temperature=0.5, num_generations=2)
    _, answers = run("toy/guess/sft", reference="other", response_length=30, batch_size=4, **settings)
    for row in answers:
        text = row["response"] if env else row["response"] + tokenizer.eos_token * int(row["eos_share"])
        said = re.split("[«»]", text)
        parts = [tokenizer(part)["input_ids"] for part in said]
        written = torch.tensor([i % 2 == 0 for i, part in enumerate(parts) for _ in part])
        response = sum(parts, [])
        ids = torch.tensor([tokenizer(row["prompt"])["input_ids"] + response])
        logits = [model(ids).logits[0, -len(response) - 1 : -1] / 0.5 for model in (policy, reference)]
        first, second = (x.log_softmax(1)[torch.arange(len(response)), response] for x in logits)
        d = (first - second)[written]
        assert row["response_length"] == len(d) and row["kl"] == pytest.approx(d.sum().item(), abs=1e-4)
        assert row["kl_k3"] == pytest.approx((torch.exp(-d) - 1 + d).sum().item(), abs=1e-4)
        if env:
            guesses = [part.replace("<|end|>", "").strip() for part in said[::2]]
            assert row["turns"] == len(guesses) and row["eos_share"]
            assert row[env] == (1 - (len(guesses) - 1) / 8) * (guesses[-1] == str(row["number"]))


@pytest.mark.parametrize("batch_size", [1, 3])
def test_means_and_groups(batch_size, tmp_path):
    """A reward function sees all answers to a prompt at once, however many are sampled at once. Their mean counts, but
    for those of which it says nothing (of n = 1 the second, of n = 3 both); the standard error is over prompts."""
    (tmp_path / "r.py").write_text("""def f(n, **_):
        places = [n[:i].count(x) for i, x in enumerate(n)]
        return [None if x == 3 or x == 1 and i else x * 10 + i for x, i in zip(n, places)]""")
    data = write_rows(tmp_path / "d.jsonl", [{"prompt": "The film", "n": n} for n in range(4)])
    summary, answers = run(dataset=data, reward_fn=("r.py:f",), num_generations=2, batch_size=batch_size)
    assert [(row["n"], row["r.py:f"]) for row in answers[:5]] == [(0, 0), (0, 1), (1, 10), (1, None), (2, 20)]
    assert summary.loc["r.py:f"].tolist() == pytest.approx([31 / 3, (1201 / 12 / 3) ** 0.5])  # of .5, 10 and 20.5
    assert summary.loc["pass@2", "mean"] == 1


NOTE = """
def note(prompts, prompts_text, completions, completion_ids, **columns):
    with open("notes", "a") as file:
        print(prompts, prompts_text, completions, completion_ids, sorted(columns.items()), file=file)
    return [len(x[0]["content"]) for x in completions]
"""


@pytest.mark.parametrize("family", slow_but(["llama 3"], ["llama 3", "qwen 3"]))
@pytest.mark.parametrize("judge", ["its own", "gemma 3"])
def test_rewards_are_those_of_training(family, judge, tmp_path, monkeypatch):
    """Of the same responses, from the first update of a run, before its first step: a reward function gets the same
    values, and the reward model reads the same tokens, or its own template of the messages. The answers end at any of
    the tokens that ended them in training."""
    policy, own = save_family(family, tmp_path / "policy")
    folder = own if judge == "its own" else save_family(judge, tmp_path / "judge")[1]
    (tmp_path / "r.py").write_text(NOTE)
    talk = [{"role": "user", "content": "The film?"}, {"role": "assistant", "content": "Oh."}] * 2
    rows = [{"prompt": talk[: 1 + 2 * (i % 2)], "n": i} for i in range(8)]
    data = write_rows(tmp_path / "d.jsonl", rows)
    settings = dict(batch_size=8, total_episodes=8, num_ppo_epochs=1, learning_rate=1e-12, temperature=0.7)
    settings |= dict(model=policy, reward_model=folder, dataset=data, response_length=4)

    def stop_at_many(_, model, *__):
        model.stop_token_ids = model.generation_config.eos_token_id = list(range(300, 900))

    with monkeypatch.context() as patch:
        watch(patch, ppo, "set_stop_tokens", stop_at_many)
        (line,) = train(ppo, "run", reward_fn=("reward_model", "r.py:note"), **settings)
    data = write_rows(tmp_path / "e.jsonl", [rows[i] for i in ppo.shuffled(8, 1, 0)])
    settings = dict(dataset=data, seed=ppo.make_seed(1, 1), response_length=4, num_prompts=8)
    summary, _ = run("run", reward_fn=(folder, "r.py:note"), **settings)
    trained, evaluated = Path("notes").read_text().splitlines()
    assert trained == evaluated
    assert summary.loc[folder, "mean"] == pytest.approx(line["rewards/reward_model/mean"], abs=1e-5)
    assert 0 < summary.loc["eos_share", "mean"] == line["val/eos_share"] < 1


def test_prompts_are_drawn_from_the_whole_file(tmp_path):
    """The same ones in each call, in the order of the file."""
    data = write_rows(tmp_path / "d.jsonl", [{"prompt": "The film", "n": n} for n in range(40)])
    numbers = [[row["n"] for row in run(dataset=data, seed=seed, response_length=1)[1]] for seed in (1, 2)]
    assert numbers[0] == numbers[1] == sorted(numbers[0]) and max(numbers[0]) > 5


RUN = dict(response_length=3, temperature=0.5, max_turns=2, env="evil.py:Game", reward_fn=["evil.py:f"])


def test_code_is_run_only_if_the_command_names_it(tmp_path, monkeypatch, capsys):
    """Of a folder's args.json the numbers are defaults; its environment and rewards are printed."""
    shutil.copytree(ROOT / "toy/sft", "given")
    Path("given/args.json").write_text(json.dumps(RUN))
    Path("evil.py").write_text("open('ran', 'w')\nf = Game = None")
    rows = write_rows(tmp_path / "d.jsonl", [{"prompt": "The film"}] * 2)
    flags = ["--dataset", rows, "--device", "cpu", "--output-dir"]
    monkeypatch.setattr(sys, "argv", ["evaluate.py", "given", *flags, "out"])
    evaluate.main()
    assert "--env evil.py:Game" in capsys.readouterr().out and not Path("ran").exists()
    args = json.loads(Path("out/evaluation.json").read_text())["args"]
    assert (args["response_length"], args["temperature"], args["env"], args["reward_fn"]) == (3, 0.5, None, [])
    (tmp_path / "given/args.json").write_text(json.dumps(RUN | dict(env=None)))
    compare = load("tools/compare.py", "tools_compare")
    monkeypatch.setattr(sys, "argv", ["compare.py", "given", "toy/sft", "--reward-fn", GOLD, *flags, "both"])
    compare.main()
    args = json.loads(Path("both/compare.json").read_text())["args"]
    assert (args["response_length"], args["temperature"]) == (3, 0.5) and not Path("ran").exists()


def test_the_command(tmp_path, monkeypatch, capsys):
    """It leaves its results, and does not overwrite others."""

    def answers(*words):
        monkeypatch.setattr(sys, "argv", ["evaluate.py", *words, "--device", "cpu", "--output-dir", "out"])
        evaluate.main()
        return [json.loads(line) for line in Path("out/answers.jsonl").read_text("utf-8").splitlines()]

    words = ["toy/sft", "--reference", "toy/sft", "--reward-fn", GOLD, "toy/reward_model", "--num-prompts", "4"]
    lines = answers(*words)
    results = json.loads(Path("out/evaluation.json").read_text())
    assert results["figures"][GOLD]["mean"] == pytest.approx(sum(line[GOLD] for line in lines) / 4)
    assert list(results["figures"]) == [GOLD, "toy/reward_model", "kl", "kl_k3", "eos_share", "response_length"]
    assert results["args"]["temperature"] == 0.7 and "gold_score" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="out exists"):
        answers(*words)


WRONG = [("toy/data/prompts", dict(split="test")), ("tokenizer", dict(reference="toy/guess/sft"))]
WRONG += [("row 1 of d.jsonl", dict(dataset="d.jsonl"))]


@pytest.mark.parametrize("word, settings", WRONG)
def test_wrong_inputs_end_in_one_sentence(word, settings, tmp_path):
    write_rows(tmp_path / "d.jsonl", [{"prompt": [{"from": "human", "value": "Hi"}]}])
    with pytest.raises(SystemExit, match=f"^error: .*{word}.*$"):
        run(**settings)


@pytest.mark.parametrize("name", ["./typo", "../typo", "/typo", "toy/typo", "one/two/three"])
def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(name):
    with pytest.raises(SystemExit, match=name):
        evaluate.find(name)
    assert evaluate.find("gpt2") == "gpt2" and evaluate.find("trl-lib/tldr") == "trl-lib/tldr"
