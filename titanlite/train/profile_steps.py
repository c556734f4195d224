"""A few steps of a job under the profiler: what `titanlite profile` and `titanlite.profile_steps` call.

Invariant: it reads the job's data and trains fresh weights. It loads and saves no checkpoint, and writes nothing but
the files of the profile.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch.profiler import record_function

from titanlite.config.errors import UserError
from titanlite.config.files import not_writable
from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.data.loader import Loader, OutOfData
from titanlite.data.tokenizer import load_tokenizer
from titanlite.load_run import check_run, world_size
from titanlite.observe.flops import state_bytes
from titanlite.observe.profiler import Profiler
from titanlite.observe.step_profile import StepProfile
from titanlite.optim.schedule import learning_rate
from titanlite.parallel.init_weights import check_memory
from titanlite.parallel.mesh import Mesh, build_mesh
from titanlite.parallel.parallelize import build_model
from titanlite.runtime.events import Event
from titanlite.runtime.world import process_group
from titanlite.train.out_of_memory import is_out_of_memory
from titanlite.train.places import check_countable, counted
from titanlite.train.update import Update


def profile_steps(
    job: JobConfig | Run,
    steps: int = 3,
    warmup: int = 3,
    out: str | os.PathLike[str] | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> tuple[StepProfile, ...]:
    """Train `warmup` steps and then profile `steps` steps. Under torchrun all ranks call it, and all get the result.

    It starts the world of ranks and ends it.

    Args:
        job: A JobConfig is checked first; a Run has been checked already. [profiling] names the ranks that are
            profiled, and says whether the memory is, too.
        out: The files go to the folder `profile` in it. None: job.dump_folder.
        log: Is called with lines about what is done.

    Returns:
        A profile of each rank of profiling.profiler_ranks.

    Raises:
        UserError: the job breaks a rule, its data cannot be read or is too short, it does not fit into memory, or the
            files cannot be written.
    """
    run = job if isinstance(job, Run) else check_run(job, world_size())
    folder = run.dump_folder if out is None else Path(out)
    if problem := not_writable(folder.absolute()):
        raise UserError(f"{folder}: {problem}")
    own = {"profile_freq": warmup + steps, "profiler_warmup": warmup, "profiler_active": steps, "profiler_repeat": 1}
    settings = run.job.profiling.model_copy(update={"enable_profiling": True, **own})

    def say(line: str) -> None:
        if isinstance(line, Event):  # the rest is in what is returned
            log(line)

    with process_group(run.job) as device:
        check_countable(run, device)
        check_memory(run, state_bytes(run), device)
        mesh = build_mesh(run.degrees, device.type)
        tokenizer = load_tokenizer(run.tokenizer_path)
        loader = Loader(run, tokenizer, mesh.data_rank, mesh.data_group, device)
        try:
            loader.start()
            sharded = build_model(run, mesh, device, log)
            update = Update(run, mesh, sharded, device)
            update.precompute_scales()
            profiler = Profiler(settings, folder, dist.get_rank(), device, say, partial(counted, sharded, update))
            for number in range(1, warmup + steps + 1):
                with profiler.step(number):
                    with record_function("data"):
                        batch = loader.next_global_batch()
                    lr = learning_rate(number, run.job.optimizer.lr, run.job.lr_scheduler, run.job.training.steps)
                    update(batch.microbatches, batch.num_valid_tokens, lr)
            return _gathered(profiler.latest, settings.profiler_ranks or tuple(range(run.world_size)), mesh)
        except OutOfData as end:
            raise UserError(f"The data ends before step {warmup + steps}: {end}. Profile fewer steps.") from None
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise UserError(f"Out of memory in a profiled step; `titanlite plan` says what takes it. {error}") from None
        finally:
            loader.close()


def _gathered(own: StepProfile | None, ranks: tuple[int, ...], mesh: Mesh) -> tuple[StepProfile, ...]:
    """The profiles of all ranks. Raises UserError: one is missing."""
    found: list[StepProfile | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own, mesh.world_group)
    if missing := [rank for rank in ranks if found[rank] is None]:
        raise UserError(f"There is no profile of rank {missing[0]}; it has said why.")
    return tuple(profile for profile in found if profile is not None)
