"""Find checkpoints by path, verify them, and read the jobs that trained them.

All commands and job keys that take a checkpoint accept the paths that `find_checkpoints` resolves.
Except for downloads, this module changes nothing on disk. It does not import torch.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

from titanlite.checkpoint.manifest import (
    Manifest,
    check_checkpoint,
    get_step,
    list_checkpoints,
    list_set_aside,
    list_unfinished,
    parse_manifest,
    read_manifest,
    step_folder_name,
)
from titanlite.config import storage
from titanlite.config.compute_dtype import ComputeDtype
from titanlite.config.errors import CheckpointError, Damage, UserError
from titanlite.config.files import MANIFEST
from titanlite.config.load import load_job
from titanlite.config.mistakes import REMOVED_NAME, Mistake
from titanlite.config.registry import require_plugins
from titanlite.config.run import Run
from titanlite.config.schema import JobConfig

COMMAND = "TITANLITE_COMMAND"
"""Environment variable with the command that started the run, such as "NGPU=2 titanlite launch",
without its options. `resume_hint` shows this command."""

T = TypeVar("T")


def find_checkpoints(path: Path) -> list[Path]:
    """Return the step folders at a path, sorted by step.

    Args:
        path: A step folder, a checkpoint folder (which contains step folders), the output folder of
            a run, or a link to one of them. For the URL of such a folder, only the newest
            checkpoint is downloaded and returned.

    Raises:
        UserError: If the folder does not exist.
        CheckpointError: If the folder contains no checkpoint, or only damaged ones that a run
            renamed.
    """
    local_path = download_if_url(path)
    _check_is_folder(local_path)

    folder = local_path.resolve()
    is_step_folder = get_step(folder) >= 0
    if is_step_folder:
        return [folder]
    # In an output folder, the step folders are in subfolders such as "checkpoint".
    checkpoints = list_checkpoints(folder) or list_checkpoints(*folder.glob("*"))
    if not checkpoints:
        raise _no_checkpoint_error(folder)
    return checkpoints


def _check_is_folder(path: Path) -> None:
    """Check that a path is an existing folder, and raise a UserError otherwise."""
    if not os.path.isdir(path):  # Path.is_dir would raise OSError if the name is too long
        problem = "is a file" if os.path.isfile(path) else "does not exist"
        raise UserError(
            f"{path} {problem}. "
            "Pass a step folder, a checkpoint folder, or the output folder of a run."
        )


def _no_checkpoint_error(folder: Path) -> CheckpointError:
    """Create the error for a folder without checkpoints, or with only damaged ones."""
    damaged = [path.name for path in _list_set_aside_in(folder)]
    if damaged:
        return CheckpointError(
            f"{folder} contains only damaged checkpoints, which a run has renamed: "
            f"{', '.join(damaged)}. Move them away, or choose another folder."
        )
    return CheckpointError(
        f"{folder} contains no checkpoint. A run saves one every checkpoint.interval steps."
    )


def download_if_url(path: Path) -> Path:
    """Download the newest checkpoint at a URL and return its local path.

    Args:
        path: A URL such as s3://bucket/run, or a local path, which is returned with `~` expanded.

    Raises:
        CheckpointError: If there is no checkpoint at the URL.
        UserError: If the storage cannot be accessed.
    """
    url = storage.as_url(path)
    if url is None:
        return Path(os.path.expanduser(path))

    with storage.storage_errors(url):
        file_system, root = storage.open_storage(url)
        files = storage.list_files(file_system, root)

    # The URL contains step folders, such as "step-00000100" or "final/step-00000200".
    names = storage.find_checkpoints(files, "(?:final/)?")
    if names:
        return storage.get_local_copy(f"{url}/{names[-1]}")

    # The URL is itself a step folder.
    if MANIFEST in files:
        return storage.get_local_copy(url)
    raise CheckpointError(f"{url} contains no checkpoint.")


def load_newest(
    path: Path,
    load: Callable[[Path], T],
    *,
    skip_tensor_checksums: bool = False,
    log: Callable[[str], None] = lambda line: None,
) -> T:
    """Verify and load the newest valid checkpoint at a path.

    If a checkpoint is damaged, try the next older one.

    Args:
        path: A path or URL that `find_checkpoints` accepts.
        load: Loads the checkpoint in a step folder, or raises `Damage`. Its result is returned.
        skip_tensor_checksums: Do not verify checksums that loading the tensors verifies anyway.
            Set this if `load` reads the tensors or does not need them.
        log: Called with a one-line message before each older checkpoint is tried.

    Raises:
        UserError: If the folder does not exist.
        CheckpointError: If there is no valid checkpoint, or if a checkpoint cannot be read for a
            reason other than damage.
    """

    def check_and_load(step_folder: Path) -> T:
        check_checkpoint(step_folder, skip_tensor_checksums=skip_tensor_checksums)
        return load(step_folder)

    return load_newest_of(find_checkpoints(path), check_and_load, log)


def load_newest_of(
    step_folders: Sequence[Path],
    load: Callable[[Path], T],
    log: Callable[[str], None] = lambda line: None,
) -> T:
    """Load the newest valid checkpoint in a list. If one is damaged, try the one before it.

    If several ranks load together, pass the same list on all of them. List the checkpoints on one
    rank only, because a run may add some in the meantime.

    Args:
        step_folders: The step folders, sorted by step.
        load: Loads the checkpoint in a step folder, or raises `Damage`. Its result is returned.
        log: Called with a one-line message before each older checkpoint is tried.

    Raises:
        CheckpointError: If all checkpoints are damaged, or if one cannot be read for a reason other
            than damage.
    """
    problems: list[str] = []
    for step_folder in reversed(step_folders):
        if problems:
            log(f"{problems[-1]}; trying an older one")
        try:
            return load(step_folder)
        except Damage as damage:
            problems.append(f"{step_folder} is damaged: {damage}")
    raise CheckpointError("\n".join(problems))


def read_newest_manifest(path: Path) -> Manifest:
    """Return the newest valid manifest of the checkpoints at a path.

    This is fast because it does not check the other files of the checkpoint.

    Args:
        path: A path or URL that `find_checkpoints` accepts.

    Raises:
        UserError: If the folder does not exist.
        CheckpointError: If there is no valid manifest, or if one is currently unreadable.
    """
    return load_newest_of(find_checkpoints(path), read_manifest)


def verify(folder: str | Path) -> dict[str, Any]:
    """Verify all checkpoints at a path by reading every byte, and return a report.

    Args:
        folder: A path or URL that `find_checkpoints` accepts. At a URL, only the newest checkpoint
            is verified.

    Returns:
        A dictionary with these keys:

        - "folder": the path
        - "checkpoints": list of dictionaries with "name", "step", "bytes", "state" ("good",
          "damaged" or "unreadable") and "damage", a list of messages
        - "unfinished": names of interrupted saves and removals
        - "set_aside": names of damaged checkpoints that a run renamed, so that it never loads them

    Raises:
        UserError: If the folder does not exist.
        CheckpointError: If the folder contains no checkpoint.
    """
    local_folder = download_if_url(Path(folder)).resolve()
    step_folders = find_checkpoints(local_folder)
    report: dict[str, Any] = {
        "folder": str(folder),
        "checkpoints": _verify_step_folders(step_folders, local_folder),
        "unfinished": [],
        "set_aside": [],
    }
    is_single_checkpoint = local_folder in step_folders
    if not is_single_checkpoint:
        set_aside = _list_set_aside_in(local_folder)
        report["set_aside"] = [path.name for path in set_aside]
        report["unfinished"] = _list_unfinished_beside([*step_folders, *set_aside])
    return report


def _list_set_aside_in(folder: Path) -> list[Path]:
    """List damaged checkpoints, which a run has renamed, in a folder and its direct subfolders.

    In the output folder of a run, checkpoints are in subfolders such as "checkpoint" and "final".
    """
    return list_set_aside(folder, *folder.glob("*"))


def _list_unfinished_beside(checkpoints: Sequence[Path]) -> list[str]:
    """List the names of interrupted saves and removals in the parent folders of checkpoints."""
    names: list[str] = []
    for folder in sorted({path.parent for path in checkpoints}):
        names += [path.name for path in list_unfinished(folder)]
    return names


def _verify_step_folders(paths: Sequence[Path], folder: Path) -> list[dict[str, Any]]:
    """Verify several checkpoints and return a report for each one that still exists.

    Args:
        paths: The step folders.
        folder: The folder that the user passed. Names in the reports are relative to it.
    """
    reports = []
    for path in paths:
        name = path.name if path == folder else os.path.relpath(path, folder)
        report = {"name": name, **_verify_step_folder(path)}
        # Skip a checkpoint that its run removed in the meantime.
        if path == folder or path in list_checkpoints(path.parent):
            reports.append(report)
    return reports


def _verify_step_folder(path: Path) -> dict[str, Any]:
    """Verify a checkpoint and return a dictionary with "step", "bytes", "state" and "damage"."""
    state = "good"
    damage = []
    try:
        check_checkpoint(path)
    except CheckpointError as error:
        state = "damaged" if isinstance(error, Damage) else "unreadable"
        damage = [str(error)]
    size = sum(file.lstat().st_size for file in path.glob("*"))
    return {"step": get_step(path), "bytes": size, "state": state, "damage": damage}


class NoTokenizerError(CheckpointError):
    """Raised if a checkpoint has no tokenizer, because its weights were imported without one."""


def read_newest_job(path: Path, tokenizer_path: Path | None = None) -> JobConfig:
    """Return the job configuration from the newest checkpoint at a path.

    If the manifest of a checkpoint is damaged, use the next older checkpoint.

    Args:
        path: A path or URL that `find_checkpoints` accepts.
        tokenizer_path: Tokenizer file to use instead of the one in the checkpoint.

    Raises:
        UserError: If the folder does not exist, or the job needs a plugin that is not loaded.
        CheckpointError: If there is no checkpoint, all manifests are damaged, or the job cannot be
            read.
    """
    read = partial(read_job, tokenizer_path=tokenizer_path)
    return load_newest_of(find_checkpoints(path), read)


def read_job(step_folder: Path, tokenizer_path: Path | None = None) -> JobConfig:
    """Return the job configuration in a checkpoint, for building the model and the tokenizer.

    Args:
        step_folder: Folder of the checkpoint.
        tokenizer_path: Tokenizer file to use instead of the one in the checkpoint.

    Raises:
        UserError: If the job needs a plugin that is not loaded.
        Damage: If the manifest is damaged.
        CheckpointError: If the job cannot be read, or if the checkpoint has no job.
        NoTokenizerError: If the checkpoint has no tokenizer and `tokenizer_path` is None.
    """
    manifest = read_manifest(step_folder)
    if tokenizer_path is None:
        _check_has_tokenizer(step_folder, manifest["info"])

    job = _read_saved_job(step_folder, manifest["info"])
    if tokenizer_path is not None:
        return set_tokenizer_path(job, tokenizer_path)
    is_tokenizer_in_checkpoint = job.tokenizer.path in manifest["files"]
    if is_tokenizer_in_checkpoint:
        return set_tokenizer_path(job, step_folder / job.tokenizer.path)
    return job


def _check_has_tokenizer(step_folder: Path, info: dict[str, Any]) -> None:
    """Raise a NoTokenizerError if the weights were imported without a tokenizer."""
    is_old_import = info["job"] is None  # its config.toml sets the tokenizer
    has_only_weights = info.get("weights_only", False)
    if is_old_import or not has_only_weights:
        return
    if not get_data_state(info).get("tokenizer"):
        raise NoTokenizerError(
            f"{step_folder} has no tokenizer, because its weights were imported without one. "
            "Add --tokenizer.path FILE, or import them again with --tokenizer FILE."
        )


def set_tokenizer_path(job: JobConfig, path: str | Path) -> JobConfig:
    """Return a copy of a job configuration that loads the tokenizer from `path`."""
    return job.with_section("tokenizer", path=str(path))


def _read_saved_job(step_folder: Path, info: dict[str, Any]) -> JobConfig:
    """Return the job configuration that a checkpoint was saved with.

    Ignore options that titanlite has removed since then, because they do not change the model.

    Args:
        step_folder: Folder of the checkpoint.
        info: Entry "info" of its manifest.

    Raises:
        UserError: If the job needs a plugin that is not loaded.
        CheckpointError: If the job has keys or values that this version of titanlite cannot read,
            or if the checkpoint has no job.
    """
    if info["job"] is None:
        return _read_job_of_old_import(step_folder)

    job, mistakes = JobConfig.read(info["job"])  # ignores invalid options and reports them
    # Options of a missing plugin are invalid, so report the missing plugin first.
    require_plugins(job.job.plugins, step_folder)
    _reject_unreadable_options(step_folder, mistakes)
    return job


def _reject_unreadable_options(step_folder: Path, mistakes: Sequence[Mistake]) -> None:
    """Raise a CheckpointError if a saved job is invalid. Ignore removed options and values."""
    unreadable = [mistake.name for mistake in mistakes if not _was_removed(mistake)]
    if unreadable:
        keys = "; ".join(unreadable)
        raise CheckpointError(f"{step_folder}: this version cannot read keys of its job: {keys}")


def _was_removed(mistake: Mistake) -> bool:
    """Return whether a validation error of a saved job is due to a removed option or value.

    Such an error can be ignored, because removed options and values do not change the model.
    """
    if mistake.name.startswith("model."):
        # No value of a [model] option was ever removed, so an unknown value is from a newer version
        # and describes a different model.
        return mistake.kind == REMOVED_NAME
    return mistake.kind in (REMOVED_NAME, "literal_error")


def _read_job_of_old_import(step_folder: Path) -> JobConfig:
    """Return the job configuration of weights that an early version of titanlite imported.

    Early versions wrote the job to config.toml in the output folder instead of the manifest.

    Raises:
        CheckpointError: If the output folder has no config.toml.
    """
    config = step_folder.parents[1] / "config.toml"
    if not config.is_file():
        raise CheckpointError(
            f"{step_folder} was imported by a version that did not record model and tokenizer. "
            f"Import the weights again, or write their job to {config}."
        )
    return load_job(["--job.config_file", str(config)], trusted=False)


def read_compute_dtype(run: Run) -> ComputeDtype | None:
    """Return the compute dtype of the newest checkpoint of a run, which a resumed run keeps.

    If there is no local checkpoint, look for one at the URL `checkpoint.mirror`.

    Returns:
        "float32" or "bfloat16". None if there is no readable checkpoint, or if the run does not
        use checkpoints.
    """
    if not run.job.checkpoint.enable:
        return None
    try:
        manifest = _read_newest_manifest_of(run)
    except UserError:  # loading the checkpoint later reports the error
        return None

    # The saved job has not been validated.
    dtype = get_saved_section(manifest["info"], "training").get("mixed_precision_param")
    return dtype if dtype in get_args(ComputeDtype) else None


def _read_newest_manifest_of(run: Run) -> Manifest:
    """Return the manifest of the newest checkpoint of a run.

    If there is no local one, read it from the URL `checkpoint.mirror`, if set.
    """
    mirror = run.job.checkpoint.mirror
    if mirror is not None and not is_saved(run):
        return _read_newest_manifest_at(mirror)
    return load_newest_of(list_checkpoints(run.checkpoint_folder), read_manifest)


class Progress(NamedTuple):
    """How far a run has trained, according to the checkpoint from which it will resume.

    Attributes:
        steps: Number of steps whose data the run has read.
        sequences: Number of sequences in these steps, over all ranks.
        warmup_steps: Number of learning rate warmup steps in the saved job, or None if it does not
            set this key. If the batch sizes change, a completed warmup whose length is set in
            tokens keeps this number.
    """

    steps: int = 0
    sequences: int = 0
    warmup_steps: int | None = None


def read_progress(run: Run) -> Progress:
    """Return how far a run has trained, according to the checkpoint from which it will resume.

    If there is no readable checkpoint, return a progress of 0 steps.
    """
    if not is_saved(run):
        return Progress()
    try:
        manifest = _read_manifest_to_resume(run)
    except UserError:  # the run reports the unreadable checkpoint later, when it loads it
        return Progress()

    info = manifest["info"]
    warmup_steps = get_saved_section(info, "lr_scheduler").get("warmup_steps")
    data_schedule = get_data_state(info).get("schedule")
    if not data_schedule:  # the checkpoint contains only weights
        return Progress(warmup_steps=warmup_steps)
    sequences_per_source = data_schedule["rows"]
    return Progress(
        steps=data_schedule["step"],
        sequences=sum(sequences_per_source),
        warmup_steps=warmup_steps,
    )


def _read_manifest_to_resume(run: Run) -> Manifest:
    """Return the manifest of the checkpoint from which a run will resume.

    This is the newest checkpoint, unless `checkpoint.load_step` selects another one. A run that has
    resumed from `load_step` and saved a later checkpoint resumes from the newest one again.
    """
    load_step = run.job.checkpoint.load_step
    checkpoints = list_checkpoints(run.checkpoint_folder)
    selected = [path for path in checkpoints if get_step(path) == load_step]
    if selected and not has_resumed_from(checkpoints, load_step):
        checkpoints = selected
    return load_newest_of(checkpoints, read_manifest)


def _read_newest_manifest_at(url: str) -> Manifest:
    """Return the manifest of the newest checkpoint at a URL.

    Raises:
        CheckpointError: If there is no checkpoint at the URL, or its manifest is damaged.
        UserError: If the storage cannot be accessed.
    """
    with storage.storage_errors(url):
        files, root = storage.open_storage(url)
        names = storage.find_checkpoints(storage.list_files(files, root))
        if not names:
            raise CheckpointError(f"{url} contains no checkpoint.")
        path = f"{root}/{names[-1]}/{MANIFEST}"
        return parse_manifest(files.cat_file(path), path)


def get_saved_section(info: dict[str, Any], section: str) -> dict[str, Any]:
    """Return a section of the job that saved a checkpoint, or {} if it has no such section.

    Imported weights may have no job at all.

    Args:
        info: Entry "info" of the manifest.
        section: Name of the section, such as "checkpoint".
    """
    job = info["job"] or {}
    return job.get(section, {})


def get_data_state(info: dict[str, Any]) -> dict[str, Any]:
    """Return the saved position in the training data, or {} if the checkpoint has none.

    `save_position` defines the format. For imported weights, the only key is "tokenizer": the
    fingerprint of the tokenizer, or None if no tokenizer was imported.

    Args:
        info: Entry "info" of the manifest.
    """
    return info["train_state"].get("data") or {}


def has_resumed_from(checkpoints: Sequence[Path], load_step: int) -> bool:
    """Return whether a run has resumed from step `load_step` and saved a later checkpoint since.

    For example, a run with `checkpoint.load_step` = 100 loads the checkpoint of step 100 and trains
    to step 200. If it restarts, it must resume from step 200 instead of step 100.

    Args:
        checkpoints: Step folders of the run, sorted by step.
        load_step: Value of `checkpoint.load_step`.
    """
    later_checkpoints = [path for path in checkpoints if get_step(path) > load_step]
    for path in reversed(later_checkpoints):
        with suppress(Damage):
            saved_options = get_saved_section(read_manifest(path)["info"], "checkpoint")
            # If it differs, the later checkpoint was saved before the user set this `load_step`.
            return saved_options.get("load_step") == load_step
    return False


def is_saved(run: Run) -> bool:
    """Return whether a run uses checkpoints and has a local one, from which it would resume."""
    return run.job.checkpoint.enable and bool(list_checkpoints(run.checkpoint_folder))


def resume_hint(run: Run, argv: Sequence[str]) -> str:
    """Return a one-line message with the command that resumes a run that ended early.

    Args:
        run: The run.
        argv: Arguments after `titanlite train` or `titanlite launch`.
    """
    words = [os.environ.get(COMMAND, "titanlite train"), *map(shlex.quote, argv)]
    command = " ".join(words)
    if not is_saved(run):
        return f"Nothing is saved. To start again: {command}"
    try:
        step = read_newest_manifest(run.checkpoint_folder)["step"]
    except UserError:
        return (
            f"{run.checkpoint_folder} has no valid checkpoint. After you have fixed it: {command}"
        )
    newest = run.checkpoint_folder / step_folder_name(step)
    return f"The newest checkpoint is step {step} in {newest}. To resume: {command}"
