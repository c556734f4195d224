"""Logging of one rank: to the terminal, to train.log, and its events to events.jsonl.

Invariant: the terminal shows each line once, from the ranks that the user asked for (LOG_RANK), and errors of all
ranks. Only rank 0 writes the files, which are only appended to. A line that cannot be written costs no run and no
traceback: the first one is said by the handlers that still can write, and each is counted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import logging.handlers
import os
import re
import sys
import time
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, Self, TextIO, cast

from titanlite.config.errors import ERROR_FOLDER, UserError, one_line, printable

if TYPE_CHECKING:
    from rich.console import Console

LOGGER_NAME = "titanlite"
LOG_FILE = "train.log"
EVENTS_FILE = "events.jsonl"
LONGEST_EVENT = 4000  # characters of its text; the last ones are kept, because a traceback ends with its reason

Kind = Literal[
    "start", "plan", "data", "save", "failed save", "foreground", "validation", "profile", "restart", "hang", "stop",
    "guard", "failure", "finish",
]  # fmt: skip
ENDS: tuple[Kind, ...] = ("stop", "guard", "failure", "hang", "finish")


class Event(str):
    """A line for the log that is also an event of the run: a line of events.jsonl.

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


# --------------------------------------------------------------------------------------------------- terminal


class _Terminal:
    """Standard output. After its terminal is gone (a lost connection), output is dropped, so that the run can go on and
    save."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> None:
        try:
            self._file.write(text)
            self._file.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._file.fileno())


@cache
def terminal_console() -> Console:
    """The one rich console of the process. Log lines and the live view share it, so that lines are printed above the
    view."""
    from rich.console import Console

    return Console(file=cast(IO[str], _Terminal(sys.stdout)))


def is_live_terminal() -> bool:
    """Whether standard output is a terminal on which a view can be drawn again in place (not with TERM=dumb)."""
    return sys.stdout.isatty() and not terminal_console().is_dumb_terminal


def note(line: str) -> None:
    """Print a line on standard error, for a person who reads while a command works."""
    print(printable(line), file=sys.stderr, flush=True)


# ----------------------------------------------------------------------------------------------------- set-up


def logged_ranks(world_size: int | None = None) -> tuple[int, ...]:
    """The ranks that the environment variable LOG_RANK names (comma-separated, default "0").

    Raises:
        UserError: LOG_RANK is not a list of ranks, or names one that a world of `world_size` does not have.
    """
    text = os.environ.get("LOG_RANK") or "0"
    words = [word.strip() for word in text.split(",") if word.strip()]
    shown = f'LOG_RANK = "{one_line(text[:40])}"'
    if not words or not all(re.fullmatch(r"[0-9]{1,9}", word) for word in words):
        raise UserError(f"{shown}: ranks are allowed, separated by commas, for example LOG_RANK=0,1.")
    ranks = tuple(int(word) for word in words)
    if world_size is not None and max(ranks) >= world_size:
        raise UserError(f"{shown}: there is no rank {max(ranks)}. The last of {world_size} is {world_size - 1}.")
    return ranks


def setup_logging(rank: int, log_file: Path | None) -> logging.Logger:
    """Set up the logger "titanlite" and Python's warnings for this rank, and return the logger.

    A rank that LOG_RANK names writes to standard output: with rich on a terminal, as plain text otherwise. Any other
    rank writes only its errors, to standard error. Rank 0 appends every line to `log_file`, whose folder is created,
    and every `Event` to events.jsonl beside it. A second call replaces what the first one set up.

    Raises:
        UserError: LOG_RANK is not a list of ranks.
    """
    ranks = logged_ranks()
    prefix = f"[rank {rank}] " if len(ranks) > 1 or rank not in ranks else ""
    if rank not in ranks:
        terminal = _plain(_LossyHandler(sys.stderr), prefix)
        terminal.setLevel(logging.ERROR)
    elif is_live_terminal():
        from rich.logging import RichHandler

        terminal = RichHandler(
            console=terminal_console(), show_path=False, show_level=False, omit_repeated_times=False,
            log_time_format="[%H:%M:%S]",
        )  # fmt: skip
        terminal.setFormatter(_LevelFormatter(f"{prefix}%(message)s"))
    else:
        terminal = _plain(_LossyHandler(sys.stdout), prefix)
    handlers = [terminal]
    if rank == 0 and log_file is not None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        handlers += _file_handlers(log_file, prefix)

    logging.captureWarnings(True)  # otherwise each rank prints its warnings on the terminal
    logger = logging.getLogger(LOGGER_NAME)
    for target in (logger, logging.getLogger("py.warnings")):
        for old in list(target.handlers):
            target.removeHandler(old)
            old.close()
        for handler in handlers:
            target.addHandler(handler)
        target.propagate = False
    logger.setLevel(logging.INFO)
    # Other libraries warn on standard error: torch through its own handlers, others through Python's last resort.
    for theirs in (logging.lastResort, *logging.getLogger("torch").handlers):
        if theirs is not None and rank not in ranks:
            theirs.setLevel(logging.ERROR)
    return logger


def failed_writes() -> int:
    """Lines of the log and events of this process that could not be written."""
    return sum(getattr(handler, "failed_writes", 0) for handler in logging.getLogger(LOGGER_NAME).handlers)


# -------------------------------------------------------------------------------------------- the end of a process


def say_end(message: str, closing: str, kind: Kind) -> None:
    """Report why this process ends: to the launcher or on standard error, and in train.log if it is open here.

    The launcher prints equal messages of many ranks once.

    Args:
        message: The reason, or a traceback, which may end with `closing`.
        closing: How to continue the run. It comes last.
        kind: What the end is called in events.jsonl.
    """
    message, closing = printable(message), printable(closing)  # because they quote the content of files
    message = message.rstrip().removesuffix(closing).rstrip()  # a traceback ends with the notes
    text = "\n".join(filter(None, (message, closing)))
    note_end(text, kind)
    folder = os.environ.get(ERROR_FOLDER)
    record = {"message": message, "closing": closing, "time": time.time()}
    with contextlib.suppress(OSError):  # the folder may be gone, or its disk full
        if folder is not None:
            Path(folder, f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(record), encoding="utf-8")
            return
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(text, file=sys.stderr)


def note_end(message: str, kind: Kind, log_file: Path | None = None) -> None:
    """Write to train.log and events.jsonl only why a run ended. Another process prints it on the terminal.

    Args:
        log_file: None: the file of this process's `setup_logging`, if there is one.
    """
    found = [h for h in logging.getLogger(LOGGER_NAME).handlers if isinstance(h, logging.FileHandler)]
    for handler in found if log_file is None else _file_handlers(log_file, ""):
        handler.handle(logging.LogRecord(LOGGER_NAME, logging.ERROR, "", 0, Event(message, kind), None, None))


# --------------------------------------------------------------------------------------------------- handlers


class _LossyHandler(logging.StreamHandler):
    """Counts the lines that cannot be written, in `failed_writes`."""

    failed_writes = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # a file that was renamed cannot be opened again
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            return super().handleError(record)
        self.failed_writes += 1
        if self.failed_writes == 1:
            name = getattr(self, "baseFilename", None) or getattr(self.stream, "name", "the terminal")
            logging.getLogger(record.name).warning(f"The run goes on, but its log cannot be written: {name}: {error}")
        return None


class _RunFileHandler(_LossyHandler, logging.handlers.WatchedFileHandler):
    """Appends to a file of a run, and continues in a new one if it is renamed."""

    def close(self) -> None:
        try:
            super().close()
        except OSError:  # the lines that it still holds were counted
            logging.Handler.close(self)


class _EventsHandler(_RunFileHandler):
    """Appends to events.jsonl those log records whose message is an `Event`.

    A line: {"time": Unix time, "event": kind, "step": int or null, "text": the log's line, ...details}.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return isinstance(record.msg, Event)

    def format(self, record: logging.LogRecord) -> str:
        event: Any = record.msg
        text = printable(event[-LONGEST_EVENT:])
        return json.dumps(
            {"time": record.created, "event": event.kind, "step": event.step, "text": text, **event.details}
        )

    def _open(self) -> Any:
        """Open the file at a new line, because the line before may have been cut by a full disk."""
        file: TextIO = super()._open()
        with open(self.baseFilename, "rb") as written:
            if file.tell():
                written.seek(-1, os.SEEK_END)
                if written.read(1) != b"\n":
                    file.write("\n")
        return file


class _LevelFormatter(logging.Formatter):
    """Shows the level of warnings and errors only.

    A message can quote a file, so its control characters are escaped, and its further lines are indented. So none of
    them looks like a line of the log.
    """

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record)).replace("\n", "\n    ")

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.levelno > logging.INFO:
            record.message = f"{record.levelname}: {record.message}"
        return super().formatMessage(record)


def _file_handlers(log_file: Path, prefix: str) -> list[logging.Handler]:
    """Handlers for the log and the events."""
    log = _plain(_RunFileHandler(log_file, encoding="utf-8"), prefix, "%Y-%m-%d %H:%M:%S")
    return [log, _EventsHandler(log_file.with_name(EVENTS_FILE), encoding="utf-8")]


def _plain(handler: logging.Handler, prefix: str, time_format: str = "%H:%M:%S") -> logging.Handler:
    handler.setFormatter(_LevelFormatter(f"[%(asctime)s] {prefix}%(message)s", time_format))
    return handler
