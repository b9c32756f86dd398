/** The chat: a conversation whose last answer is shown with its passes, figures and code. */

import { jsonWithSeed, send } from "./api.js";
import { ask, chatBody } from "./answer.js";
import { Markdown } from "./markdown.js";
import { drawStrip, makeMeters, percent } from "./meters.js";
import { snippet } from "./snippets.js";
import { makeTabs } from "./tabs.js";
import { element, markPass, originsOf, titleOf } from "./transcript.js";
import { drawTree, summary } from "./tree.js";

const $ = (id) => document.getElementById(id);
const EXAMPLES = [
  "Proofread: the pilot fish swim ahead of the shark. it eat the leftovers of the sharks meals.",
  "Name three rivers in Europe and the seas into which they flow.",
  "Write a Python function that returns the first n prime numbers.",
];

export class Chat {
  /** `page` has the model, the drafting method and the settings; `report` shows an error. */
  constructor(page, report) {
    this.page = page;
    this.report = report;
    this.messages = [];
    this.answer = null;
    this.place = null;
    this.shown = null;
    this.chosen = null;
    this.follows = true;
    this.language = "curl";
    this.abort = null;
    this.frame = 0;
    this.last = { body: chatBody([{ role: "user", content: EXAMPLES[1] }], this.#parameters()), seed: "" };
    this.showFigures = makeMeters($("meters"));
    this.onReceipt = () => {};
    makeTabs($("languages"), (id) => this.#showCode(id.replace("tab-", "")));
    this.#listen();
    this.#offerExamples();
    this.#showCode(this.language);
  }

  /** The page has learnt the model and the settings. */
  refresh() {
    if (!this.messages.length) this.last.body = { model: this.page.model, ...this.last.body };
    $("kill").hidden = !this.page.settings.can_kill_drafter;
    $("legend-draft").textContent = `drafted${this.page.method ? ` by ${this.page.method}` : ""}, accepted`;
    this.#showCode(this.language);
  }

  /** Ask the request of a receipt again and compare the answer with `text`. */
  async replay(body, seed, text) {
    this.#clear();
    this.messages = body.messages.slice(0, -1);
    for (const message of body.messages) this.#addMessage(message.role, message.content);
    const shown = { ...body, stream: true, return_token_ids: true, return_drafts: true };
    const answer = await this.#generate(shown, seed, body.messages);
    if (!answer || text === undefined) return;
    const isEqual = answer.text === text;
    this.#note(isEqual ? "Equal to the text of the receipt." : "Not the text of the receipt.", isEqual);
  }

  /** End the answer that is being received. */
  stop() {
    this.abort?.abort();
  }

  #listen() {
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.#send();
      }
    });
    $("stop").addEventListener("click", () => this.stop());
    $("new-chat").addEventListener("click", () => {
      this.#clear();
      $("prompt").focus();
    });
    $("kill").addEventListener("click", () => this.#kill());
    $("copy-code").addEventListener("click", () => this.#copy($("copy-code"), $("code").textContent));
    $("pass").addEventListener("input", () => this.#choose(Number($("pass").value)));
    for (const place of [$("messages"), $("strip")]) {
      place.addEventListener("click", (event) => {
        const number = event.target.closest("[data-pass]")?.dataset.pass;
        const isShown = place === $("strip") || event.target.closest(".text") === this.place;
        if (number && isShown) this.#choose(Number(number));
      });
    }
  }

  #offerExamples() {
    for (const example of EXAMPLES) {
      const button = element("button", "example", example);
      button.type = "button";
      button.addEventListener("click", () => {
        $("prompt").value = example;
        this.#send();
      });
      $("examples").append(button);
    }
  }

  #parameters() {
    return {
      model: this.page.model,
      temperature: Number($("temperature").value || 0),
      maxTokens: Number($("max-tokens").value || 160),
      speculation: $("speculation").checked,
    };
  }

