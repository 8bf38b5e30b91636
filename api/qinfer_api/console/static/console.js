// The console's pages: live figures, charts, sorted lists, the keyboard, themes, and images as inputs.
"use strict";
const root = document.documentElement;
const script = document.currentScript;
const find = (selector, within = document) => within.querySelector(selector);
const all = (selector, within = document) => [...within.querySelectorAll(selector)];

// ---- figures, formatted as the gateway formats them ------------------------------------------------------------------

function short(value) {
  const digits = value >= 100 || Number.isInteger(value) ? 0 : value >= 10 ? 1 : 2;
  return value.toFixed(digits);
}

function count(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  return value < 1000 ? short(value) : Math.round(value).toString().replace(/\B(?=(\d{3})+$)/g, "\u2009");
}

function seconds(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (value === 0) return "0 s";
  const steps = [[0.001, 1e6, "µs"], [1, 1e3, "ms"], [60, 1, "s"], [3600, 1 / 60, "min"], [172800, 1 / 3600, "h"]];
  for (const [limit, factor, unit] of steps) if (value < limit) return `${short(value * factor)} ${unit}`;
  return `${short(value / 86400)} days`;
}

const formats = { count, seconds, badge: (value) => (value ? count(value) : "") };

// ---- the stream -----------------------------------------------------------------------------------------------------

const figures = {};
const states = { live: "live", away: "reconnecting", off: "not live" };

function showFigures(changed) {
  Object.assign(figures, changed);
  for (const element of all("[data-live]")) {
    const name = element.dataset.live;
    if (name in changed) element.textContent = (formats[element.dataset.as] || count)(changed[name]);
  }
  if ("slot" in changed) charts.forEach((chart) => chart.load());
}

function hear({ state, figures: changed, topics }) {
  const mark = find("[data-connection]");
  if (state && mark && mark.dataset.state !== state) {
    mark.dataset.state = state;
    mark.lastElementChild.textContent = states[state];
  }
  if (changed) showFigures(changed);
  for (const topic of topics || []) document.body.dispatchEvent(new CustomEvent(`live-${topic}`));
}

function connect() {
  const tell = () => (document.hidden ? "hidden" : "visible");
  if (typeof SharedWorker === "undefined") return connectAlone();
  const worker = new SharedWorker(script.dataset.live);
  worker.onerror = () => connectAlone();
  worker.port.onmessage = ({ data }) => hear(data);
  worker.port.postMessage(tell());
  document.addEventListener("visibilitychange", () => worker.port.postMessage(tell()));
  addEventListener("pagehide", () => worker.port.postMessage("bye"));
  addEventListener("pageshow", (event) => event.persisted && worker.port.postMessage(tell()));
}

// Some browsers of phones have no shared workers: each page has its own stream then.
function connectAlone() {
  let source = null;
  const follow = () => {
    if (document.hidden) {
      if (source) source.close();
      source = null;
    } else if (!source) {
      source = new EventSource(`${root.dataset.root}live`);
      source.onopen = () => hear({ state: "live" });
      source.onerror = () => hear({ state: "away" });
      source.addEventListener("figures", (event) => hear({ figures: JSON.parse(event.data) }));
      source.addEventListener("topics", (event) => hear({ topics: JSON.parse(event.data) }));
    }
  };
  document.addEventListener("visibilitychange", follow);
  follow();
}

// ---- charts ---------------------------------------------------------------------------------------------------------

const charts = [];
const paint = (name) => getComputedStyle(root).getPropertyValue(name).trim();

// A young history is shown from its beginning, ten minutes at least.
function recent(columns) {
  const first = columns.at_s.findIndex((_, at) => columns.rate[at] > 0 || columns.work_s[at] !== null);
  const begin = Math.min(Math.max(first - 2, 0), Math.max(columns.at_s.length - 120, 0));
  const from = first < 0 ? Math.max(columns.at_s.length - 120, 0) : begin;
  return Object.fromEntries(Object.entries(columns).map(([name, column]) => [name, column.slice(from)]));
}

class Charts {
  constructor(element) {
    this.element = element;
    this.plots = [];
    this.resize = new ResizeObserver(() => this.fit());
    this.resize.observe(element);
    this.load();
  }

