"""What a run leaves, and that it goes on: a killed one, resumed, is bit for bit the one that nothing interrupted."""

import gc
import importlib
import json
import os
import random
import re
import resource
import shutil
import signal
import time
from collections import Counter
from functools import cache
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
import yaml
from filelock import FileLock, Timeout
from runs import checkpoints, cut, in_background, lines_of, main, run, untimed, watch, words_of
from safetensors.torch import load_file
from sources import SCRIPTS
from transformers import pipeline

import ppo

MODULES = {script.removesuffix(".py"): importlib.import_module(script.removesuffix(".py")) for script in SCRIPTS}
SLOW = pytest.mark.slow
PPO_FIRST = [name if name == "ppo" else pytest.param(name, marks=SLOW) for name in MODULES]
EVERYTHING = {  # what fills a checkpoint
    "ppo": dict(adaptive_kl=True, ema_decay=0.9, num_mini_batches=2, use_score_scaling=True, eval_steps=2),
    "rloo": dict(adaptive_kl=True, ema_decay=0.9, num_mini_batches=2, eval_steps=2),
    "grpo": dict(dynamic_sampling=2, beta=0.1, eval_steps=2),
    "dpo": dict(lora_r=2, eval_steps=2),
    "sft": dict(packing=True, max_length=16, eval_steps=2),
    "reward_model": dict(eos_dropout=0.5, eval_steps=2),
    "ddpo": dict(num_epochs=3, per_prompt_stat_tracking=True, per_prompt_stat_tracking_min_count=3, kl_coef=0.1),
}


@pytest.fixture(scope="module")
def settings_of(tiny):
    """settings_of("ppo") -> settings of a tiny run with a checkpoint after each step."""

    def make(script):
        quiet = {} if script == "ddpo" else dict(num_sample_generations=0)
        return dict(device="cpu", save_steps=1, save_total_limit=9) | quiet | tiny[script] | EVERYTHING[script]

    return make


@pytest.fixture(scope="module")
def whole(settings_of, tmp_path_factory):
    """whole("ppo") -> the folder of such a run, which nothing interrupted."""

    @cache
    def make(script):
        folder = tmp_path_factory.mktemp(script) / "run"
        run(MODULES[script], folder, **settings_of(script))
        return folder

    return make


def weights_of(folder):
    """What was trained: a language model, its adapter, or the UNet of a pipeline."""
    (file,) = [*folder.glob("*model.safetensors"), *folder.glob("unet/*.safetensors")]
    return load_file(file)


def assert_same_run(folder, other):
    """Metrics and weights of two runs are the same, bit for bit."""
    assert untimed(lines_of(folder)) == untimed(lines_of(other))
    a = weights_of(folder)
    b = weights_of(other)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def kill(folder, copy, step):
    """A copy of a run as it stands when it is killed in the step after `step`, while it writes a line."""
    cut(folder, copy, step)
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(lines[: step + 1]) + lines[0][:20])
    for file in copy.rglob("*model.safetensors"):
        if "checkpoints" not in file.parts:
            file.unlink()
    return copy


def resume(script, folder, *words):
    gc.collect()  # in this process, a run that has ended may still hold its lock
    main(MODULES[script], "--resume", folder, *words)


# --- Killed and resumed


@pytest.mark.parametrize("script", MODULES)
def test_resumed_equals_uninterrupted(script, whole, tmp_path):
    """Though a checkpoint was being written when the run was killed, here by a second process, too."""
    copy = kill(whole(script), tmp_path / "cut", 1)
    (copy / "checkpoints/unfinished").mkdir()
    (copy / "checkpoints/unfinished/shard-00002-model-00001-of-00001.safetensors").write_bytes(b"half of a")
    resume(script, copy)
    assert_same_run(copy, whole(script))
    assert not list(copy.glob("checkpoints/*/shard-00002*"))


@pytest.mark.parametrize("script", PPO_FIRST)
@pytest.mark.parametrize("step", [0, 99], ids=["before the first checkpoint", "while the model was saved"])
def test_resumed_from_the_very_beginning_or_end(script, step, whole, tmp_path):
    """Without a checkpoint there are the settings to go on from: the run starts over."""
    copy = kill(whole(script), tmp_path / "cut", step)
    resume(script, copy)
    assert_same_run(copy, whole(script))


