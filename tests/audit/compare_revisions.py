"""Has a refactoring changed what the scripts compute? The default runs of a revision beside those of this tree.

    python tests/audit/compare_revisions.py HEAD                                     # all scripts, seeds 1 to 3
    python tests/audit/compare_revisions.py HEAD~5 --scripts ppo --seeds 1 --flags="--total-episodes 256"

Each script is run with each seed, once as it was at the revision and once as it is now. Printed are the largest
difference of each metric (but for those of the clock and of memory), relative to the largest value of that metric in
the run, and the largest difference of any weight. A metric that only one side has is listed; it does not count as a
difference. The exit code is 1 when a difference exceeds the tolerance.

On one machine, a change that leaves every operation as it was gives a difference of exactly 0. Doing the same sums in
another order rounds the last digit of float32 differently (1e-7), and training amplifies that: two updates of ppo.py
with one thread instead of two gave differences up to 3e-6 in metrics and 3e-5 in weights. The default tolerance, 1e-4,
leaves room for this and for little more. Two things exceed it without being wrong. A metric that counts tokens, such as
val/clipfrac_avg, moves by whole tokens; and in a long run of ppo.py or rloo.py, one token sampled differently changes
all that follows. Compare a run of a few updates to see whether it is that.
"""

import argparse
import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas
from safetensors.torch import load_file

sys.path.append(str(Path(__file__).resolve().parent.parent))
from sources import ROOT, SCRIPTS


def checkout(revision: str, folder: Path) -> None:
    """Writes the files of a revision into a new folder."""
    folder.mkdir()
    subprocess.run(["git", "archive", "--output", folder / "all.tar", revision], cwd=ROOT, check=True)
    shutil.unpack_archive(folder / "all.tar", folder)


def copy_of_this_tree(folder: Path) -> None:
    """Writes the scripts and what they read as they are now into the folder, so that editing may go on meanwhile."""
    for name in ("toy", "rewards"):
        shutil.copytree(ROOT / name, folder / name)
    for script in SCRIPTS:
        shutil.copy(ROOT / script, folder)


def run(tree: Path, script: str, seed: str, flags: str) -> Path:
    output = tree / f"{script}-{seed}"
    command = [sys.executable, f"{script}.py", "--seed", seed, "--output-dir", str(output), *shlex.split(flags)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{shlex.join(command)} failed in {tree}; it said last:\n{done.stderr[-2000:]}")
    return output


def metrics_of(folder: Path) -> pandas.DataFrame:
    """Without those that no two runs share. What is no number, or not logged in this step, is infinite."""
    lines = pandas.read_json(folder / "metrics.jsonl", lines=True)
    return lines.filter(regex="^(?!time/|perf/|eps)").astype(float).fillna(math.inf)


def compare_metrics(old: pandas.DataFrame, new: pandas.DataFrame) -> dict[str, float]:
    """The relative difference of each metric that both have."""
    names = old.columns.intersection(new.columns)
    old, new = old[names], new[names]
    scale = pandas.concat([old, new]).replace(math.inf, math.nan).abs().max()
    difference = (old - new).abs().max() / scale
    return {"number of lines": abs(len(old) - len(new))} | difference.fillna(0.0).to_dict()


def compare_weights(old: Path, new: Path) -> dict[str, float]:
    """The largest difference in each file of weights that was saved in the end."""
    differences = {}
    for path in sorted(old.rglob("*.safetensors")):
        file = path.relative_to(old)
        if file.parts[0] in ("checkpoints", "samples"):
            continue
        a, b = load_file(path), load_file(new / file)
        differences[str(file)] = math.inf
        if a.keys() == b.keys():
            differences[str(file)] = max((a[name].float() - b[name].float()).abs().max().item() for name in a)
    return differences


def show(differences: dict[str, float], tolerance: float) -> bool:
    """Prints each thing that differs; returns whether all is within the tolerance."""
    unequal = {name: x for name, x in differences.items() if x}
    print(f"{len(differences) - len(unequal)} of {len(differences)} are equal")
    for name, x in sorted(unequal.items(), key=lambda item: -item[1]):
        print(f"    {x:.1e} {' ' if x <= tolerance else '!'} {name}")
    return all(x <= tolerance for x in unequal.values())


def main() -> int:
    """Makes the runs, script by script, and compares them. Returns the exit code."""
    names = ",".join(script.removesuffix(".py") for script in SCRIPTS)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("revision", help="any name that git knows: HEAD, main, a hash")
    add("--scripts", default=names, help=f"of {names}")
    add("--seeds", default="1,2,3", help="with commas between them")
    add("--flags", default="", help='further flags for both sides, such as --flags="--bf16"')
    add("--tolerance", type=float, default=1e-4, help="largest difference that passes (see the text at the top)")
    args = parser.parse_args()
    good = True
    with tempfile.TemporaryDirectory(prefix="compare-") as temporary:
        trees = [Path(temporary, "old"), Path(temporary, "new")]
        checkout(args.revision, trees[0])
        copy_of_this_tree(trees[1])
        for script in args.scripts.split(","):
            for seed in args.seeds.split(","):
                runs = [run(tree, script, seed, args.flags) for tree in trees]
                metrics = [metrics_of(folder) for folder in runs]
                print(f"{script} {seed}: ", end="")
                good &= show(compare_metrics(*metrics) | compare_weights(*runs), args.tolerance)
                apart = metrics[0].columns.symmetric_difference(metrics[1].columns)
                if len(apart):
                    print(f"    only on one side: {', '.join(apart)}")
    print("equal within the tolerance" if good else f"DIFFERENT: more than {args.tolerance:g}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
