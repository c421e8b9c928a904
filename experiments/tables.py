"""Writes the tables of the pages from the records: what stands between <!-- NAME --> and <!-- /NAME -->.

    python experiments/tables.py            # writes them
    python experiments/tables.py --check    # only says which pages have other tables

tables.toml has the tables with a row for each run, this file the others. In a cell, ± is the standard deviation over
the seeds. CPU seconds are those of the fastest seed: what slows a run down is another program, or another machine.
"""

import argparse
import json
import math
import statistics
import sys
import textwrap
import tomllib
from pathlib import Path

import overoptimization as laws
import takeoff
from record import GOLD as GOLD_MEAN
from record import ROOT, by_name, markdown, minus, number, reached, smooth, until, verdict, with_tables
from real_data import GOLD, LEXICON, REWARD_MODEL
from common import RESULTS
import throughput

PAGES = [ROOT / "README.md", *(ROOT / folder / "README.md" for folder in ("toy", "benchmarks", "experiments"))]
PAGES += sorted((ROOT / "docs").glob("*.md"))
SCRIPTS = ("sft", "reward_model", "ppo", "rloo", "grpo", "dpo", "ddpo")
THEIRS = {"ppo": "0.16.1", "rloo": "0.16.1", "ddpo": "0.23"}  # the version of TRL beside it; of the others: 1.16
RIGHT = "rewards/right_number/mean"


def learned(name: str) -> list[dict]:
    """The runs of a name in the group that most tables are about."""
    return by_name("learning").get(name, [])


def values(runs: list[dict], part: str, metric: str) -> list:
    """A metric of those runs that have it."""
    return [run[part][metric] for run in runs if metric in run.get(part, {})]


def by_seed(runs: list[dict], part: str, metric: str) -> dict[int, float]:
    """The same, by seed."""
    return {run["seed"]: run[part][metric] for run in runs if metric in run.get(part, {})}


def memory(runs: list[dict]) -> list[float]:
    """GB of the trainings."""
    return [max(run["curves"]["perf/peak_memory_mb"]) / 1024 for run in runs if "curves" in run]


def minutes(runs: list[dict]) -> list[float]:
    """CPU minutes of the trainings."""
    return [run["cpu_seconds"] / 60 for run in runs]


def episodes_until(runs: list[dict], metric: str, goal: float) -> list[float | None]:
    """Where on the axis of their curves the runs reach a goal."""
    return [until(next(iter(run["curves"].values())), run["curves"][metric], goal) for run in runs]


def figure(found: list, digits: int) -> str:
    """A cell. Evaluations have a mean and a standard error over prompts, which is shown of a single run."""
    if len(found) == 1 and isinstance(found[0], dict):
        return minus(" ± ".join(f"{x:.{digits}f}" for x in found[0].values()))
    return number([x["mean"] if isinstance(x, dict) else x for x in found], digits)


def cell(runs: list[dict], column: str, first: list[dict]) -> str:
    """What a column of tables.toml says of the runs of a name; `first` are those of the first row."""
    part, _, rest = column.partition(" ")
    metric, _, last = rest.rpartition(" ")
    if part == "seeds":
        return str(len(runs))
    if part == "until":
        return reached(episodes_until(runs, metric, float(last)))
    digits = int(last)
    if part == "beside":
        part, _, metric = metric.partition(" ")
        sides = (by_seed(some, part, metric) for some in (runs, first))
        return verdict(*sides, digits) if runs is not first else ""
    if part == "cpu":
        return number([min(run["cpu_seconds"] for run in runs)], digits)
    if metric == "kl" and "curves" not in runs[0]:
        return "0"  # of the model as it is, which is the reference
    found = {
        "gb": lambda: memory(runs),
        "minutes": lambda: minutes(runs),
        "last": lambda: [run["curves"][metric][-1] for run in runs],
        "highest": lambda: [max(smooth(run["curves"][metric])) for run in runs],
        "best": lambda: [run["read"]["best of"]["8"][0] for run in runs if "read" in run],
    }.get(part, lambda: values(runs, part, metric))()
    return figure(found, digits)


def seeds_of(names: list[str], group: str = "learning") -> str:
    """Over how many seeds the runs of these names go."""
    counts = sorted({len(by_name(group).get(name, [])) for name in names})
    return f"{' to '.join(map(str, counts[:1] + counts[-1:] * (len(counts) > 1)))} seeds".replace("1 seeds", "1 seed")


