"""Makes the runs behind the figures of the pages that are not on record yet.

    python experiments/run.py --list                               # the groups of runs.toml, and what is missing
    python experiments/run.py questions --list                     # the runs of a group
    python experiments/run.py learning --only "ppo*" "TRL ppo"     # some of them, by name; * stands for any letters
    python experiments/run.py takeoff --seeds 1 2 3 --jobs 2       # two at once, on one thread each

Each run is a line in results/GROUP.jsonl, which is added as it ends: command, seed, revision, date, machine, CPU
seconds, and what was measured. A run on record is not made again, unless its command or diff has changed; to repeat it,
delete its line. Files outside of results/ must be committed, so that the revision says what was run.
"""

import argparse
import fnmatch
import importlib
import json
import multiprocessing
import os
import resource
import shlex
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

from record import LEARNED, ROOT, Run, read_record, read_toml, runs_of_group
from common import describe_machine, describe_ours

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
}


def missing_of(runs: list[Run]) -> list[Run]:
    """Those that are not on record with the same command. (Older lines do not have its digest.)"""
    record = {(line["run"], line["seed"]): line for line in read_record(runs[0].group)} if runs else {}
    lines = [record.get((run.name, run.seed), {"digest": "none"}) for run in runs]
    return [run for run, line in zip(runs, lines) if line.get("digest", run.digest) != run.digest]


def make_needs(group: str, runs: list[Run]) -> None:
    """Makes the data and the models that the runs name, and what these are made of, unless they are there."""
    needs = read_toml()[group].get("needs", {})
    texts = [str([run.command, run.options]) for run in runs]
    wanted = set()
    for file, command in reversed(needs.items()):
        if any(str(Path(file).parent) in text for text in texts):
            wanted.add(file)
            texts.append(command)
    for file, command in needs.items():
        if file in wanted and not (ROOT / file).exists():
            print(f"$ {command}", flush=True)
            subprocess.run([sys.executable, *shlex.split(command)], cwd=ROOT, check=True)


def cpu_seconds() -> float:
    """Of this process and of those that it started and that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(x.ru_utime + x.ru_stime for x in used)


def make(run: Run) -> dict:
    """A run: its line. Its group, or it, names the file whose `measure` trains it and returns what is kept."""
    os.chdir(ROOT)
    program = importlib.import_module(run.options["by"])
    start = cpu_seconds()
    found = program.measure(run)
    line = {"run": run.name, "seed": run.seed, "command": shlex.join(["python", *run.command, "--seed", str(run.seed)])}
    line |= {"digest": run.digest, **describe_ours(ROOT), "date": time.strftime("%Y-%m-%d")}
    return line | {"machine": describe_machine(), "cpu_seconds": round(cpu_seconds() - start, 1)} | found


def make_all(runs: list[Run], jobs: int) -> list[str]:
    """Makes the runs, several at a time; returns what failed."""
    failures, begin = [], time.time()
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(make, run): run for run in runs}
        for number, future in enumerate(as_completed(futures), 1):
            run = futures[future]
            try:
                with open(LEARNED / f"{run.group}.jsonl", "a", encoding="utf-8") as file:
                    print(json.dumps(future.result(), separators=(",", ":")), file=file)
            except (Exception, SystemExit) as problem:  # the other runs go on
                failures.append(f"{run.group}: {run.name}, seed {run.seed}: {problem!r}")
            minutes = (time.time() - begin) / 60
            print(f"[{minutes:.0f} min] {number} of {len(runs)}: {run.name}, seed {run.seed}", flush=True)
    return failures


def main() -> None:
    """Plans, and runs what is missing."""
    groups = list(read_toml())
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("group", nargs="*", help=f"of {', '.join(groups)}; by default all")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="names of runs, * for any letters")
    parser.add_argument("--seeds", nargs="+", type=int, help="of those in runs.toml, these")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, on one thread each")
    parser.add_argument("--list", action="store_true", help="only say which runs there are, and which are missing")
    args = parser.parse_args()
    if unknown := set(args.group) - set(groups):
        parser.error(f"there is no group {', '.join(unknown)}")
    found, wanted = [], []
    for group in args.group or groups:
        runs = [run for run in runs_of_group(group) if args.seeds is None or run.seed in args.seeds]
        runs = [run for run in runs if any(fnmatch.fnmatchcase(run.name, pattern) for pattern in args.only)]
        missing = missing_of(runs)
        found += runs
        wanted += missing
        print(f"{group}: {len(runs)} runs, {len(missing)} missing")
        for name in dict.fromkeys(run.name for run in runs) if args.list and args.group else []:
            seeds = [run.seed for run in missing if run.name == name]
            print(f"    {name}{f': seeds {seeds} missing' if seeds else ''}")
    if not found:
        parser.error("no run has such a name and seed: see --list")
    if args.list or not wanted:
        return
    if describe_ours(ROOT)["commit"].endswith("-dirty"):
        sys.exit("commit your changes first: a run on record names the revision that made it")
    os.environ |= ENVIRONMENT
    for group in dict.fromkeys(run.group for run in wanted):
        make_needs(group, [run for run in wanted if run.group == group])
    failures = make_all(wanted, args.jobs)
    if failures:
        sys.exit("\n".join(["failed:", *failures]))


if __name__ == "__main__":
    main()
