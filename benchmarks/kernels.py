"""Kernels: the time of an update by kind of operator, in float32 and in bfloat16.

    python benchmarks/kernels.py                                         # two minutes
    python benchmarks/kernels.py --settings tiny --algorithms ppo,rloo

A script trains on the models of `throughput.py`. In one update every operator is recorded with its shapes; the updates
after it are timed without recording. Then each operator is run alone on the same shapes. The table has the milliseconds
of an update by kind of operator, their sum, and the rest of the update's time. (`torch.profiler` keeps events between
the tensors, so that memory is not reused: it showed 25 ms for an operator that takes 1.)
"""

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median

import throughput
from common import RESULTS, ROOT, describe_machine, describe_ours
from rich.console import Console
from rich.table import Table

WARMUP, WATCHED = 2, 5
KINDS = {  # kind -> parts of the names of torch's operators; the first match counts
    "matrix products": ("mm", "matmul", "linear", "convolution"),
    "attention": ("scaled_dot_product", "flash"),
    "GELU": ("gelu",),
    "softmax, log-softmax": ("softmax",),
    "layer norm": ("layer_norm",),
    "copies and casts": ("copy", "contiguous", "clone", "aten::to"),
    "concatenation, indexing": ("cat", "index", "gather", "scatter", "slice", "select", "embedding", "split"),
    "sums": ("aten.sum", "aten.mean", "any", "all."),
    "optimiser": ("adam",),
    "elementwise": (
        "rsub",
        "lt",
        "bitwise",
        "logical",
        "add",
        "mul",
        "div",
        "sub",
        "exp",
        "fill",
        "where",
        "clamp",
        "neg",
        "pow",
        "max",
        "zero_",
    ),
}


def kind_of(operator: str) -> str:
    """The kind of a torch operator."""
    return next((kind for kind, parts in KINDS.items() if any(part in operator for part in parts)), "other")


def note_operators(calls: Counter):
    """A torch mode that counts operators with the shapes of their arguments, in the backward pass, too."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_flatten

    class Notes(TorchDispatchMode):
        """Counts the operators of one update."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            leaves, structure = tree_flatten((args, kwargs or {}))
            given = tuple(
                (x.shape, x.stride(), x.dtype) if isinstance(x, torch.Tensor) else ("value", x) for x in leaves
            )
            calls[func, structure, given] += 1
            return func(*args, **(kwargs or {}))

    return Notes()


def replay(call: tuple) -> tuple[float, float]:
    """Seconds and FLOPs of one operator alone, on tensors of the same shapes."""
    import torch
    from torch.utils._pytree import tree_unflatten
    from torch.utils.flop_counter import flop_registry

    func, structure, given = call
    tensors = []
    for first, *rest in given:
        if first == "value":
            tensors.append(rest[0])
            continue
        stride, dtype = rest
        size = 1 + sum((n - 1) * s for n, s in zip(first, stride) if n)
        data = torch.randn(size).to(dtype) if dtype.is_floating_point else torch.zeros(size, dtype=dtype)
        tensors.append(data.as_strided(first, stride))
    args, kwargs = tree_unflatten(tensors, structure)
    times, result = [], func(*args, **kwargs)
    while len(times) < 3 or (sum(times) < 0.01 and len(times) < 20):
        start = time.perf_counter()
        func(*args, **kwargs)
        times.append(time.perf_counter() - start)
    count = flop_registry.get(func.overloadpacket)
    return median(times), count(*args, **kwargs, out_val=result) if count else 0


def watch(algorithm: str, steps: int, flags: list[str]) -> dict:
    """Trains with `steps` optimiser steps per update. Returns milliseconds of an update by kind, and GFLOP/s."""
    import torch
    import tyro

    sys.path.insert(0, str(ROOT))
    module = importlib.import_module(algorithm)
    calls, updates, start = Counter(), [], [time.perf_counter()]
    notes = note_operators(calls)

    def end_update() -> None:
        """Turns the recording on after WARMUP updates, for one update."""
        updates.append(time.perf_counter() - start[0])
        if len(updates) == WARMUP:
            notes.__enter__()
        elif len(updates) == WARMUP + 1:
            notes.__exit__(None, None, None)
        start[0] = time.perf_counter()

    throughput.at_each_update(steps, end_update)
    module.train(tyro.cli(module.Args, args=flags))
    total = median(updates[WARMUP + 1 :])
    kinds, flops, failed = dict.fromkeys([*KINDS, "other"], 0.0), 0, Counter()
    with torch.no_grad():
        for call, times in calls.items():
            try:
                seconds, arithmetic = replay(call)
            except (RuntimeError, IndexError, TypeError) as error:  # some operators need particular values
                failed[f"{call[0]}: {str(error).splitlines()[0]}"] += times
                continue
            kinds[kind_of(str(call[0]))] += times * seconds
            flops += times * arithmetic
    for reason, times in failed.most_common(5):
        print(f"not replayed, {times} times: {reason}", file=sys.stderr)
    rate = flops / kinds["matrix products"] / 1e9
    kinds["the rest: Python, dispatch, cold caches"] = total - sum(kinds.values())
    return {
        "ms": {kind: 1000 * x for kind, x in kinds.items()},
        "gflops": rate,
        "gflop": flops / 1e9,
        "operators": sum(calls.values()),
    }


def measure(setting_name: str, algorithm: str, bf16: bool, work: Path) -> dict:
    """watch() in a process of its own."""
    setting = replace(throughput.SETTINGS[setting_name], bf16=bf16, updates=WARMUP + WATCHED - 1)
    models = work / setting_name
    if not models.exists():
        models.mkdir()
        throughput.make_models(models, setting)
    flags = throughput.ours_flags(setting, algorithm, models, work / f"{setting_name}-{algorithm}-{bf16}")
    command = [sys.executable, __file__, "--watch", json.dumps([algorithm, setting.epochs, flags])]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if run.returncode:
        raise SystemExit(f"{setting_name} {algorithm} failed:\n{run.stderr[-2000:]}")
    return json.loads(run.stdout.splitlines()[-1])


def show(name: str, plain: dict, half: dict) -> None:
    """Prints a table of two runs side by side."""
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
    table.add_row(
        "GFLOP/s of the products",
        f"{plain['gflops']:.0f}",
        "",
        f"{half['gflops']:.0f}",
        "",
        f"{plain['gflops'] / half['gflops']:.1f}",
    )
    table.add_row("GFLOP", f"{plain['gflop']:.0f}", "", f"{half['gflop']:.0f}", "", "")
    Console(width=110).print(table)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--settings", default="tiny,small", help=f"a list from {','.join(throughput.SETTINGS)}")
    add("--algorithms", default="ppo", help="a list from ppo,rloo")
    add("--output", type=Path, default=RESULTS / "kernels.json", help="JSON file")
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
    about = {"machine": describe_machine(), "ours": describe_ours(ROOT)}
    args.output.write_text(json.dumps(about | {"results": results}, indent=1) + "\n")
    print(f"written: {args.output}")


if __name__ == "__main__":
    main()
