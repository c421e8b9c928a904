"""A pretend accelerator, for machines that have none. Its tensors hold the host's memory, and behave as CUDA's do where
a program for a CPU goes wrong:
- an operator on tensors of both devices raises, but for numbers (0-dim CPU tensors) and CPU indices;
- `.numpy()` and generators of the CPU raise; what is drawn on the device is not what the CPU draws from the same seed;
- its backend for several processes, as NCCL, has no collectives of CPU tensors: they need a backend of the CPU as well.
Built on PyTorch's Python backends (torch.utils.backend_registration, experimental). Nothing is asynchronous, and the
kernels are the CPU's: times and rounding say nothing of a GPU's.

test_device.py calls `train` and `set_up` in processes of their own, as PyTorch never forgets such a device.
"""

from contextlib import nullcontext
from functools import cache, partial

import torch
import torch.distributed as dist
from runs import run
from torch.distributed import _functional_collectives
from torch.distributed.distributed_c10d import ProcessGroupGloo, _register_process_group, _resolve_process_group
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.utils import _foreach_utils
from torch.utils import _pytree as pytree
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "pretend"
HERE = torch.device("privateuseone", 0)  # which it is called until the name is registered
GLOO = dist.ProcessGroup.BackendType.GLOO
aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
own_generator = torch.Generator()
library = torch.library.Library("aten", "IMPL")
everything = torch.library.Library("_", "IMPL")


class PretendTensor(torch.Tensor):
    """A tensor of the device, whose numbers are those of the CPU tensor `raw`."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw):
        layout = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "dtype": raw.dtype}
        tensor = torch.Tensor._make_wrapper_subclass(cls, raw.shape, **layout, device=HERE)
        tensor.raw = raw
        return tensor

    def tolist(self):
        return self.raw.tolist()

    def __format__(self, spec):
        return format(self.tolist(), spec)

    def numpy(self, **_):
        raise TypeError(f"can't convert a tensor of the device {NAME} to numpy: copy it to the CPU first")

    __array__ = numpy

    def __reduce_ex__(self, protocol):  # files have tensors of the CPU
        return self.raw.__reduce_ex__(protocol)

    def untyped_storage(self):  # by which libraries know tied weights when they save
        return self.raw.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return execute(operator, args, dict(kwargs or {}))


def is_ours(x):
    return isinstance(x, PretendTensor)


def raw(x):
    return x.raw if is_ours(x) else x


def wrap(x):
    return PretendTensor(x) if isinstance(x, torch.Tensor) and not is_ours(x) else x


def tensors_in(*values):
    return [x for x in pytree.tree_leaves(values) if isinstance(x, torch.Tensor)]


def check(operator, args, kwargs):
    """Refuses what CUDA refuses: tensors of two devices, and random numbers of the CPU's generator."""
    is_written = operator._schema.is_mutable
    if operator in INDEXING and is_ours(args[0]):
        args = (args[0], *args[2:])  # the indices may be anywhere
    tensors = tensors_in(args, kwargs)
    others = [x for i, x in enumerate(tensors) if not is_ours(x) and (x.dim() > 0 or (i == 0 and is_written))]
    if others and any(map(is_ours, tensors)) and operator not in COPIES:
        raise RuntimeError(f"{operator.name()}: expected all tensors to be on one device, but found {NAME} and cpu")
    if kwargs.get("generator") is not None:
        raise RuntimeError(f"{operator.name()}: expected a generator of the device {NAME}, but found one of the CPU")


@cache
def group_of_device(name):
    """A group whose CPU tensors go through the backend that the group of this name has for the device."""
    group = _resolve_process_group(name)
    backend = group._get_backend(torch.device(NAME))  # raises if it has none for the device
    inner = dist.ProcessGroup(group.get_group_store(), group.rank(), group.size())
    inner._set_default_backend(GLOO)
    inner._register_backend(torch.device("cpu"), GLOO, backend)
    _register_process_group(f"{name} on {NAME}", inner)
    return inner


def on_device(argument, value):
    """An argument of a collective. In place of its group, the one of the device is given, or its name."""
    if argument.name == "process_group":
        return group_of_device(dist.ProcessGroup.unbox(value).group_name).boxed()
    if argument.name == "group_name":
        group_of_device(value)
        return f"{value} on {NAME}"
    return value


def execute(operator, args, kwargs):
    """Runs an operator on the CPU tensors behind those of the device."""
    takes = {argument.name for argument in operator._schema.arguments}
    device = kwargs.pop("device", None)
    stays = is_ours(args[0]) if operator is aten.copy_.default else any(map(is_ours, tensors_in(args, kwargs)))
    if device is not None:
        stays = torch.device(device).type == NAME
    if stays:
        check(operator, args, kwargs)
        if "generator" in takes:
            kwargs["generator"] = own_generator
        if operator.namespace in ("c10d", "_c10d_functional"):
            args = [on_device(argument, x) for argument, x in zip(operator._schema.arguments, args)]
    if "device" in takes:
        kwargs["device"] = torch.device("cpu")
    result = operator(*pytree.tree_map(raw, args), **pytree.tree_map(raw, kwargs))
    if isinstance(result, torch.Tensor) and result is raw(args[0]):  # in place
        return args[0]
    return pytree.tree_map(wrap, result) if stays else result


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
        self.get_amp_supported_dtype = lambda: [torch.bfloat16]


def copy_from(source, target, non_blocking=False):
    """What torch.tensor([...], device=...) ends in."""
    raw(target).copy_(raw(source))
    return target


def make(operator, *args, **kwargs):
    return execute(operator, args, kwargs | {"device": HERE})


def move(params, buffers, device):
    """How `fully_shard` moves tensors here: `x.data = x.to(device)` cannot change a tensor's class."""
    for x in [*params, *buffers]:
        if x.device.type == device.type:
            continue
        there = x.detach().to(device)
        if isinstance(x, torch.nn.Parameter):
            there = torch.nn.Parameter(there, x.requires_grad)
        torch.utils.swap_tensors(x, there)


def set_up():
    """Makes the device known to this process, which never forgets it."""
    _setup_privateuseone_for_python_backend(NAME, Module())
    torch.__future__.set_swap_module_params_on_conversion(True)  # a module's tied weights stay tied when it is moved
    torch.accelerator.synchronize = lambda *_: None
    _foreach_utils._foreach_supported_types.append(PretendTensor)
    _fsdp_init._move_states_to_device = move
    # DTensor's collectives: to wait for a result later would need one more class of tensors around it
    _functional_collectives._maybe_wrap_tensor = _functional_collectives.wait_tensor
    ranges = aten.arange.default, aten.arange.start, aten.arange.start_step
    for factory in (aten.empty.memory_format, aten.empty_strided.default, *ranges):
        library.impl(factory.name().removeprefix("aten::"), partial(make, factory), "PrivateUse1")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    library.impl("_copy_from", copy_from, "PrivateUse1")
    dist.Backend.register_backend(NAME, ProcessGroupGloo, devices=[NAME])


def train(jobs):
    """Runs of scripts, each with its settings and folder."""
    set_up()
    for script, settings, output in jobs:
        run(script, output, device=NAME, **settings)
