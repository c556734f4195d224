"""FSDP2 on one process; on several see tests/parallel/test_parallelize.py."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite.config.schema import JobConfig
from titanlite.parallel.fsdp import _InPlace
from titanlite.parallel.mesh import build_mesh
from titanlite.parallel.parallelize import build_model


@pytest.fixture(autouse=True)
def world_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_single_rank_reduces_its_gradients_in_place(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    allocate, buffers = _InPlace.allocate, []

    def recorded(*args: Any, **kwargs: Any) -> Tensor:
        buffers.append(allocate(*args, **kwargs))
        return buffers[-1]

    monkeypatch.setattr(_InPlace, "allocate", recorded)
    shape = {"dim": 16, "n_layers": 3, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 32, "vocab_size": 48}
    groups = {"fsdp_min_num_params": 0}
    training = {"mixed_precision_param": dtype, "mixed_precision_reduce": "float32"}
    job = JobConfig.model_validate({"model": shape, "parallelism": groups, "training": training})
    model = build_model(job, build_mesh(job.parallelism, "cpu"), torch.device("cpu"), lambda _: None).whole
    for _ in range(2):  # the second adds to the first's
        model(torch.arange(8)[None]).float().sum().backward()

    inputs, outputs = buffers[::2], buffers[1::2]
    assert len(inputs) == 2 * (3 + 2)  # blocks, the embedding, and norm with output
    assert all(given is taken for given, taken in zip(inputs, outputs, strict=True))
    grads = [parameter.grad for parameter in model.parameters()]
    assert all(isinstance(grad, DTensor) and grad.dtype == torch.float32 for grad in grads)
    storages = {grad.to_local().untyped_storage().data_ptr() for grad in grads if isinstance(grad, DTensor)}
    assert storages == {buffer.untyped_storage().data_ptr() for buffer in inputs[: 3 + 2]}
