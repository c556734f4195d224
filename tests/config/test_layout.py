"""The cut of a model into stages, and which rank runs which."""

from itertools import pairwise, product

import pytest

from titanlite.config.flavors import FLAVORS
from titanlite.config.layout import balanced_cuts, piece_costs, stage_parts, stage_rank
from titanlite.config.schema import Parallelism


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
