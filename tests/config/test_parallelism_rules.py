"""Degrees and their arithmetic: what is refused, with which remedy."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlite.config.degrees import degrees, sequence_divisor
from titanlite.config.parallelism_rules import fills_world, layout_problems
from titanlite.config.run import Run
from titanlite.config.schema import JobConfig, Parallelism

some = st.integers(1, 4)


@given(some, some, some, some, some | st.just(-1), st.integers(1, 64))
@settings(deadline=None)
def test_degrees_are_accepted_exactly_when_they_multiply_to_the_world(
    pp: int, replicate: int, cp: int, tp: int, shard: int, world: int
) -> None:
    config = Parallelism(
        pipeline_parallel_degree=pp,
        data_parallel_replicate_degree=replicate,
        context_parallel_degree=cp,
        tensor_parallel_degree=tp,
        data_parallel_shard_degree=shard,
    )
    run, fixed = Run(JobConfig(parallelism=config), world), pp * replicate * cp * tp
    problems = list(fills_world(run))
    assert (problems == []) == (world % fixed == 0 if shard == -1 else fixed * shard == world)
    assert len(problems) <= 1
    if not problems:
        assert run.degrees.world == world


@given(some, some, st.integers(1, 200))
def test_a_sequence_that_divides_can_be_cut_by_both(cp: int, tp: int, length: int) -> None:
    config = Parallelism(context_parallel_degree=cp, tensor_parallel_degree=tp)
    chunks = 2 * cp if cp > 1 else 1
    works = length % chunks == 0 and length % (cp * tp) == 0
    assert (length % sequence_divisor(degrees(config, cp * tp)) == 0) == works


def job(**sections: Any) -> JobConfig:
    return JobConfig.model_validate(sections)


PP2 = {"pipeline_parallel_degree": 2}


@pytest.mark.parametrize(
    ("sections", "world", "key", "says"),
    [
        ({"parallelism": {"tensor_parallel_degree": 4}}, 4, "tensor_parallel_degree", "Nearest: 1 and 2."),
        ({"parallelism": {"context_parallel_degree": 2}, "training": {"seq_len": 510}}, 2, "seq_len", "508 or 512"),
        ({"parallelism": PP2}, 2, "global_batch_size", "at least 2. Nearest: 16 or 24."),
        ({"parallelism": PP2 | {"pipeline_parallel_degree": 7}}, 7, "pipeline_parallel_degree", "Nearest: 6."),
        ({"parallelism": PP2, "model": {"tied_embeddings": True}}, 2, "pipeline_parallel_degree", "tied_embeddings"),
        ({"parallelism": PP2 | {"pipeline_parallel_split_points": ["layers.6"]}}, 2, "split_points", "layers.5"),
        ({"parallelism": PP2 | {"pipeline_parallel_split_points": ["2"]}}, 2, "split_points", "first block"),
        ({"parallelism": {"pipeline_parallel_split_points": ["layers.2"]}}, 1, "split_points", "needs pipeline"),
        (
            {
                "parallelism": PP2 | {"pipeline_parallel_schedule": "Interleaved1F1B"},
                "training": {"global_batch_size": 40},
            },
            2,
            "global_batch_size",
            "Nearest: 32 or 48.",
        ),
        ({"parallelism": {"enable_async_tensor_parallel": True}}, 1, "enable_async_tensor_parallel", "compile.enable"),
    ],
)
def test_what_cannot_work_is_refused_with_the_nearest_that_does(
    sections: dict[str, Any], world: int, key: str, says: str
) -> None:
    wrong = job(**sections)
    found = [problem for problem in layout_problems(Run(wrong, world)) if problem[0].endswith(key)]
    assert len(found) == 1
    assert says in " ".join(found[0]).replace("rounds of 2 or a little more (Interleaved1F1B).", "")


@pytest.mark.parametrize(("schedule", "float8"), [("ZBVZeroBubble", False), ("InterleavedZeroBubble", True)])
def test_what_an_older_torch_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch, schedule: str, float8: bool) -> None:
    v = job(
        parallelism=PP2 | {"pipeline_parallel_schedule": schedule},
        training={"global_batch_size": 32},
        float8={"enable": float8},
    )
    for torch, refused in (("2.11.0+cu130", True), ("2.13.0", False)):
        monkeypatch.setattr("titanlite.config.parallelism_rules.version", lambda _name, torch=torch: torch)
        found = " ".join(word for problem in layout_problems(Run(v, 2)) for word in problem)
        assert (torch in found and "Upgrade torch" in found) == refused
