// Elements and texts. Data enter the document as text nodes only, never as markup.

function h(name, properties = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key in element) element[key] = value;
    else element.setAttribute(key, value);
  }
  element.append(...children.flat().filter((child) => child !== null));
  return element;
}

function drawing(name, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

// The line and the marker of a technique, as the charts draw them.
function swatch(technique) {
  const edged = !["white", technique.colour].includes(technique.edge);
  const line = (stroke, width, dash) =>
    drawing("line", { x1: 0, x2: 34, y1: 8, y2: 8, stroke, "stroke-width": width, "stroke-dasharray": dash });
  const marker = drawing("path", {
    d: technique.outline,
    transform: "translate(17 8) scale(5.2)",
    fill: technique.colour,
    stroke: edged ? technique.edge : "none",
    "stroke-width": 0.16,
  });
  return drawing(
    "svg",
    { viewBox: "0 0 34 16", width: 34, height: 16, "aria-hidden": "true", class: "swatch" },
    ...(edged ? [line(technique.edge, 3.4, "none")] : []),
    line(technique.colour, 2, technique.dash),
    marker,
  );
}

// A white edge parts filled marks; hollow ones need a colour.
const edgeOf = ({ colour, edge }) => (edge === "white" ? colour : edge);

// The same technique in a compared table, or that table itself.
function hollow(technique) {
  const stroke = edgeOf(technique);
  return drawing(
    "svg",
    { viewBox: "0 0 34 16", width: 34, height: 16, "aria-hidden": "true", class: "swatch" },
    ...[
      [0, 11],
      [23, 34],
    ].map(([x1, x2]) => drawing("line", { x1, x2, y1: 8, y2: 8, stroke, "stroke-width": 1.2 })),
    drawing("path", {
      d: technique.outline,
      transform: "translate(17 8) scale(5.2)",
      fill: "none",
      stroke,
      "stroke-width": 0.24,
    }),
  );
}

// A marker with its error bar.
function whisker() {
  return drawing(
    "svg",
    { viewBox: "0 0 12 16", width: 12, height: 16, "aria-hidden": "true", class: "swatch" },
    drawing("line", { x1: 6, x2: 6, y1: 1, y2: 15, stroke: "currentColor", "stroke-width": 1.5 }),
    drawing("circle", { cx: 6, cy: 8, r: 3.5, fill: "currentColor" }),
  );
}

function button(text, act, className = "plain") {
  return h("button", { type: "button", className, onclick: act }, text);
}

function copyable(text) {
  const copy = button("Copy", async () => {
    await navigator.clipboard.writeText(text);
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), 1500);
  });
  copy.ariaLabel = `Copy ${text}`;
  return h("div", { className: "copyable" }, h("code", {}, text), navigator.clipboard ? copy : null);
}

function definitions(pairs) {
  return h(
    "dl",
    { className: "facts" },
    pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))),
  );
}

// Lines of texts or elements; all but the first column are numbers unless `words` says otherwise.
function plainTable(caption, heads, lines, words = [0]) {
  const classOf = (place) => (words.includes(place) ? "" : "number");
  const cells = (name, texts) => texts.map((text, place) => h(name, { className: classOf(place) }, text));
  return h(
    "table",
    { className: "listing" },
    caption ? h("caption", {}, caption) : null,
    h("thead", {}, h("tr", {}, cells("th", heads))),
    h("tbody", {}, lines.map((line) => h("tr", {}, cells("td", line)))),
  );
}

const quiet = (...children) => h("p", { className: "quiet" }, ...children);

// A sentence whose compression ratios stand out.
function emphasised(sentence) {
  return sentence.split(/((?:at least )?\d[\d.,]*×)/).map((part, place) => (place % 2 ? h("b", {}, part) : part));
}

// Make an element what another one is, and touch only what differs: focus, open menus, scrolling and transitions stay.
// Gives the one that stands for it now. Listeners must depend on nothing but the element's `data-key`.
function become(old, next) {
  if (old.nodeName !== next.nodeName) return next;
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== next.data) old.data = next.data;
    return old;
  }
  for (const { name } of [...old.attributes]) if (!next.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  for (const { name, value } of next.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  contain(old, ...next.childNodes);
  return old;
}

// The same for all children of an element: those with a `data-key` are found by it, the others by their place.
function contain(host, ...children) {
  const keyOf = (node) => node.dataset?.key;
  const known = new Map([...host.children].filter(keyOf).map((node) => [keyOf(node), node]));
  const others = [...host.childNodes].filter((node) => !keyOf(node));
  const found = children.map((node) => {
    const old = keyOf(node) ? known.get(keyOf(node)) : others.shift();
    return old ? become(old, node) : node;
  });
  arrange(host, found);
}

// The children of an element, in this order; those that are there already are not moved without need.
function arrange(host, wanted) {
  for (const child of [...host.childNodes]) if (!wanted.includes(child)) child.remove();
  wanted.forEach((node, place) => {
    if (host.childNodes[place] !== node) host.insertBefore(node, host.childNodes[place] ?? null);
  });
}

const MINUS = "\u2212";
const fixed = (value, digits) =>
  value
    .toFixed(digits)
    .replace(/^-(?=[0.]*$)/, "")
    .replace("-", MINUS);
const signed = (value, digits = 2) => (Number(value.toFixed(digits)) > 0 ? "+" : "") + fixed(value, digits);
const sentenceCase = (text) => text[0].toUpperCase() + text.slice(1);
const whole = (value) => Math.round(value).toLocaleString("en-US");
const short = (value) => Number(value.toPrecision(4)).toLocaleString("en-US", { maximumFractionDigits: 6 });
const count = (n, noun) => `${short(n)} ${noun}${n === 1 ? "" : "s"}`;
