// The page, from top to bottom.

const byId = (id) => document.getElementById(id);
const darkOutside = matchMedia("(prefers-color-scheme: dark)");

function showExtent() {
  const pruned = story.subjects.reduce(
    (sum, { runs }) => sum + runs.setting.filter((setting) => setting >= 0).length,
    0,
  );
  const extent = [
    [new Set(story.subjects.map(({ recipe }) => recipe)).size, "recipe"],
    [pruned, "pruned network"],
    [techniques.size, "technique"],
  ];
  byId("extent").hidden = !story.subjects.length;
  byId("extent").textContent = extent.map(([n, noun]) => `${whole(n)} ${noun}${n === 1 ? "" : "s"}`).join(" · ");
}

function buildHeader() {
  showExtent();
  byId("theme").addEventListener("click", () => change({ theme: isDark() ? "light" : "dark" }));
  watchers.unshift({ names: ["theme"], act: applyTheme }); // before charts look up their colours
  darkOutside.addEventListener("change", applyTheme);
  applyTheme();
}

const isDark = () => (state.theme ? state.theme === "dark" : darkOutside.matches);

function applyTheme() {
  document.documentElement.style.colorScheme = state.theme || "light dark";
  byId("theme").textContent = isDark() ? "Light" : "Dark";
  byId("theme").ariaLabel = `Switch to ${isDark() ? "light" : "dark"} colours`;
}

function findings() {
  const sentence = ({ sentence }) => h("p", { className: "sentence" }, emphasised(sentence));
  const option = (subject, number) => {
    const title = titleOf(subject);
    const radio = h("input", { type: "radio", name: "subject", checked: number === state.subject });
    radio.addEventListener("change", () => change({ subject: placeOf(title) }));
    const pruning = subject.pruning ? h("small", {}, subject.pruning) : null;
    return h(
      "label",
      { className: "subject", "data-key": title },
      radio,
      h("span", { className: "name" }, subject.recipe, pruning),
      sentence(subject),
    );
  };
  const many = () =>
    h("fieldset", { className: "subjects" }, h("legend", {}, "Experiments"), story.subjects.map(option));
  return [
    story.subjects.length === 1 ? sentence(story.subjects[0]) : many(),
    ...(story.notes.length ? [weaknesses()] : []),
  ];
}

function weaknesses() {
  const lines = story.notes.map((note) => h("li", {}, `${note}.`));
  return h("div", { className: "warning" }, "Read with care", h("ul", { className: "bare" }, lines));
}

function chips() {
  const ticks = [...techniques.values()].map((technique) => {
    const tick = h("input", { type: "checkbox", checked: !state.hidden.has(technique.name), value: technique.name });
    tick.addEventListener("change", () => {
      const hidden = new Set(state.hidden);
      if (tick.checked) hidden.delete(technique.name);
      else hidden.add(technique.name);
      change({ hidden });
    });
    return h("label", { className: "chip", "data-key": technique.name }, tick, swatch(technique), technique.label);
  });
  const table = hollow({ outline: "M0,-1A1,1,0,1,1,0,1A1,1,0,1,1,0,-1Z", colour: "currentColor", edge: "white" });
  const options = [
    ...(isCompared ? [option("compared", table, "Compared table")] : []),
    option("spread", whisker(), "Min to max of trials"),
  ];
  return [...ticks, h("span", { className: "options" }, options)];
}

function option(name, sign, text) {
  const tick = h("input", { type: "checkbox", checked: state[name], id: name });
  tick.addEventListener("change", () => change({ [name]: tick.checked }));
  return h("label", { className: "chip" }, tick, sign, text);
}

function showReach() {
  const subject = current();
  const before = byId("reach");
  if (!subject.reach.length) return before?.remove();
  const what =
    "The largest compression, its epochs of search, and its range with all deltas one standard error lower or higher.";
  const section = h(
    "section",
    { id: "reach", "aria-labelledby": "reach-title" },
    h("h2", { id: "reach-title" }, "How far each technique compresses"),
    quiet(`${what} ${subject.tolerance}`),
    h("div", { className: "scroll" }, reachTable(subject)),
  );
  if (before) become(before, section);
  const [shown, first] = [before ?? section, byId("accuracy")];
  if (!first && !before) byId("figures").before(shown);
  if (first && first.nextElementSibling !== shown) first.after(shown);
  tickReach();
}

function reachTable(subject) {
  const modes = [false, true].filter((mode) => subject.reach.some(({ iterative }) => iterative === mode));
  const cell = (found) => {
    const cost = found?.cost ? h("span", { className: "quiet" }, count(found.cost, "epoch")) : null;
    const range = found?.range && found.range !== found.ratio ? h("small", {}, found.range) : null;
    const ratio = found?.ratio === "none" ? "none" : h("b", {}, found?.ratio ?? "");
    return h("td", {}, ratio, cost, range);
  };
  const lines = [...techniques.values()].map((technique) => {
    const mine = modes.map((mode) =>
      subject.reach.find((one) => one.technique === technique.name && one.iterative === mode),
    );
    const cells = mine.flatMap((one) => [cell(one?.no_drop), cell(one?.one)]);
    const name = h("th", { scope: "row" }, swatch(technique), technique.label);
    return mine.some(Boolean) ? h("tr", { "data-technique": technique.name }, name, cells) : null;
  });
  const groups = modes.map((mode) => h("th", { scope: "colgroup", colSpan: 2 }, mode ? "Iterative" : "One-shot"));
  const drops = modes.flatMap(() => subject.drops.map((name) => h("th", { scope: "col" }, sentenceCase(name))));
  const head = h("thead", {}, h("tr", {}, h("td"), groups), h("tr", {}, h("td"), drops));
  return h("table", { className: "reach" }, head, h("tbody", {}, lines));
}

function tickReach() {
  const lines = document.querySelectorAll("#reach tr[data-technique]");
  for (const line of lines) line.classList.toggle("unticked", state.hidden.has(line.dataset.technique));
}

function showEmpty() {
  const run = () => (story.commands.run ? copyable(story.commands.run) : quiet("Report on a table that has rows."));
  const how = story.instance ? h("p", {}, "They appear here as they arrive.") : run(); // a live page has the command
  byId("findings").replaceChildren(h("div", { className: "empty" }, h("h2", {}, "No results yet"), how));
}

// The parts that have nothing of their own to keep.
function showTexts() {
  showExtent();
  contain(byId("findings"), ...findings());
  contain(byId("bar"), ...chips());
  byId("bar").hidden = !techniques.size;
  showProvenance();
}

function showProvenance() {
  contain(byId("provenance"), h("h2", {}, "Provenance"), definitions(story.provenance));
}

async function build() {
  recall();
  buildHeader();
  if (story.subjects.length) return buildAll();
  showProvenance();
  showEmpty();
}

async function buildAll() {
  showTexts();
  buildTable();
  showFigures();
  showReach();
  showConformance();
  fillTable();
  watch(["subject"], showReach);
  watch(["subject"], showConformance);
  watch(["hidden"], tickReach);
  await Promise.all([...panels].slice(0, 3).map((panel) => panel.draw()));
  const asked = state.run && runAt(current(), state.run);
  if (asked) openRun(current(), asked);
  requestIdleCallback(drawTheRest);
}

await build();
performance.mark("ready");
document.documentElement.dataset.ready = "yes";
