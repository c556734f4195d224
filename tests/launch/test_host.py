"""Launchers meet by lines of JSON; strangers, lost nodes and late ones disturb nobody."""

import errno
import json
import pickle
import resource
import socket
import subprocess
import sys
import time
from typing import Any

import pytest

from titanlite.config.errors import UserError
from titanlite.launch import host, messages
from titanlite.launch.messages import (
    Closed,
    Failed,
    Join,
    Lost,
    Message,
    Present,
    Regroup,
    Spare,
    Start,
    decode,
    encode,
)
from titanlite.launch.node import Node
from titanlite.runtime import network

SECONDS = 20.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def node(port: int, rank: int | None, least: int = 2, most: int = 2, workers: int = 1) -> Node:
    """A node that has joined."""
    made = Node("127.0.0.1", port, rank, least, most, workers)
    made.connect()
    made.join()
    return made


def all_heard(made: Node, *kinds: type[Message]) -> list[Any]:
    """The first message of each kind; they may come together."""
    until, found = time.monotonic() + SECONDS, {}
    while len(found) < len(kinds):
        for message in made.hear():
            found.setdefault(type(message), message)
        assert time.monotonic() < until, found
        time.sleep(0.01)
    return [found[kind] for kind in kinds]


def has_ended(connection: socket.socket) -> bool:
    """Whether the other side ends a connection at which it has nothing to say."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


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
    server = host.listen("127.0.0.1", 0, must=True)
    assert server is not None
    with server:
        assert server.getsockname()[0] == "127.0.0.1"
    assert host.listen("192.0.2.1", free_port(), must=False) is None  # of documentation, so nobody's


def test_the_first_node_must_be_able_to_listen():
    with pytest.raises(UserError, match=r"MASTER_ADDR=192.0.2.1.* cannot listen at 192.0.2.1"):
        host.listen("192.0.2.1", 29500, must=True)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError, match="a port that is free"):
        host.listen("127.0.0.1", taken.getsockname()[1], must=True)


def test_a_name_that_only_this_machine_knows_as_itself_is_refused(monkeypatch: pytest.MonkeyPatch):
    loopback = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", free_port()))]  # as on Debian
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: loopback)
    with pytest.raises(UserError, match=r"MASTER_ADDR=node0 is 127.0.1.1 on this machine"):
        host.listen("node0", 29500, must=True)


class Trap:
    """Unpickled, it would leave a trace."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("import titanlite.launch.messages as m; m.TRAPPED = True",))


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
            except OSError as error:  # which may come before all is sent
                if error.errno not in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN):
                    raise
    assert not hasattr(messages, "TRAPPED")
    second = node(port, 1)
    assert [heard(each, Start).node for each in (first, second)] == [0, 1]


@pytest.mark.parametrize("line", STRANGE[:5] + STRANGE[7:])
def test_a_line_that_is_no_message_is_a_value_error(line: bytes):
    with pytest.raises(ValueError, match="validation error for"):
        decode(line)


def test_messages_arrive_as_they_were_sent():
    for message in (Join(rank=None, name="é", port=1, world="w"), Regroup(joined=True), Lost(name="b"), Failed()):
        assert decode(encode(message)) == message
        assert json.loads(encode(message))["kind"] == message.kind


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
    monkeypatch.setattr(host, "LAST_CALL", 0.2)
    port = free_port()
    first, second = node(port, 0, 1, 2), node(port, 1, 1, 2)
    assert heard(first, Start).nodes == heard(second, Start).nodes == 2
    assert second._connection is not None
    second._connection.close()
    assert "NODE_RANK=1" in heard(first, Lost).name
    first.join()
    assert heard(first, Start).nodes == 1


def test_those_that_run_make_room_for_a_node_that_joins_late(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "LAST_CALL", 0.2)
    port = free_port()
    first = node(port, 0, 1, 2)
    assert heard(first, Start).nodes == 1
    second = node(port, 1, 1, 2)
    assert heard(first, Regroup).joined
    first.join()
    assert [heard(each, Start).node for each in (first, second)] == [0, 1]
    spare = node(port, 2, 1, 2)  # there is no room for it
    assert heard(spare, Spare)
    assert first.hear() == []


def test_all_start_anew_when_the_workers_of_one_fail():
    port = free_port()
    first, second = node(port, 0), node(port, 1)
    assert heard(first, Start).nodes == heard(second, Start).nodes == 2
    second.join()
    assert not heard(first, Regroup).joined
    first.join()
    assert [heard(each, Start).node for each in (first, second)] == [0, 1]


def test_a_node_that_ends_the_run_says_so_to_all():
    port = free_port()
    first, second = node(port, 0), node(port, 1)
    assert heard(first, Start).nodes == heard(second, Start).nodes == 2
    second.leave(3)
    assert heard(first, Closed).code == 3
    first.join()  # it would have liked to go on
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
    monkeypatch.setattr(host, "LOST_AFTER", 1.0)
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
        other.sendall(encode(Join(rank=1, name="n" * 300, port=0, world="w" * 300)))
        assert b"n" * 300 in other.recv(4096)
    assert first.connected


# ------------------------------------------------------------------------------------------------- come, gone, again


def cut(made: Node) -> None:
    """End the connection of a node without a word."""
    assert made._connection is not None
    made._connection.close()


def test_a_node_that_is_gone_before_all_have_met_leaves_its_number_to_the_next():
    port = free_port()
    first, gone = node(port, 0, 3, 3), node(port, 1, 3, 3)
    cut(gone)
    others = [node(port, rank, 3, 3) for rank in (2, 1)]
    assert [heard(each, Start).node for each in (first, *others)] == [0, 2, 1]


