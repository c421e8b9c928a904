"""report.md of toy/pipeline.sh: a table of its policies and two pictures.

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
    """KL per response in nats, and gold score, wherever both were logged; grpo.py logs the KL per token."""
    return [
        (line["objective/kl"] if "objective/kl" in line else line["kl"] * line["completions/mean_length"],
         line["objective/gold_scores"])
        for line in lines if line.get("objective/gold_scores") is not None
    ]  # fmt: skip


def smooth(points: list[tuple[float, float]], n: int = 5) -> list[tuple[float, float]]:
    """Means of n neighbours, if there are that many."""
    n = n if len(points) > 2 * n else 1
    parts = [points[i : i + n] for i in range(len(points) - n + 1)]
    return [tuple(statistics.fmean(x) for x in zip(*part)) for part in parts]


def draw(out: Path, paths: dict[str, list], judged: dict[str, dict]) -> None:
    """frontier.png: gold score against KL during training. winrates.png: against the SFT policy, with intervals."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for name, points in paths.items():
        axes.plot(*zip(*smooth(points)), label=name)
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


def main() -> None:
    """Reads the pipeline's folder, writes report.md into it, and prints it."""
    out = Path(sys.argv[1] if len(sys.argv) == 2 else "runs/pipeline")
    missing = [name for name in POLICIES if not (out / f"winrate-{name}/winrate.json").exists()]
    if missing:
        sys.exit(f"report.py: {out} has no winrate-{missing[0]}/winrate.json; toy/pipeline.sh {out} makes it")
    judged = {name: json.loads((out / f"winrate-{name}/winrate.json").read_text()) for name in POLICIES}
    paths = {name: kl_and_gold(read_lines(out / name)) for name in POLICIES}
    seconds = {name: int((out / f"{name}.done").read_text()) for name in ("sft", "reward_model", *POLICIES)}
    sft, reward_model = read_lines(out / "sft")[-1], read_lines(out / "reward_model")[-1]
    draw(out, paths, judged)
    row = lambda name, gold, kl, rate, tokens, share: (
        f"| {name} | {gold:.2f} | {kl:.1f} | {rate} | {tokens:.0f} | {share:.2f} | {seconds[name]} |"
    )
    first = judged[POLICIES[0]]
    rows = [row("sft", first["score_b"], 0, "", first["tokens_b"], first["eos_share_b"])]
    for name, x in judged.items():
        rate = f"{x['win_rate']:.0%} ({x['win_rate_low']:.0%}–{x['win_rate_high']:.0%})"
        rows.append(row(name, x["score_a"], smooth(paths[name])[-1][0], rate, x["tokens_a"], x["eos_share_a"]))
    text = f"""# From texts to better policies

Supervised fine-tuning ends at perplexity {sft["eval/perplexity"]:.1f} on unseen texts. The reward model, trained from
that policy in {seconds["reward_model"]} s, has {reward_model["eval/accuracy"]:.0%} of unseen pairs right. Three algorithms
start from the two; `dpo.py` reads the pairs themselves. Each policy answers {first["pairs"]} unseen prompts, and the
gold score, which none of them was trained on, compares its answers with those of the SFT policy.

| policy | gold score | KL, nats | win rate (95 %) | tokens | share that end | seconds |
|---|---:|---:|---:|---:|---:|---:|
{chr(10).join(rows)}

![gold score against KL during training](frontier.png)

![win rates against the SFT policy](winrates.png)
"""
    (out / "report.md").write_text(text, "utf-8")
    print(f"{text}\nsaved as {out / 'report.md'}")


if __name__ == "__main__":
    main()
