"""A few steps of a job under the profiler: what `titanlite profile` and `titanlite.profile_steps` call.

Invariant: it reads the job's data and trains fresh weights. It loads and saves no checkpoint, and writes nothing but
the files of the profile.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from titanlite.config.errors import UserError
from titanlite.config.files import make_folder
from titanlite.config.run import Run
from titanlite.config.schema import JobConfig, Metrics
from titanlite.data.loader import OutOfData
from titanlite.hooks.profiler import Profiler, StepProfile
from titanlite.load_run import check_run, world_size
from titanlite.runtime.logging import working
from titanlite.runtime.world import gathered
from titanlite.train.loop import Trainer


def profile_steps(
    job: JobConfig | Run, steps: int = 3, warmup: int = 3, out: str | os.PathLike[str] | None = None
) -> list[StepProfile]:
    """Train `warmup` steps and then profile `steps` steps. Under torchrun all ranks call it, and all get the result.

    It starts the world of ranks and ends it.

    Args:
        job: A JobConfig is checked first; a Run has been checked already. [profiling] names the ranks that are
            profiled, and says whether the memory is, too.
        out: The files go to the folder `profile` in it. None: job.dump_folder.

    Returns:
        A profile of each rank of profiling.profiler_ranks. Below its table stand the seconds of a step, the tokens per
        second of all ranks and the peak of memory, from step 2 on.

    Raises:
        UserError: the job breaks a rule, its data cannot be read or is too short, or the files cannot be written.
    """
    run = job if isinstance(job, Run) else check_run(job, world_size())
    folder = make_folder(run.dump_folder if out is None else Path(out))
    own = {"profile_freq": warmup + steps, "profiler_warmup": warmup, "profiler_active": steps, "profiler_repeat": 1}
    settings = run.job.profiling.model_copy(update={"enable_profiling": True, **own})
    run = Run(run.job.model_copy(update={"metrics": Metrics(log_freq=warmup + steps)}), run.world_size)
    profiler, logged = Profiler(settings, folder), None
    saying = working("Building the model") if os.environ.get("RANK", "0") == "0" else nullcontext(str)
    with saying as say, Trainer(run, hooks=[profiler], standard=False) as trainer:
        try:
            for number in range(warmup + steps):
                say(f"Training step {number + 1} of {warmup + steps}")
                logged = trainer.step()
        except OutOfData as end:
            raise UserError(f"The data ends before step {warmup + steps}: {end}. Profile fewer steps.") from None
        assert logged is not None  # the last step is logged
        took = f"{logged.step_time:.3g} s a step, {logged.tps:,.0f} tokens/s, {logged.memory_peak:.2f} GiB at the peak"
        found = gathered([replace(own, table=f"{own.table}\n{took}") for own in profiler.profiles])
    return [profile for of_rank in found for profile in of_rank]
