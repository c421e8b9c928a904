"""The scripts are in the folder above. No test asks the network for anything, or leaves anything behind."""

import atexit
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from functools import cache
from itertools import islice
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one for each process of pytest -n 2
os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as in the scripts, before torch is imported
if "CACHE_OF_TESTS" not in os.environ:  # nothing is written to the user's; processes that this one starts share it
    os.environ["HF_HOME"] = os.environ["CACHE_OF_TESTS"] = tempfile.mkdtemp(prefix="cache_of_tests_")
    for name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_XET_CACHE"):
        os.environ.pop(name, None)

    @atexit.register
    def remove(folder=os.environ["CACHE_OF_TESTS"], owner=os.getpid()):
        """By the process that made it, not by those that were forked from it."""
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)


sys.path.insert(0, str(ROOT))
settings.register_profile("tests", deadline=None, derandomize=True, database=None)  # the same on a busy machine
settings.load_profile("tests")


def pytest_addoption(parser, pluginmanager):
    """Without pytest-xdist (-p no:xdist) its options in pytest.ini mean nothing."""
    if not pluginmanager.hasplugin("xdist"):
        parser.addoption("--numprocesses"), parser.addoption("--dist")


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Each test begins with the same random numbers and settings of torch, whichever ran before it.

    And it ends in the folder, and with the signal handlers, that it began with.
    """
    import numpy as np
    import torch

    def kept():
        return os.getcwd(), {number: signal.getsignal(number) for number in signal.valid_signals()}

    before, environment = kept(), dict(os.environ)
    numbers = random.getstate(), np.random.get_state(), torch.get_rng_state()
    precision, threads = torch.get_float32_matmul_precision(), torch.get_num_threads()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    yield
    random.setstate(numbers[0]), np.random.set_state(numbers[1]), torch.set_rng_state(numbers[2])
    torch.set_float32_matmul_precision(precision)  # a run on a CPU changes it for good
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    if (environment | {"PYTEST_CURRENT_TEST": ""}) != (dict(os.environ) | {"PYTEST_CURRENT_TEST": ""}):
        os.environ.clear(), os.environ.update(environment)
    assert kept() == before


@pytest.fixture(scope="session", autouse=True)
def in_short():
    """What takes half of a run of three steps: no curves are drawn, and data that were read are not read again."""
    import datasets
    from matplotlib.figure import Figure

    load_dataset, drawing = datasets.load_dataset, (Figure.subplots, Figure.savefig)

    @cache
    def read_once(files, options):
        return load_dataset(**dict(options))

    def load(path, name=None, **options):
        options |= {"path": path, "name": name}
        files = options.get("data_files") or path
        place = Path(files if isinstance(files, str) else "nowhere").resolve()
        if not place.exists():
            return load_dataset(**options)
        files = [(file, file.stat()) for file in (place, *sorted(place.rglob("*"))) if file.exists()]
        seen = tuple((file, stat.st_ino, stat.st_size, stat.st_mtime_ns) for file, stat in files)
        return read_once(seen, tuple(options.items()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "load_dataset", load)
        patch.setattr(Figure, "subplots", lambda self, rows, columns, **_: [[MagicMock()] * columns] * rows)
        patch.setattr(Figure, "savefig", lambda self, path, **_: None)
        yield drawing


@pytest.fixture
def pictures(monkeypatch, in_short):
    """Curves are drawn in this test."""
    from matplotlib.figure import Figure

    monkeypatch.setattr(Figure, "subplots", in_short[0]), monkeypatch.setattr(Figure, "savefig", in_short[1])


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
                row["prompt"] = " ".join([*row["prompt"].split()[: 3 + i % 7], ":"])
            (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, data)))
        return str(folder)

    return make


@pytest.fixture(scope="session")
def tiny(part_of, uneven):
    """Settings of a run of three or four steps, for each script."""
    return {
        "ppo": dict(batch_size=8, total_episodes=24, response_length=8, dataset=part_of("prompts", 64)),
        "rloo": dict(batch_size=8, total_episodes=24, response_length=8, dataset=part_of("prompts", 64)),
        "grpo": dict(
            batch_size=8, num_generations=4, total_episodes=24, response_length=8, num_eval_prompts=4,
            dataset=uneven("prompts", 64),
        ),
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
