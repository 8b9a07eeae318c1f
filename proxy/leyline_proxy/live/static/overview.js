// The last hour: sums, and the hit ratio over time.

import { h, setText, svg } from "./dom.js";
import { count, large, percent, plural, span } from "./format.js";

const HEIGHT = 150;
const PAD = { left: 44, right: 8, top: 10, bottom: 22 };
const LEAST_SPAN_S = 300;

export function renderOverview(tiles, chart, state) {
  const steps = state.trend();
  const sum = {
    turns: 0, prompt: 0, cached: 0, spliced: 0, reused: 0, thinking_kept: 0, thinking_lost: 0,
  };
  for (const step of steps) for (const name of Object.keys(sum)) sum[name] += step[name];
  const held = served(sum);
  const ratio = sum.prompt ? held / sum.prompt : null;
  fillTiles(tiles, [
    ["Hit ratio", percent(ratio), `of ${plural(sum.prompt, "prompt token")}`, "main"],
    ["Kept", large(sum.cached), "tokens found in the cache", "kept"],
    ["Spliced", large(sum.spliced), "tokens moved after an edit", "spliced"],
    ["Reused", large(sum.reused), "tokens copied from elsewhere", "reused"],
    ["Prefilled", large(sum.prompt - held), "tokens computed", "prefilled"],
    ["Turns", count(sum.turns), "in the last hour; now " +
      `${count(state.running)} running, ${count(state.waiting)} waiting`],
  ]);
  const drawn = trendChart(steps, state, Math.max(240, chart.clientWidth));
  chart.replaceChildren(drawn, ...thinkingLines(sum));
}

// What the other setting of reasoning_edits would have done in the last hour.
function thinkingLines({ thinking_kept: kept, thinking_lost: lost }) {
  const line = (text) => h("p", { class: "dim thinking" }, text);
  return [
    kept ? line(`After stripped thinking, ${plural(kept, "token")} copied: exact would have prefilled them.`) : null,
    lost ? line(`After stripped thinking, ${plural(lost, "token")} prefilled: amortize would have copied them.`) : null,
  ].filter((each) => each);
}

// Tokens of a step that were not prefilled.
const served = (step) => step.cached + step.spliced + step.reused;

// Filled in their places: whoever reads or marks a figure isn't disturbed.
function fillTiles(tiles, wanted) {
  if (!tiles.children.length) tiles.append(...wanted.map((each) => tile(...each)));
  wanted.forEach(([, value, note], index) => {
    const [, figure, below] = tiles.children[index].children;
    setText(figure, value);
    setText(below, note);
  });
}

function tile(name, value, note, kind = "") {
  return h("div", { class: `tile ${kind}` },
    h("dt", {}, name), h("dd", { class: "value" }, value), h("dd", { class: "dim" }, note));
}

function trendChart(steps, state, wide) {
  const points = steps.filter((step) => step.prompt);
  if (!points.length) {
    return h("p", { class: "empty" }, "The hit ratio over time appears with the first turns.");
  }
  // The step that isn't over is drawn whole.
  const end = Math.max(state.now, points.at(-1).start + state.stepSeconds);
  const start = Math.min(points[0].start, end - LEAST_SPAN_S);
  const x = (time) =>
    PAD.left + ((time - start) / (end - start)) * (wide - PAD.left - PAD.right);
  const y = (share) => PAD.top + (1 - share) * (HEIGHT - PAD.top - PAD.bottom);
  const ratios = points.map((step) => served(step) / step.prompt);
  const most = Math.max(...points.map((step) => step.prompt));
  const width = Math.max((x(start + state.stepSeconds) - PAD.left) * 0.7, 1);
  const at = (step) => x(step.start + state.stepSeconds / 2);
  const picture = svg("svg", {
    width: wide, height: HEIGHT, role: "img",
    "aria-label": `Hit ratio over the last ${span(end - start)}: now ${percent(ratios.at(-1))}, ` +
      `lowest ${percent(Math.min(...ratios))}, highest ${percent(Math.max(...ratios))}.`,
  });
  for (const share of [0, 0.5, 1]) {
    picture.append(
      svg("line", { class: "grid", x1: PAD.left, x2: wide - PAD.right, y1: y(share), y2: y(share) }),
      svg("text", { class: "tick", x: PAD.left - 8, y: y(share) + 4, "text-anchor": "end" },
        `${share * 100} %`),
    );
  }
  for (const step of points) {
    const height = (step.prompt / most) * 0.3 * (HEIGHT - PAD.top - PAD.bottom);
    picture.append(svg("rect", {
      class: "volume", x: at(step) - width / 2, y: y(0) - height, width, height,
    }, svg("title", {}, `${count(step.prompt)} prompt tokens`)));
  }
  const line = points.map((step, index) => `${at(step).toFixed(1)},${y(ratios[index]).toFixed(1)}`);
  picture.append(svg("polyline", { class: "ratio", points: line.join(" ") }));
  if (points.length < 50) points.forEach((step, index) => {
    picture.append(svg("circle", { class: "ratio-dot", cx: at(step), cy: y(ratios[index]), r: 3 },
      svg("title", {}, `${percent(ratios[index])} of ${count(step.prompt)} prompt tokens`)));
  });
  picture.append(
    svg("text", { class: "tick", x: PAD.left, y: HEIGHT - 6 }, `${span(end - start)} ago`),
    svg("text", { class: "tick", x: wide - PAD.right, y: HEIGHT - 6, "text-anchor": "end" }, "now"),
  );
  return h("figure", {},
    h("figcaption", { class: "dim" }, "Hit ratio over time; below it, prompt tokens"), picture);
}