@pytest.mark.parametrize("script", PPO_FIRST)
def test_killed_at_any_moment(script, whole, settings_of, tmp_path):
    """SIGKILL three times, also while a checkpoint is written."""
    folder = tmp_path / "run"
    chance = random.Random(1)
    moments = [
        lambda: (folder / "checkpoints/unfinished").exists(),
        lambda: checkpoints(folder) and chance.random() < 0.05,
        lambda: chance.random() < 0.01,
        lambda: False,
    ]
    words = words_of(**settings_of(script), output_dir=folder)
    codes = []
    for moment in moments:
        process = in_background(script, *words)
        while process.is_alive():
            if moment():
                process.kill()
            time.sleep(0.002)
        codes.append(process.exitcode)
        if (folder / "args.json").exists():
            words = ["--resume", folder]
    assert codes[0] == -signal.SIGKILL
    assert codes[-1] == 0
    assert_same_run(folder, whole(script))


def test_a_full_disk(whole, settings_of, tmp_path, monkeypatch):
    """The run ends with the error, and can be resumed from the checkpoint before it."""
    folder = tmp_path / "run"
    save = ppo.dcp.save
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def save_on_a_full_disk(*args, **options):
        if checkpoints(folder) == [1]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        save(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(ppo.dcp, "save", save_on_a_full_disk)
        with pytest.raises(BaseException, match="File too large"):
            run(ppo, folder, **settings_of("ppo"))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoints(folder) == [1]
    resume("ppo", folder)
    assert_same_run(folder, whole("ppo"))


@pytest.mark.parametrize("script", PPO_FIRST)
@pytest.mark.parametrize("damage", ["half", *(pytest.param(f"no {x}", marks=SLOW) for x in ("weights", "state"))])
def test_a_damaged_checkpoint(script, damage, whole, tmp_path, capsys):
    """It is named; without it the run goes on from the one before it."""
    copy = kill(whole(script), tmp_path / "cut", 2)
    newest = copy / "checkpoints/step-00000002"
    (weights,) = newest.glob("*.safetensors")
    if damage == "half":
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    elif damage == "no weights":
        weights.unlink()
    else:
        (newest / "state.json").write_text("")
    with pytest.raises(BaseException):  # torch has one that is no Exception
        resume(script, copy)
    assert str(newest) in capsys.readouterr().out
    shutil.rmtree(newest)
    resume(script, copy)
    assert_same_run(copy, whole(script))


def test_metrics_that_lack_a_line(whole, tmp_path):
    """As in a copy that was made while the run went on: the run goes on, with the lines that are whole."""
    copy = kill(whole("ppo"), tmp_path / "cut", 2)
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text(lines[0] + lines[1][:30])
    with pytest.warns(UserWarning, match="lacks lines"):
        resume("ppo", copy)
    expected = untimed(lines_of(whole("ppo")))
    assert untimed(lines_of(copy)) == [expected[0], expected[2]]


def test_a_checkpoint_of_more_than_is_trained(whole, tmp_path):
    """Weights that the resumed run would forget."""
    copy = kill(whole("ppo"), tmp_path / "cut", 2)
    before = (copy / "args.json").read_text()
    with pytest.raises(SystemExit, match="critic.body"):
        resume("ppo", copy, "--critic", "shared")
    assert (copy / "args.json").read_text() == before


@pytest.mark.parametrize("script", ["sft", pytest.param("ppo", marks=SLOW)])
def test_a_weight_that_no_pass_reads(script, settings_of, tmp_path, monkeypatch):
    """As those of a vision tower: it has no moments, and the run goes on without them."""
    module = MODULES[script]
    add_tower = lambda model, *_, **__: model.add_module("tower", torch.nn.Linear(2, 3))  # noqa: E731
    watch(monkeypatch, module, "load_model", add_tower)
    run(module, tmp_path / "run", **settings_of(script))
    copy = kill(tmp_path / "run", tmp_path / "cut", 1)
    resume(script, copy)
    assert_same_run(copy, tmp_path / "run")


def test_as_many_checkpoints_stay_as_were_asked_for(tmp_path, tiny):
    run(ppo, tmp_path, **tiny["ppo"], save_steps=1, save_total_limit=2)
    assert checkpoints(tmp_path) == [2, 3]


def test_a_checkpoint_adds_little_memory(monkeypatch, tmp_path):
    """The writer holds a file in memory as a whole: it is small, unless a tensor is large."""
    monkeypatch.setattr(ppo, "RANK", 1)
    monkeypatch.setattr(ppo.dcp, "save", lambda tensors, storage_writer: writers.append(storage_writer))
    writers = []
    sizes = [2**i for i in range(10, 29)] * 3
    tensors = {str(i): torch.empty(size, dtype=torch.bfloat16, device="meta") for i, size in enumerate(sizes)}
    ppo.Run.save(SimpleNamespace(output=tmp_path, step=1, tensors=lambda: tensors))
    files = Counter()
    for name, number in writers[0].fqn_to_index_mapping.items():
        files[number] += tensors[name].nbytes
    assert max(files.values()) < 2**30  # the largest tensor has half of that
    assert len(files) < 20


def test_nodes_without_a_shared_folder(tmp_path, monkeypatch):
    """The second does not find what the first has made."""
    monkeypatch.setattr(ppo, "WORLD_SIZE", 2)
    monkeypatch.setattr(ppo, "RANK", 1)
    monkeypatch.setattr(ppo.dist, "broadcast_object_list", lambda names: None)
    args = ppo.Args(output_dir=str(tmp_path / "not-here"))
    with pytest.raises(SystemExit, match="share"):
        ppo.Run(args, 1, None, None, {}, args)


def test_one_run_to_a_folder(whole, settings_of, tmp_path):
    """A new run finds its folder used, a resumed one finds it locked; neither changes a file of the other."""
    copy = kill(whole("ppo"), tmp_path / "copy", 1)
    before = {file: file.read_bytes() for file in copy.rglob("*") if file.is_file() and file.name != ".lock"}
    with pytest.raises(SystemExit, match="--output-dir.*--resume"):
        main(ppo, *words_of(**settings_of("ppo"), output_dir=copy))
    with FileLock(copy / ".lock"), pytest.raises(Timeout):
        resume("ppo", copy)
    assert before == {file: file.read_bytes() for file in before}


def test_runs_begun_in_the_same_second(tmp_path, monkeypatch):
    """As those of a job with many parts."""
    monkeypatch.chdir(tmp_path)
    runs = [ppo.Run(ppo.Args(), 1, None, None, {}, ppo.Args()) for _ in range(5)]
    assert len({run.output for run in runs}) == 5


@pytest.mark.parametrize("script", ["rloo", pytest.param("grpo", marks=SLOW), pytest.param("dpo", marks=SLOW)])
def test_another_script_resumes_no_run(script, whole, tmp_path):
    """It says so, before it writes anything."""
    copy = kill(whole("ppo"), tmp_path / "cut", 1)
    before = {file: file.read_bytes() for file in copy.rglob("*") if file.is_file()}
    with pytest.raises(SystemExit, match="ppo.py"):
        resume(script, copy)
    assert before == {file: file.read_bytes() for file in copy.rglob("*") if file.is_file()}


@pytest.mark.parametrize("script", ["ppo", *(pytest.param(x, marks=SLOW) for x in MODULES if x not in ("ppo", "ddpo"))])
def test_a_resumed_run_takes_the_sizes_of_its_machine(script, whole, tmp_path):
    """And the device, where they were left to the machine on which the run began."""
    copy = kill(whole(script), tmp_path / "cut", 1)
    before = json.loads((copy / "args.json").read_text())
    elsewhere = {name: "cuda" if name == "device" else 1 for name in before["chosen_here"]}
    (copy / "args.json").write_text(json.dumps(before | elsewhere))
    resume(script, copy)
    assert {"device", "micro_batch_size"} <= elsewhere.keys()
    assert before == json.loads((copy / "args.json").read_text()) | {"resume": None}
    assert_same_run(copy, whole(script))


def test_a_resumed_run_keeps_sizes_that_were_asked_for(settings_of, tmp_path):
    asked = dict(micro_batch_size=3, local_rollout_forward_batch_size=5)
    run(ppo, tmp_path / "run", **settings_of("ppo") | asked)
    resume("ppo", kill(tmp_path / "run", tmp_path / "cut", 1))
    after = json.loads((tmp_path / "cut/args.json").read_text())
    assert asked == {name: after[name] for name in asked}


def test_flags_win_over_the_settings_of_a_resumed_run(whole, tmp_path):
    """Here the run becomes a longer one, at the learning rates of that. What its steps are counted by stays."""
    copy = tmp_path / "more"
    shutil.copytree(whole("ppo"), copy)
    for words in (("--batch-size", 4), ("--output-dir", tmp_path / "elsewhere")):
        with pytest.raises(SystemExit, match=words[0]):
            resume("ppo", copy, *words)
    resume("ppo", copy, "--total_episodes=40", "--learning-rate", 1e-3)
    lines = lines_of(copy)
    assert untimed(lines[:3]) == untimed(lines_of(whole("ppo")))
    assert [line["lr"] for line in lines[3:]] == pytest.approx([4e-4, 2e-4])
    assert json.loads((copy / "args.json").read_text())["total_episodes"] == 40


def test_a_resumed_run_can_fix_the_weight_of_the_kl(whole, tmp_path):
    """The checkpoint has an adapted one."""
    copy = kill(whole("ppo"), tmp_path / "cut", 2)
    resume("ppo", copy, "--no-adaptive-kl", "--kl-coef", "0.2")
    *_, adapted, last = lines_of(copy)
    assert adapted["objective/kl_coef"] != 0.2 and last["objective/kl_coef"] == 0.2
    copy = kill(whole("ppo"), tmp_path / "again", 2)
    resume("ppo", copy, "--kl-coef", "0.2")
    last, adapted = (lines_of(folder)[-1]["objective/kl_coef"] for folder in (copy, whole("ppo")))
    assert adapted != ppo.Args().kl_coef
    assert last == pytest.approx(0.2 * adapted / ppo.Args().kl_coef)


# --- Signals


@pytest.fixture
def heeded():
    """The signals do what they do by default, whatever started the tests."""
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGTERM: signal.signal(signal.SIGTERM, signal.SIG_DFL),
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def signal_at_step_1(patch, module, number):
    """The run is sent a signal while it logs its first step."""
    send = lambda _, run, *rest: run.step == 1 and os.kill(os.getpid(), number)  # noqa: E731
    watch(patch, module.Run, "log", send)


@pytest.mark.parametrize("script", PPO_FIRST)
def test_a_signal_ends_the_run_after_its_step(script, heeded, whole, settings_of, tmp_path, monkeypatch, capsys):
    """With a checkpoint, a model, and the flag that goes on to the same bits."""
    module = MODULES[script]
    number = signal.SIGINT if script == "ppo" else signal.SIGTERM
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        signal_at_step_1(patch, module, number)
        lines = run(module, folder, **settings_of(script) | dict(save_steps=99))
    assert len(lines) == 1
    assert checkpoints(folder) == [1]
    assert weights_of(folder)
    assert f"--resume {folder}\n" in capsys.readouterr().out
    resume(script, folder)
    assert_same_run(folder, whole(script))


# --- Errors


class Gone(Exception):
    """What ends a run."""


def fail(monkeypatch, module, name, first):
    """From this call on a function of the script fails."""
    function = getattr(module, name)
    calls = []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) >= first:
            raise Gone
        return function(*args, **kwargs)

    monkeypatch.setattr(module, name, failing)


