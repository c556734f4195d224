"""Save the live state of a run: in the step loop or beside it, what the last save is asked to leave, and remove old
checkpoints.

Invariant: one save is under way at a time, with the values of the moment at which `save` was called; one that fails
costs nothing but itself.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from titanlite.checkpoint import live_tensors, step_folders
from titanlite.checkpoint.dcp import CommittingWriter, reason
from titanlite.checkpoint.folder import CheckpointFolder
from titanlite.checkpoint.mirror import Mirror
from titanlite.checkpoint.published import checkpoint_weights, export_hf
from titanlite.config.errors import CheckpointError, Damage, UserError
from titanlite.config.files import MANIFEST
from titanlite.runtime.logging import Event


class Saver:
    """All ranks create one, and call each method together. It logs from other threads, too.

    Args:
        write_tokenizer: for `last_save_in_hf`: puts the tokenizer's files into a folder, returns its special ids.
        saved: called with the step once its checkpoint is known to be complete on all ranks.
        mirror: is told of each checkpoint.

    Attributes:
        loaded_step: the step that the live state was loaded from, if it was. Who loads it sets this.

    Raises:
        UserError: the async mode needs a GPU.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        write_tokenizer: Callable[[Path], dict[str, int | None]] = lambda folder: {},
        saved: Callable[[int], None] = lambda step: None,
        mirror: Mirror | None = None,
    ) -> None:
        self.loaded_step: int | None = None
        self._mirror = mirror
        self._folder, self._live, self._write_tokenizer, self._saved = folder, folder.live, write_tokenizer, saved
        self._config, self._ranks, self._log = folder.config, folder.ranks, folder.log
        self._begun = self._failed = self._waits = 0
        self._last_step: int | None = None  # of the newest save that is known to be complete
        self._failed_step: int | None = None  # of the newest save, if it failed
        self._pending: tuple[int, Future[bool]] | None = None  # step; whether this rank has seen it end well
        self._thread = ThreadPoolExecutor(1, "checkpoint")  # writes beside the training
        live_tensors.library_versions()  # opens files, of which there may be too many when a save needs them
        self._copies: list[Future[Any]] = []  # those that are made beside the next step
        self._pinned = self._config.async_mode == "async_with_pinned_mem"
        if self._pinned and not torch.cuda.is_available():
            raise UserError('checkpoint.async_mode = "async_with_pinned_mem" needs a GPU. Use "async" on a CPU.')
        staging = StagingOptions(self._pinned, False, self._pinned, self._pinned)
        self._stager = None if self._config.async_mode == "disabled" else DefaultStager(staging)
        if self._pinned and self._live.optimizer is not None:
            self._live.optimizer.register_step_pre_hook(lambda *_: wait(self._copies) and None)

    def holds(self, step: int) -> bool:
        """Whether the live state of this step was loaded from a checkpoint or is known to be in one, and nothing that
        the newest `save` was to write for it is missing."""
        return step in (self.loaded_step, self._last_step) and step != self._failed_step

    def stats(self) -> dict[str, int]:
        """Counters for the metrics, alike on all ranks: saves that failed, and those that found the one before still
        under way."""
        return {"failed_saves": self._failed, "save_waits": self._waits}

    def improves(self, loss: float) -> bool:
        """Whether no checkpoint has such a low validation loss, and `checkpoint.keep_best` so asks for a save."""

        def is_lowest() -> bool:
            try:
                return loss < self._find_best()[0]
            except CheckpointError:  # one cannot be read now, and a save too many costs least
                return True

        self.settle()  # because a save in a thread talks to the other ranks, too
        return self._ranks.on_rank0(is_lowest)

    def link_best(self) -> None:
        """With `checkpoint.keep_best`, let the link `best` lead to the best checkpoint. Without one there is no link.

        Raises:
            CheckpointError: a manifest cannot be read now.
        """
        if self._config.keep_best:
            self._ranks.on_rank0(self._link_best)

    def save(self, step: int, train_state: dict[str, Any], *, last: bool = False) -> None:
        """Save the live state as `step-<step>`; does nothing if it is saved already.

        With an async mode it returns once the state is staged; a save still under way is waited for first. A failure
        (disk full, permission) is logged and counted in `stats`; the run goes on.

        Args:
            train_state: small JSON value (data cursor, tokens seen), equal on all ranks; `Resumer.load` returns it.
            last: the run ends here: what `checkpoint.last_save_*` ask for is done. Of a state that is saved already,
                the older checkpoints are removed that a kill has left.
        """
        self.settle()
        weights_only = last and self._config.last_save_model_only
        folder = self._folder.path.parent / "final" if weights_only else self._folder.path
        path = folder / step_folders.step_name(step)
        arch, layout = self._live.model.arch, {"world_size": self._ranks.size}
        info = live_tensors.manifest_info(arch, train_state, job=self._folder.job, layout=layout)
        if weights_only:
            if not self._ranks.on_rank0(lambda: self._keep_or_supersede(path, step)):
                named = self._live.tensors().items()
                weights = {name: each for name, each in named if name.startswith(live_tensors.WEIGHTS)}
                self._write(step, weights, info | {"weights_only": True}, folder)
        elif not self.holds(step):
            self._write(step, self._live.tensors(rng=True), info, folder)
        if last:
            self.settle()
            self.purge()
            asked = self._config.last_save_in_hf and step != self._failed_step
            if asked and not self._ranks.on_rank0(lambda: self._export(path, step)):
                self._fail(step)

    def purge(self) -> None:
        """Remove what is no longer kept, such as what was under way to the mirror when its time came."""
        self._ranks.on_rank0(self._purge)

    def settle(self) -> None:
        """Wait for the save under way, if there is one, and agree with all ranks on how it ended. `stats` and `holds`
        then know it."""
        if self._pending is None:
            return
        (step, complete), self._pending = self._pending, None
        if not complete.done():
            self._waits += 1
            self._log(f"waiting for the save of step {step}, which is still under way")
        if all(self._ranks.gather(complete.result())):
            self._last_step, self._failed_step = step, None
            self._saved(step)
        else:
            self._fail(step)

    def close(self) -> None:
        """Wait for the save under way."""
        self.settle()
        self._thread.shutdown()
        if self._stager is not None:
            self._stager.close()

    def _fail(self, step: int) -> None:
        self._failed += 1
        self._failed_step = step

    def _write(self, step: int, tensors: dict[str, Tensor], info: dict[str, Any], folder: Path) -> None:
        """Write a checkpoint, or stage it and leave the writing to the thread."""
        self._begun += 1
        writer = CommittingWriter(folder, step, f"{self._folder.token}-{self._begun}", info)
        started, save = time.perf_counter(), None
        if self._stager is not None:
            try:
                if self._pinned:
                    torch.cuda.current_stream().synchronize()  # the copies are made in a stream of their own
                staged = self._stager.stage(tensors)
                self._copies = [staged] if isinstance(staged, Future) else []
                save = self._thread.submit(self._save, writer, staged, started, time.perf_counter() - started)
            except (OSError, RuntimeError, MemoryError) as error:  # the other ranks meet this one all the same
                self._thread = ThreadPoolExecutor(1, "checkpoint")  # in the one before, the call may still wait
                self._log(Event(f"step {step} is saved while training waits ({reason(error)})", "foreground", step))
        if save is None:
            save = Future()
            save.set_result(self._save(writer, tensors, started))
        self._pending = step, save
        if self._stager is None:
            self.settle()

    def _save(self, writer: CommittingWriter, tensors: Any, started: float, blocked: float | None = None) -> bool:
        """In whichever thread: write and publish, say so, and remove old checkpoints.

        Returns:
            Whether it is complete. It is not if any rank failed.
        """
        try:
            staged = tensors.result() if isinstance(tensors, Future) else tensors
            planner = DefaultSavePlanner(flatten_state_dict=False)
            dcp_save(staged, storage_writer=writer, planner=planner, process_group=self._ranks.group)
        except (CheckpointException, OSError, RuntimeError, MemoryError) as error:
            if self._ranks.rank == 0:
                self._log(Event(f"save of step {writer.step} FAILED ({reason(error)})", "failed save", writer.step))
                shutil.rmtree(writer.unfinished, ignore_errors=True)
            return False
        waited = "" if blocked is None else f", of which training waited {blocked:.2f} s"
        text = f"saved step {writer.step} to {writer.target} in {time.perf_counter() - started:.1f} s{waited}"
        self._log(Event(text, "save", writer.step))
        if self._ranks.rank == 0:
            self._purge()
            if self._mirror is not None:
                self._mirror.wake()
        return True

    def _purge(self) -> None:
        """On rank 0: remove the oldest checkpoints beyond keep_latest_k, but for the best. The newest, known to be
        good, is never among them. A folder without a manifest is none of a run's, and is not counted."""
        try:
            found = step_folders.list_checkpoints(self._folder.path)
            complete = {step_folders.step_of(path) or 0: path for path in found if (path / MANIFEST).is_file()}
            if self._config.keep_best:
                self._link_best()
            best = (self._folder.path / step_folders.BEST).resolve()
        except (OSError, CheckpointError) as error:  # the best one is not known, and could be among them
            return self._log(f"no old checkpoint is removed: {error}")
        in_use = (best, self._mirror and self._mirror.sending)
        for path in (complete[step] for step in step_folders.outdated([*complete], self._config)):
            try:
                if path.resolve() not in in_use:
                    step_folders.remove(path)
            except OSError as error:
                self._log(f"could not remove the old checkpoint {path.name}: {error}")

    def _find_best(self) -> tuple[float, Path | None]:
        """The lowest validation loss of the checkpoints, and the one that has it, the earlier one of two equal ones."""
        lowest, best = math.inf, None
        for path in step_folders.list_checkpoints(self._folder.path, self._folder.path.parent / "final"):
            with contextlib.suppress(Damage):  # it is no candidate
                if (loss := step_folders.validation_loss(step_folders.read_manifest(path))) < lowest:
                    lowest, best = loss, path
        return lowest, best

    def _link_best(self) -> None:
        link, (loss, best) = self._folder.path / step_folders.BEST, self._find_best()
        if best is None:
            link.unlink(missing_ok=True)
        elif link.resolve() != best.resolve():
            step_folders.point(link, best)
            self._log(f"{best.name} has the lowest validation loss so far, {loss:.4f}: {link} leads to it")

    def _keep_or_supersede(self, path: Path, step: int) -> bool:
        """On rank 0: whether an earlier start wrote this and nothing was trained since. Else it makes room."""
        keep = path.exists() and step == self.loaded_step
        if keep:
            self._log(f"{path} exists already and is kept")
        elif path.exists():
            self._log(f"{path} is of an earlier run: renamed to {step_folders.set_aside(path, 'superseded').name}")
        return keep

    def _export(self, path: Path, step: int) -> bool:
        """On rank 0: write the last checkpoint for transformers, from the disk, so that no rank has to gather. False if
        that failed."""
        out = path.parents[1] / "final_hf"
        try:
            if not self._keep_or_supersede(out, step):
                step_folders.check_folder(path)
                export_hf(checkpoint_weights(path), out, self._config.export_dtype, self._write_tokenizer)
                self._log(f"wrote {out} for transformers, {self._config.export_dtype}")
        except (OSError, UserError) as error:
            self._log(f"writing {out} FAILED ({error})")
            return False
        return True
