"""What a checkpoint is on disk: how it is written, described, recognised, checked, set aside and removed.

Invariant: a folder `step-00000100` exists whole or not at all. It is written under the name `.tmp-...`, described by
a manifest with the size and the checksum of every file, flushed to the disk, and published by one rename. Nothing is
ever written into a published folder. Damage is one kind of error; a file that cannot be read now is another. This
needs no torch, because it knows files only.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import json
import math
import os
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

from titanlite.config import schema
from titanlite.config.errors import CheckpointError, Damage, UserError
from titanlite.config.files import MANIFEST, STEP_FOLDER

UNFINISHED = ".tmp-"
BEST = "best"  # the link to the checkpoint with the lowest validation loss
LOCK_PATIENCE = 120  # seconds; the workers of a launcher that was killed save before they end
FORMAT_VERSION = 2  # a run of format 1 had another learning-rate schedule

Entry = dict[str, Any]
"""What the manifest says of a file: {"size": bytes, "xxh3_128": hexadecimal checksum}."""


class HashingFile(io.BufferedWriter):
    """A new file, which takes the checksum of what is written to it from front to back."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "xb"), 1 << 20)
        self.error: OSError | None = None  # of the disk; torch.save raises another one in its place
        self._hash, self._size = xxhash.xxh3_128(), 0

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
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise Damage(f"{path.name}: not a regular file")
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


def step_of(path: Path) -> int | None:
    """The step of a published folder, or None for any other name."""
    match = STEP_FOLDER.fullmatch(path.name)
    return int(match.group(1)) if match else None


def list_checkpoints(*folders: Path) -> list[Path]:
    """Published checkpoints by rising step, good or damaged; unfinished, set aside and foreign names are left out."""
    paths = (path for folder in folders for path in folder.glob("step-*"))
    found = [(step, path) for path in paths if (step := step_of(path)) is not None and path.is_dir()]
    return [path for _, path in sorted(found)]


def list_set_aside(folder: Path) -> list[Path]:
    """Folders that `set_aside` renamed because they were damaged."""
    return sorted(folder.glob("step-*.damaged*"))


def list_unfinished(folder: Path, prefix: str = UNFINISHED) -> list[Path]:
    """What saves and removals that were cut short, or are under way, left behind."""
    return sorted(folder.glob(f"{prefix}*"))


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
    body = {"format": FORMAT_VERSION, "step": step, "files": dict(sorted(files.items())), "info": info}
    (unfinished / MANIFEST).write_bytes(encode_manifest(body))
    flush(unfinished / MANIFEST)
    appear(unfinished, target := unfinished.with_name(step_name(step)))
    return target


def appear(unfinished: Path, target: Path) -> None:
    """Give a folder whose files are flushed its name. Raises FileExistsError: that is taken."""
    flush(unfinished)
    if target.exists():  # a rename would replace an empty folder silently
        raise FileExistsError(f"{target} exists already")
    unfinished.rename(target)
    flush(target.parent)


