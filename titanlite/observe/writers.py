"""Where the numbers of a run go: one small interface, and the writers of the log, JSON files, TensorBoard and W&B.

Invariant: a writer gets what was measured, once for each logged step, validation and set of samples. It never reads a
tensor, and it changes nothing that other parts see.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from titanlite.config.errors import UserError, one_line
from titanlite.config.load import dump_config
from titanlite.config.mistakes import shown
from titanlite.config.run import Run
from titanlite.observe.logged_step import CURVES, TIME_PARTS, VALIDATION_CURVES, Curve, LoggedStep, StepLine, points

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

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
        steps = str(self.start.run.job.training.steps)
        mfu = "" if entry.mfu is None else f"mfu {entry.mfu:.1%}  "
        line = (
            f"step {entry.step:>{len(steps)}}/{steps}  loss {entry.loss:.4f}  grad_norm {entry.grad_norm:.3f}  "
            f"lr {entry.lr:.2e}  {entry.tps:,.0f} tokens/s  {mfu}{entry.memory:.2f} GiB  "
            f"eta {timedelta(seconds=round(entry.time_left))}"
        )
        LOGGER.info(StepLine(line))


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


# TensorBoard's tab "Custom scalars": title of a chart -> its curves, by their names in metrics.jsonl.
_CHARTS = {
    "loss": ("loss", "loss_max"),
    "seconds of a step": ("step_time", *TIME_PARTS),
    "memory, GiB": ("memory", "memory_peak", "memory_active"),
    "tokens of each source": ("source_tokens",),
    "gradient norm of groups": ("grad_norms",),
}


class TensorBoard(Writer):
    """Event files in the folder tb: curves with their units, validations, samples, job file and environment as text.

    A resumed run has each step once, because TensorBoard hides what an earlier start wrote after the step of the
    checkpoint. Each call ends with its events in the file, so that a killed run keeps them.
    """

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
        self._write(lambda board: _add_points(board, points(entry.model_dump()), entry.step))
        for name, parts in entry.distributions.items():
            for part, values in parts.items():
                tag, finite = CURVES[name].of(part).tag, [value for value in values if math.isfinite(value)]
                if finite:
                    self._write(lambda board, t=tag, f=finite: board.add_histogram(t, _array(f), entry.step))

    def validated(self, step: int, score: Mapping[str, float]) -> None:
        found = [(VALIDATION_CURVES[name], value) for name, value in score.items()]
        self._write(lambda board: _add_points(board, found, step))

    def sampled(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        texts = {f"samples/{i}": f"{sample['prompt']}{sample['completion']}" for i, sample in enumerate(samples)}
        self._write(lambda board: _add_texts(board, texts, step))

    def close(self) -> None:
        self._write(lambda board: board.close())

    def _write(self, write: Callable[[SummaryWriter], None]) -> None:
        """Let `write` add events, and wait until they are in the file."""
        if self._board is not None:
            board, self._board = self._board, None
            write(board)
            board.flush()
            self._board = board  # stays None after a failure, because its thread is dead


def _array(values: list[float]) -> Any:
    import numpy as np

    return np.array(values)


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


class WeightsAndBiases(Writer):
    """A run of W&B (the extra `wandb`), the same one for all starts. What it keeps on disk is in the folder wandb.

    A step that W&B has cannot be replaced: those that come again after a resume are left out, and after
    checkpoint.load_step a new run begins in the same group. W&B's own variables say where the numbers go:
    WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE=offline, WANDB_API_KEY.

    Raises:
        UserError: W&B refuses to begin, for example because there is no API key.
    """

    def __init__(self, start: RunStart) -> None:
        import wandb

        super().__init__(start)
        identity, job = start.environment["run"], start.run.job
        went_back = start.step > 0 and job.checkpoint.load_step == start.step
        try:
            self._run = wandb.init(
                dir=start.folder,
                project=os.environ.get("WANDB_PROJECT", "titanlite"),
                name=os.environ.get("WANDB_NAME", start.folder.resolve().name),
                group=os.environ.get("WANDB_RUN_GROUP", identity),
                notes=job.job.description or None,
                config={**job.model_dump(mode="json"), "environment": dict(start.environment)},
                allow_val_change=True,
                id=f"{identity}-{os.urandom(3).hex()}" if went_back else identity,
                resume="allow",
                settings=wandb.Settings(console="off"),  # train.log has it
            )
        except (wandb.Error, ValueError) as error:  # ValueError: a variable WANDB_... that it does not understand
            raise UserError(
                f"metrics.enable_wandb: Weights & Biases cannot begin: {one_line(str(error)).rstrip('.')}. Correct "
                "that (`wandb login` asks for a key), set WANDB_MODE=offline to write to the output folder only, or "
                "leave metrics.enable_wandb out."
            ) from None

    def logged(self, entry: LoggedStep) -> None:
        self._send(entry.step, points(entry.model_dump()))

    def validated(self, step: int, score: Mapping[str, float]) -> None:
        self._send(step, ((VALIDATION_CURVES[name], value) for name, value in score.items()))

    def sampled(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        import wandb

        texts: list[Any] = [[sample["prompt"], sample["completion"]] for sample in samples]
        self._run.log({"samples": wandb.Table(["prompt", "completion"], texts)}, step=step)

    def close(self) -> None:
        self._run.finish()

    def _send(self, step: int, found: Iterable[tuple[Curve, float]]) -> None:
        if step >= self._run.starting_step:
            # The tags without the numbers that sort TensorBoard's.
            self._run.log({re.sub(r"(^|/)\d+_", r"\1", curve.tag): value for curve, value in found}, step=step)


def load_writer(name: str) -> type[Writer]:
    """A writer of an installed package: an entry point of the group titanlite.writers, a class on `Writer`.

    Raises:
        UserError: No package offers it, several do, it cannot be imported, or it is something else.
    """
    offered = entry_points(group="titanlite.writers")
    found = {entry.value: entry for entry in offered if entry.name == name}
    if len(found) != 1:
        names = ", ".join(dict.fromkeys(entry.name for entry in offered)) or "none"
        what = f"several packages offer a writer {shown(name)}: {', '.join(sorted(found))}. Uninstall all but one."
        raise UserError(what if found else f"no installed package offers a writer {shown(name)}. There are: {names}.")
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
    metrics = start.run.job.metrics
    own = {JsonLines: True, TensorBoard: metrics.enable_tensorboard, WeightsAndBiases: metrics.enable_wandb}
    kinds = [kind for kind, asked in own.items() if asked] + [load_writer(name) for name in metrics.writers] + [Console]
    return [_open(kind, start) for kind in kinds if rank == 0 or kind.on_every_rank]


def _open(kind: type[Writer], start: RunStart) -> Writer:
    try:
        return kind(start)
    except OSError as error:
        raise UserError(
            f"[metrics]: the writer {kind.__name__} cannot begin: {error}. Free some space, correct the permissions, "
            "or leave it out."
        ) from error
