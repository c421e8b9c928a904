"""Every script on a real chat model, SmolLM2-135M-Instruct, on a laptop: the figures of docs/real.md.

    python tools/smollm2.py models/smollm2                       # the model, unless you load it from the hub
    python tools/smollm2.py models/smollm2-8 --layers 8          # what reward models start from
    python experiments/real.py --list                            # all runs, and which are not on record yet
    python experiments/real.py --runs "grpo" --seeds 1 2 3       # some of them
    python experiments/real.py --tables                          # the tables and the picture of the page

A run is one of the scripts with the flags below, and then tools/evaluate.py on prompts that it was not trained on, both
as subprocesses. As it ends, a line is added to results/real.jsonl: both commands, seconds, what was logged, the figures
of the evaluation and some of its answers. Runs on record are left out; to take one again, delete its line.
"""

import argparse
import json
import math
import os
import random
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))
from common import LEARNED, ROOT, describe_machine, describe_ours, figure_of
from forks import put_tables
from tables import markdown, number

OUTPUT = LEARNED / "real.jsonl"
PAGE = ROOT / "docs/real.md"
RUNS = ROOT / "runs/real"
DATA = RUNS / "data"
THINGS = (
    "a river, my bicycle, the moon, a teacher, winter, a violin, bread, a storm, the desert, my neighbour, the post, "
    "a dog, the dentist, Monday, an old house, a garden, "  # those that are not trained on
    "the sea, a train, the library, a cat, coffee, rain, a mountain, the night, a bridge, my sister, a hospital, "
    "music, a market, the forest, a clock, a letter, summer, a farm, the airport, a bus, an island, school, a horse, "
    "my boss, traffic, the theatre, an apple, a war, a wedding, the bank, a bird, fog, my uncle, a hotel, a knife, "
    "homework, the kitchen, an exam, the weather, a broken window"
)
SHOWN = 5  # answers that are kept
FORMS = (  # requests for an opinion
    "Write one sentence about how you feel about {}.",
    "What do you think about {}? Answer in one sentence.",
    "Tell me in one sentence how you like {}.",
    "Give your opinion of {} in one sentence.",
    "In one sentence, is {} good or bad, and why?",
    "Write a review of {} in one sentence.",
    "Tell a friend about {} in one sentence.",
    "Describe {} with feeling, in one sentence.",
)
SUMS = "--reward-fn rewards/verifiers.py:last_number --response-length 24"
GRPO = f"{SUMS} --bf16 --total-episodes"
PAGED = "the command of the page"  # as it is, with its one evaluation and its checkpoints
WATCHED = "--eval-steps 10 --num-eval-prompts 60"  # pass@1 and pass@8 of unseen sums along the run


class Arm(NamedTuple):
    """What is run over some seeds: a script with its flags, and with which flags its policy is judged."""

    script: str
    data: str  # the folder under DATA
    flags: str
    judged: str
    seeds: tuple[int, ...] = (1,)
    beside: str = ""  # data of another task, on which the policy is judged, too
    base: str = ""  # the model to start from, if it is not that of --model
    is_kept: bool = False  # for a later one, which starts from it


