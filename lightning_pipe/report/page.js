"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const place = document.getElementById("pictures");
const INKS = { parameters: "#4477aa", gradients: "#66ccee", optimizer: "#228833", buffers: "#bbbbbb", saved: "#ee6677", messages: "#ccbb44", workspace: "#aa3377" };
const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function make(tag, attributes = {}, ...children) {
  const svg = ["svg", "path", "line", "text", "rect", "g"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function seconds(value, step) {
  const [unit, size] = step >= 1 ? ["s", 1] : step >= 1e-3 ? ["ms", 1e-3] : ["µs", 1e-6];
  return `${+(value / size).toFixed(step / size >= 1 ? 0 : 2)} ${unit}`;
}

function amount(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < 4) { bytes /= 1024; unit += 1; }
  return `${+bytes.toPrecision(3)} ${units[unit]}`;
}

function ticks(from, to, count) {
  const raw = (to - from) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find(factor => factor * power >= raw);
  const found = [];
  for (let k = Math.ceil(from / step); k * step <= to; k += 1) found.push(k * step);
  return [found, step];
}

function legend(entries) {
  const box = make("div", { class: "legend" });
  for (const [name, colour] of entries) box.append(make("span", {}, make("i", { style: `background:${colour}` }), name));
  return box;
}

function timeline() {
  if (!data.runs.length) return;
  const length = Math.max(...data.runs.map(run => run.seconds)) || 1;
  const LANE = 24, GAP = 10, LEFT = 120, TOP = 24, height = TOP + data.ranks.length * (data.runs.length * LANE + GAP) + 8;
  let from = 0, to = length, shown = [];
  const canvas = make("canvas", { height: String(height), tabindex: "0", "aria-label": "timeline of the step" });
  const tip = make("div", { class: "tip" });
  const tools = make("div", { class: "tools" });
  for (const [name, act] of [["+", () => zoom(0.5)], ["−", () => zoom(2)], ["◀", () => move(-0.25)], ["▶", () => move(0.25)], ["whole step", () => { from = 0; to = length; draw(); }]]) {
    const button = make("button", { type: "button" }, name);
    button.onclick = act;
    tools.append(button);
  }
  tools.append(make("span", { class: "note" }, "drag to move, Ctrl + wheel or double-click to zoom"));
  place.append(make("h2", {}, "Timeline"), ...data.runs.map(run => make("div", { class: "note" }, run.heading)), tools);
  place.append(make("div", { class: "canvas" }, canvas, tip));
  const used = new Set(data.runs.flatMap(run => run.bars.map(bar => bar[1])));
  const names = { ...data.meanings, sum: "gradient all-reduce", step: "optimizer step", ...data.own_work };
  place.append(legend([...Object.keys(names).filter(kind => used.has(kind)).map(kind => [data.meanings[kind] ? `${kind}  ${names[kind]}` : names[kind], data.colours[kind]]), ["message on its way", data.colours.message]]));
  if (data.left_out) place.append(make("p", { class: "note" }, `${data.left_out} more ranks are not drawn.`));

  function bound() {
    const width = Math.min(to - from, length);
    from = Math.max(0, Math.min(from, length - width));
    to = from + width;
  }
  function zoom(factor, at = (from + to) / 2) {
    if ((to - from) * factor < length / 1e5) return;
    from = at - (at - from) * factor;
    to = at + (to - at) * factor;
    bound(); draw();
  }
  function move(share) { const by = (to - from) * share; from += by; to += by; bound(); draw(); }

  function draw() {
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
    canvas.width = width * ratio; canvas.height = height * ratio; canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d"), scale = (width - LEFT - 8) / (to - from), x = time => LEFT + (time - from) * scale;
    pen.scale(ratio, ratio);
    pen.fillStyle = style("--paper"); pen.fillRect(0, 0, width, height);
    pen.font = "11px system-ui, sans-serif"; pen.textBaseline = "middle";
    const [marks, step] = ticks(from, to, Math.max(2, width / 140));
    pen.textAlign = "center";
    for (const mark of marks) {
      pen.fillStyle = style("--line"); pen.fillRect(x(mark), TOP - 6, 1, height);
      pen.fillStyle = style("--faint"); pen.fillText(seconds(mark, step), x(mark), 9);
    }
    shown = [];
    data.runs.forEach((run, number) => {
      const top = rank => TOP + rank * (data.runs.length * LANE + GAP) + number * LANE;
      data.ranks.forEach((name, rank) => {
        pen.textAlign = "left"; pen.fillStyle = style(number ? "--faint" : "--ink");
        pen.fillText(number ? run.name : `rank ${name} ${run.name}`, 8, top(rank) + LANE / 2);
        pen.fillStyle = style("--box"); pen.fillRect(LEFT, top(rank) + 2, width - LEFT - 8, LANE - 4);
      });
      pen.save(); pen.beginPath(); pen.rect(LEFT, TOP - 6, width - LEFT - 8, height); pen.clip();
      const paint = (rank, start, long, y, tall, colour, label, text) => {
        if (start > to || start + long < from) return;
        const left = x(start), wide = Math.max(1, long * scale);
        pen.fillStyle = colour; pen.fillRect(left, y, Math.max(0.6, wide - (wide > 3 ? 0.7 : 0)), tall);
        if (label && wide > 6 + 6 * label.length) { pen.fillStyle = "#111111"; pen.textAlign = "center"; pen.fillText(label, left + wide / 2, y + tall / 2 + 1); }
        shown.push([left, y, wide, tall, `${text} · ${seconds(long, long)} · at ${seconds(start, step / 100)} (${run.name})`]);
      };
      for (const [rank, , start, long, text] of run.messages) paint(rank, start, long, top(rank) + LANE - 4, 2.5, data.colours.message, "", text);
      for (const [rank, kind, start, long, both] of run.bars) {
        const cut = both.indexOf("|"), thin = data.thin.includes(kind);
        pen.globalAlpha = run.name === "predicted" && data.runs.length > 1 ? 0.75 : 1;
        paint(rank, start, long, thin ? top(rank) + (kind === "sum" ? LANE - 7 : 2) : top(rank) + 3, thin ? 3 : LANE - 8, data.colours[kind], both.slice(0, cut), both.slice(cut + 1));
        pen.globalAlpha = 1;
      }
      pen.restore();
    });
  }
  let held = null;
  const spot = event => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top, (to - from) / (box.width - LEFT - 8)]; };
  canvas.onpointerdown = event => { held = [event.clientX, from, to]; canvas.setPointerCapture(event.pointerId); };
  canvas.onpointerup = () => { held = null; };
  canvas.onpointermove = event => {
    const [px, py, each] = spot(event);
    if (held) { const by = (held[0] - event.clientX) * each; from = held[1] + by; to = held[2] + by; bound(); draw(); return; }
    const hit = shown.findLast(([left, y, wide, tall]) => px >= left - 1 && px <= left + wide + 1 && py >= y && py <= y + tall);
    tip.style.display = hit ? "block" : "none";
    if (hit) { tip.textContent = hit[4]; tip.style.left = `${Math.min(px + 12, canvas.clientWidth - tip.offsetWidth - 4)}px`; tip.style.top = `${py + 14}px`; }
  };
  canvas.onpointerleave = () => { tip.style.display = "none"; };
  canvas.onwheel = event => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const [px, , each] = spot(event);
    zoom(event.deltaY > 0 ? 1.25 : 0.8, from + (px - LEFT) * each);
  };
  canvas.ondblclick = event => { const [px, , each] = spot(event); zoom(0.4, from + (px - LEFT) * each); };
  canvas.onkeydown = event => {
    const act = { "+": () => zoom(0.5), "-": () => zoom(2), ArrowLeft: () => move(-0.25), ArrowRight: () => move(0.25), Home: () => { from = 0; to = length; draw(); } }[event.key];
    if (act) { event.preventDefault(); act(); }
  };
  window.addEventListener("resize", draw);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
}

