"""Runs programs with a change: the diffs of docs/fork.md, docs/diffs/questions.md and docs/agent.md.

For those of docs/fork.md, `measure` gives means over the last five updates on the toy world.
"""

import contextlib
import statistics
import tempfile
from collections.abc import Callable
from unittest import mock

from record import LAST, ROOT, Run, diff_of
from make_fork import apply
from gold_score import gold_text_score


def source_of(run: Run) -> str:
    """The text of the program that is run: its script with the diff of its page, or with one text replaced."""
    source = apply(diff_of(run), (ROOT / run.command[0]).read_text("utf-8"))
    if "replace" in run.options:
        old, new = run.options["replace"]
        if old not in source:
            raise ValueError(f"{old!r} is not in {run.command[0]}")
        source = source.replace(old, new)
    return source


def execute(script: str, source: str, flags: list[str], look: Callable[[dict, dict], dict]) -> tuple[list[dict], dict]:
    """Runs a program in this process. Returns what `look` finds whenever it logs an update, and the program's names.

    `look` is given its names and metrics. `script` is the file that the source is a fork of.
    """
    names = {"__name__": "__main__", "__file__": str(ROOT / script)}
    updates = []

    def log(stats: dict[str, float], step: int) -> None:
        """Adds an update."""
        updates.append(look(names, stats))

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
        argv = [script, "--output-dir", f"{folder}/model", *flags]
        with mock.patch.multiple("wandb", init=mock.DEFAULT, log=log), mock.patch("sys.argv", argv):
            exec(compile(source, script, "exec"), names)
    return updates, names


def train(run: Run, look: Callable[[dict, dict], dict]) -> tuple[list[dict], dict]:
    """The same for a run of runs.toml."""
    return execute(run.command[0], source_of(run), [*run.command[1:], "--seed", str(run.seed)], look)


def look(names: dict, stats: dict[str, float]) -> dict[str, float]:
    """What is measured of an update of lecture/ppo.py."""
    real = names["attention_mask"].bool()
    texts = names["tokenizer"].batch_decode(
        [row[here] for row, here in zip(names["ids"], real)], skip_special_tokens=True
    )
    return {
        "score": stats["objective/scores"],
        "gold score": statistics.fmean(map(gold_text_score, texts)),
        "KL": stats["objective/kl"],
        "EOS share": stats["val/eos_share"],
        "entropy": -names["old_logprobs"][names["mask"]].mean().item(),
    }


def measure(run: Run) -> dict:
    """The end of a run."""
    updates, _ = train(run, look)
    return {"end": {name: round(statistics.fmean(u[name] for u in updates[-LAST:]), 4) for name in updates[0]}}
