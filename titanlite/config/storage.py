"""Files at a URL: those of any storage that fsspec reads, such as s3://, gs:// or file://.

Invariant: a copy on this machine is whole, or it has another name. It is kept under what identifies its original (its
ETag, or size and time), so that an original that has changed is copied again. Credentials and addresses are the
storage's own settings, never a job's.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from titanlite.config.errors import UserError, one_line
from titanlite.config.files import MANIFEST, STEP_FOLDER

CACHE = "TITANLITE_CACHE"
"""Environment variable: the folder of the copies."""
PARALLEL = 8
"""Files that are copied at a time."""
_URL = re.compile(r"([a-z][a-z0-9+]+):/+(.+)")
_IDENTITY = ("ETag", "etag", "md5Hash", "content_md5", "mtime", "LastModified", "last_modified", "created")
_REMEDY = "Is the name right? Credentials and address come from the settings of the storage, for S3 such as"


class RemotePath(PurePosixPath):
    """The place of a file at a URL, which is its text."""

    def __str__(self) -> str:
        return url_of(super().__str__()) or super().__str__()


def url_of(path: str | PurePosixPath | None) -> str | None:
    """The URL that `path` is, also where a `Path` has made one slash of two; None: it is none."""
    if found := _URL.fullmatch(str(path)):
        return f"{found[1]}://{'/' if found[1] in ('file', 'local') else ''}{found[2]}"
    return None


@contextmanager
def answered(url: str, kind: type[UserError] = UserError) -> Iterator[None]:
    """Raises `kind`: what a storage refuses, in words."""
    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        package = "'titanlite[s3]'" if url.startswith("s3:") else "the package that reads it"
        raise kind(f"{url}: {one_line(str(error))}. pip install {package}.") from None
    except Exception as error:  # each storage has errors of its own
        what = "is not there" if isinstance(error, FileNotFoundError) else f"fails with {type(error).__name__}"
        words = f"{url} {what} ({one_line(str(error))}). {_REMEDY}"
        raise kind(f"{words} AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL.") from None


def opened(url: str) -> tuple[Any, str]:
    """The storage of a URL, and the path in it."""
    from fsspec.core import url_to_fs

    makes_folders = {"auto_mkdir": True} if url.startswith(("file:", "local:")) else {}
    return url_to_fs(url, use_listings_cache=False, **makes_folders)


def identity(info: Mapping[str, Any]) -> tuple[int, str]:
    """Size of a file, and what changes with its content."""
    return info["size"], next((str(info[key]) for key in _IDENTITY if info.get(key)), "")


def not_writable(url: str) -> str | None:
    """Why no file can be written, read and removed below a URL; None if that works."""
    try:
        with answered(url):
            storage, root = opened(url)
            probe = f"{root}/.titanlite-{secrets.token_hex(4)}"
            storage.pipe_file(probe, b"titanlite")
            storage.cat_file(probe)
            storage.rm_file(probe)
    except UserError as error:
        return str(error)
    return None


def missing(url: str) -> str | None:
    """Why a file or folder cannot be had; None if it is there."""
    try:
        with answered(url):
            storage, root = opened(url)
            storage.info(root)
    except UserError as error:
        return str(error)
    return None


def matching(pattern: str) -> list[RemotePath]:
    """The files of a URL that may have glob characters, sorted. Raises UserError: the storage refuses."""
    with answered(pattern):
        storage, path = opened(pattern)
        found = storage.glob(path, detail=True)
        return sorted(RemotePath(storage.unstrip_protocol(p)) for p in found if found[p]["type"] == "file")


def listing(storage: Any, root: str) -> dict[str, dict[str, Any]]:
    """Every file below a folder: its path from there, and what the storage says of it."""
    return {path.removeprefix(root).lstrip("/"): info for path, info in storage.find(root, detail=True).items()}


def checkpoints(there: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The folders of a `listing` that are checkpoints, because they have a manifest, by rising step. Their names are
    that of a step, after `prefix`."""
    pattern = re.compile(f"({prefix}{STEP_FOLDER.pattern})/{MANIFEST}")
    steps = [found for path in there if (found := pattern.fullmatch(path))]
    return [found[1] for found in sorted(steps, key=lambda found: int(found[2]))]


def fetch(storage: Any, path: str, to: Path, size: int) -> None:
    """Copy a file whole, or not at all."""
    unfinished = to.with_name(f".{to.name}.{secrets.token_hex(4)}")
    try:
        storage.get_file(path, str(unfinished))
        if (found := unfinished.stat().st_size) != size:
            raise OSError(f"{path}: {found:,} of {size:,} bytes came")
        os.replace(unfinished, to)
    finally:
        unfinished.unlink(missing_ok=True)


@cache
def local_copy(path: str | Path, beside: str = "", *, deep: bool = False) -> Path:
    """The path itself, or that of a copy of what is at a URL: a file, or the files of a folder. What was copied before
    is not copied again. Processes of a machine take turns.

    Args:
        beside: name of a file in the same folder, which is copied, too, if it is there.
        deep: the folders in a folder as well.

    Raises:
        UserError: it is not there, or cannot be copied.
    """
    if (url := url_of(path)) is None:
        return Path(path)
    with answered(url):
        storage, root = opened(url)
        info = storage.info(root)
        home = root.rpartition("/")[0] if info["type"] == "file" else root
        files = {root: info} if home != root else storage.find(root, maxdepth=None if deep else 1, detail=True)
        if beside and storage.exists(f"{home}/{beside}"):
            files[f"{home}/{beside}"] = storage.info(f"{home}/{beside}")
        if not files:
            raise FileNotFoundError("an empty folder")
        names = {name: name.removeprefix(home).lstrip("/") for name in files}
        if bad := [name for name in names if ".." in name.split("/")]:
            raise ValueError(f"a name that leaves the folder: {bad[0]}")
        known = xxhash.xxh3_64_hexdigest(repr([url, sorted((n, identity(files[n])) for n in files)]).encode())
        cached = Path(os.environ.get(CACHE) or "~/.cache/titanlite").expanduser().absolute() / known
        folder = cached / home.rpartition("/")[2]
        folder.mkdir(parents=True, exist_ok=True)
        with (cached / ".lock").open("w") as lock, ThreadPoolExecutor(PARALLEL) as pool:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if lacking := [name for name in files if not (folder / names[name]).exists()]:
                size = sum(files[name]["size"] for name in lacking) / 1e9
                logging.getLogger("titanlite").info(
                    f"copying {len(lacking)} files, {size:.3f} GB, from {url} to {folder}"
                )
            for name in lacking:
                (folder / names[name]).parent.mkdir(parents=True, exist_ok=True)
            list(pool.map(lambda n: fetch(storage, n, folder / names[n], files[n]["size"]), lacking))
    return folder if home == root else folder / names[root]
