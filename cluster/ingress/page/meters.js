/** Figures of an answer while it is received, and a strip with one bar per pass. */

import { svg } from "./tree.js";

const BARS = 56;
const BAR = 6;
const HEIGHT = 56;

const FIGURES = [
  ["tokens", "tokens", (answer) => answer.ids.length],
  ["passes", "target steps", (answer) => answer.passes.length],
  ["per-pass", "tokens per step", (answer) => answer.tokensPerPass.toFixed(2)],
  ["acceptance", "drafts accepted", (answer) => percent(answer.acceptance)],
  ["rate", "tokens per second", (answer) => answer.tokensPerSecond.toFixed(1)],
  ["first", "to the first token", (answer) => (answer.first === null ? "–" : `${(answer.first / 1000).toFixed(2)} s`)],
];

/** A share as text. */
export function percent(share) {
  return share === null ? "–" : `${Math.round(100 * share)} %`;
}

/** Make the list of figures. Returns the function that shows those of an answer. */
export function makeMeters(list, names = FIGURES.map(([name]) => name)) {
  const cells = new Map();
  for (const [name, label] of FIGURES.filter(([figure]) => names.includes(figure))) {
    const term = document.createElement("dt");
    term.textContent = label;
    const value = document.createElement("dd");
    value.textContent = "–";
    value.dataset.figure = name;
    const pair = document.createElement("div");
    pair.append(value, term);
    list.append(pair);
    cells.set(name, value);
  }
  return (answer) => {
    for (const [name, , figure] of FIGURES) if (cells.has(name)) cells.get(name).textContent = String(figure(answer));
  };
}

/** Draw the last passes: accepted tokens, the target's own, and the rejected ones below the line. */
export function drawStrip(place, answer, chosen) {
  const passes = answer.passes.slice(-BARS);
  const most = Math.max(4, ...passes.map((pass) => Math.max(pass.tokens.length, pass.rejected)));
  const unit = HEIGHT / 2 / most;
  const line = HEIGHT / 2;
  const bars = passes.map((pass, index) => {
    const x = index * BAR;
    const accepted = pass.tokens.filter((token) => token.drafted).length;
    const own = pass.tokens.length - accepted;
    const part = (kind, y, tokens) =>
      svg("rect", { class: kind, x: x + 1, y, width: BAR - 2, height: Math.max(0, tokens * unit) });
    const group = svg("g", { class: pass === chosen ? "bar chosen" : "bar", "data-pass": pass.number });
    group.append(
      svg("rect", { class: "touch", x, y: 0, width: BAR, height: HEIGHT }),
      part("target", line - own * unit, own),
      part("draft", line - (own + accepted) * unit, accepted),
      part("rejected", line + 1, pass.rejected),
    );
    return group;
  });
  const label = `Tokens of the last ${passes.length} steps`;
  const picture = svg("svg", { viewBox: `0 0 ${BARS * BAR} ${HEIGHT}`, role: "img", "aria-label": label });
  picture.append(svg("line", { class: "axis", x1: 0, y1: line + 0.5, x2: BARS * BAR, y2: line + 0.5 }), ...bars);
  place.replaceChildren(picture);
}
