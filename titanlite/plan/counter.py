"""Counts the memory, FLOPs and traffic of a training step while it runs.

Invariant: The counter tracks storages (the memory behind tensors) rather than tensors, so views and
in-place writes allocate nothing. It works with real and fake tensors on any device and changes
neither. All other counts follow from shapes, dtypes and operator schemas.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from titanlite.plan.override import override

# Kinds of GPU memory. "loss" is memory that the fused loss allocates: logits and the gradients that
# it computes with them. "other" is everything else, such as batches, norms and temporaries of the
# optimizer.
KINDS: tuple[str, ...] = (
    "weights",
    "gradients",
    "optimizer state",
    "unsharded parameters",
    "activations",
    "loss",
    "other",
)
OFFLOADED = "offloaded"  # CPU memory that CPU offload uses
ALL_KINDS: tuple[str, ...] = (*KINDS, OFFLOADED)
DEFAULT_KINDS: tuple[str, ...] = ("activations", "loss", "other")
"""Kinds that a storage gets when it is allocated, and that `Counter.mark` may replace."""

GENERATED = "compiled"  # `Work.op` of kernels that the compiler generates
MATMULS = {"mm", "_scaled_mm", "bmm", "addmm", "addmm_", "baddbmm"}
FLEX_OPS = ("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward")
"""Operators that represent flex attention in a trace; see `simulate.simulate_gpu`."""
VARLEN_OPS = ("torch_attn::_varlen_attn", "torch_attn::_varlen_attn_backward")
"""Operators of variable-length attention."""
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send")

# Operators that launch no kernel.
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
# Arguments of FSDP2 operators with a known kind of memory: operator -> (kind, index or name).
ARGUMENT_KINDS: Mapping[str, Sequence[tuple[str, int | str]]] = {
    "fsdp::all_gather_copy_in": (("unsharded parameters", 0), ("unsharded parameters", 1)),
    "fsdp::split_with_sizes_copy": (("unsharded parameters", "out"),),
    "fsdp::chunk_cat": (("gradients", 0), ("gradients", "out")),
    "c10d::_reduce_scatter_base_": (("gradients", 0), ("gradients", 1)),
}
# Tensors of other subclasses are counted when they call operators on the tensors that they contain.
PLAIN_TYPES = (Tensor, torch.nn.Parameter, FakeTensor)

GET_DEVICE = torch.ops.prim.device.default
GET_SCALAR = torch.ops.aten._local_scalar_dense.default
ADD = torch.ops.aten.add.Tensor


class Location(NamedTuple):
    """A part of the training step, such as the forward pass of the blocks.

    Memory and work are counted separately for each location, where they grow linearly with the
    number of blocks. A trace of few blocks can therefore be extrapolated.

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
        op: Operator such as "aten.mm", or name of a collective such as "all_gather".
        dtype: Dtype of the first floating-point input, such as "bfloat16". Empty for collectives.
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
    def key(self) -> tuple[Any, ...]:
        """Return the attributes that identify the kind of work.

        Work with equal keys is added up.
        """
        return self[:5]

    @property
    def amounts(self) -> tuple[int, int, int]:
        """Return the number of calls, their FLOPs and their bytes."""
        return self[5:]


class Allocation(NamedTuple):
    """Log entry of a storage (the memory behind tensors) that was allocated, resized or freed.

    Attributes:
        storage: Number of the storage.
        change: Change of its size in bytes, negative if memory is freed.
    """

    storage: int
    change: int


LogEntry = tuple[Location, Work | Allocation]


