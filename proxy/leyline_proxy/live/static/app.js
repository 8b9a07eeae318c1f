// Wires the page together: the stream changes the state, the state is drawn.

import { Detail } from "./detail.js";
import { byId, setText } from "./dom.js";
import { count, percent, plural } from "./format.js";
import { Key, problemOf } from "./key.js";
import {
  Redrawn, enginesDown, renderClaims, renderEngines, storeProblem, tellRunning, withoutRunning,
} from "./operations.js";
import { renderOverview } from "./overview.js";
import { SessionList } from "./sessions.js";
import { State, hitRatio, tokensOf } from "./state.js";
import { Stream } from "./stream.js";

const KEPT_HISTORIES = 20;
const TICK_MS = 2000;
const SAY_AFTER_MS = 4000;

const API = new URL("v1/leyline/", document.baseURI);

class Page {
  state = new State();
  key = new Key();
  session = null; // id of the one that is shown
  turn = null; // name of the one that is shown
  follows = true; // shows the session of the latest turn
  #atEnd = true; // shows a session's latest turn
  #loading = new Set();
  #stale = new Set(); // histories from before an interruption
  #drawing = false;
  #said = 0;
  #refusal = ""; // why the proxy doesn't take this viewer
  #connection = { name: "connecting", message: "Connecting" };
  #enginesDrawn = new Redrawn();
  #claimsDrawn = new Redrawn();

  constructor() {
    this.list = new SessionList(
      byId("sessions"), byId("session-search"), (id) => this.choose(id), () => this.#searched());
    this.detail = new Detail(byId("detail"), (name) => this.chooseTurn(name), () => this.draw());
    this.stream = new Stream(new URL("live", API), this.key, {
      event: (kind, data) => this.#event(kind, data),
      status: (name, message) => this.#status(name, message),
      locked: (message) => this.#lock(message),
    });
    const wanted = wantedSession();
    if (wanted) {
      this.session = wanted;
      this.follows = false;
    }
    this.#wire();
    this.stream.start();
    setInterval(() => this.draw(), TICK_MS);
  }

  choose(id, byHand = true) {
    if (byHand) this.#follow(false);
    if (id !== this.session) {
      this.session = id;
      this.turn = null;
      this.#atEnd = true;
      if (byHand) history.replaceState(null, "", `#session=${encodeURIComponent(id)}`);
    }
    this.draw();
  }

  chooseTurn(name) {
    this.turn = name;
    this.#atEnd = this.state.turnsOf(this.session)?.at(-1)?.turn === name;
    if (!this.#atEnd) this.#follow(false);
    this.#render();
  }

  draw() {
    if (this.#drawing) return;
    this.#drawing = true;
    requestAnimationFrame(() => {
      this.#drawing = false;
      this.#render();
    });
  }

  #render() {
    const { state } = this;
    this.#settleSelection();
    renderOverview(byId("tiles"), byId("trend"), state);
    const hidden = state.total - state.sessions.size;
    byId("sessions-count").title = hidden > 0 ? `showing the latest ${count(state.sessions.size)}` : "";
    const found = this.list.render(state, this.session);
    const sessions = this.list.searched
      ? `${count(found)} of ${count(state.sessions.size)}` : count(state.total);
    setText(byId("sessions-count"), state.known ? sessions : "");
    const session = state.sessions.get(this.session);
    const turns = session ? state.turnsOf(this.session) : null;
    if (this.#atEnd) this.turn = turns?.at(-1)?.turn ?? null;
    else if (turns?.length && !turns.some((each) => each.turn === this.turn)) {
      this.turn = turns[0].turn; // the one before is too old to be kept
    }
    this.detail.render(state, session, turns, this.turn);
    const wanting = () => turns === null || this.#stale.has(session.id) || state.lacksTurns(session.id);
    if (session && wanting()) this.#load(session.id);
    if (this.#enginesDrawn.changed(withoutRunning(state.engines))) renderEngines(byId("engines"), state);
    else tellRunning(byId("engines"), state.engines ?? []);
    if (this.#claimsDrawn.changed(state.claims)) renderClaims(byId("claims"), state);
    setText(byId("claims-count"), state.claims.length ? count(state.claims.length) : "");
    setText(byId("version"), state.version);
    byId("key-button").hidden = !state.keyed;
    setText(byId("tenant"), state.keyed ? `Tenant ${state.tenant}` : "");
    this.#notice();
  }

  #searched() {
    this.#render();
    if (this.list.searched) this.#say(`${byId("sessions-count").textContent} sessions fit.`);
  }

  #settleSelection() {
    const { sessions, known } = this.state;
    if (this.follows || (known && this.session !== null && !sessions.has(this.session))) {
      const latest = [...sessions.values()].reduce(
        (best, each) => (!best || each.updated > best.updated ? each : best), null);
      if (latest?.id !== this.session) {
        this.session = latest?.id ?? null;
        this.turn = null;
        this.#atEnd = true;
      }
    }
  }

  async #load(id) {
    if (this.#loading.has(id)) return;
    this.#loading.add(id);
    const { state } = this;
    try {
      const response = await fetch(new URL(`sessions/${encodeURIComponent(id)}`, API), {
        headers: this.key.headers, cache: "no-store",
      });
      const answer = response.ok ? await response.json() : null;
      if (state !== this.state) return; // the key was changed meanwhile
      if (answer) {
        state.setHistory(answer);
        this.#stale.delete(id);
        const { histories } = state;
        for (const old of histories.keys()) {
          if (histories.size > KEPT_HISTORIES && old !== this.session) histories.delete(old);
        }
      } else if (response.status === 404) {
        state.sessions.delete(id);
      } else if (this.key.refusedBy(response)) {
        this.#lock(await problemOf(response));
      }
      this.draw();
    } catch {
      // The stream notices, too, and a later look asks again.
    } finally {
      // Not at once: an answer that lacks something may lack it for a while.
      setTimeout(() => this.#loading.delete(id), 1000);
    }
  }

  #event(kind, data) {
    const { state } = this;
    if (kind === "snapshot") {
      state.snapshot(data);
      // What is shown stays until the answer is there.
      this.#stale = new Set(state.histories.keys());
      this.#loading.clear();
      this.stream.heartbeat = data.heartbeat_s;
    } else if (kind === "resumed") state.setClock(data.now);
    else if (kind === "sessions") state.setSessions(data);
    else if (kind === "state") state.setState(data);
    else if (kind === "turn") {
      state.turn(data);
      this.#sayTurn(data);
    } else if (kind === "lost") this.#say(`A turn of session ${state.nameOf(data.session)} was ${data.how}.`);
    this.draw();
  }

  #sayTurn({ session, turn }) {
    if (session.id !== this.session || Date.now() - this.#said < SAY_AFTER_MS) return;
    this.#said = Date.now();
    const edits = turn.edits.length ? `, ${count(turn.edits.length)} edits` : "";
    this.#say(`Turn ${turn.index + 1}: ${percent(hitRatio(tokensOf(turn)))} reused${edits}.`);
  }

  #say(text) {
    setText(byId("announcer"), text);
  }

  #status(name, message) {
    this.#connection = { name, message };
    this.#refusal = name === "reconnecting" && message !== "Reconnecting…" ? message : "";
    this.#notice();
  }

  // The connection, or what is worse: engines that are down.
  #pill({ name, message }) {
    const pill = byId("status");
    if (pill.dataset.status === name && byId("status-text").textContent === message) return;
    this.#say(`${message}.`);
    pill.dataset.status = name;
    setText(byId("status-text"), message);
  }

