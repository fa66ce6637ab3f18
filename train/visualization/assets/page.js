"use strict";
// What all pages share: their data, small elements, and colors of the current theme.

const data = JSON.parse(document.getElementById("data").textContent);

/** Return the element of an id. */
const byId = (id) => document.getElementById(id);

/** Return a new element. Texts are set as text, never as markup. */
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

/** Return a color of the theme as [red, green, blue]. */
function themeColor(name) {
  const text = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return [1, 3, 5].map((start) => parseInt(text.slice(start, start + 2), 16));
}

/** Call a function when the reader's system changes between light and dark. */
function onThemeChange(redraw) {
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
}
