"use strict";
// The timeline of trace.html.jinja. Times in the data are microseconds from the start of a step.
//   actions: [kind, stage, microbatch, start, end]      of each rank, in order
//   messages: [from rank, to rank, handed over, waited for from, there, kind, stage, peer, microbatch, bytes]
(() => {
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

  // Geometry -----------------------------------------------------------------------------------------------------

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

  // Drawing ------------------------------------------------------------------------------------------------------

  function draw() {
    if (pending) return;
    pending = true;
    requestAnimationFrame(() => { pending = false; paint(); });
  }

  function paint() {
    const ratio = window.devicePixelRatio || 1, height = top(data.ranks.length) + 4;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(frame.clientWidth * ratio);
    canvas.height = Math.round(height * ratio);
    const style = getComputedStyle(document.documentElement);
    for (const name of ["text", "quiet", "lane", "grid", "arrow", "accent", "wait", "card"]) {
      colours[name] = style.getPropertyValue(`--${name}`).trim();
    }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, frame.clientWidth, height);
    axis(pen, height);
    pen.save();
    pen.beginPath();
    pen.rect(gutter(), 0, width() + 1, height);
    pen.clip();
    data.ranks.forEach((_, rank) => row(pen, rank));
    if (box.arrows.checked) arrows(pen);
    if (box.critical.checked) criticalPath(pen);
    mark(pen, hovered, colours.text);
    mark(pen, chosen, colours.accent);
    if (drag && drag.select) {
      pen.fillStyle = colours.accent;
      pen.globalAlpha = 0.15;
      pen.fillRect(drag.x, 0, drag.now - drag.x, height);
    }
    pen.restore();
    canvas.dataset.drawn = String(step.rows.reduce((sum, actions) => sum + actions.length, 0));
  }

  function axis(pen, height) {
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const span = view.to - view.from, rough = (span / Math.max(width() / 110, 2));
    const power = 10 ** Math.floor(Math.log10(rough));
    const distance = power * [1, 2, 5, 10].find((factor) => power * factor >= rough);
    const digits = Math.max(0, -Math.floor(Math.log10(distance / data.unit.microseconds) + 1e-9));
    pen.textAlign = "center";
    for (let tick = Math.ceil(view.from / distance) * distance; tick <= view.to; tick += distance) {
      pen.strokeStyle = colours.grid;
      pen.beginPath();
      pen.moveTo(Math.round(x(tick)) + 0.5, TOP - 6);
      pen.lineTo(Math.round(x(tick)) + 0.5, height - 8);
      pen.stroke();
      pen.fillStyle = colours.quiet;
      if (x(tick) < frame.clientWidth - 18) pen.fillText((tick / data.unit.microseconds).toFixed(digits), x(tick), 9);
    }
    pen.textAlign = "left";
    pen.fillStyle = colours.quiet;
    pen.fillText(narrow() ? data.unit.name : `time in ${data.unit.name}`, 0, 9);
    data.ranks.forEach((rank, number) => {
      const y = top(number), one = rank.stages.length === 1;
      pen.font = "600 13px system-ui, sans-serif";
      pen.fillStyle = colours.text;
      pen.fillText(`rank ${number}`, 0, y + 8);
      pen.font = "11px system-ui, sans-serif";
      pen.fillStyle = colours.quiet;
      const held = rank.stages.length > 3 ? `${rank.stages.slice(0, 2).join(", ")} … ${rank.stages.at(-1)}` : rank.stages.join(", ");
      pen.fillText(narrow() ? held : `stage${one ? "" : "s"} ${held}`, 0, y + 22);
      if (below && !narrow()) pen.fillText(below.short, 0, y + MEASURED + 10);
    });
  }

  function row(pen, rank) {
    const y = top(rank);
    pen.fillStyle = colours.lane;
    pen.fillRect(gutter(), y, x(step.makespan) - gutter(), MEASURED);
    pen.fillStyle = colours.wait;
    for (const message of step.messages) {
      if (message[1] === rank && message[4] > view.from && message[3] < view.to) {
        pen.fillRect(x(message[3]), y + MEASURED / 2 - 3, x(message[4]) - x(message[3]), 6);
      }
    }
    boxes(pen, step.rows[rank], y, MEASURED, 1);
    if (below) {
      pen.fillStyle = colours.lane;
      pen.fillRect(gutter(), y + MEASURED + 2, x(below.makespan) - gutter(), BELOW);
      boxes(pen, below.rows[rank], y + MEASURED + 2, BELOW, 0.72);
    }
    if (step.rows[rank].length === 0) {
      pen.fillStyle = colours.quiet;
      pen.font = "12px system-ui, sans-serif";
      pen.textAlign = "left";
      pen.fillText("no trace of this rank", gutter() + 8, y + MEASURED / 2);
    }
  }

  function firstVisible(actions) {
    let low = 0, high = actions.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (actions[middle][4] < view.from) low = middle + 1; else high = middle;
    }
    return low;
  }

  function boxes(pen, actions, y, height, opacity) {
    pen.textAlign = "center";
    pen.font = `${height > 20 ? 12 : 10}px system-ui, sans-serif`;
    for (let n = firstVisible(actions); n < actions.length && actions[n][3] <= view.to; n++) {
      const [kind, stage, microbatch, start, end] = actions[n];
      const left = x(start), wide = x(end) - left, gap = Math.min(1, wide / 4);
      const look = data.colours[kind][data.chunks[stage]];
      pen.globalAlpha = opacity;
      pen.fillStyle = look.fill;
      pen.beginPath();
      pen.roundRect(left, y, Math.max(wide - gap, 0.3), height, Math.min(2.5, wide / 8));
      pen.fill();
      const full = `${stage}${kind}${microbatch}`, short = String(microbatch);
      const text = wide > full.length * 7.4 + 10 ? full : wide > short.length * 7 + 3 ? short : "";
      if (text) {
        pen.globalAlpha = 1;
        pen.fillStyle = opacity < 1 && look.ink === "#ffffff" ? "#ffffff" : look.ink;
        const from = Math.max(left, gutter()), to = Math.min(left + wide, gutter() + width());
        pen.fillText(text, Math.min(Math.max((from + to) / 2, left + 8), left + wide - 8), y + height / 2 + 0.5);
      }
    }
    pen.globalAlpha = 1;
  }

  function arrows(pen) {
    const shown = step.messages.filter((message) => message[4] >= view.from && message[2] <= view.to);
    const focus = hovered && hovered.measured ? hovered : chosen;
    const many = shown.length > MOST_ARROWS;
    for (const message of shown) {
      const [from, to, start, , end, kind, stage, peer, microbatch] = message;
      const backward = kind === "SEND_B";
      const near = focus && microbatch === focus.action[2] &&
        (backward ? focus.action[0] !== "F" : focus.action[0] === "F") && (stage === focus.action[1] || peer === focus.action[1]);
      if (many && !near) continue;
      const down = to > from;
      const y1 = top(from) + (down ? MEASURED : 0), y2 = top(to) + (down ? 0 : MEASURED);
      pen.strokeStyle = pen.fillStyle = near ? colours.text : colours.arrow;
      pen.globalAlpha = near ? 1 : Math.min(0.75, 0.2 + 40 / shown.length);
      pen.lineWidth = near ? 1.8 : 1;
      line(pen, x(start), y1, x(end), y2);
    }
    pen.globalAlpha = 1;
    pen.lineWidth = 1;
  }

  function line(pen, x1, y1, x2, y2) {
    pen.beginPath();
    pen.moveTo(x1, y1);
    pen.lineTo(x2, y2);
    pen.stroke();
    const angle = Math.atan2(y2 - y1, x2 - x1);
    pen.beginPath();
    pen.moveTo(x2, y2);
    pen.lineTo(x2 - 6 * Math.cos(angle - 0.4), y2 - 6 * Math.sin(angle - 0.4));
    pen.lineTo(x2 - 6 * Math.cos(angle + 0.4), y2 - 6 * Math.sin(angle + 0.4));
    pen.fill();
  }

  function criticalPath(pen) {
    pen.strokeStyle = colours.accent;
    pen.lineWidth = 2;
    let before = null;
    for (const [rank, position] of step.critical) {
      const action = step.rows[rank][position], y = top(rank);
      if (before && before.rank !== rank) {
        const down = rank > before.rank;
        pen.beginPath();
        pen.moveTo(x(before.end), top(before.rank) + (down ? MEASURED : 0));
        pen.lineTo(x(action[3]), y + (down ? 0 : MEASURED));
        pen.stroke();
      }
      pen.strokeRect(x(action[3]) + 1, y + 1, Math.max(x(action[4]) - x(action[3]) - 2.5, 0.5), MEASURED - 2);
      before = { rank, end: action[4] };
    }
    pen.lineWidth = 1;
  }

  function mark(pen, found, colour) {
    if (!found) return;
    const y = top(found.rank) + (found.measured ? 0 : MEASURED + 2);
    pen.strokeStyle = colour;
    pen.lineWidth = 2;
    pen.strokeRect(x(found.action[3]), y, Math.max(x(found.action[4]) - x(found.action[3]), 1), found.measured ? MEASURED : BELOW);
    pen.lineWidth = 1;
  }

  // What an action is --------------------------------------------------------------------------------------------

  function find(pixelX, pixelY) {
    if (pixelX < gutter()) return null;
    const rank = Math.floor((pixelY - TOP) / lane());
    if (rank < 0 || rank >= data.ranks.length) return null;
    const inside = pixelY - top(rank), measured = inside <= MEASURED;
    if (!measured && (!below || inside > MEASURED + 2 + BELOW)) return null;
    const actions = measured ? step.rows[rank] : below.rows[rank], when = at(pixelX);
    const position = actions.findIndex((action) => action[3] <= when && when < action[4]);
    return position < 0 ? null : { rank, position, measured, action: actions[position] };
  }

  function facts(found) {
    const [kind, stage, microbatch, start, end] = found.action;
    const lines = [["from", `${time(start)} to ${time(end)}`], [found.measured ? "took" : "takes", time(end - start)]];
    const other = (found.measured ? (below ? below.rows : []) : step.rows)[found.rank] || [];
    const same = other.find((action) => action[0] === kind && action[1] === stage && action[2] === microbatch);
    if (same) {
      const name = found.measured ? below.short : "measured";
      lines.push([name, `${time(same[4] - same[3])}, from ${time(same[3])}`]);
    }
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

  function showTip(found, pixelX, pixelY) {
    tip.hidden = !found;
    if (!found) return;
    const { title, lines } = facts(found);
    tip.replaceChildren();
    const name = document.createElement("b");
    name.textContent = `${title}${found.measured ? "" : `, ${below.short}`}`;
    const table = document.createElement("table");
    for (const cells of lines) {
      const line = table.insertRow();
      for (const cell of cells) line.insertCell().textContent = cell;
    }
    tip.append(name, table);
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

  // Controls -----------------------------------------------------------------------------------------------------

  function legend() {
    const place = byId("legend");
    const entry = (text, className, fill, letter, ink) => {
      const item = document.createElement("span"), sign = document.createElement("i");
      if (className) sign.className = className;
      if (fill) { sign.style.background = fill; sign.style.color = ink; sign.textContent = letter; }
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
        Object.assign(sign.style, { background: tone.fill, color: tone.ink });
        sign.textContent = kind;
        item.firstChild.after(sign);
      }
    }
    if (data.tones) {
      const tones = document.createElement("span");
      tones.textContent = data.tones;
      place.append(tones);
    }
    entry("waiting for a message", "wait");
    entry("critical path", "path");
  }

  function set() {
    step = data.steps[Number(box.step.value)];
    below = box.below.value === "" ? null : data.below[Number(box.below.value)];
    hovered = chosen = null;
    said.textContent = "";
    showTip(null);
  }

  data.steps.forEach((each, number) => option(box.step, number, `${each.number} (${time(each.makespan)})${each.complete ? "" : ", incomplete"}`));
  box.step.value = String(data.shown);
  data.below.forEach((each, number) => option(box.below, number, each.name));
  option(box.below, "", "nothing");
  set();
  legend();
  fit();

  box.step.addEventListener("change", () => { set(); fit(); });
  box.below.addEventListener("change", () => { set(); fit(); });
  box.arrows.addEventListener("change", draw);
  box.critical.addEventListener("change", draw);
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
      if (drag.select) draw(); else if (drag.moved) look(drag.from + by, drag.to + by);
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
    if (done && done.select && done.moved) look(Math.min(at(done.x), at(done.now)), Math.max(at(done.x), at(done.now)));
    else if (done && !done.moved) {
      const found = find(event.offsetX, event.offsetY);
      if (found && found.measured) choose(found.rank, found.position);
    }
    draw();
  });
  canvas.addEventListener("pointercancel", () => { drag = null; draw(); });
  canvas.addEventListener("pointerleave", () => { hovered = null; showTip(null); draw(); });
  canvas.addEventListener("dblclick", (event) => zoom(0.4, at(event.offsetX)));
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { key } = event;
    if (key === "+" || key === "=") zoom(0.6);
    else if (key === "-" || key === "_") zoom(1 / 0.6);
    else if (key === "0" || key === "f") fit();
    else if (key === "Home") choose(chosen ? chosen.rank : 0, 0);
    else if (key === "End") choose(chosen ? chosen.rank : 0, Infinity);
    else if (event.shiftKey && (key === "ArrowLeft" || key === "ArrowRight")) pan(key === "ArrowLeft" ? -0.2 : 0.2);
    else if (key.startsWith("Arrow")) goTo(key);
    else if (key === "Escape") { chosen = null; said.textContent = ""; draw(); }
    else return;
    event.preventDefault();
  });
  new ResizeObserver(draw).observe(frame);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
