"""Safe reading of files that others wrote. Their size is limited, and their content is checked before it is used.

Invariant: only regular files are opened, because reading a pipe can block for ever. Never more than a limit is read. A
file name that stands in a file never leads out of its folder. A fault of a file is a UserError that names the file.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, RootModel, ValidationError

from titanlite.config.errors import UserError
from titanlite.config.mistakes import explain, short

STEP_FOLDER = re.compile(r"step-(\d{8,})")
"""Name of a checkpoint's folder."""
MANIFEST = "manifest.json"
"""The file that makes such a folder a checkpoint."""


class FileModel(BaseModel):
    """Base of models of a file's content. No value is converted, and an unknown key is an error."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


AnyModel = TypeVar("AnyModel", bound=BaseModel)


def check_regular(path: Path) -> None:
    """Raises a UserError if `path` is no regular file: a folder, a pipe, a device, or not there."""
    try:
        regular = stat.S_ISREG(os.stat(path).st_mode)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', error)}") from None
    if not regular:
        raise UserError(f"{path} is a folder, a pipe or a device; expected a file.")


def read_file(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes.

    Raises:
        UserError: there is no such file, it is a folder, a pipe or a device, or it is larger.
    """
    check_regular(path)
    try:
        with open(path, "rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if len(content) > limit:
        raise UserError(f"{path} is larger than {limit:,} bytes, which no such file is.")
    return content


def not_writable(folder: Path) -> str | None:
    """Why no file can be made in `folder`; None if one can. `folder` need not exist yet.

    It is tried out, because permissions say nothing about /proc, a full disk or the root user of another machine.
    """
    nearest = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
    real = Path(os.path.realpath(nearest))
    for parent in (real, *real.parents):
        if STEP_FOLDER.fullmatch(parent.name) and os.path.lexists(parent / MANIFEST):
            return f"{parent} is a checkpoint, and nothing is written into one. Name another folder."
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".titanlite-", dir=nearest))
    except OSError as error:
        return f"{nearest} cannot be written to: {error.strerror}. Name another folder."
    return None


def make_folder(path: Path) -> Path:
    """Make a folder for the output of a command.

    Raises:
        UserError: `path` is a file or under one, or cannot be written to.
    """
    if problem := not_writable(path.absolute()):
        raise UserError(f"{path} cannot be made: {problem}")
    path.mkdir(parents=True, exist_ok=True)
    return path


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; its folder is made, and a file of this name is replaced.

    Raises:
        UserError: `path` is no regular file, or cannot be written.
    """
    if os.path.lexists(path):
        check_regular(path)
    make_folder(path.parent)
    try:
        put(path, content)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}. Name another file.") from None


def put(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, into a folder that is there. Raises OSError: it cannot be written."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)


def parse_json(path: Path, content: bytes, model: type[AnyModel], kind: str = "") -> AnyModel:
    """The JSON text `content` of the file `path` as a `model`.

    Args:
        kind: what the file should be, for the message.

    Raises:
        UserError: it is not JSON, or not as `model` requires. The message names up to ten wrong values.
    """
    try:
        return model.model_validate_json(content)
    except ValidationError as failure:
        raise UserError(f"{path}: {f'not {kind}: ' if kind else ''}{explain(model, failure)}") from None


def read_object(path: Path, limit: int) -> dict[str, Any]:
    """The JSON object in a file, whatever it holds. Raises UserError as `read_file`, and where it is none."""
    return parse_json(path, read_file(path, limit), RootModel[dict[str, Any]]).root


def file_inside(folder: Path, name: str) -> Path:
    """The regular file called `name` in `folder`.

    A link is followed if it ends in the folder, or in the `blobs` of Hugging Face's cache, whose folders
    `snapshots/REVISION` consist of such links.

    Raises:
        UserError: `name` is no plain file name, the link leads out of the folder, or it is no regular file.
    """
    path = folder / name
    if name in ("", ".", "..") or "/" in name or "\0" in name or len(name) > 255:
        raise UserError(f"{folder}: {short(repr(name))} is not the name of a file in this folder.")
    target, home = Path(os.path.realpath(path)), folder.resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else None
    if not target.is_relative_to(home) and target.parent != blobs:
        text = "Name the folder that holds the files, or copy them."
        raise UserError(f"{path} is a link that leaves its folder, to {target}. {text}")
    check_regular(path)
    return path


exists = os.path.lexists
