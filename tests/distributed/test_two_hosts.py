"""Two hosts, as network namespaces of this machine: one of them goes away in mid-run, the other one goes on."""

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import ADDRESSES, CABLE, JOB, inside, ip, launch, two_hosts

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    with two_hosts() as names:
        yield names


def start(host: str, number: int, folder: Path, job: str, nodes: str, restarts: int) -> "subprocess.Popen[str]":
    """The launcher of a host; what it says is in host<number>.log."""
    variables = {"NGPU": "1", "NNODES": nodes, "NODE_RANK": str(number), "MASTER_ADDR": ADDRESSES[0]}
    log = folder / f"host{number}.log"
    return launch(folder, job, log, inside(host), **variables, MAX_RESTARTS=str(restarts))


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
    out, often = tmp_path / "out", JOB.replace("interval = 5", "interval = 1")  # the cut may fall in a save, too
    job = often.replace("steps = 20", "steps = 400")
    running = [start(host, number, tmp_path, job, "1:2", 3) for number, host in enumerate(hosts)]
    try:
        wait_for(8, out, 60)
        ip("-n", hosts[1], "link", "set", CABLE, "down")
        with contextlib.suppress(subprocess.TimeoutExpired):
            running[0].wait(240)
    finally:
        for process in running:
            process.kill()
    said = (tmp_path / "host0.log").read_text()
    assert running[0].returncode == 0, said
    assert "2 x cpu" in said
    assert "Lost or late on other machines: rank 1" in said
    assert ADDRESSES[1] in said
    assert "Starting again from the newest checkpoint" in said
    assert "1 x cpu" in said
    cut, whole = losses(out), tmp_path / "whole"
    whole.mkdir()
    alone = launch(whole, job, whole / "log", NGPU="1")
    assert alone.wait(120) == 0, (whole / "log").read_text()
    assert cut == pytest.approx(losses(whole / "out"), rel=1e-3)  # bf16, and other sums on one rank than on two


def test_a_run_that_cannot_go_on_without_the_host_says_that_it_is_lost(hosts: tuple[str, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    job = JOB.replace("interval = 5", "interval = 1").replace("steps = 20", "steps = 100000")
    running = [start(host, number, tmp_path, job, "2", 0) for number, host in enumerate(hosts)]
    try:
        wait_for(8, out, 60)
        ip("-n", hosts[1], "link", "set", CABLE, "down")
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
        variables = f"NGPU=1 NNODES=2 NODE_RANK={number} MASTER_ADDR={ADDRESSES[0]} MAX_RESTARTS=0"
        assert f"To go on after it: {variables} titanlite launch --job.config_file" in said.splitlines()[-1]
        assert "did not meet" not in said
        assert "frame #" not in said  # no C++ stack
