"""Start and watch the ranks of this node, restart them after a crash, and report why they ended.

A rank is one training process, usually with one GPU. On a single node, this module replaces the
torch elastic agent. By default, the agent gives ranks only 30 seconds to save after a signal, and
restarts a run that has saved and ended. It also imports torch, which would delay the first step by
more than a second. On several nodes, `titanlite.launch.multi_node` lets the torch agent start one
launcher on each node.

Invariants:

- Each rank receives a signal once, and gets the time that it needs to save.
- No rank outlives the launcher. This module kills the remaining ranks before it returns, and ranks
  stop by themselves if the launcher is killed.
- One rank determines the exit code and the reason that is printed: a rank that ended for a known
  reason, or else the first rank that crashed.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from os import killpg
from pathlib import Path
from typing import NamedTuple

from titanlite.config.errors import (
    ERROR_FOLDER,
    CheckpointError,
    GuardError,
    StoppedBySignal,
    UserError,
)
from titanlite.runtime.logging import (
    LOG_FILE,
    describe_stop,
    is_live_terminal,
    log_end,
    note,
    success_file,
)
from titanlite.runtime.process import STOP_SIGNALS, STORE, start_python, stop_signals

# Name of the loopback network interface.
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
POLL_SECONDS = 0.1  # seconds between two checks of the processes
# Other ranks fail as soon as a dying process closes its connections. Assume that the launcher sees
# the exit of the process at most this many seconds later.
DYING_SECONDS = 1.0
# Seconds after which the other ranks are killed if a rank has crashed, or has ended for a known
# reason.
CRASH_PATIENCE = 5.0
KNOWN_EXIT_PATIENCE = 30.0
KNOWN_EXITS = {
    error.exit_code for error in (UserError, GuardError, CheckpointError, StoppedBySignal)
}
# Exit codes of ranks that a signal stopped without a save: 128 + number of the signal if the rank
# handled it, or the negative number if the signal killed the rank.
UNSAVED_STOPS = tuple(code for number in STOP_SIGNALS for code in (128 + number, -number))
END_KINDS = {
    UserError.exit_code: "user error",
    CheckpointError.exit_code: "user error",
    GuardError.exit_code: "guard",
}
EARLY_EXIT = 256  # code of a rank that exited with 0 but did not record its success
# Exit codes without a restart: the run has finished, would fail again, or was stopped.
FINAL_CODES = (0, *KNOWN_EXITS, *UNSAVED_STOPS)


class RankHang(NamedTuple):
    """Report of a rank that makes no progress."""

    is_waiting: bool
    """Whether the rank waits for other ranks."""
    rank: int
    text: str
    """Message that describes where in the code the rank is."""


class RankEnd(NamedTuple):
    """Describes how the process of a rank ended.

    Attributes:
        rank: Number of the rank.
        code: Exit code of the process, or the negative number of the signal that killed it.
            `EARLY_EXIT` means that it exited with 0 before its work was done.
        time: Unix time at which the rank failed.
        message: Error message or traceback that the rank wrote for the launcher, or "" if it wrote
            none.
    """

    rank: int
    code: int
    time: float
    message: str


@dataclass
class Ranks:
    """Starts, watches, stops and restarts the processes of the ranks on this node.

    Args:
        words: Arguments of Python in each process, such as ["-m", "titanlite", "train"]. The
            program must call `titanlite.runtime.process.set_up_process` first.
        ranks: Ranks on this node, for example range(8, 16) on the second node.
        size: Number of ranks on all nodes.
        stop_seconds: Seconds that the ranks have to save after a signal, before they are killed.
        max_restarts: Maximum number of restarts after crashes. Each restart resumes from the newest
            checkpoint.
        resume_hint: Function that returns the lines that explain how to resume the run. The
            launcher prints these lines if no rank has printed them.
    """

    words: Sequence[str]
    ranks: range
    size: int
    stop_seconds: float = 3600.0
    max_restarts: int = 0
    resume_hint: Callable[[], str] = str

    _received: list[int] = field(default_factory=list, init=False)
    """Signals that the launcher has received but not yet forwarded to the ranks."""
    _stop_signal: int = field(default=0, init=False)
    """The first signal that stops the run, or 0."""
    _processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict, init=False)
    """Process of each rank on this node."""
    _folder: Path = field(default=Path(), init=False)
    """Private folder in which the ranks report errors and hangs. Each start creates a new one."""
    _last_poll: float = field(default=0.0, init=False)
    """Unix time of the last poll, or of the start before the first poll."""
    _is_stall_reported: bool = field(default=False, init=False)

    def run(self) -> int:
        """Run the ranks, restart them after crashes, and print why the run ended.

        Returns:
            Exit code of the launcher.
        """
        # Stop signals end the run after a save. SIGUSR2 only requests a save.
        for number in (*stop_signals(), signal.SIGUSR2):
            signal.signal(number, self._record_signal)

        restarts_left = self.max_restarts
        while True:
            with tempfile.TemporaryDirectory(prefix="titanlite-launch-") as folder:
                self._folder = Path(folder)
                exit_code = self._run_once()
                if exit_code in FINAL_CODES or restarts_left == 0:
                    return exit_code

                restarts_left -= 1
                self._print_and_log(
                    f"Starting again from the newest checkpoint (restarts left: {restarts_left}).",
                    "restart",
                )

    def _record_signal(self, number: int, _frame: object) -> None:
        """Record a received signal. `_forward_signals` sends it once all ranks have started."""
        self._received.append(number)

    def _run_once(self) -> int:
        """Start the ranks, wait until all have ended, and print why they ended.

        Returns:
            Exit code of the launcher.
        """
        try:
            self._start()
            failed, killed = self._watch()
            if not failed and not killed:
                return 0

            hangs = _read_hangs(self._folder)
            if hangs:
                self._print_and_log("\n".join(hang.text for hang in hangs), "hang")
            cause = _find_cause(failed, killed)
            return self._report_end(cause, killed)
        finally:
            self._kill()

    def _start(self) -> None:
        """Start a process for each rank of this node."""
        variables = self._common_variables()
        self._processes.clear()
        for local_rank, rank in enumerate(self.ranks):
            variables["RANK"] = str(rank)
            variables["LOCAL_RANK"] = str(local_rank)
            # Start each rank in a new session, so that Ctrl-C reaches only the launcher, which
            # passes it on once.
            self._processes[rank] = start_python(
                ["-u", *self.words], variables, start_new_session=True
            )
        self._last_poll = time.time()

    def _common_variables(self) -> dict[str, str]:
        """Return the environment variables that are the same for all ranks of this node."""
        num_local_ranks = len(self.ranks)
        variables = {
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(num_local_ranks),
            ERROR_FOLDER: str(self._folder),
            "PYTHONFAULTHANDLER": "1",  # a crash of native code shows the Python stack
        }
        is_single_node = self.size == num_local_ranks
        if is_single_node:
            # Use the loopback interface, even if the user has set others for runs on several nodes.
            variables["GLOO_SOCKET_IFNAME"] = LOOPBACK
            variables["NCCL_SOCKET_IFNAME"] = f"={LOOPBACK}"  # = means exactly this name
            variables[STORE] = f"{self._folder}/store"
        return variables

    def _watch(self) -> tuple[list[RankEnd], list[int]]:
        """Wait until all ranks have ended. Meanwhile, forward signals to them and report stalls.

        After a failure or a signal, kill the ranks that do not end in time.

        Returns:
            How the failed ranks ended, sorted by time, and the ranks that were killed.
        """
        running = set(self._processes)
        failed: list[RankEnd] = []
        killed: list[int] = []
        kill_time = math.inf  # when to kill the running ranks, on the clock of time.monotonic
        while running:
            time.sleep(POLL_SECONDS)
            is_kill_requested = self._forward_signals()

            # Find the ranks that have ended since the last poll.
            ends = self._poll(running)
            running -= {end.rank for end in ends}
            failed += [end for end in ends if end.code != 0]

            # Kill the running ranks if this is requested or their time is over. A later failure can
            # make the kill time earlier, but not later.
            patience = self._choose_patience(failed)
            kill_time = min(kill_time, time.monotonic() + patience)
            if is_kill_requested or time.monotonic() > kill_time:
                killed += self._kill()
                running -= set(killed)

            self._check_stall(running)

        return sorted(failed, key=lambda end: end.time), killed

    def _poll(self, running: Set[int]) -> list[RankEnd]:
        """Return a `RankEnd` for each of the `running` ranks that has ended since the last poll."""
        # A killed rank cannot report when it ended. Assume the earliest possible time: the other
        # ranks fail as soon as they lose their connection to this rank, but it must count as the
        # first failure.
        earliest_time = self._last_poll - DYING_SECONDS
        self._last_poll = time.time()
        ends = []
        for rank in sorted(running):
            code = self._processes[rank].poll()
            if code is not None:
                ends.append(_read_end(self._folder, rank, code, default_time=earliest_time))
        return ends

    def _choose_patience(self, failed: Sequence[RankEnd]) -> float:
        """Choose how many seconds the running ranks have to exit before they are killed.

        The result is infinite if no rank has failed and no stop signal has arrived.

        Args:
            failed: How the failed ranks ended.
        """
        exit_codes = {end.code for end in failed}
        crash_codes = exit_codes - KNOWN_EXITS
        if crash_codes:
            return CRASH_PATIENCE
        if self._stop_signal or StoppedBySignal.exit_code in exit_codes:
            return self.stop_seconds  # the ranks save a checkpoint
        return KNOWN_EXIT_PATIENCE if exit_codes else math.inf

    def _check_stall(self, running: Set[int]) -> None:
        """Print a report, once per stall, if all running ranks of this node are stalled."""
        reports = _read_hangs(self._folder)
        is_stalled = self._is_stalled(running, reports)
        if is_stalled and not self._is_stall_reported:
            self._report_stall(reports)
        self._is_stall_reported = is_stalled

    def _is_stalled(self, running: Set[int], reports: Sequence[RankHang]) -> bool:
        """Return whether no running rank of this node can continue by itself.

        A rank cannot continue if it has reported that it waits for another rank, or if SIGSTOP or a
        debugger has stopped it. A busy rank, for example during a long save, can continue.
        """
        if not reports or not all(report.is_waiting for report in reports):
            return False
        ranks_without_report = running - {report.rank for report in reports}
        return all(_is_stopped(self._processes[rank].pid) for rank in ranks_without_report)

    def _report_stall(self, reports: Sequence[RankHang]) -> None:
        """Print where in the code the ranks wait, and how to continue stopped ranks."""
        lines = ["No step has ended for a while, and all ranks of this node wait:"]
        lines += [report.text for report in reports]
        for rank, process in self._processes.items():
            if _is_stopped(process.pid):
                lines.append(f"Rank {rank} is stopped. To continue it: kill -CONT {process.pid}")
        self._print_and_log("\n".join(lines), "stall")

    def _forward_signals(self) -> bool:
        """Forward signals received by the launcher to the ranks.

        After the first stop signal, the ranks save a checkpoint and end. If Ctrl-C follows, the
        caller must kill them. All other repeated stop signals are ignored, because schedulers send
        SIGTERM several times.

        Returns:
            Whether the user has pressed Ctrl-C after a first stop signal.
        """
        while self._received:
            number = self._received.pop(0)
            if number == signal.SIGUSR2:  # only requests a save
                self._send_signal(number)
            elif not self._stop_signal:
                self._stop_signal = number
                self._announce_stop()
                self._send_signal(number)
            elif number == signal.SIGINT:
                return True
        return False

    def _send_signal(self, number: int) -> None:
        """Send a signal to the processes of all ranks on this node."""
        for process in self._processes.values():
            process.send_signal(number)  # does nothing if the process has ended

    def _announce_stop(self) -> None:
        """Print which signal stops the run, unless the live view of rank 0 shows it."""
        has_live_view = 0 in self.ranks and is_live_terminal()
        if not has_live_view:
            _print(f"\n{describe_stop(self._stop_signal)}")

    def _kill(self) -> list[int]:
        """Kill the running ranks together with the processes that they have started.

        Returns:
            The ranks that were killed.
        """
        running = [rank for rank, process in self._processes.items() if process.poll() is None]
        for rank in running:
            killpg(self._processes[rank].pid, signal.SIGKILL)
        for rank in running:
            self._processes[rank].wait()
        return running

    def _report_end(self, cause: RankEnd, killed: Sequence[int]) -> int:
        """Print and log why the run ended early, and return the exit code of the launcher.

        Args:
            cause: How the rank that triggered the shutdown ended.
            killed: Ranks that the launcher killed.
        """
        if self._is_unsaved_stop(cause, killed):
            exit_code = 128 + self._stop_signal
        else:
            exit_code = to_exit_code(cause.code)

        event_kind = "stop" if self._stop_signal else END_KINDS.get(exit_code, "failure")
        self._print_end(cause, self._describe_end(cause, killed), event_kind)
        return exit_code

    def _is_unsaved_stop(self, cause: RankEnd, killed: Sequence[int]) -> bool:
        """Return whether a signal stopped the run before a checkpoint was saved.

        This is the case if the rank that triggered the shutdown reported no reason, and was killed
        by the launcher or ended because of the signal.

        Args:
            cause: How the rank that triggered the shutdown ended.
            killed: Ranks that the launcher killed.
        """
        if not self._stop_signal or _has_known_reason(cause):
            return False
        return cause.rank in killed or cause.code in UNSAVED_STOPS

    def _print_end(self, cause: RankEnd, text: str, kind: str) -> None:
        """Print why the run ended, and log it unless rank 0 has already logged it.

        Args:
            cause: How the rank that triggered the shutdown ended.
            text: Text to print.
            kind: Kind of the event to log, such as "failure".
        """
        if cause.message and cause.rank == 0:
            _print(text)
            return
        if not cause.message and is_live_terminal():
            note("")  # ends the line in which the live view left the cursor
        self._print_and_log(text, kind)

    def _describe_end(self, cause: RankEnd, killed: Sequence[int]) -> str:
        """Describe why the run ended early and how to resume it.

        If the rank that triggered the shutdown reported a known reason, its message suffices.
        Otherwise, the description starts with a line such as "Rank 3 failed first: SIGSEGV."

        Args:
            cause: How the rank that triggered the shutdown ended.
            killed: Ranks that the launcher killed.
        """
        # A message of a rank also explains how to resume.
        text = cause.message or self.resume_hint()
        if not _has_known_reason(cause):
            text = f"{self._describe_failure(cause, killed)}\n{text}"
        return text.rstrip("\n")

    def _describe_failure(self, cause: RankEnd, killed: Sequence[int]) -> str:
        """Describe in one line which rank failed, or which signal stopped the run.

        For example, "Rank 3 failed first: SIGSEGV. Killed, because they did not end: ranks 0, 1."
        """
        if self._is_unsaved_stop(cause, killed):
            failure = f"Stopped by {signal.Signals(self._stop_signal).name} without a save."
        else:
            failure = f"Rank {cause.rank} failed first: {_describe_exit(cause.code)}."
        if not killed:
            return failure
        killed_ranks = ", ".join(map(str, killed))
        return f"{failure} Killed, because they did not end: ranks {killed_ranks}."

    def _print_and_log(self, text: str, kind: str) -> None:
        """Print a message, and log it as an event in train.log.

        Args:
            text: The message.
            kind: Kind of the event, such as "restart" or "failure".
        """
        _print(text)
        with contextlib.suppress(OSError):  # no rank of this node has opened train.log
            log_file = Path((self._folder / LOG_FILE).read_text(encoding="utf-8"))
            log_end(text, kind, log_file=log_file)


def _find_cause(failed: Sequence[RankEnd], killed: Sequence[int]) -> RankEnd:
    """Determine which rank caused the shutdown, and return how this rank ended.

    This is the lowest rank that ended for a known reason, such as an invalid option. If there is
    none, it is the rank that failed first. If no rank failed, it is the first rank in `killed`.

    Args:
        failed: How the failed ranks ended, sorted by time.
        killed: Ranks that the launcher killed.
    """
    known = [end for end in failed if _has_known_reason(end)]
    if known:
        return min(known)  # the lowest rank
    if failed:
        return failed[0]
    return RankEnd(killed[0], -signal.SIGKILL, 0.0, "")


def _has_known_reason(end: RankEnd) -> bool:
    """Return whether a rank ended for a known reason, so that a restart cannot help.

    User errors, guards, checkpoint errors, and stops after a save are known reasons. If a signal
    stopped a rank without a save, the reason is known if the rank wrote an error message.
    """
    return end.code in KNOWN_EXITS or (end.code in UNSAVED_STOPS and end.message != "")


def to_exit_code(code: int) -> int:
    """Convert `RankEnd.code` to the exit code of the launcher, for example -9 to 137."""
    if code == EARLY_EXIT:
        return 1
    return code if code > 0 else 128 - code


def _read_end(folder: Path, rank: int, code: int, default_time: float) -> RankEnd:
    """Return how a rank ended, based on the exit code of its process and its error report.

    Args:
        folder: Private folder with the error reports of the ranks.
        rank: Number of the rank.
        code: Exit code of its process, or the negative number of the signal that killed it.
        default_time: Unix time of the end, used if the rank wrote no report.
    """
    report = {"time": default_time, "message": ""}
    with contextlib.suppress(OSError, ValueError):  # the rank wrote no report, or the disk was full
        report |= json.loads((folder / f"{rank}.json").read_text(encoding="utf-8"))
    if code == 0 and not success_file(folder, rank).exists():
        code = EARLY_EXIT
    return RankEnd(rank, code, report["time"], report["message"])


def _is_stopped(pid: int) -> bool:
    """Return whether SIGSTOP or a debugger has stopped a process. Always False without /proc."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # The state is a letter after the name of the program, which is in parentheses.
    state = status.rpartition(") ")[2][0]
    return state in "tT"  # t: stopped by a debugger, T: by a signal


def _read_hangs(folder: Path) -> list[RankHang]:
    """Read the hang reports that the ranks of this node wrote to the launcher's private folder.

    Reports of ranks that do not wait for other ranks come first.
    """
    reports = []
    for file in folder.glob("*.hang.json"):
        with contextlib.suppress(FileNotFoundError):  # the rank has just made progress
            reports.append(RankHang(*json.loads(file.read_text(encoding="utf-8"))))
    return sorted(reports)


def _describe_exit(code: int) -> str:
    """Describe the `code` of a `RankEnd` in words, such as "exit code 1" or "SIGSEGV"."""
    if code == EARLY_EXIT:
        return "exit code 0 before its work was done"
    if code > 0:
        return f"exit code {code}"
    if code == -signal.SIGKILL:
        return "SIGKILL (from a user, or from the system when memory runs out)"
    return signal.Signals(-code).name


def _print(text: str) -> None:
    """Print a message to standard error."""
    with contextlib.suppress(OSError):  # a terminal that is gone must not end the run
        note(text)
