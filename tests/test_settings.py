"""Settings: the command line, other libraries' spellings, values that are refused, and what follows from them."""

import dataclasses
import json
import math
import pickle
import shutil
import sys

import datasets
import pandas
import pydantic
import pytest
import torch
from huggingface_hub import constants
from runs import GOLD, lines_of, main, run, write_rows
from sources import ROOT
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

import ddpo
import dpo
import grpo
import ppo
import reward_model
import rloo
import sft

MODULES = [ppo, rloo, grpo, dpo, sft, reward_model, ddpo]


def name_of(module):
    return module.__name__


# --- Values


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_values_out_of_range(module):
    """NaN and infinity, which a parser takes for numbers, too."""
    wrong = {
        "temperature cliprange learning_rate max_grad_norm num_train_epochs epsilon": (0, -1, math.nan, math.inf),
        "kl_coef missing_eos_penalty weight_decay vf_coef sample_guidance_scale": (-1, math.nan, math.inf, -math.inf),
        "lam gamma warmup_ratio eos_dropout train_timestep_fraction": (-0.1, 1.5, math.nan),
        "ema_decay train_adam_beta1": (-0.1, 1.0, math.nan),
        "response_length batch_size max_length num_mini_batches save_steps sample_num_steps": (0, -1, 1.5),
        "seed lora_r num_sample_generations": (-1, 0.5),
        "rloo_k num_generations": (1,),
        "zero_stage": (1,),
        "model dataset exp_name": ("",),
        "loss_type kl_estimator critic": ("nosuch",),
    }
    known = vars(module.Args())
    for names, values in wrong.items():
        for name in set(names.split()) & set(known):
            for value in values:
                with pytest.raises(pydantic.ValidationError, match=name):
                    module.Args(**{name: value})


@pytest.mark.parametrize(
    "module, words, expected",
    [
        (ppo, ["--kl-coef", "nan"], "finite"),
        (ppo, ["--adam-betas", "0.9", "1"], "less than 1"),
        (ddpo, ["--sample-num-steps", "0"], "greater"),
        (rloo, ["--no-such-flag", "1"], "no-such-flag"),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_wrong_words_end_with_code_2(module, words, expected, monkeypatch, capsys):
    """Before anything is loaded."""
    monkeypatch.setattr(module, "train", lambda _: pytest.fail("it trains"))
    with pytest.raises(SystemExit) as end:
        main(module, *words)
    assert end.value.code == 2
    assert expected in capsys.readouterr().err


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
    folder = tmp_path_factory.mktemp("files")
    rows = {
        "prompt": {"prompt": "The film was long and I liked it"},
        "short": {"text": "The film"},
        "empty": {"prompt": ""},
        "same": {"chosen": "a b", "rejected": "a b"},
        "null": {"prompt": None},
        "clash": {"prompt": "The film", "completions": "mine"},
        "asked": {side: [{"role": "user", "content": side}] for side in ("chosen", "rejected")},
    }
    for name, row in rows.items():
        (folder / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 3)
    (folder / "nothing.jsonl").touch()
    pandas.DataFrame({"text": []}, dtype=str).to_parquet(folder / "rowless.parquet")
    (folder / "talk.jsonl").write_text('{"text": [{"role": "user", "content": "So?"}]}\n' * 3)
    said = [{"role": "user", "content": "So?"}, {"role": "assistant", "content": "So."}]
    write_rows(folder / "answered.jsonl", [{"prompt": said[:n]} for n in (1, 2, 1)])
    (folder / "long").mkdir()
    for split, length in (("train", 3), ("validation", 81)):
        write_rows(folder / f"long/{split}.jsonl", [{"prompt": "." * n} for n in (1, length, 1)])
    for name, model in (("chat", "sft"), ("mute", "sft"), ("mute_judge", "reward_model")):
        shutil.copytree(ROOT / "toy" / model, folder / name)
    for file in folder.glob("mute*/*token*"):
        file.unlink()
    (folder / "r.py").write_text(REWARDS)
    two = AutoConfig.from_pretrained(ROOT / "toy/base", num_labels=2)
    AutoModelForSequenceClassification.from_config(two).save_pretrained(folder / "two")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/base")
    tokenizer.save_pretrained(folder / "two")
    shutil.copytree(ROOT / "toy/sft", folder / "endless")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder / "chat")
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder / "endless")
    (folder / "endless/generation_config.json").write_text("{}")
    return folder


