"""Manage the folders that saves leave behind: outdated, best and final checkpoints, and exports.

Invariant: The target of the link `best` and checkpoints of other runs are never removed. Folders
that other programs wrote are neither removed nor renamed.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from functools import partial
from pathlib import Path

from titanlite.checkpoint.dcp import describe_error
from titanlite.checkpoint.huggingface import TokenizerWriter, checkpoint_weights, export_hf
from titanlite.checkpoint.manifest import (
    BEST_LINK,
    EXPORT_MARKER,
    CheckpointContext,
    belongs_to_run,
    check_checkpoint,
    get_step,
    get_validation_loss,
    is_from_titanlite,
    list_checkpoints,
    read_manifest,
    remove_checkpoint,
    replace_link,
    select_outdated,
    set_aside,
    sync,
)
from titanlite.checkpoint.mirror import Mirror
from titanlite.config.errors import CheckpointError, Damage, UserError


class SavedFolders:
    """Removes outdated checkpoints, links the best one, and exports the last one.

    Only rank 0 calls the methods.

    Args:
        context: Checkpoint folder and options of the run.
        write_tokenizer: Writes the tokenizer files into a folder and returns the special token IDs.
            Used for `checkpoint.last_save_in_hf`.
        mirror: Copies checkpoints to a URL, or None. A checkpoint is not removed while it is being
            copied.

    Attributes:
        run_id: ID of the run. Set it before the first removal, because checkpoints of other runs
            are never removed.
    """

    def __init__(
        self,
        context: CheckpointContext,
        write_tokenizer: TokenizerWriter,
        mirror: Mirror | None,
    ) -> None:
        self.run_id: str | None = None
        self._context = context
        self._folder = context.folder
        self._config = context.config
        self._log = context.log
        self._write_tokenizer = write_tokenizer
        self._mirror = mirror
        self._own_checkpoints = set[Path]()  # those known to belong to this run

    def remove_outdated(self) -> None:
        """Remove the outdated checkpoints of this run.

        Keep the checkpoints that `keep_latest_k`, `keep_every_n_steps` or `keep_best` selects, the
        target of the link `best`, and the checkpoint that is being copied to the mirror. If a
        checkpoint cannot be removed, log this and continue.
        """
        try:
            checkpoints = self._list_checkpoints_of_run()
            if self._config.keep_best:
                # The target of this link is never removed, so let it point to the best checkpoint.
                self.update_best_link()
            outdated = self._select_outdated(checkpoints)
            # The newest checkpoint must survive a power failure before older ones are removed.
            # `publish_checkpoint` also syncs the folder, but only warns if this fails.
            sync(self._folder)
        except Exception as error:  # removals could delete the best or the only durable checkpoint
            self._log(f"Not removing old checkpoints: {describe_error(error)}")
            return

        for path in outdated:
            try:
                remove_checkpoint(path)
            except Exception as error:
                self._log(f"Could not remove the old {path.name}: {describe_error(error)}")

    def _list_checkpoints_of_run(self) -> list[Path]:
        """Return the step folders of this run in the checkpoint folder, sorted by step."""
        return [path for path in list_checkpoints(self._folder) if self._belongs_to_this_run(path)]

    def is_best(self, loss: float) -> bool:
        """Return whether a validation loss is lower than the loss of every saved checkpoint.

        Also return True if a manifest is currently unreadable.
        """
        try:
            return loss < self._find_best()[0]
        except CheckpointError:  # an extra save costs little
            return True

    def update_best_link(self) -> None:
        """Point the symbolic link `best` to the checkpoint with the lowest validation loss.

        If no checkpoint has a validation loss, remove the link.

        Raises:
            CheckpointError: If a manifest is currently unreadable.
            UserError: If `best` exists but is not a link.
        """
        link = self._folder / BEST_LINK
        if os.path.lexists(link) and not link.is_symlink():
            raise UserError(f"{link} is not a link, so it cannot point to the best one. Move it.")

        loss, best = self._find_best()
        if best is None:
            link.unlink(missing_ok=True)
        elif link.resolve() != best.resolve():
            replace_link(link, best)
            self._log(
                f"{best.name} has the lowest validation loss so far, {loss:.4f}: "
                f"{link} points to it"
            )

    def _select_outdated(self, checkpoints: list[Path]) -> list[Path]:
        """Return the checkpoints that can be removed, because no option of the job keeps them.

        Never return the checkpoint that is being copied to the mirror, or the target of the link
        `best`, which an earlier job with `keep_best` may have created.

        Args:
            checkpoints: Step folders of this run, sorted by step.
        """
        best = (self._folder / BEST_LINK).resolve()
        being_copied = self._mirror.sending if self._mirror is not None else None
        outdated_steps = select_outdated([get_step(path) for path in checkpoints], self._config)
        return [
            path
            for path in checkpoints
            if get_step(path) in outdated_steps and path.resolve() not in (best, being_copied)
        ]

    def _belongs_to_this_run(self, path: Path) -> bool:
        """Return whether this run saved a checkpoint. For imported weights, return False."""
        if path not in self._own_checkpoints:  # otherwise, do not read its manifest again
            with suppress(Damage):
                if belongs_to_run(read_manifest(path), self.run_id):
                    self._own_checkpoints.add(path)
        return path in self._own_checkpoints

    def _find_best(self) -> tuple[float, Path | None]:
        """Find the checkpoint with the lowest validation loss.

        Returns:
            The loss and the step folder. If several checkpoints have the same loss, the earliest
            step is used. If no checkpoint has a validation loss, (infinity, None).
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

    # Outputs of the last save

    def keep_or_archive(self, path: Path, can_keep: bool) -> bool:
        """Decide whether to keep an existing final output. If not, rename it to "*.archived".

        An output that another program wrote is not renamed.

        Args:
            path: A step folder in `final`, or the folder `final_hf`.
            can_keep: Whether an existing output has the current weights, so that it can be kept.

        Returns:
            Whether an existing output is kept. If False, the caller writes a new one.
        """
        if not path.exists():
            return False
        if can_keep:
            self._log(f"Keeping {path}, which exists already")
            return True

        # Leave a folder of another program in place. Writing the new output then fails.
        is_export = (path / EXPORT_MARKER).is_file()
        if is_export or is_from_titanlite(path):
            renamed = set_aside(path, "archived")
            self._log(f"Renamed {path} of an earlier start to {renamed.name}")
        return False

    def export(self, step_folder: Path, can_keep: bool) -> bool:
        """Export a checkpoint in Hugging Face format to the folder `final_hf` of the run.

        Args:
            step_folder: The checkpoint.
            can_keep: Whether to keep an existing export instead of archiving it.

        Returns:
            Whether the run now has an export. A failure to write it is logged.
        """
        checkpoint_folder = step_folder.parent
        out = checkpoint_folder.with_name("final_hf")
        try:
            if not self.keep_or_archive(out, can_keep):
                self._write_export(step_folder, out)
        except (OSError, UserError) as error:
            self._log(f"Could not export the checkpoint: {error}")
            return False
        return True

    def _write_export(self, path: Path, out: Path) -> None:
        """Write the weights of a checkpoint to the folder `out` in Hugging Face format.

        Read the weights from disk, so that no rank has to gather them in memory.
        """
        step = get_step(path)
        dtype = self._config.export_dtype
        # `export_hf` reads the weights from disk, which verifies their checksums.
        check_checkpoint(path, skip_tensor_checksums=True)
        weights = checkpoint_weights(path)
        write_other_files = partial(self._write_marker_and_tokenizer, step)
        # The next start of the run recognizes leftover temporary folders by this suffix.
        export_hf(weights, out, dtype, write_other_files, tmp_suffix=self._context.token)
        self._log(f"Exported step {step} to {out} in Hugging Face format ({dtype})")

    def _write_marker_and_tokenizer(self, step: int, folder: Path) -> dict[str, int | None]:
        """Write the marker and tokenizer files of an export, and return the special token IDs.

        The marker shows that a titanlite run wrote the folder.
        """
        marker = {"run": self.run_id, "step": step}
        (folder / EXPORT_MARKER).write_text(json.dumps(marker) + "\n")
        return self._write_tokenizer(folder)
