"""The start of a process, before large modules are imported, and its end.

Invariant: a Python process of titanlite is started by `start_python` alone. So no file of the current folder is
imported, and no process outlives the one that started it, whenever and however that dies. A signal that arrives early
ends a process at once and without a message, because there is nothing to save yet.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys

TYPE_CHECKING = False  # as in typing, which is not imported because that would take half of the time until `begin`
if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping, Sequence
    from typing import Any, NoReturn

STORE = "TITANLITE_STORE"  # environment variable that the launcher sets: the file in which its ranks meet

# SIGHUP: the terminal is gone. SIGUSR1: the usual warning of Slurm before it kills.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
PR_SET_PDEATHSIG = 1  # of prctl(2)
PARENT = "TITANLITE_PARENT"  # environment variable of a child: the process id of its parent


def start_python(
    words: Sequence[str], variables: Mapping[str, str | None] | None = None, **options: Any
) -> subprocess.Popen[Any]:
    """Start Python with `words`, such as -m and a module of titanlite, which must call `begin` or `serve_parent` first.

    The process starts with all signals blocked, so that none interrupts Python's own start with a traceback.

    Args:
        variables: Changes of the environment; None leaves a variable out.
        options: Of subprocess.Popen.

    Raises:
        OSError: The system refuses another process.
    """
    import subprocess  # here, because it would take half of the time until `begin`

    command, own = python_command(words)
    given = {**os.environ, **own, **(variables or {})}
    environment = {name: value for name, value in given.items() if value is not None}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        return subprocess.Popen(command, env=environment, **options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def python_command(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment variables by which a child of this process is to be started.

    It finds this titanlite, whatever is installed, and nothing in the current folder.
    """
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return [sys.executable, "-P", *words], {"PYTHONPATH": path, PARENT: str(os.getpid())}


def begin() -> None:
    """Install the signal handlers, and bind this process to the one that started it. Call it first."""
    # Otherwise a background job of a shell would ignore it.
    signal.signal(signal.SIGINT, lambda number, _frame: os._exit(128 + number))
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # it means "save and go on", and there is nothing to save yet
    with contextlib.suppress(OSError):  # the folder was removed
        if not sys.flags.safe_path and sys.path[0] == os.getcwd():  # python -m titanlite
            del sys.path[0]
    os.environ["PYTHONSAFEPATH"] = "1"  # for what libraries start, such as processes of multiprocessing
    _end_with_parent(signal.SIGTERM)  # it saves and stops


def serve_parent() -> None:
    """Let only the end of the parent end this process, even in a busy loop. Call it first.

    Ctrl-C reaches the whole process group, and a scheduler's signal each process. Only the parent obeys them.
    """
    for number in (*STOP_SIGNALS, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    _end_with_parent(signal.SIGKILL)


def stop_signals() -> list[signal.Signals]:
    """The signals that stop a run: all of STOP_SIGNALS, but without SIGHUP under nohup."""
    return [n for n in STOP_SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]


def set_up_torch() -> None:
    """Set the variables that torch reads when it is imported, unless the user has set them.

    Its compiler keeps what it made, and what Triton made for it, in a folder of this user's own. Otherwise it would use
    one in /tmp that another user can guess and make first, and run code from it. Its allocator for GPUs extends its
    blocks, so that fragmentation takes less memory.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    folder = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "titanlite-compiler")
    owned = False
    with contextlib.suppress(OSError):  # the home is not there, or cannot be written
        if os.path.isabs(folder):
            os.makedirs(folder, mode=0o700, exist_ok=True)
            found = os.lstat(folder)
            owned = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
    if not owned:
        import tempfile

        folder = tempfile.mkdtemp(prefix="titanlite-compiler-")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(folder, "inductor")


def leave(code: int) -> NoReturn:
    """End this process with `code`, without Python's own shutdown. All files must be closed already.

    During Python's shutdown a late signal would replace the code, and a gloo thread that releases a tensor would abort
    the process.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the terminal may be gone
            stream.flush()
    os._exit(code)


def _end_with_parent(number: signal.Signals) -> None:
    """Let Linux send the signal `number` to this process when the thread that started it ends, even by SIGKILL. Then
    take signals: they were blocked since the start."""
    if parent := os.environ.pop(PARENT, None):  # it is not the parent of the processes that this one starts
        if sys.platform == "linux":
            import ctypes

            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))
        if os.getppid() != int(parent):  # the parent died before the call, so no signal will come
            os._exit(128 + number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
