"""Launchers meet by lines of JSON; strangers, lost nodes and late ones disturb nobody."""

import json
import pickle
import socket
import time
from typing import Any

import pytest

from titanlite.config.errors import UserError
from titanlite.launch import rendezvous
from titanlite.launch.rendezvous import Closed, Failed, Join, Lost, Message, Node, Present, Regroup, Start, decode

SECONDS = 20.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def node(port: int, rank: int | None, least: int = 2, most: int = 2, workers: int = 1) -> Node:
    """A node that has joined."""
    made = Node("127.0.0.1", port, rank, least, most, workers)
    made.connect()
    join(made)
    return made


def join(made: Node) -> None:
    listener = made.open_port()
    made.join(listener.getsockname()[1] if listener is not None else 0)


def heard(made: Node, kind: type[Message], seconds: float = SECONDS) -> Any:
    """The first message of this kind."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for message in made.hear():
            if isinstance(message, kind):
                return message
        time.sleep(0.01)
    raise AssertionError(f"no {kind.__name__} within {seconds} s")


@pytest.mark.parametrize("ranks", [(0, 1), (None, None)])
def test_nodes_are_numbered_and_start_together(ranks: tuple[int | None, int | None]):
    port = free_port()
    first = node(port, ranks[0])
    assert first.hear() == []
    second = node(port, ranks[1])
    starts = [heard(each, Start) for each in (first, second)]
    assert [start.node for start in starts] == [0, 1]
    assert starts[0].port == starts[1].port > 0


def test_the_host_listens_at_its_address_alone():
    server = rendezvous.listen("127.0.0.1", 0, must=True)
    assert server is not None
    with server:
        assert server.getsockname()[0] == "127.0.0.1"
    assert rendezvous.listen("192.0.2.1", free_port(), must=False) is None  # of documentation, so nobody's


def test_the_first_node_must_be_able_to_listen():
    with pytest.raises(UserError, match=r"MASTER_ADDR=192.0.2.1.* cannot listen at 192.0.2.1"):
        rendezvous.listen("192.0.2.1", 29500, must=True)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError, match="a port that is free"):
        rendezvous.listen("127.0.0.1", taken.getsockname()[1], must=True)


def test_a_name_that_only_this_machine_knows_as_itself_is_refused(monkeypatch: pytest.MonkeyPatch):
    loopback = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", free_port()))]  # as on Debian
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: loopback)
    with pytest.raises(UserError, match=r"MASTER_ADDR=node0 is 127.0.1.1 on this machine"):
        rendezvous.listen("node0", 29500, must=True)


class Trap:
    """Unpickled, it would leave a trace."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("import titanlite.launch.rendezvous as r; r.TRAPPED = True",))


STRANGE = [
    pickle.dumps(Trap()) + b"\n",
    b"[" * 100_000 + b"\n",
    b"x" * 1_000_000,
    b"{}\n",
    b"null\n",
    b'{"kind": "start", "node": 0, "nodes": 1, "port": 5}\n',
    b'{"kind": "closed", "name": "me", "code": 0}\n',
    b'{"kind": "join", "rank": -1, "name": "me", "port": 0, "world": ""}\n',
    b'{"kind": "join", "rank": "0", "name": "me", "port": 0, "world": ""}\n',
    b'{"kind": "join", "rank": 0, "name": "me", "port": 0, "world": "", "more": 1}\n',
    b'{"kind": "join", "rank": 0, "name": "' + b"n" * 400 + b'", "port": 0, "world": ""}\n',
    b"\xff\xfe\n",
]


def test_what_a_stranger_sends_is_neither_run_nor_heeded():
    port = free_port()
    first = node(port, 0)
    for line in STRANGE:
        with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as stranger:
            try:
                stranger.sendall(line)
                stranger.shutdown(socket.SHUT_WR)
                assert stranger.recv(1) == b""  # answered by the end of the connection
            except (ConnectionResetError, BrokenPipeError):
                pass
    assert not hasattr(rendezvous, "TRAPPED")
    second = node(port, 1)
    assert [heard(each, Start).node for each in (first, second)] == [0, 1]


@pytest.mark.parametrize("line", STRANGE[:5] + STRANGE[7:])
def test_a_line_that_is_no_message_is_a_value_error(line: bytes):
    with pytest.raises(ValueError, match="validation error for"):
        decode(line)


def test_messages_arrive_as_they_were_sent():
    for message in (Join(rank=None, name="é", port=1, world="w"), Regroup(joined=True), Lost(name="b"), Failed()):
        assert decode(rendezvous.encode(message)) == message
        assert json.loads(rendezvous.encode(message))["kind"] == message.kind


def test_nodes_of_another_world_or_with_a_number_that_is_taken_are_told_so():
    port = free_port()
    first = node(port, 0)
    other = node(port, 1, workers=8)
    refused = heard(other, Closed)
    assert (refused.code, "8 processes a node" in refused.reason) == (2, True)
    second = node(port, 1)
    assert [heard(each, Start).node for each in (first, second)] == [0, 1]


def test_a_number_is_given_once():
    port = free_port()
    there = [node(port, rank, 3, 3) for rank in (0, 1)]
    assert "NODE_RANK=1 is that of" in heard(node(port, 1, 3, 3), Closed).reason
    assert [each.hear() for each in there] == [[], []]


