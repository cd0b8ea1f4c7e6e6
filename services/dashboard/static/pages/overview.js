// The run at a glance: five tiles, a slider over the steps, and the cards of bapo/overview. Learning comes first.

import { el, freshId } from "bapo/app/dom.js";
import { follow } from "bapo/app/data.js";
import { count, DASH, decimal, duration, moment, percent, plural, signed } from "bapo/app/format.js";
import { batchCards, learnerCards, policyCards, rewardCard } from "bapo/overview/batches.js";
import { column, fromBuffer, grow, indexOf, mean, measuredAt, none } from "bapo/overview/columns.js";
import { episodeCards } from "bapo/overview/episodes.js";
import { measuredCards, promptCards } from "bapo/overview/prompts.js";
import { rewardPartCards } from "bapo/overview/rewards.js";
import { theoryCards } from "bapo/overview/theory.js";
import { waitingCards } from "bapo/overview/waiting.js";

const SECTIONS = [
  ["Learning", (grid) => [rewardCard(grid), ...rewardPartCards(grid), ...measuredCards(grid), ...policyCards(grid), ...episodeCards(grid)]],
  ["Batches and buffers", batchCards],
  ["Bottleneck", waitingCards],
  ["Prompts", promptCards],
  ["Off-policy diagnostics", theoryCards],
  ["Optimizer", learnerCards],
];
const SPEAK_EVERY_MS = 15000;
const DRAW_EVERY_MS = 2000;

function mount(root, shell, { params }) {
  const lead = el("div", { class: "lead" }, el("h1", {}, "Overview"), el("p", {}));
  const notices = el("div", { role: "status" });
  const tiles = el("dl", { class: "tiles" });
  const slider = makeSlider(choose);
  if (shell.otherRuns.length) slider.element.append(compareWith(shell.otherRuns, params.get("compare"), compare));
  root.append(lead, notices, tiles, slider.element);
  const cards = SECTIONS.flatMap(([title, make]) => {
    const grid = el("div", { class: "grid" });
    root.append(el("h2", { class: "group-title" }, title), grid);
    return make(grid);
  });

  let known = none();
  let live = null;
  let step = asStep(params);
  let spokenAt = 0;
  let drawn = "";
  let drawnAt = -Infinity;
  let other = null;
  let compared = params.get("compare");

  /** Read the curves of another run; drawn dashed over those of this one. */
  async function compare(name) {
    compared = name;
    other = null;
    shell.setParams({ compare: name || null });
    let read = none();
    for (let isComplete = !name; !isComplete && compared === name; ) {
      const answer = await shell.source.get("overview", { since: read.length, generation: read.generation }, { run: name });
      read = grow(read, answer);
      isComplete = answer.is_complete;
    }
    if (compared !== name) return;
    other = name ? { ...read, name } : null;
    draw();
  }

  function choose(next) {
    step = next;
    shell.setParams({ step });
    draw();
  }

  function draw() {
    const data = known.length || !live?.batches.length ? known : fromBuffer(live.batches, known.run);
    const index = indexOf(data.steps, step);
    const state = { ...data, index, live, other };
    slider.show(data.steps.step, index, step === null);
    lead.lastChild.textContent = describe(known.run, live);
    tiles.replaceChildren(...tilesOf(state).map(([name, value, more, trend]) => el("div", { class: "tile" }, el("dt", {}, name), el("dd", {}, value, more ? el("small", {}, ` ${more}`) : null, trend ? sparkline(trend) : null))));
    notices.replaceChildren(...noticesOf(known, state));
    for (const card of cards) card.show(state);
  }

  function speak() {
    const last = known.length - 1;
    if (last < 0 || Date.now() - spokenAt < SPEAK_EVERY_MS) return;
    spokenAt = Date.now();
    shell.announce(`Step ${known.steps.step[last]}, mean reward ${decimal(known.steps.reward_mean[last])}.`);
  }

  if (compared && shell.otherRuns.includes(compared)) compare(compared).catch((error) => shell.setState("refused", error));
  const following = follow(async (source) => {
    const query = { since: known.length, measured: known.measured, generation: known.generation };
    const started = performance.now();
    const [answer, now] = await Promise.all([source.get("overview", query), source.get("live")]);
    const before = known;
    known = grow(known, answer);
    live = now.live;
    shell.setTitle(known.run.name);
    const stamp = JSON.stringify([answer.generation, known.length, known.measured, known.run, known.problem, live]);
    // While the service still reads, answers follow each other at once: not each of them is drawn.
    const isDue = answer.is_complete || started - drawnAt > DRAW_EVERY_MS;
    if (stamp !== drawn && isDue) {
      drawnAt = started;
      drawn = stamp;
      draw();
      // From the question to the painted answer: ECharts draws in the next frame.
      requestAnimationFrame(() => setTimeout(() => performance.measure("page update", { start: started })));
    }
    if (before.length && known.length > before.length) speak();
    if (!answer.is_complete) slider.loading(answer.num_steps);
    return !answer.is_complete;
  }, (state, error) => shell.setState(state === "live" ? stateOf(known.run, live) : state, error));

  return {
    unmount: following.stop,
    update({ params: next }) {
      step = asStep(next);
      draw();
    },
  };
}

