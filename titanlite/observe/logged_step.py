"""Define the metrics of a log step: the fields of metrics.jsonl and validation.jsonl.

Each field has a unit, a description and a TensorBoard tag.

Invariant: TensorBoard, the terminal and the reports take names and units from this module. It does
not import torch, because runs are also monitored on machines that cannot train.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict

RENAMED_FIELDS = {
    "loss_max": "loss_max_rank",
    "clipped": "clip_fraction",
    "utilization": "token_utilization",
    "time_left": "eta",
}
"""Mapping from field names in titanlite 0.2 to the current names of the same metrics."""


class LoggedStep(BaseModel):
    """The metrics of one log step, which are one line of metrics.jsonl.

    Times and speeds are wall-clock means over the steps since the previous log step, including
    saves. Each field has a TensorBoard tag. Dictionary fields contain one value per group of
    parameters or per data source; empty dictionaries are not written. Hooks can add fields.

    JSON cannot represent NaN and infinity. Such a value is null in the file, and the additional key
    `nonfinite` contains it as a string: {"nonfinite": {"loss": "nan"}}.

    Attributes:
        step: Number of completed optimizer steps, from 1.
        time: Unix time.
        distributions: Values for histograms, keyed by field name and group of parameters. Not
            written to metrics.jsonl.
    """

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    step: int
    loss: Annotated[float, "train/loss"]
    """Mean loss per token of the global batch of this step, in nats."""
    loss_max_rank: Annotated[float, "train/loss_max_rank"]
    """Highest mean loss of a data-parallel rank in this step, in nats per token."""
    grad_norm: Annotated[float, "train/grad_norm"]
    """L2 norm of the gradient of this step before clipping."""
    clip_fraction: Annotated[float, "train/clip_fraction"]
    """Fraction of steps since the previous log step whose gradient was clipped."""
    lr: Annotated[float, "train/lr"]
    """Learning rate of this step."""
    tokens: Annotated[int, "data/tokens"]
    """Tokens trained on since step 1, across restarts. Positions without a label do not count."""
    tps: Annotated[float, "perf/tokens_per_second"]
    """Tokens per second of all devices."""
    tps_per_device: Annotated[float, "perf/tokens_per_second_per_device"]
    """Tokens per second of one device."""
    mfu: Annotated[float | None, "perf/mfu"]
    """Model FLOPs utilization, with causal attention: fraction of the peak dense bfloat16 FLOP/s.
    Null if the peak is unknown, as on a CPU."""
    tflops: Annotated[float, "perf/tflops"]
    """Model TFLOP/s of one device, not counting recomputed activations."""
    memory: Annotated[float, "memory/reserved"]
    """Memory in GiB. GPU: peak reserved by the allocator since the previous log step. CPU: resident
    set of the process."""
    memory_peak: Annotated[float, "memory/peak"]
    """Memory in GiB. GPU: peak allocated since the previous log step.

    CPU: peak resident set of the process.
    """
    memory_active: Annotated[float | None, "memory/active"]
    """Memory in GiB. GPU: peak of active blocks since the previous log step. CPU: null."""
    alloc_retries: Annotated[int, "memory/alloc_retries"]
    """Number of times since this start that the GPU was full and the allocator had to free its
    cache. Each retry synchronizes with the GPU."""
    step_time: Annotated[float, "perf/step_time"]
    """Seconds per step."""
    data_time: Annotated[float, "perf/data_time"]
    """Seconds per step spent waiting for data."""
    forward_backward_time: Annotated[float, "perf/forward_backward_time"]
    """CPU seconds per step in the forward and backward passes.

    A GPU runs asynchronously, so this is the time to launch its kernels, unless the launch queue is
    full.
    """
    optimizer_time: Annotated[float, "perf/optimizer_time"]
    """CPU seconds per step in clipping, in the optimizer, and in waiting until an async save has
    copied the weights to pinned memory."""
    checkpoint_time: Annotated[float, "perf/checkpoint_time"]
    """CPU seconds per step in saves."""
    other_time: Annotated[float, "perf/other_time"]
    """CPU seconds per step in everything else, such as validation, samples, the matrix products of
    straggler detection, and waiting for the GPU at log steps."""
    elapsed: Annotated[float, "progress/elapsed"]
    """Seconds of training since this start."""
    eta: Annotated[float, "progress/eta"]
    """Seconds until the last step, at the mean speed since the first log step of this start."""
    time: float
    token_utilization: Annotated[float, "data/token_utilization"] = 1.0
    """Fraction of positions since this start that have a label. Packing and masks exclude some."""
    skipped_records: Annotated[int, "data/skipped_records"] = 0
    """Invalid records that were skipped since this start (dataset.on_bad_record = "skip")."""
    skipped_steps: Annotated[int, "counters/skipped_steps"] = 0
    """Steps since step 1 without an update, because of a non-finite value or a spike ([guards])."""
    spikes: Annotated[int, "counters/spikes"] = 0
    """Loss and gradient spikes since step 1 ([guards])."""
    roll_backs: Annotated[int, "counters/roll_backs"] = 0
    """Rollbacks to a checkpoint since step 1 ([guards])."""
    failed_saves: Annotated[int, "counters/failed_saves"] = 0
    """Failed saves since this start."""
    save_waits: Annotated[int, "counters/save_waits"] = 0
    """Saves since this start that waited for the previous one."""
    failed_mirrors: Annotated[int, "counters/failed_mirrors"] = 0
    """Failed copies to checkpoint.mirror since this start."""
    failed_writes: Annotated[int, "counters/failed_writes"] = 0
    """Failed writes of metrics, log or events since this start, for example on a full disk."""
    source_tokens: Annotated[dict[str, int], "data/source_tokens"] = {}
    """Tokens read from each data source."""
    source_epochs: Annotated[dict[str, float], "data/source_epochs"] = {}
    """Epochs of each data source."""
    grad_norms: Annotated[dict[str, float], "grad_norms"] = {}
    """L2 norm of the gradient of each group of parameters, before clipping."""
    update_ratios: Annotated[dict[str, float], "update_ratios"] = {}
    """Norm of the update of each group of parameters, without weight decay, relative to the norm of
    its weights."""
    distributions: dict[str, dict[str, list[float]]] = {}

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Return the field that older titanlite versions called `name`, for old plugins."""
            if name in RENAMED_FIELDS:
                return getattr(self, RENAMED_FIELDS[name])
            return super().__getattr__(name)


