"""Writes the tables and charts of README and docs from experiments/results and benchmarks/results.

    python experiments/tables.py            # what stands between <!-- NAME --> and <!-- /NAME -->, and the charts
    python experiments/tables.py --check    # only says which pages are not those of the results, other programs' too

Of learning.jsonl, a cell is the mean over the seeds ± their standard deviation; where there is one seed, its number.
CPU seconds are those of the fastest seed.
"""

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parent.parent / folder) for folder in ("benchmarks", "tools")]
import learning
import throughput
from common import LEARNED, RESULTS, ROOT, figure_of
from learning import BY_MODEL, GOLD_MEAN, PRICE, SCRIPTS, TIED, UNPUNISHED, read_record
from seeds import judge

PAGES = [ROOT / "README.md", *(ROOT / folder / "README.md" for folder in ("toy", "benchmarks", "experiments"))]
PAGES += sorted((ROOT / "docs").glob("*.md"))
Column = tuple[str, str, int]  # heading, metric, digits
SCORE = ("score", "end objective/scores", 2)
ENDS = [("gold score", f"end {GOLD_MEAN}", 2), ("KL", "end objective/kl", 1), ("EOS share", "end val/eos_share", 2)]
CPU = ("CPU seconds", "cpu_seconds", 0)
THEIRS = {"ppo": "TRL 0.16.1", "rloo": "TRL 0.16.1", "ddpo": "TRL 0.23"}  # the others: TRL 1.16
RIGHT = "rewards/right_number/mean"
RECORD: dict[str, list[dict]] = {}  # name -> the runs of its seeds


def fill_record(lines: list[dict] | None = None) -> None:
    """Takes the results, by default those on record."""
    RECORD.clear()
    for line in sorted(lines or read_record(), key=lambda line: line["seed"]):
        line["end"]["cpu_seconds"] = line["cpu_seconds"]
        if RIGHT in line["curves"] and (episodes := until(line, RIGHT, 0.9)):
            line["end"]["episodes to .9"] = episodes
        RECORD.setdefault(line["run"], []).append(line)


def values(name: str, metric: str) -> list[float]:
    """A metric of the runs of a name: `end reward`, `start reward`, `answers gold`; of `cpu_seconds`, the least."""
    part, _, key = metric.partition(" ")
    runs = RECORD.get(name, [])
    if metric == "cpu_seconds" and runs:
        return [min(run[metric] for run in runs)]  # what slows a run down is another program, or another machine
    return [run[part][key] if key else run[part] for run in runs if not key or key in run.get(part, {})]


def number(numbers: list[float], digits: int) -> str:
    """Mean ± standard deviation; a dash where there is nothing."""
    if not numbers:
        return "–"
    spread = f" ± {statistics.stdev(numbers):.{digits}f}" if len(numbers) > 1 else ""
    return f"{statistics.fmean(numbers):.{digits}f}{spread}".replace("-", "−")


def by_seed(name: str, metric: str) -> dict[int, float]:
    """A metric of the runs of a name, by their seeds."""
    part, _, key = metric.partition(" ")
    return {run["seed"]: run[part][key] for run in RECORD.get(name, []) if key in run.get(part, {})}


def verdict(ours: dict[int, float], theirs: dict[int, float], digits: int) -> str:
    """The mean difference over the seeds of both ± its standard error. It is shown if 0 lies outside Student's interval."""
    seeds = sorted(ours.keys() & theirs.keys())
    if len(seeds) < 2:
        return "–"
    found = judge([theirs[seed] for seed in seeds], [ours[seed] for seed in seeds])
    difference = f"{found['difference']:+.{digits}f} ± {found['error']:.{digits}f}".replace("-", "−")
    return difference if found["low"] > 0 or found["high"] < 0 else f"{difference}, not shown"


def mean(name: str, metric: str, digits: int = 1) -> str:
    """The mean alone, for a sentence."""
    return number(values(name, metric), digits).split(" ± ")[0]


