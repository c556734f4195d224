"use strict";
// The charts of the page. Whatever comes from a run's files is drawn or set as text, never as HTML.
const D = JSON.parse(document.getElementById("data").textContent);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const color = (run) => css("--c" + (D.runs.indexOf(run) % 10));
const byId = (id) => document.getElementById(id);
const node = (tag, parent, className, text) => {
  const made = parent.appendChild(document.createElement(tag));
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
};
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 });
const number = (v) => {
  if (v === null || v === undefined) return "-";
  const size = Math.abs(v);
  if (size >= 1e5) return compact.format(v);
  if (size !== 0 && size < 1e-3) return v.toExponential(2);
  return Number(v.toPrecision(5)).toLocaleString("en", { maximumFractionDigits: 5 });
};

const COLORS = { save: "--muted", plan: "--muted", validation: "--c5", start: "--c2", stop: "--warn", restart: "--warn", profile: "--c4" }; // others: --bad
const kindColor = (kind) => css(COLORS[kind] || (kind === "finish" ? "--good" : "--bad"));
const QUIET = ["save", "validation", "data", "plan", "profile", "finish"]; // they have no line in the charts, only a mark among the events
const KINDS = [...new Set(D.runs.flatMap((run) => run.events.kind))].filter((kind) => kind !== "data");

const state = { axis: "step", smoothing: 0, events: true, log: false, cut: false, zoom: null, hidden: new Set() };
const shown = () => D.runs.filter((run) => !state.hidden.has(run));
let charts = [];

function full() {
  let low = Infinity, high = -Infinity;
  for (const run of shown())
    for (const x of [run.curves.x[state.axis], run.validations.x[state.axis], run.events[state.axis]])
      if (x && x.length) { low = Math.min(low, x[0]); high = Math.max(high, x[x.length - 1]); }
  if (low > high) return [0, 1];
  return low === high ? [low - 1, high + 1] : [low, high];
}

function smoothed(values) {
  let sum = 0, weight = 0;
  const w = state.smoothing;
  return values.map((v) => {
    if (v === null) return null;
    sum = sum * w + v * (1 - w);
    weight = weight * w + (1 - w);
    return sum / weight; // so that the first values count fully
  });
}

function setZoom(zoom) {
  state.zoom = zoom;
  const [min, max] = zoom || full();
  for (const chart of charts) chart.plot.setScale("x", { min, max });
}

// The columns of a chart for uPlot, each with what it is: a mean, a bound of the band around it, or a validation.
function columnsOf(spec) {
  const tables = [], columns = [];
  for (const run of shown()) {
    const x = run.curves.x[state.axis], y = run.curves.y[spec.key];
    if (x && y) {
      const table = [x];
      if (y.max) {
        table.push(y.max, y.min);
        columns.push({ run, part: "max" }, { run, part: "min" });
      } else if (state.smoothing > 0) {
        table.push(y.mean);
        columns.push({ run, part: "raw" });
      }
      table.push(state.smoothing > 0 ? smoothed(y.mean) : y.mean);
      columns.push({ run, part: "mean" });
      tables.push(table);
    }
    const vx = run.validations.x[state.axis], vy = spec.validation && run.validations.y[spec.validation];
    if (vx && vy) {
      tables.push([vx, vy.mean]);
      columns.push({ run, part: "validation" });
    }
  }
  return { data: tables.length ? uPlot.join(tables) : [[], []], columns };
}

function drawEvents(plot) {
  if (!state.events) return;
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.globalAlpha = 0.7;
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([3 * devicePixelRatio, 3 * devicePixelRatio]);
  for (const run of shown()) {
    const e = run.events, drawn = new Set();
    (e[state.axis] || []).forEach((x, i) => {
      if (e.undone[i] || QUIET.includes(e.kind[i]) || (e.kind[i] === "start" && e.step[i] === 0)) return;
      const at = Math.round(plot.valToPos(x, "x", true));
      if (drawn.has(at)) return; // a failure, the restart and the start after it
      drawn.add(at);
      ctx.strokeStyle = kindColor(e.kind[i]);
      ctx.beginPath();
      ctx.moveTo(at, bbox.top);
      ctx.lineTo(at, bbox.top + bbox.height);
      ctx.stroke();
    });
  }
  ctx.restore();
}

