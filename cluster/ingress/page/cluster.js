/** The cluster: what each replica does, read once a second while it is shown. */

import { read } from "./api.js";
import { percent } from "./meters.js";
import { svg } from "./tree.js";
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
      $("replicas").replaceChildren(...replicas.map((replica) => this.#card(replica)));
      $("cluster-age").textContent = `${replicas.length === 1 ? "1 replica" : `${replicas.length} replicas`}, ${new Date().toLocaleTimeString()}`;
    } catch (error) {
      if (this.timer === null) return;
      this.stop();
      this.report(error.status === 403 ? "The cluster is shown with the key of an operator only." : error.message, error.status);
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
      ["tokens per verdict", verdicts ? (committed / verdicts).toFixed(2) : "–"],
      ["drafts accepted", percent(drafted ? accepted / drafted : null)],
      ["drafters", drafters(replica.drafters)],
    ];
    for (const [label, value] of figures) {
      const pair = element("div");
      pair.append(element("dd", "", String(value)), element("dt", "", label));
      list.append(pair);
    }
    const meter = element("meter");
    Object.assign(meter, { min: 0, max: 1, high: 0.9, value: replica.kv_usage });
    const label = element("label", "kv", `KV memory in use: ${percent(replica.kv_usage)}`);
    label.append(meter);
    card.append(list, this.#line(replica.id), label);
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

  #line(id) {
    const rates = this.rates.get(id);
    const most = Math.max(1, ...rates);
    const points = rates.map((rate, index) => `${(index * 300) / (POINTS - 1)},${(39 - (36 * rate) / most).toFixed(1)}`);
    const label = `Tokens per second, at most ${most.toFixed(0)}`;
    return svg(
      "svg",
      { class: "line", viewBox: "0 0 300 40", role: "img", "aria-label": label, preserveAspectRatio: "none" },
      svg("polyline", { points: points.join(" ") }),
    );
  }
}

function drafters(states) {
  const { available = 0, failed = 0 } = states;
  if (!available && !failed) return "on the target";
  return failed ? `${available} of ${available + failed}` : String(available);
}
