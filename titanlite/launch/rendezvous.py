"""How the launchers of several machines meet, and how they hear of one another's end.

The launcher that can listen at MASTER_ADDR is the host. It numbers the nodes, says when a generation of workers starts
and when it must be started anew, and which node is gone. All launchers, the host's own among them, talk to it by TCP.

Invariant: the host listens on one address, that of MASTER_ADDR. What arrives is a line of JSON of bounded length whose
fields are checked; nothing is unpickled. A line that is not understood ends its connection and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import sys
import threading
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter

from titanlite.config.errors import UserError, one_line

LONGEST_LINE = 4096  # bytes
LOST_AFTER = 20  # seconds without a sign of life from another machine
LAST_CALL = 15.0  # seconds for more nodes to come, once the fewest that are allowed are there
GOODBYE = 5.0  # seconds to tell the others of an end

Name = Annotated[str, Field(max_length=300), AfterValidator(one_line)]  # of a node, for messages
Reason = Annotated[str, Field(max_length=2000), AfterValidator(one_line)]  # names four of them
Count = Annotated[int, Field(ge=0, lt=2**31)]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class Join(_Message):
    """A node that is ready to start workers. `rank` is its NODE_RANK; `port`, above 0 on the host's node alone, is
    where its first worker listens for those of the others. Nodes whose `world` differs do not belong together."""

    kind: Literal["join"] = "join"
    rank: Count | None
    name: Name
    port: Count
    world: Name


class Start(_Message):
    """A generation of workers starts: here on node `node` of `nodes`, whose first worker listens at `port`."""

    kind: Literal["start"] = "start"
    node: Count
    nodes: Count
    port: Count


class Regroup(_Message):
    """Stop the workers and join again: another node has `joined`, or the workers of one have failed."""

    kind: Literal["regroup"] = "regroup"
    joined: bool


class Lost(_Message):
    """A node of this generation is gone without a word."""

    kind: Literal["lost"] = "lost"
    name: Name


class Closed(_Message):
    """A node has ended the run with exit code `code`."""

    kind: Literal["closed"] = "closed"
    name: Name
    code: Count
    reason: Reason = ""


class Failed(_Message):
    """The workers of this node failed: are all other nodes there, or was one lost?"""

    kind: Literal["failed"] = "failed"


class RollCall(_Message):
    """The host wants to know whether this node is there."""

    kind: Literal["roll call"] = "roll call"


class Present(_Message):
    """It is. From the host: all are."""

    kind: Literal["present"] = "present"


Message = Join | Start | Regroup | Lost | Closed | Failed | RollCall | Present
_LINE: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


def encode(message: Message) -> bytes:
    """One line of JSON."""
    return message.model_dump_json().encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message of a line.

    Raises:
        ValueError: the line is no message.
    """
    return _LINE.validate_json(line)


