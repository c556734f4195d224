"""The view of a run: what it says, on any terminal, and that training shows it below its log lines."""

import contextlib
import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from small_runs import SMALL

from titanlite.observe.live import RunStatus, View, plain_line, sparkline


def status(**changes: object) -> RunStatus:
    found = RunStatus("a run", total_steps=400)
    for step in range(10, 130, 10):
        numbers = {"step": step, "loss": 8 - step / 40, "tps": 6589.4, "memory": 0.67, "step_time": 0.5, "lr": 1e-3}
        found.logged({**numbers, "grad_norm": 0.7, "mfu": None, "time_left": 140.0})
    found.events.append((1e9, "saved step 100 to outputs/x\nwith a second line"))
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def shown(state: RunStatus, width: int, encoding: str = "utf-8") -> list[str]:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    Console(file=file, width=width).print(View(state))
    file.seek(0)
    return file.read().splitlines()


def in_terminal(_: int, script: str, **environment: str) -> str:
    """Output of a script with a pseudo-terminal as its standard output."""
    ours, theirs = pty.openpty()
    variables = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LOG_RANK": "0", **environment}
    process = subprocess.Popen([sys.executable, "-c", script], stdout=theirs, stderr=theirs, env=variables)
    os.close(theirs)
    output = b""
    with contextlib.suppress(OSError):  # Linux reports the closed terminal as an error
        while chunk := os.read(ours, 65536):
            output += chunk
    assert process.wait() == 0, output
    return output.decode()


def without_codes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_a_view_says_state_progress_time_left_loss_speed_memory_and_events() -> None:
    text = shown(status(), 100)
    assert text[0] == "running  a run"
    assert text[1] == "step 120/400  0:02:20 left"
    assert text[3] == "loss 5.0000  █▇▇▆▅▅▄▄▃▂▂▁"
    assert text[4] == "6,589 tokens/s  0.67 GiB  0.5 s a step  grad_norm 0.700  lr 1.00e-03"
    assert text[5].endswith("saved step 100 to outputs/x")
    found = status(total_steps=None)
    found.logged({"step": 130, "step_time": 0.5})
    assert shown(found, 100)[1:3] == ["step 130", "0.5 s a step"]


def test_the_state_tells_how_a_run_ended_and_why() -> None:
    text = shown(status(state="crashed", reason="rank 3 was killed"), 80)
    assert text[0].startswith("crashed")
    assert "left" not in text[1]
    assert "rank 3 was killed" in text
    assert plain_line(status(state="crashed", reason="rank 3 was killed")) == (
        "crashed  step 120/400  loss 5.0000  6,589 tokens/s  0.67 GiB  0.5 s a step  (rank 3 was killed)"
    )


@pytest.mark.parametrize("width", [1, 40, 200])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_no_line_is_wider_than_the_window_and_a_terminal_without_unicode_gets_ascii(width: int, encoding: str) -> None:
    state = status(reason="x" * 300, problems=["y" * 300], title="漢字" * 100 if encoding == "utf-8" else "a run")
    assert all(len(line) <= width for line in shown(state, width, encoding))


def test_texts_from_files_cannot_command_the_terminal_or_pretend_to_be_another_line() -> None:
    bad = "x\x1b[2J\r\u2028\u202e\nrunning"
    for line in [*shown(status(title=bad, reason=bad, problems=[bad]), 200), plain_line(status(reason=bad))]:
        assert line.isprintable()
    assert "[red]" in shown(status(title="[red]markup[/red]"), 80)[0]


def test_a_sparkline_goes_from_the_first_to_the_last_step() -> None:
    assert sparkline([], 10) == sparkline([1.0], 0) == ""
    assert sparkline([3.0], 10) == "▄"
    assert sparkline([8.0, 4.0, 1.0], 3) == "█▄▁"
    state = RunStatus("long", total_steps=100_000)
    for step in range(1, 100_000):
        state.logged({"step": step, "loss": float("nan") if step % 10 == 0 else 1e6 - step})
    assert len(state.losses) <= 512
    assert sparkline([loss for _, loss in state.losses], 8) == "█▇▆▅▄▃▂▁"


def train_in_terminal(tmp_path: Path, **environment: str) -> str:
    (tmp_path / "small.toml").write_text(SMALL)
    words = ["train", "--job.config_file", f"{tmp_path}/small.toml", "--job.dump_folder", f"{tmp_path}/mine"]
    return in_terminal(0, f"import sys; from titanlite.cli import main; sys.exit(main({words}))", **environment)


@pytest.mark.slow
def test_training_on_a_terminal_shows_the_view_below_whole_log_lines_and_no_lines_of_steps(tmp_path: Path) -> None:
    output = train_in_terminal(tmp_path)
    assert re.search(r"\x1b\[[0-9;]*(3[0-7]|9[0-7])m", output)  # colors
    output = without_codes(output)
    assert re.search(r"\[\d\d:\d\d:\d\d\] saved step 10 to ", output)
    assert "step 12/12" in output
    assert "grad_norm" in output
    assert "step  3/12  loss" not in output
    assert output.rindex("finished  ") > output.rindex("running  ")
    assert "step  3/12  loss" in (tmp_path / "mine" / "train.log").read_text()
    resumed = without_codes(train_in_terminal(tmp_path, NO_COLOR="1"))
    assert "Nothing to do" in resumed
    assert re.search(r"loss \d\.\d+  [▁▂▃▄▅▆▇█]{12}", resumed)  # what the start before has measured
    dumb = train_in_terminal(tmp_path, TERM="dumb")  # it cannot move its cursor
    assert "\x1b" not in dumb
    assert "finished  " not in dumb
