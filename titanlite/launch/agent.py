"""The workers of one node under torch's elastic agent, and what is said about their end.

Invariant: a worker that stops for a known reason (an exit code of `titanlite.config.errors`) ends the launcher with
the same code and without a traceback; of a crash the root cause is printed first, and once. A signal reaches each
worker once, and the worker takes the time that it needs to save. May import torch, titanlite.runtime.hang_report and
titanlite.config.errors.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import LogsDest, SubprocessContext
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from titanlite.config.errors import ERROR_FOLDER, CheckpointError, GuardError, StoppedBySignal, UserError
from titanlite.observe.logger import note_end
from titanlite.observe.outputs import LOG_FILE
from titanlite.runtime.hang_report import address_towards

KNOWN_EXITS = tuple(error.exit_code for error in (UserError, GuardError, CheckpointError, StoppedBySignal))

POLL_SECONDS = 0.1
# Seconds for the other ranks, once one has ended. After a crash they wait in vain, at best until a collective fails.
CRASH_PATIENCE = 5.0
KNOWN_EXIT_PATIENCE = 30.0


@dataclass(frozen=True)
class World:
    """The processes of a run: `workers` on each of `nodes`. Without `node_rank` the nodes number themselves."""

    workers: int
    nodes: int = 1
    node_rank: int | None = None
    master_addr: str = "localhost"
    master_port: int = 29500
    shown_ranks: tuple[int, ...] = (0,)
    stop_seconds: float = 3600.0  # for the workers to save, once a signal has reached them
    max_restarts: int = 0  # after crashes, from the newest checkpoint
    min_nodes: int | None = None  # with so many the run goes on when machines are lost; None: with all
    how_to_go_on: Callable[[], str] = str  # the last lines after a crash of workers that could say none themselves


@dataclass(frozen=True)
class End:
    """How a worker ended: its exit code (minus the signal's number if one killed it), when, what it reported, and what
    it said last: how to go on."""

    rank: int
    code: int
    time: float
    message: str | None
    closing: str = ""


class _Logs(DefaultLogsSpecs):
    """Standard output of the shown ranks only; standard error of all. No pipes: a terminal stays a terminal."""

    def __init__(self, folder: str, shown: tuple[int, ...]) -> None:
        super().__init__(log_dir=folder)
        self._shown = shown

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        destination = super().reify(envs)
        for local_rank, env in envs.items():
            if int(env["RANK"]) not in self._shown:
                destination.stdouts[local_rank] = os.devnull
        return destination


class Agent(LocalElasticAgent):
    """Torch's agent, except that it forwards signals instead of killing, and lets workers finish after a known exit."""

    def __init__(self, spec: WorkerSpec, logs: DefaultLogsSpecs, stop_seconds: float, folder: Path) -> None:
        super().__init__(spec, logs)
        self._folder = folder  # where workers leave the reason of their end
        self._stop_seconds = stop_seconds
        self.signal: int | None = None  # the first one that was forwarded
        self.ends: dict[int, tuple[int, float]] = {}  # global rank -> exit code, time seen; in order
        self.killed: set[int] = set()  # ranks that we killed
        self._deadline: float | None = None
        self._waiting = False  # for other nodes, without workers

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._waiting = True
        if self.signal is not None:  # it came while the workers before were stopped
            self._forward(self.signal, None)
        super()._rendezvous(worker_group)  # type: ignore[call-arg]  # untyped decorator

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.ends, self.killed, self._deadline = {}, set(), None
        for file in self._folder.glob("*.json"):
            file.unlink()
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # workers inherit it until they have something to save
        ignores_hangup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # nohup
        # Installs handlers that raise: ours below replace them.
        ids = super()._start_workers(worker_group)  # type: ignore[call-arg]  # untyped decorator
        signal.signal(signal.SIGINT, self._forward)
        signal.signal(signal.SIGTERM, self._forward)
        signal.signal(signal.SIGUSR1, self._forward)
        signal.signal(signal.SIGUSR2, self._forward)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignores_hangup else self._forward)
        self._waiting = False
        return ids

    def _running(self) -> dict[int, Any]:
        """Global rank -> Popen of each worker that has not ended; notes the ends."""
        assert isinstance(self._pcontext, SubprocessContext)
        running = {}
        for worker in self._worker_group.workers:
            process = self._pcontext.subprocess_handlers[worker.local_rank].proc
            code = process.poll()
            if code is None:
                running[worker.global_rank] = process
            else:
                self.ends.setdefault(worker.global_rank, (code, time.time()))
        return running

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Signal handler. Workers have a session of their own, so that Ctrl-C reaches them through here alone."""
        if self._waiting and number != signal.SIGUSR2:
            raise SignalException("stopped between two generations of workers", signal.Signals(number))
        if number == signal.SIGUSR2:  # save and go on
            for process in self._running().values():
                process.send_signal(number)
        elif self.signal is None:
            self.signal = number
            for process in self._running().values():
                process.send_signal(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
            with contextlib.suppress(OSError):  # after SIGHUP there is no terminal
                os.write(2, b"\nStopping after this step and a save. Ctrl-C again stops at once, without saving.\n")
        elif number == signal.SIGINT:  # a second SIGTERM is a scheduler's impatience: it has SIGKILL for that
            self._kill()

    def _kill(self) -> None:
        for rank, process in self._running().items():
            self.killed.add(rank)
            os.killpg(process.pid, signal.SIGKILL)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        running = self._running()
        bad = [code for code, _ in self.ends.values() if code != 0]
        if running and (bad or self.signal is not None):
            now = time.monotonic()
            if self._deadline is None:
                patience = KNOWN_EXIT_PATIENCE if any(code in KNOWN_EXITS for code in bad) else CRASH_PATIENCE
                stopping = self.signal is not None or StoppedBySignal.exit_code in bad
                self._deadline = now + (self._stop_seconds if stopping else patience)
            if now < self._deadline:
                return RunResult(state=WorkerState.HEALTHY)
            self._kill()
        result: RunResult = super()._monitor_workers(worker_group)  # type: ignore[call-arg]  # untyped decorator
        if result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY):
            ends = _ends(self, self._folder)
            if self.signal is not None or any(end.code in KNOWN_EXITS for end in ends):
                self._remaining_restarts = 0  # it would end in the same way again
            if self._remaining_restarts > 0:
                left = self._remaining_restarts - 1
                _say_end(_why(ends, self, self._folder), ends, self._folder)
                _say(f"Starting again from the newest checkpoint ({left} restarts left).")
        return result

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float = 0) -> None:
        """Stop running workers, for a node that joins, say: they take the time that they need to save."""
        super()._shutdown(death_sig, int(self._stop_seconds))


def run_workers(command: Sequence[str], world: World) -> int:
    """Run `python -u COMMAND` once for each worker of this node, print why it ended, and return the exit code.

    Raises:
        UserError: the nodes did not find each other, or another one ended the run.
    """
    with tempfile.TemporaryDirectory(prefix="titanlite-") as folder:
        os.environ[ERROR_FOLDER] = folder
        parameters = _rendezvous(world)
        if parameters.backend == "c10d":  # a new store for each start: in a shared one the addresses of the dead remain
            os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        agent = Agent(
            WorkerSpec(
                role="trainer",
                local_world_size=world.workers,
                rdzv_handler=get_rendezvous_handler(parameters),
                entrypoint=sys.executable,
                args=tuple(command),
                max_restarts=world.max_restarts,
                monitor_interval=POLL_SECONDS,
                master_addr=world.master_addr if parameters.backend == "static" else None,
                master_port=world.master_port if parameters.backend == "static" else None,
                local_addr=parameters.local_addr,
            ),
            _Logs(folder, world.shown_ranks),
            world.stop_seconds,
            Path(folder),
        )
        try:
            result: Any = agent.run()
        except SignalException as stopped:  # while there were no workers
            return 128 + stopped.sigval
        except RendezvousClosedError:
            raise UserError("Another node has ended the run; its own output says why.") from None
        except (RendezvousConnectionError, RendezvousTimeoutError) as error:
            where = f"MASTER_ADDR={world.master_addr}, MASTER_PORT={world.master_port}"
            text = f"{world.nodes} nodes did not meet at {where}: {error}."
            raise UserError(f"{text} The same values, and NNODES={world.nodes}, must be set on every node.") from None
        finally:
            agent._worker_group.spec.rdzv_handler.shutdown()
        if not result.is_failed():
            return 0
        ends = _ends(agent, Path(folder))
        if text := _why(ends, agent, Path(folder)):
            closing = next((end.closing for end in ends if end.closing), "")
            if not closing and ends[0].code not in KNOWN_EXITS and Path(folder, LOG_FILE).exists():
                closing = world.how_to_go_on()
            _say_end("\n".join(filter(None, (text, closing))), ends, Path(folder))
        return explain(ends, agent.signal, agent.killed)[1]


def _say_end(text: str, ends: Sequence[End], folder: Path) -> None:
    """Why the workers ended: on the terminal, and in train.log, unless rank 0 has written that there itself."""
    _say(text)
    if text and not any(end.rank == 0 and end.message and end.message == ends[0].message for end in ends):
        with contextlib.suppress(OSError):  # no worker of this node had opened it
            note_end(text, Path((folder / LOG_FILE).read_text(encoding="utf-8")))


def _say(text: str) -> None:
    with contextlib.suppress(OSError):  # a terminal that is gone must not end the run
        print(text, file=sys.stderr, flush=True)


def _rendezvous(world: World) -> RendezvousParameters:
    if world.nodes == 1:  # "localhost" rather than a look-up of this machine's name, which can take seconds
        return RendezvousParameters("c10d", "localhost:0", f"titanlite-{os.getpid()}", 1, 1, local_addr="localhost")
    least = world.nodes if world.min_nodes is None else world.min_nodes
    numbered, fixed = world.node_rank is not None, world.max_restarts == 0 and least == world.nodes
    backend = "static" if numbered and fixed else "c10d"  # machines can only meet again where they number themselves
    options: dict[str, Any] = {"timeout": 900, "last_call_timeout": 15}  # for lost machines to come back; 15 s
    if numbered:
        options |= {"rank": world.node_rank} if fixed else {"is_host": world.node_rank == 0}
    endpoint = f"{world.master_addr}:{world.master_port}"
    here = address_towards(world.master_addr, world.master_port)
    return RendezvousParameters(backend, endpoint, "titanlite", least, world.nodes, local_addr=here, **options)


def _ends(agent: Agent, folder: Path) -> list[End]:
    """The workers that did not end with 0, the first one first."""
    agent._running()
    ends = []
    for rank, (code, seen) in agent.ends.items():
        try:
            record = json.loads((folder / f"{rank}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):  # it said nothing, or had no space to; seen up to two polls late
            record = {"time": seen - 2 * POLL_SECONDS, "message": None, "closing": ""}
        if code != 0:
            ends.append(End(rank, code, record["time"], record["message"], record["closing"]))
    return sorted(ends, key=lambda end: (end.rank in agent.killed, end.time))


def _why(ends: Sequence[End], agent: Agent, folder: Path) -> str:
    """All that is known about the end of the workers."""
    hangs = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.hang.json"))]
    return "\n".join(
        text for text in (explain(ends, agent.signal, agent.killed)[0], explain_hang(hangs, agent.killed)) if text
    )


def explain_hang(hangs: Sequence[dict[str, Any]], killed: set[int]) -> str:
    """Which rank was late, and in what the others waited for it.

    Args:
        hangs: What `titanlite.runtime.hang_report.HangWatch` wrote for each rank of this machine.
        killed: Ranks that did not end by themselves.
    """
    if not hangs:
        return ""
    reached: dict[str, int] = {}  # process group -> number of the last collective that any rank has joined
    for hang in hangs:
        for group, (number, _) in hang["collectives"].items():
            reached[group] = max(number, reached.get(group, 0))
    silent = killed - {hang["rank"] for hang in hangs}
    lines = [f"Rank {rank} is LATE: its process was stopped, or hangs outside of Python." for rank in sorted(silent)]
    here = {hang["rank"] for hang in hangs} | silent
    elsewhere = [f"{rank} ({host})" for rank, host in enumerate(hangs[0]["hosts"]) if rank not in here]
    waiting = []
    for hang in hangs:
        behind = [group for group, (number, _) in hang["collectives"].items() if number < reached[group]]
        who = f"Rank {hang['rank']} ({hang['host']}), step {hang['step']}, "
        last = list(hang["collectives"].values())[-1:] or [(0, "none")]
        if behind:
            number, name = hang["collectives"][behind[0]]
            lines.insert(
                0,
                f"{who}is LATE: after {name} number {number} it did not join the next one. It is at "
                f"{hang['line']}\n    inside of {hang['inside']}",
            )
        else:
            number, name = last[0]
            waiting.append(f"{who}waits in {name} number {number}, at {hang['line']}")
    if not lines and elsewhere:
        lines = [f"No rank of this machine is late. Gone, or late: rank {', '.join(elsewhere)}."]
    return "\n".join(lines + waiting)


def explain(ends: Sequence[End], stopped_by: int | None, killed: set[int]) -> tuple[str, int]:
    """What to print about ended workers, and the exit code of the launcher.

    Args:
        ends: Those that did not end with 0, in order of time, at least one.
        stopped_by: Number of the signal that was forwarded to them, if one was.
        killed: Ranks that the launcher killed.
    """
    known = [end for end in ends if end.code in KNOWN_EXITS]
    if known:
        code = known[0].code
        texts: dict[str, list[int]] = {}  # equal messages of many ranks are printed once
        for end in known:
            if end.message:
                texts.setdefault(end.message, []).append(end.rank)
        lines = list(texts) if len(texts) == 1 else [f"[{_ranks(ranks)}] {text}" for text, ranks in texts.items()]
        return "\n".join([*lines, *(_short(end, killed) for end in ends if end.code not in KNOWN_EXITS)]), code
    # A stop before there was anything to save.
    quiet = (130, *(-number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL)))
    if stopped_by is not None and all(end.code in quiet for end in ends):
        return "", 128 + stopped_by
    root, *others = ends
    lines = [f"Rank {root.rank} failed first: {_how(root)}", (root.message or "").rstrip()]
    lines += [_short(end, killed) for end in others]
    return "\n".join(line for line in lines if line), root.code if root.code > 0 else 128 - root.code


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def _how(end: End) -> str:
    if end.code == -signal.SIGKILL:
        return "it was killed (SIGKILL). The system does that when memory runs out."
    return f"it ended with {f'exit code {end.code}' if end.code > 0 else signal.Signals(-end.code).name}."


def _short(end: End, killed: set[int]) -> str:
    if end.rank in killed:
        return f"Then rank {end.rank} did not end by itself and was killed."
    last_line = (end.message or "").rstrip().rpartition("\n")[2]
    return f"Then rank {end.rank} failed: {last_line or _how(end)}"
