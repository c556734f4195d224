"""Plans count the memory, work and traffic of the trainer's own step."""

import gc
from typing import Any
from unittest.mock import patch

import mutants.plugins  # noqa: F401  # registers the architecture "frozen_norm"
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from small_runs import job_tables
from train_variants import tiny_run

from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.observe.flops import flops_per_token
from titanlite.observe.gpus import find_gpu
from titanlite.parallel.mesh import build_mesh
from titanlite.parallel.parallelize import build_model
from titanlite.plan import step_counts, trace
from titanlite.plan.allocator import CUBLAS_WORKSPACES, MIB
from titanlite.plan.counter import KINDS
from titanlite.plan.roofline import bytes_outside_allocator, forecast
from titanlite.plan.step_counts import count_step
from titanlite.plan.trace import RankTrace, trace_run
from titanlite.train.step import TrainStep

FLOAT8 = (
    "float8.enable = true ; float8.enable_fsdp_float8_all_gather = true ; "
    "float8.precompute_float8_dynamic_scale_for_fsdp = true"
)
SELECTIVE = "activation_checkpoint.mode = 'selective'"
FULL = "activation_checkpoint.mode = 'full'"
ACCUMULATION = "training.global_batch_size = 20"
COMPILED = "compile.enable = true"
OFFLOAD = "training.enable_cpu_offload = true"
REDUCE_EACH = "parallelism.fsdp_reduce = 'microbatch'"
RESHARDS = f" ; parallelism.fsdp_reshard_after_forward = 'always' ; {FULL} ; {REDUCE_EACH}"
# Blocks of 36,992 parameters, and 524,288 parameters in the embedding and the output layer
LARGE_VOCABULARY = "model.vocab_size = 4096 ; parallelism.fsdp_min_num_params = 40_000"
# 307 MB of fp32 gradients. Without most blocks, they would count as small for `fsdp_reduce`.
LARGE_GRADIENTS = (
    "model.dim = 640 ; model.n_heads = 10 ; model.n_kv_heads = 5 ; model.ffn_dim = 1728 ; "
    "model.vocab_size = 32_000 ; model.n_layers = 16 ; "
    "parallelism.fsdp_min_num_params = 1_000_000 ; training.global_batch_size = 10"
)
# Name -> number of ranks, options
LAYOUTS: dict[str, tuple[int, str]] = {
    "one rank": (1, ""),
    "selective": (4, SELECTIVE),
    "every second, all memory savers": (
        4,
        f"{SELECTIVE} ; activation_checkpoint.selective_ac_option = '2' ; "
        "parallelism.memory_savers = 'all'",
    ),
    "no memory savers": (2, "parallelism.memory_savers = 'none'"),
    "accumulation": (2, ACCUMULATION),
    "reduce each": (
        2,
        f"{ACCUMULATION} ; {REDUCE_EACH} ; optimizer.implementation = 'for-loop'",
    ),
    "bfloat16, tied": (
        2,
        "model.tied_embeddings = true ; training.dtype = 'bfloat16' ; "
        "optimizer.stochastic_rounding = true",
    ),
    "muon": (2, "optimizer.name = 'Muon'"),
    "float8, full": (2, f"{FLOAT8} ; float8.emulate = true ; {FULL}"),
}
ONLY_PLANNED: dict[str, tuple[int, str]] = {
    "hsdp, offload": (
        4,
        f"parallelism.data_parallel_replicate_degree = 2 ; {OFFLOAD}",
    ),
    "compiled": (2, f"{COMPILED} ; {SELECTIVE}"),
    "tensor, context": (
        4,
        "parallelism.tensor_parallel_degree = 2 ; parallelism.context_parallel_degree = 2",
    ),
}


def with_blocks(count: int, options: str) -> str:
    return options if "n_layers" in options else f"model.n_layers = {count} ; {options}"


def layout_cases() -> list[Any]:
    """Return the jobs of both tables as test cases, which are long except for one."""
    cases = []
    for name, job in (LAYOUTS | ONLY_PLANNED).items():
        marks = [] if name == "muon" else [pytest.mark.long]
        cases.append(pytest.param(*job, id=name, marks=marks))
    return cases


def pipeline(schedule: str, blocks: int, *marks: pytest.MarkDecorator, extra: str = "") -> Any:
    options = (
        f"model.n_layers = {blocks} ; training.global_batch_size = 24 ; "
        f"parallelism.pipeline_parallel_degree = 2 ; "
        f"parallelism.pipeline_parallel_schedule = '{schedule}'{extra}"
    )
    return pytest.param(4, options, id=schedule + extra, marks=marks)


