"""How the launchers of several machines meet, and how they learn that one of them has ended.

The launcher that can listen at MASTER_ADDR is the host. It numbers the nodes. It tells them when a generation of
workers starts, when it must be started again, and which node is lost. All launchers talk to it by TCP, including the
one that runs it.

Invariant: the host listens on one address only, that of MASTER_ADDR. A line that is no message ends its connection and
changes nothing else. Strangers can neither use up the host's descriptors nor keep the nodes from meeting.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import resource
import socket
import threading

from titanlite.config.errors import UserError
from titanlite.launch.messages import (
    LONGEST_LINE,
    Closed,
    Failed,
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
from titanlite.runtime.network import LOST_AFTER, watch_connection

LAST_CALL = 15.0  # seconds to wait for more nodes after the fewest that are allowed have come
GOODBYE = 5.0  # seconds to tell the others that the run has ended
SPARES = 64  # limit of nodes beyond those that a run needs, and of connections that have not joined
OTHER_FILES = 128  # limit of the descriptors that the rest of a launcher needs
UNREAD = 64 * LONGEST_LINE  # limit of the bytes that wait for a node which does not read


def listen(address: str, port: int, must: bool) -> socket.socket | None:
    """A socket that listens at this address only.

    None if the address belongs to another machine, or if another node of this machine listens there already.

    Args:
        must: This is the first node, so it must be the host.

    Raises:
        OSError: the name cannot be resolved now.
        UserError: the first node cannot listen there, or the others could not reach it.
    """
    family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    server = socket.socket(family, kind, protocol)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of the last run may not be closed yet
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
    """Whether the address is a loopback address, so that all nodes are on one machine."""
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
        self.present, self.asks = True, False  # has answered the last roll call; waits for the result of one

    def send(self, message: Message) -> None:
        if self.writer.transport.get_write_buffer_size() > UNREAD:
            self.writer.transport.abort()
        else:
            self.writer.write(encode(message))


class Host:
    """Numbers the nodes and tells them when to start. It runs in its own thread.

    Args:
        server: a listening socket, which is closed when the host ends.
        least: number of nodes with which the run can start.
        most: number of nodes that the run uses; further ones are spares.

    Raises:
        UserError: the system does not allow as many connections as there are nodes.
    """

    def __init__(self, server: socket.socket, least: int, most: int) -> None:
        self._server, self._least, self._most = server, least, most
        self._room = most + SPARES  # for members, and the same number for other connections
        _allow_files(2 * self._room + OTHER_FILES, most)
        self._members: list[_Member] = []
        self._strangers: dict[asyncio.StreamWriter, None] = {}  # connections that have not joined, the oldest first
        self._closed: Closed | None = None
        self._last_call: asyncio.TimerHandle | None = None
        self._told_to_regroup = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True, name="host")
        self._thread.start()

    # ------------------------------------------------------------------------------------------------- connections

    async def _serve(self) -> None:
        """Accept connections one at a time, because asyncio's own server accepts a hundred before it reads from one."""
        loop, tasks = asyncio.get_running_loop(), set()
        self._server.setblocking(False)
        while True:
            try:
                connection, _ = await loop.sock_accept(self._server)
                watch_connection(connection)
                reader, writer = await asyncio.open_connection(sock=connection, limit=LONGEST_LINE)
            except OSError:  # the connection is gone already, or this machine lacks memory or descriptors
                await asyncio.sleep(0.1)
                continue
            self._strangers[writer] = None
            if (
                len(self._strangers) > self._room
            ):  # a node joins at once, so the oldest is no node, or it will try again
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                oldest.transport.abort()
            task = asyncio.create_task(self._meet(reader, writer))
            tasks.add(task)  # the loop itself holds no reference
            task.add_done_callback(tasks.discard)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends."""
        member, ended = None, False
        with contextlib.suppress(OSError, ValueError):  # the connection broke, or its peer is no launcher
            while not ended:
                # A connection that has not joined must not hold a descriptor for long.
                patience = LOST_AFTER if member not in self._members else None
                line = await asyncio.wait_for(reader.readline(), patience)
                if not line:
                    break
                message = decode(line)
                if member is None:
                    member = self._welcome(message, writer)
                else:
                    ended = self._obey(message, member)
        self._part(member, ended)
        writer.close()
        with contextlib.suppress(OSError):
            await asyncio.wait_for(writer.wait_closed(), GOODBYE)
        writer.transport.abort()  # data that the peer has not read by now would never be read
        self._strangers.pop(writer, None)

    def _welcome(self, message: Message, writer: asyncio.StreamWriter) -> _Member:
        """The member that joins with the first line of a connection. One that is refused is told why.

        Raises:
            ValueError: the peer is no launcher, is refused, or its connection was closed to make room.
        """
        if not isinstance(message, Join) or writer not in self._strangers:
            raise ValueError
        member = _Member(message, writer)
        if wrong := self._refusal(message):
            member.send(Closed(name=message.name, code=UserError.exit_code, reason=wrong))
            return member
        for other in self._with_rank_of(
            message
        ):  # the node was started again before its old connection was found to be lost
            self._members.remove(other)
            other.writer.close()
            self._tell(Lost(name=other.join.name))
        del self._strangers[writer]
        self._members.append(member)
        self._join(member, message)
        return member

    def _refusal(self, join: Join) -> str:
        """Why a node cannot join; empty if it can."""
        taken = [other for other in self._with_rank_of(join) if not other.started]
        if self._members and self._members[0].join.world != join.world:
            first = self._members[0].join
            return f"{join.name} has {join.world}, but {first.name} has {first.world}"
        if taken:
            return f"NODE_RANK={join.rank} is that of {taken[0].join.name}, too"
        if len(self._members) >= self._room:
            return f"{len(self._members)} nodes have come, and {self._most} are needed"
        return ""

    def _with_rank_of(self, join: Join) -> list[_Member]:
        return [other for other in self._members if join.rank is not None and other.join.rank == join.rank]

    def _obey(self, message: Message, member: _Member) -> bool:
        """Handle the message of a node. Returns whether the node has ended."""
        if isinstance(message, Join):
            self._join(member, message)
        elif isinstance(message, Closed):
            # Before training starts, a node that is refused ends the run, so that the mistake is seen at once. A run in
            # progress goes on, because a spare, or a launcher that was started by mistake, is no part of it.
            started = [other for other in self._members if other.started]
            if member in started or not started:
                self._closed = self._closed or message
                self._tell(self._closed, but=member)
            return True
        elif isinstance(message, Failed):
            self._call_roll(member)
        elif isinstance(message, Present):
            member.present = True
            self._answer_roll()
        return False

    def _part(self, member: _Member | None, ended: bool) -> None:
        """The connection of a node has ended, and the node with it."""
        if member is None or member not in self._members:
            return
        self._members.remove(member)
        self._strangers[member.writer] = None
        if member.started and not member.waiting and not ended:
            self._tell(Lost(name=member.join.name))
        self._answer_roll()
        self._consider()

    # ------------------------------------------------------------------------------------------------- generations

    def _join(self, member: _Member, join: Join) -> None:
        """A node is ready: a new one, or one whose workers have ended."""
        member.join, member.waiting = join, True
        if self._closed is not None:
            member.send(self._closed)
        self._consider()

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
            if not any(member.join.port for member in waiting):  # the host's own node is about to join
                return
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
        if not failed and len(running) >= self._most:
            for member in waiting:
                member.send(Spare())

    def _start(self, waiting: list[_Member]) -> None:
        """The host's node is the first; the others come in the order of their numbers, or in that of their arrival."""
        self._told_to_regroup = False
        arrival = sorted(waiting, key=lambda member: (member.join.port == 0, member.join.rank or 0))
        nodes = min(len(arrival), self._most)
        for number, member in enumerate(arrival[:nodes]):
            member.waiting, member.started = False, True
            member.send(Start(node=number, nodes=nodes, port=arrival[0].join.port))
        for member in arrival[nodes:]:
            member.send(Spare())

    # --------------------------------------------------------------------------------------------------- roll call

    def _call_roll(self, asking: _Member) -> None:
        asking.asks = True
        for other in self._members:
            if other is not asking:
                other.present = False
                other.send(RollCall())
        self._answer_roll()

    def _answer_roll(self) -> None:
        """Send the result of the roll call, if every node has answered or is known to be lost."""
        if all(member.present for member in self._members):
            for member in self._members:
                if member.asks:
                    member.asks = False
                    member.send(Present())

    def _tell(self, message: Message, but: _Member | None = None) -> None:
        for member in self._members:
            if member is not but:
                member.send(message)


def _allow_files(count: int, nodes: int) -> None:
    """Allow this process to have `count` open files.

    Raises:
        UserError: the system does not allow it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))
        except (OSError, ValueError):
            raise UserError(
                f"NNODES={nodes}: the first node needs up to {count} open files, and the system allows {hard}. "
                "Raise the limit there (ulimit -Hn)."
            ) from None
