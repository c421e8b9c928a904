"""Writes the tables of the pages from the records: what stands between <!-- NAME --> and <!-- /NAME -->.

    python experiments/tables.py            # writes them
    python experiments/tables.py --check    # only says which pages have other tables

tables.toml has the tables with a row for each run, this file the others. In a cell, ± is the standard deviation over
the seeds. CPU seconds are those of the fastest seed: what slows a run down is another program, or another machine.
"""

import argparse
import math
import re
import statistics
import sys
import tomllib
from pathlib import Path

import overoptimization as laws
import takeoff
from record import ROOT, by_name, difference, minus, number, reached, smooth, until, verdict, with_tables
from real_data import GOLD, LEXICON, REWARD_MODEL
from common import markdown
import run_trl

PAGES = [ROOT / "README.md", *(ROOT / folder / "README.md" for folder in ("toy", "benchmarks", "experiments"))]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
SPECS = tomllib.loads(Path(__file__).with_name("tables.toml").read_text("utf-8"))
SCRIPTS = ("sft", "reward_model", "ppo", "rloo", "grpo", "dpo", "ddpo")


def learned(name: str) -> list[dict]:
    """The runs of a name in the group that most tables are about."""
    return by_name("learning").get(name, [])


# ---------------------------------------------------------------------------------------------------------------------
# The tables and texts of tables.toml


def parse(column: str) -> tuple[str, str, str]:
    """PART, METRIC and DIGITS."""
    part, *metric, digits = column.split(" ")
    return part, " ".join(metric), digits


def value_of(run: dict, part: str, metric: str = ""):
    """What a column shows of a run; None if the run does not have it."""
    curves = run.get("curves", {})
    if part == "cpu":
        return run["cpu_seconds"]
    if part == "minutes":
        return run["cpu_seconds"] / 60
    if part == "gb":
        peak = run.get("peak_memory_mb") or max(curves.get("perf/peak_memory_mb", [0]))  # older runs logged it
        return peak / 1024 or None
    if part == "best":  # of eight answers, by a reward model
        return run["read"]["best of"]["8"][0] if "read" in run else None
    if part == "last":
        return curves[metric][-1]
    if part == "highest":
        return max(smooth(curves[metric]))
    if part == "until":
        metric, goal = metric.rsplit(" ", 1)
        return until(next(iter(curves.values())), curves[metric], float(goal))
    return run.get(part, {}).get(metric)


def by_seed(runs: list[dict], part: str, metric: str = "") -> dict[int, float]:
    """The same of those runs that have it, by seed."""
    return {run["seed"]: x for run in runs if (x := value_of(run, part, metric)) is not None}


def figure(found: list, digits: int | str) -> str:
    """A cell. Evaluations have a mean and a standard error over prompts, which is shown of a single run."""
    if len(found) == 1 and isinstance(found[0], dict):
        return minus(" ± ".join(f"{x:.{digits}f}" for x in found[0].values()))
    return number([x["mean"] if isinstance(x, dict) else x for x in found], digits)


def cell(runs: list[dict], column: str, first: list[dict] | None = None) -> str:
    """What a column shows of the runs of a name; `first` are those of the first row."""
    if not runs:
        return ""
    if column == "seeds":
        return str(len(runs))
    part, metric, digits = parse(column)
    if part == "until":
        return reached([value_of(run, part, metric) for run in runs], digits)
    if part == "beside":
        sides = (by_seed(some, *metric.split(" ", 1)) for some in (runs, first))
        return verdict(*sides, digits) if runs is not first else ""
    if metric == "kl" and "curves" not in runs[0]:
        return "0"  # of the model as it is, which is the reference
    runs = runs[:1] if part == "before" else runs  # all have the same start
    found = list(by_seed(runs, part, metric).values())
    return figure([min(found)] if part == "cpu" else found, digits)


def mean(runs: list[dict], column: str) -> str:
    """The same without its deviation."""
    return cell(runs, column).split(" ± ")[0]


