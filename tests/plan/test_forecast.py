"""From traces to a forecast, and what a forecast says."""

import pytest
from traces import GIB, matmul, run, trace

from titanlite.observe.forecast import PLAN, Change, Forecast, handed_down
from titanlite.observe.gpus import find_gpu
from titanlite.plan.forecast import CPU_FIXED, CPU_LOST, GPU_FIXED, GPU_GROUP, GPU_LOST, forecast, traces_of

H100 = find_gpu("H100")
WORK = (matmul(16384, 4096, 14336, count=100),)


def plan(peak: float = 40.0, gpu=H100, world_size: int = 8) -> Forecast:
    return forecast(run(world_size), (trace(WORK, peak=peak), trace(WORK, peak=peak - 1, rank=1)), gpu)


def test_the_rank_with_the_highest_peak_is_the_one_that_counts():
    result = plan()
    assert (result.rank, result.peak, result.moment) == (0, 40 * GIB, "backward of block 31")
    assert result.peaks == {"0": 40 * GIB, "1": 39 * GIB}
    assert sum(result.kinds.values()) == result.peak


def test_the_allowance_is_part_of_what_must_fit():
    assert plan().allowance == GPU_FIXED + GPU_GROUP + int(GPU_LOST * 40 * GIB)
    assert plan(74).fits
    assert not plan(78).fits
    assert not plan(78).exceeds(H100.memory)  # it may not fit, but it is not sure not to
    assert plan(80).exceeds(H100.memory)


def test_ranks_on_a_cpu_share_its_memory():
    cpu = H100.model_copy(update={"cpu": True, "memory_gib": 24.0, "machine": 2})
    result = plan(10, cpu, 2)
    assert result.memory == 12 * GIB
    assert result.allowance == CPU_FIXED + int(CPU_LOST * 10 * GIB)
    assert not result.exceeds(int(9.6 * GIB))  # the peaks of 10 and 9 GiB have a mean of 9.5
    assert result.exceeds(int(9.4 * GIB))


def test_a_forecast_is_handed_down_as_json(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(PLAN, raising=False)
    assert handed_down() is None
    monkeypatch.setenv(PLAN, plan().model_dump_json())
    assert handed_down() == plan()


def test_what_a_forecast_says():
    result = plan()
    assert result.line().startswith("Plan: peak 40.00 GiB (backward of block 31), ")
    assert "weights 10.00" in result.explain_memory()
    assert "activations 30.00, weights 10.00" in result.composition()  # the largest first, nothing of 0 bytes
    assert "No single change" in result.explain_memory()
    change = Change(words=("--training.local_batch_size", "1"), needs=30 * GIB, tokens_per_second=10.0, price=-0.1)
    better = result.model_copy(update={"changes": (change,)})
    assert "Cheapest change that fits: --training.local_batch_size 1: 30.0 GiB, 10% faster." in better.explain_memory()


def test_what_was_measured_stands_beside_the_plan():
    result = plan()
    said = result.compared(50 * GIB, result.step_seconds * 2)
    assert "peak 50.00 (plan 40.00, -20.0%) GiB" in said
    assert said.endswith("+100.0%) tokens/s per device")


def test_a_compiled_float8_run_is_traced_in_eager_mode_with_its_matmuls_in_fp8():
    job = run(compile={"enable": True}, float8={"enable": True})
    traced = []

    def trace_of(job):
        traced.append(job)
        return (trace((matmul(16384, 4096, 14336), matmul(2048, 4096, 128256)), peak=40 if len(traced) == 1 else 10),)

    (result,) = traces_of(job, H100, trace_of)
    assert [(each.job.compile.enable, each.job.float8.enable) for each in traced] == [(False, True), (False, False)]
    assert result.peak == 40 * GIB  # the memory is that of the job itself
    fp8, cast, output = result.work
    assert (fp8.dtype, cast.bytes) == ("float8_e4m3fn", 5 * (16384 * 4096 + 4096 * 14336))
    assert output.dtype == "bfloat16"  # the output projection stays as it is
    assert len(traces_of(job, find_gpu("A100"), trace_of)) == 1
    assert len(traced) == 3  # without FP8 the device emulates it, as a trace does


def test_layers_that_stay_in_high_precision_are_planned_so():
    """Of the six matmuls, in the shapes of w1, w2 and w3, the two of w1 stay; wq and wo have the same sides."""
    work = (matmul(16384, 4096, 14336, count=6), matmul(16384, 4096, 4096, count=4))

    def counts(*names: str) -> dict[str, int]:
        job = run(float8={"enable": True, "filter_fqns": list(names)})
        (result,) = traces_of(job, H100, lambda _: (trace(work),))
        assert sum(each.flops for each in result.work) == sum(each.flops for each in work)
        return {f"{each.dtype} {each.shape[2]}": each.count for each in result.work if each.shape}

    assert counts() == {"float8_e4m3fn 14336": 6, "float8_e4m3fn 4096": 4}
    assert counts("w1") == {"bfloat16 14336": 2, "float8_e4m3fn 14336": 4, "float8_e4m3fn 4096": 4}
    assert counts("wo", "layers.0.") == {  # of 32 blocks one stays as it is
        "bfloat16 4096": 2, "float8_e4m3fn 14336": 6, "float8_e4m3fn 4096": 2,
    }  # fmt: skip
