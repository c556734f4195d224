"""What reaches the terminal and train.log, rank by rank."""

import logging
import os
import re
import subprocess
import sys
import warnings

import pytest

from titanlite.config.errors import UserError
from titanlite.runtime.logging import Event, failed_writes, logged_ranks, setup_logging

CLOCK = r"\[\d\d:\d\d:\d\d\]"


@pytest.fixture(autouse=True)
def _restore_logging():
    yield
    for name in ("titanlite", "py.warnings"):
        logging.getLogger(name).handlers.clear()
    logging.captureWarnings(False)


def test_rank_0_is_logged_by_default_with_the_time(monkeypatch, capsys):
    monkeypatch.delenv("LOG_RANK", raising=False)
    setup_logging(0, None).info("a line")
    assert re.fullmatch(rf"{CLOCK} a line\n", capsys.readouterr().out)


def test_other_ranks_print_nothing_but_errors(monkeypatch, capsys):
    monkeypatch.delenv("LOG_RANK", raising=False)
    logger = setup_logging(1, None)
    logger.info("silent")
    logger.warning("silent too")
    warnings.warn("and this", stacklevel=1)
    assert capsys.readouterr() == ("", "")
    logger.error("broken")
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(rf"{CLOCK} \[rank 1\] ERROR: broken\n", err)


@pytest.mark.parametrize(("rank", "said"), [(0, ["careful", "broken"] * 2), (1, ["broken"] * 2)])
def test_libraries_do_not_warn_on_other_ranks_either(rank: int, said: list[str]):
    """torch has a handler of its own, torchao none. In a process of its own, as pytest handles every logger."""
    code = f"""
import logging
logging.getLogger("torch").addHandler(logging.StreamHandler())
logging.getLogger("torch").propagate = False
from titanlite.runtime.logging import setup_logging
setup_logging({rank}, None)
for name in ("torch.fx", "torchao"):
    logging.getLogger(name).warning("careful")
    logging.getLogger(name).error("broken")
"""
    environment = {name: value for name, value in os.environ.items() if name != "LOG_RANK"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ended.stderr.split() == said
    assert ended.stdout == ""


def test_several_named_ranks_carry_a_prefix(monkeypatch, capsys):
    monkeypatch.setenv("LOG_RANK", "0, 2")
    setup_logging(2, None).info("here")
    assert re.fullmatch(rf"{CLOCK} \[rank 2\] here\n", capsys.readouterr().out)


def test_one_named_rank_needs_no_prefix(monkeypatch, capsys):
    monkeypatch.setenv("LOG_RANK", "3")
    setup_logging(3, None).info("here")
    setup_logging(0, None).info("not here")
    assert re.fullmatch(rf"{CLOCK} here\n", capsys.readouterr().out)


@pytest.mark.parametrize("text", ["all", "0;1", "-1", ","])
def test_a_wrong_log_rank_is_named(monkeypatch, text):
    monkeypatch.setenv("LOG_RANK", text)
    with pytest.raises(UserError, match=re.escape(f'LOG_RANK = "{text}"')):
        logged_ranks()


def test_rank_0_appends_to_its_file_even_if_the_terminal_shows_another_rank(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("LOG_RANK", "1")
    log_file = tmp_path / "run" / "train.log"
    for run in ("first", "second"):
        setup_logging(0, log_file).info(f"{run} run")
    setup_logging(1, log_file).info("rank 1")
    lines = log_file.read_text().splitlines()
    assert [line.split("] ")[-1] for line in lines] == ["first run", "second run"]
    assert re.match(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] \[rank 0\]", lines[0])
    assert "first run" not in capsys.readouterr().out


def test_setting_up_twice_does_not_print_twice(monkeypatch, capsys):
    monkeypatch.delenv("LOG_RANK", raising=False)
    setup_logging(0, None)
    setup_logging(0, None).info("once")
    assert capsys.readouterr().out.count("once") == 1


def test_python_warnings_become_log_lines(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("LOG_RANK", raising=False)
    setup_logging(0, tmp_path / "train.log")
    warnings.warn("look at this", stacklevel=1)
    assert "WARNING: " in capsys.readouterr().out
    assert "look at this" in (tmp_path / "train.log").read_text()


def test_a_message_cannot_command_the_terminal_or_pretend_to_be_another_line(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("LOG_RANK", raising=False)
    description = "mine\x1b[2J\r\u2028\n[12:00:00] step 9  loss 0.0\n[2026-01-01 12:00:00] saved\u202e\x85\ud800"
    setup_logging(0, tmp_path / "train.log").info(description)
    for text in (capsys.readouterr().out, (tmp_path / "train.log").read_text()):
        lines = text.rstrip("\n").split("\n")
        assert [line.startswith("[") for line in lines] == [True, False, False]
        assert r"mine\x1b[2J\x0d\u2028" in lines[0]
        assert lines[2].endswith(r"saved\u202e\x85\ud800")
        assert all(line.isprintable() for line in lines)


def test_import_is_cheap():
    """`titanlite --help` must answer at once: neither rich nor torch is loaded before a terminal needs it."""
    code = "import sys, titanlite.runtime.logging, titanlite.observe.live; print({'rich', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.parametrize("full", ["train.log", "events.jsonl"])
def test_a_full_disk_is_said_once_counted_and_stops_nothing(monkeypatch, tmp_path, capsys, full):
    monkeypatch.delenv("LOG_RANK", raising=False)
    (tmp_path / full).symlink_to("/dev/full")
    logger = setup_logging(0, tmp_path / "train.log")
    for step in range(3):
        logger.info(Event(f"saved step {step}", "save", step))
    out, err = capsys.readouterr()
    assert out.count("its log cannot be written") == 1
    assert f"{full}: [Errno 28]" in out
    assert err == ""
    assert all(f"saved step {step}\n" in out for step in range(3))
    assert failed_writes() >= 3
    setup_logging(0, None)  # closes the files


def test_a_log_that_is_gone_with_its_folder_stops_nothing(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("LOG_RANK", raising=False)
    logger = setup_logging(0, tmp_path / "run/train.log")
    (tmp_path / "run").rename(tmp_path / "moved")
    for _ in range(2):
        logger.info("a line")
    out, err = capsys.readouterr()
    assert (out.count("a line"), out.count("cannot be written"), err) == (2, 1, "")


def test_standard_output_on_a_full_disk_stops_nothing(tmp_path):
    code = f"""
import pathlib
from titanlite.runtime.logging import setup_logging
setup_logging(0, pathlib.Path({str(tmp_path / "train.log")!r})).info("a line")
"""
    environment = {name: value for name, value in os.environ.items() if name != "LOG_RANK"}
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", code], env=environment, stdout=full, stderr=subprocess.PIPE, text=True, check=True
        )
    assert "Logging error" not in ended.stderr
    written = (tmp_path / "train.log").read_text()
    assert "a line" in written
    assert written.count("cannot be written: <stdout>: [Errno 28]") == 1