GUESS = dict(model="toy/guess/sft", env="toy/guess/make.py:Game", dataset="toy/guess/data/prompts")
NO_SPLIT = dict(dataset_test_split="none")
WRONG = [
    (ppo, dict(response_length=159), "159"),
    *[(m, dict(model="toy/sft", dataset="long", response_length=80), "81 tokens") for m in (ppo, rloo, grpo)],
    *[(module, dict(model="chat", dataset="answered.jsonl"), "assistant") for module in (ppo, rloo, grpo)],
    *[(module, dict(model="mute"), "mute has no tokenizer") for module in (ppo, rloo, grpo, dpo, sft, reward_model)],
    (ppo, dict(reward_model="mute_judge"), "mute_judge has no tokenizer"),
    *[(module, dict(dataset="nowhere.jsonl"), "there is no nowhere.jsonl") for module in MODULES],
    (ppo, dict(dataset="prompt.jsonl", max_prompt_length=2), "max-prompt-length"),
    (ppo, dict(dataset="empty.jsonl"), "dropped 3 of 3"),
    (ppo, dict(dataset="clash.jsonl"), "completions"),
    (ppo, dict(batch_size=50, num_mini_batches=4), "divisible"),
    (ppo, dict(batch_size=64, total_episodes=10), "64"),
    (ppo, dict(stop_token=("the end of it all",)), "stop-token"),
    (ppo, dict(stop_token=("99999",)), "99999"),
    (ppo, dict(model="endless"), "stop-token"),
    (dpo, dict(model="endless"), "EOS"),
    (ppo, dict(reward_model="two"), "rewards/classifier.py"),
    (ppo, dict(ptx_coef=1.0), "pretrain-data"),
    *[
        (module, dict(response_length=53, response_length_min=54), "response-length-min")
        for module in (ppo, rloo, grpo)
    ],
    (rloo, dict(pretrain_data="toy/data/sft"), "ptx-coef"),
    (rloo, dict(pretrain_data="talk.jsonl", ptx_coef=1.0), "must hold texts"),
    *[(module, dict(aux_loss_coef=0.1), "mixture of experts") for module in (ppo, rloo, grpo)],
    (ppo, dict(vf_coef=0, critic_warmup_updates=1), "--vf-coef 0"),
    (ppo, dict(critic_warmup_updates=32), "--critic-warmup-updates 32"),
    (rloo, dict(kl_coef=0, adaptive_kl=True), "--kl-coef 0"),
    (ppo, dict(stop_token=("none",), missing_eos_penalty=2), "--stop-token none"),
    (rloo, dict(reward_fn=(GOLD,), reward_model="toy/reward_model/"), "--reward-fn"),
    (rloo, dict(dataset_test_split="none", num_eval_prompts=3), "--dataset-test-split none"),
    (sft, dict(dataset_test_split="none", eval_steps=3), "--dataset-test-split none"),
    (dpo, dict(lr_scheduler_type="constant", warmup_ratio=0.2), "--lr-scheduler-type constant"),
    (sft, dict(model="toy/sft", from_scratch="toy/sft"), "--model"),
    (reward_model, dict(dataset="same.jsonl", dataset_config="en"), "is a file"),
    (ppo, dict(exp_name="mine"), "--output-dir"),
    (ppo, dict(batch_size=8, per_device_train_batch_size=4, gradient_accumulation_steps=2), "beside --batch-size"),
    (sft, dict(batch_size=8, per_device_train_batch_size=4, micro_batch_size=2), "beside --batch-size"),
    (ppo, dict(reward_weights=(1.0, 2.0)), "reward-weights"),
    (ppo, dict(reward_fn=(GOLD, GOLD)), "gold_score"),
    (ppo, dict(reward_fn=("gold_score",)), "file.py:name"),
    (ppo, dict(reward_fn=("r.py:one",)), "a list of 64 rewards"),
    *[(module, dict(reward_fn=("r.py:endless",)), "infinite reward") for module in (ppo, rloo, grpo)],
    (grpo, dict(max_turns=2), "--env"),
    (ppo, dict(dataset="null.jsonl"), "'prompt' holds None"),
    (sft, dict(dataset="nothing.jsonl"), "empty"),
    (sft, dict(dataset="rowless.parquet"), "cannot be read"),
    (dpo, dict(dataset="asked.jsonl"), "user's messages differ"),
    (rloo, dict(rloo_k=5), "rloo-k"),
    (sft, dict(lora_r=2), "--model"),
    (sft, dict(dataset="short.jsonl", packing=True, **NO_SPLIT), "max-length"),
    (reward_model, dict(dataset="same.jsonl", **NO_SPLIT), "whose texts are equal"),
    (ppo, dict(zero_stage=3), "torchrun"),
    (rloo, dict(zero_stage=2, shard_size=2), "torchrun"),
    (dpo, dict(label_smoothing=0.1, loss_type="ipo"), "--label-smoothing"),
    (dpo, dict(reference_free=True, loss_type="kto_pair"), "needs the reference"),
    (dpo, dict(max_length=100, max_prompt_length=100), "--max-prompt-length"),
    (grpo, dict(num_generations=3), "--num-generations 3"),
    (grpo, dict(mask_truncated_completions=True, stop_token=("none",)), "--stop-token none"),
    (grpo, GUESS | dict(stop_token=("none",)), "--env"),
    (grpo, GUESS | dict(response_length_min=4), "--env"),
    (grpo, GUESS | dict(reward_fn=(GOLD,)), "--env"),
    (grpo, dict(baseline="none", scale_rewards="batch"), "--baseline none"),
    (grpo, dict(baseline="none", dynamic_sampling=2), "--baseline none"),
    (
        grpo,
        dict(scale_rewards="mean", missing_eos_penalty=9, response_length=2, total_episodes=64),
        "--scale-rewards mean",
    ),
    (grpo, dict(loss_type="cispo", epsilon=0.1), "--loss-type cispo"),
    (grpo, dict(loss_type="cispo", delta=9), "--loss-type cispo"),
    (grpo, dict(delta=1.25, epsilon_high=0.28), "--delta"),
    (dpo, dict(reference_free=True, precompute_ref=True), "--reference-free"),
    (ddpo, dict(per_prompt_stat_tracking=True, per_prompt_stat_tracking_min_count=20), "min-count"),
    (ddpo, dict(reward_fn=("r.py:one",)), "a list of"),
    (ddpo, dict(exp_name="mine"), "--exp-name"),
    (ddpo, dict(negative_prompts="a star", sample_guidance_scale=1.0), "--negative-prompts"),
    (ddpo, dict(prompt_column="question"), "--prompt-column"),
    (ddpo, dict(train_batch_size=3), "multiple of"),
    (ddpo, dict(train_gradient_accumulation_steps=5), "multiple of"),
    (ddpo, dict(reward_weights=(1, 2)), "--reward-weights"),
]


