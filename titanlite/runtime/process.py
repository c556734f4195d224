"""Starting processes, setting them up before large modules are imported, and ending them.

Invariant: titanlite starts Python only with the command line of `python_command`, so its processes
import no file from the current folder and (on Linux) never outlive their parent. A signal that
arrives early ends a process immediately and silently, because there is nothing to save yet.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import sys

# `typing` is not imported, because that would double the time until `set_up_process`.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping, Sequence
    from typing import Any, NoReturn

# Environment variables of a child process: path of the rendezvous file that the launcher chooses,
# and process ID of the parent.
STORE = "TITANLITE_STORE"
PARENT = "TITANLITE_PARENT"

# SIGHUP: the terminal was closed. SIGUSR1: Slurm is about to kill the job.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
PR_SET_PDEATHSIG = 1  # of prctl(2)


def start_python(
    words: Sequence[str], variables: Mapping[str, str | None], **options: Any
) -> subprocess.Popen[Any]:
    """Start a child Python process that runs titanlite, with all signals blocked.

    The child must first call `set_up_process` or `serve_parent`, which unblock the signals. An
    unblocked signal could interrupt the start of Python and print a traceback.

    Args:
        words: Arguments of Python, such as "-m" and a module.
        variables: Environment variables that the child gets in addition to the environment of this
            process. A value of None removes a variable.
        options: Further arguments of `subprocess.Popen`.

    Raises:
        OSError: If the system cannot start another process.
    """
    import subprocess  # a global import would double the time until `set_up_process`

    command, python_variables = python_command(words)
    merged = {**os.environ, **python_variables, **variables}
    environment = {name: value for name, value in merged.items() if value is not None}

    # The child inherits the signal mask, so block all signals here while it is created.
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        return subprocess.Popen(command, env=environment, **options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)


def python_command(words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the environment variables of a child Python process.

    The variables make the child import titanlite from the same folder as this process, even if
    another version is installed. The option -P prevents imports from the current folder.

    Args:
        words: Arguments of Python, such as "-m" and a module.

    Returns:
        The command line, and the environment variables to set for it.
    """
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return [sys.executable, "-P", *words], {"PYTHONPATH": path, PARENT: str(os.getpid())}


def set_up_process() -> None:
    """Prepare this process to run a command. Call this before any large module is imported.

    The function has these effects:

    - SIGINT (Ctrl-C) ends the process immediately, without a traceback. SIGUSR2, which makes a
      run save a checkpoint, is ignored. A run replaces these handlers when it starts to train.
    - The current folder is removed from the import path of this process and its child processes.
    - If titanlite started this process, it receives SIGTERM when its parent ends (Linux only).
    - All signals are unblocked, because `start_python` may have blocked them.
    """
    # Without a handler, a background job of a shell would ignore SIGINT.
    signal.signal(signal.SIGINT, lambda number, _frame: os._exit(128 + number))
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    _remove_current_folder_from_path()
    _end_with_parent(signal.SIGTERM)


def _remove_current_folder_from_path() -> None:
    """Stop imports from the current folder, in this process and in those that libraries start.

    `python -m titanlite` puts the current folder first in the import path, unless -P is set.
    """
    with contextlib.suppress(OSError):  # the current folder was removed
        if not sys.flags.safe_path and sys.path[0] == os.getcwd():
            del sys.path[0]
    os.environ["PYTHONSAFEPATH"] = "1"


def serve_parent() -> None:
    """Make this worker process ignore stop signals, so that only its parent process stops it.

    Ctrl-C and the signals of a scheduler reach all processes of a run, but only the parent handles
    them. On Linux, this process is killed when its parent ends. Call this function before any large
    module is imported.
    """
    for number in (*STOP_SIGNALS, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    _end_with_parent(signal.SIGKILL)


def stop_signals() -> list[signal.Signals]:
    """Return the signals that make a run save a checkpoint and stop.

    These are `STOP_SIGNALS`, but without SIGHUP if the process was started with nohup, because it
    must then survive the end of the terminal.
    """
    signals: list[signal.Signals] = [*STOP_SIGNALS]
    is_under_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    if is_under_nohup:
        signals.remove(signal.SIGHUP)
    return signals


def set_up_torch() -> None:
    """Set the environment variables that torch reads at import, unless the user has set them.

    - TORCHINDUCTOR_CACHE_DIR: a folder that only this user can enter. The default is a predictable
      folder in /tmp, which another user could create first to run code in this process.
    - TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS: 0, because Inductor stores precompiled headers in
      that folder in /tmp even if another cache folder is set.
    - PYTORCH_ALLOC_CONF: expandable segments, which reduce memory fragmentation on a GPU.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(_make_private_cache(), "inductor")


def _make_private_cache() -> str:
    """Create a cache folder that only this user can enter, and return its path.

    The folder is ~/.cache/titanlite-compiler. If it is not private or cannot be created, return a
    new temporary folder instead.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = os.path.join(cache, "titanlite-compiler")
    with contextlib.suppress(OSError):  # the home directory is missing or read-only
        if os.path.isabs(folder):
            os.makedirs(folder, mode=0o700, exist_ok=True)
            if _is_private_folder(folder):
                return folder

    import tempfile  # here, because a global import would delay the start of each command

    return tempfile.mkdtemp(prefix="titanlite-compiler-")


def _is_private_folder(path: str) -> bool:
    """Return whether a path is a folder of this user that others cannot enter."""
    status = os.lstat(path)
    is_own_folder = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    others_can_enter = status.st_mode & 0o077
    return is_own_folder and not others_can_enter


def leave(code: int) -> NoReturn:
    """End this process immediately with an exit code. Close all files before you call it.

    The function skips Python's shutdown. During the shutdown, a late signal could replace the exit
    code, or a gloo thread that frees a tensor could abort the process.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the terminal may be gone
            stream.flush()
    os._exit(code)


def _end_with_parent(number: signal.Signals) -> None:
    """Make Linux send a signal to this process when its parent ends, then unblock all signals.

    If the parent has already ended, exit immediately. If titanlite did not start this process, only
    unblock the signals.

    Args:
        number: The signal.
    """
    # Remove the variable, because children of this process have another parent.
    parent_id = os.environ.pop(PARENT, None)
    if parent_id is not None:
        if sys.platform == "linux":
            import ctypes

            libc = ctypes.CDLL(None)
            libc.prctl(PR_SET_PDEATHSIG, int(number))

        # If the parent ended before the call of `prctl`, no signal will come. This process then has
        # another parent.
        has_parent_ended = os.getppid() != int(parent_id)
        if has_parent_ended:
            os._exit(128 + number)  # the exit code that shells use for a signal

    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
