"""Profile a few steps of a job, for `titanlite profile` and `titanlite.profile_steps`."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path

from titanlite.config.errors import UserError
from titanlite.config.files import make_folder
from titanlite.config.run import Run, with_keys
from titanlite.config.schema import JobConfig
from titanlite.data.loader import OutOfData
from titanlite.hooks.profiler import Profiler, StepProfile
from titanlite.load_run import check_run, read_world_size
from titanlite.runtime.logging import working
from titanlite.runtime.world import gathered
from titanlite.train.trainer import Trainer


def profile_steps(
    job: JobConfig | Run, steps: int = 3, warmup: int = 3, out: str | os.PathLike[str] | None = None
) -> list[StepProfile]:
    """Profile a few training steps of a job, starting from randomly initialized weights.

    The function first trains `warmup` steps, and then profiles `steps` steps on the data of the
    job. It creates and destroys the process groups, and writes no files except the profiles. All
    ranks must call it together, and all receive the result.

    Args:
        job: Job to profile. A JobConfig is validated first. A Run has already been validated.
            `[profiling]` selects the ranks, and whether to profile memory.
        steps: Number of steps to profile.
        warmup: Number of steps to train before the profiled ones.
        out: Folder in which the folder `profile` is created. Defaults to job.dump_folder.

    Returns:
        One profile for each rank in profiling.profiler_ranks. The last line of its table shows the
        seconds per step, the tokens per second of all ranks, and the peak memory, all measured from
        step 2 on.

    Raises:
        UserError: If the job is invalid, its data is too short or cannot be read, or the files
            cannot be written.
    """
    run = job if isinstance(job, Run) else check_run(job, read_world_size())
    folder = make_folder(run.dump_folder if out is None else Path(out))
    num_steps = warmup + steps
    settings = {
        # `Trainer.step` rejects steps after the last one.
        "training.steps": max(num_steps, run.job.training.steps),
        "metrics.log_freq": num_steps,
        "profiling.enable_profiling": True,
        "profiling.profile_freq": num_steps,
        "profiling.profiler_warmup": warmup,
        "profiling.profiler_active": steps,
        "profiling.profiler_repeat": 1,
    }
    run = with_keys(run, settings)
    profiler = Profiler(run.job.profiling, folder)

    is_rank0 = os.environ.get("RANK", "0") == "0"
    # On all other ranks, `show` is `str`, which shows nothing.
    progress = working("Building the model") if is_rank0 else nullcontext(str)
    entry = None
    with progress as show, Trainer(run, hooks=[profiler], standard=False) as trainer:
        try:
            for step in range(1, num_steps + 1):
                show(f"Training step {step} of {num_steps}")
                entry = trainer.step()
        except OutOfData as end:
            problem = f"The data ends before step {num_steps}: {end}."
            raise UserError(f"{problem} Profile fewer steps.") from None

        assert entry is not None  # the last step is logged
        summary = (
            f"{entry.step_time:.3g} s a step, {entry.tps:,.0f} tokens/s, "
            f"{entry.memory_peak:.2f} GiB at the peak"
        )
        profiles = [
            replace(profile, table=f"{profile.table}\n{summary}") for profile in profiler.profiles
        ]
        profiles_by_rank = gathered(profiles)
    return list(chain.from_iterable(profiles_by_rank))
