"""Plugin architectures with dropout, parallel blocks and fused projections."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel
from torch.nn import functional as F

from titanlite import Architecture, Llama, register
from titanlite.model.llama import Attention, TransformerBlock, apply_rope
from titanlite.parallel.tensor import block_plan


class DropoutBlock(TransformerBlock):
    def forward(self, x: Tensor, *inputs: Any) -> Tensor:
        return F.dropout(super().forward(x, *inputs), 0.2, self.training)


class DropoutLlama(Llama):
    block = DropoutBlock


@register("architecture", "dropout_blocks")
@dataclass(frozen=True)
class DropoutArchitecture(Architecture):
    model: ClassVar = "mutants.plugins:DropoutLlama"
    architecture: str = "dropout_blocks"


class FrozenLlama(Llama):
    def __init__(self, arch: Architecture, blocks: range | None = None) -> None:
        super().__init__(arch, blocks)
        assert self.norm is not None
        self.norm.weight.requires_grad_(False)


@register("architecture", "frozen_norm")
@dataclass(frozen=True)
class FrozenArchitecture(Architecture):
    model: ClassVar = "mutants.plugins:FrozenLlama"
    architecture: str = "frozen_norm"


class ParallelBlock(TransformerBlock):
    """A block whose feed-forward network reads the same hidden states as its attention."""

    def forward(self, x: Tensor, *inputs: Any) -> Tensor:
        attended = self.attention(self.attention_norm(x), *inputs)
        return x + attended + self.feed_forward(self.ffn_norm(x))


class ParallelLlama(Llama):
    block = ParallelBlock
    draws_random_numbers = False


@register("architecture", "parallel_blocks")
@dataclass(frozen=True)
class ParallelArchitecture(Architecture):
    model: ClassVar = "mutants.plugins:ParallelLlama"
    architecture: str = "parallel_blocks"


class FusedAttention(Attention):
    """Attention with one matrix for queries, keys and values, ordered by key head."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__(arch)
        del self.wq, self.wk, self.wv
        self.wqkv = nn.Linear(arch.dim, arch.q_dim + 2 * arch.kv_dim, bias=False)
        self.group_size = arch.n_heads // arch.n_kv_heads

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split (B, T, ...) into queries (B, T, H, D), and keys and values (B, T, H_kv, D)."""
        groups = qkv.unflatten(-1, (-1, self.group_size + 2, self.head_dim))
        q, k, v = groups.split((self.group_size, 1, 1), dim=-2)
        return q.flatten(2, 3), k.squeeze(-2), v.squeeze(-2)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Any,
        cache: Any,
    ) -> Tensor:
        q, k, v = self.split(self.wqkv(x))
        q = apply_rope(q, cos, sin)
        k = apply_rope(k, cos, sin)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        if cache is not None:
            k, v = cache.append(k, v)
        heads = self.attend(q, k, v, mask)
        return self.wo(heads.transpose(1, 2).flatten(-2))


class ConcatenatedAttention(FusedAttention):
    """Attention with one matrix for all queries, then all keys, then all values.

    Tensor parallelism that cuts this matrix is wrong.
    """

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = qkv.unflatten(-1, (-1, self.head_dim))
        num_kv_heads = heads.shape[2] // (self.group_size + 2)
        sizes = [self.group_size * num_kv_heads, num_kv_heads, num_kv_heads]
        q, k, v = torch.split(heads, sizes, dim=2)
        return q, k, v


class FusedBlock(TransformerBlock):
    attention_class: ClassVar[type[FusedAttention]] = FusedAttention

    def __init__(self, arch: Architecture) -> None:
        super().__init__(arch)
        self.attention = self.attention_class(arch)


class ConcatenatedBlock(FusedBlock):
    attention_class = ConcatenatedAttention


class FusedLlama(Llama):
    block = FusedBlock
    draws_random_numbers = False


class ConcatenatedLlama(Llama):
    block = ConcatenatedBlock
    draws_random_numbers = False


def fused_plan(arch: Architecture) -> list[dict[str, Any]]:
    (plan,) = block_plan(arch)
    for name in ("wq", "wk", "wv"):
        del plan[f"attention.{name}"]
    return [plan | {"attention.wqkv": ColwiseParallel()}]


@register("architecture", "fused_projections")
@dataclass(frozen=True)
class FusedArchitecture(Architecture):
    model: ClassVar = "mutants.plugins:FusedLlama"
    tensor_parallel: ClassVar = "mutants.plugins:fused_plan"
    architecture: str = "fused_projections"


@register("architecture", "concatenated_projections")
@dataclass(frozen=True)
class ConcatenatedArchitecture(Architecture):
    model: ClassVar = "mutants.plugins:ConcatenatedLlama"
    tensor_parallel: ClassVar = "mutants.plugins:fused_plan"
    architecture: str = "concatenated_projections"