def markdown(lines: list[list[str]]) -> str:
    """A table of these cells."""
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table(heading: str | None, rows: dict[str, str], columns: list[Column]) -> str:
    """Markdown: a row for each label -> name of a run. Without a heading, the number of seeds takes its place."""
    heading = seeds_of(rows.values()) if heading is None else heading
    lines = [[heading, *(title for title, _, _ in columns)], ["---"] + ["---:"] * len(columns)]
    for label, name in rows.items():
        lines.append([label, *(number(values(name, metric), digits) for _, metric, digits in columns)])
    return markdown(lines)


def both(script: str) -> dict[str, str]:
    """The rows of ours and of TRL's."""
    return {f"`{script}.py`": script, THEIRS.get(script, "TRL 1.16"): f"TRL {script}"}


def seeds_of(names: Iterable[str]) -> str:
    """Over how many seeds the runs of these names go."""
    counts = sorted({len(RECORD.get(name, [])) for name in names})
    return f"{' to '.join(map(str, counts[:1] + counts[-1:] * (len(counts) > 1)))} seeds".replace("1 seeds", "1 seed")


def sweep(script: str, heading: str, rows: dict[str, str], columns: list[Column]) -> str:
    """A table of label -> flags."""
    return table(heading, {label: f"{script} {flags}".strip() for label, flags in rows.items()}, columns)


def until(run: dict, metric: str, goal: float, width: int = 3) -> float | None:
    """Where on its axis the mean of `width` neighbouring points of a curve first reaches the goal; None if it never does."""
    axis, points = next(iter(run["curves"].values())), run["curves"][metric]
    for i in range(width, len(points) + 1):
        if statistics.fmean(points[i - width : i]) >= goal:
            return axis[i - 1]
    return None


def reached(name: str, metric: str, goal: float) -> str:
    """The same over the seeds: mean ± standard deviation, and how many of them reach it if not all do."""
    found = [until(run, metric, goal) for run in RECORD.get(name, [])]
    there = [x for x in found if x is not None]
    if not there:
        return "never" if found else "–"
    return number(there, 0) + (f" ({len(there)} of {len(found)} seeds)" if len(there) < len(found) else "")


def with_column(text: str, heading: str, cells: list[str]) -> str:
    """A table with one more column."""
    return "\n".join(
        f"{line} {cell} |" for line, cell in zip(text.splitlines(), [heading, "---:", *cells], strict=True)
    )


# ---------------------------------------------------------------------------------------------------------------------
# The tables, each a function without arguments


def ppo_results() -> str:
    rows = both("ppo")
    return with_column(
        table(None, rows, [SCORE, *ENDS]),
        "episodes to gold 3",
        [reached(name, GOLD_MEAN, 3.0) for name in rows.values()],
    )


def poor_reward_model() -> str:
    return with_peak(learning.POOR_RUNS)


def with_peak(flags: dict[str, str]) -> str:
    """A table of runs of ppo.py, with the highest mean of five updates."""
    text = sweep("ppo", "β", flags, [SCORE, *ENDS])
    runs = [RECORD.get(f"ppo {flag}", []) for flag in flags.values()]
    highest = [number([max(smooth(run["curves"][GOLD_MEAN])) for run in of], 2) for of in runs]
    return with_column(text, "highest gold score", highest)


def smooth(points: list[float], width: int = 5) -> list[float]:
    """Means of neighbours."""
    return [statistics.fmean(points[i : i + width]) for i in range(len(points) - width + 1)]


GAME = "grpo"
BEFORE = f"{GAME} --total-episodes 64 --learning-rate 1e-12"
DIRECT = f"{GAME} --response-length 3"
UNTAUGHT = f"{GAME} --model {learning.folder_of(learning.UNTAUGHT, 1).relative_to(ROOT)}"
TIED_GAME, PRICED = f"{GAME} {TIED}", f"{GAME} {PRICE}"
ANSWERS = [
    ("likeliest answer right", "answers greedy", 2),
    ("sampled answers right", "answers right", 2),
    ("worked out", "answers worked", 2),
    ("tokens", "answers length", 1),
]


def thinking() -> str:
    rows = {"before": BEFORE, "`grpo.py`": GAME, "may only answer at once": DIRECT, "never saw the working": UNTAUGHT}
    return table("", rows, ANSWERS)


