// The page while a sweep runs: how far it is, and newer data as they arrive, without a reader noticing more than that.

const AFTER = 15; // seconds without an answer of the store after which the page says so
const seenAt = (age) => new Date(Date.now() - 1000 * age).toLocaleTimeString();
const live = { last: null, lost: false, busy: false, timer: 0 };

function showLive() {
  const { last, lost } = live;
  if (!last) return;
  const section = byId("live");
  section.hidden = false;
  section.dataset.state = lost ? "lost" : last.state;
  const percent = `${Math.floor(100 * last.part)}%`;
  document.title = `${percent} · ${byId("title").textContent}`;
  contain(section, ...liveParts(last, percent).filter((part) => part !== null));
}

function liveParts(now, percent) {
  return [
    h(
      "div",
      { className: "head", "data-key": "head" },
      h("h2", { role: "status" }, h("i", { className: "dot" }), now.headline),
      quiet(live.seen ? `Last seen ${live.seen}` : "Looking at the store"),
    ),
    progressBar(now.part, percent),
    keyed("facts", definitions([["Done", percent], ...now.facts])),
    ...troubles(now),
    now.again ? keyed("again", copyable(now.again)) : null,
    workers(now),
    machines(now),
    failures(now),
  ];
}

// Parts that come and go are told apart by a key.
function keyed(key, element) {
  element.dataset.key = key;
  return element;
}

function progressBar(part, text) {
  const bar = h("i");
  bar.style.width = `${100 * part}%`;
  const values = { "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": Math.floor(100 * part) };
  return h("div", { className: "progress", role: "progressbar", ariaLabel: "Steps done", title: text, ...values }, bar);
}

function troubles(now) {
  const said = [
    live.lost && "The watcher does not answer: it has ended, or cannot be reached from here. To start it again:",
    !live.lost && now.trouble && `The store cannot be looked at: ${now.trouble}.`,
    !live.lost && now.waiting > AFTER && `The store has not answered for ${Math.round(now.waiting)} seconds.`,
    now.message,
  ];
  return said
    .filter(Boolean)
    .map((text, place) => {
      const command = live.lost && !place ? copyable(now.watch) : null;
      return keyed(`trouble ${place}`, h("div", { className: "warning" }, text, command));
    });
}

function workers({ workers }) {
  if (!workers.length) return null;
  const line = ({ key, machine, process, work, steps, of }) => {
    const bar = h("i");
    bar.style.width = `${of ? (100 * steps) / of : 0}%`;
    return h(
      "tr",
      { "data-key": key },
      h("td", {}, machine, h("small", {}, String(process))),
      h("td", {}, work),
      h("td", { className: "bar" }, h("div", { className: "progress" }, bar)),
      h("td", { className: "number wide" }, `${whole(steps)} of ${count(of, "step")}`),
    );
  };
  const heads = ["Machine", "Works on", "", ""].map((text) => h("th", { scope: "col" }, text));
  const table = h("table", { className: "workers" }, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, workers.map(line)));
  return keyed("workers", h("div", { className: "window", tabIndex: 0, role: "group", ariaLabel: "Workers" }, table));
}

function machines({ machines }) {
  if (!machines.length) return null;
  const lines = machines.map(({ machine, nodes, took, now }) => [machine, whole(nodes), took, whole(now)]);
  const table = plainTable("", ["Machine", "Finished nodes", "Time", "Under way"], lines);
  const summary = h("summary", {}, "By machine");
  return keyed("machines", h("details", {}, summary, h("div", { className: "scroll" }, table)));
}

function failures({ failures }) {
  if (!failures.length) return null;
  const line = ({ work, why, key }) => h("li", {}, `${work}: ${why} `, h("code", {}, key.slice(0, 12)));
  const lines = h("ul", { className: "bare" }, failures.map(line));
  return keyed("failures", h("div", { className: "warning" }, `${count(failures.length, "node")} failed`, lines));
}

// Newer data: the reader's subject, choices, place and open menus stay.
async function take(newer) {
  const title = story.subjects.length ? titleOf(story.subjects[state.subject]) : null;
  if (title !== null && !newer.subjects.length) return location.reload(); // the store has been emptied
  Object.assign(story, newer);
  nameTechniques();
  if (title === null) {
    recall();
    showProvenance();
    showExtent();
    if (story.subjects.length) await buildAll();
    return;
  }
  state.subject = placeOf(title);
  remember();
  showTexts();
  renewFigures();
  showReach();
  renewTable();
  requestIdleCallback(drawTheRest);
}

async function asked(path) {
  const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(20_000) });
  if (!answer.ok) throw new Error(answer.status);
  return answer.json();
}

async function ask() {
  clearTimeout(live.timer);
  if (document.hidden || live.busy) return; // a page that nobody sees asks nothing
  live.busy = true;
  let newer = null;
  try {
    const now = await asked("now");
    if (now.instance !== story.instance) return location.reload(); // another watcher, of another sweep or version
    if (now.age !== null) live.seen = seenAt(now.age);
    if (now.state) live.last = now;
    live.lost = false;
    if (now.story !== story.tag) newer = await asked("story");
  } catch {
    live.lost = true;
  }
  live.busy = false;
  showLive();
  if (newer) await take(newer);
  live.timer = setTimeout(ask, 1000 * (live.last?.interval ?? 2));
}

document.addEventListener("visibilitychange", ask);
await ask();
