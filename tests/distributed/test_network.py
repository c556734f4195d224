"""Runs on one node open no public ports, and runs on several nodes survive failures and signals."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from ranks import descendants, free_port
from small_runs import SMALL_WITHOUT_WORKERS, read_losses

from titanlite.launch.multi_node import AGENT_SECONDS
from titanlite.launch.ranks import CRASH_PATIENCE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux", reason="reads the sockets of processes from Linux's /proc"
    ),
]
LISTENS = "0A"  # in /proc/net/tcp
LAUNCHED: list["subprocess.Popen[str]"] = []


@pytest.fixture(autouse=True)
def kill_launchers() -> Iterator[None]:
    """Kill the launchers that a failed test leaves."""
    yield
    while LAUNCHED:
        LAUNCHED.pop().kill()


def launch(
    folder: Path, options: str = "", log: str = "log", **variables: str
) -> "subprocess.Popen[str]":
    """Start a launcher whose run continues until it is stopped."""
    (folder / "job.toml").write_text(SMALL_WITHOUT_WORKERS)
    command = f"{sys.executable} -P -m titanlite launch --job.config_file job.toml"
    command += f" --job.dump_folder out --training.steps 100000 {options}"
    with (folder / log).open("w") as out:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        launcher = subprocess.Popen(
            command.split(), cwd=folder, env=environment, stdout=out, stderr=out, text=True
        )
    LAUNCHED.append(launcher)
    return launcher


def wait_for(pattern: str, folder: Path, running: Sequence["subprocess.Popen[str]"]) -> str:
    """Wait until the logs match `pattern`, and return them."""
    while True:
        output = "\n".join(log.read_text() for log in sorted(folder.glob("log*")))
        if re.search(pattern, output, re.DOTALL):
            return output
        assert all(process.poll() is None for process in running), output
        time.sleep(0.1)


def list_sockets(pid: int) -> set[str]:
    """Return the inodes of the open sockets of a process."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        # The process may have closed the descriptor.
        with contextlib.suppress(OSError):
            match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor))
            if match:
                inodes.add(match[1])
    return inodes


def list_addresses(pids: list[int]) -> set[str]:
    """Return the hexadecimal addresses of the listening and datagram sockets of some processes."""
    inodes = set().union(*(list_sockets(pid) for pid in pids))
    addresses = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pids[0]}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and (fields[3] == LISTENS or table.startswith("udp")):
                addresses.add(fields[1].split(":")[0])
    return addresses


def is_loopback(address: str) -> bool:
    """Return whether a hexadecimal address of /proc is 127.x.x.x or ::1, also mapped to IPv6."""
    if len(address) == 8:
        return address.endswith("7F")
    is_mapped = address.startswith("0" * 16) and address.endswith("7F")
    return is_mapped or address == "00000000000000000000000001000000"