def family() -> str:
    rows = {
        "dapo, the default": "",
        "grpo": "--loss-type grpo",
        "dr_grpo": "--loss-type dr_grpo --scale-rewards none",
        "gspo": "--loss-type grpo --importance-sampling-level sequence --epsilon 3e-4 --epsilon-high 4e-4",
        "cispo": "--loss-type cispo",
        "dynamic sampling": "--dynamic-sampling 4",
        "four passes": "--num-ppo-epochs 4",
        "four passes, clip-higher": "--num-ppo-epochs 4 --epsilon-high 0.28",
    }
    names = [f"{GAME} {flags}".strip() for flags in rows.values()]
    columns = [
        ("`eval/pass@1`", "end eval/pass@1", 3),
        ("tokens", "end completions/mean_length", 1),
        ("`entropy`", "end entropy", 3),
        ("equal groups", "end frac_reward_zero_std", 2),
    ]
    text = table(None, dict(zip(rows, names)), columns)
    right = {name: by_seed(name, "end eval/pass@1") for name in names}
    more = [verdict(right[name], right[GAME], 3) if name != GAME else "" for name in names]
    text = with_column(text, "`eval/pass@1`, less the default's", more)
    return with_column(
        text, "episodes to .9 right", [reached(name, "rewards/right_number/mean", 0.9) for name in names]
    )


def grpo_results() -> str:
    columns = [
        ("right, last five updates", "end rewards/right_number/mean", 3),
        ("`eval/accuracy`", "end eval/accuracy", 3),
        ("`eval/pass@1`", "end eval/pass@1", 3),
        ("tokens", "end completions/mean_length", 1),
    ]
    rows = both("grpo")
    text = table(None, rows, columns)
    return with_column(
        text, "episodes to .9 right", [reached(name, "rewards/right_number/mean", 0.9) for name in rows.values()]
    )


DPO = [("unseen pairs right", "end eval/rewards/accuracies", 3), *ENDS]
RATES = [("`eval/accuracy`", "end eval/accuracy", 3), ("`eval/loss`", "end eval/loss", 3)]
DDPO = [
    ("reward", "end reward_mean", 2),
    ("gold score", "end rewards/same_shape/mean", 2),
    ("KL", "end objective/kl", 0),
]


def ddpo_results() -> str:
    columns = [
        ("reward, first epoch", "start reward_mean", 2),
        ("last five", "end reward_mean", 2),
        ("gold score, first", "start rewards/same_shape/mean", 3),
        ("last five", "end rewards/same_shape/mean", 3),
        ("KL", "end objective/kl", 0),
    ]
    return table(None, both("ddpo"), columns)


def perplexities(flags: dict[str, str]) -> str:
    """One row of perplexities."""
    names = [f"sft {flag}".strip() for flag in flags.values()]
    cells = [mean(name, "end eval/perplexity", 1) for name in names]
    return markdown([list(flags), ["---:"] * len(flags), cells])


CHOSEN = "sft --model toy/sft --dataset runs/learning/chosen"
BY_GRPO = f"grpo {BY_MODEL} --beta 0.05"
JUDGED = [
    ("gold score", "answers gold", 2),
    ("KL, nats", "answers kl", 1),
    ("tokens", "answers length", 0),
    ("share that end", "answers eos_share", 2),
    CPU,
]


def which(rows: dict[str, str]) -> str:
    return table(None, rows, JUDGED)


def which_episodes() -> str:
    return which(
        {
            "`sft.py`, 2,048 chosen texts": f"{CHOSEN} --num-train-epochs 0.0683 --batch-size 64",
            "`dpo.py`, 2,048 pairs": "dpo --num-train-epochs 0.0683 --batch-size 64",
            "`rloo.py`, 2,048 responses": f"rloo {UNPUNISHED}",
            "`grpo.py`, 2,048 responses": f"{BY_GRPO} --total-episodes 2048",
            "`ppo.py`, 2,048 responses": f"ppo {UNPUNISHED}",
            "`dpo.py`, all 30,000 pairs": "dpo",
        }
    )


