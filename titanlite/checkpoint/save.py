"""Save the live state of a run: each step that is due, and what the last save is asked to leave.

Invariant: a save that fails costs that save only.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from titanlite.checkpoint import live_tensors, step_folders
from titanlite.checkpoint.best import BestCheckpoint
from titanlite.checkpoint.export import CheckpointTensors, export_hf
from titanlite.checkpoint.folder import CheckpointFolder
from titanlite.checkpoint.live_tensors import LiveState
from titanlite.checkpoint.writer import CheckpointWriter
from titanlite.config import schema
from titanlite.config.errors import UserError
from titanlite.model.llama import Llama


class Saver:
    """All ranks create one, and call each method together.

    Args:
        job: the resolved job file as a JSON value, kept in the manifest.
        write_tokenizer: for `last_save_in_hf`: puts the tokenizer's files into a folder, returns its special ids.

    Attributes:
        loaded_step: the step that the live state was loaded from, if it was. Who loads it sets this.
        run: the identity of the run, as `train_state["run"]` has it; `checkpoint.keep_best` compares within a run.

    Raises:
        UserError: no checkpoint fits on the disk, or the async mode needs a GPU.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        live: LiveState,
        *,
        job: dict[str, Any] | None = None,
        write_tokenizer: Callable[[Path], dict[str, int | None]] | None = None,
    ) -> None:
        self.loaded_step: int | None = None
        self.run: str | None = None
        self._folder, self._live, self._job = folder, live, job
        self._config: schema.Checkpoint = folder.config
        self._ranks = folder.ranks
        self._write_tokenizer = write_tokenizer
        live_tensors.library_versions()  # opens files, of which there may be too many when a save needs them
        folder.check_room(live.estimated_size(self._ranks))
        self._best = BestCheckpoint(folder.path, folder.path.parent / "final", job, folder.log)
        self._writer = CheckpointWriter(folder, self._keep_best)
        if live.optimizer is not None and self._config.async_mode == "async_with_pinned_mem":
            live.optimizer.register_step_pre_hook(lambda *_: self._writer.before_update())

    def holds(self, step: int) -> bool:
        """Whether the live state of this step was loaded from a checkpoint or is known to be in one, and nothing that
        the newest `save` was to write for it is missing."""
        return step in (self.loaded_step, self._writer.last_step) and step != self._writer.failed_step

    def improves(self, loss: float) -> bool:
        """Whether `checkpoint.keep_best` asks for a save, because no checkpoint has such a low validation loss."""

        def lower() -> bool:
            best = self._best.find(self.run)
            return best is None or loss < best[1]

        return self._config.keep_best and math.isfinite(loss) and self._ranks.on_rank0(lower)

    def purge(self) -> None:
        """Remove what retention does not keep, in the background. A run that was killed may have left it."""
        self._writer.purge()

    def stats(self) -> dict[str, int]:
        """Counters for the metrics, alike on all ranks: saves that failed, and those that found the one before still
        under way."""
        return {"failed_saves": self._writer.failed, "save_waits": self._writer.waits}

    def save(self, step: int, train_state: dict[str, Any], *, last: bool = False) -> None:
        """Save the live state as `step-<step>`; does nothing if it is saved already.

        With an async mode it returns once the state is staged; a save still under way is waited for first. A failure
        (disk full, permission) is logged and counted in `stats`; the run goes on.

        Args:
            train_state: small JSON value (data cursor, tokens seen), equal on all ranks; `Resumer.load` returns it.
                `validation_loss` is that of these weights, if it is known.
            last: the run ends here: what `checkpoint.last_save_*` ask for is done. Of a state that is saved already,
                the older checkpoints are removed that a kill has left.
        """
        self.settle()
        final = self._folder.path.parent / "final"
        if last and self._config.last_save_model_only:
            kept = self._ranks.on_rank0(lambda: self._keep_or_supersede(final / step_folders.step_name(step), step))
            if not kept:
                weights = self._live.tensors(optimizer=False)
                self._writer.save(step, weights, self._describe(train_state) | {"weights_only": True}, final)
        elif not self.holds(step):
            self._writer.save(step, self._live.tensors(rng=True), self._describe(train_state))
        elif last:
            self.purge()
        if last and self._config.keep_best:  # the weights in `final` may be the best
            self.settle()
            self.purge()
        if last and self._config.last_save_in_hf:
            self.settle()
            source = final if self._config.last_save_model_only else self._folder.path
            if not self._ranks.on_rank0(lambda: self._export(source / step_folders.step_name(step), step)):
                self._writer.fail(step)

    def settle(self) -> None:
        """Wait for the save under way, if there is one; `stats` and `holds` then know how it ended."""
        self._writer.settle()

    def close(self) -> None:
        """Wait for the save and the removals under way."""
        self._writer.close()

    def _describe(self, train_state: dict[str, Any]) -> dict[str, Any]:
        model = self._live.model
        return {
            "train_state": train_state,
            "job": self._job,
            "job_hash": xxhash.xxh3_128_hexdigest(json.dumps(self._job, sort_keys=True).encode()),
            "architecture": dataclasses.asdict(model.arch) if isinstance(model, Llama) else None,
            "optimizer_groups": self._live.optimizer_groups(self._ranks),
            "layout": live_tensors.world_layout(model),
            "versions": live_tensors.library_versions(),
        }

    def _keep_best(self) -> Path | None:
        """On rank 0, when a save has ended: the checkpoint that is the best now."""
        return self._best.keep(self.run) if self._config.keep_best else None

    def _keep_or_supersede(self, path: Path, step: int) -> bool:
        """On rank 0: whether an earlier start wrote this and nothing was trained since. Else it makes room."""
        if not path.exists():
            return False
        if step == self.loaded_step:
            self._folder.log(f"{path} exists already and is kept")
            return True
        superseded = step_folders.set_aside(path, "superseded")
        self._folder.log(f"{path} is of an earlier run: renamed to {superseded.name}")
        return False

    def _export(self, path: Path, step: int) -> bool:
        """On rank 0: write the last checkpoint for transformers. Reads it from the disk, so no rank has to gather.

        Returns:
            Whether it is there.
        """
        out = self._folder.path.parent / "final_hf"
        if self._write_tokenizer is None or self._writer.failed_step == step:
            self._folder.log(f"final_hf is not written: {path} could not be saved")
            return True  # that failure is counted
        try:
            if not self._keep_or_supersede(out, step):
                step_folders.check_folder(path)
                export_hf(CheckpointTensors(path), out, self._config.export_dtype, self._write_tokenizer)
                self._folder.log(f"wrote {out} for transformers, {self._config.export_dtype}")
        except (OSError, UserError) as error:
            self._folder.log(f"writing {out} FAILED ({error})")
            return False
        return True