def test_a_run_on_one_node_opens_no_port_to_other_nodes(tmp_path):
    # Users set this variable for runs on several nodes.
    interfaces = {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0"}
    cluster = {"NGPU": "2", "MASTER_ADDR": socket.gethostname(), **interfaces}
    options = "--checkpoint.async_mode async --dataset.num_workers 1"
    run = launch(tmp_path, options, **cluster)
    wait_for("Saved step 5 ", tmp_path, [run])
    pids = descendants(run.pid)
    assert len(pids) > 2
    addresses = list_addresses(pids)
    run.send_signal(signal.SIGTERM)
    assert run.wait(timeout=120) == 75, (tmp_path / "log").read_text()

    # gloo listens on at least one address.
    assert addresses
    assert all(is_loopback(address) for address in addresses)


def start_two_nodes(
    folder: Path, options: str = "", **variables: str
) -> list["subprocess.Popen[str]"]:
    cluster = {"NGPU": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} | variables
    nodes = ("0", "1")
    return [launch(folder, options, f"log{n}", **cluster, NODE_RANK=n) for n in nodes]


def test_a_crash_on_one_node_restarts_all_and_a_signal_to_one_saves_and_stops_all(tmp_path):
    (tmp_path / "tmp").mkdir()
    variables = {"NNODES": "2", "MAX_RESTARTS": "1", "TMPDIR": str(tmp_path / "tmp")}
    running = start_two_nodes(tmp_path, **variables)
    wait_for("Saved step 5 ", tmp_path, running)
    # The rank is a child of the agent, which is a child of the launcher.
    rank = descendants(running[1].pid)[2]
    os.kill(rank, signal.SIGKILL)
    output = wait_for(r"Resumed after step.*Saved step", tmp_path, running)
    running[1].send_signal(signal.SIGTERM)
    assert [process.wait(120) for process in running] == [75, 75], output

    for number in (0, 1):
        output = (tmp_path / f"log{number}").read_text()
        cluster = f"NGPU=1 NNODES=2 NODE_RANK={number} MASTER_ADDR=127.0.0.1 MASTER_PORT="
        assert f"To resume: {cluster}" in output
        assert " MAX_RESTARTS=1 titanlite launch --job.config_file job.toml" in output
        # The agent prints a C++ stack if its store ends first and the error is not caught.
        assert "frame #" not in output

    # The second node reports the failure of its rank.
    assert "failed first: SIGKILL" in output
    assert not list((tmp_path / "tmp").glob("titanlite-launch-*"))


@pytest.mark.long
def test_a_run_continues_after_the_loss_of_a_node(tmp_path):
    running = start_two_nodes(tmp_path, NNODES="1:2", MAX_RESTARTS="3")
    wait_for("Saved step 5 ", tmp_path, running)
    for pid in descendants(running[1].pid):
        os.kill(pid, signal.SIGKILL)
    wait_for(r" 1 x cpu.*Resumed after step.*Saved step", tmp_path, running[:1])
    running[0].send_signal(signal.SIGTERM)
    assert running[0].wait(120) == 75
    steps = list(read_losses(tmp_path / "out"))

    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.long
def test_a_hook_that_exits_with_0_fails_the_run_on_both_nodes(tmp_path, write_plugin):
    hook = """
import os
from titanlite import register
from titanlite.hooks.hook import Hook

@register("hook", "leaving")
class Leaving(Hook):
    def after_step(self, step, result):
        if step == 2 and os.environ["RANK"] == "1":
            os._exit(0)
"""
    write_plugin("leaving_hook", hook)
    plugin = "--job.plugins leaving_hook --job.hooks leaving"
    running = start_two_nodes(tmp_path, plugin, NNODES="2")
    assert [process.wait(180) for process in running] == [1, 1]


@pytest.mark.long
def test_a_node_that_loses_the_other_ends_soon_after_the_timeout(tmp_path):
    """A stopped node looks like a broken link: its connections stay open."""
    timeouts = "--comm.train_timeout_seconds 20 --checkpoint.timeout_seconds 20"
    running = start_two_nodes(tmp_path, timeouts, NNODES="2")
    lost = []
    try:
        wait_for("Saved step 5 ", tmp_path, running)
        lost = descendants(running[0].pid)
        for pid in lost:
            os.kill(pid, signal.SIGSTOP)
        assert running[1].wait(20 + CRASH_PATIENCE + AGENT_SECONDS + 60) == 1
    finally:
        for pid in lost:
            os.kill(pid, signal.SIGKILL)


@pytest.mark.long
def test_the_node_with_the_master_address_hosts_the_store(tmp_path):
    """This holds even if the host name resolves to another address, as on Debian."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket only selects an address.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no network")
        address = probe.getsockname()[0]
    cluster = {"NGPU": "1", "NNODES": "2", "MASTER_ADDR": address, "MASTER_PORT": str(free_port())}
    options = "--training.steps 2"
    running = [launch(tmp_path, options, f"log{n}", **cluster) for n in (0, 1)]
    assert [process.wait(180) for process in running] == [0, 0]


def test_a_node_that_waits_logs_what_is_missing(tmp_path):
    cluster = {"NNODES": "1:2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    run = launch(tmp_path, NGPU="1", NODE_RANK="1", TMPDIR=str(tmp_path), **cluster)
    output = wait_for("cannot connect to 127.0.0.1", tmp_path, [run])
    run.send_signal(signal.SIGINT)
    assert run.wait(60) == 130

    assert "1 to 2 nodes" in output
    assert not list(tmp_path.glob("titanlite-launch-*"))
