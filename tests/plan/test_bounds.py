"""The quick bound that lets a run start without a trace is never below what a trace counts."""

from typing import Any

import pytest

from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.plan.bounds import upper_bound
from titanlite.plan.trace import trace_run

MODEL = {"dim": 256, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 640, "vocab_size": 4096}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "sections"),
    [
        (1, {"activation_checkpoint": {"mode": "none"}}),
        (1, {"activation_checkpoint": {"mode": "full"}, "model": {"vocab_size": 65536}}),
        (4, {"training": {"local_batch_size": 1, "global_batch_size": 16}, "parallelism": {"fsdp_min_num_params": 0}}),
        (2, {"parallelism": {"tensor_parallel_degree": 2}, "training": {"mixed_precision_param": "float32"}}),
        (1, {"dataset": {"document_mask": True}, "training": {"seq_len": 1024, "local_batch_size": 1}}),
    ],
    ids=["no recomputation", "a large vocabulary", "accumulation", "tensor parallel", "masks"],
)
def test_the_quick_bound_is_above_what_a_trace_counts(ranks: int, sections: dict[str, Any]):
    training = {"seq_len": 512, "local_batch_size": 2, **sections.get("training", {})}
    model = {**MODEL, **sections.get("model", {})}
    run = Run(JobConfig.model_validate({**sections, "model": model, "training": training}), ranks)
    peak = max(each.peak for each in trace_run(run))
    assert peak < upper_bound(run) < 40 * peak  # and it is not so high that every run would be traced
