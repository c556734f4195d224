"""Background processes that read and tokenize ahead of the trainer.

Invariant: a worker never outlives its trainer. An error in a worker, its death, or that it stands still is raised in
the trainer, which never waits longer than a limit. Nothing here imports torch, so that a worker starts in a fraction of
a second.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import pickle
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from titanlite.config.errors import UserError
from titanlite.data.stream import BatchReader, OutOfData, PackedDataset, Part, ReadRow
from titanlite.runtime.process import serve_parent, start_python

_AT_BYTES = 3 * 8  # of what a worker reads just now: numbers of source, part and document
_LOOK_SECONDS = 0.1


class WorkerError(UserError):
    """A worker stands still, was killed, or failed by a fault of titanlite."""

    exit_code = 1


class WorkerPool:
    """The workers of one rank; together they deliver the batches of one `BatchReader`.

    Args:
        data, part: of `BatchReader`. They are pickled.
        workers: number of processes.
        prefetch: batches that each worker may be ahead of the trainer.
        patience: seconds that a worker may stand still while the trainer waits: before its first batch, and later.
    """

    def __init__(
        self, data: PackedDataset, part: Part, workers: int, prefetch: int, patience: tuple[float, float]
    ) -> None:
        parts = [replace(part, worker=worker, workers=workers) for worker in range(workers)]
        self._workers = [_Worker(data, part, prefetch, patience) for part in parts]

    def wait(self, give_up: Callable[[], bool]) -> bool:
        """Wait for the next batch; False if `give_up` said so.

        Raises:
            UserError, WorkerError: a worker died, also if batches of it are still waiting, or stands still.
        """
        for worker in self._workers:
            worker.check_alive()
        return all(worker.wait(give_up) for worker in self._workers)

    def next_batch(self) -> list[ReadRow]:
        """As `BatchReader.next_batch`, after `wait`. Raises what a worker raised at this batch."""
        results = [worker.take() for worker in self._workers]
        failures = [result for result in results if isinstance(result, Exception)]
        if failures:  # a mistake in the data goes before its end
            raise min(failures, key=lambda failure: isinstance(failure, OutOfData))
        rows = [row for result in results if not isinstance(result, Exception) for row in result]
        return sorted(rows, key=lambda row: row.k)

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.close()


class _Worker:
    """One process, and the thread that receives its batches. The queue limits how far the process runs ahead: when the
    queue is full, the thread stops receiving, and the process blocks in sending.

    The process is a fresh interpreter, not a fork, because forking a process that has torch's threads or a CUDA context
    is not safe.
    """

    def __init__(self, data: PackedDataset, part: Part, prefetch: int, patience: tuple[float, float]) -> None:
        self._sources = data.sources
        self._patience, self._later = patience
        ours, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as shared:
            shared.truncate(_AT_BYTES)
            self._at = memoryview(mmap.mmap(shared.fileno(), _AT_BYTES)).cast("q")
            numbers = [theirs.fileno(), shared.fileno()]
            self._process: subprocess.Popen[bytes] = start_python(
                ["-m", "titanlite.data.worker", *map(str, numbers)],
                {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
                pass_fds=numbers,
                stdin=subprocess.DEVNULL,
            )
        self._connection = Connection(ours.detach())
        self._received: queue.Queue[list[ReadRow] | Exception] = queue.Queue(maxsize=prefetch)
        self._next: list[ReadRow] | Exception | None = None
        self._died = self._closing = False
        self._thread = threading.Thread(target=self._receive, args=((data, part),), daemon=True)
        self._thread.start()

    def wait(self, give_up: Callable[[], bool]) -> bool:
        """As `WorkerPool.wait`."""
        at, since = self._at.tolist(), time.monotonic()
        while self._next is None:
            with contextlib.suppress(queue.Empty):
                self._next = self._received.get(timeout=_LOOK_SECONDS)
                break
            if give_up():
                return False
            self.check_alive()
            if (now := self._at.tolist()) != at:
                at, since = now, time.monotonic()
            elif time.monotonic() - since > self._patience:
                source = self._sources[at[0]]
                raise WorkerError(
                    f"a data worker (process {self._process.pid}) has stood still for {self._patience:,.0f} seconds "
                    f"in {source.name}, {source.where(*at[1:])}. Look whether the disk or the network that holds it "
                    "answers, and whether the process is stopped. Then start again."
                )
        return True

    def take(self) -> list[ReadRow] | Exception:
        """What `wait` waited for."""
        result, self._next, self._patience = self._next, None, self._later
        assert result is not None
        return result

    def check_alive(self) -> None:
        """Raises an error if the process died. (After it has sent an error it ends with exit code 0.)"""
        code = self._process.poll()
        if code in (None, 0) and not self._died:
            return
        code = self._process.wait()
        if code == -signal.SIGBUS:  # a memory-mapped file has become shorter
            for source in self._sources:
                source.files.check_all()
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        raise WorkerError(f"a data worker (process {self._process.pid}) ended {how}{hint}. Start again to go on.")

    def close(self) -> None:
        """End the process by SIGKILL: it holds nothing that must be closed."""
        self._closing = True
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for a disk that does not answer
            self._process.wait(timeout=5.0)
            while self._thread.is_alive():  # it may be waiting for room in the queue
                with contextlib.suppress(queue.Empty):
                    self._received.get(timeout=0.05)
            self._connection.close()

    def _receive(self, setup: Any) -> None:
        try:
            _send(self._connection, setup)
            while not self._closing:
                message = pickle.loads(self._connection.recv_bytes())
                self._received.put(message)
                if isinstance(message, Exception):
                    return
        except (EOFError, OSError):
            self._died = not self._closing


def _send(connection: Connection, value: Any) -> None:
    """Send `value` as a plain pickle. Connection.send would use torch's reductions, which share the memory of tensors
    and need a common parent process."""
    connection.send_bytes(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))


def main(connection: Connection, at: memoryview) -> None:
    """Send batch after batch, until the trainer closes its end or an error is sent."""
    try:
        data, part = pickle.loads(connection.recv_bytes())
        logging.getLogger("titanlite").setLevel(
            logging.ERROR if part.dp_rank else logging.INFO
        )  # ranks would repeat it
        reader = BatchReader(data, part, at)
        while True:
            _send(connection, reader.next_batch())
    except (UserError, OutOfData) as error:
        _send(connection, error)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the trainer has ended, or has closed the loader: nobody reads any more
    except Exception as error:
        _send(connection, WorkerError("a data worker failed:\n" + "".join(traceback.format_exception(error))))


if __name__ == "__main__":
    serve_parent()
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("[%(asctime)s] data worker: %(message)s", "%H:%M:%S"))
    logging.getLogger("titanlite").addHandler(handler)
    socket_number, at_number = map(int, sys.argv[1:])
    main(Connection(socket_number), memoryview(mmap.mmap(at_number, _AT_BYTES)).cast("q"))
