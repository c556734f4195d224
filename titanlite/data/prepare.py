"""Tokenize the sources of a job once, into shards.

Invariant: the bytes written depend on the sources and the tokenizer alone. The number of threads and interruptions
change nothing.

Threads tokenize units of about 4 MiB of text, which are written in order; the tokenizers let go of Python's lock while
they work. A shard gets its name by a rename when it is complete. So a killed run leaves whole shards, and the next run
goes on after them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from titanlite.config.errors import UserError
from titanlite.config.files import make_folder, put
from titanlite.config.run import Run
from titanlite.data.sources.base import RandomAccess, Record, Sequential, Source, text_hash
from titanlite.data.sources.files import FileSpans
from titanlite.data.sources.shards import FORMAT, Header, Shards, block_checksums
from titanlite.data.stream import DocumentTokenizer, open_sources, source_specs
from titanlite.data.tokenizer import Tokenizer, load_tokenizer

_UNIT_BYTES = 1 << 22
_UNIT_DOCUMENTS = 4096
_UNITS_PER_SHARD = 64  # 256 MiB of text: large enough for few files, small enough to lose little when killed


class _Unit(NamedTuple):
    """Documents that are tokenized together."""

    records: Callable[[], list[Record]]
    next: list[int]
    """Where the unit after this one begins: part and document; 0 and the document at random access."""
    done: float
    """Share of the source up to the end of this unit."""


class _Tokenized(NamedTuple):
    unit: _Unit
    tokens: bytes
    lengths: np.ndarray
    """Tokens of each document."""
    hashes: np.ndarray
    """`text_hash` of each text, uint64; 0 for a record that was skipped."""
    skipped: list[str]


def prepare(run: Run, out: Path, workers: int) -> list[Path]:
    """Write the shards of the source of `run` to `out`. Each source of a mix gets a folder of its own in `out`. Shards
    of an interrupted run are kept, and a complete folder is left as it is. Returns the folders.

    Args:
        workers: Number of threads that tokenize.

    Raises:
        UserError: a source cannot be read, or `out` holds something else.
    """
    dataset, tokenizer = run.job.dataset, load_tokenizer(run.tokenizer_path)
    specs = source_specs(dataset)
    folders = [out] if len(specs) == 1 else [out / f"{i}-{spec.source}" for i, spec in enumerate(specs)]
    for spec in specs:
        if spec.source == "shards":
            raise UserError(f"dataset.path = {spec.path!r} holds prepared shards already")
    skip_bad = dataset.on_bad_record == "skip"
    sources = open_sources(dataset, DocumentTokenizer(tokenizer, skip_bad=skip_bad), 0)  # all, before hours of work
    for source, folder in zip(sources, folders, strict=True):
        try:
            _prepare_source(source, folder, tokenizer, workers, skip_bad)
        except OSError as error:
            raise UserError(f"cannot write shards to {folder}: {error}. Make room, or name another --out.") from None
    return folders


def _prepare_source(source: Source, folder: Path, tokenizer: Tokenizer, workers: int, skip_bad: bool) -> None:
    header = Header(
        format=FORMAT,
        source=source.name,
        source_fingerprint=source.fingerprint,
        tokenizer=tokenizer.fingerprint,
        tokenizer_path=tokenizer.path.name,
        vocab_size=tokenizer.vocab_size,
        dtype="uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32",
        on_bad_record="skip" if skip_bad else "error",
    ).model_dump()
    shards = _resume(folder, header)
    if shards is None:
        print(f"{folder}: complete already, {Shards(source.name, folder).describe()}")
        return
    if shards:
        print(f"{folder}: going on after {len(shards)} shards of an interrupted run")
    progress = _Progress(source.name)
    units = _units(source, *(shards[-1]["next"] if shards else (0, 0)))
    tokenize = partial(_tokenize, tokenizer, skip_bad, np.dtype(header["dtype"]).newbyteorder("<"))
    with ThreadPoolExecutor(workers) as pool:
        results = _in_order(pool, tokenize, units, 2 * workers)
        while shard := _write_shard(folder, len(shards), results, progress):
            shards.append(shard)
    if not sum(shard["tokens"] for shard in shards):
        raise UserError(f"{source.name} is empty: no document in it")
    for shard in shards:
        del shard["next"]
    put(folder / "manifest.json", json.dumps({**header, "shards": shards}, indent=1).encode())
    for file in [folder / "prepare.json", *folder.glob("shard-*.json")]:
        file.unlink()
    skipped = sum(shard["skipped"] for shard in shards)
    bad = f", {skipped:,} records skipped" if skipped else ""
    progress.say(f"{folder}: {Shards(source.name, folder).describe()}{bad}", end="\n")


def _resume(folder: Path, header: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Entries of the shards that are in `folder`; None if the folder is complete."""
    make_folder(folder)
    for name in ("manifest.json", "prepare.json"):
        if not (folder / name).is_file():
            continue
        try:
            found = json.loads((folder / name).read_bytes())
            wrong = [key for key in header if found.get(key) != header[key]]
        except (ValueError, AttributeError):
            raise UserError(f"{folder / name} is not one of prepared shards. Name another --out.") from None
        if wrong:
            raise UserError(
                f"{folder} holds shards made with another {', another '.join(wrong).replace('_', ' ')}. Name another "
                "--out, or remove the folder."
            )
        if name == "manifest.json":
            return None
    if not (folder / "prepare.json").is_file():
        if any(folder.iterdir()):
            raise UserError(f"{folder} is not empty and holds no shards. Name another --out.")
        put(folder / "prepare.json", json.dumps(header).encode())
    return [json.loads(entry.read_bytes()) for entry in sorted(folder.glob("shard-*.json"))]


