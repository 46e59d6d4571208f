// What the reader chose. It lives in the address, so that a link shows what the sender saw.

const state = { subject: 0, hidden: new Set(), spread: true, compared: true, theme: "", filter: "", sort: "", run: "" };
const watchers = [];

function watch(names, act) {
  watchers.push({ names, act });
}

function change(changes) {
  Object.assign(state, changes);
  remember();
  for (const { names, act } of watchers) if (names.some((name) => name in changes)) act();
}

function remember() {
  const said = new URLSearchParams();
  if (state.subject) said.set("subject", titleOf(story.subjects[state.subject]));
  if (state.hidden.size) said.set("hide", [...state.hidden].join(" "));
  for (const name of ["spread", "compared"]) if (!state[name]) said.set(name, "no");
  for (const name of ["theme", "filter", "sort", "run"]) if (state[name]) said.set(name, state[name]);
  history.replaceState(null, "", `#${said}`);
}

function recall() {
  const said = new URLSearchParams(location.hash.slice(1));
  state.subject = placeOf(said.get("subject"));
  state.hidden = new Set((said.get("hide") ?? "").split(" ").filter((name) => techniques.has(name)));
  for (const name of ["spread", "compared"]) state[name] = said.get(name) !== "no";
  for (const name of ["theme", "filter", "sort", "run"]) state[name] = said.get(name) ?? "";
  if (!["light", "dark"].includes(state.theme)) state.theme = "";
}

const placeOf = (title) => Math.max(0, story.subjects.findIndex((subject) => titleOf(subject) === title));
const current = () => unfolded(story.subjects[state.subject]);
const shownTechniques = () => story.techniques.map(({ name }) => name).filter((name) => !state.hidden.has(name));
