// One card for each matrix, with a map of its blocks.
const MOST_CELL = 30, MOST_HEIGHT = 330, GAP_FROM = 4;

const view = { mode: "often", token: 0, klass: 0 };
const RAMPS = { token: "lit", often: "often", large: "large", klass: "often" };
let ramps = {};

// Colours of the style sheet as 256 steps, 0 apart from the others: a closed block is no shade of an open one.
function readColours() {
  const style = getComputedStyle(document.documentElement);
  const rgb = (name) => {
    const hex = style.getPropertyValue(name).trim();
    return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  };
  const closed = rgb("--closed");
  for (const name of ["lit", "often", "large"]) {
    const stops = [rgb(`--${name}-0`), rgb(`--${name}-1`), rgb(`--${name}-2`)];
    ramps[name] = Array.from({ length: 256 }, (_, step) => {
      if (!step) return closed;
      const at = (step / 255) * 2, low = Math.min(1, Math.floor(at));
      return stops[low].map((c, i) => Math.round(c + (stops[low + 1][i] - c) * (at - low)));
    });
  }
  ramps.card = style.getPropertyValue("--card");
  ramps.ink = style.getPropertyValue("--ink");
}

// Scales a number of steps onto 1..255, with 0 for none.
const shade = (share) => share <= 0 ? 0 : Math.max(1, Math.min(255, Math.round(share * 255)));

function shadesOf(gate) {
  if (view.mode === "token") return gate.traced ? gate.row(view.token) : null;
  if (view.mode === "klass") return gate.ofClass(view.klass);
  const shades = new Uint8Array(gate.blocks);
  for (let i = 0; i < gate.blocks; i++) {
    shades[i] = view.mode === "often" ? shade(gate.share(i)) : gate.frequency[i] ? shade(Math.abs(gate.value[i]) / gate.largest) : 0;
  }
  return shades;
}

class BlockMap {
  constructor(gate) {
    this.gate = gate;
    this.cursor = null;
    this.pinned = null;
    this.visible = false;
    this.canvas = element("canvas", { tabindex: "0", role: "img" });
    this.stat = element("p", { class: "stat" });
    this.readout = element("p", { class: "readout", "aria-live": "polite" });
    const [out, inputs] = gate.features;
    this.card = element("article", { class: "card map", id: `gate-${gate.number}` },
      element("h3", {}, gate.name),
      element("p", { class: "sub" }, `${whole(inputs)} → ${whole(out)} · ${gate.rowsOfBlocks} × ${gate.columnsOfBlocks} ` +
        `blocks of ${gate.block.join(" × ")}`),
      this.stat, this.canvas, this.readout);
    this.small = element("canvas", { width: gate.columnsOfBlocks, height: gate.rowsOfBlocks });
    const at = (event) => {
      const box = this.canvas.getBoundingClientRect();
      const column = Math.floor(((event.clientX - box.left) / box.width) * gate.columnsOfBlocks);
      const row = Math.floor(((event.clientY - box.top) / box.height) * gate.rowsOfBlocks);
      const clamp = (i, size) => Math.max(0, Math.min(size - 1, i));
      return clamp(row, gate.rowsOfBlocks) * gate.columnsOfBlocks + clamp(column, gate.columnsOfBlocks);
    };
    this.canvas.addEventListener("pointermove", (event) => this.point(at(event)));
    this.canvas.addEventListener("pointerleave", () => this.point(this.pinned));
    this.canvas.addEventListener("click", (event) => this.pin(at(event)));
    this.canvas.addEventListener("focus", () => this.canvas.matches(":focus-visible") && this.point(this.cursor ?? 0));
    this.canvas.addEventListener("blur", () => this.point(this.pinned));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
  }

  key(event) {
    const columns = this.gate.columnsOfBlocks, now = this.cursor ?? 0;
    const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -now, End: this.gate.blocks - 1 - now };
    if (event.key in moves) {
      const next = now + moves[event.key];
      if (next >= 0 && next < this.gate.blocks) this.point(next);
    } else if (event.key === "Enter" || event.key === " ") this.pin(now);
    else if (event.key === "Escape") this.pin(null);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  point(block) {
    if (block === this.cursor) return;
    this.cursor = block;
    this.say();
    this.draw();
  }

  // A pinned block is marked in the text; pinning it again, or another anywhere, lets go of it.
  pin(block) {
    const next = block === this.pinned ? null : block;
    for (const map of maps) map.pinned = null;
    this.pinned = next;
    this.cursor = next ?? this.cursor;
    markTokens(next === null ? null : this);
    this.say();
    for (const map of maps) map.draw();
  }