GOLD = "rewards/sentiment.py:friendly_sentence"
LEXICON = "rewards/sentiment.py:polarity"
JUDGED = f"{SUMS} --temperature 0"
GAME = "--env rewards/higher_or_lower.py:Game --response-length 64"
PLAYED = f"{GAME} --split train --temperature 1 --num-generations 16 --dtype bfloat16"
REWARD_MODEL = "runs/real/reward-model-1"
SMALL = "models/smollm2-8"  # the first 8 layers
ANSWERS = "--response-length 32 --temperature 0.8"
SCORED = f"{ANSWERS} --dtype bfloat16 --reward-fn {GOLD} {LEXICON}"
EACH = {"train": 8, "validation": 8}  # answers to a prompt that pairs are made of
READ = "the answers to unseen prompts"
FRIENDLY = f"{SCORED} {REWARD_MODEL} --num-generations 2"
ONLINE = f"{ANSWERS} --bf16 --batch-size 64 --num-ppo-epochs 2 --total-episodes 768 --learning-rate 2e-5"
ONLINE += f" --reward-model {REWARD_MODEL} --reward-fn reward_model {GOLD} {LEXICON} --reward-weights 1 0 0"
PPO = f"{ONLINE} --critic-learning-rate 5e-5 --kl-coef"
RLOO = f"{ONLINE} --rloo-k 8 --kl-coef"
PAIRS = "--bf16 --dataset-train-split train[:1280]"
CUT = "--eos-dropout 0.5"  # half of the answers in a rollout are cut off
SWEEP = {4: "1e-4 2e-4", 8: "5e-5 1e-4 2e-4 4e-4", 16: "1e-4 2e-4 4e-4", 64: "1e-4 4e-4 8e-4"}  # batch: rates
KL_COEFS = {"0": (1,), "0.02": (1, 2, 3), "0.05": (1,)}  # with their seeds
TASK = "--bf16 --response-length 16 --reward-fn rewards/reasoning.py:right"
TASK_JUDGED = "--response-length 16 --temperature 0 --reward-fn rewards/reasoning.py:right"
TASKS = {  # of recipes/tasks.py, each with its neighbour
    "letters": "letter_counting --max-words 5",
    "letters in longer texts": "letter_counting --min-words 8 --max-words 12",
    "gcd": "gcd --max-value 50",
    "lcm": "lcm --max-value 20",
    "backward": "spell_backward --max-word-len 4",
    "longer words backward": "spell_backward --min-word-len 5 --max-word-len 7",
}
NEIGHBOURS = dict(zip(list(TASKS)[::2], list(TASKS)[1::2]))
ARMS = {
    "before": Arm("", "sums", "", JUDGED),
    "grpo": Arm("grpo.py", "sums", f"{GRPO} 3200 {WATCHED}", JUDGED, seeds=(1, 2, 3), is_kept=True),
    PAGED: Arm("grpo.py", "sums", f"{GRPO} 2880", JUDGED, seeds=(1, 2, 3)),
    "before, watched": Arm("grpo.py", "sums", f"{GRPO} 64 {WATCHED} --learning-rate 1e-9", ""),
    "30 updates at 2e-5": Arm("grpo.py", "sums", f"{GRPO} 1920 --learning-rate 2e-5", JUDGED),
    "1e-5": Arm("grpo.py", "sums", f"{GRPO} 3200 {WATCHED} --learning-rate 1e-5", JUDGED, seeds=(1, 2, 3)),
    "2e-5": Arm("grpo.py", "sums", f"{GRPO} 3200 {WATCHED} --learning-rate 2e-5", JUDGED, seeds=(1, 2, 3)),
    "5e-5": Arm("grpo.py", "sums", f"{GRPO} 3200 {WATCHED} --learning-rate 5e-5", JUDGED),
    "reward model": Arm("reward_model.py", "pairs", f"{PAIRS} {CUT}", READ, (1, 2, 3), is_kept=True, base=SMALL),
    "reward model, none cut off": Arm("reward_model.py", "pairs", PAIRS, READ, (1, 2, 3), base=SMALL),
    **{
        f"reward model, {rate}, batch {batch}": Arm(
            "reward_model.py", "pairs", f"{PAIRS} {CUT} --learning-rate {rate} --batch-size {batch}", "", base=SMALL
        )
        for batch, rates in SWEEP.items()
        for rate in rates.split()
    },
    "reward model, 320 pairs": Arm(
        "reward_model.py", "pairs", f"--bf16 {CUT} --dataset-train-split train[:320]", READ, base=SMALL
    ),
    "reward model, 2,560 pairs": Arm("reward_model.py", "pairs", f"--bf16 {CUT}", READ, base=SMALL),
    "reward model, all layers": Arm("reward_model.py", "pairs", f"{PAIRS} {CUT}", READ),
    "before, opinions": Arm("", "opinions", "", FRIENDLY),
    **{f"ppo, {k}": Arm("ppo.py", "opinions", f"{PPO} {k}", FRIENDLY, seeds) for k, seeds in KL_COEFS.items()},
    **{f"rloo, {k}": Arm("rloo.py", "opinions", f"{RLOO} {k}", FRIENDLY, seeds) for k, seeds in KL_COEFS.items()},
    "grpo, 0.02": Arm("grpo.py", "opinions", f"{ONLINE} --beta 0.02 --missing-eos-penalty 1", FRIENDLY),
    "dpo": Arm("dpo.py", "pairs", PAIRS, FRIENDLY),
    "sft on the best of 4": Arm("sft.py", "best", "--bf16", FRIENDLY),
    **{
        f"sft, {rate}, batch {batch}": Arm("sft.py", "best", f"--bf16 --learning-rate {rate} --batch-size {batch}", "")
        for batch, rates in {4: "1e-5 2e-5 5e-5 1e-4", 16: "2e-5 5e-5 1e-4", 64: "2e-5 1e-4"}.items()
        for rate in rates.split()
    },
    **{
        f"dpo, {rate}": Arm("dpo.py", "pairs", f"{PAIRS} --learning-rate {rate}", FRIENDLY) for rate in ("2e-6", "4e-5")
    },
    "before, game": Arm("", "game", "", PLAYED),
    "game": Arm("grpo.py", "game", f"{GAME} --bf16 --batch-size 32 --total-episodes 960 --learning-rate 2e-5", PLAYED),
}
for task, neighbour in NEIGHBOURS.items():
    ARMS[f"before, {task}"] = Arm("", task, "", TASK_JUDGED, beside=neighbour)
    ARMS[task] = Arm("grpo.py", task, f"{TASK} --total-episodes 1536", TASK_JUDGED, (1, 2, 3), neighbour)


