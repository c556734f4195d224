"""Who may speak to a run on one machine: nobody on another one. And runs on several machines, which lose a rank, are
told to stop, or lose a machine."""

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
from hosts import ADDRESSES, CABLE, JOB, ip, launch, two_hosts
from ranks import descendants, free_port
from small_runs import losses

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads the sockets of processes from Linux's /proc"),
]
LISTENS = "0A"  # in /proc/net/tcp
ENDLESS = JOB.replace("steps = 20", "steps = 100000")


def wait_for(step: int, folder: Path, running: Sequence["subprocess.Popen[str]"]) -> None:
    """Until this step is saved."""
    while not (folder / f"out/checkpoint/step-{step:08d}").exists():
        assert all(process.poll() is None for process in running), [log.read_text() for log in folder.glob("log*")]
        time.sleep(0.1)


@contextlib.contextmanager
def training(
    folder: Path, ranks: int, prefix: Sequence[str] = (), **variables: str
) -> "Iterator[subprocess.Popen[str]]":
    """A run that has saved, by a thread, and goes on."""
    job, log = ENDLESS.replace("interval = 5", 'interval = 5\nasync_mode = "async"'), folder / "log"
    process = launch(folder, job, log, prefix, NGPU=str(ranks), **variables)
    try:
        wait_for(5, folder, [process])
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 75, log.read_text()


def sockets_of(pid: int) -> set[str]:
    """Inodes of its open sockets."""
    links = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            links.append(os.readlink(descriptor))
    return {link.removeprefix("socket:[").rstrip("]") for link in links if link.startswith("socket:[")}


def listening(pids: list[int]) -> set[str]:
    """Hexadecimal addresses at which these processes listen, or receive datagrams."""
    inodes = set().union(*(sockets_of(pid) for pid in pids))
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pids[0]}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and (fields[3] == LISTENS or table.startswith("udp")):
                found.add(fields[1].split(":")[0])
    return found


def is_loopback(address: str) -> bool:
    """Of a hexadecimal address as /proc shows it: 127.x.x.x or ::1, or one of the first within the second."""
    if len(address) == 8:
        return address.endswith("7F")
    return address == "00000000000000000000000001000000" or (address[:16], address[-2:]) == ("0" * 16, "7F")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_on_one_machine_opens_no_port_that_another_can_reach(ranks: int, tmp_path: Path) -> None:
    cluster = {"MASTER_ADDR": socket.gethostname(), "NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}
    with training(tmp_path, ranks, **cluster) as run:  # as set for runs on many machines
        pids = descendants(run.pid)
        assert len(pids) > ranks
        found = listening(pids)
    assert found  # gloo's own
    assert all(is_loopback(address) for address in found)


KNOCK = """
import socket, sys
for port in range(1, 65536):
    try:
        socket.create_connection((sys.argv[1], port), timeout=5).close()
        print(port)
    except ConnectionRefusedError:
        pass
"""


@pytest.mark.long
def test_a_stranger_in_another_network_finds_no_open_port(tmp_path: Path) -> None:
    with two_hosts() as (ours, theirs), training(tmp_path, 2, ours):
        knock = [*theirs, sys.executable, "-c", KNOCK, ADDRESSES[0]]
        assert subprocess.run(knock, capture_output=True, text=True, check=True).stdout == ""


def test_a_crash_on_one_machine_restarts_all_and_a_signal_to_one_saves_and_stops_all(tmp_path: Path) -> None:
    cluster = {"NGPU": "1", "NNODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    running = [
        launch(tmp_path, ENDLESS, tmp_path / f"log{n}", **cluster, MAX_RESTARTS="1", NODE_RANK=str(n)) for n in (0, 1)
    ]
    try:
        wait_for(5, tmp_path, running)
        os.kill(descendants(running[1].pid)[2], signal.SIGKILL)  # its launcher's child is a launcher, too
        said = ""
        while "resumed from step" not in said:
            assert all(process.poll() is None for process in running), said
            said = "".join((tmp_path / f"log{n}").read_text() for n in (0, 1))
            time.sleep(0.1)
        running[1].send_signal(signal.SIGTERM)
        assert [process.wait(120) for process in running] == [75, 75], said
    finally:
        for process in running:
            process.kill()
    for number in (0, 1):
        said = (tmp_path / f"log{number}").read_text()
        assert said.count("Starting again from the newest checkpoint (0 restarts left).") == 1
        variables = f"NGPU=1 NNODES=2 NODE_RANK={number} MASTER_ADDR=127.0.0.1 MASTER_PORT={cluster['MASTER_PORT']}"
        assert f"To go on after it: {variables} MAX_RESTARTS=1 titanlite launch --job.config_file" in said
        assert "frame #" not in said  # no C++ stack of the agent, whose store may end before it
    assert "failed first: it was killed (SIGKILL)" in said  # of the second machine


@pytest.mark.long
def test_the_run_goes_on_without_the_host_whose_cable_was_cut(tmp_path: Path) -> None:
    often = JOB.replace("interval = 5", "interval = 1").replace("steps = 20", "steps = 100")  # it may fall in a save
    cluster = {"NGPU": "1", "NNODES": "1:2", "MASTER_ADDR": ADDRESSES[0], "MAX_RESTARTS": "3"}
    with two_hosts() as hosts:
        running = [
            launch(tmp_path, often, tmp_path / f"log{number}", host, **cluster, NODE_RANK=str(number))
            for number, host in enumerate(hosts)
        ]
        try:
            wait_for(8, tmp_path, running)
            ip("-n", hosts[1][-1], "link", "set", CABLE, "down")
            assert running[0].wait(400) == 0
        finally:
            for process in running:
                process.kill()
    said = (tmp_path / "log0").read_text()
    assert "Lost or late on other machines: rank" in said
    assert "Starting again from the newest checkpoint" in said
    assert "1 x cpu" in said
    whole = tmp_path / "whole"
    whole.mkdir()
    assert launch(whole, often, whole / "log", NGPU="1").wait(120) == 0, (whole / "log").read_text()
    # other sums on one rank than on two
    assert losses(tmp_path / "out") == pytest.approx(losses(whole / "out"), rel=1e-3)