  say() {
    const { gate, cursor } = this;
    if (cursor === null) { this.readout.textContent = ""; return; }
    const parts = [gate.describe(cursor)];
    const often = gate.share(cursor);
    parts.push(often ? `Open for ${percent(often)} of rows, mean gate ${gate.value[cursor].toFixed(2)}.` : "Never open (dead).");
    if (view.mode === "token" && gate.traced) {
      const step = gate.row(view.token)[cursor];
      parts.push(`This token: ${step ? ((step / 255) * gate.trace_scale).toFixed(2) : "closed"}.`);
    }
    if (view.mode === "klass") {
      const own = gate.ofClass(view.klass);
      if (own) parts.push(`“${data.classes[view.klass]}”: ${percent(own[cursor] / 255)}.`);
    }
    if (cursor === this.pinned && gate.traced) {
      const count = data.tokens.filter((_, token) => gate.row(token)[cursor]).length;
      parts.push(`Open for ${count} of ${plural(TOKENS, "token")}, underlined above.`);
    }
    this.readout.textContent = parts.join(" ");
  }

  summary() {
    const { gate } = this;
    if (view.mode === "token") {
      if (!gate.traced) return "Saw other rows than the tokens: see “how often”.";
      const { count } = gate.set(view.token);
      const text = `Opens ${whole(count)} of ${whole(gate.blocks)} blocks (${percent(count / gate.blocks)})`;
      return view.token ? `${text}, ${percent(overlapOf([gate], view.token, view.token - 1))} shared with the token before` : text;
    }
    if (view.mode === "klass") return gate.ofClass(view.klass) ? `How often “${data.classes[view.klass]}” opens each block` : "Saw no rows of this class.";
    if (view.mode === "large") return `Mean gate when open, up to ${gate.largest.toFixed(2)}`;
    const [always, depends, rarely, dead] = gate.shares;
    return `${percent(gate.density)} open on average · ${percent(depends)} input dependent · ${percent(always)} always on · ` +
      `${percent(rarely)} rare · ${percent(dead)} dead`;
  }

  resize() {
    const { gate, canvas } = this;
    const room = this.card.clientWidth - 2 * parseFloat(getComputedStyle(this.card).paddingLeft);
    let cell = Math.min(MOST_CELL, room / gate.columnsOfBlocks);
    const width = Math.max(cell * gate.columnsOfBlocks, Math.min(room, 140));
    const height = Math.max(24, Math.min(MOST_HEIGHT, cell * gate.rowsOfBlocks));
    const ratio = window.devicePixelRatio || 1;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    this.draw();
  }

  update() {
    const text = this.summary();
    this.stat.textContent = text;
    this.canvas.setAttribute("aria-label", `Map of the blocks of ${this.gate.name}. ${text}.`);
    this.say();
    this.draw();
  }

  draw() {
    if (!this.visible || !this.canvas.width) return;
    const { gate, canvas, small } = this;
    const rows = gate.rowsOfBlocks, columns = gate.columnsOfBlocks;
    const shades = shadesOf(gate) ?? new Uint8Array(gate.blocks);
    const ramp = ramps[RAMPS[view.mode]], ink = small.getContext("2d"), picture = ink.createImageData(columns, rows);
    for (let i = 0, at = 0; i < gate.blocks; i++, at += 4) {
      const [r, g, b] = ramp[shades[i]];
      picture.data[at] = r; picture.data[at + 1] = g; picture.data[at + 2] = b; picture.data[at + 3] = 255;
    }
    ink.putImageData(picture, 0, 0);
    const context = canvas.getContext("2d");
    const width = canvas.width / columns, height = canvas.height / rows, ratio = window.devicePixelRatio || 1;
    context.imageSmoothingEnabled = width < 1 || height < 1;
    context.drawImage(small, 0, 0, canvas.width, canvas.height);
    context.fillStyle = ramps.card;
    const line = Math.max(1, Math.round(ratio * 0.75));
    if (width >= GAP_FROM * ratio) for (let i = 1; i < columns; i++) context.fillRect(Math.round(i * width), 0, line, canvas.height);
    if (height >= GAP_FROM * ratio) for (let i = 1; i < rows; i++) context.fillRect(0, Math.round(i * height), canvas.width, line);
    for (const [block, size] of [[this.cursor, 1.5], [this.pinned, 2.5]]) {
      if (block === null) continue;
      const x = (block % columns) * width, y = Math.floor(block / columns) * height;
      context.lineWidth = size * ratio;
      context.strokeStyle = ramps.ink;
      context.strokeRect(x - ratio, y - ratio, width + 2 * ratio, height + 2 * ratio);
    }
  }
}

const maps = gates.map((gate) => new BlockMap(gate));

// Marks the tokens that open the pinned block of a map; null marks none.
function markTokens(map) {
  tokenButtons.forEach((button, token) => {
    button.classList.toggle("opens", map !== null && map.gate.traced && map.gate.row(token)[map.pinned] > 0);
  });
}
