"""What a run leaves, and that it goes on: a killed one, resumed, is bit for bit the one that nothing interrupted."""

import io
import json
import os
import resource
import runpy
import shutil
import signal
import sys
import time
from functools import cache

import pytest
import torch
import yaml
from runs import GOLD, NAMES, ON_PROMPTS, assert_same_run, checkpoints, cut, execute, fork, lines_of, main, run
from runs import script, slow_but, untimed, watch, weights_of, words_of, write_rows
from safetensors.torch import load_file
from sources import ROOT, load
from transformers import GenerationConfig

EVERYTHING = {  # what fills a checkpoint
    "ppo": dict(num_mini_batches=2),
    "rloo": dict(num_mini_batches=2),
    "grpo": dict(beta=0.1),
    "agent": dict(eval_steps=2),
    "dpo": dict(lora_r=2, eval_steps=2),
    "sft": dict(max_length=16, eval_steps=2),
    "reward_model": dict(eos_dropout=0.5, eval_steps=2),
    "ddpo": dict(num_epochs=3),
}
LOOPS = slow_but(["ppo"], ["ppo", "sft", "ddpo"])


@pytest.fixture(scope="module")
def settings_of(tiny):
    """settings_of("ppo") -> settings of a tiny run with a checkpoint after each step."""

    def make(name):
        known = vars(script(name).Args())
        settings = dict(num_sample_generations=0, num_eval_prompts=0, save_steps=1, save_total_limit=9, device="cpu")
        settings |= tiny[name] | EVERYTHING[name]
        return {key: x for key, x in settings.items() if key in known}

    return make


@pytest.fixture(scope="module")
def whole(settings_of, tmp_path_factory):
    """whole("ppo") -> the folder of such a run, which nothing interrupted."""

    @cache
    def make(name):
        folder = tmp_path_factory.mktemp(name) / "run"
        run(name, folder, **settings_of(name))
        return folder

    return make


# --- Killed and resumed


STEPS = slow_but([("ppo", 1), ("sft", 1)], [*((name, 1) for name in NAMES), ("ppo", 99)])


@pytest.mark.parametrize(("name", "step"), STEPS)
def test_resumed_equals_uninterrupted(name, step, whole, tmp_path):
    """Killed while a checkpoint was written, after step 1, or when all steps were made."""
    copy = cut(whole(name), tmp_path / "cut", step)
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(lines[: step + 1]) + lines[0][:20])
    for file in copy.rglob("*model.safetensors"):
        file.unlink()
    (copy / "checkpoints/unfinished").mkdir()
    (copy / f"checkpoints/unfinished/step-{step + 1:08d}.pt").write_bytes(b"half of a")
    main(name, "--resume", copy)
    assert_same_run(copy, whole(name))
    assert checkpoints(copy) == checkpoints(whole(name))


@pytest.mark.slow
def test_killed_while_it_writes_a_checkpoint(whole, settings_of, tmp_path):
    """It goes on from the one before."""
    folder = tmp_path / "run"
    process = fork(os.devnull, main, "ppo", *words_of(**settings_of("ppo"), output_dir=folder))
    while process.is_alive():
        made = checkpoints(folder)
        if made and list(folder.glob("checkpoints/*/step-*.pt")) or len(made) == 2:
            process.kill()
        time.sleep(0.001)
    resumed = fork(os.devnull, main, "ppo", "--resume", folder)
    resumed.join()
    assert (process.exitcode, resumed.exitcode) == (-signal.SIGKILL, 0)
    assert_same_run(folder, whole("ppo"))


@pytest.mark.parametrize("name", LOOPS)
def test_a_full_disk_loses_nothing(name, whole, settings_of, tmp_path, monkeypatch):
    """The run ends while it writes its second checkpoint, whose half is removed, and goes on from the first."""
    folder = tmp_path / "run"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill_disk(*_):
        if checkpoints(folder) == [1]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))

    with monkeypatch.context() as patch:
        watch(patch, script(name).Run, "log", fill_disk)
        with pytest.raises((OSError, RuntimeError)):
            run(name, folder, **settings_of(name))
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.getsignal(signal.SIGTERM).__self__.lock.release()  # as the end of the process would
    assert [file.name for file in folder.glob("checkpoints/*")] == ["step-00000001.pt"]
    main(name, "--resume", folder)
    assert_same_run(folder, whole(name))


