"""Runs of the scripts, in this process or in one of their own, and what they leave."""

import importlib
import json
import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType

import pytest
from sources import ROOT, SCRIPTS

GOLD = "toy/gold_score.py:gold_score"


def run(module: ModuleType, output: Path | str, **settings) -> list[dict]:
    """Trains in this process; returns the lines of metrics.jsonl. An empty folder makes way for that of the run."""
    with suppress(OSError):
        Path(output).rmdir()
    if hasattr(module.Args, "num_sample_generations"):
        settings = {"num_sample_generations": 0} | settings
    settings = {"device": "cpu"} | settings
    module.train(module.Args(output_dir=str(output), **settings))
    return lines_of(output)


def main(module: ModuleType, *words: object) -> None:
    """Runs a script with these words on its command line, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, words)])
        module.main()


def write_rows(file: Path, rows: list[dict]) -> str:
    """A jsonl file of these rows; its name."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def watch(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, note: Callable) -> None:
    """From here on note(result, *arguments) is told of each call of a function."""
    function = getattr(owner, name)

    @wraps(function)
    def watched(*args, **kwargs):
        result = function(*args, **kwargs)
        note(result, *args, **kwargs)
        return result

    monkeypatch.setattr(owner, name, watched)


@contextmanager
def short_form(script: str, **settings) -> Iterator[dict]:
    """What a file of lecture/ finds when it is run with these settings: its names to begin with; no GPU, no W&B."""
    file = f"lecture/{script}.py"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [file, *words_of(**settings)])
        patch.setattr("torch.cuda.is_available", lambda: False)
        patch.setattr("wandb.init", lambda **_: None)  # it would remember for good that it is disabled
        patch.setattr("wandb.log", lambda *_, **__: None)
        yield {"__file__": str(ROOT / file), "__name__": "__main__"}


def words_of(**settings) -> list[str]:
    words = []
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{name.replace('_', '-')}")
        elif isinstance(value, tuple):
            words += [flag, *map(str, value)]
        else:
            words += [flag, str(value)]
    return words


def in_background(script: str, *words: object) -> BaseProcess:
    """Starts a run in a process of its own, forked from one that has imported all that it needs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([name.removesuffix(".py") for name in SCRIPTS])
    process = context.Process(target=quiet_main, args=(script, *map(str, words)))
    process.start()
    return process


def quiet_main(script: str, *words: str) -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    module = importlib.import_module(script)
    module.draw_curves = lambda *_: None  # as in conftest.py
    main(module, *words)


def lines_of(output: Path | str) -> list[dict]:
    text = Path(output, "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def untimed(lines: list[dict]) -> list[dict]:
    """Metrics without those that depend on the clock."""
    clocks = ("time/", "perf/", "eps")
    return [{name: x for name, x in line.items() if not name.startswith(clocks)} for line in lines]


def checkpoints(folder: Path) -> list[int]:
    """The steps after which there are checkpoints."""
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("checkpoints/step-*"))


def cut(folder: Path, copy: Path, step: int) -> Path:
    """A copy of a run with no checkpoint after this step."""
    shutil.copytree(folder, copy)
    for later in checkpoints(copy):
        if later > step:
            shutil.rmtree(copy / f"checkpoints/step-{later:08d}")
    return copy
