"""Errors that a person can mend: printed as one message without a traceback, each with its exit code.

May import nothing of titanlite.
"""

# Set by the launcher to a folder where a worker leaves the reason of its end, as <rank>.json, and where it hangs, as
# <rank>.hang.json.
ERROR_FOLDER = "TITANLITE_ERROR_FOLDER"


class UserError(Exception):
    """A wrong job file, command or input. The message names what was found, what is allowed and the remedy."""

    exit_code = 2


class GuardError(UserError):
    """A guard stopped the run (non-finite loss)."""

    exit_code = 3


class CheckpointError(UserError):
    """No usable checkpoint, or none of the last step."""

    exit_code = 4


class StoppedBySignal(UserError):
    """A signal stopped the run after it was saved; starting again goes on."""

    exit_code = 75