  async load() {
    const { charts: series, range } = this.element.dataset;
    const isDue = range === "1h" || !(Date.now() - this.loadedAt < 60000); // longer ranges have a point a minute
    if (!this.element.isConnected || this.isLoading || !isDue) return;
    this.isLoading = true;
    this.loadedAt = Date.now();
    try {
      const reply = await fetch(`${root.dataset.root}history?of=${encodeURIComponent(series)}&range=${range}`);
      const columns = reply.ok ? await reply.json() : {};
      const note = find("[data-chart-note]", this.element);
      note.textContent = columns.note || "";
      note.hidden = !columns.note;
      if (columns.at_s) this.show(columns);
    } catch { /* the connection's mark says so */ } finally {
      this.isLoading = false;
    }
  }

  show(columns) {
    this.columns = columns = recent(columns);
    this.isLong = columns.at_s.at(-1) - columns.at_s[0] > 86400;
    const places = all("[data-chart]", this.element);
    places.forEach((place, at) => {
      const names = place.dataset.chart.split(",");
      const data = [columns.at_s, ...names.map((name) => columns[name])];
      if (this.plots[at]) this.plots[at].setData(data);
      else this.plots[at] = new uPlot(this.options(place, names), data, place);
      setTimeout(() => this.plots[at]?.cursor.idx == null && this.plots[at]?.setLegend({ idx: data[0].length - 1 }));
    });
  }

  options(place, names) {
    const format = names[0].endsWith("_s") ? seconds : count;
    const colours = names[0] === "errors" ? ["--bad"] : ["--accent", "--second"];
    const axis = { stroke: paint("--muted"), grid: { stroke: paint("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    return {
      ...this.size(place),
      cursor: { y: false, points: { size: 6 } },
      legend: { live: true, markers: { width: 2 } },
      padding: [8, 8, 0, 0],
      scales: { y: { range: (_, low, high) => [0, high > 0 ? high * 1.15 : 1] } },
      axes: [
        { ...axis, space: 60, size: 28, values: (_, splits) => splits.map((at) => new Date(at * 1000).toLocaleString([], this.isLong ? { weekday: "short", day: "numeric" } : { hour: "2-digit", minute: "2-digit" })) },
        { ...axis, size: 58, space: 32, values: (_, splits) => splits.map(format) },
      ],
      series: [
        { value: (_, at) => (at === null ? "–" : new Date(at * 1000).toLocaleTimeString()) },
        ...names.map((name, at) => ({
          label: { rate: "all", errors: "failed", p50_s: "p50", p99_s: "p99", work_s: "work" }[name],
          stroke: paint(colours[at]),
          fill: at || names.length > 1 ? undefined : `${paint(colours[at])}22`,
          width: 1.5,
          spanGaps: false,
          points: { show: names[0] !== "rate" && names[0] !== "errors", size: 3 },
          value: (_, value) => format(value),
        })),
      ],
    };
  }

  size(place) {
    return { width: Math.max(place.clientWidth, 160), height: 150 };
  }

  fit() {
    this.plots.forEach((plot) => plot.setSize(this.size(plot.root.parentElement)));
  }

  restyle() {
    this.plots.forEach((plot) => plot.destroy());
    this.plots = [];
    if (this.columns) this.show(this.columns);
  }
}

// ---- lists ----------------------------------------------------------------------------------------------------------

const sorts = {}; // id or place of a list → column and direction, which outlast a refresh

function cellValue(row, column) {
  const cell = row.cells[column];
  const text = cell.dataset.value ?? cell.textContent.trim();
  const number = parseFloat(text.replace(/[\u2009,]/g, ""));
  return Number.isNaN(number) || (cell.dataset.value === undefined && !cell.classList.contains("number")) ? text.toLowerCase() : number;
}

function sortList(table, column, direction) {
  const rows = [...table.tBodies[0].rows];
  const keyed = rows.map((row) => [cellValue(row, column), row]);
  keyed.sort(([a], [b]) => {
    if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1; // unknown figures are last
    return a < b ? -direction : a > b ? direction : 0;
  });
  table.tBodies[0].append(...keyed.map(([, row]) => row));
  [...table.tHead.rows[0].cells].forEach((head, at) => {
    if (at === column) head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
    else head.removeAttribute("aria-sort");
  });
}

function prepareLists(within) {
  all("table[data-sort]", within).forEach((table, at) => {
    const place = `${location.pathname}#${at}`;
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      if (!head.textContent.trim() || head.firstElementChild) return;
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      button.addEventListener("click", () => {
        const [last, direction] = sorts[place] || [];
        const numeric = head.classList.contains("number");
        sorts[place] = [column, last === column ? -direction : numeric ? -1 : 1];
        sortList(table, ...sorts[place]);
      });
      head.replaceChildren(button);
    });
    if (sorts[place]) sortList(table, ...sorts[place]);
  });
}

