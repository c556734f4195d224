"""Files of JSON lines that another process may be writing: metrics.jsonl, validation.jsonl, events.jsonl.

Invariant: a damaged line costs that line only, and is counted. A last line without its end is not damaged: its writer
has not finished it yet.
"""

from __future__ import annotations

import json
import math
import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titanlite.config.errors import UserError
from titanlite.config.files import check_regular

_TAIL = 1 << 18  # bytes that are read at first: about 600 lines of metrics.jsonl
_MOST = 1 << 24  # bytes that are read at a time
_LONGEST = 1 << 22  # bytes of a line


def parse(line: bytes) -> dict[str, Any] | None:
    """The JSON object in a line, or None."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def number(entry: dict[str, Any], key: str) -> float | None:
    """A number of a line of metrics.jsonl. It can be NaN or infinite; None if there is none."""
    value = entry.get(key)
    if value is None and isinstance(texts := entry.get("nonfinite"), dict):
        value = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}.get(str(texts.get(key)))
    try:
        return None if isinstance(value, bool) or not isinstance(value, int | float) else float(value)
    except OverflowError:
        return None


def is_moment(at: float) -> bool:
    """Whether it is a Unix time that a calendar knows."""
    return 0 <= at < 2**37


def moment(entry: dict[str, Any]) -> float | None:
    """The Unix time of a line, or None."""
    at = number(entry, "time")
    return at if at is not None and is_moment(at) else None


def step_of(entry: dict[str, Any]) -> int | None:
    """The step of a line; None if it has none that a run can have."""
    step = number(entry, "step")
    return int(step) if step is not None and 0 <= step < 2**53 else None


@dataclass
class Tail:
    """The last lines of a file, and then the new ones.

    Attributes:
        damaged: Number of lines so far that are not JSON objects.
        problem: Why the file cannot be read, or "".
        begins_late: Whether the file has lines before the first ones that were read.
        replaced: Whether the last call read another file of this name than the one before, or one that was cut.
    """

    path: Path
    damaged: int = 0
    problem: str = ""
    begins_late: bool = False
    replaced: bool = False
    _offset: int = 0
    _file: tuple[int, int] = field(default=(0, 0))  # device and inode

    def new(self) -> list[dict[str, Any]]:
        """The objects since the last call. If the file was replaced or has become shorter, it is read anew."""
        self.problem, self.replaced = "", False
        if not os.path.lexists(self.path):
            return []
        try:
            check_regular(self.path)
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if (status.st_dev, status.st_ino) != self._file or status.st_size < self._offset:
                    self.replaced = self._file != (0, 0)
                    self._file, self._offset = (status.st_dev, status.st_ino), max(0, status.st_size - _TAIL)
                    self.begins_late = self._offset > 0
                    if self.begins_late:  # go to the next whole line
                        file.seek(self._offset - 1)
                        self._offset += len(file.readline()) - 1
                file.seek(self._offset)
                data = file.read(_MOST)
                whole = data.rpartition(b"\n")[0]
        except (OSError, UserError) as error:
            self.problem = str(error)
            return []
        if not whole:
            if len(data) == _MOST:  # no run writes such a line: pass over it
                self._offset += _MOST
                self.damaged += 1
            return []
        self._offset += len(whole) + 1
        found = [parse(line) for line in whole.split(b"\n") if line.strip()]
        self.damaged += found.count(None)
        return [entry for entry in found if entry is not None]

    def problems(self) -> list[str]:
        """What cannot be read, one line each."""
        lines = f"{self.path.name}: {self.damaged} line{'s' * (self.damaged > 1)} cannot be read"
        return [line for line in (self.problem, lines if self.damaged else "") if line]


def sample(path: Path, count: int) -> Iterator[dict[str, Any]]:
    """About `count` objects, evenly spaced over the bytes of a file: cheap for a file of any size."""
    try:
        check_regular(path)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            for part in range(count):
                file.seek(size * part // count)
                if part:
                    file.readline(_LONGEST)  # the rest of a line
                if (entry := parse(file.readline(_LONGEST))) is not None:
                    yield entry
    except (OSError, UserError):
        return  # `Tail` says why


@dataclass(frozen=True)
class Table:
    """All numbers of a file of JSON lines, by key. All columns are as long as there are steps; NaN: no number.

    The steps rise. Of lines with the same step the last one counts, and what lies between them is left out.
    """

    columns: dict[str, array[float]]
    problems: tuple[str, ...]


def read_table(path: Path) -> Table:
    """Read all of a file whose lines have a step. The numbers of an object in a line have keys such as "OBJECT/KEY"."""
    columns: dict[str, array[float]] = {"step": array("d")}
    steps, damaged, repeated, problems = columns["step"], 0, 0, []
    for line in _whole_lines(path, problems):
        entry = parse(line)
        step = None if entry is None else step_of(entry)
        if entry is None or step is None:
            damaged += 1
            continue
        while steps and steps[-1] >= step:
            del steps[-1]
            repeated += 1
        row = len(steps)
        for key, value in _numbers(entry):
            column = columns.get(key)
            if column is None:
                column = columns[key] = array("d")
            if len(column) != row:
                del column[row:]
                column.extend([math.nan] * (row - len(column)))
            column.append(value)
    for column in columns.values():
        del column[len(steps) :]
        column.extend([math.nan] * (len(steps) - len(column)))
    if damaged:
        problems.append(f"{path.name}: {damaged} line{'s' * (damaged > 1)} cannot be read")
    if repeated:
        problems.append(f"{path.name}: steps go back; {repeated} lines of steps that come again later are left out")
    return Table(columns, tuple(problems))


def read_objects(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    """All objects of a file of JSON lines. What cannot be read is added to `problems`."""
    found = [parse(line) for line in _whole_lines(path, problems)]
    if damaged := found.count(None):
        problems.append(f"{path.name}: {damaged} line{'s' * (damaged > 1)} cannot be read")
    return [entry for entry in found if entry is not None]


def _numbers(entry: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in entry.items():
        if type(value) is float or (type(value) is int and value.bit_length() < 64):
            yield key, value
        elif isinstance(value, dict) and key != "nonfinite":
            for name in value:
                if (inner := number(value, name)) is not None:
                    yield f"{key}/{name}", inner
        elif (own := number(entry, key)) is not None:
            yield key, own


def _whole_lines(path: Path, problems: list[str]) -> Iterator[bytes]:
    if not os.path.lexists(path):
        return
    try:
        check_regular(path)
        with path.open("rb") as file:
            while line := file.readline(_LONGEST):
                if line.endswith(b"\n") and not line.isspace():
                    yield line
                elif len(line) == _LONGEST:
                    raise UserError(f"{path.name}: a line is longer than {_LONGEST:,} bytes")
    except (OSError, UserError) as error:
        problems.append(str(error))
