"""Attention and RoPE kernels, masks for packed documents, and the key-value cache for generation.

In grouped-query attention, several query heads share a key and value head. The kernels read the
shared head once per group instead of repeating it in memory. The exception is fp32 on a GPU before
torch 2.14; see `attention`.

Shapes: B batch, H query heads, H_kv key and value heads, T queries, S keys, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    Mask: TypeAlias = "Tensor | BlockMask | DocumentBounds"

HAS_GROUPED_FP32_KERNEL = torch.__version__ >= "2.14"
"""Whether a fused GPU kernel supports grouped heads in fp32."""


class DocumentBounds(NamedTuple):
    """Bounds of packed documents: a mask for variable-length attention.

    Attention is causal within each document. Unlike a boolean mask or a block mask, the bounds take
    only four bytes per document, and nothing is computed from them before attention.

    Attributes:
        cu_seqlens: Index of the first token of each document, followed by the total number of
            tokens, shape (N + 1,), int32. Tokens are counted over all sequences of the batch, and
            each sequence starts a new document. Empty documents are allowed.
        window: Number of tokens that a token attends to, including itself. 0 means all.
    """

    cu_seqlens: Tensor
    window: int


@contextmanager
def backend_order(device: torch.device, *, prefers_flash: bool = False) -> Iterator[None]:
    """Set the order in which scaled dot-product attention tries its kernels in a `with` block.

    The order is fixed rather than benchmarked, so that a restarted run is bitwise identical.

    Args:
        device: A GPU.
        prefers_flash: Try flash attention before cuDNN on every GPU. By default, Hopper and newer
            GPUs try cuDNN first.
    """
    # torch uses the first kernel that supports the inputs of a call.
    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    is_hopper_or_newer = torch.cuda.get_device_capability(device) >= (9, 0)
    if is_hopper_or_newer and not prefers_flash:
        order.reverse()  # because the flash attention in torch does not use Hopper instructions
    order += [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(order, set_priority=True):
        yield


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask | None = None) -> Tensor:
    """Compute grouped-query attention with the fastest available kernel.

    Args:
        q: Queries, shape (B, H, T, D).
        k: Keys, shape (B, H_kv, S, D). H_kv must divide H. Without a mask, S must equal T.
        v: Values, same shape as `k`.
        mask: One of three kinds: a boolean mask, broadcastable to (B, H, T, S), True where a query
            attends to a key; a block mask for flex attention; or document bounds for
            variable-length attention. By default, attention is causal.

    Returns:
        Attention output, shape (B, H, T, D).
    """
    if isinstance(mask, DocumentBounds):
        return varlen_attention(q, k, v, mask)

    is_grouped = q.shape[1] != k.shape[1]
    if mask is not None and not isinstance(mask, Tensor):
        flex_attention = flex_function("flex_attention")
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=is_grouped)

    # Before torch 2.14, the only GPU kernel for grouped heads in fp32 would materialize the
    # attention scores (B, H, T, S). Repeat the shared heads instead.
    is_fp32_on_gpu = q.is_cuda and q.dtype == torch.float32
    if is_grouped and is_fp32_on_gpu and not HAS_GROUPED_FP32_KERNEL:
        group_size = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(group_size, dim=1)
        v = v.repeat_interleave(group_size, dim=1)
        is_grouped = False
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=is_grouped
    )


def varlen_attention(q: Tensor, k: Tensor, v: Tensor, bounds: DocumentBounds) -> Tensor:
    """Compute causal attention within documents with the FlashAttention variable-length kernel.

    The kernel exists only for GPUs. On a CPU, the result is computed with an equivalent boolean
    mask.

    Args:
        q: Queries, shape (B, H, T, D).
        k: Keys, shape (B, H_kv, T, D).
        v: Values, same shape as `k`.
        bounds: Bounds of the documents in the B sequences.

    Returns:
        Attention output, shape (B, H, T, D).
    """
    batch_size, _, seq_len, _ = q.shape
    if not q.is_cuda:
        return attention(q, k, v, _bounds_to_mask(bounds, batch_size, seq_len))

    out = _run_varlen_kernel(
        _join_sequences(q),
        _join_sequences(k),
        _join_sequences(v),
        bounds,
        max_length=seq_len,  # reading the longest length from the GPU would synchronize
    )
    return out.unflatten(0, (batch_size, seq_len)).transpose(1, 2)


def _run_varlen_kernel(
    q: Tensor, k: Tensor, v: Tensor, bounds: DocumentBounds, max_length: int
) -> Tensor:
    """Run the FlashAttention variable-length kernel on one sequence of N tokens, on a GPU.

    Args:
        q: Queries, shape (N, H, D).
        k: Keys, shape (N, H_kv, D).
        v: Values, same shape as `k`.
        bounds: Bounds of the documents in the sequence.
        max_length: Upper bound of the lengths of all documents.

    Returns:
        Attention output, shape (N, H, D).
    """
    from torch.nn.attention.varlen import varlen_attn  # importing it takes a second

    num_earlier_tokens = bounds.window - 1 if bounds.window else -1  # -1 means all
    # torch 2.15 would prefer cuDNN on some GPUs. Use the same kernel with every version.
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = varlen_attn(
            q,
            k,
            v,
            cu_seq_q=bounds.cu_seqlens,
            cu_seq_k=bounds.cu_seqlens,
            max_q=max_length,
            max_k=max_length,
            window_size=(num_earlier_tokens, 0),  # 0 later tokens
            enable_gqa=q.shape[1] != k.shape[1],
        )
    assert isinstance(out, Tensor)
    return out


def _join_sequences(x: Tensor) -> Tensor:
    """Convert queries, keys or values (B, H, T, D) to one sequence of tokens (B * T, H, D)."""
    return x.transpose(1, 2).flatten(0, 1)  # a view


def _bounds_to_mask(bounds: DocumentBounds, batch_size: int, seq_len: int) -> Tensor:
    """Convert document bounds to an equivalent boolean attention mask, shape (B, 1, T, T)."""
    device = bounds.cu_seqlens.device
    tokens = torch.arange(batch_size * seq_len, dtype=torch.int32, device=device)
    document_ids = torch.searchsorted(bounds.cu_seqlens, tokens, right=True)
    return document_mask(document_ids.view(batch_size, seq_len), bounds.window)


def equal_bounds(batch_size: int, seq_len: int, device: torch.device) -> Tensor:
    """Return `cu_seqlens` for a batch in which each sequence is one document; see `DocumentBounds`.

    For example, 2 sequences of 4 tokens have the bounds [0, 4, 8].
    """
    num_tokens = batch_size * seq_len
    return torch.arange(0, num_tokens + 1, seq_len, dtype=torch.int32, device=device)


def document_mask(document_ids: Tensor, window: int = 0) -> Tensor:
    """Build a boolean mask that is causal within each of the documents packed into a sequence.

    Args:
        document_ids: Document of each token, shape (B, T), for example [0, 0, 0, 1, 1].
        window: Number of tokens that a token attends to, including itself. 0 means all.

    Returns:
        Boolean mask, shape (B, 1, T, T).
    """
    # Keep the keys up to each query, and with a window only the last `window` of them.
    same_document = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    mask = same_document.tril()  # (B, 1, T, T)
    return mask.triu(1 - window) if window else mask


def flex_function(name: str) -> Callable[..., Any]:
    """Return a function of `torch.nn.attention.flex_attention`, compiled if there is a GPU.

    Only compiled flex attention avoids allocating a tensor of shape (T, T). While the compiler
    traces a transformer block, return the plain function, which becomes part of the traced graph.

    Args:
        name: "flex_attention" or "create_block_mask".
    """
    from torch.nn.attention import flex_attention

    function = getattr(flex_attention, name)
    if torch.compiler.is_compiling() or not torch.cuda.is_available():
        return function
    return compile_once(function)


@cache
def compile_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function, and return the same compiled function in all later calls."""
    return torch.compile(function)


