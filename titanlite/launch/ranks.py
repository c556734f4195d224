"""Starts and watches the ranks of this machine, and starts them again after a crash.

This is not torch's elastic agent. That one gives ranks 30 seconds to save after a signal (in torch 2.11, always),
starts a run again that has saved and ended, and imports torch, for which the first step would wait more than a second.
`titanlite.launch.machines` lets torch's agent start one of these on each of several machines.

Invariant: a signal reaches each rank once, and the rank has the time that it needs to save. No rank outlives the
launcher: this module kills the ranks before it returns, and they stop by themselves if the launcher is killed.
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
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from titanlite.config.errors import ERROR_FOLDER, StoppedBySignal
from titanlite.launch.exit_report import KNOWN_EXITS, RankEnd, explain, explain_hang
from titanlite.runtime.logging import LOG_FILE, Kind, note, note_end
from titanlite.runtime.process import STOP_SIGNALS, STORE, start_python

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"  # the interface that only this machine can reach
POLL_SECONDS = 0.1  # between two looks at the ranks
# Seconds that the other ranks have after one has crashed (they wait for it in a collective), or has ended as it should.
CRASH_PATIENCE = 5.0
KNOWN_EXIT_PATIENCE = 30.0


@dataclass(frozen=True)
class World:
    """The ranks of this machine among all `size`."""

    ranks: range
    size: int
    shown_ranks: Sequence[int] = (0,)  # they share the standard output of the launcher
    stop_seconds: float = 3600.0  # to save after a signal
    max_restarts: int = 0  # after crashes, from the newest checkpoint
    restarts: int = 0  # number of them before this one
    agent: bool = False  # torch's agent restarts the ranks of all machines together


def run_ranks(words: Sequence[str], world: World, resume_hint: Callable[[], str] = str) -> int:
    """Run `python WORDS` for each rank of this machine, print why the run ended, and return the exit code.

    Args:
        words: The program must first call `titanlite.runtime.process.begin`.
        resume_hint: The last lines of the output, if the ranks ended without printing them.
    """
    with tempfile.TemporaryDirectory(prefix="titanlite-launch-") as folder:
        return _Ranks(words, world, resume_hint, Path(folder)).run()


class _Ranks:
    """The processes, one attempt after the other. They write why they ended into `folder`, which is private."""

    def __init__(self, words: Sequence[str], world: World, hint: Callable[[], str], folder: Path) -> None:
        self._words, self._world, self._hint, self._folder = words, world, hint, folder
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # by rank
        self._signal = 0  # the first one that stops the run
        self._at_once = False  # after a second Ctrl-C

    def run(self) -> int:
        """Start the ranks until they end well, for a known reason, or have crashed too often."""
        for number in (*STOP_SIGNALS, signal.SIGUSR2):
            if signal.getsignal(number) != signal.SIG_IGN or number != signal.SIGHUP:  # nohup
                signal.signal(number, self._receive)
        most, done = self._world.max_restarts, self._world.restarts
        try:
            while True:
                self._start(done)
                ends = self._watch()
                if not ends:
                    return 0
                known = any(end.code in KNOWN_EXITS for end in ends)  # it would end again like this
                last = known or self._signal > 0 or done >= most
                code = self._report(ends, last)
                if last:
                    return code
                done += 1
                self._say(f"Starting again from the newest checkpoint ({most - done} restarts left).", "restart")
                if self._world.agent:
                    return code
        finally:
            self._kill()

    def _start(self, restarts: int) -> None:
        for file in self._folder.glob("*.json"):
            file.unlink()
        world = self._world
        variables = {
            "WORLD_SIZE": str(world.size),
            "LOCAL_WORLD_SIZE": str(len(world.ranks)),
            "TORCHELASTIC_RESTART_COUNT": str(restarts),
            ERROR_FOLDER: str(self._folder),
        }
        if world.size == len(world.ranks):  # the interfaces replace what was set for runs on several machines
            interfaces = {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": f"={LOOPBACK}"}
            variables |= {STORE: str(self._folder / f"store-{restarts}"), **interfaces}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGUSR2})  # so that none is missed
        try:
            for local_rank, rank in enumerate(world.ranks):
                self._processes[rank] = start_python(
                    ["-u", *self._words],
                    {**variables, "RANK": str(rank), "LOCAL_RANK": str(local_rank)},
                    # not a pipe, so that a terminal stays a terminal
                    stdout=None if rank in world.shown_ranks else subprocess.DEVNULL,
                    start_new_session=True,  # only the launcher passes Ctrl-C on
                )
            if self._signal:  # it came between two attempts
                self._send(self._signal)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _watch(self) -> list[RankEnd]:
        """Wait until all ranks have ended. Kill those that have not ended in time after the first one.

        Returns: Those that did not end with 0, in order of time; those that were killed come last.
        """
        ends: dict[int, tuple[int, float]] = {}
        killed, limit = set(), float("inf")
        while len(ends) < len(self._processes):
            time.sleep(POLL_SECONDS)
            for rank, process in self._processes.items():
                if rank not in ends and process.poll() is not None:
                    ends[rank] = process.returncode, time.time()
            bad = {code for code, _ in ends.values()} - {0}
            patience = float("inf")
            if bad.difference(KNOWN_EXITS):
                patience = CRASH_PATIENCE
            elif self._signal or StoppedBySignal.exit_code in bad:
                patience = self._world.stop_seconds
            elif bad:
                patience = KNOWN_EXIT_PATIENCE
            limit = min(limit, time.monotonic() + patience)
            if self._at_once or time.monotonic() > limit:
                killed |= self._kill()
        return sorted(
            (self._end_of(rank, *end, rank in killed) for rank, end in ends.items() if end[0]),
            key=lambda end: (end.killed, end.time),
        )

    def _end_of(self, rank: int, code: int, seen: float, killed: bool) -> RankEnd:
        record = {"time": seen - 2 * POLL_SECONDS, "message": "", "closing": ""}
        with contextlib.suppress(OSError, ValueError):  # it wrote no report, or the disk was full
            record |= json.loads((self._folder / f"{rank}.json").read_text(encoding="utf-8"))
        return RankEnd(rank, code, record["time"], record["message"], record["closing"], killed)

    def _kill(self) -> set[int]:
        """Kill the ranks that still run, and the processes that they have started. Returns which ones."""
        running = {rank: process for rank, process in self._processes.items() if process.poll() is None}
        for process in running.values():
            os.killpg(process.pid, signal.SIGKILL)
        for process in running.values():
            process.wait()
        return set(running)

    # ------------------------------------------------------------------------------------------------- words

    def _report(self, ends: Sequence[RankEnd], last: bool) -> int:
        """Say why the ranks ended; returns the exit code."""
        text, code = explain(ends, self._signal)
        hangs = [json.loads(file.read_text("utf-8")) for file in sorted(self._folder.glob("*.hang.json"))]
        self._say(explain_hang(hangs, [end.rank for end in ends if end.killed]), "hang")
        closing = next((end.closing for end in ends if end.closing), "")
        if not closing and ends[0].code not in KNOWN_EXITS and (self._folder / LOG_FILE).exists():
            closing = self._hint()
        said = any(end.rank == 0 and end.reason and end.reason == ends[0].reason for end in ends)  # in train.log
        lines = "\n".join(filter(None, (text, closing if last else "")))
        self._say(lines, None if said else "stop" if self._signal else "failure")
        return code

    def _say(self, text: str, kind: Kind | None) -> None:
        """Print, and add to the run's log as an event of this kind."""
        if not text:
            return
        with contextlib.suppress(OSError):  # a terminal that is gone must not end the run
            note(text)
        with contextlib.suppress(OSError):  # no rank of this machine has opened train.log
            if kind is not None:
                note_end(text, kind, Path((self._folder / LOG_FILE).read_text(encoding="utf-8")))

    # ------------------------------------------------------------------------------------------------- signals

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGUSR2:  # save and go on
            self._send(number)
        elif not self._signal:
            self._signal = number
            self._send(number)
            with contextlib.suppress(OSError):  # after SIGHUP the terminal is gone
                os.write(2, b"\nStopping after this step and a save. Ctrl-C again stops at once, without saving.\n")
        elif number == signal.SIGINT:  # a second SIGTERM changes nothing, because schedulers repeat it and have SIGKILL
            self._at_once = True  # not killed here, because the interrupted code may hold a lock that killing needs

    def _send(self, number: int) -> None:
        for process in self._processes.values():
            process.send_signal(number)  # none if it has ended
