"""Find the likely cause of a failed comparison."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict

import numpy as np
import torch
from torch import Tensor

from titanlite.config.errors import format_count
from titanlite.config.run import Run
from titanlite.prove.record import NamedTensors
from titanlite.prove.reference import ReferenceStep

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
        ratio: Value divided by the expected value.
        run: The run, whose parallel degrees may explain the error.

    Returns:
        The description, or "" if the ratio is 1, up to `RATIO_TOLERANCE`. If no degree fits, the
        description has only the ratio, such as "2 times the expected value". If the ratio is not
        positive and finite, the description is "the value is not a positive number".
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
    """Return a phrase for the parallel degree that equals `factor`, or whose square root does.

    For example, "the number of replicas" or "the square root of the number of replicas". If no
    degree fits, return "".
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
    """Return numbers by which a wrong result may be scaled, keyed by their descriptions.

    For example, if ranks add their values instead of averaging them, the result is too large by the
    factor "the number of ranks".
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

    The factor explains the error if it leaves at most 10% (`FIT_TOLERANCE`) of it unexplained.

    Args:
        value: Wrong tensor.
        expected: Expected tensor of the same shape.
        run: The run, whose parallel degrees may explain the factor.

    Returns:
        A string such as "2 times the expected value", or "" if no factor explains the error.
    """
    value = value.double().flatten()
    expected = expected.double().flatten()
    squared_norm = expected.dot(expected).item()
    if squared_norm == 0 or not value.isfinite().all():
        return ""

    # Fit `value = ratio * expected` by least squares.
    ratio = value.dot(expected).item() / squared_norm
    error_norm = (value - expected).norm()
    unexplained_norm = (value - ratio * expected).norm()
    if unexplained_norm > FIT_TOLERANCE * error_norm:
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
    failed_kinds = {remove_block_number(name) for name in failed}
    correct_kinds = {remove_block_number(name) for name in correct}
    if failed_kinds.isdisjoint(correct_kinds):
        kinds = ", ".join(sorted(failed_kinds))
        return f"only parameters of the kind {kinds} differ"

    # Check whether all parameters of some pipeline stages differ.
    failed_stages = {_find_stage(name, run) for name in failed}
    correct_stages = {_find_stage(name, run) for name in correct}
    if run.degrees.pipeline > 1 and failed_stages.isdisjoint(correct_stages):
        noun = "stage" if len(failed_stages) == 1 else "stages"
        return f"only the parameters of pipeline {noun} {_join(failed_stages)} differ"

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
    step: ReferenceStep,
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
        step: The step on the reference model, to imitate mistakes.
    """
    where = describe_names(failed, list(expected), run)
    names = [name for name in failed if name in gradients]
    if not names:
        return f"{where}: they have no gradient"

    # Treat the gradients of these parameters as one long vector.
    wrong_vector = _concatenate(gradients, names)
    expected_vector = _concatenate(expected, names)
    return f"{where}: {_find_cause(run, wrong_vector, expected_vector, step, names)}"


def _concatenate(tensors: NamedTensors, names: Sequence[str]) -> Tensor:
    """Concatenate all elements of the tensors called `names` into one float64 vector."""
    return torch.cat([tensors[name].double().flatten() for name in names])


def _compute_vector(step: ReferenceStep, names: Sequence[str]) -> Tensor:
    """Compute the gradients of the parameters called `names` in a step, as one vector."""
    _, gradients = step.compute_gradients()
    return _concatenate(gradients, names)


def _find_cause(
    run: Run, wrong: Tensor, right: Tensor, step: ReferenceStep, names: Sequence[str]
) -> str:
    """Find the mistake that explains why a gradient is wrong, and describe it.

    Repeat the step with each typical mistake, and compare the resulting gradient with the wrong
    one. If none matches, list the features of the job that may cause the error.

    Args:
        run: The tested run on several ranks.
        wrong: Gradient of the run, shape (elements,).
        right: Expected gradient, shape (elements,).
        step: The step on the reference model.
        names: Names of the parameters whose gradients the vectors contain.
    """
    if not wrong.isfinite().all():
        return "they are not finite"
    wrong_scale = explain_factor(wrong, right, run)  # such as "2 times the expected value"
    if wrong_scale:
        return wrong_scale

    tolerance = FIT_TOLERANCE * (wrong - right).norm()
    for mistake, step_with_mistake in _list_mistakes(run, step):
        gradient = _compute_vector(step_with_mistake, names)
        if (gradient - wrong).norm() < tolerance:
            return mistake

    # Check whether some sequences are missing or counted too often.
    sequence_weights, weighted_sum = _fit_sequence_weights(wrong, step, names)
    if (weighted_sum - wrong).norm() < tolerance:
        return _describe_contributions(run, sequence_weights)
    return _list_suspects(run)


def _fit_sequence_weights(
    wrong: Tensor, step: ReferenceStep, names: Sequence[str]
) -> tuple[list[float], Tensor]:
    """Approximate a wrong gradient by a weighted sum of the gradients of individual sequences.

    Args:
        wrong: Gradient of the tested run, shape (elements,).
        step: The step on the reference model.
        names: Names of the parameters whose gradients `wrong` contains.

    Returns:
        The weight of each sequence, and the weighted sum of the gradients. In a correct gradient,
        all weights are 1. A sequence that does not contribute has weight 0.
    """
    gradients = []
    for i in range(len(step.sequences["labels"])):
        step_of_one_sequence = step._replace(indices=slice(i, i + 1))
        gradients.append(_compute_vector(step_of_one_sequence, names))
    matrix = torch.stack(gradients, dim=1)  # (elements, sequences)
    weights = torch.linalg.lstsq(matrix, wrong[:, None]).solution[:, 0]
    return weights.tolist(), matrix @ weights


def _list_mistakes(run: Run, step: ReferenceStep) -> Iterator[tuple[str, ReferenceStep]]:
    """Yield each typical mistake that can occur in a run, and a step that makes it on purpose.

    Args:
        run: The tested run on several ranks.
        step: The correct step on the reference model.

    Yields:
        A description, for example "the sliding window is ignored", and the changed step.
    """
    yield from _list_position_mistakes(run, step)
    if run.microbatches > 1:
        # Consecutive sequences form a microbatch. Shift the labels by one microbatch.
        shifted_labels = step.sequences["labels"].roll(run.global_microbatch_size, dims=0)
        changed_step = step.with_field("labels", shifted_labels)
        yield "the labels belong to another microbatch", changed_step
    if run.arch.sliding_window:
        yield "the sliding window is ignored", step._replace(use_window=False)
    if run.job.training.z_loss:
        yield "the z-loss is left out", step._replace(use_z_loss=False)


def _list_position_mistakes(run: Run, step: ReferenceStep) -> Iterator[tuple[str, ReferenceStep]]:
    """Yield the typical mistakes in positions and document masks; see `_list_mistakes`."""
    ids = step.sequences["input_ids"]
    seq_len = ids.shape[1]
    positions = torch.arange(seq_len).expand_as(ids)  # 0, 1, 2, ... in each sequence
    if "document_ids" in step.sequences:  # positions then restart at each document
        without_ids = {key: x for key, x in step.sequences.items() if key != "document_ids"}
        yield "tokens attend to other documents", step._replace(sequences=without_ids)
        yield "positions do not restart at documents", step.with_field("positions", positions)
    elif run.degrees.context > 1:
        # A context-parallel rank holds a part of each sequence. Let it count from 0.
        part_length = seq_len // run.degrees.context
        changed_step = step.with_field("positions", positions % part_length)
        yield "positions restart in each context-parallel rank", changed_step


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
    """Describe how the sequences of a batch contribute to a wrong gradient.

    The gradient is a weighted sum of the gradients of the sequences. All weights should be 1. A
    weight near 0 means that the sequence is missing. If none is missing, list all weights.

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
