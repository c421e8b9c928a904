"""The numbers of tests/golden, which other libraries return for small inputs, and comparisons with them."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn

import ppo

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


def golden(name: str) -> tuple[dict, dict]:
    """Inputs and outputs of one file, in float64."""
    text = (FOLDER / f"{name}.json").read_text()
    data = json.loads(text, object_hook=lambda d: {key: to_tensor(x) for key, x in d.items()})
    return data["inputs"], data["outputs"]


def names(pattern: str) -> list[str]:
    """The files of a pattern; a pattern without files is an error, not an empty test."""
    found = sorted(path.stem for path in FOLDER.glob(f"{pattern}.json"))
    assert found, pattern
    return found


def close(ours, theirs, mask: Tensor | None = None, rtol: float = 1e-6, atol: float = 1e-9) -> None:
    """Equal where the mask is true. The libraries' own float32 factors allow for no more than six digits."""
    ours = torch.as_tensor(ours, dtype=torch.float64)
    theirs = torch.as_tensor(theirs, dtype=torch.float64)
    if mask is not None:
        ours = ours[mask]
        theirs = theirs[mask]
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def spoil(x: Tensor) -> Tensor:
    """NaN where MASK is false."""
    return x.masked_fill(~MASK, float("nan"))


def leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()


def row_mean(x: Tensor, mask: Tensor) -> Tensor:
    """OpenRLHF's mean: over the tokens of each row, then over rows. Ours is over all tokens of the batch."""
    return torch.stack([row[real].mean() for row, real in zip(x, mask)]).mean()


def token_entropy(logits: Tensor) -> Tensor:
    tokens = torch.zeros(logits.shape[:-1], dtype=torch.long)
    return ppo.token_logprobs_and_entropy(logits, tokens)[1]


def make_rollout(mask: Tensor, logprobs: Tensor, **others) -> ppo.Rollout:
    """A rollout of which only what is given means anything."""
    zeros = torch.zeros_like(logprobs)
    rollout = ppo.Rollout(
        prompts=None,
        prompt_mask=None,
        responses=None,
        mask=mask,
        ended=mask.any(1),
        old_logprobs=logprobs,
        examples=[{}] * len(mask),
        ref_logprobs=zeros,
        kl=zeros,
        values=zeros,
        advantages=zeros,
        returns=zeros,
    )
    for name, x in others.items():
        setattr(rollout, name, x)
    return rollout


class Table(nn.Module):
    """A model whose output for a row is looked up: the prompt holds the row's number."""

    def __init__(self, outputs: Tensor):
        super().__init__()
        self.outputs = nn.Parameter(outputs.clone())

    def forward(self, input_ids, logits_to_keep=slice(None), **_):
        outputs = self.outputs[input_ids[:, 0], : input_ids.shape[1]]
        return SimpleNamespace(logits=outputs[:, logits_to_keep], last_hidden_state=outputs[..., None])
