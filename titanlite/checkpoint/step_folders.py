"""What a checkpoint is on disk: how it is written, described, recognised, checked, kept, set aside and removed.

Invariant: a folder `step-00000100` exists whole or not at all. It is written under the name `.tmp-...`, described by
a manifest with the size and the checksum of every file, flushed to the disk, and published by one rename. Nothing is
ever written into a published folder. Damage is one kind of error; a file that cannot be read now is another. This
needs no torch, because it knows files only.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import re
import shutil
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from titanlite.config.errors import CheckpointError, Damage, UserError
from titanlite.config.files import MANIFEST, STEP_FOLDER

UNFINISHED = ".tmp-"
FORMAT_VERSION = 2  # a run of format 1 had another learning-rate schedule

_SET_ASIDE = re.compile(rf"{STEP_FOLDER.pattern}\.damaged(-\d+)?")
_CHUNK = 1 << 18  # bytes read at a time for a checksum: so many are still in the cache of a core when they are hashed

Entry = dict[str, Any]
"""What the manifest says of a file: {"size": bytes, "xxh3_128": hexadecimal checksum}."""


class HashingFile(io.BufferedWriter):
    """A new file, which takes the checksum of what is written to it from front to back."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "xb"), 1 << 20)
        self.error: OSError | None = None  # of the disk; torch.save raises another one in its place
        self._hash = xxhash.xxh3_128()
        self._size = 0

    def write(self, data: Any) -> int:
        self._hash.update(data)
        try:
            written = super().write(data)
        except OSError as error:
            self.error = error
            raise
        self._size += written
        return written

    def fileno(self) -> int:
        self.flush()  # because DCP syncs this descriptor without a flush before
        return super().fileno()

    def entry(self) -> Entry:
        """For the manifest, once all is written."""
        return {"size": self._size, "xxh3_128": self._hash.hexdigest()}


@contextmanager
def open_file(path: Path) -> Iterator[io.BufferedReader]:
    """Open a file of a checkpoint for reading: a regular file of its folder, and nothing else.

    Raises:
        Damage: there is none, or it is no regular file (a link, a pipe, a folder, a device).
        CheckpointError: it cannot be read now, also while it is open.
    """
    try:
        if not stat.S_ISREG(mode := os.lstat(path).st_mode):
            raise Damage(f"{path.name}: {'a symbolic link' if stat.S_ISLNK(mode) else 'not a regular file'}")
        # O_NONBLOCK: a pipe that takes the file's place at this moment does not make open wait.
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            yield file
    except FileNotFoundError:
        raise Damage(f"{path.name}: missing") from None
    except OSError as error:
        remedy = "That need not be damage, and nothing is renamed. Mend it, or move this checkpoint away."
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {error.strerror}. {remedy}") from None


def step_name(step: int) -> str:
    """The published name of a step's folder; the zeros make names sort as numbers do."""
    return f"step-{step:08d}"


def unfinished_name(step: int, token: str) -> str:
    """The name of a step's folder while it is written. `token` makes it fresh; all ranks must use the same one."""
    return f"{UNFINISHED}{step_name(step)}-{token}"


def step_of(path: Path) -> int | None:
    """The step of a published folder, or None for any other name."""
    match = STEP_FOLDER.fullmatch(path.name)
    return int(match.group(1)) if match else None


def list_checkpoints(folder: Path) -> list[Path]:
    """Published checkpoints by rising step, good or damaged; unfinished, set aside and foreign names are left out."""
    found = [(step, path) for path in _listed(folder) if (step := step_of(path)) is not None and path.is_dir()]
    return [path for _, path in sorted(found)]


def list_set_aside(folder: Path) -> list[Path]:
    """Folders that `set_aside` renamed because they were damaged."""
    return [path for path in _listed(folder) if _SET_ASIDE.fullmatch(path.name)]


def list_unfinished(folder: Path) -> list[Path]:
    """What saves and removals that were cut short, or are under way, left behind."""
    return [path for path in _listed(folder) if path.name.startswith(UNFINISHED)]


