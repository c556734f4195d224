"""The page of `titanlite report` shows the files of runs, runs no code from them, and is small."""

import json
import random
import re
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from fuzz.test_mutants import mutant
from report.test_run_files import FINISHED, create_run, event_line, line, write_metrics
from small_runs import run_program

from titanlite.report.page import make_page, page_data
from titanlite.report.run_files import read_status

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[2J\u202e"


VALIDATION = '{"step": 20, "loss": 6.25, "perplexity": 518.0, "bits_per_byte": 2.5}\n'
ENVIRONMENT = '{"world_size": 8, "layout": {"shard": 8}, "device": "H100"}'
SAMPLE = '{"step": 20, "prompt": "Once", "completion": " upon a time"}\n'


def data_of(*folders: Path) -> dict[str, Any]:
    """Return the data of a page, as the browser reads it."""
    pattern = r'<script type="application/json" id="data">(.*?)</script>'
    (data,) = re.findall(pattern, make_page(folders), re.DOTALL)
    return json.loads(data)


def create_full_run(folder: Path, *events: str, **changes: Any) -> Path:
    """Write all files of a run."""
    run = create_run(folder, *events, **changes)
    (run / "validation.jsonl").write_text(VALIDATION)
    (run / "environment.json").write_text(ENVIRONMENT)
    (run / "samples.jsonl").write_text(SAMPLE)
    return run


def test_a_page_has_all_that_a_run_has_written(tmp_path):
    events = "data: Data: a table", "save 50: saved step 50", "finish 50: Done"

    data = data_of(create_full_run(tmp_path / "mine", *events))

    (run,) = data["runs"]
    assert (run["name"], run["state"]) == ("mine", "finished")
    assert (run["step"], run["total_steps"]) == (50, 100)
    assert run["curves"]["x"]["step"] == [10, 20, 30, 40, 50]
    assert run["curves"]["y"]["loss"] == {"mean": [7.9, 7.8, 7.7, 7.6, 7.5]}
    # On one rank, tps_per_device equals tps and is left out.
    assert "tps_per_device" not in run["curves"]["y"]
    assert run["validations"]["y"]["loss"] == {"mean": [6.25]}
    assert [event["kind"] for event in run["events"]] == ["start", "data", "save", "finish"]
    assert run["events"][1]["text"] == "Data: a table"
    assert run["samples"][0]["completion"] == " upon a time"
    assert run["config"]["job"]["description"] == "mine"
    assert run["environment"]["layout"]["shard"] == 8
    assert data["tags"]["loss"][0] == "train/loss"


def test_runs_with_the_same_name_are_named_with_their_folder(tmp_path):
    folders = [create_run(tmp_path / name) for name in ("a/run", "b/run")]

    assert [run["name"] for run in data_of(*folders)["runs"]] == ["a/run", "b/run"]


def test_events_after_which_a_later_start_resumed_are_marked_and_a_kill_is_found(tmp_path):
    create_run(tmp_path)
    kinds = ["start 0", "save 50", "save 100", "start 50", "save 100", "stop", "start 100"]
    lines = [event_line(f"{kind}: ", time=1e9 + index) for index, kind in enumerate(kinds)]
    (tmp_path / "events.jsonl").write_text("".join(lines))
    lines = []
    for step in (10, 20, 30, 20, 40, 50):
        now = 1e9 + step / 10
        lines.append(line(step, time=now, step_time=360.0, parts={"a": step}))
    write_metrics(tmp_path, lines)

    (run,) = data_of(tmp_path)["runs"]

    assert run["curves"]["x"] == {
        "step": [10, 20, 30, 40, 50],
        "hours": [1, 2, 3, 4, 5],
    }
    assert run["curves"]["y"]["parts/a"]["mean"] == [10, 20, 30, 40, 50]

    events = [f"{event['kind']} {event['step']:.0f}" for event in run["events"]]
    assert events == [*kinds[:3], "killed 100", *kinds[3:5], "stop 100", "start 100"]

    undone = [event["undone"] for event in run["events"]]
    assert undone == [index in (2, 3) for index in range(8)]


def test_a_stop_between_two_logged_steps_is_at_its_step_and_counts_its_tokens(tmp_path):
    events = "save 3: Saved step 3", "stop: Stopped by SIGTERM after step 3"
    create_run(tmp_path, *events, steps=400)
    write_metrics(tmp_path, [line(1, tokens=2048)])

    (run,) = data_of(tmp_path)["runs"]

    assert [event["step"] for event in run["events"][1:]] == [3, 3]
    assert (run["step"], run["total_steps"], run["tokens"]) == (3, 400, 6144)


def list_tags(page: str) -> list[str]:
    tags = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append(f"{tag} {attrs}")
    parser.feed(page)
    return tags


def test_text_from_files_is_in_the_data_only_and_printable(tmp_path):
    run = create_run(tmp_path / "a<b>&", f"failure: {EVIL}")
    with (run / "events.jsonl").open("a") as file:
        file.write(event_line("kind 3: text", event=EVIL))
    quoted = json.dumps(EVIL)
    (run / "config.toml").write_text(f"[job]\ndescription = {quoted}\n[{quoted}]\nx = 1\n")
    environment = {"device": EVIL, EVIL: {EVIL: EVIL}, "world_size": EVIL}
    (run / "environment.json").write_text(json.dumps(environment))
    sample = {"step": EVIL, "prompt": EVIL, "completion": EVIL}
    (run / "samples.jsonl").write_text(json.dumps(sample) + "\n")
    validation = json.dumps({"step": 10, EVIL: 1.0})
    (run / "validation.jsonl").write_text(f"{validation}\n{EVIL}\n")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line(60, **{EVIL: 1.0}))

    page = make_page([run])

    assert list_tags(page) == list_tags(make_page([create_run(tmp_path / "plain")]))
    assert "default-src 'none'; script-src 'sha256-" in page

    loading = r"<(link|img|iframe|object|base|form|a)\b| (src|href|action)="
    assert not re.search(loading, page.partition("<script")[0])
    assert not {"\x1b", "\u202e"} & set(page)


