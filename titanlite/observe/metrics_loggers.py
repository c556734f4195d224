"""Metrics loggers: the interface, and the loggers for JSON files, TensorBoard and Weights & Biases.

Invariant: metrics loggers run on rank 0 only, receive Python numbers instead of tensors, and do not
change the state of the run.
"""

from __future__ import annotations

import json
import math
import os
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from titanlite.config.errors import UserError, one_line
from titanlite.config.load import dump_config
from titanlite.config.registry import METRICS_LOGGERS
from titanlite.config.run import Run
from titanlite.observe.logged_step import (
    TAGS,
    VALIDATION_CURVES,
    LoggedStep,
    json_line,
    scalar_points,
)

METRICS_FILES = ("metrics.jsonl", "validation.jsonl", "samples.jsonl")
"""Files that the JSON metrics logger writes to the output folder."""


@dataclass(frozen=True)
class RunStart:
    """Information about a start of a run, passed to each metrics logger.

    A run that is interrupted and resumed has several starts.

    Attributes:
        run: The run that starts.
        step: Step of the checkpoint that was loaded, or 0. All later steps will be logged, even if
            an earlier start already logged them.
        environment: Content of environment.json. Its key "run" is the ID of the run.
    """

    run: Run
    step: int
    environment: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        """Output folder of the run, which exists."""
        return self.run.dump_folder