def watch_connection(connection: socket.socket) -> None:
    """Let the kernel end the connection when the other machine gives no sign of life."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        for option, value in (
            (socket.TCP_KEEPIDLE, LOST_AFTER // 4),
            (socket.TCP_KEEPINTVL, LOST_AFTER // 4),
            (socket.TCP_KEEPCNT, 3),
            (socket.TCP_USER_TIMEOUT, LOST_AFTER * 1000),  # where something was sent and is not acknowledged
        ):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def listen(address: str, port: int, must: bool) -> socket.socket | None:
    """A socket that listens at this address alone; None where it is another machine's, or taken by a node of this one.

    Args:
        must: The node is the first one, so that it has to be the host.

    Raises:
        OSError: nothing is known of this name, now.
        UserError: the first node cannot listen there, or the others could not reach it.
    """
    family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    server = socket.socket(family, kind, protocol)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the last run may linger
    try:
        server.bind(where)
        server.listen(1024)
    except OSError as error:
        server.close()
        if must:
            raise UserError(
                f"MASTER_ADDR={address}, MASTER_PORT={port}: the first node (NODE_RANK=0) cannot listen at {where[0]}: "
                f"{error.strerror}. It must be an address of this machine, and a port that is free."
            ) from None
        return None
    if ipaddress.ip_address(where[0]).is_loopback and not _is_loopback(address):
        server.close()
        raise UserError(
            f"MASTER_ADDR={address} is {where[0]} on this machine, as /etc/hosts says, and no other machine can reach "
            "it there. Set MASTER_ADDR on all machines to the address that the others use for this one."
        )
    return server


def _is_loopback(address: str) -> bool:
    """Whether the nodes are meant to be on one machine."""
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


class _Member:
    """A launcher, as the host sees it."""

    def __init__(self, join: Join, writer: asyncio.StreamWriter) -> None:
        self.join = join
        self.writer = writer
        self.waiting = True  # to start workers
        self.started = False  # workers, at least once
        self.present, self.asks = True, False  # has answered the last roll call; wants to know about the others

    def send(self, message: Message) -> None:
        self.writer.write(encode(message))


class Host:
    """Numbers the nodes and says when they start; in a thread of its own.

    Args:
        server: listens already; it is closed when the host ends.
        least: nodes with which the run can start; most: more are kept as spares.
    """

    def __init__(self, server: socket.socket, least: int, most: int) -> None:
        self._server, self._least, self._most = server, least, most
        self._members: list[_Member] = []
        self._closed: Closed | None = None
        self._last_call: asyncio.TimerHandle | None = None
        self._told_to_regroup = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True, name="rendezvous")
        self._thread.start()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._meet, sock=self._server, limit=LONGEST_LINE)
        async with server:
            await server.serve_forever()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends."""
        watch_connection(writer.get_extra_info("socket"))
        member: _Member | None = None
        ended = False
        try:
            while not ended:
                # A stranger that says nothing must not hold a descriptor of the launcher for long.
                line = await asyncio.wait_for(reader.readline(), LOST_AFTER if member is None else None)
                if not line:
                    break
                message = decode(line)
                if isinstance(message, Join):
                    member = self._join(member, message, writer)
                elif isinstance(message, Closed) and member is not None:
                    ended = True
                    # A node that was refused ends the others before they train, so that the mistake is seen at once.
                    # A run under way goes on: a launcher that was started by mistake is no part of it.
                    if member in self._members or not any(other.started for other in self._members):
                        self._closed = self._closed or message
                        self._tell(self._closed, but=member)
                elif isinstance(message, Failed) and member is not None:
                    self._call_roll(member)
                elif isinstance(message, Present) and member is not None:
                    member.present = True
                    self._answer_roll()
        except (OSError, ValueError):  # the connection broke, or it was a stranger
            pass
        if member in self._members:
            assert member is not None
            self._members.remove(member)
            if member.started and not member.waiting and not ended:
                self._tell(Lost(name=member.join.name))
            self._answer_roll()
            self._consider()
        with contextlib.suppress(OSError):
            await asyncio.wait_for(writer.drain(), GOODBYE)
        writer.close()

    def _join(self, member: _Member | None, join: Join, writer: asyncio.StreamWriter) -> _Member:
        """A node is ready: a new one, or one whose workers have ended."""
        if member is None:
            member = _Member(join, writer)
            same_rank = [other for other in self._members if join.rank is not None and other.join.rank == join.rank]
            wrong = ""
            if same_rank and not same_rank[0].started:
                wrong = f"NODE_RANK={join.rank} is that of {same_rank[0].join.name}, too"
            if self._members and self._members[0].join.world != join.world:
                wrong = (
                    f"{join.name} has {join.world}, but {self._members[0].join.name} has {self._members[0].join.world}"
                )
            if wrong:
                member.send(Closed(name=join.name, code=UserError.exit_code, reason=wrong))
                return member
            for other in same_rank:  # it was started again before its connection was missed
                self._members.remove(other)
                other.writer.close()
                self._tell(Lost(name=other.join.name))
            self._members.append(member)
        member.join, member.waiting = join, True
        if self._closed is not None:
            member.send(self._closed)
        self._consider()
        return member

    def _consider(self) -> None:
        """Start a generation if all are ready; otherwise let those that run stop for those that wait."""
        if self._last_call is not None:
            self._last_call.cancel()
            self._last_call = None
        waiting = [member for member in self._members if member.waiting]
        running = [member for member in self._members if not member.waiting]
        if self._closed is not None or not waiting:
            return
        if not running:
            if len(waiting) >= self._most:
                self._start(waiting)
            elif len(waiting) >= self._least:
                self._last_call = asyncio.get_running_loop().call_later(LAST_CALL, self._start, waiting)
            return
        failed = any(member.started for member in waiting)
        if (failed or len(running) < self._most) and not self._told_to_regroup:
            self._told_to_regroup = True
            for member in running:
                member.send(Regroup(joined=not failed))

    def _start(self, waiting: list[_Member]) -> None:
        """The host's node is the first; the others come in the order of their numbers, or in that of their arrival."""
        self._told_to_regroup = False
        arrival = sorted(waiting, key=lambda member: (member.join.port == 0, member.join.rank or 0))[: self._most]
        for number, member in enumerate(arrival):
            member.waiting, member.started = False, True
            member.send(Start(node=number, nodes=len(arrival), port=arrival[0].join.port))

    def _call_roll(self, asking: _Member) -> None:
        asking.asks = True
        for other in self._members:
            if other is not asking:
                other.present = False
                other.send(RollCall())
        self._answer_roll()

    def _answer_roll(self) -> None:
        """Once every node has answered, or is known to be lost."""
        if all(member.present for member in self._members):
            for member in self._members:
                if member.asks:
                    member.asks = False
                    member.send(Present())

    def _tell(self, message: Message, but: _Member | None = None) -> None:
        for member in self._members:
            if member is not but:
                member.send(message)