def test_a_long_run_keeps_its_mean_and_each_spike(tmp_path):
    create_run(tmp_path)
    unusual = {12_345: 99.0, 54_321: -7.0}
    unusual |= dict.fromkeys(range(50_000, 50_070))
    lines = []
    for step in range(1, 100_001):
        loss = unusual.get(step, 1.0)
        lines.append(line(step, loss=loss, step_time=1.0))
    write_metrics(tmp_path, lines)

    curves = data_of(tmp_path)["runs"][0]["curves"]

    loss = curves["y"]["loss"]

    assert len(loss["mean"]) == 2000
    assert max(value for value in loss["max"] if value is not None) == 99.0
    assert min(value for value in loss["min"] if value is not None) == -7.0
    assert (loss["mean"][0], loss["mean"][1000]) == (1.0, None)

    steps = curves["x"]["step"]
    assert (steps[0], steps[-1]) == (25.5, 99_975.5)
    assert curves["x"]["hours"][-1] == pytest.approx(99_975.5 / 3600)


def test_a_page_of_many_runs_stays_small(tmp_path):
    text = "x" * 5000
    events = [f"failure 1: {text}", f"save 1: {text}"]
    metrics = {f"number {i}": 0.123456789 for i in range(20)}
    lines = [line(step, **metrics) for step in range(1, 501)]
    runs = []
    for number in range(50):
        run = create_run(tmp_path / str(number), *events * 100)
        write_metrics(run, lines)
        (run / "samples.jsonl").write_text(SAMPLE.replace("Once", text))
        runs.append(run)

    assert len(make_page(runs).encode()) < 5_000_000


NO_TORCH = """
import sys
from titanlite.cli import main
run, page = sys.argv[1:]
for words in (["report", run, "--out", page], ["runs", run], ["watch", run]):
    main(words)
assert "torch" not in sys.modules
"""


def test_the_commands_need_no_torch(tmp_path):
    run = create_run(tmp_path / "run", FINISHED)
    page = tmp_path / "page.html"

    run_program(sys.executable, "-c", NO_TORCH, run, page)

    assert page.read_text().startswith("<!doctype html>")


def test_damaged_files_still_have_a_view_and_a_page(tmp_path):
    events = "save 20: ", "start 20: ", "stop: "
    metrics = [line(step, tokens=step, elapsed=step, grad_norm=None) for step in range(1, 60)]
    for seed in range(40):
        rng = random.Random(seed)
        run = create_full_run(tmp_path / str(seed), *events)
        write_metrics(run, metrics)
        for path in run.iterdir():
            is_json = path.suffix != ".toml"
            lines = path.read_bytes().split(b"\n")
            for _ in range(rng.choice((0, 1, 3, 20))):
                index = rng.randrange(len(lines))
                lines[index] = mutant(lines[index], rng.randrange(1_000_000), is_json)
            path.write_bytes(b"\n".join(lines))

        assert all(text.isprintable() for text in read_status(run).to_lines())
        json.dumps(page_data([run]), allow_nan=False)


