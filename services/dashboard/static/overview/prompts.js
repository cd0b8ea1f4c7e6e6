// Held-out results and pass@k, and cards about prompts: accuracy bins, how they moved, which are newly solved.

import { atStep, chartCard, colour, line, stepAxis } from "bapo/app/charts.js";
import { el, freshId, table } from "bapo/app/dom.js";
import { count, DASH, percent, plural, signed } from "bapo/app/format.js";
import { column, matrixAt, measuredAt, movement, shares } from "bapo/overview/columns.js";

function bins(grid) {
  return chartCard(grid, {
    title: "Accuracy bins", id: "bins", height: 220,
    note: "Fresh groups by correct responses (reward 1) out of G: the first quarter of the steps compared with the same number of steps up to the selected one (Fig. 7).",
    empty: "No group data are available.",
    draw({ steps, index, length }) {
      const all = column(steps, "bins");
      const width = Math.max(1, Math.floor(length / 4));
      const first = shares(all.slice(0, width));
      const now = shares(all.slice(Math.max(0, index - width + 1), index + 1));
      if (!first || !now) return null;
      const size = first.length - 1;
      const names = first.map((_, k) => `${k}/${size}`);
      const from = steps.step[Math.max(0, index - width + 1)];
      const labels = [`steps ${steps.step[0]} to ${steps.step[width - 1]}`, `steps ${from} to ${steps.step[index]}`];
      const bars = (name, values, isNow) => ({
        type: "bar", name, barGap: "8%", barMaxWidth: 22, itemStyle: { color: colour(isNow ? "series-1" : "even"), borderRadius: [3, 3, 0, 0] },
        data: values.map((value, k) => ({ value: 100 * value, itemStyle: k === 0 ? { color: colour("b"), opacity: isNow ? 1 : 0.55 } : {} })),
      });
      return {
        summary: `None correct: ${percent(first[0])} of the groups in ${labels[0]}, ${percent(now[0])} in ${labels[1]}; all correct: ${percent(first[size])} and ${percent(now[size])}.`,
        option: {
          xAxis: { type: "category", data: names, name: "correct responses" }, yAxis: { type: "value", min: 0, name: "groups", axisLabel: { formatter: "{value} %" } },
          series: [bars(labels[0], first, false), bars(labels[1], now, true)],
        },
        table: () => ({ caption: "Share of fresh groups", header: ["correct", ...labels], rows: names.map((name, k) => [name, percent(first[k]), percent(now[k])]) }),
      };
    },
  });
}

function migration(grid) {
  let chosen = "training";
  let data = null;
  const selectId = freshId("matrix-of");
  const select = el("select", { id: selectId, onchange: () => { chosen = select.value; card.show(data); } });
  const chooser = el("p", { class: "chooser" }, el("label", { for: selectId }, "Prompts "), select);
  const card = chartCard(grid, {
    title: "Accuracy migration", id: "migration",
    note: "Prompts by correct responses (reward 1) at the first visit (rows) and at the selected step (columns). Blue, right of the diagonal: better; orange, left of it: worse. Both are shaded on the same scale; click a number to list its prompts (Fig. 15).",
    empty: "No prompt has been revisited yet, and no held-out split has been evaluated twice.",
    draw(next) {
      data = next;
      const { steps, index, length, held, run } = next;
      if (!length) return null;
      const options = [["training", "training, first visit vs. latest"], ...held.map((split) => [split.split, `held out ${split.split}, base model vs. now`])];
      if (select.options.length !== options.length) select.replaceChildren(...options.map(([value, words]) => el("option", { value, selected: value === chosen }, words)));
      const step = steps.step[index];
      const measured = measuredAt(held, step).find((one) => one.split === chosen);
      const matrix = measured ? measured.matrix : matrixAt(steps, index, run.group_size + 1);
      if (!matrix) return { summary: "The base model was not evaluated on this split, so there is nothing to compare with.", body: chooser };
      const found = movement(matrix);
      const where = measured ? `held out ${chosen}, evaluated after step ${measured.step}` : `training, up to step ${step}`;
      return {
        summary: found.total
          ? `${plural(found.total, "prompt")} (${where}): ${percent(found.better / found.total)} better, ${percent(found.same / found.total)} the same, ${percent(found.worse / found.total)} worse.`
          : `No prompt was revisited up to step ${step}.`,
        body: el("div", {}, chooser, heat(matrix, where, measured ? null : { until: index < length - 1 ? step : null })),
      };
    },
  });
  return card;
}

