"""A global batch means the same on any number of processes: losses, gradients, metrics and weights of two are one's.

The processes run on the CPU and speak through gloo. Adam's epsilon is large in these runs: it divides by the root of a
squared gradient, so that where a gradient is 0 but for rounding, its sign would decide over a whole step.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from itertools import islice

import pytest
import torch
from replay import write_model
from runs import checkpoints, cut, lines_of, main, untimed, words_of
from safetensors.torch import load_file
from sources import ROOT, SCRIPTS

import ppo
import sft

MODULES = {script.removesuffix(".py"): importlib.import_module(script.removesuffix(".py")) for script in SCRIPTS}

UPDATES = dict(
    batch_size=8, total_episodes=16, response_length=8, learning_rate=1e-3, adam_epsilon=1e-3, num_ppo_epochs=2
)
GROUPS = UPDATES | dict(num_generations=4, seed=2, num_ppo_epochs=1)
TEXTS = dict(num_train_epochs=1, eval_steps=2, learning_rate=1e-4, batch_size=8)
IMAGES = dict(sample_num_steps=3, sample_batch_size=8, sample_num_batches_per_epoch=2, num_epochs=2, image_steps=1)
IMAGES |= dict(train_batch_size=4, train_gradient_accumulation_steps=2, train_adam_epsilon=1e-3)
COMMON = {"ppo": UPDATES, "rloo": UPDATES, "grpo": GROUPS, "ddpo": IMAGES}
HALF_THE_IMAGES = dict(sample_batch_size=4, train_batch_size=2)
HALF = dict(batch_size=None, per_device_train_batch_size=4)  # on each of two processes, beside 8 on one
TWO_REWARDS = dict(reward_fn=("reward.py:length", "reward_model"), reward_weights=(0.5, 1.0))
OTHER_GROUPS = dict(loss_type="grpo", importance_sampling_level="sequence", beta=0.1, num_ppo_epochs=2)
# micro-batches without a backward pass, after which stage 2 keeps gathered weights
EQUAL_GROUPS = dict(batch_size=16, micro_batch_size=2, total_episodes=48, reward_fn=("reward.py:some",))
ALL_TOKENS = dict(loss_type="dr_grpo", scale_rewards="batch", mask_truncated_completions=True)
GAMES = dict(env="toy/guess/make.py:Game", model="toy/guess/sft", dataset="toy/guess/data/prompts", max_turns=3)
GAMES |= dict(response_length=12, dataset_test_split="train", num_eval_prompts=5, dynamic_sampling=1)
PER_PROMPT = dict(per_prompt_stat_tracking=True, per_prompt_stat_tracking_min_count=5, kl_coef=0.1)
GUIDED = dict(sample_guidance_scale=2.0, train_timestep_fraction=0.7, train_num_inner_epochs=2)
LLAMA = dict(model="llama", max_length=48, max_prompt_length=16)  # with rotary buffers, which no file of weights has

RUNS = {  # name: script, settings of both runs, settings of the run on two processes alone
    "ppo 0": ("ppo", dict(num_mini_batches=2, whiten_rewards=True, adaptive_kl=True, ema_decay=0.5), {}),
    "ppo 2": ("ppo", dict(pretrain_data="texts.jsonl", ptx_coef=1.0), dict(zero_stage=2, offload=True)),
    "ppo 3": ("ppo", TWO_REWARDS, dict(zero_stage=3, gather_for_rollout=False)),
    "ppo 3 checkpointing": ("ppo", {}, dict(zero_stage=3, gradient_checkpointing=True)),
    "ppo 2 shared": (
        "ppo",
        dict(critic="shared", kl_estimator="full", gradient_checkpointing=True),
        dict(zero_stage=2),
    ),
    "ppo 3 shared": ("ppo", dict(critic="shared", use_score_scaling=True), dict(zero_stage=3)),
    "rloo 0": ("rloo", dict(num_mini_batches=2, token_level_kl=True), {}),
    "rloo 2": ("rloo", dict(normalize_reward=True, reward_fn=("reward.py:tail",)), dict(zero_stage=2)),
    "rloo 3": ("rloo", dict(normalize_advantage=True), dict(zero_stage=3)),
    "rloo 2 adapter": ("rloo", dict(lora_r=4), dict(zero_stage=2)),
    "rloo 3 adapter": ("rloo", dict(lora_r=4, ema_decay=0.5), dict(zero_stage=3, gradient_checkpointing=True)),
    "grpo 0": ("grpo", dict(num_mini_batches=2, num_ppo_epochs=2, dynamic_sampling=2, num_eval_prompts=5), {}),
    "grpo 2": ("grpo", OTHER_GROUPS, dict(zero_stage=2)),
    "grpo 2 equal groups": ("grpo", EQUAL_GROUPS, dict(zero_stage=2)),
    "grpo 3": ("grpo", ALL_TOKENS, dict(zero_stage=3)),
    "grpo 3 adapter": ("grpo", dict(lora_r=4, beta=0.1, loss_type="cispo", num_ppo_epochs=2), dict(zero_stage=3)),
    "grpo 3 games": ("grpo", GAMES, dict(zero_stage=3)),
    "dpo 0": ("dpo", {}, {}),
    "dpo 2": ("dpo", dict(precompute_ref=True, loss_type="ipo"), dict(zero_stage=2)),
    "dpo 3": ("dpo", LLAMA | dict(label_smoothing=0.1), dict(zero_stage=3, gradient_checkpointing=True)),
    "dpo 3 adapter": ("dpo", dict(lora_r=2), dict(zero_stage=3)),
    "sft 0": ("sft", {}, HALF),
    "sft 2": ("sft", dict(model="toy/sft"), dict(zero_stage=2)),
    "sft 3": ("sft", {}, dict(zero_stage=3, gradient_checkpointing=True)),
    "sft 3 adapter": ("sft", dict(model="toy/sft", lora_r=2), dict(zero_stage=3)),
    "reward_model 0": ("reward_model", dict(eos_dropout=0.5), {}),
    "reward_model 2": ("reward_model", {}, dict(zero_stage=2)),
    "reward_model 3": ("reward_model", dict(center_rewards_coefficient=0.1), dict(zero_stage=3)),
    "reward_model 3 adapter": ("reward_model", dict(lora_r=2), dict(zero_stage=3)),
    "ddpo": ("ddpo", PER_PROMPT, HALF_THE_IMAGES),
    "ddpo guided": ("ddpo", GUIDED | dict(reward_fn="reward.py:brightness"), HALF_THE_IMAGES),
    "ddpo adapter": ("ddpo", dict(lora_r=2, train_learning_rate=1e-2), HALF_THE_IMAGES),
}
QUICK = ["ppo 2", "ppo 3 checkpointing", "rloo 3 adapter", "grpo 0", "grpo 2 equal groups", "dpo 3", "sft 0", "ddpo"]

REWARDS = """
import os
import signal


