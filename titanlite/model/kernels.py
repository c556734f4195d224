"""Faster variants of operations in llama.py for eager mode, with bitwise identical results.

A compiled block does not use them, because the compiler fuses the plain operations itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def apply_rope_eager(
    q_BTHD: Tensor, k_BTHD: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply rotary position embeddings to queries and keys together, with few kernel launches.

    Args:
        q_BTHD: Queries, shape (B, T, H, D).
        k_BTHD: Keys, shape (B, T, H_kv, D).
        cos: Cosines of the angles, shape (T, 1, D / 2) or (B, T, 1, D / 2), fp32.
        sin: Sines of the angles, same shape.

    Returns:
        Rotated queries and rotated keys, with the shapes and dtype of the inputs.
    """
    return _RotateHalves.apply(q_BTHD, k_BTHD, cos, sin)  # pyright: ignore


class _RotateHalves(torch.autograd.Function):
    """Rotate queries and keys. The backward pass rotates the gradients back."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _rotate(q, k, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        grad_q, grad_k = grads
        # The gradient of a rotation is the rotation by the opposite angle.
        return *_rotate(grad_q, grad_k, cos, sin, inverse=True), None, None


def _rotate(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, inverse: bool = False
) -> tuple[Tensor, Tensor]:
    """Rotate the channel pairs (i, i + D / 2) of queries and keys, or rotate them back.

    A pair (a, b) becomes (a cos - b sin, b cos + a sin).

    Args:
        q: Queries, shape (B, T, H, D).
        k: Keys, shape (B, T, H_kv, D).
        cos: Cosines of the angles, shape (T, 1, D / 2) or (B, T, 1, D / 2), fp32.
        sin: Sines of the angles, same shape.
        inverse: Rotate by the negative angles.
    """
    # Process queries and keys together. In the dimension of length 2, index 0 holds the channels i
    # and index 1 the channels i + D / 2.
    x = torch.cat((q, k), dim=-2)  # (B, T, H + H_kv, D)
    rotated = torch.empty_like(x)
    x_pairs = x.unflatten(-1, (2, -1))  # (B, T, H + H_kv, 2, D / 2)
    rotated_pairs = rotated.unflatten(-1, (2, -1))  # a view

    # One kernel multiplies both channels of all pairs. The products are fp32, like cos and sin.
    x_cos = x_pairs * cos[..., None, :]
    x_sin = x_pairs * sin[..., None, :]

    # Do not fuse multiplication and addition: the result would differ from a compiled block.
    sign = -1 if inverse else 1
    torch.sub(x_cos[..., 0, :], x_sin[..., 1, :], alpha=sign, out=rotated_pairs[..., 0, :])
    torch.add(x_cos[..., 1, :], x_sin[..., 0, :], alpha=sign, out=rotated_pairs[..., 1, :])

    rotated_q, rotated_k = rotated.split((q.shape[-2], k.shape[-2]), dim=-2)
    return rotated_q, rotated_k
