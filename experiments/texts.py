"""Writes texts for sft.py, in runs/, from those of the toy world: see `needs` in runs.toml.

python experiments/texts.py
"""

import json
import random
import runpy
from pathlib import Path

from record import ROOT

ANSWERED = 0.04  # the share of the texts of `seldom` that give an answer


def write(file: Path, rows: list[dict]) -> None:
    """A file of JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def copy(source: str, output: str, completion) -> None:
    """Prompts as in a folder of the toy world, each with `completion(row)`."""
    for split in ("train", "validation"):
        rows = map(json.loads, (ROOT / source / f"{split}.jsonl").read_text("utf-8").splitlines())
        write(ROOT / output / f"{split}.jsonl", [{"prompt": x["prompt"], "completion": completion(x)} for x in rows])


def write_seldom(file: Path) -> None:
    """Texts of the shell game, mostly without an answer: a policy is seldom right (docs/findings/takeoff.md)."""
    make_row = runpy.run_path(str(ROOT / "toy/shells/make.py"))["make_row"]
    rng, rows = random.Random(9), []
    for _ in range(1300):
        row = make_row(rng)
        answer = row["answer"] if rng.random() < ANSWERED else "--"
        rows.append({"prompt": row["prompt"], "completion": f" #### {answer}"})
    write(file, rows)


def write_poor_pairs(folder: Path) -> None:
    """A thousand pairs, of which a poor reward model is made."""
    for split in ("train", "validation"):
        lines = (ROOT / f"toy/data/preferences/{split}.jsonl").read_text("utf-8").splitlines()[:1000]
        write(folder / f"{split}.jsonl", list(map(json.loads, lines)))


if __name__ == "__main__":
    write_poor_pairs(ROOT / "runs/learning/poor-pairs")
    copy("toy/data/preferences", "runs/learning/chosen", lambda row: row["chosen"])
    copy("toy/shells/data/sft", "runs/learning/at-once", lambda row: row["completion"][-len(" #### 1") :])
    write_seldom(ROOT / "runs/takeoff/texts/train.jsonl")
