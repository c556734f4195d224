"""Rates of this machine, measured for real, in a file that a plan reads."""

import warnings
from pathlib import Path

import pytest
from ranks import SERVER
from traces import matmul, run, trace, traffic

from titanlite.observe.gpus import read_gpu
from titanlite.plan import measure_collectives
from titanlite.plan.measure import Sample, measure
from titanlite.plan.measure_collectives import _rising
from titanlite.plan.time import Clock


def test_times_of_larger_tensors_never_fall():
    assert _rising([1.0, 2.0, 4.0]) == [1.0, 2.0, 4.0]
    assert _rising([3.0, 1.0, 2.0, 8.0]) == [2.0, 2.0, 2.0, 8.0]
    assert _rising([1.0, 5.0, 3.0, -1.0]) == [1.0, 7 / 3, 7 / 3, 7 / 3]


@pytest.mark.slow
def test_what_is_measured_is_what_a_plan_goes_by(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """With the smallest of the jobs only. Its processes are forks of a server that has imported torch."""
    monkeypatch.setattr(measure_collectives.multiprocessing, "get_context", lambda _method: SERVER)
    said: list[str] = []
    file = tmp_path / "machine.toml"
    with warnings.catch_warnings(action="error"):
        gpu = measure(file, said.append, samples=(Sample(64, 2, 128, 64, 2),))
    assert read_gpu(file) == gpu
    assert "Warning" not in "".join(capfd.readouterr())
    assert gpu.cpu
    assert {each.op for each in gpu.collective} == {"all_gather", "reduce_scatter", "all_reduce", "send"}
    assert {each.ranks for rates in gpu.rates for each in [rates]} == {1, gpu.machine}
    alone = next(rates for rates in gpu.rates if rates.ranks == 1)
    assert {"bfloat16", "float32"} <= {each.dtype for each in alone.matmul}
    assert {each.phase for each in alone.attention} == {"forward", "backward"}
    known = alone.matmul[0]
    m, k, n = known.shape
    work = matmul(m, k, n, dtype=known.dtype)
    parts, _ = Clock(run(1), gpu).rank_parts(trace((work,)))
    assert parts["matmuls"] == pytest.approx(known.seconds, rel=1e-3)
    assert {(each.ranks, each.together) for each in gpu.collective} == {(2, 2), (2, 4), (4, 4)}
    reduced = next(each for each in gpu.collective if (each.op, each.ranks) == ("all_reduce", 2))
    sent = traffic("all_reduce", 3 * reduced.bytes, ranks=2, count=3)
    assert Clock(run(2), gpu).collective(sent) == pytest.approx(3 * reduced.seconds)
