"""What a person does after a run has ended early: the last lines that it says.

This needs no torch, because the launcher says these lines for a worker that could not.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from titanlite.checkpoint import step_folders
from titanlite.config.run import Run

COMMAND = (
    "TITANLITE_COMMAND"  # an environment variable: the launcher's command, after the variables that were set for it
)


def how_to_go_on(run: Run, argv: Sequence[str]) -> str:
    """The newest checkpoint of the run, and the command that goes on after it.

    Args:
        argv: The words after `titanlite train` or `titanlite launch`.
    """
    command = _command_line(argv)
    if not run.job.checkpoint.enable:
        return f"Nothing is saved, because checkpoint.enable is false. To start again: {command}"
    saved = step_folders.list_checkpoints(run.checkpoint_folder)
    if not saved:
        return f"Nothing is saved. To start again: {command}"
    return (
        f"The last good step is {step_folders.step_of(saved[-1])}, saved in {saved[-1]}. To go on after it: {command}"
    )


def is_saved(run: Run) -> bool:
    """Whether a start of this run would go on from a checkpoint."""
    return run.job.checkpoint.enable and bool(step_folders.list_checkpoints(run.checkpoint_folder))


def _command_line(argv: Sequence[str]) -> str:
    """What was typed on this node, as far as this process can know."""
    return " ".join([os.environ.get(COMMAND, "titanlite train"), *map(shlex.quote, argv)])
