"""Draws the pictures of the pages from the records.

python experiments/draw.py                    # all of them
python experiments/draw.py tree looks         # those of these functions
"""

import argparse
import math
import random
import statistics
from collections import Counter

import numpy as np
import overoptimization as laws
import tables
import takeoff
from record import GOLD as GOLD_MEAN, LEARNED, ROOT, by_name, smooth
from real_data import GOLD, LEXICON
from common import figure_of

DOCS = ROOT / "docs"
OURS, OTHERS = "#2a6fbb", "#c46a2b"
COLOURS = (OURS, OTHERS, "#b58900", "#5b8c3e", "#8e5ba6", "#444444")
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


def band(runs: list[dict], metric: str, axis: str = "") -> tuple:
    """Points on the axis that all runs reach, and the metric of each run there, interpolated."""
    lines = []
    for run in runs:
        along = run["curves"][axis or next(iter(run["curves"]))]
        lines.append([(x, y) for x, y in zip(along, run["curves"][metric]) if y is not None])
    first, last = max(line[0][0] for line in lines), min(line[-1][0] for line in lines)
    x = np.linspace(first, last, min(map(len, lines)))
    return x, np.array([np.interp(x, *zip(*line)) for line in lines])


def draw_band(panel, runs: list[dict], metric: str, colour: str, label: str, axis: str = "") -> None:
    """The mean over the seeds, and their range."""
    x, y = band(runs, metric, axis)
    panel.plot(x, y.mean(0), color=colour, label=label)
    panel.fill_between(x, y.min(0), y.max(0), color=colour, alpha=0.2, linewidth=0)


def head(panel, title: str, axis: str = "") -> None:
    """Of a panel: its title, and what its axis is."""
    panel.set_title(title, fontsize=10)
    panel.set_xlabel(axis, fontsize=9)


def save(figure, file, size: int = 9) -> None:
    """Legends where lines have names, and the file."""
    for panel in figure.axes:
        if panel.get_legend_handles_labels()[0]:
            panel.legend(frameon=False, fontsize=size)
    figure.savefig(file, dpi=100)


def sides(script: str) -> dict[str, list[dict]]:
    """The runs of ours and of TRL's."""
    return {
        f"{script}.py": tables.learned(script),
        f"TRL {tables.THEIRS.get(script, '1.16')}": tables.learned(f"TRL {script}"),
    }


def beside() -> None:
    """learning-SCRIPT.png: ours and TRL's curves, the mean and range of the seeds."""
    for script in tables.SCRIPTS:
        axis, *metrics = tables.learned(script)[0]["curves"]
        figure, [axes] = figure_of(1, len(metrics), 3.6 * len(metrics), 3)
        for panel, metric in zip(axes, metrics):
            for (label, runs), colour in zip(sides(script).items(), (OURS, OTHERS)):
                if any(y is not None for run in runs for y in run["curves"][metric]):
                    draw_band(panel, runs, metric, colour, label)
            head(panel, TITLES[metric], f"{axis}s")
        axes[0].legend(frameon=False, fontsize=9)
        figure.savefig(LEARNED / f"learning-{script.replace('_', '-')}.png", dpi=100)


def all_beside() -> None:
    """learning.png: for each script the one metric that it is about."""
    figure, axes = figure_of(2, 4, 14, 6)
    axes[1, 3].axis("off")
    for panel, script in zip(axes.flat, tables.SCRIPTS):
        axis, metric, *_ = tables.learned(script)[0]["curves"]
        metric = GOLD_MEAN if script == "dpo" else metric
        for (label, runs), colour in zip(sides(script).items(), (OURS, OTHERS)):
            draw_band(panel, runs, metric, colour, label)
        head(panel, f"{script}: {TITLES[metric]}", f"{axis}s")
    axes[0, 0].set_yscale("log")
    save(figure, LEARNED / "learning.png", 8)


