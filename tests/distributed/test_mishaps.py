"""Ranks that die or hang: the run goes on by itself, or says who was late, in what and where."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import titanlite
from small_runs import SMALL, losses

pytestmark = pytest.mark.slow
WORKER = Path(__file__).with_name("mishap_run.py")
OPTIONS = "--dataset.num_workers 0 --comm.train_timeout_seconds 8 --comm.init_timeout_seconds 30 "
OPTIONS += "--checkpoint.timeout_seconds 6"


def words(folder: Path, name: str) -> list[str]:
    (folder / "job.toml").write_text(SMALL)
    return ["--job.config_file", f"{folder}/job.toml", "--job.dump_folder", f"{folder}/{name}", *OPTIONS.split()]


def launch(folder: Path, mishap: str, ranks: int = 2, restarts: int = 0) -> "subprocess.Popen[str]":
    command = [sys.executable, WORKER, "launch", str(ranks), str(restarts), mishap, *words(folder, mishap)]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_killed_rank_restarts_the_run_and_the_curve_is_the_same(tmp_path: Path) -> None:
    launcher = launch(tmp_path, "killed", restarts=1)
    out, err = launcher.communicate(timeout=180)
    assert launcher.returncode == 0, err
    assert "Rank 1 failed first: SIGKILL" in err
    assert "Starting again from the newest checkpoint (0 restarts left)." in err
    assert "resumed from step 5" in out
    titanlite("train", *words(tmp_path, "nothing"), ranks=2)
    assert losses(tmp_path / "killed") == losses(tmp_path / "nothing")
    assert list(losses(tmp_path / "killed")) == list(range(1, 13))


# Of each mishap: what is said about the late rank, and in what the other one waits for it.
HANGS = {
    "hang_data": (["Rank 1 (", "step 5, is LATE", "gloo:", "loop.py", "stuck_or_killed"], "gloo:all_gather"),
    "hang_save": (["Rank 1 (", "is LATE", "gloo:", "save.py", "mishap_run.py"], "gloo:all_gather"),
    "hang_nccl": (["Rank 1 (", "is LATE", "nccl:all_reduce number 6,"], "nccl:all_reduce number 7,"),
    "hang_alone": (["Rank 0 (", "step 5, is LATE", "loop.py", "stuck_or_killed"], None),
}


def test_a_hang_ends_in_a_report_that_names_the_late_rank(tmp_path: Path) -> None:
    """Runs that hang take no processor, so they do it at the same time."""
    launchers = {mishap: launch(tmp_path, mishap, ranks=1 if mishap == "hang_alone" else 2) for mishap in HANGS}
    for mishap, launcher in launchers.items():
        said = launcher.communicate(timeout=180)[1]
        assert launcher.returncode not in (0, 2, 3, 4, 75), said
        texts, waits_in = HANGS[mishap]
        late, rest = re.split(r"^(?=Rank )", said, flags=re.M)[1:3]  # before them, torch may warn
        assert all(text in late for text in texts), said
        assert waits_in is None or f", waits in {waits_in}" in rest, said