/** `link`: its cells lead to their prompts, `until` a step or, with null, of now. */
function heat(matrix, where, link) {
  const size = matrix.length - 1;
  const most = Math.max(1, ...matrix.flat());
  const cell = (number, first, last) => {
    const td = el("td", { class: last > first ? "up" : last < first ? "down" : "even" }, !number ? "·" : link ? el("a", { href: promptsOf(first, last, link.until), title: "Show these prompts" }, count(number)) : count(number));
    td.style.setProperty("--strength", String(number ? 10 + 52 * Math.sqrt(number / most) : 0));
    return td;
  };
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Accuracy migration matrix" },
    el("table", { class: "matrix" },
      el("caption", { class: "unseen" }, `Prompts by correct responses at the first visit (rows) and now (columns), ${where}`),
      el("thead", {}, el("tr", {}, el("td", { class: "corner" }, "first \\ now"), matrix.map((_, k) => el("th", { scope: "col" }, `${k}/${size}`)))),
      el("tbody", {}, matrix.map((row, first) => el("tr", {}, el("th", { scope: "row" }, `${first}/${size}`), row.map((number, last) => cell(number, first, last)))))));
}

const promptsOf = (first, last, until) => `#/prompts?first=${first}&last=${last}${until === null ? "" : `&until=${until}`}`;

function rescued(grid) {
  return chartCard(grid, {
    title: "Newly solved prompts", id: "rescued", height: 190,
    note: "Training prompts without a correct response (reward 1) at their first visit, and with one at their latest; below, the subsets that trained them in between. “None of them”: solved through training on other prompts only. Some are solved by chance: docs/results.md.",
    empty: "No prompt has been revisited yet.",
    draw({ steps, index, length }) {
      if (!length || !column(steps, "revisited")[index]) return null;
      const at = (name) => steps[name][index];
      const rows = Object.entries(at("attribution")).sort(([, a], [, b]) => b - a);
      const share = at("unsolved") ? percent(at("rescued") / at("unsolved")) : DASH;
      return {
        summary: `Step ${at("step")}: ${count(at("rescued"))} of ${count(at("unsolved"))} revisited unsolved prompts are newly solved (${share}); ${count(at("revisited"))} prompts were revisited.`,
        option: {
          xAxis: stepAxis(steps.step), yAxis: { type: "value", min: 0, minInterval: 1, name: "prompts" },
          series: [
            line("unsolved at first", steps.step, steps.unsolved, "even", { markLine: atStep(at("step")) }),
            line("newly solved", steps.step, steps.rescued, "x3", { areaStyle: { color: colour("x3"), opacity: 0.2 } }),
          ],
        },
        body: el("ul", { class: "tags", "aria-label": "Newly solved prompts by the subsets that trained them" }, rows.map(([label, number]) => el("li", { class: "tag" }, `${named(label)}: ${count(number)}`))),
        table: () => ({ caption: `Newly solved prompts at step ${at("step")}, by training subsets`, header: ["trained by", "prompts"], rows: rows.map(([label, number]) => [named(label), count(number)]) }),
      };
    },
  });
}

const named = (label) => label.replace(/x\d/g, (name) => name.toUpperCase());

/** What the means are called: "accuracy" where the rewards of all splits are 0 or 1. */
const measureOf = (held) => held.find((split) => split.measure !== "accuracy")?.measure ?? "accuracy";

/** Points of a curve that is measured now and then. */
const marked = { showSymbol: true, symbolSize: 7 };

/** Split, before, now, change with its interval, and what it rests on. */
function measures(held, step) {
  const now = measuredAt(held, step);
  const points = (value) => signed(100 * value, 1);
  const change = ([mean, low, high]) => el("span", { class: low > 0 ? "good" : high < 0 ? "bad" : null }, points(mean), " ", el("span", {}, `[${points(low)}, ${points(high)}]`));
  const rows = now.map((one, i) => [
    one.split, percent(held[i].accuracy[0]), one.index ? percent(one.accuracy) : DASH, one.change ? change(one.change) : DASH,
    `${count(one.num_prompts)} × ${count(one.num_samples)}`,
  ]);
  const first = held.every((split) => split.step[0] === 0) ? "before" : "first";
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Held-out measures" },
    table({ header: [measureOf(held), first, `step ${Math.max(...now.map((one) => one.step))}`, "change, points", "prompts × samples"], rows }));
}