BROWSERS = map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))
CHROMIUM = next(filter(None, BROWSERS), None)
# Uses the page after its own scripts have run, and stores what it then shows.
USE = """
const scale = () => charts.map((chart) => [chart.plot.scales.x.min, chart.plot.scales.x.max]);
const mean = () => {
  const { data, columns } = collectColumns(CHARTS[0]);
  const means = data[1 + columns.findIndex((column) => column.part === "mean")];
  return means.findLast((y) => y !== null);
};
const seen = {
  scales: scale(),
  canvases: document.querySelectorAll("canvas").length,
  charts: CHARTS.length,
};
setZoom([100, 200]);
(async () => {
  const settled = () => new Promise((done) => setTimeout(done, 100)); // uPlot draws a little later
  await settled();
  seen.zoomed = scale();
  findElement("whole").click();
  await settled();
  seen.whole = scale()[0];
  const rough = mean();
  findElement("smoothing").value = 0.9;
  findElement("smoothing").oninput({ target: findElement("smoothing") });
  seen.smoother = mean() > rough; // the mean of a falling curve lies above its end
  findElement("axis").value = "tokens";
  findElement("axis").onchange();
  await settled();
  seen.tokens = scale()[0];
  for (const id of ["log", "cut", "events"]) findElement(id).click();
  seen.resources = performance.getEntriesByType("resource").length;
  document.body.dataset.seen = encodeURIComponent(JSON.stringify(seen));
})();
"""


def open_in_browser(file: Path, page: str) -> str:
    """Return the document after its scripts have run."""
    file.write_text(page)
    options = "--headless=new --no-sandbox --disable-gpu --window-size=1400,1000 --dump-dom"
    options += f" --virtual-time-budget=5000 --user-data-dir={file}.profile file://{file}"
    return run_program(CHROMIUM, *options.split(), timeout=120).stdout


@pytest.fixture
def two_run_page(tmp_path) -> str:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    events = f"failure 250: {EVIL}", "finish 500: Finished"
    lines = []
    for step in range(1, 501):
        # "constructor" is a metric of a plugin, with the name of a property of all objects.
        metrics = {"tokens": step * 100, "elapsed": step, "constructor": 1.0}
        lines.append(line(step, time=1e9 + step, **metrics))
    runs = [create_full_run(tmp_path / name, *events, steps=600) for name in "ab"]
    for run in runs:
        write_metrics(run, lines)
    return make_page(runs)


@pytest.mark.browser
@pytest.mark.slow
def test_a_browser_shows_the_page_under_its_own_content_policy(tmp_path, two_run_page):
    document = open_in_browser(tmp_path / "page.html", two_run_page)

    assert "data-drawn" in document

    shown = document.partition('<script type="application/json"')[0]
    for text in ("500 of 600", "minutes", "finished", "6.25", "failure", "training.steps"):
        assert text in shown

    assert "&lt;script&gt;alert(1)" in shown
    assert document.count("<script") == two_run_page.count("<script") == 2
    assert "<img" not in document.partition("<script")[0]


@pytest.mark.browser
@pytest.mark.slow
def test_a_browser_zooms_smooths_and_changes_the_axis_and_requests_nothing(tmp_path, two_run_page):
    page = re.sub("script-src [^;]*;", "script-src 'unsafe-inline';", two_run_page)
    page = page.replace("</body>", f"<script>{USE}</script></body>")

    document = open_in_browser(tmp_path / "used.html", page)

    (stored,) = re.findall('data-seen="(.*?)"', document)
    seen = json.loads(unquote(stored))
    assert seen["canvases"] == seen["charts"] == len(seen["scales"])
    assert all(scale == [0, 500] for scale in seen["scales"])
    assert all(scale == [100, 200] for scale in seen["zoomed"])
    assert seen["whole"] == [0, 500]
    assert seen["tokens"] == [0, 50_000]
    assert seen["smoother"]
    assert seen["resources"] == 0
