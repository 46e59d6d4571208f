// All runs of a subject: sorted, filtered, and only as many rows in the document as can be seen.

const ROW = 34; // pixels, as in page.css
const known = (value, text) => (value === null ? "–" : text(value));
const COLUMNS = [
  { name: "technique", title: "Technique", text: (run) => nameOf(run.technique) },
  { name: "mode", title: "Pruned", text: (run) => run.mode },
  { name: "compression", title: "Ratio", number: true, text: (run) => run.ratio },
  { name: "t", title: "t", number: true, text: (run) => known(run.t, short) },
  { name: "trial", title: "Trial", number: true, text: (run) => String(run.trial) },
  { name: "test", title: "Test", number: true, text: (run, subject) => shownValue(subject, run.test) },
  { name: "delta", title: "Δ", number: true, text: (run, subject) => known(run.delta, (delta) => signed(delta, subject.digits)) },
  {
    name: "val",
    title: "Val",
    number: true,
    wide: true,
    text: (run, subject) => known(run.val, (val) => shownValue(subject, val)),
  },
  { name: "cost", title: "Search", number: true, wide: true, text: (run) => known(run.cost, short) },
  {
    name: "speed",
    title: "Speed-up",
    number: true,
    wide: true,
    text: (run) => known(run.speed, (speed) => `${fixed(speed, 2)}×`),
  },
  { name: "key", title: "Key", wide: true, text: (run, subject) => known(run.key, (key) => shortKey(subject, key)) },
];
const shortKey = (subject, key) => key.slice(0, 8) + (subject.byKey.get(key).length > 1 ? " =" : "");
const classesOf = ({ number, wide }) => `${number ? "number" : ""} ${wide ? "wide" : ""}`.trim();

const LIMITED = ["compression", "ratio", "density", "t", "trial", "test", "val", "delta", "cost", "speed"];
const LIMIT = new RegExp(`^(${LIMITED.join("|")})(<=|>=|<|>|=)([-\u2212]?\\d*\\.?\\d+)$`);
const COMPARE = {
  "<": (a, b) => a < b,
  ">": (a, b) => a > b,
  "<=": (a, b) => a <= b,
  ">=": (a, b) => a >= b,
  "=": (a, b, digits) => Math.abs(a - b) < 0.51 / 10 ** digits, // as shown
};

// Words that a run has to contain, and limits such as compression>=5 or test>91, in shown units.
function matcher(subject, text) {
  const tests = text
    .toLowerCase()
    .split(/\s+/)
    .filter(Boolean)
    .map((word) => {
      const limit = word.match(LIMIT);
      return limit ? within(subject, ...limit.slice(1)) : (run) => wordsOf(run).includes(word);
    });
  return (run) => tests.every((test) => test(run));
}

// Why nothing is left: a limit that is none, or words that no run has.
function nothingFound(text) {
  const wrong = text.toLowerCase().split(/\s+/).find((word) => /[<>=]/.test(word) && !LIMIT.test(word));
  const limits = `Limits are ${LIMITED.join(", ")} with <, <=, =, >= or > and a number`;
  if (wrong) return `No run matches: “${wrong}” is no limit. ${limits}, as delta>-1.`;
  return `No run matches. Words are looked for in technique, one-shot or iterative, ratio and key. ${limits}.`;
}

function within(subject, name, sign, digits) {
  const limit = Number(digits.replace(MINUS, "-"));
  const scale = ["test", "val"].includes(name) ? subject.scale : 1;
  const shown = ["test", "val", "delta"].includes(name) ? subject.digits : 2;
  const valueOf =
    { density: (run) => 1 / run.compression, ratio: (run) => run.compression }[name] ?? ((run) => run[name]);
  return (run) => valueOf(run) !== null && COMPARE[sign](scale * valueOf(run), limit, shown);
}

function wordsOf(run) {
  const failed = run.test === null ? "failed" : "";
  return `${run.technique} ${nameOf(run.technique)} ${run.mode} ${run.ratio} ${run.key ?? ""} ${failed}`.toLowerCase();
}

function chosenRuns(subject) {
  const fits = matcher(subject, state.filter);
  const runs = subject.runs.filter((run) => !state.hidden.has(run.technique) && fits(run));
  const [name, direction] = state.sort.split(" ");
  if (!COLUMNS.some((column) => column.name === name)) return runs;
  const valueOf = name === "technique" ? (run) => techniques.get(run.technique)?.place ?? -1 : (run) => run[name];
  const sign = direction === "down" ? -1 : 1;
  const compare = (a, b) => (a === null) - (b === null) || sign * ((a > b) - (a < b)); // what is not known comes last
  return runs.sort((a, b) => compare(valueOf(a), valueOf(b)));
}

