"""Ranks that die or hang: the run goes on by itself, or says who was late, in what and where."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from hosts import JOB
from ranks import titanlite
from small_runs import losses

WORKER = Path(__file__).with_name("mishap_run.py")


def launch(folder: Path, mishap: str, restarts: int) -> subprocess.CompletedProcess[str]:
    (folder / "job.toml").write_text(JOB)
    arguments = ["--job.config_file", folder / "job.toml", "--job.dump_folder", folder / mishap]
    command = [sys.executable, WORKER, "launch", "2", str(restarts), mishap, *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=180, check=False)


@pytest.mark.slow
def test_a_killed_rank_restarts_the_run_and_the_curve_is_the_same(tmp_path: Path) -> None:
    done = launch(tmp_path, "killed", restarts=1)
    assert done.returncode == 0, done.stderr
    assert "Rank 1 failed first: it was killed (SIGKILL)" in done.stderr
    assert "Starting again from the newest checkpoint (0 restarts left)." in done.stderr
    assert "resumed from step 10" in done.stdout
    titanlite("train", "--job.config_file", tmp_path / "job.toml", "--job.dump_folder", tmp_path / "nothing", ranks=2)
    assert losses(tmp_path / "killed") == losses(tmp_path / "nothing")
    assert list(losses(tmp_path / "killed")) == list(range(1, 21))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mishap", "step", "waits_in", "file", "function", "seconds"),
    [
        pytest.param("hang1", 1, "gloo:all_gather", "loop.py", "stuck_or_killed", 30, marks=pytest.mark.long),
        ("hang5", 5, "gloo:all_gather", "loop.py", "stuck_or_killed", 8),
        ("hang_save", 5, "gloo:all_gather", "writer.py", "mishap_run.py", 6),
    ],
)
def test_a_hang_ends_in_a_report_that_names_the_late_rank(
    tmp_path: Path, mishap: str, step: int, waits_in: str, file: str, function: str, seconds: int
) -> None:
    started = time.monotonic()
    done = launch(tmp_path, mishap, restarts=0)
    assert done.returncode not in (0, 2, 3, 4, 75)
    assert time.monotonic() - started < seconds + 40
    late, waiting = done.stderr.index(f"step {step}, is LATE"), done.stderr.index(f"step {step}, waits in {waits_in}")
    assert late < waiting
    assert file in done.stderr[late:waiting]
    assert function in done.stderr[late:waiting]
