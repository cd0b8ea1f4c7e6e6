// Cards with curves over steps: what is learned, batches and buffers, and the optimizer.

import { atStep, chartCard, colour, line, shownIf, stepAxis } from "bapo/app/charts.js";
import { count, DASH, decimal, percent, plural } from "bapo/app/format.js";
import { column, mean, sum } from "bapo/overview/columns.js";

const ORIGINS = ["x1", "x2", "x3"];
const WORDS = { x1: "X1 fresh", x2: "X2 re-evaluated", x3: "X3 reused" };

/** Subsets that trained at some step: a method without re-evaluation or reuse has X1 only. */
const trained = (steps) => ORIGINS.filter((name) => name === "x1" || column(steps, name).some(Boolean));

/** A curve of the run that is compared with. */
const dashed = (name, steps, values) => line(name, steps, values, "text-soft", { lineStyle: { type: "dashed", width: 1.5, color: colour("text-soft") } });

/** A card with lines over steps: lines: [[column, name, colour, more]]. */
export function curves(grid, { title, note, lines, says, id, y = {}, height = 220, digits = 4, wide = false }) {
  return chartCard(grid, {
    title, note, id, height, wide,
    draw({ steps, index, length, other }) {
      const known = lines.filter(([name]) => column(steps, name).some((value) => value !== null));
      if (!length || !known.length) return null;
      return {
        summary: says?.(steps, index) ?? `Step ${steps.step[index]}: ${known.map(([name, words]) => `${words} ${decimal(column(steps, name)[index])}`).join(", ")}.`,
        option: {
          xAxis: stepAxis(steps.step),
          yAxis: { type: "value", scale: true, ...y },
          series: [
            ...known.map(([name, words, tone, more], at) => line(words, steps.step, column(steps, name), tone, { ...more, markLine: at ? undefined : atStep(steps.step[index]) })),
            ...(other ? known.map(([name, words]) => dashed(`${words}, ${other.name}`, other.steps.step, column(other.steps, name))) : []),
          ],
        },
        table: () => ({ header: ["step", ...known.map(([, words]) => words)], rows: steps.step.map((step, i) => [count(step), ...known.map(([name]) => decimal(column(steps, name)[i], digits))]) }),
      };
    },
  });
}

function composition(grid) {
  return chartCard(grid, {
    title: "Batch composition", id: "composition", wide: true, height: 280,
    note: "Groups trained at each step: X1 fresh and informative, X2 hard prompts that improved when re-evaluated, X3 reused high-quality groups; the dashed line is B (Fig. 8).",
    draw({ steps, index, length, run }) {
      if (!length) return null;
      const at = (name) => steps[name][index];
      const subsets = trained(steps);
      const total = sum(subsets.map(at));
      const parts = (name) => line(WORDS[name], steps.step, steps[name], name, {
        stack: "batch", step: "middle", sampling: undefined, showSymbol: false, lineStyle: { width: 0 }, areaStyle: { color: colour(name), opacity: 0.85 },
      });
      return {
        summary: `Step ${at("step")}: ${subsets.length > 1 ? `${subsets.map((name) => `${name.toUpperCase()} ${at(name)}`).join(" + ")} = ` : ""}${total} of B = ${at("batch_size")} groups (${percent(total / at("batch_size"), 0)}).`,
        isWarning: total < run.nearly_empty * at("batch_size"),
        option: {
          xAxis: stepAxis(steps.step),
          yAxis: { type: "value", minInterval: 1, name: "groups" },
          series: [
            ...subsets.map(parts),
            line("B", steps.step, steps.batch_size, "b", { step: "middle", showSymbol: false, lineStyle: { type: "dashed", width: 1.5, color: colour("b") }, markLine: atStep(at("step")) }),
          ],
        },
        table: () => ({
          caption: "Groups per step", header: ["step", ...subsets.map((name) => name.toUpperCase()), "batch", "B"],
          rows: steps.step.map((step, i) => [count(step), ...subsets.map((name) => count(steps[name][i])), count(sum(subsets.map((name) => steps[name][i]))), count(steps.batch_size[i])]),
        }),
      };
    },
  });
}

