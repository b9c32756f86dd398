/** The race: one request with one seed, without drafts and with them. The tokens must be equal. */

import { jsonWithSeed } from "./api.js";
import { ask, chatBody } from "./answer.js";
import { makeMeters } from "./meters.js";
import { element, writePass } from "./transcript.js";

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

  async run(text, maxTokens, method, signal) {
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
      if (this.abort) this.abort.abort();
      else this.#start();
    });
  }

  async #start() {
    this.abort = new AbortController();
    $("race-start").textContent = "Stop";
    $("race-result").hidden = true;
    this.report("");
    const maxTokens = Number($("race-tokens").value || 128);
    const seed = $("race-seed").value.trim() || "7";
    const body = (speculation) =>
      chatBody([{ role: "user", content: $("race-prompt").value }], {
        model: this.page.model,
        temperature: Number($("race-temperature").value || 0),
        maxTokens,
        speculation,
      });
    const run = (lane, speculation) =>
      lane.run(jsonWithSeed(body(speculation), seed), maxTokens, this.page.method, this.abort.signal);
    try {
      if ($("race-serial").checked) {
        const plain = await run(this.plain, false);
        this.#judge(plain, await run(this.drafts, true));
      } else {
        this.#judge(...(await Promise.all([run(this.plain, false), run(this.drafts, true)])));
      }
    } catch (error) {
      this.abort.abort();
      if (error.name !== "AbortError") this.report(error.message, error.status);
    } finally {
      this.abort = null;
      $("race-start").textContent = "Start";
    }
  }

  #judge(plain, drafts) {
    const length = Math.max(plain.ids.length, drafts.ids.length);
    let place = 0;
    while (place < length && plain.ids[place] === drafts.ids[place]) place += 1;
    const isEqual = place === length;
    const passes = `${plain.passes.length} passes without drafts, ${drafts.passes.length} with them`;
    const result = $("race-result");
    result.className = `result ${isEqual ? "good" : "bad"}`;
    result.textContent = isEqual
      ? `Equal: all ${length} tokens. ${passes}.`
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
