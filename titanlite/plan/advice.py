"""What would make a run fit or go faster: the largest batch, the cheapest changes, and a search over layouts.

Invariant: each figure comes from a trace of the changed job. Estimates decide only which jobs are traced.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

from titanlite.config.errors import UserError
from titanlite.config.run import Run
from titanlite.observe.flops import flops_per_token, num_params, state_bytes
from titanlite.observe.forecast import Change, Forecast
from titanlite.observe.gpus import Gpu
from titanlite.optim.loss import TOKENS_OF_FULL_CHUNKS
from titanlite.plan.roofline import Tracer, forecast, memory_of_rank
from titanlite.plan.start import BF16, HALF_STATE, Settings, changed, kept_by_blocks, options
from titanlite.plan.trace import MOST_TOKENS, RankTrace, trace_run
from titanlite.runtime.logging import note

WORKERS = 2  # processes that trace
FULL = {"activation_checkpoint.mode": "full"}
SELECTIVE = {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}


def make_plan(run: Run, gpu: Gpu, assumed: bool = False, quick: bool = False, remedies: bool = False) -> Forecast:
    """The plan of a run, with the largest batch that fits (unless `quick`), or with what makes the run fit.

    Args:
        assumed: Nobody has named the device, and this machine has none.
        remedies: List what takes less memory even if the run fits.
    """
    # A pipeline has several kinds of ranks to trace. For less it would not pay to start processes.
    with workers() if run.degrees.pipeline > 2 else nullcontext() as pool:
        trace = partial(trace_run, apply=pool.map if pool else map)
        plan = forecast(run, trace(run, gpu.fp8 > 0), gpu, assumed)
        if not plan.fits or remedies:
            return plan.model_copy(update={"changes": what_fits(run, plan, trace, gpu)})
        if quick:
            return plan
        return plan.model_copy(update={"largest_local_batch_size": largest_batch(run, plan, trace, gpu)})


@contextmanager
def workers() -> Iterator[Executor]:
    """Processes for traces. Raises UserError: one of them was killed."""
    try:
        with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn"), initializer=_quiet) as pool:
            yield pool
    except BrokenExecutor:
        raise UserError(
            f"A process of the plan was killed, probably because the memory of this machine is full: {WORKERS} layouts "
            "are traced at a time. Plan again where more memory is free."
        ) from None


def _quiet() -> None:
    """What a process of the pool prints goes to standard error."""
    os.dup2(2, 1)


def _plan_of(run: Run, settings: Settings, gpu: Gpu, traces: Callable[[], Sequence[RankTrace]]) -> Forecast | None:
    """The plan of a changed run. If it cannot be traced, it is named and left out (None), because the advice about
    other changes holds without it."""
    try:
        return forecast(run, traces(), gpu)
    except Exception as error:
        if isinstance(error, BrokenExecutor):
            raise  # no other trace would come to an end, either
        reason = str(error).strip().partition("\n")[0] or "no reason given"
        note(f"Left out, because it cannot be traced: {' '.join(options(settings))} ({type(error).__name__}: {reason})")
        return None


# ------------------------------------------------------------------------------------------------------------ one run


def largest_batch(run: Run, plan: Forecast, trace: Tracer, gpu: Gpu) -> int | None:
    """The most rows of a forward pass that fit, among the numbers that the rules allow; None if one does not.

    The bytes at each moment are a straight line in the rows, so the peak, which is the most of them, is convex: a line
    through two numbers of rows is never above the peak of more rows. So a few traces find the number and prove it. It
    is convex from the rows on at which the loss has chunks of full size, if the rows do not change the microbatches.
    """
    training, known = run.job.training, {run.job.training.local_batch_size: plan}
    most = MOST_TOKENS * run.degrees.context // training.seq_len
    for _ in range(6):
        low = max((rows for rows, each in known.items() if each.fits), default=0)
        high = min((rows for rows, each in known.items() if not each.fits), default=most + 1)
        guess, straight = _crossing(known, -(-TOKENS_OF_FULL_CHUNKS * run.degrees.context // training.seq_len))
        if high - low <= 1 or (guess <= low and straight and training.global_batch_size == -1):
            break
        for rows in range(max(low + 1, min(high - 1, guess)), low, -1):  # a rule may forbid some
            settings = _rows(run, rows)
            new = changed(run, settings)
            after = new and _plan_of(new, settings, gpu, partial(trace, new, gpu.fp8 > 0))
            if after:
                known[rows] = after
                break
        else:
            break
    return max((rows for rows, each in known.items() if each.fits), default=None)


def _crossing(known: Mapping[int, Forecast], full: int) -> tuple[int, bool]:
    """The most rows that fit by a line through the two largest numbers that are known, and whether both are `full`."""
    *others, (many, more) = sorted(known.items())
    if not others:
        return (max(2 * many, full) if more.fits else many // 2), False
    few, less = others[-1]
    slope = max(1.0, (more.needs - less.needs) / (many - few))
    return few + int((more.memory - less.needs) / slope), few >= full


def _rows(run: Run, rows: int) -> Settings:
    """Other rows of a forward pass. The global batch stays if it can be split so."""
    whole = run.job.training.global_batch_size
    size = whole if whole == -1 or whole % (rows * run.degrees.data) == 0 else -1
    return {"training.local_batch_size": rows, "training.global_batch_size": size}


def what_fits(run: Run, plan: Forecast, trace: Tracer, gpu: Gpu, most: int = 5) -> tuple[Change, ...]:
    """Changes that make a run fit which does not, cheapest first. Those whose state alone is too large are not
    traced."""
    found: list[Change] = []
    seen = [run.job]
    for settings in _remedies(run):
        new = changed(run, settings)
        if new is None or new.job in seen or state_bytes(new) > memory_of_rank(new, gpu):
            continue
        if len(settings) > 2 and len(found) >= 2:  # several changes at once are for runs that no single one helps
            break
        seen.append(new.job)
        after = _plan_of(new, settings, gpu, partial(trace, new, gpu.fp8 > 0))
        if after is not None and after.fits and after.needs < plan.needs:
            speed = after.tokens_per_second
            price = 1 - speed / plan.tokens_per_second
            found.append(Change(words=options(settings), needs=after.needs, tokens_per_second=speed, price=price))
    return tuple(sorted(found, key=lambda change: change.price)[:most])


def _remedies(run: Run) -> Iterator[Settings]:
    """Changes that take less memory, one at a time, then together."""
    batch, rows = run.global_batch_size, run.job.training.local_batch_size
    smaller = [rows >> n for n in range(1, rows.bit_length()) if batch % ((rows >> n) * run.degrees.data) == 0]
    fewer = [{"training.local_batch_size": size, "training.global_batch_size": batch} for size in smaller]
    yield from fewer
    yield {"parallelism.fsdp_reshard_after_forward": "always"}
    if run.microbatches > 1 and run.degrees.pipeline == 1:
        yield {"parallelism.fsdp_reduce": "microbatch"}
    if run.job.activation_checkpoint.mode == "none":
        yield SELECTIVE
    yield from (FULL, HALF_STATE, BF16)
    for degree in (2, 4, 8):
        if degree > run.degrees.tensor and run.world_size % degree == 0:
            layout = {"parallelism.tensor_parallel_degree": degree, "parallelism.data_parallel_shard_degree": -1}
            yield {**layout, "training.global_batch_size": batch}
    yield {"training.enable_cpu_offload": True}
    small = fewer[-1] if fewer else {}
    yield {**small, **FULL}
    yield {**small, **FULL, **HALF_STATE}
    yield {**small, **FULL, **BF16}
    yield {**small, **FULL, **BF16, "training.enable_cpu_offload": True}


# ------------------------------------------------------------------------------------------------------------- search


@dataclass(frozen=True)
class Found:
    """A job that a search has traced and that fits."""

    run: Run
    settings: Settings
    plan: Forecast

    @property
    def options(self) -> tuple[str, ...]:
        """The options of the command line that make this job of the one that was given."""
        return options(self.settings)

    @property
    def words(self) -> str:
        """What is not as by default, in a few words."""
        chosen = [(key.partition(".")[2], value) for key, value in self.settings.items() if value not in (-1, False)]
        return ", ".join(f"{name} {value}" for name, value in chosen if value != 1 or "degree" not in name)


def search(
    run: Run, gpu: Gpu, seconds: float = 120.0, most: int = 10, trace: Tracer = trace_run, pool: Executor | None = None
) -> tuple[list[Found], int]:
    """The fastest jobs that fit, fastest first, and how many were traced.

    The candidates are traced in the order of a guess at their speed, until the time is over. A candidate is passed over
    if the same with fewer rows or more recomputation does not fit, or if it cannot be traced; then it is named.

    Args:
        seconds: After this time no further trace is started.
        trace: Can be sent to another process.
        pool: Where traces run; None: in processes of their own.

    Raises:
        UserError: A process of a trace was killed.
    """
    waiting = sorted(candidates(run, gpu), key=lambda each: _guessed_seconds(each[1], gpu) / each[1].global_batch_size)
    too_large: list[Run] = []
    found: list[Found] = []
    running: dict[Future[Sequence[RankTrace]], tuple[Settings, Run]] = {}
    deadline, traced = time.monotonic() + seconds, 0
    with nullcontext(pool) if pool else workers() as pool:
        while waiting or running:
            while waiting and len(running) < WORKERS and time.monotonic() < deadline:
                settings, new = waiting.pop(0)
                if not any(_takes_more(new, other) for other in too_large):
                    running[pool.submit(trace, new, gpu.fp8 > 0)] = settings, new
            if not running:
                break
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                settings, new = running.pop(done)
                if plan := _plan_of(new, settings, gpu, done.result):
                    traced += 1
                    if plan.fits:
                        found.append(Found(new, settings, plan))
                    else:
                        too_large.append(new)
    return sorted(found, key=lambda each: -each.plan.tokens_per_second)[:most], traced


def candidates(run: Run, gpu: Gpu) -> Iterator[tuple[Settings, Run]]:
    """Layouts, recomputation, batch sizes and precisions for the ranks of a run that the rules allow, and whose state
    and kept activations are not too large already. A global batch that the job names stays."""
    world, arch, training = run.world_size, run.arch, run.job.training
    several, powers = world > gpu.machine, [2**n for n in range(10)]
    tensor = [n for n in powers if n <= min(gpu.machine, arch.n_kv_heads, world)]
    pipeline = [n for n in powers if n <= min(16, world, arch.n_layers // 2)] if several else [1]
    context = [n for n in (1, 2, 4, 8) if n == 1 or training.seq_len >= 16384 * n]
    replicas = [1, world // gpu.machine] if several and world % gpu.machine == 0 else [1]
    float8 = [False, True] if gpu.fp8 and run.compiles("model") else [False]
    recompute: list[Settings] = [{"activation_checkpoint.mode": "none"}, SELECTIVE, FULL]
    for *degrees, copies, fp8, again, rows in itertools.product(
        tensor, pipeline, context, replicas, float8, recompute, (1, 2, 4, 8, 16)
    ):
        ranks, batch = degrees[0] * degrees[1] * degrees[2], training.global_batch_size
        if batch == -1 and degrees[1] > 1:
            batch = rows * (world // ranks) * 4 * degrees[1]  # so that a fifth of the time is idle at the most
        if world % (ranks * copies) or (batch != -1 and batch % (rows * (world // ranks))):
            continue
        names = ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel_replicate")
        layout = {f"parallelism.{name}_degree": n for name, n in zip(names, (*degrees, copies), strict=True)}
        layout |= {"parallelism.data_parallel_shard_degree": -1, "float8.enable": fp8}
        settings = {**layout, "training.local_batch_size": rows, "training.global_batch_size": batch, **again}
        new = changed(run, settings)
        if new is not None:
            waiting = min(new.microbatches, new.degrees.pipeline)
            if state_bytes(new) + kept_by_blocks(new, waiting) < memory_of_rank(new, gpu):
                yield settings, new


def _guessed_seconds(run: Run, gpu: Gpu) -> float:
    """A guess at the time of a step on one rank, to decide which candidates are traced first."""
    arch, degree, job = run.arch, run.degrees, run.job
    rows = run.global_batch_size / degree.data
    again = {"full": 4 / 3, "selective": 7 / 6}.get(job.activation_checkpoint.mode, 1.0)
    rate = 0.5e12 * gpu.bf16 * (1.5 if job.float8.enable else 1.0)
    tokens = rows * job.training.seq_len / degree.context
    parallel = degree.tensor * degree.pipeline
    compute = tokens / parallel * flops_per_token(arch, job.training.seq_len) * again / rate
    hidden_states = 16 * arch.n_layers / degree.pipeline * tokens * arch.dim * (degree.tensor > 1)
    shards = degree.shard * degree.context * degree.tensor
    link, network = gpu.link * 1e9, gpu.network * 1e9 * shards / gpu.machine
    fsdp = 8 * num_params(arch) / parallel / (link if shards <= gpu.machine else network)
    idle = 1 + (degree.pipeline - 1) / run.microbatches
    return (max(compute, fsdp) + hidden_states / link) * idle


def _takes_more(run: Run, other: Run) -> bool:
    """Whether a candidate differs from another in nothing but more rows or less recomputation."""
    order = ("full", "selective", "none")
    mode, than = (order.index(each.job.activation_checkpoint.mode) for each in (run, other))
    rows, fewer = (each.job.training.local_batch_size for each in (run, other))
    same = (run.degrees, run.job.float8) == (other.degrees, other.job.float8)
    return same and rows >= fewer and mode >= than