def thinking() -> None:
    """Right answers, length, share worked out, of grpo.py and of a policy that may only answer at once."""
    figure, [axes] = figure_of(1, 3, 11, 3)
    for panel, metric in zip(axes, (tables.RIGHT, "completions/mean_length", "rewards/worked/mean")):
        rows = {"grpo.py": ("grpo", OURS), "may only answer at once": ("grpo --response-length 3", OTHERS)}
        for label, (name, colour) in rows.items():
            x, y = band(tables.learned(name), metric)
            means = [statistics.fmean(points) for points in zip(*[smooth(line, 5) for line in y])]
            panel.plot(x[2:-2], means, color=colour, label=label)
            panel.fill_between(x, y.min(0), y.max(0), color=colour, alpha=0.2, linewidth=0)
        head(panel, TITLES[metric], "episodes")
        panel.set_xscale("log")
    axes[0].set_ylim(0, 1), axes[1].set_ylim(0), axes[0].legend(frameon=False, fontsize=9)
    figure.savefig(DOCS / "thinking.png", dpi=100)


def price() -> None:
    """Length and right answers against the number of swaps: before, after, and with a price for each token."""
    figure, [axes] = figure_of(1, 2, 8, 3)
    names = {"before": ("grpo --total-episodes 64 --learning-rate 1e-12", "grey")}
    names |= {"without a price": ("grpo --beta 0.1", OURS), "with a price": ("grpo, a price for each token", OTHERS)}
    for label, (name, colour) in names.items():
        of = [run["answers"]["by_swaps"] for run in tables.learned(name)]
        for panel, key in zip(axes, ("length", "right")):
            ys = [[x[str(k)][key] for k in range(1, 9)] for x in of]
            panel.plot(range(1, 9), [statistics.fmean(y) for y in zip(*ys)], "o-", color=colour, label=label, ms=4)
            panel.fill_between(range(1, 9), *[[f(y) for y in zip(*ys)] for f in (min, max)], color=colour, alpha=0.2)
    for panel, title in zip(axes, ("tokens of a sampled answer", "sampled answers right")):
        head(panel, title, "swaps in the prompt")
        panel.set_ylim(0)
    axes[0].legend(frameon=False, fontsize=9)
    figure.savefig(DOCS / "price.png", dpi=100)


def no_kl() -> None:
    """Score and gold score with a poor reward model, with and without KL penalty."""
    figure, [axes] = figure_of(1, 2, 8, 3)
    for panel, beta in zip(axes, ("0", "0.2")):
        for metric, colour in {"objective/scores": OURS, GOLD_MEAN: "#b58900"}.items():
            draw_band(panel, tables.learned(f"ppo, poor reward model, beta {beta}"), metric, colour, TITLES[metric])
        head(panel, f"β = {beta}", "episodes")
    axes[0].legend(frameon=False, fontsize=9), axes[0].sharey(axes[1])
    figure.savefig(DOCS / "no-kl.png", dpi=100)


def frontier() -> None:
    """Gold score against KL along the training, the mean over the seeds."""
    figure, [[panel]] = figure_of(1, 1, 6, 4)
    for script in ("dpo", "rloo", "ppo"):
        kl, gold = (band(tables.learned(script), name)[1].mean(0) for name in ("objective/kl", GOLD_MEAN))
        panel.plot(kl, gold, label=f"{script}.py")
    panel.set_xlabel("KL to the reference, nats a response"), panel.set_ylabel("gold score")
    panel.legend(frameon=False)
    figure.savefig(DOCS / "frontier.png", dpi=100)