def table(spec: dict) -> str:
    """A table of tables.toml; without rows, of all runs of its group. Rows without runs are left out."""
    group = spec.get("group", "learning")
    rows = spec["rows"] or {name: name for name in by_name(group)}
    heading = spec.get("heading", seeds_of(rows.values(), group))
    lines = [[heading, *map(str.strip, spec["columns"])]]
    of = {label: by_name(group)[name] for label, name in rows.items() if name in by_name(group)}
    first = next(iter(of.values()))
    for label, runs in of.items():
        cells = [cell(runs, column, first) for column in spec["columns"].values()]
        lines.append([label.replace("{n}", str(len(runs))), *cells])
    return markdown(lines, spec.get("align", ""))


# ---------------------------------------------------------------------------------------------------------------------
# README, experiments/README.md, benchmarks/README.md, docs/sft.md


def mean(script: str, part: str, metric: str, digits: int = 1) -> str:
    """The mean alone, for a sentence."""
    return minus(f"{statistics.fmean(values(learned(script), part, metric)):.{digits}f}")


def percent(script: str, part: str, metric: str) -> str:
    """The same of a share."""
    return f"{100 * statistics.fmean(values(learned(script), part, metric)):.0f} %"


def files() -> str:
    """The README's table of files: their lengths, and what a default run ends with."""
    before = "grpo --total-episodes 64 --learning-rate 1e-12"
    gold = {script: [mean(script, part, GOLD_MEAN) for part in ("start", "end")] for script in ("ppo", "rloo")}
    score = {script: [mean(script, part, "objective/scores") for part in ("start", "end")] for script in gold}
    gains = {x: f"score {score[x][0]} → {score[x][1]}, gold score {gold[x][0]} → {gold[x][1]}" for x in gold}
    right = [percent(name, "answers", "greedy") for name in (before, "grpo")]
    tokens = [mean(name, "answers", "length", 0) for name in (before, "grpo")]
    rows = {
        "sft": (
            "[supervised fine-tuning](docs/sft.md): texts → policy",
            f"perplexity {mean('sft', 'end', 'eval/perplexity', 0)} on unseen texts, from 3,072",
        ),
        "reward_model": (
            "[Bradley–Terry](docs/reward_model.md): preference pairs → reward model",
            f"{percent('reward_model', 'end', 'eval/accuracy')} of unseen pairs right (the gold score itself: 85 %)",
        ),
        "ppo": ("[PPO](docs/ppo.md): policy + reward → better policy", gains["ppo"]),
        "rloo": ("[RLOO, REINFORCE++](docs/rloo.md): the same without a critic", gains["rloo"]),
        "grpo": (
            "[GRPO, Dr. GRPO, DAPO, GSPO, CISPO](docs/grpo.md): groups of answers that a function checks",
            f"right answers {' → '.join(right)}, tokens of an answer {' → '.join(tokens)}",
        ),
        "dpo": (
            "[DPO, IPO, …](docs/dpo.md): preference pairs → better policy",
            f"gold score {mean('dpo', 'end', GOLD_MEAN)} at KL {mean('dpo', 'end', 'objective/kl', 0)}; "
            f"{percent('dpo', 'end', 'eval/rewards/accuracies')} of unseen pairs right",
        ),
        "ddpo": (
            "[DDPO](docs/ddpo.md): the same for a diffusion model, whose denoising steps are its tokens",
            f"reward {mean('ddpo', 'start', 'reward_mean')} → {mean('ddpo', 'end', 'reward_mean')}",
        ),
    }
    lines = [["read", "run", "algorithm, and its page", "without flags: CPU time on one thread, and result"]]
    for script, (about, result) in rows.items():
        short, long = (
            (ROOT / file).read_text("utf-8").count("\n") for file in (f"lecture/{script}.py", f"{script}.py")
        )
        seconds = min(run["cpu_seconds"] for run in learned(script))
        lines.append([f"[`lecture/{script}.py`](lecture/{script}.py), {round(short, -1)} lines"])
        lines[-1] += [f"[`{script}.py`]({script}.py), {round(long, -2):,} lines", about, f"{seconds:.0f} s: {result}"]
    return markdown(lines, "llll").replace(" --- ", "---")


