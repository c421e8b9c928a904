"""Wrong input: one clear sentence on stderr, exit code 2, before any training."""

import io
import json
import shlex
import shutil
import sys
from functools import cache
from pathlib import Path

import datasets
import pytest
from huggingface_hub import constants
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

import ddpo
import dpo
import grpo
import ppo
import reward_model
import rloo
import sft


def error_of(monkeypatch, capsys, module, *arguments):
    """Runs a script's main; returns its sentence, having checked that it is one and comes with exit code 2."""
    monkeypatch.setattr(sys, "argv", [module.__file__, "--device", "cpu", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_info:
        module.main()
    err = capsys.readouterr().err.strip()
    assert exit_info.value.code == 2
    lines = [line for line in err.splitlines() if "error:" in line]
    assert len(lines) == 1 and "Traceback" not in err, err
    return lines[0]


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """run(module, *arguments) -> the error sentence; the output folder is a fresh one."""

    def call(module, *arguments):
        if "--output-dir" not in arguments:
            arguments = (*arguments, "--output-dir", tmp_path / "out")
        return error_of(monkeypatch, capsys, module, *arguments)

    return call


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_unknown_column_names_those_there_are(run, tmp_path):
    data = write_rows(tmp_path / "d.jsonl", [{"question": "Why?", "other": 1}])
    assert "'prompt'" in (message := run(ppo, "--dataset", data)) and "question, other" in message
    assert "question, other" in run(sft, "--dataset", data)
    assert "question, other" in run(reward_model, "--dataset", data)


def test_empty_dataset(run, tmp_path):
    (tmp_path / "d.jsonl").write_text("")
    (tmp_path / "d.csv").write_text("prompt\n")
    assert str(tmp_path / "d.jsonl") in run(ppo, "--dataset", tmp_path / "d.jsonl")
    assert "empty" in run(ppo, "--dataset", tmp_path / "d.csv")


def test_a_truncated_file_is_named(run, tmp_path):
    (tmp_path / "d.jsonl").write_text('{"prompt": "The film"}\n{"prompt": "The fi')
    assert "d.jsonl" in run(ppo, "--dataset", tmp_path / "d.jsonl")


def test_unknown_split(run):
    assert "'nosuch'" in run(ppo, "--dataset-train-split", "nosuch")


def test_prompt_and_response_beyond_the_context(run):
    message = run(ppo, "--response-length", 159)
    assert "159" in message and "160" in message


def test_all_prompts_too_long(run, tmp_path):
    data = write_rows(tmp_path / "d.jsonl", [{"prompt": "The film was long and I liked it"}] * 3)
    message = run(ppo, "--dataset", data, "--max-prompt-length", 2)
    assert "dropped 3 of 3 prompts" in message and "--max-prompt-length" in message


def test_batch_that_does_not_divide(run):
    assert "not divisible by 4 mini-batches x 1 process(es); 52 is" in run(ppo, "--batch-size", 50, "--num-mini-batches", 4)


def test_fewer_episodes_than_a_batch(run):
    message = run(ppo, "--batch-size", 64, "--total-episodes", 10)
    assert "10" in message and "64" in message


@pytest.mark.parametrize("module", [ppo, rloo, grpo, dpo, sft, reward_model, ddpo])
def test_numbers_out_of_range(module):
    """By the type of a setting; NaN and infinity, which a parser takes for numbers, too."""
    wrong = {
        "temperature cliprange learning_rate max_grad_norm num_train_epochs beta": "0 -1 nan inf",
        "kl_coef missing_eos_penalty weight_decay vf_coef sample_guidance_scale": "-1 nan inf -inf",
        "lam gamma warmup_ratio eos_dropout train_timestep_fraction": "-0.1 1.5 nan inf",
        "ema_decay train_adam_beta1": "-0.1 1 nan inf",
    }
    for names, values in wrong.items():
        for name in set(names.split()) & set(vars(module.Args())) - ({"beta"} if module is grpo else set()):
            for value in map(float, values.split()):
                flag = f"--{name.replace('_', '-')}"
                with pytest.raises(module.UserError, match=f"^{flag} {value}: Input should be (greater|less|a finite)"):
                    module.start_run(module.Args(**{name: value}))


@pytest.mark.parametrize(
    ("module", "flag", "value"),
    [(ppo, "--kl-coef", "nan"), (ppo, "--lam", 1.5), (ppo, "--temperature", "inf"),
     (ppo, "--missing_eos_penalty=nan", ""), (ppo, "--response-length", 0), (ppo, "--num-mini-batches", 0),
     (ppo, "--kl-horizon", 0), (ppo, "--adam-betas", "0.9 1"), (ppo, "--seed", 2**63), (rloo, "--rloo-k", 1), (rloo, "--lora-r", -1),
     (grpo, "--num-generations", 1), (grpo, "--beta", -1), (grpo, "--epsilon", 0), (grpo, "--delta", "nan"),
     (dpo, "--label-smoothing", 0.5), (sft, "--max-length", 1), (reward_model, "--save-total-limit", 0),
     (ddpo, "--sample-num-steps", 0)],
)  # fmt: skip
def test_a_number_out_of_range_ends_in_a_sentence(run, module, flag, value):
    message, (flag, _, given) = run(module, flag, *str(value).split()), flag.partition("=")
    number = str(value).split()[-1] if str(value) else given
    assert flag.replace("_", "-") in message and number in message and "Input should be" in message


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("f(texts): return [1.0] * len(texts)", "called as f(prompts, completions, **columns) with the columns prompt, input_ids, failed: TypeError"),
        ("f(prompts, completions): return [1.0]", "got an unexpected keyword argument"),
        ("f(**_): return [1.0]", "1 rewards for 2 completions"),
        ("f(completions, **_): return {1: 1.0, 2: 2.0}", "it is to give a list"),
        ("f(prompts, **_):\n  raise KeyError('mood')", "failed: KeyError: 'mood' ({file}, line 2)"),
        ("f(**_):\n  return g('no')\n\nimport json\ndef g(text):\n  return json.loads(text)", "({file}, line 6)"),
        ("f(prompts, **_): return prompts", "ValueError"),
    ],
)  # fmt: skip
def test_reward_function_that_is_wrong(run, tmp_path, code, expected):
    """The sentence names the deepest line of the user's own code."""
    file = tmp_path / "r.py"
    file.write_text(f"def {code}\n")
    assert expected.format(file=file) in run(ppo, "--reward-fn", f"{file}:f")