def trace_whole(run: Run) -> tuple[RankTrace, ...]:
    """Trace all blocks and microbatches of a step on the first rank with each pipeline index."""
    ranks = list(range(0, run.world_size, run.world_size // run.degrees.pipeline))
    with (
        patch.multiple(trace, _choose_ranks=lambda _: ranks, _count_removable_blocks=lambda _: 0),
        patch.multiple(step_counts, _skippable_microbatches=lambda _: range(0)),
    ):
        return trace_run(run)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        *layout_cases(),
        # FSDP gathers two blocks at a time.
        pytest.param(2, LARGE_VOCABULARY, id="small blocks, large vocabulary"),
        # The full model reduces gradients after each microbatch. A smaller one would not.
        pytest.param(2, LARGE_GRADIENTS, id="large gradients", marks=pytest.mark.long),
        pipeline("1F1B", 8),
        pipeline("GPipe", 12, pytest.mark.long),
        pipeline("Interleaved1F1B", 24, pytest.mark.long),
        pipeline("InterleavedZeroBubble", 24, pytest.mark.long),
        pipeline("1F1B", 12, pytest.mark.long, extra=RESHARDS),
    ],
)
def test_plans_from_few_blocks_and_microbatches_equal_those_of_whole_jobs(ranks, options):
    run = tiny_run(with_blocks(7, options), ranks)
    for few, whole in zip(trace_run(run), trace_whole(run), strict=True):
        assert set(few.work) == set(whole.work)
        assert (few.moment, few.cpu_peak) == (whole.moment, whole.cpu_peak)
        # Pipeline schedules keep the losses of all microbatches, 4 bytes each.
        assert few.kinds == pytest.approx(whole.kinds, abs=16)

    assert not dist.is_initialized()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.long
def test_a_real_step_takes_the_memory_counted_on_fake_tensors(ranks):
    jobs = {name: options for name, (_, options) in LAYOUTS.items()}
    for name, real in run_ranks(ranks, real_bytes, jobs)[0].items():
        planned = dict(trace_run(tiny_run(jobs[name], ranks))[0].kinds)
        assert real == planned, name


def real_bytes(jobs: dict[str, str]) -> dict[str, dict[str, int]]:
    """Compute a step of each job, and return the bytes of each kind at its peak.

    On several ranks, return the lowest of three counts, because a thread of gloo may hold a buffer
    longer than the step does.
    """
    world = dist.get_world_size()
    results = {}
    gc.disable()
    for name, options in jobs.items():
        run = tiny_run(options, world)
        mesh = build_mesh(run.degrees, "cpu")
        sharded = build_model(run, mesh, torch.device("cpu"), lambda _: None)
        update = TrainStep(run, mesh, sharded, torch.device("cpu"))
        repeats = 1 if world == 1 else 3
        counts = [count_step(run, mesh, sharded, update).peaks for _ in range(repeats)]
        peak_kinds = [max(peaks.values(), key=sum) for peaks in counts]
        lowest = map(int, min(peak_kinds, key=sum))
        results[name] = dict(zip(KINDS, lowest, strict=True))
    return results


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["1F1B", "InterleavedZeroBubble"])
def test_of_similar_pipeline_ranks_the_one_with_the_highest_peak_is_traced(
    schedule,
):
    options = (
        f"{ACCUMULATION} ; parallelism.pipeline_parallel_degree = 4 ; "
        f"parallelism.pipeline_parallel_schedule = '{schedule}'"
    )
    run = tiny_run(with_blocks(8, options), 4)
    shown = trace_run(run)
    every = trace_whole(run)

    assert len(shown) < len(every) == 4
    assert max(rank.peak for rank in shown) == max(rank.peak for rank in every)


def make_1b_run(mode: str, ranks: int) -> Run:
    """Return a run of the flavor 1b with one sequence of 4,096 tokens."""
    options = (
        f"model.flavor = '1b' ; training.seq_len = 4096 ; activation_checkpoint.mode = '{mode}'"
    )
    job = job_tables(f"{options} ; training.local_batch_size = 1")
    return Run(JobConfig.model_validate(job), ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "mode", "allocated", "reserved"),
    [
        (1, "selective", 19442, 20852),
        pytest.param(1, "full", 19442, 20684, marks=pytest.mark.long),
        pytest.param(2, "selective", 11372, 13012, marks=pytest.mark.long),
        pytest.param(4, "none", 11740, 12528, marks=pytest.mark.long),
    ],
)
def test_the_plan_of_a_small_job_includes_memory_fragmentation(ranks, mode, allocated, reserved):
    """Allocated and reserved MiB come from the allocator of torch (benchmarks/planner.md)."""
    run = make_1b_run(mode, ranks)
    gpu = find_gpu("H100")
    traces = trace_run(run, gpu)
    plan = forecast(run, traces, gpu)

    assert (plan.peak + CUBLAS_WORKSPACES) / MIB == pytest.approx(allocated, rel=0.03)
    assert (plan.needs - bytes_outside_allocator(run)) / MIB == pytest.approx(reserved, rel=0.05)


