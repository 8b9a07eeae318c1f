// One session: its sums, its turns as a timeline or as a table, and one of them at large.

import { h, setText } from "./dom.js";
import { ago, count, percent, plural } from "./format.js";
import { obstacles } from "./operations.js";
import { whoOf } from "./state.js";
import { Timeline } from "./timeline.js";
import { turnTable, turnView } from "./turn.js";

const LEGEND = [
  ["kept", "kept"], ["spliced", "spliced"], ["reused", "reused"], ["prefilled", "prefilled"],
  ["freed", "freed"],
];
const MARKS = [["amortize", "amortize"], ["forget", "forget"], ["exact", "exact"]];

export class Detail {
  #root;
  #select;
  #timeline;
  #title = h("code", { class: "id" });
  #who = h("p", { class: "dim who" });
  #sums = h("p", { class: "dim" });
  #when = h("span", { class: "dim right" });
  #choice = h("button", { type: "button", class: "quiet", "aria-pressed": "false" }, "Table");
  #place = h("div", { class: "place" });
  #turn = h("div", { class: "one" });
  #legend = legend();
  #asTable = false;
  #drawn = "";
  #chosen = null; // the turn that is shown at large

  // `select` is told the name of a turn that was chosen.
  constructor(root, select, redraw) {
    this.#root = root;
    this.#select = select;
    this.#timeline = new Timeline(select);
    this.#choice.addEventListener("click", () => {
      this.#asTable = !this.#asTable;
      this.#choice.setAttribute("aria-pressed", String(this.#asTable));
      this.#drawn = "";
      redraw();
    });
  }

  render(state, session, turns, selected) {
    if (!session) return this.#empty(state);
    if (!this.#root.contains(this.#title)) {
      this.#root.replaceChildren(
        h("div", { class: "head" }, h("h2", {}, "Session ", this.#title), this.#choice, this.#when),
        this.#who, this.#sums, this.#legend, this.#place, this.#turn);
    }
    setText(this.#title, session.name);
    this.#title.title = session.id;
    setText(this.#when, ago(Math.max(0, state.now - session.updated)));
    setText(this.#who, whoOf(session));
    setText(this.#sums, `${plural(session.turns, "turn")}, ` +
      `${plural(session.prompt_tokens, "prompt token")}, hit ratio ${percent(session.hit_ratio)}, ` +
      `${count(session.spliced_tokens)} spliced, ${count(session.reused_tokens)} reused`);
    if (turns === null) {
      this.#place.replaceChildren(h("p", { class: "empty" }, "Loading the turns…"));
      this.#turn.replaceChildren();
      this.#chosen = null;
      this.#drawn = "";
      return;
    }
    this.#draw(state, session, turns, selected);
  }

  #draw(state, session, turns, selected) {
    const drawn = [session.id, turns.length, turns.at(-1)?.turn, selected, this.#asTable].join(" ");
    if (drawn === this.#drawn) return this.#tick(state);
    this.#drawn = drawn;
    if (this.#asTable) this.#drawTable(turns, selected);
    else {
      if (this.#place.firstChild !== this.#timeline.element) {
        this.#place.replaceChildren(this.#timeline.element);
      }
      this.#timeline.render(session.id, turns, selected);
    }
    const chosen = turns.find((turn) => turn.turn === selected) ?? null;
    if (chosen && chosen === this.#chosen) {
      // Not built anew: somebody may be in its table.
      setText(this.#turn.querySelector("[data-of]"), `of ${session.turns}`);
      return this.#tick(state);
    }
    this.#chosen = chosen;
    this.#turn.replaceChildren(...(chosen ? [turnView(chosen, session.turns, state)] : []));
  }

  // Focus and scrolling stay where they were, unless another turn was chosen.
  #drawTable(turns, selected) {
    const before = this.#place.querySelector(".table");
    const from = before?.dataset.selected === selected ? before.scrollTop : null;
    const focused = before?.contains(document.activeElement) ? document.activeElement : null;
    const table = turnTable(turns, selected, this.#select);
    this.#place.replaceChildren(table);
    const row = table.querySelector("[aria-current]");
    table.scrollTop = from ?? (row ? row.offsetTop - table.clientHeight / 2 : 0);
    const button = [...table.querySelectorAll("button")].find(
      (each) => each.dataset.turn === focused?.dataset.turn);
    if (focused) (button ?? table).focus({ preventScroll: true });
  }

  #tick(state) {
    for (const each of this.#turn.querySelectorAll("[data-since]")) {
      setText(each, ago(Math.max(0, state.now - Number(each.dataset.since))));
    }
  }

  #empty(state) {
    this.#drawn = "";
    const told = state.known && state.engines !== null;
    if (!told || state.sessions.size) {
      this.#root.replaceChildren(h("p", { class: "empty" }, told
        ? "Choose a session." : "Waiting for the proxy."));
      return;
    }
    const wrong = obstacles(state);
    const shown = JSON.stringify(wrong);
    if (this.#root.querySelector(".start")?.dataset.wrong === shown) return;
    this.#root.replaceChildren(h("div", { class: "start", "data-wrong": shown }, ...(wrong
      ? [h("h2", {}, wrong.heading), ...wrong.sentences.map((each) => h("p", { class: "bad" }, each))]
      : howToStart(state))));
  }
}

function howToStart(state) {
  const base = new URL("v1", document.baseURI).href;
  return [
    h("h2", {}, "No sessions yet"),
    h("p", {}, "Point an OpenAI client at this proxy. Each of its turns then appears here:"),
    h("pre", { tabindex: "0" }, [
      "from openai import OpenAI", "",
      `client = OpenAI(base_url="${base}", api_key="${state.keyed ? "YOUR KEY" : "any"}")`,
    ].join("\n")),
    h("p", {}, "Or replay the recorded session that comes with Leyline:"),
    h("pre", { tabindex: "0" }, `leyline demo --url ${base}${state.keyed ? ' --api-key "YOUR KEY"' : ""}`),
  ];
}

function legend() {
  return h("ul", { class: "legend", "aria-label": "Legend" },
    ...LEGEND.map(([kind, label]) => h("li", {}, h("i", { class: `swatch ${kind}` }), label)),
    h("li", { class: "gap" }, "Edits:"),
    ...MARKS.map(([mode, label]) => h("li", {}, h("i", { class: `mark ${mode} done` }), label)),
    h("li", { class: "dim" }, "hollow: not spliced"));
}
