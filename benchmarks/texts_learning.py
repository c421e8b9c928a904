"""Learning from texts: sft.py, reward_model.py and dpo.py on the toy world, beside the same trainers of TRL 1.16.

    python benchmarks/texts_learning.py                 # five seeds, on one thread each: an hour on two CPU cores
    python benchmarks/texts_learning.py --seeds 1,2 --algorithms sft
    python benchmarks/texts_learning.py --redraw        # charts and tables again, from the JSON file

Both sides read the same data in batches of 64, with the learning rate, schedule and clipping that ours wrote in
args.json; for sft both begin with the same random weights. The order of the data and dropout are each side's own, and
so is the first head of the reward model. Every 50 or 100 steps TRL's model is saved; our evaluation reads it, on the
same test split as it reads our own. (What the runs cost is another question: see throughput.py.)

What comes out: a JSON file, a chart for each algorithm beside it, and a table in Markdown for each.
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

from learning import COLOURS, band
from throughput import RESULTS, ROOT, a_list, describe_machine, describe_ours, figure_of
from trl_versions import make_venv

EVERY = {"sft": 50, "reward_model": 100, "dpo": 100}  # steps
METRICS = {
    "sft": {"eval/perplexity": "perplexity of unseen texts", "eval/mean_token_accuracy": "likeliest token right",
            "eval/eos_loss": "loss on EOS"},
    "reward_model": {"eval/accuracy": "unseen pairs right", "eval/loss": "loss on unseen pairs",
                     "eval/calibration_error": "calibration error"},
    "dpo": {"eval/rewards/accuracies": "unseen pairs right", "objective/gold_scores": "gold score of answers",
            "objective/kl": "KL, nats an answer"},
}  # fmt: skip
SIDES = {"ours": "ours", "TRL": "TRL 1.16"}
SHARED = ("learning_rate", "lr_scheduler_type", "warmup_ratio", "weight_decay", "max_grad_norm", "max_length")


def train_trl(algorithm: str, settings: dict, start: str, output: str) -> None:
    """Inside the venv: one run of TRL, which leaves a checkpoint for each evaluation."""
    from datasets import load_dataset
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

    config_class, trainer_class = {
        "sft": (SFTConfig, SFTTrainer), "reward_model": (RewardConfig, RewardTrainer), "dpo": (DPOConfig, DPOTrainer),
    }[algorithm]  # fmt: skip
    shared = {name: settings[name] for name in SHARED}
    shared["warmup_steps"] = shared.pop("warmup_ratio")  # a share, if below 1
    # fmt: off
    config = config_class(
        output_dir=output, per_device_train_batch_size=settings["batch_size"], num_train_epochs=1, use_cpu=True,
        bf16=False, gradient_checkpointing=False, report_to="none", disable_tqdm=True, logging_steps=50,
        seed=settings["seed"], data_seed=settings["seed"], save_strategy="steps", save_steps=EVERY[algorithm],
        save_only_model=True, **({"disable_dropout": False} if algorithm == "reward_model" else {}),
        **({"beta": settings["beta"]} if algorithm == "dpo" else {}), **shared,
    )
    # fmt: on
    data = load_dataset("json", data_files=f"{ROOT / settings['dataset']}/train.jsonl", split="train")
    tokenizer = AutoTokenizer.from_pretrained(start)
    trainer = trainer_class(model=start, args=config, train_dataset=data, processing_class=tokenizer)
    trainer.train()


def judge(algorithm: str, settings: dict, checkpoint: Path) -> dict[str, float]:
    """What our evaluation says of a checkpoint of TRL's."""
    import importlib

    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    script = importlib.import_module(algorithm)
    names = {f.name for f in script.fields(script.Args) if f.init}
    args = script.Args(**{name: value for name, value in settings.items() if name in names})
    args.micro_batch_size = 50
    kind = AutoModelForSequenceClassification if algorithm == "reward_model" else AutoModelForCausalLM
    model = kind.from_pretrained(checkpoint).eval()
    model.tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/sft")
    _, test = script.load_data(args)
    if algorithm == "sft":
        return script.evaluate(model, script.encode_texts(test, model.tokenizer, args, args.max_length), args)
    pairs = script.encode_pairs(test, model.tokenizer, args, args.max_length)
    if algorithm == "reward_model":
        return script.evaluate(model, pairs, args)[0]
    model.stop_token_id = model.tokenizer.eos_token_id
    reference = script.load_policy(args)
    known = torch.full((len(pairs), 2), torch.nan)
    stats = script.evaluate_pairs(model, reference, known, pairs, args)
    gold_reward = script.function_reward(args.gold_reward_fn, [pair.example for pair in pairs], model, args)
    return stats | script.evaluate_responses(model, reference, pairs, gold_reward, args)


