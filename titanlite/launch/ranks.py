"""Starts and watches the ranks of this machine, and starts them again after a crash.

This is not torch's elastic agent. That one gives ranks 30 seconds to save after a signal (in torch 2.11, always),
starts a run again that has saved and ended, and imports torch, for which the first step would wait more than a second.
`titanlite.launch.machines` lets torch's agent start one of these on each of several machines.

Invariant: a signal reaches each rank once, and the rank has the time that it needs to save. No rank outlives the
launcher: this module kills the ranks before it returns, and they stop by themselves if the launcher is killed. The
first rank that fails decides what is said, once, and the exit code.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from titanlite.config.errors import ERROR_FOLDER, StoppedBySignal
from titanlite.launch.exit_report import KNOWN_EXITS, RankEnd, explain, explain_hang
from titanlite.runtime.logging import LOG_FILE, Kind, note, note_end
from titanlite.runtime.process import STORE, start_python, stop_signals

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"  # the interface that only this machine can reach
POLL_SECONDS = 0.1  # between two looks at the ranks
# Seconds that the other ranks have after one has crashed (they wait for it in a collective), or has ended as it should.
CRASH_PATIENCE = 5.0
KNOWN_EXIT_PATIENCE = 30.0


@dataclass
class Ranks:
    """The ranks of this machine among all `size`, each of which runs `python WORDS`.

    The program must first call `titanlite.runtime.process.begin`. `resume_hint` gives the last lines of the output, if
    the ranks end without printing them.
    """

    words: Sequence[str]
    ranks: range
    size: int
    shown_ranks: Sequence[int] = (0,)  # they share the standard output of the launcher
    stop_seconds: float = 3600.0  # to save after a signal
    max_restarts: int = 0  # after crashes, from the newest checkpoint
    restarts: int = 0  # number of them before this one
    agent: bool = False  # torch's agent restarts the ranks of all machines together
    resume_hint: Callable[[], str] = str
    _processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)  # by rank
    _came: list[int] = field(default_factory=list)  # signals that are to be obeyed
    _stopped_by: int = 0  # the first signal that stops the run

    def run(self) -> int:
        """Start the ranks until they end well, for a known reason, or have crashed too often. Print why the run ended,
        and return the exit code."""
        for number in (*stop_signals(), signal.SIGUSR2):
            signal.signal(number, self._receive)
        # What the ranks write into this folder, which is private, says why they ended.
        with tempfile.TemporaryDirectory(prefix="titanlite-launch-") as name:
            folder = Path(name)
            try:
                while True:
                    self._start(folder)
                    ends = self._watch(folder)
                    if not ends:
                        return 0
                    known = any(end.code in KNOWN_EXITS for end in ends)  # it would end again like this
                    last = known or self._stopped_by > 0 or self.restarts >= self.max_restarts
                    code = self._report(ends, folder, last)
                    if last:
                        return code
                    self.restarts += 1
                    left = self.max_restarts - self.restarts
                    _say(f"Starting again from the newest checkpoint ({left} restarts left).", "restart", folder)
                    if self.agent:
                        return code
            finally:
                self._kill()

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self._came.append(number)  # it is obeyed in `_watch`, where all ranks have started and no lock is held

    def _start(self, folder: Path) -> None:
        for file in folder.glob("*.json"):
            file.unlink()
        variables = {
            "WORLD_SIZE": str(self.size),
            "LOCAL_WORLD_SIZE": str(len(self.ranks)),
            "TORCHELASTIC_RESTART_COUNT": str(self.restarts),
            ERROR_FOLDER: str(folder),
        }
        if self.size == len(self.ranks):  # the interfaces replace what was set for runs on several machines
            interfaces = {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": f"={LOOPBACK}"}
            variables |= {STORE: str(folder / f"store-{self.restarts}"), **interfaces}
        for local_rank, rank in enumerate(self.ranks):
            self._processes[rank] = start_python(
                ["-u", *self.words],
                {**variables, "RANK": str(rank), "LOCAL_RANK": str(local_rank)},
                # not a pipe, so that a terminal stays a terminal
                stdout=None if rank in self.shown_ranks else subprocess.DEVNULL,
                start_new_session=True,  # only the launcher passes Ctrl-C on
            )

    def _watch(self, folder: Path) -> list[RankEnd]:
        """Wait until all ranks have ended. Kill those that have not ended in time after the first one.

        Returns: Those that did not end with 0, in order of time; those that were killed come last.
        """
        ends: dict[int, tuple[int, float]] = {}
        killed, limit = set(), float("inf")
        while len(ends) < len(self._processes):
            time.sleep(POLL_SECONDS)
            at_once = self._obey()
            for rank, process in self._processes.items():
                if rank not in ends and process.poll() is not None:
                    ends[rank] = process.returncode, time.time()
            bad = {code for code, _ in ends.values()} - {0}
            if bad.difference(KNOWN_EXITS):
                limit = min(limit, time.monotonic() + CRASH_PATIENCE)
            elif self._stopped_by or StoppedBySignal.exit_code in bad:
                limit = min(limit, time.monotonic() + self.stop_seconds)
            elif bad:
                limit = min(limit, time.monotonic() + KNOWN_EXIT_PATIENCE)
            if at_once or time.monotonic() > limit:
                killed |= self._kill()
        found = []
        for rank, (code, seen) in ends.items():
            record = {"time": seen - 2 * POLL_SECONDS, "message": ""}
            with contextlib.suppress(OSError, ValueError):  # it wrote no report, or the disk was full
                record |= json.loads((folder / f"{rank}.json").read_text(encoding="utf-8"))
            found.append(RankEnd(rank, code, record["time"], record["message"], rank in killed))
        return sorted((end for end in found if end.code), key=lambda end: (end.killed, end.time))

    def _obey(self) -> bool:
        """Pass on the signals that have come. Returns whether the ranks are to be killed: after a second Ctrl-C.

        Not after a second SIGTERM, because schedulers repeat it and have SIGKILL.
        """
        while self._came:
            number = self._came.pop(0)
            if self._stopped_by and number != signal.SIGUSR2:
                if number == signal.SIGINT:
                    return True
                continue
            for process in self._processes.values():
                process.send_signal(number)  # none if it has ended
            if number != signal.SIGUSR2:  # which saves and goes on
                self._stopped_by = number
                _say("\nStopping after this step and a save. Ctrl-C again stops at once, without saving.", None)
        return False

    def _kill(self) -> set[int]:
        """Kill the ranks that still run, and the processes that they have started. Returns which ones."""
        running = {rank: process for rank, process in self._processes.items() if process.poll() is None}
        for process in running.values():
            os.killpg(process.pid, signal.SIGKILL)
        for process in running.values():
            process.wait()
        return set(running)

    def _report(self, ends: Sequence[RankEnd], folder: Path, last: bool) -> int:
        """Say why the ranks ended; returns the exit code."""
        _say(explain_hang([json.loads(file.read_text("utf-8")) for file in folder.glob("*.hang.json")]), "hang", folder)
        root, text, code = explain(ends, self._stopped_by)
        if last and not root.reason and code not in KNOWN_EXITS and (folder / LOG_FILE).exists():
            text = f"{text}\n{self.resume_hint()}"
        in_log = root.rank == 0 and root.reason  # rank 0 has said it there
        _say(text, None if in_log else "stop" if self._stopped_by else "failure", folder)
        return code


def _say(text: str, kind: Kind | None, folder: Path | None = None) -> None:
    """Print, and add to the run's log as an event of this kind."""
    with contextlib.suppress(OSError):  # a terminal that is gone must not end the run
        if text:
            note(text)
    with contextlib.suppress(OSError):  # no rank of this machine has opened train.log
        if text and folder and kind:
            note_end(text, kind, Path((folder / LOG_FILE).read_text(encoding="utf-8")))
