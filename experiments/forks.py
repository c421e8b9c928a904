"""Forks: changes of recent papers, made to lecture/ppo.py, each beside the default on the toy world over five seeds.

    python experiments/forks.py                          # 20 runs of a minute on one thread; goes on where it stopped
    python experiments/forks.py --write "A loss term"    # writes that fork as lecture/fork.py, to be read and run
    python experiments/forks.py --write "A loss term" --script ppo.py    # the same of ppo.py, as fork.py

The changes are the diffs of docs/fork.md, each under a heading, its name. Those of the section "Changes of three
papers" are compared. A run's result is the mean over its last five updates; the gold score is that of their texts.
`--write` also accepts those of docs/questions.md, which questions.py compares.

What comes out: results/forks.json, to which each run is added as it ends, and the table in docs/fork.md. A fork whose
diff has changed is run again.
"""

import argparse
import json
import os
import re
import shlex
import statistics
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
from common import LEARNED, ROOT, describe_machine, describe_ours

SCRIPT = "lecture/ppo.py"
PAGE = ROOT / "docs/fork.md"
QUESTIONS = ROOT / "docs/questions.md"
OUTPUT = LEARNED / "forks.json"
SEEDS = (1, 2, 3, 4, 5)
MINUTES = 0.8  # a run
LAST = 5  # updates at the end of a run whose mean is its result
DIGITS = {"score": 2, "gold score": 2, "KL": 1, "EOS share": 2, "entropy": 2}  # of the columns of the table


def read_diffs(page: str, script: str = "") -> dict[str, str]:
    """Heading -> diff, of each subsection that has one: the diff that names the script in its first line, or else the
    first."""
    diffs = {}
    for heading, text in re.findall(r"^### ([^\n]+)\n((?:(?!#)[^\n]*\n)*)", page, re.M):
        blocks = re.findall(r"^```diff\n(.*?)^```", text, re.M | re.S)
        own = [block for block in blocks if block.startswith(f"--- {script}\n")]
        if blocks:
            diffs[heading] = (own or blocks)[0]
    return diffs


def script_of(diff: str) -> str:
    """The file that a diff changes: its first line names the file, unless that is lecture/ppo.py."""
    named = re.match(r"--- (\S+)\n", diff)
    return named[1] if named else SCRIPT


def forks_to_compare() -> dict[str, str]:
    """Name -> diff; the default has none."""
    return {"default": ""} | read_diffs(PAGE.read_text("utf-8").split("## Changes of three papers")[1])


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


def run(script: str, source: str, flags: list[str], look: Callable[[dict, dict], dict]) -> tuple[list[dict], dict]:
    """What `look` finds whenever the program logs an update, and the program's names after its end.

    `look` is given its names and metrics. `script` is the file that the source is a fork of.
    """
    names = {"__name__": "__main__", "__file__": str(ROOT / script)}
    updates = []

    def log(stats: dict[str, float], step: int) -> None:
        """Adds an update."""
        updates.append(look(names, stats))

    with tempfile.TemporaryDirectory() as folder:
        argv = [script, "--output-dir", f"{folder}/model", *flags]
        with mock.patch.multiple("wandb", init=mock.DEFAULT, log=log), mock.patch("sys.argv", argv):
            exec(compile(source, script, "exec"), names)
    return updates, names


def complete(
    output: Path, diffs: dict[str, str], wanted: list[dict], measure: Callable[..., dict], minutes: float, is_list: bool
) -> dict:
    """The results, with those runs that were wanted and not on file; each is added to the file as it ends.

    A run is named by a dict: its fork, one of the names in `diffs`, its seed, and what else `measure` is to be told.
    Runs that nobody wants any more, or whose diff has changed, are dropped.
    """
    old = json.loads(output.read_text()) if output.exists() else {"diffs": {}, "runs": []}
    fresh = [run for run in old["runs"] if old["diffs"][run["fork"]] == diffs.get(run["fork"])]
    runs = [run for run in fresh if any(key.items() <= run.items() for key in wanted)]
    missing = [key for key in wanted if not any(key.items() <= run.items() for run in runs)]
    print(f"{len(missing)} runs, about {len(missing) * minutes:.0f} minutes")
    if is_list:
        sys.exit()
    results = {"command": shlex.join(["python", *sys.argv]), **describe_ours(ROOT), "date": time.strftime("%Y-%m-%d")}
    results |= {"machine": describe_machine(), "seeds": sorted({key["seed"] for key in wanted})}
    results |= {"diffs": diffs, "runs": runs}
    for number, key in enumerate(missing, 1):
        print(f"run {number} of {len(missing)}: {' '.join(map(str, key.values()))}", flush=True)
        start = time.process_time()
        result = measure(**key)
        runs.append(key | {"cpu_seconds": round(time.process_time() - start)} | result)
        output.write_text(json.dumps(results) + "\n")
    return results


