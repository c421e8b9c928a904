"""Four questions: short files of lecture/ with a few lines changed, or other flags, on the toy world over five seeds.

    python experiments/questions.py          # 220 short runs, an hour on one thread; goes on where it stopped
    python experiments/questions.py --draw   # only writes tables and pictures again

The changes are the diffs of docs/questions.md, each under a heading, its name; a run without one is of the file as it
is. Each run ends with answers to prompts that it has not seen.

What comes out: results/questions.json, to which each run is added as it ends, and the tables and pictures of that page.
A run whose diff has changed is made again.
"""

import argparse
import os
import statistics
import sys
import time
from typing import NamedTuple

from forks import LEARNED, QUESTIONS, ROOT, apply, complete, read_diffs, run

OUTPUT = LEARNED / "questions.json"
TEACHER = ROOT / "runs/questions/teacher"
MINUTES = 0.3  # a run
SEEDS = (1, 2, 3, 4, 5)
GOAL = 0.9  # of right answers
GRPO = "lecture/grpo.py"
RLOO = "lecture/rloo.py"
SIZES = (2, 4, 8, 16, 32)  # of groups
EVERY = 64  # episodes between two looks at what a learner from a teacher can do
METRICS = {"sampler": ("reward", "first_ratio", "approxkl"), "liar": ("truth",)}  # whose curves are kept


class Arm(NamedTuple):
    """What is run over all seeds: a row of a table."""

    question: str
    name: str
    script: str
    fork: str  # the heading of its diff, or "default"
    flags: str
    seeds: tuple[int, ...] = SEEDS


def arms() -> list[Arm]:
    """All of them."""
    found = []
    teacher = TEACHER.relative_to(ROOT)
    for name, flags in {"before": "", "the teacher": f" --model {teacher}"}.items():
        flags = f"--learning-rate 0 --total-episodes 64{flags}"  # nothing is learned, so that it is judged as it is
        found.append(Arm("teacher", name, GRPO, "default", flags, seeds=(1,)))
    of_teacher = f"--teacher {teacher} --num-generations 1 --batch-size 16 --total-episodes 3200"
    for name, fork, flags in (
        ("on-policy distillation", "On-policy distillation", of_teacher),
        ("the teacher's answers", "The teacher's answers", of_teacher),
        ("GRPO, batches of 16", "default", "--batch-size 16 --total-episodes 3200"),
        ("GRPO, batches of 64", "default", "--total-episodes 3200"),
    ):
        found.append(Arm("teacher", name, GRPO, fork, flags))

    samplers = {weights: f"--weights {weights}" for weights in ("bf16", "int8", "int4")}
    samplers |= {"1 update old": "--age 1", "4 updates old": "--age 4", "16 updates old": "--age 16"}
    found.append(Arm("sampler", "the policy itself", GRPO, "Another sampler", "--total-episodes 3200"))
    for name, flags in samplers.items():
        for correction in ("none", "clip", "tis"):
            flags_of_arm = f"--total-episodes 3200 {flags} --correction {correction}"
            found.append(Arm("sampler", f"{name}, {correction}", GRPO, "Another sampler", flags_of_arm))

    found.append(Arm("liar", "honest", GRPO, "A lying verifier", "--total-episodes 6400"))
    for rate in (0.05, 0.1, 0.2):
        for name, sides in {
            "false +": ["positives"],
            "false −": ["negatives"],
            "both": ["positives", "negatives"],
        }.items():
            flags = " ".join(f"--false-{side} {rate}" for side in sides)
            arm = Arm("liar", f"{name} {rate:.0%}", GRPO, "A lying verifier", f"--total-episodes 6400 {flags}")
            found.append(arm)
    found.append(found[-1]._replace(name="both 20%, by prompt", flags=f"{found[-1].flags} --by-prompt"))

    for script, flag, episodes, seconds in ((GRPO, "num-generations", 3200, 3), (RLOO, "rloo-k", 1024, 20)):
        for size in SIZES:
            flags = f"--{flag} {size} --total-episodes {episodes}"
            found.append(Arm(f"episodes {script}", str(size), script, "default", flags))
            flags = f"--{flag} {size} --batch-size {8 * size} --total-episodes 64000 --seconds {seconds}"
            found.append(Arm(f"seconds {script}", str(size), script, "Stop by the clock", flags))
    return found


