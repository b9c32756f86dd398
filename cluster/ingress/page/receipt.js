/** Receipts: whether the model writes exactly this text, and the same answer once more. */

import { seedIn, send } from "./api.js";

const $ = (id) => document.getElementById(id);

export class Receipts {
  /** `replay` gets the request, the digits of the seed and the text. */
  constructor(report, replay) {
    this.report = report;
    $("verify").addEventListener("click", () => this.#verify());
    $("replay").addEventListener("click", () => {
      const bundle = this.#bundle();
      if (bundle) replay(bundle.request, this.#seed(bundle), bundle.text);
    });
  }

  /** Show a bundle of request, receipt and text. */
  show(text) {
    $("bundle").value = text;
    $("verdict").hidden = true;
  }

  #bundle() {
    try {
      const bundle = JSON.parse($("bundle").value);
      if (bundle.request?.messages && bundle.receipt) return bundle;
      this.#say("The JSON needs request, with messages, and receipt.", "bad");
    } catch (error) {
      this.#say(`This is not JSON: ${error.message}`, "bad");
    }
    return null;
  }

  /** The digits as they were pasted: JavaScript would round a long seed. */
  #seed(bundle) {
    const text = $("bundle").value;
    return seedIn(text.slice(text.indexOf('"receipt"'))) || String(bundle.receipt.seed);
  }

  async #verify() {
    const bundle = this.#bundle();
    if (!bundle) return;
    this.#say("The model writes the answer again …", "");
    try {
      const text = JSON.stringify({
        request: bundle.request,
        receipt: { seed: "@seed@", fingerprint: bundle.receipt.fingerprint },
        text: bundle.text,
      }).replace('"@seed@"', this.#seed(bundle));
      const found = await (await send("v1/verify", { method: "POST", text })).json();
      if (found.equal) this.#say(`Equal: the model writes exactly these ${found.compared_tokens} tokens.`, "good");
      else {
        const { token, expected, found: sent } = found.first_difference;
        this.#say(`The first difference is at token ${token + 1}: the model writes “${expected}”, not “${sent}”.`, "bad");
      }
    } catch (error) {
      $("verdict").hidden = true;
      this.report(error.message, error.status);
    }
  }

  #say(text, kind) {
    $("verdict").className = `result ${kind}`;
    $("verdict").textContent = text;
    $("verdict").hidden = false;
  }
}
