"""Trains with and without each bug of the museum, over five or ten seeds, and writes docs/findings/bugs.md.

python exercises/bugs/gallery.py               # 115 runs, 50 minutes of one core; continues where it stopped
python exercises/bugs/gallery.py --redraw      # draws the pictures and writes the page again
python exercises/bugs/gallery.py --svg runs/bugs/svg     # draws the pictures as SVG, for slides

Runs have the settings of play.py, which are shorter than the defaults. Results are added to results.json beside this
file. If the text of a bug changes, its runs are made again.
"""

import json
import shlex
import sys
import time
from argparse import ArgumentParser
from itertools import islice
from pathlib import Path
from statistics import fmean, stdev
from textwrap import fill

import torch
from play import BUGS, ROOT, RUNS, healthy, plant, run

sys.path += [str(ROOT / "experiments"), str(ROOT / "tools")]
from record import with_tables
from common import describe_machine, describe_ours
from seeds import judge

PAGE = ROOT / "docs/findings/bugs.md"
OUTPUT = Path(__file__).resolve().parent / "results.json"


def name_of_healthy(bug: dict) -> str:
    """The name of the runs without the bug: the file's name, and settings that play.py does not have."""
    return " ".join([bug["script"], *(f"{name} {value}" for name, value in bug.get("flags", {}).items())])


def seeds_of(bug: dict) -> range:
    """The seeds of the runs with a bug and without it."""
    return range(1, 1 + bug.get("seeds", 5))


def measure(fork: str, seed: int) -> dict:
    """The metrics of each update of a run."""
    bug = next(bug for bug in BUGS if fork in (bug["name"], name_of_healthy(bug)))
    text = plant(bug) if fork == bug["name"] else healthy(bug["script"])
    names = run(bug["script"], text, quiet=True, **RUNS[bug["script"]] | bug.get("flags", {}) | {"seed": seed})
    history = names["history"]
    result = {name: [float(f"{stats[name]:.4g}") for stats in history] for name in history[0]}
    if bug["script"] == "sft":
        result["texts that end"] = [share_that_ends(names)]
    if bug["script"] == "reward_model":
        result["accuracy in use"] = [accuracy_in_use(names)]
    return {"history": result}


def share_that_ends(names: dict) -> float:
    """The share of 64 continuations, written by the fine-tuned policy, that stop within 53 tokens."""
    tokenizer = names["tokenizer"]
    tokenizer.padding_side = "left"
    batch = tokenizer(list(names["data"]["prompt"][:64]), return_tensors="pt", padding=True)
    torch.manual_seed(1)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 53, "pad_token_id": tokenizer.pad_token_id}
    texts = names["policy"].generate(**batch, **options)[:, batch["input_ids"].shape[1] :]
    return (texts == tokenizer.eos_token_id).any(1).float().mean().item()


def accuracy_in_use(names: dict) -> float:
    """The reward model's accuracy on unseen pairs, with the reward at the last token, as PPO reads it."""
    model, right, n = names["model"], 0, 300
    with open(ROOT / "toy/data/preferences/validation.jsonl", encoding="utf-8") as file:
        rows = [json.loads(line) for line in islice(file, n)]
    for row in rows:
        rewards = []
        for completion in (row["chosen"], row["rejected"]):
            ids = torch.tensor([names["encode"](row["prompt"], completion)])
            with torch.no_grad():
                rewards.append(model.score(model.base_model(input_ids=ids).last_hidden_state[:, -1]).item())
        right += rewards[0] > rewards[1]
    return right / n


def runs_of(results: dict, bug: dict, fork: str) -> list[dict]:
    """The metrics of the runs of one name, one for each seed of the bug."""
    found = {run["seed"]: run["history"] for run in results["runs"] if run["fork"] == fork}
    return [found[seed] for seed in seeds_of(bug)]


