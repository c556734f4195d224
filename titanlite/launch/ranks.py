"""Starts and watches the ranks of this machine, starts them again after a crash, and says why they ended.

This is not torch's elastic agent. That one gives ranks 30 seconds to save after a signal (in torch 2.11, always),
starts a run again that has saved and ended, and imports torch, for which the first step would wait more than a second.
`titanlite.launch.machines` lets torch's agent start one of these on each of several machines.

Invariant: a signal reaches each rank once, and the rank has the time that it needs to save. No rank outlives the
launcher: this module kills the ranks before it returns, and they stop by themselves if the launcher is killed. One rank
decides what is said, once, and the exit code: one that stopped for a known reason, or else the first that crashed.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import killpg
from pathlib import Path
from typing import NamedTuple

from titanlite.config.errors import ERROR_FOLDER, CheckpointError, GuardError, StoppedBySignal, UserError
from titanlite.runtime.logging import LOG_FILE, STOPPING, is_live_terminal, note, note_end
from titanlite.runtime.process import STOP_SIGNALS, STORE, start_python, stop_signals

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"  # the interface that only this machine can reach
POLL_SECONDS = 0.1  # between two looks at the ranks
# Seconds that the other ranks have after one has crashed (they wait for it in a collective), or has ended as it should.
CRASH_PATIENCE = 5.0
KNOWN_EXIT_PATIENCE = 30.0
KNOWN_EXITS = {error.exit_code for error in (UserError, GuardError, CheckpointError, StoppedBySignal)}
# Codes of a stop before there was anything to save: the rank's own exit code, or minus the signal that killed it.
UNSAVED_STOPS = tuple(code for number in STOP_SIGNALS for code in (128 + number, -number))
FINAL = (0, *KNOWN_EXITS, *UNSAVED_STOPS)  # a run that is started again would end like this again, or is not wanted


class RankEnd(NamedTuple):
    """How a rank ended: with its exit code (minus the signal's number if a signal killed it), when, and the reason that
    it gave."""

    rank: int
    code: int
    time: float
    reason: str


@dataclass
class Ranks:
    """The ranks of this machine among all `size`, each of which runs `python WORDS`.

    The program must first call `titanlite.runtime.process.begin`. `resume_hint` gives the last lines of the output, if
    the ranks end without printing them.
    """

    words: Sequence[str]
    ranks: range
    size: int
    stop_seconds: float = 3600.0  # to save after a signal
    max_restarts: int = 0  # after crashes, from the newest checkpoint
    resume_hint: Callable[[], str] = str

    def run(self) -> int:
        """Start the ranks until they end well, for a known reason, or have crashed too often. Print why the run ended,
        and return the exit code."""
        self._came: list[int] = []  # signals, which are obeyed in `_watch`: there all ranks have started
        self._stopped_by = code = 0
        for number in (*stop_signals(), signal.SIGUSR2):
            signal.signal(number, lambda number, _frame: self._came.append(number))
        for left in range(self.max_restarts, -1, -1):
            # What the ranks write into this folder, which is private, says why they ended.
            with tempfile.TemporaryDirectory(prefix="titanlite-launch-") as name:
                self._processes: dict[int, subprocess.Popen[bytes]] = {}  # by rank
                try:
                    self._start(Path(name))
                    code = self._report(*self._watch(Path(name)), Path(name))
                finally:
                    self._kill()
                if code in FINAL or not left:
                    break
                _say(f"Starting again from the newest checkpoint (restarts left: {left - 1}).", "restart", Path(name))
        return code

    def _start(self, folder: Path) -> None:
        count = len(self.ranks)
        variables = {"WORLD_SIZE": str(self.size), "LOCAL_WORLD_SIZE": str(count), ERROR_FOLDER: str(folder)}
        variables["PYTHONFAULTHANDLER"] = "1"  # so that a crash of native code shows the Python stack
        if self.size == count:  # the interfaces replace what was set for runs on several machines
            variables |= {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": f"={LOOPBACK}"}
            variables[STORE] = f"{folder}/store"
        for local_rank, rank in enumerate(self.ranks):
            place = {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
            # In a session of its own, because only the launcher passes Ctrl-C on.
            self._processes[rank] = start_python(["-u", *self.words], variables | place, start_new_session=True)

    def _watch(self, folder: Path) -> tuple[list[RankEnd], list[int]]:
        """Wait until all ranks have ended. Kill those that have not ended in time after the first one.

        Returns: The ends of those that ended by themselves, but not with 0, in order of time; and the killed ranks.
        """
        ends: dict[int, RankEnd] = {}
        killed: list[int] = []
        limit = float("inf")
        while len(ends) + len(killed) < len(self._processes):
            time.sleep(POLL_SECONDS)
            at_once = self._obey()
            for rank, process in self._processes.items():
                if rank not in (*ends, *killed) and process.poll() is not None:
                    record = {"time": time.time() - 2 * POLL_SECONDS, "message": ""}
                    with contextlib.suppress(OSError, ValueError):  # it wrote no report, or the disk was full
                        record |= json.loads((folder / f"{rank}.json").read_text(encoding="utf-8"))
                    ends[rank] = RankEnd(rank, process.returncode, record["time"], record["message"])
            bad = {end.code for end in ends.values()} - {0}
            stopping = self._stopped_by or StoppedBySignal.exit_code in bad
            if bad or stopping:
                known_patience = self.stop_seconds if stopping else KNOWN_EXIT_PATIENCE
                limit = min(limit, time.monotonic() + (CRASH_PATIENCE if bad - KNOWN_EXITS else known_patience))
            if at_once or time.monotonic() > limit:
                killed += self._kill()
        return sorted((end for end in ends.values() if end.code), key=lambda end: end.time), killed

    def _obey(self) -> bool:
        """Pass on the signals that have come. Returns whether the ranks are to be killed: after a second Ctrl-C.

        Not after a second SIGTERM, because schedulers repeat it and have SIGKILL.
        """
        while self._came:
            number = self._came.pop(0)
            if number != signal.SIGUSR2:  # which saves and goes on
                if self._stopped_by:
                    return number == signal.SIGINT
                self._stopped_by = number
                if not (0 in self.ranks and is_live_terminal()):  # otherwise its view says so, and a line would tear it
                    _say(f"\n{STOPPING}")
            for process in self._processes.values():
                process.send_signal(number)  # none if it has ended
        return False

    def _kill(self) -> list[int]:
        """Kill the ranks that still run, and the processes that they have started. Returns which ones."""
        running = [rank for rank, process in self._processes.items() if process.poll() is None]
        for rank in running:
            killpg(self._processes[rank].pid, signal.SIGKILL)
        for rank in running:
            self._processes[rank].wait()
        return running

    def _report(self, ends: Sequence[RankEnd], killed: Sequence[int], folder: Path) -> int:
        """Say why the ranks ended; returns the exit code. A rank decides that stopped for a known reason, or without a
        save and said why; or else the first that failed."""
        if not ends and not killed:
            return 0
        # A rank that is late, as it waits for no other, comes first; then those that wait for it.
        hangs = sorted(tuple(json.loads(file.read_text(encoding="utf-8"))) for file in folder.glob("*.hang.json"))
        if hangs:
            _say("\n".join(text for *_, text in hangs), "hang", folder)
        known = [end for end in ends if end.code in KNOWN_EXITS or (end.code in UNSAVED_STOPS and end.reason)]
        root = min(known, default=ends[0] if ends else RankEnd(killed[0], -signal.SIGKILL, 0.0, ""))
        late = f" Killed, because they did not end: ranks {', '.join(map(str, killed))}." if killed else ""
        text, code = root.reason, root.code if root.code > 0 else 128 - root.code
        if not known and self._stopped_by and (not ends or root.code in UNSAVED_STOPS):
            text = f"Stopped by {signal.Signals(self._stopped_by).name} without a save.{late}"
            code = 128 + self._stopped_by
        elif not known:
            how = f"exit code {root.code}" if root.code > 0 else signal.Signals(-root.code).name
            how += " (the system sends it when memory runs out)" if root.code == -signal.SIGKILL else ""
            text = f"Rank {root.rank} failed first: {how}.{late}\n{text}".rstrip()
        if not root.reason:
            text = f"{text}\n{self.resume_hint()}".strip()
        if not root.reason and is_live_terminal():
            note("")  # rank 0 may have left the cursor behind its view
        in_log = root.rank == 0 and root.reason  # rank 0 has said it there
        kinds = {UserError.exit_code: "refusal", CheckpointError.exit_code: "refusal", GuardError.exit_code: "guard"}
        _say(text, "" if in_log else "stop" if self._stopped_by else kinds.get(code, "failure"), folder)
        return code


def _say(text: str, kind: str = "", folder: Path = Path()) -> None:
    """Print, and add to the run's log as an event of this kind."""
    with contextlib.suppress(OSError):  # a terminal that is gone must not end the run
        note(text)
    with contextlib.suppress(OSError):  # no rank of this machine has opened train.log
        if kind:
            note_end(text, kind, Path((folder / LOG_FILE).read_text(encoding="utf-8")))
