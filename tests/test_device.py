"""Device mistakes, seen on a pretend accelerator (pretend_device.py): runs there, on one process and on two, give the
numbers of a run of one process on the CPU.

They have processes of their own. This one has never heard of the device, and reads what they leave.
"""

import on_many_processes
import pytest
from pretend_device import NAME, set_up, train
from runs import GOLD, NAMES, ON_PROMPTS, assert_close_runs, cut, fork, run, script, slow_but, words_of
from transformers import AutoModelForCausalLM

ROLLOUTS = dict(batch_size=8, total_episodes=16, response_length=8, micro_batch_size=4, num_ppo_epochs=2)
ROLLOUTS |= dict(learning_rate=1e-3, num_sample_generations=1)
GROUPS = ROLLOUTS | dict(num_ppo_epochs=1, num_generations=4, beta=0.1)
IMAGES = dict(num_epochs=2, sample_num_steps=2, sample_batch_size=8, sample_num_batches_per_epoch=1)
IMAGES |= dict(train_batch_size=8, train_gradient_accumulation_steps=1, train_adam_epsilon=1e-3)
HALF_THE_IMAGES = dict(sample_batch_size=4, train_batch_size=4)  # of each process
COMMON = {"ppo": ROLLOUTS, "rloo": ROLLOUTS, "grpo": GROUPS, "agent": GROUPS | dict(response_length=24)}
COMMON |= {"ddpo": IMAGES}
OTHERS = {  # name: what is not in a default run
    "ppo": dict(reward_fn=(GOLD, "reward_model"), num_eval_prompts=4),
    "ppo adapter": dict(lora_r=2, num_mini_batches=2, gradient_checkpointing=True),
    "grpo masks": dict(num_ppo_epochs=2, mask_truncated_completions=True, beta=0.0),
    "dpo adapter": dict(lora_r=2, gradient_checkpointing=True),
    "reward_model others": dict(lora_r=2, center_rewards_coefficient=0.1, eos_dropout=0.5),
}
ON_ONE = dict.fromkeys([*NAMES, *(name for name in OTHERS if name.split()[0] in NAMES)])
CASES = [("one", case) for case in ON_ONE] + [("two", name) for name in NAMES]
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
    """A folder with the runs that are asked for: on the CPU, and on the device by one process and by two."""
    folder = tmp_path_factory.mktemp("devices")
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    asked = sorted({(item.callspec.params["processes"], item.callspec.params["case"]) for item in items})
    for case in sorted({case for _, case in asked}):
        run(case.split()[0], folder / "cpu" / case, **settings_of(case))
    one, two = [], []
    for processes, case in asked:
        name, settings, output = case.split()[0], settings_of(case), str(folder / processes / case)
        if processes == "one":
            one.append([name, settings, output])
        else:
            settings |= HALF_THE_IMAGES if name == "ddpo" else {}
            quiet = {"num_eval_prompts": 0} if name in ON_PROMPTS else {}
            two.append([name, words_of(**quiet | settings, device=NAME, output_dir=output)])
    if one:
        train_there(folder, one)
    if two:
        on_many_processes.wait(on_many_processes.start(two, folder, set_up), folder)
    return folder


@pytest.mark.parametrize(("processes", "case"), slow_but([("two", "ppo")], CASES))
def test_the_numbers_are_those_of_the_cpu(processes, case, runs):
    """Two updates, and tables; what was saved loads in a process without the device."""
    assert_close_runs(runs / processes / case, runs / "cpu" / case, weights=2e-4)
    if case == "ppo":
        AutoModelForCausalLM.from_pretrained(runs / processes / case)


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
