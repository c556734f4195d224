"""DCP's writer and reader of files, bound to the commit protocol.

Invariant: reading a checkpoint runs no code that the checkpoint brings along, and opens no file but its own.
"""

from __future__ import annotations

import io
import math
import pickle
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.metadata as stored
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from titanlite.checkpoint import step_folders
from titanlite.checkpoint.live_tensors import AVERAGES
from titanlite.config.errors import CheckpointError, UserError
from titanlite.config.mistakes import short

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # DCP's, which works on one process, too

INDEX = ".metadata"
Index = dict[str, stored.TensorStorageMetadata]
"""The tensors of a checkpoint by name."""

_NAMES = {
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "_MEM_FORMAT_ENCODING", "BytesStorageMetadata"),
    },
    "pathlib": {"PosixPath"},  # of other programs
    "pathlib._local": {"PosixPath"},
}


class CommittingWriter(FileSystemWriter):
    """Writes one checkpoint: each rank its files, with checksums taken on the way; rank 0 publishes at the end.

    Publishing happens in `finish`, which DCP calls on one rank after all ranks have written. So a save is committed
    the same way from the step loop and from a thread.
    """

    def __init__(self, folder: Path, step: int, token: str, info: dict[str, Any]) -> None:
        # There is one thread, because DCP loses the exceptions of all but the first. It does not copy ahead, because
        # DCP would wait for the stream of the training at each tensor, though all tensors are on the CPU already.
        self.unfinished = folder / f"{step_folders.UNFINISHED}{step_folders.step_name(step)}-{token}"
        super().__init__(self.unfinished, sync_files=True, thread_count=1, per_thread_copy_ahead=0)
        self.step, self.info = step, info
        self.target = folder / step_folders.step_name(step)
        self.fs = _CheckpointFiles()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = super().write_data(plan, planner).wait() if plan.items else []
        for name, entry in self.fs.written.items():  # travels to rank 0 among DCP's own results
            results.append(WriteResult(stored.MetadataIndex(name), entry["size"], cast(Any, entry)))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: stored.Metadata, results: list[list[WriteResult]]) -> None:
        of_ranks = [result for of_rank in results for result in of_rank]
        files = {result.index.fqn: result.storage_data for result in of_ranks if isinstance(result.storage_data, dict)}
        super().finish(metadata, [[result for result in of_ranks if not isinstance(result.storage_data, dict)]])
        step_folders.publish(self.unfinished, self.step, {**files, INDEX: self.fs.written[INDEX]}, self.info)

    def storage_meta(self) -> stored.StorageMeta:
        return stored.StorageMeta(save_id=self.save_id)  # without the path: a checkpoint can be moved


class SafeReader(FileSystemReader):
    """Reads a checkpoint whose files are verified, or that another program wrote.

    Args:
        wanted: of another program's checkpoint, the names of the tensors to read. Other entries may be anything.

    Attributes:
        index: the tensors by name.

    Raises:
        CheckpointError: the index cannot be read.
        Damage: there is none.
    """

    def __init__(self, path: Path, wanted: Callable[[str], bool] = lambda name: True) -> None:
        super().__init__(path)
        self.fs = _CheckpointFiles()
        with step_folders.open_file(path / INDEX) as file:
            raw = file.read()
        try:
            self._metadata = _parse_index(raw, wanted)
        except Exception as error:  # bytes that are no index raise any kind of error
            raise CheckpointError(f"{path / INDEX} cannot be read: {short(reason(error))}") from None
        self.index = cast(Index, self._metadata.state_dict_metadata)

    def read_metadata(self, *args: Any, **kwargs: Any) -> stored.Metadata:
        return self._metadata


