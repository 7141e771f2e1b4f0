"use strict";
// Plays runs on one clock. All times are seconds since a run began; `spans` are pairs of begin and end.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const length = Math.max(...data.runs.map((run) => run.seconds));
const FADE_S = 0.25, GLYPHS = { died: "✕", left: "◁", joined: "▷", cut: "≠", slowed: "…" };
let now = 0, playing = false, speed = data.speed, last = null, colours = {};

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const percent = (share, digits = 0) => `${(100 * share).toFixed(digits)} %`;
const put = (element, words) => { if (element.textContent !== words) element.textContent = words; };

// The last place in sorted numbers, `wide` apart, that is at most `value`; -1: none.
function before(numbers, value, wide = 1) {
  let low = 0, high = Math.floor((numbers.length + wide - 1) / wide);
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[middle * wide] <= value) low = middle + 1; else high = middle;
  }
  return low - 1;
}

// A round distance between ticks, for about `most` of them.
function round(span, most) {
  const rough = span / most, power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 2.5, 5, 10].find((one) => one * power >= rough * 0.999);
}

const digits = (step) => { for (let k = 0; k < 6; k++) if (Math.abs(step * 10 ** k - Math.round(step * 10 ** k)) < 1e-6) return k; return 6; };

function ticks(from, to, most) {
  const step = round(to - from || 1, most), found = [];
  for (let k = Math.ceil(from / step - 1e-6); k * step <= to * (1 + 1e-9) + 1e-12; k++) found.push(k * step);
  return [found, step];
}

function prepare(run) {
  run.busy = run.spans.map((spans) => {  // seconds of computing up to the end of each span
    const sums = [0];
    for (let k = 0; k < spans.length; k += 2) sums.push(sums[k / 2] + spans[k + 1] - spans[k]);
    return sums;
  });
  const lengths = run.busy.map((sums, k) => run.spans[k].length ? sums.at(-1) / (run.spans[k].length / 2) : 0);
  const usual = [...lengths].filter(Boolean).sort((a, b) => a - b)[Math.floor(lengths.length / 2)] || 0;
  run.slow = lengths.map((one) => one > 1.8 * usual || (lengths.length < 3 && one > 1.8 * Math.min(...lengths)));
  run.begins = run.meetings.map((one) => one[0]);
  run.longest = run.meetings.reduce((most, one) => Math.max(most, one[1]), 0);
  run.curve = run[data.measure] || [];
  run.times = run.curve.map((one) => one[0]);
}

// here, away (not yet, dead, gone) or done: it has ended as it should.
function presence(run, rank, at) {
  const lives = run.lives[rank];
  if (lives.some(([from, to]) => from <= at && at <= to)) return "here";
  return lives.length && at > lives.at(-1)[1] && !run.gone.includes(rank) ? "done" : "away";
}

// Where a worker is: the span it is in, how far, and what it has done.
function state(run, rank, at) {
  const spans = run.spans[rank], k = before(spans, at, 2), end = spans[2 * k + 1];
  const inside = k >= 0 && at < end;
  const busy = k < 0 ? 0 : run.busy[rank][k] + Math.min(at, end) - spans[2 * k];
  return { steps: inside ? k : k + 1, inside, busy, share: inside ? (at - spans[2 * k]) / (end - spans[2 * k]) : 0 };
}

const cutOff = (run, rank, at) => run.cut.some(([whose, from, to]) => whose === rank && from <= at && at < to);

function figures(run, at) {
  let steps = 0, busy = 0, there = 0;
  for (let rank = 0; rank < run.spans.length; rank++) {
    const one = state(run, rank, at);
    steps += one.steps; busy += one.busy;
    for (const [from, to] of run.lives[rank]) there += Math.max(0, Math.min(at, to) - from);
  }
  for (const [, from, to] of run.cut) busy += Math.max(0, Math.min(at, to) - from);
  const k = before(run.times, at);
  return { steps, waiting: there ? Math.max(0, 1 - busy / there) : 0, value: k < 0 ? null : run.curve[k][1] };
}

