"""A run that was killed goes on to the same numbers, bit for bit; and what else can go wrong ends in one sentence."""

import errno
import gc
import json
import os
import pickle
import random
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import traceback
from contextlib import suppress
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file
from test_train import lines_of, untimed

import ddpo
import dpo
import ppo
import reward_model
import rloo
import sft

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {"ppo": ppo, "rloo": rloo, "dpo": dpo, "sft": sft, "reward_model": reward_model, "ddpo": ddpo}
RLOO_FIRST = [name if name == "rloo" else pytest.param(name, marks=pytest.mark.slow) for name in SCRIPTS]
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


def weights_of(folder):
    """What was trained: a language model, or the UNet of a pipeline."""
    files = (Path(folder) / name for name in ("model.safetensors", "unet/diffusion_pytorch_model.safetensors"))
    return load_file(next(file for file in files if file.exists()))


def metrics(folder):
    """The lines of metrics.jsonl, less what depends on the clock."""
    return untimed(lines_of(folder))


def assert_same_run(folder, other):
    """Metrics and weights of two runs are the same, bit for bit."""
    assert metrics(folder) == metrics(other)
    a, b = weights_of(folder), weights_of(other)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """whole("ppo") -> the folder of a run that nothing interrupted, with a checkpoint of each step."""
    runs = {}

    def run(script):
        if script not in runs:
            folder = tmp_path_factory.mktemp(script) / "run"
            SCRIPTS[script].train(arguments(script, tiny, folder))
            runs[script] = folder
        return runs[script]

    return run


def arguments(script, tiny, folder, **more):
    """Settings of a tiny run with a checkpoint after each step, and with all that a checkpoint has to hold."""
    settings = dict(save_steps=1, save_total_limit=9, **tiny[script])
    if script == "ddpo":  # with a part of the prompts still to come after an epoch
        settings |= dict(num_epochs=3, per_prompt_stat_tracking=True, per_prompt_stat_tracking_min_count=3, kl_coef=0.1)
        settings |= dict(sample_batch_size=5, train_batch_size=5)
    else:
        settings |= dict(eval_steps=2)
    if script in ("ppo", "rloo"):
        settings |= dict(adaptive_kl=True, ema_decay=0.9, num_mini_batches=2)
    if script == "ppo":
        settings |= dict(use_score_scaling=True)
    if script == "reward_model":
        settings |= dict(eos_dropout=0.5)
    if script == "sft":
        settings |= dict(num_sample_generations=0)
    return SCRIPTS[script].Args(**settings | dict(output_dir=str(folder)) | more)


def cut(folder, tmp_path, step, name="cut"):
    """A copy of a run as it stands when it is killed in the step after `step`, while it writes a line."""
    copy = tmp_path / name
    shutil.copytree(folder, copy)
    for file in copy.glob("checkpoints/*.pt"):
        if int(file.stem.split("-")[1]) > step:
            file.unlink()
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(lines[: step + 1]) + lines[0][:20])
    for file in copy.rglob("*model.safetensors"):
        file.unlink()
    return copy


def checkpoints(folder):
    """The steps after which there are checkpoints."""
    return sorted(int(file.stem.split("-")[1]) for file in folder.glob("checkpoints/*.pt"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_resumed_equals_uninterrupted(script, whole, tiny, tmp_path):
    copy = cut(whole(script), tmp_path, 1)
    (copy / "checkpoints/unfinished").write_bytes(b"half of a checkpoint")
    SCRIPTS[script].train(arguments(script, tiny, copy, resume=str(copy)))
    assert_same_run(copy, whole(script))


@pytest.mark.slow
def test_resumed_with_an_adapter(tiny, tmp_path):
    """Of a UNet: its first weights are in the checkpoint as well."""
    ddpo.train(arguments("ddpo", tiny, tmp_path / "run", lora_r=2))
    copy = cut(tmp_path / "run", tmp_path, 1)
    ddpo.train(arguments("ddpo", tiny, copy, lora_r=2, resume=str(copy)))
    assert_same_run(copy, tmp_path / "run")


@pytest.mark.parametrize("script", RLOO_FIRST)
def test_killed_before_its_first_checkpoint(script, whole, tiny, tmp_path, monkeypatch):
    """There is nothing to go on from, but the settings: the run starts over."""
    copy = cut(whole(script), tmp_path, 0)
    SCRIPTS[script].train(command_line(SCRIPTS[script], monkeypatch, "--resume", copy))
    assert_same_run(copy, whole(script))


def test_a_named_checkpoint_is_taken(whole, tiny, tmp_path, monkeypatch):
    """And what came after it is removed at once, lest a run that is killed again goes on from there."""
    copy = cut(whole("rloo"), tmp_path, 3)
    file = copy / "checkpoints/step-00000001.pt"
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(rloo, "sample_batch", lambda *_: 1 / 0)
        rloo.train(arguments("rloo", tiny, copy, resume=str(file)))
    assert checkpoints(copy) == [1] and metrics(copy) == metrics(whole("rloo"))[:1]
    rloo.train(arguments("rloo", tiny, copy, resume=str(copy)))
    assert_same_run(copy, whole("rloo"))


def command_line(module, monkeypatch, *words):
    """What the script makes of its command line."""
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, words)])
    return module.read_command_line()


