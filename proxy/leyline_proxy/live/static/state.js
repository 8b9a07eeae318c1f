// What the page knows. It changes by events of the stream and by answers of the API.

const COUNTED_TURNS = 4096;
const KEPT_TURNS = 512; // of a session; the proxy keeps as many

export class State {
  sessions = new Map(); // by id
  total = 0;
  histories = new Map(); // by session id: turns by name, in order
  steps = new Map(); // of the last hour, by their start
  stepSeconds = 30;
  engines = null; // not told yet
  claims = [];
  running = 0;
  waiting = 0;
  store = { name: "memory", problem: null };
  known = false; // whether there was a snapshot
  tenant = "";
  version = "";
  keyed = false;
  #clockAhead = 0;
  #counted = new Set();

  // The proxy's time, in seconds since the epoch.
  get now() {
    return Date.now() / 1000 + this.#clockAhead;
  }

  setClock(now) {
    this.#clockAhead = now - Date.now() / 1000;
  }

  snapshot(document) {
    this.setClock(document.now);
    this.version = document.version;
    this.keyed = document.keyed;
    if (this.known && document.tenant !== this.tenant) {
      // The key has become another tenant's: nothing of the one before stays.
      this.histories.clear();
      this.steps.clear();
    }
    this.tenant = document.tenant;
    this.known = true;
    this.setSessions(document);
    this.stepSeconds = document.trend.step_s;
    for (const step of document.trend.steps) {
      // A proxy that was restarted has counted less than this page has seen.
      const seen = this.steps.get(step.start);
      if (!seen || seen.turns <= step.turns) this.steps.set(step.start, step);
    }
    this.#trimSteps();
  }

  setSessions(document) {
    this.sessions = new Map(document.sessions.map((each) => [each.id, each]));
    this.total = document.total;
    for (const id of this.histories.keys()) if (!this.sessions.has(id)) this.histories.delete(id);
  }

  setState(document) {
    this.engines = document.upstreams;
    this.claims = document.claims;
    this.running = document.running;
    this.waiting = document.waiting;
    this.store = document.store;
  }

  turn({ session, turn }) {
    if (!this.sessions.has(session.id)) this.total += 1;
    this.sessions.set(session.id, session);
    const turns = this.histories.get(session.id);
    turns?.set(turn.turn, turn);
    if (turns?.size > KEPT_TURNS) turns.delete(turns.keys().next().value);
    if (this.#counted.has(turn.turn)) return;
    this.#counted.add(turn.turn);
    if (this.#counted.size > COUNTED_TURNS) this.#counted.delete(this.#counted.values().next().value);
    this.#count(turn);
  }

  setHistory(document) {
    // Turns that came by the stream meanwhile are behind those of the answer.
    const turns = new Map(document.history.map((turn) => [turn.turn, turn]));
    for (const [name, turn] of this.histories.get(document.id) ?? []) {
      if (!turns.has(name) && turn.index >= document.turns) turns.set(name, turn);
    }
    this.histories.set(document.id, turns);
  }

  // A session as its caller calls it; the id where the session isn't known.
  nameOf(id) {
    return this.sessions.get(id)?.name ?? id;
  }

  // Turns of a session, oldest first; null where they aren't known yet.
  turnsOf(id) {
    const turns = this.histories.get(id);
    return turns ? [...turns.values()].sort((a, b) => a.index - b.index) : null;
  }

  // Whether the session has turns that its history lacks: another proxy served them.
  lacksTurns(id) {
    const turns = this.turnsOf(id);
    const last = turns?.at(-1)?.index ?? -1;
    return turns !== null && (this.sessions.get(id)?.turns ?? 0) > last + 1;
  }

  trend() {
    const since = this.now - 3600;
    const steps = [...this.steps.values()].filter((step) => step.start >= since);
    return steps.sort((a, b) => a.start - b.start);
  }

  #count(turn) {
    const tokens = turn.receipt?.tokens;
    if (!tokens) return;
    const start = Math.floor(turn.created / this.stepSeconds) * this.stepSeconds;
    const step = this.steps.get(start) ?? {
      start, turns: 0, prompt: 0, cached: 0, spliced: 0, reused: 0, freed: 0,
      thinking_kept: 0, thinking_lost: 0,
    };
    this.steps.set(start, {
      start,
      turns: step.turns + 1,
      prompt: step.prompt + tokens.prompt,
      cached: step.cached + tokens.prefix,
      spliced: step.spliced + tokens.spliced,
      reused: step.reused + tokens.reused,
      freed: step.freed + tokens.freed,
      thinking_kept: step.thinking_kept + (turn.busts?.thinking.kept ?? 0),
      thinking_lost: step.thinking_lost + (turn.busts?.thinking.lost ?? 0),
    });
    this.#trimSteps();
  }

  #trimSteps() {
    const since = this.now - 3600 - this.stepSeconds;
    for (const start of this.steps.keys()) if (start < since) this.steps.delete(start);
  }
}

export const tokensOf = (turn) =>
  turn.receipt?.tokens ??
  { prompt: 0, prefix: 0, spliced: 0, reused: 0, prefilled: 0, freed: 0 };

// Share of prompt tokens that were not prefilled; null without any.
export function hitRatio({ prompt, prefix, spliced, reused }) {
  return prompt ? (prefix + spliced + reused) / prompt : null;
}

// A session's model and the program that sends it, as far as they are known.
export const whoOf = ({ model, client }) => [model, client].filter((each) => each).join(" · ");

export function reasonOf(turn) {
  return turn.receipt?.reason ?? turn.receipt?.outcome ?? turn.planned;
}
