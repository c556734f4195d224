"""Read and write tensors with torch.distributed.checkpoint (DCP), and name the tensors of a run.

Invariant: Reading a checkpoint runs no code from it and opens no file outside of its folder.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import os
import pickle
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemReader,
    FileSystemWriter,
    _StorageInfo,
)
from torch.distributed.checkpoint.metadata import (
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
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass

from titanlite import __version__
from titanlite.checkpoint.manifest import (
    EMA,
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
from titanlite.model.llama import Llama
from titanlite.optim.adamw import local_shard, shard_slices

# DCP also works in a process without a process group, and warns about it.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

AVERAGES = f"hooks.{EMA}."
"""Prefix of the averages of the weights (EMA)."""
WEIGHTS = ("model.", AVERAGES)
"""Prefixes of weights and of their averages."""
_CHECKSUM = "xxh3_128"
"""Attribute of DCP's `_StorageInfo` with the checksum of a chunk. Other readers ignore it."""

Index = dict[str, TensorStorageMetadata]
"""The tensors of a checkpoint by name."""
T = TypeVar("T")


# Tensors of a run


@dataclasses.dataclass(frozen=True)
class LiveState:
    """The model, the optimizer and the hooks in the memory of this rank, to save or to load into.

    Attributes:
        model: The model, sharded or not. Its parameters may be offloaded to the CPU.
        optimizer: Optimizer of `model`; None to save and load only weights.
        new_optimizer: Builds another optimizer for the same parameters, to reset `optimizer`.
        hook_tensors: Returns the tensors of the run's hooks, keyed by "<hook name>.<tensor name>".
        prepare_hooks: Called before hook tensors are loaded, with the sizes of the saved tensors
            and the saved `state_dict` of each hook.
    """

    model: Llama
    optimizer: torch.optim.Optimizer | None = None
    new_optimizer: Callable[[], torch.optim.Optimizer] | None = None
    hook_tensors: Callable[[], dict[str, Tensor]] = dict
    prepare_hooks: Callable[[Mapping[str, torch.Size], Mapping[str, Any]], None] = (
        lambda sizes, states: None
    )

    def tensors(
        self, *, optimizer: bool = True, hooks: bool = True, rng: bool = False
    ) -> dict[str, Tensor]:
        """Return the tensors to save or to load into, by their names in a checkpoint.

        The names, such as "optimizer.layers.3.attention.wq.weight.exp_avg", do not depend on the
        parallel layout. The tensors share memory with the model, the optimizer and the hooks, so
        that a load changes these in place. The states of the random generators are copies.
        """
        tensors = {f"model.{name}": tensor for name, tensor in model_tensors(self.model).items()}
        if optimizer and self.optimizer is not None:
            tensors |= _optimizer_tensors(self.model, self.optimizer)
        if hooks:
            for name, tensor in self.hook_tensors().items():
                tensors[f"hooks.{name}"] = plain(tensor)
        if rng:
            tensors |= _random_states()
        return tensors