const stateOf = (run, live) => (live ? "running" : run?.status === "finished" ? "finished" : "records");
const asStep = (params) => (/^\d+$/.test(params.get("step") ?? "") ? Number(params.get("step")) : null);

function describe(run, live) {
  if (!run) return "";
  const status = run.status ?? (live ? "running" : "no launcher"); // of containers and of bapo sft none is recorded
  return `${run.method} on ${run.task} with ${run.model}, ${status}${run.started_at ? `, started ${moment(run.started_at)}` : ""}`;
}

const WINDOW = 20;

/** [name, value, what it is compared with, values of its trend]. */
function tilesOf({ steps, index, length, run, held }) {
  if (!run) return [];
  const at = (name) => column(steps, name)[index] ?? null;
  const upTo = (name) => column(steps, name).slice(0, index + 1);
  const recent = (name, end = index + 1) => mean(column(steps, name).slice(Math.max(0, end - WINDOW), end));
  const pace = recent("step_s");
  const isLast = at("step") >= run.num_steps;
  const reward = recent("reward_mean");
  const before = index >= WINDOW ? recent("reward_mean", index + 1 - WINDOW) : null;
  const [split] = length ? measuredAt(held, at("step")) : [];
  const stale = column(steps, "staleness_x1_max");
  return [
    ["Step", `${count(at("step"))} of ${count(run.num_steps)}`, run.ended ? "ended early" : pace === null ? null : `${isLast ? "" : `${duration(pace * (run.num_steps - at("step")))} left, `}${duration(pace)} per step`, null],
    ["Mean reward", decimal(reward), before === null ? `last ${plural(Math.min(WINDOW, index + 1), "step")}` : `${signed(reward - before)} over ${WINDOW} steps`, smooth(upTo("reward_mean"))],
    split
      ? [`Held-out ${split.split}, ${split.measure}`, percent(split.accuracy), split.index ? `${signed(100 * (split.accuracy - held[0].accuracy[0]), 1)} points from the base model${run.best?.split === split.split ? bestOf(run.best, at("step")) : ""}` : "base model", held[0].accuracy.slice(0, split.index + 1)]
      : ["Held-out results", DASH, "not evaluated yet", null],
    ["Throughput", count(recent("tokens_per_s")), "trained tokens per second", smooth(upTo("tokens_per_s"))],
    ["Staleness, fresh", count(stale[index]), `steps, at most ${count(run.max_staleness)}`, upTo("staleness_x1_max")],
  ];
}

/** Weights are compared over the prompts that all evaluations have, so the mean may be another than the tile's. */
const bestOf = (best, shown) =>
  best.step === shown ? "; the best evaluation" : `; best: step ${best.step}, ${percent(best.mean)} of the prompts common to all`;

/** Means over a sliding window: a trend, not its noise. */
const smooth = (values) => values.map((_, i) => mean(values.slice(Math.max(0, i + 1 - WINDOW), i + 1)));

