"""Save, resume, retain: the checkpoints of one run.

Invariant: what `load` puts into model and optimizer is exactly what some `save` took out, or nothing at all. A save
that fails costs that save only. May import config, torch and the other modules of this room.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from titanlite.checkpoint import live_tensors, step_folders
from titanlite.checkpoint.dcp import SafeReader, load_tensors
from titanlite.checkpoint.export import CheckpointTensors, export_hf, load_hf_weights
from titanlite.checkpoint.find import use_newest
from titanlite.checkpoint.index import Index
from titanlite.checkpoint.job_diff import compare_jobs
from titanlite.checkpoint.rank_agreement import Ranks
from titanlite.checkpoint.saver import Saver
from titanlite.config import schema
from titanlite.config.errors import CheckpointError, Damage, UserError
from titanlite.model.llama import Llama

LOCK_PATIENCE = 120  # seconds; the workers of a launcher that was killed save before they end


class CheckpointManager:
    """All ranks create one, and call each method together.

    Args:
        folder: where the step folders lie; all nodes must share it.
        model: sharded or not; its parameters may lie in host memory.
        optimizer: None saves and loads weights only.
        log: called on rank 0 with one line of text for each event that a person should know.
        job: the resolved job file as a JSON value, kept in the manifest and compared on resume.
        same_tokenizer: whether the tokenizer has this fingerprint, which a saved data state holds; another is refused.
        compare_data: `Loader.compare`: what differs from the data of a saved state.
        write_tokenizer: for `last_save_in_hf`: puts the tokenizer's files into a folder, returns its special ids.
    """

    def __init__(
        self,
        config: schema.Checkpoint,
        folder: Path,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        log: Callable[[str], None],
        job: dict[str, Any] | None = None,
        same_tokenizer: Callable[[str], bool] = lambda fingerprint: True,
        compare_data: Callable[[dict[str, Any]], tuple[list[str], list[str]]] | None = None,
        write_tokenizer: Callable[[Path], dict[str, int | None]] | None = None,
    ) -> None:
        self.config = config
        self.folder = folder
        self.model = model
        self.optimizer = optimizer
        self.job = job
        self._same_tokenizer, self._compare_data = same_tokenizer, compare_data
        self._log = log
        self._write_tokenizer = write_tokenizer
        self._ranks = Ranks(config.timeout_seconds)
        self._current_step: int | None = None  # the step that the live state was loaded from
        self._lock: int | None = None  # on rank 0
        self._excluded = set(config.exclude_from_loading)
        live_tensors.library_versions()  # opens files, of which there may be too many when a save needs them
        token = self._ranks.on_rank0(self._start)
        self._check_storage(token)
        self._saver = Saver(config, folder, self._ranks, token, log)
        if optimizer is not None and config.async_mode == "async_with_pinned_mem":
            optimizer.register_step_pre_hook(lambda *_: self._saver.before_update())

    def holds(self, step: int) -> bool:
        """Whether the live state of this step was loaded from a checkpoint or is known to be in one, and nothing that
        the newest `save` was to write for it is missing."""
        return step in (self._current_step, self._saver.last_step) and step != self._saver.failed_step

    def stats(self) -> dict[str, int]:
        """Counters for the metrics, alike on all ranks: saves that failed, and those that found the one before still
        under way."""
        return {"failed_saves": self._saver.failed, "save_waits": self._saver.waits}

    def save(self, step: int, train_state: dict[str, Any], *, last: bool = False) -> None:
        """Save the live state as `step-<step>`; does nothing if it is saved already.

        With an async mode it returns once the state is staged; a save still under way is waited for first. A failure
        (disk full, permission) is logged and counted in `stats`; the run goes on.

        Args:
            train_state: small JSON value (data cursor, tokens seen), equal on all ranks; `load` returns it.
            last: the run ends here: what `checkpoint.last_save_*` ask for is done, and of a state that is saved already
                the older checkpoints are removed that a kill has left.
        """
        self._saver.settle()
        final = self.folder.parent / "final"
        if last and self.config.last_save_model_only:
            if not self._ranks.on_rank0(lambda: self._keep_or_supersede(final / step_folders.step_name(step), step)):
                tensors = self._live_tensors(optimizer=False)
                self._saver.save(step, tensors, self._describe(train_state) | {"weights_only": True}, final)
        elif not self.holds(step):
            self._saver.save(step, self._live_tensors(rng=True), self._describe(train_state))
        elif last:
            self._saver.purge()  # the run before may have been killed between its last save and this
        if last and self.config.last_save_in_hf:
            self._saver.settle()
            source = final if self.config.last_save_model_only else self.folder
            if not self._ranks.on_rank0(lambda: self._export(source / step_folders.step_name(step), step)):
                self._saver.fail(step)

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
        candidates = self._ranks.on_rank0(lambda: step_folders.list_checkpoints(self.folder))
        if not all(self._ranks.distinct(all(path.is_dir() for path in candidates))):
            raise CheckpointError(f"{self.folder} is not seen by all ranks. Put it on storage that all nodes share.")
        if self.config.load_step != -1:
            if not self._ranks.on_rank0(lambda: self._went_back(candidates)):
                return self._load_step(candidates, self.config.load_step)
            self._say(f"checkpoint.load_step = {self.config.load_step}: gone back to by an earlier start of this run")
        found = [
            f"{path.name}: set aside earlier"
            for path in self._ranks.on_rank0(lambda: step_folders.list_set_aside(self.folder))
        ]
        for path in reversed(candidates):
            try:
                return self._load(path)
            except Damage as damage:
                aside = self._ranks.on_rank0(lambda path=path: step_folders.set_aside(path))
                self._say(f"checkpoint {path.name} is DAMAGED ({damage}); renamed to {aside.name}")
                found.append(f"{path.name}: {damage}")
        if found:
            raise CheckpointError(
                f"{self.folder}: no good checkpoint is left.\n  " + "\n  ".join(found) + "\n"
                "To start from scratch, move these folders away or choose another checkpoint.folder."
            )
        self._load_initial_weights()
        return None

    def _load_step(self, candidates: list[Path], step: int) -> dict[str, Any]:
        by_step = {step_folders.step_of(path): path for path in candidates}
        if step not in by_step:
            present = ", ".join(str(step) for step in by_step) or "none"
            raise CheckpointError(f"checkpoint.load_step = {step}: {self.folder} has no such step (present: {present})")
        try:
            train_state = self._load(by_step[step])
        except Damage as damage:
            raise CheckpointError(f"checkpoint.load_step = {step} is damaged: {damage}") from None
        for later in (path for path in candidates if (step_folders.step_of(path) or 0) > step):
            aside = self._ranks.on_rank0(lambda later=later: step_folders.set_aside(later, "superseded"))
            self._say(f"going back to step {step}: {later.name} renamed to {aside.name}")
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
            self._say(
                f"{path.name} was saved after {', '.join(sorted(done))} had been started afresh: loaded this time"
            )
        self._report_changes(path, info)
        reader = SafeReader(path)
        tensors = self._tensors_to_load(path, info, self._ranks.together(reader.read_index))
        load_tensors(reader, tensors, self._ranks.group)
        if rng := {name.removeprefix("rng."): tensor for name, tensor in tensors.items() if name.startswith("rng.")}:
            self._ranks.together(lambda: _restore_rng(path, rng, self._ranks.rank))
        self._current_step = manifest["step"]
        self._say(f"resumed from step {manifest['step']} ({path})")
        return {key: v for key, v in info["train_state"].items() if key not in self._excluded}

    def close(self) -> None:
        """Wait for the save and the removals under way."""
        self._saver.close()
        self._ranks.close()
        if self._lock is not None:
            os.close(self._lock)

    # --- what is found at start

    def _start(self) -> str:
        """On rank 0: the folder without leftovers, and in it a file whose name no earlier run has used."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # The other ranks wait, too, and no longer than for a save.
        self._lock = step_folders.lock(self.folder, min(LOCK_PATIENCE, self.config.timeout_seconds / 2), self._log)
        beside = self.folder.parent
        places = [(self.folder, ""), (beside / "final", ""), (beside, "final_hf-")]
        found = [step_folders.remove_unfinished(folder, step_folders.UNFINISHED + prefix) for folder, prefix in places]
        for line in (line for _, kept in found for line in kept):
            self._log(line)
        if gone := [name for names, _ in found for name in names]:
            self._log(f"removed {len(gone)} unfinished checkpoint folders: {', '.join(gone)}")
        token = secrets.token_hex(8)
        (self.folder / f"{step_folders.PROBE}{token}").touch(exist_ok=False)
        return token

    def _check_storage(self, token: str) -> None:
        """Raises UserError, on all ranks, if a save could not succeed: storage not shared, or too little space."""
        probe = self.folder / f"{step_folders.PROBE}{token}"
        patience = time.monotonic() + 10  # network storage shows another node's file with a delay
        while not (seen := probe.exists()) and time.monotonic() < patience:
            time.sleep(0.5)
        if not all(self._ranks.distinct(seen)):
            raise UserError(f"{self.folder} is not the same folder on all nodes. Put it on storage that they share.")
        size = self._estimated_size()
        free = self._ranks.on_rank0(lambda: _remove_probe_and_measure(probe))
        needed = f"{self.folder}: a checkpoint takes about {size / 1e9:.2f} GB, {free / 1e9:.2f} GB are free"
        if free < size:
            raise UserError(f"{needed}. Free some space, or choose another checkpoint.folder.")
        present = len(self._ranks.on_rank0(lambda: step_folders.list_checkpoints(self.folder)))
        if size * max(1, self.config.keep_latest_k + 1 - present) > free:
            self._say(f"{needed}: not enough for checkpoint.keep_latest_k = {self.config.keep_latest_k}")

    def _estimated_size(self) -> int:
        """Bytes of one checkpoint, over all ranks. Before the first step, two states are assumed for each weight."""
        tensors = self._live_tensors()
        sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
        if self.optimizer is not None and not self.optimizer.state:
            sizes |= {f"state of {name}": 2 * size for name, size in sizes.items()}
        of_all = {name: size for of_rank in self._ranks.distinct(sizes) for name, size in of_rank.items()}
        return sum(of_all.values())

    # --- what is saved

    def _live_tensors(self, *, optimizer: bool = True, rng: bool = False) -> dict[str, Tensor]:
        tensors = {f"model.{name}": tensor for name, tensor in live_tensors.model_tensors(self.model).items()}
        if self.optimizer is not None and optimizer:
            names = live_tensors.parameter_names(self.model)
            of_optimizer = live_tensors.optimizer_tensors(self.optimizer, names)
            tensors |= {f"optimizer.{name}": tensor for name, tensor in of_optimizer.items()}
        if rng:
            tensors |= {f"rng.{name}": tensor for name, tensor in live_tensors.rng_tensors(self._ranks.rank).items()}
        return tensors

    def _describe(self, train_state: dict[str, Any]) -> dict[str, Any]:
        return {
            "train_state": train_state,
            "job": self.job,
            "job_hash": xxhash.xxh3_128_hexdigest(json.dumps(self.job, sort_keys=True).encode()),
            "architecture": dataclasses.asdict(self.model.arch) if isinstance(self.model, Llama) else None,
            "optimizer_groups": self._optimizer_groups(),
            "layout": live_tensors.world_layout(self.model),
            "versions": live_tensors.library_versions(),
        }

    def _optimizer_groups(self) -> list[dict[str, Any]]:
        """Settings and parameter names of the groups, over all ranks; empty without an optimizer or without state."""
        if self.optimizer is None or not self.optimizer.state:
            return []
        own = live_tensors.optimizer_groups(self.optimizer, live_tensors.parameter_names(self.model))
        return live_tensors.merge_groups(self._ranks.distinct(own))

    # --- what is loaded

    def _went_back(self, candidates: list[Path]) -> bool:
        """On rank 0: whether the newest checkpoint is of a run that has started from `load_step` already."""
        for path in reversed(candidates):
            with contextlib.suppress(Damage):  # damaged: the one before tells
                since = (step_folders.step_of(path) or 0) > self.config.load_step
                keys = _checkpoint_keys(step_folders.read_manifest(path)["info"])
                return since and keys.get("load_step") == self.config.load_step
        return False

    def _tensors_to_load(self, path: Path, info: dict[str, Any], saved: Index) -> dict[str, Tensor]:
        with_optimizer = bool(info["optimizer_groups"]) and "optimizer" not in self._excluded
        if self.optimizer is not None:
            if with_optimizer:
                live_tensors.initialise_optimizer(self.optimizer)
            else:
                self.optimizer.state.clear()  # of what a damaged one has left
        same_world = info["layout"]["world_size"] == self._ranks.size
        wanted = self._live_tensors(optimizer=with_optimizer, rng=same_world and "rng" not in self._excluded)
        wanted = {name: t for name, t in wanted.items() if not name.startswith("rng.cuda.") or name in saved}
        if misfits := _misfits(wanted, saved, self._ranks):
            raise UserError(f"{path} does not fit this model:\n  {_abridge(misfits)}\nSet [model] as it was.")
        if self.optimizer is not None and with_optimizer:
            differences = live_tensors.group_differences(info["optimizer_groups"], self._optimizer_groups())
            if differences:
                raise UserError(
                    f"{path}: the optimizer's parameter groups differ from those saved:\n  {_abridge(differences)}\n"
                    "Set the [optimizer] section as it was, or start a new run from the weights alone."
                )
        return wanted

    def _report_changes(self, path: Path, info: dict[str, Any]) -> None:
        """Raises UserError: this job cannot go on from there."""
        if self.job is None or info["job"] is None:
            return
        data = info["train_state"].get("data") or {}
        keeps_data = "data" not in self._excluded
        changes = compare_jobs(
            info["job"],
            self.job,
            keeps_data=keeps_data,
            same_tokenizer="tokenizer" not in data or self._same_tokenizer(data["tokenizer"]),
            data=self._compare_data(data) if self._compare_data and data and keeps_data else None,
        )
        for line in changes.lines():
            self._say(f"changed since {path.name}: {line}")
        if changes.refused:
            listed = "\n  ".join(changes.refused)
            raise UserError(f"{path} cannot be resumed from by this job:\n  {listed}\n{changes.remedy(path)}")

    def _load_initial_weights(self) -> None:
        if self.config.initial_load_path is None:
            return
        path = Path(self.config.initial_load_path)
        if self.config.initial_load_in_hf:
            load_hf_weights(path, self.model)
            self._say(f"starting from the weights in {path}")
        else:
            load_model_weights(path, self.model, self._say, self._ranks)

    def _keep_or_supersede(self, path: Path, step: int) -> bool:
        """On rank 0: whether an earlier start wrote this and nothing was trained since. Else it makes room."""
        if not path.exists():
            return False
        if step == self._current_step:
            self._log(f"{path} exists already and is kept")
            return True
        self._log(f"{path} is of an earlier run: renamed to {step_folders.set_aside(path, 'superseded').name}")
        return False

    def _export(self, path: Path, step: int) -> bool:
        """On rank 0: write the last checkpoint for transformers. Reads it from the disk, so no rank has to gather.

        Returns:
            Whether it is there.
        """
        out = self.folder.parent / "final_hf"
        if self._write_tokenizer is None or self._saver.failed_step == step:
            self._log(f"final_hf is not written: {path} could not be saved")
            return True  # that failure is counted
        try:
            if not self._keep_or_supersede(out, step):
                step_folders.check_folder(path)
                export_hf(CheckpointTensors(path), out, self.config.export_dtype, self._write_tokenizer)
                self._log(f"wrote {out} for transformers, {self.config.export_dtype}")
        except (OSError, UserError) as error:
            self._log(f"writing {out} FAILED ({error})")
            return False
        return True

    def _say(self, line: str) -> None:
        if self._ranks.rank == 0:
            self._log(line)