@pytest.mark.parametrize("value", ["None", "float('nan')", "float('inf')"])
def test_a_reward_that_is_no_number_names_its_prompt(run, tmp_path, value):
    """The call at the start is passed, by which a wrong function is found before training."""
    (tmp_path / "r.py").write_text(
        f"def f(completions, **_):\n    return [1.0 if text == 'A text.' else {value} for text in completions]\n"
    )
    data = write_rows(tmp_path / "d.jsonl", [{"prompt": "The film"}])
    flags = ("--dataset", data, "--batch-size", 4, "--response-length", 5)
    message = run(ppo, "--reward-fn", f"{tmp_path}/r.py:f", *flags)
    number = value.replace("None", "nan").removeprefix("float('").removesuffix("')")
    assert f"the rewards of a response to 'The film' are {{'f': {number}}}" in message


def test_reward_function_that_is_not_there(run, tmp_path, monkeypatch):
    (tmp_path / "r.py").write_text("def reward(prompts, **_):\n    return [0.0] * len(prompts)\n")
    monkeypatch.chdir(tmp_path)
    assert "'nosuch.py': there is no such file or folder" in run(ppo, "--reward-fn", "nosuch.py:reward")
    assert "r.py defines no function 'nosuch'" in run(ppo, "--reward-fn", "r.py:nosuch")
    assert "'r.py' should be file.py:name" in run(ppo, "--reward-fn", "r.py")


def test_tokenizer_without_eos(run, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(ppo.locate("toy/sft"))
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "m")
    AutoConfig.from_pretrained(ppo.locate("toy/sft")).save_pretrained(tmp_path / "m")
    shutil.copy(Path(ppo.locate("toy/sft")) / "model.safetensors", tmp_path / "m")
    assert "'eos' is not one token" in run(ppo, "--model", tmp_path / "m")
    assert "no EOS token" in run(dpo, "--model", tmp_path / "m")
    assert "no EOS token" in run(sft, "--model", tmp_path / "m")
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "m")
    assert "neither a pad nor an EOS" in run(ppo, "--model", tmp_path / "m")
    assert "neither a pad nor an EOS" in run(sft, "--model", tmp_path / "m")


