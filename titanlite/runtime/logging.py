"""Log the messages of one rank to the terminal and train.log, and its events to events.jsonl.

Invariant: The terminal shows each line once: all lines of the ranks in LOG_RANK, and the errors of
every rank. Only rank 0 writes the files, and it only appends to them. A line that cannot be written
never stops a run: it is counted, and the first one is reported on the outputs that still work.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from titanlite.config.errors import ERROR_FOLDER, UserError, one_line, printable

LOGGER_NAME = "titanlite"
LOG_FILE = "train.log"
EVENTS_FILE = "events.jsonl"
PROGRESS_INTERVAL = 10.0  # seconds between progress lines of a command without a terminal
MAX_EVENT_LENGTH = 4000  # characters; the end is kept because a traceback ends with its cause
MAX_WORLD_SIZE = 10**9

# Kinds of events that end a run. "failure" is a crash. "user error" is a `UserError`, such as an
# invalid option. Until version 0.3, a "user error" was called "refusal".
ENDS = ("stop", "guard", "user error", "refusal", "failure", "hang", "finish")
LEVEL_OF_END = {"stop": logging.INFO, "stall": logging.WARNING}  # all others are errors


@dataclass(frozen=True)
class Event:
    """A log message that is also written to events.jsonl.

    Attributes:
        text: The message.
        kind: What happened, such as "save" or "skip". Events of a kind in `ENDS`, such as
            "failure", end a run. docs/guides/monitoring.md lists all kinds.
        step: Number of completed optimizer steps, or None if it is unknown.
        details: Further JSON values for the line in events.jsonl.
    """

    text: str
    kind: str
    step: int | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text


def describe_stop(number: int) -> str:
    """Return the message to log when a signal makes a run save a checkpoint and stop.

    Args:
        number: Number of the signal.
    """
    text = f"{signal.Signals(number).name}: Stopping after one or two more steps and a save."
    if number == signal.SIGINT:
        text += " Ctrl-C again stops at once, without saving."
    return text


def drop_output(stream: IO[str]) -> None:
    """Redirect a standard stream to /dev/null, so that later writes to it cannot fail.

    Args:
        stream: `sys.stdout` or `sys.stderr`, for example after its terminal was closed.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def is_live_terminal() -> bool:
    """Return whether standard output is a terminal that can redraw lines in place."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")


def note(line: str) -> None:
    """Print a message on standard error, with control characters escaped."""
    print(printable(line), file=sys.stderr, flush=True)


@contextlib.contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Show a status message on standard error while the `with` block runs.

    A terminal shows a status line, which is removed at the end. Without a terminal, `text` is
    printed immediately, and later messages at most every ten seconds.

    Args:
        text: The first message, for example "Building the model".

    Yields:
        A function that replaces the message.
    """
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status(text) as status:
            yield status.update
        return

    note(text)
    yield _note_at_intervals()


def _note_at_intervals() -> Callable[[str], None]:
    """Return a function that prints a message at most every `PROGRESS_INTERVAL` seconds.

    All other messages are skipped.
    """
    last_time = time.monotonic()

    def update(text: str) -> None:
        nonlocal last_time
        if time.monotonic() - last_time > PROGRESS_INTERVAL:
            last_time = time.monotonic()
            note(text)

    return update


def logged_ranks(world_size: int = MAX_WORLD_SIZE) -> list[int]:
    """Return the ranks whose log lines appear on the terminal.

    The environment variable LOG_RANK lists them, separated by commas, for example "0,1". The
    default is rank 0.

    Raises:
        UserError: If LOG_RANK is not a list of ranks below `world_size`.
    """
    text = os.environ.get("LOG_RANK") or "0"
    ranks = []
    is_list = re.fullmatch(r"[0-9]{1,9}( *, *[0-9]{1,9})*", text) is not None
    if is_list:
        ranks = [int(word) for word in text.split(",")]

    if not is_list or max(ranks) >= world_size:
        raise UserError(
            f'LOG_RANK = "{one_line(text[:40])}": ranks are 0 to {world_size - 1}, '
            "as in LOG_RANK=0,1."
        )
    return ranks


