"""A real chat model, SmolLM2-135M-Instruct, learns to add, and a reward model is trained on pairs of its own answers:
`python -m pytest -n 0 -m real`, some ten minutes and 6 GB."""

import inspect
import json
import statistics
import subprocess
import sys
from itertools import combinations

import pytest
from runs import run, write_rows
from sources import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo
import reward_model
import rloo

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Its folder: models/smollm2, or else made anew, for which pip needs a network."""
    folder = ROOT / "models/smollm2"
    if not folder.exists():
        folder = tmp_path_factory.mktemp("smollm2")
        command = [sys.executable, str(ROOT / "tools/smollm2.py"), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"the model could not be made: {done.stderr.strip()[-200:]}")
    return folder


def test_it_learns_to_add_and_chats(model, tmp_path):
    """Ten updates at least double the right answers (seen: .05 to .4); what is saved, other programs load."""
    sums = [(a, b) for a in range(2, 20) for b in range(2, 20)]
    rows = [{"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": a + b} for a, b in sums]
    data = tmp_path / "sums.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    output = tmp_path / "out"
    reward = str(ROOT / "rewards/verifiers.py:last_number")
    sizes = {"batch_size": 32, "total_episodes": 320, "response_length": 16, "save_steps": 1000, "learning_rate": 2e-5}
    lines = run(grpo, output, model=str(model), dataset=str(data), reward_fn=(reward,), bf16=True, **sizes)
    rewards = [line["reward"] for line in lines]
    assert statistics.fmean(rewards[-3:]) > max(0.12, 2 * statistics.fmean(rewards[:3]))

    policy, tokenizer = (auto.from_pretrained(output) for auto in (AutoModelForCausalLM, AutoTokenizer))
    assert policy.num_parameters() == 134_515_008
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(model).chat_template
    assert any(sign.isdigit() for sign in talk(output, "What is 4 + 5?"))


def talk(folder, question):
    """What tools/chat.py prints."""
    chat = [sys.executable, "tools/chat.py", str(folder), "--temperature", "0", "--response-length", "24"]
    return subprocess.run(chat, cwd=ROOT, input=f"{question}\n", capture_output=True, text=True, check=True).stdout


THINGS = """the sea, a train, the library, a cat, coffee, rain, a mountain, the night, a bridge, my sister, a hospital,
music, a market, the forest, a clock, a letter, summer, a farm, the airport, a bus, an island, school, a horse"""


def kind_words(completions, **_):
    """The gold score: the number of kind words less that of unkind ones."""
    kind = "love enjoy great good beautiful wonderful happy joy best comfort peace delight friendly warm".split()
    unkind = "hate bad sad worst poor terrible fear difficult dark pain problem hard dangerous lonely".split()
    texts = [completion[0]["content"].lower() for completion in completions]
    return [float(sum(text.count(x) for x in kind) - sum(text.count(x) for x in unkind)) for text in texts]


def test_preferences_make_a_reward_model_and_a_policy(model, tmp_path):
    """A reward model that is trained on 300 pairs is right in more than .6 of 200 others (seen: .78). RLOO raises its
    reward within five updates (seen: -.9 to -.3)."""
    (tmp_path / "gold.py").write_text(inspect.getsource(kind_words))
    gold = f"{tmp_path / 'gold.py'}:kind_words"
    questions = [f"Write one sentence about how you feel about {thing.strip()}." for thing in THINGS.split(",")]
    rows = [{"prompt": [{"role": "user", "content": question}]} for question in questions]
    prompts = write_rows(tmp_path / "prompts.jsonl", rows)
    command = [sys.executable, "tools/evaluate.py", str(model), "--dataset", prompts, "--num-generations", "20"]
    command += ["--response-length", "24", "--temperature", "1", "--dtype", "bfloat16", "--reward-fn", gold]
    subprocess.run([*command, "--output-dir", str(tmp_path / "answers")], cwd=ROOT, check=True)
    answers = [json.loads(line) for line in (tmp_path / "answers/answers.jsonl").read_text().splitlines()]
    pairs = []
    for i, j in combinations(range(len(answers)), 2):
        a, b = sorted((answers[i], answers[j]), key=lambda answer: answer[gold])
        if a["prompt"] == b["prompt"] and a[gold] < b[gold] and j - i < 4:
            sides = {"chosen": b["response"], "rejected": a["response"]}
            texts = {side: [{"role": "assistant", "content": text}] for side, text in sides.items()}
            pairs.append({"prompt": a["prompt"]} | texts)
    data = tmp_path / "pairs"
    data.mkdir()
    write_rows(data / "validation.jsonl", pairs[:200])
    write_rows(data / "train.jsonl", pairs[-300:])
    assert len(pairs) >= 500

    small = AutoModelForCausalLM.from_pretrained(model)
    small.model.layers = small.model.layers[:8]
    small.config.num_hidden_layers = 8
    small.save_pretrained(tmp_path / "small")
    AutoTokenizer.from_pretrained(model).save_pretrained(tmp_path / "small")
    judge = tmp_path / "judge"
    small = str(tmp_path / "small")
    lines = run(reward_model, judge, model=small, dataset=str(data), bf16=True, eos_dropout=0.5, save_steps=1000)
    assert lines[-1]["eval/accuracy"] > 0.6

    settings = {"batch_size": 64, "total_episodes": 320, "response_length": 24, "rloo_k": 8, "num_ppo_epochs": 2}
    settings |= {"learning_rate": 4e-5, "kl_coef": 0.0, "micro_batch_size": 8, "save_steps": 1000, "bf16": True}
    lines = run(rloo, tmp_path / "out", model=str(model), dataset=prompts, reward_model=str(judge), **settings)
    rewards = [line["objective/scores"] for line in lines]
    assert statistics.fmean(rewards[1:]) > rewards[0]
    assert len(talk(tmp_path / "out", questions[0])) > 20
