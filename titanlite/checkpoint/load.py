"""Resume a run from its newest valid checkpoint, or load only the weights of a checkpoint.

Invariant: Loading restores exactly what a save stored. Each parameter gets the tensor with its own
name and shape, all weights are finite, and no tensor of the saved model or optimizer is left over.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import MISSING, asdict, fields
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from titanlite.checkpoint.dcp_reader import SafeReader, get_weight_prefix, join_lines, load_tensors
from titanlite.checkpoint.find import (
    download_if_url,
    find_checkpoints,
    get_data_state,
    get_saved_section,
    has_resumed_from,
    load_newest_of,
)
from titanlite.checkpoint.huggingface import load_hf_weights
from titanlite.checkpoint.live_state import WEIGHTS, LiveState, is_finite, model_tensors, to_local
from titanlite.checkpoint.manifest import (
    CheckpointContext,
    Manifest,
    check_checkpoint,
    get_step,
    is_from_titanlite,
    list_checkpoints,
    list_set_aside,
    read_manifest,
    set_aside,
)
from titanlite.config.errors import CheckpointError, Damage, UserError
from titanlite.config.files import MANIFEST
from titanlite.config.flavors import Architecture
from titanlite.config.job_diff import (
    AFFECTS_TRAINING,
    INCOMPATIBLE,
    DataChanges,
    Effect,
    compare_jobs,
    report_changes,
)
from titanlite.config.storage import get_local_copy
from titanlite.model.formats import compare_shapes, parameter_shapes
from titanlite.model.llama import Llama
from titanlite.optim.build import set_learning_rate, set_mode
from titanlite.runtime.rank_group import RankGroup

if TYPE_CHECKING:
    from titanlite.data.tokenizer import Tokenizer

_THIS_PROCESS = RankGroup()
_DECAY_CHANGE = (
    "lr_scheduler: titanlite 0.2 and earlier started the decay one step earlier; the learning rate "
    "is now the same as in torchtitan"
)


class Resumer:
    """Loads the checkpoints of a run into its model, optimizer and hooks.

    All ranks create one, and call each method together.

    Args:
        context: Checkpoint folder, options, live state and ranks of the run.
        is_same_tokenizer: Given the fingerprint of a saved tokenizer, returns whether the run uses
            the same tokenizer.
        compare_data: Given a saved data position, returns how the data of the run differs from the
            saved data. None skips this comparison.
    """

    def __init__(
        self,
        context: CheckpointContext,
        is_same_tokenizer: Callable[[str], bool] = lambda fingerprint: True,
        compare_data: Callable[[dict[str, Any]], DataChanges] | None = None,
    ) -> None:
        self.context = context
        self._live = context.live
        self._ranks = context.ranks
        self._config = context.config
        self._log = context.log
        self._is_same_tokenizer = is_same_tokenizer
        self._compare_data = compare_data
        self._initial_hook_tensors = _copy_hook_tensors(context.live)

    def load(self) -> dict[str, Any] | None:
        """Load the newest valid checkpoint in place, or the checkpoint of `checkpoint.load_step`.

        Call this when a run starts.

        - If a checkpoint is damaged, it is renamed, and the next older one is loaded.
        - With `load_step`, only the checkpoint of that step is loaded. Later checkpoints are
          renamed, because the run will write these steps again.
        - `load_step` and `exclude_from_loading` apply only once. If the run has saved a checkpoint
          with the same values of these keys since, a restart loads this checkpoint completely.
        - If there is no checkpoint, the weights at `initial_load_path` are loaded, if it is set.

        Returns:
            The training state that was saved, without the keys in `exclude_from_loading`. None if
            there is no checkpoint.

        Raises:
            UserError: If model, optimizer, tokenizer or data of the job do not fit the checkpoint.
            CheckpointError: If there are checkpoints, but no valid one.
        """
        folder = self.context.folder
        checkpoints, damaged = self._ranks.run_on_rank0(
            lambda: (list_checkpoints(folder), list_set_aside(folder))
        )
        candidates = checkpoints
        later_checkpoints: list[Path] = []
        problems = [f"{path.name}: damaged, renamed earlier" for path in damaged]
        wanted = "valid checkpoint"
        fix = "To start from scratch, move them away or choose another checkpoint.folder."

        # `load_step` selects a checkpoint only until the run has resumed from this step once.
        step = self._config.load_step
        if step != -1 and not self._ranks.run_on_rank0(lambda: has_resumed_from(checkpoints, step)):
            candidates = [path for path in checkpoints if get_step(path) == step]
            later_checkpoints = [path for path in checkpoints if get_step(path) > step]
            others = [path.name for path in checkpoints if path not in candidates]
            problems = [f"other checkpoints: {', '.join(others) or 'none'}"]
            wanted = f"valid checkpoint for checkpoint.load_step = {step}"
            if others:
                fix = "Choose another step, or remove checkpoint.load_step to load the newest one."

        state, damages = self._load_newest_valid(candidates, "Resumed")
        # Rename nothing before the load, which raises an error if the job is wrong.
        for path in damages:
            self._rename(path, f"Damaged {path.name}", "damaged")
        if state is not None:
            for path in later_checkpoints:
                self._rename(path, f"Rolling back to step {step}: {path.name}", "archived")
            return state
        problems += damages.values()
        if problems:  # never start from scratch if there are checkpoints, but no valid one
            listed = "\n  ".join([f"{folder}: there is no {wanted}.", *problems])
            raise CheckpointError(f"{listed}\n{fix}")
        self.load_initial_weights()
        return None

    def _load_newest_valid(
        self, checkpoints: list[Path], action: str
    ) -> tuple[dict[str, Any] | None, dict[Path, str]]:
        """Load the newest valid checkpoint, and log this and each damaged one.

        Args:
            checkpoints: Step folders, sorted by step.
            action: Start of the log line, such as "Resumed".

        Returns:
            The training state in the checkpoint, or None if there is no valid one, and a
            description of each damaged checkpoint.
        """
        damages = {}
        for path in reversed(checkpoints):
            try:
                state = self._load(path)
            except Damage as damage:
                damages[path] = f"{path.name}: {damage}"
                self._log(f"Checkpoint {path.name} is DAMAGED ({damage})")
                continue
            tokens = f"{state['tokens']:,} tokens seen"
            self._log(f"{action} after step {state['step']} of {path}: {tokens}")
            return state, damages
        return None, damages

    def load_before(self, step: int) -> dict[str, Any] | None:
        """Load the newest valid checkpoint before `step` in place, for a rollback or a replay.

        Unlike `load`, this never renames a damaged checkpoint.

        Returns:
            The training state that was saved. None if there is no earlier checkpoint, in which case
            nothing changes.

        Raises:
            UserError: If model, optimizer, tokenizer or data of the job do not fit the checkpoint.
            CheckpointError: If there are earlier checkpoints, but no valid one. The weights and the
                optimizer state in memory are then unusable.
        """
        folder = self.context.folder
        checkpoints = self._ranks.run_on_rank0(lambda: list_checkpoints(folder))
        earlier = [path for path in checkpoints if get_step(path) < step]
        state, damages = self._load_newest_valid(earlier, "Loaded the state")
        if earlier and state is None:
            header = f"{folder}: no valid checkpoint before step {step}."
            raise CheckpointError("\n  ".join([header, *damages.values()]))
        return state

    def load_initial_weights(self) -> None:
        """Load the weights at `checkpoint.initial_load_path` into the model, if the path is set.

        Raises:
            UserError: If the path does not exist, or contains a different model.
            CheckpointError: If there is no valid checkpoint at the path, or its weights are not
                finite.
        """
        if self._config.initial_load_path is None:
            return
        path_or_url = Path(self._config.initial_load_path)
        if self._config.initial_load_in_hf:
            path = self._load_hf_model(path_or_url)
        else:
            path = self._load_newest_weights(path_or_url)
        self._log(f"Starting from the weights in {path}")

    def _load_hf_model(self, path_or_url: Path) -> Path:
        """Load the weights of a Hugging Face model at a path or URL, and return its local path."""
        path = self._ranks.run_together(lambda: get_local_copy(path_or_url))
        load_hf_weights(path, self._live.model)
        weights = self._live.tensors(optimizer=False, hooks=False)
        self._ranks.run_together(lambda: _check_finite(path, weights))
        return path

    def _load_newest_weights(self, path_or_url: Path) -> Path:
        """Load the weights of the newest valid checkpoint at a path or URL, on all ranks together.

        Returns:
            The local step folder.
        """
        local_path = self._ranks.run_together(lambda: download_if_url(path_or_url))
        # A running job may add or remove checkpoints meanwhile, so only rank 0 lists them.
        step_folders = self._ranks.run_on_rank0(lambda: find_checkpoints(local_path))
        return load_newest_of(step_folders, self._check_and_load_weights, self._log)

    def _check_and_load_weights(self, step_folder: Path) -> Path:
        """Verify a checkpoint, load its weights on all ranks together, and return its folder."""
        check_on_all_ranks(step_folder, self._ranks)
        load_weights(step_folder, self._live.model, self._ranks)
        return step_folder

    def check_job(self, path: PurePath, manifest: Manifest) -> None:
        """Compare the job of the run with the job that saved a checkpoint, and log differences.

        Args:
            path: Path or URL of the checkpoint, for messages.
            manifest: Manifest of the checkpoint, which contains the saved job.

        Raises:
            UserError: If the differences do not allow the run to resume from the checkpoint.
        """
        info = manifest["info"]
        job = self.context.job
        if job is None or info["job"] is None:
            return

        changes = self._compare_with_saved_job(job, info)

        # The path of a tokenizer can stay the same although the file has changed.
        data_state = get_data_state(info)
        if "tokenizer" in data_state and not self._is_same_tokenizer(data_state["tokenizer"]):
            description = f"tokenizer.path: {job['tokenizer']['path']} has other token IDs"
            changes.append((INCOMPATIBLE, description))

        # titanlite 0.2 and earlier, which wrote format 1, computed the decay differently.
        if manifest["format"] == 1 and job["lr_scheduler"]["decay_ratio"] != 0:
            changes.append((AFFECTS_TRAINING, _DECAY_CHANGE))

        report_changes(path, changes, self._log)

    def _compare_with_saved_job(
        self, job: dict[str, Any], info: dict[str, Any]
    ) -> list[tuple[Effect, str]]:
        """Return the effect and the description of each difference between a job and a saved job.

        The section [model] of both jobs is first replaced by the architecture that it describes,
        because different keys can describe the same model.

        Args:
            job: Job of this run, as a JSON value.
            info: Entry "info" of the manifest, which contains the saved job.
        """
        arch = self._live.model.arch
        saved_job = info["job"] | {"model": _complete_architecture(info["architecture"], arch)}
        current_job = job | {"model": asdict(arch)}
        return compare_jobs(saved_job, current_job, self._find_data_changes(info))

    def _rename(self, path: Path, description: str, suffix: str) -> None:
        """Rename a checkpoint so that no later start loads it, and log why.

        Args:
            path: The step folder. A folder that titanlite did not write is not renamed, because it
                may belong to another program.
            description: Start of the log line, which gives the reason.
            suffix: Suffix of the new name, "damaged" or "archived".
        """

        def rename() -> str | None:
            return set_aside(path, suffix).name if is_from_titanlite(path) else None

        new_name = self._ranks.run_on_rank0(rename)
        if new_name is not None:
            self._log(f"{description}; renamed to {new_name}")
        else:
            self._log(
                f"{description}; not renamed, because it has no {MANIFEST} written by titanlite. "
                "Move it away: while it exists, this step cannot be saved"
            )

    def _load(self, path: Path) -> dict[str, Any]:
        """Load one checkpoint into the model, the optimizer and the hooks in memory.

        Returns:
            The training state, without the parts that `checkpoint.exclude_from_loading` resets.

        Raises:
            Damage: On all ranks, if the checkpoint is damaged. The previous weights and optimizer
                state may be lost.
        """
        manifest = check_on_all_ranks(path, self._ranks)
        info = manifest["info"]
        _check_can_resume(path, info)
        parts_to_reset = self._find_parts_to_reset(info)
        self._log_parts_to_reset(path, parts_to_reset)
        self.check_job(path, manifest)

        reader = self._ranks.run_together(lambda: SafeReader(path, manifest["files"]))
        try:
            self._load_tensors(reader, info, parts_to_reset)
        except Damage:
            _fill_live_state_with_nan(self._live)  # instead of training with damaged values
            raise

        state = info["train_state"]
        return {part: value for part, value in state.items() if part not in parts_to_reset}

    def _load_tensors(
        self, reader: SafeReader, info: dict[str, Any], parts_to_reset: set[str]
    ) -> None:
        """Load the tensors of a checkpoint in place, and reset the state that is not loaded.

        Args:
            reader: Reader of the checkpoint.
            info: Entry "info" of its manifest.
            parts_to_reset: Parts of the state, such as "optimizer", that are not loaded.
        """
        parts = self._find_parts_to_load(reader, info) - parts_to_reset
        if "hooks" in parts:
            self._resize_hook_tensors(reader, info["train_state"])
        # In a rollback, state that is not loaded must not keep its later values.
        self._reset_hook_tensors()
        if "optimizer" in parts:
            self._create_optimizer_state()
        else:
            _reset_optimizer(self._live)

        tensors = self._select_tensors(parts, reader)
        model = self._live.model
        unknown_state = (
            _find_unknown_optimizer_state(model, tensors, reader) if "optimizer" in parts else []
        )
        _load_and_check(tensors, model.arch, reader, self._ranks, unknown_state)
        _set_random_state(tensors)

    def _select_tensors(self, parts: set[str], reader: SafeReader) -> dict[str, Tensor]:
        """Return the tensors in memory to load into, by name: the weights and the given parts.

        A checkpoint may lack tensors of hooks that are new in the job, and random states of GPUs if
        it was saved on CPUs. These are left out.

        Args:
            parts: Some of "hooks", "optimizer" and "rng".
            reader: Reader of the checkpoint.
        """
        tensors = self._live.tensors(
            optimizer="optimizer" in parts, hooks="hooks" in parts, rng="rng" in parts
        )
        for name in tensors.keys() - reader.index.keys():
            if name.startswith(("hooks.", "rng.cuda.")):
                del tensors[name]
        return tensors

    def _find_parts_to_load(self, reader: SafeReader, info: dict[str, Any]) -> set[str]:
        """Return the parts of a checkpoint besides its weights that this run can load.

        Args:
            reader: Reader of the checkpoint.
            info: Entry "info" of its manifest.

        Returns:
            "hooks", and depending on the checkpoint and the run also "optimizer" and "rng" (the
            states of the random generators).
        """
        parts = {"hooks"}
        is_optimizer_saved = any(name.startswith("optimizer.") for name in reader.index)
        if is_optimizer_saved and self._live.optimizer is not None:
            parts.add("optimizer")
        # Each rank saves its random state, so only the same number of ranks can restore it.
        if info["layout"]["world_size"] == self._ranks.size:
            parts.add("rng")
        return parts

    def _resize_hook_tensors(self, reader: SafeReader, train_state: dict[str, Any]) -> None:
        """Resize the tensors of hooks to their sizes in a checkpoint, so that they can be loaded.

        Args:
            reader: Reader of the checkpoint.
            train_state: Saved state that is not a tensor, such as the `state_dict` of each hook.
        """
        sizes = {
            name.removeprefix("hooks."): entry.size
            for name, entry in reader.index.items()
            if name.startswith("hooks.")
        }
        self._live.prepare_hooks(sizes, train_state.get("hooks", {}))

    def _reset_hook_tensors(self) -> None:
        """Reset the tensors of hooks to their values at the start of the process.

        Tensors that had no value or another shape then are filled with NaN, or 0 for integers.
        """
        for name, tensor in self._live.tensors(optimizer=False).items():
            if not name.startswith("hooks."):
                continue
            shard = to_local(tensor)
            initial = self._initial_hook_tensors.get(name)
            if initial is not None and initial.shape == shard.shape:
                shard.copy_(initial)
            else:
                _fill_with_nan(tensor)

    def _create_optimizer_state(self) -> None:
        """Create the state of the optimizer, such as its moments, so that it can be loaded.

        A new torch optimizer has no state until its first step.
        """
        optimizer = self._live.optimizer
        if optimizer is not None:
            set_mode(optimizer, "train")  # because creating the state takes a step
            _take_empty_step(optimizer)
            set_mode(optimizer, "eval")

    def _log_parts_to_reset(self, path: Path, parts_to_reset: set[str]) -> None:
        """Log the parts of a checkpoint that are reset because of `exclude_from_loading`.

        Also log the parts in this option that are loaded, because they were already reset before
        the checkpoint was saved.

        Args:
            path: The step folder.
            parts_to_reset: The parts, such as "optimizer", that are reset instead of loaded.
        """
        if parts_to_reset:
            names = ", ".join(sorted(parts_to_reset))
            self._log(f"Not loaded from {path.name}: {names} (checkpoint.exclude_from_loading)")
        reset_before = set(self._config.exclude_from_loading) - parts_to_reset
        if reset_before:
            names = ", ".join(sorted(reset_before))
            self._log(f"{path.name} was saved after {names} had started fresh, so they are loaded")

    def _find_data_changes(self, info: dict[str, Any]) -> DataChanges | None:
        """Compare the data of the run with the data position in a checkpoint.

        Args:
            info: Entry "info" of the manifest.

        Returns:
            The differences. None if the checkpoint has no data position, or the run does not resume
            from it.
        """
        data_state = get_data_state(info)
        if self._compare_data is None or not data_state:
            return None
        if "data" in self._find_parts_to_reset(info):
            return None
        return self._compare_data(data_state)

    def _find_parts_to_reset(self, info: dict[str, Any]) -> set[str]:
        """Return the parts of the state, such as "optimizer", to reset instead of loading them.

        These are the parts in `checkpoint.exclude_from_loading`. A part that the same option had
        already reset when the checkpoint was saved is not reset again.

        Args:
            info: Entry "info" of the manifest.
        """
        reset_before = get_saved_section(info, "checkpoint").get("exclude_from_loading", ())
        return {part for part in self._config.exclude_from_loading if part not in reset_before}


def check_on_all_ranks(path: Path, ranks: RankGroup) -> Manifest:
    """Verify a checkpoint before it is loaded, and return its manifest.

    Each rank checks some of the files. The checksum of a tensor is checked later, when it is
    loaded.

    Args:
        path: The step folder.
        ranks: The ranks that load together.

    Raises:
        Damage: On all ranks, if any rank found damage.
        CheckpointError: On all ranks, if any rank cannot read a file now.
    """
    share = (ranks.rank, ranks.size)
    return ranks.run_together(lambda: check_checkpoint(path, verified_on_load=True, share=share))


def load_weights(
    path: Path, model: Llama, ranks: RankGroup = _THIS_PROCESS, averaged: bool = False
) -> None:
    """Load the weights of a checkpoint into a model in place.

    Args:
        path: A step folder that has passed `check_checkpoint`.
        model: The model, sharded or not.
        ranks: The ranks that hold the model together. All of them must call this.
        averaged: Whether to load the averages of the weights (EMA) instead.

    Raises:
        UserError: If the checkpoint contains a different model, or no averages although `averaged`
            is set.
        Damage: If the weights are damaged. The weights of `model` are then unusable.
        CheckpointError: If the weights are not finite, or cannot be read now.
    """
    reader = ranks.run_together(lambda: SafeReader(path, read_manifest(path)["files"]))
    prefix = get_weight_prefix(reader, averaged)  # raises the same error on all ranks
    tensors = {f"{prefix}{name}": tensor for name, tensor in model_tensors(model).items()}
    _load_and_check(tensors, model.arch, reader, ranks)


def check_tokenizer(path: Path, tokenizer: Tokenizer, name: str, num_embeddings: int) -> None:
    """Check that a checkpoint was trained with a given tokenizer.

    Args:
        path: The step folder.
        tokenizer: The tokenizer.
        name: Name of the tokenizer for the error message, for example its path.
        num_embeddings: Number of rows of the model's embedding.

    Raises:
        CheckpointError: If the tokenizer is not the one of the checkpoint. This is certain if it
            has more tokens than the model has embeddings.
    """
    saved_fingerprint = get_data_state(read_manifest(path)["info"]).get("tokenizer")
    is_same = saved_fingerprint is None or tokenizer.is_known_as(saved_fingerprint)
    has_too_many_tokens = tokenizer.vocab_size > num_embeddings
    if not is_same or has_too_many_tokens:
        raise CheckpointError(
            f"{path} was trained with another tokenizer than {name}, or the file has changed. "
            "Use the original file."
        )


def _load_and_check(
    tensors: dict[str, Tensor],
    arch: Architecture,
    reader: SafeReader,
    ranks: RankGroup,
    unknown_state: Sequence[str] = (),
) -> None:
    """Check the shapes of saved tensors, load them in place, and check that weights are finite.

    All ranks call this together. If one rank fails, all ranks raise an error.

    Args:
        tensors: This rank's tensors to fill, by their names in the checkpoint.
        arch: Architecture of the model.
        reader: Reader of the checkpoint.
        ranks: The ranks that load together.
        unknown_state: Names of saved optimizer tensors that the optimizer does not have, such as
            moments of another optimizer. If there are any, the check raises an error.
    """
    ranks.run_together(lambda: _check_shapes(tensors, arch, reader, unknown_state))
    load_tensors(reader, tensors, ranks.group)
    ranks.run_together(lambda: _check_finite(reader.path, tensors))


def _check_can_resume(path: Path, info: dict[str, Any]) -> None:
    """Check that a checkpoint has the state that a run needs to resume, besides the weights.

    Args:
        path: The step folder.
        info: Entry "info" of its manifest.

    Raises:
        CheckpointError: If the checkpoint contains only weights.
        Damage: If its data position is later than its step.
    """
    train_state = info["train_state"]
    if info.get("weights_only") or "step" not in train_state:
        raise CheckpointError(
            f"{path} contains weights only, so a run cannot resume from it. Start a new run with "
            f'another checkpoint.folder and checkpoint.initial_load_path = "{path}".'
        )

    data_schedule = get_data_state(info).get("schedule")
    if data_schedule is not None and data_schedule["step"] > train_state["step"]:
        raise Damage(f"{MANIFEST}: no run can reach this data position")


def _check_shapes(
    tensors: dict[str, Tensor],
    arch: Architecture,
    reader: SafeReader,
    unknown_state: Sequence[str],
) -> None:
    """Check that the tensors in a checkpoint have the expected names and shapes.

    Args:
        tensors: This rank's tensors to load, by their names in the checkpoint.
        arch: Architecture of the whole model. A pipeline rank holds only a part of it.
        reader: Reader of the checkpoint.
        unknown_state: Names of saved optimizer tensors that the optimizer does not have.

    Raises:
        UserError: If names or shapes differ. The message lists the differences.
    """
    differences = _compare_with_saved_shapes(tensors, arch, reader)
    differences += [f"{name}: the optimizer has no such state" for name in unknown_state]
    if not differences:
        return

    # For example, "optimizer.norm.weight.exp_avg: missing" is about the part "optimizer".
    parts = sorted({difference.partition(".")[0] for difference in differences})
    exclusion = f"checkpoint.exclude_from_loading = {json.dumps(parts)}"
    if "model" in parts:
        problem = "does not fit this model"
        fix = "Restore the keys of [model]."
    elif parts == ["hooks"]:
        problem = "does not fit the hooks of this job"
        fix = f"Restore their options, or set {exclusion}."
    else:
        problem = "does not fit the optimizer of this job"
        fix = f"Restore its options, or set {exclusion}."
    raise UserError(f"{reader.path} {problem}:\n  {join_lines(differences)}\n{fix}")


def _compare_with_saved_shapes(
    tensors: dict[str, Tensor], arch: Architecture, reader: SafeReader
) -> list[str]:
    """Return a line for each difference in names or shapes between a checkpoint and a model.

    The checkpoint must contain all weights of the model and all tensors in `tensors`, and no other
    weights. Other tensors in the checkpoint, such as optimizer state, are ignored.

    Args:
        tensors: This rank's tensors to load, by their names in the checkpoint.
        arch: Architecture of the whole model.
        reader: Reader of the checkpoint.
    """
    weights = {f"model.{name}": shape for name, shape in parameter_shapes(arch).items()}
    # `tensors` contains some of these weights again. `tensor.shape` ignores sharding.
    expected = weights | {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    saved = {}
    for name, description in reader.index.items():
        if name in expected or name.startswith("model."):
            saved[name] = tuple(description.size)
    return compare_shapes(expected, saved)


def _find_unknown_optimizer_state(
    model: Llama, tensors: dict[str, Tensor], reader: SafeReader
) -> list[str]:
    """Return the names of saved optimizer tensors that the optimizer of this rank does not have.

    State of frozen weights and, with a pipeline, of other ranks' weights is left out, because this
    rank need not load it.

    Args:
        model: This rank's part of the model.
        tensors: This rank's tensors to load, by their names in the checkpoint.
        reader: Reader of the checkpoint.
    """
    trained_weights = [name for name, weight in model.named_parameters() if weight.requires_grad]
    prefixes = tuple(f"optimizer.{name}." for name in trained_weights)
    return sorted(
        name for name in reader.index.keys() - tensors.keys() if name.startswith(prefixes)
    )


def _check_finite(path: object, tensors: dict[str, Tensor]) -> None:
    """Check that all weights are finite. Other tensors, such as optimizer state, are not checked.

    Raises:
        CheckpointError: If weights contain NaN or infinity. The message lists them.
    """
    invalid_names = []
    for name, tensor in tensors.items():
        if name.startswith(WEIGHTS) and not is_finite(to_local(tensor)):
            invalid_names.append(name)
    if invalid_names:
        names = join_lines(sorted(invalid_names))
        raise CheckpointError(f"{path} contains weights that are NaN or infinite:\n  {names}")


def _complete_architecture(saved: dict[str, Any], arch: Architecture) -> dict[str, Any]:
    """Add fields that an architecture lacks because an older version saved it.

    The added fields get their default values, with which the older version trained.

    Args:
        saved: Fields of the saved architecture.
        arch: Architecture of this run, whose class defines all fields and their default values.

    Returns:
        All fields of the saved architecture, for a comparison with `arch`.
    """
    complete = dict(saved)
    for field in fields(arch):
        # The default of head_dim is no fixed value, but dim / n_heads.
        has_default = field.default is not MISSING and field.name != "head_dim"
        if has_default:
            complete.setdefault(field.name, field.default)
    return complete


def _set_random_state(tensors: dict[str, Tensor]) -> None:
    """Restore the states of this rank's random generators.

    Args:
        tensors: The loaded tensors by name. Only those such as "rng.cpu.0" and "rng.cuda.0" are
            used. If there are none, nothing changes.
    """
    for name, tensor in tensors.items():
        if name.startswith("rng.cuda."):
            torch.cuda.set_rng_state(tensor)
        elif name.startswith("rng.cpu."):
            torch.set_rng_state(tensor)


def _copy_hook_tensors(live: LiveState) -> dict[str, Tensor]:
    """Return copies of this rank's shards of hook tensors by name, so that you can restore them.

    Tensors that contain only NaN are left out, because they have no value yet.
    """
    copies = {}
    for name, tensor in live.tensors(optimizer=False).items():
        if not name.startswith("hooks."):
            continue
        shard = to_local(tensor)
        if not shard.isnan().all():
            copies[name] = shard.clone()
    return copies


def _fill_live_state_with_nan(live: LiveState) -> None:
    """Fill weights and hook tensors with NaN, and reset the optimizer.

    After a damaged checkpoint was partly loaded, this keeps training from silently using its
    values.
    """
    for tensor in live.tensors(optimizer=False).values():
        _fill_with_nan(tensor)
    _reset_optimizer(live)


def _fill_with_nan(tensor: Tensor) -> None:
    """Fill a tensor with NaN, or with 0 if it contains integers."""
    tensor.fill_(torch.nan if tensor.is_floating_point() else 0)


def _take_empty_step(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer allocate its state with a step that does not change the weights.

    All gradients and the learning rate are 0. If the optimizer already has state, do nothing.
    """
    if any(optimizer.state.values()):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)

    # The next training step sets the learning rate again.
    set_learning_rate(optimizer, 0.0)
    optimizer.step()
    optimizer.zero_grad()


def _reset_optimizer(live: LiveState) -> None:
    """Reset the optimizer to the state and options of a new one. The object stays the same."""
    if live.optimizer is None or live.new_optimizer is None:
        return
    live.optimizer.state.clear()  # first, so that two states never exist at once
    fresh = live.new_optimizer()
    live.optimizer.state.update(fresh.state)
    for group, fresh_group in zip(live.optimizer.param_groups, fresh.param_groups, strict=True):
        group.update({key: value for key, value in fresh_group.items() if key != "params"})
