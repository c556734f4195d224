"""Plans beside real steps, of a few of the benchmark's cases, and its page."""

import sys
from dataclasses import asdict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import planner  # pyright: ignore[reportMissingImports]

from titanlite.observe.gpus import find_gpu

CPU = find_gpu("H100").model_copy(update={"cpu": True, "machine": 2})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["small, selective", "small, FSDP"])
def test_the_plan_of_memory_is_within_three_percent_of_a_real_step(name: str):
    result = planner.compare(name, CPU, timed=False)
    assert result.memory_error == pytest.approx(0, abs=0.03)


def test_the_page_has_each_case_and_the_largest_error():
    known = {name: asdict(planner.Result(name, 1, 97, 100)) for name in planner.CASES}
    known["small"]["planned_bytes"] = 105
    of_machine = {"machine": "2 cores", "torch": "2.13"}
    text = planner.page({name: values | of_machine for name, values in known.items()})
    assert "The largest error of memory is 5.00%, the median 3.00%." in text
    assert "not measured" in text
    assert text.count("| -3.00% |") == len(planner.CASES) - 1
    known["small"] |= {"planned_seconds": [1.0, 1.1, 1.2], "measured_seconds": [1.1, 1.0, 0.9]}
    timed = planner.page({name: values | of_machine for name, values in known.items()})
    assert "The largest error of time is 10%" in timed
    assert "took 22% more time in the median, and its plan 20%" in timed
