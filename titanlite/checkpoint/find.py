"""Which checkpoints a path stands for, which of them are good, which job trained them, and how a run goes on from them.

Invariant: every command and key that asks for a checkpoint takes the same names, and decides here. Nothing on the disk
is changed, and torch is not needed.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from titanlite.checkpoint import step_folders
from titanlite.config import storage
from titanlite.config.errors import CheckpointError, Damage, UserError
from titanlite.config.files import MANIFEST
from titanlite.config.load import load_job
from titanlite.config.registry import require_plugins
from titanlite.config.run import Run
from titanlite.config.schema import JobConfig

# Environment variable: the launcher's command, after the variables that were set for it.
COMMAND = "TITANLITE_COMMAND"

T = TypeVar("T")


def checkpoints_at(path: Path) -> list[Path]:
    """The checkpoints that `path` stands for, by rising step.

    Args:
        path: one step folder, also as a link to it or as `.`; the folder of all; or a run's output folder, which holds
            that folder and the weights in `final`. `~` is the home folder. Of a URL, such as a mirror, a copy of the
            newest one is taken.

    Raises:
        UserError: there is no such folder.
        CheckpointError: it holds no checkpoint.
    """
    path = on_this_machine(path)
    if not os.path.isdir(path):  # which, unlike Path.is_dir, takes a name of any length
        problem = "is a file" if os.path.isfile(path) else "does not exist"
        raise UserError(f"{path}: {problem}. Name the folder of a step, that of all steps, or a run's output folder.")
    path = path.resolve()
    if step_folders.step_of(path) is not None:
        return [path]
    found = step_folders.list_checkpoints(path) or step_folders.list_checkpoints(*path.glob("*"))
    if not found:
        raise CheckpointError(f"{path}: no checkpoint here. A run saves one every checkpoint.interval steps.")
    return found


def on_this_machine(path: Path) -> Path:
    """The path, or that of a copy of the newest checkpoint at a URL. Raises UserError: there is none."""
    if (url := storage.url_of(path)) is None:
        return Path(os.path.expanduser(path))
    with storage.answered(url):
        there = storage.listing(*storage.opened(url))
    steps = [*storage.checkpoints(there), *storage.checkpoints(there, "final/")]
    if not steps and MANIFEST not in there:
        raise CheckpointError(f"{url}: no checkpoint here.")
    newest = max(steps, key=lambda name: int(name.rpartition("-")[2]), default="")
    return storage.local_copy(f"{url}/{newest}".rstrip("/"))


def use_newest(
    path: Path,
    use: Callable[[Path], T],
    *,
    check: Callable[[Path], object] = step_folders.check_folder,
    look: Callable[[Callable[[], list[Path]]], list[Path]] = lambda find: find(),
    log: Callable[[str], None] = lambda line: None,
) -> T:
    """What `use` makes of the newest undamaged one of `checkpoints_at(path)`.

    Args:
        use: gets a step folder that is checked.
        check: another way to call `step_folders.check_folder`, by which ranks share the work.
        look: calls a function; where ranks choose together, on one of them, as the folder's run may go on meanwhile.
        log: told of each damaged one that is passed over.

    Raises:
        UserError: there is no such folder.
        CheckpointError: none is there, or none that is good, or one cannot be read.
    """
    found: list[str] = []
    for candidate in reversed(look(lambda: checkpoints_at(path))):
        if found:
            log(f"{found[-1]}; taking an older one")
        try:
            check(candidate)
            return use(candidate)
        except Damage as damage:
            found.append(f"{candidate} is damaged: {damage}")
    raise CheckpointError("\n".join(found))


def verify(folder: Path) -> dict[str, Any]:
    """Read every byte of a checkpoint, or of all in a folder, and say which ones are good.

    Returns:
        {"folder", "checkpoints": [{"name", "step", "bytes", "state": "good" | "damaged" | "unreadable", "damage":
        [...]}], "unfinished": [names], "set_aside": [names]}

    Raises:
        UserError: there is no such folder.
        CheckpointError: there is no checkpoint.
    """
    home = on_this_machine(folder).resolve()
    paths = checkpoints_at(home)
    folders = [] if paths == [home] else sorted({path.parent for path in paths})
    rows = []
    for path in paths:
        state, damage = "good", []
        try:
            step_folders.check_folder(path)
        except CheckpointError as error:
            state, damage = "damaged" if isinstance(error, Damage) else "unreadable", [str(error)]
        size = sum(file.lstat().st_size for file in path.glob("*"))
        if path.exists():  # else the run goes on, and has removed it meanwhile
            name, step = os.path.relpath(path, home) if folders else path.name, step_folders.step_of(path)
            rows.append({"name": name, "step": step, "bytes": size, "state": state, "damage": damage})
    return {
        "folder": str(folder),
        "checkpoints": rows,
        "unfinished": [path.name for parent in folders for path in step_folders.list_unfinished(parent)],
        "set_aside": [path.name for parent in folders for path in step_folders.list_set_aside(parent)],
    }


def known_job(path: Path) -> JobConfig:
    """`job_of` the newest of `checkpoints_at(path)` whose manifest can be read. No other file is looked at.

    Raises:
        UserError: there is no such folder, or its job needs a plugin that was not loaded.
        CheckpointError: no checkpoint is there, or none that says which model it has.
    """
    return use_newest(path, job_of, check=lambda step_folder: None)


def job_of(step_folder: Path) -> JobConfig:
    """The job that trained a checkpoint: from its manifest, else from the config.toml of its run.

    Raises:
        UserError: it needs a plugin that was not loaded.
        Damage: the manifest is no good.
        CheckpointError: it cannot be read, or the job is in neither, as with imported weights.
    """
    job, config = step_folders.read_manifest(step_folder)["info"]["job"], step_folder.parents[1] / "config.toml"
    if job is None and config.is_file():
        return load_job(["--job.config_file", str(config)], trusted=False)
    if job is None:
        problem = f"{step_folder} does not say which model and tokenizer it has: it was imported. Start a run from it"
        raise CheckpointError(f"{problem} (checkpoint.initial_load_path), or write its job file to {config}.")
    read, mistakes = JobConfig.read(job)
    require_plugins(read.job.plugins, step_folder)
    # Without keys and choices of earlier versions the job is the same.
    if found := [each.found for each in mistakes if each.kind not in ("gone", "literal_error")]:
        raise CheckpointError(f"{step_folder}: its job has keys that this version does not read: {'; '.join(found)}")
    return read


def checkpoint_keys(info: dict[str, Any]) -> dict[str, Any]:
    """[checkpoint] of the job that saved this."""
    return (info["job"] or {}).get("checkpoint", {})


def went_back(checkpoints: Sequence[Path], step: int) -> bool:
    """Whether the newest of these is of a run that has started from checkpoint.load_step = `step` already."""
    for path in reversed(checkpoints):
        with suppress(Damage):  # damaged: the one before tells
            since = (step_folders.step_of(path) or 0) > step
            return since and checkpoint_keys(step_folders.read_manifest(path)["info"]).get("load_step") == step
    return False


def resume_hint(run: Run, argv: Sequence[str]) -> str:
    """The last line of a run that has ended early: its newest checkpoint, and the command that goes on after it.

    Args:
        argv: The words after `titanlite train` or `titanlite launch`.
    """
    command = " ".join([os.environ.get(COMMAND, "titanlite train"), *map(shlex.quote, argv)])
    if not is_saved(run):
        return f"Nothing is saved. To start again: {command}"
    saved = step_folders.list_checkpoints(run.checkpoint_folder)[-1]
    return f"The last good step is {step_folders.step_of(saved)}, saved in {saved}. To go on after it: {command}"


def is_saved(run: Run) -> bool:
    """Whether a start of this run would go on from a checkpoint."""
    return run.job.checkpoint.enable and bool(step_folders.list_checkpoints(run.checkpoint_folder))
