// One panel: a Vega-Lite chart that is drawn when it comes near, and answers to the pointer and the keyboard.

const HEIGHTS = { compression: 270, time: 150, difference: 200, speed: 230, rate: 170, loss: 170 };
const LAYER_HEIGHT = 15;
const COLOURS = ["paper", "muted", "band", "zone"]; // parameters of every chart
const REACH = 28; // pixels from the pointer to the mark it means

const panels = new Set();
let last = Promise.resolve(); // panels are drawn one after another, so that the first is there first
const near = new IntersectionObserver(
  (entries) => entries.forEach(({ isIntersecting, target }) => isIntersecting && target.panel.draw()),
  { rootMargin: "400px" },
);

function colour(name) {
  const probe = document.getElementById("tip");
  probe.style.outlineColor = `var(--${name})`;
  return getComputedStyle(probe).outlineColor;
}

function chartLook() {
  const font = getComputedStyle(document.body).fontFamily;
  return {
    background: "transparent",
    font,
    text: { font },
    view: { stroke: null },
    axis: {
      title: null,
      labelColor: colour("muted"),
      labelFontSize: 11,
      labelPadding: 6,
      titleColor: colour("muted"),
      titleFontSize: 11,
      titleFontWeight: "normal",
      titlePadding: 5,
      gridColor: colour("grid"),
      domainColor: colour("line"),
      tickColor: colour("line"),
      tickSize: 4,
    },
    axisX: { grid: false },
    axisY: { domain: false, ticks: false },
  };
}

// Of what is given, `panel` is the chart, `values()` are its data, `tell(datum)` the lines about a mark, and
// `open(datum)` what a click leads to.
function panelElement(given) {
  let { panel, values, tell, open } = given;
  let chart = h("div", { className: "chart" });
  const ring = h("i", { className: "ring", hidden: true });
  const stage = h("div", { className: "stage" }, chart, ring);
  const caption = h("figcaption");
  const note = quiet();
  const element = h("figure", { className: "panel", tabIndex: 0 }, caption, stage, note);
  let view = null;
  let shown = ""; // the data of the chart that is there
  let drawn = null;
  let active = -1;
  const marks = () => [...chart.querySelectorAll(".points_marks path, .outlines_marks path")];
  const datumOf = (mark) => mark.__data__.datum;

  function label() {
    element.ariaLabel = `${panel.title}. Arrow keys walk through the marks, Enter opens one.`;
    contain(caption, new Text(panel.title), ...(panel.over ?? []).map(techniqueName));
    note.textContent = panel.note ?? "";
    note.hidden = !panel.note;
  }

  const dataOf = () => JSON.stringify([panel.kind, panel.params ?? null, values()]);

  // A chart that takes the place of another is drawn behind it first, so that nothing flickers.
  async function embed() {
    shown = dataOf();
    const next = h("div", { className: view ? "chart next" : "chart" });
    if (view) stage.append(next);
    else {
      chart.replaceWith(next);
      chart = next;
    }
    const spec = structuredClone(story.charts[panel.kind]);
    const colours = Object.fromEntries(COLOURS.map((name) => [name, colour(name)]));
    const { spread, compared } = state;
    const given = { shown: shownTechniques(), spread, compared, ...colours, ...panel.params };
    spec.params = Object.entries(given).map(([name, value]) => ({ name, value }));
    const [theirs, ours] = [true, false].map((side) =>
      values()
        .filter((datum) => Boolean(datum.compared) === side)
        .map((datum) => ({ ...datum, says: tell(datum).join(". ") })),
    );
    spec.data = { values: ours };
    spec.datasets = { compared: theirs };
    spec.height = panel.height ?? HEIGHTS[panel.kind] ?? LAYER_HEIGHT * panel.layers.length;
    const options = { ast: true, renderer: "svg", actions: false, tooltip: false, config: chartLook() };
    const fresh = (await vegaEmbed(next, spec, options)).view;
    if (view) {
      view.finalize();
      chart.replaceWith(next);
      next.classList.remove("next");
    }
    [view, chart] = [fresh, next];
    element.dataset.drawn = "yes";
    follow();
  }

  async function signal(name, value) {
    if (!view) return;
    await view.signal(name, value).runAsync();
    follow();
  }

  // The marks have moved, or are others: the keyboard's stays pointed at, the pointer means another by now.
  function follow() {
    if (active >= 0) point(document.activeElement === element ? Math.min(active, marks().length - 1) : -1);
  }

  function point(number) {
    active = number;
    const mark = marks()[number];
    ring.hidden = !mark;
    if (!mark) return hideTip();
    const box = mark.getBoundingClientRect();
    const stage = chart.getBoundingClientRect();
    ring.style.left = `${middle(box).x - stage.x}px`;
    ring.style.top = `${middle(box).y - stage.y}px`;
    const { technique, compared } = datumOf(mark);
    showTip(tell(datumOf(mark)), box, technique && (compared ? hollow : swatch)(techniques.get(technique)));
  }

  function nearest({ clientX, clientY }) {
    const away = marks().map((mark) => {
      const { x, y } = middle(mark.getBoundingClientRect());
      return Math.hypot(x - clientX, y - clientY);
    });
    const least = Math.min(...away);
    return least < REACH ? away.indexOf(least) : -1;
  }

  function along(forward) {
    const { length } = marks();
    if (length) point(active < 0 ? 0 : Math.min(length - 1, Math.max(0, active + forward)));
  }

  // To the next technique (or layer), at the same place.
  function across(forward) {
    const all = marks();
    if (active < 0) return along(1);
    const groupOf = (mark) => datumOf(mark).layer ?? `${datumOf(mark).technique} ${datumOf(mark).compared}`;
    const groups = [...new Set(all.map(groupOf))];
    const wanted = groups[groups.indexOf(groupOf(all[active])) + forward];
    const there = all.filter((mark) => groupOf(mark) === wanted);
    const { x } = middle(all[active].getBoundingClientRect());
    const away = (mark) => Math.abs(middle(mark.getBoundingClientRect()).x - x);
    if (there.length) point(all.indexOf(there.reduce((best, mark) => (away(mark) < away(best) ? mark : best))));
  }

  const keys = {
    ArrowRight: () => along(1),
    ArrowLeft: () => along(-1),
    ArrowDown: () => across(1),
    ArrowUp: () => across(-1),
    Escape: () => point(-1),
    Enter: () => active >= 0 && open(datumOf(marks()[active])),
  };
  element.addEventListener("keydown", (event) => {
    if (!(event.key in keys) || (event.key === "Escape" && active < 0)) return;
    event.preventDefault();
    keys[event.key]();
  });
  element.addEventListener("blur", () => point(-1));
  stage.addEventListener("pointermove", (event) => event.pointerType !== "touch" && point(nearest(event)));
  stage.addEventListener("pointerleave", (event) => event.pointerType !== "touch" && point(-1));
  stage.addEventListener("click", (event) => {
    const number = nearest(event);
    const again = event.pointerType !== "touch" || number === active; // a finger looks first, then opens
    if (number >= 0 && again) open(datumOf(marks()[number]));
    else point(number);
  });

  const queued = () => (last = last.then(() => element.isConnected && embed()));
  element.panel = {
    element,
    signal,
    follow,
    get technique() {
      return panel.technique;
    },
    get kind() {
      return panel.kind;
    },
    draw: () => (drawn ??= queued()),
    redraw: () => drawn && (drawn = queued()),
    renew(newer) {
      ({ panel, values, tell, open } = newer);
      label();
      if (drawn && dataOf() !== shown) drawn = queued();
    },
  };
  label();
  panels.add(element.panel);
  near.observe(element);
  return element;
}

