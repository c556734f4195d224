"""FSDP2 on one process; on several see tests/parallel/test_parallelize.py."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from titanlite.config.schema import JobConfig
from titanlite.parallel import fsdp
from titanlite.parallel.fsdp import _InPlace
from titanlite.parallel.mesh import build_mesh
from titanlite.parallel.parallelize import build_model

SHAPE = {"dim": 16, "n_layers": 3, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 32, "vocab_size": 48}
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, on_gpu])]


@pytest.fixture(autouse=True)
def world_of_one(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group(init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def gradients(device: str, training: dict[str, str], microbatches: int = 1) -> list[Tensor]:
    """What is left on the shards of a model each of whose blocks is a group."""
    job = JobConfig.model_validate({"model": SHAPE, "training": training, "parallelism": {"fsdp_min_num_params": 0}})
    model = build_model(job, build_mesh(job.parallelism, device), torch.device(device), lambda _: None).whole
    for row in range(microbatches):
        model(torch.arange(row, row + 8, device=device)[None]).float().square().mean().backward()
    grads = [parameter.grad for parameter in model.parameters()]
    return [grad.to_local() for grad in grads if isinstance(grad, DTensor)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_single_rank_reduces_its_gradients_in_place(monkeypatch: pytest.MonkeyPatch, device: str, dtype: str) -> None:
    allocate, buffers = _InPlace.allocate, []

    def recorded(*args: Any, **kwargs: Any) -> Tensor:
        buffers.append(allocate(*args, **kwargs))
        return buffers[-1]

    monkeypatch.setattr(_InPlace, "allocate", recorded)
    grads = gradients(device, {"mixed_precision_param": dtype, "mixed_precision_reduce": "float32"})
    inputs, outputs = buffers[::2], buffers[1::2]
    assert len(inputs) == 3 + 2  # blocks, the embedding, and norm with output
    assert all(given is taken for given, taken in zip(inputs, outputs, strict=True))
    storages = [{tensor.untyped_storage().data_ptr() for tensor in tensors} for tensors in (grads, inputs)]
    assert storages[0] == storages[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", DEVICES)
def test_in_place_they_are_the_same(monkeypatch: pytest.MonkeyPatch, device: str, dtype: str) -> None:
    training = {"dtype": dtype, "mixed_precision_param": "bfloat16", "mixed_precision_reduce": "float32"}
    in_place = gradients(device, training, microbatches=3)
    monkeypatch.setattr(FSDPModule, "set_custom_reduce_scatter", lambda *_: None)
    copied = gradients(device, training, microbatches=3)
    assert len(in_place) == len(copied) == 3 * 9 + 3
    for ours, theirs in zip(in_place, copied, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", DEVICES)
def test_blocks_of_a_single_rank_compute_on_its_shards(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: str
) -> None:
    def train() -> tuple[list[Tensor], bool]:
        """Weights after three steps, and whether those that a block computes with are the shards."""
        training = {"dtype": dtype, "mixed_precision_param": dtype}
        parallelism = {"fsdp_min_num_params": 0}
        job = JobConfig.model_validate({"model": SHAPE, "training": training, "parallelism": parallelism})
        model = build_model(job, build_mesh(job.parallelism, device), torch.device(device), lambda _: None).whole
        shards = {parameter.to_local().data_ptr() for parameter in model.parameters()}  # pyright: ignore
        used: set[int] = set()

        def watch(module: torch.nn.Module, *_: Any) -> None:
            used.update(parameter.data_ptr() for parameter in module.parameters())

        model.layers["0"].register_forward_hook(watch, prepend=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        for row in range(3):
            model(torch.arange(row, row + 8, device=device)[None]).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights = [parameter.to_local().clone() for parameter in model.parameters()]  # pyright: ignore
        return weights, used <= shards

    ours, shared = train()
    monkeypatch.setattr(fsdp, "_compute_on_shards", lambda _: None)
    theirs, copied = train()
    assert (shared, copied) == (True, False)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