let current = -1;

function moveRow(step) {
  const rows = all("main table.list tbody tr, main ul.cards li").filter((row) => row.offsetParent);
  if (!rows.length) return;
  all(".current").forEach((row) => row.classList.remove("current"));
  current = Math.min(Math.max(current + step, 0), rows.length - 1);
  rows[current].classList.add("current");
  const link = find("a, input, button", rows[current]);
  if (link) link.focus({ preventScroll: true });
  rows[current].scrollIntoView({ block: "nearest" });
}

function showChosen(form) {
  const mark = find("[data-chosen]", form);
  if (!mark) return;
  const boxes = all('tbody input[type="checkbox"]', form);
  const chosen = boxes.filter((box) => box.checked).length;
  mark.textContent = chosen ? `${chosen} chosen` : "none chosen";
  const whole = find("[data-all]", form);
  whole.checked = chosen > 0 && chosen === boxes.length;
  whole.indeterminate = chosen > 0 && chosen < boxes.length;
}

// ---- the keyboard ---------------------------------------------------------------------------------------------------

function moveSection(step) {
  const links = all("#nav > a");
  const at = links.findIndex((link) => link.getAttribute("aria-current"));
  const next = links[(at + step + links.length) % links.length];
  if (next) next.click();
}

const keys = {
  "/": () => { const box = find("[data-filter]"); if (box) { box.focus(); box.select(); } },
  j: () => moveRow(1),
  k: () => moveRow(-1),
  x: () => { const box = find(".current input[type=checkbox]"); if (box) box.click(); },
  "[": () => moveSection(-1),
  "]": () => moveSection(1),
  t: () => switchTheme(),
  "?": () => find("#keys").showModal(),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || find("dialog[open]")) return;
  if (event.target.closest("input:not([type=checkbox]), textarea, select")) {
    if (event.key === "Escape") {
      event.preventDefault(); // a browser would empty the filter
      event.target.blur();
    }
    return;
  }
  if (keys[event.key]) {
    event.preventDefault();
    keys[event.key]();
  }
});

function switchTheme() {
  const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = isDark ? "light" : "dark";
  try { localStorage.setItem("qinfer-theme", root.dataset.theme); } catch { /* it holds for this page */ }
  charts.forEach((chart) => chart.restyle());
}

// ---- images and files as inputs -------------------------------------------------------------------------------------

const kept = new Map(); // name of an input → its file, image and options, which outlast the form's answer
const nameOf = (field) => find("textarea", field).name.slice("in:".length);

const scales = {
  imagenet: (value, channel) => (value / 255 - [0.485, 0.456, 0.406][channel % 3]) / [0.229, 0.224, 0.225][channel % 3],
  "-1": (value) => value / 127.5 - 1,
};

function pixelsOf(field, image) {
  const [height, width, channels, isFirst] = field.dataset.image.split(",").map(Number);
  const canvas = document.createElement("canvas");
  const most = 512;
  const factor = Math.min(1, most / Math.max(image.width, image.height));
  canvas.width = width || Math.round(image.width * factor);
  canvas.height = height || Math.round(image.height * factor);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  const data = context.getImageData(0, 0, canvas.width, canvas.height).data;
  const scale = find("[data-scale]", field).value;
  const isInverted = find("[data-invert]", field).checked;
  const shown = scales[scale] || ((value) => (value / 255) * Number(scale));
  const area = canvas.width * canvas.height;
  const values = new Array(area * channels);
  for (let at = 0; at < area; at += 1) {
    const [red, green, blue, alpha] = data.slice(at * 4, at * 4 + 4);
    const colours = channels === 1 ? [0.299 * red + 0.587 * green + 0.114 * blue] : [red, green, blue, alpha];
    for (let channel = 0; channel < channels; channel += 1) {
      const value = shown(isInverted ? 255 - colours[channel] : colours[channel], channel);
      const whole = scale === "255" || scale === "16" ? Math.round(value) : Number(value.toFixed(4));
      values[isFirst ? channel * area + at : at * channels + channel] = whole;
    }
  }
  const preview = find("canvas", field);
  preview.hidden = false;
  preview.width = Math.min(Math.max(Math.round((preview.height * image.width) / image.height), 24), 240); // clears it, too
  preview.getContext("2d").imageSmoothingEnabled = false;
  preview.getContext("2d").drawImage(canvas, 0, 0, preview.width, preview.height);
  find("textarea", field).value = values.join(", ");
  kept.set(nameOf(field), { image, scale, isInverted });
}

