"""Tokenizing the sources of a job in advance.

Invariant: The bytes that are written depend only on the sources and the tokenizer, never on the
number of threads or on interruptions.

Threads tokenize units of about 4 MiB of text, because tokenizers release Python's global
interpreter lock. The units are written in order. `prepare.json` lists the complete shards, so an
interrupted run can be resumed; `manifest.json` replaces it at the end.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from pydantic import RootModel

from titanlite.config.errors import UserError
from titanlite.config.files import (
    check_new_folder,
    make_folder,
    parse_json,
    read_file,
    write_atomically,
)
from titanlite.config.run import Run
from titanlite.config.schema import TextSource
from titanlite.data.documents import DocumentTokenizer, open_sources, source_specs
from titanlite.data.sources.base import Source
from titanlite.data.sources.records import BadRecord, Record, group_records, hash_text
from titanlite.data.sources.shards import (
    DAMAGED_MANIFEST,
    FORMAT,
    MAX_MANIFEST_BYTES,
    ShardManifest,
    block_checksums,
)
from titanlite.data.tokenizer import Tokenizer, load_tokenizer

_UNIT_CHARS = 1 << 22
_UNIT_DOCUMENTS = 4096
# Shards of about 256 MiB of text need few files, and little work is lost if the process is killed.
_UNITS_PER_SHARD = 64


class _TokenizedUnit(NamedTuple):
    """Consecutive documents of a source after tokenization.

    One thread tokenizes a unit of about 4 MiB of text. Several units form a shard.
    """

    tokens: bytes
    lengths: list[int]
    """Number of tokens of each document, 0 if it was skipped."""
    hashes: list[int]
    """Hash (`hash_text`) of each document, 0 if it was skipped."""
    skipped: list[str]
    """Reasons why documents were skipped."""


def prepare(run: Run, out: str | Path, workers: int) -> list[Path]:
    """Tokenize the sources in [dataset] in advance, and write the tokens as shards.

    If an earlier call was interrupted, its complete shards are kept, and tokenization continues
    after them. Folders that are already complete are not changed.

    Args:
        run: The run whose [dataset] is tokenized.
        out: Output folder, with a subfolder for each source of a mixture.
        workers: Number of threads that tokenize.

    Returns:
        The folders of the sources.

    Raises:
        UserError: If a source cannot be read, or `out` cannot be written or contains other files.
    """
    out = Path(out)
    dataset = run.job.dataset
    specs = source_specs(dataset)
    _check_preparable(specs)
    tokenizer = load_tokenizer(run.tokenizer_path, run.job)
    documents = DocumentTokenizer(tokenizer, skip_bad=dataset.on_bad_record == "skip")
    folders = [out]
    if len(specs) > 1:
        folders = [out / f"{i}-{spec.source}" for i, spec in enumerate(specs)]

    # Open all sources first, so that an error is reported before hours of work on one of them. With
    # seq_len=0, a source needs only one token, because shards can be shorter than a sequence.
    sources = open_sources(dataset, documents, seq_len=0, job=run.job)
    for source, folder in zip(sources, folders, strict=True):
        try:
            _prepare_source(source, folder, documents, workers)
        except OSError as error:
            raise UserError(
                f"cannot write shards to {folder}: {error}. "
                "Free some space, or choose another --out."
            ) from None
    return folders


def _check_preparable(specs: Iterable[TextSource]) -> None:
    """Check that the sources can be tokenized in advance.

    Raises:
        UserError: If a source is already tokenized, or has a loss mask.
    """
    for spec in specs:
        if spec.source in ("shards", "tokens"):
            raise UserError(f"dataset.source is {spec.source}: its text is already tokenized")
        if spec.loss_mask_column is not None:
            raise UserError("dataset.loss_mask_column: prepared shards cannot contain loss masks")


def _prepare_source(
    source: Source, folder: Path, documents: DocumentTokenizer, workers: int
) -> None:
    """Tokenize one source, and write its shards and manifest.

    If an earlier call was interrupted, continue after its last complete shard.

    Args:
        source: The opened source.
        folder: Output folder of this source.
        documents: Tokenizes the records.
        workers: Number of threads that tokenize.

    Raises:
        UserError: If `folder` contains other files, or shards of a different source or tokenizer.
    """
    tokenizer = documents.tokenizer
    header = {
        "format": FORMAT,
        "source_fingerprint": source.fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "tokenizer_path": tokenizer.path.name,
        "dtype": "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32",
        "on_bad_record": "skip" if documents.skip_bad else "error",
    }
    make_folder(folder)
    manifest = folder / "manifest.json"
    progress = folder / "prepare.json"
    if manifest.exists():
        _read_shards(manifest, header, tokenizer)
        print(f"{folder}: already complete")
        return

    shards: list[dict[str, Any]] = []
    if progress.exists():
        shards = _read_shards(progress, header, tokenizer)
    else:
        check_new_folder(folder)
        write_atomically(progress, json.dumps({**header, "shards": []}).encode())

    records = source.documents(sum(shard["documents"] for shard in shards))
    units = _tokenize_in_order(records, documents, np.dtype(header["dtype"]), workers)
    while group := list(islice(units, _UNITS_PER_SHARD)):
        shard_content = _join(group)
        shards.append(_write_shard(folder, len(shards), shard_content))
        for reason in shard_content.skipped:
            print(f"Skipped a record: {reason}")
        write_atomically(progress, json.dumps({**header, "shards": shards}).encode())
        num_tokens = sum(shard["tokens"] for shard in shards)
        print(f"{folder}: shards: {len(shards)}, tokens: {num_tokens:,}", flush=True)

    write_atomically(manifest, json.dumps({**header, "shards": shards}, indent=1).encode())
    progress.unlink()
    counts = [
        f"{key}: {sum(shard[key] for shard in shards):,}"
        for key in ("documents", "tokens", "skipped")
    ]
    print(f"{folder}: complete, {', '.join(counts)}")


def _read_shards(path: Path, header: dict[str, Any], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the shards that a manifest lists, each as a dictionary with its name and sizes.

    Args:
        path: manifest.json of complete shards, or prepare.json of an interrupted run.
        header: Required values of manifest fields, such as the fingerprints of the source and the
            tokenizer.
        tokenizer: Tokenizer of the job.

    Raises:
        UserError: If the manifest is damaged, or a field differs from `header`.
    """
    content = read_file(path, MAX_MANIFEST_BYTES)
    # Compare the header first. If the shards have another format, this error is more helpful than a
    # list of invalid fields.
    fields = parse_json(path, content, RootModel[dict[str, Any]]).root
    _check_header(path, fields, header, tokenizer)
    parse_json(path, content, ShardManifest, DAMAGED_MANIFEST)
    return fields["shards"]


