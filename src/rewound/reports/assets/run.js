// One run: what it reached, how it came to be, how to have it again.

const dialog = document.getElementById("run");

function openRun(subject, run) {
  forget(dialog);
  dialog.replaceChildren(...runParts(subject, run).filter((part) => part !== null));
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
  change({ run: addressOf(subject, run) });
}

dialog.addEventListener("close", () => {
  forget(dialog);
  document.body.append(document.getElementById("tip"));
  dialog.replaceChildren();
  change({ run: "" });
});
dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());

function runParts(subject, run) {
  const mark = run.setting ? swatch(techniques.get(run.technique)) : null;
  const title = run.setting ? `${run.ratio}, ${run.mode}, t = ${short(run.t)}` : `Dense network, trial ${run.trial}`;
  const name = h(
    "div",
    {},
    quiet(mark, run.setting ? nameOf(run.technique) : titleOf(subject)),
    h("h2", { id: "run-title" }, title),
  );
  const failed = "This run failed: its loss stopped being a number, or what it builds on failed.";
  return [
    h(
      "header",
      {},
      name,
      button("Close", () => dialog.close()),
    ),
    run.setting ? trialButtons(subject, run) : null,
    run.test === null ? h("p", { className: "warning" }, failed) : null,
    facts(subject, run),
    ...sameRuns(subject, run),
    ...lineageList(subject, run),
    ...reproduction(run),
    ...curves(subject, run),
    ...layerBars(run),
  ];
}

function trialButtons(subject, run) {
  const trials = subject.bySetting.get(run.setting);
  if (trials.length < 2) return null;
  const choices = trials.map((other) => {
    const choice = button(
      `Trial ${other.trial}: ${shownValue(subject, other.test)}`,
      () => openRun(subject, other),
      "",
    );
    choice.ariaPressed = String(other === run);
    return choice;
  });
  return h("div", { className: "trials", role: "group", ariaLabel: "Trials" }, choices);
}

function facts(subject, run) {
  const known = (value, text) => (value === null ? null : text(value));
  const all = [
    ["Test", shownValue(subject, run.test)],
    ["To dense", known(run.delta, (delta) => `${signed(delta, subject.digits)} ${subject.unit}`)],
    ["Validation", known(run.val, (val) => shownValue(subject, val))],
    ["Search", known(run.cost, (cost) => count(cost, "epoch"))],
    ["Parameters", known(run.parameters, (left) => `${whole(left)}, ${whole(4 * left)} bytes as 32-bit numbers`)],
    ["Network", known(run.network, (ratio) => `${fixed(ratio, 2)}× smaller`)],
    ["FLOPs", known(run.flops, whole)],
    ["Speed-up", known(run.speed, (speed) => `${fixed(speed, 2)}×`)],
    ["Computed in", known(run.seconds, (seconds) => `${short(Math.ceil(seconds))} s`)],
  ];
  return definitions(all.filter(([, value]) => value !== null));
}

function sameRuns(subject, run) {
  const others = (subject.byKey.get(run.key) ?? []).filter((other) => other !== run);
  if (!others.length) return [];
  const text = (other) => (other.setting ? settingText(other.setting, run.setting) : "Dense network");
  const links = others.map((other) =>
    h(
      "li",
      {},
      button(text(other), () => openRun(subject, other), "link"),
    ),
  );
  const why = "Equal keys: these labels lead to one history, so it was trained once.";
  return [h("h3", {}, "The same run as"), quiet(why), h("ul", { className: "bare" }, links)];
}

function lineageList(subject, run) {
  const steps = lineage(subject, run).map((step) => {
    const name = step.setting ? step.ratio : "Dense";
    const label = step === run ? h("b", {}, name) : button(name, () => openRun(subject, step), "link");
    return h("li", {}, label, h("span", { className: "quiet" }, shownValue(subject, step.test)));
  });
  const origin = quiet(`${titleOf(subject)}, trial ${run.trial}`);
  return [h("h3", {}, "Lineage"), origin, steps.length > 1 ? h("ol", { className: "lineage" }, steps) : null];
}

function reproduction({ key }) {
  if (!key) return [quiet("Its table has no key for this run, so it cannot be looked up or computed again from here.")];
  const { run, show } = story.commands;
  const commands = [run, show && `${show} ${key.slice(0, 12)}`].filter(Boolean);
  const reproduce = commands.length ? [h("h3", {}, "Reproduce"), ...commands.map(copyable)] : [];
  return [h("h3", {}, "Key"), copyable(key), ...reproduce];
}

function curves(subject, run) {
  const known = story.details.runs[run.key];
  if (!known && run.key && story.details.left_out) {
    return [
      quiet("Its layers and curve are in layers.csv and curves.csv; with all of them this page would be too large."),
    ];
  }
  if (!known?.curve[0].length) return [];
  const panel = (kind, title) =>
    panelElement(givenForCurves(subject, { kind, title, runs: [run.number], height: 130 }));
  const both = [panel("rate", "Learning rate"), panel("loss", "Training loss")];
  return [h("h3", {}, "Training curve"), h("div", { className: "panels small" }, both)];
}

function layerBars({ key }) {
  const known = story.details.runs[key];
  if (!known?.layer.length) return [];
  const lines = known.layer.map((layer, place) => {
    const [kept, total] = [known.kept[place], known.total[place]];
    const part = total ? (100 * kept) / total : 0;
    const bar = h("i");
    bar.style.width = `${part}%`;
    return h(
      "tr",
      {},
      h("td", {}, story.details.layers[layer]),
      h("td", { className: "bar" }, bar),
      h("td", { className: "number" }, `${fixed(part, 1)}%`),
      h("td", { className: "number wide" }, `${whole(kept)} of ${whole(total)}`),
    );
  });
  return [h("h3", {}, "Kept of each layer"), h("table", { className: "layers" }, h("tbody", {}, lines))];
}
