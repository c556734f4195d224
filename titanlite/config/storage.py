"""Access files at URLs, in any storage that fsspec supports, such as s3://, gs:// or file://.

Downloaded files, and blocks of files, are cached on the local disk.

Invariant: a file in the cache is either complete or has a temporary name. The cache is keyed by the
version of the remote file (its ETag, or size and time), so that changed files are downloaded again.
Credentials and endpoints are settings of the storage, and never keys of a job.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

import xxhash

from titanlite.config.errors import UserError, one_line
from titanlite.config.files import MANIFEST, STEP_FOLDER, make_folder, write_atomically

CACHE = "TITANLITE_CACHE"
"""Environment variable that sets the cache folder."""
LIMIT = "TITANLITE_CACHE_GB"
"""Environment variable that sets the maximum total size of the cached blocks, in GB."""
PARALLEL = 8
"""Number of files to download at once."""
BLOCK = 1 << 20
"""Size of a block in bytes. Transferring a larger block would take longer than requesting it."""
_NUM_FOLDERS = 64
"""Number of folders into which cached blocks are divided."""
_URL = re.compile(r"([a-z][a-z0-9+]+):/+(.+)")
# Metadata fields that change with the content of a file. The first one with a value is used.
_VERSION_FIELDS = (
    "ETag",
    "etag",
    "md5Hash",
    "content_md5",
    "mtime",
    "LastModified",
    "last_modified",
    "created",
)
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk and of a full disk quota."""
_REMEDY = (
    "Check the name, and the settings of the storage: for S3, AWS_ACCESS_KEY_ID, "
    "AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL."
)


class RemotePath(PurePosixPath):
    """Path of a file at a URL. Converting it to a string gives the URL."""

    def __str__(self) -> str:
        """Return the URL."""
        return as_url(super().__str__()) or super().__str__()


def as_url(path: str | PurePath | None) -> str | None:
    """Convert a path to a URL string, or return None if it is a local path.

    For example, Path("s3://bucket/run") gives "s3://bucket/run", although `pathlib` removes one of
    the slashes.
    """
    match = _URL.fullmatch(str(path))
    if match is None:
        return None
    scheme, location = match.groups()
    root = "/" if scheme in ("file", "local") else ""
    return f"{scheme}://{root}{location}"


@contextmanager
def storage_errors(url: str, error_class: type[UserError] = UserError) -> Iterator[None]:
    """Convert exceptions in the `with` block to a `UserError` that names the URL.

    For example, the message is "s3://bucket/run does not exist (...)." A `UserError` in the block
    is not changed.

    Args:
        url: URL that the block accesses.
        error_class: Class of the new error.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # each storage has different exception types
        raise error_class(_describe_failure(url, error)) from error


def _describe_failure(url: str, error: Exception) -> str:
    """Return an error message with the URL, the cause and, if it may help, the remedy."""
    if isinstance(error, FileNotFoundError):
        problem = "does not exist"
    else:
        problem = f"failed with {type(error).__name__}"
    message = f"{url} {problem} ({one_line(str(error))})."

    if getattr(error, "errno", None) in DISK_FULL:
        return f"{message} Free some space."
    is_local = url.startswith(("file:", "local:")) or getattr(error, "filename", None) is not None
    if is_local:
        return message
    if isinstance(error, ImportError | ValueError):  # a missing package, or an unknown scheme
        return message
    return f"{message} {_REMEDY}"


def open_storage(url: str) -> tuple[Any, str]:
    """Return the fsspec file system for a URL, and the path of the URL in this file system."""
    from fsspec.core import url_to_fs

    is_local = url.startswith(("file:", "local:"))
    options = {"auto_mkdir": True} if is_local else {}
    return url_to_fs(url, use_listings_cache=False, **options)


def file_version(info: Mapping[str, Any]) -> tuple[int, str]:
    """Return a value that changes if the content of a remote file changes.

    Args:
        info: Metadata of the file from fsspec.

    Returns:
        Size of the file in bytes, and its ETag, hash or modification time, or "" if the storage has
        none of them.
    """
    for field in _VERSION_FIELDS:
        if info.get(field):
            return info["size"], str(info[field])
    return info["size"], ""


def find_storage_problem(url: str, *, write: bool) -> str | None:
    """Test access to a URL. Return an error message, or None if access succeeds.

    Args:
        url: URL of a file or folder.
        write: Whether to write, read and delete a small test file in the folder. Otherwise, only
            read the metadata of the URL.
    """
    try:
        with storage_errors(url):
            storage, root = open_storage(url)
            if write:  # a storage can allow writing, but not reading or deleting
                probe = f"{root}/.titanlite-{secrets.token_hex(4)}"
                storage.pipe_file(probe, b"titanlite")
                storage.cat_file(probe)
                storage.rm_file(probe)
            else:
                storage.info(root)
    except UserError as error:
        return str(error)
    return None


def glob_files(pattern: str) -> list[RemotePath]:
    """Return the files that match a URL such as "s3://bucket/*.jsonl", sorted.

    Raises:
        UserError: If the storage fails.
    """
    with storage_errors(pattern):
        storage, path = open_storage(pattern)
        matches = storage.glob(path, detail=True)
        if not matches:
            storage.info(path.partition("/")[0] or "/")  # fails if the bucket does not exist
        return [RemotePath(storage.unstrip_protocol(file)) for file in _select_files(matches)]


def list_files(storage: Any, root: str, deep: bool = True) -> dict[str, dict[str, Any]]:
    """List the files in a folder of a file system.

    Args:
        storage: fsspec file system.
        root: Path of the folder.
        deep: Whether to include files in subfolders.

    Returns:
        Metadata of each file, by its path relative to the folder.
    """
    entries = storage.find(root, maxdepth=None if deep else 1, detail=True)
    files = _select_files(entries)
    return {path.removeprefix(root).lstrip("/"): info for path, info in files.items()}


def _select_files(entries: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return only the files in a listing of a storage, sorted by path.

    Folders are omitted, including the empty objects that represent folders on S3.

    Args:
        entries: Metadata of each file and folder from fsspec, by path.
    """
    files = {}
    for path in sorted(entries):
        if entries[path]["type"] == "file" and not path.endswith("/"):
            files[path] = entries[path]
    return files


