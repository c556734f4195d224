"""A process that writes a rank's files, from memory that the trainer shares with it.

Invariant: it obeys no signal and ends with the trainer, however that ends. The memory has no name, so nothing of it is
left behind; no port is opened; and the number of open files does not depend on the number of tensors.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import mmap
import multiprocessing
import os
import signal
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from titanlite.checkpoint.dcp import CommittingWriter

_ALIGNMENT = 64


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a contiguous tensor lies in shared memory; `start` in bytes."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class SharedMemory:
    """Room for one copy of some tensors, which another process can map."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        places, end = {}, 0
        for name, tensor in tensors.items():
            places[name] = Place(end, tuple(tensor.shape), tensor.dtype)
            end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.file = os.memfd_create("titanlite")
        os.ftruncate(self.file, max(1, end))
        self._memory = mmap.mmap(self.file, 0)
        self.buffers = {name: view(self._memory, place) for name, place in places.items()}
        self._places = {buffer.data_ptr(): places[name] for name, buffer in self.buffers.items() if buffer.numel()}

    def place(self, tensor: Any) -> Place:
        """Where one of `buffers`, or a tensor without elements, lies."""
        assert isinstance(tensor, Tensor)
        if not tensor.numel():
            return Place(0, tuple(tensor.shape), tensor.dtype)
        place = self._places[tensor.data_ptr()]
        assert (place.shape, place.dtype) == (tuple(tensor.shape), tensor.dtype)
        return place

    def close(self) -> None:
        """Give the memory back, when nobody uses `buffers` any more."""
        os.close(self.file)
        self.buffers.clear()


def view(memory: mmap.mmap, place: Place) -> Tensor:
    """The tensor that lies at a place."""
    count = torch.Size(place.shape).numel()
    if count == 0:
        return torch.empty(place.shape, dtype=place.dtype)
    return torch.frombuffer(memory, dtype=place.dtype, count=count, offset=place.start).view(place.shape)


class WriterProcess:
    """Starts the process when there is something to write, and starts another one if it has died."""

    def __init__(self) -> None:
        self._process: Any = None
        self._connection: Connection | None = None
        self._memory: SharedMemory | None = None
        atexit.register(self.close)

    def write(self, memory: SharedMemory, target: tuple[Path, int, str], plan: SavePlan, places: list[Place]) -> Any:
        """Write the items of a plan, which lie at `places`, as `CommittingWriter(*target, ...)`; returns DCP's results.

        Raises:
            OSError: the process died.
            Exception: what went wrong there.
        """
        if self._process is None or memory is not self._memory or not self._process.is_alive():
            self.close()
            self._start(memory)
        process, connection = self._process, self._connection
        assert process is not None
        assert connection is not None
        try:
            connection.send((target, plan, places))
            result = connection.recv()
        except (EOFError, ConnectionError):
            process.join()
            raise OSError(f"the process that writes has died, exit code {process.exitcode}") from None
        if isinstance(result, BaseException):
            raise result
        return result

    def close(self) -> None:
        """End the process. It holds nothing that must be kept: `write` has returned or failed."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = self._connection = self._memory = None

    def _start(self, memory: SharedMemory) -> None:
        context = multiprocessing.get_context("spawn")  # because a fork would inherit the trainer's threads and locks
        self._connection, other = context.Pipe()
        try:
            arguments = (other, _Descriptor(memory.file))
            self._process = context.Process(target=_serve, args=arguments, daemon=True, name="titanlite-writer")
            self._process.start()
        except BaseException:
            self._process = None
            raise
        finally:
            other.close()
        self._memory = memory


class _Descriptor:
    """A file descriptor that a process inherits when it is started with this."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _detach, (reduction.DupFd(self.number),)


def _detach(inherited: Any) -> int:
    return inherited.detach()


def _serve(connection: Connection, file: Any) -> None:
    """What the process does until the trainer's end of the connection is closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    logging.disable(logging.CRITICAL)  # of DCP; the trainer says what goes wrong
    memory = mmap.mmap(file, 0)
    os.close(file)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            (folder, step, token), plan, places = connection.recv()
            try:
                planner = _Placed({item.index: place for item, place in zip(plan.items, places, strict=True)}, memory)
                result = CommittingWriter(folder, step, token, {}).write_data(plan, planner).wait()
            except Exception as error:
                result = error
            connection.send(result)


class _Placed(DefaultSavePlanner):
    """Finds the tensors of a plan in shared memory."""

    def __init__(self, places: dict[Any, Place], memory: mmap.mmap) -> None:
        super().__init__()
        self._places, self._memory = places, memory

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return view(self._memory, self._places[write_item.index])


class RemoteWriter(CommittingWriter):
    """`CommittingWriter` whose files another process writes.

    Attributes:
        memory: where the tensors lie; set before the save.
    """

    def __init__(self, folder: Path, step: int, token: str, info: dict[str, Any], process: WriterProcess) -> None:
        super().__init__(folder, step, token, info)
        self._process, self._target = process, (folder, step, token)
        self.memory: SharedMemory | None = None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        assert self.memory is not None
        places = [self.memory.place(planner.resolve_data(item)) for item in plan.items]
        future: Future[list[WriteResult]] = Future()
        future.set_result(self._process.write(self.memory, self._target, plan, places))
        return future