def setup_logging(rank: int, log_file: Path | None) -> logging.Logger:
    """Configure the logger "titanlite" and Python's warnings for this rank.

    - A rank in LOG_RANK logs to standard output.
    - Any other rank logs only errors, to standard error.
    - Rank 0 also appends every line to `log_file`, and every `Event` to events.jsonl beside it.

    A second call replaces the handlers of the first one.

    Args:
        rank: Number of this rank.
        log_file: Path of train.log, whose folder is created. If None, log to the terminal only.

    Returns:
        The logger.

    Raises:
        UserError: If LOG_RANK is not a list of ranks.
    """
    ranks = logged_ranks()
    is_logged = rank in ranks
    # Show the rank if lines of several ranks can appear on the terminal.
    shows_rank = len(ranks) > 1 or not is_logged
    prefix = f"[rank {rank}] " if shows_rank else ""

    terminal = LogHandler(None, _LineFormatter(prefix, "%H:%M:%S"))
    if not is_logged:
        terminal.setLevel(logging.ERROR)
        _silence_libraries()
    handlers = [terminal]
    if rank == 0 and log_file is not None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        handlers += _create_file_handlers(log_file, prefix)
    return _install_handlers(handlers)


def _install_handlers(handlers: list[LogHandler]) -> logging.Logger:
    """Replace the handlers of the logger "titanlite" and of Python's warnings.

    Returns:
        The logger "titanlite".
    """
    logging.captureWarnings(True)  # otherwise every rank prints its warnings on the terminal
    logger = logging.getLogger(LOGGER_NAME)
    for target in (logger, logging.getLogger("py.warnings")):
        target.handlers[:] = handlers
        target.propagate = False
    logger.setLevel(logging.INFO)
    return logger


def _silence_libraries() -> None:
    """Stop libraries from logging warnings to standard error. They still log errors.

    torch uses the handlers of the logger "torch". All other libraries use `logging.lastResort`, the
    default handler of Python.
    """
    for handler in (logging.lastResort, *logging.getLogger("torch").handlers):
        if handler is not None:
            handler.setLevel(logging.ERROR)


def failed_writes() -> int:
    """Return the number of log lines and events that this process could not write.

    The number is logged with the metrics, because a full disk must not stop a run unnoticed.
    """
    handlers = logging.getLogger(LOGGER_NAME).handlers
    return sum(getattr(handler, "failed_writes", 0) for handler in handlers)


def report_end(text: str, kind: str, step: int | None = None) -> None:
    """Report why this process ends: to the launcher if there is one, and in train.log.

    The launcher prints the reason once for all ranks. Without a launcher, or if it cannot be
    reached, the reason is printed on standard error.

    Args:
        text: The reason or a traceback, and how to resume the run.
        kind: Kind of the event in events.jsonl; one of `ENDS`.
        step: Number of completed optimizer steps, if it is known.
    """
    reason = printable(text).rstrip()  # it may quote the content of files
    log_end(reason, kind, step)
    if not _report_to_launcher(reason):
        with contextlib.suppress(OSError):  # the terminal may be closed
            note(reason)


def _report_to_launcher(reason: str) -> bool:
    """Record in a file for the launcher why this rank is exiting.

    Returns:
        True if the file was written, and False if that failed or there is no launcher.
    """
    folder = os.environ.get(ERROR_FOLDER)
    if not folder:
        return False
    rank = os.environ.get("RANK", "0")
    record = json.dumps({"message": reason, "time": time.time()})
    try:
        Path(folder, f"{rank}.json").write_text(record, encoding="utf-8")
    except OSError:  # the folder may have been removed, or its disk is full
        return False
    return True


def record_success() -> None:
    """Report to the launcher that this rank has completed its work, by creating a file.

    Exit code 0 is not enough, because any library can call `os._exit(0)`.
    """
    folder = os.environ.get(ERROR_FOLDER)
    if folder:
        with contextlib.suppress(OSError):  # the launcher was killed and its folder removed
            success_file(Path(folder), os.environ.get("RANK", "0")).touch()


def success_file(folder: Path, rank: int | str) -> Path:
    """Return the path of the file that `record_success` creates, for example "<folder>/3.success".

    Args:
        folder: Temporary folder of the launcher.
        rank: Number of the rank.
    """
    return folder / f"{rank}.success"