def watch() -> None:
    """A row of panels for each fault: what came out, and what shows it. Dotted: the bound of healthy values."""
    score, default = "objective/scores", "the default"
    fast = "--learning-rate 1e-3"  # at which a lack of KL shows within so few episodes
    rows = {  # what goes wrong: the run, the one beside it, the result, the metric that shows the fault, and its bound
        "KL is too cheap": (f"{fast} --kl-coef 0", fast, score, "objective/kl", 50),
        "the learning rate is too high": ("--learning-rate 1e-2", default, score, "policy/approxkl_avg", 0.1),
        "the reward does not tell responses apart": (
            "--reward-fn rewards/verifiers.py:tagged", default, GOLD_MEAN, "objective/scores_std", 0),
        "responses never end": ("--response-length 24", default, score, "val/eos_share", 0.5),
        "the critic does not learn": ("--critic-learning-rate 1e-9", default, score, "val/explained_variance", 0),
    }  # fmt: skip
    figure, axes = figure_of(len(rows), 2, 8, 11)
    for (title, (wrong, right, result, shown, bound)), panels in zip(rows.items(), axes):
        for panel, metric in zip(panels, (result, shown)):
            for name, colour in ((right, OURS), (wrong, OTHERS)):
                curves = by_name("watch")[name][0]["curves"]
                panel.plot(curves["episode"], curves[metric], color=colour, label=name)
            panel.set_ylabel(metric, fontsize=8)
        panels[0].set_title(title, fontsize=10, loc="left", weight="bold")
        panels[1].axhline(bound, color="black", linewidth=0.8, linestyle=":")
        panels[1].set_yscale("log" if shown == "policy/approxkl_avg" else "linear")
        panels[1].legend(frameon=False, fontsize=7, loc="lower left", bbox_to_anchor=(0, 1), borderpad=0)
    for panel in axes[-1]:
        panel.set_xlabel("responses sampled", fontsize=8)
    figure.savefig(DOCS / "watch.png", dpi=100)


# ---------------------------------------------------------------------------------------------------------------------
# docs/questions.md


def teacher() -> None:
    """Right answers against episodes, and against seconds."""
    figure, [axes] = figure_of(1, 2, 9, 3.4)
    rows = {name: of for name, of in by_name("questions").items() if name.startswith("teacher") and len(of) > 1}
    for panel, (axis, text) in zip(axes, {"episode": "episodes", "seconds": "CPU seconds"}.items()):
        for (name, runs), colour in zip(rows.items(), COLOURS):
            draw_band(panel, runs, "right", colour, name.removeprefix("teacher: "), axis)
        head(panel, "right answers to unseen prompts", text)
    axes[0].set_xscale("log"), axes[1].set_xlim(0, 4)
    save(figure, DOCS / "questions-teacher.png", 8)


def sampler() -> None:
    """How far the samplers are from the policy, and what is learned from the worst two."""
    figure, [axes] = figure_of(1, 3, 13, 3.4)
    for name, colour in zip(tables.SAMPLERS[1:], COLOURS):
        draw_band(axes[0], tables.asked("sampler", f"{name}, none"), "approxkl", colour, name)
    axes[0].set_yscale("log"), head(axes[0], "approxkl, sampler and policy", "episodes")
    own = tables.SAMPLERS[0]
    for panel, name in zip(axes[1:], ("int4", "16 updates old")):
        draw_band(panel, tables.asked("sampler", f"{own}, none"), "reward", "grey", own)
        for correction, colour in zip(tables.CORRECTIONS, COLOURS):
            label = f"{name}, {correction}"
            draw_band(panel, tables.asked("sampler", label), "reward", colour, label)
        head(panel, "right answers, of the sampler", "episodes"), panel.set_ylim(0, 1)
    save(figure, DOCS / "questions-sampler.png", 8)


def liar() -> None:
    """Right answers while a verifier lies in 20 % of the cases, and in the end against how often it lies."""
    figure, [axes] = figure_of(1, 2, 9, 3.4)
    honest = tables.asked("liar", "honest")
    draw_band(axes[0], honest, "truth", "grey", "honest")
    for side, colour in zip(tables.SIDES, COLOURS):
        draw_band(axes[0], tables.asked("liar", f"{side} 20%"), "truth", colour, f"{side} 20%")
        of = [honest, *(tables.asked("liar", f"{side} {rate}") for rate in tables.RATES)]
        draw_ends(axes[1], [0, 0.05, 0.1, 0.2], of, "right", colour, side)
    head(axes[0], "right answers while it learns", "episodes")
    head(axes[1], "right answers to unseen prompts in the end", "share of lies")
    save(figure, DOCS / "questions-liar.png", 8)