def put_tables(page: Path, tables: dict[str, str]) -> None:
    """Writes each table between its marks in the page, <!-- name --> and <!-- /name -->."""
    text = page.read_text("utf-8")
    for name, table in tables.items():
        before, _, rest = text.partition(f"<!-- {name} -->\n")
        text = f"{before}<!-- {name} -->\n{table}\n{rest[rest.index(f'<!-- /{name} -->') :]}"
    page.write_text(text, "utf-8")


def look(names: dict, stats: dict[str, float]) -> dict[str, float]:
    """The columns of the table, of one update of lecture/ppo.py."""
    from make import gold_text_score

    real = names["attention_mask"].bool()
    rows = [row[here] for row, here in zip(names["ids"], real)]
    texts = names["tokenizer"].batch_decode(rows, skip_special_tokens=True)
    gold = statistics.fmean(map(gold_text_score, texts))
    entropy = -names["old_logprobs"][names["mask"]].mean().item()
    numbers = stats["objective/scores"], gold, stats["objective/kl"], stats["val/eos_share"], entropy
    return dict(zip(DIGITS, numbers, strict=True))


def table(results: dict) -> str:
    """Markdown: mean ± standard deviation over the seeds of each fork, and how far it is from the default."""
    from tables import verdict

    lines = [["", *DIGITS, "gold score, less the default's"], ["---", *("---:" for _ in DIGITS), "---"]]
    golds = {}
    for fork in results["diffs"]:
        runs = sorted((run for run in results["runs"] if run["fork"] == fork), key=lambda run: run["seed"])
        golds[fork] = {run["seed"]: run["gold score"] for run in runs}
        line = [fork]
        for name, digits in DIGITS.items():
            values = [run[name] for run in runs]
            line.append(f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}")
        lines.append([*line, verdict(golds[fork], golds["default"], 2) if fork != "default" else ""])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(name: str, script: str | None) -> None:
    """Writes fork.py beside the file that it is a fork of."""
    pages = PAGE.read_text("utf-8"), QUESTIONS.read_text("utf-8")
    diffs = read_diffs(pages[0], script or "") | read_diffs(pages[1])
    if name not in diffs:
        sys.exit(f"--write {name!r} is none of the forks: {', '.join(diffs)}")
    file = ROOT / (script or script_of(diffs[name]))
    file.with_name("fork.py").write_text(apply(diffs[name], file.read_text("utf-8")), "utf-8")


def main() -> None:
    """Runs what is missing; writes the results after each run, and the table at the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", metavar="NAME", help="only write this fork of a page as fork.py, beside its file")
    parser.add_argument("--script", help="with --write: ppo.py, in place of the short file")
    parser.add_argument("--list", action="store_true", help="only say how many runs are missing")
    args = parser.parse_args()
    if args.write:
        write(args.write, args.script)
        return
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}  # before torch is imported
    sys.path.append(str(ROOT / "toy"))  # for its make.py
    source = (ROOT / SCRIPT).read_text("utf-8")
    forks = forks_to_compare()

    def measure(fork: str, seed: int) -> dict[str, float]:
        """The result of a run."""
        updates, _ = run(SCRIPT, apply(forks[fork], source), ["--seed", str(seed)], look)
        return {name: round(statistics.fmean(u[name] for u in updates[-LAST:]), 4) for name in DIGITS}

    wanted = [{"fork": fork, "seed": seed} for seed in SEEDS for fork in forks]
    results = complete(OUTPUT, forks, wanted, measure, MINUTES, args.list)
    put_tables(PAGE, {"forks": table(results)})
    print(table(results))


if __name__ == "__main__":
    main()
