"""Grades an exercise: compares the student's results with the right ones and, if they differ, with common mistakes.

A case has inputs, and the right results by name. A mistake is a sentence, and its results in each case. The sentence is
printed if the student's results are the same in every case.
"""

import json
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
GOLDEN = HERE.parent / "tests/golden"
STORED = HERE / "mistakes.json"  # in a student's folder, which has no mistakes.py
EXAMPLE = "the example of the docstring"


def golden(name: str) -> tuple[str, dict, dict]:
    """The source, inputs and outputs of a file with another library's numbers, as tensors in float64."""

    def convert(pairs: dict) -> dict:
        return {key: numbers(x) if isinstance(x, list) else x for key, x in pairs.items()}

    data = json.loads((GOLDEN / f"{name}.json").read_text(), object_hook=convert)
    library = data["source"].split()[0].replace("==", " ")
    return f"the numbers of {library} (tests/golden/{name}.json)", data["inputs"], data["outputs"]


def numbers(x: list) -> Tensor:
    """A tensor of numbers or booleans, in float64."""
    return torch.tensor(x, dtype=torch.float64)


def row(*x: float) -> Tensor:
    """One row of numbers (1, T)."""
    return numbers([x])


def bits(*rows: str) -> Tensor:
    """A mask (B, T) from rows such as "1100"."""
    return torch.tensor([[x == "1" for x in row] for row in rows])


def case(where: str, *inputs, **right) -> tuple[str, tuple, dict]:
    """A case: where it is from, the inputs of a function, and the right results by name."""
    return where, inputs, {name: torch.as_tensor(x) for name, x in right.items()}


def fail(message: str) -> None:
    """Fails the exercise with a message, without the grader's traceback."""
    pytest.fail(message, pytrace=False)


def must(condition: object, message: str) -> None:
    """Fails the exercise with the message, unless the condition holds."""
    if not condition:
        fail(message)


