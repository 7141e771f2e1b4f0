"use strict";
// A figure as plain SVG, from what plotly would be given. Plotly takes a second to start, this a few milliseconds:
// it is what a page shows first. It knows what our figures use: lines, dots, bars, axes of numbers, of powers of
// ten and of names. Hovering, zooming, scales of colour and notes come with plotly.
const sketch = (() => {
  const svg = (tag, props, ...inside) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(props)) made.setAttribute(name, value);
    made.append(...inside);
    return made;
  };
  const plain = (text) => String(text).replace(/&(lt|gt|amp|quot|#x27);/g,
    (_, name) => ({ lt: "<", gt: ">", amp: "&", quot: '"', "#x27": "'" })[name]);
  const dashes = { dot: "2 3", dash: "7 5", longdash: "11 5", dashdot: "7 3 2 3" };

  // -- axes: where a value is, and what stands beside it --

  const short = new Intl.NumberFormat("en", { maximumSignificantDigits: 3, notation: "compact" });
  const label = (value, { tickformat = "" }) => tickformat.endsWith("%")
    ? (100 * value).toFixed(tickformat.includes(".1") ? 1 : 0) + "%"
    : value !== 0 && Math.abs(value) < 1e-3 ? value.toExponential(0) : short.format(value);
  const round = (from, to, most) => {  // numbers that are easy to read, at most so many
    const rough = (to - from) / Math.max(1, most), power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((each) => each * power >= rough * 0.999);
    const found = [];
    for (let at = Math.ceil(from / step - 1e-9); at * step <= to + 1e-9 * step; at += 1) found.push(at * step + 0);  // not -0
    return found;
  };
  const powers = (from, to) => {  // 1, 2 and 5 where there are few
    const found = [];
    for (let power = Math.floor(from); power <= Math.ceil(to); power += 1) {
      for (const each of to - from < 3 ? [1, 2, 5] : [1]) found.push(each * 10 ** power);
    }
    return found.filter((each) => Math.log10(each) >= from && Math.log10(each) <= to);
  };
  const axis = (own, all, low, high, apart, bars) => {
    const values = all.filter((value) => value !== null), length = Math.abs(high - low);
    const named = own.type === "category" || values.some((value) => typeof value === "string");
    const names = named ? own.categoryarray || [...new Set(values)] : [];
    const places = new Map(names.map((name, place) => [name, place]));
    const log = own.type === "log";
    const to = named ? (value) => places.get(value) : log ? (value) => Math.log10(value) : (value) => value;
    let [from, until] = own.range || [null, null];
    if (!own.range) {
      const found = values.map(to).filter(Number.isFinite);
      from = found.reduce((a, b) => Math.min(a, b), own.rangemode === "tozero" ? 0 : Infinity);
      until = found.reduce((a, b) => Math.max(a, b), -Infinity);
      if (bars) [from, until] = [from - 0.5, until + 0.5];
      else if (apart < 60) [from, until] = [from ? from - 0.05 * (until - from) : 0, until + 0.05 * (until - from)];
      if (!(until > from)) [from, until] = [from - 0.5, from + 0.5];
    }
    const at = (value) => low + (to(value) - from) / (until - from) * (high - low);
    const most = length / apart;
    const ticks = named ? names.filter((_, place) => place % Math.ceil(names.length / most) === 0)
      : log ? powers(from, until) : round(from, until, most);
    return { at, unit: length / Math.abs(until - from), ticks: own.visible === false ? []
      : ticks.map((value) => [at(value), named ? plain(value) : label(value, own)]) };
  };

  // -- traces --

  const lines = ({ x, y, line }, across, up) => {
    let path = "", on = false;
    x.forEach((value, place) => {
      if (value === null || y[place] === null) { on = false; return; }
      path += `${on ? "L" : "M"}${across.at(value).toFixed(1)} ${up.at(y[place]).toFixed(1)}`;
      on = true;
    });
    return svg("path", { d: path, fill: "none", stroke: line.color, "stroke-width": line.width,
      "stroke-dasharray": dashes[line.dash] || "none", "stroke-linejoin": "round" });
  };
  const filled = (one, below, across, up) => {
    const edge = ({ x, y }) => x.map((value, place) => [value, y[place]])
      .filter(([a, b]) => a !== null && b !== null).map(([a, b]) => `${across.at(a).toFixed(1)},${up.at(b).toFixed(1)}`);
    return svg("polygon", { points: [...edge(one), ...edge(below).reverse()].join(" "), fill: one.fillcolor });
  };
  const dots = ({ x, y, marker, mode, text, textfont }, across, up) => {
    const all = svg("g", {});
    x.forEach((value, place) => {
      if (value === null || y[place] === null || marker.opacity === 0) return;
      const of = (each) => Array.isArray(each) ? each[place] : each;
      const [cx, cy, r] = [across.at(value), up.at(y[place]), marker.size / 2];
      all.append(of(marker.symbol) === "square"
        ? svg("rect", { x: cx - r, y: cy - r, width: 2 * r, height: 2 * r, fill: of(marker.color) })
        : svg("circle", { cx, cy, r, fill: of(marker.color) }));
      if (mode.includes("text")) all.append(svg("text", { x: cx, y: cy, "text-anchor": "middle",
        "dominant-baseline": "central", "font-size": textfont.size, fill: textfont.color }, text[place]));
    });
    return all;
  };
  const bars = (some, { barmode, bargap = 0.2 }, across, up) => {
    const all = svg("g", {}), tops = new Map(), width = across.unit * (1 - bargap);
    const share = barmode === "stack" ? width : width / some.length;
    some.forEach(({ x, y, marker }, number) => x.forEach((value, place) => {
      const below = barmode === "stack" ? tops.get(value) || 0 : 0, above = below + (y[place] || 0);
      tops.set(value, above);
      const left = across.at(value) - width / 2 + (barmode === "stack" ? 0 : number * share);
      all.append(svg("rect", { x: left, y: up.at(above), width: share, fill: marker.color,
        height: Math.max(0, up.at(below) - up.at(above)) }));
    }));
    return all;
  };

  return ({ data, layout }, width, height, { ink, soft, grid, line: edge }) => {
    const all = svg("svg", { class: "sketch", width, height, "font-size": 12, fill: ink, "aria-hidden": "true" });
    const { xaxis = {}, yaxis = {} } = layout, bare = xaxis.visible === false;
    const some = data.filter((trace) => trace.type === "bar");
    const named = yaxis.type === "category";
    let [left, right, top, bottom] = [named ? 80 : 66, width - (layout.margin?.r || 14), layout.showlegend ? 34 : 14,
      height - 46];
    if (bare) {  // a circle stays one; under it is room for the scale of colours
      const side = Math.min(width - 26, height - 90);
      [left, right, top, bottom] = [(width - side) / 2, (width + side) / 2, 14, 14 + side];
    }
    const across = axis(xaxis, data.flatMap(({ x }) => x), left, right, 70, some.length);
    const up = axis(yaxis, data.flatMap(({ y }) => y), bottom, top, named ? 18 : 45);
    for (const [at, text] of across.ticks) {
      if (xaxis.showgrid !== false) all.append(svg("path", { d: `M${at} ${top}V${bottom}`, stroke: grid }));
      all.append(svg("text", { x: at, y: bottom + 16, "text-anchor": "middle" }, text));
    }
    for (const [at, text] of up.ticks) {
      all.append(svg("path", { d: `M${left} ${at}H${right}`, stroke: grid }),
        svg("text", { x: left - 6, y: at, "text-anchor": "end", "dominant-baseline": "central" }, text));
    }
    if (!bare) all.append(svg("path", { d: `M${left} ${top}V${bottom}H${right}`, stroke: edge, fill: "none" }));
    const title = (text, props) => text && all.append(svg("text", { "text-anchor": "middle", "font-size": 14, fill: soft,
      ...props }, text));
    title(xaxis.title?.text, { x: (left + right) / 2, y: height - 8 });
    title(yaxis.title?.text, { transform: `translate(16 ${(top + bottom) / 2}) rotate(-90)` });
    if (some.length) all.append(bars(some, layout, across, up));
    data.forEach((trace, place) => {
      const { type, mode = "", fill, opacity = 1 } = trace;
      if (type === "bar") return;
      const drawn = svg("g", { opacity, class: "trace" });
      if (fill === "tonexty") drawn.append(filled(trace, data[place - 1], across, up));
      if (mode.includes("lines") && trace.line.width) drawn.append(lines(trace, across, up));
      if (mode.includes("markers")) drawn.append(dots(trace, across, up));
      all.append(drawn);
    });
    let at = left;
    for (const { name, marker, line } of layout.showlegend ? data : []) {
      const text = plain(name);
      all.append(svg("rect", { x: at, y: 12, width: 12, height: 10, fill: marker ? marker.color : line.color }),
        svg("text", { x: at + 18, y: 21, fill: soft }, text));
      at += 34 + 6.5 * text.length;
    }
    return all;
  };
})();
