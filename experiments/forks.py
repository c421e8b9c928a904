"""Programs with a change: the diffs of docs/fork.md, docs/questions.md and docs/agent.md, applied to a script.

    python experiments/forks.py --write "A loss term"                     # as lecture/fork.py, to be read and run
    python experiments/forks.py --write "A loss term" --script ppo.py     # the same change of ppo.py, as fork.py

Each diff stands on its page under a heading, its name. run.py compares those of docs/fork.md on the toy world; here is
what it measures of them: means over the last five updates.
"""

import argparse
import contextlib
import re
import statistics
import sys
import tempfile
import textwrap
from collections.abc import Callable
from unittest import mock

from record import LAST, ROOT, Run, diff_of, read_diffs
from gold_score import gold_text_score

PAGES = ("docs/fork.md", "docs/questions.md", "docs/agent.md")


def script_of(diff: str) -> str:
    """The file that a diff changes: its first line names the file, unless that is lecture/ppo.py."""
    named = re.match(r"--- (\S+)\n", diff)
    return named[1] if named else "lecture/ppo.py"


def apply(diff: str, source: str) -> str:
    """The fork. Each part of the diff is found by its text, which must occur in the source once, at any indentation."""
    source = "\n" + source
    for part in re.split(r"^@@.*\n", diff, flags=re.M)[1:]:
        lines = part.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        new = "".join(line[1:] for line in lines if line[0] in " +")
        places = []
        for indent in ("", " " * 4, " " * 8):
            here = "\n" + textwrap.indent(old, indent)
            places += [(indent, here)] * len(re.findall(f"(?={re.escape(here)})", source))
        if len(places) != 1:
            raise ValueError(f"this occurs {len(places)} times in the file, not once:\n{old}")
        [(indent, here)] = places
        source = source.replace(here, "\n" + textwrap.indent(new, indent))
    return source[1:]


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


def main() -> None:
    """Writes fork.py beside the file that it is a fork of."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", metavar="NAME", required=True, help="the heading of the diff on its page")
    parser.add_argument("--script", help="ppo.py, in place of the short file")
    args = parser.parse_args()
    diffs = {}
    for page in PAGES:
        diffs |= read_diffs((ROOT / page).read_text("utf-8"), args.script or "")
    if args.write not in diffs:
        sys.exit(f"{args.write!r} is none of the forks: {', '.join(diffs)}")
    file = ROOT / (args.script or script_of(diffs[args.write]))
    file.with_name("fork.py").write_text(apply(diffs[args.write], file.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
