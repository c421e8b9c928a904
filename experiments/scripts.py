"""What is kept of a run of a full script: its first and last metrics, its curves, and what its answers are like."""

import json
import math
import os
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from make_fork import apply
from record import GOLD, LAST, ROOT, Run, diff_of
from safetensors.torch import save_file

EVALUATED = ("sft", "reward_model", "dpo")  # on unseen texts, from time to time


def start(command: list, log: Path) -> resource.struct_rusage:
    """Runs a program of the project; what it used. What it prints is in a file, which is there if it fails."""
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, *map(str, command)] if str(command[0]).endswith(".py") else [*map(str, command)]
    with open(log, "a") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out)
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        tail = "\n".join(log.read_text(errors="replace").strip().splitlines()[-12:])
        raise RuntimeError(f"`{shlex.join(command)}` failed; its last lines:\n{tail}")
    return used


def call(command: list, log: Path) -> float:
    """The same; its CPU seconds."""
    used = start(command, log)
    return used.ru_utime + used.ru_stime


def log_of(folder: Path) -> Path:
    """What the programs of a run print."""
    return folder.with_name(f"{folder.name}.log")


def read_lines(file: Path) -> list[dict]:
    """A file of JSON lines."""
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def short(x, digits: int = 4):
    """A number with so many digits; other values as they are, and None for what is not finite."""
    if not isinstance(x, float):
        return x
    return float(f"{x:.{digits}g}") if math.isfinite(x) else None


