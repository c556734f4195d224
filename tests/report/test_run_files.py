"""What a run's files show: its state, from this machine or another, whatever they hold; `watch`, `runs` and training
on a terminal."""

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
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text
from small_runs import SMALL

from titanlite.cli import main
from titanlite.report.page import page_data
from titanlite.report.run_files import read_status, sparkline
from titanlite.report.view import View


def line(step: int, **changes: Any) -> str:
    entry = {
        "step": step,
        "loss": 8.0 - step / 100,
        "tps": 100.0,
        "tps_per_device": 100.0,
        "step_time": 0.1,
    }
    return json.dumps(entry | {"time": time.time()} | changes) + "\n"


def a_run(
    folder: Path, *events: tuple[str, int | None, str], steps: int = 100, **start: Any
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(
        f'[job]\ndescription = "mine"\n[training]\nsteps = {steps}\n'
    )
    (folder / "metrics.jsonl").write_text("".join(line(step) for step in range(10, 60, 10)))
    place = {"host": "elsewhere", "process": 1} | start
    begun = {"time": time.time(), "event": "start", "step": 0, "text": "starts", **place}
    rest = [
        {"time": time.time(), "event": kind, "step": step, "text": text}
        for kind, step, text in events
    ]
    (folder / "events.jsonl").write_text(
        "".join(json.dumps(event) + "\n" for event in [begun, *rest])
    )
    return folder


def seen(folder: Path) -> tuple[str, str, int]:
    status = read_status(folder)
    return status.state, status.exit_reason, status.step


SAVED = ("save", 50, "saved step 50")


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], ("running", "", 50)),
        ([SAVED, ("finish", 100, "Finished after step 100.")], ("finished", "", 100)),
        ([SAVED, ("finish", 60, "Finished after step 60: No gain.")], ("finished", "No gain.", 60)),
        ([SAVED, ("stop", None, "Stopped by SIGTERM\nTo go on: ...")], ("stopped", "Stopped by SIGTERM", 50)),
        ([("guard", None, "Step 51: loss is nan")], ("stopped", "Step 51: loss is nan", 50)),
        ([("refusal", None, "line 3: no JSON")], ("failed", "line 3: no JSON", 50)),
        ([SAVED, ("stop", 50, ""), ("data", None, ""), ("refusal", None, "x:\n  y\nz")], ("refused", "x: y", 50)),
        ([("finish", 100, ""), ("data", None, ""), ("refusal", None, "y"), ("refusal", None, "x")],
         ("finished", "a later start was refused: x", 100)),
        ([("failure", None, "Traceback (most recent call last):\n  File x\nValueError: boom")],
         ("crashed", "ValueError: boom", 50)),
        ([("failure", None, "killed"), ("restart", None, "again")], ("running", "its launcher is restarting it", 50)),
    ],
)  # fmt: skip
def test_the_last_event_says_how_a_run_ended(
    tmp_path, events: list[Any], expected: tuple[str, str, int]
):
    assert seen(a_run(tmp_path, *events)) == expected


def test_a_run_that_was_killed_has_crashed_where_its_process_tells(tmp_path):
    with subprocess.Popen(["sleep", "600"]) as trains:
        a_run(tmp_path, host=socket.gethostname(), process=trains.pid)
        assert seen(tmp_path)[0] == "running"
        a_run(
            tmp_path, host=socket.gethostname(), process=trains.pid, time=time.time() - 60
        )  # it had another process
        assert seen(tmp_path)[0] == "crashed"
        trains.kill()
    a_run(tmp_path, host=socket.gethostname(), process=trains.pid)
    assert seen(tmp_path)[0] == "crashed"
    a_run(
        tmp_path, ("data", None, "of the next start"), host=socket.gethostname(), process=trains.pid
    )
    assert seen(tmp_path)[0] == "running"


def test_a_run_of_another_machine_is_stale_after_a_time_without_a_word(tmp_path):
    a_run(tmp_path, time=(old := time.time() - 3600))
    (tmp_path / "metrics.jsonl").write_text(line(10, time=old))
    assert seen(tmp_path)[0] == "stale"
    (tmp_path / "metrics.jsonl").write_text(
        line(10, time=old, step_time=3600.0)
    )  # steps of an hour
    assert seen(tmp_path)[0] == "running"


def test_a_resumed_run_is_at_the_step_of_its_start_and_of_a_large_file_the_end_is_read(
    tmp_path,
):
    a_run(tmp_path, SAVED, ("stop", None, "stopped"), ("start", 20, "goes back"), steps=999)
    (tmp_path / "metrics.jsonl").write_text(line(10) + line(20))
    status = read_status(tmp_path)
    assert (status.state, status.step, status.total_steps) == ("running", 20, 999)
    assert status.losses == [7.9, 7.8]
    (tmp_path / "metrics.jsonl").write_text("".join(line(step) for step in range(1, 20_001)))
    status = read_status(tmp_path)
    assert (status.step, status.problems) == (20_000, [])
    assert 1000 < len(status.losses) < 10_000


