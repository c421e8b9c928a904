"""docs/agent.md: what its policies are before and after training.

A policy is measured in 2,040 sampled games and by its likeliest play, in one game about each number. A game in which
the number is not found counts with its eight guesses.
"""

import statistics
from collections import Counter

import torch
from forks import train
from record import Run
from transformers import AutoModelForCausalLM


def play(names: dict, rows: list[int], temperature: float) -> tuple[list[list[str]], list[float], list[int]]:
    """Episodes from these rows of the data: the words of each, what it earned, and how many turns it had."""
    games, ids, attention_mask = names["start_games"](rows)
    uniforms = torch.rand(len(rows), names["args"].response_length)
    stream, _, mask, written, turn, rewards = names["play"](
        names["policy"], names["tokenizer"], games, ids, attention_mask, uniforms, temperature
    )
    words = [names["tokenizer"].convert_ids_to_tokens(row[here]) for row, here in zip(stream, mask)]
    return words, rewards.sum(1).tolist(), ((turn * written).amax(1) + 1).tolist()


def measure_guesses(names: dict) -> dict:
    """Mean guesses of sampled and of likeliest play, the share of sampled games that find the number, and the tree:
    how often which guess came in which turn, after which guess (0: none), in sampled play."""
    size = len(names["prompts"])
    words, rewards, guesses = play(names, list(range(size)) * (2048 // size), 1.0)
    _, _, likeliest = play(names, list(range(size)), 1e-6)
    tree = Counter()
    for row in words:
        said = [word for word in row if word.isdecimal()]
        tree.update((turn, int(a), int(b)) for turn, (a, b) in enumerate(zip(["0", *said], said), 1))
    return {
        "sampled": statistics.fmean(guesses),
        "likeliest": statistics.fmean(likeliest),
        "found": statistics.fmean(reward > 0 for reward in rewards),
        "tree": [[*edge, count] for edge, count in sorted(tree.items())],
    }


def measure(run: Run) -> dict:
    """Its curves, and what its policy is before and after it."""
    updates, names = train(run, lambda names, stats: dict(stats))
    after_and_before = []
    for state in (None, AutoModelForCausalLM.from_pretrained(names["args"].model).state_dict()):
        if state:
            names["policy"].load_state_dict(state)
        torch.manual_seed(0)
        found = measure_guesses(names)
        if (run.name, run.seed) != ("the default", 1):  # one picture is enough
            found.pop("tree", None)
        after_and_before.append(found)
    after, before = after_and_before
    curves = {name: [round(stats[name], 3) for stats in updates] for name in ("turns", "reward")}
    return {"before": before, "after": after, "curves": curves}
