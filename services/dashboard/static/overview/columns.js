// The steps of a run as columns, and what the cards ask of them. No drawing here.

/** Nothing known yet. */
export const none = () => ({ generation: 0, first: 0, measured: 0, length: 0, steps: { step: [] }, held: [], meanings: {}, run: null });

/** What is known, and an answer of the endpoint `overview`, together. */
export function grow(known, answer) {
  const isSame = known.generation === answer.generation && answer.first > 0;
  const steps = {};
  for (const [name, values] of Object.entries(answer.steps)) {
    steps[name] = isSame ? known.steps[name].slice(0, answer.first).concat(values) : values;
  }
  return {
    generation: answer.generation,
    measured: answer.measured,
    length: steps.step.length,
    steps,
    held: answer.held_out ?? (known.generation === answer.generation ? known.held : []),
    meanings: answer.meanings ?? known.meanings,
    run: answer.run,
    problem: answer.problem,
  };
}

/** Columns of the compositions that the buffer itself keeps, for a run whose records cannot be reached. */
export function fromBuffer(batches, run) {
  const names = ["step", "x1", "x2", "x3", "c2", "c3", "num_bad", "num_high"];
  const steps = Object.fromEntries(names.map((name) => [name, batches.map((batch) => batch[name] ?? null)]));
  steps.reward_mean = batches.map((batch) => batch.r_tot ?? null);
  steps.batch_size = batches.map(() => run.batch_size);
  return { ...none(), steps, length: batches.length, run };
}

/** A column; nulls where the run has none. */
export const column = (steps, name) => steps[name] ?? steps.step.map(() => null);

/** Index of the last step that is not after `step`; that of the newest for null. */
export function indexOf(steps, step) {
  const last = steps.step.length - 1;
  if (step === null) return last;
  let index = last;
  while (index > 0 && steps.step[index] > step) index -= 1;
  return index;
}

/** Index of the newest step up to `index` that has a value in one of these columns; -1 without one. */
export function newestWith(steps, names, index) {
  const columns = names.map((name) => column(steps, name));
  while (index >= 0 && !columns.some((values) => (values[index] ?? null) !== null)) index -= 1;
  return index;
}

/** [size][size] prompts by (bin at the first visit, bin at the last one up to this step). */
export function matrixAt(steps, index, size) {
  const cells = new Array(size * size).fill(0);
  for (const changes of column(steps, "moved").slice(0, index + 1)) {
    for (let at = 0; changes && at < changes.length; at += 2) cells[changes[at]] += changes[at + 1];
  }
  return Array.from({ length: size }, (_, row) => cells.slice(row * size, (row + 1) * size));
}

/** Sums above, on and below the diagonal. */
export function movement(matrix) {
  const found = { better: 0, same: 0, worse: 0, total: 0 };
  matrix.forEach((row, first) => row.forEach((number, last) => {
    found[last > first ? "better" : last < first ? "worse" : "same"] += number;
    found.total += number;
  }));
  return found;
}

/** Sum of the bins of some steps, as shares; null without groups. */
export function shares(bins) {
  const known = bins.filter(Boolean);
  const sums = known[0]?.map((_, k) => known.reduce((sum, one) => sum + one[k], 0)) ?? [];
  const total = sums.reduce((sum, number) => sum + number, 0);
  return total ? sums.map((number) => number / total) : null;
}

/** The held-out measurements up to a step: {split, measure, step, accuracy, low, high, change, matrix} of the newest of each split. */
export function measuredAt(held, step) {
  return held.map((split) => {
    let index = 0;
    while (index + 1 < split.step.length && split.step[index + 1] <= step) index += 1;
    return { split: split.split, measure: split.measure, index, step: split.step[index], accuracy: split.accuracy[index], low: split.low[index], high: split.high[index], change: split.change[index], num_prompts: split.num_prompts[index], matrix: split.matrices[index], num_samples: split.num_samples, reward_parts: split.reward_parts?.[index], reward_facts: split.reward_facts?.[index] };
  });
}

export const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);
export const mean = (values) => {
  const known = values.filter((value) => value !== null && value !== undefined);
  return known.length ? sum(known) / known.length : null;
};
