"""Plans derive memory, time and advice from traces. The tests derive the expected values."""

import math
import sys
from typing import Any

import pytest
from small_runs import ROOT, job_tables, run_program
from train_variants import merge

from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.observe.forecast import Forecast
from titanlite.observe.gpus import GIB, find_gpu
from titanlite.plan import advice
from titanlite.plan.counter import Group, Work
from titanlite.plan.roofline import ASYNC_HIDES, BANDWIDTH, LINK, MATMUL, OVERLAP_PRICE, forecast
from titanlite.plan.trace import RankTrace, trace_run
from titanlite.rules import find_broken_rules

H100 = find_gpu("H100")
CPU = H100.model_copy(update={"cpu": True, "memory_gib": 24.0, "gpus_per_node": 2})


def run(options: str = "", world_size: int = 8) -> Run:
    """Return a run of Llama 8b with 8,192 tokens in a sequence, which recomputes nothing."""
    job = job_tables(
        "model.flavor = '8b' ; training.seq_len = 8192 ; training.local_batch_size = 2 ; "
        "training.steps = 1000 ; activation_checkpoint.mode = 'none'"
    )
    return Run(JobConfig.model_validate(merge(job, job_tables(options))), world_size)


def matmul(
    m: int,
    k: int,
    n: int,
    dtype: str = "bfloat16",
    count: int = 1,
) -> Work:
    size = count * 2 * (m * k + k * n + m * n)
    flops = count * 2 * m * k * n
    return Work("forward", "mm", dtype, (m, k, n), None, count, flops, size)


def moving(size: int, phase: str = "forward") -> Work:
    return Work(phase, "add", "bfloat16", (), None, 1, 0, size)


def sent(
    op: str,
    size: int,
    group_name: str,
    ranks: int = 8,
    span: int = 8,
    count: int = 1,
) -> Work:
    group = Group(group_name, ranks, span)
    return Work("forward", op, "", (), group, count, 0, size)


def trace(*work: Work, peak: float = 40.0, rank: int = 0) -> RankTrace:
    """Return the trace of a rank with a peak of `peak` GiB, which reserves 1% more."""
    size = int(peak * GIB)
    weights = size // 4
    kinds = {"weights": weights, "activations": size - weights, "loss": 0}
    return RankTrace(rank, size, "backward of a block", kinds, 0, work, int(1.01 * size))


@pytest.fixture
def traces_by_formula(monkeypatch) -> None:
    monkeypatch.setattr(advice, "trace_run", trace_by_formula)


def trace_by_formula(run: Run, *_: object) -> tuple[RankTrace, ...]:
    """Return a trace of 10 GiB of state, and 20 GiB for each sequence, or 2 GiB if recomputed.

    Each sequence of a step takes one second. FP8, and recomputed short sequences, cannot be traced.
    """
    training = run.job.training
    recomputes = run.job.activation_checkpoint.mode == "full"
    if run.job.float8.enable or (training.seq_len == 4096 and recomputes):
        raise RuntimeError("no kernel for this layout\nand a second line")
    state = 5 if training.dtype == "bfloat16" else 10
    seconds = run.microbatches * training.local_batch_size * (1.3 if recomputes else 1.0)
    work = matmul(4096, 4096, 4096, count=max(1, int(5000 * seconds)))
    return (trace(work, peak=state + training.local_batch_size * (2 if recomputes else 20)),)


LARGE = matmul(16384, 4096, 14336, count=100)
SECONDS = LARGE.flops / (989e12 * MATMUL["bfloat16"])
# Bytes that kernels move or collectives send.
GB10 = 10**10
# Seconds in a ring of the 8 GPUs of a node.
LOCAL_SECONDS = GB10 * 7 / 8 / (450e9 * LINK)
# Seconds through all network cards of a node.
NETWORK_SECONDS = GB10 / 8 / 50e9 / LINK
MEMORY_SECONDS = GB10 / (3350e9 * BANDWIDTH)


def plan(
    *work: Work,
    options: str = "",
    peak: float = 40.0,
    ranks: int = 8,
    gpu: Any = H100,
) -> Forecast:
    """Return the forecast of two ranks. Rank 0 does `work` and a large matmul."""
    traces = [
        trace(*work, LARGE, peak=peak),
        trace(peak=peak - 1, rank=1),
    ]
    return forecast(run(options, ranks), traces, gpu.of_rank(ranks))


def test_the_rank_with_the_highest_peak_counts_and_its_allowance_must_fit():
    result = plan()

    assert (result.rank, result.peak, result.moment) == (0, 40 * GIB, "backward of a block")
    assert result.peaks == {"0": 40 * GIB, "1": 39 * GIB}
    assert sum(result.kinds.values()) == result.peak < result.needs
    assert plan(peak=74).fits
    assert not plan(peak=78).fits
    # Ranks on a CPU share the memory of the node.
    assert plan(peak=10, gpu=CPU, ranks=2).memory == 12 * GIB