TAGS: dict[str, str] = {
    name: field.metadata[0] for name, field in LoggedStep.model_fields.items() if field.metadata
}
"""TensorBoard tag of each field of `LoggedStep`, for example "train/loss" for "loss"."""

MEASURED_FIELDS = {name for name, field in LoggedStep.model_fields.items() if field.is_required()}
"""Fields that `Meter` sets. Hooks can set only the other fields."""

VALIDATION_CURVES = {
    "loss": ("val/loss", "Mean cross entropy per token of the validation data, in nats."),
    "perplexity": ("val/perplexity", "exp(loss)."),
    "bits_per_byte": ("val/bits_per_byte", "Cross entropy in bits per byte of text."),
}
"""TensorBoard tag and description of each field of validation.jsonl."""


def rename_old_fields(line: Mapping[str, Any]) -> dict[str, Any]:
    """Replace field names of older titanlite versions in a line of metrics.jsonl.

    Args:
        line: Fields of a log step, with the names of any version.

    Returns:
        The same values under the current field names.
    """
    return {RENAMED_FIELDS.get(name, name): value for name, value in line.items()}


def json_line(values: Mapping[str, Any]) -> str:
    """Format `values` as one line of strict JSON, which does not allow NaN and infinity.

    A non-finite number becomes null, and the additional key "nonfinite" contains it as a string:
    {"loss": null, "nonfinite": {"loss": "nan"}}.
    """
    return json.dumps(_to_strict_json(values), allow_nan=False) + "\n"


def _to_strict_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace non-finite numbers by None, list them under "nonfinite", and remove empty objects.

    For example, {"loss": nan, "norms": {}} becomes {"loss": None, "nonfinite": {"loss": "nan"}}.
    """
    result: dict[str, Any] = {}
    nonfinite: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            nested = _to_strict_json(value)
            if nested:
                result[name] = nested
        elif isinstance(value, float) and not math.isfinite(value):
            result[name] = None
            nonfinite[name] = str(value)
        else:
            result[name] = value

    if nonfinite:
        result["nonfinite"] = nonfinite
    return result


def scalar_points(entry: LoggedStep) -> Iterator[tuple[str, float]]:
    """Yield a TensorBoard tag and a value for each number in a log step.

    A field such as `loss` yields one pair: ("train/loss", 2.5). A dictionary yields one pair per
    key, for example ("grad_norms/attention.wq", 0.5). A field "x" added by a hook has the tag
    "custom/x".
    """
    for name, value in entry.model_dump(exclude={"step", "time", "distributions"}).items():
        tag = TAGS.get(name, f"custom/{name}")
        values = {tag: value}
        if isinstance(value, dict):
            values = {f"{tag}/{key}": item for key, item in value.items()}
        for full_tag, number in values.items():
            if isinstance(number, int | float):
                yield full_tag, number
