// The run at a glance: tiles of now, a slider over the steps, and the cards of bapo/overview.

import { el, freshId } from "bapo/app/dom.js";
import { follow } from "bapo/app/data.js";
import { count, DASH, decimal, duration, moment, percent, plural } from "bapo/app/format.js";
import { batchCards, learnerCards } from "bapo/overview/batches.js";
import { column, fromBuffer, grow, indexOf, mean, measuredAt, none } from "bapo/overview/columns.js";
import { promptCards } from "bapo/overview/prompts.js";
import { theoryCards } from "bapo/overview/theory.js";
import { waitingCards } from "bapo/overview/waiting.js";

const SECTIONS = [
  ["What the batches are made of", batchCards],
  ["What the policy learns", promptCards],
  ["Theorem meter", theoryCards],
  ["Who waits for whom", waitingCards],
  ["The learner", learnerCards],
];
const SPEAK_EVERY_MS = 15000;
const DRAW_EVERY_MS = 2000;

function mount(root, shell, { params }) {
  const lead = el("div", { class: "lead" }, el("h1", {}, "Overview"), el("p", {}));
  const notices = el("div", { role: "status" });
  const tiles = el("dl", { class: "tiles" });
  const slider = makeSlider(choose);
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

  function choose(next) {
    step = next;
    shell.setParams({ step });
    draw();
  }

  function draw() {
    const data = known.length || !live?.batches.length ? known : fromBuffer(live.batches, known.run);
    const index = indexOf(data.steps, step);
    const state = { ...data, index, live };
    slider.show(data.steps.step, index, step === null);
    lead.lastChild.textContent = describe(known.run, live);
    tiles.replaceChildren(...tilesOf(state).map(([name, value, more]) => el("div", { class: value.length > 12 ? "tile broad" : "tile" }, el("dt", {}, name), el("dd", {}, value, more ? el("small", {}, ` ${more}`) : null))));
    notices.replaceChildren(...noticesOf(known, state));
    for (const card of cards) card.show(state);
  }

  function speak() {
    const last = known.length - 1;
    if (last < 0 || Date.now() - spokenAt < SPEAK_EVERY_MS) return;
    spokenAt = Date.now();
    shell.announce(`Step ${known.steps.step[last]}, mean reward ${decimal(known.steps.reward_mean[last])}.`);
  }

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
  }, (state, error) => shell.setState(state === "live" && !live ? "records" : state, error));

  return {
    unmount: following.stop,
    update({ params: next }) {
      step = asStep(next);
      draw();
    },
  };
}

const asStep = (params) => (/^\d+$/.test(params.get("step") ?? "") ? Number(params.get("step")) : null);

function describe(run, live) {
  if (!run) return "";
  const status = run.status ?? (live ? "buffer alone" : "not started");
  return `${run.algorithm} on ${run.task} with ${run.model}, ${status}${run.started_at ? `, started ${moment(run.started_at)}` : ""}`;
}

function tilesOf({ steps, index, length, run, held, live }) {
  if (!run) return [];
  const at = (name) => column(steps, name)[index] ?? null;
  const groups = length ? at("x1") + at("x2") + at("x3") : null;
  const stale = ["x1", "x2", "x3"].map((name) => at(`staleness_${name}_max`)).filter((value) => value !== null);
  const pace = mean(column(steps, "step_s").slice(Math.max(0, index - 19), index + 1));
  const measured = length ? measuredAt(held, at("step")) : [];
  return [
    ["Step", count(at("step")), `of ${count(run.num_steps)}`],
    ["Batch", count(groups), `of B = ${count(run.batch_size)} groups`],
    ["r_tot", decimal(at("reward_mean")), ""],
    ["c1, c2, c3", [run.c1, at("c2"), at("c3")].map((value) => decimal(value, 2)).join(" / "), ""],
    ["B_bad", count(at("num_bad")), "prompts"],
    ["B_high", count(at("num_high")), "groups"],
    ["Oldest group", stale.length ? count(Math.max(...stale)) : DASH, "steps stale"],
    ...measured.slice(0, 2).map((one) => [`Held out ${one.split}`, percent(one.accuracy), `after step ${one.step}`]),
    ["Pace", duration(pace), "per step"],
    ...(live ? [["Ready", count(live.status.fresh_ready), "fresh groups"]] : []),
  ];
}

function noticesOf(known, { steps, index, length }) {
  const found = [];
  const notice = (text, isBad) => found.push(el("p", { class: `notice${isBad ? " bad" : ""}` }, text));
  if (known.problem) notice(`Some figures are missing: ${known.problem}.`);
  if (known.run && !known.length) {
    notice(length
      ? "The records of this run cannot be reached from here, or there are none: shown is what the buffer itself knows of its batches."
      : "No step has ended yet. The page fills by itself as soon as the first one has.");
  }
  if (known.run?.status === "failed") notice(`The run has failed: ${known.run.message || "see its logs"}.`, true);
  const warning = length && column(steps, "warning")[index];
  if (warning) notice(`Step ${steps.step[index]}: ${warning}.`);
  return found;
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
  const newest = el("button", { type: "button", class: "quiet", onclick: () => choose(null) }, "Follow the newest");
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
