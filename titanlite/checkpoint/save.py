"""Save the checkpoints of a run, in the training loop or in a background thread.

Invariant: Only one save is in progress at a time. It contains the values from the time when `save`
was called. A failed save never stops training.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from titanlite.checkpoint.dcp import (
    CheckpointWriter,
    ShardSavePlanner,
    describe_error,
    library_versions,
    manifest_info,
)
from titanlite.checkpoint.huggingface import TokenizerWriter
from titanlite.checkpoint.manifest import CheckpointContext, step_folder_name
from titanlite.checkpoint.mirror import Mirror
from titanlite.checkpoint.saved_folders import SavedFolders
from titanlite.config.errors import CheckpointError, UserError
from titanlite.runtime.logging import Event

T = TypeVar("T")
Tensors = dict[str, Tensor]
"""Tensors of a checkpoint by name."""


class Saver:
    """Saves the weights, optimizer state and hook state of a run as checkpoints.

    All ranks create a Saver and call each method together.

    Args:
        context: Checkpoint folder, options, live state and ranks of the run.
        write_tokenizer: Writes the tokenizer files into a folder and returns the special token IDs.
            Used for `checkpoint.last_save_in_hf`.
        on_saved: Called with the step after each save that succeeds on all ranks.
        mirror: Copies each checkpoint to the URL `checkpoint.mirror`, or None for no copies.

    Attributes:
        loaded_step: Step of the checkpoint from which the run resumed, or None. Set this after
            loading, so that the same step is not saved again.
        failed_export: Step folder of the last checkpoint if its export failed, or None.

    Raises:
        UserError: If `checkpoint.async_mode` needs a GPU but none is available.
    """

    def __init__(
        self,
        context: CheckpointContext,
        write_tokenizer: TokenizerWriter = lambda folder: {},
        on_saved: Callable[[int], None] = lambda step: None,
        mirror: Mirror | None = None,
    ) -> None:
        self.loaded_step: int | None = None
        self.failed_export: Path | None = None
        self._context = context
        self._folder = context.folder
        self._live = context.live
        self._config = context.config
        self._ranks = context.ranks
        self._log = context.log
        self._on_saved = on_saved
        self._mirror = mirror

        self._saved_folders = SavedFolders(context, write_tokenizer, mirror)
        self._num_started = 0
        self._num_failed = 0
        self._num_waits = 0
        # Whether the newest save of each step and, at the end of the run, its export succeeded.
        self._success_by_step: dict[int, bool] = {}
        # The save in progress: its step, and a future with the result of `_write_and_publish`.
        self._pending: tuple[int, Future[bool]] | None = None

        self._thread = ThreadPoolExecutor(1, "checkpoint")
        # The copies to pinned memory, which are made while the next step runs.
        self._copies: Future[Tensors] | None = None
        self._is_async = self._config.async_mode != "disabled"
        self._is_pinned = self._config.async_mode == "async_with_pinned_mem"
        if self._is_pinned and not torch.cuda.is_available():
            raise UserError(
                'checkpoint.async_mode = "async_with_pinned_mem" needs a GPU. Use "async" on a CPU.'
            )
        self._stager = self._create_stager()
        # Fill the cache now. During a save, a lookup that fails because too many files are open
        # would end the run.
        library_versions()

    def _create_stager(self) -> DefaultStager:
        """Create the DCP stager that copies the tensors of an async save to CPU memory.

        With checkpoint.async_mode = "async_with_pinned_mem", it copies them in the background.
        """
        options = StagingOptions(
            use_pinned_memory=self._is_pinned,
            use_shared_memory=False,
            use_async_staging=self._is_pinned,
            use_non_blocking_copy=self._is_pinned,
        )
        return DefaultStager(options)

    def save(
        self, step: int, collect_state: Callable[[], dict[str, Any]], *, is_last: bool = False
    ) -> None:
        """Save the state of the run as a checkpoint.

        If saves are asynchronous, return as soon as training may continue; a background thread
        writes the files. A failed save is logged and counted, and the run continues.

        Args:
            step: The step that has just been completed.
            collect_state: Returns the training state other than tensors, such as the data position,
                as a small JSON value that is the same on all ranks. `Resumer.load` returns this
                value when the run resumes from the checkpoint.
            is_last: Whether the run ends with this step. If so, apply the `checkpoint.last_save_*`
                options, such as saving only the weights, and wait until the checkpoint is complete.
        """
        # This calls `on_saved` for the previous save, which may change the state.
        self._wait_for_previous_save()
        train_state = collect_state()
        # After this save, only checkpoints with this run ID may be removed.
        self._saved_folders.run_id = train_state.get("run")

        if is_last:
            self._save_last(step, train_state)
        else:
            self._save_all(step, train_state)

    def _wait_for_previous_save(self) -> None:
        """Wait until the previous save has ended. If it is still in progress, count this wait."""
        if self._is_saving():
            self._num_waits += 1
        self.wait_until_saved()

    def _save_last(self, step: int, train_state: dict[str, Any]) -> None:
        """Save the last step according to the `checkpoint.last_save_*` options.

        Wait until the save has ended. Then remove outdated checkpoints and, if requested, export
        the last one.
        """
        if self._config.last_save_model_only:
            path = self._save_only_weights(step, train_state)
        else:
            path = self._save_all(step, train_state)
        self.wait_until_saved()
        self.remove_outdated()
        self._export_if_requested(path, step)

    def _save_all(self, step: int, train_state: dict[str, Any]) -> Path:
        """Start saving the full state of the run unless this step is already saved.

        Return the step folder. An async save may not have created it yet.
        """
        if not self.has_saved(step):
            tensors = self._live.tensors(rng=True)
            writer = self._create_writer(self._folder, step, train_state)
            self._start_save(writer, tensors)
        return self._folder / step_folder_name(step)

    def _save_only_weights(self, step: int, train_state: dict[str, Any]) -> Path:
        """Start saving the weights and their averages (EMA) in the folder `final`.

        Return the step folder. An async save may not have created it yet.
        """
        folder = self._folder.parent / "final"
        path = folder / step_folder_name(step)
        # Keep an existing folder if no step was trained since the run resumed, because it has these
        # weights. Otherwise, archive it.
        can_keep = step == self.loaded_step
        is_kept = self._ranks.run_on_rank0(
            lambda: self._saved_folders.keep_or_archive(path, can_keep)
        )
        if is_kept:
            return path

        weights = self._live.weights()
        writer = self._create_writer(folder, step, train_state, weights_only=True)
        self._start_save(writer, weights)
        return path

    def _create_writer(
        self, folder: Path, step: int, train_state: dict[str, Any], **extra: Any
    ) -> CheckpointWriter:
        """Create the writer of a checkpoint and its manifest.

        Args:
            folder: Parent of the step folder.
            step: The step to save.
            train_state: Training state other than tensors.
            extra: Additional keys for `info` in the manifest, such as `weights_only`.
        """
        info = manifest_info(
            self._live.model.arch,
            train_state,
            job=self._context.job,
            layout={"world_size": self._ranks.size},
            **extra,
        )
        self._num_started += 1
        # The name of the temporary folder is unique, and the same on all ranks.
        token = f"{self._context.token}-{self._num_started}"
        return CheckpointWriter(folder, step, token, info)

    def _start_save(self, writer: CheckpointWriter, tensors: Tensors) -> None:
        """Start writing a checkpoint in the background.

        If checkpoint.async_mode is "disabled", write it before returning.
        """
        write = self._write_in_background if self._is_async else self._write_while_training_waits
        self._pending = writer.step, write(writer, tensors)
        if not self._is_async:
            self.wait_until_saved()

    def _write_in_background(self, writer: CheckpointWriter, tensors: Tensors) -> Future[bool]:
        """Copy the tensors to CPU memory and start writing the copies in the background thread.

        If copying or starting the thread fails, for example because memory is low, write the
        original tensors while training waits. With pinned memory, copying continues after this
        call returns. If it fails after that, the save fails.

        Returns:
            A future that resolves to whether the checkpoint is complete.
        """
        try:
            copies = self._copy(tensors)
            seconds_blocked = time.perf_counter() - writer.started
            return self._run_in_thread(self._write_and_publish, writer, copies, seconds_blocked)
        except Exception as error:
            reason = describe_error(error)
            text = f"Saving step {writer.step} while training waits ({reason})"
            self._log(Event(text, "foreground", writer.step))

        # The background save has not started, so write the original tensors.
        return self._write_while_training_waits(writer, tensors)

    def _write_while_training_waits(
        self, writer: CheckpointWriter, tensors: Tensors
    ) -> Future[bool]:
        """Write the tensors before returning. No copy is needed, because training waits meanwhile.

        Other ranks may write their part of this checkpoint in a background thread at the same time,
        because all ranks call the same collectives either way.

        Returns:
            A completed future with True if the checkpoint is complete, or False if the save failed.
        """
        return _completed(self._write_and_publish(writer, _completed(tensors)))

    def _run_in_thread(self, function: Callable[..., bool], *args: Any) -> Future[bool]:
        """Start a function in the background thread and return a future with its result."""
        try:
            return self._thread.submit(function, *args)
        except Exception:
            # Discard the function, because it may be queued, and the next `submit` would run it.
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = ThreadPoolExecutor(1, "checkpoint")
            raise

    def _copy(self, tensors: Tensors) -> Future[Tensors]:
        """Copy tensors to CPU memory, so that training can change the originals during the save.

        Returns:
            A future with the copies by name. With pinned memory, the stager copies during the next
            training step; otherwise, the copies are already complete.
        """
        if self._is_pinned:
            torch.cuda.current_stream().synchronize()  # the stager copies on another stream
        if torch.__version__ < "2.13":  # earlier stagers support only one call of stage()
            self._stager.close()
            self._stager = self._create_stager()
        copies = self._stager.stage(tensors)
        if not isinstance(copies, Future):
            return _completed(copies)
        self._copies = copies
        return copies

    def _write_and_publish(
        self,
        writer: CheckpointWriter,
        tensors_to_write: Future[Tensors],
        seconds_blocked: float | None = None,
    ) -> bool:
        """Write and publish a checkpoint, log the result, and remove outdated checkpoints.

        Call this on all ranks together. If one rank raises an error, the save fails on all ranks,
        but the run continues.

        Args:
            writer: Writer of the checkpoint.
            tensors_to_write: Future with the tensors by name, which training will not change.
            seconds_blocked: Seconds from the creation of the writer until training could continue.
                None if training waits for the whole save.

        Returns:
            Whether the checkpoint is complete.
        """
        try:
            tensors = self._ranks.run_together(lambda: _wait_for_tensors(tensors_to_write))
            self._write_files_and_publish(writer, tensors)
        except Exception as error:
            if self._ranks.rank == 0:
                self._discard_failed_save(writer, error)
            return False

        self._log_success(writer, seconds_blocked)
        if self._ranks.rank == 0:
            self._saved_folders.remove_outdated()
            if self._mirror is not None:
                self._mirror.start_copying()
        return True

    def _write_files_and_publish(self, writer: CheckpointWriter, tensors: Tensors) -> None:
        """Write the tensors of all ranks to files and publish the checkpoint.

        DCP calls `writer.write_data` on each rank. When all ranks have written their files, DCP
        calls `writer.finish` on rank 0, which publishes the checkpoint.

        Raises:
            CheckpointError: On all ranks, if any rank fails.
        """
        try:
            dcp_save(
                tensors,
                storage_writer=writer,
                planner=ShardSavePlanner(flatten_state_dict=False),
                process_group=self._ranks.group,
            )
        except CheckpointException as error:  # contains the errors of all ranks
            raise CheckpointError(describe_error(error)) from None

    def _discard_failed_save(self, writer: CheckpointWriter, error: Exception) -> None:
        """Log that a save failed, and delete the files that it has written."""
        text = f"Could not save step {writer.step}: {describe_error(error)}"
        self._log(Event(text, "failed save", writer.step))
        shutil.rmtree(writer.tmp_folder, ignore_errors=True)

    def _log_success(self, writer: CheckpointWriter, seconds_blocked: float | None) -> None:
        """Log that a save succeeded and how long it took.

        Args:
            writer: Writer of the checkpoint.
            seconds_blocked: Seconds until training could continue. None if it waited for the whole
                save.
        """
        seconds = time.perf_counter() - writer.started
        text = f"Saved step {writer.step} to {writer.target} in {seconds:.1f} s"
        if seconds_blocked is not None:
            text += f", of which training waited {seconds_blocked:.2f} s"
        self._log(Event(text, "save", writer.step))

    def _is_saving(self) -> bool:
        """Return whether a save is still in progress on this rank."""
        return self._pending is not None and not self._pending[1].done()

    def wait_until_saved(self) -> None:
        """Wait until the save in progress, if any, has ended.

        If it succeeded on all ranks, call the `on_saved` function that was passed to the
        constructor.
        """
        if self._pending is None:
            return
        step, result = self._pending
        if self._is_saving():
            self._log(f"Waiting for the save of step {step}, which is still in progress")
        self._pending = None

        # The result is the same on all ranks, unless a rank has lost its connection.
        results_of_ranks = self._ranks.gather(result.result())
        self._success_by_step[step] = all(results_of_ranks)
        if self._success_by_step[step]:
            self._on_saved(step)
        else:
            self._num_failed += 1

    def _export_if_requested(self, path: Path, step: int) -> None:
        """Export the last checkpoint in Hugging Face format if `checkpoint.last_save_in_hf` is set.

        If the save of this checkpoint failed, do nothing.
        """
        if not self._config.last_save_in_hf or not self.has_saved(step):
            return
        # If no step was trained since the run resumed, an export that exists has these weights.
        can_keep = step == self.loaded_step
        is_exported = self._ranks.run_on_rank0(lambda: self._saved_folders.export(path, can_keep))
        if not is_exported:
            self.failed_export = path
            self._success_by_step[step] = False
            self._num_failed += 1

    def has_saved(self, step: int) -> bool:
        """Return whether this process has loaded the state after a step from disk, or saved it.

        If the last attempt to save or export the state after this step failed, return False.
        """
        return self._success_by_step.get(step, step == self.loaded_step)

    def stats(self) -> dict[str, int]:
        """Return how many saves or exports failed, and how many saves waited for a previous one."""
        return {"failed_saves": self._num_failed, "save_waits": self._num_waits}

    def wait_for_copies(self) -> None:
        """Wait until the tensors are copied, so that the optimizer may change the weights."""
        if self._copies is not None:
            wait([self._copies])

    def remove_outdated(self) -> None:
        """Remove the outdated checkpoints of this run from disk. Call this on all ranks.

        Keep the checkpoints that `keep_latest_k`, `keep_every_n_steps` or `keep_best` selects, the
        target of the link `best`, and the checkpoint that is being copied to the mirror.
        """
        self._ranks.run_on_rank0(self._saved_folders.remove_outdated)

    def is_best(self, loss: float) -> bool:
        """Return whether a validation loss is lower than the loss of every saved checkpoint."""
        self.wait_until_saved()  # because the thread also communicates with the other ranks
        return self._ranks.run_on_rank0(lambda: self._saved_folders.is_best(loss))

    def update_best_link(self) -> None:
        """Point the symbolic link `best` to the checkpoint with the lowest validation loss.

        If `checkpoint.keep_best` is not set, do nothing.

        Raises:
            CheckpointError: If a manifest is currently unreadable.
            UserError: If `best` exists but is not a link.
        """
        if self._config.keep_best:
            self._ranks.run_on_rank0(self._saved_folders.update_best_link)

    def close(self) -> None:
        """Wait for the save in progress and stop the background thread."""
        self.wait_until_saved()
        self._thread.shutdown()
        self._stager.close()


def _completed(result: T) -> Future[T]:
    """Return a future that already has its result."""
    future = Future[T]()
    future.set_result(result)
    return future


def _wait_for_tensors(tensors_to_write: Future[Tensors]) -> Tensors:
    """Wait until the tensors can be written, and return them by name.

    An async save writes copies of the tensors, which may not be complete yet.

    Raises:
        CheckpointError: If copying failed for any reason, even an interrupt.
            `RankGroup.run_together` raises this error on all ranks. After an error of another kind,
            such as RuntimeError, the other ranks would wait for this rank forever.
    """
    try:
        return tensors_to_write.result()
    except BaseException as error:
        raise CheckpointError(f"copying the tensors failed: {describe_error(error)}") from None
