"""Plans beside real steps, of a few of the benchmark's cases, and its page."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import planner  # pyright: ignore[reportMissingImports]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["small, fp32", "small, FSDP"])
def test_the_plan_of_memory_is_within_five_percent_of_what_malloc_hands_out(name: str):
    result = planner.compare(name)
    assert result.error_but_for_kept == pytest.approx(0, abs=0.05)  # oneDNN's scratch is kept
    assert "commit " in result.about


def test_the_page_has_each_case_and_the_largest_error():
    known = [planner.Result(name, 1, 97, 100, 0, about="2 cores, commit 123") for name in planner.CASES]
    text = planner.page([planner.Result("small", 1, 105, 100, 0), *known[1:]])
    assert "The largest error is 5.00%, the median 3.00%; but" in text
    assert text.count("| -3.00% | 0.00 |") == len(planner.CASES) - 1
    assert "commit 123" in text