def make_data() -> None:
    """The prompts, in DATA: a folder for each task, with a file for each split."""
    numbers = range(2, 20)
    pairs = [(a, b) for a in numbers for b in numbers if a <= b]
    random.Random(0).shuffle(pairs)
    unseen, seen = pairs[:60], pairs[60:]  # of a sum that is unseen, the other order is unseen, too
    seen += [(b, a) for a, b in seen if a != b]
    for split, sums in {"train": sorted(seen), "validation": sorted(unseen)}.items():
        rows = [{"prompt": chat(f"What is {a} + {b}?"), "answer": a + b} for a, b in sums]
        write(DATA / "sums" / f"{split}.jsonl", rows)

    for name, words in TASKS.items():
        task, *settings = words.split()
        if not (DATA / slug(name)).exists():
            command = ["recipes/tasks.py", task, str(DATA / slug(name)), *settings]
            call([*command, "--instruction", "direct", "--examples", "3", "--size", "1000"], RUNS / "tasks.log")

    things = THINGS.split(", ")
    for split, some in {"validation": things[:16], "train": things[16:]}.items():
        system = {"role": "system", "content": ""}  # else the template adds one of 16 tokens
        rows = [
            {"prompt": [system, *chat(form.format(thing))], "thing": thing.split()[-1]}
            for thing in some
            for form in FORMS
        ]
        write(DATA / "opinions" / f"{split}.jsonl", rows)

    ask = "number from 1 to 15. What is it?"
    turns = [f"I think of a {ask}", "3", "Higher.", "12", "Lower.", "7", f"Right! Another {ask}"]
    shown = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    write(DATA / "game" / "train.jsonl", [{"prompt": shown, "number": number} for number in range(1, 16)])


def answers_of(model: str, split: str) -> list[dict]:
    """Answers of the model to the prompts of a split, with their scores; sampled once."""
    where = RUNS / f"answers-{split}"
    if not (where / "answers.jsonl").exists():
        shutil.rmtree(where, ignore_errors=True)
        flags = f"--split {split} {SCORED} --num-generations {EACH[split]} --output-dir {where}"
        call(
            ["tools/evaluate.py", model, "--dataset", str(DATA / "opinions"), *flags.split()], where.with_suffix(".log")
        )
    return [json.loads(line) for line in (where / "answers.jsonl").read_text().splitlines()]


def make_pairs(model: str) -> None:
    """Preference pairs, in DATA. Answers to the same prompt are compared: with the next one for training (each answer
    is in two pairs), or two by two for validation. The higher gold score is preferred with the odds exp(20 d) to 1,
    where d is the difference (Bradley and Terry)."""
    draw = random.Random(0)
    for split, n in EACH.items():
        answers = answers_of(model, split)
        groups = [answers[i : i + n] for i in range(0, len(answers), n)]
        twos = [
            (group[i], group[(i + 1) % n])
            for group in groups
            for i in range(0, n, {"train": 1, "validation": 2}[split])
        ]
        pairs = []
        for a, b in twos:
            if draw.random() > 1 / (1 + math.exp(-20 * (a[GOLD] - b[GOLD]))):
                a, b = b, a
            texts = {side: said(x["response"]) for side, x in [("chosen", a), ("rejected", b)]}
            pairs.append({"prompt": a["prompt"]} | texts)
        draw.shuffle(pairs)
        write(DATA / "pairs" / f"{split}.jsonl", pairs)


def read_answers(reward_model: str, answers: list[dict]) -> list[float]:
    """The reward of each answer, which ends with its stop token if it ended by itself."""
    sys.path.append(str(ROOT / "tools"))
    import evaluate  # imports torch

    judge = evaluate.make_reward(reward_model, evaluate.Args(reward_model))
    texts = [
        evaluate.Answer(row, prompt="", prompt_ids=[], text=row["response"], ids=[], ended=bool(row["eos_share"]))
        for row in answers
    ]
    return [reward for i in range(0, len(texts), 64) for reward in judge(texts[i : i + 64])]


