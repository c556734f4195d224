"""The arithmetic of layouts, and what is refused with which remedy."""

from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titanlite.config.schema import JobConfig, Parallelism
from titanlite.model.flavors import FLAVORS
from titanlite.parallel.constraints import fills_world, layout_problems
from titanlite.parallel.layout import balanced_cuts, degrees, piece_costs, sequence_divisor, stage_parts, stage_rank


def sizes(flavor: str, stages: int) -> list[int]:
    bounds = [0, *balanced_cuts(FLAVORS[flavor], 8192, stages), FLAVORS[flavor].n_layers]
    return [b - a for a, b in pairwise(bounds)]


@pytest.mark.parametrize(
    ("flavor", "stages", "blocks"),
    [
        ("405b", 16, [7] + [8] * 14 + [7]),  # one block less at both ends, as the Llama 3 paper has it
        ("70b", 4, [20, 20, 21, 19]),
        ("8b", 2, [17, 15]),  # the output costs as much as two blocks
    ],
)
def test_stages_are_balanced_with_embedding_and_output(flavor: str, stages: int, blocks: list[int]) -> None:
    assert sizes(flavor, stages) == blocks


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_no_other_cut_has_a_cheaper_dearest_stage(stages: int) -> None:
    arch = FLAVORS["debugmodel"]
    embedding, block, output = piece_costs(arch, 512)

    def dearest(blocks: tuple[int, ...]) -> float:
        costs = [n * block for n in blocks]
        costs[0] += embedding
        costs[-1] += output
        return max(costs)

    every = [c for c in product(range(1, arch.n_layers + 1), repeat=stages) if sum(c) == arch.n_layers]
    bounds = [0, *balanced_cuts(arch, 512, stages), arch.n_layers]
    mine = tuple(b - a for a, b in pairwise(bounds))
    assert dearest(mine) == min(map(dearest, every))


def test_stages_by_hand() -> None:
    config = Parallelism(pipeline_parallel_degree=2, pipeline_parallel_split_points=("layers.5",))
    assert stage_parts(config, FLAVORS["debugmodel"], 512) == [range(5), range(5, 6)]


def test_the_zero_bubble_v_gives_the_first_rank_both_ends() -> None:
    assert [stage_rank(i, 8, 4, "ZBVZeroBubble") for i in range(8)] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert [stage_rank(i, 8, 4, "Interleaved1F1B") for i in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]


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
    fixed = pp * replicate * cp * tp
    problems = list(fills_world(config, world))
    assert (problems == []) == (world % fixed == 0 if shard == -1 else fixed * shard == world)
    assert len(problems) <= 1
    if not problems:
        assert degrees(config, world).world == world


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
    arch = FLAVORS["debugmodel"]
    if sections.get("model"):
        from titanlite.model.flavors import architecture

        arch = architecture(wrong.model)
    found = [problem for problem in layout_problems(wrong, arch, world) if problem[0].endswith(key)]
    assert len(found) == 1
    assert says in " ".join(found[0]).replace("rounds of 2 or a little more (Interleaved1F1B).", "")


def test_a_v_is_refused_with_a_torch_that_sends_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    v = job(parallelism=PP2 | {"pipeline_parallel_schedule": "ZBVZeroBubble"}, training={"global_batch_size": 32})
    for torch, refused in (("2.11.0+cu130", True), ("2.13.0", False)):
        monkeypatch.setattr("titanlite.parallel.constraints.version", lambda _name, torch=torch: torch)
        found = " ".join(word for problem in layout_problems(v, FLAVORS["debugmodel"], 2) for word in problem)
        assert (torch in found and "Upgrade torch" in found) == refused
