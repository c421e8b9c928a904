"""Memory of a GPU in an update, by formula; and the measured memory of processes on this machine.

    python benchmarks/memory.py --ladder    # by formula: the savings of each option, for a 7B policy
    python benchmarks/memory.py --recipes   # by formula: the commands of recipes/README.md
    python benchmarks/memory.py --measure   # GPT-2's size, on one and two processes of this machine; ten minutes

The formulas, in bytes, for N weights, E of them in embeddings and head, L layers of width D, a vocabulary of V; b rows
of P + T tokens in a micro-batch, of which T are the response; B rows sampled at once:

    trained network   4 N weights + 4 N gradients + 8 N Adam
    frozen network    4 N; in bfloat16 2 N + 2 E. With LoRA of rank r, each trained network is a frozen one with
                      adapters of some 20 r D L trained weights; the reference is the policy without them
    reward model      2 N in each process, in bfloat16 (rewards/model.py); on a CPU 4 N
    activations       a D b (P + T) L, where a is measured (see Shape); with checkpointing 4 D b (P + T) L, and those of
                      one layer; in bfloat16 also 2 N weights cast for the pass, on several processes 2 E
    logits            b T V numbers of the model's own dtype, whose memory their gradient takes; three slices of 8 MB
    cache             2 L D_kv B (P + T) keys and values, of 2 or 4 bytes; and 16 B V of the sampler

Several processes divide weights, gradients and moments of trained networks; at stage 3 also those of frozen ones. Then
a network is gathered before use: at stage 2 the whole of each trained one, at stage 3 two layers, embeddings and head;
and the whole policy while it samples. With --bf16, layers are gathered in bfloat16, embeddings and head in float32.
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
from throughput import GPT2 as SIZE
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
    activations: tuple[int, int]  # bytes kept for the backward pass, per token, layer and D: in float32, in bfloat16
    tied: bool = False  # whether head and embedding share weights

    @property
    def layer(self) -> float:
        """Number of weights of a layer."""
        return (self.weights - self.embeddings) / self.layers

    @property
    def embeddings(self) -> float:
        """Number of weights of the embeddings and the head."""
        return self.vocab * self.width * (1 if self.tied else 2)


# The activations were counted by torch.autograd.graph.saved_tensors_hooks on models of these families with 4 layers
GPT2 = Shape(12, 768, 50257, 768, 124e6, (66, 38), tied=True)
PYTHIA = Shape(16, 2048, 50304, 2048, 1.01e9, (74, 40))
LLAMA = Shape(32, 4096, 32000, 4096, 6.74e9, (87, 59))
QWEN = Shape(24, 896, 151936, 128, 494e6, (123, 77), tied=True)
TRAINED = {"ppo": 2, "rloo": 1, "grpo": 1, "dpo": 1}


@dataclass(frozen=True)
class Plan:
    """The settings of a run that its memory depends on."""

    script: str = "ppo"
    reference: bool = True
    reward_model: bool = True  # of the policy's size, by rewards/model.py; dpo has none
    reward_bytes: int = 2  # of a weight of the reward model: on a CPU 4
    rows: int = 4  # in a micro-batch; of dpo, completions: two for each pair
    rollout_rows: int = 32
    prompt: int = 512
    response: int = 512
    bf16: bool = True
    checkpointing: bool = False
    lora: int = 0  # the rank
    processes: int = 1
    stage: int = 2


def memory(m: Shape, p: Plan) -> dict[str, float]:
    """Bytes on a GPU, by purpose."""
    N, tokens = m.weights, p.rows * (p.prompt + p.response)
    networks = TRAINED[p.script]
    adapters = 20 * p.lora * m.width * m.layers
    trained = networks * (adapters if p.lora else N)  # weights
    stored = 2 * N + 2 * m.embeddings if p.bf16 else 4 * N  # bytes of a frozen network
    whole = stored + 4 * adapters if p.lora else 4 * N  # bytes of a trained network
    others = 0 if p.lora else p.reference  # frozen networks of their own
    part = 1 / p.processes
    weights = networks * whole * part + others * stored * (part if p.stage == 3 else 1)
    if p.reward_model and p.script != "dpo":
        weights += p.reward_bytes * N  # in each process
    held = {"weights": weights, "gradients": 4 * trained * part, "Adam": 8 * trained * part}

    a = m.width * m.activations[p.bf16]
    activations = a * tokens * m.layers
    if p.checkpointing:
        activations = (4 * m.width * m.layers + a) * tokens
    casts = 0
    if p.bf16:
        cast = m.layer + m.embeddings if p.checkpointing else N
        casts = 2 * (m.embeddings if p.lora or p.processes > 1 else cast)
    logits = p.rows * p.response * m.vocab * (2 if p.bf16 else 4) + 3 * 2**23
    gathered = sampling = 0
    if p.processes > 1:
        size = 2 if p.bf16 else 4  # bytes of a weight of a layer
        sampling = stored + size * adapters * (p.lora > 0)
        gathered = networks * sampling if p.stage == 2 else 2 * size * m.layer + 4 * m.embeddings
    update = {"activations": activations + casts, "logits": logits, "gathered": gathered}

    in_rollout = 0
    if p.script != "dpo":
        cache = 2 * m.layers * m.kv_width * p.rollout_rows * (p.prompt + p.response) * (2 if p.bf16 else 4)
        cache += 16 * p.rollout_rows * m.vocab
        in_rollout = held["weights"] + held["Adam"] + sampling + cache + casts
    return held | update | {"in the update": sum((held | update).values()), "in the rollout": in_rollout}


def peak(m: Shape, p: Plan) -> float:
    """Peak bytes on a GPU."""
    parts = memory(m, p)
    return max(parts["in the update"], parts["in the rollout"])


SMALLER = "`--micro-batch-size 4 --local-rollout-forward-batch-size 16`"
LADDER = [  # options, and their change of the plan; each is added to those before it
    ("float32, 8 rows at a time, 32 sampled at once (the defaults on a GPU)", {}),
    ("`--bf16`", {"bf16": True}),
    (SMALLER, {"rows": 4, "rollout_rows": 16}),
    ("`--gradient-checkpointing`", {"checkpointing": True}),
    ("`--lora-r 16`", {"lora": 16}),
    ("without it, on eight GPUs, with 8 of 64 responses each", {"lora": 0, "processes": 8, "rollout_rows": 8}),
    ("`--zero-stage 3`", {"stage": 3}),
]
COLUMNS = {  # of the ladder
    "PPO": {"script": "ppo"},
    "RLOO, GRPO": {"script": "grpo", "reward_model": False},
    "DPO": {"script": "dpo"},
}


def climb() -> None:
    """Prints the ladder for a 7B policy."""
    plan = Plan(rows=8, bf16=False)
    print("A 7B policy, prompts and responses of 512 tokens: GB on each GPU at the fullest moment, all calculated\n")
    lines = [["", *COLUMNS]]
    for name, change in LADDER:
        plan = replace(plan, **change)
        lines.append([name, *(f"{peak(LLAMA, replace(plan, **column)) / GB:.0f}" for column in COLUMNS.values())])
    print(markdown(lines))
    print(f"\nwith a reward model of 7B in rloo.py or grpo.py: {2 * LLAMA.weights / GB:.0f} GB more")


ON_POLICY = {"rows": 16, "rollout_rows": 16, "prompt": 512, "response": 53}
RECIPES = {  # sizes of the commands in recipes/README.md; a pair is two rows
    "TL;DR, PPO, one GPU": (PYTHIA, Plan(**ON_POLICY)),
    "TL;DR, RLOO, one GPU": (PYTHIA, Plan(**ON_POLICY, script="rloo")),
    "IMDB": (GPT2, Plan(reward_model=False, rows=16, rollout_rows=128, prompt=16, response=16)),
    "GSM8K": (QWEN, Plan("grpo", False, False, rows=8, rollout_rows=160, prompt=256, response=512)),
}


def of_recipes() -> None:
    """Prints the memory of each command of recipes/README.md."""
    rows = [[name, f"{peak(shape, plan) / GB:.0f}"] for name, (shape, plan) in RECIPES.items()]
    print(markdown([["recipe", "GB"], *rows]))


# ---------------------------------------------------------------------------------------------------------------------
# Measured

SETTING = Setting(**SIZE, prompt_lengths=(8, 8), response_length=16, epochs=2)
CASES = [  # script, processes, rows of a micro-batch, flags, and what they change of the plan
    ("ppo", 1, 2, "", {}),
    ("ppo", 1, 32, "", {}),
    ("ppo", 1, 32, "--gradient-checkpointing", {"checkpointing": True}),
    ("ppo", 1, 2, "--lora-r 16", {"lora": 16}),
    ("ppo", 2, 2, "--zero-stage 2", {}),
    ("ppo", 2, 2, "--zero-stage 3", {"stage": 3}),
    ("rloo", 1, 2, "--rloo-k 2", {}),
    ("rloo", 1, 2, "--rloo-k 2 --lora-r 16", {"lora": 16}),
    ("rloo", 2, 2, "--rloo-k 2 --zero-stage 3", {"stage": 3}),
    ("grpo", 1, 2, "--num-generations 2", {}),
    ("dpo", 1, 2, "", {}),
    ("dpo", 1, 2, "--lora-r 16", {"lora": 16}),
    ("dpo", 2, 2, "--zero-stage 3", {"stage": 3}),
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
    libc = SimpleNamespace(mallopt=lambda *_: 0)
    module.ctypes = SimpleNamespace(CDLL=lambda _: libc)  # by which it would ask glibc to keep freed memory
    peaks = [peak_memory_mb()]
    register_optimizer_step_post_hook(lambda *_: peaks.append(peak_memory_mb()))
    sys.argv = [f"{script}.py", *flags]
    module.train(module.read_command_line())
    if os.environ.get("RANK", "0") == "0":
        Path(flags[flags.index("--output-dir") + 1], "peaks.json").write_text(json.dumps(peaks))


def flags_of(script: str, models: Path, output: Path, rows: int, processes: int) -> list[str]:
    """The flags of a run of two optimiser steps, each on one micro-batch: at the second, there are moments."""
    setting = replace(SETTING, batch=rows * processes, rollout_batch=rows, updates=0)
    if script != "dpo":
        return [*ours_flags(setting, script, models, output), "--micro-batch-size", str(rows)]
    prompt = " ".join(f"t{i}" for i in range(2, 10))
    chosen = "".join(f" t{i}" for i in range(10, 26))
    rejected = "".join(f" t{i}" for i in range(26, 42))
    pairs = [{"prompt": prompt, "chosen": chosen, "rejected": rejected}] * rows * processes
    (models / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    words = f"--model {models}/policy --dataset {models}/pairs.jsonl --batch-size {rows // 2 * processes} "
    words += f"--micro-batch-size {rows // 2} --num-train-epochs 1 --output-dir {output}"
    return words.split()


def measured(models: Path, script: str, processes: int, rows: int, flags: str) -> float:
    """Growth in bytes of the first process's peak between the imports and the last optimiser step."""
    output = Path(tempfile.mkdtemp(dir=models), "run")
    words = [*flags_of(script, models, output, rows, processes), *flags.split()]
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += [__file__, "--worker", script, *words]
    environment = os.environ | FREED | {"REWARD_MODEL": f"{models}/reward"}  # which rewards/model.py reads
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    require(done.returncode == 0, f"{script} {flags} failed:\n{done.stderr[-3000:]}")
    before, *_, after = json.loads((output / "peaks.json").read_text())
    return (after - before) * 2**20


