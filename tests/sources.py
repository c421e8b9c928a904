"""The texts of the repository's files, and Python's reading of them: once for all tests of a process."""

import ast
import importlib.util
import os
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
ALL = "ppo.py rloo.py grpo.py agent.py dpo.py sft.py reward_model.py ddpo.py"
SCRIPTS = os.environ.get("SCRIPTS", ALL).split()  # SCRIPTS=ppo.py: what all scripts share is tested with ppo.py alone
SCRIPTS = [script for script in SCRIPTS if (ROOT / script).exists()]


@cache
def text_of(file) -> str:
    """The text of a file, named from the root of the repository."""
    return (ROOT / file).read_text("utf-8")


@cache
def lines_of(file) -> list[str]:
    return text_of(file).splitlines()


@cache
def tree_of(file) -> ast.Module:
    return ast.parse(text_of(file))


@cache
def nodes_of(file) -> list[ast.AST]:
    return list(ast.walk(tree_of(file)))


@cache
def defined_in(file) -> dict[str, ast.FunctionDef | ast.ClassDef]:
    """Functions and classes at the top of a file, by name."""
    return {node.name: node for node in tree_of(file).body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def source_of(file, node) -> str:
    """The lines of a function or class, decorators included; ast.get_source_segment parts the whole text each time."""
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return "\n".join(lines_of(file)[first - 1 : node.end_lineno])


def load(file, name: str = "loaded") -> ModuleType:
    """A file, executed as a module of this name."""
    spec = importlib.util.spec_from_file_location(name, ROOT / file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # where its dataclasses look for their types
    spec.loader.exec_module(module)
    return module
