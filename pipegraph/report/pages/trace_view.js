// The timeline of trace.html.jinja, in three parts that make one function: what is seen, how it is painted, and what
// the user does. Times in the data are microseconds from the start of a step.
//   actions: [kind, stage, microbatch, start, end]      of each rank, in order
//   messages: [from rank, to rank, handed over, waited for from, there, kind, stage, peer, microbatch, bytes]

const data = JSON.parse(document.getElementById("data").textContent);
const canvas = document.getElementById("timeline");
const frame = document.getElementById("frame");
const tip = document.getElementById("tip");
const said = document.getElementById("said");
const box = { step: byId("step"), below: byId("below"), arrows: byId("arrows"), critical: byId("critical") };
const TOP = 26, MEASURED = 26, BELOW = 15, GAP = 12, MOST_ARROWS = 600;
const narrow = () => frame.clientWidth < 620;
const gutter = () => (narrow() ? 58 : 112);
const view = { from: 0, to: 1 };
let step, below, hovered = null, chosen = null, drag = null, pending = false, colours = {};

function byId(id) { return document.getElementById(id); }

function option(select, value, text) {
  const made = document.createElement("option");
  made.value = value;
  made.textContent = text;
  select.append(made);
}

function time(microseconds) {
  const value = microseconds / data.unit.microseconds;
  const digits = Math.max(0, Math.min(3, 3 - Math.floor(Math.log10(Math.abs(value) || 1))));
  return `${value.toFixed(digits)} ${data.unit.name}`;
}

function bytes(number) {
  for (const unit of ["B", "KiB", "MiB"]) {
    if (number < 1024) return `${unit === "B" ? number : number.toFixed(1)} ${unit}`;
    number /= 1024;
  }
  return `${number.toFixed(1)} GiB`;
}


const lane = () => MEASURED + (below ? BELOW + 2 : 0) + GAP;
const top = (rank) => TOP + rank * lane();
const width = () => frame.clientWidth - gutter() - 2;
const x = (at) => gutter() + ((at - view.from) / (view.to - view.from)) * width();
const at = (pixel) => view.from + ((pixel - gutter()) / width()) * (view.to - view.from);
const whole = () => Math.max(step.makespan, below ? below.makespan : 0, 1e-3) * 1.004;

function look(from, to) {
  const shortest = whole() / 5000, longest = whole();
  const span = Math.min(Math.max(to - from, shortest), longest);
  const middle = (from + to) / 2;
  view.from = Math.min(Math.max(middle - span / 2, 0), longest - span);
  view.to = view.from + span;
  canvas.dataset.shown = `${view.from.toFixed(3)} ${view.to.toFixed(3)}`;
  draw();
}

function zoom(factor, around) {
  const where = around === undefined ? (view.from + view.to) / 2 : around;
  look(where - (where - view.from) * factor, where + (view.to - where) * factor);
}

const pan = (part) => { const by = (view.to - view.from) * part; look(view.from + by, view.to + by); };
const fit = () => look(0, whole());