def load_model_weights(
    path: Path, model: nn.Module, log: Callable[[str], None] = lambda line: None, ranks: Ranks | None = None
) -> dict[str, Any]:
    """Load the weights, nothing else, into a model in place; works without a process group, too.

    Args:
        path: a step folder, the folder of all, or a run's output folder; of several the newest good one is taken.
        log: told which.
        ranks: those that hold the model together, if there are several; all of them call this.

    Returns:
        The JSON value of the manifest: train_state, job, layout.

    Raises:
        UserError: there is no such folder, or it holds another model.
        CheckpointError: no checkpoint, or a damaged one.
    """

    def use(step_folder: Path) -> dict[str, Any]:
        info = load_checked_weights(step_folder, model, ranks)
        log(f"starting from the weights in {step_folder}")
        return info

    together = {} if ranks is None else {"check": ranks.check, "look": ranks.on_rank0}
    return use_newest(path, use, **together, log=log)


def load_checked_weights(path: Path, model: nn.Module, ranks: Ranks | None = None) -> dict[str, Any]:
    """`load_model_weights` from a step folder that was checked, without reading it twice.

    Raises:
        Damage: it holds no such tensors, whatever its checksums say. The model may have a part of them.
        UserError: it holds another model.
    """
    tensors = {f"model.{name}": tensor for name, tensor in live_tensors.model_tensors(model).items()}
    reader = SafeReader(path)

    def read() -> tuple[Index, dict[str, Any]]:
        return reader.read_index(), step_folders.read_manifest(path)["info"]

    index, info = read() if ranks is None else ranks.together(read)
    if misfits := _misfits(tensors, index, ranks):
        raise UserError(f"{path} does not fit this model:\n  {_abridge(misfits)}\nSet [model] as it was.")
    load_tensors(reader, tensors, None if ranks is None else ranks.group)
    return info


