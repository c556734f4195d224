"""The view of a run: what it says, on any terminal, and that training shows it below its log lines."""

import io
import itertools
import math
import os
import pty
import re
import subprocess
import sys
from datetime import timedelta

import pytest
from rich.console import Console

from titanlite.observe.live import LiveView, Losses, RunStatus, View, lines, plain_line, sparkline

SCRIPT = """
import sys, time
from titanlite.observe.live import LiveView, RunStatus
from titanlite.observe.logged_step import LoggedStep, StepLine
from titanlite.runtime.logging import Event
from titanlite.runtime.logging import setup_logging
logger = setup_logging(int(sys.argv[1]), None)
entry = dict.fromkeys(LoggedStep.__annotations__, 0) | {"step": 11, "loss": 4.321, "tps": 1234.0, "step_time": 1.0}
with LiveView(lambda: RunStatus("mine", total_steps=40), int(sys.argv[1])) as view:
    view.update(11, LoggedStep(**entry))
    logger.info("a log line")
    logger.info(StepLine("step 11/40 as a line"))
    logger.info(Event("saved step 11", "save", 11))
    view.update(12)
"""


def status(**changes: object) -> RunStatus:
    found = RunStatus("a run", total_steps=400)
    for step in range(10, 130, 10):
        numbers = {"step": step, "loss": 8 - step / 40, "tps": 6589.4, "memory": 0.67, "step_time": 0.5, "lr": 1e-3}
        found.logged({**numbers, "grad_norm": 0.7, "mfu": None})
    found.events.append((1e9, "saved step 100 to outputs/x\nwith a second line"))
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def shown(state: RunStatus, width: int, **options: bool) -> list[str]:
    return [line.plain for line in lines(state, width, **options)]


def in_terminal(rank: int, script: str = SCRIPT, **environment: str) -> str:
    """Output of a script with a pseudo-terminal as its standard output."""
    ours, theirs = pty.openpty()
    variables = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LOG_RANK": "0", **environment}
    process = subprocess.Popen([sys.executable, "-c", script, str(rank)], stdout=theirs, stderr=theirs, env=variables)
    os.close(theirs)
    output = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # Linux reports the closed terminal as an error
            break
        if not chunk:
            break
        output += chunk
    assert process.wait() == 0, output
    return output.decode()


def without_codes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_a_view_says_state_progress_time_left_loss_speed_memory_and_events() -> None:
    text = shown(status(), 100)
    assert text[0] == "running  a run"
    assert text[1].startswith("step 120/400")
    assert text[1].endswith("30%  0:02:20 left")
    assert text[2] == "loss 5.0000  █▇▇▆▅▅▄▄▃▂▂▁"
    assert text[3] == "6,589 tokens/s  0.67 GiB  0.5 s a step  grad_norm 0.700  lr 1.00e-03"
    assert text[4].endswith("saved step 100 to outputs/x")


def test_a_view_says_which_parts_of_a_step_take_its_time() -> None:
    parts = {"data_time": 0.02, "forward_backward_time": 0.4, "optimizer_time": 0.079, "checkpoint_time": 0.001}
    found = status()
    found.logged({"step": 130, "step_time": 0.5, "other_time": 0.0, **parts})
    assert shown(found, 100)[2] == "0.5 s a step  forward backward 80%  optimizer 16%  data 4%"
    found.logged({"step": 140, "step_time": 0.0, "other_time": float("inf")})
    assert shown(found, 100)[2] == "0 s a step"


@pytest.mark.parametrize("width", [1, 5, 12, 20, 40, 79, 200])
def test_no_line_is_wider_than_the_window(width: int) -> None:
    state = status(reason="x" * 300, problems=["y" * 300], title="漢字" * 100)
    file = io.StringIO()
    Console(file=file, width=width).print(View(state))
    assert all(len(line) <= width for line in file.getvalue().splitlines())
    assert len(file.getvalue().splitlines()) == len(shown(state, width))


def test_a_terminal_without_unicode_gets_ascii() -> None:
    assert "\n".join(shown(status(title="a run"), 60, ascii_only=True)).isascii()


def test_texts_from_files_cannot_command_the_terminal_or_pretend_to_be_another_line() -> None:
    bad = "x\x1b[2J\r\u2028\u202e\nrunning"
    for line in [*shown(status(title=bad, reason=bad, problems=[bad]), 200), plain_line(status(reason=bad))]:
        assert line.isprintable()
    assert "[red]" in shown(status(title="[red]markup[/red]"), 80)[0]


