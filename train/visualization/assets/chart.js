// Line charts as SVG: axes, smoothing, marks of events, and a cursor that reads values.

const WIDTH = 560, HEIGHT = 260;
const MARGIN = { left: 58, right: 14, top: 10, bottom: 34 };
const SVG = "http://www.w3.org/2000/svg";

/** Return a new SVG element. */
function draw(tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

const isNumber = (value) => value !== null && Number.isFinite(value);

/** Return a number with the digits that matter. */
function show(value) {
  if (!isNumber(value)) return "not finite";
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-3)) return value.toExponential(2);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return String(+value.toPrecision(4));
}

/** Return about five round values between two ends. */
function ticksBetween(low, high, log) {
  if (log) {
    const all = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      for (const factor of [1, 2, 5]) all.push(factor * 10 ** power);
    }
    const inside = all.filter((value) => value >= low && value <= high);
    if (inside.length >= 2) return inside.length > 9 ? inside.filter((v) => Math.log10(v) % 1 === 0) : inside;
  }
  const raw = (high - low) / 5 || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= raw) * power;
  const ticks = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step / 1e6; value += step) ticks.push(value);
  return ticks;
}

/** Return the labels of ticks, with as many digits as tell them apart. */
function labelsOf(ticks) {
  const labels = ticks.map(show);
  if (new Set(labels).size === labels.length) return labels;
  const digits = Math.ceil(-Math.log10(ticks[1] - ticks[0]));
  return ticks.map((value) => value.toFixed(Math.min(Math.max(digits, 0), 20)));
}

/** Return an exponential moving average of the values, as TensorBoard smooths. */
function smooth(points) {
  const weight = Math.min(0.9, points.length / 100);
  let mean = null;
  return points.map(([step, value]) => {
    if (isNumber(value)) mean = mean === null ? value : weight * mean + (1 - weight) * value;
    return [step, mean];
  });
}

function scaleOf(low, high, from, to, log) {
  const [a, b] = log ? [Math.log(low), Math.log(high)] : [low, high];
  return (value) => from + (((log ? Math.log(value) : value) - a) / (b - a || 1)) * (to - from);
}

function pathOf(points, x, y, log) {
  let path = "", pen = "M";
  for (const [step, value] of points) {
    if (!isNumber(value) || (log && value <= 0)) {
      pen = "M"; // a gap
      continue;
    }
    path += `${pen}${x(step).toFixed(1)},${y(value).toFixed(1)}`;
    pen = "L";
  }
  return path;
}

/** Return the ends of the vertical axis: all values, without the outermost of long curves. */
function valueRange(series, log) {
  const values = series.flatMap(({ points }) => points.map(([, value]) => value))
    .filter((value) => isNumber(value) && (!log || value > 0)).sort((a, b) => a - b);
  if (!values.length) return [log ? 0.1 : 0, 1];
  let [low, high] = [values[0], values[values.length - 1]];
  if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const space = log ? 0 : (high - low) * 0.04;
  return [low - space, high + space];
}

/**
 * Return a chart as an element.
 * series: {label, color, points, dashed, dots}; events: {step, event, label, calm}.
 */
function lineChart({ title, series, events = [], log = false, smoothed = false, wide = false, legend = [] }) {
  const figure = make("figure", { className: wide ? "chart wide" : "chart" });
  figure.style.margin = 0;
  // Not wider than a phone, which would shrink the text with the chart.
  const width = wide ? 2 * WIDTH : Math.min(WIDTH, Math.max(300, innerWidth - 20));
  const steps = series.flatMap(({ points }) => points.map(([step]) => step));
  const [first, last] = [Math.min(...steps), Math.max(...steps)];
  const [low, high] = valueRange(series, log);
  const x = scaleOf(first, last === first ? first + 1 : last, MARGIN.left, width - MARGIN.right, false);
  const y = scaleOf(low, high, HEIGHT - MARGIN.bottom, MARGIN.top, log);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": title });
  const ticks = ticksBetween(low, high, log), labels = labelsOf(ticks);
  for (const [index, value] of ticks.entries()) {
    svg.append(draw("line", { class: "grid", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(value), y2: y(value) }));
    svg.append(draw("text", { x: MARGIN.left - 8, y: y(value) + 4, "text-anchor": "end" }, labels[index]));
  }
  for (const value of ticksBetween(first, last, false).filter(Number.isInteger)) {
    svg.append(draw("text", { x: x(value), y: HEIGHT - MARGIN.bottom + 18, "text-anchor": "middle" }, show(value)));
  }
  svg.append(draw("text", { x: width - MARGIN.right, y: HEIGHT - 2, "text-anchor": "end" }, "step"));
  for (const { label, color, points, dashed, dots } of series) {
    const line = smoothed && points.length > 30 ? smooth(points) : points;
    if (line !== points) svg.append(draw("path", { class: "raw", d: pathOf(points, x, y, log), stroke: color }));
    const options = dashed ? { "stroke-dasharray": "6 4" } : {};
    svg.append(draw("path", { d: pathOf(line, x, y, log), stroke: color, "data-label": label, ...options }));
    for (const [step, value] of dots ? points : []) {
      if (isNumber(value) && (!log || value > 0)) svg.append(draw("circle", { cx: x(step), cy: y(value), r: 3, fill: color }));
    }
  }
  for (const { step, event, label, calm } of events) {
    const at = Math.min(Math.max(x(step), MARGIN.left), width - MARGIN.right);
    const bottom = HEIGHT - MARGIN.bottom;
    const mark = draw("path", { class: calm ? "event calm" : "event", d: `M${at},${bottom - 9}l5,9h-10z`, "data-event": event });
    mark.style.fill = calm ? "var(--faint)" : "var(--bad)";
    mark.append(draw("title", {}, `${label}: ${event} at step ${step}`));
    svg.append(mark);
  }
  const heading = make("h3", {}, title, ...legend.map(legendEntry));
  figure.append(heading, svg, readCursor(svg, { series, x, width, first, last }));
  return figure;
}

/** Return a stroke as a chart draws it, and what it stands for. */
function legendEntry({ label, color, dashed }) {
  const stroke = draw("svg", { viewBox: "0 0 24 8", "aria-hidden": "true" });
  const options = dashed ? { "stroke-dasharray": "6 4" } : {};
  stroke.append(draw("path", { d: "M0,4L24,4", stroke: color, ...options }));
  return make("span", { className: "entry" }, stroke, label);
}

/** Show the values at the pointer below a chart. */
function readCursor(svg, { series, x, width, first, last }) {
  const text = make("p", { className: "value" });
  const line = draw("line", { class: "cursor", y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom, visibility: "hidden" });
  svg.append(line);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * width;
    const share = (at - MARGIN.left) / (width - MARGIN.left - MARGIN.right);
    const wanted = Math.min(Math.max(first + share * (last - first), first), last);
    const nearest = (points) => points.reduce((a, b) => (Math.abs(b[0] - wanted) < Math.abs(a[0] - wanted) ? b : a));
    const found = series.filter(({ points }) => points.length).map(({ label, points }) => [label, nearest(points)]);
    line.setAttribute("visibility", "visible");
    for (const end of ["x1", "x2"]) line.setAttribute(end, x(wanted));
    text.textContent = found.map(([label, [step, value]]) => `${label}: ${show(value)} (step ${step})`).join(" · ");
  });
  svg.addEventListener("pointerleave", () => {
    line.setAttribute("visibility", "hidden");
    text.textContent = "";
  });
  return text;
}
