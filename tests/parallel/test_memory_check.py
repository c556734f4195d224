"""A state that cannot fit is refused before anything is built or written."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.parallel.memory_check import state_bytes


@pytest.mark.parametrize(
    ("overrides", "world", "expected"),
    [
        ({}, 1, 16),
        ({}, 4, 4),
        ({"parallelism": {"data_parallel_replicate_degree": 2}}, 4, 8),  # of four ranks two hold the same
        ({"parallelism": {"tensor_parallel_degree": 2, "pipeline_parallel_degree": 2}}, 8, 2),
        ({"training": {"dtype": "bfloat16"}}, 1, 8),
        ({"optimizer": {"state_dtype": "bfloat16"}}, 1, 12),
    ],
)
def test_bytes_of_a_parameter(overrides: dict[str, Any], world: int, expected: int):
    assert state_bytes(Run(JobConfig.model_validate(overrides), world), 1000) == 1000 * expected


@pytest.mark.slow
def test_a_model_that_cannot_fit_is_refused_at_once(tmp_path: Path):
    command = [sys.executable, "-m", "titanlite", "train", "--model.flavor", "405b", "--model.vocab_size", "4096"]
    out = tmp_path / "out"
    ended = subprocess.run([*command, "--job.dump_folder", out], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "weights, gradients and optimizer state take" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not out.exists()
