"""The start of a process, before large modules are imported, and its end.

Invariant: a signal that arrives early ends the process at once and without a message, because there is nothing to save
yet. A worker never outlives its launcher, whenever that dies.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from types import FrameType

TYPE_CHECKING = False  # as in typing, which is not imported because that would take half of the time until `begin`
if TYPE_CHECKING:
    from typing import NoReturn

# Set by the launcher for its workers:
LAUNCHER = "TITANLITE_LAUNCHER"  # its process id
STORE = "TITANLITE_STORE"  # where the ranks meet: a file, or an address and a port
LISTENER = "TITANLITE_LISTENER"  # for the first worker only: the descriptor of the socket that listens there

# SIGHUP: the terminal is gone. SIGUSR1: the usual warning of Slurm before it kills.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
PR_SET_PDEATHSIG = 1  # of prctl(2)


def begin() -> None:
    """Install the signal handlers, and bind a worker to its launcher. Call it first.

    A launcher starts its workers with all signals blocked, so that no signal interrupts Python's own start with a
    traceback. Signals that arrived since then are delivered here.
    """
    signal.signal(signal.SIGINT, _interrupted)  # otherwise a background job of a shell would ignore it
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # it means "save and go on", and there is nothing to save yet
    if launcher := os.environ.get(LAUNCHER):
        _stop_with_parent(int(launcher))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())


def leave(code: int) -> NoReturn:
    """End this process with `code`, without Python's own shutdown. All files must be closed already.

    During Python's shutdown a late signal would replace the code, and a gloo thread that releases a tensor would abort
    the process.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the terminal may be gone
            stream.flush()
    os._exit(code)


def _stop_with_parent(parent: int) -> None:
    """Let Linux send SIGTERM to this process when the process `parent` dies, even by SIGKILL. Then it saves and
    stops."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != parent:  # the parent died before the call, so no signal will come
        os._exit(128 + signal.SIGTERM)


def _interrupted(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)
