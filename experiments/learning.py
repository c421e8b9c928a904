"""Learning: the runs behind the figures in README and docs, ours and TRL's, over several seeds.

    python experiments/learning.py                       # all that is missing; says first how long it takes
    python experiments/learning.py --only "ppo*" --seeds 1,2
    python experiments/learning.py --list                # the runs, and which of them are there

Ours run as a reader runs them, on one thread, and log the gold score: `python ppo.py --seed S --reward-fn reward_model
toy/make.py:gold_score --reward-weights 1 0`. TRL runs in virtual environments of its own (benchmarks/run_trl.py), from
the same models and data, with the settings that ours wrote in args.json. Our evaluation reads both sides' models of
sft, reward_model and grpo; tools/evaluate.py those of dpo.

What comes out: a line in results/learning.jsonl for each run, as it ends, with its command, seed, revision, date,
processor and CPU seconds from start to exit; the metrics of its `start` and `end`, which is the mean over the last five
updates (of evaluations, the last one); and its curves. `python experiments/tables.py` writes the tables
and charts from it. A run that is there is not made again: take its line out first.
"""

import argparse
import fnmatch
import importlib
import itertools
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
import run_trl
from common import LEARNED, ROOT, describe_machine, describe_ours

RECORD = LEARNED / "learning.jsonl"
TRAINED = "cpu_seconds.txt"  # in the folder of a run of TRL's, once it has ended
LAST = 5  # updates at the end of a run whose mean is its result
FIVE, ONE = (1, 2, 3, 4, 5), (1,)
GOLD = "--reward-fn reward_model toy/make.py:gold_score --reward-weights 1 0"
WATCHED = {  # flags of each run that names no --reward-fn: its reward, and a number to look at, which has no weight
    "ppo": GOLD,
    "rloo": GOLD,
    "grpo": "--reward-fn rewards/verifiers.py:right_number toy/shells/make.py:worked --reward-weights 1 0",
    "ddpo": "--reward-fn toy/shapes/make.py:left_ink toy/shapes/make.py:same_shape --reward-weights 1 0",
}
GAME = "--from-scratch toy/shells/base --num-train-epochs 4 --batch-size 32 --learning-rate 2e-3"
TIED = "--beta 0.1"
UNPUNISHED = "--missing-eos-penalty 0"  # as in dpo.py and grpo.py, which have no such penalty
PRICE = (
    f"{TIED} --reward-fn rewards/verifiers.py:right_number toy/shells/make.py:length toy/shells/make.py:worked "
    "--reward-weights 1 -0.05 0"
)
BY_MODEL = f"--model toy/sft --dataset toy/data/prompts {GOLD} --response-length 53 --temperature 0.7"
SECONDS = {  # of CPU time, roughly, of a default run
    "ppo": 75,
    "rloo": 48,
    "grpo": 33,
    "dpo": 200,
    "sft": 76,
    "reward_model": 88,
    "ddpo": 95,
}
TRL_EFFORT = {"ppo": 2, "rloo": 2.5, "grpo": 1, "dpo": 6, "sft": 5, "reward_model": 2, "ddpo": 1}  # times ours
GOLD_MEAN = "rewards/gold_score/mean"
CURVES = {
    "ppo": ("objective/scores", GOLD_MEAN, "objective/kl", "val/eos_share"),
    "rloo": ("objective/scores", GOLD_MEAN, "objective/kl", "val/eos_share"),
    "grpo": ("rewards/right_number/mean", "completions/mean_length", "rewards/worked/mean", "entropy"),
    "dpo": ("eval/rewards/accuracies", GOLD_MEAN, "objective/kl", "val/eos_share"),
    "sft": ("eval/perplexity", "eval/mean_token_accuracy", "eval/eos_loss"),
    "reward_model": ("eval/accuracy", "eval/loss", "eval/calibration_error"),
    "ddpo": ("reward_mean", "rewards/same_shape/mean", "objective/kl"),
}


@dataclass(frozen=True)
class Run:
    """One training, for each of its seeds."""

    script: str
    flags: str = ""
    seeds: tuple[int, ...] = FIVE
    side: str = "ours"  # or TRL, with the settings of our run of the same flags
    effort: float = 1.0  # CPU time, as a multiple of the default run's
    judged: bool = False  # answers of its policy are scored by the gold score in the end

    @property
    def name(self) -> str:
        """How tables call it."""
        return f"{'TRL ' * (self.side == 'TRL')}{self.script} {self.flags}".strip()


