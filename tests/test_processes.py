"""A batch means the same on any number of processes: losses, gradients, metrics and weights of two are one's.

The processes run on the CPU and speak through gloo. Adam's epsilon is large in these runs: it divides by the root of a
squared gradient, so that where a gradient is 0 but for rounding, its sign would decide over a whole step.
"""

import os
import subprocess
import sys

import on_many_processes
import ppo
import pytest
import torch
import torch.distributed as dist
from runs import NAMES, ON_PROMPTS, assert_close_runs, assert_same_run, cut, lines_of, main, slow_but, words_of
from sources import ROOT, lines_of as lines_of_file
from tiny import tiny_model
from torch.testing._internal.distributed.fake_pg import FakeStore

UPDATES = dict(batch_size=8, total_episodes=16, response_length=8, num_ppo_epochs=2)
UPDATES |= dict(learning_rate=1e-3, adam_epsilon=1e-3)
GROUPS = UPDATES | dict(num_generations=4, seed=2, num_ppo_epochs=1)
TEXTS = dict(num_train_epochs=1, eval_steps=2, learning_rate=1e-4, batch_size=8)
IMAGES = dict(sample_num_steps=3, sample_batch_size=8, sample_num_batches_per_epoch=2, num_epochs=2, image_steps=1)
IMAGES |= dict(train_batch_size=4, train_gradient_accumulation_steps=2, train_adam_epsilon=1e-3)
COMMON = {"ppo": UPDATES, "rloo": UPDATES, "grpo": GROUPS, "agent": GROUPS | dict(response_length=24), "ddpo": IMAGES}
DATA = {"sft": "sft", "reward_model": "preferences", "dpo": "preferences", "ppo": "prompts", "rloo": "prompts"}
REWARDS_OF_PPO = dict(reward_fn=("reward.py:length", "reward_model"), reward_weights=(0.5, 1.0))
HALF_THE_IMAGES = dict(sample_batch_size=4, train_batch_size=2)
EQUAL_GROUPS = dict(batch_size=16, micro_batch_size=2, total_episodes=32, reward_fn=("reward.py:some",))
SEVERAL_STEPS = dict(num_mini_batches=2, num_ppo_epochs=2)
WEIGHTS_SHARED = dict(zero_stage=3)
BOTH = WEIGHTS_SHARED | dict(gradient_checkpointing=True)
RUNS = {  # name: settings of both runs, settings of the run on two processes alone
    # with seed 1 rounding decides over a token: its random number is where two tokens meet
    "ppo": (REWARDS_OF_PPO | dict(num_mini_batches=2, seed=2), BOTH),
    "ppo adapter": (dict(lora_r=4), WEIGHTS_SHARED),
    "ppo stage 2": (dict(eval_steps=1), {}),
    "ppo bfloat16": (dict(bf16=True, learning_rate=2e-6, micro_batch_size=2), WEIGHTS_SHARED),
    "rloo": (dict(num_mini_batches=2), {}),
    "rloo adapter": (dict(lora_r=4), WEIGHTS_SHARED),
    "grpo": (EQUAL_GROUPS, {}),
    "grpo others": (SEVERAL_STEPS | dict(loss_type="dr_grpo", scale_rewards="batch", beta=0.1), WEIGHTS_SHARED),
    "agent": (dict(lora_r=4, beta=0.1), WEIGHTS_SHARED),
    "dpo": ({}, BOTH),
    "sft": (dict(model="toy/sft", lora_r=2), WEIGHTS_SHARED),
    "reward_model": (dict(eos_dropout=0.5, center_rewards_coefficient=0.1), BOTH),
    "ddpo": ({}, HALF_THE_IMAGES),
    "ddpo adapter": (dict(lora_r=2, train_learning_rate=1e-2, sample_guidance_scale=2.0), HALF_THE_IMAGES),
}
CASES = slow_but(["ppo"], [name for name in RUNS if name.split()[0] in NAMES])
STOPPED = dict(total_episodes=24, num_ppo_epochs=1, save_steps=1, save_total_limit=9)
STOPPED |= dict(reward_fn=("reward.py:stops_once",))

