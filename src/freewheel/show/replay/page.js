"use strict";
// Plays runs on one clock. All times are seconds since a run began; `spans` are pairs of begin and end.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const length = Math.max(...data.runs.map((run) => run.seconds));
const FADE_S = 0.25, WINDOW = Math.min(length, Math.max(data.window, length / 200));
let now = 0, playing = false, speed = data.speed, last = null, colours = {};

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const percent = (share) => `${Math.round(100 * share)} %`;

// The last place in sorted numbers, `wide` apart, that is at most `value`; -1: none.
function before(numbers, value, wide = 1, from = 0) {
  let low = 0, high = Math.floor((numbers.length - from + wide - 1) / wide);
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers[from + middle * wide] <= value) low = middle + 1; else high = middle;
  }
  return low - 1;
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
}

const alive = (run, rank, at) => run.lives[rank].some(([from, to]) => from <= at && at <= to);

// Where a worker is: the span it is in, how far, and what it has done.
function state(run, rank, at) {
  const spans = run.spans[rank], k = before(spans, at, 2), end = spans[2 * k + 1];
  const inside = k >= 0 && at < end;
  const busy = k < 0 ? 0 : run.busy[rank][k] + Math.min(at, end) - spans[2 * k];
  return { steps: inside ? k : k + 1, inside, busy, share: inside ? (at - spans[2 * k]) / (end - spans[2 * k]) : 0 };
}

function figures(run, at) {
  let steps = 0, busy = 0, there = 0;
  for (let rank = 0; rank < run.spans.length; rank++) {
    const one = state(run, rank, at);
    steps += one.steps; busy += one.busy;
    for (const [from, to] of run.lives[rank]) there += Math.max(0, Math.min(at, to) - from);
  }
  const k = before(run.accuracy.map((one) => one[0]), at);
  return { steps, waiting: there ? Math.max(0, 1 - busy / there) : 0, accuracy: k < 0 ? null : run.accuracy[k][1] };
}

// -- drawing --

function sized(canvas, height) {
  const ratio = devicePixelRatio || 1, width = canvas.clientWidth;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
    canvas.style.height = `${height}px`;
  }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  pen.font = "11px system-ui, sans-serif";
  return [pen, width];
}

function graph(run, canvas) {
  const n = run.spans.length, height = 270, [pen, width] = sized(canvas, height);
  const radius = 108, size = Math.max(5, Math.min(15, 190 / n)), places = [];
  for (let rank = 0; rank < n; rank++) {
    const angle = 2 * Math.PI * rank / n - Math.PI / 2;
    places.push([width / 2 + radius * Math.cos(angle), height / 2 + radius * Math.sin(angle)]);
  }
  const line = (a, b, strength) => {
    pen.globalAlpha = strength; pen.beginPath(); pen.moveTo(...places[a]); pen.lineTo(...places[b]); pen.stroke();
  };
  pen.strokeStyle = pen.fillStyle = colours.pulse; pen.lineWidth = 1.5;
  const shown = Math.max(FADE_S * speed, WINDOW / 60);
  for (let k = before(run.exchanges, now, 4); k >= 0; k--) {
    const [at, took, a, b] = run.exchanges.slice(4 * k, 4 * k + 4), pulse = Math.max(took, shown / 2);
    if (now - at > pulse + shown) { if (now - at > 8 * shown + run.longest) break; continue; }
    line(a, b, Math.max(0.12, 1 - Math.max(0, now - at - pulse) / shown));
    if (now - at <= pulse) for (const [from, to] of [[a, b], [b, a]]) {
      const share = (now - at) / pulse;
      pen.globalAlpha = 1; pen.beginPath();
      pen.arc(places[from][0] + share * (places[to][0] - places[from][0]),
        places[from][1] + share * (places[to][1] - places[from][1]), 3.2, 0, 7); pen.fill();
    }
  }
  for (let k = before(run.merges.map((one) => one[0]), now); k >= 0; k--) {
    const [at, took, members] = run.merges[k], lasts = Math.max(took, shown);
    if (now - at > lasts + shown) break;
    const strength = 1 - Math.max(0, now - at - lasts) / shown;
    members.forEach((a, j) => line(a, members[(j + 1) % members.length], 0.8 * strength));
  }
  pen.globalAlpha = 1; pen.textAlign = "center"; pen.textBaseline = "middle";
  for (let rank = 0; rank < n; rank++) {
    const [x, y] = places[rank], here = alive(run, rank, now), one = state(run, rank, now);
    const colour = !here ? colours.dead : run.slow[rank] ? colours.slow : colours.computing;
    pen.fillStyle = colours.card; pen.beginPath(); pen.arc(x, y, size + 6, 0, 7); pen.fill();
    pen.lineWidth = 4; pen.strokeStyle = colours.line; pen.beginPath(); pen.arc(x, y, size + 4, 0, 7); pen.stroke();
    if (here && one.inside) {
      pen.strokeStyle = colour; pen.beginPath();
      pen.arc(x, y, size + 4, -Math.PI / 2, -Math.PI / 2 + 2 * Math.PI * one.share); pen.stroke();
    }
    pen.fillStyle = here && !one.inside ? colours.waiting : colour;
    pen.beginPath(); pen.arc(x, y, size, 0, 7); pen.fill();
    if (size > 8) { pen.fillStyle = here && !one.inside ? colours.text : "#fff"; pen.fillText(rank, x, y + 0.5); }
  }
}

