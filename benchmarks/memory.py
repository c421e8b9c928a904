"""Memory of a GPU in an update, by formula; and the measured memory of processes on this machine.

    python benchmarks/memory.py --ladder    # by formula: the savings of each option, for a 7B policy
    python benchmarks/memory.py --recipes   # by formula: the commands of recipes/README.md
    python benchmarks/memory.py --measure   # small models on one and two processes of this machine; five minutes

The formulas, in bytes, for N weights, L layers of width D, a vocabulary of V; b rows of P + T tokens in a micro-batch,
of which T are the response; B rows sampled at once:

    trained network   4 N weights + 4 N gradients + 8 N Adam
    frozen network    4 N; in bfloat16 half of it except for the embeddings, unless it is the policy without its adapter
    activations       bfloat16: 36 D b (P + T) L, and 2 N weights cast for the pass; float32: 64 D b (P + T) L; with
                      checkpointing 4 D b (P + T) L and those of one layer. (GPT-2's layer: inputs of two norms and of
                      four products, q, k, v, both sides of the GELU; attention that keeps no matrix of its weights)
    logits            12 b T V: the logits, their log-softmax and its gradient
    cache             2 L D_kv B (P + T) keys and values, of 2 or 4 bytes; and 12 B V
"""

import argparse
import importlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace

from common import RESULTS, ROOT, describe_machine, describe_ours, markdown, require
from throughput import Setting, ours_flags, peak_memory_mb, start

GB = 1e9


@dataclass(frozen=True)
class Shape:
    """The shape of a transformer."""

    layers: int
    width: int
    vocab: int
    kv_width: int
    weights: float  # in total
    tied: bool = False  # whether head and embedding share weights

    @property
    def layer(self) -> float:
        """Number of weights of a layer."""
        return (self.weights - self.embeddings) / self.layers

    @property
    def embeddings(self) -> float:
        """Number of weights of the embeddings and the head."""
        return self.vocab * self.width * (1 if self.tied else 2)


PYTHIA = Shape(16, 2048, 50304, 2048, 1.01e9)
LLAMA = Shape(32, 4096, 32000, 4096, 6.74e9)
QWEN = Shape(24, 896, 151936, 128, 494e6, tied=True)


@dataclass(frozen=True)
class Plan:
    """The settings of a run that its memory depends on."""

    trained: int = 2  # PPO: policy and critic
    frozen: int = 2  # reference and reward model
    rows: int = 4  # in a micro-batch
    rollout_rows: int = 32
    prompt: int = 512
    response: int = 512
    bf16: bool = True
    checkpointing: bool = False
    lora: bool = False  # the policy has no gradients or moments; adapters count as 0 bytes


def memory(m: Shape, p: Plan) -> dict[str, float]:
    """Bytes on a GPU, by purpose."""
    N, tokens = m.weights, p.prompt + p.response
    trained, frozen = (p.trained - 1, p.frozen + 1) if p.lora else (p.trained, p.frozen)
    per_token = (36 if p.bf16 else 64) * m.width
    activations = per_token * p.rows * tokens * m.layers
    if p.checkpointing:
        activations = (4 * m.width * m.layers + per_token) * p.rows * tokens
    casts = 2 * (N if not p.checkpointing else m.layer + m.embeddings) if p.bf16 else 0
    stored = 2 * N + 2 * m.vocab * m.width if p.bf16 else 4 * N  # of a frozen network
    held = {"weights": 4 * N * trained + stored * frozen, "gradients": 4 * N * trained, "Adam": 8 * N * trained}
    update = {"activations": activations + casts, "logits": 12 * p.rows * p.response * m.vocab}
    cache = (2 if p.bf16 else 4) * 2 * m.layers * m.kv_width * p.rollout_rows * tokens + 12 * p.rollout_rows * m.vocab
    in_update = sum(held.values()) + sum(update.values())
    in_rollout = held["weights"] + held["Adam"] + cache + (2 * N if p.bf16 else 0)  # the policy in bfloat16
    return held | update | {"in the update": in_update, "in the rollout": in_rollout}


def peak(m: Shape, p: Plan) -> float:
    """Peak bytes on a GPU."""
    parts = memory(m, p)
    return max(parts["in the update"], parts["in the rollout"])


LADDER = [  # an option, and its change of the plan; each is added to those before it
    ("as it comes: 16 rows at a time, 64 sampled at once", {}),
    ("`--micro-batch-size 4`", {"rows": 4}),
    ("`--local-rollout-forward-batch-size 16`", {"rollout_rows": 16}),
    ("`--gradient-checkpointing`", {"checkpointing": True}),
    ("`--bf16`", {"bf16": True}),
    ("`--lora-r 16`", {"lora": True}),
]


def climb() -> None:
    """Prints the ladder for a 7B policy."""
    plan = Plan(rows=16, rollout_rows=64, bf16=False)
    print("PPO of a 7B policy in float32, 512 + 512 tokens: GB on a GPU at the fullest moment\n")
    lines, before = [["", "GB", "saved"]], None
    for name, change in LADDER:
        plan = replace(plan, **change)
        now = peak(LLAMA, plan) / GB
        lines.append([name, f"{now:.0f}", "" if before is None else f"{before - now:.0f}"])
        before = now
    print(markdown(lines))


