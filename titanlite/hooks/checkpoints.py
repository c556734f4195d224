"""Checkpoints: a start goes on from the newest one, and saves are made where they are due.

Invariant: what is saved after a step is the state of exactly that step, with what the hooks add to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from titanlite.checkpoint.folder import CheckpointFolder
from titanlite.checkpoint.live_tensors import LiveState
from titanlite.checkpoint.resume import Resumer
from titanlite.checkpoint.save import Saver
from titanlite.config.errors import CheckpointError
from titanlite.data.tokenizer_files import write_tokenizer
from titanlite.hooks.hook import Hook, Request, Training


class Checkpoints(Hook):
    """Loads before the run starts, and saves every checkpoint.interval steps and where it is asked to."""

    def built(self, training: Training) -> None:
        self._training, self._config = training, training.run.job.checkpoint
        self._validated: tuple[int, float] = -1, math.inf  # step and loss
        self._unsettled: int | None = None  # step of the save that may be under way

    def load(self) -> None:
        training, run = self._training, self._training.run
        folder = CheckpointFolder(self._config, run.checkpoint_folder, training.log)
        training.opened.callback(folder.close)
        live = LiveState(training.model, training.optimizer, training.hook_tensors)
        job = run.job.model_dump(mode="json")
        write_files = partial(write_tokenizer, run.tokenizer_path, max_seq_len=run.arch.max_seq_len)
        self._saver = Saver(folder, live, job=job, write_tokenizer=write_files)
        training.opened.callback(self._saver.close)
        same_tokenizer, compare_data = training.tokenizer.is_known_as, training.loader.compare
        resumer = Resumer(folder, live, job=job, same_tokenizer=same_tokenizer, compare_data=compare_data)
        if (state := resumer.load()) is not None:
            training.load_state_dict(state)
            training.log(f"Resumed after step {state['step']}: {state['tokens']:,} tokens seen")
            self._saver.loaded_step = state["step"]
        self._saver.run = training.identity
        if state is not None and self._config.keep_best:
            self._saver.purge()  # a kill may have come between a save and the link to the best

    def wants(self, step: int) -> Request:
        return Request(save=step % self._config.interval == 0)

    def validated(self, step: int, score: Mapping[str, float]) -> None:
        self._validated = step, score["loss"]

    def act(self, step: int, asked: Request) -> None:
        best = asked.validate and self._config.keep_best and self._saver.improves(self._validated[1])
        if asked.save or best:
            self._save(step, asked.last)

    def numbers(self, step: int) -> Mapping[str, Any]:
        return self._saver.stats()

    def ended(self, step: int, stopped: str) -> CheckpointError | None:
        self._settle()
        if self._saver.holds(step):
            return None
        return CheckpointError(
            f"{stopped and f'{stopped}. '}The save after the last step, {step}, FAILED; the log says why. Once that is "
            "mended, start again: what the newest checkpoint does not hold is trained again."
        )

    def _save(self, step: int, last: bool) -> None:
        for hook in self._training.hooks:
            hook.saving(step)
        with self._training.meter.timing("checkpoint"):
            self._settle()
            state = self._training.state_dict()
            validated, loss = self._validated
            if validated == step and math.isfinite(loss):
                state["validation_loss"] = loss
            self._saver.save(step, state, last=last)
            self._unsettled = step
            if self._config.async_mode == "disabled":
                self._settle()

    def _settle(self) -> None:
        """Wait for the save under way, and tell the hooks if it is complete."""
        self._saver.settle()
        step, self._unsettled = self._unsettled, None
        if step is not None and self._saver.holds(step):
            for hook in self._training.hooks:
                hook.saved(step)
