"""A plan counts what the trainer does."""

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from train_variants import TINY, merge

from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.load_run import load_run
from titanlite.observe.flops import flops_per_token, state_bytes
from titanlite.observe.gpus import find_gpu
from titanlite.parallel.mesh import build_mesh
from titanlite.parallel.parallelize import build_model
from titanlite.plan.advice import make_plan
from titanlite.plan.allocator import CUBLAS_WORKSPACES, MIB
from titanlite.plan.counter import ALL_KINDS
from titanlite.plan.roofline import bytes_outside_allocator, forecast
from titanlite.plan.step_counts import count_step
from titanlite.plan.trace import trace_run
from titanlite.train.step import TrainStep

FLOAT8 = {"enable": True, "emulate": True, "enable_fsdp_float8_all_gather": True}
FLOAT8 |= {"precompute_float8_dynamic_scale_for_fsdp": True}
EVERY_SECOND = {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "2"}}
ALL_SAVERS = {"parallelism": {"memory_savers": "all"}}
NO_SAVERS = {"parallelism": {"memory_savers": "none"}}
REDUCE = {"parallelism": {"fsdp_reduce": "microbatch"}, "optimizer": {"implementation": "for-loop"}}
BF16 = {"training": {"dtype": "bfloat16"}, "optimizer": {"stochastic_rounding": True}}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "selective": (4, {"activation_checkpoint": {"mode": "selective"}}),
    "every second, all memory savers": (4, EVERY_SECOND | ALL_SAVERS),
    "no memory savers": (2, NO_SAVERS),
    "accumulation": (2, {"training": {"global_batch_size": 20}}),
    "reduce each": (2, {"training": {"global_batch_size": 20}, **REDUCE}),
    "bfloat16, tied": (2, {"model": {"n_layers": 9, "tied_embeddings": True}, **BF16}),
    "muon": (2, {"optimizer": {"name": "Muon"}}),
    "float8, full": (2, {"float8": FLOAT8, "activation_checkpoint": {"mode": "full"}}),
}
ONLY_PLANNED: dict[str, tuple[int, dict[str, Any]]] = {
    "hsdp, offload": (
        4,
        {
            "parallelism": {"data_parallel_replicate_degree": 2},
            "training": {"enable_cpu_offload": True},
        },
    ),
    "compiled": (2, {"compile": {"enable": True}, "activation_checkpoint": {"mode": "selective"}}),
    "tensor, context": (
        4,
        {"parallelism": {"tensor_parallel_degree": 2, "context_parallel_degree": 2}},
    ),
}
SCHEDULES = {
    "1F1B": 12,
    "GPipe": 12,
    "Interleaved1F1B": 24,
    "InterleavedZeroBubble": 24,
}  # and numbers of blocks
ALIKE = ("GPipe", "InterleavedZeroBubble")  # of which the other two are a sample


def tiny_run(overrides: dict[str, Any], world_size: int) -> Run:
    return Run(JobConfig.model_validate(merge(TINY, overrides)), world_size)


def pipeline(schedule: str) -> tuple[int, dict[str, Any]]:
    layout = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": schedule}
    return 4, {
        "model": {"n_layers": SCHEDULES[schedule]},
        "parallelism": layout,
        "training": {"global_batch_size": 24},
    }


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        *(LAYOUTS | ONLY_PLANNED).values(),
        *(pytest.param(*pipeline(s), marks=[pytest.mark.long] * (s in ALIKE)) for s in SCHEDULES),
    ],
    ids=[*LAYOUTS, *ONLY_PLANNED, *SCHEDULES],
)
def test_few_blocks_and_microbatches_tell_what_all_take(ranks: int, overrides: dict[str, Any]):
    run = tiny_run({"model": {"n_layers": 9}} | overrides, ranks)
    for few, whole in zip(trace_run(run), trace_run(run, whole=True), strict=True):
        assert set(few.work) == set(whole.work)
        assert (few.moment, few.host) == (whole.moment, whole.host)
        assert few.kinds == pytest.approx(
            whole.kinds, abs=16
        )  # a pipeline's schedule keeps losses of 4 bytes
    assert not dist.is_initialized()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_real_step_takes_what_is_counted_on_fake_tensors(ranks: int):
    jobs = {
        name: {"model": {"n_layers": 3}} | overrides for name, (_, overrides) in LAYOUTS.items()
    }
    for name, real in run_ranks(ranks, real_bytes, jobs)[0].items():
        planned = dict(trace_run(tiny_run(jobs[name], ranks))[0].kinds)
        # A real collective keeps its input, the number of tokens, until somebody waits for it: 8
        # bytes.
        assert 0 <= real.pop("other") - planned.pop("other") <= 8, name
        assert real == planned, name