def test_settings_come_from_the_run(whole, monkeypatch, tmp_path):
    copy = cut(whole("ppo"), tmp_path, 1, name="a folder with blanks")
    before = json.loads((copy / "args.json").read_text())
    args = command_line(ppo, monkeypatch, "--resume", copy)
    assert args.output_dir == str(copy) and args.resume == str(copy)
    others = {field.name for field in fields(ppo.Args) if field.init} - {"resume", "output_dir"}
    same = {name: getattr(args, name) for name in others}
    assert json.loads(json.dumps(same)) == {name: before[name] for name in others}
    more = command_line(ppo, monkeypatch, f"--resume={copy}/checkpoints/step-00000001.pt", "--total_episodes=64")
    assert more.total_episodes == 64 and more.output_dir == str(copy)
    with pytest.raises(ppo.UserError, match="--kl-coef 0.5 .*0.05"):
        command_line(ppo, monkeypatch, "--resume", copy, "--kl-coef", 0.5)
    with pytest.raises(ppo.UserError, match="nowhere: its args.json cannot be read"):
        command_line(ppo, monkeypatch, "--resume", tmp_path / "nowhere")


def test_a_longer_run_goes_on_where_the_run_ended(whole, tiny, tmp_path):
    """At the learning rates of the longer run, of which the first is not the 0 at which the shorter one ended."""
    copy = tmp_path / "more"
    shutil.copytree(whole("rloo"), copy)
    rloo.train(arguments("rloo", tiny, copy, resume=str(copy), total_episodes=40, learning_rate=1e-3))
    assert [line["episode"] for line in metrics(copy)] == [8, 16, 24, 32, 40]
    assert metrics(copy)[:3] == metrics(whole("rloo"))
    assert [line["lr"] for line in metrics(copy)[3:]] == pytest.approx([4e-4, 2e-4])


@pytest.mark.parametrize("script", ["rloo", "sft", "ddpo"])
def test_the_commands_that_a_run_ends_with(script, tiny, tmp_path, monkeypatch, capsys):
    """One makes a run of twice the length out of it; the other draws its page, if there are texts to draw."""
    module, folder = SCRIPTS[script], tmp_path / "a run"
    module.train(arguments(script, tiny, folder) if script == "ddpo" else module.Args(**tiny[script], output_dir=str(folder)))
    steps, said = len(metrics(folder)), capsys.readouterr().out
    python, name, *words = shlex.split(re.search("to go on for as long again: (.*)", said)[1])
    assert (python, name) == ("python", f"{script}.py")
    module.train(command_line(module, monkeypatch, *words))
    assert len(metrics(folder)) == 2 * steps
    assert (f"python docs/xray.py '{folder}'" in said) == (script != "ddpo")


