"""Files that others wrote: read within bounds, and checked before anything is made of them.

Invariant: only a regular file is opened (a pipe would wait for ever), never more of it than a limit is read, and a name
that a file gives never leads out of its folder. What is wrong with a file is a UserError that names it.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from titanlite.config.errors import UserError

_SHOWN_ERRORS, _SHOWN_CHARS = 10, 160


class FileModel(BaseModel):
    """Base of what is read from a file: no value is converted, and an unknown key is an error."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


AnyModel = TypeVar("AnyModel", bound=BaseModel)


def read_file(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes.

    Raises:
        UserError: there is none, it is a folder, a pipe or a device, or it is larger.
    """
    try:
        # A pipe without a writer would block in open, were it not for O_NONBLOCK, which a regular file ignores.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UserError(f"{path} is {_kind(status.st_mode)}; expected a file.")
            content = file.read(limit + 1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise _unreadable(path, error) from None
    if len(content) > limit:
        raise UserError(f"{path} is larger than {limit:,} bytes, which no such file is.")
    return content


def not_writable(folder: Path) -> str | None:
    """Why no file can be made in `folder`, or where it is to be; None if one can. It is tried out, because permissions
    say nothing about /proc, a full disk or the root user of another machine."""
    nearest = next(parent for parent in (folder, *folder.parents) if os.path.lexists(parent))
    if not nearest.is_dir():
        return f"{nearest} is a file; a folder is needed there."
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".titanlite-", dir=nearest))
    except OSError as error:
        return f"{nearest} cannot be written to: {error.strerror}. Name another folder."
    return None


def check_regular(path: Path) -> None:
    """Raises UserError: `path` is no regular file. For files that a library opens by their names."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path} is {_kind(status.st_mode)}; expected a file.")


def parse_json(path: Path, content: bytes, model: type[AnyModel], kind: str = "") -> AnyModel:
    """The JSON text `content` of the file `path` as a `model`.

    Args:
        kind: what the file should be, for the message.

    Raises:
        UserError: no JSON, or not as `model` says; names up to ten wrong values.
    """
    try:
        return model.model_validate_json(content)
    except ValidationError as failure:
        raise UserError(f"{path}: {f'not {kind}: ' if kind else ''}{explain(failure)}") from None


def explain(failure: ValidationError) -> str:
    """Each wrong value of a file: where it stands, what it is, and what is allowed."""
    errors = failure.errors(include_url=False, include_context=False)
    lines = [_line(error) for error in errors[:_SHOWN_ERRORS]]
    if len(errors) > _SHOWN_ERRORS:
        lines.append(f"and {len(errors) - _SHOWN_ERRORS} more")
    return "; ".join(lines)


def _line(error: Any) -> str:
    where, text = ".".join(map(str, error["loc"])), error["msg"].removeprefix("Value error, ")
    if error["type"] == "json_invalid":
        return f"not valid JSON: {text.removeprefix('Invalid JSON: ')}"
    if error["type"] == "missing":
        return f"{short(where)} is missing"
    if error["type"] == "extra_forbidden":
        return f"{short(where)} is unknown"
    kinds = {"model_type": "expected an object", "dict_type": "expected an object"}
    message = kinds.get(error["type"]) or text.replace("Input should be", "expected")
    if isinstance(error["input"], dict | list) and error["type"] not in kinds:
        return f"{short(where)}: {message}" if where else message
    return f"{short(where) or 'the value'} is {short(repr(error['input']))}, {message}"


def short(text: str) -> str:
    """The beginning of a text that can be of any length."""
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


def file_inside(folder: Path, name: str) -> Path:
    """The regular file called `name` in `folder`.

    A link is followed if it ends in the folder, or in the `blobs` of Hugging Face's cache, whose folders
    `snapshots/REVISION` consist of such links.

    Raises:
        UserError: `name` is no plain file name, the link leads elsewhere, or it is no regular file.
    """
    path = folder / name
    if name in ("", ".", "..") or "/" in name or "\0" in name or len(name) > 255:
        raise UserError(f"{folder}: {short(repr(name))} is not the name of a file in this folder.")
    try:
        target, home = path.resolve(), folder.resolve()
    except (OSError, RuntimeError) as error:  # links in a circle
        raise _unreadable(path, error) from None
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else None
    if not target.is_relative_to(home) and target.parent != blobs:
        raise UserError(
            f"{path} is a link that leaves its folder, to {target}. Name the folder that holds the files, or copy them."
        )
    check_regular(path)
    return path


def exists(path: Path) -> bool:
    """Whether there is anything of this name, a link that leads nowhere included."""
    try:
        os.lstat(path)
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ENOTDIR)
    return True


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}")


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")
