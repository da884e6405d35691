// Overlaps, shares of blocks, and shares over training.
const KINDS = [["always", "always on"], ["depends", "input dependent"], ["rarely", "rarely open"], ["dead", "dead"]];

// A square of pairs. `value(one, other)` is a share or null; `choose` is called with the column of a cell.
class PairMap {
  constructor(holder, names, value, choose) {
    Object.assign(this, { names, value, choose, cursor: null, mark: null });
    this.canvas = element("canvas", { tabindex: "0", role: "img", class: "pairs", "aria-label": "Map of overlaps" });
    this.readout = element("p", { class: "readout", "aria-live": "polite" });
    this.scale = element("p", { class: "legend", "aria-hidden": "true" });
    holder.append(this.scale, this.canvas, this.readout);
    const at = (event) => {
      const box = this.canvas.getBoundingClientRect();
      const cell = (place, size) => Math.max(0, Math.min(names.length - 1, Math.floor((place / size) * names.length)));
      return [cell(event.clientY - box.top, box.height), cell(event.clientX - box.left, box.width)];
    };
    this.canvas.addEventListener("pointermove", (event) => this.point(at(event)));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    this.canvas.addEventListener("click", (event) => choose(at(event)[1]));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("blur", () => this.point(null));
  }

  key(event) {
    const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    const [row, column] = this.cursor ?? [0, 0], last = this.names.length - 1;
    if (event.key in moves) {
      const [down, right] = this.cursor ? moves[event.key] : [0, 0];
      this.point([Math.max(0, Math.min(last, row + down)), Math.max(0, Math.min(last, column + right))]);
    } else if (event.key === "Enter" || event.key === " ") this.choose(column);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  point(cell) {
    this.cursor = cell;
    this.say();
    this.draw();
  }

  say() {
    if (!this.cursor) { this.readout.textContent = this.resting; return; }
    const [one, other] = this.cursor;
    const share = this.table[one * this.names.length + other];
    this.readout.textContent = `${this.names[one]} and ${this.names[other]}: ` +
      (share === null ? "nothing to compare." : `${percent(share)} of their open blocks in common.`);
  }

  // Works the shares out for other gates.
  compute(some) {
    const n = this.names.length;
    this.table = Array(n * n).fill(null);
    let sum = 0, count = 0;
    for (let i = 0; i < n; i++) for (let j = 0; j <= i; j++) {
      const share = this.value(some, i, j);
      this.table[i * n + j] = this.table[j * n + i] = share;
      if (i !== j && share !== null) { sum += share; count++; }
    }
    this.resting = count ? `Different ones have ${percent(sum / count)} of their open blocks in common on average.` : "";
    this.canvas.setAttribute("aria-label", `Map of overlaps. ${this.resting} Arrow keys read single pairs.`);
    const known = this.table.filter((share, at) => share !== null && at % (n + 1));
    this.low = known.length ? known.reduce((a, b) => Math.min(a, b)) : 0;
    this.scale.replaceChildren(percent(this.low), element("span", { class: "ramp often" }), "100%");
    this.say();
    this.draw();
  }

  draw() {
    if (!this.table) return;
    const n = this.names.length, { canvas } = this, ratio = window.devicePixelRatio || 1;
    const size = Math.max(60, Math.min(canvas.parentElement.clientWidth, 480, 44 * n));
    canvas.style.width = canvas.style.height = `${size}px`;
    canvas.width = canvas.height = Math.round(size * ratio);
    const context = canvas.getContext("2d"), cell = canvas.width / n, gap = cell > 8 * ratio ? ratio : 0;
    // The lightest shade is the smallest overlap: what they differ by is what there is to see.
    const span = Math.max(1e-6, 1 - this.low);
    for (let i = 0; i < n; i++) for (let j = 0; j < n; j++) {
      const share = this.table[i * n + j];
      const [r, g, b] = share === null ? ramps.often[0] : ramps.often[shade(Math.max(0.02, (share - this.low) / span))];
      context.fillStyle = `rgb(${r} ${g} ${b})`;
      context.fillRect(Math.floor(j * cell), Math.floor(i * cell), Math.ceil(cell - gap), Math.ceil(cell - gap));
    }
    context.strokeStyle = ramps.ink;
    context.lineWidth = 1.5 * ratio;
    if (this.mark !== null) {
      context.strokeRect(this.mark * cell, 0, cell, canvas.height);
      context.strokeRect(0, this.mark * cell, canvas.width, cell);
    }
    if (this.cursor) context.strokeRect(this.cursor[1] * cell, this.cursor[0] * cell, cell, cell);
  }
}

function sharesTable() {
  const body = gates.map((gate) => {
    const bar = element("div", { class: "bar", "aria-hidden": "true" });
    gate.shares.forEach((share, kind) => {
      const part = element("span", { class: `kind ${KINDS[kind][0]}`, style: `flex-grow:${share}` });
      if (share > 0) bar.append(part);
    });
    return element("tr", {}, element("th", { scope: "row" }, gate.name), element("td", { class: "wide" }, bar),
      ...gate.shares.map((share) => element("td", {}, percent(share))),
      element("td", {}, percent(gate.density)), element("td", {}, percent(gate.overlap)));
  });
  const head = ["Matrix", "", ...KINDS.map(([, name]) => name), "open on average", "two rows share"];
  return element("table", {},
    element("thead", {}, element("tr", {}, ...head.map((text) => element("th", { scope: "col" }, text)))),
    element("tbody", {}, ...body));
}

// Areas stacked from below: always on, input dependent, rarely open, dead.
function historyChart(points, W) {
  const H = 270, left = 46, right = 14, top = 10, bottom = 44;
  const first = points[0][0], last = points[points.length - 1][0];
  const x = (epoch) => last > first ? left + ((epoch - first) / (last - first)) * (W - left - right) : (W + left) / 2;
  const y = (share) => top + (1 - share) * (H - top - bottom);
  const ends = (point) => KINDS.map(([, name], kind) => `${percent(point[kind + 1])} ${name}`).join(", ");
  const chart = element("svg:svg", { viewBox: `0 0 ${W} ${H}`, width: W, role: "img",
    "aria-label": `Shares of blocks over training. Epoch ${first}: ${ends(points[0])}. Epoch ${last}: ${ends(points[points.length - 1])}.` });
  const below = points.map(() => 0);
  KINDS.forEach(([kind], number) => {
    const above = points.map((point, i) => below[i] + point[number + 1]);
    // A single epoch is a bar.
    const places = points.length > 1 ? points.map((point) => x(point[0])) : [x(first) - 30, x(first) + 30];
    const at = (shares, i) => y(shares[Math.min(i, points.length - 1)]);
    const upper = places.map((place, i) => `${place.toFixed(1)} ${at(above, i).toFixed(1)}`);
    const lower = places.map((place, i) => `${place.toFixed(1)} ${at(below, i).toFixed(1)}`).reverse();
    chart.append(element("svg:path", { class: `kind ${kind}`, d: `M${[...upper, ...lower].join("L")}Z` }));
    above.forEach((share, i) => { below[i] = share; });
  });
  for (const share of [0, 0.25, 0.5, 0.75, 1]) {
    chart.append(element("svg:path", { class: "rule", d: `M${left} ${y(share)}H${W - right}` }),
      element("svg:text", { x: left - 8, y: y(share) + 4, "text-anchor": "end" }, `${share * 100}%`));
  }
  const step = Math.max(1, Math.ceil(points.length / Math.max(2, W / 60)));
  points.forEach(([epoch], i) => {
    if (i % step === 0) chart.append(element("svg:text", { x: x(epoch), y: H - 24, "text-anchor": "middle" }, `${epoch}`));
  });
  chart.append(element("svg:text", { x: W - right, y: H - 5, "text-anchor": "end" }, "epoch"));
  return chart;
}

function historyTable(points) {
  const head = ["Epoch", ...KINDS.map(([, name]) => name)];
  return element("table", {},
    element("thead", {}, element("tr", {}, ...head.map((text) => element("th", { scope: "col" }, text)))),
    element("tbody", {}, ...points.map((point) => element("tr", {},
      element("th", { scope: "row" }, `${point[0]}`), ...point.slice(1).map((share) => element("td", {}, percent(share)))))));
}
