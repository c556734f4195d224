"""The end of the workers is the end of the launcher: exit codes, signals, and the root cause of a crash first."""

import contextlib
import errno
import fcntl
import os
import pty
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
from ranks import free_port

from titanlite.config.errors import UserError
from titanlite.launch.agent import Saved, World, run_workers
from titanlite.launch.messages import Closed, Regroup, Start, encode
from titanlite.launch.verdict import End, explain

LAUNCHER = """
import os, sys
from titanlite.launch.agent import World, run_workers
sys.exit(run_workers(sys.argv[2:], World(int(sys.argv[1]), stop_seconds=float(os.environ.get("STOP_SECONDS", "60")))))
"""

WORKER = """
import os, pathlib, resource, shutil, signal, sys, time
from titanlite.runtime import process
process.begin()
from titanlite.cli import run_quietly
from titanlite.config.errors import ERROR_FOLDER, GuardError, StoppedBySignal

rank = int(os.environ["RANK"])

def ready():
    both = pathlib.Path(os.environ[ERROR_FOLDER], "ready.json")
    if rank == 1:
        both.touch()
    else:
        while not both.exists():
            time.sleep(0.01)
        print("ready", flush=True)

def guard():
    raise GuardError("loss is nan at step 5")

def folder_gone():
    shutil.rmtree(os.environ[ERROR_FOLDER], ignore_errors=True)
    raise GuardError("loss is nan at step 5")

def disk_full():
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    raise GuardError("loss is nan at step 5")

def guard_on_one():
    if rank == 1:
        raise GuardError("loss is nan on one rank")
    time.sleep(0.5)
    raise RuntimeError("connection reset by peer")

def crash():
    if rank == 1:
        raise ValueError("the root cause")
    time.sleep(0.2)
    raise RuntimeError("connection reset by peer")

def hang():
    if rank == 1:
        raise ValueError("the root cause")
    time.sleep(300)

def out_of_memory():
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("connection reset by peer")

def save():
    got = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: got.append(number))
    ready()
    while not got:
        time.sleep(0.02)
    time.sleep(0.3 + rank)  # ranks do not finish at the same time
    raise StoppedBySignal(f"saved after {len(got)} signal")

def stuck():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: None)
    ready()
    time.sleep(300)

def early():
    ready()
    time.sleep(300)

def orphan():
    signal.signal(signal.SIGTERM, lambda number, frame: (open(f"saved{rank}", "w").close(), sys.exit()))
    ready()
    time.sleep(300)

def shown():
    print(f"out {rank} {sys.stdout.isatty()} {os.environ['WORLD_SIZE']}", flush=True)
    print(f"err {rank}", file=sys.stderr, flush=True)

sys.exit(run_quietly(globals()[sys.argv[1]]))
"""


@pytest.fixture
def command(tmp_path: Path) -> Iterator[list[str]]:
    # A launcher inherits that SIGHUP is ignored, from nohup, say; a handler it does not.
    before = signal.signal(signal.SIGHUP, lambda number, frame: None)
    (tmp_path / "launcher.py").write_text(LAUNCHER)
    (tmp_path / "worker.py").write_text(WORKER)
    yield [sys.executable, str(tmp_path / "launcher.py"), "2", str(tmp_path / "worker.py")]
    signal.signal(signal.SIGHUP, before)


def run(command: list[str], how: str) -> tuple[int, str]:
    """Exit code and standard error of the launcher."""
    ended = subprocess.run([*command, how], capture_output=True, text=True, timeout=60, check=False)
    return ended.returncode, ended.stderr


@pytest.mark.slow
def test_a_known_end_of_all_ranks_is_said_once(command: list[str]):
    assert run(command, "guard") == (3, "loss is nan at step 5\n")


@pytest.mark.slow
@pytest.mark.parametrize("how", ["folder_gone", "disk_full"])
def test_a_known_end_stays_known_where_workers_cannot_report_it(how: str, command: list[str]):
    assert run(command, how) == (3, 2 * "loss is nan at step 5\n")


@pytest.mark.slow
def test_the_known_end_of_one_rank_explains_the_failures_of_the_others(command: list[str]):
    said = "loss is nan on one rank\nThen rank 0 failed: RuntimeError: connection reset by peer\n"
    assert run(command, "guard_on_one") == (3, said)


