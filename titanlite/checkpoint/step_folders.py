"""What a checkpoint is on disk: how it is written, recognised, checked, set aside and removed.

Invariant: a folder `step-00000100` exists whole or not at all. It is written under the name `.tmp-...`, described by
a manifest with the size and the checksum of every file, flushed to the disk, and published by one rename. Nothing is
ever written into a published folder. This needs no torch, because it knows files only.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import xxhash

from titanlite.checkpoint.index import INDEX, file_sizes, read_index
from titanlite.checkpoint.manifest import read_manifest, write_manifest
from titanlite.checkpoint.open_files import open_file, shown, unreadable
from titanlite.config.errors import Damage, UserError
from titanlite.config.files import MANIFEST, STEP_FOLDER

UNFINISHED = ".tmp-"
PROBE = f"{UNFINISHED}probe-"

_SET_ASIDE = re.compile(rf"{STEP_FOLDER.pattern}\.damaged(-\d+)?")
_CHUNK = 1 << 18  # bytes read at a time for a checksum: so many are still in the cache of a core when they are hashed


@dataclass(frozen=True)
class FileDigest:
    """Name within the checkpoint, size in bytes and XXH3 128-bit checksum (hexadecimal) of one file."""

    name: str
    size: int
    xxh3_128: str


class HashingFile:
    """A binary file opened for writing, which takes the checksum of what passes through it.

    Append only: DCP and `torch.save` write their streams from front to back, so no byte is read again.
    """

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.error: OSError | None = None  # of the disk; torch.save raises another one in its place
        self._file: IO[bytes] = path.open("xb")
        self._hash = xxhash.xxh3_128()
        self._size = 0

    def write(self, data: Any) -> int:
        self._hash.update(data)
        try:
            written = self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self._size += written
        return written

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        self._file.flush()

    def fileno(self) -> int:
        self._file.flush()  # because DCP syncs this descriptor without a flush before
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()

    def digest(self) -> FileDigest:
        return FileDigest(self.name, self._size, self._hash.hexdigest())


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
    if not folder.is_dir():
        return []
    found = [(step, path) for path in folder.iterdir() if (step := step_of(path)) is not None and path.is_dir()]
    return [path for _, path in sorted(found)]


def list_set_aside(folder: Path) -> list[Path]:
    """Folders that `set_aside` renamed because they were damaged."""
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if _SET_ASIDE.fullmatch(path.name))


def publish(unfinished: Path, step: int, digests: list[FileDigest], info: dict[str, Any]) -> Path:
    """Turn a folder whose files are written and flushed into the checkpoint of a step.

    Args:
        unfinished: the temporary folder, beside which the checkpoint appears.
        digests: one for each file in it.
        info: JSON value kept in the manifest.

    Raises:
        FileExistsError: the step was published before.
        OSError: a file is missing or shorter than what its writer reported (a folder that the nodes do not share),
            or the disk refuses.
    """
    for digest in digests:
        path = unfinished / digest.name
        if not path.is_file() or path.stat().st_size != digest.size:
            raise OSError(f"{path} is not complete as seen from the first rank; do all nodes share this folder?")
    files = {d.name: {"size": d.size, "xxh3_128": d.xxh3_128} for d in sorted(digests, key=lambda d: d.name)}
    write_manifest(unfinished, step, files, info)
    flush_folder(unfinished)
    target = unfinished.parent / step_name(step)
    if target.exists():  # a rename would replace an empty folder silently
        raise FileExistsError(f"{target} exists already")
    unfinished.rename(target)
    flush_folder(target.parent)
    return target


def verify_folder(path: Path, share: Callable[[list[str]], list[str]] = lambda names: names) -> list[str]:
    """Check a published checkpoint against its manifest.

    Args:
        share: picks the file names that this caller reads, so that several ranks can split the work.

    Returns:
        One line for each damage found: a manifest or an index that is not as a run writes it, a file missing, short,
        long, or with another checksum. Empty when the checkpoint (or this caller's share of it) is good.

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
    for name in share(sorted(manifest["files"].keys() | {INDEX})):
        try:
            if name not in manifest["files"]:
                raise Damage(f"{MANIFEST}: does not list {INDEX}")
            _verify_file(path / name, manifest["files"][name])
            if name == INDEX:
                _compare_files(file_sizes(read_index(path)), manifest["files"])
        except Damage as damage:
            damaged.append(str(damage))
    return damaged


def check_folder(path: Path, share: Callable[[list[str]], list[str]] = lambda names: names) -> None:
    """`verify_folder`, which raises Damage if it finds any."""
    if lines := verify_folder(path, share):
        raise Damage("; ".join(lines))


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
    descriptor = os.open(folder.with_name(f".{folder.name}.lock"), os.O_RDWR | os.O_CREAT, 0o666)
    started = told = time.monotonic()
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                log(f"{folder}: a second run in it would go unnoticed, its file system has no locks: {error.strerror}")
                os.close(descriptor)
                return None
        if time.monotonic() - started > patience:
            raise UserError(
                f"{folder.parent}: another run is using it. Stop that one, or choose another job.dump_folder."
            )
        if told == started:
            log(f"{folder.parent}: another run is using it; waiting up to {patience:.0f} s for its end")
            told = time.monotonic()
        time.sleep(0.1)


def is_locked(folder: Path) -> bool | None:
    """Whether another process on a machine that shares the folder holds its `lock`. None if that cannot be known.

    It must not be asked by the process that holds the lock, because closing the file would release it.
    """
    path = folder.with_name(f".{folder.name}.lock")
    if sys.platform != "linux" or not path.is_file():
        return None
    layout = "hhqqi4x"  # struct flock: type, whence, start, length, process
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            wanted = struct.pack(layout, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            found = fcntl.fcntl(descriptor, fcntl.F_GETLK, wanted)
        finally:
            os.close(descriptor)
    except OSError:
        return None
    return struct.unpack(layout, found)[0] != fcntl.F_UNLCK


def list_unfinished(folder: Path) -> list[Path]:
    """What saves and removals that were cut short, or are under way, left behind."""
    return sorted(path for path in folder.iterdir() if path.name.startswith(UNFINISHED)) if folder.is_dir() else []


def remove_unfinished(folder: Path, prefix: str = UNFINISHED) -> tuple[list[str], list[str]]:
    """Delete what `list_unfinished` finds, if its name begins with `prefix`.

    Returns:
        The names of folders that are gone, and one line for what could not be deleted, such as a file that is open on
        another node. It disturbs nobody, because names are never used twice.
    """
    gone, kept = [], []
    for path in (path for path in list_unfinished(folder) if path.name.startswith(prefix)):
        try:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            if not path.name.startswith(PROBE):
                gone.append(path.name)
        except OSError as error:
            kept.append(f"could not remove the unfinished {path.name}: {error}")
    return gone, kept


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


def flush_folder(folder: Path) -> None:
    """Make the names in a folder durable: a rename is on the disk only after its folder was synced."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def folder_size(path: Path) -> int:
    """Bytes of all files of a checkpoint."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _compare_files(sizes: dict[str, int], files: dict[str, dict[str, Any]]) -> None:
    """Raises Damage: the files of the index are not those of the manifest."""
    listed = {name: entry["size"] for name, entry in files.items() if name != INDEX}
    for name in sorted(sizes.keys() | listed.keys()):
        found = [f"{size} bytes" if size else "nothing" for size in (sizes.get(name), listed.get(name))]
        if found[0] != found[1]:
            raise Damage(f"{INDEX}: {shown(name)} holds {found[0]} by the index, {found[1]} by the manifest")


def _verify_file(path: Path, expected: dict[str, Any]) -> None:
    """Raises Damage: it is missing, or not what was written."""
    checksum = xxhash.xxh3_128()
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        buffer = memoryview(bytearray(min(_CHUNK, size)))
        try:
            while size == expected["size"] and (count := file.readinto(buffer)):
                checksum.update(buffer[:count])
        except OSError as error:
            raise unreadable(path, error) from None
    if size != expected["size"]:
        raise Damage(f"{shown(path.name)}: {size} bytes instead of {expected['size']}")
    if checksum.hexdigest() != expected["xxh3_128"]:
        raise Damage(f"{shown(path.name)}: checksum differs ({size} bytes)")
