// Show the overview, the events, the samples and the configurations of the runs in tables.

/**
 * Append a table.
 *
 * Args:
 *   parent: Element to append the table to.
 *   columns: Objects with the `title` of each column and the CSS class of its cells, `kind`.
 *   rows: Lists of cells. A cell is a string, or a function that fills its element.
 *   rowClasses: CSS class of each row, or "". By default, no row has a class.
 */
function addTable(parent, columns, rows, rowClasses = []) {
  const table = addElement("table", parent);
  const head = addElement("tr", table);
  for (const { title, kind } of columns) {
    addElement("th", head, kind === "number" ? "number" : "", title);
  }
  rows.forEach((row, rowIndex) => {
    const line = addElement("tr", table, rowClasses[rowIndex]);
    row.forEach((cell, index) => {
      const element = addElement("td", line, columns[index].kind);
      if (typeof cell === "function") cell(element);
      else element.textContent = cell;
    });
  });
}

/** Append a section with a title, and return its box. */
function addSection(title) {
  const sections = findElement("sections");
  addElement("h2", sections, "", title);
  return addElement("div", sections, "card scroll");
}

/** Append a box that the user must open, and return it. */
function addDetails(parent, summary) {
  const details = addElement("details", parent);
  addElement("summary", details, "", summary);
  return details;
}

function fillNameCell(cell, run) {
  const name = addElement("span", cell, "name");
  addDot(name, run);
  name.append(run.name);
  addElement("div", cell, "muted", run.config["job.description"] || "");
}

function fillStateCell(cell, run) {
  addElement("span", cell, `state ${run.state}`, run.state);
  addElement("span", cell, "muted", ` ${formatTime(run.last_update)}`);
  addElement("div", cell, "", run.exit_reason);
}

/** Return the lowest validation loss of a run, or null. */
function findLowestValidationLoss(run) {
  const { loss } = run.validations.y;
  if (!loss) return null;
  const values = (loss.min || loss.mean).filter((value) => value !== null);
  return values.length > 0 ? Math.min(...values) : null;
}

/** Return the cells of a run in the overview. */
function makeOverviewRow(run) {
  const total = run.total_steps === null ? "" : ` of ${formatCount(run.total_steps)}`;
  const time = (run.curves.x.hours || []).at(-1);
  return [
    (cell) => fillNameCell(cell, run),
    (cell) => fillStateCell(cell, run),
    formatCount(run.step) + total,
    formatCount(run.tokens),
    time === undefined ? "-" : formatNumber(Number(time.toFixed(2))),
    formatNumber(run.numbers.loss),
    formatNumber(findLowestValidationLoss(run)),
    formatCount(run.numbers.tps),
    run.environment.world_size ?? "-",
  ];
}

/** Show the state of each run, and the problems in its files. */
function showOverview() {
  document.title = report.runs.map((run) => run.name).join(", ");
  const heading = document.querySelector("h1");
  for (const run of report.runs) addElement("span", heading, "name", run.name);
  findElement("written").textContent =
    `Written ${formatTime(report.written)} by titanlite ${report.version}, ` +
    "from the files of the runs.";

  const columns = [
    { title: "run", kind: "" },
    { title: "state", kind: "" },
    { title: "step", kind: "number" },
    { title: "tokens", kind: "number" },
    { title: TIME_UNIT, kind: "number" },
    { title: "loss", kind: "number" },
    { title: "lowest validation loss", kind: "number" },
    { title: "tokens/s", kind: "number" },
    { title: "ranks", kind: "number" },
  ];
  const overview = findElement("overview");
  addTable(overview, columns, report.runs.map(makeOverviewRow));
  for (const run of report.runs) {
    for (const problem of run.problems) {
      addElement("p", overview, "problem", `${run.name}: ${problem}`);
    }
  }
}

/** Return the cells of an event. */
function makeEventRow(event) {
  return [formatTime(event.time), event.kind, formatCount(event.step), event.text];
}

/** Append a table of events. Events that the run undid when it resumed are dimmed. */
function addEventTable(parent, events) {
  const columns = [
    { title: "time", kind: "number" },
    { title: "event", kind: "text" },
    { title: "step", kind: "number" },
    { title: "log", kind: "text" },
  ];
  const rowClasses = events.map((event) => (event.undone ? "undone" : ""));
  addTable(parent, columns, events.map(makeEventRow), rowClasses);
}

/** Show the events of each run, newest first. */
function showEvents() {
  const isFrequent = (event) => event.kind === "save" || event.kind === "validation";
  const box = addSection("Events");
  for (const run of report.runs) {
    const older = run.older_events ? `, without the ${formatCount(run.older_events)} oldest` : "";
    addElement("p", box, "", run.name + older);
    const events = [...run.events].reverse();
    const rare = events.filter((event) => !isFrequent(event));
    addEventTable(box, rare);
    const details = addDetails(box, "Saves and validations");
    addEventTable(details, events.filter(isFrequent));
  }
}

/** Show the generated samples of the runs that have some, newest first. */
function showSamples() {
  const runs = report.runs.filter((run) => run.samples.length > 0);
  if (runs.length === 0) return;
  const columns = [
    { title: "step", kind: "number" },
    { title: "prompt", kind: "text" },
    { title: "completion", kind: "text" },
  ];
  const box = addSection("Samples");
  for (const run of runs) {
    addElement("p", box, "", run.name);
    const samples = [...run.samples].reverse();
    const rows = samples.map((sample) => columns.map(({ title }) => String(sample[title] ?? "-")));
    addTable(box, columns, rows);
  }
}

/**
 * Compare tables of values in a section: first the keys with different values, then all keys.
 *
 * Args:
 *   title: Title of the section.
 *   names: Names of the tables.
 *   tables: Objects that map keys to values.
 */
function showComparison(title, names, tables) {
  const keys = [...new Set(tables.flatMap((table) => Object.keys(table)))].sort();
  const formatValue = (table, key) => {
    return Object.hasOwn(table, key) ? JSON.stringify(table[key]) : "-";
  };
  const rows = keys.map((key) => [key, ...tables.map((table) => formatValue(table, key))]);
  const columns = [
    { title: "key", kind: "key" },
    ...names.map((name) => ({ title: name, kind: "value" })),
  ];

  const box = addSection(title);
  if (names.length > 1) {
    const differing = rows.filter(([, ...values]) => new Set(values).size > 1);
    addElement("p", box, "", differing.length > 0 ? "What differs:" : "Nothing differs.");
    addTable(box, columns, differing);
  }
  addTable(addDetails(box, "All keys"), columns, rows);
}

/** Show the job of a single run beside the defaults, or the jobs of several runs. */
function showConfigurations() {
  const names = report.runs.map((run) => run.name);
  const jobs = report.runs.map((run) => run.config);
  if (jobs.length === 1) {
    showComparison("Configuration", [...names, "default"], [...jobs, flatten(report.defaults)]);
  } else {
    showComparison("Configuration", names, jobs);
  }
  const environments = report.runs.map((run) => run.environment);
  showComparison("Environment and layout", names, environments);
}
