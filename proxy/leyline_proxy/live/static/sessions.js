// The list of sessions, latest first.

import { arrange, h, moveByKeys, setText } from "./dom.js";
import { ago, count, percent, plural } from "./format.js";
import { whoOf } from "./state.js";

export class SessionList {
  #list;
  #select;
  #rows = new Map();
  #order = [];
  #words = [];
  #shown = null;

  // `select` is told the id of a session that was chosen, `searched` that others are shown.
  constructor(list, search, select, searched) {
    this.#list = list;
    this.#select = select;
    search.addEventListener("input", () => {
      this.#words = search.value.toLowerCase().split(/\s+/).filter((word) => word);
      list.toggleAttribute("data-searched", this.#words.length > 0);
      searched();
    });
    search.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowDown" || !list.firstChild) return;
      event.preventDefault();
      list.querySelector("[tabindex='0']").focus();
    });
    list.addEventListener("keydown", (event) => {
      const next = moveByKeys(event, [...list.children], event.target.closest("[role=option]"), "y");
      if (next) {
        next.focus();
        select(next.dataset.id);
      }
    });
  }

  get searched() {
    return this.#words.length > 0;
  }

  // The number of sessions that the search lets through.
  render(state, selected) {
    this.#sort(state);
    for (const id of this.#rows.keys()) if (!state.sessions.has(id)) this.#rows.delete(id);
    const shown = this.#order.filter((id) => this.#fits(state, state.sessions.get(id)));
    const rows = shown.map((id) => this.#row(id));
    const inOrder = shown.includes(selected) ? selected : shown[0];
    for (const row of rows) {
      const id = row.dataset.id;
      row.setAttribute("aria-selected", String(id === selected));
      row.tabIndex = id === inOrder ? 0 : -1;
      this.#fill(row, state.sessions.get(id), state.now);
    }
    arrange(this.#list, rows);
    if (selected !== this.#shown && shown.includes(selected)) {
      this.#shown = selected;
      this.#show(this.#rows.get(selected));
    }
    return rows.length;
  }

  focus(id) {
    this.#rows.get(id)?.focus();
  }

  // Scrolls the list alone, and not under somebody who points at it.
  #show(row) {
    if (this.#list.matches(":hover")) return;
    const [list, at] = [this.#list, row].map((each) => each.getBoundingClientRect());
    this.#list.scrollTop += Math.min(0, at.top - list.top) + Math.max(0, at.bottom - list.bottom);
  }

  // Whether each word of the search is in a session's name, id, model or client, or in the tenant.
  #fits({ keyed, tenant }, { id, name, model, client }) {
    const text = [name, id, model, client, keyed ? tenant : ""].join(" ").toLowerCase();
    return this.#words.every((word) => text.includes(word));
  }

  // Rows keep their places while somebody points at them; new ones come first.
  #sort(state) {
    const latest = [...state.sessions.values()].sort((a, b) => b.updated - a.updated);
    if (!this.#list.matches(":hover, :focus-within")) {
      this.#order = latest.map((each) => each.id);
      return;
    }
    const known = new Set(this.#order);
    const fresh = latest.map((each) => each.id).filter((id) => !known.has(id));
    this.#order = [...fresh, ...this.#order.filter((id) => state.sessions.has(id))];
  }

  #row(id) {
    let row = this.#rows.get(id);
    if (!row) {
      row = h("div", { class: "session", role: "option", "data-id": id, onclick: () => this.#select(id) },
        h("code", { class: "id" }), h("span", { class: "hit" }),
        h("span", { class: "mini", "aria-hidden": "true" },
          ...["kept", "spliced", "reused", "prefilled"].map((kind) => h("i", { class: kind }))),
        h("span", { class: "dim what" }), h("span", { class: "dim when" }),
        h("span", { class: "dim who" }));
      this.#rows.set(id, row);
    }
    return row;
  }

  #fill(row, session, now) {
    const [name, hit, mini, what, when, who] = row.children;
    setText(name, session.name);
    name.title = session.name === session.id ? session.id : `${session.name}, id ${session.id}`;
    setText(hit, percent(session.hit_ratio));
    setText(what, `${plural(session.turns, "turn")}, ${plural(session.prompt_tokens, "token")}`);
    setText(when, ago(Math.max(0, now - session.updated)));
    setText(who, whoOf(session));
    who.title = who.textContent;
    const whole = Math.max(1, session.prompt_tokens);
    const { cached_tokens: served, spliced_tokens: spliced, reused_tokens: reused } = session;
    const shares = [served - spliced - reused, spliced, reused, session.prompt_tokens - served];
    shares.forEach((part, index) => {
      mini.children[index].style.width = `${(100 * part) / whole}%`;
    });
    row.setAttribute("aria-label", `Session ${session.name}, ${plural(session.turns, "turn")}, ` +
      `${count(session.prompt_tokens)} prompt tokens, hit ratio ${percent(session.hit_ratio)}` +
      (session.model ? `, model ${session.model}` : "") + (session.client ? `, by ${session.client}` : ""));
  }
}
