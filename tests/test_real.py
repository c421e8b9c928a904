"""A real chat model, SmolLM2-135M-Instruct, learns to add: `python -m pytest -n 0 -m real`, some minutes and 6 GB."""

import statistics
import subprocess
import sys

import pytest
from runs import run, write_rows
from sources import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

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
    settings = dict(model=str(model), dataset=write_rows(tmp_path / "sums.jsonl", rows), bf16=True)
    settings |= dict(batch_size=32, total_episodes=320, response_length=16, save_steps=1000, learning_rate=2e-5)
    reward = str(ROOT / "rewards/verifiers.py:last_number")
    lines = run("grpo", tmp_path / "out", reward_fn=(reward,), **settings)
    rewards = [line["reward"] for line in lines]
    assert statistics.fmean(rewards[-3:]) > max(0.12, 2 * statistics.fmean(rewards[:3]))

    policy, tokenizer = (auto.from_pretrained(tmp_path / "out") for auto in (AutoModelForCausalLM, AutoTokenizer))
    assert policy.num_parameters() == 134_515_008
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(model).chat_template
    chat = [sys.executable, "tools/chat.py", str(tmp_path / "out"), "--temperature", "0", "--response-length", "24"]
    done = subprocess.run(chat, cwd=ROOT, input="What is 4 + 5?\n", capture_output=True, text=True, check=True)
    assert any(sign.isdigit() for sign in done.stdout)