class Counter(TorchDispatchMode):
    """Dispatch mode that logs every operator and allocation of a training step.

    Each log entry has the location in the step, such as the forward pass of the blocks. Use the
    context manager `watching` to start counting.

    Args:
        groups: Name of a process group -> its description.

    Attributes:
        location: Current location in the step, which `step_counts.StepFollower` updates.
        log: Pairs of a location and a piece of work or an allocation, in the order of the step. The
            log starts with the storages that existed before the step.
        kinds: Number of a storage -> kind of memory, such as "weights". Storages (the memory behind
            tensors) are numbered in the order in which the counter first sees them.
        streams: Number of a storage -> index of the stream in which it was allocated. 0 is the
            compute stream.
        forward_starts: Indices in the log at which forward passes start.
    """

    def __init__(self, groups: Mapping[str, Group]) -> None:
        super().__init__()
        self._groups = groups
        self.kinds: list[str] = []
        self.streams: list[int] = []
        self._sizes: list[int] = []
        # Identity of a living storage -> its number, and a reference that reports its end.
        self._living: dict[int, tuple[int, Any]] = {}
        self._stream = 0
        self._stream_indices = {torch.cpu.current_stream(): 0}
        self._is_inferring_shapes = False
        # Storage identity of a gradient, and the sum that may take over its memory.
        self._pending_sum: tuple[int, Tensor] | None = None
        self.begin()

    def begin(self) -> None:
        """Start counting a new step, and clear the log of the previous one.

        The new log begins with the storages that exist now.
        """
        self.location = START
        self.log: list[LogEntry] = [
            (START, Allocation(number, self._sizes[number])) for number, _ in self._living.values()
        ]
        self.forward_starts: list[int] = []
        self._recorded_actions: dict[Any, list[LogEntry]] = {}
        self._current_action: Any = None
        # Log entries of the current action from before an inner action.
        self._entries_before_pause: list[LogEntry] = []
        self._action_start = 0

    def mark(
        self, tensors: Iterable[Any], kind: str, replaceable: Iterable[str] = ALL_KINDS
    ) -> None:
        """Set the kind of memory that tensors occupy, for example "gradients".

        Args:
            tensors: Tensors. Values that are not tensors are ignored.
            kind: New kind, one of `ALL_KINDS`.
            replaceable: Kinds that can be replaced. Memory of another kind keeps its kind.
        """
        for tensor in tensors:
            for plain in plain_tensors(tensor):
                number = self._storage_number(plain)
                if self.kinds[number] in replaceable:
                    self.kinds[number] = kind

    def start_action(self, name: Any, location: Location, is_skipped: bool) -> None:
        """End the current pipeline action, and start another one.

        A pipeline action is the forward or backward pass of one microbatch through one stage, or
        its communication. Its log entries are kept, so that later microbatches can repeat them.

        Args:
            name: Name of the action. All microbatches use the same name for the same action.
            location: Location of the action.
            is_skipped: Whether the action will not run. If so, copy the log entries of the latest
                action with this name.
        """
        self._record_action()
        self.location = location
        self._entries_before_pause = []
        self._action_start = len(self.log)
        self._current_action = None if is_skipped else name
        if is_skipped:
            self.log += self._recorded_actions.get(name, ())

    def _record_action(self) -> None:
        """Keep the log entries of the current action, in case a later microbatch repeats them."""
        if self._current_action is not None:
            entries = self._entries_before_pause + self.log[self._action_start :]
            self._recorded_actions[self._current_action] = entries

    @contextmanager
    def inner_action(self, name: Any, is_skipped: bool) -> Iterator[None]:
        """Count a pipeline action that interrupts the current one until this context ends.

        Args:
            name: Name of the action. All microbatches use the same name for the same action.
            is_skipped: Whether the action will not run. If so, copy the log entries of the latest
                action with this name.
        """
        # Keep the entries of the current action so far. It continues after this context.
        self._entries_before_pause += self.log[self._action_start :]
        start = len(self.log)
        if is_skipped:
            self.log += self._recorded_actions.get(name, ())
        yield
        if not is_skipped:
            self._recorded_actions[name] = self.log[start:]
        self._action_start = len(self.log)

    def add_generated_kernel(self, num_bytes: int) -> None:
        """Count one compiler-generated kernel that reads and writes `num_bytes` bytes in total."""
        work = Work(self.location.phase, GENERATED, bytes=num_bytes)
        self.log.append((self.location, work))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count all operators that run within this context.

        As a dispatch mode, the counter receives each operator call. Within the context, three
        functions of torch are replaced, because they change memory or streams without an operator,
        or call operators that must not be counted.
        """
        resize = torch.UntypedStorage.resize_
        infer_shapes = ShardingPropagator._propagate_tensor_meta_non_cached

        # FSDP2 frees unsharded parameters by resizing their storage to 0.
        def resize_and_log(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if id(storage) in self._living:
                number, _ = self._living[id(storage)]
                self._log_size(number, storage.nbytes())
            return result

        # To infer the shape of a result, DTensor runs an operator on fake tensors. Do not count it.
        def infer_shapes_uncounted(propagator: ShardingPropagator, schema: Any) -> Any:
            self._is_inferring_shapes = True
            try:
                return infer_shapes(propagator, schema)
            finally:
                self._is_inferring_shapes = False

        # Memory belongs to the stream in which it is allocated. FSDP2 enters its streams on a CPU
        # as well, on which they have no effect.
        @contextmanager
        def enter_stream(stream: Any) -> Iterator[None]:
            previous = self._stream
            self._stream = self._stream_indices.setdefault(stream, len(self._stream_indices))
            try:
                yield
            finally:
                self._stream = previous

        with (
            override(torch.UntypedStorage, resize_=resize_and_log),
            override(ShardingPropagator, _propagate_tensor_meta_non_cached=infer_shapes_uncounted),
            override(torch.cpu, stream=enter_stream),
            self,  # enables the dispatch mode
        ):
            _active_counters.append(self)
            try:
                yield
            finally:
                _active_counters.remove(self)
        self._living.clear()  # otherwise weights, which outlive the step, keep this counter alive

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator and count it. torch calls this for every operator within `watching`."""
        if any(kind not in PLAIN_TYPES for kind in types):
            return NotImplemented  # a subclass such as DTensor first calls operators on its parts

        if func is GET_DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # a shortcut for more than half of all calls
        if func is GET_SCALAR and isinstance(args[0], FakeTensor) and args[0].constant is None:
            # The value is unknown. For the flag by which a training step skips the optimizer step,
            # 0 means that the optimizer step runs, and is counted.
            return 0

        kwargs = kwargs or {}
        signature = _signature(func)
        if signature.is_view:
            result = self._decompose(func, args, kwargs)
            if result is not NotImplemented:
                return result

        # If the previous operator added two gradients, their sum reuses the memory of the first
        # one, unless the first one is still alive at the next operator.
        self._count_pending_sum()
        result = func(*args, **kwargs)
        if signature.is_counted and not self._is_inferring_shapes:
            self._count(func, signature, args, kwargs, result)
        return result

    def _decompose(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator such as `reshape` as several operators, and count each of them.

        Within a tensor subclass, `to`, `contiguous` and `reshape` arrive as one operator that
        returns a view or a copy. For operators without a decomposition, return NotImplemented.
        """
        with self:  # torch disables a mode while its __torch_dispatch__ runs, so enable it again
            return func.decompose(*args, **kwargs)

    def _count(
        self, func: Any, signature: _Signature, args: Any, kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Log the allocations and the work of one operator call."""
        self._count_allocations(func, args, result)

        # The new memory has a default kind, such as "activations". Correct it for the arguments of
        # FSDP2 operators, but never the kind of memory that was marked as weights, for example.
        for kind, argument in ARGUMENT_KINDS.get(signature.name, ()):
            value = kwargs[argument] if isinstance(argument, str) else args[argument]
            self.mark(_find_tensors(value), kind, DEFAULT_KINDS)
        if not signature.name.startswith(NO_KERNEL):
            self.log.append((self.location, self._describe_work(signature, args, kwargs, result)))

    def _count_allocations(self, func: Any, args: Any, result: Any) -> None:
        """Log the allocation of each new tensor in the result of an operator.

        The sum of two gradients may allocate nothing: if nothing else uses the first gradient,
        autograd adds the second one to it in place. Fake tensors never do so. Therefore keep the
        sum as pending until the next operator, and check then whether the first gradient is freed.
        """
        if func is ADD and self._is_adding_gradients():
            first_gradient = args[0].untyped_storage()
            self._pending_sum = id(first_gradient), result
            return

        for tensor in _find_tensors(result):
            self._storage_number(tensor)  # logs the allocation if the storage is new

    def _is_adding_gradients(self) -> bool:
        """Return whether the addition that runs now is autograd's sum of two gradients.

        In the backward phase, autograd adds with gradients disabled, while a recomputed forward
        pass runs with gradients enabled.
        """
        return self.location.phase == "backward" and not torch.is_grad_enabled()

    def _describe_work(
        self, signature: _Signature, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> Work:
        """Return the work of one operator call: its dtype, shape, FLOPs and bytes."""
        phase = self.location.phase
        collective = _collective_name(signature.name)
        if collective is not None:
            num_bytes = max(bytes_of(value) for value in (*args, result))
            return Work(phase, collective, group=self._find_group(args), bytes=num_bytes)

        op = signature.name.removeprefix("aten::")
        inputs = _find_tensors(args)
        if op in MATMULS and "add" in op:
            # Keep the factors of addmm(summand, a, b). The summand may have another dtype.
            inputs = inputs[1:3]
        if op in VARLEN_OPS:
            shape, flops = _count_varlen_flops(op, args)
        else:
            # A trace of flex attention has the sliding window in `scale`; see `simulate_gpu`.
            window = int(kwargs.get("scale") or 0)
            shape, flops = _count_flops(op, inputs, window)
        return Work(
            phase,
            op=signature.name.replace("::", "."),
            dtype=_describe_dtype(inputs),
            shape=shape,
            flops=flops,
            bytes=_count_traffic(signature, args, kwargs, result),
        )

    def _find_group(self, args: Sequence[Any]) -> Group | None:
        """Find the process group of a collective in the arguments of its operator.

        The arguments contain the group as an object, or its name. Return None if the group is
        unknown.
        """
        for value in args:
            if isinstance(value, torch.ScriptObject):
                group = dist.ProcessGroup.unbox(value)
                if group is not None:
                    return self._groups.get(group.group_name)
        # The name of the group is the last string, after the name of a reduction, for example.
        names = [value for value in args if isinstance(value, str)]
        return self._groups.get(names[-1])

    def _storage_number(self, tensor: Tensor) -> int:
        """Return the index of a tensor's storage in `kinds`, `streams` and `_sizes`.

        The first call for a storage adds it to these lists, and logs the allocation.
        """
        storage = tensor.untyped_storage()
        if id(storage) in self._living:
            number, _ = self._living[id(storage)]
            return number

        number = len(self.kinds)
        self.kinds.append(_guess_kind(self.location))
        self.streams.append(self._stream)
        self._sizes.append(0)
        self._log_size(number, storage.nbytes())
        self._track(storage, number)
        return number

    def _track(self, storage: torch.UntypedStorage, number: int) -> None:
        """Register a callback that logs when a storage is freed."""
        # torch keeps the same Python object for a storage as long as the storage lives.
        identity = id(storage)
        reference = weakref.ref(storage, lambda _: self._handle_free(identity))
        self._living[identity] = number, reference

    def _handle_free(self, identity: int) -> None:
        """Log that a storage was freed.

        If it was the first gradient of a pending sum, a real step would add the second gradient in
        place. Then log nothing, and let the sum take over the number of the storage.

        Args:
            identity: `id` of the freed storage.
        """
        number, _ = self._living.pop(identity)
        if self._pending_sum is not None and self._pending_sum[0] == identity:
            # Autograd adds gradients in place if nothing else uses the first one, but never with
            # fake tensors. So let the sum take over the memory of the first gradient.
            _, result = self._pending_sum
            self._pending_sum = None
            self._track(result.untyped_storage(), number)
        else:
            self._log_size(number, 0)

    def _count_pending_sum(self) -> None:
        """Count the pending sum of two gradients, if there is one, as newly allocated memory.

        A sum is pending until it is known whether it reuses the memory of the first gradient. Call
        this if the first gradient is still in use, so that its memory cannot be reused.
        """
        if self._pending_sum is not None:
            _, result = self._pending_sum
            self._pending_sum = None
            self._storage_number(result)

    def _log_size(self, number: int, size: int) -> None:
        """Log the new size of a storage in bytes, if the size has changed."""
        change = size - self._sizes[number]
        if change:
            self.log.append((self.location, Allocation(number, change)))
            self._sizes[number] = size


def _guess_kind(location: Location) -> str:
    """Guess the kind of new memory from the part of the step that allocates it.

    Return "loss", "other" or "activations". Weights, gradients and optimizer state cannot be
    guessed, and get their kind by `Counter.mark`.
    """
    if location.phase == "forward" and location.name == "loss":
        return "loss"
    if location.phase == "optimizer" or location.name == "start":
        return "other"
    return "activations"


_active_counters: list[Counter] = []


def count_generated_kernel(num_bytes: int) -> None:
    """Count a compiler-generated kernel in the active counter, if there is one.

    Args:
        num_bytes: Bytes that the kernel reads and writes.
    """
    for counter in _active_counters:
        counter.add_generated_kernel(num_bytes)


@contextmanager
def pause_counters() -> Iterator[None]:
    """Do not count generated kernels within this context."""
    paused = list(_active_counters)
    _active_counters.clear()
    try:
        yield
    finally:
        _active_counters.extend(paused)


class _Signature(NamedTuple):
    """Properties of an operator that follow from its schema.

    Attributes:
        name: Name of the operator, such as "aten::mm".
        is_view: Whether the result may be a view of an argument.
        is_counted: Whether the operator is neither a view nor a profiler annotation.
        returns_new: Whether the operator allocates a result.
        arguments: Name of each argument, and how often its memory is accessed: 1 if it is read or
            written, 2 if both.
    """

    name: str
    is_view: bool
    is_counted: bool
    returns_new: bool
    arguments: tuple[tuple[str, int], ...]


@cache
def _signature(func: Any) -> _Signature:
    """Derive the properties of an operator from its schema."""
    name = func.name().split(".")[0]
    arguments = []
    for argument in func._schema.arguments:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        # The target of a copy and `out` arguments are not read.
        is_only_written = is_written and (argument.kwarg_only or name.endswith("copy_"))
        is_read = not is_only_written
        arguments.append((argument.name, is_read + is_written))
    is_counted = not func.is_view and not name.startswith(("prim::", "profiler::"))
    returns_new = any(value.alias_info is None for value in func._schema.returns)
    return _Signature(name, func.is_view, is_counted, returns_new, tuple(arguments))


@cache
def _collective_name(operator: str) -> str | None:
    """Return the collective that an operator performs, or None.

    For example, return "all_gather" for "c10d::_allgather_base_".
    """
    if not operator.startswith(("c10d::", "_c10d_functional::")):
        return None
    for name in COLLECTIVES:
        if name.replace("_", "") in operator.replace("_", ""):
            return name
    return None


def _describe_dtype(inputs: Sequence[Tensor]) -> str:
    """Return the dtype of the first floating-point input, or else of the first input.

    For example, "bfloat16". Without inputs, return "float32".
    """
    floating = [tensor for tensor in inputs if tensor.is_floating_point()]
    candidates = floating or inputs
    dtype = candidates[0].dtype if candidates else torch.float32
    return str(dtype).removeprefix("torch.")


def _count_traffic(
    signature: _Signature, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> int:
    """Return how many bytes of memory an operator reads and writes."""
    num_bytes = bytes_of(result) if signature.returns_new else 0
    for i, (name, num_passes) in enumerate(signature.arguments):
        value = args[i] if i < len(args) else None
        num_bytes += num_passes * bytes_of(kwargs.get(name, value))
    return num_bytes


def _count_flops(op: str, inputs: Sequence[Tensor], window: int) -> tuple[tuple[int, ...], int]:
    """Return the shape and the FLOPs of a matmul or an attention operator.

    The shape is (m, k, n) or (batch, heads, queries, keys, head_dim). Other operators have the
    shape () and 0 FLOPs.

    Args:
        op: Operator without "aten::", such as "mm".
        inputs: Tensor arguments, starting with the factors of a matmul.
        window: Sliding window of flex attention in tokens, or 0.
    """
    if op in MATMULS:
        a, b = inputs[:2]
        *outer, inner = a.shape
        shape = (math.prod(outer), inner, b.shape[-1])
        return shape, 2 * math.prod(shape)

    if "_scaled_dot_product" in op:
        is_backward = "backward" in op
        if is_backward:
            _grad_output, query, key, *_ = inputs
        else:
            query, key, *_ = inputs
        batch, heads, num_queries, head_dim = query.shape
        shape = (batch, heads, num_queries, key.shape[2], head_dim)
        return shape, _attention_flops(op, shape, window, is_backward)

    return (), 0


def _count_varlen_flops(op: str, args: Sequence[Any]) -> tuple[tuple[int, ...], int]:
    """Count the FLOPs of variable-length attention as if each sequence were one document.

    Args:
        op: "torch_attn::_varlen_attn", or its backward pass.
        args: Positional arguments of the call.

    Returns:
        (batch, heads, queries, keys, head_dim), and the number of FLOPs.
    """
    # The schemas of the two operators determine the indices of the arguments.
    is_backward = "backward" in op
    query = args[1 if is_backward else 0]  # (B * T, H, D)
    seq_len = args[8 if is_backward else 5]
    num_earlier, _ = args[13 if is_backward else 9]  # visible earlier tokens; -1 means all
    num_tokens, heads, head_dim = query.shape
    shape = (num_tokens // seq_len, heads, seq_len, seq_len, head_dim)
    return shape, _attention_flops(op, shape, num_earlier + 1, is_backward)


def _attention_flops(op: str, shape: tuple[int, ...], window: int, is_backward: bool) -> int:
    """Return the FLOPs of causal attention, without scores that the mask hides.

    Args:
        op: Operator without "aten::".
        shape: (batch, heads, queries, keys, head_dim).
        window: Sliding window of flex or variable-length attention in tokens, or 0.
        is_backward: Whether the operator is a backward pass.
    """
    # Without a mask, each matmul takes 2 FLOPs per element of `shape`. There are two matmuls in the
    # forward pass and five in the backward pass, which recomputes the scores.
    num_matmuls = 5 if is_backward else 2
    unmasked_flops = 2 * num_matmuls * math.prod(shape)
    num_queries, num_keys = shape[2:4]

    # The Q queries are the last of K tokens. The first one sees K - Q keys and the last one K, so
    # the average is K - Q / 2, a share of (2 K - Q) / (2 K).
    if op not in (*FLEX_OPS, *VARLEN_OPS):
        return unmasked_flops * (2 * num_keys - num_queries) // (2 * num_keys)

    # In flex attention, which context parallelism uses, the queries of a rank are spread over the
    # whole sequence. With a window W, the first W of K queries see W / 2 keys on average, and the
    # others see W keys. The average is a share of (2 K - W) * W / (2 K * K).
    window = min(window or num_keys, num_keys)
    return unmasked_flops * (2 * num_keys - window) * window // (2 * num_keys * num_keys)


def plain_tensors(tensor: Any) -> Iterator[Tensor]:
    """Yield the plain tensors inside a tensor subclass, such as the local shard of a DTensor.

    For a plain tensor, yield the tensor. For other values, yield nothing.
    """
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(tensor, name))
    elif isinstance(tensor, Tensor):  # not the mesh of a DTensor
        yield tensor


def _find_tensors(value: Any) -> list[Tensor]:
    """List the tensors in a value, which can be a tensor or nested lists and tuples.

    Any other value contains no tensors.
    """
    if isinstance(value, Tensor):
        return [value]
    if not isinstance(value, list | tuple):
        return []
    return [tensor for item in value for tensor in _find_tensors(item)]


def bytes_of(value: Any) -> int:
    """Return the total bytes of all tensors in a value, which can be nested lists and tuples."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _find_tensors(value))
