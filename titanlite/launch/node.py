"""A launcher's connection with the host of its run.

Invariant: it waits for the host at most a second to connect and five seconds to leave, and never otherwise.
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
    """What the other nodes have sent, as far as it is still valid.

    Attributes:
        started: A generation starts, and this node is part of it.
        spare: This node has no place, because the run has all its nodes.
        regroup: Other nodes want to start again.
        closed: Another node has ended the run.
        lost: Names of the nodes that are lost.
        all_present: The answer to `Failed`: no node is lost.
    """

    started: Start | None = None
    spare: bool = False
    regroup: Regroup | None = None
    closed: Closed | None = None
    lost: list[str] = field(default_factory=list)
    all_present: bool = False

    def note(self, messages: Sequence[Message]) -> None:
        """Process messages in their order. Those after a `Start` are about the generation that it starts."""
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
        """Whether the workers must save and stop, so that all nodes start again together with a new one."""
        return self.regroup is not None and self.regroup.joined

    @property
    def ended_elsewhere(self) -> bool:
        """Whether another node has ended the run before it was finished, so that a restart would wait in vain."""
        return self.closed is not None and self.closed.code != 0


class Node:
    """This launcher's connection with the host, and the host itself if it runs on this node.

    Args:
        rank: NODE_RANK. None if the host numbers the nodes; then the host is the node that can listen at the address.
        least: number of nodes with which the run can start, at most `most`.

    Attributes:
        listener: socket at the host's address, on which the first worker of the run can listen. None on other nodes.
            The caller closes it after starting that worker.
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
        """The address of the host, for messages."""
        return f"MASTER_ADDR={self.address}, MASTER_PORT={self._port}"

    def connect(self) -> None:
        """Try once to connect to the host.

        Raises:
            OSError: the host does not listen yet.
            UserError: this node must be the host and cannot listen there, or the address belongs to no machine.
        """
        where = socket.getaddrinfo(self.address, self._port, type=socket.SOCK_STREAM)[0][4][0]
        if ipaddress.ip_address(where).is_unspecified:  # a socket there would listen on every interface
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
        """Whether there is a connection with the host."""
        return self._connection is not None

    def join(self) -> None:
        """Tell the host that this node is ready. A `Start` follows."""
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
        """Close the listener. The first worker has its own copy, or will not be started."""
        if self.listener is not None:
            self.listener.close()
            self.listener = None

    def say(self, message: Message) -> None:
        """Send a message to the host. If the host is lost, `hear` reports it."""
        if self._connection is not None:
            with contextlib.suppress(OSError):
                self._connection.sendall(encode(message))

    def hear(self) -> list[Message]:
        """The messages of the host since the last call. The loss of the host is reported once.

        Raises:
            UserError: the program that answers there is no launcher.
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
                f"{self.where}: the program that answers there is no launcher of this titanlite. Choose a port "
                "that is free on the first machine, and the same titanlite on all."
            ) from None
        if RollCall() in messages:
            self.say(Present())
        if gone:
            self._disconnect()
            messages.append(Lost(name=f"the first node ({self.where})"))
        return messages

    def leave(self, code: int, reason: str = "") -> None:
        """Tell the other nodes that this node has ended the run. If the host is here, wait until it has told them."""
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
