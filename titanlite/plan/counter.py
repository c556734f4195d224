"""Count the memory, FLOPs and traffic of a training step while it runs.

Invariant: The counter tracks storages (the memory behind tensors) rather than tensors, so views and
in-place writes allocate nothing. It works with real and fake tensors on any device and never
changes them. All other counts follow from shapes, dtypes and operator schemas.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)

from titanlite.plan.override import override

# Kinds of GPU memory. "loss" is memory that the fused loss allocates: logits and the gradients that
# it computes with them. "other" is everything else, such as batches, norms and temporary tensors of
# the optimizer.
KINDS = (
    "weights",
    "gradients",
    "optimizer state",
    "unsharded parameters",
    "activations",
    "loss",
    "other",
)
OFFLOADED = "offloaded"  # CPU memory that CPU offload uses
GUESSED_KINDS = ("activations", "loss", "other")
"""Kinds that `_guess_kind` gives to a new storage."""

MATMULS_WITH_SUMMAND = {"addmm", "addmm_", "baddbmm"}  # addmm(summand, a, b) = summand + a @ b
MATMULS = {"mm", "_scaled_mm", "bmm", *MATMULS_WITH_SUMMAND}
FLEX_OPS = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward")
"""Operators that replace flex attention in a trace; see `simulate._flex_attention`."""
FLEX_WINDOW_ARGUMENT = "scale"
"""Argument of `FLEX_OPS` that holds the sliding window in a trace, because these operators have no
argument for a window. A trace needs no scale, because it does not compute values."""
VARLEN_OPS = ("torch_attn::_varlen_attn", "torch_attn::_varlen_attn_backward")
"""Operators of variable-length attention."""
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send")

# Prefixes of operators that launch no kernel.
NO_KERNEL = (
    "aten::_unsafe_view",
    "aten::detach",
    "aten::set_",
    "aten::empty",
    "aten::new_empty",
    "c10d::recv_",
    "c10d::barrier",
    "_c10d_functional::wait_tensor",
)
# FSDP2 operators -> kind of memory of their tensors, except tensors that were labeled before.
FSDP_KINDS: Mapping[str, str] = {
    "fsdp::all_gather_copy_in": "unsharded parameters",
    "fsdp::split_with_sizes_copy": "unsharded parameters",
    "fsdp::chunk_cat": "gradients",
    "c10d::_reduce_scatter_base_": "gradients",
}
# Other tensor subclasses are counted when they call operators on the tensors that they contain.
PLAIN_TYPES = {Tensor, torch.nn.Parameter, FakeTensor}

GET_DEVICE = torch.ops.prim.device.default
GET_SCALAR = torch.ops.aten._local_scalar_dense.default
ADD = torch.ops.aten.add.Tensor
ADDMM_OUT = torch.ops.aten.addmm.dtype_out
COPY = torch.ops.aten.copy_.default


class Location(NamedTuple):
    """A part of the training step, such as the forward pass of the blocks.

    Memory and work are counted separately for each location. At each location, they grow linearly
    with the number of blocks, so the counts of a small model can be extrapolated to a large one.

    Attributes:
        phase: "forward", "backward" (including recomputation) or "optimizer" (including clipping).
        name: For example "block", "embedding", "loss" or "gradient norm".
        stage: Index of the pipeline stage.
    """

    phase: str
    name: str
    stage: int = 0


START = Location("forward", "start")


class Group(NamedTuple):
    """Process group of a collective.

    Attributes:
        name: Mesh dimension, such as "fsdp" or "tensor".
        size: Number of ranks.
        span: Distance from the first to the last rank, plus 1. For example, 7 for the ranks 0, 2, 4
            and 6. The group fits into one node if the node has at least this many GPUs.
    """

    name: str
    size: int
    span: int


class Work(NamedTuple):
    """Kernels or collectives of the same kind.

    Attributes:
        phase: Phase of the step; see `Location`.
        op: Operator such as "mm", without the namespace "aten::", or name of a collective such as
            "all_gather".
        dtype: Dtype of the first floating-point input, such as "bfloat16". Empty for collectives
            and for kernels that read only integers.
        shape: (m, k, n) of a matmul, (batch, heads, queries, keys, head_dim) of attention,
            otherwise ().
        group: Process group of a collective.
        count: Number of calls.
        flops: FLOPs of all calls. Attention counts only the visible half of a causal mask.
        bytes: Bytes that all calls read and write. For collectives, the size of the full tensors.
    """

    phase: str
    op: str
    dtype: str = ""
    shape: tuple[int, ...] = ()
    group: Group | None = None
    count: int = 1
    flops: int = 0
    bytes: int = 0

    @property
    def kind(self) -> Work:
        """Return a key for this kind of work: a copy with `count`, `flops` and `bytes` set to 0."""
        return self._replace(count=0, flops=0, bytes=0)

    @property
    def amounts(self) -> tuple[int, int, int]:
        """Return the number of calls, their FLOPs and their bytes."""
        return self.count, self.flops, self.bytes


@dataclass(eq=False)
class StorageRecord:
    """Record of a storage, the memory behind tensors. It outlives the storage.

    Attributes:
        kind: Kind of memory, one of `KINDS` or `OFFLOADED`. It can change while the step runs.
        stream: Index of the stream in which the storage was allocated. 0 is the compute stream.
        size: Current size in bytes, or 0 after the storage was freed.
    """

    kind: str
    stream: int
    size: int = 0


class Allocation(NamedTuple):
    """Log entry of a storage that was allocated, resized or freed.

    Attributes:
        storage: Record of the storage.
        change: Change of its size in bytes, negative if memory is freed.
    """

    storage: StorageRecord
    change: int


LogEntry = tuple[Location, Work | Allocation]
ShapeAndFlops = tuple[tuple[int, ...], int]
"""`shape` and `flops` of a `Work`."""
OperatorArguments = Mapping[str, Any]
"""Arguments of an operator by name."""


class _AttentionCall(NamedTuple):
    """Call of an attention operator.

    Attributes:
        shape: (batch, heads, queries, keys, head_dim).
        mean_visible_keys: Average number of keys that a query attends to.
    """

    shape: tuple[int, int, int, int, int]
    mean_visible_keys: Fraction


class _GradientSum(NamedTuple):
    """Pending sum of two gradients, not logged yet because it may reuse the memory of the first.

    Attributes:
        first_storage: `id` of the storage of the first gradient. If this storage is freed before
            the next operator runs, the sum counts as an in-place addition to it.
        result: Tensor with the sum.
    """

    first_storage: int
    result: Tensor


class Counter(TorchDispatchMode):
    """Dispatch mode that logs every operator and allocation of a training step.

    Each log entry has the location in the step, such as the forward pass of the blocks. Use the
    context manager `watching` to start counting.

    Args:
        groups: Descriptions of the process groups, by group name in torch.

    Attributes:
        location: Current location in the step, which `step_counts.StepFollower` updates.
        log: Pairs of a location and a piece of work or an allocation, in the order of the step. The
            log starts with the storages that existed before the step.
        recording: List that also gets each new log entry, or None if nothing is recorded.
        forward_starts: Indices in the log at which forward passes start.
    """

    def __init__(self, groups: Mapping[str, Group]) -> None:
        super().__init__()
        self._groups = groups
        # `id` of an existing storage -> its record, and a weak reference that reports its end.
        self._records: dict[int, StorageRecord] = {}
        self._references: dict[int, Any] = {}
        self._stream = 0
        self._stream_indices = {torch.cpu.current_stream(): 0}
        self._is_inferring_shape = False
        self._pending_sum: _GradientSum | None = None
        self.begin()

    def begin(self) -> None:
        """Replace the log with a new one, for the next training step.

        The log starts with one allocation for each existing storage (the memory behind tensors), so
        that the sum of all changes is the memory in use.
        """
        self.location = START
        self.log: list[LogEntry] = []
        self.forward_starts: list[int] = []
        self.recording: list[LogEntry] | None = None
        for record in self._records.values():
            self.add(Allocation(record, record.size))

    def add(self, entry: Work | Allocation) -> None:
        """Append an entry to the log of the step and to the current recording, if there is one."""
        log_entry = (self.location, entry)
        self.log.append(log_entry)
        if self.recording is not None:
            self.recording.append(log_entry)

    def label(self, tensors: Iterable[Any], kind: str, overwrite: bool = True) -> None:
        """Label the memory of tensors with its kind, for example "gradients".

        Args:
            tensors: Tensors that occupy the memory. Values that are not tensors are ignored.
            kind: New kind, one of `KINDS` or `OFFLOADED`.
            overwrite: Also change memory that was labeled before, such as weights.
        """
        for tensor in tensors:
            for plain in plain_tensors(tensor):
                record = self._register_storage(plain)
                is_guessed = record.kind in GUESSED_KINDS
                if is_guessed or overwrite:
                    record.kind = kind

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count the memory and work of all operators that run within this context."""
        try:
            with (
                # Follow changes that call no operator.
                self._following_resizes(),
                self._following_streams(),
                # Exclude operators that are not part of the step.
                self._ignoring_shape_inference(),
                self,  # receive each operator call
            ):
                yield
        finally:
            self._stop_tracking()

    def _stop_tracking(self) -> None:
        """Stop tracking storages, so that their callbacks do not keep this counter in memory.

        The callback for the end of a storage refers to this counter, and weights outlive the step.
        """
        self._references.clear()
        self._records.clear()

    @contextmanager
    def _following_resizes(self) -> Iterator[None]:
        """Log the new size when a storage is resized.

        FSDP2 frees unsharded parameters by resizing their storage to 0, which calls no operator.
        """
        resize = torch.UntypedStorage.resize_

        def resize_and_log(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            record = self._records.get(id(storage))
            if record is not None:
                self._log_size(record, storage.nbytes())
            return result

        with override(torch.UntypedStorage, resize_=resize_and_log):
            yield

    @contextmanager
    def _following_streams(self) -> Iterator[None]:
        """Track the current stream within this context, to log the stream of each allocation.

        FSDP2 also enters its streams on a CPU, where they have no effect.
        """

        @contextmanager
        def enter_stream(stream: Any) -> Iterator[None]:
            index = self._stream_indices.setdefault(stream, len(self._stream_indices))
            with override(self, _stream=index):
                yield

        with override(torch.cpu, stream=enter_stream):
            yield

    @contextmanager
    def _ignoring_shape_inference(self) -> Iterator[None]:
        """Do not count the operators that DTensor runs only to infer the shape of a result."""
        infer_shape = ShardingPropagator._propagate_tensor_meta_non_cached

        def infer_shape_uncounted(propagator: ShardingPropagator, schema: Any) -> Any:
            with override(self, _is_inferring_shape=True):
                return infer_shape(propagator, schema)

        with override(ShardingPropagator, _propagate_tensor_meta_non_cached=infer_shape_uncounted):
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator and count it. torch calls this for every operator within `watching`.

        Operators on tensor subclasses, and composite operators such as `reshape`, call simpler
        operators, which are counted instead.
        """
        if not PLAIN_TYPES.issuperset(types):
            return NotImplemented  # so a subclass such as DTensor calls operators on its parts

        fake_result = _read_fake_tensor(func, args)
        if fake_result is not None:
            return fake_result
        run = self._run_view if func.is_view else self._run_and_count
        return run(func, args, kwargs or {})

    def _run_view(self, func: Any, args: tuple[Any, ...], kwargs: OperatorArguments) -> Any:
        """Run an operator that may return a view, and count the operators that it calls.

        For example, `reshape` copies its input if no view is possible. An operator that calls no
        others only returns a view, so nothing is counted.
        """
        # torch disables a dispatch mode while the mode handles an operator. Enable this mode again,
        # so that it receives and counts the simpler operators.
        with self:
            result = func.decompose(*args, **kwargs)
        if result is NotImplemented:  # `func` calls no other operators
            return self._run_and_count(func, args, kwargs)
        return result

    def _run_and_count(self, func: Any, args: tuple[Any, ...], kwargs: OperatorArguments) -> Any:
        """Run one operator, log the memory and the work that it needs, and return its result."""
        self._log_pending_sum()
        result = _call_operator(func, args, kwargs)
        if not (self._is_inferring_shape or _is_free(func, args)):
            self._count(func, args, kwargs, result)
        return result

    def _count(
        self, func: Any, args: tuple[Any, ...], kwargs: OperatorArguments, result: Any
    ) -> None:
        """Log the memory and the work of an operator that has run."""
        if self._is_sum_of_gradients(func):
            self._pending_sum = _GradientSum(id(args[0].untyped_storage()), result)
        else:
            for tensor in _find_tensors(result):
                self._register_storage(tensor)

        signature = _signature(func)
        arguments = signature.name_arguments(args, kwargs)
        self._label_fsdp_tensors(signature.name, arguments)
        self._count_work(signature, arguments, result)

    def _label_fsdp_tensors(self, op: str, arguments: OperatorArguments) -> None:
        """Label the arguments of an FSDP operator as "unsharded parameters" or "gradients".

        Other operators are ignored. Memory that was labeled before keeps its label.
        """
        if op in FSDP_KINDS:
            tensors = _find_tensors(list(arguments.values()))
            self.label(tensors, FSDP_KINDS[op], overwrite=False)

    def _count_work(self, signature: _Signature, arguments: OperatorArguments, result: Any) -> None:
        """Log the collective or the kernel that an operator has launched, if any."""
        phase = self.location.phase
        collective = _collective_name(signature.name)
        if collective is not None:
            values = arguments.values()
            # The largest tensor is the full one. The others may be shards of it.
            num_bytes = max(bytes_of(value) for value in (*values, result))
            self.add(Work(phase, collective, group=self._find_group(values), bytes=num_bytes))
        elif signature.launches_kernel:
            self.add(_describe_kernel(phase, signature, arguments, result))

    def _is_sum_of_gradients(self, func: Any) -> bool:
        """Return whether autograd calls this operator to add two gradients of the same tensor."""
        # A recomputed forward pass also runs in the backward phase, but with gradients enabled.
        is_in_autograd = self.location.phase == "backward" and not torch.is_grad_enabled()
        return func is ADD and is_in_autograd

    def _log_pending_sum(self) -> None:
        """Log the memory of the last sum of two gradients, if a real step needs memory for it.

        In a real step, autograd adds gradients in place if nothing else uses the first one. It
        never adds fake gradients in place, so a sum is logged only when the next operator starts.
        If the first gradient is freed before, `_handle_free` lets the sum take over its memory.
        """
        if self._pending_sum is not None:
            self._register_storage(self._pending_sum.result)
            self._pending_sum = None

    def _find_group(self, args: Iterable[Any]) -> Group | None:
        """Find the process group of a collective in the arguments of its operator.

        The arguments contain the group as an object, or its name. Return None if the group is
        unknown.
        """
        for value in args:
            if isinstance(value, torch.ScriptObject):
                group = dist.ProcessGroup.unbox(value)
                if group is not None:
                    return self._groups.get(group.group_name)
        # The group name is the last string. Another string may precede it, such as a reduction.
        names = [value for value in args if isinstance(value, str)]
        return self._groups.get(names[-1])

    def _register_storage(self, tensor: Tensor) -> StorageRecord:
        """Return the record of a tensor's storage. If it is new, also log its allocation."""
        storage = tensor.untyped_storage()
        if id(storage) in self._records:
            return self._records[id(storage)]

        record = StorageRecord(_guess_kind(self.location), self._stream)
        self._log_size(record, storage.nbytes())
        self._track(storage, record)
        return record

    def _track(self, storage: torch.UntypedStorage, record: StorageRecord) -> None:
        """Register a callback that logs when a storage is freed."""
        # torch keeps the same Python object for a storage as long as the storage lives. Its `id`
        # can be reused afterwards, so the callback removes it from `_records`.
        identity = id(storage)
        self._records[identity] = record
        self._references[identity] = weakref.ref(storage, lambda _: self._handle_free(identity))

    def _handle_free(self, identity: int) -> None:
        """Log that a storage was freed, unless a pending sum of two gradients reuses its memory.

        In a real step, autograd adds the second gradient to the first one in place. In a trace, it
        allocates the sum and frees the first gradient, so the sum takes over the record.

        Args:
            identity: `id` of the freed storage.
        """
        record = self._records.pop(identity)
        del self._references[identity]
        pending_sum = self._pending_sum
        if pending_sum is not None and pending_sum.first_storage == identity:
            self._pending_sum = None
            self._track(pending_sum.result.untyped_storage(), record)
        else:
            self._log_size(record, 0)

    def _log_size(self, record: StorageRecord, size: int) -> None:
        """Set the size of a storage in bytes, and log the change if there is one."""
        change = size - record.size
        if change:
            self.add(Allocation(record, change))
            record.size = size


def _read_fake_tensor(func: Any, args: tuple[Any, ...]) -> torch.device | int | None:
    """Return the result of an operator that reads the device or an unknown value of a fake tensor.

    For example, `item()` reads a value. Unknown values are read as 0. For known values and all
    other operators, return None, so that the caller runs the operator with torch.
    """
    if func not in (GET_DEVICE, GET_SCALAR) or not isinstance(args[0], FakeTensor):
        return None
    if func is GET_DEVICE:
        return args[0].fake_device  # a shortcut, because this is more than half of all calls
    if args[0].constant is not None:
        return None  # torch can read this value
    # Some optimizers read a flag to decide whether to skip their update. Return 0, so that the
    # update runs and is counted.
    return 0


def _call_operator(func: Any, args: tuple[Any, ...], kwargs: OperatorArguments) -> Any:
    """Run an operator and return its result."""
    # torch 2.12 cannot run this operator on fake tensors.
    if func is ADDMM_OUT and isinstance(kwargs["out"], FakeTensor):
        return kwargs["out"]
    return func(*args, **kwargs)


def _is_free(func: Any, args: tuple[Any, ...]) -> bool:
    """Return whether an operator call needs no memory and no kernel.

    This is the case for views, profiler annotations and copies of a tensor to itself.
    """
    copies_to_itself = func is COPY and args[0] is args[1]
    return copies_to_itself or _signature(func).is_view_or_annotation


def _guess_kind(location: Location) -> str:
    """Guess the kind of new memory from the part of the step that allocates it.

    Return "loss", "other" or "activations". All other kinds, such as "weights", cannot be guessed
    and must be set with `Counter.label`.
    """
    if location.phase == "forward" and location.name == "loss":
        return "loss"
    if location.phase == "optimizer" or location.name == "start":
        return "other"
    return "activations"


def count_generated_kernel(num_bytes: int) -> None:
    """Count a compiler-generated kernel in every active counter.

    Args:
        num_bytes: Bytes that the kernel reads and writes.
    """
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, Counter):
            mode.add(Work(mode.location.phase, "compiled", bytes=num_bytes))


