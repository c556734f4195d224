"""Write and read the tensors of checkpoints with torch.distributed.checkpoint (DCP).

Invariant: Reading a checkpoint runs no code from it and opens no file outside its folder.
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
import pickle
import time
import warnings
from collections import defaultdict
from collections.abc import Container, Generator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from titanlite import __version__
from titanlite.checkpoint.live_state import AVERAGES, shard_chunk
from titanlite.checkpoint.manifest import (
    INDEX,
    OLD_HOOK_NAMES,
    TMP_PREFIX,
    Entry,
    HashingFile,
    open_file,
    publish_checkpoint,
    step_folder_name,
    sync,
)
from titanlite.config.errors import CheckpointError, Damage, UserError
from titanlite.config.flavors import Architecture
from titanlite.config.mistakes import shorten

# DCP issues this warning if there is no process group, but works without one.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

CHECKSUM = "xxh3_128"
"""Attribute of the DCP class `_StorageInfo` with the checksum of a chunk. DCP ignores it."""


# Writing


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
        """Write this rank's tensors to one new file.

        If `single_file_per_rank` is False, as for imported weights, write one file per tensor.

        Args:
            plan: The tensors to write, and the prefix of file names, such as "__3_" on rank 3.
            planner: Returns the values of a planned tensor.

        Returns:
            A completed future with a `_RankResult`, which DCP sends to `finish` on rank 0.
        """
        # Decide which tensors go into each file.
        if not self.single_file_per_rank:
            items_per_file = [[item] for item in plan.items]
        elif plan.items:
            items_per_file = [plan.items]
        else:
            items_per_file = []  # this rank has no tensors, so it writes no file

        # Write the files.
        tensor_results: list[WriteResult] = []
        for index, items in enumerate(items_per_file):
            file_name = f"{plan.storage_data.prefix}{index}.distcp"
            tensor_results += self._write_file(file_name, items, planner)

        file_entries = self.fs.written  # size and checksum of each file, by name
        return completed_future(_RankResult(tensor_results, file_entries))

    def _write_file(
        self, name: str, items: list[WriteItem], planner: SavePlanner
    ) -> list[WriteResult]:
        """Write tensors to a new file, flush it to disk, and return where DCP finds each tensor.

        Args:
            name: Name of the file in the step folder.
            items: Tensors to write, as planned by DCP.
            planner: Returns the values of a planned tensor.
        """
        results: list[WriteResult] = []
        with self.fs.create_stream(self.tmp_folder / name, "wb") as file:
            for item in items:
                tensor = cast(Tensor, planner.resolve_data(item))
                position = _write_tensor(file, name, tensor)
                results.append(
                    WriteResult(item.index, size_in_bytes=position.length, storage_data=position)
                )
            os.fsync(file.fileno())  # `HashingFile.fileno` flushes the buffer first
        return results

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        """Write the index and the manifest, then publish the step folder. DCP calls this on rank 0.

        Args:
            metadata: Size, dtype and shards of each tensor.
            results: The `_RankResult` that `write_data` returned on each rank.
        """
        # DCP writes and syncs the index with `self.fs`, which records the manifest entry.
        super().finish(metadata, [result.tensors for result in results])

        entries: dict[str, Entry] = {}
        for result in results:
            entries |= result.files
        entries[INDEX] = self.fs.written[INDEX]
        publish_checkpoint(self.tmp_folder, self.step, entries, self.info)

    def storage_meta(self) -> StorageMeta:
        """Return the DCP storage description without the path, so that you can move the folder."""
        return StorageMeta(save_id=self.save_id)


def _write_tensor(file: HashingFile, file_name: str, tensor: Tensor) -> _StorageInfo:
    """Append a tensor to an open file and return its position: file, offset, length and checksum.

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


class _RankResult(NamedTuple):
    """Tensors and files that a rank wrote."""

    tensors: list[WriteResult]
    """Position (file, offset, length and checksum) of each tensor, for the DCP index."""
    files: dict[str, Entry]
    """Size and checksum of each file, by name, for the manifest."""


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
        with HashingFile(path) as file:
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


# Manifests and error messages


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


def join_lines(lines: list[str], limit: int = 8) -> str:
    """Join the first `limit` lines for an error message and count the others: "... and 5 more"."""
    if len(lines) > limit:
        lines = [*lines[:limit], f"... and {len(lines) - limit} more"]
    return "\n  ".join(lines)


