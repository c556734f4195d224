"""What a logged step says: the keys of a line of metrics.jsonl and of validation.jsonl, with their units.

Invariant: whoever shows such a number, in TensorBoard, on the terminal or in a report, takes its name, unit and group
from here. This needs no torch, because a run's files are read on machines that do not train.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict


class LoggedStep(BaseModel):
    """A line of metrics.jsonl: one JSON object with these keys.

    Rates and times are means over the steps since the previous line, in wall-clock time, including saves. JSON has no
    NaN and no infinity: such a value is null, and an additional key has it as text, {"nonfinite": {"loss": "nan"}}. An
    object stands for a number with several parts; those that are empty are left out. Each number has the tag of its
    curve in TensorBoard. Hooks can add further numbers.

    Attributes:
        step: Optimizer steps done, from 1.
        time: Unix time.
        distributions: Name of a number with several parts -> part -> what it consists of, for histograms. It is not in
            the line.
    """

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True)

    step: int
    loss: Annotated[float, "1_loss/train"]
    """Mean cross entropy of a token of this step's global batch, nats."""
    loss_max: Annotated[float, "1_loss/train_max"]
    """The largest of the means of data-parallel ranks, each over its own tokens, nats."""
    grad_norm: Annotated[float, "2_optimizer/gradient_norm"]
    """L2 norm of this step's gradient before clipping."""
    clipped: Annotated[float, "2_optimizer/clipped_steps"]
    """Share (0 to 1) of the steps since the previous line whose gradient was scaled down (training.max_norm)."""
    lr: Annotated[float, "2_optimizer/learning_rate"]
    """Learning rate of this step."""
    tokens: Annotated[int, "6_progress/tokens"]
    """Tokens trained on since step 1, whatever the number of restarts."""
    tps: Annotated[float, "3_speed/1_tokens_per_second"]
    """Tokens per second of the whole world."""
    tps_per_device: Annotated[float, "3_speed/2_tokens_per_second_per_device"]
    """Tokens per second of one device."""
    mfu: Annotated[float | None, "3_speed/3_mfu"]
    """Model FLOP/s as a share (0 to 1) of the peak dense bfloat16 FLOP/s of the devices. Missing if the peak is
    unknown, as on a CPU."""
    tflops: Annotated[float, "3_speed/3_tflops"]
    """Model TFLOP/s of one device: what a step computes at least, without recomputation, by time."""
    memory: Annotated[float, "4_memory/memory"]
    """GiB. GPU: peak reserved by the allocator since the previous line. CPU: resident set of this process."""
    memory_peak: Annotated[float, "4_memory/memory_peak"]
    """GiB. GPU: peak allocated to tensors since the previous line. CPU: largest resident set so far."""
    memory_active: Annotated[float | None, "4_memory/memory_active"]
    """GiB, GPU: peak in blocks that hold tensors or wait for a stream, since the previous line."""
    alloc_retries: Annotated[int, "4_memory/alloc_retries"]
    """Times since this start that the GPU's memory was full until the allocator gave back what it kept. Each one
    waits for the device."""
    step_time: Annotated[float, "3_speed/4_step_time"]
    """Seconds that a step took, mean since the previous line."""
    data_time: Annotated[float, "3_speed/5_data_time"]
    """Seconds that a step waited for its data, mean since the previous line."""
    forward_backward_time: Annotated[float, "3_speed/6_forward_backward_time"]
    """Forward and backward passes: seconds of a step as the host spends them, mean since the previous line. A GPU
    computes behind the host, which waits for it where a number is read, in a logged step, or where its queue is
    full."""
    optimizer_time: Annotated[float, "3_speed/7_optimizer_time"]
    """Clipping and optimizer: seconds of a step as the host spends them, mean since the previous line. A GPU
    computes behind the host, which waits for it where a number is read, in a logged step, or where its queue is
    full."""
    checkpoint_time: Annotated[float, "3_speed/8_checkpoint_time"]
    """Saves: seconds of a step as the host spends them, mean since the previous line. A GPU computes behind the
    host, which waits for it where a number is read, in a logged step, or where its queue is full."""
    other_time: Annotated[float, "3_speed/9_other_time"]
    """The rest, which has validations, samples, signals and this line: seconds of a step as the host spends them,
    mean since the previous line. A GPU computes behind the host, which waits for it where a number is read, in a
    logged step, or where its queue is full."""
    elapsed: Annotated[float, "6_progress/elapsed"]
    """Seconds since this start of the program began to train."""
    time_left: Annotated[float, "6_progress/time_left"]
    """Seconds to the last step at the mean pace after the first line of this start."""
    time: float
    utilization: Annotated[float, "6_progress/utilization"] = 1.0
    """Share (0 to 1) of the positions of all rows so far that have a loss; packing and masks leave some out."""
    skipped_records: Annotated[int, "7_counters/skipped_records"] = 0
    """Records of the data that all ranks left out since this start (dataset.on_bad_record = "skip"), each once."""
    skipped_steps: Annotated[int, "7_counters/skipped_steps"] = 0
    """Steps since step 1 that changed nothing, because loss or gradient was not finite or a spike: see [guards]."""
    spikes: Annotated[int, "7_counters/spikes"] = 0
    """Steps since step 1 whose loss or gradient norm was a spike: see [guards]."""
    roll_backs: Annotated[int, "7_counters/roll_backs"] = 0
    """Times since step 1 that a spike took the weights back to a checkpoint: see [guards]."""
    failed_saves: Annotated[int, "7_counters/failed_saves"] = 0
    """Checkpoints that could not be written since this start."""
    save_waits: Annotated[int, "7_counters/save_waits"] = 0
    """Saves that had to wait for the end of the one before, since this start."""
    failed_mirrors: Annotated[int, "7_counters/failed_mirrors"] = 0
    """Checkpoints that could not be copied to checkpoint.mirror since this start."""
    failed_writes: Annotated[int, "7_counters/failed_writes"] = 0
    """Times that metrics, the log or events could not be written (disk full), since this start."""
    source_tokens: Annotated[dict[str, int], "6_progress/source_tokens"] = {}
    """Tokens of the rows that were read from a source of data."""
    source_epochs: Annotated[dict[str, float], "6_progress/source_epochs"] = {}
    """How many times a source of data was read, by its documents or its parts."""
    grad_norms: Annotated[dict[str, float], "8_gradient_norms"] = {}
    """L2 norm of this step's gradient of a group of parameters, before clipping."""
    update_ratios: Annotated[dict[str, float], "9_update_ratios"] = {}
    """Norm of this step's update of a group of parameters, without weight decay, as a share of that of its
    weights."""
    distributions: dict[str, dict[str, list[float]]] = {}