def caption() -> str:
    """Under the README's picture."""
    score, gold = (
        f"from {mean('ppo', 'start', metric)} to {mean('ppo', 'end', metric)}"
        for metric in ("objective/scores", GOLD_MEAN)
    )
    lines = [
        "PPO trains a small language model to write glowing reviews. Left: the **score** that the reward model gives "
        "them, which PPO",
        f"raises {score}; and the **gold score**, their true quality in this toy world, which training never uses. It "
        "rises",
        f"{gold}. Middle: KL. Right: the share of reviews that end. Lines show the sampled reviews, points an "
        "evaluation:",
        "the likeliest words on unseen prompts. (The numbers are means of five seeds; the picture is of `python ppo.py "
        "--reward-fn",
        "reward_model toy/gold_score.py:gold_score --reward-weights 1 0`.)",
    ]
    return "\n".join(lines)


def beside_trl(scripts: tuple[str, ...] = SCRIPTS) -> str:
    """Scripts beside TRL, by what they are about and by the CPU seconds of their runs."""
    ends = {"gold score": (GOLD_MEAN, 2), "KL": ("objective/kl", 1), "EOS share": ("val/eos_share", 2)}
    about = {
        "sft": {"perplexity of unseen texts": ("eval/perplexity", 1)},
        "reward_model": {"unseen pairs right": ("eval/accuracy", 3)},
        "ppo": {"score": ("objective/scores", 2), **ends},
        "rloo": {"score": ("objective/scores", 2), **ends},
        "grpo": {
            "right answers, last five updates": (RIGHT, 3),
            "right answers, unseen prompts": ("eval/pass@1", 3),
            "episodes to .9 right": ("until", 0),
            "tokens": ("completions/mean_length", 1),
        },
        "dpo": {"unseen pairs right": ("eval/rewards/accuracies", 3), **ends},
        "ddpo": {"reward": ("reward_mean", 2), "gold score": ("rewards/same_shape/mean", 3)},
    }
    lines = [["", "", "ours", "TRL", "difference", "version"]]
    for script in scripts:
        for title, (metric, digits) in (about[script] | {"CPU seconds": ("cpu", 0)}).items():
            sides = []
            for name in (script, f"TRL {script}"):
                runs = learned(name)
                found = by_seed(runs, "end", metric)
                if metric == "cpu":
                    found = {run["seed"]: run["cpu_seconds"] for run in runs}
                if metric == "until":
                    found = {run["seed"]: x for run, x in zip(runs, episodes_until(runs, RIGHT, 0.9)) if x}
                sides.append(found)
            name = f"`{script}.py`" if title == next(iter(about[script])) else ""
            cells = [number(list(found.values()), digits) for found in sides]
            lines.append([name, title, *cells, verdict(*sides, digits), THEIRS.get(script, "1.16")])
    return markdown(lines, "llrrll")


def beside() -> str:
    """The README's table, and the number of seeds."""
    scripts = ("ppo", "grpo")
    seeds = [f"`{name}.py` {len(learned(name))}, TRL {len(learned(f'TRL {name}'))}" for name in scripts]
    return f"Seeds: {'; '.join(seeds)}.\n\n{beside_trl(scripts)}"


def from_file(name: str) -> dict:
    """benchmarks/results/NAME.json."""
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def throughput_table() -> str:
    """The comparisons of all throughput*.json, the last of each kind."""
    results = [from_file(path.stem) for path in RESULTS.glob("throughput*.json") if "growth" not in path.stem]
    last = {}
    for result in sorted(results, key=lambda result: result["date"]):
        for c in result["comparisons"]:
            if not c["geometry"]["bf16"]:
                last[c["setting"], c["algorithm"], c["other"], c["our_flags"]] = c
    return throughput.table([last[key] for key in sorted(last, reverse=True)])


