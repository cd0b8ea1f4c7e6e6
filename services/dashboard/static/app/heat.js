// A response as a heat map: one element per token, coloured by what the learner knew of it.

import { el } from "bapo/app/dom.js";
import { DASH, decimal, percent } from "bapo/app/format.js";
import { inTurns, turnOf } from "bapo/app/transcript.js";
import { visibleToken } from "bapo/app/visible.js";

const ENTROPY = [0.1, 0.5, 1, 2];
const RATIO = [0.8, 0.95, 1.05, 1.25];
const CHANCE = [0.9, 0.5, 0.2, 0.05];
/** Not of a response that the learner did not compute, nor of a token that was too old to train. */
const isKnown = (values, i) => values !== null && values[i] !== null;
const above = (limits, value) => limits.filter((limit) => value >= limit).length;

/** What a token can be coloured by: title, the classes of its steps with their words, and which step a token has. */
export const METRICS = {
  entropy: {
    title: "Entropy",
    steps: ["under 0.1 nats", "0.1 to 0.5", "0.5 to 1", "1 to 2", "2 and more"].map((words, i) => [`heat-${i}`, words]),
    of: (response, i) => (isKnown(response.entropy, i) ? `heat-${above(ENTROPY, response.entropy[i])}` : null),
  },
  ratio: {
    title: "Ratio",
    steps: ["under 0.8", "0.8 to 0.95", "0.95 to 1.05", "1.05 to 1.25", "1.25 and more"].map((words, i) => [`ratio-${i}`, words]),
    of: (response, i) => (isKnown(response.ratio, i) ? `ratio-${above(RATIO, response.ratio[i])}` : null),
  },
  clipping: {
    title: "Clipping",
    steps: [["heat-0", "not clipped"], ["clipped", "clipped: the objective did not follow the ratio"]],
    of: (response, i) => (isKnown(response.clipped, i) ? (response.clipped[i] ? "clipped" : "heat-0") : null),
  },
  surprise: {
    title: "Rollout probability",
    steps: ["0.9 and more", "0.5 to 0.9", "0.2 to 0.5", "0.05 to 0.2", "under 0.05"].map((words, i) => [`heat-${i}`, words]),
    of: (response, i) => `heat-${CHANCE.filter((limit) => Math.exp(response.rollout[i]) < limit).length}`,
  },
  none: { title: "Plain text", steps: [], of: () => null },
};

/** One sentence with everything that is known of a token. */
export function tokenWords(response, i) {
  const value = (name, digits = 3) => (response[name] ? decimal(response[name][i], digits) : DASH);
  const clipped = isKnown(response.clipped, i) ? (response.clipped[i] ? "clipped" : "not clipped") : "not computed by the learner";
  const turn = turnOf(response, i);
  return `token ${i + 1} of ${response.num_tokens}${turn === null ? "" : `, turn ${turn},`} \u201c${visibleToken(response.pieces[i])}\u201d: entropy ${value("entropy")} nats, ratio ${value("ratio", 4)}, ${clipped}, log \u03c0 ${value("logprobs")}, log \u03b1 ${value("rollout")} (${percent(Math.exp(response.rollout[i]))})`;
}

/** The text of a response; onToken(index or null) is called with the token that the pointer or the arrow keys are at. */
export function heatText(response, metric, onToken, label) {
  const { of } = METRICS[metric];
  const tokens = response.pieces.map((piece, i) =>
    el("span", { class: ["token", of(response, i), piece === "" ? "joined" : null].filter(Boolean).join(" "), "data-i": i }, visibleToken(piece)),
  );
  let chosen = -1;
  function choose(index) {
    tokens[chosen]?.classList.remove("chosen");
    chosen = index;
    tokens[chosen]?.classList.add("chosen");
    tokens[chosen]?.scrollIntoView({ block: "nearest" });
    onToken(chosen < 0 ? null : chosen);
  }
  const indexOf = (event) => Number(event.target.closest?.(".token")?.dataset.i ?? -1);
  return el(
    "div",
    { class: "response-text", tabindex: "0", role: "group", "aria-label": label, dir: "ltr",
      onpointerover: (event) => indexOf(event) >= 0 && choose(indexOf(event)),
      onclick: (event) => indexOf(event) >= 0 && choose(indexOf(event)),
      onkeydown: (event) => {
        const moves = { ArrowRight: chosen + 1, ArrowLeft: chosen - 1, Home: 0, End: tokens.length - 1 };
        if (!(event.key in moves) || event.target !== event.currentTarget || event.ctrlKey || event.metaKey || event.altKey) return;
        event.preventDefault();
        choose(Math.max(0, Math.min(tokens.length - 1, moves[event.key])));
      } },
    inTurns(response, tokens),
  );
}

/** The text of a response whose tokens are not known one by one. */
export const plainText = (response, label) =>
  el("div", { class: "response-text", tabindex: "0", role: "group", "aria-label": label, dir: "ltr" }, inTurns(response, response.pieces.map(visibleToken)));

/** What the colours mean. */
export const legend = (metric) =>
  el("ul", { class: "legend", "aria-label": `Colors: ${METRICS[metric].title}` },
    METRICS[metric].steps.map(([name, words]) => el("li", {}, el("span", { class: `token ${name}`, "aria-hidden": "true" }, "abc"), ` ${words}`)));
