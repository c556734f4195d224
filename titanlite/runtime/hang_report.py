"""Reports what a rank is doing when a step takes too long.

Invariant: this module only observes and writes a file. The time-out of a collective ends the run. The launcher reads
the files of all ranks of its machine and prints the report.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

SHARE = 0.8  # of the time-out, so that the file exists before the first rank gives up


def all_hosts() -> list[str]:
    """Name of every rank's machine. All ranks call it together."""
    hosts = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, socket.gethostname())
    return hosts


def set_timeout(groups: Iterable[dist.ProcessGroup], seconds: int) -> None:
    """Set the longest wait for any later collective of these groups."""
    for group in groups:
        group.set_timeout(timedelta(seconds=seconds))


class HangWatch:
    """A thread that writes `<rank>.hang.json` into `folder` if `passed` was not called for most of the time-out.

    The launcher gives the folder and reads the file. Without a folder there is no thread.
    """

    def __init__(self, folder: str | None, rank: int, timeout: float, hosts: list[str]) -> None:
        self._rank, self._hosts, self._main = rank, hosts, threading.get_ident()
        self._ended = threading.Event()
        self.passed(0, timeout)
        if folder is not None:
            file = Path(folder, f"{rank}.hang.json")
            threading.Thread(target=self._run, args=(file,), daemon=True, name="hang-watch").start()

    def passed(self, step: int, timeout: float) -> None:
        """Note that a step has ended. The next one may take `timeout` seconds."""
        self._step, self._limit, self._since = step, SHARE * timeout, time.monotonic()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()

    def _run(self, file: Path) -> None:
        while not self._ended.wait(min(1.0, self._limit / 10)):
            if time.monotonic() - self._since < self._limit:
                file.unlink(missing_ok=True)  # of a step that has ended after all
            elif not file.exists():
                file.write_text(json.dumps(self._describe()), encoding="utf-8")

    def _describe(self) -> dict[str, Any]:
        frames = traceback.extract_stack(sys._current_frames()[self._main])
        line = ([frame for frame in frames if f"{os.sep}titanlite{os.sep}" in frame.filename] or frames)[-1]
        return {
            "rank": self._rank,
            "hosts": self._hosts,
            "step": self._step + 1,
            "line": f"{line.filename}:{line.lineno} in {line.name}: {line.line}",
            "inside": f"{frames[-1].name} ({frames[-1].filename}:{frames[-1].lineno})",
            "collectives": last_collectives() if dist.is_initialized() else {},
        }


def last_collectives() -> dict[str, tuple[int, str, bool]]:
    """Process group -> the last collective that this rank started there: its number, its name, whether it is done.

    The group of the latest collective comes last. torch's flight recorder has gloo's in one table, NCCL's in another.
    """
    recorder: Any = _distributed_c10d
    tables = [recorder._dump_fr_trace_json(True, False)]
    if dist.is_nccl_available():
        tables.append(recorder._dump_nccl_trace_json(True, False))
    entries = [entry for table in tables for entry in json.loads(table).get("entries", [])]
    last: dict[str, tuple[int, str, bool]] = {}
    for entry in sorted(entries, key=lambda entry: entry["time_created_ns"]):
        group = f"{entry['profiling_name'].partition(':')[0]} {entry['process_group'][0]}"
        last.pop(group, None)  # so that the group of the very last one comes last
        last[group] = (entry["collective_seq_id"], entry["profiling_name"], entry["retired"])
    return last