def beside_trl(scripts: Iterable[str] = SCRIPTS) -> str:
    """Scripts beside TRL, by what they are about and by the CPU seconds of their runs."""
    about = {
        "sft": [("perplexity of unseen texts", "end eval/perplexity", 1)],
        "reward_model": [("unseen pairs right", "end eval/accuracy", 3)],
        "ppo": [SCORE, *ENDS],
        "rloo": [SCORE, *ENDS],
        "grpo": [
            ("right answers, last five updates", f"end {RIGHT}", 3),
            ("right answers, unseen prompts", "end eval/pass@1", 3),
            ("episodes to .9 right", "end episodes to .9", 0),
            ("tokens", "end completions/mean_length", 1),
        ],
        "dpo": DPO,
        "ddpo": [("reward", "end reward_mean", 2), ("gold score", "end rewards/same_shape/mean", 3)],
    }
    about = {script: [*about[script], ("CPU seconds", "end cpu_seconds", 0)] for script in scripts}
    lines = [["", "", "ours", "TRL", "difference", "version"], ["---", "---", "---:", "---:", "---", "---"]]
    for script, columns in about.items():
        for i, (title, metric, digits) in enumerate(columns):
            names = both(script).values()
            cells = [number(values(name, metric), digits) for name in names]
            cells.append(verdict(*(by_seed(name, metric) for name in names), digits))
            lines.append([f"`{script}.py`" if i == 0 else "", title, *cells, THEIRS.get(script, "TRL 1.16")[4:]])
    return markdown(lines)


def from_file(name: str) -> dict:
    """benchmarks/results/NAME.json."""
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


def throughput_table() -> str:
    """The comparisons of all throughput*.json, the last of each kind."""
    results = [from_file(path.stem) for path in RESULTS.glob("throughput*.json") if "growth" not in path.stem]
    last = {}
    for result in sorted(results, key=lambda result: result["date"]):
        last |= {
            (c["setting"], c["algorithm"], c["other"], c["our_flags"], c["geometry"]["bf16"]): c
            for c in result["comparisons"]
            if not c["geometry"]["bf16"]
        }
    keys = sorted(last, reverse=True)
    cells = [line.strip("| ").split(" | ") for line in throughput.table([last[key] for key in keys]).splitlines()]
    return markdown([[*line[:7], *line[9:]] for line in cells])  # the phases are in the results


def prompts_table() -> str:
    """GRPO with prompts of three lengths: our scripts before and after prompts were shared, and TRL."""
    heads = ["tokens of a prompt", "type", "against", "theirs, s", "ours, s", "**ours / theirs**"]
    heads += ["the update alone", "theirs, GB", "ours, GB", "ours / theirs"]
    lines = [heads, ["---:", "---", "---", *["---:"] * 7]]
    for name in ("prompts", "prompts-trl"):
        for c in from_file(name)["comparisons"]:
            for side, title in (("other", c["other"]), ("kept", f"{c['other']}, freed memory kept")):
                pairs = [(pair["ours"], pair[side]) for pair in c["pairs"] if side in pair]
                if not pairs:
                    continue
                line = [str(c["geometry"]["prompt_lengths"][1]), "bfloat16" if c["geometry"]["bf16"] else "float32"]
                line.append(title if "TRL" in title else "ours before")
                for metric, digits in {"seconds_per_update": 1, "update": 1, "memory_mb": 2}.items():
                    scale = 1024 if metric == "memory_mb" else 1
                    ours, theirs = (statistics.median(pair[i][metric] / scale for pair in pairs) for i in (0, 1))
                    ratio = number([a[metric] / b[metric] for a, b in pairs], 2)
                    if metric == "update":
                        line.append(ratio)
                    else:
                        bold = "**" if metric == "seconds_per_update" else ""
                        line += [f"{theirs:.{digits}f}", f"{ours:.{digits}f}", f"{bold}{ratio}{bold}"]
                lines.append(line)
    return markdown(lines)


def lines_in(file: str) -> int:
    """Its length."""
    return (ROOT / file).read_text("utf-8").count("\n")