  #notice() {
    const engines = this.#connection.name === "live" ? enginesDown(this.state.engines ?? []) : null;
    this.#pill(engines ?? this.#connection);
    const store = this.state.store.problem ? storeProblem(this.state.store) : "";
    const notice = this.#refusal || [engines?.notice, store].filter((each) => each).join(" ");
    byId("notice").hidden = !notice;
    byId("notice").classList.toggle("down", engines?.name === "down" && !this.#refusal);
    setText(byId("notice"), notice);
  }

  #lock(message) {
    this.#status("locked", "Key needed");
    byId("key-button").hidden = false;
    const given = "authorization" in this.key.headers;
    setText(byId("key-problem"), given ? message : "");
    if (!byId("key-dialog").open) byId("key-dialog").showModal();
    byId("key-input").focus();
  }

  #follow(on) {
    this.follows = on;
    byId("follow").setAttribute("aria-pressed", String(on));
  }

  #wire() {
    const base = new URL("v1", document.baseURI).href;
    setText(byId("base-url"), base);
    byId("copy-url").addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(base);
        this.#say("Copied.");
      } catch {
        getSelection().selectAllChildren(byId("base-url"));
      }
    });
    byId("follow").addEventListener("click", () => {
      this.#follow(!this.follows);
      if (this.follows) history.replaceState(null, "", location.pathname);
      this.draw();
    });
    this.#follow(this.follows);
    byId("key-button").addEventListener("click", () => {
      setText(byId("key-problem"), "");
      byId("key-dialog").showModal();
    });
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      const key = byId("key-input").value.trim();
      if (/[^\x20-\xff]/.test(key)) {
        setText(byId("key-problem"), "This can't be a key: it has characters that aren't allowed in a header.");
        return;
      }
      this.key.set(key);
      byId("key-input").value = "";
      byId("key-dialog").close();
      // Another key may be another tenant's: nothing of the one before stays.
      this.state = new State();
      this.session = this.turn = null;
      this.#atEnd = true;
      this.#follow(true);
      this.stream.start({ anew: true });
      this.draw();
    });
  }
}

// The session that the address names; links get cut and mangled.
function wantedSession() {
  try {
    return decodeURIComponent(location.hash.match(/^#session=(.+)$/)?.[1] ?? "");
  } catch {
    return "";
  }
}

new Page();
