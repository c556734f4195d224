"""Resume a run from its newest good checkpoint.

Invariant: what `Resumer.load` puts into model and optimizer is exactly what some save took out, or nothing at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from titanlite.checkpoint import live_tensors, step_folders
from titanlite.checkpoint.dcp import SafeReader, load_tensors
from titanlite.checkpoint.folder import CheckpointFolder
from titanlite.checkpoint.import_weights import load_hf_weights
from titanlite.checkpoint.index import Index
from titanlite.checkpoint.job_diff import DataChanges, compare_jobs
from titanlite.checkpoint.live_tensors import LiveState
from titanlite.checkpoint.load_weights import abridged, check_fit, load_model_weights
from titanlite.config import schema
from titanlite.config.errors import CheckpointError, Damage, UserError


class Resumer:
    """All ranks create one, and call `load` together.

    Attributes:
        changes: what the log has been told of the differences between this job and that of the checkpoint.

    Args:
        job: the resolved job file as a JSON value, compared with the one that was saved.
        same_tokenizer: whether the tokenizer has this fingerprint, which a saved data state holds; another is refused.
        compare_data: `Loader.compare`: what differs from the data of a saved state.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        live: LiveState,
        *,
        job: dict[str, Any] | None = None,
        same_tokenizer: Callable[[str], bool] = lambda fingerprint: True,
        compare_data: Callable[[dict[str, Any]], DataChanges] | None = None,
    ) -> None:
        self._folder, self._live, self._job = folder, live, job
        self._config: schema.Checkpoint = folder.config
        self._ranks = folder.ranks
        self._same_tokenizer, self._compare_data = same_tokenizer, compare_data
        self._excluded = set(self._config.exclude_from_loading)
        self.changes: list[str] = []

    def load(self) -> dict[str, Any] | None:
        """Load the newest good checkpoint (or `load_step`) into model and optimizer, in place.

        Damaged ones are named, renamed aside, and the next newest is used. With `load_step`, later ones are renamed
        aside, too: they belong to a future that this run is going to rewrite. That, and `exclude_from_loading`, happens
        once: what a job with the same keys has saved since is resumed from as it is.

        Without a checkpoint, the weights are taken from `initial_load_path`, where it is set.

        Returns:
            The `train_state` that was saved with it, without "data" if that is excluded; None if the run is new.

        Raises:
            UserError: the job does not fit the newest good one: another model, optimizer, tokenizer or data.
            CheckpointError: there are checkpoints but no good one.
        """
        folder, step = self._folder.path, self._config.load_step
        candidates = self._ranks.on_rank0(lambda: step_folders.list_checkpoints(folder))
        if not all(self._ranks.distinct(all(path.is_dir() for path in candidates))):
            raise CheckpointError(f"{folder} is not seen by all ranks. Put it on storage that all nodes share.")
        if step != -1:
            if not self._ranks.on_rank0(lambda: self._went_back(candidates)):
                return self._load_step(candidates, step)
            self._folder.say(f"checkpoint.load_step = {step}: gone back to by an earlier start of this run")
        set_aside = self._ranks.on_rank0(lambda: step_folders.list_set_aside(folder))
        found = [f"{path.name}: set aside earlier" for path in set_aside]
        for path in reversed(candidates):
            try:
                return self._load(path)
            except Damage as damage:
                aside = self._ranks.on_rank0(lambda path=path: step_folders.set_aside(path))
                self._folder.say(f"checkpoint {path.name} is DAMAGED ({damage}); renamed to {aside.name}")
                found.append(f"{path.name}: {damage}")
        if found:
            raise CheckpointError(
                f"{folder}: no good checkpoint is left.\n  " + "\n  ".join(found) + "\n"
                "To start from scratch, move these folders away or choose another checkpoint.folder."
            )
        self._load_initial_weights()
        return None

    def _went_back(self, candidates: list[Path]) -> bool:
        """On rank 0: whether the newest checkpoint is of a run that has started from `load_step` already."""
        for path in reversed(candidates):
            with contextlib.suppress(Damage):  # damaged: the one before tells
                since = (step_folders.step_of(path) or 0) > self._config.load_step
                keys = _checkpoint_keys(step_folders.read_manifest(path)["info"])
                return since and keys.get("load_step") == self._config.load_step
        return False

    def _load_step(self, candidates: list[Path], step: int) -> dict[str, Any]:
        """The checkpoint of this step; later ones are renamed aside."""
        by_step = {step_folders.step_of(path): path for path in candidates}
        if step not in by_step:
            present = ", ".join(str(step) for step in by_step) or "none"
            missing = f"{self._folder.path} has no such step (present: {present})"
            raise CheckpointError(f"checkpoint.load_step = {step}: {missing}")
        try:
            train_state = self._load(by_step[step])
        except Damage as damage:
            raise CheckpointError(f"checkpoint.load_step = {step} is damaged: {damage}") from None
        for later in (path for path in candidates if (step_folders.step_of(path) or 0) > step):
            aside = self._ranks.on_rank0(lambda later=later: step_folders.set_aside(later, "superseded"))
            self._folder.say(f"going back to step {step}: {later.name} renamed to {aside.name}")
        return train_state

    def _load(self, path: Path) -> dict[str, Any]:
        """One checkpoint into model and optimizer. Raises Damage on all ranks; they may hold a part of it then."""
        self._ranks.check(path)
        manifest = self._ranks.on_rank0(lambda: step_folders.read_manifest(path))
        info = manifest["info"]
        if info.get("weights_only") or info["train_state"].get("step") is None:
            raise CheckpointError(
                f"{path} holds weights only: there is no run to resume. Start a new one from them: another "
                f'checkpoint.folder, and checkpoint.initial_load_path = "{path}".'
            )
        if done := self._excluded & set(_checkpoint_keys(info).get("exclude_from_loading", ())):
            self._excluded -= done
            self._folder.say(
                f"{path.name} was saved after {', '.join(sorted(done))} had been started afresh: loaded this time"
            )
        self._report_changes(path, info)
        reader = SafeReader(path)
        tensors = self._tensors_to_load(path, info, self._ranks.together(reader.read_index))
        load_tensors(reader, tensors, self._ranks.group)
        if rng := {name.removeprefix("rng."): tensor for name, tensor in tensors.items() if name.startswith("rng.")}:
            self._ranks.together(lambda: _restore_rng(path, rng, self._ranks.rank))
        self._folder.say(f"resumed from step {manifest['step']} ({path})")
        return {key: value for key, value in info["train_state"].items() if key not in self._excluded}

    def _report_changes(self, path: Path, info: dict[str, Any]) -> None:
        """Raises UserError: this job cannot go on from there."""
        if self._job is None or info["job"] is None:
            return
        data = info["train_state"].get("data") or {}
        resumes_data = self._compare_data is not None and data and "data" not in self._excluded
        changes = compare_jobs(
            info["job"],
            self._job,
            same_tokenizer="tokenizer" not in data or self._same_tokenizer(data["tokenizer"]),
            data=self._compare_data(data) if self._compare_data and resumes_data else None,
        )
        self.changes = changes.differences()
        for line in changes.lines():
            self._folder.say(f"changed since {path.name}: {line}")
        if changes.refused:
            listed = "\n  ".join(changes.refused)
            raise UserError(f"{path} cannot be resumed from by this job:\n  {listed}\n{changes.remedy(path)}")

    def _tensors_to_load(self, path: Path, info: dict[str, Any], saved: Index) -> dict[str, Tensor]:
        """The live tensors that the checkpoint fills. Raises UserError: they do not fit."""
        optimizer = self._live.optimizer
        with_optimizer = bool(info["optimizer_groups"]) and "optimizer" not in self._excluded
        if optimizer is not None and with_optimizer:
            live_tensors.initialise_optimizer(optimizer)
        elif optimizer is not None:
            optimizer.state.clear()  # of what a damaged one has left
        same_world = info["layout"]["world_size"] == self._ranks.size
        wanted = self._live.tensors(optimizer=with_optimizer, rng=same_world and "rng" not in self._excluded)
        wanted = {name: t for name, t in wanted.items() if not name.startswith("rng.cuda.") or name in saved}
        check_fit(path, wanted, saved, self._ranks)
        if optimizer is not None and with_optimizer:
            now = self._live.optimizer_groups(self._ranks)
            if differences := live_tensors.group_differences(info["optimizer_groups"], now):
                raise UserError(
                    f"{path}: the optimizer's parameter groups differ from those saved:\n  {abridged(differences)}\n"
                    "Set the [optimizer] section as it was, or start a new run from the weights alone."
                )
        return wanted

    def _load_initial_weights(self) -> None:
        if self._config.initial_load_path is None:
            return
        path = Path(self._config.initial_load_path)
        if self._config.initial_load_in_hf:
            load_hf_weights(path, self._live.model)
            self._folder.say(f"starting from the weights in {path}")
        else:
            load_model_weights(path, self._live.model, self._folder.say, self._ranks)


def _checkpoint_keys(info: dict[str, Any]) -> dict[str, Any]:
    """[checkpoint] of the job that saved this."""
    return (info["job"] or {}).get("checkpoint", {})


def _restore_rng(path: Path, rng: dict[str, Tensor], rank: int) -> None:
    try:
        live_tensors.restore_rng(rng, rank)
    except RuntimeError as error:  # bytes that torch does not take
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f'{path}: torch refuses its random states ({reason}). checkpoint.exclude_from_loading = ["rng"] '
            "goes on without them."
        ) from None
