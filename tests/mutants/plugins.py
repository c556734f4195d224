"""Plugin architectures with dropout, parallel blocks, adapters and concatenated projections."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel
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


class AdapterBlock(TransformerBlock):
    """A block with a wide adapter, whose matrices are the largest of the block."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__(arch)
        width = 2 * arch.ffn_dim
        self.adapter = nn.Sequential(
            nn.Linear(arch.dim, width, bias=False), nn.Linear(width, arch.dim, bias=False)
        )

    def forward(self, x: Tensor, *inputs: Any) -> Tensor:
        return super().forward(x + self.adapter(self.attention_norm(x)), *inputs)


class AdapterLlama(Llama):
    block = AdapterBlock
    draws_random_numbers = False


def replicate_adapter(arch: Architecture) -> list[dict[str, Any]]:
    (plan,) = block_plan(arch)
    plan["adapter.0"] = SequenceParallel()
    plan["adapter.1"] = SequenceParallel(use_local_output=True)
    return [plan]


@register("architecture", "adapter")
@dataclass(frozen=True)
class AdapterArchitecture(Architecture):
    model: ClassVar = "mutants.plugins:AdapterLlama"
    tensor_parallel: ClassVar = "mutants.plugins:replicate_adapter"
    architecture: str = "adapter"


class ConcatenatedAttention(Attention):
    """Attention with one matrix for all queries, then all keys, then all values.

    Tensor parallelism that cuts this matrix is wrong. See docs/reference/plugin_models.md for a
    matrix that can be cut.
    """

    def __init__(self, arch: Architecture) -> None:
        super().__init__(arch)
        del self.wq, self.wk, self.wv
        self.wqkv = nn.Linear(arch.dim, arch.q_dim + 2 * arch.kv_dim, bias=False)
        self.group_size = arch.n_heads // arch.n_kv_heads

    def forward(self, x, cos, sin, mask, cache):
        heads = self.wqkv(x).unflatten(-1, (-1, self.head_dim))  # (B, T, H + 2 * H_kv, D)
        num_kv_heads = heads.shape[2] // (self.group_size + 2)
        sizes = [self.group_size * num_kv_heads, num_kv_heads, num_kv_heads]
        q, k, v = torch.split(heads, sizes, dim=2)
        q = apply_rope(q, cos, sin)
        k = apply_rope(k, cos, sin)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        if cache is not None:
            k, v = cache.append(k, v)
        attended = self.attend(q, k, v, mask)
        return self.wo(attended.transpose(1, 2).flatten(-2))


class ConcatenatedBlock(TransformerBlock):
    def __init__(self, arch: Architecture) -> None:
        super().__init__(arch)
        self.attention = ConcatenatedAttention(arch)


class ConcatenatedLlama(Llama):
    block = ConcatenatedBlock
    draws_random_numbers = False


def cut_concatenated(arch: Architecture) -> list[dict[str, Any]]:
    (plan,) = block_plan(arch)
    for name in ("wq", "wk", "wv"):
        del plan[f"attention.{name}"]
    return [plan | {"attention.wqkv": ColwiseParallel()}]


@register("architecture", "concatenated_projections")
@dataclass(frozen=True)
class ConcatenatedArchitecture(Architecture):
    model: ClassVar = "mutants.plugins:ConcatenatedLlama"
    tensor_parallel: ClassVar = "mutants.plugins:cut_concatenated"
    architecture: str = "concatenated_projections"
