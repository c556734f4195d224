"""Save, resume, retain: the checkpoints of one run.

Invariant: what `load` puts into model and optimizer is exactly what some `save` took out, or nothing at all. A save
that fails costs that save only. May import config, torch and the other modules of this room.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from titanlite.checkpoint import commit, state
from titanlite.checkpoint.storage import CommittingWriter, SafeReader
from titanlite.config import schema
from titanlite.config.errors import CheckpointError

T = TypeVar("T")


class CheckpointManager:
    """All ranks create one, and call each method together.

    Args:
        folder: where the step folders lie; all nodes must share it.
        model: sharded or not; its parameters may lie in host memory.
        optimizer: None saves and loads weights only.
        log: called on rank 0 with one line of text for each event that a person should know.
        job: the resolved job file as a JSON value, kept in the manifest.
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
    ) -> None:
        self.config = config
        self.folder = folder
        self.model = model
        self.optimizer = optimizer
        self.job = job
        self.failed_saves = 0
        self._log = log
        group = dist.new_group(backend="gloo")  # objects travel between hosts, never through a GPU
        assert isinstance(group, dist.ProcessGroup)
        self._group = group
        self._rank = dist.get_rank()
        self._token = self._on_rank0(self._start)
        self._saves = 0
        self._current_step: int | None = None  # the step whose checkpoint equals the live state, if any

    def _start(self) -> str:
        self.folder.mkdir(parents=True, exist_ok=True)
        if leftovers := commit.remove_unfinished(self.folder):
            self._log(f"removed {len(leftovers)} unfinished checkpoint folders: {', '.join(leftovers)}")
        return secrets.token_hex(8)

    def save(self, step: int, train_state: dict[str, Any]) -> None:
        """Save the live state as `step-<step>`; does nothing if it is saved already.

        A failure (disk full, permission) is logged and counted in `failed_saves`; the run goes on.

        Args:
            train_state: small JSON value (data cursor, tokens seen), equal on all ranks; `load` returns it.
        """
        if step == self._current_step:
            return
        self._saves += 1
        started = time.perf_counter()
        writer = CommittingWriter(self.folder, step, f"{self._token}-{self._saves}", self._describe(train_state))
        tensors = self._live_tensors(with_rng=True)
        try:
            planner = DefaultSavePlanner(flatten_state_dict=False)
            dcp_save(tensors, storage_writer=writer, planner=planner, process_group=self._group)
        except CheckpointException as error:
            self.failed_saves += 1
            self._on_rank0(lambda: shutil.rmtree(writer.unfinished, ignore_errors=True))
            self._say(f"save of step {step} FAILED ({_cause(error)}); the run goes on, the next save is a new try")
            return
        self._current_step = step
        self._say(
            f"saved step {step} to {self.folder / commit.step_name(step)} in {time.perf_counter() - started:.1f} s"
        )
        self._on_rank0(self._purge)

    def load(self) -> dict[str, Any] | None:
        """Load the newest good checkpoint (or `load_step`) into model and optimizer, in place.

        Damaged ones are named, renamed aside, and the next newest is used. With `load_step`, later ones are renamed
        aside, too: they belong to a future that this run is going to rewrite.

        Returns:
            The `train_state` that was saved with it; None if there is no checkpoint.

        Raises:
            CheckpointError: there are checkpoints but no good one, or it does not fit this model or optimizer.
        """
        path = self._choose()
        if path is None:
            return None
        manifest = self._on_rank0(lambda: commit.read_manifest(path))
        info = manifest["info"]
        tensors = self._tensors_to_load(path, info)
        dcp_load(
            tensors,
            storage_reader=SafeReader(path),
            planner=DefaultLoadPlanner(flatten_state_dict=False),
            process_group=self._group,
        )
        if rng := {name.removeprefix("rng."): tensor for name, tensor in tensors.items() if name.startswith("rng.")}:
            state.restore_rng(rng, self._rank)
        self._current_step = manifest["step"]
        self._say(f"resumed from step {manifest['step']} ({path})")
        return info["train_state"]

    def close(self) -> None:
        """Wait for what is under way."""
        dist.barrier(self._group)

    # --- what is saved

    def _live_tensors(self, with_rng: bool) -> dict[str, Tensor]:
        tensors = {f"model.{name}": tensor for name, tensor in state.model_tensors(self.model).items()}
        if self.optimizer is not None:
            names = state.parameter_names(self.model)
            of_optimizer = state.optimizer_tensors(self.optimizer, names)
            tensors |= {f"optimizer.{name}": tensor for name, tensor in of_optimizer.items()}
        if with_rng:
            tensors |= {f"rng.{name}": tensor for name, tensor in state.rng_tensors(self._rank).items()}
        return tensors

    def _describe(self, train_state: dict[str, Any]) -> dict[str, Any]:
        return {
            "train_state": train_state,
            "job": self.job,
            "optimizer_groups": self._optimizer_groups(),
            "layout": state.world_layout(self.model),
            "torch": torch.__version__,
        }

    def _optimizer_groups(self) -> list[dict[str, Any]]:
        """Settings and parameter names of the groups, over all ranks; empty without an optimizer or without state."""
        if self.optimizer is None or not self.optimizer.state:
            return []
        own = state.optimizer_groups(self.optimizer, state.parameter_names(self.model))
        return state.merge_groups(_distinct(own, self._group))

    # --- what is loaded

    def _choose(self) -> Path | None:
        candidates = self._on_rank0(lambda: commit.list_checkpoints(self.folder))
        if not all(_distinct(all(path.is_dir() for path in candidates), self._group)):
            raise CheckpointError(f"{self.folder} is not seen by all ranks. Put it on storage that all nodes share.")
        if self.config.load_step != -1:
            return self._choose_step(candidates, self.config.load_step)
        found = [
            f"{path.name}: set aside earlier" for path in self._on_rank0(lambda: commit.list_set_aside(self.folder))
        ]
        for path in reversed(candidates):
            damage = self._verify(path)
            if not damage:
                return path
            aside = self._on_rank0(lambda path=path: commit.set_aside(path))
            self._say(f"checkpoint {path.name} is DAMAGED ({'; '.join(damage)}); renamed to {aside.name}")
            found.append(f"{path.name}: {'; '.join(damage)}")
        if found:
            raise CheckpointError(
                f"{self.folder}: no good checkpoint is left.\n  " + "\n  ".join(found) + "\n"
                "To start from scratch, move these folders away or choose another checkpoint.folder."
            )
        return None

    def _choose_step(self, candidates: list[Path], step: int) -> Path:
        by_step = {commit.step_of(path): path for path in candidates}
        if step not in by_step:
            present = ", ".join(str(step) for step in by_step) or "none"
            raise CheckpointError(f"checkpoint.load_step = {step}: {self.folder} has no such step (present: {present})")
        if damage := self._verify(by_step[step]):
            raise CheckpointError(f"checkpoint.load_step = {step} is damaged: {'; '.join(damage)}")
        for later in (path for path in candidates if path.name > by_step[step].name):
            aside = self._on_rank0(lambda later=later: commit.set_aside(later, "superseded"))
            self._say(f"going back to step {step}: {later.name} renamed to {aside.name}")
        return by_step[step]

    def _verify(self, path: Path) -> list[str]:
        """Damage of a checkpoint; the ranks share the reading."""
        own = commit.verify_folder(path, lambda names: names[self._rank :: dist.get_world_size()])
        return sorted({line for lines in _distinct(own, self._group) for line in lines})

    def _tensors_to_load(self, path: Path, info: dict[str, Any]) -> dict[str, Tensor]:
        with_optimizer = self.optimizer is not None and len(info["optimizer_groups"]) > 0
        if self.optimizer is not None and with_optimizer:
            state.initialise_optimizer(self.optimizer)
        same_world = info["layout"]["world_size"] == dist.get_world_size()
        live = self._live_tensors(with_rng=same_world)
        wanted = {name: t for name, t in live.items() if with_optimizer or not name.startswith("optimizer.")}
        saved = SafeReader(path).read_metadata().state_dict_metadata
        wanted = {name: t for name, t in wanted.items() if not name.startswith("rng.") or name in saved}
        if misfits := _misfits(wanted, saved, self._group):
            raise CheckpointError(f"{path} does not fit this model:\n  " + _abridge(misfits))
        if with_optimizer:
            differences = state.group_differences(info["optimizer_groups"], self._optimizer_groups())
            if differences:
                raise CheckpointError(
                    f"{path}: the optimizer's parameter groups differ from those saved:\n  {_abridge(differences)}\n"
                    "Set the [optimizer] section as it was, or start a new run from the weights alone."
                )
        return wanted

    # --- what is kept

    def _purge(self) -> None:
        """Remove the oldest checkpoints beyond keep_latest_k. The newest, just written, is never among them."""
        if self.config.keep_latest_k == 0:
            return
        complete = [path for path in commit.list_checkpoints(self.folder) if (path / commit.MANIFEST).is_file()]
        for path in complete[: -self.config.keep_latest_k]:
            try:
                commit.remove(path)
            except OSError as error:
                self._log(f"could not remove the old checkpoint {path.name}: {error}")

    # --- talking to other ranks and to people

    def _say(self, line: str) -> None:
        if self._rank == 0:
            self._log(line)

    def _on_rank0(self, function: Callable[[], T]) -> T:
        """Call it on rank 0; its value, or its error, comes back on every rank."""
        result: list[Any] = [None, None]
        if self._rank == 0:
            try:
                result[0] = function()
            except (OSError, ValueError) as error:
                result[1] = f"{type(error).__name__}: {error}"
        dist.broadcast_object_list(result, src=0, group=self._group)
        if result[1] is not None:
            raise CheckpointError(f"{self.folder}: {result[1]}")
        return result[0]


