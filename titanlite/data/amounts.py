"""Estimates of how much text a run has, how often the run reads it, and whether it is enough.

This module does not import torch, so `titanlite check` starts quickly.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from titanlite.config.run import Run
from titanlite.config.schema import TextSource
from titanlite.config.storage import as_url
from titanlite.data.documents import DocumentTokenizer, inspect_source, source_specs
from titanlite.data.hub import load_presets
from titanlite.data.mixture import source_shares
from titanlite.data.sources.base import File, RandomAccess, RemoteFile, Source
from titanlite.data.sources.files import find_files, has_compressed, open_quickly
from titanlite.data.sources.records import Record
from titanlite.data.tokenizer import Tokenizer

# Up to this many epochs, repeated text teaches almost as much as new text: "Scaling
# Data-Constrained Language Models" (Muennighoff et al., 2023).
MAX_EPOCHS = 4
_MIN_VOCABULARY_SHARE = 1 / 16  # warn if a tokenizer has at most this share of the embedding rows
_SAMPLE_DOCUMENTS = 64
_SAMPLE_BYTES = 1 << 16
_MAX_CHARACTERS = 1 << 22  # counting this many characters takes a tenth of a second


class SourceSize(NamedTuple):
    """Description and estimated size of a data source."""

    description: str
    """Name of the source and its number of documents, for messages."""
    tokens: int | None = None
    """Number of tokens, or None if it is unknown."""
    bytes_per_token: float | None = None
    """Average UTF-8 bytes per token, or None if it is unknown or the source has no text."""


def measure_source(source: Source, tokenizer: Tokenizer) -> SourceSize:
    """Estimate the number of tokens of a source from a sample of 64 documents.

    If the source was tokenized in advance, return its exact number of tokens instead. Log a warning
    if the tokenizer cannot represent some characters of the sample.
    """
    if source.num_tokens:
        return SourceSize(source.describe(), source.num_tokens)

    # Read and tokenize a sample.
    sample = _read_sample(source)
    texts = sample.texts
    _warn_of_lost_characters(source, tokenizer, texts)
    num_bytes = sum(len(text.encode()) for text in texts)
    num_text_tokens = sum(len(tokenizer.encode_array(text)) for text in texts)
    bytes_per_token = num_bytes / max(1, num_text_tokens)  # without BOS and EOS

    # Extrapolate to the whole source. Each document also has BOS and EOS.
    num_sample_tokens = num_text_tokens + 2 * len(texts)
    estimate = num_sample_tokens * sample.source_size // max(1, sample.size)
    if estimate == 0:  # for example, because the size of the source is unknown
        return SourceSize(source.describe(), None, bytes_per_token)
    return SourceSize(source.describe(), estimate, bytes_per_token)


class _Sample(NamedTuple):
    """Texts sampled from a source, with the sizes of the sample and the source.

    Both sizes have the same unit, which depends on the source: bytes, documents or characters.
    """

    texts: list[str]
    """Texts of the sampled documents, except unreadable and tokenized documents."""
    size: int
    """Size of the sample."""
    source_size: int
    """Size of the source, or 0 if it is unknown."""


def _read_sample(source: Source) -> _Sample:
    """Read up to 64 documents of a source: random ones if possible, otherwise the first ones."""
    if isinstance(source, RandomAccess):
        indices = source.sample()
        texts = _select_texts(map(source.record, indices))
        document_sizes = source.sizes()  # includes unreadable documents
        return _Sample(texts, int(document_sizes[indices].sum()), int(document_sizes.sum()))

    texts = _select_texts(islice(source, _SAMPLE_DOCUMENTS))
    if source.num_documents is not None:
        return _Sample(texts, len(texts), source.num_documents)
    return _Sample(texts, sum(len(text) for text in texts), _count_characters(source))


def _select_texts(records: Iterable[Record]) -> list[str]:
    """Return the records that are text, and drop unreadable and tokenized records."""
    return [record for record in records if isinstance(record, str)]


def _warn_of_lost_characters(source: Source, tokenizer: Tokenizer, texts: list[str]) -> None:
    """Log a warning if the tokenizer cannot represent some characters of `texts`.

    A tokenizer without byte fallback loses characters outside of its vocabulary, such as Chinese
    characters.
    """
    lost = []
    for character in sorted(set("".join(texts))):
        decoded = tokenizer.decode(tokenizer.encode(character))
        if not character.isspace() and character not in decoded:
            lost.append(character)
    if lost:
        examples = ", ".join(map(repr, lost[:5]))
        logging.getLogger("titanlite").warning(
            f"{tokenizer.path} cannot represent {len(lost):,} characters in a sample of "
            f"{source.name}, such as {examples}"
        )


def _count_characters(source: Source) -> int:
    """Count the characters of a local source of at most 4 Mi characters.

    A record that is not text counts as 64 Ki characters. Return 0 for remote or larger sources,
    because counting would take too long.
    """
    if not source.files or any(isinstance(file, RemoteFile) for file in source.files):
        return 0

    total = 0
    for record in source:
        total += len(record) if isinstance(record, str) else _SAMPLE_BYTES
        if total > _MAX_CHARACTERS:
            return 0
    return total


def _guess_size(spec: TextSource, tokenizer: Tokenizer) -> SourceSize:
    """Guess the number of tokens of local text files by tokenizing one block of 64 KiB.

    Use this function if opening the source would take too long. For compressed files, remote files,
    and formats other than plain text and JSON Lines, the number of tokens in the result is None.
    """
    name = f"{spec.source} {spec.path or ''}".rstrip()
    files = find_files(spec)
    is_text = spec.source in ("python_stdlib", "text", "jsonl")
    if not is_text or has_compressed(files) or as_url(spec.path):
        return SourceSize(name)

    middle_file = files[len(files) // 2]
    with File(middle_file).open() as stream:
        block = stream.read(_SAMPLE_BYTES)
    block_tokens = len(tokenizer.encode_array(block.decode(errors="ignore")))

    # Assume that all files have as many tokens per byte as the block. In JSON Lines, the block also
    # contains keys and values that are not read, so the result is too high.
    num_bytes = sum(file.stat().st_size for file in files)
    return SourceSize(name, num_bytes * block_tokens // max(1, len(block)))


def inspect_data(run: Run, tokenizer: Tokenizer) -> list[SourceSize]:
    """Open and inspect the training and validation data, and estimate the size of each source.

    Use this to find mistakes in the data that would stop a run at startup.

    Args:
        run: The run to check.
        tokenizer: Tokenizer of the run.

    Returns:
        The sizes of the training sources.

    Raises:
        UserError: If a source is missing, has too little text, or has a record in its sample that
            cannot be read.
    """
    sizes = _inspect_sources(run, DocumentTokenizer.for_run(run, tokenizer))
    if run.job.validation.freq > 0:
        _inspect_sources(run, DocumentTokenizer.for_run(run, tokenizer, validation=True))
    return sizes


def _inspect_sources(run: Run, documents: DocumentTokenizer) -> list[SourceSize]:
    """Check the training or validation sources of a run, and return their estimated sizes.

    If opening a source would take more than a second, only guess its size.

    Args:
        run: The run to check.
        documents: Tokenizes the documents. Its `section` selects the sources to check.
    """
    sizes = []
    for spec in source_specs(getattr(run.job, documents.section)):
        size = SourceSize(spec.source)
        source = open_quickly(spec, run.job)
        if source is not None:
            inspect_source(source, documents, run.job.training.seq_len)
            size = measure_source(source, documents.tokenizer)
        if not size.tokens:
            size = _guess_size(spec, documents.tokenizer)
        sizes.append(size)
    return sizes


def _count_sequences(run: Run) -> np.ndarray:
    """Return the number of training sequences from each source, over all stages of the run."""
    sequences = np.zeros(len(source_specs(run.job.dataset)))
    for start_step, stage_sequences in run.sequence_counts:
        sequences += stage_sequences * source_shares(run.job.dataset, start_step)
    return sequences


def _compute_epochs(run: Run, sizes: Sequence[SourceSize]) -> list[float]:
    """Return how many times the run reads each source, or 0 if the source's size is unknown."""
    # An epoch also contains the held-out documents, which are not trained on.
    tokens = _count_sequences(run) * run.job.training.seq_len / (1 - run.job.validation.holdout)
    epochs = []
    for num_tokens, size in zip(tokens.tolist(), sizes, strict=True):
        epochs.append(num_tokens / size.tokens if size.tokens else 0.0)
    return epochs


