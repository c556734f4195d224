"""Resume a run from its newest valid checkpoint, or load only the weights of a checkpoint.

Invariant: Loading restores exactly what a save stored. Each parameter gets the tensor with the same
name and shape, all weights are finite, and no tensor of the saved model or optimizer is left over.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container
from dataclasses import MISSING, asdict, fields
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from titanlite.checkpoint.dcp import SafeReader, get_weight_prefix, join_lines, load_tensors
from titanlite.checkpoint.find import (
    download_if_url,
    find_checkpoints,
    get_data_state,
    get_saved_section,
    has_resumed_from,
    load_newest_of,
)
from titanlite.checkpoint.huggingface import load_hf_weights
from titanlite.checkpoint.live_state import WEIGHTS, LiveState, is_finite, model_tensors
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
    Change,
    DataChanges,
    compare_jobs,
    report_changes,
)
from titanlite.config.storage import get_local_copy
from titanlite.model.formats import compare_shapes, parameter_shapes
from titanlite.model.llama import Llama
from titanlite.optim.build import set_learning_rate, set_mode
from titanlite.optim.clip import local_shard
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

    All ranks create a Resumer and, except for `check_job`, call each method together.

    Args:
        context: Checkpoint folder, options, live state and ranks of the run.
        is_same_tokenizer: Given the fingerprint of the saved tokenizer, returns whether the run
            uses the same tokenizer.
        compare_data: Given the saved data position, returns how the data of the run differs from
            the saved data. None skips this comparison.
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
        """Load the newest valid checkpoint, or the one from step `checkpoint.load_step`, in place.

        Call this when a run starts.

        - If a checkpoint is damaged, rename it and load the next older one.
        - If `load_step` is set, load only the checkpoint of that step. Rename later checkpoints,
          because the run will train and save these steps again.
        - `load_step` and `exclude_from_loading` apply only once. If the run has since saved a
          checkpoint with the same values of these keys, a restart loads this checkpoint completely.
        - If there is no checkpoint and `load_step` is not set, load the weights at
          `initial_load_path`, if this is set.

        Returns:
            The saved training state, without the parts in `exclude_from_loading`. None if there is
            no checkpoint.

        Raises:
            UserError: If the model, optimizer, tokenizer or data of the job does not fit the
                checkpoint.
            CheckpointError: If there are checkpoints but no valid one, or if `load_step`
                applies but the checkpoint of that step is missing or damaged.
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

        # Ignore `load_step` if the run has already resumed from this step.
        load_step = self._config.load_step
        should_roll_back = load_step != -1 and not self._ranks.run_on_rank0(
            lambda: has_resumed_from(checkpoints, load_step)
        )
        if should_roll_back:
            candidates = [path for path in checkpoints if get_step(path) == load_step]
            later_checkpoints = [path for path in checkpoints if get_step(path) > load_step]
            others = [path.name for path in checkpoints if path not in candidates]
            # This list is never empty, so a missing step raises an error below.
            problems = [f"other checkpoints: {', '.join(others) or 'none'}"]
            wanted = f"valid checkpoint for checkpoint.load_step = {load_step}"
            fix = "Remove checkpoint.load_step, and choose another checkpoint.folder."
            if others:
                fix = "Choose another step, or remove checkpoint.load_step to load the newest one."

        # Rename checkpoints only after the load, which raises an error if the job does not fit.
        state, damages = self._load_newest_valid(candidates, "Resumed")
        for path in damages:
            self._rename(path, f"Damaged {path.name}", "damaged")
        if state is not None:
            for path in later_checkpoints:
                self._rename(path, f"Rolling back to step {load_step}: {path.name}", "archived")
            return state

        # Never start from scratch if a checkpoint is damaged, or if `load_step` has no checkpoint.
        problems += damages.values()
        if problems:
            listed = "\n  ".join([f"{folder}: there is no {wanted}.", *problems])
            raise CheckpointError(f"{listed}\n{fix}")
        self.load_initial_weights()
        return None

    def _load_newest_valid(
        self, checkpoints: list[Path], action: str
    ) -> tuple[dict[str, Any] | None, dict[Path, str]]:
        """Load the newest valid checkpoint in place, and log each damaged one that is skipped.

        Args:
            checkpoints: Step folders, sorted by step.
            action: Start of the log line for a successful load, such as "Resumed".

        Returns:
            The training state in the loaded checkpoint (None if there is no valid checkpoint), and
            a description of each damaged checkpoint, by step folder.
        """
        damages = {}
        for path in reversed(checkpoints):
            try:
                state = self._load(path)
            except Damage as damage:
                damages[path] = f"{path.name}: {damage}"
                self._log(f"Checkpoint {path.name} is damaged: {damage}")
                continue
            tokens = f"{state['tokens']:,} tokens seen"
            self._log(f"{action} after step {state['step']} of {path}: {tokens}")
            return state, damages
        return None, damages

    def load_before(self, step: int) -> dict[str, Any] | None:
        """Load the newest valid checkpoint before `step` in place, for a rollback or a replay.

        Unlike `load`, this never renames damaged checkpoints.

        Returns:
            The saved training state. If there is no earlier checkpoint, return None and change
            nothing.

        Raises:
            UserError: If the model, optimizer, tokenizer or data of the job does not fit the
                checkpoint.
            CheckpointError: If there are earlier checkpoints but no valid one. The weights and the
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
        """Load the weights of a Hugging Face model at a path or URL and return its local path."""
        path = self._ranks.run_together(lambda: get_local_copy(path_or_url))
        load_hf_weights(path, self._live.model)
        weights = self._live.tensors(optimizer=False, hooks=False)
        self._ranks.run_together(lambda: _check_finite(path, weights))
        return path

    def _load_newest_weights(self, path_or_url: Path) -> Path:
        """Load the weights of the newest valid checkpoint at a path or URL on all ranks.

        Returns:
            The local step folder.
        """
        local_path = self._ranks.run_together(lambda: download_if_url(path_or_url))
        # Only rank 0 lists the checkpoints, because a running job may add or remove some.
        step_folders = self._ranks.run_on_rank0(lambda: find_checkpoints(local_path))

        def load(step_folder: Path) -> Path:
            verify_on_all_ranks(step_folder, self._ranks)
            load_weights(step_folder, self._live.model, self._ranks)
            return step_folder

        return load_newest_of(step_folders, load, self._log)

    def check_job(self, path: PurePath, manifest: Manifest) -> None:
        """Compare the job of this run with the job in a checkpoint, and log the differences.

        If the run or the checkpoint has no job, do nothing.

        Args:
            path: Path or URL of the checkpoint, for messages.
            manifest: Manifest of the checkpoint, which contains the job that saved it.

        Raises:
            UserError: If the run cannot resume from the checkpoint because of the differences.
        """
        info = manifest["info"]
        job = self.context.job
        if job is None or info["job"] is None:
            return

        changes = self._compare_with_saved_job(job, info)

        # The tokenizer file may have changed even if its path is the same.
        data_state = get_data_state(info)
        is_tokenizer_saved = "tokenizer" in data_state
        if is_tokenizer_saved and not self._is_same_tokenizer(data_state["tokenizer"]):
            tokenizer_path = job["tokenizer"]["path"]
            description = f"tokenizer.path: {tokenizer_path} has other token IDs"
            changes.append(Change(INCOMPATIBLE, description))

        # titanlite 0.2 and earlier, which wrote format 1, computed the decay differently.
        has_old_decay = manifest["format"] == 1
        if has_old_decay and job["lr_scheduler"]["decay_ratio"] != 0:
            changes.append(Change(AFFECTS_TRAINING, _DECAY_CHANGE))

        # Raise the UserError if a change is incompatible. Log all others.
        report_changes(path, changes, self._log)

    def _compare_with_saved_job(self, job: dict[str, Any], info: dict[str, Any]) -> list[Change]:
        """Compare the job of this run with the job in a checkpoint.

        Args:
            job: Job of the run.
            info: Entry "info" of the manifest, which contains the saved job.

        Returns:
            A description of each difference and its effect, for example "affects training".
        """
        # Compare architectures instead of the [model] sections, because different keys can describe
        # the same model.
        arch = self._live.model.arch
        saved_job = info["job"] | {"model": _complete_architecture(info["architecture"], arch)}
        current_job = job | {"model": asdict(arch)}
        return compare_jobs(saved_job, current_job, self._find_data_changes(info))

    def _rename(self, path: Path, description: str, suffix: str) -> None:
        """Rename a checkpoint so that it is never loaded again, and log the reason.

        If titanlite did not write it, do not rename it, because it may belong to another program.

        Args:
            path: The step folder.
            description: Start of the log line, which states the reason.
            suffix: Suffix of the new name, "damaged" or "archived".
        """

        def rename() -> str | None:
            if not is_from_titanlite(path):
                return None
            return set_aside(path, suffix).name

        new_name = self._ranks.run_on_rank0(rename)
        if new_name is not None:
            self._log(f"{description}; renamed to {new_name}")
        else:
            self._log(
                f"{description}; not renamed, because it has no {MANIFEST} written by titanlite. "
                "Move it away: while it exists, this step cannot be saved"
            )

    def _load(self, path: Path) -> dict[str, Any]:
        """Load a checkpoint into the model, the optimizer and the hooks in memory.

        Returns:
            The training state, without the parts that `checkpoint.exclude_from_loading` resets.

        Raises:
            Damage: On all ranks, if the checkpoint is damaged. The weights and optimizer state that
                were in memory may be lost.
        """
        manifest = verify_on_all_ranks(path, self._ranks)
        info = manifest["info"]
        _check_has_run_state(path, info)
        _check_data_position(info)
        parts_to_reset = self._find_parts_to_reset(info)
        self._log_parts_to_reset(path, parts_to_reset)
        self.check_job(path, manifest)

        reader = self._ranks.run_together(lambda: SafeReader(path, manifest["files"]))
        try:
            self._load_tensors(reader, info, parts_to_reset)
        except Damage:
            _fill_live_state_with_nan(self._live)  # so that no rank trains with damaged values
            raise

        state = info["train_state"]
        return {part: value for part, value in state.items() if part not in parts_to_reset}

    def _load_tensors(
        self, reader: SafeReader, info: dict[str, Any], parts_to_reset: set[str]
    ) -> None:
        """Load the tensors of a checkpoint in place and reset all state that is not loaded.

        Args:
            reader: Reader of the checkpoint.
            info: Entry "info" of its manifest.
            parts_to_reset: Parts of the state, such as "optimizer", to reset instead of loading
                them.
        """
        parts_to_load = self._find_parts_to_load(reader, info) - parts_to_reset

        # Resize the hook tensors to load, and reset all, because the checkpoint may lack some.
        if "hooks" in parts_to_load:
            self._resize_hook_tensors(reader, info["train_state"])
        self._reset_hook_tensors()

        # Create the optimizer state that loading overwrites, or reset the optimizer.
        if "optimizer" in parts_to_load:
            _create_optimizer_state(self._live)
        else:
            _reset_optimizer(self._live)

        # Load the weights and the selected parts.
        tensors = self._select_tensors(parts_to_load, reader)
        prefixes_to_load = _list_prefixes_to_load(parts_to_load, self._live.model)
        _load_and_check(tensors, self._live.model.arch, reader, self._ranks, prefixes_to_load)
        _set_random_state(tensors)

    def _select_tensors(self, parts: set[str], reader: SafeReader) -> dict[str, Tensor]:
        """Return the tensors of this rank to overwrite with values from a checkpoint, by name.

        Omit hook tensors and random states of GPUs that the checkpoint lacks, because hooks were
        added since it was saved, or because it was saved on CPUs.

        Args:
            parts: Parts to load besides the weights: any of "hooks", "optimizer" and "rng".
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
        """Find the parts of a checkpoint, besides the weights, that this run is able to load.

        Args:
            reader: Reader of the checkpoint.
            info: Entry "info" of its manifest.

        Returns:
            Always "hooks". Also "optimizer", if the checkpoint has optimizer state and the run has
            an optimizer, and "rng" (random states), if it was saved by the same number of ranks.
        """
        parts = {"hooks"}
        is_optimizer_saved = any(name.startswith("optimizer.") for name in reader.index)
        if is_optimizer_saved and self._live.optimizer is not None:
            parts.add("optimizer")
        # Each rank saves its random state, so only the same number of ranks can restore them.
        if info["layout"]["world_size"] == self._ranks.size:
            parts.add("rng")
        return parts

    def _resize_hook_tensors(self, reader: SafeReader, train_state: dict[str, Any]) -> None:
        """Resize hook tensors, such as the loss history of a guard, to their sizes in a checkpoint.

        Call this before loading, which requires equal sizes.

        Args:
            reader: Reader of the checkpoint.
            train_state: Saved training state, including the `state_dict` of each hook.
        """
        sizes = {
            name.removeprefix("hooks."): entry.size
            for name, entry in reader.index.items()
            if name.startswith("hooks.")
        }
        self._live.prepare_hooks(sizes, train_state.get("hooks", {}))

    def _reset_hook_tensors(self) -> None:
        """Reset the tensors of hooks, such as averaged weights, to their values at process start.

        Call this before loading. After a rollback, tensors that the checkpoint lacks must not keep
        values from later steps. If a tensor had no value or a different shape at process start,
        fill it with NaN, or with 0 if it contains integers.
        """
        for name, tensor in self._live.hook_tensors().items():
            shard = local_shard(tensor.detach())
            initial = self._initial_hook_tensors.get(name)
            if initial is not None and initial.shape == shard.shape:
                shard.copy_(initial)
            else:
                _fill_with_nan(shard)

    def _log_parts_to_reset(self, path: Path, parts_to_reset: set[str]) -> None:
        """Log which parts of a checkpoint are not loaded because of `exclude_from_loading`.

        Also log which parts are loaded although this option contains them. This happens if an
        earlier start of the run has reset them before it saved the checkpoint.

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
        """Compare the training data of the run with the data that a checkpoint was trained on.

        Args:
            info: Entry "info" of the manifest.

        Returns:
            The differences. None if the data is not compared, for example because the checkpoint
            has no data position, or because the run does not resume from this position.
        """
        data_state = get_data_state(info)
        if self._compare_data is None or not data_state:
            return None
        if "data" in self._find_parts_to_reset(info):
            return None
        return self._compare_data(data_state)

    def _find_parts_to_reset(self, info: dict[str, Any]) -> set[str]:
        """Return the parts of the training state, such as "optimizer", to reset rather than load.

        These are the parts in `checkpoint.exclude_from_loading`, except those that the option also
        contained when the checkpoint was saved: the run has already reset them.

        Args:
            info: Entry "info" of the manifest.
        """
        # Do not convert this list to a set. The saved job has not been validated, so its items may
        # be unhashable.
        reset_before = get_saved_section(info, "checkpoint").get("exclude_from_loading", ())
        return {part for part in self._config.exclude_from_loading if part not in reset_before}


def verify_on_all_ranks(path: Path, ranks: RankGroup) -> Manifest:
    """Verify a checkpoint before loading it and return its manifest.

    Each rank checks some of the files. The checksum of each tensor is verified later, when the
    tensor is loaded.

    Args:
        path: The step folder.
        ranks: The ranks that load together.

    Raises:
        Damage: On all ranks, if any rank finds damage.
        CheckpointError: On all ranks, if any rank cannot currently read a file.
    """
    return ranks.run_together(
        lambda: check_checkpoint(
            path, skip_tensor_checksums=True, rank=ranks.rank, num_ranks=ranks.size
        )
    )


def load_weights(
    path: Path, model: Llama, ranks: RankGroup = _THIS_PROCESS, averaged: bool = False
) -> None:
    """Load the weights of a checkpoint into a model in place.

    Args:
        path: A step folder that has passed `check_checkpoint`.
        model: The model, sharded or not.
        ranks: The ranks that hold the model together. Call this on all of them.
        averaged: Load the averaged weights (EMA) instead.

    Raises:
        UserError: If the checkpoint contains a different model, or if `averaged` is true but it has
            no averages.
        Damage: If the weights are damaged. The weights of `model` are then unusable.
        CheckpointError: If the weights are not finite or currently unreadable.
    """
    reader = ranks.run_together(lambda: SafeReader(path, read_manifest(path)["files"]))
    prefix = get_weight_prefix(reader, averaged)  # raises the same error on all ranks
    tensors = {f"{prefix}{name}": tensor for name, tensor in model_tensors(model).items()}
    _load_and_check(tensors, model.arch, reader, ranks)


def check_tokenizer(path: Path, tokenizer: Tokenizer, name: str, num_embeddings: int) -> None:
    """Check that a checkpoint was trained with the given tokenizer.

    If the checkpoint has no tokenizer fingerprint, check only that the model has enough embeddings.

    Args:
        path: The step folder.
        tokenizer: The tokenizer.
        name: Name of the tokenizer for the error message, for example its path.
        num_embeddings: Number of rows of the embedding matrix.

    Raises:
        CheckpointError: If the tokenizer does not match the saved fingerprint or has more tokens
            than the model has embeddings.
    """
    info = read_manifest(path)["info"]
    fingerprint = get_data_state(info).get("tokenizer")
    is_different = fingerprint is not None and not tokenizer.is_known_as(fingerprint)
    has_too_many_tokens = tokenizer.vocab_size > num_embeddings
    if is_different or has_too_many_tokens:
        raise CheckpointError(
            f"{path} was trained with another tokenizer than {name}, or the file has changed. "
            "Use the original file."
        )


def _load_and_check(
    tensors: dict[str, Tensor],
    arch: Architecture,
    reader: SafeReader,
    ranks: RankGroup,
    prefixes_to_load: tuple[str, ...] = ("model.",),
) -> None:
    """Check the shapes of saved tensors, load them in place, and check that the weights are finite.

    All ranks call this together. If one rank fails, all ranks raise an error.

    Args:
        tensors: This rank's tensors to fill, by name in the checkpoint.
        arch: Architecture of the model.
        reader: Reader of the checkpoint.
        ranks: The ranks that load together.
        prefixes_to_load: Name prefixes of saved tensors that must all be loaded.

    Raises:
        UserError: If the names or shapes of the saved tensors differ from the expected ones.
        Damage: If the tensors are damaged.
        CheckpointError: If the weights are not finite or currently unreadable.
    """
    ranks.run_together(lambda: _check_shapes(tensors, arch, reader, prefixes_to_load))
    load_tensors(reader, tensors, ranks.group)
    ranks.run_together(lambda: _check_finite(reader.path, tensors))


def _check_has_run_state(path: Path, info: dict[str, Any]) -> None:
    """Check that a checkpoint contains the state needed to resume a run, not only weights.

    Args:
        path: The step folder.
        info: Entry "info" of its manifest.

    Raises:
        CheckpointError: If the checkpoint contains only weights.
    """
    if info.get("weights_only") or "step" not in info["train_state"]:
        raise CheckpointError(
            f"{path} contains weights only, so a run cannot resume from it. Start a new run with "
            f'another checkpoint.folder and checkpoint.initial_load_path = "{path}".'
        )


def _check_data_position(info: dict[str, Any]) -> None:
    """Raise Damage if the data position in a manifest is later than the step of the checkpoint."""
    data_schedule = get_data_state(info).get("schedule")
    if data_schedule is not None and data_schedule["step"] > info["train_state"]["step"]:
        raise Damage(f"{MANIFEST}: no run can reach this data position")


def _check_shapes(
    tensors: dict[str, Tensor],
    arch: Architecture,
    reader: SafeReader,
    prefixes_to_load: tuple[str, ...],
) -> None:
    """Check that the tensors in a checkpoint have the names and shapes that the run expects.

    Args:
        tensors: This rank's tensors to load, by name in the checkpoint.
        arch: Architecture of the whole model. A pipeline rank holds only a part of it.
        reader: Reader of the checkpoint.
        prefixes_to_load: Name prefixes of saved tensors that must all be loaded, such as "model.".

    Raises:
        UserError: If names or shapes differ. The message lists the differences.
    """
    expected_shapes = _list_expected_shapes(tensors, arch)
    saved_shapes = _list_saved_shapes(reader, expected_shapes, prefixes_to_load)
    differences = compare_shapes(expected_shapes, saved_shapes)
    if differences:
        listed = join_lines(differences)
        fix = _suggest_fix(differences)
        raise UserError(f"{reader.path} does not fit this job:\n  {listed}\n{fix}")


def _suggest_fix(differences: list[str]) -> str:
    """Return advice for the user on how to make a job fit a checkpoint.

    Args:
        differences: Descriptions of the tensors that do not match, such as
            "optimizer.norm.weight.exp_avg: missing". The first part of each name is "model",
            "optimizer" or "hooks".
    """
    parts = sorted({difference.partition(".")[0] for difference in differences})
    if "model" in parts:
        return "Restore the keys of [model]."
    changed = " and the ".join(parts)
    exclusion = f"checkpoint.exclude_from_loading = {json.dumps(parts)}"
    return f"Restore the options that change the {changed}, or set {exclusion}."


def _list_expected_shapes(
    tensors: dict[str, Tensor], arch: Architecture
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that a checkpoint must contain, by name.

    These are this rank's tensors and, with pipeline parallelism, also the weights on other ranks.
    """
    weights = {f"model.{name}": shape for name, shape in parameter_shapes(arch).items()}
    return weights | {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _list_saved_shapes(
    reader: SafeReader, expected_names: Container[str], prefixes_to_load: tuple[str, ...]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the saved tensors that must match the tensors of the run, by name.

    Include each saved tensor that is in `expected_names`. Also include unexpected tensors whose
    names start with one of `prefixes_to_load`, because resuming without them would lose state.
    Ignore all others, such as optimizer state if the run resets the optimizer.
    """
    shapes = {}
    for name, description in reader.index.items():
        if name in expected_names or name.startswith(prefixes_to_load):
            shapes[name] = tuple(description.size)
    return shapes


def _list_prefixes_to_load(parts: set[str], model: nn.Module) -> tuple[str, ...]:
    """Return name prefixes of saved tensors that need a counterpart in the run.

    A saved tensor with one of these prefixes must not be skipped, because its state would be lost.
    The prefixes are "model." and, if `parts` contains "optimizer", one for each trainable weight
    on this rank, such as "optimizer.layers.0.attention.wq.weight.".
    """
    prefixes = ["model."]
    if "optimizer" in parts:
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                prefixes.append(f"optimizer.{name}.")
    return tuple(prefixes)


def _check_finite(path: object, tensors: dict[str, Tensor]) -> None:
    """Check that all weights are finite. Ignore other tensors, such as optimizer state.

    Raises:
        CheckpointError: If weights contain NaN or infinity. The message lists them.
    """
    invalid_names = [
        name
        for name, tensor in tensors.items()
        if name.startswith(WEIGHTS) and not is_finite(local_shard(tensor))
    ]
    if invalid_names:
        names = join_lines(sorted(invalid_names))
        raise CheckpointError(
            f"{path} contains weights that are NaN or infinite:\n  {names}\n"
            "Use another checkpoint. To resume from an earlier step, set checkpoint.load_step."
        )


def _complete_architecture(saved: dict[str, Any], arch: Architecture) -> dict[str, Any]:
    """Add the fields that a saved architecture lacks because an older version saved it.

    The added fields get their default values, which match the behavior of the older version.

    Args:
        saved: Fields of the saved architecture.
        arch: Architecture of this run. Its class defines all fields and their default values.

    Returns:
        The fields, for a comparison with `arch`. `head_dim` is missing if it was not saved.
    """
    complete = dict(saved)
    for field in fields(arch):
        # head_dim has no fixed default; it defaults to dim / n_heads.
        has_default = field.default is not MISSING and field.name != "head_dim"
        if has_default:
            complete.setdefault(field.name, field.default)
    return complete


def _set_random_state(tensors: dict[str, Tensor]) -> None:
    """Restore the states of this rank's random number generators.

    Args:
        tensors: The loaded tensors by name. Only names such as "rng.cpu.0" and "rng.cuda.0" are
            used. If there are none, the generators keep their states.
    """
    for name, tensor in tensors.items():
        if name.startswith("rng.cuda."):
            torch.cuda.set_rng_state(tensor)
        elif name.startswith("rng.cpu."):
            torch.set_rng_state(tensor)


def _copy_hook_tensors(live: LiveState) -> dict[str, Tensor]:
    """Return copies of this rank's shards of the hook tensors, such as averaged weights, by name.

    `_reset_hook_tensors` restores these values. Omit tensors that contain only NaN, because they
    have no value yet.
    """
    copies = {}
    for name, tensor in live.hook_tensors().items():
        shard = local_shard(tensor.detach())
        if not shard.isnan().all():
            copies[name] = shard.clone()
    return copies


def _fill_live_state_with_nan(live: LiveState) -> None:
    """Fill weights and hook tensors with NaN and reset the optimizer.

    This keeps training from silently using the values of a partly loaded, damaged checkpoint.
    """
    for tensor in live.tensors(optimizer=False).values():
        _fill_with_nan(tensor)
    _reset_optimizer(live)


def _fill_with_nan(tensor: Tensor) -> None:
    """Fill a tensor with NaN, or with 0 if it contains integers."""
    tensor.fill_(torch.nan if tensor.is_floating_point() else 0)


def _create_optimizer_state(live: LiveState) -> None:
    """Create the optimizer state, such as the moments, so that it can be loaded.

    A new torch optimizer has no state before its first step. Take a step that does not change the
    weights: all gradients and the learning rate are 0. Loading then overwrites the state, including
    the step counts. Do nothing if the optimizer already has state.
    """
    optimizer = live.optimizer
    if optimizer is None or any(optimizer.state.values()):
        return

    set_mode(optimizer, "train")  # schedule-free optimizers can only step in this mode
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)

    # The next training step sets the learning rate again.
    set_learning_rate(optimizer, 0.0)
    optimizer.step()
    optimizer.zero_grad()
    set_mode(optimizer, "eval")  # checkpoints contain the weights for evaluation


def _reset_optimizer(live: LiveState) -> None:
    """Reset the optimizer in place to the state and options of a new one."""
    if live.optimizer is None or live.new_optimizer is None:
        return
    live.optimizer.state.clear()  # first, so that two states never exist at once
    fresh = live.new_optimizer()
    live.optimizer.state.update(fresh.state)
    for group, fresh_group in zip(live.optimizer.param_groups, fresh.param_groups, strict=True):
        group.update({key: value for key, value in fresh_group.items() if key != "params"})
