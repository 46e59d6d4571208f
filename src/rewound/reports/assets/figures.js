// The figures of a subject: which data a panel draws, and what is said about a mark.

// `section.renew` shows the same figure of newer data, with what the reader has chosen.
function figureSection(subject, figure) {
  const title = h("h2", { id: `${figure.id}-title` });
  const select = h("select", { onchange: () => show() });
  const text = quiet();
  const scale = figure.id === "layers" ? h("p", { className: "scale quiet" }, "0%", h("i"), "100% kept") : null;
  const grid = h("div", { className: "panels" });
  const numbers = figure.id === "differences" ? h("div") : null;

  function show() {
    const choice = figure.choices.find(({ label }) => label === select.value) ?? figure.choices[0];
    grid.classList.toggle("small", Boolean(choice.small));
    const elements = choice.panels.map((panel, place) => {
      const known = grid.children[place];
      if (known?.panel.kind !== panel.kind) return panelElement(givenFor(subject, panel));
      known.panel.renew(givenFor(subject, panel));
      return known;
    });
    forget(grid, elements);
    arrange(grid, elements);
    hideUnticked(grid);
  }

  function fill() {
    const chosen = select.value;
    title.textContent = figure.title;
    text.textContent = figure.text;
    become(select, chooser(figure));
    select.value = figure.choices.some(({ label }) => label === chosen) ? chosen : figure.choices[0].label;
    if (numbers) contain(numbers, differenceTables(subject, figure));
    show();
  }

  fill();
  const section = h(
    "section",
    { className: "figure", id: figure.id, "aria-labelledby": title.id },
    h("div", { className: "head" }, title, select),
    ...[text, scale, grid, numbers].filter(Boolean),
  );
  section.renew = (...newer) => {
    [subject, figure] = newer;
    fill();
  };
  return section;
}

function chooser({ title, choices }) {
  const options = choices.map(({ label }) => h("option", { value: label }, label));
  return h("select", { ariaLabel: `${title}: which runs`, hidden: choices.length < 2 }, options);
}

// A panel of a single technique goes with it.
function hideUnticked(grid) {
  for (const { panel } of grid.children) panel.element.hidden = state.hidden.has(panel.technique);
}

function givenFor(subject, panel) {
  if (panel.runs) return givenForCurves(subject, panel);
  const valuesOf = { layers: () => layerValues(panel), difference: () => differenceValues(subject, panel) };
  const values = valuesOf[panel.kind] ?? (() => settingValues(subject, panel));
  const open = (datum) => openRun(subject, middleRun(subject, subject.settings[datum.number]));
  return { panel, values, tell: (datum) => tell(subject, datum), open };
}

function settingValues(subject, panel) {
  const settings = panel.settings.map((number) => subject.settings[number]);
  const present = [...techniques.keys()].filter((name) => settings.some((setting) => setting.technique === name));
  const scale = panel.kind === "time" ? 0.5 : 1; // small panels have small marks
  const drawn = (setting, [value, low, high], more) => {
    const place = present.indexOf(setting.technique);
    const shift = scale * (place - (present.length - 1) / 2);
    const size = scale * techniques.get(setting.technique).size;
    return { ...setting, place, shift, size, value, low, high, ...more };
  };
  const mine = settings.map((setting) => {
    const values = panel.field ? setting[panel.field] : [setting.delta, setting.low, setting.high];
    return drawn(setting, values, { field: panel.field });
  });
  const theirs = (panel.theirs ?? []).map((number) => {
    const setting = subject.settings[number];
    const edge = edgeOf(techniques.get(setting.technique));
    return drawn(setting, setting.theirs, { trials: setting.theirs[3], edge, same: null, compared: true });
  });
  return [...mine, ...theirs];
}

// One technique minus another stands in the colour of the other.
function differenceValues(subject, { settings, minus, differences }) {
  const rivals = [...new Set(minus.map((number) => subject.settings[number].technique))];
  return differences.map(([value, low, high, n, paired, interval], place) => {
    const [first, other] = [settings, minus].map((numbers) => subject.settings[numbers[place]]);
    const { technique } = other;
    const shift = 2 * (rivals.indexOf(technique) - (rivals.length - 1) / 2);
    const { size } = techniques.get(technique);
    return { ...first, technique, other, shift, size, value, low, high, n, paired, interval };
  });
}

function layerValues({ ratios, layers, kept, settings, technique }) {
  const values = ratios.flatMap((ratio, column) =>
    layers.map((layer, line) => ({ ratio, layer, kept: kept[column][line], number: settings[column], technique })),
  );
  return values.filter((datum) => datum.kept !== null);
}

function givenForCurves(subject, panel) {
  const values = curveValues(subject, panel);
  const rates = [...new Set(values.map(({ value }) => value))].filter((rate) => rate > 0).sort((a, b) => a - b);
  const params = { places: rates.length > 5 ? [rates[0], rates.at(-1)] : rates };
  const open = (datum) => openRun(subject, subject.runs[datum.number]);
  return { panel: { ...panel, params }, values: () => values, tell: (datum) => tell(subject, datum), open };
}

