// One turn at large: its band, its edits, and what the engine said.

import { h } from "./dom.js";
import { ago, count, percent, plural, words } from "./format.js";
import { payView } from "./pay.js";
import { hitRatio, reasonOf, tokensOf } from "./state.js";
import { mark } from "./timeline.js";

const ELSEWHERE = "copied from another place or session, with corrected positions";
const PARTS = [
  ["kept", "prefix", "kept", "found in the cache, in place"],
  ["spliced", "spliced", "spliced", "moved after an edit, with corrected positions"],
  ["reused", "reused", "reused", ELSEWHERE],
  ["prefilled", "prefilled", "prefilled", "computed"],
  ["freed", "freed", "freed", "given back because of the edits; not part of the prompt"],
];
// Edits for which a prefill was right: nothing to look into.
const AS_WELL = new Set(["not_worth_it", "nothing_to_reuse", "nothing_cached"]);
// What the copied KV has read before, the best first.
const KINDS = [
  ["clean", "after the same beginning"], ["session", "after other text of this session"],
  ["tenant", "after text of another session"], ["group", "after text of another tenant"],
];

export function turnView(turn, of, state) {
  const tokens = tokensOf(turn);
  const outcome = turn.receipt?.outcome ?? turn.planned;
  return h("article", { class: "turn-view", "aria-label": `Turn ${turn.index + 1}` },
    h("div", { class: "head" },
      h("h3", {}, `Turn ${turn.index + 1} `, h("span", { class: "dim", "data-of": true }, `of ${of}`)),
      h("span", { class: `badge ${AS_WELL.has(reasonOf(turn)) ? "" : outcome}` }, words(reasonOf(turn))),
      h("span", { class: "dim" }, `hit ratio ${percent(hitRatio(tokens))}`),
      h("span", { class: "dim right", "data-since": turn.created },
        ago(Math.max(0, state.now - turn.created)))),
    wideBand(turn, tokens),
    figures(tokens),
    foundElsewhere(turn.receipt?.reuse),
    turn.receipt?.state
      ? h("p", { class: "dim state" }, "Recurrent states were kept: they still hold what was cut.") : null,
    turn.receipt?.detail ? h("p", { class: "dim" }, `Engine: ${turn.receipt.detail}`) : null,
    turn.edits.length ? editTable(turn) : h("p", { class: "dim" }, withoutEdits(outcome)),
    payView(turn));
}

function withoutEdits(outcome) {
  return outcome === "edited"
    ? "No new edits: the edits of earlier turns still apply."
    : "No edits: the history only grew.";
}

// The prompt from left to right by kind of token, then what was freed, to the same scale. Edits
// stand where the earlier prompt had them.
function wideBand(turn, tokens) {
  const whole = Math.max(1, tokens.prompt + tokens.freed);
  const share = (number) => `${(100 * number) / whole}%`;
  const ticks = turn.edits
    .filter((edit) => edit.span)
    .map((edit) => {
      const tick = mark(edit.mode, turn);
      tick.style.left = share(Math.min(edit.span[0], tokens.prompt));
      return tick;
    });
  return h("div", { class: "wide", "aria-hidden": "true" },
    h("div", { class: "ticks" }, ...ticks),
    h("div", { class: "bar" }, ...PARTS.map(([kind, name]) =>
      h("i", { class: kind, style: { width: share(tokens[name]) } }))));
}

function figures(tokens) {
  return h("dl", { class: "figures" }, ...PARTS.map(([kind, name, label, meaning]) =>
    h("div", { "data-kind": kind, title: meaning },
      h("dt", {}, h("i", { class: `swatch ${kind}` }), label),
      h("dd", {}, count(tokens[name])))),
    h("div", { "data-kind": "prompt" }, h("dt", {}, "prompt"), h("dd", {}, count(tokens.prompt))));
}

// What the engine copied from elsewhere, or could have copied where it only observes.
function foundElsewhere(reuse) {
  const found = KINDS.filter(([kind]) => reuse?.[kind]);
  if (reuse?.gated) return h("p", { class: "dim reuse" }, "Reuse was given up: the margin was too small.");
  if (!found.length) return null;
  const kinds = found.map(([kind, where]) => `${count(reuse[kind])} ${where}`).join(", ");
  const total = found.reduce((sum, [kind]) => sum + reuse[kind], 0);
  const said = reuse.mode === "observe"
    ? `Could be reused: ${plural(total, "token")} (${kinds}).`
    : `Reused: ${ELSEWHERE} (${kinds}).`;
  const more = reuse.bounded ? " There may be more: the search ended at its bound." : "";
  return h("p", { class: "dim reuse" }, said + more);
}

function editTable(turn) {
  const rows = turn.edits.map((edit) => h("tr", {},
    h("td", {}, mark(edit.mode, turn), ` ${edit.mode}`),
    h("td", {}, h("code", {}, edit.cause)),
    h("td", {}, edit.message === null ? edit.role : `${edit.message} (${edit.role})`),
    h("td", { class: "n" }, edit.span
      ? `${count(edit.span[1] - edit.span[0])} → ${count(edit.replacement_tokens)}` : "–"),
    h("td", { class: "n" }, edit.span ? count(edit.span[0]) : "–"),
    h("td", {}, words(reasonOf(turn)))));
  return h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Edits of the turn" },
    h("table", {},
      h("caption", {}, plural(turn.edits.length, "edit")),
      h("thead", {}, h("tr", {}, ...["Mode", "Cause", "Message", "Tokens", "At", "Outcome"].map(
        (name, index) => h("th", { scope: "col", class: index === 3 || index === 4 ? "n" : "" }, name)))),
      h("tbody", {}, ...rows)));
}

// The same session for those who read rather than look.
export function turnTable(turns, selected, select) {
  const names = ["Turn", "Prompt", "Kept", "Spliced", "Reused", "Prefilled", "Freed",
    "Hit ratio", "Outcome", "Edits"];
  const rows = turns.map((turn) => {
    const tokens = tokensOf(turn);
    const numbers = [tokens.prompt, ...PARTS.map(([, name]) => tokens[name])];
    return h("tr", { "aria-current": turn.turn === selected ? "true" : null },
      h("th", { scope: "row" }, h("button", {
        type: "button", class: "link", "aria-label": `Turn ${turn.index + 1}`, "data-turn": turn.turn,
        onclick: () => select(turn.turn),
      }, String(turn.index + 1))),
      ...numbers.map((number) => h("td", { class: "n" }, count(number))),
      h("td", { class: "n" }, percent(hitRatio(tokens))),
      h("td", {}, words(reasonOf(turn))),
      h("td", {}, editsInWords(turn)));
  });
  return h("div", {
    class: "scroll table", tabindex: "0", role: "group", "aria-label": "Turns as a table",
    "data-selected": selected,
  },
    h("table", {},
      h("thead", {}, h("tr", {}, ...names.map((name, index) =>
        h("th", { scope: "col", class: index > 0 && index < 8 ? "n" : "" }, name)))),
      h("tbody", {}, ...rows)));
}

function editsInWords(turn) {
  const found = new Map();
  for (const edit of turn.edits) {
    const name = `${edit.cause}, ${edit.mode}`;
    found.set(name, (found.get(name) ?? 0) + 1);
  }
  return [...found].map(([name, times]) => (times > 1 ? `${times} × ${name}` : name)).join("; ") || "none";
}
