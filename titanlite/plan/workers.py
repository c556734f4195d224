"""Start processes that trace jobs in parallel."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context

from titanlite.config.errors import UserError
from titanlite.runtime.process import PARENT, serve_parent

NUM_WORKERS = 2


@contextmanager
def workers() -> Iterator[Executor]:
    """Fork a process pool that traces jobs, and stop it on exit.

    Import the planner before you enter this context, so that the forked processes need not import
    it again. They print only to standard error, and exit when this process exits, even if it is
    killed.

    Yields:
        The pool. Its `map` method runs traces in parallel.

    Raises:
        UserError: If one of the processes was killed, probably for lack of memory.
    """
    pool = ProcessPoolExecutor(
        NUM_WORKERS,
        mp_context=get_context("fork"),
        initializer=_set_up_worker,
        initargs=(os.getpid(),),
    )
    try:
        yield pool
    except BrokenExecutor:
        _kill_child_processes()
        raise UserError(
            "A process of the plan was killed, probably because this node is out of memory. "
            "Free memory, or plan on another node."
        ) from None
    except BaseException:  # including Ctrl-C
        _kill_child_processes()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _kill_child_processes() -> None:
    """Kill all child processes, so that the pool does not wait for their traces.

    The wait might never end: if a process was killed while it took a task, it still holds the lock
    of the task queue, and the other processes wait for this lock.
    """
    for process in active_children():  # all belong to the pool
        process.kill()


def _set_up_worker(parent: int) -> None:
    """Set up a worker process to exit with its parent, print to stderr, and log no warnings.

    Args:
        parent: Process ID of the parent.
    """
    # Exclude all imported modules from garbage collection, which runs in each trace.
    gc.freeze()
    os.environ[PARENT] = str(parent)
    serve_parent()
    os.dup2(2, 1)
    logging.disable(logging.WARNING)  # libraries warn about things that only affect a real run
