// What an action is, and what the user does: the third part.

function find(pixelX, pixelY) {
  if (pixelX < gutter()) return null;
  const rank = Math.floor((pixelY - TOP) / lane());
  if (rank < 0 || rank >= data.ranks.length) return null;
  const inside = pixelY - top(rank), when = at(pixelX);
  for (const [measured, collective] of [[true, false], [true, true], [false, false], [false, true]]) {
    const [from, height] = placeOf(measured, collective), shown = measured ? step : below;
    if (!shown || inside < from || inside >= from + height) continue;
    const row = (collective ? shown.beside : shown.rows)[rank];
    const position = row.findIndex((action) => action[3] <= when && when < action[4]);
    return position < 0 ? null : { rank, position, measured, collective, action: row[position] };
  }
  return null;
}

function facts(found) {
  const [kind, stage, microbatch, start, end] = found.action;
  const when = (at) => moment(at, end - start);
  const lines = [["from", `${when(start)} to ${when(end)}`], [found.measured && !data.simulated ? "took" : "takes", time(end - start)]];
  const rowOf = (shown) => (shown ? (found.collective ? shown.beside : shown.rows)[found.rank] : []);
  const equal = (action) => action[0] === kind && action[1] === stage && action[2] === microbatch;
  // A stage may be gathered several times in a step.
  const number = rowOf(found.measured ? step : below).slice(0, found.position).filter(equal).length;
  const same = rowOf(found.measured ? below : step).filter(equal)[number];
  if (same) {
    const name = found.measured ? below.short : "measured";
    lines.push([name, `${time(same[4] - same[3])}, from ${when(same[3])}`]);
  }
  if (found.collective) return { title: `${data.collectives[kind].meaning}: stage ${stage}`, lines };
  if (found.measured) {
    const before = found.position ? step.rows[found.rank][found.position - 1][4] : 0;
    if (start - before > 0) lines.push(["idle before", time(start - before)]);
    const backward = kind !== "F";
    for (const message of kind === "W" ? [] : step.messages) {
      if (message[7] === stage && message[8] === microbatch && (message[5] === "SEND_B") === backward) {
        lines.push(["waited for", `stage ${message[6]}: ${time(Math.max(message[4] - message[3], 0))} (${bytes(message[9])})`]);
      }
    }
  }
  return { title: `${data.meaning[kind]}: stage ${stage}, microbatch ${microbatch}`, lines };
}

function describe(place, title, lines) {
  const name = document.createElement("b"), table = document.createElement("table");
  name.textContent = title;
  for (const cells of lines) {
    const line = table.insertRow();
    for (const cell of cells) line.insertCell().textContent = cell;
  }
  place.replaceChildren(name, table);
}

// Below the timeline stays what is selected, and what was measured.
function dock() {
  details.replaceChildren();
  const part = (title, lines) => {
    const place = document.createElement("div");
    describe(place, title, lines);
    details.append(place);
  };
  if (chosen) part(`Rank ${chosen.rank}, ${facts(chosen).title}`, facts(chosen).lines);
  if (span) {
    const lasting = span.to - span.from, computing = step.rows.map((actions) => actions.reduce(
      (sum, [, , , start, end]) => sum + Math.max(0, Math.min(end, span.to) - Math.max(start, span.from)), 0));
    const share = computing.reduce((sum, each) => sum + each, 0) / (lasting * computing.length);
    part(`Measured: ${time(lasting)}`, [
      ["from", `${moment(span.from, lasting)} to ${moment(span.to, lasting)}`],
      ["ranks compute", `${(100 * share).toFixed(1)} % of it (mean)`],
    ]);
  }
  remember();
}

function select(from, to) {
  span = to > from ? { from: Math.max(from, 0), to: Math.min(to, whole()) } : null;
  if (span) said.textContent = `Measured ${time(span.to - span.from)}`;
  dock();
  draw();
}

function showTip(found, pixelX, pixelY) {
  tip.hidden = !found;
  if (!found) return;
  const { title, lines } = facts(found);
  describe(tip, `${title}${found.measured ? "" : `, ${below.short}`}`, lines);
  const left = Math.min(pixelX + 14, frame.clientWidth - tip.offsetWidth - 4);
  tip.style.left = `${Math.max(0, left)}px`;
  tip.style.top = `${pixelY + 18}px`;
}