def folder_of(run: Run, seed: int) -> Path:
    """Where a run goes; what it is made of stands in the name."""
    words = re.sub(r"[^\w.]+", "-", run.name).strip("-")
    return ROOT / "runs/learning" / f"{words}-{seed}"


SCRIPTS = ("sft", "reward_model", "ppo", "rloo", "grpo", "dpo", "ddpo")
RUNS = [Run(script, judged=script in ("ppo", "rloo", "dpo", "grpo")) for script in SCRIPTS]
# The models of toy/models.sh; the first is a sweep's, too
RUNS += [
    Run("sft", "--num-train-epochs 3", ONE, effort=3),
    Run("reward_model", "--num-train-epochs 2 --learning-rate 1e-3 --eos-dropout 0.5", (2,), effort=2),
    Run("sft", f"{GAME} --dataset toy/shells/data/sft", ONE),
]
# The shell game: before training; a policy that has seen no working; answering at once only; a price for each token;
# relatives of GRPO
UNTAUGHT = Run("sft", f"{GAME} --dataset runs/learning/at-once", ONE)
RUNS += [UNTAUGHT]
RUNS += [Run("grpo", "--total-episodes 64 --learning-rate 1e-12", ONE, effort=0.3, judged=True)]
RUNS += [
    Run("grpo", flags, effort=effort, judged=effort == 1)
    for flags, effort in {
        "--response-length 3": 1,
        TIED: 1,
        PRICE: 1,
        "--loss-type grpo": 0.9,
        "--loss-type dr_grpo --scale-rewards none": 0.9,
        "--loss-type grpo --importance-sampling-level sequence --epsilon 3e-4 --epsilon-high 4e-4": 0.9,
        "--loss-type cispo": 0.9,
        "--dynamic-sampling 4": 2,
        "--num-ppo-epochs 4": 2.5,
        "--num-ppo-epochs 4 --epsilon-high 0.28": 2.5,
    }.items()
]
RUNS += [Run(script, side="TRL", effort=TRL_EFFORT[script]) for script in SCRIPTS]
# Rates of the pages, and RLOO without a clipped gradient
RUNS += [Run("sft", f"--learning-rate {rate}", ONE) for rate in ("3e-4", "1e-3", "1e-2")]
RUNS += [Run("reward_model", f"--learning-rate {rate}", ONE) for rate in ("1e-4", "3e-3")]
RUNS += [Run("rloo", "--max-grad-norm 1e9")]
# The lecture on KL: a reward model that saw a thousand pairs
POOR = Run("reward_model", "--dataset-train-split train[:1000] --num-train-epochs 8 --eos-dropout 0.5", ONE, effort=0.3)
RUNS += [POOR]
# Which one? 2,048 episodes each, and some hundred CPU seconds each
RUNS += [
    Run(script, flags, effort=effort, judged=True)
    for script, flags, effort in (
        ("dpo", "--num-train-epochs 0.0683 --batch-size 64", 0.15),
        ("grpo", f"{BY_MODEL} --beta 0.05 --total-episodes 2048", 1),
        ("sft", "--model toy/sft --dataset runs/learning/chosen --num-train-epochs 0.0683 --batch-size 64", 0.3),
        ("ppo", UNPUNISHED, 1),
        ("rloo", UNPUNISHED, 1),
        ("ppo", f"{UNPUNISHED} --total-episodes 5120", 2.3),
        ("rloo", f"{UNPUNISHED} --total-episodes 7168", 3),
        ("grpo", f"{BY_MODEL} --beta 0.05 --total-episodes 6144", 3),
        ("dpo", "--num-train-epochs 0.6", 0.6),
        ("sft", "--model toy/sft --dataset runs/learning/chosen", 1.4),
    )
]
# Last, since they need the models of other runs
RUNS += [Run("grpo", f"--model {folder_of(UNTAUGHT, 1).relative_to(ROOT)}", judged=True)]
POOR_MODEL = folder_of(POOR, 1).relative_to(ROOT)
# At the default rate, and in 2,048 episodes, too few seeds fall. These settings were tried on seeds 11 to 14
FAR = "--learning-rate 1e-3 --total-episodes 4096"
POOR_RUNS = {beta: f"--reward-model {POOR_MODEL} {FAR} --kl-coef {beta}" for beta in ("0", "0.2")}
RUNS += [Run("ppo", f"--reward-model {POOR_MODEL} --kl-coef 0")]
RUNS += [Run("ppo", POOR_RUNS["0"], tuple(range(1, 11)), effort=2), Run("ppo", POOR_RUNS["0.2"], (1, 2, 3), effort=2)]