function lanes(run, canvas) {
  const n = run.spans.length, row = Math.max(4, Math.min(18, 260 / n)), gap = row > 8 ? 3 : 1, left = 26;
  const [pen, width] = sized(canvas, n * row + 16);
  const from = Math.max(0, Math.min(now - 0.85 * WINDOW, length - WINDOW)), to = from + WINDOW;
  const x = (at) => left + (width - left) * (at - from) / WINDOW;
  for (let rank = 0; rank < n; rank++) {
    const top = rank * row, tall = row - gap, spans = run.spans[rank];
    if (row > 9) { pen.fillStyle = colours.soft; pen.textAlign = "right"; pen.textBaseline = "middle";
      pen.fillText(rank, left - 8, top + tall / 2); }
    for (const [born, died] of run.lives[rank]) {
      const a = x(Math.max(from, born)), b = x(Math.min(now, to, died));
      if (b > a) { pen.fillStyle = colours.waiting; pen.fillRect(a, top, b - a, tall); }
    }
    pen.fillStyle = run.slow[rank] ? colours.slow : colours.computing;
    for (let k = Math.max(0, before(spans, from, 2)); 2 * k < spans.length && spans[2 * k] < Math.min(now, to); k++) {
      const a = x(Math.max(from, spans[2 * k])), b = x(Math.min(now, spans[2 * k + 1]));
      if (b > a) pen.fillRect(a, top, Math.max(0.6, b - a - (b - a > 3 ? 1 : 0)), tall);
    }
    for (const [at, whose, what] of run.marks) if (whose === rank && from <= at && at <= now) {
      pen.fillStyle = colours.text; pen.textAlign = "center"; pen.textBaseline = "middle";
      pen.fillText(what === "died" ? "✕" : what === "left" ? "◁" : "▷", x(at), top + tall / 2);
    }
  }
  pen.fillStyle = colours.soft; pen.textBaseline = "bottom";
  for (const [at, align] of [[from, "left"], [to, "right"]]) {
    pen.textAlign = align; pen.fillText(`${at.toFixed(WINDOW < 5 ? 1 : 0)} s`, x(at), n * row + 15);
  }
}

function race(canvas) {
  const height = 190, [pen, width] = sized(canvas, height), right = 110, left = 42, bottom = 20;
  const all = data.runs.flatMap((run) => run.accuracy.map((one) => one[1]));
  const low = Math.min(...all), high = Math.max(...all), room = (high - low) * 0.08 || 0.1;
  const x = (at) => left + (width - left - right) * at / length;
  const y = (value) => 8 + (height - bottom - 8) * (high + room - value) / (high - low + 2 * room);
  pen.strokeStyle = colours.line; pen.fillStyle = colours.soft; pen.lineWidth = 1; pen.textBaseline = "middle";
  for (let k = 0; k <= 4; k++) {
    const value = low + (high - low) * k / 4;
    pen.beginPath(); pen.moveTo(left, y(value)); pen.lineTo(width - right, y(value)); pen.stroke();
    pen.textAlign = "right"; pen.fillText(percent(value), left - 6, y(value));
  }
  pen.textBaseline = "bottom"; pen.textAlign = "center";
  for (let k = 0; k <= 4; k++) pen.fillText(`${(length * k / 4).toFixed(length < 10 ? 1 : 0)} s`, x(length * k / 4), height - 2);
  if (data.target) {
    pen.setLineDash([4, 4]); pen.beginPath(); pen.moveTo(left, y(data.target)); pen.lineTo(width - right, y(data.target));
    pen.stroke(); pen.setLineDash([]);
  }
  const ends = [];
  data.runs.forEach((run) => {
    const seen = run.accuracy.filter((one) => one[0] <= now);
    if (!seen.length) return;
    pen.strokeStyle = pen.fillStyle = run.colour; pen.lineWidth = 2.2; pen.beginPath();
    seen.forEach(([at, value], k) => k ? pen.lineTo(x(at), y(value)) : pen.moveTo(x(at), y(value)));
    pen.stroke();
    const [at, value] = seen.at(-1);
    pen.beginPath(); pen.arc(x(at), y(value), 3.5, 0, 7); pen.fill();
    let place = y(value);
    for (const other of ends) if (Math.abs(other - place) < 13) place = other + (place < other ? -13 : 13);
    ends.push(place);
    pen.textAlign = "left"; pen.textBaseline = "middle"; pen.fillText(run.label, x(at) + 8, place);
  });
}

