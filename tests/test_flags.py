"""Every flag of every script changes something: a run with it differs from the same run without it."""

import ast
import dataclasses
import json
import re
import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_train import run, untimed
from transformers import (
    AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, MixtralConfig, MixtralForCausalLM,
)  # fmt: skip

import ddpo
import dpo
import grpo
import ppo
import reward_model
import rloo
import sft

ROOT = Path(__file__).resolve().parent.parent
UNET = "unet/diffusion_pytorch_model.safetensors"
MODULES = {"ppo": ppo, "rloo": rloo, "grpo": grpo, "dpo": dpo, "sft": sft, "reward_model": reward_model, "ddpo": ddpo}


def fields_of(script):
    """The settings that a command line can give."""
    return {field.name for field in dataclasses.fields(MODULES[script].Args) if field.init}


# flag -> the value to give it, or (value, settings that both runs have). A value with {tmp} stands for what the
# fixture `world` has made. Each such pair of runs must log different numbers.
TEXT_BATCHES = {
    "batch_size": 2, "per_device_train_batch_size": (4, {"batch_size": None, "per_device_train_batch_size": 8}),
    "gradient_accumulation_steps": (2, {"batch_size": None, "per_device_train_batch_size": 4}),
}  # fmt: skip
EVALUATED = {"dataset_test_split": "validation"}
CHANGES = {
    "ppo": {
        "seed": 2, "bf16": True, "model": "{tmp}/policy", "reward_model": "{tmp}/reward", "dataset": "{tmp}/prompts.csv",
        "reward_label": ("NEGATIVE", {"reward_model": "{tmp}/classifier", "reward_label": "POSITIVE"}),
        "reward_fn": (("toy/make.py:gold_score",), {}),
        "reward_weights": ((0.5,), {}), "gold_reward_fn": "toy/make.py:gold_score",
        "dataset_train_split": "validation", "prompt_column": ("other", {"dataset": "{tmp}/prompts.csv"}),
        "dataset_config": ("second", {"dataset": "{tmp}/configs", "dataset_config": "first"}),
        "max_prompt_length": 5, "response_length": 6, "temperature": 1.0,
        "stop_token": ("none", {"response_length": 30}), "missing_eos_penalty": 1.0,
        "per_device_train_batch_size": (4, {"batch_size": None, "per_device_train_batch_size": 8}),
        "gradient_accumulation_steps": (2, {"per_device_train_batch_size": 4, "batch_size": None}),
        "num_mini_batches": 2, "batch_size": 2, "total_episodes": 4,
        "num_train_epochs": (0.5, {"total_episodes": None, "num_train_epochs": 0.25}),
        "learning_rate": 1e-4, "critic_learning_rate": 1e-4, "adam_epsilon": 1e-3,
        "max_grad_norm": 1e-3, "num_ppo_epochs": 1, "cliprange": 0.001, "cliprange_value": 0.001, "vf_coef": 0.5,
        "gamma": 0.5, "lam": 0.5, "whiten_rewards": True, "whiten_advantages": False, "kl_coef": 1.0,
        "kl_estimator": "k3", "adaptive_kl": True,
        "kl_target": (0.01, {"adaptive_kl": True, "total_episodes": 12, "kl_estimator": "k3"}),
        "kl_horizon": (10, {"adaptive_kl": True}),
        "dataset_test_split": "validation", "critic": "shared", "lora_r": 2,
        "lora_alpha": (1.0, {"lora_r": 2}), "lora_target_modules": (".*c_proj", {"lora_r": 2}),
        "response_length_min": 2, "critic_warmup_updates": 1,
        "lr_scheduler_type": "constant", "warmup_ratio": 0.7, "weight_decay": 10.0, "adam_betas": ((0.5, 0.5), {}),
        "use_score_scaling": True, "use_score_norm": (True, {"use_score_scaling": True}), "score_clip": 0.1,
        "ratio_threshold": 1e-3, "target_kl": 1e-9,
        "ptx_coef": (0.1, {"pretrain_data": "{tmp}/texts.csv", "ptx_coef": 1.0}),
        "pretrain_data": ("{tmp}/prose.csv", {"pretrain_data": "{tmp}/texts.csv", "ptx_coef": 1.0}),
        "aux_loss_coef": (0.1, {"model": "{tmp}/experts", "learning_rate": 1e-3}),
        "eval_steps": (1, EVALUATED), "num_eval_prompts": (2, EVALUATED), "eval_temperature": (1.0, EVALUATED),
    },
    "sft": {
        "seed": 2, "bf16": True, "model": "toy/sft", "from_scratch": "{tmp}/config", "dataset": "{tmp}/texts.csv",
        "dataset_config": ("second", {"dataset": "{tmp}/configs", "dataset_config": "first"}),
        "dataset_train_split": "validation", "dataset_test_split": "validation",
        "text_column": ("other", {"dataset": "{tmp}/texts.csv"}),
        "prompt_column": ("other", {"dataset": "{tmp}/pairs.csv"}),
        "completion_column": ("other", {"dataset": "{tmp}/pairs.csv"}),
        "messages_column": ("other", {"dataset": "{tmp}/chats.jsonl", "model": "{tmp}/chat"}),
        "completion_only_loss": False, "max_length": 12, "packing": (True, {"max_length": 12}), "num_train_epochs": 2.0,
        **TEXT_BATCHES, "learning_rate": 1e-4,
        "lr_scheduler_type": "constant", "warmup_ratio": (0.9, {"lr_scheduler_type": "linear"}), "weight_decay": 1.0,
        "max_grad_norm": 1e-3, "eval_steps": (1, EVALUATED), "lora_r": (2, {"model": "toy/sft"}),
        "lora_alpha": (1.0, {"model": "toy/sft", "lora_r": 2}),
        "lora_target_modules": (".*c_proj", {"model": "toy/sft", "lora_r": 2}),
    },
    "reward_model": {
        "seed": 2, "bf16": True, "model": "{tmp}/policy", "dataset": "{tmp}/preferences.csv",
        "dataset_config": ("second", {"dataset": "{tmp}/configs", "dataset_config": "first"}),
        "dataset_train_split": "validation", "dataset_test_split": "validation",
        "chosen_column": ("other", {"dataset": "{tmp}/preferences.csv"}),
        "rejected_column": ("other", {"dataset": "{tmp}/preferences.csv"}),
        "prompt_column": ("other", {"dataset": "{tmp}/preferences.csv"}),
        "margin_column": ("points", {"dataset": "{tmp}/preferences.csv"}),
        "lora_r": 2, "lora_alpha": (1.0, {"lora_r": 2}), "lora_target_modules": (".*c_proj", {"lora_r": 2}),
        "max_length": 12, "eos_dropout": 0.5, "num_train_epochs": 2.0, **TEXT_BATCHES,
        "learning_rate": 1e-4, "lr_scheduler_type": "constant",
        "warmup_ratio": (0.9, {"lr_scheduler_type": "linear"}), "weight_decay": 1.0, "max_grad_norm": 1e-3,
        "center_rewards_coefficient": 1.0, "eval_steps": (1, EVALUATED),
    },
}  # fmt: skip
CHANGES["dpo"] = {
    "seed": 2, "bf16": True, "model": "{tmp}/policy", "dataset": "{tmp}/preferences.csv",
    "dataset_config": ("second", {"dataset": "{tmp}/configs", "dataset_config": "first"}),
    "dataset_train_split": "validation", "dataset_test_split": "validation",
    "chosen_column": ("other", {"dataset": "{tmp}/preferences.csv"}),
    "rejected_column": ("other", {"dataset": "{tmp}/preferences.csv"}),
    "prompt_column": ("other", {"dataset": "{tmp}/preferences.csv"}),
    "max_length": (12, {"max_prompt_length": 3}), "max_prompt_length": (3, {"max_length": 12, "max_prompt_length": 2}),
    "truncation_mode": ("keep_start", {"max_length": 12, "max_prompt_length": 3}),
    "beta": 0.5, "loss_type": "hinge", "label_smoothing": 0.1, "reference_free": True,
    "precompute_ref": (True, EVALUATED),
    "num_train_epochs": 2.0, **TEXT_BATCHES, "learning_rate": 1e-4,
    "lr_scheduler_type": "constant", "warmup_ratio": 0.9, "weight_decay": 1.0, "max_grad_norm": 1e-3, "lora_r": 2,
    "lora_alpha": (1.0, {"lora_r": 2}), "lora_target_modules": (".*c_proj", {"lora_r": 2}),
    "eval_steps": (1, EVALUATED), "num_eval_prompts": (2, EVALUATED), "response_length": (3, EVALUATED),
    "temperature": (1.5, EVALUATED),
    "gold_reward_fn": ("toy/make.py:gold_score", EVALUATED),
}  # fmt: skip
CHANGES["rloo"] = {  # all but the critic's flags, and its own
    flag: change for flag, change in CHANGES["ppo"].items()
    if flag in fields_of("rloo")
} | {
    "rloo_k": 4, "token_level_kl": True, "normalize_reward": True, "normalize_advantage": True,
    "reward_clip_range": (0.5, {"normalize_reward": True}),
}  # fmt: skip
ON_TEXTS, BY_MODEL = {"reward_fn": ("toy/make.py:gold_score",)}, {"reward_fn": ("reward_model",)}
SHELLS = {"model": "toy/shells/sft", "dataset": "toy/shells/data/prompts", "reward_fn": ("rewards/verifiers.py:right_number",)}
CHANGES["grpo"] = {
    flag: change for flag, change in CHANGES["rloo"].items()
    if flag in fields_of("grpo")
} | {
    "num_generations": 2, "batch_size": 8, "loss_type": ("dr_grpo", {"response_length": 30}),
    "importance_sampling_level": ("sequence", {"num_ppo_epochs": 4}),
    "scale_rewards": "none", "epsilon": (1e-4, {"num_ppo_epochs": 4}), "epsilon_high": (1e-4, {"num_ppo_epochs": 4}),
    "delta": (1.0, {"num_ppo_epochs": 4}), "beta": 0.5, "mask_truncated_completions": (True, {"response_length": 4}),
    "use_bias_correction_kl": (False, {"beta": 0.5, "num_ppo_epochs": 2}), "dynamic_sampling": (3, SHELLS),
    "reward_fn": (("toy/make.py:gold_score",), {}), "reward_weights": ((0.5,), {}), "dataset": ("{tmp}/prompts.csv", ON_TEXTS),
    "prompt_column": ("other", {"dataset": "{tmp}/prompts.csv", "model": "toy/sft"} | ON_TEXTS),
    "dataset_config": ("second", {"dataset": "{tmp}/configs", "dataset_config": "first"} | ON_TEXTS),
    "num_eval_prompts": (2, EVALUATED), "reward_model": ("{tmp}/reward", BY_MODEL), "temperature": 0.5,
    "missing_eos_penalty": (1.0, {"response_length": 4}),
    "reward_label": ("NEGATIVE", {"reward_model": "{tmp}/classifier", "reward_label": "POSITIVE"} | BY_MODEL),
}  # fmt: skip
GUIDED, PER_PROMPT = {"sample_guidance_scale": 3.0}, {"per_prompt_stat_tracking": True, "sample_batch_size": 8}
CHANGES["ddpo"] = {
    "sample_num_steps": 3, "sample_eta": 0.5, "sample_guidance_scale": 3.0, "sample_batch_size": 8,
    "sample_num_batches_per_epoch": 2, "negative_prompts": ("a cross", GUIDED), "train_batch_size": 2,
    "train_gradient_accumulation_steps": (2, {"sample_batch_size": 8}), "train_num_inner_epochs": 2,
    "train_clip_range": (1.0, {"train_num_inner_epochs": 3}), "train_adv_clip_max": 0.1, "train_timestep_fraction": 0.5,
    "per_prompt_stat_tracking": (True, {"per_prompt_stat_tracking_min_count": 2}),
    "per_prompt_stat_tracking_buffer_size": (3, PER_PROMPT | {"per_prompt_stat_tracking_min_count": 2}),
    "per_prompt_stat_tracking_min_count": (2, PER_PROMPT), "kl_coef": (1.0, {"train_num_inner_epochs": 2}),
    "train_learning_rate": 1e-5, "train_adam_epsilon": 1.0, "train_adam_weight_decay": 10.0,
    "train_adam_beta1": (0.1, {"num_epochs": 3}), "train_adam_beta2": (0.1, {"num_epochs": 3}),
    "train_max_grad_norm": (1e-6, {"train_adam_epsilon": 1e-3}), "model": "{tmp}/images",
    "reward_fn": "toy/shapes/make.py:little_ink", "gold_reward_fn": "toy/shapes/make.py:same_shape",
    "lora_r": 2, "lora_alpha": (40.0, {"lora_r": 2}), "bf16": True, "dataset": "{tmp}/prompts.csv", "seed": 2,
    "dataset_config": ("second", {"dataset": "{tmp}/configs", "dataset_config": "first"}),
    "dataset_train_split": ("validation", {"dataset": "{tmp}/splits"}),
    "prompt_column": ("other", {"dataset": "{tmp}/prompts.csv"}), "num_epochs": 3,
}  # fmt: skip
ELSEWHERE = {  # flags whose effect is no number in metrics.jsonl
    "output_dir": "all runs of the tests",
    "exp_name": "test_the_default_folder_has_name_and_seed",
    "device": "test_device",
    "track": "test_offline_wandb_carries_the_same_names",
    "wandb_project_name": "test_offline_wandb_carries_the_same_names",
    "wandb_entity": "test_offline_wandb_carries_the_same_names",
    "local_rollout_forward_batch_size": "test_rollout_in_parts_is_the_same_rollout",
    "micro_batch_size": "test_cutting_a_mini_batch_changes_nothing",
    "num_sample_generations": "test_sample_tables",
    "trust_remote_code": "test_python_code_in_a_checkpoint_runs_only_when_asked",
    "attn_implementation": "test_attention_implementation",
    "gradient_checkpointing": "test_gradient_checkpointing_changes_memory_and_no_number",
    "ema_decay": "test_moving_average",
    "zero_stage": "test_two_processes_are_one",
    "shard_size": "test_shard_size",
    "offload": "test_two_processes_are_one",
    "gather_for_rollout": "test_two_processes_are_one",
    "save_steps": "test_resumed_equals_uninterrupted",
    "save_total_limit": "test_as_many_checkpoints_stay_as_were_asked_for",
    "resume": "test_resumed_equals_uninterrupted",
    "image_steps": "test_pictures",
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Models and data beside those of the toy world, and other columns in them."""
    tmp = tmp_path_factory.mktemp("world")
    policy = AutoModelForCausalLM.from_pretrained(ROOT / "toy/sft")
    policy.lm_head.weight.data *= 1.2
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/sft")
    policy.save_pretrained(tmp / "policy")
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, intermediate_size=16)
    torch.manual_seed(0)
    MixtralForCausalLM(MixtralConfig(vocab_size=len(tokenizer), num_local_experts=4, **sizes)).save_pretrained(tmp / "experts")
    reward = AutoModelForSequenceClassification.from_pretrained(ROOT / "toy/reward_model")
    reward.score.weight.data *= 2
    reward.save_pretrained(tmp / "reward")
    reward.score.weight.data = torch.cat([-reward.score.weight, reward.score.weight]).data
    reward.config.id2label, reward.config.label2id = {0: "NEGATIVE", 1: "POSITIVE"}, {"NEGATIVE": 0, "POSITIVE": 1}
    reward.save_pretrained(tmp / "classifier")
    policy.save_pretrained(tmp / "chat")
    for name in ("policy", "reward", "classifier", "experts", "chat"):
        if name == "chat":
            tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
        tokenizer.save_pretrained(tmp / name)
    shutil.copytree(ROOT / "toy/base", tmp / "config")
    config = json.loads((tmp / "config/config.json").read_text()) | {"n_layer": 1}
    (tmp / "config/config.json").write_text(json.dumps(config))
    columns = {
        "prompts": "prompt,other", "texts": "text,other", "pairs": "prompt,completion,other",
        "preferences": "prompt,chosen,rejected,other,points",
    }  # fmt: skip
    for name, header in columns.items():
        lines = [[f"The {c} {i}" for c in header.split(",")] for i in range(16)]
        lines = [
            [str(i % 3) if c == "points" else x for c, x in zip(header.split(","), x)] for i, x in enumerate(lines)
        ]
        (tmp / f"{name}.csv").write_text("\n".join([header, *(",".join(line) for line in lines)]) + "\n")
    shutil.copytree(ROOT / "toy/shapes/sd", tmp / "images")
    weights = load_file(tmp / "images" / UNET)
    save_file({name: 0.9 * x for name, x in weights.items()}, tmp / "images" / UNET, {"format": "pt"})
    (tmp / "splits").mkdir()
    for split in ("train", "validation"):
        (tmp / "splits" / f"{split}.jsonl").write_text(json.dumps({"prompt": f"a {split}"}) + "\n")
    (tmp / "prose.csv").write_text("text\n" + "A tree stood there.\n" * 16)
    turns = lambda x: [{"role": "user", "content": "The film"}, {"role": "assistant", "content": f"is {x}."}]  # noqa: E731
    rows = [{"messages": turns("good"), "other": turns("bad")}] * 16
    (tmp / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for i, name in enumerate(("first", "second")):
        (tmp / "configs" / name).mkdir(parents=True)
        row = {"prompt": f"The film {i}", "completion": f" is {i}", "chosen": f" is good {i}", "rejected": f" is bad {i}"}
        for split in ("train", "validation"):
            (tmp / "configs" / name / f"{split}.jsonl").write_text((json.dumps(row) + "\n") * 8)
    head = ["---", "configs:"]
    for name in ("first", "second"):
        head += [f"- config_name: {name}", f"  data_dir: {name}"]
    (tmp / "configs/README.md").write_text("\n".join([*head, "---", ""]))
    return tmp


@pytest.fixture(scope="module")
def smallest(part_of, tmp_path_factory):
    """Settings of a run of two updates of two steps each, or of three steps, without evaluation, for each script."""
    prompts, pairs = part_of("prompts", 16), part_of("preferences", 12)
    folder = tmp_path_factory.mktemp("length")
    (folder / "r.py").write_text("def f(completions, **_):\n    return list(map(len, completions))\n")
    updates = dict(batch_size=4, total_episodes=8, num_ppo_epochs=2, response_length=4, dataset_test_split="none")
    steps = dict(batch_size=4, dataset_test_split="none")
    return {
        "ppo": updates | {"dataset": prompts}, "rloo": updates | {"dataset": prompts},
        "grpo": updates | dict(num_generations=4, model="toy/sft", dataset=prompts, reward_fn=(f"{folder}/r.py:f",)),
        "ddpo": dict(
            num_epochs=2, sample_num_steps=2, sample_batch_size=4, sample_num_batches_per_epoch=1, train_batch_size=4,
            train_gradient_accumulation_steps=1,
        ),
        "sft": steps | dict(dataset=part_of("sft", 12), max_length=24), "reward_model": steps | {"dataset": pairs},
        "dpo": steps | dict(dataset=pairs, num_eval_prompts=4, response_length=6, learning_rate=1e-3),
    }  # fmt: skip


@pytest.fixture(scope="module")
def metrics_of(world, tmp_path_factory):
    """metrics_of(script, settings) -> the logged numbers; equal settings are run once.

    What changes no number is left out: data are read once, and nothing is checked or saved.
    """
    known, load_split = {}, cache(ppo.load_split)

    def call(script, settings):
        settings = {k: v.replace("{tmp}", str(world)) if isinstance(v, str) else v for k, v in settings.items()}
        key = script + repr(sorted(settings.items()))
        if key not in known:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(MODULES[script], "load_split", load_split)
                for name in ("Run.save", "Run.finish", "check_padding", "check_causal", "draw_images"):
                    patch.setattr(f"{script}.{name}", lambda *_, **__: None, raising=False)
                known[key] = untimed(run(MODULES[script], tmp_path_factory.mktemp("run"), **settings))
        return known[key]

    return call


def readers(script, flag):
    """The texts of the functions of a script that read a flag."""
    return {text for text in functions_of(script) if re.search(rf"\.{flag}\b", text)}


@cache
def functions_of(script):
    """The texts of the functions and methods of a script, but for checks, which change no number."""
    source = (ROOT / f"{script}.py").read_text("utf-8")
    lines, nodes = source.splitlines(), ast.walk(ast.parse(source))
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef) and not n.name.startswith("check_")]
    return ["\n".join(lines[n.lineno - 1 : n.end_lineno]) for n in functions]


def flags_to_try():
    """(script, flag) for all; slow are those that an earlier script reads in functions with the same text."""
    for i, script in enumerate(CHANGES):
        for flag in CHANGES[script]:
            earlier = [other for other in list(CHANGES)[:i] if flag in CHANGES[other]]
            is_known = any(readers(script, flag) <= readers(other, flag) for other in earlier)
            yield pytest.param(script, flag, marks=[pytest.mark.slow] * is_known)


@pytest.mark.parametrize("script, flag", list(flags_to_try()))
def test_flag_changes_the_numbers(script, flag, metrics_of, smallest):
    change = CHANGES[script][flag]
    value, both = change if isinstance(change, tuple) else (change, {})
    settings = smallest[script] | both
    assert metrics_of(script, settings | {flag: value}) != metrics_of(script, settings)


@pytest.mark.parametrize("script", MODULES)
def test_the_same_flags_give_the_same_numbers(script, metrics_of, smallest):
    """Or the test above would say nothing. Another exp_name changes no more than the name of a folder."""
    assert metrics_of(script, smallest[script] | {"exp_name": "again"}) == metrics_of(script, smallest[script])


@pytest.mark.parametrize("script", MODULES)
def test_no_flag_is_left_out(script):
    assert fields_of(script) == set(CHANGES[script]) | (set(ELSEWHERE) & fields_of(script))


def test_the_tests_elsewhere_are_there():
    texts = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert not [name for name in ELSEWHERE.values() if name.startswith("test_") and f"def {name}(" not in texts]


@pytest.mark.parametrize("script", ["ppo", "ddpo"])  # the others begin as PPO does
def test_the_default_folder_has_name_and_seed(script, tmp_path, monkeypatch, smallest):
    monkeypatch.chdir(tmp_path)
    settings = smallest[script] | dict(exp_name="trial", seed=5, device="cpu")
    MODULES[script].train(MODULES[script].Args(**settings))
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("trial__5__") and list(folder.rglob("*model.safetensors"))


@pytest.mark.parametrize("module", [ppo, ddpo])
def test_device(module, tmp_path):
    """The settings that were given stay as they were."""
    args = module.Args(device="meta", output_dir=str(tmp_path / "x"))
    assert module.start_run(args).torch_device == "meta" and args.torch_device == "cpu"


def test_rollout_in_parts_is_the_same_rollout(tmp_path, monkeypatch, tiny):
    """--local-rollout-forward-batch-size changes how many rows a forward pass has, and no number beyond rounding."""
    settings = tiny["ppo"] | {"dataset_test_split": "none", "total_episodes": 16}
    sizes, sample = [], ppo.sample
    monkeypatch.setattr(ppo, "sample", lambda *a: (sizes.append(len(a[1])), sample(*a))[1])
    a, b = (run(ppo, tmp_path / str(n), local_rollout_forward_batch_size=n, **settings) for n in (8, 3))
    assert sizes == [8] * 2 + [3, 3, 2] * 2
    for name in ("objective/scores", "objective/kl_k3", "val/response_length", "loss/value_avg"):
        assert [line[name] for line in a] == pytest.approx([line[name] for line in b], rel=1e-3, abs=1e-4), name


@pytest.mark.parametrize("script", ["ppo", "dpo", "sft", "reward_model"])  # rloo.py and grpo.py report as PPO does
def test_sample_tables(script, tmp_path, capsys, smallest):
    """As many tables as asked for, the last one at the end, and in PPO the first batch; none with 0."""
    settings, titles = smallest[script] | ({"total_episodes": 12} if script == "ppo" else {}), []
    for n in (0, 1, 3):
        run(MODULES[script], tmp_path / str(n), num_sample_generations=n, **settings)
        out = capsys.readouterr().out
        titles.append(len(re.findall(r"^ *(?:update|step) \d+ of 3 *$", out, re.MULTILINE)))
    assert titles == ([0, 2, 3] if script == "ppo" else [0, 1, 3])


CONFIGURATION = """
from transformers import GPT2Config
class OwnConfig(GPT2Config):
    model_type = "own"
"""
MODELING = """
import pathlib
from transformers import GPT2LMHeadModel
from .configuration_own import OwnConfig
pathlib.Path({mark!r}).touch()
class OwnModel(GPT2LMHeadModel):
    config_class = OwnConfig
"""


def test_python_code_in_a_checkpoint_runs_only_when_asked(tmp_path, smallest):
    folder, mark = tmp_path / "own", tmp_path / "was_here"
    shutil.copytree(ROOT / "toy/sft", folder)
    (folder / "configuration_own.py").write_text(CONFIGURATION)
    (folder / "modeling_own.py").write_text(MODELING.format(mark=str(mark)))
    config = json.loads((folder / "config.json").read_text()) | {
        "model_type": "own",
        "auto_map": {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    settings = smallest["ppo"] | {"model": str(folder)}
    with pytest.raises(ppo.UserError, match="custom code"):  # (a long path cuts off the flag that it names)
        run(ppo, tmp_path / "a", **settings)
    assert not mark.exists()
    run(ppo, tmp_path / "b", trust_remote_code=True, **settings)
    assert mark.exists()
