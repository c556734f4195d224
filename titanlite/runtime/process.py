"""The first moments of a process, before anything heavy is imported, and its last one.

Invariant: a signal that arrives early ends the process at once and in silence, because there is nothing to save yet. A
worker never outlives its launcher, whenever that dies.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType

TYPE_CHECKING = False  # as in typing, whose import would be half of the time until `begin`
if TYPE_CHECKING:
    from typing import NoReturn

# Set by the launcher for its workers:
LAUNCHER = "TITANLITE_LAUNCHER"  # its process id
STORE = "TITANLITE_STORE"  # where they meet: a file, or an address and a port
LISTENER = "TITANLITE_LISTENER"  # of the first one alone: the descriptor of the socket that listens there

# SIGHUP: the terminal is gone. SIGUSR1: Slurm's usual warning before it kills.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
PR_SET_PDEATHSIG = 1  # of prctl(2)


def begin() -> None:
    """Take the signals, and bind a worker to its launcher. Call it first.

    A launcher starts its workers with all signals blocked, so that none can interrupt Python's own start with a
    traceback. What came meanwhile is delivered here.
    """
    signal.signal(signal.SIGINT, _interrupted)  # a background job of a shell would ignore it
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # "save and go on": there is nothing to save yet
    if launcher := os.environ.get(LAUNCHER):
        _stop_with_parent(int(launcher))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())


def leave(code: int) -> NoReturn:
    """End this process with `code`, without Python's own end: a signal that comes late would replace the code, and a
    gloo thread that lets go of a tensor would abort the process. All files must be closed already."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # a terminal that is gone
            stream.flush()
    os._exit(code)


def _stop_with_parent(parent: int) -> None:
    """Let Linux send SIGTERM to this process when process `parent` dies, even by SIGKILL: it saves and stops, too."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != parent:  # it died before the call, so that no signal will come
        os._exit(128 + signal.SIGTERM)


def _interrupted(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)
