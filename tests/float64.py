"""Scripts in float64, where the order of sums and the width of padding change nothing beyond 1e-9."""

import sys
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from sources import ROOT, text_of


def in_float64(file: str) -> str:
    return text_of(file).replace("torch.float32", "torch.float64").replace(".float()", ".double()")


def load_in_float64(script: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType(f"{script}_in_float64")
    module.__file__ = str(ROOT / f"{script}.py")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where its dataclasses look for their types
    exec(compile(in_float64(f"{script}.py"), module.__file__, "exec"), vars(module))
    return module


@contextmanager
def float64():
    """Within this context new tensors are in float64."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
