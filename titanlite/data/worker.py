"""A background process that reads and tokenizes ahead of the trainer.

Invariant: a worker never outlives its trainer. An error in a worker, its death, or that it stands still is raised in
the trainer, which never waits longer than a limit, and no longer than until it is told to stop. Nothing here imports
torch, so that a worker starts in a fraction of a second.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import IO, Any

from titanlite.config.errors import UserError
from titanlite.config.schema import JobConfig
from titanlite.data.stream import BatchReader, OutOfData, PackedDataset, Part, Row
from titanlite.runtime.process import serve_parent, start_python

_AT_BYTES = 3 * 8  # of what a worker reads just now: numbers of source, part and document
_LOOK_SECONDS = 0.1


class WorkerError(UserError):
    """A worker stands still, was killed, or failed by a fault of titanlite."""

    exit_code = 1


class Interrupted(Exception):
    """The trainer was told to stop while it waited for data."""


class Worker:
    """A process that delivers the batches of `BatchReader(data, part)`, and the thread that receives them. The queue
    limits how far the process runs ahead: when it is full, the thread stops receiving, and the process blocks in
    sending.

    The process is a fresh interpreter, not a fork, because forking a process that has torch's threads or a CUDA context
    is not safe.

    Args:
        stopping: whether the trainer is told to stop; asked several times a second while it waits.
    """

    def __init__(self, data: PackedDataset, part: Part, job: JobConfig, stopping: Callable[[], bool]) -> None:
        self._sources, self._stopping = data.sources, stopping
        # How long it may stand still, before its first batch and later. The other ranks wait for the trainer in a
        # collective. They are told before that one's limit.
        self._patience, self._later = job.comm.init_timeout_seconds / 2, job.comm.train_timeout_seconds / 2
        with tempfile.TemporaryFile() as shared:
            shared.truncate(_AT_BYTES)
            self._at = memoryview(mmap.mmap(shared.fileno(), _AT_BYTES)).cast("q")
            self._process: subprocess.Popen[bytes] = start_python(
                ["-m", "titanlite.data.worker", str(shared.fileno())],
                {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
                pass_fds=[shared.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        self._received: queue.Queue[list[Row] | Exception] = queue.Queue(maxsize=job.dataset.prefetch)
        pipes = self._process.stdin, self._process.stdout
        self._thread = threading.Thread(target=self._receive, args=(*pipes, (data, part)), daemon=True)
        self._thread.start()

    def next_batch(self) -> list[Row]:
        """As `BatchReader.next_batch`.

        Raises:
            UserError, WorkerError: the process ended, or stands still.
            Interrupted: `stopping` said so.
        """
        at, since = self._at.tolist(), time.monotonic()
        while True:
            with contextlib.suppress(queue.Empty):
                result = self._received.get(timeout=_LOOK_SECONDS)
                break
            if self._stopping():
                raise Interrupted
            if (found := self._at.tolist()) != at:
                at, since = found, time.monotonic()
            if time.monotonic() - since > self._patience:
                source = self._sources[at[0]]
                raise WorkerError(
                    f"a data worker (process {self._process.pid}) has stood still for {self._patience:,.0f} seconds in "
                    f"{source.name}, {source.where(*at[1:])}. Look whether the disk or the network that holds it "
                    "answers, and whether the process is stopped. Then start again."
                )
        self._patience = self._later
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        """End the process by SIGKILL: it holds nothing that must be closed."""
        self._process.kill()
        last = time.monotonic() + 5.0  # the process may wait for a disk that does not answer
        while self._thread.is_alive() and time.monotonic() < last:  # the thread may wait for room in the queue
            with contextlib.suppress(queue.Empty):
                self._received.get(timeout=0.05)

    def _receive(self, stdin: IO[bytes], stdout: IO[bytes], setup: Any) -> None:
        try:
            with stdout:
                with stdin:
                    pickle.dump(setup, stdin)
                while True:
                    self._received.put(pickle.load(stdout))
        except (EOFError, OSError, pickle.UnpicklingError):
            code = self._process.wait()
            how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            try:
                for source in self._sources:
                    source.check_files()  # whoever reads a mapped file that became shorter is killed by SIGBUS
                raise WorkerError(f"a data worker (process {self._process.pid}) ended {how}. Start again to go on.")
            except UserError as error:
                self._received.put(error)


def main(at_file: int) -> None:
    """Send batch after batch, until an error is sent, or the trainer ends or closes its end."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is not for the trainer
    with contextlib.suppress(BrokenPipeError):  # nobody reads any more
        for message in _batches(at_file):
            pickle.dump(message, out, pickle.HIGHEST_PROTOCOL)
            out.flush()
    os._exit(0)  # without another attempt to write


def _batches(at_file: int) -> Iterator[list[Row] | Exception]:
    try:
        try:
            data, part = pickle.load(sys.stdin.buffer)
        except (EOFError, pickle.UnpicklingError):
            return  # the trainer was killed while it sent them
        reader = BatchReader(data, part, memoryview(mmap.mmap(at_file, _AT_BYTES)).cast("q"))
        while True:
            yield reader.next_batch()
    except (UserError, OutOfData) as error:
        yield error
    except Exception:
        yield WorkerError(f"a data worker failed:\n{traceback.format_exc()}")


if __name__ == "__main__":
    serve_parent()
    main(int(sys.argv[1]))
