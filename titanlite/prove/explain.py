"""Find what a failed comparison points to."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from titanlite.config.run import Run
from titanlite.prove.record import Tensors

if TYPE_CHECKING:
    from titanlite.prove.reference import ReferenceTrainer

RATIO_TOLERANCE = 1e-3
FIT_TOLERANCE = 0.1
"""Largest part of a difference that an explanation may leave unexplained."""
MISSING = 0.01
"""Largest factor with which a sequence counts as missing."""
MAX_NAMES = 3


def coordinates(run: Run, rank: int) -> dict[str, int]:
    """Convert the number of a rank to its index along each parallel dimension.

    Returns:
        Indices along "pipeline", "replicate", "shard", "context" and "tensor". The additional key
        "data" is the index of the part of the global batch that the rank reads.
    """
    sizes = asdict(run.degrees)
    indices = np.unravel_index(rank, list(sizes.values()))
    result = {name: int(index) for name, index in zip(sizes, indices, strict=True)}
    result["data"] = result["replicate"] * sizes["shard"] + result["shard"]
    return result


def explain_ratio(ratio: float, run: Run) -> str:
    """Explain by which parallel degree a value is wrong, for the message of a failed check.

    For example, "2 times the expected value = the data-parallel degree", or "0.7071 times the
    expected value = 1 / the square root of the number of replicas".

    Args:
        ratio: Wrong value divided by the expected value.
        run: The run, whose parallel degrees may explain the error.

    Returns:
        The explanation, which is only the first part if no degree fits. "" if the ratio is 1.
    """
    if not math.isfinite(ratio) or ratio <= 0:
        return "the value is not a positive number"
    if abs(ratio - 1) <= RATIO_TOLERANCE:
        return ""

    # Find the numbers of the layout that equal the factor, or whose square root equals it.
    text = f"{ratio:.4g} times the expected value"
    factor = max(ratio, 1 / ratio)
    inverse = "1 / " if ratio < 1 else ""
    for power, label in ((1.0, ""), (0.5, "the square root of ")):
        matches = [
            name
            for name, number in _layout_numbers(run).items()
            if number > 1 and abs(factor / number**power - 1) < RATIO_TOLERANCE
        ]
        if matches:
            return f"{text} = {inverse}{label}the {' = the '.join(matches)}"
    return text


def _layout_numbers(run: Run) -> dict[str, int]:
    """Return the numbers by which a value may be wrong, such as the parallel degrees."""
    degrees = run.degrees
    return {
        "data-parallel degree": degrees.data,
        "number of replicas": degrees.replicate,
        "number of shards": degrees.shard,
        "tensor-parallel degree": degrees.tensor,
        "context-parallel degree": degrees.context,
        "pipeline-parallel degree": degrees.pipeline,
        "number of microbatches": run.microbatches,
        "number of ranks": run.world_size,
    }


def explain_factor(value: torch.Tensor, expected: torch.Tensor, run: Run) -> str:
    """Describe the factor by which a wrong tensor is scaled, for the message of a failed check.

    Args:
        value: Wrong tensor.
        expected: Expected tensor of the same shape.
        run: The run, whose parallel degrees may explain the error.

    Returns:
        A text such as "2 times the expected value", or "" if the tensors do not differ by a factor.
    """
    value = value.double().flatten()
    expected = expected.double().flatten()
    squared_norm = (expected @ expected).item()
    if squared_norm == 0 or not value.isfinite().all():
        return ""

    # Fit `value = ratio * expected` by least squares, and check that the fit explains the error.
    best_ratio = (value @ expected).item() / squared_norm
    unexplained = (value - best_ratio * expected).norm()
    if unexplained > FIT_TOLERANCE * (value - expected).norm():
        return ""
    return explain_ratio(best_ratio, run)


def describe_names(failed: Sequence[str], names: Sequence[str], run: Run) -> str:
    """Describe which parameters differ, for the message of a failed check.

    Args:
        failed: Names of the parameters that differ.
        names: Names of all parameters.
        run: The run, which assigns parameters to pipeline stages.

    Returns:
        A text such as "only parameters of the kind attention.wq.weight differ" or "only the
        parameters of pipeline stage 1 differ".
    """
    if set(failed) == set(names):
        return "all parameters differ"

    # Check whether the failed parameters are the same one in all blocks.
    kinds = {kind_of(name) for name in failed}
    of_same_kinds = {name for name in names if kind_of(name) in kinds}
    if of_same_kinds == set(failed):
        return f"only parameters of the kind {', '.join(sorted(kinds))} differ"

    # Check whether they are all parameters of some pipeline stages.
    stages = {_stage_of(name, run) for name in failed}
    on_same_stages = {name for name in names if _stage_of(name, run) in stages}
    if on_same_stages == set(failed) and run.degrees.pipeline > 1:
        noun = "stage" if len(stages) == 1 else "stages"
        return f"only the parameters of pipeline {noun} {_join(stages)} differ"

    # Otherwise, list the first names.
    shown = ", ".join(failed[:MAX_NAMES])
    num_others = len(failed) - MAX_NAMES
    if num_others > 0:
        noun = "other" if num_others == 1 else "others"
        shown += f" and {num_others} {noun}"
    return f"only {shown} differ"


def kind_of(name: str) -> str:
    """Remove the block number from a parameter name.

    For example, "layers.3.attention.wq.weight" becomes "attention.wq.weight".
    """
    return re.sub(r"^layers\.\d+\.", "", name)


def _stage_of(name: str, run: Run) -> int:
    match = re.match(r"layers\.(\d+)\.", name)
    if match is None:
        return 0 if "embeddings" in name else len(run.stages) - 1
    return next(i for i, blocks in enumerate(run.stages) if int(match[1]) in blocks)


def explain_gradient(
    run: Run,
    failed: Sequence[str],
    gradients: Tensors,
    expected: Tensors,
    weights: Mapping[str, torch.Tensor],
    sequences: Tensors,
    reference: ReferenceTrainer,
) -> str:
    """Explain wrong gradients by a factor, by missing sequences, or by a mistake in the model.

    The gradient of a step is the sum of the gradients of its sequences. If a least squares fit with
    another weight per sequence reproduces the wrong gradients, its weights show which sequences are
    missing or counted too often.

    Args:
        run: The tested run on several ranks.
        failed: Names of the wrong gradients.
        gradients: Gradients of the run.
        expected: Gradients of the reference.
        weights: Weights before the step.
        sequences: Sequences of the step.
        reference: The reference.
    """
    names = [name for name in failed if name in gradients]
    where = describe_names(failed, list(expected), run)
    if not names:
        return f"{where}: they have no gradient"

    def flat(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([tensors[name].double().flatten() for name in names])

    def compute(part: Tensors, *indices: slice, **options: Any) -> torch.Tensor:
        return flat(reference.compute_gradients(weights, part, *indices, **options)[1])

    wrong = flat(gradients)
    right = flat(expected)
    if not wrong.isfinite().all():
        return f"{where}: they are not finite"
    factor = explain_factor(wrong, right, run)
    if factor:
        return f"{where}: {factor}"

    largest_residual = FIT_TOLERANCE * (wrong - right).norm()
    for mistake, (changed, options) in _possible_mistakes(run, sequences).items():
        if (compute(changed, **options) - wrong).norm() < largest_residual:
            return f"{where}: {mistake}"

    indices = range(len(sequences["labels"]))
    parts = torch.stack([compute(sequences, slice(i, i + 1)) for i in indices], 1)
    factors = torch.linalg.lstsq(parts, wrong[:, None]).solution[:, 0]
    if (parts @ factors - wrong).norm() < largest_residual:
        return f"{where}: {_describe_factors(run, factors.tolist())}"
    return f"{where}: {_suspects(run)}"


def _possible_mistakes(run: Run, sequences: Tensors) -> dict[str, tuple[Tensors, dict[str, Any]]]:
    """Return typical mistakes of a layout, and how to make each of them in the reference.

    To find the mistake of a layout, the reference makes each of these mistakes on purpose. The one
    that reproduces the wrong gradients of the layout is probably its mistake.

    Returns:
        Description of the mistake -> wrong sequences and keyword arguments, to be passed to
        `ReferenceTrainer.compute_gradients`.
    """
    ids = sequences["input_ids"]
    seq_len = ids.shape[1]
    positions = torch.arange(seq_len).expand_as(ids)

    # Mistakes in the masks and positions of documents, or of context parallelism.
    mistakes: dict[str, tuple[Tensors, dict[str, Any]]] = {}
    if "document_ids" in sequences:
        without_ids = {key: value for key, value in sequences.items() if key != "document_ids"}
        mistakes["tokens attend to other documents"] = (without_ids, {})
        wrong = sequences | {"positions": positions}
        mistakes["positions do not restart at documents"] = (wrong, {})
    elif run.degrees.context > 1:
        wrong = sequences | {"positions": positions % (seq_len // run.degrees.context)}
        mistakes["positions restart in each context-parallel rank"] = (wrong, {})

    # Mistakes in the labels and in the options of the model and the loss.
    if run.microbatches > 1:
        microbatch_size = run.job.training.local_batch_size * run.degrees.data
        wrong = sequences | {"labels": sequences["labels"].roll(microbatch_size, 0)}
        mistakes["the labels are those of another microbatch"] = (wrong, {})
    if run.arch.sliding_window:
        mistakes["the sliding window is ignored"] = (sequences, {"window": 0})
    if run.job.training.z_loss:
        mistakes["the z-loss is left out"] = (sequences, {"z_loss": 0.0})
    return mistakes


def _suspects(run: Run) -> str:
    """List the features of the job that may cause an unexplained error in the forward pass.

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


def _describe_factors(run: Run, factors: Sequence[float]) -> str:
    """Describe by which factors the sequences contribute to a wrong gradient."""
    missing = [i for i, factor in enumerate(factors) if abs(factor) < MISSING]
    if missing:
        data_degree = run.degrees.data
        local_batch_size = run.job.training.local_batch_size
        microbatches = sorted({i // data_degree // local_batch_size for i in missing})
        ranks = sorted({i % data_degree for i in missing})
        return (
            f"sequences {_join(missing)} of the batch do not contribute "
            f"(microbatches {_join(microbatches)} of data-parallel ranks {_join(ranks)})"
        )
    listed = ", ".join(f"{factor:.3g}" for factor in factors)
    return f"the sequences of the batch contribute with the factors {listed} instead of 1"


def _join(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