class Node:
    """This launcher's connection with the host, and the host itself if it is to be here.

    Args:
        rank: NODE_RANK, or None where the nodes number themselves: then whoever can listen at the address is the host.
        least: nodes with which the run can start, of `most`.
    """

    def __init__(self, address: str, port: int, rank: int | None, least: int, most: int, workers: int) -> None:
        self.address, self._port, self._rank, self._least, self._most = address, port, rank, least, most
        self._world = f"NNODES={least if least == most else f'{least}:{most}'} and {workers} processes a node"
        self._server: socket.socket | None = None
        self._connection: socket.socket | None = None
        self._received = b""
        self.hosts = False

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

    def open_port(self) -> socket.socket | None:
        """A socket where the first worker of the run can listen, at the host's address; None on other nodes."""
        assert self._connection is not None
        if not self.hosts:
            return None
        family, where = self._connection.family, self._connection.getpeername()
        server = socket.socket(family, socket.SOCK_STREAM)
        server.bind((where[0], 0, *where[2:]))
        server.listen(1024)
        return server

    def join(self, port: int) -> None:
        """Say that this node is ready; a `Start` will be heard."""
        assert self._connection is not None
        name = f"{socket.gethostname()} ({self._connection.getsockname()[0]})"
        name += f", NODE_RANK={self._rank}" if self._rank is not None else ""
        self.say(Join(rank=self._rank, name=name, port=port, world=self._world))

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
            self._connection.close()
            self._connection = None
            raise UserError(
                f"{self.where}: what answers there is no launcher of this titanlite. Choose a port that is free on the "
                "first machine, and the same titanlite on all."
            ) from None
        if RollCall() in messages:
            self.say(Present())
        if gone:
            self._connection = None
            messages.append(Lost(name=f"the first node ({self.where})"))
        return messages

    def leave(self, code: int, reason: str = "") -> None:
        """Tell the others that this node has ended the run, and let the host tell them if it is here."""
        if self._connection is None:
            return
        self.say(Closed(name=socket.gethostname(), code=code, reason=reason))
        self._connection.settimeout(GOODBYE)
        with contextlib.suppress(OSError):
            while self._connection.recv(LONGEST_LINE):
                pass
        self._connection = None