def describe_sources(run: Run, sizes: Sequence[SourceSize]) -> str:
    """Describe the training sources of a run for the log, with one line per source.

    Each line gives the source's share of the sequences, its size and, if its number of tokens is
    known, how many epochs the run reads.
    """
    lines = []
    sequences = _count_sequences(run)
    shares = sequences / sequences.sum()
    for size, share, epochs in zip(sizes, shares, _compute_epochs(run, sizes), strict=True):
        line = f"{share:6.1%}  {size.description}{_describe_estimate(size)}"
        if size.tokens:
            line += f"; {epochs:,.2f} epochs in this run"
        lines.append(line)
    return "\n".join(lines)


def _describe_estimate(size: SourceSize) -> str:
    """Describe the estimated size of a source, to append to `size.description`.

    For example, ", about 90 tokens, 3.21 bytes per token". Return "" if the bytes per token are
    unknown, for example if the source was tokenized in advance. If such a source has been opened,
    its description already contains the exact number of tokens.
    """
    if not size.bytes_per_token:
        return ""
    tokens = f", about {size.tokens:,} tokens" if size.tokens else ""
    return f"{tokens}, {size.bytes_per_token:.2f} bytes per token"


def explain_toy_run(run: Run, tokenizer: Tokenizer, sizes: Sequence[SourceSize]) -> str:
    """Return a warning if the data or the tokenizer is too small for the run, otherwise "".

    The warning contains commands that download more data or a larger tokenizer.
    """
    problems = _explain_repeated_text(run, sizes) + _explain_small_vocabulary(run, tokenizer)
    if not problems:
        return ""
    title = f"{' THIS RUN TRAINS A TOY ':=^56}"
    hint = "`titanlite get` prints the lines for a job file."
    return "\n".join([title, *problems, hint, "=" * 56])