class MetricsLogger:
    """Base class of metrics loggers. Override the methods for the data that you need.

    Training waits for each call. If a method raises OSError, the data is dropped and the failure is
    counted in `failed_writes`. Any other exception ends the run.

    Args:
        start: The start of the run. If the run resumes, metrics of steps after `start.step` have
            already been moved out of the JSON files.
    """

    def __init__(self, start: RunStart) -> None:
        self.start = start

    def logged(self, entry: LoggedStep) -> None:
        """Log the metrics of a step.

        Called every `metrics.log_freq` steps, for the first step after each start, and for the last
        step of the run.
        """

    def validated(self, step: int, score: Mapping[str, float]) -> None:
        """Log the result of the validation after `step`.

        Args:
            step: Number of completed optimizer steps.
            score: Result, with the keys of `VALIDATION_CURVES`.
        """

    def sampled(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Log the text samples generated after `step`.

        Args:
            step: Number of completed optimizer steps.
            samples: One mapping per sample, with the keys `prompt` and `completion`.
        """

    def close(self) -> None:
        """Release all resources. Called at the end of training unless the process is killed."""


class JsonLines(MetricsLogger):
    """Metrics logger that appends JSON lines to metrics.jsonl, validation.jsonl and samples.jsonl.

    Each line is a JSON object with the number of the step.
    """

    def __init__(self, start: RunStart) -> None:
        super().__init__(start)
        job = start.run.job
        names = ["metrics.jsonl"]
        if job.validation.freq:
            names.append("validation.jsonl")
        if job.samples.freq:
            names.append("samples.jsonl")

        self._files: dict[str, TextIO] = {
            name: _open_for_appending(start.folder / name) for name in names
        }

    def logged(self, entry: LoggedStep) -> None:
        """Append the metrics to metrics.jsonl."""
        self._write("metrics.jsonl", entry.model_dump(exclude={"distributions"}))

    def validated(self, step: int, score: Mapping[str, float]) -> None:
        """Append the score to validation.jsonl."""
        self._write("validation.jsonl", {"step": step, **score})

    def sampled(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Append the samples to samples.jsonl, all in a single write."""
        self._write("samples.jsonl", *({"step": step, **sample} for sample in samples))

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def _write(self, name: str, *rows: dict[str, Any]) -> None:
        file = self._files[name]
        # If the disk is full, the lines stay in the buffer and are written with the next ones.
        file.write("".join(json_line(row) for row in rows))
        file.flush()


def _open_for_appending(path: Path) -> TextIO:
    """Open a text file at its end. If a crash has cut off its last line, begin a new line."""
    is_cut = False
    if path.exists() and path.stat().st_size > 0:
        with path.open("rb") as content:
            content.seek(-1, os.SEEK_END)
            is_cut = content.read() != b"\n"

    file = path.open("a", encoding="utf-8")
    if is_cut:
        file.write("\n")
    return file


class TensorBoard(MetricsLogger):
    """Metrics logger that writes event files for TensorBoard to the folder "tb".

    The files contain curves, histograms, samples, the job and the environment. If the job enables
    Weights & Biases, it receives the same curves. Each call flushes its events. If a resumed run
    repeats steps, TensorBoard hides the events that the earlier start wrote for these steps.

    Raises:
        UserError: If W&B cannot start, for example because there is no API key.
    """

    def __init__(self, start: RunStart) -> None:
        from torch.utils.tensorboard import SummaryWriter

        super().__init__(start)
        self._wandb = None
        if start.run.job.metrics.enable_wandb:
            self._wandb = _start_wandb(start)

        # A run that resumes from step 0 validates again before its first step.
        purge_step = start.step + 1 if start.step else 0
        self._board = SummaryWriter(str(start.folder / "tb"), purge_step=purge_step)
        environment = json.dumps(dict(start.environment), indent=2)
        self._add_texts({"job": dump_config(start.run.job), "environment": environment}, start.step)

    def logged(self, entry: LoggedStep) -> None:
        """Write the metrics of a step as scalars and histograms."""
        import numpy as np

        for name, groups in entry.distributions.items():
            for group, values in groups.items():
                finite_values = [value for value in values if math.isfinite(value)]
                if finite_values:
                    tag = f"{TAGS[name]}/{group}"
                    self._board.add_histogram(tag, np.array(finite_values), entry.step)
        self._add_scalars(scalar_points(entry), entry.step)

    def validated(self, step: int, score: Mapping[str, float]) -> None:
        """Write the score as scalars."""
        points = [(VALIDATION_CURVES[name][0], value) for name, value in score.items()]
        self._add_scalars(points, step)

    def sampled(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write the samples as text."""
        texts = {
            f"samples/{i}": f"{sample['prompt']}{sample['completion']}"
            for i, sample in enumerate(samples)
        }
        self._add_texts(texts, step)

    def close(self) -> None:
        """Close the event file and finish the W&B run."""
        self._board.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _add_scalars(self, points: Iterable[tuple[str, float]], step: int) -> None:
        for tag, value in points:
            self._board.add_scalar(tag, value, step)
        self._board.flush()

    def _add_texts(self, texts: Mapping[str, str], step: int) -> None:
        for tag, text in texts.items():
            # TensorBoard renders Markdown, in which four spaces mark verbatim text.
            self._board.add_text(tag, textwrap.indent(text, "    "), step)
        self._board.flush()


def _start_wandb(start: RunStart) -> Any:
    """Start or resume a Weights & Biases run that uploads the TensorBoard curves.

    The environment variables of W&B, such as WANDB_PROJECT and WANDB_API_KEY, select the project
    and the account.

    Returns:
        The W&B run. Call `finish` on it at the end.

    Raises:
        UserError: If W&B cannot start.
    """
    import wandb

    config = start.run.job.model_dump(mode="json")
    config["environment"] = dict(start.environment)
    try:
        return wandb.init(
            dir=start.folder,
            project=os.environ.get("WANDB_PROJECT", "titanlite"),
            name=os.environ.get("WANDB_NAME", start.folder.resolve().name),
            config=config,
            allow_val_change=True,
            id=start.environment["run"],
            resume="allow",
            sync_tensorboard=True,
            settings=wandb.Settings(console="off"),  # train.log has the same lines
        )
    except (wandb.Error, ValueError) as error:  # ValueError: a WANDB_* variable is invalid
        reason = one_line(str(error)).rstrip(".")
        raise UserError(
            f"metrics.enable_wandb: Weights & Biases cannot start: {reason}. Fix this, set "
            "WANDB_MODE=offline to write to the output folder only, or disable "
            "metrics.enable_wandb."
        ) from None


def open_metrics_loggers(start: RunStart) -> list[MetricsLogger]:
    """Create the metrics loggers that the job enables: JSON, TensorBoard and plugins.

    Call `close` on each of them at the end.

    Raises:
        OSError: If a logger cannot open its files.
    """
    job = start.run.job
    names = ["json"]
    # Weights & Biases copies the metrics from the TensorBoard logger.
    if job.metrics.enable_tensorboard or job.metrics.enable_wandb:
        names.append("tensorboard")
    names += job.metrics.loggers

    unique_names = dict.fromkeys(names)  # in the same order
    return [
        METRICS_LOGGERS.make_instance(MetricsLogger, name, start, job=job) for name in unique_names
    ]