def groups() -> None:
    """What is learned in the end, against the size of groups."""
    figure, [axes] = figure_of(1, 2, 9, 3.4)
    rows = {"grpo": ("right", "3,200 episodes", "3 CPU seconds")}
    rows |= {"rloo": ("gold score", "1,024 episodes", "20 CPU seconds")}
    for panel, (script, (metric, *labels)) in zip(axes, rows.items()):
        for limit, label, colour in zip(("episodes", "seconds"), labels, COLOURS):
            of = [tables.asked(f"{limit} lecture/{script}.py", size) for size in tables.SIZES]
            draw_ends(panel, tables.SIZES, of, metric, colour, label)
        panel.set_xscale("log", base=2), panel.set_xticks(tables.SIZES, tables.SIZES)
        head(panel, f"lecture/{script}.py: {metric}", "answers to a prompt")
    save(figure, DOCS / "questions-groups.png", 8)


def draw_ends(panel, x: list[float], of: list[list[dict]], metric: str, colour: str, label: str) -> None:
    """What the policies of some runs earn in the end: mean and range of the seeds."""
    ends = [[run["end"][metric] for run in runs] for runs in of]
    panel.plot(x, [statistics.fmean(values) for values in ends], "o-", color=colour, label=label, markersize=4)
    panel.fill_between(x, *[[choose(values) for values in ends] for choose in (min, max)], color=colour, alpha=0.15)


# ---------------------------------------------------------------------------------------------------------------------
# docs/takeoff.md, docs/agent.md


def outcomes() -> None:
    """Each run's outcome; all runs of GRPO; and how soon an outcome can be foretold."""
    colours = ("#444444", "#b58900", "#3b6ea8", "#8e5ba6", "#c0563f", "#5b8c3e")
    runs, updates = takeoff.arms(), takeoff.UPDATES
    figure, [axes] = figure_of(1, 3, 13, 3.6)
    rng = random.Random(1)
    for place, (of, colour) in enumerate(zip(runs.values(), colours)):
        ends = [takeoff.outcome(run) for run in of]
        axes[0].plot([place + rng.uniform(-0.3, 0.3) for _ in ends], ends, ".", color=colour, alpha=0.6)
        axes[0].plot([place - 0.35, place + 0.35], [statistics.fmean(ends)] * 2, color="black", linewidth=1)
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
    axes[2].axhline(0.5, color="0.8", linewidth=1)
    axes[2].legend(frameon=False, fontsize=8)
    head(axes[2], "how often a sign tells which of two runs takes off", "updates")
    figure.savefig(DOCS / "questions-takeoff.png", dpi=100)


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


def guesses() -> None:
    """Guesses along the training, with and without the fault, beside the fewest and random play."""
    figure, [[axis]] = figure_of(1, 1, 8, 3.6)
    for name, colour in {"the default": "tab:blue", "Answers in the loss": "tab:red"}.items():
        for i, run in enumerate(by_name("agent")[name]):
            turns = run["curves"]["turns"]
            label = tables.LABELS.get(name, name) if i == 0 else None
            axis.plot([512 * n for n in range(len(turns))], turns, colour, lw=0.9, alpha=0.7, label=label)
    bounds = {fewest(15): "the fewest possible", fewest(15, is_best=False): "random legal play"}
    for mean, text in bounds.items():
        axis.axhline(mean, color="black", lw=0.8, ls=":")
        axis.text(1.01, mean, f"{text}, {mean:.2f}", transform=axis.get_yaxis_transform(), va="center", fontsize=8)
    axis.set(xlabel="episodes", ylabel="guesses in sampled play", ylim=(3, 8.2))
    axis.legend(frameon=False, loc="upper right", ncols=2)
    figure.savefig(DOCS / "agent-curve.png", dpi=100)


def tree() -> None:
    """Which guess came in which turn, before and after."""
    figure, [axes] = figure_of(1, 2, 10, 3.4)
    run = by_name("agent")["the default"][0]
    for axis, when in zip(axes, ("before", "after")):
        nodes = Counter()
        games = sum(count for turn, _, _, count in run[when]["tree"] if turn == 1)
        for turn, a, b, count in run[when]["tree"]:
            nodes[turn, b] += count
            if turn > 1 and a:
                axis.plot([a, b], [turn - 1, turn], color="tab:blue", lw=18 * count / games, alpha=0.5)
        x, y = [b for _, b in nodes], [turn for turn, _ in nodes]
        axis.scatter(x, y, [260 * count / games for count in nodes.values()], color="tab:blue", zorder=3)
        title = f"{when}: {run[when]['sampled']:.2f} guesses"
        axis.set(title=title, xlabel="number that is said", xticks=range(1, 16), ylim=(7.5, 0.5))
        axis.set_ylabel("guess")
    figure.savefig(DOCS / "agent-tree.png", dpi=100)


