"""What would make a run fit or go faster: the largest batch, the cheapest changes, and a search over layouts.

Invariant: each figure comes from a trace of the changed job. Estimates decide only which jobs are traced.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from titanlite.config.rules import Context, broken_rules
from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.observe.flops import state_bytes
from titanlite.observe.forecast import Change, Forecast
from titanlite.observe.gpus import Gpu
from titanlite.plan.bounds import MOST_TOKENS, guessed_seconds, likely_bytes
from titanlite.plan.counts import RankTrace
from titanlite.plan.forecast import Tracer, forecast, memory_of_rank, traces_of
from titanlite.runtime.logging import note

Settings = Mapping[str, Any]  # "section.key" -> value

HALF_STATE = {"optimizer.state_dtype": "bfloat16", "optimizer.stochastic_rounding": True}
BF16 = {"training.dtype": "bfloat16", "optimizer.stochastic_rounding": True}
FULL = {"activation_checkpoint.mode": "full"}
SELECTIVE = {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": "op"}


# The rules about files are left out, because no change here concerns a file.
_FILE_KEYS = ("tokenizer.path", "dataset.source", "validation.source", "job.dump_folder", "checkpoint.folder")


def changed(run: Run, settings: Settings) -> Run | None:
    """The run with other values of some keys; None if it breaks a rule then."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    update = {name: getattr(run.job, name).model_copy(update=values) for name, values in sections.items()}
    new = Run(JobConfig.model_validate(run.job.model_copy(update=update)), run.world_size)
    return None if broken_rules(Context(new), _FILE_KEYS) else new


def words(settings: Settings) -> tuple[str, ...]:
    """The options of a command line that make these settings."""
    listed: list[str] = []
    for key, value in settings.items():
        section, name = key.split(".")
        if isinstance(value, bool):
            listed.append(f"--{section}.{name}" if value else f"--{section}.no-{name}")
        else:
            listed += [f"--{section}.{name}", str(value)]
    return tuple(listed)


# ------------------------------------------------------------------------------------------------------------ one run


def largest_batch(run: Run, plan: Forecast, trace: Tracer, gpu: Gpu) -> int | None:
    """The most rows of a forward pass that fit, among the numbers that the rules allow; None if one does not.

    The bytes at each moment are a straight line in the rows, so the peak, which is the most of them, is convex: a line
    through two numbers of rows is never above the peak of more rows. So a few traces find the number and prove it.
    """
    known = {run.job.training.local_batch_size: plan}

    def plan_of(rows: int) -> Forecast | None:
        settings = _rows(run, rows)
        if rows not in known and (new := changed(run, settings)) is not None:
            after = _plan_of(new, settings, gpu, lambda: traces_of(new, gpu, trace))
            if after is not None:
                known[rows] = after
        return known.get(rows)

    least = _least_convex(run)
    most = MOST_TOKENS * run.degrees.context // run.job.training.seq_len
    for _ in range(6):
        fitting = [rows for rows, each in known.items() if each.fits]
        tight = [rows for rows, each in known.items() if not each.fits]
        low, high = max(fitting, default=0), min(tight, default=most + 1)
        if high - low <= 1 or _is_last(known, low, least):
            break
        guess = _between(known, low, high, least)
        while guess > low and plan_of(guess) is None:  # a rule forbids it
            guess -= 1
        if guess <= low:
            break
    return max((rows for rows, each in known.items() if each.fits), default=None)


def _rows(run: Run, rows: int) -> Settings:
    """Other rows of a forward pass. The global batch stays if it can be split so."""
    whole = run.job.training.global_batch_size
    size = whole if whole == -1 or whole % (rows * run.degrees.data) == 0 else -1
    return {"training.local_batch_size": rows, "training.global_batch_size": size}


