// Engines and claims.

import { h, setText } from "./dom.js";
import { count, plural, span, words } from "./format.js";

// Only what changed is built anew: facts that somebody has opened stay open.
export class Redrawn {
  #before = "";

  changed(document) {
    const now = JSON.stringify(document);
    const different = now !== this.#before;
    this.#before = now;
    return different;
  }
}

// What the top of the page says of engines that are down; null while all are up.
export function enginesDown(engines) {
  const down = engines.filter((each) => !each.up);
  if (!down.length) return null;
  if (down.length < engines.length) {
    return { name: "reduced", message: `${down.length} of ${engines.length} engines are down` };
  }
  const why = down.map((each) => `${each.name}: ${each.problem.replace(/\.$/, "")}`).join("; ");
  return {
    name: "down",
    message: "No engine is up",
    notice: `No engine is up, so requests fail until one answers. ${why}.`,
  };
}

// Why no session is shown, as a heading and sentences; null while nothing is wrong.
export function obstacles({ store, engines }) {
  const found = [];
  if (store.problem) {
    found.push(["Sessions can't be read", `${storeProblem(store)} Its sessions appear here once it answers.`]);
  }
  if (!engines.length) {
    found.push(["No engine for this tenant", "This tenant can't use any engine, so its requests fail."]);
  } else {
    const down = enginesDown(engines);
    if (down?.notice) found.push([down.message, down.notice]);
  }
  return found.length ? { heading: found[0][0], sentences: found.map(([, sentence]) => sentence) } : null;
}

export const storeProblem = ({ problem }) => `Session store: ${problem.replace(/\.$/, "")}.`;

export function renderEngines(root, state) {
  if (state.engines === null) {
    root.replaceChildren(h("p", { class: "empty" }, "Waiting for the proxy."));
    return;
  }
  if (!state.engines.length) {
    root.replaceChildren(h("p", { class: "empty" }, "This tenant can't use any engine."));
    return;
  }
  const open = new Set([...root.querySelectorAll("details[open]")].map((each) => each.dataset.name));
  const focused = root.contains(document.activeElement)
    ? document.activeElement.closest("details")?.dataset.name : undefined;
  const single = state.engines.length === 1;
  root.replaceChildren(...state.engines.map((each) => engine(each, single || open.has(each.name))));
  const again = [...root.children].find((each) => focused && each.dataset.name === focused);
  again?.querySelector("summary").focus({ preventScroll: true });
}

// What changes with every request is told in its place.
export function tellRunning(root, engines) {
  engines.forEach((each, index) => {
    const place = root.children[index]?.querySelector("[data-running]");
    if (place) setText(place, count(each.running));
  });
}

export const withoutRunning = (engines) => engines?.map((each) => ({ ...each, running: 0 })) ?? null;

function engine(each, open) {
  const facts = [
    ["Address", each.upstream],
    ["Requests in progress", count(each.running)],
    ["Circuit", words(each.circuit)],
    ["Rendering", each.rendering_problem || each.rendering],
    ...each.facts.map((fact) => [fact.name, fact.value]),
  ];
  return h("details", { class: "engine", "data-name": each.name, open },
    h("summary", {},
      h("span", { class: `dot ${each.up ? "up" : "down"}`, "aria-hidden": "true" }),
      h("strong", {}, each.name), " ",
      h("span", {}, each.up ? "up" : `down: ${each.problem}`), " ",
      h("span", { class: `badge ${each.splices ? "spliced" : "reprefilled"}` },
        each.splices ? "splices" : "does not splice"),
      each.warming ? h("span", { class: "badge" }, "warming") : null,
      each.draining ? h("span", { class: "badge" }, "draining") : null),
    each.up && !each.splices ? h("p", { class: "bad" }, `Edits are not spliced: ${each.obstacle}.`) : null,
    h("dl", { class: "facts" }, ...facts.flatMap(([name, value]) => [
      h("dt", {}, name),
      h("dd", { "data-running": name === "Requests in progress" }, value || "–")])));
}

export function renderClaims(root, state) {
  if (!state.claims.length) {
    root.replaceChildren(h("p", { class: "empty" }, "No live claims."));
    return;
  }
  const rows = state.claims.map((claim) => h("tr", {},
    h("th", { scope: "row" }, h("code", {}, claim.id)),
    h("td", {}, h("code", { title: claim.session }, state.nameOf(claim.session))),
    h("td", {}, `${claim.kind}, priority ${claim.priority}`),
    h("td", {}, words(claim.state)),
    h("td", {}, residence(claim)),
    h("td", { class: "n" }, count(claim.hits)),
    h("td", { class: "n" }, count(claim.pressure)),
    h("td", { class: "n" }, claim.expires_in_s === null ? "never" : span(claim.expires_in_s)),
    h("td", {}, claim.upstream)));
  const names = ["Claim", "Session", "Kind", "State", "Resident", "Hits", "Pressure", "Expires in", "Engine"];
  const before = root.querySelector(".scroll");
  const [left, focused] = [before?.scrollLeft ?? 0, before && before === document.activeElement];
  root.replaceChildren(h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Claims" },
    h("table", {},
      h("thead", {}, h("tr", {}, ...names.map((name, index) =>
        h("th", { scope: "col", class: index >= 5 && index <= 7 ? "n" : "" }, name)))),
      h("tbody", {}, ...rows))));
  root.firstChild.scrollLeft = left;
  if (focused) root.firstChild.focus({ preventScroll: true });
}

function residence(claim) {
  const whole = Math.max(1, claim.required_tokens);
  const share = Math.min(100, (100 * claim.resident_tokens) / whole);
  return h("span", { class: "residence" },
    h("span", { class: "meter", "aria-hidden": "true" }, h("i", { style: { width: `${share}%` } })),
    ` ${count(claim.resident_tokens)} of ${plural(claim.required_tokens, "token")}`);
}
