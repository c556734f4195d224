"""The interface of hooks: optional parts of a run, guards against bad steps, and plugins.

Invariant: The trainer calls each method of all hooks on every rank, in the same order and at the
same step, so hooks may use collectives, except in `failed` and `close`. Hooks must not cause a host
sync in `gradients`, `before_update`, `updated` and `after_step`, except at steps where a save or a
profile ends. In other methods, they may cause one at some steps, for example to save or to generate
samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from titanlite.config.errors import UserError
from titanlite.observe.logged_step import LoggedStep
from titanlite.optim.clip import StepSums

if TYPE_CHECKING:
    from titanlite.train.step import StepResult
    from titanlite.train.trainer import Trainer


class Request(NamedTuple):
    """Actions to take after a step, such as saving a checkpoint or ending the run.

    `Hook.wants` returns the request of one rank, for example `Request(save=True)`. All ranks then
    take each action that any rank requested.
    """

    stop: int = 0
    """Number of the signal that stops the run, or 0."""
    save: bool = False
    """Save a checkpoint."""
    validate: bool = False
    """Compute the validation loss."""
    data_fails: bool = False
    """A rank cannot read its data for the next step. Set by the training loop only."""
    finish: str = ""
    """Reason to finish the run early, for example "the loss is below 3.0". The run saves a
    checkpoint and exits with code 0. Empty to continue training."""
    last: bool = False
    """The run ends after this step. Set by the training loop only."""

    def __or__(self, other: Request) -> Request:
        """Return a request for all actions of this request and of `other`.

        If both have a reason to finish the run, use the reason from `self`.
        """
        return Request(
            stop=max(self.stop, other.stop),
            save=self.save or other.save,
            validate=self.validate or other.validate,
            data_fails=self.data_fails or other.data_fails,
            finish=self.finish or other.finish,
            last=self.last or other.last,
        )


class Hook:
    """Base class of optional parts of a run, such as a profiler or a weight average.

    To write a hook, override the methods whose events you need. The trainer calls them during the
    run; the default implementations do nothing.

    Only `Trainer.train` calls `train_begins`, `wants`, `check`, `act`, `ended` and `failed`. They
    are not called if a program calls `Trainer.step` in a loop.
    """

    name: str = ""
    """Name under which checkpoints store the state and the tensors of this hook.

    For a registered hook, this defaults to the registered name. Any other hook that overrides
    `state_dict` or `tensors` must set a name that no other hook in the run uses.
    """

    observes_only: bool = False
    """Whether the hook never changes weights, optimizer state or gradients.

    `titanlite replay` runs without plugin hooks and rejects steps that were trained with plugin
    hooks for which this is False.
    """

    def built(self, trainer: Trainer) -> None:
        """Called when the model and optimizer are built, before weights are loaded.

        Store `trainer` here if the hook needs the model, the device or the log.
        """

    def started(self, step: int) -> None:
        """Called once before the first step, after the newest checkpoint (if any) is loaded.

        Args:
            step: Step of the loaded checkpoint, or 0.
        """

    def train_begins(self, step: int) -> None:
        """Called when `Trainer.train` begins, after `started`.

        Args:
            step: Step of the loaded checkpoint, or 0.
        """

    def before_step(self, step: int) -> None:
        """Called when a step begins, before it takes its batch from the loader."""

    def gradients(self, step: int) -> None:
        """Called after the backward pass, before gradients are clipped.

        Must not cause a host sync.
        """

    def before_update(self, step: int, sums: StepSums, skip: Tensor) -> None:
        """Called after gradient clipping, before the weight update. Must not cause a host sync.

        Args:
            step: Number of the step.
            sums: Gradient norm and loss of the step, as tensors on the device.
            skip: Scalar tensor on the device: 1.0 if the weight update will be skipped, else 0.0.
                To skip the update, set it to 1.0 in place on all ranks.
        """

    def updated(self, step: int) -> None:
        """Called after the weight update, before gradients are freed. Also called if it is skipped.

        Must not cause a host sync.
        """

    def after_step(self, step: int, result: StepResult) -> None:
        """Called at the end of a step, when all its kernels have been launched.

        Must not cause a host sync.

        Args:
            step: Number of the step.
            result: Loss and other results, as tensors that the GPU may still be computing.
        """

    def numbers(self, step: int) -> Mapping[str, Any]:
        """Return metrics to log with this step. Called only at log steps.

        Hooks may read GPU tensors here, because a log step waits for the GPU anyway.

        Returns:
            Mapping from metric names to values that JSON can represent. If the name is a
            `LoggedStep` field with a default, the value sets this field. Names of fields without a
            default, such as "loss", are not allowed. Any other name adds a field.
        """
        return {}

    def logged(self, entry: LoggedStep) -> None:
        """Called after the metrics of a step are logged.

        Args:
            entry: The metrics. Times, speeds, memory, `alloc_retries`, `save_waits`,
                `failed_mirrors`, `failed_writes` and the fields of other hooks can differ between
                ranks. All other fields are the same on all ranks.
        """

    def wants(self, step: int) -> Request:
        """Return the actions that this rank requests after `step`, for example a save.

        The trainer combines the requests of all ranks and, after `step`, passes the result to
        `check` and `act`. It calls this method before it trains `step`, or on a GPU one step
        earlier, to hide the communication between ranks.
        """
        return Request()

    def check(self, step: int, request: Request) -> None:
        """Called after a step, before it is saved or validated. Guards can reject the step here.

        Args:
            step: Number of the step.
            request: Combined requests of all ranks.

        Raises:
            GuardError: To end the run without saving the step. All ranks must raise it together.
        """

    def act(self, step: int, request: Request) -> None:
        """Called after a step and its requested saves and validations.

        Do slow work here, such as generating text.

        Args:
            step: Number of the step.
            request: Combined requests of all ranks.
        """

    def validated(self, step: int, score: Mapping[str, float]) -> None:
        """Called after a validation.

        Without checkpoint.keep_best, a step is saved before it is validated, so its checkpoint
        lacks the changes that this call makes to the state of the hook. A run that resumes from
        this step does not repeat a recorded validation, so these changes are lost.

        Args:
            step: Number of the step that was validated.
            score: The results, with the keys of `VALIDATION_CURVES`, such as "loss".
        """

    def sampled(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Called after the model has generated completions for the prompts in samples.prompts.

        Args:
            step: Number of the step.
            samples: One mapping per prompt, with the keys `prompt` and `completion`.
        """

    def saving(self, step: int) -> None:
        """Called before a checkpoint of `step` is written.

        Override this to update the values that `state_dict` and `tensors` return, or to prevent the
        save by raising an exception. With async saves, this can be called before `saved` is called
        for the previous checkpoint.
        """

    def saved(self, step: int) -> None:
        """Called when the checkpoint of `step` is complete on disk.

        After an async save, this is called no later than the next save or the end of the run.
        """

    def ended(self, step: int, stopped: str) -> UserError | None:
        """Called when training has ended. The hooks are called in reverse order.

        Args:
            step: Number of the last step.
            stopped: Description of the signal that stopped the run, or "".

        Returns:
            The error that ends the run, or None.
        """

    def failed(self, error: BaseException) -> None:
        """Called when an exception ends this rank.

        Use this to write debug information, such as a memory snapshot. Must not use collectives,
        because the other ranks may still be training.
        """

    def close(self) -> None:
        """Called when the trainer closes, to release resources. Must not use collectives."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this hook to store in each checkpoint.

        Returns:
            A small JSON value, the same on all ranks. Return large values from `tensors` instead.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned when the checkpoint was saved.

        Called before `started`. Not called if the checkpoint has no state for this hook or the
        state is empty.
        """

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of this hook to store in each checkpoint, by name.

        When the run resumes, the saved values are loaded into these tensors in place. DTensors are
        allowed.

        If a rollback loads a checkpoint without these tensors, they are reset to their values after
        `built`. `started` is not called again.
        """
        return {}

    def resize_tensors(self, sizes: Mapping[str, torch.Size]) -> None:
        """Resize the tensors of this hook before saved values are loaded into them.

        Override this method if the sizes depend on options of the job. Otherwise, loading a
        checkpoint with different sizes raises an error.

        Args:
            sizes: Sizes of the saved tensors, with the keys of `tensors`.
        """
