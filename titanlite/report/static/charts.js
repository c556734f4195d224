// Draw the curves and events of the runs with uPlot.

/** Settings of all charts, which the controls of the page change. `zoom` is [min, max] or null. */
const view = {
  axis: "step",
  smoothing: 0,
  showsEvents: true,
  isLogarithmic: false,
  hidesOutliers: false,
  zoom: null,
  hiddenRuns: new Set(),
};

/** Kind of event -> CSS variable with its color. All other kinds are drawn as errors. */
const EVENT_COLORS = {
  data: "--muted",
  finish: "--good",
  plan: "--muted",
  profile: "--c4",
  restart: "--warn",
  save: "--muted",
  start: "--c2",
  stop: "--warn",
  validation: "--c5",
};
/** Kinds of events without a vertical line in the curves. */
const QUIET_EVENTS = ["save", "validation", "data", "plan", "profile", "finish"];
const EVENT_KINDS = [
  ...new Set(report.runs.flatMap((run) => run.events.map((event) => event.kind))),
];

/** Charts on the page: objects with the uPlot object and its description from `listCharts`. */
let charts = [];

function listVisibleRuns() {
  return report.runs.filter((run) => !view.hiddenRuns.has(run));
}

function findEventColor(kind) {
  return readCss(lookUp(EVENT_COLORS, kind) || "--bad");
}

/** Return the position of a metric in the list of known metrics. Unknown metrics come last. */
function rankMetric(key) {
  const names = Object.keys(report.tags);
  const rank = names.indexOf(key.split("/")[0]);
  return rank < 0 ? names.length : rank;
}

/**
 * Return the tag and the explanation of a metric.
 *
 * A key such as "norms/wq" is the value "wq" of a metric "norms" that consists of several values.
 */
function describeMetric(key) {
  const [name, ...rest] = key.split("/");
  const [tag, about] = lookUp(report.tags, name) || [`custom/${name}`, ""];
  if (rest.length === 0) return { tag, about };
  const part = rest.join("/");
  return { tag: `${tag}/${part}`, about: `${part}: ${about}` };
}

/** Turn a tag such as "train/grad_norm" into a title such as "train: grad norm". */
function makeTitle(tag) {
  const clean = (text) => text.replaceAll("_", " ");
  const group = clean(tag.split("/")[0]);
  const name = clean(tag.slice(tag.indexOf("/") + 1));
  return name.startsWith(group) || group === "custom" ? name : `${group}: ${name}`;
}

/**
 * Return a description of each chart, in the order of the page.
 *
 * There is a chart for each metric of any run, for each validation metric, and for the events. The
 * validation loss is part of the chart of the training loss.
 */
function listCharts() {
  const metrics = new Set(report.runs.flatMap((run) => Object.keys(run.curves.y)));
  const validations = new Set(report.runs.flatMap((run) => Object.keys(run.validations.y)));
  const lastLoss = rankMetric("loss_max_rank"); // events and validations come after the losses

  const descriptions = [];
  if (EVENT_KINDS.length > 0) {
    descriptions.push({
      rank: lastLoss + 0.1,
      tag: "Events",
      about:
        "Starts, stops, saves and other events. " +
        "Pale events were repeated after a rollback or resume.",
      isWide: true,
      isEvents: true,
    });
  }
  for (const metric of metrics) {
    const description = { rank: rankMetric(metric), metric, ...describeMetric(metric) };
    if (metric === "loss") {
      description.isWide = true;
      if (validations.delete("loss")) {
        description.validation = "loss";
        description.about += " Dashed: validation.";
      }
    }
    descriptions.push(description);
  }
  for (const validation of validations) {
    const unknown = [`custom/validation ${validation}`, ""];
    const [tag, about] = lookUp(report.validation_tags, validation) || unknown;
    descriptions.push({ rank: lastLoss + 0.2, validation, tag, about });
  }

  descriptions.sort((a, b) => a.rank - b.rank || (a.tag < b.tag ? -1 : 1));
  return descriptions.map((description, index) => ({
    ...description,
    id: `chart-${index}`,
    title: description.isEvents ? "Events" : makeTitle(description.tag),
  }));
}

