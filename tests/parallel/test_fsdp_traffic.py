"""FSDP gathers and reduces only the bytes that a step needs."""

import pytest
from train_variants import tiny_run

from titanlite.plan.trace import trace_run

ONE_MICROBATCH = "training.global_batch_size = 4"
THREE_MICROBATCHES = "training.global_batch_size = 12"
EACH_MICROBATCH = "parallelism.fsdp_reduce = 'microbatch'"
BF16 = (
    f"{ONE_MICROBATCH} ; training.mixed_precision_param = 'bfloat16' ; "
    "parallelism.fsdp_reshard_after_forward = 'never'"
)
FP8 = (
    "float8.enable = true ; float8.enable_fsdp_float8_all_gather = true ; "
    "float8.precompute_float8_dynamic_scale_for_fsdp = true"
)
MATRICES = 3 * (2 * 64 * (64 + 32) + 3 * 64 * 128)  # of three blocks
BLOCKS = MATRICES + 3 * 2 * 64
EMBEDDING = 96 * 64
NORM = 64


def count_traffic(*options: str) -> tuple[int, int, int]:
    """Return the gathered bytes, the gathers and the reductions of a step on two ranks."""
    (trace,) = trace_run(tiny_run(" ; ".join(filter(None, options)), 2))
    collectives = [
        work for work in trace.work if work.group is not None and work.group[0] == "fsdp"
    ]
    gathers = [work for work in collectives if work.op == "all_gather"]
    reductions = [work for work in collectives if work.op == "reduce_scatter"]
    num_bytes = sum(work.bytes for work in gathers)
    num_gathers = sum(work.count for work in gathers)
    num_reductions = sum(work.count for work in reductions)
    return num_bytes, num_gathers, num_reductions


def test_fp8_halves_the_traffic_of_the_blocks():
    others = BLOCKS - MATRICES + 2 * EMBEDDING + NORM

    assert count_traffic(BF16)[0] == 2 * (MATRICES + others)
    # No rank sends scales, because all ranks compute them.
    assert count_traffic(BF16, FP8)[0] == MATRICES + 2 * others


def test_each_microbatch_gathers_all_layers_but_the_output():
    """The embedding is gathered for forward passes only: its gradient needs only token IDs."""
    gathered = 4 * (EMBEDDING + 3 * (EMBEDDING + 2 * (BLOCKS + NORM)))
    gathers = 1 + 3 * (1 + 2 * 3)

    assert count_traffic(THREE_MICROBATCHES) == (gathered, gathers, 2 + 3)
    assert count_traffic(THREE_MICROBATCHES, EACH_MICROBATCH) == (gathered, gathers, 3 * (2 + 3))


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ("", 3),
        ("parallelism.fsdp_reduce = 'step'", 1),
        ("parallelism.data_parallel_replicate_degree = 2", 1),
        pytest.param(
            "training.dtype = 'bfloat16' ; optimizer.stochastic_rounding = true",
            1,
            marks=pytest.mark.long,
        ),
    ],
    ids=["default", "per step", "replicated", "bfloat16"],
)
def test_large_gradients_are_reduced_with_each_microbatch_if_that_saves_memory(options, factor):
    """Embedding and output have 70 million parameters each."""
    large = ("model.vocab_size = 1_100_000", options)

    *_, with_one = count_traffic(*large, ONE_MICROBATCH)
    *_, with_three = count_traffic(*large, THREE_MICROBATCHES)

    assert with_three == factor * with_one


def test_small_blocks_share_a_group():
    """The model has three blocks of 37,000 parameters, an embedding and an output layer.

    The final norm belongs to the last group of blocks.
    """
    gathers_and_reductions = {
        0: (2 + 2 * 3, 2 + 3),
        60_000: (2 + 2 * 2, 2 + 2),
        120_000: (2 + 1, 2 + 1),
        1_000_000: (1, 1),
    }
    for minimum, expected in gathers_and_reductions.items():
        group_size = f"parallelism.fsdp_min_num_params = {minimum}"
        assert count_traffic(ONE_MICROBATCH, group_size)[1:] == expected
