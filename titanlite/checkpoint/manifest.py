"""What `manifest.json` says of a checkpoint: its files, and what describes the run that saved it.

Invariant: a manifest that was read is bytewise one that `encode_manifest` writes, and each value in it has the type and
the range that a run gives it. What other versions of titanlite may add stands in `job` and in `train_state` alone;
any other new key needs a new `FORMAT_VERSION`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any, Literal

import xxhash
from pydantic import BaseModel, Field, JsonValue, NonNegativeInt, PositiveInt, ValidationError, model_validator

from titanlite.checkpoint.index import INDEX
from titanlite.checkpoint.open_files import read_file
from titanlite.config.errors import CheckpointError, Damage
from titanlite.config.files import MANIFEST, FileModel, explain
from titanlite.config.flavors import Architecture

FORMAT_VERSION = 1
DATA_VERSION = 2
_MOST_BYTES = 1 << 25  # a rank's file takes 120 bytes: enough for 250,000 ranks
# An index may have so many bytes more than the tensors that it lists. A chunk takes 146 bytes in the index, and at
# least 1,200 in its file.
_MOST_INDEX_BYTES = 1 << 20

Count = Annotated[int, Field(ge=0, lt=2**63)]
FileName = Annotated[str, Field(pattern=r"^[^/\x00]+$", max_length=255)]


class FileEntry(FileModel):
    """Size in bytes and XXH3 128-bit checksum of one file."""

    size: Count
    xxh3_128: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]


class _Open(BaseModel):
    """A part to which versions may add keys."""

    model_config = {"strict": True, "extra": "allow", "allow_inf_nan": False}


class ScheduleState(_Open):
    """`titanlite.data.mixing.Schedule`: batches so far, and rows of each source."""

    step: Count
    rows: Annotated[list[Count], Field(min_length=1)]
    weights: list[Count]
    stage_rows: list[Count]

    @model_validator(mode="after")
    def _agree(self) -> ScheduleState:
        if len(self.stage_rows) != len(self.rows) or len(self.weights) not in (0, len(self.rows)):
            raise ValueError("rows, weights and stage_rows are of different numbers of sources")
        begun = self.step > 0
        if sum(self.rows) < self.step or {any(self.rows), any(self.stage_rows), any(self.weights)} != {begun}:
            raise ValueError(f"rows that {self.step} batches do not have")
        # After any number of rows of a stage each source has had its share, less than one row more or less.
        total, length = sum(self.weights), sum(self.stage_rows)
        for rows, of_stage, weight in zip(self.rows, self.stage_rows, self.weights, strict=begun):
            if of_stage > rows or abs(of_stage * total - weight * length) >= total:
                raise ValueError("sources that have not had their shares")
        return self


class SourceState(_Open):
    """One source and where each of its streams goes on: turn, window, index, offset."""

    name: str
    fingerprint: str
    streams: Annotated[
        list[Annotated[list[Count], Field(min_length=4, max_length=4)]], Field(min_length=1, max_length=1 << 16)
    ]


class DataState(_Open):
    """`titanlite.data.loader.Loader.state_dict`, of version 2."""

    version: Literal[2]
    seed: int
    seq_len: PositiveInt
    packing: str
    tokenizer: str
    holdout: Annotated[float, Field(ge=0, lt=1)]
    schedule: ScheduleState
    sources: Annotated[list[SourceState], Field(min_length=1)]

    @model_validator(mode="after")
    def _agree(self) -> DataState:
        if len(self.sources) != len(self.schedule.rows):
            raise ValueError("sources and schedule are of different numbers of sources")
        for source, rows in zip(self.sources, self.schedule.rows, strict=True):
            if any(any(place) for place in source.streams[rows:]):
                raise ValueError("a stream that has gone on without a row")
        return self


class TrainState(_Open):
    """What the trainer gives to each save; empty in imported weights."""

    step: Count | None = None
    tokens: Count | None = None
    data: dict[str, JsonValue] = {}
    run: str | None = None
    validation_loss: float | None = None

    @model_validator(mode="after")
    def _complete(self) -> TrainState:
        if (self.step is None) != (self.tokens is None):
            raise ValueError("step and tokens are known only together")
        if self.model_fields_set & {"data"} and type(self.data.get("version")) is not int:
            raise ValueError("data without a version")
        if self.data.get("version") == DATA_VERSION:  # the loader refuses any other
            try:
                DataState.model_validate(self.data)
            except ValidationError as failure:
                raise ValueError(explain(failure)) from None
        return self


class CheckpointKeys(_Open):
    """The keys of a saved job that a resume acts on, as `titanlite.config.schema.Checkpoint` has them."""

    exclude_from_loading: list[str] = []
    load_step: int = -1


class OptimizerGroup(_Open):
    """Settings of a parameter group, and the names of its parameters."""

    params: list[str]


class Layout(FileModel):
    """Number of ranks, and the sizes of the meshes that parameters lay on."""

    world_size: PositiveInt
    meshes: dict[str, list[PositiveInt]]


class Info(FileModel):
    """What describes the run."""

    train_state: TrainState
    weights_only: bool = False
    origin: str | None = None
    job: dict[str, dict[str, JsonValue]] | None
    job_hash: str | None = None
    architecture: Architecture | None
    optimizer_groups: list[OptimizerGroup]
    layout: Layout
    versions: dict[str, str]

    @model_validator(mode="after")
    def _possible(self) -> Info:
        arch = self.architecture
        sizes = [v for v in vars(arch).values() if type(v) is int] if arch else []
        if not all(0 < size < 2**31 for size in sizes):
            raise ValueError("an architecture with a size that none has")
        try:
            CheckpointKeys.model_validate((self.job or {}).get("checkpoint", {}))
        except ValidationError as failure:
            raise ValueError(f"job.checkpoint: {explain(failure)}") from None
        return self


class Manifest(FileModel):
    """The file."""

    format: Literal[1]
    step: NonNegativeInt
    files: dict[FileName, FileEntry]
    info: Info
    checksum: str

    @model_validator(mode="after")
    def _agree(self) -> Manifest:
        listed = sum(entry.size for name, entry in self.files.items() if name != INDEX)
        if INDEX in self.files and self.files[INDEX].size > listed + _MOST_INDEX_BYTES:
            raise ValueError("an index larger than the tensors that it lists")
        if self.info.train_state.step not in (None, self.step):
            raise ValueError(f"of step {self.step}, with the state of step {self.info.train_state.step}")
        return self


def encode_manifest(body: dict[str, Any]) -> bytes:
    """The file's bytes: indented JSON, with the checksum of the rest as its last key."""
    checksum = xxhash.xxh3_128_hexdigest(json.dumps(body, separators=(",", ":")).encode())
    return (json.dumps({**body, "checksum": checksum}, indent=1) + "\n").encode()