def test_metrics_of_version_0_2_are_read_by_their_new_names(tmp_path):
    a_run(tmp_path)
    old_names = {"loss_max": 9.0, "clipped": 0.5, "utilization": 0.9, "time_left": 40.0}

    (tmp_path / "metrics.jsonl").write_text(line(1, **old_names) + line(2, **old_names))

    assert "step 2/100  0:00:40 left" in read_status(tmp_path).to_lines()
    curves = page_data([tmp_path])["runs"][0]["curves"]["y"]
    assert {"loss_max_rank", "clip_fraction", "token_utilization"} < curves.keys()
    assert not old_names.keys() & curves.keys()


def test_the_eta_is_unknown_until_a_resumed_run_logs_a_step(tmp_path):
    a_run(
        tmp_path, SAVED, ("stop", None, "stopped"), ("data", None, "Data"), ("start", 50, "starts")
    )
    before, after = (
        line(step, time=time.time() + shift, eta=40.0) for step, shift in ((50, -9), (60, 9))
    )

    (tmp_path / "metrics.jsonl").write_text(before)
    assert "step 50/100" in read_status(tmp_path).to_lines()

    (tmp_path / "metrics.jsonl").write_text(before + after)
    assert "step 60/100  0:00:40 left" in read_status(tmp_path).to_lines()


def test_a_damaged_line_costs_that_line_and_is_named(tmp_path):
    """The last line is not damaged, but not finished."""
    path = a_run(tmp_path) / "metrics.jsonl"
    damage = b"\x00\xff\xfe{{{\n[1, 2]\n" + b"[" * 100_000 + b"\n"  # no JSON, no object, too deep
    path.write_bytes(line(10).encode() + damage + line(20).encode() + b'{"step": 30, "lo')
    status = read_status(tmp_path)
    assert status.step == 20
    assert status.problems == ["metrics.jsonl: 3 damaged lines skipped"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "config.toml"])
def test_a_file_that_cannot_be_read_is_named_and_the_rest_is_shown(tmp_path, name: str):
    (a_run(tmp_path) / name).unlink()
    for make in (os.mkdir, os.mkfifo):  # opening a pipe would wait for ever
        make(tmp_path / name)
        assert any(name in problem for problem in read_status(tmp_path).problems)
        (tmp_path / name).rmdir() if make is os.mkdir else (tmp_path / name).unlink()


def in_terminal(*words: str, **environment: str) -> str:
    """What `titanlite WORDS` writes to a terminal, without its codes."""
    ours, theirs = pty.openpty()
    variables = {**os.environ, "TERM": "xterm", "COLUMNS": "40", "LOG_RANK": "0", **environment}
    command = [sys.executable, "-m", "titanlite", *words]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=variables)
    os.close(theirs)
    output = b""
    with contextlib.suppress(OSError):  # Linux reports the closed terminal as an error
        while chunk := os.read(ours, 65536):
            output += chunk
    assert process.wait() == 0, output
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode())


def test_a_run_that_has_ended_is_shown_once(tmp_path, capsys):
    a_run(
        tmp_path,
        ("save", 50, "saved [red]step 50\nin\x1b[2J"),
        ("finish", 50, "Finished\u202e \r"),
        steps=50,
    )
    assert main(["watch", str(tmp_path)]) == 0
    *lines, started, saved, finished = capsys.readouterr().out.splitlines()
    numbers = ["step 50/50", "loss 7.5000  █▆▅▃▁", "100 tokens/s  0.1 s/step"]
    assert lines == [f"finished  {tmp_path.name}: mine", *numbers]
    assert [text[15:] for text in (started, saved, finished)] == [
        "starts",
        "saved [red]step 50",
        "Finished\\u202e \\r",
    ]
    (tmp_path / "config.toml").write_text(f"[job]\ndescription = '{'漢字' * 40}'")
    output = in_terminal("watch", str(tmp_path))
    assert "finished  " in output
    assert all(len(text) <= 40 for text in output.splitlines())
    assert "tokens/s" not in in_terminal("runs", str(tmp_path))  # no room


def test_the_view_erases_all_rows_into_which_a_narrower_window_has_broken_its_lines():
    console = Console(
        file=io.StringIO(), force_terminal=True, _environ={"TERM": "xterm"}, width=100, height=40
    )
    with View(
        Text("\n".join(["x" * 90] * 3), no_wrap=True, overflow="ellipsis"),
        console=console,
        auto_refresh=False,
    ):
        for width, rows in (
            (100, 3),
            (45, 6),
            (44, 6),
            (100, 3),
        ):  # what was drawn 45 wide makes two rows of 44
            drawn = len(console.file.getvalue())  # pyright: ignore[reportAttributeAccessIssue]
            console.width = width
            console.print("a line of the log")
            erased = console.file.getvalue()[drawn:].count("\x1b[1A")  # pyright: ignore
            assert erased == rows  # the cursor waits in the row below them


