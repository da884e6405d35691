// What the page knows: numbers of every gate, decoded when they are first asked for.
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const TOKENS = data.tokens.length;

function bytesOf(text) {
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return bytes;
}

class Gate {
  constructor(facts, number) {
    Object.assign(this, facts);
    this.number = number;
    [this.rowsOfBlocks, this.columnsOfBlocks] = facts.grid;
    this.blocks = this.rowsOfBlocks * this.columnsOfBlocks;
    this.encoded = facts;
    this.frequency = new Uint16Array(bytesOf(facts.frequency).buffer);
    this.value = new Float32Array(bytesOf(facts.value).buffer);
    this.largest = this.value.reduce((most, v) => Math.max(most, Math.abs(v)), 0) || 1;
    this.traced = facts.trace !== null;
    this.trace = null;
    this.sets = [];
  }

  // How often a block opens, from 0 to 1.
  share(block) { return this.frequency[block] / 65535; }

  // The gates of a token: 0 is closed, 255 the largest of the text.
  row(token) {
    this.trace ??= bytesOf(this.encoded.trace);
    return this.trace.subarray(token * this.blocks, (token + 1) * this.blocks);
  }

  // The open blocks of a token as bits, and how many they are.
  set(token) {
    if (!this.sets[token]) {
      const bits = new Uint32Array((this.blocks + 31) >> 5), row = this.row(token);
      let count = 0;
      for (let i = 0; i < row.length; i++) if (row[i]) { bits[i >> 5] |= 1 << (i & 31); count++; }
      this.sets[token] = { bits, count };
    }
    return this.sets[token];
  }

  common(one, other) {
    const a = this.set(one).bits, b = this.set(other).bits;
    let count = 0;
    for (let i = 0; i < a.length; i++) {
      let bits = a[i] & b[i];
      bits -= (bits >>> 1) & 0x55555555;
      bits = (bits & 0x33333333) + ((bits >>> 2) & 0x33333333);
      count += Math.imul((bits + (bits >>> 4)) & 0x0f0f0f0f, 0x01010101) >>> 24;
    }
    return count;
  }

  // How often the rows of a class open each block, in steps of 1/255; null if it saw none of them.
  ofClass(number) {
    const place = this.classes ? this.classes.numbers.indexOf(number) : -1;
    if (place < 0) return null;
    this.classFrequency ??= bytesOf(this.classes.frequency);
    return this.classFrequency.subarray(place * this.blocks, (place + 1) * this.blocks);
  }

  describe(block) {
    const row = Math.floor(block / this.columnsOfBlocks), column = block % this.columnsOfBlocks;
    const range = (i, size, end) => `${i * size} to ${Math.min(end, (i + 1) * size) - 1}`;
    return `Block ${row + 1}, ${column + 1}: outputs ${range(row, this.block[0], this.features[0])}, ` +
      `inputs ${range(column, this.block[1], this.features[1])}.`;
  }
}

const gates = data.gates.map((facts, number) => new Gate(facts, number));
const traced = gates.filter((gate) => gate.traced);
const withClasses = gates.filter((gate) => gate.classes);

// The share of open blocks that two tokens have in common, over some gates: 2 |A and B| / (|A| + |B|).
function overlapOf(some, one, other) {
  let common = 0, total = 0;
  for (const gate of some) {
    common += gate.common(one, other);
    total += gate.set(one).count + gate.set(other).count;
  }
  return total ? (2 * common) / total : null;
}

function classOverlapOf(some, one, other) {
  let sum = 0, count = 0;
  for (const gate of some) {
    const i = gate.classes.numbers.indexOf(one), j = gate.classes.numbers.indexOf(other);
    const share = i < 0 || j < 0 ? null : gate.classes.overlap[i][j];
    if (share !== null) { sum += share; count++; }
  }
  return count ? sum / count : null;
}

const percent = (share) => share === null ? "–" :
  share > 0 && share < 0.001 ? "<0.1%" : share < 1 && share > 0.999 ? ">99.9%" : `${(100 * share).toFixed(1)}%`;
const whole = (number) => number.toLocaleString("en");
const plural = (count, one) => `${whole(count)} ${one}${count === 1 ? "" : "s"}`;
const shown = (token) => token === "" ? "(empty)" : token.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ +$/, "␣");

function element(kind, attributes = {}, ...children) {
  const made = kind.includes(":") ?
    document.createElementNS("http://www.w3.org/2000/svg", kind.slice(4)) : document.createElement(kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
const byId = (id) => document.getElementById(id);
