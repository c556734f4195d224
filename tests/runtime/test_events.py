"""events.jsonl: the lines of the log that are events, and no others."""

import json
import pickle
from pathlib import Path

from titanlite.runtime.logging import EVENTS_FILE, LOG_FILE, Event, note_end, setup_logging


def events(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / EVENTS_FILE).read_text().splitlines()]


def test_an_event_is_a_line_of_the_log_and_stands_in_events_jsonl_with_its_time(tmp_path: Path) -> None:
    log = setup_logging(0, tmp_path / LOG_FILE).info
    log("a line")
    log(Event("saved step 5\x1b[2J\nto a folder", "save", 5, took=0.5))
    written = (tmp_path / LOG_FILE).read_text()
    assert "a line" in written
    assert "saved step 5\\x1b[2J" in written
    (event,) = events(tmp_path)
    assert isinstance(event.pop("time"), float)
    assert event == {"event": "save", "step": 5, "text": "saved step 5\\x1b[2J\nto a folder", "took": 0.5}


def test_an_event_goes_to_another_process_as_it_is() -> None:
    event = pickle.loads(pickle.dumps(Event("saved", "save", 5, took=0.5)))
    assert (event, event.kind, event.step, event.details) == ("saved", "save", 5, {"took": 0.5})


def test_an_event_follows_what_was_there_even_a_line_that_was_cut(tmp_path: Path) -> None:
    (tmp_path / EVENTS_FILE).write_text('{"time": 1.0, "event": "sa')
    setup_logging(0, tmp_path / LOG_FILE).info(Event("again", "start", 0))
    cut, whole = (tmp_path / EVENTS_FILE).read_text().splitlines()
    assert cut == '{"time": 1.0, "event": "sa'
    assert json.loads(whole)["text"] == "again"


def test_only_rank_0_writes_events(tmp_path: Path) -> None:
    setup_logging(1, tmp_path / LOG_FILE).info(Event("saved", "save", 1))
    assert not (tmp_path / EVENTS_FILE).exists()


def test_an_end_is_an_event_also_if_the_launcher_notes_it(tmp_path: Path) -> None:
    """The launcher names the log, because it has set up none."""
    note_end("rank 1 was killed", "failure", tmp_path / LOG_FILE)
    setup_logging(0, tmp_path / LOG_FILE)
    note_end("x" * 5000 + " is the reason", "guard")
    first, second = events(tmp_path)
    assert (first["event"], first["step"], first["text"]) == ("failure", None, "rank 1 was killed")
    assert second["event"] == "guard"
    assert str(second["text"]).endswith("x is the reason")
    assert len(str(second["text"])) == 4000
