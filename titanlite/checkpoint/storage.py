"""DCP's writer and reader of files, bound to the commit protocol.

Invariant: reading a checkpoint runs no code that the checkpoint brings along. May import config, commit and torch.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from titanlite.checkpoint import commit

_METADATA_CLASSES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),  # a look-up by name in a fixed table
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    # BytesStorageMetadata is left out on purpose: DCP unpickles such entries without restriction.
}


class CommittingWriter(FileSystemWriter):
    """Writes one checkpoint: each rank its files, with checksums taken on the way; rank 0 publishes at the end.

    Publishing happens in `finish`, which DCP calls on one rank after all ranks have written. So a save is committed
    the same way from the step loop, a thread or another process.
    """

    def __init__(self, folder: Path, step: int, token: str, info: dict[str, Any]) -> None:
        # One thread: with more, DCP loses the exception of any but the first. It must not copy ahead: in the background
        # DCP would wait for the stream of the training, tensor by tensor, though all of them are on the CPU by then.
        unfinished = folder / commit.unfinished_name(step, token)
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
        return self.unfinished.parent / commit.step_name(self.step)

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
            if isinstance(result.storage_data, commit.FileDigest):
                digests.append(result.storage_data)
            else:
                entries.append(result)
        super().finish(metadata, [entries])
        commit.publish(self.unfinished, self.step, [*digests, self.fs.digests[".metadata"]], self.info)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(save_id=self.save_id)  # without the path: a checkpoint can be moved


class SafeReader(FileSystemReader):
    """Reads a checkpoint; its pickled index may name only the classes that an index consists of."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index, read once. Raises pickle.UnpicklingError for anything but an index of tensors."""
        if self._metadata is not None:
            return self._metadata
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f".metadata holds a {type(metadata).__name__}, not an index of tensors")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        self._metadata = metadata
        return metadata


@contextmanager
def alone() -> Generator[None, None, None]:
    """Without DCP's warning that it works on one process: where this is used, that is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class _HashingFileSystem(FileSystem):
    """DCP's local file system, remembering the digest of each file written."""

    def __init__(self) -> None:
        self.digests: dict[str, commit.FileDigest] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[Any, None, None]:
        assert mode == "wb", mode
        file = commit.HashingFile(Path(path))
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
        self.digests[name] = commit.FileDigest(name, digest.size, digest.xxh3_128)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _METADATA_CLASSES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f".metadata names {module}.{name}, which has no place in a checkpoint")