def files() -> str:
    """The README's table of files: their lengths, and what a default run ends with."""
    seconds = lambda script: f"{mean(script, 'cpu_seconds', 0)} s"
    end = lambda script, metric, digits=1: mean(script, f"end {metric}", digits)
    start = lambda script, metric, digits=1: mean(script, f"start {metric}", digits)
    gains = lambda script: (
        f"{seconds(script)}: score {start(script, 'objective/scores')} → {end(script, 'objective/scores')}, "
        f"gold score {start(script, GOLD_MEAN)} → {end(script, GOLD_MEAN)}"
    )
    percent = lambda name, metric: f"{statistics.fmean(values(name, metric) or [math.nan]):.0%}".replace("%", " %")
    rows = {
        "sft": (
            "[supervised fine-tuning](docs/sft.md): texts → policy",
            f"{seconds('sft')}: perplexity {end('sft', 'eval/perplexity', 0)} on unseen texts, from 3,072",
        ),
        "reward_model": (
            "[Bradley–Terry](docs/reward_model.md): preference pairs → reward model",
            f"{seconds('reward_model')}: {percent('reward_model', 'end eval/accuracy')} of unseen pairs right "
            "(the gold score itself: 85 %)",
        ),
        "ppo": ("[PPO](docs/ppo.md): policy + reward → better policy", gains("ppo")),
        "rloo": ("[RLOO, REINFORCE++](docs/rloo.md): the same without a critic", gains("rloo")),
        "grpo": (
            "[GRPO, Dr. GRPO, DAPO, GSPO, CISPO](docs/grpo.md): groups of answers that a function checks",
            f"{seconds('grpo')}: right answers {percent(BEFORE, 'answers greedy')} → {percent(GAME, 'answers greedy')}, "
            f"tokens of an answer {mean(BEFORE, 'answers length', 0)} → {mean(GAME, 'answers length', 0)}",
        ),
        "dpo": (
            "[DPO, IPO, …](docs/dpo.md): preference pairs → better policy",
            f"{seconds('dpo')}: gold score {end('dpo', GOLD_MEAN)} at KL {end('dpo', 'objective/kl', 0)}; "
            f"{percent('dpo', 'end eval/rewards/accuracies')} of unseen pairs right",
        ),
        "ddpo": (
            "[DDPO](docs/ddpo.md): the same for a diffusion model, whose denoising steps are its tokens",
            f"{seconds('ddpo')}: reward {start('ddpo', 'reward_mean')} → {end('ddpo', 'reward_mean')}",
        ),
    }
    lines = [
        "| read | run | algorithm, and its page | without flags: CPU time on one thread, and result |",
        "|---|---|---|---|",
    ]
    for script, (about, result) in rows.items():
        lengths = round(lines_in(f"lecture/{script}.py"), -1), round(lines_in(f"{script}.py"), -2)
        lines.append(
            f"| [`lecture/{script}.py`](lecture/{script}.py), {lengths[0]} lines "
            f"| [`{script}.py`]({script}.py), {lengths[1]:,} lines | {about} | {result} |"
        )
    return "\n".join(lines)


def beside() -> str:
    """The README's table, and the number of seeds."""
    scripts = ("ppo", "grpo")
    seeds = [f"`{name}.py` {len(RECORD.get(name, []))}, TRL {len(RECORD.get(f'TRL {name}', []))}" for name in scripts]
    return f"Seeds: {'; '.join(seeds)}.\n\n{beside_trl(scripts)}"


def caption() -> str:
    """Under the README's picture."""
    from_to = lambda metric: f"from {mean('ppo', f'start {metric}')} to {mean('ppo', f'end {metric}')}"
    return f"""PPO trains a small language model to write glowing reviews. Left: the **score** that the reward model gives them, which PPO
raises {from_to("objective/scores")}; and the **gold score**, their true quality in this toy world, which training never uses. It rises
{from_to(GOLD_MEAN)}. Middle: KL. Right: the share of reviews that end. Lines show the sampled reviews, points an evaluation:
the likeliest words on unseen prompts. (The numbers are means of five seeds; the picture is of `python ppo.py --reward-fn
reward_model toy/make.py:gold_score --reward-weights 1 0`.)"""


