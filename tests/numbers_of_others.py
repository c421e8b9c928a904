"""The numbers of tests/golden, which other libraries return for small inputs, and comparisons with them."""

import json
from pathlib import Path

import numpy as np
import torch


FOLDER = Path(__file__).parent / "golden"
MASK = torch.arange(7) < torch.tensor([7, 1, 4, 6, 2])[:, None]  # (5, 7)
FLOAT32 = {"rtol": 1e-5, "atol": 1e-6}  # for functions that go through float32 logits, whatever they are given


def to_tensor(x):
    """Lists of numbers as a tensor; anything else as it is."""
    if not isinstance(x, list):
        return x
    try:
        array = np.array(x)
    except ValueError:  # rows of different lengths
        return x
    return torch.from_numpy(array) if array.dtype.kind in "fib" else x


def golden(name):
    """Inputs and outputs of one file, in float64."""
    text = (FOLDER / f"{name}.json").read_text()
    data = json.loads(text, object_hook=lambda d: {key: to_tensor(x) for key, x in d.items()})
    return data["inputs"], data["outputs"]


def close(ours, theirs, mask=None, rtol=1e-6, atol=1e-9):
    """Equal where the mask is true. The libraries' own float32 factors allow for no more than six digits."""
    ours = torch.as_tensor(ours, dtype=torch.float64)
    theirs = torch.as_tensor(theirs, dtype=torch.float64)
    if mask is not None:
        ours = ours[mask]
        theirs = theirs[mask]
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def spoil(x):
    """NaN where MASK is false."""
    return x.masked_fill(~MASK, float("nan"))


def leaf(x):
    return x.clone().requires_grad_()