def table(spec: dict) -> str:
    """A table; without rows, of all runs of its group. Rows without runs are left out."""
    runs = by_name(spec.get("group", "learning"))
    rows = spec["rows"] or {name: name for name in runs}
    of = {label: runs[name] for label, name in rows.items() if name in runs}
    first = next(iter(of.values()))
    counts = sorted(map(len, of.values()))
    seeds = f"{counts[0]} to {counts[-1]} seeds" if counts[0] < counts[-1] else f"{counts[0]} seeds"
    lines = [[spec.get("heading", seeds), *map(str.strip, spec["columns"])]]
    for label, some in of.items():
        cells = [cell(some, column, first) for column in spec["columns"].values()]
        lines.append([label.replace("{n}", str(len(some))), *cells])
    return markdown(lines, spec.get("align", ""))


def fill(text: str) -> str:
    """A text with its figures."""

    def value(found: re.Match) -> str:
        """Of {RUN: PART METRIC DIGITS}, or {FILE: lines DIGITS}."""
        name, column = found.groups()
        part, metric, digits = parse(column)
        if part == "lines":
            length = (ROOT / name).read_text("utf-8").count("\n")
            return f"{round(length, int(digits)):,}"
        if digits == "%":
            return f"{100 * statistics.fmean(by_seed(learned(name), part, metric).values()):.0f} %"
        return mean(learned(name), column)

    return re.sub(r"\{(.+?): (.+?)\}", value, text.strip())


# ---------------------------------------------------------------------------------------------------------------------
# README, experiments/README.md


def beside_trl() -> str:
    """The CPU seconds of all scripts beside TRL's."""
    lines = [["", "ours, CPU seconds", "TRL", "difference", "version"]]
    for script in SCRIPTS:
        sides = [by_seed(learned(name), "cpu") for name in (script, f"TRL {script}")]
        cells = [number([*side.values()], 0) for side in sides]
        lines.append([f"[`{script}.py`](../docs/{script}.md#results)", *cells, verdict(*sides, 0)])
        lines[-1].append(run_trl.TRAINERS[script])
    return markdown(lines, "lrrll")


def beside() -> str:
    """The README's table, and the number of seeds."""
    scripts = ("ppo", "grpo")
    lines = [["", "", "ours", "TRL", "difference"]]
    for script in scripts:
        label = f"`{script}.py`, TRL {run_trl.TRAINERS[script]}"
        for title, column in (SPECS["beside-trl"][script] | {"CPU seconds": "cpu 0"}).items():
            part, metric, digits = parse(column)
            sides = [by_seed(learned(name), part, metric) for name in (script, f"TRL {script}")]
            cells = [number([*side.values()], digits) for side in sides]
            lines.append([label, title, *cells, verdict(*sides, digits)])
            label = ""
    seeds = [f"`{name}.py` {len(learned(name))}, TRL {len(learned(f'TRL {name}'))}" for name in scripts]
    return f"Seeds: {'; '.join(seeds)}.\n\n{markdown(lines, 'llrrl')}"


# ---------------------------------------------------------------------------------------------------------------------
# docs/findings/questions.md

SAMPLERS = ("the policy itself", "bf16", "int8", "int4", "1 update old", "4 updates old", "16 updates old")
CORRECTIONS = ("none", "clip", "tis")
SIDES = ("false +", "false −", "both")
RATES = ("5%", "10%", "20%")
SIZES = (2, 4, 8, 16, 32)  # of groups


def asked(question: str, name: str) -> list[dict]:
    """The runs of a name, in a question."""
    return by_name("questions").get(f"{question}: {name}", [])


def teacher() -> str:
    """Of each way to learn: how soon, and how well in the end."""
    lines = [["", "episodes to .9 right", "right in the end"]]
    for name, runs in by_name("questions").items():
        if name.startswith("teacher: "):
            soon = cell(runs, "until right 0.9 0") if len(runs) > 1 else ""  # the others do not learn
            lines.append([name.removeprefix("teacher: "), soon, cell(runs, "end right 3")])
    return markdown(lines)