def toy_models() -> str:
    """What is shipped in toy/, by the last evaluation of the run that made it."""
    commands = {
        "`sft/`": "sft --num-train-epochs 3",
        "`reward_model/`": "reward_model --num-train-epochs 2 --learning-rate 1e-3 --eos-dropout 0.5",
        "`shells/sft/`": f"sft {learning.GAME} --dataset toy/shells/data/sft",
    }
    columns = [("perplexity", "end eval/perplexity", 2), ("unseen pairs right", "end eval/accuracy", 3), CPU]
    return table("", commands, columns)


TABLES: dict[str, Callable[[], str]] = {
    "ppo-results": ppo_results,
    "ppo-poor": poor_reward_model,
    "rloo-results": lambda: table(
        None,
        {"`rloo.py`": "rloo", "`rloo.py --max-grad-norm 1e9`": "rloo --max-grad-norm 1e9", "TRL 0.16.1": "TRL rloo"},
        [SCORE, *ENDS],
    ),
    "grpo-results": grpo_results,
    "grpo-thinking": thinking,
    "grpo-family": family,
    "dpo-results": lambda: table(None, both("dpo") | {"`ppo.py`": "ppo", "`rloo.py`": "rloo"}, DPO),
    "sft-results": lambda: table(
        None,
        both("sft"),
        [
            ("perplexity", "end eval/perplexity", 1),
            ("likeliest token right", "end eval/mean_token_accuracy", 3),
            ("loss on EOS", "end eval/eos_loss", 2),
        ],
    ),
    "sft-rate": lambda: perplexities(
        {
            "3e-4": "--learning-rate 3e-4",
            "1e-3": "--learning-rate 1e-3",
            "3e-3 (default)": "",
            "1e-2": "--learning-rate 1e-2",
        }
    ),
    "reward-model-results": lambda: table(
        None,
        both("reward_model"),
        [
            ("pairs right", "end eval/accuracy", 3),
            ("loss", "end eval/loss", 3),
            ("calibration error", "end eval/calibration_error", 3),
        ],
    ),
    "reward-model-rate": lambda: sweep(
        "reward_model",
        "rate",
        {"1e-4": "--learning-rate 1e-4", "7e-4 (default)": "", "3e-3": "--learning-rate 3e-3"},
        RATES,
    ),
    "ddpo-results": ddpo_results,
    "files": files,
    "caption": caption,
    "beside": beside,
    "toy-models": toy_models,
    "throughput": throughput_table,
    "prompts": prompts_table,
    "which-episodes": which_episodes,
    "beside-trl": beside_trl,
}


def rewritten(page: str) -> str:
    """A page with the tables of today's results."""
    for name in re.findall(r"^<!-- ([\w-]+) -->$", page, re.M):
        if name in TABLES:
            start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
            before, _, rest = page.partition(start)
            page = f"{before}{start}{TABLES[name]()}\n{end}{rest.partition(end)[2]}"
    return page


# ---------------------------------------------------------------------------------------------------------------------
# The charts


def band(runs: list[dict], metric: str) -> tuple:
    """Points on the axis that all runs reach, and the metric of each run there, interpolated."""
    import numpy as np

    lines = []
    for run in runs:
        axis, *_ = run["curves"].values()
        lines.append([(x, y) for x, y in zip(axis, run["curves"][metric]) if y is not None])
    first, last = max(line[0][0] for line in lines), min(line[-1][0] for line in lines)
    x = np.linspace(first, last, min(map(len, lines)))
    return x, np.array([np.interp(x, *zip(*line)) for line in lines])


def draw_band(panel, runs: list[dict], metric: str, colour: str, label: str) -> None:
    """The mean over the seeds, and their range."""
    if runs:
        x, y = band(runs, metric)
        panel.plot(x, y.mean(0), color=colour, label=label)
        panel.fill_between(x, y.min(0), y.max(0), color=colour, alpha=0.2, linewidth=0)


OURS, OTHERS = "#2a6fbb", "#c46a2b"
TITLES = {
    "objective/scores": "score",
    GOLD_MEAN: "gold score",
    "rewards/same_shape/mean": "gold score",
    "rewards/worked/mean": "share worked out",
    "objective/kl": "KL, nats",
    "val/eos_share": "share that end with EOS",
    "rewards/right_number/mean": "sampled answers right",
    "completions/mean_length": "tokens of an answer",
    "entropy": "entropy",
    "reward_mean": "reward",
    "eval/perplexity": "perplexity of unseen texts",
    "eval/mean_token_accuracy": "likeliest token right",
    "eval/eos_loss": "loss on EOS",
    "eval/accuracy": "unseen pairs right",
    "eval/loss": "loss on unseen pairs",
    "eval/calibration_error": "calibration error",
    "eval/rewards/accuracies": "unseen pairs right",
}


