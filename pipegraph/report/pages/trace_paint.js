// How the timeline is painted: the second part.

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
