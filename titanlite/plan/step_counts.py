"""Run a training step under a `Counter` and add up its memory and work.

Microbatches are alike, so only some of them run, and the counts of one are repeated for the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.config.run import V_SHAPED, Run
from titanlite.data.batch import blank_microbatch
from titanlite.hooks.ema import Ema
from titanlite.hooks.hook import Hook
from titanlite.model.llama import Llama
from titanlite.optim.clip import StepSums, local_shard
from titanlite.parallel.forward_backward import PipelineForwardBackward
from titanlite.parallel.mesh import Mesh, get_world_group
from titanlite.parallel.parallelize import ShardedModel
from titanlite.plan.allocator import NEVER_FREED, CachingAllocator
from titanlite.plan.counter import (
    KINDS,
    MATMULS,
    OFFLOADED,
    START,
    Allocation,
    Counter,
    Group,
    Location,
    LogEntry,
    Work,
)
from titanlite.plan.override import override
from titanlite.train.step import TrainStep

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

DEVICE = torch.device("cpu")  # torch without CUDA cannot run a backward pass on fake CUDA tensors
MIN_MICROBATCHES = 6  # a pipeline with fewer microbatches runs all of them
OFFLOAD_STREAM = -1  # FSDP2 stream in which gradients wait to be copied to the CPU

# Method of a pipeline stage -> phase of the training step
PIPELINE_ACTIONS = {
    "forward_one_chunk": "forward",
    "backward_one_chunk": "backward",
    "backward_weight_one_chunk": "backward",
    "get_fwd_send_ops": "forward",
    "get_bwd_send_ops": "backward",
}
# Methods of a pipeline stage that torch calls between an action and its communication. In torch
# 2.15 they allocate the tensors to receive.
PIPELINE_RECEIVES = ("get_fwd_recv_ops", "get_bwd_recv_ops")
# Before the first step, pipeline ranks vote on whether they know the shapes of the tensors to
# receive. These replacements for the vote methods of a pipeline stage act as if all ranks agreed.
# torch reads the result as a tensor: `vote.item()` is 1 if all ranks agree.
UNANIMOUS_SHAPE_VOTE: dict[str, Callable[..., Any]] = {
    "_warmup_forward_vote": lambda *_, **__: None,
    "_warmup_backward_result": lambda *_, **__: SimpleNamespace(item=lambda: 1),
}


class StepCounts(NamedTuple):
    """Memory and work of one training step on one rank.

    Attributes:
        peaks: For each location in the step, the bytes of each of `KINDS` when GPU memory is at its
            peak there.
        stream_peaks: Peak bytes of GPU memory by (CUDA stream, location). The CPU memory that CPU
            offload uses counts as the stream `OFFLOADED`.
        work: Number of calls, FLOPs and bytes of each kind of work (`Work.kind`).
        reserved: Bytes that the caching allocator of a GPU reserves, or None if its allocations
            were not simulated: with pipeline parallelism, or if not all blocks ran.
    """

    peaks: dict[Location, np.ndarray]
    stream_peaks: dict[tuple[int | str, Location], int]
    work: dict[Work, np.ndarray]
    reserved: int | None


def count_step(
    run: Run,
    mesh: Mesh,
    sharded: ShardedModel,
    train_step: TrainStep,
) -> StepCounts:
    """Run two training steps and count the memory and work of the second one.

    The first step only allocates memory that persists, such as optimizer state. Similar
    microbatches are skipped, and the counts of a microbatch that runs are repeated for them.
    Tensors may be real or fake.

    Args:
        run: The validated job and the number of ranks.
        mesh: Layout of the ranks.
        sharded: This rank's part of the model.
        train_step: Training step of the model.
    """
    counter = Counter(_describe_groups(mesh))
    allocator = CachingAllocator()
    skipped = _skippable_microbatches(run)
    with counter.watching():
        _run_steps(counter, allocator, run, sharded, train_step, skipped)

    has_pipeline = run.degrees.pipeline > 1
    work = _add_up_work(counter.log)
    if skipped and not has_pipeline:  # a pipeline logs skipped microbatches during the step
        # Microbatches 0, 1 and the last one ran. The skipped ones do the same work as microbatch 1.
        _first_start, second_start, last_start = counter.forward_starts
        work_of_second = _add_up_work(counter.log[second_start:last_start])
        for kind, amounts in work_of_second.items():
            work[kind] += len(skipped) * amounts

    stream_peaks = _find_stream_peaks(counter.log)
    if run.job.training.enable_cpu_offload:
        # The counter counts all gradients as CPU memory. However, FSDP2 computes each gradient on
        # the GPU and copies them to the CPU one at a time. So the largest gradient also needs GPU
        # memory, as much as its parameter.
        parameters = train_step.model.parameters()
        num_bytes = max(local_shard(parameter).nbytes for parameter in parameters)
        stream_peaks[OFFLOAD_STREAM, Location("backward", "end")] = num_bytes
        allocator.allocate(NEVER_FREED, num_bytes, OFFLOAD_STREAM)

    return StepCounts(
        peaks=_find_peaks(counter.log),
        stream_peaks=stream_peaks,
        work=work,
        reserved=None if has_pipeline else allocator.reserved,
    )


def _run_steps(
    counter: Counter,
    allocator: CachingAllocator,
    run: Run,
    sharded: ShardedModel,
    train_step: TrainStep,
    skipped: range,
) -> None:
    """Run two training steps on blank microbatches, so that `counter` logs the second one.

    Args:
        counter: Counter that is watching.
        allocator: Simulated allocator that replays the allocations of both steps. With a pipeline
            it is unused, because the log repeats the entries of a microbatch in another order.
        run: The validated job and the number of ranks.
        sharded: This rank's part of the model.
        train_step: Training step of the model.
        skipped: Indices of the microbatches that do not run in the second step.
    """
    learning_rate = run.job.optimizer.lr
    microbatches = [blank_microbatch(run.job, DEVICE) for _ in range(run.microbatches)]

    follower = StepFollower(counter, sharded, train_step, run)
    hooks: list[Hook] = [follower]
    if run.job.ema.decay:
        ema = Ema(run.job.ema.decay)
        ema.follow(train_step.model)
        counter.label(ema.tensors().values(), follower.state_kind)
        hooks.append(ema)

    if run.degrees.pipeline > 1:
        assert isinstance(train_step.forward_backward, PipelineForwardBackward)
        stages = train_step.forward_backward.pipeline_stages
        skipped_at_first = range(run.microbatches - 1) if skipped else range(0)
        for skipped_now in (skipped_at_first, skipped):
            counter.begin()
            with _skip_microbatches(counter, stages, skipped_now):
                train_step(microbatches, 1, learning_rate, hooks)
        return

    # The first step needs only one microbatch to allocate memory that persists.
    remaining = [microbatch for i, microbatch in enumerate(microbatches) if i not in skipped]
    for microbatches_now in (microbatches[-1:], remaining):
        counter.begin()
        train_step(microbatches_now, 1, learning_rate, hooks)
        _replay_allocations(counter.log, allocator)


def _skippable_microbatches(run: Run) -> range:
    """Return the indices of microbatches that need not run, because an earlier one is equivalent.

    Equivalent microbatches need the same memory and work. The first two microbatches (three with a
    pipeline) and the last one always run, because some memory of a microbatch is freed only while
    the next one runs. For example, a run with microbatches 0 to 7 and no pipeline can skip
    microbatches 2 to 6. Return an empty range if all microbatches must run.
    """
    if run.degrees.pipeline == 1:
        return range(2, run.microbatches - 1)
    if run.microbatches < MIN_MICROBATCHES or not _has_equal_microbatches(run):
        return range(0)
    return range(3, run.microbatches - 1)


def _has_equal_microbatches(run: Run) -> bool:
    """Return whether all microbatches need the same memory and work within a pipeline stage.

    If so, a trace can run a few microbatches and skip the others.
    """
    # In a V-shaped schedule, stages on one rank hand their results to each other.
    is_v_shaped = run.job.parallelism.pipeline_parallel_schedule in V_SHAPED
    # With many stages on a rank, torch unshards and reshards some while others run.
    has_many_stages = len(run.stages) > 3 * run.degrees.pipeline
    # If stages reshard after each forward pass, a backward pass gathers its weights unless it
    # directly follows another backward pass.
    reshards = run.job.parallelism.fsdp_reshard_after_forward == "always"
    return not (is_v_shaped or has_many_stages or reshards)


def _describe_groups(mesh: Mesh) -> dict[str, Group]:
    """Describe the process groups of a mesh by name, size and span.

    Returns:
        Description of each group, by its group name in torch.
    """
    descriptions = {}
    for group, name in _name_groups(mesh).items():
        ranks = dist.get_process_group_ranks(group)
        span = max(ranks) - min(ranks) + 1  # to decide whether the group fits into one node
        descriptions[group.group_name] = Group(name, len(ranks), span)
    return descriptions


def _name_groups(mesh: Mesh) -> dict[dist.ProcessGroup, str]:
    """Return the name of each process group of a mesh, such as "fsdp", "tensor" or "world".

    A group with several roles gets only one name. For example, if a job uses only FSDP, the group
    of all ranks is also the FSDP group, and its name is "fsdp".
    """
    # The order matters: the last name of a group replaces its other names.
    names: dict[dist.ProcessGroup, str] = {}
    names[mesh.stage_group] = "stage"  # ranks with the same pipeline stages
    names[mesh.loss_group] = "loss"  # ranks whose losses add up
    names[get_world_group()] = "world"
    names[mesh.data_group] = "data"  # ranks that read different data

    # Dimensions that the job does not use have no mesh.
    submeshes = {"pipeline": mesh.pipeline, "context": mesh.context, "tensor": mesh.tensor}
    for name, submesh in submeshes.items():
        if submesh is not None:
            names[submesh.get_group()] = name

    if mesh.degrees.replicate > 1:  # HSDP
        names[mesh.fsdp.get_group("dp_replicate")] = "replicate"
    names[mesh.fsdp.get_group("dp_shard")] = "fsdp"
    return names


def _add_up_work(log: Iterable[LogEntry]) -> dict[Work, np.ndarray]:
    """Add up the work in a part of the log of a step.

    Returns:
        Number of calls, FLOPs and bytes of each kind of work (`Work.kind`).
    """
    totals: dict[Work, np.ndarray] = {}
    for _location, entry in log:
        if isinstance(entry, Work):
            totals[entry.kind] = totals.get(entry.kind, 0) + np.array(entry.amounts)
    return totals


def _find_peaks(log: Iterable[LogEntry]) -> dict[Location, np.ndarray]:
    """Find the peak of the GPU memory at each location, such as the forward pass of the blocks.

    Args:
        log: Log of a step.

    Returns:
        For each location, the bytes of each of `KINDS` when GPU memory is at its peak there.
    """
    peaks: dict[Location, list[int]] = {}
    for location, sizes in _follow_gpu_memory(log):
        if sum(sizes) > sum(peaks.get(location, [])):
            peaks[location] = sizes
    return {location: np.array(sizes) for location, sizes in peaks.items()}


def _follow_gpu_memory(log: Iterable[LogEntry]) -> Iterator[tuple[Location, list[int]]]:
    """Yield the GPU memory in use after each allocation in the log of a step.

    Yields:
        Location of the allocation in the step, and the bytes in use of each of `KINDS`.
    """
    allocated: dict[str, int] = dict.fromkeys((*KINDS, OFFLOADED), 0)  # bytes by kind
    for location, entry in log:
        if isinstance(entry, Allocation):
            allocated[entry.storage.kind] += entry.change
            if entry.change > 0:
                yield location, [allocated[kind] for kind in KINDS]


def _find_stream_peaks(log: Iterable[LogEntry]) -> dict[tuple[int | str, Location], int]:
    """Find the peak of the memory in each CUDA stream, at each location of a step.

    Returns:
        Largest number of bytes that were allocated in a stream, by (stream, location). CPU memory
        that CPU offload uses counts as the stream `OFFLOADED`.
    """
    allocated = defaultdict[int | str, int](int)
    peaks = defaultdict[tuple[int | str, Location], int](int)
    for location, entry in log:
        if isinstance(entry, Allocation):
            storage = entry.storage
            stream = OFFLOADED if storage.kind == OFFLOADED else storage.stream
            allocated[stream] += entry.change
            peaks[stream, location] = max(peaks[stream, location], allocated[stream])
    return peaks


def _replay_allocations(log: Iterable[LogEntry], allocator: CachingAllocator) -> None:
    """Replay the allocations of a step on a simulated allocator, which predicts reserved memory."""
    for location, entry in log:
        if isinstance(entry, Work):
            if entry.op in MATMULS:
                allocator.run_matmul()
            continue

        storage, num_bytes = entry
        if storage.kind == OFFLOADED:
            continue
        # The log starts with existing storages. Most of them were allocated in the previous step.
        is_allocated = location == START and allocator.holds(storage)
        if num_bytes < 0:
            allocator.free(storage)
        elif num_bytes > 0 and not is_allocated:
            allocator.allocate(storage, num_bytes, storage.stream)


class StepFollower(Hook):
    """Hook that reports to a `Counter` which part of the training step is running.

    The counter logs memory and work at this location. The hook also labels the memory of weights,
    gradients and optimizer state. It neither changes tensors nor keeps them alive.

    Attributes:
        state_kind: Label of the memory of the optimizer state.
    """

    def __init__(
        self, counter: Counter, sharded: ShardedModel, train_step: TrainStep, run: Run
    ) -> None:
        """Label the memory of weights and optimizer state, and register hooks in the model.

        Args:
            counter: Counter of the step.
            sharded: This rank's part of the model.
            train_step: Training step of the model. Its loss function is wrapped.
            run: The validated job and the number of ranks.
        """
        self._counter = counter
        self._train_step = train_step
        is_offloaded = run.job.training.enable_cpu_offload
        self._gradient_kind = OFFLOADED if is_offloaded else "gradients"
        self.state_kind = OFFLOADED if is_offloaded else "optimizer state"
        # Label weights before they get FP8 scales. Afterwards, torchao would read the value of the
        # scale, which a fake tensor does not have.
        counter.label(train_step.model.parameters(), OFFLOADED if is_offloaded else "weights")
        self._label_state()
        for stage, module in sharded.stages.items():
            _add_stage_hooks(counter, stage, module)
        _wrap_loss(counter, train_step, last_stage=max(sharded.stages))
        if train_step.forward_backward.offloaded_gradients is not None:
            # FSDP copies the gradients of each microbatch to the CPU.
            _add_gradient_hooks(counter, train_step.model.parameters(), OFFLOADED, overwrite=True)

    def gradients(self, step: int) -> None:
        """Label the memory of the gradients, and set the location in the step to "gradient norm".

        The trainer calls this after the backward pass, before it clips the gradients.
        """
        gradients = [parameter.grad for parameter in self._train_step.model.parameters()]
        self._counter.label(gradients, self._gradient_kind)
        self._counter.location = Location("optimizer", "gradient norm")

    def before_update(self, step: int, sums: StepSums, skip: Tensor) -> None:
        """Set the location in the step to "optimizer", because the optimizer update runs next."""
        self._counter.location = Location("optimizer", "optimizer")

    def updated(self, step: int) -> None:
        """Label the memory of new optimizer state, and set the location in the step to "end"."""
        self._label_state()
        self._counter.location = Location("optimizer", "end")

    def _label_state(self) -> None:
        """Label the memory of all current optimizer state."""
        for state in self._train_step.optimizer.state.values():
            self._counter.label(state.values(), self.state_kind)


def _add_stage_hooks(counter: Counter, stage: int, module: Llama) -> None:
    """Register hooks so that each part of a pipeline stage is counted at a separate location.

    The counter logs memory and work at its current location, which the hooks set when a part starts
    its forward or backward pass.

    Args:
        counter: Counter of the step.
        stage: Index of the pipeline stage.
        module: Part of the model in this stage.
    """
    _add_start_hook(counter, stage, module)
    for name, part in _list_parts(module):
        _add_location_hooks(counter, part, Location("forward", name, stage))
        _label_parameters_and_gradients(counter, part)
    # The loss function calls the output layer, so its work is counted at the location "loss".
    if module.output is not None:
        _label_parameters_and_gradients(counter, module.output)


def _add_start_hook(counter: Counter, stage: int, module: Llama) -> None:
    """Register a hook that runs when the forward pass of a pipeline stage starts.

    It stores the start in `counter.forward_starts`, and sets the location of operators that run
    before the first part of the stage.
    """

    def start_forward(*_: Any) -> None:
        counter.forward_starts.append(len(counter.log))
        counter.location = _get_location_outside_parts(stage)

    module.register_forward_pre_hook(start_forward, prepend=True)


def _get_location_outside_parts(stage: int) -> Location:
    """Return the location for forward operators outside the layers of a pipeline stage.

    For example, operators that compute the attention mask are outside the embedding, blocks and
    norm.
    """
    return Location(phase="forward", name="forward", stage=stage)


def _list_parts(module: Llama) -> list[tuple[str, nn.Module]]:
    """List the parts of a pipeline stage to count separately, as (name, part) pairs."""
    blocks = [("block", block) for block in module.layers.values()]
    parts = [("embedding", module.tok_embeddings), *blocks, ("norm", module.norm)]
    # Some stages have no embedding or no norm.
    return [(name, part) for name, part in parts if part is not None]


def _label_parameters_and_gradients(counter: Counter, part: nn.Module) -> None:
    """Register hooks that label the memory of the parameters and gradients of a module.

    The labels are "unsharded parameters" and "gradients". FSDP gathers the unsharded parameters
    before the forward pass if they are not in memory yet. Memory that was labeled before keeps its
    label. Without FSDP, for example, parameters remain "weights".
    """

    def label_parameters(module: nn.Module, _inputs: Any) -> None:
        counter.label(module.parameters(), "unsharded parameters", overwrite=False)

    def add_gradient_hooks(module: nn.Module) -> None:
        _add_gradient_hooks(counter, module.parameters(), "gradients", overwrite=False)

    part.register_forward_pre_hook(label_parameters)
    # FSDP creates the unsharded parameters before the first forward pass, and then keeps them.
    _call_at_first_forward(part, add_gradient_hooks)


def _call_at_first_forward(part: nn.Module, function: Callable[[nn.Module], None]) -> None:
    """Call `function(part)` once, when the first forward pass of a module starts."""

    def call_once(module: nn.Module, _inputs: Any) -> None:
        hook.remove()
        function(module)

    hook = part.register_forward_pre_hook(call_once)


def _add_gradient_hooks(
    counter: Counter, parameters: Iterable[nn.Parameter], kind: str, overwrite: bool
) -> None:
    """Register hooks that label the memory of each gradient when autograd stores it in `.grad`.

    Args:
        counter: Counter of the step.
        parameters: Sharded or unsharded parameters. Those that get no `.grad` are ignored: frozen
            parameters, and weights that were cast to another dtype for the forward pass.
        kind: Kind of memory of the gradients.
        overwrite: Also relabel gradients whose memory has a label.
    """

    def label_gradient(parameter: Tensor) -> None:
        counter.label([parameter.grad], kind, overwrite)

    for parameter in parameters:
        if parameter.is_leaf and parameter.requires_grad:  # a copy of a weight is not a leaf
            parameter.register_post_accumulate_grad_hook(label_gradient)


def _add_location_hooks(counter: Counter, part: nn.Module, location: Location) -> None:
    """Register hooks that set the location when a module starts its forward or backward pass.

    Args:
        counter: Counter whose location is set.
        part: A module of the model.
        location: Location of its forward pass.
    """

    def start_forward(*_: Any) -> None:
        counter.location = location

    def end_forward(_module: nn.Module, _inputs: Any, result: Tensor) -> None:
        _add_backward_hook(counter, result, location)

    part.register_forward_pre_hook(start_forward, prepend=True)
    part.register_forward_hook(end_forward, prepend=True)


def _add_backward_hook(counter: Counter, result: Tensor, location: Location) -> None:
    """Register a hook that sets the location when a module starts its backward pass.

    Args:
        counter: Counter whose location is set.
        result: Result of the module. Its backward pass starts with the gradient of the result.
        location: Location of the forward pass of the module.
    """

    def start_backward(_gradient: Tensor) -> None:
        counter.location = location._replace(phase="backward")

    if result.requires_grad:
        result.register_hook(start_backward)


def _wrap_loss(counter: Counter, train_step: TrainStep, last_stage: int) -> None:
    """Wrap the loss function of a training step, so that its memory and work count as "loss".

    The counter logs memory and work at its current location. The wrapper changes this location
    while the loss function runs.

    Args:
        counter: Counter of the step.
        train_step: Training step whose loss function is replaced.
        last_stage: Index of the pipeline stage that computes the loss.
    """
    compute_loss = train_step.forward_backward.loss_fn
    loss_location = Location("forward", "loss", last_stage)

    def compute_counted_loss(
        hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor
    ) -> Tensor:
        counter.label([scale], "loss")  # it was allocated before, outside the loss function
        counter.location = loss_location
        loss = compute_loss(hidden, weight, labels, scale)
        _add_backward_hook(counter, loss, loss_location)
        counter.location = _get_location_outside_parts(last_stage)
        return loss

    train_step.forward_backward.loss_fn = compute_counted_loss


@contextmanager
def _skip_microbatches(
    counter: Counter, stages: Sequence[PipelineStage], skipped: range
) -> Iterator[None]:
    """Skip some microbatches of a pipeline within this context, but log them as if they ran.

    All microbatches need the same memory and work. For example, to skip the forward pass of a
    microbatch, append the log entries of the last forward pass that ran to the log again.

    Args:
        counter: Counter of the step.
        stages: Pipeline stages of this rank.
        skipped: Indices of the skipped microbatches.
    """
    skipper = _MicrobatchSkipper(counter, skipped)
    with ExitStack() as stack:
        for stage in stages:
            replacements = skipper.make_replacements(stage)
            stack.enter_context(override(stage, **replacements))
        yield


@dataclass
class _MicrobatchSkipper:
    """Replaces methods of pipeline stages to skip some microbatches, but log all of them.

    A replacement calls the original method and records the log entries. For a skipped microbatch,
    it instead appends the latest recording to the log and returns a placeholder.

    Attributes:
        counter: Counter of the step.
        skipped: Indices of the skipped microbatches.
        last_loss: Loss of the last microbatch that ran, or 0 before the first one. It is also the
            loss of skipped microbatches.
        recordings: Latest recording of each original method.
    """

    counter: Counter
    skipped: range
    last_loss: Tensor = field(default_factory=lambda: torch.zeros(()))
    recordings: dict[Callable[..., Any], list[LogEntry]] = field(default_factory=dict)

    def make_replacements(self, stage: PipelineStage) -> dict[str, Callable[..., Any]]:
        """Return replacements for methods of a pipeline stage, by name of the method."""
        # Other ranks do not exist, so they cannot vote.
        replacements = dict(UNANIMOUS_SHAPE_VOTE)
        for name in PIPELINE_ACTIONS:
            action = _Action(stage, name, getattr(stage, name))
            replacements[name] = partial(self._run_or_repeat, action)
        for name in PIPELINE_RECEIVES:
            replacements[name] = partial(self._run_receive, getattr(stage, name))
        return replacements

    def _run_or_repeat(self, action: _Action, microbatch: int, *args: Any, **kwargs: Any) -> Any:
        """Run an action for a microbatch, or repeat its log entries if the microbatch is skipped.

        To repeat them, log again the entries of the last microbatch for which the action ran.
        """
        self.counter.location = action.location
        if microbatch in self.skipped:
            return self._repeat(action)
        return self._run_and_record(action, microbatch, *args, **kwargs)

    def _run_and_record(self, action: _Action, *args: Any, **kwargs: Any) -> Any:
        """Run an action and record its log entries, so that they can be repeated later.

        The counter appends new entries to both its log and `counter.recording`. The recording ends
        when the next action starts, so it includes the communication after this action.
        """
        self.recordings[action.method] = []
        self.counter.recording = self.recordings[action.method]
        result = action.method(*args, **kwargs)
        if action.returns_loss:
            self.last_loss = result.detach()
        return result

    def _repeat(self, action: _Action) -> Any:
        """Log the latest recording of an action again, and return a placeholder for its result."""
        self.counter.recording = None  # the previous action has ended
        self._log_recording(action.method)
        if action.returns_loss:
            return self.last_loss
        if action.name.endswith("send_ops"):
            return []  # there is nothing to send
        return None  # torch does not use the results of the other actions

    def _run_receive(self, method: Callable[..., Any], microbatch: int) -> list[Any]:
        """Return the operations that receive a microbatch, or an empty list if it is skipped.

        torch calls `method` between two actions, and it may allocate the tensors to receive. Record
        these allocations separately, and then continue the recording of the previous action.

        Args:
            method: The original method, one of `PIPELINE_RECEIVES`.
            microbatch: Index of the microbatch.
        """
        if microbatch in self.skipped:
            self._log_recording(method)
            return []

        self.recordings[method] = []
        with override(self.counter, recording=self.recordings[method]):
            return method(microbatch)

    def _log_recording(self, method: Callable[..., Any]) -> None:
        """Append the latest recording of a method to the log again."""
        self.counter.log += self.recordings.get(method, [])


class _Action(NamedTuple):
    """A method of a pipeline stage that computes or sends a microbatch.

    Attributes:
        stage: The pipeline stage.
        name: Name of the method, one of `PIPELINE_ACTIONS`.
        method: The original method.
    """

    stage: PipelineStage
    name: str
    method: Callable[..., Any]

    @property
    def location(self) -> Location:
        """Return the location of the memory and work of this action."""
        return Location(PIPELINE_ACTIONS[self.name], "stage", self.stage.stage_index)

    @property
    def returns_loss(self) -> bool:
        """Return whether this action returns the loss of a microbatch."""
        return self.name == "forward_one_chunk" and self.stage.is_last