// -- drawing --

function sized(canvas, height) {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth, pen = canvas.getContext("2d");
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "12px system-ui, sans-serif";
  return [pen, width];
}

function graph(run, canvas) {
  const n = run.spans.length, height = 216, [pen, width] = sized(canvas, height), at = Math.min(now, run.seconds);
  const radius = 84, size = Math.max(4, Math.min(15, 150 / n)), places = [], middle = [width / 2, height / 2];
  for (let rank = 0; rank < n; rank++) {
    const angle = 2 * Math.PI * rank / n - Math.PI / 2;
    places.push([middle[0] + radius * Math.cos(angle), middle[1] + radius * Math.sin(angle)]);
  }
  const line = (a, b, strength) => {
    pen.globalAlpha = strength; pen.beginPath(); pen.moveTo(...places[a]); pen.lineTo(...places[b]); pen.stroke();
  };
  pen.strokeStyle = pen.fillStyle = colours.pulse; pen.lineWidth = 1.5;
  const shown = Math.max(FADE_S * speed, windowS() / 60), ended = now >= run.seconds;
  for (let k = ended ? -1 : before(run.begins, at), most = n; k >= 0 && most > 0; k--) {  // the last ones alone: more is a tangle
    const [begin, took, members] = run.meetings[k], since = at - begin, pulse = Math.max(took, shown / 2);
    if (since > pulse + shown) { if (since > 8 * shown + run.longest) break; continue; }
    most--;
    const strength = Math.max(0.12, 1 - Math.max(0, since - pulse) / shown);
    if (members.length > 2 && members.length > 0.7 * n) {  // all meet: the ring flashes
      pen.globalAlpha = 0.75 * strength; pen.lineWidth = 5; pen.beginPath(); pen.arc(...middle, radius, 0, 7); pen.stroke();
      pen.lineWidth = 1.5; break;
    }
    members.forEach((a, j) => line(a, members[(j + 1) % members.length], strength));
    if (since <= pulse) members.forEach((a, j) => {
      const [from, to] = [places[a], places[members[(j + 1) % members.length]]], share = since / pulse;
      pen.globalAlpha = 1; pen.beginPath();
      pen.arc(from[0] + share * (to[0] - from[0]), from[1] + share * (to[1] - from[1]), 3.2, 0, 7); pen.fill();
    });
  }
  pen.globalAlpha = 1; pen.textAlign = "center"; pen.textBaseline = "middle"; pen.lineWidth = Math.min(4, size / 2);
  const rim = size + pen.lineWidth;
  for (let rank = 0; rank < n; rank++) {
    const [x, y] = places[rank], where = presence(run, rank, at), one = state(run, rank, at);
    const busy = one.inside || where === "done" || ended || cutOff(run, rank, at);
    const colour = where === "away" ? colours.dead : run.slow[rank] ? colours.slow : colours.computing;
    pen.fillStyle = colours.card; pen.beginPath(); pen.arc(x, y, rim + 2, 0, 7); pen.fill();
    pen.strokeStyle = colours.line; pen.beginPath(); pen.arc(x, y, rim, 0, 7); pen.stroke();
    if (where === "here" && one.inside && !ended) {
      pen.strokeStyle = colour; pen.beginPath();
      pen.arc(x, y, rim, -Math.PI / 2, -Math.PI / 2 + 2 * Math.PI * one.share); pen.stroke();
    }
    pen.fillStyle = where === "here" && !busy ? colours.waiting : colour;
    pen.beginPath(); pen.arc(x, y, size, 0, 7); pen.fill();
    if (size > 7) { pen.fillStyle = where === "here" && !busy ? colours.text : "#fff"; pen.fillText(rank, x, y + 0.5); }
  }
  if (ended) {
    pen.font = "600 15px system-ui, sans-serif"; pen.fillStyle = colours.text;
    pen.fillText("done", middle[0], middle[1] - 10); pen.fillText(`after ${spoken(run.seconds)}`, middle[0], middle[1] + 10);
  }
}

