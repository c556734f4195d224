"""Searches for changes of a job that make it fit or run faster.

The changes are larger batches, options that save memory, and other parallel layouts.

Invariant: Every reported number comes from a trace of the changed job, that is, from running one
step of it on fake tensors. Estimates only decide which jobs are traced.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

from titanlite.config.errors import format_count
from titanlite.config.run import Run
from titanlite.config.stages import activation_values
from titanlite.observe.flops import num_params, state_bytes
from titanlite.observe.forecast import Forecast
from titanlite.observe.gpus import GIB, Gpu
from titanlite.optim.losses import TOKENS_OF_FULL_CHUNKS
from titanlite.plan.counter import Group, Work
from titanlite.plan.roofline import forecast
from titanlite.plan.trace import RankTrace, trace_run, with_keys
from titanlite.rules import find_broken_rules
from titanlite.runtime.logging import note, working

MAX_TRACED_JOBS = 16  # of a search: one or two minutes for an 8B model on two cores
MAX_TRACED_TOKENS = 2**22  # per batch; the loss loops over chunks, so a larger trace takes minutes
MAX_TRACED_BATCHES = 7
MAX_CHANGES = 5

Settings = Mapping[str, Any]
"""Changed options of a job, for example {"training.local_batch_size": 4}."""
Apply = Callable[..., Iterable[Any]]
"""Function that runs traces: `map`, or the `map` method of a process pool to run in parallel."""

SAVE_NOTHING = {"activation_checkpoint.mode": "full"}
SAVE_SOME_OPS = {
    "activation_checkpoint.mode": "selective",
    "activation_checkpoint.selective_ac_option": "op",
}
BF16_STATE = {"optimizer.state_dtype": "bfloat16", "optimizer.stochastic_rounding": True}
BF16_WEIGHTS = {"training.dtype": "bfloat16", "optimizer.stochastic_rounding": True}
CPU_OFFLOAD = {"training.enable_cpu_offload": True}
FLOAT8_ALL_GATHER = (
    "float8.enable_fsdp_float8_all_gather",
    "float8.precompute_float8_dynamic_scale_for_fsdp",
)
POWERS_OF_TWO = (1, 2, 4, 8, 16)


def make_plan(
    run: Run,
    gpu: Gpu,
    quick: bool = False,
    remedies: bool = False,
    show: Callable[[Forecast], None] = lambda plan: None,
    apply: Apply = map,
) -> Forecast:
    """Forecast the memory and speed of a run, and search for improvements.

    If the run does not fit, the result lists changes that make it fit. If it fits, the result
    includes the largest batch size that fits.

    Args:
        run: The validated job and the number of ranks.
        gpu: GPU of each rank.
        quick: Skip the search for the largest batch.
        remedies: Search for changes that save memory even if the run fits.
        show: Function called with the forecast of the run before the search starts.
        apply: Function that runs traces, such as `map`; see `Apply`.
    """
    with working(f"Tracing a step on {format_count(run.world_size, 'rank')}"):
        plan = forecast(run, trace_run(run, gpu, apply), gpu)
    show(plan)

    if not plan.fits or remedies:
        changes = find_remedies(run, plan, gpu, apply)
        return plan.model_copy(update={"changes": changes})
    if quick:
        return plan
    largest_size = find_largest_batch(run, plan, gpu, apply)
    return plan.model_copy(update={"largest_local_batch_size": largest_size})


def find_largest_batch(run: Run, plan: Forecast, gpu: Gpu, apply: Apply = map) -> int | None:
    """Return the largest traced training.local_batch_size that fits, or None if none fits.

    Memory is linear in the batch size. The line through the two largest sizes traced so far
    predicts the size to trace next, until a size repeats.

    Args:
        run: The validated job and the number of ranks.
        plan: Forecast of the run with its own batch size.
        gpu: GPU of each rank.
        apply: Function that runs traces; see `Apply`.
    """
    training = run.job.training
    context = run.degrees.context
    max_size = MAX_TRACED_TOKENS * context // training.seq_len
    # Memory is linear from this size on, because all chunks of the loss have their full size.
    min_linear_size = -(-TOKENS_OF_FULL_CHUNKS * context // training.seq_len)

    plans = {training.local_batch_size: plan}
    size = max(2 * training.local_batch_size, min_linear_size)
    while size not in plans and 0 < size <= max_size and len(plans) < MAX_TRACED_BATCHES:
        keeps_global_size = training.global_batch_size % (size * run.degrees.data) == 0
        settings = {
            "training.local_batch_size": size,
            "training.global_batch_size": training.global_batch_size if keeps_global_size else -1,
        }
        with working(f"Looking for the largest batch that fits: training.local_batch_size {size}"):
            new_plan = _plan_changed(settings, run, gpu, apply)
        if new_plan is None:
            break
        plans[size] = new_plan
        note(f"training.local_batch_size {size}: {_format_memory(new_plan)}")
        size = _extrapolate_batch_size(plans, gpu.memory)

    return max((size for size, plan in plans.items() if plan.fits), default=None)


def _extrapolate_batch_size(plans: Mapping[int, Forecast], memory: int) -> int:
    """Estimate the largest local batch size that fits into GPU memory.

    The estimate draws a line through the peak memory of the two largest batch sizes in `plans`.

    Args:
        plans: Batch size -> forecast with this size, for at least two sizes.
        memory: Bytes available to a rank.
    """
    size1, size2 = sorted(plans)[-2:]
    bytes_per_sequence = (plans[size2].needs - plans[size1].needs) / (size2 - size1)
    free_bytes = memory - plans[size1].needs
    return size1 + int(free_bytes // max(1.0, bytes_per_sequence))


def find_remedies(run: Run, plan: Forecast, gpu: Gpu, apply: Apply = map) -> tuple[str, ...]:
    """Find changes that make a run fit into GPU memory, fastest first, at most `MAX_CHANGES`.

    Combinations of changes are traced only if no single change suffices.

    Args:
        run: The validated job and the number of ranks.
        plan: Forecast of the run without changes.
        gpu: GPU of each rank.
        apply: Function that runs traces; see `Apply`.

    Returns:
        Descriptions such as "--activation_checkpoint.mode full: 61.3 GiB, 20% slower".
    """
    for candidates in (_list_single_remedies(run), _list_combined_remedies(run)):
        text = f"Tracing {len(candidates)} changes that take less memory"
        fitting = _plan_all(run, candidates, gpu, apply, text)
        changes = [
            _describe_change(settings, new_plan, plan)
            for settings, new_plan in fitting
            if new_plan.needs < plan.needs
        ]
        if changes:
            return tuple(changes[:MAX_CHANGES])
    return ()


def _describe_change(settings: Settings, new_plan: Forecast, plan: Forecast) -> str:
    """Format the options of a change with its peak memory and relative speed.

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


