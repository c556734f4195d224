"""Each memory saver saves memory or traffic, and is off where it would be unsafe."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from train_variants import tiny_run

from titanlite.checkpoint.live_state import to_local
from titanlite.config.errors import UserError
from titanlite.load_run import load_run
from titanlite.observe.flops import num_params
from titanlite.observe.gpus import find_gpu
from titanlite.parallel.fsdp import use_symmetric_memory
from titanlite.parallel.mesh import build_mesh
from titanlite.parallel.parallelize import build_model
from titanlite.plan.simulate import simulate_ranks
from titanlite.plan.trace import RankTrace, trace_run
from titanlite.train.trainer import Trainer

LARGE = (
    "model.dim = 1024 ; model.n_layers = 4 ; model.ffn_dim = 4096 ; model.vocab_size = 32_000 ; "
    "training.seq_len = 2048 ; training.mixed_precision_param = 'bfloat16' ; "
    "activation_checkpoint.mode = 'selective'"
)
LONG_MICROBATCH = "training.local_batch_size = 64 ; training.global_batch_size = 256"
SAVERS = "titanlite.parallel.memory_savers"
BF16 = "--training.mixed_precision_param bfloat16"
ACCUMULATION = "training.global_batch_size = 16"
AMSGRAD = """
import torch
from titanlite import register

@register("optimizer", "amsgrad")
def amsgrad(groups, recipe):
    return torch.optim.AdamW(groups, recipe.config.lr, amsgrad=True, fused=True)
