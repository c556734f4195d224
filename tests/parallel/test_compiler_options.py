"""Compiler options of FP8 blocks. tests/ghost/test_ghost.py tests those that save launches."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from titanlite.load_run import load_run
from titanlite.parallel.parallelize import inductor_options


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


# Older versions of torch ignore `emulate_precision_casts` on CPUs.
@pytest.mark.skipif(torch.__version__ < "2.13", reason="needs torch 2.13 on a CPU")
@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "is_rounded"), [("rowwise", True), ("tensorwise", False)])
def test_rowwise_float8_blocks_round_to_bf16_as_often_as_in_eager_mode(recipe, is_rounded):
    """The option `emulate_precision_casts` makes compiled values bitwise equal to eager ones.

    Otherwise, intermediate results are in fp32, and rowwise scales can lead to NaN.
    """
    options = f"--float8.enable --float8.min_features 0 --float8.recipe_name {recipe}"
    run = load_run(options.split(), world_size=1)
    mesh: Any = SimpleNamespace(fsdp=SimpleNamespace(device_type="cuda"))
    gate, up = torch.randn(2, 512, 512, generator=torch.Generator().manual_seed(0)).bfloat16()

    compiled = torch.compile(swiglu, fullgraph=True, options=inductor_options(mesh, run))

    assert torch.equal(compiled(gate, up), swiglu(gate, up)) == is_rounded