def encode_manifest(body: dict[str, Any]) -> bytes:
    """The bytes of a manifest: indented JSON, with the checksum of the rest as its last key."""
    checksum = xxhash.xxh3_128_hexdigest(json.dumps(body, separators=(",", ":")).encode())
    return (json.dumps({**body, "checksum": checksum}, indent=1) + "\n").encode()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a published checkpoint: {"format", "step", "files", "info"}.

    Raises:
        Damage: it is missing or altered, or names files outside of the folder.
        CheckpointError: it cannot be read now, or is of a format that this version does not know.
    """
    with open_file(folder / MANIFEST) as file:
        return parse_manifest(file.read(), folder / MANIFEST)


def parse_manifest(raw: bytes, place: object) -> dict[str, Any]:
    """What `read_manifest` makes of the bytes at `place`, and raises."""
    try:
        body = json.loads(raw)
        del body["checksum"]
        intact = raw == encode_manifest(body)  # the bytes, not only the values: no flipped bit goes unnoticed
        intact &= {*body, *body["info"]} >= {"format", "step", "job", "architecture", "train_state"}
        intact &= all({*each} >= {"size", "xxh3_128"} for each in body["files"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        intact = False
    if not intact:
        raise Damage(f"{MANIFEST}: altered or truncated ({len(raw)} bytes)")
    if body["format"] > FORMAT_VERSION:
        known = f"is unknown to this version, which reads up to {FORMAT_VERSION}. Use the titanlite that wrote it."
        raise CheckpointError(f"{place}: format {body['format']} {known}")
    if any(Path(name).name != name or name == ".." for name in body["files"]):
        raise Damage(f"{MANIFEST}: files outside of the folder")
    return body


def validation_loss(manifest: dict[str, Any]) -> float:
    """That of the weights of a checkpoint; infinite where it is not known."""
    state = manifest["info"]["train_state"]
    scored = state.get("hooks", {}).get("BestCheckpoint", {})
    ours = scored.get("step") == manifest["step"]
    return scored["loss"] if ours else state.get("validation_loss", math.inf)  # so it was in version 0.2


def outdated(steps: list[int], config: schema.Checkpoint) -> list[int]:
    """Those of rising steps that `config` does not ask to keep, the best one apart."""
    every = config.keep_every_n_steps
    older = steps[: -config.keep_latest_k] if config.keep_latest_k else []
    return [step for step in older if not every or step % every]


def check_folder(path: Path, share: Callable[[list[str]], list[str]] = lambda names: names) -> dict[str, Any]:
    """Compare a published checkpoint with its manifest, byte by byte, and return the manifest.

    Args:
        share: picks the file names that this caller reads, so that several ranks can split the work.

    Raises:
        Damage: an altered manifest, or a file that is missing, short, long, or has another checksum. The first one is
            named.
        CheckpointError: it cannot be read, which says nothing about what it holds: permission, storage away for a
            moment, a newer format.
    """
    manifest = read_manifest(path)
    if manifest["step"] != step_of(path):
        raise Damage(f"{MANIFEST}: belongs to step {manifest['step']}")
    for name in share(sorted(manifest["files"])):
        expected = manifest["files"][name]
        with open_file(path / name) as file:
            size = os.fstat(file.fileno()).st_size
            if size != expected["size"]:
                raise Damage(f"{name}: {size} bytes instead of {expected['size']}")
            checksum = hashlib.file_digest(file, xxhash.xxh3_128)
        if checksum.hexdigest() != expected["xxh3_128"]:
            raise Damage(f"{name}: checksum differs ({size} bytes)")
    return manifest


def lock(folder: Path, patience: float, log: Callable[[str], None]) -> int | None:
    """Keep other runs out of a part of an output folder, such as its checkpoints, until this process ends or closes
    the returned descriptor. The folder is made. The lock's file says whose it is.

    Processes that this one starts do not inherit the lock. NFS shows it to other nodes.

    Args:
        patience: seconds to wait for another run, which may be saving for the last time.

    Returns:
        None, with a warning, where the file system has no locks.

    Raises:
        UserError: another run is still there.
    """
    path, said, deadline = folder.with_name(f".{folder.name}.lock"), False, time.monotonic() + patience
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_nlink:  # else the other run has removed its folder
                with suppress(OSError):  # a full disk
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return descriptor
            os.close(descriptor)
            continue
        except OSError as error:
            user = os.pread(descriptor, 300, 0).decode(errors="replace") or "another run"
            os.close(descriptor)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                log(f"{folder}: a second run in it would go unnoticed, its file system has no locks: {error.strerror}")
                return None
        if time.monotonic() > deadline:
            raise UserError(f"{folder.parent}: {user} is using it. Stop that one, or choose another job.dump_folder.")
        if not said:
            log(f"{folder.parent}: {user} is using it; waiting up to {patience:.0f} s for its end")
        said = True
        time.sleep(0.1)


def remove_unfinished(folder: Path, log: Callable[[str], None], prefix: str = UNFINISHED) -> None:
    """Delete what `list_unfinished` finds, and say so.

    What cannot be deleted, such as a file that is open on another node, disturbs nobody, because names are never used
    twice.
    """
    for path in list_unfinished(folder, prefix):
        try:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            log(f"removed the unfinished {path.name}")
        except OSError as error:
            log(f"could not remove the unfinished {path.name}: {error}")


def set_aside(path: Path, reason: str = "damaged") -> Path:
    """Rename a checkpoint so that no reader finds it, and keep it for a look."""
    target, count = path.with_name(f"{path.name}.{reason}"), 1
    while target.exists():
        count += 1
        target = path.with_name(f"{path.name}.{reason}-{count}")
    path.rename(target)
    return target


def point(link: Path, target: Path) -> None:
    """Let a link lead to a checkpoint, by one rename."""
    new = link.with_name(f".{link.name}.new")
    new.unlink(missing_ok=True)
    new.symlink_to(os.path.relpath(target, link.parent))
    new.replace(link)


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
