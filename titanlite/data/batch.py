"""Converting packed sequences to the input and label tensors of a training or evaluation step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from titanlite.config.run import Run, sequence_divisor
from titanlite.config.schema import JobConfig
from titanlite.data.packing import PackedSequence, remove_marks
from titanlite.model.attention import equal_bounds
from titanlite.model.microbatch import IGNORE_INDEX, Microbatch

LENGTH_MULTIPLE = 64  # evaluation pads to multiples of this length to get few different shapes


class RankBatch(NamedTuple):
    """The microbatches that one rank trains on in an optimizer step: its part of a global batch."""

    microbatches: list[Microbatch]
    num_valid_tokens: int
    """Number of labels in this rank's sequences that are not IGNORE_INDEX."""


def make_microbatch(sequences: list[PackedSequence], job: JobConfig) -> Microbatch:
    """Convert packed sequences to input and label tensors in CPU memory.

    The label of each token is the next token, or IGNORE_INDEX if the next token is padding or does
    not count in the loss. With `dataset.document_mask`, the microbatch also contains the document
    of each token and its position there, and the first token of a document is never a label.

    Args:
        sequences: B sequences of T + 1 tokens.
        job: Job that trains on the sequences.
    """
    tokens = np.stack([sequence.tokens for sequence in sequences]).astype(np.int64)  # (B, T + 1)
    ids, is_masked = remove_marks(tokens)
    is_ignored = is_masked | _find_padding(sequences)
    if not job.dataset.document_mask:
        return _build_microbatch(ids, is_ignored)

    document_ids, positions = _compute_documents(sequences)
    is_document_start = positions == 0
    document_fields = {"document_ids": document_ids[:, :-1], "positions": positions[:, :-1]}
    if job.model.uses_document_bounds:
        document_fields["cu_seqlens"] = _compute_document_bounds(document_fields["positions"])
    return _build_microbatch(ids, is_ignored | is_document_start, **document_fields)


def _build_microbatch(
    ids: np.ndarray, is_ignored: np.ndarray, **document_fields: np.ndarray
) -> Microbatch:
    """Create a microbatch in which each token predicts the next one.

    The inputs are tokens 0 to T - 1, and the labels are tokens 1 to T.

    Args:
        ids: Token ids, shape (B, T + 1).
        is_ignored: Whether each token is not predicted, shape (B, T + 1).
        document_fields: Fields of the microbatch that describe its documents.
    """
    labels = np.where(is_ignored, IGNORE_INDEX, ids)
    arrays = {"input_ids": ids[:, :-1], "labels": labels[:, 1:], **document_fields}
    tensors = {
        name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()
    }
    return Microbatch(**tensors)


def _find_padding(sequences: list[PackedSequence]) -> np.ndarray:
    """Return whether each token is padding, as booleans of shape (B, T + 1).

    The padding of a sequence follows its segments.
    """
    num_tokens = [sequence.segment_sizes.sum() for sequence in sequences]  # without padding
    return np.arange(len(sequences[0].tokens)) >= np.expand_dims(num_tokens, 1)


def _compute_document_bounds(positions: np.ndarray) -> np.ndarray:
    """Compute where the documents of a microbatch begin and end, for attention kernels.

    This runs on the CPU. On the GPU, getting the number of documents would require a host sync.

    Args:
        positions: Position of each input token in its document, shape (B, T).

    Returns:
        Indices (int32) into the B * T flattened tokens: the first token of each document, in
        ascending order, and B * T as the end of the last document. For example, the positions
        [[0, 1, 2], [0, 1, 0]] give [0, 3, 5, 6].
    """
    starts = np.flatnonzero(positions == 0)
    return np.append(starts, positions.size).astype(np.int32)


def _compute_documents(sequences: list[PackedSequence]) -> tuple[np.ndarray, np.ndarray]:
    """Compute the document id of each token, and its position in the document.

    For example, documents of 3 and 2 tokens, followed by 1 token of padding, have the document ids
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


def copy_to_device(microbatch: Microbatch, device: torch.device) -> Microbatch:
    """Copy a microbatch from CPU memory to `device` without a host sync.

    If `device` is not a GPU, return the same microbatch.
    """
    if device.type != "cuda":
        return microbatch

    # From pinned memory, the copies overlap with the step in progress.
    tensors = {
        name: tensor.pin_memory().to(device, non_blocking=True)
        for name, tensor in vars(microbatch).items()
        if tensor is not None
    }
    return Microbatch(**tensors)


class Window(NamedTuple):
    """A sequence of tokens for evaluation. Its last `num_scored` tokens are scored.

    The tokens before these are only context.
    """

    tokens: np.ndarray
    """(n,) integers, n >= 2."""
    num_scored: int
    """Number of tokens at the end that are predicted, 1 to n - 1."""


def padded_length(run: Run, longest: int) -> int:
    """Return the length in tokens to which evaluation pads its sequences.

    This is `longest`, rounded up to a multiple of 64 to get few different tensor shapes, but at
    most training.seq_len. Context and tensor parallelism can require a larger multiple. Pipelines,
    compiled models and FP8 support only one shape, so they always use training.seq_len.

    Args:
        run: The run whose model is evaluated.
        longest: Length of the longest sequence in tokens.
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

    If there are fewer windows than `batch_size`, the remaining sequences contain only padding.
    Labels that are not scored are IGNORE_INDEX.

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
        # Each token predicts the next one. Only the last `num_scored` tokens are labels.
        size = len(window.tokens) - 1
        first_scored = size - window.num_scored
        inputs[i, :size] = window.tokens[:-1]
        labels[i, first_scored:size] = window.tokens[first_scored + 1 :]

    return Microbatch(
        input_ids=torch.from_numpy(inputs).to(device),
        labels=torch.from_numpy(labels).to(device),
    )


def blank_microbatch(job: JobConfig, device: torch.device) -> Microbatch:
    """Create a microbatch of zeros, to measure the memory or time of a step without data.

    Args:
        job: Job that sets the batch size and sequence length. With `dataset.document_mask`, each
            sequence is one document.
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
