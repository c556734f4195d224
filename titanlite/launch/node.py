"""A launcher's connection with the host of its run.

Invariant: it never waits for the host, but for a second to reach it and five to take leave.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from titanlite.config.errors import UserError
from titanlite.launch.host import GOODBYE, Host, listen
from titanlite.launch.messages import (
    LONGEST_LINE,
    Closed,
    Join,
    Lost,
    Message,
    Present,
    Regroup,
    RollCall,
    Spare,
    Start,
    decode,
    encode,
)
from titanlite.runtime.network import watch_connection


@dataclass
class News:
    """What the other nodes have said, as far as it still counts.

    Attributes:
        started: A generation starts, in which this node has a place.
        spare: This node has none, because the run has all its nodes.
        regroup: Others want to start anew.
        closed: One has ended the run.
        lost: Names of those that are gone.
        all_present: The answer to `Failed`: no node is lost.
    """

    started: Start | None = None
    spare: bool = False
    regroup: Regroup | None = None
    closed: Closed | None = None
    lost: list[str] = field(default_factory=list)
    all_present: bool = False

    def note(self, messages: Sequence[Message]) -> None:
        """Take in what was said, in its order: what comes after a start concerns the generation that it starts."""
        for message in messages:
            if isinstance(message, Start):
                self.started, self.regroup, self.lost = message, None, []
            elif isinstance(message, Spare):
                self.spare = True
            elif isinstance(message, Regroup):
                self.regroup = message
            elif isinstance(message, Closed):
                self.closed = message
            elif isinstance(message, Lost):
                self.lost.append(message.name)
            elif isinstance(message, Present):
                self.all_present = True

    @property
    def another_joined(self) -> bool:
        """Whether the workers are to save and stop, so that all start again with another node."""
        return self.regroup is not None and self.regroup.joined

    @property
    def ended_elsewhere(self) -> bool:
        """Whether another node has ended the run before it was done, so that nobody would come to a new start."""
        return self.closed is not None and self.closed.code != 0


class Node:
    """This launcher's connection with the host, and the host itself if it is to be here.

    Args:
        rank: NODE_RANK, or None where the nodes number themselves: then whoever can listen at the address is the host.
        least: nodes with which the run can start, of `most`.

    Attributes:
        listener: where the first worker of the run can listen, at the host's address; None on other nodes. Whoever
            starts that worker closes it then.
    """

    def __init__(self, address: str, port: int, rank: int | None, least: int, most: int, workers: int) -> None:
        self.address, self._port, self._rank, self._least, self._most = address, port, rank, least, most
        self._world = f"NNODES={least if least == most else f'{least}:{most}'} and {workers} processes a node"
        self._connection: socket.socket | None = None
        self._received = b""
        self.hosts = False
        self.listener: socket.socket | None = None

    @property
    def where(self) -> str:
        """The meeting place, for messages."""
        return f"MASTER_ADDR={self.address}, MASTER_PORT={self._port}"

    def connect(self) -> None:
        """Try to reach the host, once.

        Raises:
            OSError: it is not there yet.
            UserError: it cannot be here, but has to; or the address is that of no machine.
        """
        where = socket.getaddrinfo(self.address, self._port, type=socket.SOCK_STREAM)[0][4][0]
        if ipaddress.ip_address(where).is_unspecified:  # to listen there is to listen on every interface
            raise UserError(
                f"MASTER_ADDR={self.address} is no machine's address. Set it on all machines to the one that the "
                "others use for the first machine."
            )
        if not self.hosts and self._rank in (None, 0):
            server = listen(self.address, self._port, must=self._rank == 0)
            if server is not None:
                self.hosts = True
                Host(server, self._least, self._most)
        self._connection = socket.create_connection((self.address, self._port), timeout=1.0)
        watch_connection(self._connection)
        self._connection.setblocking(False)
        self._received = b""

    @property
    def connected(self) -> bool:
        """Whether the host has been reached and is still there."""
        return self._connection is not None

    def join(self) -> None:
        """Say that this node is ready; a `Start` will be heard."""
        assert self._connection is not None
        if self.hosts and self.listener is None:
            family, where = self._connection.family, self._connection.getpeername()
            self.listener = socket.socket(family, socket.SOCK_STREAM)
            self.listener.bind((where[0], 0, *where[2:]))
            self.listener.listen(1024)
        port = 0 if self.listener is None else self.listener.getsockname()[1]
        name = f"{socket.gethostname()} ({self._connection.getsockname()[0]})"
        name += f", NODE_RANK={self._rank}" if self._rank is not None else ""
        self.say(Join(rank=self._rank, name=name, port=port, world=self._world))

    def close_listener(self) -> None:
        """The first worker has its own copy, or there will be none."""
        if self.listener is not None:
            self.listener.close()
            self.listener = None

    def say(self, message: Message) -> None:
        """Send to the host; where it is gone, `hear` will tell."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.sendall(encode(message))

    def hear(self) -> list[Message]:
        """What the host has said since the last call; that it is lost, once.

        Raises:
            UserError: something else than a launcher answers there.
        """
        if self._connection is None:
            return []
        gone = False
        try:
            while not gone and len(self._received) <= LONGEST_LINE:
                data = self._connection.recv(LONGEST_LINE)
                self._received += data
                gone = not data
        except BlockingIOError:
            pass
        except OSError:
            gone = True
        *lines, self._received = self._received.split(b"\n")
        try:
            if len(self._received) > LONGEST_LINE:
                raise ValueError
            messages = [decode(line) for line in lines]
        except ValueError:
            self._disconnect()
            raise UserError(
                f"{self.where}: what answers there is no launcher of this titanlite. Choose a port that is free on the "
                "first machine, and the same titanlite on all."
            ) from None
        if RollCall() in messages:
            self.say(Present())
        if gone:
            self._disconnect()
            messages.append(Lost(name=f"the first node ({self.where})"))
        return messages

    def leave(self, code: int, reason: str = "") -> None:
        """Tell the others that this node has ended the run, and let the host tell them if it is here."""
        self.close_listener()
        if self._connection is None:
            return
        self.say(Closed(name=socket.gethostname(), code=code, reason=reason))
        self._connection.settimeout(GOODBYE)
        until = time.monotonic() + GOODBYE
        with contextlib.suppress(OSError):
            while self._connection.recv(LONGEST_LINE) and time.monotonic() < until:
                pass
        self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