@pytest.mark.slow
def test_a_crash_is_one_traceback_with_the_rank_and_the_root_cause_first(command: list[str]):
    code, said = run(command, "crash")
    assert code == 1
    assert said.startswith("Rank 1 failed first: it ended with exit code 1.\nTraceback")
    assert said.endswith("ValueError: the root cause\nThen rank 0 failed: RuntimeError: connection reset by peer\n")
    assert said.count("Traceback") == 1


@pytest.mark.slow
def test_ranks_that_wait_for_a_crashed_one_are_not_waited_for(command: list[str]):
    start = time.monotonic()
    code, said = run(command, "hang")
    assert time.monotonic() - start < 20  # torchrun alone needs 30 s
    assert code == 1
    assert said.endswith("ValueError: the root cause\nThen rank 0 did not end by itself and was killed.\n")


@pytest.mark.slow
def test_a_killed_rank_comes_before_the_failures_that_follow_from_it(command: list[str]):
    code, said = run(command, "out_of_memory")
    assert code == 128 + signal.SIGKILL
    assert said.startswith("Rank 1 failed first: it was killed (SIGKILL).")
    assert said.endswith("Then rank 0 failed: RuntimeError: connection reset by peer\n")


def start(command: list[str], how: str) -> "subprocess.Popen[str]":
    """The launcher, with both ranks at work."""
    launcher = subprocess.Popen([*command, how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "ready\n"
    return launcher


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_reaches_each_worker_once_and_they_finish(number: signal.Signals, command: list[str]):
    launcher = start(command, "save")
    launcher.send_signal(number)
    _, said = launcher.communicate(timeout=30)
    assert launcher.returncode == 75
    assert said.splitlines()[1:] == [
        "Stopping after this step and a save. Ctrl-C again stops at once, without saving.",
        "saved after 1 signal",
    ]


@pytest.mark.slow
def test_workers_that_take_too_long_to_stop_are_killed(command: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STOP_SECONDS", "1")
    launcher = start(command, "stuck")
    launcher.send_signal(signal.SIGTERM)
    _, said = launcher.communicate(timeout=30)
    assert launcher.returncode == 128 + signal.SIGTERM
    assert said.endswith("Stopped by SIGTERM without a save: ranks 0, 1 had to be killed.\n")


@pytest.mark.slow
def test_a_second_interrupt_stops_at_once(command: list[str]):
    launcher = start(command, "stuck")
    launcher.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert launcher.poll() is None
    start_of_stop = time.monotonic()
    launcher.send_signal(signal.SIGINT)
    _, said = launcher.communicate(timeout=30)
    assert time.monotonic() - start_of_stop < 5
    assert launcher.returncode == 130
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_workers_without_anything_to_save_stop_without_a_traceback(number: signal.Signals, command: list[str]):
    launcher = start(command, "early")
    launcher.send_signal(number)
    _, said = launcher.communicate(timeout=30)
    assert launcher.returncode == 128 + number
    assert said.endswith(f"\nStopped by {number.name} before there was anything to save.\n")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the signal of a dead parent is Linux's")
def test_workers_save_and_stop_when_their_launcher_is_killed(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # a killed launcher leaves its folder behind
    launcher = start(command, "orphan")
    launcher.kill()
    launcher.wait(timeout=10)
    saved = [tmp_path / "saved0", tmp_path / "saved1"]
    deadline = time.monotonic() + 10
    while not all(file.exists() for file in saved):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_the_shown_rank_keeps_the_terminal_and_whole_lines_of_errors_of_all_ranks_are_seen(
    command: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")  # of a container, say
    main, terminal = pty.openpty()
    launcher = subprocess.Popen([*command, "shown"], stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    assert launcher.wait(timeout=60) == 0
    lines = sorted(os.read(main, 10000).decode().split("\r\n"))
    os.close(main)
    assert lines == ["", "err 0", "err 1", "out 0 True 2"]


@pytest.mark.slow
@pytest.mark.parametrize("node_ranks", [(0, 1), (None, None)], ids=["numbered", "numbered by themselves"])
def test_two_nodes_meet_at_the_master(node_ranks: tuple[int | None, int | None], tmp_path: Path):
    worker = tmp_path / "worker.py"
    worker.write_text("import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['GROUP_RANK'])")
    launcher = """
        import sys
        from titanlite.launch.agent import World, run_workers
        node = None if sys.argv[2] == "None" else int(sys.argv[2])
        sys.exit(run_workers([sys.argv[1]], World(1, 2, node, "localhost", int(sys.argv[3]), (0, 1))))
    """
    (tmp_path / "launcher.py").write_text(textwrap.dedent(launcher))
    port = str(free_port())
    nodes = [
        subprocess.Popen(
            [sys.executable, tmp_path / "launcher.py", worker, str(rank), port], stdout=subprocess.PIPE, text=True
        )
        for rank in node_ranks
    ]
    outputs = [node.communicate(timeout=90)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    assert sorted(outputs) == ["0 2 0\n", "1 2 1\n"]
    if node_ranks[0] is not None:
        assert outputs == ["0 2 0\n", "1 2 1\n"]


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
@pytest.mark.parametrize("saved", [True, False])
def test_a_node_that_is_lost_is_no_crash_where_the_run_is_saved(
    restarts: str, lost: int, saved: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in {"MAX_RESTARTS": restarts, "MEET_SECONDS": "10", **({"SAVED": "1"} if saved else {})}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    nodes = start_two_nodes(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(300)")
    workers = [int(node.stdout.readline()) for node in nodes if node.stdout]
    for pid in (nodes[lost].pid, workers[lost], workers[1 - lost]):  # what is left cannot reach the other ranks
        os.kill(pid, signal.SIGKILL)
    _, said = nodes[1 - lost].communicate(timeout=60)
    nodes[lost].communicate()
    assert nodes[1 - lost].returncode == (75 if saved else 1)
    assert "did not meet" not in said
    assert f"Lost: {'the first node' if lost == 0 else socket.gethostname()}" in said
    assert said.endswith("To go on: ...\n")


@pytest.mark.slow
def test_nodes_that_never_meet_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MEET_SECONDS", "1")
    (tmp_path / "launcher.py").write_text(RESTARTING)
    for node, why in (("0", "too few have come"), ("1", "Connection refused")):
        command = [sys.executable, str(tmp_path / "launcher.py"), node, str(20000 + os.getpid() % 10000), "x"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 2
        assert f"2 nodes did not meet at MASTER_ADDR=localhost, MASTER_PORT={command[3]}: {why}." in ended.stderr


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
def test_no_signal_is_forgotten_between_the_meeting_and_the_start_of_the_workers(tmp_path: Path):
    """There is no worker yet to which it could be passed on."""
    program = """
        import os, signal, sys
        from titanlite.launch import agent
        loopback = agent.loopback_interface
        agent.loopback_interface = lambda: os.kill(os.getpid(), signal.SIGTERM) or loopback()
        sys.exit(agent.run_workers(["-c", "open('started', 'w')"], agent.World(1)))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (143, "Stopped by SIGTERM before the workers were started.\n")
    assert list(tmp_path.iterdir()) == []


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
def test_what_a_killed_launcher_leaves_is_removed_once_its_workers_have_ended(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    mine = tmp_path / "titanlite-run-of-mine"  # named alike, but it holds what no run has made
    mine.mkdir()
    (mine / "results.csv").write_text("")
    launcher = start(command, "stuck")
    (left,) = set(tmp_path.glob("titanlite-run-*")) - {mine}
    assert left.stat().st_mode & 0o777 == 0o700
    listed = subprocess.run(["pgrep", "-P", str(launcher.pid)], capture_output=True, text=True, check=True).stdout
    launcher.kill()
    launcher.wait(timeout=20)
    assert run(command, "shown")[0] == 0
    assert left.exists()  # a worker is still there
    for pid in listed.split():
        os.kill(int(pid), signal.SIGKILL)
    deadline = time.monotonic() + 20
    while left.exists():  # it takes a moment until they are gone
        assert run(command, "shown")[0] == 0
        assert time.monotonic() < deadline
    assert [path.name for path in tmp_path.glob("titanlite-run-*")] == [mine.name]


@pytest.mark.slow
def test_a_node_that_another_one_leaves_for_good_says_so(tmp_path: Path):
    fails = "import os, sys, time; rank = int(os.environ['RANK']); time.sleep(5 * (1 - rank)); sys.exit(1 + rank)"
    nodes = start_two_nodes(tmp_path, fails)
    said = [node.communicate(timeout=60)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [2, 2]
    host = socket.gethostname()
    assert said[0] == f"{host} has ended the run with exit code 2; its own output says why.\n"


# ------------------------------------------------------------------------------------------------------- what is said


HOSTILE = r"""
import json, os, pathlib, sys
from titanlite.config.errors import ERROR_FOLDER
folder = pathlib.Path(os.environ[ERROR_FOLDER])
if os.environ["RANK"] == "0":
    sys.exit()
record = {"message": "a tensor\x1b[2J named\r\u202e", "closing": "go on\x07 so", "time": 0.0}
folder.joinpath("1.json").write_text(json.dumps(record))
folder.joinpath("train.log").write_text("run.log")
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [3, 1])
def test_what_files_say_cannot_command_a_terminal_or_forge_a_line_of_the_log(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The launcher trusts no worker to have escaped what it quotes, and says names of folders itself."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "worker.py").write_text(HOSTILE)
    saved = Saved(how_to_go_on=lambda: "never asked")
    assert run_workers(["worker.py", str(code)], World(2), saved) == code
    said, log = capsys.readouterr().err, (tmp_path / "run.log").read_text()
    for text in (said, log):
        assert "a tensor\\x1b[2J named\\x0d\\u202e\n" in text
        assert "go on\\x07 so" in text
        assert text.replace("\n", "").isprintable()
    first, *others = log.splitlines()
    assert first.startswith("[")  # the time
    assert all(line.startswith("    ") for line in others)


def test_the_launchers_own_words_on_how_to_go_on_are_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    worker = "import os, pathlib; pathlib.Path(os.environ['TITANLITE_ERROR_FOLDER'], 'train.log').write_text('run.log')"
    saved = Saved(how_to_go_on=lambda: "To go on: outputs/\x1b]0;mine\x07")
    assert run_workers(["-c", f"{worker}; os._exit(9)"], World(1), saved) == 9
    assert "To go on: outputs/\\x1b]0;mine\\x07\n" in capsys.readouterr().err


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EMFILE])
def test_a_temporary_folder_that_cannot_be_locked_is_said_once(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked: list[object] = []

    def refuse(*of: object) -> None:
        asked.append(of)
        assert len(asked) == 1  # it tried for ever
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(UserError, match=r"a run needs a folder there: .* Set TMPDIR"):
        run_workers([], World(1))
    assert not list(tmp_path.iterdir())


def test_a_temporary_folder_that_is_gone_is_said_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", "/nonexistent")
    with pytest.raises(UserError, match="/nonexistent: a run needs a folder there"):
        run_workers([], World(1))


def test_different_reasons_are_said_with_their_ranks():
    ends = [End(0, 4, 1.0, "no disk"), End(2, 4, 1.1, "no disk"), End(1, 4, 1.2, "no file")]
    assert explain(ends, None, set()) == ("[ranks 0, 2] no disk\n[rank 1] no file", 4)


def test_the_first_known_end_decides():
    assert explain([End(1, 4, 1.0, "a"), End(0, 2, 2.0, "b")], None, set())[1] == 4
    assert explain([End(1, 1, 1.0, "a"), End(0, 75, 2.0, "b")], signal.SIGINT, set())[1] == 75


def test_a_worker_that_said_nothing_is_told_by_its_code():
    assert explain([End(3, 7, 1.0, None)], None, set()) == ("Rank 3 failed first: it ended with exit code 7.", 7)
    text, code = explain([End(3, -signal.SIGSEGV, 1.0, None)], None, set())
    assert (text, code) == ("Rank 3 failed first: it ended with SIGSEGV.", 139)


def test_a_stop_before_there_is_anything_to_save_is_no_crash():
    said = "Stopped by SIGUSR1 before there was anything to save."
    assert explain([End(0, -signal.SIGUSR1, 1.0, None)], signal.SIGUSR1, set()) == (said, 138)


def test_ranks_that_could_not_save_in_time_are_named():
    ends = [End(rank, -signal.SIGKILL, 1.0, None) for rank in (1, 0)]
    assert explain(ends, signal.SIGTERM, {0, 1}) == (
        "Stopped by SIGTERM without a save: ranks 0, 1 had to be killed.",
        143,
    )


def test_a_crash_while_stopping_is_not_hidden():
    text, code = explain([End(0, 1, 1.0, "ValueError: x"), End(1, -9, 2.0, None)], signal.SIGINT, {1})
    assert code == 1
    assert "ValueError: x" in text