const CHARTS = listCharts();

/** Return the exponential mean of values. Missing values stay missing. */
function smooth(values) {
  const keep = view.smoothing;
  let sum = 0;
  let weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = keep * sum + (1 - keep) * value;
    weight = keep * weight + (1 - keep);
    return sum / weight; // without a bias towards 0 at the start
  });
}

/**
 * Return the columns that a curve is drawn from: its mean, and a band or the raw values.
 *
 * The columns are drawn in this order. `makeCurveChart` expects `min` directly after `max`.
 */
function listCurveParts(y) {
  const isSmoothed = view.smoothing > 0;
  const mean = isSmoothed ? smooth(y.mean) : y.mean;
  if (y.max) return { max: y.max, min: y.min, mean };
  return isSmoothed ? { raw: y.mean, mean } : { mean };
}

/**
 * Return the data of a chart.
 *
 * Returns:
 *   data: Columns in the format of uPlot. The first one contains the positions on the x axis.
 *   columns: Run and part of each other column. The part is "mean", "max", "min", "raw" or
 *     "validation".
 */
function collectColumns({ metric, validation }) {
  const tables = [];
  const columns = [];
  for (const run of listVisibleRuns()) {
    const x = run.curves.x[view.axis];
    const y = lookUp(run.curves.y, metric);
    if (x && y) {
      const parts = listCurveParts(y);
      tables.push([x, ...Object.values(parts)]);
      columns.push(...Object.keys(parts).map((part) => ({ run, part })));
    }
    const validationX = run.validations.x[view.axis];
    const validationY = lookUp(run.validations.y, validation);
    if (validationX && validationY) {
      tables.push([validationX, validationY.mean]);
      columns.push({ run, part: "validation" });
    }
  }
  return { data: tables.length > 0 ? uPlot.join(tables) : [[], []], columns };
}

/** Return the range of the x axis that contains all points and events of visible runs. */
function findFullRange() {
  let min = Infinity;
  let max = -Infinity;
  for (const run of listVisibleRuns()) {
    const events = run.events.map((event) => event.positions[view.axis]);
    for (const x of [run.curves.x[view.axis], run.validations.x[view.axis], events]) {
      if (x && x.length > 0) {
        min = Math.min(min, ...x);
        max = Math.max(max, ...x);
      }
    }
  }
  if (min > max) return [0, 1]; // no points
  return min === max ? [min - 1, max + 1] : [min, max];
}

/** Zoom all charts to a range [min, max] of the x axis, or to the full range for null. */
function setZoom(zoom) {
  view.zoom = zoom;
  const [min, max] = zoom || findFullRange();
  for (const chart of charts) chart.plot.setScale("x", { min, max });
}

function zoomToSelection(plot) {
  const { left, width } = plot.select;
  if (width < 3) return; // a click
  setZoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
  plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
}

/** Return the uPlot options that all charts have in common. */
function makeOptions(box, { isWide }) {
  const axis = {
    stroke: () => readCss("--muted"),
    grid: { stroke: () => readCss("--grid"), width: 1 },
    ticks: { show: false },
    font: "11px system-ui, sans-serif",
  };
  const formatTicks = (_, ticks) => ticks.map((tick) => (tick === null ? "" : formatNumber(tick)));
  const isMouseMove = (type) => type === "mousemove" || type === "mouseleave";
  const resetZoom = () => {
    setZoom(null);
    return null;
  };
  return {
    width: Math.max(200, box.clientWidth - 28),
    height: isWide ? 320 : 190,
    legend: { show: false },
    cursor: {
      drag: { x: true, y: false, setScale: false },
      sync: { key: "runs", filters: { pub: isMouseMove } },
      points: { size: 6 },
      bind: { dblclick: () => resetZoom },
    },
    axes: [
      { ...axis, size: 28, values: formatTicks },
      { ...axis, size: isWide ? 84 : 62, values: formatTicks },
    ],
    scales: { x: { time: false, range: (_, min, max) => [min, max] } },
    hooks: { setSelect: [zoomToSelection] },
  };
}

