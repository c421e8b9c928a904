"""A reward for mathematical answers, which math-verify compares (`pip install math-verify==0.9.0`): 1/2 equals 0.5, and
(x+1)^2 equals x^2+2x+1.

    python recipes/data.py math data/math --chat "Put the answer into \\boxed{}."
    python grpo.py --model Qwen/Qwen2.5-0.5B-Instruct --bf16 --dataset data/math --reward-fn rewards/maths.py:score

The library reads the last \\boxed{} of a text, or else the last formula or number. So a policy can earn the reward by
chance, and without the right form. For numbers, verifiers.py:right_number is stricter, and needs no package. No text is
run as Python. An answer that takes longer than SECONDS (9^9^9, or two large formulas) counts as wrong.
"""

import re

from math_verify import parse, verify

SECONDS = 2
LONGEST = 4000  # characters that are read, from the end of a completion


def read(text: str) -> list:
    """The answer in a text. A text without words and dollar signs is read as one formula: 2\\sqrt{3} is not 2."""
    has_words = re.search(r"\\boxed|\$|(?<![\\A-Za-z{])[A-Za-z]{2,}\s|\d [\dA-Za-z]{2}", text)
    formula = [] if has_words else parse(f"${text}$", parsing_timeout=SECONDS)
    return formula or parse(text, parsing_timeout=SECONDS)


def score(completions: list, answer: list, **_) -> list[float | None]:
    """1 if the completion's answer equals the one in the column `answer`, else 0. None for a row without an answer.

    The column may hold numbers, formulas, or texts that end with the answer, such as MATH's solutions.
    """
    rewards = []
    for completion, wanted in zip(completions, answer, strict=True):
        text = completion if isinstance(completion, str) else "".join(part["content"] or "" for part in completion)
        right = read(str(wanted)) if wanted is not None else []
        given = parse(text[-LONGEST:], parsing_timeout=SECONDS)
        is_right = verify(right, given, timeout_seconds=SECONDS)
        rewards.append(float(is_right) if right else None)
    return rewards
