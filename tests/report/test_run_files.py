"""What a run's files show: its state, from this machine or another, whatever they hold."""

import fcntl
import json
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from titanlite.checkpoint import step_folders
from titanlite.config.errors import UserError
from titanlite.report.json_lines import Tail, number, read_objects, read_table
from titanlite.report.run_files import RunFiles


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
    status = RunFiles(folder).read()
    return status.state, status.reason, status.step


@pytest.fixture
def holder(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process that holds the lock of `tmp_path`."""
    code = (
        "import sys, pathlib; from titanlite.checkpoint.step_folders import lock\n"
        "lock(pathlib.Path(sys.argv[1]) / 'run', 0, print); print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def test_the_last_event_says_how_a_run_ended(tmp_path: Path) -> None:
    saved = ("save", 50, "saved step 50")
    assert seen(a_run(tmp_path, saved, ("finish", 100, "Finished"))) == ("finished", "", 100)
    assert seen(a_run(tmp_path, saved, ("stop", None, "Stopped by SIGTERM\nTo go on: ..."))) == (
        "stopped", "Stopped by SIGTERM", 50
    )  # fmt: skip
    assert seen(a_run(tmp_path, ("guard", None, "Step 51: loss is nan"))) == ("crashed", "Step 51: loss is nan", 50)
    trace = "Traceback (most recent call last):\n  File x\nValueError: boom"
    assert seen(a_run(tmp_path, ("failure", None, trace))) == ("crashed", "ValueError: boom", 50)
    assert seen(a_run(tmp_path, ("failure", None, "killed"), ("restart", None, "again")))[0] == "running"


def test_a_run_that_was_killed_has_crashed_where_its_lock_tells(
    tmp_path: Path, holder: "subprocess.Popen[str]"
) -> None:
    a_run(tmp_path, host=socket.gethostname(), process=holder.pid)
    assert seen(tmp_path)[0] == "running"
    holder.kill()
    holder.wait()
    state, reason, _ = seen(tmp_path)
    assert state == "crashed"
    assert "killed" in reason


def test_the_process_that_trains_may_look_at_its_own_run_and_keeps_its_lock(tmp_path: Path) -> None:
    a_run(tmp_path, host=socket.gethostname(), process=os.getpid())
    held = step_folders.lock(tmp_path / "run", 0, print)
    assert held is not None
    assert seen(tmp_path)[0] == "running"
    code = "import sys; from pathlib import Path; from titanlite.checkpoint.step_folders import is_locked as f"
    code += "; print(f(Path(sys.argv[1])))"
    still = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, text=True)
    assert still.stdout == "True\n"
    fcntl.lockf(held, fcntl.LOCK_UN)
    os.close(held)


def test_a_run_of_another_machine_is_stale_after_a_time_without_a_word(tmp_path: Path) -> None:
    a_run(tmp_path)
    assert seen(tmp_path)[0] == "running"
    old = time.time() - 3600
    (tmp_path / "metrics.jsonl").write_text(line(10, time=old))
    (tmp_path / "events.jsonl").write_text(json.dumps({"time": old, "event": "start", "step": 0, "text": "starts"}))
    assert seen(tmp_path)[0] == "stale"
    (tmp_path / "metrics.jsonl").write_text(line(10, time=old, step_time=3600.0))  # steps of an hour
    assert seen(tmp_path)[0] == "running"


def test_a_run_of_version_0_1_without_events_is_finished_after_its_last_step(tmp_path: Path) -> None:
    a_run(tmp_path, steps=50)
    (tmp_path / "events.jsonl").unlink()
    assert seen(tmp_path) == ("finished", "", 50)


def test_a_resumed_run_is_at_the_step_of_its_start(tmp_path: Path) -> None:
    a_run(tmp_path, ("save", 50, "saved"), ("stop", None, "stopped"))
    files = RunFiles(tmp_path)
    assert files.read().step == 50
    (tmp_path / "new").write_text(line(10) + line(20))
    (tmp_path / "new").replace(tmp_path / "metrics.jsonl")
    (tmp_path / "config.toml").write_text("[training]\nsteps = 999\n")
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time(), "event": "start", "step": 20, "text": "goes back"}) + "\n")
    status = files.read()
    assert (status.state, status.step, status.total_steps) == ("running", 20, 999)
    assert [step for step, _ in status.losses.points] == [10, 20]


def test_what_is_new_is_read_and_a_half_line_when_it_is_whole(tmp_path: Path) -> None:
    files = RunFiles(a_run(tmp_path))
    files.read()
    whole = line(60, loss=1.5)
    for part in (whole[:20], whole[20:]):
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(part)
        status = files.read()
    assert (status.step, status.numbers["loss"], status.problems) == (60, 1.5, [])


def test_of_a_large_file_the_end_is_read_and_a_sample_of_the_rest(tmp_path: Path) -> None:
    a_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("".join(line(step, loss=float(step)) for step in range(1, 20_001)))
    status = RunFiles(tmp_path).read()
    steps = [step for step, _ in status.losses.points]
    assert status.step == 20_000
    assert steps == sorted(steps)
    assert steps[0] < 200
    assert all(step == loss for step, loss in status.losses.points)


DAMAGE = {
    "not JSON": b"\x00\xff\xfe{{{\n",
    "no object": b"[1, 2]\n",
    "no step": b"{}\n",
    "step of a wrong type": b'{"step": "x"}\n',
    "deep": b"[" * 100_000 + b"\n",
    "huge": b'{"step": 1' + b"0" * 400 + b"}\n",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_line_costs_that_line_and_is_named(tmp_path: Path, damage: bytes) -> None:
    path = a_run(tmp_path) / "metrics.jsonl"
    path.write_bytes(line(10).encode() + damage + line(20).encode() + b'{"step": 30, "lo')
    table = read_table(path)
    assert list(table.columns["step"]) == [10, 20]
    assert table.problems == ("metrics.jsonl: 1 line cannot be read",)
    assert RunFiles(tmp_path).read().step == 20


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "config.toml"])
def test_a_file_that_cannot_be_read_is_named_and_the_rest_is_shown(tmp_path: Path, name: str) -> None:
    a_run(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    status = RunFiles(tmp_path).read()
    assert any(name in problem for problem in status.problems)
    (tmp_path / name).rmdir()
    os.mkfifo(tmp_path / name)  # opening it would wait for ever
    assert any(name in problem for problem in RunFiles(tmp_path).read().problems)


def test_numbers_are_numbers_and_those_that_are_not_finite_have_their_names() -> None:
    entry = {"loss": None, "nonfinite": {"loss": "inf"}, "text": "1", "flag": True, "big": 10**400}
    assert number(entry, "loss") == math.inf
    assert [number(entry, key) for key in ("text", "flag", "big", "none")] == [None] * 4


def test_a_table_has_all_keys_at_all_steps_and_the_last_line_of_a_step_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    late = json.dumps({"step": 3, "late": 1, "sources": {"a": 5, "b": "x"}}) + "\n"
    path.write_text(line(1, loss=1.0) + line(2, loss=2.0) + line(2, loss=3.0) + late)
    table = read_table(path)
    assert list(table.columns["step"]) == [1, 2, 3]
    assert list(table.columns["loss"])[:2] == [1.0, 3.0]
    assert math.isnan(table.columns["loss"][2])
    assert [math.isnan(value) for value in table.columns["late"]] == [True, True, False]
    assert list(table.columns["sources/a"])[2] == 5
    assert "steps go back" in table.problems[0]


def test_a_line_that_no_run_writes_does_not_hide_those_after_it(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "metrics.jsonl")
    tail.path.write_text(line(1))
    assert [entry["step"] for entry in tail.new()] == [1]
    with tail.path.open("a") as file:
        file.write("x" * 17_000_000 + "\n" + line(2))
    assert [entry["step"] for _ in range(3) for entry in tail.new()] == [2]
    assert "cannot be read" in tail.problems()[0]


def test_objects_of_a_file_that_is_not_there_are_none(tmp_path: Path) -> None:
    problems: list[str] = []
    assert read_objects(tmp_path / "events.jsonl", problems) == []
    assert Tail(tmp_path / "events.jsonl").new() == []
    assert problems == []


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run has written"):
        RunFiles(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        RunFiles(tmp_path / "nowhere")
