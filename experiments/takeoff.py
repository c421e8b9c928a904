"""What decides a run? Six ways to weigh answers, from a start that is right once in a hundred answers, over many seeds.

    python experiments/takeoff.py --seeds 100          # 600 runs of 4 CPU seconds; goes on where it stopped
    python experiments/takeoff.py --seeds 100 --list   # only says how many are missing

The start is toy/shells/sft, fine-tuned once more, on texts that mostly give no answer: it seldom guesses, and works out
the steps still more seldom. A run has taken off if more than half of its last answers are right: no guess reaches that.

What comes out: results/takeoff.jsonl, to which each run is added as it ends, and what docs/questions.md shows of it.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import runpy
import time

from forks import LEARNED, ROOT, describe_ours, run
from tqdm import tqdm

OUTPUT = LEARNED / "takeoff.jsonl"
START = ROOT / "runs/takeoff/start"
GRPO = "lecture/grpo.py"
UPDATES, BATCH = 100, 64  # as by default
TEXTS, ANSWERED = 1300, 0.04  # of the fine-tuning: their number, and the share that gives an answer
ARMS = {  # name -> flags
    "GRPO": "",
    "batch's deviation": "--scale-rewards batch",
    "Dr. GRPO": "--scale-rewards none --loss-type dr_grpo",
    "leave one out": "--scale-rewards none",  # times G / (G - 1)
    "MaxRL": "--scale-rewards mean",
    "RFT": "--baseline none",
}
MEAN = "group_advantages(scores, G, args.scale_rewards)"


def make_start() -> None:
    """Fine-tunes the policy that all runs start from, unless it is there."""
    if START.exists():
        return
    shells = runpy.run_path(str(ROOT / "toy/shells/make.py"))
    rng = random.Random(9)
    lines = []
    for _ in range(TEXTS):
        row = shells["make_row"](rng)
        answer = row["answer"] if rng.random() < ANSWERED else "--"
        lines.append(json.dumps({"prompt": row["prompt"], "completion": f" #### {answer}"}) + "\n")
    data = START.parent / "texts"
    data.mkdir(parents=True)
    (data / "train.jsonl").write_text("".join(lines))
    flags = f"--model {ROOT}/toy/shells/sft --dataset {data} --output-dir {START} --learning-rate 1e-3 --batch-size 32"
    run("lecture/sft.py", (ROOT / "lecture/sft.py").read_text("utf-8"), flags.split(), lambda *_: {})


def look(names: dict, stats: dict[str, float]) -> dict[str, float]:
    """Of an update: how many answers are right, and worked out; tokens of an answer, and nats of a token."""
    worked = sum(len(text.split()) > 3 for text in names["texts"])
    entropy = -names["old_logprobs"][names["mask"]].mean().item()
    length = stats["completions/mean_length"]
    return {
        "right": int(names["scores"].sum()),
        "worked": worked,
        "length": round(length, 1),
        "entropy": round(entropy, 2),
    }


def measure(key: tuple[str, str, int]) -> dict:
    """A run: its curves."""
    arm, flags, seed = key
    source = (ROOT / GRPO).read_text("utf-8")
    if arm == "leave one out":
        source = source.replace(MEAN, f"G / (G - 1) * {MEAN}")
    flags = f"--model {START} --total-episodes {UPDATES * BATCH} --response-length 12 --seed {seed} {flags}"
    start = time.process_time()
    with contextlib.redirect_stdout(None):
        updates, _ = run(GRPO, source, flags.split(), look)
    found = {"arm": arm, "seed": seed, "flags": flags.partition(f" --seed {seed} ")[2]}
    found |= {"cpu_seconds": round(time.process_time() - start, 1)}
    return found | {metric: [update[metric] for update in updates] for metric in updates[0]}


def read_record() -> list[dict]:
    """The runs."""
    return [json.loads(line) for line in OUTPUT.read_text().splitlines()] if OUTPUT.exists() else []


def main() -> None:
    """Makes the runs that are missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=100, help="of each arm")
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, one thread each")
    parser.add_argument("--list", action="store_true", help="only say how many runs are missing")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}  # before torch is imported
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    there = {(run["arm"], run["flags"], run["seed"]) for run in read_record()}
    wanted = [("before", "--learning-rate 0", seed) for seed in (1, 2)]
    wanted += [(arm, flags, seed) for seed in range(1, args.seeds + 1) for arm, flags in ARMS.items()]
    missing = [key for key in wanted if key not in there]
    print(f"{len(missing)} runs, about {len(missing) * 4 / 60 / args.jobs:.0f} minutes")
    if args.list:
        return
    make_start()
    origin = {**describe_ours(ROOT), "date": time.strftime("%Y-%m-%d")}
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool, open(OUTPUT, "a") as file:
        for found in tqdm(pool.imap_unordered(measure, missing), total=len(missing), disable=False):
            print(json.dumps(found | origin, separators=(",", ":")), file=file, flush=True)


if __name__ == "__main__":
    main()
