"""`titanlite watch` and `titanlite runs`, as a user calls them."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from observe.test_live import in_terminal, without_codes
from report.test_run_files import a_run, line

from titanlite.cli import main


def test_a_run_that_has_ended_is_shown_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(tmp_path, ("save", 50, "saved step 50"), ("finish", 50, "Finished after step 50."), steps=50)
    assert main(["watch", str(tmp_path)]) == 0
    *events, last = capsys.readouterr().out.splitlines()
    assert [event.split("  ", 1)[1] for event in events] == ["starts", "saved step 50", "Finished after step 50."]
    assert last == "finished  step 50/50  loss 7.5000  100 tokens/s  0.1 s a step"
    script = f"import sys; from titanlite.cli import main; sys.exit(main(['watch', {str(tmp_path)!r}]))"
    output = without_codes(in_terminal(0, script, COLUMNS="40"))
    assert "finished  " in output
    assert all(len(text) <= 40 for text in output.splitlines())


@pytest.mark.slow
def test_watching_follows_a_run_to_its_end_and_ctrl_c_ends_the_watching_quietly(tmp_path: Path) -> None:
    a_run(tmp_path)
    command = [sys.executable, "-u", "-m", "titanlite", "watch", str(tmp_path), "--interval", "0.05"]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "bufsize": 1}
    watching = [subprocess.Popen(command, **pipes) for _ in range(2)]
    for process in watching:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("running  step 50/100"):
            pass
    watching[0].send_signal(signal.SIGINT)
    _, errors = watching[0].communicate(timeout=60)
    assert (watching[0].returncode, errors) == (130, "")
    stdout = watching[1].stdout
    assert stdout is not None
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("[]\n" + line(60))
    assert stdout.readline().startswith("running  step 60/100")
    assert stdout.readline() == "metrics.jsonl: 1 line cannot be read\n"
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time(), "event": "finish", "step": 100, "text": "Finished"}) + "\n")
    said, errors = watching[1].communicate(timeout=60)
    assert (watching[1].returncode, errors) == (0, "")
    assert "finished  step 100/100" in said


def test_runs_are_listed_the_latest_first_and_each_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_run(tmp_path / "old", ("finish", 50, "Finished"), steps=50)
    for path in (tmp_path / "old").glob("*.jsonl"):
        path.write_text(re.sub(r'"time": [\d.]+', f'"time": {time.time() - 7200}', path.read_text()))
    a_run(tmp_path / "group" / "new\x1b[2J", ("failure", None, "boom"))
    (tmp_path / "group" / "again").symlink_to(tmp_path)
    assert main(["runs", str(tmp_path)]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    expected = [["crashed", "50", "100", "7.5000", "100"], ["finished", "50", "50", "7.5000", "100"]]
    assert [row.split()[1:6] for row in rows] == expected
    assert "new\\x1b[2J" in rows[0]
    assert "2:00:" in rows[1]
    assert main(["runs", str(tmp_path), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["runs"]
    assert [(run["state"], run["step"], run["loss"]) for run in listed] == [("crashed", 50, 7.5), ("finished", 50, 7.5)]
    assert listed[0]["reason"] == "boom"


def test_mistakes_are_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = str(tmp_path / "nowhere")
    for words in (["watch", str(tmp_path)], ["runs", str(tmp_path)], ["runs", nowhere]):
        assert main(words) == 2
        assert str(tmp_path) in capsys.readouterr().err
    assert main(["watch", str(a_run(tmp_path)), "--interval", "0"]) == 2
