"""Gradient norm and clipping over a sharded model.

Invariant: the norm is that of the full gradient, the same on every rank, and stays on the device. May import torch.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def clip_grad_norm_(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients in place so that their total L2 norm is at most `max_norm` (0: leave them alone).

    Returns: the norm before clipping, a scalar tensor on the gradients' device.
    """
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
