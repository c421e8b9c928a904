"""Draws the pictures of the pages from the records.

python experiments/draw.py                          # all of them
python experiments/draw.py agent-tree agent-curve   # some, by the names of their files
python experiments/draw.py --svg runs/pictures      # as SVG, for slides, in this folder
"""

import argparse
import math
import random
import runpy
import statistics
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import overoptimization as laws
import tables
import takeoff
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread
from record import GOLD as GOLD_MEAN, ROOT, by_name, smooth
from real_data import GOLD, LEXICON, REWARD_MODEL
from run_trl import TRAINERS

OURS, OTHERS = "#2a6fbb", "#c46a2b"
COLOURS = (OURS, OTHERS, "#b58900", "#5b8c3e", "#8e5ba6", "#444444")
TITLES = tables.SPECS["titles"]  # of metrics
BANDS = "lines: means over the seeds; bands: from the lowest seed to the highest"
PICTURES = {}  # file -> what draws it, and its panels


def picture(file: str, rows: int, columns: int, width: float, height: float, dpi: int = 100):
    """Registers a function that draws a picture, on so many panels."""
    return lambda draw: PICTURES.setdefault(file, (draw, rows, columns, width, height, dpi))


def band(runs: list[dict], metric: str, axis: str = "") -> tuple:
    """Points on the axis that all runs reach, and the metric of each run there, interpolated."""
    lines = []
    for run in runs:
        along = run["curves"][axis or next(iter(run["curves"]))]
        lines.append([(x, y) for x, y in zip(along, run["curves"][metric]) if y is not None])
    first, last = max(line[0][0] for line in lines), min(line[-1][0] for line in lines)
    x = np.linspace(first, last, min(map(len, lines)))
    return x, np.array([np.interp(x, *zip(*line)) for line in lines])


