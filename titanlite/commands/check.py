"""`titanlite check`: reports what training would refuse, without starting anything."""

from __future__ import annotations

from collections.abc import Sequence

from titanlite.config.errors import printable
from titanlite.config.options import OptionRanks, Options, parse_beside_job
from titanlite.data.amounts import toy_note
from titanlite.data.tokenizer import load_tokenizer
from titanlite.load_run import load_run, world_size
from titanlite.observe.gpus import check_memory


class Check(Options):
    """Check a job and print OK or all of its mistakes, without starting anything."""

    world_size: OptionRanks | None = None
    """Number of ranks: the processes of all machines together, on any devices. Left out: the environment variable
    WORLD_SIZE, or 1 without it, on this machine."""


def main(argv: Sequence[str]) -> None:
    """Run the subcommand. Raises UserError: the job or an option is wrong."""
    options, words = parse_beside_job(Check, argv, "check")
    ranks = options.world_size or world_size()
    run = load_run(words, ranks)
    check_memory(run, elsewhere=options.world_size is not None)
    print(f"OK: {run.job.job.config_file or 'the job'} can start on {ranks} rank{'s' if ranks != 1 else ''}.")
    if note := toy_note(run, load_tokenizer(run.tokenizer_path, run.job)):
        print(printable(f"\n{note}"))
