"""The archives in which torch stores tensors, read without torch. Each chunk of a checkpoint is such an archive.

Invariant: nothing is unpacked, so that memory does not depend on what an archive says of itself.
"""

from __future__ import annotations

import io
import math
import zipfile
from pathlib import Path
from typing import IO, Any, cast

from titanlite.checkpoint.index import ITEMSIZE, Chunk, Index
from titanlite.checkpoint.open_files import open_file, shown, unreadable
from titanlite.config.errors import Damage


def stored_entries(file: Path | FilePart) -> list[zipfile.ZipInfo]:
    """What an archive holds.

    Raises:
        ValueError: its parts are compressed. torch would unpack them into memory, whatever their size.
        Exception: of any kind, where it is no archive.
    """
    with zipfile.ZipFile(cast(Any, file)) as archive:
        entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError("its parts are compressed")
    return entries


def check_archives(folder: Path, index: Index) -> None:
    """Compare the archives in the files of a checkpoint with its index.

    Raises:
        Damage: a file does not hold the bytes of the tensors that the index finds there.
        CheckpointError: a file cannot be read now.
    """
    in_file: dict[str, list[tuple[Chunk, str, int]]] = {}
    for name, entry in index.items():
        for chunk in entry.chunks:
            in_file.setdefault(chunk.file, []).append((chunk, name, math.prod(chunk.sizes) * ITEMSIZE[entry.dtype]))
    for file_name, chunks in sorted(in_file.items()):
        with open_file(folder / file_name) as file:
            for chunk, name, size in chunks:
                _check_chunk(folder, file, chunk, name, size)


def _check_chunk(folder: Path, file: IO[bytes], chunk: Chunk, name: str, size: int) -> None:
    part = FilePart(file, chunk.start, chunk.length)
    try:
        held = sum(entry.file_size for entry in stored_entries(part) if "/data/" in entry.filename)
        if held != size:  # DCP copies a view before it saves it, so that nothing else is in the archive
            raise ValueError(f"{held} bytes instead of {size}")
    except Exception as error:  # zipfile raises any kind of error for bytes that are no archive
        if part.error:
            raise unreadable(folder / chunk.file, part.error) from None
        raise Damage(f"{shown(chunk.file)}: {shown(name)}: {shown(str(error))}") from None


class FilePart(io.RawIOBase):
    """Some bytes of a file, as a file of their own."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self.error: OSError | None = None  # of the disk; the readers of archives raise another one in its place
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        room = memoryview(buffer)[: max(0, self._length - self._at)]
        try:
            self._file.seek(self._start + self._at)
            count = cast(io.BufferedReader, self._file).readinto(room)
        except OSError as error:
            self.error = error
            raise
        self._at += count
        return count
