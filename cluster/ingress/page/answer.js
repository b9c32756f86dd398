/** One answer while it is received: its passes, tokens and figures. */

import { ApiError, seedIn, stream } from "./api.js";

export const CHAT_PATH = "v1/chat/completions";

/** What the target decided in one pass, and the tree that it verified. */
export class Pass {
  constructor(number, root, draft, tokens, at) {
    this.number = number;
    /** The text of the token before the pass. */
    this.root = root;
    this.texts = draft.texts;
    this.parents = draft.parents;
    /** Where each drafted token comes from: request, earlier, trained or forced. */
    this.origins = draft.origins ?? [];
    /** The accepted nodes, from the root on. */
    this.accepted = draft.accepted;
    /** The committed tokens: text, and whether a drafter wrote it first. */
    this.tokens = tokens;
    /** Time since the request, in milliseconds. */
    this.at = at;
  }

  get rejected() {
    return this.texts.length - this.accepted.length;
  }
}

export class Answer {
  constructor() {
    this.passes = [];
    this.text = "";
    this.ids = [];
    this.drafted = 0;
    this.accepted = 0;
    /** Number of accepted drafts by origin. */
    this.origins = {};
    this.receipt = null;
    this.seed = "";
    this.lossless = true;
    this.finish = null;
    this.begun = performance.now();
    this.first = null;
    this.last = null;
  }

  get tokensPerPass() {
    return this.passes.length ? this.ids.length / this.passes.length : 0;
  }

  /** The share of drafted tokens that were accepted; null if none were drafted. */
  get acceptance() {
    return this.drafted ? this.accepted / this.drafted : null;
  }

  /** The rate from the request to the last token. Tokens that arrive together would make any other absurd. */
  get tokensPerSecond() {
    return this.last ? (1000 * this.ids.length) / this.last : 0;
  }

  /** Add the data of one event. Returns the new passes. */
  add(data) {
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(0, chunk.error.message);
    this.seed ||= seedIn(data);
    this.lossless = chunk.lossless ?? this.lossless;
    const choice = chunk.choices[0];
    if (!choice) return [];
    if (choice.receipt) {
      this.receipt = choice.receipt;
      this.origins = choice.receipt.accepted_by_origin ?? this.origins; // also what came before a stream was resumed
      this.finish = choice.finish_reason;
    }
    this.text += choice.delta?.content ?? "";
    return choice.drafts ? this.#addPasses(choice) : [];
  }

  #addPasses(choice) {
    const now = performance.now() - this.begun;
    this.first ??= now;
    this.last = now;
    const ids = choice.token_ids ?? [];
    const added = [];
    let from = 0;
    for (const draft of choice.drafts) {
      const count = draft.committed_tokens;
      const accepted = choice.drafts.length === 1 ? choice.accepted_draft_tokens : draft.accepted.length;
      const texts = choice.token_texts.slice(from, from + count);
      const origins = draft.accepted.map((node) => draft.origins?.[node]);
      const tokens = texts.map((text, place) => ({ text, drafted: place < accepted, origin: origins[place] }));
      for (const origin of origins.slice(0, accepted)) if (origin) this.origins[origin] = (this.origins[origin] ?? 0) + 1;
      const root = this.passes.at(-1)?.tokens.at(-1)?.text ?? "…";
      this.passes.push(new Pass(this.passes.length + 1, root, draft, tokens, now));
      added.push(this.passes.at(-1));
      this.drafted += draft.texts.length;
      this.accepted += accepted;
      from += count;
    }
    this.ids.push(...ids);
    return added;
  }
}

/** Ask for an answer. `onPasses` gets each new pass; `onLost` and `onBack` are those of `stream`. */
export async function ask(text, { signal, onPasses = () => {}, onLost, onBack } = {}) {
  const answer = new Answer();
  for await (const data of stream(CHAT_PATH, text, { signal, onLost, onBack })) {
    onPasses(answer.add(data), answer);
  }
  return answer;
}

/** The body of a chat request whose answer shows how it was made. */
export function chatBody(messages, { model, temperature, maxTokens, speculation, salt }) {
  return {
    ...(model ? { model } : {}),
    messages,
    temperature,
    max_tokens: maxTokens,
    stream: true,
    return_token_ids: true,
    return_drafts: true,
    ...(speculation ? {} : { speculation: { enabled: false } }),
    ...(salt ? { cache_salt: salt } : {}),
  };
}
