// The bottleneck: step time by phase, queues, and the outcome of the groups.

import { atStep, chartCard, colour, line, stepAxis } from "bapo/app/charts.js";
import { el, table } from "bapo/app/dom.js";
import { count, decimal, duration, percent, plural } from "bapo/app/format.js";
import { column, mean, sum } from "bapo/overview/columns.js";

const PHASES = [
  ["wait_batch_s", "waiting for the batch", "series-2"],
  ["prox_s", "proximal log-probs", "series-4"],
  ["update_s", "forward, backward, optimizer", "series-1"],
  ["diagnostics_s", "diagnostics", "series-5"],
  ["sync_s", "weight update of the workers", "series-3"],
  ["checkpoint_s", "checkpoint", "series-6"],
];
const WINDOW = 20;

const BESIDES = "checkpoint_s";

/** Seconds of every step with its checkpoint, which step_s does not contain; null where unknown. */
export const wholes = (steps) => column(steps, "step_s").map((own, i) => (own === null ? null : own + (column(steps, BESIDES)[i] ?? 0)));

/** Seconds of each phase of every step, and what is left of the step. */
export function phases(steps) {
  const known = PHASES.map(([name, words, tone]) => ({ words, tone, values: column(steps, name).map((value) => value ?? 0) }));
  const left = wholes(steps).map((total, i) => Math.max(0, (total ?? 0) - sum(known.map(({ values }) => values[i]))));
  return [...known, { words: "everything else", tone: "even", values: left }];
}

function time(grid) {
  return chartCard(grid, {
    title: "Step time by phase", id: "phases", wide: true, height: 260,
    note: "Seconds of the learner's step and of its checkpoint, by phase.",
    draw({ steps, index, length }) {
      if (!length || !column(steps, "step_s").some((value) => value !== null)) return null;
      const parts = phases(steps);
      const from = Math.max(0, index - WINDOW + 1);
      const totals = wholes(steps).slice(from, index + 1);
      const share = (values) => sum(values.slice(from, index + 1)) / (sum(totals) || 1);
      const waits = share(parts[0].values);
      const groups = sum(column(steps, "new_groups").slice(from, index + 1));
      const per = (name) => duration(groups ? sum(column(steps, name).slice(from, index + 1)) / groups : null);
      const who = waits > 0.3 ? "the workers are the bottleneck" : waits < 0.05 ? "the learner is the bottleneck" : "learner and workers are near balance";
      return {
        summary: `Of the last ${plural(index - from + 1, "step")}, ${duration(mean(totals))} each, ${percent(waits)} went into waiting for the batch: ${who}. A new group took ${per("sample_s")} to sample and ${per("grade_s")} to grade.`,
        option: {
          xAxis: stepAxis(steps.step), yAxis: { type: "value", min: 0, name: "seconds" },
          series: parts.map(({ words, tone, values }, i) => line(words, steps.step, values, tone, { stack: "time", sampling: undefined, showSymbol: false, step: "middle", lineStyle: { width: 0 }, areaStyle: { color: colour(tone), opacity: 0.85 }, markLine: i ? undefined : atStep(steps.step[index]) })),
        },
        table: () => ({ caption: `The last ${plural(index - from + 1, "step")} up to step ${steps.step[index]}`, header: ["phase", "mean per step", "share"], rows: parts.map(({ words, values }) => [words, duration(mean(values.slice(from, index + 1))), percent(share(values))]) }),
      };
    },
  });
}

function queues(grid) {
  return chartCard(grid, {
    title: "Queues", id: "queues",
    note: "Current content of the buffer; only available while the run is active.",
    empty: "The buffer service of this run is not running or does not respond.",
    draw({ live }) {
      if (!live) return null;
      const now = live.status;
      const purposes = [...new Set([...Object.keys(now.queued), ...Object.keys(now.leased)])];
      const waiting = sum(Object.values(now.queued));
      const rows = [
        ...purposes.map((purpose) => [`requests: ${purpose}`, `${count(now.queued[purpose] ?? 0)} waiting, ${count(now.leased[purpose] ?? 0)} at workers`]),
        ["fresh groups ready", count(now.fresh_ready)],
        ["re-evaluated groups ready", count(now.reevaluated_ready)],
        ["groups held", `${decimal(now.num_bytes / 1e6)} MB`],
        ["failures in a row", `${count(now.failures_in_a_row)}${now.last_failure ? ` (${now.last_failure})` : ""}`],
        ...Object.entries(now.workers).map(([name, worker]) => [`worker ${name}`, Object.entries(worker).map(([key, value]) => `${key.replaceAll("_", " ")} ${typeof value === "number" ? decimal(value, 4) : value}`).join(", ")]),
      ];
      return {
        summary: `Step ${count(now.step)} is under way with policy version ${count(now.policy_version)}: ${plural(waiting, "request")} wait for a worker, ${plural(now.fresh_ready, "fresh group")} for the learner.`,
        body: el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Queues now" }, table({ header: ["what", "now"], rows })),
      };
    },
  });
}

function results(grid) {
  return chartCard(grid, {
    title: "Outcome of the groups", id: "results",
    note: "Every group that batch assembly read for the selected step, by the rule that applied.",
    empty: "No group data are available for this step.",
    draw({ steps, index, length, meanings }) {
      const found = (length && column(steps, "reasons")[index]) || {};
      const rows = Object.entries(found);
      if (!rows.length) return null;
      return {
        summary: `Step ${steps.step[index]} read ${plural(sum(rows.map(([, number]) => number)), "group")}.`,
        body: el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Outcome of the groups" },
          table({ header: ["rule", "groups", "what it means"], numeric: [1], rows: rows.map(([reason, number]) => [el("code", {}, reason), count(number), meanings[reason] ?? ""]) })),
      };
    },
  });
}

/** All cards of this file, in order. */
export const waitingCards = (grid) => [time(grid), queues(grid), results(grid)];