@pytest.mark.parametrize("module, settings, word", WRONG, ids=[f"{m.__name__}-{' '.join(s)}" for m, s, _ in WRONG])
def test_what_does_not_go_together(module, settings, word, files, tmp_path):
    """Each ends the program with a sentence that only we could write."""
    settings = {name: found(value, files) for name, value in settings.items()}
    with pytest.raises(SystemExit, match=f"^error: .*{word}"):
        run(module, tmp_path / "out", **settings)


def found(value, folder):
    """The same, with a path where it names one of the files."""
    if isinstance(value, tuple):
        return tuple(found(x, folder) for x in value)
    if isinstance(value, str) and (folder / value.partition(":")[0]).exists():
        return f"{folder}/{value}"
    return value


BY_DATA = {"text_column", "truncation_mode"}  # read if the data have no other column, or pairs that are too long


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_no_setting_is_ignored(module, tiny, tmp_path, monkeypatch):
    """What a default run never reads is refused, if it is changed alone; but it may say once more that it is off."""
    read = set()
    writers = ("asdict", "_asdict_inner", "replace", "_replace", "check_args", "check_common_args", "refuse_unused")

    def note(args, name):
        if sys._getframe(1).f_code.co_name not in writers:
            read.add(name)
        return object.__getattribute__(args, name)

    with monkeypatch.context() as patch:
        patch.setattr(module.Args, "__getattribute__", note)
        run(module, tmp_path, **tiny[module.__name__])
    ignored = []
    monkeypatch.setattr(module, "start", lambda args: sys.exit(ignored.append(setting.name)))  # all checks are made
    for setting in dataclasses.fields(module.Args):
        default = getattr(module.Args(), setting.name)
        value = {bool: not default, tuple: ("7",)}.get(type(default), "7")  # a number, if it is to be one
        if setting.name not in read | BY_DATA and value is not False:
            with pytest.raises(SystemExit):
                module.train(module.Args(**{"output_dir": str(tmp_path), setting.name: value}))
    assert ignored == []