const labelsOf = ({ key, technique, mode, ratio, t, trial }) => [key, technique, mode, ratio, t, trial].join(" ");
const table = { runs: [], active: -1 };

function buildTable() {
  table.filter = h("input", {
    type: "search",
    value: state.filter,
    placeholder: "lr iterative compression>=5",
    ariaLabel: "Filter runs",
  });
  table.filter.addEventListener("input", () => change({ filter: table.filter.value }));
  table.heads = COLUMNS.map((column) =>
    h(
      "th",
      { scope: "col", className: classesOf(column) },
      button(column.title, () => sortBy(column), ""),
    ),
  );
  table.body = h("tbody");
  table.counted = h("span", { className: "quiet", role: "status" });
  table.window = h(
    "div",
    { className: "window", tabIndex: 0, role: "group", ariaLabel: "Runs. Arrow keys choose one, Enter opens it." },
    h("table", { className: "runs" }, h("thead", {}, h("tr", {}, table.heads)), table.body),
  );
  table.window.addEventListener("scroll", showRows, { passive: true });
  table.window.addEventListener("keydown", tableKey);
  table.body.addEventListener("click", (event) => {
    const line = event.target.closest("tr[data-number]");
    if (line) openRun(current(), current().runs[line.dataset.number]);
  });
  document
    .getElementById("runs")
    .replaceChildren(
      h("div", { className: "head" }, h("h2", { id: "runs-title" }, "All runs"), table.counted),
      quiet(
        "Words and limits narrow the list: ",
        h("code", {}, "fine trial=2 delta>-1"),
        ". A click opens a run. ",
        "Keys marked = stand in several rows: those are one run.",
      ),
      table.filter,
      table.window,
    );
}

function sortBy({ name }) {
  const [sorted, direction] = state.sort.split(" ");
  const next = { "": "down", down: "up", up: "" }[sorted === name ? direction : ""];
  change({ sort: next && `${name} ${next}` });
}

function fillTable() {
  table.active = -1;
  table.window.scrollTop = 0;
  renewTable();
}

// The same table with newer runs: the reader's place and choice stay.
function renewTable() {
  const subject = current();
  const chosen = table.runs[table.active];
  document.getElementById("runs").hidden = !subject.runs.length;
  table.runs = chosenRuns(subject);
  table.active = chosen ? table.runs.findIndex((run) => labelsOf(run) === labelsOf(chosen)) : -1;
  const all = count(subject.runs.length, "run");
  table.counted.textContent = table.runs.length < subject.runs.length ? `${whole(table.runs.length)} of ${all}` : all;
  const [name, direction] = state.sort.split(" ");
  table.heads.forEach((head, place) => {
    const order = { up: "ascending", down: "descending" }[direction];
    head.ariaSort = COLUMNS[place].name === name ? order : "none";
  });
  showRows();
}

function showRows() {
  const subject = current();
  const { runs, window, active } = table;
  const first = Math.max(0, Math.floor(window.scrollTop / ROW) - 8);
  const last = Math.min(runs.length, first + Math.ceil(window.clientHeight / ROW) + 16);
  const lines = runs.slice(first, last).map((run, place) => rowElement(subject, run, first + place === active));
  const nothing = h("tr", {}, h("td", { className: "empty", colSpan: COLUMNS.length }, nothingFound(state.filter)));
  table.body.replaceChildren(space(first), ...(runs.length ? lines : [nothing]), space(runs.length - last));
}

function rowElement(subject, run, active) {
  const cells = COLUMNS.map((column) => h("td", { className: classesOf(column) }, column.text(run, subject)));
  if (run.setting) cells[0].prepend(swatch(techniques.get(run.technique)));
  return h("tr", { "data-number": run.number, className: active ? "active" : "" }, cells);
}

function space(rows) {
  const cell = h("td", { colSpan: COLUMNS.length });
  cell.style.height = `${rows * ROW}px`;
  return h("tr", { className: "space", ariaHidden: "true" }, cell);
}

function tableKey(event) {
  const { runs, window, active } = table;
  if (event.target !== window || !runs.length) return;
  const page = Math.floor(window.clientHeight / ROW) - 2;
  const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
  if (!(event.key in moves || event.key === "Enter")) return;
  event.preventDefault(); // or Enter would press the button that the dialog puts the focus on
  if (event.key === "Enter") return active >= 0 && openRun(current(), runs[active]);
  table.active = Math.min(runs.length - 1, Math.max(0, active + moves[event.key]));
  const top = table.active * ROW;
  const seen = window.clientHeight - 3 * ROW; // the head of the table covers one row
  window.scrollTop = Math.min(top, Math.max(window.scrollTop, top - seen));
  showRows();
}

watch(["subject", "hidden", "filter", "sort"], fillTable);