def _restore_rng(path: Path, rng: dict[str, Tensor], rank: int) -> None:
    try:
        live_tensors.restore_rng(rng, rank)
    except RuntimeError as error:  # bytes that torch does not take
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f'{path}: torch refuses its random states ({reason}). checkpoint.exclude_from_loading = ["rng"] '
            "goes on without them."
        ) from None


def _checkpoint_keys(info: dict[str, Any]) -> dict[str, Any]:
    """[checkpoint] of the job that saved this."""
    return (info["job"] or {}).get("checkpoint", {})


def _misfits(wanted: dict[str, Tensor], saved: Index, ranks: Ranks | None) -> list[str]:
    """One line for each tensor whose name or shape differs between the live state of all ranks and a checkpoint."""
    lines = []
    for name, tensor in wanted.items():
        if name not in saved:
            lines.append(f"{name}: not in the checkpoint")
        elif saved[name].size != tuple(tensor.shape):
            lines.append(f"{name}: shape {saved[name].size} saved, {tuple(tensor.shape)} now")
    own = {"lines": lines, "names": sorted(wanted)}
    of_ranks = [own] if ranks is None else ranks.distinct(own)  # with pipeline stages a rank knows some names only
    known = {name for value in of_ranks for name in value["names"]}
    extra = sorted(name for name in saved if name.startswith("model.") and name not in known)
    return sorted({line for value in of_ranks for line in value["lines"]}) + [f"{n}: only in it" for n in extra]


def _abridge(lines: list[str], limit: int = 8) -> str:
    more = [f"... and {len(lines) - limit} more"] if len(lines) > limit else []
    return "\n  ".join([*lines[:limit], *more])


def _remove_probe_and_measure(probe: Path) -> int:
    probe.unlink()
    return shutil.disk_usage(probe.parent).free