/** Return how uPlot draws a column of a curve. */
function makeSeries({ run, part }, values) {
  const stroke = () => findColor(run);
  const isSinglePoint = values.filter(isPresent).length === 1;
  const points = { show: isSinglePoint, size: 6, fill: stroke };
  const series = { stroke, width: 1.5, spanGaps: true, points };
  if (part === "max" || part === "min") series.width = 0; // bounds of a band
  if (part === "raw") Object.assign(series, { width: 1, alpha: 0.3 });
  if (part === "validation") {
    points.show = true;
    series.dash = [5, 4];
  }
  return series;
}

/** Return the color of the band between the minimum and the maximum of a curve. */
function findBandColor(run) {
  const opacity = Math.round(255 * Number(readCss("--band")));
  return findColor(run) + opacity.toString(16).padStart(2, "0");
}

/** Return the columns of values that are means or validations, with the run and part of each. */
function listMainColumns(plot, columns) {
  return columns
    .map((column, index) => ({ ...column, values: plot.data[index + 1] }))
    .filter(({ part }) => part === "mean" || part === "validation");
}

/** Write the values at the cursor above a chart, or the last values without a cursor. */
function showValues(plot, columns, readout) {
  readout.textContent = "";
  const { idx } = plot.cursor;
  const x = isPresent(idx) ? plot.data[0][idx] : null;
  if (isPresent(x)) {
    const unit = view.axis === "hours" ? TIME_UNIT : view.axis;
    addElement("span", readout, "muted", `${unit} ${formatNumber(x)}`);
  }
  for (const { run, part, values } of listMainColumns(plot, columns)) {
    const end = isPresent(x) ? idx + 1 : values.length;
    const value = values.slice(0, end).findLast(isPresent);
    if (!isPresent(value)) continue;
    const words = [formatNumber(value)];
    if (part === "validation") words.unshift("validation");
    if (report.runs.length > 1) words.unshift(run.name);
    addElement("span", readout, "", words.join(" ")).style.color = findColor(run);
  }
}

/** Return the range of the y axis. Without outliers, it contains 98% of the visible points. */
function findHeights(plot, columns, min, max) {
  const values = [];
  if (view.hidesOutliers) {
    const [first, last] = plot.series[0].idxs;
    for (const column of listMainColumns(plot, columns)) {
      values.push(...column.values.slice(first, last + 1).filter(isPresent));
    }
  }
  if (values.length >= 20) {
    values.sort((a, b) => a - b);
    min = values[Math.floor(values.length * 0.01)];
    max = values[Math.ceil(values.length * 0.99) - 1];
  }
  return uPlot.rangeNum(min, max, 0.1, true);
}

/** Return whether an event is marked by a vertical line in all curves. */
function hasLine(event) {
  const isFirstStart = event.kind === "start" && event.step === 0;
  return !event.undone && !QUIET_EVENTS.includes(event.kind) && !isFirstStart;
}

