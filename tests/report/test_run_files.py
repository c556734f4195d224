"""`watch`, `runs` and the view of a training run show the state of a run from its files.

They work on any machine and with damaged files.
"""

import contextlib
import io
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text
from small_runs import SMALL

from titanlite.report.page import page_data
from titanlite.report.run_files import read_status, sparkline
from titanlite.report.view import View


def line(step: int, **changes: Any) -> str:
    """Return a line of metrics.jsonl."""
    entry = {"step": step, "loss": 8.0 - step / 100, "time": time.time()}
    entry |= {"tps": 100.0, "tps_per_device": 100.0, "step_time": 0.1}
    return json.dumps(entry | changes) + "\n"


def event_line(event: str, /, **changes: Any) -> str:
    """Return a line of events.jsonl, of an event such as "save 50: text" or "stop: text"."""
    match = re.fullmatch(r"([a-z ]+?)(?: (\d+))?: (.*)", event, re.DOTALL)
    assert match
    kind, step, text = match.groups()
    entry = {"time": time.time(), "event": kind, "step": int(step) if step else None, "text": text}
    return json.dumps(entry | changes) + "\n"


def write_metrics(folder: Path, lines: Iterable[str]) -> None:
    (folder / "metrics.jsonl").write_text("".join(lines))


def create_run(
    folder: Path,
    *events: str,
    steps: int = 100,
    **start: Any,
) -> Path:
    """Write the files of a run that has logged 50 of its steps. `start` changes the start event."""
    folder.mkdir(parents=True, exist_ok=True)
    config = f'[job]\ndescription = "mine"\n[training]\nsteps = {steps}\n'
    (folder / "config.toml").write_text(config)
    write_metrics(folder, [line(step) for step in range(10, 60, 10)])
    start = {"host": "elsewhere", "process": 1} | start
    lines = [event_line("start 0: starts", **start), *map(event_line, events)]
    (folder / "events.jsonl").write_text("".join(lines))
    return folder


def read_state(folder: Path) -> str:
    return read_status(folder).state


SAVED = "save 50: saved step 50"
FINISHED = "finish 50: Finished"
STOPPED = "stop: Stopped by SIGTERM\nTo resume: ..."
TRACEBACK = "Traceback (most recent call last):\n  File x\nValueError: boom\nTo resume: ..."


@pytest.mark.parametrize(
    ("events", "state", "reason", "step"),
    [
        ([], "running", "", 50),
        ([SAVED, "finish 100: Finished after step 100."], "finished", "", 100),
        ([SAVED, "finish 60: Finished after step 60: No gain."], "finished", "No gain.", 60),
        ([SAVED, STOPPED], "stopped", "Stopped by SIGTERM", 50),
        (["guard: Step 51: loss is nan"], "stopped", "Step 51: loss is nan", 50),
        (["user error: line 3: no JSON"], "failed", "line 3: no JSON", 50),
        ([SAVED, "stop 50: ", "data: ", "user error: x:\n  y\nz"], "rejected", "x: y", 50),
        (
            ["finish 100: ", "data: ", "refusal: y", "refusal: x"],
            "finished",
            "a later start was rejected: x",
            100,
        ),
        ([f"failure: {TRACEBACK}"], "crashed", "ValueError: boom", 50),
        (["failure: killed", "restart: again"], "running", "its launcher is restarting it", 50),
    ],
)
def test_the_last_event_determines_the_state_of_a_run(tmp_path, events, state, reason, step):
    status = read_status(create_run(tmp_path, *events))

    assert (status.state, status.exit_reason, status.step) == (state, reason, step)


def test_a_run_on_this_machine_has_crashed_if_its_process_is_gone(tmp_path):
    with subprocess.Popen(["sleep", "600"]) as process:
        start = {"host": socket.gethostname(), "process": process.pid}
        assert read_state(create_run(tmp_path, **start)) == "running"
        # A run that started earlier had another process with this number.
        create_run(tmp_path, **start, time=time.time() - 60)
        assert read_state(tmp_path) == "crashed"
        process.kill()

    assert read_state(create_run(tmp_path, **start)) == "crashed"

    damaged_start = start | {"process": 0}
    assert read_state(create_run(tmp_path, **damaged_start)) == "crashed"

    create_run(tmp_path, "data: of the next start", **start)
    assert read_state(tmp_path) == "running"


@pytest.mark.parametrize(
    ("step_time", "state"),
    [(0.1, "stale"), (3600.0, "running")],
)
def test_a_run_on_another_machine_is_stale_if_it_logs_nothing_for_many_steps(
    tmp_path, step_time, state
):
    hour_ago = time.time() - 3600
    create_run(tmp_path, time=hour_ago)
    write_metrics(tmp_path, [line(10, time=hour_ago, step_time=step_time)])

    assert read_state(tmp_path) == state


