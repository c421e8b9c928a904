"""A reward for the tasks of recipes/tasks.py, from the library that made them (`pip install reasoning-gym==0.1.25`).

    python recipes/tasks.py chain_sum data/sums
    python grpo.py --model models/smollm2 --bf16 --dataset data/sums --reward-fn rewards/reasoning.py:score

The library scores the last <answer> ... </answer>: 1 for a right answer, 0 for others. In some tasks an answer that is
nearly right, or has the right form, gets less than 1. The column `task` names the generator, its settings and the
number of the question. The question is generated again from these, since a file does not hold all of its data.
"""

import json
from functools import cache
from unicodedata import category, normalize

import reasoning_gym
from reasoning_gym.utils import extract_answer

LONGEST = 2000  # characters of an answer that are scored


@cache
def generator(name: str, settings: str) -> reasoning_gym.dataset.ProceduralDataset:
    """The generator of a task; the settings are JSON."""
    return reasoning_gym.create_dataset(name, **json.loads(settings))


@cache
def entry(task: str) -> tuple:
    """The generator and the entry of a value in the column `task`."""
    given = json.loads(task)
    made = generator(given["name"], json.dumps(given["settings"]))
    return made, made[given["index"]]


def score(prompts: list, completions: list, task: list[str], **_) -> list[float]:
    """The library's score of each answer."""
    rewards = []
    for prompt, completion, which in zip(prompts, completions, task, strict=True):
        text = completion if isinstance(completion, str) else "".join(part["content"] or "" for part in completion)
        made, question = entry(which)
        if question["question"] not in (prompt if isinstance(prompt, str) else prompt[-1]["content"]):
            raise ValueError(f"this is not the question of {which}: another version of reasoning-gym made it")
        answer = extract_answer(normalize("NFC", "".join(char for char in text if category(char) != "Cf")))  # as seen
        try:
            rewards.append(float(made.score_answer(answer and answer[:LONGEST], question)))
        except Exception:  # noqa: BLE001  # some tasks raise for answers that they cannot read
            rewards.append(0.0)
    return rewards


def right(**columns) -> list[float]:
    """1 for answers that score 1, and 0 for all others."""
    return [float(reward >= 1) for reward in score(**columns)]
