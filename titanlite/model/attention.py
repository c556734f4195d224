"""Scaled dot-product attention and the key-value cache of generation.

Invariant: grouped-query heads are never materialised; the kernel reads each key and value head once per group.
May import torch only.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attend causally, or as `mask` says.

    Args:
        q: (B, H, T, D).
        k, v: (B, H_kv, S, D), H_kv dividing H; S = T unless there is a mask.
        mask: boolean, broadcastable to (B, H, T, S), True where a query may look. None: causal.

    Returns: (B, H, T, D).
    """
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)


class LayerCache:
    """Keys and values of the tokens that one layer has seen: allocated once, filled in place.

    Args:
        shape: (B, H_kv, S, D), S the longest sequence.
    """

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, H_kv, T, D) after the `length` tokens held; return all keys and values so far."""
        start, self.length = self.length, self.length + k.shape[2]
        self.keys[:, :, start : self.length] = k
        self.values[:, :, start : self.length] = v
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]
