/** A picture of the cluster: each target with its coordinator and KV memory, and the drafters that draft for it. */

import { percent } from "./meters.js";
import { svg } from "./tree.js";

const ROW = 96;
const BOX = { width: 250, height: 76 };
const NARROW = 560;

/** Draw the replicas of `/cluster` into `place`. */
export function drawTopology(place, replicas) {
  const isNarrow = place.clientWidth < NARROW;
  const size = { width: isNarrow ? 340 : 700, height: Math.max(1, replicas.length) * (isNarrow ? 2 * ROW : ROW) };
  const label = replicas.map((one) => `${name(one)}: ${one.running} running, ${one.waiting} waiting`).join("; ");
  const picture = svg("svg", { class: "topology", viewBox: `0 0 ${size.width} ${size.height}`, role: "img", "aria-label": label });
  replicas.forEach((replica, index) => {
    const top = index * (isNarrow ? 2 * ROW : ROW) + 8;
    const target = isNarrow ? { x: 45, y: top } : { x: 20, y: top };
    const drafters = isNarrow ? { x: 45, y: top + ROW } : { x: 430, y: top };
    const { available = 0, failed = 0 } = replica.drafters;
    const hasDrafters = available + failed > 0;
    if (hasDrafters) picture.append(...links(target, drafters, isNarrow, available > 0));
    picture.append(targetBox(target, replica));
    if (hasDrafters) picture.append(drafterBox(drafters, available, failed));
  });
  place.replaceChildren(picture);
}

function name(replica) {
  return replica.id || "coordinator";
}

function text(x, y, content, kind = "") {
  const made = svg("text", { x, y, class: kind });
  made.textContent = content;
  return made;
}

function frame({ x, y }, kind) {
  return svg("rect", { x, y, rx: 10, class: `box ${kind}`, ...BOX });
}

function targetBox({ x, y }, replica) {
  const drafts = "available" in replica.drafters ? "" : "; drafts on the target";
  const used = Math.min(1, replica.kv_usage) * (BOX.width - 134);
  return svg(
    "g",
    {},
    frame({ x, y }, "target"),
    text(x + 12, y + 20, `Target ${name(replica)}`.slice(0, 34), "title"),
    text(x + 12, y + 38, `${replica.running} running, ${replica.waiting} waiting${drafts}`),
    text(x + 12, y + 60, "KV memory"),
    svg("rect", { x: x + 90, y: y + 50, width: BOX.width - 134, height: 12, rx: 6, class: "kv-all" }),
    svg("rect", { x: x + 90, y: y + 50, width: used, height: 12, rx: 6, class: "kv-used" }),
    text(x + BOX.width - 38, y + 60, percent(replica.kv_usage)),
  );
}

function drafterBox({ x, y }, available, failed) {
  const dots = Array.from({ length: Math.min(12, available + failed) }, (_, index) =>
    svg("circle", { cx: x + 20 + 18 * index, cy: y + 54, r: 6, class: index < available ? "alive" : "lost" }),
  );
  return svg(
    "g",
    {},
    frame({ x, y }, "drafter"),
    text(x + 12, y + 20, "Drafters", "title"),
    text(x + 12, y + 38, failed ? `${available} of ${available + failed} answer` : `${available} answering`),
    ...dots,
  );
}

/** Committed tokens go to the drafters, trees come back. */
function links(target, drafters, isNarrow, isAlive) {
  const kind = isAlive ? "link" : "link lost";
  const line = (x1, y1, x2, y2) => svg("line", { x1, y1, x2, y2, class: kind });
  if (isNarrow) {
    const [top, bottom] = [target.y + BOX.height, drafters.y];
    return [line(target.x + 100, top, target.x + 100, bottom), line(target.x + 150, bottom, target.x + 150, top)];
  }
  const [left, right] = [target.x + BOX.width, drafters.x];
  return [
    line(left, target.y + 28, right, target.y + 28),
    text((left + right) / 2, target.y + 22, "committed tokens →", "link-label"),
    line(right, target.y + 52, left, target.y + 52),
    text((left + right) / 2, target.y + 68, "← draft trees", "link-label"),
  ];
}
