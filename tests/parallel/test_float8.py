"""FP8 weights before their all-gather; whole layouts are in tests/parallel/test_parallelize.py."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torchao.float8 import fsdp_utils
from torchao.float8.float8_training_tensor import LinearMMConfig

from titanlite.config import schema
from titanlite.config.run import Run
from titanlite.model.llama import Llama
from titanlite.parallel import float8, parallelize
from titanlite.parallel.mesh import build_mesh


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_cast_of_weights_is_the_same(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    def cast() -> torch.Tensor:
        weight = torch.randn(48, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
        wrapped = fsdp_utils.WeightWithDynamicFloat8CastTensor(
            weight, LinearMMConfig(), torch.float8_e4m3fn, precomputed_scale=448 / weight.abs().max().float()
        )
        (data,), _ = wrapped.fsdp_pre_all_gather(None)
        return data.view(torch.uint8)

    eager = fsdp_utils.hp_tensor_and_scale_to_float8
    monkeypatch.setattr(fsdp_utils, "hp_tensor_and_scale_to_float8", eager)  # restored at the end
    expected = cast()
    float8._compile_weight_cast.__wrapped__()
    assert fsdp_utils.hp_tensor_and_scale_to_float8 is not eager
    assert torch.equal(cast(), expected)


def test_weights_are_cast_in_one_kernel_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    monkeypatch.setattr(float8, "_compile_weight_cast", lambda: calls.append(None))
    config = schema.Float8(
        enable=True, enable_fsdp_float8_all_gather=True, precompute_float8_dynamic_scale_for_fsdp=True, min_features=0
    )
    for compiled in (False, True):
        with torch.device("meta"):
            model = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False))
        float8.convert_to_float8(model, config, lambda _: None, compiled)
        assert len(calls) == int(compiled)


@pytest.mark.parametrize(
    ("enable", "components", "asked"), [(True, "model", True), (True, "loss", False), (False, "model", False)]
)
def test_it_is_asked_for_with_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enable: bool, components: str, asked: bool
) -> None:
    given: list[bool] = []
    monkeypatch.setattr(
        parallelize, "convert_to_float8", lambda _model, _config, _log, compiled: given.append(compiled)
    )
    compile = {"enable": enable, "components": [components]}
    job = {"float8": {"enable": True}, "compile": compile, "model": {"n_layers": 1}}
    run = Run(schema.JobConfig.model_validate(job))
    dist.init_process_group(init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        with torch.device("meta"):
            model = Llama(run.arch)
        parallelize.parallelize(model, build_mesh(run.degrees, "cpu"), run, lambda _: None)
    finally:
        dist.destroy_process_group()
    assert given == [asked]
