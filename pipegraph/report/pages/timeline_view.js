// The timeline of timeline.html.jinja, in three parts that make one function: what is seen, how it is painted, and what
// the user does. Times in the data are microseconds from the start of a step.
//   actions: [kind, stage, microbatch, start, end]      of each rank, in order
//   collectives (beside): likewise, without a microbatch
// A step that was not measured (data.simulated) stands in the same place.
//   messages: [from rank, to rank, handed over, waited for from, there, kind, stage, peer, microbatch, bytes]

const data = JSON.parse(document.getElementById("data").textContent);
const canvas = document.getElementById("timeline");
const frame = document.getElementById("frame");
const tip = document.getElementById("tip");
const said = document.getElementById("said");
const details = document.getElementById("details");
const box = { step: byId("step"), below: byId("below"), arrows: byId("arrows"), critical: byId("critical") };
const TOP = 26, MEASURED = 26, BELOW = 15, GAP = 12, MOST_ARROWS = 600;
const BESIDE = Object.keys(data.collectives).length ? 13 : 0;
const narrow = () => frame.clientWidth < 620;
const gutter = () => (narrow() ? 58 : 112);
const view = { from: 0, to: 1 };
let step, below, ends, hovered = null, chosen = null, span = null, drag = null, pending = false, colours = {};

function byId(id) { return document.getElementById(id); }

function option(select, value, text) {
  const made = document.createElement("option");
  made.value = value;
  made.textContent = text;
  select.append(made);
}

const UNITS = data.unitless ? [[1e6, ""]] : [[1e6, "s"], [1e3, "ms"], [1, "µs"], [1e-3, "ns"]];
const unitOf = (microseconds) => UNITS.find(([size]) => Math.abs(microseconds) >= size) || UNITS[Math.min(2, UNITS.length - 1)];
const decimals = (step, size) => Math.min(9, Math.max(0, Math.ceil(Math.log10(size / step) - 1e-9)));

// How long: four figures in the unit that fits.
function time(microseconds) {
  const [size, name] = unitOf(microseconds), value = microseconds / size;
  return `${value.toFixed(Math.max(0, 3 - Math.floor(Math.log10(Math.abs(value) || 1000))))} ${name}`.trimEnd();
}

// When: as finely as a thousandth of what lasts so long.
function moment(microseconds, lasting) {
  const [size, name] = unitOf(microseconds);
  return `${(microseconds / size).toFixed(decimals(Math.max(lasting, 1e-3) / 1000, size))} ${name}`.trimEnd();
}

function bytes(number) {
  for (const unit of ["B", "KiB", "MiB"]) {
    if (number < 1024) return `${unit === "B" ? number : number.toFixed(1)} ${unit}`;
    number /= 1024;
  }
  return `${number.toFixed(1)} GiB`;
}


// A lane: what was measured, its collectives, and below them the same of what it is compared with.
const lane = () => MEASURED + BESIDE + (below ? BELOW + BESIDE + 2 : 0) + GAP;
const top = (rank) => TOP + rank * lane();
const placeOf = (measured, collective) =>
  measured ? (collective ? [MEASURED, BESIDE - 1] : [0, MEASURED])
    : collective ? [MEASURED + BESIDE + 2 + BELOW, BESIDE - 1] : [MEASURED + BESIDE + 2, BELOW];
const width = () => frame.clientWidth - gutter() - 2;
const x = (at) => gutter() + ((at - view.from) / (view.to - view.from)) * width();
const at = (pixel) => view.from + ((pixel - gutter()) / width()) * (view.to - view.from);
const last = (shown) => shown.beside.flat().reduce((end, each) => Math.max(end, each[4]), shown.makespan);
const whole = () => Math.max(ends, 1e-3) * 1.004;

function look(from, to) {
  const shortest = whole() / 5000, longest = whole();
  const span = Math.min(Math.max(to - from, shortest), longest);
  const middle = (from + to) / 2;
  view.from = Math.min(Math.max(middle - span / 2, 0), longest - span);
  view.to = view.from + span;
  canvas.dataset.shown = `${view.from.toFixed(3)} ${view.to.toFixed(3)}`;
  draw();
  remember();
}

// About a given time, else about what is selected and seen, else about the middle.
function zoom(factor, around) {
  const selected = chosen ? (chosen.action[3] + chosen.action[4]) / 2 : NaN;
  const middle = view.from <= selected && selected <= view.to ? selected : (view.from + view.to) / 2;
  const where = around === undefined ? middle : around;
  look(where - (where - view.from) * factor, where + (view.to - where) * factor);
}

const pan = (part) => { const by = (view.to - view.from) * part; look(view.from + by, view.to + by); };
const fit = () => look(0, whole());
