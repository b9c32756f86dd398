/** Draws the tree of one pass: the accepted path on top, then the target's own token, rejected branches in grey. */

const SVG = "http://www.w3.org/2000/svg";
const LETTER = 7.3;
const ROW = 34;
const NODE = 24;
const GAP = 20;
const PADDING = 12;
const SMALLEST = 0.7;
const LONGEST = 14;

/** Make an SVG element with attributes. */
export function svg(name, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** A token as it can be seen: spaces and line ends have signs. */
export function visible(text) {
  const shown = text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣");
  if (shown === "") return "∅";
  return shown.length > LONGEST ? `${shown.slice(0, LONGEST - 1)}…` : shown;
}

/** One sentence about a pass. */
export function summary(pass, method) {
  const own = pass.tokens.filter((token) => !token.drafted).map((token) => `“${visible(token.text)}”`);
  const wrote = own.length ? `; the target wrote ${own.join(", ")}` : "";
  if (!pass.texts.length) return `Step ${pass.number}: nothing was drafted${wrote}.`;
  const by = method ? ` by ${method}` : "";
  return `Step ${pass.number}: ${pass.texts.length} tokens drafted${by}, ${pass.accepted.length} accepted${wrote}.`;
}

/** Draw a pass into `place`. */
export function drawTree(place, pass, method) {
  const nodes = layout(graph(pass));
  const width = Math.max(...nodes.map((node) => node.x + node.width)) + 2;
  const height = (Math.max(...nodes.map((node) => node.row)) + 1) * ROW;
  const scale = Math.min(1, Math.max(SMALLEST, place.clientWidth / width));
  const size = { width: width * scale, height: height * scale };
  const picture = svg("svg", { ...size, viewBox: `0 0 ${width} ${height}`, role: "img" });
  picture.setAttribute("aria-label", summary(pass, method));
  for (const node of nodes) if (node.parent) picture.append(edge(node));
  for (const node of nodes) picture.append(box(node));
  place.replaceChildren(picture);
}

function graph(pass) {
  const accepted = new Set(pass.accepted);
  const root = { text: pass.root, kind: "root", children: [] };
  const nodes = pass.texts.map((text, index) => ({
    text,
    kind: accepted.has(index) ? "draft" : "rejected",
    children: [],
  }));
  pass.parents.forEach((parent, index) => {
    const above = parent < 0 ? root : nodes[parent];
    nodes[index].parent = above;
    if (accepted.has(index)) above.children.unshift(nodes[index]);
    else above.children.push(nodes[index]);
  });
  let end = pass.accepted.length ? nodes[pass.accepted.at(-1)] : root;
  for (const token of pass.tokens.slice(pass.accepted.length)) {
    const own = { text: token.text, kind: token.drafted ? "draft" : "target", parent: end, children: [] };
    end.children.unshift(own);
    end = own;
  }
  return root;
}

/** Give every node a column and a row. The first child continues the row of its parent. */
function layout(root) {
  const nodes = [];
  const widths = [];
  let rows = 0;
  const place = (node, depth, row) => {
    node.depth = depth;
    node.row = row;
    node.width = Math.max(NODE, visible(node.text).length * LETTER + PADDING);
    widths[depth] = Math.max(widths[depth] ?? 0, node.width);
    nodes.push(node);
    node.children.forEach((child, index) => {
      if (index) rows += 1;
      place(child, depth + 1, index ? rows : row);
    });
  };
  place(root, 0, 0);
  const columns = [1];
  for (const width of widths) columns.push(columns.at(-1) + width + GAP);
  for (const node of nodes) node.x = columns[node.depth];
  return nodes;
}

function middle(node) {
  return node.row * ROW + ROW / 2;
}

function edge(node) {
  const [x1, y1] = [node.parent.x + node.parent.width, middle(node.parent)];
  const [x2, y2] = [node.x, middle(node)];
  const half = x1 + (x2 - x1) / 2;
  return svg("path", { class: `edge ${node.kind}`, d: `M${x1} ${y1}C${half} ${y1} ${half} ${y2} ${x2} ${y2}` });
}

function box(node) {
  const y = middle(node) - NODE / 2;
  const label = svg("text", { x: node.x + node.width / 2, y: middle(node) + 4, "text-anchor": "middle" });
  label.textContent = visible(node.text);
  const title = svg("title");
  title.textContent = { root: "before the step", draft: "drafted and accepted", target: "the target’s own", rejected: "drafted and rejected" }[node.kind];
  const shape = svg("rect", { x: node.x, y, width: node.width, height: NODE, rx: 6 });
  return svg("g", { class: `node ${node.kind}` }, title, shape, label);
}
