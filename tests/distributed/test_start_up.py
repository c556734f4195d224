"""Killed or told to stop in its first moments, a run leaves no process and no file behind, and ends in silence.

A sample; `benchmarks/kill.sh` sets TITANLITE_START_UPS to how often each is to be tried.
"""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hosts import JOB

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes in Linux's /proc; only there none is orphaned"),
]
TRIALS = int(os.environ.get("TITANLITE_START_UPS", "4"))
SEED = int(os.environ.get("TITANLITE_KILL_SEED", "0"))
MARK = "TITANLITE_TRIAL"  # a variable that all processes of a trial inherit
PATIENCE = 60.0  # seconds until the last one has ended, which may have a step to finish and to save


def alive(trial: str) -> dict[int, str]:
    """Processes of a trial, with their command lines."""
    found = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if folder.name.isdecimal() and f"{MARK}={trial}\0".encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def interrupts_python(said: str) -> bool:
    """Whether SIGINT has met Python's own start, which no program can change: ours has not called anything yet."""
    ours = re.findall(r'File ".*titanlite/([^"]+)", line \d+, in (\S+)', said)
    before = ("__init__.py", "launch/__init__.py", "launch/__main__.py", "runtime/__init__.py", "runtime/process.py")
    return said.endswith("KeyboardInterrupt\n") and all(file in before and name == "<module>" for file, name in ours)


def try_once(folder: Path, number: signal.Signals, seconds: float) -> None:
    """Start a run on two ranks, send it a signal, and look at what is left."""
    trial = f"{os.getpid()}-{number.name}-{seconds:.6f}"
    (folder / "job.toml").write_text(JOB.replace("steps = 20", "steps = 3000"))
    command = [sys.executable, "-m", "titanlite", "launch", "--job.config_file", str(folder / "job.toml")]
    launcher = subprocess.Popen(
        [*command, "--job.dump_folder", str(folder / "out")],
        env={**os.environ, "NGPU": "2", "OMP_NUM_THREADS": "1", "TMPDIR": str(folder), MARK: trial},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(seconds)
    launcher.send_signal(number)
    _, said = launcher.communicate(timeout=PATIENCE)
    documented = (-number, 128 + number) if number == signal.SIGKILL else (75, 128 + number, -number)
    if not interrupts_python(said):
        assert launcher.returncode in documented, f"{trial}: {launcher.returncode}\n{said}"
        assert "Traceback" not in said, f"{trial}\n{said}"
    if launcher.returncode == 128 + number and number != signal.SIGINT:  # the launcher took it, and says so
        assert f"Stopped by {number.name} " in said, f"{trial}\n{said}"
    until = time.monotonic() + PATIENCE
    while left := alive(trial):
        assert time.monotonic() < until, f"{trial}: {left}"
        time.sleep(0.1)


def moments(count: int, seed: int) -> list[float]:
    """One in each of `count` equal parts of the first two seconds."""
    generator = random.Random(seed)
    return [2.0 * (part + generator.random()) / count for part in range(count)]


@pytest.mark.parametrize("kind", ["killed", "signalled"])
def test_the_first_two_seconds_of_a_run_leave_nothing_behind(kind: str, tmp_path: Path) -> None:
    signals = [signal.SIGKILL] if kind == "killed" else [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1]
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests under nohup would hand on that it is ignored
    for trial, seconds in enumerate(moments(TRIALS, SEED)):
        try_once(tmp_path, signals[trial % len(signals)], seconds)
    signal.signal(signal.SIGHUP, before)