function curveValues(subject, { kind, runs }) {
  return runs.flatMap((number) => {
    const { key, technique } = subject.runs[number];
    const [steps, rates, losses] = story.details.runs[key]?.curve ?? [[], [], []];
    const values = kind === "rate" ? rates : losses;
    const points = steps.map((step, place) => ({ step, value: values[place], technique, key, number, kind }));
    return points.filter((point) => point.value !== null);
  });
}

function tell(subject, datum) {
  const name = nameOf(datum.technique);
  if (datum.layer !== undefined) return [datum.layer, `${fixed(100 * datum.kept, 1)}% kept at ${datum.ratio}`, name];
  if (datum.step !== undefined) {
    const what = datum.kind === "rate" ? "Learning rate" : "Loss";
    return [name, `${what} ${short(datum.value)} after ${count(datum.step, "step")}`];
  }
  if (datum.other) return tellDifference(subject, datum);
  const lines = [datum.compared ? `${name}, compared table` : name, `${datum.ratio}, ${MODES[datum.iterative]}, t = ${short(datum.t)}`];
  const rival = { speed: "the dense network", faster: "fine-tuning" }[datum.field];
  const text = (value) => (rival ? `${fixed(value, 2)}×` : signed(value, subject.digits));
  const range = datum.trials > 1 ? `${text(datum.low)} to ${text(datum.high)}, ${datum.trials} trials` : "one trial";
  lines.push(`${text(datum.value)} ${rival ? `fewer FLOPs than ${rival}` : subject.unit} (${range})`);
  if (datum.compared) return [...lines, `Ours: ${text(datum.delta)}`];
  if (datum.cost !== null) lines.push(`${count(datum.cost, "epoch")} of search`);
  if (datum.same) {
    const others = datum.same.map((number) => settingText(subject.settings[number], datum));
    lines.push(`The same runs as ${others.join("; ")}`);
  }
  return lines;
}

function tellDifference(subject, datum) {
  const first = subject.settings[datum.number];
  const pairs = count(datum.n, datum.paired ? "pair" : "trial");
  return [
    `${nameOf(first.technique)} ${subject.against} ${nameOf(datum.technique)}`,
    `${datum.ratio}, ${MODES[datum.iterative]}, t = ${short(first.t)} and ${short(datum.other.t)}`,
    `${spanned(datum, subject)} ${subject.unit}`,
    `${datum.interval ? "95% t interval" : "Min to max"}, ${pairs}${datum.paired ? "" : " each, not paired"}`,
  ];
}

// Square brackets around an interval, round ones around extremes.
function spanned({ value, low, high, interval }, { digits }) {
  const [left, right] = interval ? "[]" : "()";
  const [mean, ...ends] = [value, low, high].map((part) => signed(part, digits));
  return `${mean} ${left}${ends.join(", ")}${right}`;
}

function differenceTables(subject, { choices }) {
  const tables = choices[0].panels.map((panel) => {
    const values = differenceValues(subject, panel);
    const rivals = [...new Set(values.map(({ technique }) => technique))];
    const byRatio = [...Map.groupBy(values, ({ ratio }) => ratio)];
    const lines = byRatio.sort(([, [one]], [, [other]]) => one.compression - other.compression);
    const text = (found) => (found ? spanned(found, subject) : "–");
    const digits = Number(panel.params.digits[1]); // as on the axis
    const ratioOf = ([{ compression }]) => `${fixed(compression, digits)}×`;
    const row = ([, mine]) => [ratioOf(mine), ...rivals.map((name) => text(mine.find((each) => each.technique === name)))];
    const table = plainTable(panel.title, ["Ratio", ...rivals.map(nameOf)], lines.map(row));
    return h("div", { className: "scroll" }, table, quiet(panel.brackets));
  });
  return h("details", {}, h("summary", {}, "As a table"), h("div", { className: "beside" }, tables));
}

function showFigures() {
  const host = document.getElementById("figures");
  forget(host);
  host.replaceChildren();
  renewFigures();
}

function renewFigures() {
  const host = document.getElementById("figures");
  const subject = current();
  const nothing = h("p", { className: "empty" }, "Nothing to draw yet: no pruned network of this recipe has finished.");
  const between = [...host.children].filter((child) => ["reach", "conformance"].includes(child.id));
  const sections = subject.figures.flatMap((figure) => {
    const known = host.querySelector(`:scope > #${figure.id}`);
    known?.renew(subject, figure);
    return [known ?? figureSection(subject, figure), ...(figure.id === "accuracy" ? between : [])];
  });
  arrange(host, sections.length ? sections : [nothing]);
}

// What is not near yet is drawn while the reader pauses, so that printing finds all of it.
async function drawTheRest() {
  const next = [...panels].find(({ element }) => !element.dataset.drawn && !element.hidden);
  if (!next) return;
  await next.draw();
  requestIdleCallback(drawTheRest);
}

watch(["subject"], showFigures);
watch(["subject"], () => requestIdleCallback(drawTheRest));
watch(["hidden"], () => document.querySelectorAll(".figure .panels").forEach(hideUnticked));