def draw_beside(script: str, folder: Path) -> None:
    """learning-SCRIPT.png: ours and TRL's curves, the mean and range of the seeds."""
    rows = {label: RECORD.get(name, []) for label, name in both(script).items()}
    metrics = list(next(iter(rows.values()))[0]["curves"])
    figure, axes = figure_of(1, len(metrics) - 1, 3.6 * (len(metrics) - 1), 3)
    for panel, metric in zip(axes[0], metrics[1:]):
        for (label, runs), colour in zip(rows.items(), (OURS, OTHERS)):
            if any(y is not None for run in runs for y in run["curves"][metric]):
                draw_band(panel, runs, metric, colour, label.strip("`"))
        panel.set_title(TITLES[metric], fontsize=10), panel.set_xlabel(f"{metrics[0]}s", fontsize=9)
    axes[0, 0].legend(frameon=False, fontsize=9)
    figure.savefig(folder / f"learning-{script.replace('_', '-')}.png", dpi=100)


def draw_all_beside(folder: Path) -> None:
    """learning.png: for each script the one metric that it is about."""
    figure, axes = figure_of(2, 4, 14, 6)
    axes[1, 3].axis("off")
    for panel, script in zip(axes.flat, SCRIPTS):
        rows = {label: RECORD.get(name, []) for label, name in both(script).items()}
        names = list(next(iter(rows.values()))[0]["curves"])
        metric = GOLD_MEAN if script == "dpo" else names[1]
        for (label, runs), colour in zip(rows.items(), (OURS, OTHERS)):
            draw_band(panel, runs, metric, colour, label.strip("`"))
        panel.set_title(f"{script}: {TITLES[metric]}", fontsize=10), panel.set_xlabel(f"{names[0]}s", fontsize=9)
        panel.legend(frameon=False, fontsize=8)
    axes[0, 0].set_yscale("log")
    figure.savefig(folder / "learning.png", dpi=100)


def draw_thinking(docs: Path) -> None:
    """thinking.png: right answers, length, share worked out, of grpo.py and of a policy that may only answer at once."""
    figure, axes = figure_of(1, 3, 11, 3)
    metrics = ("rewards/right_number/mean", "completions/mean_length", "rewards/worked/mean")
    for panel, metric in zip(axes[0], metrics):
        for name, colour, label in ((GAME, OURS, "grpo.py"), (DIRECT, OTHERS, "may only answer at once")):
            x, y = band(RECORD[name], metric)
            means = [statistics.fmean(points) for points in zip(*[smooth(line, 5) for line in y])]
            panel.plot(x[2:-2], means, color=colour, label=label)
            panel.fill_between(x, y.min(0), y.max(0), color=colour, alpha=0.2, linewidth=0)
        panel.set_title(TITLES[metric], fontsize=10)
        panel.set_xscale("log"), panel.set_xlabel("episodes", fontsize=9)
    axes[0, 0].set_ylim(0, 1), axes[0, 1].set_ylim(0), axes[0, 0].legend(frameon=False, fontsize=9)
    figure.savefig(docs / "thinking.png", dpi=100)


def draw_price(docs: Path) -> None:
    """price.png: length against the number of swaps, before, after, and with a price for each sign."""
    figure, axes = figure_of(1, 2, 8, 3)
    runs = {"before": (BEFORE, "grey"), "without a price": (TIED_GAME, OURS), "with a price": (PRICED, OTHERS)}
    for label, (name, colour) in runs.items():
        of = [run["answers"]["by_swaps"] for run in RECORD[name]]
        for panel, key in zip(axes[0], ("length", "right")):
            ys = [[x[str(k)][key] for k in range(1, 9)] for x in of]
            panel.plot(range(1, 9), [statistics.fmean(y) for y in zip(*ys)], "o-", color=colour, label=label, ms=4)
            panel.fill_between(range(1, 9), *[[f(y) for y in zip(*ys)] for f in (min, max)], color=colour, alpha=0.2)
    for panel, title in zip(axes[0], ("tokens of a sampled answer", "sampled answers right")):
        panel.set_title(title, fontsize=10), panel.set_xlabel("swaps in the prompt", fontsize=9), panel.set_ylim(0)
    axes[0, 0].legend(frameon=False, fontsize=9)
    figure.savefig(docs / "price.png", dpi=100)


