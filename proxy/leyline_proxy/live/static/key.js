// The API key: kept for as long as the tab, sent with every question.

const NAME = "leyline.key";

export class Key {
  #value = "";

  constructor() {
    try {
      this.#value = sessionStorage.getItem(NAME) ?? "";
    } catch {
      // No storage: it is kept in memory alone.
    }
  }

  set(value) {
    this.#value = value;
    try {
      sessionStorage.setItem(NAME, value);
    } catch {
      // As above.
    }
  }

  get headers() {
    return this.#value ? { authorization: `Bearer ${this.#value}` } : {};
  }

  // True if another key may be let in: 403 is for a token that is nobody's here.
  refusedBy(response) {
    return response.status === 401 || (response.status === 403 && this.#value !== "");
  }
}

// What the proxy says of a refusal, for people.
export async function problemOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The proxy answered with status ${response.status}.`;
  }
}
