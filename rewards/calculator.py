"""An environment: word problems, and a calculator that the policy can use before it answers.

    python agent.py --env rewards/calculator.py:Calculator --dataset problems.jsonl --model Qwen/Qwen3-0.6B --bf16 \\
        --response-length 1024 --max-turns 6

A row of problems.jsonl has a conversation, which explains the calculator, and the right number:

    {"prompt": [{"role": "system", "content": "<calc>2 * 9</calc> asks a calculator. End with #### and the number."},
                {"role": "user", "content": "Two boxes hold nine eggs each. How many is that?"}], "answer": 18}
"""

import re
from fractions import Fraction

from rewards.verifiers import in_plain_signs, right_number, text_of, work_out


def calculate(expression: str) -> str:
    """The value of an expression, as a text. It may have numbers, + - * / and brackets.

    >>> calculate("2 * 9"), calculate("(1,200 - 0.5) / -7 ="), calculate("9 ** 9")
    ('18', '-171.3571429', 'not arithmetic')
    """

    def as_fraction(number: re.Match) -> str:
        return "({} / {})".format(*Fraction(number[0]).as_integer_ratio())

    expression = in_plain_signs(text_of(expression)).partition("=")[0]
    expression = re.sub(r"(?<=\d),(?=\d{3})", "", expression)  # 1,200 is 1200
    result, _ = work_out(re.sub(r"\d*\.\d+", as_fraction, expression).strip(), signs=True)
    if result is None:
        return "not arithmetic"
    return str(result) if result.denominator == 1 else f"{float(result):.10g}"


class Calculator:
    """One problem. A turn with <calc>...</calc> is answered with the value; any other turn is the final answer.

    >>> problem = Calculator({"answer": 18})
    >>> problem.step("I ask: <calc>2 * 9</calc>"), problem.step("#### 18")
    (('18', None, False), ('', 1.0, True))
    """

    role = "tool"  # of its answers in a conversation; "user" for chat templates without tools

    def __init__(self, example: dict):
        """Starts a problem with the `answer` of a row of the data."""
        self.answer = example["answer"]

    def step(self, text: str) -> tuple[str, float | None, bool]:
        """Returns the answer to a turn of the policy, the turn's reward, and whether the episode is over."""
        expressions = re.findall(r"<calc>(.*?)</calc>", text, re.DOTALL)
        if expressions:
            return calculate(expressions[-1]), None, False
        return "", right_number([text], [self.answer])[0], True
