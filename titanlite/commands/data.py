"""`titanlite prepare`, `data show` and `tokenizer train`."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveInt

from titanlite.config.errors import UserError, format_count, printable
from titanlite.config.mistakes import format_value
from titanlite.config.options import OptionPath, OptionRanks, Options, parse_options_and_job
from titanlite.config.run import Run
from titanlite.data.packing import PackedSequence, remove_marks
from titanlite.data.sources.base import Source
from titanlite.data.stream import OutOfData, PackedDataset, SequenceReader, open_training_data
from titanlite.data.tokenizer import Tokenizer, load_tokenizer
from titanlite.load_run import load_data_job, load_run

_VOCABULARY_MULTIPLE = 128  # suits the matrix units of GPUs


class Prepare(Options):
    """Tokenize the data of a job once, and write shards for training."""

    out: OptionPath
    """Folder for the shards. To resume an interrupted `prepare`, pass the same folder."""
    workers: Annotated[PositiveInt, Field(le=1024)] | None = None
    """Number of tokenizer threads. Default: one per core."""


def run_prepare(argv: Sequence[str]) -> None:
    """Run `titanlite prepare`: tokenize the data of a job and write it as shards.

    Raises:
        UserError: If the job or an option is invalid, or the shards cannot be written.
    """
    options, words = parse_options_and_job(Prepare, argv, "prepare")
    run = load_run(words, world_size=1, trains=False)

    from titanlite.data.prepare import prepare

    num_threads = options.workers or os.cpu_count() or 1
    prepare(run, options.out, num_threads)


class Show(Options):
    """Print the sequences of one global batch: their documents and their text."""

    step: PositiveInt = 1
    """Number of the global batch, counted from 1."""
    sequence: NonNegativeInt | None = None
    """Index of a sequence in the batch, counted from 0. Default: all sequences."""
    world_size: OptionRanks = 1
    """Number of ranks of the run. It determines the batch size if training.global_batch_size is
    -1."""


def run_data_show(argv: Sequence[str]) -> None:
    """Run `titanlite data show`: print the documents and the text of one global batch.

    Args:
        argv: Arguments after `titanlite data`. The word "show" is optional.

    Raises:
        UserError: If the job or an option is invalid, or the data cannot be read.
    """
    argv = argv[1:] if argv[:1] == ["show"] else argv
    if any(word.partition("=")[0] == "--row" for word in argv):
        logging.getLogger("titanlite").warning("--row is now called --sequence.")
        argv = [re.sub("^--row(?==|$)", "--sequence", word) for word in argv]
    options, words = parse_options_and_job(Show, argv, "data show")
    run = load_run(words, options.world_size, trains=False)
    print(show_step(run, options.step, options.sequence))


def show_step(run: Run, step: int, index: int | None) -> str:
    """Format the documents, token ranges and decoded text of a global batch.

    Control characters are escaped. If the data was not prepared, late steps take a long time,
    because all text before the step is tokenized first.

    Args:
        run: The run.
        step: Number of the step that trains on the batch, counted from 1.
        index: Index of a sequence in the batch, counted from 0. None: all sequences.

    Raises:
        UserError: If the step or the sequence does not exist, or the data cannot be read.
    """
    if step > run.job.training.steps:
        raise UserError(
            f"--step {step}: the run has {run.job.training.steps} steps (training.steps)"
        )
    batch_size = run.batch_size(step - 1)
    if index is not None and index >= batch_size:
        raise UserError(f"--sequence {index}: the batch has the sequences 0 to {batch_size - 1}")

    tokenizer = load_tokenizer(run.tokenizer_path, run.job)
    data = open_training_data(run, tokenizer)
    sequences = _read_global_batch(data, step)
    if index is not None:
        sequences = [sequences[index]]

    lines = []
    for sequence in sequences:
        source = data.sources[sequence.source]
        lines.append(f"=== step {step}, sequence {sequence.index}, {source.name}")
        lines += _format_sequence(sequence, source, tokenizer)
    return printable("\n".join(lines))


def _read_global_batch(data: PackedDataset, step: int) -> list[PackedSequence]:
    """Read all sequences of the global batch that one training step uses.

    Args:
        data: Training data, positioned at the beginning of the run. It is advanced to the step.
        step: Number of the step, counted from 1.

    Raises:
        UserError: If the data ends before this step, or cannot be read.
    """
    # Advance past the batches of earlier steps. A reader starts with the next batch of the mixture.
    for _ in range(step - 1):
        data.mixture.next_batch()
    try:
        return SequenceReader(data).next_batch()
    except OutOfData as error:
        raise UserError(f"step {step} does not exist: {error}") from None


def _format_sequence(sequence: PackedSequence, source: Source, tokenizer: Tokenizer) -> list[str]:
    """Format the location, token range and text of each document segment in a packed sequence."""
    lines = []
    position = 0  # of the current segment in the sequence
    for part, document, offset, length in sequence.segments.tolist():
        # Describe which tokens of the document the segment contains.
        location = source.where(part, document)
        last_token = offset + length - 1
        lines.append(f"--- {location}, tokens {offset} to {last_token}")

        # Marked tokens do not count in the loss.
        segment = sequence.tokens[position : position + length]
        ids, is_ignored = remove_marks(segment)
        if is_ignored.any():
            lines.append(f"--- {is_ignored.sum()} of these tokens do not count in the loss")

        lines.append(tokenizer.decode(ids.tolist()))
        position += length

    # Padding follows the segments.
    num_padding = len(sequence.tokens) - position
    if num_padding:
        lines.append(f"--- {num_padding} tokens of padding")
    return lines


class Train(Options):
    """Train a byte-level BPE tokenizer with the Llama 3 split pattern on the data of a job."""

    vocab_size: Annotated[int, Field(gt=512, lt=1 << 24)]
    """Number of token IDs: 256 bytes, the tokens that BPE merges from them, and the 256 Llama 3
    special tokens."""
    out: OptionPath
    """Folder for tokenizer.json and tokenizer.model, which produce the same token IDs. Neither file
    may exist yet."""
    max_bytes: PositiveInt = 1_000_000_000
    """Maximum number of bytes of text to read. Text is read in random order if the source supports
    it, and from the sources of a mixture in proportion to their weights. Training needs several
    times as much memory."""


def run_tokenizer_train(argv: Sequence[str]) -> None:
    """Run `titanlite tokenizer train`: train a tokenizer on the data of a job.

    Args:
        argv: Arguments after `titanlite tokenizer`. The word "train" is optional.

    Raises:
        UserError: If an option is invalid, or the text cannot be read or is too small.
    """
    argv = argv[1:] if argv[:1] == ["train"] else argv
    options, job_words = parse_options_and_job(Train, argv, "tokenizer train")

    from titanlite.data.tokenizer_files import train_tokenizer

    job = load_data_job(job_words)
    vocab_size = options.vocab_size
    trained = train_tokenizer(job.dataset, options.out, vocab_size, options.max_bytes, job)

    documents = format_count(trained.documents, "document")
    report = (
        f"Wrote {trained.tiktoken} and {trained.json}: {vocab_size:,} ids, trained on {documents} "
        f"({trained.num_bytes:,} bytes, {trained.bytes_per_token:.2f} per token)."
    )
    print(printable(report))
    lines = format_job_lines(trained.json, vocab_size)
    print(printable(f"To use it, add these lines to a job file:\n\n{lines}"))


def format_job_lines(tokenizer_path: Path, vocab_size: int) -> str:
    """Return the lines of a job file that select a tokenizer and the vocabulary size of the model.

    Args:
        tokenizer_path: Path of the tokenizer file.
        vocab_size: Number of token IDs of the tokenizer. For the model, it is rounded up to a
            multiple of 128.
    """
    num_rows = math.ceil(vocab_size / _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    path = format_value(str(tokenizer_path))
    return f"[tokenizer]\npath = {path}\n\n[model]\nvocab_size = {num_rows}"
