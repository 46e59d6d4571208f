// The tables as the report wrote them (page.py): from columns to objects, and the words for them.

const story = JSON.parse(document.getElementById("story").textContent);
const techniques = new Map();
nameTechniques();
const isCompared = story.subjects.some(({ settings }) => settings.theirs); // before a subject is unfolded
const MODES = ["one-shot", "iterative"];

function nameTechniques() {
  techniques.clear();
  story.techniques.forEach((technique, place) => techniques.set(technique.name, { ...technique, place }));
}

function objects(columns) {
  const length = columns.trial?.length ?? columns.t.length;
  return Array.from({ length }, (_, number) => {
    const object = { number };
    for (const [name, values] of Object.entries(columns)) object[name] = values === null ? null : values[number];
    return object;
  });
}

// A subject is unfolded when it is first looked at.
function unfolded(subject) {
  if (subject.bySetting) return subject;
  const settings = objects(subject.settings);
  const digits = MODES.map((_, mode) => digitsFor(settings.filter(({ iterative }) => iterative === mode)));
  subject.settings = settings.map((setting) => ({
    ...setting,
    technique: story.techniques[setting.technique].name,
    compression: 1 / setting.density,
    ratio: `${(1 / setting.density).toFixed(digits[setting.iterative])}×`,
  }));
  subject.runs = objects(subject.runs).map((run) => describedRun(subject, run));
  subject.byKey = Map.groupBy(
    subject.runs.filter((run) => run.key),
    (run) => run.key,
  );
  subject.bySetting = Map.groupBy(subject.runs, (run) => run.setting);
  return subject;
}

// As many as tell all ratios apart, but two at least; one-shot and iterative ones are never taken for one another.
function digitsFor(settings) {
  const known = [...new Set(settings.map(({ density }) => density))];
  const apart = (digits) => new Set(known.map((density) => (1 / density).toFixed(digits))).size === known.length;
  return [2, 3, 4, 5, 6, 7, 8].find(apart) ?? 9;
}

function describedRun(subject, run) {
  const setting = subject.settings[run.setting] ?? null; // a dense run has none
  return {
    ...run,
    setting,
    delta: run.test === null ? null : (run.test - subject.dense.mean) * subject.scale * subject.sign,
    network: run.parameters && subject.dense.parameters ? subject.dense.parameters / run.parameters : null,
    speed: run.flops && subject.dense.flops ? subject.dense.flops / run.flops : null,
    technique: setting?.technique ?? "",
    mode: setting ? MODES[setting.iterative] : "dense",
    compression: setting?.compression ?? 1,
    ratio: setting?.ratio ?? "1×",
    t: setting?.t ?? null,
    cost: setting?.cost ?? null,
  };
}

const nameOf = (technique) => techniques.get(technique)?.label ?? "Dense network";
const techniqueName = (name) => h("span", { className: "technique" }, swatch(techniques.get(name)), nameOf(name));
const titleOf = (subject) => (subject.pruning ? `${subject.recipe}, ${subject.pruning}` : subject.recipe);
const shownValue = (subject, value) => (value === null ? "failed" : fixed(value * subject.scale, subject.digits));

// A setting in words; what it shares with the setting beside it is left out.
function settingText(setting, beside) {
  const parts = [nameOf(setting.technique)];
  if (beside?.iterative !== setting.iterative) parts.push(MODES[setting.iterative]);
  if (beside?.density !== setting.density) parts.push(setting.ratio);
  return [...parts, `t = ${short(setting.t)}`].join(", ");
}

// The runs that led to a run: the dense network of its trial, then every level before it.
function lineage(subject, run) {
  if (!run.setting) return [run];
  const { technique, t, iterative, density } = run.setting;
  const before = ({ setting, trial }) =>
    trial === run.trial &&
    setting?.technique === technique &&
    setting.iterative === iterative &&
    setting.t === t &&
    setting.density > density;
  const levels = iterative ? subject.runs.filter(before).sort((a, b) => a.compression - b.compression) : [];
  const dense = subject.runs.filter((other) => !other.setting && other.trial === run.trial);
  const known = run.key && dense.length === 1; // without keys, runs of one number may have nothing in common
  return [...(known ? dense : []), ...levels, run];
}

// How an address names a run: by its key, of which several rows may have the same, else by its place in the table.
function addressOf(subject, run) {
  const place = subject.byKey.get(run.key)?.indexOf(run);
  return run.key ? run.key.slice(0, 12) + (place ? `~${place}` : "") : String(run.number);
}

function runAt(subject, address) {
  const [key, place] = address.split("~");
  const named = subject.runs.filter((run) => run.key?.slice(0, 12) === key);
  return named[place ?? 0] ?? named[0] ?? subject.runs[address];
}

// The trial nearest to the median of its setting.
function middleRun(subject, setting) {
  const trials = subject.bySetting.get(setting);
  const away = (run) => (run.test === null ? Infinity : Math.abs(run.delta - setting.delta));
  return trials.reduce((nearest, run) => (away(run) < away(nearest) ? run : nearest));
}