function heldOut(grid) {
  return chartCard(grid, {
    title: "Held-out results", id: "held-out", height: 260,
    note: "Mean reward with 95 % intervals, which is the accuracy where all rewards are 0 or 1; step 0 is the base model at the same temperature. Evaluations during training have fewer prompts: their points are the base model's value plus the change on these prompts.",
    empty: "Not measured yet.",
    draw({ held, steps, index, length, other }) {
      if (!held.length) return null;
      const step = length ? steps.step[index] : 0;
      const splitOf = (name) => other?.held.find((one) => one.split === name);
      const tone = (i) => `series-${(i % 6) + 1}`;
      const series = held.flatMap((split, i) => [
        line(split.split, split.step, split.accuracy.map((value) => 100 * value), tone(i), { ...marked, sampling: undefined, markLine: i ? undefined : atStep(step) }),
        // The interval: an invisible line at its lower end and a band of its width upon it.
        line(`${split.split} from`, split.step, split.low.map((value) => 100 * value), tone(i), { stack: `band-${i}`, lineStyle: { width: 0 }, symbol: "none", tooltip: { show: false }, silent: true, sampling: undefined }),
        line(`${split.split} to`, split.step, split.low.map((value, k) => 100 * (split.high[k] - value)), tone(i), { stack: `band-${i}`, lineStyle: { width: 0 }, symbol: "none", tooltip: { show: false }, silent: true, sampling: undefined, areaStyle: { color: colour(tone(i)), opacity: 0.14 } }),
      ]);
      const compared = held.flatMap((split, i) => (splitOf(split.split) ? [line(`${split.split}, ${other.name}`, splitOf(split.split).step, splitOf(split.split).accuracy.map((value) => 100 * value), tone(i), { ...marked, sampling: undefined, lineStyle: { type: "dashed", color: colour(tone(i)) } })] : []));
      return {
        summary: "The change is over the prompts common to both, with its 95 % interval.",
        body: measures(held, step),
        option: {
          xAxis: { ...stepAxis(held[0].step), max: Math.max(1, ...held.map((split) => split.step.at(-1))) },
          yAxis: { type: "value", min: 0, name: measureOf(held), axisLabel: { formatter: "{value} %" } },
          legend: { data: [...held.map((split) => split.split), ...compared.map((one) => one.name)] },
          series: [...series, ...compared],
        },
        table: () => ({
          caption: "Mean reward and its 95 % interval", header: ["split and step", measureOf(held), "from", "to", "prompts"],
          rows: held.flatMap((split) => split.step.map((at, k) => [`${split.split} ${at}`, percent(split.accuracy[k]), percent(split.low[k]), percent(split.high[k]), count(split.num_prompts[k])])),
        }),
      };
    },
  });
}

function passAtK(grid) {
  return chartCard(grid, {
    title: "pass@k", id: "pass-at-k", height: 220,
    note: "Share of held-out prompts with at least one correct response (reward 1) in k samples. Accuracy that rises while pass@k does not is sharpening: the model only repeats what it could already solve. Points with fewer prompts are the base model’s value plus the change on these prompts.",
    empty: "Evaluated with one response per prompt: set evaluation.num_samples to 2 or more.",
    draw({ held, steps, index, length }) {
      const known = held.filter((split) => split.k > 1);
      if (!known.length) return null;
      const step = length ? steps.step[index] : 0;
      const name = (split) => `${split.split} pass@${split.k}`;
      const now = (split) => split.step.findLastIndex((at) => at <= step);
      return {
        summary: `${known.map((split) => `${name(split)}: ${percent(split.passed[0])} before, ${percent(split.passed[Math.max(0, now(split))])} after step ${split.step[Math.max(0, now(split))]}`).join("; ")}.`,
        option: {
          xAxis: { ...stepAxis(known[0].step), max: Math.max(1, ...known.map((split) => split.step.at(-1))) },
          yAxis: { type: "value", min: 0, name: "prompts", axisLabel: { formatter: "{value} %" } },
          series: known.map((split, i) => line(name(split), split.step, split.passed.map((value) => 100 * value), `series-${(i % 6) + 1}`, { ...marked, sampling: undefined, markLine: i ? undefined : atStep(step) })),
        },
        table: () => ({ header: ["split and step", "pass@k", "k"], rows: known.flatMap((split) => split.step.map((at, k) => [`${split.split} ${at}`, percent(split.passed[k]), count(split.k)])) }),
      };
    },
  });
}

export const measuredCards = (grid) => [heldOut(grid), passAtK(grid)];
export const promptCards = (grid) => [migration(grid), bins(grid), rescued(grid)];
