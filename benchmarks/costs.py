"""Compares the time and memory of a few commands at two revisions of this project.

    python benchmarks/costs.py 8a7a740 --model FOLDER      # writes results/costs.json; FOLDER: python tools/smollm2.py

`--model` is a causal language model; the two revisions alternate `--repeats` times. Nothing else should run on the
machine. `python experiments/tables.py` writes the table of benchmarks/README.md.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import RESULTS, ROOT, describe_machine, describe_ours
from tqdm import tqdm

HALF = """
def half(prompts, completions, **columns):
    \"\"\"Groups of 8; in every second group all scores are equal.\"\"\"
    return [float(i % 2) if i // 8 % 2 else 0.5 for i in range(len(prompts))]
"""
PLAIN = "--dataset-test-split none --num-sample-generations 0 --output-dir {out}"
ON_SUMS = f"--model {{model}} --dataset {{few}} --reward-fn {{half}} {PLAIN}"
# What is measured: a command line, and a metric of metrics.jsonl, or None for all CPU time
CASES = {
    "memory of a run that saves a checkpoint": (
        f"rloo.py --batch-size 8 --total-episodes 8 --micro-batch-size 4 --response-length 16 --save-steps 1 {ON_SUMS}",
        None,
    ),
    "a GRPO update, half of its groups silent": (
        f"grpo.py --batch-size 64 --total-episodes 64 --micro-batch-size 8 --response-length 24 {ON_SUMS}",
        "time/update",
    ),
    "a rollout of 512 responses": (
        f"rloo.py --batch-size 512 --total-episodes 512 --num-ppo-epochs 1 {PLAIN}",
        "time/rollout",
    ),
    "a step of SFT, long prompts and short answers": (
        f"sft.py --model {{model}} --dataset {{pairs}} --batch-size 64 --micro-batch-size 4 --max-length 512 {PLAIN}",
        "time/step",
    ),
    "200,000 prompts, to the end of a first update": (
        f"grpo.py --dataset {{many}} --batch-size 64 --total-episodes 64 {PLAIN}",
        None,
    ),
}


def write_data(folder: Path) -> dict[str, str]:
    """Writes the files that the commands read; returns their names."""
    sums = [
        {"prompt": f"What is {i % 90 + 10} + {i % 37}?", "answer": str(i % 90 + 10 + i % 37)} for i in range(200_000)
    ]
    swaps = json.loads((ROOT / "toy/shells/data/prompts/train.jsonl").read_text().splitlines()[0])
    pairs = [{"prompt": f"{i} " + "and so on " * 110, "completion": f"It is {i}."} for i in range(64)]
    rows = {"few": sums[:256], "many": [swaps | {"answer": str(i)} for i in range(200_000)], "pairs": pairs}
    for name, lines in rows.items():
        Path(folder, f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    Path(folder, "half.py").write_text(HALF)
    return {name: str(Path(folder, f"{name}.jsonl")) for name in rows} | {"half": f"{folder}/half.py:half"}


def cost(code: Path, command: str, metric: str | None, out: Path) -> dict[str, float]:
    """Seconds (the metric, or all CPU time), and the peak of resident memory in GB."""
    words = [sys.executable, *command.split()]
    process = subprocess.Popen(words, cwd=code, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    errors = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"error: `{command}` failed in {code}: {errors[-500:]}")
    seconds = used.ru_utime + used.ru_stime
    if metric:
        seconds = json.loads(Path(out, "metrics.jsonl").read_text().splitlines()[-1])[metric]
    return {"seconds": seconds, "gb": used.ru_maxrss / 2**20}


def main() -> None:
    """Runs all cases at both revisions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", help="a git revision to compare with")
    parser.add_argument("--model", required=True, help="folder of a causal language model")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--output", type=Path, default=RESULTS / "costs.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        before = Path(folder, "before")
        subprocess.run(["git", "worktree", "add", "-q", "--detach", before, args.revision], cwd=ROOT, check=True)
        try:
            names = write_data(Path(folder)) | {"model": str(Path(args.model).resolve())}
            measured = {}
            for case in tqdm(args.cases):
                command, metric = CASES[case]
                sides = {"before": [], "after": []}
                for i in range(args.repeats):
                    for side, code in (("before", before), ("after", ROOT)):
                        out = Path(folder, f"{side}-{i}-{len(measured)}")
                        sides[side].append(cost(code, command.format(out=out, **names), metric, out))
                measured[case] = {"command": f"python {command}"} | sides
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", before], cwd=ROOT, check=True)
    head = {"machine": describe_machine(), "ours": describe_ours(ROOT), "before": args.revision}
    head |= {"date": time.strftime("%Y-%m-%d"), "command": f"python benchmarks/costs.py {args.revision} --model FOLDER"}
    args.output.write_text(json.dumps(head | {"cases": measured}, indent=1) + "\n")
    print(table(measured))


def table(cases: dict[str, dict]) -> str:
    """Markdown: the medians of both revisions, and their ratios with the range over the pairs."""
    lines = [
        "| | seconds before | after | **ratio** | GB before | after | ratio |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for case, sides in cases.items():
        cells = [case]
        for name, digits in (("seconds", 1), ("gb", 2)):
            before, after = ([run[name] for run in sides[side]] for side in ("before", "after"))
            ratios = sorted(b / a for a, b in zip(before, after))
            middle = statistics.median
            ratio = f"{middle(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
            cells += [f"{middle(before):.{digits}f}", f"{middle(after):.{digits}f}", ratio]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
