"""The time of a step, from traces made by hand: each expectation is worked out in the test."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
from traces import matmul, moving, run, trace, traffic

from titanlite.observe.flops import flops_per_token
from titanlite.observe.gpus import WRAPPER, Attention, Collective, Gpu, Kernel, Matmul, Rates, find_gpu
from titanlite.plan.counts import Traffic, Work
from titanlite.plan.time import (
    ATTENTION,
    BANDWIDTH,
    FUSED_BYTES,
    LINK,
    MATMUL,
    OVERLAP_PRICE,
    SELECTIVE_US,
    WRAPPER_US,
    Clock,
    bubble,
    step_time,
)

H100 = find_gpu("H100")
CPU = Gpu(
    name="2 cores", cpu=True, memory_gib=8, bf16=0.4, fp32=0.1, bandwidth=20, link=5, network=1, host=20, machine=2,
    latency_us=100, measured="by hand",
    rates=(
        Rates(
            ranks=1,
            launch_us=10.0,
            wrapper_us=20.0,
            selective_us=4000.0,
            bandwidth=12,
            matmul=(
                Matmul(dtype="float32", shape=(256, 256, 256), seconds=1e-3),
                Matmul(dtype="float32", shape=(1024, 1024, 1024), seconds=32e-3),
            ),
            kernel=(
                Kernel(op="aten.add", dtype="bfloat16", bytes=1000, seconds=1e-5),
                Kernel(op="aten.add", dtype="bfloat16", bytes=3000, seconds=2e-5),
                Kernel(op="aten.exp", dtype="bfloat16", bytes=10**6, seconds=1e-3),
            ),
        ),
    ),
)  # fmt: skip


def parts(*work: Work, gpu: Gpu = H100, sent: Sequence[Traffic] = (), **job: Any) -> dict[str, float]:
    return Clock(run(**job), gpu).rank_parts(trace(work, tuple(sent)))[0]


def test_a_large_matmul_takes_its_share_of_the_peak():
    assert parts(matmul(16384, 4096, 14336)) == {
        "matmuls": pytest.approx(2 * 16384 * 4096 * 14336 / (989e12 * MATMUL["bfloat16"]))
    }


def test_a_thin_matmul_is_bound_by_its_bytes():
    thin = matmul(1, 8192, 8192, count=1000)
    assert parts(thin)["matmuls"] == pytest.approx(thin.bytes / (3350e9 * BANDWIDTH))


def test_fp8_has_a_peak_of_its_own_and_is_emulated_in_bf16_where_there_is_none():
    work = matmul(16384, 4096, 14336, dtype="float8_e4m3fn")
    assert parts(work)["matmuls"] == pytest.approx(work.flops / (1979e12 * MATMUL["float8"]))
    assert parts(work, gpu=find_gpu("A100"))["matmuls"] == pytest.approx(work.flops / (312e12 * MATMUL["bfloat16"]))


def test_attention_forward_and_backward():
    shape = (2, 32, 8192, 8192, 128)
    forward = Work("backward", "aten._scaled_dot_product_flash_attention", "bfloat16", shape, 1, 10**14, 10**9)
    backward = Work("backward", "aten._scaled_dot_product_flash_attention_backward", "bfloat16", shape, 1, 10**14, 1)
    # A forward kernel that a backward pass repeats is still a forward kernel.
    assert parts(forward)["attention"] == pytest.approx(1e14 / (989e12 * ATTENTION["forward"]))
    assert parts(backward)["attention"] == pytest.approx(1e14 / (989e12 * ATTENTION["backward"]))


def test_the_compiler_fuses_chains_of_elementwise_kernels_but_not_copies_of_fsdp():
    size = 10**10
    compiled = parts(moving(size), compile={"enable": True})["memory-bound kernels"]
    assert compiled == pytest.approx(FUSED_BYTES * parts(moving(size))["memory-bound kernels"])
    copies = moving(size, op="fsdp.chunk_cat")
    assert parts(copies, compile={"enable": True}) == parts(copies)


def test_a_gpu_waits_for_python_where_its_kernels_are_tiny():
    waits = parts(moving(1000, count=1000))
    assert waits["launching kernels"] == pytest.approx(1000 * 10e-6, rel=1e-3)
    assert "launching kernels" not in parts(moving(10**12, count=1000))


def test_python_finds_what_a_tensor_subclass_has_to_run_except_in_compiled_code():
    wrapper = Work("forward", WRAPPER, "", (), 1000, 0, 0)
    assert parts(wrapper) == {"launching kernels": pytest.approx(1000 * WRAPPER_US * 1e-6)}
    assert parts(wrapper, compile={"enable": True}) == {}
    measured = parts(wrapper, gpu=CPU, parallelism={"tensor_parallel_degree": 8})
    assert measured["launching kernels"] == pytest.approx(4 * 1000 * 20e-6)  # 8 ranks on 2 cores


def test_python_chooses_what_each_block_keeps_except_in_compiled_code():
    chosen, numbered = ({"mode": "selective", "selective_ac_option": option} for option in ("op", "2"))
    assert parts(activation_checkpoint=chosen) == {"launching kernels": pytest.approx(32 * SELECTIVE_US * 1e-6)}
    assert parts(activation_checkpoint=chosen, compile={"enable": True}) == {}
    assert parts(activation_checkpoint=numbered) == {}
    measured = parts(gpu=CPU, activation_checkpoint=chosen)
    assert measured["launching kernels"] == pytest.approx(4 * 32 * 4e-3)  # 8 ranks on 2 cores


def test_a_ring_within_a_machine_and_across_machines():
    clock = Clock(run(64), H100)
    size = 10**12
    within = clock.collective(traffic("all_gather", size))
    assert within == pytest.approx(size * 7 / 8 / (450e9 * LINK), rel=1e-3)
    assert clock.collective(traffic("all_reduce", size)) == pytest.approx(2 * within, rel=1e-3)
    # 8 machines with 8 ranks each: what comes in from 7 machines is shared by 8 network cards.
    across = clock.collective(traffic("all_gather", size, ranks=64))
    assert across == pytest.approx(max(size * 63 / 64 / 450e9, size * 7 / 8 / 8 / 50e9) / LINK, rel=1e-3)
    # One rank of each machine: all goes through its one card.
    alone = clock.collective(traffic("all_gather", size, ranks=8, span=57))
    assert alone == pytest.approx(size * 7 / 8 / (50e9 * LINK), rel=1e-3)


def test_gathers_hide_behind_matmuls_and_tensor_parallel_traffic_does_not():
    compute = matmul(16384, 4096, 14336, count=100)
    gathers = traffic("all_gather", 10**10, count=32)
    hidden = Clock(run(), H100).collective(gathers)
    shown = parts(compute, sent=[gathers])["collectives (fsdp)"]
    assert shown == pytest.approx(hidden / 32 + OVERLAP_PRICE * hidden * 31 / 32)
    tensor = traffic("all_gather", 10**10, "tensor", count=32)
    assert parts(compute, sent=[tensor])["collectives (tensor)"] == pytest.approx(hidden)
    assert sum(parts(sent=[gathers]).values()) == pytest.approx(hidden)  # nothing to hide behind


def test_a_cpu_hides_nothing_and_pays_for_each_launch():
    times = parts(moving(1000, count=1), gpu=CPU, world_size=1, sent=[traffic("all_reduce", 10**6, ranks=2)])
    assert times["memory-bound kernels"] == pytest.approx(1e-5)
    assert times["launching kernels"] == pytest.approx(10e-6)
    updates = parts(moving(1000, phase="optimizer"), gpu=CPU, world_size=1)
    assert updates == {"optimizer": pytest.approx(1e-5), "launching kernels": pytest.approx(10e-6)}
    assert times["collectives (fsdp)"] == pytest.approx(2 * (10**6 / 2 / 5e9 + 100e-6))


def test_groups_that_share_the_cores_take_what_such_groups_took():
    measured = [
        Collective(op="all_gather", ranks=2, together=together, bytes=size, seconds=size * 1e-9 * together)
        for together in (2, 4)
        for size in (1000, 10**6)
    ]
    gpu = CPU.model_copy(update={"collective": tuple(measured)})
    gather = traffic("all_gather", 3 * 10**6, ranks=2, count=3)
    assert Clock(run(world_size=2), gpu).collective(gather) == pytest.approx(3 * 2e-3)
    assert Clock(run(world_size=4), gpu).collective(gather) == pytest.approx(3 * 4e-3)
    # On more ranks than were measured, each core has twice as much to do.
    assert Clock(run(world_size=8), gpu).collective(gather) == pytest.approx(2 * 3 * 4e-3)


@pytest.mark.parametrize(("size", "seconds"), [(500, 1e-5), (1000, 1e-5), (2000, 1.5e-5), (3000, 2e-5)])
def test_measured_kernels_lie_on_a_line_between_two_sizes(size: int, seconds: float):
    assert parts(moving(size), gpu=CPU, world_size=1)["memory-bound kernels"] == pytest.approx(seconds)


def test_what_is_larger_than_all_measured_takes_its_time_in_proportion_where_the_measured_did_not_only_start():
    exp = moving(10**7, op="aten.exp")
    assert parts(exp, gpu=CPU, world_size=1)["memory-bound kernels"] == pytest.approx(1e-2)
    # The largest measured addition moves 3,000 bytes. Of 10 MB by the measured 12 GB/s, all but the start.
    assert parts(moving(10**7), gpu=CPU, world_size=1)["memory-bound kernels"] == pytest.approx(
        2e-5 + (10**7 - 3000) / 12e9
    )


def test_a_kernel_that_was_not_measured_moves_its_bytes_at_the_measured_rate():
    assert parts(moving(12000, op="fsdp.chunk_cat"), gpu=CPU, world_size=1)["memory-bound kernels"] == pytest.approx(
        1e-6
    )


def test_a_measured_matmul_has_its_own_rate_and_others_one_between():
    def rate(side: int) -> float:
        work = matmul(side, side, side, dtype="float32")
        return work.flops / parts(work, gpu=CPU, world_size=1)["matmuls"]

    low, high = 2 * 256**3 / 1e-3, 2 * 1024**3 / 32e-3
    assert rate(256) == pytest.approx(low, rel=1e-3)
    assert rate(1024) == pytest.approx(high, rel=1e-3)
    assert rate(512) == pytest.approx((low * high) ** 0.5, rel=1e-3)


def test_attention_with_a_mask_has_a_rate_of_its_own():
    shape = (1, 8, 1024, 1024, 64)
    causal, masked = (Work("forward", "aten.attention", "bfloat16", shape, 1, n * math.prod(shape), 1) for n in (2, 4))
    known = [
        Attention(phase="forward", dtype="bfloat16", shape=shape, flops=work.flops, seconds=seconds)
        for work, seconds in ((causal, 0.010), (masked, 0.012))
    ]

    def seconds(work: Work, *measured: Attention) -> float:
        rates = CPU.rates[0].model_copy(update={"attention": measured})
        return parts(work, gpu=CPU.model_copy(update={"rates": (rates,)}), world_size=1)["attention"]

    assert seconds(causal, *known) == pytest.approx(0.010)
    assert seconds(masked, *known) == pytest.approx(0.012)
    assert seconds(masked, known[0]) == pytest.approx(0.020)  # nothing better is known


def test_more_ranks_than_cores_wait_for_each_other():
    one = parts(moving(1000), gpu=CPU, world_size=2)["memory-bound kernels"]
    assert parts(moving(1000), gpu=CPU, world_size=4)["memory-bound kernels"] == pytest.approx(2 * one)


def test_the_bubble_of_each_schedule():
    def share(schedule: str, microbatches: int) -> float:
        job = run(
            4,
            training={"local_batch_size": 1, "global_batch_size": microbatches},
            parallelism={"pipeline_parallel_degree": 4, "pipeline_parallel_schedule": schedule},
        )
        return bubble(job)

    assert share("1F1B", 8) == share("GPipe", 8) == pytest.approx(3 / 8)
    assert share("Interleaved1F1B", 8) == pytest.approx(3 / 16)  # two stages on each rank
    assert share("InterleavedZeroBubble", 8) == pytest.approx(3 / 16 / 3)
    assert share("ZBVZeroBubble", 8) == 0
    assert share("ZBVZeroBubble", 4) > 0


def test_a_pipeline_rank_waits_for_the_microbatches_of_the_others():
    """Two ranks of 1F1B, four microbatches: the slow one waits for the first forward pass and for the last backward
    pass of the other."""
    job = run(
        2,
        training={"local_batch_size": 1, "global_batch_size": 4},
        parallelism={"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"},
    )
    slow, fast = matmul(8192, 8192, 8192, count=300), matmul(8192, 8192, 8192, count=100)
    expected = step_time(job, [trace((fast,)), trace((slow,), rank=1)], H100)
    assert expected.rank == 1
    assert expected.parts["pipeline bubble"] == pytest.approx(expected.parts["matmuls"] / 3 / 4)


def test_the_slowest_rank_decides_and_the_rest_is_arithmetic():
    slow, fast = trace((matmul(16384, 4096, 14336, count=200),), rank=1), trace((matmul(16384, 4096, 14336),))
    job = run()
    time = step_time(job, (fast, slow), H100)
    assert time.rank == 1
    assert time.dominant == "matmuls"
    assert time.seconds == pytest.approx(sum(time.parts.values()))
    tokens = 2 * 8192 / time.seconds
    assert time.tokens_per_second == pytest.approx(tokens)
    assert time.mfu == pytest.approx(tokens * flops_per_token(job.arch, 8192) / 989e12)
    assert time.days == pytest.approx(time.seconds * 1000 / 86400)
    assert time.basis == "data sheet of H100"
