"""Accuracies of methods over seeds and prompts: after training, and at equal responses.

With partial credit they are mean rewards, and named so (`measure`).

A measurement during a run has fewer prompts than those at its ends, so a curve has it as the base's accuracy on all
prompts plus the change on the shared ones. Cost is the responses sampled for training, fresh and re-evaluated. At equal
responses, accuracies are those of evaluations at the budget itself (`evaluation.at_responses`), not interpolated ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bapo.core.correctness import measure_of, pass_at_k
from bapo.core.statistics import Estimate
from bapo.core.text import count
from bapo.runtime.run_directory.curves import BASE_VERSION
from studies.compare.gather import Measured, Method, Row, prompt_means
from studies.significance import Tested, crossed


def measure(runs: Iterable[Measured], splits: Sequence[str]) -> str:
    """What the means of these splits are called, in all runs that are compared."""
    return measure_of(row for run in runs for row in run.evaluations if row["split"] in splits)


def final_accuracy(method: Method, split: str) -> Estimate | None:
    """Accuracy after training, with its interval over seeds and prompts; None when it was not measured."""
    return _over(_tables(method.runs, split, last=True))


def base_accuracy(runs: Iterable[Measured], split: str) -> Estimate | None:
    """Accuracy of the base model, over all its measurements."""
    return _over(_tables(runs, split, last=False))


def final_pass_at_k(method: Method, split: str, k: int) -> Estimate | None:
    """pass@k after training, over seeds and prompts; None when it was not measured with k responses."""
    return _over([_pass_at_k(run.after(split), k) for run in method.runs])


def base_pass_at_k(runs: Iterable[Measured], split: str, k: int) -> Estimate | None:
    """pass@k of the base model, over all its measurements."""
    return _over([_pass_at_k(run.before(split), k) for run in runs])


def difference(reference: Method, method: Method, split: str) -> Tested | None:
    """Method - reference after training, over shared seeds and prompts; None without a shared seed."""
    pairs = [
        (run.means(split, last=True), other.means(split, last=True)) for run, other in shared_seeds(method, reference)
    ]
    table = [
        [ours[p] - theirs[p] for p in sorted(set(ours) & set(theirs))] for ours, theirs in pairs if ours and theirs
    ]
    return crossed(table) if table and len(table[0]) > 1 else None


def curve(run: Measured, split: str) -> list[tuple[int, float]]:
    """(step, accuracy) of every measurement, each as the base's accuracy plus the change on shared prompts."""
    rows = run.rows(split)
    base = next((row for row in rows if row["version"] == BASE_VERSION), None)
    if base is None:
        return [(int(row["step"]), float(row["accuracy"])) for row in rows]
    points = []
    for row in rows:
        shared = [prompt for prompt in base["rewards"] if prompt in row["rewards"]]
        if not shared:
            points.append((int(row["step"]), float(row["accuracy"])))
            continue
        change = _mean(row["rewards"], shared) - _mean(base["rewards"], shared)
        points.append((int(row["step"]), _mean(base["rewards"], list(base["rewards"])) + change))
    return points


def average_curve(run: Measured, splits: Sequence[str]) -> list[tuple[int, float]]:
    """The mean of the splits' curves at the steps that all of them have."""
    curves = [dict(curve(run, split)) for split in splits]
    steps = sorted(set(curves[0]).intersection(*curves[1:])) if curves else []
    return [(step, sum(values[step] for values in curves) / len(curves)) for step in steps]


def rollouts_at(run: Measured, step: int) -> int:
    """Responses for training up to and with a step; 0 before the first."""
    spent = run.ledger.rollouts_by_step
    known = [done for done in spent if done <= step]
    return spent[max(known)] if known else 0


def _tables(runs: Iterable[Measured], split: str, *, last: bool) -> list[dict[str, float]]:
    return [means for run in runs if (means := run.means(split, last=last))]


def final_majority(method: Method, split: str) -> Estimate | None:
    """maj@k after training with all k responses, over seeds and prompts; None when answers are not extracted."""
    return _over([_majority(run.after(split)) for run in method.runs])


def base_majority(runs: Iterable[Measured], split: str) -> Estimate | None:
    """maj@k of the base model, over all its measurements."""
    return _over([_majority(run.before(split)) for run in runs])


def _majority(row: Row | None) -> dict[str, float]:
    return dict((row or {}).get("majority") or {})