def _listed(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def expendable(folder: Path, keep_latest_k: int, keep_every_n_steps: int) -> list[Path]:
    """Checkpoints that retention does not keep. A folder without a manifest is none of a run's, and is not counted."""
    complete = [path for path in list_checkpoints(folder) if (path / MANIFEST).is_file()]
    old = complete[:-keep_latest_k] if keep_latest_k else []
    return [path for path in old if not keep_every_n_steps or (step_of(path) or 0) % keep_every_n_steps]


def publish(unfinished: Path, step: int, files: dict[str, Entry], info: dict[str, Any]) -> Path:
    """Turn a folder whose files are written and flushed into the checkpoint of a step, which appears beside it.

    Args:
        files: every file in it.
        info: JSON value kept in the manifest.

    Raises:
        FileExistsError: the step was published before.
        OSError: a file is missing or shorter than what its writer reported (a folder that the nodes do not share),
            or the disk refuses.
    """
    for name, entry in files.items():
        path = unfinished / name
        if not path.is_file() or path.stat().st_size != entry["size"]:
            raise OSError(f"{path} is not complete as seen from the first rank; do all nodes share this folder?")
    write_manifest(unfinished, step, dict(sorted(files.items())), info)
    flush(unfinished)
    target = unfinished.parent / step_name(step)
    if target.exists():  # a rename would replace an empty folder silently
        raise FileExistsError(f"{target} exists already")
    unfinished.rename(target)
    flush(target.parent)
    return target


def encode_manifest(body: dict[str, Any]) -> bytes:
    """The bytes of a manifest: indented JSON, with the checksum of the rest as its last key."""
    checksum = xxhash.xxh3_128_hexdigest(json.dumps(body, separators=(",", ":")).encode())
    return (json.dumps({**body, "checksum": checksum}, indent=1) + "\n").encode()


def write_manifest(folder: Path, step: int, files: dict[str, Entry], info: dict[str, Any]) -> None:
    """Write and flush the manifest of a folder."""
    body = {"format": FORMAT_VERSION, "step": step, "files": files, "info": info}
    (folder / MANIFEST).write_bytes(encode_manifest(body))
    flush(folder / MANIFEST)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a published checkpoint: {"format", "step", "files", "info"}.

    Raises:
        Damage: it is missing or altered, names files outside of the folder, or has a place in the data that its run
            has not come to.
        CheckpointError: it cannot be read now, or is of a format that this version does not know.
    """
    with open_file(folder / MANIFEST) as file:
        raw = file.read()
    try:
        body = json.loads(raw)
        body.pop("checksum")
        intact = raw == encode_manifest(body)  # the bytes, not only the values: no flipped bit goes unnoticed
        version, inside = body["format"], all(Path(name).name == name for name in body["files"])
        reached = _is_reached(body["info"]["train_state"])
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        version, intact, inside, reached = 0, False, False, False
    if intact and version > FORMAT_VERSION:
        known = f"is unknown to this version, which reads up to {FORMAT_VERSION}. Use the titanlite that wrote it."
        raise CheckpointError(f"{folder / MANIFEST}: format {version} {known}")
    if not intact:
        raise Damage(f"{MANIFEST}: altered or truncated ({len(raw)} bytes)")
    if not inside or not reached:
        what = "a place in the data that no run comes to" if inside else "files outside of the folder"
        raise Damage(f"{MANIFEST}: {what}")
    return body


def _is_reached(state: dict[str, Any]) -> bool:
    """Whether the run can have read so many rows: it has trained on at least one token of each."""
    place = (state.get("data") or {}).get("schedule")
    return place is None or (place["step"] <= state["step"] and sum(place["rows"]) <= state["tokens"])


def verify_folder(path: Path, share: Callable[[list[str]], list[str]] = lambda names: names) -> list[str]:
    """Check a published checkpoint against its manifest.

    Args:
        share: picks the file names that this caller reads, so that several ranks can split the work.

    Returns:
        One line for each damage found: an altered manifest, a file missing, short, long, or with another checksum.
        Empty when the checkpoint (or this caller's share of it) is good.

    Raises:
        CheckpointError: it cannot be read, which says nothing about what it holds: permission, storage away for a
            moment, a newer format.
    """
    try:
        manifest = read_manifest(path)
        if manifest["step"] != step_of(path):
            raise Damage(f"{MANIFEST}: belongs to step {manifest['step']}")
    except Damage as damage:
        return [str(damage)]
    damaged = []
    for name in share(sorted(manifest["files"])):
        try:
            _verify_file(path / name, manifest["files"][name])
        except Damage as damage:
            damaged.append(str(damage))
    return damaged


def check_folder(path: Path, share: Callable[[list[str]], list[str]] = lambda names: names) -> None:
    """`verify_folder`, which raises Damage if it finds any."""
    if lines := verify_folder(path, share):
        raise Damage("; ".join(lines))


def _verify_file(path: Path, expected: Entry) -> None:
    """Raises Damage: it is missing, or not what was written."""
    checksum = xxhash.xxh3_128()
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size != expected["size"]:
            raise Damage(f"{path.name}: {size} bytes instead of {expected['size']}")
        buffer = memoryview(bytearray(min(_CHUNK, size)))
        while count := file.readinto(buffer):
            checksum.update(buffer[:count])
    if checksum.hexdigest() != expected["xxh3_128"]:
        raise Damage(f"{path.name}: checksum differs ({size} bytes)")


def lock(folder: Path, patience: float, log: Callable[[str], None]) -> int | None:
    """Keep other runs out of a part of an output folder, such as its checkpoints, until this process ends or closes
    the returned descriptor.

    Processes that this one starts do not inherit the lock. NFS shows it to other nodes.

    Args:
        patience: seconds to wait for another run, which may be saving for the last time.

    Returns:
        None, with a warning, where the file system has no locks.

    Raises:
        UserError: another run is still there.
    """
    descriptor = os.open(_lock_file(folder), os.O_RDWR | os.O_CREAT, 0o666)
    deadline = None
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                log(f"{folder}: a second run in it would go unnoticed, its file system has no locks: {error.strerror}")
                os.close(descriptor)
                return None
        used = f"{folder.parent}: another run is using it"
        if deadline is None:
            deadline = time.monotonic() + patience
            log(f"{used}; waiting up to {patience:.0f} s for its end")
        if time.monotonic() > deadline:
            raise UserError(f"{used}. Stop that one, or choose another job.dump_folder.")
        time.sleep(0.1)


def is_locked(folder: Path) -> bool | None:
    """Whether another process on a machine that shares the folder holds its `lock`. None if that cannot be known.

    It must not be asked by the process that holds the lock, because closing the file would release it.
    """
    if sys.platform != "linux":
        return None
    wanted = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # struct flock
    try:
        with open(os.open(_lock_file(folder), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            return struct.unpack_from("h", fcntl.fcntl(file, fcntl.F_GETLK, wanted))[0] != fcntl.F_UNLCK
    except OSError:
        return None


def _lock_file(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


def remove_unfinished(folder: Path, log: Callable[[str], None], prefix: str = UNFINISHED) -> list[str]:
    """Delete what `list_unfinished` finds, if its name begins with `prefix`.

    What cannot be deleted, such as a file that is open on another node, disturbs nobody, because names are never used
    twice; `log` is told of it.

    Returns:
        The names that are gone.
    """
    gone = []
    for path in (path for path in list_unfinished(folder) if path.name.startswith(prefix)):
        try:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            gone.append(path.name)
        except OSError as error:
            log(f"could not remove the unfinished {path.name}: {error}")
    return gone


def set_aside(path: Path, reason: str = "damaged") -> Path:
    """Rename a checkpoint so that no reader finds it, and keep it for a look."""
    target, count = path.with_name(f"{path.name}.{reason}"), 1
    while target.exists():
        count += 1
        target = path.with_name(f"{path.name}.{reason}-{count}")
    path.rename(target)
    return target


def remove(path: Path) -> None:
    """Delete a published checkpoint. It is renamed first, so that a removal that is cut short leaves no partial one."""
    doomed = path.with_name(f"{UNFINISHED}{path.name}-removed")
    path.rename(doomed)
    shutil.rmtree(doomed)


def flush(path: Path) -> None:
    """Make a file durable, or the names in a folder: a rename is on the disk only after its folder was synced."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def folder_size(path: Path) -> int:
    """Bytes of all files of a checkpoint."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
