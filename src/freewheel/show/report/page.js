(() => {
  const figures = JSON.parse(document.getElementById("figure-data").textContent);
  const root = document.documentElement;
  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const look = () => {
    const ink = css("--ink"), soft = css("--soft"), grid = css("--grid"), card = css("--card");
    const changes = { "font.color": ink, "hoverlabel.bgcolor": card, "hoverlabel.bordercolor": soft,
      "hoverlabel.font.color": ink, "modebar.color": soft, "modebar.activecolor": ink,
      "modebar.bgcolor": card };
    for (const axis of ["xaxis", "yaxis"]) {
      changes[axis + ".gridcolor"] = grid;
      changes[axis + ".zerolinecolor"] = css("--line");
      changes[axis + ".linecolor"] = css("--line");
      changes[axis + ".title.font.color"] = soft;
    }
    return changes;
  };
  const mouse = matchMedia("(hover: hover)").matches;
  const config = { displaylogo: false, displayModeBar: mouse ? "hover" : false,
    modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
    showSendToCloud: false, plotlyServerURL: "" };  // plotly's own button would upload the figure
  const draw = (place) => {
    const figure = figures[place.id.slice(7)];
    const layout = Object.assign({ showlegend: false, hovermode: "closest", dragmode: mouse ? "zoom" : false,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)" }, figure.layout);
    layout.font = { family: getComputedStyle(document.body).fontFamily, size: 12 };
    layout.margin = Object.assign({ l: 12, r: 14, t: 14, b: 12 }, layout.margin);
    for (const axis of ["xaxis", "yaxis"]) {
      layout[axis] = Object.assign({ automargin: true, zeroline: false }, layout[axis]);
    }
    const again = (one) => draw(one).then(() => Plotly.relayout(one, look())).then(show);
    figureTools.offer(place, figure, again);
    return Plotly.react(place, ...figureTools.dress(place, figure.data, layout), config);
  };
  const places = Object.keys(figures).map((name) => document.getElementById("figure-" + name));
  // Plotly itself follows the window only; a figure's place also changes when the layout does.
  const watch = new ResizeObserver((seen) => seen.forEach(({ target }) => Plotly.Plots.resize(target)));
  const paint = () => places.forEach((place) => Plotly.relayout(place, look()));
  Promise.all(places.map(draw)).then(paint).then(() => places.forEach((place) => watch.observe(place)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);

  const chips = [...document.querySelectorAll(".legend button")];
  const on = (chip) => chip.getAttribute("aria-pressed") === "true";
  const press = (chip, value) => chip.setAttribute("aria-pressed", String(value));
  const show = () => {
    const hidden = new Set(chips.filter((chip) => !on(chip)).map((chip) => chip.dataset.run));
    for (const place of places) {
      Plotly.restyle(place, { visible: place.data.map((trace) => !hidden.has(trace.legendgroup)) });
    }
  };
  for (const chip of chips) {
    chip.addEventListener("click", () => { press(chip, !on(chip)); show(); });
    chip.addEventListener("dblclick", () => {
      const alone = on(chip) && chips.every((other) => other === chip || !on(other));
      chips.forEach((other) => press(other, alone || other === chip));
      show();
    });
  }
})();