def end(history: dict, metric: str) -> float:
    """The mean of a metric over the last eighth of a run."""
    values = history[metric]
    return fmean(values[-max(1, len(values) // 8) :])


def is_shown(results: dict, bug: dict, metric: str) -> bool:
    """Whether 0 is outside of the 95 % interval of what a bug does to a metric at the end, over paired seeds."""
    forks = (name_of_healthy(bug), bug["name"])
    found = judge(*([end(history, metric) for history in runs_of(results, bug, fork)] for fork in forks))
    return found["low"] > 0 or found["high"] < 0


def draw(results: dict, bug: dict, file: Path) -> None:
    """Draws score and metric of all runs with a bug, and without it in grey. A single number becomes a point. The title
    says if no difference is shown."""
    from matplotlib.figure import Figure

    figure = Figure((8, 2.6), layout="constrained")
    for i, metric in enumerate([bug["score"], bug["metric"]]):
        axis = figure.add_subplot(1, 2, i + 1, title=metric)
        if not is_shown(results, bug, metric):
            axis.set_title(f"{metric}\n(no difference shown, {len(seeds_of(bug))} seeds)", fontsize=10)
        for x, (fork, colour) in enumerate(((name_of_healthy(bug), "0.6"), (bug["name"], "C3"))):
            for history in runs_of(results, bug, fork):
                values = history[metric]
                axis.plot(
                    range(1, 1 + len(values)) if len(values) > 1 else [x],
                    values,
                    "" if values[1:] else "o",
                    c=colour,
                    lw=1,
                )
        if len(values) > 1:
            axis.set_xlabel("update")
        else:
            axis.set_xticks([0, 1], ["healthy", "with the bug"])
            axis.set_xlim(-0.5, 1.5)
    figure.savefig(file, dpi=100)


def both(results: dict, bug: dict, metric: str) -> str:
    """A metric at the end of the runs, without and with a bug: means and standard deviations over the seeds."""
    parts = []
    for fork in (name_of_healthy(bug), bug["name"]):
        values = [end(history, metric) for history in runs_of(results, bug, fork)]
        parts.append(f"{fmean(values):.3g} ± {stdev(values):.1g}")
    return " → ".join(parts) + ("" if is_shown(results, bug, metric) else ", not shown")


def gallery(results: dict) -> str:
    """The generated part of docs/findings/bugs.md: a table, and a section for each bug."""
    lines = ["| | file | bug | score at the end: without bug → with it | another metric |", "|---:|---|---|---|---|"]
    sections = []
    for n, bug in enumerate(BUGS, 1):
        scores, metrics = (f"`{name}` {both(results, bug, name)}" for name in (bug["score"], bug["metric"]))
        lines.append(f"| {n} | `{bug['script']}.py` | [{bug['title']}](bugs/{n}.png) | {scores} | {metrics} |")
        sections += [
            f"### {n}. {bug['title']}",
            f"“{bug['complaint']}”",
            f"![{bug['score']} and {bug['metric']}](bugs/{n}.png)",
        ]
        text = f"{bug['giveaway']} *Caught by* `{bug['property']}`."
        sections.append(
            fill(
                f"{text} *Where it shipped:* {bug['source']} *Why:* {bug['why']}",
                120,
                break_long_words=False,
                break_on_hyphens=False,
            )
        )
    return "\n".join(lines) + "\n\n" + "\n\n".join(sections)


def make_missing(edits: dict[str, list], wanted: list[dict]) -> dict:
    """Makes the runs that are missing in results.json, or whose bug has changed, and returns all results."""
    old = json.loads(OUTPUT.read_text())
    runs = [run for run in old["runs"] if old["diffs"][run["fork"]] == edits.get(run["fork"])]
    missing = [key for key in wanted if not any(key.items() <= run.items() for run in runs)]
    print(f"{len(missing)} runs, about {0.4 * len(missing):.0f} minutes")
    results = {"command": shlex.join(["python", *sys.argv]), **describe_ours(ROOT), "date": time.strftime("%Y-%m-%d")}
    results |= {"machine": describe_machine(), "diffs": edits, "runs": runs}
    for key in missing:
        start = time.process_time()
        result = measure(**key)
        runs.append(key | {"cpu_seconds": round(time.process_time() - start)} | result)
        OUTPUT.write_text(json.dumps(results) + "\n")
    return results


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--redraw", action="store_true", help="do not train")
    parser.add_argument("--svg", type=Path, metavar="FOLDER", help="only draw the pictures, as SVG, into this folder")
    args = parser.parse_args()
    diffs = {name_of_healthy(bug): [] for bug in BUGS} | {bug["name"]: bug["edits"] for bug in BUGS}
    names = {(fork, seed) for bug in BUGS for fork in (name_of_healthy(bug), bug["name"]) for seed in seeds_of(bug)}
    wanted = [{"fork": fork, "seed": seed} for fork, seed in sorted(names)]
    results = json.loads(OUTPUT.read_text()) if args.redraw or args.svg else make_missing(diffs, wanted)
    if args.svg:
        args.svg.mkdir(parents=True, exist_ok=True)
    for n, bug in enumerate(BUGS, 1):
        draw(results, bug, args.svg / f"{n}.svg" if args.svg else ROOT / f"docs/findings/bugs/{n}.png")
    if not args.svg:
        PAGE.write_text(with_tables(PAGE.read_text("utf-8"), {"gallery": gallery(results)}), "utf-8")


if __name__ == "__main__":
    main()
