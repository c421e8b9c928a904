"""tools/evaluate.py, and tools/chat.py: figures by hand, samples that nothing stored steers, rewards as in training."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from runs import write_rows
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import evaluate  # noqa: E402

import grpo  # noqa: E402
import ppo  # noqa: E402

GOLD = "toy/gold_score.py:gold_score"


@pytest.fixture(autouse=True)
def at_home(monkeypatch):
    monkeypatch.chdir(ROOT)


def run(model="toy/sft", **settings):
    defaults = dict(device="cpu", num_prompts=6, response_length=16)
    return evaluate.evaluate(evaluate.Args(model, **defaults | settings))


def copy_of(name, folder, file, **changes):
    """A copy of a toy model with changes to one of its json files; its path."""
    shutil.copytree(ROOT / "toy" / name, folder)
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | changes))
    return str(folder)


@pytest.fixture
def other(tmp_path):
    policy = AutoModelForCausalLM.from_pretrained("toy/sft")
    with torch.no_grad():
        policy.transformer.ln_f.weight.mul_(0.8)
    policy.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained("toy/sft").save_pretrained(tmp_path / "other")
    return str(tmp_path / "other")


def test_kl_by_hand(other):
    """Against one text at a time, without padding: k1 and k3 over the response, at the temperature of the sampling."""
    _, answers = run(other, reference="toy/sft", temperature=0.5, batch_size=4)
    tokenizer = AutoTokenizer.from_pretrained("toy/sft")
    models = [AutoModelForCausalLM.from_pretrained(name) for name in (other, "toy/sft")]
    assert len(set(answers["response_length"])) > 1
    num_read_alike = 0  # a sampled text may be cut otherwise when it is read again
    for row in answers.to_dict("records"):
        prompt = tokenizer(row["prompt"])["input_ids"]
        response = tokenizer(row["response"] + tokenizer.eos_token * int(row["eos_share"]))["input_ids"]
        ids = torch.tensor([prompt + response])
        logprobs = []
        for model in models:
            logits = model(ids).logits[0, len(prompt) - 1 : -1] / 0.5
            logprobs.append(logits.log_softmax(1)[torch.arange(len(response)), response])
        difference = logprobs[0] - logprobs[1]
        if len(response) == row["response_length"]:
            num_read_alike += 1
            assert row["kl"] == pytest.approx(difference.sum().item(), abs=1e-4)
            assert row["kl_k3"] == pytest.approx((torch.exp(-difference) - 1 + difference).sum().item(), abs=1e-4)
    assert num_read_alike > 2


def test_mean_and_standard_error_are_over_prompts(tmp_path):
    """Of the answers to a prompt the mean counts, but for those of which a reward says nothing."""
    (tmp_path / "r.py").write_text(
        "def f(prompts, completions, n, **_):\n"
        "    return [None if x == 3 or x == 1 and i % 2 else float(x * 10 + i) for i, x in enumerate(n)]\n"
    )
    data = write_rows(tmp_path / "d.jsonl", [{"prompt": "The film", "n": n} for n in range(4)])
    reward = f"{tmp_path}/r.py:f"
    summary, answers = run(dataset=data, reward_fn=(reward,), num_generations=2)
    assert answers["n"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    means = torch.tensor([0.5, 12.0, 24.5])
    assert summary.loc[reward, "mean"] == pytest.approx(means.mean().item())
    assert summary.loc[reward, "standard error"] == pytest.approx(means.std().item() / 3**0.5)
    assert summary.loc["pass@2", "mean"] == 1


def test_reward_models_read_as_in_training(tmp_path):
    """The reward model's own stop token is read where the answer has one, even if padding and it are one token."""
    reward_model = copy_of("reward_model", tmp_path / "rm", "tokenizer_config.json", pad_token="<|end|>")
    config = Path(reward_model, "config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"reward_bias": 0.5}))
    _, answers = run(reward_fn=(reward_model,), temperature=1.0, response_length=12, num_prompts=12)
    assert set(answers["eos_share"]) == {0, 1}
    model = AutoModelForSequenceClassification.from_pretrained("toy/reward_model")
    tokenizer = AutoTokenizer.from_pretrained("toy/reward_model")
    for row in answers.to_dict("records"):
        text = row["prompt"] + row["response"] + tokenizer.eos_token * int(row["eos_share"])
        assert row[reward_model] == pytest.approx(
            0.5 + model(**tokenizer(text, return_tensors="pt")).logits.item(), abs=1e-4
        )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stored_generation_settings_are_ignored(tmp_path, temperature):
    """Each of these alone would change the samples of a plain generate()."""
    hostile = {"do_sample": True, "temperature": 9.0, "top_k": 1, "top_p": 0.1, "repetition_penalty": 9.0}
    hostile |= {"max_new_tokens": 2, "no_repeat_ngram_size": 1, "min_new_tokens": 16, "min_p": 0.9}
    hostile |= {"suppress_tokens": list(range(2, 900)), "bad_words_ids": [[300]], "typical_p": 0.2}
    model = copy_of("sft", tmp_path / "sft", "generation_config.json", **hostile)
    first, second = (run(name, temperature=temperature)[1] for name in ("toy/sft", model))
    assert first.equals(second) and first["response"].nunique() > 1


def test_answers_end_where_they_did_in_training(tmp_path):
    """At any of the tokens that a run has left in the generation config."""
    comma, eos = AutoTokenizer.from_pretrained("toy/sft").convert_tokens_to_ids([",", "<|end|>"])
    model = copy_of("sft", tmp_path / "sft", "generation_config.json", eos_token_id=[comma, eos])
    Path(model, "args.json").touch()
    _, answers = run(model, num_prompts=40, response_length=30, temperature=1.0)
    whole = answers["response"][answers["eos_share"] == 1]
    assert 0 < whole.str.count(",").mean() < 1 and (whole.str.count(",") == whole.str.endswith(",")).all()


@pytest.mark.filterwarnings("ignore")  # peft speaks of what is not ours to change
def test_answers_of_an_adapter_end_where_they_did_in_training(tmp_path):
    """Its generation config lies beside it, and not beside the model that it belongs to."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(AutoModelForCausalLM.from_pretrained("toy/sft"), LoraConfig(r=1))  # begins as nothing
    model.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained("toy/sft")
    tokenizer.save_pretrained(tmp_path)
    settings = dict(num_prompts=40, response_length=30, temperature=1.0)
    assert run(str(tmp_path), **settings)[1]["response"].str.contains(", ").any()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.convert_tokens_to_ids(",")}))
    (tmp_path / "args.json").touch()
    answers = run(str(tmp_path), **settings)[1]
    whole = answers["response"][answers["eos_share"] == 1]
    assert len(whole) and whole.str.endswith(",").all() and (answers["response"].str.count(",") <= 1).all()


def test_answers_of_another_model_end_with_the_turn(tmp_path):
    """Though its generation config has only EOS."""
    tokenizer = AutoTokenizer.from_pretrained("toy/sft")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|turn|>"]})
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|turn|>\n{% endfor %}"
    policy = AutoModelForCausalLM.from_pretrained("toy/sft")
    policy.tokenizer = tokenizer
    policy.generation_config.eos_token_id = 5
    ends = tokenizer.convert_tokens_to_ids(["<|end|>", "<|turn|>"])
    assert set(evaluate.stop_tokens(policy)) == {5, *ends}
    policy.name_or_path = str(tmp_path / "ema")
    (tmp_path / "args.json").touch()  # of a run that stopped at nothing else
    assert evaluate.stop_tokens(policy) == [5]


def test_a_reward_may_spoil_its_rows(tmp_path):
    """The next one is given those of the dataset, and so are the answers."""
    (tmp_path / "r.py").write_text(
        "def spoil(facts, **_):\n    return [x.pop() for x in facts]\n\n\n"
        "def count(facts, **_):\n    return map(len, facts)\n"
    )
    data = write_rows(tmp_path / "d.jsonl", [{"prompt": "The film", "facts": [1, 2]}] * 3)
    rewards = tuple(f"{tmp_path}/r.py:{name}" for name in ("spoil", "count"))
    _, answers = run(dataset=data, reward_fn=rewards, num_generations=2)
    assert set(answers[rewards[0]]) == {2} and set(answers[rewards[1]]) == {2}
    assert list(map(list, answers["facts"])) == [[1, 2]] * 6


TALKER = """
class Talker:
    def __init__(self, row):
        self.left = row["n"]

    def step(self, said):
        self.left -= 1
        return "higher", 0.5, self.left == 0
"""


def test_episodes_by_hand(tmp_path):
    """A talk of n turns, each of which earns a half; KL against one whole stream at a time."""
    (tmp_path / "e.py").write_text(TALKER)
    tokenizer = AutoTokenizer.from_pretrained("toy/guess/sft")
    policy = AutoModelForCausalLM.from_pretrained("toy/guess/sft")
    reference = AutoModelForCausalLM.from_pretrained("toy/guess/sft")
    with torch.no_grad():
        reference.transformer.ln_f.weight.mul_(0.8)
    reference.save_pretrained(tmp_path / "reference")
    tokenizer.save_pretrained(tmp_path / "reference")
    env = f"{tmp_path}/e.py:Talker"
    data = write_rows(tmp_path / "d.jsonl", [{"prompt": "1 to 15 :", "n": n} for n in (1, 2, 3)])
    settings = dict(env=env, dataset=data, temperature=1.0, num_generations=2, response_length=30, batch_size=4)
    summary, answers = run("toy/guess/sft", reference=str(tmp_path / "reference"), **settings)

    assert answers[env].tolist() == [0.5, 0.5, 1, 1, 1.5, 1.5] and answers["turns"].tolist() == [1, 1, 2, 2, 3, 3]
    assert summary.loc[env].tolist() == pytest.approx([1, 0.5 / 3**0.5])
    assert summary.loc["pass@2", "mean"] == pytest.approx(2 / 3) and summary.loc["eos_share", "mean"] == 1
    for row in answers.to_dict("records"):
        assert row["response"].count("«higher»") == row["turns"] - 1
        response = [tokenizer(part)["input_ids"] for part in re.split("[«»]", row["response"])]
        written = torch.tensor([i % 2 == 0 for i, part in enumerate(response) for _ in part])
        assert row["response_length"] == written.sum()
        response = sum(response, [])
        ids = torch.tensor([tokenizer(row["prompt"])["input_ids"] + response])
        first, second = (
            model(ids).logits[0, -len(response) - 1 : -1].log_softmax(1)[torch.arange(len(response)), response]
            for model in (policy, reference)
        )
        assert row["kl"] == pytest.approx((first - second)[written].sum().item(), abs=1e-4)
    with pytest.raises(SystemExit, match="--reward-fn: not with --env"):
        run("toy/guess/sft", reward_fn=(GOLD,), **settings)
    with pytest.raises(SystemExit, match="--max-turns: only with --env"):
        run(max_turns=2)
    with pytest.raises(SystemExit, match="exceed the model's"):
        run("toy/guess/sft", **settings | dict(response_length=45))


def test_a_policy_answers_what_it_was_trained_on(tmp_path, monkeypatch):
    """The settings of its run are the default; those of the command line win."""
    data = write_rows(tmp_path / "mine.jsonl", [{"text": "I saw"}] * 3)
    game = grpo.Args(env="toy/guess/make.py:Game", dataset="toy/guess/data/prompts", response_length=24, max_turns=5)
    review = ppo.Args(dataset=data, prompt_column="text", response_length=8)
    for name, model, trained in (("game", "toy/guess/sft", game), ("review", "toy/sft", review)):
        shutil.copytree(ROOT / model, tmp_path / name)
        (tmp_path / name / "args.json").write_text(json.dumps(asdict(trained) | {"dataset_test_split": "train"}))

    def answers(name, *words):
        output = tmp_path / f"{name}{len(words)}"
        command = ["evaluate.py", f"{tmp_path}/{name}", "--device", "cpu", "--output-dir", f"{output}", *words]
        monkeypatch.setattr(sys, "argv", command)
        evaluate.main()
        return [json.loads(line) for line in (output / "answers.jsonl").read_text().splitlines()]

    assert len(answers("game")) == 15 and max(x["turns"] for x in answers("game", "--temperature", "0")) == 5
    assert {x["turns"] for x in answers("game", "--temperature", "0", "--max-turns", "1")} == {1}
    assert [x["text"] for x in answers("review", "--reward-fn", GOLD)] == ["I saw"] * 3


def test_the_command_leaves_its_results(tmp_path, monkeypatch, capsys):
    words = ["evaluate.py", "toy/sft", "--reference", "toy/sft", "--split", "validation", "--reward-fn", GOLD]
    words += ["--num-prompts", "4", "--device", "cpu", "--output-dir", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", words)
    evaluate.main()
    results = json.loads((tmp_path / "out/evaluation.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "out/answers.jsonl").read_text().splitlines()]
    assert results["figures"][GOLD]["mean"] == pytest.approx(sum(line[GOLD] for line in lines) / 4)
    assert list(results["figures"]) == [GOLD, "kl", "kl_k3", "eos_share", "response_length"]
    assert results["args"]["temperature"] == 0.7 and "gold_score" in capsys.readouterr().out
    with pytest.raises(FileExistsError):
        evaluate.main()


@pytest.mark.slow
def test_a_talk_in_the_terminal():
    """chat.py continues each text that it is given, and ends where the input does."""
    command = [sys.executable, "tools/chat.py", "toy/sft", "--temperature", "0", "--response-length", "16"]
    done = subprocess.run(command, input="The film\n\nA book by\n", capture_output=True, text=True, timeout=120)
    tokenizer = AutoTokenizer.from_pretrained("toy/sft")
    ids = tokenizer("A book by", return_tensors="pt")["input_ids"]
    policy = AutoModelForCausalLM.from_pretrained("toy/sft")
    answer = policy.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
    assert done.returncode == 0 and tokenizer.decode(answer, skip_special_tokens=True).strip() in done.stdout
    assert done.stdout.count("> ") == 4
