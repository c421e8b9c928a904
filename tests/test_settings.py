"""Settings: values and combinations that are refused, the command lines of TRL's pages, and sizes of batches."""

import json
import shutil
import sys

import pytest
import torch
from runs import GOLD, NAMES, ON_PROMPTS, main, run, script, slow_but, words_of, write_rows
from sources import lines_of as lines_of_file
from torch.optim.optimizer import register_optimizer_step_pre_hook


REWARDS = """
def endless(prompts, **_):
    return [-float("inf")] * len(prompts)

def negative(prompts, **_):
    return [-1.0] * len(prompts)

def of_size(completions, size, **_):
    return [0.0] * len(completions)

def closed(completions):
    return [0.0] * len(completions)
"""
OF_THREE = [  # settings of ppo.py, rloo.py and grpo.py, and what the message says
    (dict(batch_size=50, num_mini_batches=4), "50"),
    (dict(batch_size=64, total_episodes=10), "64"),
    (dict(response_length=159), "tokens"),
    (dict(model="toy/sft", dataset="FOLDER/prompts.jsonl", max_prompt_length=2), "max-prompt-length"),
    (dict(reward_weights=(1.0, 2.0)), "reward-weights"),
    (dict(reward_fn=(GOLD, GOLD)), "gold_score"),
    (dict(reward_fn=("nowhere.py:f",)), "nowhere"),
    (dict(reward_fn=("FOLDER/r.py:endles",)), "endless"),
    (dict(reward_fn=("FOLDER/r.py:endless",)), "endless"),
]
WRONG = [(name, *case) for name in ("ppo", "rloo", "grpo") for case in OF_THREE]
WRONG += [("rloo", dict(rloo_k=5), "5"), ("grpo", dict(num_generations=3), "3")]
WRONG += [("sft", dict(model=None, lora_r=1), "lora")]
WRONG += [
    ("grpo", dict(scale_rewards="mean", reward_fn=("FOLDER/r.py:negative",), num_eval_prompts=0), "scale-rewards")
]
WRONG += [(name, dict(dataset_train_split="nosuch"), "validation") for name in ("ppo", "sft", "dpo")]
WRONG += [(name, dict(dataset="toy/typo"), "toy/typo") for name in NAMES if name != "ddpo"]
WRONG += [(name, dict(model="./typo"), "typo") for name in NAMES if name != "ddpo"]  # which leaves it to the library
WRONG += [(name, dict(model="FOLDER/fp8"), "fp8") for name in ON_PROMPTS]  # the others have the same function
WRONG += [("agent", dict(credit="turn", scale_rewards="none"), "credit")]
WRONG += [("ddpo", dict(dataset="FOLDER/talk.jsonl"), "not a text"), ("ddpo", dict(dataset="FOLDER"), "no prompts")]
WRONG += [("agent", dict(env="nowhere.py:f"), "nowhere")]
WRONG = [case for case in WRONG if case[0] in NAMES]
WRONG = slow_but([case for case in WRONG if case[0] in ("ppo", "sft", "dpo")], WRONG)


@pytest.mark.parametrize(("name", "settings", "word"), WRONG)
def test_what_does_not_go_together(name, settings, word, tmp_path, monkeypatch):
    """Settings and data end the run with a sentence of ours, before it has trained."""
    monkeypatch.setattr(script(name).Run, "log", None)
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": "The film was long and I liked it"}] * 3)
    write_rows(tmp_path / "talk.jsonl", [{"prompt": [{"role": "user", "content": "A bird"}]}])
    (tmp_path / "train.jsonl").write_text("")
    (tmp_path / "r.py").write_text(REWARDS)
    shutil.copytree("toy/sft", tmp_path / "fp8")
    config = json.loads((tmp_path / "fp8/config.json").read_text()) | dict(quantization_config=dict(quant_method="fp8"))
    (tmp_path / "fp8/config.json").write_text(json.dumps(config))
    settings = json.loads(json.dumps(settings).replace("FOLDER", str(tmp_path)))
    settings = {key: tuple(x) if isinstance(x, list) else x for key, x in settings.items()}
    with pytest.raises(SystemExit, match=f"^error: .*{word}"):
        main(name, *words_of(**dict(output_dir=tmp_path / "out", device="cpu") | settings))


@pytest.mark.parametrize("name", slow_but(["ppo"], NAMES))
def test_a_folder_with_files_is_seen_before_models_are_loaded(name, tmp_path, monkeypatch):
    monkeypatch.setattr(script(name), "load_chain" if name == "ddpo" else "load_model", None)
    test_what_does_not_go_together(name, dict(output_dir="FOLDER"), "output-dir", tmp_path, monkeypatch)


@pytest.mark.parametrize("function", ["of_size", "closed"])
def test_a_function_with_other_parameters_ends_the_run_before_an_update(function, tmp_path, monkeypatch):
    """A parameter that is no column, and a function that does not take all columns: Python's error names both."""
    monkeypatch.setattr(script("ppo"), "update", None)
    (tmp_path / "r.py").write_text(REWARDS)
    with pytest.raises(TypeError, match=rf"{function}\(\) .* argument:? '\w+'"):
        run("ppo", tmp_path / "run", reward_fn=(f"{tmp_path}/r.py:{function}",), num_eval_prompts=4)


