// "What did this turn pay for?": its prompt by source, lost tokens by cause, and what they cost.

import { h } from "./dom.js";
import { count, plural, seconds, words } from "./format.js";
import { tokensOf } from "./state.js";

const SERVED = [["kept", "prefix"], ["spliced", "spliced"], ["reused", "reused"]];
const HATCHES = 4; // lost causes that are told apart by their hatching

// Nothing without the proxy's account: an engine may not report its counts.
export function payView(turn) {
  const busts = turn.busts;
  if (!busts) return null;
  const tokens = tokensOf(turn);
  const causes = lostByCause(busts);
  const parts = [
    ...SERVED.map(([kind, name]) => [kind, kind, tokens[name]]),
    ["prefilled", "new", busts.new_tokens],
    ...causes.map(([cause, lost], index) => [`lost lost-${index % HATCHES}`, `lost: ${cause}`, lost]),
  ].filter(([, , number]) => number > 0);
  return h("section", { class: "pay", "aria-label": "What did this turn pay for?" },
    h("h4", {}, "What did this turn pay for?"),
    bar(parts, tokens.prompt),
    h("ul", { class: "legend" }, ...parts.map(([kind, label, number]) =>
      h("li", { "data-part": label },
        h("i", { class: `swatch ${kind}` }), `${label} `, h("b", {}, count(number))))),
    h("p", { class: "dim sum" }, inWords(busts)),
    thinking(busts),
    busts.entries.length ? bustTable(busts) : null);
}

function lostByCause(busts) {
  const sums = new Map();
  for (const { cause, tokens } of busts.entries) sums.set(cause, (sums.get(cause) ?? 0) + tokens);
  return [...sums].sort(([, one], [, other]) => other - one);
}

function bar(parts, prompt) {
  const share = (number) => `${(100 * number) / Math.max(1, prompt)}%`;
  return h("div", { class: "paid", "aria-hidden": "true" },
    ...parts.map(([kind, , number]) => h("i", { class: kind, style: { width: share(number) } })));
}

function inWords(busts) {
  if (!busts.compared_with) return "Nothing to compare with: the session holds no earlier turn of it.";
  const estimated = busts.estimated ? " The tokens are estimated from the lengths of messages." : "";
  if (!busts.lost_tokens) return `Only new tokens: nothing that was cached was lost.${estimated}`;
  const { money } = busts;
  const price = money ? `, ${amount(money.lost, money.currency)} more than from the cache` : "";
  return `${plural(busts.lost_tokens, "token")} that had been cached ` +
    `${busts.lost_tokens === 1 ? "was" : "were"} prefilled again: ` +
    `${duration(busts.lost_seconds)}${price}.${estimated}`;
}

// What the other setting of reasoning_edits would have done.
function thinking({ thinking: { kept, lost } }) {
  if (!kept && !lost) return null;
  return h("p", { class: "dim thinking" }, kept
    ? `${plural(kept, "token")} after stripped thinking copied; reasoning_edits=exact would have prefilled them.`
    : `${plural(lost, "token")} after stripped thinking prefilled; reasoning_edits=amortize would have copied them.`);
}

function bustTable(busts) {
  const { money } = busts;
  const names = ["Lost to", "Message", "Why", "Tokens", "In messages", "Time", ...(money ? ["Price"] : [])];
  const numeric = new Set(["Tokens", "Time", "Price"]);
  const rows = busts.entries.map((bust) => h("tr", {},
    h("td", {}, h("code", {}, bust.cause), bust.entries ? ` ${count(bust.entries)}` : null),
    h("td", {}, changed(bust)),
    h("td", {}, bust.why ? words(bust.why) : "–"),
    h("td", { class: "n" }, count(bust.tokens)),
    h("td", {}, where(bust.messages)),
    h("td", { class: "n" }, duration(bust.seconds)),
    money ? h("td", { class: "n" }, amount(bust.money, money.currency)) : null));
  return h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": "Lost tokens of the turn" },
    h("table", {},
      h("caption", {}, plural(busts.entries.length, "cause")),
      h("thead", {}, h("tr", {}, ...names.map((name) =>
        h("th", { scope: "col", class: numeric.has(name) ? "n" : "" }, name)))),
      h("tbody", {}, ...rows)));
}

function changed({ message, role, tool }) {
  const named = tool ? `${role}, ${tool}` : role;
  if (message === null) return role ?? "–";
  return named ? `${message} (${named})` : String(message);
}

function where(messages) {
  if (!messages) return "–";
  return messages[0] === messages[1] ? String(messages[0]) : `${messages[0]}–${messages[1]}`;
}

const duration = (time) => (time === null ? "time unknown" : seconds(time));

// Lost tokens cost fractions of a cent: two digits that count.
function amount(number, currency) {
  return new Intl.NumberFormat("en-US", {
    style: "currency", currency, currencyDisplay: "code", maximumSignificantDigits: 2,
  }).format(number);
}
