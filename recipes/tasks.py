"""Tasks that are generated and scored without a network: the generators of reasoning-gym, as prompts for grpo.py.

    pip install reasoning-gym==0.1.25
    python recipes/tasks.py                                         # the names of the tasks
    python recipes/tasks.py chain_sum data/sums --size 2000 --max-terms 2 --max-digits 1
    python grpo.py --model models/smollm2 --dataset data/sums --reward-fn rewards/reasoning.py:score

A row has a conversation of an instruction, which asks for the answer in <answer> tags, and the question. It also has
the right answer, if there is only one, the library's metadata, and `task`, from which rewards/reasoning.py generates
the same question again to score the answer. train.jsonl and validation.jsonl have no question in common. Flags that are
not listed here are settings of the generator.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

try:
    import reasoning_gym
    from reasoning_gym.factory import DATASETS
    from reasoning_gym.utils import SYSTEM_PROMPTS
except ImportError:
    sys.exit("this program needs reasoning-gym: pip install reasoning-gym==0.1.25")

# To score these, the library would run a policy's text as Python (eval, or sympy's parse_expr)
RUN_ANSWERS = """binary_matrix countdown intermediate_integration n_queens polynomial_multiplication puzzle24
    simple_integration spiral_matrix string_insertion""".split()
# The first needs other tasks as its settings; the second generates another question each time
UNFIT = ["composite", "list_functions"]
TASKS = sorted(set(DATASETS) - set(RUN_ANSWERS) - set(UNFIT))


def require(condition: object, message: str) -> None:
    """Exits with the message, unless the condition holds."""
    if not condition:
        sys.exit(f"error: {message}")


def read_settings(name: str, words: list[str]) -> dict:
    """The settings of a generator: ["--max-terms", "2"] -> {"max_terms": 2}. Values are read as JSON, else as texts."""
    config = DATASETS[name][1]
    known = sorted({field.name for field in dataclasses.fields(config)} - {"seed", "size"})
    settings = {}
    words = [part for word in words for part in word.split("=", 1)]
    for flag, value in zip(words[::2], words[1::2] + [""]):
        setting = flag.removeprefix("--").replace("-", "_")
        require(setting in known, f"{name} has no setting {flag}; it has {', '.join(known) or 'none'}")
        try:
            settings[setting] = json.loads(value)
        except json.JSONDecodeError:
            settings[setting] = value
    return settings


def make_rows(name: str, settings: dict, instruction: str, num_examples: int) -> list[dict]:
    """The entries of a generator as rows, without duplicates. The first `num_examples` entries become examples in each
    prompt, as earlier turns."""
    entries = list(reasoning_gym.create_dataset(name, **settings))
    start = [{"role": "system", "content": instruction}]
    for entry in entries[:num_examples]:
        require(entry["answer"] is not None, f"{name} has no answers, so there can be no --examples")
        start.append({"role": "user", "content": entry["question"]})
        start.append({"role": "assistant", "content": f"<answer>{entry['answer']}</answer>"})
    shown = {turn["content"] for turn in start}
    rows = {}
    for index, entry in enumerate(entries):
        question = entry["question"]
        if question in shown or question in rows:
            continue
        rows[question] = {
            "prompt": [*start, {"role": "user", "content": question}],
            "answer": entry["answer"],
            "metadata": json.dumps(entry["metadata"], default=str),
            "task": json.dumps({"name": name, "settings": settings, "index": index}),
        }
    return list(rows.values())


def write_rows(file: Path, rows: list[dict]) -> None:
    """Writes a jsonl file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")


def main() -> None:
    """Reads the command line and writes the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", help="name of the task; without it, all names are printed")
    parser.add_argument("folder", nargs="?", type=Path, help="for train.jsonl and validation.jsonl")
    parser.add_argument("--size", type=int, default=2000, help="questions to train on")
    parser.add_argument("--held-out", type=int, default=100, help="questions to evaluate on")
    parser.add_argument("--seed", type=int, default=1, help="seed of the generator")
    kinds = ", ".join(SYSTEM_PROMPTS)
    parser.add_argument("--instruction", default="simple", help=f"one of the library's ({kinds}), or any text")
    parser.add_argument("--examples", type=int, default=0, help="number of questions with answers in each prompt")
    args, words = parser.parse_known_args()
    if args.name is None:
        print("\n".join(TASKS))
        return
    require(args.name not in RUN_ANSWERS, f"{args.name}: its scoring would run the policy's text as Python")
    require(args.name in TASKS, f"there is no task {args.name}; `python recipes/tasks.py` prints all names")
    require(args.folder, "name a folder for the rows after the task")

    settings = read_settings(args.name, words)
    settings |= {"seed": args.seed, "size": args.examples + args.size + args.held_out}
    instruction = SYSTEM_PROMPTS.get(args.instruction, args.instruction)
    rows = make_rows(args.name, settings, instruction, args.examples)
    held_out = min(args.held_out, len(rows) // 5)  # some tasks have few questions
    train, validation = rows[held_out:][: args.size], rows[:held_out]
    write_rows(args.folder / "train.jsonl", train)
    write_rows(args.folder / "validation.jsonl", validation)
    print(f"{len(train)} questions to train on, {len(validation)} others to evaluate on; the first:")
    print(f"{train[0]['prompt'][-1]['content']}\n-> {train[0]['answer']}\n")
    reward = "rewards/reasoning.py:score"
    print(f"python grpo.py --model models/smollm2 --dataset {args.folder} --reward-fn {reward}")


if __name__ == "__main__":
    main()
