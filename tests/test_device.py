"""Device mistakes, seen on a pretend accelerator (pretend_device.py): runs there give the numbers of runs on the CPU.

PyTorch never forgets a device of this kind, so they are made in a process of their own: `python test_device.py DIR`.
"""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from runs import lines_of, untimed
from sources import ROOT, SCRIPTS

ROLLOUTS = dict(batch_size=8, total_episodes=16, response_length=8, micro_batch_size=4, learning_rate=1e-3)
TEXTS = dict(dataset_train_split="train[:16]", dataset_test_split="validation[:8]", batch_size=8)
SETTINGS = {
    "ppo": ROLLOUTS | dict(dataset_test_split="validation[:8]", num_sample_generations=1),
    "rloo": ROLLOUTS | dict(dataset_test_split="none", num_sample_generations=0),
    "grpo": ROLLOUTS | dict(dataset_train_split="train[:16]", dataset_test_split="none", num_generations=4, beta=0.1),
    "dpo": TEXTS | dict(num_sample_generations=1),
    "sft": TEXTS | dict(num_sample_generations=1),
    "reward_model": TEXTS,
    "ddpo": dict(
        num_epochs=2,
        sample_num_steps=2,
        sample_batch_size=8,
        sample_num_batches_per_epoch=1,
        train_batch_size=8,
        train_gradient_accumulation_steps=1,
    ),
}


def make_runs(folder: Path) -> None:
    """Trains each script on both devices, and does what a program for CUDA must not do; mistakes.json says what came."""
    sys.path.insert(0, str(ROOT))
    import pretend_device
    import torch

    wrong = {}
    ours = torch.ones(3, device=pretend_device.NAME)
    mistakes = {
        "a tensor of the CPU": lambda: ours + torch.ones(3),
        "a mask of the CPU": lambda: ours.masked_fill(torch.ones(3) > 0, 0.0),
        "a generator of the CPU": lambda: torch.rand(3, device=pretend_device.NAME, generator=torch.Generator()),
        "numpy": lambda: ours.numpy(),
    }
    for name, mistake in mistakes.items():
        try:
            mistake()
            wrong[name] = "allowed"
        except (RuntimeError, TypeError):
            wrong[name] = "refused"
    (folder / "mistakes.json").write_text(json.dumps(wrong))
    for script, settings in SETTINGS.items():
        module = importlib.import_module(script)
        module.draw_curves = lambda *_: None
        if script == "ddpo":
            module.save_model = lambda *_: None  # diffusers asks for the address of each weight, and here it has none
        for device in ("cpu", pretend_device.NAME):
            module.train(module.Args(device=device, output_dir=str(folder / script / device), **settings))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the runs are."""
    folder = tmp_path_factory.mktemp("devices")
    done = subprocess.run([sys.executable, __file__, folder], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("script", [name.removesuffix(".py") for name in SCRIPTS])
def test_the_numbers_are_those_of_the_cpu(script, folder):
    """To rounding: some sums are made in another order."""
    on_cpu = untimed(lines_of(folder / script / "cpu"))
    on_device = untimed(lines_of(folder / script / "pretend"))
    assert len(on_cpu) == len(on_device) == 2
    for a, b in zip(on_cpu, on_device):
        assert a.keys() == b.keys()
        assert b == pytest.approx(a, rel=1e-3, abs=1e-5, nan_ok=True)


def test_mistakes_are_refused(folder):
    """As CUDA does, so that the runs above mean something."""
    assert set(json.loads((folder / "mistakes.json").read_text()).values()) == {"refused"}


if __name__ == "__main__":
    make_runs(Path(sys.argv[1]))
