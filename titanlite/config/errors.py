"""Errors that a person can mend: printed as one message without a traceback, each with its exit code.

May import nothing of titanlite.
"""

# Set by the launcher to a folder where a worker leaves the reason of its end, as <rank>.json, and where it hangs, as
# <rank>.hang.json.
ERROR_FOLDER = "TITANLITE_ERROR_FOLDER"


# What commands a terminal, ends a line, turns the direction of writing, or hides: control characters but tab and line
# feed, Unicode's line and paragraph separators, its bidirectional controls, tags, and surrogates, which are no text.
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
    """`text` for a terminal or a log, whatever file it came from: control characters become escapes such as \\x1b.

    Line feeds and tabs stay. Text that is escaped already does not change.
    """
    return text.translate(_ESCAPES)


def one_line(text: str) -> str:
    """`printable` text of which no part can pass for a line of its own."""
    return printable(text).replace("\n", "\\n")


class UserError(Exception):
    """A wrong job file, command or input. The message names what was found, what is allowed and the remedy."""

    exit_code = 2

    def __str__(self) -> str:
        return printable(super().__str__())  # it quotes what stands in files


class GuardError(UserError):
    """A guard stopped the run (non-finite loss)."""

    exit_code = 3


class CheckpointError(UserError):
    """No usable checkpoint, or none of the last step."""

    exit_code = 4


class Damage(CheckpointError):
    """A checkpoint does not hold what it should; the message names the file. Another one may be good."""


class StoppedBySignal(UserError):
    """A signal stopped the run after it was saved; starting again goes on."""

    exit_code = 75


class StoppedUnsaved(UserError):
    """A signal stopped a run that saves nothing: the exit code is that of a process which the signal ends."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + number
