"""Device mistakes, seen on a pretend accelerator (pretend_device.py): runs there give the numbers of runs on the CPU.

They have a process of their own (on_device.py). This one has never heard of the device, and reads what they leave.
"""

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from diffusers import StableDiffusionPipeline
from on_device import DEVICE, lecture
from runs import cut, run, words_of
from sources import ROOT, SCRIPTS
from test_processes import assert_same_metrics, assert_same_weights, torchrun
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import ppo

ROLLOUTS = dict(batch_size=8, total_episodes=16, response_length=8, micro_batch_size=4, num_ppo_epochs=2)
ROLLOUTS |= dict(learning_rate=1e-3, adam_epsilon=1e-3)  # as in test_processes.py
PROMPTS = ROLLOUTS | dict(dataset_test_split="validation[:8]", num_sample_generations=1)
GROUPS = ROLLOUTS | dict(
    num_ppo_epochs=1, dataset_train_split="train[:16]", dataset_test_split="none", num_generations=4, beta=0.1
)
TEXTS = dict(dataset_train_split="train[:16]", dataset_test_split="validation[:8]", batch_size=8, learning_rate=1e-4)
IMAGES = dict(num_epochs=2, sample_num_steps=2, sample_batch_size=8, sample_num_batches_per_epoch=1)
IMAGES |= dict(train_batch_size=8, train_gradient_accumulation_steps=1)
RUNS = {  # name: settings of a script, which is the first word
    "ppo": PROMPTS,
    "rloo": PROMPTS | dict(dataset_test_split="none"),
    "grpo": GROUPS,
    "dpo": TEXTS | dict(num_sample_generations=1),
    "sft": TEXTS | dict(num_sample_generations=1),
    "reward_model": TEXTS,
    "ddpo": IMAGES | dict(train_adam_epsilon=1e-3),
    "ppo shared": PROMPTS | dict(critic="shared", kl_estimator="full", gradient_checkpointing=True),
    "ppo adapter": PROMPTS | dict(lora_r=2, num_mini_batches=2, whiten_rewards=True, response_length_min=4),
    "ppo scaled": PROMPTS | dict(ema_decay=0.5, use_score_scaling=True, use_score_norm=True, adaptive_kl=True),
    "ppo bfloat16": PROMPTS | dict(bf16=True),
    "rloo tokens": PROMPTS
    | dict(token_level_kl=True, normalize_reward=True, reward_fn=("toy/gold_score.py:gold_score",)),
    "grpo draws": GROUPS | dict(dynamic_sampling=2, num_ppo_epochs=2, mask_truncated_completions=True, beta=0.0),
    "grpo sequences": GROUPS | dict(importance_sampling_level="sequence", loss_type="grpo", scale_rewards="batch"),
    "grpo adapter": GROUPS | dict(lora_r=2, loss_type="cispo", num_mini_batches=2),
    "grpo games": GROUPS | dict(model="toy/guess/sft", env="toy/guess/make.py:Game", dataset="toy/guess/data/prompts"),
    "dpo others": TEXTS | dict(loss_type="ipo", precompute_ref=True),
    "dpo adapter": TEXTS | dict(lora_r=2, label_smoothing=0.1, gradient_checkpointing=True),
    "sft adapter": TEXTS | dict(model="toy/sft", lora_r=2),
    "sft bfloat16": TEXTS | dict(bf16=True),
    "reward_model others": TEXTS | dict(lora_r=2, center_rewards_coefficient=0.1, eos_dropout=0.5),
    "ddpo others": IMAGES | dict(lora_r=2, kl_coef=0.1, sample_guidance_scale=2.0, train_num_inner_epochs=2),
}
SHORT_ROLLOUTS = dict(batch_size=8, total_episodes=16, response_length=8)  # of lecture/
DATA = {"sft": "sft", "dpo": "preferences", "reward_model": "preferences"}  # of which short forms read all
SHORT = dict.fromkeys(["ppo", "rloo", "grpo"], SHORT_ROLLOUTS) | dict.fromkeys(DATA, dict(batch_size=8))
SHORT["ddpo"] = IMAGES
MANY = {  # on two processes, beside one on the CPU: with the settings of the run of that script
    "ppo-0": PROMPTS,
    "ppo-2": PROMPTS | dict(zero_stage=2),
    "ppo-3": PROMPTS | dict(zero_stage=3),
    "grpo-0": GROUPS,
    "ddpo-0": RUNS["ddpo"] | dict(sample_batch_size=4, train_batch_size=4),
}
SAVED = PROMPTS | dict(total_episodes=32, save_steps=1, save_total_limit=9)


