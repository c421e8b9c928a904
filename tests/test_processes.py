"""A batch means the same on any number of processes: losses, gradients, metrics and weights of two are one's.

The processes run on the CPU and speak through gloo. Adam's epsilon is large in these runs: it divides by the root of a
squared gradient, so that where a gradient is 0 but for rounding, its sign would decide over a whole step.
"""

import json
import os
import subprocess
import sys

import pytest
from runs import NAMES, assert_close_runs, assert_same_run, cut, lines_of, main, slow_but, words_of, write_rows
from safetensors.torch import load_file
from sources import ROOT, lines_of as lines_of_file

UPDATES = dict(batch_size=8, total_episodes=16, response_length=8, num_ppo_epochs=2)
UPDATES |= dict(learning_rate=1e-3, adam_epsilon=1e-3)
GROUPS = UPDATES | dict(num_generations=4, seed=2, num_ppo_epochs=1, num_eval_prompts=4)
TEXTS = dict(num_train_epochs=1, eval_steps=2, learning_rate=1e-4, batch_size=8)
IMAGES = dict(sample_num_steps=3, sample_batch_size=8, sample_num_batches_per_epoch=2, num_epochs=2, image_steps=1)
IMAGES |= dict(train_batch_size=4, train_gradient_accumulation_steps=2, train_adam_epsilon=1e-3)
COMMON = {"ppo": UPDATES, "rloo": UPDATES, "grpo": GROUPS, "agent": GROUPS | dict(response_length=24), "ddpo": IMAGES}
DATA = {"sft": "sft", "reward_model": "preferences", "dpo": "preferences", "ppo": "prompts", "rloo": "prompts"}
TWO_REWARDS = dict(reward_fn=("reward.py:length", "reward_model"), reward_weights=(0.5, 1.0))
PTX = dict(pretrain_data="texts.jsonl", ptx_coef=1.0)
HALF_THE_IMAGES = dict(sample_batch_size=4, train_batch_size=2)
EQUAL_GROUPS = dict(batch_size=16, micro_batch_size=2, total_episodes=32, reward_fn=("reward.py:some",))
CHECKPOINTING = dict(gradient_checkpointing=True)
RUNS = {  # name: settings of both runs, settings of the run on two processes alone
    "ppo 0": (dict(num_mini_batches=2, whiten_rewards=True, kl_target=6.0, ema_decay=0.5), {}),
    "ppo 2": (PTX, dict(zero_stage=2)),
    "ppo 3": (TWO_REWARDS, dict(zero_stage=3) | CHECKPOINTING),
    "ppo 2 shared": (dict(critic="shared", kl_estimator="full"), dict(zero_stage=2) | CHECKPOINTING),
    "ppo 3 adapter": (dict(lora_r=4, ema_decay=0.5), dict(zero_stage=3)),
    "rloo 0": (dict(num_mini_batches=2, token_level_kl=True), {}),
    "rloo 2": (dict(lora_r=4), dict(zero_stage=2)),
    "grpo 0": (dict(num_mini_batches=2, num_ppo_epochs=2, dynamic_sampling=2, num_eval_prompts=5), {}),
    "grpo 2": (EQUAL_GROUPS, dict(zero_stage=2)),
    "grpo 3": (dict(loss_type="dr_grpo", scale_rewards="batch", beta=0.1), dict(zero_stage=3)),
    "agent 3": (dict(lora_r=4, beta=0.1), dict(zero_stage=3)),
    "dpo 2": (dict(precompute_ref=True, loss_type="ipo"), dict(zero_stage=2)),
    "dpo 3": ({}, dict(zero_stage=3) | CHECKPOINTING),
    "sft 2": (dict(model="toy/sft", lora_r=2), dict(zero_stage=2)),
    "sft 3": ({}, dict(zero_stage=3) | CHECKPOINTING),
    "reward_model 0": (dict(eos_dropout=0.5), {}),
    "reward_model 3": (dict(center_rewards_coefficient=0.1), dict(zero_stage=3)),
    "ddpo": (dict(per_prompt_stat_tracking=True, per_prompt_stat_tracking_min_count=5), HALF_THE_IMAGES),
    "ddpo adapter": (dict(lora_r=2, train_learning_rate=1e-2, sample_guidance_scale=2.0), HALF_THE_IMAGES),
}  # fmt: skip
CASES = slow_but(["ppo 3", "grpo 2", "reward_model 0"], [name for name in RUNS if name.split()[0] in NAMES])
SAVED = dict(total_episodes=24, num_ppo_epochs=1, save_steps=1, save_total_limit=9)