def find_checkpoints(files: Iterable[str], prefix: str = "", manifest: str = MANIFEST) -> list[str]:
    """Return the paths of all checkpoints in a listing of files, sorted by step.

    A checkpoint is a folder such as "step-00000100" that contains a manifest.

    Args:
        files: Paths of files.
        prefix: Regular expression for the part of the path in front of the step folder.
        manifest: Name of the manifest.
    """
    folder_pattern = f"(?P<folder>{prefix}{STEP_FOLDER.pattern})"  # has a group "step"
    pattern = re.compile(f"{folder_pattern}/{re.escape(manifest)}")
    matches = [match for match in map(pattern.fullmatch, files) if match]
    checkpoints = sorted((int(match["step"]), match["folder"]) for match in matches)
    return [folder for _, folder in checkpoints]


def download_files(storage: Any, root: str, sizes: Mapping[str, int], to: Path) -> None:
    """Download files from a folder of a storage to a local folder, several at once.

    Each file has a temporary name until it is complete.

    Args:
        storage: fsspec file system.
        root: Folder in the storage.
        sizes: Expected size of each file in bytes, by its path relative to `root`.
        to: Local folder, in which the files get the same relative paths.

    Raises:
        OSError: If a file does not have the expected size.
        ValueError: If a path leads out of the folder.
    """
    for path in sizes:
        if path.startswith("/") or ".." in path.split("/"):
            raise ValueError(f"{path} leaves the folder")

    def download(path: str) -> None:
        target = to / path
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f".{target.name}.unfinished")
        storage.get_file(f"{root}/{path}", str(unfinished))

        num_bytes = unfinished.stat().st_size
        if num_bytes != sizes[path]:
            raise OSError(f"{path}: received {num_bytes:,} of {sizes[path]:,} bytes")
        unfinished.rename(target)

    with ThreadPoolExecutor(PARALLEL) as pool:
        list(pool.map(download, sizes))  # raises the first error of a download


