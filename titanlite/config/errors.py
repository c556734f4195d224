"""Define errors that users can fix, with their exit codes, and make text safe to print.

Commands print the message of a `UserError` without a traceback.
"""

import re

ERROR_FOLDER = "TITANLITE_ERROR_FOLDER"
"""Environment variable with the folder in which ranks report problems to the launcher.

A failing rank writes its error to RANK.json, and a hanging rank writes its stack to RANK.hang.json.
"""

# Control characters except tab and line feed, line and paragraph separators, bidirectional
# controls, tags, and surrogates. They can control a terminal, forge lines, or hide text.
_UNSAFE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
    r"\ud800-\udfff\ufff9-\ufffb\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    r"""Escape control characters in `text`, so that it is safe to print in a terminal or log.

    For example, the escape character becomes the four characters \x1b. Line feeds and tabs are
    kept. Escaping twice has the same result as escaping once.
    """
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """Escape control characters and line feeds in `text`, so that it takes exactly one line."""
    return printable(text).replace("\n", "\\n")


def format_count(number: int, noun: str) -> str:
    """Format a number with its noun, such as "1 rank" or "1,024 ranks"."""
    plural = "" if number == 1 else "s"
    return f"{number:,} {noun}{plural}"


class UserError(Exception):
    """An error that the user can fix, such as an invalid job file, option or input file.

    The message states the problem and how to fix it.

    Attributes:
        exit_code: Exit code of a command that raises the error.
        event: Kind of the event that is logged, for `titanlite runs`, if the error ends a run.
        step: Number of completed optimizer steps, if the error ended training.
    """

    exit_code = 2
    event = "user error"
    step: int | None = None

    def __str__(self) -> str:
        """Return the message, with control characters escaped, because it may quote a file."""
        return printable(super().__str__())


class GuardError(UserError):
    """Raised when a guard stops the run, for example because of a non-finite loss.

    The section [guards] of a job configures the guards.
    """

    exit_code = 3
    event = "guard"


class CheckpointError(UserError):
    """Raised if no checkpoint can be used, or if the state after the last step was not saved."""

    exit_code = 4


class Damage(CheckpointError):
    """Raised if a checkpoint is damaged. The message names the damaged file.

    You can catch this and try an older checkpoint.
    """


class StoppedBySignal(UserError):
    """Raised when a signal such as SIGTERM has stopped a run and the run has saved a checkpoint.

    If you start the run again, it resumes from this checkpoint.
    """

    exit_code = 75
    event = "stop"


class StoppedUnsaved(UserError):
    """Raised when a signal stops a run that does not save checkpoints, so its progress is lost.

    The exit code is 128 + the signal number, the shell convention for a process killed by a signal.

    Args:
        message: Message for the user.
        number: Number of the signal.
    """

    event = "stop"

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number