@pytest.mark.parametrize("script", PPO_FIRST)
@pytest.mark.parametrize("where", ["before the update of step 3", "after step 3", "after step 1"])
def test_an_error_saves_what_it_would_lose(script, where, whole, settings_of, tmp_path, monkeypatch, capsys):
    """In a run without checkpoints: the steps before it are not lost, nor is its own once the weights are new. The run
    goes on to the same bits."""
    module = MODULES[script]
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        if where.startswith("before"):
            fail(patch, module, "set_seed", 4)  # the first thing in a step; once at the start
        else:
            watch(
                patch, module.Run, "log", lambda _, run, *rest: where != f"after step {run.step}" or pytest.fail("gone")
            )
        with pytest.raises((Gone, pytest.fail.Exception)):
            run(module, folder, **settings_of(script) | dict(save_steps=99))
    assert checkpoints(folder) == [2 if where.startswith("before") else int(where[-1])]
    assert f"--resume {folder}\n" in capsys.readouterr().err
    resume(script, folder)
    assert_same_run(folder, whole(script))


@pytest.mark.parametrize("script", ["ppo", "grpo"])
def test_an_error_of_the_rewards(script, whole, settings_of, tmp_path, monkeypatch):
    """They fail when the responses are there already: their draws are not counted."""
    module = MODULES[script]
    with monkeypatch.context() as patch:
        watch(patch, module, "score_responses", lambda *_: len(lines_of(tmp_path / "run")) < 2 or pytest.fail("gone"))
        with pytest.raises(pytest.fail.Exception):
            run(module, tmp_path / "run", **settings_of(script) | dict(save_steps=99))
    assert checkpoints(tmp_path / "run") == [2]
    resume(script, tmp_path / "run")
    assert_same_run(tmp_path / "run", whole(script))


