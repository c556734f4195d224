"""Arguments of the functions and classes that `OPTIMIZERS` contains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from titanlite.config import schema

Groups = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Recipe:
    """Arguments of a function that builds an optimizer, in addition to the parameter groups.

    Both built-in and plugin optimizers are built from the groups and a recipe.

    Attributes:
        config: Section [optimizer] of the job.
        names: Name of each parameter in the whole model, such as "layers.3.attention.wq.weight".
        compiled: Whether the job enables compilation of the update; see `compiles_elementwise`.
        ranks: Ranks that hold shards of the same parameters. None means all ranks.
    """

    config: schema.Optimizer
    names: dict[nn.Parameter, str]
    compiled: bool
    ranks: dist.ProcessGroup | None

    @property
    def parameter_dtype(self) -> torch.dtype:
        """Return the dtype in which parameters are stored."""
        return next(iter(self.names)).dtype

    @property
    def state_dtype(self) -> torch.dtype:
        """Return the dtype of the moments: `config.state_dtype`, or the dtype of the parameters."""
        if self.config.state_dtype is None:
            return self.parameter_dtype
        return getattr(torch, self.config.state_dtype)

    @property
    def compiles_elementwise(self) -> bool:
        """Return whether to compile an update that treats each element of a parameter separately.

        On a GPU, such an update is always compiled, because an eager update launches 72 kernels.
        """
        return self.compiled or next(iter(self.names)).is_cuda