REWARDS = """
import itertools
import os
import signal


def length(prompts, completions, **_):
    return [len(x + y) / 50 for x, y in zip(prompts, completions)]


def some(prompts, completions, **_):  # in half of the groups all are equal; each process sees whole groups
    sizes = [len(list(group)) for _, group in itertools.groupby(prompts)]
    assert all(n % 4 == 0 for n in sizes)
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
    (folder / "reward.py").write_text(REWARDS)
    return folder


def words_for(name, world, output, **settings):
    """The command line of a run, with paths in the folder of the fixture."""
    settings = dict(device="cpu", output_dir=output) | COMMON.get(name, TEXTS) | settings
    if name in ON_PROMPTS:
        settings |= dict(num_sample_generations=0, num_eval_prompts=4)
    if name in DATA:
        settings["dataset"] = world / DATA[name]
    return [str(world / word) if word.startswith("reward.py:") else word for word in words_of(**settings)]


@pytest.fixture(scope="module")
def runs(world, request):
    """All RUNS that are asked for, on one process and on two."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    asked = {item.callspec.params["case"] for item in items}
    one, two = [], []
    for case in [case for case in RUNS if case in asked]:
        name, (both, alone) = case.split()[0], RUNS[case]
        one.append([name, words_for(name, world, world / "1" / case, **both)])
        two.append([name, words_for(name, world, world / "2" / case, **both | alone)])
    processes = on_many_processes.start(two, world)
    for name, words in one:
        main(name, *words)
    on_many_processes.wait(processes, world)
    return world


@pytest.mark.parametrize("case", CASES)
def test_two_processes_are_one(runs, case):
    """Every metric of every update, and in the end the weights."""
    weights = 2e-6 if case.startswith(("ppo", "rloo", "grpo", "agent")) else 2e-4
    assert len(lines_of(runs / "1" / case)) >= 2
    assert_close_runs(runs / "1" / case, runs / "2" / case, weights=weights, edge=0.02 if "ppo" in case else 0.07)


def test_layers_are_gathered_in_bfloat16(monkeypatch):
    """With --bf16: what autocast would cast, and no norm, embedding or head. The other process does not exist."""
    monkeypatch.setattr(ppo, "WORLD_SIZE", 2)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    model, args = tiny_model("qwen3"), ppo.Args(bf16=True, device="cpu")
    ppo.place(model, args)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    with torch.no_grad(), ppo.autocast(args), ppo.gathered(model, args):
        model(torch.ones(1, 2, dtype=torch.long))
        halved = {name for name, p in model.named_parameters() if p.dtype == torch.bfloat16}
    dist.destroy_process_group()
    assert halved == {name for name, _ in model.named_parameters() if "proj" in name}


@pytest.mark.slow
def test_torchrun_and_signals_and_other_numbers_of_processes(world):
    """SIGTERM to both ends the run after its step, with the flag that goes on from there, to the same bits; and as many
    processes go on from a checkpoint as one likes."""
    words = words_for("ppo", world, world / "early", **STOPPED)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    options = dict(cwd=ROOT, env=os.environ | dict(TMPDIR=str(world)), text=True, capture_output=True)
    done = subprocess.run([*launcher, "ppo.py", *words], **options)
    assert done.returncode == 0 and done.stdout.count(f"--resume {world / 'early'}\n") == 1, done.stderr
    (world / "reward.py.None").touch()  # on one process, too, stops_once has stopped
    main("ppo", *words_for("ppo", world, world / "alone", **STOPPED))
    cut(world / "alone", world / "one-to-two", 1)
    jobs = [["ppo", words_for("ppo", world, world / "whole", **STOPPED)]]
    again = ["--reward-fn", f"{world}/reward.py:stops_once", "--resume"]  # which names code
    jobs += [["ppo", [*again, str(world / name)]] for name in ("early", "one-to-two")]
    on_many_processes.wait(on_many_processes.start(jobs, world), world)
    assert_same_run(world / "early", world / "whole")
    main("ppo", *again, cut(world / "whole", world / "two-to-one", 1))
    for name in ("one-to-two", "two-to-one"):
        assert_close_runs(world / name, world / "alone", edge=0.02)
