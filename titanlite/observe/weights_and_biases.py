"""Weights & Biases: the curves of a run, its validations and its samples (the extra `wandb`).

Invariant: a run of titanlite is one run there, whatever the number of starts, and each step is there once. A start
first sends what the files of the run have and W&B lacks, because W&B loses what it had in memory when a run is killed.
In offline mode that is the whole run, so the newest folder has all of it. A step that was sent cannot be replaced:
after checkpoint.load_step, which goes back to train otherwise, a new run begins there, in the same group.

Where it goes, W&B's own variables say: WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE=offline, WANDB_API_KEY.
"""

from __future__ import annotations

import heapq
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pydantic import ValidationError

from titanlite.config.errors import UserError, one_line
from titanlite.config.files import put
from titanlite.observe.logged_step import VALIDATION_CURVES, LoggedStep, points
from titanlite.observe.writers import JSON_FILES, RunStart, Writer


class WeightsAndBiases(Writer):
    """A run of W&B. What it keeps on disk is in the folder wandb, with the id of the run.

    Raises:
        UserError: W&B refuses to begin, for example because there is no API key.
    """

    def __init__(self, start: RunStart) -> None:
        import wandb

        super().__init__(start)
        folder, identity, job = start.folder / "wandb", start.environment["run"], start.run.job
        folder.mkdir(exist_ok=True)
        id_file = folder / "id"
        id = (id_file.read_text(encoding="utf-8") if id_file.exists() else "") or identity
        if start.step > 0 and job.checkpoint.load_step == start.step:
            id = f"{identity}-{os.urandom(3).hex()}"
        put(id_file, id.encode())
        for earlier in folder.glob("offline-run-*"):
            earlier.rename(folder / f"superseded-{earlier.name}")
        try:
            self._run = wandb.init(
                dir=start.folder,
                project=os.environ.get("WANDB_PROJECT", "titanlite"),
                name=os.environ.get("WANDB_NAME", start.folder.resolve().name),
                group=os.environ.get("WANDB_RUN_GROUP", identity),
                notes=job.job.description or None,
                config={**job.model_dump(mode="json"), "environment": dict(start.environment)},
                allow_val_change=True,
                id=id,
                resume="allow",
                settings=wandb.Settings(console="off"),  # train.log has it
            )
        except (wandb.Error, ValueError) as error:  # ValueError: a variable WANDB_... that it does not understand
            if isinstance(error, ValidationError):
                reason = "; ".join(f"WANDB_{str(e['loc'][0]).upper()}: {e['msg']}" for e in error.errors())
            else:
                reason = str(error).rstrip(".")
            raise UserError(
                f"metrics.enable_wandb: Weights & Biases cannot begin: {one_line(reason)}. Correct that (`wandb login` "
                "asks for a key), set WANDB_MODE=offline to write to the output folder only, or leave "
                "metrics.enable_wandb out."
            ) from None
        for (step, name), lines in itertools.groupby(
            heapq.merge(*map(self._written, JSON_FILES)), lambda line: line[:2]
        ):
            self._send(step, self._values(name, [json.loads(line) for _, _, line in lines]))

    def logged(self, entry: LoggedStep) -> None:
        self._send(entry.step, self._values("metrics.jsonl", [asdict(entry)]))

    def validated(self, step: int, score: Mapping[str, float]) -> None:
        self._send(step, self._values("validation.jsonl", [score]))

    def sampled(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        self._send(step, self._values("samples.jsonl", samples))

    def close(self) -> None:
        self._run.finish()

    def _send(self, step: int, values: dict[str, Any]) -> None:
        if step >= self._run.starting_step:
            self._run.log(values, step=step)

    def _written(self, name: str) -> Iterator[tuple[int, str, str]]:
        """Step, file and text of the lines in a file of this run, in the order of the steps."""
        path = self.start.folder / name
        if path.exists():
            with path.open(encoding="utf-8") as file:
                yield from ((json.loads(line)["step"], name, line) for line in file)

    @staticmethod
    def _values(name: str, lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """What W&B gets of lines of a file that belong to the same step."""
        if name == "samples.jsonl":
            import wandb

            texts: list[Any] = [[line["prompt"], line["completion"]] for line in lines]
            return {"samples": wandb.Table(["prompt", "completion"], texts)}
        line = lines[0]
        if name == "validation.jsonl":
            curves: Iterable[Any] = ((VALIDATION_CURVES[key], line[key]) for key in VALIDATION_CURVES if key in line)
        else:
            curves = points(line)
        # The tags without the numbers that sort TensorBoard's.
        found = {re.sub(r"(^|/)\d+_", r"\1", curve.tag): value for curve, value in curves}
        return found | ({"_timestamp": line["time"]} if "time" in line else {})