def log_end(text: str, kind: str, step: int | None = None, log_file: Path | None = None) -> None:
    """Write why a run ended to train.log and events.jsonl, but not to the terminal.

    Args:
        text: The reason.
        kind: Kind of the event; one of `ENDS` or "stall".
        step: Number of completed optimizer steps, if it is known.
        log_file: Path of train.log. If None, use the file that `setup_logging` opened in this
            process, if any.
    """
    event = Event(text, kind, step)
    level = LEVEL_OF_END.get(kind, logging.ERROR)
    # Pass a record to the file handlers only. A logger would also print it on the terminal.
    record = logging.LogRecord(
        LOGGER_NAME, level, pathname="", lineno=0, msg=event, args=(), exc_info=None
    )
    # New handlers need no `close`, because a `LogHandler` opens its file only to write a line.
    handlers = _find_file_handlers() if log_file is None else _create_file_handlers(log_file)
    for handler in handlers:
        handler.handle(record)


def _find_file_handlers() -> list[LogHandler]:
    """Return the handlers of this process that write to files, as set by `setup_logging`."""
    return [
        handler
        for handler in logging.getLogger(LOGGER_NAME).handlers
        if isinstance(handler, LogHandler) and handler.file is not None
    ]


class LogHandler(logging.Handler):
    """Appends lines to a file or prints them, and counts the lines that cannot be written.

    Attributes:
        file: Path of the file, which is opened for each line because a new run may rename it. If
            None, print on standard output, or on standard error if this handler prints only errors.
        failed_writes: Number of lines that could not be written.
    """

    def __init__(self, file: Path | None, formatter: logging.Formatter) -> None:
        super().__init__()
        self.file = file
        self.failed_writes = 0
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line of a log record to the file or the terminal.

        If this fails, for example because the disk is full, count the failure instead of raising an
        error. The first failure is logged as a warning, which reaches the outputs that still work.
        """
        line = f"{self.format(record)}\n"
        # A rank that prints only errors prints them on standard error.
        terminal = sys.stderr if self.level >= logging.ERROR else sys.stdout
        try:
            self._write(line, terminal)
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            self._handle_failed_write(record, terminal, error)

    def _write(self, line: str, terminal: IO[str]) -> None:
        """Append a line to the file, or print it on `terminal` if this handler has no file."""
        if self.file is None:
            terminal.write(line)
            terminal.flush()
        else:
            with open(self.file, "a", encoding="utf-8", opener=_open_no_follow) as file:
                file.write(line)

    def _handle_failed_write(
        self, record: logging.LogRecord, terminal: IO[str], error: Exception
    ) -> None:
        """Count a failed write, and log a warning after the first one."""
        self.failed_writes += 1
        if self.file is None and not terminal.closed:
            drop_output(terminal)  # discard all later lines, which would also fail
        if self.failed_writes == 1:
            # This handler also gets the warning. If it fails again, it logs no other warning.
            target = self.file or "the terminal"
            text = f"The run continues, but cannot write to {target}: {error}"
            logging.getLogger(record.name).warning(text)


def _open_no_follow(path: str, flags: int) -> int:
    """Open a file for `open(opener=...)`, but fail if the path is a symbolic link.

    Following a link could make this process change a file outside of the output folder.
    """
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


class _LineFormatter(logging.Formatter):
    """Formats a log line: time, rank, level (only warnings and errors), message.

    A message can quote a file. To keep it from imitating other log lines, control characters are
    escaped and all lines after the first are indented.
    """

    def __init__(self, prefix: str, time_format: str) -> None:
        super().__init__(f"[%(asctime)s] {prefix}%(shown_level)s%(message)s", time_format)

    def format(self, record: logging.LogRecord) -> str:
        record.shown_level = f"{record.levelname}: " if record.levelno > logging.INFO else ""
        return printable(super().format(record)).replace("\n", "\n    ")


class _EventFormatter(logging.Formatter):
    """Formats the `Event` of a record as a line of JSON for events.jsonl."""

    def format(self, record: logging.LogRecord) -> str:
        event = record.msg
        assert isinstance(event, Event)
        values = {
            "time": record.created,  # Unix time
            "event": event.kind,
            "step": event.step,
            "text": printable(event.text[-MAX_EVENT_LENGTH:]),
            **event.details,
        }
        return json.dumps(values)


def _create_file_handlers(log_file: Path, prefix: str = "") -> list[LogHandler]:
    """Create the two handlers that write train.log and events.jsonl.

    Args:
        log_file: Path of train.log. events.jsonl is created beside it.
        prefix: Text at the beginning of each line of train.log, such as "[rank 1] ".
    """
    events = LogHandler(log_file.with_name(EVENTS_FILE), _EventFormatter())
    events.addFilter(lambda record: isinstance(record.msg, Event))
    return [LogHandler(log_file, _LineFormatter(prefix, "%Y-%m-%d %H:%M:%S")), events]