const spoken = (seconds) => `${seconds.toFixed(seconds < 1 ? 2 : seconds < 20 ? 1 : 0)} s`;
const windowS = () => Math.min(length, 2.5 * speed);

function lanes(run, canvas) {
  const n = run.spans.length, row = n > 16 ? Math.max(4, 128 / n) : n > 8 ? 8 : 18, gap = row > 8 ? 3 : row > 5 ? 2 : 1, left = 22;
  const [pen, width] = sized(canvas, n * row + 18), wide = windowS();
  const at = Math.min(now, run.seconds), from = Math.max(0, at - wide);
  const x = (moment) => left + (width - left - 1) * (moment - from) / wide;
  pen.fillStyle = colours.soft; pen.textAlign = "right"; pen.textBaseline = "middle";
  if (row < 12) pen.font = "9px system-ui, sans-serif";
  for (let rank = 0; rank < n; rank += row >= 8 ? 1 : 4) pen.fillText(rank, left - 6, rank * row + (row - gap) / 2 + 0.5);
  pen.font = "12px system-ui, sans-serif";
  const bar = (a, b, top, cut) => {
    const begin = x(Math.max(from, a)), end = x(Math.min(at, b)), wide = end - begin;
    if (wide > 0) pen.fillRect(begin, top, cut && wide > 3 ? wide - 1 : Math.max(0.6, wide), row - gap);
  };
  for (let rank = 0; rank < n; rank++) {
    const top = rank * row, spans = run.spans[rank];
    pen.fillStyle = colours.waiting;
    for (const [born, died] of run.lives[rank]) bar(born, died, top, false);
    pen.fillStyle = colours.cut;
    for (const [whose, begin, end] of run.cut) if (whose === rank && end > from) bar(begin, end, top, false);
    pen.fillStyle = run.slow[rank] ? colours.slow : colours.computing;
    for (let k = Math.max(0, before(spans, from, 2)); 2 * k < spans.length && spans[2 * k] < at; k++)
      if (spans[2 * k + 1] > from) bar(spans[2 * k], spans[2 * k + 1], top, true);
  }
  pen.fillStyle = colours.text; pen.textAlign = "center"; pen.textBaseline = "middle";
  for (const [moment, rank, what] of run.marks) if (from <= moment && moment <= at)
    pen.fillText(GLYPHS[what], Math.max(left + 5, Math.min(width - 6, x(moment))), rank * row + (row - gap) / 2);
  pen.fillRect(x(at) - 0.5, 0, 1.5, n * row);  // where we are
  pen.fillStyle = colours.soft; pen.textBaseline = "bottom";
  for (const [moment, align] of [[from, "left"], [from + wide, "right"]]) {
    pen.textAlign = align; pen.fillText(`${moment.toFixed(wide < 5 ? 1 : 0)} s`, x(moment), n * row + 17);
  }
}

// Where things are in the race.
function scales() {
  const width = $("curves").clientWidth, height = 176, left = 46, right = width < 500 ? 84 : 110, bottom = 20;
  const values = data.runs.flatMap((run) => run.curve.map((one) => one[1]));
  let low = Math.min(...values), high = Math.max(...values, data.measure === "accuracy" && data.target || -Infinity);
  const log = data.measure === "loss" && low > 0 && high / low > 30, f = log ? Math.log10 : (value) => value;
  let marks, words;
  if (log) {
    marks = []; for (let k = Math.floor(f(low)); k <= Math.ceil(f(high)); k++) marks.push(10 ** k);
    [low, high] = [marks[0], marks.at(-1)]; words = (value) => value >= 1e5 || value < 1e-3 ? value.toExponential(0) : `${Number(value.toPrecision(1))}`;
  } else if (data.measure === "accuracy" && high - low > 0.4) {
    [low, high] = [0, 1]; marks = [0, 0.25, 0.5, 0.75, 1]; words = (value) => percent(value);
  } else {
    const step = round(high - low || 0.1, 4), rate = data.measure === "accuracy" ? 100 : 1;
    low = step * Math.floor(low / step + 1e-9); high = step * Math.ceil(high / step - 1e-9) || low + step;
    if (high <= low) high = low + step;
    [marks] = ticks(low, high, Math.round((high - low) / step));
    words = (value) => rate === 100 ? percent(value, digits(step * 100)) : value.toFixed(digits(step));
  }
  return { width, height, left, right, bottom, marks, words,
    x: (at) => left + (width - left - right) * at / length,
    y: (value) => 8 + (height - bottom - 8) * (f(high) - f(Math.max(value, log ? low : -Infinity))) / (f(high) - f(low)) };
}