def real_bytes(jobs: dict[str, dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Name of a job -> the bytes of each kind at the peak of a step that the calling rank really computes.

    On several ranks the lowest of three counts: a thread of gloo may hold a buffer a moment longer than the step does.
    """
    world, found = dist.get_world_size(), {}
    gc.disable()
    for name, overrides in jobs.items():
        run = tiny_run(overrides, world)
        mesh = build_mesh(run.degrees, "cpu")
        sharded = build_model(run, mesh, torch.device("cpu"), lambda _: None)
        update = TrainStep(run, mesh, sharded, torch.device("cpu"))
        counts = [
            count_step(run, mesh, sharded, update).peaks for _ in range(1 if world == 1 else 3)
        ]
        kinds = min((max(peaks.values(), key=sum) for peaks in counts), key=sum)
        found[name] = dict(zip(ALL_KINDS[:-1], map(int, kinds), strict=False))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule", ["1F1B", pytest.param("InterleavedZeroBubble", marks=pytest.mark.long)]
)
def test_of_pipeline_ranks_that_are_alike_the_one_with_the_highest_peak_is_traced(
    schedule: str,
):
    layout = {"pipeline_parallel_degree": 4, "pipeline_parallel_schedule": schedule}
    job = {"model": {"n_layers": 8}, "parallelism": layout, "training": {"global_batch_size": 20}}
    shown, every = trace_run(tiny_run(job, 4)), trace_run(tiny_run(job, 4), whole=True)
    assert len(shown) < len(every) == 4
    assert max(each.peak for each in shown) == max(each.peak for each in every)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "kinds"),
    [("llama_70b.toml", 64, 1), pytest.param("llama_405b.toml", 512, 3, marks=pytest.mark.long)],
)
def test_the_job_files_of_large_models_are_planned(name: str, ranks: int, kinds: int):
    run = load_run(["--job.config_file", name], ranks)
    plan = make_plan(run, find_gpu("H100"), quick=True)
    assert len(plan.peaks) == kinds
    assert state_bytes(run) < plan.peak
    assert plan.fits  # as the first lines of the file say


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "mode", "allocated", "reserved"),
    [
        (1, "selective", 19891, 22072),
        (1, "full", 19891, 21904),
        (2, "selective", 11372, 13012),
        (4, "none", 11740, 12528),
    ],
)
def test_a_small_job_is_planned_with_the_holes_in_its_memory(ranks, mode, allocated, reserved):
    """1b with one sequence of 4,096 tokens, in MiB as torch's allocator has them (benchmarks/planner.md)."""
    training = {"seq_len": 4096, "local_batch_size": 1}
    job = {"model": {"flavor": "1b"}, "training": training, "activation_checkpoint": {"mode": mode}}
    run, gpu = Run(JobConfig.model_validate(job), ranks), find_gpu("H100")
    traces = trace_run(run, gpu)
    plan = forecast(run, traces, gpu)
    assert (plan.peak + CUBLAS_WORKSPACES) / MIB == pytest.approx(allocated, rel=0.03)
    assert (plan.needs - bytes_outside_allocator(run)) / MIB == pytest.approx(reserved, rel=0.05)


def test_all_flops_of_a_step_are_counted():
    job = {"model": {"flavor": "1b"}, "training": {"seq_len": 4096, "local_batch_size": 1}}
    run = Run(JobConfig.model_validate(job | {"activation_checkpoint": {"mode": "full"}}), 8)
    (counted,) = trace_run(run)
    useful = 4096 * flops_per_token(run.arch, 4096)
    head = 8 * 4096 * run.arch.vocab_size * run.arch.dim  # is not repeated
    assert sum(work.flops for work in counted.work) == pytest.approx(
        4 / 3 * useful - head / 4, rel=0.05
    )


@pytest.mark.parametrize(
    "job", [{}, {"compile": {"enable": True}, "activation_checkpoint": {"mode": "full"}}]
)
def test_ranks_that_share_a_row_share_its_attention_and_its_recomputation(
    job: dict[str, Any],
):
    flops = list[int]()
    for ranks in (1, 2):
        layout = {
            "parallelism": {"context_parallel_degree": ranks, "data_parallel_shard_degree": 1}
        }
        work = trace_run(tiny_run(job | layout, ranks), find_gpu("H100"))[0].work
        flops.append(ranks * sum(each.flops for each in work if len(each.shape) == 5))
    assert flops[0] == flops[1] > 0


def test_offloaded_state_and_gradients_are_in_host_memory():
    offloaded, kept = (
        trace_run(tiny_run({"training": {"enable_cpu_offload": each}}, 2))[0]
        for each in (True, False)
    )
    state = kept.kinds["weights"] + kept.kinds["optimizer state"]
    assert offloaded.kinds["weights"] == offloaded.kinds["optimizer state"] == kept.host == 0
    assert (
        offloaded.host == state + kept.kinds["weights"]
    )  # a gradient for each weight, in the same dtype
    assert offloaded.peak <= kept.peak - state


def test_a_device_with_fp8_is_planned_with_its_matmuls_and_compiled_blocks_keep_what_the_compiler_chooses():
    run = tiny_run({"float8": FLOAT8 | {"emulate": False}, "compile": {"enable": True}}, 2)
    ops = {
        name: {work.op for work in trace_run(run, find_gpu(name))[0].work}
        for name in ("H100", "A100")
    }
    assert "aten._scaled_mm" in ops["H100"] - ops["A100"]
    eager = trace_run(tiny_run({}, 2), find_gpu("H100"))[0].work
    assert "aten.rsqrt" not in {work.op for work in eager}  # a norm is one kernel
    job = {
        "model": {"n_layers": 9},
        "activation_checkpoint": {"mode": "memory_budget"},
        "compile": {"enable": True},
    }
    less, more = (
        trace_run(tiny_run(merge(job, {"activation_checkpoint": {"memory_budget": each}}), 2))[0]
        for each in (0.2, 1)
    )
    assert less.kinds["activations"] < 0.7 * more.kinds["activations"]
