"""The page in a real browser: it says what the files say, draws, zooms, smooths, and asks for nothing."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from urllib.parse import unquote

import pytest
from report.test_page import EVIL
from report.test_run_files import a_run, line

from titanlite.report.page import make_page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
]
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
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000", "--dump-dom"]
    command = [CHROMIUM, *options, "--virtual-time-budget=5000", f"--user-data-dir={file}.profile", f"file://{file}"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def test_a_page_tells_draws_zooms_smooths_and_changes_its_axis_and_asks_for_nothing(tmp_path: Path) -> None:
    for name in ("a", "b"):
        a_run(tmp_path / name, ("failure", 250, EVIL), ("finish", 500, "Finished"), steps=600)
        clock = (line(step, tokens=step * 100, elapsed=step, time=1e9 + step) for step in range(1, 501))
        (tmp_path / name / "metrics.jsonl").write_text("".join(clock))
    (tmp_path / "a" / "validation.jsonl").write_text('{"step": 250, "loss": 6.25}\n')
    page = make_page([tmp_path / "a", tmp_path / "b"])

    document = opened(tmp_path / "page.html", page)  # with its own policy
    assert "data-drawn" in document
    for said in ("500 of 600", "finished", "6.25", "failure", "&lt;script&gt;alert(1)", "training.steps"):
        assert said in document.partition('<script type="application/json"')[0], said
    assert document.count("<script") == page.count("<script") == 2
    assert "<img" not in document.partition("<script")[0]

    policy = re.sub("script-src [^;]*;", "script-src 'unsafe-inline';", page)
    document = opened(tmp_path / "used.html", policy.replace("</body>", f"<script>{USE}</script></body>"))
    found = re.search('data-seen="(.*?)"', document)
    assert found is not None
    seen = json.loads(unquote(found[1]))
    assert seen["canvases"] == seen["charts"] == len(seen["scales"])
    assert all(place == [0, 500] for place in seen["scales"])
    assert all(place == [100, 200] for place in seen["zoomed"])
    assert (seen["whole"], seen["tokens"], seen["smoother"], seen["resources"]) == ([0, 500], [0, 50_000], True, 0)