class _Signature(NamedTuple):
    """Properties of an operator that follow from its schema.

    Attributes:
        name: Name of the operator, such as "aten::mm".
        is_view_or_annotation: Whether the operator only returns a view or informs the profiler. It
            then needs no memory and no kernel.
        launches_kernel: Whether the operator launches a kernel, unlike `empty`, for example.
        returns_new: Whether the operator allocates a result.
        accesses: How often the memory of each argument is accessed: 1 if it is read or written, 2
            if both.
    """

    name: str
    is_view_or_annotation: bool
    launches_kernel: bool
    returns_new: bool
    accesses: Mapping[str, int]

    def name_arguments(self, args: tuple[Any, ...], kwargs: OperatorArguments) -> OperatorArguments:
        """Return the arguments of a call by name. Optional ones that the call omits are missing."""
        positional = zip(self.accesses, args, strict=False)  # `accesses` has the names in order
        return {**dict(positional), **kwargs}


@cache
def _signature(func: Any) -> _Signature:
    """Derive the properties of an operator from its schema."""
    name = func.name().split(".")[0]
    accesses = {}
    for argument in func._schema.arguments:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        # The target of a copy and `out` arguments are not read.
        is_only_written = is_written and (argument.kwarg_only or name.endswith("copy_"))
        is_read = not is_only_written
        accesses[argument.name] = is_read + is_written
    is_view_or_annotation = func.is_view or name.startswith(("prim::", "profiler::"))
    returns_new = any(value.alias_info is None for value in func._schema.returns)
    launches_kernel = not name.startswith(NO_KERNEL)
    return _Signature(name, is_view_or_annotation, launches_kernel, returns_new, accesses)


