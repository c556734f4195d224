"""From traces made by hand to memory and time: each expectation is worked out in the test."""

import math
from typing import Any

import pytest
from traces import GIB, matmul, moving, run, sent, trace

from titanlite.observe.forecast import Forecast
from titanlite.observe.gpus import find_gpu
from titanlite.plan.roofline import BANDWIDTH, FUSED_BYTES, LINK, MATMUL, OVERLAP_PRICE, forecast
from titanlite.plan.trace import Work

H100 = find_gpu("H100")
CPU = H100.model_copy(update={"cpu": True, "memory_gib": 24.0, "machine": 2})
LARGE = matmul(16384, 4096, 14336, count=100)
SECONDS = LARGE.flops / (989e12 * MATMUL["bfloat16"])
NETWORK = 1e10 / 8 / 50e9 / LINK  # of 10 GB, by the network cards of a machine


def plan(*work: Work, peak: float = 40.0, ranks: int = 8, gpu: Any = H100, **job: dict[str, Any]) -> Forecast:
    traces = [trace(*work, LARGE, peak=peak), trace(peak=peak - 1, rank=1)]
    return forecast(run(ranks, **job), traces, gpu.of_rank(ranks))


def test_the_rank_with_the_highest_peak_counts_and_its_allowance_must_fit():
    result = plan()
    assert (result.rank, result.peak, result.moment) == (0, 40 * GIB, "backward of a block")
    assert result.peaks == {"0": 40 * GIB, "1": 39 * GIB}
    assert sum(result.kinds.values()) == result.peak < result.needs
    assert plan(peak=74).fits
    assert not plan(peak=78).fits
    assert "activations 30.00, weights 10.00" in result.explain_memory()  # the largest first, nothing of 0 bytes
    assert plan(peak=10, gpu=CPU, ranks=2).memory == 12 * GIB  # ranks share what the machine has


@pytest.mark.parametrize(
    ("work", "job", "part", "seconds"),
    [
        (LARGE, {}, "matmuls", 2 * SECONDS),
        (matmul(16384, 4096, 14336, dtype="float32"), {}, "matmuls", SECONDS + LARGE.flops / 100 / 67e12 / 0.85),
        (matmul(1, 4096, 4096), {}, "matmuls", SECONDS + 2 * (4096 * 4098) / (3350e9 * BANDWIDTH)),
        (moving(10**10), {}, "memory-bound kernels", 1e10 / (3350e9 * BANDWIDTH)),
        (moving(10**10), {"compile": {"enable": True}}, "memory-bound kernels", FUSED_BYTES / (335 * BANDWIDTH)),
        (moving(10**10, "optimizer"), {}, "optimizer", 1e10 / (3350e9 * BANDWIDTH)),
        (sent("all_gather", 10**10, "tensor"), {}, "collectives (tensor)", 1e10 * 7 / 8 / (450e9 * LINK)),
        (sent("all_reduce", 10**10, "tensor"), {}, "collectives (tensor)", 2e10 * 7 / 8 / (450e9 * LINK)),
        (sent("all_gather", 10**10, "context", 2, span=16), {}, "collectives (context)", NETWORK * 4),
        (sent("send", 10**10, "pipeline", 2, span=16), {}, "collectives (pipeline)", NETWORK * 8),
    ],
)
def test_what_takes_the_time_of_a_step(work: Work, job: dict[str, Any], part: str, seconds: float):
    assert plan(work, **job).parts[part] == pytest.approx(seconds, rel=2e-3)


def test_traffic_of_fsdp_hides_behind_computation_but_for_its_first_gather():
    traffic = sent("all_gather", 10**10, "fsdp", count=10)
    alone = 1e10 * 7 / 8 / (450e9 * LINK)
    result = plan(traffic)
    assert result.hidden_seconds == pytest.approx(0.9 * alone, rel=0.01)
    assert result.parts["collectives (fsdp)"] == pytest.approx((0.1 + 0.9 * OVERLAP_PRICE) * alone, rel=0.01)
    assert plan(traffic, gpu=CPU).hidden_seconds == 0


@pytest.mark.parametrize(
    ("schedule", "share"),
    [("1F1B", 3 / 16), ("Interleaved1F1B", 3 / 32), ("InterleavedZeroBubble", 1 / 32), ("ZBVZeroBubble", 0)],
)
def test_ranks_of_a_pipeline_wait_for_each_other(schedule: str, share: float):
    layout = {"pipeline_parallel_degree": 4, "pipeline_parallel_schedule": schedule}
    training = {"local_batch_size": 1, "global_batch_size": 32}
    job = run(8, parallelism=layout, training=training)
    result = forecast(job, [trace(LARGE, rank=rank) for rank in range(4)], H100)
    assert result.parts.get("pipeline bubble", 0.0) == pytest.approx(share * SECONDS, rel=0.01)


def test_tokens_and_mfu_follow_from_the_step():
    result = plan()
    assert result.tokens_per_second == pytest.approx(2 * 8192 / result.step_seconds)
    assert math.isclose(sum(result.parts.values()), result.step_seconds)
    assert plan(gpu=CPU, ranks=4).step_seconds == pytest.approx(2 * plan(gpu=CPU, ranks=2).step_seconds, rel=0.01)
    assert plan(gpu=CPU, ranks=2).mfu == pytest.approx(plan(gpu=CPU, ranks=1).mfu, rel=0.01)