const middle = (box) => ({ x: box.x + box.width / 2, y: box.y + box.height / 2 });

function forget(host, kept = []) {
  for (const element of host.querySelectorAll(".panel")) {
    if (kept.includes(element)) continue;
    near.unobserve(element);
    panels.delete(element.panel);
  }
  if (!kept.length) hideTip();
}

function showTip([first, ...rest], box, sign) {
  const tip = document.getElementById("tip");
  const head = h("p", {}, sign || null, h("b", {}, first));
  tip.replaceChildren(head, ...rest.map((line) => h("p", {}, line)));
  tip.hidden = false;
  (document.querySelector("dialog[open]") ?? document.body).append(tip); // a dialog covers what is outside it
  const { width, height } = tip.getBoundingClientRect();
  const above = box.y - height - 12;
  tip.style.left = `${Math.min(Math.max(8, middle(box).x - width / 2), innerWidth - width - 8)}px`;
  tip.style.top = `${above > 8 ? above : box.y + box.height + 12}px`;
}

function hideTip() {
  document.getElementById("tip").hidden = true;
}

const redrawAll = () => panels.forEach((panel) => panel.redraw());
watch(["hidden"], () => panels.forEach((panel) => panel.signal("shown", shownTechniques())));
for (const name of ["spread", "compared"])
  watch([name], () => panels.forEach((panel) => panel.signal(name, state[name])));
watch(["theme"], redrawAll);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
addEventListener("scroll", () => panels.forEach((panel) => panel.follow()), { passive: true });
