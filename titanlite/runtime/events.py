"""Events of a run: the lines of its log that a reader of its files looks for, in events.jsonl.

Invariant: the file is only appended to, one line when an event happens. So a killed run keeps all events before its
end, and a resumed run has no event twice, because an event is what happened at a time. A later start that resumes from
an earlier step does not undo it.
"""

from __future__ import annotations

import json
import logging
import os
from typing import Any, Literal, Self, TextIO

from titanlite.config.errors import printable
from titanlite.runtime.lossy_log import RunFileHandler

EVENTS_FILE = "events.jsonl"
_LONGEST = 4000  # characters of a text, for which the last ones are kept, because a traceback ends with its reason

Kind = Literal[
    "start",
    "plan",
    "data",
    "save",
    "failed save",
    "removal",
    "validation",
    "profile",
    "restart",
    "hang",
    "stop",
    "guard",
    "failure",
    "finish",
]
ENDS: tuple[Kind, ...] = ("stop", "guard", "failure", "hang", "finish")


class Event(str):
    """A line for the log that is also an event of the run.

    It is a text, so whatever logs lines can pass it on.

    Args:
        step: Number of optimizer steps done; None where it is not known.
        details: Further JSON values for the line of events.jsonl.
    """

    kind: Kind
    step: int | None
    details: dict[str, Any]

    def __new__(cls, text: str, kind: Kind, step: int | None = None, **details: Any) -> Self:
        event = super().__new__(cls, text)
        event.kind, event.step, event.details = kind, step, details
        return event

    def __getnewargs__(self) -> tuple[str, Kind]:
        return str(self), self.kind  # what pickle calls __new__ with; it restores the other attributes itself


class EventsHandler(RunFileHandler):
    """Appends to events.jsonl those log records whose message is an `Event`.

    A line: {"time": Unix time, "event": kind, "step": int or null, "text": the log's line, ...details}.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return isinstance(record.msg, Event)

    def format(self, record: logging.LogRecord) -> str:
        event: Any = record.msg
        line = {"time": record.created, "event": event.kind, "step": event.step, "text": printable(event[-_LONGEST:])}
        return json.dumps({**line, **event.details})

    def _open(self) -> Any:
        """Open the file at a new line, because the line before may have been cut by a full disk."""
        file: TextIO = super()._open()
        with open(self.baseFilename, "rb") as written:
            if file.tell():
                written.seek(-1, os.SEEK_END)
                if written.read(1) != b"\n":
                    file.write("\n")
        return file