def wanted() -> list[dict]:
    """The runs, by question, and then by seed."""
    runs = []
    for question in dict.fromkeys(arm.question for arm in arms()):
        own = [arm for arm in arms() if arm.question == question]
        runs += [(arm, seed) for seed in SEEDS for arm in own if seed in arm.seeds]
    return [dict(zip(arm._fields[:-1], arm)) | {"seed": seed} for arm, seed in runs]


def judge(names: dict, copies: int) -> dict[str, float]:
    """What the policy earns with the prompts of the validation split, each answered so many times."""
    import torch
    from datasets import load_dataset
    from make import gold_text_score

    args, tokenizer, forward = names["args"], names["tokenizer"], names["forward"]
    rows = [row for row in load_dataset(args.dataset, split="validation").to_list() for _ in range(copies)]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    prompts = tokenizer.pad(tokenizer(columns["prompt"]), return_tensors="pt")
    ids, attention_mask = prompts["input_ids"], prompts["attention_mask"]  # (B, P)
    P, stop = ids.shape[1], tokenizer.eos_token_id
    uniforms = torch.rand(len(ids), args.response_length, generator=torch.Generator().manual_seed(0))
    answers, logprobs = names["sample"](names["policy"], ids, attention_mask, uniforms, args.temperature, stop)
    mask, _ = names["response_mask"](answers, stop)  # (B, T)
    if "reward" in names:
        completions = [answer[real] for answer, real in zip(answers, mask)]
        texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
        return {"right": statistics.fmean(names["reward"](prompts=columns["prompt"], completions=texts, **columns))}
    ids, attention_mask = torch.cat([ids, answers], 1), torch.cat([attention_mask, mask], 1)  # (B, P+T)
    texts = tokenizer.batch_decode(
        [row[real] for row, real in zip(ids, attention_mask.bool())], skip_special_tokens=True
    )
    with torch.no_grad():
        logits = forward(names["reference"], ids, attention_mask).logits  # (B, P+T, V)
        ref_logprobs = names["response_logprobs"](logits, ids, P, args.temperature)  # (B, T)
    kl = ((logprobs - ref_logprobs) * mask).sum(1).mean().item()
    return {"gold score": statistics.fmean(map(gold_text_score, texts)), "KL": kl}


def measure(question: str, name: str, script: str, fork: str, flags: str, seed: int) -> dict:
    """A run: how many episodes it had, what its policy earns in the end, and curves of what the question asks for."""
    source = (ROOT / script).read_text("utf-8")
    source = apply(read_diffs(QUESTIONS.read_text("utf-8"))[fork], source) if fork != "default" else source
    begin = None  # the clock after the first update
    spent = 0.0  # CPU seconds of judging, which are not the run's

    def look(names: dict, stats: dict[str, float]) -> dict[str, float]:
        """An update's metrics. Of learners from a teacher also: how they do now, and when that is."""
        nonlocal begin, spent
        start = time.process_time()
        begin = begin or start
        episode = len(names["history"]) * names["args"].batch_size
        found = {}
        if question in METRICS:
            found = {"episode": episode} | {metric: stats[metric] for metric in METRICS[question]}
        if question == "teacher" and episode % EVERY == 0:
            found = {"episode": episode, "seconds": start - begin - spent, "right": judge(names, 1)["right"]}
            spent += time.process_time() - start
        return found

    updates, names = run(script, source, [*flags.split(), "--seed", str(seed)], look)
    metrics = dict.fromkeys(metric for update in updates for metric in update)
    curves = {metric: [round(update[metric], 5) for update in updates if metric in update] for metric in metrics}
    end = {metric: round(value, 5) for metric, value in judge(names, 2).items()}
    return {"episodes": len(updates) * names["args"].batch_size, "end": end, "curves": curves}


def make_teacher() -> None:
    """Trains the teacher, lecture/grpo.py without flags, unless it is there."""
    if not TEACHER.exists():
        source = (ROOT / GRPO).read_text("utf-8")
        run(GRPO, source, ["--output-dir", str(TEACHER)], lambda *_: {})


def main() -> None:
    """Makes the runs that are missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="only say how many runs are missing")
    args = parser.parse_args()
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    }  # before torch is imported
    os.chdir(ROOT)
    sys.path.append(str(ROOT / "toy"))  # for its make.py
    diffs = {"default": ""} | read_diffs(QUESTIONS.read_text("utf-8"))
    if not args.list:
        make_teacher()
    complete(OUTPUT, diffs, wanted(), measure, MINUTES, args.list)


if __name__ == "__main__":
    main()
