"""Publish, list, verify, rename and remove checkpoints, which are step folders on disk.

Invariant: A folder such as `step-00000100` is complete, or it does not exist. A save writes to a
temporary folder `.tmp-...`, adds a manifest with the size and checksum of each file, syncs
everything to disk, and publishes the folder with one rename. Published folders are never written
to.

This module works only with files and does not import torch.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from titanlite.config import schema
from titanlite.config.errors import CheckpointError, Damage, UserError
from titanlite.config.files import INCOMPLETE, MANIFEST, STEP_FOLDER
from titanlite.runtime.logging import LOGGER_NAME

if TYPE_CHECKING:
    from titanlite.checkpoint.live_state import LiveState
    from titanlite.runtime.logging import Event
    from titanlite.runtime.rank_group import RankGroup

TMP_PREFIX = ".tmp-"
BEST_LINK = "best"
"""Name of the link to the checkpoint with the lowest validation loss."""
EXPORT_MARKER = "titanlite.json"
"""File that marks a `final_hf` folder as written by a titanlite run."""
INDEX = ".metadata"
"""Name of the DCP index, which lists all tensors."""
FORMAT_VERSION = 2
"""Format of new manifests. titanlite 0.2 and earlier, which had a different learning rate
schedule, wrote format 1."""

# Names of the titanlite hooks under which checkpoints store their state.
EMA = "ema"
BEST_CHECKPOINT = "best_checkpoint"
NON_FINITE_GUARD = "non_finite_guard"
SPIKE_GUARD = "spike_guard"
OLD_HOOK_NAMES = {
    "Ema": EMA,
    "BestCheckpoint": BEST_CHECKPOINT,
    "NonFiniteGuard": NON_FINITE_GUARD,
    "SpikeGuard": SPIKE_GUARD,
}
"""Mapping from the hook class names that titanlite 0.2 and earlier stored to the current names."""

Entry = dict[str, Any]
"""Manifest entry of a file: {"size": bytes, "xxh3_128": hexadecimal, "chunk_checksums": bool}.

`chunk_checksums` is true if the index contains a checksum for each chunk (tensor or shard) in the
file. titanlite 0.2 did not write this key.
"""

Manifest = dict[str, Any]
"""Content of a manifest, with these keys:

- "format": version number
- "step"
- "files": entry of each file, by name
- "info": job, architecture, training state and more
"""


class HashingFile(io.BufferedWriter):
    """A new file that computes checksums of its content and of each chunk while it is written.

    A chunk is a saved tensor or shard. Write sequentially; seeking is not supported.

    Args:
        path: Path of the file, which must not exist.

    Attributes:
        error: The OSError of a failed write, or None. Raise it instead of the less helpful
            exception that `torch.save` raises.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "xb"), buffer_size=1 << 20)
        self.error: OSError | None = None
        self._size = 0
        self._file_hash = xxhash.xxh3_128()
        self._chunk_hash = xxhash.xxh3_128()
        self._chunk_start = 0

    def write(self, data: Any) -> int:
        """Write bytes and update the checksums."""
        self._file_hash.update(data)
        self._chunk_hash.update(data)
        try:
            written = super().write(data)
        except OSError as error:
            self.error = error
            raise
        self._size += written
        return written

    def end_chunk(self) -> tuple[int, int, bytes]:
        """End a chunk, which consists of all bytes written since the previous chunk ended.

        Returns:
            The offset of the chunk in the file and its length, both in bytes, and its checksum.
        """
        offset = self._chunk_start
        checksum = self._chunk_hash.digest()
        self._chunk_start = self._size
        self._chunk_hash.reset()
        return offset, self._size - offset, checksum

    def fileno(self) -> int:
        """Flush the buffer and return the file descriptor.

        DCP passes the descriptor to `os.fsync` without flushing the buffer first.
        """
        self.flush()
        return super().fileno()

    def entry(self) -> Entry:
        """Return the manifest entry of the file. Call this after the last write."""
        return {
            "size": self._size,
            "xxh3_128": self._file_hash.hexdigest(),
            "chunk_checksums": self._chunk_start > 0,
        }


