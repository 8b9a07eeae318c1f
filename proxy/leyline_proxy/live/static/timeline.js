// A session's turns as columns: one band each, to one scale.

import { arrange, h, moveByKeys, svg } from "./dom.js";
import { count, plural, roundStep, short, words } from "./format.js";
import { hitRatio, reasonOf, tokensOf } from "./state.js";

const BAND = 180; // pixels of the longest prompt
const LANE = 44; // of the hit ratio
const CRISP = 24; // columns below this width are whole pixels
const NARROWEST = 9;
const AXIS = 52;

// What a turn says to those who don't see it.
export function spoken(turn) {
  const tokens = tokensOf(turn);
  const edits = turn.edits.length
    ? ` ${plural(turn.edits.length, "edit")}, ${words(reasonOf(turn))}.`
    : "";
  return `Turn ${turn.index + 1}: ${plural(tokens.prompt, "prompt token")}, ` +
    `${count(tokens.prefix)} kept, ${count(tokens.spliced)} spliced, ` +
    `${count(tokens.reused)} reused, ` +
    `${count(tokens.prefilled)} prefilled, ${count(tokens.freed)} freed.${edits}`;
}

export class Timeline {
  element = h("div", { class: "timeline" });
  #scroller = h("div", { class: "scroller" });
  #axis = h("div", { class: "axis", "aria-hidden": "true" });
  #track = h("div", { class: "track" });
  #columns = h("div", {
    class: "columns", role: "listbox", "aria-orientation": "horizontal", "aria-label": "Turns",
  });
  #line = svg("svg", { class: "hits", "aria-hidden": "true" });
  #grid = h("div", { class: "grid-lines", "aria-hidden": "true" });
  #byName = new Map();
  #session = null;
  #shown = null;
  #turns = [];

  // `select` is told the name of a turn that was chosen.
  constructor(select) {
    this.#track.append(this.#grid, this.#line, this.#columns);
    this.#scroller.append(this.#track);
    this.element.append(this.#axis, this.#scroller);
    this.#columns.addEventListener("keydown", (event) => {
      const at = event.target.closest("[role=option]");
      const next = moveByKeys(event, [...this.#columns.children], at, "x");
      if (next) {
        select(next.dataset.turn);
        next.focus();
      }
    });
    this.#columns.addEventListener("click", (event) => {
      const chosen = event.target.closest("[role=option]");
      if (chosen) select(chosen.dataset.turn);
    });
    new ResizeObserver(() => this.#place()).observe(this.#scroller);
  }

  render(session, turns, selected) {
    const before = this.#turns.length;
    if (session !== this.#session) this.#byName.clear();
    const other = session !== this.#session;
    this.#session = session;
    this.#turns = turns;
    const all = turns.map(tokensOf);
    const most = Math.max(1, ...all.map((tokens) => tokens.prompt));
    const freed = Math.max(0, ...all.map((tokens) => tokens.freed));
    const scale = BAND / most;
    const under = Math.ceil(freed * scale);
    this.element.style.setProperty("--band", `${BAND}px`);
    this.element.style.setProperty("--lane", `${LANE}px`);
    this.element.style.setProperty("--under", `${under}px`);
    arrange(this.#columns, turns.map((turn) => this.#column(turn, scale, turn.turn === selected)));
    const there = new Set(turns.map((turn) => turn.turn));
    for (const name of this.#byName.keys()) if (!there.has(name)) this.#byName.delete(name);
    this.#drawAxis(most, scale, freed);
    this.#place();
    const current = this.#byName.get(selected);
    if (current && (other || turns.length !== before || selected !== this.#shown)) this.#show(current);
    this.#shown = selected;
  }

  #column(turn, scale, selected) {
    let column = this.#byName.get(turn.turn);
    if (!column) {
      column = h("div", { class: "turn", role: "option", "data-turn": turn.turn },
        h("span", { class: "marks" }, ...marks(turn)),
        h("span", { class: "band" },
          ...["prefilled", "reused", "spliced", "kept"].map((kind) => h("i", { class: kind }))),
        h("span", { class: "below" }, h("i", { class: "freed" })),
        h("span", { class: "number" }));
      column.setAttribute("aria-label", spoken(turn));
      column.title = spoken(turn);
      this.#byName.set(turn.turn, column);
    }
    const tokens = tokensOf(turn);
    const [prefilled, reused, spliced, kept] = column.children[1].children;
    const pixels = (number) => `${number ? Math.max(number * scale, 1) : 0}px`;
    prefilled.style.height = pixels(tokens.prefilled);
    reused.style.height = pixels(tokens.reused);
    spliced.style.height = pixels(tokens.spliced);
    kept.style.height = pixels(tokens.prefix);
    column.children[2].firstChild.style.height = pixels(tokens.freed);
    column.setAttribute("aria-selected", String(selected));
    column.tabIndex = selected ? 0 : -1;
    return column;
  }

  #drawAxis(most, scale, freed) {
    const labels = [h("span", { class: "lane-label" }, "hit ratio")];
    const lines = [];
    const step = roundStep(most, 4);
    for (let tokens = 0; tokens <= most; tokens += step) {
      const bottom = `calc(var(--under) + 20px + ${tokens * scale}px)`;
      labels.push(h("span", { class: "label", style: { bottom } }, short(tokens)));
      lines.push(h("i", { style: { bottom } }));
    }
    if (freed * scale > 14) labels.push(h("span", { class: "label freed-label" }, "freed"));
    this.#axis.replaceChildren(...labels);
    this.#grid.replaceChildren(...lines);
  }

  // Columns fill the width; the line of hit ratios through their middles.
  #place() {
    const turns = this.#turns;
    if (!turns.length) return;
    const room = this.element.clientWidth - AXIS;
    const share = room / turns.length;
    const width = Math.max(NARROWEST, share < CRISP ? Math.floor(share) : share);
    const wide = Math.max(room, width * turns.length);
    this.#track.style.width = `${wide}px`;
    this.element.style.setProperty("--column", `${width}px`);
    const every = [1, 2, 5, 10].find((number) => number * width >= 24) ?? 10;
    [...this.#columns.children].forEach((column, index) => {
      const number = turns[index].index + 1;
      column.lastChild.textContent = number % every === 0 || (number === 1 && every > 2) ? number : "";
    });
    this.#line.setAttribute("width", wide);
    this.#line.setAttribute("height", LANE);
    const points = [];
    turns.forEach((turn, index) => {
      const ratio = hitRatio(tokensOf(turn));
      if (ratio !== null) points.push([(index + 0.5) * width, 4 + (1 - ratio) * (LANE - 8)]);
    });
    this.#line.replaceChildren(
      svg("line", { class: "grid", x1: 0, x2: wide, y1: 4, y2: 4 }),
      svg("line", { class: "grid", x1: 0, x2: wide, y1: LANE - 4, y2: LANE - 4 }),
      svg("polyline", { class: "ratio", points: points.map((at) => at.join(",")).join(" ") }),
      ...(width >= 12
        ? points.map(([cx, cy]) => svg("circle", { class: "ratio-dot", cx, cy, r: 2 }))
        : []),
    );
  }

  // Scrolls sideways only: the page stays where it is.
  #show(column) {
    const left = column.offsetLeft;
    const { scrollLeft, clientWidth } = this.#scroller;
    if (left < scrollLeft || left + column.offsetWidth > scrollLeft + clientWidth) {
      this.#scroller.scrollLeft = left - clientWidth + 3 * column.offsetWidth;
    }
  }
}

// One mark for each mode among a turn's edits: filled where they were spliced.
export function marks(turn) {
  const modes = [...new Set(turn.edits.map((edit) => edit.mode))];
  return modes.map((mode) => mark(mode, turn));
}

export function mark(mode, turn) {
  const done = turn.receipt?.outcome === "spliced" ? "done" : "not-done";
  return h("i", { class: `mark ${mode} ${done}` });
}

