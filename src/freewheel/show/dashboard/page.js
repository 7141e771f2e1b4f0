"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const make = (tag, props = {}, ...inside) => {
    const made = Object.assign(document.createElement(tag), props);
    made.append(...inside.filter((one) => one !== null && one !== undefined));
    return made;
  };

  // -- figures: only those that can be seen are drawn, one in each frame --

  const boxes = new Map();
  const empty = (name) => name.startsWith("loss-") ? "No worker has reported a loss: worker.record(loss=…) does."
    : name === "faults" ? "Nothing has happened: nobody died, came or was cut off."
    : name === "blocked" ? "Nobody has waited." : "Nothing to show yet.";
  const onScreen = new IntersectionObserver((changes) => {
    for (const { target, isIntersecting } of changes) {
      const one = boxes.get(target.id.slice(4));
      if (one) one.seen = isIntersecting;
    }
    later();
  }, { rootMargin: "200px" });
  const sized = new ResizeObserver((changes) => {
    for (const { target } of changes) {
      const one = target.parentNode && boxes.get(target.parentNode.id.slice(4));
      if (one && one.drawn && target.clientWidth && target.layout.width !== target.clientWidth) one.due = true;
    }
    later();
  });
  const boxed = (name, own = {}) => {
    const over = name.match(/-(time|samples)$/)?.[1];
    const [title, said, place, none] = [make("b"), make("span"), make("div", { className: "plot" }),
      make("p", { className: "none", hidden: true })];
    const box = make("figure", { id: "box-" + name }, make("figcaption", {}, title, said), place, none);
    Object.assign(box.dataset, over ? { over } : {}, own);
    if (over) box.hidden = !document.querySelector(`.switch [data-over=${over}][aria-pressed=true]`);
    boxes.set(name, { box, title, said, place, none, seen: false, due: true, drawn: false });
    onScreen.observe(box);
    sized.observe(place);
    return box;
  };
  for (const row of document.querySelectorAll("[data-figures]")) {
    row.append(...row.dataset.figures.split(" ").map((name) => boxed(name)));
  }
  // A figure's words and its room are there at once, so that nothing moves when it is drawn.
  const caption = (one, figure) => {
    const some = figure.data.some((trace) => trace.x.length);
    one.title.textContent = figure.title;
    one.said.textContent = figure.said;
    one.none.textContent = empty(one.box.id.slice(4));
    [one.place.hidden, one.none.hidden] = [!some, some];
    if (!one.place.style.height) one.place.style.height = figure.height + "px";
    if (some || !one.drawn) return;
    Plotly.purge(one.place);
    one.drawn = false;
  };
  const draw = (name) => {
    const one = boxes.get(name), figure = document_.figures[name];
    one.due = false;
    if (one.place.hidden) return;
    const width = one.place.clientWidth;
    // A circle needs no more height than width; a legend that is folded needs more.
    const height = name === "graph" ? Math.min(figure.height, width + 80)
      : figure.height + (figure.layout.showlegend && width < 480 ? 50 : 0);
    one.place.style.height = height + "px";
    if (!one.drawn) one.place.replaceChildren();  // the sketch
    const again = () => { one.due = true; later(); };
    figureTools.draw(one.place, figure, again, { width, height, uirevision: document_.picked.join() });
    one.drawn = true;
  };
  // Plotly takes a second to start, in which the page stands still: before it comes, the graph is there as plain SVG.
  let started = false;
  const svg = (tag, props, ...inside) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(props)) made.setAttribute(name, value);
    made.append(...inside);
    return made;
  };
  const sketch = ({ data }) => data.flatMap(({ mode, x, y, line, marker = {}, opacity }) => {
    const go = (at, k) => at === null ? "" : `${k % 3 ? "L" : "M"}${at} ${-y[k]}`;
    if (mode === "lines") return [svg("path", { d: x.map(go).join(""), stroke: line.color, opacity })];
    return marker.opacity ? x.map((cx, k) => svg("circle", { cx, cy: -y[k], r: 0.09, fill: marker.color[k] })) : [];
  });
  const start = () => {
    const { place } = boxes.get("graph"), graph = document_.figures.graph;
    if (graph) place.replaceChildren(svg("svg", { class: "sketch", viewBox: "-1.4 -1.4 2.8 2.8" }, ...sketch(graph)));
    if (!graph || started) return;
    started = true;
    const script = make("script", { src: "plotly.js", onload: all });
    requestAnimationFrame(() => setTimeout(() => document.head.append(script)));
  };
  const all = () => {
    for (const one of boxes.values()) one.due = true;
    later();
  };
  let framed = false;
  const frame = () => {
    framed = false;
    if (!document_) return;
    if (!window.Plotly) { start(); return; }
    const due = [...boxes].find(([name, one]) => one.due && one.seen && !one.box.hidden && document_.figures[name]);
    if (!due) return;
    draw(due[0]);
    boxes.delete(due[0]);  // to the end of the row: on a busy machine all get their turn
    boxes.set(...due);
    later();
  };
  const later = () => { if (!framed) { framed = true; requestAnimationFrame(frame); } };
  // What a script has named itself stands beside loss and accuracy; it goes where the next run has none.
  const others = (names) => {
    for (const name of names.filter((each) => !boxes.has(each))) {
      byId("learned").append(boxed(name, { own: "own" }));
    }
    for (const [name, { box }] of [...boxes]) {
      if (!box.dataset.own || names.includes(name)) continue;
      onScreen.unobserve(box);
      box.remove();
      boxes.delete(name);
    }
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", all);
  for (const button of document.querySelectorAll(".switch button")) {
    button.addEventListener("click", () => {
      for (const other of document.querySelectorAll(".switch button")) {
        other.setAttribute("aria-pressed", String(other === button));
      }
      for (const { box } of boxes.values()) {
        if (box.dataset.over) box.hidden = box.dataset.over !== button.dataset.over;
      }
      later();
    });
  }

  // -- words and tables --

  const swatch = (colour) => {
    const made = make("i", { className: "swatch" });
    made.style.background = colour;
    return made;
  };
  const state = (one) => make("span", { className: "state " + one.state, textContent: one.state });
  const tile = ([name, value]) => make("div", { className: "tile" }, make("dt", { textContent: name }),
    make("dd", { textContent: value }));
  const compared = () => {
    const heads = [...new Set(document_.shown.flatMap((one) => Object.keys(one.tiles)))];
    return make("div", { className: "scroll compared", tabIndex: 0 }, make("table", {},
      make("thead", {}, make("tr", {}, ...["run", "state", ...heads].map((head) => make("th", { textContent: head })))),
      make("tbody", {}, ...document_.shown.map((one) => make("tr", {},
        make("th", { scope: "row" }, swatch(one.colour), " ", one.label), make("td", {}, state(one)),
        ...heads.map((head) => make("td", { textContent: one.tiles[head] || "–" })))))));
  };
  const words = () => {
    const { shown, notes, picked } = document_;
    const [one] = shown;
    byId("title").textContent = shown.length > 1 ? `${shown.length} runs compared`
      : one ? one.name : picked.length ? "Nothing to show" : `${document_.runs.length} runs`;
    document.title = `${byId("title").textContent} – Freewheel`;
    const said = shown.length !== 1 ? [] : [state(one), " · ", one.strategy || "strategy not known",
      one.waits_for ? `, waits for ${one.waits_for}` : "", one.clock === "virtual" ? " · simulated" : ""];
    byId("lead").replaceChildren(...said);
    warn(notes);
    byId("headline").replaceChildren(...shown.length > 1 ? [compared()]
      : one ? [make("dl", { className: "tiles" }, ...Object.entries(one.tiles).map(tile))] : []);
    // Where more runs belong together than can be told apart: a list of them, to pick some.
    document.body.classList.toggle("home", !picked.length);
    if (!picked.length) byId("picker").open = true;
    byId("shown").hidden = !Object.keys(document_.figures).length;
    byId("legend").hidden = shown.length < 2;
    byId("legend").replaceChildren(...shown.map((each) => make("span", {}, swatch(each.colour), each.label)));
  };
  const warn = (lines) => byId("notes").replaceChildren(
    ...lines.map((text) => make("p", { className: "warn", textContent: text })));

  let sorted = { by: null, down: false };
  const table = () => {
    const several = document_.shown.length > 1, { heads, rows, said } = document_.workers;
    const head = heads.map((name, place) => {
      const cell = make("th", { scope: "col" }, make("button", { type: "button", textContent: name,
        onclick: () => { sorted = { by: name, down: sorted.by === name ? !sorted.down : place > 1 }; table(); } }));
      if (sorted.by === name) cell.setAttribute("aria-sort", sorted.down ? "descending" : "ascending");
      return cell;
    });
    const by = heads.indexOf(sorted.by), order = [...rows];
    if (by >= 0) order.sort(({ values: { [by]: a } }, { values: { [by]: b } }) => (a === null) - (b === null)
      || (a < b ? -1 : a > b ? 1 : 0) * (sorted.down ? -1 : 1));
    const row = ({ run, cells: [rank, ...cells], state: how }) => make("tr", {},
      make("th", { scope: "row" }, ...several ? [swatch(document_.shown[run].colour), ` ${document_.shown[run].label} · `] : [], rank),
      ...cells.map((text, place) => make("td", { textContent: text, className: place ? "" : "worker-" + how })));
    const [thead, tbody] = byId("workers").children;
    const focus = thead.contains(document.activeElement) ? [...thead.querySelectorAll("button")]
      .indexOf(document.activeElement) : -1;
    thead.replaceChildren(make("tr", {}, ...head));
    if (focus >= 0) thead.querySelectorAll("button")[focus].focus();
    tbody.replaceChildren(...order.map(row));
    byId("workers-said").textContent = said;
  };
  const about = () => byId("about").replaceChildren(...document_.about.map(({ label, rows }) => make("details", {},
    make("summary", { textContent: document_.about.length > 1 ? `Settings of ${label}` : "Settings" }),
    make("div", { className: "scroll" }, make("table", { className: "settings" }, make("tbody", {},
      ...rows.map(([key, value]) => make("tr", {}, make("th", { scope: "row", textContent: key }),
        make("td", { textContent: value })))))))));

  // -- picking runs --

  const picked = () => (location.hash.match(/^#runs=([\d,]+)$/) || ["", ""])[1].split(",").filter(Boolean);
  const pick = (numbers) => { location.hash = numbers.length ? "runs=" + numbers.join(",") : ""; };
  const list = () => {
    const { runs } = document_;
    const chosen = new Set(document_.picked);
    const find = byId("picker-find");
    find.hidden = runs.length < 9;
    const wanted = find.value.toLowerCase();
    byId("picker-said").textContent = chosen.size !== 1 ? `${chosen.size} of ${runs.length} runs`
      : `${runs.find((run) => chosen.has(run.number)).name}${runs.length > 1 ? `, 1 of ${runs.length} runs` : ""}`;
    const focus = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.pick : null;
    byId("picker-runs").replaceChildren(...[...runs].reverse()
      .filter((run) => `${run.name} ${run.strategy}`.toLowerCase().includes(wanted)).map((run) => {
        const tick = make("input", { type: "checkbox", checked: chosen.has(run.number),
          onchange: () => {
            const now = new Set(document_.picked);
            if (!now.delete(run.number)) now.add(run.number);
            pick(now.size ? [...now].sort((a, b) => a - b) : [run.number]);
          } });
        tick.dataset.pick = "tick" + run.number;
        tick.setAttribute("aria-label", `compare ${run.name}`);
        const more = run.error ? make("span", { className: "wrong", textContent: run.error })
          : make("span", {}, run.live ? make("b", { className: "live", textContent: "live" }) : null, run.live ? " · " : null,
            [run.strategy, run.workers && `${run.workers} workers`,
              run.started && new Date(1000 * run.started).toLocaleString()].filter(Boolean).join(" · ")
              || "starting");
        const name = make("button", { type: "button", onclick: () => { pick([run.number]);
          byId("picker").open = false; } }, make("b", { textContent: run.name }), more);
        name.dataset.pick = "name" + run.number;
        return make("li", {}, tick, name);
      }));
    const again = focus && document.querySelector(`[data-pick="${focus}"]`);
    if (again) again.focus();
  };
  byId("picker-find").addEventListener("input", list);
  document.addEventListener("click", (event) => {
    if (document_?.picked.length && !event.composedPath().includes(byId("picker"))) byId("picker").open = false;
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") byId("picker").open = false; });

  // -- asking, again and again --

  const EVERY_MS = 450;
  let document_ = null, version = null, asked = "", round = 0;
  const show = (told) => {
    const old = document_;
    document_ = told;
    const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
    const fresh = (key) => !old || !same(old[key], document_[key]);
    words();
    if (fresh("workers") || fresh("shown")) table();
    if (fresh("about")) about();
    if (fresh("runs") || fresh("picked")) list();
    others(Object.keys(document_.figures));
    for (const [name, one] of boxes) {
      const figure = document_.figures[name];
      if (old && same(old.figures[name], figure)) continue;
      one.due = true;
      if (figure) caption(one, figure);
    }
    later();
  };
  const ask = async () => {
    const mine = ++round, runs = picked().join(",");
    if (runs !== asked) { version = null; asked = runs; }
    let wait = EVERY_MS;
    try {
      const since = version === null ? "" : `&since=${version}`;
      const answer = await fetch(`data?runs=${runs}${since}`);
      if (mine !== round) return;
      if (answer.ok) {
        const told = await answer.json();
        if (mine !== round) return;
        version = told.version;
        if (told.document) show(told.document);
      } else {
        warn([(await answer.text()).replace(/^freewheel: /, "").trim()]);
        version = null;
        wait = 2000;
      }
    } catch (error) {
      if (!(error instanceof TypeError)) throw error;  // fetch has no other word for a server that is gone
      warn(["The dashboard has ended, or cannot be reached. Start it again: freewheel dashboard RUN."]);
      version = null;
      wait = 2000;
    }
    if (mine === round) setTimeout(next, wait, mine);
  };
  const next = (mine) => {
    if (mine !== round || document.hidden) return;
    if (framed) setTimeout(next, 30, mine);  // first all is drawn that is known
    else ask();
  };
  addEventListener("hashchange", ask);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });
  ask();
})();
