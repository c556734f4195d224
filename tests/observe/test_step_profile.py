"""What a trace says: each moment of a step counts once, and an operator without what it calls."""

import json
from pathlib import Path
from typing import Any

import pytest

from titanlite.observe.step_profile import StepProfile, minus, pieces, read_profile, union

HOST, OTHER = 1, 2


def event(name: str, start: float, end: float, kind: str = "cpu_op", thread: int = HOST, **args: Any) -> dict[str, Any]:
    where = {"ph": "X", "cat": kind, "name": name, "pid": 0, "tid": thread}
    return {**where, "ts": start, "dur": end - start, "args": args}


def mark(name: str, start: float, end: float, thread: int = HOST) -> dict[str, Any]:
    return event(name, start, end, "user_annotation", thread)


def profiled(tmp_path: Path, events: list[dict[str, Any]], device: str = "cpu", last_step: int = 9) -> StepProfile:
    path = tmp_path / "trace"
    path.write_text(json.dumps({"traceEvents": [*events, {"ph": "i", "name": "Record Window End", "ts": 0}]}))
    return read_profile(path, device, rank=3, last_step=last_step, name="kept.json.gz")


def in_microseconds(profile: StepProfile) -> dict[str, float]:
    return {part: round(1e6 * seconds, 3) for part, seconds in profile.parts.items()}


def test_each_moment_belongs_to_the_innermost_event():
    found = [
        tuple(piece) for piece in pieces([event("b", 2, 4), event("a", 0, 10), event("c", 5, 10), event("d", 12, 13)])
    ]
    assert found == [
        (0, 2, "a", False),
        (2, 4, "b", True),
        (4, 5, "a", False),
        (5, 10, "c", True),
        (12, 13, "d", True),
    ]


def test_intervals():
    assert union([(3, 4), (0, 1), (1, 2), (3, 5)]) == [(0, 2), (3, 5)]
    assert minus([(0, 10), (20, 30)], [(-5, 1), (2, 3), (9, 21), (29, 40)]) == [(1, 2), (3, 9), (21, 29)]


def test_on_a_cpu_the_parts_add_up_and_waiting_for_others_is_collectives(tmp_path: Path):
    profile = profiled(
        tmp_path,
        [
            mark("ProfilerStep#8", 0, 100), mark("ProfilerStep#9", 100, 200),
            mark("data", 0, 10), mark("forward", 10, 50), mark("loss", 40, 50), mark("backward", 50, 90),
            mark("FSDP::pre_forward", 10, 30), event("aten::linear", 32, 38), event("aten::mm", 33, 37),
            # From 12 to 20 nothing is computed, and from 20 to 30 something is.
            mark("gloo:all_gather", 12, 30, OTHER), event("aten::copy_", 20, 30),
            # The operator of a collective waits itself.
            event("c10d::allreduce_", 150, 160), event("aten::mm", 170, 180),
        ],
    )  # fmt: skip
    assert profile.steps() == "steps 8 to 9"
    assert profile.seconds == pytest.approx(100e-6)
    assert in_microseconds(profile) == {
        "data": 5, "forward": 11, "loss": 5, "backward": 20, "collectives": 9, "other": 50
    }  # fmt: skip
    assert sum(profile.parts.values()) == pytest.approx(profile.seconds)
    spent = {operator.name: (round(1e6 * operator.seconds, 3), operator.calls) for operator in profile.operators}
    assert spent == {
        "aten::mm": (7, 1),
        "aten::copy_": (5, 0.5),
        "c10d::allreduce_": (5, 0.5),
        "aten::linear": (1, 0.5),
    }
    assert profile.idle is None


def test_a_schedule_of_stages_marks_its_passes_itself(tmp_path: Path):
    ranges = [
        ("Forward 0", 10, 20),
        ("PP:0F1", 25, 30),
        ("Backward 0", 40, 55),
        ("PP:0W1", 60, 65),
        ("PP:0SEND_F1", 70, 80),
    ]
    marks = [mark(*range_) for range_ in [("ProfilerStep#1", 0, 100), ("pipeline", 5, 95), *ranges]]
    assert in_microseconds(profiled(tmp_path, marks)) == {"forward": 15, "backward": 20, "pipeline": 55, "other": 10}


def test_on_a_gpu_a_kernel_belongs_to_the_part_that_launched_it(tmp_path: Path):
    def launched(
        number: int, at: float, name: str, start: float, end: float, operator: str = ""
    ) -> list[dict[str, Any]]:
        ids: dict[str, Any] = {"External id": 100 + number}
        call = [event(operator, at, at + 1, **ids)] if operator else []
        ids |= {"correlation": number}
        launch = event("cudaLaunchKernel", at, at + 1, "cuda_runtime", **ids)
        return [*call, launch, event(name, start, end, "kernel", 7, **ids)]

    profile = profiled(
        tmp_path,
        [
            mark("ProfilerStep#1", 0, 40), mark("forward", 2, 10), mark("backward", 10, 30),
            *launched(1, 3, "sm90_gemm", 50, 60, "aten::mm"), *launched(2, 5, "ncclDevKernel_AllGather", 55, 75),
            *launched(3, 12, "sm90_gemm", 75, 85, "aten::mm"), *launched(4, 35, "adam", 90, 100),
        ],
        "cuda",
    )  # fmt: skip
    # From 60 to 75 the GPU only sends, and from 85 to 90 it does nothing.
    assert in_microseconds(profile) == {"forward": 10, "backward": 10, "collectives": 15, "other": 10, "idle": 5}
    assert profile.idle == pytest.approx(0.1)
    assert {operator.name: operator.calls for operator in profile.operators} == {
        "aten::mm": 2, "ncclDevKernel_AllGather": 1, "adam": 1
    }  # fmt: skip


def test_the_table_has_parts_and_operators(tmp_path: Path):
    profile = profiled(
        tmp_path, [mark("ProfilerStep#1", 0, 4000), mark("data", 0, 1000), event("aten::mm", 1000, 2000)]
    )
    lines = profile.table().splitlines()
    assert lines[0] == "rank 3, step 9: 4.00 ms a step"
    assert [line.split() for line in lines[2:]] == [
        ["data", "1.00", "25.0%"],
        ["other", "3.00", "75.0%"],
        ["operators,", "without", "what", "they", "call", "ms", "share", "calls"],
        ["aten::mm", "1.00", "25.0%", "1"],
    ]


def test_a_trace_without_a_step_or_a_kernel_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="no step"):
        profiled(tmp_path, [mark("data", 0, 1)])
    with pytest.raises(ValueError, match="no kernel"):
        profiled(tmp_path, [mark("ProfilerStep#1", 0, 1)], "cuda")