def weights_of(reader: SafeReader, averaged: bool) -> str:
    """What the names of the weights begin with in a checkpoint.

    Raises:
        UserError: their averages are wanted, and it has none.
    """
    if averaged and not any(name.startswith(AVERAGES) for name in reader.index):
        problem = f"{reader.path} has no averages of the weights: ema.decay was 0, or it is a mean of checkpoints"
        raise UserError(f"{problem}. Leave out --ema.")
    return AVERAGES if averaged else "model."


class _StandIn:
    """An object that the index describes: its arguments and its attributes, and nothing that acts."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> type[_StandIn]:
        if name not in _NAMES.get(module, ()):
            raise CheckpointError(f"names {module}.{name}, which has no place in a checkpoint")
        return type(name, (_StandIn,), {})  # a new one each time, so that nothing outlives the reading


def _parse_index(raw: bytes, wanted: Callable[[str], bool]) -> stored.Metadata:
    """The wanted part of what DCP pickles, as DCP wants it. Raises any kind of error for bytes that are none."""
    root = _IndexUnpickler(io.BytesIO(raw)).load().state
    places: dict[stored.MetadataIndex, _StorageInfo] = {}
    for key, place in root["storage_data"].items():
        name, at = key.state["fqn"], place.state
        if wanted(name):
            if Path(at["relative_path"]).name != at["relative_path"]:
                raise CheckpointError(f"{at['relative_path']} is no file of this folder")
            places[stored.MetadataIndex(name, _size(key.state["offset"]))] = _StorageInfo(
                at["relative_path"], at["offset"], at["length"]
            )
    index: Index = {}
    for name, entry in root["state_dict_metadata"].items():
        if wanted(name):
            size, dtype = _size(entry.state["size"]), getattr(torch, entry.state["properties"].state[0].__name__)
            parts = [part.state for part in entry.state["chunks"]]
            chunks = [stored.ChunkStorageMetadata(_size(part["offsets"]), _size(part["sizes"])) for part in parts]
            if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
                raise CheckpointError(f"{name}: its parts do not make the whole")
            index[name] = stored.TensorStorageMetadata(stored.TensorProperties(dtype=dtype), size, chunks)
    return stored.Metadata(dict(index), storage_data=places, storage_meta=stored.StorageMeta())


def _size(value: _StandIn) -> torch.Size:
    return torch.Size(*value.args)


def load_tensors(reader: SafeReader, tensors: dict[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Read tensors of a checkpoint in place.

    Args:
        group: of the ranks that load together; None: this process alone.

    Raises:
        CheckpointError: on all ranks, if one cannot.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    try:
        dcp_load(tensors, storage_reader=reader, planner=planner, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise CheckpointError(f"{reader.path} cannot be loaded: {reason(error)}") from None


def reason(error: BaseException) -> str:
    """The cause of an error in words. DCP nests causes in its own exception, by rank."""
    if isinstance(error, CheckpointException):
        return "; ".join(sorted({reason(of_rank) for of_rank, _ in error.failures.values()}))
    if isinstance(error, pickle.UnpicklingError):  # torch adds advice on how to load it all the same
        return "it holds more than tensors"
    first = next(iter(str(error).splitlines()), "")
    return first if isinstance(error, CheckpointError) else f"{type(error).__name__}: {first}"


def abridged(lines: list[str], limit: int = 8) -> str:
    """The first lines of a list for a message."""
    more = [f"... and {len(lines) - limit} more"] if len(lines) > limit else []
    return "\n  ".join([*lines[:limit], *more])


class _CheckpointFiles(FileSystem):
    """DCP's local file system: only regular files are read, and the checksums of those that are written are kept."""

    def __init__(self) -> None:
        self.written: dict[str, step_folders.Entry] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any, None, None]:
        if mode == "rb":
            with step_folders.open_file(Path(path)) as file:
                yield file
            return
        with step_folders.HashingFile(Path(path)) as file:
            try:
                yield file
            except RuntimeError as error:
                raise file.error or error from None
            self.written[Path(path).name.removesuffix(".tmp")] = file.entry()  # as DCP will rename it
