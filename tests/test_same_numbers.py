"""What must not change a number does not: how a batch is cut, what padding holds, recomputation, evaluation."""

from functools import cache
from pathlib import Path

import pytest
import torch
from runs import NAMES, assert_close_runs, assert_same_run, lines_of, run, script, untimed
from sources import ROOT
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

ON_TOKENS = [name for name in NAMES if name != "ddpo"]
# Adam divides by the root of a squared gradient: with a small epsilon, the sign of rounding would decide over a step
STEADY = dict(num_sample_generations=0, adam_epsilon=1e-3)
OTHERS = {  # beside those of conftest.py
    "ppo": dict(num_mini_batches=2, reward_fn=("reward_model", "toy/gold_score.py:gold_score"), whiten_rewards=True),
    "rloo": dict(num_mini_batches=2, reward_fn=("reward_model", "toy/gold_score.py:gold_score")),
    "grpo": dict(beta=0.1),
    "agent": dict(beta=0.1),
}


@pytest.fixture(scope="module")
def settings_of(tiny):
    def make(name):
        known = vars(script(name).Args())
        settings = tiny[name] | STEADY | OTHERS.get(name, {}) | dict(dataset_test_split=None)
        return {key: x for key, x in settings.items() if key in known}

    return make


@pytest.fixture(scope="module")
def whole(settings_of, tmp_path_factory):
    """whole("ppo") -> the folder of a run that takes each batch as a whole, and how much was kept."""

    @cache
    def make(name):
        folder = tmp_path_factory.mktemp(name) / "run"
        return folder, kept(name, folder, micro_batch_size=99, **settings_of(name))

    return make


def kept(name, folder, **settings):
    """Trains; returns how many numbers were kept for backward passes."""
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        run(name, folder, **settings)
    return sum(sizes)


@pytest.mark.parametrize("name", ON_TOKENS)
def test_a_batch_may_be_cut_anyhow_and_recomputed(name, whole, settings_of, tmp_path):
    """Micro-batches of three of eight rows, in rollout and update; activations that are computed again."""
    settings = settings_of(name) | dict(micro_batch_size=3, gradient_checkpointing=True)
    if hasattr(script(name).Args, "local_rollout_forward_batch_size"):
        settings["local_rollout_forward_batch_size"] = 5
    size = kept(name, tmp_path / "run", **settings)
    assert_close_runs(tmp_path / "run", whole(name)[0], edge=0.02)
    assert size < 0.8 * whole(name)[1]


@pytest.mark.parametrize("name", ON_TOKENS)
def test_padding_may_hold_any_token(name, settings_of, tmp_path):
    """Runs with other padding tokens are the same, bit for bit: nothing that padding holds reaches a number."""
    settings = settings_of(name)
    is_scored = "reward_model" in settings.get("reward_fn", ()) or name == "rloo"
    model = settings.get("model") or (script(name).Args().model or ROOT / "toy/base")
    for number, token in enumerate((None, 7)):
        folder = tmp_path / str(number)
        for role, auto_class in (("model", AutoModelForCausalLM), ("reward_model", AutoModelForSequenceClassification)):
            source = Path(model) if role == "model" else ROOT / "toy/reward_model"
            tokenizer = AutoTokenizer.from_pretrained(source)
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(token) if token else tokenizer.pad_token
            tokenizer.save_pretrained(folder / role)
            config = {} if token is None else {"pad_token_id": token}
            auto_class.from_pretrained(source, **config).save_pretrained(folder / role)
            if role == "model" or is_scored:
                settings[role] = str(folder / role)
        run(name, tmp_path / f"run{number}", **settings)
    assert_same_run(tmp_path / "run0", tmp_path / "run1")


@pytest.mark.parametrize("name", NAMES)
def test_evaluations_and_tables_do_not_touch_the_training(name, settings_of, tmp_path):
    """After the second step, and after the last in any case."""
    settings = settings_of(name)
    known = vars(script(name).Args())
    looks = dict(dataset_test_split="validation", eval_steps=2, num_eval_prompts=3, num_sample_generations=9)
    run(name, tmp_path / "a", **settings)
    b = run(name, tmp_path / "b", **settings | {key: x for key, x in looks.items() if key in known})
    evaluated = [any(key.startswith("eval/") for key in line) for line in b]
    assert evaluated[:3] == [False, True, True] or "eval_steps" not in known
    b = [{key: x for key, x in line.items() if not key.startswith("eval/")} for line in b]
    assert untimed(lines_of(tmp_path / "a")) == untimed(b)
