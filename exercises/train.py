"""Trains a script with your functions, and writes its settings and its metrics into the folder of the run.

    python exercises/train.py grpo --output-dir runs/first
    python exercises/train.py grpo --output-dir runs/second --seed 2 --eval-steps 5    # and any setting of the script

The script is ppo, grpo or dpo. args.json has its settings, metrics.jsonl one line for each update. With grpo, after the
first update, the last one and every `--eval-steps` updates, the policy answers 256 prompts that it does not train on,
each 8 times: eval/pass@1 is the share of right answers, and eval/pass@8 the share of prompts with at least one right
answer.
"""

import argparse
import json
import sys
from itertools import islice
from pathlib import Path
from runpy import run_path

import torch
from capstone import FILE, RUNS, functions_of, path_of, run

K = 8  # answers to a prompt of an evaluation


@torch.no_grad()
def evaluate(names: dict, num_prompts: int = 256) -> dict[str, float]:
    """pass@1 and pass@8 on unseen prompts, from the variables of grpo.py, with the same random numbers each time."""
    args, tokenizer, device = names["args"], names["tokenizer"], names["device"]
    with open(Path(args.dataset, "validation.jsonl"), encoding="utf-8") as file:
        rows = [json.loads(line) for line in islice(file, num_prompts) for _ in range(K)]
    ids = tokenizer([row["prompt"] for row in rows])["input_ids"]
    batch = tokenizer.pad({"input_ids": ids}, return_tensors="pt").to(device)
    uniforms = torch.rand(len(rows), args.response_length, generator=torch.Generator().manual_seed(0)).to(device)
    stop = tokenizer.eos_token_id
    inputs = names["policy"], batch["input_ids"], batch["attention_mask"], uniforms, args.temperature, stop
    responses = names["sample"](*inputs)[0]
    mask, _ = names["response_mask"](responses, [stop])
    texts = tokenizer.batch_decode([row[real] for row, real in zip(responses, mask)], skip_special_tokens=True)
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    rewards = names["reward"](completions=texts, prompts=columns["prompt"], **columns)
    are_right = torch.tensor(rewards).view(-1, K) >= 1
    return {"eval/pass@1": are_right.double().mean().item(), f"eval/pass@{K}": are_right.any(1).double().mean().item()}


def main() -> None:
    """Reads the command line, trains, and writes the two files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", choices=list(RUNS))
    parser.add_argument("--output-dir", type=Path, required=True, help="a new folder, for the model and its metrics")
    parser.add_argument("--seed", default="1", help="seed of the run")
    parser.add_argument("--eval-steps", type=int, default=50, help="updates between evaluations, for grpo")
    parser.add_argument("--solutions", type=Path, default=FILE, help="the file with your functions")
    parser.add_argument("--original", action="store_true", help="train with the script's own functions")
    args, flags = parser.parse_known_args()
    if args.output_dir.exists():
        sys.exit(f"error: --output-dir {args.output_dir} exists. Remove it, or choose another folder")
    wanted = functions_of(path_of(args.script).read_text("utf-8"))
    own = {} if args.original else {k: x for k, x in run_path(str(args.solutions)).items() if k in wanted}
    rows = []

    def on_update(names: dict, update: int, stats: dict[str, float]) -> None:
        if args.script == "grpo" and (update in (1, names["num_updates"]) or update % args.eval_steps == 0):
            stats = stats | evaluate(names)
        rows.append({"episode": update * names["B"]} | stats)

    flags += ["--output-dir", str(args.output_dir), "--seed", args.seed]
    try:
        names = run(args.script, own, flags, on_update)
    except NotImplementedError as error:
        sys.exit(f"error: {args.script}.py needs {error}, which is not done yet in {args.solutions}")
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (args.output_dir / "metrics.jsonl").write_text(text, "utf-8")
    (args.output_dir / "args.json").write_text(json.dumps(vars(names["args"]), indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
