"""Files of JSON lines that another process may be writing: metrics.jsonl, events.jsonl and their like.

Invariant: a damaged line costs that line only, and is counted. A last line without its end is not damaged: its writer
has not finished it yet.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titanlite.config.errors import UserError
from titanlite.config.files import check_regular

_LONGEST = 1 << 22  # bytes of a line


class JsonLines:
    """The objects in a file of JSON lines, and then those that are added to it.

    Args:
        last: Of a larger file, only about so many bytes at its end are read.

    Attributes:
        damaged: Number of lines so far that are not JSON objects.
        problem: Why the file cannot be read, or "".
        replaced: Whether the last call read another file of this name than the one before, or one that was cut.
    """

    def __init__(self, path: Path, last: int = 1 << 62) -> None:
        self.path, self.damaged, self.problem, self.replaced = path, 0, "", False
        self._last, self._offset, self._file = last, 0, (0, 0)  # device and inode

    def new(self) -> Iterator[dict[str, Any]]:
        """The objects since the last call. A file that was replaced, or has become shorter, is read anew."""
        self.problem, self.replaced = "", False
        if not os.path.lexists(self.path):
            return
        try:
            check_regular(self.path)
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if (status.st_dev, status.st_ino) != self._file or status.st_size < self._offset:
                    self.replaced = self._file != (0, 0)
                    self._file, self._offset = (status.st_dev, status.st_ino), max(0, status.st_size - self._last)
                    if self._offset:  # go to the next whole line
                        file.seek(self._offset - 1)
                        self._offset += len(file.readline()) - 1
                file.seek(self._offset)
                while (line := file.readline(_LONGEST)).endswith(b"\n") or len(line) == _LONGEST:
                    self._offset += len(line)
                    if (entry := _parse(line)) is not None:
                        yield entry
                    elif line.strip():
                        self.damaged += 1
        except (OSError, UserError) as error:
            self.problem = str(error)

    def problems(self) -> list[str]:
        """What cannot be read, one line each."""
        lines = f"{self.path.name}: {self.damaged} line{'s' * (self.damaged > 1)} cannot be read"
        return [line for line in (self.problem, lines if self.damaged else "") if line]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def number(entry: dict[str, Any], key: str) -> float | None:
    """A finite number of a line that a sum can bear; None if there is none."""
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e100:
        return None
    return float(value)


def moment(entry: dict[str, Any]) -> float | None:
    """The Unix time of a line; None if it has none that a calendar knows."""
    at = number(entry, "time")
    return at if at is not None and 0 <= at < 2**37 else None


def step_of(entry: dict[str, Any]) -> int | None:
    """The step of a line; None if it has none that a run can have."""
    step = number(entry, "step")
    return int(step) if step is not None and 0 <= step < 2**53 else None
