// Off-policy diagnostics: how far the policies are apart, the effective sample size, and the bound of theorem 3.2.

import { atStep, chartCard, colour, line, stepAxis } from "bapo/app/charts.js";
import { count, decimal, plural } from "bapo/app/format.js";
import { column, newestWith } from "bapo/overview/columns.js";

const ORIGINS = ["x1", "x2", "x3"];
const BOUND = { origin: 0, groups: 1, gain: 2, theta: 3, current: 4, paper: 5, paperVacuous: 6, tight: 7, tightVacuous: 8 };

function meter(grid, { title, note, prefix, id, limit, isBelow, y }) {
  return chartCard(grid, {
    title, note, id, height: 220, empty: "No data: diagnostics.every is 0, or no step has diagnostics yet.",
    draw({ steps, index, length, run }) {
      const known = ORIGINS.filter((name) => column(steps, `${prefix}_${name}`).some((value) => value !== null));
      if (!length || !known.length) return null;
      const worst = run[limit];
      const at = newestWith(steps, known.map((name) => `${prefix}_${name}`), index); // with diagnostics.every > 1 not every step has values
      const values = known.map((name) => [name.toUpperCase(), at < 0 ? null : steps[`${prefix}_${name}`][at]]);
      const past = values.filter(([, value]) => value !== null && (isBelow ? value < worst : value > worst)).map(([name]) => name);
      return {
        summary: at < 0
          ? `Not measured up to step ${steps.step[index]}.`
          : `${at < index ? "Last measured in step" : "Step"} ${steps.step[at]}: ${values.map(([name, value]) => `${name} ${decimal(value)}`).join(", ")}; ${past.length ? `${past.join(" and ")} past the limit` : "within the limit"} of ${decimal(worst)}.`,
        option: {
          xAxis: stepAxis(steps.step), yAxis: { type: "value", min: 0, name: "share", ...y },
          series: [
            ...known.map((name, i) => line(name.toUpperCase(), steps.step, steps[`${prefix}_${name}`], name, { showSymbol: true, symbolSize: 3, sampling: undefined, markLine: i ? undefined : atStep(steps.step[index]) })),
            line("limit", steps.step, steps.step.map(() => worst), "b", { lineStyle: { type: "dashed", width: 1.2, color: colour("b") } }),
          ],
        },
        table: () => ({ header: ["step", ...known.map((name) => name.toUpperCase())], rows: steps.step.map((step, i) => [count(step), ...known.map((name) => decimal(steps[`${prefix}_${name}`][i], 4))]) }),
      };
    },
  });
}

function bound(grid) {
  return chartCard(grid, {
    title: "The bound of theorem 3.2", id: "bound", height: 220,
    note: "The estimated right-hand side per subset: gain minus penalties, as printed. Vacuous: not above 0 by more than its noise, so the theorem guarantees no improvement for that step, which does not mean that there was none.",
    empty: "No bound has been estimated yet.",
    draw({ steps, index, length }) {
      const all = column(steps, "bounds").map((list) => list ?? []);
      if (!length || !all.some((list) => list.length)) return null;
      const of = (list, name) => list.find((one) => one[BOUND.origin] === name);
      const known = ORIGINS.filter((name) => all.some((list) => of(list, name)));
      const now = known.map((name) => [name, of(all[index], name)]).filter(([, one]) => one);
      const every = all.flat();
      const vacuous = every.filter((one) => one[BOUND.paperVacuous]).length;
      const verdict = ([name, one]) => `${name.toUpperCase()} ${decimal(one[BOUND.paper])}, ${one[BOUND.paperVacuous] ? "vacuous" : "not vacuous"}`;
      const values = (name) => all.map((list) => of(list, name)?.[BOUND.paper] ?? null);
      return {
        summary: `Step ${steps.step[index]}: ${now.length ? now.map(verdict).join("; ") : "no bound"}. Over the run ${count(vacuous)} of ${count(every.length)} bounds are vacuous.`,
        option: {
          xAxis: stepAxis(steps.step), yAxis: { type: "value", name: "improvement" },
          series: known.map((name, i) => line(name.toUpperCase(), steps.step, values(name), name, { showSymbol: true, symbolSize: 3, sampling: undefined, markLine: i ? undefined : atStep(steps.step[index]) })),
        },
        table: () => ({
          caption: `Bounds of step ${steps.step[index]}`, header: ["subset", "groups", "gain", "penalty, theta", "penalty, theta_t", "as printed", "tight"],
          rows: now.map(([name, one]) => [name.toUpperCase(), count(one[BOUND.groups]), decimal(one[BOUND.gain]), decimal(one[BOUND.theta]), decimal(one[BOUND.current]),
            `${decimal(one[BOUND.paper])}${one[BOUND.paperVacuous] ? " vacuous" : ""}`, `${decimal(one[BOUND.tight])}${one[BOUND.tightVacuous] ? " vacuous" : ""}`]),
        }),
      };
    },
  });
}

function byAge(grid) {
  return chartCard(grid, {
    title: "Distance by age", id: "by-age", height: 220,
    note: "Total variation per token of the selected step, by subset and age: steps since sampling for X1 and X2, since the first use for X3.",
    empty: "No diagnostics for the selected step.",
    draw({ steps, index, length }) {
      const cells = (length && column(steps, "cells")[index]) || [];
      if (!cells.length) return null;
      const ages = [...new Set(cells.map((cell) => cell[1]))].sort((a, b) => a - b);
      const known = ORIGINS.filter((name) => cells.some((cell) => cell[0] === name));
      const of = (name, age) => cells.find((cell) => cell[0] === name && cell[1] === age);
      const farthest = cells.reduce((one, other) => (other[3] > one[3] ? other : one));
      return {
        summary: `Step ${steps.step[index]}: farthest is ${farthest[0].toUpperCase()} of age ${farthest[1]} (${plural(farthest[2], "group")}): total variation ${decimal(farthest[3])}, effective size ${decimal(farthest[4])}.`,
        option: {
          xAxis: { type: "category", data: ages, name: "age in steps" }, yAxis: { type: "value", min: 0, name: "total variation" },
          series: known.map((name) => ({ type: "bar", name: name.toUpperCase(), barMaxWidth: 26, itemStyle: { color: colour(name), borderRadius: [3, 3, 0, 0] }, data: ages.map((age) => of(name, age)?.[3] ?? null) })),
        },
        table: () => ({ header: ["subset and age", "groups", "total variation", "effective size", "delta"], rows: cells.map((cell) => [`${cell[0].toUpperCase()}, age ${cell[1]}`, count(cell[2]), ...cell.slice(3).map((value) => decimal(value))]) }),
      };
    },
  });
}

/** All cards of this file, in order. */
export const theoryCards = (grid) => [
  meter(grid, { title: "Total variation per token", id: "tv", prefix: "tv", limit: "tv_warn", note: "Between the sampling policy and theta_t, mean of each subset; the dashed line is diagnostics.tv_warn." }),
  meter(grid, { title: "Effective sample size", id: "ess", prefix: "ess", limit: "ess_warn", isBelow: true, y: { max: 1 }, note: "As a share of the responses, under theta_t; the dashed line is diagnostics.ess_warn." }),
  bound(grid),
  byAge(grid),
];