def _get_cache_folder() -> Path:
    """Return the folder of the cache: TITANLITE_CACHE or, if unset, ~/.cache/titanlite."""
    return Path(os.environ.get(CACHE) or "~/.cache/titanlite").expanduser().absolute()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a cache folder during the `with` block, so that only one process writes to it.

    Raises:
        UserError: If the block fails because the disk or the disk quota is full.
    """
    try:
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        raise UserError(
            f"The disk of the cache {folder} is full: {error.strerror}. Free some space, or set "
            f"{CACHE} to a folder on another disk."
        ) from None


@lru_cache(maxsize=32)  # a block contains several documents
def read_block(url: str, version: tuple[int, str], number: int) -> bytes:
    """Return a block of a file at a URL, from the cache on disk or else from the storage.

    Args:
        url: URL of the file.
        version: Expected version of the file, from `file_version`.
        number: Index of the block, from 0. A block has `BLOCK` bytes, except for the last one.

    Raises:
        UserError: If the storage or the disk fails, or the file has changed.
    """
    file_size, _ = version
    start = number * BLOCK
    end = min(start + BLOCK, file_size)
    cached_file = _prepare_cached_file(repr([url, version, number]))
    folder = cached_file.parent

    with storage_errors(url), _locked(folder):  # only one process of the node downloads the block
        block = _read_cached_block(cached_file, end - start)
        if block is None:
            block = _download_block(url, version, start, end)
            _evict_blocks(folder)  # makes room for the new block
            write_atomically(cached_file, block)
    return block


def _prepare_cached_file(key: str) -> Path:
    """Return the path of a block in the cache, and create its folder.

    The cache is divided into many folders, so that evicting a block inspects only a few files.

    Args:
        key: Text that identifies the block and its version.
    """
    cache_id = xxhash.xxh3_64_intdigest(key.encode())
    folder = make_folder(_get_cache_folder() / "blocks" / str(cache_id % _NUM_FOLDERS))
    return folder / str(cache_id)


def _download_block(url: str, version: tuple[int, str], start: int, end: int) -> bytes:
    """Download the bytes [start, end) of a file.

    Raises:
        UserError: If the version of the file is not `version`, because the file has changed.
    """
    storage, path = open_storage(url)
    block = storage.cat_file(path, start=start, end=end)
    if file_version(storage.info(path)) != version:  # checked after the download, to cover it
        remedy = "Start again: dataset.on_change decides what to do."
        raise UserError(f"{url} changed while it was read. {remedy}")
    return block


def _read_cached_block(file: Path, num_bytes: int) -> bytes | None:
    """Return the block in a cache file, and mark the file as recently used.

    If the file does not exist, or does not have the expected size of `num_bytes`, return None.
    """
    try:
        block = file.read_bytes()
        if len(block) != num_bytes:  # a power failure can leave a shorter file
            return None
        os.utime(file)
    except FileNotFoundError:
        return None
    return block


def _evict_blocks(folder: Path) -> None:
    """Delete the least recently used blocks of a cache folder until a new block fits.

    Args:
        folder: One of the folders into which the cache is divided.
    """
    # `_read_cached_block` updates the modification time of each block that is used.
    blocks = sorted(folder.glob("[0-9]*"), key=lambda file: file.stat().st_mtime)
    max_bytes = float(os.environ.get(LIMIT) or 0) * 1e9
    if not max_bytes:  # half of the disk space that is free or used by the cache
        used_bytes = len(blocks) * BLOCK * _NUM_FOLDERS  # all folders have about the same size
        max_bytes = (used_bytes + shutil.disk_usage(folder).free) / 2
    max_blocks = max(1, int(max_bytes / BLOCK / _NUM_FOLDERS))
    num_evicted = max(0, len(blocks) + 1 - max_blocks)
    for file in blocks[:num_evicted]:
        file.unlink()


@cache
def get_local_copy(path: str | Path, extra_file: str = "", *, deep: bool = False) -> Path:
    """Download a file or folder at a URL to the cache, and return its local path.

    Further calls in the same process with the same arguments return the path immediately.

    Args:
        path: URL of a file or folder, or a local path, which is returned unchanged.
        extra_file: Name of a second file to download from the same folder, if it exists.
        deep: If `path` is a folder, also download its subfolders.

    Raises:
        UserError: If the URL does not exist or cannot be downloaded.
    """
    url = as_url(path)
    if url is None:
        return Path(path)

    with storage_errors(url):  # converts any exception to a UserError
        storage, remote_path = open_storage(url)
        if storage.isfile(remote_path):
            return _download_file(url, storage, remote_path, extra_file)
        files = list_files(storage, remote_path, deep)
        if not files:
            raise FileNotFoundError("no files")
        return _download_to_cache(url, storage, remote_path, files)


def _download_file(url: str, storage: Any, remote_path: str, extra_file: str) -> Path:
    """Download a file to the cache, and return its local path.

    Args:
        url: URL of the file.
        storage: fsspec file system.
        remote_path: Path of the file in the storage.
        extra_file: Name of a second file to download from the same folder, if it exists, or "".
    """
    folder, name = os.path.split(remote_path)
    files = {name: storage.info(remote_path)}
    if extra_file and storage.exists(f"{folder}/{extra_file}"):
        files[extra_file] = storage.info(f"{folder}/{extra_file}")
    return _download_to_cache(url, storage, folder, files) / name


def _download_to_cache(
    url: str, storage: Any, remote_folder: str, files: Mapping[str, Mapping[str, Any]]
) -> Path:
    """Download the files that are missing in the cache, and return the local folder of all files.

    Args:
        url: URL of the file or folder.
        storage: fsspec file system.
        remote_folder: Folder in the storage.
        files: Metadata of each file from fsspec, by its path relative to `remote_folder`.
    """
    # The versions are part of the key, so changed files are downloaded to another cache folder.
    versions = sorted((file, *file_version(info)) for file, info in files.items())
    cache_key = xxhash.xxh3_64_hexdigest(repr([url, *versions]).encode())
    cache_folder = make_folder(_get_cache_folder() / cache_key)
    folder_name = remote_folder.rpartition("/")[2]
    local_folder = cache_folder / folder_name  # keep the name, which messages show

    with _locked(cache_folder):  # only one process of the node downloads the files
        missing_sizes = {}  # size of each missing file in bytes
        for file, info in files.items():
            if not (local_folder / file).exists():
                missing_sizes[file] = info["size"]

        if missing_sizes:
            total_gb = sum(missing_sizes.values()) / 1e9
            amount = f"{len(missing_sizes)} files, {total_gb:.3f} GB"
            logging.getLogger("titanlite").info(f"Copying {amount} from {url} to {local_folder}")
            download_files(storage, remote_folder, missing_sizes, local_folder)
    return local_folder
