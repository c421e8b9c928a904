"""Writes report.md for toy/pipeline.sh: a table of its policies and two pictures.

python toy/report.py runs/pipeline
"""

import json
import statistics
import sys
from pathlib import Path

from matplotlib.figure import Figure

POLICIES = ("ppo", "rloo", "grpo", "dpo")


def read_lines(run: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]


def kl_and_gold(lines: list[dict]) -> list[tuple[float, float]]:
    """KL per response in nats, and gold score, of each update. dpo.py logs neither."""
    gold = "rewards/gold_score/mean"
    return [(line["objective/kl"], line[gold]) for line in lines if gold in line]


def smooth(points: list[tuple[float, float]], n: int = 5) -> list[tuple[float, float]]:
    """A moving average over n points, if there are enough of them."""
    n = n if len(points) > 2 * n else 1
    parts = [points[i : i + n] for i in range(len(points) - n + 1)]
    return [tuple(statistics.fmean(x) for x in zip(*part)) for part in parts]


def draw(out: Path, paths: dict[str, list], ends: dict[str, tuple], judged: dict[str, dict]) -> None:
    """Writes frontier.png, gold score against KL (lines: during training, dots: final policies), and winrates.png, win
    rates against the SFT policy with intervals."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for i, name in enumerate(paths):
        axes.plot(*ends[name], "o", color=f"C{i}", label=name)
        if paths[name]:
            axes.plot(*zip(*smooth(paths[name])), color=f"C{i}")
    axes.set_xlabel("KL to the SFT policy, nats per response"), axes.set_ylabel("gold score")
    axes.legend(frameon=False)
    figure.savefig(out / "frontier.png", dpi=110)
    figure = Figure(figsize=(6, 2.5), layout="constrained")
    axes = figure.subplots()
    for i, (name, x) in enumerate(judged.items()):
        error = [[x["win_rate"] - x["win_rate_low"]], [x["win_rate_high"] - x["win_rate"]]]
        axes.barh(name, x["win_rate"], xerr=error, color=f"C{i}", capsize=3)
    axes.axvline(0.5, color="grey", linewidth=1, linestyle=":"), axes.set_xlim(0, 1), axes.invert_yaxis()
    axes.set_xlabel("win rate against the SFT policy, by the gold score")
    figure.savefig(out / "winrates.png", dpi=110)


def table_row(name: str, judged: dict, side: str, kl: float, rate: str, seconds: dict[str, int]) -> str:
    """A row of the table, from the results of compare.py for one side."""
    gold, tokens, share = (judged[f"{what}_{side}"] for what in ("score", "tokens", "eos_share"))
    return f"| {name} | {gold:.2f} | {kl:.1f} | {rate} | {tokens:.0f} | {share:.2f} | {seconds[name]} |"


def main() -> None:
    """Reads the pipeline's folder, writes report.md into it, and prints it."""
    out = Path(sys.argv[1] if len(sys.argv) == 2 else "runs/pipeline")
    judged, ends = {}, {}
    for name in POLICIES:
        pairs, answers = out / f"compare-{name}/compare.json", out / f"evaluate-{name}/evaluation.json"
        if not answers.exists():  # the pipeline writes it after the other
            sys.exit(f"error: {answers} does not exist; toy/pipeline.sh {out} writes it")
        judged[name] = json.loads(pairs.read_text())
        figures = json.loads(answers.read_text())["figures"]
        ends[name] = figures["kl"]["mean"], figures["toy/gold_score.py:gold_score"]["mean"]
    paths = {name: kl_and_gold(read_lines(out / name)) for name in POLICIES}
    seconds = {name: int((out / f"{name}.done").read_text()) for name in ("sft", "reward_model", *POLICIES)}
    sft, reward_model = read_lines(out / "sft")[-1], read_lines(out / "reward_model")[-1]
    draw(out, paths, ends, judged)
    first = judged[POLICIES[0]]
    rows = [table_row("sft", first, "b", 0.0, "", seconds)]
    for name, x in judged.items():
        rate = f"{x['win_rate']:.0%} ({x['win_rate_low']:.0%}–{x['win_rate_high']:.0%})"
        rows.append(table_row(name, x, "a", ends[name][0], rate, seconds))
    text = f"""# From texts to better policies

Supervised fine-tuning ends at perplexity {sft["eval/perplexity"]:.1f} on unseen texts. The reward model, trained from
that policy in {seconds["reward_model"]} s, has {reward_model["eval/accuracy"]:.0%} of unseen pairs right. Three
algorithms start from the two; `dpo.py` reads the pairs themselves. Each policy answers {first["pairs"]} unseen prompts,
and the gold score, which none of them was trained on, compares its answers with those of the SFT policy.

| policy | gold score | KL, nats | win rate (95 %) | tokens | share that end | seconds |
|---|---:|---:|---:|---:|---:|---:|
{chr(10).join(rows)}

![gold score against KL, during training and in the end](frontier.png)

![win rates against the SFT policy](winrates.png)
"""
    (out / "report.md").write_text(text, "utf-8")
    print(f"{text}\nsaved as {out / 'report.md'}")


if __name__ == "__main__":
    main()
