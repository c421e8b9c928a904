"""docs/agent.md: what its policies are before and after training.

A policy is measured in 2,040 sampled games and by its likeliest play, in one game about each number. A game in which
the number is not found counts with its eight guesses. In the shell game each unseen prompt is played four times.
"""

import json
import statistics
from collections import Counter

import torch
from forks import train
from record import ROOT, Run
from transformers import AutoModelForCausalLM


def play(names: dict, rows: list[int], temperature: float) -> tuple[list[list[str]], list[float], list[int]]:
    """Episodes from these rows of the data: the words of each, what it earned, and how many turns it had."""
    games, ids, attention_mask = names["start"](rows)
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


def right_at_once(names: dict) -> list[float]:
    """For each prompt how likely the policy makes the right cup after ####, without a look."""
    tokenizer = names["tokenizer"]
    sign, *answers = tokenizer.convert_tokens_to_ids(["####", *(row["answer"] for row in names["examples"])])
    prompts = tokenizer.pad({"input_ids": [[*ids, sign] for ids in names["prompts"]]}, return_tensors="pt")
    with torch.no_grad():
        logits = names["forward"](names["policy"], **prompts).logits[:, -1]  # (N, V)
    return logits.softmax(1)[range(len(answers)), answers].tolist()


def measure_looks(names: dict) -> dict:
    """For each number of swaps, the share of sampled games with a look, and of those in which the answer is right; and
    of answers without a look."""
    file = ROOT / "toy/shells/data/prompts/validation.jsonl"
    names["examples"] = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    names["prompts"] = names["tokenizer"]([row["prompt"] for row in names["examples"]])["input_ids"]
    rows = list(range(len(names["prompts"]))) * 4
    words, rewards, _ = play(names, rows, 1.0)
    swaps = [names["examples"][i]["swaps"] for i in rows]
    found = {
        "looked": ["ball" in row for row in words],
        "right": [row[-3:-1] == ["####", names["examples"][i]["answer"]] for i, row in zip(rows, words)],
        "right at once": right_at_once(names) * 4,
    }
    by_swaps = {"swaps": sorted(set(swaps))}
    for name, values in found.items():
        of = [[x for x, n in zip(values, swaps) if n == number] for number in by_swaps["swaps"]]
        by_swaps[name] = [round(statistics.fmean(some), 4) for some in of]
    means = {name: statistics.fmean(found[name]) for name in ("looked", "right")}
    return means | {"reward": statistics.fmean(rewards), "by_swaps": by_swaps}


def measure(run: Run) -> dict:
    """Its curves, and what its policy is before and after it."""
    updates, names = train(run, lambda names, stats: dict(stats))
    look = measure_looks if "a look" in run.name else measure_guesses
    after_and_before = []
    for state in (None, AutoModelForCausalLM.from_pretrained(names["args"].model).state_dict()):
        if state:
            names["policy"].load_state_dict(state)
        torch.manual_seed(0)
        found = look(names)
        if (run.name, run.seed) != ("the default", 1):  # one picture is enough
            found.pop("tree", None)
        after_and_before.append(found)
    after, before = after_and_before
    curves = {name: [round(stats[name], 3) for stats in updates] for name in ("turns", "reward")}
    return {"before": before, "after": after, "curves": curves}
