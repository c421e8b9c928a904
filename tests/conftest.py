"""The scripts are in the folder above. No test asks the network for anything, or leaves anything behind."""

import atexit
import json
import os
import random
import runpy
import shutil
import signal
import sys
import tempfile
from itertools import islice
from pathlib import Path
from unittest import mock

import pytest

ROOT = Path(__file__).resolve().parent.parent
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # tests are the same on a machine with a GPU
for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):  # tables are plain, and as wide as in a file
    os.environ.pop(name, None)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one for each process of pytest -n 2
if "CACHE_OF_TESTS" not in os.environ:  # nothing is written to the user's; processes that this one starts share it
    os.environ["HF_HOME"] = os.environ["CACHE_OF_TESTS"] = tempfile.mkdtemp(prefix="cache_of_tests_")
    for name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_XET_CACHE"):
        os.environ.pop(name, None)

    @atexit.register
    def remove(folder: str = os.environ["CACHE_OF_TESTS"], owner: int = os.getpid()) -> None:
        """By the process that made it, not by those that were forked from it."""
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)


sys.path.insert(0, str(ROOT))


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Each test begins with the same random numbers, settings of torch, and signal handlers."""
    import numpy as np
    import torch

    folder = os.getcwd()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    precision = torch.get_float32_matmul_precision()
    threads = torch.get_num_threads()
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    with mock.patch.dict(os.environ):
        yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    torch.set_float32_matmul_precision(precision)
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    assert os.getcwd() == folder


@pytest.fixture(scope="session")
def part_of(tmp_path_factory):
    """part_of("sft", 64) -> a folder with the first 64 rows of toy/data/sft and up to 400 for validation."""

    def make(name: str, rows: int) -> str:
        folder = tmp_path_factory.mktemp(name)
        for split, n in (("train", rows), ("validation", min(rows, 400))):
            with open(ROOT / "toy/data" / name / f"{split}.jsonl", "rb") as file:
                (folder / f"{split}.jsonl").write_bytes(b"".join(islice(file, n)))
        return str(folder)

    return make


@pytest.fixture(scope="session")
def uneven(tmp_path_factory):
    """uneven("prompts", 64) -> a folder with rows of toy/shells/data/prompts, every other prompt cut somewhere."""

    def make(name: str, rows: int) -> str:
        folder = tmp_path_factory.mktemp(name)
        for split in ("train", "validation"):
            with open(ROOT / "toy/shells/data" / name / f"{split}.jsonl") as file:
                data = [json.loads(line) for line in islice(file, rows)]
            for i, row in enumerate(data[::2]):  # of the others, some answers are right
                words = row["prompt"].split()[: 3 + i % 7]
                row["prompt"] = " ".join([*words, ":"])
            (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, data)))
        return str(folder)

    return make


@pytest.fixture(scope="session")
def clear_pairs(tmp_path_factory):
    """The pairs whose two texts differ most in their true reward: 384 to train on and 128 others to evaluate on."""
    rows = (ROOT / "toy/data/preferences/train.jsonl").read_text("utf-8").splitlines(keepends=True)[:3000]
    prompts, *sides = zip(*([json.loads(row)[name] for name in ("prompt", "chosen", "rejected")] for row in rows))
    gold = runpy.run_path(str(ROOT / "toy/gold_score.py"))["gold_score"]
    good, bad = (gold(prompts, side) for side in sides)
    best = sorted(range(len(rows)), key=lambda i: bad[i] - good[i])[:512]
    splits = {"validation": best[::4], "train": [x for i, x in enumerate(best) if i % 4]}
    folder = tmp_path_factory.mktemp("clear_pairs")
    for split, kept in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(rows[i] for i in kept), "utf-8")
    return str(folder)


@pytest.fixture(scope="session")
def tiny(part_of, uneven):
    """Settings of a run of three or four steps, for each script."""
    updates = dict(batch_size=8, total_episodes=24, response_length=8)
    prompts = part_of("prompts", 64)
    pairs = part_of("preferences", 24)
    images = dict(sample_num_steps=2, sample_batch_size=8, sample_num_batches_per_epoch=1, train_batch_size=8)
    return {
        "ppo": updates | dict(dataset=prompts, num_ppo_epochs=2),
        "rloo": updates | dict(dataset=prompts, num_ppo_epochs=2),
        "grpo": updates | dict(dataset=uneven("prompts", 64), num_generations=4),
        "agent": updates | dict(response_length=24, num_generations=4),
        "ddpo": images | dict(num_epochs=2, train_gradient_accumulation_steps=1),
        "sft": dict(dataset=part_of("sft", 32), batch_size=8),
        "reward_model": dict(dataset=pairs, batch_size=8),
        "dpo": dict(dataset=pairs, batch_size=8, learning_rate=1e-3),
    }
