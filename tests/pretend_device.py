"""A pretend accelerator, for machines that have none: `--device pretend`, once this file is imported.

Its tensors hold memory of the host, and behave as CUDA's do where a program for a CPU goes wrong:
- an operator on tensors of both devices raises, with its name, but for numbers (0-dim CPU tensors) and CPU indices;
- `.numpy()` and generators of the CPU raise; what is drawn on the device is not what the CPU draws from the same seed;
- what makes the host wait for the device (`item`, `tolist`, `bool`, boolean masks, copies to the CPU) is counted as a
  read, by the line of the script that asked for it: `with count() as counts`;
- processes speak through gloo, if their group was made for this device; for tensors of the CPU it needs another one.
Built on PyTorch's Python backends (torch.utils.backend_registration, experimental). What they cannot do: run on a
stream of their own, so nothing is asynchronous and no race is seen; measure memory; compile. Backward passes run in a
thread of autograd's, outside of any line of a script. All processes share device 0. The kernels are the CPU's: times,
and the rounding of TF32 and of bfloat16, say nothing of a GPU's.
"""

import runpy
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils import _foreach_utils
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "pretend"
HERE = torch.device("privateuseone", 0)  # which it is called until the name is registered
CPU = torch.device("cpu")
ROOT = str(Path(__file__).resolve().parent.parent)
aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default}
FACTORIES = {aten.empty.memory_format, aten.empty_strided.default}
PRODUCTS = ["linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "conv2d", "scaled_dot_product_attention"]
own_generator = torch.Generator()
counting = []  # the counts that are open


@contextmanager
def count() -> Iterator[Counter]:
    """Counts the reads within this context, by line, such as `ppo.py:455`."""
    reads = Counter()
    counting.append(reads)
    try:
        yield reads
    finally:
        counting.pop()


def line_of_script() -> str:
    """The innermost line of a file at the root of the repository (or in lecture/) that is being run."""
    frame = sys._getframe(1)
    while frame is not None:
        folder, _, name = frame.f_code.co_filename.rpartition("/")
        if folder in (ROOT, f"{ROOT}/lecture"):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


def note_read() -> None:
    """The host waits here."""
    for reads in counting:
        reads[line_of_script()] += 1


class PretendTensor(torch.Tensor):
    """A tensor of the device, whose numbers are those of the CPU tensor `raw`."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: torch.Tensor):
        layout = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "dtype": raw.dtype}
        tensor = torch.Tensor._make_wrapper_subclass(cls, raw.shape, **layout, device=HERE)
        tensor.raw = raw
        return tensor

    def tolist(self) -> list:
        """Numbers, as of any tensor; PyTorch does not do it for subclasses."""
        note_read()
        return self.raw.tolist()

    def __format__(self, spec: str) -> str:
        return format(self.tolist(), spec)

    def numpy(self, **_):
        """Refused, as by CUDA's tensors."""
        raise TypeError(f"can't convert a tensor of the device {NAME} to numpy: copy it to the CPU first")

    __array__ = numpy

    def untyped_storage(self) -> torch.UntypedStorage:
        """The host's, which FSDP2 frees, and by which libraries know tied weights when they save."""
        return self.raw.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return execute(operator, args, dict(kwargs or {}))


def is_ours(x: object) -> bool:
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
    is_written = operator._schema.is_mutable
    if operator in INDEXING and is_ours(args[0]):
        args = (args[0], *args[2:])  # the indices may be anywhere
    tensors = tensors_in(args, kwargs)
    others = [x for i, x in enumerate(tensors) if not is_ours(x) and (x.dim() > 0 or (i == 0 and is_written))]
    if others and any(map(is_ours, tensors)):
        raise RuntimeError(f"{operator.name()}: expected all tensors to be on one device, but found {NAME} and cpu")
    if kwargs.get("generator") is not None:
        raise RuntimeError(f"{operator.name()}: expected a generator of the device {NAME}, but found one of the CPU")


def execute(operator, args: tuple, kwargs: dict) -> object:
    """Runs an operator on the CPU tensors behind those of the device."""
    schema = operator._schema
    takes = {argument.name for argument in schema.arguments}
    tensors = tensors_in(args, kwargs)
    device = kwargs.pop("device", None)
    stays = is_ours(args[0]) if operator is aten.copy_.default else any(map(is_ours, tensors))
    if device is not None:
        stays = torch.device(device).type == NAME
    if stays:
        check(operator, args, kwargs)
        if "generator" in takes:
            kwargs["generator"] = own_generator
    has_boolean_mask = operator in INDEXING and any(x.dtype == torch.bool for x in tensors_in(args[1]))
    comes_back = operator in COPIES and not stays
    if operator in READS or has_boolean_mask or comes_back:
        note_read()
    if "c10d" in operator.namespace:
        args, kwargs = pytree.tree_map(host_group, (args, kwargs))
    if "device" in takes:
        kwargs["device"] = CPU
    result = operator(*pytree.tree_map(raw, args), **pytree.tree_map(raw, kwargs))
    if isinstance(result, torch.Tensor) and result is raw(args[0]):  # in place
        return args[0]
    return pytree.tree_map(wrap, result) if stays else result


def host_group(x: object) -> object:
    """In the place of a process group of the device, one for the CPU tensors behind its tensors."""
    is_group = isinstance(x, torch.ScriptObject) and x._type().name() == "ProcessGroup"
    return host_group_of(dist.ProcessGroup.unbox(x).group_name).boxed() if is_group else x


@cache
def host_group_of(name: str) -> dist.ProcessGroup:
    group = dist.distributed_c10d._resolve_process_group(name)
    group._get_backend(HERE)  # raises if the group was not made for this device
    place = dist.PrefixStore(NAME, group.get_group_store()), group.rank(), group.size()
    ours = dist.ProcessGroup(*place)
    ours._register_backend(CPU, ours.BackendType.GLOO, dist.ProcessGroupGloo(*place))
    ours._set_group_name(f"{NAME} {name}")
    return ours


class Stream:
    """A stream, or an event of one. Nothing waits: everything is done already."""

    def __init__(self, *_, **__):
        self.wait_stream = self.wait_event = self.wait = self.synchronize = lambda *_: None
        self.record_event = self.record = lambda *_: self


class Module(_DummyBackendModule):
    """torch.pretend: what libraries ask of an accelerator's module."""

    Stream = Event = current_stream = Stream

    def __init__(self):
        self.stream = lambda _: nullcontext()
        self.set_device = self.synchronize = lambda *_: None
        self.manual_seed_all = lambda seed: own_generator.manual_seed(seed + 1)
        self.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]