def test_stop_token_of_several_tokens(run):
    assert "is not one token" in run(ppo, "--stop-token", "the end of it all")


def test_a_bug_in_a_script_is_no_mistake_of_its_user(monkeypatch, tmp_path):
    """Nor in a fork of it: it keeps its traceback."""
    monkeypatch.setattr(ppo, "set_seed", None)
    with pytest.raises(TypeError):
        ppo.train(ppo.Args(output_dir=str(tmp_path / "out"), device="cpu"))


def test_path_that_is_nowhere(run):
    assert "'./no-such-model': there is no such file or folder" in run(ppo, "--model", "./no-such-model")
    assert "'pairs.jsonl': there is no such file" in run(ppo, "--dataset", "pairs.jsonl")


@pytest.mark.parametrize("name", ["no-such-model", "no-such-owner/no-such-name"])
@pytest.mark.parametrize("flag", ["--model", "--reward-model", "--dataset"])
def test_hub_name_without_a_hub(run, monkeypatch, tmp_path, flag, name):
    """HF_HUB_OFFLINE is set in all tests."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    message = run(ppo, flag, name)
    assert f"'{name}' is neither a folder here nor in the cache, and the hub cannot be reached" in message
    assert message.endswith("; python ppo.py without flags runs offline")


@pytest.mark.parametrize("kind", ["models", "datasets"])
def test_hub_name_in_the_cache(monkeypatch, tmp_path, kind):
    """It is found without a hub, which is asked once; its libraries are then told not to ask again."""

    class Unreachable:
        asked = 0

        def head(self, *_, timeout):
            Unreachable.asked += timeout <= 5
            raise ConnectionError

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for settings in (constants, datasets.config):
        monkeypatch.setattr(settings, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(ppo, "get_session", Unreachable)
    monkeypatch.setattr(ppo, "hub_answers", cache(ppo.hub_answers.__wrapped__))
    for name in ("gpt2", "owner/name"):
        (tmp_path / f"{kind}--{name.replace('/', '--')}").mkdir()
        assert ppo.locate(name) == name
    for name in ("gpt", "owner/other", "other/name"):
        with pytest.raises(ppo.UserError, match="neither a folder here nor in the cache"):
            ppo.locate(name)
    assert Unreachable.asked == 1 and constants.HF_HUB_OFFLINE and datasets.config.HF_HUB_OFFLINE


def test_folder_without_a_model(run, tmp_path):
    assert str(tmp_path) in run(ppo, "--model", tmp_path)


def test_file_of_an_unknown_kind(run, tmp_path):
    (tmp_path / "d.txt").write_text("hello")
    assert "jsonl" in run(ppo, "--dataset", tmp_path / "d.txt")


def test_reward_model_with_several_labels(run, tmp_path):
    config = AutoConfig.from_pretrained(ppo.locate("toy/base"), num_labels=2, id2label={0: "NEGATIVE", 1: "POSITIVE"})
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "c")
    AutoTokenizer.from_pretrained(ppo.locate("toy/base")).save_pretrained(tmp_path / "c")
    message = run(ppo, "--reward-model", tmp_path / "c")
    assert "['NEGATIVE', 'POSITIVE']" in message and "--reward-label" in message
    assert "['NEGATIVE', 'POSITIVE']" in run(ppo, "--reward-model", tmp_path / "c", "--reward-label", "HAPPY")


def test_output_folder_that_holds_a_run(run, tmp_path):
    """Or a model, which saving another one would destroy. The way to go on is a command that a shell understands."""
    for name in ("metrics.jsonl", "config.json", "README.md"):
        folder = tmp_path / f"a run's {name}"
        folder.mkdir()
        (folder / name).write_text("{}\n")
        message = run(ppo, "--output-dir", folder)
        assert "already holds a run" in message
        assert shlex.split(message.split("go on with that run: ")[1]) == ["--resume", str(folder)]
        assert [path.name for path in folder.iterdir()] == [name]


def test_device_that_is_not_there(monkeypatch, capsys, tmp_path):
    assert "--device nosuch" in error_of(monkeypatch, capsys, ppo, "--output-dir", tmp_path, "--device", "nosuch")


def test_sft_model_and_from_scratch_exclude_each_other(run):
    assert "give one of them" in run(sft, "--model", "toy/sft", "--from-scratch", "toy/base")


def test_sft_texts_too_short_for_a_block(run, tmp_path):
    data = write_rows(tmp_path / "d.jsonl", [{"text": "The film"}])
    message = run(sft, "--dataset", data, "--packing", "--dataset-test-split", "none")
    assert "--max-length" in message


def test_pairs_that_are_all_the_same(run, tmp_path):
    data = write_rows(tmp_path / "d.jsonl", [{"chosen": "a b", "rejected": "a b"}])
    message = run(reward_model, "--dataset", data)
    assert "dropped 1 of 1 pairs: both texts are the same (1)" in message


def test_messages_without_a_chat_template(run, tmp_path):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    data = write_rows(tmp_path / "d.jsonl", [{"messages": turns, "chosen": turns, "rejected": turns[:1]}])
    assert "chat template" in run(sft, "--dataset", data)
    assert "chat template" in run(reward_model, "--dataset", data)


def test_unknown_schedule(run, part_of):
    assert "nosuch" in run(sft, "--lr-scheduler-type", "nosuch", "--dataset", part_of("sft", 8))
    assert "nosuch" in run(reward_model, "--lr-scheduler-type", "nosuch", "--dataset", part_of("preferences", 8))


def test_unknown_flag_is_refused_by_the_parser(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ppo.py", "--no-such-flag", "1"])
    with pytest.raises(SystemExit) as exit_info:
        ppo.main()
    assert exit_info.value.code == 2


def test_a_row_that_is_no_text_is_named(run, tmp_path):
    data = write_rows(tmp_path / "d.jsonl", [{"prompt": "The film"}, {"prompt": None}])
    assert "row 1 of 'prompt' holds None" in run(ppo, "--dataset", data)
    data = write_rows(tmp_path / "e.jsonl", [{"prompt": "a", "completion": 3}])
    assert "row 0 of 'completion' holds 3" in run(sft, "--dataset", data, "--dataset-test-split", "none")
    data = write_rows(tmp_path / "f.jsonl", [{"chosen": "a", "rejected": "b", "margin": "high"}])
    assert "row 0 of 'margin' holds 'high'" in run(reward_model, "--dataset", data, "--dataset-test-split", "none")


def test_broken_checkpoints(run, tmp_path):
    """Weights cut short, and a folder that lacks its tokenizer (for which the library makes an empty one)."""
    toy = Path(ppo.__file__).parent / "toy/sft"
    shutil.copytree(toy, tmp_path / "cut")
    (tmp_path / "cut/model.safetensors").write_bytes((toy / "model.safetensors").read_bytes()[:1000])
    (tmp_path / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(toy / name, tmp_path / "bare")
    assert "could not be loaded" in run(ppo, "--model", tmp_path / "cut")
    assert "holds no tokenizer" in run(ppo, "--model", tmp_path / "bare")
    assert "could not be loaded" in run(ppo, "--reward-model", tmp_path / "cut")


def test_stop_token_id_outside_of_the_vocabulary(run):
    assert "'99999' is not one token" in run(ppo, "--stop-token-id", 99999)


def test_a_policy_that_broke_is_named_with_its_prompt(run):
    sizes = ("--batch-size", 4, "--total-episodes", 8, "--response-length", 4, "--num-sample-generations", 0)
    message = run(ppo, "--learning-rate", 1e9, *sizes)
    assert "not finite" in message and "--learning-rate" in message and "<|pad|>" not in message


def test_groups(run):
    assert "--rloo-k 5 does not divide 64 rows" in run(rloo, "--rloo-k", 5)


@pytest.mark.parametrize(
    "flags, expected",
    [
        (["--pretrain-data", "toy/data/sft", "--ptx-coef", 1], "has no column 'text'; it has prompt, completion"),
        (["--pretrain-data", "nowhere.jsonl", "--ptx-coef", 1], "nowhere.jsonl"),
        (["--aux-loss-coef", 0.1], "toy/sft has no router"),
        (["--lora-r", 4, "--lora-target-modules", "nothing_here"], "--lora-target-modules nothing_here (pip install peft?): "),
        (["--lr-scheduler-type", "straight"], "the run could not start: ValueError: straight is not a valid"),
        (["--lr-scheduler-type", "greedy"], "take one that depends on the step alone"),
        (["--attn-implementation", "none_such"], "none_such"),
        (["--dataset-test-split", "tset"], "tset"),
        (["--model", ""], "--model : String should have at least 1 character"),
    ],
    ids=str,
)
def test_options_that_cannot_be(run, flags, expected):
    """The functions that refuse them are the same text in rloo.py."""
    assert expected in run(ppo, *flags)


def test_messages_that_the_template_refuses(run, tmp_path):
    """The sentence shows it, and the reason."""
    toy = Path(ppo.__file__).parent / "toy/sft"
    tokenizer = AutoTokenizer.from_pretrained(toy)
    tokenizer.chat_template = "{{ raise_exception('a role is missing') }}"
    tokenizer.save_pretrained(tmp_path / "m")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(toy / name, tmp_path / "m")
    messages = [{"role": "user", "content": "Hello"}]
    row = {"prompt": messages, "messages": messages, "chosen": messages, "rejected": messages * 2}
    data = write_rows(tmp_path / "d.jsonl", [row] * 4)
    for module in (ppo, dpo, sft, reward_model):
        message = run(module, "--model", tmp_path / "m", "--dataset", data)
        assert "refuses [{'role': 'user'" in message and "a role is missing" in message


def test_messages_without_a_role(run, tmp_path):
    """Most templates would leave the role out without a word."""
    toy = Path(ppo.__file__).parent / "toy/sft"
    shutil.copytree(toy, tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(toy)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "m")
    data = write_rows(tmp_path / "d.jsonl", [{"prompt": [{"content": "Hello"}], "messages": [{"content": "Hello"}]}] * 4)
    for module in (ppo, sft):
        assert "without a role: [{'content'" in run(module, "--model", tmp_path / "m", "--dataset", data)


def test_a_token_that_the_model_does_not_embed(run, tmp_path):
    toy = Path(ppo.__file__).parent / "toy/sft"
    shutil.copytree(toy, tmp_path / "m")
    tokenizer = AutoTokenizer.from_pretrained(toy)
    tokenizer.add_tokens(["<image>"])
    tokenizer.save_pretrained(tmp_path / "m")
    text = "a film <image>"
    row = {"prompt": text, "text": text, "chosen": text, "rejected": "a film"}
    data = write_rows(tmp_path / "d.jsonl", [row] * 4)
    for module in (ppo, dpo, sft, reward_model):
        message = run(module, "--model", tmp_path / "m", "--dataset", data)
        assert f"the model embeds no token {len(tokenizer) - 1}" in message


def test_a_run_goes_on_without_its_terminal(monkeypatch, tmp_path):
    """As behind `| head`, which reads no more after ten lines."""

    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    folder = tmp_path / "run"
    tiny = ["--total-episodes", "8", "--batch-size", "8", "--response-length", "4", "--output-dir", str(folder)]
    monkeypatch.setattr(sys, "argv", ["ppo.py", "--device", "cpu", *tiny])
    monkeypatch.setattr(sys, "stdout", Closed())
    monkeypatch.setattr(sys, "stderr", Closed())
    ppo.main()
    assert (folder / "model.safetensors").exists()


@pytest.mark.parametrize("module", [ppo, rloo])
def test_settings_that_contradict_each_other(run, module):
    assert "--pretrain-data None: give both" in run(module, "--ptx-coef", 1)
    data = ("--pretrain-data", "toy/data/sft")
    assert "--ptx-coef 0.0 and --pretrain-data toy/data/sft: give both" in run(module, *data)
    message = run(module, "--response-length-min", 60)
    assert "--response-length-min 60 is above --response-length 53" in message
    assert "--stop-token none" in run(module, "--stop-token", "none", "--missing-eos-penalty", 3)
    assert module is rloo or "give both" in run(module, "--use-score-norm")


def test_accumulation_without_a_size_per_device(run, part_of):
    """Once for the scripts that sample, and once for those that read texts, which have this text in common."""
    for module, size in ((ppo, ("--total-episodes", 4)), (sft, ("--dataset", part_of("sft", 8)))):
        message = run(module, "--gradient-accumulation-steps", 4, "--batch-size", 4, *size)
        assert "--per-device-train-batch-size" in message