class Terminal(io.StringIO):
    """A terminal of a given width: `rows` is what a person sees."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.rows, self.row, self.column = width, [""], 0, 0

    def write(self, text: str) -> int:
        for part in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|.|\n", text):
            if part.endswith("A"):
                self.row -= int(part[2:-1])
            elif part == "\x1b[2K":
                self.rows[self.row] = ""
            elif part == "\r":
                self.column = 0
            elif part == "\n" or (self.column == self.width and len(part) == 1):
                self.row, self.column = self.row + 1, 0
                self.rows += [""] * (self.row - len(self.rows) + 1)
            if len(part) == 1 and part.isprintable():
                shown = self.rows[self.row].ljust(self.column)
                self.rows[self.row] = shown[: self.column] + part + shown[self.column + 1 :]
                self.column += 1
        return len(text)


def test_the_echo_of_ctrl_c_below_a_full_line_leaves_no_second_view():
    terminal = Terminal(width=56)
    console = Console(
        file=terminal, force_terminal=True, _environ={"TERM": "xterm"}, width=56, height=40
    )
    text = Text(
        "running  mine\n" + "saved step 50 to " + "x" * 90, no_wrap=True, overflow="ellipsis"
    )

    with View(text, console=console, auto_refresh=False, transient=True) as view:
        view.refresh()
        terminal.write("^C")
        console.print("a line of the log")
        view.refresh()

        assert [row for row in terminal.rows if row][:2] == ["a line of the log", "running  mine"]
        assert sum("running" in row for row in terminal.rows) == 1
    assert [row for row in terminal.rows if row] == ["a line of the log"]


def test_a_sparkline_of_nothing_of_one_value_and_of_many():
    falling = [-float(i) for i in range(1001)]
    assert [sparkline(values, 8) for values in ([], [3.0], falling)] == ["", "▄", "█▇▆▅▄▃▂▁"]


@pytest.mark.slow
def test_watching_follows_a_run_to_its_end_and_ctrl_c_ends_the_watching_quietly(
    tmp_path,
):
    a_run(tmp_path)
    command = [sys.executable, "-u", "-m", "titanlite", "watch", str(tmp_path)]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "bufsize": 1}
    watching: list[Any] = [subprocess.Popen(command, **pipes) for _ in range(2)]
    for process in watching:
        while "starts" not in process.stdout.readline():
            pass
    watching[0].send_signal(signal.SIGINT)
    _, errors = watching[0].communicate(timeout=60)
    assert (watching[0].returncode, errors) == (130, "")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("[]\n" + line(60))
    assert watching[1].stdout.readline() == "step 60/100\n"
    assert "loss 7.4" in watching[1].stdout.readline()
    assert "metrics.jsonl: 1 " in watching[1].stdout.readline()
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(
            json.dumps({"time": time.time(), "event": "finish", "step": 100, "text": "Finished"})
            + "\n"
        )
    said, errors = watching[1].communicate(timeout=60)
    assert (watching[1].returncode, errors) == (0, "")
    assert said.startswith("finished  ")


@pytest.mark.slow
def test_training_on_a_terminal_shows_its_log_and_the_view_below_it(tmp_path):
    (tmp_path / "small.toml").write_text(SMALL)
    words = [
        "train",
        "--job.config_file",
        f"{tmp_path}/small.toml",
        "--job.dump_folder",
        f"{tmp_path}/mine",
    ]
    output = in_terminal(*words, COLUMNS="120")
    assert re.search(r"\[\d\d:\d\d:\d\d\] step  3/12  loss", output)
    assert "running  mine" in output
    assert not (tmp_path / "mine/validation.jsonl").exists()  # the job has no validation
    assert "running  mine" not in in_terminal(*words, TERM="dumb")  # it cannot move its cursor


def test_runs_are_listed_the_latest_first_and_each_once(tmp_path, capsys):
    a_run(tmp_path / "old", ("finish", 50, "Finished"), steps=50)
    for path in (tmp_path / "old").glob("*.jsonl"):
        path.write_text(
            re.sub(r'"time": [\d.]+', f'"time": {time.time() - 7200}', path.read_text())
        )
    a_run(tmp_path / "group" / "new\x1b[2J", ("failure", None, "boom"))
    (tmp_path / "group" / "again").symlink_to(tmp_path)
    a_run(tmp_path / "old" / "archived-1")
    assert main(["runs", str(tmp_path)]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    expected = [
        ["crashed", "50", "100", "7.5000", "100"],
        ["finished", "50", "50", "7.5000", "100"],
    ]
    assert [row.split()[1:6] for row in rows] == expected
    assert "new\\x1b[2J" in rows[0]
    assert "2:00:" in rows[1]
    assert main(["runs", str(tmp_path), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["runs"]
    assert [(run["state"], run["step"], run["loss"]) for run in listed] == [
        ("crashed", 50, 7.5),
        ("finished", 50, 7.5),
    ]
    assert listed[0]["exit_reason"] == "boom"
