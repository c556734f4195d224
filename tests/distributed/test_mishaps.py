"""Hanging ranks end in a report that names the late rank and its location."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import SMALL

pytestmark = pytest.mark.slow
WORKER = Path(__file__).parents[1] / "mishap_run.py"
OPTIONS = (
    "--dataset.num_workers 0 --comm.train_timeout_seconds 8 --comm.init_timeout_seconds 30 "
    "--checkpoint.timeout_seconds 6"
)


def launch(mishap: str, ranks: int, folder: Path, options: str) -> "subprocess.Popen[str]":
    """Start ranks with a mishap, and return the launcher with a pipe of its standard error."""
    (folder / "job.toml").write_text(SMALL)
    job = "--job.config_file job.toml --job.dump_folder"
    arguments = f"{WORKER} launch {ranks} {mishap} {job} {mishap} {options}".split()
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


# Mishap -> texts in the report of the late rank, and the collective that the other rank waits for
HANGS = {
    "hang_data": (
        ["Rank 1 (", "step 5, is LATE", "gloo:", "trainer.py", "late_batch"],
        "gloo:all_gather",
    ),
    "hang_save": (["Rank 1 (", "is LATE", "gloo:", "save.py", "mishap_run.py"], "gloo:all_gather"),
    "hang_nccl": (
        ["Rank 1 (", "is LATE", "nccl:all_reduce number 6,"],
        "nccl:all_reduce number 7,",
    ),
    "hang_alone": (["Rank 0 (", "step 5, is LATE", "trainer.py", "late_batch"], None),
}


@pytest.mark.parametrize(
    "mishaps",
    [
        pytest.param(["hang_data", "hang_nccl"], id="sample"),
        pytest.param(list(HANGS), id="all", marks=pytest.mark.long),
    ],
)
def test_a_hang_ends_in_a_report_that_names_the_late_rank(mishaps, tmp_path):
    """Run several hangs at the same time, because they use no CPU."""
    launchers = {
        mishap: launch(mishap, 1 if mishap == "hang_alone" else 2, tmp_path, OPTIONS)
        for mishap in mishaps
    }
    for mishap, launcher in launchers.items():
        output = launcher.communicate(timeout=180)[1]
        assert launcher.returncode not in (0, 2, 3, 4, 75), output
        # The hint to resume contains --checkpoint.timeout_seconds, without a space.
        assert (" checkpoint.timeout_seconds" in output) == (mishap == "hang_save"), output
        texts, collective = HANGS[mishap]
        # torch may print warnings before the two reports.
        late, waiting = re.split(r"^(?=Rank )", output, flags=re.M)[1:3]
        assert all(text in late for text in texts), output
        assert collective is None or f", waits in {collective}" in waiting, output


@pytest.mark.skipif(sys.platform != "linux", reason="finds stopped processes in Linux's /proc")
@pytest.mark.long
def test_a_rank_that_is_stopped_after_a_save_is_reported_while_the_others_wait(
    tmp_path,
):
    options = "--comm.train_timeout_seconds 20 --checkpoint.timeout_seconds 200"
    launcher = launch("stop_after_save", 2, tmp_path, options)

    assert launcher.stderr is not None

    lines = []
    for line in launcher.stderr:
        lines.append(line)
        continue_command = re.search(r"Rank 1 is stopped.*kill -CONT (\d+)", line)
        if continue_command:
            os.kill(int(continue_command[1]), signal.SIGCONT)
            break

    assert "Rank 0 (" in lines[-2]
    assert launcher.wait(timeout=180) == 0
