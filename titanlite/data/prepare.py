"""Tokenize the sources of a job once, into shards.

Invariant: the bytes written depend on the sources and the tokenizer alone. The number of threads and interruptions
change nothing.

Threads tokenize units of about 4 MiB of text, which are written in order; the tokenizers let go of Python's lock while
they work. `prepare.json` names the shards that are complete, so that a killed run goes on after them. In the end
`manifest.json` does.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from pydantic import RootModel

from titanlite.config.errors import UserError
from titanlite.config.files import make_folder, parse_json, put, read_file
from titanlite.config.run import Run
from titanlite.data.sources.base import Record, Source, text_hash
from titanlite.data.sources.shards import FORMAT, MOST_BYTES, Manifest, block_checksums
from titanlite.data.stream import DocumentTokenizer, open_sources, source_specs
from titanlite.data.tokenizer import Tokenizer, load_tokenizer

_UNIT_CHARS = 1 << 22
_UNIT_DOCUMENTS = 4096
_UNITS_PER_SHARD = 64  # 256 MiB of text: large enough for few files, small enough to lose little when killed

_Tokenized = tuple[bytes, list[int], list[int], list[str]]
"""Tokens of a unit; the length and the `text_hash` of each document (0 for one that was skipped); why documents were
skipped."""


def prepare(run: Run, out: Path, workers: int) -> list[Path]:
    """Write the shards of the source of `run` to `out`. Each source of a mix gets a folder of its own in `out`. Shards
    of an interrupted run are kept, and a complete folder is left as it is. Returns the folders.

    Args:
        workers: Number of threads that tokenize.

    Raises:
        UserError: a source cannot be read, or `out` holds something else.
    """
    dataset, skip_bad = run.job.dataset, run.job.dataset.on_bad_record == "skip"
    tokenizer, specs = load_tokenizer(run.tokenizer_path, run.job), source_specs(dataset)
    documents = DocumentTokenizer(tokenizer, skip_bad=skip_bad)
    if any(spec.source == "shards" for spec in specs):
        raise UserError("dataset.source is shards: its text is prepared already")
    folders = [out] if len(specs) == 1 else [out / f"{i}-{spec.source}" for i, spec in enumerate(specs)]
    sources = open_sources(dataset, documents, 0, run.job)  # all of them, before hours of work on one
    for source, folder in zip(sources, folders, strict=True):
        try:
            _prepare_source(source, folder, documents, workers)
        except OSError as error:
            raise UserError(f"cannot write shards to {folder}: {error}. Make room, or name another --out.") from None
    return folders


def _prepare_source(source: Source, folder: Path, documents: DocumentTokenizer, workers: int) -> None:
    tokenizer = documents.tokenizer
    header = {
        "format": FORMAT,
        "source_fingerprint": source.fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "tokenizer_path": tokenizer.path.name,
        "dtype": "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32",
        "on_bad_record": "skip" if documents.skip_bad else "error",
    }
    done, begun = make_folder(folder) / "manifest.json", folder / "prepare.json"
    shards = _resume(done if done.exists() else begun, header, tokenizer)
    if done.exists():
        print(f"{folder}: complete already")
        return
    if not begun.exists():
        if any(folder.iterdir()):
            raise UserError(f"{folder} is not empty and holds no prepared shards. Name another --out.")
        put(begun, json.dumps({**header, "shards": []}).encode())
    units = _units(source.documents(sum(shard["documents"] for shard in shards)))
    with ThreadPoolExecutor(workers) as pool:
        tokenize = partial(_tokenize, documents, np.dtype(header["dtype"]).newbyteorder("<"))
        results = _in_order((pool.submit(tokenize, unit) for unit in units), 2 * workers)
        while some := list(islice(results, _UNITS_PER_SHARD)):
            shards.append(_write_shard(folder, len(shards), some))
            put(begun, json.dumps({**header, "shards": shards}).encode())
            print(f"{folder}: shards: {len(shards)}, tokens: {sum(shard['tokens'] for shard in shards):,}", flush=True)
    put(done, json.dumps({**header, "shards": shards}, indent=1).encode())
    begun.unlink()
    counts = (f"{key}: {sum(shard[key] for shard in shards):,}" for key in ("documents", "tokens", "skipped"))
    print(f"{folder}: complete, {', '.join(counts)}")


def _resume(path: Path, header: dict[str, Any], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The shards that the file `path` names; none if it is not there."""
    if not path.exists():
        return []
    raw = read_file(path, MOST_BYTES)
    found = parse_json(path, raw, RootModel[dict[str, Any]]).root
    if tokenizer.is_known_as(found.get("tokenizer", "")):  # an older version may have written another fingerprint
        found["tokenizer"] = tokenizer.fingerprint
    if wrong := [key.replace("_", " ") for key in header if found.get(key) != header[key]]:
        made = f"{path.parent} holds shards made with another {', another '.join(wrong)}"
        raise UserError(f"{made}. Name another --out, or remove the folder.")
    parse_json(path, raw, Manifest, "what titanlite prepare wrote; it is damaged")
    return list(found["shards"])


def _units(documents: Iterator[Record]) -> Iterator[list[Record]]:
    """Documents that are tokenized together."""
    unit, size = list[Record](), 0
    for record in documents:
        unit.append(record)
        size += len(record) if isinstance(record, str) else 0
        if size >= _UNIT_CHARS or len(unit) >= _UNIT_DOCUMENTS:
            yield unit
            unit, size = [], 0
    if unit:
        yield unit


def _in_order(futures: Iterator[Future[_Tokenized]], most: int) -> Iterator[_Tokenized]:
    """What they give, in their order. At most `most` are begun before the first of them is taken."""
    waiting = deque(islice(futures, most))
    while waiting:
        yield waiting.popleft().result()
        waiting.extend(islice(futures, 1))


def _tokenize(documents: DocumentTokenizer, dtype: np.dtype, records: list[Record]) -> _Tokenized:
    own = DocumentTokenizer(documents.tokenizer, skip_bad=documents.skip_bad)  # with a list of what it skips
    tokens = [own.encode(record) for record in records]
    hashes = [text_hash(record) if isinstance(record, str) else 0 for record in records]
    return np.concatenate(tokens).astype(dtype).tobytes(), list(map(len, tokens)), hashes, own.skipped


def _write_shard(folder: Path, number: int, units: list[_Tokenized]) -> dict[str, Any]:
    """Returns the shard's entry in the manifest."""
    raws, *lists = zip(*units, strict=True)
    raw, (lengths, hashes, skipped) = b"".join(raws), (list(chain.from_iterable(each)) for each in lists)
    index = np.cumsum(lengths, dtype="<u8").tobytes() + block_checksums(raw).tobytes()
    hashed = np.array(hashes, dtype="<u8").tobytes()
    name = f"shard-{number:05d}"
    for suffix, content in ((".bin", raw), (".idx", index), (".hash", hashed)):
        put(folder / f"{name}{suffix}", content)
    os.sync()  # they are on the disk before the file that says so
    for reason in skipped:
        print(f"skipped a record: {reason}")
    sums = {"index_checksum": xxhash.xxh3_64_hexdigest(index), "hash_checksum": xxhash.xxh3_64_hexdigest(hashed)}
    return {"name": name, "documents": len(lengths), "tokens": sum(lengths), "skipped": len(skipped), **sums}
