"""A background process that reads and tokenizes data ahead of the trainer.

Invariant: A worker never outlives its trainer. If a worker fails, crashes or hangs, the trainer
raises an error; it never waits longer than a fixed limit.

This module does not import torch, so that a worker starts within a fraction of a second.
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
from titanlite.data.packing import PackedSequence
from titanlite.data.stream import OutOfData, PackedDataset, ReaderShard, SequenceReader
from titanlite.runtime.process import serve_parent, start_python

PROGRESS_BYTES = 3 * 8  # int64 indices of the source, part and document that a worker is reading
POLL_SECONDS = 0.1


class WorkerError(UserError):
    """Raised when a data worker hangs, is killed, or fails because of a bug."""

    exit_code = 1


class Interrupted(Exception):
    """Raised when the run is stopped while the trainer waits for data."""


class Worker:
    """Reads and tokenizes batches in a separate process, ahead of the trainer.

    A thread of the trainer receives the batches and puts them into a queue that holds
    dataset.prefetch batches. While the queue is full, the process waits. The process is a new
    interpreter rather than a fork, because forking a process with torch threads or a CUDA context
    is unsafe.
    """

    def __init__(
        self,
        data: PackedDataset,
        shard: ReaderShard,
        job: JobConfig,
        is_stopping: Callable[[], bool],
    ) -> None:
        """Start the data worker process and the thread that receives its batches.

        This does not wait for the first batch.

        Args:
            data: The opened sources, and the positions from which to read.
            shard: Selects the sequences of each global batch that this worker reads.
            job: Job that sets the timeouts and the size of the queue.
            is_stopping: Function that returns whether the run is about to stop. It is called
                several times per second while `next_batch` waits.
        """
        self._sources = data.sources
        self._is_stopping = is_stopping
        # While this rank waits for data, the other ranks wait in a collective. Fail after half of
        # the collective timeout, so that this rank reports the cause before the others fail.
        self._timeout = job.comm.init_timeout_seconds / 2
        self._timeout_after_first_batch = job.comm.train_timeout_seconds / 2

        # The process reports its progress in a file that both processes map into memory.
        with tempfile.TemporaryFile() as progress_file:
            progress_file.truncate(PROGRESS_BYTES)
            self._progress = _map_progress(progress_file.fileno())
            self._process: subprocess.Popen[bytes] = start_python(
                ["-m", "titanlite.data.worker", str(progress_file.fileno())],
                {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
                pass_fds=[progress_file.fileno()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        self._received: queue.Queue[list[PackedSequence] | Exception] = queue.Queue(
            maxsize=job.dataset.prefetch
        )
        self._thread = threading.Thread(
            target=self._exchange_data,
            args=(self._process.stdin, self._process.stdout, (data, shard)),
            daemon=True,
        )
        self._thread.start()

    def next_batch(self) -> list[PackedSequence]:
        """Wait for this worker's sequences of the next global batch, and return them.

        Raises:
            OutOfData: If a source with `max_epochs` ends within the batch.
            UserError: If a record cannot be read.
            WorkerError: If the process has exited, or makes no progress for half of the collective
                timeout.
            Interrupted: If the run is stopped during the wait.
        """
        result = self._wait_for_result()
        self._timeout = self._timeout_after_first_batch
        if isinstance(result, Exception):
            raise result
        return result

    def _wait_for_result(self) -> list[PackedSequence] | Exception:
        """Wait for the next batch or error that the process sends, and return it.

        Raises:
            WorkerError: If the process makes no progress within the timeout.
            Interrupted: If the run is stopped.
        """
        progress = self._progress.tolist()
        last_change = time.monotonic()
        while True:
            with contextlib.suppress(queue.Empty):  # nothing has arrived within POLL_SECONDS
                return self._received.get(timeout=POLL_SECONDS)
            if self._is_stopping():
                raise Interrupted

            # The process hangs if it has been reading the same document for too long.
            new_progress = self._progress.tolist()
            if new_progress != progress:
                progress = new_progress
                last_change = time.monotonic()
            if time.monotonic() - last_change > self._timeout:
                raise WorkerError(self._describe_hang(progress))

    def close(self) -> None:
        """Kill the process, and end the thread that receives its batches."""
        self._process.kill()  # safe, because the process writes no files
        # The process may be blocked by a disk that does not respond, so do not wait forever. The
        # thread may be waiting for space in the queue.
        deadline = time.monotonic() + 5.0
        while self._thread.is_alive() and time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                self._received.get(timeout=0.05)

    def _describe_hang(self, progress: list[int]) -> str:
        """Return an error message that names the document that the process hangs on.

        Args:
            progress: Indices of the source, the part and the document being read.
        """
        source_index, part, document = progress
        source = self._sources[source_index]
        return (
            f"A data worker (process {self._process.pid}) made no progress for "
            f"{self._timeout:,.0f} seconds in {source.name}, {source.where(part, document)}. Check "
            "that the disk or network storage responds and that the process is not suspended, then "
            "start the run again."
        )

    def _exchange_data(self, stdin: IO[bytes], stdout: IO[bytes], setup: Any) -> None:
        """Send `setup` to the process, and put each batch or error that it returns into the queue.

        This runs in a thread until the process exits. The last item in the queue is an error that
        explains why there are no more batches.

        Args:
            stdin: Standard input of the process.
            stdout: Standard output of the process.
            setup: Dataset and shard that the process reads.
        """
        try:
            with stdout:
                with stdin:
                    pickle.dump(setup, stdin)
                while True:  # until `load` raises EOFError
                    self._received.put(pickle.load(stdout))
        except (EOFError, OSError, pickle.UnpicklingError):  # the process has exited
            self._received.put(self._find_cause_of_exit())
        except Exception as error:  # the source of a plugin can have attributes of any type
            self._received.put(
                WorkerError(
                    f"Cannot exchange data with a data worker: {error!r}. Sources and errors of a "
                    "plugin must support pickle. Otherwise, set dataset.num_workers = 0."
                )
            )

    def _find_cause_of_exit(self) -> UserError:
        """Wait for the process to exit, and return an error that explains why it exited."""
        code = self._process.wait()
        try:
            # Reading a memory-mapped file that was truncated kills the process with SIGBUS.
            for source in self._sources:
                source.check_files()
        except UserError as error:
            return error
        cause = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return WorkerError(
            f"A data worker (process {self._process.pid}) ended with {cause}. Start the run again "
            "to resume."
        )


def main(progress_fd: int) -> None:
    """Read batches in a data worker process, and write them to standard output as pickles.

    Exit the process after the first error, at the end of the data, or when the trainer has ended.

    Args:
        progress_fd: Descriptor of a file, shared with the trainer, in which the worker records
            which document it is reading.
    """
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries that print must not write into the pipe to the trainer
    with contextlib.suppress(BrokenPipeError):  # the trainer has ended
        for message in _read_batches(progress_fd):
            pickle.dump(message, out, pickle.HIGHEST_PROTOCOL)
            out.flush()
    os._exit(0)  # a normal exit would try to flush the broken pipe again


def _read_batches(progress_fd: int) -> Iterator[list[PackedSequence] | Exception]:
    """Yield the batches that this worker reads, until the data ends or reading fails.

    The last item is the exception that ended the loop, which the trainer raises.

    Args:
        progress_fd: Descriptor of a file, shared with the trainer, in which the worker records
            which document it is reading.
    """
    try:
        # The trainer sends the dataset and the worker's shard to standard input.
        data, shard = pickle.load(sys.stdin.buffer)
        reader = SequenceReader(data, shard, _map_progress(progress_fd))
        while True:
            yield reader.next_batch()
    except (UserError, OutOfData) as error:
        yield error
    except Exception:  # a bug, whose traceback would otherwise be lost
        yield WorkerError(f"A data worker failed:\n{traceback.format_exc()}")


def _map_progress(fd: int) -> memoryview:
    """Memory-map the progress file that is shared between a data worker and the trainer.

    Return a view of its three int64 numbers: the indices of the source, the part and the document
    that the worker is reading.
    """
    return memoryview(mmap.mmap(fd, PROGRESS_BYTES)).cast("q")


if __name__ == "__main__":
    serve_parent()
    main(int(sys.argv[1]))
