"""Learning: the share of right answers of grpo.py on the sorting task, beside that of TRL 1.16's GRPOTrainer.

    python benchmarks/grpo_learning.py                 # five seeds of each, on one thread each: half an hour
    python benchmarks/grpo_learning.py --seeds 1,2 --sides ours

Both start from toy/sort/sft and see the same prompts, in their own order; groups of 8, batches of 64, 500 updates, one
step each, loss dapo, no KL, learning rate 7e-4 falling to 0, AdamW, gradients clipped to norm 1, temperature 1. The
reward is rewards/verifiers.py:exact_match on both sides. At the end our `evaluate` reads both policies, in one process: the
prompts of the validation split, 8 answers each at temperature 1, one at 0.01.

TRL passes no positions when it scores, so that a GPT-2 counts the padding on the left of a prompt; --equal-lengths
takes the prompts of five digits alone, which need no padding, so that both sides see the same model.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trl_versions import make_venv

ROOT = Path(__file__).resolve().parent.parent
UPDATES, G, BATCH, LENGTH, RATE = 500, 8, 64, 16, 7e-4


def write_prompts(folder: Path, equal_lengths: bool) -> None:
    """train.jsonl and validation.jsonl in the folder."""
    for split in ("train", "validation"):
        lines = (ROOT / f"toy/sort/data/prompts/{split}.jsonl").read_text().splitlines(keepends=True)
        kept = [line for line in lines if not equal_lengths or len(json.loads(line)["answer"].split()) == 5]
        (folder / f"{split}.jsonl").write_text("".join(kept))


def train_trl(data: Path, output: Path, seed: int) -> None:
    """Inside the venv: one run of TRL; the reward of each step goes to rewards.json, the policy to output/model."""
    from datasets import load_dataset
    from trl import GRPOConfig, GRPOTrainer

    sys.path.insert(0, str(ROOT / "rewards"))
    from verifiers import exact_match

    config = GRPOConfig(
        output_dir=str(output), max_steps=UPDATES, num_generations=G, per_device_train_batch_size=BATCH, seed=seed,
        max_completion_length=LENGTH, learning_rate=RATE, lr_scheduler_type="linear", logging_steps=1, beta=0.0,
        weight_decay=0.0, bf16=False, gradient_checkpointing=False, use_cpu=True, report_to="none", save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    train = load_dataset("json", data_files=str(data / "train.jsonl"), split="train")
    trainer = GRPOTrainer(str(ROOT / "toy/sort/sft"), reward_funcs=exact_match, args=config, train_dataset=train)
    start = time.perf_counter()
    trainer.train()
    rewards = [line["reward"] for line in trainer.state.log_history if "reward" in line]
    (output / "rewards.json").write_text(json.dumps([rewards, time.perf_counter() - start]))
    trainer.save_model(str(output / "model"))


def run(job: tuple) -> dict:
    """One run of one side in a process of its own: its rewards, seconds, and what our evaluation says of its policy."""
    side, seed, python, data, folder = job
    output = folder / f"{side}-{seed}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [
        sys.executable, ROOT / "grpo.py", "--dataset", data, "--seed", seed, "--total-episodes", UPDATES * BATCH,
        "--learning-rate", RATE, "--response-length", LENGTH, "--output-dir", output, "--num-sample-generations", 0,
        "--save-steps", 1000,
    ]  # fmt: skip
    if side == "TRL":
        command = [python, __file__, "--inside", data, output, seed]
    done = subprocess.run([*map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{side}, seed {seed}, failed: {done.stderr[-2000:]}")
    if side == "TRL":
        rewards, seconds = json.loads((output / "rewards.json").read_text())
    else:
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        rewards, seconds = [line["reward"] for line in lines], lines[-1]["episode"] / lines[-1]["eps"]
    print(f"{side}, seed {seed}: {statistics.fmean(rewards[-50:]):.3f} in the end, {seconds:.0f} s", flush=True)
    model = output / "model" if side == "TRL" else output
    return {"side": side, "seed": seed, "rewards": rewards, "seconds": seconds, "model": str(model)}


def judge(results: list[dict], data: Path) -> None:
    """Adds our evaluation of each policy to the results."""
    sys.path.insert(0, str(ROOT))
    import torch

    import grpo

    for result in results:
        args = grpo.Args(model=result.pop("model"), dataset=str(data), response_length=LENGTH)
        policy = grpo.load_policy(args)
        _, prompts = grpo.load_prompts(args, policy, None)
        reward = grpo.make_reward(args, policy, None, prompts)
        torch.manual_seed(0)
        result |= grpo.evaluate(policy, reward, prompts, args)


def main() -> None:
    """Runs all, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="1,2,3,4,5")
    parser.add_argument("--sides", default="ours,TRL", help="of ours,TRL")
    parser.add_argument("--equal-lengths", action="store_true", help="prompts of five digits alone")
    parser.add_argument("--venvs", type=Path, default=Path("/tmp"), help="folder of the virtual environment")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/learning-grpo.json", help="JSON file")
    parser.add_argument("--inside", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        return train_trl(Path(args.inside[0]), Path(args.inside[1]), int(args.inside[2]))
    python = make_venv("1.16", args.venvs) if "TRL" in args.sides else None
    with tempfile.TemporaryDirectory(prefix="grpo-learning-") as tmp:
        folder, data = Path(tmp), Path(tmp, "data")
        data.mkdir()
        write_prompts(data, args.equal_lengths)
        seeds, sides = args.seeds.split(","), args.sides.split(",")
        jobs = [(side, int(seed), python, data, folder) for seed in seeds for side in sides]
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            results = list(pool.map(run, jobs))
        judge(results, data)
    args.output.write_text(json.dumps({"equal_lengths": args.equal_lengths, "runs": results}) + "\n")
    print("| side | reward, updates 51-100 | 451-500 | eval/accuracy | eval/pass@1 | eval/pass@8 | seconds |")
    print("|---|---|---|---|---|---|---|")
    for side in args.sides.split(","):
        own, cells = [result for result in results if result["side"] == side], []
        columns = [[statistics.fmean(r["rewards"][a:b]) for r in own] for a, b in ((50, 100), (450, 500))]
        columns += [[r[name] for r in own] for name in ("eval/accuracy", "eval/pass@1", "eval/pass@8", "seconds")]
        for values in columns:
            cells.append(f"{statistics.fmean(values):.3g} ± {statistics.stdev(values) if len(values) > 1 else 0:.2g}")
        print(f"| {side} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