def _units(source: Source, part: int, first: int) -> Iterator[_Unit]:
    """The units from document `first` of `part` on."""
    if isinstance(source, RandomAccess):
        total = len(source)
        ends = np.arange(_UNIT_DOCUMENTS, total, _UNIT_DOCUMENTS)
        if isinstance(source, FileSpans):  # a unit: the documents that end in one stretch of bytes
            ends = np.flatnonzero(np.diff(np.cumsum(source.sizes()) // _UNIT_BYTES)) + 1
        start = first
        for end in [*ends[ends > first].tolist(), *([total] if first < total else [])]:
            yield _Unit(lambda numbers=range(start, end): list(map(source.record, numbers)), [0, end], end / total)
            start = end
        return
    assert isinstance(source, Sequential)
    for number in range(part, source.num_units):
        records: list[Record] = []
        size, start, count = 0, first if number == part else 0, 0
        for count, record in enumerate(source.read(number, start), 1):
            if record is not None:
                records.append(record)
                size += len(record) if isinstance(record, str) else 0
            if size >= _UNIT_BYTES or len(records) >= _UNIT_DOCUMENTS:
                yield _Unit(lambda done=records: done, [number, count], number / source.num_units)
                records, size = [], 0
        if records:
            yield _Unit(lambda done=records: done, [number + 1, 0], (number + 1) / source.num_units)


def _in_order(
    pool: ThreadPoolExecutor, call: Callable[[_Unit], _Tokenized], units: Iterator[_Unit], most: int
) -> Iterator[_Tokenized]:
    """`call` of each unit. At most `most` are in memory."""
    waiting: deque[Future[_Tokenized]] = deque()
    try:
        for unit in units:
            waiting.append(pool.submit(call, unit))
            if len(waiting) >= most:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def _tokenize(tokenizer: Tokenizer, skip_bad: bool, dtype: np.dtype, unit: _Unit) -> _Tokenized:
    documents, records = DocumentTokenizer(tokenizer, skip_bad=skip_bad), unit.records()
    tokens = [documents.encode(record) for record in records]
    lengths = np.array([len(part) for part in tokens], dtype=np.int64)
    hashes = np.array([text_hash(r) if isinstance(r, str) else 0 for r in records], dtype=np.uint64)
    raw = np.concatenate([*tokens, np.empty(0, dtype=np.int32)]).astype(dtype).tobytes()
    return _Tokenized(unit, raw, lengths, hashes, documents.skipped)


def _write_shard(
    folder: Path, number: int, results: Iterator[_Tokenized], progress: _Progress
) -> dict[str, Any] | None:
    """Write the next _UNITS_PER_SHARD units; returns the shard's entry in the manifest, None if no unit is left."""
    name = f"shard-{number:05d}"
    temporary = folder / f"{name}.bin.tmp"
    lengths: list[np.ndarray] = []
    hashes: list[np.ndarray] = []
    skipped, following = 0, None
    with temporary.open("wb") as file:
        for result in results:
            file.write(result.tokens)
            lengths.append(result.lengths)
            hashes.append(result.hashes)
            skipped, following = skipped + len(result.skipped), result.unit.next
            for reason in result.skipped:
                print(f"skipped a record: {reason}")
            progress.add(int(result.lengths.sum()), result.unit.done)
            if len(lengths) == _UNITS_PER_SHARD:
                break
        file.flush()
        os.fsync(file.fileno())
    if following is None:
        temporary.unlink()
        return None
    ends = np.cumsum(np.concatenate(lengths), dtype=np.uint64).astype("<u8")
    index = ends.tobytes() + block_checksums(temporary.read_bytes()).tobytes()
    all_hashes = np.concatenate(hashes).astype("<u8").tobytes()
    entry = {
        "name": name,
        "documents": len(ends),
        "tokens": int(ends[-1]) if len(ends) else 0,
        "skipped": skipped,
        "index_checksum": xxhash.xxh3_64_hexdigest(index),
        "hash_checksum": xxhash.xxh3_64_hexdigest(all_hashes),
        "next": following,
    }
    temporary.rename(folder / f"{name}.bin")
    put(folder / f"{name}.idx", index)
    put(folder / f"{name}.hash", all_hashes)
    put(folder / f"{name}.json", json.dumps(entry).encode())
    return entry


class _Progress:
    """Share that is done and tokens/s: a line that moves on a terminal, one every ten seconds elsewhere."""

    def __init__(self, name: str) -> None:
        self._name, self._tokens = name, 0
        self._start = self._shown = time.monotonic()

    def add(self, tokens: int, done: float) -> None:
        self._tokens += tokens
        moves = sys.stdout.isatty()
        if time.monotonic() - self._shown >= (0.2 if moves else 10.0):
            self._shown = time.monotonic()
            self.say(f"{self._name}: {done:4.0%}, {self._tokens:,} tokens", end="" if moves else "\n")

    def say(self, text: str, end: str) -> None:
        rate = self._tokens / max(1e-9, time.monotonic() - self._start)
        start = "\r" if sys.stdout.isatty() else ""
        print(f"{start}{text}; {rate / 1e6:.2f} million tokens/s" + " " * 10 * bool(start), end=end, flush=True)