class _CheckpointFile(io.FileIO):
    """A file that raises CheckpointError instead of OSError when it cannot be read."""

    def readinto(self, buffer: Any, /) -> int | None:
        try:
            return super().readinto(buffer)
        except OSError as error:
            raise _unreadable(self.name, error) from None

    def readall(self) -> bytes:
        try:
            return super().readall()
        except OSError as error:
            raise _unreadable(self.name, error) from None


@contextmanager
def open_file(path: Path) -> Iterator[io.BufferedReader[Any]]:
    """Open a file of a checkpoint for reading. Reject links, pipes and folders.

    Raises:
        Damage: If the file is missing or not a regular file.
        CheckpointError: If the file cannot be opened, or if a read in the `with` block fails. Its
            content may be intact.
    """
    try:
        status = os.lstat(path)  # does not follow links
        if not stat.S_ISREG(status.st_mode):
            raise Damage(f"{path.name}: not a regular file")
        # A link or a pipe may replace the file after this check, so neither follow it nor block.
        raw_file = _CheckpointFile(path, opener=_open_without_following)
    except FileNotFoundError:
        raise Damage(f"{path.name}: missing") from None
    except OSError as error:
        raise _unreadable(path, error) from None

    # If a read fails, `_CheckpointFile` raises a CheckpointError.
    with io.BufferedReader(raw_file) as file:
        yield file


def _open_without_following(path: str, flags: int) -> int:
    """Open a file without following a symbolic link, and return the file descriptor.

    If the file is a named pipe, do not wait until a process writes to it.

    Raises:
        OSError: If the file is a symbolic link or cannot be opened.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _unreadable(path: object, error: OSError) -> CheckpointError:
    """Create the error for a failed read, for example if the storage is offline."""
    return CheckpointError(
        f"cannot read {path}: {type(error).__name__}: {error.strerror}. Its content may be intact. "
        "Fix the cause, or move this checkpoint away."
    )


def step_folder_name(step: int) -> str:
    """Return the name of a step folder, such as "step-00000100". Names sort in step order."""
    return f"step-{step:08d}"


def get_step(path: Path) -> int:
    """Return the step in the name of a step folder, or -1 for any other name."""
    match = STEP_FOLDER.fullmatch(path.name)
    return int(match[1]) if match else -1


def list_checkpoints(*folders: Path) -> list[Path]:
    """Return the step folders in one or more folders, sorted by step.

    Include damaged checkpoints, even if they lack a manifest. Exclude unfinished, removed and
    renamed checkpoints, and empty folders.
    """
    checkpoints = []
    for folder in folders:
        for path in folder.glob("step-*"):
            if get_step(path) >= 0 and path.is_dir() and not _is_removed(path):
                checkpoints.append(path)
    return sorted(checkpoints, key=lambda path: (get_step(path), path))


def _is_removed(path: Path) -> bool:
    """Return whether a step folder is left over from a removed checkpoint.

    If a process is killed while removing a checkpoint, it leaves an empty folder or a folder with a
    renamed manifest.
    """
    if (path / MANIFEST).exists():
        return False
    return (path / INCOMPLETE).exists() or _is_empty(path)


def _is_empty(folder: Path) -> bool:
    """Return whether a folder is empty or no longer exists."""
    try:
        return not any(folder.iterdir())
    except FileNotFoundError:
        return True
    except OSError:  # unreadable; `read_manifest` reports this
        return False


def list_set_aside(*folders: Path) -> list[Path]:
    """Return the damaged checkpoints that a run renamed, such as "step-00000100.damaged"."""
    checkpoints: list[Path] = []
    for folder in folders:
        checkpoints += folder.glob("step-*.damaged*")
    return sorted(checkpoints)


def list_unfinished(folder: Path) -> list[Path]:
    """List the temporary folders of unfinished saves and the folders of unfinished removals."""
    return sorted([*folder.glob(f"{TMP_PREFIX}*"), *_list_half_removed(folder)])


def _list_half_removed(folder: Path) -> list[Path]:
    """Return the step folders whose removal was interrupted."""
    return [path.parent for path in folder.glob(f"step-*/{INCOMPLETE}")]


def publish_checkpoint(
    tmp_folder: Path, step: int, files: dict[str, Entry], info: dict[str, Any]
) -> Path:
    """Write the manifest of a checkpoint and rename its folder so that readers find it.

    Call this on rank 0 when all ranks have written and synced their files.

    Args:
        tmp_folder: The temporary folder that contains the files.
        step: The step of the checkpoint.
        files: Manifest entry (size and checksums) of each file, by name.
        info: JSON value to store in the manifest as "info".

    Returns:
        The step folder.

    Raises:
        FileExistsError: If the step folder exists and is not empty.
        OSError: If the disk fails, or if a file is missing or has the wrong size, for example
            because the nodes do not share the folder.
    """
    _check_complete(tmp_folder, files)
    body = {
        "format": FORMAT_VERSION,
        "step": step,
        "files": dict(sorted(files.items())),
        "info": info,
    }
    manifest_path = tmp_folder / MANIFEST
    manifest_path.write_bytes(encode_manifest(body))
    sync(manifest_path)

    target = tmp_folder.with_name(step_folder_name(step))
    publish_folder(tmp_folder, target)
    return target


def _check_complete(folder: Path, files: dict[str, Entry]) -> None:
    """Check that this node sees all files of a checkpoint, including files from other nodes.

    Args:
        folder: The temporary folder that contains the files.
        files: Manifest entry (size and checksums) of each file, by name.

    Raises:
        OSError: If a file is missing or has the wrong size.
    """
    for name, entry in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != entry["size"]:
            raise OSError(
                f"{path} is incomplete on the first rank; do all nodes share this folder?"
            )


def publish_folder(tmp_folder: Path, target: Path) -> None:
    """Rename a temporary folder to `target` so that readers find it, and sync the rename to disk.

    The files in the folder must be complete and already synced.

    Raises:
        FileExistsError: If `target` exists and is not an empty folder.
        OSError: If the folder cannot be synced or renamed. It then keeps its temporary name.
    """
    sync(tmp_folder)
    # An interrupted removal may have left an empty folder.
    with suppress(OSError):
        target.rmdir()
    if os.path.lexists(target):
        raise FileExistsError(f"{target} exists already")
    tmp_folder.rename(target)
    try:
        sync(target.parent)  # otherwise a power failure may undo the rename
    except OSError as error:
        logging.getLogger(LOGGER_NAME).warning(
            f"{target} is complete, but may be lost in a power failure, because fsync failed: "
            f"{error}"
        )


def sync(path: Path) -> None:
    """Flush a file or folder to disk so that it survives a power failure.

    For a folder, this flushes the names of its files but not their content. After renaming a file,
    sync its folder as well.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def encode_manifest(body: Manifest) -> bytes:
    """Encode a manifest as indented JSON and append the key "checksum", which covers all others."""
    content = json.dumps(body, separators=(",", ":")).encode()
    sealed = {**body, "checksum": xxhash.xxh3_128_hexdigest(content)}
    return (json.dumps(sealed, indent=1) + "\n").encode()


