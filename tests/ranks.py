"""Real ranks at low cost: processes forked from a server that has imported torch and titanlite.

A rank serves one call, so changes to its process do not affect other tests.
"""

from __future__ import annotations

import faulthandler
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
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from small_runs import SMALL_WITHOUT_WORKERS

from titanlite.runtime.process import STORE, leave

if TYPE_CHECKING:
    from titanlite.hooks.hook import Hook
    from titanlite.train.trainer import Trainer

PRELOADED = [
    "titanlite.cli",
    "titanlite.train.trainer",
    "titanlite.load_run",
    "pytest",
    "torch._dynamo",
    "torch.distributed.pipelining",
    "torchao.float8",
]
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(PRELOADED)
PATIENCE = 20.0
"""Seconds that the other ranks have to end when one has failed."""
OPEN: list[World] = []
"""Worlds that no test has closed yet. A fixture closes them after a failed test."""


class RanksFailed(AssertionError):
    """A rank failed or timed out. The text contains the output of all ranks."""


class World:
    """`count` processes that run `body(*args)` with the environment variables of torchrun.

    Attributes:
        processes: The processes in the order of their ranks.
    """

    def __init__(self, count: int, body: Callable[..., Any], *args: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._output = Path(self._folder.name, "output")
        self._output.touch()
        self.processes = []
        for rank in range(count):
            environment = dict(os.environ)
            for prefix in ("", "LOCAL_"):
                environment[f"{prefix}RANK"] = str(rank)
                environment[f"{prefix}WORLD_SIZE"] = str(count)
            start = (environment, self._folder.name, body, args)
            process = SERVER.Process(target=_run, args=start)
            process.start()
            self.processes.append(process)
        OPEN.append(self)

    @property
    def output(self) -> str:
        """Output of all ranks so far."""
        return self._output.read_text(errors="replace")

    def wait_for(self, pattern: str, timeout: float = 120) -> None:
        """Wait until a rank has printed the regular expression `pattern`."""
        deadline = time.monotonic() + timeout
        is_running = True
        while not re.search(pattern, self.output):
            assert is_running, f"no rank printed {pattern!r}:\n{self.output}"
            has_time = time.monotonic() < deadline
            is_running = has_time and any(process.is_alive() for process in self.processes)
            time.sleep(0.02)

    def exits_within(self, seconds: float) -> bool:
        """Return whether all ranks end within `seconds`."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return all(process.exitcode is not None for process in self.processes)

    def wait(self, timeout: float = 240) -> list[int]:
        """Return the exit codes of the ranks.

        After a failure, the other ranks have PATIENCE seconds.

        Raises:
            RanksFailed: If a rank times out. The text contains its stack.
        """
        deadline = time.monotonic() + timeout
        running = self.processes
        while running and time.monotonic() < deadline:
            wait([process.sentinel for process in running], 0.1)
            running = [process for process in self.processes if process.is_alive()]
            if any(process.exitcode for process in self.processes):
                deadline = min(deadline, time.monotonic() + PATIENCE)
        late = [rank for rank, process in enumerate(self.processes) if process.exitcode is None]
        for rank in late:
            # On SIGABRT, faulthandler prints the stack.
            self.kill(rank, signal.SIGABRT)
            self.processes[rank].join(10)
        self.close()
        if late:
            raise RanksFailed(f"ranks {late} did not end in time\n{self.output}")
        return [process.exitcode for process in self.processes]  # type: ignore[misc]

    def results(self) -> list[Any]:
        """Return the results of `body` on all ranks."""
        return [
            pickle.loads(Path(self._folder.name, str(r)).read_bytes())
            for r in range(len(self.processes))
        ]

    def close(self) -> None:
        """Kill the remaining processes."""
        for process in self.processes:
            process.kill()
            process.join()
        OPEN[:] = [world for world in OPEN if world is not self]

    def wait_for_exit(self, code: int, timeout: float = 240) -> str:
        """Wait for all ranks, and return their output.

        Raises:
            RanksFailed: If a rank exits with another code than `code` or times out.
        """
        codes = self.wait(timeout)
        if codes != [code] * len(codes):
            raise RanksFailed(f"exit codes of the ranks: {codes}\n{self.output}")
        return self.output

    def kill(self, rank: int, number: int) -> None:
        """Send the signal `number` to a rank."""
        os.kill(self.processes[rank].pid or 0, number)


def run_ranks(
    count: int, function: Callable[..., Any], *args: Any, timeout: float = 240
) -> list[Any]:
    """Call `function(*args)` on `count` ranks of a new gloo process group, and return all results.

    Raises:
        RanksFailed: If a rank raises an error, dies, or takes more than `timeout` seconds.
    """
    world = World(count, _in_a_group, function, args)
    world.wait_for_exit(0, timeout)
    return world.results()


def start_titanlite(
    *options: object, ranks: int = 1, before: Callable[[], None] | None = None
) -> World:
    """Start `titanlite OPTIONS` on each rank like the launcher, after calling `before` there."""
    return World(ranks, _command, list(map(str, options)), before)


def titanlite(*options: object, ranks: int = 1, code: int = 0) -> str:
    """Run `titanlite OPTIONS` on each rank, check the exit codes, and return the output."""
    return start_titanlite(*options, ranks=ranks).wait_for_exit(code)


def write_small_job(file: Path, out: Path, options: Sequence[object]) -> list[str]:
    """Write the small job to `file`, and return the words of a command line.

    The words select the job and the output folder `out`, and contain `options`. Ranks read the data
    themselves, without data workers. Strings are split at spaces: "--training.steps 4" is an option
    and its value.
    """
    file.write_text(SMALL_WITHOUT_WORKERS)
    words = ["--job.config_file", str(file), "--job.dump_folder", str(out)]
    for option in options:
        words += option.split() if isinstance(option, str) else [str(option)]
    return words


def start_small(
    out: Path,
    *options: object,
    command: str = "train",
    ranks: int = 1,
    before: Callable[[], None] | None = None,
) -> World:
    """Start `titanlite COMMAND` on each rank, like the launcher, with the small job.

    `out` is the output folder. See `write_small_job` for `options`.
    """
    words = write_small_job(out.with_suffix(".toml"), out, options)
    return start_titanlite(command, *words, ranks=ranks, before=before)


def run_small(out: Path, *options: object, ranks: int = 1, code: int = 0, **keys: Any) -> str:
    """Run a command like `start_small`, check the exit codes, and return what it has printed."""
    return start_small(out, *options, ranks=ranks, **keys).wait_for_exit(code)


def small_trainer(folder: str | Path, hooks: Hook | list[Hook], *options: object) -> Trainer:
    """Return a trainer of the small job with additional hooks.

    The output folder is "out" in `folder`. See `write_small_job` for `options`.
    """
    import torch

    from titanlite.load_run import load_run
    from titanlite.train.trainer import Trainer

    job = Path(folder, f"{os.environ['RANK']}.toml")
    job.parent.mkdir(parents=True, exist_ok=True)
    words = write_small_job(job, job.with_name("out"), options)
    run = load_run(words, int(os.environ["WORLD_SIZE"]))
    hooks = hooks if isinstance(hooks, list) else [hooks]
    return Trainer(run, torch.device("cpu"), hooks)


def train_small(folder: str | Path, hooks: Hook | list[Hook], *options: object) -> Trainer:
    """Train like `small_trainer` to the end, and return the closed trainer."""
    with small_trainer(folder, hooks, *options) as trainer:
        trainer.train()
    return trainer


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def descendants(pid: int) -> list[int]:
    """Return the IDs of a process and all its descendants."""
    command = ["pgrep", "-P", str(pid)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    pids = [pid]
    for child in done.stdout.split():
        pids += descendants(int(child))
    return pids


def _run(
    environment: dict[str, str],
    folder: str,
    body: Callable[..., Any],
    args: Any,
) -> None:
    """Run `body` in a new rank process."""
    output = os.open(f"{folder}/output", os.O_WRONLY | os.O_APPEND)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(output, descriptor)
        setattr(sys, name, os.fdopen(descriptor, "w", buffering=1, closefd=False))
    os.environ.clear()
    os.environ.update(environment)
    faulthandler.enable()
    # A garbage collection would touch, and so copy, all pages that are shared with the server.
    gc.freeze()
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

    rank = int(os.environ["RANK"])
    world_size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    result = function(*args)
    dist.barrier()
    dist.destroy_process_group()
    return result


def _command(
    options: list[str],
    before: Callable[[], None] | None,
    store: Path,
) -> None:
    from titanlite import cli

    os.environ[STORE] = str(store)
    if before is not None:
        before()
    sys.exit(cli.main(options))