@cache
def _collective_name(operator: str) -> str | None:
    """Return the collective that an operator performs, or None if it performs none.

    For example, return "all_gather" for "c10d::_allgather_base_".
    """
    if not operator.startswith(("c10d::", "_c10d_functional::")):
        return None
    for name in COLLECTIVES:
        if name.replace("_", "") in operator.replace("_", ""):
            return name
    return None


def _describe_kernel(
    phase: str, signature: _Signature, arguments: OperatorArguments, result: Any
) -> Work:
    """Return the work of one operator call: its dtype, shape, FLOPs and bytes."""
    op = signature.name.removeprefix("aten::")
    shape, flops = _count_flops(op, arguments)
    return Work(
        phase,
        op=op,
        dtype=_describe_dtype(_find_inputs(op, arguments)),
        shape=shape,
        flops=flops,
        bytes=_count_traffic(signature, arguments, result),
    )


def _find_inputs(op: str, arguments: OperatorArguments) -> list[Tensor]:
    """List the tensor arguments of an operator, except for the summand of a matmul.

    For example, the inputs of addmm(summand, a, b) are `a` and `b`.
    """
    inputs = _find_tensors(list(arguments.values()))
    return inputs[1:] if op in MATMULS_WITH_SUMMAND else inputs


def _describe_dtype(inputs: Iterable[Tensor]) -> str:
    """Return the dtype of the first floating-point input, such as "bfloat16".

    If no input is floating-point, return "".
    """
    for tensor in inputs:
        if tensor.is_floating_point():
            return str(tensor.dtype).removeprefix("torch.")
    return ""


