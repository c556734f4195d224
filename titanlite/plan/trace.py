"""Trace one optimizer step of the trainer on fake tensors, which have shapes but no data.

Invariant: A trace runs the same code as training, from `build_mesh` to the optimizer. Blocks are
alike, so only a few of them run, and the counts are extrapolated to all blocks.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, product
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import record_function

from titanlite.config.run import V_SHAPED, Run, with_keys
from titanlite.observe.gpus import Gpu
from titanlite.parallel import float8
from titanlite.parallel.memory_savers import SMALL_MODEL_GROUPS
from titanlite.parallel.mesh import Mesh, build_mesh
from titanlite.parallel.parallelize import ShardedModel, build_model
from titanlite.plan.allocator import CUBLAS_WORKSPACES
from titanlite.plan.compiled import simulate_compiler
from titanlite.plan.counter import KINDS, OFFLOADED, Location, Work
from titanlite.plan.override import override
from titanlite.plan.simulate import simulate_gpu, simulate_mxfp8, simulate_ranks
from titanlite.plan.step_counts import DEVICE, StepCounts, count_step
from titanlite.train.step import TrainStep

# Fragmentation wastes about as much memory as the largest tensors use, such as the gradient of the
# output matrix. In a small model, that can be 10% of the memory, so all blocks of a small model run
# and their allocations are replayed. For larger models, a constant fraction is accurate enough.
MAX_REPLAYED_BLOCKS = 40
FRAGMENTATION = 0.01

Apply = Callable[..., Iterable[Any]]
"""Function that runs traces: `map`, or the `map` method of a process pool for parallel traces."""


@dataclass(frozen=True)
class RankTrace:
    """Memory and work of one optimizer step on one rank, independent of the speed of any hardware.

    Attributes:
        rank: The traced rank, which represents all ranks with similar pipeline stages.
        peak: Peak GPU memory in bytes.
        moment: Part of the step with the peak, such as "backward of a block" or "optimizer".
        kinds: Bytes of each kind of memory, such as "weights", at the peak.
        cpu_peak: Peak CPU memory in bytes that CPU offload uses for weights, gradients and
            optimizer state.
        work: All kernels and collectives.
        reserved: Bytes that the torch allocator reserves on a GPU, including cuBLAS workspaces.
            Not used on a CPU.
    """

    rank: int
    peak: int
    moment: str
    kinds: Mapping[str, int]
    cpu_peak: int
    work: tuple[Work, ...]
    reserved: int


def trace_run(
    run: Run,
    gpu: Gpu | None = None,
    map_function: Apply = map,
) -> tuple[RankTrace, ...]:
    """Trace one optimizer step on each kind of pipeline rank.

    Ranks are of the same kind if their pipeline stages are alike, so one of them represents the
    others. Call this in a process without a process group.

    Args:
        run: The validated job and the number of ranks. Neither data nor GPUs are needed.
        gpu: The GPU of each rank. None means a CPU.
        map_function: `map`, or the `map` method of a process pool to trace in parallel.

    Returns:
        One trace per kind of pipeline rank.

    Raises:
        UserError: If the job computes in MXFP8 and the GPU does not support it.
    """
    # Disable options that need a real GPU, and resolve "auto" values that depend on the device.
    needs_gpu = ("enable_async_tensor_parallel", "enable_fsdp_symmetric_memory")
    run = with_keys(run, {f"parallelism.{key}": False for key in needs_gpu})
    on_gpu = gpu is not None and not gpu.cpu
    run = run.resolve_compute_dtype(on_gpu).resolve_attention_backend(on_gpu)

    # Check whether the device supports the FP8 recipe of the job.
    float8_config = run.job.float8
    recipe = float8_config.recipe_name
    has_float8 = gpu is not None and float8.is_supported(recipe, gpu.capability, gpu.fp8 > 0)
    needs_mxfp8 = float8_config.enable and recipe == "mxfp8"
    if gpu is not None and on_gpu and needs_mxfp8 and not float8_config.emulate:
        float8.check_mxfp8_gpu(gpu.name, gpu.capability, has_float8=gpu.fp8 > 0)

    if run.job.model.uses_document_bounds:
        # This import registers an operator that activation checkpointing looks up.
        importlib.import_module("torch.nn.attention.varlen")

    # Choose the blocks to run. On a GPU, run all blocks of a small model; see
    # `MAX_REPLAYED_BLOCKS`.
    is_small = run.degrees.pipeline == 1 and run.arch.n_layers <= MAX_REPLAYED_BLOCKS
    num_removed = 0 if on_gpu and is_small else _count_removable_blocks(run)

    # Count the work of each rank in a short model, and again in a model with one more block in each
    # pipeline stage. The difference is the cost of these blocks.
    ranks = _choose_ranks(run)
    runs = [_remove_blocks(run, num_removed)]
    if num_removed:
        runs.append(_remove_blocks(run, num_removed - 1))
    count_rank = partial(_count_rank, on_gpu=on_gpu, has_float8=has_float8)
    # `product` lists all ranks of the short model first, and then all ranks of the longer model.
    shortened_runs, traced_ranks = zip(*product(runs, ranks), strict=True)
    results = list(map_function(count_rank, shortened_runs, traced_ranks))

    # The counts of ranks[i] are results[i] and, for the longer model, results[len(ranks) + i].
    traces = []
    for i, rank in enumerate(ranks):
        counts = results[i]
        if num_removed:
            longer_counts = results[len(ranks) + i]
            counts = _extrapolate(counts, longer_counts, num_removed)
        traces.append(_summarize(rank, counts))
    return tuple(traces)


def _choose_ranks(run: Run) -> list[int]:
    """Choose the ranks to trace: one rank for each result of `_choose_pipeline_ranks`.

    All ranks at the same position in the pipeline do the same work, so one represents the others.
    """
    # Consecutive ranks have the same pipeline stages.
    group_size = run.world_size // run.degrees.pipeline
    return [pipeline_rank * group_size for pipeline_rank in _choose_pipeline_ranks(run)]


def _choose_pipeline_ranks(run: Run) -> Iterable[int]:
    """Choose the pipeline ranks to trace: the first of each kind, or all in V-shaped schedules.

    Pipeline ranks are of the same kind if their stages do the same work. The first of a kind needs
    the most memory: in an early stage, a microbatch waits longer for its backward pass, so the
    activations of more microbatches are in memory at the same time.
    """
    pipeline_ranks = range(run.degrees.pipeline)
    if run.job.parallelism.pipeline_parallel_schedule in V_SHAPED:
        return pipeline_ranks  # each rank has an early and a late stage, so any can need the most

    first_of_kind: dict[Hashable, int] = {}
    for pipeline_rank in pipeline_ranks:
        first_of_kind.setdefault(_describe_stages(run, pipeline_rank), pipeline_rank)
    return first_of_kind.values()


def _describe_stages(run: Run, pipeline_rank: int) -> Hashable:
    """Describe the stages of a pipeline rank, to find ranks that do the same work in a step.

    The schedule must not be V-shaped, because such a schedule assigns stages in another order.

    Returns:
        (has_embedding, has_output, full_attention). The last item is a tuple with one tuple per
        stage, which contains for each block whether it has full attention.
    """
    num_pipeline_ranks = run.degrees.pipeline
    has_embedding = pipeline_rank == 0
    has_output = pipeline_rank == num_pipeline_ranks - 1
    stages = run.stages[pipeline_rank::num_pipeline_ranks]  # round-robin, as in `stage_rank`
    full_attention = tuple(tuple(map(run.arch.is_full_attention, blocks)) for blocks in stages)
    return has_embedding, has_output, full_attention


def _count_removable_blocks(run: Run) -> int:
    """Return how many blocks a trace can remove from each pipeline stage to save time.

    The memory and work of the full model are then extrapolated exactly from the smaller model.
    Return 0 if this is impossible.
    """
    # In a pipeline stage that stays unsharded, each block adds the same memory and work, so one is
    # enough. If FSDP unshards one block at a time, two neighbors are in memory together, so keep
    # two blocks at each end of the stage, where memory use differs from the middle.
    reshards = run.job.parallelism.fsdp_reshard_after_forward == "always"
    num_kept = 1 if run.degrees.pipeline > 1 and not reshards else 4
    if not _has_equal_blocks(run) or _may_shard_differently(run, num_kept):
        return 0
    smallest_stage = min(len(blocks) for blocks in run.stages)
    return max(0, smallest_stage - num_kept)


def _has_equal_blocks(run: Run) -> bool:
    """Return whether all blocks of a rank use the same amount of memory and compute."""
    checkpointing = run.job.activation_checkpoint
    recomputes_some_blocks = (
        checkpointing.mode == "selective" and checkpointing.selective_ac_option != "op"
    )
    has_windows_in_some_blocks = run.arch.full_attention_interval > 0
    is_muon = run.job.optimizer.name == "Muon"  # assigns each matrix to one rank
    return not (recomputes_some_blocks or has_windows_in_some_blocks or is_muon)


def _may_shard_differently(run: Run, num_blocks: int) -> bool:
    """Return whether FSDP may shard a model with few blocks differently from the full model.

    If so, the counts of the full model cannot be extrapolated from the smaller model. In case of
    doubt, return True, because a trace of the full model is exact.

    Args:
        run: The validated job of the full model, and the number of ranks.
        num_blocks: Number of blocks of the smaller model.
    """
    min_group_params = run.job.parallelism.fsdp_min_num_params
    # An architecture plugin may overestimate `block_matrices`, so assume half of it.
    block_params = run.arch.block_matrices / 2

    # FSDP may combine several small blocks into one group.
    if block_params < min_group_params:
        return True

    # With one shard, FSDP may keep the blocks of a small model unsharded until the backward pass.
    has_one_shard = run.degrees.shard * run.degrees.context == 1
    model_params = num_blocks * block_params
    is_small_model = model_params < SMALL_MODEL_GROUPS * min_group_params
    return has_one_shard and is_small_model


def _remove_blocks(run: Run, num_removed: int) -> Run:
    """Return a copy of a run whose model has `num_removed` fewer blocks in each pipeline stage."""
    if not num_removed:
        return run
    stage_ends = list(accumulate(len(blocks) - num_removed for blocks in run.stages))
    *split_ends, num_layers = stage_ends
    split_points = tuple(f"layers.{end}" for end in split_ends)
    settings = {
        "model.n_layers": num_layers,
        "parallelism.pipeline_parallel_split_points": split_points,
        # "auto" depends on the size of the model, so keep the choice for the full model.
        "parallelism.fsdp_reduce": run.fsdp_reduce,
    }
    return with_keys(run, settings)


def _count_rank(run: Run, rank: int, on_gpu: bool, has_float8: bool) -> StepCounts:
    """Run a training step of a simulated rank on fake tensors and count its memory and work.

    The fake tensors are on a CPU (`DEVICE`), even if a GPU is simulated.

    Args:
        run: The validated job and the number of ranks.
        rank: Rank to simulate.
        on_gpu: Whether the rank has a GPU.
        has_float8: Whether the GPU supports the FP8 recipe of the job.
    """
    with _simulate_rank(run, rank, on_gpu):
        mesh = build_mesh(run.degrees, DEVICE.type)
        # AdamW8bit reads the values of constants that its constructor creates. Fake tensors have no
        # values, so create the optimizer outside the fake mode and allow real inputs.
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        sharded = _build_fake_model(run, mesh, has_float8, fake_mode)
        train_step = TrainStep(run, mesh, sharded, DEVICE)
        with fake_mode:
            return count_step(run, mesh, sharded, train_step)


def _build_fake_model(
    run: Run, mesh: Mesh, has_float8: bool, fake_mode: FakeTensorMode
) -> ShardedModel:
    """Build this rank's part of the model with fake weights, which have no data.

    As in training, first build the model on the meta device, and then allocate the weights.
    """
    meta = torch.device("meta")
    sharded = build_model(run, mesh, meta, log=lambda _: None, has_float8=has_float8)
    with fake_mode:
        sharded.whole.to_empty(device=DEVICE)
    return sharded


@contextmanager
def _simulate_rank(run: Run, rank: int, on_gpu: bool) -> Iterator[None]:
    """Simulate everything that a rank needs: the other ranks, its GPU and the compiler.

    Args:
        run: The validated job and the number of ranks.
        rank: Rank to simulate.
        on_gpu: Whether the rank has a GPU.
    """
    uses_mxfp8 = run.job.float8.recipe_name == "mxfp8"
    with (
        simulate_ranks(run.world_size, rank),
        # Disable the profiler labels of the parts of a step. They take 6% of the trace time.
        override(record_function, __enter__=lambda self: self, __exit__=lambda *_: None),
        simulate_gpu() if on_gpu else nullcontext(),
        simulate_mxfp8() if uses_mxfp8 else nullcontext(),
        simulate_compiler(),
    ):
        yield


def _extrapolate(short: StepCounts, longer: StepCounts, num_removed: int) -> StepCounts:
    """Extrapolate the counts of a short and a longer model linearly to the full number of blocks.

    For example, 3 of 7 blocks were removed. If 4 blocks need 10 GiB and 5 blocks need 12 GiB, then
    all 7 blocks need 10 + 3 * (12 - 10) = 16 GiB.

    Args:
        short: Counts of the short model.
        longer: Counts of a model with one more block in each pipeline stage.
        num_removed: Number of blocks that were removed from each stage to get the short model.
    """

    def extrapolate(counts: dict[Any, Any], longer_counts: dict[Any, Any]) -> dict[Any, Any]:
        full_counts = {}
        for key, count in counts.items():
            increase_per_block = longer_counts[key] - count
            full_counts[key] = count + num_removed * increase_per_block
        return full_counts

    return StepCounts(
        peaks=extrapolate(short.peaks, longer.peaks),
        stream_peaks=extrapolate(short.stream_peaks, longer.stream_peaks),
        work=extrapolate(short.work, longer.work),
        reserved=None,  # not linear in the number of blocks
    )


def _summarize(rank: int, counts: StepCounts) -> RankTrace:
    """Convert the counts of a rank to a trace with its peak memory, reserved memory and work.

    Args:
        rank: The traced rank.
        counts: Counts for all blocks of the rank.
    """
    location, sizes = max(counts.peaks.items(), key=lambda peak: peak[1].sum())
    return RankTrace(
        rank=rank,
        peak=int(sizes.sum()),
        moment=_describe_location(location),
        kinds=dict(zip(KINDS, sizes.tolist(), strict=True)),
        cpu_peak=_find_step_peaks(counts).get(OFFLOADED, 0),
        work=tuple(_list_work(counts)),
        reserved=_predict_reserved(counts),
    )


def _describe_location(location: Location) -> str:
    """Describe a part of the training step, for example "backward of a block" or "optimizer"."""
    return f"{location.phase} of a block" if location.name == "block" else location.name


def _find_step_peaks(counts: StepCounts) -> dict[int | str, int]:
    """Return the highest memory use of each stream during a step, in bytes.

    The key `OFFLOADED` gives the CPU memory that CPU offload uses.
    """
    step_peaks = defaultdict[int | str, int](int)
    for (stream, _location), size in counts.stream_peaks.items():
        step_peaks[stream] = max(step_peaks[stream], size)
    return step_peaks


def _predict_reserved(counts: StepCounts) -> int:
    """Return how many bytes the caching allocator of a GPU reserves.

    If the allocations were not replayed on a simulated allocator, estimate the number.

    Args:
        counts: Counts for all blocks of the rank.
    """
    if counts.reserved is not None:
        return counts.reserved

    # The allocator does not reuse memory across CUDA streams, so the peaks of all streams add up.
    peaks = _find_step_peaks(counts)
    allocated = sum(peak for stream, peak in peaks.items() if stream != OFFLOADED)
    return int((1 + FRAGMENTATION) * allocated) + CUBLAS_WORKSPACES


def _list_work(counts: StepCounts) -> Iterator[Work]:
    """Yield each kind of work of a rank, with its number of calls, FLOPs and bytes."""
    for kind, amounts in counts.work.items():
        count, flops, num_bytes = amounts.tolist()
        yield kind._replace(count=count, flops=flops, bytes=num_bytes)