def _random_states() -> dict[str, Tensor]:
    """Return the states of this rank's random generators, such as "rng.cpu.0"."""
    rank = dist.get_rank()
    states = {f"rng.cpu.{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"rng.cuda.{rank}"] = torch.cuda.get_rng_state()
    return states


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of a model by name, without autograd.

    Tied tensors appear once, under their first name.
    """
    tensors = {}
    seen = set()
    # Calling `state_dict` also makes FSDP reshard parameters that are still gathered.
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = plain(tensor)
    return tensors


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer state, keyed by "optimizer.<parameter name>.<state key>"."""
    parameter_names: dict[Tensor, str] = {
        parameter: name for name, parameter in model.named_parameters()
    }
    tensors = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            name = f"optimizer.{parameter_names[parameter]}.{key}"
            assert isinstance(value, Tensor), f"{name} is not a tensor: {type(value)}"
            tensors |= _split_quantized(name, value)
    return tensors


def _split_quantized(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Split an 8-bit optimizer state of torchao into ordinary tensors, which DCP can save.

    torchao stores such a state as a code of 8 bits for each value, and a scale for each block of
    values.

    Returns:
        "<name>.codes" and "<name>.scale" for an 8-bit state; `name` for any other state.
    """
    shard: Any = local(tensor)
    is_quantized = hasattr(shard, "codes")
    if not is_quantized or not isinstance(tensor, DTensor):
        return {name: plain(tensor)}

    # Each row has its own scales. For example, a matrix with 8 rows and 512 columns has codes of
    # shape (8, 512), and with blocks of 256 values scales of shape (8, 2).
    num_rows = shard.shape[0]
    scale = shard.scale.view(num_rows, -1)
    return {
        f"{name}.codes": _shard_rows_like(tensor, shard.codes),
        f"{name}.scale": _shard_rows_like(tensor, scale),
    }


def _shard_rows_like(tensor: DTensor, shard: Tensor) -> DTensor:
    """Return a matrix whose rows are sharded like `tensor`, from the `shard` of this rank."""
    return DTensor.from_local(
        shard,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=torch.Size((tensor.shape[0], shard.shape[1])),
        stride=shard.stride(),
    )


def plain(tensor: Tensor) -> Tensor:
    """Return a view of a tensor without autograd and without torchao's FP8 wrapper class.

    Checkpoints contain ordinary tensors, so that they can be loaded with or without FP8. The result
    shares memory with `tensor`.
    """
    tensor = tensor.detach()
    if not is_traceable_wrapper_subclass(local(tensor)):
        return tensor
    if not isinstance(tensor, DTensor):
        return local_shard(tensor)
    # DTensor.from_local would move an offloaded tensor to the device of the mesh.
    return transform_subclass(tensor, lambda _name, shard: local_shard(shard))


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard if `tensor` is a DTensor, or else `tensor` itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor has no NaN or infinity."""
    if tensor.sum().isfinite():  # usually decides, and allocates no memory
        return True
    return bool(tensor.isfinite().all())


def manifest_info(arch: Architecture, train_state: dict[str, Any], **extra: Any) -> dict[str, Any]:
    """Return the `info` entry of a checkpoint's manifest, which describes the model and the run.

    Args:
        arch: Architecture of the model.
        train_state: Training state that is not a tensor, such as step and data position.
        extra: Further keys, or other values of the keys below.
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
    """Return the versions of titanlite, torch, torchao and numpy, for the manifest.

    The result is cached, because the lookup takes 5 ms and opens files.
    """
    libraries = {name: version(name) for name in ("torch", "torchao", "numpy")}
    return {"titanlite": __version__} | libraries


# Positions of shards


def _shard_chunk(tensor: DTensor) -> ChunkStorageMetadata:
    """Return the position and the size of this rank's shard in the whole tensor.

    By default, DCP computes them itself. Up to torch 2.15, it computes wrong ones if tensor
    parallelism and FSDP over three or more ranks divide the same dimension unevenly, such as a
    vocabulary with an odd size. It then can neither save nor load the tensor.
    """
    slices = shard_slices(tensor)
    return ChunkStorageMetadata(
        offsets=torch.Size(part.start for part in slices),
        sizes=torch.Size(part.stop - part.start for part in slices),
    )


class ShardSavePlanner(DefaultSavePlanner):
    """Plans which tensors and shards a rank saves."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def create_local_plan(self) -> SavePlan:
        """Plan to save the tensors of this rank, and its shards that are not empty."""
        plan = super().create_local_plan()
        items: list[WriteItem] = []
        for item in plan.items:
            tensor = self.state_dict[item.index.fqn]
            if not isinstance(tensor, DTensor):
                items.append(item)
                continue
            chunk = _shard_chunk(tensor)
            if 0 in chunk.sizes:
                continue
            index = MetadataIndex(item.index.fqn, chunk.offsets)
            assert item.tensor_data is not None
            data = dataclasses.replace(item.tensor_data, chunk=chunk)
            items.append(dataclasses.replace(item, index=index, tensor_data=data))
        return dataclasses.replace(plan, items=items)


class ShardLoadPlanner(DefaultLoadPlanner):
    """Plans which parts of a checkpoint a rank reads into its tensors and shards."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)

    def create_local_plan(self) -> LoadPlan:
        """Plan to read all parts of the checkpoint that overlap with tensors of this rank."""
        plan = super().create_local_plan()
        assert self.metadata is not None
        items: list[ReadItem] = []
        for item in plan.items:
            if not isinstance(self.state_dict[item.dest_index.fqn], DTensor):
                items.append(item)
        for name, tensor in self.state_dict.items():
            if isinstance(tensor, DTensor):
                saved = self.metadata.state_dict_metadata[name]
                assert isinstance(saved, TensorStorageMetadata)
                items += create_read_items_for_chunk_list(name, saved, [_shard_chunk(tensor)])
        return dataclasses.replace(plan, items=items)


# Writing


class CheckpointWriter(FileSystemWriter):
    """Writes a checkpoint with DCP, and publishes its folder when all ranks have written.

    DCP calls `write_data` on every rank. When all ranks have returned, it passes their results to
    `finish` on rank 0, which publishes the checkpoint.

    Args:
        folder: Parent of the step folder.
        step: The step to save.
        token: Part of the name of the temporary folder, the same on all ranks.
        info: JSON value to store in the manifest.

    Attributes:
        started: Time of the creation, by `time.perf_counter`.
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
        """Write a file that is not a tensor, such as the tokenizer, into the checkpoint.

        Args:
            name: Name of the file in the step folder.
            content: Content of the file.
        """
        self.tmp_folder.mkdir(parents=True, exist_ok=True)
        path = self.tmp_folder / name
        with self.fs.create_stream(path, "wb") as file:
            file.write(content)
        sync(path)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors to one file, or to one file per tensor.

        Returns:
            The position and checksum of each tensor, and the size and checksum of each file. DCP
            sends them to `finish` on rank 0.
        """
        if self.single_file_per_rank:
            items_of_files = [plan.items] if plan.items else []
        else:
            items_of_files = [[item] for item in plan.items]

        results: list[WriteResult] = []
        for index, items in enumerate(items_of_files):
            # DCP sets "__RANK_" as prefix, so the first file of rank 3 is "__3_0.distcp".
            file_name = f"{plan.storage_data.prefix}{index}.distcp"
            results += self._write_file(file_name, items, planner)

        # `finish` needs the size and the checksum of each file for the manifest.
        for file_name, entry in self.fs.written.items():
            results.append(_FileResult(MetadataIndex(file_name), entry["size"], entry))
        return _completed_future(results)

    def _write_file(
        self, name: str, items: list[WriteItem], planner: SavePlanner
    ) -> list[WriteResult]:
        """Write tensors to a file and sync it. Return the position and checksum of each tensor."""
        results: list[WriteResult] = []
        with self.fs.create_stream(self.tmp_folder / name, "wb") as file:
            for item in items:
                tensor = cast(Tensor, planner.resolve_data(item))
                position = _write_tensor(file, name, tensor)
                results.append(WriteResult(item.index, position.length, position))
            os.fsync(file.fileno())
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index and the manifest, and publish the step folder. Runs on rank 0.

        Args:
            metadata: DCP's description of all tensors.
            results: Results of `write_data` on each rank.
        """
        all_results = list(itertools.chain.from_iterable(results))
        tensor_results = [item for item in all_results if not isinstance(item, _FileResult)]
        super().finish(metadata, [tensor_results])  # writes the index

        file_results = [item for item in all_results if isinstance(item, _FileResult)]
        entries = {result.index.fqn: result.storage_data for result in file_results}
        entries[INDEX] = self.fs.written[INDEX]
        publish_checkpoint(self.tmp_folder, self.step, entries, self.info)

    def storage_meta(self) -> StorageMeta:
        """Return DCP's description of the storage, without a path, so that folders can be moved."""
        return StorageMeta(save_id=self.save_id)


def _write_tensor(file: HashingFile, file_name: str, tensor: Tensor) -> _StorageInfo:
    """Append a tensor to a file, and return its position and checksum."""
    tensor = tensor.detach().cpu()
    is_view = tensor.untyped_storage().nbytes() != tensor.nbytes
    if is_view:
        tensor = tensor.clone()  # torch.save would write the whole storage of a view
    torch.save(tensor, file)
    offset, length, checksum = file.end_chunk()
    position = _StorageInfo(file_name, offset, length)
    vars(position)[_CHECKSUM] = checksum  # the dataclass is frozen and lacks this field
    return position


def _completed_future(result: T) -> Future[T]:
    """Return a future with a result. DCP requires one, although all data is already processed."""
    future: Future[T] = Future()
    future.set_result(result)
    return future


class _FileResult(WriteResult):
    """Size and checksum of a file that a rank has written, in a form that DCP sends to rank 0.

    The attribute `index` contains the name of the file, and `storage_data` its manifest entry.
    """


class _HashingFileSystem(FileSystem):
    """DCP's local file system, which also computes the checksums of the files that it writes.

    Attributes:
        written: Manifest entries of the files written so far.
    """

    def __init__(self) -> None:
        self.written: dict[str, Entry] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[HashingFile, None, None]:
        with HashingFile(Path(path)) as file:
            try:
                yield file
            except RuntimeError as error:
                raise file.error or error from None
            name = Path(path).name.removesuffix(".tmp")  # DCP writes and renames .metadata.tmp
            self.written[name] = file.entry()


# Reading


class SafeReader(FileSystemReader):
    """Reads a checkpoint with DCP, without running code from it, and verifies checksums.

    DCP's own reader unpickles the index, which can execute arbitrary code.

    Args:
        path: Folder of the checkpoint.
        files: Entries of the files in the manifest. Files without chunk checksums must have been
            verified before. Empty for checkpoints of other programs.
        is_wanted: Returns whether to read the tensor with a given name. Other entries of the index
            are ignored and may be of any kind.

    Attributes:
        index: Description (size, dtype, chunks) of each wanted tensor by name.

    Raises:
        CheckpointError: If the index cannot be read.
        Damage: If the index is missing or damaged.
    """

    def __init__(
        self,
        path: Path,
        files: Mapping[str, Entry],
        is_wanted: Callable[[str], bool] = lambda name: True,
    ) -> None:
        super().__init__(path)
        self._folder = path
        with open_file(path / INDEX) as file:
            raw = file.read()
        if INDEX in files and xxhash.xxh3_128_hexdigest(raw) != files[INDEX]["xxh3_128"]:
            raise Damage(f"{INDEX}: checksum differs ({len(raw)} bytes)")

        try:
            self._metadata = _parse_index(raw, is_wanted)
        except Exception as error:  # arbitrary bytes raise any kind of exception
            problem = shorten(describe_error(error))
            raise CheckpointError(f"cannot read {path / INDEX}: {problem}") from None
        self.index = cast(Index, self._metadata.state_dict_metadata)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index of the tensors to load. DCP calls this before it reads any data."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Load the parts of tensors that this rank needs into its tensors in memory.

        Args:
            plan: DCP's list of the parts to load. Each is a part of a chunk (a saved tensor or
                shard). Each chunk is read once.
            planner: Returns the target of each part.

        Raises:
            Damage: If the checksum of a chunk differs.
        """
        parts_by_chunk: dict[MetadataIndex, list[ReadItem]] = defaultdict(list)
        for part in plan.items:
            parts_by_chunk[part.storage_index].append(part)

        for file_name, chunks in self._group_by_file(parts_by_chunk).items():
            with open_file(self._folder / file_name) as file:
                for chunk in chunks:
                    _load_chunk(file, self.storage_data[chunk], parts_by_chunk[chunk], planner)
        return _completed_future(None)

    def _group_by_file(self, chunks: Iterable[MetadataIndex]) -> dict[str, list[MetadataIndex]]:
        """Return the chunks of each file in the order of their positions, to read sequentially."""
        chunks_by_file = defaultdict(list)
        for chunk in sorted(chunks, key=lambda chunk: self.storage_data[chunk].offset):
            chunks_by_file[self.storage_data[chunk].relative_path].append(chunk)
        return chunks_by_file


def _load_chunk(
    file: BinaryIO, position: _StorageInfo, parts: Iterable[ReadItem], planner: LoadPlanner
) -> None:
    """Read one chunk (a saved tensor or shard), and copy the requested parts to their targets.

    Raises:
        Damage: If the checksum of the chunk differs.
    """
    content = _read_chunk(file, position)
    chunk = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    for part in parts:
        values = slice_tensor(chunk, part.storage_offsets, part.lengths)
        target = planner.resolve_tensor(part).detach()
        target.copy_(values)
        planner.commit_tensor(part, target)


def _read_chunk(file: BinaryIO, position: _StorageInfo) -> bytes:
    """Read the bytes of a chunk and verify their checksum.

    Raises:
        Damage: If the checksum differs.
    """
    start = position.offset
    file.seek(start)
    content = file.read(position.length)
    expected = vars(position).get(_CHECKSUM)  # None in checkpoints of other programs
    if expected is not None and xxhash.xxh3_128_digest(content) != expected:
        end = start + position.length
        raise Damage(f"{position.relative_path}: checksum of bytes {start:,} to {end:,} differs")
    return content


def slice_tensor(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Return a view of a rectangular part of a tensor.

    Args:
        tensor: The tensor.
        offsets: First index of the part in each dimension.
        sizes: Size of the part in each dimension.
    """
    slices = []
    for offset, size in zip(offsets, sizes, strict=True):
        slices.append(slice(offset, offset + size))
    return tensor[tuple(slices)]


def load_tensors(
    reader: SafeReader, tensors: dict[str, Tensor], group: dist.ProcessGroup | None = None
) -> None:
    """Load values of a checkpoint into tensors in place. The layout may differ from the save.

    After an error, some tensors may have been overwritten.

    Args:
        reader: Reader of the checkpoint.
        tensors: Tensors to fill, by their names in the checkpoint.
        group: The ranks that load together, or None for this process alone.

    Raises:
        Damage: On all ranks, if any rank has read damaged bytes.
        CheckpointError: On all ranks, if any rank cannot read its tensors for another reason.
    """
    try:
        dcp_load(
            tensors,
            storage_reader=reader,
            planner=ShardLoadPlanner(),
            process_group=group,
            no_dist=group is None,
        )
    except CheckpointException as error:
        causes_of_ranks = [cause for cause, _ in error.failures.values()]
        if all(isinstance(cause, Damage) for cause in causes_of_ranks):
            raise Damage(describe_error(error)) from None
        raise CheckpointError(f"cannot load {reader.path}: {describe_error(error)}") from None


def get_weight_prefix(reader: SafeReader, averaged: bool) -> str:
    """Return the prefix of the names of the weights in a checkpoint, such as "model.".

    Args:
        reader: Reader of the checkpoint.
        averaged: Whether to return the prefix of the averaged weights (EMA) instead.

    Raises:
        UserError: If `averaged` is true and the checkpoint has no averages.
    """
    if not averaged:
        return "model."
    if not any(name.startswith(AVERAGES) for name in reader.index):
        raise UserError(
            f"{reader.path} has no averaged weights: ema.decay was 0, or it is an average of "
            "checkpoints. Leave out --ema."
        )
    return AVERAGES


# The index that DCP pickles


_ALLOWED_NAMES = {
    "torch": {
        "Size",
        *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
    },
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
    "pathlib": {"PosixPath"},  # in checkpoints of other programs
    "pathlib._local": {"PosixPath"},
}
"""Names of classes and functions that a pickled index may contain, by module. `_IndexUnpickler`
replaces each by a subclass of `_Record`, so none of their code runs."""


class _Record:
    """Placeholder for an object in an untrusted index, which keeps its arguments and attributes.

    Unlike the object itself, it runs no code when it is unpickled.
    """

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _IndexUnpickler(pickle.Unpickler):
    """Unpickles an index into placeholder objects, and rejects classes that it may not contain."""

    def find_class(self, module: str, name: str) -> type[_Record]:
        if name not in _ALLOWED_NAMES.get(module, ()):
            raise CheckpointError(f"it contains {module}.{name}, which is not allowed")
        return type(name, (_Record,), {})


def _parse_index(raw: bytes, is_wanted: Callable[[str], bool]) -> Metadata:
    """Parse the pickled index of a checkpoint without running code from it.

    Args:
        raw: Bytes of the index file. Invalid bytes raise any kind of exception.
        is_wanted: Returns whether to keep the tensor with a given name.

    Raises:
        CheckpointError: If the index contains a name that is not allowed, or a file outside of the
            folder.
    """
    # Each object is unpickled as a placeholder, whose attribute `state` contains its fields.
    index = _IndexUnpickler(io.BytesIO(raw)).load().state
    tensors = {}
    for saved_name, record in index["state_dict_metadata"].items():
        name = _current_tensor_name(saved_name)
        if is_wanted(name):
            tensors[name] = _parse_tensor(name, record)

    positions = _parse_chunk_positions(index["storage_data"], is_wanted)
    return Metadata(tensors, storage_data=positions, storage_meta=StorageMeta())


def _parse_chunk_positions(
    records: Mapping[_Record, _Record], is_wanted: Callable[[str], bool]
) -> dict[MetadataIndex, _StorageInfo]:
    """Return the position in the files of each chunk (a saved tensor or shard)."""
    positions = {}
    for chunk_record, position_record in records.items():
        name = _current_tensor_name(chunk_record.state["fqn"])
        if is_wanted(name):
            offset = _to_size(chunk_record.state["offset"])
            chunk = MetadataIndex(name, offset)
            positions[chunk] = _parse_chunk_position(position_record)
    return positions


def _parse_chunk_position(record: _Record) -> _StorageInfo:
    """Convert an unpickled chunk position (file, offset and length) to DCP's class.

    Raises:
        CheckpointError: If the file is outside of the folder of the checkpoint.
    """
    fields = record.state
    file_name = fields["relative_path"]
    if Path(file_name).name != file_name:
        raise CheckpointError(f"{file_name} is outside of this folder")
    info = _StorageInfo(file_name, fields["offset"], fields["length"])
    vars(info)[_CHECKSUM] = fields.get(_CHECKSUM)
    return info


def _parse_tensor(name: str, record: _Record) -> TensorStorageMetadata:
    """Convert an unpickled description of a tensor (size, dtype and chunks) to DCP's class.

    Raises:
        CheckpointError: If the chunks do not add up to the size of the tensor.
    """
    size = _to_size(record.state["size"])
    dtype_class = record.state["properties"].state[0]  # a placeholder with the name of the dtype
    dtype = getattr(torch, dtype_class.__name__)

    chunks = []
    num_elements = 0
    for chunk in record.state["chunks"]:
        chunk_offsets = _to_size(chunk.state["offsets"])
        chunk_size = _to_size(chunk.state["sizes"])
        chunks.append(ChunkStorageMetadata(chunk_offsets, chunk_size))
        num_elements += math.prod(chunk_size)
    if num_elements != math.prod(size):
        raise CheckpointError(f"the chunks of {name} do not add up to its size")

    properties = TensorProperties(dtype=dtype)
    return TensorStorageMetadata(properties, size, chunks)


def _to_size(record: _Record) -> torch.Size:
    return torch.Size(*record.args)


def _current_tensor_name(name: str) -> str:
    """Convert a tensor name of titanlite 0.2 or earlier to the current name.

    Hooks had class names, so "hooks.Ema.*" becomes "hooks.ema.*". Other names are unchanged.
    """
    kind, _, rest = name.partition(".")
    hook, _, tensor = rest.partition(".")
    if kind == "hooks" and hook in OLD_HOOK_NAMES:
        return f"hooks.{OLD_HOOK_NAMES[hook]}.{tensor}"
    return name


# Messages


def describe_error(error: BaseException) -> str:
    """Describe an exception of a save or a load in one line.

    DCP wraps the exceptions of all ranks in a `CheckpointException`. If several ranks raised the
    same exception, the line contains it once.
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
    """Join lines for an error message. More than `limit` lines end with "... and N more"."""
    if len(lines) > limit:
        lines = [*lines[:limit], f"... and {len(lines) - limit} more"]
    return "\n  ".join(lines)