/** A line without axes; the numbers are in the tile and in the chart. */
function sparkline(values) {
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return null;
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const every = Math.max(1, Math.floor(known.length / 60));
  const points = known.filter((_, i) => i % every === 0 || i === known.length - 1);
  const place = (value, i) => `${(100 * i) / (points.length - 1)},${high > low ? 28 - (26 * (value - low)) / (high - low) : 15}`;
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  for (const [name, value] of Object.entries({ class: "trend", viewBox: "0 0 100 30", preserveAspectRatio: "none", "aria-hidden": "true" })) svg.setAttribute(name, value);
  const path = document.createElementNS("http://www.w3.org/2000/svg", "polyline");
  for (const [name, value] of Object.entries({ points: points.map(place).join(" "), fill: "none", stroke: "currentColor", "stroke-width": "1.5", "vector-effect": "non-scaling-stroke" })) path.setAttribute(name, value);
  svg.append(path);
  return svg;
}

function noticesOf(known, { steps, index, length }) {
  const found = [];
  const notice = (text, isBad) => found.push(el("p", { class: `notice${isBad ? " bad" : ""}` }, text));
  if (known.problem) notice(`Some figures are missing: ${known.problem}.`);
  if (known.run && !known.length) {
    notice(length
      ? "The records of this run are not available here: the page shows the buffer's data about its batches."
      : "No step has finished yet. The page updates after the first one.");
  }
  if (known.run?.status === "failed") notice(`The run has failed: ${known.run.message || "see its logs"}.`, true);
  if (known.run?.shortfall) notice(`Batches are ${known.run.shortfall}.`);
  if (known.run?.ended) notice(`The run ended after step ${known.steps.step.at(-1)} of ${known.run.num_steps}: ${known.run.ended}.`);
  const warning = length && column(steps, "warning")[index];
  if (warning) notice(`Step ${steps.step[index]}: ${warning}.`);
  return found;
}

/** Which run the curves are compared with. */
function compareWith(names, chosen, compare) {
  const select = el("select", { "aria-label": "Compare with", onchange: () => compare(select.value) },
    el("option", { value: "" }, "Compare with ..."), names.map((name) => el("option", { value: name, selected: name === chosen }, name)));
  return select;
}

/** The chosen step: a range, one step back and forth, and a button that follows the newest. */
function makeSlider(choose) {
  const id = freshId("step");
  let steps = [];
  const at = (index) => choose(steps[Math.max(0, Math.min(steps.length - 1, index))]);
  const range = el("input", { type: "range", id, min: 0, max: 0, step: 1, value: 0, oninput: () => at(Number(range.value)) });
  const output = el("output", { for: id }, DASH);
  const back = el("button", { type: "button", class: "quiet", "aria-label": "One step back", onclick: () => at(Number(range.value) - 1) }, "‹");
  const forth = el("button", { type: "button", class: "quiet", "aria-label": "One step on", onclick: () => at(Number(range.value) + 1) }, "›");
  const newest = el("button", { type: "button", class: "quiet", onclick: () => choose(null) }, "Follow latest");
  const element = el("section", { class: "slider", "aria-label": "Chosen step" }, el("label", { for: id }, "Step"), back, range, forth, output, newest);
  return {
    element,
    show(next, index, isNewest) {
      steps = next;
      element.hidden = !steps.length;
      range.max = String(Math.max(0, steps.length - 1));
      range.value = String(index);
      range.setAttribute("aria-valuetext", `step ${steps[index]} of ${steps.at(-1)}`);
      output.textContent = `${steps[index] ?? DASH} of ${steps.at(-1) ?? DASH}`;
      back.disabled = index <= 0;
      forth.disabled = index >= steps.length - 1;
      newest.setAttribute("aria-pressed", String(isNewest));
    },
    loading(number) {
      output.textContent = `reading the records: ${plural(number, "step")} so far`;
    },
  };
}

export default { name: "overview", title: "Overview", order: 1, mount };