def sampler() -> str:
    """Of each sampler: how far it is from the policy, and what that does without and with the corrections."""
    lines = [["sampler", "approxkl", *(f"right: {name}" for name in CORRECTIONS)]]
    for name in SAMPLERS:
        of = [asked("sampler", f"{name}, {correction}") for correction in CORRECTIONS]
        distance = statistics.fmean(x for run in of[0] for x in run["curves"]["approxkl"])
        lines.append([name, f"{distance:.1g}", *(cell(runs, "end right 3") for runs in of)])
    return markdown(lines)


def liar() -> str:
    """By how often it lies, and on which side."""
    lines = [["lies", *(f"right: {side}" for side in SIDES)]]
    rows = {"none": [asked("liar", "honest")] * 3}
    rows |= {rate: [asked("liar", f"{side} {rate}") for side in SIDES] for rate in RATES}
    rows["20%, by prompt"] = [[], [], asked("liar", "both 20%, by prompt")]
    for label, of in rows.items():
        lines.append([label, *(cell(runs, "end right 3") for runs in of)])
    return markdown(lines)


# ---------------------------------------------------------------------------------------------------------------------
# docs/findings/takeoff.md


def take_off_cells(runs: list[dict]) -> list[str]:
    """How many runs take off, and their share."""
    n, count = len(runs), sum(takeoff.outcome(run) > 0.5 for run in runs)
    share = count / n
    return [f"{count} of {n}", f"{share:.2f} ± {math.sqrt(share * (1 - share) / n):.2f}"]


def takeoff_shares() -> str:
    """Of each arm: how many runs take off, and how many more than of GRPO's."""
    lines = [["", "take off", "share", "less GRPO's, paired"]]
    off = {arm: [takeoff.outcome(run) > 0.5 for run in runs] for arm, runs in takeoff.arms().items()}
    for arm, runs in takeoff.arms().items():
        paired = "" if arm == "GRPO" else difference(off["GRPO"], off[arm], 2)
        lines.append([arm, *take_off_cells(runs), paired])
    return markdown(lines)


# ---------------------------------------------------------------------------------------------------------------------
# docs/findings/overoptimization.md


def best_of_n() -> str:
    """What reward models know, what the best of n earns, and the peak and the end of PPO."""
    most = laws.BEST_OF[-1]
    heads = ["parameters", "pairs", "unseen pairs right", f"best of {most}", "PPO: highest", "at the end"]
    lines = [heads]
    for (size, pairs), runs in laws.groups().items():
        gold = [laws.smooth(run["ppo"]["gold"]) for run in runs]
        line = [size, f"{pairs:,}", number([run["accuracy"] for run in runs], 2)]
        line += [number([run["best_of_n"]["gold"][-1] for run in runs], 2), number([g.max() for g in gold], 2)]
        line.append(number([g[-1] for g in gold], 2))
        lines.append(line)
    return markdown(lines, "llrrrr")


def checks() -> str:
    """The paper's other findings, by number of pairs, over seeds: the two sizes of a seed learn from the same pairs, so
    their mean counts. A gain is a gold score less its start."""
    most, start = laws.BEST_OF[-1], laws.start_gold()
    heads = ["pairs", f"gain of the best of {most}", "KL that PPO needs for this gain"]
    lines = [[*heads, "gain of PPO at its proxy score"]]
    for pairs in sorted({run["pairs"] for run in laws.all_runs()}):
        found = {}  # seed -> three numbers of each size, None if PPO does not get there
        for run in laws.all_runs():
            if run["pairs"] == pairs:
                gain = laws.points(run, "best of n")[1][-1]
                gold = laws.first_at(run, "proxy", run["best_of_n"]["proxy"][-1], "gold")
                three = [gain, laws.first_at(run, "gold", gain + start, "kl"), None if gold is None else gold - start]
                found.setdefault(run["seed"], []).append(three)
        line = [f"{pairs:,}"]
        for column, digits in zip(zip(*(zip(*sizes) for sizes in found.values())), (2, 1, 2)):
            known = [[x for x in sizes if x is not None] for sizes in column]
            missing = sum(map(len, column)) - sum(map(len, known))
            note = f" ({sum(map(len, known))} of {sum(map(len, column))} runs)" if missing else ""
            line.append(number([statistics.fmean(x) for x in known], digits) + note)
        lines.append(line)
    return markdown(lines, "lrrr")


