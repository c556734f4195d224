"""Logging of one rank: to the terminal, to train.log, and its events to events.jsonl.

Invariant: the terminal shows each line once, from the ranks that the user asked for (LOG_RANK), and errors of all
ranks. Only rank 0 writes the files, which are only appended to. A line that cannot be written costs no run and no
traceback: the first one is said by the handlers that still can write, and each is counted.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Self, cast

from titanlite.config.errors import ERROR_FOLDER, UserError, one_line, printable

LOGGER_NAME = "titanlite"
LOG_FILE = "train.log"
EVENTS_FILE = "events.jsonl"
SAY_SECONDS = 10.0  # between two lines about what a command works at
LONGEST_EVENT = 4000  # characters of its text; the last ones are kept, because a traceback ends with its reason

STOPPING = "Stopping after this step and a save. Ctrl-C again stops at once, without saving."
# The kinds of events that end a run. A failure is a crash; a refusal is an answer to what is wrong.
ENDS = ("stop", "guard", "refusal", "failure", "hang", "finish")


class Event(str):
    """A line for the log that is also an event of the run: a line of events.jsonl.

    It is a text, so whatever logs lines can pass it on.

    Args:
        kind: One of ENDS, or start, plan, data, skip, spike, straggler, save, failed save, foreground, mirror,
            failed mirror, validation, profile, restart.
        step: Number of optimizer steps done; None where it is not known.
        details: Further JSON values for the line of events.jsonl.
    """

    def __new__(cls, text: str, *_: Any, **__: Any) -> Self:
        return super().__new__(cls, text)

    def __init__(self, _text: str, kind: str, step: int | None = None, **details: Any) -> None:
        self.kind, self.step, self.details = kind, step, details


# --------------------------------------------------------------------------------------------------- terminal


def drop_output(stream: IO[str]) -> None:
    """Let a standard stream go nowhere from now on: nobody reads it any more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def is_live_terminal() -> bool:
    """Whether standard output is a terminal on which a view can be drawn again in place (not with TERM=dumb)."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def note(line: str) -> None:
    """Print a line on standard error, for a person who reads while a command works."""
    print(printable(line), file=sys.stderr, flush=True)


@contextlib.contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Say on standard error what a command works at, and then by the function that it gives: on a terminal in a line
    that goes at the end; elsewhere at once, and not more often than every ten seconds."""
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status(text) as status:
            yield status.update
        return
    note(text)
    said = time.monotonic()

    def say(text: str) -> None:
        nonlocal said
        if time.monotonic() - said > SAY_SECONDS:
            said = time.monotonic()
            note(text)

    yield say


# ----------------------------------------------------------------------------------------------------- set-up


def logged_ranks(world_size: int = 10**9) -> list[int]:
    """The ranks that the environment variable LOG_RANK names (comma-separated, default "0").

    Raises:
        UserError: LOG_RANK is not a list of ranks, or names one that a world of `world_size` does not have.
    """
    text = os.environ.get("LOG_RANK") or "0"
    words = text.split(",") if re.fullmatch(r"[0-9]{1,9}( *, *[0-9]{1,9})*", text) else ()
    ranks = [int(word) for word in words if int(word) < world_size]
    if not ranks or len(ranks) < len(words):
        raise UserError(f'LOG_RANK = "{one_line(text[:40])}": ranks are 0 to {world_size - 1}, as in LOG_RANK=0,1.')
    return ranks


def setup_logging(rank: int, log_file: Path | None) -> logging.Logger:
    """Set up the logger "titanlite" and Python's warnings for this rank, and return the logger.

    A rank that LOG_RANK names writes to standard output. Any other rank writes only its errors, to standard error. Rank
    0 appends every line to `log_file`, whose folder is created, and every `Event` to events.jsonl beside it. A second
    call replaces what the first one set up.

    Raises:
        UserError: LOG_RANK is not a list of ranks.
    """
    ranks = logged_ranks()
    prefix = f"[rank {rank}] " if len(ranks) > 1 or rank not in ranks else ""
    terminal = LogHandler(None, _Line(prefix, "%H:%M:%S"))
    # Other libraries warn on standard error: torch through its own handlers, others through Python's last resort.
    for handler in (terminal, logging.lastResort, *logging.getLogger("torch").handlers):
        if handler is not None and rank not in ranks:
            handler.setLevel(logging.ERROR)
    handlers = [terminal]
    if rank == 0 and log_file is not None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        handlers += _file_handlers(log_file, prefix)

    logging.captureWarnings(True)  # otherwise each rank prints its warnings on the terminal
    logger = logging.getLogger(LOGGER_NAME)
    for target in (logger, logging.getLogger("py.warnings")):
        target.handlers[:] = handlers
        target.propagate = False
    logger.setLevel(logging.INFO)
    return logger


