/** Calls of the HTTP API. All paths are relative to the page, so that a route prefix changes nothing. */

const RETRY_MS = 500;
const MOST_RETRIES = 60;
const TEMPORARY = [429, 502, 503, 504];

let key = "";

/** An answer of the server that is an error. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
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
  const response = await fetch(path, { method, body: text, headers: all, signal, cache: "no-store" });
  if (!response.ok) throw new ApiError(response.status, await errorText(response));
  return response;
}

/** Return the JSON of a route. */
export async function read(path) {
  return (await send(path)).json();
}

/**
 * Post a request and yield the data of each server-sent event. A stream that breaks off continues after its last event.
 * `onPause` is called before each attempt to continue.
 */
export async function* stream(path, text, { signal, onPause = () => {} } = {}) {
  let last = "";
  let attempts = 0;
  for (;;) {
    try {
      const headers = last ? { "last-event-id": last } : {};
      const response = await send(path, { method: "POST", text, headers, signal });
      for await (const event of events(response.body)) {
        attempts = 0;
        if (event.id) last = event.id;
        if (event.data === "[DONE]") return;
        yield event.data;
      }
    } catch (error) {
      const isFinal = error instanceof ApiError && !TEMPORARY.includes(error.status);
      if (!last || isFinal || signal?.aborted) throw error;
    }
    if (!last) throw new ApiError(0, "the stream ended before it began");
    attempts += 1;
    if (attempts > MOST_RETRIES) throw new ApiError(0, "the server does not come back");
    onPause(attempts);
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
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
      const { value, done } = await reader.read();
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

function parse(text) {
  const event = { id: "", data: "" };
  for (const line of text.split("\n")) {
    if (line.startsWith("id: ")) event.id = line.slice(4);
    else if (line.startsWith("data: ")) event.data += line.slice(6);
  }
  return event;
}

async function errorText(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `${response.status} ${response.statusText}`;
  }
}
