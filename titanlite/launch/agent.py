"""The workers of one node: started, stopped, started again after a crash, and never left alone.

With one node the workers meet by a file in the run's private folder, and all their sockets are on the loopback
interface, so that no other machine can reach anything. With several, `titanlite.launch.rendezvous` says who is there.

Invariant: a signal reaches each worker once, and the worker takes the time that it needs to save. No worker outlives
the launcher: it is killed on the way out of here, and stops by itself when the launcher was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from titanlite.config.errors import ERROR_FOLDER, StoppedBySignal, UserError, printable
from titanlite.launch.rendezvous import Closed, Failed, Lost, Message, Node, Present, Regroup, Start
from titanlite.launch.verdict import KNOWN_EXITS, STOP_SIGNALS, UNSAVED_STOPS, End, explain, explain_hang
from titanlite.runtime.logging import LOG_FILE, note_end
from titanlite.runtime.network import address_towards, interface_of, loopback_interface
from titanlite.runtime.process import LAUNCHER, LISTENER, STORE

POLL_SECONDS = 0.1
# Seconds for the other ranks, once one has ended. After a crash they wait in vain, at best until a collective fails.
CRASH_PATIENCE = 5.0
KNOWN_EXIT_PATIENCE = 30.0
ROLL_CALL_SECONDS = 30.0  # to learn whether a node was lost: a little more than the rendezvous needs to miss one
MEET_SECONDS = 900.0  # for all nodes to come, also for lost ones to come back
SAY_AFTER = 10.0  # seconds of waiting for nodes

PREFIX = "titanlite-run-"  # of the private folders
_OTHER_ENDED = "{0.name} has ended the run with exit code {0.code}; its own output says why."


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
    meet_seconds: float = MEET_SECONDS


@dataclass(frozen=True)
class Saved:
    """What a person, or a scheduler, has to know of a run that ended early.

    Attributes:
        exists: whether there is a checkpoint to go on from.
        how_to_go_on: the last lines after the end of workers that could say none themselves.
    """

    exists: Callable[[], bool] = lambda: False
    how_to_go_on: Callable[[], str] = str


def run_workers(command: Sequence[str], world: World, saved: Saved | None = None) -> int:
    """Run `python -u COMMAND` once for each worker of this node, print why it ended, and return the exit code.

    The program must call `titanlite.runtime.process.begin` first: it starts with all signals blocked.

    Raises:
        UserError: the nodes did not find each other.
    """
    with _private_folder() as (folder, lock):
        return Agent(command, world, saved or Saved(), folder, lock).run()


class _Over(Exception):
    """The run has ended while no worker was there: its exit code, and what to say."""

    def __init__(self, code: int, reason: str = "") -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


class Agent:
    """Looks after the workers of this node until the run ends.

    Args:
        folder: of this run alone; workers leave the reason of their end there.
        lock: a descriptor that workers keep open, because the folder is in use as long as one of them lives.
    """

    def __init__(
        self,
        command: Sequence[str],
        world: World,
        saved: Saved,
        folder: Path,
        lock: int,
    ) -> None:
        self._command, self._world, self._saved = command, world, saved
        self._folder, self._lock = folder, lock
        least = world.nodes if world.min_nodes is None else world.min_nodes
        self._node: Node | None = None
        if world.nodes > 1:
            self._node = Node(world.master_addr, world.master_port, world.node_rank, least, world.nodes, world.workers)
        self._generation = 0
        self._restarts = world.max_restarts  # that are left
        self._workers: dict[int, subprocess.Popen[bytes]] = {}  # by global rank
        self._ends: dict[int, tuple[int, float]] = {}  # global rank -> exit code, time seen; in order
        self._killed: set[int] = set()  # ranks that we killed
        self._signal: int | None = None  # the first one that asked for the end
        self._regroup: Regroup | None = None  # other nodes want to start anew
        self._closed: Closed | None = None  # another node has ended the run
        self._lost: list[str] = []  # nodes that are gone

    def run(self) -> int:
        """Start the workers, again after each crash that allows another attempt; returns the exit code.

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
            self._kill()
            if self._node is not None:
                self._node.leave(code)
            for number, handler in before.items():
                signal.signal(number, handler)
        return code

    def _run_generation(self) -> int | None:
        """Meet, start, watch; the exit code of the run, or None if it is to start anew."""
        self._regroup, self._lost = None, []
        with contextlib.ExitStack() as stack:
            start, listener = self._meet()
            if listener is not None:
                stack.enter_context(listener)  # the first worker has its own copy
            self._start(start, listener)
        self._generation += 1
        while self._running():
            time.sleep(POLL_SECONDS)
            self._hear()
            self._end_the_late()
        return self._judge()

    # ------------------------------------------------------------------------------------------------------- nodes

    def _meet(self) -> tuple[Start, socket.socket | None]:
        """Wait for the nodes of a generation; on the first one also the socket for the store of its workers.

        Raises:
            UserError: they never met, or do not belong together.
            _Over: a signal came, another node has ended the run, or one is lost for good.
        """
        node, listener = self._node, None
        began, joined, said, why = time.monotonic(), False, False, "too few have come"
        while self._signal is None:
            if node is None:
                return Start(node=0, nodes=1, port=0), None
            if not node.connected and self._generation == 0:
                try:
                    node.connect()
                    joined, self._lost = False, []  # also where the host was lost before the run began
                except OSError as error:  # it starts later, or its name is not known yet
                    why = error.strerror or str(error)
            if node.connected and not joined:
                joined, listener, why = True, node.open_port(), "too few have come"
                node.join(0 if listener is None else listener.getsockname()[1])
            for message in self._hear():
                if isinstance(message, Start):
                    return message, listener
            if self._closed is not None:
                if self._closed.reason:
                    raise UserError(f"The nodes do not belong together: {self._closed.reason}.")
                raise _Over(self._closed.code or 1, _OTHER_ENDED.format(self._closed))
            waited = time.monotonic() - began
            if (self._generation > 0 and not node.connected) or waited > self._world.meet_seconds:
                raise self._missing(why)
            if waited > SAY_AFTER and not said:
                said = True
                _say(f"Waiting for {self._world.nodes} nodes at {node.where}: {why}.")
            time.sleep(POLL_SECONDS if node.connected else 1.0)
        raise _Over(128 + self._signal)

    def _missing(self, why: str) -> Exception:
        """What to raise when nodes have not come in time."""
        assert self._node is not None
        if self._generation > 0:
            return self._end_of_lost()
        return UserError(
            f"{self._world.nodes} nodes did not meet at {self._node.where}: {why}. The same values, and "
            f"NNODES={self._world.nodes}, must be set on every node."
        )

    def _end_of_lost(self) -> _Over:
        """The run cannot go on without a node that is gone: that is no crash if a later start can go on."""
        gone = f"Lost: {', '.join(self._lost) or 'a node that did not come back'}."
        code = StoppedBySignal.exit_code if self._saved.exists() else 1
        return _Over(code, _lines(gone, self._saved.how_to_go_on()))

    def _hear(self) -> list[Message]:
        """What other nodes have said since the last call; remembers what concerns the end of the workers."""
        messages = self._node.hear() if self._node is not None else []
        for message in messages:
            if isinstance(message, Lost):
                self._lost.append(message.name)
            elif isinstance(message, Closed):
                self._closed = message
            elif isinstance(message, Regroup) and self._running():
                self._regroup = message
                if message.joined:
                    _say("Another node has joined: saving, and starting again with it.")
                    self._send(signal.SIGTERM)
        return messages

    def _learn_of_losses(self) -> None:
        """Wait until every node has answered, or is known to be lost, or has ended the run."""
        if self._node is None:
            return
        self._node.say(Failed())
        until = time.monotonic() + ROLL_CALL_SECONDS
        while time.monotonic() < until and self._signal is None and not self._lost and self._closed is None:
            if any(isinstance(message, Present) for message in self._hear()):
                return
            time.sleep(POLL_SECONDS)

    # ------------------------------------------------------------------------------------------------------- workers

    def _start(self, start: Start, listener: socket.socket | None) -> None:
        """Start the workers of this node. No signal can fall between the start of one and the note of it.

        Raises:
            UserError: the system refuses another process.
        """
        self._workers, self._ends, self._killed = {}, {}, set()
        self._patience = self._deadline = float("inf")
        for file in self._folder.glob("*.json"):
            file.unlink()
        world, count = self._world, self._world.workers
        common = (
            os.environ
            | self._meeting_place(start)
            | {
                ERROR_FOLDER: str(self._folder),
                LAUNCHER: str(os.getpid()),
                "WORLD_SIZE": str(count * start.nodes),
                "LOCAL_WORLD_SIZE": str(count),
                "GROUP_RANK": str(start.node),
                "TORCHELASTIC_RESTART_COUNT": str(world.max_restarts - self._restarts),
            }
        )
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {*STOP_SIGNALS, signal.SIGUSR2})
        try:
            for local_rank in range(count):
                rank = start.node * count + local_rank
                own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
                descriptors = [self._lock]
                if rank == 0 and listener is not None:
                    own[LISTENER] = str(listener.fileno())
                    descriptors.append(listener.fileno())
                self._workers[rank] = subprocess.Popen(
                    [sys.executable, "-u", *self._command],
                    env=common | own,
                    stdout=None if rank in world.shown_ranks else subprocess.DEVNULL,  # no pipe: a terminal stays one
                    pass_fds=descriptors,
                    start_new_session=True,  # Ctrl-C reaches the workers through us alone
                )
        except OSError as error:
            raise UserError(
                f"NGPU={count}: the system refused process number {len(self._workers) + 1} "
                f"({error.strerror}). Lower NGPU, or raise the limit of processes (ulimit -u)."
            ) from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _meeting_place(self, start: Start) -> dict[str, str]:
        """Variables that tell the workers where they meet, and on which interface."""
        if self._node is None:
            loopback = loopback_interface()  # whatever is set for runs on many machines
            interfaces = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": f"={loopback}"}
            file = self._folder / f"store-{self._generation}"
            return {STORE: str(file), **interfaces}
        address = self._world.master_addr
        place = {STORE: f"{address}:{start.port}", "MASTER_ADDR": address, "MASTER_PORT": str(start.port)}
        own_address = address_towards(address, start.port)
        interface = interface_of(own_address) if own_address is not None else None
        if interface is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
            place["GLOO_SOCKET_IFNAME"] = interface  # gloo would take the address of this machine's name
        return place

    def _running(self) -> dict[int, subprocess.Popen[bytes]]:
        """The workers that have not ended; notes the ends."""
        running = {}
        for rank, process in self._workers.items():
            code = process.poll()
            if code is None:
                running[rank] = process
            else:
                self._ends.setdefault(rank, (code, time.time()))
        return running

    def _send(self, number: int) -> None:
        for process in self._running().values():
            process.send_signal(number)

    def _kill(self) -> None:
        running = self._running()
        for rank, process in running.items():
            self._killed.add(rank)
            os.killpg(process.pid, signal.SIGKILL)
        for process in running.values():
            process.wait()

    def _end_the_late(self) -> None:
        """Kill the workers that have not ended within the time that the end of the first one leaves them."""
        bad = {code for code, _ in self._ends.values() if code != 0}
        ended_elsewhere = self._closed.code if self._closed is not None else 0
        joined = self._regroup is not None and self._regroup.joined
        stopping = self._signal is not None or joined or StoppedBySignal.exit_code in {*bad, ended_elsewhere}
        patience = float("inf")
        if bad.intersection(UNSAVED_STOPS) and stopping:  # what is left of the ranks cannot save
            patience = CRASH_PATIENCE
        elif bad.difference(KNOWN_EXITS) and stopping:
            patience = KNOWN_EXIT_PATIENCE
        elif stopping:
            patience = self._world.stop_seconds
        elif bad.intersection(KNOWN_EXITS) or ended_elsewhere:
            patience = KNOWN_EXIT_PATIENCE
        elif bad or self._regroup is not None:
            patience = CRASH_PATIENCE
        if patience < self._patience:
            self._patience, self._deadline = patience, time.monotonic() + patience
        if time.monotonic() > self._deadline:
            self._kill()

    # ------------------------------------------------------------------------------------------------------- ends

    def _judge(self) -> int | None:
        """The exit code of the run whose workers have ended, or None to start again. Says what there is to say."""
        ends = self._failures()
        if not ends:
            return 0
        known = any(end.code in KNOWN_EXITS for end in ends)
        joined = self._regroup is not None and self._regroup.joined
        stopped = all(end.code in (StoppedBySignal.exit_code, *UNSAVED_STOPS) for end in ends)
        if joined and stopped and self._signal is None:
            return None
        text, code = explain(ends, self._signal, self._killed)
        hangs = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(self._folder.glob("*.hang.json"))]
        report = explain_hang(hangs, self._killed)
        said = any(end.rank == 0 and end.message and end.message == ends[0].message for end in ends)
        if known or self._signal is not None:  # it would end in the same way again
            self._say_end(text, report, self._closing(ends) if text or report else "", by_rank0=said)
            return code
        if self._regroup is not None and not self._regroup.joined:
            text = "Workers of another node failed; its output says why."
        if self._restarts > 0:
            self._restarts -= 1
            self._say_end(text, report, by_rank0=said)
            _say(f"Starting again from the newest checkpoint ({self._restarts} restarts left).")
            return None
        self._learn_of_losses()
        if self._lost:
            _say(report)
            raise self._end_of_lost()
        if self._closed is not None and self._closed.code != 0:
            text, code = _OTHER_ENDED.format(self._closed), self._closed.code
        self._say_end(text, report, self._closing(ends), by_rank0=said)
        return code

    def _closing(self, ends: Sequence[End]) -> str:
        """How to go on, as a worker said it; in its stead, where it had opened the run's folder and then crashed."""
        closing = next((end.closing for end in ends if end.closing), "")
        if not closing and ends[0].code not in KNOWN_EXITS and (self._folder / LOG_FILE).exists():
            closing = self._saved.how_to_go_on()
        return closing

    def _say_end(self, *texts: str, by_rank0: bool = False) -> None:
        """Why the workers ended: on the terminal, and in train.log, unless rank 0 has written it there itself."""
        text = _lines(*texts)
        _say(text)
        if text and not by_rank0:
            with contextlib.suppress(OSError):  # no worker of this node had opened it
                note_end(text, Path((self._folder / LOG_FILE).read_text(encoding="utf-8")))

    def _failures(self) -> list[End]:
        """The workers that did not end with 0, the first one first."""
        ends = []
        for rank, (code, seen) in self._ends.items():
            try:
                record = json.loads((self._folder / f"{rank}.json").read_text(encoding="utf-8"))
            except (OSError, ValueError):  # it said nothing, or had no space to; seen up to two polls late
                record = {"time": seen - 2 * POLL_SECONDS, "message": None, "closing": ""}
            if code != 0:
                ends.append(End(rank, code, record["time"], record["message"], record["closing"]))
        return sorted(ends, key=lambda end: (end.rank in self._killed, end.time))

    # ------------------------------------------------------------------------------------------------------- signals

    def _take_signals(self) -> dict[int, Any]:
        """Install our handlers; returns those that were there."""
        before: dict[int, Any] = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, signal.SIGUSR2)}
        if before[signal.SIGHUP] == signal.SIG_IGN:  # nohup; workers inherit it
            del before[signal.SIGHUP]
        for number in before:
            signal.signal(number, self._receive)
        return before

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Signal handler."""
        if number == signal.SIGUSR2:  # save and go on
            self._send(number)
        elif self._signal is None:
            self._signal = number
            if self._running():
                self._send(number)
                with contextlib.suppress(OSError):  # after SIGHUP there is no terminal
                    os.write(2, b"\nStopping after this step and a save. Ctrl-C again stops at once, without saving.\n")
        elif number == signal.SIGINT:  # a second SIGTERM is a scheduler's impatience: it has SIGKILL for that
            self._kill()


@contextmanager
def _private_folder() -> Iterator[tuple[Path, int]]:
    """A folder that only this user can enter, and the descriptor that locks it for as long as one process of the run
    has it. Removes what runs have left that were killed."""
    try:
        place = Path(tempfile.gettempdir())
    except OSError as error:
        raise _no_folder("The folder for temporary files", error) from None
    for left in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or another launcher is removing it
            lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(left)
            finally:
                os.close(lock)
    folder, lock = _locked_folder(place)
    try:
        yield folder, lock
    finally:
        with contextlib.suppress(OSError):
            _remove(folder)
        os.close(lock)


def _locked_folder(place: Path) -> tuple[Path, int]:
    """A new folder, and the descriptor that locks it.

    Raises:
        UserError: the system refuses it.
    """
    while True:
        try:
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        except OSError as error:
            raise _no_folder(str(place), error) from None
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (FileNotFoundError, BlockingIOError):  # another launcher took it for a leftover before it was locked
            continue
        except OSError as error:  # such as a file system without locks
            folder.rmdir()
            raise _no_folder(str(place), error) from None
        if folder.exists():
            return folder, lock
        os.close(lock)


def _no_folder(place: str, error: OSError) -> UserError:
    return UserError(f"{place}: a run needs a folder there: {error.strerror}. Set TMPDIR to a folder on a local disk.")


def _remove(folder: Path) -> None:
    """Remove what a run leaves in its folder, and then the folder; anything else stays where it is."""
    for pattern in ("*.json", "store-*", LOG_FILE):
        for file in folder.glob(pattern):
            file.unlink()
    folder.rmdir()


def _lines(*texts: str) -> str:
    return printable("\n".join(text for text in texts if text))  # errors quote what stands in files


def _say(*texts: str) -> None:
    if text := _lines(*texts):
        with contextlib.suppress(OSError):  # a terminal that is gone must not end the run
            print(text, file=sys.stderr, flush=True)
