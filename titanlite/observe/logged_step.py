"""What a logged step says: the keys of a line of metrics.jsonl and of validation.jsonl, with their units.

Invariant: whoever shows such a number, in TensorBoard, on the terminal or in a report, takes its name, unit and group
from here. This needs no torch, because a run's files are read on machines that do not train.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, get_args, get_type_hints


class StepLine(str):
    """The log's line of a logged step. A live view, which shows the same numbers, keeps it off the terminal."""


@dataclass(frozen=True)
class Curve:
    """How TensorBoard shows a number: it sorts groups, and the tags in a group, by name."""

    tag: str
    description: str


@dataclass(frozen=True)
class LoggedStep:
    """A line of metrics.jsonl: one JSON object with these keys.

    Rates and times are means over the steps since the previous line, in wall-clock time, including saves. JSON has no
    NaN and no infinity: such a value is null, and an additional key has it as text, {"nonfinite": {"loss": "nan"}}.
    """

    step: int
    """Optimizer steps done, from 1."""
    loss: Annotated[float, Curve("1_loss/train", "Mean cross entropy of a token of this step's global batch, nats.")]
    grad_norm: Annotated[float, Curve("2_optimizer/gradient_norm", "L2 norm of this step's gradient before clipping.")]
    lr: Annotated[float, Curve("2_optimizer/learning_rate", "Learning rate of this step.")]
    tokens: Annotated[
        int, Curve("6_progress/tokens", "Tokens trained on since step 1, whatever the number of restarts.")
    ]
    tps: Annotated[float, Curve("3_speed/1_tokens_per_second", "Tokens per second of the whole world.")]
    tps_per_device: Annotated[
        float, Curve("3_speed/2_tokens_per_second_per_device", "Tokens per second of one device.")
    ]
    mfu: Annotated[
        float | None,
        Curve(
            "3_speed/3_mfu",
            "Model FLOP/s as a share (0 to 1) of the peak dense bfloat16 FLOP/s of the devices. Missing if the peak is "
            "unknown, as on a CPU.",
        ),
    ]
    memory: Annotated[
        float,
        Curve(
            "4_memory/memory",
            "GiB. GPU: peak reserved by the allocator since the previous line. CPU: resident set of this process.",
        ),
    ]
    memory_peak: Annotated[
        float,
        Curve(
            "4_memory/memory_peak",
            "GiB. GPU: peak allocated to tensors since the previous line. CPU: largest resident set so far.",
        ),
    ]
    data_time: Annotated[
        float, Curve("3_speed/5_data_time", "Seconds that a step waited for its data, mean since the previous line.")
    ]
    step_time: Annotated[float, Curve("3_speed/4_step_time", "Seconds that a step took, mean since the previous line.")]
    elapsed: Annotated[float, Curve("6_progress/elapsed", "Seconds since this start of the program began to train.")]
    time: float
    """Unix time."""
    utilization: Annotated[
        float,
        Curve(
            "6_progress/utilization",
            "Share (0 to 1) of the positions of all rows so far that have a loss; packing and masks leave some out.",
        ),
    ] = 1.0
    skipped_records: Annotated[
        int,
        Curve(
            "7_counters/skipped_records",
            'Records of the data that all ranks left out since this start (dataset.on_bad_record = "skip"), each once.',
        ),
    ] = 0
    failed_saves: Annotated[
        int, Curve("7_counters/failed_saves", "Checkpoints that could not be written since this start.")
    ] = 0
    save_waits: Annotated[
        int,
        Curve("7_counters/save_waits", "Saves that had to wait for the end of the one before, since this start."),
    ] = 0
    failed_writes: Annotated[
        int,
        Curve(
            "7_counters/failed_writes",
            "Times that metrics, the log or events could not be written (disk full), since this start.",
        ),
    ] = 0

    def to_json(self) -> str:
        """One line of strict JSON."""
        values = asdict(self)
        nonfinite = {name: str(x) for name, x in values.items() if x is not None and not math.isfinite(x)}
        if nonfinite:
            values |= dict.fromkeys(nonfinite) | {"nonfinite": nonfinite}
        return json.dumps(values, allow_nan=False)


def _curves(names: Mapping[str, Any]) -> dict[str, Curve]:
    """The curves in a class's annotations, by field."""
    found = {name: [mark for mark in get_args(hint) if isinstance(mark, Curve)] for name, hint in names.items()}
    return {name: marks[0] for name, marks in found.items() if marks}


CURVES = _curves(get_type_hints(LoggedStep, include_extras=True))
# The fields of a validation's score.
VALIDATION_CURVES = {
    "loss": Curve("1_loss/validation", "Mean cross entropy of a token of the validation data, nats."),
    "perplexity": Curve("5_validation/perplexity", "exp(loss)."),
    "bits_per_byte": Curve("5_validation/bits_per_byte", "Cross entropy in bits per byte of text, not per token."),
}
