// The run at a glance.

import { atStep, chartCard, colour, line, stepAxis } from "bapo/app/charts.js";
import { el } from "bapo/app/dom.js";
import { follow } from "bapo/app/data.js";

/** Columns that grow: the first answer, and what comes behind it. */
export function grow(columns, answer) {
  const isSame = columns.generation === answer.generation && answer.first > 0;
  const known = isSame ? columns.steps : {};
  const steps = {};
  for (const [name, values] of Object.entries(answer.steps)) steps[name] = isSame ? [...known[name].slice(0, answer.first), ...values] : values;
  return { generation: answer.generation, steps, length: steps.step.length };
}

function mount(root, shell) {
  const heading = el("h1", {}, "Overview");
  const grid = el("div", { class: "grid" });
  root.append(heading, grid);
  let columns = { generation: 0, steps: {}, length: 0 };
  const composition = chartCard(grid, {
    title: "Batch composition", note: "Groups of each batch by origin, against B (Fig. 8)", wide: true, id: "composition",
    draw: ({ steps }) => steps.step.length ? {
      summary: `${steps.step.length} steps`,
      option: {
        xAxis: stepAxis(steps.step), yAxis: { type: "value" },
        series: ["x1", "x2", "x3"].map((o) => line(o.toUpperCase(), steps.step, steps[o], o, { stack: "batch", areaStyle: { color: colour(o), opacity: 0.5 }, markLine: atStep(null) })),
      },
      table: () => ({ header: ["step", "X1", "X2", "X3"], rows: steps.step.map((s, i) => [String(s), steps.x1[i], steps.x2[i], steps.x3[i]].map(String)) }),
    } : null,
  });
  const following = follow(async (source) => {
    const answer = await source.get("overview", { since: columns.length, generation: columns.generation });
    columns = grow(columns, answer);
    shell.setTitle(answer.run.name);
    composition.show(columns);
    return !answer.is_complete;
  }, shell.setState);
  return { unmount: following.stop };
}

export default { name: "overview", title: "Overview", order: 1, mount };
