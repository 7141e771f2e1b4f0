(() => {
  "use strict";
  const figures = JSON.parse(document.getElementById("figure-data").textContent);
  const places = Object.keys(figures).map((name) => document.getElementById("figure-" + name));
  const chips = [...document.querySelectorAll(".legend button")];
  const on = (chip) => chip.getAttribute("aria-pressed") === "true";
  const press = (chip, value) => chip.setAttribute("aria-pressed", String(value));
  const draw = (place) => {
    const hidden = new Set(chips.filter((chip) => !on(chip)).map((chip) => chip.dataset.run));
    const { data, layout } = figures[place.id.slice(7)];
    const seen = data.map((trace) => ({ ...trace, visible: !hidden.has(trace.legendgroup) }));
    return figureTools.draw(place, { data: seen, layout }, draw, { uirevision: "same" });
  };
  const show = () => Promise.all(places.map(draw));
  // Plotly itself follows the window only; a figure's place also changes when the layout does.
  const watch = new ResizeObserver((seen) => seen.forEach(({ target }) => Plotly.Plots.resize(target)));
  show().then(() => places.forEach((place) => watch.observe(place)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  for (const chip of chips) {
    chip.addEventListener("click", () => { press(chip, !on(chip)); show(); });
    chip.addEventListener("dblclick", () => {
      const alone = on(chip) && chips.every((other) => other === chip || !on(other));
      chips.forEach((other) => press(other, alone || other === chip));
      show();
    });
  }
})();