# Reading


class SafeReader(FileSystemReader):
    """Reads a checkpoint with DCP without running code from it, and verifies checksums.

    The DCP reader, in contrast, unpickles the index, which can execute arbitrary code.

    Args:
        path: Step folder of the checkpoint.
        files: Manifest entry of each file, by name. The reader uses only the entry of the index,
            to verify its checksum. Pass {} for a checkpoint that another program wrote. Chunks
            without checksums are not verified, so verify their files beforehand.

    Attributes:
        index: Size, dtype and chunks (saved shards) of each tensor, by name.

    Raises:
        CheckpointError: If the index cannot be read.
        Damage: If the index is missing or damaged.
    """

    def __init__(self, path: Path, files: Mapping[str, Entry]) -> None:
        super().__init__(path)
        self._folder = path
        with open_file(path / INDEX) as file:
            raw = file.read()
        if INDEX in files and xxhash.xxh3_128_hexdigest(raw) != files[INDEX]["xxh3_128"]:
            raise Damage(f"{INDEX}: checksum differs ({len(raw)} bytes)")

        try:
            self._metadata = _parse_index(raw)
        except Exception as error:  # arbitrary bytes raise any kind of exception
            problem = shorten(describe_error(error))
            raise CheckpointError(f"cannot read {path / INDEX}: {problem}") from None
        self.index = cast(dict[str, TensorStorageMetadata], self._metadata.state_dict_metadata)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the size, dtype and file positions of each tensor, so that DCP can plan its reads.

        All arguments are ignored.
        """
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the planned parts of the checkpoint from disk into this rank's tensors.

        Args:
            plan: The parts to read. Each part is a slice of a chunk (a saved tensor or shard).
            planner: Returns the tensor in memory that a part is copied to.

        Raises:
            Damage: If a chunk does not match its checksum.
        """
        parts_by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for part in plan.items:
            file_name = self.storage_data[part.storage_index].relative_path
            parts_by_file[file_name].append(part)

        for file_name, parts in parts_by_file.items():
            # Read the file sequentially.
            parts.sort(key=lambda part: self.storage_data[part.storage_index].offset)
            with open_file(self._folder / file_name) as file:
                for part in parts:
                    content = _read_chunk(file, self.storage_data[part.storage_index])
                    _load_part(content, part, planner)
        return completed_future(None)


def _load_part(chunk_content: bytes, part: ReadItem, planner: LoadPlanner) -> None:
    """Copy the requested slice of a chunk (a saved tensor or shard) to memory.

    Args:
        chunk_content: Content of the whole chunk, as written by `torch.save`.
        part: The slice of the chunk to copy.
        planner: Returns the tensor in memory that the slice is copied to.
    """
    chunk = torch.load(io.BytesIO(chunk_content), map_location="cpu", weights_only=True)
    dimensions = zip(part.storage_offsets, part.lengths, strict=True)
    slices = tuple(slice(offset, offset + size) for offset, size in dimensions)
    target = planner.resolve_tensor(part).detach()
    target.copy_(chunk[slices])
    planner.commit_tensor(part, target)


def _read_chunk(file: BinaryIO, position: _StorageInfo) -> bytes:
    """Read the bytes of a chunk (a saved tensor or shard) and verify their checksum.

    Checkpoints written by other programs have no checksums, so their chunks are not verified.

    Args:
        file: The open file that contains the chunk.
        position: Offset and length of the chunk in the file, in bytes, and its checksum.

    Raises:
        Damage: If the bytes do not match the checksum.
    """
    start = position.offset
    file.seek(start)
    content = file.read(position.length)
    # `_write_tensor` adds the checksum to the DCP object. Other programs do not.
    expected = getattr(position, CHECKSUM, None)
    if expected is not None and xxhash.xxh3_128_digest(content) != expected:
        end = start + position.length
        raise Damage(f"{position.relative_path}: checksum of bytes {start:,} to {end:,} differs")
    return content


