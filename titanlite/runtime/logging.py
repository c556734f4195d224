"""Logging of one rank: to the terminal and to train.log.

Invariant: the terminal shows each line once, from the ranks that the user asked for (LOG_RANK), and errors of all
ranks. Only rank 0 writes the file, and events.jsonl beside it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import time
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from titanlite.config.errors import ERROR_FOLDER, UserError, one_line, printable
from titanlite.runtime.events import EVENTS_FILE, Event, EventsHandler, Kind
from titanlite.runtime.lossy_log import LossyHandler, RunFileHandler

if TYPE_CHECKING:
    from rich.console import Console

LOGGER_NAME = "titanlite"
LOG_FILE = "train.log"


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


def logged_ranks(world_size: int | None = None) -> tuple[int, ...]:
    """The ranks that the environment variable LOG_RANK names (comma-separated, default "0").

    Raises:
        UserError: LOG_RANK is not a list of ranks, or names one that a world of `world_size` does not have.
    """
    text = os.environ.get("LOG_RANK") or "0"
    words = [word.strip() for word in text.split(",") if word.strip()]
    shown = one_line(text[:40])
    if not words or not all(re.fullmatch(r"[0-9]{1,9}", word) for word in words):
        raise UserError(f'LOG_RANK = "{shown}": ranks are allowed, separated by commas, for example LOG_RANK=0,1.')
    ranks = tuple(int(word) for word in words)
    if world_size is not None and max(ranks) >= world_size:
        raise UserError(
            f'LOG_RANK = "{shown}": there is no rank {max(ranks)}. The last of {world_size} is {world_size - 1}.'
        )
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
    handlers: list[logging.Handler] = [_terminal_handler(prefix) if rank in ranks else _error_handler(prefix)]
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


def failed_writes() -> int:
    """Lines of the log and events of this process that could not be written."""
    handlers = logging.getLogger(LOGGER_NAME).handlers
    return sum(handler.failed_writes for handler in handlers if isinstance(handler, LossyHandler))


def note(line: str) -> None:
    """Print a line on standard error, for a person who reads while a command works."""
    print(printable(line), file=sys.stderr, flush=True)


def _file_handlers(log_file: Path, prefix: str) -> list[logging.Handler]:
    """Handlers for the log and the events. They continue in a new file if the old one is renamed."""
    handler = RunFileHandler(log_file, encoding="utf-8")
    events = EventsHandler(log_file.with_name(EVENTS_FILE), encoding="utf-8")
    return [_plain(handler, prefix, "%Y-%m-%d %H:%M:%S"), events]


def _terminal_handler(prefix: str) -> logging.Handler:
    if not is_live_terminal():
        return _plain(LossyHandler(sys.stdout), prefix, "%H:%M:%S")
    from rich.logging import RichHandler

    handler = RichHandler(
        console=terminal_console(),
        show_path=False,
        show_level=False,
        omit_repeated_times=False,
        log_time_format="[%H:%M:%S]",
    )
    handler.setFormatter(_LevelFormatter(f"{prefix}%(message)s"))
    return handler


def _error_handler(prefix: str) -> logging.Handler:
    handler = _plain(LossyHandler(sys.stderr), prefix, "%H:%M:%S")
    handler.setLevel(logging.ERROR)
    return handler


def _plain(handler: logging.Handler, prefix: str, time_format: str) -> logging.Handler:
    handler.setFormatter(_LevelFormatter(f"[%(asctime)s] {prefix}%(message)s", time_format))
    return handler


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