def run(job: tuple) -> dict:
    """One run of one side in a process of its own."""
    side, algorithm, seed, python, folder = job
    output = folder / f"{algorithm}-{side}-{seed}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [
        sys.executable, ROOT / f"{algorithm}.py", "--seed", seed, "--output-dir", output, "--eval-steps",
        EVERY[algorithm], "--num-sample-generations", 0, "--save-steps", 1000,
    ]  # fmt: skip
    if algorithm == "dpo":
        command += ["--gold-reward-fn", ROOT / "toy/make.py:gold_score", "--num-eval-prompts", 200]
    if side == "TRL":
        start = folder / f"start-{seed}" if algorithm == "sft" else ROOT / "toy/sft"
        settings = folder / f"{algorithm}-ours-{seed}/args.json"
        command = [python, __file__, "--inside", algorithm, settings, start, output]
    done = subprocess.run([*map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{algorithm}, {side}, seed {seed}, failed: {done.stderr[-2000:]}")
    if side == "ours":
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        curve = [line for line in lines if next(iter(METRICS[algorithm])) in line]
    else:
        settings = json.loads(settings.read_text())
        checkpoints = sorted(output.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
        curve = [judge(algorithm, settings, path) | {"step": int(path.name.split("-")[1])} for path in checkpoints]
    curve = [{name: line[name] for name in ("step", *METRICS[algorithm])} for line in curve]
    print(f"{algorithm}, {side}, seed {seed}: {curve[-1]}", flush=True)
    return {"algorithm": algorithm, "side": side, "seed": seed, "curve": curve}


def save_start(folder: Path, seed: int) -> None:
    """The random weights with which sft.py begins, for TRL."""
    import torch
    import sft

    torch.manual_seed(seed)
    model = sft.load_policy(sft.Args())
    model.save_pretrained(folder / f"start-{seed}")
    model.tokenizer.save_pretrained(folder / f"start-{seed}")


def show(results: dict, output: Path) -> None:
    """A chart and a table for each algorithm."""
    for algorithm in dict.fromkeys(run["algorithm"] for run in results["runs"]):
        own, names = [run for run in results["runs"] if run["algorithm"] == algorithm], METRICS[algorithm]
        figure, axes = figure_of(1, len(names), 11, 3)
        print(f"\n| {algorithm} | {' | '.join(names.values())} |\n|---|{'---:|' * len(names)}")
        for side, label in SIDES.items():
            runs = [run for run in own if run["side"] == side]
            if not runs:
                continue
            colour, cells = list(COLOURS.values())[side == "TRL"], []
            for panel, (name, title) in zip(axes[0], names.items()):
                x, y = band([run["curve"] for run in runs], "step", name)
                panel.plot(x, y.mean(0), color=colour, label=label)
                panel.fill_between(x, y.min(0), y.max(0), color=colour, alpha=0.2, linewidth=0)
                panel.set_title(title, fontsize=10), panel.set_xlabel("steps", fontsize=9)
                cells.append([run["curve"][-1][name] for run in runs])
            spread = lambda values: statistics.stdev(values) if len(values) > 1 else 0.0
            print(f"| {label} | {' | '.join(f'{statistics.fmean(x):.3g} ± {spread(x):.1g}' for x in cells)} |")
        axes[0, 0].legend(frameon=False, fontsize=9)
        figure.savefig(output.with_name(f"{output.stem}-{algorithm.replace('_', '-')}.png"), dpi=110)


def main() -> None:
    """Runs all, and draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="1,2,3,4,5", help="with commas between them")
    parser.add_argument("--algorithms", type=a_list(tuple(EVERY)), default=list(EVERY), help="of sft,reward_model,dpo")
    parser.add_argument("--redraw", action="store_true", help="run nothing, draw what the JSON file holds")
    parser.add_argument("--venvs", type=Path, default=Path("/tmp"), help="folder of TRL's virtual environment")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--output", type=Path, default=RESULTS / "learning-texts.json", help="JSON file")
    parser.add_argument("--inside", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        algorithm, settings, start, output = args.inside
        return train_trl(algorithm, json.loads(Path(settings).read_text()), start, output)
    if not args.redraw:
        sys.path.insert(0, str(ROOT))
        os.chdir(ROOT)  # where toy/ is
        python = make_venv("1.16", args.venvs)
        results = {"machine": describe_machine(), "date": time.strftime("%Y-%m-%d"), "ours": describe_ours(ROOT)}
        results["runs"] = []
        with tempfile.TemporaryDirectory(prefix="texts-learning-") as folder, ThreadPoolExecutor(args.jobs) as pool:
            for seed in map(int, args.seeds.split(",")):
                save_start(Path(folder), seed)
                for side in SIDES:  # ours first: TRL takes its settings
                    jobs = [(side, algorithm, seed, python, Path(folder)) for algorithm in args.algorithms]
                    results["runs"] += pool.map(run, jobs)
                    args.output.write_text(json.dumps(results) + "\n")
    show(json.loads(args.output.read_text()), args.output)


if __name__ == "__main__":
    main()
