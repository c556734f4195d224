"""Output files: a start continues or archives them, and never deletes or overwrites others."""

import json
from pathlib import Path

import pytest

from titanlite.config.errors import UserError
from titanlite.config.schema import JobConfig, Training
from titanlite.load_run import load_run
from titanlite.observe.outputs import OutputFolder
from titanlite.runtime.logging import Event, setup_logging


def start(folder: Path, run: str, resumed_step: int | None = None, steps: int = 10) -> str:
    """One start of a run, as the trainer does it; returns what it has to say."""
    output = OutputFolder(folder)
    log = setup_logging(0, folder / "train.log")
    log.info(Event(f"{run} begins", "start"))
    said = output.begin(JobConfig(training=Training(steps=steps)), {"run": run}, resumed_step)
    log.info(f"{run} trains")
    return said


def measure(folder: Path, *steps: int, note: str = "") -> None:
    """What a run measures after `steps`."""
    with (
        (folder / "metrics.jsonl").open("a") as metrics,
        (folder / "validation.jsonl").open("a") as validation,
    ):
        for step in steps:
            metrics.write(json.dumps({"step": step, "note": note}) + "\n")
            validation.write(json.dumps({"step": step, "note": note}) + "\n")
    (folder / "tb").mkdir(exist_ok=True)
    (folder / "tb" / f"events.{steps[-1]}{note}").write_text(note)


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def everything(path: Path) -> str:
    """All that is in a file or a folder, whatever the names in it."""
    return (
        path.read_text() if path.is_file() else "\n".join(sorted(map(everything, path.iterdir())))
    )


def test_a_run_that_begins_anew_sets_all_of_the_earlier_one_aside_together(tmp_path):
    start(tmp_path, "first")
    assert start(tmp_path, "first") == ""  # nothing was measured
    measure(tmp_path, 5, 10, note="of the first")
    before = {path.name: everything(path) for path in tmp_path.iterdir()}
    said = start(tmp_path, "second", steps=2)
    assert {path.name: everything(path) for path in (tmp_path / "archived-1").iterdir()} == before
    assert all(name in said for name in before)
    log = (tmp_path / "train.log").read_text()
    assert "second begins" in log
    assert "second trains" in log
    assert "first" not in log
    assert [json.loads(line)["text"] for line in (tmp_path / "events.jsonl").open()] == [
        "second begins"
    ]


def test_no_sequence_of_starts_loses_a_measurement(tmp_path):
    marks = []
    plan = [
        ("a", None),
        ("a", 10),
        ("b", None),
        ("a", 5),
        ("c", None),
        ("b", 5),
        ("b", 0),
        ("a", 10),
        ("d", 3),
    ]
    for number, (run, resumed_step) in enumerate(plan):
        start(tmp_path, run, resumed_step)
        marks.append(f"mark-{number}.")
        measure(tmp_path, 1 + (resumed_step or 0), 5 + (resumed_step or 0), note=marks[-1])
        found = everything(tmp_path)
        for mark in marks:
            assert found.count(f'"note": "{mark}"') == 4  # two steps, metrics and validation
            assert list(tmp_path.glob(f"**/tb/events.*{mark}"))


@pytest.mark.parametrize(
    "damage", [b"\xff\xfe\n", b'{"step": 1e999}\n', b'{"step": 2, "lo', b'{"step": 1}', b""]
)
def test_a_resumed_run_keeps_its_steps_and_sets_damage_and_later_ones_aside(
    tmp_path, damage: bytes
):
    """The files are of version 0.1, which names no run."""
    (tmp_path / "environment.json").write_text('{"python": "3.11"}')
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n{"step": 3}\n' + damage)
    (tmp_path / "validation.jsonl").write_bytes(b'{"step": 0}\n')
    start(tmp_path, "one", resumed_step=2)
    assert [steps_in(tmp_path / name) for name in ("metrics.jsonl", "validation.jsonl")] == [
        [1],
        [0],
    ]
    assert (tmp_path / "archived-1" / "metrics.jsonl").read_bytes() == b'{"step": 3}\n' + damage
    start(tmp_path, "one", resumed_step=0)  # it validates once more
    assert steps_in(tmp_path / "archived-2" / "validation.jsonl") == [0]


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
def test_start_is_refused_if_it_would_write_to_a_foreign_file(tmp_path, name: str, content: str):
    (tmp_path / name).write_text(content)
    if name != "config.toml":
        (tmp_path / "config.toml").touch()
        environment = tmp_path / "environment.json"
        if not environment.exists():
            environment.write_text('{"python": "3.11", "packages": {}}')

    with pytest.raises(UserError, match="was not written by a run"):
        load_run(["--job.dump_folder", str(tmp_path)], 1)

    assert (tmp_path / name).read_text() == content