def search(
    run: Run, gpu: Gpu, apply: Apply, max_jobs: int = MAX_TRACED_JOBS
) -> tuple[list[tuple[Settings, Forecast]], int, int]:
    """Search for faster layouts of a run.

    The run itself is traced first, then other layouts in the order of their estimated speed.

    Args:
        run: The validated job and the number of ranks.
        gpu: GPU of each rank.
        apply: Function that runs traces; see `Apply`.
        max_jobs: Largest number of jobs to trace, including the run itself.

    Returns:
        - Settings and forecasts of the jobs that fit and are at least as fast as the run, fastest
          first.
        - The number of jobs that were traced.
        - The number of jobs that could have been traced.
    """
    candidates: list[Settings] = [{}, *list_layouts(run, gpu)]
    traced = candidates[:max_jobs]
    text = f"Tracing {len(traced)} of {len(candidates)} jobs"
    results = []
    for settings, plan in _plan_all(run, traced, gpu, apply, text):
        results.append((settings, plan))
        is_run_itself = not settings
        if is_run_itself:
            break
    return results, len(traced), len(candidates)


def _plan_all(
    run: Run, candidates: Sequence[Settings], gpu: Gpu, apply: Apply, text: str
) -> list[tuple[Settings, Forecast]]:
    """Trace a run with each of several changes and return the changes that fit, fastest first.

    Args:
        run: The run to change.
        candidates: Changed options for each trace. An empty dictionary is the unchanged run.
        gpu: GPU of each rank.
        apply: Function that runs traces; see `Apply`.
        text: Progress message.

    Returns:
        Pairs of the changed options and the forecast with them.
    """
    fitting: list[tuple[Settings, Forecast]] = []
    with working(text) as update_text:
        plans = apply(partial(_plan_changed, run=run, gpu=gpu), candidates)
        for num_traced, (settings, plan) in enumerate(zip(candidates, plans, strict=True), start=1):
            if plan is not None and plan.fits:
                fitting.append((settings, plan))
                speed = f"{plan.tokens_per_second:,.0f} tokens/s per device"
                note(f"{_describe(settings)}: {_format_memory(plan)}, {speed}")
            update_text(f"{num_traced} of {len(candidates)} jobs traced")
    return sorted(fitting, key=lambda item: -item[1].tokens_per_second)


