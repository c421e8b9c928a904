"""Draws docs/questions-coin.png, of a policy of one parameter, which is right with probability p = sigmoid(theta).

    python experiments/coin.py

By what does each way to scale multiply the gradient of p, and what is the variance of the estimate? Lines are formulas,
points are from groups of answers.
"""

import torch
from record import ROOT
from common import figure_of
from grpo import group_advantages

GROUPS, G = 200_000, 8
POINTS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95, 0.98, 0.99)


def main() -> None:
    """Measures, and draws."""
    generator = torch.Generator().manual_seed(1)
    p = torch.linspace(0.005, 0.995, 199)
    weights = {"none": torch.ones_like(p), "group": (p * (1 - p)) ** -0.5, "mean": 1 / p}
    texts = {"none": "1 (none)", "group": "1/√(p(1 − p)) (group)", "mean": "1/p (mean)"}
    variances = {"no baseline": (1 - p) ** 2, "the group's mean": None, "leave one out": (1 - 2 * p) ** 2}
    measured = {name: [] for name in (*weights, *variances)}
    for x in torch.tensor(POINTS):
        right = (torch.rand(GROUPS, G, generator=generator) < x).float()  # (groups, G)
        slopes = right - x  # d log pi / d theta
        for scale in weights:
            advantages = group_advantages(right.flatten(), G, scale).view(-1, G)
            measured[scale].append((advantages * slopes).mean() / (x * (1 - x)))
        centred = right - right.mean(1, keepdim=True)
        for name, advantages in zip(variances, (right, centred, centred * G / (G - 1))):
            measured[name].append(G * (advantages * slopes).mean(1).var() / (x * (1 - x)))

    colours = ("#3b6ea8", "#8e5ba6", "#c0563f")
    figure, [axes] = figure_of(1, 2, 9, 3.6)
    for (name, line), colour in zip(weights.items(), colours):
        axes[0].plot(p, line, color=colour, label=texts[name])
        axes[0].plot(POINTS, measured[name], "o", color=colour, markersize=4)
    axes[0].set_yscale("log"), axes[0].set_ylim(0.5, 200)
    axes[0].set_title("weight of a prompt; points: groups of eight", fontsize=10)
    for (name, line), colour in zip(variances.items(), colours):
        if line is not None:
            axes[1].plot(p, line, color=colour)
        axes[1].plot(POINTS, measured[name], "o", color=colour, markersize=4, label=name)
    axes[1].set_title("variance of one answer's gradient, over p(1 − p)", fontsize=10)
    for axis in axes:
        axis.set_xlabel("p, the chance of a right answer", fontsize=9)
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(ROOT / "docs/questions-coin.png", dpi=100)


if __name__ == "__main__":
    main()