function choose(rank, position) {
  const actions = step.rows[rank];
  if (!actions || actions.length === 0) return;
  position = Math.min(Math.max(position, 0), actions.length - 1);
  chosen = { rank, position, measured: true, action: actions[position] };
  const { title, lines } = facts(chosen);
  said.textContent = `Rank ${rank}, ${title}; ${lines.map((line) => line.join(" ")).join("; ")}`;
  const [, , , start, end] = chosen.action;
  if (start < view.from || end > view.to) {
    const half = (view.to - view.from) / 2;
    look((start + end) / 2 - half, (start + end) / 2 + half);
  }
  dock();
  draw();
}

function goTo(key) {
  if (!chosen) return choose(step.rows.findIndex((actions) => actions.length), 0);
  const { rank, position, action } = chosen;
  if (key === "ArrowLeft") return choose(rank, position - 1);
  if (key === "ArrowRight") return choose(rank, position + 1);
  const other = Math.min(Math.max(rank + (key === "ArrowUp" ? -1 : 1), 0), data.ranks.length - 1);
  const next = step.rows[other].findIndex((each) => each[4] > action[3]);
  return choose(other, next < 0 ? step.rows[other].length - 1 : next);
}

function legend() {
  const place = byId("legend");
  const entry = (text, className, fill, letter, ink) => {
    const item = document.createElement("span"), sign = document.createElement("i");
    if (className) sign.className = className;
    if (fill) {
      sign.style.backgroundColor = fill;
      sign.style.color = ink;
      sign.textContent = letter;
      if (letter) sign.classList.add(`kind-${letter}`);
    }
    item.append(sign);
    item.append(text);
    place.append(item);
    return item;
  };
  for (const kind of Object.keys(data.colours)) {
    const tones = data.colours[kind];
    const item = entry(data.meaning[kind], "", tones[0].fill, kind, tones[0].ink);
    for (const tone of tones.slice(1).reverse()) {
      const sign = document.createElement("i");
      Object.assign(sign.style, { backgroundColor: tone.fill, color: tone.ink });
      sign.className = `kind-${kind}`;
      sign.textContent = kind;
      item.firstChild.after(sign);
    }
  }
  if (data.tones) {
    const tones = document.createElement("span");
    tones.textContent = data.tones;
    place.append(tones);
  }
  for (const { fill, ink, meaning } of Object.values(data.collectives)) entry(meaning, "", fill, "", ink);
  if (!data.simulated) entry("waiting for a message", "wait");
  if (hasPath) entry("critical path", "path");
}

function set() {
  step = data.steps[Number(box.step.value)];
  below = box.below.value === "" ? null : data.below[Number(box.below.value)];
  ends = Math.max(last(step), below ? last(below) : 0);
  hovered = chosen = span = null;
  said.textContent = "";
  showTip(null);
  dock();
}

// What is seen stands in the page's address, so that it can be sent to somebody, and survives a reload.
function remember() {
  clearTimeout(remember.timer);
  remember.timer = setTimeout(() => {
    const state = {
      step: box.step.value, below: box.below.value, arrows: Number(box.arrows.checked), critical: Number(box.critical.checked),
      view: `${view.from.toFixed(3)}-${view.to.toFixed(3)}`,
    };
    if (chosen) state.action = `${chosen.rank}-${chosen.position}`;
    if (span) state.span = `${span.from.toFixed(3)}-${span.to.toFixed(3)}`;
    history.replaceState(null, "", `#${new URLSearchParams(state)}`);
  }, 150);
}

function recall() {
  const state = new URLSearchParams(location.hash.slice(1));
  const pair = (name) => {
    const found = /^(\d+(?:\.\d+)?)-(\d+(?:\.\d+)?)$/.exec(state.get(name) || "");
    return found && [Number(found[1]), Number(found[2])];
  };
  for (const name of ["step", "below"]) {
    if ([...box[name].options].some((each) => each.value === state.get(name))) box[name].value = state.get(name);
  }
  for (const name of ["arrows", "critical"]) if (state.has(name)) box[name].checked = state.get(name) === "1";
  set();
  const seen = pair("view"), action = pair("action"), measured = pair("span");
  if (seen && seen[1] > seen[0]) look(...seen); else fit();
  if (action) choose(...action);
  if (measured) select(...measured);
}