function axes(pen, at) {
  const end = at.width - at.right;
  pen.strokeStyle = colours.line; pen.fillStyle = colours.soft; pen.lineWidth = 1; pen.textBaseline = "middle"; pen.textAlign = "right";
  const rule = (y) => { pen.beginPath(); pen.moveTo(at.left, y); pen.lineTo(end, y); pen.stroke(); };
  for (const value of at.marks) { rule(at.y(value)); pen.fillText(at.words(value), at.left - 6, at.y(value)); }
  pen.textBaseline = "bottom"; pen.textAlign = "center";
  const [moments, step] = ticks(0, length, at.width < 500 ? 3 : 5);
  for (const moment of moments) pen.fillText(`${moment.toFixed(digits(step))} s`, at.x(moment), at.height - 2);
  if (data.target && data.measure === "accuracy") {
    const y = at.y(data.target);
    pen.strokeStyle = colours.text; pen.fillStyle = colours.text; pen.setLineDash([5, 4]); rule(y); pen.setLineDash([]);
    pen.textAlign = "right"; pen.textBaseline = y > 30 ? "bottom" : "top";
    pen.fillText(`target ${Number((100 * data.target).toPrecision(4))} %`, end - 2, y > 30 ? y - 2 : y + 3);
  }
}

function race() {
  const at = scales(), [pen, width] = sized($("curves"), at.height), ends = [];
  axes(pen, at);
  pen.strokeStyle = colours.soft; pen.lineWidth = 1; pen.globalAlpha = 0.6;
  pen.beginPath(); pen.moveTo(at.x(now), 4); pen.lineTo(at.x(now), at.height - at.bottom); pen.stroke(); pen.globalAlpha = 1;
  for (const run of data.runs) {
    const seen = before(run.times, now);
    if (seen < 0) continue;
    pen.strokeStyle = pen.fillStyle = run.colour; pen.lineWidth = 2.4; pen.beginPath();
    for (let k = 0; k <= seen; k++) pen.lineTo(at.x(run.curve[k][0]), at.y(run.curve[k][1]));
    pen.stroke();
    const x = at.x(run.curve[seen][0]), y = at.y(run.curve[seen][1]);
    pen.beginPath(); pen.arc(x, y, 4, 0, 7); pen.fill();
    let place = Math.max(8, Math.min(at.height - at.bottom - 7, y));
    pen.font = "600 13px system-ui, sans-serif"; pen.textAlign = "left"; pen.textBaseline = "middle";
    const long = pen.measureText(run.label).width, begin = Math.min(x + 9, width - long - 1);
    for (const [from, to, other] of ends) if (begin < to && from < begin + long && Math.abs(other - place) < 15)
      place = other + (place < other && other > 23 ? -15 : 15);
    ends.push([begin, begin + long, place]);
    pen.fillText(run.label, begin, place);
  }
}

function draw() {
  for (const run of data.runs) {
    const found = figures(run, Math.min(now, run.seconds));
    put(run.shown.steps, found.steps.toLocaleString("en"));
    put(run.shown.value, found.value === null ? "–" : data.measure === "accuracy" ? percent(found.value) : found.value.toPrecision(3));
    put(run.shown.waiting, percent(found.waiting));
    graph(run, run.shown.graph); lanes(run, run.shown.lanes);
  }
  if (!$("race").hidden) race();
  $("scrub").value = Math.round(1000 * now / length);
  put($("clock"), `${now.toFixed(length < 20 ? 2 : 1)} s`);
}

