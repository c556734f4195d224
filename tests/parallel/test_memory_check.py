"""A state that cannot fit is refused before anything is built or written."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_model_that_cannot_fit_is_refused_at_once(tmp_path: Path):
    command = [sys.executable, "-m", "titanlite", "train", "--model.flavor", "405b", "--model.vocab_size", "4096"]
    out = tmp_path / "out"
    ended = subprocess.run([*command, "--job.dump_folder", out], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "weights, gradients and optimizer state take" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not out.exists()