def test_all_flops_of_a_step_are_counted():
    run = make_1b_run("full", 8)
    (counted,) = trace_run(run)
    useful = 4096 * flops_per_token(run.arch, 4096)
    head = 8 * 4096 * run.arch.vocab_size * run.arch.dim  # is not recomputed
    expected = 4 / 3 * useful - head / 4

    assert sum(work.flops for work in counted.work) == pytest.approx(expected, rel=0.05)


def trace_rank(options: str, ranks: int = 2, gpu: str = "") -> RankTrace:
    """Trace a step of the tiny model on the first rank."""
    (rank_trace,) = trace_run(tiny_run(options, ranks), find_gpu(gpu) if gpu else None)
    return rank_trace


def list_ops(options: str, gpu: str) -> set[str]:
    return {work.op for work in trace_rank(options, gpu=gpu).work}


def count_attention_flops(rank_trace: RankTrace) -> int:
    return sum(work.flops for work in rank_trace.work if len(work.shape) == 5)


@pytest.mark.parametrize(
    "options",
    ["", pytest.param(f" ; {COMPILED}", marks=pytest.mark.long)],
)
def test_only_the_visible_scores_of_blocks_with_a_window_are_counted(options):
    windows = "model.sliding_window = 8 ; model.full_attention_interval = 2"
    run = tiny_run(windows + options, 1)
    flops = count_attention_flops(trace_rank(windows + options, 1, "H100"))
    num_tokens = run.global_batch_size * run.job.training.seq_len
    num_scores = num_tokens * run.arch.n_layers * run.arch.attended(run.job.training.seq_len)

    # Attention computes 2 matmuls in the forward and 5 in the backward pass.
    assert flops == 14 * num_scores * run.arch.q_dim


@pytest.mark.parametrize(
    "options", ["", pytest.param(f" ; {COMPILED} ; {FULL}", marks=pytest.mark.long)]
)
def test_context_parallel_ranks_share_attention_and_its_recomputation(options):
    def count_flops(ranks: int) -> int:
        layout = f"parallelism.context_parallel_degree = {ranks}{options}"
        return ranks * count_attention_flops(trace_rank(layout, ranks, "H100"))

    assert count_flops(1) == count_flops(2) > 0


def test_offloaded_state_and_gradients_are_in_host_memory():
    kept = trace_rank("")
    offloaded = trace_rank(OFFLOAD)
    summed = trace_rank(f"{OFFLOAD} ; {REDUCE_EACH}")

    state = kept.kinds["weights"] + kept.kinds["optimizer state"]
    assert offloaded.kinds["weights"] == offloaded.kinds["optimizer state"] == kept.cpu_peak == 0
    # Each weight has a gradient in the same dtype.
    assert offloaded.cpu_peak == state + kept.kinds["weights"]
    assert offloaded.peak <= kept.peak - state
    # Each weight has a gradient in the sum, and one of the latest microbatch.
    assert summed.cpu_peak == state + 2 * kept.kinds["weights"]


def test_frozen_parameters_have_no_offloaded_gradients():
    options = f"{OFFLOAD} ; {REDUCE_EACH} ; model.architecture"

    frozen = trace_rank(f"{options} = 'frozen_norm'")
    trained = trace_rank(f"{options} = 'llama'")

    assert frozen.cpu_peak < trained.cpu_peak


@pytest.mark.long
def test_fp8_matmuls_are_planned_only_on_gpus_that_have_them():
    options = f"{FLOAT8} ; {COMPILED}"

    assert "_scaled_mm" in list_ops(options, "H100")
    assert "_scaled_mm" not in list_ops(options, "A100")


def test_an_eager_norm_is_one_kernel():
    assert "rsqrt" not in list_ops("", "H100")


def test_compiled_blocks_keep_the_activations_that_the_compiler_chooses():
    def count_activations(budget: float) -> int:
        mode = "activation_checkpoint.mode = 'memory_budget'"
        budget_key = f"activation_checkpoint.memory_budget = {budget}"
        options = with_blocks(6, f"{COMPILED} ; {mode} ; {budget_key}")
        return trace_rank(options).kinds["activations"]

    assert count_activations(0.2) < 0.7 * count_activations(1)
