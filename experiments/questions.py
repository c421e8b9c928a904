"""Four questions: short files of lecture/ with a few lines changed, or other flags, on the toy world over five seeds.

    python experiments/questions.py          # 242 short runs, an hour on one thread; goes on where it stopped

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

from forks import LEARNED, QUESTIONS, ROOT, apply, complete, put_tables, read_diffs, run
from tables import OTHERS, OURS, draw_band, figure_of, markdown, number, until

OUTPUT = LEARNED / "questions.json"
TEACHER = ROOT / "runs/questions/teacher"
MINUTES = 0.2  # a run
SEEDS = (1, 2, 3, 4, 5)
GOAL = 0.9  # of right answers
GRPO = "lecture/grpo.py"
RLOO = "lecture/rloo.py"
SAMPLERS = {weights: f"--weights {weights}" for weights in ("bf16", "int8", "int4")}
SAMPLERS |= {"1 update old": "--age 1", "4 updates old": "--age 4", "16 updates old": "--age 16"}
CORRECTIONS = ("none", "clip", "tis")
FAR = ("int4", "4 updates old", "16 updates old")  # samplers that may need a correction
RATES = (0.05, 0.1, 0.2)
SIZES = (2, 4, 8, 16, 32)  # of groups
COLOURS = (OURS, OTHERS, "#b58900", "#5b8c3e", "#8e5ba6", "#444444")
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

    found.append(Arm("sampler", "the policy itself, none", GRPO, "Another sampler", "--total-episodes 3200"))
    for name, flags in SAMPLERS.items():
        for correction in CORRECTIONS if name in FAR else CORRECTIONS[:1]:
            flags_of_arm = f"--total-episodes 3200 {flags} --correction {correction}"
            found.append(Arm("sampler", f"{name}, {correction}", GRPO, "Another sampler", flags_of_arm))

    found.append(Arm("liar", "honest", GRPO, "A lying verifier", "--total-episodes 6400"))
    for rate in RATES:
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


# ---------------------------------------------------------------------------------------------------------------------
# The tables


def runs_of(results: dict, question: str, name: str) -> list[dict]:
    """The seeds of an arm."""
    return [run for run in results["runs"] if (run["question"], run["name"]) == (question, name)]


def mean_end(runs: list[dict], metric: str, digits: int = 2) -> str:
    """A cell: what the policies earn in the end."""
    return number([run["end"][metric] for run in runs], digits)


def mean_until(runs: list[dict], metric: str, axis: str = "episode", digits: int = 0) -> str:
    """A cell: where on an axis the mean of three points reaches the goal, and in how many seeds if not in all."""
    curves = [{axis: run["curves"][axis], metric: run["curves"][metric]} for run in runs]
    found = [until({"curves": curve}, metric, GOAL) for curve in curves]
    there = [x for x in found if x is not None]
    missing = f" ({len(there)} of {len(found)} seeds)" if len(there) < len(found) else ""
    return number(there, digits) + missing if there else "never"


def teacher_table(results: dict) -> str:
    """Of each way to learn: how soon, and how well in the end."""
    lines = [["", "episodes to .9 right", "CPU seconds to .9 right", "right in the end"], ["---", *["---:"] * 3]]
    for name in dict.fromkeys(arm.name for arm in arms() if arm.question == "teacher"):
        runs = runs_of(results, "teacher", name)
        times = ["", ""]
        if len(runs) > 1:
            times = [mean_until(runs, "right"), mean_until(runs, "right", "seconds", 1)]
        lines.append([name, *times, mean_end(runs, "right", 3)])
    return markdown(lines)


def of_policy(run: dict, age: int) -> dict:
    """The run with the rewards of the policy itself, which a sampler of that age earns so many updates later."""
    curves = run["curves"]
    return {"curves": {"episode": curves["episode"][: len(curves["episode"]) - age], "reward": curves["reward"][age:]}}


def sampler_table(results: dict) -> str:
    """Of each sampler: how far it is from the policy, and what that does without and with the corrections."""
    heads = ["sampler", "first ratio", "approxkl", *(f"to .9: {name}" for name in CORRECTIONS)]
    lines = [[*heads, *(f"right: {name}" for name in CORRECTIONS)], ["---", *["---:"] * 8]]
    for sampler in ("the policy itself", *SAMPLERS):
        names = CORRECTIONS if sampler in FAR else CORRECTIONS[:1]
        of = {name: runs_of(results, "sampler", f"{sampler}, {name}") for name in names}
        curves = [run["curves"] for run in of["none"]]
        ratio = statistics.fmean(x for curve in curves for x in curve["first_ratio"])
        distance = statistics.fmean(x for curve in curves for x in curve["approxkl"])
        line = [sampler, f"{ratio:.3f}", f"{distance:.1g}"]
        age = int(sampler.split()[0]) if sampler.endswith("old") else 0
        own = {name: [of_policy(run, age) for run in runs] for name, runs in of.items()}
        line += [mean_until(own[name], "reward") if name in own else "" for name in CORRECTIONS]
        lines.append(line + [mean_end(of[name], "right", 3) if name in of else "" for name in CORRECTIONS])
    return markdown(lines)


def liar_table(results: dict) -> str:
    """By how often it lies, and on which side."""
    sides = ("false +", "false −", "both")
    heads = ["lies", *(f"to .9: {side}" for side in sides), *(f"right: {side}" for side in sides)]
    lines = [heads, ["---", *["---:"] * 6]]
    honest = runs_of(results, "liar", "honest")
    lines.append(["none", *[mean_until(honest, "truth")] * 3, *[mean_end(honest, "right", 3)] * 3])
    for rate in RATES:
        of = [runs_of(results, "liar", f"{side} {rate:.0%}") for side in sides]
        lines.append([f"{rate:.0%}", *(mean_until(runs, "truth") for runs in of)])
        lines[-1] += [mean_end(runs, "right", 3) for runs in of]
    runs = runs_of(results, "liar", "both 20%, by prompt")
    lines.append(["20%, by prompt", "", "", mean_until(runs, "truth"), "", "", mean_end(runs, "right", 3)])
    return markdown(lines)


def groups_table(results: dict) -> str:
    """By the size of groups: each algorithm at equal episodes and at equal seconds."""
    heads = ["answers to a prompt", "GRPO, 3,200 episodes: right", "GRPO, 3 s: episodes", "right"]
    heads += ["RLOO, 1,024 episodes: gold score", "KL", "RLOO, 20 s: episodes", "gold score", "KL"]
    lines = [heads, ["---:"] * 9]
    for size in map(str, SIZES):
        line = [size]
        for script, metrics in {GRPO: {"right": 3}, RLOO: {"gold score": 2, "KL": 1}}.items():
            for limit in ("episodes", "seconds"):
                runs = runs_of(results, f"{limit} {script}", size)
                line += [number([run["episodes"] for run in runs], 0)] if limit == "seconds" else []
                line += [mean_end(runs, metric, digits) for metric, digits in metrics.items()]
        lines.append(line)
    return markdown(lines)


TABLES = {"teacher": teacher_table, "sampler": sampler_table, "liar": liar_table, "groups": groups_table}


# ---------------------------------------------------------------------------------------------------------------------
# The pictures


def finish(figure, name: str) -> None:
    """Legends, and the file."""
    for panel in figure.axes:
        if panel.get_legend_handles_labels()[0]:
            panel.legend(frameon=False, fontsize=8)
    figure.savefig(ROOT / f"docs/questions-{name}.png", dpi=100)


def draw_teacher(results: dict) -> None:
    """Right answers against episodes, and against seconds."""
    figure, axes = figure_of(1, 2, 9, 3.4)
    names = [arm.name for arm in arms() if arm.question == "teacher" and len(arm.seeds) > 1]
    for panel, axis in zip(axes[0], ("episode", "seconds")):
        for name, colour in zip(names, COLOURS):
            runs = [
                {"curves": {axis: run["curves"][axis], "right": run["curves"]["right"]}}
                for run in runs_of(results, "teacher", name)
            ]
            draw_band(panel, runs, "right", colour, name)
        panel.set_xlabel({"episode": "episodes", "seconds": "CPU seconds"}[axis], fontsize=9)
        panel.set_title("right answers to unseen prompts", fontsize=10)
    axes[0, 0].set_xscale("log"), axes[0, 1].set_xlim(0, 4)
    finish(figure, "teacher")


def draw_sampler(results: dict) -> None:
    """How far the samplers are from the policy, and what is learned from the worst two."""
    figure, axes = figure_of(1, 3, 13, 3.4)
    for name, colour in zip(SAMPLERS, COLOURS):
        draw_band(axes[0, 0], runs_of(results, "sampler", f"{name}, none"), "approxkl", colour, name)
    axes[0, 0].set_yscale("log"), axes[0, 0].set_title("approxkl, sampler and policy", fontsize=10)
    for panel, name in zip(axes[0, 1:], ("int4", "16 updates old")):
        draw_band(panel, runs_of(results, "sampler", "the policy itself, none"), "reward", "grey", "the policy itself")
        for correction, colour in zip(CORRECTIONS, COLOURS):
            draw_band(
                panel, runs_of(results, "sampler", f"{name}, {correction}"), "reward", colour, f"{name}, {correction}"
            )
        panel.set_title("right answers, of the sampler", fontsize=10), panel.set_ylim(0, 1)
    for panel in axes[0]:
        panel.set_xlabel("episodes", fontsize=9)
    finish(figure, "sampler")


def draw_liar(results: dict) -> None:
    """Right answers while a verifier lies in 20 % of the cases, and in the end against how often it lies."""
    figure, axes = figure_of(1, 2, 9, 3.4)
    honest = runs_of(results, "liar", "honest")
    draw_band(axes[0, 0], honest, "truth", "grey", "honest")
    for side, colour in zip(("false +", "false −", "both"), COLOURS):
        draw_band(axes[0, 0], runs_of(results, "liar", f"{side} 20%"), "truth", colour, f"{side} 20%")
        of = [honest, *(runs_of(results, "liar", f"{side} {rate:.0%}") for rate in RATES)]
        draw_ends(axes[0, 1], [0, *RATES], of, "right", colour, side)
    axes[0, 0].set_title("right answers while it learns", fontsize=10), axes[0, 0].set_xlabel("episodes", fontsize=9)
    axes[0, 1].set_title("right answers to unseen prompts in the end", fontsize=10)
    axes[0, 1].set_xlabel("share of lies", fontsize=9)
    finish(figure, "liar")


def draw_groups(results: dict) -> None:
    """What is learned in the end, against the size of groups."""
    figure, axes = figure_of(1, 2, 9, 3.4)
    limits = {GRPO: ("3,200 episodes", "3 CPU seconds"), RLOO: ("1,024 episodes", "20 CPU seconds")}
    for panel, (script, metric) in zip(axes[0], {GRPO: "right", RLOO: "gold score"}.items()):
        for limit, label, colour in zip(("episodes", "seconds"), limits[script], COLOURS):
            of = [runs_of(results, f"{limit} {script}", str(size)) for size in SIZES]
            draw_ends(panel, SIZES, of, metric, colour, label)
        panel.set_xscale("log", base=2), panel.set_xticks(SIZES, SIZES)
        panel.set_xlabel("answers to a prompt", fontsize=9), panel.set_title(f"{script}: {metric}", fontsize=10)
    finish(figure, "groups")


def draw_ends(panel, x: list[float], of: list[list[dict]], metric: str, colour: str, label: str) -> None:
    """What the policies of some arms earn in the end: mean and range of the seeds."""
    ends = [[run["end"][metric] for run in runs] for runs in of]
    panel.plot(x, [statistics.fmean(values) for values in ends], "o-", color=colour, label=label, markersize=4)
    panel.fill_between(x, *[[choose(values) for values in ends] for choose in (min, max)], color=colour, alpha=0.15)


def main() -> None:
    """Makes the runs that are missing, and writes tables and pictures."""
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
    results = complete(OUTPUT, diffs, wanted(), measure, MINUTES, args.list)
    put_tables(QUESTIONS, {name: table(results) for name, table in TABLES.items()})
    for draw in (draw_teacher, draw_sampler, draw_liar, draw_groups):
        draw(results)


if __name__ == "__main__":
    main()
