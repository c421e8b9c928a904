"""Survival: runs that are killed again and again, and everything else that can end a run before its time.

    python benchmarks/survival.py                         # 10 kills a script, and the faults; a quarter of an hour
    python benchmarks/survival.py --scripts rloo --kills 5
    python benchmarks/survival.py --kills 0 --faults "disk full"      # one fault: what was done, what was seen

A script trains for some steps on the toy world. Another run of the same settings is killed with SIGKILL, resumed,
killed again, at moments drawn at random: while it starts, in a step, while a checkpoint is written. When it is through,
its metrics and its weights must be those of the run that nobody touched, bit for bit, and metrics.jsonl must have every
line once. Then the faults: each is provoked by the command that the table shows, with R for

    ppo.py --batch-size 8 --total-episodes 32 --response-length 8 --output-dir D

With --output, each result is added to a JSON file, and what is there is not done again: results/survival.json is the one
whose tables stand in README.md.
"""

import argparse
import json
import os
import random
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from throughput import ROOT, describe_machine, describe_ours

TINY = {  # flags of a run of 12 steps
    "ppo": "--batch-size 8 --total-episodes 96 --response-length 8 --adaptive-kl --ema-decay 0.9",
    "rloo": "--batch-size 8 --total-episodes 96 --response-length 8 --adaptive-kl",
    "grpo": "--batch-size 8 --num-generations 4 --total-episodes 96 --response-length 8 --dynamic-sampling 2",
    "dpo": "--dataset {tmp}/preferences --dataset-test-split none --batch-size 8 --num-train-epochs 2",
    "sft": "--dataset {tmp}/sft --dataset-test-split none --batch-size 8",
    "reward_model": "--dataset {tmp}/preferences --dataset-test-split none --batch-size 8",
    "ddpo": "--num-epochs 12 --sample-batch-size 4 --sample-num-batches-per-epoch 1 --train-batch-size 2",
}
MOMENTS = ("at the start", "in a step", "while a checkpoint is written")
TIMED = ("time/", "perf/", "eps")  # metrics that no two runs share
WRONG = {  # a file that the faults use -> its text
    "raises.py": """calls = 0
def score(prompts, completions, **columns):
    global calls
    calls += 1
    if calls > 3:
        raise ValueError("out of order")
    return [float(len(text)) for text in completions]
""",
    "second.py": """import os
calls = []
def score(prompts, completions, **columns):
    calls.append(1)
    return [float("nan") if len(calls) > 2 and os.environ["RANK"] == "1" else 0.0 for _ in completions]
""",
    "removes.py": """import pathlib, shutil
calls = []
def score(prompts, completions, **columns):
    calls.append(1)
    if len(calls) == 3:
        shutil.rmtree(pathlib.Path(__file__).parent / "run")
    return [float(len(text)) for text in completions]
""",
    "exits.py": "import sys\ndef score(prompts, completions, **columns):\n    sys.exit(0)\n",
    "escapes.jsonl": '{"prompt": "The film\\u001b]0;owned\\u0007 [red]x[/red]"}\n' * 8,
    "cut.jsonl": '{"prompt": "The film"}\n{"prompt": "The bo',
}
RUN = "ppo.py --batch-size 8 --total-episodes 32 --response-length 8 --output-dir {tmp}/run"
FAULTS = {  # name -> shell command; `python` is this one
    "reward function raises": f"python {RUN} --reward-fn {{tmp}}/raises.py:score",
    "reward function exits": f"python {RUN} --reward-fn {{tmp}}/exits.py:score",
    "disk full": f"(ulimit -f 3000; python {RUN} --save-steps 1)",
    "no room for metrics.jsonl": f"(ulimit -f 4; python {RUN} --total-episodes 64 --save-steps 1)",
    "folder removed midway": f"python {RUN} --reward-fn {{tmp}}/removes.py:score --save-steps 1",
    "W&B out of reach": f"WANDB_BASE_URL=http://127.0.0.1:9 WANDB_API_KEY={'a' * 40} python {RUN} --track",
    "damaged checkpoint": f"python {RUN} --save-steps 1 && truncate -s 5000 {{tmp}}/run/checkpoints/step-00000004.pt "
    "&& python ppo.py --resume {tmp}/run",
    "checkpoint with a wrong byte": f"python {RUN} --save-steps 1 && printf X | dd of={{tmp}}/run/checkpoints/"
    "step-00000004.pt bs=1 seek=1000000 conv=notrunc && python ppo.py --resume {tmp}/run",
    "an older checkpoint": f"python {RUN} --save-steps 1 && "
    "python ppo.py --resume {tmp}/run/checkpoints/step-00000003.pt --total-episodes 40",
    "checkpoint of another script": f"python {RUN} --save-steps 1 && python rloo.py --resume {{tmp}}/run",
    "killed before the first checkpoint": f"python {RUN} --total-episodes 4096 & sleep 12; kill -KILL $!; wait $!; "
    "python ppo.py --resume {tmp}/run --total-episodes 32",
    "two runs in one folder": f"python {RUN} --total-episodes 4096 & sleep 20; python ppo.py --resume {{tmp}}/run; "
    "code=$?; kill -TERM $!; wait $!; exit $code",
    "truncated data file": f"python {RUN} --dataset {{tmp}}/cut.jsonl",
    "learning rate too high": f"python {RUN} --learning-rate 1e8",
    "SIGTERM": f"python {RUN} --total-episodes 4096 & sleep 12; kill -TERM $!; wait $!",
    "closed terminal": f"python {RUN} --total-episodes 999 & sleep 12; kill -HUP $!; wait $!",
    "out of memory": "(ulimit -v 6000000; python ppo.py --batch-size 2048 --micro-batch-size 2048 --response-length 120 "
    "--total-episodes 2048 --output-dir {tmp}/run)",
    "one of two processes fails": f"python -m torch.distributed.run --standalone --nproc-per-node 2 {RUN} "
    "--reward-fn {tmp}/second.py:score",
    "damaged model": "cp -r toy/sft {tmp}/sft && truncate -s 5000 {tmp}/sft/model.safetensors && "
    f"python {RUN} --model {{tmp}}/sft",
    "control characters in the data": f"python {RUN} --dataset {{tmp}}/escapes.jsonl | grep -c $'\\e' || true",
    "settings that differ": f"python {RUN} --save-steps 1 && python ppo.py --resume {{tmp}}/run --kl-coef 1",
}


