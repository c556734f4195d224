"""The page of `titanlite report`: what is in it, that nothing in it comes alive, and that it stays small."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from report.test_run_files import a_run, line

from titanlite.report.page import make_page, page_data
from titanlite.report.run_files import read_status

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[2J\u202e"


def data_of(*folders: Path) -> dict[str, Any]:
    """The data of a page, as the browser reads it."""
    (found,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', make_page(folders), re.DOTALL
    )
    return json.loads(found)


def test_a_page_has_all_that_a_run_has_written(tmp_path):
    saved = (
        ("data", None, "Data: a table"),
        ("save", 50, "saved step 50"),
        ("finish", 50, "Finished"),
    )
    run = a_run(tmp_path / "mine", *saved)
    (run / "validation.jsonl").write_text(
        '{"step": 50, "loss": 6.25, "perplexity": 518.0, "bits_per_byte": 2.5}\n'
    )
    (run / "environment.json").write_text(
        '{"world_size": 8, "layout": {"shard": 8}, "device": "H100"}'
    )
    (run / "samples.jsonl").write_text(
        '{"step": 50, "prompt": "Once", "completion": " upon a time"}\n'
    )
    data = data_of(run)
    (found,) = data["runs"]
    assert (found["name"], found["state"], found["step"], found["total_steps"]) == (
        "mine",
        "finished",
        50,
        100,
    )
    assert found["curves"]["x"]["step"] == [10, 20, 30, 40, 50]
    assert found["curves"]["y"]["loss"] == {"mean": [7.9, 7.8, 7.7, 7.6, 7.5]}
    assert "tps_per_device" not in found["curves"]["y"]  # of one rank, for which tps says it
    assert found["validations"]["y"]["loss"] == {"mean": [6.25]}
    assert [event["kind"] for event in found["events"]] == ["start", "data", "save", "finish"]
    assert (found["events"][1]["text"], found["samples"][0]["completion"]) == (
        "Data: a table",
        " upon a time",
    )
    assert (found["config"]["job"]["description"], found["environment"]["layout"]["shard"]) == (
        "mine",
        8,
    )
    assert data["tags"]["loss"][0] == "train/loss"
    names = [
        run["name"] for run in data_of(a_run(tmp_path / "a/run"), a_run(tmp_path / "b/run"))["runs"]
    ]
    assert names == ["a/run", "b/run"]


def test_events_that_a_later_start_went_behind_are_marked_and_a_kill_is_found(
    tmp_path,
):
    a_run(tmp_path)
    first = [("start", 0), ("save", 50), ("save", 100)]
    kinds = [*first, ("start", 50), ("save", 100), ("stop", None), ("start", 100)]
    told = [
        {"time": 1e9 + i, "text": "", "event": kind, "step": step}
        for i, (kind, step) in enumerate(kinds)
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in told))
    steps = (10, 20, 30, 20, 40, 50)
    numbers = [
        line(step, time=1e9 + step / 10, step_time=360.0, parts={"a": step}) for step in steps
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(numbers))
    (run,) = data_of(tmp_path)["runs"]
    assert run["curves"]["x"] == {"step": [10, 20, 30, 40, 50], "hours": [1, 2, 3, 4, 5]}
    assert run["curves"]["y"]["parts/a"]["mean"] == [10, 20, 30, 40, 50]
    assert [(event["kind"], event["step"], event["undone"]) for event in run["events"]] == [
        ("start", 0, False), ("save", 50, False), ("save", 100, True), ("killed", 100, True), ("start", 50, False),
        ("save", 100, False), ("stop", 100, False), ("start", 100, False),
    ]  # fmt: skip


def test_a_stop_between_two_logged_steps_is_at_its_step_and_counts_its_tokens(
    tmp_path,
):
    a_run(
        tmp_path,
        ("save", 3, "Saved step 3"),
        ("stop", None, "Stopped by SIGTERM after step 3"),
        steps=400,
    )
    (tmp_path / "metrics.jsonl").write_text(line(1, tokens=2048))

    (run,) = data_of(tmp_path)["runs"]

    assert [(event["kind"], event["step"]) for event in run["events"][1:]] == [
        ("save", 3),
        ("stop", 3),
    ]
    assert (run["step"], run["total_steps"], run["tokens"]) == (3, 400, 6144)


def test_text_from_files_is_in_the_data_only_and_printable(tmp_path):
    run = a_run(tmp_path / "a<b>&", ("failure", None, EVIL), (EVIL, 3, "text"))
    (run / "config.toml").write_text(
        f"[job]\ndescription = {json.dumps(EVIL)}\n[{json.dumps(EVIL)}]\nx = 1\n"
    )
    (run / "environment.json").write_text(
        json.dumps({"device": EVIL, EVIL: {EVIL: EVIL}, "world_size": EVIL})
    )
    (run / "samples.jsonl").write_text(
        json.dumps({"step": EVIL, "prompt": EVIL, "completion": EVIL}) + "\n"
    )
    (run / "validation.jsonl").write_text(json.dumps({"step": 10, EVIL: 1.0}) + "\n" + EVIL + "\n")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line(60, **{EVIL: 1.0}))
    page, plain = make_page([run]), make_page([a_run(tmp_path / "plain")])
    tags: dict[str, list[str]] = {}
    for text in (page, plain):
        parser = HTMLParser()
        parser.handle_starttag = lambda tag, attrs, text=text: tags.setdefault(text, []).append(
            f"{tag} {attrs}"
        )
        parser.feed(text)
    assert tags[page] == tags[plain]
    assert "default-src 'none'; script-src 'sha256-" in page
    assert not re.search(
        r"<(link|img|iframe|object|base|form|a)\b| (src|href|action)=", page.partition("<script")[0]
    )
    assert not {"\x1b", "\u202e"} & set(page)


def test_a_million_steps_keep_their_mean_and_each_spike_and_pages_stay_small(
    tmp_path,
):
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
        run = a_run(
            tmp_path / f"run{number}", *[("failure", 1, text)] * 100, *[("save", 1, text)] * 100
        )
        (run / "metrics.jsonl").write_text("".join(line(i, **keys) for i in range(1, 1001)))
        (run / "samples.jsonl").write_text(
            json.dumps({"step": 1, "prompt": text, "completion": text}) + "\n"
        )
    assert len(make_page(sorted(tmp_path.glob("run*"))).encode()) < 5_000_000


def test_the_commands_need_no_torch(tmp_path):
    run, out = a_run(tmp_path / "run", ("finish", 50, "Finished")), tmp_path / "page.html"
    code = f"import sys; from titanlite.cli import main; main(['report', {str(run)!r}, '--out', {str(out)!r}]); "
    code += f"main(['runs', {str(tmp_path)!r}]); main(['watch', {str(run)!r}]); print({{'torch'}} & set(sys.modules))"
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert said.stdout.splitlines()[-1] == "set()"
    assert out.read_text().startswith("<!doctype html>")


ODD = [
    b"NaN",
    b"1e999",
    b"-1",
    b"null",
    b"{}",
    b"[]",
    b'"x"',
    b"true",
    b"9" * 400,
    b"\xff",
    b"\n",
    b'"step"',
]


def test_whatever_the_files_hold_there_is_a_view_and_a_page(tmp_path):
    events = {"save": 20, "start": 20, "stop": None}
    metrics = [line(step, tokens=step, elapsed=step, grad_norm=None) for step in range(1, 60)]
    for seed in range(40):
        chance, run = random.Random(seed), tmp_path / str(seed)
        a_run(run, *((kind, step, "") for kind, step in events.items()))
        (run / "metrics.jsonl").write_text("".join(metrics))
        (run / "validation.jsonl").write_text(
            '{"step": 20, "loss": 6.25, "perplexity": "inf"}\n' * 2
        )
        (run / "environment.json").write_text(
            '{"world_size": 8, "layout": {"shard": 8}, "device": "H100"}'
        )
        (run / "samples.jsonl").write_text(
            '{"step": 20, "prompt": "Once", "completion": " upon a time"}\n'
        )
        for path in run.iterdir():
            content = path.read_bytes()
            for _ in range(chance.choice((0, 1, 3, 20))):  # in place of a number, or anywhere
                numbers = [match.span() for match in re.finditer(rb"-?\d+(\.\d+)?", content)] or [
                    (0, 0)
                ]
                start = chance.randrange(len(content) + 1)
                start, end = chance.choice([chance.choice(numbers), (start, start + 5)])
                content = content[:start] + chance.choice(ODD) + content[end:]
            path.write_bytes(content)
        assert all(shown.isprintable() for shown in read_status(run).to_lines())
        json.dumps(page_data([run]), allow_nan=False)


CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))),
    None,
)
# What a user does with the page, and what he then sees. It runs after the page's own scripts.
USE = """
const scale = () => charts.map((chart) => [chart.plot.scales.x.min, chart.plot.scales.x.max]);
const mean = () => charts[0].plot.data[charts[0].plot.data.length - 1].at(-1);
const seen = { scales: scale(), canvases: document.querySelectorAll("canvas").length, charts: D.charts.length };
setZoom([100, 200]);
(async () => {
  const settled = () => new Promise((done) => setTimeout(done, 100)); // uPlot draws a little later
  await settled();
  seen.zoomed = scale();
  byId("whole").click();
  await settled();
  seen.whole = scale()[0];
  const rough = mean();
  byId("smoothing").value = 0.9;
  byId("smoothing").oninput({ target: byId("smoothing") });
  seen.smoother = mean() > rough; // the mean of a falling curve lies above its end
  byId("axis").value = "tokens";
  byId("axis").onchange();
  await settled();
  seen.tokens = scale()[0];
  for (const id of ["log", "cut", "events"]) byId(id).click();
  seen.resources = performance.getEntriesByType("resource").length;
  document.body.dataset.seen = encodeURIComponent(JSON.stringify(seen));
})();
"""


def opened(file: Path, page: str) -> str:
    """The document after its scripts have run."""
    assert CHROMIUM is not None
    file.write_text(page)
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--window-size=1400,1000",
        "--dump-dom",
    ]
    command = [
        CHROMIUM,
        *options,
        "--virtual-time-budget=5000",
        f"--user-data-dir={file}.profile",
        f"file://{file}",
    ]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_in_a_browser_a_page_tells_draws_zooms_smooths_and_changes_its_axis_and_asks_for_nothing(
    tmp_path,
):
    for name in ("a", "b"):
        a_run(tmp_path / name, ("failure", 250, EVIL), ("finish", 500, "Finished"), steps=600)
        clock = (
            line(step, tokens=step * 100, elapsed=step, time=1e9 + step) for step in range(1, 501)
        )
        (tmp_path / name / "metrics.jsonl").write_text("".join(clock))
    (tmp_path / "a" / "validation.jsonl").write_text('{"step": 250, "loss": 6.25}\n')
    page = make_page([tmp_path / "a", tmp_path / "b"])

    document = opened(tmp_path / "page.html", page)  # with its own policy
    assert "data-drawn" in document
    for said in (
        "500 of 600",
        "minutes",
        "finished",
        "6.25",
        "failure",
        "&lt;script&gt;alert(1)",
        "training.steps",
    ):
        assert said in document.partition('<script type="application/json"')[0], said
    assert document.count("<script") == page.count("<script") == 2
    assert "<img" not in document.partition("<script")[0]

    policy = re.sub("script-src [^;]*;", "script-src 'unsafe-inline';", page)
    document = opened(
        tmp_path / "used.html", policy.replace("</body>", f"<script>{USE}</script></body>")
    )
    found = re.search('data-seen="(.*?)"', document)
    assert found is not None
    seen = json.loads(unquote(found[1]))
    assert seen["canvases"] == seen["charts"] == len(seen["scales"])
    assert all(place == [0, 500] for place in seen["scales"])
    assert all(place == [100, 200] for place in seen["zoomed"])
    assert (seen["whole"], seen["tokens"], seen["smoother"], seen["resources"]) == (
        [0, 500],
        [0, 50_000],
        True,
        0,
    )
