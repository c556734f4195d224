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
from typing import Any, NamedTuple

from titanlite.config.errors import ERROR_FOLDER, CheckpointError, GuardError, StoppedBySignal, UserError
from titanlite.runtime.logging import LOG_FILE, note, note_end
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
    """How a rank ended: with its exit code (minus the signal's number if a signal killed it), when, the reason that it
    gave, and whether the launcher killed it."""

    rank: int
    code: int
    time: float
    reason: str
    killed: bool


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
                    code = self._report(self._watch(Path(name)), Path(name))
                finally:
                    self._kill()
                if code in FINAL or not left:
                    break
                _say(f"Starting again from the newest checkpoint ({left - 1} restarts left).", "restart", Path(name))
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

    def _watch(self, folder: Path) -> list[RankEnd]:
        """Wait until all ranks have ended. Kill those that have not ended in time after the first one.

        Returns: Those that did not end with 0, in order of time; those that were killed come last.
        """
        ends: dict[int, RankEnd] = {}
        killed, limit = set(), float("inf")
        while len(ends) < len(self._processes):
            time.sleep(POLL_SECONDS)
            at_once = self._obey()
            for rank, process in self._processes.items():
                if rank not in ends and process.poll() is not None:
                    record = {"time": time.time() - 2 * POLL_SECONDS, "message": ""}
                    with contextlib.suppress(OSError, ValueError):  # it wrote no report, or the disk was full
                        record |= json.loads((folder / f"{rank}.json").read_text(encoding="utf-8"))
                    ends[rank] = RankEnd(rank, process.returncode, record["time"], record["message"], rank in killed)
            bad = {end.code for end in ends.values()} - {0}
            stopping = self._stopped_by or StoppedBySignal.exit_code in bad
            if bad or stopping:
                known_patience = self.stop_seconds if stopping else KNOWN_EXIT_PATIENCE
                limit = min(limit, time.monotonic() + (CRASH_PATIENCE if bad - KNOWN_EXITS else known_patience))
            if at_once or time.monotonic() > limit:
                killed |= self._kill()
        return sorted((end for end in ends.values() if end.code), key=lambda end: (end.killed, end.time))

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
                _say("\nStopping after this step and a save. Ctrl-C again stops at once, without saving.")
            for process in self._processes.values():
                process.send_signal(number)  # none if it has ended
        return False

    def _kill(self) -> set[int]:
        """Kill the ranks that still run, and the processes that they have started. Returns which ones."""
        running = {rank: process for rank, process in self._processes.items() if process.poll() is None}
        for process in running.values():
            killpg(process.pid, signal.SIGKILL)
        for process in running.values():
            process.wait()
        return set(running)

    def _report(self, ends: Sequence[RankEnd], folder: Path) -> int:
        """Say why the ranks ended; returns the exit code."""
        if not ends:
            return 0
        _say(explain_hang([json.loads(file.read_text("utf-8")) for file in folder.glob("*.hang.json")]), "hang", folder)
        root, text, code = explain(ends, self._stopped_by)
        if not root.reason and code not in KNOWN_EXITS and (folder / LOG_FILE).exists():
            text = f"{text}\n{self.resume_hint()}"
        in_log = root.rank == 0 and root.reason  # rank 0 has said it there
        _say(text, "" if in_log else "stop" if self._stopped_by else "failure", folder)
        return code


def _say(text: str, kind: str = "", folder: Path = Path()) -> None:
    """Print, and add to the run's log as an event of this kind."""
    with contextlib.suppress(OSError):  # a terminal that is gone must not end the run
        if text:
            note(text)
    with contextlib.suppress(OSError):  # no rank of this machine has opened train.log
        if text and kind:
            note_end(text, kind, Path((folder / LOG_FILE).read_text(encoding="utf-8")))


def explain(ends: Sequence[RankEnd], stopped_by: int) -> tuple[RankEnd, str, int]:
    """The rank that decides, what to print about it, and the exit code of the launcher.

    Args:
        ends: Of the ranks that did not end with 0, in order of time, those that the launcher killed last. There is at
            least one.
        stopped_by: Number of the signal that was passed on to the ranks, or 0.
    """
    # A rank that stopped without a save, but said why, also stopped for a known reason.
    known = [end for end in ends if end.code in KNOWN_EXITS or (end.code in UNSAVED_STOPS and end.reason)]
    root = min(known, key=lambda end: end.rank, default=ends[0])
    late = ", ".join(str(end.rank) for end in ends if end.killed)
    if known:
        return root, root.reason, root.code
    if stopped_by and (root.code in UNSAVED_STOPS or root.killed):  # other ends after it are its consequences
        why = f"without a save: ranks {late} had to be killed" if late else "before there was anything to save"
        return root, f"Stopped by {signal.Signals(stopped_by).name} {why}.", 128 + stopped_by
    how = f"it ended with {f'exit code {root.code}' if root.code > 0 else signal.Signals(-root.code).name}."
    if root.code == -signal.SIGKILL:
        how = "it was killed (SIGKILL). The system does that when memory runs out."
    killed = f"Ranks that then did not end by themselves and were killed: {late}." if late else ""
    text = "\n".join(filter(None, (f"Rank {root.rank} failed first: {how}", root.reason, killed)))
    return root, text, root.code if root.code > 0 else 128 - root.code


def explain_hang(hangs: Sequence[dict[str, Any]]) -> str:
    """Which rank was late, and in which collective the others waited for it.

    Args:
        hangs: What `titanlite.hooks.hang_report.HangReport` wrote, one for each rank.
    """
    furthest: dict[str, int] = {}  # process group -> number of the last collective that any rank has joined
    for hang in hangs:
        for group, (number, *_) in hang["collectives"].items():
            furthest[group] = max(number, furthest.get(group, 0))
    late, waiting = [], []
    for hang in sorted(hangs, key=lambda hang: hang["rank"]):
        who = f"Rank {hang['rank']} ({hang['hosts'][hang['rank']]}), step {hang['step']},"
        collectives = hang["collectives"]
        behind = [name for group, (number, name, _) in collectives.items() if number < furthest[group]]
        pending = [f"{name} number {number}" for number, name, done in collectives.values() if not done]
        if pending and not behind:
            waiting.append(f"{who} waits in {pending[-1]}, at {hang['line']}")
        else:
            missed = f"after its last {behind[-1]} it did not join the next one. " if behind else ""
            late.append(f"{who} is LATE: {missed}It is at {hang['line']}\n    inside of {hang['inside']}")
    here = {hang["rank"] for hang in hangs}
    silent = [f"{rank} ({host})" for hang in hangs[:1] for rank, host in enumerate(hang["hosts"]) if rank not in here]
    if silent and not late:
        late = [f"LATE, stopped or lost is one that wrote no report on this machine: rank {', '.join(silent)}."]
    return "\n".join(late + waiting)
