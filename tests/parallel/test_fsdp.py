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
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else ["cpu"]


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


DTYPES = [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")]


@pytest.mark.parametrize("reduce_each", [True, False])
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_a_single_rank_computes_on_its_shards_and_has_the_gradients_that_fsdp2_would_make(
    monkeypatch: pytest.MonkeyPatch, device: str, dtypes: tuple[str, str], reduce_each: bool
) -> None:
    def train() -> tuple[list[Tensor], bool]:
        """Gradients and weights of two steps of three microbatches, and whether a block computes with the shards."""
        model = build(device, {"dtype": dtypes[0], "mixed_precision_param": dtypes[1]})
        parameters = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
        places = {parameter.to_local().data_ptr() for parameter in parameters}
        used: set[int] = set()

        def watch(module: torch.nn.Module, *_: Any) -> None:
            used.update(parameter.data_ptr() for parameter in module.parameters())
            assert {str(parameter.dtype) for parameter in module.parameters()} == {f"torch.{dtypes[1]}"}

        model.layers["0"].register_forward_hook(watch, prepend=True)
        optimizer, found = torch.optim.AdamW(parameters, lr=0.1, fused=True), []
        for _ in range(2):
            for row in range(3):
                fsdp.set_gradient_sync(model, reduce=reduce_each or row == 2, last_microbatch=row == 2)
                tokens = torch.arange(row, row + 8, device=device)[None]
                model(tokens).float().square().mean().backward()
            found += [p.grad.to_local().clone() for p in parameters if isinstance(p.grad, DTensor)]
            optimizer.step()
            optimizer.zero_grad()
        return [*found, *(parameter.to_local().clone() for parameter in parameters)], used <= places

    ours, shared = train()
    monkeypatch.setattr(fsdp, "spare_copies", lambda *_: None)
    theirs, copied = train()
    assert (shared, copied) == (dtypes[0] == dtypes[1], False)
    assert len(ours) == len(theirs) == 3 * (3 * 9 + 3)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