const hasPath = data.steps.some((each) => each.critical.length > 0);
data.steps.forEach((each, number) => option(box.step, number, `${each.number} (${time(each.makespan)})${each.complete ? "" : ", incomplete"}`));
box.step.value = String(data.shown);
data.below.forEach((each, number) => option(box.below, number, each.name));
option(box.below, "", "nothing");
box.step.parentElement.hidden = data.steps.length < 2;
box.below.parentElement.hidden = data.below.length === 0;
box.arrows.parentElement.hidden = data.steps.every((each) => each.messages.length === 0);
box.critical.parentElement.hidden = !hasPath;
legend();
recall();

box.step.addEventListener("change", () => { set(); fit(); });
box.below.addEventListener("change", () => { set(); fit(); });
for (const each of [box.arrows, box.critical]) each.addEventListener("change", () => { draw(); remember(); });
byId("in").addEventListener("click", () => zoom(0.6));
byId("out").addEventListener("click", () => zoom(1 / 0.6));
byId("fit").addEventListener("click", fit);

canvas.addEventListener("wheel", (event) => {
  const sideways = event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY);
  if (!sideways && !event.ctrlKey && !event.metaKey && document.activeElement !== canvas) return;
  event.preventDefault();
  if (sideways) pan((event.deltaX || event.deltaY) / 800);
  else zoom(Math.exp(event.deltaY / 400), at(event.offsetX));
}, { passive: false });

canvas.addEventListener("pointerdown", (event) => {
  drag = { x: event.offsetX, now: event.offsetX, from: view.from, to: view.to, select: event.shiftKey, moved: false };
  canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener("pointermove", (event) => {
  if (drag) {
    drag.now = event.offsetX;
    drag.moved = drag.moved || Math.abs(drag.now - drag.x) > 3;
    const by = ((drag.x - drag.now) / width()) * (drag.to - drag.from);
    if (drag.select) select(Math.min(at(drag.x), at(drag.now)), Math.max(at(drag.x), at(drag.now)));
    else if (drag.moved) look(drag.from + by, drag.to + by);
    showTip(null);
    return;
  }
  hovered = find(event.offsetX, event.offsetY);
  showTip(hovered, event.offsetX, event.offsetY);
  draw();
});
canvas.addEventListener("pointerup", (event) => {
  const done = drag;
  drag = null;
  if (done && !done.moved) {
    const found = find(event.offsetX, event.offsetY);
    if (found && found.measured && !found.collective) choose(found.rank, found.position);
  }
  draw();
});
canvas.addEventListener("pointercancel", () => { drag = null; draw(); });
canvas.addEventListener("pointerleave", () => { hovered = null; showTip(null); draw(); });
canvas.addEventListener("dblclick", (event) => zoom(0.4, at(event.offsetX)));
canvas.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  showTip(hovered = null);  // what the pointer is on moves away from below it
  const { key } = event;
  const letter = key.toLowerCase();
  if (key === "+" || key === "=" || letter === "w") zoom(0.6);
  else if (key === "-" || key === "_" || letter === "s") zoom(1 / 0.6);
  else if (letter === "a" || letter === "d") pan(letter === "a" ? -0.2 : 0.2);
  else if (letter === "m" && chosen) select(chosen.action[3], chosen.action[4]);
  else if (letter === "z" && span) look(span.from, span.to);
  else if (key === "0" || key === "f") fit();
  else if (key === "Home") choose(chosen ? chosen.rank : 0, 0);
  else if (key === "End") choose(chosen ? chosen.rank : 0, Infinity);
  else if (event.shiftKey && (key === "ArrowLeft" || key === "ArrowRight")) pan(key === "ArrowLeft" ? -0.2 : 0.2);
  else if (key.startsWith("Arrow")) goTo(key);
  else if (key === "Escape") { chosen = span = null; said.textContent = ""; dock(); draw(); }
  else return;
  event.preventDefault();
});
new ResizeObserver(draw).observe(frame);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
