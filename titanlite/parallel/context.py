"""Context parallelism: the ranks of a group share every row and gather keys and values, as for Llama 3
(https://arxiv.org/abs/2407.21783, section 3.3.2).

Invariant: rank r of n has the chunks r and 2n - 1 - r of 2n. Under a causal mask an early chunk is cheap and a late one
is expensive, so all ranks have the same work. Keys and values are put into their natural order before attention.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh

from titanlite.model.attention import attention, document_mask, flex_function
from titanlite.model.llama import Attention, Llama

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def own_chunks(x: Tensor, mesh: DeviceMesh, dim: int = 1) -> Tensor:
    """This rank's chunks of a tensor that every rank of the group has. Its length T along `dim` becomes T / degree."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    chunks = x.chunk(2 * ranks, dim)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]), dim)


def gather_chunks(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """The inverse of `own_chunks`, by an all-gather. Its backward pass is a reduce-scatter."""
    ranks = mesh.size()
    gathered = collectives.all_gather_tensor_autograd(x.contiguous(), dim, mesh.get_group())
    chunks = gathered.chunk(2 * ranks, dim)  # 0, 2n - 1, 1, 2n - 2, ...
    return torch.cat((*chunks[0::2], *reversed(chunks[1::2])), dim)


def context_mask(
    tokens: Tensor, document_ids: Tensor | None, mesh: DeviceMesh, window: int = 0
) -> Tensor | BlockMask | None:
    """The mask of this rank's queries over all keys of the row.

    Args:
        tokens, document_ids: (B, T), whole rows. Without documents the mask is causal.
        window: as `model.attention.document_mask` has it; needs documents.

    Returns: on the CPU a boolean mask (B, 1, T / degree, T), or None if the mask is causal only. On a GPU always a
        block mask, whose memory grows with T and not with T^2.
    """
    if tokens.device.type != "cpu":
        return flex_context_mask(tokens, document_ids, mesh, window)
    return None if document_ids is None else own_chunks(document_mask(document_ids, window), mesh, dim=2)  # pyright: ignore


def flex_context_mask(tokens: Tensor, document_ids: Tensor | None, mesh: DeviceMesh, window: int = 0) -> BlockMask:
    """`context_mask` for flex attention, on any device."""
    rows, length = tokens.shape
    place = own_chunks(torch.arange(length, device=tokens.device), mesh, dim=0)  # (T / degree,)

    def visible(batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = place[query] >= key
        if document_ids is None:
            return seen
        seen = seen & (document_ids[batch, place[query]] == document_ids[batch, key])
        return seen & (place[query] - key < window) if window else seen

    batches = None if document_ids is None else rows
    return flex_function("create_block_mask")(visible, batches, None, len(place), length, device=tokens.device)


def context_attention(mesh: DeviceMesh, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask | None) -> Tensor:
    """Attention of this rank's queries to the keys and values of the whole row; as `model.attention.attention`, with
    q, k, v (B, H, T / degree, D).

    Without a mask, each of the two chunks attends causally, and reads the keys up to its own end only.
    """
    k, v = gather_chunks(torch.stack((k, v)), mesh, dim=3).unbind()  # (B, H_kv, T, D), in one collective
    if mask is not None:
        return attention(q, k, v, mask)
    chunk, total = q.shape[2] // 2, k.shape[2]
    ends = (mesh.get_local_rank() + 1) * chunk, total - mesh.get_local_rank() * chunk
    parts = []
    for part, end in zip(q.chunk(2, dim=2), ends, strict=True):
        seen = torch.ones(chunk, end, dtype=torch.bool, device=q.device).tril(end - chunk)
        parts.append(attention(part, k[:, :, :end], v[:, :, :end], seen))
    return torch.cat(parts, dim=2)


def apply_context_parallel(model: Llama, mesh: DeviceMesh) -> None:
    """Replace the attention of every block in place. After that, the model must be called with positions."""
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = partial(context_attention, mesh)