def read_manifest(folder: Path, name: str = MANIFEST) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Args:
        folder: The step folder.
        name: Name of the manifest, which is different while the checkpoint is being removed.

    Raises:
        Damage: If the manifest is missing or altered, or lists files outside the folder.
        CheckpointError: If the manifest is currently unreadable or has a newer format.
    """
    with open_file(folder / name) as file:
        return parse_manifest(file.read(), folder / name)


def parse_manifest(content: bytes, path: object) -> Manifest:
    """Check and decode the content of a manifest, and replace old hook names in it.

    Args:
        content: Content of the manifest file.
        path: Path or URL of the file, for error messages.

    Raises:
        Damage: If the manifest is altered or lists files outside the folder.
        CheckpointError: If the manifest has a newer format.
    """
    body = _decode_manifest(content)
    if body is None:
        raise Damage(f"{MANIFEST}: altered or truncated ({len(content)} bytes)")
    if body["format"] > FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: format {body['format']} is unknown to this version of titanlite. "
            f"It reads formats up to {FORMAT_VERSION}; upgrade titanlite."
        )
    for name in body["files"]:
        if Path(name).name != name or name == "..":
            raise Damage(f"{MANIFEST}: files outside of the folder")

    # Replace hook names from earlier titanlite versions. For example, "Ema" becomes "ema".
    hook_states = body["info"]["train_state"].get("hooks", {})
    for old_name, new_name in OLD_HOOK_NAMES.items():
        if old_name in hook_states:
            hook_states[new_name] = hook_states.pop(old_name)
    return body


def _decode_manifest(content: bytes) -> Manifest | None:
    """Parse a manifest and verify its checksum.

    Returns:
        The manifest without the checksum, or None if it is altered or incomplete.
    """
    try:
        body = json.loads(content)
        # Encoding the other keys recomputes the checksum.
        del body["checksum"]
        is_intact = content == encode_manifest(body)
        return body if is_intact and _has_required_keys(body) else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None  # not JSON, or JSON with a different structure


def _has_required_keys(body: Manifest) -> bool:
    """Return whether a manifest has all keys that other functions read from it."""
    has_entries = all(entry.keys() >= {"size", "xxh3_128"} for entry in body["files"].values())
    has_info = body["info"].keys() >= {"job", "architecture", "train_state"}
    return has_entries and has_info and body.keys() >= {"format", "step"}


def get_run_id(manifest: Manifest) -> str | None:
    """Return the ID of the run that saved a checkpoint, or None if the manifest has no run ID.

    titanlite 0.1 checkpoints, imported weights and averages of checkpoints have no run ID.
    """
    return manifest["info"]["train_state"].get("run")


def holds_run_state(manifest: Manifest) -> bool:
    """Return whether a checkpoint was saved by a training run, not by an import or averaging.

    The manifests of imported weights and averages of checkpoints record an "origin".
    """
    return "origin" not in manifest["info"]


def belongs_to_run(manifest: Manifest, run: str | None) -> bool:
    """Return whether a checkpoint belongs to a run, so that the run may remove it.

    titanlite 0.1 checkpoints have no run ID and count as belonging to every run.

    Args:
        manifest: Manifest of the checkpoint.
        run: ID of the run. If None (unknown), only checkpoints without a run ID belong to it.
    """
    return holds_run_state(manifest) and get_run_id(manifest) in (None, run)


def is_titanlite_manifest(raw: bytes) -> bool:
    """Return whether a manifest was written by titanlite, even if it is damaged.

    Other programs may use the same file name.

    Args:
        raw: Content of the manifest file.
    """
    return b'"xxh3_128"' in raw


def is_from_titanlite(folder: Path) -> bool:
    """Return whether the checkpoint in a folder was written by titanlite.

    Recognize it even if its manifest is damaged or missing. Other programs may use the same file
    names.
    """
    manifest = folder / MANIFEST
    if manifest.is_file() and is_titanlite_manifest(manifest.read_bytes()):
        return True
    # Only titanlite adds checksums to the DCP index.
    index = folder / INDEX
    return index.is_file() and b"xxh3_128" in index.read_bytes()


def find_foreign_export(folder: Path) -> Path | None:
    """Return the folder `final_hf` if it exists but was not written by titanlite, or else None.

    Runs export their model to this folder, but must not replace it if another program wrote it.

    Args:
        folder: Folder that contains the checkpoint folder of the run.
    """
    path = folder / "final_hf"
    is_foreign = os.path.lexists(path) and not (path / EXPORT_MARKER).is_file()
    return path if is_foreign else None


def get_validation_loss(manifest: Manifest) -> float:
    """Return the validation loss of the weights in a checkpoint.

    If the run did not validate at the step of the checkpoint, return infinity.
    """
    state = manifest["info"]["train_state"]
    best = state.get("hooks", {}).get(BEST_CHECKPOINT, {})
    if best.get("step") == manifest["step"]:
        return best["loss"]
    return state.get("validation_loss", math.inf)  # titanlite 0.2 stored it here


def select_outdated(steps: list[int], config: schema.Checkpoint) -> list[int]:
    """Return the steps whose checkpoints are outdated and can be removed.

    These are all steps except the last `keep_latest_k` steps and multiples of `keep_every_n_steps`.
    If `keep_latest_k` is 0, no checkpoint is outdated.

    Args:
        steps: Steps of all checkpoints, in ascending order.
        config: Section [checkpoint] of the job.
    """
    older_steps = steps[: -config.keep_latest_k] if config.keep_latest_k else []
    interval = config.keep_every_n_steps
    return [step for step in older_steps if not interval or step % interval != 0]


def check_checkpoint(
    path: Path, *, skip_tensor_checksums: bool = False, rank: int = 0, num_ranks: int = 1
) -> Manifest:
    """Verify the files of a checkpoint against its manifest and return the manifest.

    Several ranks can share the work. For example, rank 1 of 4 checks files 1, 5, 9, ...

    Args:
        path: The step folder.
        skip_tensor_checksums: Do not verify checksums that loading the tensors verifies anyway.
            Set this if you load the tensors next or do not need them.
        rank: Rank that calls this function.
        num_ranks: Number of ranks that share the work.

    Raises:
        Damage: If the manifest is altered or belongs to another step, or if a file is missing or
            has the wrong size or checksum.
        CheckpointError: If a file is currently unreadable, or if the manifest has a newer format.
            The content may be intact.
    """
    manifest = read_manifest(path)
    if manifest["step"] != get_step(path):
        raise Damage(f"{MANIFEST}: belongs to step {manifest['step']}")

    names_for_this_rank = sorted(manifest["files"])[rank::num_ranks]
    for name in names_for_this_rank:
        entry = manifest["files"][name]
        only_size = skip_tensor_checksums and _is_verified_on_load(name, entry)
        _check_file(path, name, entry, only_size=only_size)
    return manifest


def _is_verified_on_load(name: str, entry: Entry) -> bool:
    """Return whether loading the tensors also verifies the checksums of a file.

    This is the case for the index and for files in which each tensor has a checksum.
    """
    return name == INDEX or entry.get("chunk_checksums", False)


def _check_file(folder: Path, name: str, entry: Entry, *, only_size: bool) -> None:
    """Check the size of a file and, unless `only_size` is set, its checksum.

    Raises:
        Damage: If the file is missing or has the wrong size or checksum.
        CheckpointError: If the file is currently unreadable.
    """
    with open_file(folder / name) as file:
        size = os.fstat(file.fileno()).st_size
        if size != entry["size"]:
            raise Damage(f"{name}: {size} bytes instead of {entry['size']}")
        if only_size:
            return
        checksum = hashlib.file_digest(file, xxhash.xxh3_128)
    if checksum.hexdigest() != entry["xxh3_128"]:
        raise Damage(f"{name}: checksum differs ({size} bytes)")


def remove_unfinished(folder: Path, path_hash: str, log: Callable[[str], None]) -> None:
    """Delete the temporary files and folders that interrupted saves left in a folder.

    Failed deletions, for example because a file is open on another node, are only logged.

    Args:
        folder: The folder to clean up.
        path_hash: Hash of the checkpoint folder path. The names of this run's temporary files
            contain it; other temporary files are kept.
        log: Called with a one-line message for each temporary file or folder.
    """
    for path in folder.glob(f"{TMP_PREFIX}*{path_hash}*"):
        try:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
            log(f"Removed the unfinished {path.name}")
        except OSError as error:
            log(f"Could not remove the unfinished {path.name}: {error}")


def finish_removals(folder: Path, log: Callable[[str], None]) -> None:
    """Complete interrupted removals of checkpoints in a folder.

    Args:
        folder: Parent of the step folders.
        log: Called with a one-line message for each partly removed checkpoint.
    """
    for path in _list_half_removed(folder):
        try:
            _remove_listed_files(path)
            log(f"Removed the unfinished {path.name}")
        except (OSError, CheckpointError) as error:
            log(f"Could not remove the unfinished {path.name}: {error}")


def set_aside(path: Path, reason: str = "damaged") -> Path:
    """Rename a step folder so that readers ignore it, for example to "step-00000100.damaged".

    Args:
        path: The step folder.
        reason: Suffix of the new name. If the new name already exists, a number is appended.

    Returns:
        The new path.
    """
    target = path.with_name(f"{path.name}.{reason}")
    count = 1
    while target.exists():
        count += 1
        target = path.with_name(f"{path.name}.{reason}-{count}")
    path.rename(target)
    return target


def replace_link(link: Path, target: Path) -> None:
    """Create a relative symbolic link to a checkpoint, or atomically replace an existing link."""
    new_link = link.with_name(f".{link.name}.new")
    if new_link.is_symlink():  # left by a killed process
        new_link.unlink()
    new_link.symlink_to(os.path.relpath(target, link.parent))
    new_link.replace(link)


def remove_checkpoint(path: Path) -> None:
    """Delete the files of a checkpoint, and then its folder if it is empty.

    First rename the manifest, so that readers ignore the checkpoint while its files are being
    deleted. If the removal is interrupted, `finish_removals` completes it.
    """
    read_manifest(path)  # raises before the rename if the manifest is damaged
    (path / MANIFEST).rename(path / INCOMPLETE)
    _remove_listed_files(path)


def _remove_listed_files(path: Path) -> None:
    """Delete the files of a checkpoint, its renamed manifest, and the folder if it is then empty.

    Other files, which the manifest does not list, are kept.
    """
    for name in read_manifest(path, INCOMPLETE)["files"]:
        (path / name).unlink(missing_ok=True)
    (path / INCOMPLETE).unlink()
    with suppress(OSError):  # not empty, because it holds files that titanlite did not write
        path.rmdir()


@dataclass
class CheckpointContext:
    """The checkpoint folder of a run and everything needed to save to it and load from it.

    Attributes:
        config: Section [checkpoint] of the job.
        folder: Parent of the step folders. All nodes must share it.
        live: Model, optimizer and hooks in memory.
        ranks: The ranks of the run.
        log: Called with an event or a one-line message, possibly from other threads.
        job: The resolved job as a JSON value. Saves store it in the manifest. On resume, it is
            compared with the stored job.
        token: Part of the names of temporary files, set by `prepare_folder`. It is the same on all
            ranks and differs each time the run starts.
    """

    config: schema.Checkpoint
    folder: Path
    live: LiveState
    ranks: RankGroup
    log: Callable[[str | Event], None]
    job: dict[str, Any] | None = None
    token: str = ""

    def prepare_folder(self) -> None:
        """Create the checkpoint folder and check that all nodes share it.

        Also remove the leftovers of interrupted saves and removals. Call this on all ranks before
        the first save.

        Raises:
            UserError: On all ranks, if the folder is not writable or not shared by all nodes.
        """
        # Rank 0 creates a probe file. On network storage, it may take seconds until other nodes
        # see the file.
        self.token = self.ranks.run_on_rank0(self._clean_up_and_create_probe)
        probe = self.folder / f"{TMP_PREFIX}{self.token}"
        deadline = time.monotonic() + 10
        while not probe.exists() and time.monotonic() < deadline:
            time.sleep(0.5)

        is_visible_on_ranks = self.ranks.gather(probe.exists())
        if not all(is_visible_on_ranks):
            raise UserError(
                f"{self.folder} is not the same folder on all nodes. "
                "Put it on storage that they share."
            )
        self.ranks.run_on_rank0(probe.unlink)

    def check_free_space(self, size: int) -> None:
        """Check that the disk has enough free space for a checkpoint.

        All ranks call this together, before training starts.

        Args:
            size: Estimated size of a checkpoint in bytes.

        Raises:
            UserError: On all ranks, if there is not enough free space.
        """
        free = self.ranks.run_on_rank0(lambda: shutil.disk_usage(self.folder).free)
        if free < size:
            raise UserError(
                f"{self.folder}: a checkpoint takes about {size / 1e9:.2f} GB, {free / 1e9:.2f} GB "
                "are free. Free some space, or choose another checkpoint.folder."
            )

    def _clean_up_and_create_probe(self) -> str:
        """Create and clean up the checkpoint folder, then create an empty probe file in it.

        Call this on rank 0 only. The other ranks check that they see the probe, which shows that
        all nodes share the folder.

        Returns:
            A token for the names of the probe and all other temporary files, such as
            "2d06800538d394c2-9f86d081". Its first part identifies the checkpoint folder, so that
            the next start recognizes leftover temporary files. Its second part is random.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        path_hash = xxhash.xxh3_64_hexdigest(os.fsencode(self.folder.resolve()))
        self._remove_leftovers(path_hash)

        token = f"{path_hash}-{secrets.token_hex(4)}"
        probe = self.folder / f"{TMP_PREFIX}{token}"
        probe.touch(exist_ok=False)
        return token

    def _remove_leftovers(self, path_hash: str) -> None:
        """Remove the leftovers of interrupted saves, exports and removals of this run.

        Besides the checkpoint folder, clean up the output folder and its subfolder `final`, because
        exports and final weights are written there.

        Args:
            path_hash: Hash of the checkpoint folder path. It is part of the name of each temporary
                file and folder of this run.
        """
        output_folder = self.folder.parent
        for folder in (self.folder, output_folder / "final", output_folder):
            remove_unfinished(folder, path_hash, self.log)
        finish_removals(self.folder, self.log)
