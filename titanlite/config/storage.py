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
from pathlib import Path, PurePath, PurePosixPath
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


def url_of(path: str | PurePath | None) -> str | None:
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


def problem(url: str, *, write: bool = False) -> str | None:
    """Why nothing can be had from a URL, or no file can be written and removed below it; None: it works."""
    try:
        with answered(url):
            storage, root = opened(url)
            if write:
                storage.pipe_file(probe := f"{root}/.titanlite-{secrets.token_hex(4)}", b"titanlite")
                storage.cat_file(probe)
                storage.rm_file(probe)
            else:
                storage.info(root)
    except UserError as error:
        return str(error)


def matching(pattern: str) -> list[RemotePath]:
    """The files of a URL that may have glob characters, sorted. Raises UserError: the storage refuses."""
    with answered(pattern):
        storage, path = opened(pattern)
        found = storage.glob(path, detail=True)
        return [RemotePath(storage.unstrip_protocol(p)) for p in sorted(found) if found[p]["type"] == "file"]


def listing(storage: Any, root: str, deep: bool = True) -> dict[str, dict[str, Any]]:
    """The files in a folder, and below it: the path from there, and what the storage says of it."""
    found = storage.find(root, maxdepth=None if deep else 1, detail=True)
    return {path.removeprefix(root).lstrip("/"): info for path, info in found.items()}


def checkpoints(there: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The folders of a `listing` that are checkpoints, because they have a manifest, by rising step. Their names are
    that of a step, after `prefix`."""
    pattern = re.compile(f"({prefix}{STEP_FOLDER.pattern})/{MANIFEST}")
    steps = [found for path in there if (found := pattern.fullmatch(path))]
    return [found[1] for found in sorted(steps, key=lambda found: int(found[2]))]


def fetch(storage: Any, root: str, sizes: Mapping[str, int], to: Path) -> None:
    """Copy files below `root` to the same places below `to`, each whole or not at all.

    Args:
        sizes: path -> bytes.
    """

    def copy(path: str) -> None:
        unfinished = (to / path).with_name(f".{(to / path).name}.unfinished")
        storage.get_file(f"{root}/{path}", str(unfinished))
        if (found := unfinished.stat().st_size) != sizes[path]:
            raise OSError(f"{path}: {found:,} of {sizes[path]:,} bytes came")
        unfinished.rename(to / path)

    if bad := [path for path in sizes if ".." in path.split("/")]:
        raise ValueError(f"{bad[0]} leaves the folder")
    for folder in {(to / path).parent for path in sizes}:
        folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(PARALLEL) as pool:
        list(pool.map(copy, sizes))


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
        folder, name = os.path.split(root) if storage.isfile(root) else (root, "")
        files = [each for each in (name, beside) if name and each and storage.exists(f"{folder}/{each}")]
        there = {each: storage.info(f"{folder}/{each}") for each in files} or listing(storage, folder, deep)
        if not there:
            raise FileNotFoundError("no files")
        known = repr([url, *sorted((path, *identity(info)) for path, info in there.items())])
        cached = Path(os.environ.get(CACHE) or "~/.cache/titanlite").expanduser().absolute()
        cached = cached / xxhash.xxh3_64_hexdigest(known.encode()) / folder.rpartition("/")[2]
        try:
            cached.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"{CACHE}: {cached} cannot be made: {error.strerror}. Name another folder for copies."
            ) from None
        with (cached.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if sizes := {path: info["size"] for path, info in there.items() if not (cached / path).exists()}:
                amount = f"{len(sizes)} files, {sum(sizes.values()) / 1e9:.3f} GB"
                logging.getLogger("titanlite").info(f"copying {amount}, from {url} to {cached}")
                fetch(storage, folder, sizes, cached)
    return cached / name
