// Search, the switch between light and dark, and the outline. Everything runs in the page: the index of the search is
// one more script, so that it loads from a disk as well as from a server.
"use strict";

const html = document.documentElement;

// Lists of pages and headings: folded where they stand above the text, which they would push away.
for (const [list, width] of [[".pages", "52rem"], [".outline", "72rem"]]) {
  const narrow = matchMedia(`(max-width: ${width})`), details = document.querySelector(list);
  const fold = () => { if (details) details.open = !narrow.matches; };
  fold();
  narrow.addEventListener("change", fold);
}

// Theme: as the system has it, until a click chooses.
const THEMES = {auto: "◐ auto", light: "☀ light", dark: "☾ dark"};
const switcher = document.getElementById("ui-theme");

function setTheme(theme) {
  html.dataset.theme = theme;
  switcher.textContent = THEMES[theme];
  switcher.setAttribute("aria-label", `Colours: ${theme}. Click for the next.`);
  try { localStorage.setItem("theme", theme); } catch { /* a browser that keeps nothing */ }
}
switcher.addEventListener("click", () => {
  const names = Object.keys(THEMES);
  setTheme(names[(names.indexOf(html.dataset.theme) + 1) % names.length]);
});
setTheme(html.dataset.theme in THEMES ? html.dataset.theme : "auto");

// Outline: the heading that was passed last.
const outline = new Map();
for (const link of document.querySelectorAll(".outline nav a")) {
  const heading = document.getElementById(decodeURIComponent(link.hash.slice(1)));
  if (heading) outline.set(heading, link);
}
function markCurrent() {
  let current = null;
  for (const [heading, link] of outline) {
    link.classList.remove("current");
    if (heading.getBoundingClientRect().top < 120) current = link;
  }
  current?.classList.add("current");
}
addEventListener("scroll", () => requestAnimationFrame(markCurrent), {passive: true});
markCurrent();

// Search.
const MOST = 12, AROUND = 70;
const input = document.querySelector(".search input");
const results = document.getElementById("ui-results");
let sections = null, selected = -1;

// Called by the index.
function searchIndex(entries) {
  sections = entries.map(([address, page, anchor, heading, text]) =>
    ({address, page, anchor, heading, text, low: text.toLowerCase(), lowHeading: heading.toLowerCase()}));
  search();
}
function loadIndex() {
  if (document.getElementById("ui-index")) return;
  const script = document.createElement("script");
  script.id = "ui-index";
  script.src = `${html.dataset.root}/assets/search-index.js`;
  document.head.append(script);
}

// Every word has to occur. Headings count more than text, whole words more than parts of words.
function score(section, words) {
  let total = 0;
  for (const word of words) {
    const whole = new RegExp(`(^|[^\\w])${word.replace(/[^\w\s]/g, "\\$&")}($|[^\\w])`);
    const inHeading = section.lowHeading.includes(word), inText = section.low.includes(word);
    if (!inHeading && !inText) return 0;
    total += (inHeading ? 20 : 0) + (whole.test(section.lowHeading) ? 20 : 0) + (inText ? 1 : 0);
    total += Math.min(5, section.low.split(word).length - 1) + (whole.test(section.low) ? 4 : 0);
  }
  return total;
}

function marked(text, words) {
  const pattern = words.map((word) => word.replace(/[^\w\s]/g, "\\$&")).join("|");
  return text.split(new RegExp(`(${pattern})`, "i")).map((part, index) => {
    const node = document.createElement(index % 2 ? "mark" : "span");
    node.textContent = part;
    return node;
  });
}

function excerpt(section, words) {
  const at = Math.max(0, ...words.map((word) => section.low.indexOf(word)));
  const from = at <= AROUND ? 0 : section.text.indexOf(" ", at - AROUND) + 1;
  const text = section.text.slice(from, from + 3 * AROUND);
  return (from ? "… " : "") + text + (from + 3 * AROUND < section.text.length ? " …" : "");
}

function entry(section, words, index) {
  const link = document.createElement("a"), where = document.createElement("b");
  const small = document.createElement("small");
  link.href = `${html.dataset.root}/${section.address}${section.anchor ? "#" + section.anchor : ""}`;
  link.role = "option";
  link.id = `ui-result${index}`;
  where.append(...marked(section.heading, words));
  small.append(...marked(excerpt(section, words), words));
  link.append(where, section.page === section.heading ? "" : ` · ${section.page}`, small);
  link.addEventListener("click", () => show(false));
  return link;
}

function show(visible) {
  results.hidden = !visible;
  input.setAttribute("aria-expanded", visible);
}

function search() {
  const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
  selected = -1;
  input.removeAttribute("aria-activedescendant");
  show(words.length > 0);
  if (!words.length || !sections) return;
  const found = sections.map((section) => [score(section, words), section]).filter(([points]) => points);
  found.sort(([a], [b]) => b - a);
  results.replaceChildren(...found.slice(0, MOST).map(([, section], index) => entry(section, words, index)));
  if (found.length) return select(0);
  const nothing = document.createElement("p");
  nothing.textContent = "Nothing found.";
  results.append(nothing);
}

function select(index) {
  const links = [...results.querySelectorAll("a")];
  if (!links.length) return;
  selected = (index + links.length) % links.length;
  links.forEach((link, place) => link.setAttribute("aria-selected", place === selected));
  links[selected].scrollIntoView({block: "nearest"});
  input.setAttribute("aria-activedescendant", links[selected].id);
}

input.addEventListener("focus", loadIndex);
input.addEventListener("input", search);
input.addEventListener("keydown", (event) => {
  if (event.key === "ArrowDown") select(selected + 1);
  else if (event.key === "ArrowUp") select(selected - 1);
  else if (event.key === "Enter") results.querySelectorAll("a")[selected]?.click();
  else if (event.key === "Escape") { input.value = ""; search(); input.blur(); }
  else return;
  event.preventDefault();
});
addEventListener("keydown", (event) => {
  if (event.key !== "/" || event.ctrlKey || event.metaKey || event.target.closest("input")) return;
  event.preventDefault();
  input.focus();
});
addEventListener("click", (event) => { if (!event.target.closest(".search")) show(false); });
