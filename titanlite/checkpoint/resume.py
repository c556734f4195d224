"""Load a checkpoint into a live model: a whole run from its newest good one, or the weights alone.

Invariant: what is put into model and optimizer is exactly what some save took out. Each parameter gets the tensor of
its own name and shape, all of them finite, and no tensor of a model in the checkpoint is left over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from titanlite.checkpoint import live_tensors, step_folders
from titanlite.checkpoint.dcp import Index, SafeReader, abridged, load_tensors
from titanlite.checkpoint.find import use_newest
from titanlite.checkpoint.folder import CheckpointFolder, Ranks
from titanlite.checkpoint.job_diff import CURVE, REMEDIES, DataChanges, compare_jobs
from titanlite.checkpoint.live_tensors import LiveState
from titanlite.checkpoint.published import load_hf_weights
from titanlite.config.errors import CheckpointError, Damage, UserError
from titanlite.model.formats import differences

if TYPE_CHECKING:
    from titanlite.data.tokenizer import Tokenizer

_OTHER_SCHEDULE = "lr_scheduler: titanlite 0.2 and before decayed a step earlier; now the rate is torchtitan's"


@dataclass
class Resumer:
    """All ranks create one, and call `load` together.

    Args:
        job: the resolved job file as a JSON value, compared with the one that was saved.
        same_tokenizer: whether the tokenizer has this fingerprint, which a saved data state holds; another is refused.
        compare_data: `Loader.compare`: what differs from the data of a saved state.
    """

    folder: CheckpointFolder
    live: LiveState
    job: dict[str, Any] | None = None
    same_tokenizer: Callable[[str], bool] = lambda fingerprint: True
    compare_data: Callable[[dict[str, Any]], DataChanges] | None = None

    def __post_init__(self) -> None:
        self._ranks, self._config = self.folder.ranks, self.folder.config
        self._excluded = set(self._config.exclude_from_loading)

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
        folder, step, ranks = self.folder.path, self._config.load_step, self._ranks
        candidates = ranks.on_rank0(lambda: step_folders.list_checkpoints(folder))
        found = [
            f"{path.name}: set aside earlier" for path in ranks.on_rank0(partial(step_folders.list_set_aside, folder))
        ]
        if step != -1 and not ranks.on_rank0(lambda: self._went_back(candidates)):
            return self._load_step(candidates, step)
        for path in reversed(candidates):
            try:
                return self._load(path)
            except Damage as damage:
                found.append(f"{path.name}: {damage}")
                self._set_aside(path, f"checkpoint {path.name} is DAMAGED ({damage});")
        if found:
            listed = "\n  ".join([f"{folder}: no good checkpoint is left.", *found])
            raise CheckpointError(
                f"{listed}\nTo start from scratch, move them away or choose another checkpoint.folder."
            )
        self._load_initial_weights()
        return None

    def _set_aside(self, path: Path, why: str, reason: str = "damaged") -> None:
        aside = self._ranks.on_rank0(lambda: step_folders.set_aside(path, reason))
        self.folder.say(f"{why} renamed to {aside.name}")

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
        path, asked = self.folder.path / step_folders.step_name(step), f"checkpoint.load_step = {step}"
        if path not in candidates:
            present = ", ".join(candidate.name for candidate in candidates) or "none"
            raise CheckpointError(f"{asked}: {self.folder.path} has no such step (present: {present})")
        try:
            train_state = self._load(path)
        except Damage as damage:
            raise CheckpointError(f"{asked} is damaged: {damage}") from None
        for later in candidates[candidates.index(path) + 1 :]:
            self._set_aside(later, f"going back to step {step}: {later.name}", "superseded")
        return train_state

    def _load(self, path: Path) -> dict[str, Any]:
        """One checkpoint into model and optimizer. Raises Damage on all ranks, before anything is loaded."""
        self._ranks.check(path)
        manifest = self._ranks.on_rank0(lambda: step_folders.read_manifest(path))
        info = manifest["info"]
        if info.get("weights_only") or "step" not in info["train_state"]:
            start = f'another checkpoint.folder, and checkpoint.initial_load_path = "{path}"'
            raise CheckpointError(f"{path} holds weights only: there is no run to resume. Start a new one: {start}.")
        state = info["train_state"]
        place = (state.get("data") or {}).get("schedule", {"step": 0, "rows": []})
        if place["step"] > state["step"] or sum(place["rows"]) > state["tokens"]:  # a row has a token at least
            raise Damage("manifest.json: a place in the data that no run comes to")
        if done := self._excluded & set(_checkpoint_keys(info).get("exclude_from_loading", ())):
            self._excluded -= done
            words = f"{', '.join(sorted(done))} had been started afresh: loaded this time"
            self.folder.say(f"{path.name} was saved after {words}")
        if self.job is not None and info["job"] is not None:
            self._compare(path, manifest, self.job)
        reader = self._ranks.together(lambda: SafeReader(path))
        tensors = self._tensors_to_load(path, info, reader.index)
        load_tensors(reader, tensors, self._ranks.group)
        _check_finite(path, tensors, self._ranks)
        for name in (name for name in tensors if name.startswith("rng.")):
            restore = torch.cuda.set_rng_state if name.startswith("rng.cuda.") else torch.set_rng_state
            restore(tensors[name])
        self.folder.say(f"resumed from step {manifest['step']} ({path})")
        return {key: value for key, value in state.items() if key not in self._excluded}

    def _compare(self, path: Path, manifest: dict[str, Any], job: dict[str, Any]) -> None:
        """Say what has changed. Raises UserError: this job cannot go on from there."""
        info = manifest["info"]
        data = info["train_state"].get("data") or {}
        compare = self.compare_data if data and "data" not in self._excluded else None
        same_tokenizer = "tokenizer" not in data or self.same_tokenizer(data["tokenizer"])
        changes = compare_jobs(info["job"], job, same_tokenizer=same_tokenizer, data=compare(data) if compare else None)
        if manifest["format"] == 1 and job["lr_scheduler"]["decay_ratio"] != 0:
            changes.append((CURVE, _OTHER_SCHEDULE))
        for verdict, line in changes:
            self.folder.say(f"changed since {path.name}: {line} ({verdict})")
        if refused := [(verdict, line) for verdict, line in changes if verdict in REMEDIES]:
            listed = "\n  ".join([f"{path} cannot be resumed from by this job:", *(line for _, line in refused)])
            raise UserError(f"{listed}\n{REMEDIES[refused[0][0]].format(checkpoint=path)}")

    def _tensors_to_load(self, path: Path, info: dict[str, Any], saved: Index) -> dict[str, Tensor]:
        """The live tensors that the checkpoint fills. Raises UserError: they do not fit."""
        optimizer = self.live.optimizer
        if not info["optimizer_groups"] or "optimizer" in self._excluded:
            optimizer = None
        if optimizer is not None:
            live_tensors.initialise_optimizer(optimizer)
        rng = info["layout"]["world_size"] == self._ranks.size and "rng" not in self._excluded
        wanted = self.live.tensors(optimizer=optimizer is not None, rng=rng)
        # A hook that the checkpoint does not know begins anew.
        for name in [name for name in wanted if name not in saved and name.startswith(("rng.cuda.", "hooks."))]:
            del wanted[name]
        check_fit(path, wanted, saved, self._ranks)
        now = self.live.optimizer_groups(self._ranks)
        if optimizer is not None and (moved := live_tensors.group_differences(info["optimizer_groups"], now)):
            remedy = "Set the [optimizer] section as it was, or start a new run from the weights alone."
            raise UserError(f"{path}: the optimizer's groups are others:\n  {abridged(moved)}\n{remedy}")
        return wanted

    def _load_initial_weights(self) -> None:
        if self._config.initial_load_path is None:
            return
        path, model, ranks, say = Path(self._config.initial_load_path), self.live.model, self._ranks, self.folder.say
        if self._config.initial_load_in_hf:
            load_hf_weights(path, model)
            _check_finite(path, self.live.tensors(optimizer=False), ranks)
        else:
            load = partial(load_checked_weights, model=model, ranks=ranks)
            path = use_newest(path, lambda step: (load(step), step)[1], check=ranks.check, look=ranks.on_rank0, log=say)
        say(f"starting from the weights in {path}")


def _checkpoint_keys(info: dict[str, Any]) -> dict[str, Any]:
    """[checkpoint] of the job that saved this."""
    return (info["job"] or {}).get("checkpoint", {})


def load_checked_weights(path: Path, model: nn.Module, ranks: Ranks | None = None) -> dict[str, Any]:
    """Load the weights of a step folder that was checked, nothing else, into a model in place.

    Args:
        ranks: those that hold the model together, if there are several; all of them call this.

    Returns:
        The JSON value of the manifest: train_state, job, layout.

    Raises:
        UserError: it holds another model.
        CheckpointError: weights that are not finite, or it cannot be read.
    """
    tensors = LiveState(model).tensors()
    reader = SafeReader(path) if ranks is None else ranks.together(lambda: SafeReader(path))
    check_fit(path, tensors, reader.index, ranks)
    load_tensors(reader, tensors, None if ranks is None else ranks.group)
    _check_finite(path, tensors, ranks)
    return step_folders.read_manifest(path)["info"]


def _check_finite(path: Path, tensors: dict[str, Tensor], ranks: Ranks | None) -> None:
    """Raises CheckpointError, on all ranks, that names the weights which are not finite."""
    weights = [(name[6:], live_tensors.local(t)) for name, t in tensors.items() if name.startswith("model.")]
    bad = [name for name, tensor in weights if not live_tensors.is_finite(tensor)]
    of_ranks = [bad] if ranks is None else ranks.distinct(bad)
    if lines := sorted({name for names in of_ranks for name in names}):
        raise CheckpointError(f"{path} holds weights that are not finite (NaN or infinite):\n  {abridged(lines)}")


def check_tokenizer(path: Path, info: dict[str, Any], tokenizer: Tokenizer, name: object, rows: int) -> None:
    """Refuse a tokenizer with other ids than the one that the checkpoint at `path` was trained with.

    Args:
        info: What `load_checked_weights` returned.
        name: What to call the tokenizer.
        rows: Those of the embedding.

    Raises:
        CheckpointError: it has other ids, or more than the embedding has rows.
    """
    known = (info["train_state"].get("data") or {}).get("tokenizer")
    if (known is not None and not tokenizer.is_known_as(known)) or tokenizer.vocab_size > rows:
        problem = f"{path} was trained with another tokenizer than {name} is now"
        raise CheckpointError(f"{problem}. Put the original file back.")


def check_fit(path: Path, wanted: dict[str, Tensor], saved: Index, ranks: Ranks | None) -> None:
    """Compare names and shapes of the live tensors of all ranks with those of a checkpoint.

    Raises:
        UserError: on all ranks: they differ; with the differences.
    """
    here = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    if ranks is not None:  # with pipeline stages a rank knows some names only
        here = {name: shape for of_rank in ranks.distinct(here) for name, shape in of_rank.items()}
    there = {name: tuple(saved[name].size) for name in saved if name in here or name.startswith("model.")}
    if lines := differences(here, there):
        raise UserError(f"{path} does not fit this model:\n  {abridged(lines)}\nSet [model] as it was.")
