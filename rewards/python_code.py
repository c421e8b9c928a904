"""Reward functions for programs: does the program parse, and does it define the function? No program is run.

    python grpo.py --dataset problems.jsonl --reward-fn rewards/python_code.py:parses rewards/python_code.py:defines

A program that parses can still be wrong. To check it, run it on tests, in a sandbox (a container without a network,
with limits of time and memory). Such a function has the same signature.
"""

import ast
import re
import warnings
from unicodedata import normalize

LONGEST = 10_000  # characters of a program that are read


def program(completion: str | list[dict]) -> str:
    """The content of the last block of ```python; "" if there is none, or if it is not closed."""
    if not isinstance(completion, str):
        completion = "".join(message["content"] or "" for message in completion)
    blocks = re.findall(r"^```(?:python|py)[ \t]*\n(.*?)^```", completion, re.DOTALL | re.MULTILINE)
    return blocks[-1] if blocks else ""


def syntax_tree(text: str) -> ast.Module | None:
    """The syntax tree of a program; None if Python cannot parse the text, or if it is too long or too deep."""
    if len(text) > LONGEST:
        return None
    try:
        with warnings.catch_warnings(action="ignore"):  # about escapes such as "\d"
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # ValueError: a NUL, or half of a surrogate pair
        return None


def parses(completions: list, **_) -> list[float]:
    """1 if the last block of ```python is a program and not empty, else 0."""
    trees = [syntax_tree(program(completion)) for completion in completions]
    return [float(tree is not None and bool(tree.body)) for tree in trees]


def defines(completions: list, entry_point: list, **_) -> list[float | None]:
    """1 if the program defines the function that the column `entry_point` names, else 0. None without a name."""
    rewards = []
    for completion, name in zip(completions, entry_point, strict=True):
        tree = syntax_tree(program(completion))
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)] if tree else []
        rewards.append(float(normalize("NFKC", name) in functions) if name else None)  # as Python reads names
    return rewards