def test_an_error_in_the_first_step_of_a_resumed_run(whole, tmp_path, monkeypatch, capsys):
    """It leaves the checkpoint and the metrics of the steps before."""
    copy = kill(whole("ppo"), tmp_path / "cut", 1)
    with monkeypatch.context() as patch:
        fail(patch, ppo, "policy_loss", 1)
        with pytest.raises(Gone):
            resume("ppo", copy)
    assert untimed(lines_of(copy)) == untimed(lines_of(whole("ppo"))[:1])
    assert f"from step 1: --resume {copy}\n" in capsys.readouterr().err
    resume("ppo", copy)
    assert_same_run(copy, whole("ppo"))


def test_an_error_in_an_evaluation(whole, settings_of, tmp_path, monkeypatch):
    """It comes before the step is logged: the weights go on as they would have, without that line."""
    with monkeypatch.context() as patch:
        fail(patch, ppo, "evaluate", 1)  # in step 2
        with pytest.raises(Gone):
            run(ppo, tmp_path / "run", **settings_of("ppo") | dict(save_steps=99))
    assert checkpoints(tmp_path / "run") == [2]
    resume("ppo", tmp_path / "run")
    first, _, third = untimed(lines_of(whole("ppo")))
    assert untimed(lines_of(tmp_path / "run")) == [first, third]
    weights = weights_of(whole("ppo"))
    assert all(torch.equal(x, weights[name]) for name, x in weights_of(tmp_path / "run").items())