def test_the_run_goes_on_with_fewer_nodes_when_one_is_lost(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rendezvous, "LAST_CALL", 0.2)
    port = free_port()
    first, second = node(port, 0, 1, 2), node(port, 1, 1, 2)
    assert heard(first, Start).nodes == heard(second, Start).nodes == 2
    assert second._connection is not None
    second._connection.close()
    assert "NODE_RANK=1" in heard(first, Lost).name
    join(first)
    assert heard(first, Start).nodes == 1


def test_those_that_run_make_room_for_a_node_that_joins_late(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rendezvous, "LAST_CALL", 0.2)
    port = free_port()
    first = node(port, 0, 1, 2)
    assert heard(first, Start).nodes == 1
    second = node(port, 1, 1, 2)
    assert heard(first, Regroup).joined
    join(first)
    assert [heard(each, Start).node for each in (first, second)] == [0, 1]
    spare = node(port, 2, 1, 2)  # there is no room for it
    time.sleep(0.5)
    assert (first.hear(), spare.hear()) == ([], [])


def test_all_start_anew_when_the_workers_of_one_fail():
    port = free_port()
    first, second = node(port, 0), node(port, 1)
    assert heard(first, Start).nodes == heard(second, Start).nodes == 2
    join(second)
    assert not heard(first, Regroup).joined
    join(first)
    assert [heard(each, Start).node for each in (first, second)] == [0, 1]


def test_a_node_that_ends_the_run_says_so_to_all():
    port = free_port()
    first, second = node(port, 0), node(port, 1)
    assert heard(first, Start).nodes == heard(second, Start).nodes == 2
    second.leave(3)
    assert heard(first, Closed).code == 3
    join(first)  # it would have liked to go on
    assert heard(first, Closed).code == 3


def test_a_roll_call_tells_a_node_that_is_lost_from_one_that_is_there():
    port = free_port()
    first, second, third = (node(port, rank, 3, 3) for rank in range(3))
    for each in (first, second, third):
        assert heard(each, Start).nodes == 3
    first.say(Failed())
    deadline = time.monotonic() + SECONDS
    while not any(isinstance(message, Present) for message in first.hear()):
        second.hear()  # answers by itself
        third.hear()
        assert time.monotonic() < deadline
    first.say(Failed())
    assert third._connection is not None
    third._connection.close()
    assert isinstance(heard(first, Lost), Lost)


def test_the_end_of_the_host_is_noticed():
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as server:
        made = Node("127.0.0.1", port, 1, 2, 2, 1)
        made.connect()
        server.accept()[0].close()
        assert "the first node" in heard(made, Lost).name
    assert not made.connected


def test_a_launcher_that_is_started_by_mistake_does_not_end_a_run():
    port = free_port()
    there = [node(port, rank) for rank in (0, 1)]
    assert [heard(each, Start).node for each in there] == [0, 1]
    for intruder in (node(port, 1, workers=7), node(port, None, 3, 3)):  # one of them takes a number that is in use
        assert "but" in heard(intruder, Closed).reason
        intruder.leave(UserError.exit_code)
    assert [each.hear() for each in there] == [[], []]


def test_before_the_run_a_node_that_does_not_belong_ends_the_wait_of_the_others():
    port = free_port()
    first, refused = node(port, 0), node(port, 1, workers=7)
    heard(refused, Closed)
    refused.leave(UserError.exit_code)
    assert heard(first, Closed).code == UserError.exit_code


@pytest.mark.parametrize("line", [b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"x" * 1_000_000])
def test_what_is_no_launcher_at_the_masters_port_is_said_so(line: bytes):
    with socket.create_server(("127.0.0.1", 0)) as server:
        made = Node("127.0.0.1", server.getsockname()[1], 1, 2, 2, 1)
        made.connect()
        with server.accept()[0] as other:
            other.setblocking(False)
            other.send(line)
            with pytest.raises(UserError, match=r"MASTER_PORT=.* no launcher of this titanlite"):
                heard(made, Start)


@pytest.mark.parametrize("address", ["0.0.0.0", "0", "::"])
@pytest.mark.parametrize("rank", [0, 1, None])
def test_an_address_that_means_every_interface_is_refused(address: str, rank: int | None):
    with pytest.raises(UserError, match=f"MASTER_ADDR={address} is no machine's address"):
        Node(address, free_port(), rank, 2, 2, 1).connect()


def test_a_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rendezvous, "LOST_AFTER", 4)
    port = free_port()
    first = node(port, 0)
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as stranger:
        assert stranger.recv(1) == b""
    second = node(port, 1)
    assert [heard(each, Start).node for each in (first, second)] == [0, 1]


def test_names_of_nodes_are_one_line_without_commands_for_a_terminal():
    name = "node1\x1b[2J\n[12:00:00] step 7"
    line = json.dumps({"kind": "lost", "name": name}).encode()
    assert decode(line) == Lost(name="node1\\x1b[2J\\n[12:00:00] step 7")


def test_the_longest_names_leave_room_for_the_reason():
    port = free_port()
    first = node(port, 0)
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as other:
        other.sendall(rendezvous.encode(Join(rank=1, name="n" * 300, port=0, world="w" * 300)))
        assert b"n" * 300 in other.recv(4096)
    assert first.connected
