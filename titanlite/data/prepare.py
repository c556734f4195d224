"""Tokenize the sources of a job once, into shards that training maps into memory.

Invariant: the bytes written depend on the sources and the tokenizer alone. The number of processes and interruptions
change nothing.

Background processes tokenize units of about 4 MiB of text, which are written in order. A shard gets its name by a
rename when it is complete. So a killed run leaves whole shards, and the next run goes on after them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from titanlite.config.errors import UserError
from titanlite.config.files import make_folder
from titanlite.config.run import Run
from titanlite.data.documents import Encoder
from titanlite.data.reader import open_sources, source_specs
from titanlite.data.sources.base import BadRecord, RandomAccess, Sequential, Source, text_hash
from titanlite.data.sources.files import FileSpans
from titanlite.data.sources.shards import FORMAT, Header, Shards, block_checksums
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.data.worker import WorkerProcess, receive, send

_UNIT_BYTES = 1 << 22
_UNIT_DOCUMENTS = 4096
_UNITS_PER_SHARD = 64  # 256 MiB of text: large enough for few files, small enough to lose little when killed


@dataclass(frozen=True)
class _Unit:
    """Documents that are tokenized together: a range of numbers if the source has random access, otherwise the records
    themselves."""

    start: int
    end: int
    records: list[str | BadRecord] | None
    next: list[int]
    """Where the unit after this one begins: document, or part and document."""
    done: float | None
    """Share of the source up to the end of this unit; None if unknown."""


def prepare(run: Run, out: Path, workers: int) -> list[Path]:
    """Write the shards of the source of `run` to `out`. Each source of a mix gets a folder of its own in `out`. Shards
    of an interrupted run are kept, and a complete folder is left as it is. Returns the folders.

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
    sources = open_sources(dataset, Encoder(tokenizer, skip_bad=skip_bad), 0)  # all, before hours of work on one
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
    start = shards[-1]["next"] if shards else [0, 0]
    with _Pool(source, tokenizer, skip_bad, workers, header["dtype"]) as pool:
        results = pool.run(_units(source, start))
        while shard := _write_shard(folder, len(shards), results, progress):
            shards.append(shard)
    if not sum(shard["tokens"] for shard in shards):
        raise UserError(f"{source.name} is empty: no document in it")
    for shard in shards:
        del shard["next"]
    _write_atomically(folder / "manifest.json", json.dumps({**header, "shards": shards}, indent=1).encode())
    for file in [folder / "prepare.json", *folder.glob("shard-*.json")]:
        file.unlink()
    progress.finish(f"{folder}: {Shards(source.name, folder).describe()}", sum(shard["skipped"] for shard in shards))


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
        _write_atomically(folder / "prepare.json", json.dumps(header).encode())
    entries = sorted(folder.glob("shard-*.json"))
    return [json.loads(entry.read_bytes()) for entry in entries]


def _units(source: Source, start: list[int]) -> Iterator[_Unit]:
    if isinstance(source, RandomAccess):
        total = len(source)
        if isinstance(source, FileSpans):
            numbers = np.cumsum(source.sizes()) // _UNIT_BYTES  # a unit: the documents that end in one such stretch
            ends = [*(np.flatnonzero(np.diff(numbers)) + 1).tolist(), total]
        else:
            ends = [*range(_UNIT_DOCUMENTS, total, _UNIT_DOCUMENTS), total]
        first = 0
        for end in ends:
            if first >= start[1]:
                yield _Unit(first, end, None, [0, end], end / total)
            first = end
        return
    assert isinstance(source, Sequential)
    for part in range(start[0], source.num_parts):
        number = start[1] if part == start[0] else 0
        records: list[str | BadRecord] = []
        size, done = 0, part / source.num_parts
        for record in source.read(part, number):
            records.append(record)
            number += 1
            size += len(record) if isinstance(record, str) else 0
            if size >= _UNIT_BYTES or len(records) >= _UNIT_DOCUMENTS:
                yield _Unit(0, 0, records, [part, number], done)
                records, size = [], 0
        if records:
            yield _Unit(0, 0, records, [part + 1, 0], done)


_Result = tuple[_Unit, bytes, np.ndarray, np.ndarray, list[str]]
"""A unit, its tokens, the lengths of its documents, the hashes of their texts, and why records were skipped."""


