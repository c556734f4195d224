"""Starts and stops the workers of one node, and starts them again after a crash.

With one node the workers meet through a file in the run's private folder. All their sockets are on the loopback
interface, so that no other machine can reach them. With several nodes, the host tells which nodes are there.

Invariant: a signal reaches each worker once, and the worker has the time that it needs to save. No worker outlives the
launcher: this module kills the workers before it returns, and they stop by themselves if the launcher is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from titanlite.config.errors import StoppedBySignal, UserError, printable
from titanlite.launch.messages import Closed, Failed, Start
from titanlite.launch.node import News, Node
from titanlite.launch.private_folder import private_folder
from titanlite.launch.verdict import KNOWN_EXITS, UNSAVED_STOPS, End, explain, explain_hang
from titanlite.launch.workers import POLL_SECONDS, Workers
from titanlite.runtime.events import Kind
from titanlite.runtime.logging import LOG_FILE, note_end
from titanlite.runtime.network import address_towards, interface_of, loopback_interface
from titanlite.runtime.process import STOP_SIGNALS, STORE

# Seconds that the other ranks have after one has crashed. They wait for it until a collective fails or times out.
CRASH_PATIENCE = 5.0
KNOWN_EXIT_PATIENCE = 30.0
ROLL_CALL_SECONDS = 30.0  # to learn whether a node was lost; a little more than the host needs to notice it
MEET_SECONDS = 900.0  # for all nodes to come, also for lost ones to come back
SAY_AFTER = 10.0  # seconds of waiting for nodes before a line says so


@dataclass(frozen=True)
class World:
    """The processes of a run: `workers` on each of `nodes`. Without `node_rank` the host numbers the nodes."""

    workers: int
    nodes: int = 1
    node_rank: int | None = None
    master_addr: str = "localhost"
    master_port: int = 29500
    shown_ranks: tuple[int, ...] = (0,)
    stop_seconds: float = 3600.0  # seconds that the workers have to save after a signal
    max_restarts: int = 0  # number of restarts after crashes, from the newest checkpoint
    min_nodes: int | None = None  # the run goes on with this many if machines are lost; None: with all only
    meet_seconds: float = MEET_SECONDS


@dataclass(frozen=True)
class Saved:
    """What a user or a scheduler must know about a run that ended early.

    Attributes:
        exists: whether there is a checkpoint to continue from.
        how_to_go_on: the last lines of the output, if the workers ended without printing them.
    """

    exists: Callable[[], bool] = lambda: False
    how_to_go_on: Callable[[], str] = str


def run_workers(command: Sequence[str], world: World, saved: Saved | None = None) -> int:
    """Run `python -u COMMAND` for each worker of this node, print why the run ended, and return the exit code.

    The program must first call `titanlite.runtime.process.begin`, because it starts with all signals blocked.

    Raises:
        UserError: the nodes did not find each other.
    """
    with private_folder() as (folder, lock):
        workers = Workers(command, world.shown_ranks, folder, lock)
        return Agent(workers, world, saved or Saved(), folder).run()


class _Over(Exception):
    """The run has ended while there were no workers. Has its exit code and the reason to print."""

    def __init__(self, code: int, reason: str = "") -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


class Agent:
    """Starts and watches the workers of this node until the run ends.

    Args:
        folder: private folder of this run, in which the workers write why they ended.
    """

    def __init__(self, workers: Workers, world: World, saved: Saved, folder: Path) -> None:
        self._workers, self._world, self._saved, self._folder = workers, world, saved, folder
        least = world.nodes if world.min_nodes is None else world.min_nodes
        self._node: Node | None = None
        if world.nodes > 1:
            self._node = Node(world.master_addr, world.master_port, world.node_rank, least, world.nodes, world.workers)
        self._generation = 0
        self._restarts = world.max_restarts  # number that is left
        self._signal: int | None = None  # the first signal that stops the run
        self._at_once = False  # after a second Ctrl-C
        self._news = News()  # from other nodes

    def run(self) -> int:
        """Start the workers, and start them again after each crash if restarts are left. Returns the exit code.

        Raises:
            UserError: the nodes cannot meet.
        """
        before, code = self._take_signals(), 1
        try:
            while (ended := self._run_generation()) is None:
                pass
            code = ended
        except _Over as end:
            self._say_end(end.reason)
            code = end.code
        except UserError as error:
            code = error.exit_code
            raise
        finally:
            self._workers.kill()
            if self._node is not None:
                self._node.leave(code)
            for number, handler in before.items():
                signal.signal(number, handler)
        return code

    def _run_generation(self) -> int | None:
        """Meet the other nodes, start the workers and watch them. Returns the exit code, or None to start again."""
        self._start(self._meet())
        self._generation += 1
        makes_room = False
        while self._workers.running():
            time.sleep(POLL_SECONDS)
            self._hear()
            if self._news.another_joined and not makes_room:
                makes_room = True
                _say("Another node has joined: saving, and starting again with it.")
                self._workers.send(signal.SIGTERM)
            self._end_the_late()
        return self._judge()

    # ------------------------------------------------------------------------------------------------------- nodes

    def _meet(self) -> Start:
        """Wait for the nodes of a generation.

        Raises:
            UserError: the nodes did not meet in time, or do not belong to one run.
            _Over: a signal came, another node has ended the run, or a node is lost and does not come back.
        """
        node, self._news.started, self._news.spare = self._node, None, False
        began, joined, said, why = time.monotonic(), False, False, "too few have come"
        if node is None:
            return Start(node=0, nodes=1, port=0)
        while self._signal is None:
            if not node.connected and self._generation == 0:
                if self._news.spare:  # the run has ended, or its first node will be started again
                    self._news.spare, began = False, time.monotonic()
                joined = False  # also if the host was lost before the run began
                try:
                    node.connect()
                except OSError as error:  # the host starts later, or its name cannot be resolved yet
                    why = error.strerror or str(error)
            if node.connected and not joined:
                joined, why = True, "too few have come"
                node.join()
            self._hear()
            if self._news.started is not None:
                return self._news.started
            if self._news.closed is not None:
                raise self._end_elsewhere(self._news.closed)
            waited = time.monotonic() - began
            if (self._generation > 0 and not node.connected) or (
                waited > self._world.meet_seconds and not self._news.spare
            ):
                raise self._missing(why)
            if (waited > SAY_AFTER or self._news.spare) and not said:
                said = True
                why = "the run has them all, and this one waits until it is needed" if self._news.spare else why
                _say(f"Waiting for {self._world.nodes} nodes at {node.where}: {why}.")
            time.sleep(POLL_SECONDS if node.connected else 1.0)
        raise self._end_by_signal()

    def _missing(self, why: str) -> Exception:
        """The exception for nodes that did not come in time."""
        assert self._node is not None
        if self._generation > 0:
            return self._end_of_lost()
        return UserError(
            f"{self._world.nodes} nodes did not meet at {self._node.where}: {why}. The same values, and "
            f"NNODES={self._world.nodes}, must be set on every node."
        )

    def _end_of_lost(self) -> _Over:
        """The end of a run that cannot go on because a node is lost."""
        return self._end_between(f"Lost: {', '.join(self._news.lost) or 'a node that did not come back'}.", 1)

    def _end_by_signal(self) -> _Over:
        """The end by a signal that came while there were no workers."""
        assert self._signal is not None
        again = " again" if self._generation > 0 else ""
        reason = f"Stopped by {signal.Signals(self._signal).name} before the workers were started{again}."
        return self._end_between(reason, 128 + self._signal)

    def _end_between(self, reason: str, code: int) -> _Over:
        """The end after an attempt that failed. If there is a checkpoint, a later start can continue."""
        if self._generation == 0:
            return _Over(code, reason)
        code = StoppedBySignal.exit_code if self._saved.exists() else code
        return _Over(code, _lines(reason, self._saved.how_to_go_on()))

    def _end_elsewhere(self, closed: Closed) -> Exception:
        """The exception if another node has ended the run before this one could start its workers."""
        if closed.reason:
            return UserError(f"The nodes do not belong together: {closed.reason}.")
        if closed.code == 0 and self._generation == 0:
            return _Over(0, f"{closed.name} has ended the run with exit code 0; this node was not needed.")
        return _Over(closed.code or 1, _ended_by(closed))

    def _hear(self) -> None:
        """Read the messages of other nodes since the last call."""
        if self._node is not None:
            self._news.note(self._node.hear())

    def _learn_of_losses(self) -> None:
        """Wait until every node has answered, or is known to be lost, or the run was ended."""
        if self._node is None:
            return
        self._news.all_present = False
        self._node.say(Failed())
        until = time.monotonic() + ROLL_CALL_SECONDS
        while time.monotonic() < until and self._signal is None:
            self._hear()
            if self._news.all_present or self._news.lost or self._news.closed is not None:
                return
            time.sleep(POLL_SECONDS)

    # ------------------------------------------------------------------------------------------------------- workers

    def _start(self, start: Start) -> None:
        """Start the workers of this node.

        Raises:
            UserError: the system refuses another process.
            _Over: a signal has come.
        """
        self._patience = self._deadline = float("inf")
        world, count = self._world, self._world.workers
        environment = {
            **self._meeting_place(start),
            "WORLD_SIZE": str(count * start.nodes),
            "LOCAL_WORLD_SIZE": str(count),
            "GROUP_RANK": str(start.node),
            "TORCHELASTIC_RESTART_COUNT": str(world.max_restarts - self._restarts),
        }
        listener = self._node.listener if self._node is not None else None
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGUSR2})
        try:
            if self._signal is not None:  # it came when there were no workers yet to forward it to
                raise self._end_by_signal()
            ranks = range(start.node * count, (start.node + 1) * count)
            self._workers.start(ranks, environment, None if listener is None else listener.fileno())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if self._node is not None:
            self._node.close_listener()  # the first worker has its own copy

    def _meeting_place(self, start: Start) -> dict[str, str]:
        """Environment variables that tell the workers where they meet, and on which interface."""
        if self._node is None:
            loopback = loopback_interface()  # it replaces a value that was set for runs on several machines
            interfaces = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": f"={loopback}"}
            file = self._folder / f"store-{self._generation}"
            return {STORE: str(file), **interfaces}
        address = self._world.master_addr
        place = {STORE: f"{address}:{start.port}", "MASTER_ADDR": address, "MASTER_PORT": str(start.port)}
        own_address = address_towards(address, start.port)
        interface = interface_of(own_address) if own_address is not None else None
        if interface is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
            place["GLOO_SOCKET_IFNAME"] = (
                interface  # otherwise gloo takes the address that belongs to this machine's name
            )
        return place

    def _end_the_late(self) -> None:
        """Kill the workers that have not ended in time after the first one ended."""
        bad = set(self._workers.codes.values()) - {0}
        elsewhere = self._news.closed.code if self._news.closed is not None else 0
        stopping = (
            self._signal is not None or self._news.another_joined or StoppedBySignal.exit_code in {*bad, elsewhere}
        )
        patience = float("inf")
        if bad.intersection(UNSAVED_STOPS) and stopping:  # the other ranks cannot save without those that ended
            patience = CRASH_PATIENCE
        elif bad.difference(KNOWN_EXITS) and stopping:
            patience = KNOWN_EXIT_PATIENCE
        elif stopping:
            patience = self._world.stop_seconds
        elif bad.intersection(KNOWN_EXITS) or elsewhere:
            patience = KNOWN_EXIT_PATIENCE
        elif bad or self._news.regroup is not None:
            patience = CRASH_PATIENCE
        if patience < self._patience:
            self._patience, self._deadline = patience, time.monotonic() + patience
        if self._at_once or time.monotonic() > self._deadline:
            self._workers.kill()

    # ------------------------------------------------------------------------------------------------------- ends

    def _judge(self) -> int | None:
        """The exit code of a run whose workers have ended, or None to start again. Prints why they ended."""
        ends = self._workers.failures()
        if not ends:
            return 0
        known = any(end.code in KNOWN_EXITS for end in ends)
        stopped = all(end.code in (StoppedBySignal.exit_code, *UNSAVED_STOPS) for end in ends)
        if self._news.another_joined and stopped and self._signal is None:
            return None
        text, code = explain(ends, self._signal, self._workers.killed)
        report = explain_hang(self._workers.hangs(), self._workers.killed)
        said = any(end.rank == 0 and end.message and end.message == ends[0].message for end in ends)
        if known or self._signal is not None:  # a restart would end in the same way
            self._say_end(text, report, self._closing(ends) if text or report else "", by_rank0=said)
            return code
        if self._news.regroup is not None and not self._news.regroup.joined:
            text = "Workers of another node failed; its output says why."
        if self._restarts > 0 and not self._news.ended_elsewhere:
            self._restarts -= 1
            self._say_end(text, report, by_rank0=said)
            again = f"Starting again from the newest checkpoint ({self._restarts} restarts left)."
            _say(again)
            self._note(again, "restart")
            return None
        self._learn_of_losses()
        if self._news.lost:
            _say(report)
            raise self._end_of_lost()
        if self._news.closed is not None and self._news.ended_elsewhere:
            text, code = _ended_by(self._news.closed), self._news.closed.code
        self._say_end(text, report, self._closing(ends), by_rank0=said)
        return code

    def _closing(self, ends: Sequence[End]) -> str:
        """How to continue the run, as a worker reported it. If the worker crashed after opening the run's folder, the
        launcher says it."""
        closing = next((end.closing for end in ends if end.closing), "")
        if not closing and ends[0].code not in KNOWN_EXITS and (self._folder / LOG_FILE).exists():
            closing = self._saved.how_to_go_on()
        return closing

    def _say_end(self, text: str, hang: str = "", closing: str = "", by_rank0: bool = False) -> None:
        """Print why the workers ended, and write to train.log what rank 0 has not written there (`by_rank0`)."""
        _say(text, hang, closing)
        if hang:
            self._note(hang, "hang")
        if (text or closing) and not by_rank0:
            self._note(_lines(text, closing), "failure" if self._signal is None else "stop")

    def _note(self, text: str, kind: Kind) -> None:
        with contextlib.suppress(OSError):  # no worker of this node has opened train.log
            note_end(text, kind, Path((self._folder / LOG_FILE).read_text(encoding="utf-8")))

    # ------------------------------------------------------------------------------------------------------- signals

    def _take_signals(self) -> dict[int, Any]:
        """Install the signal handlers. Returns the earlier ones."""
        before: dict[int, Any] = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGUSR2)}
        if before[signal.SIGHUP] == signal.SIG_IGN:  # started by nohup; workers inherit it
            del before[signal.SIGHUP]
        for number in before:
            signal.signal(number, self._receive)
        return before

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Signal handler."""
        if number == signal.SIGUSR2:  # save and go on
            self._workers.send(number)
        elif self._signal is None:
            self._signal = number
            if self._workers.running():
                self._workers.send(number)
                with contextlib.suppress(OSError):  # after SIGHUP the terminal is gone
                    os.write(2, b"\nStopping after this step and a save. Ctrl-C again stops at once, without saving.\n")
        elif number == signal.SIGINT:  # a second SIGTERM changes nothing, because schedulers repeat it and have SIGKILL
            self._at_once = True  # not killed here, because the interrupted code may hold a lock that killing needs


def _ended_by(closed: Closed) -> str:
    return f"{closed.name} has ended the run with exit code {closed.code}; its own output says why."


def _lines(*texts: str) -> str:
    return printable("\n".join(text for text in texts if text))  # because errors quote the content of files


def _say(*texts: str) -> None:
    if text := _lines(*texts):
        with contextlib.suppress(OSError):  # a terminal that is gone must not end the run
            print(text, file=sys.stderr, flush=True)
