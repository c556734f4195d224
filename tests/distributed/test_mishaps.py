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


def launch(folder: Path, mishap: str, restarts: int) -> "subprocess.Popen[str]":
    (folder / "job.toml").write_text(JOB)
    arguments = ["--job.config_file", folder / "job.toml", "--job.dump_folder", folder / mishap]
    command = [sys.executable, WORKER, "launch", "2", str(restarts), mishap, *arguments]
    return subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_killed_rank_restarts_the_run_and_the_curve_is_the_same(tmp_path: Path) -> None:
    launcher = launch(tmp_path, "killed", restarts=1)
    out, err = launcher.communicate(timeout=180)
    assert launcher.returncode == 0, err
    assert "Rank 1 failed first: it was killed (SIGKILL)" in err
    assert "Starting again from the newest checkpoint (0 restarts left)." in err
    assert "resumed from step 10" in out
    titanlite("train", "--job.config_file", tmp_path / "job.toml", "--job.dump_folder", tmp_path / "nothing", ranks=2)
    assert losses(tmp_path / "killed") == losses(tmp_path / "nothing")
    assert list(losses(tmp_path / "killed")) == list(range(1, 21))


# Of each mishap: the step, the collective that the others wait in, the file and the function that the late one is in.
HANGS = {
    "hang1": (1, "gloo:all_gather", "loop.py", "stuck_or_killed"),
    "hang5": (5, "gloo:all_gather", "loop.py", "stuck_or_killed"),
    "hang_save": (5, "gloo:all_gather", "writer.py", "mishap_run.py"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mishaps", "seconds"),
    [
        pytest.param(["hang1"], 30, id="in the first step", marks=pytest.mark.long),
        pytest.param(["hang5", "hang_save"], 8, id="in a later step, in a save"),
    ],
)
def test_a_hang_ends_in_a_report_that_names_the_late_rank(tmp_path: Path, mishaps: list[str], seconds: int) -> None:
    """Runs that hang take no processor, so they do it at the same time."""
    started = time.monotonic()
    launchers = [launch(tmp_path, mishap, restarts=0) for mishap in mishaps]
    ends = [launcher.communicate(timeout=180)[1] for launcher in launchers]
    assert time.monotonic() - started < seconds + 90  # most of it is the start on a busy machine
    for mishap, launcher, said in zip(mishaps, launchers, ends, strict=True):
        step, waits_in, file, function = HANGS[mishap]
        assert launcher.returncode not in (0, 2, 3, 4, 75)
        late, waiting = said.index(f"step {step}, is LATE"), said.index(f"step {step}, waits in {waits_in}")
        assert late < waiting
        assert file in said[late:waiting]
        assert function in said[late:waiting]
