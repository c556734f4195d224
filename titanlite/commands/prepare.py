"""`titanlite prepare`: tokenizes the data of a job once, for many runs."""

from __future__ import annotations

import os
from collections.abc import Sequence

from pydantic import PositiveInt

from titanlite.config.options import OptionPath, Options, parse_beside_job
from titanlite.load_run import load_run


class Prepare(Options):
    """Tokenize the data of a job once, into shards that training maps into memory."""

    out: OptionPath
    """Folder for the shards. The work of an interrupted `prepare` in this folder is kept and continued."""
    workers: PositiveInt | None = None
    """Number of processes that tokenize. Left out: one per core of the machine."""


def main(argv: Sequence[str]) -> None:
    """Run the subcommand. Raises UserError: the job or an option is wrong, or the shards cannot be written."""
    options, words = parse_beside_job(Prepare, argv, "prepare")
    run = load_run(words, world_size=1)
    from titanlite.data.prepare import prepare

    prepare(run, options.out, options.workers or os.cpu_count() or 1)
