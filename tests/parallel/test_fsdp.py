"""FSDP2 on one process; on several see tests/parallel/test_parallelize.py."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.model.llama import Llama
from titanlite.parallel import fsdp
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


def build(device: str, training: dict[str, str]) -> Llama:
    """A model each of whose blocks is a group."""
    job = JobConfig.model_validate({"model": SHAPE, "training": training, "parallelism": {"fsdp_min_num_params": 0}})
    run = Run(job)
    return build_model(run, build_mesh(run.degrees, device), torch.device(device), lambda _: None).whole


def backward(model: Llama, row: int) -> None:
    tokens = torch.arange(row, row + 8, device=next(model.parameters()).device)[None]
    model(tokens).float().square().mean().backward()


def shards(model: Llama) -> list[Tensor]:
    return [parameter.to_local() for parameter in model.parameters() if isinstance(parameter, DTensor)]


def gradients(model: Llama) -> list[Tensor]:
    """What is left on the shards."""
    return [parameter.grad.to_local() for parameter in model.parameters() if isinstance(parameter.grad, DTensor)]


@pytest.mark.parametrize("reduce_each", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_single_rank_has_the_gradients_that_fsdp2_would_make(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: str, reduce_each: bool
) -> None:
    def of_three_microbatches() -> list[Tensor]:
        model = build(device, {"dtype": dtype, "mixed_precision_param": "bfloat16"})
        for row in range(3):
            fsdp.set_gradient_sync(model, reduce=reduce_each or row == 2, last_microbatch=row == 2)
            backward(model, row)
        return gradients(model)

    ours = of_three_microbatches()
    monkeypatch.setattr(fsdp, "spare_copies", lambda *_: None)
    theirs = of_three_microbatches()
    assert len(ours) == len(theirs) == 3 * 9 + 3
    for mine, copied in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, copied, rtol=0, atol=0)


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")])
@pytest.mark.parametrize("device", DEVICES)
def test_blocks_of_a_single_rank_compute_on_its_shards(
    monkeypatch: pytest.MonkeyPatch, device: str, dtypes: tuple[str, str]
) -> None:
    def train() -> tuple[list[Tensor], bool]:
        """Weights after three steps, and whether those that a block computes with are the shards."""
        model = build(device, {"dtype": dtypes[0], "mixed_precision_param": dtypes[1]})
        places = {shard.data_ptr() for shard in shards(model)}
        used: set[int] = set()

        def watch(module: torch.nn.Module, *_: Any) -> None:
            used.update(parameter.data_ptr() for parameter in module.parameters())
            assert {str(parameter.dtype) for parameter in module.parameters()} == {f"torch.{dtypes[1]}"}

        model.layers["0"].register_forward_hook(watch, prepend=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        for row in range(3):
            backward(model, row)
            optimizer.step()
            optimizer.zero_grad()
        return [shard.clone() for shard in shards(model)], used <= places

    ours, shared = train()
    monkeypatch.setattr(fsdp, "spare_copies", lambda *_: None)
    theirs, copied = train()
    assert (shared, copied) == (dtypes[0] == dtypes[1], False)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
