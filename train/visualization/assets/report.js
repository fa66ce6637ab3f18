// The curves of one run or of several. The page has everything else already.

const CALM_EVENTS = ["resumed", "preempted"];
const MARKED_EVENTS = [...CALM_EVENTS, "skipped", "rolled back", "recovered", "checkpoint skipped", "sample failed"];
const HIDDEN_CURVES = ["skipped"];
const NOISY_CURVES = ["loss", "grad_norm", "tokens_per_second"]; // the others are smooth as they are
const SPEED = "tokens_per_second";

const colorOf = (index) => `var(--series-${(index % 6) + 1})`;
const several = data.runs.length > 1;

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
    title: metric.replaceAll("_", " ") + (metric === "loss" ? " (nats)" : ""),
    series: seriesOf(metric),
    events: metric === "loss" ? events : [],
    log: metric === "loss" && byId("log-loss").checked,
    smoothed: smoothed && NOISY_CURVES.includes(metric),
    wide: wide && metric === "loss",
    legend: legendOf(metric),
  })));
  if (!metrics.length) byId("charts").textContent = "No metrics yet.";
}

drawCharts();
for (const id of ["log-loss", "smooth"]) byId(id).addEventListener("change", drawCharts);
addEventListener("resize", drawCharts);
document.documentElement.dataset.ready = performance.now();
