"""TensorBoard: curves with their units, validations, samples, and the job file and the environment as text.

Invariant: a resumed run has each step once. TensorBoard hides what an earlier start wrote after the step of the
checkpoint. Nothing before it is missing, because each call ends with its events in the file.
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from titanlite.config.load import dump_config
from titanlite.observe.logged_step import CURVES, TIME_PARTS, VALIDATION_CURVES, Curve, LoggedStep, points
from titanlite.observe.writers import RunStart, Writer

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

# The tab "Custom scalars": title of a chart -> its curves, by their names in metrics.jsonl.
_CHARTS = {
    "loss": ("loss", "loss_max"),
    "seconds of a step": ("step_time", *TIME_PARTS),
    "memory, GiB": ("memory", "memory_peak", "memory_active"),
    "tokens of each source": ("source_tokens",),
    "gradient norm of groups": ("grad_norms",),
    "largest values in FP8 layers": ("float8_amax",),
    "values too large for FP8": ("float8_overflow",),
    "share of values that FP8 makes zero": ("float8_underflow",),
}


class TensorBoard(Writer):
    """Event files in the folder tb."""

    def __init__(self, start: RunStart) -> None:
        from torch.utils.tensorboard import SummaryWriter

        super().__init__(start)
        purge = start.step + 1 if start.step else 0  # a run that resumes from step 0 validates again
        self._board: SummaryWriter | None = SummaryWriter(str(start.folder / "tb"), purge_step=purge)
        environment = dict(start.environment)
        texts = {"job": dump_config(start.run.job), "environment": json.dumps(environment, indent=2)}
        texts["layout"] = json.dumps(environment.get("layout"), indent=2)
        layout = {title: ["Multiline", [CURVES[name].tag for name in names]] for title, names in _CHARTS.items()}
        layout["loss"][1].append(VALIDATION_CURVES["loss"].tag)
        self._write(lambda board: _add_texts(board, texts, start.step))
        self._write(lambda board: board.add_custom_scalars({"titanlite": layout}))

    def logged(self, entry: LoggedStep) -> None:
        self._write(lambda board: _add_points(board, points(asdict(entry)), entry.step))
        for name, parts in entry.distributions.items():
            for part, values in parts.items():
                tag, finite = CURVES[name].of(part).tag, [value for value in values if math.isfinite(value)]
                if finite:
                    self._write(lambda board, t=tag, f=finite: board.add_histogram(t, np.array(f), entry.step))

    def validated(self, step: int, score: Mapping[str, float]) -> None:
        found = [(VALIDATION_CURVES[name], value) for name, value in score.items()]
        self._write(lambda board: _add_points(board, found, step))

    def sampled(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        texts = {f"samples/{i}": f"{sample['prompt']}{sample['completion']}" for i, sample in enumerate(samples)}
        self._write(lambda board: _add_texts(board, texts, step))

    def close(self) -> None:
        self._write(lambda board: board.close())

    def _write(self, write: Callable[[SummaryWriter], None]) -> None:
        """Let `write` add events, and wait until they are in the file, so that a killed run keeps them."""
        if self._board is not None:
            board, self._board = self._board, None
            write(board)
            board.flush()
            self._board = board  # stays None after a failure, because its thread is dead


def _add_points(board: SummaryWriter, found: Iterable[tuple[Curve, float]], step: int) -> None:
    """Add points of curves with their descriptions, which `SummaryWriter.add_scalar` cannot write."""
    from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR, Summary  # pyright: ignore
    from tensorboard.plugins.scalar.metadata import create_summary_metadata

    assert board.file_writer is not None
    for curve, value in found:
        metadata = create_summary_metadata(curve.tag, curve.description)
        metadata.data_class = DATA_CLASS_SCALAR  # otherwise TensorBoard ignores the rest of the metadata
        point = Summary.Value(tag=curve.tag, simple_value=value, metadata=metadata)
        board.file_writer.add_summary(Summary(value=[point]), step)


def _add_texts(board: SummaryWriter, texts: Mapping[str, str], step: int) -> None:
    for name, text in texts.items():
        board.add_text(name, textwrap.indent(text, "    "), step)  # four spaces: it is shown as it is written
