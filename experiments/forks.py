"""Forks: changes of recent papers, made to lecture/ppo.py, each beside the default on the toy world over five seeds.

    python experiments/forks.py                          # 20 runs of a minute on one thread; goes on where it stopped
    python experiments/forks.py --write "A loss term"    # writes that fork as lecture/fork.py, to be read and run

The changes are the diffs of docs/fork.md, each under a heading, its name. Those of the section "Changes of three
papers" are compared. A run's result is the mean over its last five updates; the gold score is that of their texts.

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
import time
from pathlib import Path
from unittest import mock

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
from common import LEARNED, ROOT, describe_machine, describe_ours

SCRIPT = ROOT / "lecture/ppo.py"
PAGE = ROOT / "docs/fork.md"
OUTPUT = LEARNED / "forks.json"
SEEDS = (1, 2, 3, 4, 5)
MINUTES = 0.8  # a run
LAST = 5  # updates at the end of a run whose mean is its result
DIGITS = {"score": 2, "gold score": 2, "KL": 1, "EOS share": 2, "entropy": 2}  # of the columns of the table


def read_diffs(page: str) -> dict[str, str]:
    """Heading -> diff, of each subsection that has one."""
    return dict(re.findall(r"^### ([^\n]+)\n(?:(?!#)[^\n]*\n)*?```diff\n(.*?)^```", page, re.M | re.S))


def forks_to_compare() -> dict[str, str]:
    """Name -> diff; the default has none."""
    return {"default": ""} | read_diffs(PAGE.read_text("utf-8").split("## Changes of three papers")[1])


def apply(diff: str, source: str) -> str:
    """The fork. Each part of the diff is found by its text, which must stand in the source once; lines may move."""
    source = "\n" + source
    for part in re.split(r"^@@.*\n", diff, flags=re.M)[1:]:
        lines = part.splitlines()
        old = "".join("\n" + line[1:] for line in lines if line[0] in " -") + "\n"
        new = "".join("\n" + line[1:] for line in lines if line[0] in " +") + "\n"
        count = len(re.findall(f"(?={re.escape(old)})", source))
        if count != 1:
            raise ValueError(f"this stands {count} times in {SCRIPT.name}, not once:{old}")
        source = source.replace(old, new)
    return source[1:]


def run(source: str, seed: int) -> dict[str, float]:
    """The result of one run of the script, whose names are looked into whenever it logs an update."""
    from make import gold_text_score

    names = {"__name__": "__main__", "__file__": str(SCRIPT)}
    updates = []

    def log(stats: dict[str, float], step: int) -> None:
        """Adds an update."""
        real = names["attention_mask"].bool()
        rows = [row[here] for row, here in zip(names["ids"], real)]
        texts = names["tokenizer"].batch_decode(rows, skip_special_tokens=True)
        gold = statistics.fmean(map(gold_text_score, texts))
        entropy = -names["old_logprobs"][names["mask"]].mean().item()
        numbers = stats["objective/scores"], gold, stats["objective/kl"], stats["val/eos_share"], entropy
        updates.append(dict(zip(DIGITS, numbers, strict=True)))

    with tempfile.TemporaryDirectory() as folder:
        argv = [str(SCRIPT), "--seed", str(seed), "--output-dir", folder]
        with mock.patch.multiple("wandb", init=mock.DEFAULT, log=log), mock.patch("sys.argv", argv):
            exec(compile(source, SCRIPT, "exec"), names)
    return {name: round(statistics.fmean(u[name] for u in updates[-LAST:]), 4) for name in DIGITS}


def table(results: dict) -> str:
    """Markdown: mean ± standard deviation over the seeds of each fork."""
    lines = [["", *DIGITS], ["---", *("---:" for _ in DIGITS)]]
    for fork in results["diffs"]:
        runs = [run for run in results["runs"] if run["fork"] == fork]
        line = [fork]
        for name, digits in DIGITS.items():
            values = [run[name] for run in runs]
            line.append(f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}")
        lines.append(line)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    """Runs what is missing; writes the results after each run, and the table at the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", metavar="NAME", help="only write this fork of the page as lecture/fork.py")
    parser.add_argument("--list", action="store_true", help="only say how many runs are missing")
    args = parser.parse_args()
    source = SCRIPT.read_text("utf-8")
    if args.write:
        diffs = read_diffs(PAGE.read_text("utf-8"))
        if args.write not in diffs:
            sys.exit(f"--write {args.write!r} is none of the forks in {PAGE.name}: {', '.join(diffs)}")
        fork = apply(diffs[args.write], source)
        SCRIPT.with_name("fork.py").write_text(fork, "utf-8")
        return
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}  # before torch is imported
    sys.path.append(str(ROOT / "toy"))  # for its make.py
    forks = forks_to_compare()
    results = json.loads(OUTPUT.read_text()) if OUTPUT.exists() else {"diffs": {}, "runs": []}
    runs = [run for run in results["runs"] if results["diffs"][run["fork"]] == forks.get(run["fork"])]
    results = {"command": shlex.join(["python", *sys.argv]), **describe_ours(ROOT), "date": time.strftime("%Y-%m-%d")}
    results |= {"machine": describe_machine(), "seeds": SEEDS, "updates": LAST, "diffs": forks, "runs": runs}
    there = {(run["fork"], run["seed"]) for run in runs}
    wanted = [(fork, seed) for seed in SEEDS for fork in forks if (fork, seed) not in there]
    print(f"{len(wanted)} runs, about {len(wanted) * MINUTES:.0f} minutes")
    if args.list:
        return
    for number, (fork, seed) in enumerate(wanted, 1):
        print(f"run {number} of {len(wanted)}: {fork}, seed {seed}", flush=True)
        start = time.process_time()
        result = run(apply(forks[fork], source), seed)
        runs.append({"fork": fork, "seed": seed, **result, "cpu_seconds": round(time.process_time() - start)})
        OUTPUT.write_text(json.dumps(results, indent=1) + "\n")
    before, _, rest = PAGE.read_text("utf-8").partition("<!-- forks -->\n")
    after = rest[rest.index("<!-- /forks -->") :]
    PAGE.write_text(f"{before}<!-- forks -->\n{table(results)}\n{after}", "utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
