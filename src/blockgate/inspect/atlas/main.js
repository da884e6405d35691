// What the reader does, and what follows from it.
const tokenButtons = data.tokens.map((token, number) => {
  const button = element("button", { type: "button", role: "radio", "aria-checked": "false", tabindex: "-1", class: "token" }, shown(token));
  button.addEventListener("click", () => choose(number));
  return button;
});
const slider = byId("slider"), MODES = ["token", "often", "large", "klass"];
let playing = null;

function setMode(mode) {
  view.mode = mode;
  for (const name of MODES) byId(`mode-${name}`).setAttribute("aria-pressed", name === mode);
  byId("klass").hidden = mode !== "klass";
  const ends = {
    token: ["closed", "small gate", "large"], often: ["never", "rarely", "always"],
    large: ["never open", "small on average", "large"], klass: ["never", "rarely", "always"],
  }[mode];
  ["legend-closed", "legend-low", "legend-high"].forEach((id, i) => { byId(id).textContent = ends[i]; });
  byId("ramp").className = `ramp ${RAMPS[mode]}`;
  for (const map of maps) map.update();
}

function choose(token, { keepMode = false } = {}) {
  if (!TOKENS) return;
  const before = tokenButtons[view.token];
  before.setAttribute("aria-checked", "false");
  before.tabIndex = -1;
  view.token = Math.max(0, Math.min(TOKENS - 1, token));
  const button = tokenButtons[view.token], text = byId("text");
  button.setAttribute("aria-checked", "true");
  button.tabIndex = 0;
  // Only the text scrolls, not the page.
  if (button.offsetTop < text.scrollTop) text.scrollTop = button.offsetTop - 8;
  else if (button.offsetTop + button.offsetHeight > text.scrollTop + text.clientHeight) {
    text.scrollTop = button.offsetTop + button.offsetHeight - text.clientHeight + 8;
  }
  slider.value = view.token;
  slider.setAttribute("aria-valuetext", `${shown(data.tokens[view.token])}, ${view.token + 1} of ${TOKENS}`);
  byId("now").replaceChildren(element("b", {}, shown(data.tokens[view.token])), ` ${view.token + 1} of ${TOKENS}`);
  tokenPairs.mark = view.token;
  tokenPairs.draw();
  if (!keepMode) setMode("token");
}

function play(on) {
  clearInterval(playing);
  playing = on ? setInterval(() => view.token + 1 < TOKENS ? choose(view.token + 1) : play(false), 600) : null;
  byId("play").textContent = on ? "❚❚" : "▶";
  byId("play").setAttribute("aria-label", on ? "Pause" : "Play the text");
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = theme === "dark" ? "Light" : "Dark";
  readColours();
  for (const map of maps) map.draw();
  for (const pairs of [tokenPairs, classPairs]) pairs.draw();
}

// Which gates an overlap is worked out for: all, or one.
function gateChoice(id, some, pairs) {
  const select = byId(id);
  select.append(element("option", { value: "" }, some.length > 1 ? `all ${some.length} matrices` : "the matrix"));
  if (some.length > 1) for (const gate of some) select.append(element("option", { value: gate.number }, gate.name));
  const compute = () => pairs.compute(select.value === "" ? some : [gates[select.value]]);
  select.addEventListener("change", compute);
  if (!some.length) return;
  // Worked out when it comes near: many tokens have very many pairs.
  new IntersectionObserver((entries, seen) => {
    if (entries.some((entry) => entry.isIntersecting)) { seen.disconnect(); compute(); }
  }, { rootMargin: "300px" }).observe(pairs.canvas);
}

const named = (token, number) => data.named ? `${number + 1} “${shown(token)}”` : `row ${token}`;
const tokenPairs = new PairMap(byId("token-pairs"), data.tokens.map(named), overlapOf, (token) => choose(token));
const classPairs = new PairMap(byId("class-pairs"), data.classes.map((name) => `“${name}”`), classOverlapOf, (number) => {
  view.klass = number;
  byId("klass").value = number;
  classPairs.mark = number;
  classPairs.draw();
  setMode("klass");
});