"""
# The allocator reserves memory in multiples of this number of bytes.
SEGMENT = 20 * 2**20


def trace(level: str, options: str = "", world_size: int = 4) -> RankTrace:
    """Trace a step of the large model on the first GPU."""
    savers = f"parallelism.memory_savers = '{level}'"
    run = tiny_run(" ; ".join(filter(None, (LARGE, savers, options))), world_size)
    (rank_trace,) = trace_run(run, find_gpu("H100"))
    return rank_trace


def count_gathers(rank_trace: RankTrace) -> int:
    return sum(work.count for work in rank_trace.work if work.op == "all_gather")


def count_copied_bytes(rank_trace: RankTrace) -> int:
    return sum(work.bytes for work in rank_trace.work if work.op == "copy_")


def count_flops(rank_trace: RankTrace) -> float:
    return sum(work.flops for work in rank_trace.work)


@pytest.mark.parametrize(
    ("level", "saver", "result_without"),
    [
        ("safe", f"{SAVERS}.reduce_in_main_stream", None),
        ("safe", "titanlite.parallel.activation_checkpoint.find_unneeded_matmul", None),
        ("all", f"{SAVERS}.gather_in_main_stream", None),
        ("all", f"{SAVERS}.separates_norm", False),
    ],
    ids=lambda value: str(value).rpartition(".")[-1],
)
def test_each_saver_lowers_reserved_memory(monkeypatch, level, saver, result_without):
    with_saver = trace(level)
    monkeypatch.setattr(saver, lambda *_: result_without)
    without_saver = trace(level)

    assert without_saver.reserved - with_saver.reserved >= SEGMENT


@pytest.mark.parametrize(
    "options",
    ["", "model.norm_placement = 'after'", "float8.enable = true"],
    ids=["norm before", "norm after", "FP8"],
)
def test_safe_savers_compute_nothing_again(options):
    """With a norm after the last matmul, the backward pass needs its output."""
    without_savers = trace("none", options)
    with_savers = trace("safe", options)

    assert count_flops(with_savers) == count_flops(without_savers)


@pytest.mark.parametrize(
    ("saver", "options"),
    [
        ("free_gather_buffer_before_loss", ""),
        ("separates_norm", LONG_MICROBATCH),
    ],
)
def test_safe_savers_lower_the_peak_of_allocated_memory(monkeypatch, saver, options):
    with_saver = trace("safe", options)
    monkeypatch.setattr(f"{SAVERS}.{saver}", lambda *_: False)
    without_saver = trace("safe", options)

    assert with_saver.peak < without_saver.peak


@pytest.mark.parametrize(
    ("level", "options", "world_size"),
    [
        ("safe", "", 4),
        ("all", "training.global_batch_size = 64", 16),
        ("all", "parallelism.fsdp_min_num_params = 4_000_000", 4),
    ],
    ids=["short microbatches", "two nodes", "small output"],
)
def test_no_saver_waits_for_the_output_if_that_costs_time_or_saves_little(
    monkeypatch, level, options, world_size
):
    with_saver = trace(level, options, world_size)
    monkeypatch.setattr(f"{SAVERS}.separates_norm", lambda *_: False)
    without_saver = trace(level, options, world_size)

    assert with_saver.peak == without_saver.peak
    assert with_saver.reserved == without_saver.reserved


def debug_trainer(folder: Path, options: str) -> Trainer:
    """Return a trainer of the debug model."""
    arguments = f"--model.flavor debugmodel --job.dump_folder {folder} {options}".split()
    return Trainer(load_run(arguments, world_size=1), standard=False)


def test_a_loss_whose_backward_pass_reads_the_output_matrix_trains_with_safe_savers(tmp_path):
    weights = {}
    for level in ("none", "safe"):
        options = f"{BF16} --training.loss reference --parallelism.fsdp_min_num_params 1"
        options += f" --training.seq_len 64 --parallelism.memory_savers {level}"
        with debug_trainer(tmp_path, options) as trainer:
            trainer.step()
            weights[level] = [to_local(weight).clone() for weight in trainer.model.parameters()]

    torch.testing.assert_close(weights["safe"], weights["none"], rtol=0, atol=0)


def test_safe_gathers_embedding_and_output_only_for_the_forward_pass():
    # Each of the four blocks is gathered for both passes.
    blocks = 2 * 4
    reference_loss = "training.loss = 'reference'"

    # Plain FSDP2 gathers the embedding for both passes. Norm and output stay gathered in between.
    assert count_gathers(trace("none")) == 2 + blocks + 1
    assert count_gathers(trace("safe")) == 1 + blocks + 1
    assert count_gathers(trace("safe", reference_loss)) == 1 + blocks + 1


@pytest.mark.parametrize(
    ("level", "options", "is_replaced"),
    [
        ("safe", "", True),
        ("none", "", False),
        ("safe", "training.mixed_precision_reduce = 'bfloat16'", False),
        ("safe", "training.enable_cpu_offload = true", False),
        ("safe", f"{ACCUMULATION} ; parallelism.fsdp_reduce = 'microbatch'", False),
        ("safe", f"{ACCUMULATION} ; parallelism.fsdp_reduce = 'step'", True),
    ],
    ids=["default", "none", "bf16 reduction", "offload", "reduction per microbatch", "per step"],
)
def test_only_gradients_that_are_kept_are_allocated_in_the_main_stream(
    monkeypatch, level, options, is_replaced
):
    """FSDP2 would free any other result before the main stream has waited for the collective."""
    replaced: list[FSDPModule] = []
    replace = FSDPModule.set_custom_reduce_scatter

    def record(module: FSDPModule, reduce_scatter: Any) -> None:
        replaced.append(module)
        replace(module, reduce_scatter)

    monkeypatch.setattr(FSDPModule, "set_custom_reduce_scatter", record)
    trace(level, options)

    assert bool(replaced) == is_replaced


def test_a_single_rank_does_not_copy_gradients_to_reduce_them(monkeypatch):
    with_saver = trace("safe", world_size=1)
    monkeypatch.setattr(f"{SAVERS}.reduce_in_main_stream", lambda *_: None)
    without_saver = trace("safe", world_size=1)

    saved_bytes = count_copied_bytes(without_saver) - count_copied_bytes(with_saver)
    # Each fp32 gradient is otherwise read and written once more.
    assert saved_bytes == 2 * 4 * num_params(tiny_run(LARGE, 1).arch)
    assert without_saver.reserved - with_saver.reserved >= SEGMENT


@pytest.mark.parametrize(
    ("level", "exist"),
    [("none", False), ("safe", True), ("all", True)],
)
def test_moments_exist_before_the_first_step(tmp_path, level, exist):
    with debug_trainer(tmp_path, f"--parallelism.memory_savers {level}") as trainer:
        assert bool(trainer.optimizer.state) == exist


def test_moments_are_not_allocated_for_a_plugin_with_other_moments(tmp_path, write_plugin):
    write_plugin("amsgrad", AMSGRAD)
    plugin = "--job.plugins amsgrad --optimizer.name amsgrad"
    with debug_trainer(tmp_path, plugin) as trainer:
        trainer.step()
        assert all("max_exp_avg_sq" in state for state in trainer.optimizer.state.values())


def test_symmetric_memory_is_rejected_on_a_cpu_and_set_for_every_group_on_gpus(
    monkeypatch,
):
    groups: list[FSDPModule] = []

    def record(module: FSDPModule) -> None:
        groups.append(module)

    monkeypatch.setattr(FSDPModule, "set_symm_mem_for_comm", record, raising=False)
    symmetric = "parallelism.enable_fsdp_symmetric_memory = true"
    run = tiny_run(f"{symmetric} ; parallelism.memory_savers = 'none'", 2)

    with simulate_ranks(2, 0):
        mesh = build_mesh(run.degrees, "cpu")
        with pytest.raises(UserError, match="enable_fsdp_symmetric_memory"):
            build_model(run, mesh, torch.device("meta"), print)
        assert groups == []

        model = build_model(tiny_run("", 2), mesh, torch.device("meta"), print).whole
        use_symmetric_memory(model, "cuda")
        assert groups == [part for part in model.modules() if isinstance(part, FSDPModule)]