def lowered(operator, *args, **kwargs):
    """A product under autocast: its tensors in float32 are cast."""
    lower = torch.get_autocast_dtype(NAME)
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
    with torch._C._ExcludeDispatchKeyGuard(autocast):
        cast = [x.to(lower) if is_ours(x) and x.dtype == torch.float32 else x for x in args]
        return operator(*cast, **kwargs)


def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """What torch.tensor([...], device=...) ends in."""
    raw(target).copy_(raw(source))
    return target


def make(operator, *args, **kwargs):
    return execute(operator, args, kwargs | {"device": HERE})


_setup_privateuseone_for_python_backend(NAME, Module())
torch.__future__.set_swap_module_params_on_conversion(True)  # a module's tied weights stay tied when it is moved
torch.accelerator.synchronize = lambda *_: None
_foreach_utils._foreach_supported_types.append(PretendTensor)
dist.Backend.default_device_backend_map[NAME] = "gloo"
library = torch.library.Library("aten", "IMPL")
for factory in FACTORIES:
    library.impl(factory.name().removeprefix("aten::"), partial(make, factory), "PrivateUse1")
everything = torch.library.Library("_", "IMPL")
everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
for product in PRODUCTS:
    library.impl(product, partial(lowered, getattr(aten, product)), "AutocastPrivateUse1")
library.impl("_copy_from", copy_from, "PrivateUse1")

if __name__ == "__main__":  # python tests/pretend_device.py ppo.py --device pretend
    sys.argv = sys.argv[1:]
    sys.path.insert(0, ROOT)
    runpy.run_path(sys.argv[0], run_name="__main__")
