"""Settings: values and combinations that are refused, the command lines of TRL's pages, and sizes of batches."""

import json
import pickle

import pytest
from runs import GOLD, NAMES, ON_PROMPTS, lines_of, main, run, script, write_rows
from sources import ROOT

# --- Values


@pytest.mark.parametrize("name", NAMES)
def test_values_out_of_range(name):
    """NaN and infinity, which a parser takes for numbers, too."""
    nan, inf = float("nan"), float("inf")
    wrong = {
        "temperature cliprange learning_rate max_grad_norm epsilon": (0, -1, nan, inf),
        "kl_coef beta missing_eos_penalty weight_decay": (-1, nan, inf),
        "lam gamma warmup_ratio": (-0.1, 1.5, nan),
        "ratio_threshold": (0.5,),
        "response_length batch_size max_length num_mini_batches save_steps sample_num_steps": (0, -1, 1.5),
        "seed lora_r": (-1, 0.5),
        "rloo_k num_generations": (1,),
        "zero_stage": (1,),
        "model dataset": ("",),
        "lr_scheduler_type": ("reduce_lr_on_plateau", "cosine_with_min_lr"),
        "loss_type kl_estimator critic scale_rewards": ("nosuch",),
    }
    known = vars(script(name).Args())
    cases = [(field, x) for fields, values in wrong.items() for field in fields.split() for x in values]
    for field, value in [case for case in cases if case[0] in known]:
        with pytest.raises(ValueError, match=field):  # of pydantic
            script(name).Args(**{field: value})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("words", [("--learning-rate", "nan"), ("--no-such-flag", "1"), ("--batch-size",)])
def test_a_wrong_command_line_ends_with_code_2(name, words, monkeypatch, capsys):
    """Before anything is loaded, and it names the flag."""
    if name == "ddpo":
        words = tuple(
            word.replace("--learning", "--train-learning").replace("--batch", "--train-batch") for word in words
        )
    monkeypatch.setattr(script(name), "train", lambda _: pytest.fail("it trains"))
    with pytest.raises(SystemExit) as end:
        main(name, *words)
    assert end.value.code == 2 and words[0][2:] in capsys.readouterr().err.replace("_", "-")


# --- Settings and data that do not go together

REWARDS = """
import math


def one(*_, **__):
    return [1.0]


def endless(prompts, **_):
    return [-math.inf] * len(prompts)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Where FOLDER leads: prompts, reward functions, a policy whose tokenizer has no EOS."""
    folder = tmp_path_factory.mktemp("files")
    write_rows(folder / "prompts.jsonl", [{"prompt": "The film was long and I liked it"}] * 3)
    write_rows(folder / "nothing.jsonl", [])
    (folder / "r.py").write_text(REWARDS)
    return folder


OF_PPO = [  # and what the message says
    (dict(batch_size=50, num_mini_batches=4), "50.*4"),
    (dict(batch_size=64, total_episodes=10), "64"),
    (dict(response_length=159), "tokens"),
    (dict(dataset="FOLDER/prompts.jsonl", max_prompt_length=2), "no prompts"),
    (dict(dataset="FOLDER/nothing.jsonl"), "no prompts"),
    (dict(reward_weights=(1.0, 2.0)), "reward-weights"),
    (dict(reward_fn=(GOLD, GOLD)), "gold_score"),
    (dict(reward_fn=("gold_score",)), "file.py:name"),
    (dict(reward_fn=("FOLDER/r.py:one",)), "1 rewards for 64 rows"),
    (dict(reward_fn=("FOLDER/r.py:endless",)), "infinite"),
    (dict(zero_stage=3), "torchrun"),
]
WRONG = [("ppo", *case) for case in OF_PPO]
WRONG += [(name, dict(zero_stage=2), "torchrun") for name in NAMES if name not in ("ppo", "ddpo")]
WRONG += [(name, dict(dataset_train_split="nosuch"), "") for name in NAMES if name != "ddpo"]
WRONG += [
    ("rloo", dict(rloo_k=5), "5"),
    ("grpo", dict(num_generations=3), "3"),
    ("agent", dict(num_generations=3), "3"),
]


@pytest.mark.parametrize(
    ("name", "settings", "word"), [pytest.param(*case, id=f"{case[0]}-{case[1]}") for case in WRONG if case[0] in NAMES]
)
def test_what_does_not_go_together(name, settings, word, files, tmp_path):
    """Each ends the run with a sentence of ours, before it has trained."""
    settings = json.loads(json.dumps(settings).replace("FOLDER", str(files)))
    settings = {key: tuple(x) if isinstance(x, list) else x for key, x in settings.items()}
    with pytest.raises(SystemExit, match=f"^error: .*{word}"):
        run(name, tmp_path / "out", **settings)
    assert not list(tmp_path.glob("out/metrics.jsonl")) or not lines_of(tmp_path / "out")


@pytest.mark.parametrize("name", [name for name in NAMES if name != "ddpo"])
def test_what_is_not_there_is_named(name, tmp_path):
    """By a library, whose message is enough."""
    for settings in (dict(model=f"{tmp_path}/nosuch"), dict(dataset=f"{tmp_path}/nosuch.jsonl")):
        with pytest.raises((Exception, SystemExit), match="nosuch"):
            run(name, tmp_path / "out", **settings)


# --- What follows from settings

