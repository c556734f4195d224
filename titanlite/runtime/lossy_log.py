"""Log handlers that a full disk cannot stop.

Invariant: a line that cannot be written costs no run and no traceback. The first one is said by the handlers that still
can write, and each is counted.
"""

from __future__ import annotations

import logging
import logging.handlers
import sys


class LossyHandler(logging.StreamHandler):
    """Counts the lines that cannot be written.

    Attributes:
        failed_writes: Their number.
    """

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


class RunFileHandler(LossyHandler, logging.handlers.WatchedFileHandler):
    """Appends to a file of a run, and continues in a new one if it is renamed."""

    def close(self) -> None:
        try:
            super().close()
        except OSError:  # the lines that it still holds were counted
            logging.Handler.close(self)
