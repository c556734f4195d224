"""Counts what operators do while a step runs: bytes alive, FLOPs, bytes moved, bytes of collectives.

Invariant: it sees storages and not tensors, so that views and writes in place allocate nothing. It works on real
tensors as on fake ones, on any device, and changes neither. All else follows from shapes, dtypes and schemas.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
GENERATED = "compiled"  # `Work.op` of kernels that a compiler makes
MATMULS = {"mm", "_scaled_mm", "bmm", "addmm", "addmm_", "baddbmm"}
FLEX_OPS = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward")
"""What stands for flex attention on a GPU (`trace.as_on_gpu`)."""
_NO_KERNEL = ("aten::_unsafe_view", "aten::detach", "aten::set_", "aten::empty", "aten::new_empty", "c10d::recv_")
_NO_KERNEL += ("c10d::barrier", "_c10d_functional::wait_tensor")


class Place(NamedTuple):
    """A part of the step. What it takes grows by the same with each further block of the model.

    Attributes:
        phase: "forward", "backward" (with what is recomputed), or "optimizer" (with clipping).
        name: "block", "embedding", "loss", "gradient norm", ...
        stage: Number of the pipeline stage.
    """

    phase: str
    name: str
    stage: int = 0


class Work(NamedTuple):
    """Kernels or collectives that are alike.

    Attributes:
        phase: As `Place` has it.
        op: "aten.mm", or the name of a collective: "all_gather".
        dtype: Of the first floating-point input: "bfloat16". Empty for collectives.
        shape: (m, k, n) of a matmul; (batch, heads, queries, keys, head_dim) of attention; () of others.
        group: Of a collective: the dimension of the world ("fsdp", "tensor", ...), its number of ranks, and the
            distance from its first to its last rank, plus 1: it lies within a machine that has so many. None of others.
        count: How many.
        flops: Of all of them. Attention is counted with its causal half.
        bytes: Read and written; of collectives the bytes of the whole tensors, gathered or to be reduced.
    """

    phase: str
    op: str
    dtype: str
    shape: tuple[int, ...]
    group: tuple[str, int, int] | None
    count: int
    flops: int
    bytes: int


class Counter(TorchDispatchMode):
    """Within `watching`, every operator is counted in the current place.

    Args:
        groups: Name of a process group -> what `Work.group` says of it.

    Attributes:
        place: What happens now happens there.
        log: (place, number of a storage, its change in bytes) or (place, work, 0), in the order of the step. It begins
            with what was alive before the step.
        kinds: The kind of each storage.
        streams: The stream in which each storage was allocated: 0 is that of the computation.
        begins: Where in the log the forward passes begin.
    """

    def __init__(self, groups: Mapping[str, tuple[str, int, int]]) -> None:
        super().__init__()
        self._groups, self._asked_for_shapes = groups, False
        self._known: dict[int, tuple[int, Any]] = {}  # address of a storage -> its number, and a reference to it
        self.kinds, self.streams, self._sizes = list[str](), list[int](), list[int]()
        self._stream, self._known_streams = 0, {torch.cpu.current_stream(): 0}
        self.begin()

    def begin(self) -> None:
        """A new step begins. What is alive stays; what was counted of earlier steps is forgotten."""
        self.place = Place("forward", "start")
        self.log: list[tuple[Place, int | Work, int]] = [
            (self.place, number, self._sizes[number]) for number, _ in self._known.values()
        ]
        self.begins = list[int]()
        self._actions: dict[Any, list[tuple[Place, int | Work, int]]] = {}
        self._action: Any = None  # the one that happens now
        self._first = 0  # where it begins in the log

    def mark(self, tensors: Iterable[Any], kind: str, over: Iterable[str] = COUNTED) -> None:
        """Say what kind of memory these tensors are, if they are of a kind of `over` so far."""
        for tensor in tensors:
            for plain in _parts(tensor):
                number = self._storage(plain)
                if self.kinds[number] in over:
                    self.kinds[number] = kind

    def action(self, name: Any, place: Place, again: bool = False) -> None:
        """An action begins, and the one before ends. `again`: the last one of this name is counted once more."""
        if self._action is not None:
            self._actions[self._action] = self.log[self._first :]
        self.place, self._action, self._first = place, None if again else name, len(self.log)
        if again:
            self.log += self._actions.get(name, ())

    def generated(self, moved: int) -> None:
        """A kernel that a compiler has made reads and writes so many bytes."""
        self.log.append((self.place, Work(self.place.phase, GENERATED, "", (), None, 1, 0, moved), 0))

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

        @contextmanager
        def in_stream(stream: Any) -> Iterator[None]:
            before, self._stream = self._stream, self._known_streams.setdefault(stream, len(self._known_streams))
            yield
            self._stream = before

        shapes = patch.object(ShardingPropagator, propagate.__name__, propagated)
        streams = patch("torch.cpu.stream", in_stream)  # FSDP2 has some on a CPU, too, where they mean nothing
        with patch.object(torch.UntypedStorage, "resize_", resized), shapes, streams, self:
            yield
        self._known.clear()  # otherwise weights, which outlive the step, would keep this counter alive

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(kind not in _PLAIN for kind in types):
            return NotImplemented
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # more than half of all calls: do not pass it on
            return args[0].fake_device
        signature, kwargs = _signature(func), kwargs or {}
        if signature.is_view:
            # Within a tensor subclass `to`, `contiguous` and `reshape` come here as they are: chains of other
            # operators that return their argument, a view of it, or a copy.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        out = kwargs.get("out")  # torch 2.11 cannot find the shape of an addmm with `out_dtype` and `out`
        result = out if isinstance(out, FakeTensor) and func._schema.returns else func(*args, **kwargs)
        if not self._asked_for_shapes and signature.counts:
            for tensor in _tensors(result):
                self._storage(tensor)
            for kind, argument in _MARKS.get(signature.name, ()):
                self.mark(_tensors(kwargs[argument] if isinstance(argument, str) else args[argument]), kind, UNKNOWN)
            if not signature.name.startswith(_NO_KERNEL):
                self.log.append((self.place, self._work(signature, args, kwargs, result), 0))
        return result

    def _work(self, signature: _Signature, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Work:
        """What a call did."""
        name, phase = signature.name, self.place.phase
        if op := _collective(name):
            return Work(phase, op, "", (), self._group(args), 1, 0, max(map(bytes_of, (*args, result))))
        moved = bytes_of(result) if signature.returns_new else 0
        for i, (argument, times) in enumerate(signature.arguments):
            moved += times * bytes_of(kwargs.get(argument, args[i] if i < len(args) else None))
        inputs, shape, flops = _tensors(args), (), 0
        if name.removeprefix("aten::") in MATMULS:
            a, b = inputs[1:3] if "add" in name else inputs[:2]
            inputs = [a, b]  # the sum may be in another dtype
            shape = math.prod(a.shape[:-1]), a.shape[-1], b.shape[-1]
            flops = 2 * math.prod(shape)
        elif "_scaled_dot_product" in name:
            backward = "backward" in name
            query, key = inputs[1:3] if backward else inputs[:2]
            shape = (*query.shape[:3], key.shape[2], query.shape[3])
            # Two matmuls forward, five backward, because the scores are computed again. Each mask is causal. The last
            # query sees all keys; but of flex attention, a rank's queries are from the whole row (parallel/context.py).
            unseen = shape[3] if name.removeprefix("aten::") in FLEX_OPS else shape[2]
            flops = math.prod(shape) * (10 if backward else 4) * (2 * shape[3] - unseen) // (2 * shape[3])
        dtype = next((t.dtype for t in inputs if t.is_floating_point()), inputs[0].dtype if inputs else torch.float32)
        return Work(phase, name.replace("::", "."), str(dtype).removeprefix("torch."), shape, None, 1, flops, moved)

    def _group(self, args: Sequence[Any]) -> tuple[str, int, int] | None:
        """The process group among the arguments of a collective."""
        for value in args:
            if isinstance(value, torch.ScriptObject) and (group := dist.ProcessGroup.unbox(value)) is not None:
                return self._groups.get(group.group_name)
        return self._groups.get(next(value for value in reversed(args) if isinstance(value, str)))

    def _storage(self, tensor: Tensor) -> int:
        """Number of the tensor's storage. A new one is counted as allocated now."""
        storage = tensor.untyped_storage()
        address = storage._cdata
        if (known := self._known.get(address)) is not None:
            return known[0]
        number, (phase, name, _) = len(self.kinds), self.place
        other = "other" if phase == "optimizer" or name == "start" else "activations"
        self.kinds.append("loss" if (phase, name) == ("forward", "loss") else other)
        self.streams.append(self._stream)
        self._sizes.append(0)
        self._resized(number, storage.nbytes())
        self._known[address] = number, weakref.ref(storage, lambda _: self._freed(address))
        return number

    def _freed(self, address: int) -> None:
        self._resized(self._known.pop(address)[0], 0)

    def _resized(self, number: int, size: int) -> None:
        if size != self._sizes[number]:
            self.log.append((self.place, number, size - self._sizes[number]))
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
    for each in schema.arguments:
        is_write = each.alias_info is not None and each.alias_info.is_write
        is_read = not (is_write and (each.kwarg_only or name.endswith("copy_")))  # `out` is only written, too
        arguments.append((each.name, is_read + is_write))
    counts = not func.is_view and not name.startswith(("prim::", "profiler::"))
    returns_new = any(returned.alias_info is None for returned in schema.returns)
    return _Signature(name, func.is_view, counts, returns_new, tuple(arguments))


@cache
def _collective(name: str) -> str | None:
    """The collective that an operator is: "c10d::_allgather_base_" is an all_gather."""
    if not name.startswith(("c10d::", "_c10d_functional::")):
        return None
    return next((op for op in _COLLECTIVES if op.replace("_", "") in name.replace("_", "")), None)


def _parts(tensor: Any) -> Iterator[Tensor]:
    """The plain tensors that a tensor is made of: the shard of a DTensor, the data and scale of an FP8 weight."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _parts(getattr(tensor, name))
    elif isinstance(tensor, Tensor):  # and not the mesh of a DTensor
        yield tensor


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in a value, which may be lists of lists."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for each in value for tensor in _tensors(each)] if isinstance(value, list | tuple) else []


def bytes_of(value: Any) -> int:
    """Bytes of the tensors in a value."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(value))