def prompts_table() -> str:
    """GRPO with prompts of three lengths: our scripts before and after prompts were shared, and TRL."""
    heads = ["tokens of a prompt", "type", "against", "theirs, s", "ours, s", "**ours / theirs**"]
    lines = [[*heads, "the update alone", "theirs, GB", "ours, GB", "ours / theirs"]]
    comparisons = [c for name in ("prompts", "prompts-trl") for c in from_file(name)["comparisons"]]
    for c in comparisons:
        for side, title in {"other": c["other"], "kept": f"{c['other']}, freed memory kept"}.items():
            pairs = [(pair["ours"], pair[side]) for pair in c["pairs"] if side in pair]
            if not pairs:
                continue
            ratios = {}
            medians = {}
            for metric in ("seconds_per_update", "update", "memory_mb"):
                ratios[metric] = number([a[metric] / b[metric] for a, b in pairs], 2)
                medians[metric] = [statistics.median(pair[i][metric] for pair in pairs) for i in (1, 0)]
            seconds, gb = medians["seconds_per_update"], [x / 1024 for x in medians["memory_mb"]]
            line = [str(c["geometry"]["prompt_lengths"][1]), "bfloat16" if c["geometry"]["bf16"] else "float32"]
            line += [title if "TRL" in title else "ours before", *(f"{x:.1f}" for x in seconds)]
            line += [f"**{ratios['seconds_per_update']}**", ratios["update"], *(f"{x:.2f}" for x in gb)]
            lines.append([*line, ratios["memory_mb"]])
    return markdown(lines, "rllrrrrrrr")


# ---------------------------------------------------------------------------------------------------------------------
# docs/questions.md

SAMPLERS = ("the policy itself", "bf16", "int8", "int4", "1 update old", "4 updates old", "16 updates old")
CORRECTIONS = ("none", "clip", "tis")
SIDES = ("false +", "false −", "both")
RATES = ("5%", "10%", "20%")
SIZES = (2, 4, 8, 16, 32)  # of groups
GOAL = 0.9  # of right answers


def asked(question: str, name: str) -> list[dict]:
    """The runs of a name, in a question."""
    return by_name("questions").get(f"{question}: {name}", [])


def ends(runs: list[dict], metric: str = "right", digits: int = 3) -> str:
    """A cell: what the policies earn in the end."""
    return number(values(runs, "end", metric), digits)


def soon(runs: list[dict], metric: str, axis: str = "episode", digits: int = 0, age: int = 0) -> str:
    """A cell: where on an axis the goal is reached. What a sampler of some age earns, the policy earned before."""
    curves = [run["curves"] for run in runs]
    return reached([until(x[axis][: len(x[axis]) - age], x[metric][age:], GOAL) for x in curves], digits)


def teacher_table() -> str:
    """Of each way to learn: how soon, and how well in the end."""
    lines = [["", "episodes to .9 right", "CPU seconds to .9 right", "right in the end"]]
    for name, runs in by_name("questions").items():
        if name.startswith("teacher: "):
            times = [soon(runs, "right"), soon(runs, "right", "seconds", 1)] if len(runs) > 1 else ["", ""]
            lines.append([name.removeprefix("teacher: "), *times, ends(runs)])
    return markdown(lines)


def sampler_table() -> str:
    """Of each sampler: how far it is from the policy, and what that does without and with the corrections."""
    heads = ["sampler", "first ratio", "approxkl"]
    lines = [heads + [f"{what}: {name}" for what in ("to .9", "right") for name in CORRECTIONS]]
    for sampler in SAMPLERS:
        of = [asked("sampler", f"{sampler}, {name}") for name in CORRECTIONS]
        curves = [run["curves"] for run in of[0]]
        ratio, distance = (statistics.fmean(x for c in curves for x in c[name]) for name in ("first_ratio", "approxkl"))
        age = int(sampler.split()[0]) if sampler.endswith("old") else 0
        line = [sampler, f"{ratio:.3f}", f"{distance:.1g}"]
        line += [soon(runs, "reward", age=age) if runs else "" for runs in of]
        lines.append(line + [ends(runs) if runs else "" for runs in of])
    return markdown(lines)


def liar_table() -> str:
    """By how often it lies, and on which side."""
    lines = [["lies", *(f"{what}: {side}" for what in ("to .9", "right") for side in SIDES)]]
    rows = {"none": [asked("liar", "honest")] * 3}
    rows |= {rate: [asked("liar", f"{side} {rate}") for side in SIDES] for rate in RATES}
    for name, of in rows.items():
        lines.append([name, *(soon(runs, "truth") for runs in of), *map(ends, of)])
    runs = asked("liar", "both 20%, by prompt")
    return markdown([*lines, ["20%, by prompt", "", "", soon(runs, "truth"), "", "", ends(runs)]])


