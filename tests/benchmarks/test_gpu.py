"""benchmarks/gpu.sh on a CPU, with its tiny model: every part runs, and leaves what it got to."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def gpu(out: Path, *options: str, code: int = 0) -> dict[str, Any]:
    """The cases that `benchmarks/gpu.sh` has written."""
    command = ["benchmarks/gpu.sh", *options, "--device", "cpu", "--out", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == code, ended.stdout + ended.stderr
    return json.loads((out / f"gpu_{options[0]}.json").read_text())


def test_smoke_starts_resumes_and_generates(tmp_path: Path):
    cases = gpu(tmp_path, "smoke")
    assert list(cases) == ["started", "resumed", "generated"]
    assert not any("error" in case for case in cases.values())
    assert cases["started"]["checkpoints"] == ["step-00000003", "step-00000006"]
    assert cases["generated"]["text"].startswith("def ")
    assert set(cases["started"]["about"]) == {"date", "command", "device", "versions"}
    assert "$ ./run_train.sh" in (tmp_path / "gpu_smoke.txt").read_text()


def test_titanlite_measures_a_normal_run_into_the_file_that_is_there(tmp_path: Path):
    (tmp_path / "gpu_titanlite.json").write_text('{"8b bf16 compiled": {"tokens/s": 1}}')
    cases = gpu(tmp_path, "titanlite", "--only", "8b bf16 eager")
    assert cases["8b bf16 compiled"] == {"tokens/s": 1}
    measured = cases["8b bf16 eager"]
    assert measured["work"]["activation_checkpoint"] == "none"
    assert measured["tokens/s"] > 0
    assert measured["first step"] > 0
    assert measured["memory reserved, GiB"] > 0
    assert measured["MFU"] is None


def test_a_case_that_the_time_is_too_short_for_is_named(tmp_path: Path):
    cases = gpu(tmp_path, "smoke", "--seconds", "1.5", code=1)
    assert cases["started"]["error"] == "not finished: the 2 seconds of this part were over"
    assert "seconds" not in cases["generated"]
