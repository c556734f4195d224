"""What is recomputed, counted op by op."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.config import schema
from titanlite.config.flavors import Architecture
from titanlite.model.llama import Llama
from titanlite.parallel.recompute import apply_activation_checkpointing

BLOCKS, LINEARS = 4, 7  # q, k, v, o, gate, up, down; nobody needs the result of the last one again
ARCH = Architecture(32, BLOCKS, 2, 1, 64, vocab_size=48)


class OpCount(TorchDispatchMode):
    """Counts matmuls and attention kernels that really run."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def count(mode: str, option: str = "op") -> tuple[Counter[str], torch.Tensor]:
    model = Llama(ARCH)
    model.init_weights(0)
    config = schema.ActivationCheckpoint.model_validate({"mode": mode, "selective_ac_option": option})
    if mode != "none":
        apply_activation_checkpointing(model, config)
    tokens = torch.arange(24).view(2, 12)
    with OpCount() as counter:
        model(tokens).square().mean().backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return counter.ops, gradient


@pytest.mark.parametrize(
    ("mode", "option", "recomputed_matmuls", "recomputed_attentions"),
    [
        ("full", "op", BLOCKS * (LINEARS - 1), BLOCKS),
        ("selective", "op", BLOCKS * (LINEARS // 2), 0),  # the 1st, 3rd, 5th and 7th matmul are saved
        ("selective", "1", BLOCKS * (LINEARS - 1), BLOCKS),
        ("selective", "2", BLOCKS // 2 * (LINEARS - 1), BLOCKS // 2),
    ],
)
def test_recomputes_what_the_mode_says(
    mode: str, option: str, recomputed_matmuls: int, recomputed_attentions: int
) -> None:
    reference, gradient = count("none")
    ops, same_gradient = count(mode, option)
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert ops["mm"] - reference["mm"] == recomputed_matmuls
    assert ops[attention] - reference[attention] == recomputed_attentions
    assert torch.equal(gradient, same_gradient)