def groups_table() -> str:
    """By the size of groups: each algorithm at equal episodes and at equal seconds."""
    heads = ["answers to a prompt", "GRPO, 3,200 episodes: right", "GRPO, 3 s: episodes", "right"]
    lines = [[*heads, "RLOO, 1,024 episodes: gold score", "KL", "RLOO, 20 s: episodes", "gold score", "KL"]]
    for size in SIZES:
        line = [str(size)]
        for script, metrics in {"grpo": {"right": 3}, "rloo": {"gold score": 2, "KL": 1}}.items():
            for limit in ("episodes", "seconds"):
                runs = asked(f"{limit} lecture/{script}.py", size)
                line += [number([run["episodes"] for run in runs], 0)] if limit == "seconds" else []
                line += [ends(runs, metric, digits) for metric, digits in metrics.items()]
        lines.append(line)
    return markdown(lines, "r" * 9)


# ---------------------------------------------------------------------------------------------------------------------
# docs/takeoff.md, docs/agent.md


def shares_table() -> str:
    """Of each arm: how many runs take off, and how many more than of GRPO's; when; and what a table of means says."""
    lines = [["", "take off", "share", "less GRPO's, paired", "half right after", "right in the end"]]
    runs = takeoff.arms()
    off = {arm: [takeoff.outcome(run) > 0.5 for run in of] for arm, of in runs.items()}
    for arm, of in runs.items():
        n, differences = len(of), [x - y for x, y in zip(off[arm], off["GRPO"])]
        error = statistics.stdev(differences) / math.sqrt(n)
        paired = minus(f"{statistics.fmean(differences):+.2f} ± {error:.2f}")
        times = [takeoff.half(run) for run, is_off in zip(of, off[arm]) if is_off]
        after = f"{statistics.median(times):.0f} updates" if times else "–"
        line = [*arm_cells(arm, of), "" if arm == "GRPO" else paired, after]
        lines.append([*line, number([takeoff.outcome(run) for run in of], 2)])
    return markdown(lines)


def arm_cells(arm: str, runs: list[dict]) -> list[str]:
    """Name, how many runs take off, and their share."""
    n, count = len(runs), sum(takeoff.outcome(run) > 0.5 for run in runs)
    return [arm, f"{count} of {n}", f"{count / n:.2f} ± {takeoff.error_of_share(count / n, n):.2f}"]


def signs_table() -> str:
    """How well each sign foretells the outcome after so many updates: .5 is no better than chance."""
    updates = (5, 10, 20, 30, 40, 50)
    lines = [["after", *(f"{update} updates" for update in updates)]]
    for name, text in takeoff.SIGNS.items():
        lines.append([text, *(f"{takeoff.foretold(takeoff.arms(), name, update):.2f}" for update in updates)])
    return markdown(lines)


def rankings_table() -> str:
    """Each arm beside GRPO."""
    heads = ["two groups rank in opposite ways", "a group's 95 % interval leaves out 0", "the wrong way round"]
    lines = [["beside GRPO", *heads]]
    outcomes = {arm: [takeoff.outcome(run) for run in of] for arm, of in takeoff.arms().items()}
    for arm in list(outcomes)[1:]:
        shares = takeoff.rankings(outcomes["GRPO"], outcomes[arm])
        lines.append([arm, *(f"{100 * share:.0f} %" for share in shares)])
    return markdown(lines)


def takeoff_sweep_table() -> str:
    """Of each setting: how many runs take off. Other batches are not paired with GRPO's, whose seeds are all here."""
    lines = [["", "take off", "share", "right in the end"]]
    runs = by_name("takeoff")
    for arm in ("GRPO", *(name for name in runs if name not in ("before", *takeoff.ARMS))):
        lines.append([*arm_cells(arm, runs[arm]), number([takeoff.outcome(run) for run in runs[arm]], 2)])
    return markdown(lines)


LABELS = {"Answers in the loss": "fault: answers in the loss"}  # a heading of docs/agent.md -> its name in a table


def guesses_table() -> str:
    """Higher or lower: guesses before and after."""
    lines = [["", "seeds", "sampled: before", "after", "likeliest: before", "after", "found after", "CPU seconds"]]
    for name, runs in by_name("agent").items():
        if "sampled" in runs[0]["after"]:
            line = [LABELS.get(name, name), str(len(runs))]
            for what in ("sampled", "likeliest"):
                line += [f"{runs[0]['before'][what]:.2f}", number(values(runs, "after", what), 2)]
            line.append(number(values(runs, "after", "found"), 2))
            lines.append([*line, str(min(run["cpu_seconds"] for run in runs))])
    return markdown(lines)