def draw_bands(
    panel, rows: dict[str, list[dict]], metric: str, colours=COLOURS, axis: str = "", width: int = 1
) -> None:
    """For each label its runs: the mean over the seeds, of so many neighbouring points; and their range."""
    for (label, runs), colour in zip(rows.items(), colours):
        if any(y is not None for run in runs for y in run["curves"][metric]):
            x, y = band(runs, metric, axis)
            inner = slice(width // 2, len(x) - width // 2)
            panel.plot(x[inner], smooth(y.mean(0), width), color=colour, label=label)
            panel.fill_between(x[inner], y.min(0)[inner], y.max(0)[inner], color=colour, alpha=0.2, linewidth=0)
    panel.figure.supxlabel(BANDS, fontsize=8, color="0.4")


def draw_points(panel, x: list[float], seeds: list[list[float]], colour: str, label: str, alpha: float) -> None:
    """The mean of some points of each seed, and their range."""
    y = np.array(seeds)
    panel.plot(x, y.mean(0), "o-", color=colour, label=label, markersize=4)
    panel.fill_between(x, y.min(0), y.max(0), color=colour, alpha=alpha)
    panel.figure.supxlabel(BANDS, fontsize=8, color="0.4")


def head(panel, title: str, axis: str) -> None:
    """Of a panel: its title, and what its axis is."""
    panel.set_title(title, fontsize=10)
    panel.set_xlabel(axis, fontsize=9)


def legend(*panels, size: int = 9) -> None:
    """The names of the lines."""
    for panel in panels:
        panel.legend(frameon=False, fontsize=size)


# ---------------------------------------------------------------------------------------------------------------------
# README.md


@picture("docs/curves", 1, 3, 13, 3.4)
def curves(axes):
    """What ppo.py learns: sampled texts along the training as lines, the likeliest words in the end as points."""
    runs = tables.learned("ppo")
    panels = [(axes[0], "objective/scores", "scores", OURS, "score, ")]
    panels += [(axes[0], GOLD_MEAN, GOLD_MEAN, OTHERS, "gold score, ")]
    panels += [(axes[1], "objective/kl", "", OURS, ""), (axes[2], "val/eos_share", "eos_share", OURS, "")]
    for panel, metric, likeliest, colour, what in panels:
        draw_bands(panel, {f"{what}samples": runs}, metric, (colour,))
        if likeliest:
            ends = [run["end"][f"eval/{likeliest}"] for run in runs if f"eval/{likeliest}" in run["end"]]
            low, mean, high = min(ends), statistics.fmean(ends), max(ends)
            x = runs[0]["curves"]["episode"][-1] * 1.04
            bar = [[mean - low], [high - mean]]
            panel.errorbar(x, mean, bar, fmt="o", color=colour, label=f"{what}likeliest words")
    for panel, title in zip(axes, ("score and gold score", "KL, nats", "share of texts that end")):
        head(panel, title, "texts sampled"), panel.set_ylim(min(0, panel.get_ylim()[0]))
    legend(axes[0], axes[2])
    axes[0].get_legend().set_loc("lower center")  # beside the points


# ---------------------------------------------------------------------------------------------------------------------
# Each script beside TRL, docs/ppo.md, docs/grpo.md, docs/dpo.md


def sides(script: str) -> dict[str, list[dict]]:
    """The runs of ours and of TRL's."""
    names = {f"{script}.py": script, f"TRL {TRAINERS[script]}": f"TRL {script}"}
    return {label: tables.learned(name) for label, name in names.items()}


def beside(script: str, axes) -> None:
    """Ours and TRL's curves, the mean and range of the seeds."""
    axis, *metrics = tables.learned(script)[0]["curves"]
    for panel, metric in zip(axes, metrics):
        draw_bands(panel, sides(script), metric)
        head(panel, TITLES[metric], f"{axis}s")
    legend(axes[0])


for name in tables.SCRIPTS:
    count = len(tables.learned(name)[0]["curves"]) - 1
    file = f"experiments/results/learning-{name.replace('_', '-')}"
    picture(file, 1, count, 3.6 * count, 3)(partial(beside, name))


@picture("experiments/results/learning", 2, 4, 14, 6)
def learning(axes):
    """For each script the one metric that it is about."""
    for panel, script in zip(axes, tables.SCRIPTS):
        axis, metric, *_ = tables.learned(script)[0]["curves"]
        metric = GOLD_MEAN if script == "dpo" else metric
        draw_bands(panel, sides(script), metric)
        head(panel, f"{script}: {TITLES[metric]}", f"{axis}s")
    axes[0].set_yscale("log"), axes[7].axis("off")
    legend(*axes[:7], size=8)


@picture("docs/thinking", 1, 3, 11, 3)
def thinking(axes):
    """Right answers, length, share worked out, of grpo.py and of a policy that may only answer at once."""
    rows = {"grpo.py": "grpo", "may only answer at once": "grpo --response-length 3"}
    rows = {label: tables.learned(name) for label, name in rows.items()}
    for panel, metric in zip(axes, ("rewards/right_number/mean", "completions/mean_length", "rewards/worked/mean")):
        draw_bands(panel, rows, metric, width=5)
        head(panel, TITLES[metric], "episodes, logarithmic")
        panel.set_xscale("log")
    axes[0].set_ylim(0, 1), axes[1].set_ylim(0)
    legend(axes[0])


@picture("docs/no-kl", 1, 2, 8, 3)
def no_kl(axes):
    """Score and gold score with a poor reward model, with and without KL penalty."""
    for panel, beta in zip(axes, ("0", "0.2")):
        for metric, colour in {"objective/scores": OURS, GOLD_MEAN: "#b58900"}.items():
            runs = tables.learned(f"ppo, poor reward model, beta {beta}")
            draw_bands(panel, {TITLES[metric]: runs}, metric, (colour,))
        head(panel, f"β = {beta}, {len(runs)} seeds", "episodes")
    axes[0].sharey(axes[1])
    legend(axes[0])


@picture("docs/watch", 5, 2, 8, 11)
def watch(axes):
    """A row of panels for each fault: what came out, and what shows it. Dotted: a bound that healthy runs keep."""
    score, default = "objective/scores", "the default"
    fast = "--learning-rate 1e-3"  # at which a lack of KL shows within so few episodes
    rows = {  # what goes wrong: the run, the one beside it, the result, the metric that shows the fault, and its bound
        "KL is too cheap": (f"{fast} --kl-coef 0", fast, score, "objective/kl", 50),
        "the learning rate is too high": ("--learning-rate 1e-2", default, score, "policy/approxkl_avg", 0.1),
        "the reward does not tell responses apart": (
            "--reward-fn rewards/verifiers.py:tagged", default, GOLD_MEAN, "objective/scores_std", 0),
        "responses never end": ("--response-length 24", default, score, "val/eos_share", 0.2),
        "the critic does not learn": ("--critic-learning-rate 1e-9", default, score, "val/explained_variance", 0.35),
    }  # fmt: skip
    for (title, (wrong, right, result, shown, bound)), *panels in zip(rows.items(), axes[::2], axes[1::2]):
        for panel, metric in zip(panels, (result, shown)):
            for name, colour in ((right, OURS), (wrong, OTHERS)):
                curves = by_name("watch")[name][0]["curves"]
                label = name.replace(default, "--missing-eos-penalty 0, as in all")
                panel.plot(curves["episode"], curves[metric], color=colour, label=label)
            panel.set_ylabel(metric, fontsize=8)
        panels[0].set_title(title, fontsize=10, loc="left", weight="bold")
        panels[1].axhline(bound, color="black", linewidth=0.8, linestyle=":")
        panels[1].set_yscale("log" if shown == "policy/approxkl_avg" else "linear")
        panels[1].legend(frameon=False, fontsize=7, loc="lower left", bbox_to_anchor=(0, 1), borderpad=0)
    for panel in axes[-2:]:
        panel.set_xlabel("responses sampled", fontsize=8)


@picture("docs/ddpo-images", 2, 8, 9, 2.8)
def ddpo_images(axes):
    """Images of the first model and of the policy, from the same noise, with their rewards: what ddpo.py wrote after a
    run, in tiles of 60 pixels, of which 6 are a margin; 6 are one of the image."""
    grid = imread(ROOT / "experiments/results/ddpo-tiles.png")[..., 0]
    reward = runpy.run_path(str(ROOT / "toy/shapes/make.py"))["left_ink"]
    tiles = [grid[y + 9 : y + 54 : 6, x + 9 : x + 54 : 6] for y in (0, 60) for x in range(0, 480, 60)]
    for panel, tile in zip(axes, tiles):
        panel.imshow(tile, cmap="gray", vmin=0, vmax=1)
        panel.set_xlabel(f"{reward(torch.from_numpy(tile)[None, None], [], []).item():z.1f}", fontsize=9)
        panel.set_xticks([]), panel.set_yticks([])
    axes[0].set_ylabel("first model", fontsize=9), axes[8].set_ylabel("policy", fontsize=9)
    axes[0].figure.supxlabel("number: reward, how much brighter the left half is", fontsize=8, color="0.4")


# ---------------------------------------------------------------------------------------------------------------------
# docs/findings/questions.md


@picture("docs/findings/questions-teacher", 1, 2, 9, 3.4)
def questions_teacher(axes):
    """Right answers against episodes, and against seconds."""
    rows = {name: runs for name, runs in by_name("questions").items() if name.startswith("teacher") and len(runs) > 1}
    rows = {name.removeprefix("teacher: "): runs for name, runs in rows.items()}
    for panel, (axis, text) in zip(axes, {"episode": "episodes, logarithmic", "seconds": "CPU seconds"}.items()):
        draw_bands(panel, rows, "right", axis=axis)
        head(panel, "right answers to unseen prompts", text)
    axes[0].set_xscale("log"), axes[1].set_xlim(0, 4)
    legend(*axes, size=8)


@picture("docs/findings/questions-sampler", 1, 3, 13, 3.4)
def questions_sampler(axes):
    """How far the samplers are from the policy, and what is learned from the worst two."""
    own, *others = tables.SAMPLERS
    draw_bands(axes[0], {name: tables.asked("sampler", f"{name}, none") for name in others}, "approxkl")
    axes[0].set_yscale("symlog", linthresh=1e-6), axes[0].set_ylim(0)  # bf16 is often 0
    head(axes[0], "approxkl, sampler and policy; logarithmic from 1e-6", "episodes")
    for panel, name in zip(axes[1:], ("int4", "16 updates old")):
        rows = {own: tables.asked("sampler", f"{own}, none")}
        rows |= {f"{name}, {x}": tables.asked("sampler", f"{name}, {x}") for x in tables.CORRECTIONS}
        draw_bands(panel, rows, "reward", ("grey", *COLOURS))
        head(panel, "right answers, of the sampler", "episodes"), panel.set_ylim(0, 1)
    legend(*axes[1:], size=8)
    axes[0].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


@picture("docs/findings/questions-liar", 1, 2, 9, 3.4)
def questions_liar(axes):
    """Right answers while a verifier lies in 20 % of the cases, and in the end against how often it lies."""
    honest = tables.asked("liar", "honest")
    rows = {"honest": honest} | {f"{side} 20%": tables.asked("liar", f"{side} 20%") for side in tables.SIDES}
    draw_bands(axes[0], rows, "truth", ("grey", *COLOURS))
    for side, colour in zip(tables.SIDES, COLOURS):
        of = [honest, *(tables.asked("liar", f"{side} {rate}") for rate in tables.RATES)]
        draw_points(axes[1], [0, 0.05, 0.1, 0.2], ends(of, "right"), colour, side, 0.15)
    axes[1].set_xticks([0, 0.05, 0.1, 0.2])
    head(axes[0], "right answers while it learns", "episodes")
    head(axes[1], "right answers to unseen prompts in the end", "share of lies")
    legend(*axes, size=8)


@picture("docs/findings/questions-groups", 1, 2, 9, 3.4)
def questions_groups(axes):
    """What is learned in the end, against the size of groups."""
    rows = {"grpo": ("right", "3,200 episodes", "3 CPU seconds")}
    rows |= {"rloo": ("gold score", "1,024 episodes", "20 CPU seconds")}
    for panel, (script, (metric, *labels)) in zip(axes, rows.items()):
        for limit, label, colour in zip(("episodes", "seconds"), labels, COLOURS):
            of = [tables.asked(f"{limit} lecture/{script}.py", size) for size in tables.SIZES]
            draw_points(panel, tables.SIZES, ends(of, metric), colour, label, 0.15)
        panel.set_xscale("log", base=2), panel.set_xticks(tables.SIZES, tables.SIZES)
        head(panel, f"lecture/{script}.py: {metric}", "answers to a prompt")
    legend(*axes, size=8)


def ends(of: list[list[dict]], metric: str) -> list[tuple]:
    """For each seed, what the policies of some runs earn in the end."""
    return list(zip(*([run["end"][metric] for run in runs] for runs in of), strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# docs/findings/takeoff.md, docs/agent.md


@picture("docs/findings/questions-takeoff", 1, 3, 13, 3.6)
def questions_takeoff(axes):
    """Each run's outcome; all runs of GRPO; and how soon an outcome can be foretold."""
    colours = ("#444444", "#b58900", "#3b6ea8", "#8e5ba6", "#c0563f", "#5b8c3e")
    runs, updates = takeoff.arms(), takeoff.UPDATES
    rng = random.Random(1)
    for place, (of, colour) in enumerate(zip(runs.values(), colours)):
        shares = [takeoff.outcome(run) for run in of]
        axes[0].plot([place + rng.uniform(-0.3, 0.3) for _ in shares], shares, ".", color=colour, alpha=0.6)
        axes[0].plot([place - 0.35, place + 0.35], [statistics.fmean(shares)] * 2, color="black", linewidth=1)
    axes[0].set_xticks(range(len(runs)), [arm.replace(" ", "\n", 1) for arm in runs], fontsize=8)
    axes[0].set_title("right answers in the end, a dot a run; line: mean", fontsize=10)
    for run in runs["GRPO"]:
        shares = [x / takeoff.BATCH for x in smooth(run["curves"]["right"], 5)]
        colour = "#c0563f" if takeoff.outcome(run) > 0.5 else "0.7"
        axes[1].plot(range(5, updates + 1), shares, linewidth=0.6, color=colour)
    head(axes[1], "right answers, GRPO, a line a run", "updates")
    for (name, text), colour in zip(takeoff.SIGNS.items(), colours):
        x = range(5, updates + 1, 5)
        axes[2].plot(x, [takeoff.foretold(runs, name, update) for update in x], color=colour, label=text)
    axes[2].axhline(0.5, color="0.8", linewidth=1), axes[2].set_ylim(-0.1, 1.1)
    for y, text in {1.02: "always the run with more", 0.52: "chance", -0.06: "always the run with less"}.items():
        axes[2].text(updates, y, text, fontsize=8, color="0.4", ha="right")
    legend(axes[2], size=8)
    head(axes[2], "how often a sign tells which of two runs takes off", "updates")


def fewest(size: int, is_best: bool = True) -> float:
    """The mean number of guesses for numbers 1 to `size`: the fewest possible, or with guesses drawn from those left.

    >>> round(15 * fewest(15)), round(fewest(15, is_best=False), 2)
    (49, 4.08)
    """
    sums = [0.0]  # over the numbers 1 to n
    for n in range(1, size + 1):
        both = [sums[guess - 1] + sums[n - guess] for guess in range(1, n + 1)]
        sums.append(n + (min(both) if is_best else statistics.fmean(both)))
    return sums[size] / size


@picture("docs/agent-curve", 1, 1, 8, 3.6)
def agent_curve(axes):
    """Guesses along the training, with and without the fault, beside the fewest and random play."""
    panel = axes[0]
    rows = {
        "the default": ("the default", "tab:blue"),
        "Answers in the loss": ("fault: answers in the loss", "tab:red"),
    }
    for name, (label, colour) in rows.items():
        turns = [run["curves"]["turns"] for run in by_name("agent")[name]]
        lines = panel.plot(512 * np.arange(len(turns[0])), np.transpose(turns), colour, lw=0.9, alpha=0.7)
        lines[0].set_label(label)
    bounds = {fewest(15): "the fewest possible", fewest(15, is_best=False): "random legal play"}
    for mean, text in bounds.items():
        panel.axhline(mean, color="black", lw=0.8, ls=":")
        panel.text(1.01, mean, f"{text}, {mean:.2f}", transform=panel.get_yaxis_transform(), va="center", fontsize=8)
    panel.set(xlabel="episodes", ylabel="guesses in sampled play", ylim=(3, 8.2))
    panel.legend(frameon=False, loc="upper right", ncols=2)


@picture("docs/agent-tree", 1, 2, 10, 3.4)
def agent_tree(axes):
    """Which guess came in which turn, before and after."""
    run = by_name("agent")["the default"][0]
    for panel, when in zip(axes, ("before", "after")):
        nodes = Counter()
        games = sum(count for turn, _, _, count in run[when]["tree"] if turn == 1)
        for turn, a, b, count in run[when]["tree"]:
            nodes[turn, b] += count
            if turn > 1 and a:
                panel.plot([a, b], [turn - 1, turn], color="tab:blue", lw=18 * count / games, alpha=0.5)
        x, y = [b for _, b in nodes], [turn for turn, _ in nodes]
        panel.scatter(x, y, [260 * count / games for count in nodes.values()], color="tab:blue", zorder=3)
        title = f"{when}: {run[when]['sampled']:.2f} guesses"
        panel.set(title=title, xlabel="number that is said", ylabel="guess", xticks=range(1, 16), ylim=(7.5, 0.5))


# ---------------------------------------------------------------------------------------------------------------------
# docs/findings/overoptimization.md

OF_PAIRS = dict(zip((300, 1000, 3000, 10_000, 30_000), ("#c46a2b", "#d9a441", "#8f9f4f", "#4f9d8d", "#2a6fbb")))


@picture("docs/findings/overoptimization", 2, 2, 11, 7.5, dpi=110)
def overoptimization(axes):
    """Gold and proxy score against d, of the first size: the seeds' mean as points, the laws as lines."""
    size = next(iter(laws.groups()))[0]
    for (its_size, pairs), runs in laws.groups().items():
        for column, method in enumerate(laws.FORMS) if its_size == size else ():
            kind = method.replace(" ", "_")
            gold, proxy = (np.mean([run[kind][name] for run in runs], 0) for name in ("gold", "proxy"))
            d, start = laws.points(runs[0], method)[0], gold[0]
            if method == "ppo":
                d = np.sqrt(laws.smooth(np.mean([run["ppo"]["kl"] for run in runs], 0)))
                gold, proxy, start = laws.smooth(gold), laws.smooth(proxy), laws.start_gold()
            style = {"color": OF_PAIRS[pairs], "linewidth": 1}
            axes[column].plot(d, gold, "o", markersize=3, color=OF_PAIRS[pairs], label=f"{pairs:,} pairs")
            x = np.linspace(0.01, d.max(), 200)
            for form in {"best of n": ("best of n",), "ppo": tuple(laws.FORMS)}[method]:
                f = laws.pooled_fit(runs, method, form)
                line = "-" if form == method else ":"
                axes[column].plot(x, start + laws.law(form, x, f["alpha"], f["beta"]), line, **style)
            axes[2 + column].plot(d, proxy, "o-", markersize=3, **style)
    for column, title in enumerate(("best of n", "PPO without KL penalty; dotted: the law of best of n")):
        axes[column].set_title(title, fontsize=10)
        axes[2 + column].set_xlabel("d = √KL")
    axes[0].set_ylabel("gold score"), axes[2].set_ylabel("proxy score, deviations of the initial policy")
    legend(axes[0], size=8)
    axes[0].figure.suptitle(f"reward models of {size}", fontsize=10)


@picture("docs/findings/overoptimization-both", 1, 2, 11, 3.8, dpi=110)
def overoptimization_both(axes):
    """Best of n beside PPO, on one axis, in a panel for each size; the mean over the seeds."""
    names = list(dict.fromkeys(size for size, _ in laws.groups()))
    for (size, pairs), runs in laws.groups().items():
        panel = axes[names.index(size)]
        d = np.sqrt([laws.best_of_n_kl(n) for n in laws.BEST_OF])
        panel.plot(d, np.mean([run["best_of_n"]["gold"] for run in runs], 0), "--", color=OF_PAIRS[pairs])
        kl, gold = (laws.smooth(np.mean([run["ppo"][name] for run in runs], 0)) for name in ("kl", "gold"))
        panel.plot(np.sqrt(kl.clip(0)), gold, color=OF_PAIRS[pairs], label=f"{pairs:,} pairs")
        panel.set_title(f"reward model of {size}; best of n dashed, PPO solid", fontsize=10)
        panel.set(xlabel="d = √KL", ylabel="gold score")
    legend(axes[0], size=8)


# ---------------------------------------------------------------------------------------------------------------------
# docs/findings/real.md


@picture("docs/findings/real", 1, 4, 14, 3)
def real(axes):
    """Right answers, entropy and length, a line for each seed; and pass@k, the mean of the seeds."""
    titles = {"reward": "right answers in the batch", "entropy": "entropy of a token, nats"}
    titles |= {"completions/mean_length": "tokens of an answer"}
    for panel, (metric, title) in zip(axes, titles.items()):
        for run in tables.real("grpo"):
            points = run["curves"][metric]
            panel.plot(range(1, len(points) + 1), points, label=f"seed {run['seed']}")
        head(panel, title, "updates"), panel.set_ylim(0)
    for (metric, of), colour in zip(tables.unseen().items(), ("0.5", "#3b6ea8", "#c0563f")):
        x = sorted(of)
        axes[3].plot(x, [statistics.fmean(of[update]) for update in x], "o-", color=colour, label=metric[5:])
    head(axes[3], "unseen sums right", "updates"), axes[3].set_ylim(0, 1)
    legend(axes[0], axes[3])


@picture("docs/findings/pipeline", 1, 3, 14, 3.6)
def pipeline(axes):
    """Reward, gold score and the lexicon alone against KL: along the training, the mean of the seeds (small dots: where
    each seed ends), best of n, and where other trainings end."""
    lines = {"ppo, 0.02": ("#3b6ea8", "ppo.py --kl-coef 0.02"), "rloo, 0.02": ("#c0563f", "rloo.py --kl-coef 0.02")}
    lines["rloo, 0, far"] = ("#888888", "rloo.py --kl-coef 0, twice the rate")
    best = [run["read"]["best of"] for run in tables.real("reward model")]
    kl = [laws.best_of_n_kl(n) for n in (1, 2, 4, 8)]
    # a title, the metric of a training, the score of an evaluation, and its column in the best of n
    rows = [("reward", "rewards/reward_model/mean", REWARD_MODEL, 2)]
    rows += [("gold score", f"rewards/{GOLD.split(':')[1]}/mean", GOLD, 0)]
    rows += [("lexicon alone", f"rewards/{LEXICON.split(':')[1]}/mean", LEXICON, 1)]
    for panel, (title, metric, score, column) in zip(axes, rows):
        for name, (colour, label) in lines.items():
            curves = [[run["curves"][of] for of in ("objective/kl", metric)] for run in tables.real(name)]
            panel.plot(*np.mean(curves, 0), color=colour, label=label, lw=2)
            for points in curves if len(curves) > 1 else []:
                text = f"{name.split(',')[0]}.py, a seed's end" if points is curves[0] else None
                panel.plot(*(line[-1] for line in points), ".", color=colour, label=text)
        panel.plot(
            kl, [statistics.fmean(of[n][column] for of in best) for n in "1248"], "k.", label="best of 1, 2, 4, 8"
        )
        for name, marker in {"grpo, 0.02": "D", "dpo": "^", "sft on the best of 4": "s"}.items():
            for run in tables.real(name):
                end = run["end"]
                panel.plot(end["kl"]["mean"], end[score]["mean"], f"k{marker}", ms=5, mfc="none", label=name)
        head(panel, title, "KL, nats, on a square-root axis")
        panel.set_xscale("function", functions=(lambda x: np.sqrt(np.maximum(x, 0)), np.square))
        panel.set_xticks([n**2 for n in range(math.ceil(panel.get_xlim()[1] ** 0.5))])
    axes[2].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))


def main() -> None:
    """Draws."""
    names = [Path(file).name for file in PICTURES]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; by default all")
    parser.add_argument("--svg", type=Path, metavar="FOLDER", help="draw them as SVG, in this folder")
    args = parser.parse_args()
    if unknown := set(args.names) - set(names):
        parser.error(f"there is no picture {', '.join(unknown)}")
    if args.svg:
        args.svg.mkdir(parents=True, exist_ok=True)
    for file, (draw, rows, columns, width, height, dpi) in PICTURES.items():
        name = Path(file).name
        if not args.names or name in args.names:
            figure = Figure((width, height), dpi, layout="constrained")
            axes = figure.subplots(rows, columns, squeeze=False).flatten()
            for panel in axes:
                panel.spines[["top", "right"]].set_visible(False)
            draw(axes)
            figure.savefig(args.svg / f"{name}.svg" if args.svg else ROOT / f"{file}.png")


if __name__ == "__main__":
    main()
