// Runs the script of a page on a document that is only as real as it needs: prints what was drawn.
//
//   node draw_page.js SCRIPT LOOK.json
"use strict";

const fs = require("fs");

class Node {
  constructor(tag) {
    Object.assign(this, { tag, children: [], attributes: {}, style: {}, hidden: false, text: null });
    this.classList = { toggle: (name, on) => { this.attributes[name] = on; }, add: () => {} };
  }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  append(...children) { this.children.push(...children); }
  replaceChildren(...children) { this.children = children; this.text = null; }
  addEventListener(name, action) { this[name] = action; }
  getBoundingClientRect() { return { left: 0, width: 340 }; }
  closest() { return this.section ??= new Node("section"); }
  get textContent() {
    return this.text ?? this.children.map((c) => (c instanceof Node ? c.textContent : String(c))).join(" ");
  }
  set textContent(text) { this.text = String(text); this.children = []; }
}

const [, , script, look] = process.argv;
const nodes = {};
const recorded = new Node("script");
recorded.text = fs.readFileSync(look, "utf8");
global.Node = Node;
global.document = {
  body: new Node("body"),
  createElement: (tag) => new Node(tag),
  createElementNS: (_, tag) => new Node(tag),
  getElementById: (id) => (id === "recorded" ? recorded : (nodes[id] ??= new Node(id))),
};
eval(fs.readFileSync(script, "utf8"));
const shapes = (node) => [node.tag, ...node.children.filter((c) => c instanceof Node).flatMap(shapes)];
console.log(JSON.stringify(Object.fromEntries(Object.entries(nodes).map(([id, node]) =>
  [id, { text: node.textContent, hidden: node.section?.hidden ?? false, shapes: shapes(node) }]))));