def length(prompts, completions, **_):
    return [len(x + y) / 50 for x, y in zip(prompts, completions)]


def tail(prompts, completions, prompt, **_):
    assert prompt == prompts
    return [len(x) / 50 - len(y) / 20 for x, y in zip(completions, prompts)]


def some(prompts, completions, **_):
    # those of half of the prompts differ
    return [len(y) * (sum(map(ord, x)) % 2) for x, y in zip(prompts, completions)]


def brightness(images, prompts, metadata):
    assert prompts == [row["prompt"] for row in metadata]
    return [x.mean() + len(y) for x, y in zip(images, prompts)]


def stops_once(prompts, completions, **_):
    mark = f"{__file__}.{os.environ.get('RANK', '0')}"
    if callable(signal.getsignal(signal.SIGTERM)) and not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getpid(), signal.SIGTERM)
    return length(prompts, completions)


def is_third_update(run):
    # a function is tried before there is a run
    file = f"{os.path.dirname(__file__)}/{run}/metrics.jsonl"
    return os.path.exists(file) and open(file).read().count("\\n") == 2


def fails_once(prompts, completions, **_):
    # to all processes
    mark = f"{__file__}.failed.{os.environ['RANK']}"
    if is_third_update("broken") and not os.path.exists(mark):
        open(mark, "w").close()
        return [float("inf")] * len(prompts)
    return length(prompts, completions)


def fails_alone(prompts, completions, **_):
    if os.environ["RANK"] == "1" and is_third_update("alone"):
        raise ValueError("mine")
    return length(prompts, completions)