def test_the_state_tells_how_a_run_ended_and_why() -> None:
    text = shown(status(state="crashed", reason="rank 3 was killed"), 80)
    assert text[0].startswith("crashed")
    assert "left" not in text[1]
    assert "rank 3 was killed" in text
    assert plain_line(status(state="crashed", reason="rank 3 was killed")) == (
        "crashed  step 120/400  loss 5.0000  6,589 tokens/s  0.67 GiB  0.5 s a step  (rank 3 was killed)"
    )


def test_the_time_left_is_that_of_the_median_step_and_unknown_without_a_total() -> None:
    state = status()
    state.step_times.extend([0.5, 100.0])  # a step that compiled
    assert state.time_left() == timedelta(seconds=140)
    assert status(total_steps=None).time_left() is None
    assert plain_line(status(total_steps=None)).startswith("running  step 120  loss")


def test_a_sparkline_goes_from_the_first_to_the_last_step() -> None:
    assert sparkline([], 10) == ""
    assert sparkline([(1, 3.0)], 10) == "▄"
    assert sparkline([(0, 8.0), (50, 4.0), (100, 1.0)], 3) == "█▄▁"
    assert sparkline([(0, 8.0), (1, 8.0), (100, 1.0)], 3) == "██▁"  # nothing is known between
    assert len(sparkline([(step, 1.0 / step) for step in range(1, 1000)], 30)) == 30


def test_losses_of_a_long_run_stay_few_and_even() -> None:
    losses = Losses()
    for step in range(100_000):
        losses.add(step, math.nan if step % 10 == 0 else step)
    steps = [step for step, _ in losses.points]
    assert 256 <= len(steps) < 512
    gaps = {round(b - a) for a, b in itertools.pairwise(steps)}
    assert max(gaps) - min(gaps) <= 2
    assert all(step == loss for step, loss in losses.points)


def test_training_on_a_terminal_shows_the_view_below_whole_log_lines_and_no_lines_of_steps() -> None:
    output = without_codes(in_terminal(rank=0))
    assert "step 12/40" in output
    assert "loss 4.3210" in output
    for line in ("a log line", "saved step 11"):
        assert re.search(rf"\[\d\d:\d\d:\d\d\] {line} *\r\n", output)
    assert "as a line" not in output
    assert output.rindex("stopped  mine") > output.rindex("a log line")
    finished = SCRIPT.replace("    view.update(12)", "    view.finished = True")
    assert "finished  mine" in without_codes(in_terminal(0, finished))
    failed = SCRIPT.replace("    view.update(12)", "    sys.excepthook = lambda *_: None; raise SystemExit(0)")
    assert "crashed  mine" in without_codes(in_terminal(0, failed))


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"TERM": "unknown"}])
def test_a_terminal_that_cannot_move_its_cursor_gets_lines(environment: dict[str, str]) -> None:
    output = in_terminal(rank=0, **environment)
    assert "\x1b" not in output
    assert "step 11/40 as a line" in output
    assert "mine" not in output


def test_no_color_means_no_color() -> None:
    color = re.compile(r"\x1b\[[0-9;]*(3[0-7]|9[0-7])m")
    assert color.search(in_terminal(rank=0))
    assert not color.search(in_terminal(rank=0, NO_COLOR="1"))


def test_a_terminal_that_goes_away_does_not_end_the_run() -> None:
    ours, theirs = pty.openpty()
    waiting = SCRIPT.replace("    view.update(12)", '    input()\n    view.update(12)\n    logger.info("a last line")')
    said = "sys.stdout.flush(); sys.stderr.write('went on to the end')"
    process = subprocess.Popen(
        [sys.executable, "-c", waiting + said, "0"],
        stdin=subprocess.PIPE,
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TERM": "xterm", "LOG_RANK": "0"},
    )
    os.close(theirs)
    os.read(ours, 1)
    os.close(ours)
    _, errors = process.communicate("\n", timeout=60)
    assert (process.returncode, errors) == (0, "went on to the end")


def test_the_view_is_drawn_at_most_once_a_second() -> None:
    many = SCRIPT.replace(
        "    view.update(12)", "    for step in range(12, 5000): view.update(step, LoggedStep(**entry))"
    )
    output = in_terminal(0, many, COLUMNS="60")
    assert output.count("mine") < 20  # 5,000 steps take less than ten seconds
    assert "4999/40" not in output.partition("saved step 11")[0]


def test_other_ranks_show_no_view() -> None:
    assert in_terminal(rank=1) == ""


def test_no_view_without_a_terminal_and_no_file_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    with LiveView(lambda: pytest.fail("read"), rank=0) as view:
        view.update(1)
    assert capsys.readouterr() == ("", "")