def _plan_changed(settings: Settings, run: Run, gpu: Gpu, apply: Apply = map) -> Forecast | None:
    """Trace a run with other settings and return the forecast of its memory and speed.

    Args:
        settings: Changed options, for example {"training.local_batch_size": 4}. Empty settings
            stand for the run itself.
        run: The run to change.
        gpu: GPU of each rank.
        apply: Function that runs traces; see `Apply`.

    Returns:
        The forecast, or None in these cases:

        - The settings break a rule of the configuration or change nothing.
        - The optimizer state alone does not fit into the GPU.
        - The trace fails. The reason is logged, and other settings can still be traced.
    """
    new_run = change_run(run, settings)
    if new_run is None or (settings and new_run.job == run.job):
        return None
    is_offloaded = new_run.job.training.enable_cpu_offload
    if is_offloaded and gpu.cpu:  # a CPU has no other memory
        return None
    if not is_offloaded and state_bytes(new_run) > gpu.memory:
        return None

    try:
        return forecast(new_run, trace_run(new_run, gpu, apply), gpu)
    except BrokenExecutor:
        raise  # no further trace can run
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        text = f"Skipped {_describe(settings)}, which cannot be traced"
        note(f"{text} ({type(error).__name__}: {reason})")
        return None


def _list_smaller_batches(run: Run) -> list[Settings]:
    """List local batch sizes of a half, a quarter and so on, with the same global batch size.

    Returns:
        Changed options, such as {"training.local_batch_size": 4, ...}, largest batch first.
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
    """List single changes that save memory, such as full activation checkpointing.

    Returns:
        Changed options, such as {"parallelism.fsdp_reshard_after_forward": "always"}.
    """
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
    for degree in (2, 4, 8):
        if degree > run.degrees.tensor:
            remedies.append(
                {
                    "parallelism.data_parallel_shard_degree": -1,
                    "training.global_batch_size": run.global_batch_size,
                    "parallelism.tensor_parallel_degree": degree,
                }
            )
    return remedies


def _list_combined_remedies(run: Run) -> list[Settings]:
    """List combinations of changes, which save more memory than `_list_single_remedies`."""
    smallest_batch = ([{}, *_list_smaller_batches(run)])[-1]
    base = {**smallest_batch, **SAVE_NOTHING}
    return [
        base,
        {**base, **BF16_STATE},
        {**base, **BF16_WEIGHTS},
        {**base, **BF16_WEIGHTS, **CPU_OFFLOAD},
    ]


def list_layouts(run: Run, gpu: Gpu) -> list[Settings]:
    """List parallel layouts to try, each with activation checkpointing, precision and batch size.

    Layouts that break a rule of the configuration or that do not seem to fit are left out. The rest
    are sorted by estimated speed, fastest first. Each layout is listed with its two fastest batch
    sizes. If the job sets a global batch size, all layouts keep that size.

    Args:
        run: The validated job and the number of ranks.
        gpu: GPU of each rank.
    """
    has_fp8_scales = run.job.float8.recipe_name == "tensorwise"
    candidates: list[tuple[float, Settings]] = []
    for degrees in _list_degrees(run, gpu):
        for has_float8 in [False, True] if gpu.fp8 else [False]:
            for mode in ("none", "selective", "full"):
                layout = {
                    **degrees,
                    "float8.enable": has_float8,
                    "activation_checkpoint.mode": mode,
                    "parallelism.data_parallel_shard_degree": -1,
                    "parallelism.enable_async_tensor_parallel": (
                        degrees["parallelism.tensor_parallel_degree"] > 1 and not gpu.cpu
                    ),
                    "activation_checkpoint.selective_ac_option": "op",
                    "compile.enable": not gpu.cpu or run.job.compile.enable,
                }
                layout |= dict.fromkeys(FLOAT8_ALL_GATHER, has_float8 and has_fp8_scales)
                candidates += _choose_batch_sizes(run, gpu, layout)
    return [settings for _, settings in sorted(candidates, key=itemgetter(0))]


def _list_degrees(run: Run, gpu: Gpu) -> Iterator[dict[str, Any]]:
    """Yield the parallel degrees to try in a search for faster layouts.

    With pipeline parallelism, each combination of degrees is yielded once per pipeline schedule.

    Args:
        run: The validated job and the number of ranks.
        gpu: GPU of each rank.

    Yields:
        Changed options, such as {"parallelism.tensor_parallel_degree": 2, ...}.
    """
    num_ranks = run.world_size
    is_multi_node = num_ranks > gpu.machine
    max_tensor = min(gpu.machine, run.arch.n_kv_heads)
    max_pipeline = run.arch.n_layers // 2 if is_multi_node else 1
    max_context = run.job.training.seq_len // 16384
    for tensor, pipeline, context, replicate in itertools.product(
        [degree for degree in POWERS_OF_TWO if degree <= max_tensor],
        [degree for degree in POWERS_OF_TWO if degree <= max(1, max_pipeline)],
        [degree for degree in POWERS_OF_TWO if degree <= max(1, max_context)],
        [1, num_ranks // gpu.machine] if is_multi_node else [1],
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
        for schedule in ("1F1B", "Interleaved1F1B"):
            yield {**degrees, "parallelism.pipeline_parallel_schedule": schedule}


def _choose_batch_sizes(run: Run, gpu: Gpu, layout: dict[str, Any]) -> list[tuple[float, Settings]]:
    """Choose the two local batch sizes that are estimated to be fastest with a layout.

    Args:
        run: The run to change.
        gpu: GPU of each rank.
        layout: Options of the layout, such as the parallel degrees.

    Returns:
        Pairs of the negated tokens per second, for sorting, and the options to change. Batch sizes
        that do not seem to fit are omitted, so there may be fewer than two.
    """
    tensor = layout["parallelism.tensor_parallel_degree"]
    pipeline = layout["parallelism.pipeline_parallel_degree"]
    context = layout["parallelism.context_parallel_degree"]
    data_degree = run.world_size // (tensor * pipeline * context)
    choices: list[tuple[float, Settings]] = []
    for size in POWERS_OF_TWO:
        global_size = run.job.training.global_batch_size
        if global_size == -1 and pipeline > 1:
            # With 4 microbatches per pipeline rank, ranks are idle for at most a fifth of the time.
            global_size = 4 * pipeline * size * data_degree
        settings = {
            **layout,
            "training.local_batch_size": size,
            "training.global_batch_size": global_size,
        }
        new_run = change_run(run, settings)
        if new_run is None or new_run.job == run.job:
            continue
        guess = _guess_plan(new_run, gpu)
        if guess.fits:
            changes = {
                key: value for key, value in settings.items() if attrgetter(key)(run.job) != value
            }
            choices.append((-guess.tokens_per_second, changes))
    return sorted(choices, key=itemgetter(0))[:2]


def _guess_plan(run: Run, gpu: Gpu) -> Forecast:
    """Forecast a compiled run from formulas, which is faster but less accurate than a trace.

    The result is used only to choose the jobs to trace and their order. It is never reported.
    """
    peak = _guess_peak(run)
    trace = RankTrace(
        rank=0,
        peak=int(peak),
        moment="",
        kinds={},
        host=0,
        work=_guess_work(run),
        reserved=int(1.11 * peak),
    )
    return forecast(run, [trace], gpu)


def _guess_peak(run: Run) -> float:
    """Estimate the peak GPU memory of a rank from formulas, in bytes."""
    arch = run.arch
    degrees = run.degrees
    has_pipeline = degrees.pipeline > 1
    num_layers = arch.n_layers / degrees.pipeline
    num_weights = num_params(arch) / degrees.tensor / degrees.pipeline

    mode = run.job.activation_checkpoint.mode
    saved_share = {"none": 1.0, "full": 0.08}.get(mode, 0.4)
    values_per_token = activation_values(arch, degrees.tensor)  # of a block
    saved_microbatches = min(run.microbatches, degrees.pipeline)
    block_bytes = 2 * values_per_token * saved_share * _microbatch_tokens(run)

    # Gradients that accumulate are unsharded, and so are the weights of pipeline stages.
    gradient_bytes = 4 if run.microbatches > 1 else 0
    weight_bytes = 2 if has_pipeline else 6 / num_layers
    unsharded_bytes = num_weights * (gradient_bytes + weight_bytes)
    return state_bytes(run) + block_bytes * num_layers * saved_microbatches + unsharded_bytes


def _guess_work(run: Run) -> tuple[Work, ...]:
    """Estimate the work of a step as a few large kernels and collectives, without a trace."""
    job = run.job
    arch = run.arch
    degrees = run.degrees
    num_layers = arch.n_layers / degrees.pipeline
    num_weights = num_params(arch) / degrees.tensor / degrees.pipeline
    step_tokens = run.microbatches * _microbatch_tokens(run)
    values_per_token = activation_values(arch, degrees.tensor)  # of a block
    recomputed_share = {"none": 0.0, "full": 1.0}.get(job.activation_checkpoint.mode, 0.5)

    dtype, dtype_bytes = ("float8", 1) if job.float8.enable else ("bfloat16", 2)
    matmul_flops = (6 + 2 * recomputed_share) * num_weights * step_tokens
    attended = arch.attended(job.training.seq_len)
    attention_flops = 4 * attended * arch.q_dim * num_layers / degrees.tensor
    num_attention_passes = 5 if recomputed_share == 1 else 4

    num_shards = degrees.shard * degrees.context
    num_gathers = 2 * (1 if degrees.pipeline > 1 else run.microbatches)
    gathered_bytes = num_gathers * num_weights * dtype_bytes
    tensor_bytes = (8 + 4 * recomputed_share) * 2 * arch.dim * step_tokens * num_layers
    tensor_group = Group("tensor", degrees.tensor, 1)
    fsdp_group = Group("fsdp", num_shards, num_shards * degrees.tensor)
    replicate_group = Group("replicate", degrees.replicate, run.world_size)

    def kernels(op: str, dtype: str, num_dims: int, flops: float, num_bytes: float = 0) -> Work:
        shape = (1,) * num_dims  # its length selects the formula for the time
        return Work("backward", op, dtype, shape, None, 1, int(flops), int(num_bytes))

    def collectives(op: str, group: Group, count: float, num_bytes: float) -> Work:
        return Work("backward", op, "", (), group, int(count), 0, int(num_bytes))

    return (
        kernels("mm", dtype, 3, matmul_flops),
        kernels("attention", "bfloat16", 5, num_attention_passes * attention_flops * step_tokens),
        kernels("other", "", 0, 0, 20 * values_per_token * step_tokens * num_layers),
        collectives("all_gather", tensor_group, 1, tensor_bytes),
        collectives("all_gather", fsdp_group, num_gathers * num_layers, gathered_bytes),
        collectives("reduce_scatter", fsdp_group, num_layers, 4 * num_weights),
        collectives("all_reduce", replicate_group, num_layers, 4 * num_weights / degrees.shard),
    )


def _microbatch_tokens(run: Run) -> int:
    """Return the number of tokens of a microbatch on one context parallel rank."""
    training = run.job.training
    return training.local_batch_size * training.seq_len // run.degrees.context


def change_run(run: Run, settings: Settings) -> Run | None:
    """Return a copy of a run with some options changed, or None if the changed job is invalid.

    Args:
        run: The run to change.
        settings: Changed options, for example {"training.local_batch_size": 4}.
    """
    new_run = with_keys(run, settings)
    return None if find_broken_rules(new_run) else new_run


def format_options(settings: Settings) -> tuple[str, ...]:
    """Return settings as command-line options, such as ("--compile.enable", "--model.dim", "9")."""
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
    """Format changed options as command-line options, or "the job as it is" if there are none."""
    return " ".join(format_options(settings)) or "the job as it is"


def _format_memory(plan: Forecast) -> str:
    return f"{plan.needs / GIB:.1f} of {plan.memory / GIB:.1f} GiB"
