"""What must not change a number does not: how a batch is cut, what padding holds, recomputation, evaluation."""

from functools import cache

import pytest
import torch
from runs import NAMES, ON_PROMPTS, assert_close_runs, assert_same_run, lines_of, run, script, slow_but, untimed
from sources import ROOT
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

ON_TOKENS = [name for name in NAMES if name != "ddpo"]
# Adam divides by the root of a squared gradient: with a small epsilon, the sign of rounding would decide over a step
STEADY = dict(num_sample_generations=0, adam_epsilon=1e-3)
OTHERS = {  # beside those of conftest.py
    "ppo": dict(num_mini_batches=2, reward_fn=("reward_model", "toy/gold_score.py:gold_score")),
    "rloo": dict(num_mini_batches=2, reward_fn=("rewards/model.py:score", "toy/gold_score.py:gold_score")),
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


@pytest.mark.parametrize("name", slow_but(["ppo"], ON_TOKENS))
def test_a_batch_may_be_cut_anyhow_and_recomputed(name, whole, settings_of, tmp_path):
    """Micro-batches of three of eight rows, in rollout and update; activations that are computed again."""
    settings = settings_of(name) | dict(micro_batch_size=3, gradient_checkpointing=True)
    if hasattr(script(name).Args, "local_rollout_forward_batch_size"):
        settings["local_rollout_forward_batch_size"] = 5
    size = kept(name, tmp_path / "run", **settings)
    assert_close_runs(tmp_path / "run", whole(name)[0], edge=0.02, weights=2e-6 if name in ON_PROMPTS else 2e-4)
    assert size < 0.9 * whole(name)[1]  # logits are kept


@pytest.mark.parametrize("name", slow_but(["ppo"], ON_TOKENS))
def test_padding_may_hold_any_token(name, settings_of, tmp_path):
    """Runs with another padding token, EOS, are the same, bit for bit: nothing that padding holds reaches a number."""
    settings = settings_of(name)
    sources = {"model": script(name).Args().model or ROOT / "toy/sft", "reward_model": ROOT / "toy/reward_model"}
    for run_name in ("a", "b"):
        for role, auto_class in (("model", AutoModelForCausalLM), ("reward_model", AutoModelForSequenceClassification)):
            if role not in vars(script(name).Args()):
                continue
            tokenizer = AutoTokenizer.from_pretrained(sources[role])
            model = auto_class.from_pretrained(sources[role])
            if run_name == "b":
                tokenizer.pad_token, model.config.pad_token_id = tokenizer.eos_token, tokenizer.eos_token_id
            settings[role] = str(tmp_path / "models" / run_name / role)
            for part in (tokenizer, model):
                part.save_pretrained(settings[role])
        run(name, tmp_path / run_name, **settings)
    assert_same_run(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("name", slow_but([], [name for name in NAMES if name not in ON_PROMPTS]))  # test_held_out.py
def test_evaluations_and_tables_do_not_touch_the_training(name, settings_of, tmp_path):
    """After the second step, and after the last in any case."""
    settings = settings_of(name)
    known = vars(script(name).Args())
    looks = dict(dataset_test_split="validation", eval_steps=2, num_sample_generations=9)
    run(name, tmp_path / "a", **settings)
    b = run(name, tmp_path / "b", **settings | {key: x for key, x in looks.items() if key in known})
    if "eval_steps" in known and name not in ON_PROMPTS:  # whose evaluations are those of test_held_out.py
        evaluated = [any(key.startswith("eval/") for key in line) for line in b]
        assert evaluated == [(i + 1) % 2 == 0 or i + 1 == len(b) for i in range(len(b))]
    b = [{key: x for key, x in line.items() if not key.startswith("eval/")} for line in b]
    assert untimed(lines_of(tmp_path / "a")) == untimed(b)
