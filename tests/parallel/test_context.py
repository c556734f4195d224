"""Head-tail chunks, and the GPU's form of the masks beside the CPU's."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from titanlite.parallel.context import context_mask, flex_context_mask, own_chunks


@dataclass
class Group:
    """What the functions ask of a device mesh."""

    rank: int
    ranks: int

    def get_local_rank(self) -> int:
        return self.rank

    def size(self) -> int:
        return self.ranks


def test_each_rank_holds_an_early_and_a_late_chunk() -> None:
    row = torch.arange(16)[None]
    groups: list[Any] = [Group(rank, 4) for rank in range(4)]
    parts = [own_chunks(row, group)[0].tolist() for group in groups]
    assert parts == [[0, 1, 14, 15], [2, 3, 12, 13], [4, 5, 10, 11], [6, 7, 8, 9]]
    # A query at place p sees p + 1 keys: all ranks have the same work.
    assert len({sum(place + 1 for place in part) for part in parts}) == 1


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("documents", [False, True])
def test_the_mask_of_a_gpu_is_that_of_a_cpu(rank: int, documents: bool) -> None:
    group: Any = Group(rank, 2)
    tokens = torch.zeros(2, 16, dtype=torch.int64)
    ids = torch.stack((torch.arange(16) // 5, torch.arange(16) // 7)) if documents else None
    block = flex_context_mask(tokens, ids, group)
    flex = create_mask(block.mask_mod, 2, 1, 8, 16, device="cpu")
    dense = context_mask(tokens, ids, group)
    if dense is None:  # causal
        dense = own_chunks(torch.ones(16, 16, dtype=torch.bool).tril(), group, dim=0)[None, None]
    assert isinstance(dense, torch.Tensor)
    assert torch.equal(flex, dense.expand(2, 1, 8, 16))