def test_an_error_in_the_middle_of_an_update(whole, settings_of, tmp_path, monkeypatch, capsys):
    """No checkpoint is made of half a step: the run goes on from the one before."""
    with monkeypatch.context() as patch:
        fail(patch, ppo, "policy_loss", 8)  # the last of the four of step 2
        with pytest.raises(Gone):
            run(ppo, tmp_path / "run", **settings_of("ppo"))
    assert checkpoints(tmp_path / "run") == [1]
    assert f"from step 1: --resume {tmp_path / 'run'}\n" in capsys.readouterr().err
    resume("ppo", tmp_path / "run")
    assert_same_run(tmp_path / "run", whole("ppo"))


# --- Numbers that are none


def break_gradients(monkeypatch, steps):
    """In each of these steps a gradient is NaN."""
    clip = torch.nn.utils.clip_grad_norm_
    calls = []

    def broken(parameters, *rest):
        parameters = list(parameters)
        calls.append(1)
        if len(calls) in steps:
            parameters[0].grad.mul_(torch.nan)
        return clip(parameters, *rest)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", broken)


@pytest.mark.parametrize("script, number", [*((script, 1) for script in MODULES), ("ppo", 2)])
def test_a_gradient_that_is_not_finite_makes_no_step(script, number, tmp_path, settings_of, monkeypatch):
    """The run goes on; JSON, which has no NaN, holds a null. PPO's second gradient is the critic's."""
    break_gradients(monkeypatch, [number])
    lines = run(MODULES[script], tmp_path, **settings_of(script))
    assert all(x.isfinite().all() for x in weights_of(tmp_path).values())
    norms = [value for name, value in lines[0].items() if name.endswith("grad_norm")]
    assert None in norms
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


@pytest.mark.parametrize("script", PPO_FIRST)
def test_a_checkpoint_before_any_step_was_made(script, tmp_path, settings_of, monkeypatch):
    """Moments that are not there are not saved: what follows depends neither on when checkpoints are made nor on
    whether the run goes on from such a one."""
    for number in (1, 99):
        with monkeypatch.context() as patch:
            break_gradients(patch, range(1, 3 if script == "ppo" else 2))
            settings = settings_of(script) | dict(save_steps=number)
            if script in ("ppo", "rloo"):
                settings |= dict(num_ppo_epochs=1, num_mini_batches=1)
            run(MODULES[script], tmp_path / str(number), **settings)
    resume(script, kill(tmp_path / "1", tmp_path / "cut", 1))
    for name in ("1", "cut"):
        assert_same_run(tmp_path / name, tmp_path / "99")