def asked(request, parameter: str) -> list[str]:
    """The values of this parameter in the tests of this file that are to run."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    values = {item.callspec.params.get(parameter) for item in items}
    return sorted(values - {None})


def on_the_device(file: Path, scripts: list, short_forms: list = ()) -> subprocess.Popen:
    """Starts a process that does these jobs: a script, its settings, and the folder of the run."""
    file.write_text(json.dumps({"scripts": scripts, "lecture": short_forms}))
    return subprocess.Popen([sys.executable, "tests/on_device.py", file], cwd=ROOT, stderr=subprocess.PIPE, text=True)


def wait_for(process: subprocess.Popen) -> None:
    said = process.communicate(timeout=3600)
    assert process.returncode == 0, "".join(filter(None, said))[-5000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, request, part_of):
    """A folder with the runs that are asked for, on both devices."""
    folder = tmp_path_factory.mktemp("devices")
    names = {*asked(request, "name"), *(name.split("-")[0] for name in asked(request, "many"))}
    scripts = [[name.split()[0], RUNS[name], name] for name in sorted(names)]
    short_forms = []
    for script in asked(request, "short"):
        data = {"dataset": part_of(DATA[script], 16)} if script in DATA else {}
        short_forms.append([script, SHORT[script] | data, f"lecture {script}"])
    there = [[[*job, str(folder / DEVICE / name)] for *job, name in jobs] for jobs in (scripts, short_forms)]
    process = on_the_device(folder / "jobs.json", *there)
    for script, settings, name in scripts:
        run(importlib.import_module(script), folder / "cpu" / name, **settings)
    for script, settings, name in short_forms:
        lecture(script, settings, str(folder / "cpu" / name), "cpu")
    wait_for(process)
    return folder


@pytest.fixture(scope="module")
def found(folder):
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def runs_of_many(folder, request):
    jobs = []
    for name in asked(request, "many"):
        settings = dict(device=DEVICE, output_dir=folder / "many" / name) | MANY[name]
        jobs.append([name.split("-")[0], words_of(**settings)])
    (folder / "many.json").write_text(json.dumps(jobs))
    wait_for(torchrun(folder, "tests/on_device.py", folder / "many.json"))
    return folder / "many"


def assert_same_lines(a: Path, b: Path, rel: float = 1e-3, edge: float = 1e-5) -> None:
    """Metrics, to rounding: some sums are made in another order."""
    assert_same_metrics(a, b, close=lambda x, *_: pytest.approx(x, rel=rel, abs=edge, nan_ok=True))


QUICK = [name.removesuffix(".py") for name in SCRIPTS]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in RUNS if name not in QUICK]


@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_the_numbers_are_those_of_the_cpu(name, folder):
    """Two updates, and in the end the weights; with bfloat16 to its rounding, by which other tokens may be drawn."""
    rough = {}
    if "bfloat16" in name:
        rough = dict(edge=math.inf) if name.startswith("ppo") else dict(rel=0.05, edge=0.02)
    assert_same_lines(folder / "cpu" / name, folder / DEVICE / name, **rough)
    if not rough:
        assert_same_weights(folder / "cpu" / name, folder / DEVICE / name, 2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("short", SHORT)
def test_the_short_forms_too(short, folder):
    assert_same_lines(folder / "cpu" / f"lecture {short}", folder / DEVICE / f"lecture {short}")


@pytest.mark.parametrize("name", ["ppo", "reward_model", "ddpo"])
def test_what_was_saved_there_can_be_read_anywhere(name, folder):
    """In a process like this one."""
    assert "pretend_device" not in sys.modules
    loads = {"ppo": AutoModelForCausalLM, "reward_model": AutoModelForSequenceClassification}
    model = loads.get(name, StableDiffusionPipeline).from_pretrained(folder / DEVICE / name)
    assert model.device.type == "cpu"


@pytest.mark.slow
@pytest.mark.parametrize("many", MANY)
def test_two_processes_are_one(many, runs_of_many, folder):
    """In whose group are tensors of both devices."""
    script = many.split("-")[0]
    assert_same_metrics(folder / "cpu" / script, runs_of_many / many, script)
    assert_same_weights(folder / "cpu" / script, runs_of_many / many, 2e-4)


@pytest.mark.slow
def test_a_run_goes_there_and_back(tmp_path):
    """From checkpoints that the other device has written."""
    run(ppo, tmp_path / "whole", **SAVED)
    there = cut(tmp_path / "whole", tmp_path / "there", 1)
    wait_for(on_the_device(tmp_path / "jobs.json", [["ppo", SAVED | dict(resume=str(there)), str(there)]]))
    back = cut(there, tmp_path / "back", 2)
    run(ppo, back, resume=str(back), **SAVED)
    for folder in (there, back):
        assert_same_lines(tmp_path / "whole", folder)
        assert_same_weights(tmp_path / "whole", folder, 2e-4)


# --- What makes the host wait for the device, counted


def test_sampling_seldom_waits(found):
    """64 token steps: at every eighth the host asks whether anybody is left. Prompts and mask are looked at once."""
    assert found["reads_of_sampling"] <= 64 / 8 + 5


@pytest.mark.parametrize("name", ["ppo", "rloo", "grpo"])
def test_the_update_seldom_waits(name, found):
    """A handful of reads for a mini-batch, however many micro-batches and metrics it has, and none in backward passes;
    a function's rewards need two for a batch, not for a row."""
    reads = found["reads"][name]
    passes = RUNS[name]["num_ppo_epochs"]
    assert reads["update"] <= 6 * 2 * passes
    assert reads.get("elsewhere", 0) == 0
    assert reads.get("function_reward", 0) <= 4 * 2


# --- For whoever has a GPU


@pytest.mark.slow
def test_the_report_of_a_gpu():
    """One row of its table: a run that is resumed beside one that is not."""
    command = [sys.executable, "benchmarks/gpu_report.py", "--device", DEVICE, "--quick", "--only", "resumed"]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    _, title, _, _, _, _, metric, a, b, apart, _ = said.splitlines()[-1].split("|")
    assert (title.strip(), metric.strip()) == ("ppo, resumed halfway: its end", "objective/scores")
    assert a == b
    assert float(apart.split(":")[0]) < 1e-3