LONGER = {
    "ppo": "--total-episodes 32 --weight-decay 0.5 --adam-betas 0.8 0.9 --adam-epsilon 1e-6",
    "sft": "--num-train-epochs 2 --weight-decay 0.5",
    "ddpo": "--num-epochs 4 --train-adam-weight-decay .5 --train-adam-beta1 .8 --train-adam-beta2 .9",
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_finished_run_becomes_a_longer_one(name, whole, tmp_path, monkeypatch):
    """Flags win over the settings of the run, also over those of its optimizer; what is not said stays as it was."""
    copy = tmp_path / "more"
    shutil.copytree(whole(name), copy)
    before = untimed(lines_of(copy))
    words = LONGER[name].split()
    groups = []
    watch(monkeypatch, script(name).Run, "finish", lambda _, run: groups.extend(run.optimizer.param_groups))
    main(name, "--resume", copy, *words)
    assert groups[0]["weight_decay"] == 0.5 and (name == "sft" or tuple(groups[0]["betas"]) == (0.8, 0.9))
    assert name != "ppo" or groups[0]["eps"] == 1e-6
    assert untimed(lines_of(copy))[: len(before)] == before and len(lines_of(copy)) > len(before)
    old, new = (json.loads((folder / "args.json").read_text()) for folder in (whole(name), copy))
    flags = {word[2:].replace("-", "_") for word in words if word.startswith("--")}
    assert {key for key in old if old[key] != new[key]} <= {"resume", "output_dir", *flags}


def test_a_checkpoint_with_other_weights_is_refused(whole, tmp_path):
    copy = cut(whole("ppo"), tmp_path / "copy", 1)
    (file,) = copy.glob("checkpoints/*")
    state = torch.load(file)
    torch.save(state | {"weights": {f"old.{name}": x for name, x in state["weights"].items()}}, file)
    with pytest.raises(SystemExit, match="^error: "):
        main("ppo", "--resume", copy)


def test_two_processes_do_not_write_one_run(whole, settings_of, tmp_path, monkeypatch):
    folder, others = tmp_path / "run", []

    def begin(*_):
        for words in (["--resume", folder], words_of(**settings_of("ppo"), output_dir=folder)):
            others.append(fork(os.devnull, main, "ppo", *words))
            others[-1].join()

    watch(monkeypatch, script("ppo").Run, "log", begin)
    run("ppo", folder, **settings_of("ppo"))
    assert [other.exitcode for other in others] == [1] * 6
    assert_same_run(folder, whole("ppo"))


@pytest.mark.parametrize("name, flag", slow_but([("ppo", "reward-fn")], [("ppo", "reward-fn"), ("agent", "env")]))
def test_code_of_a_resumed_folder_runs_only_if_the_command_names_it(name, flag, whole, tmp_path):
    """Someone else may have written its args.json."""
    copy = cut(whole(name), tmp_path / "copy", 1)
    (copy / "code.py").write_text("raise RuntimeError('this is run')")
    code = {"env": f"{copy}/code.py:f", "reward_fn": [f"{copy}/code.py:f"]}
    args = json.loads((copy / "args.json").read_text())
    (copy / "args.json").write_text(json.dumps(args | {key: x for key, x in code.items() if key in args}))
    with pytest.raises(SystemExit, match=f"^error: .* {flag.replace('-', '_')} "):
        main(name, "--resume", copy)
    with pytest.raises(RuntimeError, match="this is run"):
        main(name, "--resume", copy, f"--{flag}", f"{copy}/code.py:f")


# --- Signals and checkpoints


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda x: x.name)
@pytest.mark.parametrize("name", LOOPS)
def test_a_signal_ends_the_run_after_its_step(name, number, whole, settings_of, tmp_path, monkeypatch, capsys):
    """With a checkpoint, a model, and the flag that goes on to the same bits. A second signal would end it at once."""
    usual = (lambda *_: pytest.fail("no script caught the signal"), signal.SIG_DFL, signal.default_int_handler)
    signal.signal(number, usual[0])
    folder = tmp_path / "run"

    def send(_, run, *rest):
        if run.step == 1:
            capsys.readouterr()
            os.kill(os.getpid(), number)
            assert "".join(capsys.readouterr()).strip() and signal.getsignal(number) in usual

    with monkeypatch.context() as patch:
        watch(patch, script(name).Run, "log", send)
        lines = run(name, folder, **settings_of(name) | dict(save_steps=99))
    assert len(lines) == 1 and checkpoints(folder) == [1] and weights_of(folder)
    assert f"--resume {folder}\n" in capsys.readouterr().out
    if number == signal.SIGINT:
        main(name, "--resume", folder)
        assert_same_run(folder, whole(name))


