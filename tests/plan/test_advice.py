"""From traces made by hand to memory, time and advice: each expectation is worked out in the test."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.observe.forecast import Forecast
from titanlite.observe.gpus import GIB, find_gpu
from titanlite.plan import advice
from titanlite.plan.counter import Group, Work
from titanlite.plan.roofline import ASYNC_HIDES, BANDWIDTH, LINK, MATMUL, OVERLAP_PRICE, forecast
from titanlite.plan.trace import RankTrace, trace_run
from titanlite.rules import find_broken_rules

ROOT = Path(__file__).parents[2]
H100 = find_gpu("H100")
CPU = H100.model_copy(update={"cpu": True, "memory_gib": 24.0, "machine": 2})


def run(world_size: int = 8, **sections: dict[str, Any]) -> Run:
    """A job of Llama 8b with 8,192 tokens in a row, which recomputes nothing."""
    training = {
        "seq_len": 8192,
        "local_batch_size": 2,
        "steps": 1000,
        **sections.pop("training", {}),
    }
    recompute = {"mode": "none", **sections.pop("activation_checkpoint", {})}
    job = {
        "model": {"flavor": "8b"},
        "training": training,
        "activation_checkpoint": recompute,
        **sections,
    }
    return Run(JobConfig.model_validate(job), world_size)


def matmul(m: int, k: int, n: int, dtype: str = "bfloat16", count: int = 1) -> Work:
    size = 2 * (m * k + k * n + m * n)
    return Work(
        "forward", "aten.mm", dtype, (m, k, n), None, count, count * 2 * m * k * n, count * size
    )


def moving(size: int, phase: str = "forward") -> Work:
    return Work(phase, "aten.add", "bfloat16", (), None, 1, 0, size)


def sent(op: str, size: int, group: str, ranks: int = 8, span: int = 8, count: int = 1) -> Work:
    return Work("forward", op, "", (), Group(group, ranks, span), count, 0, size)


def trace(*work: Work, peak: float = 40.0, rank: int = 0) -> RankTrace:
    """A rank whose peak is so many GiB. 1% more is reserved."""
    kinds = {
        "weights": int(peak * GIB / 4),
        "activations": int(peak * GIB) - int(peak * GIB / 4),
        "loss": 0,
    }
    return RankTrace(
        rank, int(peak * GIB), "backward of a block", kinds, 0, work, int(1.01 * peak * GIB)
    )


def trace_of_rows(run: Run, *_: object) -> tuple[RankTrace, ...]:
    """10 GiB, 20 more for each row that is not recomputed and 2 for one that is; a second for each row of the step.
    With FP8, and with short rows that are recomputed, none can be made."""
    training, again = run.job.training, run.job.activation_checkpoint.mode == "full"
    if run.job.float8.enable or (training.seq_len == 4096 and again):
        raise RuntimeError("no kernel for this layout\nand a second line")
    state = 5 if training.dtype == "bfloat16" else 10
    tokens = run.microbatches * training.local_batch_size * (1.3 if again else 1.0)
    work = matmul(4096, 4096, 4096, count=max(1, int(5000 * tokens)))
    return (trace(work, peak=state + training.local_batch_size * (2 if again else 20)),)


LARGE = matmul(16384, 4096, 14336, count=100)
SECONDS = LARGE.flops / (989e12 * MATMUL["bfloat16"])
NETWORK = 1e10 / 8 / 50e9 / LINK  # of 10 GB, by the network cards of a machine


def plan(
    *work: Work, peak: float = 40.0, ranks: int = 8, gpu: Any = H100, **job: dict[str, Any]
) -> Forecast:
    traces = [trace(*work, LARGE, peak=peak), trace(peak=peak - 1, rank=1)]
    return forecast(run(ranks, **job), traces, gpu.of_rank(ranks))


def test_the_rank_with_the_highest_peak_counts_and_its_allowance_must_fit():
    result = plan()
    assert (result.rank, result.peak, result.moment) == (0, 40 * GIB, "backward of a block")
    assert result.peaks == {"0": 40 * GIB, "1": 39 * GIB}
    assert sum(result.kinds.values()) == result.peak < result.needs
    assert plan(peak=74).fits
    assert not plan(peak=78).fits
    assert plan(peak=10, gpu=CPU, ranks=2).memory == 12 * GIB  # ranks share what the machine has


@pytest.mark.parametrize(
    ("work", "job", "part", "seconds"),
    [
        (LARGE, {}, "matmuls", 2 * SECONDS),
        (
            matmul(16384, 4096, 14336, dtype="float32"),
            {},
            "matmuls",
            SECONDS + LARGE.flops / 100 / 67e12 / 0.85,
        ),
        (matmul(1, 4096, 4096), {}, "matmuls", SECONDS + 2 * (4096 * 4098) / (3350e9 * BANDWIDTH)),
        (moving(10**10), {}, "memory-bound kernels", 1e10 / (3350e9 * BANDWIDTH)),
        (moving(10**10, "optimizer"), {}, "optimizer", 1e10 / (3350e9 * BANDWIDTH)),
        (
            sent("all_gather", 10**10, "tensor"),
            {},
            "collectives (tensor)",
            1e10 * 7 / 8 / (450e9 * LINK),
        ),
        (
            sent("all_reduce", 10**10, "tensor"),
            {},
            "collectives (tensor)",
            2e10 * 7 / 8 / (450e9 * LINK),
        ),
        (
            sent("all_gather", 10**10, "context", 2, span=16),
            {},
            "collectives (context)",
            NETWORK * 4,
        ),
        (sent("send", 10**10, "pipeline", 2, span=16), {}, "collectives (pipeline)", NETWORK * 8),
    ],
)
def test_what_takes_the_time_of_a_step(work: Work, job: dict[str, Any], part: str, seconds: float):
    assert plan(work, **job).parts[part] == pytest.approx(seconds, rel=2e-3)


def test_traffic_of_fsdp_hides_behind_computation_but_for_its_first_gather():
    traffic = sent("all_gather", 10**10, "fsdp", count=10)
    alone = 1e10 * 7 / 8 / (450e9 * LINK)  # starting the rings takes 1% of it
    result = plan(traffic)
    assert result.hidden_seconds == pytest.approx(0.9 * alone, rel=0.02)
    assert result.parts["collectives (fsdp)"] == pytest.approx(
        (0.1 + 0.9 * OVERLAP_PRICE) * alone, rel=0.02
    )
    assert plan(traffic, gpu=CPU).hidden_seconds == 0


@pytest.mark.parametrize(
    ("schedule", "share"),
    [
        ("1F1B", 3 / 16),
        ("Interleaved1F1B", 3 / 32),
        ("InterleavedZeroBubble", 1 / 32),
        ("ZBVZeroBubble", 0),
    ],
)
def test_ranks_of_a_pipeline_wait_for_each_other(schedule: str, share: float):
    layout = {"pipeline_parallel_degree": 4, "pipeline_parallel_schedule": schedule}
    job = run(8, parallelism=layout, training={"local_batch_size": 1, "global_batch_size": 32})
    result = forecast(job, [trace(LARGE, rank=rank) for rank in range(4)], H100)
    assert result.parts.get("pipeline bubble", 0.0) == pytest.approx(share * SECONDS, rel=0.01)


def test_async_tensor_parallelism_hides_a_part_and_a_ring_of_many_machines_starts_late():
    gather = sent("all_gather", 10**10, "tensor")
    kept, half = (
        plan(gather, parallelism={"enable_async_tensor_parallel": each}) for each in (False, True)
    )
    assert half.hidden_seconds == pytest.approx(ASYNC_HIDES * kept.parts["collectives (tensor)"])
    assert half.step_seconds + half.hidden_seconds == pytest.approx(kept.step_seconds)
    near, far = (
        plan(sent("all_gather", 0, "world", n, n, 10**4)).parts["collectives (world)"]
        for n in (8, 128)
    )
    assert 16 * near < far < 20 * near  # 112 hops within machines and 15 between them, beside 7


@pytest.mark.long
@pytest.mark.parametrize(
    "job", ["llama_8b.toml 8", "llama_70b.toml 64", "llama_70b.toml 256", "llama_405b.toml 512"]
)
def test_the_first_choice_of_a_search_is_as_fast_as_the_recipe_of_torchtitan(job: str):
    command = [sys.executable, "benchmarks/published.py", "--search", "--only", job]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert float(done.stdout.splitlines()[-1].split("|")[5]) >= 1, done.stdout


@pytest.mark.slow
def test_plans_of_published_jobs_are_as_fast_as_published():
    command = [sys.executable, "benchmarks/published.py", "--only", "8b, FSDP 8,"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    ratios = [
        float(line.split()[-2]) for line in done.stdout.splitlines() if line.startswith("| 8b")
    ]
    assert len(ratios) == 2  # compiled, without and with FP8
    assert all(0.75 <= ratio <= 1.3 for ratio in ratios), done.stdout


def test_tokens_and_mfu_follow_from_the_step():
    result = plan()
    assert result.tokens_per_second == pytest.approx(2 * 8192 / result.step_seconds)
    assert math.isclose(sum(result.parts.values()), result.step_seconds)
    assert plan(gpu=CPU, ranks=4).step_seconds == pytest.approx(
        2 * plan(gpu=CPU, ranks=2).step_seconds, rel=0.01
    )
    assert plan(gpu=CPU, ranks=2).mfu == pytest.approx(plan(gpu=CPU, ranks=1).mfu, rel=0.01)


@pytest.mark.parametrize(("mode", "rows"), [("none", 3), ("full", 33)])
def test_the_largest_batch_that_fits(mode: str, rows: int, monkeypatch, capsys):
    """10 GiB and 20 (or 2) for each row, of 79.1 GiB, of which about 2 are for allocator and libraries."""
    monkeypatch.setattr(advice, "trace_run", trace_of_rows)
    job = run(training={"local_batch_size": 1}, activation_checkpoint={"mode": mode})
    assert (
        advice.make_plan(
            job, H100, show=lambda _: print("plan", file=sys.stderr)
        ).largest_local_batch_size
        == rows
    )
    own, _, tried = capsys.readouterr().err.partition(
        "plan\n"
    )  # each result is shown as soon as it is known
    assert "GiB" not in own
    assert f"training.local_batch_size {rows}: " in tried
    assert advice.make_plan(job, H100, quick=True).largest_local_batch_size is None


@pytest.mark.slow
def test_the_peak_of_more_rows_is_on_the_line_through_two_numbers_of_rows():
    """What the largest batch relies on, on traces of a model with all kinds of memory."""
    model = {
        "dim": 256,
        "n_layers": 4,
        "n_heads": 4,
        "n_kv_heads": 2,
        "ffn_dim": 640,
        "vocab_size": 4096,
    }
    job = {"model": model, "parallelism": {"fsdp_min_num_params": 0}}
    rows = [job | {"training": {"seq_len": 2048, "local_batch_size": rows}} for rows in (8, 9, 16)]
    few, more, many = (trace_run(Run(JobConfig.model_validate(each), 2))[0].peak for each in rows)
    assert many == few + 8 * (more - few)


def test_changes_that_fit_are_listed_cheapest_first(monkeypatch, capsys):
    monkeypatch.setattr(advice, "trace_run", trace_of_rows)
    changes = advice.make_plan(run(training={"local_batch_size": 8}), H100).changes
    assert (
        changes[0]
        == "--training.local_batch_size 2 --training.global_batch_size 64: 51.1 GiB, as fast"
    )
    assert changes[-1] == "--activation_checkpoint.mode full: 26.9 GiB, 23% slower"
    short = run(training={"local_batch_size": 8, "seq_len": 4096})
    assert not [change for change in advice.make_plan(short, H100).changes if "mode full" in change]
    assert (
        "Skipped --activation_checkpoint.mode full, which cannot be traced (RuntimeError: no kernel"
        in capsys.readouterr().err
    )


def test_the_search_lists_what_keeps_the_rules_and_fits_fastest_first(
    monkeypatch,
):
    monkeypatch.setattr(advice, "trace_run", trace_of_rows)
    job, gpu = run(16, compile={"enable": True}), find_gpu("A100-80GB")
    found, traced, candidates = advice.search(job, gpu, map)
    jobs = [advice.with_keys(job, settings) for settings, _ in found]
    rowwise = run(8, float8={"recipe_name": "rowwise"})
    tried = [
        *advice.list_layouts(rowwise, H100),
        *advice.list_layouts(run(512, model={"flavor": "405b"}), H100),
    ]
    keys = ("float8.enable", "compile.enable", "parallelism.enable_async_tensor_parallel")
    assert all(any(each.get(key) for each in tried) for key in keys)
    assert any(
        each.get("parallelism.pipeline_parallel_schedule") == "Interleaved1F1B" for each in tried
    )
    assert traced == advice.MAX_TRACED_JOBS < candidates == 1 + len(advice.list_layouts(job, gpu))
    assert all(settings for settings, _ in found[:-1])  # nothing stands behind the job as it is
    assert all(plan.fits for _, plan in found)
    assert {new.degrees.world for new in jobs} == {16}
    assert not any(find_broken_rules(new) for new in jobs)
    speeds = [plan.tokens_per_second for _, plan in found]
    assert speeds == sorted(speeds, reverse=True)
    ((settings, _),), *counts = advice.search(run(8), H100, map, max_jobs=1)
    assert (settings, counts[0]) == ({}, 1)  # which comes first