class EagerRope(torch.autograd.Function):
    """Apply rotary position embeddings to queries and keys together, with few kernel launches.

    The arguments of `apply` are queries (B, T, H, D), keys (B, T, H_kv, D), and the cosines and
    sines of the angles, each of shape (T, 1, D / 2) or (B, T, 1, D / 2), fp32. It returns the
    rotated queries and keys, with the shapes and dtype of the inputs.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys."""
        ctx.save_for_backward(cos, sin)
        return _rotate(q, k, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, None, None]:
        """Rotate the gradients of queries and keys back."""
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
        inverse: Rotate by the negative angles, which changes the sign of all sines.
    """
    # Process queries and keys together, and both channels of each pair, for fewer kernel launches.
    x = torch.cat((q, k), dim=-2)  # (B, T, H + H_kv, D)
    pairs = x.unflatten(-1, (2, -1))  # (B, T, H + H_kv, 2, D / 2): all a, then all b
    a_cos, b_cos = (pairs * cos[..., None, :]).unbind(-2)  # each (B, T, H + H_kv, D / 2), fp32
    a_sin, b_sin = (pairs * sin[..., None, :]).unbind(-2)

    # Add products that are already rounded, as a compiled block does. The results of a fused
    # multiply-add would differ, because it does not round the products.
    sign = -1 if inverse else 1
    rotated = torch.empty_like(x)
    rotated_a, rotated_b = rotated.chunk(2, dim=-1)  # views of both halves, filled below
    torch.sub(a_cos, b_sin, alpha=sign, out=rotated_a)  # a cos - b sin
    torch.add(b_cos, a_sin, alpha=sign, out=rotated_b)  # b cos + a sin

    rotated_q, rotated_k = rotated.split((q.shape[-2], k.shape[-2]), dim=-2)
    return rotated_q, rotated_k


class LayerCache:
    """Caches the keys and values of one attention layer during generation.

    Memory for the longest sequence is allocated once and filled in place as tokens are appended.

    Args:
        shape: (B, H_kv, S, D), where S is the length of the longest sequence.
        dtype: Dtype of the keys and values.
        device: Device of the model.

    Attributes:
        length: Number of tokens in the cache.
    """

    def __init__(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of T new tokens, and return all keys and values so far.

        Args:
            k: Keys of the new tokens, shape (B, H_kv, T, D).
            v: Values of the new tokens, same shape.

        Returns:
            Keys and values, each a view of shape (B, H_kv, length, D).
        """
        start = self.length
        self.length += k.shape[2]
        self.keys[:, :, start : self.length] = k
        self.values[:, :, start : self.length] = v
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]
