"""The worker processes of this node: starts, signals and kills them, and reads why they ended.

Invariant: a worker is recorded before any signal can arrive, so that none is forgotten. Its open descriptors are the
standard ones, the lock of the run's folder, and for the first worker the socket on which it listens for the others.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from titanlite.config.errors import ERROR_FOLDER, UserError
from titanlite.launch.verdict import End
from titanlite.runtime.process import LISTENER, start_python

POLL_SECONDS = 0.1  # between two checks of the workers


class Workers:
    """The workers, one generation after the other.

    Args:
        command: the program and its arguments, for Python.
        shown_ranks: ranks that share the standard output of the launcher.
        folder: private folder of the run, in which workers write why they ended.
        lock: a descriptor that workers keep open, because the folder is in use as long as one of them lives.

    Attributes:
        codes: exit codes of the workers that have ended, by rank, in the order in which they ended.
        killed: ranks that were killed here.
    """

    def __init__(self, command: Sequence[str], shown_ranks: Sequence[int], folder: Path, lock: int) -> None:
        self._command, self._shown_ranks, self._folder, self._lock = command, shown_ranks, folder, lock
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # by global rank
        self._seen: dict[int, float] = {}  # when an end was noted
        self.codes: dict[int, int] = {}
        self.killed: set[int] = set()

    def start(self, ranks: Sequence[int], environment: Mapping[str, str], listener: int | None) -> None:
        """Start a worker for each rank. The caller has blocked the signals that it handles.

        Args:
            listener: a descriptor for rank 0.

        Raises:
            UserError: the system refuses another process.
        """
        self._processes, self._seen, self.codes, self.killed = {}, {}, {}, set()
        for file in self._folder.glob("*.json"):
            file.unlink()
        common = {**environment, ERROR_FOLDER: str(self._folder)}
        for local_rank, rank in enumerate(ranks):
            own, descriptors = {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}, [self._lock]
            if rank == 0 and listener is not None:
                own[LISTENER] = str(listener)
                descriptors.append(listener)
            try:
                self._processes[rank] = start_python(
                    ["-u", *self._command],
                    common | own,
                    stdout=None
                    if rank in self._shown_ranks
                    else subprocess.DEVNULL,  # not a pipe, so that a terminal stays a terminal
                    pass_fds=descriptors,
                    start_new_session=True,  # only the launcher sends Ctrl-C to the workers
                )
            except OSError as error:
                raise UserError(
                    f"NGPU={len(ranks)}: the system refused process number {local_rank + 1} "
                    f"({error.strerror}). Lower NGPU, or raise the limit of processes (ulimit -u)."
                ) from None

    def running(self) -> dict[int, subprocess.Popen[bytes]]:
        """The workers that have not ended, by rank. Records those that have."""
        running = {}
        for rank, process in self._processes.items():
            code = process.poll()
            if code is None:
                running[rank] = process
            elif rank not in self.codes:
                self.codes[rank], self._seen[rank] = code, time.time()
        return running

    def send(self, number: int) -> None:
        """Send a signal to the workers that still run."""
        for process in self.running().values():
            process.send_signal(number)

    def kill(self) -> None:
        """Kill the workers that still run, together with the processes that they have started."""
        running = self.running()
        for rank, process in running.items():
            self.killed.add(rank)
            os.killpg(process.pid, signal.SIGKILL)
        for process in running.values():
            process.wait()

    def failures(self) -> list[End]:
        """The workers that did not end with 0, in the order in which they ended."""
        ends = []
        for rank, code in self.codes.items():
            try:
                record = json.loads((self._folder / f"{rank}.json").read_text(encoding="utf-8"))
            except (OSError, ValueError):  # it wrote no report, or the disk was full
                record = {"time": self._seen[rank] - 2 * POLL_SECONDS, "message": None, "closing": ""}
            if code != 0:
                ends.append(End(rank, code, record["time"], record["message"], record["closing"]))
        return sorted(ends, key=lambda end: (end.rank in self.killed, end.time))

    def hangs(self) -> list[dict[str, Any]]:
        """The reports of `titanlite.runtime.hang_report` about ranks that took too long."""
        return [json.loads(file.read_text(encoding="utf-8")) for file in sorted(self._folder.glob("*.hang.json"))]
