"""Real ranks at little cost: processes that are forked from a server, which has imported torch and titanlite once.

A rank lives for one call. What a test does to its process (environment, compiler, open files) reaches no other test.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import multiprocessing
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from small_runs import SMALL

from titanlite.runtime.process import STORE, leave

if TYPE_CHECKING:
    from titanlite.hooks.hook import Hook
    from titanlite.train.loop import Trainer

PRELOADED = [
    *("titanlite.cli", "titanlite.train.loop", "titanlite.load_run", "pytest"),
    *("torch._dynamo", "torch.distributed.pipelining", "torchao.float8"),
]
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(PRELOADED)
PATIENCE = 20.0  # seconds that the other ranks have to end when one has failed
OPEN: list[World] = []  # those that no test has closed yet, which the next test would find among its processes


class RanksFailed(AssertionError):
    """Some rank failed, or did not end in time. The text holds what all ranks printed, tracebacks included."""


class World:
    """`count` processes that run `body(*args)`, with the variables that torchrun would set for them.

    Attributes:
        processes: in order of rank.
    """

    def __init__(self, count: int, body: Callable[..., Any], *args: Any) -> None:
        self._lock = _one_world_at_a_time() if count > 1 else contextlib.nullcontext()
        self._lock.__enter__()
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._output = Path(self._folder.name, "output")
        self._output.touch()
        self.processes = []
        for rank in range(count):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
            environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
            start = (environment, self._folder.name, body, args)
            self.processes.append(SERVER.Process(target=_run, args=start))
            self.processes[-1].start()
        OPEN.append(self)

    @property
    def said(self) -> str:
        """What all ranks have printed so far, to standard output and standard error."""
        return self._output.read_text(errors="replace")

    def wait_for(self, pattern: str, timeout: float = 120) -> None:
        """Until some rank has printed `pattern`, a regular expression."""
        deadline, running = time.monotonic() + timeout, True
        while not re.search(pattern, self.said):
            assert running, f"nobody said {pattern!r}:\n{self.said}"
            running = time.monotonic() < deadline and any(process.is_alive() for process in self.processes)
            time.sleep(0.02)

    def ended(self, seconds: float) -> bool:
        """Whether all ranks end within so many seconds from now."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return all(process.exitcode is not None for process in self.processes)

    def wait(self, timeout: float = 240) -> list[int]:
        """The exit codes of the ranks, in order. Once a rank has failed the others have PATIENCE seconds.

        Raises:
            RanksFailed: Some rank did not end in time. The text says where it was.
        """
        deadline = time.monotonic() + timeout
        while (
            running := [process for process in self.processes if process.is_alive()]
        ) and time.monotonic() < deadline:
            if any(process.exitcode for process in self.processes):
                deadline = min(deadline, time.monotonic() + PATIENCE)
            wait([process.sentinel for process in running], 0.1)
        late = [rank for rank, process in enumerate(self.processes) if process.exitcode is None]
        for rank in late:
            self.kill(rank, signal.SIGABRT)  # it says where it is
            self.processes[rank].join(10)
        self.close()
        if late:
            raise RanksFailed(f"ranks {late} did not end in time\n{self.said}")
        return [process.exitcode for process in self.processes]  # type: ignore[misc]

    def results(self) -> list[Any]:
        """What `body` returned on each rank, once all have ended well."""
        return [pickle.loads(Path(self._folder.name, str(r)).read_bytes()) for r in range(len(self.processes))]

    def close(self) -> None:
        """Kill what still runs."""
        for process in self.processes:
            process.kill()
            process.join()
        self._lock.__exit__(None, None, None)
        OPEN[:] = [world for world in OPEN if world is not self]

    def ends_with(self, code: int, timeout: float = 240) -> str:
        """Wait for the end of all ranks; what they said.

        Raises:
            RanksFailed: A rank ended with another exit code than `code`, or not in time.
        """
        codes = self.wait(timeout)
        if codes != [code] * len(codes):
            raise RanksFailed(f"exit codes of the ranks: {codes}\n{self.said}")
        return self.said

    def kill(self, rank: int, number: int) -> None:
        """Send the signal `number` to a rank."""
        os.kill(self.processes[rank].pid or 0, number)


def run_ranks(count: int, function: Callable[..., Any], *args: Any, timeout: float = 240) -> list[Any]:
    """Call `function(*args)` on `count` ranks with a gloo process group of their own; what it returns, in order.

    Raises:
        RanksFailed: A rank raised something, died, or did not end in `timeout` seconds.
    """
    world = World(count, _in_a_group, function, args)
    world.ends_with(0, timeout)
    return world.results()


def start_titanlite(*words: object, ranks: int = 1, before: Callable[[], None] | None = None) -> World:
    """`titanlite WORDS`, as the launcher runs it on each rank; `before` is called first in each of them."""
    return World(ranks, _command, list(map(str, words)), before)


def titanlite(*words: object, ranks: int = 1, code: int = 0) -> str:
    """Run `titanlite WORDS` on each rank, until all have ended with `code`; what they said."""
    return start_titanlite(*words, ranks=ranks).ends_with(code)


def start_small(out: Path, *words: object, ranks: int = 1, before: Callable[[], None] | None = None) -> World:
    """`titanlite train` of the small job, whose output folder is `out`."""
    job = out.with_suffix(".toml")
    job.write_text(SMALL)
    words = ("train", "--job.config_file", job, "--job.dump_folder", out, *words)
    return start_titanlite(*words, ranks=ranks, before=before)


def small_trainer(folder: str, hook: Hook, *words: str) -> Trainer:
    """That job's trainer with a hook more, on the rank that calls; its output folder is `out`."""
    import torch

    from titanlite.load_run import load_run
    from titanlite.train.loop import Trainer

    job = Path(folder, f"{os.environ['RANK']}.toml")
    job.parent.mkdir(exist_ok=True)
    job.write_text(SMALL)
    words = ("--job.config_file", str(job), "--job.dump_folder", f"{folder}/out", *words)
    return Trainer(load_run(words, int(os.environ["WORLD_SIZE"])), torch.device("cpu"), [hook])


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def descendants(pid: int) -> list[int]:
    """A process, its children and theirs."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout
    return [pid, *(descendant for child in found.split() for descendant in descendants(int(child)))]


@contextlib.contextmanager
def _one_world_at_a_time() -> Iterator[None]:
    """Workers of pytest-xdist take turns: more ranks than cores would only slow one another down."""
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if session is None:
        yield
        return
    with Path(tempfile.gettempdir(), f"ranks-{session}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _run(environment: dict[str, str], folder: str, body: Callable[..., Any], args: Any) -> None:
    """The life of a rank."""
    output = os.open(f"{folder}/output", os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1, closefd=False) for stream in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    faulthandler.enable()
    gc.freeze()  # a collection would look at, and so copy, all that the server had loaded
    code = 1
    try:
        result = body(*args, store=Path(folder, "store"))
        Path(folder, environment["RANK"]).write_bytes(pickle.dumps(result))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    leave(code)


def _in_a_group(function: Callable[..., Any], args: Sequence[Any], store: Path) -> Any:
    import torch.distributed as dist

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    result = function(*args)
    dist.barrier()
    dist.destroy_process_group()
    return result


def _command(words: list[str], before: Callable[[], None] | None, store: Path) -> None:
    from titanlite import cli

    os.environ[STORE] = str(store)
    if before is not None:
        before()
    sys.exit(cli.main(words))
