"""The page of `titanlite report`: what it says, that nothing in it comes alive, and that it stays small."""

import json
import math
import os
import random
import re
import subprocess
import sys
import time
from array import array
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report.test_run_files import a_run, line

from titanlite.cli import main
from titanlite.observe.live import lines, plain_line
from titanlite.report.curves import hours, places, spikes, thin
from titanlite.report.json_lines import Table
from titanlite.report.page import make_page
from titanlite.report.recorded import read_run
from titanlite.report.run_files import RunFiles

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[2J\u202e"


def table(**columns: Any) -> Table:
    return Table({key: array("d", values) for key, values in columns.items()}, ())


class Parsed(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.data: dict[str, Any] = {}
        self.text = ""
        self._in = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self._in = "data" if ("id", "data") in attrs else tag

    def handle_data(self, data: str) -> None:
        if self._in == "data":
            self.data = json.loads(data)
        elif self._in not in ("script", "style"):
            self.text += data
        self._in = "" if self._in == "data" else self._in


def page_of(*folders: Path) -> str:
    return make_page([read_run(folder) for folder in folders])


def test_a_page_of_one_run_says_all_of_it(tmp_path: Path) -> None:
    run = a_run(
        tmp_path / "mine", ("data", None, "Data: a table"), ("save", 50, "saved step 50"), ("finish", 50, "Finished")
    )
    (run / "validation.jsonl").write_text('{"step": 50, "loss": 6.25, "perplexity": 518.0, "bits_per_byte": 2.5}\n')
    (run / "environment.json").write_text('{"world_size": 8, "layout": {"shard": 8}, "device": "H100"}')
    (run / "samples.jsonl").write_text('{"step": 50, "prompt": "Once", "completion": " upon a time"}\n')
    page = Parsed(page_of(run))
    for said in (
        "mine", "finished", "50 of 100", "6.2500", "saved step 50", "Data: a table", "layout.shard", "H100", "Once",
        " upon a time", "job.description", '"mine"', "tokens/s",
    ):  # fmt: skip
        assert said in page.text, said
    (drawn,) = page.data["runs"]
    assert drawn["curves"]["x"]["step"] == [10, 20, 30, 40, 50]
    assert drawn["curves"]["y"]["loss"] == {"mean": [7.9, 7.8, 7.7, 7.6, 7.5]}
    assert drawn["validations"]["x"]["step"] == [50]
    assert [chart["title"] for chart in page.data["charts"]][:2] == ["loss: train", "Events"]


def test_starts_say_what_has_changed_since_the_start_before(tmp_path: Path) -> None:
    record = {"code": {"files": "f00d", "commit": "c0ffee", "state": "changed"}, "machine": {"ranks": 8}}
    starts = [{"host": "node1"}, {"host": "node2", "record": record, "changed": ["machine: ranks 4 -> 8", "code: x"]}]
    starts += [{"record": {"code": {"files": "f00d"}, "machine": {"ranks": "8"}}, "changed": []}, {"changed": 7}]
    events = [{"time": 1e9 + i, "event": "start", "step": i, "text": "", **start} for i, start in enumerate(starts)]
    a_run(tmp_path)
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    found = [(start.step, start.host, start.ranks, start.code, start.changed) for start in read_run(tmp_path).starts]
    assert found == [
        (0, "node1", None, "-", None),
        (1, "node2", 8, "c0ffee changed", ("machine: ranks 4 -> 8", "code: x")),
        (2, "-", None, "f00d", ()),
        (3, "-", None, "-", None),
    ]
    section = page_of(tmp_path).partition("<h2>Starts</h2>")[2].partition("<h2>")[0]
    assert "machine: ranks 4 -&gt; 8\ncode: x" in section
    assert section.count("nothing") == 1


def test_the_plan_of_the_last_start_stands_beside_what_was_measured(tmp_path: Path) -> None:
    plan = {"event": "plan", "planned": {"tps": 123.0, "memory_peak": "x", "step_time": 10**400}}
    a_run(tmp_path)

    def planned(*events: dict[str, Any]) -> dict[str, float]:
        lines = [{"time": 1e9 + number, "step": 0, "text": "", **event} for number, event in enumerate(events)]
        (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return dict(read_run(tmp_path).planned)

    begin = {"event": "start"}
    assert planned(begin) == {}
    assert "planned" not in Parsed(page_of(tmp_path)).text.partition("Throughput")[2]
    assert planned(plan, begin, begin) == {}  # the second start made none
    assert planned(plan, {"event": "failure"}, begin) == {}
    assert planned(begin, plan, begin) == {"tps": 123.0}
    page = Parsed(page_of(tmp_path))
    assert page.data["runs"][0]["planned"] == {"tps": 123.0}
    assert "planned" in page.text.partition("Throughput")[2]
    assert "123" in page.text.partition("Throughput")[2]


def test_text_from_files_stays_text(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a<b>&", ("failure", None, EVIL), (EVIL, 3, "text"))
    (run / "config.toml").write_text(f"[job]\ndescription = {json.dumps(EVIL)}\n[{json.dumps(EVIL)}]\nx = 1\n")
    (run / "environment.json").write_text(json.dumps({"device": EVIL, EVIL: {EVIL: EVIL}, "world_size": EVIL}))
    (run / "samples.jsonl").write_text(json.dumps({"step": EVIL, "prompt": EVIL, "completion": EVIL}) + "\n")
    (run / "validation.jsonl").write_text(json.dumps({"step": 10, EVIL: 1.0}) + "\n" + EVIL + "\n")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line(60, **{EVIL: 1.0}))
    text = page_of(run)
    page, plain = Parsed(text), Parsed(page_of(a_run(tmp_path / "plain")))
    assert page.tags.count("script") == 3
    assert set(page.tags) == set(plain.tags)
    assert {name for name, _ in page.attributes} <= {name for name, _ in plain.attributes} | {"class"}
    assert "</script><script>alert(1)" in page.text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert any("alert" in chart["title"] for chart in page.data["charts"])


def test_a_page_loads_nothing_and_only_its_own_scripts_run(tmp_path: Path) -> None:
    page = Parsed(page_of(a_run(tmp_path)))
    assert not {"link", "img", "iframe", "object", "base", "form", "a"} & set(page.tags)
    assert not {"src", "href", "action"} & {name for name, _ in page.attributes}
    (policy,) = [value for name, value in page.attributes if name == "content" and value and "default-src" in value]
    assert "default-src 'none'; script-src 'sha256-" in policy


def test_runs_are_compared_by_the_keys_that_differ(tmp_path: Path) -> None:
    one, two = a_run(tmp_path / "a" / "run", steps=50), a_run(tmp_path / "b" / "run", steps=60)
    page = Parsed(page_of(one, two))
    assert [run["name"] for run in page.data["runs"]] == ["a/run", "b/run"]
    differences = page.text.partition("Differences")[2].partition("Environment")[0]
    assert "training.steps" in differences
    assert "job.description" not in differences


def test_a_run_that_has_written_next_to_nothing_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    page = Parsed(page_of(tmp_path))
    assert page.data["runs"][0]["curves"]["logged"] == 0


FILES = ("metrics.jsonl", "validation.jsonl", "events.jsonl", "environment.json", "config.toml", "samples.jsonl")


@pytest.mark.parametrize("name", FILES)
def test_what_cannot_be_read_is_named_and_the_rest_is_there(tmp_path: Path, name: str) -> None:
    a_run(tmp_path)
    (tmp_path / name).write_bytes(b"\x00\xff{{\n")
    text = Parsed(page_of(tmp_path)).text
    assert f"{name}: " in text or f"{name} cannot be read" in text
    assert "running" in text


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    a_run(tmp_path)
    (tmp_path / "checkpoint" / "step-00000050").mkdir(parents=True)
    (tmp_path / "checkpoint" / "step-00000050" / "manifest.json").write_text("{}")
    run = read_run(tmp_path)
    assert [(found.step, found.bytes) for found in run.checkpoints] == [(50, None)]
    assert "manifest.json" in "".join(run.problems)


def test_events_that_a_later_start_went_behind_are_marked_and_a_kill_and_skips_are_found(tmp_path: Path) -> None:
    a_run(tmp_path)
    first = [("start", 0), ("save", 50), ("save", 100)]
    kinds = [*first, ("start", 50), ("save", 100), ("stop", None), ("start", 100)]
    events = [{"time": 1e9 + i, "event": kind, "step": step, "text": ""} for i, (kind, step) in enumerate(kinds)]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    counts = enumerate((0, 2, 2, 5, 1), 1)
    (tmp_path / "metrics.jsonl").write_text(
        "".join(line(step * 10, skipped_records=count, time=1e9 + step / 10) for step, count in counts)
    )
    found = [(event.kind, event.step, event.undone) for event in read_run(tmp_path).events if event.kind != "skip"]
    assert found == [
        ("start", 0, False),
        ("save", 50, False),
        ("save", 100, True),
        ("killed", 50, False),
        ("start", 50, False),
        ("save", 100, False),
        ("stop", 50, False),
        ("start", 100, False),
    ]
    assert [(e.step, e.text) for e in read_run(tmp_path).events if e.kind == "skip"] == [
        (20, "2 records skipped"), (40, "3 records skipped"),
    ]  # fmt: skip


def test_few_points_are_all_there() -> None:
    found = thin(table(step=[1, 2, 3], loss=[3.0, math.nan, 1.0], zero=[0, 0, 0], never=[math.nan] * 3), most=3)
    assert found == {
        "logged": 3, "per_point": 1, "x": {"step": [1, 2, 3]}, "y": {"loss": {"mean": [3.0, None, 1.0]}}
    }  # fmt: skip


def test_a_million_steps_keep_their_mean_and_each_spike() -> None:
    values = np.ones(1_000_000)
    values[123_456], values[654_321] = 99.0, -7.0
    values[500_000:500_700] = math.nan
    found = thin(table(step=np.arange(1.0, 1_000_001), loss=values), most=2000)
    loss = found["y"]["loss"]
    assert (found["logged"], found["per_point"], len(loss["mean"])) == (1_000_000, 500, 2000)
    assert max(value for value in loss["max"] if value is not None) == 99.0
    assert min(value for value in loss["min"] if value is not None) == -7.0
    assert loss["mean"][1000] is None  # 500 values that are not finite
    assert loss["mean"][0] == 1.0
    steps = found["x"]["step"]
    assert (steps[0], steps[-1]) == (250.5, 999_750.5)


def test_a_spike_of_the_loss_is_found_once_and_noise_and_a_falling_loss_are_none() -> None:
    chance = np.random.default_rng(0)
    losses = 2 + 6 * np.exp(-np.arange(5000) / 300) + chance.normal(0, 0.05, 5000)
    assert spikes(table(step=range(5000), loss=losses)) == []
    losses[3000:3010] += 3
    losses[4000] = math.nan
    ((row, loss, mean),) = spikes(table(step=range(5000), loss=losses))
    assert (row, loss) == (3000, losses[3000])
    assert mean == pytest.approx(losses[2900:3000].mean())
    assert spikes(table(step=range(5000), loss=[2.0] * 5000)) == []
    assert spikes(table(step=[], loss=[])) == []


def test_hours_are_those_of_training_without_the_pause_between_two_starts() -> None:
    week = 7 * 24 * 3600
    found = hours(table(step=[1, 2, 3, 4], elapsed=[3600, 7200, 7300, 10900], time=[3600, 7200, week, week + 3600]))
    assert found == pytest.approx([1, 2, 2 + 7300 / 3600, 3 + 7300 / 3600])
    assert hours(table(step=[1, 2], time=[0, 7200])) == pytest.approx([0, 2])
    assert len(hours(table(step=[]))) == 0


def test_a_step_has_a_place_on_each_axis_that_is_known() -> None:
    metrics = table(step=[10, 20], tokens=[1000, 2000], elapsed=[3600, 7200], time=[0, 3600])
    assert places(metrics, np.array([0.0, 15.0])) == {"step": [0, 15], "tokens": [0, 1500], "hours": [0, 1.5]}
    assert places(table(step=[]), np.array([5.0])) == {"step": [5]}


def test_the_pages_of_long_runs_and_of_many_runs_stay_small(tmp_path: Path) -> None:
    keys = {f"number {i}": 0.123456789 for i in range(20)}
    lines = "".join(json.dumps({"step": i, "loss": 1 / i, "time": i, **keys}) + "\n" for i in range(1, 3001))
    long_text = "x" * 5000
    for number in range(50):
        run = a_run(tmp_path / f"run{number}", *[("failure", 1, long_text)] * 300, *[("save", 1, long_text)] * 300)
        (run / "metrics.jsonl").write_text(lines)
        (run / "samples.jsonl").write_text(json.dumps({"step": 1, "prompt": long_text, "completion": long_text}) + "\n")
    assert len(page_of(*sorted(tmp_path.iterdir())).encode()) < 5_000_000


def test_the_command_writes_a_page_without_torch(tmp_path: Path) -> None:
    run, out = a_run(tmp_path / "run"), tmp_path / "page.html"
    code = f"import sys; from titanlite.cli import main; main(['report', {str(run)!r}, '--out', {str(out)!r}]); "
    code += "print({'torch'} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert said.stdout.splitlines()[-1] == "set()"
    assert out.read_text().startswith("<!doctype html>")


def test_mistakes_are_answered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(tmp_path / "run")
    assert main(["report", str(tmp_path)]) == 2
    assert "no run has written to this folder" in capsys.readouterr().err
    assert main(["report", str(run), "--out", str(tmp_path)]) == 2
    assert "is a folder; expected a file" in capsys.readouterr().err
    assert main(["report"]) == 2
    capsys.readouterr()
    assert main(["report", *["run"] * 51]) == 2
    assert "must be a list of at least 1 and at most 50, each a text" in capsys.readouterr().err


def test_a_page_says_when_it_was_written(tmp_path: Path) -> None:
    assert time.strftime("%Y-%m-%d") in page_of(a_run(tmp_path))


ODD = (
    b"NaN", b"Infinity", b"1e999", b"-1", b"null", b"{}", b"[]", b'"x"', b"true", b"9" * 400, b"\x00", b"\xff", b"\n",
    b'{"a":', b"1e308", b"-1e308", b"0", b'"step"', b'"loss"', b'"time"', b"1e18",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(150))
def test_whatever_the_files_hold_there_is_a_view_and_a_page(seed: int, tmp_path: Path) -> None:
    chance = random.Random(seed)
    a_run(tmp_path, ("save", 20, "saved"), ("start", 20, "again"), ("stop", None, "stopped"))
    rows = [line(step, tokens=step, elapsed=step, skipped_records=step // 50, grad_norm=None) for step in range(1, 150)]
    (tmp_path / "metrics.jsonl").write_text("".join(rows))
    (tmp_path / "validation.jsonl").write_text('{"step": 20, "loss": 6.25, "perplexity": "inf"}\n' * 2)
    (tmp_path / "environment.json").write_text('{"world_size": 8, "layout": {"shard": 8}, "device": "H100"}')
    (tmp_path / "samples.jsonl").write_text('{"step": 20, "prompt": "Once", "completion": " upon a time"}\n')
    for path in tmp_path.iterdir():
        content = bytearray(path.read_bytes())
        for _ in range(chance.choice((0, 1, 3, 20))):
            numbers = [match.span() for match in re.finditer(rb"-?\d+(\.\d+)?", content)]
            start = chance.randrange(len(content) + 1)
            place = (
                chance.choice(numbers) if numbers and chance.random() < 0.5 else (start, start + chance.choice((0, 5)))
            )
            content[slice(*place)] = chance.choice(ODD)
        path.write_bytes(content)
    status = RunFiles(tmp_path).read()
    assert all(shown.cell_len <= 60 for shown in lines(status, 60))
    assert plain_line(status).isprintable()
    assert Parsed(page_of(tmp_path)).tags.count("script") == 3
