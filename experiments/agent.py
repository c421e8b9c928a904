"""A policy that is answered: the runs of lecture/agent.py behind docs/agent.md, over several seeds.

    python experiments/agent.py            # 26 runs, 20 minutes on one thread; goes on where it stopped
    python experiments/agent.py --list     # how many are missing

`ROWS` has their names and flags; the fault is a diff of the page. Before and after its training a policy is measured in
2,040 sampled games, and by its likeliest play, in one game about each number. A game in which the number is not
found counts with its eight guesses. In the shell game each unseen prompt is played four times.

What comes out: results/agent.json, to which each run is added as it ends, the tables of the page, and its pictures. The
policies to start from, but for the one that is shipped, are first made in runs/agent/ by sft.py.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import Counter

from forks import LEARNED, ROOT, apply, complete, put_tables, read_diffs, run

sys.path.append(str(ROOT / "benchmarks"))
from common import figure_of

SCRIPT = "lecture/agent.py"
PAGE = ROOT / "docs/agent.md"
OUTPUT = LEARNED / "agent.json"
MINUTES = 0.9  # a run
FAULT = "Answers in the loss"  # the heading of its diff in the page
MADE = "runs/agent"
LOOK = f"--dataset toy/shells/data/prompts --model {MADE}/looker --response-length 8 --learning-rate 1e-3"
ROWS = {  # name -> flags, number of seeds
    "the default": ("", 5),
    FAULT: ("", 5),
    "each group's own deviation": ("--scale-rewards group", 3),
    "start: play that ignores the answers": (f"--model {MADE}/deaf --total-episodes 76800", 2),
    "a look for .6": (f"--env toy/shells/make.py:Look {LOOK} --total-episodes 102400", 3),
    "a look for .3": (f"--env toy/shells/make.py:CheapLook {LOOK} --total-episodes 25600", 3),
    "start: sloppy play": (f"--model {MADE}/sloppy --learning-rate 1e-3", 2),
    "a baseline for each turn": ("--credit turn", 3),
}
LABELS = {FAULT: "fault: answers in the loss"}
LOOKING = [name for name in ROWS if name.startswith("a look")]
PRINTED = {"sampled": 2, "likeliest": 2, "found": 2}  # of guesses the mean and of games the share, and their digits


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


def make_models() -> None:
    """The policies to start from, as far as they are not there."""
    sft = "sft.py --num-train-epochs 3 --batch-size 64 --learning-rate 4e-3 --from-scratch"
    commands = {  # what each leaves behind
        "15/base/config.json": f"toy/guess/make.py --output {MADE}/15 --texts",
        "looks/train.jsonl": f"toy/shells/make.py --looks {MADE}/looks",
        "sloppy/model.safetensors": f"{sft} {MADE}/15/base --dataset {MADE}/15/data/sloppy --output-dir {MADE}/sloppy",
        "deaf/model.safetensors": f"{sft} {MADE}/15/base --dataset {MADE}/15/data/deaf --output-dir {MADE}/deaf",
        "looker/model.safetensors": f"sft.py --model toy/shells/sft --learning-rate 1e-3 --batch-size 32 "
        f"--dataset {MADE}/looks --dataset-test-split none --output-dir {MADE}/looker",
    }
    for file, command in commands.items():
        if not (ROOT / MADE / file).exists():
            subprocess.run([sys.executable, *command.split()], cwd=ROOT, check=True)


def play(names: dict, rows: list[int], temperature: float) -> tuple[list[list[str]], list[float], list[int]]:
    """Episodes from these rows of the data: the words of each, what it earned, and how many turns it had."""
    import torch

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
    import torch

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
    looked = ["ball" in row for row in words]
    right = [row[-3:-1] == ["####", names["examples"][i]["answer"]] for i, row in zip(rows, words)]
    by_swaps = {"swaps": sorted(set(swaps))}
    at_once = right_at_once(names) * 4
    for name, values in {"looked": looked, "right": right, "right at once": at_once}.items():
        by_swaps[name] = [
            round(statistics.fmean(x for x, n in zip(values, swaps) if n == number), 4) for number in by_swaps["swaps"]
        ]
    return {"looked": statistics.fmean(looked), "right": statistics.fmean(right)} | {
        "reward": statistics.fmean(rewards),
        "by_swaps": by_swaps,
    }


def measure(fork: str, seed: int) -> dict:
    """A run: its curves, and what its policy was before and is after it."""
    import torch
    from transformers import AutoModelForCausalLM

    make_models()
    diffs = read_diffs(PAGE.read_text("utf-8"))
    source = apply(diffs.get(fork, ""), (ROOT / SCRIPT).read_text("utf-8"))
    flags = [*ROWS[fork][0].split(), "--seed", str(seed)]
    updates, names = run(SCRIPT, source, flags, lambda names, stats: dict(stats))
    look = measure_looks if fork in LOOKING else measure_guesses
    torch.manual_seed(0)
    after = look(names)
    start = AutoModelForCausalLM.from_pretrained(names["args"].model)
    names["policy"].load_state_dict(start.state_dict())
    torch.manual_seed(0)
    before = look(names)
    if (fork, seed) != ("the default", 1):  # one picture is enough
        before.pop("tree", None)
        after.pop("tree", None)
    curves = {name: [round(stats[name], 3) for stats in updates] for name in ("turns", "reward")}
    return {"before": before, "after": after, "curves": curves}


def cell(values: list[float], digits: int) -> str:
    """Mean ± standard deviation."""
    spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{spread}"


def markdown(lines: list[list[str]]) -> str:
    """A table of these cells."""
    lines.insert(1, ["---"] + ["---:"] * (len(lines[0]) - 1))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables(results: dict) -> dict[str, str]:
    """The tables of the page."""
    guesses = [["", "seeds", "sampled: before", "after", "likeliest: before", "after", "found after", "CPU seconds"]]
    for name in ROWS:
        runs = [run for run in results["runs"] if run["fork"] == name]
        if not runs or name in LOOKING:
            continue
        line = [LABELS.get(name, name), str(len(runs))]
        for what, digits in PRINTED.items():
            line += [f"{runs[0]['before'][what]:.{digits}f}"] * (what != "found")
            line += [cell([run["after"][what] for run in runs], digits)]
        guesses.append([*line, str(min(run["cpu_seconds"] for run in runs))])
    looks = [["swaps", *map(str, range(1, 9))]]
    for name in LOOKING:
        runs = [run for run in results["runs"] if run["fork"] == name]
        for when in ["before", "after"][name != LOOKING[0] :] if runs else []:
            by_swaps = [run[when]["by_swaps"]["looked"] for run in runs[: 1 if when == "before" else None]]
            label = "before" if when == "before" else name
            looks.append([label, *(cell(list(shares), 2) for shares in zip(*by_swaps))])
        for when in ["before", "after"] if runs and name == LOOKING[0] else []:
            by_swaps = [run[when]["by_swaps"]["right at once"] for run in runs[: 1 if when == "before" else None]]
            looks.append([f"right at once, {when}", *(cell(list(shares), 2) for shares in zip(*by_swaps))])
    return {"agent-guesses": markdown(guesses), "agent-looks": markdown(looks)}


def draw(results: dict) -> None:
    """The pictures of the page."""
    runs = {name: [run for run in results["runs"] if run["fork"] == name] for name in ROWS}
    figure, [[axis]] = figure_of(1, 1, 8, 3.6)
    for name, colour in {"the default": "tab:blue", FAULT: "tab:red"}.items():
        for i, one in enumerate(runs[name]):
            turns = one["curves"]["turns"]
            label = LABELS.get(name, name) if i == 0 else None
            axis.plot([512 * n for n in range(len(turns))], turns, colour, lw=0.9, alpha=0.7, label=label)
    for mean, text in {fewest(15): "the fewest possible", fewest(15, is_best=False): "random legal play"}.items():
        axis.axhline(mean, color="black", lw=0.8, ls=":")
        axis.text(1.01, mean, f"{text}, {mean:.2f}", transform=axis.get_yaxis_transform(), va="center", fontsize=8)
    axis.set(xlabel="episodes", ylabel="guesses in sampled play", ylim=(3, 8.2))
    axis.legend(frameon=False, loc="upper right", ncols=2)
    figure.savefig(ROOT / "docs/agent-curve.png", dpi=100)

    figure, [axes] = figure_of(1, 2, 10, 3.4)
    one = next(one for one in runs["the default"] if one["seed"] == 1)
    for axis, when in zip(axes, ("before", "after")):
        nodes = Counter()
        games = sum(count for turn, _, _, count in one[when]["tree"] if turn == 1)
        for turn, a, b, count in one[when]["tree"]:
            nodes[turn, b] += count
            if turn > 1 and a:
                axis.plot([a, b], [turn - 1, turn], color="tab:blue", lw=18 * count / games, alpha=0.5)
        x, y = [b for _, b in nodes], [turn for turn, _ in nodes]
        sizes = [260 * count / games for count in nodes.values()]
        axis.scatter(x, y, sizes, color="tab:blue", zorder=3)
        mean = one[when]["sampled"]
        axis.set(
            title=f"{when}: {mean:.2f} guesses", xlabel="number that is said", xticks=range(1, 16), ylim=(7.5, 0.5)
        )
        axis.set_ylabel("guess")
    figure.savefig(ROOT / "docs/agent-tree.png", dpi=100)

    figure, [[axis]] = figure_of(1, 1, 6, 3.4)
    for name, colour in zip(LOOKING, ("tab:blue", "tab:orange")):
        for i, one in enumerate(runs[name]):
            by_swaps = one["after"]["by_swaps"]
            axis.plot(by_swaps["swaps"], by_swaps["looked"], "o-", color=colour, ms=4, label=None if i else name)
            if name == LOOKING[0]:
                label = None if i else "right at once"
                axis.plot(by_swaps["swaps"], by_swaps["right at once"], ":", color="black", lw=0.8, label=label)
    by_swaps = runs[LOOKING[0]][0]["before"]["by_swaps"]
    axis.plot(by_swaps["swaps"], by_swaps["looked"], "--", color="grey", label="before")
    axis.set(xlabel="swaps", ylabel="share of games with a look", ylim=(-0.03, 1.03))
    axis.legend(frameon=False)
    figure.savefig(ROOT / "docs/agent-look.png", dpi=100)


def main() -> None:
    """Runs what is missing; writes the results after each run, and the tables and pictures at the end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="only say how many runs are missing")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}  # before torch is imported
    os.chdir(ROOT)
    wanted = [{"fork": name, "seed": seed} for name, (_, n) in ROWS.items() for seed in range(1, n + 1)]
    wanted.sort(key=lambda run: (run["fork"] in list(ROWS)[6:], run["seed"]))
    changes = read_diffs(PAGE.read_text("utf-8"))
    diffs = {name: changes.get(name, "") or flags for name, (flags, _) in ROWS.items()}
    results = complete(OUTPUT, diffs, wanted, measure, MINUTES, args.list)
    put_tables(PAGE, tables(results))
    draw(results)


if __name__ == "__main__":
    main()
