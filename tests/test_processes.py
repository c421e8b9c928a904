"""A global batch means the same on any number of processes: losses, gradients, metrics and weights of two are one's.

The processes run on the CPU and speak through gloo. Adam's epsilon is large in these runs: it divides by the root of a
squared gradient, so that where a gradient is 0 but for rounding, its sign would decide over a whole step.
"""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_train import lines_of, untimed

import ddpo
import dpo
import grpo
import ppo
import reward_model
import rloo
import sft

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {"ppo": ppo, "rloo": rloo, "grpo": grpo, "dpo": dpo, "sft": sft, "reward_model": reward_model, "ddpo": ddpo}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]

ROLLOUTS = dict(batch_size=8, total_episodes=16, response_length=8, num_sample_generations=0, learning_rate=1e-3,
                adam_epsilon=1e-3)  # fmt: skip
TEXTS = dict(num_train_epochs=1, eval_steps=2, learning_rate=1e-4, batch_size=8, num_sample_generations=0)
SAVED = dict(total_episodes=40, save_steps=1)
IMAGES = dict(sample_num_steps=3, sample_batch_size=8, sample_num_batches_per_epoch=2, train_batch_size=4,
              train_gradient_accumulation_steps=2, num_epochs=2, image_steps=1, train_adam_epsilon=1e-3)  # fmt: skip
HALF_THE_IMAGES = dict(sample_batch_size=4, train_batch_size=2)
HALF = dict(batch_size=None, per_device_train_batch_size=4)  # on each of two processes, beside 8 on one

# name: script, settings of both runs, settings of the run on two processes alone
RUNS = {
    "ppo, stage 0": ("ppo", dict(num_mini_batches=2, whiten_rewards=True, adaptive_kl=True, ema_decay=0.5), {}),
    "ppo, stage 2": ("ppo", dict(pretrain_data="texts.jsonl", ptx_coef=1.0, gold_reward_fn="reward.py:length"),
                     dict(zero_stage=2, offload=True)),
    "ppo, stage 3": ("ppo", dict(reward_fn=("reward.py:length", "reward_model"), local_rollout_forward_batch_size=3),
                     dict(zero_stage=3, gather_for_rollout=False)),
    "ppo, shared critic, stage 2": ("ppo", dict(critic="shared", kl_estimator="full", gradient_checkpointing=True),
                                    dict(zero_stage=2)),
    "ppo, shared critic, stage 3": ("ppo", dict(critic="shared", use_score_scaling=True), dict(zero_stage=3)),
    "rloo, stage 0": ("rloo", dict(num_mini_batches=2, token_level_kl=True), {}),
    "rloo, stage 2": ("rloo", dict(normalize_reward=True, reward_fn=("reward.py:tail",)), dict(zero_stage=2)),
    "rloo, stage 3": ("rloo", dict(normalize_advantage=True), dict(zero_stage=3)),
    "rloo, adapter, stage 2": ("rloo", dict(lora_r=4), dict(zero_stage=2)),
    "rloo, adapter, stage 3": ("rloo", dict(lora_r=4, ema_decay=0.5, reward_fn=("reward.py:tail",)), dict(zero_stage=3)),
    "grpo, stage 0": ("grpo", dict(num_mini_batches=2, num_ppo_epochs=2, dynamic_sampling=2, num_eval_prompts=5), {}),
    "grpo, stage 2": ("grpo", dict(loss_type="grpo", importance_sampling_level="sequence", beta=0.1, num_ppo_epochs=2),
                      dict(zero_stage=2)),
    "grpo, stage 3": ("grpo", dict(loss_type="dr_grpo", scale_rewards="batch", mask_truncated_completions=True),
                      dict(zero_stage=3)),
    "grpo, adapter, stage 3": ("grpo", dict(lora_r=4, beta=0.1, loss_type="cispo", num_ppo_epochs=2), dict(zero_stage=3)),
    "dpo, stage 0": ("dpo", dict(num_eval_prompts=5), {}),
    "dpo, stage 2": ("dpo", dict(precompute_ref=True, loss_type="ipo"), dict(zero_stage=2)),
    "dpo, stage 3": ("dpo", dict(label_smoothing=0.1), dict(zero_stage=3, gather_for_rollout=False)),
    "dpo, adapter, stage 3": ("dpo", dict(lora_r=2), dict(zero_stage=3)),
    "sft, stage 0": ("sft", {}, HALF),
    "sft, stage 2": ("sft", dict(model="toy/sft"), dict(zero_stage=2)),
    "sft, stage 3": ("sft", {}, dict(zero_stage=3)),
    "sft, adapter, stage 3": ("sft", dict(model="toy/sft", lora_r=2), dict(zero_stage=3)),
    "reward_model, stage 0": ("reward_model", dict(eos_dropout=0.5), {}),
    "reward_model, stage 2": ("reward_model", {}, dict(zero_stage=2)),
    "reward_model, adapter, stage 3": ("reward_model", dict(lora_r=2), dict(zero_stage=3)),
    "reward_model, stage 3": ("reward_model", dict(center_rewards_coefficient=0.1), dict(zero_stage=3)),
    "ddpo": ("ddpo", dict(per_prompt_stat_tracking=True, per_prompt_stat_tracking_min_count=5, kl_coef=0.1),
             HALF_THE_IMAGES),
    "ddpo, guided": ("ddpo", dict(sample_guidance_scale=2.0, gold_reward_fn="reward.py:brightness",
                                  train_timestep_fraction=0.7, train_num_inner_epochs=2), HALF_THE_IMAGES),
    "ddpo, adapter": ("ddpo", dict(lora_r=2, train_learning_rate=1e-2), HALF_THE_IMAGES),
}  # fmt: skip


