"""`titanlite data show`: the text that a step of a job reads."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import NonNegativeInt, PositiveInt

from titanlite.config.errors import UserError
from titanlite.config.options import OptionRanks, Options, parse_beside_job
from titanlite.load_run import load_run


class Show(Options):
    """Print the rows of one global batch, with the documents that they consist of and their text."""

    step: PositiveInt = 1
    """Number of the global batch; the first one is 1."""
    row: NonNegativeInt | None = None
    """Number of one row of the batch, counted from 0. Left out: all rows."""
    world_size: OptionRanks = 1
    """Number of ranks of the run. It decides the global batch size if training.global_batch_size is -1."""


def main(argv: Sequence[str]) -> None:
    """Run the subcommand. Raises UserError: the job or an option is wrong, or the data cannot be read."""
    words = list(argv)
    if words[:1] != ["show"] and not {"-h", "--help"} & set(words):
        found = f"`titanlite data {words[0]}` is unknown. " if words else ""
        raise UserError(f"{found}Write `titanlite data show --step N`; `titanlite data --help` explains the options.")
    options, words = parse_beside_job(Show, [word for word in words if word != "show"], "data show")
    run = load_run(words, options.world_size)
    from titanlite.data.show import show_step

    print(show_step(run, options.step, options.row))