def write_manifest(folder: Path, step: int, files: dict[str, dict[str, Any]], info: dict[str, Any]) -> None:
    """Write and flush the manifest of a folder."""
    body = {"format": FORMAT_VERSION, "step": step, "files": files, "info": info}
    with (folder / MANIFEST).open("xb") as file:
        file.write(encode_manifest(body))
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a published checkpoint, its values checked: {"format", "step", "files", "info"}.

    Raises:
        Damage: it is missing, altered, or says what no run says.
        CheckpointError: it cannot be read now, or is of a format that this version does not know.
    """
    raw = read_file(folder / MANIFEST, _MOST_BYTES)
    try:
        body = json.loads(raw)
        body.pop("checksum")
        intact = raw == encode_manifest(body)  # the bytes, not only the values: no flipped bit goes unnoticed
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise Damage(f"{MANIFEST}: altered or truncated ({len(raw)} bytes)")
    if isinstance(version := body.get("format"), int) and version > FORMAT_VERSION:
        raise CheckpointError(
            f"{folder / MANIFEST}: format {version} is unknown to this version, which reads {FORMAT_VERSION}. "
            "Use the titanlite that wrote it."
        )
    try:
        Manifest.model_validate_json(raw)
    except ValidationError as failure:
        raise Damage(f"{MANIFEST}: {explain(failure)}") from None
    return body
