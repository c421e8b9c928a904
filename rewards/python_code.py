"""Reward functions for programs: do they parse, and do they define what was asked for? Nothing is run.

    python grpo.py --dataset problems.jsonl --reward-fn rewards/python_code.py:parses rewards/python_code.py:defines

A program that parses may still be wrong. To find out, it must be run on tests, in a sandbox that it cannot leave (a
container without a network, with limits of time and memory); such a function has the same signature.
"""

import ast
import re
import warnings

LONGEST = 10_000  # characters of a program that are read


def program(completion: str | list[dict]) -> str:
    """What stands in the last block of ```python; "" if there is none, or it is never closed."""
    if not isinstance(completion, str):
        completion = "".join(message["content"] or "" for message in completion)
    blocks = re.findall(r"^```(?:python|py)[ \t]*\n(.*?)^```", completion, re.DOTALL | re.MULTILINE)
    return blocks[-1] if blocks else ""


def syntax_tree(text: str) -> ast.Module | None:
    """The program as Python's parser reads it; None for all else, and for what is too long or too deep for it."""
    if len(text) > LONGEST:
        return None
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes such as "\d", once for every completion
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # ValueError: a NUL, or half of a surrogate pair
        return None


def parses(completions: list, **_) -> list[float]:
    """1 if the last block of ```python is a program that is not empty, else 0."""
    trees = [syntax_tree(program(completion)) for completion in completions]
    return [float(tree is not None and bool(tree.body)) for tree in trees]


def defines(completions: list, entry_point: list, **_) -> list[float | None]:
    """1 if that program defines a function of the name in the column `entry_point`, else 0. None without a name."""
    rewards = []
    for completion, name in zip(completions, entry_point, strict=True):
        tree = syntax_tree(program(completion))
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)] if tree else []
        rewards.append(float(name in functions) if name else None)
    return rewards
