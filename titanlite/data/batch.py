"""Converting packed sequences to the input and label tensors of a training or evaluation step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from titanlite.config.run import Run, sequence_divisor
from titanlite.config.schema import JobConfig
from titanlite.data.stream import PackedSequence
from titanlite.model.attention import equal_bounds
from titanlite.model.microbatch import IGNORE_INDEX, Microbatch

LENGTH_MULTIPLE = 64  # evaluation pads to multiples of this length to get few different shapes


class GlobalBatch(NamedTuple):
    """The microbatches that this rank computes in one optimizer step."""

    microbatches: list[Microbatch]
    num_valid_tokens: int
    """Number of labels in this rank's sequences that are not IGNORE_INDEX."""


def make_microbatch(
    sequences: list[PackedSequence], job: JobConfig, device: torch.device
) -> tuple[Microbatch, np.ndarray]:
    """Convert packed sequences to input and label tensors on `device`, without a host sync.

    Args:
        sequences: B sequences of T + 1 tokens.
        job: With `dataset.document_mask`, the microbatch has document ids and positions, so that
            attention stays within a document. No document then predicts the first token of the next
            one.
        device: Device of the tensors.

    Returns:
        The microbatch, and a copy of its labels in CPU memory, shape (B, T). Labels of padding and
        of tokens that do not count in the loss are IGNORE_INDEX.
    """
    # Each token predicts the next one: inputs are tokens 0 to T - 1, labels are tokens 1 to T.
    tokens = np.stack([sequence.tokens for sequence in sequences]).astype(np.int64)  # (B, T + 1)
    # An id t that does not count in the loss is stored as its complement ~t, which is negative.
    labels = np.where(tokens < 0, IGNORE_INDEX, tokens)[:, 1:]  # (B, T)
    tokens = np.maximum(tokens, ~tokens)
    arrays = {"input_ids": tokens[:, :-1], "labels": labels}

    # Mask the padding at the end of each sequence.
    for i, sequence in enumerate(sequences):
        first_padding_label = max(0, int(sequence.segment_sizes.sum()) - 1)
        labels[i, first_padding_label:] = IGNORE_INDEX

    if job.dataset.document_mask:
        document_ids, positions = _compute_documents(sequences)
        # Mask the first token of each document.
        labels[positions[:, 1:] == 0] = IGNORE_INDEX
        arrays["document_ids"] = document_ids[:, :-1]
        arrays["positions"] = positions[:, :-1]
        if job.model.uses_document_bounds:
            # Every document starts at position 0. Only the CPU knows how many there are.
            starts = np.flatnonzero(positions[:, :-1] == 0)
            arrays["cu_seqlens"] = np.append(starts, labels.size).astype(np.int32)

    # Copy to the device. From pinned memory, the copy overlaps with the step in progress.
    tensors: dict[str, Tensor] = {}
    for name, array in arrays.items():
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if device.type == "cuda":
            tensor = tensor.pin_memory()
        tensors[name] = tensor.to(device, non_blocking=True)
    return Microbatch(**tensors), labels


def _compute_documents(sequences: list[PackedSequence]) -> tuple[np.ndarray, np.ndarray]:
    """Compute the document of each token, and the position of the token in that document.

    For example, documents of 3 and 2 tokens and 1 token of padding get the document ids
    [0, 0, 0, 1, 1, 2] and the positions [0, 1, 2, 0, 1, 0].

    Returns:
        Document ids (int32) and positions (int64), each of shape (B, T + 1).
    """
    document_ids = []
    positions = []
    for sequence in sequences:
        # The padding counts as one more document.
        num_padding = len(sequence.tokens) - sequence.segment_sizes.sum()
        lengths = np.append(sequence.segment_sizes, num_padding)
        document_ids.append(np.repeat(np.arange(len(lengths)), lengths))
        positions.append(np.concatenate([np.arange(length) for length in lengths]))
    return np.array(document_ids, dtype=np.int32), np.array(positions, dtype=np.int64)


class Window(NamedTuple):
    """A sequence of tokens for evaluation, and the number of tokens at its end to score."""

    tokens: np.ndarray
    """(n,) integers, n >= 2."""
    num_scored: int
    """Number of tokens at the end that are predicted, 1 to n - 1."""


def padded_length(run: Run, longest: int) -> int:
    """Return the sequence length to which evaluation pads texts of at most `longest` tokens.

    The length is a multiple of 64 and of the number of shards of a sequence, to get few different
    shapes, but at most training.seq_len. Pipelines, compiled models and FP8 support only one shape,
    so they always use training.seq_len.
    """
    seq_len = run.job.training.seq_len
    has_one_shape = run.job.compile.enable or run.job.float8.enable
    if has_one_shape or run.degrees.pipeline > 1:
        return seq_len

    multiple = math.lcm(LENGTH_MULTIPLE, sequence_divisor(run.degrees))
    rounded_up = math.ceil(longest / multiple) * multiple
    return min(seq_len, rounded_up)


def padded_microbatch(
    windows: Sequence[Window], batch_size: int, length: int, device: torch.device
) -> Microbatch:
    """Pad windows on the right, and stack them into a microbatch of shape (batch_size, length).

    Missing windows are filled with padding. Labels that are not scored are IGNORE_INDEX.

    Args:
        windows: Windows of at most `length` + 1 tokens.
        batch_size: Number of sequences in the microbatch.
        length: Number of input tokens per sequence.
        device: Device of the tensors.
    """
    shape = (batch_size, length)
    inputs = np.zeros(shape, dtype=np.int64)
    labels = np.full(shape, IGNORE_INDEX, dtype=np.int64)
    for i, window in enumerate(windows):
        # Each token predicts the next one, so the last token is only a label.
        size = len(window.tokens) - 1
        inputs[i, :size] = window.tokens[:-1]
        # Only the last `num_scored` labels are scored.
        first_scored = size - window.num_scored
        labels[i, first_scored:size] = window.tokens[first_scored + 1 :]

    return Microbatch(
        input_ids=torch.from_numpy(inputs).to(device),
        labels=torch.from_numpy(labels).to(device),
    )


def blank_microbatch(job: JobConfig, device: torch.device) -> Microbatch:
    """Create a microbatch of zeros, to measure the memory or time of a step without data.

    Args:
        job: Determines the shape. With `dataset.document_mask`, each sequence is one document.
        device: Device of the tensors.
    """
    shape = (job.training.local_batch_size, job.training.seq_len)
    tensors = {
        "input_ids": torch.zeros(shape, dtype=torch.int64, device=device),
        "labels": torch.zeros(shape, dtype=torch.int64, device=device),
    }
    if job.dataset.document_mask:
        tensors["document_ids"] = torch.zeros(shape, dtype=torch.int32, device=device)
        tensors["positions"] = torch.zeros(shape, dtype=torch.int64, device=device)
        if job.model.uses_document_bounds:
            tensors["cu_seqlens"] = equal_bounds(*shape, device)
    return Microbatch(**tensors)