def looks_table() -> str:
    """The shell game: by the number of swaps, how often it looks, and how often it would be right at once."""
    lines = [["swaps", *map(str, range(1, 9))]]

    def add(label: str, runs: list[dict], when: str, what: str) -> None:
        """A row; all runs have the same policy before."""
        by_swaps = [run[when]["by_swaps"][what] for run in (runs[:1] if when == "before" else runs)]
        lines.append([label, *(number(list(shares), 2) for shares in zip(*by_swaps))])

    costly, cheap = (by_name("agent")[f"a look for {price}"] for price in (".6", ".3"))
    add("before", costly, "before", "looked")
    add("a look for .6", costly, "after", "looked")
    add("right at once, before", costly, "before", "right at once")
    add("right at once, after", costly, "after", "right at once")
    add("a look for .3", cheap, "after", "looked")
    return markdown(lines)


# ---------------------------------------------------------------------------------------------------------------------
# docs/overoptimization.md


def setup_text() -> str:
    """How it was done, in figures."""
    runs = laws.all_runs()
    machine, start = runs[-1]["machine"], laws.start_gold()
    seconds = sum(run["seconds"] for run in runs)
    text = (
        f"Seeds: {len({run['seed'] for run in runs})}. Passes over the pairs: 8 for 300, 5 for 1,000, 4 for 3,000, 3 "
        "for 10,000, 2 for 30,000. Best of n: 640 responses to each of 20 prompts per seed, n up to "
        f"{laws.BEST_OF[-1]}. PPO: 2,048 episodes in 32 updates. Temperature: 0.7. Gold score of the initial policy: "
        f"{start:.2f}. Recorded on {runs[-1]['date']} at revision {runs[-1]['commit']}, on {machine['cores']} cores of "
        f"{machine['cpu']}; all runs together took {seconds / 60:.0f} minutes."
    )
    return textwrap.fill(text, 120)


def best_of_n_table() -> str:
    """What reward models know, and the law of best of n."""
    most = laws.BEST_OF[-1]
    lines = [["parameters", "pairs", "unseen pairs right", f"gold score, best of {most}", "α", "R²", "peak at d"]]
    for (size, pairs), runs in laws.groups().items():
        alphas = [laws.fit("best of n", *laws.points(run, "best of n"))["alpha"] for run in runs]
        pooled = laws.pooled_fit(runs, "best of n", "best of n")
        d = laws.peak("best of n", pooled["alpha"], pooled["beta"])
        line = [size, f"{pairs:,}", number([run["accuracy"] for run in runs], 2)]
        line += [number([run["best_of_n"]["gold"][-1] for run in runs], 2), number(alphas, 2)]
        lines.append([*line, f"{pooled['r2']:.2f}", f"{d:.1f}" if d < 20 else "none"])
    return markdown(lines, "llrrrrr")


def ppo_table() -> str:
    """The law of PPO, and the peak that was seen."""
    lines = [["parameters", "pairs", "R²", "R², quadratic", "highest gold score", "at d", "gold score at the end"]]
    for (size, pairs), runs in laws.groups().items():
        r2 = [f"{laws.pooled_fit(runs, 'ppo', form)['r2']:.2f}" for form in ("ppo", "best of n")]
        gold = [laws.smooth(run["ppo"]["gold"]) for run in runs]
        d = [laws.smooth(run["ppo"]["kl"]).clip(0) ** 0.5 for run in runs]
        line = [size, f"{pairs:,}", *r2, number([g.max() for g in gold], 2)]
        line += [number([x[g.argmax()] for x, g in zip(d, gold)], 1), number([g[-1] for g in gold], 2)]
        lines.append(line)
    return markdown(lines, "llrrrrr")


