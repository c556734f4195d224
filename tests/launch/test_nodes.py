"""Launchers of several nodes, as processes of this machine: who comes late, fails, is lost or is not needed."""

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import IO

import pytest
from ranks import free_port

from titanlite.launch.messages import Closed, Regroup, Start, encode

RESTARTING = """
import os, sys
from titanlite.launch.agent import Saved, World, run_workers
from titanlite.config.errors import UserError
node, port, *worker = sys.argv[1:]
restarts, seconds = int(os.environ.get("MAX_RESTARTS", "3")), float(os.environ.get("MEET_SECONDS", "900"))
saved = Saved(lambda: "SAVED" in os.environ, lambda: "To go on: ...")
rank = None if node == "None" else int(node)
world = World(1, 2, rank, "localhost", int(port), (0, 1), max_restarts=restarts, meet_seconds=seconds)
try:
    sys.exit(run_workers(worker, world, saved))
except UserError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""


class Nodes:
    """Launchers that may restart, with a worker each, and the port where they meet."""

    def __init__(self, folder: Path, worker: str) -> None:
        self.port = free_port()
        self._folder = folder
        (folder / "launcher.py").write_text(RESTARTING)
        (folder / "worker.py").write_text(worker)

    def start(self, rank: int | None, *prefix: str) -> "subprocess.Popen[str]":
        words = [self._folder / "launcher.py", rank, self.port, self._folder / "worker.py"]
        return subprocess.Popen(
            [*prefix, sys.executable, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )


def start_two_nodes(tmp_path: Path, worker: str) -> list["subprocess.Popen[str]"]:
    nodes = Nodes(tmp_path, worker)
    return [nodes.start(0), nodes.start(1)]


def wait_for_line(stream: IO[str] | None, text: str) -> None:
    """Read until a line has this text."""
    assert stream is not None
    lines = iter(stream.readline, "")
    assert any(text in line for line in lines), f"nobody said {text!r}"


@pytest.mark.slow
@pytest.mark.parametrize("node_ranks", [(0, 1), (None, None)], ids=["numbered", "numbered by themselves"])
def test_two_nodes_meet_at_the_master(node_ranks: tuple[int | None, int | None], tmp_path: Path):
    worker = "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['GROUP_RANK'])"
    nodes = Nodes(tmp_path, worker)
    started = [nodes.start(rank) for rank in node_ranks]
    outputs = [node.communicate(timeout=90)[0] for node in started]
    assert [node.returncode for node in started] == [0, 0]
    assert sorted(outputs) == ["0 2 0\n", "1 2 1\n"]
    if node_ranks[0] is not None:
        assert outputs == ["0 2 0\n", "1 2 1\n"]


@pytest.mark.slow
@pytest.mark.parametrize("saved", [True, False])
def test_a_signal_while_a_lost_node_is_waited_for_ends_the_wait(
    saved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if saved:
        monkeypatch.setenv("SAVED", "1")
    nodes = start_two_nodes(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(300)")
    workers = [int(node.stdout.readline()) for node in nodes if node.stdout]
    nodes[1].kill()
    for worker in reversed(workers):
        os.kill(worker, signal.SIGKILL)
    wait_for_line(nodes[0].stderr, "Starting again")
    time.sleep(1)
    nodes[0].send_signal(signal.SIGTERM)
    _, said = nodes[0].communicate(timeout=20)
    nodes[1].communicate()
    assert said == "Stopped by SIGTERM before the workers were started again.\nTo go on: ...\n"
    assert nodes[0].returncode == (75 if saved else 128 + signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize(("restarts", "lost"), [("0", 1), ("2", 1), ("2", 0)])
def test_a_node_that_is_lost_is_no_crash_where_the_run_is_saved(
    restarts: str, lost: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A run that is saved, and one that is not: both wait for the lost node at the same time."""
    for name, value in {"MAX_RESTARTS": restarts, "MEET_SECONDS": "10", "TMPDIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    left = {}
    for code in (1, 75):
        if code == 75:
            monkeypatch.setenv("SAVED", "1")
        nodes = start_two_nodes(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(300)")
        workers = [int(node.stdout.readline()) for node in nodes if node.stdout]
        for pid in (nodes[lost].pid, workers[lost], workers[1 - lost]):  # what is left cannot reach the other ranks
            os.kill(pid, signal.SIGKILL)
        nodes[lost].communicate()
        left[code] = nodes[1 - lost]
    for code, node in left.items():
        _, said = node.communicate(timeout=60)
        assert node.returncode == code
        assert "did not meet" not in said
        assert f"Lost: {'the first node' if lost == 0 else socket.gethostname()}" in said
        assert said.endswith("To go on: ...\n")


@pytest.mark.slow
def test_nodes_that_never_meet_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MEET_SECONDS", "1")
    nodes = Nodes(tmp_path, "")
    for rank, why in ((0, "too few have come"), (1, "Connection refused")):
        node = nodes.start(rank)
        said = node.communicate(timeout=60)[1]
        assert node.returncode == 2
        assert f"2 nodes did not meet at MASTER_ADDR=localhost, MASTER_PORT={nodes.port}: {why}." in said


@pytest.mark.slow
def test_a_first_node_that_is_started_again_finds_those_that_wait(tmp_path: Path):
    nodes = Nodes(tmp_path, "")
    with socket.create_server(("127.0.0.1", nodes.port)) as killed:  # of a first node that a SIGKILL ends
        second = nodes.start(1)
        other = killed.accept()[0]
        assert b"join" in other.recv(4096)
        other.sendall(b'{"kind": ')
        other.close()
    first = nodes.start(0)
    for each in (first, second):
        assert (each.communicate(timeout=60)[1], each.returncode) == ("", 0)


@pytest.mark.slow
def test_a_signal_while_nodes_are_waited_for_is_said_to_them(tmp_path: Path):
    nodes = Nodes(tmp_path, "")
    with socket.create_server(("127.0.0.1", nodes.port)) as server:  # the first node, at which two others have come
        server.settimeout(60)
        second = nodes.start(1)
        connection, _ = server.accept()
        connection.recv(4096)
        second.send_signal(signal.SIGTERM)
        while b"closed" not in (line := connection.recv(4096)):
            assert line
        assert b'"code":143' in line
        connection.close()
    assert second.communicate(timeout=20)[1] == "Stopped by SIGTERM before the workers were started.\n"
    assert second.returncode == 143


@pytest.mark.slow
def test_what_comes_together_with_the_start_is_not_forgotten(tmp_path: Path):
    """A node may join in the moment in which the others start: they must save, and make room for it."""
    nodes = Nodes(tmp_path, "import time; from titanlite.runtime import process; process.begin(); time.sleep(300)")
    with socket.create_server(("127.0.0.1", nodes.port)) as server:
        server.settimeout(60)
        second = nodes.start(1)
        connection, _ = server.accept()
        connection.settimeout(60)
        with connection.makefile("rb") as lines:
            assert b"join" in lines.readline()
            connection.sendall(encode(Start(node=1, nodes=2, port=1)) + encode(Regroup(joined=True)))
            assert b"join" in lines.readline()
            connection.sendall(encode(Closed(name="node0", code=3)))
            assert b"closed" in lines.readline()
        connection.close()
    said = second.communicate(timeout=60)[1]
    assert said.startswith("Another node has joined: saving, and starting again with it.\n")
    assert said.endswith("node0 has ended the run with exit code 3; its own output says why.\n")
    assert second.returncode == 3


CRASHES_ONCE = """
import os, sys, time
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
print("attempt", attempt, flush=True)
if attempt == 0 and os.environ["RANK"] == "1":
    sys.exit(7)
time.sleep(300 * (attempt == 0))
"""


@pytest.mark.slow
def test_the_workers_of_all_nodes_start_again_when_one_crashes(tmp_path: Path):
    nodes = start_two_nodes(tmp_path, CRASHES_ONCE)
    for node, why in zip(
        nodes, ("Workers of another node failed", "Rank 1 failed first: it ended with exit code 7"), strict=True
    ):
        out, said = node.communicate(timeout=60)
        assert (node.returncode, out) == (0, "attempt 0\nattempt 1\n")
        assert said.startswith(why)
        assert said.endswith("Starting again from the newest checkpoint (2 restarts left).\n")


@pytest.mark.slow
def test_a_spare_node_waits_as_long_as_the_run_takes_and_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MEET_SECONDS", "3")
    worker = "import os, time; print(os.getpid(), flush=True)\nwhile not os.path.exists('done'): time.sleep(0.1)"
    monkeypatch.chdir(tmp_path)
    nodes = Nodes(tmp_path, worker)
    running = [nodes.start(None), nodes.start(None)]
    for node in running:
        assert node.stdout is not None
        node.stdout.readline()
    interrupted, spare = nodes.start(None), nodes.start(None)
    for each in (interrupted, spare):
        wait_for_line(each.stderr, "the run has them all, and this one waits until it is needed")
    interrupted.send_signal(signal.SIGINT)
    interrupted.communicate(timeout=20)
    assert interrupted.returncode == 130
    time.sleep(4)  # longer than nodes may take to meet
    assert [node.poll() for node in (*running, spare)] == [None] * 3
    (tmp_path / "done").touch()
    assert "this node was not needed" in spare.communicate(timeout=20)[1]
    assert [node.wait(timeout=20) for node in (*running, spare)] == [0, 0, 0]
    for node in running:
        node.communicate()


STRANGER = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
held = []
for number in range(10_000):
    held.append(socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=60))
    if number % 3 == 0:
        held[-1].send(b'{"kind": ')
    if number == 1000:
        print("there", flush=True)
print("all", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in Linux's /proc")
def test_ten_thousand_connections_of_a_stranger_keep_no_node_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 11_000:
        pytest.skip("a stranger on this machine cannot have so many")
    monkeypatch.chdir(tmp_path)
    worker = "import os, time; print('met', flush=True)\nwhile not os.path.exists('done'): time.sleep(0.1)"
    nodes = Nodes(tmp_path, worker)
    first = nodes.start(0, "bash", "-c", 'ulimit -n 512; exec "$@"', "launcher")
    while True:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", nodes.port)).close()
            break
        assert first.poll() is None
        time.sleep(0.1)
    command = [sys.executable, "-c", STRANGER, str(nodes.port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as stranger:
        wait_for_line(stranger.stdout, "there")
        second = nodes.start(1)  # while they come
        wait_for_line(stranger.stdout, "all")
        for node in (first, second):
            wait_for_line(node.stdout, "met")
        assert len(list(Path(f"/proc/{first.pid}/fd").iterdir())) < 200
        (tmp_path / "done").touch()
        for node in (first, second):
            assert (node.communicate(timeout=60)[1], node.returncode) == ("", 0)
        stranger.communicate()


@pytest.mark.slow
def test_the_run_takes_in_a_node_that_comes_back(tmp_path: Path):
    """Workers are told to save, and start again with it; no restart is used up."""
    launcher = """
        import sys
        from titanlite.launch import host
        from titanlite.launch.agent import World, run_workers
        host.LAST_CALL = 1.0
        node, port = int(sys.argv[2]), int(sys.argv[3])
        sys.exit(run_workers([sys.argv[1]], World(1, 2, node, "localhost", port, (0, 1), min_nodes=1)))
    """
    worker = """
        import os, signal, sys, time
        from titanlite.runtime import process
        def save(number, frame):
            print("saved", flush=True)
            sys.exit(75)
        signal.signal(signal.SIGTERM, save)
        process.begin()
        print("world", os.environ["WORLD_SIZE"], flush=True)
        if os.environ["WORLD_SIZE"] == "1":
            time.sleep(300)
    """
    (tmp_path / "launcher.py").write_text(textwrap.dedent(launcher))
    (tmp_path / "worker.py").write_text(textwrap.dedent(worker))
    command = [sys.executable, tmp_path / "launcher.py", tmp_path / "worker.py"]
    port = str(free_port())
    nodes = [subprocess.Popen([*command, "0", port], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)]
    assert nodes[0].stdout is not None
    assert nodes[0].stdout.readline() == "world 1\n"
    nodes.append(subprocess.Popen([*command, "1", port], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    outputs = [node.communicate(timeout=60)[0] for node in nodes]
    assert outputs == ["saved\nworld 2\n", "world 2\n"]
    assert [node.returncode for node in nodes] == [0, 0]


@pytest.mark.slow
def test_a_node_that_another_one_leaves_for_good_says_so(tmp_path: Path):
    fails = "import os, sys, time; rank = int(os.environ['RANK']); time.sleep(5 * (1 - rank)); sys.exit(1 + rank)"
    nodes = start_two_nodes(tmp_path, fails)
    said = [node.communicate(timeout=60)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [2, 2]
    host = socket.gethostname()
    assert said[0] == f"{host} has ended the run with exit code 2; its own output says why.\n"
