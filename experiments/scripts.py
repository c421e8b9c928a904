"""What is kept of a run of a full script: its first and last metrics, its curves, and what its answers are like."""

import json
import resource
import runpy
import shlex
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from record import GOLD, LAST, ROOT, Run
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

EVALUATED = ("sft", "reward_model", "dpo")  # on unseen texts, from time to time
SWAPS = range(1, 9)  # in a prompt of the shell game


def call(command: list, log: Path) -> float:
    """Runs a program of the project; its CPU seconds. What it prints is in a file, which is there if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, *map(str, command)] if str(command[0]).endswith(".py") else [*map(str, command)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with open(log, "a") as out:
        done = subprocess.run(command, cwd=ROOT, stdout=out, stderr=out, check=False)
    if done.returncode:
        tail = "\n".join(log.read_text(errors="replace").strip().splitlines()[-12:])
        raise RuntimeError(f"`{shlex.join(command)}` failed; its last lines:\n{tail}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def log_of(folder: Path) -> Path:
    """What the programs of a run print."""
    return folder.with_name(f"{folder.name}.log")


def read_lines(file: Path) -> list[dict]:
    """A file of JSON lines."""
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def train(run: Run) -> float:
    """Makes the run's folder anew; its CPU seconds."""
    shutil.rmtree(run.folder, ignore_errors=True)
    log_of(run.folder).unlink(missing_ok=True)
    return call([*run.command, "--seed", run.seed, "--output-dir", run.folder], log_of(run.folder))


def measure(run: Run) -> dict:
    """Trains, and summarizes. Of DPO, the checkpoints answer prompts; of others, what `answers` asks for in the end."""
    found = {"cpu_seconds": round(train(run))}
    script = run.command[0].removesuffix(".py")
    if script == "dpo":
        add_answers(run.folder, policies_of(run.folder))
    found |= summarize(run, script)
    if "answers" in run.options:
        found["answers"] = {"reviews": read_reviews, "shells": read_shells}[run.options["answers"]](run.folder)
    return found


def summarize(run: Run, script: str) -> dict:
    """`start` and `end`, which is a mean over the last updates, or the last evaluation; and curves, to three digits."""
    lines = read_lines(run.folder / "metrics.jsonl")
    names = dict.fromkeys(name for line in lines for name in line)
    numbers = {name: [line[name] for line in lines if isinstance(line.get(name), int | float)] for name in names}
    numbers = {name: values for name, values in numbers.items() if values}
    short = lambda x, digits: float(f"{x:.{digits}g}") if isinstance(x, float) else x  # noqa: E731
    start, end = {}, {}
    for name, values in numbers.items():
        is_last = script in EVALUATED or name.startswith("eval/")
        start[name] = short(values[0], 5)
        end[name] = short(values[-1] if is_last else statistics.fmean(values[-LAST:]), 5)
    kept = run.options["curves"]
    axis, *metrics = kept if isinstance(kept, list) else kept[script]
    points = [line for line in lines if metrics[0] in line]
    curves = {name: [short(line.get(name), 3) for line in points] for name in (axis, *metrics)}
    return {"start": start, "end": end, "curves": curves}


# ---------------------------------------------------------------------------------------------------------------------
# Answers


def evaluate(policy: Path, *flags) -> dict[str, float]:
    """What tools/evaluate.py says of a policy of the toy world."""
    output = policy / "evaluation"
    shutil.rmtree(ROOT / output, ignore_errors=True)
    judges = "--reference toy/sft --reward-fn toy/gold_score.py:gold_score --device cpu".split()
    call(["tools/evaluate.py", policy, *judges, *flags, "--output-dir", output], log_of(output))
    figures = json.loads((ROOT / output / "evaluation.json").read_text())["figures"]
    names = {"gold": "toy/gold_score.py:gold_score", "kl": "kl", "length": "response_length", "eos_share": "eos_share"}
    return {short: float(f"{figures[name]['mean']:.5g}") for short, name in names.items()}


def read_reviews(folder: Path) -> dict[str, float]:
    """Gold score, KL to toy/sft, length, and the share that end, of five answers to each unseen prompt."""
    return evaluate(folder, "--num-generations", 5)


def policies_of(folder: Path) -> dict[int, Path]:
    """Step -> folder of a model, made of each checkpoint of a run on one process, which holds the weights alone."""
    policies = {}
    for checkpoint in sorted(folder.glob("checkpoints/step-*")):
        policy = folder / "policies" / checkpoint.name
        shutil.copytree(folder, policy, ignore=lambda *_: ["checkpoints", "policies", "samples", "model.safetensors"])
        (shards,) = checkpoint.glob("*.safetensors")
        weights = {name: x for name, x in load_file(shards).items() if name.startswith("model.")}
        weights = {name.removeprefix("model."): x for name, x in weights.items()}
        save_file(weights, policy / "model.safetensors", {"format": "pt"})
        policies[int(checkpoint.name.removeprefix("step-"))] = policy
    return policies


def add_answers(folder: Path, policies: dict[int, Path]) -> None:
    """Adds to metrics.jsonl what the answers of a policy of DPO are like, by the number of its step."""
    lines = read_lines(folder / "metrics.jsonl")
    names = {"gold": GOLD, "kl": "objective/kl", "eos_share": "val/eos_share", "length": "val/response_length"}
    for line in lines:
        if line["step"] in policies:
            found = evaluate(policies[line["step"]], "--dataset", "toy/data/preferences", "--num-prompts", 200)
            line |= {names[name]: x for name, x in found.items()}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_shells(folder: Path, n: int = 8) -> dict:
    """Of n answers to each unseen prompt of the shell game, the share that are right, and worked out, and their length
    in tokens; of likeliest answers, the share that are right; all of these also by the number of swaps."""
    torch.manual_seed(0)
    right_number = runpy.run_path("rewards/verifiers.py")["right_number"]
    is_worked = runpy.run_path("toy/shells/make.py")["worked"]
    policy, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    rows = read_lines(ROOT / "toy/shells/data/prompts/validation.jsonl")

    def answer(rows: list[dict], is_greedy: bool) -> list[str]:
        ids = tokenizer([row["prompt"] for row in rows], return_tensors="pt").input_ids  # all of one length
        options = {"do_sample": not is_greedy, "top_k": 0, "max_new_tokens": 16, "attention_mask": torch.ones_like(ids)}
        return tokenizer.batch_decode(policy.generate(ids, **options)[:, ids.shape[1] :], skip_special_tokens=True)

    many = [row for row in rows for _ in range(n)]
    texts = answer(many, False)
    right, worked = right_number(texts, [row["answer"] for row in many]), is_worked(texts)
    greedy = right_number(answer(rows, True), [row["answer"] for row in rows])
    length = [len(text.split()) + 1 for text in texts]

    def means(is_here) -> dict[str, float]:
        """Of the prompts that fit."""
        found = {
            name: statistics.fmean(x for x, row in zip(values, many) if is_here(row))
            for name, values in {"right": right, "worked": worked, "length": length}.items()
        }
        return found | {"greedy": statistics.fmean(x for x, row in zip(greedy, rows) if is_here(row))}

    by_swaps = {swaps: means(lambda row, swaps=swaps: row["swaps"] == swaps) for swaps in SWAPS}
    return means(lambda row: True) | {"by_swaps": by_swaps}
