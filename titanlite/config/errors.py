"""Errors that the user can correct. Each is printed as one message without a traceback, and has an exit code."""

import re

# Environment variable that the launcher sets to a folder. A worker that fails writes the reason there, to <rank>.json.
# A worker that hangs writes there where it hangs, to <rank>.hang.json.
ERROR_FOLDER = "TITANLITE_ERROR_FOLDER"


# Characters that control a terminal, end a line, change the direction of writing, or are invisible: the control
# characters except tab and line feed, Unicode's line and paragraph separators, its bidirectional controls, its tags,
# and surrogates, which are no text.
_UNSAFE = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufff9-\ufffb\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    """`text` made safe for a terminal or a log: control characters become escapes such as \\x1b.

    Line feeds and tabs stay. Text that is already escaped does not change.
    """
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """`printable` text without line feeds, so that no part of it looks like a separate line."""
    return printable(text).replace("\n", "\\n")


def counted(number: int, noun: str) -> str:
    """Such as "1 rank" and "1,024 ranks"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


class UserError(Exception):
    """A wrong job file, command or input. The message says what was found, what is allowed, and what to do."""

    exit_code = 2

    def __str__(self) -> str:
        return printable(super().__str__())  # because it quotes the content of files


class GuardError(UserError):
    """A guard stopped the run (non-finite loss)."""

    exit_code = 3


class CheckpointError(UserError):
    """There is no usable checkpoint, or the last step could not be saved."""

    exit_code = 4


class Damage(CheckpointError):
    """The content of a checkpoint is damaged. The message names the file. Another checkpoint may be good."""


class StoppedBySignal(UserError):
    """A signal stopped the run after it was saved. A new start continues it."""

    exit_code = 75


class StoppedUnsaved(UserError):
    """A signal stopped a run that saves nothing. The exit code is that of a process that was ended by the signal."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number
