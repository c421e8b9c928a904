"""Kernels: where the time of an update goes, float32 beside bfloat16.

    python benchmarks/kernels.py                                         # two minutes
    python benchmarks/kernels.py --settings tiny --algorithms ppo,rloo

A script trains on the models of `throughput.py`; three updates are watched by `torch.profiler` after three that are not.
The table gives milliseconds of an update by kind of kernel, on all threads' behalf as the main thread waits for them,
and the rate of the matrix products from their shapes. The profiler itself takes time: shares tell more than levels.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import throughput
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
WARMUP, WATCHED = 3, 3
KINDS = {  # kind -> parts of the names of torch's operators; the first that fits
    "matrix products": ("mm", "matmul", "linear", "convolution"),
    "attention": ("scaled_dot_product", "flash"),
    "GELU": ("gelu",),
    "softmax, log-softmax": ("softmax",),
    "layer norm": ("layer_norm",),
    "copies and casts": ("copy", "contiguous", "clone", "aten::to"),
    "concatenation, indexing": ("cat", "index", "gather", "scatter", "slice", "select", "embedding", "split"),
    "sums": ("sum", "mean"),
    "optimiser": ("adam",),
    "elementwise": ("add", "mul", "div", "sub", "exp", "fill", "where", "clamp", "neg", "pow", "max", "zero_"),
}


def kind_of(operator: str) -> str:
    """Of one of torch's operators."""
    return next((kind for kind, parts in KINDS.items() if any(part in operator for part in parts)), "other")


def watch(algorithm: str, flags: list[str]) -> dict:
    """Trains with these flags and returns the milliseconds of an update by kind, and the products' GFLOP/s."""
    import torch
    import tyro

    spec = importlib.util.spec_from_file_location(algorithm, ROOT / f"{algorithm}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], with_flops=True,
        schedule=torch.profiler.schedule(wait=WARMUP - 1, warmup=1, active=WATCHED),
    )  # fmt: skip
    steps, write = [], module.RolloutLog.write

    def write_and_step(self, *inputs) -> None:
        """The end of an update."""
        write(self, *inputs)
        profiler.step()
        steps.append(self.metrics)

    module.RolloutLog.write = write_and_step
    with profiler:
        module.train(tyro.cli(module.Args, args=flags))
    watched = steps[WARMUP : WARMUP + WATCHED]
    kinds, product_flops = dict.fromkeys([*KINDS, "other"], 0.0), 0
    for event in profiler.key_averages():
        if event.key.startswith("ProfilerStep"):
            continue
        kinds[kind_of(event.key)] += event.self_cpu_time_total / 1000 / WATCHED
        product_flops += event.flops / WATCHED
    seconds = sum(m[f"time/{phase}"] for m in watched for phase in ("rollout", "score", "update")) / WATCHED
    return {"ms": kinds, "seconds": seconds, "gflops": product_flops / 1e6 / max(1e-9, kinds["matrix products"])}


def measure(setting_name: str, algorithm: str, bf16: bool, work: Path) -> dict:
    """watch() in a process of its own."""
    setting = replace(throughput.SETTINGS[setting_name], bf16=bf16)
    models = work / setting_name
    if not models.exists():
        models.mkdir()
        throughput.make_models({"folder": str(models), "setting": asdict(setting)})
    args = argparse.Namespace(warmup=0, seconds=0, quick=True, bf16=False)
    output = work / f"{setting_name}-{algorithm}-{bf16}"
    side = throughput.Side("ours", "ours", scripts=ROOT)
    spec = throughput.make_spec(side, setting, algorithm, models, output, args)
    flags = throughput.ours_flags(spec | {"total_updates": WARMUP + WATCHED})
    command = [sys.executable, __file__, "--watch", json.dumps([algorithm, [*flags, "--save-steps", "1000"]])]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if run.returncode:
        raise SystemExit(f"{setting_name} {algorithm} failed:\n{run.stderr[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])


def show(name: str, plain: dict, half: dict) -> None:
    """A table of two runs side by side."""
    table = Table(title=f"{name}: milliseconds of an update")
    for column in ("kernels", "float32", "share", "bfloat16", "share", "float32 / bfloat16"):
        table.add_column(column, justify="left" if column == "kernels" else "right")
    totals = [sum(run["ms"].values()) for run in (plain, half)]
    for kind in sorted(plain["ms"], key=plain["ms"].get, reverse=True):
        a, b = plain["ms"][kind], half["ms"][kind]
        cells = [f"{a:.0f}", f"{a / totals[0]:.0%}", f"{b:.0f}", f"{b / totals[1]:.0%}", f"{a / b:.1f}" if b else ""]
        table.add_row(kind, *cells)
    table.add_section()
    table.add_row("all", f"{totals[0]:.0f}", "", f"{totals[1]:.0f}", "", f"{totals[0] / totals[1]:.1f}")
    table.add_row("GFLOP/s of the products", f"{plain['gflops']:.0f}", "", f"{half['gflops']:.0f}", "",
                  f"{plain['gflops'] / half['gflops']:.1f}")  # fmt: skip
    Console(width=110).print(table)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--settings", default="tiny,small", help=f"of {','.join(throughput.SETTINGS)}")
    add("--algorithms", default="ppo", help="of ppo,rloo")
    add("--output", type=Path, default=ROOT / "benchmarks/results/kernels.json", help="JSON file")
    add("--watch", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.watch:
        print("\n" + json.dumps(watch(*json.loads(args.watch))))
        return
    results = {}
    with tempfile.TemporaryDirectory() as work:
        for setting in args.settings.split(","):
            for algorithm in args.algorithms.split(","):
                plain, half = (measure(setting, algorithm, bf16, Path(work)) for bf16 in (False, True))
                show(f"{setting} {algorithm}", plain, half)
                results[f"{setting} {algorithm}"] = {"float32": plain, "bfloat16": half}
    about = {"machine": throughput.describe_machine(), "ours": throughput.describe_ours(ROOT)}
    args.output.write_text(json.dumps(about | {"results": results}, indent=1) + "\n")
    print(f"written: {args.output}")


if __name__ == "__main__":
    main()
