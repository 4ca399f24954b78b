"use strict";
const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);

// Appends a node to `parent`: of SVG inside of a drawing, else of HTML.
function el(parent, name, attributes = {}, text) {
  const svg = parent.namespaceURI.endsWith("svg") || name === "svg";
  const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}
