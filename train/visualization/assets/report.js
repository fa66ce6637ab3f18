// The report of one run or of several.

const CALM_EVENTS = ["started", "resumed", "finished", "preempted", "weights", "warm start", "stopped early"];
const MARKED_EVENTS = ["resumed", "preempted", "skipped", "rolled back", "recovered", "checkpoint skipped", "sample failed"];
const HIDDEN_CURVES = ["skipped"];
const NOISY_CURVES = ["loss", "grad_norm", "tokens_per_second"]; // the others are smooth as they are
const SPEED = "tokens_per_second";
const ACTIVITY_COLORS = {
  step: "var(--series-3)", replay: "var(--series-6)", start: "var(--faint)", restore: "var(--series-5)",
  compile: "var(--series-1)", evaluate: "var(--series-4)", save: "var(--key)", recover: "var(--bad)", lost: "var(--rule)",
};

const colorOf = (index) => `var(--series-${(index % 6) + 1})`;
const several = data.runs.length > 1;
const name = (text) => text.replaceAll("_", " ");

function duration(seconds) {
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

const bytes = (count) => `${(count / 2 ** 20).toLocaleString("en", { maximumFractionDigits: 0 })} MiB`;

function table(head, rows) {
  const row = (cells, tag) => make("tr", {}, ...cells.map((cell, i) => make(i ? tag : "th", {}, cell)));
  return make("table", {}, make("thead", {}, row(head, "th")), make("tbody", {}, ...rows.map((cells) => row(cells, "td"))));
}

const swatch = (index) => {
  const mark = make("span", { className: "swatch" });
  mark.style.background = colorOf(index);
  return mark;
};

const heads = () => data.runs.map((run) => (several ? run.label : "value"));

function value(text) {
  if (text === null || text === undefined) return "–";
  return typeof text === "object" ? JSON.stringify(text) : String(text);
}

function drawSummary() {
  const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.summary)))];
  const format = (name, number) => {
    if (number === undefined) return "–";
    if (name === "goodput") return `${(100 * number).toFixed(1)}%`;
    return name === "seconds" ? duration(number) : show(number);
  };
  const rows = names.map((name) => [name === "seconds" ? "time" : name, ...data.runs.map((run) => format(name, run.summary[name]))]);
  for (const place of ["device", "host"]) {
    const found = data.runs.map((run) => run.memory[place]);
    if (found.some((peak) => peak)) rows.push([`peak memory, ${place}`, ...found.map((peak) => (peak ? bytes(peak) : "–"))]);
  }
  rows.push(["starts", ...data.runs.map((run) => String(run.starts))]);
  byId("summary").append(table(["", ...heads()], rows));
}

function seriesOf(metric) {
  return data.runs.flatMap((run, index) => Object.entries(run.curves[metric] || {}).map(([split, points]) => ({
    label: several ? `${run.label} ${split}` : split,
    // One run has a color for each split; of several, each has its own and other splits are dashed.
    color: several ? colorOf(index) : colorOf(split === "train" ? 0 : 1),
    dashed: several && split !== "train",
    dots: split !== "train" && points.length < 60,
    points,
  })));
}

/** Return what the strokes of a chart stand for, if there is more than one split. */
function legendOf(metric) {
  const splits = [...new Set(data.runs.flatMap((run) => Object.keys(run.curves[metric] || {})))];
  if (splits.length < 2) return [];
  return splits.map((split) => ({
    label: split,
    color: several ? "currentColor" : colorOf(split === "train" ? 0 : 1),
    dashed: several && split !== "train",
  }));
}

function drawCharts() {
  const metrics = [...new Set(data.runs.flatMap((run) => Object.keys(run.curves)))]
    .filter((metric) => !HIDDEN_CURVES.includes(metric))
    .filter((metric) => data.runs.some((run) => Object.values(run.curves[metric] || {}).some((points) => points.length > 1)));
  const order = (metric) => (metric === "loss" ? 0 : metric === SPEED ? 1 : 2);
  metrics.sort((a, b) => order(a) - order(b));
  const events = data.runs.flatMap((run) => run.events
    .filter(({ event, step }) => step !== null && MARKED_EVENTS.includes(event))
    .map(({ event, step }) => ({ event, step, label: run.label, calm: CALM_EVENTS.includes(event) })));
  const smoothed = byId("smooth").checked;
  const wide = innerWidth > 700; // else the text of a wide chart would be tiny
  byId("charts").replaceChildren(...metrics.map((metric) => lineChart({
    title: name(metric) + (metric === "loss" ? " (nats)" : ""),
    series: seriesOf(metric),
    events: metric === "loss" ? events : [],
    log: metric === "loss" && byId("log-loss").checked,
    smoothed: smoothed && NOISY_CURVES.includes(metric),
    wide: wide && metric === "loss",
    legend: legendOf(metric),
  })));
  if (!metrics.length) byId("charts").textContent = "No metrics yet.";
}

