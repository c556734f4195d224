"""A start continues or archives output files, and never deletes or overwrites foreign files."""

import json
from pathlib import Path

import pytest
from small_runs import read_jsonl, read_log

from titanlite.config.errors import UserError
from titanlite.config.schema import JobConfig, Training
from titanlite.load_run import load_run
from titanlite.observe.outputs import OutputFolder
from titanlite.runtime.logging import Event, setup_logging


def start(
    folder: Path,
    run: str,
    resumed_step: int | None = None,
    steps: int = 10,
) -> str:
    """Start a run as the trainer does, and return its message about earlier files."""
    output = OutputFolder(folder)
    log = setup_logging(0, folder / "train.log")
    log.info(Event(f"{run} begins", "start"))
    job = JobConfig(training=Training(steps=steps))
    message = output.prepare(job, {"run": run}, resumed_step)
    log.info(f"{run} trains")
    return message


def measure(folder: Path, *steps: int, note: str) -> None:
    """Write the metrics of a run after `steps`."""
    for name in ("metrics.jsonl", "validation.jsonl"):
        with (folder / name).open("a") as file:
            for step in steps:
                file.write(json.dumps({"step": step, "note": note}) + "\n")
    (folder / "tb").mkdir(exist_ok=True)
    (folder / "tb" / f"events.{steps[-1]}{note}").write_text(note)


def steps_in(path: Path) -> list[int]:
    return [entry["step"] for entry in read_jsonl(path)]


def read_all(path: Path) -> str:
    """Return the content of a file, or of all files in a folder."""
    if path.is_file():
        return path.read_text()
    return "\n".join(sorted(map(read_all, path.iterdir())))


def test_a_new_run_archives_all_files_of_the_earlier_one_together(tmp_path):
    start(tmp_path, "first")
    message_without_metrics = start(tmp_path, "first")
    assert message_without_metrics == ""

    measure(tmp_path, 5, 10, note="of the first")
    before = {path.name: read_all(path) for path in tmp_path.iterdir()}

    message = start(tmp_path, "second", steps=2)

    archived = {path.name: read_all(path) for path in (tmp_path / "archived-1").iterdir()}

    assert archived == before
    assert all(name in message for name in before)

    log = read_log(tmp_path)
    assert "second begins" in log
    assert "second trains" in log
    assert "first" not in log

    events = read_jsonl(tmp_path / "events.jsonl")
    assert [event["text"] for event in events] == ["second begins"]


def test_no_sequence_of_starts_loses_a_line_of_metrics(tmp_path):
    # None starts from scratch.
    resumed_steps = (None, 10, None, 5, None, 5, 0, 10, 3)
    notes: list[str] = []
    for run, step in zip("aabacbbad", resumed_steps, strict=True):
        start(tmp_path, run, step)
        notes.append(f"note-{len(notes)}.")
        first = step or 0
        measure(tmp_path, first + 1, first + 5, note=notes[-1])

        content = read_all(tmp_path)
        for note in notes:
            # Each note is in two lines of two files.
            assert content.count(f'"note": "{note}"') == 4
            assert list(tmp_path.glob(f"**/tb/events.*{note}"))


@pytest.mark.parametrize(
    "damage", [b"\xff\xfe\n", b'{"step": 1e999}\n', b'{"step": 2, "lo', b'{"step": 1}', b""]
)
def test_a_resumed_run_keeps_its_steps_and_archives_damage_and_later_ones(tmp_path, damage):
    """The files have the format of version 0.1, which does not name the run."""
    metrics = tmp_path / "metrics.jsonl"
    validation = tmp_path / "validation.jsonl"
    (tmp_path / "environment.json").write_text('{"python": "3.11"}')
    metrics.write_bytes(b'{"step": 1}\n{"step": 3}\n' + damage)
    validation.write_bytes(b'{"step": 0}\n')

    start(tmp_path, "one", resumed_step=2)

    assert (steps_in(metrics), steps_in(validation)) == ([1], [0])
    assert (tmp_path / "archived-1" / metrics.name).read_bytes() == b'{"step": 3}\n' + damage

    start(tmp_path, "one", resumed_step=0)
    assert steps_in(tmp_path / "archived-2" / validation.name) == [0]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.toml", "steps = 3\n"),
        ("environment.json", '{"name": "conda"}'),
        ("environment.json", "no JSON"),
        ("metrics.jsonl", '{"step": 1, "accuracy": 0.5}\n'),
        ("validation.jsonl", "1\n"),
        ("samples.jsonl", '{"text": "some data"}\n'),
        ("events.jsonl", '{"time": 1, "user": "me"}\n'),
        ("train.log", "epoch 1: loss 3\n"),
    ],
)
def test_start_is_rejected_if_it_would_write_to_a_foreign_file(tmp_path, name, content):
    if name != "config.toml":
        (tmp_path / "config.toml").touch()
        (tmp_path / "environment.json").write_text('{"python": "3.11", "packages": {}}')
    (tmp_path / name).write_text(content)

    with pytest.raises(UserError, match="was not written by a run"):
        load_run(["--job.dump_folder", str(tmp_path)], 1)

    assert (tmp_path / name).read_text() == content