def test_signals_that_are_ignored_or_come_late(tiny, tmp_path, monkeypatch):
    """nohup ignores SIGHUP. While the model is saved, a signal ends the program as it ends any other."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    usual, late = signal.getsignal(signal.SIGINT), []
    watch(monkeypatch, script("sft").Run, "log", lambda *_: os.kill(os.getpid(), signal.SIGHUP))
    watch(monkeypatch, script("sft"), "save_model", lambda *_: late.append(signal.getsignal(signal.SIGINT)))
    assert len(run("sft", tmp_path / "run", **tiny["sft"])) > 1 and late == [usual]


def test_which_checkpoints_are_made_and_kept(settings_of, tmp_path, monkeypatch):
    """One every save_steps steps. The newest stay, by default one, also after the run."""
    name, seen = "ppo", {}
    for case, settings in (("one", {}), ("every other one", dict(save_steps=2)), ("two", dict(save_total_limit=2))):
        folder = tmp_path / case
        seen[case] = []
        with monkeypatch.context() as patch:
            watch(patch, script(name).Run, "log", lambda *_, x=case, y=folder: seen[x].append(checkpoints(y)))
            run(name, folder, **settings_of(name) | dict(save_total_limit=1) | settings)
        seen[case].append(checkpoints(folder))
    assert seen["one"] == [[], [1], [2], [3]] and seen["every other one"] == [[], [], [2], [2]]
    assert seen["two"] == [[], [1], [1, 2], [2, 3]]


@pytest.mark.parametrize("name", slow_but(["ppo"], ["ppo", "sft"]))
def test_a_folder_is_used_again_until_there_is_a_step(name, tiny, tmp_path, monkeypatch):
    """What an evaluation before the first step has left is not in the metrics of the next run."""
    words = words_of(**tiny[name], device="cpu", output_dir=tmp_path / "run")
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(script(name), "update", None)
        main(name, *words)
    shutil.copytree(tmp_path / "run", tmp_path / "again")  # this process still holds the first
    words[-1] = tmp_path / "again"
    main(name, *words)
    steps = [line for line in lines_of(tmp_path / "again") if "lr" in line]
    assert len(lines_of(tmp_path / "again")) == len(steps) + (name == "ppo")
    with pytest.raises(SystemExit, match="^error: .*output-dir"):
        main(name, *words)


def test_two_runs_may_begin_in_one_second(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ppo = script("ppo")
    assert len({ppo.start(ppo.Args(device="cpu")).output_dir for _ in range(2)}) == 2


# --- What it prints


def test_an_error_has_a_line_of_its_own(tiny, tmp_path):
    """The progress bar ends before it."""
    (tmp_path / "r.py").write_text("sizes = [1, 8]\n\ndef f(**_):\n    return [0.0] * sizes.pop()\n")
    settings = tiny["ppo"] | dict(device="cpu", output_dir=tmp_path / "run", reward_fn=f"{tmp_path}/r.py:f")
    process = fork(tmp_path / "said", execute, "ppo", *words_of(**settings))
    process.join()
    assert b"\nerror: " in (tmp_path / "said").read_bytes()


def test_a_stream_may_lack_a_letter(tmp_path, monkeypatch):
    file = write_rows(tmp_path / "电影.jsonl", [{"text": "电影"}] * 4)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "cp1252"))
    words = ["--dataset", file, "--batch-size", "4", "--device", "cpu", "--output-dir", f"{tmp_path}/run"]
    monkeypatch.setattr(sys, "argv", ["sft.py", *words])
    runpy.run_path(str(ROOT / "sft.py"), run_name="__main__")


# --- Numbers


@pytest.mark.parametrize("name", slow_but(["ppo"], NAMES))
def test_a_gradient_that_is_not_finite_makes_no_step(name, tmp_path, settings_of, monkeypatch):
    """The run goes on; JSON, which has no NaN, holds a null."""
    clip = torch.nn.utils.clip_grad_norm_
    calls = []

    def broken(parameters, *rest):
        parameters = list(parameters)
        calls.append(1)
        if len(calls) in (1, 4):  # ppo.py: the policy's first, the critic's second
            next(p for p in parameters if p.grad is not None).grad.mul_(torch.nan)
        return clip(parameters, *rest)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", broken)
    lines = run(name, tmp_path / "run", **settings_of(name))
    assert all(x.isfinite().all() for x in weights_of(tmp_path / "run").values())
    assert None in [value for key, value in lines[0].items() if key.endswith("grad_norm")]
    assert "NaN" not in (tmp_path / "run/metrics.jsonl").read_text()


@pytest.mark.slow
def test_wandb_gets_the_same_numbers(tmp_path, monkeypatch, tiny):
    """In a real run that is offline."""
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    wandb.teardown()  # it remembers the mode of whichever test came before
    logged = []
    watch(monkeypatch, wandb.Run, "log", lambda _, session, stats, **options: logged.append(dict(stats)))
    assert run("ppo", tmp_path / "run", track=True, **tiny["ppo"]) == logged


@pytest.mark.parametrize("change", [{}, {"early_stopping": True}, {"pad_token_id": -1}], ids=str)
@pytest.mark.parametrize("name", slow_but(["ppo"], ON_PROMPTS))
def test_programs_sample_from_a_model_as_the_run_did(name, change, tiny, tmp_path):
    """What the generation config had before may be refused; it may not keep a trained model from being saved."""
    shutil.copytree(f"toy/{'guess/' * (name == 'agent')}sft", tmp_path / "model")
    file = tmp_path / "model/generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    try:
        run(name, tmp_path / "run", **tiny[name] | dict(model=str(tmp_path / "model"), temperature=0.7))
    except SystemExit:
        assert change and not (tmp_path / "run/metrics.jsonl").exists()
    else:
        left = GenerationConfig.from_pretrained(tmp_path / "run")
        assert (left.temperature, left.top_k) == (0.7, 0)


def test_tables(tmp_path, tiny):
    """From the first batch on, after each part of the run, as in TRL."""
    run("ppo", tmp_path / "run", **tiny["ppo"] | dict(reward_fn=(GOLD,), num_sample_generations=2, total_episodes=40))
    files = tmp_path.glob("run/samples/step-*.safetensors")
    tensors = {int(file.stem.removeprefix("step-")): load_file(file) for file in files}
    assert sorted(tensors) == [1, 3, 5]
    assert {"responses", "mask", "old_logprobs", "kl", "values", "advantages", "scores"} <= tensors[3].keys()


def test_a_card(tmp_path, tiny, monkeypatch):
    """tools/card.py says what made the model, with the hub's keys for what is there, and draws the curves."""
    pytest.importorskip("matplotlib", reason="pip install -r requirements-more.txt")
    card = load("tools/card.py", "card")
    run("ppo", tmp_path, **tiny["ppo"] | dict(num_eval_prompts=4, eval_steps=2))
    monkeypatch.setattr(sys, "argv", ["card.py", str(tmp_path)])
    card.main()
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "README.md").read_text()
    assert yaml.safe_load(text.split("---")[1]) == {"library_name": "transformers"}
    assert "toy/sft" in text and tiny["ppo"]["dataset"] in text and str(ROOT) not in text
    args = json.loads((tmp_path / "args.json").read_text()) | dict(model="owner/model", dataset="owner/data")
    (tmp_path / "args.json").write_text(json.dumps(args))
    card.write_card(tmp_path)
    head = yaml.safe_load((tmp_path / "README.md").read_text().split("---")[1])
    assert (head["base_model"], head["datasets"]) == (["owner/model"], ["owner/data"])
