"""Makes what the ten lectures of README.md use and the repository does not contain: notebooks and runs.

    python lecture/before.py     # once, before the course: some twenty minutes of CPU time

It repeats nothing that exists. Runs are in runs/course, named after their lectures.
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

GOLD = "--reward-fn reward_model toy/gold_score.py:gold_score --reward-weights 1 0"
IMAGES = "--reward-fn toy/shapes/make.py:left_ink toy/shapes/make.py:same_shape --reward-weights 1 0"
POOR = "--learning-rate 1e-3 --total-episodes 4096 --reward-model runs/course/5-poor"
RUNS = {
    "1-sft": "sft.py",
    "2-reward_model": "reward_model.py",
    "3-ppo": f"ppo.py {GOLD}",
    "5-poor": "reward_model.py --dataset runs/course/few-pairs --num-train-epochs 8 --eos-dropout 0.5",
    "5-free-1": f"ppo.py {POOR} --kl-coef 0 --seed 1 {GOLD}",  # in most seeds the gold score rises and falls
    "5-free-2": f"ppo.py {POOR} --kl-coef 0 --seed 2 {GOLD}",
    "5-free-3": f"ppo.py {POOR} --kl-coef 0 --seed 3 {GOLD}",
    "5-priced": f"ppo.py {POOR} --kl-coef 0.2 {GOLD}",
    "6-rloo": f"rloo.py {GOLD}",
    "7-grpo": "grpo.py",
    "8-epochs-1": "grpo.py --num-ppo-epochs 1 --total-episodes 6400",
    "8-epochs-4": "grpo.py --num-ppo-epochs 4 --total-episodes 6400",
    "8-epochs-16": "grpo.py --num-ppo-epochs 16 --total-episodes 6400",
    "9-dpo": "dpo.py",
    "10-agent": "lecture/agent.py",
    "10-ddpo": f"ddpo.py {IMAGES}",
}
XRAYS = ("3-ppo", "6-rloo", "7-grpo")


def python(*words: str) -> None:
    """Runs a program."""
    print("+ python", *words, flush=True)
    subprocess.run([sys.executable, *words], check=True)


def main() -> None:
    """Makes what is not there yet."""
    os.chdir(Path(__file__).resolve().parent.parent)
    course = Path("runs/course")
    for file in sorted(Path("lecture").glob("*.py")):
        if file.name != Path(__file__).name and not file.with_suffix(".ipynb").exists():
            python("tools/stepwise.py", str(file))
    (course / "few-pairs").mkdir(parents=True, exist_ok=True)
    for split in ("train", "validation"):
        lines = Path(f"toy/data/preferences/{split}.jsonl").read_text().splitlines(keepends=True)
        (course / f"few-pairs/{split}.jsonl").write_text("".join(lines[:1000]))
    for name, command in RUNS.items():
        if not (course / name).exists():
            shutil.rmtree(course / "unfinished", ignore_errors=True)
            python(*shlex.split(command), "--output-dir", str(course / "unfinished"))
            if (course / "unfinished/args.json").exists():  # of a script
                python("tools/card.py", str(course / "unfinished"))
            (course / "unfinished").rename(course / name)
    for name in XRAYS:
        if not (course / name / "xray.html").exists():
            python("tools/xray.py", str(course / name))


if __name__ == "__main__":
    main()
