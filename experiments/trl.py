"""TRL beside ours: a training with the settings of our run, by benchmarks/run_trl.py, and judged by our evaluation."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from record import ROOT, Run
from scripts import add_answers, add_judgements, call, log_of, summarize
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
import dpo
import reward_model
import run_trl
import sft


def measure(run: Run) -> dict:
    """The settings of our run with the same flags, TRL's training, and what our evaluation says of its models."""
    script, output, log = run.command[0].removesuffix(".py"), run.folder, log_of(run.folder)
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    settings = write_settings(run, output / "ours")
    if script == "sft":
        save_start(settings, output / "start")
    python = run_trl.make_venv(run_trl.TRAINERS[script])
    variables = run_trl.KEEP_MEMORY if script == "dpo" else ()
    seconds = call(["env", *variables, python, "benchmarks/run_trl.py", script, settings, output], log)
    if script in run_trl.EVERY:
        judge_checkpoints(script, settings, output)
    if script == "dpo":
        add_answers(output, {step_of(folder): folder for folder in output.glob("checkpoint-*")})
    return add_judgements({"cpu_seconds": round(seconds)} | summarize(run, script), run, output / "model")


def write_settings(run: Run, folder: Path) -> Path:
    """args.json of our run, which is stopped once it has begun."""
    command = [sys.executable, *run.command, "--seed", str(run.seed), "--output-dir", str(folder)]
    with open(log_of(run.folder), "w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        while process.poll() is None and not (folder / "args.json").exists():
            time.sleep(1)
        time.sleep(1)  # for the rest of the file
        process.kill()
        process.wait()
    return (folder / "args.json").rename(run.folder / "args.json")


def args_of(script, settings: Path, **changes):
    """The settings as our script has them."""
    return script.Args(**json.loads(settings.read_text()) | changes)


def save_start(settings: Path, folder: Path) -> None:
    """The random weights with which our run of sft.py begins, for TRL."""
    model = sft.load_policy(args_of(sft, settings))
    model.save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)


def step_of(checkpoint: Path) -> int:
    """Its optimiser steps."""
    return int(checkpoint.name.split("-")[1])


def judge_checkpoints(algorithm: str, settings: Path, output: Path) -> None:
    """Writes metrics.jsonl: our evaluation of each checkpoint on the unseen texts."""
    script = {"sft": sft, "reward_model": reward_model, "dpo": dpo}[algorithm]
    args = args_of(script, settings, micro_batch_size=50)
    kind = AutoModelForSequenceClassification if algorithm == "reward_model" else AutoModelForCausalLM
    lines = []
    for checkpoint in sorted(output.glob("checkpoint-*"), key=step_of):
        model = kind.from_pretrained(checkpoint).eval()
        model.tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/sft")
        if algorithm == "sft":
            sft.set_stop_tokens(model, is_chat=False, temperature=1.0)
            texts = script.load_texts(args, model.tokenizer, args.dataset_test_split)
            found = script.evaluate(model, texts, args)
        else:
            model.config.reward_bias = 0.0  # which TRL does not have
            pairs = script.load_pairs(args, model.tokenizer, args.dataset_test_split)
            if algorithm == "dpo":
                _, reference = dpo.load_models(args)
                found = dpo.evaluate(model, reference, pairs, [], args)
            else:
                found = reward_model.evaluate(model, pairs, args)
        lines.append(json.dumps({"step": step_of(checkpoint)} | found) + "\n")
    (output / "metrics.jsonl").write_text("".join(lines))
