"""A run that was killed goes on to the same numbers, bit for bit; and what else can go wrong ends in one sentence."""

import errno
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import dpo
import ppo
import reward_model
import rloo
import sft

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {"ppo": ppo, "rloo": rloo, "dpo": dpo, "sft": sft, "reward_model": reward_model}
TIMED = ("time/", "perf/", "eps")  # metrics that no two runs share


def metrics(folder):
    """The lines of metrics.jsonl, less what depends on the clock."""
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [{name: x for name, x in line.items() if not name.startswith(TIMED)} for line in lines]


def assert_same_run(folder, other):
    """Metrics and weights of two runs are the same, bit for bit."""
    assert metrics(folder) == metrics(other)
    a, b = (load_file(Path(x) / "model.safetensors") for x in (folder, other))
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def step_of(script):
    """The metric that numbers the lines."""
    return "episode" if script in ("ppo", "rloo") else "step"


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
    settings = dict(save_steps=1, save_total_limit=9, eval_steps=2, **tiny[script])
    if script in ("ppo", "rloo"):
        settings |= dict(adaptive_kl=True, ema_decay=0.9, num_mini_batches=2)
    if script == "ppo":
        settings |= dict(use_score_scaling=True)
    if script == "reward_model":
        settings |= dict(eos_dropout=0.5)
    return SCRIPTS[script].Args(**settings | dict(output_dir=str(folder)) | more)


def cut(folder, tmp_path, step):
    """A copy of a run as it stands when it is killed in the step after `step`, while it writes a line."""
    copy = tmp_path / "cut"
    shutil.copytree(folder, copy)
    for file in copy.glob("checkpoints/*.pt"):
        if int(file.stem.split("-")[1]) > step:
            file.unlink()
    lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(lines[: step + 1]) + lines[0][:20])
    (copy / "model.safetensors").unlink()
    return copy


@pytest.mark.parametrize("script", SCRIPTS)
def test_resumed_equals_uninterrupted(script, whole, tiny, tmp_path):
    copy = cut(whole(script), tmp_path, 1)
    (copy / "checkpoints/unfinished").write_bytes(b"half of a checkpoint")
    SCRIPTS[script].train(arguments(script, tiny, copy, resume=str(copy)))
    assert_same_run(copy, whole(script))


def test_a_named_checkpoint_is_taken(whole, tiny, tmp_path):
    copy = cut(whole("rloo"), tmp_path, 2)
    file = copy / "checkpoints/step-00000001.pt"
    rloo.train(arguments("rloo", tiny, copy, resume=str(file)))
    assert_same_run(copy, whole("rloo"))


def command_line(module, monkeypatch, *words):
    """What the script makes of its command line."""
    monkeypatch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, words)])
    return module.read_command_line()


def test_settings_come_from_the_run(whole, monkeypatch, tmp_path):
    copy = cut(whole("ppo"), tmp_path, 1)
    before = json.loads((copy / "args.json").read_text())
    args = command_line(ppo, monkeypatch, "--resume", copy)
    assert args.output_dir == str(copy) and args.resume == str(copy)
    same = {name: x for name, x in vars(args).items() if name not in ("resume", "output_dir")}
    assert json.loads(json.dumps(same)) == {name: before[name] for name in same}
    more = command_line(ppo, monkeypatch, f"--resume={copy}/checkpoints/step-00000001.pt", "--total-episodes", 64)
    assert more.total_episodes == 64 and more.output_dir == str(copy)
    with pytest.raises(ppo.UserError, match="--kl-coef 0.5 .*0.05"):
        command_line(ppo, monkeypatch, "--resume", copy, "--kl-coef", 0.5)
    with pytest.raises(ppo.UserError, match="no run's folder"):
        command_line(ppo, monkeypatch, "--resume", tmp_path / "nowhere")