def measure() -> None:
    """Compares the formulas with measured peaks; prints a table, and writes results/memory-measured.json."""
    lines = [["run", "processes", "by formula, GB", "measured, GB", "measured / formula"]]
    about = {"command": shlex.join(["python", *sys.argv]), **describe_ours(ROOT), "date": time.strftime("%Y-%m-%d")}
    about["machine"] = describe_machine()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        start({"kind": "models", "setting": asdict(SETTING), "output": folder}, sys.executable)
        for script, processes, rows, flags, change in CASES:
            name = f"{script}.py {flags}".strip()
            print(name, file=sys.stderr)
            sizes = dict(rows=rows, rollout_rows=rows, prompt=8, response=16, bf16=False, reward_bytes=4)
            formula = peak(GPT2, Plan(script, processes=processes, **sizes | change))
            peak_bytes = measured(Path(folder), script, processes, rows, flags)
            sizes = {"processes": processes, "rows": rows, "formula": formula, "measured": peak_bytes}
            found.append({"run": name} | sizes)
            results = about | {"runs": found}  # after each run, since one may fail
            (RESULTS / "memory-measured.json").write_text(json.dumps(results, indent=1) + "\n")
            figures = [formula / GB, peak_bytes / GB, peak_bytes / formula]
            lines.append([f"`{name}`, {rows} rows", str(processes), *(f"{x:.2f}" for x in figures)])
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