@pytest.mark.parametrize(
    ("work", "part", "seconds"),
    [
        (LARGE, "matmuls", 2 * SECONDS),
        (
            matmul(16384, 4096, 14336, dtype="float32"),
            "matmuls",
            SECONDS + LARGE.flops / 100 / 67e12 / 0.85,
        ),
        (matmul(1, 4096, 4096), "matmuls", SECONDS + 2 * 4096 * 4098 / (3350e9 * BANDWIDTH)),
        (moving(GB10), "memory-bound kernels", MEMORY_SECONDS),
        (moving(GB10, "optimizer"), "optimizer", MEMORY_SECONDS),
        (sent("all_gather", GB10, "tensor"), "collectives (tensor)", LOCAL_SECONDS),
        (sent("all_reduce", GB10, "tensor"), "collectives (tensor)", 2 * LOCAL_SECONDS),
        (
            sent("all_gather", GB10, "context", 2, span=16),
            "collectives (context)",
            4 * NETWORK_SECONDS,
        ),
        (
            sent("send", GB10, "pipeline", 2, span=16),
            "collectives (pipeline)",
            8 * NETWORK_SECONDS,
        ),
    ],
)
def test_work_takes_the_time_of_its_kind(work, part, seconds):
    assert plan(work).parts[part] == pytest.approx(seconds, rel=2e-3)


def test_fsdp_traffic_overlaps_with_computation_except_for_its_first_gather():
    traffic = sent("all_gather", GB10, "fsdp", count=10)

    result = plan(traffic)

    # Starting the rings takes 1% of the time.
    visible = (0.1 + 0.9 * OVERLAP_PRICE) * LOCAL_SECONDS

    assert result.hidden_seconds == pytest.approx(0.9 * LOCAL_SECONDS, rel=0.02)
    assert result.parts["collectives (fsdp)"] == pytest.approx(visible, rel=0.02)
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
def test_ranks_of_a_pipeline_wait_for_each_other(schedule, share):
    options = (
        "parallelism.pipeline_parallel_degree = 4 ; training.local_batch_size = 1 ; "
        f"training.global_batch_size = 32 ; parallelism.pipeline_parallel_schedule = '{schedule}'"
    )
    traces = [trace(LARGE, rank=rank) for rank in range(4)]

    result = forecast(run(options), traces, H100)

    assert result.parts.get("pipeline bubble", 0.0) == pytest.approx(share * SECONDS, rel=0.01)


def test_async_tensor_parallelism_overlaps_a_part_of_its_traffic():
    gather = sent("all_gather", GB10, "tensor")

    plain = plan(gather)
    overlapped = plan(gather, options="parallelism.enable_async_tensor_parallel = true")

    assert overlapped.hidden_seconds == pytest.approx(
        ASYNC_HIDES * plain.parts["collectives (tensor)"]
    )

    total = overlapped.step_seconds + overlapped.hidden_seconds
    assert total == pytest.approx(plain.step_seconds)


def test_a_ring_of_many_nodes_starts_later():
    def start_seconds(ranks: int) -> float:
        gather = sent("all_gather", 0, "world", ranks, ranks, 10**4)
        return plan(gather).parts["collectives (world)"]

    # 128 ranks need 112 hops within nodes and 15 between nodes, and 8 ranks only 7 hops.
    assert 16 * start_seconds(8) < start_seconds(128) < 20 * start_seconds(8)


def run_published(*options: str) -> list[str]:
    """Run benchmarks/published.py, and return the lines that it prints."""
    done = run_program(sys.executable, "benchmarks/published.py", *options, folder=ROOT)
    return done.stdout.splitlines()


@pytest.mark.long
@pytest.mark.parametrize(
    "job", ["llama_8b.toml 8", "llama_70b.toml 64", "llama_70b.toml 256", "llama_405b.toml 512"]
)
def test_the_fastest_job_of_a_search_is_as_fast_as_the_torchtitan_recipe(job):
    table = run_published("--search", "--only", job)
    assert float(table[-1].split("|")[5]) >= 1, table


@pytest.mark.long
def test_plans_of_published_jobs_are_as_fast_as_published():
    table = run_published("--only", "8b, FSDP 8, compiled")
    ratios = [float(line.split()[-2]) for line in table if line.startswith("| 8b")]
    assert len(ratios) == 2  # compiled, without and with FP8
    assert all(0.75 <= ratio <= 1.3 for ratio in ratios), table


