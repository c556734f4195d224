"""Activation checkpointing, context masks, FP8 casts and process groups work on their own."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed import PrefixStore, distributed_c10d  # pyright: ignore
from torch.nn.attention.flex_attention import create_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torchao.float8 import fsdp_utils
from torchao.float8.float8_training_tensor import LinearMMConfig

from titanlite.config import schema
from titanlite.config.flavors import Architecture
from titanlite.config.run import Degrees
from titanlite.model.attention import document_mask
from titanlite.model.llama import Llama
from titanlite.parallel.activation_checkpoint import apply_activation_checkpointing
from titanlite.parallel.context import flex_mask, local_chunks
from titanlite.parallel.float8 import convert_to_float8
from titanlite.parallel.mesh import build_mesh
from titanlite.parallel.tensor import enable_async_tensor_parallel

# Each block has the matmuls q, k, v, o, gate, up and down. The result of the last one is not needed
# again, so it is never recomputed.
BLOCKS = 4
LINEARS = 7
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


class OpCount(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def count(mode: str, option: str = "op") -> tuple[Counter[str], torch.Tensor]:
    model = Llama(Architecture(32, BLOCKS, 2, 1, 64, vocab_size=48))
    model.init_weights(0)
    keys = {"mode": mode, "selective_ac_option": option}
    config = schema.ActivationCheckpoint.model_validate(keys)
    if mode != "none":
        apply_activation_checkpointing(model, config)
    tokens = torch.arange(24).view(2, 12)
    with OpCount() as counter:
        model(tokens).square().mean().backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return counter.ops, torch.cat(gradients)


@pytest.mark.parametrize(
    ("mode", "option", "recomputed_matmuls", "recomputed_attentions"),
    [
        ("full", "op", BLOCKS * (LINEARS - 1), BLOCKS),
        # Selective checkpointing recomputes every second of the seven matmuls.
        ("selective", "op", BLOCKS * (LINEARS // 2), 0),
        ("selective", "2", BLOCKS // 2 * (LINEARS - 1), BLOCKS // 2),
    ],
)
def test_each_mode_recomputes_the_expected_operators(
    mode, option, recomputed_matmuls, recomputed_attentions
):
    reference, gradient = count("none")
    ops, same_gradient = count(mode, option)

    assert ops["mm"] - reference["mm"] == recomputed_matmuls
    assert ops[ATTENTION] - reference[ATTENTION] == recomputed_attentions
    assert torch.equal(gradient, same_gradient)


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("documents", [False, True])
def test_context_masks_of_flex_attention_and_of_sdpa_are_equal(rank, documents):
    # The group stands for a dimension of a device mesh. Both chunks have equal work.
    group: Any = SimpleNamespace(get_local_rank=lambda: rank, size=lambda: 2)
    chunks = [[0, 1, 6, 7], [2, 3, 4, 5]]

    assert local_chunks(torch.arange(8)[None], group)[0].tolist() == chunks[rank]

    tokens = torch.zeros(2, 16, dtype=torch.int64)
    ids = None
    if documents:
        ids = torch.stack((torch.arange(16) // 5, torch.arange(16) // 7))
    mask_mod = flex_mask(tokens, ids, group).mask_mod
    flex = create_mask(mask_mod, 2, 1, 8, 16, device="cpu")
    if ids is not None:
        dense = local_chunks(document_mask(ids), group, dim=2)
    else:  # SDPA needs no mask, because attention is causal
        causal = torch.ones(16, 16, dtype=torch.bool).tril()
        dense = local_chunks(causal, group, dim=0)[None, None]

    assert torch.equal(flex, dense.expand(2, 1, 8, 16))


def test_the_fp8_cast_of_weights_is_compiled_only_with_the_model_and_is_bitwise_equal(
    monkeypatch,
):
    def cast() -> torch.Tensor:
        weight = torch.randn(48, 32, generator=torch.Generator().manual_seed(0))
        scale = 448 / weight.abs().max().float()
        wrapped = fsdp_utils.WeightWithDynamicFloat8CastTensor(
            weight, LinearMMConfig(), torch.float8_e4m3fn, precomputed_scale=scale
        )
        (data,), _ = wrapped.fsdp_pre_all_gather(None)
        return data.view(torch.uint8)

    eager = fsdp_utils.hp_tensor_and_scale_to_float8
    expected = cast()
    # monkeypatch restores the function that the conversion below replaces.
    monkeypatch.setattr(fsdp_utils, "hp_tensor_and_scale_to_float8", eager)
    config = schema.Float8(
        enable=True,
        enable_fsdp_float8_all_gather=True,
        precompute_float8_dynamic_scale_for_fsdp=True,
        min_features=0,
    )
    for compiled in (False, True):
        with torch.device("meta"):
            model = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False))
        convert_to_float8(model, config, lambda _: None, compiled)
        assert (fsdp_utils.hp_tensor_and_scale_to_float8 is eager) == (not compiled)

    assert torch.equal(cast(), expected)


def enable_async_tp() -> None:
    import torch._inductor.config as inductor_config
    from torch.distributed import _symmetric_memory
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    on_gpus: Any = SimpleNamespace(device_type="cuda", get_group=mesh.get_group)
    enable_async_tensor_parallel(on_gpus)
    # Since torch 2.15, is_symm_mem_enabled_for_group returns False without a GPU.
    assert mesh.get_group().group_name in _symmetric_memory._group_name_to_store
    assert inductor_config._micro_pipeline_tp


@pytest.mark.slow
def test_async_tensor_parallelism_is_enabled_in_the_compiler_and_for_the_group():
    run_ranks(1, enable_async_tp)


LAYOUTS = [
    # pipeline, replicate, shard, context, tensor
    (1, 1, 2, 1, 2),
    (1, 1, 2, 2, 1),
    (2, 1, 1, 1, 2),
    (1, 2, 2, 1, 1),
]


def compare_groups() -> None:
    """Compare the groups that the mesh lists with the groups that torch has."""
    rank = dist.get_rank()
    store = distributed_c10d._get_default_store()
    for number, degrees in enumerate(LAYOUTS):
        dist.barrier()
        dist.destroy_process_group()
        new_store = PrefixStore(f"layout {number}", store)
        dist.init_process_group("gloo", store=new_store, rank=rank, world_size=4)
        listed = {group.group_name for group in build_mesh(Degrees(*degrees), "cpu").groups}
        assert listed == {group.group_name for group in distributed_c10d._world.pg_map}


@pytest.mark.slow
def test_the_mesh_lists_every_process_group():
    """A timeout must reach every group."""
    run_ranks(4, compare_groups)
