"""What a trace of torch.profiler says of the steps in it: what each part of a step takes, and the dearest operators.

Invariant: each moment of the traced steps counts for one part, so the parts add up to the step. It reads the exported
trace, whose format is documented, and needs no torch.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

PARTS = ("data", "forward", "loss", "backward", "pipeline", "clipping", "optimizer")
"""The ranges of a step that the trainer marks, in the order in which they come. "pipeline" is what a schedule does
beside forward and backward passes."""

_SCHEDULE = {"forward": re.compile(r"Forward \d+|PP:\d+F\d+"), "backward": re.compile(r"Backward \d+|PP:\d+[BIW]\d+")}
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_COLLECTIVE = re.compile(r"gloo:|nccl|c10d::|_c10d_functional::", re.IGNORECASE)
SUMMARY = ".summary.json"  # end of the name of a file that holds a StepProfile
_MOST_OPERATORS = 30
_LONGEST_NAME = 120

Interval = tuple[float, float]
Events = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Operator:
    """What calls of the same operator take in a step. On a GPU: the kernels that it launches.

    Attributes:
        seconds: Of a step, without what the operator calls.
        calls: Of a step.
    """

    name: str
    seconds: float
    calls: float


@dataclass(frozen=True)
class StepProfile:
    """The mean of some steps of a rank.

    Attributes:
        first_step: The first of the traced steps.
        last_step: The last one.
        device: "cpu" or "cuda".
        seconds: Of a step.
        parts: Part of the step -> seconds. They add up to `seconds`. "collectives": the device waits for other ranks,
            or sends and receives, and computes nothing. "idle", on a GPU only: it has nothing to do. "other": the rest.
        operators: The dearest ones, the dearest first.
        trace: File name of the trace.
    """

    rank: int
    first_step: int
    last_step: int
    device: str
    seconds: float
    parts: Mapping[str, float]
    operators: tuple[Operator, ...]
    trace: str

    @property
    def idle(self) -> float | None:
        """Share of the step, from 0 to 1, in which the GPU has nothing to do. None on a CPU."""
        return self.parts["idle"] / self.seconds if "idle" in self.parts else None

    def steps(self) -> str:
        """The steps in words: "step 10" or "steps 8 to 10"."""
        several = self.first_step < self.last_step
        return f"steps {self.first_step} to {self.last_step}" if several else f"step {self.last_step}"

    def table(self, most: int = 10) -> str:
        """The parts, and the `most` dearest operators, as lines of text."""
        rows = [("part of a step", "ms", "share", "")]
        rows += [(f"  {name}", *self._shown(seconds), "") for name, seconds in self.parts.items()]
        rows.append(("operators, without what they call", "ms", "share", "calls"))
        rows += [(f"  {op.name}", *self._shown(op.seconds), f"{op.calls:,.0f}") for op in self.operators[:most]]
        width = max(len(row[0]) for row in rows)
        lines = [f"{name:<{width}}{ms:>10}{share:>8}{calls:>9}".rstrip() for name, ms, share, calls in rows]
        return "\n".join([f"rank {self.rank}, {self.steps()}: {1e3 * self.seconds:,.2f} ms a step", *lines])

    def _shown(self, seconds: float) -> tuple[str, str]:
        return f"{1e3 * seconds:,.2f}", f"{seconds / self.seconds:.1%}"


def read_profile(trace: Path, device: str, *, rank: int, last_step: int, name: str) -> StepProfile:
    """The profile of a trace that is JSON.

    Args:
        device: "cpu" or "cuda".
        last_step: Number of the last step in it.
        name: Under which the trace is kept.

    Raises:
        ValueError: the file is not whole, or there is no step in it.
    """
    with trace.open(encoding="utf-8", errors="replace") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    steps = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep#")]
    if not steps:
        raise ValueError("there is no step in the trace")
    count, host = len(steps), [event for event in events if event.get("tid") == steps[0]["tid"]]
    marked = [e | {"name": part} for e in host if e.get("cat") == "user_annotation" and (part := _part(e["name"]))]
    ranges = sorted(pieces(marked))
    if device == "cuda":
        seconds, parts, totals = _of_gpu(events, ranges)
    else:
        span = min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps)
        seconds, parts, totals = _of_cpu(events, host, ranges, span)
    per_step = 1e-6 / count  # a trace has microseconds
    dearest = sorted(totals.items(), key=lambda item: -item[1][0])[:_MOST_OPERATORS]
    operators = (Operator(key[:_LONGEST_NAME], spent * per_step, n / count) for key, (spent, n) in dearest)
    order = (*PARTS, "collectives", "other", "idle")
    return StepProfile(
        rank=rank,
        first_step=last_step - count + 1,
        last_step=last_step,
        device=device,
        seconds=seconds * per_step,
        parts={part: parts[part] * per_step for part in order if part in parts},
        operators=tuple(operators),
        trace=name,
    )


def _part(name: str) -> str | None:
    """The part that a range of the trace marks, if it marks one."""
    if name in PARTS:
        return name
    return next((part for part, pattern in _SCHEDULE.items() if pattern.fullmatch(name)), None)


Totals = dict[str, tuple[float, int]]  # operator -> microseconds, calls


def _of_cpu(
    events: Events, host: Events, ranges: list[Piece], span: Interval
) -> tuple[float, dict[str, float], Totals]:
    """Length of the steps, their parts and operators. An operator without others in it computes; while none does and a
    collective is under way, the rank waits for others."""
    operators = [event for event in host if event.get("cat") == "cpu_op"]
    spent, calls = defaultdict[str, float](float), defaultdict[str, int](int)
    computing: list[Interval] = []
    for piece in pieces(operators):
        spent[piece.name] += piece.end - piece.start
        if piece.whole and not _COLLECTIVE.match(piece.name):
            computing.append((piece.start, piece.end))
    for event in operators:
        calls[event["name"]] += 1
    under_way = union(_interval(event) for event in events if _COLLECTIVE.match(event["name"]))
    waiting = minus(minus(under_way, union(computing)), [(-math.inf, span[0]), (span[1], math.inf)])
    parts = {part: 0.0 for part in PARTS if any(piece.name == part for piece in ranges)}
    for part in parts:
        within = [(piece.start, piece.end) for piece in ranges if piece.name == part]
        parts[part] = length(minus(union(within), waiting))
    if under_way:
        parts["collectives"] = length(waiting)
    total = span[1] - span[0]
    parts["other"] = total - sum(parts.values())
    return total, parts, {name: (spent[name], calls[name]) for name in spent}


def _of_gpu(events: Events, ranges: list[Piece]) -> tuple[float, dict[str, float], Totals]:
    """The same on the GPU's own clock. A kernel belongs to the part in which the host launched it."""
    kernels = sorted((event for event in events if event.get("cat") in _ON_GPU), key=lambda event: event["ts"])
    if not kernels:
        raise ValueError("there is no kernel in the trace")
    launches = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    names = {event["args"]["External id"]: event["name"] for event in events
             if event.get("cat") == "cpu_op" and "External id" in event.get("args", {})}  # fmt: skip
    starts = [piece.start for piece in ranges]
    parts = defaultdict[str, float](float)
    totals: Totals = {}
    done, computing, sending = -math.inf, list[Interval](), list[Interval]()
    for kernel in kernels:
        args, (start, end) = kernel.get("args", {}), _interval(kernel)
        name = names.get(args.get("External id"), kernel["name"])
        spent, calls = totals.get(name, (0.0, 0))
        totals[name] = spent + end - start, calls + 1
        if _COLLECTIVE.match(kernel["name"]):
            sending.append((start, end))
            continue
        launched = launches.get(args.get("correlation"), -math.inf)
        at = bisect_right(starts, launched) - 1
        part = ranges[at].name if at >= 0 and launched < ranges[at].end else "other"
        parts[part] += max(0.0, end - max(start, done))
        done = max(done, end)
        computing.append((start, end))
    if sending:
        parts["collectives"] = length(minus(union(sending), union(computing)))
    busy = union([*computing, *sending])
    total = busy[-1][1] - busy[0][0]
    parts["idle"] = total - length(busy)
    return total, dict(parts), totals