def _pass_at_k(row: Row | None, k: int) -> dict[str, float]:
    rewards: Mapping[str, Sequence[float]] = {} if row is None else row["rewards"]
    return {prompt: pass_at_k(found, k) for prompt, found in rewards.items() if len(found) >= k}


def _over(tables: Sequence[Mapping[str, float]]) -> Estimate | None:
    tables = [table for table in tables if table]
    if not tables:
        return None
    prompts = [prompt for prompt in tables[0] if all(prompt in other for other in tables[1:])]
    if len(prompts) < 2:
        return None
    return crossed([[means[prompt] for prompt in prompts] for means in tables])


def _mean(rewards: Mapping[str, Sequence[float]], prompts: Sequence[str]) -> float:
    return sum(sum(rewards[p]) / len(rewards[p]) for p in prompts) / len(prompts)


Means = Mapping[str, float]
"""Prompt id -> share of right responses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AtEqualResponses:
    """A method and a reference after as many training responses, paired by seed and prompt."""

    budget: int
    """Training responses: what the cheapest of their runs spent in all."""
    seeds: tuple[int, ...]
    num_prompts: int
    method: float
    reference: float
    """Mean accuracies on these prompts."""
    difference: Tested


def at_equal_responses(
    method: Method, reference: Method, split: str, budget: int | None = None
) -> AtEqualResponses | str:
    """Their paired difference after as many training responses, or why there is none.

    Args:
        budget: None: the largest of `evaluation.at_responses` that both were measured at, or what the cheapest of
            their runs spent in all.
    """
    runs = list(shared_seeds(method, reference))
    if not runs:
        return "no seed in common"
    if budget is None:
        common = set.intersection(*(_budgets_of(run, split) for pair in runs for run in pair))
        budget = max(common, default=min(run.ledger.rollouts for pair in runs for run in pair))
    tables: list[tuple[Means, Means]] = []
    for ours, theirs in runs:
        a, b = means_at(ours, split, budget), means_at(theirs, split, budget)
        if isinstance(a, str):
            return a
        if isinstance(b, str):
            return b
        tables.append((a, b))
    prompts = [p for p in tables[0][0] if all(p in means for pair in tables for means in pair)]
    if len(prompts) < 2:
        return f"{len(prompts)} prompts are in all evaluations after {count(budget)} responses"
    return AtEqualResponses(
        budget=budget,
        seeds=tuple(ours.seed for ours, _ in runs),
        num_prompts=len(prompts),
        method=sum(_mean_on(a, prompts) for a, _ in tables) / len(tables),
        reference=sum(_mean_on(b, prompts) for _, b in tables) / len(tables),
        difference=crossed([[a[p] - b[p] for p in prompts] for a, b in tables]),
    )


def _budgets_of(run: Measured, split: str) -> set[int]:
    """Those of `evaluation.at_responses` that it was measured at, the last of them perhaps after training."""
    return {
        budget for budget in run.config.evaluation.at_responses if not isinstance(means_at(run, split, budget), str)
    }


def means_at(run: Measured, split: str, budget: int) -> Means | str:
    """Each prompt's accuracy after this many training responses, or why there is no answer.

    Measured for this budget, with the first weights that workers got after it; or less than one step's responses away
    from it: there are no weights in between. An evaluator that was busy at a budget measures later: not for that one.
    """
    rows = run.rows(split)
    if not rows:
        return f"{run.name} has no evaluation of {split}"
    of_step = max(run.ledger.rollouts / run.num_steps, 1)
    until_workers_have_weights = of_step * (run.config.cadence.weight_sync_interval + 1)
    for row in rows:
        if row.get("at_responses") == budget and _spent(run, row) - budget <= until_workers_have_weights:
            return prompt_means(row)
    nearest = min(rows, key=lambda row: abs(_spent(run, row) - budget))
    if abs(_spent(run, nearest) - budget) >= of_step:
        return f"{run.name} was not evaluated at {count(budget)} responses: set evaluation.at_responses = [{budget}]"
    return prompt_means(nearest)


def shared_seeds(method: Method, other: Method) -> Iterator[tuple[Measured, Measured]]:
    theirs = {run.seed: run for run in other.runs}
    yield from ((run, theirs[run.seed]) for run in method.runs if run.seed in theirs)


def _spent(run: Measured, row: Row) -> int:
    """Training responses before a measurement."""
    return 0 if row["version"] == BASE_VERSION else rollouts_at(run, int(row["step"]))


def _mean_on(means: Means, prompts: Sequence[str]) -> float:
    return sum(means[prompt] for prompt in prompts) / len(prompts)
