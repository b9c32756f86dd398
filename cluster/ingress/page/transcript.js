/** Writes the tokens of an answer, each marked by who wrote it first. */

/** Append the tokens of a pass to an element. Text is only ever inserted as text. */
export function writePass(place, pass, method) {
  const parts = document.createDocumentFragment();
  for (const token of pass.tokens) {
    if (!token.text) continue;
    const span = document.createElement("span");
    span.className = token.drafted ? "token draft" : "token target";
    span.dataset.pass = pass.number;
    span.title = titleOf({ ...token, pass: pass.number }, method);
    span.textContent = token.text;
    parts.append(span);
  }
  place.append(parts);
}

const ORIGINS = {
  request: "the request itself",
  earlier: "earlier answers",
  trained: "trained drafts",
  forced: "the grammar",
};

/** Where accepted drafts come from, in words; empty if nothing was accepted. */
export function originsOf(counts) {
  const parts = Object.entries(ORIGINS).filter(([name]) => counts[name]);
  return parts.map(([name, phrase]) => `${counts[name]} from ${phrase}`).join(", ");
}

/** What is shown over a token: its pass, and who wrote it first. */
export function titleOf(token, method) {
  if (!token.drafted) return `step ${token.pass}: the target’s own`;
  const from = ORIGINS[token.origin] ? `, from ${ORIGINS[token.origin]}` : "";
  return `step ${token.pass}: drafted${method ? ` by ${method}` : ""}${from}`;
}

/** Mark the tokens of one pass. */
export function markPass(place, number) {
  for (const old of place.querySelectorAll(".token.chosen")) old.classList.remove("chosen");
  for (const token of place.querySelectorAll(`.token[data-pass="${number}"]`)) token.classList.add("chosen");
}

/** Make an element with a class and a text. */
export function element(name, className = "", text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}