# ---------------------------------------------------------------------------------------------------------------------
# One run


def run_process(command: list, log: Path) -> float:
    """Runs a command on one thread; its CPU seconds, with those of its children. Ends the program if it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with open(log, "w") as out:
        process = subprocess.Popen(
            [*map(str, command)], cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        tail = "\n".join(log.read_text(errors="replace").strip().splitlines()[-12:])
        raise RuntimeError(f"`{shlex.join(map(str, command))}` failed; its last lines:\n{tail}")
    return used.ru_utime + used.ru_stime


def log_of(output: Path) -> Path:
    """What a run prints."""
    return output.with_name(f"{output.name}.log")


def our_command(run: Run, seed: int, output: Path) -> list:
    """As a reader would start it, with more evaluations, and of DPO with all checkpoints, whose answers are judged."""
    command = [sys.executable, f"{run.script}.py", *shlex.split(run.flags), "--seed", seed, "--output-dir", output]
    if "--reward-fn" not in run.flags:
        command += shlex.split(WATCHED.get(run.script, ""))
    if run.script == "dpo":
        command += ["--save-steps", run_trl.EVERY["dpo"], "--save-total-limit", 1000]
    else:
        command += ["--save-steps", 100_000]
    if run.script in run_trl.EVERY:
        command += ["--eval-steps", run_trl.EVERY[run.script]]
    return command if run.script == "ddpo" else [*command, "--num-sample-generations", 0]


def train_ours(run: Run, seed: int, output: Path) -> float:
    """One training by our script."""
    if "--dataset runs/learning/" in run.flags:
        write_texts()
    seconds = run_process(our_command(run, seed, output), log_of(output))
    if run.script == "dpo":
        add_answers(output, policies_of(output))
    return seconds


def policies_of(output: Path) -> dict[int, Path]:
    """Step -> folder of a model, made of each checkpoint of a run on one process, which holds the weights alone."""
    from safetensors.torch import load_file, save_file

    policies = {}
    for checkpoint in sorted(output.glob("checkpoints/step-*")):
        folder = output / "policies" / checkpoint.name
        shutil.copytree(output, folder, ignore=lambda *_: ["checkpoints", "policies", "samples", "model.safetensors"])
        (shards,) = checkpoint.glob("*.safetensors")
        tensors = load_file(shards)
        weights = {name[len("model.") :]: x for name, x in tensors.items() if name.startswith("model.")}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        policies[int(checkpoint.name.removeprefix("step-"))] = folder
    return policies


def add_answers(output: Path, policies: dict[int, Path]) -> None:
    """Adds to metrics.jsonl what the answers of a policy of DPO are like, by the number of its step."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["step"] in policies:
            figures = evaluate(policies[line["step"]], "--dataset", "toy/data/preferences", "--num-prompts", 200)
            line[GOLD_MEAN] = figures["toy/make.py:gold_score"]
            line["objective/kl"] = figures["kl"]
            line["val/eos_share"] = figures["eos_share"]
            line["val/response_length"] = figures["response_length"]
    (output / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def evaluate(policy: Path, *flags) -> dict[str, float]:
    """What tools/evaluate.py says of a policy."""
    output = policy / "evaluation"
    shutil.rmtree(output, ignore_errors=True)
    judges = ("--reference", "toy/sft", "--reward-fn", "toy/make.py:gold_score", "--device", "cpu")
    run_process([sys.executable, "tools/evaluate.py", policy, *judges, *flags, "--output-dir", output], log_of(output))
    figures = json.loads((output / "evaluation.json").read_text())["figures"]
    return {name: figure["mean"] for name, figure in figures.items()}


def write_settings(run: Run, seed: int, output: Path) -> None:
    """args.json of a run of ours, which is stopped once it has begun."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with open(log_of(output), "w") as log:
        command = [str(word) for word in our_command(run, seed, output)]
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
        while process.poll() is None and not (output / "args.json").exists():
            time.sleep(1)
        time.sleep(1)  # for the rest of the file
        process.kill()
        process.wait()
    if not (output / "args.json").exists():
        raise RuntimeError(f"`{shlex.join(command)}` did not begin: see {log_of(output)}")


def train_trl(run: Run, seed: int, output: Path) -> float:
    """One training by TRL; its models are then read by our evaluation."""
    same = Run(run.script, run.flags)
    ours = folder_of(same, seed)
    if not (ours / "args.json").exists():  # ours is on record, but was made elsewhere
        write_settings(same, seed, ours)
    trained = output / TRAINED
    if not trained.exists():
        output.mkdir(parents=True)
        if run.script == "sft":
            run_process([sys.executable, __file__, "--save-start", ours, output], log_of(output))
        python = run_trl.make_venv(run_trl.TRAINERS[run.script], VENVS)
        variables = run_trl.KEEP_MEMORY if run.script == "dpo" else ()
        command = ["env", *variables, python, ROOT / "benchmarks/run_trl.py", run.script, ours / "args.json", output]
        trained.write_text(str(run_process(command, log_of(output))))
    if run.script in (*run_trl.EVERY, "grpo"):
        run_process([sys.executable, __file__, "--judge", run.script, ours, output], log_of(output))
    if run.script == "dpo":
        add_answers(output, {int(folder.name.split("-")[1]): folder for folder in output.glob("checkpoint-*")})
    return float(trained.read_text())


def summarize(script: str, lines: list[dict]) -> dict:
    """`start` and `end` of a run, and its curves."""
    numbers = {
        name: [line[name] for line in lines if isinstance(line.get(name), int | float)]
        for name in dict.fromkeys(name for line in lines for name in line)
    }
    evaluated = script in run_trl.EVERY
    end = {
        name: values[-1] if evaluated or name.startswith("eval/") else statistics.fmean(values[-LAST:])
        for name, values in numbers.items()
        if values
    }
    axis = "step" if evaluated else "epoch" if script == "ddpo" else "episode"
    curve_lines = [line for line in lines if CURVES[script][0] in line]
    curves = {name: [line.get(name) for line in curve_lines] for name in (axis, *CURVES[script])}
    rounded = lambda values: {name: float(f"{value:.5g}") for name, value in values.items()}
    curves = {name: [x if x is None else float(f"{x:.3g}") for x in values] for name, values in curves.items()}
    start = {name: values[0] for name, values in numbers.items() if values}
    return {"start": rounded(start), "end": rounded(end), "curves": curves}


def make_run(run: Run, seed: int) -> None:
    """One run from start to its line in the record."""
    output = folder_of(run, seed)
    if output.exists() and not (output / TRAINED).exists():
        subprocess.run(["rm", "-r", output], check=True)  # one that was interrupted
    output.parent.mkdir(parents=True, exist_ok=True)
    seconds = (train_ours if run.side == "ours" else train_trl)(run, seed, output)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    command = our_command(run, seed, "DIR")[1:]
    if run.side == "TRL":
        command = ["experiments/learning.py", "--only", run.name, "--seeds", seed]
    result = {
        "run": run.name,
        "seed": seed,
        "command": shlex.join(["python", *map(str, command)]),
        **describe_ours(ROOT),
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine()["cpu"],
        "cpu_seconds": round(seconds),
        **summarize(run.script, lines),
    }
    if run.judged:
        if run.script == "grpo" and BY_MODEL not in run.flags:
            run_process([sys.executable, __file__, "--read-shells", output], log_of(output))
            result["answers"] = json.loads((output / "answers.json").read_text())
        else:
            result["answers"] = read_answers(output)
    with LOCK, open(RECORD, "a") as file:
        file.write(json.dumps(result) + "\n")


# ---------------------------------------------------------------------------------------------------------------------
# In a process of their own: what our functions say of a model


def save_start(ours: Path, output: Path) -> None:
    """The random weights with which our run of sft.py began, for TRL."""
    import torch

    sft = importlib.import_module("sft")
    torch.manual_seed(json.loads((ours / "args.json").read_text())["seed"])
    model = sft.load_policy(sft.Args())
    model.save_pretrained(output / "start")
    model.tokenizer.save_pretrained(output / "start")


def args_of(script, ours: Path, **changes):
    """The settings of our run."""
    settings = json.loads((ours / "args.json").read_text())
    others = {"chosen_here", *script.code_version()}
    return script.Args(**{name: x for name, x in settings.items() if name not in others} | changes)


def judge(algorithm: str, ours: Path, output: Path) -> None:
    """What our evaluation says of TRL's models: of the policy of grpo, of each checkpoint of the others."""
    import torch

    script = importlib.import_module(algorithm)
    if algorithm == "grpo":
        args = args_of(script, ours, model=str(output / "model"))
        policy = script.load_policy(args)
        _, prompts = script.load_prompts(args, policy, None)
        torch.manual_seed(0)
        result = script.evaluate(policy, script.make_reward_fns(args, policy, None), prompts, args)
        lines = (output / "metrics.jsonl").read_text().splitlines()
        lines[-1] = json.dumps(json.loads(lines[-1]) | result)
        (output / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        return
    checkpoints = sorted(output.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    with open(output / "metrics.jsonl", "w") as file:
        for checkpoint in checkpoints:
            line = {"step": int(checkpoint.name.split("-")[1])} | judge_texts(script, algorithm, ours, checkpoint)
            file.write(json.dumps(line) + "\n")


def judge_texts(script, algorithm: str, ours: Path, checkpoint: Path) -> dict[str, float]:
    """What our evaluation says of a checkpoint."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    args = args_of(script, ours, micro_batch_size=50)
    kind = AutoModelForSequenceClassification if algorithm == "reward_model" else AutoModelForCausalLM
    model = kind.from_pretrained(checkpoint).eval()
    model.tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/sft")
    _, test = script.load_data(args)
    if algorithm == "sft":
        rows = script.read_texts(test, model.tokenizer, args, args.max_length)
        return script.evaluate(model, script.as_rows(rows[:]), args)
    pairs = script.as_pairs(script.encode_pairs(test, model.tokenizer, args, args.max_length)[:])
    if algorithm == "reward_model":
        return script.evaluate(model, pairs, args)[0]
    ref_logps = script.read_reference(model, script.load_policy(args), pairs, args)
    return script.evaluate(model, pairs, ref_logps, args)


def read_answers(output: Path) -> dict[str, float]:
    """Gold score, KL to toy/sft, length and share that end, of a thousand answers of a policy to unseen prompts."""
    figures = evaluate(output, "--num-generations", 5)
    names = {"gold": "toy/make.py:gold_score", "kl": "kl", "length": "response_length", "eos_share": "eos_share"}
    return {ours: float(f"{figures[name]:.5g}") for ours, name in names.items()}


def read_shells(output: Path, n: int = 8) -> None:
    """answers.json: for each number of swaps, how many of n answers to each unseen prompt of the shell game are worked
    out, their mean length in tokens, how many are right; and how many of the likeliest answers are right."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    right_number = run_trl.load_function("rewards/verifiers.py:right_number")
    worked = run_trl.load_function("toy/shells/make.py:worked")
    policy, tokenizer = AutoModelForCausalLM.from_pretrained(output).eval(), AutoTokenizer.from_pretrained(output)
    rows = [json.loads(x) for x in (ROOT / "toy/shells/data/prompts/validation.jsonl").read_text().splitlines()]

    def answer(rows: list[dict], is_greedy: bool) -> list[str]:
        ids = tokenizer([row["prompt"] for row in rows], return_tensors="pt").input_ids  # all of one length
        options = {"do_sample": not is_greedy, "top_k": 0, "max_new_tokens": 16, "attention_mask": torch.ones_like(ids)}
        return tokenizer.batch_decode(policy.generate(ids, **options)[:, ids.shape[1] :], skip_special_tokens=True)

    many = [row for row in rows for _ in range(n)]
    texts, wanted = answer(many, False), [row["answer"] for row in many]
    right, work = right_number(texts, wanted), worked(texts)
    greedy = right_number(answer(rows, True), [row["answer"] for row in rows])
    by_swaps = {}
    for swaps in range(1, 9):
        here = [i for i, row in enumerate(many) if row["swaps"] == swaps]
        by_swaps[swaps] = {
            "right": statistics.fmean(right[i] for i in here),
            "worked": statistics.fmean(work[i] for i in here),
            "length": statistics.fmean(len(texts[i].split()) + 1 for i in here),
            "greedy": statistics.fmean(x for x, row in zip(greedy, rows) if row["swaps"] == swaps),
        }
    means = {
        "right": statistics.fmean(right),
        "worked": statistics.fmean(work),
        "greedy": statistics.fmean(greedy),
        "length": statistics.fmean(len(text.split()) + 1 for text in texts),
        "right_if_worked": statistics.fmean(x for x, w in zip(right, work) if w) if any(work) else None,
        "right_at_once": statistics.fmean(x for x, w in zip(right, work) if not w) if not all(work) else None,
    }
    (output / "answers.json").write_text(json.dumps(means | {"by_swaps": by_swaps}))


def write_texts() -> None:
    """Data for sft.py: the chosen texts of the pairs, and the shell game's texts without their working."""
    data = {
        "chosen": ("toy/data/preferences", lambda row: row["chosen"]),
        "at-once": ("toy/shells/data/sft", lambda row: row["completion"][-len(" #### 1") :]),
    }
    for (name, (source, completion)), split in itertools.product(data.items(), ("train", "validation")):
        rows = map(json.loads, (ROOT / source / f"{split}.jsonl").read_text().splitlines())
        texts = [json.dumps({"prompt": row["prompt"], "completion": completion(row)}) + "\n" for row in rows]
        with LOCK:
            (ROOT / "runs/learning" / name).mkdir(parents=True, exist_ok=True)
            (ROOT / "runs/learning" / name / f"{split}.jsonl").write_text("".join(texts))


# ---------------------------------------------------------------------------------------------------------------------
# All runs

LOCK = threading.Lock()
VENVS = Path("/tmp")


def read_record() -> list[dict]:
    """What is there."""
    return [json.loads(line) for line in RECORD.read_text().splitlines()] if RECORD.exists() else []


def make_all(wanted: list[tuple[Run, int]], jobs: int) -> list[str]:
    """Makes the runs, several at a time; what failed is told at the end."""
    total, done, failures, began = len(wanted), 0, [], time.time()

    def make(job: tuple[Run, int]) -> None:
        """One, with a line on the screen."""
        nonlocal done
        run, seed = job
        try:
            make_run(run, seed)
            outcome = "done"
        except (RuntimeError, OSError, KeyError, ValueError) as problem:
            failures.append(f"{run.name}, seed {seed}: {problem!r}")
            outcome = "FAILED"
        done += 1
        print(
            f"[{(time.time() - began) / 60:4.0f} min] {done} of {total} {outcome}: {run.name}, seed {seed}", flush=True
        )

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(make, wanted))
    return failures


def main() -> None:
    """Plans, and runs what is missing."""
    global VENVS
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", default=["*"], metavar="PATTERN", help="names of --list, * for any letters"
    )
    parser.add_argument("--seeds", default="1,2,3,4,5", help="of those of each run, these")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time, on one thread each")
    parser.add_argument("--list", action="store_true", help="show the runs and end")
    parser.add_argument("--venvs", type=Path, default=VENVS, help="where TRL's environments are, or are made")
    for name, n in {"--save-start": 2, "--judge": 3, "--read-shells": 1}.items():
        parser.add_argument(name, nargs=n, help=argparse.SUPPRESS)
    args = parser.parse_args()
    VENVS = args.venvs
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    for asked, function in ((args.save_start, save_start), (args.read_shells, read_shells)):
        if asked:
            return function(*map(Path, asked))
    if args.judge:
        return judge(args.judge[0], Path(args.judge[1]), Path(args.judge[2]))
    seeds = [int(seed) for seed in args.seeds.split(",")]
    there = {(line["run"], line["seed"]) for line in read_record()}
    chosen = [run for run in RUNS if any(fnmatch.fnmatch(run.name, name) for name in args.only)]
    wanted = [(run, s) for s in seeds for run in chosen if s in run.seeds and (run.name, s) not in there]
    if args.list:
        for run in chosen:
            missing = sum((run.name, seed) not in there for seed in run.seeds)
            print(f"{run.name}: {len(run.seeds)} seeds{f', {missing} missing' if missing else ''}")
    minutes = sum(SECONDS[run.script] * run.effort for run, _ in wanted) / 60 / args.jobs
    print(f"{len(wanted)} runs, about {minutes:.0f} minutes with {args.jobs} at a time", flush=True)
    if args.list:
        return None
    failures = make_all(wanted, args.jobs)
    return print("\n".join(["", "failed:", *failures])) if failures else None


if __name__ == "__main__":
    main()
