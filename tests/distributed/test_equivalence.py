"""Every layout has one loss curve: a sample of what `benchmarks/equivalence.sh` compares, and wrong layouts."""

import pytest
from equivalence import (
    COMBINED,
    EXACT,
    FEATURES,
    FP8,
    LAYOUTS,
    MISTAKES,
    MODEL,
    REFUSED,
    Difference,
    Result,
    Row,
    all_rows,
    compare,
    merged,
    run,
)

from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.load_run import layout_rules

SAMPLE = (
    *("fsdp2", "tp2", "cp2", "pp2 1F1B", "pp2 ZBVZeroBubble", "cp2, documents", "tp2, tied"),
    "fsdp4, vocabulary of 32,000",
    *(
        "fsdp2, accumulation 4, each reduced",
        "fsdp2, float8 all-gather",
        "fsdp2, bf16",
        "tp2, float8 tensorwise",
    ),
    "pp2 1F1B, bf16 weights, stochastic rounding",
    *("fsdp2 x tp2", "pp2 x fsdp2", "tp2, compile, AC full"),
)
ROWS = {row.name: row for row in all_rows()}
SAMPLE = tuple(name for name in SAMPLE if name in ROWS or "ZBV" not in name)  # not with every torch
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("equivalence")]


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    wrong = [Row(name, *planted(name)) for name in MISTAKES]
    references = {ROWS[name].reference for name in SAMPLE} | {"one process"}
    return run([ROWS[name] for name in dict.fromkeys([*references, *SAMPLE])] + wrong)


def planted(mistake: str) -> tuple[int, dict]:
    layout, plant = MISTAKES[mistake]
    return LAYOUTS[layout][0], merged(LAYOUTS[layout][1], plant)


def difference(results: dict[str, Result], name: str) -> Difference:
    return compare(results[name], results[ROWS[name].reference if name in ROWS else "one process"])


@pytest.mark.parametrize("name", SAMPLE)
def test_a_layout_computes_what_one_process_computes(results: dict[str, Result], name: str) -> None:
    """Invariants 1, 3 and 4: the same initial weights bit by bit, then loss, gradient norm and final weights."""
    found = difference(results, name)
    assert found.within(ROWS[name].tolerance), f"{found} beyond {ROWS[name].tolerance}"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_layout_is_caught(results: dict[str, Result], mistake: str) -> None:
    found = difference(results, mistake)
    assert not found.within(EXACT), found
    if mistake == "every rank holds the first shard":
        assert not found.same_start


def test_the_float8_tolerance_is_no_wider_than_a_mistake(results: dict[str, Result]) -> None:
    """What FP8 is allowed, every planted mistake must still exceed."""
    for mistake in MISTAKES:
        assert not difference(results, mistake).within(FP8), mistake


def problems(layout: str, feature: str) -> list[tuple[str, str]]:
    ranks, overrides = LAYOUTS[layout]
    base = {"model": MODEL, "training": {"global_batch_size": 8}, "activation_checkpoint": {"mode": "none"}}
    table = merged(base, overrides, FEATURES[feature][0])
    return list(layout_rules(Run(JobConfig.model_validate(table), ranks)))


@pytest.mark.parametrize(("layout", "feature"), sorted(REFUSED))
def test_what_is_refused_is_refused(layout: str, feature: str) -> None:
    assert problems(layout, feature)


@pytest.mark.parametrize("layout", COMBINED)
def test_what_was_compared_is_allowed(layout: str) -> None:
    for feature in FEATURES:
        assert (layout, feature) in REFUSED or not problems(layout, feature), feature