def check_table() -> str:
    """The paper's other findings, by number of pairs; both sizes together. A gain is a gold score less its start."""
    most, few, start = laws.BEST_OF[-1], 32, laws.start_gold()
    kl = laws.best_of_n_kl(most)
    heads = ["pairs", f"gain of the best of {most}", f"predicted from n ≤ {few}"]
    heads += [f"KL at which PPO is as good ({kl:.1f} for best of n)", "gain of PPO at its proxy score"]
    lines = [heads]
    count = sum(n <= few for n in laws.BEST_OF)
    for pairs in sorted({run["pairs"] for run in laws.all_runs()}):
        gain, predicted, as_good, at_proxy = [], [], [], []
        for run in laws.all_runs():
            if run["pairs"] == pairs:
                d, gains = laws.points(run, "best of n")
                fit = laws.fit("best of n", d[:count], gains[:count])
                gain.append(gains[-1])
                predicted.append(laws.law("best of n", d[-1], fit["alpha"], fit["beta"]))
                as_good.append(laws.first_at(run, "gold", gains[-1] + start, "kl"))
                gold = laws.first_at(run, "proxy", run["best_of_n"]["proxy"][-1], "gold")
                at_proxy.append(gold - start if gold is not None else None)
        line = [f"{pairs:,}", number(gain, 2), number(predicted, 2)]
        lines.append([*line, reached(as_good, 1).replace(" seeds", ""), reached(at_proxy, 2).replace(" seeds", "")])
    return markdown(lines)


# ---------------------------------------------------------------------------------------------------------------------
# docs/real.md

TASKS = {"letters": "letters in longer texts", "gcd": "lcm", "backward": "longer words backward"}
SUM = "rewards/verifiers.py:last_number"
PROMPTS = 128  # that are unseen


def real(name: str) -> list[dict]:
    """The runs of a name on SmolLM2."""
    return by_name("real").get(name, [])


def unseen() -> dict[str, dict[int, list[float]]]:
    """Metric -> updates -> seeds, of the evaluations on unseen sums along the runs; before training after 0."""
    found = {metric: {} for metric in ("eval/accuracy", "eval/pass@1", "eval/pass@8")}
    for name in ("before, watched", "grpo"):
        for run in real(name):
            for metric, of in found.items():
                for update, x in enumerate(run["curves"].get(metric, []), 1):
                    if x is not None:
                        of.setdefault(update if name == "grpo" else 0, []).append(x)
    return found


def unseen_table() -> str:
    """pass@1 and pass@8 along the runs."""
    found = unseen()
    updates = sorted(found["eval/pass@1"])
    lines = [["updates", *map(str, updates)]]
    titles = ("likeliest answer right", "pass@1: of eight answers", "pass@8: at least one of the eight")
    for title, of in zip(titles, found.values()):
        lines.append([title, *(number(of[update], 2) for update in updates)])
    return markdown(lines)


def texts_table(columns: dict[str, str]) -> str:
    """What policies say to five unseen prompts, of seed 1: a column for each label -> name."""
    lines = [["", *columns]]
    for said in zip(*(real(name)[0]["answers"] for name in columns.values())):
        lines.append([said[0][0], *(text.replace("\n", " ⏎ ").replace("|", "\\|") for _, text in said)])
    return markdown(lines, "l" * len(lines[0]))


def by_prompt(run: dict) -> list[float]:
    """For each unseen prompt, the mean gold score of its answers."""
    scores = run["rewards"][GOLD]
    n = len(scores) // PROMPTS
    return [statistics.fmean(scores[i : i + n]) for i in range(0, len(scores), n)]


def policies_table() -> str:
    """The policies, on unseen prompts."""
    heads = ["", "seeds", "gold score", "more than before", "lexicon", "reward", "KL", "ended", "CPU minutes", "GB"]
    lines = [heads]
    (before,) = real("before, opinions")
    means = lambda runs: [figure(values(runs, "end", x), 2).split(" ± ")[0] for x in (LEXICON, REWARD_MODEL)]  # noqa: E731
    gold = figure(values([before], "end", GOLD), 3)
    lines.append(
        ["before", "1", gold, "", *means([before]), "0", figure(values([before], "end", "eos_share"), 2), "", ""]
    )
    runs = real("reward model")
    best = [number([run["read"]["best of"]["8"][i] for run in runs], 3 - (i > 0)) for i in range(3)]
    lines.append(["best of 8", str(len(runs)), best[0], "", *best[1:], f"{math.log(8) - 7 / 8:.1f}", "", "", ""])
    names = ["sft on the best of 4", "dpo", *(f"{x}, {k}" for x in ("ppo", "rloo") for k in ("0", "0.02", "0.05"))]
    for name in (*names, "rloo, 0, far", "grpo, 0.02"):
        runs = real(name)
        if not runs:
            continue
        gains = [[y - x for x, y in zip(by_prompt(before), by_prompt(run))] for run in runs]
        of = gains[0] if len(gains) == 1 else [statistics.fmean(gain) for gain in gains]  # prompts, or seeds
        gain = f"{statistics.fmean(of):+.3f} ± {statistics.stdev(of) / len(of) ** 0.5:.3f}"
        line = [name, str(len(runs)), figure(values(runs, "end", GOLD), 3), gain, *means(runs)]
        line += [figure(values(runs, "end", x), digits) for x, digits in {"kl": 1, "eos_share": 2}.items()]
        lines.append([*line, number(minutes(runs), 0), number(memory(runs), 1)])
    return markdown(lines)