def _count_traffic(signature: _Signature, arguments: OperatorArguments, result: Any) -> int:
    """Return how many bytes of memory an operator reads and writes."""
    num_bytes = bytes_of(result) if signature.returns_new else 0
    for name, value in arguments.items():
        num_bytes += signature.accesses[name] * bytes_of(value)
    return num_bytes


def _count_flops(op: str, arguments: OperatorArguments) -> ShapeAndFlops:
    """Return the shape and the FLOPs of a matmul or an attention operator.

    Other operators have the shape () and 0 FLOPs.

    Args:
        op: Operator without "aten::".
        arguments: Arguments of the operator by name.
    """
    if op in MATMULS:
        return _count_matmul_flops(op, arguments)
    if op in VARLEN_OPS or "_scaled_dot_product" in op:
        return _count_attention_flops(op, arguments)
    return (), 0


def _count_matmul_flops(op: str, arguments: OperatorArguments) -> ShapeAndFlops:
    """Return the shape (m, k, n) of a matmul and its FLOPs.

    `bmm` multiplies several matrices, so its m counts the rows of all of them.
    """
    a, b, *_ = _find_inputs(op, arguments)
    *rows, k = a.shape  # (M, K), or (B, M, K) for `bmm`
    m = math.prod(rows)
    n = b.shape[-1]
    return (m, k, n), 2 * m * k * n


