"""Device mistakes, seen on a pretend accelerator (pretend_device.py): runs there give the numbers of runs on the CPU.

They have a process of their own. This one has never heard of the device, and reads what they leave.
"""

import pytest
from pretend_device import train
from runs import GOLD, NAMES, assert_close_runs, cut, fork, run, script, slow_but
from transformers import AutoModelForCausalLM

ROLLOUTS = dict(batch_size=8, total_episodes=16, response_length=8, micro_batch_size=4, num_ppo_epochs=2)
ROLLOUTS |= dict(learning_rate=1e-3, num_sample_generations=1)
GROUPS = ROLLOUTS | dict(num_ppo_epochs=1, num_generations=4, beta=0.1)
IMAGES = dict(num_epochs=2, sample_num_steps=2, sample_batch_size=8, sample_num_batches_per_epoch=1)
IMAGES |= dict(train_batch_size=8, train_gradient_accumulation_steps=1, train_adam_epsilon=1e-3)
COMMON = {"ppo": ROLLOUTS, "rloo": ROLLOUTS, "grpo": GROUPS, "agent": GROUPS | dict(response_length=24)}
COMMON |= {"ddpo": IMAGES}
OTHERS = {  # name: what is not in a default run
    "ppo": dict(kl_estimator="k3", kl_target=6.0, whiten_rewards=True, reward_fn=(GOLD, "reward_model")),
    "ppo adapter": dict(lora_r=2, num_mini_batches=2, gradient_checkpointing=True),
    "grpo draws": dict(dynamic_sampling=2, num_ppo_epochs=2, mask_truncated_completions=True, beta=0.0),
    "dpo adapter": dict(lora_r=2, gradient_checkpointing=True),
    "reward_model others": dict(lora_r=2, center_rewards_coefficient=0.1, eos_dropout=0.5),
}
CASES = dict.fromkeys([*NAMES, *(name for name in OTHERS if name.split()[0] in NAMES)])
SAVED = dict(total_episodes=32, save_steps=1, save_total_limit=9)


@pytest.fixture(scope="module")
def settings_of(part_of):
    """settings_of("ppo") -> those of a run; Adam's epsilon is large, as in test_processes.py."""

    def make(case):
        name = case.split()[0]
        data = "sft" if name == "sft" else "preferences"
        texts = dict(batch_size=8, learning_rate=1e-4, num_sample_generations=1, num_train_epochs=1)
        settings = dict(adam_epsilon=1e-3) | COMMON.get(name, texts) | OTHERS.get(case, {})
        if name not in COMMON:
            settings["dataset"] = part_of(data, 16)
        return {key: x for key, x in settings.items() if key in vars(script(name).Args())}

    return make


def train_there(folder, jobs):
    process = fork(folder / "said", train, jobs)
    process.join()
    assert process.exitcode == 0, (folder / "said").read_text()[-5000:]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, request, settings_of):
    """A folder with the runs that are asked for, on both devices."""
    folder = tmp_path_factory.mktemp("devices")
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    cases = sorted({item.callspec.params["case"] for item in items})
    jobs = [[case.split()[0], settings_of(case), str(folder / "there" / case)] for case in cases]
    for name, settings, output in jobs:
        run(name, output.replace("there", "here"), **settings)
    train_there(folder, jobs)
    return folder


@pytest.mark.parametrize("case", slow_but([], CASES))
def test_the_numbers_are_those_of_the_cpu(case, runs):
    """Two updates, and tables; what was saved loads in a process without the device."""
    assert_close_runs(runs / "there" / case, runs / "here" / case, weights=2e-4)
    if case == "ppo":
        AutoModelForCausalLM.from_pretrained(runs / "there" / case)


@pytest.mark.slow
def test_resume_on_another_device(tmp_path, settings_of):
    """From checkpoints that the other device has written."""
    settings = settings_of("ppo") | SAVED
    run("ppo", tmp_path / "whole", **settings)
    there = cut(tmp_path / "whole", tmp_path / "there", 1)
    train_there(tmp_path, [["ppo", settings | dict(resume=str(there)), str(there)]])
    back = cut(there, tmp_path / "back", 2)
    run("ppo", back, resume=str(back), **settings)
    for folder in (there, back):
        assert_close_runs(tmp_path / "whole", folder, weights=2e-4)