def test_more_episodes_go_on_where_the_run_ended(whole, tiny, tmp_path):
    copy = tmp_path / "more"
    shutil.copytree(whole("rloo"), copy)
    rloo.train(arguments("rloo", tiny, copy, resume=str(copy), total_episodes=40))
    assert [line["episode"] for line in metrics(copy)] == [8, 16, 24, 32, 40]
    assert metrics(copy)[:3] == metrics(whole("rloo"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_killed_while_the_model_was_saved(script, whole, tiny, tmp_path, capsys):
    """All steps are made, and there is no model yet: resuming saves it, and changes nothing else."""
    copy = cut(whole(script), tmp_path, 99)
    lines = (whole(script) / "metrics.jsonl").read_text().splitlines()
    SCRIPTS[script].train(arguments(script, tiny, copy, resume=str(copy)))
    assert f"made all its {len(lines)} steps" in capsys.readouterr().out
    assert_same_run(copy, whole(script))


def test_a_damaged_checkpoint_is_passed_over(whole, tiny, tmp_path, capsys):
    copy = cut(whole("rloo"), tmp_path, 2)
    newest = copy / "checkpoints/step-00000002.pt"
    newest.write_bytes(newest.read_bytes()[:5000])
    rloo.train(arguments("rloo", tiny, copy, resume=str(copy)))
    assert "step-00000002.pt cannot be read" in capsys.readouterr().err
    assert_same_run(copy, whole("rloo"))


def test_no_pickle_is_run(whole, tiny, tmp_path):
    """A checkpoint that somebody else has made may hold code; it must not run."""

    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/exploded",)

    copy = cut(whole("rloo"), tmp_path, 1)
    (copy / "checkpoints/step-00000001.pt").write_bytes(pickle.dumps({"step": 1, "policy": Bomb()}))
    with pytest.raises(rloo.UserError, match="no checkpoint that can be read"):
        rloo.train(arguments("rloo", tiny, copy, resume=str(copy)))
    assert not (tmp_path / "exploded").exists()


def test_a_full_disk_does_not_end_the_run(tiny, tmp_path, monkeypatch, capsys):
    def save(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", save)
    rloo.train(arguments("rloo", tiny, tmp_path / "run"))
    assert "checkpoint after step 2 was not written: No space left" in capsys.readouterr().err
    assert (tmp_path / "run/model.safetensors").exists()
    assert not list((tmp_path / "run/checkpoints").iterdir())


def test_as_many_checkpoints_stay_as_were_asked_for(tiny, tmp_path):
    rloo.train(arguments("rloo", tiny, tmp_path / "run", save_total_limit=2))
    assert sorted(f.name for f in tmp_path.glob("run/checkpoints/*")) == ["step-00000002.pt", "step-00000003.pt"]


def start(script, folder, tiny, *more):
    """The script as a process of its own."""
    settings = {k: v for k, v in vars(arguments(script, tiny, folder)).items() if v != getattr(SCRIPTS[script].Args, k)}
    words = []
    for name, value in settings.items():
        words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    command = [sys.executable, str(ROOT / f"{script}.py"), *(more or words)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def wait_for(condition, process):
    """Until it holds or the process has ended."""
    while not condition() and process.poll() is None:
        time.sleep(0.005)


def test_sigterm_ends_after_the_step_and_names_the_way_back(whole, tiny, tmp_path):
    folder = tmp_path / "run"
    process = start("rloo", folder, tiny)
    wait_for(lambda: (folder / "metrics.jsonl").exists() and metrics(folder), process)
    process.send_signal(signal.SIGTERM)
    _, printed = process.communicate(timeout=120)
    assert process.returncode == 130, printed
    command = printed.strip().splitlines()[-1].split("python rloo.py ")[1]
    assert command == f"--resume {folder}"
    assert 1 <= len(metrics(folder)) < 3
    assert start("rloo", folder, tiny, *command.split()).wait(120) == 0
    assert_same_run(folder, whole("rloo"))


def test_killed_at_any_moment(whole, tiny, tmp_path):
    """SIGKILL three times, also while a checkpoint is written; benchmarks/survival.py does it more often."""
    folder, chance = tmp_path / "run", random.Random(1)
    moments = [
        lambda: (folder / "checkpoints/unfinished").exists(),
        lambda: (folder / "metrics.jsonl").exists() and chance.random() < 0.02,
        lambda: chance.random() < 0.002,
    ]
    for moment in moments:
        more = ["--resume", str(folder)] if list(folder.glob("checkpoints/step-*.pt")) else []
        if not more and folder.exists():
            shutil.rmtree(folder)
        process = start("rloo", folder, tiny, *more)
        wait_for(moment, process)
        process.kill()
        process.communicate()
    more = ["--resume", str(folder)] if list(folder.glob("checkpoints/step-*.pt")) else []
    if (folder / "model.safetensors").exists() and len(metrics(folder)) == 3:
        more = []
    else:
        assert start("rloo", folder, tiny, *more).wait(120) == 0
    assert_same_run(folder, whole("rloo"))


def test_a_reward_function_that_hangs(tiny, tmp_path, monkeypatch):
    (tmp_path / "slow.py").write_text(
        "import time\ndef score(texts):\n    time.sleep(9 if len(texts) > 2 else 0)\n    return [0.0] * len(texts)\n"
    )
    args = arguments("rloo", tiny, tmp_path / "run", reward_fn=f"{tmp_path}/slow.py:score", reward_timeout=0.2)
    started = time.monotonic()
    with pytest.raises(rloo.UserError, match="longer than --reward-timeout 0.2 s"):
        rloo.train(args)
    assert time.monotonic() - started < 8
    args = arguments("rloo", tiny, tmp_path / "run", reward_fn=f"{tmp_path}/slow.py:score", reward_timeout=60.0)
    assert rloo.within(60.0, lambda x: x + 1, 1) == 2
    with pytest.raises(KeyError):
        rloo.within(60.0, {}.__getitem__, "what the function raises comes through")


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_gradient_that_is_not_finite_makes_no_step(script, tiny, tmp_path, monkeypatch):
    """The weights stay those of before, and the run goes on; where it is every step, it stops, and they are saved."""
    clip = torch.nn.utils.clip_grad_norm_
    bad = {"now": lambda call: call == 1}

    def broken(parameters, *rest):
        parameters = list(parameters)
        broken.calls += 1
        if bad["now"](broken.calls):
            parameters[0].grad.mul_(torch.nan)
        return clip(parameters, *rest)

    broken.calls = 0
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", broken)
    SCRIPTS[script].train(arguments(script, tiny, tmp_path / "once"))
    weights = load_file(tmp_path / "once/model.safetensors")
    assert all(x.isfinite().all() for x in weights.values())
    if script in ("ppo", "rloo"):
        assert [line["val/skipped_steps"] for line in metrics(tmp_path / "once")] == [1, 0, 0]
    bad["now"] = lambda call: True
    many = dict(total_episodes=48) if script in ("ppo", "rloo") else dict(num_train_epochs=3.0)
    with pytest.raises(SCRIPTS[script].UserError, match="NaN or infinite in 5 steps in a row"):
        SCRIPTS[script].train(arguments(script, tiny, tmp_path / "always", **many))
    weights = load_file(tmp_path / "always/model.safetensors")
    assert all(x.isfinite().all() for x in weights.values())


def test_refusals_name_both_values(whole, monkeypatch, capsys, tmp_path):
    copy = cut(whole("sft"), tmp_path, 1)
    monkeypatch.setattr(sys, "argv", ["sft.py", "--resume", str(copy), "--seed", "7"])
    with pytest.raises(SystemExit) as end:
        sft.main()
    error = capsys.readouterr().err
    assert end.value.code == 2 and "--seed 7" in error and " 1;" in error and "Traceback" not in error


PHASES = {  # script, phase -> the function that is made to run out of memory
    ("ppo", "rollout"): "sample_batch", ("ppo", "score"): "score_reference", ("ppo", "update"): "mini_batch_gradient",
    ("rloo", "rollout"): "sample_batch", ("rloo", "score"): "score_reference", ("rloo", "update"): "response_gradient",
    ("sft", "update"): "forward", ("reward_model", "update"): "pair_rewards", ("dpo", "update"): "completion_logps",
}  # fmt: skip


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA"), MemoryError(), RuntimeError("can't allocate memory")]
)
@pytest.mark.parametrize("script, phase", PHASES)
def test_out_of_memory_names_phase_and_flag(script, phase, error, tiny, tmp_path, monkeypatch):
    """Whatever torch raises for it, on a GPU or a CPU; another error stays what it is."""
    module = SCRIPTS[script]

    def full(*_, **__):
        raise error

    monkeypatch.setattr(module, PHASES[script, phase], full)
    with pytest.raises(module.UserError, match=f"out of memory in phase '{phase}': lower --"):
        module.train(arguments(script, tiny, tmp_path / "out"))
    error = RuntimeError("something else")
    with pytest.raises(RuntimeError, match="something else"):
        module.train(arguments(script, tiny, tmp_path / "other"))


def test_secrets_are_in_no_file_and_no_output(tiny, tmp_path):
    """Keys that the environment holds do not leave it, with W&B offline too."""
    out = tmp_path / "out"
    flags = [x for name, value in tiny["rloo"].items() for x in (f"--{name.replace('_', '-')}", str(value))]
    secrets = {"WANDB_API_KEY": "5ec2e7" * 6 + "abcd", "HF_TOKEN": "hf_5ec2e75ec2e75ec2e75ec2e75ec2e7"}
    run = subprocess.run(
        [sys.executable, "rloo.py", *flags, "--output-dir", str(out), "--track", "--save-steps", "1"],
        cwd=ROOT, env=os.environ | secrets | {"WANDB_MODE": "offline"}, capture_output=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-2000:]
    files = [path for path in out.rglob("*") if path.is_file()]
    assert {"args.json", "metrics.jsonl", "README.md", "step-00000003.pt"} <= {path.name for path in files}
    assert any(path.suffix == ".wandb" for path in files)
    for secret in secrets.values():
        assert secret.encode() not in run.stdout + run.stderr
        assert not [path for path in files if secret.encode() in path.read_bytes()]


def test_wandb_that_does_not_start(tiny, tmp_path, monkeypatch):
    """One sentence, before the first step; and the folder is as free as before."""
    import wandb

    def refuse(**_):
        raise wandb.errors.CommError("connection\nrefused")

    with monkeypatch.context() as patch:
        patch.setattr(wandb, "init", refuse)
        with pytest.raises(rloo.UserError, match="W&B did not start .connection refused.; log in"):
            rloo.train(arguments("rloo", tiny, tmp_path / "out", track=True))
    rloo.train(arguments("rloo", tiny, tmp_path / "out"))
    assert len(metrics(tmp_path / "out")) == 3


def test_names_draw_nothing(tmp_path, monkeypatch, capsys):
    """Control characters in an error do not reach the terminal, nor markup in names the page of a model card."""
    monkeypatch.setattr(sys, "argv", ["rloo.py", "--model", "no\x1b]0;owned\x07such"])
    with pytest.raises(SystemExit):
        rloo.main()
    assert not {"\x1b", "\x07"} & set(capsys.readouterr().err)
    model, tokenizer = rloo.load_policy(rloo.Args())
    out = tmp_path / "<script>alert(1)<"
    out.mkdir()
    name = "a`<img src=x onerror=alert(1)>`\x1b[31m]: [b]"
    rloo.save_model(model, tokenizer, rloo.Args(output_dir=str(out), model=name), {})
    card = (out / "README.md").read_text()
    text, arguments = card.split("```json")
    assert "<" not in text.split("---")[2] and "\x1b" not in card
    assert name.encode("unicode_escape").decode().replace("\\x1b", "\\u001b") in arguments
    assert f"base_model: [{json.dumps(name)}]" in text
