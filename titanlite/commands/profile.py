"""`titanlite profile`: where the time of a job's step goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

from pydantic import Field, NonNegativeInt

from titanlite.commands.common import print_result, start_ranks
from titanlite.config.options import AsJson, OptionPath, Options, parse_beside_job
from titanlite.load_run import load_run, world_size


class Profile(Options):
    """Train a few steps of a job and say where their time goes. Start several ranks with NGPU=N or with torchrun.

    It trains fresh weights on the job's data, and touches no file of a run. `--profiling.profiler_ranks` chooses ranks,
    and `--profiling.enable_memory_snapshot` adds what is in memory.
    """

    steps: Annotated[int, Field(ge=1, le=1000)] = 3
    """Steps that are profiled. A trace grows with them."""
    warmup: NonNegativeInt = 3
    """Steps before them. The first one is slow, and compiles what is to be compiled."""
    out: OptionPath | None = None
    """Traces go to the folder `profile` in this folder. Left out: job.dump_folder."""
    as_json: AsJson = False
    """Print one JSON object and nothing else."""


def main(argv: Sequence[str]) -> None:
    """Run the command. Raises UserError: the job or an option is wrong, or the job cannot be run here."""
    options, words = parse_beside_job(Profile, argv, "profile")
    start_ranks("profile", argv)
    run = load_run(words, world_size(), trains=options.out is None)

    from titanlite.train.profile_steps import profile_steps  # torch, which a wrong job does not wait for

    profiles = profile_steps(run, options.steps, options.warmup, options.out)
    text = [f"rank {own.rank}\n{own.table}\nOpen in https://ui.perfetto.dev: {own.trace}" for own in profiles]
    print_result({"profiles": list(map(asdict, profiles))}, "\n".join(text), options.as_json)
