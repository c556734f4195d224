"""Read files from untrusted sources safely, and write files atomically.

Invariant: only regular files are opened, because reading a pipe can block forever. Reads are
limited in size. A file name that comes from the content of another file can never lead out of its
folder. Every problem with a file is reported as a UserError that names the file.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import tempfile
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, RootModel, ValidationError

from titanlite.config.errors import UserError
from titanlite.config.mistakes import explain_error, shorten

STEP_FOLDER = re.compile(r"step-(?P<step>\d{8,})")
"""Pattern for the name of a checkpoint folder, such as "step-00000100"."""
MANIFEST = "manifest.json"
"""Name of the file that makes a step folder a checkpoint. It is written last."""
INCOMPLETE = f"{MANIFEST}.incomplete"
"""Name of the manifest while the checkpoint is being removed, or copied to a mirror."""

AnyModel = TypeVar("AnyModel", bound=BaseModel)
exists = os.path.lexists


def check_regular(path: Path) -> None:
    """Check that `path` is a regular file, or a link to one.

    Raises:
        UserError: If it does not exist, or is a folder, a pipe or a device.
    """
    try:
        is_regular = stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError) as error:  # ValueError: the name contains NUL
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {path}: {reason}") from None
    if not is_regular:
        raise UserError(f"{path} must be a file, but is a folder, a pipe or a device.")


def read_file(path: Path, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes.

    Raises:
        UserError: If `path` is not a regular file, cannot be read, or is larger than `limit`.
    """
    check_regular(path)
    try:
        with open(path, "rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if len(content) > limit:
        raise UserError(f"{path} is larger than {limit:,} bytes, the limit for this kind of file.")
    return content


def find_write_problem(folder: Path) -> str | None:
    """Return the reason why a command cannot create files in `folder`, or None if it can.

    The reason is a sentence for the user, such as that the folder is not writable or is part of a
    checkpoint. If the folder does not exist, its nearest existing parent is checked.
    """
    parents = (folder, *folder.parents)
    existing_parent = next(parent for parent in parents if os.path.lexists(parent))
    checkpoint = _find_checkpoint_around(existing_parent)
    if checkpoint is not None:
        return f"{checkpoint} is a checkpoint, which must not change. Choose another folder."

    # Create a folder as a test, because permission bits do not show whether the disk is full, or
    # whether root may write to a network file system.
    try:
        temporary_folder = tempfile.mkdtemp(prefix=".titanlite-", dir=existing_parent)
        os.rmdir(temporary_folder)
    except OSError as error:
        return f"{existing_parent} is not writable: {error.strerror}. Choose another folder."
    return None


def _find_checkpoint_around(folder: Path) -> Path | None:
    """Return the checkpoint that contains `folder` or is `folder` itself, or None."""
    real_path = Path(os.path.realpath(folder))
    for parent in (real_path, *real_path.parents):
        if STEP_FOLDER.fullmatch(parent.name) and os.path.lexists(parent / MANIFEST):
            return parent
    return None


def make_folder(path: Path) -> Path:
    """Create the folder `path` and its parents for the output of a command, and return it.

    Raises:
        UserError: If `path` is a file or inside one, or is not writable.
    """
    problem = find_write_problem(path.absolute())
    if problem:
        raise UserError(f"cannot create {path}: {problem}")
    path.mkdir(parents=True, exist_ok=True)
    return path


def check_new_folder(folder: Path) -> None:
    """Check that the output folder of a command does not exist or contains only hidden files.

    A killed earlier run of the command may have left hidden files.

    Raises:
        UserError: If the folder contains other files.
    """
    if folder.is_dir() and any(not path.name.startswith(".") for path in folder.iterdir()):
        raise UserError(f"{folder} is not empty. Choose a new folder.")


def write_output(path: Path, content: bytes) -> None:
    """Write a file atomically. Create its folder if needed, and replace an existing file.

    Several processes may write the same file at the same time, such as the ranks of `titanlite
    prove`. The last write wins.

    Raises:
        UserError: If `path` exists but is not a regular file, or cannot be written.
    """
    if os.path.lexists(path):
        check_regular(path)
    make_folder(path.parent)
    try:
        write_atomically(path, content, suffix=f"{secrets.token_hex(4)}.unfinished")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}. Choose another path.") from None


def write_atomically(path: Path, content: bytes, suffix: str = "unfinished") -> None:
    """Write a file in an existing folder. Readers see either the old or the complete new content.

    Args:
        path: Path of the file.
        content: New content of the file.
        suffix: Suffix of the temporary file. It must be unique if several processes may write
            `path` at the same time.

    Raises:
        OSError: If the file cannot be written.
    """
    unfinished = path.with_name(f".{path.name}.{suffix}")
    try:
        unfinished.write_bytes(content)
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def parse_json(path: Path, content: bytes, model: type[AnyModel], kind: str = "") -> AnyModel:
    """Parse the content of a JSON file, and validate it with a pydantic model.

    Args:
        path: Path of the file, for error messages.
        content: Content of the file.
        model: Pydantic model of the content.
        kind: Expected kind of file for error messages, such as "a manifest".

    Raises:
        UserError: If the content is not JSON or does not fit `model`. The message lists up to ten
            mistakes.
    """
    try:
        return model.model_validate_json(content)
    except ValidationError as failure:
        expectation = f"not {kind}: " if kind else ""
        raise UserError(f"{path}: {expectation}{explain_error(model, failure)}") from None


def read_json_object(path: Path, limit: int) -> dict[str, Any]:
    """Read a file that contains one JSON object. The keys of the object are not validated.

    Raises:
        UserError: If the file cannot be read, has more than `limit` bytes, or is not a JSON object.
    """
    return parse_json(path, read_file(path, limit), RootModel[dict[str, Any]]).root


def find_file_inside(folder: Path, name: str) -> Path:
    """Return the path of the file called `name` in `folder`, and reject files outside of it.

    Use this if the name comes from an untrusted file. A file in a Hugging Face cache may be a link
    to the shared folder "blobs" of the cache.

    Raises:
        UserError: If `name` is not a plain file name, if it is a link that leads out of the folder,
            or if there is no such regular file.
    """
    if not _is_file_name(name):
        text = f"{shorten(repr(name))} is not the name of a file in this folder."
        raise UserError(f"{folder}: {text}")

    # Reject links that lead out of the folder.
    path = folder / name
    target = Path(os.path.realpath(path))
    if not _is_allowed_target(target, folder.resolve()):
        remedy = "Use the folder that contains the files, or copy them."
        raise UserError(f"{path} is a link to {target}, outside of its folder. {remedy}")

    check_regular(path)
    return path


def _is_file_name(name: str) -> bool:
    """Return whether `name` is a plain file name, which cannot lead to another folder."""
    if name in ("", ".", ".."):
        return False
    has_valid_length = len(name) <= 255  # no common file system allows more
    return has_valid_length and "/" not in name and "\0" not in name


def _is_allowed_target(target: Path, folder: Path) -> bool:
    """Return whether a file in `folder` may be a link to `target`.

    Links must stay inside the folder. There is one exception: in a Hugging Face cache, the files in
    snapshots/REVISION may be links to files in the folder "blobs".
    """
    if target.is_relative_to(folder):
        return True
    snapshots = folder.parent
    return snapshots.name == "snapshots" and target.parent == snapshots.parent / "blobs"