@pytest.mark.parametrize(
    "module, words",
    [
        (
            ppo,
            "--kl-target 6 --lora-alpha 32 --missing-eos-penalty 1 --stop-token none --gradient-accumulation-steps 1",
        ),
        (rloo, "--reward-fn toy/gold_score.py:gold_score --reward-model toy/reward_model --kl-coef 0 --no-adaptive-kl"),
        (grpo, "--baseline none --scale-rewards none --loss-type cispo --epsilon 0.2"),
        (grpo, "--dataset-test-split none --eval-steps 50 --num-generations 8 --epsilon-high 0.28 --delta 4"),
        (dpo, "--lr-scheduler-type constant --warmup-ratio 0 --loss-type ipo --label-smoothing 0"),
        (sft, "--lr-scheduler-type constant --per-device-train-batch-size 2 --gradient-accumulation-steps 8"),
        (ddpo, "--exp-name ddpo --output-dir runs/x --wandb-project-name rlhf"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_says_once_more_that_it_is_off_is_not_refused(module, words, monkeypatch):
    """Nor is a value that is the default, beside whatever switches the setting off."""
    monkeypatch.setattr(module, "train", module.check_args)
    main(module, *words.split())


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_a_run_without_an_output_folder_can_have_a_name(module, monkeypatch):
    monkeypatch.setattr(module, "start", lambda args: sys.exit("all settings are accepted"))
    with pytest.raises(SystemExit, match="all settings are accepted"):
        main(module, "--exp-name", "mine")


def test_without_stop_tokens_no_response_pays_for_having_none(tmp_path, tiny):
    *_, line = run(ppo, tmp_path, stop_token=("none",), **tiny["ppo"])
    assert line["objective/scores"] == line["rewards/reward_model/mean"]


@pytest.mark.parametrize("module", [ppo, sft], ids=name_of)
def test_a_run_whose_batch_was_counted_goes_on(module, tmp_path, tiny):
    """Its settings then have what was asked for, and what followed from it."""
    counted = dict(per_device_train_batch_size=4, gradient_accumulation_steps=2)
    settings = {name: x for name, x in tiny[module.__name__].items() if name != "batch_size"}
    before = run(module, tmp_path, **settings, **counted)
    main(module, "--resume", tmp_path)
    assert lines_of(tmp_path) == before


def test_processes_that_a_reward_function_starts_find_it(tmp_path, monkeypatch):
    """Under the name of its file, in which two functions share what they remember; so with its neighbour, which is not
    taken for an installed package of that name."""
    judge, near = "judge_of_a_test", "near_a_test"
    (tmp_path / "installed").mkdir()
    (tmp_path / f"installed/{near}.py").write_text("b = None\n")
    monkeypatch.syspath_prepend(tmp_path / "installed")
    (tmp_path / f"{near}.py").write_text("def b():\n    return 1\n")
    (tmp_path / f"{judge}.py").write_text(f"from {near} import b\n\n\ndef a():\n    return b\n")
    a, b = (ppo.load_function(f"{tmp_path}/{judge}.py:{name}") for name in "ab")
    assert pickle.loads(pickle.dumps((a, b))) == (a, b) and b is a() and b() == 1


def test_a_run_with_a_broken_policy_ends(tmp_path, tiny):
    with pytest.raises(SystemExit, match="NaN or infinite in five updates"):
        run(ppo, tmp_path, **tiny["ppo"] | dict(learning_rate=1e9, ratio_threshold=1e9, total_episodes=80))


# --- Names on the hub


@pytest.mark.parametrize(
    "name", ["./sft", "runs/a/model", "/tmp/none/a.py", "a.csv", "data/a.parquet", "a.json", "a.py"]
)
def test_a_path_that_leads_nowhere_is_no_name_on_the_hub(name):
    with pytest.raises(SystemExit, match=f"no {name}"):
        ppo.locate(name)


def test_a_hub_that_cannot_be_reached(monkeypatch, capsys):
    """It is asked once, for five seconds at most; then the user is told so, and the libraries to read their caches."""

    class Unreachable:
        asked = []

        def head(self, *_, timeout):
            self.asked.append(timeout)
            raise ConnectionError

    for settings in (constants, datasets.config):
        monkeypatch.setattr(settings, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(ppo, "get_session", Unreachable)
    ppo.ask_hub.cache_clear()
    try:
        assert ppo.locate("gpt2") == "gpt2"
        assert ppo.locate("owner/name") == "owner/name"
        assert capsys.readouterr().out.count(constants.ENDPOINT) == 1
    finally:
        ppo.ask_hub.cache_clear()
    assert Unreachable.asked == [5]
    assert constants.HF_HUB_OFFLINE
    assert datasets.config.HF_HUB_OFFLINE


# --- What follows from settings


def test_epochs_win_over_episodes(tmp_path, tiny):
    """And when the run goes on, the episodes that are then asked for."""
    settings = tiny["ppo"] | dict(num_ppo_epochs=1, dataset_test_split="none")
    assert run(ppo, tmp_path / "a", num_train_epochs=0.25, **settings)[-1]["episode"] == 16  # of 64 prompts
    main(ppo, "--resume", tmp_path / "a", "--total-episodes", 32)
    assert lines_of(tmp_path / "a")[-1]["episode"] == 32


def prompts_of(length):
    return datasets.Dataset.from_dict({"input_ids": [[5] * length]})


@pytest.mark.parametrize("module", [ppo, sft], ids=name_of)
def test_sizes_of_batches(module):
    """TRL's way: a size per device, times accumulation, mini-batches and processes; a batch size wins."""
    model = ppo.load_policy(ppo.Args(device="cpu"))
    rows = [prompts_of(1)] if module is ppo else [100, 9]  # prompts; number of texts, tokens of the longest
    parts = 2 if module is ppo else 1

    def sizes(**settings):
        if module is ppo:
            settings["num_mini_batches"] = 2
        args = module.choose_sizes(module.Args(device="cpu", **settings), model, *rows)
        return args.batch_size, args.micro_batch_size

    per_device = dict(per_device_train_batch_size=4, gradient_accumulation_steps=3)
    assert sizes(**per_device) == (12 * parts, 4)
    assert sizes(batch_size=8, **per_device) == (8, 4)
    assert sizes(batch_size=8, micro_batch_size=2) == (8, 2)


def test_micro_batches_are_as_large_as_memory_allows():
    """Half as large for texts of twice the length, larger if activations are not kept, or without logits."""
    policy = ppo.load_policy(ppo.Args(device="cpu"))
    body = ppo.load_reward_model(ppo.Args(device="cpu"), policy)

    def fit(model=policy, tokens=64, device="cpu", **settings):
        return ppo.rows_that_fit(model, tokens, ppo.Args(device=device, **settings))

    assert fit() == pytest.approx(2 * fit(tokens=128), abs=1)
    assert fit(gradient_checkpointing=True) > 1.1 * fit()
    assert fit(body) > 1.1 * fit()
    assert ppo.rows_that_fit(policy, 64, ppo.Args(device="cpu"), is_trained=False) > 5 * fit()
    with pytest.MonkeyPatch.context() as patch:  # on a GPU that another program shares
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * 2**26, 2**36))
        assert fit(device="cuda") == fit()  # an eighth of what is free: on a CPU, 64 MB
    lengths = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ppo, "rows_that_fit", lambda model, tokens, args, **_: lengths.append(tokens) or 4)
        assert ppo.choose_sizes(ppo.Args(response_length=20), policy, prompts_of(3)).micro_batch_size == 4
    assert lengths == [23, 23]


RATES = {  # of a model of GPT-2's size, of a tenth of it, and of one of 7B
    ppo: (1e-5, 4e-5, 3e-6),  # 10 ** 0.6 is 3.98
    rloo: (1e-5, 4e-5, 3e-6),
    grpo: (1e-5, 4e-5, 3e-6),
    dpo: (1e-5, 4e-5, 8.9e-7),
    reward_model: (1e-4, 2.2e-4, 2.5e-5),  # 10 ** 0.346 is 2.2
    sft: (2e-5, 2e-5, 2e-5),
}


@pytest.mark.parametrize("module", RATES, ids=name_of)
def test_default_learning_rates(module, monkeypatch):
    """Adapters learn at ten times the rate."""
    model = ppo.load_policy(ppo.Args(device="cpu"))
    rows = {ppo: [prompts_of(1)], rloo: [prompts_of(1), 1], grpo: [prompts_of(1), 1]}.get(module, [100, 9])
    for size, rate in zip((124e6, 12.4e6, 7e9), RATES[module]):
        monkeypatch.setattr(model, "num_parameters", lambda size=int(size): size)
        args = [module.Args(model="toy/sft", lora_r=r, device="cpu") for r in (0, 4)]
        found = [module.choose_sizes(x, model, *rows).learning_rate for x in args]
        assert found == pytest.approx([rate, 10 * rate], rel=0.02)  # they have two digits