# ---------------------------------------------------------------------------------------------------------------------
# docs/findings/real.md

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


def texts(columns: dict[str, str]) -> str:
    """What policies say to three unseen prompts, of seed 1: a column for each label -> name."""
    lines = [["", *columns]]
    for said in zip(*(real(name)[0]["answers"][:3] for name in columns.values())):
        lines.append([said[0][0], *(text.replace("\n", " ⏎ ").replace("|", "\\|") for _, text in said)])
    return markdown(lines, "l" * len(lines[0]))


def real_answers() -> str:
    """Sums, before and after."""
    return texts({"before": "before", "after": "grpo"})


def real_sayings() -> str:
    """Opinions, before and after."""
    return texts({"before": "before, opinions", "`ppo.py`": "ppo, 0.02", "`rloo.py`, far": "rloo, 0, far"})


def by_prompt(run: dict) -> list[float]:
    """For each unseen prompt, the mean gold score of its answers."""
    scores = run["rewards"][GOLD]
    n = len(scores) // PROMPTS
    return [statistics.fmean(scores[i : i + n]) for i in range(0, len(scores), n)]


def real_policies() -> str:
    """The policies, on unseen prompts. A gain is paired over prompts for one seed, else over seeds."""
    heads = ["", "seeds", "gold score", "more than before", "lexicon", "reward", "KL", "ended", "CPU minutes", "GB"]
    before, pairs = real("before, opinions"), real("reward model")

    def line(name: str, runs: list[dict], gain: str = "", costs: tuple[str, ...] = ()) -> list[str]:
        """A row."""
        means = [mean(runs, f"end {score} 2") for score in (LEXICON, REWARD_MODEL)]
        cells = [cell(runs, column) for column in ("seeds", f"end {GOLD} 3", "end kl 1", "end eos_share 2", *costs)]
        return [name, *cells[:2], gain, *means, *cells[2:]]

    best = [number([run["read"]["best of"]["8"][i] for run in pairs], 3 - (i > 0)) for i in range(3)]
    kl = f"{math.log(8) - 7 / 8:.1f}"
    lines = [heads, [*line("before", before), "", ""]]
    lines += [["best of 8", cell(pairs, "seeds"), best[0], "", *best[1:], kl, "", "", ""]]
    for name in ("sft on the best of 4", "dpo", "ppo, 0.02", "rloo, 0.02", "rloo, 0, far", "grpo, 0.02"):
        sides = by_prompt(before[0]), by_prompt(real(name)[0])
        if len(real(name)) > 1:
            gold = [statistics.fmean(by_prompt(run)) for run in real(name)]
            sides = [statistics.fmean(sides[0])] * len(gold), gold
        lines.append(line(name, real(name), difference(*sides, 3), ("minutes 0", "gb 1")))
    return markdown(lines)


TABLES = (beside, beside_trl, teacher, sampler, liar)  # each has the name of its place on a page
TABLES += (checks,)
TABLES += (real_answers, real_sayings, real_policies)
OTHERS = {"takeoff": takeoff_shares, "best of n": best_of_n}


def all_tables() -> dict[str, str]:
    """Every table, by name."""
    found = {name: table(spec) for name, spec in SPECS.items() if "rows" in spec}
    found |= {name: fill(spec["text"]) for name, spec in SPECS.items() if "text" in spec}
    found |= {make.__name__.replace("_", "-"): make() for make in TABLES}
    return found | {name: make() for name, make in OTHERS.items()}


def main() -> None:
    """Writes, or checks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    args = parser.parse_args()
    tables = all_tables()
    pages = {page: page.read_text("utf-8") for page in PAGES}
    stale = {page: new for page, text in pages.items() if (new := with_tables(text, tables)) != text}
    names = ", ".join(page.name for page in stale)
    print(f"tables differ from the records on: {names or 'no page'}")
    if args.check:
        sys.exit(bool(stale))
    for page, text in stale.items():
        page.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
