"use strict";
// Shows the values of a report. Values come from files of any origin: they enter the page as text nodes only.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const HUES = ["#3b82f6", "#e8710a", "#16a34a", "#d6336c", "#8b5cf6", "#0d9aa6", "#b7860b", "#db5bb0", "#7a8797", "#7aa80c"];
  const PHASES = ["start", "data", "compute", "comm", "evaluate", "checkpoint"];
  const PHASE_NAMES = { start: "start-up", data: "waiting for data", compute: "compute", comm: "exchange (waiting for other ranks)", evaluate: "validation", checkpoint: "checkpoint" };
  let redraws = []; // {holder, draw}: draw again in other colours or another width; end: free what it drew
  const sections = new Map(); // title -> what it shows, for pages that change
  const orders = {}; // how tables are sorted, by label

  // -- elements ----------------------------------------------------------------------------------------------

  function el(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (typeof value === "function") made.addEventListener(name, value);
      else if (value === true) made.setAttribute(name, "");
      else if (value !== false && value != null) made.setAttribute(name, value);
    }
    made.append(...children.flat(Infinity).filter((child) => child != null && child !== false));
    return made;
  }

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const hue = (made, colour) => { made.style.setProperty("--hue", colour); return made; };
  const known = (value) => value !== null && value !== undefined && value !== "";

  function text(value, digits = 3) {
    if (!known(value)) return "–";
    if (typeof value !== "number") return String(value);
    if (Number.isInteger(value)) return value.toLocaleString("en-US");
    return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en-US")
      : Math.abs(value) >= 0.001 || value === 0 ? value.toFixed(digits) : value.toExponential(2);
  }

  const NO_LABELS = "no labels", figureOf = (value) => value === -1 ? NO_LABELS : value; // -1 in the files, as in pycocotools

  function duration(seconds) {
    if (!known(seconds)) return "–";
    if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
    const minutes = Math.floor(seconds / 60), rest = Math.round(seconds % 60);
    return minutes < 10 && rest ? `${minutes} min ${rest} s` : minutes < 60 ? `${minutes} min` : `${Math.floor(minutes / 60)} h${minutes % 60 ? ` ${minutes % 60} min` : ""}`;
  }

  // A part that damaged values break shows the reason, and the other parts stay. A second call with the same title replaces
  // the content if the inputs differ. Empty sections are hidden.
  function section(title, inputs, make) {
    const before = sections.get(title);
    if (before && before.inputs.every((input, at) => input === inputs[at] || JSON.stringify(input) === JSON.stringify(inputs[at]))) return;
    let filled;
    try {
      filled = [make()].flat(Infinity).filter((child) => child != null && child !== false);
    } catch (problem) {
      filled = [el("p", { class: "problem" }, `This part cannot be shown: ${problem.message}`)];
    }
    const { body, item } = before || added(title);
    sections.set(title, { inputs, body, item });
    body.parentNode.hidden = item.hidden = !filled.length;
    if (filled.length === body.childNodes.length && filled.every((child, at) => child === body.childNodes[at])) return;
    const focused = body.contains(document.activeElement) && document.activeElement.getAttribute("aria-label");
    body.replaceChildren(...filled);
    if (focused) body.querySelector(`[aria-label="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
  }

  function added(title) {
    const id = `s${sections.size + 1}`, body = el("div");
    document.getElementById("main").append(el("section", { "aria-labelledby": id }, el("h2", { id, tabindex: "-1" }, title), body));
    const list = document.querySelector("#contents ul") || document.getElementById("contents").appendChild(el("ul"));
    const item = list.appendChild(el("li", {}, el("a", { href: `#${id}` }, title)));
    return { body, item };
  }

  const panel = (title, ...children) => el("div", { class: "panel" }, el("h3", {}, title), ...children);
  const cards = (pairs) => el("div", { class: "cards" }, pairs.filter(([, value]) => known(value)).map(([name, value]) => el("div", { class: "card" }, el("b", {}, value), el("span", {}, name))));
  const scroll = (label, ...children) => el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, ...children);
  const check = (label, checked, changed) => el("label", {}, el("input", { type: "checkbox", checked, change: (event) => changed(event.target.checked) }), label);

  function choice(label, options, changed) {
    const list = el("select", { change: () => changed(list.value) }, options.map((option, number) => el("option", { value: number }, option)));
    return el("label", {}, label, list);
  }

  // A table whose columns sort by a click. columns: [name, is a number, digits]; a cell may be an element.
  function table(label, columns, rows, { sorts = true, most } = {}) {
    let order = rows.slice();
    const body = el("tbody");
    const show = () => body.replaceChildren(...order.map((row) => el("tr", {}, row.map((cell, at) =>
      el(at === 0 ? "th" : "td", { scope: at === 0 && "row", class: columns[at][0] === "" ? "bars" : columns[at][1] && "number" }, cell instanceof Node ? cell : text(cell, columns[at][2]))))));
    const heads = columns.map(([name, number], at) => el("th", { scope: "col", class: number && "number" }, !sorts ? name : el("button", {
      click: () => {
        const { by, falls } = orders[label] || {};
        orders[label] = { by: at, falls: by === at ? !falls : !!number };
        sort();
      },
    }, name)));
    function sort() {
      const { by, falls } = orders[label], value = (row) => row[by] instanceof Node ? Number(row[by].dataset.value) : row[by] === NO_LABELS ? -1 : row[by];
      order = rows.slice().sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) * (falls ? -1 : 1));
      heads.forEach((head, other) => head.setAttribute("aria-sort", other !== by ? "none" : falls ? "descending" : "ascending"));
      show();
    }
    if (orders[label]) sort();
    else show();
    return scroll(label, el("table", {}, el("thead", {}, el("tr", {}, heads)), body));
  }

  function bar(value, most, digits) {
    const inner = el("div", { class: "bar" });
    inner.style.width = `${most > 0 ? Math.max(0, 100 * value / most) : 0}%`;
    const made = el("div", { title: text(value, digits) }, inner);
    made.dataset.value = value;
    return made;
  }

  // -- charts ------------------------------------------------------------------------------------------------

  // series: [{label, values, colour, thick, hidden}]. Arrows move the cursor, + and - zoom, 0 shows all.
  function chart(title, x, series, { xLabel = "epoch", range, legend = true, height = 230 } = {}) {
    const holder = el("div", { class: "chart", tabindex: "0", role: "group", "aria-label": `${title} over ${xLabel}. Arrow keys read values, plus and minus zoom, 0 shows all.` });
    const reset = el("button", { hidden: true, click: () => { zoom(x[0], x[x.length - 1]); holder.focus(); } }, "Show all");
    let plot, shown = series.map((one) => !one.hidden);
    const zoom = (min, max) => plot.setScale("x", { min, max });
    function draw() {
      if (plot) plot.destroy();
      const line = css("--line"), soft = css("--soft"), font = "11px system-ui, sans-serif";
      const axis = { stroke: soft, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font };
      plot = new uPlot({
        width: Math.max(holder.clientWidth, 220), height,
        scales: { x: { time: false }, y: range ? { range } : {} },
        axes: [{ ...axis, label: xLabel, labelSize: 18, labelFont: font, size: 34 }, { ...axis, size: 58, values: (_, ticks) => ticks.map((tick) => String(+tick.toPrecision(4))) }],
        series: [{ label: xLabel, value: (_, value) => text(value) }, ...series.map((one, at) => ({
          label: one.label, stroke: one.colour === "text" ? css("--text") : one.colour || HUES[at % HUES.length], width: one.thick || 1.8, show: shown[at], spanGaps: true,
          dash: one.dash, points: { show: () => one.thick !== 0.7 && x.length <= 40, size: 5 }, value: (_, value) => text(value, 4),
        }))],
        legend: { show: legend },
        cursor: { y: false, drag: { x: true, y: false, setScale: true } },
        hooks: {
          setScale: [(u, key) => { if (key === "x") reset.hidden = u.scales.x.min <= x[0] && u.scales.x.max >= x[x.length - 1]; }],
          setCursor: [(u) => { if (u.cursor.idx == null) rest(u); }],
          setSeries: [(u, at, options) => { if (at > 0 && "show" in options) shown[at - 1] = u.series[at].show; marks(u); }],
        },
      }, [x, ...series.map((one) => one.values)], holder);
      marks(plot);
      rest(plot);
    }
    function rest(u) { // without a cursor, the last values
      if (xLabel === "epoch") u.setLegend({ idxs: u.data.map((values) => values.findLastIndex(known)) }, false);
    }
    function marks(u) { // the legend switches series on and off; by the keyboard too
      u.root.querySelectorAll(".u-series:not(:first-child) th").forEach((head, at) => {
        head.setAttribute("aria-pressed", String(shown[at]));
        if (head.tabIndex === 0) return;
        head.tabIndex = 0;
        head.setAttribute("role", "button");
        head.addEventListener("keydown", (event) => {
          if (event.key === "Enter" || event.key === " ") { event.preventDefault(); event.stopPropagation(); head.click(); }
        });
      });
    }
    holder.addEventListener("keydown", (event) => {
      if (event.target !== holder) return;
      const { min, max } = plot.scales.x, at = plot.cursor.idx ?? 0, middle = x[at] ?? (min + max) / 2;
      if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
        const next = Math.min(Math.max(at + (event.key === "ArrowLeft" ? -1 : plot.cursor.idx == null ? 0 : 1), 0), x.length - 1);
        plot.setCursor({ left: plot.valToPos(x[next], "x"), top: 10 });
      } else if (event.key === "+" || event.key === "-") {
        const half = (max - min) * (event.key === "+" ? 0.25 : 1);
        zoom(Math.max(middle - half, x[0]), Math.min(middle + half, x[x.length - 1]));
      } else if (event.key === "0") zoom(x[0], x[x.length - 1]);
      else return;
      event.preventDefault();
    });
    redraws.push({ holder, draw, end: () => plot && plot.destroy() });
    const made = panel(title, holder, reset);
    made.labels = series.map((one) => one.label).join("\n");
    made.update = (newX, newSeries) => { // keeps the zoom and the hidden lines
      [x, series] = [newX, newSeries];
      if (!plot) return;
      plot.setData([x, ...series.map((one) => one.values)], reset.hidden);
      if (!reset.hidden) plot.redraw();
      if (plot.cursor.idx == null) rest(plot);
    };
    return made;
  }

  function redrawAll() {
    for (const { holder, end } of redraws) if (!holder.isConnected && end) end();
    redraws = redraws.filter(({ holder }) => holder.isConnected);
    for (const { draw } of redraws) draw();
  }

  // -- pictures ----------------------------------------------------------------------------------------------

  // The number of boxes of each class, for people who do not see the picture.
  function counted(boxes, names) {
    const counts = new Map();
    for (const [label] of boxes) counts.set(label, (counts.get(label) || 0) + 1);
    const told = [...counts].sort((a, b) => b[1] - a[1]).slice(0, 8).map(([label, count]) => `${count} ${names[label] ?? label}`);
    return `${boxes.length} ${boxes.length === 1 ? "box" : "boxes"}${told.length ? ` (${told.join(", ")}${counts.size > 8 ? ", …" : ""})` : ""}`;
  }

  // boxes: [class, x, y, width, height, score] as fractions of the image
  function view(jpeg, sizeWh, boxes, names, least, about) {
    const shot = el("div", { class: "shot" });
    shot.style.aspectRatio = `${sizeWh[0]} / ${sizeWh[1]}`;
    const drawn = boxes.filter((box) => box[5] === undefined || box[5] >= least);
    if (jpeg) shot.append(el("img", { src: `data:image/jpeg;base64,${jpeg}`, alt: `${about}: ${counted(drawn, names)}`, loading: "lazy", decoding: "async" }));
    for (const [label, x, y, width, height, score] of drawn) {
      const name = names[label] ?? String(label);
      const made = hue(el("div", { class: y < 0.06 ? "box top" : "box" }, el("span", {}, score === undefined ? name : `${name} ${score.toFixed(2)}`)), HUES[label % HUES.length]);
      Object.assign(made.style, { left: `${100 * x}%`, top: `${100 * y}%`, width: `${100 * width}%`, height: `${100 * height}%` });
      shot.append(made);
    }
    return shot;
  }

  // items: [{name, title, jpeg, sizeWh, views: [[caption, boxes]]}]
  function pictures(items, names) {
    const holder = el("div", { class: "shots" });
    let least = 0.25;
    const draw = () => holder.replaceChildren(...items.map((item) => el("figure", { class: "panel" },
      el("div", { class: "views" }, item.views.map(([caption, boxes]) => el("div", {}, el("div", { class: "soft" }, caption), view(item.jpeg, item.sizeWh, boxes, names, least, `${item.name}, ${caption}`)))),
      el("figcaption", {}, item.title))));
    const value = el("output", {}, "0.25");
    draw();
    return [el("div", { class: "controls" },
      el("label", {}, "Detections with a score of at least", el("input", { type: "range", min: "0.1", max: "0.9", step: "0.05", value: "0.25", input: (event) => { least = Number(event.target.value); value.textContent = least.toFixed(2); draw(); } }), value),
      check("Names", true, (on) => holder.classList.toggle("nolabels", !on)),
      check("Large", false, (on) => holder.classList.toggle("large", on))), holder];
  }

  const fileName = (path) => path.split(/[\\/]/).pop();

  // -- the time line -----------------------------------------------------------------------------------------

  function timeline(line) {
    const canvas = el("canvas", { class: "timeline", tabindex: "0", role: "img", "aria-label": "Time line of the ranks. Arrow keys read the epochs; the table below has the sums." });
    const reading = el("p", { class: "reading", "aria-live": "polite" }, "Point at the time line, or focus it and use the arrow keys.");
    const rows = Math.max(line.ranks.length, 1), tall = rows > 24 ? 12 : 24, left = 64, top = 18, foot = 26;
    const end = Math.max(line.ends_s, 0.001);
    const sum = (numbers) => numbers.reduce((a, b) => a + b, 0), partsOf = (seconds) => PHASES.map((phase) => seconds[line.phases.indexOf(phase)] || 0).slice(1);
    let chosen = -1, row = 0;
    function draw() {
      const width = canvas.clientWidth || 600, height = top + rows * (tall + 3) + foot, ratio = window.devicePixelRatio || 1;
      canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.height = `${height}px`;
      const pen = canvas.getContext("2d"), at = (seconds) => left + (width - left - 8) * seconds / end;
      pen.scale(ratio, ratio);
      pen.font = "11px system-ui, sans-serif";
      pen.textBaseline = "middle";
      const block = (from, to, y, colour) => { pen.fillStyle = colour; pen.fillRect(at(from), y, Math.max(at(to) - at(from), 0.5), tall); };
      for (let n = 0; n < rows; n++) {
        const y = top + n * (tall + 3);
        pen.fillStyle = css("--soft");
        pen.fillText(`rank ${line.ranks[n] ? line.ranks[n].rank : 0}`, 2, y + tall / 2);
        for (const attempt of line.attempts) if (n < (attempt.processes || 1)) block(attempt.from_s, attempt.to_s, y, css("--start"));
        for (const span of line.spans) {
          const seconds = span.seconds[n];
          if (!seconds) continue;
          const parts = partsOf(seconds), length = span.to_s - span.from_s, total = Math.max(sum(parts), length) || 1;
          block(span.from_s, span.to_s, y, css("--line")); // what the phases do not fill is not recorded
          let from = span.from_s;
          parts.forEach((part, at) => {
            const to = from + length * part / total;
            if (part > 0) block(from, to, y, css(`--${PHASES[at + 1]}`));
            from = to;
          });
        }
      }
      pen.strokeStyle = css("--text");
      if (chosen >= 0) {
        const span = line.spans[chosen];
        pen.lineWidth = 2;
        pen.strokeRect(at(span.from_s), top + row * (tall + 3), at(span.to_s) - at(span.from_s), tall);
      }
      pen.lineWidth = 1;
      line.attempts.slice(1).forEach((attempt) => { // a start after the first
        pen.strokeStyle = pen.fillStyle = css("--bad");
        pen.beginPath(); pen.moveTo(at(attempt.from_s), 4); pen.lineTo(at(attempt.from_s), height - foot); pen.stroke();
        pen.fillText("restart", Math.min(at(attempt.from_s) + 3, width - 40), 8);
      });
      pen.fillStyle = css("--soft");
      const steps = [0.1, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400, 604800];
      const step = steps.find((one) => one * width / 110 >= end) || end;
      for (let tick = 0; tick <= end; tick += step) {
        pen.textAlign = tick === 0 ? "left" : at(tick) > width - 40 ? "right" : "center";
        pen.fillText(tick ? duration(tick) : "0", at(tick), height - foot / 2);
      }
      pen.textAlign = "left";
    }
    function read() {
      const span = line.spans[chosen], rank = line.ranks[row], seconds = span && span.seconds[row];
      if (!seconds) return;
      const epochs = span.epochs > 1 ? `epochs ${span.epoch} to ${span.epoch + span.epochs - 1}` : `epoch ${span.epoch}`;
      reading.textContent = `rank ${rank.rank}${rank.host ? ` on ${rank.host}` : ""}, ${epochs}: ` + line.phases.map((phase, at) => [phase, seconds[at]]).filter(([, s]) => s > 0).map(([phase, s]) => `${PHASE_NAMES[phase] || phase} ${duration(s)}`).join(", ");
      const rest = span.to_s - span.from_s - sum(partsOf(seconds));
      if (rest >= 0.05) reading.textContent += `, not recorded ${duration(rest)}`;
      draw();
    }
    canvas.addEventListener("pointermove", (event) => {
      const place = canvas.getBoundingClientRect(), seconds = (event.clientX - place.left - left) / (place.width - left - 8) * end;
      row = Math.min(Math.max(Math.floor((event.clientY - place.top - top) / (tall + 3)), 0), rows - 1);
      chosen = line.spans.findIndex((span) => span.from_s <= seconds && seconds <= span.to_s);
      read();
    });
    canvas.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (!move || !line.spans.length) return;
      event.preventDefault();
      chosen = Math.min(Math.max(chosen + move[0], 0), line.spans.length - 1);
      row = Math.min(Math.max(row + move[1], 0), rows - 1);
      read();
    });
    redraws.push({ holder: canvas, draw });
    return [el("ul", { class: "key" }, PHASES.map((phase) => el("li", {}, hue(el("i"), `var(--${phase})`), PHASE_NAMES[phase])), el("li", {}, hue(el("i"), "var(--line)"), "not recorded")), canvas, reading];
  }

  function fleet(line) {
    if (!line) return [];
    const many = line.ranks.length > 1;
    const busy = (rank) => rank.seconds.data + rank.seconds.compute;
    const middle = line.ranks.map(busy).sort((a, b) => a - b)[Math.floor((line.ranks.length - 1) / 2)] || 1;
    const columns = [["rank", true], ["host"], ...PHASES.slice(1).map((phase) => [`${PHASE_NAMES[phase].replace(/ \(.*/, "")}, s`, true, 1])];
    if (many) columns.push(["data + compute / median", true, 2], ["epochs in which it was the slowest", true], ["others waited for it at most, s", true, 1]);
    const rows = line.ranks.map((rank) => [rank.rank, rank.host, ...PHASES.slice(1).map((phase) => rank.seconds[phase]), ...(many ? [busy(rank) / middle, rank.slowest_epochs, rank.waited_s] : [])]);
    const attempts = line.attempts.map((attempt, at) => [at + 1, duration(attempt.from_s), attempt.processes, attempt.step, attempt.to_s - attempt.from_s]);
    return [
      el("p", {}, "The seconds of every rank in each epoch. The order of the phases inside an epoch is not recorded: the parts are sums. On a GPU, exchange that overlaps with the backward pass counts as compute."),
      timeline(line),
      rows.length > 0 && table("Seconds of the ranks", columns, rows),
      many && el("p", { class: "soft" }, "The slowest rank of an epoch is the one that waited least for the others."),
      line.ranks_in_all > line.ranks.length && el("p", { class: "soft" }, `${line.ranks.length} of ${line.ranks_in_all} ranks: those that the others waited for most.`),
      el("h3", {}, "Starts"),
      table("Starts of the run", [["start", true], ["after"], ["processes", true], ["at step", true], ["start-up, s", true, 1]], attempts, { sorts: false }),
      line.marks.length > 0 && table("Events", [["after"], ["event"]], line.marks.map((mark) => [duration(mark.at_s), mark.text]), { sorts: false }),
    ];
  }

  // -- parts of a run ----------------------------------------------------------------------------------------

  const METRIC = /^metrics\//;
  const RATIO = (_, min, max) => [0, Math.max(max * 1.05, 0.01)];
  const GROUPS = [
    ["learning rate", ["lr"], RATIO], ["images per second", ["images_per_s"], RATIO], ["seconds of an epoch", ["seconds", "val_seconds"], RATIO],
    ["share of the training time", ["data_share", "compute_share", "comm_share"], () => [0, 1]], ["device memory, MiB", ["device_memory_mib"], RATIO],
  ];
  const LABELS = { seconds: "epoch", val_seconds: "validation in it", images_per_s: "images/s", device_memory_mib: "MiB", comm_share: "exchange" };
  const shortened = (name) => LABELS[name] || name.replace(/^.*\//, "").replace(/_share$/, "");

  const metricsOf = (curves) => Object.keys(curves).filter((name) => METRIC.test(name));

  // The columns of the task's figures by the title of their chart, as charts_of in plots.py has them.
  function metricGroups(curves) {
    const groups = {};
    for (const name of metricsOf(curves)) {
      const title = name.includes("mAP") ? "average precision" : /precision|recall/.test(name) ? "precision and recall" : "figures";
      (groups[title] ||= []).push(name);
    }
    return Object.entries(groups).map(([title, names]) => [title, names, RATIO]);
  }

  const lossKinds = (curves) => Object.keys(curves).filter((name) => /^train\/.*_loss$/.test(name)).map((name) => name.slice(6, -5));

  let curveParts; // a hint, and the grid with a chart by title
  function curvesOf(curves) {
    const x = curves.epoch;
    if (!x || !x.length) {
      curveParts = null;
      return [];
    }
    curveParts ||= { hint: el("p", { class: "soft" }, "Drag over a chart to zoom; a click on a name hides its line. By the keyboard: arrow keys, + and -, 0."), grid: el("div", { class: "grid" }), charts: new Map() };
    const { hint, grid, charts } = curveParts, made = [];
    function show(title, names, label, options) {
      const series = names.filter((name) => curves[name]).map((name) => ({ label: label(name), values: curves[name] })), known = charts.get(title);
      if (!series.length) return;
      if (known && known.labels === series.map((one) => one.label).join("\n")) known.update(x, series);
      else charts.set(title, chart(title, x, series, options));
      made.push(charts.get(title));
    }
    for (const kind of lossKinds(curves)) show(`${kind} loss`, [`train/${kind}_loss`, `val/${kind}_loss`], (name) => name.split("/")[0]);
    for (const [title, names, range] of [...metricGroups(curves), ...GROUPS]) show(title, names, shortened, { range });
    for (const [title, one] of charts) if (!made.includes(one)) charts.delete(title);
    if (made.length !== grid.childElementCount || made.some((child, at) => child !== grid.children[at])) grid.replaceChildren(...made);
    return [hint, grid];
  }

  const accuracy = (figures) => [...accuracyOf(figures.curves), ...accuracyOf(figures.mask_curves, " of masks")];

  function accuracyOf(curves, what = "") {
    if (!curves || !curves["precision at recall"].length) return [];
    const few = curves.classes.length <= 10, holder = el("div", { class: "grid" });
    const names = ["all classes (mean)", ...curves.classes];
    const kinds = [["precision over recall", "precision at recall", "recall"], ["F1", "F1", "confidence"], ["precision", "precision", "confidence"], ["recall", "recall", "confidence"]];
    function draw(chosen) {
      holder.replaceChildren(...kinds.map(([title, key, xLabel]) => chart(title + what, curves.x, curves[key].map((values, at) => ({
        label: names[at], values, colour: at === 0 ? "text" : few ? HUES[(at - 1) % HUES.length] : at === chosen ? HUES[1] : HUES[8], thick: at === 0 || at === chosen ? 3 : few ? 1.5 : 0.7,
      })), { xLabel, range: [0, 1.02], legend: few, height: 280 })));
      if (holder.isConnected) redrawAll();
    }
    draw(0);
    return [el("p", {}, `IoU 0.5. The best mean F1 is at a confidence of ${text(curves.confidence)}.`),
      !few && el("div", { class: "controls" }, choice("Highlight", names, (value) => draw(Number(value)))), holder];
  }

  function classes(run) {
    const figures = run.figures, both = figures.labels || {}, train = both.train, val = both.val || both.test, names = figures.names || Object.keys(figures.per_class || {});
    if (!names.length) return [];
    const of = figures.per_class || {}, ofClass = run.task.of_class, most = train ? Math.max(...train.per_class, 1) : 0;
    const columns = [["class"]], measured = Object.keys(of).length > 0;
    if (train) columns.push(["training labels", true], [""]);
    if (val) columns.push(["validation labels", true]);
    if (measured) columns.push(...Object.keys(ofClass).map((figure) => [figure, true]));
    const rows = names.map((name, at) => [name, ...(train ? [train.per_class[at], bar(train.per_class[at], most)] : []), ...(val ? [val.per_class[at]] : []),
      ...(measured ? Object.values(ofClass).map((key) => (of[name] || {}).labels === 0 ? NO_LABELS : figureOf((of[name] || {})[key])) : [])]);
    return [table("Figures of each class", columns, rows)];
  }

  function confusion(figures) {
    const found = figures.confusion, names = [...(figures.names || []), "background"];
    if (!found) return [];
    const made = [];
    if (found.matrix) {
      const totals = names.map((_, at) => found.matrix.reduce((sum, row) => sum + row[at], 0)), body = el("tbody");
      const fill = (counts) => body.replaceChildren(...found.matrix.map((row, predicted) => el("tr", {}, el("th", { scope: "row", title: names[predicted] }, names[predicted]), row.map((value, real) => {
        const share = totals[real] ? value / totals[real] : 0;
        const cell = el("td", { class: predicted === real ? null : "wrong", title: `predicted ${names[predicted]}, true ${names[real]}: ${value} (${(100 * share).toFixed(1)} %)` }, value ? (counts ? String(value) : share >= 0.005 ? share.toFixed(2) : "") : "");
        cell.style.setProperty("--share", share);
        return cell;
      }))));
      fill(false);
      made.push(el("p", {}, "Rows: predicted. Columns: true. Each column is divided by its sum. Confidence 0.25, IoU 0.45. The last row holds missed labels, and the last column holds detections of background."),
        el("div", { class: "controls" }, check("Numbers of boxes", false, fill)),
        scroll("Confusion matrix", el("table", { class: names.length > 31 ? "matrix many" : "matrix" }, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "predicted \\ true"), names.map((name) => el("th", { scope: "col", title: name }, name)))), body)));
    }
    if (found.most.length) made.push(el("h3", {}, "Most frequent confusions"), table("Most frequent confusions", [["predicted"], ["true"], ["boxes", true]], found.most.map(([predicted, real, boxes]) => [names[predicted], names[real], boxes])));
    return made;
  }

  const ERRORS = { classification: "right place, wrong class", localisation: "right class, IoU 0.1 to 0.5", both: "wrong class and place", duplicate: "a better detection has the label", background: "no label there", missed: "label without a detection" };
  function errors(figures) {
    const found = figures.errors;
    if (!found) return [];
    const most = Math.max(...found.kinds.map((kind) => kind[2]), 0.001);
    return [el("p", {}, `AP50 ${text(found.ap50)} on ${text(found.images)} images, and how much higher it would be without each kind of error (TIDE). ${known(found.counted_above) ? `The numbers count detections on these images with a confidence above ${found.counted_above}, as the confusion matrix does on all images; AP50 depends on all detections.` : "The numbers count detections of any confidence."}`),
      table("Kinds of errors", [["kind"], ["meaning"], ["number", true], ["AP50 gained", true], [""]], found.kinds.map(([kind, number, gain]) => [kind, ERRORS[kind] || "", number, gain, bar(gain, most)]))];
  }

  function shots(figures, positions, titles) {
    const by = new Map((figures.images || []).map((image) => [image.position, image]));
    return (positions || []).map((position, at) => {
      const image = by.get(position);
      return image && { name: fileName(image.path), title: titles(image, at), jpeg: image.jpeg, sizeWh: image.size_wh_px, views: [["labels", image.labels], ["detections", image.detections]] };
    }).filter(Boolean);
  }

  function labels(run) {
    const both = run.figures.labels || {}, made = [];
    for (const [split, found] of Object.entries(both)) {
      const highest = Math.max(...found.side_counts, 1), heat = el("canvas", { class: "heat", role: "img", width: found.centres[0].length, height: found.centres.length, "aria-label": `Where the centres of the ${split} labels are in the image` });
      const top = Math.log1p(Math.max(...found.centres.flat(), 1));
      const draw = () => {
        const pen = heat.getContext("2d");
        pen.clearRect(0, 0, heat.width, heat.height);
        pen.fillStyle = css("--compute");
        found.centres.forEach((row, y) => row.forEach((value, x) => { pen.globalAlpha = Math.log1p(value) / top; pen.fillRect(x, y, 1, 1); }));
      };
      redraws.push({ holder: heat, draw });
      const histogram = el("div", { class: "histogram", role: "img", "aria-label": "Sides of the boxes" }, found.side_counts.map((value, at) => {
        const column = el("div", { title: `${text(found.side_edges[at])} to ${text(found.side_edges[at + 1])} of the image: ${value} labels` });
        column.style.height = `${100 * value / highest}%`;
        return column;
      }));
      made.push(panel(`${split}: ${text(found.images)} images, ${text(found.labels)} labels`,
        el("p", { class: "soft" }, `${text(found.empty_images)} images without labels`),
        el("div", { class: "soft" }, "side of the boxes (root of the area), 0.4 % to 100 % of the image, logarithmic"), histogram,
        el("div", { class: "soft" }, "centres of the boxes in the image"), heat));
    }
    return [...(run.figures.notes || []).map((note) => el("p", {}, text(note))),
      made.length > 0 && el("div", { class: "grid" }, made),
      run.batch && [el("h3", {}, "Images of the first training batch, augmented, with their labels"), el("img", { class: "wide", alt: "Augmented training images with boxes", src: `data:image/jpeg;base64,${run.batch}`, loading: "lazy" })]];
  }

  function settings(run) {
    const made = [], found = run.settings;
    if (found.problem) made.push(el("p", { class: "problem" }, `config.yaml cannot be read: ${found.problem}`));
    for (const [title, rows] of [["Run", found.settings], ["Recipe", found.recipe]]) {
      if (!rows.length) continue;
      const holder = el("div"), given = rows.filter((row) => row[3]);
      const draw = (all) => holder.replaceChildren(!all && !given.length ? el("p", { class: "soft" }, `All values are defaults: ${rows[0][2]}.`) : table(`Settings: ${title}`, [["name"], ["value"], ["source"]], (all ? rows : given).map((row) => row.slice(0, 3))));
      draw(false);
      made.push(el("h3", {}, title), el("div", { class: "controls" }, check(`all ${rows.length}, with defaults`, false, draw)), holder);
    }
    return made;
  }

  function versions(run) {
    const results = run.results, fleetOf = results.fleet || {}, rows = Object.entries(results.versions || {});
    rows.push(["processes", fleetOf.processes], ["device", fleetOf.device], ["hosts", (fleetOf.hosts || []).join(", ")], ["SHA-256 of the last weights", results.weights_sha256], ["folder", run.folder]);
    return [scroll("Versions", el("table", {}, el("tbody", {}, rows.filter(([, value]) => known(value)).map(([name, value]) => el("tr", {}, el("th", { scope: "row" }, name), el("td", { class: "mono" }, String(value)))))))];
  }

  const lastOf = (values) => (values || []).filter(known).at(-1);

  function cardsOf(run) {
    const { figures, results, curves, best, task } = run, metrics = results.metrics || figures.metrics || {}, seconds = Object.values(results.seconds || {}), last = run.verb === "val" ? "" : "last ";
    const figure = (name, key) => [`${last}${name}`, known(metrics[key]) ? text(figureOf(metrics[key])) : null];
    return cards([known(best.epoch) ? [`best ${task.main} (epoch ${best.epoch})`, text(best.main)] : ["best epoch", results.best && text(results.best.epoch)],
      ...Object.entries(task.columns).reverse().map(([column, key]) => figure(column.replace(METRIC, ""), key)), ["epochs", curves.epoch && text(lastOf(curves.epoch))],
      ["images per second", curves.images_per_s && text(lastOf(curves.images_per_s), 1)], [run.verb === "val" ? "seconds" : "time", seconds.length && run.verb !== "val" ? duration(seconds.reduce((a, b) => a + b, 0)) : results.seconds && duration(results.seconds.wall)], ["processes", results.fleet && text(results.fleet.processes)]]);
  }

  function showRun(run) {
    document.getElementById("top").append(el("h1", {}, run.name), el("p", { class: "soft" }, `yolofleet ${run.verb} · ${run.finished ? "finished" : "not finished"} · ${run.folder}`), cardsOf(run));
    sectionsOf(run);
  }

  // Which weights the figures of the validation belong to.
  function weightsOf(run) {
    const { epoch } = run.curves, main = Object.keys(run.task.columns).find((column) => run.task.columns[column] === run.task.main), at = (run.curves[main] || []).findLastIndex(known);
    if (run.verb === "val" || at < 0) return "";
    if (!run.finished) return "These figures are from an earlier validation of this run, which may not be its last one.";
    const last = at === epoch.length - 1, best = run.best.epoch === epoch[at];
    return `These figures belong to the averaged weights after epoch ${epoch[at]}, the last validation${last ? " (weights/last.safetensors)" : ""}. weights/best.safetensors is of ${best ? "the same epoch" : `epoch ${run.best.epoch}`}.`;
  }

  function sectionsOf(run) {
    const figures = run.figures, weights = weightsOf(run);
    const withWeights = (made) => made && made.length > 0 && [weights && el("p", { class: "soft weights" }, weights), made];
    section("Curves", [run.curves, run.curves_problem], () => [known(run.curves_problem) && el("p", { class: "problem" }, run.curves_problem), curvesOf(run.curves)]);
    section("Accuracy", [figures, weights], () => withWeights(accuracy(figures)));
    section("Classes", [figures], () => classes(run));
    section("Confusion", [figures, weights], () => withWeights(confusion(figures)));
    section("Errors", [figures], () => errors(figures));
    section("Worst images", [figures, weights], () => {
      const numbers = new Map(figures.worst || []);
      const worst = shots(figures, [...numbers.keys()], (image) => `${numbers.get(image.position)} error${numbers.get(image.position) === 1 ? "" : "s"}: ${fileName(image.path)}`);
      return withWeights(worst.length > 0 && [el("p", {}, "The images with the most errors, labels at the left and detections at the right."), ...pictures(worst, figures.names || [])]);
    });
    section("Predictions", [figures], () => {
      const others = shots(figures, figures.others, (image) => fileName(image.path));
      return others.length > 0 && pictures(others, figures.names || []);
    });
    section("Data", [figures, run.batch], () => labels(run));
    section("Fleet", [run.timeline], () => fleet(run.timeline));
    section("Settings", [run.settings], () => settings(run));
    section("Versions", [run.results, run.folder], () => versions(run));
  }

  // -- comparison --------------------------------------------------------------------------------------------

  const best = (values, higher = true) => Math[higher ? "max" : "min"](...values.filter((value) => typeof value === "number"));
  function marked(value, top, digits) {
    const isDigest = /^[0-9a-f]{64}$/.test(value); // SHA-256: the full value would widen the table
    const made = el("span", { class: value === top ? "best" : null, title: isDigest && value }, isDigest ? `${value.slice(0, 12)}…` : text(figureOf(value), digits));
    made.dataset.value = known(value) ? value : -1;
    return made;
  }

  function compared(runs) {
    const names = runs.map((run) => run.name), holder = el("div", { class: "grid" });
    const axes = [["epoch", (curves) => curves.epoch], ["images seen", (curves) => curves.images], ["hours", (curves) => { let sum = 0; return (curves.seconds || []).map((s) => (sum += s || 0) / 3600); }]];
    const columns = [...new Set(runs.flatMap((run) => metricsOf(run.curves).reverse())), ...new Set(runs.flatMap((run) => lossKinds(run.curves).flatMap((kind) => [`train/${kind}_loss`, `val/${kind}_loss`]))), "lr", "images_per_s", "seconds"];
    function draw(number) {
      const [xLabel, axis] = axes[number];
      holder.replaceChildren(...columns.map((column) => {
        const having = runs.map((run, at) => [run, at]).filter(([run]) => run.curves[column] && axis(run.curves) && axis(run.curves).length);
        if (!having.length) return null;
        const joined = uPlot.join(having.map(([run]) => [axis(run.curves), run.curves[column]]));
        return chart(column.replace(METRIC, "").replace(/_/g, " "), joined[0], having.map(([, at], place) => ({ label: names[at], values: joined[place + 1], colour: HUES[at % HUES.length] })), { xLabel, range: /loss/.test(column) ? undefined : RATIO });
      }).filter(Boolean));
      if (holder.isConnected) redrawAll();
    }
    draw(0);
    return holder.childElementCount ? [el("div", { class: "controls" }, choice("Axis", axes.map(([name]) => name), (value) => draw(Number(value)))), holder] : [];
  }

  function showComparison(found) {
    const runs = found.runs, names = runs.map((run) => run.name), columns = names.map((name) => [name, true]);
    document.getElementById("top").append(el("h1", {}, `Comparison of ${runs.length} runs`), el("ul", { class: "key" }, runs.map((run, at) => el("li", {}, hue(el("i"), HUES[at % HUES.length]), `${run.name} (${run.finished ? "finished" : "not finished"}) `, el("span", { class: "soft" }, run.folder)))));
    section("Final figures", [], () => [
      known(found.unlike) && el("p", { class: "problem" }, text(found.unlike)),
      table("Final figures", [["figure"], ...columns], found.figures.map(([name, higher, ...values]) => [name, ...values.map((value) => marked(value, higher === null ? NaN : best(values, higher), 4))]), { sorts: false }),
      el("p", { class: "soft" }, `The best value of a line is bold. Accuracies are those of the last validation.${runs.every((run) => run.finished) ? "" : " Figures of a run that is not finished end with its last epoch in results.csv."}`),
    ]);
    section("Different settings", [], () => found.settings.length ? table("Different settings", [["name"], ...names.map((name) => [name])], found.settings) : el("p", {}, "The settings and the recipes are equal."));
    section("Curves", [], () => [runs.filter((run) => known(run.curves_problem)).map((run) => el("p", { class: "problem" }, `${run.name}: ${run.curves_problem}`)), compared(runs)]);
    section("Classes", [], () => found.classes.length > 0 && table(`${found.main} of each class`, [[`${found.main} of class`], ...columns], found.classes.map(([name, ...values]) => [name, ...values.map((value) => marked(value, known(found.unlike) ? NaN : best(values)))])));
    section("Where the runs disagree", [], () => {
      const items = found.disagreements.map((image) => ({ name: fileName(image.path), title: `${image.count} detections differ: ${fileName(image.path)}`, jpeg: image.jpeg, sizeWh: image.size_wh_px, views: [["labels", image.labels], ...image.detections.map((boxes, at) => [names[found.compared[at]], boxes])] }));
      const left = found.left_out.map((why) => el("p", { class: "soft" }, `Left out: ${why}.`));
      if (!found.images) return [...left, found.compared.length > 1 && el("p", {}, "The validations have no image in common: no file name and size occurs in all of them.")];
      return [...left, el("p", {}, `On ${text(found.differing)} of ${text(found.images)} common images, detections of the runs differ: score at least 0.25, no partner of the same class with an IoU of 0.5 in ${names[found.compared[0]]}, or the reverse.`), ...(items.length ? pictures(items, found.names) : [])];
    });
  }

  // -- board: pages that change ------------------------------------------------------------------------------

  const STATES = { running: "running", ended: "ended", stopped: "stopped", failed: "failed" };
  const ASKED = { stop: "stop: the run ends after its step, and saves", save: "save: the run saves after its step, and goes on" };
  const PHASE_WORDS = { start: "starts", evaluate: "validates", checkpoint: "saves" };

  function set(node, words) { if (node.textContent !== words) node.textContent = words; } // an equal text keeps a selection

  const percent = (row) => known(row.share) ? Math.min(Math.max(100 * row.share, 0), 100) : 0;
  const rateOf = (row) => known(row.rate_img_s) ? `${text(row.rate_img_s, 1)} img/s` : "";
  const epochOf = (row) => !known(row.epoch) ? "" : known(row.epochs) ? `${row.epoch} / ${row.epochs}` : String(row.epoch);
  const bestOf = (row) => known(row.best) ? `${row.figure} ${row.best === -1 ? NO_LABELS : row.best.toFixed(3)}${known(row.best_epoch) ? ` (epoch ${row.best_epoch})` : ""}` : "";
  function endOf(row) {
    if (!known(row.ends_at_s)) return "";
    const at = new Date(1000 * row.ends_at_s), left = Math.max(row.ends_at_s - Date.now() / 1000, 0);
    return `${at.toLocaleString("en-GB", { weekday: "short", hour: "2-digit", minute: "2-digit" })}, in ${duration(left < 60 ? Math.round(left) : left)}`;
  }

  function progressBar() {
    const inner = el("div", { class: "done" }), made = el("div", { class: "progress", role: "progressbar", "aria-valuemin": 0, "aria-valuemax": 100, "aria-label": "progress" }, inner);
    made.show = (row) => { inner.style.width = `${percent(row)}%`; made.setAttribute("aria-valuenow", Math.round(percent(row))); made.dataset.state = row.state; };
    return made;
  }
  const badge = () => el("span", { class: "state" });
  function showState(node, row) {
    set(node, (row.state === "running" && PHASE_WORDS[row.phase]) || STATES[row.state] || row.state);
    node.dataset.state = row.state;
    node.title = row.sign;
  }

  // The browser connects again by itself, and gets all values then. Hidden pages hold no connection: a browser has few.
  function follow(address, changed) {
    changed(data.now);
    const note = document.body.appendChild(el("p", { class: "lost", role: "status", hidden: true }));
    let stream = null;
    function open() {
      stream = new EventSource(address);
      stream.addEventListener("message", (event) => { note.hidden = true; changed(JSON.parse(event.data)); });
      stream.addEventListener("error", () => {
        set(note, stream.readyState === EventSource.CLOSED ? "The board has ended, or was started again: open the address that it prints." : "The board does not answer. Trying again …");
        note.hidden = false;
      });
    }
    document.addEventListener("visibilitychange", () => {
      if (document.hidden && stream) { stream.close(); stream = null; } else if (!document.hidden && !stream) open();
    });
    open();
  }

  function showBoard() {
    const COLUMNS = [["run"], ["state"], ["progress"], ["rate", true], ["expected end"], ["best"], ["last line"]];
    const counts = el("p", { class: "soft", role: "status" }), body = el("tbody"), lines = new Map();
    const empty = el("p", { hidden: true }, "No runs yet. They appear here when they start.");
    document.getElementById("top").append(el("h1", {}, "Runs"), counts);
    const wide = scroll("Runs", el("table", { class: "runs" }, el("thead", {}, el("tr", {}, COLUMNS.map(([name, number]) => el("th", { scope: "col", class: number && "number" }, name)))), body));
    document.getElementById("main").append(empty, wide);
    document.getElementById("contents").hidden = true;
    function line(row) {
      const link = el("a", { href: `/runs/${row.id}` }), state = badge(), sign = el("span", { class: "soft" }), bar = progressBar(), epochs = el("span", { class: "soft" });
      const cells = COLUMNS.map(([name, number], at) => el(at === 0 ? "th" : "td", { scope: at === 0 && "row", class: number && "number", "data-name": name }));
      cells[0].append(link);
      cells[1].append(state, sign);
      cells[2].append(bar, epochs);
      cells[6].classList.add("mono");
      const tr = el("tr", {}, cells);
      tr.show = (row) => {
        set(link, row.name);
        link.title = row.folder;
        showState(state, row);
        set(sign, row.state === "running" && row.may_ask && !/^starts again/.test(row.sign) ? "" : row.sign);
        bar.show(row);
        set(epochs, epochOf(row) && `epoch ${epochOf(row)}`);
        [[3, rateOf], [4, endOf], [5, bestOf], [6, (one) => one.line]].forEach(([at, of]) => set(cells[at], of(row)));
      };
      return tr;
    }
    follow("/updates", ({ rows }) => {
      const running = rows.filter((row) => row.state === "running").length;
      set(counts, `${rows.length} ${rows.length === 1 ? "run" : "runs"}, ${running} running`);
      document.title = `${running} running: yolofleet board`;
      empty.hidden = rows.length > 0;
      wide.hidden = !rows.length;
      const order = rows.map((row) => {
        if (!lines.has(row.id)) lines.set(row.id, line(row));
        lines.get(row.id).show(row);
        return lines.get(row.id);
      });
      if (order.length !== body.childElementCount || order.some((tr, at) => tr !== body.children[at])) {
        const focused = document.activeElement;
        body.replaceChildren(...order);
        if (body.contains(focused)) focused.focus({ preventScroll: true });
      }
      document.documentElement.dataset.ready = "yes";
    });
  }

  // What the ranks do now. The elements stay, so the table keeps its scroll position.
  const now = { title: el("p"), table: scroll("Ranks now"), rest: el("p", { class: "soft" }) };
  function ranksNow(found) {
    if (!found || !found.rows) return [];
    const numbers = ["rank", "img/s", "waits", "memory", "temp"];
    const note = (row) => [...row.slice(0, -1), el("b", { class: row.at(-1) === "no progress" && "bad" }, row.at(-1))];
    set(now.title, found.title);
    set(now.rest, found.rest);
    now.table.replaceChildren(...table("Ranks now", found.columns.map((column) => [column, numbers.includes(column)]), found.rows.map(note), { sorts: false }).childNodes);
    return [now.title, now.table, now.rest];
  }

  function showLive({ id, name, allow }) {
    const top = document.getElementById("top"), state = badge(), bar = progressBar(), facts = el("p"), sign = el("p", { class: "soft" }), last = el("p", { class: "mono line" }), holder = el("div"), place = el("p", { class: "soft" });
    const answer = el("p", { class: "soft", role: "status" }), run = { figures: {}, batch: "" }, versions = {};
    const buttons = allow.map((kind) => {
      let armed = 0;
      const button = el("button", {
        type: "button", disabled: true, click: async () => {
          if (kind === "stop" && !armed) { // a second click within five seconds, so that a slip stops nothing
            armed = setTimeout(() => { armed = 0; set(button, kind); }, 5000);
            set(button, "stop: click again to confirm");
            return;
          }
          clearTimeout(armed);
          armed = 0;
          set(button, kind);
          set(answer, "…");
          try {
            const reply = await fetch(`/runs/${id}/${kind}`, { method: "POST" });
            set(answer, reply.ok ? `Asked to ${ASKED[kind]}.` : `Refused: ${(await reply.text()).trim()}`);
          } catch { set(answer, "The board does not answer."); }
        },
      }, kind);
      return button;
    });
    top.append(el("p", {}, el("a", { href: "/" }, "All runs")), el("h1", {}, name), el("div", { class: "live panel" }, el("div", { class: "controls" }, state, facts, buttons), bar, sign, last, answer), place, holder);
    async function renew(part, version) {
      if (versions[part] === version) return false;
      const reply = await fetch(`/runs/${id}/${part}`);
      if (!reply.ok) throw new Error(reply.statusText);
      Object.assign(run, await reply.json());
      versions[part] = version;
      return true;
    }
    let turn = Promise.resolve(); // one update after another
    follow(`/runs/${id}/updates`, (found) => { turn = turn.then(() => update(found)).catch((problem) => set(answer, `The values of the run cannot be read: ${problem.message}`)); });
    async function update({ row, progress, figures, ranks }) {
      if (!row) {
        set(sign, "This run is gone: its folder was removed or renamed.");
        buttons.forEach((button) => { button.disabled = true; });
        return;
      }
      showState(state, row);
      bar.show(row);
      set(facts, [epochOf(row) && `epoch ${epochOf(row)}`, rateOf(row), endOf(row) && `expected end ${endOf(row)}`, known(row.best) && `best ${bestOf(row)}`, known(row.saved_step) && `saved at step ${text(row.saved_step)}`].filter(Boolean).join(" · "));
      set(sign, row.state === "running" && row.asked.length ? `${row.sign}; asked to ${row.asked.join(" and ")}, not taken yet` : row.sign);
      set(last, row.line);
      document.title = `${row.state === "running" ? `${Math.floor(percent(row))} % ` : `${row.state}: `}${name}`;
      buttons.forEach((button) => { button.disabled = !row.may_ask; });
      await renew("ranks", ranks);
      section("Ranks now", [run.ranks], () => ranksNow(run.ranks));
      const changes = [await renew("progress", progress), await renew("figures", figures)];
      if (!changes.includes(true)) return;
      set(place, `yolofleet ${run.verb} · ${run.folder}`);
      holder.replaceChildren(cardsOf(run));
      sectionsOf(run);
      drawNew();
      document.documentElement.dataset.ready = "yes";
    }
  }

  // Draw what was added; charts that stay have drawn themselves.
  function drawNew() {
    for (const one of redraws) {
      if (!one.holder.isConnected) { if (one.end) one.end(); } else if (!one.drawn) { one.draw(); one.drawn = true; }
    }
    redraws = redraws.filter(({ holder }) => holder.isConnected);
  }

  // ----------------------------------------------------------------------------------------------------------

  if (data.kind === "board") showBoard();
  else if (data.kind === "live") showLive(data);
  else if (data.kind === "compare") showComparison(data);
  else showRun(data.run);
  redrawAll();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);
  let waiting = 0, wide = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth === wide) return; // a phone's address bar changes the height only
    wide = window.innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(redrawAll, 150);
  });
  if (!["board", "live"].includes(data.kind)) document.documentElement.dataset.ready = "yes"; // for tests
})();
