"""Load a checkpoint into a live model: a whole run from its newest good one, or the weights alone.

Invariant: what is put into model and optimizer is exactly what some save took out. Each parameter gets the tensor of
its own name and shape, all of them finite, and no tensor of a model in the checkpoint is left over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import _init_optim_state

from titanlite.checkpoint import live_tensors, step_folders
from titanlite.checkpoint.dcp import SafeReader, abridged, load_tensors, weights_of
from titanlite.checkpoint.find import checkpoint_keys, on_this_machine, use_newest, went_back
from titanlite.checkpoint.folder import CheckpointFolder, Ranks
from titanlite.checkpoint.job_diff import CURVE, REFUSED, DataChanges, compare_jobs, say_changes
from titanlite.checkpoint.published import load_hf_weights
from titanlite.config.errors import CheckpointError, Damage, UserError
from titanlite.config.flavors import Architecture
from titanlite.config.storage import local_copy
from titanlite.model.formats import differences, parameter_shapes
from titanlite.model.llama import Llama

if TYPE_CHECKING:
    from titanlite.data.tokenizer import Tokenizer

_OTHER_SCHEDULE = "lr_scheduler: titanlite 0.2 and before decayed a step earlier; now the rate is torchtitan's"
_ALONE = Ranks()


@dataclass
class Resumer:
    """All ranks create one, and call `load` together.

    Args:
        same_tokenizer: whether the tokenizer has this fingerprint, which a saved data state holds; another is refused.
        compare_data: `Loader.compare`: what differs from the data of a saved state.
    """

    folder: CheckpointFolder
    same_tokenizer: Callable[[str], bool] = lambda fingerprint: True
    compare_data: Callable[[dict[str, Any]], DataChanges] | None = None

    def __post_init__(self) -> None:
        self._ranks, self._config, self._log = self.folder.ranks, self.folder.config, self.folder.log
        self._excluded = set(self._config.exclude_from_loading)

    def load(self) -> dict[str, Any] | None:
        """Load the newest good checkpoint (or `load_step`) into model and optimizer, in place.

        Damaged ones are named, renamed aside, and the next newest is used. With `load_step` no other is used, and later
        ones are renamed aside, too: they belong to a future that this run is going to rewrite. That, and
        `exclude_from_loading`, happens once: what a job with the same keys has saved since is resumed from as it is.

        Without a checkpoint, the weights are taken from `initial_load_path`, where it is set.

        Returns:
            The `train_state` that was saved with it, without "data" if that is excluded; None if the run is new.

        Raises:
            UserError: the job does not fit the newest good one: another model, optimizer, tokenizer or data.
            CheckpointError: there are checkpoints but no good one.
        """
        folder, step, ranks = self.folder.path, self._config.load_step, self._ranks
        candidates = ranks.on_rank0(lambda: step_folders.list_checkpoints(folder))
        earlier, later = ranks.on_rank0(lambda: step_folders.list_set_aside(folder)), []
        found = [f"{path.name}: set aside earlier" for path in earlier]
        if step != -1 and not ranks.on_rank0(lambda: went_back(candidates, step)):
            present = ", ".join(path.name for path in candidates) or "none"
            found = [f"checkpoint.load_step = {step}; present: {present}"]
            later = [path for path in candidates if (step_folders.step_of(path) or 0) > step]
            candidates = [path for path in candidates if step_folders.step_of(path) == step]
        for path in reversed(candidates):
            try:
                state = self._load(path)
            except Damage as damage:
                found.append(f"{path.name}: {damage}")
                self._set_aside(path, f"checkpoint {path.name} is DAMAGED ({damage});")
                continue
            for superseded in later:
                self._set_aside(superseded, f"going back to step {step}: {superseded.name}", "superseded")
            return state
        if found:
            listed = "\n  ".join([f"{folder}: no good checkpoint is left.", *found])
            remedy = "To start from scratch, move them away or choose another checkpoint.folder."
            raise CheckpointError(f"{listed}\n{remedy}")
        self.load_initial_weights()
        return None

    def load_before(self, step: int, forget: bool = False) -> dict[str, Any] | None:
        """Load the newest good checkpoint before `step`, in place, if there is one. Nothing on disk changes. Returns
        and raises as `load`.

        Args:
            forget: fill tensors of hooks that it does not have with NaN, because they are of later steps.
        """
        for path in reversed(self._ranks.on_rank0(lambda: step_folders.list_checkpoints(self.folder.path))):
            if (step_folders.step_of(path) or 0) < step:
                try:
                    return self._load(path, forget)
                except Damage as damage:
                    self._log(f"{path.name} is damaged: {damage}; taking an older one")
        return None

    def _set_aside(self, path: Path, why: str, reason: str = "damaged") -> None:
        aside = self._ranks.on_rank0(lambda: step_folders.set_aside(path, reason))
        self._log(f"{why} renamed to {aside.name}")

    def _load(self, path: Path, forget: bool = False) -> dict[str, Any]:
        """One checkpoint into model and optimizer. Raises Damage on all ranks, before anything is loaded."""
        manifest = self._ranks.check(path)
        info, state = manifest["info"], manifest["info"]["train_state"]
        if info.get("weights_only") or "step" not in state:
            start = f'another checkpoint.folder, and checkpoint.initial_load_path = "{path}"'
            raise CheckpointError(f"{path} holds weights only: there is no run to resume. Start a new one: {start}.")
        place = (state.get("data") or {}).get("schedule", {"step": 0, "rows": []})
        if place["step"] > state["step"] or sum(place["rows"]) > state["tokens"]:  # a row has a token at least
            raise Damage("manifest.json: a place in the data that no run comes to")
        if done := self._excluded & set(checkpoint_keys(info).get("exclude_from_loading", ())):
            self._excluded -= done
            words = f"{', '.join(sorted(done))} had been started afresh: loaded this time"
            self._log(f"{path.name} was saved after {words}")
        self.compare(path, manifest)
        reader = self._ranks.together(lambda: SafeReader(path))
        live, saved = self.folder.live, reader.index
        with_optimizer = "optimizer" not in self._excluded and any(name.startswith("optimizer.") for name in saved)
        if with_optimizer and live.optimizer is not None:
            _init_optim_state(live.optimizer)
        rng = info["layout"]["world_size"] == self._ranks.size and "rng" not in self._excluded
        wanted = live.tensors(optimizer=with_optimizer, rng=rng)
        # A hook that the checkpoint does not know begins anew.
        for name in [name for name in wanted if name not in saved and name.startswith(("rng.cuda.", "hooks."))]:
            tensor = wanted.pop(name)
            if forget and name.startswith("hooks."):
                tensor.fill_(torch.nan)
        _fill(wanted, live.model.arch, reader, self._ranks)
        for name in (name for name in wanted if name.startswith("rng.")):
            restore = torch.cuda.set_rng_state if name.startswith("rng.cuda.") else torch.set_rng_state
            restore(wanted[name])
        self._log(f"Resumed after step {state['step']} of {path}: {state['tokens']:,} tokens seen")
        return {key: value for key, value in state.items() if key not in self._excluded}

    def compare(self, path: PurePath, manifest: dict[str, Any]) -> None:
        """Say what has changed. Raises UserError: this job cannot go on from there."""
        info, job = manifest["info"], self.folder.job
        if job is None or info["job"] is None:
            return
        data = info["train_state"].get("data") or {}
        compare = self.compare_data if data and "data" not in self._excluded else None
        # A flavor and its keys written out are the same model, so what they stand for is compared.
        before = info["job"] | {"model": info["architecture"]}
        now = job | {"model": asdict(self.folder.live.model.arch)}
        changes = compare_jobs(before, now, compare(data) if compare else None)
        if "tokenizer" in data and not self.same_tokenizer(data["tokenizer"]):
            changes.append((REFUSED, f"tokenizer.path: {job['tokenizer']['path']}, whose ids mean other text"))
        if manifest["format"] == 1 and job["lr_scheduler"]["decay_ratio"] != 0:
            changes.append((CURVE, _OTHER_SCHEDULE))
        say_changes(path, changes, self._log)

    def load_initial_weights(self) -> None:
        """Load what a new run starts from, if the job names it."""
        if self._config.initial_load_path is None:
            return
        path, live, ranks = Path(self._config.initial_load_path), self.folder.live, self._ranks
        copy = local_copy if self._config.initial_load_in_hf else on_this_machine
        path = ranks.together(partial(copy, path))
        if self._config.initial_load_in_hf:
            load_hf_weights(path, live.model)
            ranks.together(lambda: _check_finite(path, live.tensors(optimizer=False)))
        else:
            load = partial(load_checked_weights, model=live.model, ranks=ranks)
            path = use_newest(path, load, check=ranks.check, look=ranks.on_rank0, log=self._log)
        self._log(f"starting from the weights in {path}")


def load_checked_weights(path: Path, model: Llama, ranks: Ranks = _ALONE, averaged: bool = False) -> Path:
    """Load the weights of a step folder that was checked, nothing else, into a model in place.

    Args:
        ranks: those that hold the model together; all of them call this.
        averaged: take the averages of the weights.

    Returns:
        The step folder.

    Raises:
        UserError: it holds another model.
        CheckpointError: weights that are not finite, or it cannot be read.
    """
    reader = ranks.together(lambda: SafeReader(path))
    prefix = ranks.together(lambda: weights_of(reader, averaged))
    tensors = {f"{prefix}{name}": tensor for name, tensor in live_tensors.model_tensors(model).items()}
    _fill(tensors, model.arch, reader, ranks)
    return path


def _fill(tensors: dict[str, Tensor], arch: Architecture, reader: SafeReader, ranks: Ranks) -> None:
    """Read live tensors of this rank. All ranks have a part of the whole model.

    Raises:
        UserError: on all ranks: the checkpoint is of another model, or lacks a tensor, or has another shape.
        CheckpointError: on all ranks: one cannot be read, or is not finite.
    """
    ranks.together(lambda: _check_fit(tensors, arch, reader))
    load_tensors(reader, tensors, ranks.group)
    ranks.together(lambda: _check_finite(reader.path, tensors))


def _check_fit(tensors: dict[str, Tensor], arch: Architecture, reader: SafeReader) -> None:
    # With pipeline stages a rank has some tensors only. The architecture names the others.
    here = {f"model.{name}": shape for name, shape in parameter_shapes(arch).items()}
    here |= {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    sizes = {name: tuple(entry.size) for name, entry in reader.index.items()}
    there = {name: size for name, size in sizes.items() if name in here or name.startswith("model.")}
    if lines := differences(here, there):
        raise UserError(f"{reader.path} does not fit this model:\n  {abridged(lines)}\nSet [model] as it was.")


def _check_finite(path: object, tensors: dict[str, Tensor]) -> None:
    weights = {name: tensor for name, tensor in tensors.items() if name.startswith(live_tensors.WEIGHTS)}
    if bad := sorted(name for name, each in weights.items() if not live_tensors.is_finite(live_tensors.local(each))):
        raise CheckpointError(f"{path} holds weights that are not finite (NaN or infinite):\n  {abridged(bad)}")


def check_tokenizer(path: Path, tokenizer: Tokenizer, name: object, rows: int) -> None:
    """Refuse a tokenizer with other ids than the one that the checkpoint at `path` was trained with.

    Args:
        name: What to call the tokenizer.
        rows: Those of the embedding.

    Raises:
        CheckpointError: it has other ids, or more than the embedding has rows.
    """
    known = (step_folders.read_manifest(path)["info"]["train_state"].get("data") or {}).get("tokenizer")
    if (known is not None and not tokenizer.is_known_as(known)) or tokenizer.vocab_size > rows:
        problem = f"{path} was trained with another tokenizer than {name} is now"
        raise CheckpointError(f"{problem}. Put the original file back.")