def _count_attention_flops(op: str, arguments: OperatorArguments) -> ShapeAndFlops:
    """Return the shape and the FLOPs of attention, excluding scores that are masked out.

    Args:
        op: Forward or backward operator, without "aten::".
        arguments: Arguments of the operator by name.

    Returns:
        (batch, heads, queries, keys, head_dim), and the FLOPs.
    """
    if op in VARLEN_OPS:
        attention = _describe_varlen_attention(arguments)
    else:
        attention = _describe_attention(op, arguments)

    batch, heads, num_queries, _num_keys, head_dim = attention.shape
    num_scores = batch * heads * num_queries * attention.mean_visible_keys
    # The backward pass has five matmuls, because it recomputes the scores.
    num_matmuls = 5 if "backward" in op else 2
    return attention.shape, int(2 * num_matmuls * num_scores * head_dim)


def _describe_attention(op: str, arguments: OperatorArguments) -> _AttentionCall:
    """Return the shape and mean number of visible keys of scaled dot-product or flex attention.

    With context parallelism, the queries in a call of scaled dot-product attention are one chunk of
    a sequence. The queries in a call of flex attention are spread over the whole sequence.
    """
    batch, heads, num_queries, head_dim = arguments["query"].shape
    num_keys = arguments["key"].shape[2]
    if op in FLEX_OPS:
        window = arguments.get(FLEX_WINDOW_ARGUMENT) or num_keys  # 0 means no window
        mean_visible_keys = _mean_visible_keys_of_sequence(num_keys, int(window))
    else:
        mean_visible_keys = _mean_visible_keys_of_chunk(num_queries, num_keys)
    shape = (batch, heads, num_queries, num_keys, head_dim)
    return _AttentionCall(shape, mean_visible_keys)


