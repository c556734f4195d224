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
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from titanlite.config.errors import UserError
from titanlite.config.files import make_folder, put
from titanlite.config.run import Run
from titanlite.data.sources.base import RandomAccess, Record, Sequential, Source, text_hash
from titanlite.data.sources.shards import FORMAT, Header, Shards, block_checksums
from titanlite.data.stream import DocumentTokenizer, open_sources, source_specs
from titanlite.data.tokenizer import load_tokenizer

_UNIT_CHARS = 1 << 22
_UNIT_DOCUMENTS = 4096
_UNITS_PER_SHARD = 64  # 256 MiB of text: large enough for few files, small enough to lose little when killed

_Unit = tuple[list[Record], list[int]]
"""Documents that are tokenized together, and where the unit after them begins: part and document."""


class _Tokenized(NamedTuple):
    tokens: bytes
    lengths: list[int]
    """Tokens of each document."""
    hashes: list[int]
    """`text_hash` of each text; 0 for a record that was skipped."""
    skipped: list[str]
    following: list[int]


def prepare(run: Run, out: Path, workers: int) -> list[Path]:
    """Write the shards of the source of `run` to `out`. Each source of a mix gets a folder of its own in `out`. Shards
    of an interrupted run are kept, and a complete folder is left as it is. Returns the folders.

    Args:
        workers: Number of threads that tokenize.

    Raises:
        UserError: a source cannot be read, or `out` holds something else.
    """
    dataset, skip_bad = run.job.dataset, run.job.dataset.on_bad_record == "skip"
    specs, documents = source_specs(dataset), DocumentTokenizer(load_tokenizer(run.tokenizer_path), skip_bad=skip_bad)
    for spec in specs:
        if spec.source == "shards":
            raise UserError(f"dataset.path = {spec.path!r} holds prepared shards already")
    folders = [out] if len(specs) == 1 else [out / f"{i}-{spec.source}" for i, spec in enumerate(specs)]
    sources = open_sources(dataset, documents, 0)  # all of them, before hours of work on one
    for source, folder in zip(sources, folders, strict=True):
        try:
            _prepare_source(source, folder, documents, workers)
        except OSError as error:
            raise UserError(f"cannot write shards to {folder}: {error}. Make room, or name another --out.") from None
    return folders


def _prepare_source(source: Source, folder: Path, documents: DocumentTokenizer, workers: int) -> None:
    tokenizer, begun = documents.tokenizer, time.monotonic()
    header = Header(
        format=FORMAT,
        source=source.name,
        source_fingerprint=source.fingerprint,
        tokenizer=tokenizer.fingerprint,
        tokenizer_path=tokenizer.path.name,
        vocab_size=tokenizer.vocab_size,
        dtype="uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32",
        on_bad_record="skip" if documents.skip_bad else "error",
    ).model_dump()
    if (shards := _resume(folder, header)) is None:
        print(f"{folder}: complete already, {Shards(source.name, folder).describe()}")
        return
    if shards:
        print(f"{folder}: going on after {len(shards)} shards of an interrupted run")
    new, tokens = 0, 0
    with ThreadPoolExecutor(workers) as pool:
        units = _units(source, *(shards[-1]["next"] if shards else (0, 0)))
        dtype = np.dtype(header["dtype"]).newbyteorder("<")
        results = _in_order(pool, units, 2 * workers, documents, dtype)
        while some := list(islice(results, _UNITS_PER_SHARD)):
            shards.append(_write_shard(folder, len(shards), some))
            new, tokens = new + 1, tokens + shards[-1]["tokens"]
            rate = tokens / 1e6 / (time.monotonic() - begun)
            print(f"{folder}: {len(shards)} shards, {new} of them new, {rate:.2f} million tokens/s", flush=True)
    if not sum(shard["tokens"] for shard in shards):
        raise UserError(f"{source.name} is empty: no document in it")
    skipped = sum(shard["skipped"] for shard in shards)
    entries = [{key: value for key, value in shard.items() if key != "next"} for shard in shards]
    put(folder / "manifest.json", json.dumps({**header, "shards": entries}, indent=1).encode())
    for file in [folder / "prepare.json", *folder.glob("shard-*.json")]:
        file.unlink()
    bad = f", {skipped:,} records skipped" if skipped else ""
    print(f"{folder}: {Shards(source.name, folder).describe()}{bad}")