def draw_no_kl(docs: Path) -> None:
    """no-kl.png: score and gold score of a poor reward model with and without KL penalty."""
    figure, axes = figure_of(1, 2, 8, 3)
    for panel, beta in zip(axes[0], ("0", "0.2")):
        runs = RECORD.get(f"ppo {learning.POOR_RUNS[beta]}", [])
        for metric, colour in {"objective/scores": OURS, GOLD_MEAN: "#b58900"}.items():
            draw_band(panel, runs, metric, colour, TITLES[metric])
        panel.set_title(f"β = {beta}", fontsize=10), panel.set_xlabel("episodes", fontsize=9)
    axes[0, 0].legend(frameon=False, fontsize=9), axes[0, 0].sharey(axes[0, 1])
    figure.savefig(docs / "no-kl.png", dpi=100)


def draw_frontier(docs: Path) -> None:
    """frontier.png: gold score against KL along the training, the mean over the seeds."""
    figure, axes = figure_of(1, 1, 6, 4)
    for script in ("dpo", "rloo", "ppo"):
        kl, gold = (band(RECORD[script], name)[1].mean(0) for name in ("objective/kl", GOLD_MEAN))
        axes[0, 0].plot(kl, gold, label=f"{script}.py")
    axes[0, 0].set_xlabel("KL to the reference, nats a response"), axes[0, 0].set_ylabel("gold score")
    axes[0, 0].legend(frameon=False)
    figure.savefig(docs / "frontier.png", dpi=100)


def stale_of_others() -> list[Path]:
    """The pages that other programs fill in, whose tables are not those of their results: run that program."""
    sys.path.append(str(ROOT / "exercises/bugs"))
    import agent
    import forks
    import gallery
    import overoptimization
    import questions
    import real
    import takeoff

    of = {program: json.loads(program.OUTPUT.read_text()) for program in (agent, forks, gallery, questions)}
    pages = {
        agent.PAGE: agent.tables(of[agent]),
        forks.PAGE: {"forks": forks.table(of[forks])},
        gallery.PAGE: {"gallery": gallery.gallery(of[gallery])},
        questions.QUESTIONS: {name: table(of[questions]) for name, table in questions.TABLES.items()},
        takeoff.PAGE: takeoff.tables(takeoff.read_record()),
    }
    pages[real.PAGE] = real.tables(real.read_record())
    stale = []
    for page, filled in pages.items():
        text = page.read_text("utf-8")
        if not all(f"<!-- {name} -->\n{table}\n<!-- /{name} -->" in text for name, table in filled.items()):
            stale.append(page)
    page = ROOT / "docs/overoptimization.md"
    text = page.read_text("utf-8")
    if overoptimization.filled_in(text, json.loads(overoptimization.OUTPUT.read_text())) != text:
        stale.append(page)
    return stale


def main() -> None:
    """Writes, or checks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    args = parser.parse_args()
    fill_record()
    stale = [page for page in PAGES if rewritten(page.read_text("utf-8")) != page.read_text("utf-8")]
    if args.check:
        stale += stale_of_others()
    print(f"{len(stale)} pages with tables that are not those of the results {[page.name for page in stale]}")
    if args.check:
        sys.exit(bool(stale))
    for page in stale:
        page.write_text(rewritten(page.read_text("utf-8")), "utf-8")
    docs = ROOT / "docs"
    for script in SCRIPTS:
        draw_beside(script, LEARNED)
    for draw in (draw_thinking, draw_price, draw_no_kl, draw_frontier):
        draw(docs)
    draw_all_beside(LEARNED)


if __name__ == "__main__":
    main()
