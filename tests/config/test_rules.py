"""Degrees and their arithmetic: what is refused, and that the nearest which the answer names works."""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlite.config.layout import degrees, sequence_divisor
from titanlite.config.rules import Problem, layout_problems
from titanlite.config.run import Run
from titanlite.config.schema import JobConfig, Parallelism

some = st.integers(1, 4)


@given(some, some, some, some, some | st.just(-1), st.integers(1, 64))
@settings(deadline=None)
def test_degrees_are_accepted_exactly_when_they_multiply_to_the_world(
    pp: int, replicate: int, cp: int, tp: int, shard: int, world: int
):
    config = Parallelism(
        pipeline_parallel_degree=pp,
        data_parallel_replicate_degree=replicate,
        context_parallel_degree=cp,
        tensor_parallel_degree=tp,
        data_parallel_shard_degree=shard,
    )
    run, fixed = Run(JobConfig(parallelism=config), world), pp * replicate * cp * tp
    refused = any("The world is" in " ".join(problem) for problem in layout_problems(run))
    assert refused != (world % fixed == 0 if shard == -1 else fixed * shard == world)
    assert refused or run.degrees.world == world


@given(some, some, st.integers(1, 200))
def test_a_sequence_that_divides_can_be_cut_by_both(cp: int, tp: int, length: int):
    config = Parallelism(context_parallel_degree=cp, tensor_parallel_degree=tp)
    works = length % (2 * cp if cp > 1 else 1) == 0 and length % (cp * tp) == 0
    assert (length % sequence_divisor(degrees(config, cp * tp)) == 0) == works


def problems(sections: dict[str, Any], world: int) -> list[Problem]:
    return layout_problems(Run(JobConfig.model_validate(sections), world))


PP2 = {"pipeline_parallel_degree": 2}
INTERLEAVED = PP2 | {"pipeline_parallel_schedule": "Interleaved1F1B"}


@pytest.mark.parametrize(
    ("key", "sections", "world", "nearest"),
    [
        ("parallelism.tensor_parallel_degree", {"parallelism": {"tensor_parallel_degree": 4}}, 4, [1, 2]),
        (
            "training.seq_len",
            {"parallelism": {"context_parallel_degree": 2}, "training": {"seq_len": 510}},
            2,
            [508, 512],
        ),
        ("training.global_batch_size", {"parallelism": PP2}, 2, [16]),
        ("training.global_batch_size", {"training": {"global_batch_size": 12}}, 1, [8, 16]),
        (
            "training.global_batch_size",
            {"parallelism": INTERLEAVED, "training": {"global_batch_size": 40}},
            2,
            [32, 48],
        ),
        (
            "parallelism.pipeline_parallel_degree",
            {"parallelism": {"pipeline_parallel_degree": 7}, "training": {"global_batch_size": 56}},
            7,
            [6],
        ),
    ],
)
def test_the_nearest_that_is_named_works(key: str, sections: dict[str, Any], world: int, nearest: list[int]):
    (problem,) = [problem for problem in problems(sections, world) if problem[0] == key]
    assert [int(n) for n in re.findall(r"\d+", problem[-1].partition("Nearest: ")[2])] == nearest
    section, name = key.split(".")
    for value in nearest:
        changed = sections | {section: sections.get(section, {}) | {name: value}}
        found = problems(changed, value if section == "parallelism" else world)
        assert key not in [problem[0] for problem in found]


@pytest.mark.parametrize(("schedule", "float8"), [("ZBVZeroBubble", False), ("InterleavedZeroBubble", True)])
def test_what_an_older_torch_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch, schedule: str, float8: bool):
    job = {
        "parallelism": PP2 | {"pipeline_parallel_schedule": schedule},
        "training": {"global_batch_size": 32},
        "float8": {"enable": float8},
        "activation_checkpoint": {"mode": "none"},
    }
    for torch, refused in (("2.11.0+cu130", ["parallelism.pipeline_parallel_schedule"]), ("2.13.0", [])):
        monkeypatch.setattr("titanlite.config.rules.version", lambda _name, torch=torch: torch)
        assert [problem[0] for problem in problems(job, 2)] == refused
