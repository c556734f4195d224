"""What one call of an operator does: its FLOPs, the bytes that it reads and writes, or what it sends.

Invariant: everything follows from the shapes and dtypes of the arguments and from the operator's schema.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.observe.gpus import WRAPPER


class Kernel(NamedTuple):
    """As `titanlite.plan.counts.Work`, of one kernel."""

    op: str
    dtype: str
    shape: tuple[int, ...]
    flops: int
    bytes: int


WRAPPED = Kernel(WRAPPER, "", (), 0, 0)
"""Stands for an operator on a tensor subclass. What that runs is counted by itself."""


class Collective(NamedTuple):
    """As `titanlite.plan.counts.Traffic`, of one collective.

    Attributes:
        group: Name of the process group.
    """

    op: str
    group: str
    bytes: int


class Call(NamedTuple):
    """One call of an operator.

    Attributes:
        key: What it does; None if it only allocates.
        results: The tensors that it returns.
        marks: Kind of memory -> tensors that are known to be of this kind, by what the operator is for.
    """

    key: Kernel | Collective | None
    results: Sequence[Tensor]
    marks: Mapping[str, Sequence[Tensor]]


# Operator -> the name of the collective, and which argument is as large as the whole tensor (-1: the result).
_COLLECTIVES = {
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::allgather_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::alltoall_base_": ("all_to_all", 0),
    "c10d::send": ("send", 0),
    "_c10d_functional::all_gather_into_tensor": ("all_gather", -1),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::all_reduce_": ("all_reduce", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
}
# They read as many elements of their first argument as they return, and not all of them.
_LOOK_UPS = {"aten::embedding", "aten::gather", "aten::index", "aten::index_select"}
_WRITE_ONLY = {"aten::copy_", "aten::fill_", "aten::zero_", "aten::_foreach_copy_", "aten::_foreach_zero_"}
_NO_KERNEL = {"aten::_unsafe_view", "aten::detach", "aten::set_", "c10d::recv_", "c10d::barrier"}
_ALLOCATIONS = ("aten::empty", "aten::new_empty")


def describe(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Call | None:
    """What a call did; None for a view or for an operator that returns no tensor and writes to none."""
    operator = _operator(func)
    if operator is None:
        return None
    results = _tensors((result,))
    marks = {kind: _tensors((args[i] if i < len(args) else kwargs["out"],)) for kind, i in operator.marks}
    if operator.collective is not None:
        name, whole = operator.collective
        size = sum(map(_bytes, results if whole == -1 else _tensors((args[whole],))))
        return Call(Collective(name, _group(args), size), results, marks)
    if operator.free:
        return Call(None, results, marks)
    inputs = _tensors(args)
    values = [*args, *([None] * (len(operator.arguments) - len(args)))]
    read = written = 0
    for value, argument in zip(values, operator.arguments, strict=False):
        if argument.name in kwargs:
            value = kwargs[argument.name]
        size = sum(map(_bytes, _tensors((value,))))
        if argument.is_write:
            written += size
        if argument.is_read:
            read += size
    if operator.returns_new:
        written += sum(map(_bytes, results))
    if operator.name in _LOOK_UPS:
        read = written
    dtype = next((t.dtype for t in inputs if t.is_floating_point()), inputs[0].dtype if inputs else torch.float32)
    shape, flops = _arithmetic(operator.name, inputs, args, kwargs)
    name = operator.name.replace("::", ".")
    return Call(Kernel(name, str(dtype).removeprefix("torch."), shape, flops, read + written), results, marks)


def copied(mode: AbstractContextManager[Any], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What `to`, `contiguous` or `reshape` returns, where it comes to `mode` as it is: within a tensor subclass.

    Such an operator is a chain of others, which come to `mode` here: it returns its argument, a view of it, or a copy.
    NotImplemented for every other operator.
    """
    if not _is_view(func):
        return NotImplemented
    with mode:
        return func.decompose(*args, **kwargs)


class _Argument(NamedTuple):
    name: str
    is_read: bool
    is_write: bool


class _Operator(NamedTuple):
    name: str
    collective: tuple[str, int] | None
    free: bool  # it moves no data
    returns_new: bool
    arguments: tuple[_Argument, ...]
    marks: tuple[tuple[str, int], ...]


# What FSDP2's own operators read and write: kind of memory, number of the argument.
_MARKS = {
    "fsdp::all_gather_copy_in": (("gathered weights", 0), ("gathered weights", 1)),
    "fsdp::split_with_sizes_copy": (("gathered weights", 9),),  # its keyword `out`
    "fsdp::chunk_cat": (("gradients", 0), ("gradients", 9)),
    "c10d::_reduce_scatter_base_": (("gradients", 0), ("gradients", 1)),
}


@cache
def _is_view(func: Any) -> bool:
    return func.is_view


@cache
def _operator(func: Any) -> _Operator | None:
    """What the schema tells of an operator; None for a view and for a mark in a profile."""
    schema, name = func._schema, func.name().split(".")[0]
    if _is_view(func) or name.startswith(("prim::", "profiler::")):
        return None
    arguments = []
    for argument in schema.arguments:
        is_write = argument.alias_info is not None and argument.alias_info.is_write
        is_read = not (is_write and (argument.kwarg_only or name in _WRITE_ONLY))
        arguments.append(_Argument(argument.name, is_read, is_write))
    returns_new = any(returned.alias_info is None for returned in schema.returns)
    free = name in _NO_KERNEL or name.startswith(_ALLOCATIONS) or "wait_tensor" in name
    return _Operator(name, _COLLECTIVES.get(name), free, returns_new, tuple(arguments), _MARKS.get(name, ()))


def _arithmetic(
    name: str, inputs: Sequence[Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[int, ...], int]:
    """(m, k, n) of a matmul or (batch, heads, queries, keys, head_dim) of attention, and the FLOPs."""
    if name in ("aten::mm", "aten::_scaled_mm", "aten::bmm", "aten::addmm", "aten::addmm_", "aten::baddbmm"):
        first = 1 if "add" in name else 0
        a, b = inputs[first], inputs[first + 1]
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


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _group(args: Sequence[Any]) -> str:
    """Name of the process group among the arguments of a collective."""
    for value in args:
        if isinstance(value, torch.ScriptObject):
            with_name = dist.ProcessGroup.unbox(value)
            if with_name is not None:
                return with_name.group_name
    return next(value for value in reversed(args) if isinstance(value, str))
