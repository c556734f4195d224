"""Who may speak to a run: on one machine nobody on another one; with several, what a stranger writes is data."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from test_mishaps import JOB

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads the sockets of processes from Linux's /proc"),
]
LISTENS = "0A"  # in /proc/net/tcp


def descendants(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout
    return [pid, *(descendant for child in found.split() for descendant in descendants(int(child)))]


def sockets_of(pid: int) -> set[str]:
    """Inodes of its open sockets."""
    links = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            links.append(os.readlink(descriptor))
    return {link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:[")}


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """Hexadecimal addresses and ports at which these processes listen, or receive datagrams."""
    inodes = set().union(*(sockets_of(pid) for pid in pids))
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pids[0]}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and (fields[3] == LISTENS or table.startswith("udp")):
                address, port = fields[1].split(":")
                found.add((address, int(port, 16)))
    return found


def is_loopback(address: str) -> bool:
    """Of a hexadecimal address as /proc shows it: 127.x.x.x or ::1, or one of the first within the second."""
    if len(address) == 8:
        return address.endswith("7F")
    return address == "00000000000000000000000001000000" or (address[:16], address[-2:]) == ("0" * 16, "7F")


@contextlib.contextmanager
def training(
    folder: Path, ranks: int, prefix: Sequence[str] = (), mode: str = "disabled", **variables: str
) -> "Iterator[subprocess.Popen[str]]":
    """A run that has saved, by an async_mode, and goes on."""
    saves = f'interval = 5\nasync_mode = "{mode}"'
    (folder / "job.toml").write_text(JOB.replace("steps = 20", "steps = 100000").replace("interval = 5", saves))
    log = folder / "log"
    command = [*prefix, sys.executable, "-m", "titanlite.launch", "--job.config_file", str(folder / "job.toml")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GLOO_")}
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command, "--job.dump_folder", str(folder / "out")],
            env={**environment, "NGPU": str(ranks), "OMP_NUM_THREADS": "1", **variables},
            stdout=out,
            stderr=out,
            text=True,
        )
    try:
        while not (folder / "out" / "checkpoint" / "step-00000005").exists():
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 75, log.read_text()


@pytest.mark.parametrize(("ranks", "mode"), [(1, "disabled"), (2, "disabled"), (2, "process")])
def test_a_run_on_one_machine_opens_no_port_that_another_can_reach(ranks: int, mode: str, tmp_path: Path) -> None:
    cluster = {"MASTER_ADDR": socket.gethostname(), "NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}
    with training(tmp_path, ranks, mode=mode, **cluster) as run:  # as set for runs on many machines
        pids = descendants(run.pid)
        assert len(pids) > ranks
        found = listening(pids)
    assert [address for address, _ in found if not is_loopback(address)] == []
    assert found  # gloo's own


@pytest.fixture
def stranger() -> Iterator[tuple[str, str]]:
    """Two namespaces with a cable between them: the run's and a stranger's. The run's address is 10.78.0.1."""
    names = (f"tl{os.getpid()}r", f"tl{os.getpid()}s")

    def ip(*words: str) -> int:
        return subprocess.run(["ip", *words], capture_output=True, check=False).returncode

    if shutil.which("ip") is None or ip("netns", "add", names[0]) != 0:
        pytest.skip("network namespaces cannot be made here: they need iproute2 and the right to administer networks")
    ip("netns", "add", names[1])
    ip("link", "add", "cable1", "netns", names[0], "type", "veth", "peer", "name", "cable1", "netns", names[1])
    for number, name in enumerate(names, 1):
        ip("-n", name, "addr", "add", f"10.78.0.{number}/24", "dev", "cable1")
        ip("-n", name, "link", "set", "cable1", "up")
        ip("-n", name, "link", "set", "lo", "up")
    yield names
    for name in names:
        ip("netns", "del", name)


KNOCK = """
import socket
for port in range(1, 65536):
    try:
        socket.create_connection(("10.78.0.1", port), timeout=5).close()
        print(port)
    except ConnectionRefusedError:
        pass
"""


def test_a_stranger_in_another_network_finds_no_open_port(stranger: tuple[str, str], tmp_path: Path) -> None:
    ours, theirs = stranger
    with training(tmp_path, 2, ["ip", "netns", "exec", ours]):
        knock = ["ip", "netns", "exec", theirs, sys.executable, "-c"]
        assert subprocess.run([*knock, KNOCK], capture_output=True, text=True, check=True).stdout == ""
    listens = "import socket; s = socket.create_server(('10.78.0.1', 4321)); print(flush=True); s.accept()"
    control = subprocess.Popen(
        ["ip", "netns", "exec", ours, sys.executable, "-c", listens], stdout=subprocess.PIPE
    )  # what does listen there is found
    assert control.stdout is not None
    control.stdout.readline()
    assert subprocess.run([*knock, KNOCK], capture_output=True, text=True, check=True).stdout == "4321\n"
    control.wait(timeout=20)
