// The responses of one group side by side, with a heat map of what the learner knew of each token.

import { el } from "bapo/app/dom.js";
import { DASH, count, decimal } from "bapo/app/format.js";
import { NotExported, follow } from "bapo/app/data.js";
import { pictures } from "bapo/app/images.js";
import { METRICS, heatText, legend, plainText, tokenWords } from "bapo/app/heat.js";
import { visible } from "bapo/app/visible.js";
import { inWords } from "bapo/overview/rewards.js";

const MORE = 4;
const KINDS = { fresh: "fresh group", reevaluated: "re-evaluated group", reused: "reused group" };

function mount(root, shell, here) {
  const id = here.path[0] ?? "";
  const heading = el("h1", {}, "Group ", el("code", {}, visible(id)));
  const body = el("div", { class: "stack" });
  root.append(heading, body);
  shell.setTitle(document.title.replace(/ - BAPO$/, ""));
  let place = here;
  let most = null;
  let shown = null;
  let metric = METRICS[here.params.get("colour")] ? here.params.get("colour") : "entropy";

  const query = () => ({ id, step: place.params.get("step"), most });
  const following = follow(async (from) => {
    const asked = [place, most];
    let answer;
    try {
      answer = await from.get("group", query());
    } catch (error) {
      if (!(error instanceof NotExported)) throw error;
      body.replaceChildren(el("p", { class: "notice" }, "This group is not included in the exported file, which contains those of the latest recorded steps. Open the run with ", el("code", {}, "bapo view RUN"), "."));
      return false;
    }
    if (answer.responses === null) return !answer.is_complete;
    // A finished use of a group never changes: drawn again only when another step or more text is asked for.
    const key = JSON.stringify([answer.step, most, answer.responses.length, answer.why_no_text]);
    if (key !== shown) {
      shown = key;
      draw(answer);
    }
    return asked[0] !== place || asked[1] !== most;
  }, shell.setState);

  function draw(answer) {
    const cards = answer.responses.map((response) => responseCard(answer, response));
    body.replaceChildren(about(answer), promptCard(answer), answer.why_no_text ? noText(answer) : "", answer.why_no_tokens ? textAlone(answer) : cards.length ? controls(() => cards.forEach((card) => card.paint())) : "",
      el("div", { class: "responses" }, cards.map((card) => card.element)));
    const wanted = Number(place.params.get("response"));
    if (place.params.has("response") && cards[wanted]) select(cards, wanted, true);
    body.cards = cards;
  }

  function about(answer) {
    const where = answer.origin ? `trained in step ${answer.step} as ${answer.origin.toUpperCase()}` : `not trained in step ${answer.step}`;
    return el("div", { class: "stack" },
      el("p", {}, `${KINDS[answer.kind]} of policy version ${answer.version}, ${where}. Prompt `, el("a", { href: shell.linkTo("prompt", [answer.prompt_id]) }, el("code", {}, visible(answer.prompt_id))), "."),
      el("p", { class: "soft" }, `Reason: ${answer.why}.`),
      answer.steps.length > 1
        ? el("p", {}, "Read in steps ", answer.steps.map((step) => [el("a", { href: shell.linkTo("group", [id], { step }), "aria-current": step === answer.step ? "true" : null }, String(step)), " "]).flat())
        : null);
  }

  function promptCard(answer) {
    if (answer.prompt === null) return "";
    return el("section", { class: "card", "aria-label": "Prompt" },
      el("h2", {}, "Prompt"), el("pre", { class: "plain", tabindex: "0" }, visible(answer.prompt)), pictures(answer.images),
      answer.engine_prompt === null ? null : el("details", { id: "engine-prompt" }, el("summary", {}, "As the engine saw it"), el("pre", { class: "plain", tabindex: "0" }, visible(answer.engine_prompt))),
      el("dl", { class: "facts" },
        el("dt", {}, "Gold response"), el("dd", { id: "gold" }, answer.gold === null ? DASH : el("code", {}, visible(answer.gold))),
        el("dt", {}, "Reference answer"), el("dd", {}, el("code", {}, visible(JSON.stringify(answer.answer))))));
  }

  function noText(answer) {
    return el("div", { class: "notice", id: "no-text" },
      el("p", {}, `The responses themselves are not available: ${answer.why_no_text}.`),
      el("p", {}, `Rewards: ${answer.rewards.map((reward) => decimal(reward)).join(", ")}`));
  }

  const textAlone = (answer) =>
    el("p", { class: "soft", id: "text-alone" }, `Texts without per-token statistics: ${answer.why_no_tokens}. j and k move between responses.`);

  function controls(paint) {
    const place_of_legend = el("div", {}, legend(metric));
    const radios = Object.entries(METRICS).map(([name, { title }]) =>
      el("label", {}, el("input", { type: "radio", name: "colour", value: name, checked: name === metric,
        onchange: () => {
          metric = name;
          shell.setParams({ colour: name === "entropy" ? null : name });
          place_of_legend.replaceChildren(legend(metric));
          paint();
        } }), ` ${title}`));
    return el("fieldset", { class: "controls" }, el("legend", {}, "Token color"), radios, place_of_legend,
      el("p", { class: "soft" }, "Hover over a token to see its statistics. Keyboard: j and k move between responses, the arrow keys between tokens."));
  }

  function responseCard(answer, response) {
    const isRight = response.reward >= 1;
    const number = response.row;
    const isTextAlone = response.rollout === null;
    const readout = isTextAlone ? null : el("p", { class: "readout", "aria-live": "polite" });
    const holder = el("div", {});
    const hidden = response.num_tokens - response.pieces.length;
    const rest = isTextAlone || !hidden ? "the rest of the text is" : `${count(hidden)} tokens are`;
    const element = el("section", { class: "card response", id: `response-${number}`, "aria-labelledby": `response-${number}-title` },
      el("h2", { id: `response-${number}-title` }, el("a", { href: shell.linkTo("group", [id], { step: answer.step, response: number }) }, `Response ${number}`), " ",
        el("span", { class: `tag ${isRight ? "good" : response.reward > 0 ? "warn" : "bad"}` }, isRight ? "correct" : response.reward > 0 ? "partly correct" : "incorrect")),
      el("dl", { class: "facts" },
        el("dt", {}, "Reward"), el("dd", { class: "reward" }, decimal(response.reward)),
        details(response, "reward_parts", "Components"), details(response, "reward_facts", "Facts"),
        el("dt", {}, "Advantage"), el("dd", { class: "advantage" }, decimal(response.advantage)),
        el("dt", {}, "Extracted"), el("dd", { class: "extracted" }, response.extracted === null ? DASH : el("code", {}, visible(response.extracted))),
        el("dt", {}, "Tokens"), el("dd", {}, `${count(response.num_tokens)}${response.outcome === "graded" ? "" : `, ${response.outcome}`}`),
        response.turns ? [el("dt", {}, "Turns"), el("dd", { class: "turns" }, count(response.num_turns))] : null,
        el("dt", {}, "Version"), el("dd", {}, [...new Set(response.versions)].join(" to "))),
      isTextAlone || response.entropy ? null : el("p", { class: "soft" }, "This response has advantage 0, so the learner computed no statistics for it."),
      holder, readout,
      response.is_cut ? el("button", { type: "button", class: "quiet more", onclick: () => { most = answer.most * MORE; following.now(); } }, `Show more: ${rest} not shown`) : null);
    const card = {
      element,
      paint() {
        if (isTextAlone) return holder.replaceChildren(plainText(response, `Response ${number}`));
        const onToken = (i) => { readout.textContent = i === null ? "" : tokenWords(response, i); };
        holder.replaceChildren(heatText(response, metric, onToken, `Response ${number}, tokens`));
      },
      text: () => holder.firstElementChild,
    };
    card.paint();
    return card;
  }

  const details = (response, key, name) => response[key] ? [el("dt", {}, name), el("dd", { class: key }, visible(inWords(response[key])))] : null;

  function select(cards, index, quiet) {
    cards.forEach((card, i) => card.element.classList.toggle("selected", i === index));
    const card = cards[index];
    card.text().focus({ preventScroll: true });
    card.element.scrollIntoView({ block: "nearest", inline: "nearest" });
    if (!quiet) shell.setParams({ response: index });
  }

  function onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, select, textarea") && event.target.type !== "radio") return;
    const cards = body.cards ?? [];
    const move = { j: 1, k: -1 }[event.key];
    if (!move || !cards.length) return;
    event.preventDefault();
    const now = cards.findIndex((card) => card.element.classList.contains("selected"));
    select(cards, Math.max(0, Math.min(cards.length - 1, now < 0 ? 0 : now + move)));
  }
  document.addEventListener("keydown", onKey);

  return {
    unmount() {
      following.stop();
      document.removeEventListener("keydown", onKey);
    },
    update(next) {
      const isOther = next.path[0] !== id;
      if (isOther) {
        this.unmount();
        root.replaceChildren();
        Object.assign(this, mount(root, shell, next));
        return;
      }
      place = next;
      shown = null;
      following.now();
    },
  };
}

export default { name: "group", title: "Group", mount };
