"""What FSDP puts on the wire: one byte a weight with FP8 instead of two, and the output matrix once a step."""

from collections import Counter

import pytest
from count_bytes import count_bytes
from ranks import run_ranks

ALL_GATHER = {"enable_fsdp_float8_all_gather": True, "precompute_float8_dynamic_scale_for_fsdp": True}
BF16 = {
    "training": {"mixed_precision_param": "bfloat16", "global_batch_size": 1},
    "parallelism": {"fsdp_reshard_after_forward": "never"},
}


@pytest.mark.slow
def test_weights_travel_in_one_byte_each() -> None:
    jobs = {"bf16": BF16, "fp8": BF16 | {"float8": {"enable": True} | ALL_GATHER}}
    counts = run_ranks(2, count_bytes, jobs)[0]
    weights, rest = counts["bf16"]["linear"], counts["bf16"]["rest"]  # the embedding, the norms, the output
    assert sum(counts["bf16"]["bytes"]) == 2 * (weights + rest)
    assert (
        sum(counts["fp8"]["bytes"]) == weights + 2 * rest
    )  # scales do not travel: they were computed on all ranks alike


@pytest.mark.slow
def test_what_travels_with_three_microbatches() -> None:
    once, each = {"training": {"global_batch_size": 3}}, {"parallelism": {"fsdp_reduce": "microbatch"}}
    counts = run_ranks(2, count_bytes, {"step": once, "microbatch": once | each})[0]
    for count in counts.values():
        sizes = Counter(count["bytes"])
        assert sizes[4 * count["output"]] == 1  # the output matrix stays gathered
        assert sizes[4 * count["embedding"]] == 3  # in each microbatch: forward, as no gradient needs it
        assert 3 * 2 * count["blocks"] in sizes.values()  # forward and backward
    assert counts["microbatch"]["reductions"] == 3 * counts["step"]["reductions"] > 0


@pytest.mark.slow
def test_small_blocks_share_a_group() -> None:
    jobs = {str(least): {"parallelism": {"fsdp_min_num_params": least}} for least in (0, 60_000, 120_000, 1_000_000)}
    once = {"training": {"global_batch_size": 1}}
    counts = run_ranks(2, count_bytes, {name: job | once for name, job in jobs.items()})[0].values()
    # 3 blocks of 37,000 parameters; besides them the embedding, and norm with output
    assert [len(count["bytes"]) for count in counts] == [2 + 2 * 3, 2 + 2 * 2, 2 + 1, 1]  # again when backward
    assert [count["reductions"] for count in counts] == [2 + 3, 2 + 2, 2 + 1, 1]