def examine(answers: list[dict], rewards: list[float]) -> dict:
    """What a reward model makes of sampled answers: how often the one with the higher gold score gets the higher
    reward, among all answers to a prompt; how much more those get that ended by themselves; and the means of the best
    of n answers by the reward."""
    n = EACH["validation"]
    are_right = []
    best = {}
    for i in range(0, len(answers), n):
        for j, k in combinations(range(i, i + n), 2):
            difference = answers[j][GOLD] - answers[k][GOLD]
            are_right += [difference * (rewards[j] - rewards[k]) > 0] if difference else []
        for size in (1, 2, 4, 8):
            for start in range(i, i + n, size):
                one = max(range(start, start + size), key=rewards.__getitem__)
                best.setdefault(size, []).append((answers[one][GOLD], answers[one][LEXICON], rewards[one]))
    ended, cut_off = (
        statistics.fmean(x for x, answer in zip(rewards, answers) if answer["eos_share"] == end) for end in (1, 0)
    )
    means = {size: [short(statistics.fmean(column)) for column in zip(*some)] for size, some in best.items()}
    return {"right": short(statistics.fmean(are_right)), "ended": short(ended - cut_off), "best of": means}


def make_best(model: str) -> None:
    """The best of four answers to each prompt by the reward model, in DATA: what sft.py trains on."""
    for split, n in EACH.items():
        answers = [answer for i, answer in enumerate(answers_of(model, split)) if i % n < 4]
        rewards = read_answers(REWARD_MODEL, answers)
        best = [max(range(i, i + 4), key=rewards.__getitem__) for i in range(0, len(answers), 4)]
        rows = [{"prompt": answers[i]["prompt"], "completion": said(answers[i]["response"])} for i in best]
        write(DATA / "best" / f"{split}.jsonl", rows)


def said(text: str) -> list[dict]:
    """An answer as a conversation."""
    return [{"role": "assistant", "content": text}]


def slug(name: str) -> str:
    """A name as that of a folder."""
    return name.replace(" ", "-")


def chat(text: str) -> list[dict]:
    """A prompt as a conversation, which the scripts put through the model's chat template."""
    return [{"role": "user", "content": text}]


