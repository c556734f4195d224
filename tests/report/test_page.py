"""The page of `titanlite report`: what is in it, that nothing in it comes alive, and that it stays small."""

import json
import os
import random
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from report.test_run_files import a_run, line

from titanlite.cli import main
from titanlite.report.page import make_page, page_data
from titanlite.report.run_files import read_status

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[2J\u202e"


def data_of(*folders: Path) -> dict[str, Any]:
    """The data of a page, as the browser reads it."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', make_page(folders), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_a_page_has_all_that_a_run_has_written(tmp_path: Path) -> None:
    saved = ("data", None, "Data: a table"), ("save", 50, "saved step 50"), ("finish", 50, "Finished")
    run = a_run(tmp_path / "mine", *saved)
    (run / "validation.jsonl").write_text('{"step": 50, "loss": 6.25, "perplexity": 518.0, "bits_per_byte": 2.5}\n')
    (run / "environment.json").write_text('{"world_size": 8, "layout": {"shard": 8}, "device": "H100"}')
    (run / "samples.jsonl").write_text('{"step": 50, "prompt": "Once", "completion": " upon a time"}\n')
    data = data_of(run)
    (found,) = data["runs"]
    assert (found["name"], found["state"], found["step"], found["total_steps"]) == ("mine", "finished", 50, 100)
    assert found["curves"]["x"]["step"] == [10, 20, 30, 40, 50]
    assert found["curves"]["y"]["loss"] == {"mean": [7.9, 7.8, 7.7, 7.6, 7.5]}
    assert found["validations"]["y"]["loss"] == {"mean": [6.25]}
    assert [event["kind"] for event in found["events"]] == ["start", "data", "save", "finish"]
    assert (found["events"][1]["text"], found["samples"][0]["completion"]) == ("Data: a table", " upon a time")
    assert (found["config"]["job"]["description"], found["environment"]["layout"]["shard"]) == ("mine", 8)
    assert data["tags"]["loss"][0] == "1_loss/train"
    names = [run["name"] for run in data_of(a_run(tmp_path / "a/run"), a_run(tmp_path / "b/run"))["runs"]]
    assert names == ["a/run", "b/run"]


def test_events_that_a_later_start_went_behind_are_marked_and_a_kill_is_found(tmp_path: Path) -> None:
    a_run(tmp_path)
    first = [("start", 0), ("save", 50), ("save", 100)]
    kinds = [*first, ("start", 50), ("save", 100), ("stop", None), ("start", 100)]
    told = [{"time": 1e9 + i, "text": "", "event": kind, "step": step} for i, (kind, step) in enumerate(kinds)]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in told))
    (tmp_path / "metrics.jsonl").write_text("".join(line(step, time=1e9 + step / 10) for step in range(10, 60, 10)))
    events = data_of(tmp_path)["runs"][0]["events"]
    assert [(event["kind"], event["step"], event["undone"]) for event in events] == [
        ("start", 0, False), ("save", 50, False), ("save", 100, True), ("killed", 30, False), ("start", 50, False),
        ("save", 100, False), ("stop", 50, False), ("start", 100, False),
    ]  # fmt: skip


def test_text_from_files_is_in_the_data_only_and_printable(tmp_path: Path) -> None:
    run = a_run(tmp_path / "a<b>&", ("failure", None, EVIL), (EVIL, 3, "text"))
    (run / "config.toml").write_text(f"[job]\ndescription = {json.dumps(EVIL)}\n[{json.dumps(EVIL)}]\nx = 1\n")
    (run / "environment.json").write_text(json.dumps({"device": EVIL, EVIL: {EVIL: EVIL}, "world_size": EVIL}))
    (run / "samples.jsonl").write_text(json.dumps({"step": EVIL, "prompt": EVIL, "completion": EVIL}) + "\n")
    (run / "validation.jsonl").write_text(json.dumps({"step": 10, EVIL: 1.0}) + "\n" + EVIL + "\n")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line(60, **{EVIL: 1.0}))
    page, plain = make_page([run]), make_page([a_run(tmp_path / "plain")])
    tags: dict[str, list[str]] = {}
    for text in (page, plain):
        parser = HTMLParser()
        parser.handle_starttag = lambda tag, attrs, text=text: tags.setdefault(text, []).append(f"{tag} {attrs}")
        parser.feed(text)
    assert tags[page] == tags[plain]
    assert "default-src 'none'; script-src 'sha256-" in page
    assert not re.search(r"<(link|img|iframe|object|base|form|a)\b| (src|href|action)=", page.partition("<script")[0])
    assert not {"\x1b", "\u202e"} & set(page)


def test_a_million_steps_keep_their_mean_and_each_spike_and_pages_stay_small(tmp_path: Path) -> None:
    run = a_run(tmp_path / "long")
    odd = {12_345: 99.0, 54_321: -7.0, **dict.fromkeys(range(50_000, 50_070), None)}
    rows = (line(step, loss=odd.get(step, 1.0), step_time=1.0) for step in range(1, 100_001))
    (run / "metrics.jsonl").write_text("".join(rows))
    curves = data_of(run)["runs"][0]["curves"]
    loss, steps, hours = curves["y"]["loss"], curves["x"]["step"], curves["x"]["hours"]
    assert len(loss["mean"]) == 2000
    assert max(value for value in loss["max"] if value is not None) == 99.0
    assert min(value for value in loss["min"] if value is not None) == -7.0
    assert (loss["mean"][0], loss["mean"][1000]) == (1.0, None)
    assert (steps[0], steps[-1]) == (25.5, 99_975.5)
    assert hours[-1] == pytest.approx(99_975.5 / 3600)
    keys, text = {f"number {i}": 0.123456789 for i in range(20)}, "x" * 5000
    for number in range(50):
        run = a_run(tmp_path / f"run{number}", *[("failure", 1, text)] * 100, *[("save", 1, text)] * 100)
        (run / "metrics.jsonl").write_text("".join(line(i, **keys) for i in range(1, 1001)))
        (run / "samples.jsonl").write_text(json.dumps({"step": 1, "prompt": text, "completion": text}) + "\n")
    assert len(make_page(sorted(tmp_path.glob("run*"))).encode()) < 5_000_000


def test_hours_are_those_of_training_and_steps_that_come_again_count_once(tmp_path: Path) -> None:
    week, run = 7 * 24 * 3600, a_run(tmp_path)
    clocks = [(1, 3600, 3600), (2, 7200, 3600), (4, 9000, 900), (4, week, 1.0), (5, week + 3600, 3600)]
    (run / "metrics.jsonl").write_text("".join(line(s, time=t, step_time=e, parts={"a": s}) for s, t, e in clocks))
    curves = data_of(run)["runs"][0]["curves"]
    assert curves["x"]["step"] == [1, 2, 4, 5]
    assert curves["x"]["hours"] == pytest.approx([1, 2, 2.5, 3.5])
    assert curves["y"]["parts/a"]["mean"] == [1, 2, 4, 5]


def test_the_command_writes_a_page_without_torch_and_answers_mistakes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = a_run(tmp_path / "run", ("finish", 50, "Finished")), tmp_path / "page.html"
    code = f"import sys; from titanlite.cli import main; main(['report', {str(run)!r}, '--out', {str(out)!r}]); "
    code += f"main(['runs', {str(tmp_path)!r}]); main(['watch', {str(run)!r}]); print({{'torch'}} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert said.stdout.splitlines()[-1] == "set()"
    assert out.read_text().startswith("<!doctype html>")
    (tmp_path / "mine.html").write_text("mine")
    for words in ([tmp_path], [run, "--out", tmp_path], [run, "--out", tmp_path / "mine.html"], [], ["run"] * 51):
        assert main(["report", *map(str, words)]) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert (tmp_path / "mine.html").read_text() == "mine"


ODD = [b"NaN", b"1e999", b"-1", b"null", b"{}", b"[]", b'"x"', b"true", b"9" * 400, b"\xff", b"\n", b'"step"']


def test_whatever_the_files_hold_there_is_a_view_and_a_page(tmp_path: Path) -> None:
    events = {"save": 20, "start": 20, "stop": None}
    metrics = [line(step, tokens=step, elapsed=step, grad_norm=None) for step in range(1, 60)]
    for seed in range(40):
        chance, run = random.Random(seed), tmp_path / str(seed)
        a_run(run, *((kind, step, "") for kind, step in events.items()))
        (run / "metrics.jsonl").write_text("".join(metrics))
        (run / "validation.jsonl").write_text('{"step": 20, "loss": 6.25, "perplexity": "inf"}\n' * 2)
        (run / "environment.json").write_text('{"world_size": 8, "layout": {"shard": 8}, "device": "H100"}')
        (run / "samples.jsonl").write_text('{"step": 20, "prompt": "Once", "completion": " upon a time"}\n')
        for path in run.iterdir():
            content = path.read_bytes()
            for _ in range(chance.choice((0, 1, 3, 20))):  # in place of a number, or anywhere
                numbers = [match.span() for match in re.finditer(rb"-?\d+(\.\d+)?", content)] or [(0, 0)]
                start = chance.randrange(len(content) + 1)
                start, end = chance.choice([chance.choice(numbers), (start, start + 5)])
                content = content[:start] + chance.choice(ODD) + content[end:]
            path.write_bytes(content)
        assert all(shown.isprintable() for shown in read_status(run).lines())
        json.dumps(page_data([run]), allow_nan=False)
