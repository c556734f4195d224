// Fill the page of `titanlite report`, and connect its controls with the charts.

/** Let the user choose the x axis among those for which there is data. */
function addAxes() {
  const titles = { step: "steps", tokens: "tokens", hours: `${TIME_UNIT} of training` };
  const select = findElement("axis");
  for (const [axis, title] of Object.entries(titles)) {
    const hasData = report.runs.some((run) => run.curves.x[axis]);
    if (hasData) addElement("option", select, "", title).value = axis;
  }
  select.onchange = () => {
    view.axis = select.value;
    view.zoom = null;
    drawCharts();
  };
}

/** Add a button for each run that hides or shows its curves. */
function addRunButtons() {
  if (report.runs.length === 1) return;
  for (const run of report.runs) {
    const button = addElement("button", findElement("runs"));
    addDot(button, run);
    addElement("span", button, "name", run.name);
    button.onclick = () => {
      const isHidden = button.classList.toggle("off");
      if (isHidden) view.hiddenRuns.add(run);
      else view.hiddenRuns.delete(run);
      drawCharts();
    };
  }
}

/** Change a setting of the charts when a control is used, and draw them again. */
function connectControls() {
  findElement("smoothing").oninput = (event) => {
    view.smoothing = Number(event.target.value);
    drawCharts();
  };
  findElement("events").onchange = (event) => {
    view.showsEvents = event.target.checked;
    for (const chart of charts) chart.plot.redraw();
  };
  findElement("log").onchange = (event) => {
    view.isLogarithmic = event.target.checked;
    drawCharts();
  };
  findElement("cut").onchange = (event) => {
    view.hidesOutliers = event.target.checked;
    drawCharts();
  };
  findElement("whole").onclick = () => setZoom(null);
}

/** Draw the charts again when the color scheme or the width of the page changes. */
function followPage(grid) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawCharts);

  let width = grid.clientWidth;
  let timer;
  const resize = () => {
    if (grid.clientWidth === width) return;
    width = grid.clientWidth;
    drawCharts();
  };
  new ResizeObserver(() => {
    clearTimeout(timer);
    timer = setTimeout(resize, 100); // milliseconds without a further change
  }).observe(grid);
}

showOverview();
showEvents();
showSamples();
showConfigurations();
addAxes();
addRunButtons();
connectControls();
const grid = findElement("charts");
addChartBoxes(grid);
drawCharts();
followPage(grid);
// A browser test waits for this attribute.
document.documentElement.dataset.drawn = "true";
