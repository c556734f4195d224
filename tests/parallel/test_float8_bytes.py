"""FP8 all-gather: one byte a weight on the wire instead of two."""

import json
from pathlib import Path

import pytest

WORKER = Path(__file__).parents[1] / "distributed" / "count_bytes.py"
ALL_GATHER = {"enable_fsdp_float8_all_gather": True, "precompute_float8_dynamic_scale_for_fsdp": True}
BF16 = {"training": {"mixed_precision_param": "bfloat16"}, "parallelism": {"fsdp_reshard_after_forward": "never"}}


@pytest.mark.slow
def test_weights_travel_in_one_byte_each(torchrun, tmp_path: Path) -> None:
    jobs = {"bf16": BF16, "fp8": BF16 | {"float8": {"enable": True} | ALL_GATHER}}
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    torchrun(WORKER, 2, [tmp_path / "jobs.json", tmp_path / "out.json"])
    counts = json.loads((tmp_path / "out.json").read_text())
    weights, rest = counts["bf16"]["linear"], counts["bf16"]["rest"]  # the embedding, the norms, the output
    assert counts["bf16"]["bytes"] == 2 * (weights + rest)
    assert counts["fp8"]["bytes"] == weights + 2 * rest  # scales do not travel: they were computed on all ranks alike
