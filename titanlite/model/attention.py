"""Scaled dot-product attention, the masks of packed documents, and the key-value cache of generation.

Invariant: key and value heads are not copied for their groups of query heads; the kernel reads each once per group. The
exception is fp32 on a GPU, where the only kernel that takes groups would materialise the scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@contextmanager
def backend_order(device: torch.device) -> Iterator[None]:
    """A context in which `attention` uses the first kernel that supports the shapes. Enter it once per run.

    On a GPU with compute capability 9.0 (Hopper) or more, cuDNN's kernel comes first, because torch's flash attention
    does not use the instructions of that generation. On other GPUs torch's flash attention comes first. The order is
    fixed and not measured at each start, because a restart with another kernel would not be bitwise the same. A CPU has
    one fused kernel.
    """
    if device.type == "cpu":
        yield
        return
    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    if torch.cuda.get_device_capability(device) >= (9, 0):
        order.reverse()
    with sdpa_kernel([*order, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True):
        yield


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask | None = None) -> Tensor:
    """Attention, causal or with a mask.

    Args:
        q: (B, H, T, D).
        k, v: (B, H_kv, S, D). H_kv must divide H, and S must be T without a mask.
        mask: boolean, broadcastable to (B, H, T, S), True where a query may see a key; or a block mask of flex
            attention. None: causal.

    Returns: (B, H, T, D).
    """
    grouped = q.shape[1] != k.shape[1]
    if mask is None or isinstance(mask, Tensor):
        if grouped and q.is_cuda and q.dtype == torch.float32:  # no fused kernel of a GPU supports groups in fp32
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )
    return flex_function("flex_attention")(q, k, v, block_mask=mask, enable_gqa=grouped)


def document_mask(document_ids: Tensor, window: int = 0) -> Tensor | BlockMask:
    """The causal mask within documents that are packed into one row. Build it once per batch, for all layers.

    Args:
        document_ids: (B, T), equal for the tokens of one document.
        window: a token sees so many tokens, itself included. 0: all before it.

    Returns: on a CPU (B, 1, T, T) boolean, for SDPA. On a GPU a block mask for flex attention, which skips the blocks
        between documents, and whose memory grows with T and not with T^2.
    """
    if document_ids.device.type == "cpu":
        same = document_ids[:, None, :, None] == document_ids[:, None, None, :]  # (B, 1, T, T)
        return same.tril().triu(1 - window) if window else same.tril()
    return flex_document_mask(document_ids, window)


def flex_document_mask(document_ids: Tensor, window: int = 0) -> BlockMask:
    """`document_mask` as a block mask (https://pytorch.org/blog/flexattention), on any device."""

    def visible(batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (query >= key) & (document_ids[batch, query] == document_ids[batch, key])
        return seen & (query - key < window) if window else seen

    rows, length = document_ids.shape
    return flex_function("create_block_mask")(visible, rows, None, length, length, device=document_ids.device)


def flex_function(name: str) -> Callable[..., Any]:
    """A function of flex attention. On a GPU it is compiled, so that nothing of size (T, T) exists.

    Within the graph of a compiled block it becomes a part of that graph. Without a GPU it runs op by op.
    """
    from torch.nn.attention import flex_attention

    function = getattr(flex_attention, name)
    return function if torch.compiler.is_compiling() or not torch.cuda.is_available() else _compiled(function)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


class LayerCache:
    """Keys and values of the tokens that one layer has seen. They are allocated once and filled in place.

    Args:
        shape: (B, H_kv, S, D), where S is the longest sequence.
    """

    def __init__(self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v (B, H_kv, T, D) after the `length` tokens that are there. Return all keys and values so far."""
        start, self.length = self.length, self.length + k.shape[2]
        self.keys[:, :, start : self.length] = k
        self.values[:, :, start : self.length] = v
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]