  async #send() {
    const text = $("prompt").value.trim();
    if (this.abort) {
      this.stop(); // the text stays; Enter sends it once the answer has ended
      return;
    }
    if (!text || !$("composer").reportValidity()) return;
    $("prompt").value = "";
    const messages = [...this.messages, { role: "user", content: text }];
    this.#addMessage("user", text);
    await this.#generate(chatBody(messages, this.#parameters()), $("seed").value.trim(), messages);
  }

  async #generate(body, seed, messages) {
    this.abort = new AbortController();
    this.last = { body, seed };
    this.#showCode(this.language);
    this.#setBusy(true);
    const place = (this.place = this.#addMessage("assistant", ""));
    const shown = (this.shown = new Markdown(place, (token) => titleOf(token, this.page.method)));
    place.classList.add("streaming", "markdown");
    this.follows = true;
    this.report("");
    try {
      const answer = await ask(jsonWithSeed(body, seed), {
        signal: this.abort.signal,
        onPasses: (passes, current) => this.#show(passes, current),
        onLost: (retry) =>
          this.report("The server does not answer. The answer goes on when it is back.", 0, {
            "Try now": retry,
            "Stop the answer": () => this.stop(),
          }),
        onBack: () => this.report(""),
      });
      this.messages = [...messages, { role: "assistant", content: answer.text }];
      this.#draw();
      this.#end(body, answer);
      return answer;
    } catch (error) {
      this.#draw();
      if (error.name === "AbortError") {
        this.report("");
        shown.mark("stopped");
      } else {
        this.report(error.message, error.status, error.isAway ? { "Ask again": () => this.#again(place, body, seed, messages) } : {});
      }
      if (this.answer) this.messages = [...messages, { role: "assistant", content: this.answer.text }];
      return null;
    } finally {
      place.classList.remove("streaming");
      this.abort = null;
      this.#setBusy(false);
    }
  }

  /** Ask the same once more, in the place of an answer that was lost. */
  #again(place, body, seed, messages) {
    if (this.abort) return;
    place.parentElement.remove();
    this.#generate(body, seed, messages);
  }

  /** Note new passes. They are drawn once a frame, so that keys are read however fast tokens come. */
  #show(passes, answer) {
    this.answer = answer;
    for (const pass of passes) this.shown.add(pass);
    if (passes.length && !this.frame) this.frame = requestAnimationFrame(() => this.#draw());
  }

  /** Draw what has come since the last frame. */
  #draw() {
    if (!this.frame) return;
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    const answer = this.answer;
    if (!answer) return;
    this.shown.show();
    const log = $("messages");
    log.scrollTop = log.scrollHeight;
    this.showFigures(answer);
    this.#showOrigins(answer);
    $("pass").max = answer.passes.length;
    $("pass").disabled = false;
    if (this.follows) this.#drawPass(answer.passes.at(-1));
    else {
      drawStrip($("strip"), answer, this.chosen);
      markPass(this.place, this.chosen.number);
    }
  }

  #showOrigins(answer) {
    const origins = originsOf(answer.origins);
    $("origins").textContent = origins ? `Accepted drafts: ${origins}.` : "No draft is accepted yet.";
  }

  #choose(number) {
    const pass = this.answer?.passes[number - 1];
    if (!pass) return;
    this.follows = number === this.answer.passes.length && this.abort !== null;
    this.#drawPass(pass);
    markPass(this.place, number);
  }

  #drawPass(pass) {
    this.chosen = pass;
    $("pass").value = pass.number;
    $("pass-number").textContent = `${pass.number} of ${this.answer.passes.length}`;
    drawTree($("tree"), pass, this.page.method);
    $("tree-summary").textContent = summary(pass, this.page.method);
    drawStrip($("strip"), this.answer, pass);
  }

  #end(body, answer) {
    const foot = element("div", "foot");
    const lossless = answer.lossless ? "lossless" : "NOT lossless";
    const origins = originsOf(answer.origins);
    this.#showOrigins(answer);
    const parts = [
      `${answer.ids.length} tokens in ${answer.passes.length} target steps`,
      answer.acceptance === null ? "no drafts" : `${percent(answer.acceptance)} of drafts accepted${origins ? ` (${origins})` : ""}`,
      `${answer.tokensPerSecond.toFixed(1)} tokens/s`,
      `seed ${answer.seed}`,
      lossless,
    ];
    foot.append(element("span", "muted small", parts.join(" · ")));
    const request = { ...body, stream: undefined, return_token_ids: undefined, return_drafts: undefined };
    const bundle = jsonWithSeed({ request, receipt: answer.receipt, text: answer.text }, "", 2);
    const receipt = element("button", "small", "Receipt");
    receipt.type = "button";
    receipt.addEventListener("click", () => this.onReceipt(bundle.replace(/("seed": )-?\d+/, `$1${answer.seed}`)));
    const copy = element("button", "small", "Copy");
    copy.type = "button";
    copy.addEventListener("click", () => this.#copy(copy, answer.text));
    foot.append(receipt, copy);
    this.place.parentElement.append(foot);
    $("messages").scrollTop = $("messages").scrollHeight;
  }

  async #kill() {
    try {
      await send("demo/kill-drafter", { method: "POST", text: "{}" });
      this.#mark("the drafter was killed here");
    } catch (error) {
      this.report(error.message, error.status);
    }
  }

  #mark(text) {
    this.shown?.mark(text);
  }

  #note(text, isGood) {
    const note = element("p", `result ${isGood ? "good" : "bad"}`, text);
    note.setAttribute("role", "status");
    this.place.parentElement.append(note);
  }

  #addMessage(role, text) {
    $("empty").hidden = true;
    const message = element("article", `message ${role}`);
    message.append(element("h3", "who", role === "assistant" ? "Model" : role === "user" ? "You" : role));
    const place = element("div", "text", text);
    message.append(place);
    $("messages").append(message);
    $("messages").scrollTop = $("messages").scrollHeight;
    return place;
  }

  #clear() {
    this.abort?.abort();
    this.messages = [];
    this.answer = null;
    this.report("");
    for (const message of $("messages").querySelectorAll(".message")) message.remove();
    $("empty").hidden = false;
  }

  #setBusy(isBusy) {
    $("stop").hidden = !isBusy;
    $("send").hidden = isBusy;
    $("prompt").required = !isBusy;
    $("messages").setAttribute("aria-busy", String(isBusy));
  }

  #showCode(language) {
    this.language = language;
    $("code").setAttribute("aria-labelledby", `tab-${language}`);
    $("code").textContent = snippet(language, this.last.body, this.last.seed, this.page.settings.grpc_port);
  }

  async #copy(button, text) {
    await navigator.clipboard.writeText(text);
    const before = button.textContent;
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = before), 1200);
  }
}