function drawTime() {
  const used = Object.keys(data.activities).filter((each) => data.runs.some((run) => run.seconds[each] > 0));
  for (const run of data.runs) {
    const total = Object.values(run.seconds).reduce((a, b) => a + b, 0);
    const bar = make("div", { className: "stack", role: "img", "aria-label": `Time of ${run.label}` });
    for (const activity of used) {
      const share = total ? run.seconds[activity] / total : 0;
      const part = make("div", { title: `${activity}: ${duration(run.seconds[activity])}, ${(100 * share).toFixed(1)}%` });
      part.style.cssText = `width:${100 * share}%;background:${ACTIVITY_COLORS[activity]}`;
      bar.append(part);
    }
    const label = `${several ? `${run.label}: ` : ""}${duration(total)} in ${run.starts} ${run.starts === 1 ? "start" : "starts"}`;
    byId("time").append(make("p", { className: "faint" }, label), bar);
  }
  const rows = used.map((activity) => {
    const mark = make("span", { className: "swatch" });
    mark.style.background = ACTIVITY_COLORS[activity];
    const cell = make("span", {}, mark, activity);
    return [cell, ...data.runs.map((run) => duration(run.seconds[activity])), data.activities[activity]];
  });
  byId("time").append(make("div", { className: "scroll" }, table(["activity", ...data.runs.map((run) => (several ? run.label : "time")), "meaning"], rows)));
}

function drawEvents() {
  const rows = data.runs.flatMap((run) => run.events.map((each) => ({ run, ...each })))
    .sort((a, b) => a.time.localeCompare(b.time))
    .map(({ run, time, step, event, details }) => [
      time.replace("T", " ").slice(0, 19), ...(several ? [run.label] : []), value(step), event, details,
    ]);
  byId("events").append(table(["time (UTC)", ...(several ? ["run"] : []), "step", "event", "details"], rows));
}

function drawSamples() {
  const found = data.runs.flatMap((run, index) => run.samples.map((each) => ({ run, index, ...each })))
    .sort((a, b) => a.step - b.step || a.index - b.index);
  found.forEach(({ run, step, text }, place) => {
    const title = `Step ${step}${several ? `, ${run.label}` : ""}`;
    const entry = make("details", {}, make("summary", {}, title), make("pre", { dir: "auto" }, text));
    entry.open = place >= found.length - data.runs.length; // the last of each run
    byId("samples").append(entry);
  });
  if (!found.length) byId("samples").textContent = "This run writes no samples (sample.every).";
}

function drawTables() {
  const rowsOf = (part) => [...new Set(data.runs.flatMap((run) => Object.keys(run[part])))]
    .map((key) => [key, ...data.runs.map((run) => value(run[part][key]))]);
  byId("environment").append(table(["", ...heads()], rowsOf("environment")));
  byId("difference-section").hidden = !several;
  const differing = data.differences.map(({ name, values }) => [name, ...values.map(value)]);
  if (differing.length) byId("differences").append(table(["setting", ...heads()], differing));
  else byId("differences").textContent = "All settings are equal.";
  for (const [title, part] of [["All settings", "settings"], ["What auto chose", "chosen"]]) {
    const rows = rowsOf(part);
    const all = make("div", { className: "scroll tall" }, table(["setting", ...heads()], rows));
    byId("settings").append(make("details", {}, make("summary", {}, `${title} (${rows.length})`), all));
  }
}

function start() {
  byId("title").textContent = data.title;
  byId("subtitle").textContent = data.runs.map((run) => run.path).join(", ");
  if (several) byId("runs").append(...data.runs.map((run, index) => make("span", {}, swatch(index), run.label)));
  drawSummary();
  drawCharts();
  drawTime();
  drawEvents();
  drawSamples();
  drawTables();
  for (const id of ["log-loss", "smooth"]) byId(id).addEventListener("change", drawCharts);
  addEventListener("resize", drawCharts);
  document.documentElement.dataset.ready = performance.now();
}

start();
