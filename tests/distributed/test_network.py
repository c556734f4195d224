"""Who may speak to a run: on one machine nobody on another one; with several, what a stranger writes is data."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hosts import ADDRESSES, JOB, inside, launch, two_hosts
from ranks import descendants

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads the sockets of processes from Linux's /proc"),
]
LISTENS = "0A"  # in /proc/net/tcp


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
    job, log = JOB.replace("steps = 20", "steps = 100000").replace("interval = 5", saves), folder / "log"
    process = launch(folder, job, log, prefix, NGPU=str(ranks), **variables)
    try:
        while not (folder / "out" / "checkpoint" / "step-00000005").exists():
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 75, log.read_text()


@pytest.mark.parametrize(("ranks", "mode"), [(1, "disabled"), (2, "disabled"), (2, "async")])
def test_a_run_on_one_machine_opens_no_port_that_another_can_reach(ranks: int, mode: str, tmp_path: Path) -> None:
    cluster = {"MASTER_ADDR": socket.gethostname(), "NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}
    with training(tmp_path, ranks, mode=mode, **cluster) as run:  # as set for runs on many machines
        pids = descendants(run.pid)
        assert len(pids) > ranks
        found = listening(pids)
    assert [address for address, _ in found if not is_loopback(address)] == []
    assert found  # gloo's own


KNOCK = """
import socket, sys
for port in range(1, 65536):
    try:
        socket.create_connection((sys.argv[1], port), timeout=5).close()
        print(port)
    except ConnectionRefusedError:
        pass
"""
LISTEN = "import socket, sys; s = socket.create_server((sys.argv[1], 4321)); print(flush=True); s.accept()"


def test_a_stranger_in_another_network_finds_no_open_port(tmp_path: Path) -> None:
    with two_hosts() as (ours, theirs):
        knock = [*inside(theirs), sys.executable, "-c", KNOCK, ADDRESSES[0]]
        with training(tmp_path, 2, inside(ours)):
            assert subprocess.run(knock, capture_output=True, text=True, check=True).stdout == ""
        listen = [*inside(ours), sys.executable, "-c", LISTEN, ADDRESSES[0]]
        with subprocess.Popen(listen, stdout=subprocess.PIPE) as control:  # what does listen there is found
            assert control.stdout is not None
            control.stdout.readline()
            assert subprocess.run(knock, capture_output=True, text=True, check=True).stdout == "4321\n"
            control.wait(timeout=20)
