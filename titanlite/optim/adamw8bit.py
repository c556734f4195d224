"""AdamW with 8-bit moments, from torchao (https://arxiv.org/abs/2110.02861).

Invariant: The shape of the whole parameter decides whether its moments have 8 bits. A quantization
block, whose elements share a scale, never spans two rows. Parameters that are sharded by rows
therefore quantize identically on any number of ranks.
"""

from __future__ import annotations

import torch
import torchao.optim
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite.optim.adamw import Groups, Recipe, wrap_shard

MIN_ELEMENTS = 4096  # torchao does not quantize smaller moments
BLOCK_SIZE = 256  # elements that share a quantization scale


class AdamW8bit(torchao.optim.AdamW8bit):
    """AdamW with 8-bit moments, whose results do not depend on the number of ranks.

    Each step synchronizes with the GPU once, because the CPU reads whether to skip the step.
    """

    def __init__(self, groups: Groups, recipe: Recipe) -> None:
        config = recipe.config
        betas = (config.beta1, config.beta2)
        super().__init__(groups, config.lr, betas, config.eps, block_size=BLOCK_SIZE)
        # torchao computes its quantization codes on first use, which fails under the fake tensors
        # of `titanlite plan`. Compute them now.
        for signed in (True, False):
            self._subclass_zeros(torch.empty(BLOCK_SIZE), signed, BLOCK_SIZE)

    def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
        """Create a moment of a parameter with all values zero, in 8 bits if its shape allows it.

        torchao calls this method for both moments. The overridden method chooses the dtype by the
        size of the local shard, so ranks with shards of different sizes could choose different
        dtypes. This method chooses it by the shape of the whole parameter.

        Args:
            p: Parameter. A large matrix must be a DTensor.
            signed: Whether the moment can be negative: True for the first, False for the second.
        """
        if not _has_8bit_moments(p):
            return torch.zeros_like(p)
        assert isinstance(p, DTensor)
        return wrap_shard(self._create_8bit_zeros(p.to_local(), signed), like=p)

    def _create_8bit_zeros(self, shard: Tensor, signed: bool) -> Tensor:
        """Create the 8-bit moment of a shard, with all values zero.

        Args:
            shard: Shard of a parameter.
            signed: Whether the moment can be negative.

        Returns:
            Torchao tensor with 8-bit codes and a scale per block. Plain tensor if `shard` is empty.
        """
        if shard.numel() == 0:  # torchao cannot divide an empty shard
            return torch.empty_like(shard, dtype=torch.uint8)
        return self._subclass_zeros(shard, signed, BLOCK_SIZE)

    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient.

        On a GPU, torchao compiles the update for each parameter shape. On a CPU the update runs
        eagerly, because compilation would take longer than a small run.
        """
        is_cuda = self.param_groups[0]["params"][0].is_cuda
        with torch.compiler.set_stance("default" if is_cuda else "force_eager"):
            super().step()


def _has_8bit_moments(parameter: Tensor) -> bool:
    """Return whether the moments of a parameter are stored in 8 bits.

    The parameter must be a matrix with at least `MIN_ELEMENTS` elements and a row length that is a
    multiple of `BLOCK_SIZE`. All ranks agree, because a DTensor has the shape of the whole matrix.
    """
    has_whole_blocks = parameter.ndim == 2 and parameter.shape[1] % BLOCK_SIZE == 0
    return has_whole_blocks and parameter.numel() >= MIN_ELEMENTS