def test_tokens_and_mfu_follow_from_the_step():
    result = plan()
    assert result.tokens_per_second == pytest.approx(2 * 8192 / result.step_seconds)
    assert math.isclose(sum(result.parts.values()), result.step_seconds)

    one = plan(gpu=CPU, ranks=1)
    two = plan(gpu=CPU, ranks=2)
    four = plan(gpu=CPU, ranks=4)
    assert four.step_seconds == pytest.approx(2 * two.step_seconds, rel=0.01)
    assert two.mfu == pytest.approx(one.mfu, rel=0.01)


@pytest.mark.parametrize(("mode", "rows"), [("none", 3), ("full", 33)])
def test_the_largest_batch_that_fits_is_reported_after_the_plan(
    mode, rows, traces_by_formula, capsys
):
    """Of 79.1 GiB, the state takes 10, allocator and libraries 2, and each sequence 20 or 2."""
    job = run(f"training.local_batch_size = 1 ; activation_checkpoint.mode = '{mode}'")

    result = advice.make_plan(job, H100, show=lambda _: print("plan", file=sys.stderr))

    assert result.largest_local_batch_size == rows

    before, _, after = capsys.readouterr().err.partition("plan\n")  # results are shown at once
    assert "GiB" not in before
    assert f"training.local_batch_size {rows}: " in after
    assert advice.make_plan(job, H100, goal="nothing").largest_local_batch_size is None


@pytest.mark.slow
@pytest.mark.long
def test_peak_memory_is_linear_in_the_local_batch_size():
    """The search for the largest batch relies on this."""
    options = (
        "model.dim = 256 ; model.n_layers = 4 ; model.n_heads = 4 ; model.n_kv_heads = 2 ; "
        "model.ffn_dim = 640 ; model.vocab_size = 4096 ; parallelism.fsdp_min_num_params = 0 ; "
        "training.seq_len = 2048 ; training.local_batch_size = "
    )
    eight, nine, sixteen = (
        trace_run(Run(JobConfig.model_validate(job_tables(f"{options}{rows}")), 2))[0].peak
        for rows in (8, 9, 16)
    )

    assert sixteen == eight + 8 * (nine - eight)


def test_changes_that_fit_are_listed_cheapest_first(traces_by_formula):
    changes = advice.make_plan(run("training.local_batch_size = 8"), H100).changes
    batch = "--training.local_batch_size 2 --training.global_batch_size 64"

    assert changes[0] == f"{batch}: 51.1 GiB, as fast"
    assert changes[-1] == "--activation_checkpoint.mode full: 26.9 GiB, 23% slower"


def test_changes_that_cannot_be_traced_are_skipped_with_the_reason(traces_by_formula, capsys):
    job = run("training.local_batch_size = 8 ; training.seq_len = 4096")

    assert "mode full" not in "".join(advice.make_plan(job, H100).changes)

    reason = "activation_checkpoint.mode full, which cannot be traced (RuntimeError: no kernel"
    assert reason in capsys.readouterr().err


def test_the_search_lists_valid_jobs_that_fit_fastest_first(traces_by_formula):
    job = run("compile.enable = true", 16)
    gpu = find_gpu("A100-80GB")

    results, traced, candidates = advice.search(job, gpu, map)

    assert traced == advice.MAX_TRACED_JOBS < candidates == 1 + len(advice.list_layouts(job, gpu))
    # The last job is the original job, which has no changed settings, so no job is slower.
    assert all(settings for settings, _ in results[:-1])

    for settings, result in results:
        candidate = advice.with_keys(job, settings)
        assert result.fits
        assert candidate.degrees.world == 16
        assert not find_broken_rules(candidate)
    speeds = [result.tokens_per_second for _, result in results]

    assert speeds == sorted(speeds, reverse=True)


def test_the_search_traces_the_original_job_first(traces_by_formula):
    results, traced, _ = advice.search(run(), H100, map, max_jobs=1)

    ((settings, _),) = results
    assert (settings, traced) == ({}, 1)


def test_the_search_of_a_preview_that_ends_during_warmup_lists_jobs(traces_by_formula):
    preview = run("training.steps = 10 ; lr_scheduler.warmup_steps = 100")

    results, *_ = advice.search(preview, H100, map, max_jobs=2)

    assert results


@pytest.mark.long
def test_the_search_tries_fp8_the_compiler_and_interleaved_pipelines():
    layouts = advice.list_layouts(run("float8.recipe_name = 'rowwise'"), H100)
    layouts += advice.list_layouts(run("model.flavor = '405b'", 512), H100)

    for key in ("float8.enable", "compile.enable", "parallelism.enable_async_tensor_parallel"):
        assert any(layout.get(key) for layout in layouts)
    schedules = [layout.get("parallelism.pipeline_parallel_schedule") for layout in layouts]

    assert "Interleaved1F1B" in schedules
