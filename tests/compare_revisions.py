"""Has a refactoring changed what the scripts compute? The default runs of a revision beside those of this tree.

    python tests/compare_revisions.py HEAD                                     # all scripts, seeds 1 to 3
    python tests/compare_revisions.py HEAD~5 --scripts ppo --seeds 1 --flags="--total-episodes 256"

Each script is run with each seed, once as it was at the revision and once as it is now. Then metrics.jsonl is compared
line by line, leaving out what depends on the clock and on memory, and so are the weights that were saved. Printed are
the largest difference of each metric, relative to the largest value of that metric in the run, and the largest
difference of any weight. A metric that only one side has is listed; it does not count as a difference. The exit code is
1 when a difference exceeds the tolerance.

On one machine, a change that leaves every operation as it was gives a difference of exactly 0. Doing the same sums in
another order rounds the last digit of float32 differently (1e-7), and training amplifies that: two updates of ppo.py
with one thread instead of two gave differences up to 3e-6 in metrics and 3e-5 in weights, and 79 steps of sft.py 6e-6
and 7e-5. The default tolerance, 1e-4, leaves room for this and for little more: ppo.py with --lam 0.9499 instead of
0.95 gave 9e-2 and 1e-3. Two things exceed it without being wrong. A metric that counts tokens, such as val/clipfrac_avg,
moves by whole tokens; and in a long run of ppo.py or rloo.py, one token sampled differently changes all that follows.
Compare a run of a few updates to see whether it is that.

The number of threads also changes the order of sums. Both sides therefore use --threads, and the runs of the revision
are kept in --cache under their revision, script, seed, flags and threads. Give each kind of machine a cache of its own.
"""

import argparse
import hashlib
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ["ppo", "rloo", "grpo", "dpo", "sft", "reward_model", "ddpo"]
NOT_COMPARED = ("time/", "perf/", "eps")  # beginnings of the names of metrics that no two runs share


