"""A plan counts what the trainer does."""

from typing import Any

import pytest
from ranks import run_ranks
from real_bytes import real_bytes, tiny_run

from titanlite.plan import trace
from titanlite.plan.counts import KINDS

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
    "tied": (2, {"model": {"n_layers": 9, "tied_embeddings": True}}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_few_blocks_tell_what_all_blocks_take(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, overrides = LAYOUTS[name]
    run = tiny_run(MANY | overrides, ranks)
    few = trace.trace_run(run)
    monkeypatch.setattr(trace, "_fewer_blocks", lambda run: (run, run))
    for counted, whole in zip(few, trace.trace_run(run), strict=True):
        assert (counted.peak, counted.moment, counted.kinds) == (whole.peak, whole.moment, whole.kinds)
        assert set(counted.work) == set(whole.work)
        assert set(counted.traffic) == set(whole.traffic)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_real_step_takes_what_is_counted_on_fake_tensors(ranks: int) -> None:
    jobs = {name: overrides for name, (_, overrides) in LAYOUTS.items() if name != "hsdp"}
    counted = run_ranks(ranks, real_bytes, jobs)[0]
    for name, overrides in jobs.items():
        (planned,) = trace.trace_run(tiny_run(overrides, ranks))
        real = dict(zip(KINDS, counted[name]["kinds"], strict=True))
        # A real collective keeps its input, the number of tokens, until somebody waits for it: 8 bytes.
        assert real.pop("other") - 8 == planned.kinds["other"], name
        assert real == {kind: size for kind, size in planned.kinds.items() if kind != "other"}, name