def near(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors of one shape are equal to five digits."""
    return torch.isclose(a.double(), b.double(), rtol=1e-5, atol=1e-6, equal_nan=True)


def equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, and the same values to five digits."""
    return a.shape == b.shape and bool(near(a, b).all())


def place_of(error: BaseException, *files: str) -> str:
    """The last line of these files in an error's traceback."""
    own = [x for x in traceback.extract_tb(error.__traceback__) if x.filename in files]
    return f"\nLine {own[-1].lineno}: {own[-1].line}" if own else ""


def guarded(student, name: str, outputs: tuple[str, ...]) -> Callable:
    """Wraps the student's function: errors, missing results and changed inputs fail with a message."""
    function = getattr(student, name, None)
    must(function, f"The file has no function {name}.")

    def call(*inputs):
        given, trouble = [x.clone() if isinstance(x, Tensor) else x for x in inputs], None
        try:
            results = function(*given)
        except NotImplementedError:
            trouble = "not done yet"
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # sys.exit, too
            place = place_of(error, getattr(student, "__file__", ""))
            trouble = f"It stopped with {type(error).__name__}: {error}{place}"
        if trouble:  # outside of the `except`, where pytest would print the error again
            (pytest.skip if trouble == "not done yet" else fail)(trouble)
        results = results if isinstance(results, tuple) else (results,)
        must(results != (None,), "It returns None. Is the `return` missing?")
        fits = len(results) == len(outputs) and all(isinstance(x, Tensor) for x in results)
        kinds = [type(x).__name__ for x in results]
        must(fits, f"It returns {', '.join(kinds)}; it should return {len(outputs)} x Tensor: {', '.join(outputs)}.")
        for i, (before, after) in enumerate(zip(inputs, given)):
            unchanged = not isinstance(before, Tensor) or torch.equal(before.nan_to_num(), after.nan_to_num())
            must(unchanged, f"It changes its argument number {i + 1}. Make a new tensor: others need the old one.")
        return results if len(results) > 1 else results[0]

    return call


def grade(
    student, name: str, outputs: tuple[str, ...], cases: list, read: Callable | None = None, clean: tuple[int, ...] = ()
) -> Callable:
    """Compares all cases up to the first mismatch; returns the student's function, for further tests.

    `read` computes the results by name from a function and its inputs, if they are not simply its outputs. `clean` are
    the positions of inputs that are 0 on padding, since other functions made them so.
    """
    function, read = guarded(student, name, outputs), read or partial(read_outputs, outputs)
    trouble = ""
    try:
        results = [read(function, *inputs) for _, inputs, _ in cases]
    except Exception as error:  # the student's errors are caught before; this is a result of another shape
        trouble = f"Its results cannot be used: {error}"
    must(not trouble, trouble)
    for (where, inputs, right), own in zip(cases, results):
        for output, expected in right.items():
            if expected.dtype == torch.bool:
                must(own[output].dtype == torch.bool, f"`{output}` should be boolean, but is {own[output].dtype}.")
            if not equal(own[output], expected):
                sentence = diagnose(known_mistakes(name, read, cases), output, [x[output] for x in results])
                if not sentence:
                    with_zeros = read(function, *on_padding(inputs, 0.0, clean))[output]
                    sentence = f"`{output}` is not right."
                    if equal(with_zeros, expected):
                        sentence = "Values on padding change it. With zeros on padding it would be right."
                fail(f"{sentence}\n{difference(output, own[output], expected, where)}")
    spoiled = read(function, *on_padding(cases[0][1], torch.nan, clean))
    must(
        all(equal(spoiled[output], x) for output, x in results[0].items()),
        "NaN on padding gets into the result, or into its gradient. NaN * 0 "
        "is NaN, so multiplying by the mask does not remove it; masked_fill and torch.where do.",
    )
    return function


def on_padding(inputs: tuple, value: float, clean: tuple[int, ...] = ()) -> list:
    """Inputs with a value on padding, in all that has the shape of a mask among them, but for those that are clean."""
    mask = find_mask(inputs)
    fits = [isinstance(x, Tensor) and x.is_floating_point() and x.shape == mask.shape for x in inputs]
    return [x.masked_fill(~mask, value) if fits[n] and n not in clean else x for n, x in enumerate(inputs)]


def find_mask(inputs: tuple) -> Tensor:
    """The mask among the inputs; if there is none, a mask of the first input, true everywhere."""
    masks = [x for x in inputs if isinstance(x, Tensor) and x.dtype == torch.bool]
    return masks[0] if masks else torch.ones_like(inputs[0], dtype=torch.bool)


def read_outputs(outputs: tuple[str, ...], function: Callable, *inputs) -> dict[str, Tensor]:
    """The results of a function by name. The function of a mistake may return a dict of the wrong ones alone."""
    results = function(*inputs)
    if isinstance(results, dict):
        return results
    return dict(zip(outputs, results if isinstance(results, tuple) else (results,)))


def read_loss(outputs: tuple[str, ...], function: Callable, *inputs) -> dict[str, Tensor]:
    """The results of a loss by name, set to 0 on padding; and what other libraries compute from them: the mean over
    real tokens, its gradient with respect to the first input (0 if there is none), and the share of clipped tokens."""
    first, mask = inputs[0].clone().requires_grad_(), find_mask(inputs)
    results = read_outputs(outputs, function, first, *inputs[1:])
    results = {name: x.masked_fill(~mask, 0) if x.shape == mask.shape else x for name, x in results.items()}
    mean, grad = (results["losses"] * mask).sum() / mask.sum(), torch.zeros_like(first)
    if mean.requires_grad:
        (grad,) = torch.autograd.grad(mean, first, materialize_grads=True)
    shares = {"share_clipped": x[mask].double().mean() for name, x in results.items() if name == "clipped"}
    return results | shares | {"mean_loss": mean, "gradient": grad}


def results_of_mistakes(name: str, read: Callable, cases: list) -> dict[str, list[dict[str, Tensor]]]:
    """Maps the sentence of each common mistake to its results by name, one dict for each case."""
    import mistakes

    functions = getattr(mistakes, name)()
    return {sentence: [read(wrong, *inputs) for _, inputs, _ in cases] for sentence, wrong in functions.items()}


def known_mistakes(name: str, read: Callable, cases: list) -> dict[str, list[dict[str, Tensor]]]:
    """The same, from mistakes.json if that exists."""
    if not STORED.exists():
        return results_of_mistakes(name, read, cases)
    found = {}
    for sentence, rows in json.loads(STORED.read_text("utf-8"))[name].items():
        found[sentence] = [{output: numbers(x) for output, x in row.items()} for row in rows]
    return found


def diagnose(mistakes: dict, output: str, own: list[Tensor]) -> str | None:
    """The sentence of a mistake that has the student's results of an output in all cases."""
    for sentence, rows in mistakes.items():
        if all(output in row and equal(row[output], x) for row, x in zip(rows, own, strict=True)):
            return sentence


def difference(output: str, own: Tensor, right: Tensor, where: str) -> str:
    """Describes where two tensors first differ, with that row of both."""
    if own.shape != right.shape:
        return f"Seen in {where}:\n  `{output}` has shape {tuple(own.shape)} and should have {tuple(right.shape)}."
    own, right = torch.atleast_1d(own), torch.atleast_1d(right)
    differs = ~near(own, right)
    index = differs.nonzero()[0].tolist()
    lines = [f"Seen in {where}:"] + [f"  row {index[0]}"] * (len(index) > 1)
    for who, x in (("yours", own), ("right", right)):
        values = x[tuple(index[:-1])].detach().flatten().tolist()
        lines.append(f"  {who}  {output} = " + " ".join(f"{round(v, 4) + 0.0:8.4g}" for v in values))
    marks = "".join("       ^^" if d else " " * 9 for d in differs[tuple(index[:-1])].flatten())
    return "\n".join([*lines, " " * len(f"  yours  {output} =") + marks.rstrip()])