def failed_writes() -> int:
    """Lines of the log and events of this process that could not be written."""
    return sum(getattr(handler, "failed_writes", 0) for handler in logging.getLogger(LOGGER_NAME).handlers)


# -------------------------------------------------------------------------------------------- the end of a process


def say_end(text: str, kind: str) -> None:
    """Report why this process ends: to the launcher, which says it once for all ranks, or on standard error. And in
    train.log, if it is open here.

    Args:
        text: The reason, or a traceback, and how to continue the run.
        kind: What the end is called in events.jsonl.
    """
    text = printable(text).rstrip()  # because it quotes the content of files
    note_end(text, kind)
    with contextlib.suppress(OSError):  # the folder may be gone, or its disk full
        if folder := os.environ.get(ERROR_FOLDER):
            record = json.dumps({"message": text, "time": time.time()})
            Path(folder, f"{os.environ.get('RANK', '0')}.json").write_text(record, encoding="utf-8")
            return
    with contextlib.suppress(OSError):  # the terminal may be gone
        note(text)


def note_end(text: str, kind: str, log_file: Path | None = None) -> None:
    """Write to train.log and events.jsonl only why a run ended. Another process prints it on the terminal.

    Args:
        log_file: None: the file of this process's `setup_logging`, if there is one.
    """
    found = [h for h in logging.getLogger(LOGGER_NAME).handlers if isinstance(h, LogHandler) and h.file is not None]
    for handler in found if log_file is None else _file_handlers(log_file, ""):
        handler.handle(logging.LogRecord(LOGGER_NAME, logging.ERROR, "", 0, Event(text, kind), None, None))


# --------------------------------------------------------------------------------------------------- handlers


class LogHandler(logging.Handler):
    """Appends lines to a file, or prints them. It counts those that cannot be written.

    Attributes:
        file: None is the terminal: standard output, or standard error if only errors are printed. A file is opened
            anew for each line, because a run that begins anew renames it.
    """

    failed_writes = 0

    def __init__(self, file: Path | None, form: logging.Formatter) -> None:
        super().__init__()
        self.file = file
        self.setFormatter(form)

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line of a record."""
        line, terminal = f"{self.format(record)}\n", sys.stdout if self.level < logging.ERROR else sys.stderr
        try:
            if self.file is None:
                terminal.write(line)
                terminal.flush()
            else:
                with self.file.open("a", encoding="utf-8") as file:
                    file.write(line)
        except (OSError, ValueError) as error:  # a full disk, a terminal that is gone, a stream that is closed
            self.failed_writes += 1
            if self.failed_writes == 1:
                where = self.file or "the terminal"
                logging.getLogger(record.name).warning(f"The run goes on, but cannot write to {where}: {error}")
            if self.file is None:
                drop_output(terminal)


class _Line(logging.Formatter):
    """A line of the log: time, rank, the level of warnings and errors only, message.

    A message can quote a file, so its control characters are escaped, and its further lines are indented. So none of
    them looks like a line of the log.
    """

    def __init__(self, prefix: str, time_format: str) -> None:
        super().__init__(f"[%(asctime)s] {prefix}%(shown_level)s%(message)s", time_format)

    def format(self, record: logging.LogRecord) -> str:
        record.shown_level = f"{record.levelname}: " if record.levelno > logging.INFO else ""
        return printable(super().format(record)).replace("\n", "\n    ")


class _EventLine(logging.Formatter):
    """A line of events.jsonl: {"time": Unix time, "event": kind, "step": int or null, "text": the log's line,
    ...details}."""

    def format(self, record: logging.LogRecord) -> str:
        event = cast(Event, record.msg)
        text = printable(event[-LONGEST_EVENT:])
        values = {"time": record.created, "event": event.kind, "step": event.step, "text": text, **event.details}
        return json.dumps(values)


def _file_handlers(log_file: Path, prefix: str) -> list[LogHandler]:
    """Handlers for the log and the events."""
    events = LogHandler(log_file.with_name(EVENTS_FILE), _EventLine())
    events.addFilter(lambda record: isinstance(record.msg, Event))
    return [LogHandler(log_file, _Line(prefix, "%Y-%m-%d %H:%M:%S")), events]
