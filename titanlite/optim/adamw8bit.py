"""torchao's AdamW with moments of 8 bits (https://arxiv.org/abs/2110.02861).

Invariant: which moments have 8 bits follows from the shape of the whole parameter, and a block of them, which has a
scale, lies within a row. So shards of rows hold the same blocks on any number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torchao.optim
from torch import Tensor
from torch.distributed.tensor import DTensor

FEWEST = 4096  # elements, as torchao has it


class AdamW8bit(torchao.optim.AdamW8bit):
    """On any number of ranks the same. The host waits for a GPU in each step, to know whether it is skipped."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for signed in (True, False):  # makes torchao compute its codes, which the fake tensors of a plan cannot
            self._subclass_zeros(torch.empty(self.block_size), signed, self.block_size)

    def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
        """Of torchao's own rule, 8 bits for shards of whole blocks, ranks with different shards would disagree."""
        if p.ndim != 2 or p.numel() < FEWEST or p.shape[1] % self.block_size:
            return torch.zeros_like(p)
        assert isinstance(p, DTensor)
        zeros = self._subclass_zeros(p.to_local(), signed, self.block_size)
        return DTensor.from_local(zeros, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """torchao compiles the update of each shape. On a CPU that takes longer than a small run."""
        on_gpu = self.param_groups[0]["params"][0].is_cuda
        with torch.compiler.set_stance("default" if on_gpu else "force_eager"):
            super().step()
