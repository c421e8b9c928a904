"""What test_device.py starts, in processes that know the pretend device: on_device.py JOBS.json does the jobs of one.

Under torchrun, on_device.py JOBS.json are those of on_many_processes.py. PyTorch never forgets a device of this kind,
so that the tests themselves, and the runs on the CPU, stay in processes that have not heard of it.
"""

import importlib
import json
import os
import runpy
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from runs import run, short_form  # noqa: E402 (they import what stands in the folder above)
from sources import defined_in, text_of, with_names  # noqa: E402

DEVICE = "pretend"


def do(jobs: dict) -> dict:
    """Trains on the device; what was counted there, and what came of mistakes."""
    import pretend_device

    reads = {}
    for script, settings, output in jobs["scripts"]:
        module = importlib.import_module(script)
        module.draw_curves = lambda *_: None
        with pretend_device.count() as counted:
            run(module, output, device=DEVICE, **settings)
        reads[Path(output).name] = by_function(script, counted)
    for script, settings, output in jobs["lecture"]:
        lecture(script, settings, output, DEVICE)
    return {"reads": reads, "reads_of_sampling": reads_of_sampling()}


def by_function(script: str, reads: Counter) -> Counter:
    """Reads of each function and class at the top of a script; of what stands in none, by line."""
    tops = defined_in(f"{script}.py").items()
    names = {f"{script}.py:{line}": name for name, x in tops for line in range(x.lineno, x.end_lineno + 1)}
    result = Counter()
    for line, n in reads.items():
        result[names.get(line, line)] += n
    return result


def lecture(script: str, settings: dict, output: str, device: str) -> None:
    """Runs the short form of a script on a device."""
    with short_form(script, **settings, output_dir=output) as names:
        exec(compile(with_names(text_of(f"lecture/{script}.py"), device=device), names["__file__"], "exec"), names)
    Path(output, "metrics.jsonl").write_text("\n".join(map(json.dumps, names["history"])))


def reads_of_sampling() -> int:
    """In 64 token steps of `sample`, in which no response ends."""
    import torch
    from pretend_device import count

    import ppo

    policy = ppo.load_policy(ppo.Args()).to(DEVICE)
    policy.stop_token_ids = [-1]
    prompts = torch.ones(4, 8, dtype=torch.long).to(DEVICE)
    reorder_cache = ppo.OneTypeCache.reorder_cache
    ppo.OneTypeCache.reorder_cache = lambda cache, rows: sent.add(rows.device.type) or reorder_cache(cache, rows)
    sent = set()
    with count() as counted:
        ppo.sample(policy, prompts, prompts > 0, torch.rand(4, 64).to(DEVICE), 1.0)
    ppo.OneTypeCache.reorder_cache = reorder_cache
    assert sent == {DEVICE}, "the rows of a cache are sent to the device once for each of its tensors"
    return counted.total()


if __name__ == "__main__":
    if "RANK" in os.environ:
        import pretend_device  # noqa: F401

        runpy.run_path(str(ROOT / "tests/on_many_processes.py"), run_name="__main__")
    else:
        jobs = json.loads(Path(sys.argv[1]).read_text())
        Path(sys.argv[1]).with_name("found.json").write_text(json.dumps(do(jobs)))