def write(file: Path, rows: list[dict]) -> None:
    """A file of JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_record() -> list[dict]:
    """The runs on record."""
    return [json.loads(line) for line in OUTPUT.read_text().splitlines()] if OUTPUT.exists() else []


def call(command: list[str], log: Path) -> dict[str, float]:
    """Runs it, a script of ours by this Python; what it took. Its output goes to a file."""
    command = [sys.executable, *command] if command[0].endswith(".py") else command
    print("$", shlex.join(command), flush=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    with log.open("a") as file:
        done = subprocess.run(command, cwd=ROOT, stdout=file, stderr=file)
    if done.returncode:
        sys.exit(f"it failed: see {log}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": round(time.perf_counter() - start), "cpu_seconds": round(cpu_seconds)}


def short(x: float | None) -> float | None:
    """A number with four digits."""
    return float(f"{x:.4g}") if isinstance(x, float) and math.isfinite(x) else x


def measure(name: str, seed: int, model: str) -> dict:
    """A run: trains, judges, and tells."""
    arm = ARMS[name]
    folder = RUNS / f"{slug(name)}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    log = folder.parent / f"{folder.name}.log"
    log.unlink(missing_ok=True)
    data = str((DATA / slug(arm.data)).relative_to(ROOT))
    output = str(folder.relative_to(ROOT))
    result = {"run": name, "seed": seed, **describe_ours(ROOT), "date": time.strftime("%Y-%m-%d")}
    result |= {"machine": describe_machine(), "threads": os.environ.get("OMP_NUM_THREADS")}
    base = arm.base or model
    judged = model
    if arm.data == "pairs":
        make_pairs(model)
    if arm.data == "best":
        make_best(model)
    if arm.script:
        evaluates = WATCHED in arm.flags or arm.data in ("pairs", "best")
        split = "validation" if evaluates else "none"
        bare = "" if name == PAGED else f"--dataset-test-split {split} --save-steps 100000"
        flags = f"{arm.flags} {bare} --seed {seed} --output-dir {output}"
        command = [arm.script, "--model", base, "--dataset", data, *flags.split()]
        if arm.script != "reward_model.py":
            judged = f"{output}/merged" if "--lora-r" in arm.flags else output
        result |= {"command": shlex.join(["python", *command])} | call(command, log)
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        result["curves"] = {metric: [short(line.get(metric)) for line in lines] for metric in lines[-1]}
    if arm.judged == READ:
        answers = answers_of(model, "validation")
        result["read"] = examine(answers, read_answers(output, answers))
    elif arm.judged:
        result |= judge(arm, judged, model, f"{output}/judged", log)
    if not arm.is_kept:
        shutil.rmtree(folder)
    return result


def judge(arm: Arm, policy: str, model: str, folder: str, log: Path) -> dict:
    """Evaluates a policy on unseen prompts: the figures, some answers, and the scores of all."""
    data = DATA / ("opinions" if arm.data in ("pairs", "best") else slug(arm.data))
    command = ["tools/evaluate.py", policy, "--dataset", str(data.relative_to(ROOT)), *arm.judged.split()]
    command += ["--reference", model] if policy != model else []
    command += ["--output-dir", folder]
    seconds = call(command, log)
    result = {"judged": shlex.join(["python", *command]), "judged_seconds": seconds["seconds"]}
    result["end"] = json.loads((ROOT / folder / "evaluation.json").read_text())["figures"]
    answers = [json.loads(line) for line in (ROOT / folder / "answers.jsonl").read_text().splitlines()]
    every = max(1, len(answers) // SHOWN)
    result["answers"] = [[row["prompt"][-1]["content"], row["response"]] for row in answers[::every][:SHOWN]]
    if "answer" in answers[0]:
        counts = Counter(row["answer"] for row in answers)
        result["commonest"] = max(counts.values()) / len(answers)
    if "--num-generations" in arm.judged:
        names = [x for x in answers[0] if x.startswith(("rewards/", "runs/")) or x in ("turns", "eos_share")]
        result["rewards"] = {name: [short(row[name]) for row in answers] for name in names}
    if arm.beside:
        other = judge(arm._replace(data=arm.beside, beside=""), policy, policy, f"{folder}-beside", log)
        result["beside"] = other["end"]
    return result


# ---------------------------------------------------------------------------------------------------------------------
# The tables and the picture


def runs_of(record: list[dict], name: str) -> list[dict]:
    """The seeds of an arm."""
    return sorted((run for run in record if run["run"] == name), key=lambda run: run["seed"])


def of_end(runs: list[dict], metric: str, digits: int) -> str:
    """A cell: what the evaluations found; of one run, the standard error over its prompts."""
    found = [run["end"][metric] for run in runs if metric in run.get("end", {})]
    if len(found) == 1:
        return " ± ".join(f"{x:.{digits}f}" for x in found[0].values()).replace("-", "−")
    return number([x["mean"] for x in found], digits)


def of_curves(runs: list[dict], metric: str, digits: int, part: slice = slice(None)) -> str:
    """A cell: the mean over some updates."""
    return number([statistics.fmean(run["curves"][metric][part]) for run in runs], digits)


def sums_table(record: list[dict]) -> str:
    """Before and after, on the unseen sums."""
    right = "rewards/verifiers.py:last_number"
    heads = ["", "right", "ended by itself", "tokens", "KL", "GB"]
    lines = [heads, ["---", *["---:"] * 5]]
    rates = ("1e-5", "2e-5", "5e-5")
    for name in ("before", PAGED, "grpo", *rates, "30 updates at 2e-5"):
        runs = runs_of(record, name)
        titles = {PAGED: f"45 updates, {len(runs)} seeds", "grpo": f"50 updates, {len(runs)}"}
        titles |= {x: f"50 at {x}, {len(runs)}" for x in rates}
        line = [titles.get(name, name)]
        for metric, digits in {right: 2, "eos_share": 2, "response_length": 1, "kl": 1}.items():
            line.append(of_end(runs, metric, digits) if name != "before" or metric != "kl" else "0")
        trained = [run for run in runs if "curves" in run]
        line.append(number([max(run["curves"]["perf/peak_memory_mb"]) / 1024 for run in trained], 1))
        lines.append(line)
    return markdown(lines)


def unseen(record: list[dict]) -> dict[str, dict[int, list[float]]]:
    """Metric -> updates -> seeds, of the evaluations on unseen sums along the runs; before training after 0."""
    found = {metric: {} for metric in ("eval/accuracy", "eval/pass@1", "eval/pass@8")}
    for run in record:
        if run["run"] in ("grpo", "before, watched"):
            for metric, of in found.items():
                for update, x in enumerate(run["curves"].get(metric, []), 1):
                    if x is not None:
                        of.setdefault(update if run["run"] == "grpo" else 0, []).append(x)
    return found


def unseen_table(record: list[dict]) -> str:
    """pass@1 and pass@8 along the runs."""
    found = unseen(record)
    updates = sorted(found["eval/pass@1"])
    lines = [["updates", *map(str, updates)], ["---", *["---:"] * len(updates)]]
    titles = ("likeliest answer right", "pass@1: of eight answers", "pass@8: at least one of the eight")
    for title, of in zip(titles, found.values()):
        lines.append([title, *(number(of[update], 2) for update in updates)])
    return markdown(lines)


def curve_table(record: list[dict]) -> str:
    """Over the training, the mean of the seeds: right answers, silent groups, entropy, tokens."""
    runs = runs_of(record, "grpo")
    updates = {"1": slice(1)} | {f"{n - 2} to {n}": slice(n - 3, n) for n in (5, 10, 20, 30, 40, 50)}
    lines = [["updates", *updates], ["---", *["---:"] * len(updates)]]
    for title, metric, digits in (
        ("right answers in the batch", "reward", 2),
        ("groups that all score alike", "frac_reward_zero_std", 2),
        ("entropy of a token, nats", "entropy", 2),
        ("tokens of an answer", "completions/mean_length", 1),
    ):
        cells = [of_curves(runs, metric, digits, part) for part in updates.values()]
        lines.append([title, *cells])
    return markdown(lines)


def answers_table(record: list[dict], names: tuple[str, str]) -> str:
    """What the policy of seed 1 says to five unseen prompts, before and after."""
    lines = [["", "before", "after"], ["---"] * 3]
    before, after = (runs_of(record, name)[0]["answers"] for name in names)
    for (prompt, old), (_, new) in zip(before, after):
        lines.append([prompt, *(text.replace("\n", " ⏎ ").replace("|", "\\|") for text in (old, new))])
    return markdown(lines)


def minutes(runs: list[dict]) -> str:
    """A cell: CPU minutes of training."""
    return number([run["cpu_seconds"] / 60 for run in runs], 0)


def memory(runs: list[dict]) -> str:
    """A cell: GB of training."""
    return number([max(run["curves"]["perf/peak_memory_mb"]) / 1024 for run in runs], 1)


def by_prompt(run: dict, name: str, judge: Callable[[list], float] = statistics.fmean) -> list[float]:
    """For each of the 128 unseen prompts, the mean of its answers."""
    values = run["rewards"][name]
    n = len(values) // 128
    return [judge(values[i : i + n]) for i in range(0, len(values), n)]


def pairs_table(record: list[dict]) -> str:
    """Reward models."""
    heads = [
        "",
        "seeds",
        "unseen pairs right",
        "answers as sampled",
        "ends less cut off",
        "best of 8",
        "CPU minutes",
        "GB",
    ]
    lines = [heads, ["---", *["---:"] * 7]]
    titles = {"reward model": "1,280 pairs, 8 layers", "reward model, none cut off": "the same without `--eos-dropout`"}
    titles |= {"reward model, 320 pairs": "320 pairs", "reward model, 2,560 pairs": "2,560 pairs"}
    titles |= {"reward model, all layers": "1,280 pairs, all 30 layers"}
    for name, title in titles.items():
        runs = runs_of(record, name)
        if runs:
            line = [title, str(len(runs)), number([run["curves"]["eval/accuracy"][-1] for run in runs], 3)]
            line += [
                number([run["read"]["right"] for run in runs], 3),
                number([run["read"]["ended"] for run in runs], 2),
            ]
            lines.append(
                [*line, number([run["read"]["best of"]["8"][0] for run in runs], 3), minutes(runs), memory(runs)]
            )
    return markdown(lines)


def sweep_table(record: list[dict]) -> str:
    """Unseen pairs right, by batch and rate."""
    rates = ("5e-5", "1e-4", "2e-4", "4e-4", "8e-4")
    lines = [["pairs a step", "steps", *rates], ["---:"] * 7]
    for batch in SWEEP:
        runs = [runs_of(record, f"reward model, {rate}, batch {batch}") for rate in rates]
        cells = [number([run["curves"]["eval/accuracy"][-1] for run in some], 3) for some in runs]
        lines.append([str(batch), str(1280 // batch), *cells])
    return markdown(lines)


def policies_table(record: list[dict]) -> str:
    """The policies, on unseen prompts."""
    heads = ["", "seeds", "gold score", "more than before", "lexicon", "reward", "KL", "ended", "CPU minutes", "GB"]
    lines = [heads, ["---", *["---:"] * 9]]
    (before,) = runs_of(record, "before, opinions")
    for name in (
        "before, opinions",
        "best",
        "sft on the best of 4",
        "dpo",
        *(x for x in ARMS if x[:4] in ("ppo,", "rloo", "grpo")),
    ):
        if name == "best":
            runs = runs_of(record, "reward model")
            cells = [number([run["read"]["best of"]["8"][i] for run in runs], 3 - (i > 0)) for i in range(3)]
            kl = f"{math.log(8) - 7 / 8:.1f}"
            lines.append(["best of 8", str(len(runs)), cells[0], "", *cells[1:], kl, "", "", ""])
            continue
        runs = runs_of(record, name)
        if not runs or name == "grpo":
            continue
        gains = [[y - x for x, y in zip(by_prompt(before, GOLD), by_prompt(run, GOLD))] for run in runs]
        means = [statistics.fmean(gain) for gain in gains]
        error = (
            statistics.stdev(gains[0]) / 128**0.5 if len(gains) == 1 else statistics.stdev(means) / len(means) ** 0.5
        )
        gain = f"{statistics.fmean(means):+.3f} ± {error:.3f}"
        cells = [of_end(runs, metric, 2).split(" ± ")[0] for metric in (LEXICON, REWARD_MODEL)]
        line = [name.partition(",")[0] if name.startswith("before") else name, str(len(runs)), of_end(runs, GOLD, 3)]
        if name.startswith("before"):
            lines.append([*line, "", *cells, "0", of_end(runs, "eos_share", 2), "", ""])
            continue
        line += [gain, *cells, of_end(runs, "kl", 1), of_end(runs, "eos_share", 2)]
        lines.append([*line, minutes(runs), memory(runs)])
    return markdown(lines)


def sayings_table(record: list[dict]) -> str:
    """What three policies say to five unseen prompts."""
    names = {"before, opinions": "before", "ppo, 0.02": "ppo.py", "rloo, 0.02": "rloo.py"}
    lines = [["", *names.values()], ["---"] * 4]
    for said in zip(*(runs_of(record, name)[0]["answers"] for name in names)):
        texts = [text.replace("\n", " ⏎ ").replace("|", "\\|") for _, text in said]
        lines.append([said[0][0], *texts])
    return markdown(lines)


def tasks_table(record: list[dict]) -> str:
    """Three tasks and their neighbours, before and after."""
    right = "rewards/reasoning.py:right"
    heads = [
        "task",
        "seeds",
        "before",
        "after",
        "commonest answer",
        "sampled",
        "equal groups",
        "KL",
        "CPU minutes",
        "GB",
    ]
    lines = [heads, ["---", *["---:"] * 9]]
    for task, neighbour in NEIGHBOURS.items():
        (before,), runs = runs_of(record, f"before, {task}"), runs_of(record, task)
        ends = [
            [statistics.fmean(run["curves"]["reward"][part]) for run in runs] for part in (slice(3), slice(-3, None))
        ]
        equal = [statistics.fmean(run["curves"]["frac_reward_zero_std"][i] for run in runs) for i in (0, -1)]
        line = [task, str(len(runs)), of_end([before], right, 2), of_end(runs, right, 2), f"{before['commonest']:.2f}"]
        line += [" → ".join(number(some, 2) for some in ends), " → ".join(f"{share:.2f}" for share in equal)]
        lines.append([*line, of_end(runs, "kl", 2), minutes(runs), memory(runs)])
        beside = [number([run["beside"][right]["mean"] for run in some], 2) for some in ([before], runs)]
        lines.append([f"*{neighbour}*", "", *beside, *[""] * 6])
    return markdown(lines)


def game_table(record: list[dict]) -> str:
    """Higher or lower, before and after: of 16 games about each number."""
    lines = [["", "reward", "found", "guesses, if found", "KL"], ["---", *["---:"] * 4]]
    for name in ("before, game", "game"):
        run = runs_of(record, name)[0]
        rewards, turns = run["rewards"]["rewards/higher_or_lower.py:Game"], run["rewards"]["turns"]
        needed = [guesses for reward, guesses in zip(rewards, turns) if reward > 0]
        line = [name.partition(",")[0] if "," in name else "after", of_end([run], "rewards/higher_or_lower.py:Game", 2)]
        line += [number([len(needed) / len(turns)], 2), number([statistics.fmean(needed)], 1)]
        lines.append([*line, of_end([run], "kl", 1) if name == "game" else "0"])
    return markdown(lines)


TABLES = {
    "real-sums": sums_table,
    "real-curve": curve_table,
    "real-unseen": unseen_table,
    "real-answers": partial(answers_table, names=("before", "grpo")),
    "real-game": game_table,
    "real-tasks": tasks_table,
    "real-pairs": pairs_table,
    "real-sweep": sweep_table,
    "real-policies": policies_table,
    "real-sayings": sayings_table,
}


def tables(record: list[dict]) -> dict[str, str]:
    """All that the page has."""
    return {name: table(record) for name, table in TABLES.items() if f"<!-- {name} -->" in PAGE.read_text("utf-8")}


def draw_policies(record: list[dict]) -> None:
    """docs/pipeline.png: reward, gold score and the lexicon alone against KL along the training; points: best of n."""
    figure, axes = figure_of(1, 3, 13, 3.6)
    names = {"rewards/reward_model/mean": "reward", f"rewards/{GOLD.split(':')[1]}/mean": "gold score"}
    names |= {f"rewards/{LEXICON.split(':')[1]}/mean": "lexicon alone"}
    colours = {"ppo": ("#a8c4e0", "#3b6ea8", "#1b3350"), "rloo": ("#e8b8ae", "#c0563f", "#6b2418")}
    for script, shades in colours.items():
        for k, colour in zip(KL_COEFS, shades):
            for run in runs_of(record, f"{script}, {k}"):
                for panel, metric in zip(axes[0], names):
                    label = f"{script}.py, kl_coef {k}" if run["seed"] == 1 else None
                    panel.plot(run["curves"]["objective/kl"], run["curves"][metric], color=colour, label=label, lw=1.5)
    best = [run["read"]["best of"] for run in runs_of(record, "reward model")]
    kl = [math.log(n) - (n - 1) / n for n in (1, 2, 4, 8)]
    for panel, title, column in zip(axes[0], names.values(), (2, 0, 1)):
        means = [statistics.fmean(of[n][column] for of in best) for n in ("1", "2", "4", "8")]
        panel.plot(kl, means, "k.", label="best of 1, 2, 4, 8")
        panel.set_title(title, fontsize=10), panel.set_xlabel("KL, nats", fontsize=9)
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.savefig(ROOT / "docs/pipeline.png", dpi=100)


def draw(record: list[dict]) -> None:
    """docs/real.png: right answers, entropy and length, a line for each seed; and pass@k, the mean of the seeds."""
    figure, axes = figure_of(1, 4, 14, 3)
    for run in runs_of(record, "grpo"):
        x = range(1, len(run["curves"]["reward"]) + 1)
        for panel, metric in zip(axes[0], ("reward", "entropy", "completions/mean_length")):
            panel.plot(x, run["curves"][metric], label=f"seed {run['seed']}")
    titles = ("right answers in the batch", "entropy of a token, nats", "tokens of an answer")
    for panel, title in zip(axes[0], titles):
        panel.set_title(title, fontsize=10), panel.set_xlabel("updates", fontsize=9), panel.set_ylim(0)
    for (metric, of), colour in zip(unseen(record).items(), ("0.5", "#3b6ea8", "#c0563f")):
        x = sorted(of)
        axes[0, 3].plot(x, [statistics.fmean(of[update]) for update in x], "o-", color=colour, label=metric[5:])
    axes[0, 3].set_title("unseen sums right", fontsize=10), axes[0, 3].set_xlabel("updates", fontsize=9)
    axes[0, 3].set_ylim(0, 1)
    for panel in (axes[0, 0], axes[0, 3]):
        panel.legend(frameon=False, fontsize=9)
    figure.savefig(ROOT / "docs/real.png", dpi=100)


def main() -> None:
    """Makes the data and the runs that are missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="models/smollm2", help="a folder, or a name on the hub")
    parser.add_argument("--runs", nargs="+", default=list(ARMS), choices=list(ARMS), metavar="NAME", help="which")
    parser.add_argument("--seeds", nargs="+", type=int, help="by default those of the page")
    parser.add_argument("--data", action="store_true", help="only write the prompts")
    parser.add_argument("--list", action="store_true", help="only say which runs there are, and on record")
    parser.add_argument("--tables", action="store_true", help="only write the tables and the picture of docs/real.md")
    args = parser.parse_args()
    if args.tables:
        put_tables(PAGE, tables(read_record()))
        draw(read_record())
        draw_policies(read_record())
        return
    make_data()
    for name in args.runs if not args.data else []:
        for seed in args.seeds or ARMS[name].seeds:
            is_there = any((run["run"], run["seed"]) == (name, seed) for run in read_record())
            print(f"{name}, seed {seed}{': on record' if is_there else ''}", flush=True)
            if not (is_there or args.list):
                run = measure(name, seed, args.model)
                with OUTPUT.open("a") as file:
                    print(json.dumps(run), file=file, flush=True)


if __name__ == "__main__":
    main()
