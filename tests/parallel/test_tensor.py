"""Tensor parallelism as far as it needs no rank beside this one; `tests/distributed` compares what it computes."""

from types import SimpleNamespace
from typing import Any

import pytest
from ranks import run_ranks

from titanlite.parallel.tensor import enable_async_tensor_parallel


def switched_on() -> tuple[bool, bool]:
    """What the compiler looks at once async tensor parallelism is enabled for a group, here one on the CPU."""
    import torch._inductor.config as inductor_config
    from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    on_gpus: Any = SimpleNamespace(device_type="cuda", get_group=mesh.get_group)
    enable_async_tensor_parallel(on_gpus)
    return inductor_config._micro_pipeline_tp, is_symm_mem_enabled_for_group(mesh.get_group().group_name)


@pytest.mark.slow
def test_async_tensor_parallelism_is_switched_on_where_the_compiler_looks() -> None:
    assert run_ranks(1, switched_on) == [(True, True)]