def load_tensors(
    reader: SafeReader, tensors: dict[str, Tensor], group: dist.ProcessGroup | None = None
) -> None:
    """Fill tensors in place with their values from a checkpoint.

    The sharding of the tensors may differ from when they were saved. If loading fails, some
    tensors may already have been overwritten.

    Args:
        reader: Reader of the checkpoint.
        tensors: Tensors to fill, by name in the checkpoint.
        group: The ranks that load together. None means this process alone.

    Raises:
        Damage: On all ranks, if every failing rank read damaged bytes.
        CheckpointError: On all ranks, if any rank cannot read its tensors for another reason.
    """
    try:
        dcp_load(
            tensors,
            storage_reader=reader,
            planner=ShardLoadPlanner(flatten_state_dict=False),
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as error:
        causes_of_ranks = [cause for cause, _ in error.failures.values()]
        if all(isinstance(cause, Damage) for cause in causes_of_ranks):
            raise Damage(describe_error(error)) from None
        raise CheckpointError(f"cannot load {reader.path}: {describe_error(error)}") from None


def get_weight_prefix(reader: SafeReader, averaged: bool) -> str:
    """Return the name prefix of the weights in a checkpoint, such as "model.".

    Args:
        reader: Reader of the checkpoint.
        averaged: Return the prefix of the averaged weights (EMA) instead.

    Raises:
        UserError: If `averaged` is true but the checkpoint has no averaged weights.
    """
    if not averaged:
        return "model."
    if not any(name.startswith(AVERAGES) for name in reader.index):
        raise UserError(
            f"{reader.path} has no averaged weights: ema.decay was 0, or it is an average of "
            "checkpoints. Leave out --ema."
        )
    return AVERAGES


class ShardLoadPlanner(DefaultLoadPlanner):
    """Plans which parts of a checkpoint each rank reads into its tensors and shards.

    Unlike the DCP planner, it supports dimensions that TP and FSDP divide unevenly (see
    `shard_chunk`). Create it with `flatten_state_dict=False`.
    """

    def create_local_plan(self) -> LoadPlan:
        """Create a plan for reading all checkpoint parts that overlap this rank's tensors.

        Raises:
            CheckpointError: If a tensor is missing or has a different shape. Without this check, a
                part of the tensor in memory would silently keep its values.
        """
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, tensor in self.state_dict.items():
            saved = self.metadata.state_dict_metadata.get(name)
            if saved is None:
                raise CheckpointError(f"{name}: missing")
            assert isinstance(saved, TensorStorageMetadata)
            if saved.size != tensor.shape:
                shape = tuple(saved.size)
                raise CheckpointError(f"{name}: shape {shape}, expected {tuple(tensor.shape)}")
            items += create_read_items_for_chunk_list(name, saved, [shard_chunk(tensor)])
        return LoadPlan(items)


# The index that DCP pickles


_DTYPES = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
_ALLOWED_NAMES = {
    "torch": {"Size", *_DTYPES},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "pathlib": {"PosixPath"},  # in checkpoints written by other programs
    "pathlib._local": {"PosixPath"},
}
"""Names of the classes and functions that a pickled index may contain, by module. `_IndexUnpickler`
replaces each of them with a subclass of `_Record`, so none of their code runs."""


class _Record:
    """Placeholder for an object in an untrusted pickle, so that unpickling runs no code.

    Attributes:
        args: Constructor arguments of the original object.
        state: Content of the original object, such as its attributes, if it has any.
    """

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _IndexUnpickler(pickle.Unpickler):
    """Unpickles a DCP index without running code by replacing each object with a `_Record`.

    Classes and functions that do not belong in an index raise CheckpointError.
    """

    def find_class(self, module: str, name: str) -> type[_Record]:
        if name not in _ALLOWED_NAMES.get(module, ()):
            raise CheckpointError(f"it contains {module}.{name}, which is not allowed")
        return type(name, (_Record,), {})


def _parse_index(raw: bytes) -> Metadata:
    """Parse the pickled index of a checkpoint without running code from it.

    The index is a `Metadata` object of DCP. It contains the shapes of all tensors and the positions
    of their chunks (saved shards) in files.

    Args:
        raw: Content of the index file.

    Raises:
        CheckpointError: If the index contains a class that is not allowed or refers to a file
            outside the checkpoint folder.
        Exception: Any other exception, if the content is damaged.
    """
    # Instead of the `Metadata` object, the unpickler returns a placeholder with its attributes.
    attributes = _IndexUnpickler(io.BytesIO(raw)).load().state
    tensors = _parse_tensors(attributes["state_dict_metadata"])
    positions = _parse_chunk_positions(attributes["storage_data"], tensors)
    return Metadata(tensors, storage_data=positions, storage_meta=StorageMeta())


def _parse_tensors(records: Mapping[str, _Record]) -> dict[str, STORAGE_TYPES]:
    """Convert the unpickled descriptions of tensors, by name, to `TensorStorageMetadata`.

    Skip all values that are not tensors. Only other programs save such values.
    """
    tensors: dict[str, STORAGE_TYPES] = {}
    for saved_name, record in records.items():
        if _is_tensor_record(record):
            name = _update_tensor_name(saved_name)
            tensors[name] = _parse_tensor(name, record)
    return tensors


def _is_tensor_record(value: object) -> bool:
    """Return whether an entry of an unpickled index describes a tensor, not another object.

    The unpickler replaces each object with a `_Record`. Its class has the name of the original
    class.
    """
    return type(value).__name__ == TensorStorageMetadata.__name__


def _parse_chunk_positions(
    records: Mapping[_Record, _Record], tensor_names: Container[str]
) -> dict[MetadataIndex, _StorageInfo]:
    """Return the file, offset and length of each chunk (a saved tensor or shard).

    Args:
        records: Unpickled mapping from chunks (tensor name, offset in the tensor) to positions.
        tensor_names: Names of the tensors whose chunks are returned.
    """
    positions = {}
    for chunk_record, position_record in records.items():
        name = _update_tensor_name(chunk_record.state["fqn"])
        if name in tensor_names:
            offset = _to_size(chunk_record.state["offset"])
            chunk = MetadataIndex(name, offset)
            positions[chunk] = _parse_chunk_position(position_record)
    return positions


def _parse_chunk_position(record: _Record) -> _StorageInfo:
    """Convert the unpickled position of a chunk to `_StorageInfo`, including its checksum.

    Args:
        record: Placeholder with the file name, the offset and length in bytes, and the checksum.

    Raises:
        CheckpointError: If the file is outside the checkpoint folder.
    """
    fields = record.state
    file_name = fields["relative_path"]
    if Path(file_name).name != file_name:
        raise CheckpointError(f"{file_name} is outside of this folder")
    info = _StorageInfo(file_name, fields["offset"], fields["length"])
    vars(info)[CHECKSUM] = fields.get(CHECKSUM)
    return info


def _parse_tensor(name: str, record: _Record) -> TensorStorageMetadata:
    """Convert the unpickled description of a tensor to `TensorStorageMetadata`.

    Args:
        name: Name of the tensor, for error messages.
        record: Placeholder for a TensorStorageMetadata. Its `state` contains "size", "properties"
            (such as the dtype) and "chunks" (saved shards).

    Raises:
        CheckpointError: If the chunks do not add up to the size of the tensor.
    """
    fields = record.state
    size = _to_size(fields["size"])
    dtype = _parse_dtype(fields["properties"])
    chunks = [_parse_chunk(chunk_record) for chunk_record in fields["chunks"]]
    num_elements = sum(math.prod(chunk.sizes) for chunk in chunks)
    if num_elements != math.prod(size):
        raise CheckpointError(f"the chunks of {name} do not add up to its size")
    return TensorStorageMetadata(TensorProperties(dtype), size, chunks)


def _parse_dtype(record: _Record) -> torch.dtype:
    """Extract the dtype from the unpickled `TensorProperties` of a tensor.

    DCP pickles the properties as a tuple that starts with the dtype. `_IndexUnpickler` replaces a
    dtype, such as torch.float32, with a class of the same name.
    """
    dtype_class = record.state[0]
    return _DTYPES[dtype_class.__name__]


def _parse_chunk(record: _Record) -> ChunkStorageMetadata:
    """Convert the unpickled offsets and sizes of a chunk to a `ChunkStorageMetadata`."""
    fields = record.state
    return ChunkStorageMetadata(_to_size(fields["offsets"]), _to_size(fields["sizes"]))


def _to_size(record: _Record) -> torch.Size:
    """Convert the placeholder for a size to torch.Size."""
    return torch.Size(*record.args)


def _update_tensor_name(name: str) -> str:
    """Convert a tensor name in a checkpoint from titanlite 0.2 or earlier to its current name.

    For example, "hooks.Ema.weight" becomes "hooks.ema.weight". All other names stay the same.
    """
    kind, _, hook_tensor = name.partition(".")
    hook, _, tensor = hook_tensor.partition(".")
    if kind == "hooks" and hook in OLD_HOOK_NAMES:
        return f"hooks.{OLD_HOOK_NAMES[hook]}.{tensor}"
    return name