function draw() {
  for (const run of data.runs) {
    const found = figures(run, Math.min(now, run.seconds));
    run.shown.steps.textContent = found.steps.toLocaleString("en");
    run.shown.accuracy.textContent = found.accuracy === null ? "–" : percent(found.accuracy);
    run.shown.waiting.textContent = percent(found.waiting);
    graph(run, run.shown.graph); lanes(run, run.shown.lanes);
  }
  if (data.runs.some((run) => run.accuracy.length)) race($("race").querySelector("canvas")); else $("race").hidden = true;
  $("scrub").value = Math.round(1000 * now / length);
  $("clock").textContent = `${now.toFixed(length < 20 ? 2 : 1)} s`;
}

// -- the clock --

function tick(at) {
  if (!playing) return;
  if (last !== null) now = Math.min(length, now + speed * Math.min(0.1, (at - last) / 1000));
  last = at; draw();
  if (now >= length) play(false); else requestAnimationFrame(tick);
}

function play(wanted) {
  if (wanted && now >= length) now = 0;
  playing = wanted; last = null;
  $("play").textContent = playing ? "Pause" : "Play";
  if (playing) requestAnimationFrame(tick);
}

function go(at) { now = Math.max(0, Math.min(length, at)); draw(); }

function recolour() {
  for (const name of ["card", "line", "text", "soft", "computing", "slow", "waiting", "dead", "pulse"]) colours[name] = css(name);
}

function start() {
  $("title").textContent = data.title; $("about").textContent = data.about;
  for (const run of data.runs) {
    prepare(run);
    run.longest = 0;
    for (let k = 1; k < run.exchanges.length; k += 4) run.longest = Math.max(run.longest, run.exchanges[k]);
    const card = document.createElement("section"); card.className = "run";
    const head = document.createElement("h2"); head.textContent = run.label; card.append(head);
    const row = document.createElement("div"); row.className = "figures"; card.append(row);
    run.shown = {};
    for (const [key, what] of [["steps", "worker-steps done"], ["accuracy", "test accuracy"], ["waiting", "of worker time spent waiting"]]) {
      const box = document.createElement("div"), number = document.createElement("b"), words = document.createElement("span");
      words.textContent = what; box.append(number, words); row.append(box); run.shown[key] = number;
    }
    for (const key of ["graph", "lanes"]) card.append(run.shown[key] = document.createElement("canvas"));
    $("runs").append(card);
  }
  for (const one of [0.1, 0.25, 0.5, 1, 2, 5, 10, 25]) {
    const option = new Option(`${one}×`, one); option.selected = one === speed; $("speed").append(option);
  }
  $("speed").onchange = (event) => { speed = Number(event.target.value); };
  $("play").onclick = () => play(!playing);
  $("scrub").oninput = (event) => { play(false); go(length * event.target.value / 1000); };
  addEventListener("keydown", (event) => {
    const step = length / 100;
    const keys = { " ": () => play(!playing), ArrowRight: () => go(now + step), ArrowLeft: () => go(now - step),
      Home: () => go(0), End: () => go(length) };
    if (keys[event.key] && event.target.tagName !== "SELECT") { event.preventDefault(); keys[event.key](); }
  });
  addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { recolour(); draw(); });
  recolour(); draw();
}
start();