def _check_header(
    path: Path, manifest: dict[str, Any], header: dict[str, Any], tokenizer: Tokenizer
) -> None:
    """Check that existing shards were made with the source, tokenizer and settings of this job.

    For the tokenizer, also accept the fingerprint that an older version of titanlite computed.

    Args:
        path: Path of the manifest, for the error message.
        manifest: Fields of the manifest.
        header: Required values of manifest fields.
        tokenizer: Tokenizer of the job.

    Raises:
        UserError: If a field of the manifest differs from `header`.
    """
    differences = []
    for key, value in header.items():
        is_same = manifest.get(key) == value
        if key == "tokenizer":
            is_same = tokenizer.is_known_as(manifest.get(key, ""))
        if not is_same:
            differences.append(f"another {key.replace('_', ' ')}")
    if differences:
        raise UserError(
            f"{path.parent} contains shards made with {', '.join(differences)}. "
            "Choose another --out, or remove the folder."
        )


def _tokenize_in_order(
    records: Iterator[Record], documents: DocumentTokenizer, dtype: np.dtype, workers: int
) -> Iterator[_TokenizedUnit]:
    """Tokenize documents in `workers` threads, and yield the results in order.

    Each thread tokenizes one unit at a time: consecutive documents, up to 4096 of them or about 4
    million characters. The units do not depend on the number of threads. At most two units per
    thread are in memory.
    """
    tokenize = partial(_tokenize, documents, dtype.newbyteorder("<"))
    units = group_records(records, _UNIT_DOCUMENTS, _UNIT_CHARS)
    with ThreadPoolExecutor(workers) as pool:
        futures = (pool.submit(tokenize, unit) for unit in units)
        pending = deque(islice(futures, 2 * workers))
        while pending:
            yield pending.popleft().result()
            pending.extend(islice(futures, 1))


def _tokenize(
    documents: DocumentTokenizer, dtype: np.dtype, records: list[Record]
) -> _TokenizedUnit:
    """Tokenize the records of a unit, and hash their texts."""
    tokens = [documents.encode(record) for record in records]
    hashes = [hash_text(record) if isinstance(record, str) else 0 for record in records]
    lengths = [len(document) for document in tokens]
    skipped = [str(record) for record in records if isinstance(record, BadRecord)]
    return _TokenizedUnit(np.concatenate(tokens).astype(dtype).tobytes(), lengths, hashes, skipped)


def _join(units: list[_TokenizedUnit]) -> _TokenizedUnit:
    """Concatenate the documents of several units into one unit, which becomes a shard."""
    lengths: list[int] = []
    hashes: list[int] = []
    skipped: list[str] = []
    for unit in units:
        lengths += unit.lengths
        hashes += unit.hashes
        skipped += unit.skipped
    return _TokenizedUnit(b"".join(unit.tokens for unit in units), lengths, hashes, skipped)


def _write_shard(folder: Path, number: int, shard: _TokenizedUnit) -> dict[str, Any]:
    """Write the .bin, .idx and .hash files of a shard, and flush them to disk.

    .bin contains the tokens. .idx contains the end of each document in tokens, and then a checksum
    for each block of .bin. .hash contains the hash of each document.

    Args:
        folder: Output folder of the source.
        number: Index of the shard, which is part of the file names.
        shard: The tokenized documents of the shard.

    Returns:
        The entry of the shard in the manifest, with its name, sizes and checksums.
    """
    name = f"shard-{number:05d}"
    ends = np.cumsum(shard.lengths, dtype="<u8")  # index of the token after each document
    index_bytes = ends.tobytes() + block_checksums(shard.tokens).tobytes()
    hash_bytes = np.array(shard.hashes, dtype="<u8").tobytes()
    write_atomically(folder / f"{name}.bin", shard.tokens)
    write_atomically(folder / f"{name}.idx", index_bytes)
    write_atomically(folder / f"{name}.hash", hash_bytes)
    os.sync()  # files and folder must be on disk before the manifest that lists the shard
    return {
        "name": name,
        "documents": len(shard.lengths),
        "tokens": sum(shard.lengths),
        "skipped": len(shard.skipped),
        "index_checksum": xxhash.xxh3_64_hexdigest(index_bytes),
        "hash_checksum": xxhash.xxh3_64_hexdigest(hash_bytes),
    }
