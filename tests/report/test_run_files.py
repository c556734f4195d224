"""What a run's files show: its state, from this machine or another, whatever they hold."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from titanlite.checkpoint import step_folders
from titanlite.report.run_files import read_status


def line(step: int, **changes: Any) -> str:
    entry = {"step": step, "loss": 8.0 - step / 100, "tps": 100.0, "step_time": 0.1, "time": time.time()}
    return json.dumps(entry | changes) + "\n"


def a_run(folder: Path, *events: tuple[str, int | None, str], steps: int = 100, **start: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(f'[job]\ndescription = "mine"\n[training]\nsteps = {steps}\n')
    (folder / "metrics.jsonl").write_text("".join(line(step) for step in range(10, 60, 10)))
    place = {"host": "elsewhere", "process": 1} | start
    begun = {"time": time.time(), "event": "start", "step": 0, "text": "starts", **place}
    rest = [{"time": time.time(), "event": kind, "step": step, "text": text} for kind, step, text in events]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in [begun, *rest]))
    return folder


def seen(folder: Path) -> tuple[str, str, int]:
    status = read_status(folder)
    return status.state, status.reason, status.step


SAVED = ("save", 50, "saved step 50")


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], ("running", "", 50)),
        ([SAVED, ("finish", 100, "Finished")], ("finished", "", 100)),
        ([SAVED, ("stop", None, "Stopped by SIGTERM\nTo go on: ...")], ("stopped", "Stopped by SIGTERM", 50)),
        ([("guard", None, "Step 51: loss is nan")], ("crashed", "Step 51: loss is nan", 50)),
        ([("failure", None, "Traceback (most recent call last):\n  File x\nValueError: boom")],
         ("crashed", "ValueError: boom", 50)),
        ([("failure", None, "killed"), ("restart", None, "again")], ("running", "its launcher starts it again", 50)),
    ],
)  # fmt: skip
def test_the_last_event_says_how_a_run_ended(tmp_path: Path, events: list[Any], expected: tuple[str, str, int]) -> None:
    assert seen(a_run(tmp_path, *events)) == expected


def test_a_run_that_was_killed_has_crashed_where_its_lock_tells(tmp_path: Path) -> None:
    """The process that trains may look at its own run, and keeps its lock."""
    a_run(tmp_path, host=socket.gethostname(), process=os.getpid())
    held = step_folders.lock(tmp_path / "run", 0, print)
    assert held is not None
    assert seen(tmp_path)[0] == "running"
    os.fstat(held)
    os.close(held)
    code = (
        "import sys, pathlib; from titanlite.checkpoint.step_folders import lock\n"
        "lock(pathlib.Path(sys.argv[1]) / 'run', 0, print); print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "locked\n"
        a_run(tmp_path, host=socket.gethostname(), process=holder.pid)
        assert seen(tmp_path)[0] == "running"
        holder.kill()
        holder.wait()
    state, reason, _ = seen(tmp_path)
    assert state == "crashed"
    assert "killed" in reason


def test_a_run_of_another_machine_is_stale_after_a_time_without_a_word(tmp_path: Path) -> None:
    a_run(tmp_path)
    old = time.time() - 3600
    (tmp_path / "metrics.jsonl").write_text(line(10, time=old))
    (tmp_path / "events.jsonl").write_text(json.dumps({"time": old, "event": "start", "step": 0, "text": "starts"}))
    assert seen(tmp_path)[0] == "stale"
    (tmp_path / "metrics.jsonl").write_text(line(10, time=old, step_time=3600.0))  # steps of an hour
    assert seen(tmp_path)[0] == "running"


def test_a_resumed_run_is_at_the_step_of_its_start_and_of_a_large_file_the_end_is_read(tmp_path: Path) -> None:
    a_run(tmp_path, SAVED, ("stop", None, "stopped"), ("start", 20, "goes back"), steps=999)
    (tmp_path / "metrics.jsonl").write_text(line(10) + line(20))
    status = read_status(tmp_path)
    assert (status.state, status.step, status.total_steps) == ("running", 20, 999)
    assert [step for step, _ in status.losses] == [10, 20]
    (tmp_path / "metrics.jsonl").write_text("".join(line(step) for step in range(1, 20_001)))
    status = read_status(tmp_path)
    assert (status.step, status.problems) == (20_000, [])
    assert status.losses[0][0] > 10_000


DAMAGE = {
    "not JSON": b"\x00\xff\xfe{{{\n",
    "no object": b"[1, 2]\n",
    "deep": b"[" * 100_000 + b"\n",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_line_costs_that_line_and_is_named(tmp_path: Path, damage: bytes) -> None:
    """The last line is not damaged, but not finished."""
    path = a_run(tmp_path) / "metrics.jsonl"
    path.write_bytes(line(10).encode() + damage + line(20).encode() + b'{"step": 30, "lo')
    status = read_status(tmp_path)
    assert status.step == 20
    assert status.problems == ["metrics.jsonl: 1 line cannot be read"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "config.toml"])
def test_a_file_that_cannot_be_read_is_named_and_the_rest_is_shown(tmp_path: Path, name: str) -> None:
    (a_run(tmp_path) / name).unlink()
    for make in (os.mkdir, os.mkfifo):  # opening a pipe would wait for ever
        make(tmp_path / name)
        assert any(name in problem for problem in read_status(tmp_path).problems)
        (tmp_path / name).rmdir() if make is os.mkdir else (tmp_path / name).unlink()
