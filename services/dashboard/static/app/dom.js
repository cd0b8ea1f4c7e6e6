// Elements from values. Text of a run becomes text nodes here and nowhere markup.

// The page's policy lets no string become markup. ECharts empties its element by one, so the empty one may.
globalThis.trustedTypes?.createPolicy("default", { createHTML: (text) => (text === "" ? "" : null) });

/**
 * el("p", {class: "note", onclick: f}, "text", child, [more]) -> an element.
 * Attributes that are null, undefined or false are left out; functions become listeners.
 */
export function el(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(key.replace(/^on/, ""), value);
    else element.setAttribute(key, value === true ? "" : String(value));
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** A table: {caption, header: [text], rows: [[text or element]], numeric: [column numbers]}. First cells head their rows. */
export function table({ caption, header, rows, numeric = null }) {
  const isNumber = (column) => (numeric ? numeric.includes(column) : column > 0);
  const cell = (value, column) =>
    column === 0
      ? el("th", { scope: "row" }, value)
      : el("td", { class: isNumber(column) ? "number" : null }, value);
  return el(
    "table",
    {},
    caption ? el("caption", {}, caption) : null,
    el("thead", {}, el("tr", {}, header.map((text, column) => el("th", { scope: "col", class: isNumber(column) ? "number" : null }, text)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map(cell)))),
  );
}

/** Say something to screen readers without moving the focus. */
export function announce(text) {
  const place = document.getElementById("announcements");
  if (place && place.textContent !== text) place.textContent = text;
}

let counter = 0;
/** An id that no other element has. */
export const freshId = (stem) => `${stem}-${++counter}`;