def looks() -> None:
    """How often a policy looks, by the number of swaps."""
    figure, [[axis]] = figure_of(1, 1, 6, 3.4)
    for name, colour in {"a look for .6": "tab:blue", "a look for .3": "tab:orange"}.items():
        for i, run in enumerate(by_name("agent")[name]):
            by_swaps, label = run["after"]["by_swaps"], None if i else name
            axis.plot(by_swaps["swaps"], by_swaps["looked"], "o-", color=colour, ms=4, label=label)
            if name == "a look for .6":
                label = None if i else "right at once"
                axis.plot(by_swaps["swaps"], by_swaps["right at once"], ":", color="black", lw=0.8, label=label)
    by_swaps = by_name("agent")["a look for .6"][0]["before"]["by_swaps"]
    axis.plot(by_swaps["swaps"], by_swaps["looked"], "--", color="grey", label="before")
    axis.set(xlabel="swaps", ylabel="share of games with a look", ylim=(-0.03, 1.03))
    axis.legend(frameon=False)
    figure.savefig(DOCS / "agent-look.png", dpi=100)


# ---------------------------------------------------------------------------------------------------------------------
# docs/overoptimization.md

OF_PAIRS = dict(zip((300, 1000, 3000, 10_000, 30_000), ("#c46a2b", "#d9a441", "#8f9f4f", "#4f9d8d", "#2a6fbb")))


def fits() -> None:
    """Gold and proxy score against d, of the first size: the seeds' mean as points, the laws as lines."""
    size = next(iter(laws.groups()))[0]
    figure, axes = figure_of(2, 2, 11, 7.5)
    for (its_size, pairs), runs in laws.groups().items():
        for column, method in enumerate(laws.FORMS) if its_size == size else ():
            means = {
                name: np.mean([run[method.replace(" ", "_")][name] for run in runs], 0) for name in ("gold", "proxy")
            }
            gold, proxy = means.values()
            d, start = laws.points(runs[0], method)[0], gold[0]
            if method == "ppo":
                d = np.sqrt(laws.smooth(np.mean([run["ppo"]["kl"] for run in runs], 0)))
                gold, proxy, start = laws.smooth(gold), laws.smooth(proxy), laws.start_gold()
            style = {"color": OF_PAIRS[pairs], "linewidth": 1}
            axes[0, column].plot(d, gold, "o", markersize=3, color=OF_PAIRS[pairs], label=f"{pairs:,} pairs")
            x = np.linspace(0.01, d.max(), 200)
            for form in {"best of n": ("best of n",), "ppo": tuple(laws.FORMS)}[method]:
                f = laws.pooled_fit(runs, method, form)
                line = "-" if form == method else ":"
                axes[0, column].plot(x, start + laws.law(form, x, f["alpha"], f["beta"]), line, **style)
            axes[1, column].plot(d, proxy, "o-", markersize=3, **style)
    for column, title in enumerate(("best of n", "PPO without KL penalty; dotted: the law of best of n")):
        axes[0, column].set_title(title, fontsize=10)
        axes[1, column].set_xlabel("d = √KL")
    axes[0, 0].set_ylabel("gold score"), axes[1, 0].set_ylabel("proxy score, deviations of the initial policy")
    axes[0, 0].legend(frameon=False, fontsize=8), figure.suptitle(f"reward models of {size}", fontsize=10)
    figure.savefig(DOCS / "overoptimization.png", dpi=110)


