// The attention viewer. A code is 0 for a hidden pair and 1 + 254 √w for a weight w
// (train/visualization/attention_view.py).

const ROW_HEIGHT = 24; // of a token, as in attention.css
const MIN_WEIGHT = 0.02; // weaker lines are left out until a token is chosen
const HATCH = 5; // pixels between the diagonals that mark hidden pairs

const state = { stage: 0, layer: 0, head: 0, codes: null, hover: null, pinned: null };
let palette, view; // colors of codes; tokens, shape and elements of the current stage

const weightOf = (code) => (code ? ((code - 1) / 254) ** 2 : 0);
const showWeight = (weight) => (weight < 0.005 ? "<0.01" : weight.toFixed(2));
const layersOf = (stage) => data.stages[stage].layers;

async function inflate(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Colors

function loadPalette() {
  const [from, to] = [themeColor("--weight-0"), themeColor("--weight-1")];
  palette = new Uint32Array(256);
  for (let code = 1; code < 256; code++) {
    const share = (code - 1) / 254;
    palette[code] = pack(from.map((value, i) => Math.round(value + share * (to[i] - value))));
  }
  palette[0] = pack(themeColor("--hidden"));
  palette.hatch = pack(themeColor("--hatch"));
}

// Canvas pixels are bytes in the order red, green, blue, alpha.
const pack = ([red, green, blue]) => ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;

/** Draw codes [rows, columns] with `scale` pixels a cell; hidden pairs may be hatched. */
function paint(canvas, codes, rows, columns, scale, hatched) {
  canvas.width = columns * scale;
  canvas.height = rows * scale;
  const image = new ImageData(canvas.width, canvas.height);
  const pixels = new Uint32Array(image.data.buffer);
  for (let y = 0, at = 0; y < canvas.height; y++) {
    const row = Math.floor(y / scale) * columns;
    for (let x = 0; x < canvas.width; x++, at++) {
      const code = codes[row + Math.floor(x / scale)];
      pixels[at] = code === 0 && hatched && (x + y) % HATCH === 0 ? palette.hatch : palette[code];
    }
  }
  canvas.getContext("2d").putImageData(image, 0, 0);
}

// Overview: thumbnails of all layers and heads

async function drawOverview() {
  const stage = state.stage;
  const layers = layersOf(stage);
  const blocks = await Promise.all(layers.map((layer) => inflate(layer.thumbnails)));
  if (stage !== state.stage) return;
  const rows = layers.map((layer, index) => {
    const [heads, height, width] = layer.thumbnail_shape;
    const row = make("div", { className: "layer", role: "group", "aria-label": `Layer ${layer.layer}` });
    row.append(make("span", { title: `layer ${layer.layer}, ${layer.mixer}` }, String(layer.layer)));
    for (let head = 0; head < heads; head++) {
      const canvas = make("canvas");
      const size = height * width;
      paint(canvas, blocks[index].subarray(head * size, (head + 1) * size), height, width, 1, false);
      const button = make("button", {
        type: "button", className: "thumbnail",
        "aria-label": `Layer ${layer.layer}, head ${head}, ${layer.mixer}`,
      }, canvas);
      button.dataset.layer = index;
      button.dataset.head = head;
      row.append(button);
    }
    return row;
  });
  const overview = byId("overview");
  overview.classList.toggle("many", layers[0].shape[0] > 8);
  overview.replaceChildren(headNumbers(Math.max(...layers.map((layer) => layer.thumbnail_shape[0]))), ...rows);
  markThumbnail();
}

function headNumbers(count) {
  const row = make("div", { className: "heads", "aria-hidden": "true" });
  for (let head = 0; head < count; head++) row.append(make("span", {}, String(head)));
  return row;
}

function thumbnail(layer, head) {
  return byId("overview").querySelector(`[data-layer="${layer}"][data-head="${head}"]`);
}

function markThumbnail() {
  for (const button of byId("overview").querySelectorAll("button")) {
    const chosen = +button.dataset.layer === state.layer && +button.dataset.head === state.head;
    button.setAttribute("aria-pressed", String(chosen));
    button.tabIndex = chosen ? 0 : -1; // one stop for the tab key; arrows move within
  }
}

function onOverviewKey(event) {
  const button = event.target.closest("button");
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (!button || !step) return;
  event.preventDefault();
  const next = thumbnail(+button.dataset.layer + step[0], +button.dataset.head + step[1]);
  if (next) next.focus();
}

// One head: tokens with lines, and its matrix

async function openHead(layer, head) {
  const layers = layersOf(state.stage);
  state.layer = Math.min(Math.max(layer, 0), layers.length - 1);
  const heads = layers[state.layer].shape[0];
  state.head = Math.min(Math.max(head, 0), heads - 1);
  const wanted = layers[state.layer].heads[state.head];
  const codes = await inflate(wanted);
  if (layersOf(state.stage)[state.layer].heads[state.head] !== wanted) return; // another was opened
  state.codes = codes;
  const { layer: number, mixer } = layers[state.layer];
  byId("head-title").textContent = `Layer ${number}, head ${state.head} (${mixer})`;
  markThumbnail();
  drawMatrix();
  drawFocus();
}

function stepHead(by) {
  const layers = layersOf(state.stage);
  const places = layers.flatMap((layer, i) => layer.heads.map((_, head) => [i, head]));
  const now = places.findIndex(([layer, head]) => layer === state.layer && head === state.head);
  openHead(...places[(now + by + places.length) % places.length]);
}

async function openStage(stage) {
  Object.assign(state, { stage, codes: null, hover: null, pinned: null });
  const cross = data.stages[stage].name === "cross";
  const queries = data.stages[stage].name === "encoder" ? data.sources || data.tokens : data.tokens;
  const keys = cross ? data.sources : queries;
  view = { queries, keys, columns: keys.length };
  for (const [index, tab] of [...byId("stages").children].entries()) {
    tab.setAttribute("aria-selected", String(index === stage));
    tab.tabIndex = index === stage ? 0 : -1;
  }
  for (const [side, tokens] of Object.entries({ queries, keys })) {
    byId(side).replaceChildren(...tokens.map((text, index) => {
      const properties = { className: "token", role: "option", dir: "auto", "aria-selected": "false" };
      const token = make("div", { ...properties, title: `${index}: ${text}`, tabIndex: index ? -1 : 0 }, text);
      token.dataset.index = index;
      return token;
    }));
  }
  await Promise.all([drawOverview(), openHead(state.layer, state.head)]);
}

/** Return the token that is traced: the one under the pointer, or the one that was clicked. */
const focusOf = () => state.hover || state.pinned;

function weightsOf({ side, index }) {
  const { columns } = view;
  if (side === "queries") return [...state.codes.subarray(index * columns, (index + 1) * columns)];
  return view.queries.map((_, row) => state.codes[row * columns + index]);
}

function drawFocus() {
  if (!state.codes) return; // of a stage that is being opened
  const focus = focusOf();
  const codes = focus && weightsOf(focus);
  const [red, green, blue] = themeColor(focus && focus.side === "keys" ? "--query" : "--key");
  for (const side of ["queries", "keys"]) {
    const other = focus && focus.side !== side;
    for (const [index, token] of [...byId(side).children].entries()) {
      const weight = other ? weightOf(codes[index]) : 0;
      token.style.background = weight ? `rgba(${red},${green},${blue},${0.06 + 0.54 * weight})` : "";
      token.style.opacity = other && codes[index] === 0 ? 0.4 : "";
      token.style.textDecoration = other && codes[index] === 0 ? "line-through" : "";
      token.classList.toggle("active", Boolean(focus) && !other && focus.index === index);
      const pinned = state.pinned && state.pinned.side === side && state.pinned.index === index;
      token.setAttribute("aria-selected", String(Boolean(pinned)));
    }
  }
  byId("status").replaceChildren(...describeFocus(focus, codes));
  drawLinks();
  drawMatrixMark();
}

function describeFocus(focus, codes) {
  if (!focus) return ["Point at a token, or move to it with the arrow keys; click or Enter keeps it, Escape lets go."];
  const [own, others] = focus.side === "queries" ? [view.queries, view.keys] : [view.keys, view.queries];
  const ranked = [...codes.keys()].filter((i) => codes[i] > 1).sort((a, b) => codes[b] - codes[a]);
  const hidden = codes.filter((code) => code === 0).length;
  const parts = [make("b", {}, own[focus.index]), ` (${focus.index})`];
  parts.push(focus.side === "queries" ? " attends to " : " is attended to by ");
  ranked.slice(0, 6).forEach((index, place) => {
    if (place) parts.push(", ");
    parts.push(make("b", {}, others[index]), ` ${showWeight(weightOf(codes[index]))}`);
  });
  if (!ranked.length) parts.push("nothing");
  if (ranked.length > 6) parts.push(` and ${ranked.length - 6} more`);
  const next = data.causal && focus.side === "queries" && data.stages[state.stage].name !== "encoder";
  const after = data.tokens[focus.index + 1];
  if (next && after) parts.push("; the next token is ", make("b", {}, after));
  parts.push(hidden ? `; ${hidden} of ${codes.length} hidden.` : ".");
  return parts;
}

function drawLinks() {
  if (!state.codes) return;
  const canvas = byId("links");
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  const ratio = devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const offset = byId("queries").offsetTop + 4 - byId("lines").scrollTop + ROW_HEIGHT / 2;
  const focus = focusOf();
  const [red, green, blue] = themeColor(focus && focus.side === "keys" ? "--query" : "--key");
  const line = (row, column, weight) => {
    const [from, to] = [offset + row * ROW_HEIGHT, offset + column * ROW_HEIGHT];
    if ((from < 0 && to < 0) || (from > height && to > height)) return;
    context.beginPath();
    context.moveTo(0, from);
    context.bezierCurveTo(width / 3, from, (2 * width) / 3, to, width, to);
    context.strokeStyle = `rgba(${red},${green},${blue},${Math.min(1, 0.08 + 0.92 * weight)})`;
    context.lineWidth = 0.6 + 2.4 * weight;
    context.stroke();
  };
  if (focus) {
    weightsOf(focus).forEach((code, index) => {
      if (code > 1) line(...(focus.side === "queries" ? [focus.index, index] : [index, focus.index]), weightOf(code));
    });
    return;
  }
  const least = 1 + 254 * Math.sqrt(MIN_WEIGHT);
  for (let row = 0, at = 0; row < view.queries.length; row++) {
    for (let column = 0; column < view.columns; column++, at++) {
      if (state.codes[at] >= least) line(row, column, weightOf(state.codes[at]));
    }
  }
}

function drawMatrix() {
  if (!state.codes) return;
  const [rows, columns] = [view.queries.length, view.columns];
  view.scale = Math.max(1, Math.floor(720 / Math.max(rows, columns)));
  const clean = make("canvas");
  paint(clean, state.codes, rows, columns, view.scale, true);
  view.clean = clean;
}

/** Copy the drawn matrix and frame the row or column of the traced token. */
function drawMatrixMark() {
  const canvas = byId("matrix");
  const { clean, scale } = view;
  canvas.width = clean.width;
  canvas.height = clean.height;
  const context = canvas.getContext("2d");
  context.drawImage(clean, 0, 0);
  const focus = focusOf();
  if (!focus) return;
  const [red, green, blue] = themeColor(focus.side === "queries" ? "--query" : "--key");
  context.strokeStyle = `rgb(${red},${green},${blue})`;
  context.lineWidth = Math.max(1, clean.width / 240);
  const place = focus.index * scale;
  if (focus.side === "queries") context.strokeRect(0, place, clean.width, scale);
  else context.strokeRect(place, 0, scale, clean.height);
}

// Events

function tokenAt(event) {
  const token = event.target.closest(".token");
  return token && { side: token.parentElement.id, index: +token.dataset.index };
}

function hover(focus) {
  const same = focus && state.hover && focus.side === state.hover.side && focus.index === state.hover.index;
  if (same || (!focus && !state.hover)) return;
  state.hover = focus;
  drawFocus();
}

function pin(focus) {
  const same = focus && state.pinned && focus.side === state.pinned.side && focus.index === state.pinned.index;
  state.pinned = same ? null : focus;
  state.hover = null;
  drawFocus();
}

function onTokenKey(event) {
  const focus = tokenAt(event);
  if (!focus) return;
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    pin(focus);
    return;
  }
  const count = view[focus.side].length;
  const steps = { ArrowUp: -1, ArrowDown: 1, PageUp: -10, PageDown: 10, Home: -count, End: count };
  const across = { ArrowLeft: "queries", ArrowRight: "keys" }[event.key];
  if (!(event.key in steps) && !across) return;
  event.preventDefault();
  const side = across || focus.side;
  const index = focus.index + (steps[event.key] || 0);
  const token = byId(side).children[Math.min(Math.max(index, 0), view[side].length - 1)];
  for (const each of byId(side).children) each.tabIndex = each === token ? 0 : -1;
  token.focus();
}

