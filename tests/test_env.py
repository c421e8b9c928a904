"""grpo.py --env: it computes what lecture/agent.py does; conversations; limits; the calculator."""

import json

import pytest
import torch
from float64 import float64, load_in_float64
from runs import lines_of
from safetensors.torch import load_file
from sources import ROOT
from test_agent import TALK
from test_agent import run as run_lecture

GUESS = f"{ROOT}/toy/guess"
SETTINGS = dict(batch_size=24, num_generations=4, num_ppo_epochs=2, num_mini_batches=2, temperature=1.5, epsilon=0.05)
SETTINGS |= dict(total_episodes=72, response_length=11, learning_rate=2e-3, scale_rewards="batch")
FULL = dict(dataset_test_split="none", micro_batch_size=5, local_rollout_forward_batch_size=7, num_sample_generations=3)


@pytest.fixture
def talk(tmp_path):
    """Settings: games of several turns, with answers of several tokens, from prompts of several lengths."""
    (tmp_path / "talk.py").write_text(TALK)
    rows = [{"prompt": " ".join(["1 to 15 :"] * (1 + i % 3))[: -(i % 2) or None], "number": i} for i in range(12)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data/train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return dict(env=f"{tmp_path}/talk.py:Talk", dataset=str(tmp_path / "data"), model=f"{GUESS}/sft")


def test_it_is_the_short_file(talk, tmp_path, monkeypatch):
    """In float64, over three updates of four steps: the last streams, all metrics that both log, and all weights."""
    settings = SETTINGS | talk
    weights = []
    with float64():
        grpo = load_in_float64("grpo", monkeypatch)
        grpo.Run.finish = lambda run: weights.extend(run.models["model"].parameters())
        grpo.train(grpo.Args(**settings, **FULL, device="cpu", output_dir=str(tmp_path / "full")))
    short = run_lecture("agent", monkeypatch, tmp_path, "# %% The trained policy", **settings)
    full = lines_of(tmp_path / "full")
    last = load_file(tmp_path / "full/samples/step-00000003.safetensors")
    for name, theirs in dict(mask="real", written="mask", rewards="rewards", responses="stream").items():
        ours = last[name]
        print(name, ours.shape, short[theirs].shape)
    for ours, theirs in zip(full, short["history"], strict=True):
        assert {name: ours[name] for name in theirs} == pytest.approx(theirs, rel=1e-8, abs=1e-8)
    for ours, theirs in zip(weights, short["policy"].parameters(), strict=True):
        assert (ours - theirs).abs().max() < 1e-8