def load_model_weights(path: Path, model: nn.Module) -> dict[str, Any]:
    """Load the weights, nothing else, into a model in place; works without a process group, too.

    Args:
        path: one step folder, or the folder of all, then the newest good one is taken.

    Returns:
        The JSON value of the manifest: train_state, job, layout.

    Raises:
        CheckpointError: no checkpoint, a damaged one, or one of another model.
    """
    chosen = path
    if commit.step_of(path) is None:
        candidates = commit.list_checkpoints(path)
        if not candidates:
            raise CheckpointError(f"{path}: no checkpoint here; expected step-... folders, or one such folder")
        chosen = next((c for c in reversed(candidates) if not commit.verify_folder(c)), candidates[-1])
    if damage := commit.verify_folder(chosen):
        raise CheckpointError(f"{chosen} is damaged: {'; '.join(damage)}")
    tensors = {f"model.{name}": tensor for name, tensor in state.model_tensors(model).items()}
    group = dist.group.WORLD if dist.is_initialized() else None
    if misfits := _misfits(tensors, SafeReader(chosen).read_metadata().state_dict_metadata, group):
        raise CheckpointError(f"{chosen} does not fit this model:\n  " + _abridge(misfits))
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    dcp_load(tensors, storage_reader=SafeReader(chosen), planner=planner, no_dist=group is None)
    return commit.read_manifest(chosen)["info"]


