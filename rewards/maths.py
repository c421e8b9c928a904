"""A reward for mathematical answers, which math-verify compares (`pip install math-verify==0.9.0`): 1/2 equals 0.5, and
(x+1)^2 equals x^2+2x+1.

    python recipes/data.py math data/math --chat "Put the answer into \\boxed{}."
    python grpo.py --model Qwen/Qwen2.5-0.5B-Instruct --bf16 --dataset data/math --reward-fn rewards/maths.py:score

The library reads the last \\boxed{} of a text, or else the last formula or number. So a policy can earn the reward by
chance, and without the right form. For numbers, verifiers.py:right_number is stricter, and needs no package. No text is
run as Python. An answer that takes longer than SECONDS (9^9^9, or two large formulas) counts as wrong.
"""

import re
from unicodedata import category, normalize

from math_verify import parse, verify

SECONDS = 2
LONGEST = 4000  # characters that are read, from the end of a completion


def as_seen(text: str) -> str:
    """The text as a reader sees it: without format characters (Cf), with the signs and digits of ASCII, and with spaces
    around Chinese and Japanese, without which the library finds no number."""
    text = normalize("NFC", "".join(char for char in text if category(char) != "Cf"))
    text = re.sub("[！-～\xa0]", lambda char: normalize("NFKC", char[0]), text)  # signs of full width
    text = re.sub("([\u3040-\u30ff\u3400-\u9fff]+)|。", r" \1 ", text)
    return re.sub(r"(?![0-9])\d", lambda digit: str(int(digit[0])), text)


def read(text: str) -> list:
    """The answer in a text. A text without words and dollar signs is read as one formula: 2\\sqrt{3} is not 2."""
    has_words = re.search(r"\\boxed|\$|(?<![\\A-Za-z{])[A-Za-z]{2,}\s|\d [\dA-Za-z]{2}", text)
    formula = [] if has_words else parse(f"${text}$", parsing_timeout=SECONDS)
    return formula or parse(text, parsing_timeout=SECONDS)


def right_answers(answer: object) -> list:
    """The right answers: any entry of a list, nested or not; none for None or NaN; `true` or `True` for JSON's true."""
    if isinstance(answer, list):
        return [right for part in answer for right in right_answers(part)]
    texts = [str(answer), str(answer).lower()] if isinstance(answer, bool) else [as_seen(str(answer))]
    return [] if answer is None or answer != answer else [right for text in texts for right in read(text)]


def score(completions: list, answer: list, **_) -> list[float | None]:
    """1 if the completion's answer equals the one in the column `answer`, else 0. None for a row without an answer.

    The column may hold numbers, formulas, texts that end with the answer, such as MATH's solutions, or lists of these.
    """
    rewards = []
    for completion, wanted in zip(completions, answer, strict=True):
        text = completion if isinstance(completion, str) else "".join(part["content"] or "" for part in completion)
        right = right_answers(wanted)
        given = parse(as_seen(text[-LONGEST:]), parsing_timeout=SECONDS)
        is_right = verify(right, given, timeout_seconds=SECONDS)
        rewards.append(float(is_right) if right else None)
    return rewards