def json_line(values: Mapping[str, Any]) -> str:
    """A line of strict JSON: see `LoggedStep`."""
    return json.dumps(_strict(values), allow_nan=False) + "\n"


def _strict(values: Mapping[str, Any]) -> dict[str, Any]:
    objects = {name: _strict(value) for name, value in values.items() if isinstance(value, dict)}
    nonfinite = {name: str(x) for name, x in values.items() if isinstance(x, float) and not math.isfinite(x)}
    extra = {"nonfinite": nonfinite} if nonfinite else {}
    return {name: x for name, x in {**values, **objects, **extra}.items() if x != {}} | dict.fromkeys(nonfinite)


def points(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The tags of a logged step's numbers with their values, from `model_dump`."""
    for name, value in values.items():
        if name in LoggedStep.model_fields and name not in TAGS:
            continue
        tag = TAGS.get(name, f"7_counters/{name}")  # or a number that a hook has added
        parts = (
            {f"{tag}/{part}": of_part for part, of_part in value.items()} if isinstance(value, dict) else {tag: value}
        )
        yield from ((tag, number) for tag, number in parts.items() if isinstance(number, int | float))


# Name of a number -> its curve in TensorBoard, which sorts groups, and the tags in a group, by name.
TAGS: dict[str, str] = {name: info.metadata[0] for name, info in LoggedStep.model_fields.items() if info.metadata}
# The fields of a validation's score: tag and meaning.
VALIDATION_CURVES = {
    "loss": ("1_loss/validation", "Mean cross entropy of a token of the validation data, nats."),
    "perplexity": ("5_validation/perplexity", "exp(loss)."),
    "bits_per_byte": ("5_validation/bits_per_byte", "Cross entropy in bits per byte of text, not per token."),
}
