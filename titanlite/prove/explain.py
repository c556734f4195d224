"""Find the likely cause of a failed comparison."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titanlite.config.errors import format_count
from titanlite.config.run import Run
from titanlite.prove.record import NamedTensors

RATIO_TOLERANCE = 1e-3
FIT_TOLERANCE = 0.1
"""Largest fraction of a difference that an explanation may leave unexplained."""
MISSING_WEIGHT = 0.01
"""Weight below which a sequence counts as missing from a gradient. The correct weight is 1."""
MAX_NAMES = 3


def coordinates(run: Run, rank: int) -> dict[str, int]:
    """Return the index of a rank along each parallel dimension.

    The dimensions are "pipeline", "replicate", "shard", "context" and "tensor".
    """
    sizes = asdict(run.degrees)
    indices = np.unravel_index(rank, list(sizes.values()))
    return {name: int(index) for name, index in zip(sizes, indices, strict=True)}


def explain_ratio(ratio: float, run: Run) -> str:
    """Describe the factor by which a value is wrong, for the message of a failed check.

    Examples are "2 times the expected value = the data-parallel degree" and "0.7071 times the
    expected value = 1 / the square root of the number of replicas".

    Args:
        ratio: Wrong value divided by the expected value.
        run: The run, whose parallel degrees may explain the error.

    Returns:
        The description, or "" if the ratio is 1. If no degree fits, the description has only the
        ratio, such as "2 times the expected value".
    """
    if not math.isfinite(ratio) or ratio <= 0:
        return "the value is not a positive number"
    if abs(ratio - 1) <= RATIO_TOLERANCE:
        return ""

    text = f"{ratio:.4g} times the expected value"
    factor = max(ratio, 1 / ratio)
    cause = _name_factor(factor, run)
    if not cause:
        return text
    if ratio < 1:
        return f"{text} = 1 / {cause}"
    return f"{text} = {cause}"


def _name_factor(factor: float, run: Run) -> str:
    """Name the parallel degree that equals a factor, such as "the number of replicas".

    If none does, try the square root of each degree ("the square root of the number of replicas").
    If none fits, return "".
    """
    degrees = _describe_degrees(run).items()
    equal = [name for name, degree in degrees if abs(factor / degree - 1) < RATIO_TOLERANCE]
    if equal:
        return " = ".join(equal)

    squares = [name for name, x in degrees if abs(factor / math.sqrt(x) - 1) < RATIO_TOLERANCE]
    if squares:
        return f"the square root of {' = '.join(squares)}"
    return ""


def _describe_degrees(run: Run) -> dict[str, int]:
    """Return the factors by which a wrong result may be scaled, by description.

    They are the parallel degrees and the numbers of ranks and microbatches. For example, ranks that
    add their values instead of averaging them scale the result by the number of ranks.
    """
    degrees = run.degrees
    return {
        "the data-parallel degree": degrees.data,
        "the number of replicas": degrees.replicate,
        "the number of shards": degrees.shard,
        "the tensor-parallel degree": degrees.tensor,
        "the context-parallel degree": degrees.context,
        "the pipeline-parallel degree": degrees.pipeline,
        "the number of microbatches": run.microbatches,
        "the number of ranks": run.world_size,
    }


def explain_factor(value: Tensor, expected: Tensor, run: Run) -> str:
    """Describe the factor by which a wrong tensor is scaled, for the message of a failed check.

    Returns:
        A string such as "2 times the expected value", or "" if the tensors do not differ by a
        factor.
    """
    value = value.double().flatten()
    expected = expected.double().flatten()
    squared_norm = expected.dot(expected).item()
    if squared_norm == 0 or not value.isfinite().all():
        return ""

    # Fit `value = ratio * expected` by least squares, and check that the fit explains the error.
    ratio = value.dot(expected).item() / squared_norm
    error = (value - expected).norm()
    unexplained_error = (value - ratio * expected).norm()
    if unexplained_error > FIT_TOLERANCE * error:
        return ""
    return explain_ratio(ratio, run)


def describe_names(failed: Sequence[str], names: Sequence[str], run: Run) -> str:
    """Describe which parameters differ, for the message of a failed check.

    For example, "only parameters of the kind attention.wq.weight differ".

    Args:
        failed: Names of the parameters that differ.
        names: Names of all parameters.
        run: The run, which assigns parameters to pipeline stages.
    """
    correct = set(names).difference(failed)
    if not correct:
        return "all parameters differ"

    # Check whether the same parameters differ in all blocks.
    kinds = {remove_block_number(name) for name in failed}
    if kinds.isdisjoint(remove_block_number(name) for name in correct):
        return f"only parameters of the kind {', '.join(sorted(kinds))} differ"

    # Check whether all parameters of some pipeline stages differ.
    stages = {_find_stage(name, run) for name in failed}
    are_whole_stages = stages.isdisjoint(_find_stage(name, run) for name in correct)
    if run.degrees.pipeline > 1 and are_whole_stages:
        noun = "stage" if len(stages) == 1 else "stages"
        return f"only the parameters of pipeline {noun} {_join(stages)} differ"

    return f"only {_list_first_names(failed)} differ"


def _list_first_names(names: Sequence[str]) -> str:
    """Return names as text, such as "a, b, c and 2 others"."""
    text = ", ".join(names[:MAX_NAMES])
    num_others = len(names) - MAX_NAMES
    if num_others <= 0:
        return text
    return f"{text} and {format_count(num_others, 'other')}"


def remove_block_number(name: str) -> str:
    """Remove the block number from a parameter name.

    For example, "layers.3.attention.wq.weight" becomes "attention.wq.weight".
    """
    return re.sub(r"^layers\.\d+\.", "", name)


def _find_stage(name: str, run: Run) -> int:
    """Return the index of the pipeline stage that holds a parameter."""
    match = re.match(r"layers\.(\d+)\.", name)
    if match is None:
        return 0 if "embeddings" in name else len(run.stages) - 1
    return next(i for i, blocks in enumerate(run.stages) if int(match[1]) in blocks)


def explain_gradient(
    run: Run,
    failed: Sequence[str],
    gradients: NamedTensors,
    expected: NamedTensors,
    sequences: NamedTensors,
    compute_gradients: Callable[..., tuple[float, NamedTensors]],
) -> str:
    """Explain wrong gradients, for the message of a failed check.

    The explanation names the parameters that differ and the cause, which can be a factor, missing
    sequences, or a mistake in the model. For example, "all parameters differ: the sliding window is
    ignored".

    Args:
        run: The tested run on several ranks.
        failed: Names of the parameters whose gradient is wrong.
        gradients: Gradients of the run, by parameter name.
        expected: Expected gradients, by parameter name.
        sequences: Fields of the global batch, such as "input_ids", each of shape (sequences, T).
        compute_gradients: `ReferenceTrainer.compute_gradients` for the weights before the step. It
            takes sequences and options, and returns the loss and the gradients.
    """
    where = describe_names(failed, list(expected), run)
    failed_with_gradient = [name for name in failed if name in gradients]
    if not failed_with_gradient:
        return f"{where}: they have no gradient"

    # Treat these gradients as one long vector.
    wrong_vector = _concatenate(gradients, failed_with_gradient)
    expected_vector = _concatenate(expected, failed_with_gradient)

    # Options such as `use_window=False` make a mistake on purpose, to compare its effect.
    def compute_vector(changed_sequences: NamedTensors, **options: Any) -> Tensor:
        _, computed = compute_gradients(changed_sequences, **options)
        return _concatenate(computed, failed_with_gradient)

    cause = _find_cause(run, wrong_vector, expected_vector, sequences, compute_vector)
    return f"{where}: {cause}"


def _concatenate(tensors: NamedTensors, names: Sequence[str]) -> Tensor:
    """Concatenate all elements of the tensors called `names` into one float64 vector."""
    return torch.cat([tensors[name].double().flatten() for name in names])


def _find_cause(
    run: Run,
    wrong: Tensor,
    right: Tensor,
    sequences: NamedTensors,
    compute_gradient: Callable[..., Tensor],
) -> str:
    """Find the mistake that explains why a gradient is wrong, and describe it.

    Make each typical mistake on purpose, and compare the resulting gradient with the wrong one. If
    none matches, list the features of the job that may cause the error.

    Args:
        run: The tested run on several ranks.
        wrong: Gradient of the run, shape (elements,).
        right: Expected gradient, shape (elements,).
        sequences: Fields of the global batch, such as "input_ids", each of shape (sequences, T).
        compute_gradient: Computes the gradient of a batch, shape (elements,), without parallelism.
            Takes the batch and keyword arguments such as `use_window`.
    """
    if not wrong.isfinite().all():
        return "they are not finite"
    wrong_scale = explain_factor(wrong, right, run)  # such as "2 times the expected value"
    if wrong_scale:
        return wrong_scale

    # Check whether a typical mistake leads to the same wrong gradient.
    tolerance = FIT_TOLERANCE * (wrong - right).norm()
    for mistake, imitated_gradient in _imitate_mistakes(run, sequences, compute_gradient):
        if (imitated_gradient - wrong).norm() < tolerance:
            return mistake

    # Check whether some sequences are missing or counted too often.
    sequence_weights, fitted_gradient = _fit_sequences(wrong, sequences, compute_gradient)
    if (fitted_gradient - wrong).norm() < tolerance:
        return _describe_contributions(run, sequence_weights)
    return _list_suspects(run)


def _fit_sequences(
    wrong: Tensor, sequences: NamedTensors, compute_gradient: Callable[..., Tensor]
) -> tuple[list[float], Tensor]:
    """Approximate a wrong gradient by a weighted sum of the gradients of individual sequences.

    Args:
        wrong: Gradient of the tested run, shape (elements,).
        sequences: Fields of the global batch, each of shape (sequences, T).
        compute_gradient: Computes the expected gradient of the sequences in the slice `indices`.

    Returns:
        The weight of each sequence, and the weighted sum of the gradients. In a correct gradient,
        all weights are 1. A sequence that does not contribute has weight 0.
    """
    num_sequences = len(sequences["labels"])
    gradients = [compute_gradient(sequences, indices=slice(i, i + 1)) for i in range(num_sequences)]
    matrix = torch.stack(gradients, dim=1)  # (elements, sequences)
    weights = torch.linalg.lstsq(matrix, wrong[:, None]).solution[:, 0]
    return weights.tolist(), matrix @ weights


def _imitate_mistakes(
    run: Run, sequences: NamedTensors, compute_gradient: Callable[..., Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradient of each typical mistake that can occur in a run, such as wrong positions.

    Args:
        run: The tested run on several ranks.
        sequences: Fields of the correct global batch, each of shape (sequences, T).
        compute_gradient: Computes the gradient of a batch, shape (elements,), without parallelism.

    Yields:
        A description, for example "the sliding window is ignored", and the wrong gradient.
    """
    ids = sequences["input_ids"]
    seq_len = ids.shape[1]
    positions = torch.arange(seq_len).expand_as(ids)  # 0, 1, 2, ... in each sequence
    if "document_ids" in sequences:
        without_ids = {key: value for key, value in sequences.items() if key != "document_ids"}
        yield "tokens attend to other documents", compute_gradient(without_ids)
        changed = sequences | {"positions": positions}
        yield "positions do not restart at documents", compute_gradient(changed)
    elif run.degrees.context > 1:
        # Without documents, positions count through the whole sequence. Each context-parallel rank
        # holds a part of it.
        part_length = seq_len // run.degrees.context
        changed = sequences | {"positions": positions % part_length}
        yield "positions restart in each context-parallel rank", compute_gradient(changed)

    if run.microbatches > 1:
        # Give each microbatch the labels of the previous one.
        shifted_labels = sequences["labels"].roll(run.global_microbatch_size, dims=0)
        changed = sequences | {"labels": shifted_labels}
        yield "the labels belong to another microbatch", compute_gradient(changed)
    if run.arch.sliding_window:
        yield "the sliding window is ignored", compute_gradient(sequences, use_window=False)
    if run.job.training.z_loss:
        yield "the z-loss is left out", compute_gradient(sequences, use_z_loss=False)


