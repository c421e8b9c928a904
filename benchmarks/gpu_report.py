"""Checks that the scripts run on this GPU with the same numbers as on the CPU, and measures their speed.

    python benchmarks/gpu_report.py > report.md                 # ten minutes; Markdown for an issue
    python benchmarks/gpu_report.py --device cpu --quick        # compares the CPU with itself, to see a report
    python benchmarks/gpu_report.py --only "GPT-2"              # only the rows of the table with this in their names

Each run is a process of its own: the default run of each script, shortened; PPO resumed halfway; PPO on two processes,
if there are two GPUs; PPO with a policy of the size of GPT-2 (random weights, texts of the toy world), with and
without --bf16. A GPU rounds differently from a CPU, above all in TF32 and bfloat16: now and then it samples another
token, and the rest of that response differs. That is why the first updates are compared, and only to a few digits. The
time of an update is the median over all updates but the first, which is a warm-up. Checkpoints do not count.
"""

import argparse
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from datetime import date
from functools import cache
from pathlib import Path

from common import ROOT, BenchmarkError, describe_machine, describe_ours, require

TEXTS = "--batch-size 64 --num-train-epochs 0.02"
ROLLOUTS = "--total-episodes 384 --save-steps 1 --save-total-limit 9 --num-eval-prompts 0"
RUNS = dict.fromkeys(["sft", "reward_model", "dpo"], TEXTS)  # six to nine updates, otherwise by default
RUNS |= dict.fromkeys(["ppo", "rloo", "grpo"], ROLLOUTS)
RUNS |= {"agent": "--batch-size 64 --total-episodes 384 --num-eval-prompts 0", "ddpo": "--num-epochs 6"}
GPT2 = "--batch-size 16 --save-steps 99 --num-eval-prompts 0 --total-episodes"
FEW_TEXTS = "--batch-size 8 --num-train-epochs 0.001 --dataset-test-split None"
FEW_ROLLOUTS = "--batch-size 8 --total-episodes 16 --response-length 8 --save-steps 1 --save-total-limit 9"
FEW_ROLLOUTS += " --num-eval-prompts 0"
FEW_IMAGES = "--num-epochs 2 --sample-num-steps 2 --sample-batch-size 8 --train-batch-size 16"
FEW_EPISODES = "--num-generations 4 --batch-size 8 --total-episodes 16 --num-eval-prompts 0"
QUICK = {TEXTS: FEW_TEXTS, ROLLOUTS: FEW_ROLLOUTS, RUNS["agent"]: FEW_EPISODES, RUNS["ddpo"]: FEW_IMAGES}
QUICK |= {f"{GPT2} {episodes}": FEW_ROLLOUTS for episodes in (16, 96)}
METRICS = dict.fromkeys(["sft", "reward_model", "dpo"], "loss") | {"ddpo": "reward_mean"}
CLOCKS = ("perf/", "eps")


def work(script: str, words: list[str]) -> None:
    """Runs a script in this process. The first process writes the seconds of each update to its folder."""
    sys.path.insert(0, str(ROOT))
    module, seconds = importlib.import_module(script), []
    log = module.Run.log

    def timed(run, *stats) -> None:
        """An update ends when it is logged, which waits for the GPU."""
        log(run, *stats)
        seconds.append(time.perf_counter() - run.step_started)

    module.Run.log = timed
    sys.argv = [f"{script}.py", *words]
    args = module.read_command_line()
    module.train(args)
    if os.environ.get("RANK", "0") == "0":
        Path(args.resume or args.output_dir, "seconds.json").write_text(json.dumps(seconds))