def test_a_run_that_has_logged_nothing_is_stale(tmp_path):
    (tmp_path / "config.toml").write_text("[training]\nsteps = 100\n")

    status = read_status(tmp_path)

    reason = "no end was recorded, and the time of the last update is unknown"
    assert (status.state, status.exit_reason) == ("stale", reason)


def test_a_resumed_run_is_at_the_step_of_its_start(tmp_path):
    create_run(tmp_path, SAVED, STOPPED, "start 20: goes back", steps=999)
    write_metrics(tmp_path, [line(10), line(20)])

    status = read_status(tmp_path)

    assert (status.state, status.step, status.total_steps) == ("running", 20, 999)
    assert status.losses == [7.9, 7.8]


@pytest.mark.parametrize("steps", ["-1", "9" * 400, "nan", "true", '"x"', "[]", "{}"])
def test_a_number_of_steps_that_is_invalid_is_not_shown(tmp_path, steps):
    create_run(tmp_path)
    (tmp_path / "config.toml").write_text(f"[training]\nsteps = {steps}\n")

    assert read_status(tmp_path).total_steps is None


def test_only_the_end_of_a_large_file_is_read(tmp_path):
    create_run(tmp_path)
    write_metrics(tmp_path, [line(step) for step in range(1, 20_001)])

    status = read_status(tmp_path)

    assert (status.step, status.problems) == (20_000, [])
    assert 1000 < len(status.losses) < 10_000


def test_metrics_of_version_0_2_are_read_by_their_new_names(tmp_path):
    create_run(tmp_path)
    old_names = {"loss_max": 9.0, "clipped": 0.5, "utilization": 0.9, "time_left": 40.0}

    write_metrics(tmp_path, [line(1, **old_names), line(2, **old_names)])

    assert "step 2/100  0:00:40 left" in read_status(tmp_path).to_lines()

    curves = page_data([tmp_path])["runs"][0]["curves"]["y"]
    assert {"loss_max_rank", "clip_fraction", "token_utilization"} < curves.keys()
    assert not old_names.keys() & curves.keys()


def test_the_eta_is_unknown_until_a_resumed_run_logs_a_step(tmp_path):
    create_run(tmp_path, SAVED, STOPPED, "data: Data", "start 50: starts")
    now = time.time()
    before = line(50, time=now - 9, eta=40.0)
    after = line(60, time=now + 9, eta=40.0)

    write_metrics(tmp_path, [before])

    assert "step 50/100" in read_status(tmp_path).to_lines()

    write_metrics(tmp_path, [before, after])

    assert "step 60/100  0:00:40 left" in read_status(tmp_path).to_lines()


def test_damaged_lines_are_skipped_and_reported(tmp_path):
    """The last line is not reported, because a run may still be writing it."""
    path = create_run(tmp_path) / "metrics.jsonl"
    # Invalid JSON, a list instead of an object, and too deep nesting.
    damage = b"\x00\xff\xfe{{{\n[1, 2]\n" + b"[" * 100_000 + b"\n"
    unfinished = b'{"step": 30, "lo'
    path.write_bytes(line(10).encode() + damage + line(20).encode() + unfinished)

    status = read_status(tmp_path)

    assert status.step == 20
    assert status.problems == ["metrics.jsonl: 3 damaged lines skipped"]


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "config.toml"])
def test_a_file_that_cannot_be_read_is_reported(tmp_path, name, make):
    """Opening a named pipe would wait forever."""
    (create_run(tmp_path) / name).unlink()
    make(tmp_path / name)

    assert any(name in problem for problem in read_status(tmp_path).problems)


def test_an_environment_that_is_not_an_object_is_reported(tmp_path):
    create_run(tmp_path)
    (tmp_path / "environment.json").write_text("[1]")

    [run] = page_data([tmp_path])["runs"]

    assert run["environment"] == {}
    assert run["problems"] == ["environment.json cannot be read: it is not an object"]


def in_terminal(command: str, **environment: str) -> str:
    """Return what `titanlite COMMAND` writes to a terminal, without escape codes."""
    ours, theirs = pty.openpty()
    variables = {**os.environ, "TERM": "xterm", "COLUMNS": "40", "LOG_RANK": "0", **environment}
    words = [sys.executable, "-m", "titanlite", *command.split()]
    process = subprocess.Popen(words, stdout=theirs, stderr=theirs, env=variables)
    os.close(theirs)
    output = b""
    # On Linux, reading from a closed terminal is an error.
    with contextlib.suppress(OSError):
        while chunk := os.read(ours, 65536):
            output += chunk
    assert process.wait() == 0, output
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode())


def test_a_run_that_has_ended_is_shown_once(tmp_path, run_command):
    events = "save 50: saved [red]step 50\nin\x1b[2J", "finish 50: Finished\u202e \r"
    create_run(tmp_path, *events, steps=50)

    lines = run_command(f"watch {tmp_path}").splitlines()

    assert lines[:4] == [
        f"finished  {tmp_path.name}: mine",
        "step 50/50",
        "loss 7.5000  █▆▅▃▁",
        "100 tokens/s  0.1 s/step",
    ]

    events = [text[15:] for text in lines[4:]]
    assert events == ["starts", "saved [red]step 50", "Finished\\u202e \\r"]