def test_gradients_that_are_never_finite(tmp_path, tiny, monkeypatch):
    """The run ends after five of them in a row, and can go on."""
    settings = tiny["ppo"] | dict(total_episodes=72, num_ppo_epochs=1)
    with monkeypatch.context() as patch:
        break_gradients(patch, range(99))
        with pytest.raises(SystemExit, match="NaN"):
            run(ppo, tmp_path / "all", **settings)
    assert len(lines_of(tmp_path / "all")) == 5
    assert checkpoints(tmp_path / "all") == [5]
    break_gradients(monkeypatch, [2 * update for update in (1, 2, 3, 4, 6, 7, 8, 9)])  # the critic's
    assert len(run(ppo, tmp_path / "some", **settings)) == 9


# --- What a run leaves


def test_what_a_run_leaves_behind(tmp_path, tiny, pictures):
    """The policy loads as anybody would load it, and a card says what made it."""
    run(ppo, tmp_path, **tiny["ppo"])
    assert not list(tmp_path.glob("*.bin"))
    text = pipeline("text-generation", model=str(tmp_path))("The film", max_new_tokens=5)[0]["generated_text"]
    assert text.startswith("The film")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    card = (tmp_path / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["tags"] == ["ppo"]
    assert "toy/sft" in card and tiny["ppo"]["dataset"] in card
    assert "num_ppo_epochs=2" in card and "batch_size=8" in card and "micro_batch_size" not in card
    assert f"objective/scores {lines_of(tmp_path)[-1]['objective/scores']:.4g}" in card


@pytest.mark.parametrize("script", MODULES)
def test_each_panel_of_the_curves_has_a_metric(script, whole):
    names = set(lines_of(whole(script))[-1])
    for pattern in MODULES[script].CURVES.values():
        assert [name for name in names if re.search(pattern, name)], pattern


@pytest.mark.parametrize("script", ["ppo", "dpo", "sft", "reward_model"])  # rloo.py and grpo.py report as PPO does
def test_sample_tables(script, tmp_path, capsys, tiny):
    """As many tables as asked for, the last one at the end, and in PPO the first batch; none with 0."""
    expected = {0: [], 1: [1, 3], 3: [1, 2, 3]} if script == "ppo" else {0: [], 1: [3], 3: [1, 2, 3]}
    if script == "sft":
        expected = {0: [], 1: [4], 4: [1, 2, 3, 4]}
    for number, steps in expected.items():
        folder = tmp_path / str(number)
        split = {"dataset_test_split": "none"} if number == 1 else {}
        run(MODULES[script], folder, num_sample_generations=number, **tiny[script] | split)
        titles = re.findall(r"^ *(?:update|step) (\d+) of \d *$", capsys.readouterr().out, re.MULTILINE)
        assert [int(title) for title in titles] == steps
        files = sorted(folder.glob("samples/step-*.safetensors"))
        assert [int(file.stem.removeprefix("step-")) for file in files] == steps
        for tensors in map(load_file, files if script == "sft" else []):
            assert tensors["logprobs"].shape == tensors["responses"].shape == tensors["mask"].shape


def test_wandb_gets_the_same_numbers(tmp_path, monkeypatch, tiny):
    """In a real run that is offline; it goes on when ours does."""
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.teardown()  # it remembers the mode of whichever test came before
    init = MagicMock(wraps=wandb.init)
    logged = []
    monkeypatch.setattr(wandb, "init", init)
    watch(monkeypatch, wandb.Run, "log", lambda _, session, stats, **options: logged.append(dict(stats)))
    lines = run(ppo, tmp_path, track=True, wandb_project_name="p", wandb_entity="e", **tiny["ppo"])
    assert logged == lines
    assert (init.call_args.kwargs["project"], init.call_args.kwargs["entity"]) == ("p", "e")
    (folder,) = tmp_path.glob("wandb/offline-run-*")
    resume("ppo", tmp_path, "--total-episodes", 32)
    assert init.call_args.kwargs["id"] == folder.name.split("-")[-1]
