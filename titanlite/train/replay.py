"""Steps of a run once more, from the checkpoint before them: what `titanlite replay` calls.

Invariant: state, rows and computation are those of the run, so on its layout the numbers have the same bits. No file of
the run changes, and the run may go on meanwhile.
"""

from __future__ import annotations

from titanlite.config.errors import UserError
from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.data.loader import OutOfData
from titanlite.hooks.checkpoints import open_folder
from titanlite.hooks.hook import Hook, Training
from titanlite.observe.logged_step import LoggedStep
from titanlite.runtime.logging import note
from titanlite.train.build import guards
from titanlite.train.loop import Trainer


class Earlier(Hook):
    """Loads the newest good checkpoint before a step. Without one, the run begins anew."""

    def __init__(self, step: int, job: JobConfig) -> None:
        self._step, self._job = step, job  # the job as the user has it

    def built(self, training: Training) -> None:
        self._training = training

    def load(self) -> None:
        resumer = open_folder(self._training, self._job, changes=False)
        if (state := resumer.load_before(self._step)) is None:
            resumer.load_initial_weights()
        else:
            self._training.load_state_dict(state)


class _Replayed(Trainer):
    def log(self, line: str) -> None:
        if self.rank == 0:
            note(line)


def replay(run: Run, step: int) -> list[LoggedStep]:
    """The numbers of all steps from the newest good checkpoint before `step` to `step`. All ranks call it together.

    Args:
        run: The job of the run, as config.toml in its output folder has it, on the same number of ranks.

    Raises:
        UserError: the run has no such step, or its data cannot be read.
    """
    if step > run.job.training.steps:
        raise UserError(f"--step {step}: the run has {run.job.training.steps} (training.steps)")
    metrics = run.job.metrics.model_copy(update={"log_freq": 1})
    patient = run.job.guards.model_copy(update={"max_skipped": step})  # for the step that has ended the run
    job, run = run.job, Run(run.job.model_copy(update={"metrics": metrics, "guards": patient}), run.world_size)
    found: list[LoggedStep] = []
    with _Replayed(run, hooks=[Earlier(step, job), *guards()], standard=False) as trainer:
        while trainer.steps_done < step:
            try:
                entry = trainer.step()
            except OutOfData as end:
                raise UserError(f"The data ends before step {step}: {end}.") from None
            assert entry is not None
            found.append(entry)
    return found
