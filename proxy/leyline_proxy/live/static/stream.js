// Server-sent events by fetch, which unlike EventSource can send a key.

import { problemOf } from "./key.js";

const FIRST_WAIT_MS = 400;
const LONGEST_WAIT_MS = 8000;
const HIDDEN_FOR_MS = 60_000;

export class Stream {
  #url;
  #key;
  #told;
  #lastId = "";
  #silentAfterMs = 25_000;
  #abort = null;
  #wake = null;
  #failures = 0;
  #stopped = false;
  #running = false;
  #hiddenTimer = 0;

  // `told` has: event(kind, data), status(name, message), locked(message).
  constructor(url, key, told) {
    this.#url = url;
    this.#key = key;
    this.#told = told;
    addEventListener("online", () => this.#hurry());
    document.addEventListener("visibilitychange", () => this.#visibility());
    this.#visibility(); // a tab may be opened behind others
  }

  // Begin, or begin anew after the key was changed.
  start({ anew = false } = {}) {
    if (anew) this.#lastId = "";
    this.#stopped = false;
    this.#failures = 0;
    this.#abort?.abort();
    this.#hurry();
    if (!this.#running) this.#run();
  }

  set heartbeat(seconds) {
    this.#silentAfterMs = seconds * 2500;
  }

  async #run() {
    this.#running = true;
    while (!this.#stopped) {
      const waitMs = await this.#once();
      if (!this.#stopped && waitMs > 0) await this.#pause(waitMs);
    }
    this.#running = false;
  }

  // One connection; gives how long to wait before the next.
  async #once() {
    const abort = (this.#abort = new AbortController());
    const watchdog = new Watchdog(() => abort.abort(), this.#silentAfterMs);
    try {
      const headers = { accept: "text/event-stream", ...this.#key.headers };
      if (this.#lastId) headers["last-event-id"] = this.#lastId;
      const response = await fetch(this.#url, { headers, signal: abort.signal, cache: "no-store" });
      if (this.#key.refusedBy(response)) {
        this.#stopped = true;
        this.#told.locked(await problemOf(response));
        return 0;
      }
      if (!response.ok) return this.#refused(response, await problemOf(response));
      await this.#read(response.body, watchdog);
    } catch {
      // Torn, unreachable, or given up by the watchdog: tried again.
    } finally {
      watchdog.stop();
    }
    if (!this.#stopped) this.#told.status("reconnecting", "Reconnecting…");
    return this.#backOff();
  }

  #refused(response, message) {
    const asked = Number(response.headers.get("retry-after")) * 1000;
    const stopping = response.status === 503 && asked <= 1000;
    this.#told.status("reconnecting", stopping ? "Reconnecting…" : message);
    return Math.max(asked || 0, this.#backOff());
  }

  #backOff() {
    const wait = Math.min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2 ** this.#failures);
    this.#failures += 1;
    return wait * (0.75 + Math.random() / 2);
  }

  async #read(body, watchdog) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      watchdog.alive(this.#silentAfterMs);
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) this.#take(event);
    }
  }

  #take(event) {
    let kind = "";
    let data = "";
    for (const line of event.split("\n")) {
      if (line.startsWith("event: ")) kind = line.slice(7);
      else if (line.startsWith("data: ")) data = line.slice(6);
      else if (line.startsWith("id: ")) this.#lastId = line.slice(4);
    }
    if (!kind) return;
    if (kind !== "bye") {
      this.#failures = 0;
      this.#told.status("live", "Live");
    }
    this.#told.event(kind, JSON.parse(data));
  }

  #pause(ms) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, ms);
      this.#wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }

  #hurry() {
    this.#wake?.();
    this.#wake = null;
  }

  // A tab that nobody sees gives its place up after a while.
  #visibility() {
    clearTimeout(this.#hiddenTimer);
    if (document.hidden) {
      this.#hiddenTimer = setTimeout(() => {
        this.#stopped = true;
        this.#abort?.abort();
        this.#told.status("paused", "Paused");
        this.paused = true;
      }, HIDDEN_FOR_MS);
    } else if (this.paused) {
      this.paused = false;
      this.start();
    }
  }
}

// Gives a connection up that has been silent for too long.
class Watchdog {
  #timer;
  #bark;

  constructor(bark, ms) {
    this.#bark = bark;
    this.alive(ms);
  }

  alive(ms) {
    clearTimeout(this.#timer);
    this.#timer = setTimeout(this.#bark, ms);
  }

  stop() {
    clearTimeout(this.#timer);
  }
}
