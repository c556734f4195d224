"""Write the tensors of a checkpoint with torch.distributed.checkpoint (DCP) and publish it."""

from __future__ import annotations

import dataclasses
import os
import pickle
import time
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from titanlite import __version__
from titanlite.checkpoint.live_state import shard_chunk
from titanlite.checkpoint.manifest import (
    INDEX,
    TMP_PREFIX,
    Entry,
    HashingFile,
    publish_checkpoint,
    step_folder_name,
    sync,
)
from titanlite.config.errors import CheckpointError
from titanlite.config.flavors import Architecture

# DCP issues this warning if there is no process group, but works without one.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

CHECKSUM = "xxh3_128"
"""Attribute of the DCP class `_StorageInfo` with the checksum of a chunk. DCP ignores it."""


class CheckpointWriter(FileSystemWriter):
    """Writes a checkpoint with DCP and publishes its folder once all ranks have written.

    DCP calls `write_data` on every rank, then passes the results of all ranks to `finish` on
    rank 0, which publishes the checkpoint.

    Args:
        folder: Parent of the step folder.
        step: The step to save.
        token: Suffix for the name of the temporary folder. It must be unique for each save and the
            same on all ranks.
        info: Description of the model and the run to store in the manifest, as a JSON value.

    Attributes:
        started: Value of `time.perf_counter()` when this writer was created, in seconds.
    """

    def __init__(self, folder: Path, step: int, token: str, info: dict[str, Any]) -> None:
        self.started = time.perf_counter()
        name = step_folder_name(step)
        self.tmp_folder = folder / f"{TMP_PREFIX}{name}-{token}"
        super().__init__(self.tmp_folder)
        self.step = step
        self.info = info
        self.target = folder / name
        self.fs = _HashingFileSystem()

    def add_file(self, name: str, content: bytes) -> None:
        """Add a file without tensors, such as the tokenizer, to the checkpoint.

        Args:
            name: Name of the file in the step folder.
            content: Content of the file.
        """
        self.tmp_folder.mkdir(parents=True, exist_ok=True)
        path = self.tmp_folder / name
        with self.fs.create_stream(path, "wb") as file:
            file.write(content)
        sync(path)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """Write this rank's tensors to a new file.

        If `single_file_per_rank` is False, as for imported weights, write one file per tensor.

        Returns:
            A completed future, whose result DCP sends to `finish` on rank 0: the position and
            checksum of each tensor for the index, and the manifest entry of each file by name.
        """
        if self.single_file_per_rank:
            items_of_files = [plan.items] if plan.items else []
        else:
            items_of_files = [[item] for item in plan.items]

        tensors: list[WriteResult] = []
        for index, items in enumerate(items_of_files):
            # DCP sets "__RANK_" as prefix, so the first file of rank 3 is "__3_0.distcp".
            file_name = f"{plan.storage_data.prefix}{index}.distcp"
            tensors += self._write_file(file_name, items, planner)
        return completed_future((tensors, self.fs.written))

    def _write_file(
        self, name: str, items: list[WriteItem], planner: SavePlanner
    ) -> list[WriteResult]:
        """Write tensors to a new file and flush it to disk.

        Args:
            name: Name of the file in the step folder.
            items: Tensors to write, as planned by DCP.
            planner: Returns the values of a planned tensor.

        Returns:
            The position and checksum of each tensor.
        """
        results: list[WriteResult] = []
        with self.fs.create_stream(self.tmp_folder / name, "wb") as file:
            for item in items:
                tensor = cast(Tensor, planner.resolve_data(item))
                position = _write_tensor(file, name, tensor)
                results.append(WriteResult(item.index, position.length, position))
            os.fsync(file.fileno())  # `HashingFile.fileno` flushes the buffer first
        return results

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        """Write the index and the manifest, then publish the step folder. DCP calls this on rank 0.

        Args:
            metadata: Size, dtype and shards of each tensor.
            results: The result of `write_data` on each rank.
        """
        # DCP writes and syncs the index with `self.fs`, which records the manifest entry.
        super().finish(metadata, [tensors for tensors, _ in results])

        entries: dict[str, Entry] = {}
        for _, files in results:
            entries |= files
        entries[INDEX] = self.fs.written[INDEX]
        publish_checkpoint(self.tmp_folder, self.step, entries, self.info)

    def storage_meta(self) -> StorageMeta:
        """Return the DCP storage description without the path, so that you can move the folder."""
        return StorageMeta(save_id=self.save_id)


