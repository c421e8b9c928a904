"""Settings: values and combinations that are refused, the command lines of TRL's pages, and sizes of batches."""

import json

import pytest
from runs import GOLD, NAMES, ON_PROMPTS, lines_of, main, run, script, write_rows

NAN, INF = float("nan"), float("inf")
OUT_OF_RANGE = {  # NaN and infinity, which a parser takes for numbers, too
    "temperature cliprange learning_rate max_grad_norm epsilon": (0, -1, NAN, INF),
    "kl_coef beta missing_eos_penalty weight_decay": (-1, NAN, INF),
    "lam gamma warmup_ratio": (-0.1, 1.5, NAN),
    "ratio_threshold": (0.5,),
    "response_length batch_size max_length num_mini_batches save_steps sample_num_steps": (0, -1, 1.5),
    "seed lora_r": (-1, 0.5),
    "rloo_k num_generations": (1,),
    "zero_stage": (1,),
    "model dataset": ("",),
    "lr_scheduler_type": ("reduce_lr_on_plateau", "cosine_with_min_lr"),
    "loss_type kl_estimator critic scale_rewards": ("nosuch",),
}


@pytest.mark.parametrize("name", NAMES)
def test_values_out_of_range(name):
    cases = [(field, x) for fields, values in OUT_OF_RANGE.items() for field in fields.split() for x in values]
    for field, value in [case for case in cases if case[0] in vars(script(name).Args())]:
        with pytest.raises(ValueError, match=field):  # of pydantic
            script(name).Args(**{field: value})


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("words", ["--seed nan", "--no-such-flag 1", "--save-steps 0"])
def test_a_wrong_command_line_ends_with_code_2(name, words, capsys):
    """Before anything is loaded, and it names the flag."""
    with pytest.raises(SystemExit) as end:
        main(name, *words.split())
    assert end.value.code == 2 and words.split()[0][2:] in capsys.readouterr().err.replace("_", "-")


REWARDS = """
def one(*_, **__):
    return [1.0]

def endless(prompts, **_):
    return [-float("inf")] * len(prompts)
"""
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
WRONG += [
    ("rloo", dict(rloo_k=5), "5"),
    ("grpo", dict(num_generations=3), "3"),
    ("agent", dict(num_generations=3), "3"),
]
WRONG += [(name, dict(dataset_train_split="nosuch"), "") for name in NAMES if name != "ddpo"]
WRONG = [pytest.param(*case, id=f"{case[0]}-{case[1]}") for case in WRONG if case[0] in NAMES]


@pytest.mark.parametrize(("name", "settings", "word"), WRONG)
def test_what_does_not_go_together(name, settings, word, tmp_path):
    """Settings and data end the run with a sentence of ours, before it has trained."""
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": "The film was long and I liked it"}] * 3)
    write_rows(tmp_path / "nothing.jsonl", [])
    (tmp_path / "r.py").write_text(REWARDS)
    settings = json.loads(json.dumps(settings).replace("FOLDER", str(tmp_path)))
    settings = {key: tuple(x) if isinstance(x, list) else x for key, x in settings.items()}
    with pytest.raises(SystemExit, match=f"^error: .*{word}"):
        run(name, tmp_path / "out", **settings)
    assert not list(tmp_path.glob("out/metrics.jsonl")) or not lines_of(tmp_path / "out")


# --- What follows from settings

BOTH = "--model_name_or_path A --reward_model_path C --missing_eos_penalty 1.0 --dataset_name X"
PAGES = {  # commands of TRL's pages of PPO and RLOO, after the name of the script
    "ppo": [
        "--dataset_train_split descriptiveness --learning_rate 3e-6 --num_ppo_epochs 1 --num_mini_batches 1"
        " --output_dir models/minimal/ppo --per_device_train_batch_size 64 --gradient_accumulation_steps 1"
        " --total_episodes 10000 --sft_model_path A",
        "--output_dir ppo_tldr --per_device_train_batch_size 16 --gradient_accumulation_steps 4 --stop_token eos"
        " --total_episodes 1000000 --sft_model_path A --local_rollout_forward_batch_size 16",
    ],
    "rloo": [
        "--learning_rate 3e-6 --output_dir models/minimal/rloo --per_device_train_batch_size 64"
        " --gradient_accumulation_steps 1 --total_episodes 10000",
        "--num_ppo_epochs 2 --num_mini_batches 2 --learning_rate 3e-6 --output_dir models/minimal/rloo --stop_token eos"
        " --per_device_train_batch_size 16 --gradient_accumulation_steps 16 --total_episodes 1000000 --kl_coef 0.03"
        " --sft_model_path A --local_rollout_forward_batch_size 16",
    ],
}
PAGES = [(name, f"{BOTH} {words}") for name, pages in PAGES.items() for words in pages if name in NAMES]


@pytest.mark.parametrize(("name", "words"), PAGES)
def test_commands_of_trls_pages_are_understood(name, words, monkeypatch):
    seen = []
    monkeypatch.setattr(script(name), "train", seen.append)
    main(name, *words.split())
    args = vars(seen[0])
    assert (args["dataset"], args["model"], args["reward_model"], args["stop_token"]) == ("X", "A", "C", ("eos",))
    for flag, value in zip(words.split()[::2], words.split()[1::2]):
        number = args.get(flag[2:])
        assert isinstance(number, (str, tuple, type(None))) or number == float(value)


@pytest.mark.parametrize("name", [name for name in ON_PROMPTS if name in ("ppo", "rloo")])
def test_a_batch_may_be_given_as_in_trl(name, tiny, tmp_path):
    """A size per device, times accumulation, mini-batches and processes."""
    settings = tiny[name] | dict(num_mini_batches=2, per_device_train_batch_size=2, gradient_accumulation_steps=3)
    assert run(name, tmp_path / "a", **settings)[-1]["episode"] == 24  # two updates of twelve
    args = json.loads((tmp_path / "a/args.json").read_text())
    assert (args["batch_size"], args["micro_batch_size"]) == (12, 2)


def test_default_learning_rates_and_sizes(monkeypatch):
    """For a model of GPT-2's size, of a tenth of it, and of 7B; adapters learn at ten times the rate. On a GPU a
    micro-batch has 8192 tokens."""
    module = script("ppo")
    policy = module.load_models(module.Args(device="cpu"))[0]
    prompts = [{"input_ids": [5] * 11}]
    choose = lambda **settings: module.choose_sizes(module.Args(**settings), policy, prompts)  # noqa: E731
    for size, rate in ((124e6, 1e-5), (12.4e6, 4e-5), (7e9, 3e-6)):
        monkeypatch.setattr(policy, "num_parameters", lambda size=int(size): size)
        found = [choose(lora_r=r, device="cpu").learning_rate for r in (0, 4)]
        assert found == pytest.approx([rate, 10 * rate], rel=0.02)  # they have two digits
    assert [choose(device=device).micro_batch_size for device in ("cpu", "cuda")] == [16, 8192 // (11 + 53)]