@dataclass(frozen=True)
class Run:
    """A run of a script in its own folder, from the start or resumed from the middle of another run."""

    script: str
    device: str
    flags: str
    folder: Path
    processes: int = 1
    begun: "Run | None" = None

    @cache
    def lines(self) -> list[dict]:
        """The metrics of all updates; raises BenchmarkError if the run fails."""
        command = [sys.executable]
        if self.processes > 1:
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.processes)]
        place = "--output-dir"
        if self.begun:
            self.begun.lines()
            shutil.copytree(self.begun.folder, self.folder)
            checkpoints = sorted(self.folder.glob("checkpoints/step-*.pt"))
            for checkpoint in checkpoints[len(checkpoints) // 2 :]:
                checkpoint.unlink()
            place = "--resume"
        command += [__file__, "--worker", self.script, "--device", self.device, place, str(self.folder)]
        command += self.flags.split()
        print(*command[1:], file=sys.stderr)
        done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
        errors = [line for line in done.stderr.splitlines() if "rror" in line]
        require(done.returncode == 0, (errors or ["it failed without an error message"])[0])
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def seconds(self) -> float:
        """Seconds of an update."""
        seconds = json.loads((self.folder / "seconds.json").read_text())
        return statistics.median(seconds[1:] or seconds)


def compare(title: str, expected: Run, run: Run) -> list[str]:
    """A row of the table, which compares speed and metrics of two runs."""
    update = -1 if run.begun else 0
    try:
        a, b = expected.lines()[update], run.lines()[update]
    except BenchmarkError as error:
        return [title, "failed:", str(error).replace("|", "/"), *[""] * 6]
    there, here = expected.seconds(), run.seconds()
    memory = max(line["perf/peak_memory_mb"] for line in run.lines()) / 1000
    metric = METRICS.get(run.script, "objective/scores")
    names = [name for name in a if isinstance(a[name], float) and isinstance(b.get(name), float)]
    apart = {name: abs(a[name] - b[name]) / max(1, abs(a[name])) for name in names if not name.startswith(CLOCKS)}
    worst = max(apart, key=apart.get)
    numbers = [f"{there:.3g}", f"{here:.3g}", f"{there / here:.2g}", f"{memory:.2f}"]
    return [title, *numbers, metric, f"{a[metric]:.4g}", f"{b[metric]:.4g}", f"{apart[worst]:.1g}: {worst}"]


def make_gpt2(folder: Path, quick: bool) -> Path:
    """A policy of the size of GPT-2 with random weights and the toy world's tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "toy/sft")
    size = {"n_layer": 2, "n_embd": 48, "vocab_size": 5000} if quick else {}
    ends = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    AutoModelForCausalLM.from_config(GPT2Config(**size, **ends)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def pairs(device: str, gpus: int, quick: bool, folder: Path) -> dict[str, tuple[Run, Run]]:
    """The rows of the table by name: the run to compare with, and the run."""

    def run(script: str, flags: str, name: str, **others) -> Run:
        return Run(script, **{"device": device} | others, flags=QUICK[flags] if quick else flags, folder=folder / name)

    rows = {x: (run(x, flags, f"{x}-cpu", device="cpu"), run(x, flags, x)) for x, flags in RUNS.items()}
    ppo = rows["ppo"][1]
    rows["ppo, resumed halfway: its end"] = ppo, replace(ppo, folder=folder / "resumed", begun=ppo)
    if gpus > 1:
        rows["ppo on two"] = ppo, replace(ppo, processes=2, folder=folder / "two")
    gpt2 = f" --model {make_gpt2(folder / 'gpt2', quick)} --reward-fn toy/gold_score.py:gold_score"
    on_cpu = run("ppo", f"{GPT2} 16", "gpt2-cpu", device="cpu")
    on_cpu = replace(on_cpu, flags=on_cpu.flags + gpt2)
    for flags in ("", " --bf16"):
        on_device = run("ppo", f"{GPT2} 96", f"gpt2-run{flags.strip()}")
        rows[f"ppo, GPT-2's size{flags}"] = on_cpu, replace(on_device, flags=on_device.flags + gpt2 + flags)
    return rows


def describe(device: str, gpus: int) -> str:
    """One line about the hardware, the versions and the date."""
    import torch

    machine = describe_machine()
    parts = [machine["cpu"], f"{machine['cores']} cores", f"torch {torch.__version__}", describe_ours(ROOT)["commit"]]
    if device == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        name = f"{gpus} × {gpu.name} ({gpu.major}.{gpu.minor}, {gpu.total_memory / 1e9:.0f} GB)"
        parts = [name, f"CUDA {torch.version.cuda}", *parts]
    return ", ".join([*parts, str(date.today())])


def main() -> None:
    """Prints the report row by row."""
    if sys.argv[1:2] == ["--worker"]:
        return work(sys.argv[2], sys.argv[3:])
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--quick", action="store_true", help="small batches and a small policy, to see that it runs")
    parser.add_argument("--only", default="", help="only rows with this in their names")
    asked = parser.parse_args()
    gpus = torch.cuda.device_count() if asked.device == "cuda" else 2
    require(gpus, "CUDA finds no GPU; --device cpu needs none")
    print(f"### `benchmarks/gpu_report.py` on {asked.device}\n\n{describe(asked.device, gpus)}\n")
    there = f"on {asked.device}"
    columns = ["run", "beside it, s per update", there, "times", "GB", "metric", "beside it", there, "most apart"]
    print(f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|", sep="\n")
    with tempfile.TemporaryDirectory(prefix="gpu_report_") as folder:
        for title, (expected, run) in pairs(asked.device, gpus, asked.quick, Path(folder)).items():
            if asked.only in title:
                print(f"| {' | '.join(compare(title, expected, run))} |", flush=True)


if __name__ == "__main__":
    main()
