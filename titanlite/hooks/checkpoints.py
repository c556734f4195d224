"""Checkpoints: a start goes on from the newest one, and saves are made where they are due.

Invariant: what is saved after a step is the state of exactly that step, with what the hooks add to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from titanlite.checkpoint.folder import CheckpointFolder
from titanlite.checkpoint.live_tensors import LiveState
from titanlite.checkpoint.mirror import Mirror
from titanlite.checkpoint.resume import Resumer
from titanlite.checkpoint.save import Saver
from titanlite.config.errors import CheckpointError
from titanlite.config.schema import JobConfig
from titanlite.data.tokenizer_files import write_tokenizer
from titanlite.hooks.hook import Hook, Request, Training
from titanlite.observe.flops import num_params
from titanlite.parallel.float8 import precompute_scales


def open_folder(training: Training, job: JobConfig, changes: bool = True) -> Resumer:
    """What loads the checkpoints of a run. Their folder is open until the trainer closes.

    Args:
        job: compared with those of the checkpoints.
        changes: see `CheckpointFolder`.
    """
    live = LiveState(training.model, training.optimizer, training.hook_tensors)
    path, json_job = training.run.checkpoint_folder, job.model_dump(mode="json")
    folder = CheckpointFolder(job.checkpoint, path, live, training.log, json_job, changes)
    training.opened.callback(folder.ranks.close)
    return Resumer(folder, training.tokenizer.is_known_as, training.loader.compare)


class Checkpoints(Hook):
    """Loads before the run starts, and saves every checkpoint.interval steps and where it is asked to."""

    def built(self, training: Training) -> None:
        self._training, self._interval = training, training.run.job.checkpoint.interval
        self._due = -1  # a step that is saved whatever was asked for
        self._mirror: Mirror | None = None

    def load(self) -> None:
        training, run, job = self._training, self._training.run, self._training.run.job
        self._resumer = open_folder(training, job)
        folder = self._resumer.folder
        weight, moment = (getattr(torch, dtype).itemsize for dtype in (job.training.dtype, run.state_dtype))
        folder.check_room(num_params(run.arch) * (weight + 2 * moment + 4 * bool(job.ema.decay)))
        if job.checkpoint.mirror is not None:
            self._mirror = Mirror(folder, self._resumer.compare)
            training.opened.callback(self._mirror.close)
            self._mirror.restore()
        write_files = partial(write_tokenizer, training.tokenizer, max_seq_len=run.arch.max_seq_len)
        self._saver = Saver(folder, write_files, lambda step: training.tell(Hook.saved, step), self._mirror)
        training.opened.callback(self._saver.close)
        if (state := self._resumer.load()) is not None:
            training.load_state_dict(state)
            self._saver.loaded_step = state["step"]
            self._saver.link_best()  # a kill may have come between a save and the link, or the run goes back
        if self._mirror is not None:
            self._mirror.begin(training.steps_done)

    def wants(self, step: int) -> Request:
        return Request(save=step % self._interval == 0)

    def save_if_best(self, step: int, loss: float) -> None:
        """Save `step`, which has just been done, if no checkpoint has such a low validation loss."""
        if self._saver.improves(loss):
            self._due = step

    def go_back(self, step: int) -> int | None:
        """Load weights, optimizer and the tensors of the hooks, nothing else, from the newest good checkpoint, and have
        that saved as `step`, which has just been done. All ranks call it together, before this hook's `act`.

        Returns:
            The step of that checkpoint; None: there is none, and nothing has changed.
        """
        self._saver.settle()
        if (state := self._resumer.load_before(step, forget=True)) is None:
            return None
        precompute_scales(self._training.model, self._training.run.job.float8)
        self._due = step
        return state["step"]

    def act(self, step: int, asked: Request) -> None:
        if asked.save or step == self._due:
            self._training.tell(Hook.saving, step)
            with self._training.meter.timing("checkpoint"):
                self._saver.settle()
                self._saver.save(step, self._training.state_dict(), last=asked.last)

    def numbers(self, step: int) -> Mapping[str, Any]:
        return self._saver.stats() | ({"failed_mirrors": len(self._mirror.failed)} if self._mirror is not None else {})

    def ended(self, step: int, stopped: str) -> CheckpointError | None:
        self._saver.settle()
        if self._saver.holds(step):
            if self._mirror is None:
                return None
            arrived = self._mirror.finished(self._training.alive)
            self._saver.purge()  # again: what was under way to the mirror was kept
            if arrived:
                return None
            text = f"The newest checkpoint is saved, but not in {self._training.run.job.checkpoint.mirror}"
            why = "the log says why, or checkpoint.timeout_seconds were too few"
            return CheckpointError(f"{stopped and f'{stopped}. '}{text}: {why}. Start again to copy it.")
        return CheckpointError(
            f"{stopped and f'{stopped}. '}The save after the last step, {step}, FAILED; the log says why. Once that is "
            "mended, start again: what the newest checkpoint does not hold is trained again."
        )


class BestCheckpoint(Hook):
    """Lets the weights with the lowest validation loss be saved.

    The validation loss of a step is a part of its checkpoint, so that the files alone say which one is the best.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._validated: dict[str, Any] = {}

    def validated(self, step: int, score: Mapping[str, float]) -> None:
        if step and math.isfinite(score["loss"]):  # the weights before the first step do not count
            self._validated = {"step": step, "loss": score["loss"]}
            self._checkpoints.save_if_best(**self._validated)

    def state_dict(self) -> dict[str, Any]:
        return self._validated

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._validated = state