// -- the clock --

function tick(at) {
  if (!playing) return;
  if (last !== null) now = Math.min(length, now + speed * Math.min(0.1, (at - last) / 1000));
  last = at; draw();
  if (now >= length) play(false); else requestAnimationFrame(tick);
}

function play(wanted) {
  if (wanted === playing) return;
  if (wanted && now >= length) now = 0;
  playing = wanted; last = null;
  put($("play"), playing ? "Pause" : "Play");
  if (playing) requestAnimationFrame(tick);
}

function go(at) { now = Math.max(0, Math.min(length, at)); draw(); }

function recolour() {
  for (const name of ["card", "line", "text", "soft", "computing", "slow", "waiting", "dead", "pulse", "cut"]) colours[name] = css(name);
}

// What happened to workers, along the time: over the scrubber, and under the curves.
function mark() {
  const room = scales(), across = (share) => `calc(${room.left}px + (100% - ${room.left + room.right}px) * ${share})`;
  const places = [[$("marks"), (share) => `${100 * share}%`], [document.querySelector(".plot .marks"), across]];
  for (const [box, left] of places) {
    box.replaceChildren();
    for (const run of data.runs) for (const [at, , what, words] of run.marks) {
      const one = document.createElement("button");
      one.className = what === "cut" ? "cut-off" : what; one.style.left = left(at / length); one.tabIndex = -1;
      one.title = data.runs.length > 1 ? `${run.label}: ${words}` : words; one.ariaLabel = one.title;
      one.onclick = () => go(at); box.append(one);
    }
  }
}

function card(run) {
  const box = document.createElement("section"), head = document.createElement("h2"), dot = document.createElement("i");
  box.className = "run"; dot.style.background = run.colour; head.append(dot, run.label); box.append(head);
  const row = document.createElement("div"); row.className = "figures"; box.append(row);
  run.shown = {};
  const all = [["steps", "worker-steps done"], ["value", `test ${data.measure}`], ["waiting", "of worker time spent waiting"]];
  for (const [key, what] of all) {
    const one = document.createElement("div"), number = document.createElement("b"), words = document.createElement("span");
    words.textContent = what; one.append(number, words); row.append(one); run.shown[key] = number;
    if (key === "value" && !run.curve.length) one.hidden = true;
  }
  for (const key of ["graph", "lanes"]) box.append(run.shown[key] = document.createElement("canvas"));
  $("runs").append(box);
}

function start() {
  for (const key of ["title", "story", "about"]) $(key).textContent = data[key];
  for (const run of data.runs) {
    prepare(run);
    card(run);
  }
  const rare = data.runs.some((run) => run.marks.length);
  for (const one of document.querySelectorAll(".rare")) one.hidden = !rare;
  $("race").hidden = !data.runs.some((run) => run.curve.length);
  document.querySelector("#race h2").textContent = data.measure === "accuracy" ? "Test accuracy" : "Test loss";
  for (const one of [0.1, 0.25, 0.5, 1, 2, 5, 10, 25]) {
    const option = new Option(`${one}×`, one); option.selected = one === speed; $("speed").append(option);
  }
  $("speed").onchange = (event) => { speed = Number(event.target.value); draw(); };
  $("play").onclick = () => play(!playing);
  $("scrub").oninput = (event) => { play(false); go(length * event.target.value / 1000); };
  addEventListener("keydown", (event) => {
    const step = length / 100;
    const keys = { " ": () => play(!playing), ArrowRight: () => go(now + step), ArrowLeft: () => go(now - step),
      Home: () => go(0), End: () => go(length) };
    if (event.key === " " && event.target.tagName === "BUTTON") return;  // it knows what to do
    if (keys[event.key] && event.target.tagName !== "SELECT") { event.preventDefault(); keys[event.key](); }
  });
  addEventListener("resize", () => { mark(); draw(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { recolour(); draw(); });
  recolour(); mark(); draw();
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) go(length / 10); else play(true);
}
start();
