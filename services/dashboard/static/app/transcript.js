// An episode as a transcript: turn after turn, context in grey before what was sampled. Labels say which is which.

import { el } from "bapo/app/dom.js";
import { plural } from "bapo/app/format.js";
import { visible } from "bapo/app/visible.js";

/** Context of this many characters gets a scroll bar of its own, which the keyboard must reach. */
const LONG = 500;

/** Index of the turn that piece `i` is part of; null for a response of one turn. */
export function turnOf(response, i) {
  let end = 0;
  const index = (response.turns ?? []).findIndex((turn) => i < (end += turn.num_pieces));
  return index < 0 ? null : index;
}

/** Children of a response's text: the parts, one per piece, as they are or below the headings of their turns. */
export function inTurns(response, parts) {
  if (!response.turns) return parts;
  let start = 0;
  return response.turns.map((turn, i) => {
    const own = parts.slice(start, (start += turn.num_pieces));
    const title = `Turn ${i}`;
    return el("div", { class: "turn", role: "group", "aria-label": turn.fork ? `${title}, ${turn.fork}` : title },
      el("p", { class: "turn-title" }, el("b", {}, title), ` ${plural(turn.num_tokens, "sampled token")}`, turn.fork ? el("span", { class: "tag warn" }, turn.fork) : null),
      turn.context ? context(turn.context, title) : null,
      el("div", { class: "sampled" }, who("sampled"), own));
  });
}

const who = (name) => el("span", { class: "who" }, `${name} `);

function context(text, title) {
  const scrolls = text.length > LONG ? { tabindex: "0", role: "group", "aria-label": `${title}, context` } : {};
  return el("div", { class: "context", ...scrolls }, who("context"), visible(text));
}