// The answer has a new form: it gets the files of the one before.
function restoreFile(field) {
  const { image, scale, isInverted, name, content } = kept.get(nameOf(field)) || {};
  if (content) {
    find("input[type=hidden]", field).value = content;
    find("[data-drop-name]", field).textContent = name;
  } else if (image && !field.image) {
    find("[data-scale]", field).value = scale;
    find("[data-invert]", field).checked = isInverted;
    field.image = image;
    pixelsOf(field, image);
  }
}

function takeFile(field, file) {
  if (!file) return;
  find("[data-drop-name]", field).textContent = file.name;
  const reader = new FileReader();
  reader.onload = () => {
    const image = new Image();
    if (!field.dataset.image) {
      const content = reader.result.slice(reader.result.indexOf(",") + 1);
      find("input[type=hidden]", field).value = content;
      find("textarea", field).value = "";
      kept.set(nameOf(field), { name: file.name, content });
      image.onload = () => Object.assign(kept.get(nameOf(field)), { image });
      image.src = reader.result;
      return;
    }
    image.onload = () => { field.image = image; pixelsOf(field, image); };
    image.onerror = () => { find("[data-drop-name]", field).textContent = `${file.name} is no image`; };
    image.src = reader.result;
  };
  reader.readAsDataURL(file);
}

document.addEventListener("change", (event) => {
  const field = event.target.closest("[data-image], [data-file]");
  if (field && event.target.type === "file") takeFile(field, event.target.files[0]);
  if (field && field.image && event.target.matches("[data-scale], [data-invert]")) pixelsOf(field, field.image);
  const form = event.target.closest("form");
  if (form && event.target.matches("[data-all]")) {
    all('tbody input[type="checkbox"]', form).forEach((box) => { box.checked = event.target.checked; });
  }
  if (form) showChosen(form);
});

document.addEventListener("input", (event) => {
  const field = event.target.matches("textarea") && event.target.closest("[data-image], [data-file]");
  if (field) kept.delete(nameOf(field));
});

for (const name of ["dragenter", "dragover", "dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    const field = event.target.closest && event.target.closest("[data-image], [data-file]");
    if (!field) return;
    event.preventDefault();
    field.classList.toggle("over", name === "dragenter" || name === "dragover");
    if (name === "drop") takeFile(field, event.dataTransfer.files[0]);
  });
}

// ---- forms ----------------------------------------------------------------------------------------------------------

// An act that can't be undone is sent after its question has been answered.
document.addEventListener("htmx:confirm", (event) => {
  const asked = event.detail.triggeringEvent?.submitter?.dataset.confirm || event.detail.elt.dataset.confirm;
  if (!asked) return;
  event.preventDefault();
  const dialog = find("#confirm");
  find("#confirm-text").textContent = asked;
  dialog.returnValue = "no";
  dialog.showModal();
  dialog.addEventListener("close", () => dialog.returnValue === "yes" && event.detail.issueRequest(true), { once: true });
});

// The keyboard reaches what scrolls.
function makeScrollable() {
  for (const part of all(".scroll, .log, pre")) {
    if (part.scrollWidth > part.clientWidth || part.scrollHeight > part.clientHeight) part.tabIndex = 0;
  }
}

function prepare(within) {
  makeScrollable();
  prepareLists(within);
  for (const element of all("[data-charts]:not([data-drawn])", within)) {
    element.dataset.drawn = "";
    charts.push(new Charts(element));
  }
  all("form", within).forEach(showChosen);
  all("[data-image], [data-file]", within).forEach(restoreFile);
  document.dispatchEvent(new Event("prepared"));
  current = -1;
}

document.addEventListener("htmx:afterSettle", (event) => {
  const target = event.detail.elt;
  for (let at = charts.length - 1; at >= 0; at -= 1) if (!charts[at].element.isConnected) charts.splice(at, 1);
  const part = target.isConnected ? target : document;
  prepare(part.id === "main" ? part : part.parentElement || part);
  if (part.id === "main" && find(".note", part)) find(".note", part).scrollIntoView({ block: "nearest" });
});

document.addEventListener("click", (event) => {
  if (event.target.closest("[data-theme-switch]")) switchTheme();
  if (event.target.closest("[data-keys]")) find("#keys").showModal();
  const menu = event.target.closest("[data-menu]");
  if (menu) {
    const isOpen = document.body.classList.toggle("menu-open");
    menu.setAttribute("aria-expanded", String(isOpen));
  }
});

addEventListener("resize", makeScrollable);
prepare(document);
connect();
