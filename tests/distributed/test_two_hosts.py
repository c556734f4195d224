"""Two hosts, as network namespaces of this machine: one of them goes away in mid-run, the other one goes on."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_mishaps import JOB

pytestmark = [pytest.mark.slow, pytest.mark.long]
ADDRESSES = ("10.77.0.1", "10.77.0.2")


def ip(*words: str) -> int:
    return subprocess.run(["ip", *words], capture_output=True, check=False).returncode


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """The names of two namespaces with a cable between them."""
    names = (f"tl{os.getpid()}a", f"tl{os.getpid()}b")
    if shutil.which("ip") is None or ip("netns", "add", names[0]) != 0:
        pytest.skip(
            "network namespaces cannot be made here: they need iproute2 and the right to administer the network"
        )
    ip("netns", "add", names[1])
    ip("link", "add", "cable0", "netns", names[0], "type", "veth", "peer", "name", "cable0", "netns", names[1])
    for name, address in zip(names, ADDRESSES, strict=True):
        ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable0")
        ip("-n", name, "link", "set", "cable0", "up")
        ip("-n", name, "link", "set", "lo", "up")
    yield names
    for name in names:
        ip("netns", "del", name)


def start(host: str, number: int, job: Path, out: Path, nodes: str, restarts: int) -> subprocess.Popen[str]:
    environment = {"NGPU": "1", "NNODES": nodes, "NODE_RANK": str(number), "MASTER_ADDR": ADDRESSES[0]}
    environment |= {"MAX_RESTARTS": str(restarts), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "titanlite.launch", "--job.config_file", str(job), "--job.dump_folder", str(out)]
    with (out.parent / f"host{number}.log").open("w") as log:
        return subprocess.Popen(
            ["ip", "netns", "exec", host, *command],
            env={**os.environ, **environment},
            stdout=log,
            stderr=log,
            text=True,
        )


def losses(out: Path) -> dict[int, float]:
    file = out / "metrics.jsonl"
    records = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {record["step"]: record["loss"] for record in records}


def wait_for(steps: int, out: Path, seconds: float) -> None:
    until = time.monotonic() + seconds
    while len(losses(out)) < steps:
        assert time.monotonic() < until, (out.parent / "host0.log").read_text()
        time.sleep(0.2)


def test_the_run_goes_on_without_the_host_whose_cable_was_cut(hosts: tuple[str, str], tmp_path: Path) -> None:
    job, out, steps = tmp_path / "job.toml", tmp_path / "out", 400
    often = JOB.replace("interval = 5", "interval = 1")  # the cut may fall in a save, too
    job.write_text(often.replace("steps = 20", f"steps = {steps}"))
    running = [start(host, number, job, out, "1:2", 3) for number, host in enumerate(hosts)]
    try:
        wait_for(8, out, 60)
        ip("-n", hosts[1], "link", "set", "cable0", "down")
        with contextlib.suppress(subprocess.TimeoutExpired):
            running[0].wait(240)
    finally:
        for process in running:
            process.kill()
    said = (tmp_path / "host0.log").read_text()
    assert running[0].returncode == 0, said
    assert "2 x cpu" in said
    assert "Gone, or late: rank 1" in said
    assert ADDRESSES[1] in said
    assert "Starting again from the newest checkpoint" in said
    assert "1 x cpu" in said
    cut, whole = losses(out), tmp_path / "whole"
    command = [sys.executable, "-m", "titanlite.launch", "--job.config_file", job, "--job.dump_folder", whole]
    subprocess.run(list(map(str, command)), check=True, capture_output=True, timeout=120)
    assert cut == pytest.approx(losses(whole), rel=1e-3)  # bf16, and other sums on one rank than on two


def test_a_run_that_cannot_go_on_without_the_host_says_that_it_is_lost(hosts: tuple[str, str], tmp_path: Path) -> None:
    job, out = tmp_path / "job.toml", tmp_path / "out"
    job.write_text(JOB.replace("interval = 5", "interval = 1").replace("steps = 20", "steps = 100000"))
    running = [start(host, number, job, out, "2", 0) for number, host in enumerate(hosts)]
    try:
        wait_for(8, out, 60)
        ip("-n", hosts[1], "link", "set", "cable0", "down")
        assert running[0].wait(120) == 75  # a scheduler starts the run again
        assert running[1].wait(120) == 75
    finally:
        for process in running:
            process.kill()
    for number, gone in enumerate((ADDRESSES[1], "the first node")):
        said = (tmp_path / f"host{number}.log").read_text()
        assert "\nLost: " in said
        assert gone in said.split("\nLost: ")[1]
        assert "The last good step is " in said.splitlines()[-1]
        assert "did not meet" not in said
        assert "frame #" not in said  # no C++ stack
