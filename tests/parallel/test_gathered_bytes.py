"""Bytes that FSDP gathers and reduces per step."""

from typing import Any

from train_variants import TINY, merge

from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.plan.trace import trace_run

BF16 = {
    "training": {"mixed_precision_param": "bfloat16", "global_batch_size": 4},
    "parallelism": {"fsdp_reshard_after_forward": "never"},
}
FP8 = {
    "enable": True,
    "enable_fsdp_float8_all_gather": True,
    "precompute_float8_dynamic_scale_for_fsdp": True,
}
MATRICES = 3 * (2 * 64 * (64 + 32) + 3 * 64 * 128)  # of three blocks
BLOCKS, EMBEDDING, NORM = MATRICES + 3 * 2 * 64, 96 * 64, 64


def traffic(**job: Any) -> tuple[int, int, int]:
    """Return the bytes that two ranks gather in a step, and the number of gathers and reductions."""
    (trace,) = trace_run(Run(JobConfig.model_validate(merge(TINY, job)), 2))
    found = [work for work in trace.work if work.group is not None and work.group[0] == "fsdp"]
    gathers = [work for work in found if work.op == "all_gather"]
    reductions = sum(work.count for work in found if work.op == "reduce_scatter")
    return sum(work.bytes for work in gathers), sum(work.count for work in gathers), reductions


def test_fp8_halves_what_travels_of_the_blocks():
    assert traffic(**BF16)[0] == 2 * (BLOCKS + 2 * EMBEDDING + NORM)
    # Scales do not travel: they were computed on all ranks alike.
    assert traffic(**BF16, float8=FP8)[0] == MATRICES + 2 * (
        BLOCKS - MATRICES + 2 * EMBEDDING + NORM
    )


def test_each_microbatch_gathers_but_the_output_matrix_and_reduces_if_asked():
    """The embedding is gathered for forward passes only, because its gradient needs only token ids."""
    rows = {"global_batch_size": 12}
    gathered = 4 * (EMBEDDING + 3 * (EMBEDDING + 2 * (BLOCKS + NORM))), 1 + 3 * (1 + 2 * 3)
    assert traffic(training=rows) == (*gathered, 2 + 3)
    assert traffic(training=rows, parallelism={"fsdp_reduce": "microbatch"}) == (
        *gathered,
        3 * (2 + 3),
    )


def test_large_gradients_are_reduced_with_each_microbatch_unless_that_saves_no_memory():
    """Embedding and output have 70 million parameters each."""
    large = {"model": {"vocab_size": 1_100_000}}
    rows = {"global_batch_size": 12}
    assert (
        traffic(**large, training=rows)[2]
        == 3 * traffic(**large, training={"global_batch_size": 4})[2]
    )
    for once in (
        {"parallelism": {"fsdp_reduce": "step"}, "training": rows},
        {"parallelism": {"data_parallel_replicate_degree": 2}, "training": rows},
        {"training": rows | {"dtype": "bfloat16"}, "optimizer": {"stochastic_rounding": True}},
    ):
        assert (
            traffic(**large, **once)[2]
            == traffic(**large, **once | {"training": {"global_batch_size": 4}})[2]
        )


def test_small_blocks_share_a_group():
    """The model has three blocks of 37,000 parameters, an embedding and an output layer.

    The final norm belongs to the last group of blocks.
    """
    groups = {
        0: (2 + 2 * 3, 2 + 3),
        60_000: (2 + 2 * 2, 2 + 2),
        120_000: (2 + 1, 2 + 1),
        1_000_000: (1, 1),
    }
    for least, counts in groups.items():
        layout = {"fsdp_min_num_params": least}
        assert traffic(training={"global_batch_size": 4}, parallelism=layout)[1:] == counts
