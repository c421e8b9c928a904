"""Learning: score, gold score, KL and EOS share of ppo.py and rloo.py on the toy world, beside those of TRL 0.16.1.

    python benchmarks/learning.py                  # five seeds; half an hour on two CPU cores
    python benchmarks/learning.py --seeds 1,2 --sides ours
    python benchmarks/learning.py --redraw         # the charts and the table again, from the JSON file
    python benchmarks/learning.py --algorithms dpo --output benchmarks/results/learning-dpo.json \
        --beside benchmarks/results/learning.json  # DPO in one chart with runs that were made before
    python benchmarks/learning.py --algorithms rloo --sides ours --ours "--max-grad-norm 1e9" --output FILE.json

Ours run as a reader runs them, `python ppo.py --seed S --gold-reward-fn toy/make.py:gold_score`, with evaluation and
sample tables off, and are read from their metrics.jsonl. TRL's PPOTrainer and RLOOTrainer run in the virtual environment
of throughput.py, on the same policy, reward model and prompts, each with the settings that ours wrote in args.json.
What stays unequal is what the libraries differ in: TRL 0.16.1 never clips the gradient, its RLOO does not end a
generation at EOS, and the random numbers are others. The gold score, the truth of the toy world, is no part of training
on either side. TRL's is taken where it calls its reward model, score and EOS share too; its KL is the one it logs.

dpo.py sees the pairs that the reward model of the others was trained on, and is judged by 200 responses every 20 steps;
an episode of it is a pair, and it has no score.

Seconds run from the start of the training loop, by each side's clock; loading is left out.

What comes out: learning.json with every update of every run; learning-episodes.png and learning-seconds.png, the mean
over the seeds with a band from the lowest to the highest; learning-frontier.png, gold score against KL, where more to
the upper left is better; and a table in Markdown.
"""

import argparse
import importlib.util
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import throughput
import trl_versions
from throughput import ROOT, BenchmarkError, require

ALGORITHMS = ("ppo", "rloo", "dpo")
METRICS = {"score": "score", "gold": "gold score", "kl": "KL, nats a response", "eos_share": "share that end with EOS"}
LAST = 5  # updates at the end of a run whose mean is its result
GOAL = 3.0  # gold score, for "seconds until"
SHARED = ("seed", "learning_rate", "num_mini_batches", "num_ppo_epochs", "response_length", "temperature", "kl_coef",
          "cliprange", "weight_decay", "missing_eos_penalty", "lr_scheduler_type", "adam_epsilon",
          "local_rollout_forward_batch_size")  # fmt: skip
OWN = {
    "ppo": ("cliprange_value", "vf_coef", "gamma", "lam", "whiten_rewards"),
    "rloo": ("rloo_k", "normalize_reward", "reward_clip_range", "normalize_advantage"),
}
COLOURS = {"ours": "#2a6fbb", "TRL 0.16.1": "#c46a2b"}
OTHER_COLOUR = "#4f9d5d"  # of ours with further flags
STYLES = {"ppo": "-", "rloo": "--", "dpo": ":"}

# ---------------------------------------------------------------------------------------------------------------------
# Inside TRL's virtual environment


