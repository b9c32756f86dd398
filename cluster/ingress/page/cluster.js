/** The cluster: what each replica does, read once a second while it is shown. */

import { read } from "./api.js";
import { percent } from "./meters.js";
import { svg } from "./tree.js";
import { drawTopology } from "./topology.js";
import { element } from "./transcript.js";

const PERIOD_MS = 1000;
const POINTS = 60;
const $ = (id) => document.getElementById(id);

export class Cluster {
  constructor(report) {
    this.report = report;
    this.timer = null;
    this.before = new Map();
    this.rates = new Map();
    this.steps = new Map();
  }

  start() {
    this.stop();
    this.timer = setInterval(() => this.#refresh(), PERIOD_MS);
    this.#refresh();
  }

  stop() {
    clearInterval(this.timer);
    this.timer = null;
  }

  async #refresh() {
    try {
      const { replicas } = await read("cluster");
      this.report("");
      drawTopology($("topology"), replicas);
      $("replicas").replaceChildren(...replicas.map((replica) => this.#card(replica)));
      $("cluster-age").textContent = `${replicas.length === 1 ? "1 replica" : `${replicas.length} replicas`}, ${new Date().toLocaleTimeString()}`;
    } catch (error) {
      if (this.timer === null) return;
      this.stop();
      const message = error.status === 403 ? "The cluster is shown with the key of an operator only." : error.message;
      this.report(message, error.status, { "Try again": () => this.start() });
    }
  }

  #card(replica) {
    const now = performance.now();
    const { before, rate } = this.#since(replica, now);
    const card = element("section", "card replica");
    card.append(element("h3", "", replica.id || "coordinator"), element("p", "muted small", replica.model));
    const list = element("dl", "meters");
    const drafted = replica.drafted_tokens_total - before.drafted_tokens_total;
    const accepted = replica.accepted_tokens_total - before.accepted_tokens_total;
    const verdicts = replica.verdicts_total - before.verdicts_total;
    const committed = replica.committed_tokens_total - before.committed_tokens_total;
    const figures = [
      ["running", replica.running],
      ["waiting", replica.waiting],
      ["tokens per second", rate.toFixed(1)],
      ["tokens per step", verdicts ? (committed / verdicts).toFixed(2) : "–"],
      ["drafts accepted", percent(drafted ? accepted / drafted : null)],
      ["drafters", drafters(replica.drafters, replica.draft_version)],
      ...learned(replica),
    ];
    for (const [label, value] of figures) {
      const pair = element("div");
      pair.append(element("dd", "", String(value)), element("dt", "", label));
      list.append(pair);
    }
    card.append(list, line(this.rates.get(replica.id), POINTS, "tokens per second", 0));
    if (learns(replica)) card.append(...this.#stepLine(replica.id, verdicts ? committed / verdicts : null));
    return card;
  }

  /** The numbers of about ten seconds ago, and the present rate. */
  #since(replica, now) {
    const seen = this.before.get(replica.id) ?? [];
    const last = seen.at(-1);
    const tokens = last ? replica.generation_tokens_total - last.replica.generation_tokens_total : 0;
    const rate = last ? (1000 * tokens) / Math.max(1, now - last.now) : 0;
    const rates = [...(this.rates.get(replica.id) ?? []), rate].slice(-POINTS);
    this.rates.set(replica.id, rates);
    this.before.set(replica.id, [...seen, { replica, now }].slice(-10));
    return { before: (seen[0] ?? { replica }).replica, rate };
  }

  /** A line of tokens per step since the page looks; the last figure stays while nothing is decided. */
  #stepLine(id, figure) {
    const steps = this.steps.get(id) ?? new Series();
    this.steps.set(id, steps);
    const value = figure ?? steps.values.at(-1);
    if (value === undefined) return [];
    steps.add(value);
    return [line(steps.values, POINTS * steps.period, "tokens per step", 2)];
  }
}

/** Values over a time that grows: when there are too many, every second one goes, and each stands for twice as long. */
class Series {
  constructor() {
    this.values = [];
    this.period = 1;
    this.looks = 0;
  }

  add(value) {
    this.looks += 1;
    if (this.looks % this.period) return;
    this.values.push(value);
    if (this.values.length <= POINTS) return;
    this.values = this.values.filter((_, index) => index % 2 === 0);
    this.period *= 2;
  }
}

/** A line of values, the last one now. `POINTS` of them would span so many seconds. */
function line(values, seconds, name, digits) {
  const most = ceiling(Math.max(1, ...values));
  const at = (index) => 40 + (252 * (POINTS - values.length + index)) / (POINTS - 1);
  const points = values.map((value, index) => `${at(index).toFixed(1)},${(78 - (66 * value) / most).toFixed(1)}`);
  const span = seconds < 120 ? `${seconds} s` : `${Math.round(seconds / 60)} min`;
  const title = name[0].toUpperCase() + name.slice(1);
  const label = `${title} over the last ${span}, at most ${Math.max(...values).toFixed(digits)}`;
  const tick = (x, y, content, anchor) => {
    const text = svg("text", { x, y, "text-anchor": anchor });
    text.textContent = content;
    return text;
  };
  return svg(
    "svg",
    { class: "line", viewBox: "0 0 300 100", role: "img", "aria-label": label },
    svg("path", { class: "axes", d: "M40 8V78H292M40 12H292M40 45H292" }),
    svg("polyline", { points: points.join(" ") }),
    tick(36, 16, String(most), "end"),
    tick(36, 49, String(most / 2), "end"),
    tick(36, 81, "0", "end"),
    tick(40, 95, `${span} ago`, "start"),
    tick(292, 95, "now", "end"),
    tick(166, 95, name, "middle"),
  );
}

/** The next of 1, 2, 5, 10, 20, 50, … that is not below a value. */
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => step * power >= value) * power;
}

/** How many drafters answer. A replica whose target drafts names no states; without drafts, none is in any. */
function drafters(states, version) {
  const { available = 0, failed = 0 } = states;
  if (!("available" in states)) return version ? `on the target, version ${version}` : "on the target";
  return failed ? `${available} of ${available + failed}` : String(available);
}

/** Whether the draft learns, or drafts with what it has learned. */
function learns({ draft_learned_texts: texts, draft_version: version }) {
  return Boolean(texts || version);
}

/** What the draft has learned from; nothing where it does not learn. */
function learned(replica) {
  if (!learns(replica)) return [];
  const { draft_learned_texts: texts } = replica;
  const { draft_tokens_per_step_before: before, draft_tokens_per_step_after: after } = replica;
  const figures = [["texts to learn from", texts]];
  if (before) figures.push(["tokens per step, last training", `${before.toFixed(2)} → ${after.toFixed(2)}`]);
  return figures;
}