function memory() {
  if (!data.memory.length) return;
  const W = Math.min(1120, place.clientWidth || 1120), H = 170, LEFT = 70, BOTTOM = 20;
  place.append(make("h2", {}, "Memory"), make("p", { class: "note" }, "Predicted, by kind. Dashed: measured activations, above the predicted state, with times stretched to the predicted step. Dotted: measured peak. Red: limit."));
  place.append(legend(data.kinds.map(kind => [kind, INKS[kind]])));
  const end = Math.max(...data.memory.map(stack => stack.times.at(-1) ?? 0)) || 1;
  const spans = data.memory.flatMap(stack => stack.measured.map(point => point[0]));
  const first = Math.min(...spans), last = Math.max(...spans);
  const top = 1.08 * Math.max(...data.memory.map(stack => Math.max(stack.limit ?? 0, stack.measured_peak ?? 0, ...stack.times.map((_, k) => stack.kinds.reduce((sum, one) => sum + one[k], 0)))), 1);
  const x = time => LEFT + (W - LEFT - 4) * time / end, y = bytes => (H - BOTTOM) * (1 - bytes / top) + 4;
  for (const stack of data.memory) {
    const svg = make("svg", { viewBox: `0 0 ${W} ${H}`, role: "img" });
    const [marks] = ticks(0, top, 4), unit = 2 ** (10 * Math.floor(Math.log2(top / 4 || 1) / 10)), [even] = ticks(0, top / unit, 4);
    for (const mark of (unit > 1 ? even.map(one => one * unit) : marks).filter(Boolean)) svg.append(make("line", { x1: LEFT, x2: W, y1: y(mark), y2: y(mark), stroke: "var(--line)" }), make("text", { x: LEFT - 6, y: y(mark) + 4, "text-anchor": "end" }, amount(mark)));
    let base = stack.times.map(() => 0);
    stack.kinds.forEach((series, number) => {
      const next = base.map((bytes, k) => bytes + series[k]);
      if (series.some(Boolean)) {
        const edge = values => values.map((bytes, k) => [[x(stack.times[k]), y(bytes)], [x(stack.times[k + 1] ?? end), y(bytes)]]).flat();
        const points = [...edge(next), ...edge(base).reverse()];
        svg.append(make("path", { d: `M${points.map(point => point.map(one => one.toFixed(1)).join(" ")).join("L")}Z`, fill: INKS[data.kinds[number]] }));
      }
      base = next;
    });
    const state = stack.times.length ? stack.kinds.slice(0, 4).reduce((sum, one) => sum + one[0], 0) : 0;
    if (stack.measured.length) {
      const points = stack.measured.map(([time, bytes], k) => {
        const at = one => x((one - first) / (last - first || 1) * end);
        return `${at(time).toFixed(1)} ${y(state + bytes).toFixed(1)}L${at(stack.measured[k + 1]?.[0] ?? last).toFixed(1)} ${y(state + bytes).toFixed(1)}`;
      });
      svg.append(make("path", { d: `M${points.join("L")}`, fill: "none", stroke: "var(--ink)", "stroke-dasharray": "5 3", "stroke-width": "1.3" }));
    }
    if (stack.measured_peak) svg.append(make("line", { x1: LEFT, x2: W, y1: y(stack.measured_peak), y2: y(stack.measured_peak), stroke: "var(--ink)", "stroke-dasharray": "1 4", "stroke-width": "2" }));
    if (stack.limit) svg.append(make("line", { x1: LEFT, x2: W, y1: y(stack.limit), y2: y(stack.limit), stroke: "#d62728", "stroke-width": "2" }));
    const [stamps, step] = ticks(0, end, Math.max(2, W / 140));
    for (const mark of stamps) svg.append(make("text", { x: x(mark), y: H - 3, "text-anchor": "middle" }, seconds(mark, step)));
    place.append(make("h3", {}, `rank ${stack.ranks}: ${stack.heading}`), svg);
  }
}