def command_of(script: str, folder: Path, tmp: Path) -> list[str]:
    """The command that starts the run, or goes on with it where it was started before."""
    if (folder / "args.json").exists():
        return [sys.executable, f"{script}.py", "--resume", str(folder)]
    flags = TINY[script].replace("{tmp}", str(tmp)).split()
    if script != "ddpo":
        flags += ["--num-sample-generations", "0"]
    return [sys.executable, f"{script}.py", *flags, "--save-steps", "1", "--output-dir", str(folder)]


def start(script: str, folder: Path, tmp: Path) -> subprocess.Popen:
    """A process of the script; what it prints goes to a file."""
    command = command_of(script, folder, tmp)
    with open(tmp / "log.txt", "w") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)


def result(folder: Path) -> tuple[list[dict], list[bytes]]:
    """The metrics that do not depend on the clock, and the weights."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [{name: x for name, x in line.items() if not name.startswith(TIMED)} for line in lines]
    return lines, [path.read_bytes() for path in sorted(folder.rglob("*.safetensors"))]


def wait_for_a_moment(process: subprocess.Popen, folder: Path, chance: random.Random) -> str:
    """Waits for a random moment; returns a word for it, or "" when the run ended before."""
    kind = chance.choice(["in a step", *MOMENTS])  # twice as often as the others
    started, seconds = time.monotonic(), chance.uniform(0.5, 6)
    lines = folder / "metrics.jsonl"
    before = lines.read_bytes().count(b"\n") if lines.exists() else 0
    steps = before + chance.randint(1, 3)
    pause = chance.uniform(0, 0.2)
    while process.poll() is None:
        if kind == "while a checkpoint is written" and (folder / "checkpoints/unfinished").exists():
            return kind
        if kind == "in a step" and lines.exists() and lines.read_bytes().count(b"\n") >= steps:
            time.sleep(pause)
            return kind
        if kind == "at the start" and time.monotonic() - started > seconds:
            return kind
        time.sleep(0.0005)
    return ""


def kill_and_resume(script: str, kills: int, tmp: Path) -> dict:
    """Kills the script so many times; what happened."""
    whole, folder, chance = tmp / f"{script}-whole", tmp / f"{script}-killed", random.Random(script)
    if start(script, whole, tmp).wait():
        sys.exit(f"{script} failed: {(tmp / 'log.txt').read_text()[-2000:]}")
    moments, ends, same, expected = [], 0, 0, result(whole)
    while len(moments) < kills or folder.exists():
        process = start(script, folder, tmp)
        moment = wait_for_a_moment(process, folder, chance) if len(moments) < kills else ""
        if moment and process.poll() is None:
            process.kill()
            moments.append(moment)
        if process.wait() == 0:
            ends, same = ends + 1, same + (result(folder) == expected)
            shutil.rmtree(folder)
        elif not moment:
            sys.exit(f"{script} failed: {(tmp / 'log.txt').read_text()[-2000:]}")
    counts = {kind: moments.count(kind) for kind in MOMENTS}
    return {"script": f"`{script}.py`", "kills": kills, **counts, "runs completed": ends, "the same, bit for bit": same}


def provoke(name: str, tmp: Path) -> dict:
    """Runs the command of a fault; what it said, its exit code, and what is on disk."""
    folder = Path(tempfile.mkdtemp(dir=tmp))
    for file, text in WRONG.items():
        (folder / file).write_text(text)
    command = FAULTS[name].replace("{tmp}", str(folder)).replace("python ", f"{shlex.quote(sys.executable)} ")
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    said = re.findall(r"(?:\w+\.py: error|warning|stopped by a signal).*", done.stderr.replace("\r", "\n"))
    said = [line for line in said if "no response ends with the stop token" not in line]  # true of runs as short as these
    there = [x for x in ("model.safetensors", "metrics.jsonl") if (folder / "run" / x).exists()]
    there += [f.name for f in sorted(folder.glob("run/checkpoints/*.pt"))[-1:]]
    said = [line.partition(": error: ")[2] for line in said if ": error: " in line] or said
    if not said and "Traceback" in done.stderr:
        said = ["a traceback"]
    last = said[-1] if said else (done.stdout.splitlines() or [""])[-1]
    return {
        "fault": name, "provoked by": f"`{shortened(FAULTS[name])}`", "the last word": shortened(last, folder),
        "exit code": done.returncode, "left in D": ", ".join(there) or "nothing",
    }  # fmt: skip


def shortened(text: str, folder: str | Path = "{tmp}") -> str:
    """With R for the usual command, and D for its folder."""
    text = text.replace("python -m torch.distributed.run --standalone", "torchrun")
    text = text.replace(f"python {RUN}", "R").replace(RUN, "R").replace("a" * 40, "…")
    return text.replace(f"{folder}/run", "D").replace(f"{folder}/", "")


def table(rows: list[dict]) -> str:
    """Markdown."""
    cell = lambda x: str(x).replace("|", "\\|")
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([cell(x) for x in row.values()] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    """The kills, then the faults."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = lambda text: [name for name in text.split(",") if name]
    parser.add_argument("--scripts", type=names, default=list(TINY), help=f"of {','.join(TINY)}")
    parser.add_argument("--kills", type=int, default=10, help="of each script")
    parser.add_argument("--faults", type=names, default=list(FAULTS), help=f"of {','.join(FAULTS)}; none for no fault")
    parser.add_argument("--output", type=Path, help="JSON file of the results")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # models as small as these gain nothing from more
    about = {"command": "python benchmarks/survival.py", **describe_ours(ROOT), "date": time.strftime("%Y-%m-%d")}
    found = about | {"machine": describe_machine(), "kills": [], "faults": []}
    if args.output and args.output.exists():
        found = json.loads(args.output.read_text())
    there = {row.get("script") or row["fault"] for row in found["kills"] + found["faults"]}

    def add(kind: str, row: dict) -> None:
        """A result, on the screen and in the file."""
        found[kind].append(row)
        print(table([row]), flush=True)
        if args.output:
            args.output.write_text(json.dumps(found, indent=1) + "\n")

    with tempfile.TemporaryDirectory(prefix="survival-") as folder:
        tmp = Path(folder)
        for name in ("sft", "preferences"):
            (tmp / name).mkdir()
            lines = (ROOT / f"toy/data/{name}/train.jsonl").read_text().splitlines(keepends=True)
            (tmp / name / "train.jsonl").write_text("".join(lines[: 96 if name == "sft" else 48]))
        for script in args.scripts if args.kills else []:
            if f"`{script}.py`" not in there:
                add("kills", kill_and_resume(script, args.kills, tmp))
        for name in args.faults:
            if name in FAULTS and name not in there:
                add("faults", provoke(name, tmp))


if __name__ == "__main__":
    main()