def write_fork(run: Run) -> Path:
    """The script of a run with the diff that `fork` names; in its folder are links to what the script reads."""
    folder = ROOT / f"{run.folder}-fork"
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("toy", "rewards"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    file = folder / run.command[0]
    file.write_text(apply(diff_of(run), (ROOT / run.command[0]).read_text("utf-8")), "utf-8")
    return file


def train(run: Run) -> dict:
    """Trains, in a new folder; the command, its CPU seconds, and its peak memory. rewards/model.py reads `judge`."""
    shutil.rmtree(run.folder, ignore_errors=True)
    log_of(run.folder).unlink(missing_ok=True)
    command = [*run.command, "--seed", str(run.seed), "--output-dir", str(run.folder)]
    os.environ["REWARD_MODEL"] = run.options.get("judge", "toy/reward_model")
    used = start([write_fork(run), *command[1:]] if "fork" in run.options else command, log_of(run.folder))
    found = {"cpu_seconds": round(used.ru_utime + used.ru_stime), "peak_memory_mb": round(used.ru_maxrss / 2**10)}
    return {"command": shlex.join(["python", *command])} | found


def measure(run: Run) -> dict:
    """Trains, and summarizes. Of DPO, the checkpoints answer prompts; of others, what `answers` asks for in the end."""
    found = {"cpu_seconds": train(run)["cpu_seconds"]}
    script = run.command[0].removesuffix(".py")
    if script == "dpo":
        add_answers(run.folder, policies_of(run.folder))
    return add_judgements(found | summarize(run, script), run, run.folder)


def summarize(run: Run, script: str) -> dict:
    """`start` and `end`, which is a mean over the last updates, or the last evaluation; and curves, to three digits."""
    lines = read_lines(run.folder / "metrics.jsonl")
    names = dict.fromkeys(name for line in lines for name in line)
    numbers = {name: [line[name] for line in lines if isinstance(line.get(name), int | float)] for name in names}
    numbers = {name: values for name, values in numbers.items() if values}
    start, end = {}, {}
    for name, values in numbers.items():
        start[name] = short(values[0], 5)
        end[name] = short(values[-1] if script in EVALUATED else statistics.fmean(values[-LAST:]), 5)
    kept = run.options["curves"]
    axis, *metrics = kept if isinstance(kept, list) else kept[script]
    points = [line for line in lines if metrics[0] in line]
    curves = {name: [short(line.get(name), 3) for line in points] for name in (axis, *metrics)}
    return {"start": start, "end": end, "curves": curves}


# ---------------------------------------------------------------------------------------------------------------------
# Answers


def evaluate(policy: Path | str, output: Path, *flags) -> tuple[dict, list[dict]]:
    """What tools/evaluate.py says of a policy: its figures, and its answers."""
    shutil.rmtree(ROOT / output, ignore_errors=True)
    call(["tools/evaluate.py", policy, *flags, "--output-dir", output], log_of(output))
    figures = json.loads((ROOT / output / "evaluation.json").read_text("utf-8"))["figures"]
    return figures, read_lines(ROOT / output / "answers.jsonl")


def add_judgements(found: dict, run: Run, policy: Path) -> dict:
    """Adds what `answers` and `likeliest` ask for; at its end also under names of the scripts' former evaluations."""
    kind = run.options.get("answers")
    if kind:
        found["answers"] = {"reviews": read_reviews, "shells": read_shells}[kind](policy)
    if kind == "shells":
        found["end"] |= {"eval/accuracy": found["answers"]["greedy"], "eval/pass@1": found["answers"]["right"]}
    if run.options.get("likeliest"):
        gold, judge = "toy/gold_score.py:gold_score", "toy/reward_model"
        flags = ["--reward-fn", gold, judge, "--num-prompts", 64, "--temperature", 0, "--device", "cpu"]
        figures, _ = evaluate(policy, policy / "likeliest", *flags)
        ended = figures["eos_share"]["mean"]
        found["end"] |= {"eval/rewards/gold_score/mean": figures[gold]["mean"], "eval/eos_share": ended}
        found["end"]["eval/scores"] = figures[judge]["mean"] - (1 - ended)  # --missing-eos-penalty 1
    return found


def read_reviews(policy: Path, *flags) -> dict[str, float]:
    """Gold score, KL to toy/sft, length, and the share that end, of five answers to each unseen prompt."""
    judges = "--reference toy/sft --reward-fn toy/gold_score.py:gold_score --device cpu".split()
    figures, _ = evaluate(policy, policy / "evaluation", *judges, *(flags or ("--num-generations", 5)))
    names = {"gold": "toy/gold_score.py:gold_score", "kl": "kl", "length": "response_length", "eos_share": "eos_share"}
    return {name: short(figures[column]["mean"], 5) for name, column in names.items()}


def read_shells(policy: Path) -> dict:
    """Of eight answers to each unseen prompt of the shell game, the share that are right, and worked out, and their
    length in tokens; of likeliest answers, the share that are right; all of these also by the number of swaps."""
    right, worked = "rewards/verifiers.py:right_number", "toy/shells/make.py:worked"
    flags = ["--dataset", "toy/shells/data/prompts", "--response-length", 16, "--batch-size", 512, "--device", "cpu"]
    flags += ["--reward-fn", right, worked, "--num-generations"]
    _, sampled = evaluate(policy, policy / "evaluation", *flags, 8, "--temperature", 1)
    _, likeliest = evaluate(policy, policy / "likeliest", *flags, 1, "--temperature", 0)

    def means(swaps: range) -> dict[str, float]:
        """Of the prompts with so many swaps."""
        names = {"right": right, "worked": worked, "length": "response_length"}
        rows = [row for row in sampled if row["swaps"] in swaps]
        found = {name: statistics.fmean(row[column] for row in rows) for name, column in names.items()}
        return found | {"greedy": statistics.fmean(row[right] for row in likeliest if row["swaps"] in swaps)}

    return means(range(1, 9)) | {"by_swaps": {n: means(range(n, n + 1)) for n in range(1, 9)}}


def policies_of(folder: Path) -> dict[int, Path]:
    """Step -> folder of a model, made of each checkpoint of a run that trains nothing but the policy."""
    policies = {}
    for checkpoint in sorted(folder.glob("checkpoints/step-*.pt")):
        policy = folder / "policies" / checkpoint.stem
        shutil.copytree(folder, policy, ignore=lambda *_: ["checkpoints", "policies", "samples", "model.safetensors"])
        state = torch.load(checkpoint)
        weights = {name.removeprefix("model."): x for name, x in state["weights"].items()}
        save_file(weights, policy / "model.safetensors", {"format": "pt"})
        policies[state["step"]] = policy
    return policies


def add_answers(folder: Path, policies: dict[int, Path]) -> None:
    """Adds to metrics.jsonl what the answers of a policy of DPO are like, by the number of its step."""
    lines = read_lines(folder / "metrics.jsonl")
    names = {"gold": GOLD, "kl": "objective/kl", "eos_share": "val/eos_share", "length": "val/response_length"}
    for line in lines:
        if line["step"] in policies:
            found = read_reviews(policies[line["step"]], "--dataset", "toy/data/preferences", "--num-prompts", 200)
            line |= {names[name]: x for name, x in found.items()}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
