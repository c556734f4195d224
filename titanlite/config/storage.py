"""Files at a URL: those of any storage that fsspec reads, such as s3://, gs:// or file://.

Invariant: a copy on this machine, of a file or of a block of one, is whole, or it has another name. It is kept under
what identifies its original (its ETag, or size and time), so that an original that has changed is copied again.
Credentials and addresses are the storage's own settings, never a job's.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

import xxhash

from titanlite.config.errors import UserError, one_line
from titanlite.config.files import MANIFEST, STEP_FOLDER, make_folder, write_whole

CACHE, LIMIT = "TITANLITE_CACHE", "TITANLITE_CACHE_GB"
"""Environment variables: the folder of the copies, and what the blocks in it may take."""
PARALLEL = 8
"""Files, or blocks of one, that are copied at a time."""
BLOCK = 1 << 20
"""Bytes of a file that come together. A larger block would take longer than the request."""
_SETS = 64
_URL = re.compile(r"([a-z][a-z0-9+]+):/+(.+)")
_IDENTITY = ("ETag", "etag", "md5Hash", "content_md5", "mtime", "LastModified", "last_modified", "created")
_REMEDY = """Is the name right? Credentials and address come from the settings of the storage, for S3 such as \
AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL."""


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
        remedy = "" if isinstance(error, ImportError | ValueError) else f" {_REMEDY}"  # no package; no such scheme
        raise kind(f"{url} {what} ({one_line(str(error))}).{remedy}") from None


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
        if not (found := storage.glob(path, detail=True)):
            storage.info(path.partition("/")[0] or "/")  # or a bucket that is not there would be one without files
        return [RemotePath(storage.unstrip_protocol(path)) for path in _files(found)]


def listing(storage: Any, root: str, deep: bool = True) -> dict[str, dict[str, Any]]:
    """The files in a folder, and below it: the path from there, and what the storage says of it."""
    found = _files(storage.find(root, maxdepth=None if deep else 1, detail=True))
    return {path.removeprefix(root).lstrip("/"): info for path, info in found.items()}


def _files(found: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Without folders, for which consoles keep empty objects. s3fs finds even the folder that it looks into, if the
    first file comes meanwhile."""
    return {path: found[path] for path in sorted(found) if found[path]["type"] == "file" and path[-1] != "/"}


def checkpoints(there: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The folders of a `listing` that are checkpoints, because they have a manifest, by rising step. Their names are
    that of a step, after `prefix`."""
    found = filter(None, map(re.compile(f"({prefix}{STEP_FOLDER.pattern})/{MANIFEST}").fullmatch, there))
    return [each[1] for each in sorted(found, key=lambda each: int(each[2]))]


def fetch(storage: Any, root: str, sizes: Mapping[str, int], to: Path) -> None:
    """Copy files below `root` to the same places below `to`, each whole or not at all.

    Args:
        sizes: path -> bytes.
    """

    def copy(path: str) -> None:
        (to / path).parent.mkdir(parents=True, exist_ok=True)
        unfinished = (to / path).with_name(f".{(to / path).name}.unfinished")
        storage.get_file(f"{root}/{path}", str(unfinished))
        if (found := unfinished.stat().st_size) != sizes[path]:
            raise OSError(f"{path}: {found:,} of {sizes[path]:,} bytes came")
        unfinished.rename(to / path)

    if bad := [path for path in sizes if ".." in path.split("/")]:
        raise ValueError(f"{bad[0]} leaves the folder")
    with ThreadPoolExecutor(PARALLEL) as pool:
        list(pool.map(copy, sizes))


def _cache() -> Path:
    return Path(os.environ.get(CACHE) or "~/.cache/titanlite").expanduser().absolute()


@lru_cache(maxsize=32)  # as documents are smaller than a block
def block(url: str, version: tuple[int, str], number: int) -> bytes:
    """A block of a file at a URL, from the cache if it is there. Processes of a machine take turns, so that each comes
    once. The cache is divided into sets, as a processor's is, so that few files are looked at to make room in one: what
    was not used for the longest time goes.

    Args:
        version: the `identity` of the file.

    Raises:
        UserError: the storage or the disk refuses, or the file has another version by now.
    """
    start, end = number * BLOCK, min((number + 1) * BLOCK, version[0])
    name = xxhash.xxh3_64_intdigest(repr([url, version, number]).encode())
    folder = make_folder(_cache() / "blocks" / str(name % _SETS))
    with answered(url), (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with suppress(FileNotFoundError):
            if len(raw := (folder / str(name)).read_bytes()) == end - start:  # a power cut can have left less
                os.utime(folder / str(name))
                return raw
        storage, path = opened(url)
        raw = storage.cat_file(path, start=start, end=end)
        if identity(storage.info(path)) != version:  # afterwards, because it can change until then
            raise UserError(f"{url} has changed while it was read. Start again: dataset.on_change decides.")
        held = sorted(folder.glob("[0-9]*"), key=lambda file: file.stat().st_mtime)
        room = (len(held) * BLOCK * _SETS + shutil.disk_usage(folder).free) / 2  # half of the disk's, without a limit
        most = max(1, int((float(os.environ.get(LIMIT) or 0) * 1e9 or room) / BLOCK / _SETS))
        for file in held[: max(0, len(held) + 1 - most)]:
            file.unlink()
        write_whole(folder / str(name), raw)
    return raw


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
        cached = make_folder(_cache() / xxhash.xxh3_64_hexdigest(known.encode())) / folder.rpartition("/")[2]
        with (cached.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if sizes := {path: info["size"] for path, info in there.items() if not (cached / path).exists()}:
                amount = f"{len(sizes)} files, {sum(sizes.values()) / 1e9:.3f} GB"
                logging.getLogger("titanlite").info(f"copying {amount}, from {url} to {cached}")
                fetch(storage, folder, sizes, cached)
    return cached / name
