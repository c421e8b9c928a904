"""The scripts are in the folder above, and no test asks the network for anything."""

import os
import sys
from itertools import islice
from pathlib import Path

import pytest
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one for each process of pytest -n 2
sys.path.insert(0, str(ROOT))
savefig, Figure.savefig = Figure.savefig, lambda self, path, **_: None  # curves take a third of a run of three steps


@pytest.fixture
def pictures(monkeypatch):
    """Curves are drawn in this test."""
    monkeypatch.setattr(Figure, "savefig", savefig)


@pytest.fixture(scope="session")
def part_of(tmp_path_factory):
    """part_of("sft", 64) -> a folder with the first 64 rows of toy/data/sft and up to 400 for validation."""

    def make(name: str, rows: int) -> str:
        folder = tmp_path_factory.mktemp(name)
        for split, n in (("train", rows), ("validation", min(rows, 400))):
            with open(ROOT / "toy/data" / name / f"{split}.jsonl") as file:
                (folder / f"{split}.jsonl").write_text("".join(islice(file, n)))
        return str(folder)

    return make


@pytest.fixture(scope="session")
def tiny(part_of):
    """Settings of a run of three or four steps, for each script."""
    return {
        "ppo": dict(batch_size=8, total_episodes=24, response_length=8, dataset=part_of("prompts", 64)),
        "rloo": dict(batch_size=8, total_episodes=24, response_length=8, dataset=part_of("prompts", 64)),
        "grpo": dict(batch_size=8, num_generations=4, total_episodes=24, response_length=8, num_eval_prompts=4),
        "ddpo": dict(
            num_epochs=2, sample_num_steps=2, sample_batch_size=8, sample_num_batches_per_epoch=1, train_batch_size=8,
            train_gradient_accumulation_steps=1,
        ),
        "sft": dict(dataset=part_of("sft", 32), batch_size=8),
        "reward_model": dict(dataset=part_of("preferences", 24), batch_size=8),
        "dpo": dict(
            dataset=part_of("preferences", 24), batch_size=8, num_eval_prompts=4, response_length=6, learning_rate=1e-3
        ),
    }