def test_more_epochs_go_on_where_the_run_ended(tiny, tmp_path, monkeypatch):
    """A run of a part of an epoch is made one of a larger part."""
    folder = tmp_path / "run"
    settings = dict(total_episodes=None, num_train_epochs=0.125, save_steps=100)
    rloo.train(arguments("rloo", tiny, folder, **settings))
    assert len(metrics(folder)) == 2 * 0.125 * 64 / 8  # two responses to each of 64 prompts
    rloo.train(command_line(rloo, monkeypatch, "--resume", folder, "--num-train-epochs", 0.1875))
    assert [line["episode"] for line in metrics(folder)] == [8, 16, 24]
    dpo.train(arguments("dpo", tiny, tmp_path / "dpo", num_train_epochs=0.5, num_sample_generations=0))
    dpo.train(command_line(dpo, monkeypatch, "--resume", tmp_path / "dpo", "--num-train-epochs", 1))
    assert [line["step"] for line in metrics(tmp_path / "dpo")] == [1, 2, 3]


@pytest.mark.parametrize("script", RLOO_FIRST)
def test_killed_while_the_model_was_saved(script, whole, tiny, tmp_path):
    """All steps are made, and there is no model yet: resuming saves it, and changes nothing else."""
    copy = cut(whole(script), tmp_path, 99)
    SCRIPTS[script].train(arguments(script, tiny, copy, resume=str(copy)))
    assert_same_run(copy, whole(script))


@pytest.mark.parametrize("damage", ["cut off", "one bit", "somebody else's"])
def test_a_damaged_checkpoint_is_passed_over(damage, whole, tiny, tmp_path, capsys):
    """The one before it is taken, and the damaged one is out of the way."""
    copy = cut(whole("rloo"), tmp_path, 2)
    newest = copy / "checkpoints/step-00000002.pt"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content[:5000] if damage == "cut off" else content)
    if damage == "somebody else's":
        torch.save({"model": {"weight": torch.ones(2)}, "step": 2}, newest)
    rloo.train(arguments("rloo", tiny, copy, resume=str(copy)))
    assert "step-00000002.pt is damaged, or no checkpoint, and cannot be read" in capsys.readouterr().err
    assert_same_run(copy, whole("rloo"))


