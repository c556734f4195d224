"""A plugin model with a matrix that tensor parallelism replicates."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn
from torch.distributed.tensor.parallel import SequenceParallel

from titanlite import Architecture, Llama, register
from titanlite.model.llama import TransformerBlock
from titanlite.parallel import tensor


@register("architecture", "adapter")
@dataclass(frozen=True)
class AdapterArchitecture(Architecture):
    """Blocks with a wide adapter, whose matrices are the largest of the block."""

    model: ClassVar = "adapter_model:AdapterLlama"
    tensor_parallel: ClassVar = "adapter_model:block_plan"
    architecture: str = "adapter"


class AdapterBlock(TransformerBlock):
    def __init__(self, arch):
        super().__init__(arch)
        width = 2 * arch.ffn_dim
        self.adapter = nn.Sequential(
            nn.Linear(arch.dim, width, bias=False), nn.Linear(width, arch.dim, bias=False)
        )

    def forward(self, x, cos, sin, mask=None, cache=None):
        x = x + self.adapter(self.attention_norm(x))
        return super().forward(x, cos, sin, mask, cache)


class AdapterLlama(Llama):
    block = AdapterBlock
    draws_random_numbers = False


def block_plan(arch):
    (plan,) = tensor.block_plan(arch)
    return [
        plan
        | {
            "adapter.0": SequenceParallel(),
            "adapter.1": SequenceParallel(use_local_output=True),
        }
    ]