REWARDS = """
import itertools
import os
import signal


def length(prompts, completions, **_):
    return [len(x + y) / 50 for x, y in zip(prompts, completions)]


def some(prompts, completions, **_):  # in half of the groups all are equal; each process sees whole groups
    sizes = [len(list(group)) for _, group in itertools.groupby(prompts)]
    assert all(n % 4 == 0 for n in sizes) or set(sizes) == {1}  # of evaluations
    return [len(y) * (sum(map(ord, x)) % 2) for x, y in zip(prompts, completions)]


def stops_once(prompts, completions, **_):
    mark = f"{__file__}.{os.environ.get('RANK')}"
    if callable(signal.getsignal(signal.SIGTERM)) and not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getpid(), signal.SIGTERM)
    return length(prompts, completions)

"""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A folder with data whose last batch is smaller, and of an uneven number of rows, and reward functions."""
    folder = tmp_path_factory.mktemp("processes")
    for name, rows in (("prompts", 64), ("sft", 37), ("preferences", 27)):
        (folder / name).mkdir()
        for split, n in (("train", rows), ("validation", 7)):
            lines = lines_of_file(f"toy/data/{name}/{split}.jsonl")[:n]
            (folder / name / f"{split}.jsonl").write_text("\n".join(lines))
    rows = [json.loads(line) for line in lines_of_file("toy/data/sft/train.jsonl")[:37]]
    write_rows(folder / "texts.jsonl", [{"text": row["prompt"] + row["completion"]} for row in rows])
    (folder / "reward.py").write_text(REWARDS)
    return folder


def words_for(name, world, output, **settings):
    """The command line of a run, with paths in the folder of the fixture."""
    settings = dict(device="cpu", output_dir=output) | COMMON.get(name, TEXTS) | settings
    if name != "ddpo":
        settings |= dict(num_sample_generations=0)
    if name in DATA:
        settings["dataset"] = world / DATA[name]
    return [
        str(world / word) if word.startswith(("reward.py:", "texts.jsonl")) else word for word in words_of(**settings)
    ]


def torchrun(world, *command):
    """Starts the command on two processes, each of one thread, so that they do not fight for the cores."""
    environment = dict(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR", TMPDIR=str(world))  # torchrun leaves a folder
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = dict(cwd=ROOT, env=os.environ | environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return subprocess.Popen([*launcher, *map(str, command)], **options)


@pytest.fixture(scope="module")
def runs(world, request):
    """All RUNS that are asked for, on one process and on two; beside them those that are interrupted or go on."""
    items = [item for item in request.session.items if item.path == request.path]
    asked = {item.callspec.params["case"] for item in items if hasattr(item, "callspec")}
    jobs = {"one": [], "two": []}
    for case in [case for case in RUNS if case in asked]:
        name, (both, alone) = case.split()[0], RUNS[case]
        for processes in jobs:
            settings = both | (alone if processes == "two" else {})
            jobs[processes].append([name, words_for(name, world, world / processes / case, **settings)])
    if "ppo" in NAMES and not all(hasattr(item, "callspec") for item in items):
        main("ppo", *words_for("ppo", world, world / "by-one", **SAVED))
        cut(world / "by-one", world / "one-to-two", 1)
        stopped = SAVED | dict(reward_fn=("reward.py:stops_once",), zero_stage=3)
        jobs["two"] += [
            ["ppo", ["--resume", str(world / "one-to-two"), "--zero-stage", "3"]],
            ["ppo", words_for("ppo", world, world / "early", **stopped)],
            ["ppo", words_for("ppo", world, world / "whole", **stopped)],
            ["ppo", ["--resume", str(world / "early")]],
        ]
    (world / "jobs.json").write_text(json.dumps(jobs["two"]))
    process = torchrun(world, ROOT / "tests/on_many_processes.py", world / "jobs.json")
    for name, words in jobs["one"]:
        main(name, *words)
    (world / "said").write_text(process.communicate(timeout=3600)[0])
    assert process.returncode == 0, (world / "said").read_text()[-5000:]
    return world


@pytest.mark.parametrize("case", CASES)
def test_two_processes_are_one(runs, case):
    """Every metric of every update, and in the end the weights."""
    weights = 2e-6 if case.startswith(("ppo", "rloo", "grpo", "agent")) else 2e-4
    assert len(lines_of(runs / "one" / case)) >= 2
    assert_close_runs(runs / "one" / case, runs / "two" / case, weights=weights, edge=0.02 if "ppo" in case else 0.07)


@pytest.mark.slow
def test_each_process_writes_its_half_of_a_checkpoint(runs):
    """Neither ever holds the whole."""
    files = sorted((runs / "whole/checkpoints/step-00000003").glob("*.safetensors"))
    sizes = [file.stat().st_size for file in files]
    assert len(sizes) == 2 and max(sizes) < 0.55 * sum(sizes)
    (alone,) = (runs / "by-one/checkpoints/step-00000003").glob("*.safetensors")
    assert sum(sizes) == pytest.approx(alone.stat().st_size, rel=0.05)
    first, second = (set(load_file(file)) for file in files)
    assert len(first & second) > 0.5 * len(first | second)  # each process has a part of nearly each weight


@pytest.mark.slow
def test_interrupted_and_resumed(runs):
    """SIGTERM to both ends the run after its step, with the flag that goes on from there, to the same bits."""
    assert (runs / "said").read_text().count(f"--resume {runs / 'early'}\n") == 1
    assert_same_run(runs / "early", runs / "whole")


@pytest.mark.slow
def test_one_process_goes_on_as_two_and_two_as_one(runs, world):
    (world / "reward.py.None").touch()  # stops_once has stopped
    alone = cut(runs / "whole", runs / "two-to-one", 1)
    main("ppo", "--resume", alone, "--zero-stage", 0)
    assert_close_runs(alone, runs / "whole", edge=0.02)
    assert_close_runs(runs / "one-to-two", runs / "by-one", edge=0.02)
