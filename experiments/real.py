"""docs/real.md: a run trains SmolLM2, and tools/evaluate.py judges its policy on unseen prompts."""

import json
import math
import os
import shlex
import shutil
import time
from collections import Counter
from pathlib import Path

import real_pairs
from record import ROOT, Run
from scripts import call, log_of, read_lines

SHOWN = 5  # answers that are kept


def short(x: float | None) -> float | None:
    """A number with four digits."""
    return float(f"{x:.4g}") if isinstance(x, float) and math.isfinite(x) else x


def measure(run: Run) -> dict:
    """Trains, unless the run is of the model as it is, and judges."""
    model, folder = run.options["model"], run.folder
    found = {"threads": os.environ.get("OMP_NUM_THREADS")}
    shutil.rmtree(folder, ignore_errors=True)
    log_of(folder).unlink(missing_ok=True)
    policy = model
    if run.command:
        command, begin = [*run.command, "--seed", str(run.seed), "--output-dir", str(folder)], time.perf_counter()
        found |= {"command": shlex.join(["python", *command]), "cpu_seconds": round(call(command, log_of(folder)))}
        found["seconds"] = round(time.perf_counter() - begin)
        lines = read_lines(folder / "metrics.jsonl")
        found["curves"] = {metric: [short(line.get(metric)) for line in lines] for metric in lines[-1]}
        policy = str(folder)
    if run.options.get("examined"):
        found["read"] = real_pairs.examine(folder)
    if "judged" in run.options:
        found |= judge(run, policy, run.options["data"], [] if policy == model else ["--reference", model], "judged")
    if "beside" in run.options:  # data of another task
        found["beside"] = judge(run, policy, run.options["beside"], [], "judged-beside")["end"]
    if folder.exists() and not run.options.get("kept"):  # for a later run, which starts from it
        shutil.rmtree(folder)
    return found


def judge(run: Run, policy: str, data: str, reference: list[str], name: str) -> dict:
    """Evaluates a policy on unseen prompts: the figures, some answers, and of several answers to each the rewards."""
    command = ["tools/evaluate.py", policy, "--dataset", data, *run.options["judged"].split(), *reference]
    command += ["--output-dir", str(run.folder / name)]
    begin = time.perf_counter()
    call(command, log_of(run.folder))
    found = {"judged": shlex.join(["python", *command]), "judged_seconds": round(time.perf_counter() - begin)}
    found["end"] = json.loads((ROOT / Path(command[-1], "evaluation.json")).read_text())["figures"]
    answers = read_lines(ROOT / command[-1] / "answers.jsonl")
    every = max(1, len(answers) // SHOWN)
    found["answers"] = [[row["prompt"][-1]["content"], row["response"]] for row in answers[::every][:SHOWN]]
    if "answer" in answers[0]:
        found["commonest"] = max(Counter(row["answer"] for row in answers).values()) / len(answers)
    if "--num-generations" in command:
        names = [x for x in answers[0] if x.startswith(("rewards/", "runs/")) or x in ("turns", "eos_share")]
        found["rewards"] = {name: [short(row[name]) for row in answers] for name in names}
    return found
