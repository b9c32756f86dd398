/**
 * Shows an answer as Markdown whose characters keep the colour of who wrote them first. The text becomes elements and
 * text nodes, never HTML, so an answer can contain nothing that the page would run or load.
 */

import { lexer } from "./marked.js";
import { element } from "./transcript.js";

const LINK = /^(https?:|mailto:)/i;
const OPTIONS = { gfm: true, breaks: true };
const INLINE = { strong: "strong", em: "em", del: "del" };

export class Markdown {
  /** `title` returns what is shown over a token. */
  constructor(place, title) {
    this.place = place;
    this.title = title;
    this.tokens = [];
    this.ends = [];
    this.source = "";
    this.marks = [];
    this.blocks = [];
  }

  /** Add the tokens of a pass. `show` shows them. */
  add(pass) {
    for (const token of pass.tokens) {
      this.source += token.text;
      this.tokens.push({ ...token, pass: pass.number });
      this.ends.push(this.source.length);
    }
  }

  /** Put a label behind the text so far. */
  mark(text) {
    this.marks.push({ at: this.source.length, text });
    this.show();
  }

  /** Bring the elements up to date. Blocks of the text that have not changed stay as they are. */
  show() {
    const blocks = lexer(this.source, OPTIONS);
    let start = 0;
    let kept = 0;
    let marked = 0;
    while (kept < this.blocks.length - 1 && kept < blocks.length - 1 && this.blocks[kept].raw === blocks[kept].raw) {
      start += blocks[kept].raw.length;
      marked += this.blocks[kept].marks;
      kept += 1;
    }
    for (const block of this.blocks.splice(kept)) block.node?.remove();
    for (const tail of this.place.querySelectorAll(":scope > .mark")) tail.remove();
    this.pending = this.marks.slice(marked); // those that no kept block shows
    for (const block of blocks.slice(kept)) {
      this.at = start;
      start += block.raw.length;
      const before = this.pending.length;
      const node = this.#block(block);
      if (node) this.place.append(node);
      this.blocks.push({ raw: block.raw, node, marks: before - this.pending.length });
    }
    for (const mark of this.pending) this.place.append(element("span", "mark", mark.text));
    this.place.dataset.source = this.source;
  }

  #block(block) {
    switch (block.type) {
      case "space":
      case "def":
        return null;
      case "hr":
        return element("hr");
      case "heading":
        return this.#inside(element(`h${Math.min(6, block.depth + 2)}`), block);
      case "blockquote":
        return this.#blocks(element("blockquote"), block.tokens);
      case "list":
        return this.#list(block);
      case "table":
        return this.#table(block);
      case "code": {
        const pre = element("pre", "code");
        const code = element("code");
        this.#leaf(code, block.text);
        pre.append(code);
        return pre;
      }
      case "html":
        return this.#inside(element("p"), { text: block.raw });
      default:
        return this.#inside(element("p"), block);
    }
  }

  #blocks(parent, blocks) {
    for (const block of blocks) {
      const node = block.type === "text" ? this.#inside(element("span"), block) : this.#block(block);
      if (node) parent.append(node);
    }
    return parent;
  }

  #list(block) {
    const list = element(block.ordered ? "ol" : "ul");
    if (block.ordered && block.start !== 1) list.start = block.start;
    for (const item of block.items) {
      const node = element("li");
      if (item.task) node.append(item.checked ? "☑ " : "☐ ");
      list.append(this.#blocks(node, item.tokens));
    }
    return list;
  }

  #table(block) {
    const table = element("table");
    const row = (cells, name) => {
      const line = element("tr");
      for (const cell of cells) line.append(this.#inside(element(name), cell));
      return line;
    };
    table.append(row(block.header, "th"), ...block.rows.map((cells) => row(cells, "td")));
    const scroll = element("div", "scroll");
    scroll.append(table);
    return scroll;
  }

  /** Write the inline parts of a block, or its text. */
  #inside(parent, block) {
    if (!block.tokens?.length) this.#leaf(parent, block.text ?? block.raw);
    for (const token of block.tokens ?? []) this.#inline(parent, token);
    return parent;
  }

  #inline(parent, token) {
    if (token.type in INLINE) parent.append(this.#inside(element(INLINE[token.type]), token));
    else if (token.type === "br") parent.append(element("br"));
    else if (token.type === "codespan") parent.append(this.#inside(element("code"), { text: token.text }));
    else if (token.type === "link" || token.type === "image") parent.append(this.#inside(link(token.href), token));
    else if (token.type === "html") this.#leaf(parent, token.raw);
    else this.#inside(parent, token);
  }

  /** Write text, in spans by the tokens that it came from. The characters of the text are those of the source, in order. */
  #leaf(parent, text) {
    let span = null;
    let owner = -1;
    for (const character of text) {
      const found = this.source.indexOf(character, this.at);
      if (found >= 0) this.at = found;
      while (this.pending.length && this.pending[0].at <= this.at) {
        parent.append(element("span", "mark", this.pending.shift().text));
        span = null;
      }
      const now = this.#owner(this.at);
      if (span === null || now !== owner) {
        owner = now;
        parent.append((span = this.#span(this.tokens[now])));
      }
      span.append(character);
      if (found >= 0) this.at += character.length;
    }
  }

  #span(token) {
    const span = element("span", token.drafted ? "token draft" : "token target");
    span.dataset.pass = token.pass;
    span.title = this.title(token);
    return span;
  }

  /** The number of the token at a position of the source. */
  #owner(position) {
    let low = 0;
    let high = this.ends.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.ends[middle] > position) high = middle;
      else low = middle + 1;
    }
    return low;
  }
}

/** A link that leads only where a browser opens a page or a message. */
function link(href) {
  const made = element("a");
  if (LINK.test(href)) {
    made.href = href;
    made.target = "_blank";
    made.rel = "noopener noreferrer nofollow";
  }
  return made;
}
