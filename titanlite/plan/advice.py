"""What would make a run fit or go faster: the largest batch, the cheapest changes, and a search over layouts.

Invariant: each figure comes from a trace of the changed job. Estimates decide only which jobs are traced.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from multiprocessing import active_children, get_context
from operator import attrgetter, itemgetter
from typing import Any

from titanlite.config.errors import UserError, counted
from titanlite.config.run import Run
from titanlite.load_run import broken_rules
from titanlite.observe.flops import num_params, state_bytes
from titanlite.observe.forecast import Forecast
from titanlite.observe.gpus import GIB, Gpu
from titanlite.optim.loss import TOKENS_OF_FULL_CHUNKS
from titanlite.plan.counter import Work
from titanlite.plan.roofline import forecast
from titanlite.plan.trace import RankTrace, trace_run, with_keys
from titanlite.runtime.logging import note, working
from titanlite.runtime.process import PARENT, serve_parent

WORKERS = 2  # processes that trace
MOST = 16  # jobs that a search traces: one or two minutes for a model of 8 billion parameters on two cores
MOST_TOKENS = 2**22  # of a batch that is looked for: a trace would take minutes, because the loss is a loop over chunks
Settings = Mapping[str, Any]
"""A change of a job: "section.key" -> value."""
FULL = {"activation_checkpoint.mode": "full"}
HALF_STATE = {"optimizer.state_dtype": "bfloat16", "optimizer.stochastic_rounding": True}
BF16 = {"training.dtype": "bfloat16", "optimizer.stochastic_rounding": True}
OFFLOAD = {"training.enable_cpu_offload": True}
FP8_GATHER = "float8.enable_fsdp_float8_all_gather", "float8.precompute_float8_dynamic_scale_for_fsdp"
_POWERS = (1, 2, 4, 8, 16)
Apply = Callable[..., Iterable[Any]]
"""`map`, or that method of a pool of processes."""


def make_plan(
    run: Run,
    gpu: Gpu,
    quick: bool = False,
    remedies: bool = False,
    tell: Callable[[Forecast], None] = lambda plan: None,
) -> Forecast:
    """The plan of a run, with the largest batch that fits (unless `quick`), or with what makes the run fit.

    Args:
        gpu: What each rank has.
        remedies: List what takes less memory even if the run fits.
        tell: Gets the plan before anything else is traced.
    """
    # A pipeline has several kinds of ranks to trace. For less it would not pay to start processes.
    with workers() if run.degrees.pipeline > 2 else nullcontext() as pool:
        apply = pool.map if pool else map
        with working(f"Tracing a step on {counted(run.world_size, 'rank')}"):
            plan = forecast(run, trace_run(run, gpu, apply), gpu)
        tell(plan)
        if not plan.fits or remedies:
            return plan.model_copy(update={"changes": what_fits(run, plan, gpu, apply)})
        return plan if quick else plan.model_copy(update={"largest_local_batch_size": largest(run, plan, gpu, apply)})


@contextmanager
def workers() -> Iterator[Executor]:
    """Processes for traces, which print to standard error alone. They end with this process, also if it is interrupted
    or killed."""
    pool = ProcessPoolExecutor(WORKERS, get_context("spawn"), _begin_worker, (os.getpid(),))
    try:
        yield pool
    except BrokenExecutor:
        text = "A process of the plan was killed, probably because the memory of this machine is full"
        raise UserError(f"{text}. Plan again where more is free.") from None
    except BaseException:
        for child in active_children():
            child.kill()  # a trace takes long, and nobody waits for it
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_worker(parent: int) -> None:
    os.environ[PARENT] = str(parent)
    serve_parent()
    os.dup2(2, 1)
    logging.disable(logging.WARNING)  # libraries warn of what only a real run needs


def largest(run: Run, plan: Forecast, gpu: Gpu, apply: Apply = map) -> int | None:
    """The most rows of a forward pass that fit, of those that were traced; None if one does not.

    The bytes at each moment are a straight line in the rows, so the line through the peaks of two numbers of rows
    crosses the memory at the number to try next. It ends when that has been tried.
    """
    context, training = run.degrees.context, run.job.training
    known = {training.local_batch_size: plan}
    # The loss has chunks of full size from so many rows on, so that the line is straight.
    rows = max(2 * training.local_batch_size, -(-TOKENS_OF_FULL_CHUNKS * context // training.seq_len))
    while rows not in known and 0 < rows <= MOST_TOKENS * context // training.seq_len and len(known) < 7:
        whole = training.global_batch_size  # stays if it can be split so
        size = whole if whole == -1 or whole % (rows * run.degrees.data) == 0 else -1
        with working(f"Looking for the largest batch that fits: training.local_batch_size {rows}"):
            new = _plan({"training.local_batch_size": rows, "training.global_batch_size": size}, run, gpu, apply)
        if new is None:
            break
        known[rows] = new
        (few, less), (many, more) = sorted(known.items())[-2:]
        slope = max(1.0, (more.needs - less.needs) / (many - few))
        rows = few + int((gpu.memory - less.needs) // slope)
    return max((rows for rows, each in known.items() if each.fits), default=None)


def what_fits(run: Run, plan: Forecast, gpu: Gpu, apply: Apply = map) -> tuple[str, ...]:
    """Changes that make a run fit which does not, cheapest first."""
    changes = list[str]()
    for tries in _remedies(run):
        for settings, after in _fastest(run, tries, gpu, apply, f"Tracing {len(tries)} changes that take less memory"):
            if after.needs < plan.needs:
                price = 1 - after.tokens_per_second / plan.tokens_per_second
                speed = f"{abs(price):.0%} {'slower' if price > 0 else 'faster'}" if abs(price) > 0.005 else "as fast"
                changes.append(f"{' '.join(options(settings))}: {after.needs / GIB:.1f} GiB, {speed}")
        if changes:  # several at once are for runs that no single one helps
            break
    return tuple(changes[:5])


def search(run: Run, gpu: Gpu, apply: Apply, most: int = MOST) -> tuple[list[tuple[Settings, Forecast]], int, int]:
    """The run as it is, if it fits, after its layouts that fit and are faster; with their plans, fastest first.

    The run is traced first, then so many layouts in the order of a guess at their speed.

    Returns:
        The settings and their plans; how many jobs were traced; and of how many.
    """
    tries = layouts(run, gpu)
    chosen: list[Settings] = [{}, *tries[: most - 1]]
    found = _fastest(run, chosen, gpu, apply, f"Tracing {len(chosen)} of {1 + len(tries)} jobs")
    own = next((place for place, (settings, _) in enumerate(found) if not settings), len(found))
    return found[: own + 1], len(chosen), 1 + len(tries)


def _fastest(run: Run, tries: Sequence[Settings], gpu: Gpu, apply: Apply, text: str) -> list[tuple[Settings, Forecast]]:
    """The changes that fit, with their plans, fastest first. `text` says what is done."""
    found = list[tuple[Settings, Forecast]]()
    with working(text) as say:
        for number, plan in enumerate(apply(partial(_plan, run=run, gpu=gpu), tries), 1):
            if plan is not None and plan.fits:
                found.append((tries[number - 1], plan))
            say(f"{number} of {len(tries)} jobs traced")
    return sorted(found, key=lambda each: -each[1].tokens_per_second)


def _plan(settings: Settings, run: Run, gpu: Gpu, apply: Apply = map) -> Forecast | None:
    """The plan of a changed run. None if it breaks a rule, is the same, or has a state that is too large; or if it
    cannot be traced, which is said, because the advice about other changes holds without it."""
    new = changed(run, settings)
    if new is None or (settings and new.job == run.job):
        return None
    # On a CPU device and host are one memory.
    if gpu.cpu if new.job.training.enable_cpu_offload else state_bytes(new) > gpu.memory:
        return None
    try:
        return forecast(new, trace_run(new, gpu, apply), gpu)
    except BrokenExecutor:
        raise  # no other trace would come to an end, either
    except Exception as error:
        words = " ".join(options(settings)) or "the job as it is"
        reason = str(error).strip().partition("\n")[0]
        note(f"Left out, because it cannot be traced: {words} ({type(error).__name__}: {reason})")
        return None


# ---------------------------------------------------------------------------------------------------- what can be tried


def _remedies(run: Run) -> tuple[list[Settings], list[Settings]]:
    """Changes that take less memory: single ones, and several at once."""
    batch, rows = run.global_batch_size, run.job.training.local_batch_size
    smaller = [rows >> n for n in range(1, rows.bit_length()) if batch % ((rows >> n) * run.degrees.data) == 0]
    fewer = [{"training.local_batch_size": size, "training.global_batch_size": batch} for size in smaller]
    single = [*fewer, {"parallelism.fsdp_reshard_after_forward": "always"}, FULL, HALF_STATE, BF16, OFFLOAD]
    if run.microbatches > 1 and run.degrees.pipeline == 1:
        single.append({"parallelism.fsdp_reduce": "microbatch"})
    if run.job.activation_checkpoint.mode == "none":
        single.append({"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"})
    layout = {"parallelism.data_parallel_shard_degree": -1, "training.global_batch_size": batch}
    single += [{**layout, "parallelism.tensor_parallel_degree": n} for n in (2, 4, 8) if n > run.degrees.tensor]
    together = {**(fewer[-1] if fewer else {}), **FULL}
    return single, [{**together, **more} for more in ({}, HALF_STATE, BF16, {**BF16, **OFFLOAD})]


def layouts(run: Run, gpu: Gpu) -> list[Settings]:
    """Layouts, recomputation, precisions and batch sizes for the ranks of a run that the rules allow and that may fit,
    those first that may be fastest; of each layout two batch sizes. A global batch that the job names stays."""
    world, training, layers = run.world_size, run.job.training, run.arch.n_layers
    several = world > gpu.machine
    values: dict[str, Sequence[Any]] = {
        "parallelism.tensor_parallel_degree": [n for n in _POWERS if n <= min(gpu.machine, run.arch.n_kv_heads)],
        "parallelism.pipeline_parallel_degree": [n for n in _POWERS if n == 1 or (several and 2 * n <= layers)],
        "parallelism.context_parallel_degree": [n for n in _POWERS if n == 1 or training.seq_len >= 16384 * n],
        "parallelism.data_parallel_replicate_degree": [1, world // gpu.machine] if several else [1],
        "parallelism.pipeline_parallel_schedule": ["1F1B", "Interleaved1F1B"],
        "float8.enable": [False, True] if gpu.fp8 else [False],
        "activation_checkpoint.mode": ["none", "selective", "full"],
    }
    found = list[tuple[float, Settings]]()
    for layout in (dict(zip(values, chosen, strict=True)) for chosen in itertools.product(*values.values())):
        tensor, pipeline, context, _, _, fp8, _ = layout.values()
        if pipeline == 1 and layout.pop("parallelism.pipeline_parallel_schedule") != "1F1B":
            continue
        layout["parallelism.data_parallel_shard_degree"] = -1
        layout["parallelism.enable_async_tensor_parallel"] = tensor > 1 and not gpu.cpu
        layout["activation_checkpoint.selective_ac_option"] = "op"
        layout["compile.enable"] = not gpu.cpu or run.job.compile.enable
        layout |= dict.fromkeys(FP8_GATHER, fp8 and run.job.float8.recipe_name == "tensorwise")
        fit = list[tuple[float, Settings]]()
        for rows in _POWERS:
            batch = training.global_batch_size
            if batch == -1 and pipeline > 1:  # so that a fifth of the time is idle at the most
                batch = 4 * pipeline * rows * (world // (tensor * pipeline * context))
            settings = {**layout, "training.local_batch_size": rows, "training.global_batch_size": batch}
            new = changed(run, settings)
            if new and new.job != run.job and (guess := _guess(new, gpu)).fits:
                new_keys = {key: value for key, value in settings.items() if attrgetter(key)(run.job) != value}
                fit.append((-guess.tokens_per_second, new_keys))
        found += sorted(fit, key=itemgetter(0))[:2]
    return [settings for _, settings in sorted(found, key=itemgetter(0))]


def _guess(run: Run, gpu: Gpu) -> Forecast:
    """A guess at the plan of a compiled run, which decides only what is traced, and in which order."""
    job, arch, degree = run.job, run.arch, run.degrees
    again, kept = {"none": (0.0, 1.0), "full": (1.0, 0.08)}.get(job.activation_checkpoint.mode, (0.5, 0.4))
    layers, weights = arch.n_layers / degree.pipeline, num_params(arch) / degree.tensor / degree.pipeline
    together = job.training.local_batch_size * job.training.seq_len // degree.context  # tokens of a microbatch
    tokens = run.microbatches * together
    # What blocks keep of a token: the residual stream, twice; queries, keys, values and the output of attention; three
    # of SwiGLU; and the norms, which tensor parallelism gathers.
    values = (2 * arch.dim + 2 * arch.q_dim + 2 * arch.kv_dim + 3 * arch.ffn_dim) / degree.tensor + 2 * arch.dim
    peak = state_bytes(run) + 2 * values * kept * together * layers * min(run.microbatches, degree.pipeline)
    # Gradients that wait for the last microbatch are whole, and so are the weights of a pipeline's stages.
    peak += weights * (4 * (run.microbatches > 1) + (2 if degree.pipeline > 1 else 6 / layers))
    dtype, size = ("float8", 1) if job.float8.enable else ("bfloat16", 2)
    attention = 4 * arch.attended(job.training.seq_len) * arch.q_dim * layers / degree.tensor
    gathers, shards = 2 * (1 if degree.pipeline > 1 else run.microbatches), degree.shard * degree.context
    fsdp, replicas = ("fsdp", shards, shards * degree.tensor), ("replicate", degree.replicate, run.world_size)
    work = (
        ("mm", dtype, (1,) * 3, None, 1, (6 + 2 * again) * weights * tokens, 0),
        ("attention", "bfloat16", (1,) * 5, None, 1, (4 + (again == 1)) * attention * tokens, 0),
        ("other", "", (), None, 1, 0, 20 * values * tokens * layers),
        ("all_gather", "", (), ("tensor", degree.tensor, 1), 1, 0, (8 + 4 * again) * 2 * arch.dim * tokens * layers),
        ("all_gather", "", (), fsdp, gathers * layers, 0, gathers * weights * size),
        ("reduce_scatter", "", (), fsdp, layers, 0, 4 * weights),
        ("all_reduce", "", (), replicas, layers, 0, 4 * weights / degree.shard),
    )
    works = tuple(Work("backward", *each[:4], *map(int, each[4:])) for each in work)
    return forecast(run, [RankTrace(0, int(peak), "", {}, 0, works, int(1.1 * peak))], gpu)


def changed(run: Run, settings: Settings) -> Run | None:
    """The run with other values of some keys; None if it breaks a rule then."""
    new = with_keys(run, settings)
    return None if broken_rules(new) else new


def options(settings: Settings) -> tuple[str, ...]:
    """The options of a command line that make these settings."""
    words = ((f"--{key.replace('.', '.no-') if value is False else key}", value) for key, value in settings.items())
    return tuple(str(word) for pair in words for word in pair if not isinstance(word, bool))
