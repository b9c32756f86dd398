/** The race: one request with one seed, without drafts and with them. The tokens must be equal. */

import { jsonWithSeed } from "./api.js";
import { ask, chatBody } from "./answer.js";
import { makeMeters } from "./meters.js";
import { element, originsOf, writePass } from "./transcript.js";

const $ = (id) => document.getElementById(id);
const PROMPT = `Proofread this paragraph and write the corrected version:

the pilot fish swim ahead of the shark. it eat the leftovers of the sharks meals, and it clean the parasites from its skin and its mouth. the shark do not eat the pilot fish. sailors once believed that the pilot fish lead the shark to its food, and they telled this story in every harbour.`;

class Lane {
  constructor(place) {
    this.bar = element("progress", "bar");
    this.bar.setAttribute("aria-label", "Tokens generated");
    const list = element("dl", "meters");
    this.text = element("div", "text");
    place.append(this.bar, list, this.text);
    this.showFigures = makeMeters(list, ["tokens", "passes", "per-pass", "rate"]);
    this.place = place;
  }

  async run(text, maxTokens, method, signal, report) {
    this.text.replaceChildren();
    this.bar.max = maxTokens;
    this.bar.value = 0;
    this.place.classList.add("streaming");
    try {
      const answer = await ask(text, {
        signal,
        onPasses: (passes, current) => {
          for (const pass of passes) writePass(this.text, pass, method);
          if (passes.length) this.showFigures(current);
          this.bar.value = current.ids.length;
          this.text.scrollTop = this.text.scrollHeight;
        },
        onLost: (retry) => report("The server does not answer. The race goes on when it is back.", 0, { "Try now": retry }),
        onBack: () => report(""),
      });
      this.bar.value = maxTokens;
      return answer;
    } finally {
      this.place.classList.remove("streaming");
    }
  }
}

export class Race {
  constructor(page, report) {
    this.page = page;
    this.report = report;
    this.plain = new Lane($("lane-plain"));
    this.drafts = new Lane($("lane-drafts"));
    this.abort = null;
    $("race-prompt").value = PROMPT;
    $("race-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.abort) this.stop();
      else this.#start();
    });
  }

  /** End a race that runs. */
  stop() {
    this.abort?.abort();
  }

  async #start() {
    this.abort = new AbortController();
    $("race-start").textContent = "Stop";
    $("race-result").hidden = true;
    this.report("");
    const maxTokens = Number($("race-tokens").value || 128);
    const seed = $("race-seed").value.trim() || "7";
    // A salt of its own for each answer: neither finds what another one has stored, so no draft is a copy of the other text.
    const race = crypto.randomUUID?.() ?? String(Math.random());
    const body = (speculation) =>
      chatBody([{ role: "user", content: $("race-prompt").value }], {
        model: this.page.model,
        temperature: Number($("race-temperature").value || 0),
        maxTokens,
        speculation,
        salt: `${race}-${speculation ? "drafts" : "plain"}`,
      });
    const run = (lane, speculation) =>
      lane.run(jsonWithSeed(body(speculation), seed), maxTokens, this.page.method, this.abort.signal, this.report);
    try {
      if ($("race-serial").checked) {
        const plain = await run(this.plain, false);
        this.#judge(plain, await run(this.drafts, true), "one after the other");
      } else {
        this.#judge(...(await Promise.all([run(this.plain, false), run(this.drafts, true)])), "both at once");
      }
    } catch (error) {
      this.abort.abort();
      if (error.name !== "AbortError") this.report(error.message, error.status);
    } finally {
      this.abort = null;
      $("race-start").textContent = "Start";
    }
  }

  #judge(plain, drafts, how) {
    const length = Math.max(plain.ids.length, drafts.ids.length);
    let place = 0;
    while (place < length && plain.ids[place] === drafts.ids[place]) place += 1;
    const isEqual = place === length;
    const side = (answer) => `${answer.passes.length} target steps in ${(answer.last / 1000).toFixed(2)} s`;
    const factor = plain.last / drafts.last;
    const verdict = factor >= 1 ? `${factor.toFixed(2)} times as fast` : `${(1 / factor).toFixed(2)} times as slow`;
    const figures = `${side(plain)} without drafts, ${side(drafts)} with them: ${verdict} (${how})`;
    const origins = originsOf(drafts.origins);
    const drafted = origins ? ` Accepted drafts: ${origins}.` : "";
    const result = $("race-result");
    result.className = `result ${isEqual ? "good" : "bad"}`;
    result.textContent = isEqual
      ? `Equal: all ${length} tokens. ${figures}.${drafted}`
      : `The first difference is at token ${place + 1}: ${tokenAt(plain, place)} without drafts, ${tokenAt(drafts, place)} with them. ${
          drafts.lossless ? "In half precision, rounding may swap two nearly equal logits." : "This server is configured to be lossy."
        }`;
    result.hidden = false;
  }
}

function tokenAt(answer, place) {
  const tokens = answer.passes.flatMap((pass) => pass.tokens);
  return place < tokens.length ? `“${tokens[place].text}”` : "the end";
}