// What was planned, as a dotted line over the whole width.
function drawPlans(plot, key) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.globalAlpha = 0.8;
  ctx.lineWidth = 1.5 * devicePixelRatio;
  ctx.setLineDash([2 * devicePixelRatio, 4 * devicePixelRatio]);
  for (const run of shown())
    if (key in run.planned) {
      const at = Math.round(plot.valToPos(run.planned[key], "y", true));
      if (at < bbox.top || at > bbox.top + bbox.height) continue;
      ctx.strokeStyle = color(run);
      ctx.beginPath();
      ctx.moveTo(bbox.left, at);
      ctx.lineTo(bbox.left + bbox.width, at);
      ctx.stroke();
    }
  ctx.restore();
}

function options(box, spec, extra) {
  const axis = { stroke: () => css("--muted"), grid: { stroke: () => css("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  return {
    width: Math.max(200, box.clientWidth - 28),
    height: spec.wide ? 320 : 190,
    legend: { show: false },
    cursor: {
      drag: { x: true, y: false, setScale: false },
      sync: { key: "runs", filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
      points: { size: 6 },
      bind: { dblclick: () => () => { setZoom(null); return null; } },
    },
    axes: [
      { ...axis, size: 28, values: (_, ticks) => ticks.map(number) },
      { ...axis, size: spec.wide ? 84 : 62, values: (_, ticks) => ticks.map((v) => (v === null ? "" : number(v))) },
    ],
    ...extra,
  };
}

const HOOKS = {
  setSelect: [(plot) => {
    if (plot.select.width < 3) return;
    setZoom([plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")]);
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  }],
};

function makeCurve(spec, box, readout) {
  const { data, columns } = columnsOf(spec);
  const series = [{}], bands = [];
  columns.forEach(({ run, part }, i) => {
    const stroke = () => color(run);
    const line = { stroke, width: 1.5, spanGaps: true, points: { show: false } };
    if (part === "max" || part === "min") series.push({ ...line, width: 0 });
    else if (part === "raw") series.push({ ...line, width: 1, alpha: 0.3 });
    else if (part === "validation") series.push({ ...line, dash: [5, 4], points: { show: true, size: 6, fill: stroke } });
    else series.push(line);
    if (part === "max")
      bands.push({ series: [i + 1, i + 2], fill: () => color(run) + Math.round(255 * Number(css("--band"))).toString(16).padStart(2, "0") });
  });
  if (series.length === 1) series.push({});
  const say = (plot) => {
    const at = plot.cursor.idx;
    const x = at === null || at === undefined ? null : plot.data[0][at];
    readout.textContent = "";
    if (x !== null && x !== undefined) node("span", readout, "muted", `${state.axis} ${number(x)}`);
    columns.forEach(({ run, part }, i) => {
      if (part !== "mean" && part !== "validation") return;
      const values = plot.data[i + 1];
      let from = x === null || x === undefined ? values.length - 1 : at;
      while (from >= 0 && (values[from] === null || values[from] === undefined)) from--;
      if (from < 0) return;
      const text = `${part === "validation" ? "validation " : ""}${number(values[from])}`;
      const named = D.runs.length > 1 ? `${run.name} ${text}` : text;
      const plan = part === "mean" && spec.key in run.planned ? ` (planned ${number(run.planned[spec.key])})` : "";
      node("span", readout, "", named + plan).style.color = color(run);
    });
  };
  // Without outliers the axis spans what 98% of the points that are shown have.
  const planned = D.runs.map((run) => run.planned[spec.key]).filter((v) => v !== undefined);
  const heights = (plot, min, max) => {
    if (planned.length && min !== null) [min, max] = [Math.min(min, ...planned), Math.max(max, ...planned)];
    if (!state.cut) return uPlot.rangeNum(min, max, 0.1, true);
    const [from, to] = plot.series[0].idxs, seen = [];
    columns.forEach(({ part }, i) => {
      if (part === "mean" || part === "validation")
        for (const v of plot.data[i + 1].slice(from, to + 1)) if (v !== null && v !== undefined) seen.push(v);
    });
    if (seen.length < 20) return uPlot.rangeNum(min, max, 0.1, true);
    seen.sort((a, b) => a - b);
    return uPlot.rangeNum(seen[Math.floor(seen.length * 0.01)], seen[Math.ceil(seen.length * 0.99) - 1], 0.1, true);
  };
  const positive = data.slice(1).every((values) => values.every((v) => v === null || v === undefined || v > 0));
  const plot = new uPlot(options(box, spec, {
    series, bands,
    scales: { x: { time: false, range: (_, min, max) => [min, max] }, y: state.log && positive ? { distr: 3 } : { range: heights } },
    hooks: { ...HOOKS, draw: [drawEvents, (chart) => drawPlans(chart, spec.key)], setCursor: [say] },
  }), data, box);
  say(plot);
  return plot;
}

// All events over the axis, a row for each kind.
function makeEvents(spec, box, readout) {
  const row = (kind) => KINDS.length - 1 - KINDS.indexOf(kind);
  const draw = (plot) => {
    const { ctx } = plot;
    ctx.save();
    for (const run of shown()) {
      (run.events[state.axis] || []).forEach((x, i) => {
        if (run.events.kind[i] === "data" || x < plot.scales.x.min || x > plot.scales.x.max) return;
        ctx.globalAlpha = run.events.undone[i] ? 0.25 : 1;
        ctx.fillStyle = D.runs.length > 1 ? color(run) : kindColor(run.events.kind[i]);
        ctx.beginPath();
        ctx.arc(plot.valToPos(x, "x", true), plot.valToPos(row(run.events.kind[i]), "y", true), 4 * devicePixelRatio, 0, 7);
        ctx.fill();
      });
    }
    ctx.restore();
  };
  const say = (plot) => {
    let nearest = 12, text = "";
    for (const run of shown()) {
      (run.events[state.axis] || []).forEach((x, i) => {
        if (run.events.kind[i] === "data") return;
        const away = Math.hypot(plot.valToPos(x, "x") - plot.cursor.left, plot.valToPos(row(run.events.kind[i]), "y") - plot.cursor.top);
        if (away < nearest) {
          nearest = away;
          text = `${D.runs.length > 1 ? run.name + ": " : ""}step ${number(run.events.step[i])}: ${run.events.text[i]}`;
        }
      });
    }
    readout.textContent = text;
  };
  const base = options(box, spec, {
    height: 46 + 24 * KINDS.length,
    series: [{}, { paths: () => null, points: { show: false } }],
    scales: { x: { time: false, range: (_, min, max) => [min, max] }, y: { range: () => [-0.6, KINDS.length - 0.4] } },
    hooks: { ...HOOKS, draw: [draw], setCursor: [say] },
  });
  base.cursor.points = { show: false };
  base.axes[1].splits = () => KINDS.map((_, i) => i);
  base.axes[1].values = (_, ticks) => ticks.map((i) => KINDS[KINDS.length - 1 - i]);
  return new uPlot(base, [full(), [null, null]], box);
}

function make() {
  for (const chart of charts) chart.plot.destroy();
  charts = D.charts.filter((spec) => spec.kind !== "events" || KINDS.length).map((spec) => {
    const box = byId("chart-" + spec.id);
    const readout = box.querySelector(".readout");
    return { box, spec, plot: (spec.kind === "events" ? makeEvents : makeCurve)(spec, box, readout) };
  });
  setZoom(state.zoom);
}

function start() {
  const grid = byId("charts");
  for (const spec of D.charts) {
    const box = node("section", grid, "card chart" + (spec.wide ? " wide" : ""));
    box.id = "chart-" + spec.id;
    node("h3", box, "", spec.title);
    node("p", box, "about", spec.about);
    node("div", box, "readout");
  }
  const axis = byId("axis");
  for (const name of ["step", "tokens", "hours"])
    if (D.runs.some((run) => run.curves.x[name])) node("option", axis, "", { step: "steps", tokens: "tokens", hours: "hours of training" }[name]).value = name;
  axis.onchange = () => { state.axis = axis.value; state.zoom = null; make(); };
  byId("smoothing").oninput = (event) => { state.smoothing = Number(event.target.value); make(); };
  byId("events").onchange = (event) => { state.events = event.target.checked; for (const chart of charts) chart.plot.redraw(); };
  byId("log").onchange = (event) => { state.log = event.target.checked; make(); };
  byId("cut").onchange = (event) => { state.cut = event.target.checked; make(); };
  byId("whole").onclick = () => setZoom(null);
  if (D.runs.length > 1)
    for (const run of D.runs) {
      const chip = node("button", byId("runs"));
      node("span", chip, "dot").style.background = `var(--c${D.runs.indexOf(run) % 10})`;
      node("span", chip, "", run.name);
      chip.onclick = () => {
        state.hidden.has(run) ? state.hidden.delete(run) : state.hidden.add(run);
        chip.classList.toggle("off", state.hidden.has(run));
        make();
      };
    }
  make();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", make);
  let width = grid.clientWidth, waiting;
  new ResizeObserver(() => {
    clearTimeout(waiting);
    waiting = setTimeout(() => { if (grid.clientWidth !== width) { width = grid.clientWidth; make(); } }, 100);
  }).observe(grid);
  document.documentElement.dataset.drawn = String(Math.round(performance.now())); // milliseconds after it was opened
}
start();