def test_lines_fit_into_a_narrow_terminal(tmp_path):
    create_run(tmp_path, FINISHED, steps=50)
    (tmp_path / "config.toml").write_text(f"[job]\ndescription = '{'漢字' * 40}'")

    output = in_terminal(f"watch {tmp_path}")

    assert "finished  " in output
    assert all(len(text) <= 40 for text in output.splitlines())
    # The column does not fit into 40 characters.
    assert "tokens/s" not in in_terminal(f"runs {tmp_path}")


def test_the_view_erases_all_rows_into_which_a_narrower_window_has_broken_its_lines():
    file = io.StringIO()
    console = Console(
        file=file, force_terminal=True, _environ={"TERM": "xterm"}, width=100, height=40
    )
    lines = "\n".join(["x" * 90] * 3)
    text = Text(lines, no_wrap=True, overflow="ellipsis")
    with View(text, console=console, auto_refresh=False):
        # A line that was drawn 45 wide takes two rows of a window that is 44 wide. The cursor is in
        # an empty line below the lines, because the echo of Ctrl-C could break a full line. It
        # therefore moves up 3 rows to erase 3 lines.
        widths_and_rows = [(100, 3), (45, 6), (44, 6), (100, 3)]
        for width, rows in widths_and_rows:
            drawn = len(file.getvalue())
            console.width = width
            console.print("a line of the log")
            assert file.getvalue()[drawn:].count("\x1b[1A") == rows


@pytest.mark.parametrize(
    ("values", "bars"), [([], ""), ([3.0], "▄"), (range(1000, -1, -1), "█▇▆▅▄▃▂▁")]
)
def test_a_sparkline_has_a_bar_for_each_group_of_values(values, bars):
    assert sparkline([float(value) for value in values], 8) == bars


@pytest.mark.slow
def test_watching_follows_a_run_to_its_end_and_ctrl_c_ends_the_watching_quietly(tmp_path):
    create_run(tmp_path)

    def watch() -> Any:
        command = [sys.executable, "-u", "-m", "titanlite", "watch", str(tmp_path)]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, bufsize=1)

    interrupted = watch()
    watching = watch()
    for process in (interrupted, watching):
        while "starts" not in process.stdout.readline():
            pass

    interrupted.send_signal(signal.SIGINT)

    assert interrupted.communicate(timeout=60)[1] == ""
    assert interrupted.returncode == 130

    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("[]\n" + line(60))
    for text in ("step 60/100\n", "loss 7.4", "metrics.jsonl: 1 "):
        assert text in watching.stdout.readline()
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(event_line("finish 100: Finished"))
    output, errors = watching.communicate(timeout=60)

    assert (watching.returncode, errors) == (0, "")
    assert output.startswith("finished  ")


@pytest.mark.slow
def test_training_on_a_terminal_shows_its_log_and_the_view_below_it(tmp_path):
    job = tmp_path / "small.toml"
    job.write_text(SMALL)
    out = tmp_path / "mine"
    command = f"train --job.config_file {job} --job.dump_folder {out}"

    output = in_terminal(command, COLUMNS="120")

    assert re.search(r"\[\d\d:\d\d:\d\d\] step  3/12  loss", output)
    assert "running  mine" in output
    # The job has no validation.
    assert not (out / "validation.jsonl").exists()
    # A dumb terminal cannot move its cursor, so it shows no view.
    assert "running  mine" not in in_terminal(command, TERM="dumb")


def test_runs_are_listed_the_latest_first_and_each_once(tmp_path, run_command):
    old = create_run(tmp_path / "old", FINISHED, steps=50)
    for path in old.glob("*.jsonl"):
        earlier = f'"time": {time.time() - 7200}'
        path.write_text(re.sub(r'"time": [\d.]+', earlier, path.read_text()))
    create_run(tmp_path / "group" / "new\x1b[2J", "failure: boom")
    (tmp_path / "group" / "again").symlink_to(tmp_path)
    create_run(old / "archived-1")

    _, *rows = run_command(f"runs {tmp_path}").splitlines()

    assert [" ".join(row.split()[1:6]) for row in rows] == [
        "crashed 50 100 7.5000 100",
        "finished 50 50 7.5000 100",
    ]
    assert "new\\x1b[2J" in rows[0]
    assert "2:00:" in rows[1]

    new, old = json.loads(run_command(f"runs {tmp_path} --json"))["runs"]

    assert (new["state"], new["step"], new["loss"]) == ("crashed", 50, 7.5)
    assert new["exit_reason"] == "boom"
    assert old["state"] == "finished"
