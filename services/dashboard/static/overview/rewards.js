// Cards of the components of the reward, and of facts that reward functions report. Hidden in runs without them.

import { atStep, chartCard, line, shownIf, stepAxis } from "bapo/app/charts.js";
import { count, decimal, plural } from "bapo/app/format.js";
import { column, measuredAt } from "bapo/overview/columns.js";

const TONES = ["series-1", "series-2", "series-3", "series-4", "series-5", "series-6"];

/** "format 0.4, exact 0.1" */
export const inWords = (values) => Object.entries(values ?? {}).map(([name, value]) => `${name} ${decimal(value)}`).join(", ");

/** [[name, value of each step]]. */
function byName(steps, key) {
  const rows = column(steps, key);
  const names = [...new Set(rows.flatMap((row) => Object.keys(row ?? {})))];
  return names.map((name) => [name, rows.map((row) => row?.[name] ?? null)]);
}

function namedCard(grid, { key, title, id, note, y }) {
  const card = chartCard(grid, {
    title, id, note, height: 220,
    draw({ steps, index, length, held }) {
      const found = byName(steps, key);
      if (!length || !found.length) return null;
      const step = steps.step[index];
      const measured = measuredAt(held, step).filter((one) => one[key]).map((one) => ` Held out ${one.split}, after step ${one.step}, mean over ${plural(one.num_prompts, "prompt")}: ${inWords(one[key])}.`);
      return {
        summary: `Step ${step}: ${inWords(column(steps, key)[index]) || "no fresh group"}.${measured.join("")}`,
        option: {
          xAxis: stepAxis(steps.step), yAxis: { type: "value", ...y },
          series: found.slice(0, TONES.length).map(([name, values], i) => line(name, steps.step, values, TONES[i], { markLine: i ? undefined : atStep(step) })),
        },
        table: () => ({ caption: title, header: ["step", ...found.map(([name]) => name)], rows: steps.step.map((one, i) => [count(one), ...found.map(([, values]) => decimal(values[i], 4))]) }),
      };
    },
  });
  return shownIf((data) => column(data.steps, key).some(Boolean), card);
}

const most = `The chart has the first ${TONES.length}, the numbers have all.`;

export const rewardPartCards = (grid) => [
  namedCard(grid, {
    key: "reward_parts", title: "Components of the reward", id: "reward-parts", y: { min: 0, max: 1, name: "mean" },
    note: `Mean of each reward of task.reward over the fresh groups of a step, mapped to [0, 1]; the reward is their weighted mean. ${most}`,
  }),
  namedCard(grid, {
    key: "reward_facts", title: "Facts of responses", id: "reward-facts", y: { scale: true, name: "mean" },
    note: `Means over the fresh groups of a step of what reward functions report besides the reward. ${most}`,
  }),
];
