"""Every layout computes the same losses as one process, and planted mistakes are detected."""

import pytest
from equivalence_rows import (
    COMBINED,
    FEATURES,
    FP8,
    LAYOUTS,
    MISTAKES,
    MODEL,
    REFUSED,
    Row,
    all_rows,
    compare,
    run,
)
from train_variants import merge

from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.rules import check_layout

SAMPLE = (
    *("fsdp2", "tp2", "pp2 1F1B", "pp2 ZBVZeroBubble", "fsdp2 x tp2", "hsdp 2x2"),
    *("cp2, documents", "cp2, windows", "tp2, tied", "fsdp2, accumulation 4", "fsdp2, bf16"),
    *("fsdp2, CPU offload, accumulation 4, each reduced", "fsdp2, float8 all-gather"),
    *("tp2, float8 mxfp8", "tp2, documents, varlen"),
    *("pp2 1F1B, bf16 weights, stochastic rounding", "tp2, compile, AC full", "tp2, muP"),
)
ROWS = {row.name: row for row in all_rows()}
SAMPLE = tuple(name for name in SAMPLE if name in ROWS or "ZBV" not in name)  # not with every torch
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("equivalence")]


@pytest.fixture(scope="module")
def results() -> dict[str, dict]:
    wrong = []
    for name, (layout, mistake) in MISTAKES.items():
        ranks, overrides = LAYOUTS[layout]
        wrong.append(Row(name, ranks, merge(overrides, {"plant": mistake})))
    references = {ROWS[name].reference for name in SAMPLE} | {"one process"}
    return run([ROWS[name] for name in dict.fromkeys([*references, *SAMPLE])] + wrong)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_layout_computes_what_one_process_computes(results, name):
    """Initial weights match bit for bit; losses, norms and final weights match within tolerance."""
    found = compare(results[name], results[ROWS[name].reference])
    assert found.within(ROWS[name].tolerance), f"{found} beyond {ROWS[name].tolerance}"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_layout_is_caught(results, mistake):
    """The widest tolerance still detects the mistake."""
    found = compare(results[mistake], results["one process"])
    assert not found.within(FP8), found
    assert found.same_start == (mistake != "every rank holds the first shard")


@pytest.mark.parametrize("layout", COMBINED)
def test_what_was_compared_is_allowed_and_the_rest_is_refused(layout):
    ranks, overrides = LAYOUTS[layout]
    base = {
        "model": MODEL,
        "training": {"global_batch_size": 8},
        "activation_checkpoint": {"mode": "none"},
    }
    for feature, (more, *_) in FEATURES.items():
        job = JobConfig.model_validate(merge(base, overrides, more))
        assert bool(list(check_layout(Run(job, ranks)))) == ((layout, feature) in REFUSED), feature
