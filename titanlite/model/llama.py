"""The whole Llama 3.x model (https://arxiv.org/abs/2407.21783), to be read from top to bottom, with the switches in
which other families of models differ from it (`Architecture.switches`).

Invariant: it does not depend on ranks, job files or devices, so it can be copied out and used alone. An initial weight
depends on the seed and the name of its parameter only.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from titanlite.model.attention import LayerCache, attention

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from titanlite.config.flavors import Architecture

INIT_STD = 0.02


def rope_frequencies(arch: Architecture, device: torch.device | None = None) -> Tensor:
    """Rotary angles per position, in radians: (D / 2,), fp32 (https://arxiv.org/abs/2104.09864).

    Llama 3.1 extends the context by reducing the low frequencies. Those with fewer than `rope_low_freq_factor` turns in
    the original context are divided by `rope_scaling_factor`. Those with more than `rope_high_freq_factor` turns are
    kept. Those between are interpolated.
    """
    exponents = torch.arange(0, arch.head_dim, 2, dtype=torch.float32, device=device) / arch.head_dim
    frequencies = 1.0 / arch.rope_theta**exponents
    if arch.rope_scaling_factor == 1.0:
        return frequencies
    turns = arch.rope_original_max_seq_len * frequencies / (2 * math.pi)
    span = arch.rope_high_freq_factor - arch.rope_low_freq_factor
    keep = ((turns - arch.rope_low_freq_factor) / span).clamp(0.0, 1.0)
    return frequencies * (keep + (1.0 - keep) / arch.rope_scaling_factor)


def apply_rope(xs: Sequence[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor]:
    """Rotate each x (B, T, H, D) by the angles of its positions. cos and sin are (T, 1, D / 2) or (B, T, 1, D / 2).

    Channel i is paired with i + D / 2, as in Hugging Face's Llama. Both halves are contiguous, so this vectorises.
    """
    if not torch.compiler.is_compiling():
        return list(_Turn.apply(cos, sin, *xs))  # pyright: ignore
    halves = [x.float().chunk(2, dim=-1) for x in xs]
    turned = [torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1) for a, b in halves]
    return [y.type_as(x) for x, y in zip(xs, turned, strict=True)]


class _Turn(torch.autograd.Function):
    """The same in five kernels for all of them, in each pass, and bit for bit. A compiler makes fewer of the above."""

    @staticmethod
    def forward(ctx: Any, cos: Tensor, sin: Tensor, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        return _turned(xs, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return None, None, *_turned(grads, cos, sin, -1)


def _turned(xs: Sequence[Tensor], cos: Tensor, sin: Tensor, sign: int) -> tuple[Tensor, ...]:
    x = torch.cat(tuple(xs), dim=-2)  # (B, T, all heads, D)
    y, x = torch.empty_like(x).unflatten(-1, (2, -1)), x.unflatten(-1, (2, -1))  # (B, T, all heads, 2, D / 2)
    by_cos, by_sin = x * cos[..., None, :], x * sin[..., None, :]  # fp32, as the angles are
    # No fused multiplication and addition, which would round otherwise than a compiled block.
    torch.sub(by_cos[..., 0, :], by_sin[..., 1, :], alpha=sign, out=y[..., 0, :])
    torch.add(by_cos[..., 1, :], by_sin[..., 0, :], alpha=sign, out=y[..., 1, :])
    return y.flatten(-2).split([each.shape[-2] for each in xs], dim=-2)


def truncated_normal_(x: Tensor, std: float, generator: torch.Generator) -> None:
    """Fill x with normal numbers that are cut off at three standard deviations, by the inverse of their distribution.

    torch's own function is not used, because its numbers change from version to version, and because the newest version
    waits for the device.
    """
    within = math.erf(3 / math.sqrt(2))
    with torch.no_grad():
        x.uniform_(-within, within, generator=generator).erfinv_().mul_(std * math.sqrt(2)).clamp_(-3 * std, 3 * std)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.head_dim = arch.head_dim
        self.wq = nn.Linear(arch.dim, arch.q_dim, bias=arch.qkv_bias)
        self.wk = nn.Linear(arch.dim, arch.kv_dim, bias=arch.qkv_bias)
        self.wv = nn.Linear(arch.dim, arch.kv_dim, bias=arch.qkv_bias)
        self.wo = nn.Linear(arch.q_dim, arch.dim, bias=False)
        self.qk_norm = arch.qk_norm
        if self.qk_norm != "none":
            each_head = self.qk_norm == "head"
            self.q_norm = nn.RMSNorm(arch.head_dim if each_head else arch.q_dim, eps=arch.norm_eps)
            self.k_norm = nn.RMSNorm(arch.head_dim if each_head else arch.kv_dim, eps=arch.norm_eps)
        # Context parallelism replaces it.
        self.attend: Callable[[Tensor, Tensor, Tensor, Tensor | BlockMask | None], Tensor] = attention

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | BlockMask | None, cache: LayerCache | None
    ) -> Tensor:
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        if self.qk_norm == "projection":
            q, k = self.q_norm(q), self.k_norm(k)
        q = q.unflatten(-1, (-1, self.head_dim))  # (B, T, H, D)
        k = k.unflatten(-1, (-1, self.head_dim))  # (B, T, H_kv, D)
        v = v.unflatten(-1, (-1, self.head_dim))
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope((q, k), cos, sin)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, D)
        if cache is not None:
            k, v = cache.append(k, v)
        out = self.attend(q, k, v, mask)
        return self.wo(out.transpose(1, 2).flatten(-2))  # (B, T, C)


class FeedForward(nn.Module):
    """SwiGLU (https://arxiv.org/abs/2002.05202)."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.w1 = nn.Linear(arch.dim, arch.ffn_dim, bias=False)
        self.w2 = nn.Linear(arch.ffn_dim, arch.dim, bias=False)
        self.w3 = nn.Linear(arch.dim, arch.ffn_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w1(x), self.w3(x)
        in_graph_of_gpu = torch.compiler.is_compiling() and x.is_cuda  # a CPU compiles it a third longer, for nothing
        return self.w2(_Gated.apply(gate, up) if in_graph_of_gpu else F.silu(gate) * up)


class _Gated(torch.autograd.Function):
    """silu(gate) * up. Its gradients are written so that the compiler's one kernel for them writes over `up`: it writes
    over what it reads only for a result that depends on all others for which it reads this."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        sigmoid, product = gate.float().sigmoid(), F.silu(gate) * up
        of_gate = grads[0] * (sigmoid * up + (1 - sigmoid) * product)
        return of_gate.type_as(gate), grads[0] * F.silu(gate)


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each added to the residual stream: (B, T, C) -> (B, T, C). A norm is before each, or
    after it, and never on the stream itself."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.norm_after = arch.norm_placement == "after"
        self.attention_norm = nn.RMSNorm(arch.dim, eps=arch.norm_eps)
        self.attention = Attention(arch)
        self.ffn_norm = nn.RMSNorm(arch.dim, eps=arch.norm_eps)
        self.feed_forward = FeedForward(arch)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | BlockMask | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        if self.norm_after:
            x = x + self.attention_norm(self.attention(x, cos, sin, mask, cache))
            return x + self.ffn_norm(self.feed_forward(x))
        x = x + self.attention(self.attention_norm(x), cos, sin, mask, cache)
        return x + self.feed_forward(self.ffn_norm(x))


# (hidden (B, T, C), output matrix (V, C), labels (B, T)) -> scalar
LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


class Output(nn.Module):
    """The output matrix (V, C). It gives the logits (B, T, V), or the loss if there are labels."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(arch.vocab_size, arch.dim))

    def forward(self, x: Tensor, labels: Tensor | None, loss: LossFunction | None) -> Tensor:
        return project(x, self.weight, labels, loss)


def project(x: Tensor, weight: Tensor, labels: Tensor | None, loss: LossFunction | None) -> Tensor:
    """Logits, or the loss if there are labels."""
    if labels is None:
        return F.linear(x, weight)
    assert loss is not None, "set Llama.loss first"
    return loss(x, weight, labels)


class Llama(nn.Module):
    """A Llama 3.x decoder with the initial weights of seed 0. `init_weights` draws those of another seed.

    Under `torch.device("meta")` it has no weights: call `to_empty` to allocate them and then `init_weights`.

    With tied embeddings there is no `output` module, so that there is one parameter and one gradient.

    The model of a plugin is a subclass, which overrides what differs: its class of blocks, `embed`, initial weights.
    """

    block: type[nn.Module] = TransformerBlock
    norm_start = 1.0  # of the weights of norms

    def __init__(self, arch: Architecture, blocks: range | None = None) -> None:
        """Build the whole model, or the part of it with these blocks: a pipeline stage, under the same names.

        A part with the first block has the embedding, a part with the last block has the norm and the output.

        Raises:
            ValueError: heads have no even width, or n_kv_heads does not divide n_heads.
        """
        super().__init__()
        if arch.head_dim % 2 or arch.n_heads % arch.n_kv_heads:
            raise ValueError(f"{arch}: heads must have an even width, and n_kv_heads must divide n_heads.")
        blocks = range(arch.n_layers) if blocks is None else blocks
        first, last = blocks.start == 0, blocks.stop == arch.n_layers
        self.arch = arch
        self.tok_embeddings = nn.Embedding(arch.vocab_size, arch.dim) if first else None
        self.layers = nn.ModuleDict({str(i): self.block(arch) for i in blocks})
        self.norm = nn.RMSNorm(arch.dim, eps=arch.norm_eps) if last else None
        untied = last and not arch.tied_embeddings
        self.output = Output(arch) if untied else None
        self.loss: LossFunction | None = None  # may be replaced by a loss that is fused with the output matrix
        if not any(parameter.is_meta for parameter in self.parameters()):
            self.init_weights()  # otherwise the output matrix would be uninitialised memory

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        mask: Tensor | BlockMask | None = None,
        cache: Sequence[LayerCache] | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Token ids (B, T) -> logits (B, T, V). A pipeline stage receives and returns (B, T, C) where the model is cut.

        Args:
            positions: (T,) or (B, T). None: they count from 0, or from the length of the cache.
            mask: boolean, broadcastable to (B, H, T, S), or a block mask (`attention.document_mask`). None: causal,
                and with the model's sliding window, which a mask must have itself.
                With a cache, S has its tokens, too.
            cache: For generation, one `LayerCache` per block with the earlier tokens. Each grows by T.
            labels: (B, T). With labels, the result is the loss and not the logits.
        """
        start = 0 if cache is None else cache[0].length
        if positions is None:
            positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        if mask is None and (cache is not None or self.arch.sliding_window):
            size, window = (tokens.shape[1], start + tokens.shape[1]), self.arch.sliding_window
            mask = torch.ones(size, dtype=torch.bool, device=tokens.device).tril(start)  # (T, S)
            mask = mask.triu(start + 1 - window) if window else mask
        frequencies = rope_frequencies(self.arch, tokens.device)  # not a buffer, so that no dtype cast rounds it
        angles = positions[..., None, None].float() * frequencies  # (T, 1, D / 2), once for all layers
        cos, sin = angles.cos(), angles.sin()
        x = tokens if self.tok_embeddings is None else self.embed(self.tok_embeddings(tokens))  # (B, T, C)
        # Angles of 0 turn nothing, exactly, and all blocks stay alike for the compiler.
        unturned = (torch.ones_like(cos), torch.zeros_like(sin)) if self.arch.no_rope_interval else (cos, sin)
        for (name, block), layer_cache in zip(self.layers.items(), cache or [None] * len(self.layers), strict=True):
            turned = not self.arch.no_rope_interval or (int(name) + 1) % self.arch.no_rope_interval
            x = block(x, *((cos, sin) if turned else unturned), mask, layer_cache)
        if self.norm is None:
            return x
        x = self.norm(x)
        if self.output is not None:
            return self.output(x, labels, self.loss)
        assert self.tok_embeddings is not None
        return project(x, self.tok_embeddings.weight, labels, self.loss)

    def embed(self, x: Tensor) -> Tensor:
        """What enters the first block, from the rows of the embedding: (B, T, C) -> (B, T, C)."""
        return x

    def init_weights(
        self,
        seed: int = 0,
        assign: Callable[[Tensor, Tensor], object] = Tensor.copy_,
        device: torch.device | None = None,
    ) -> None:
        """Draw every parameter from its own generator, which is seeded by (seed, name).

        Args:
            assign: Is called with a parameter and its full initial value. A sharded model keeps its shard of the value.
            device: The device of the generator. None: that of the parameter.
        """
        for name, parameter in self.named_parameters():
            full = torch.empty(parameter.shape, device=device or parameter.device, dtype=torch.float32)
            if full.ndim == 1:
                nn.init.constant_(full, self.norm_start if "norm" in name else 0.0)
            else:
                digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
                generator = torch.Generator(full.device).manual_seed(int.from_bytes(digest[:7], "big"))
                std = self.init_std(name)
                truncated_normal_(full, std, generator)
            with torch.no_grad():
                assign(parameter, full)

    def init_std(self, name: str) -> float:
        """0.02, except for the embedding and for the matrices that write to the residual stream.

        An embedding has unit variance, so that it stays visible beside what the first blocks add to it. A tied one
        cannot, because the logits would be huge. Matrices that write to the stream have a smaller std with depth, so
        that the variance of the stream stays bounded.
        """
        if name == "tok_embeddings.weight" and not self.arch.tied_embeddings:
            return 1.0
        if name.endswith(("attention.wo.weight", "feed_forward.w2.weight")):
            return INIT_STD / math.sqrt(2 * (int(name.split(".")[1]) + 1))
        return INIT_STD
