"""`titanlite profile`: measure which operations take the time of a training step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

from pydantic import Field, NonNegativeInt

from titanlite.commands.common import print_result, run_on_ngpu_ranks
from titanlite.config.options import AsJson, OptionPath, Options, parse_options_and_job
from titanlite.load_run import load_run, read_world_size


class Profile(Options):
    """Train a few steps of a job and profile them. Use NGPU=N or torchrun to start several ranks.

    Profiling trains new weights on the data of the job and changes no file of a run. Pass
    `--profiling.profiler_ranks` to select ranks, and `--profiling.enable_memory_snapshot` to record
    memory.
    """

    steps: Annotated[int, Field(ge=1, le=1000)] = 3
    """Number of steps to profile. More steps make the traces larger."""
    warmup: NonNegativeInt = 3
    """Number of steps to train before profiling. The first step compiles the model and is slow."""
    out: OptionPath | None = None
    """Folder for traces, which are written to its subfolder `profile`. Default: job.dump_folder."""
    as_json: AsJson = False
    """Print one JSON object and nothing else."""


def main(argv: Sequence[str]) -> None:
    """Run `titanlite profile`: train a few steps, and print their slowest operations.

    Raises:
        UserError: If the job or an option is invalid.
    """
    options, words = parse_options_and_job(Profile, argv, "profile")
    run_on_ngpu_ranks("profile", argv)  # with NGPU=N, start N processes, and exit when they end
    # Without --out, the traces go to the output folder of the job, so check it as for training.
    run = load_run(words, read_world_size(), trains=options.out is None)

    # Importing torch is slow, so invalid options are reported first.
    from titanlite.train.profile_steps import profile_steps

    profiles = profile_steps(run, options.steps, options.warmup, options.out)
    lines = []
    for profile in profiles:
        lines.append(f"rank {profile.rank}\n{profile.table}")
        lines.append(f"To view the trace, open it in https://ui.perfetto.dev: {profile.trace}")
    result = {"profiles": [asdict(profile) for profile in profiles]}
    print_result(result, "\n".join(lines), options.as_json)
