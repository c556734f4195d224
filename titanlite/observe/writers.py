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
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TextIO

from titanlite.config.errors import UserError, one_line
from titanlite.config.mistakes import shown
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


def load_writer(name: str) -> type[Writer]:
    """A writer of an installed package: an entry point of the group titanlite.writers, a class on `Writer`.

    Raises:
        UserError: No package offers it, several do, it cannot be imported, or it is something else.
    """
    offered = entry_points(group="titanlite.writers")
    found = {entry.value: entry for entry in offered if entry.name == name}
    if not found:
        others = ", ".join(dict.fromkeys(entry.name for entry in offered)) or "none"
        raise UserError(f"no installed package offers a writer {shown(name)}. There are: {others}.")
    if len(found) > 1:
        packages = ", ".join(sorted(entry.dist.name if entry.dist else entry.value for entry in found.values()))
        raise UserError(f"several packages offer a writer {shown(name)}: {packages}. Uninstall all but one.")
    (entry,) = found.values()
    try:
        kind = entry.load()
    except Exception as error:  # it runs code of the package
        why = one_line(f"{type(error).__name__}: {error}")
        raise UserError(f"the writer {shown(name)}, {entry.value}, cannot be imported: {why}") from error
    if not (isinstance(kind, type) and issubclass(kind, Writer)):
        raise UserError(f"the writer {shown(name)}, {entry.value}, is not a class on titanlite.observe.writers.Writer.")
    return kind


def open_writers(start: RunStart, rank: int) -> list[Writer]:
    """The writers that the job asks for, on a rank.

    The log comes last, so that a line in it says that the step has been written everywhere.

    Raises:
        UserError: One cannot begin, for example because of the permissions of its files.
    """
    kinds: list[type[Writer]] = [JsonLines]
    metrics = start.run.job.metrics
    if metrics.enable_tensorboard and rank == 0:
        from titanlite.observe.tensorboard import TensorBoard

        kinds.append(TensorBoard)
    if metrics.enable_wandb and rank == 0:
        from titanlite.observe.weights_and_biases import WeightsAndBiases

        kinds.append(WeightsAndBiases)
    kinds += [load_writer(name) for name in metrics.writers]
    return [_open(kind, start) for kind in (*kinds, Console) if rank == 0 or kind.on_every_rank]


def _open(kind: type[Writer], start: RunStart) -> Writer:
    try:
        return kind(start)
    except OSError as error:
        raise UserError(
            f"[metrics]: the writer {kind.__name__} cannot begin: {error}. Free some space, correct the permissions, "
            "or leave it out."
        ) from error