def sizes() -> None:
    """Best of n beside PPO, on one axis, in a panel for each size; the mean over the seeds."""
    names = list(dict.fromkeys(size for size, _ in laws.groups()))
    figure, [axes] = figure_of(1, len(names), 5.5 * len(names), 3.8)
    for (size, pairs), runs in laws.groups().items():
        panel = axes[names.index(size)]
        d = np.sqrt([laws.best_of_n_kl(n) for n in laws.BEST_OF])
        panel.plot(d, np.mean([run["best_of_n"]["gold"] for run in runs], 0), "--", color=OF_PAIRS[pairs])
        kl, gold = (laws.smooth(np.mean([run["ppo"][name] for run in runs], 0)) for name in ("kl", "gold"))
        panel.plot(np.sqrt(kl.clip(0)), gold, color=OF_PAIRS[pairs], label=f"{pairs:,} pairs")
        panel.set_title(f"reward model of {size}; best of n dashed, PPO solid", fontsize=10)
        panel.set_xlabel("d = √KL"), panel.set_ylabel("gold score")
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(DOCS / "overoptimization-both.png", dpi=110)


# ---------------------------------------------------------------------------------------------------------------------
# docs/real.md


def sums() -> None:
    """Right answers, entropy and length, a line for each seed; and pass@k, the mean of the seeds."""
    figure, [axes] = figure_of(1, 4, 14, 3)
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
    for panel in (axes[0], axes[3]):
        panel.legend(frameon=False, fontsize=9)
    figure.savefig(DOCS / "real.png", dpi=100)


def pipeline() -> None:
    """Reward, gold score and the lexicon alone against KL: along the training, the mean of the seeds (thin lines: each
    seed), best of n, and where other trainings end."""
    figure, [axes] = figure_of(1, 3, 13, 3.6)
    names = {"rewards/reward_model/mean": "reward", f"rewards/{GOLD.split(':')[1]}/mean": "gold score"}
    names |= {f"rewards/{LEXICON.split(':')[1]}/mean": "lexicon alone"}
    lines = {"ppo, 0.02": ("#3b6ea8", "ppo.py --kl-coef 0.02"), "rloo, 0.02": ("#c0563f", "rloo.py --kl-coef 0.02")}
    lines["rloo, 0, far"] = ("#888888", "rloo.py --kl-coef 0, twice the rate")
    for name, (colour, label) in lines.items():
        curves = [run["curves"] for run in tables.real(name)]
        for panel, metric in zip(axes, names):
            means = [[statistics.fmean(x) for x in zip(*(of[y] for of in curves))] for y in ("objective/kl", metric)]
            panel.plot(*means, color=colour, label=label, lw=2)
            for of in curves if len(curves) > 1 else []:
                panel.plot(of["objective/kl"], of[metric], color=colour, lw=0.6, alpha=0.5)
    best = [run["read"]["best of"] for run in tables.real("reward model")]
    kl = [math.log(n) - (n - 1) / n for n in (1, 2, 4, 8)]
    scores = (tables.REWARD_MODEL, GOLD, LEXICON)
    for panel, title, column, score in zip(axes, names.values(), (2, 0, 1), scores):
        means = [statistics.fmean(of[n][column] for of in best) for n in ("1", "2", "4", "8")]
        panel.plot(kl, means, "k.", label="best of 1, 2, 4, 8")
        for name, marker in {"grpo, 0.02": "D", "dpo": "^", "sft on the best of 4": "s"}.items():
            for run in tables.real(name):
                end = run["end"]
                panel.plot(end["kl"]["mean"], end[score]["mean"], f"k{marker}", ms=5, mfc="none", label=name)
        head(panel, title, "KL, nats")
        panel.set_xscale("function", functions=(lambda x: np.sqrt(np.maximum(x, 0)), np.square))
        panel.set_xticks([n**2 for n in range(math.ceil(panel.get_xlim()[1] ** 0.5))])
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(DOCS / "pipeline.png", dpi=100)


PICTURES = (beside, all_beside, thinking, price, no_kl, frontier, watch, teacher, sampler, liar, groups, outcomes)
PICTURES += (guesses, tree, looks, fits, sizes, sums, pipeline)


def main() -> None:
    """Draws."""
    names = [picture.__name__ for picture in PICTURES]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    args = parser.parse_args()
    if unknown := set(args.names) - set(names):
        parser.error(f"there is no picture {', '.join(unknown)}")
    for picture in PICTURES:
        if not args.names or picture.__name__ in args.names:
            picture()


if __name__ == "__main__":
    main()
