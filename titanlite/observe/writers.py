"""Where the numbers of a run go: one small interface, and the writers of the log and of the JSON files.

Invariant: a writer gets what was measured, once for each logged step, validation and set of samples. It never reads a
tensor, and it changes nothing that other parts see.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TextIO

from titanlite.config.run import Run
from titanlite.observe.logged_step import LoggedStep, StepLine

LOGGER = logging.getLogger("titanlite")
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

    Rank 0 alone has writers, except for those `on_every_rank`. Training waits for each call. An OSError costs what the
    call would have written, and is counted; any other exception ends the run.

    Args:
        start: What begins. The files of an earlier start of the same run have been prepared to be continued.
    """

    on_every_rank = False

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


class Console(Writer):
    """The line of a logged step in the log: on the terminal and in train.log."""

    on_every_rank = True

    def logged(self, entry: LoggedStep) -> None:
        LOGGER.info(StepLine(self.line(entry)))

    def line(self, entry: LoggedStep) -> str:
        """The numbers that a person looks at."""
        steps = str(self.start.run.job.training.steps)
        mfu = "" if entry.mfu is None else f"mfu {entry.mfu:.1%}  "
        return (
            f"step {entry.step:>{len(steps)}}/{steps}  loss {entry.loss:.4f}  grad_norm {entry.grad_norm:.3f}  "
            f"lr {entry.lr:.2e}  {entry.tps:,.0f} tokens/s  {mfu}{entry.memory:.2f} GiB  "
            f"eta {timedelta(seconds=round(entry.time_left))}"
        )


class JsonLines(Writer):
    """metrics.jsonl, validation.jsonl, and samples.jsonl if the job has samples."""

    def __init__(self, start: RunStart) -> None:
        super().__init__(start)
        names = JSON_FILES if start.run.job.samples.freq else JSON_FILES[:2]
        self._files: dict[str, TextIO] = {name: (start.folder / name).open("a", encoding="utf-8") for name in names}

    def logged(self, entry: LoggedStep) -> None:
        self._write("metrics.jsonl", entry.to_json())

    def validated(self, step: int, score: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else str(value) for name, value in score.items()}
        self._write("validation.jsonl", json.dumps({"step": step, **finite}, allow_nan=False))

    def sampled(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        for sample in samples:
            self._write("samples.jsonl", json.dumps({"step": step, **sample}))

    def _write(self, name: str, line: str) -> None:
        file = self._files[name]
        file.write(line + "\n")  # a line that was not written stays in the buffer for the next try
        file.flush()  # so that readers see the line now, and a killed run keeps it

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def offered_writers() -> dict[str, EntryPoint]:
    """The writers of installed packages by name: entry points of the group titanlite.writers, each a class on
    `Writer`."""
    return {offered.name: offered for offered in entry_points(group="titanlite.writers")}


def open_writers(start: RunStart, rank: int) -> list[Writer]:
    """The writers that the job asks for, on a rank.

    The log comes last, so that a line in it says that the step has been written everywhere.
    """
    kinds: list[type[Writer]] = [JsonLines]
    metrics = start.run.job.metrics
    if metrics.enable_tensorboard and rank == 0:
        from titanlite.observe.tensorboard import TensorBoard

        kinds.append(TensorBoard)
    if metrics.enable_wandb and rank == 0:
        from titanlite.observe.weights_and_biases import WeightsAndBiases

        kinds.append(WeightsAndBiases)
    kinds += [offered_writers()[name].load() for name in metrics.writers]
    return [kind(start) for kind in (*kinds, Console) if rank == 0 or kind.on_every_rank]
