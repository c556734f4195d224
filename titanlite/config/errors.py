"""Errors that the user can correct. Each is printed as one message without a traceback, and has an exit code."""

# Environment variable that the launcher sets to a folder. A worker that fails writes the reason there, to <rank>.json.
# A worker that hangs writes there where it hangs, to <rank>.hang.json.
ERROR_FOLDER = "TITANLITE_ERROR_FOLDER"


# Characters that control a terminal, end a line, change the direction of writing, or are invisible: the control
# characters except tab and line feed, Unicode's line and paragraph separators, its bidirectional controls, its tags,
# and surrogates, which are no text.
_CONTROLS = (
    (0x00, 0x08), (0x0B, 0x1F), (0x7F, 0x9F), (0x61C, 0x61C), (0x200E, 0x200F), (0x2028, 0x202E), (0x2066, 0x2069),
    (0xD800, 0xDFFF), (0xFFF9, 0xFFFB), (0xE0000, 0xE007F),
)  # fmt: skip
_ESCAPES = {
    code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
    for first, last in _CONTROLS
    for code in range(first, last + 1)
}


def printable(text: str) -> str:
    """`text` made safe for a terminal or a log: control characters become escapes such as \\x1b.

    Line feeds and tabs stay. Text that is already escaped does not change.
    """
    return text.translate(_ESCAPES)


def one_line(text: str) -> str:
    """`printable` text without line feeds, so that no part of it looks like a separate line."""
    return printable(text).replace("\n", "\\n")


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