def _resume(folder: Path, header: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Entries of the shards that are in `folder`; None if the folder is complete."""
    make_folder(folder)
    done, begun = folder / "manifest.json", folder / "prepare.json"
    there = next((file for file in (done, begun) if file.is_file()), None)
    if there is None:
        if any(folder.iterdir()):
            raise UserError(f"{folder} is not empty and holds no shards. Name another --out.")
        put(begun, json.dumps(header).encode())
        return []
    try:
        found = json.loads(there.read_bytes())
        wrong = [key for key in header if found.get(key) != header[key]]
    except (ValueError, AttributeError):
        raise UserError(f"{there} is not one of prepared shards. Name another --out.") from None
    if wrong:
        other = ", another ".join(wrong).replace("_", " ")
        raise UserError(f"{folder} holds shards made with another {other}. Name another --out, or remove the folder.")
    return None if there == done else [json.loads(entry.read_bytes()) for entry in sorted(folder.glob("shard-*.json"))]


def _units(source: Source, part: int, first: int) -> Iterator[_Unit]:
    """The units from document `first` of `part` on. What is read in any order has one part."""
    for number in range(part, source.num_units if isinstance(source, Sequential) else 1):
        start, records, size = first if number == part else 0, list[Record](), 0
        if isinstance(source, RandomAccess):
            rest: Iterator[Record | None] = map(source.record, range(start, len(source)))
        else:
            assert isinstance(source, Sequential)
            rest = islice(source.read(number, start), start, None)
        for following, record in enumerate(rest, start + 1):
            assert record is not None
            records.append(record)
            size += len(record) if isinstance(record, str) else 0
            if size >= _UNIT_CHARS or len(records) >= _UNIT_DOCUMENTS:
                yield records, [number, following]
                records, size = [], 0
        if records:
            yield records, [number + 1, 0]


def _in_order(
    pool: ThreadPoolExecutor, units: Iterator[_Unit], most: int, documents: DocumentTokenizer, dtype: np.dtype
) -> Iterator[_Tokenized]:
    """The units as tokens. At most `most` are in memory."""
    waiting: deque[Future[_Tokenized]] = deque()
    for unit in units:
        waiting.append(pool.submit(_tokenize, documents, dtype, *unit))
        if len(waiting) >= most:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _tokenize(documents: DocumentTokenizer, dtype: np.dtype, records: list[Record], following: list[int]) -> _Tokenized:
    own = DocumentTokenizer(documents.tokenizer, skip_bad=documents.skip_bad)  # with a list of what it skips
    tokens = [own.encode(record) for record in records]
    hashes = [text_hash(record) if isinstance(record, str) else 0 for record in records]
    raw = np.concatenate(tokens).astype(dtype).tobytes()
    return _Tokenized(raw, list(map(len, tokens)), hashes, own.skipped, following)


def _write_shard(folder: Path, number: int, units: list[_Tokenized]) -> dict[str, Any]:
    """Returns the shard's entry in the manifest."""
    path = folder / f"shard-{number:05d}.bin"
    raw = b"".join(unit.tokens for unit in units)
    lengths = [length for unit in units for length in unit.lengths]
    index = np.cumsum(lengths, dtype="<u8").tobytes() + block_checksums(raw).tobytes()
    hashes = np.array([value for unit in units for value in unit.hashes], dtype="<u8").tobytes()
    skipped = [reason for unit in units for reason in unit.skipped]
    for reason in skipped:
        print(f"skipped a record: {reason}")
    entry = {
        "name": path.stem,
        "documents": len(lengths),
        "tokens": sum(lengths),
        "skipped": len(skipped),
        "index_checksum": xxhash.xxh3_64_hexdigest(index),
        "hash_checksum": xxhash.xxh3_64_hexdigest(hashes),
        "next": units[-1].following,
    }
    for suffix, content in ((".bin", raw), (".idx", index), (".hash", hashes)):
        put(path.with_suffix(suffix), content)
    os.sync()  # they are on the disk before the file that says so
    put(path.with_suffix(".json"), json.dumps(entry).encode())
    return entry