def load_gold_text_score():
    """gold_text_score of toy/make.py, from a text to a float."""
    spec = importlib.util.spec_from_file_location("make", ROOT / "toy/make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.gold_text_score


def run_trl(spec: dict) -> None:
    """One training by TRL 0.16.1; a line for each update goes to spec["lines"]."""
    from transformers import TrainerCallback

    trainer, module = trl_versions.trainer_016(spec, spec["arguments"] | {"stop_token": "eos"})
    tokenizer, reward_model = trainer.processing_class, trainer.reward_model
    gold_text_score, get_reward, seen = load_gold_text_score(), module.get_reward, {}

    def get_reward_and_gold(model, ids, pad_token_id, context_length):
        """TRL's; where the reward model is asked, the texts are judged by the truth too."""
        result = get_reward(model, ids, pad_token_id, context_length)
        if model is reward_model:
            texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
            ended = (ids[:, context_length:] == tokenizer.eos_token_id).any(1)
            seen.update(score=result[1].mean().item(), gold=statistics.fmean(map(gold_text_score, texts)),
                        eos_share=ended.float().mean().item(), rows=len(ids))  # fmt: skip
        return result

    start = time.perf_counter()

    class Writer(TrainerCallback):
        """Takes down each update."""

        def on_log(self, args, state, control, logs=None, **others):
            """One line."""
            if "objective/kl" in logs:
                require(
                    seen.pop("rows") == args.batch_size, "TRL scored a batch in parts; its mean would be of the last"
                )
                line = {"episode": logs["episode"], "seconds": time.perf_counter() - start, "kl": logs["objective/kl"]}
                with open(spec["lines"], "a") as file:
                    file.write(json.dumps(line | seen) + "\n")

    trainer.add_callback(Writer())
    with mock.patch.object(module, "get_reward", get_reward_and_gold):
        trainer.train()


# ---------------------------------------------------------------------------------------------------------------------
# Outside: the runs


def run_process(command: list[str], log: Path) -> None:
    """Runs a command to its end; raises BenchmarkError with its last lines if it fails."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with open(log, "w") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, check=False)
    tail = "\n".join(log.read_text(errors="replace").strip().splitlines()[-12:])
    require(done.returncode == 0, f"`{shlex.join(command)}` failed; its last lines:\n{tail}")


def run_ours(algorithm: str, seed: int, flags: list[str], work: Path) -> tuple[list[dict], dict]:
    """One training by our script: its updates, and its settings."""
    output = work / f"ours-{algorithm}-{seed}"
    command = [sys.executable, str(ROOT / f"{algorithm}.py"), "--seed", str(seed), "--output-dir", str(output),
               "--gold-reward-fn", f"{ROOT / 'toy/make.py'}:gold_score", "--num-sample-generations", "0",
               "--dataset-test-split", "none", *flags]  # fmt: skip
    run_process(command, work / f"{output.name}.log")
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    updates = [
        {"episode": line["episode"], "seconds": line["episode"] / line["eps"], "score": line["objective/scores"],
         "gold": line["objective/gold_scores"], "kl": line["objective/kl"], "eos_share": line["val/eos_share"]}
        for line in lines
    ]  # fmt: skip
    return updates, json.loads((output / "args.json").read_text())


def run_dpo(seed: int, flags: list[str], work: Path) -> list[dict]:
    """One training by dpo.py: what its evaluations saw."""
    output = work / f"ours-dpo-{seed}"
    command = [sys.executable, str(ROOT / "dpo.py"), "--seed", str(seed), "--output-dir", str(output),
               "--gold-reward-fn", f"{ROOT / 'toy/make.py'}:gold_score", "--num-sample-generations", "0",
               "--eval-steps", "20", "--num-eval-prompts", "200", *flags]  # fmt: skip
    run_process(command, work / f"{output.name}.log")
    batch, seconds, seen = json.loads((output / "args.json").read_text())["batch_size"], 0.0, []
    for line in map(json.loads, (output / "metrics.jsonl").read_text().splitlines()):
        seconds += line["time/step"]
        if "objective/kl" in line:
            seen.append({
                "episode": line["step"] * batch, "seconds": seconds, "gold": line["objective/gold_scores"],
                "kl": line["objective/kl"], "eos_share": line["val/eos_share"],
            })  # fmt: skip
    return seen


def run_theirs(algorithm: str, seed: int, settings: dict, python: str, work: Path) -> list[dict]:
    """One training by TRL with the settings of ours: its updates."""
    models, output = work / "models", work / f"trl-{algorithm}-{seed}"
    if not models.exists():
        models.mkdir()
        trl_versions.copy_toy(models)
    batches = {
        "per_device_train_batch_size": settings["batch_size"] // settings["num_mini_batches"],
        "gradient_accumulation_steps": 1, "total_episodes": settings["num_updates"] * settings["batch_size"],
    }  # fmt: skip
    spec = {
        "algorithm": algorithm, "arguments": batches | {name: settings[name] for name in SHARED + OWN[algorithm]},
        "policy": str(models / "policy"), "reward": str(models / "reward"), "output": str(output),
        "prompts": str(models / f"prompts-{algorithm}.jsonl"), "lines": str(work / f"{output.name}.jsonl"),
    }  # fmt: skip
    file = work / f"{output.name}.json"
    file.write_text(json.dumps(spec))
    run_process([python, __file__, "--worker", str(file)], work / f"{output.name}.log")
    return [json.loads(line) for line in Path(spec["lines"]).read_text().splitlines()]


def run_all(args: argparse.Namespace, work: Path) -> dict:
    """All runs, seed by seed, so that a machine that slows down slows down all sides; written as they end."""
    python = trl_versions.make_venv("0.16.1", args.venvs) if "trl" in args.sides else None
    ours, flags = f"ours {args.ours}".strip(), shlex.split(args.ours)
    results = {
        "machine": throughput.describe_machine(), "date": time.strftime("%Y-%m-%d %H:%M"),
        "command": shlex.join(sys.argv), "ours": throughput.describe_ours(ROOT), "runs": [],
    }  # fmt: skip

    def keep(algorithm: str, side: str, seed: int, updates: list[dict]) -> None:
        """Adds a run to the file."""
        results["runs"].append({"algorithm": algorithm, "side": side, "seed": seed, "updates": updates})
        write_results(args.output, results)
        print(f"{algorithm}, {side}, seed {seed}: gold score {ending(updates, 'gold'):.2f} after "
              f"{updates[-1]['episode']} episodes, {updates[-1]['seconds']:.0f} s", flush=True)  # fmt: skip

    for seed in args.seeds:
        for algorithm in args.algorithms:
            if algorithm == "dpo":
                keep(algorithm, ours, seed, run_dpo(seed, flags, work))
                continue
            updates, settings = run_ours(algorithm, seed, flags, work)
            keep(algorithm, ours, seed, updates)
            if "trl" in args.sides:
                keep(algorithm, "TRL 0.16.1", seed, run_theirs(algorithm, seed, settings, python, work))
    return results


def write_results(file: Path, results: dict) -> None:
    """The JSON file, one update a line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps({name: value for name, value in results.items() if name != "runs"}, indent=1)
    rounded = lambda updates: [{k: round(v, 4) for k, v in update.items()} for update in updates]
    runs = [
        json.dumps({k: v for k, v in run.items() if k != "updates"})[:-1]
        + ', "updates": [\n'
        + ",\n".join(json.dumps(update) for update in rounded(run["updates"]))
        + "]}"
        for run in results["runs"]
    ]
    file.write_text(head[:-2] + ',\n"runs": [\n' + ",\n".join(runs) + "]}\n")


# ---------------------------------------------------------------------------------------------------------------------
# Outside: what came out


def ending(updates: list[dict], name: str) -> float:
    """The result of a run: the mean of a metric over its last updates."""
    return statistics.fmean(update[name] for update in updates[-LAST:])


def until_goal(updates: list[dict], axis: str) -> float:
    """Where on the axis the gold score, as a mean of three updates, first reaches the goal; NaN if it never does."""
    for i in range(2, len(updates)):
        if statistics.fmean(update["gold"] for update in updates[i - 2 : i + 1]) >= GOAL:
            return updates[i][axis]
    return math.nan


def groups_of(results: dict) -> dict[tuple[str, str], list[list[dict]]]:
    """(algorithm, side) -> the updates of each seed."""
    groups = {}
    for run in results["runs"]:
        groups.setdefault((run["algorithm"], run["side"]), []).append(run["updates"])
    return groups


def make_table(results: dict) -> str:
    """Markdown: mean and standard deviation over the seeds of what each run ended with."""
    head = ["", "", "score", "gold score", "KL", "EOS share", "seconds", f"episodes to gold {GOAL:g}",
            f"seconds to gold {GOAL:g}"]  # fmt: skip
    lines = [head, ["---"] * 2 + ["---:"] * (len(head) - 2)]

    def cell(values: list[float], digits: int) -> str:
        """mean ± deviation; of seeds that never reached the goal there is no value, and the others are counted."""
        there = [value for value in values if not math.isnan(value)]
        if not there:
            return "never"
        deviation = f" ± {statistics.stdev(there):.{digits}f}" if len(there) > 1 else ""
        count = f" ({len(there)} of {len(values)} seeds)" if len(there) < len(values) else ""
        return f"{statistics.fmean(there):.{digits}f}{deviation}{count}"

    for (algorithm, side), runs in groups_of(results).items():
        row = [f"{algorithm}", f"{side}, {len(runs)} seeds"]
        row += [
            cell([ending(run, name) for run in runs], digits) if name in runs[0][0] else "–"
            for name, digits in zip(METRICS, (2, 2, 1, 2))
        ]
        row.append(cell([run[-1]["seconds"] for run in runs], 0))
        row += [cell([until_goal(run, axis) for run in runs], 0) for axis in ("episode", "seconds")]
        lines.append(row)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def band(runs: list[list[dict]], axis: str, name: str) -> tuple[list[float], list[list[float]]]:
    """Points on the axis that all runs reach, and the metric of each run there, interpolated."""
    import numpy as np

    last = min(run[-1][axis] for run in runs)
    first = max(run[0][axis] for run in runs)
    x = np.linspace(first, last, min(map(len, runs)))
    return x, np.array([np.interp(x, [u[axis] for u in run], [u[name] for u in run]) for run in runs])


def draw_curves(results: dict, axis: str, label: str, file: Path) -> None:
    """A row for each algorithm, a column for each metric; mean over the seeds, and the range as a band."""
    groups = groups_of(results)
    algorithms = list(dict.fromkeys(algorithm for algorithm, _ in groups))
    figure, axes = throughput.figure_of(len(algorithms), len(METRICS), 15, 3.1 * len(algorithms))
    for (algorithm, side), runs in groups.items():
        for panel, name in zip(axes[algorithms.index(algorithm)], METRICS):
            if name not in runs[0][0]:
                panel.axis("off")
                continue
            x, y = band(runs, axis, name)
            panel.plot(x, y.mean(0), color=COLOURS.get(side, OTHER_COLOUR), label=f"{algorithm}, {side}")
            panel.fill_between(x, y.min(0), y.max(0), color=COLOURS.get(side, OTHER_COLOUR), alpha=0.2, linewidth=0)
            panel.set_title(METRICS[name], fontsize=10)
            panel.set_xlabel(label, fontsize=9)
    for row in axes:
        row[1].legend(frameon=False, fontsize=9)
    machine = results["machine"]
    figure.suptitle(f"toy world, mean and range over seeds; {machine['cpu']}, {machine['cores']} cores", fontsize=9)
    figure.savefig(file, dpi=110)


def draw_frontier(results: dict, file: Path) -> None:
    """Gold score against KL along the training, the mean over the seeds at each update."""
    figure, axes = throughput.figure_of(1, 1, 6, 4)
    for (algorithm, side), runs in groups_of(results).items():
        kl, gold = (band(runs, "episode", name)[1].mean(0) for name in ("kl", "gold"))
        axes[0, 0].plot(kl, gold, STYLES[algorithm], color=COLOURS.get(side, OTHER_COLOUR), label=f"{algorithm}, {side}")
    axes[0, 0].set_xlabel("KL to the reference, nats a response"), axes[0, 0].set_ylabel("gold score")
    axes[0, 0].legend(frameon=False)
    figure.savefig(file, dpi=110)


def show(results: dict, output: Path, beside: Path | None = None) -> None:
    """Charts beside the JSON file, and the table; with the runs of another such file, if there is one."""
    if beside:
        results = results | {"runs": json.loads(beside.read_text())["runs"] + results["runs"]}
    for axis, label in (("episode", "episodes"), ("seconds", "seconds")):
        name = {"episode": "episodes", "seconds": "seconds"}[axis]
        draw_curves(results, axis, label, output.with_name(f"{output.stem}-{name}.png"))
    draw_frontier(results, output.with_name(f"{output.stem}-frontier.png"))
    print(make_table(results))
    print(f"written: {output}, and three charts beside it")


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    seeds = lambda text: [int(part) for part in text.split(",")]
    seeds.__name__ = "list of seeds"  # for argparse's message
    parser.add_argument("--seeds", type=seeds, default=[1, 2, 3, 4, 5], help="with commas between them")
    parser.add_argument(
        "--algorithms", type=throughput.a_list(ALGORITHMS), default=["ppo", "rloo"], help="of ppo,rloo,dpo"
    )
    parser.add_argument("--sides", type=throughput.a_list(("ours", "trl")), default=["ours", "trl"],
                        help="ours, or ours,trl: TRL takes its settings from ours")  # fmt: skip
    parser.add_argument("--ours", default="", metavar="FLAGS", help="further flags for our script, in one string")
    parser.add_argument("--redraw", action="store_true", help="run nothing, draw what the JSON file holds")
    parser.add_argument("--beside", type=Path, help="another JSON file, whose runs are drawn and listed too")
    parser.add_argument("--output", type=Path, default=throughput.RESULTS / "learning.json", help="JSON file")
    parser.add_argument("--venvs", type=Path, default=Path("/tmp"), help="where TRL's environment is, or is made")
    parser.add_argument("--work", type=Path, help="folder for the runs, which then stay there")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """Runs, or draws, or does what the outer process asks of a worker."""
    args = parse_arguments(argv)
    if args.worker:
        run_trl(json.loads(args.worker.read_text()))
        return
    if args.redraw:
        require(args.output.exists(), f"--redraw reads {args.output}, and there is none; run without it first")
        show(json.loads(args.output.read_text()), args.output, args.beside)
        return
    with tempfile.TemporaryDirectory(prefix="learning-") as folder:
        work = (args.work or Path(folder)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        show(run_all(args, work), args.output, args.beside)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except BenchmarkError as problem:
        print(f"{Path(__file__).name}: error: {problem}", file=sys.stderr)
        sys.exit(2)
