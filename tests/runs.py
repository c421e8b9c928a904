"""Runs of the scripts, in this process or in one of their own, and what they leave."""

import importlib
import json
import multiprocessing
import os
import runpy
import shutil
import sys
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sources import ROOT, SCRIPTS, load
from torch import nn

GOLD = "toy/gold_score.py:gold_score"
NAMES = [script.removesuffix(".py") for script in SCRIPTS]
ON_PROMPTS = ["ppo", "rloo", "grpo", "agent"]  # these draw responses to prompts


def slow_but(quick, cases):
    """The cases, of which all but the quick ones are marked as slow."""
    values = lambda case: case if isinstance(case, tuple) else [case]  # noqa: E731
    return [case if case in quick else pytest.param(*values(case), marks=pytest.mark.slow) for case in cases]


def script(name):
    """The module of a script, imported by the tests that need it."""
    return importlib.import_module(name)


def run(module, output, **settings):
    """Trains in this process; returns the lines of metrics.jsonl. An empty folder makes way for that of the run."""
    module = script(module) if isinstance(module, str) else module
    with suppress(OSError):
        Path(output).rmdir()
    quiet = {"num_sample_generations": 0, "num_eval_prompts": 0}
    settings = {name: x for name, x in quiet.items() if hasattr(module.Args, name)} | settings
    assert not settings.keys() - vars(module.Args()).keys()  # which pydantic would ignore
    module.train(module.Args(**{"device": "cpu", "output_dir": str(output)} | settings))
    return lines_of(output)


def main(module, *words):
    """Runs a script with these words on its command line, in this process."""
    module = script(module) if isinstance(module, str) else module
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [f"{module.__name__}.py", *map(str, words)])
        module.train(module.read_command_line())


def execute(name, *words):
    """The same, as a program."""
    sys.argv = [f"{name}.py", *map(str, words)]
    runpy.run_path(str(ROOT / f"{name}.py"), run_name="__main__")


def write_rows(file, rows):
    """A jsonl file of these rows; its name."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def watch(monkeypatch, owner, name, note):
    """From here on note(result, *arguments) is told of each call of a function."""
    function = getattr(owner, name)

    @wraps(function)
    def watched(*args, **kwargs):
        result = function(*args, **kwargs)
        note(result, *args, **kwargs)
        return result

    monkeypatch.setattr(owner, name, watched)


@contextmanager
def tokens_read():
    """The rows of token ids that models are given within this context, padding included."""
    rows = []

    def note(module, inputs):
        if isinstance(module, nn.Embedding):
            rows.extend(inputs[0].tolist())

    hook = nn.modules.module.register_module_forward_pre_hook(note)
    yield rows
    hook.remove()


def is_in(ids, rows):
    """Whether one of the rows has these token ids, one after the other."""
    text = f" {' '.join(map(str, ids))} "
    return any(text in f" {' '.join(map(str, row))} " for row in rows)


@contextmanager
def short_form(name, **settings):
    """What a file of lecture/ finds when it is run with these settings: its names to begin with; no GPU, no W&B."""
    file = f"lecture/{name}.py"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [file, *words_of(**settings)])
        patch.setattr("torch.cuda.is_available", lambda: False)
        patch.setattr("wandb.init", lambda **_: None)  # it would remember for good that it is disabled
        patch.setattr("wandb.log", lambda *_, **__: None)
        yield {"__file__": str(ROOT / file), "__name__": "__main__"}


def words_of(**settings):
    """The command line of some settings."""
    words = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{flag}")
        else:
            words += [f"--{flag}", *map(str, value if isinstance(value, tuple) else [value])]
    return words


def fork(said, function, *args):
    """Starts a function in a process of its own, forked from one that has imported all that it needs. What it prints
    goes to the file `said`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["ppo", "datasets"])
    process = context.Process(target=call, args=(said, function, *args))
    process.start()
    return process


def call(said, function, *args):
    with open(said, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    function(*args)


def lines_of(output):
    return [json.loads(line) for line in Path(output, "metrics.jsonl").read_text().splitlines()]


def untimed(lines):
    """Metrics without those that depend on the clock, or on the device: elsewhere responses are read again."""
    others = ("perf/", "eps", "sampling/")
    return [{name: x for name, x in line.items() if not name.startswith(others)} for line in lines]


def weights_of(folder):
    """All that was saved after training: a model or its adapter, or the UNet of a pipeline."""
    files = [*folder.glob("*model.safetensors"), *folder.glob("*/*model.safetensors")]
    assert files
    return {f"{file.relative_to(folder)}: {name}": x for file in files for name, x in load_file(file).items()}


def merged(folder):
    """The complete model of a run with an adapter, by tools/merge.py."""
    return load("tools/merge.py", "tools_merge").merge(folder)


def without_key_bias(name, x):
    """Attention does not change with the bias of the keys, so its gradient is rounding, which Adam makes into steps."""
    return x if not name.endswith("c_attn.bias") else torch.cat([x[: len(x) // 3], x[2 * len(x) // 3 :]])


def assert_same_run(folder, other):
    """Metrics and weights of two runs are the same, bit for bit."""
    assert untimed(lines_of(folder)) == untimed(lines_of(other))
    a, b = weights_of(folder), weights_of(other)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def assert_close_runs(folder, other, rel=1e-3, abs=1e-5, weights=2e-6, edge=0.0):
    """Metrics and weights of two runs are the same but for rounding. A ratio or value at the edge of its range may be
    clipped in one run and not in the other; `edge` is the share of such tokens."""
    pairs = list(zip(untimed(lines_of(folder)), untimed(lines_of(other)), strict=True))
    for a, b in pairs:
        assert a.keys() == b.keys()
        margin = {name: abs + edge * name.endswith("/clipfrac_avg") for name in a}
        wrong = {name: (x, b[name]) for name, x in a.items() if x != pytest.approx(b[name], rel=rel, abs=margin[name])}
        assert not wrong
    a, b = weights_of(folder), weights_of(other)
    assert a.keys() == b.keys()
    is_of_rewards = any("score" in name for name in a)  # whose differences no last bias changes: it is rounding, too
    for name in a:
        if is_of_rewards and name.endswith("ln_f.bias"):
            continue
        x, y = without_key_bias(name, a[name]), without_key_bias(name, b[name])
        torch.testing.assert_close(x, y, rtol=0, atol=weights, msg=name)


def checkpoints(folder):
    """The steps after which there are checkpoints."""
    return sorted(int(file.stem.removeprefix("step-")) for file in folder.glob("checkpoints/step-*.pt"))


def cut(folder, copy, step):
    """A copy of a run with no checkpoint after this step."""
    shutil.copytree(folder, copy)
    for later in checkpoints(copy):
        if later > step:
            (copy / f"checkpoints/step-{later:08d}.pt").unlink()
    return copy