function matrixRow(event) {
  if (!state.codes) return null;
  const canvas = byId("matrix");
  const box = canvas.getBoundingClientRect();
  // The picture fills its box and keeps its proportions.
  const zoom = Math.min(box.width / canvas.width, box.height / canvas.height);
  const place = (at, scale, count) => Math.min(Math.floor(at / zoom / scale), count - 1);
  const row = place(event.clientY - box.top, view.scale, view.queries.length);
  const column = (event.clientX - box.left) / zoom / view.scale;
  return column < view.columns && row >= 0 ? { side: "queries", index: row } : null;
}

function listen() {
  const lines = byId("lines");
  lines.addEventListener("mouseover", (event) => hover(tokenAt(event)));
  lines.addEventListener("mouseleave", () => hover(null));
  lines.addEventListener("focusin", (event) => hover(tokenAt(event)));
  lines.addEventListener("focusout", () => hover(null));
  lines.addEventListener("click", (event) => tokenAt(event) && pin(tokenAt(event)));
  lines.addEventListener("keydown", onTokenKey);
  lines.addEventListener("scroll", drawLinks, { passive: true });
  const matrix = byId("matrix");
  matrix.addEventListener("mousemove", (event) => hover(matrixRow(event)));
  matrix.addEventListener("mouseleave", () => hover(null));
  matrix.addEventListener("click", (event) => pin(matrixRow(event)));
  byId("overview").addEventListener("keydown", onOverviewKey);
  byId("overview").addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) openHead(+button.dataset.layer, +button.dataset.head);
  });
  byId("previous").addEventListener("click", () => stepHead(-1));
  byId("next").addEventListener("click", () => stepHead(1));
  byId("stages").addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!by) return;
    const stage = (state.stage + by + data.stages.length) % data.stages.length;
    openStage(stage).then(() => byId("stages").children[stage].focus());
  });
  document.addEventListener("keydown", (event) => event.key === "Escape" && pin(null));
  addEventListener("resize", drawLinks);
  onThemeChange(() => {
    loadPalette();
    drawLegend();
    drawOverview();
    drawMatrix();
    drawFocus();
  });
}

function drawLegend() {
  const scale = make("canvas");
  paint(scale, Uint8Array.from({ length: 127 }, (_, i) => 1 + 2 * i), 1, 127, 1, false);
  scale.style.width = "90px";
  const hidden = make("canvas");
  paint(hidden, new Uint8Array(1), 1, 1, 14, true);
  byId("legend").replaceChildren("weight 0", scale, "1 (color by √)", hidden, "hidden by the mask or the pattern");
}

async function start() {
  byId("stages").append(...data.stages.map(({ title }, stage) => {
    const tab = make("button", { type: "button", role: "tab" }, title);
    tab.addEventListener("click", () => openStage(stage));
    return tab;
  }));
  loadPalette();
  drawLegend();
  listen();
  [state.layer, state.head] = data.open;
  await openStage(data.open_stage);
  document.documentElement.dataset.ready = performance.now();
}

start();
