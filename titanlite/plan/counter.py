"""Counts what operators do while a step runs: bytes alive, FLOPs, bytes moved, bytes of collectives.

Invariant: it sees storages and not tensors, so that views and writes in place allocate nothing. It works on real
tensors as on fake ones, on any device, and changes neither. All else follows from shapes, dtypes and schemas.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

# In the order in which they are printed. "loss" is what the fused loss allocates: logits and the gradients that it
# computes along. "other" is all else: batches, norms, temporaries of the optimizer.
KINDS = ("weights", "gradients", "optimizer state", "gathered weights", "activations", "loss", "other")
HOST = "in host memory"  # what CPU offload keeps there is no part of the device's memory
COUNTED = (*KINDS, HOST)
UNKNOWN = ("activations", "loss", "other")
"""Kinds by the time of the allocation, which whoever knows better may replace."""

_PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)  # what other subclasses hold is counted where they use it
_DEVICE = torch.ops.prim.device.default

_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send")
# What FSDP2's own operators read and write: (kind of memory, number of the argument or its name) each.
_MARKS: Mapping[str, Sequence[tuple[str, int | str]]] = {
    "fsdp::all_gather_copy_in": (("gathered weights", 0), ("gathered weights", 1)),
    "fsdp::split_with_sizes_copy": (("gathered weights", "out"),),
    "fsdp::chunk_cat": (("gradients", 0), ("gradients", "out")),
    "c10d::_reduce_scatter_base_": (("gradients", 0), ("gradients", 1)),
}
_MATMULS = {"mm", "_scaled_mm", "bmm", "addmm", "addmm_", "baddbmm"}
# They read as many elements of their first argument as they return, and not all of them.
_LOOK_UPS = {"aten::embedding", "aten::gather", "aten::index", "aten::index_select"}
_WRITE_ONLY = {"aten::copy_", "aten::fill_", "aten::zero_", "aten::_foreach_copy_", "aten::_foreach_zero_"}
_NO_KERNEL = ("aten::_unsafe_view", "aten::detach", "aten::set_", "aten::empty", "aten::new_empty", "c10d::recv_")
_NO_KERNEL += ("c10d::barrier", "_c10d_functional::wait_tensor")


@dataclass(frozen=True)
class Place:
    """A part of the step. All that happens in the same place of two models that differ in blocks only is alike.

    Attributes:
        phase: "forward", "backward" or "optimizer".
        name: "block", "embedding", "loss", "gradient norm", ...
        stage: Number of the pipeline stage.
        block: Number of the block within its stage; -1 outside of the blocks.
        microbatch: Number of the microbatch.
    """

    phase: str
    name: str
    stage: int = 0
    block: int = -1
    microbatch: int = 0


class Kernel(NamedTuple):
    """What one call of an operator does.

    Attributes:
        op: "aten.mm", or the name of a collective: "all_gather".
        dtype: Of the first floating-point input: "bfloat16".
        shape: (m, k, n) of a matmul; (batch, heads, queries, keys, head_dim) of attention; () of others.
        group: Name of the process group of a collective; empty for others.
        flops: Attention is counted with its causal half.
        bytes: Read and written; of a collective the bytes of the whole tensor, gathered or to be reduced.
    """

    op: str
    dtype: str
    shape: tuple[int, ...]
    group: str
    flops: int
    bytes: int


class Counter(TorchDispatchMode):
    """Within `watching`, every operator is counted in the current place.

    Attributes:
        places: The places in the order in which the step came to them; the last is the current one.
        events: (number of the storage, its change in bytes, number of the place) in the order in which they happen. The
            number of the place is -1 for what was alive before the step.
        kinds: The kind of each storage, as a number in COUNTED.
        kernels: (number of the place, kernel) -> how often.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places = [Place("forward", "start")]
        self.events: list[tuple[int, int, int]] = []
        self.kinds: list[int] = []
        self.kernels: Tally[tuple[int, Kernel]] = Tally()
        self._asked_for_shapes = False
        self._known: dict[int, tuple[int, Any]] = {}  # address of a storage -> its number, and a reference to it
        self._sizes: list[int] = []
        self._microbatches: Tally[int] = Tally()

    def begin(self) -> None:
        """A new step begins. What is alive stays; what was counted of earlier steps is forgotten."""
        self.places = [Place("forward", "start")]
        self.events = [(number, self._sizes[number], -1) for number, _ in self._known.values()]
        self.kernels.clear()
        self._microbatches.clear()

    def next_microbatch(self, stage: int) -> int:
        """The number of the forward pass of `stage` that begins."""
        self._microbatches[stage] += 1
        return self._microbatches[stage] - 1

    def go_to(self, place: Place) -> None:
        """What follows happens in `place`."""
        if place != self.places[-1]:
            self.places.append(place)

    def mark(self, tensors: Iterable[Tensor | None], kind: str, over: Iterable[str] = COUNTED) -> None:
        """Say what kind of memory these tensors are, if they are of a kind of `over` so far."""
        replaced = [COUNTED.index(name) for name in over]
        for tensor in tensors:
            for plain in _parts(tensor):
                number = self._storage(plain)
                if self.kinds[number] in replaced:
                    self.kinds[number] = COUNTED.index(kind)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count, and see what FSDP2 frees by resizing a storage to nothing.

        Not counted is how DTensor finds the shape of a result: it runs the operator on whole tensors without memory,
        in torch 2.11 at each call if the tensors are fake.
        """
        resize, propagate = torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if (known := self._known.get(storage._cdata)) is not None:
                self._resized(known[0], storage.nbytes())
            return result

        def propagated(propagator: ShardingPropagator, schema: Any) -> Any:
            self._asked_for_shapes = True
            try:
                return propagate(propagator, schema)
            finally:
                self._asked_for_shapes = False

        shapes = patch.object(ShardingPropagator, propagate.__name__, propagated)
        with patch.object(torch.UntypedStorage, "resize_", resized), shapes, self:
            yield
        self._known.clear()  # otherwise weights, which outlive the step, would keep this counter alive

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # more than half of all calls: do not pass it on
            return args[0].fake_device
        kwargs = kwargs or {}
        if _signature(func).is_view:
            # Within a tensor subclass `to`, `contiguous` and `reshape` come here as they are: chains of other
            # operators that return their argument, a view of it, or a copy.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if not self._asked_for_shapes and _signature(func).counts:
            self._count(func, args, kwargs, result)
        return result

    def _count(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
        for tensor in _tensors(result):
            self._storage(tensor)
        for kind, argument in _MARKS.get(_signature(func).name, ()):
            self.mark(_tensors(kwargs[argument] if isinstance(argument, str) else args[argument]), kind, UNKNOWN)
        kernel = _kernel(func, args, kwargs, result)
        if kernel is not None:
            self.kernels[len(self.places) - 1, kernel] += 1

    def _storage(self, tensor: Tensor) -> int:
        """Number of the tensor's storage. A new one is counted as allocated now."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        known = self._known.get(address)
        if known is not None:
            return known[0]
        number, place = len(self.kinds), self.places[-1]
        kind = "loss" if (place.phase, place.name) == ("forward", "loss") else "activations"
        self.kinds.append(COUNTED.index("other" if place.phase == "optimizer" or place.name == "start" else kind))
        self._sizes.append(0)
        self._resized(number, storage.nbytes())
        self._known[address] = number, weakref.ref(storage, lambda _: self._freed(address))
        return number

    def _freed(self, address: int) -> None:
        number, _ = self._known.pop(address)
        self._resized(number, 0)

    def _resized(self, number: int, size: int) -> None:
        if size != self._sizes[number]:
            self.events.append((number, size - self._sizes[number], len(self.places) - 1))
            self._sizes[number] = size


