"""Context parallelism: the ranks of a group share each sequence, so that long sequences fit.

Each rank computes queries, keys and values for its part of the sequence and all-gathers keys and
values before attention, as in Llama 3 (https://arxiv.org/abs/2407.21783, section 3.3.2).

With n ranks, a sequence is cut into 2n chunks, and rank r holds chunks r and 2n - 1 - r. Under a
causal mask, queries in an early chunk attend to few keys and queries in a late chunk to many.
Pairing an early chunk with a late one gives all ranks the same amount of work.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh

from titanlite.model.attention import attention, flex_function
from titanlite.model.llama import Attention, Llama, causal_mask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from titanlite.model.attention import Mask

# torch 2.13 renamed this function and warns about the old name, which torch 2.12 needs.
all_gather_autograd = (
    getattr(collectives, "all_gather_single_autograd", None)
    or collectives.all_gather_tensor_autograd
)


def apply_context_parallel(model: Llama, mesh: DeviceMesh) -> None:
    """Make each block attend to the keys and values of all context parallel ranks.

    This replaces `Attention.attend`. Afterward, always pass `positions` to the model, because the
    two chunks of each sequence that a rank holds are generally not consecutive.

    Args:
        model: Model or pipeline stage, modified in place.
        mesh: 1-D mesh of the context parallel ranks.
    """
    for module in model.modules():
        if isinstance(module, Attention):
            module.attend = partial(context_attention, mesh)


def local_chunks(x: Tensor, mesh: DeviceMesh, dim: int = 1) -> Tensor:
    """Return the two chunks of a tensor that this context parallel rank holds, concatenated.

    With 2 ranks and the sequence [0 1 2 3 4 5 6 7], rank 0 gets [0 1 6 7].

    Args:
        x: Tensor that is identical on all ranks of the group.
        mesh: 1-D mesh of the context parallel ranks.
        dim: Sequence dimension. Its length must be a multiple of twice the number of ranks.
    """
    rank = mesh.get_local_rank()
    chunks = x.chunk(2 * mesh.size(), dim)
    early_chunk = chunks[rank]
    late_chunk = chunks[-1 - rank]
    return torch.cat((early_chunk, late_chunk), dim)


def gather_chunks(x: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """All-gather the chunks of all ranks and return the whole tensor in sequence order.

    This is the inverse of `local_chunks`. In the backward pass, each rank receives the gradient of
    its two chunks, summed over all ranks.

    Args:
        x: This rank's two chunks.
        mesh: 1-D mesh of the context parallel ranks.
        dim: Sequence dimension.
    """
    group = mesh.get_group()
    gathered = all_gather_autograd(x.contiguous(), dim, group)

    # With n ranks, the chunks arrive in the order 0, 2n - 1, 1, 2n - 2, ..., n - 1, n.
    chunks = gathered.chunk(2 * mesh.size(), dim)
    early_chunks = chunks[0::2]
    late_chunks = chunks[1::2]
    return torch.cat((*early_chunks, *reversed(late_chunks)), dim)


def flex_mask(
    tokens: Tensor, document_ids: Tensor | None, mesh: DeviceMesh | None, window: int = 0
) -> BlockMask:
    """Build a block mask for flex attention that is causal within each document of a sequence.

    Flex attention skips blocks of query-key pairs that the mask excludes entirely, such as pairs
    from different documents. See https://pytorch.org/blog/flexattention.

    Args:
        tokens: Whole sequences, shape (B, T). Only their shape and device are used.
        document_ids: Document of each token, shape (B, T), or None if each sequence is one
            document.
        mesh: 1-D mesh of the context parallel ranks, or None if this rank has all queries. With a
            mesh, the mask is from this rank's queries to all keys of the sequence.
        window: Number of tokens that a token attends to, including itself. 0 means all.
    """
    batch_size, seq_len = tokens.shape

    def is_visible(batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Return whether token number `query` of a sequence attends to token number `key`."""
        visible = query >= key
        if document_ids is not None:
            visible = visible & (document_ids[batch, query] == document_ids[batch, key])
        if window:
            visible = visible & (query - key < window)
        return visible

    mask_function = is_visible
    num_queries = seq_len
    if mesh is not None:
        # Number of each query's token in the whole sequence, shape (T / degree,).
        local_numbers = local_chunks(torch.arange(seq_len, device=tokens.device), mesh, dim=0)
        num_queries = len(local_numbers)

        def is_visible_locally(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            """Return whether this rank's query number `query` attends to token number `key`."""
            return is_visible(batch, head, local_numbers[query], key)

        mask_function = is_visible_locally

    create_block_mask = flex_function("create_block_mask")
    return create_block_mask(
        mask_function,
        B=None if document_ids is None else batch_size,  # None: one mask for the whole batch
        H=None,
        Q_LEN=num_queries,
        KV_LEN=seq_len,
        device=tokens.device,
    )


def context_attention(
    mesh: DeviceMesh, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None
) -> Tensor:
    """Attend from this rank's queries to the keys and values of the whole sequence.

    With context parallelism, every block calls this function instead of
    `titanlite.model.attention.attention`. Without a mask, attention is causal.

    Args:
        mesh: 1-D mesh of the context parallel ranks.
        q: Queries of this rank, shape (B, H, T / degree, D).
        k: Keys of this rank, shape (B, H_kv, T / degree, D).
        v: Values of this rank, same shape as `k`.
        mask: Mask from this rank's queries to all keys of the sequence, or None.

    Returns:
        Attention output of this rank, shape (B, H, T / degree, D).
    """
    full_kv = gather_chunks(torch.stack((k, v)), mesh, dim=3)  # (2, B, H_kv, T, D)
    full_k, full_v = full_kv.unbind()
    if mask is not None:
        return attention(q, full_k, full_v, mask)

    return _attend_causally(q, full_k, full_v, mesh.get_local_rank())


def _attend_causally(q: Tensor, full_k: Tensor, full_v: Tensor, rank: int) -> Tensor:
    """Compute causal attention of a rank's two chunks of queries to the keys of whole sequences.

    Each chunk attends to all keys up to its end. For example, rank 0 of 2 holds the first and the
    last of 4 chunks, which attend to 1 and 4 chunks of keys. Every rank has an early and a late
    chunk, so that all ranks do the same amount of work.

    Args:
        q: Queries of both chunks, shape (B, H, T / degree, D).
        full_k: Keys of whole sequences, shape (B, H_kv, T, D).
        full_v: Values of whole sequences, same shape as `full_k`.
        rank: Index of this rank among the context parallel ranks.
    """
    early_q, late_q = q.chunk(2, dim=2)
    chunk_size = early_q.shape[2]
    # Counting from 0, the early chunk is chunk `rank` from the start of the sequence, and the late
    # chunk is chunk `rank` from its end.
    early_end = (rank + 1) * chunk_size
    late_end = full_k.shape[2] - rank * chunk_size

    outputs = []
    for chunk_q, end in ((early_q, early_end), (late_q, late_end)):
        # The queries of a chunk are the last `chunk_size` of the first `end` tokens. A window of 0
        # means no sliding window: each query attends to all tokens up to and including itself.
        mask = causal_mask(num_queries=chunk_size, num_keys=end, window=0, device=q.device)
        outputs.append(attention(chunk_q, full_k[:, :, :end], full_v[:, :, :end], mask))
    return torch.cat(outputs, dim=2)
