"""Whole runs of the scripts: they learn, and evaluations change nothing."""

import math

import pytest
from runs import GOLD, run, untimed, watch

import ppo
import reward_model
import rloo
import sft

SEEDS = [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]


@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_learns(tmp_path, seed):
    """From about 0, five seeds came to learned scores of 0.5 to 1.7 and gold scores of 1.0 to 1.8; with the advantages'
    sign turned to -0.4 and -0.2 at best.
    """
    sizes = dict(batch_size=32, total_episodes=32 * 4, response_length=16, learning_rate=1e-3)
    rewards = dict(reward_fn=("reward_model", GOLD), reward_weights=(1.0, 0.0))
    lines = run(ppo, tmp_path, seed=seed, dataset_test_split="none", missing_eos_penalty=0.0, **sizes, **rewards)
    assert sum(line["objective/scores"] for line in lines[-2:]) / 2 > 0.5
    assert sum(line["rewards/gold_score/mean"] for line in lines[-2:]) / 2 > 0.6


@pytest.mark.parametrize("seed", SEEDS)
def test_sft_learns(tmp_path, seed, part_of):
    """Ten steps from random weights, whose loss is that of an even draw of words: log 3072 = 8.03.

    Three seeds ended at 6.11 to 6.16, with the gradient turned at 10.8 to 11.1.
    """
    settings = dict(dataset_test_split="validation[:64]", batch_size=32, learning_rate=1e-2)
    lines = run(sft, tmp_path, seed=seed, dataset=part_of("sft", 320), **settings)
    assert lines[0]["loss"] == pytest.approx(8.03, abs=0.2)
    assert lines[-1]["eval/loss"] < 6.6
    assert lines[-1]["eval/perplexity"] == pytest.approx(math.exp(lines[-1]["eval/loss"]), rel=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_reward_model_learns(tmp_path, seed, clear_pairs):
    """Five seeds came to accuracies of 0.64 to 0.73, losses of 0.56 to 0.69; with the gradient turned, 0.45 and 1.3."""
    last = run(reward_model, tmp_path, seed=seed, dataset=clear_pairs, learning_rate=3e-3, batch_size=32)[-1]
    assert last["eval/accuracy"] > 0.58
    assert last["eval/loss"] < 0.75
    assert abs(last["eval/mean_reward"]) < 0.5


# --- What is not to change a number does not


@pytest.mark.parametrize("module", [ppo, rloo], ids=lambda module: module.__name__)
def test_evaluation_does_not_touch_the_training(tmp_path, module, tiny, monkeypatch):
    """After the second update, and after the last in any case; the third goes on as if nothing had been. Responses of
    random lengths are for the training alone."""
    settings = tiny[module.__name__] | dict(response_length_min=4)
    least = []
    watch(monkeypatch, module, "sample_batch", lambda _, policy, examples, args: least.append(args.response_length_min))
    a = run(module, tmp_path / "a", dataset_test_split="none", **settings)
    b = run(module, tmp_path / "b", eval_steps=2, **settings)
    assert least == [4, 4, 4, 4, 4, None, 4, None]
    assert ["eval/scores" in line for line in b] == [False, True, True]
    b = [{name: x for name, x in line.items() if not name.startswith("eval/")} for line in b]
    assert untimed(a) == untimed(b)
