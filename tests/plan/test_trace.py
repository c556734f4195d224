"""A plan counts what the trainer does."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks
from real_bytes import real_bytes, tiny_run

from titanlite.config.errors import UserError
from titanlite.load_run import load_run
from titanlite.observe.flops import flops_per_token, state_bytes
from titanlite.observe.gpus import find_gpu
from titanlite.observe.kinds import KINDS
from titanlite.plan import trace
from titanlite.plan.forecast import forecast

FLOAT8 = {"enable_fsdp_float8_all_gather": True, "precompute_float8_dynamic_scale_for_fsdp": True}
MANY = {"model": {"n_layers": 9}}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "fsdp": (4, {}),
    "fsdp, full": (4, {"activation_checkpoint": {"mode": "full"}}),
    "fsdp, selective": (4, {"activation_checkpoint": {"mode": "selective"}}),
    "fsdp, every second": (4, {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "2"}}),
    "fsdp, prefetch": (4, {"parallelism": {"fsdp_forward_prefetch": 1, "fsdp_backward_prefetch": 2}}),
    "fsdp, accumulation": (2, {"training": {"global_batch_size": 20}}),
    "fsdp, reduce each": (2, {"training": {"global_batch_size": 20}, "parallelism": {"fsdp_reduce": "microbatch"}}),
    "fsdp, for-loop": (2, {"optimizer": {"implementation": "for-loop"}}),
    "hsdp": (4, {"parallelism": {"data_parallel_replicate_degree": 2}}),
    "bfloat16": (2, {"training": {"dtype": "bfloat16"}, "optimizer": {"stochastic_rounding": True}}),
    "tensor": (4, {"parallelism": {"tensor_parallel_degree": 2}}),
    "context": (4, {"parallelism": {"context_parallel_degree": 2}}),
    "offload": (2, {"training": {"enable_cpu_offload": True}}),
    "float8": (2, {"float8": {"enable": True, "emulate": True} | FLOAT8}),
    "1F1B": (2, {"parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"}}),
    "tied": (2, {"model": {"n_layers": 9, "tied_embeddings": True}}),
}
REAL = [name for name in LAYOUTS if name not in ("hsdp", "tensor", "context", "offload", "1F1B")]


@pytest.mark.parametrize("name", LAYOUTS)
def test_few_blocks_tell_what_all_blocks_take(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, overrides = LAYOUTS[name]
    run = tiny_run(MANY | overrides, ranks)
    few, fewer = trace.trace_run(run), trace._fewer_blocks
    monkeypatch.setattr(trace, "_fewer_blocks", lambda run: replace(fewer(run), most=0))
    for counted, whole in zip(few, trace.trace_run(run), strict=True):
        assert (counted.peak, counted.moment, counted.kinds) == (whole.peak, whole.moment, whole.kinds)
        assert set(counted.work) == set(whole.work)
        assert set(counted.traffic) == set(whole.traffic)


SCHEDULES = ["1F1B", "Interleaved1F1B"]
SLOW_SCHEDULES = ["GPipe", "LoopedBFS", "InterleavedZeroBubble"]


@pytest.mark.parametrize("schedule", [*SCHEDULES, *(pytest.param(s, marks=pytest.mark.slow) for s in SLOW_SCHEDULES)])
def test_few_microbatches_tell_what_all_microbatches_take(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": schedule}
    run = tiny_run({"model": {"n_layers": 4}, "parallelism": layout, "training": {"global_batch_size": 40}}, 4)
    assert run.microbatches == 10
    few = trace.trace_run(run)
    monkeypatch.setattr(trace, "_leaves_out_microbatches", lambda _run: False)
    for counted, whole in zip(few, trace.trace_run(run), strict=True):
        assert (counted.peak, counted.kinds) == (whole.peak, whole.kinds)
        assert set(counted.work) == set(whole.work)
        assert set(counted.traffic) == set(whole.traffic)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [*SCHEDULES, *SLOW_SCHEDULES])
def test_of_pipeline_ranks_that_are_alike_the_one_with_the_highest_peak_is_traced(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = {"pipeline_parallel_degree": 4, "pipeline_parallel_schedule": schedule}
    run = tiny_run({"model": {"n_layers": 8}, "parallelism": layout, "training": {"global_batch_size": 20}}, 4)
    shown = {each.rank: each for each in trace.trace_run(run)}
    assert len(shown) < 4
    monkeypatch.setattr(trace, "_ranks", lambda _run: [0, 1, 2, 3])
    every = {each.rank: each for each in trace.trace_run(run)}
    assert {rank: every[rank] for rank in shown} == shown
    assert max(each.peak for each in shown.values()) == max(each.peak for each in every.values())
    assert {(w.op, w.shape, w.phase, w.count) for w in every[2].work} == {
        (w.op, w.shape, w.phase, w.count) for w in every[1].work
    }  # ranks 1 and 2 are alike


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "kinds"),
    [("llama_70b.toml", 64, 1), pytest.param("llama_405b.toml", 512, 3, marks=pytest.mark.long)],
)
def test_the_job_files_of_large_models_are_planned(name: str, ranks: int, kinds: int) -> None:
    run = load_run(["--job.config_file", name], ranks)
    gpu = find_gpu("H100")
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        traces = trace.trace_run(run, apply=pool.map)
    assert len(traces) == kinds
    plan = forecast(run, traces, gpu)
    assert state_bytes(run) < plan.peak
    assert plan.fits  # as the first lines of the file say
    tokens = run.job.training.seq_len * run.global_batch_size
    share = tokens * flops_per_token(run.arch, run.job.training.seq_len) * 4 / 3 / ranks  # one more forward pass
    assert sum(work.flops for work in traces[0].work) == pytest.approx(share, rel=0.15)  # stages are not quite equal


def test_offloaded_state_and_gradients_are_in_host_memory() -> None:
    offloaded, kept = (
        trace.trace_run(tiny_run({"training": {"enable_cpu_offload": offload}}, 2))[0] for offload in (True, False)
    )
    state = kept.kinds["weights"] + kept.kinds["optimizer state"]
    weights = kept.kinds["weights"]
    assert offloaded.kinds["weights"] == offloaded.kinds["optimizer state"] == 0
    assert offloaded.host == state + weights  # a gradient for each weight, in the same dtype
    assert offloaded.together == kept.peak == kept.together
    assert offloaded.peak <= kept.peak - state
    assert kept.host == 0


def test_what_only_a_compiler_knows_is_refused_or_said() -> None:
    compiled = {"compile": {"enable": True}}
    (traced,) = trace.trace_run(tiny_run(compiled, 2))
    (eager,) = trace.trace_run(tiny_run({}, 2))
    assert "not compiled" in traced.notes[0]
    assert replace(traced, notes=()) == eager
    with pytest.raises(UserError, match="memory_budget"):
        trace.trace_run(tiny_run(compiled | {"activation_checkpoint": {"mode": "memory_budget"}}, 2))


def test_nothing_of_the_world_is_left() -> None:
    trace.trace_run(tiny_run({}, 2))
    assert not dist.is_initialized()


def test_a_world_does_not_meet_the_process_groups_of_an_earlier_one() -> None:
    layout = {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"}
    traces = trace.trace_run(tiny_run({"parallelism": layout}, 4))
    assert [each.rank for each in traces] == [0, 2]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_real_step_takes_what_is_counted_on_fake_tensors(ranks: int) -> None:
    jobs = {name: overrides for name, (_, overrides) in LAYOUTS.items() if name in REAL}
    counted = run_ranks(ranks, real_bytes, jobs)[0]
    for name, overrides in jobs.items():
        planned = trace.trace_run(tiny_run(overrides, ranks))[0]
        real = dict(zip(KINDS, counted[name]["kinds"], strict=True))
        # A real collective keeps its input, the number of tokens, until somebody waits for it: 8 bytes.
        assert 0 <= real.pop("other") - planned.kinds["other"] <= 8, name
        assert real == {kind: size for kind, size in planned.kinds.items() if kind != "other"}, name
