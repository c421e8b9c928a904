"""docs/findings/real.md: a run trains SmolLM2, and tools/evaluate.py judges its policy on unseen prompts."""

import os
import shlex
import shutil
import time
from collections import Counter

import real_pairs
from record import Run
from scripts import evaluate, policies_of, read_lines, short, train

SHOWN = 5  # answers that are kept


def measure(run: Run) -> dict:
    """Trains, unless the run is of the model as it is, and judges."""
    found, policy, reference = {"threads": os.environ.get("OMP_NUM_THREADS")}, run.options["model"], []
    shutil.rmtree(run.folder, ignore_errors=True)
    if run.command:
        begin = time.perf_counter()
        found |= train(run)
        found["seconds"] = round(time.perf_counter() - begin)
        lines = read_lines(run.folder / "metrics.jsonl")
        found["curves"] = {metric: [short(line.get(metric)) for line in lines] for metric in lines[-1]}
        policy, reference = str(run.folder), ["--reference", policy]
    if run.options.get("examined"):
        found["read"] = real_pairs.examine(run.folder)
    if run.options.get("watched"):
        found["curves"] |= watch(run, len(lines))
    if "judged" in run.options:
        found |= judge(run, policy, run.options["data"], reference)
    if "beside" in run.options:  # data of another task
        found["beside"] = judge(run, policy, run.options["beside"], [])["end"]
    if run.folder.exists() and not run.options.get("kept"):  # for a later run, which starts from it
        shutil.rmtree(run.folder)
    return found


def watch(run: Run, updates: int) -> dict[str, list]:
    """What the policies of the checkpoints make of unseen sums: a curve for each metric, None between checkpoints."""
    points = {}
    for step, policy in policies_of(run.folder).items():
        flags = ["--dataset", run.options["data"], *run.options["watched"].split(), "--num-generations"]
        one, _ = evaluate(policy, run.folder / "one", *flags, 1, "--temperature", 0)
        eight, _ = evaluate(policy, run.folder / "eight", *flags, 8, "--temperature", 1)
        right = next(iter(one))
        points[step] = {"eval/accuracy": one[right]["mean"], "eval/pass@1": eight[right]["mean"]}
        points[step]["eval/pass@8"] = eight["pass@8"]["mean"]
    names = ("eval/accuracy", "eval/pass@1", "eval/pass@8")
    return {name: [points.get(step, {}).get(name) for step in range(1, updates + 1)] for name in names}


def judge(run: Run, policy: str, data: str, reference: list[str]) -> dict:
    """Evaluates a policy on unseen prompts: the figures, some answers, and of several answers to each the rewards."""
    flags = ["--dataset", data, *run.options["judged"].split(), *reference]
    figures, answers = evaluate(policy, run.folder / "judged", *flags)
    every = max(1, len(answers) // SHOWN)
    shown = [[row["prompt"][-1]["content"], row["response"]] for row in answers[::every][:SHOWN]]
    found = {"judged": shlex.join(["python", "tools/evaluate.py", policy, *flags]), "end": figures, "answers": shown}
    if "answer" in answers[0]:
        found["commonest"] = max(Counter(row["answer"] for row in answers).values()) / len(answers)
    if "--num-generations" in flags:
        names = [x for x in answers[0] if x.startswith(("rewards/", "runs/")) or x in ("turns", "eos_share")]
        found["rewards"] = {name: [short(row[name]) for row in answers] for name in names}
    return found
