"""Background processes that read and tokenize ahead of the trainer.

Invariant: a worker never outlives its trainer. An error in a worker, or its death, is raised in the trainer. Nothing
here imports torch, so that a worker starts in a fraction of a second.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from titanlite.config.errors import UserError
from titanlite.data.documents import Encoder
from titanlite.data.reader import BatchReader, OutOfData, Part, ReadRow
from titanlite.data.tokenizer import load_tokenizer
from titanlite.runtime.process import serve_parent, start_python


class WorkerError(RuntimeError):
    """A worker failed by a fault of titanlite, or was killed."""


class WorkerPool:
    """The workers of one rank; together they deliver the batches of one `BatchReader`.

    Args:
        arguments: the arguments of `BatchReader` except encoder and part; they are pickled.
        encoder: its settings; each worker loads the tokenizer itself.
        prefetch: batches that each worker may be ahead of the trainer.
    """

    def __init__(
        self, arguments: dict[str, Any], encoder: Encoder, dp_rank: int, dp_size: int, workers: int, prefetch: int
    ) -> None:
        settings = {name: getattr(encoder, name) for name in ("holdout", "held_out", "skip_bad", "section")}
        setup = (arguments, encoder.tokenizer.path, settings)
        self._workers = [_Worker((*setup, Part(dp_rank, dp_size, w, workers)), prefetch) for w in range(workers)]

    def next_batch(self) -> list[ReadRow]:
        """As `BatchReader.next_batch`.

        Raises:
            OutOfData, UserError: a worker raised it at this batch.
            WorkerError: a worker died. Raised at once, also if batches of it are still waiting.
        """
        for worker in self._workers:
            worker.check_alive()
        results = [worker.get() for worker in self._workers]
        failures = [result for result in results if isinstance(result, Exception)]
        if failures:  # a mistake in the data goes before its end
            raise min(failures, key=lambda failure: isinstance(failure, OutOfData))
        rows = [row for result in results if not isinstance(result, Exception) for row in result]
        return sorted(rows, key=lambda row: row.k)

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.close()


def send(connection: Connection, value: Any) -> None:
    """Send `value` as a plain pickle. Connection.send would use torch's reductions, which share the memory of tensors
    and need a common parent process."""
    connection.send_bytes(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))


def receive(connection: Connection) -> Any:
    """What the other end sent."""
    return pickle.loads(connection.recv_bytes())


class WorkerProcess:
    """A fresh interpreter that runs a module of titanlite with one end of a socket. It is not a fork, because forking a
    process that has torch's threads or a CUDA context is not safe.

    Attributes:
        connection: our end.
    """

    def __init__(self, module: str) -> None:
        ours, theirs = socket.socketpair()
        variables = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        with theirs:
            number = theirs.fileno()
            command = ["-m", module, str(number)]
            self._process = start_python(command, variables, pass_fds=[number], stdin=subprocess.DEVNULL)
        self.connection = Connection(ours.detach())

    @staticmethod
    def serve(main: Callable[[Connection], None]) -> None:
        """Call `main` with the other end of the socket, in the new process. Returns when the starter is gone."""
        serve_parent()
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("[%(asctime)s] data worker: %(message)s", "%H:%M:%S"))
        logging.getLogger("titanlite").addHandler(handler)
        with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
            main(Connection(int(sys.argv[1])))

    def failed(self) -> bool:
        """Whether it ended by a signal or with an exit code other than 0."""
        return self._process.poll() not in (None, 0)

    def error(self) -> WorkerError:
        """How the process ended."""
        code = self._process.wait()
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        return WorkerError(f"a data worker (process {self._process.pid}) ended {how}{hint}")

    def kill(self) -> None:
        """End it by SIGKILL: it holds nothing that must be closed."""
        self._process.kill()
        self._process.wait()


class _Worker:
    """One process, and the thread that receives its batches. The queue limits how far the process runs ahead: when the
    queue is full, the thread stops receiving, and the process blocks in sending."""

    def __init__(self, setup: tuple[Any, ...], prefetch: int) -> None:
        self._process = WorkerProcess("titanlite.data.worker")
        self._received: queue.Queue[list[ReadRow] | Exception] = queue.Queue(maxsize=prefetch)
        self._died, self._closing = False, False
        self._thread = threading.Thread(target=self._receive, args=(setup,), daemon=True)
        self._thread.start()

    def get(self) -> list[ReadRow] | Exception:
        """The rows of the next batch, or what the worker raised."""
        while True:
            try:
                return self._received.get(timeout=1.0)
            except queue.Empty:
                self.check_alive()

    def check_alive(self) -> None:
        """Raise WorkerError if the process died. (After it has sent an error it ends with exit code 0.)"""
        if self._died or self._process.failed():
            raise self._process.error()

    def close(self) -> None:
        self._closing = True
        self._process.kill()
        while self._thread.is_alive():  # the thread may be waiting for room in the queue
            try:
                self._received.get(timeout=0.05)
            except queue.Empty:
                continue
        self._process.connection.close()

    def _receive(self, setup: tuple[Any, ...]) -> None:
        try:
            send(self._process.connection, setup)
            while not self._closing:
                message = receive(self._process.connection)
                self._received.put(message)
                if isinstance(message, Exception):
                    return
        except (EOFError, OSError):
            self._died = not self._closing


def main(connection: Connection) -> None:
    """Send batch after batch, until the socket is closed or an error is sent."""
    arguments, tokenizer, settings, part = receive(connection)
    logging.getLogger("titanlite").setLevel(logging.ERROR if part.dp_rank else logging.INFO)  # ranks would repeat it
    try:
        reader = BatchReader(**arguments, encoder=Encoder(load_tokenizer(tokenizer), **settings), part=part)
        while True:
            send(connection, reader.next_batch())
    except (BrokenPipeError, ConnectionResetError):
        raise
    except Exception as error:
        send(connection, _portable(error))


def _portable(error: Exception) -> Exception:
    """`error` if a user can mend it; otherwise a WorkerError with its traceback."""
    if isinstance(error, (UserError, OutOfData)):
        return error
    return WorkerError("a data worker failed:\n" + "".join(traceback.format_exception(error)))


if __name__ == "__main__":
    WorkerProcess.serve(main)
