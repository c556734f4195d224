"""`titanlite prove`: check that a job computes what it should, before you run it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field

from titanlite.commands.common import format_table, run_on_ngpu_ranks
from titanlite.config.certificate import FOLDER
from titanlite.config.errors import UserError
from titanlite.config.files import find_write_problem, make_folder
from titanlite.config.options import (
    AsJson,
    OptionPath,
    OptionRanks,
    Options,
    parse_options_and_job,
)
from titanlite.load_run import read_world_size
from titanlite.prove.report import (
    format_summary,
    table_rows,
    write_certificate,
)
from titanlite.prove.shrink import parse_original, shrink

MAX_RANKS = 64
"""Maximum number of ranks that the command starts itself. Each is a process of about 0.5 GB."""
COLUMNS = ("check", "count", "worst error", "tolerance", "result", "where")


class Prove(Options):
    """Train a scaled-down job in the same parallel layout, and compare each step with a reference.

    The reference computes the same steps in one process, in float64, with plain formulas. The
    command exits with code 0 if all numbers agree, with 3 if they differ, and with 2 if the job is
    invalid.
    """

    world_size: OptionRanks | None = None
    """Number of ranks of the small job. Default: WORLD_SIZE or NGPU, or 2 ranks along each parallel
    dimension of the job."""
    steps: Annotated[int, Field(ge=2)] = 4
    """Number of steps to train and compare."""
    out: OptionPath | None = None
    """Folder for the certificate. Default: the folder `proof` in job.dump_folder."""
    as_json: AsJson = False
    """Print the certificate as one JSON object and nothing else."""


class NotProven(UserError):
    """Raised if a job and the reference compute different numbers."""

    exit_code = 3


def main(argv: Sequence[str]) -> None:
    """Run `titanlite prove`: compare a small version of a job with a reference.

    Raises:
        UserError: If the job or an option is invalid.
        NotProven: If a number differs by more than its tolerance.
    """
    # Derive the small job, and start its ranks.
    options, words = parse_options_and_job(Prove, argv, "prove")
    job = parse_original(words)
    out = (options.out or Path(job.job.dump_folder, FOLDER)).absolute()
    write_problem = find_write_problem(out)
    if write_problem:
        option = "job.dump_folder" if options.out is None else "--out"
        raise UserError(f"{option}: {write_problem}")
    small_job = shrink(job, choose_world_size(options.world_size), options.steps, out)
    world_size = small_job.run.world_size
    has_launcher = "WORLD_SIZE" in os.environ
    if not has_launcher and world_size > MAX_RANKS:
        raise UserError(
            f"--world-size {world_size}: at most {MAX_RANKS} ranks can start here. "
            "For more, start the command with torchrun on several nodes."
        )
    make_folder(out)
    # With several ranks, run this command in NGPU processes instead, and exit.
    os.environ["NGPU"] = str(world_size)
    run_on_ngpu_ranks("prove", argv)

    # Train the small job, and compare it with the reference.
    from titanlite.prove.prove import prove  # slow, because it imports torch

    certificate = prove(job, small_job, out)
    if certificate is None:  # only rank 0 has it
        return

    # Write and print the certificate.
    path = write_certificate(certificate, out)
    if options.as_json:
        print(certificate.model_dump_json())
    else:
        print(f"{format_summary(certificate)}\n")
        print(format_table(COLUMNS, table_rows(certificate)))
        print(f"\nWrote {path}.")
        if certificate.proven:
            print("Proven: the layout computes what the reference computes.")
    if not certificate.proven:
        raise NotProven(certificate.first_difference)


def choose_world_size(option: int | None) -> int | None:
    """Return the number of ranks on which `titanlite prove` runs the small job, or None.

    Args:
        option: Value of the option --world-size, or None if it is not set.

    Returns:
        The number of ranks that a launcher such as torchrun has started. Without a launcher,
        `option` or else the environment variable NGPU, or None if neither is set.

    Raises:
        UserError: If a launcher has started a number of ranks that differs from `option`, or NGPU
            is invalid.
    """
    # A launcher has already started the ranks.
    if "WORLD_SIZE" in os.environ:
        world_size = read_world_size()
        if option is not None and option != world_size:
            raise UserError(
                f"--world-size {option}: the launcher has started {world_size} ranks. "
                "Leave the option out."
            )
        return world_size

    if option is not None:
        return option
    return _read_ngpu()


def _read_ngpu() -> int | None:
    """Return the environment variable NGPU, or None if it is not set.

    Raises:
        UserError: If its value is not a positive integer.
    """
    value = os.environ.get("NGPU")
    if not value:
        return None
    if not value.isdecimal() or int(value) == 0:
        raise UserError(f"NGPU must be a positive integer, got {value!r}.")
    return int(value)