function thresholds(grid) {
  return chartCard(grid, {
    title: "Thresholds and mean reward", id: "thresholds", height: 220,
    note: "r_tot is the mean reward of all fresh responses. Prompts at c1 or below are hard; groups of B_high with a pass rate between c2 and c3, which follow r_tot (eq. 8), are reused.",
    draw({ steps, index, length, run }) {
      if (!length) return null;
      // Only what decides: a run without a window records one, too.
      const hard = run.c1 === null ? [] : [["c1", steps.step.map(() => run.c1), "b"]];
      const window = run.has_window ? [["c2", steps.c2, "series-4"], ["c3", steps.c3, "x3"]] : [];
      const total = column(steps, "r_tot").map((value, i) => value ?? steps.reward_mean[i]); // its own column if it is a moving average
      const named = [["r_tot", total, "series-6"], ...hard, ...window];
      const limits = [...hard, ...window];
      return {
        summary: `Step ${steps.step[index]}: r_tot ${decimal(total[index])}; ${limits.map(([name, values]) => `${name} ${decimal(values[index])}`).join(", ")}.`,
        option: {
          xAxis: stepAxis(steps.step), yAxis: { type: "value", min: 0, name: "pass rate" },
          series: named.map(([name, values, tone], i) => line(name, steps.step, values, tone, i ? {} : { markLine: atStep(steps.step[index]), lineStyle: { width: 1, color: colour(tone) } })),
        },
        table: () => ({ header: ["step", ...named.map(([name]) => name)], rows: steps.step.map((step, i) => [count(step), ...named.map(([, values]) => decimal(values[i], 4))]) }),
      };
    },
  });
}

/** "0", "2 to 3", "51 and more" for the ranges of age. */
export function rangesOf(ends) {
  const names = ends.map((end, i) => (i === 0 || ends[i - 1] + 1 === end ? `${end}` : `${ends[i - 1] + 1} to ${end}`));
  return [...names, `${ends[ends.length - 1] + 1} and more`];
}

function ages(grid) {
  return chartCard(grid, {
    title: "Ages in B_bad and B_high", id: "ages", height: 220,
    note: "Entries after the selected step by age: steps since insertion.",
    empty: "Ages are unknown: they require the groups of all steps, which cannot be read or replayed here.",
    draw({ steps, index, length, run }) {
      const bad = column(steps, "bad_ages")[index];
      const high = column(steps, "high_ages")[index];
      if (!length || !bad) return null;
      const names = rangesOf(run.age_ends);
      const bars = (name, data, tone) => ({ type: "bar", name, data, itemStyle: { color: colour(tone), borderRadius: [3, 3, 0, 0] }, barMaxWidth: 26 });
      return {
        summary: `Step ${steps.step[index]}: B_bad ${plural(sum(bad), "prompt")}, the oldest ${oldest(steps.bad_oldest[index])}; B_high ${plural(sum(high), "group")}, the oldest ${oldest(steps.high_oldest[index])}.`,
        option: {
          xAxis: { type: "category", data: names, name: "age in steps" }, yAxis: { type: "value", minInterval: 1, name: "entries" },
          series: [bars("B_bad prompts", bad, "x2"), bars("B_high groups", high, "x3")],
        },
        table: () => ({ caption: `Entries after step ${steps.step[index]}`, header: ["age in steps", "B_bad", "B_high"], rows: names.map((name, i) => [name, count(bad[i]), count(high[i])]) }),
      };
    },
  });
}

const oldest = (age) => (age === null ? DASH : `${plural(age, "step")} old`);