def _write_tensor(file: HashingFile, file_name: str, tensor: Tensor) -> _StorageInfo:
    """Append a tensor to an open file and return its offset and length in bytes and its checksum.

    Args:
        file: The open file.
        file_name: Name of the file, to include in the result.
        tensor: The tensor, on any device.
    """
    tensor = tensor.detach().cpu()
    is_view = tensor.untyped_storage().nbytes() != tensor.nbytes
    if is_view:
        tensor = tensor.clone()  # torch.save would write the whole storage of a view
    torch.save(tensor, file)
    offset, length, checksum = file.end_chunk()
    position = _StorageInfo(file_name, offset, length)
    vars(position)[CHECKSUM] = checksum  # the dataclass is frozen and lacks this field
    return position


def completed_future(result: Any) -> Future[Any]:
    """Return a completed future. DCP expects a future even from synchronous functions."""
    future: Future[Any] = Future()
    future.set_result(result)
    return future


class _HashingFileSystem(FileSystem):
    """DCP file system that also computes the checksums of the files it writes.

    `CheckpointWriter` writes the tensors with it, and DCP writes the index with it.

    Attributes:
        written: Manifest entries of the files written so far, by name in the checkpoint.
    """

    def __init__(self) -> None:
        self.written: dict[str, Entry] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[HashingFile, None, None]:
        with HashingFile(Path(path)) as file:
            try:
                yield file
            except RuntimeError as error:  # torch.save hides the OSError of a failed write
                raise file.error or error from None
            # DCP writes the index as `.metadata.tmp`, and then renames it to `.metadata`. The
            # manifest lists it under this final name.
            name = Path(path).name.removesuffix(".tmp")
            self.written[name] = file.entry()


class ShardSavePlanner(DefaultSavePlanner):
    """Plans which tensors and shards each rank saves.

    Unlike the DCP planner, it supports dimensions that TP and FSDP divide unevenly (see
    `shard_chunk`). Create it with `flatten_state_dict=False`, because the state is already flat.
    """

    def create_local_plan(self) -> SavePlan:
        """Create a plan for saving this rank's tensors and shards, skipping empty shards."""
        plan = super().create_local_plan()
        items: list[WriteItem] = []
        for item in plan.items:
            tensor = self.state_dict[item.index.fqn]
            if not isinstance(tensor, DTensor):
                items.append(item)
                continue
            chunk = shard_chunk(tensor)
            if 0 in chunk.sizes:  # this rank has no part of a small tensor
                continue
            index = MetadataIndex(item.index.fqn, chunk.offsets)
            assert item.tensor_data is not None
            data = dataclasses.replace(item.tensor_data, chunk=chunk)
            items.append(dataclasses.replace(item, index=index, tensor_data=data))
        return dataclasses.replace(plan, items=items)


def manifest_info(arch: Architecture, train_state: dict[str, Any], **extra: Any) -> dict[str, Any]:
    """Return the `info` entry of a manifest, which describes the model and the run.

    Args:
        arch: Architecture of the model.
        train_state: Training state other than tensors, such as the step and the data position.
        extra: Additional keys, such as "origin", or replacements for the defaults of "job" (None)
            and "layout" (one rank).
    """
    info = {
        "train_state": train_state,
        "job": None,
        "layout": {"world_size": 1},
        "versions": library_versions(),
        "architecture": dataclasses.asdict(arch),
    }
    return info | extra


@cache
def library_versions() -> dict[str, str]:
    """Return the installed versions of titanlite, torch, torchao and numpy, by package name.

    The result is cached, because the lookup takes 5 ms and opens files.
    """
    libraries = {name: version(name) for name in ("torch", "torchao", "numpy")}
    return {"titanlite": __version__} | libraries


def describe_error(error: BaseException) -> str:
    """Return a one-line description of an exception raised during a save or load.

    DCP wraps the exceptions of all ranks in one `CheckpointException`. If several ranks raised the
    same exception, it appears only once.
    """
    if isinstance(error, CheckpointException):
        causes = {describe_error(cause) for cause, _ in error.failures.values()}
        return "; ".join(sorted(causes))
    if isinstance(error, pickle.UnpicklingError):
        # The torch message recommends loading the file unsafely.
        return "it contains more than tensors"
    lines = str(error).splitlines() or [""]
    if isinstance(error, CheckpointError):
        return lines[0]
    return f"{type(error).__name__}: {lines[0]}"