def _list_suspects(run: Run) -> str:
    """Return a hint with the features of the job that may cause an unexplained error.

    For example, "look at tensor parallelism, the compiled blocks".
    """
    degrees = run.degrees
    parts = {
        "tensor parallelism": degrees.tensor > 1,
        "context parallelism": degrees.context > 1,
        "the pipeline": degrees.pipeline > 1,
        "the compiled blocks": run.compiles("model"),
        f"the architecture {run.arch.architecture}": run.arch.architecture != "llama",
        f"the loss {run.job.training.loss}": run.job.training.loss != "cross_entropy",
    }
    used = [name for name, is_used in parts.items() if is_used]
    return f"look at {', '.join(used)}" if used else "look at the model and its precision"


def _describe_contributions(run: Run, weights: Sequence[float]) -> str:
    """Describe a wrong gradient that is a weighted sum of the gradients of the sequences.

    The correct weight of each sequence is 1. Name the sequences that are missing from the gradient,
    which have a weight of about 0. If none is missing, list all weights.

    Args:
        run: The tested run on several ranks.
        weights: Weight of each sequence of the global batch in the wrong gradient.
    """
    missing = [i for i, weight in enumerate(weights) if abs(weight) < MISSING_WEIGHT]
    if not missing:
        listed = ", ".join(f"{weight:.3g}" for weight in weights)
        return f"the sequences of the batch contribute with the factors {listed} instead of 1"

    # The data-parallel ranks take turns: rank r of n reads the sequences r, r + n, r + 2n, ...
    # A microbatch consists of the next `global_microbatch_size` sequences over all ranks.
    ranks = {i % run.degrees.data for i in missing}
    microbatches = {i // run.global_microbatch_size for i in missing}
    return (
        f"sequences {_join(missing)} of the batch do not contribute "
        f"(microbatches {_join(sorted(microbatches))} of data-parallel ranks "
        f"{_join(sorted(ranks))})"
    )


def _join(numbers: Iterable[int]) -> str:
    """Return numbers as text, such as "0, 2"."""
    return ", ".join(map(str, numbers))
