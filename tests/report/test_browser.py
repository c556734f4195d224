"""The page in a real browser: it draws, zooms, smooths, turns dark, and opens fast."""

import json
import random
from pathlib import Path

import pytest
from report.browser import CHROMIUM, Page
from report.test_page import EVIL, page_of
from report.test_run_files import a_run, line

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
]


def write(tmp_path: Path, *folders: Path) -> Path:
    file = tmp_path / "page.html"
    file.write_text(page_of(*folders))
    return file


def curves(folder: Path, steps: int = 500) -> Path:
    a_run(folder, ("save", 100, EVIL), ("failure", 250, EVIL), ("finish", steps, "Finished"))
    times = {"elapsed": 0.0, "time": 1e9}
    lines = (line(step, tokens=step * 100, **{k: v + step for k, v in times.items()}) for step in range(1, steps + 1))
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder


def planned(run: Path) -> Path:
    """The run, for which a plan said that it would be twice as fast as it was."""
    events = run / "events.jsonl"
    plan = {"time": 1e9, "event": "plan", "step": None, "text": "Plan", "planned": {"tps": 200.0}}
    events.write_text(json.dumps(plan) + "\n" + events.read_text())
    return run


def test_a_page_draws_zooms_smooths_and_changes_its_axis_and_asks_for_nothing(tmp_path: Path) -> None:
    file = write(tmp_path, planned(curves(tmp_path / "a")), curves(tmp_path / "b"))
    scale = "charts.map((chart) => [chart.plot.scales.x.min, chart.plot.scales.x.max])"
    with Page(file, tmp_path / "profile") as page:
        assert page.value("document.querySelectorAll('canvas').length") == page.value("D.charts.length")
        assert all(place == [0, 500] for place in page.value(scale))
        box = page.value(
            "(() => { const b = charts[0].plot.over.getBoundingClientRect(); return [b.left, b.top, b.width]; })()"
        )
        speed = "charts.find((chart) => chart.spec.key === 'tps')"
        assert page.value(f"{speed}.plot.scales.y.max") >= 200  # the line of the plan is in sight
        assert "(planned 200)" in page.value(f"{speed}.box.textContent")
        left, top, width = box
        page.mouse("mousePressed", left + width * 0.2, top + 50)
        page.mouse("mouseMoved", left + width * 0.4, top + 60)
        page.mouse("mouseReleased", left + width * 0.4, top + 60)
        zoomed = page.value(scale)
        assert all(place == zoomed[0] for place in zoomed)
        assert zoomed[0] == pytest.approx([100, 200], abs=3)
        page.value("byId('whole').click()")
        assert page.value(scale)[0] == [0, 500]
        mean = "charts[0].plot.data[charts[0].plot.data.length - 1].at(-1)"
        rough = page.value(mean)
        page.value("(byId('smoothing').value = 0.9, byId('smoothing').oninput({ target: byId('smoothing') }))")
        assert page.value(mean) > rough  # the mean of a falling curve lies above its end
        page.value("(byId('axis').value = 'tokens', byId('axis').onchange())")
        assert page.value(scale)[0] == [0, 50_000]
        before = page.value("charts[0].plot.series.length")
        page.value("document.querySelector('#runs button').click()")
        assert page.value("charts[0].plot.series.length") == 1 + (before - 1) // 2
        for box_id in ("log", "cut", "events"):
            page.value(f"byId('{box_id}').click()")
        assert page.value("document.querySelectorAll('script').length") == 3
        assert page.value("document.querySelectorAll('img').length") == 0
        assert page.requests == [f"file://{file}"]
        assert page.errors == []


def test_a_page_is_light_or_dark_as_the_system_is(tmp_path: Path) -> None:
    file = write(tmp_path, curves(tmp_path / "a"))
    seen = []
    for dark in (False, True):
        with Page(file, tmp_path / f"profile{dark}", dark) as page:
            seen.append(page.value("getComputedStyle(document.body).backgroundColor"))
            assert page.errors == []
    assert seen == ["rgb(255, 255, 255)", "rgb(16, 18, 20)"]


@pytest.mark.long
def test_a_run_of_a_million_logged_steps_opens_in_three_seconds(tmp_path: Path) -> None:
    """Once the file is there: making it takes longer. The limit is for an idle machine, so the best of three counts."""
    folder, chance = a_run(tmp_path / "run"), random.Random(0)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 1_000_001):
            numbers = {"step": step, "loss": 2 + chance.random(), "grad_norm": chance.random(), "lr": 1e-3 / step}
            more = {f"number{i}": chance.random() for i in range(10)}
            file.write(
                json.dumps({**numbers, **more, "tokens": step * 100, "elapsed": step, "time": 1e9 + step}) + "\n"
            )
    file = write(tmp_path, folder)
    took = []
    for attempt in range(3):
        with Page(file, tmp_path / f"profile{attempt}") as page:
            took.append(page.value("Number(document.documentElement.dataset.drawn)"))
    assert file.stat().st_size < 5_000_000
    assert min(took) < 3000, took
