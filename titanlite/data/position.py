"""Saving, comparing and restoring the data position of a run, and measuring its progress.

The position consists of `PackedDataset.mixture` and `PackedDataset.positions`.
"""

from __future__ import annotations

import logging
from typing import Any

from titanlite.config.errors import CheckpointError, UserError
from titanlite.config.job_diff import DataChanges
from titanlite.data.amounts import MAX_EPOCHS
from titanlite.data.packing import DocumentPosition, StreamPosition
from titanlite.data.sources.base import Source
from titanlite.data.stream import PackedDataset
from titanlite.runtime.logging import LOGGER_NAME

STATE_VERSION = 2
# Settings that determine the data order, and their names in messages.
_ORDER_SETTINGS = {
    "seed": "the seed of the data order",
    "seq_len": "training.seq_len",
    "packing": "dataset.packing",
    "holdout": "validation.holdout",
}


def save_position(data: PackedDataset) -> dict[str, Any]:
    """Return the data position as a JSON value of a few kilobytes, to save in a checkpoint."""
    sources = []
    for source, positions in zip(data.sources, data.positions, strict=True):
        # One list per stream: the 3 fields of `DocumentPosition`, and the offset.
        streams = [[*position.document, position.offset] for position in positions]
        sources.append({"name": source.name, "fingerprint": source.fingerprint, "streams": streams})
    return {
        "version": STATE_VERSION,
        "seed": data.seed,
        "seq_len": data.seq_len,
        "packing": data.packing,
        "holdout": data.documents.holdout,
        "tokenizer": data.documents.tokenizer.fingerprint,
        "schedule": data.mixture.state_dict(),
        "sources": sources,
    }


def compare_position(saved: dict[str, Any], data: PackedDataset) -> DataChanges:
    """Compare a saved data position with the data of a run, to check whether it can resume.

    Args:
        saved: A value that `save_position` returned.
        data: Data of the run.

    Returns:
        Two lists of messages: differences that always prevent resuming, such as a different
        seq_len, and sources with changed contents, which dataset.on_change can allow.

    Raises:
        CheckpointError: If `saved` has a version that this function cannot read.
    """
    version = saved["version"]
    if version != STATE_VERSION:
        raise CheckpointError(
            f"The data state has version {version}; this version of titanlite reads version "
            f"{STATE_VERSION}."
        )

    current = save_position(data)
    incompatible = [
        f"{name} was {saved[key]} and is now {current[key]}"
        for key, name in _ORDER_SETTINGS.items()
        if saved[key] != current[key]
    ]

    num_before = len(saved["sources"])
    num_now = len(current["sources"])
    if num_before != num_now:
        incompatible.append(f"there were {num_before} sources and are now {num_now}")
        return incompatible, []

    changed = []
    # A different holdout, which is already reported, can change the number of streams.
    same_holdout = saved["holdout"] == current["holdout"]
    for before, now in zip(saved["sources"], current["sources"], strict=True):
        num_before = len(before["streams"])
        num_now = len(now["streams"])
        if num_before != num_now and same_holdout:
            incompatible.append(
                f"the source {before['name']} was read in {num_before} streams and {now['name']} "
                f"is read in {num_now}, because dataset.max_epochs or the number of "
                "documents or files has changed"
            )
        elif before["fingerprint"] != now["fingerprint"]:
            changed.append(
                f"the source {before['name']} is now {now['name']}, with changed files, contents, "
                "text_column or loss_mask_column"
            )
    return incompatible, changed


def restore_position(saved: dict[str, Any], data: PackedDataset, on_change: str) -> None:
    """Move `data` to a saved position.

    Args:
        saved: A value that `save_position` returned.
        data: Data of the run.
        on_change: Value of dataset.on_change, "error" or "warn". With "warn", a source with changed
            contents continues at the beginning of the document or part (such as a file) that was
            being read. The warning is logged when the checkpoint is loaded.

    Raises:
        UserError: If the settings or the tokenizer differ, or a source has changed and `on_change`
            is "error".
        CheckpointError: If `saved` has a version that this function cannot read.
    """
    _check_resumable(saved, data, on_change)
    data.mixture.load_state_dict(saved["schedule"])
    positions = []
    sources = zip(saved["sources"], data.sources, data.mixture.counts, strict=True)
    for saved_source, source, num_sequences in sources:
        positions.append(_restore_source(saved_source, source, num_sequences))
    data.positions = positions


