"""The page in a real browser: it says what the files say, draws, zooms, smooths, and asks for nothing."""

import json
from pathlib import Path

import pytest
from report.browser import CHROMIUM, Page
from report.test_page import EVIL
from report.test_run_files import a_run, line

from titanlite.report.page import make_page

pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
]


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


def test_a_page_tells_draws_zooms_smooths_and_changes_its_axis_and_asks_for_nothing(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    (curves(tmp_path / "a") / "config.toml").write_text("[training]\nsteps = 600\n")
    (tmp_path / "a" / "validation.jsonl").write_text('{"step": 250, "loss": 6.25}\n')
    file.write_text(make_page([planned(tmp_path / "a"), curves(tmp_path / "b")]))
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
        text = page.value("document.body.innerText")
        for said in ("500 of 600", "finished", "6.25", "failure", "alert(1)", "training.steps"):
            assert said in text, said
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
