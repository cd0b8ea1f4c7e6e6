// Cards of runs with agents: turns and calls of tools of their episodes. Hidden in other runs.

import { atStep, chartCard, colour, line, shownIf, stepAxis } from "bapo/app/charts.js";
import { count, decimal, percent } from "bapo/app/format.js";
import { curves } from "bapo/overview/batches.js";
import { column } from "bapo/overview/columns.js";

const TONES = ["series-1", "series-2", "series-3", "series-4", "series-5"];
const REST = "other tools";

const isKnown = (values) => values.some((value) => value !== null && value !== undefined);

/** [[tool, calls per episode of each step]]: the most frequent of the run, and the others together. */
export function callsByTool(steps) {
  const rows = column(steps, "episode_calls_mean");
  const totals = {};
  for (const row of rows) for (const [name, calls] of Object.entries(row ?? {})) totals[name] = (totals[name] ?? 0) + calls;
  // "(others)" is a sum already, of what a step has beyond its most frequent names.
  const names = Object.keys(totals).filter((name) => name !== "(others)").sort((a, b) => totals[b] - totals[a]);
  const shown = names.slice(0, TONES.length);
  const found = shown.map((name) => [name, rows.map((row) => (row ? row[name] ?? 0 : null))]);
  if (shown.length === Object.keys(totals).length) return found;
  const rest = (row) => Object.entries(row).reduce((sum, [name, calls]) => (shown.includes(name) ? sum : sum + calls), 0);
  return [...found, [REST, rows.map((row) => (row ? rest(row) : null))]];
}

function calls(grid) {
  return chartCard(grid, {
    title: "Calls per episode", id: "tool-calls", height: 220,
    note: "Mean calls of each tool in the trained episodes of a step, from what the model wrote: <tool_call>{\"name\": ...}</tool_call>. Calls in other formats are not counted.",
    empty: "No calls in the format <tool_call>{\"name\": ...}</tool_call>.",
    draw({ steps, index, length, other }) {
      const found = callsByTool(steps);
      if (!length || !found.length) return null;
      const compared = other ? callsByTool(other.steps) : [];
      const tone = (i) => TONES[i] ?? "series-6";
      return {
        summary: `Step ${steps.step[index]}: ${found.map(([name, values]) => `${name} ${decimal(values[index])}`).join(", ")}.`,
        option: {
          xAxis: stepAxis(steps.step), yAxis: { type: "value", min: 0, name: "calls" },
          series: [
            ...found.map(([name, values], i) => line(name, steps.step, values, tone(i), { showSymbol: true, symbolSize: 3, markLine: i ? undefined : atStep(steps.step[index]) })),
            ...compared.map(([name, values]) => line(`${name}, ${other.name}`, other.steps.step, values, "text-soft", { lineStyle: { type: "dashed", width: 1.5, color: colour("text-soft") } })),
          ],
        },
        table: () => ({ caption: "Mean calls per episode", header: ["step", ...found.map(([name]) => name)], rows: steps.step.map((step, i) => [count(step), ...found.map(([, values]) => decimal(values[i], 4))]) }),
      };
    },
  });
}

const turns = (grid) =>
  curves(grid, {
    title: "Turns per episode", id: "turns", y: { min: 0, name: "turns", nameGap: 34 },
    note: "Mean calls of the model in the trained episodes of a step, whether or not a tool was called.",
    lines: [["episode_turns_mean", "turns", "series-1", { showSymbol: true, symbolSize: 3 }]],
    says: (steps, index) => {
      const at = (name) => column(steps, name)[index] ?? null;
      return `Step ${steps.step[index]}: ${decimal(at("episode_turns_mean"))} turns with ${decimal(at("episode_context_tokens_mean"), 1)} context tokens; ${percent(at("episode_forked_share"))} of the episodes have a fork.${at("episode_masked_share") ? ` ${percent(at("episode_masked_share"))} of the tokens were too old to train.` : ""}`;
    },
  });

export const episodeCards = (grid) => [turns(grid), calls(grid)].map((card) => shownIf(({ steps }) => isKnown(column(steps, "episode_turns_mean")), card));
