// How every page draws a figure: in its own colours, with buttons beside the title for a logarithmic axis, smooth
// lines, and the numbers as a file.
const figureTools = (() => {
  "use strict";
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const mouse = matchMedia("(hover: hover)").matches;
  const config = { displaylogo: false, displayModeBar: mouse ? "hover" : false, responsive: false,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
    showSendToCloud: false, plotlyServerURL: "" };  // plotly's own button would upload the figure
  const layoutOf = (figure, own) => {
    const [ink, soft, grid, line, card] = ["--ink", "--soft", "--grid", "--line", "--card"].map(css);
    const layout = { showlegend: false, hovermode: "closest", dragmode: mouse ? "zoom" : false,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", ...structuredClone(figure.layout), ...own };
    layout.font = { family: getComputedStyle(document.body).fontFamily, size: 12, color: ink };
    layout.margin = { l: 12, r: 14, t: 14, b: 12, ...layout.margin };
    layout.hoverlabel = { bgcolor: card, bordercolor: soft, font: { color: ink }, align: "left" };
    layout.modebar = { color: soft, activecolor: ink, bgcolor: card };
    if (layout.legend) layout.legend = { ...layout.legend, font: { color: soft } };
    for (const axis of ["xaxis", "yaxis"]) {
      const of = layout[axis] || {};
      layout[axis] = { automargin: true, zeroline: false, gridcolor: grid, linecolor: line, ...of };
      if (of.title) layout[axis].title = { ...of.title, font: { color: soft } };
    }
    return layout;
  };
  const WEIGHT = 0.85;  // of what was before, in a line that is smoothed
  const smooth = (values) => {
    let mean = null;
    return values.map((value) => value === null ? null
      : (mean = mean === null ? value : WEIGHT * mean + (1 - WEIGHT) * value));
  };
  const isLine = ({ type, mode = "", fill, y }) => type === "scatter" && mode.includes("lines") && !fill && y.length > 2;
  const suits = ({ xaxis = {}, yaxis = {} }) => xaxis.visible !== false && yaxis.type !== "category";
  const cell = (text) => /[",\n]/.test(text) ? `"${String(text).replaceAll('"', '""')}"` : String(text ?? "");
  const csv = ({ data, layout }) => [["curve", layout.xaxis.title?.text || "x", layout.yaxis.title?.text || "y"],
    ...data.flatMap(({ name, x, y }) => x.map((at, place) => [name, at, y[place]]))
  ].map((row) => row.map(cell).join(",")).join("\n") + "\n";
  const save = (place) => {
    const url = URL.createObjectURL(new Blob([csv(place)], { type: "text/csv" }));
    Object.assign(document.createElement("a"), { href: url, download: `${place.id || place.parentNode.id}.csv` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  };
  // A figure as the buttons ask for it.
  const dress = (place, data, layout) => {
    if (place.dataset.log && suits(layout)) {
      const { tickformat, dtick, rangemode, range, ...axis } = layout.yaxis;
      layout.yaxis = { ...axis, type: axis.type === "log" ? "linear" : "log" };
    }
    if (place.dataset.smooth) data = data.map((trace) => isLine(trace) ? { ...trace, y: smooth(trace.y) } : trace);
    return [data, layout];
  };
  const offer = (place, figure, redraw) => {
    const caption = place.parentNode.querySelector("figcaption");
    if (caption.querySelector(".tools") || !suits(figure.layout)) return;
    const button = (name, title, onclick) =>
      Object.assign(document.createElement("button"), { type: "button", textContent: name, title, onclick });
    const toggle = (what, name, title) => {
      const made = button(name, title, () => {
        place.dataset[what] = place.dataset[what] ? "" : "on";
        made.setAttribute("aria-pressed", String(Boolean(place.dataset[what])));
        redraw(place);
      });
      made.setAttribute("aria-pressed", "false");
      return made;
    };
    const log = figure.layout.yaxis?.type === "log" ? "linear" : "log";
    const tools = Object.assign(document.createElement("div"), { className: "tools" });
    if (figure.data.some(isLine)) tools.append(toggle("log", log, `A ${log === "log" ? "logarithmic" : "linear"} axis`),
      toggle("smooth", "smooth", "Smooth the lines"));
    tools.append(button("CSV", "Save the numbers", () => save(place)));
    caption.prepend(tools);
  };
  // Plotly writes into what it is given, and the pages need it unwritten.
  const draw = (place, figure, redraw, own = {}) => {
    offer(place, figure, redraw);
    const data = figure.data.map((trace) => ({ ...trace }));
    return Plotly.react(place, ...dress(place, data, layoutOf(figure, own)), config);
  };
  return { draw };
})();