def _distinct(value: T, group: dist.ProcessGroup) -> list[T]:
    """The different JSON values that the ranks hold. Equal ones travel once: at thousands of ranks, lists of names
    would add up to gigabytes."""
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
    digests: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(digests, digest, group=group)
    first = digests.index(digest) == dist.get_rank(group)
    values: list[Any] = [None] * len(digests)
    dist.all_gather_object(values, (value,) if first else None, group=group)
    return [entry[0] for entry in values if entry is not None]


def _misfits(wanted: dict[str, Tensor], saved: dict[str, Any], group: dist.ProcessGroup | None) -> list[str]:
    """One line for each tensor whose name or shape differs between the live state of all ranks and a checkpoint."""
    lines = []
    for name, tensor in wanted.items():
        if name not in saved:
            lines.append(f"{name}: not in the checkpoint")
        elif tuple(saved[name].size) != tuple(tensor.shape):
            lines.append(f"{name}: shape {tuple(saved[name].size)} saved, {tuple(tensor.shape)} now")
    own = {"lines": lines, "names": sorted(wanted)}
    of_ranks = [own] if group is None else _distinct(own, group)  # with pipeline stages a rank knows some names only
    known = {name for value in of_ranks for name in value["names"]}
    extra = sorted(name for name in saved if name.startswith("model.") and name not in known)
    return sorted({line for value in of_ranks for line in value["lines"]}) + [f"{n}: only in it" for n in extra]


def _abridge(lines: list[str], limit: int = 8) -> str:
    more = [f"... and {len(lines) - limit} more"] if len(lines) > limit else []
    return "\n  ".join([*lines[:limit], *more])


def _cause(error: CheckpointException) -> str:
    """What really went wrong, by rank: DCP nests it."""
    causes = {f"{type(e).__name__}: {e}" for e, _ in error.failures.values()}
    return "; ".join(sorted(causes))
