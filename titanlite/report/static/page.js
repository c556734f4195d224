"use strict";
// Draws the page from its data. Whatever comes from a run's files is drawn or set as text, never as HTML.
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

// Tables in tables as one, with keys such as "section.key".
const flat = (value, prefix = "") => Object.assign({}, ...Object.entries(value).map(([key, inner]) =>
  inner !== null && typeof inner === "object" && !Array.isArray(inner) ? flat(inner, `${prefix}${key}.`) : { [prefix + key]: inner }));

// Where a step lies on an axis of a run: between the logged steps beside it, or behind the last ones at their pace.
function place(run, axis, step) {
  const steps = run.curves.x.step || [], values = run.curves.x[axis] || [];
  if (axis === "step" || !values.length) return step;
  let after = steps.findIndex((s) => s >= step);
  if (after < 0) after = steps.length - 1;
  const [s0, v0] = after ? [steps[after - 1], values[after - 1]] : [0, 0];
  return v0 + (values[after] - v0) * (steps[after] > s0 ? (step - s0) / (steps[after] - s0) : 1);
}

// Hours of training are shown as minutes where no run has trained for an hour.
const TIME = D.runs.every((run) => ((run.curves.x.hours || []).at(-1) || 0) < 1) ? "minutes" : "hours";
if (TIME === "minutes")
  for (const { curves } of D.runs) if (curves.x.hours) curves.x.hours = curves.x.hours.map((hours) => 60 * hours);

for (const run of D.runs) {
  [run.config, run.environment] = [flat(run.config), flat(run.environment)];
  const columns = { kind: [], text: [], undone: [] };
  for (const key in columns) columns[key] = run.events.map((event) => event[key]);
  for (const axis of ["step", "tokens", "hours"]) {
    columns[axis] = run.events.map((event) => place(run, axis, event.step));
    if (axis !== "step" && run.curves.x[axis] && run.validations.x.step)
      run.validations.x[axis] = run.validations.x.step.map((step) => place(run, axis, step));
  }
  run.listed = run.events;
  run.events = columns;
}

// Tag and meaning of a number; "OBJECT/KEY" is one in an object.
function described(key) {
  const [name, ...part] = key.split("/");
  const [tag, about] = D.tags[name] || [`custom/${name}`, ""];
  return part.length ? [`${tag}/${part.join("/")}`, `${part.join("/")}: ${about}`] : [tag, about];
}

// Return one chart for each curve of any run: the metrics in the order of metrics.jsonl, then those of hooks.
function chartSpecs() {
  const keys = new Set(D.runs.flatMap((run) => Object.keys(run.curves.y)));
  const validated = new Set(D.runs.flatMap((run) => Object.keys(run.validations.y)));
  const about = "Starts, stops, saves and other events. Pale events were repeated after a rollback or resume.";
  const names = Object.keys(D.tags);
  const rank = (key) => (names.includes(key.split("/")[0]) ? names.indexOf(key.split("/")[0]) : names.length);
  const last = rank("loss_max_rank"); // events and validations come after the losses
  const specs = [[last + 0.1, "", { kind: "events", key: "", title: "Events", wide: true, about }]];
  for (const key of keys) {
    const [tag, about] = described(key);
    const both = key === "loss" && validated.delete("loss");
    specs.push([rank(key), tag, { key, about: both ? `${about} Dashed: validation.` : about, wide: key === "loss", validation: both ? "loss" : "" }]);
  }
  for (const key of validated) {
    const [tag, about] = D.validation_tags[key] || [`custom/validation ${key}`, ""];
    specs.push([last + 0.2, tag, { key: "", validation: key, about }]);
  }
  specs.sort(([a, tagA], [b, tagB]) => a - b || (tagA < tagB ? -1 : 1));
  const clean = (text) => text.replaceAll("_", " ");
  return specs.map(([, tag, spec], id) => {
    const group = clean(tag.split("/")[0]), name = clean(tag.slice(tag.indexOf("/") + 1));
    return { id, title: name.startsWith(group) || group === "custom" ? name : `${group}: ${name}`, ...spec };
  });
}
D.charts = chartSpecs();

