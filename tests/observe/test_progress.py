"""The bar shows on a terminal, below the log lines, and nowhere else."""

import os
import pty
import re
import subprocess
import sys

from titanlite.observe.progress import ProgressBar

SCRIPT = """
from titanlite.runtime.logging import setup_logging
from titanlite.observe.progress import ProgressBar
import sys
rank = int(sys.argv[1])
logger = setup_logging(rank, None)
with ProgressBar(total_steps=40, resumed_step=10, rank=rank) as bar:
    bar.update(11, "loss 4.3210  1,234 tokens/s  eta 0:00:09")
    logger.info("a log line")
    logger.info("another one")
    bar.update(12)
"""


def run_in_terminal(rank: int) -> str:
    """Output of SCRIPT with a pseudo-terminal as its standard output."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LOG_RANK": "0"}
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, str(rank)], stdout=theirs, stderr=theirs, env=environment)
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
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode())


def test_terminal_shows_step_and_status_and_keeps_log_lines_whole():
    output = run_in_terminal(rank=0)
    assert "12/40" in output
    assert "loss 4.3210  1,234 tokens/s  eta 0:00:09" in output
    for line in ("a log line", "another one"):
        assert re.search(rf"\[\d\d:\d\d:\d\d\] {line}", output)


def test_a_terminal_that_goes_away_does_not_end_the_run():
    ours, theirs = pty.openpty()
    waiting = SCRIPT.replace("    bar.update(12)", '    input()\n    bar.update(12)\n    logger.info("a last line")')
    said = "sys.stdout.flush(); sys.stderr.write('went on to the end')"
    environment = {**os.environ, "TERM": "xterm", "LOG_RANK": "0"}
    process = subprocess.Popen(
        [sys.executable, "-c", waiting + said, "0"],
        stdin=subprocess.PIPE,
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    os.close(theirs)
    os.read(ours, 1)
    os.close(ours)
    _, errors = process.communicate("\n", timeout=60)
    assert (process.returncode, errors) == (0, "went on to the end")


def test_other_ranks_show_no_bar():
    assert run_in_terminal(rank=1) == ""


def test_no_bar_without_a_terminal(capsys):
    with ProgressBar(total_steps=4, resumed_step=0, rank=0) as bar:
        bar.update(1, "loss 1")
    assert capsys.readouterr() == ("", "")
