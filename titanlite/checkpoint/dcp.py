"""DCP's writer and reader of files, bound to the commit protocol.

Invariant: reading a checkpoint runs no code that the checkpoint brings along, and opens no file but its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from titanlite.checkpoint import step_folders
from titanlite.checkpoint.archive import FilePart, stored_entries
from titanlite.checkpoint.index import Index, Wanted, read_index
from titanlite.checkpoint.live_tensors import unwrapped
from titanlite.checkpoint.open_files import open_file, shown, unreadable
from titanlite.config.errors import CheckpointError, Damage
from titanlite.config.flavors import Architecture
from titanlite.model.formats import parameter_shapes


class CommittingWriter(FileSystemWriter):
    """Writes one checkpoint: each rank its files, with checksums taken on the way; rank 0 publishes at the end.

    Publishing happens in `finish`, which DCP calls on one rank after all ranks have written. So a save is committed
    the same way from the step loop, a thread or another process.
    """

    def __init__(self, folder: Path, step: int, token: str, info: dict[str, Any]) -> None:
        # There is one thread, because DCP loses the exceptions of all but the first. It does not copy ahead, because
        # DCP would wait for the stream of the training at each tensor, though all tensors are on the CPU already.
        unfinished = folder / step_folders.unfinished_name(step, token)
        super().__init__(unfinished, sync_files=True, thread_count=1, per_thread_copy_ahead=0)
        self.step = step
        self.info = info
        self.fs = _HashingFileSystem()

    @property
    def unfinished(self) -> Path:
        return Path(self.path)

    @property
    def target(self) -> Path:
        """The folder that will appear."""
        return self.unfinished.parent / step_folders.step_name(self.step)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self.unfinished.mkdir(parents=True, exist_ok=True)  # whichever rank comes first
        return plan

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = super().write_data(plan, planner).wait() if plan.items else []
        for digest in self.fs.digests.values():  # digests travel to rank 0 among DCP's own results
            results.append(WriteResult(MetadataIndex(digest.name), digest.size, cast(Any, digest)))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        digests, entries = [], []
        for result in (result for of_rank in results for result in of_rank):
            if isinstance(result.storage_data, step_folders.FileDigest):
                digests.append(result.storage_data)
            else:
                entries.append(result)
        super().finish(metadata, [entries])
        step_folders.publish(self.unfinished, self.step, [*digests, self.fs.digests[".metadata"]], self.info)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)  # without the path: a checkpoint can be moved


class SafeReader(FileSystemReader):
    """Reads a checkpoint. Its index and its tensors are data only: they cannot name a class or a function to call.

    Args:
        wanted: as in `read_index`.
    """

    def __init__(self, path: Path, wanted: Wanted | None = None) -> None:
        super().__init__(path)
        self._wanted = wanted
        self._index: Index | None = None

    def read_index(self) -> Index:
        """The tensors by name, read once.

        Raises:
            Damage: it is no index of whole tensors.
            CheckpointError: it cannot be read now.
        """
        if self._index is None:
            self._index = read_index(Path(self.path), self._wanted)
        return self._index

    def check_model(self, arch: Architecture) -> None:
        """Raises CheckpointError: the weights are not those of a model of `arch`. Needs no such model."""
        index = self.read_index()
        misfit = f"{self.path} does not fit its architecture"
        if arch.n_layers > len(index):  # before a list of all names is made
            raise CheckpointError(f"{misfit}, which has {arch.n_layers} layers")
        for name, shape in parameter_shapes(arch).items():
            if f"model.{name}" not in index or index[f"model.{name}"].size != shape:
                raise CheckpointError(f"{misfit}, which has {name} of shape {shape}")

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index as DCP wants it. Raises as `read_index`."""
        tensors: dict[str, Any] = {}
        places: dict[MetadataIndex, _StorageInfo] = {}
        for name, entry in self.read_index().items():
            chunks = [ChunkStorageMetadata(torch.Size(c.offsets), torch.Size(c.sizes)) for c in entry.chunks]
            properties = TensorProperties(dtype=getattr(torch, entry.dtype))
            tensors[name] = TensorStorageMetadata(properties, torch.Size(entry.size), chunks)
            for chunk in entry.chunks:
                places[MetadataIndex(name, chunk.offsets)] = _StorageInfo(chunk.file, chunk.start, chunk.length)
        return Metadata(tensors, storage_data=places, storage_meta=StorageMeta(load_id=self.load_id))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the chunks of `plan` into the tensors of `planner`.

        Raises:
            Damage: a file holds other tensors than the index says.
            CheckpointError: a file cannot be read now.
        """
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)
        for name, items in by_file.items():
            with open_file(Path(self.path) / name) as file:
                for item in items:
                    part = [slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True)]
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(self._read_chunk(file, item)[tuple(part)])
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_chunk(self, file: IO[bytes], item: ReadItem) -> Tensor:
        place, entry = self.storage_data[item.storage_index], self.read_index()[item.storage_index.fqn]
        offsets = tuple(item.storage_index.offset or ())
        sizes = next(chunk.sizes for chunk in entry.chunks if chunk.offsets == offsets)
        part = FilePart(file, place.offset, place.length)
        try:
            stored_entries(part)
            part.seek(0)
            tensor = unwrapped(torch.load(cast(IO[bytes], part), map_location="cpu", weights_only=True))
        except Exception as error:  # torch's reader raises any kind of error for damaged bytes
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            if part.error:
                raise unreadable(Path(self.path) / place.relative_path, part.error) from None
            if isinstance(error, MemoryError | OSError) or "can't allocate memory" in reason:
                raise  # this is no damage: another start may have more memory
            raise Damage(f"{shown(place.relative_path)}: {shown(item.storage_index.fqn)}: {shown(reason)}") from None
        expected = (getattr(torch, entry.dtype), sizes)
        if type(tensor) is not Tensor or (tensor.dtype, tuple(tensor.shape)) != expected or not tensor.is_contiguous():
            raise Damage(f"{shown(place.relative_path)}: {shown(item.storage_index.fqn)}: not the tensor of the index")
        return tensor


def load_tensors(reader: SafeReader, tensors: dict[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Read tensors of a checkpoint, whose files are verified, in place.

    Args:
        group: of the ranks that load together; None: this process alone.

    Raises:
        Damage: on all ranks, if some found that files do not hold these tensors, and no rank has another failure.
        CheckpointError: on all ranks, if one cannot: memory is short, or storage is away. That is no damage.
    """
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    try:
        with alone():
            dcp_load(tensors, storage_reader=reader, planner=planner, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        if all(isinstance(of_rank, Damage) for of_rank, _ in error.failures.values()):
            raise Damage(cause(error)) from None
        raise CheckpointError(f"{reader.path} cannot be loaded: {cause(error)}") from None


def cause(error: BaseException) -> str:
    """The cause of an error in words. DCP nests causes in its own exception, by rank."""
    if isinstance(error, CheckpointException):
        return "; ".join(sorted({cause(of_rank) for of_rank, _ in error.failures.values()}))
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


@contextmanager
def alone() -> Generator[None, None, None]:
    """Silence DCP's warning that it works on one process, where that is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class _HashingFileSystem(FileSystem):
    """DCP's local file system, remembering the digest of each file written."""

    def __init__(self) -> None:
        self.digests: dict[str, step_folders.FileDigest] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any, None, None]:
        assert mode == "wb", mode
        file = step_folders.HashingFile(Path(path))
        try:
            yield file
        except RuntimeError as error:
            raise file.error or error from None
        finally:
            file.close()
        self.digests[file.name] = file.digest()

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        digest = self.digests.pop(Path(path).name)
        name = Path(new_path).name
        self.digests[name] = step_folders.FileDigest(name, digest.size, digest.xxh3_128)
