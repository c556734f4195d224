"""Save the checkpoints of a run, in the training loop or in a background thread.

Also remove outdated checkpoints, link the best one, and write the outputs of the last save.

Invariant: One save is in progress at a time. It contains the values at the time of the call of
`save`. A failed save affects nothing else.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from titanlite.checkpoint.dcp import (
    WEIGHTS,
    CheckpointWriter,
    ShardSavePlanner,
    describe_error,
    library_versions,
    manifest_info,
)
from titanlite.checkpoint.huggingface import checkpoint_weights, export_hf
from titanlite.checkpoint.manifest import (
    BEST_LINK,
    EXPORT_MARKER,
    CheckpointContext,
    belongs_to_run,
    check_checkpoint,
    get_step,
    get_validation_loss,
    has_titanlite_manifest,
    list_checkpoints,
    read_manifest,
    remove_checkpoint,
    replace_link,
    select_outdated,
    set_aside,
    step_folder_name,
    sync,
)
from titanlite.checkpoint.mirror import Mirror
from titanlite.config.errors import CheckpointError, Damage, UserError
from titanlite.runtime.logging import Event

T = TypeVar("T")


class Saver:
    """Saves weights, optimizer state and hook state of a run as checkpoints.

    All ranks create one, and call each method together.

    Args:
        context: Checkpoint folder, options, live state and ranks of the run.
        write_tokenizer: Writes the tokenizer's files into a folder and returns its special token
            IDs, for `checkpoint.last_save_in_hf`.
        on_saved: Called with the step when its checkpoint is complete on all ranks.
        mirror: Copies each checkpoint to the URL `checkpoint.mirror`.

    Attributes:
        loaded_step: Step of the checkpoint from which the run resumed, or None. The caller sets it
            after loading.

    Raises:
        UserError: If the async mode needs a GPU and there is none.
    """

    def __init__(
        self,
        context: CheckpointContext,
        write_tokenizer: Callable[[Path], dict[str, int | None]] = lambda folder: {},
        on_saved: Callable[[int], None] = lambda step: None,
        mirror: Mirror | None = None,
    ) -> None:
        self.loaded_step: int | None = None
        self._context = context
        self._folder = context.folder
        self._live = context.live
        self._config = context.config
        self._ranks = context.ranks
        self._log = context.log
        self._write_tokenizer = write_tokenizer
        self._on_saved = on_saved
        self._mirror = mirror

        self._run_id: str | None = None
        self._is_from_this_run: dict[Path, bool] = {}  # by checkpoint; read from the manifests
        self._num_started = 0
        self._num_failed = 0
        self._num_waits = 0
        self._saved_step: int | None = None  # of the newest complete save
        self._failed_step: int | None = None  # of the newest save, if it failed
        # The save in progress: its step, and whether it succeeds on this rank.
        self._pending: tuple[int, Future[bool]] | None = None

        self._thread = ThreadPoolExecutor(1, "checkpoint")
        # The copies to pinned memory that are made while the next step runs.
        self._copies: Future[dict[str, Tensor]] | None = None
        self._stager: DefaultStager | None = None
        self._is_pinned = self._config.async_mode == "async_with_pinned_mem"
        if self._is_pinned and not torch.cuda.is_available():
            raise UserError(
                'checkpoint.async_mode = "async_with_pinned_mem" needs a GPU. Use "async" on a CPU.'
            )
        if self._config.async_mode != "disabled":
            self._stager = self._new_stager()
        library_versions()  # fill its cache now, because it opens files

    def save(self, step: int, train_state: dict[str, Any], *, is_last: bool = False) -> None:
        """Save the state of the run as a checkpoint, unless this step is saved already.

        If saving is asynchronous, this returns as soon as training may continue, and a thread
        writes the files. A failed save is logged and counted, and the run continues.

        Args:
            step: The step that has just been completed.
            train_state: Small JSON value, equal on all ranks, which a resumed run gets back.
            is_last: Whether the run ends here. If so, follow the options `checkpoint.last_save_*`,
                such as saving only the weights, and wait until the checkpoint is complete.
        """
        self.wait_until_saved()  # one save at a time
        self._run_id = train_state.get("run")

        weights_only = is_last and self._config.last_save_model_only
        if weights_only:
            # A run cannot resume from weights, so they are not in the folder of checkpoints.
            path = self._folder.parent / "final" / step_folder_name(step)
            is_needed = self._ranks.run_on_rank0(lambda: self._prepare_output_path(path, step))
        else:
            path = self._folder / step_folder_name(step)
            is_needed = not self.has_saved(step)

        if is_needed:
            info = self._get_manifest_info(train_state, weights_only)
            tensors = self._get_tensors(weights_only)
            writer = CheckpointWriter(path.parent, step, self._new_token(), info)
            self._start_save(writer, tensors)
        if is_last:
            self._finish_last_save(path, step)

    def has_saved(self, step: int) -> bool:
        """Return whether the state after a step is on disk, because it was loaded or saved.

        The result is False if the newest save of this step, or its export, has failed.
        """
        return step in (self.loaded_step, self._saved_step) and step != self._failed_step

    def stats(self) -> dict[str, int]:
        """Return the number of failed saves, and how often training waited for an earlier save.

        Both numbers are logged as metrics, and equal on all ranks.
        """
        return {"failed_saves": self._num_failed, "save_waits": self._num_waits}

    def wait_until_saved(self) -> None:
        """Wait until the save in progress ends, if there is one.

        If all ranks have succeeded, call the function `on_saved` that was passed to the saver.
        """
        if self._pending is None:
            return
        step, result = self._pending
        self._pending = None
        if not result.done():
            self._num_waits += 1
            self._log(f"Waiting for the save of step {step}, which is still in progress")

        # The save is complete only if it succeeded on all ranks.
        results_of_ranks = self._ranks.gather(result.result())
        if all(results_of_ranks):
            self._saved_step = step
            self._failed_step = None
            self._on_saved(step)
        else:
            self._count_failure(step)

    def wait_for_copies(self) -> None:
        """Wait until the asynchronous copies of the state are complete.

        Only then may the optimizer change the weights.
        """
        if self._copies is not None:
            wait([self._copies])

    def close(self) -> None:
        """Wait for the save in progress, and stop the background thread."""
        self.wait_until_saved()
        self._thread.shutdown()
        if self._stager is not None:
            self._stager.close()

    def _new_token(self) -> str:
        """Return a unique part for the name of a temporary folder, the same on all ranks."""
        self._num_started += 1
        return f"{self._context.token}-{self._num_started}"

    def _count_failure(self, step: int) -> None:
        self._num_failed += 1
        self._failed_step = step

    # One save

    def _get_manifest_info(self, train_state: dict[str, Any], weights_only: bool) -> dict[str, Any]:
        """Return the description of the model and the run to store in the manifest."""
        info = manifest_info(
            self._live.model.arch,
            train_state,
            job=self._context.job,
            layout={"world_size": self._ranks.size},
        )
        if weights_only:
            info["weights_only"] = True
        return info

    def _get_tensors(self, weights_only: bool) -> dict[str, Tensor]:
        """Return the tensors to save, by name. They share memory with the model."""
        if not weights_only:
            return self._live.tensors(rng=True)
        tensors = self._live.tensors(optimizer=False)
        return {name: tensor for name, tensor in tensors.items() if name.startswith(WEIGHTS)}

    def _new_stager(self) -> DefaultStager:
        options = StagingOptions(
            use_pinned_memory=self._is_pinned,
            use_shared_memory=False,
            use_async_staging=self._is_pinned,
            use_non_blocking_copy=self._is_pinned,
        )
        return DefaultStager(options)

    def _start_save(self, writer: CheckpointWriter, tensors: dict[str, Tensor]) -> None:
        """Write a checkpoint in the background thread, or in this thread if saves are synchronous.

        If this rank cannot save in the background, it also saves in this thread.
        """
        if self._stager is None:  # saves are synchronous
            self._save_now(writer, tensors)
            self.wait_until_saved()
            return

        try:
            self._save_in_background(writer, self._stager, tensors)
        except Exception as error:  # for example, too little memory for the copies or a thread
            # The other ranks wait for this rank's part of the checkpoint, so write it here instead.
            text = f"Saving step {writer.step} while training waits ({describe_error(error)})"
            self._log(Event(text, "foreground", writer.step))
            self._replace_thread()
            self._save_now(writer, tensors)

    def _save_in_background(
        self, writer: CheckpointWriter, stager: DefaultStager, tensors: dict[str, Tensor]
    ) -> None:
        """Copy the tensors to CPU memory, and let the background thread write the copies."""
        copies = self._stage(stager, tensors)
        waited = time.perf_counter() - writer.started
        result = self._thread.submit(self._write_and_publish, writer, copies, waited)
        self._pending = writer.step, result

    def _replace_thread(self) -> None:
        """Replace the background thread after it could not take a save.

        If an executor cannot start its thread, `submit` raises an exception but keeps the save in
        its queue. A new executor makes sure that this save never runs.
        """
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._thread = ThreadPoolExecutor(1, "checkpoint")

    def _save_now(self, writer: CheckpointWriter, tensors: dict[str, Tensor]) -> None:
        """Write a checkpoint in this thread, and keep the result for `wait_until_saved`.

        Meanwhile, other ranks may write their parts in their background threads. Collectives match
        nevertheless, because each rank calls the same ones in the same order.
        """
        is_complete = self._write_and_publish(writer, _completed_future(tensors))
        self._pending = writer.step, _completed_future(is_complete)

    def _stage(
        self, stager: DefaultStager, tensors: dict[str, Tensor]
    ) -> Future[dict[str, Tensor]]:
        """Copy tensors to CPU memory, so that training can change the originals during the save.

        Returns:
            A future of the copies by name. Only copies to pinned memory are made in the background.
        """
        if self._is_pinned:
            torch.cuda.current_stream().synchronize()  # the stager copies on another stream
        if torch.__version__ < "2.13":  # in which a stager supports only one call of stage()
            stager.close()
            stager = self._stager = self._new_stager()
        copies = stager.stage(tensors)
        if not isinstance(copies, Future):
            return _completed_future(copies)
        self._copies = copies
        return copies

    def _write_and_publish(
        self,
        writer: CheckpointWriter,
        copies: Future[dict[str, Tensor]],
        waited: float | None = None,
    ) -> bool:
        """Write and publish a checkpoint, log the result, and remove outdated checkpoints.

        An exception is logged, and fails only this save.

        Args:
            writer: Writer of the checkpoint.
            copies: Future of the tensors to save, by name.
            waited: Seconds for which training waited; None if it waits for the whole save.

        Returns:
            Whether the checkpoint is complete. It is incomplete if any rank failed.
        """
        try:
            state = self._wait_for_state(copies)
            group = self._ranks.group
            # DCP calls `writer.write_data` on each rank. When all ranks have written their files,
            # it calls `writer.finish` on rank 0, which publishes the checkpoint.
            dcp_save(state, storage_writer=writer, planner=ShardSavePlanner(), process_group=group)
        except (Exception, CheckpointException) as error:  # the latter is a BaseException
            if self._ranks.rank == 0:
                self._discard_failed_save(writer, error)
            return False

        self._log_success(writer, waited)
        if self._ranks.rank == 0:
            self._is_from_this_run[writer.target] = True
            self._remove_outdated()
            if self._mirror is not None:
                self._mirror.notify()
        return True

    def _discard_failed_save(self, writer: CheckpointWriter, error: BaseException) -> None:
        """Log why a save failed, and delete its temporary folder."""
        text = f"Saving step {writer.step} FAILED ({describe_error(error)})"
        self._log(Event(text, "failed save", writer.step))
        shutil.rmtree(writer.tmp_folder, ignore_errors=True)

    def _log_success(self, writer: CheckpointWriter, waited: float | None) -> None:
        seconds = time.perf_counter() - writer.started
        text = f"Saved step {writer.step} to {writer.target} in {seconds:.1f} s"
        if waited is not None:
            text += f", of which training waited {waited:.2f} s"
        self._log(Event(text, "save", writer.step))

    def _wait_for_state(self, copies: Future[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Wait until the state is copied on all ranks, and return the copies of this rank.

        Raises:
            CheckpointError: On all ranks, if copying failed on any rank.
        """
        error = copies.exception()  # waits for the copies
        problem = f"copying the state failed: {describe_error(error)}" if error else ""
        # Raise the error on all ranks, because the others would otherwise wait for this rank.
        problems = [text for text in self._ranks.gather(problem) if text]
        if problems:
            raise CheckpointError(problems[0])
        return copies.result()

    # Old checkpoints and the best one

    def remove_outdated(self) -> None:
        """Remove checkpoints that `keep_latest_k` and `keep_every_n_steps` do not keep.

        The best checkpoint, and one that is being copied to the mirror, are never removed.
        """
        self._ranks.run_on_rank0(self._remove_outdated)

    def is_best(self, loss: float) -> bool:
        """Return whether a validation loss is lower than those of all saved checkpoints.

        Args:
            loss: Validation loss of the current weights.
        """

        def is_lowest() -> bool:
            try:
                return loss < self._find_best()[0]
            except CheckpointError:  # a manifest cannot be read now; an extra save costs little
                return True

        self.wait_until_saved()  # because the thread also communicates with the other ranks
        return self._ranks.run_on_rank0(is_lowest)

    def update_best_link(self) -> None:
        """Point the symbolic link `best` to the checkpoint with the lowest validation loss.

        This does nothing unless `checkpoint.keep_best` is set.

        Raises:
            CheckpointError: If a manifest cannot be read now.
        """
        if self._config.keep_best:
            self._ranks.run_on_rank0(self._update_best_link)

    def _remove_outdated(self) -> None:
        """Remove the outdated checkpoints of this run. Failures are logged. Runs on rank 0."""
        try:
            outdated = self._find_outdated()
            # The newest checkpoint must survive a power failure before older ones are removed.
            # `publish_checkpoint` has tried this too, but only warns if it fails.
            sync(self._folder)
        except Exception as error:  # any of them could be the best one, or the only durable one
            self._log(f"Not removing old checkpoints: {describe_error(error)}")
            return

        for path in outdated:
            try:
                remove_checkpoint(path)
            except Exception as error:
                self._log(f"Could not remove the old {path.name}: {describe_error(error)}")

    def _find_outdated(self) -> list[Path]:
        """Return the checkpoints of this run that are neither kept by an option nor in use.

        In use are the best checkpoint and the one that is being copied to the mirror.
        """
        checkpoints = self._list_own()
        if self._config.keep_best:
            self._update_best_link()
        # Never remove the target of `best`, even if this job does not set keep_best.
        in_use: set[Path | None] = {(self._folder / BEST_LINK).resolve()}
        if self._mirror is not None:
            in_use.add(self._mirror.sending)

        steps = select_outdated([get_step(path) for path in checkpoints], self._config)
        outdated = [path for path in checkpoints if get_step(path) in steps]
        return [path for path in outdated if path.resolve() not in in_use]

    def _list_own(self) -> list[Path]:
        """Return the checkpoints that this run has saved, sorted by step.

        Imported weights and checkpoints of other runs in the folder are left out.
        """
        paths = list_checkpoints(self._folder)
        for path in paths:
            if path not in self._is_from_this_run:
                try:
                    is_own = belongs_to_run(read_manifest(path), self._run_id)
                except Damage:
                    is_own = False
                self._is_from_this_run[path] = is_own
        return [path for path in paths if self._is_from_this_run[path]]

    def _find_best(self) -> tuple[float, Path | None]:
        """Find the checkpoint with the lowest validation loss.

        Returns:
            The loss, and the earliest checkpoint that has it. Infinity and None if no checkpoint
            has a validation loss.
        """
        lowest = math.inf
        best = None
        final = self._folder.parent / "final"
        for path in list_checkpoints(self._folder, final):
            with suppress(Damage):
                loss = get_validation_loss(read_manifest(path))
                if loss < lowest:
                    lowest = loss
                    best = path
        return lowest, best

    def _update_best_link(self) -> None:
        """Point the link `best` to the best checkpoint, or remove the link. Runs on rank 0."""
        link = self._folder / BEST_LINK
        if os.path.lexists(link) and not link.is_symlink():
            raise UserError(f"{link} is not a link, so it cannot point to the best one. Move it.")

        loss, best = self._find_best()
        if best is None:
            link.unlink(missing_ok=True)
        elif link.resolve() != best.resolve():
            replace_link(link, best)
            text = f"{best.name} has the lowest validation loss so far, {loss:.4f}"
            self._log(f"{text}: {link} points to it")

    # Outputs of the last save

    def _finish_last_save(self, path: Path, step: int) -> None:
        """Wait for the last save, remove outdated checkpoints, and export the weights if requested.

        Args:
            path: Step folder of the last save.
            step: The last step.
        """
        self.wait_until_saved()
        self.remove_outdated()
        if self._config.last_save_in_hf and step != self._failed_step:
            is_exported = self._ranks.run_on_rank0(lambda: self._export(path, step))
            if not is_exported:
                self._count_failure(step)

    def _prepare_output_path(self, path: Path, step: int) -> bool:
        """Prepare the path of a final output, and return whether the run must write it.

        An output of an earlier start is kept if no step was trained since, and is renamed
        otherwise. A path that another program has written is never changed, so the run will fail
        to write it. Runs on rank 0.

        Args:
            path: A step folder in `final`, or `final_hf`.
            step: The last step.
        """
        if not path.exists():
            return True
        if step == self.loaded_step:
            self._log(f"Keeping {path}, which exists already")
            return False

        is_export = (path / EXPORT_MARKER).is_file()
        if is_export or has_titanlite_manifest(path):
            renamed = set_aside(path, "archived")
            self._log(f"Renamed {path} of an earlier start to {renamed.name}")
        return True

    def _export(self, path: Path, step: int) -> bool:
        """Export the last checkpoint to `final_hf` in Hugging Face format. Runs on rank 0.

        Returns:
            Whether the export succeeded. A failure is logged.
        """
        out = path.parents[1] / "final_hf"
        try:
            if self._prepare_output_path(out, step):
                self._write_export(path, step, out)
        except (OSError, UserError) as error:
            self._log(f"Writing {out} FAILED ({error})")
            return False
        return True

    def _write_export(self, path: Path, step: int, out: Path) -> None:
        """Write the weights of a checkpoint to the folder `out` in Hugging Face format.

        The weights are read from disk, so no rank has to gather them in memory.
        """

        def write_marker_and_tokenizer(folder: Path) -> dict[str, int | None]:
            marker = {"run": self._run_id, "step": step}
            (folder / EXPORT_MARKER).write_text(json.dumps(marker) + "\n")
            return self._write_tokenizer(folder)

        # Damage that this does not find is found when the weights are read.
        check_checkpoint(path, verified_on_load=True)
        weights = checkpoint_weights(path)
        dtype = self._config.export_dtype
        export_hf(weights, out, dtype, write_marker_and_tokenizer, token=self._context.token)
        self._log(f"Exported step {step} to {out} in Hugging Face format ({dtype})")


def _completed_future(result: T) -> Future[T]:
    future = Future[T]()
    future.set_result(result)
    return future
