"""The tasks of recipes/tasks.py, judged by the library that made them (`pip install reasoning-gym==0.1.25`).

    python recipes/tasks.py chain_sum data/sums
    python grpo.py --model models/smollm2 --bf16 --dataset data/sums --reward-fn rewards/reasoning.py:score

The judge gets the last <answer> ... </answer>. It gives 1 for a right answer, and 0 for others; some judges give a part
of 1 for what is nearly right, or has the right form. The column `task` names the generator, its settings and the number
of the question, which is made again here: so the judge sees it as it was made, and not what is left of it in a file.
"""

import json
from functools import cache

import reasoning_gym
from reasoning_gym.utils import extract_answer

LONGEST = 2000  # characters of an answer that are judged


@cache
def generator(name: str, settings: str) -> reasoning_gym.dataset.ProceduralDataset:
    """Of a task with these settings, which are JSON."""
    return reasoning_gym.create_dataset(name, **json.loads(settings))


@cache
def entry(task: str) -> tuple:
    """The generator and the entry that a `task` names."""
    given = json.loads(task)
    made = generator(given["name"], json.dumps(given["settings"]))
    return made, made[given["index"]]


def score(prompts: list, completions: list, task: list[str], **_) -> list[float]:
    """What the library's judge says of each answer."""
    rewards = []
    for prompt, completion, which in zip(prompts, completions, task, strict=True):
        text = completion if isinstance(completion, str) else "".join(part["content"] or "" for part in completion)
        made, asked = entry(which)
        if asked["question"] not in (prompt if isinstance(prompt, str) else prompt[-1]["content"]):
            raise ValueError(f"this is not the question of {which}: another version of reasoning-gym made it")
        answer = extract_answer(text)
        try:
            rewards.append(float(made.score_answer(answer and answer[:LONGEST], asked)))
        except Exception:  # noqa: BLE001  # some judges stumble over what they cannot read
            rewards.append(0.0)
    return rewards


def right(**columns) -> list[float]:
    """1 for what the judge gives 1, and 0 for all that it finds nearly right."""
    return [float(reward >= 1) for reward in score(**columns)]
