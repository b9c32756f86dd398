/** Calls of the HTTP API. All paths are relative to the page, so that a route prefix changes nothing. */

const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 5000;
/** Time for which a lost stream is tried again. */
const PATIENCE_MS = 120000;
/** Longest silence of a stream. The server sends a comment at least every ten seconds. */
const SILENCE_MS = 15000;
const TEMPORARY = [429, 502, 503, 504];
/** What a proxy answers while the application behind it is away. */
const AWAY = [404, 502, 503, 504];
export const NO_ANSWER = "The server does not answer.";

let key = "";

/** An answer of the server that is an error. */
export class ApiError extends Error {
  constructor(status, message, isAway = false) {
    super(message);
    this.status = status;
    /** Whether no Pilotfish answered at all. */
    this.isAway = isAway;
  }
}

/** Present this API key from now on. It is kept in memory only. */
export function setKey(value) {
  key = value.trim();
}

/** Whether a key was given. */
export function hasKey() {
  return key !== "";
}

/** Send a request and return the response. Throws ApiError unless the server agrees. */
export async function send(path, { method = "GET", text, headers = {}, signal } = {}) {
  const all = { ...headers };
  if (key) all.authorization = `Bearer ${key}`;
  if (text !== undefined) all["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method, body: text, headers: all, signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, NO_ANSWER, true);
  }
  if (response.ok) return response;
  const message = await errorText(response);
  if (message !== null) throw new ApiError(response.status, message);
  if (AWAY.includes(response.status)) throw new ApiError(response.status, NO_ANSWER, true);
  throw new ApiError(response.status, `${response.status} ${response.statusText}`);
}

/** Return the JSON of a route. */
export async function read(path) {
  return (await send(path)).json();
}

/**
 * Post a request and yield the data of each server-sent event. A stream that breaks off continues after its last event.
 * `onLost` is called once when it breaks off, with a function that tries again at once; `onBack` when it continues.
 */
export async function* stream(path, text, { signal, onLost = () => {}, onBack = () => {} } = {}) {
  let last = "";
  let lostAt = null;
  let pause = FIRST_PAUSE_MS;
  let wake = () => {};
  for (;;) {
    try {
      const headers = last ? { "last-event-id": last } : {};
      const response = await send(path, { method: "POST", text, headers, signal });
      for await (const event of events(response.body)) {
        if (lostAt !== null) onBack();
        lostAt = null;
        pause = FIRST_PAUSE_MS;
        if (event.id) last = event.id;
        if (event.data === "[DONE]") return;
        yield event.data;
      }
    } catch (error) {
      const isFinal = error instanceof ApiError && !error.isAway && !TEMPORARY.includes(error.status);
      if (!last || isFinal || signal?.aborted) throw error;
    }
    if (!last) throw new ApiError(0, NO_ANSWER, true);
    if (lostAt === null) {
      lostAt = performance.now();
      onLost(() => wake());
    }
    if (performance.now() - lostAt > PATIENCE_MS) throw new ApiError(0, NO_ANSWER, true);
    await new Promise((resolve) => {
      wake = resolve;
      signal?.addEventListener("abort", resolve, { once: true });
      setTimeout(resolve, pause);
    });
    signal?.throwIfAborted();
    pause = Math.min(2 * pause, LONGEST_PAUSE_MS);
  }
}

/** Write `value` as JSON, with the digits of a seed as they are: numbers of JavaScript hold 53 bits only. */
export function jsonWithSeed(value, seed, space) {
  const marker = "@seed@";
  const text = JSON.stringify(seed === "" ? value : { ...value, seed: marker }, null, space);
  return text.replace(`"${marker}"`, seed);
}

/** Return the digits of the first seed in a JSON text, or "". */
export function seedIn(text) {
  return /"seed"\s*:\s*(-?\d+)/.exec(text)?.[1] ?? "";
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { value, done } = await within(SILENCE_MS, reader.read());
      if (done) return;
      buffer += value;
      for (let end = buffer.indexOf("\n\n"); end >= 0; end = buffer.indexOf("\n\n")) {
        const event = parse(buffer.slice(0, end));
        buffer = buffer.slice(end + 2);
        if (event.data) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The outcome of a promise, or an error if it takes longer. */
async function within(milliseconds, promise) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new ApiError(0, NO_ANSWER, true)), milliseconds);
  });
  try {
    return await Promise.race([promise, late]);
  } finally {
    clearTimeout(timer);
  }
}

function parse(text) {
  const event = { id: "", data: "" };
  for (const line of text.split("\n")) {
    if (line.startsWith("id: ")) event.id = line.slice(4);
    else if (line.startsWith("data: ")) event.data += line.slice(6);
  }
  return event;
}

/** The message of an error of the API, or null if something else answered. */
async function errorText(response) {
  try {
    return JSON.parse(await response.text()).error.message;
  } catch {
    return null;
  }
}