function alternatives() {
  const all = data.candidates;
  if (all.length < 2) return;
  place.append(make("h2", {}, "Try other plans"), make("p", { class: "note" }, `Choose a layout, a schedule and a number of micro-batches among the ${all.length} plans that were simulated. All figures are predicted.`));
  const select = (label, values) => { const box = make("select", { "aria-label": label }); for (const value of values) box.append(make("option", { value }, value)); return box; };
  const unique = (name, among) => [...new Set(among.map(one => one[name]))];
  const other = all.find(one => one.step !== all[0].step) ?? all[1], layout = select("layout", unique("layout", all)), schedule = select("schedule", []), slider = make("input", { type: "range", min: "0", step: "1", "aria-label": "micro-batches" });
  const count = make("span"), out = make("table"), tools = make("div", { class: "tools" }, ...[["layout", layout], ["schedule", schedule], ["micro-batches", slider, count]].map(parts => make("label", {}, ...parts.flatMap(part => [part, " "]))));
  layout.value = other.layout;
  place.append(tools, make("div", { class: "table" }, out));
  function fill(box, values, wanted) { box.replaceChildren(...values.map(value => make("option", { value }, value))); if (values.includes(wanted)) box.value = wanted; }
  function show(changed) {
    const same = all.filter(one => one.layout === layout.value);
    if (changed === "layout") fill(schedule, unique("schedule", same), schedule.value || other.schedule);
    const row = same.filter(one => one.schedule === schedule.value).sort((a, b) => a.microbatches - b.microbatches);
    if (changed) { slider.max = String(row.length - 1); slider.value = String(Math.max(0, row.findIndex(one => one.microbatches === other.microbatches))); }
    slider.disabled = row.length < 2;
    const now = row[Number(slider.value)];
    count.textContent = String(now.microbatches);
    const line = (name, one) => make("tr", {}, make("th", { class: "text" }, name), ...[one.step, one.ratio, one.idle, one.peak, one.fits ? "yes" : "no"].map(text => make("td", {}, text)));
    out.replaceChildren(make("tr", {}, ...["", "step", "of this plan's", "bubble", "peak per device", "fits"].map(text => make("th", {}, text))), line("this plan", all[0]), line("selected", now));
  }
  layout.onchange = () => show("layout"); schedule.onchange = () => show("schedule"); slider.oninput = () => show("");
  show("layout");
}

timeline();
memory();
alternatives();
