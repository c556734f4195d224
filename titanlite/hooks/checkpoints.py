"""Save checkpoints during a run and resume from the newest one at the start.

Invariant: A checkpoint contains the state after exactly its step, including the state that hooks
add in `Hook.saving`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from titanlite.checkpoint.live_state import LiveState
from titanlite.checkpoint.load import Resumer
from titanlite.checkpoint.manifest import BEST_CHECKPOINT, CheckpointContext
from titanlite.checkpoint.mirror import Mirror
from titanlite.checkpoint.save import Saver
from titanlite.config.errors import CheckpointError
from titanlite.config.run import Run
from titanlite.config.schema import JobConfig
from titanlite.data.tokenizer_files import write_tokenizer
from titanlite.hooks.hook import Hook
from titanlite.hooks.hook_state import hook_tensors, prepare_hooks_for_loading
from titanlite.observe.flops import DTYPE_BYTES, num_params
from titanlite.optim.build import has_modes
from titanlite.optim.clip import StepSums
from titanlite.runtime.rank_group import RankGroup

if TYPE_CHECKING:
    from titanlite.train.trainer import Trainer


def create_checkpoint_context(trainer: Trainer, job: JobConfig) -> CheckpointContext:
    """Describe the checkpoints of a run: their folder, and the tensors to save and load.

    This also creates a process group of all ranks. When you no longer need the result, destroy the
    group with `result.ranks.close()`.

    Args:
        trainer: Trainer whose model, optimizer and hooks are saved and loaded.
        job: Job to compare with the job in each checkpoint.
    """
    live_state = LiveState(
        model=trainer.model,
        optimizer=trainer.optimizer,
        new_optimizer=trainer.train_step.new_optimizer,
        hook_tensors=partial(hook_tensors, trainer.hooks),
        prepare_hooks=partial(prepare_hooks_for_loading, trainer.hooks, trainer.warn),
    )
    return CheckpointContext(
        config=job.checkpoint,
        folder=trainer.run.checkpoint_folder,
        live=live_state,
        ranks=RankGroup(job.checkpoint.timeout_seconds),
        log=trainer.log,
        job=job.model_dump(mode="json"),
    )


def create_resumer(trainer: Trainer, context: CheckpointContext) -> Resumer:
    """Create a `Resumer`, with which you can load checkpoints into a trainer.

    The resumer rejects checkpoints that do not match the job, the tokenizer or the data of the run.
    """
    return Resumer(
        context,
        is_same_tokenizer=trainer.tokenizer.is_known_as,
        compare_data=trainer.loader.compare,
    )


class Checkpointer(Hook):
    """Saves the checkpoints of a run and resumes the run from the newest one.

    If checkpoint.enable is true, the trainer creates a Checkpointer on every rank. All ranks must
    call each method together. In the list of hooks, the Checkpointer precedes all hooks that change
    tensors in `before_update`, because its own `before_update` waits until a save has copied them.
    """

    def __init__(self, trainer: Trainer) -> None:
        """Store the trainer without reading any files. Call `load` before any other method."""
        self._trainer = trainer
        self._step_to_save: int | None = None
        self._resources = ExitStack()
        self._mirror: Mirror | None = None

    def load(self) -> None:
        """Resume from the newest valid checkpoint, or else load checkpoint.initial_load_path.

        If neither exists, keep the randomly initialized weights. Also prepare the run for saves.

        Raises:
            UserError: If the disk lacks space for a checkpoint, or if the job does not match the
                checkpoint.
            CheckpointError: If there are checkpoints but none is valid.
        """
        self._prepare()

        state = self._resumer.load()
        if state is not None:
            self._trainer.load_state_dict(state)
            self._saver.loaded_step = state["step"]
            # The link `best` may be outdated if checkpoint.load_step was used or if the previous
            # process was killed.
            self._saver.update_best_link()

        if self._mirror is not None:
            self._mirror.begin(self._trainer.steps_done)  # from now on, copy new checkpoints

    def _prepare(self) -> None:
        """Create the checkpoint folder and the objects that load, save and mirror checkpoints.

        If the job has a mirror (a URL to which checkpoints are copied), also download from it the
        checkpoints that the run needs but does not have.

        Raises:
            UserError: If the disk lacks space for a checkpoint, or if the job does not match the
                checkpoints on the mirror.
            CheckpointError: If the mirror cannot be read, or if it has checkpoints but none is
                valid and there is no local checkpoint.
        """
        trainer = self._trainer
        context = create_checkpoint_context(trainer, trainer.job)
        self._resumer = create_resumer(trainer, context)
        self._resources.callback(context.ranks.close)  # destroys the process group for checkpoints
        context.prepare_folder()
        context.check_free_space(_estimate_bytes(trainer.run))

        if trainer.job.checkpoint.mirror is not None:
            self._mirror = Mirror(context, check_job=self._resumer.check_job)
            self._resources.callback(self._mirror.close)
            self._mirror.restore()
        self._create_saver(context)

    def _create_saver(self, context: CheckpointContext) -> None:
        """Create the `Saver` of the run and make it notify all hooks after each save."""
        trainer = self._trainer
        max_seq_len = trainer.run.arch.max_seq_len
        write_files = partial(write_tokenizer, trainer.tokenizer, max_seq_len=max_seq_len)

        def notify_hooks(step: int) -> None:
            for hook in trainer.hooks:
                hook.saved(step)

        self._saver = Saver(context, write_files, on_saved=notify_hooks, mirror=self._mirror)
        self._resources.callback(self._saver.close)

    def before_update(self, step: int, sums: StepSums, skip: Tensor) -> None:
        """Wait until the save in progress, if any, has copied the weights and hook tensors.

        This takes time only with checkpoint.async_mode = "async_with_pinned_mem", which copies them
        while the next step computes.
        """
        self._saver.wait_for_copies()

    def save_if_best(self, step: int, loss: float) -> None:
        """Request a save of `step` if its validation loss is lower than for all saved checkpoints.

        Args:
            step: The step that has just been validated.
            loss: Validation loss after this step.
        """
        if self._saver.is_best(loss):
            self._request_save(step)

    def _request_save(self, step: int) -> None:
        """Make `is_due` return True for `step`, so that the trainer saves after this step."""
        self._step_to_save = step

    def is_due(self, step: int) -> bool:
        """Return whether `step` must be saved even if no rank requests a save.

        This is the case after a rollback and after a validation with the lowest loss so far.
        """
        return step == self._step_to_save

    def roll_back(self, step: int) -> int | None:
        """Replace the state after `step` with the newest valid checkpoint from an earlier step.

        This restores weights, optimizer state and hook tensors. The step count and the data
        position do not change: training continues with step `step` + 1. If the run resumes from
        `step`, it must also start from the restored state, so request a save.

        Args:
            step: The step that has just been completed, such as one with a loss spike.

        Returns:
            The step of the loaded checkpoint, or None if there is no earlier checkpoint.
        """
        self._saver.wait_until_saved()
        loaded_step = self._load_before(step)
        if loaded_step is not None:
            self._request_save(step)
        return loaded_step

    def _load_before(self, step: int) -> int | None:
        """Load the newest valid checkpoint before `step`, and return its step, or None."""
        with self._trainer.evaluation_mode():  # checkpoints contain the weights for evaluation
            state = self._resumer.load_before(step)
        if state is None:
            return None
        self._trainer.train_step.precompute_scales()  # FP8 scales depend on the weights
        return state["step"]

    def save(self, step: int, is_last: bool = False) -> None:
        """Save the state after `step` as a checkpoint.

        Outside this class, call `Trainer.save`, which first prepares the optimizer and the hooks.

        Args:
            step: The step that has just been completed.
            is_last: Whether the run ends with this step. If so, apply the checkpoint.last_save_*
                options.
        """
        self._saver.save(step, self._trainer.state_dict, is_last=is_last)
        if has_modes(self._trainer.optimizer):
            # The trainer changes the weights when it leaves evaluation mode.
            self._saver.wait_for_copies()

    def numbers(self, step: int) -> dict[str, Any]:
        """Return metrics about saves since the process started.

        Returns:
            "failed_saves": Number of failed saves. "save_waits": Number of saves that had to wait
            for the previous one. If the job has a mirror, also "failed_mirrors": Number of failed
            copies to the mirror.
        """
        stats = self._saver.stats()
        if self._mirror is not None:
            stats["failed_mirrors"] = self._mirror.num_failed
        return stats

    def ended(self, step: int, stopped: str) -> CheckpointError | None:
        """Wait until the last checkpoint of the run is saved, exported and mirrored.

        Args:
            step: The last step of the run.
            stopped: Description of the signal that stopped the run, or "". The error message starts
                with it.

        Returns:
            An error if the last step could not be saved, exported or copied, or None.
        """
        # Copy the newest checkpoint even if the last save or its export failed.
        problems = [self._complete_save(step), self._complete_mirror()]
        problem = " ".join(filter(None, problems))
        if not problem:
            return None
        return CheckpointError(f"{stopped}. {problem}" if stopped else problem)

    def _complete_save(self, step: int) -> str | None:
        """Wait until the last step is saved and, if requested, exported.

        Return an error message if the save or the export failed, or None on success.
        """
        self._saver.wait_until_saved()
        if self._saver.has_saved(step):  # False also if only the export failed
            return None

        unexported_folder = self._saver.failed_export
        if unexported_folder is not None:
            return (
                f"{unexported_folder} is saved, but exporting it in Hugging Face format failed; "
                "see the log for the reason. Fix it and start again, or run `titanlite export`."
            )
        return (
            f"Could not save the last step, {step}; see the log for the reason. "
            "Fix it and start again to repeat the steps since the newest checkpoint."
        )

    def _complete_mirror(self) -> str | None:
        """Wait until the newest checkpoint is copied to the mirror of the job, if there is one.

        Return an error message, or None on success.
        """
        if self._mirror is None:
            return None
        is_copied = self._mirror.wait_until_copied(self._trainer.report_progress)
        # At the last save, an outdated checkpoint was kept if it was being copied to the mirror.
        self._saver.remove_outdated()
        if is_copied:
            return None
        return (
            "The newest checkpoint is saved, but not copied to "
            f"{self._trainer.job.checkpoint.mirror}. The log has the reason, or "
            "checkpoint.timeout_seconds was too short. Start again to copy it."
        )

    def close(self) -> None:
        """Wait for the save in progress and stop the background threads.

        Unlike other hooks, this uses collectives, so all ranks must call it together. A second call
        does nothing.
        """
        self._resources.close()


class BestCheckpoint(Hook):
    """Saves a checkpoint after each validation with the lowest loss so far (checkpoint.keep_best).

    Each checkpoint stores its validation loss, so a resumed run can find the best checkpoint.
    """

    name = BEST_CHECKPOINT

    def built(self, trainer: Trainer) -> None:
        """Reset the validation loss, and keep a reference to the checkpointer."""
        self._newest: dict[str, Any] = {}  # step and loss of the newest validation
        assert trainer.checkpointer is not None
        self._checkpointer = trainer.checkpointer

    def validated(self, step: int, score: Mapping[str, float]) -> None:
        """Request a save if the validation loss is lower than for all saved checkpoints.

        Ignore a validation before the first step, because it scores untrained weights.
        """
        if step > 0 and math.isfinite(score["loss"]):
            self._newest = {"step": step, "loss": score["loss"]}
            self._checkpointer.save_if_best(step, score["loss"])

    def state_dict(self) -> dict[str, Any]:
        """Return the step and loss of the newest validation, or {} before the first validation."""
        return self._newest

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the step and loss of the newest validation."""
        self._newest = state


def _estimate_bytes(run: Run) -> int:
    """Estimate the size in bytes of a checkpoint with weights, two Adam moments and EMA weights."""
    weight = DTYPE_BYTES[run.job.training.dtype]
    moment = DTYPE_BYTES[run.state_dtype]
    average = 4 if run.job.ema.decay else 0
    return num_params(run.arch) * (weight + 2 * moment + average)
