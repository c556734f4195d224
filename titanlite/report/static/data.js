// Prepare the data of the runs for charts and tables, format values, and add elements to the page.
//
// Text from the files of a run is always inserted as text, never as HTML.

const report = JSON.parse(document.getElementById("data").textContent);

const COMPACT = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 });

function isPresent(value) {
  return value !== null && value !== undefined;
}

/**
 * Return the value of a key from the files of a run, or undefined if the table lacks the key.
 *
 * Each object inherits some properties, such as "constructor", which can also be names of metrics.
 */
function lookUp(table, key) {
  return key !== undefined && Object.hasOwn(table, key) ? table[key] : undefined;
}

/** Return a number with at most five significant digits, such as "0.54906" or "1.25M". */
function formatNumber(value) {
  if (!isPresent(value)) return "-";
  const size = Math.abs(value);
  if (size >= 1e5) return COMPACT.format(value);
  if (size !== 0 && size < 1e-3) return value.toExponential(2);
  return Number(value.toPrecision(5)).toLocaleString("en", { maximumFractionDigits: 5 });
}

/** Return an integer with separators, such as "50,000". */
function formatCount(value) {
  return isPresent(value) ? Math.round(value).toLocaleString("en") : "-";
}

/** Return a Unix time as local time, such as "2026-11-29 22:40:26". */
function formatTime(seconds) {
  return seconds === null ? "-" : new Date(seconds * 1000).toLocaleString("sv");
}

/** Turn nested tables into one table with keys such as "section.key". */
function flatten(table, prefix = "") {
  const flat = {};
  for (const [key, value] of Object.entries(table)) {
    const isTable = value !== null && typeof value === "object" && !Array.isArray(value);
    if (isTable) Object.assign(flat, flatten(value, `${prefix}${key}.`));
    else flat[prefix + key] = value;
  }
  return flat;
}

/**
 * Return the position of a step on an axis of a run: "step", "tokens" or "hours".
 *
 * Only log steps have a known position. The positions of other steps are interpolated, or
 * extrapolated from the last two log steps.
 */
function findPosition(run, axis, step) {
  const steps = run.curves.x.step || [];
  const positions = run.curves.x[axis] || [];
  if (axis === "step" || positions.length === 0) return step;

  let next = steps.findIndex((loggedStep) => loggedStep >= step);
  if (next < 0) next = steps.length - 1;
  const previousStep = next > 0 ? steps[next - 1] : 0;
  const previousPosition = next > 0 ? positions[next - 1] : 0;
  const numSteps = steps[next] - previousStep;
  const fraction = numSteps > 0 ? (step - previousStep) / numSteps : 1;
  return previousPosition + fraction * (positions[next] - previousPosition);
}

/** Return the unit for hours of training: "minutes" if no run has trained for an hour. */
function chooseTimeUnit() {
  const isShort = (run) => ((run.curves.x.hours || []).at(-1) || 0) < 1;
  return report.runs.every(isShort) ? "minutes" : "hours";
}

const TIME_UNIT = chooseTimeUnit();

/** Convert the curves, validations, events and tables of a run, in place. */
function prepareRun(run) {
  const { hours } = run.curves.x;
  if (hours && TIME_UNIT === "minutes") run.curves.x.hours = hours.map((value) => 60 * value);

  run.config = flatten(run.config);
  run.environment = flatten(run.environment);
  const { x } = run.validations;
  for (const axis of ["tokens", "hours"]) {
    if (x.step && run.curves.x[axis]) x[axis] = x.step.map((step) => findPosition(run, axis, step));
  }
  for (const event of run.events) {
    event.positions = {};
    for (const axis of ["step", "tokens", "hours"]) {
      event.positions[axis] = findPosition(run, axis, event.step);
    }
  }
}

report.runs.forEach(prepareRun);

/** Return the element of the page with an id. */
function findElement(id) {
  return document.getElementById(id);
}

/** Append a new element to another one. */
function addElement(tag, parent, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.textContent = text;
  parent.append(element);
  return element;
}

/** Return the value of a CSS variable of the page, such as "--muted". */
function readCss(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Return the number of the CSS variable with the color of a run. */
function findColorNumber(run) {
  return report.runs.indexOf(run) % 10;
}

function findColor(run) {
  return readCss(`--c${findColorNumber(run)}`);
}

/** Append a dot in the color of a run. */
function addDot(parent, run) {
  addElement("span", parent, "dot").style.background = `var(--c${findColorNumber(run)})`;
}
