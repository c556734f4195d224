"""Search for changes to a job that make it fit into memory or run faster.

The changes are other batch sizes, options that save memory, and other parallelism layouts.

Invariant: Every reported number comes from a trace of the changed job, that is, from running one of
its steps on fake tensors. Estimates only decide which jobs are traced.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, Literal, NamedTuple

from titanlite.config.errors import format_count
from titanlite.config.run import Run, with_keys
from titanlite.config.stages import activation_values
from titanlite.observe.flops import num_params, state_bytes
from titanlite.observe.forecast import Forecast
from titanlite.observe.gpus import GIB, Gpu
from titanlite.optim.losses import TOKENS_OF_FULL_CHUNKS
from titanlite.parallel import float8
from titanlite.plan.counter import Group, Work
from titanlite.plan.roofline import forecast
from titanlite.plan.trace import Apply, RankTrace, trace_run
from titanlite.rules import find_broken_rules
from titanlite.runtime.logging import note, working

MAX_TRACED_JOBS = 16  # per search, which takes one or two minutes for an 8B model on two cores
MAX_TRACED_TOKENS = 2**22  # per batch; the loss loops over chunks, so a larger trace takes minutes
MAX_TRACED_BATCHES = 7
MAX_CHANGES = 5

# Mode of activation checkpointing -> fraction of the activations of a block that the forward pass
# saves. "full" saves only the input of the block.
SAVED_SHARES = {"none": 1.0, "selective": 0.4, "full": 0.08}
# `Work.shape` of estimated work. Only the number of dimensions matters.
MATMUL_SHAPE = (1, 1, 1)
ATTENTION_SHAPE = (1, 1, 1, 1, 1)
# Estimated memory that the caching allocator reserves on a GPU, as a multiple of the peak.
RESERVED_PER_PEAK = 1.11
BLOCKS_IN_FLIGHT = 3  # estimated number of blocks whose weights FSDP holds unsharded at a time

Settings = Mapping[str, Any]
"""Changed options of a job, for example {"training.local_batch_size": 4}."""

SAVE_NOTHING = {"activation_checkpoint.mode": "full"}
SAVE_SOME_OPS = {
    "activation_checkpoint.mode": "selective",
    "activation_checkpoint.selective_ac_option": "op",
}
BF16_STATE = {"optimizer.state_dtype": "bfloat16", "optimizer.stochastic_rounding": True}
BF16_WEIGHTS = {"training.dtype": "bfloat16", "optimizer.stochastic_rounding": True}
CPU_OFFLOAD = {"training.enable_cpu_offload": True}
POWERS_OF_TWO = (1, 2, 4, 8, 16)
MIN_CONTEXT_PARALLEL_TOKENS = 16384  # per sequence, on each context parallel rank


def make_plan(
    run: Run,
    gpu: Gpu,
    goal: Literal["largest_batch", "remedies", "nothing"] = "largest_batch",
    show: Callable[[Forecast], None] | None = None,
    map_function: Apply = map,
) -> Forecast:
    """Forecast the memory and speed of a run and search for improvements.

    If the run does not fit into memory, search for changes that make it fit, whatever the goal.

    Args:
        run: The validated job and the number of ranks.
        gpu: GPU of each rank.
        goal: Improvement to search for if the run fits. "largest_batch" is the largest local batch
            size that fits, "remedies" are changes that reduce memory, and "nothing" skips the
            search.
        show: Function called with the forecast of the run before the search starts.
        map_function: `map`, or the `map` method of a process pool to trace in parallel.
    """
    with working(f"Tracing a step on {format_count(run.world_size, 'rank')}"):
        plan = forecast(run, trace_run(run, gpu, map_function), gpu)
    if show is not None:
        show(plan)

    if goal == "remedies" or not plan.fits:
        changes = find_remedies(run, plan, gpu, map_function)
        return plan.model_copy(update={"changes": changes})
    if goal == "largest_batch":
        largest_size = find_largest_batch(run, plan, gpu, map_function)
        return plan.model_copy(update={"largest_local_batch_size": largest_size})
    return plan


def find_largest_batch(run: Run, plan: Forecast, gpu: Gpu, map_function: Apply) -> int | None:
    """Search for the largest training.local_batch_size that fits into memory.

    Memory is linear in the batch size, so two traced sizes predict the largest size that fits.
    Trace the predicted size and predict again, until the prediction is already traced or cannot be
    traced. Trace at most `MAX_TRACED_BATCHES` sizes.

    Args:
        run: The run to change.
        plan: Forecast of the unchanged run.
        gpu: GPU of each rank.
        map_function: `map`, or the `map` method of a process pool to trace in parallel.

    Returns:
        The largest traced size, in sequences, that fits into memory, or None if none fits.
    """
    plans = {run.job.training.local_batch_size: plan}  # forecasts by local batch size
    next_size = _choose_second_batch_size(run)
    while next_size not in plans and len(plans) < MAX_TRACED_BATCHES:
        next_plan = _forecast_batch_size(next_size, run, gpu, map_function)
        if next_plan is None:
            break  # the size cannot be traced
        plans[next_size] = next_plan
        next_size = _extrapolate_batch_size(plans, gpu.memory)

    fitting_sizes = [size for size, traced in plans.items() if traced.fits]
    return max(fitting_sizes, default=None)


def _forecast_batch_size(size: int, run: Run, gpu: Gpu, map_function: Apply) -> Forecast | None:
    """Forecast a run with another local batch size, and log its memory.

    Return None if the size cannot be traced.
    """
    # A context parallel rank traces only its share of each sequence.
    max_size = MAX_TRACED_TOKENS * run.degrees.context // run.job.training.seq_len
    if not 0 < size <= max_size:
        return None

    option = f"training.local_batch_size {size}"
    with working(f"Looking for the largest batch that fits: {option}"):
        plan = _forecast_changed(_set_batch_size(run, size), run, gpu, map_function)
    if plan is not None:
        note(f"{option}: {_format_memory(plan)}")
    return plan


def _choose_second_batch_size(run: Run) -> int:
    """Choose a second local batch size to trace, larger than the batch size of the run.

    The loss is computed in chunks of tokens. At the chosen size and above, chunks have their full
    size, so memory is linear in the batch size and can be extrapolated.
    """
    training = run.job.training
    min_linear_size = math.ceil(TOKENS_OF_FULL_CHUNKS * run.degrees.context / training.seq_len)
    return max(2 * training.local_batch_size, min_linear_size)


def _set_batch_size(run: Run, size: int) -> Settings:
    """Return the options that set the local batch size to `size` sequences.

    Keep the global batch size of the run if it divides evenly into microbatches of this size.
    Otherwise, set it to -1, which means one microbatch per data-parallel rank.
    """
    global_size = run.job.training.global_batch_size
    is_divisible = global_size % (size * run.degrees.data) == 0
    return {
        "training.local_batch_size": size,
        "training.global_batch_size": global_size if is_divisible else -1,
    }


def _extrapolate_batch_size(plans: Mapping[int, Forecast], memory: int) -> int:
    """Estimate the largest local batch size that fits into GPU memory.

    The estimate extrapolates the memory of the two largest batch sizes in `plans` linearly. It is
    not positive if not even one sequence fits.

    Args:
        plans: Forecasts by local batch size, for at least two sizes.
        memory: Bytes available to a rank.
    """
    size1, size2 = sorted(plans)[-2:]
    bytes_per_sequence = (plans[size2].needs - plans[size1].needs) / (size2 - size1)
    free_bytes = memory - plans[size1].needs
    return size1 + int(free_bytes // max(1.0, bytes_per_sequence))


def find_remedies(run: Run, plan: Forecast, gpu: Gpu, map_function: Apply) -> tuple[str, ...]:
    """Find changes that reduce memory so that a run fits into GPU memory.

    Combinations of changes are traced only if no single change is sufficient.

    Args:
        run: The run to change.
        plan: Forecast of the unchanged run.
        gpu: GPU of each rank.
        map_function: `map`, or the `map` method of a process pool to trace in parallel.

    Returns:
        At most `MAX_CHANGES` descriptions, fastest change first, such as
        "--activation_checkpoint.mode full: 61.3 GiB, 20% slower". Empty if no change is sufficient.
    """
    for candidates in (_list_single_remedies(run), _list_combined_remedies(run)):
        text = f"Tracing {len(candidates)} changes that take less memory"
        fastest_first = _trace_candidates(run, candidates, gpu, map_function, text)
        changes = [
            _describe_change(settings, new_plan, plan)
            for settings, new_plan in fastest_first
            if new_plan.needs < plan.needs  # if the run fits already, a change may need more
        ]
        if changes:
            return tuple(changes[:MAX_CHANGES])
    return ()


def _describe_change(settings: Settings, new_plan: Forecast, plan: Forecast) -> str:
    """Describe a change by its options, the resulting memory, and the effect on speed.

    For example, "--activation_checkpoint.mode full: 61.3 GiB, 20% slower".
    """
    slowdown = 1 - new_plan.tokens_per_second / plan.tokens_per_second
    if abs(slowdown) <= 0.005:
        speed = "as fast"
    elif slowdown > 0:
        speed = f"{slowdown:.0%} slower"
    else:
        speed = f"{-slowdown:.0%} faster"
    return f"{_describe(settings)}: {new_plan.needs / GIB:.1f} GiB, {speed}"


class SearchResult(NamedTuple):
    """Result of a search for faster layouts of a run.

    Attributes:
        variants: Changed options and forecast of each traced job that fits into memory, fastest
            first. Jobs that are slower than the run itself are omitted.
        num_traced: Number of jobs selected for tracing.
        num_candidates: Number of jobs from which the traced jobs were selected.
    """

    variants: list[tuple[Settings, Forecast]]
    num_traced: int
    num_candidates: int


def search(
    run: Run, gpu: Gpu, map_function: Apply, max_jobs: int = MAX_TRACED_JOBS
) -> SearchResult:
    """Search for faster layouts of a run.

    Trace the run itself, and then other layouts in the order of their estimated speed, until
    `max_jobs` jobs are traced.

    Args:
        run: The validated job and the number of ranks.
        gpu: GPU of each rank.
        map_function: `map`, or the `map` method of a process pool to trace in parallel.
        max_jobs: Largest number of jobs to trace, including the run itself.
    """
    unchanged: Settings = {}
    candidates = [unchanged, *list_layouts(run, gpu)]
    traced = candidates[:max_jobs]
    text = f"Tracing {len(traced)} of {len(candidates)} jobs"

    fastest_first = _trace_candidates(run, traced, gpu, map_function, text)
    variants: list[tuple[Settings, Forecast]] = []
    for settings, plan in fastest_first:
        variants.append((settings, plan))
        if settings == unchanged:
            break  # omit the remaining jobs, which are slower than the unchanged run
    return SearchResult(variants, len(traced), len(candidates))


def _trace_candidates(
    run: Run, candidates: Sequence[Settings], gpu: Gpu, map_function: Apply, text: str
) -> list[tuple[Settings, Forecast]]:
    """Trace a run with each set of changed options and return the sets that fit into memory.

    Args:
        run: The run to change.
        candidates: Changed options for each trace. An empty dictionary means the unchanged run.
        gpu: GPU of each rank.
        map_function: `map`, or the `map` method of a process pool to trace in parallel.
        text: Progress message.

    Returns:
        Pairs of changed options and the forecast with them, fastest first.
    """
    forecast_changed = partial(_forecast_changed, run=run, gpu=gpu)
    fitting: list[tuple[Settings, Forecast]] = []
    with working(text) as update_text:
        plans = map_function(forecast_changed, candidates)  # yields each plan when its trace ends
        results = zip(candidates, plans, strict=True)
        for num_traced, (settings, plan) in enumerate(results, start=1):
            if plan is not None and plan.fits:
                fitting.append((settings, plan))
                speed = f"{plan.tokens_per_second:,.0f} tokens/s per device"
                note(f"{_describe(settings)}: {_format_memory(plan)}, {speed}")
            update_text(f"{num_traced} of {len(candidates)} jobs traced")

    # Sort by speed, fastest first.
    fitting.sort(key=lambda result: result[1].tokens_per_second, reverse=True)
    return fitting


def _forecast_changed(
    settings: Settings, run: Run, gpu: Gpu, map_function: Apply = map
) -> Forecast | None:
    """Trace one step of a run with some options changed, and forecast its memory and speed.

    Return None if the changed job is not worth a trace, or if the trace fails. Log the reason for a
    failure, so that a search can continue with other changes.

    Args:
        settings: Changed options, or {} for the run itself.
        run: The run to change.
        gpu: GPU of each rank.
        map_function: `map`, or the `map` method of a process pool to trace in parallel.
    """
    new_run = _select_for_trace(settings, run, gpu)
    if new_run is None:
        return None

    try:
        return forecast(new_run, trace_run(new_run, gpu, map_function), gpu)
    except BrokenExecutor:
        raise  # a process of the pool was killed, so no further trace can run
    except Exception as error:
        first_line = str(error).strip().partition("\n")[0]
        reason = f"{type(error).__name__}: {first_line}"
        note(f"Skipped {_describe(settings)}, which cannot be traced ({reason})")
        return None


def _select_for_trace(settings: Settings, run: Run, gpu: Gpu) -> Run | None:
    """Apply `settings` to a run and return the changed run, or None if it is not worth a trace.

    The changed job must be valid, and its weights, gradients and optimizer state must fit into
    memory. It must also differ from the job of `run`, unless `settings` is empty.
    """
    new_run = change_run(run, settings)
    if new_run is None or not _has_memory_for_state(new_run, gpu):
        return None
    if new_run.job == run.job and settings:
        return None
    return new_run


def _has_memory_for_state(run: Run, gpu: Gpu) -> bool:
    """Return whether weights, gradients and optimizer state fit into the memory of a rank.

    With CPU offload, they fit into any GPU, because they are in CPU memory. The check needs no
    trace, so a search can quickly discard jobs.
    """
    if run.job.training.enable_cpu_offload:
        return not gpu.cpu  # on a CPU, there is no other memory to offload to
    return state_bytes(run) <= gpu.memory


def _list_smaller_batches(run: Run) -> list[Settings]:
    """List changes that halve the local batch size one or more times, largest batch first.

    The global batch size stays the same.
    """
    smaller_batches: list[Settings] = []
    size = run.job.training.local_batch_size // 2
    while size > 0:
        if run.global_batch_size % (size * run.degrees.data) == 0:
            smaller_batches.append(
                {
                    "training.local_batch_size": size,
                    "training.global_batch_size": run.global_batch_size,
                }
            )
        size //= 2
    return smaller_batches


def _list_single_remedies(run: Run) -> list[Settings]:
    """List single changes that save memory, such as {"activation_checkpoint.mode": "full"}."""
    remedies: list[Settings] = [
        *_list_smaller_batches(run),
        {"parallelism.fsdp_reshard_after_forward": "always"},
        SAVE_NOTHING,
        BF16_STATE,
        BF16_WEIGHTS,
        CPU_OFFLOAD,
    ]
    if run.microbatches > 1 and run.degrees.pipeline == 1 and run.fsdp_reduce == "step":
        remedies.append({"parallelism.fsdp_reduce": "microbatch"})
    if run.job.activation_checkpoint.mode == "none":
        remedies.append(SAVE_SOME_OPS)
    return remedies + _list_tensor_parallel_degrees(run)


def _list_tensor_parallel_degrees(run: Run) -> list[Settings]:
    """List changes that raise the tensor parallel degree to 2, 4 or 8.

    FSDP gets the remaining ranks, and the global batch size stays the same.
    """
    return [
        {
            "parallelism.data_parallel_shard_degree": -1,  # the remaining ranks
            "training.global_batch_size": run.global_batch_size,
            "parallelism.tensor_parallel_degree": degree,
        }
        for degree in (2, 4, 8)
        if degree > run.degrees.tensor
    ]


def _list_combined_remedies(run: Run) -> list[Settings]:
    """List combinations of changes to try if no single change makes a run fit into memory.

    Every combination uses the smallest local batch size and full activation checkpointing.
    """
    # Without a smaller batch, {} leaves the batch size unchanged.
    smallest_batch = [{}, *_list_smaller_batches(run)][-1]
    base = {**smallest_batch, **SAVE_NOTHING}
    return [
        base,
        {**base, **BF16_STATE},
        {**base, **BF16_WEIGHTS},
        {**base, **BF16_WEIGHTS, **CPU_OFFLOAD},
    ]


def list_layouts(run: Run, gpu: Gpu) -> list[Settings]:
    """List combinations of layout, activation checkpointing, precision and batch size to try.

    Each combination of the other options is listed with the two local batch sizes that have the
    highest estimated speed. If the job sets a global batch size, all combinations keep it.
    Combinations that are invalid, or that do not fit into GPU memory by estimate, are omitted.

    Returns:
        Changed options of each combination, sorted by estimated speed, fastest first.
    """
    recipe = run.job.float8.recipe_name
    can_use_float8 = float8.is_supported(recipe, gpu.capability, has_float8=gpu.fp8 > 0)
    float8_choices = (False, True) if can_use_float8 else (False,)
    modes = ("none", "selective", "full")

    candidates: list[tuple[float, Settings]] = []  # estimated speed and options
    for degrees in _list_degrees(run, gpus_per_node=gpu.gpus_per_node):
        for has_float8, mode in itertools.product(float8_choices, modes):
            layout = _complete_layout(degrees, run, gpu, has_float8, mode)
            candidates += _choose_batch_sizes(run, gpu, layout)
    candidates.sort(key=itemgetter(0), reverse=True)
    return [settings for _, settings in candidates]


def _complete_layout(
    degrees: Settings, run: Run, gpu: Gpu, has_float8: bool, mode: str
) -> Settings:
    """Extend the parallel degrees of a layout with its precision and performance options.

    Args:
        degrees: Options that set the parallel degrees, such as
            {"parallelism.tensor_parallel_degree": 2}.
        run: The run that the search started from.
        gpu: Device of each rank, a GPU or CPU cores.
        has_float8: Whether matmuls compute in FP8.
        mode: Mode of activation checkpointing, such as "full".
    """
    is_gpu = not gpu.cpu
    has_tensor_parallel = degrees["parallelism.tensor_parallel_degree"] > 1
    # FSDP can only gather FP8 weights that have a single scale per tensor.
    gathers_float8 = has_float8 and run.job.float8.recipe_name == "tensorwise"
    return {
        **degrees,
        "float8.enable": has_float8,
        "activation_checkpoint.mode": mode,
        "parallelism.data_parallel_shard_degree": -1,  # all remaining ranks
        "parallelism.enable_async_tensor_parallel": has_tensor_parallel and is_gpu,
        "activation_checkpoint.selective_ac_option": "op",  # used only if `mode` is "selective"
        "compile.enable": is_gpu or run.job.compile.enable,
        "float8.enable_fsdp_float8_all_gather": gathers_float8,
        "float8.precompute_float8_dynamic_scale_for_fsdp": gathers_float8,
    }


def _list_degrees(run: Run, gpus_per_node: int) -> Iterator[Settings]:
    """Yield the combinations of parallel degrees to try in a search for faster layouts.

    Some of them are invalid, for example if they need more ranks than the run has. `list_layouts`
    omits these.

    Yields:
        Changed options, such as {"parallelism.tensor_parallel_degree": 2, ...}.
    """
    # Tensor parallelism communicates most, so all its ranks must be on one node. They divide the
    # key-value heads.
    max_tensor = min(gpus_per_node, run.arch.n_kv_heads)
    max_context = max(1, run.job.training.seq_len // MIN_CONTEXT_PARALLEL_TOKENS)
    # Pipelines and replicas (HSDP) save traffic between nodes, so try them only with several nodes.
    max_pipeline = 1
    replicate_choices = [1]
    if run.world_size > gpus_per_node:
        max_pipeline = max(1, run.arch.n_layers // 2)
        replicate_choices.append(run.world_size // gpus_per_node)

    for tensor, pipeline, context, replicate in itertools.product(
        _powers_of_two(max_tensor),
        _powers_of_two(max_pipeline),
        _powers_of_two(max_context),
        replicate_choices,
    ):
        degrees = {
            "parallelism.tensor_parallel_degree": tensor,
            "parallelism.pipeline_parallel_degree": pipeline,
            "parallelism.context_parallel_degree": context,
            "parallelism.data_parallel_replicate_degree": replicate,
        }
        if pipeline == 1:
            yield degrees
            continue

        # With a pipeline, try each schedule.
        for schedule in ("1F1B", "Interleaved1F1B"):
            yield {**degrees, "parallelism.pipeline_parallel_schedule": schedule}


def _powers_of_two(maximum: int) -> list[int]:
    """Return the powers of two from 1 up to `maximum` or 16, whichever is smaller."""
    return [power for power in POWERS_OF_TWO if power <= maximum]


def _choose_batch_sizes(run: Run, gpu: Gpu, layout: Settings) -> list[tuple[float, Settings]]:
    """Choose the two local batch sizes with the highest estimated speed that fit into memory.

    Args:
        run: The run to change.
        gpu: GPU of each rank.
        layout: Options that set the parallel degrees, precision and activation checkpointing.

    Returns:
        At most two pairs of estimated tokens per second and changed options, fastest first.
    """
    choices: list[tuple[float, Settings]] = []
    for size in POWERS_OF_TWO:
        settings = {
            **layout,
            "training.local_batch_size": size,
            "training.global_batch_size": _choose_global_batch_size(run, layout, size),
        }
        new_run = change_run(run, settings)
        if new_run is None:
            continue  # the combination is invalid

        changes = _drop_unchanged_options(settings, run)
        if not changes:
            continue  # this is the original job

        estimate = _forecast_without_trace(new_run, gpu)
        if estimate.fits:
            choices.append((estimate.tokens_per_second, changes))
    choices.sort(key=itemgetter(0), reverse=True)
    return choices[:2]


def _drop_unchanged_options(settings: Settings, run: Run) -> Settings:
    """Return the options whose value differs from the job of a run."""
    return {key: value for key, value in settings.items() if attrgetter(key)(run.job) != value}


def _choose_global_batch_size(run: Run, layout: Settings, local_size: int) -> int:
    """Choose the global batch size of a layout, in sequences.

    Keep the size that the job sets. If it sets none and the layout has no pipeline, return -1,
    which means one microbatch per data-parallel rank. With a pipeline, use 4 microbatches per
    pipeline rank, so that the ranks are idle less than a fifth of the time.
    """
    job_size = run.job.training.global_batch_size
    degrees = with_keys(run, layout).degrees
    if job_size != -1 or degrees.pipeline == 1:
        return job_size

    # With m = 4 p microbatches, the p ranks are idle for (p - 1) / (m + p - 1) < 1/5.
    return 4 * degrees.pipeline * local_size * degrees.data


def _forecast_without_trace(run: Run, gpu: Gpu) -> Forecast:
    """Forecast a run from simple formulas, which is faster than a trace, but less accurate.

    The formulas assume compilation. Use the result only to choose which jobs to trace.
    """
    peak = state_bytes(run) + _guess_activation_bytes(run) + _guess_unsharded_bytes(run)
    # All work counts as part of the backward pass, which takes most of the time of a step.
    work = (
        _guess_matmuls(run),
        _guess_attention(run),
        _guess_other_kernels(run),
        _guess_tensor_parallel(run),
        *_guess_fsdp(run),
    )
    trace = RankTrace(
        rank=0,
        peak=int(peak),
        reserved=int(RESERVED_PER_PEAK * peak),
        cpu_peak=0,
        work=work,
        # The moment and the kinds of memory are unknown. They would only be printed.
        moment="",
        kinds={},
    )
    return forecast(run, [trace], gpu)


def _guess_activation_bytes(run: Run) -> float:
    """Estimate the bytes of bfloat16 activations that a rank saves for its backward passes."""
    values_per_token = activation_values(run.arch, run.degrees.tensor)  # per block
    saved_share = SAVED_SHARES[run.job.activation_checkpoint.mode]
    block_bytes = 2 * values_per_token * saved_share * run.local_microbatch_tokens
    # A pipeline runs several forward passes before the first backward pass.
    saved_microbatches = min(run.microbatches, run.degrees.pipeline)
    return block_bytes * _count_blocks(run) * saved_microbatches


def _guess_unsharded_bytes(run: Run) -> float:
    """Estimate the bytes of the weights and gradients that FSDP holds unsharded on a rank."""
    # Gradients stay unsharded, in float32, while they accumulate over several microbatches.
    gradient_bytes = 4 if run.microbatches > 1 else 0
    # Unsharded weights are in bfloat16: all of them with a pipeline, otherwise a few blocks.
    has_pipeline = run.degrees.pipeline > 1
    unsharded_share = 1.0 if has_pipeline else BLOCKS_IN_FLIGHT / _count_blocks(run)
    return _count_weights(run) * (gradient_bytes + 2 * unsharded_share)


def _guess_matmuls(run: Run) -> Work:
    """Estimate the work of all matmuls of a step, as if they were one kernel.

    Per weight and token, the forward pass needs 2 FLOPs and the backward pass 4. Full activation
    checkpointing adds 2.
    """
    flops_per_weight = 6 + 2 * _recomputed_share(run)
    flops = flops_per_weight * _count_weights(run) * _step_tokens(run)
    dtype = "float8" if run.job.float8.enable else "bfloat16"
    return Work("backward", "mm", dtype, shape=MATMUL_SHAPE, flops=int(flops))


def _guess_attention(run: Run) -> Work:
    """Estimate the FLOPs of all attention kernels of a step, and return them as a single kernel."""
    # In a forward pass, a query needs 2 FLOPs per visible key and dimension for its scores, and 2
    # for its output. The backward pass counts as three forward passes, and full recomputation as
    # one more.
    visible_keys = run.arch.attended(run.job.training.seq_len)
    flops_per_token = 4 * visible_keys * run.arch.q_dim * _count_blocks(run) / run.degrees.tensor
    num_passes = 5 if _recomputed_share(run) == 1 else 4
    flops = num_passes * flops_per_token * _step_tokens(run)
    return Work("backward", "attention", "bfloat16", shape=ATTENTION_SHAPE, flops=int(flops))


def _guess_other_kernels(run: Run) -> Work:
    """Estimate the memory traffic in a step of all kernels other than matmuls and attention.

    Assume 20 bytes for each activation that blocks would save without activation checkpointing.
    """
    values_per_token = activation_values(run.arch, run.degrees.tensor)  # per block
    num_bytes = 20 * values_per_token * _step_tokens(run) * _count_blocks(run)
    return Work("backward", "other", bytes=int(num_bytes))


def _guess_tensor_parallel(run: Run) -> Work:
    """Estimate the traffic of tensor parallelism in a step, as if it were one large collective.

    A block has four collectives of bfloat16 values in the forward pass, four in the backward pass,
    and four more if its forward pass is recomputed.
    """
    collectives_per_block = 8 + 4 * _recomputed_share(run)
    block_bytes = collectives_per_block * 2 * run.arch.dim * _step_tokens(run)
    group = Group("tensor", size=run.degrees.tensor, span=1)  # within one node
    return Work("backward", "all_gather", group=group, bytes=int(block_bytes * _count_blocks(run)))


def _guess_fsdp(run: Run) -> list[Work]:
    """Estimate the all-gathers, reduce-scatters and all-reduces of FSDP and HSDP in a step.

    Each collective transfers the weights or gradients of one block.
    """
    degrees = run.degrees
    num_blocks = _count_blocks(run)
    num_weights = _count_weights(run)
    bytes_per_weight = 1 if run.job.float8.enable else 2  # FP8 or bfloat16
    gradient_bytes = 4 * num_weights  # float32

    # A group shards the weights over `num_shards` ranks. Consecutive ranks of the group are
    # `degrees.tensor` apart, because tensor parallel ranks are neighbors. `span`, the distance from
    # the first to the last rank, determines how many nodes the group uses.
    num_shards = degrees.shard * degrees.context
    shard_group = Group("fsdp", size=num_shards, span=num_shards * degrees.tensor)
    replicate_group = Group("replicate", size=degrees.replicate, span=run.world_size)

    # All weights are gathered for the forward and the backward pass of each microbatch. With a
    # pipeline, they stay gathered during all microbatches.
    num_passes = 2 if degrees.pipeline > 1 else 2 * run.microbatches
    # Assume that all gradients are reduce-scattered once per step. HSDP then adds up the gradients
    # of all replicas with an all-reduce, in which each rank has only one shard of the gradients.
    return [
        Work(
            "backward",
            "all_gather",
            group=shard_group,
            count=int(num_passes * num_blocks),
            bytes=int(num_passes * num_weights * bytes_per_weight),
        ),
        Work(
            "backward",
            "reduce_scatter",
            group=shard_group,
            count=int(num_blocks),
            bytes=int(gradient_bytes),
        ),
        Work(
            "backward",
            "all_reduce",
            group=replicate_group,
            count=int(num_blocks),
            bytes=int(gradient_bytes / num_shards),
        ),
    ]


def _count_blocks(run: Run) -> float:
    """Return the average number of blocks on a pipeline rank."""
    return run.arch.n_layers / run.degrees.pipeline


def _step_tokens(run: Run) -> int:
    """Return the number of tokens that a rank processes in a step.

    A context parallel rank processes only its share of each sequence.
    """
    return run.microbatches * run.local_microbatch_tokens


def _count_weights(run: Run) -> float:
    """Return the number of weights per rank before FSDP sharding, averaged over pipeline ranks."""
    return num_params(run.arch) / run.degrees.tensor / run.degrees.pipeline


def _recomputed_share(run: Run) -> float:
    """Estimate the fraction of the forward pass that activation checkpointing repeats."""
    return {"none": 0.0, "full": 1.0}.get(run.job.activation_checkpoint.mode, 0.5)


def change_run(run: Run, settings: Settings) -> Run | None:
    """Return a copy of a run with some options changed, or None if the changed job is invalid.

    Args:
        run: The run to change.
        settings: Changed options, for example {"training.local_batch_size": 4}.
    """
    new_run = with_keys(run, settings)
    return None if find_broken_rules(new_run) else new_run


def format_options(settings: Settings) -> tuple[str, ...]:
    """Convert changed options to command-line arguments.

    For example, {"compile.enable": False, "model.dim": 9} becomes ("--compile.no-enable",
    "--model.dim", "9").
    """
    words: list[str] = []
    for key, value in settings.items():
        if value is False:
            words.append(f"--{key.replace('.', '.no-')}")
        elif value is True:
            words.append(f"--{key}")
        else:
            words += [f"--{key}", str(value)]
    return tuple(words)


def _describe(settings: Settings) -> str:
    """Format changed options for a message, such as "--model.dim 9".

    If `settings` is empty, return "the job as it is".
    """
    return " ".join(format_options(settings)) or "the job as it is"


def _format_memory(plan: Forecast) -> str:
    """Format the memory that a rank needs and has, such as "61.3 of 80.0 GiB"."""
    return f"{plan.needs / GIB:.1f} of {plan.memory / GIB:.1f} GiB"
