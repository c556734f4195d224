"""Where the numbers of a run go: one small interface, and the writers of JSON files, TensorBoard and W&B.

Invariant: a writer gets what was measured, once for each logged step, validation and set of samples. It never reads a
tensor, and it changes nothing that other parts see.
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
from titanlite.config.registry import WRITERS
from titanlite.config.run import Run
from titanlite.observe.logged_step import TAGS, VALIDATION_CURVES, LoggedStep, json_line, points

JSON_FILES = ("metrics.jsonl", "validation.jsonl", "samples.jsonl")


@dataclass(frozen=True)
class RunStart:
    """A start of a run, as its writers see it.

    Attributes:
        step: Last step of the checkpoint that was loaded; 0 if none was. Later steps of an earlier start come again.
        environment: The content of environment.json; `run` in it is the identity of the run.
    """

    run: Run
    step: int
    environment: Mapping[str, Any]

    @property
    def folder(self) -> Path:
        """The output folder. It exists."""
        return self.run.dump_folder


class Writer:
    """A place for numbers: a subclass overrides the methods for what it shows.

    Rank 0 alone has writers. Training waits for each call. An OSError costs what the call would have written, and is
    counted; any other exception ends the run.

    Args:
        start: What begins. The files of an earlier start of the same run have been prepared to be continued.
    """

    def __init__(self, start: RunStart) -> None:
        self.start = start

    def logged(self, entry: LoggedStep) -> None:
        """A step that is logged (metrics.log_freq)."""

    def validated(self, step: int, score: Mapping[str, float]) -> None:
        """A validation after `step`. `score` has the keys of `VALIDATION_CURVES`."""

    def sampled(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Completions after `step`: JSON values with the keys `prompt` and `completion`."""

    def close(self) -> None:
        """The end of this start, unless the process is killed."""


class JsonLines(Writer):
    """metrics.jsonl, validation.jsonl, and samples.jsonl if the job has samples."""

    def __init__(self, start: RunStart) -> None:
        super().__init__(start)
        names = JSON_FILES if start.run.job.samples.freq else JSON_FILES[:2]
        self._files: dict[str, TextIO] = {name: (start.folder / name).open("a", encoding="utf-8") for name in names}

    def logged(self, entry: LoggedStep) -> None:
        self._write("metrics.jsonl", entry.model_dump(exclude={"distributions"}))

    def validated(self, step: int, score: Mapping[str, float]) -> None:
        self._write("validation.jsonl", {"step": step, **score})

    def sampled(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        for sample in samples:
            self._write("samples.jsonl", {"step": step, **sample})

    def _write(self, name: str, values: dict[str, Any]) -> None:
        file = self._files[name]
        file.write(json_line(values))  # a line that was not written stays in the buffer for the next try
        file.flush()  # so that readers see the line now, and a killed run keeps it

    def close(self) -> None:
        for file in self._files.values():
            file.close()


class TensorBoard(Writer):
    """Event files in the folder tb: curves, validations, samples, job file and environment as text. Weights & Biases
    (the extra `wandb`) reads along, if the job asks for it.

    A resumed run has each step once, because TensorBoard hides what an earlier start wrote after the step of the
    checkpoint. Each call ends with its events in the file, so that a killed run keeps them.

    Raises:
        UserError: W&B refuses to begin, for example because there is no API key.
    """

    def __init__(self, start: RunStart) -> None:
        from torch.utils.tensorboard import SummaryWriter

        super().__init__(start)
        self._wandb = _start_wandb(start) if start.run.job.metrics.enable_wandb else None
        purge = start.step + 1 if start.step else 0  # a run that resumes from step 0 validates again
        self._board = SummaryWriter(str(start.folder / "tb"), purge_step=purge)
        environment = json.dumps(dict(start.environment), indent=2)
        self._add_texts({"job": dump_config(start.run.job), "environment": environment}, start.step)

    def logged(self, entry: LoggedStep) -> None:
        import numpy as np

        for name, parts in entry.distributions.items():
            for part, values in parts.items():
                if finite := [value for value in values if math.isfinite(value)]:
                    self._board.add_histogram(f"{TAGS[name]}/{part}", np.array(finite), entry.step)
        self._add_points(points(entry.model_dump()), entry.step)

    def validated(self, step: int, score: Mapping[str, float]) -> None:
        self._add_points(((VALIDATION_CURVES[name][0], value) for name, value in score.items()), step)

    def sampled(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        texts = {f"samples/{i}": f"{sample['prompt']}{sample['completion']}" for i, sample in enumerate(samples)}
        self._add_texts(texts, step)

    def close(self) -> None:
        self._board.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _add_points(self, found: Iterable[tuple[str, float]], step: int) -> None:
        for tag, value in found:
            self._board.add_scalar(tag, value, step)
        self._board.flush()

    def _add_texts(self, texts: Mapping[str, str], step: int) -> None:
        for name, text in texts.items():
            self._board.add_text(name, textwrap.indent(text, "    "), step)  # four spaces: shown as it is written
        self._board.flush()


def _start_wandb(start: RunStart) -> Any:
    """A run of W&B, the same one for all starts, which takes what is written to TensorBoard from now on. What it keeps
    on disk is in the folder wandb, and its own variables say where the numbers go."""
    import wandb

    try:
        return wandb.init(
            dir=start.folder,
            project=os.environ.get("WANDB_PROJECT", "titanlite"),
            name=os.environ.get("WANDB_NAME", start.folder.resolve().name),
            config={**start.run.job.model_dump(mode="json"), "environment": dict(start.environment)},
            allow_val_change=True,
            id=start.environment["run"],
            resume="allow",
            sync_tensorboard=True,
            settings=wandb.Settings(console="off"),  # train.log has it
        )
    except (wandb.Error, ValueError) as error:  # ValueError: a variable WANDB_... that it does not understand
        raise UserError(
            f"metrics.enable_wandb: Weights & Biases cannot begin: {one_line(str(error)).rstrip('.')}. Correct that, "
            "set WANDB_MODE=offline to write to the output folder only, or leave metrics.enable_wandb out."
        ) from None


def open_writers(start: RunStart) -> list[Writer]:
    """The writers that the job asks for.

    Raises:
        OSError: One cannot begin, for example because of the permissions of its files.
    """
    job, metrics = start.run.job, start.run.job.metrics
    board = ["tensorboard"] if metrics.enable_tensorboard or metrics.enable_wandb else []
    return [WRITERS.make(name, job, start) for name in dict.fromkeys(["json", *board, *metrics.writers])]
