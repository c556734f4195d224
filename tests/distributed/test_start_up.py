"""A run that is killed or stopped during startup leaves no process and no traceback.

`benchmarks/kill.sh` sets TITANLITE_START_UPS to the number of trials.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_runs import SMALL

import titanlite

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux",
        reason="finds processes in Linux's /proc; only there none is orphaned",
    ),
]
TRIALS = int(os.environ.get("TITANLITE_START_UPS", "1"))
SEED = int(os.environ.get("TITANLITE_KILL_SEED", "0"))
# All processes of a trial inherit this variable.
MARK = "TITANLITE_TRIAL"
# Seconds for the last process to end. It may have to finish and save a step.
PATIENCE = 60.0
PACKAGE = str(Path(titanlite.__file__).parent)


def list_processes(trial: str) -> list[int]:
    """Return the processes of a trial."""
    mark = f"{MARK}={trial}\0".encode()
    pids = []
    for folder in Path("/proc").iterdir():
        # The process has ended or belongs to another user.
        with contextlib.suppress(OSError):
            if folder.name.isdecimal() and mark in (folder / "environ").read_bytes():
                pids.append(int(folder.name))
    return pids


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_two_seconds_of_a_run_leave_nothing_behind(number, tmp_path):
    (tmp_path / "job.toml").write_text(SMALL)
    command = f"{sys.executable} -P -m titanlite launch --job.config_file job.toml"
    command += " --training.steps 3000"
    # Under nohup, the launcher would inherit that SIGHUP is ignored.
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    generator = random.Random(f"{SEED} {number}")
    variables = {"NGPU": "2", "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    for part in range(TRIALS):
        seconds = 2.0 * (part + generator.random()) / TRIALS
        trial = f"{os.getpid()}-{number.name}-{seconds:.6f}"
        launcher = subprocess.Popen(
            command.split(),
            cwd=tmp_path,
            env={**os.environ, **variables, MARK: trial},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        time.sleep(seconds)
        # Ctrl-C reaches all processes of a terminal.
        os.killpg(launcher.pid, number) if number == signal.SIGINT else launcher.send_signal(number)
        _, output = launcher.communicate(timeout=PATIENCE)
        # A traceback without files of titanlite means that Ctrl-C interrupted the start of Python
        # itself.
        if "Traceback" not in output or PACKAGE in output:
            codes = (75, 128 + number, -number)
            assert launcher.returncode in codes, f"{trial}: {launcher.returncode}\n{output}"
            assert "Traceback" not in output, f"{trial}\n{output}"
        deadline = time.monotonic() + PATIENCE
        while remaining := list_processes(trial):
            assert time.monotonic() < deadline, f"{trial}: {remaining}"
            time.sleep(0.1)
    signal.signal(signal.SIGHUP, before)