def _mean_visible_keys_of_chunk(num_queries: int, num_keys: int) -> Fraction:
    """Return the average number of keys that the last `num_queries` tokens of a sequence attend to.

    The mask is causal. Without context parallelism, these queries are the whole sequence. With it,
    they are a chunk, and the keys are the chunk and all earlier tokens. For example, if the chunk
    is the last 4 of 8 tokens, each query attends to all 4 earlier tokens and on average to half of
    the chunk, so the mean is 6.
    """
    return num_keys - Fraction(num_queries, 2)


def _describe_varlen_attention(arguments: OperatorArguments) -> _AttentionCall:
    """Describe a call of variable-length attention.

    Document lengths are unknown, because fake tensors have no values. Each sequence therefore
    counts as one document.

    Args:
        arguments: Arguments of an operator in `VARLEN_OPS`, by name.
    """
    num_tokens, heads, head_dim = arguments["query"].shape  # (B * T, H, D)
    seq_len = arguments["max_q"]
    num_earlier, _ = arguments["window_size"]  # visible tokens before the query, or -1 for all
    window = seq_len if num_earlier == -1 else num_earlier + 1  # a query also attends to itself
    shape = (num_tokens // seq_len, heads, seq_len, seq_len, head_dim)
    return _AttentionCall(shape, _mean_visible_keys_of_sequence(seq_len, window))


def _mean_visible_keys_of_sequence(num_keys: int, window: int) -> Fraction:
    """Return the average number of keys that the queries of a whole sequence attend to.

    The mask is causal. Queries in the first window attend to half a window on average, and all
    other queries to a whole window. For example, with 8 keys and a window of 4, half of the queries
    attend to 2 keys on average, and the other half to 4, so the mean is 3.

    Args:
        num_keys: Number of tokens in the sequence.
        window: Sliding window in tokens. `num_keys` or more means no window.
    """
    window = min(window, num_keys)
    share_in_first_window = Fraction(window, num_keys)
    return window - share_in_first_window * window / 2


def plain_tensors(tensor: Any) -> Iterator[Tensor]:
    """Yield the plain tensors inside a tensor subclass, such as the local shard of a DTensor.

    A plain tensor yields itself, and a value that is not a tensor yields nothing.
    """
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(tensor, name))
    elif isinstance(tensor, Tensor):  # not the mesh of a DTensor
        yield tensor


def _find_tensors(value: Any) -> list[Tensor]:
    """List the tensors in a value, which can be a tensor or nested lists and tuples.

    Values of other types are ignored.
    """
    if isinstance(value, Tensor):
        return [value]
    if not isinstance(value, list | tuple):
        return []
    return [tensor for item in value for tensor in _find_tensors(item)]


def bytes_of(value: Any) -> int:
    """Return the total bytes of a tensor, or of all tensors in nested lists and tuples."""
    return sum(tensor.nbytes for tensor in _find_tensors(value))