QUICK = ["ppo, stage 2", "rloo, adapter, stage 3", "grpo, stage 0", "dpo, stage 3", "sft, stage 0", "ddpo"]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with data whose last batch is smaller, and of an uneven number of rows, and reward functions."""
    folder = tmp_path_factory.mktemp("processes")
    for name, rows in (("prompts", 64), ("sft", 37), ("preferences", 27)):
        (folder / name).mkdir()
        for split, n in (("train", rows), ("validation", 7)):
            with open(ROOT / "toy/data" / name / f"{split}.jsonl") as file:
                (folder / name / f"{split}.jsonl").write_text("".join(islice(file, n)))
    texts = [json.loads(line) for line in (folder / "sft/train.jsonl").read_text().splitlines()]
    lines = [json.dumps({"text": row["prompt"] + row["completion"]}) + "\n" for row in texts]
    (folder / "texts.jsonl").write_text("".join(lines))
    (folder / "reward.py").write_text(
        "import os\nimport signal\n\n\ndef tail(prompts, completions, prompt, **_):\n    assert prompt == prompts\n"
        "    return [len(x) / 50 - len(y) / 20 for x, y in zip(completions, prompts)]\n\n\n"
        "def length(prompts, completions, **_):\n    return [len(x + y) / 50 for x, y in zip(prompts, completions)]\n\n\n"
        "def brightness(images, prompts, metadata):\n    assert prompts == [row['prompt'] for row in metadata]\n"
        "    return [x.mean() + len(y) for x, y in zip(images, prompts)]\n\n\n"
        "def stops_once(prompts, completions, **_):\n    mark = os.path.join(os.path.dirname(__file__), 'mark' + os.environ.get('RANK', '0'))\n"
        "    if callable(signal.getsignal(signal.SIGTERM)) and not os.path.exists(mark):\n        open(mark, 'w').close()\n"
        "        [os.kill(os.getpid(), signal.SIGTERM) for _ in range(2)]\n    return length(prompts, completions)\n\n\n"
        "calls = []\n\n\ndef second_fails(completions, **_):\n    calls.append(1)\n"
        "    return [float('nan') if len(calls) > 2 and os.environ['RANK'] == '1' else 1.0 for _ in completions]\n"
    )
    return folder


def settings_of(script, world, output, **settings):
    """Settings of a run, with paths in the folder of the fixture."""
    data = {"sft": "sft", "reward_model": "preferences", "dpo": "preferences"}.get(script, "prompts")
    here = dict(output_dir=str(output)) | ({} if script in ("grpo", "ddpo") else dict(dataset=str(world / data)))
    for name in ("gold_reward_fn", "pretrain_data"):
        if name in settings:
            settings[name] = str(world / settings[name])
    if "reward_fn" in settings:
        settings["reward_fn"] = tuple(str(world / x) if ":" in x else x for x in settings["reward_fn"])
    group = dict(num_generations=4, seed=2) if script == "grpo" else {}
    defaults = ROLLOUTS | group if script in ("ppo", "rloo", "grpo") else IMAGES if script == "ddpo" else TEXTS
    return defaults | here | settings


def folder_of(world, processes, run):
    """Where a run leaves its files."""
    return world / processes / run.replace(",", "").replace(" ", "-")


def metrics(folder):
    """The lines of metrics.jsonl, less what depends on the clock."""
    return untimed(lines_of(folder))


def torchrun(world, *command):
    """Starts the command on two processes, each of one thread, so that they do not fight for the cores."""
    environment = dict(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR", TMPDIR=str(world))  # torchrun leaves a folder
    return subprocess.Popen(
        [*TORCHRUN, "2", *map(str, command)], cwd=ROOT, env=os.environ | environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def words_of(settings):
    """Settings as a command line."""
    values = {name: value if isinstance(value, tuple) else (value,) for name, value in settings.items()}
    return [x for name, value in values.items() for x in (f"--{name.replace('_', '-')}", *map(str, value))]


@pytest.fixture(scope="module")
def runs(world, request):
    """All RUNS that are asked for, on one process and on two; beside them those that are interrupted, on two."""
    asked = {item.callspec.params.get("run") for item in request.session.items if hasattr(item, "callspec")}
    jobs = {"one": [], "two": []}
    for processes in jobs:
        for run, (script, both, extra) in RUNS.items():
            settings = both | (extra if processes == "two" else {})
            job = [script, settings_of(script, world, folder_of(world, processes, run), **settings)]
            jobs[processes] += [job] * (run in asked)
    early = settings_of("rloo", world, world / "early")
    (world / "early").mkdir()
    (world / "early/args.json").write_text(json.dumps(vars(rloo.Args(**early))))
    (world / "early/metrics.jsonl").write_text('{"objective/kl"')
    out, saved = world / "interrupted", dict(total_episodes=32, save_steps=1, gold_reward_fn="reward.py:stops_once")
    words = words_of(settings_of("rloo", world, out, **saved))
    jobs["two"] += [
        ["rloo", early | dict(resume=str(world / "early"))],
        ["rloo", words],
        ["rloo", settings_of("rloo", world, world / "whole", **saved)],
        ["rloo", ["--resume", str(out)]],
    ]
    (world / "jobs.json").write_text(json.dumps(jobs["two"]))
    process = torchrun(world, ROOT / "tests/on_many_processes.py", world / "jobs.json")
    for script, settings in jobs["one"]:
        SCRIPTS[script].train(SCRIPTS[script].Args(**settings))
    (world / "said").write_text(process.communicate(timeout=600)[0])
    assert process.returncode == 0, (world / "said").read_text()[-5000:]
    return world


def close_to(x, name, script):
    """Equal to rounding. A ratio or value that lies on the edge of its range is clipped on one side and not on the other:
    of the 256 tokens (in rloo.py 32 responses) that four passes over a batch see, two (one) may be counted differently.
    """
    edge = (0.01 if script == "ppo" else 0.035) if name.endswith("/clipfrac_avg") else 0
    return pytest.approx(x, rel=1e-3, abs=1e-5 + edge)


@pytest.mark.parametrize("run", [run if run in QUICK else pytest.param(run, marks=pytest.mark.slow) for run in RUNS])
def test_two_processes_are_one(runs, run):
    """Every metric of every update, and in the end the weights."""
    one, two = (folder_of(runs, processes, run) for processes in ("one", "two"))
    lines = list(zip(metrics(one), metrics(two), strict=True))
    assert len(lines) >= 2
    for a, b in lines:
        assert a.keys() == b.keys()
        wrong = {name: (a[name], b[name]) for name in a if a[name] != close_to(b[name], name, RUNS[run][0])}
        assert not wrong
    files = sorted(path.relative_to(one) for path in one.rglob("*.safetensors"))
    assert files == sorted(path.relative_to(two) for path in two.rglob("*.safetensors")) and files
    is_rollout = RUNS[run][0] in ("ppo", "rloo", "grpo")
    for file in files:
        a, b = load_file(one / file), load_file(two / file)
        assert a.keys() == b.keys()
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=0, atol=2e-6 if is_rollout else 2e-4)


def test_process_0_alone_reads_the_weights(runs):
    """With --zero-stage; the other one has models on `meta`, until it receives its shards."""
    for run, (script, _, extra) in RUNS.items():
        file = folder_of(runs, "two", run).with_suffix(".loaded")
        if file.exists():
            kind = "meta" if "zero_stage" in extra else "cpu"
            assert set(file.read_text().splitlines()) == {"0 cpu", f"1 {kind}"}, run
    assert (runs / "whole.loaded").exists()


def test_interrupted_and_resumed(runs, monkeypatch):
    """SIGTERM ends the run after its step, with the command that goes on from there, to the same bits."""
    out, text = runs / "interrupted", (runs / "said").read_text()
    assert text.count("stopped by a signal after step 1 of 4") == 1
    assert text.count(f"to resume: torchrun --nproc-per-node 2 rloo.py --resume {shlex.quote(str(out))}") == 1
    assert text.count(f"saved in {out}") == 2  # by the first process alone, in both runs
    assert text.count(f"continues after step 1, from {out}") == 1
    assert metrics(out) == metrics(runs / "whole")
    a, b = load_file(out / "model.safetensors"), load_file(runs / "whole/model.safetensors")
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_two_processes_go_on_as_one(runs, monkeypatch):
    """To the same numbers."""
    alone = shutil.copytree(runs / "whole", runs / "alone")
    [file.unlink() for file in alone.glob("checkpoints/*4.pt")]
    monkeypatch.setattr(sys, "argv", ["rloo.py", "--resume", str(alone)])
    rloo.train(rloo.read_command_line())
    scores, same = ([line["objective/scores"] for line in metrics(folder)] for folder in (alone, runs / "whole"))
    assert scores[:3] == same[:3] and scores == pytest.approx(same, abs=1e-3)


def test_killed_before_the_first_checkpoint(runs):
    """Two processes can start over as one can."""
    assert [line["episode"] for line in metrics(runs / "early")] == [8, 16]


@pytest.mark.slow
def test_a_signal_to_torchrun(world):
    """It is passed on to all processes, some of them twice; what torchrun makes of the end is not ours."""
    out = world / "signalled"
    process = torchrun(world, "rloo.py", *words_of(settings_of("rloo", world, out, **SAVED)))
    wait_for_lines(out / "metrics.jsonl", 2)
    process.send_signal(signal.SIGTERM)
    text = process.communicate(timeout=120)[0]
    assert process.returncode and 2 <= len(metrics(out)) < SAVED["total_episodes"] // 8, text[-3000:]
    command = f"to resume: torchrun --nproc-per-node 2 rloo.py --resume {shlex.quote(str(out))}"
    assert text.count(command) == text.count("saved in ") == 1


def wait_for_lines(file, number):
    """Until the file has so many lines."""
    deadline = time.monotonic() + 120
    while not file.exists() or len(file.read_text().splitlines()) < number:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_process_that_fails_takes_the_run_down(world):
    """Its sentence is shown once, no other process prints a traceback, and what was logged is whole."""
    out = world / "failed"
    words = words_of(settings_of("rloo", world, out, **SAVED))
    start = time.monotonic()
    process = torchrun(world, "rloo.py", *words, "--reward-fn", f"{world}/reward.py:second_fails")
    text = process.communicate(timeout=120)[0]
    assert process.returncode and time.monotonic() - start < 60
    assert text.count("rloo.py: error: the rewards of a response to ") == 1
    assert "rank0]: Traceback" not in text
    assert len(metrics(out)) >= 1


@pytest.mark.parametrize("n", range(1, 10))
@pytest.mark.parametrize("processes", range(1, 6))
def test_shares(monkeypatch, n, processes):
    """All shares are equally long, together they are all rows, and each row counts once."""
    monkeypatch.setattr(sft, "WORLD_SIZE", processes)
    shares, counted = [], []
    for rank in range(processes):
        monkeypatch.setattr(sft, "RANK", rank)
        shares.append(sft.shard_rows(n))
        for rows, counts in sft.micro_batches(range(n), sft.Args(micro_batch_size=2)):
            counted += [row for row, counts_here in zip(rows, counts) if counts_here]
    assert sorted(counted) == list(range(n)) and {len(share) for share in shares} == {-(-n // processes)}
    assert torch.equal(torch.stack(shares, 1).flatten()[:n], torch.arange(n))


@pytest.mark.parametrize("settings", [dict(zero_stage=3), dict(offload=True), dict(zero_stage=2, shard_size=2)])
@pytest.mark.parametrize("script", sorted(SCRIPTS.keys() - {"ddpo"}))
def test_settings_of_many_processes_need_them(script, settings, tmp_path):
    """One sentence, before anything is loaded."""
    module = SCRIPTS[script]
    with pytest.raises(module.UserError, match="are for runs under torchrun --nproc-per-node N"):
        module.train(module.Args(output_dir=str(tmp_path / "out"), **settings))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("settings", [dict(zero_stage=3, shard_size=2), dict(shard_size=3)])
def test_shard_size(monkeypatch, settings):
    """It divides the processes, and there is something to shard."""
    monkeypatch.setenv("RANK", "0"), monkeypatch.setattr(ppo, "WORLD_SIZE", 3)
    with pytest.raises(ppo.UserError, match="with stage 2 or 3, and a shard size that divides N"):
        ppo.start_run(ppo.Args(**settings))