def _check_resumable(saved: dict[str, Any], data: PackedDataset, on_change: str) -> None:
    """Check that a run with the sources `data` can resume from a saved position.

    Raises:
        UserError: If the settings or the tokenizer differ, or a source has changed and `on_change`
            is "error".
        CheckpointError: If `saved` has a version that this function cannot read.
    """
    incompatible, changed = compare_position(saved, data)
    if not data.documents.tokenizer.is_known_as(saved["tokenizer"]):
        incompatible.append("the tokenizer has changed")
    # If any difference is an error, list all of them.
    if incompatible or (changed and on_change == "error"):
        differences = "; ".join([*incompatible, *changed])
        raise UserError(f"Cannot resume from the checkpoint's data position: {differences}")


def _restore_source(
    saved: dict[str, Any], source: Source, num_sequences: int
) -> list[StreamPosition]:
    """Return the position at which each stream of a source continues when a run resumes.

    The documents are divided into streams. If the contents of the source have changed, each stream
    continues at the beginning of the document or part (such as a file) that it was reading.

    Args:
        saved: Entry of the source in the saved position.
        source: The source.
        num_sequences: Number of sequences that were read from the source.
    """
    positions = _restore_streams(saved["streams"], num_sequences)
    if saved["fingerprint"] == source.fingerprint:
        return positions
    return [_move_to_beginning(position) for position in positions]


def _restore_streams(saved: list[list[int]], num_sequences: int) -> list[StreamPosition]:
    """Convert the saved stream positions of a source to `StreamPosition` objects.

    Args:
        saved: For each stream, the 3 fields of `DocumentPosition`, and the offset.
        num_sequences: Number of sequences that all streams together have yielded.
    """
    positions = []
    for stream, (*document_fields, offset) in enumerate(saved):
        # Streams take turns. For example, stream 1 of 4 has yielded the sequences 1, 5 and 9 of 10.
        num_yielded = len(range(stream, num_sequences, len(saved)))
        positions.append(StreamPosition(num_yielded, DocumentPosition(*document_fields), offset))
    return positions


def _move_to_beginning(position: StreamPosition) -> StreamPosition:
    """Return the beginning of the document or part (such as a file) that contains a position."""
    beginning = DocumentPosition(position.document.index_in_stream)
    return StreamPosition(position.num_sequences, beginning)


def measure_progress(data: PackedDataset) -> dict[str, dict[str, float]]:
    """Return how many tokens and epochs of each source have been read, for the metrics.

    For example, the result is {"source_tokens": {"c4": 4096}, "source_epochs": {"c4": 0.1}}.
    """
    # Duplicate names get an index, such as "c4 (1)".
    names = [source.name for source in data.sources]
    unique_names = [
        name if names.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(names)
    ]
    tokens = [count * data.seq_len for count in data.mixture.counts]
    return {
        "source_tokens": dict(zip(unique_names, tokens, strict=True)),
        "source_epochs": dict(zip(unique_names, _count_epochs(data), strict=True)),
    }


def _count_epochs(data: PackedDataset) -> list[float]:
    """Return how many epochs of each source have been read since step 1, such as 1.5.

    Sequential sources are counted in parts, such as files, and other sources in documents.
    """
    epochs = []
    for source, positions in zip(data.sources, data.positions, strict=True):
        # Each stream reads some of the documents, so add up how many each one has read.
        num_read = sum(position.document.index_in_stream for position in positions)
        epochs.append(num_read / source.num_units)
    return epochs


def warn_of_repetition(data: PackedDataset, warned: set[int]) -> None:
    """Log a warning for each source that has been read `MAX_EPOCHS` (4) times.

    Sources with max_epochs are skipped, because their repetition is intended.

    Args:
        data: Data of the run.
        warned: Indices of sources to skip because a warning was already logged. The function adds
            the index of each source that it warns about.
    """
    for i, epochs in enumerate(_count_epochs(data)):
        if epochs >= MAX_EPOCHS and not data.specs[i].max_epochs and i not in warned:
            warned.add(i)
            logging.getLogger(LOGGER_NAME).warning(
                f"{data.sources[i].name} has been read {epochs:.1f} times. More epochs add little. "
                "Add data, or set dataset.max_epochs to end a run after so many epochs."
            )