ON_POLICY = {"bf16": True, "rows": 16, "rollout_rows": 16, "prompt": 512, "response": 53}
RECIPES = {  # sizes of the commands in recipes/README.md; a pair is two rows
    "TL;DR, PPO, one GPU": (PYTHIA, Plan(**ON_POLICY)),
    "TL;DR, RLOO, one GPU": (PYTHIA, Plan(**ON_POLICY, trained=1)),
    "IMDB": (
        Shape(12, 768, 50257, 768, 124e6, tied=True),
        Plan(2, 1, rows=16, rollout_rows=128, prompt=16, response=16),
    ),
    "GSM8K": (QWEN, Plan(1, 0, rows=8, rollout_rows=160, prompt=256, response=512)),
}


def of_recipes() -> None:
    """Prints the memory of each command of recipes/README.md."""
    rows = [[name, f"{peak(shape, plan) / GB:.0f}"] for name, (shape, plan) in RECIPES.items()]
    print(markdown([["recipe", "GB"], *rows]))


# ---------------------------------------------------------------------------------------------------------------------
# Measured

SETTING = Setting(layers=6, width=512, heads=8, vocab=16000, prompt_lengths=(8, 8), response_length=16, epochs=2)
SMALL = Shape(6, 512, 16000, 512, 6 * 12 * 512**2 + 16000 * 512 + 128 * 512, tied=True)
CASES = [  # script, processes, rows of a micro-batch, flags, and what they change of the plan
    ("ppo", 1, 2, "", {}),
    ("ppo", 2, 2, "", {}),
    ("rloo", 1, 2, "--rloo-k 2", {"trained": 1}),
    ("ppo", 1, 64, "", {}),
    ("ppo", 1, 64, "--gradient-checkpointing", {"checkpointing": True}),
]
FREED = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # this and the next two return freed memory to the system at once
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
}


def run(script: str, flags: list[str]) -> None:
    """Runs a script in this process, and returns freed memory to the system, unlike a script on a CPU by default.

    The first process writes peaks.json to the output folder: its peak in MB before it loaded any model, and after each
    optimiser step.
    """
    from torch.optim.optimizer import register_optimizer_step_post_hook

    sys.path.insert(0, str(ROOT))
    module = importlib.import_module(script)
    module.ctypes = SimpleNamespace(CDLL=lambda _: None)  # by which it would ask glibc to keep freed memory
    peaks = [peak_memory_mb()]
    register_optimizer_step_post_hook(lambda *_: peaks.append(peak_memory_mb()))
    sys.argv = [f"{script}.py", *flags]
    module.train(module.read_command_line())
    if os.environ.get("RANK", "0") == "0":
        Path(flags[flags.index("--output-dir") + 1], "peaks.json").write_text(json.dumps(peaks))


def measured(models: Path, script: str, processes: int, rows: int, flags: str) -> float:
    """Growth in bytes of the first process's peak between the imports and the last optimiser step."""
    output = Path(tempfile.mkdtemp(dir=models), "run")
    setting = replace(SETTING, batch=rows * processes, rollout_batch=rows, updates=2)
    words = [*ours_flags(setting, script, models, output), "--micro-batch-size", str(rows), *flags.split()]
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += [__file__, "--worker", script, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | FREED, cwd=ROOT, check=False)
    require(done.returncode == 0, f"{script} {flags} failed:\n{done.stderr[-3000:]}")
    before, *_, after = json.loads((output / "peaks.json").read_text())
    return (after - before) * 2**20


def measure() -> None:
    """Compares the formulas with measured peaks; prints a table, and writes results/memory-measured.json."""
    lines = [["run", "processes", "by formula, GB", "measured, GB", "measured / formula"]]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        start({"kind": "models", "setting": asdict(SETTING), "output": folder}, sys.executable)
        for script, processes, rows, flags, change in CASES:
            name = f"{script}.py {flags}".strip()
            print(name, file=sys.stderr)
            plan = Plan(rows=rows, rollout_rows=rows, prompt=8, response=16, bf16=False)
            formula = peak(SMALL, replace(plan, **change))
            peak_bytes = measured(Path(folder), script, processes, rows, flags)
            sizes = {"processes": processes, "rows": rows, "formula": formula, "measured": peak_bytes}
            found.append({"run": name} | sizes)
            figures = [formula / GB, peak_bytes / GB, peak_bytes / formula]
            lines.append([f"`{name}`, {rows} rows", str(processes), *(f"{x:.2f}" for x in figures)])
    about = {"command": shlex.join(["python", *sys.argv]), **describe_ours(ROOT), "date": time.strftime("%Y-%m-%d")}
    results = about | {"machine": describe_machine(), "runs": found}
    (RESULTS / "memory-measured.json").write_text(json.dumps(results, indent=1) + "\n")
    print(markdown(lines))


def main() -> None:
    """Runs the command line."""
    if sys.argv[1:2] == ["--worker"]:
        return run(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--ladder", action="store_true", help="the savings of each option, for a 7B policy")
    group.add_argument("--recipes", action="store_true", help="the commands of recipes/README.md")
    group.add_argument("--measure", action="store_true", help="compare the formulas with small models on this machine")
    args = parser.parse_args()
    (measure if args.measure else of_recipes if args.recipes else climb)()


if __name__ == "__main__":
    main()