def test_no_pickle_is_run(whole, tiny, tmp_path):
    """A checkpoint that somebody else has made may hold code; it must not run."""

    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/exploded",)

    copy = cut(whole("rloo"), tmp_path, 1)
    file = copy / "checkpoints/step-00000001.pt"
    for save in (lambda x: torch.save(x, file), lambda x: file.write_bytes(pickle.dumps(x))):
        save({"script": "rloo.py", "step": 1, "models": Bomb()})
        with pytest.raises(rloo.UserError, match="no checkpoint that can be read"):
            rloo.train(arguments("rloo", tiny, copy, resume=str(copy)))
        assert not (tmp_path / "exploded").exists() and len((copy / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_checkpoint_of_another_script_is_refused(whole, tiny, tmp_path):
    """Before anything of the run is changed."""
    copy = cut(whole("rloo"), tmp_path, 1)
    shutil.copy(whole("ppo") / "checkpoints/step-00000001.pt", copy / "checkpoints/step-00000001.pt")
    before = (copy / "metrics.jsonl").read_bytes()
    with pytest.raises(rloo.UserError, match="a checkpoint of ppo.py, not rloo.py"):
        rloo.train(arguments("rloo", tiny, copy, resume=str(copy)))
    assert (copy / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("script", RLOO_FIRST)
def test_other_data_are_refused(script, whole, tiny, tmp_path):
    """The same rows in another order are others; and nothing of the run is changed."""
    copy, data = cut(whole(script), tmp_path, 1), tmp_path / "data"
    shutil.copytree(ROOT / json.loads((copy / "args.json").read_text())["dataset"], data)
    rows = (data / "train.jsonl").read_text().splitlines(keepends=True)
    (data / "train.jsonl").write_text("".join(rows[::-1]))
    before = (copy / "metrics.jsonl").read_bytes()
    with pytest.raises(SCRIPTS[script].UserError, match="the dataset is not the one that the run began with"):
        SCRIPTS[script].train(arguments(script, tiny, copy, resume=str(copy), dataset=str(data)))
    assert (copy / "metrics.jsonl").read_bytes() == before and checkpoints(copy) == [1]


def test_a_run_that_another_one_has_overtaken(whole, tiny, tmp_path, monkeypatch):
    """While it was loading: it finds the folder used, and leaves it alone."""
    folder, make = tmp_path / "run", rloo.make_optimizer
    monkeypatch.setattr(rloo, "make_optimizer", lambda *a: (shutil.copytree(whole("rloo"), folder), make(*a))[1])
    with pytest.raises(rloo.UserError, match="already holds a run or a model"):
        rloo.train(arguments("rloo", tiny, folder, exp_name="second"))
    assert_same_run(folder, whole("rloo"))
    assert (folder / "args.json").read_bytes() == (whole("rloo") / "args.json").read_bytes()


@pytest.mark.parametrize("kind", ["UserError", "ZeroDivisionError"])
def test_an_error_in_saving_does_not_hide_the_one_before(kind, tiny, tmp_path, monkeypatch, capsys):
    """Both are told, the first one first: in one sentence if it is a user's mistake, else in its traceback."""
    first = rloo.UserError("no more prompts") if kind == "UserError" else ZeroDivisionError("no more prompts")
    second = OSError(errno.ENOSPC, "No space left on device")

    def fail(error, *_):
        raise error

    sample = iter([rloo.sample_batch, partial(fail, first)])
    monkeypatch.setattr(rloo, "sample_batch", lambda *rest: next(sample)(*rest))
    monkeypatch.setattr(rloo, "save_model", partial(fail, second))
    monkeypatch.setattr(rloo, "read_command_line", lambda: arguments("rloo", tiny, tmp_path / "run"))
    with pytest.raises((SystemExit, ZeroDivisionError)) as end:
        rloo.main()
    said = capsys.readouterr().err if kind == "UserError" else "".join(traceback.format_exception(end.value))
    assert re.search("no more prompts(; |\n)then: the model could not be saved in .*No space left", said)
    assert kind == "UserError" or end.value is first and len(metrics(tmp_path / "run")) == 1


def test_two_runs_in_one_folder_at_once(whole, tiny, tmp_path):
    """The second is refused, whether it starts or resumes, and leaves the files of the first alone."""
    copy = cut(whole("rloo"), tmp_path, 1)
    before = {file: file.read_bytes() for file in copy.rglob("*") if file.is_file() and file.name != ".lock"}
    with FileLock(copy / ".lock"), pytest.raises(rloo.UserError, match="is another run writing there"):
        rloo.train(arguments("rloo", tiny, copy, resume=str(copy), exp_name="second"))
    with FileLock(copy / ".lock"), pytest.raises(rloo.UserError, match="already holds a run"):
        rloo.train(arguments("rloo", tiny, copy))
    assert before == {file: file.read_bytes() for file in before}


def test_a_full_disk_does_not_end_the_run(tiny, tmp_path, monkeypatch, capsys):
    def save(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", save)
    rloo.train(arguments("rloo", tiny, tmp_path / "run"))
    error = capsys.readouterr().err
    assert "no checkpoint after step 2 (is the disk full?): " in error and "No space left" in error
    assert (tmp_path / "run/model.safetensors").exists()
    assert not list((tmp_path / "run/checkpoints").iterdir())


def test_as_many_checkpoints_stay_as_were_asked_for(tiny, tmp_path):
    rloo.train(arguments("rloo", tiny, tmp_path / "run", save_total_limit=2))
    assert checkpoints(tmp_path / "run") == [2, 3]


def words_of(args):
    """The command line that leads to these settings."""
    words = []
    for name, value in vars(args).items():
        if value != getattr(type(args), name):
            words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return words


@pytest.fixture
def heeded():
    """The signals do what they do by default, whatever started the tests."""
    handlers = dict(zip(SIGNALS, (signal.default_int_handler, signal.SIG_DFL, signal.SIG_DFL)))
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield handlers
    assert handlers == {number: signal.signal(number, handler) for number, handler in before.items()}


@pytest.mark.parametrize("script", SCRIPTS)
def test_ctrl_c_while_the_libraries_load(script, heeded, tmp_path):
    """No traceback; `datasets` is the first of them, and here it presses the keys."""
    shutil.copy(ROOT / f"{script}.py", tmp_path)
    (tmp_path / "datasets.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(9)\n")
    run = subprocess.run([sys.executable, tmp_path / f"{script}.py"], capture_output=True, cwd=tmp_path)
    assert (run.returncode, run.stdout, run.stderr) == (130, b"", b"")


def test_signals_end_the_run_after_the_step_and_name_the_way_back(heeded, whole, tiny, tmp_path, monkeypatch, capsys):
    """In a command that a shell understands, whatever the folder is called; and in the last step nothing is left to stop."""
    folder, sample, awaited = tmp_path / "the user's run", rloo.sample_batch, []
    words = words_of(arguments("rloo", tiny, folder))

    def sample_and_signal(*rest):
        if awaited:
            os.kill(os.getpid(), awaited.pop())
        return sample(*rest)

    monkeypatch.setattr(rloo, "sample_batch", sample_and_signal)
    for step, number in enumerate(SIGNALS[:2], 1):
        awaited.append(number)
        monkeypatch.setattr(sys, "argv", ["rloo.py", *words])
        with pytest.raises(SystemExit) as end:
            rloo.main()
        said = capsys.readouterr().err.strip()
        assert end.value.code == 130 and f"{number.name}: stopping after this step" in said
        words = shlex.split(said.splitlines()[-1].split("to resume: python rloo.py ")[1])
        assert words == ["--resume", str(folder)] and len(metrics(folder)) == step
        assert (folder / "model.safetensors").exists()
        del end
        gc.collect()  # and with the traceback the lock of the folder
    awaited.append(signal.SIGHUP)
    rloo.train(command_line(rloo, monkeypatch, *words))
    assert "SIGHUP: stopping after this step" in capsys.readouterr().err
    assert_same_run(folder, whole("rloo"))


SECRETS = {"WANDB_API_KEY": "5ec2e7" * 6 + "abcd", "HF_TOKEN": "hf_5ec2e75ec2e75ec2e75ec2e75ec2e7"}
BACKGROUND = """
import json, os, resource, sys
import rloo
from matplotlib.figure import Figure

Figure.savefig = lambda *_, **__: None  # as in conftest.py
for line in sys.stdin:
    words, said, limit = json.loads(line)
    if child := os.fork():
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    else:
        file = os.open(said, os.O_WRONLY | os.O_CREAT)
        [os.dup2(file, stream) for stream in (1, 2)]
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        sys.argv = ["rloo.py", *words]
        sys.exit(rloo.main())
"""


class Background:
    """Runs of rloo.py in processes of their own, forked from one that has imported all it needs.

    A shell has started that one with the signals ignored, as `nohup` and `&` do, and with secrets in the environment.
    """

    def __init__(self, home):
        command = ["sh", "-c", 'trap "" INT TERM HUP; exec "$0" "$@"', sys.executable, "-c", BACKGROUND]
        folders = {name: str(home) for name in ("HOME", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR")}
        self.process = subprocess.Popen(
            command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT,
            env=os.environ | SECRETS | folders | {"WANDB_MODE": "offline"},
        )  # fmt: skip

    def start(self, words, said=os.devnull, limit=-1):
        """Begins a run that prints to the file `said`, and whose files may be of `limit` bytes."""
        self.process.stdin.write(json.dumps([words, str(said), limit]).encode() + b"\n")
        self.child = int(self.process.stdout.readline())

    def send(self, number):
        """A signal to the run, if it has not ended."""
        with suppress(ProcessLookupError):
            os.kill(self.child, number)

    def has_ended(self):
        """Whether it has, five milliseconds later."""
        return bool(select.select([self.process.stdout], [], [], 0.005)[0])

    def wait(self):
        """Its exit code."""
        return int(self.process.stdout.readline())


@pytest.fixture(scope="module")
def background(tmp_path_factory):
    background = Background(tmp_path_factory.mktemp("home"))
    with background.process:
        yield background


def test_signals_that_the_shell_ignores(background, whole, tiny, tmp_path):
    """Under nohup a run outlives its terminal, and with & the next Ctrl-C in it: it ends as if nothing had happened."""
    folder, said = tmp_path / "run", tmp_path / "said"
    background.start(words_of(arguments("rloo", tiny, folder)), said)
    while not background.has_ended():
        [background.send(number) for number in SIGNALS]
    assert background.wait() == 0, said.read_text()
    assert "stopping" not in said.read_text()
    assert_same_run(folder, whole("rloo"))


def test_killed_at_any_moment(background, whole, tiny, tmp_path):
    """SIGKILL three times, also while a checkpoint is written; benchmarks/survival.py does it more often."""
    folder, chance = tmp_path / "run", random.Random(1)
    moments = [
        lambda: (folder / "checkpoints/unfinished").exists(),
        lambda: (folder / "metrics.jsonl").exists() and chance.random() < 0.02,
        lambda: chance.random() < 0.01,
        lambda: False,
    ]
    for moment in moments:
        is_new = not (folder / "args.json").exists()
        background.start(words_of(arguments("rloo", tiny, folder)) if is_new else ["--resume", str(folder)])
        while not background.has_ended():
            if moment():
                background.send(signal.SIGKILL)
        code = background.wait()
    assert code == 0
    assert_same_run(folder, whole("rloo"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_gradient_that_is_not_finite_makes_no_step(script, tiny, tmp_path, monkeypatch):
    """The weights stay those of before, and the run goes on; where it is every step, it stops, and they are saved."""
    clip, calls = torch.nn.utils.clip_grad_norm_, []
    is_bad = lambda: len(calls) == 1  # noqa: E731

    def broken(parameters, *rest):
        parameters = list(parameters)
        calls.append(1)
        if is_bad():
            parameters[0].grad.mul_(torch.nan)
        return clip(parameters, *rest)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", broken)
    SCRIPTS[script].train(arguments(script, tiny, tmp_path / "once"))
    assert all(x.isfinite().all() for x in weights_of(tmp_path / "once").values())
    if script in ("ppo", "rloo"):
        assert [line["val/skipped_steps"] for line in metrics(tmp_path / "once")] == [1, 0, 0]
    if script == "rloo":
        is_bad = lambda: True  # noqa: E731
        with pytest.raises(rloo.UserError, match="NaN or infinite five times in a row"):
            rloo.train(arguments(script, tiny, tmp_path / "always", total_episodes=48))
        assert all(x.isfinite().all() for x in weights_of(tmp_path / "always").values())


def test_refusals_name_both_values(whole, monkeypatch, capsys, tmp_path):
    copy = cut(whole("sft"), tmp_path, 1)
    monkeypatch.setattr(sys, "argv", ["sft.py", "--resume", str(copy), "--seed", "7"])
    with pytest.raises(SystemExit) as end:
        sft.main()
    error = capsys.readouterr().err
    assert end.value.code == 2 and "--seed 7" in error and " 1;" in error and "Traceback" not in error


def test_a_resumed_run_stays_in_its_folder(whole, tmp_path, monkeypatch):
    copy = cut(whole("rloo"), tmp_path, 1)
    with pytest.raises(rloo.UserError, match="a run that is resumed stays in its folder"):
        command_line(rloo, monkeypatch, "--resume", copy, "--output-dir", tmp_path / "elsewhere")


def test_a_folder_removed_midway(tmp_path, tiny, capsys):
    """The run goes on to its end, and saves its model."""
    out, file = tmp_path / "out", tmp_path / "r.py"
    file.write_text(
        "import shutil\n\ncalls = []\n\n\ndef reward(completions, **_):\n    calls.append(1)\n"
        f"    shutil.rmtree({str(out)!r}) if len(calls) == 3 else None\n    return [float(len(x)) for x in completions]\n"
    )
    settings = tiny["rloo"] | dict(output_dir=str(out), reward_fn=(f"{file}:reward",), save_steps=1, dataset_test_split="none")
    with pytest.raises(rloo.UserError, match="the model is saved .*, but its card or curves could not be made"):
        rloo.train(rloo.Args(**settings))
    said = capsys.readouterr()
    assert f"runs the code in {file}" in said.out and said.err.count("no checkpoint after step") == 2
    assert load_file(out / "model.safetensors")


def test_files_that_cannot_grow(background, tmp_path, tiny):
    """As on a full disk, writing fails: of metrics.jsonl in the fourth update, then of the model. One sentence tells both."""
    settings = tiny["rloo"] | dict(total_episodes=48, save_steps=1, output_dir=str(tmp_path / "out"))
    os.mkfifo(tmp_path / "said")
    background.start(words_of(rloo.Args(**settings)), tmp_path / "said", limit=4096)
    said = (tmp_path / "said").read_text()
    assert background.wait() == 2 and "Traceback" not in said and said.count("rloo.py: error: ") == 1
    assert re.search("error: .*metrics.jsonl could not be written: .*; then: the model could not be saved in ", said)
    assert "(is the disk full?)" in said


FULL = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2 bytes")  # of a CPU's
ERRORS = {"GPU": torch.OutOfMemoryError("CUDA"), "Python": MemoryError(), "CPU": FULL}


@pytest.mark.parametrize("script, error", [*((script, "GPU") for script in SCRIPTS), ("rloo", "Python"), ("rloo", "CPU")])
def test_out_of_memory_names_the_flag(script, error, tiny, tmp_path, monkeypatch, capsys):
    """One sentence with what to lower; another error stays what it is, with its traceback."""
    names = {"sft": "pad", "reward_model": "pad", "ddpo": "gaussian_logprobs"}
    module, name, error = SCRIPTS[script], names.get(script, "token_logprobs"), ERRORS[error]

    def full(*_, **__):
        raise error

    monkeypatch.setattr(module, name, full)
    monkeypatch.setattr(module, "read_command_line", lambda: arguments(script, tiny, tmp_path / "full"))
    with pytest.raises(SystemExit) as end:
        module.main()
    assert end.value.code == 2 and "out of memory: lower --micro-batch-size" in capsys.readouterr().err
    if error is FULL:
        error = RuntimeError("something else")
        with pytest.raises((RuntimeError, module.UserError), match="something else"):
            module.train(arguments(script, tiny, tmp_path / "other"))


def test_secrets_are_in_no_file_and_no_output(background, tiny, tmp_path):
    """Keys that the environment holds do not leave it, with W&B offline too."""
    out, said = tmp_path / "out", tmp_path / "said"
    background.start(words_of(rloo.Args(**tiny["rloo"], output_dir=str(out), track=True, save_steps=1)), said)
    assert background.wait() == 0, said.read_text()
    files = [path for path in out.rglob("*") if path.is_file()]
    assert {"args.json", "metrics.jsonl", "README.md", "step-00000003.pt"} <= {path.name for path in files}
    assert any(path.suffix == ".wandb" for path in files)
    for secret in SECRETS.values():
        assert not [path for path in (said, *files) if secret.encode() in path.read_bytes()]


def test_wandb_that_does_not_start(tiny, tmp_path, monkeypatch):
    """One sentence, before the first step; and the run can be started again."""
    import wandb

    def refuse(**_):
        settings = wandb.Settings()
        settings.update_from_env_vars(os.environ)
        assert settings.init_timeout == 15
        raise wandb.errors.CommError("connection\nrefused")

    with monkeypatch.context() as patch:
        patch.delenv("WANDB_INIT_TIMEOUT", raising=False)
        patch.setattr(wandb, "init", refuse)
        with pytest.raises(rloo.UserError, match="W&B did not start; log in .*: CommError: connection refused"):
            rloo.train(arguments("rloo", tiny, tmp_path / "out", track=True))
    rloo.train(arguments("rloo", tiny, tmp_path / "out", resume=str(tmp_path / "out")))
    assert len(metrics(tmp_path / "out")) == 3


def test_names_draw_nothing(tmp_path, monkeypatch, capsys):
    """Control characters in an error do not reach the terminal, nor markup in names the page of a model card."""
    monkeypatch.setattr(sys, "argv", ["rloo.py", "--model", "no\x1b]0;owned\x07such"])
    with pytest.raises(SystemExit):
        rloo.main()
    assert not {"\x1b", "\x07"} & set(capsys.readouterr().err)
    monkeypatch.setattr(rloo, "hub_answers", lambda: True)
    name = "a`<img src=x onerror=alert(1)>`\x1b[31m]: [b]"
    rloo.write_card(tmp_path, rloo.Args(output_dir="<script>alert(1)</script>", model=name), [])
    card = (tmp_path / "README.md").read_text()
    text, settings = card.split("```json")
    assert "<" not in text.split("---", 2)[2] and "\x1b" not in card
    assert json.loads(settings.split("```")[0])["model"] == name