function staleness(grid) {
  return curves(grid, {
    title: "Staleness", id: "staleness", y: { min: 0, name: "steps" },
    note: "Steps between the policy version that sampled a group and the step that trained it: the mean of each subset.",
    lines: ORIGINS.map((name) => [`staleness_${name}_mean`, WORDS[name], name, { showSymbol: true, symbolSize: 3 }]),
    says: (steps, index) => `Step ${steps.step[index]}: ${trained(steps).map((name) => `${name.toUpperCase()} ${decimal(column(steps, `staleness_${name}_mean`)[index])} (at most ${count(column(steps, `staleness_${name}_max`)[index])})`).join(", ")}.`,
  });
}

const over = (steps, name, index, width = 20) => mean(column(steps, name).slice(Math.max(0, index - width + 1), index + 1));

const hasBuffers = ({ run }) => run?.has_buffers;

/** All cards of this file, in order. */
export const batchCards = (grid) => [
  composition(grid),
  shownIf(({ run }) => run && (run.c1 !== null || run.has_window), thresholds(grid)),
  shownIf(hasBuffers, curves(grid, {
    title: "B_bad and B_high", id: "tables", note: "Hard prompts waiting for re-evaluation, and groups eligible for reuse, after each step.", y: { min: 0, minInterval: 1, name: "entries" },
    lines: [["num_bad", "B_bad prompts", "x2"], ["num_high", "B_high groups", "x3"]],
  })),
  shownIf(hasBuffers, ages(grid)),
  staleness(grid),
];

/** The curves that say whether the run learns; held-out results are of bapo/overview/prompts. */
export const rewardCard = (grid) =>
  curves(grid, {
    title: "Mean reward", id: "reward", note: "Over all fresh responses of a step, before filtering (Fig. 4).",
    lines: [["reward_mean", "mean reward", "series-1"]], y: { min: 0, name: "reward" }, height: 260,
    says: (steps, index) => `Step ${steps.step[index]}: ${decimal(steps.reward_mean[index])}; mean of the last ${plural(Math.min(20, index + 1), "step")} ${decimal(over(steps, "reward_mean", index))}.`,
  });

export const policyCards = (grid) => [
  shownIf(({ steps }) => column(steps, "teacher_kl").some((value) => value !== null), curves(grid, {
    title: "Distance to the teacher", id: "teacher-kl", note: "Reverse KL of the policy that sampled to the teacher, mean over the trained tokens (distillation).",
    lines: [["teacher_kl", "reverse KL", "series-2"]], y: { name: "nats per token" },
  })),
  curves(grid, { title: "Entropy", id: "entropy", note: "Policy entropy on the trained tokens.", lines: [["entropy", "entropy", "series-3"]], y: { name: "nats per token" } }),
  curves(grid, { title: "Response length", id: "length", note: "Mean over a step's fresh responses.", lines: [["response_tokens", "response length", "series-4"]], y: { min: 0, name: "tokens" } }),
  curves(grid, { title: "Throughput", id: "throughput", note: "Tokens trained, divided by the duration of the whole step.", lines: [["tokens_per_s", "trained tokens", "series-6"]], y: { min: 0, name: "tokens per second" } }),
];

/** The optimizer's curves. */
export const learnerCards = (grid) => [
  curves(grid, { title: "Loss", id: "loss", note: "Mean over the step's optimizer updates.", lines: [["loss", "loss", "series-4"]], y: { name: "loss" } }),
  curves(grid, { title: "Gradient norm", id: "grad-norm", note: "Before clipping.", lines: [["grad_norm", "gradient norm", "series-2"]], y: { min: 0, name: "norm" } }),
  curves(grid, {
    title: "Clipped tokens", id: "clipping", note: "Share of tokens whose importance ratio was clipped.", lines: [["clip_ratio", "clipped share", "series-5"]], y: { min: 0, name: "share" },
    says: (steps, index) => `Step ${steps.step[index]}: ${percent(column(steps, "clip_ratio")[index])} of the tokens clipped, largest ratio ${decimal(column(steps, "ratio_max")[index])}, KL ${decimal(column(steps, "kl")[index])} nats.`,
  }),
];