PAGES = {  # commands of TRL's pages of PPO and RLOO, after the name of the script
    "ppo": [
        "--dataset_name X --dataset_train_split descriptiveness --learning_rate 3e-6 --num_ppo_epochs 1"
        " --num_mini_batches 1 --output_dir models/minimal/ppo --per_device_train_batch_size 64"
        " --gradient_accumulation_steps 1 --total_episodes 10000 --model_name_or_path A --sft_model_path B"
        " --reward_model_path C --missing_eos_penalty 1.0",
        "--dataset_name X --output_dir ppo_tldr --per_device_train_batch_size 16 --gradient_accumulation_steps 4"
        " --total_episodes 1000000 --model_name_or_path A --sft_model_path B --reward_model_path C"
        " --local_rollout_forward_batch_size 16 --missing_eos_penalty 1.0 --stop_token eos",
    ],
    "rloo": [
        "--dataset_name X --learning_rate 3e-6 --output_dir models/minimal/rloo --per_device_train_batch_size 64"
        " --gradient_accumulation_steps 1 --total_episodes 10000 --model_name_or_path A --reward_model_path C"
        " --missing_eos_penalty 1.0",
        "--dataset_name X --num_ppo_epochs 2 --num_mini_batches 2 --learning_rate 3e-6 --output_dir models/minimal/rloo"
        " --per_device_train_batch_size 16 --gradient_accumulation_steps 16 --total_episodes 1000000"
        " --model_name_or_path A --sft_model_path B --reward_model_path C --local_rollout_forward_batch_size 16"
        " --missing_eos_penalty 1.0 --stop_token eos --kl_coef 0.03",
    ],
}
PAGES = [(name, words) for name, pages in PAGES.items() for words in pages if name in NAMES]


@pytest.mark.parametrize(("name", "words"), PAGES)
def test_commands_of_trls_pages_are_understood(name, words, monkeypatch):
    seen = []
    monkeypatch.setattr(script(name), "train", seen.append)
    main(name, *words.split())
    (args,) = seen
    assert (args.dataset, args.reward_model, args.missing_eos_penalty) == ("X", "C", 1.0)
    assert args.model in ("A", "B") and args.output_dir in words and args.stop_token == ("eos",)
    flags = dict(zip(words.split()[::2], words.split()[1::2]))
    for flag, value in flags.items():
        if hasattr(args, flag[2:]) and flag != "--stop_token":
            assert str(getattr(args, flag[2:])) in (value, str(float(value)) if value[0].isdigit() else value)


@pytest.mark.parametrize(
    "name", [name for name in ON_PROMPTS if hasattr(script(name).Args, "per_device_train_batch_size")]
)
def test_a_batch_may_be_given_as_in_trl(name, tiny, tmp_path):
    """A size per device, times accumulation, mini-batches and processes."""
    settings = tiny[name] | dict(num_mini_batches=2, per_device_train_batch_size=2, gradient_accumulation_steps=3)
    assert run(name, tmp_path / "a", **settings)[-1]["episode"] == 24  # two updates of twelve
    args = json.loads((tmp_path / "a/args.json").read_text())
    assert (args["batch_size"], args["micro_batch_size"]) == (12, 2)


RATES = {  # of a model of GPT-2's size, of a tenth of it, and of one of 7B
    "ppo": (1e-5, 4e-5, 3e-6),  # 10 ** 0.6 is 3.98
    "rloo": (1e-5, 4e-5, 3e-6),
    "grpo": (1e-5, 4e-5, 3e-6),
}


@pytest.mark.parametrize("name", [name for name in RATES if name in NAMES])
def test_default_learning_rates_and_sizes(name, monkeypatch):
    """Adapters learn at ten times the rate. On a GPU a micro-batch has 8192 tokens."""
    module = script(name)
    policy = module.load_models(module.Args(device="cpu"))[0]
    k = [8] if name in ("rloo", "grpo") else []  # responses to a prompt
    choose = lambda *args: module.choose_sizes(*args, *k)  # noqa: E731
    for size, rate in zip((124e6, 12.4e6, 7e9), RATES[name]):
        monkeypatch.setattr(policy, "num_parameters", lambda size=int(size): size)
        args = [module.Args(lora_r=r, device="cpu") for r in (0, 4)]
        found = [choose(x, policy, [{"input_ids": [5] * 11}]).learning_rate for x in args]
        assert found == pytest.approx([rate, 10 * rate], rel=0.02)  # they have two digits
    sizes = [choose(module.Args(device=x), policy, [{"input_ids": [5] * 11}]) for x in ("cpu", "cuda")]
    whole = 8 if name == "grpo" else 1  # of whose groups prompts are read once
    assert sizes[1].micro_batch_size == 8192 // (11 + sizes[1].response_length) // whole * whole
    assert sizes[0].micro_batch_size in (16, 32)


def test_a_reward_function_can_be_sent_to_processes_and_has_neighbours(tmp_path, monkeypatch):
    (tmp_path / "near_a_test.py").write_text("def b():\n    return 1\n")
    (tmp_path / "judge_of_a_test.py").write_text("from near_a_test import b\n\n\ndef a():\n    return b\n")
    monkeypatch.syspath_prepend(tmp_path / "none")  # the list is as it was afterwards
    a = script(ON_PROMPTS[0]).load_function(f"{tmp_path}/judge_of_a_test.py", "a")
    assert pickle.loads(pickle.dumps(a)) is a and a()() == 1


def test_default_paths_lead_to_the_toy_world_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = script(NAMES[0]).Args()
    assert args.model and args.model.startswith(str(ROOT)) and args.dataset.startswith(str(ROOT))
    monkeypatch.chdir(ROOT)