"""


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
    (folder / "reward.py").write_text(REWARDS)
    write_model(folder / "llama", "llama")
    return folder


def words_for(script, world, output, **settings):
    """The command line of a run, with paths in the folder of the fixture."""
    settings = dict(device="cpu", output_dir=output) | COMMON.get(script, TEXTS) | settings
    if script != "ddpo":
        settings["num_sample_generations"] = 0
    if script not in ("grpo", "ddpo"):
        data = {"sft": "sft", "reward_model": "preferences", "dpo": "preferences"}.get(script, "prompts")
        settings["dataset"] = world / data
    words = words_of(**settings)
    return [str(world / word) if word.startswith(("reward.py:", "texts.jsonl", "llama")) else word for word in words]


def folder_of(world, processes, run):
    return world / processes / run.replace(" ", "-")


def torchrun(world, *command):
    """Starts the command on two processes, each of one thread, so that they do not fight for the cores."""
    environment = dict(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR", TMPDIR=str(world))  # torchrun leaves a folder
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*launcher, *map(str, command)],
        cwd=ROOT,
        env=os.environ | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


SAVED = dict(total_episodes=24, num_ppo_epochs=1, save_steps=1, save_total_limit=9)


@pytest.fixture(scope="module")
def runs(world, request):
    """All RUNS that are asked for, on one process and on two; beside them those that are interrupted or go on."""
    asked = {item.callspec.params.get("name") for item in request.session.items if hasattr(item, "callspec")}
    jobs = {"one": [], "two": []}
    for name in [name for name in RUNS if name in asked]:
        script, both, extra = RUNS[name]
        for processes in jobs:
            settings = both | (extra if processes == "two" else {})
            jobs[processes].append([script, words_for(script, world, folder_of(world, processes, name), **settings)])
    main(ppo, *words_for("ppo", world, world / "by-one", **SAVED))
    cut(world / "by-one", world / "one-to-two", 1)
    early = words_for("ppo", world, world / "early", **SAVED, reward_fn=("reward.py:stops_once",))
    whole = words_for("ppo", world, world / "whole", **SAVED, reward_fn=("reward.py:stops_once",))
    unsaved = SAVED | dict(save_steps=99)
    broken = words_for("ppo", world, world / "broken", **unsaved, reward_fn=("reward.py:fails_once",))
    jobs["two"] += [
        ["ppo", ["--resume", str(world / "one-to-two"), "--zero-stage", "3"]],
        ["ppo", [*early, "--zero-stage", "3"]],
        ["ppo", [*whole, "--zero-stage", "3"]],
        ["ppo", ["--resume", str(world / "early")]],
        ["ppo", [*broken, "--zero-stage", "3"]],
        ["ppo", ["--resume", str(world / "broken")]],
    ]
    (world / "jobs.json").write_text(json.dumps(jobs["two"]))
    process = torchrun(world, ROOT / "tests/on_many_processes.py", world / "jobs.json")
    for script, words in jobs["one"]:
        main(MODULES[script], *words)
    (world / "said").write_text(process.communicate(timeout=3600)[0])
    assert process.returncode == 0, (world / "said").read_text()[-5000:]
    return world


def close_to(x, name, script):
    """Equal to rounding. A ratio or value on the edge of its range is clipped on one side and not on the other: of the
    128 tokens (in rloo.py 16 responses) that two passes over a batch see, two (one) may be counted differently.
    """
    edge = 0
    if name.endswith("/clipfrac_avg"):
        edge = 0.02 if script == "ppo" else 0.07
    return pytest.approx(x, rel=1e-3, abs=1e-5 + edge)


def assert_same_metrics(a, b, script="", close=close_to):
    pairs = list(zip(untimed(lines_of(a)), untimed(lines_of(b)), strict=True))
    assert len(pairs) >= 2
    for one, two in pairs:
        if "policy/sampler_error" not in one:  # with TF32 alone
            two.pop("policy/sampler_error", None)
        assert one.keys() == two.keys()
        wrong = {name: (x, two[name]) for name, x in one.items() if x != close(two[name], name, script)}
        assert not wrong


def assert_same_weights(a, b, tolerance):
    """In each file that was saved."""
    files = sorted(path.relative_to(a) for path in a.rglob("*model.safetensors"))
    assert files and files == sorted(path.relative_to(b) for path in b.rglob("*model.safetensors"))
    for file in files:
        one, two = load_file(a / file), load_file(b / file)
        assert one.keys() == two.keys()
        for key in one:
            torch.testing.assert_close(two[key], one[key], rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]
)
def test_two_processes_are_one(runs, name):
    """Every metric of every update, and in the end the weights."""
    script = RUNS[name][0]
    one = folder_of(runs, "one", name)
    two = folder_of(runs, "two", name)
    assert_same_metrics(one, two, script)
    assert_same_weights(one, two, 2e-6 if script in ("ppo", "rloo", "grpo") else 2e-4)


def test_process_0_alone_reads_the_weights(runs):
    """With --zero-stage; the other one has models on `meta`, until it receives its shards."""
    for name, (_, _, extra) in RUNS.items():
        file = folder_of(runs, "two", name).with_suffix(".loaded")
        if file.exists():
            device = "meta" if "zero_stage" in extra else "cpu"
            assert set(file.read_text().splitlines()) == {"0 cpu", f"1 {device}"}, name
    assert (runs / "whole.loaded").exists()


def test_each_process_writes_its_half_of_a_checkpoint(runs):
    """Neither ever holds the whole."""
    files = sorted((runs / "whole/checkpoints/step-00000003").glob("*.safetensors"))
    sizes = [file.stat().st_size for file in files]
    assert len(sizes) == 2
    assert max(sizes) < 0.55 * sum(sizes)
    (alone,) = (runs / "by-one/checkpoints/step-00000003").glob("*.safetensors")
    assert sum(sizes) == pytest.approx(alone.stat().st_size, rel=0.05)


def test_interrupted_and_resumed(runs):
    """SIGTERM to both ends the run after its step, with the flag that goes on from there, to the same bits."""
    out = runs / "early"
    assert (runs / "said").read_text().count(f"--resume {out}\n") == 1
    assert untimed(lines_of(out)) == untimed(lines_of(runs / "whole"))
    assert_same_weights(out, runs / "whole", 0)


def test_an_error_of_all_processes(runs):
    """It saves the update before, from which the run goes on to the same bits."""
    out = runs / "broken"
    assert (runs / "said").read_text().count(f"from step 2: --resume {out}\n") == 1
    lines = [{name.replace("fails", "stops"): x for name, x in line.items()} for line in untimed(lines_of(out))]
    assert lines == untimed(lines_of(runs / "whole"))
    assert_same_weights(out, runs / "whole", 0)


def test_two_processes_go_on_as_one(runs):
    """With the shards of stage 3."""
    first, second = (set(load_file(file)) for file in (runs / "whole/checkpoints/step-00000001").glob("*.safetensors"))
    assert len(first & second) > 0.5 * len(first | second)  # each process has a part of nearly each weight
    alone = cut(runs / "whole", runs / "two-to-one", 1)
    main(ppo, "--resume", alone, "--zero-stage", 0)
    assert_same_metrics(alone, runs / "whole", "ppo")


def test_one_process_goes_on_as_two(runs):
    assert_same_metrics(runs / "one-to-two", runs / "by-one", "ppo")


# --- As torchrun starts them


@pytest.mark.slow
def test_a_signal_to_torchrun(world):
    """It is passed on to all processes, some of them twice; what torchrun makes of the end is not ours."""
    out = world / "signalled"
    process = torchrun(world, "rloo.py", *words_for("rloo", world, out, total_episodes=40_000))
    while not (out / "metrics.jsonl").exists() or (out / "metrics.jsonl").read_text().count("\n") < 2:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=600)[0]
    assert 2 <= len(lines_of(out)) < 5000, said[-3000:]
    assert said.count(f"--resume {out}\n") == 1
    assert said.count("saved in ") == 1


@pytest.mark.slow
def test_an_error_of_one_process(world):
    """It ends the run, though the other one waits for its rewards; a checkpoint stays."""
    out = world / "alone"
    words = words_for("ppo", world, out, **SAVED, reward_fn=("reward.py:fails_alone",))
    process = torchrun(world, "ppo.py", *words)
    said = process.communicate(timeout=300)[0]
    assert process.returncode and "ValueError: mine" in said
    assert f"from step 2: --resume {out}\n" in said
    assert checkpoints(out) == [1, 2]


# --- Without processes


@pytest.mark.parametrize("n", range(1, 10))
@pytest.mark.parametrize("processes", range(1, 6))
def test_shares(monkeypatch, n, processes):
    """All shares are equally long, and each row counts once, in the share of its process."""
    monkeypatch.setattr(sft, "WORLD_SIZE", processes)
    args = sft.Args(micro_batch_size=2, device="cpu")
    shares = []
    for rank in range(processes):
        monkeypatch.setattr(sft, "RANK", rank)
        shares.append([pair for part in sft.micro_batches(range(n), args) for pair in zip(*part)])
    assert {len(share) for share in shares} == {-(-n // processes)}
    counted = [[row for row, is_counted in share if is_counted] for share in shares]
    assert counted == [list(range(n))[rank::processes] for rank in range(processes)]


def test_weights_are_whole_in_a_rollout_and_shards_after_it(monkeypatch):
    """With stage 3, unless --no-gather-for-rollout asks for each layer anew."""

    class Part(torch.nn.Module):
        """What is asked of FSDP2."""

        is_sharded = gives_back = True

        def set_reshard_after_forward(self, value, recurse):
            self.gives_back = value

        def unshard(self):
            self.is_sharded = False

        def reshard(self):
            self.is_sharded = True

    monkeypatch.setattr(ppo, "FSDPModule", Part)
    for gather in (True, False):
        part = Part()
        with ppo.gathered(part, ppo.Args(zero_stage=3, gather_for_rollout=gather)):
            assert part.is_sharded == part.gives_back == (not gather)
        assert part.is_sharded and part.gives_back