def tasks_table() -> str:
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
    lines = [heads]
    for task, neighbour in TASKS.items():
        before, runs = real(f"before, {task}"), real(task)
        curves = [run["curves"] for run in runs]
        parts = (slice(3), slice(-3, None))
        sampled = [number([statistics.fmean(x["reward"][part]) for x in curves], 2) for part in parts]
        equal = [statistics.fmean(x["frac_reward_zero_std"][i] for x in curves) for i in (0, -1)]
        line = [task, str(len(runs)), *(figure(values(some, "end", right), 2) for some in (before, runs))]
        line += [f"{before[0]['commonest']:.2f}", " → ".join(sampled), " → ".join(f"{share:.2f}" for share in equal)]
        line += [figure(values(runs, "end", "kl"), 2), number(minutes(runs), 0), number(memory(runs), 1)]
        beside = [number([run["beside"][right]["mean"] for run in some], 2) for some in (before, runs)]
        lines += [line, [f"*{neighbour}*", "", *beside, *[""] * 6]]
    return markdown(lines)


def game_table() -> str:
    """Higher or lower, before and after: of 16 games about each number."""
    game = "rewards/higher_or_lower.py:Game"
    lines = [["", "reward", "found", "guesses, if found", "KL"]]
    for label, name in {"before": "before, game", "after": "game"}.items():
        run = real(name)[0]
        rewards, turns = run["rewards"][game], run["rewards"]["turns"]
        needed = [guesses for reward, guesses in zip(rewards, turns) if reward > 0]
        line = [label, figure([run["end"][game]], 2), f"{len(needed) / len(turns):.2f}"]
        line += [f"{statistics.fmean(needed):.1f}", figure([run["end"]["kl"]], 1) if label == "after" else "0"]
        lines.append(line)
    return markdown(lines)


TABLES = {
    "files": files,
    "caption": caption,
    "beside": beside,
    "beside-trl": beside_trl,
    "throughput": throughput_table,
    "prompts": prompts_table,
    "teacher": teacher_table,
    "sampler": sampler_table,
    "liar": liar_table,
    "groups": groups_table,
    "takeoff": shares_table,
    "takeoff-signs": signs_table,
    "takeoff-rankings": rankings_table,
    "takeoff-sweep": takeoff_sweep_table,
    "agent-guesses": guesses_table,
    "agent-looks": looks_table,
    "setup": setup_text,
    "best of n": best_of_n_table,
    "ppo": ppo_table,
    "checks": check_table,
    "real-unseen": unseen_table,
    "real-answers": lambda: texts_table({"before": "before", "after": "grpo"}),
    "real-sayings": lambda: texts_table(
        {"before": "before, opinions", "`ppo.py`": "ppo, 0.02", "`rloo.py`, far": "rloo, 0, far"}
    ),
    "real-policies": policies_table,
    "real-tasks": tasks_table,
    "real-game": game_table,
}


def all_tables() -> dict[str, str]:
    """Every table, by name."""
    specs = tomllib.loads(Path(__file__).with_name("tables.toml").read_text("utf-8"))
    return {name: table(spec) for name, spec in specs.items()} | {name: make() for name, make in TABLES.items()}


def main() -> None:
    """Writes, or checks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    args = parser.parse_args()
    tables = all_tables()
    texts = {page: page.read_text("utf-8") for page in PAGES}
    stale = {page: new for page, text in texts.items() if (new := with_tables(text, tables)) != text}
    print(f"{len(stale)} pages with tables that are not those of the results {[page.name for page in stale]}")
    if args.check:
        sys.exit(bool(stale))
    for page, text in stale.items():
        page.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
