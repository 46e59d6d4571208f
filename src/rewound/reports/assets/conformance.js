// How near a compared table comes: the criteria, the bias of every curve, and the cells (page.py).

const ANSWERS = new Map([
  [true, "✓ yes"],
  [false, "✗ no"],
  [null, "–"],
]);
const CELL_HEADS = ["Curve", "Ratio", "t", "Ours", "Theirs", "Min to max", "n", "Difference", "Within", ""];

function showConformance() {
  document.getElementById("conformance")?.remove();
  if (!Object.keys(story.cards).length) return;
  const { recipe, pruning } = current();
  const card = story.cards[recipe];
  const section = h(
    "section",
    { id: "conformance", "aria-labelledby": "conformance-title" },
    h("h2", { id: "conformance-title" }, "Conformance"),
    ...(card ? cardParts(card, recipe, pruning) : [quiet("The compared table has nothing of this recipe.")]),
  );
  const before = ["reach", "accuracy"].map((id) => document.getElementById(id)).find(Boolean);
  if (before) before.after(section);
  else document.getElementById("figures").before(section);
}

function cardParts(card, recipe, pruning) {
  const criteria = card.criteria.map(({ name, n, found, limit, passed }) => {
    return [name, n, found.replace(/-(?=\d)/, MINUS), limit, h("b", {}, ANSWERS.get(passed))];
  });
  const curves = (own) => {
    const shown = card.curves.filter((curve) => (curve.pruning === pruning) === own);
    return shown.length ? listing("", ["Curve", "Cells", "Outside", "Bias", ""], shown.map(curveLine), [0, 4]) : null;
  };
  const others = card.curves.filter((curve) => curve.pruning !== pruning).length;
  const listing = (...table) => h("div", { className: "scroll" }, plainTable(...table));
  return [
    h("p", { className: "verdict" }, `${recipe} `, h("b", {}, card.verdict), "."),
    quiet(`${card.measure} n counts our and their trials, or cells, or curves. ${card.remarks}`),
    h(
      "div",
      { className: "beside" },
      listing("", ["Criterion", "n", "Found", "Limit", "Passed"], criteria, [0, 4]),
      curves(true),
    ),
    ...(others ? [onDemand(`${count(others, "curve")} of other ways of pruning`, () => curves(false))] : []),
    ...cellTables(card),
  ];
}

const curveLine = (curve) => [
  curveName(curve),
  whole(curve.cells),
  whole(curve.outside),
  signed(curve.bias),
  curve.note && h("b", {}, curve.note),
];

function curveName({ technique, iterative, pruning }) {
  const how = pruning === "unstructured" ? "" : `${pruning} `;
  return h("span", {}, swatch(techniques.get(technique)), `${nameOf(technique)}, ${how}${MODES[Number(iterative)]}`);
}

// Cells outside are there at once, all of them when they are asked for.
function cellTables(card) {
  const cells = objects(card.cells);
  const outside = cells.filter(({ inside }) => !inside);
  if (!cells.length) return [];
  const every = onDemand(`All ${count(cells.length, "cell")}`, () => cellTable(card, cells));
  const some = `${count(outside.length, "cell")} outside the prediction interval`;
  return [...(outside.length ? [h("h3", {}, some), cellTable(card, outside)] : []), every];
}

function onDemand(summary, content) {
  const details = h("details", {}, h("summary", {}, summary));
  details.addEventListener("toggle", () => details.append(content()), { once: true });
  return details;
}

function cellTable(card, cells) {
  const lines = cells.map((cell) => [
    curveName(card.curves[cell.curve]),
    cell.ratio,
    short(cell.t),
    fixed(cell.ours, 2),
    fixed(cell.theirs, 2),
    `[${fixed(cell.low, 2)}, ${fixed(cell.high, 2)}]`,
    `${cell.n}, ${cell.m}`,
    signed(cell.difference),
    `±${fixed(cell.margin, 2)}`,
    cell.inside ? "inside" : h("b", {}, "✗ outside"),
  ]);
  const table = plainTable("", CELL_HEADS, lines, [0, CELL_HEADS.length - 1]);
  return h("div", { className: "window", tabIndex: 0, role: "region", ariaLabel: "Compared cells" }, table);
}