def _least_convex(run: Run) -> int | None:
    """The rows from which on the peak is convex in them, because the logits of a chunk of the loss take the same memory
    from there. None if the number of microbatches depends on the rows."""
    if run.job.training.global_batch_size != -1:
        return None
    from titanlite.optim.loss import TOKENS_OF_FULL_CHUNKS  # it imports torch

    tokens = run.job.training.seq_len // run.degrees.context
    return -(-TOKENS_OF_FULL_CHUNKS // tokens)


def _is_last(known: Mapping[int, Forecast], low: int, least: int | None) -> bool:
    """Whether `low` rows fit and one more cannot, by the line through the two largest numbers of rows that fit."""
    points = sorted(rows for rows in known if least is not None and least <= rows <= low)[-2:]
    if len(points) < 2:
        return False
    first, second = (known[rows] for rows in points)
    return second.needs + (second.needs - first.needs) / (points[1] - points[0]) > second.memory


def _between(known: Mapping[int, Forecast], low: int, high: int, least: int | None) -> int:
    """The rows at which the memory is full, by a line through two known points, strictly between `low` and `high`."""
    points = sorted((rows, each.needs, each.memory) for rows, each in known.items())
    if len(points) == 1:
        rows, needs, memory = points[0]
        guess = max(rows * 2, least or 0) if needs <= memory else rows // 2
    else:
        straight = [point for point in points if least is not None and point[0] >= least]
        (first, less, _), *_, (second, more, memory) = straight if len(straight) > 1 else points
        slope = max(1.0, (more - less) / (second - first))
        guess = int(first + (memory - less) / slope)
    return max(low + 1, min(high - 1, guess))


def remedies(run: Run) -> Iterator[Settings]:
    """Changes that take less memory, one at a time, then together."""
    training, batch = run.job.training, run.global_batch_size
    single: list[Settings] = []
    rows = training.local_batch_size
    while rows > 1:
        rows //= 2
        if batch % (rows * run.degrees.data) == 0:
            single.append({"training.local_batch_size": rows, "training.global_batch_size": batch})
    single.append({"parallelism.fsdp_reshard_after_forward": "always"})
    if run.microbatches > 1 and run.degrees.pipeline == 1:
        single.append({"parallelism.fsdp_reduce": "microbatch"})
    single += [SELECTIVE] if run.job.activation_checkpoint.mode == "none" else []
    single += [FULL, HALF_STATE, BF16]
    for degree in (2, 4, 8):
        if degree > run.degrees.tensor and run.world_size % degree == 0:
            layout = {"parallelism.tensor_parallel_degree": degree, "parallelism.data_parallel_shard_degree": -1}
            single.append({**layout, "training.global_batch_size": batch})
    single.append({"training.enable_cpu_offload": True})
    yield from single
    small = next((each for each in reversed(single) if "training.local_batch_size" in each), {})
    for together in ((small, FULL), (small, FULL, HALF_STATE), (small, FULL, BF16)):
        yield {key: value for part in together for key, value in part.items()}
    yield {**small, **FULL, **BF16, "training.enable_cpu_offload": True}


def what_fits(run: Run, plan: Forecast, trace: Tracer, gpu: Gpu, most: int = 5) -> tuple[Change, ...]:
    """Changes that make a run fit which does not, cheapest first.

    Changes that act on the state alone are not traced if the state is too large even so.
    """
    found: list[Change] = []
    seen: set[tuple[str, ...]] = set()
    for settings in remedies(run):
        new = changed(run, settings)
        if new is None or new.job == run.job or words(settings) in seen or state_bytes(new) > memory_of_rank(new, gpu):
            continue
        if len(settings) > 2 and len(found) >= 2:  # several changes at once are for runs that no single one helps
            break
        seen.add(words(settings))
        after = _plan_of(new, settings, gpu, partial(traces_of, new, gpu, trace))
        if after is not None and after.fits and after.needs < plan.needs:
            found.append(_change(settings, after, plan))
    return tuple(sorted(found, key=lambda change: change.price)[:most])


def _plan_of(run: Run, settings: Settings, gpu: Gpu, traces: Callable[[], Sequence[RankTrace]]) -> Forecast | None:
    """The plan of a changed run. If it cannot be traced, it is named and left out (None), because the advice about
    other changes holds without it."""
    try:
        return forecast(run, traces(), gpu)
    except Exception as error:
        if isinstance(error, BrokenExecutor):
            raise  # no other trace would come to an end, either
        reason = str(error).strip().partition("\n")[0] or "no reason given"
        note(f"Left out, because it cannot be traced: {' '.join(words(settings))} ({type(error).__name__}: {reason})")
        return None


def _change(settings: Settings, after: Forecast, before: Forecast) -> Change:
    speed = after.tokens_per_second
    return Change(
        words=words(settings), needs=after.needs, tokens_per_second=speed, price=1 - speed / before.tokens_per_second
    )


def room_for_state(run: Run, memory: int) -> str:
    """What makes room for weights, gradients and moments alone, which are more than the `memory` bytes of a rank."""
    for settings in (HALF_STATE, BF16):
        new = changed(run, settings)
        if new is not None and state_bytes(new) < memory:
            return f"Cheapest change that makes room for them: {' '.join(words(settings))}."
    ranks = -(-state_bytes(run) * run.world_size // memory)
    return f"At least {ranks:,} such devices hold them, without anything else; or take a smaller model."


# ------------------------------------------------------------------------------------------------------------- search


@dataclass(frozen=True)
class Found:
    """A job that a search has traced and that fits."""

    run: Run
    settings: Settings
    plan: Forecast


def candidates(run: Run, gpu: Gpu) -> Iterator[tuple[Settings, Run]]:
    """Layouts, recomputation, batch sizes and precisions for the ranks of a run that the rules allow and that an
    estimate does not show to be far too large."""
    world, arch, training = run.world_size, run.arch, run.job.training
    powers = [2**n for n in range(10)]
    tensor = [n for n in powers if n <= min(gpu.machine, arch.n_kv_heads, world)]
    pipeline = [n for n in powers if n <= min(16, world, arch.n_layers // 2)] if world > gpu.machine else [1]
    context = [n for n in (1, 2, 4, 8) if n == 1 or training.seq_len >= 16384 * n]
    replicas = [1, *([world // gpu.machine] if world > gpu.machine and world % gpu.machine == 0 else [])]
    precisions: list[Settings] = [{"float8.enable": False}]
    if gpu.fp8 and run.compiles("model"):
        precisions.append({"float8.enable": True})
    recompute: list[Settings] = [{"activation_checkpoint.mode": "none"}, SELECTIVE, FULL]
    for layout in itertools.product(tensor, pipeline, context, replicas):
        ranks = layout[0] * layout[1] * layout[2]
        if world % (ranks * layout[3]):
            continue
        for precision, again, rows in itertools.product(precisions, recompute, (1, 2, 4, 8, 16)):
            settings = _layout(run, *layout, rows)
            if settings is None:
                continue
            settings = {**settings, **precision, **again}
            new = changed(run, settings)
            if new is not None and 0.85 * likely_bytes(new) < memory_of_rank(new, gpu):
                yield settings, new


def _layout(run: Run, tensor: int, pipeline: int, context: int, replicas: int, rows: int) -> Settings | None:
    """The keys of a layout. A global batch that the job names stays; None if it cannot be split so."""
    data = run.world_size // (tensor * pipeline * context)
    batch = run.job.training.global_batch_size
    if batch == -1 and pipeline > 1:
        batch = rows * data * 4 * pipeline  # so that a fifth of the time is idle at the most
    elif batch != -1 and batch % (rows * data):
        return None
    return {
        "parallelism.tensor_parallel_degree": tensor,
        "parallelism.pipeline_parallel_degree": pipeline,
        "parallelism.context_parallel_degree": context,
        "parallelism.data_parallel_replicate_degree": replicas,
        "parallelism.data_parallel_shard_degree": -1,
        "training.local_batch_size": rows,
        "training.global_batch_size": batch,
    }


def search(
    run: Run, trace: Tracer, gpu: Gpu, pool: Executor, workers: int, seconds: float = 120.0, most: int = 10
) -> tuple[list[Found], int]:
    """The fastest jobs that fit, fastest first, and how many were traced.

    The candidates are traced in the order of a guess at their speed, until the time is over. A candidate is passed over
    if the same with fewer rows does not fit, or if it cannot be traced; then it is named.

    Args:
        trace: Can be sent to another process.
        pool: Where traces run.
        workers: How many traces run at a time.
        seconds: After this time no further trace is started.

    Raises:
        BrokenExecutor: A process of the pool was killed.
    """

    def speed(candidate: tuple[Settings, Run]) -> float:
        return candidate[1].global_batch_size / guessed_seconds(candidate[1], gpu)

    waiting = sorted(candidates(run, gpu), key=speed, reverse=True)
    too_large: list[Settings] = []
    found: list[Found] = []
    running: dict[Future[Sequence[Any]], tuple[Settings, Run]] = {}
    deadline, traced = time.monotonic() + seconds, 0
    while waiting or running:
        while waiting and len(running) < workers and time.monotonic() < deadline:
            settings, new = waiting.pop(0)
            if not any(_is_larger(settings, other) for other in too_large):
                running[pool.submit(traces_of, new, gpu, trace)] = settings, new
        if not running:
            break
        for done in wait(running, return_when=FIRST_COMPLETED).done:
            settings, new = running.pop(done)
            plan = _plan_of(new, settings, gpu, done.result)
            if plan is None:
                continue
            traced += 1
            if plan.fits:
                found.append(Found(new, settings, plan))
            else:
                too_large.append(settings)
    return best(found, most), traced


def best(found: Iterable[Found], most: int) -> list[Found]:
    """The fastest, fastest first."""
    return sorted(found, key=lambda each: -each.plan.tokens_per_second)[:most]


def _is_larger(settings: Settings, other: Settings) -> bool:
    """Whether a candidate differs from another in nothing but more rows or less recomputation."""
    order = {"none": 2, "selective": 1, "full": 0}
    free = ("training.local_batch_size", "training.global_batch_size", "activation_checkpoint.mode")
    free += ("activation_checkpoint.selective_ac_option",)
    same = all(settings[key] == other[key] for key in settings if key not in free and key in other)
    key = "activation_checkpoint.mode"
    more_rows = settings["training.local_batch_size"] >= other["training.local_batch_size"]
    return same and more_rows and order[settings[key]] >= order[other[key]]