def _explain_repeated_text(run: Run, sizes: Sequence[SourceSize]) -> list[str]:
    """Return warning lines for each source that the run reads more than `MAX_EPOCHS` (4) times.

    Sources with max_epochs are skipped, because their repetition is intended.
    """
    lines = []
    specs = source_specs(run.job.dataset)
    for spec, size, epochs in zip(specs, sizes, _compute_epochs(run, sizes), strict=True):
        if epochs > MAX_EPOCHS and not spec.max_epochs:
            steps = max(1, int(run.job.training.steps * MAX_EPOCHS / epochs))
            lines += [
                f"{size.description}: about {size.tokens:,} tokens, read {epochs:,.1f} times.",
                f"After {MAX_EPOCHS} epochs, a model learns little more. To get more text:",
                "    titanlite get data fineweb-edu-10bt",
                f"{steps:,} steps read this text {MAX_EPOCHS} times: --training.steps {steps}",
            ]
    return lines


def _explain_small_vocabulary(run: Run, tokenizer: Tokenizer) -> list[str]:
    """Return warning lines if the tokenizer has far fewer tokens than the model has embeddings."""
    num_embeddings = run.arch.vocab_size
    if tokenizer.vocab_size > _MIN_VOCABULARY_SHARE * num_embeddings:
        return []
    return [
        f"{run.job.tokenizer.path} has {tokenizer.vocab_size:,} tokens, but the model has "
        f"{num_embeddings:,}",
        "(model.vocab_size), so most of its embeddings are never trained. To get a tokenizer:",
        f"    titanlite get tokenizer {_propose_tokenizer(num_embeddings)}",
    ]


def _propose_tokenizer(num_embeddings: int) -> str:
    """Return the name of the largest known tokenizer with at most `num_embeddings` ids.

    If all known tokenizers are larger, return "gpt2".
    """
    proposal = "gpt2"
    for name, preset in load_presets()["tokenizer"].items():  # those with more ids come later
        if preset["vocab_size"] <= num_embeddings:
            proposal = name
    return proposal
