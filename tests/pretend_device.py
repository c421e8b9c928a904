"""A pretend accelerator, for machines that have none: `--device pretend`, once this file is imported.

Its tensors hold memory of the host, and behave as CUDA's do where a program for a CPU goes wrong:
- an operator on tensors of both devices raises, with the operator's name; numbers (0-dim CPU tensors) and CPU indices
  are allowed;
- `.numpy()` and generators of the CPU raise;
- what makes the host wait for the device (`item`, `tolist`, `bool`, boolean masks, copies to the CPU) is counted as a
  read, every operator as a launch, by the line of the script that asked for it: `with count() as counts`.
Built on PyTorch's Python backends (torch.utils.backend_registration, experimental). What they cannot do: run on a
stream of their own, so nothing is asynchronous; measure memory; compile; give the address of a tensor. Times say
nothing, and there is one process: what several do is tested on CPUs (test_processes.py).
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "pretend"
ROOT = str(Path(__file__).resolve().parent.parent)
aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default}
counting = []  # the counts that are open


class Counts:
    """Launches and reads by line, such as `ppo.py:455`."""

    def __init__(self):
        self.launches = Counter()
        self.reads = Counter()


@contextmanager
def count() -> Iterator[Counts]:
    """Counts what is done on the device within this context."""
    counts = Counts()
    counting.append(counts)
    try:
        yield counts
    finally:
        counting.remove(counts)


def line_of_script() -> str:
    """The innermost line of a file at the root of the repository (or in lecture/) that is being run."""
    frame = sys._getframe(1)
    while frame is not None:
        folder, _, name = frame.f_code.co_filename.rpartition("/")
        if folder in (ROOT, f"{ROOT}/lecture"):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


def note(is_read: bool) -> None:
    """Counts an operator, and a read if it is one."""
    if counting:
        line = line_of_script()
        for counts in counting:
            counts.launches[line] += 1
            counts.reads[line] += is_read


class PretendTensor(torch.Tensor):
    """A tensor of the device, whose numbers are those of the CPU tensor `raw`."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: torch.Tensor):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, 0),
        )
        tensor.raw = raw
        return tensor

    def __repr__(self) -> str:
        return f"{NAME}({self.raw!r})"

    def tolist(self) -> list:
        """Numbers, as of any tensor; PyTorch does not do it for subclasses."""
        note(is_read=True)
        return self.raw.tolist()

    def numpy(self, **_):
        """Refused, as by CUDA's tensors."""
        raise TypeError(f"can't convert a tensor of the device {NAME} to numpy: copy it to the CPU first")

    __array__ = numpy

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return execute(operator, args, dict(kwargs or {}))


def is_ours(x: object) -> bool:
    """Whether something is a tensor of the device."""
    return isinstance(x, PretendTensor)


def raw(x: object) -> object:
    """The CPU tensor of a tensor of the device; anything else as it is."""
    return x.raw if is_ours(x) else x


def wrap(x: object) -> object:
    """A CPU tensor as one of the device; anything else as it is."""
    return PretendTensor(x) if isinstance(x, torch.Tensor) and not is_ours(x) else x


def tensors_in(*values: object) -> list[torch.Tensor]:
    """All tensors in nested lists and dicts."""
    return [x for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor)]


def check(operator, args: tuple, kwargs: dict) -> None:
    """Refuses what CUDA refuses: tensors of two devices, and random numbers of the CPU's generator."""
    if operator in COPIES:
        return
    if operator in INDEXING:
        args = (args[0], *args[2:])  # the indices may be anywhere
    tensors = tensors_in(args, kwargs)
    others = [x for x in tensors if not is_ours(x) and x.dim() > 0]
    if others and any(map(is_ours, tensors)):
        raise RuntimeError(f"{operator.name()}: expected all tensors to be on one device, but found {NAME} and cpu")
    if kwargs.get("generator") is not None:
        raise RuntimeError(f"{operator.name()}: expected a generator of the device {NAME}, but found one of the CPU")


def execute(operator, args: tuple, kwargs: dict) -> object:
    """Runs an operator on the CPU tensors behind those of the device."""
    tensors = tensors_in(args, kwargs)
    device = kwargs.pop("device", None)
    stays = is_ours(args[0]) if operator is aten.copy_.default else any(map(is_ours, tensors))
    if device is not None:
        stays = torch.device(device).type == NAME
    if stays:
        check(operator, args, kwargs)
    has_boolean_mask = operator in INDEXING and any(x.dtype == torch.bool for x in tensors_in(args[1]))
    comes_back = operator in COPIES and not stays
    note(is_read=operator in READS or has_boolean_mask or comes_back)
    if "device" in [argument.name for argument in operator._schema.arguments]:
        kwargs["device"] = torch.device("cpu")
    result = operator(*pytree.tree_map(raw, args), **pytree.tree_map(raw, kwargs))
    if isinstance(result, torch.Tensor) and result is raw(args[0]):  # in place
        return args[0]
    return pytree.tree_map(wrap, result) if stays else result


class Module(_DummyBackendModule):
    """torch.pretend: what libraries ask of an accelerator's module. There is one stream, and it does all at once."""

    class Stream:
        """Nothing waits."""

        def synchronize(self) -> None:
            """Everything is done already."""

    the_stream = Stream()

    def current_stream(self, *_) -> Stream:
        """The only one."""
        return self.the_stream

    def stream(self, _) -> nullcontext:
        """A context in which work goes to that stream."""
        return nullcontext()

    def synchronize(self, *_) -> None:
        """Everything is done already."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Types for autocast."""
        return [torch.bfloat16, torch.float16]


def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """What torch.tensor([...], device=...) ends in."""
    raw(target).copy_(raw(source))
    return target


def made_here(operator):
    """The factory `operator` for this device."""

    def make(*args, **kwargs):
        return execute(operator, args, kwargs | {"device": torch.device(NAME)})

    return make


_setup_privateuseone_for_python_backend(NAME, Module())
torch.__future__.set_swap_module_params_on_conversion(True)  # a module's tied weights stay tied when it is moved
torch.accelerator.synchronize = lambda *_: None
library = torch.library.Library("aten", "IMPL")
for factory in (aten.empty.memory_format, aten.empty_strided.default):
    library.impl(factory.name().removeprefix("aten::"), made_here(factory), "PrivateUse1")
library.impl("_copy_from", copy_from, "PrivateUse1")