# --- What follows from settings


def test_default_learning_rates_and_sizes(monkeypatch):
    """For a model of GPT-2's size, of a tenth of it, and of 7B; adapters learn at ten times the rate. On a GPU a
    micro-batch has 8192 tokens."""
    module = script("ppo")
    policy = module.load_models(module.Args(device="cpu"))[0]
    prompts = [{"input_ids": [5] * 11}]
    choose = lambda **settings: module.choose_sizes(module.Args(**settings), policy, prompts, [])  # noqa: E731
    for size, rate in ((124e6, 1e-5), (12.4e6, 4e-5), (7e9, 3e-6)):
        monkeypatch.setattr(policy, "num_parameters", lambda size=int(size): size)
        found = [choose(lora_r=r, device="cpu").learning_rate for r in (0, 4)]
        assert found == pytest.approx([rate, 10 * rate], rel=0.02)  # they have two digits
    assert [choose(device=device).micro_batch_size for device in ("cpu", "cuda")] == [16, 8192 // (11 + 53)]


OF_ADAM = dict(weight_decay=0.3, adam_betas=(0.7, 0.8), adam_epsilon=1e-4, max_grad_norm=1e-3, learning_rate=1e-3)
OF_ADAM |= dict(lr_scheduler_type="linear", warmup_ratio=0.5, num_ppo_epochs=1, num_train_epochs=1.5)


@pytest.mark.parametrize("name", slow_but(["rloo", "dpo", "sft", "reward_model"], NAMES))
def test_every_step_has_the_settings_of_the_optimizer(name, tiny, tmp_path, request):
    """Those of AdamW, the norm of the gradient, and a learning rate that rises over half of the run, and falls."""
    rates = []

    def note(optimizer, *_):
        for group in optimizer.param_groups:
            norm = torch.nn.utils.get_total_norm([p.grad for p in group["params"] if p.grad is not None])
            assert norm.item() == pytest.approx(1e-3, rel=1e-3) and group["weight_decay"] == 0.3
            assert (group["betas"], group["eps"]) == ((0.7, 0.8), 1e-4) or "adam_betas" not in given and name != "ddpo"
        rates.append(group["lr"])

    kinds = {"adam_beta1": 0.7, "adam_beta2": 0.8, "adam_weight_decay": 0.3}
    given = OF_ADAM | ({f"train_{key}": x for key, x in (OF_ADAM | kinds).items()} if name == "ddpo" else {})
    given["missing_eos_penalty"] = 1.0  # in each batch some response does not end
    given = {key: x for key, x in (tiny[name] | given).items() if hasattr(script(name).Args, key)}
    request.addfinalizer(register_optimizer_step_pre_hook(note).remove)
    run(name, tmp_path / "run", **given)
    n = len(rates)
    rise = n // 2
    shares = [i / rise for i in range(rise)] + [(n - i) / (n - rise) for i in range(rise, n)]
    assert rates == pytest.approx([1e-3 * (1 if name == "ddpo" else x) for x in shares]) and n > 1


TRL_COMMAND = (
    "--dataset_name {0}/data --dataset_train_split descriptiveness --learning_rate 3e-6 --output_dir {0}/out "
    "--batch_size 64 --total_episodes 64 --missing_eos_penalty 1.0 "
    "--model_name_or_path toy/sft --sft_model_path toy/sft --reward_model_path toy/reward_model --device cpu "
    "--num_mini_batches 2 --local_rollout_forward_batch_size 16 "
    "--num_generations 4 --max_completion_length 6 --num_iterations 2 --epsilon 0.1 --beta 0.03"  # since 0.22
)


def test_a_command_of_trls_pages_trains(tmp_path):
    """With local folders for the hub's names and fewer episodes."""
    (tmp_path / "data").mkdir()
    rows = "\n".join(lines_of_file("toy/data/prompts/train.jsonl")[:64])
    (tmp_path / "data/descriptiveness.jsonl").write_text(rows)
    main("rloo", *TRL_COMMAND.format(tmp_path).split())
    args = json.loads((tmp_path / "out/args.json").read_text())
    names = "batch_size rloo_k response_length num_ppo_epochs cliprange kl_coef learning_rate"
    assert [args[name] for name in names.split()] == [64, 4, 6, 2, 0.1, 0.03, 3e-6]


def test_ppo_knows_trls_names_of_its_settings(monkeypatch):
    """Those of 0.7 and 0.16."""
    flags = "--ppo_epochs 2 --init_kl_coef 0.3 --reward_funcs f.py:f"
    flags += " --lr 2e-5 --model_name_or_path a --reward_model_path b --dataset_name c --dataset_config_name d"
    monkeypatch.setattr(sys, "argv", ["ppo.py", *flags.split()])
    args = script("ppo").read_command_line()
    assert (args.num_ppo_epochs, args.kl_coef, args.learning_rate) == (2, 0.3, 2e-5)
    assert (args.reward_fn, args.model, args.reward_model) == (("f.py:f",), "a", "b")
    assert (args.dataset, args.dataset_config) == ("c", "d")