function start() {
  const blocks = gates.reduce((sum, gate) => sum + gate.blocks, 0);
  const open = gates.reduce((sum, gate) => sum + gate.density * gate.blocks, 0) / blocks;
  const rows = gates.reduce((most, gate) => Math.max(most, gate.rows), 0);
  byId("lead").textContent = `${plural(gates.length, "gated matrix").replace("matrixs", "matrices")}, ${whole(blocks)} blocks in all. ` +
    `An input opens ${percent(open)} of them on average, counted over ${plural(rows, "row")}.`;

  byId("maps").classList.toggle("narrow", gates.every((gate) => gate.columnsOfBlocks <= 16));
  byId("maps").append(...maps.map((map) => map.card));
  byId("shares").append(sharesTable());
  byId("history").hidden = !data.history.length;
  if (data.history.length) {
    byId("history-chart").append(historyChart(data.history, Math.max(280, Math.min(1000, byId("history-chart").clientWidth))));
    byId("history-table").append(historyTable(data.history));
  }
  for (const id of ["player", "text-card"]) byId(id).hidden = !TOKENS;
  byId("mode-token").hidden = byId("token-overlap").hidden = !TOKENS || !traced.length;
  byId("mode-klass").hidden = byId("class-overlap").hidden = !withClasses.length;
  byId("overlap").hidden = byId("token-overlap").hidden && byId("class-overlap").hidden;
  data.classes.forEach((name, number) => byId("klass").append(element("option", { value: number }, name)));
  byId("left-out").textContent = data.classes_left_out ? `${plural(data.classes_left_out, "rarer class").replace("classs", "classes")} left out.` : "";
  readColours();
  gateChoice("token-gates", traced, tokenPairs);
  gateChoice("class-gates", withClasses, classPairs);

  byId("text").append(...tokenButtons);
  byId("text").addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -TOKENS, End: TOKENS };
    if (!(event.key in moves)) return;
    choose(view.token + moves[event.key]);
    tokenButtons[view.token].focus({ preventScroll: true });
    event.preventDefault();
  });
  slider.max = Math.max(0, TOKENS - 1);
  slider.addEventListener("input", () => choose(Number(slider.value)));
  byId("back").addEventListener("click", () => choose(view.token - 1));
  byId("next").addEventListener("click", () => choose(view.token + 1));
  byId("play").addEventListener("click", () => {
    if (!playing && view.token === TOKENS - 1) choose(0);
    play(!playing);
  });
  for (const mode of MODES) byId(`mode-${mode}`).addEventListener("click", () => { play(false); setMode(mode); });
  byId("klass").addEventListener("change", () => classPairs.choose(Number(byId("klass").value)));
  byId("theme").addEventListener("click", () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => setTheme(event.matches ? "dark" : "light"));

  // Maps out of sight are drawn when they come into it.
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const map = maps.find((one) => one.card === entry.target);
      map.visible = entry.isIntersecting;
      map.draw();
    }
  }, { rootMargin: "200px" });
  const sizes = new ResizeObserver((entries) => {
    for (const entry of entries) maps.find((one) => one.card === entry.target)?.resize();
  });
  for (const map of maps) { map.resize(); seen.observe(map.card); sizes.observe(map.card); }
  new ResizeObserver(() => { tokenPairs.draw(); classPairs.draw(); }).observe(byId("overlap"));

  addEventListener("beforeprint", () => { for (const map of maps) { map.visible = true; map.draw(); } });

  setTheme(document.documentElement.dataset.theme);
  if (TOKENS && traced.length) choose(0);
  else setMode("often");
  requestAnimationFrame(() => { document.documentElement.dataset.ready = Math.round(performance.now()); });
}
start();
