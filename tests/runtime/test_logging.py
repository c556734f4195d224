"""Each rank logs to the terminal, train.log and events.jsonl as configured."""

import json
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from titanlite.runtime.logging import EVENTS_FILE, LOG_FILE, Event, failed_writes, setup_logging

CLOCK = r"\[\d\d:\d\d:\d\d\]"


@pytest.fixture(autouse=True)
def restore_logging(monkeypatch) -> Iterator[None]:
    monkeypatch.delenv("LOG_RANK", raising=False)
    yield
    logging.captureWarnings(False)


@pytest.mark.parametrize(
    ("shown", "rank", "out", "err"),
    [
        ("", 0, f"{CLOCK} a line\n{CLOCK} ERROR: broken\n", ""),
        ("", 1, "", rf"{CLOCK} \[rank 1\] ERROR: broken\n"),
        ("0, 2", 2, rf"{CLOCK} \[rank 2\] a line\n{CLOCK} \[rank 2\] ERROR: broken\n", ""),
        ("3", 0, "", rf"{CLOCK} \[rank 0\] ERROR: broken\n"),
    ],
)
def test_the_terminal_shows_the_selected_ranks_and_the_errors_of_all_ranks(
    shown, rank, out, err, monkeypatch, capsys
):
    monkeypatch.setenv("LOG_RANK", shown)
    setup_logging(rank, None)
    # After a second call, each message must still be logged once.
    logger = setup_logging(rank, None)
    logger.info("a line")
    logger.error("broken")
    output = capsys.readouterr()

    assert re.fullmatch(out, output.out)
    assert re.fullmatch(err, output.err)


def test_rank_0_appends_to_its_files_even_if_the_terminal_shows_another_rank(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("LOG_RANK", "1")
    log_file = tmp_path / "run" / LOG_FILE
    for name in ("first", "second"):
        setup_logging(0, log_file).info(f"{name} run")
        warnings.warn("look at this", stacklevel=1)
    setup_logging(1, log_file).info(Event("rank 1", "save", 1))

    lines = [line for line in log_file.read_text().splitlines() if line.startswith("[")]
    messages = [line.rpartition("] ")[2] for line in lines if "WARNING" not in line]
    assert messages == ["first run", "second run"]
    # Python shows repeated warnings once.
    assert sum("WARNING: " in line and "look at this" in line for line in lines) == 1
    assert re.match(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] \[rank 0\]", lines[0])
    assert "first run" not in capsys.readouterr().out
    assert not (tmp_path / "run" / EVENTS_FILE).exists()


def test_a_log_does_not_follow_a_link_that_replaces_its_file(tmp_path):
    logger = setup_logging(0, tmp_path / LOG_FILE)
    (tmp_path / LOG_FILE).symlink_to(tmp_path / "elsewhere")
    logger.info("a line")
    assert not (tmp_path / "elsewhere").exists()


def test_messages_cannot_control_the_terminal_or_forge_lines(tmp_path, capsys):
    description = (
        "mine\x1b[2J\r\u2028\n[12:00:00] step 9  loss 0.0\n"
        "[2026-01-01 12:00:00] saved\u202e\x85\ud800"
    )
    setup_logging(0, tmp_path / LOG_FILE).info(Event(description, "save", 5, {"took": 0.5}))
    for text in (capsys.readouterr().out, (tmp_path / LOG_FILE).read_text()):
        lines = text.rstrip("\n").split("\n")
        assert [line.startswith("[") for line in lines] == [True, False, False]
        assert r"mine\x1b[2J" in lines[0]
        assert lines[2].endswith(r"saved\u202e\x85\ud800")
        assert all(line.isprintable() for line in lines)
    event = json.loads((tmp_path / EVENTS_FILE).read_text())

    assert isinstance(event.pop("time"), float)
    assert event.pop("text").startswith("mine\\x1b[2J")
    assert event == {"event": "save", "step": 5, "took": 0.5}


@pytest.mark.parametrize(
    "full",
    [LOG_FILE, EVENTS_FILE, "the folder is gone", "standard output", "closed standard output"],
)
def test_failed_writes_are_reported_once_and_counted_and_do_not_stop_the_run(
    tmp_path, capsys, monkeypatch, full
):
    folder = tmp_path / "run"
    folder.mkdir()
    if full in (LOG_FILE, EVENTS_FILE):
        (folder / full).symlink_to("/dev/full")
    logger = setup_logging(0, folder / LOG_FILE)
    is_stdout = full.endswith("standard output")
    if is_stdout:
        monkeypatch.setattr(sys, "stdout", Path("/dev/full").open("w"))  # noqa: SIM115
        if full.startswith("closed"):
            sys.stdout.close()
    elif full == "the folder is gone":
        folder.rename(tmp_path / "moved")
    for step in range(3):
        logger.info(Event(f"saved step {step}", "save", step))

    out, err = capsys.readouterr()
    text = (folder / LOG_FILE).read_text() if is_stdout else out
    # Without the folder, neither of the two files can be written.
    num_warnings = 2 if full == "the folder is gone" else 1
    assert err == ""
    assert text.count("The run continues, but cannot write to") == num_warnings
    assert all(f"saved step {step}\n" in text for step in range(3))
    assert failed_writes() >= (1 if is_stdout else 3)