class _Pool:
    """Processes that tokenize units, each driven by a thread."""

    def __init__(self, source: Source, tokenizer: Tokenizer, skip_bad: bool, workers: int, dtype: str) -> None:
        setup = (source if isinstance(source, RandomAccess) else None, tokenizer.path, skip_bad, dtype)
        self._processes = [WorkerProcess("titanlite.data.prepare") for _ in range(workers)]
        self._idle = deque(self._processes)
        for process in self._processes:
            send(process.connection, setup)
        self._threads = ThreadPoolExecutor(workers)

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)

    def run(self, units: Iterator[_Unit]) -> Iterator[_Result]:
        """The units in order. At most twice as many as there are processes are in memory."""
        waiting: deque[Future[_Result]] = deque()
        for unit in units:
            waiting.append(self._threads.submit(self._tokenize, unit))
            if len(waiting) >= 2 * len(self._processes):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def _tokenize(self, unit: _Unit) -> _Result:
        process = self._idle.popleft()
        try:
            send(process.connection, (unit.start, unit.end, unit.records))
            answer = receive(process.connection)
        except (EOFError, OSError):
            raise process.error() from None
        self._idle.append(process)
        if isinstance(answer, Exception):
            raise answer
        return unit, *answer


def _write_shard(folder: Path, number: int, results: Iterator[Any], progress: _Progress) -> dict[str, Any] | None:
    """Write the next _UNITS_PER_SHARD units; returns the shard's entry in the manifest, None if no unit is left."""
    name = f"shard-{number:05d}"
    temporary = folder / f"{name}.bin.tmp"
    lengths: list[np.ndarray] = []
    hashes: list[np.ndarray] = []
    skipped, following = 0, None
    with temporary.open("wb") as file:
        for count, (unit, tokens, sizes, text_hashes, bad) in enumerate(results, 1):
            file.write(tokens)
            lengths.append(sizes)
            hashes.append(text_hashes)
            skipped, following = skipped + len(bad), unit.next
            for reason in bad:
                print(f"skipped a record: {reason}")
            progress.add(int(sizes.sum()), unit.done)
            if count == _UNITS_PER_SHARD:
                break
        file.flush()
        os.fsync(file.fileno())
    if following is None:
        temporary.unlink()
        return None
    ends = np.cumsum(np.concatenate(lengths), dtype=np.uint64).astype("<u8")
    raw = temporary.read_bytes()
    index = ends.tobytes() + block_checksums(raw).tobytes()
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
    _write_atomically(folder / f"{name}.idx", index)
    _write_atomically(folder / f"{name}.hash", all_hashes)
    _write_atomically(folder / f"{name}.json", json.dumps(entry).encode())
    return entry


def _write_atomically(path: Path, raw: bytes) -> None:
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


class _Progress:
    """Tokens, tokens/s and the time left: a line that moves on a terminal, one every ten seconds elsewhere."""

    def __init__(self, name: str) -> None:
        self._name, self._tokens = name, 0
        self._start = self._shown = time.monotonic()
        self._first: float | None = None  # share that was done when this process began

    def add(self, tokens: int, done: float | None) -> None:
        now = time.monotonic()
        self._tokens += tokens
        if self._first is None:
            self._first = done
        interval = 0.2 if sys.stdout.isatty() else 10.0
        if now - self._shown < interval:
            return
        self._shown = now
        left = ""
        if done is not None and self._first is not None and done > self._first:
            seconds = (now - self._start) * (1 - done) / (done - self._first)
            bar = "#" * int(20 * done)
            left = f"  [{bar:<20}] {done:4.0%}  {int(seconds) // 60}:{int(seconds) % 60:02d} left"
        begin, end = ("\r", "") if sys.stdout.isatty() else ("", "\n")
        print(f"{begin}{self._name}: {self._rate()}{left}   ", end=end, flush=True)

    def finish(self, text: str, skipped: int) -> None:
        bad = f", {skipped:,} records skipped" if skipped else ""
        start = "\r" if sys.stdout.isatty() else ""
        print(f"{start}{text}{bad}; {self._rate()}" + " " * 20)

    def _rate(self) -> str:
        rate = self._tokens / max(1e-9, time.monotonic() - self._start)
        return f"{self._tokens:,} tokens, {rate / 1e6:.2f} million/s"


def work(connection: Connection) -> None:
    """A background process: answer each unit with tokens, document lengths, text hashes and the number of records
    skipped."""
    source, path, skip_bad, dtype = receive(connection)
    tokenizer = load_tokenizer(path)
    while True:
        start, end, records = receive(connection)
        encoder = Encoder(tokenizer, skip_bad=skip_bad)
        if records is None:
            records = [source.record(i) for i in range(start, end)]
        try:
            tokens = [encoder.encode(record) for record in records]
        except UserError as error:
            send(connection, error)
            continue
        sizes = np.array([len(part) for part in tokens], dtype=np.int64)
        hashes = np.array([text_hash(r) if isinstance(r, str) else 0 for r in records], dtype=np.uint64)
        raw = np.concatenate([*tokens, np.empty(0, dtype=np.int32)]).astype(np.dtype(dtype).newbyteorder("<")).tobytes()
        send(connection, (raw, sizes, hashes, encoder.skipped))


if __name__ == "__main__":
    WorkerProcess.serve(work)