const COLORS = { save: "--muted", plan: "--muted", data: "--muted", validation: "--c5", start: "--c2", stop: "--warn", restart: "--warn", profile: "--c4" }; // others: --bad
const kindColor = (kind) => css(COLORS[kind] || (kind === "finish" ? "--good" : "--bad"));
const QUIET = ["save", "validation", "data", "plan", "profile", "finish"]; // they have no line in the charts, only a mark among the events
const KINDS = [...new Set(D.runs.flatMap((run) => run.events.kind))];

const state = { axis: "step", smoothing: 0, events: true, log: false, cut: false, zoom: null, hidden: new Set() };
const shown = () => D.runs.filter((run) => !state.hidden.has(run));
let charts = [];

function full() {
  let low = Infinity, high = -Infinity;
  for (const run of shown())
    for (const x of [run.curves.x[state.axis], run.validations.x[state.axis], run.events[state.axis]])
      if (x && x.length) { low = Math.min(low, ...x); high = Math.max(high, ...x); }
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
      if (e.undone[i] || QUIET.includes(e.kind[i]) || (e.kind[i] === "start" && run.listed[i].step === 0)) return;
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
    const single = data[i + 1].filter((v) => v !== null && v !== undefined).length === 1;
    const line = { stroke, width: 1.5, spanGaps: true, points: { show: single, size: 6, fill: stroke } };
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
    if (x !== null && x !== undefined) node("span", readout, "muted", `${state.axis === "hours" ? TIME : state.axis} ${number(x)}`);
    columns.forEach(({ run, part }, i) => {
      if (part !== "mean" && part !== "validation") return;
      const values = plot.data[i + 1];
      let from = x === null || x === undefined ? values.length - 1 : at;
      while (from >= 0 && (values[from] === null || values[from] === undefined)) from--;
      if (from < 0) return;
      const text = `${part === "validation" ? "validation " : ""}${number(values[from])}`;
      const named = D.runs.length > 1 ? `${run.name} ${text}` : text;
      node("span", readout, "", named).style.color = color(run);
    });
  };
  // Without outliers the axis spans what 98% of the points that are shown have.
  const heights = (plot, min, max) => {
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
    hooks: { ...HOOKS, draw: [drawEvents], setCursor: [say] },
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
        if (x < plot.scales.x.min || x > plot.scales.x.max) return;
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
        const away = Math.hypot(plot.valToPos(x, "x") - plot.cursor.left, plot.valToPos(row(run.events.kind[i]), "y") - plot.cursor.top);
        if (away < nearest) {
          nearest = away;
          text = `${D.runs.length > 1 ? run.name + ": " : ""}step ${number(run.listed[i].step)}: ${run.events.text[i]}`;
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

// A table; a cell is a text, or a function that fills it. Columns in `numeric` are numbers.
function table(parent, head, rows, { numeric = [], kind = "" } = {}) {
  const made = node("table", parent);
  const top = node("tr", made);
  head.forEach((text, i) => node("th", top, numeric.includes(i) ? "number" : "", text));
  for (const row of rows) {
    const line = node("tr", made, row.undone ? "undone" : "");
    row.forEach((cell, i) => {
      const box = node("td", line, numeric.includes(i) ? "number" : kind === "value" && i === 0 ? "key" : kind);
      if (typeof cell === "function") cell(box);
      else box.textContent = cell;
    });
  }
}

function section(title) {
  node("h2", byId("sections"), "", title);
  return node("div", byId("sections"), "card scroll");
}

const clock = (seconds) => (seconds === null ? "-" : new Date(seconds * 1000).toLocaleString("sv"));
const count = (v) => (v === null || v === undefined ? "-" : Math.round(v).toLocaleString("en"));

function overview() {
  document.title = D.runs.map((run) => run.name).join(", ");
  for (const run of D.runs) node("span", document.querySelector("h1"), "name", run.name);
  byId("written").textContent = `Written ${clock(D.written)} by titanlite ${D.version}, from the files of the runs.`;
  const head = ["run", "state", "step", "tokens", TIME, "loss", "lowest validation loss", "tokens/s", "ranks"];
  const rows = D.runs.map((run, i) => {
    const validated = run.validations.y.loss ? (run.validations.y.loss.min || run.validations.y.loss.mean).filter((v) => v !== null) : [];
    return [
      (box) => {
        const name = node("span", box, "name");
        node("span", name, "dot").style.background = `var(--c${i % 10})`;
        name.append(run.name);
        node("div", box, "muted", run.config["job.description"] || "");
      },
      (box) => {
        node("span", box, `state ${run.state}`, run.state);
        node("span", box, "muted", ` ${clock(run.last_update)}`);
        node("div", box, "", run.exit_reason);
      },
      count(run.step) + (run.total_steps === null ? "" : ` of ${count(run.total_steps)}`),
      count(run.tokens),
      run.curves.x.hours?.length ? number(Number(run.curves.x.hours.at(-1).toFixed(2))) : "-",
      number(run.numbers.loss),
      number(validated.length ? Math.min(...validated) : null),
      count(run.numbers.tps),
      run.environment.world_size ?? "-",
    ];
  });
  table(byId("overview"), head, rows, { numeric: [2, 3, 4, 5, 6, 7, 8] });
  for (const run of D.runs) for (const problem of run.problems) node("p", byId("overview"), "problem", `${run.name}: ${problem}`);
}

// A section with one table for each run that has rows.
function perRun(title, head, rowsOf, style) {
  const runs = D.runs.filter((run) => rowsOf(run).length);
  const box = runs.length ? section(title) : null;
  for (const run of runs) {
    node("p", box, "", run.name);
    table(box, head, rowsOf(run), style);
  }
}

// The keys whose values differ between the columns, and all keys, folded.
function compared(title, names, columns) {
  const keys = [...new Set(columns.flatMap((column) => Object.keys(column)))].sort();
  const rows = keys.map((key) => [key, ...columns.map((column) => (key in column ? JSON.stringify(column[key]) : "-"))]);
  const differing = rows.filter(([, ...values]) => new Set(values).size > 1);
  const box = section(title);
  if (names.length > 1) {
    node("p", box, "", differing.length ? "What differs:" : "Nothing differs.");
    table(box, ["key", ...names], differing, { kind: "value" });
  }
  const all = node("details", box);
  node("summary", all, "", "All keys");
  table(all, ["key", ...names], rows, { kind: "value" });
}

function sections() {
  const box = section("Events"), head = ["time", "event", "step", "log"], style = { numeric: [0, 2], kind: "text" };
  const isQuiet = (event) => ["save", "validation"].includes(event.kind);
  const row = (event) => Object.assign([clock(event.time), event.kind, count(event.step), event.text], { undone: event.undone });
  for (const run of D.runs) {
    const events = [...run.listed].reverse();
    node("p", box, "", run.name + (run.older_events ? `, without the ${count(run.older_events)} oldest` : ""));
    table(box, head, events.filter((event) => !isQuiet(event)).map(row), style);
    const more = node("details", box);
    node("summary", more, "", "Saves and validations");
    table(more, head, events.filter(isQuiet).map(row), style);
  }
  const keys = ["step", "prompt", "completion"];
  perRun("Samples", keys, (run) => [...run.samples].reverse().map((sample) => keys.map((key) => String(sample[key] ?? "-"))), { numeric: [0], kind: "text" });
  const names = D.runs.map((run) => run.name);
  if (D.runs.length === 1) compared("Configuration", [...names, "default"], [D.runs[0].config, flat(D.defaults)]);
  else compared("Configuration", names, D.runs.map((run) => run.config));
  compared("Environment and layout", names, D.runs.map((run) => run.environment));
}

function start() {
  overview();
  sections();
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
    if (D.runs.some((run) => run.curves.x[name])) node("option", axis, "", { step: "steps", tokens: "tokens", hours: `${TIME} of training` }[name]).value = name;
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
      node("span", chip, "name", run.name);
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