/** Draw a dashed vertical line at the events of visible runs. */
function drawEventLines(plot) {
  if (!view.showsEvents) return;
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.globalAlpha = 0.7;
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
  for (const run of listVisibleRuns()) {
    // A failure, the restart and the next start are at the same position.
    const drawn = new Set();
    for (const event of run.events.filter(hasLine)) {
      const x = Math.round(plot.valToPos(event.positions[view.axis], "x", true));
      if (drawn.has(x)) continue;
      drawn.add(x);
      ctx.strokeStyle = findEventColor(event.kind);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
  }
  ctx.restore();
}

/** Create the chart of a metric. */
function makeCurveChart(description, box, readout) {
  const { data, columns } = collectColumns(description);
  const options = makeOptions(box, description);

  options.series = [{}, ...columns.map((column, index) => makeSeries(column, data[index + 1]))];
  if (columns.length === 0) options.series.push({}); // uPlot requires a column of values
  options.bands = [];
  columns.forEach(({ run, part }, index) => {
    if (part !== "max") return;
    options.bands.push({ series: [index + 1, index + 2], fill: () => findBandColor(run) });
  });

  const isPositive = (value) => !isPresent(value) || value > 0;
  const allPositive = data.slice(1).every((values) => values.every(isPositive));
  options.scales.y =
    view.isLogarithmic && allPositive
      ? { distr: 3 }
      : { range: (plot, min, max) => findHeights(plot, columns, min, max) };

  options.hooks.draw = [drawEventLines];
  options.hooks.setCursor = [(plot) => showValues(plot, columns, readout)];
  const plot = new uPlot(options, data, box);
  showValues(plot, columns, readout);
  return plot;
}

/** Return the events of all visible runs, with their positions on both axes of the event chart. */
function listEventPoints() {
  const points = [];
  for (const run of listVisibleRuns()) {
    for (const event of run.events) {
      const y = EVENT_KINDS.length - 1 - EVENT_KINDS.indexOf(event.kind);
      points.push({ run, event, x: event.positions[view.axis], y });
    }
  }
  return points;
}

/** Draw a dot for each event. */
function drawEventPoints(plot) {
  const { ctx } = plot;
  const { min, max } = plot.scales.x;
  ctx.save();
  for (const { run, event, x, y } of listEventPoints()) {
    if (x < min || x > max) continue;
    ctx.globalAlpha = event.undone ? 0.25 : 1;
    ctx.fillStyle = report.runs.length > 1 ? findColor(run) : findEventColor(event.kind);
    const radius = 4 * devicePixelRatio;
    ctx.beginPath();
    ctx.arc(plot.valToPos(x, "x", true), plot.valToPos(y, "y", true), radius, 0, 2 * Math.PI);
    ctx.fill();
  }
  ctx.restore();
}

/** Above the chart, show the text of the event that is nearest to the cursor. */
function showNearestEvent(plot, readout) {
  let nearest = 12; // pixels
  readout.textContent = "";
  for (const { run, event, x, y } of listEventPoints()) {
    const distance = Math.hypot(
      plot.valToPos(x, "x") - plot.cursor.left,
      plot.valToPos(y, "y") - plot.cursor.top,
    );
    if (distance >= nearest) continue;
    nearest = distance;
    const name = report.runs.length > 1 ? `${run.name}: ` : "";
    readout.textContent = `${name}step ${formatNumber(event.step)}: ${event.text}`;
  }
}

/** Create the chart of all events, with a row for each kind of event. */
function makeEventChart(description, box, readout) {
  const options = makeOptions(box, description);
  const numRows = EVENT_KINDS.length;
  options.height = 46 + 24 * numRows;
  options.series = [{}, { paths: () => null, points: { show: false } }];
  options.scales.y = { range: () => [-0.6, numRows - 0.4] };
  options.cursor.points = { show: false };
  options.axes[1].splits = () => [...EVENT_KINDS.keys()];
  options.axes[1].values = (_, rows) => rows.map((row) => EVENT_KINDS[numRows - 1 - row]);
  options.hooks.draw = [drawEventPoints];
  options.hooks.setCursor = [(plot) => showNearestEvent(plot, readout)];
  return new uPlot(options, [findFullRange(), [null, null]], box);
}

/** Add an empty box for each chart to the page. */
function addChartBoxes(parent) {
  for (const { id, title, about, isWide } of CHARTS) {
    const box = addElement("section", parent, isWide ? "card chart wide" : "card chart");
    box.id = id;
    addElement("h3", box, "", title);
    addElement("p", box, "about", about);
    addElement("div", box, "readout");
  }
}

/** Create all charts. After a change of `view`, they replace the previous charts. */
function drawCharts() {
  for (const chart of charts) chart.plot.destroy();
  charts = CHARTS.map((description) => {
    const box = findElement(description.id);
    const makeChart = description.isEvents ? makeEventChart : makeCurveChart;
    return { description, plot: makeChart(description, box, box.querySelector(".readout")) };
  });
  setZoom(view.zoom);
}
