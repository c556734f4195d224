"""FSDP2 on one process; on several see tests/parallel/test_parallelize.py."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.model.llama import Llama
from titanlite.parallel import fsdp, spare_copies
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
    spare_copies.why_not.cache_clear()


def build(device: str, training: dict[str, str], log: Callable[[str], None] = lambda _: None) -> Llama:
    """A model each of whose blocks is a group."""
    job = JobConfig.model_validate({"model": SHAPE, "training": training, "parallelism": {"fsdp_min_num_params": 0}})
    run = Run(job)
    return build_model(run, build_mesh(run.degrees, device), torch.device(device), log).whole


def backward(model: Llama, row: int) -> None:
    tokens = torch.arange(row, row + 8, device=next(model.parameters()).device)[None]
    model(tokens).float().square().mean().backward()


def shards(model: Llama) -> list[Tensor]:
    return [parameter.to_local() for parameter in model.parameters() if isinstance(parameter, DTensor)]


def gradients(model: Llama) -> list[Tensor]:
    """What is left on the shards."""
    return [parameter.grad.to_local() for parameter in model.parameters() if isinstance(parameter.grad, DTensor)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_single_rank_keeps_its_gradients_where_they_are(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: str
) -> None:
    take, given = spare_copies._take_gradient, []

    def recorded(group: Any, parameter: Any) -> None:
        if parameter.unsharded_param.grad is not None:  # FSDP2 of torch 2.11 comes once more at the end
            given.append(parameter.unsharded_param.grad.data_ptr())
        take(group, parameter)

    monkeypatch.setattr(spare_copies, "_take_gradient", recorded)
    model = build(device, {"dtype": dtype, "mixed_precision_param": dtype})
    given.clear()  # of the trial
    backward(model, 0)
    assert {gradient.data_ptr() for gradient in gradients(model)} == set(given)
    assert len(given) == 3 * 9 + 3


@pytest.mark.parametrize("reduce_each", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", DEVICES)
def test_they_are_those_that_fsdp2_would_make(
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


def test_gathering_converts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP2 converts the shard, then copies what came of that."""

    class Copies(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func in (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
            return func(*args, **(kwargs or {}))

    def copies() -> int:
        model = build("cpu", {"mixed_precision_param": "bfloat16"})
        backward(model, 0)
        with Copies() as found, torch.no_grad():
            model(torch.arange(8)[None])
        return found.count

    ours = copies()
    monkeypatch.setattr(fsdp, "spare_copies", lambda *_: None)
    assert copies() - ours == 3 * 9 + 3


def fails(*_: Any, **__: Any) -> None:
    raise AttributeError("'FSDPParam' object has no attribute '_sharded_param_data'")


def doubles(group: Any, parameter: Any) -> None:
    if parameter.unsharded_param.grad is not None:
        parameter.unsharded_param.grad *= 2


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [("_alias", fails, "has no attribute '_sharded_param_data'"), ("_take_gradient", doubles, "differ")],
)
def test_where_fsdp2_is_another_it_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, name: str, changed: Callable[..., None], said: str
) -> None:
    lines: list[str] = []
    spare_copies.why_not.cache_clear()
    monkeypatch.setattr(spare_copies, name, changed)
    model = build("cpu", {"dtype": "float32", "mixed_precision_param": "float32"}, lines.append)
    backward(model, 0)
    assert [line for line in lines if "FSDP2" in line and said in line] == lines
    assert len(lines) == 1
    used = gradients(model)
    monkeypatch.undo()
    spare_copies.why_not.cache_clear()
    lines.clear()
    model = build("cpu", {"dtype": "float32", "mixed_precision_param": "float32"}, lines.append)
    backward(model, 0)
    assert lines == []  # this torch's FSDP2 is the one that is known
    assert all(torch.equal(a, b) for a, b in zip(used, gradients(model), strict=True))
