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
  mark(pen, hovered, false);
  mark(pen, chosen, true);
  if (span) measure(pen, height);
  pen.restore();
  const count = (rows) => String(rows.reduce((sum, row) => sum + row.length, 0));
  canvas.dataset.drawn = count(step.rows);
  canvas.dataset.beside = count(step.beside);
}

function axis(pen, height) {
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  const seen = view.to - view.from, rough = (seen / Math.max(width() / 110, 2));
  const power = 10 ** Math.floor(Math.log10(rough));
  const distance = power * [1, 2, 5, 10].find((factor) => power * factor >= rough);
  // Far into a step the ticks count from a round time on its left: 1.510 s + 0.5 ms.
  const coarse = 10 * power, base = view.from > 10 * seen ? Math.floor(view.from / coarse) * coarse : 0;
  const [size, name] = unitOf(base ? Math.max(seen, distance) : view.to), digits = decimals(distance, size);
  pen.textAlign = "center";
  for (let tick = Math.ceil(view.from / distance) * distance; tick <= view.to; tick += distance) {
    pen.strokeStyle = colours.grid;
    pen.beginPath();
    pen.moveTo(Math.round(x(tick)) + 0.5, TOP - 6);
    pen.lineTo(Math.round(x(tick)) + 0.5, height - 8);
    pen.stroke();
    pen.fillStyle = colours.quiet;
    const text = `${((tick - base) / size).toFixed(digits)}${base && name ? ` ${name}` : ""}`;
    if (x(tick) < frame.clientWidth - 18) pen.fillText(text, x(tick), 9);
  }
  pen.textAlign = "left";
  pen.fillStyle = colours.quiet;
  const from = base ? `${moment(base, 1000 * coarse)} +` : narrow() ? name : name ? `time in ${name}` : "time";
  pen.clearRect(0, 0, pen.measureText(from).width + 6, 18);
  pen.fillText(from, 0, 9);
  data.ranks.forEach((rank, number) => {
    const y = top(number), one = rank.stages.length === 1;
    pen.font = "600 13px system-ui, sans-serif";
    pen.fillStyle = colours.text;
    pen.fillText(`rank ${number}`, 0, y + 8);
    pen.font = "11px system-ui, sans-serif";
    pen.fillStyle = colours.quiet;
    const held = rank.stages.length > 3 ? `${rank.stages.slice(0, 2).join(", ")} … ${rank.stages.at(-1)}` : rank.stages.join(", ");
    pen.fillText(narrow() ? held : `stage${one ? "" : "s"} ${held}`, 0, y + 22);
    if (below && !narrow()) pen.fillText(below.short, 0, y + placeOf(false)[0] + 8);
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
  collectives(pen, step.beside[rank], y + placeOf(true, true)[0], 1);
  if (below) {
    const [under] = placeOf(false);
    pen.fillStyle = colours.lane;
    pen.fillRect(gutter(), y + under, x(below.makespan) - gutter(), BELOW);
    boxes(pen, below.rows[rank], y + under, BELOW, 0.72);
    collectives(pen, below.beside[rank], y + placeOf(false, true)[0], 0.72);
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
  pen.font = `${height > 20 ? 12 : 11}px system-ui, sans-serif`;
  for (let n = firstVisible(actions); n < actions.length && actions[n][3] <= view.to; n++) {
    const [kind, stage, microbatch, start, end] = actions[n];
    const left = x(start), wide = x(end) - left, gap = wide < 3 ? 0 : Math.min(1, wide / 4);
    const look = data.colours[kind][data.chunks[stage]];
    pen.globalAlpha = opacity;
    pen.fillStyle = look.fill;
    pen.beginPath();
    pen.roundRect(left, y, Math.max(wide - gap, 0.3), height, Math.min(2.5, wide / 8));
    pen.fill();
    pattern(pen, kind, left, y, Math.max(wide - gap, 0.3), height, look.ink);
    const full = `${stage}${kind}${microbatch}`, short = String(microbatch);
    const from = Math.max(left, gutter()), to = Math.min(left + wide, gutter() + width()), seen = to - from;
    const text = seen > full.length * 7.4 + 10 ? full : seen > short.length * 7 + 3 ? short : "";
    if (text) {
      pen.globalAlpha = 1;
      pen.fillStyle = opacity < 1 ? inkOn(look.fill, opacity) : look.ink;
      pen.fillText(text, (from + to) / 2, y + height / 2 + 0.5);
    }
  }
  pen.globalAlpha = 1;
}

// What a rank's collectives gather and reduce, with the number of the stage.
function collectives(pen, row, y, opacity) {
  pen.textAlign = "center";
  pen.font = "11px system-ui, sans-serif";
  for (let n = firstVisible(row); n < row.length && row[n][3] <= view.to; n++) {
    const [kind, stage, , start, end] = row[n], look = data.collectives[kind];
    const left = x(start), wide = x(end) - left, height = BESIDE - 2;
    pen.globalAlpha = opacity;
    pen.fillStyle = look.fill;
    pen.beginPath();
    pen.roundRect(left, y + 1, Math.max(wide - Math.min(1, wide / 4), 0.3), height, Math.min(2.5, wide / 8));
    pen.fill();
    const text = String(stage), from = Math.max(left, gutter()), to = Math.min(left + wide, gutter() + width());
    if (to - from > text.length * 6 + 3) {
      pen.globalAlpha = 1;
      pen.fillStyle = opacity < 1 ? inkOn(look.fill, opacity) : look.ink;
      pen.fillText(text, (from + to) / 2, y + 1 + height / 2 + 0.5);
    }
  }
  pen.globalAlpha = 1;
}

// I is hatched, W has a bar at its foot, and B, which is both, has both: a box too narrow for its letter says what it is
// without colour, too.
function pattern(pen, kind, left, y, wide, height, ink) {
  if (kind === "F" || wide < 2) return;
  pen.save();
  pen.beginPath();
  pen.rect(left, y, wide, height);
  pen.clip();
  pen.strokeStyle = pen.fillStyle = ink;
  if (kind !== "W") {
    pen.globalAlpha *= 0.28;
    const first = Math.max(left, gutter()) - height, last = Math.min(left + wide, gutter() + width());
    pen.beginPath();
    for (let at = Math.floor(first / 6) * 6; at < last; at += 6) {
      pen.moveTo(at, y + height);
      pen.lineTo(at + height, y);
    }
    pen.stroke();
    pen.globalAlpha /= 0.28;
  }
  if (kind !== "I") {
    pen.globalAlpha *= 0.6;
    pen.fillRect(left, y + height - 3, wide, 3);
  }
  pen.restore();
}

// Black or white on a colour that lets the card shine through, whichever has more contrast (WCAG 2).
function inkOn(fill, opacity) {
  const channels = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16) / 255);
  const under = channels(colours.card), mixed = channels(fill).map((part, n) => part * opacity + under[n] * (1 - opacity));
  const linear = mixed.map((part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
  const luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
  return 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.05 ? "#ffffff" : "#000000";
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

// One frame around actions that follow one another on a rank: frames of their own would cover narrow ones.
function criticalPath(pen) {
  pen.strokeStyle = colours.accent;
  pen.lineWidth = 2;
  const stretches = [];
  for (const [rank, position] of step.critical) {
    const [, , , start, end] = step.rows[rank][position], before = stretches.at(-1);
    if (before && before.rank === rank && before.last === position - 1) Object.assign(before, { end, last: position });
    else stretches.push({ rank, start, end, last: position });
  }
  stretches.forEach(({ rank, start, end }, number) => {
    const y = top(rank), before = stretches[number - 1];
    if (before && before.rank !== rank) {
      const down = rank > before.rank;
      pen.beginPath();
      pen.moveTo(x(before.end), top(before.rank) + (down ? MEASURED : 0));
      pen.lineTo(x(start), y + (down ? 0 : MEASURED));
      pen.stroke();
    }
    pen.strokeRect(x(start) + 1, y + 1, Math.max(x(end) - x(start) - 2.5, 0.5), MEASURED - 2);
  });
  pen.lineWidth = 1;
}

// A selection has a double frame outside of its box, and what is pointed at a thin one: neither looks like the critical path.
function mark(pen, found, selected) {
  if (!found) return;
  const [under, height] = placeOf(found.measured, found.collective), y = top(found.rank) + under;
  const left = x(found.action[3]), wide = Math.max(x(found.action[4]) - left, 1);
  if (selected) {
    pen.lineWidth = 5;
    pen.strokeStyle = colours.card;
    pen.strokeRect(left - 1, y - 1, wide + 2, height + 2);
    pen.lineWidth = 2.5;
    pen.strokeStyle = colours.text;
    pen.strokeRect(left - 2, y - 2, wide + 4, height + 4);
    pen.fillStyle = colours.text;
    pen.beginPath();
    pen.moveTo(left + wide / 2 - 5, y - 10);
    pen.lineTo(left + wide / 2 + 5, y - 10);
    pen.lineTo(left + wide / 2, y - 4);
    pen.fill();
  } else {
    pen.lineWidth = 1.5;
    pen.strokeStyle = colours.text;
    pen.strokeRect(left, y, wide, height);
  }
  pen.lineWidth = 1;
}

function measure(pen, height) {
  const left = x(span.from), right = x(span.to), text = time(span.to - span.from);
  pen.fillStyle = pen.strokeStyle = colours.text;
  pen.globalAlpha = 0.1;
  pen.fillRect(left, 0, right - left, height);
  pen.globalAlpha = 1;
  for (const edge of [left, right]) {
    pen.beginPath();
    pen.moveTo(edge, 0);
    pen.lineTo(edge, height);
    pen.stroke();
  }
  pen.font = "600 12px system-ui, sans-serif";
  pen.textAlign = "center";
  const wide = pen.measureText(text).width + 10;
  const middle = Math.min(Math.max((left + right) / 2, gutter() + wide / 2), gutter() + width() - wide / 2);
  pen.fillStyle = colours.card;
  pen.fillRect(middle - wide / 2, height - 16, wide, 16);
  pen.fillStyle = colours.text;
  pen.fillText(text, middle, height - 8);
}