class _Signature(NamedTuple):
    """What the schema of an operator tells.

    Attributes:
        counts: It is neither a view nor a mark in a profile.
        returns_new: What it returns is no argument.
        arguments: (name, how often it goes through memory: read, written, or both) each.
    """

    name: str
    is_view: bool
    counts: bool
    returns_new: bool
    arguments: tuple[tuple[str, int], ...]


@cache
def _signature(func: Any) -> _Signature:
    schema, name = func._schema, func.name().split(".")[0]
    arguments = []
    for argument in schema.arguments:
        is_write = argument.alias_info is not None and argument.alias_info.is_write
        is_read = not (is_write and (argument.kwarg_only or name in _WRITE_ONLY))
        arguments.append((argument.name, is_read + is_write))
    returns_new = any(returned.alias_info is None for returned in schema.returns)
    counts = not func.is_view and not name.startswith(("prim::", "profiler::"))
    return _Signature(name, func.is_view, counts, returns_new, tuple(arguments))


def _kernel(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Kernel | None:
    """What a call did; None if it neither computes nor moves anything."""
    name, _, _, returns_new, arguments = _signature(func)
    if op := _collective(name):
        return Kernel(op, "", (), _group(args), 0, max(map(_bytes, (*args, result))))
    if name.startswith(_NO_KERNEL):
        return None
    moved = _bytes(result) if returns_new else 0
    for i, (argument, times) in enumerate(arguments):
        moved += times * _bytes(kwargs.get(argument, args[i] if i < len(args) else None))
    if name in _LOOK_UPS:
        moved = 2 * _bytes(result)
    inputs = _tensors(args)
    dtype = next((t.dtype for t in inputs if t.is_floating_point()), inputs[0].dtype if inputs else torch.float32)
    shape, flops = _arithmetic(name.removeprefix("aten::"), inputs, args, kwargs)
    return Kernel(name.replace("::", "."), str(dtype).removeprefix("torch."), shape, "", flops, moved)


@cache
def _collective(name: str) -> str | None:
    """The collective that an operator is: "c10d::_allgather_base_" is an all_gather."""
    if not name.startswith(("c10d::", "_c10d_functional::")):
        return None
    return next((op for op in _COLLECTIVES if op.replace("_", "") in name.replace("_", "")), None)


def _arithmetic(
    name: str, inputs: Sequence[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[int, ...], int]:
    """The shape as `Kernel` has it, and the FLOPs."""
    if name in _MATMULS:
        a, b = inputs[1:3] if "add" in name else inputs[:2]
        m, k, n = math.prod(a.shape[:-1]), a.shape[-1], b.shape[-1]
        return (m, k, n), 2 * m * k * n
    if "_scaled_dot_product" in name:
        backward = "backward" in name
        query, key = inputs[1:3] if backward else inputs[:2]
        shape = (*query.shape[:3], key.shape[2], query.shape[3])
        causal = any(value is True for value in (*args, kwargs.get("is_causal")))
        # Two matmuls forward, five backward, because the scores are computed again.
        return shape, math.prod(shape) * (10 if backward else 4) // (2 if causal else 1)
    return (), 0


def _parts(tensor: Any) -> Iterator[Tensor]:
    """The plain tensors that a tensor is made of: the shard of a DTensor, the data and scale of an FP8 weight."""
    if not isinstance(tensor, Tensor):  # none, or the mesh of a DTensor
        return
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _parts(getattr(tensor, name))


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in a value, which may be lists of lists."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, list | tuple) else []


def _bytes(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(value))


def _group(args: Sequence[Any]) -> str:
    """Name of the process group among the arguments of a collective."""
    for value in args:
        if isinstance(value, torch.ScriptObject):
            group = dist.ProcessGroup.unbox(value)
            if group is not None:
                return group.group_name
    return next(value for value in reversed(args) if isinstance(value, str))