# ---------------------------------------------------------------------------------------------------------- intervals


class Piece(NamedTuple):
    """A stretch of an event without other events in it. `whole`: it is the whole event."""

    start: float
    end: float
    name: str
    whole: bool


def pieces(events: Events) -> Iterator[Piece]:
    """The events of one thread, which lie within each other, as pieces that do not overlap: each moment belongs to the
    innermost event."""
    inside: list[tuple[float, str]] = []  # end and name of the events at this moment
    since, whole = 0.0, False

    def leave(until: float) -> Iterator[Piece]:
        nonlocal since, whole
        while inside and inside[-1][0] <= until:
            end, name = inside.pop()
            if end > since:
                yield Piece(since, end, name, whole)
            since, whole = end, False

    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        start, end = _interval(event)
        yield from leave(start)
        if inside:
            if start > since:
                yield Piece(since, start, inside[-1][1], False)
            end = min(end, inside[-1][0])  # the clock's digits are rounded
        inside.append((end, event["name"]))
        since, whole = start, True
    yield from leave(math.inf)


def _interval(event: Mapping[str, Any]) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as intervals in order that do not overlap."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def minus(those: Sequence[Interval], without: Sequence[Interval]) -> list[Interval]:
    """The moments of `those` that are not in `without`. Both are in order and do not overlap."""
    left: list[Interval] = []
    first = 0
    for start, end in those:
        while first < len(without) and without[first][1] <= start:
            first += 1
        for cut in without[first:]:
            if cut[0] >= end:
                break
            if cut[0] > start:
                left.append((start, cut[0]))
            start = max(start, cut[1])
        if start < end:
            left.append((start, end))
    return left


def length(intervals: Iterable[Interval]) -> float:
    """Of all of them, which do not overlap."""
    return sum(end - start for start, end in intervals)