def test_a_node_that_ends_while_it_waits_ends_the_wait_of_the_others():
    port = free_port()
    first, second = node(port, 0, 3, 3), node(port, 1, 3, 3)
    second.leave(143)  # a signal
    assert heard(first, Closed).code == 143
    assert heard(node(port, 2, 3, 3), Closed).code == 143  # it comes afterwards


def test_a_node_that_is_started_again_takes_its_place_before_the_old_connection_is_missed():
    port = free_port()
    first, old = node(port, 0), node(port, 1)
    assert [heard(each, Start).node for each in (first, old)] == [0, 1]
    new = node(port, 1)
    lost, regroup = all_heard(first, Lost, Regroup)
    assert ("NODE_RANK=1" in lost.name, regroup.joined) == (True, True)
    assert "the first node" in heard(old, Lost).name  # if it is alive, it ends
    old.leave(1)
    first.join()
    assert [heard(each, Start).node for each in (first, new)] == [0, 1]


def test_a_run_starts_with_the_hosts_node_even_if_others_are_faster():
    port = free_port()
    server = host.listen("127.0.0.1", port, must=True)
    assert server is not None
    host.Host(server, 2, 2)
    others = [node(port, None) for _ in range(2)]  # as many as the run needs
    with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as first:
        first.sendall(encode(Join(rank=None, name="first", port=4321, world=others[0]._world)))
        assert decode(first.recv(4096)) == Start(node=0, nodes=2, port=4321)
    assert (heard(others[0], Start).node, heard(others[1], Spare)) == (1, Spare())


def test_a_spare_is_no_part_of_the_run_until_it_starts():
    port = free_port()
    there = [node(port, None) for _ in range(2)]
    assert [heard(each, Start).node for each in there] == [0, 1]
    interrupted, spare = node(port, None), node(port, None)
    assert heard(interrupted, Spare) == heard(spare, Spare)
    interrupted.leave(130)
    assert [each.hear() for each in there] == [[], []]
    cut(there[1])
    assert isinstance(heard(there[0], Lost), Lost)
    there[0].join()
    assert [heard(each, Start).node for each in (there[0], spare)] == [0, 1]
    spare.leave(3)
    assert heard(there[0], Closed).code == 3


# ------------------------------------------------------------------------------------------------- strangers


def test_connections_that_say_nothing_make_room_for_new_ones(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "SPARES", 4)
    monkeypatch.setattr(host, "LOST_AFTER", 1000)  # it is not their silence that ends them
    port = free_port()
    first = node(port, 0)
    strangers = [socket.create_connection(("127.0.0.1", port), timeout=SECONDS) for _ in range(20)]
    for stranger in strangers[: 20 - 6]:
        assert has_ended(stranger)
    second = node(port, 1)
    assert [heard(each, Start).node for each in (first, second)] == [0, 1]
    for stranger in strangers:
        stranger.close()


def test_more_nodes_than_a_run_could_need_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "SPARES", 1)
    port = free_port()
    there = [node(port, None) for _ in range(3)]
    surplus = node(port, None)
    assert "3 nodes have come, and 2 are needed" in heard(surplus, Closed).reason
    surplus.leave(UserError.exit_code)
    assert there[0].connected
    assert [heard(each, kind) is not None for each, kind in zip(there, (Start, Start, Spare), strict=True)] == [
        True
    ] * 3
    assert there[0].hear() == []


def test_a_connection_that_does_not_begin_with_a_join_is_ended():
    port = free_port()
    first = node(port, 0)
    for message in (Present(), Failed(), Start(node=0, nodes=1, port=1), Closed(name="me", code=0)):
        with socket.create_connection(("127.0.0.1", port), timeout=SECONDS) as stranger:
            stranger.sendall(encode(message))
            assert has_ended(stranger)
    assert first.hear() == []


def test_a_refused_node_that_does_not_leave_is_put_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "LOST_AFTER", 1.0)
    port = free_port()
    first = node(port, 0)
    refused = node(port, 1, workers=7)
    all_heard(refused, Closed, Lost)  # the host is lost to it
    assert first.hear() == []


@pytest.mark.slow
def test_a_node_that_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host, "UNREAD", 0)
    monkeypatch.setattr(network, "LOST_AFTER", 1000)  # the kernel would end the connection, too, but later
    port = free_port()
    there = [node(port, rank) for rank in (0, 1)]
    assert [heard(each, Start).node for each in there] == [0, 1]
    line = encode(Join(rank=None, name="deaf", port=0, world=there[0]._world))  # answered each time: it is a spare
    deaf = socket.socket()
    deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.settimeout(SECONDS)
    deaf.connect(("127.0.0.1", port))
    deadline = time.monotonic() + 4 * SECONDS
    try:
        while time.monotonic() < deadline:
            deaf.sendall(line * 1000)
        raise AssertionError("it was not cut off")
    except (ConnectionResetError, BrokenPipeError):
        pass
    deaf.close()
    assert [each.hear() for each in there] == [[], []]


@pytest.mark.parametrize(("most", "said"), [(2, "open files"), (2000, "NNODES=2000")])
def test_a_system_that_allows_too_few_connections_is_said_so(most: int, said: str):
    program = f"""
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
from titanlite.launch.node import Node
Node("127.0.0.1", {free_port()}, 0, 2, {most}, 1).connect()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert "UserError" in ended.stderr
    assert said in ended.stderr


def test_the_host_raises_the_limit_of_open_files_where_it_may():
    program = f"""
import resource
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
from titanlite.launch.node import Node
Node("127.0.0.1", {free_port()}, 0, 2, 200, 1).connect()
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= 2 * 200)
"""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 1000:
        pytest.skip("the limit of this machine is low")
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.stderr) == ("True\n", "")