def checkout(revision: str, folder: Path) -> None:
    """Writes the files of a revision into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)


def copy_of_this_tree(folder: Path) -> None:
    """Writes the scripts and what they read as they are now into the folder, so that editing may go on meanwhile."""
    for name in ("toy", "rewards"):
        shutil.copytree(ROOT / name, folder / name)
    for script in SCRIPTS:
        shutil.copy(ROOT / f"{script}.py", folder)


def run(tree: Path, script: str, seed: int, output: Path, args: argparse.Namespace) -> Path:
    """Makes one run, unless its output is there already; returns the folder of its metrics and weights."""
    if output.exists():
        return output
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix="unfinished-") as unfinished:
        folder = Path(unfinished, "run")
        command = [sys.executable, f"{script}.py", "--seed", str(seed), "--output-dir", str(folder)]
        command += shlex.split(args.flags)
        done = subprocess.run(
            command,
            cwd=tree,
            text=True,
            check=False,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": str(args.threads), "HF_HUB_OFFLINE": "1"},
        )
        if done.returncode:
            sys.exit(f"{shlex.join(command)} failed in {tree}; it said last:\n{done.stdout[-2000:]}")
        for name in ("checkpoints", "samples"):  # which are not the result
            shutil.rmtree(folder / name, ignore_errors=True)
        if not output.exists():  # it may have been made meanwhile, by another comparison with the same cache
            folder.rename(output)
    return output


def distance(a: object, b: object) -> float:
    """|a - b| of two values of a metric: 0 if both are the same, infinite if they cannot be compared."""
    if str(a) == str(b):
        return 0.0
    numbers = all(isinstance(x, (int, float)) and math.isfinite(x) for x in (a, b))
    return abs(a - b) if numbers else math.inf


def compare_metrics(old: Path, new: Path) -> tuple[dict[str, float], set[str], set[str]]:
    """Of two runs: the relative difference of each metric that both have, then the names that only one side has."""
    read = partial(json.loads, parse_constant=lambda _: None)  # NaN, which older revisions wrote as it is
    old, new = ([read(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (old, new))
    names_old, names_new = (
        {name for line in lines for name in line if not name.startswith(NOT_COMPARED)} for lines in (old, new)
    )
    differences = {"number of lines": float(abs(len(old) - len(new)))}
    for name in sorted(names_old & names_new):
        pairs = [(a.get(name), b.get(name)) for a, b in zip(old, new)]
        scale = max((abs(x) for pair in pairs for x in pair if distance(x, 0) < math.inf), default=0) or 1
        differences[name] = max(distance(a, b) for a, b in pairs) / scale
    return differences, names_old - names_new, names_new - names_old


def compare_weights(old: Path, new: Path) -> dict[str, float]:
    """The largest difference in each file of weights that either run saved; infinite if the tensors are others."""
    differences = {}
    for file in sorted({path.relative_to(run) for run in (old, new) for path in run.rglob("*.safetensors")}):
        both = (old / file).exists() and (new / file).exists()
        a, b = (load_file(run / file) if both else {} for run in (old, new))
        same = both and {k: x.shape for k, x in a.items()} == {k: x.shape for k, x in b.items()}
        pairs = [(a[name].float(), b[name].float()) for name in a] if same else []
        each = [0.0 if x.equal(y) else (x - y).abs().nan_to_num(math.inf).max().item() for x, y in pairs]
        differences[f"weights in {file}"] = max(each, default=math.inf)
    return differences


def show(run: str, differences: dict[str, float], tolerance: float) -> bool:
    """Prints each thing that differs; returns whether all is within the tolerance."""
    unequal = {name: x for name, x in differences.items() if x}
    print(f"{run}: {len(differences) - len(unequal)} of {len(differences)} are equal")
    for name, x in sorted(unequal.items(), key=lambda item: -item[1]):
        print(f"    {x:.1e} {'!' if x > tolerance else ' '} {name}")
    return all(x <= tolerance for x in unequal.values())


def main() -> int:
    """Makes the runs, script by script, and compares them. Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("revision", help="any name that git knows: HEAD, main, a hash")
    add("--scripts", default=",".join(SCRIPTS), help=f"of {','.join(SCRIPTS)}")
    add("--seeds", default="1,2,3", help="with commas between them")
    add("--flags", default="", help='further flags for both sides, such as --flags="--bf16"')
    add("--tolerance", type=float, default=1e-4, help="largest difference that passes (see the text at the top)")
    add("--threads", type=int, default=2, help="of torch, on both sides")
    add("--cache", type=Path, default=ROOT / "runs/compare", help="folder in which the runs of the revision are kept")
    args = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--verify", "--short=12", f"{args.revision}^{{commit}}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if commit.returncode:
        parser.error(f"git knows no revision {args.revision}")
    cache, good = args.cache.resolve() / commit.stdout.strip(), True
    with tempfile.TemporaryDirectory(prefix="compare-") as temporary:
        old_tree, new_tree = Path(temporary, "old"), Path(temporary, "new")
        checkout(args.revision, old_tree), copy_of_this_tree(new_tree)
        for script in args.scripts.split(","):
            for seed in map(int, args.seeds.split(",")):
                kind = hashlib.sha256(f"{args.flags} {args.threads}".encode()).hexdigest()[:8]
                old = run(old_tree, script, seed, cache / f"{script}-{seed}-{kind}", args)
                new = run(new_tree, script, seed, Path(temporary, f"{script}-{seed}"), args)
                differences, only_old, only_new = compare_metrics(old, new)
                good &= show(f"{script} {seed}", differences | compare_weights(old, new), args.tolerance)
                for side, names in ((args.revision, only_old), ("this tree", only_new)):
                    if names:
                        print(f"    only in {side}: {', '.join(sorted(names))}")
    print("equal within the tolerance" if good else f"DIFFERENT: more than {args.tolerance:g}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
