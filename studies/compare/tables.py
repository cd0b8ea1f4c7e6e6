"""Tables of a comparison as rows of text for terminal, page and files; the paper's own numbers next to them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from bapo.config.check import shown
from bapo.config.layers import dotted, flatten
from bapo.config.tree import Config
from bapo.core.correctness import ACCURACY, PASSES
from bapo.core.statistics import Estimate
from bapo.core.text import count, duration
from bapo.core.types import Origin
from studies.compare.accuracy import (
    AtEqualResponses,
    at_equal_responses,
    base_accuracy,
    base_majority,
    base_pass_at_k,
    difference,
    final_accuracy,
    final_majority,
    final_pass_at_k,
    measure,
)
from studies.compare.composition import (
    gradient_norm,
    improved_share,
    is_on_policy,
    last_entropy,
    last_length,
    num_reevaluated,
    retained_share,
    share_of,
    solved_share,
    stored_share,
)
from studies.compare.gather import Compared, Measured, Method, changed_settings, contrasts
from studies.compare.prompts import (
    Matrix,
    Unsolved,
    above_floor,
    base_of,
    bases,
    floor,
    floor_matrix,
    fresh_visits,
    held_out_matrix,
    named_bases,
    rescued,
    rescued_more,
    training_matrix,
    unsolved,
)
from studies.compare.reevaluation import second_looks
from studies.significance import Tested, holm

DASH = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    key: str
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def name_of(method: Method) -> str:
    """Its label, with a star where it is unequal on purpose."""
    return f"{method.label} *" if method.may_differ else method.label


def interval(found: Estimate | None) -> str:
    """ "31.9 [30.5, 33.2]" in percent, cut at 0 and 100."""
    if found is None:
        return DASH
    return f"{percent(found.mean)} [{percent(max(0.0, found.low))}, {percent(min(1.0, found.high))}]"


def points(found: Estimate | None) -> str:
    """ "+7.0 [+5.4, +8.5]" in points."""
    return DASH if found is None else f"{100 * found.mean:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"


def percent(value: float) -> str:
    """.319 -> 31.9."""
    return f"{100 * value:.1f}"


def spread(values: Sequence[float], shown: Callable[[float], str]) -> str:
    """Mean, and the least and the most where they differ from it as shown."""
    if not values:
        return DASH
    mean, least, most = map(shown, (_mean(values), min(values), max(values)))
    return mean if least == most else f"{mean} ({least} to {most})"


PATH = Path(__file__).with_name("published.toml")
SIZE = re.compile(r"(?<![\d.])(\d+(?:\.\d+)?)[Bb](?![a-zA-Z])")
"""Of a model, as its name has it: Qwen2.5-Math-7B."""
LARGE = 4.0
"""Billion parameters from which a model is nearer to the paper's 7 B than to its 1.5 B."""


@cache
def published() -> dict[str, Any]:
    return tomllib.loads(PATH.read_text(encoding="utf-8"))


def section_of(config: Config) -> str:
    """The paper's task and model that are nearest to a run's: a section of the file, or "" where there is none."""
    if config.task.name == "countdown":
        size = SIZE.search(Path(config.model.path).name)
        return "planning_7b" if size and float(size[1]) > LARGE else "planning"
    reward = config.task.reward or config.task.options.get("reward")
    return "math" if config.task.name == "mathematics" or str(reward).startswith("bapo.tasks.mathematics:") else ""


def published_of(config: Config, method: str) -> dict[str, Any]:
    """What the paper says of a method (named as its preset) where it is nearest to this run; may be empty."""
    section: dict[str, Any] = published().get(section_of(config), {})
    return dict(section.get(_key(method), {}))


def _key(method: str) -> str:
    return method.replace("-", "_")


def table_against(compared: Compared) -> Table:
    pairs = [(one, split) for one in contrasts(compared) for split in compared.splits]
    found = [difference(one.reference, one.method, split) for one, split in pairs]
    rows = [
        (name_of(one.method), name_of(one.reference), split, points(tested), p)
        for (one, split), tested, p in zip(pairs, found, corrected(found), strict=True)
    ]
    named = measure(_all_runs(compared), compared.splits)
    note = (
        f"Difference of the {named} in percentage points after training, with the 95 % interval over common seeds and "
        "prompts. p: of no difference, by Holm's correction over the rows of this table."
    )
    header = ("method", "against", "split", "difference", "p")
    return Table(key="against", title="At equal steps", header=header, rows=tuple(rows), note=note)


def table_equal_responses(compared: Compared) -> Table:
    pairs = [(one, split) for one in contrasts(compared) for split in compared.splits]
    found = [at_equal_responses(one.method, one.reference, split) for one, split in pairs]
    p_values = corrected([None if isinstance(at, str) else at.difference for at in found])
    rows = [
        (name_of(one.method), name_of(one.reference), split, *_equal_cells(at, p))
        for (one, split), at, p in zip(pairs, found, p_values, strict=True)
    ]
    named = measure(_all_runs(compared), compared.splits)
    note = (
        f"Difference of the {named} in percentage points, with the 95 % interval over common seeds and prompts, after "
        "the same number of training responses: the largest of evaluation.at_responses that both have, or what the "
        "cheapest run of the two methods sampled in all. Each run was measured with the first weights after it, or "
        "less than a step away. "
        f"{_capital(named)} on the common prompts, method : reference at this number. p: of no difference, by Holm's "
        "correction over the rows of this table."
    )
    header = ("method", "against", "split", "difference", "p", "prompts x seeds", named)
    return Table(key="equal-responses", title="At equal responses", header=header, rows=tuple(rows), note=note)


def corrected(found: Sequence[Tested | None]) -> list[str]:
    """p values by Holm's correction, a dash where there is none."""
    p_values = iter(holm([one.p for one in found if one is not None]))
    return [DASH if one is None else f"{next(p_values):.2g}" for one in found]


def _equal_cells(found: AtEqualResponses | str, p: str) -> tuple[str, ...]:
    if isinstance(found, str):
        return (found, DASH, DASH, DASH)
    accuracies = f"{percent(found.method)} : {percent(found.reference)} at {count(found.budget)}"
    sample = f"{found.num_prompts} x {len(found.seeds)}"
    return (points(found.difference), p, sample, accuracies)


def table_pass_at_k(compared: Compared) -> Table:
    """pass@k for k = 1, 2, 4, ... up to the responses per prompt, each base model first."""
    runs, by_base = _all_runs(compared), named_bases(compared)
    rows = []
    for split in compared.splits:
        most = min(int(run.rows(split)[-1]["num_samples"]) for run in runs)
        ks = [k for k in (1, 2, 4, 8, 16, 32, 64) if k <= most]
        if len(ks) < 2:
            continue
        for k in ks:
            found = [base_pass_at_k(own, split, k) for own in by_base.values()]
            found += [final_pass_at_k(method, split, k) for method in compared.methods]
            rows.append((split, f"pass@{k}", *map(interval, found)))
        if any(found := [base_majority(own, split) for own in by_base.values()]):
            found += [final_majority(method, split) for method in compared.methods]
            rows.append((split, f"maj@{most}", *map(interval, found)))
    note = (
        f"pass@k: percentage of held-out prompts with a correct response among k, unbiased; "
        f"{PASSES}. maj@k: whose most frequent answer is correct (its mean reward, with partial credit). "
        "95 % intervals over seeds and prompts. A method that raises pass@1 but not pass@k has become "
        "more deterministic and solves nothing new."
    )
    header = ("split", "measure", *by_base, *map(name_of, compared.methods))
    return Table(key="pass-at-k", title="pass@k and maj@k", header=header, rows=tuple(rows), note=note)


SEEDS = "Means over seeds, minimum and maximum in brackets. "


def table_composition(compared: Compared, *, paper: bool = False) -> Table:
    """Shares of X1, X2 and X3, what the filter retained, and what re-evaluations found."""
    header = (
        "method",
        "X1 %",
        "X2 %",
        "X3 %",
        "stored %",
        "retained %",
        "re-evaluated prompts",
        "improved %",
        "solved %",
    )
    shares: list[Callable[[Measured], float | None]] = [
        *(partial(share_of, origin=origin) for origin in Origin),
        stored_share,
        retained_share,
    ]
    rows = [
        (
            name_of(method),
            *(_per_seed(method, value, percent) for value in shares),
            _per_seed(method, num_reevaluated, "{:.0f}".format),
            *(_per_seed(method, value, percent) for value in (improved_share, solved_share)),
        )
        for method in compared.methods
    ]
    if paper:
        claimed = published()["composition"]
        cells = [
            claimed.get(key, DASH) for key in ("x1", "x2", "x3", "stored", "retained", "asked", "improved", "solved")
        ]
        rows.append(("the paper, BAPO", *cells))
    note = (
        f"{SEEDS}X1, X2, X3: share of the trained groups. Stored: share of the trained responses from groups of "
        "earlier steps, including those in X1 (RePO, ARPO). Retained: share of the fresh groups that trained in their "
        "own step. Re-evaluated: distinct hard prompts that were re-evaluated. Improved: of these, those that were "
        "then partly correct (c1 < mu' < 1), with or without room in the batch. Solved: all correct. A prompt may be "
        "both, at different steps. A dash: not part of the method, or not in the records."
    )
    return Table(key="composition", title="Composition of batches", header=header, rows=tuple(rows), note=note)


def table_dynamics(compared: Compared) -> Table:
    """Entropy and length at the end, gradient norms, and how many prompts got better and worse."""
    rows = []
    for name, runs in named_bases(compared).items():
        floor = [floor_matrix(runs, split) for split in compared.own_splits]
        rows.append((f"{name} again", DASH, DASH, DASH, DASH, _moved(floor), DASH))
    chance = "The first row is" if len(rows) == 1 else f"The first {len(rows)} rows are"
    for method in compared.methods:
        held_out = [held_out_matrix(method.runs, split) for split in compared.own_splits]
        rows.append(
            (
                name_of(method),
                _per_seed(method, last_entropy, "{:.3f}".format),
                _per_seed(method, last_length, "{:.1f}".format),
                _per_seed(method, partial(gradient_norm, share=0.95), "{:.2f}".format),
                _per_seed(method, partial(gradient_norm, share=1.0), "{:.2f}".format),
                _moved(held_out),
                _moved([training_matrix(method.runs)]),
            )
        )
    note = (
        f"{SEEDS}Entropy in nats per trained token and length in tokens per fresh response: the last twelfth of the "
        "steps. Gradient norm: before clipping, over all steps. b:w (better:worse): prompts with more : fewer correct "
        "responses at the end than at first, over all seeds; held-out prompts from the base model to the end, all "
        "splits at their own temperature; training prompts from their first to their last fresh visit. "
        f"{chance} chance: the base model against itself, evaluated with other seeds."
    )
    return Table(
        key="dynamics",
        title="Dynamics and migration",
        header=("method", "entropy", "length", "gradient p95", "gradient max", "held out b:w", "training b:w"),
        rows=tuple(rows),
        note=note,
    )


def _per_seed(method: Method, value: Callable[[Measured], float | None], shown: Callable[[float], str]) -> str:
    return spread([found for run in method.runs if (found := value(run)) is not None], shown)


def _moved(matrices: Sequence[Matrix | None]) -> str:
    known = [matrix for matrix in matrices if matrix is not None]
    return f"{sum(m.better for m in known)}:{sum(m.worse for m in known)}" if known else DASH


def table_rescued(compared: Compared) -> Table:
    """Held-out prompts that the base model leaves unsolved, and the share with a right response after training."""
    by_base = bases(compared)
    references = list(dict.fromkeys(one.reference.name for one in contrasts(compared)))
    labels = {method.name: method.label for method in compared.methods}
    rows, sizes = [], []
    for split in compared.splits:
        populations = {base: found for base, runs in by_base.items() if (found := unsolved(runs, split))}
        sizes += [f"{found.size:.1f} of {len(found.weights)} of {split}" for found in populations.values()]
        for base, population in populations.items():
            model = "the base model" if len(by_base) == 1 else base
            dashes = [DASH] * (1 + len(references))
            rows.append((f"floor: {model} again", split, interval(floor(population)), *dashes))
        for method in compared.methods:
            cells = _rescued_cells(compared, method, references, split, populations.get(base_of(method.runs[0])))
            rows.append((name_of(method), split, *cells))
    note = (
        f"Percentage of the held-out prompts without a correct response (reward 1) of the base model (on average "
        f"{', '.join(sizes) or 'none'}) that have one after training; intervals are over seeds and prompts. The "
        "population is the same for all methods: a prompt is weighted by the fraction of base evaluations without a "
        "correct response. The floor is the percentage solved by a base evaluation with another seed (chance). Above "
        "the floor and to a reference: in percentage points, on the same prompts. Not corrected for multiple "
        "comparisons."
    )
    header = ("method", "split", "newly solved, %", "above the floor", *(f"to {labels[name]}" for name in references))
    return Table(key="rescued", title="Newly solved held-out prompts", header=header, rows=tuple(rows), note=note)


def _rescued_cells(
    compared: Compared, method: Method, references: Sequence[str], split: str, population: Unsolved | None
) -> list[str]:
    """Share, above the floor, and to each reference; dashes where the base model solved everything."""
    if population is None:
        return [DASH] * (2 + len(references))
    own = interval(rescued(method, split, population))
    differences = [_difference(compared, method, reference, split, population) for reference in references]
    return [own, points(above_floor(method, split, population)), *differences]


def _difference(compared: Compared, method: Method, reference: str, split: str, population: Unsolved) -> str:
    """Dash where the two are not compared, or started from other base models."""
    for one in contrasts(compared):
        same_base = base_of(one.method.runs[0]) == base_of(one.reference.runs[0])
        if (one.method.name, one.reference.name) == (method.name, reference) and same_base:
            return points(rescued_more(one.method, one.reference, split, population))
    return DASH


def table_second_looks(compared: Compared) -> Table:
    """Re-evaluations that improved, by the age of the failure, next to chance."""
    rows = [
        (name_of(method), looks.ages, count(looks.num), interval(looks.improved), percent(looks.floor))
        for method in compared.methods
        for looks in second_looks(method.runs)
    ]
    note = (
        "Re-evaluations of hard prompts by the learner steps since the failure. Improved: c1 < mu' < 1, "
        "with the 95 % interval over re-evaluations. Floor: what a second group from the weights that failed would "
        "give, from the distribution of pass rates of the fresh groups around the failure. Only what exceeds the floor "
        "has become solvable."
    )
    header = ("method", "age", "re-evaluations", "improved, %", "floor, %")
    return Table(key="second-looks", title="Re-evaluations by age", header=header, rows=tuple(rows), note=note)


AVERAGE = "average"
ROLLOUTS = "rollouts (maths)"
"""Column of the paper's, which counts them on mathematics alone."""


def all_tables(compared: Compared, *, paper: bool) -> list[Table]:
    tables = [table_1(compared, paper=paper), table_2(compared, paper=paper)]
    if (passed := table_pass_at_k(compared)).rows:
        tables.insert(1, passed)
    if len(compared.methods) > 1 and compared.splits:
        tables += [table_against(compared), table_equal_responses(compared)]
    tables += [table_composition(compared, paper=paper), table_dynamics(compared)]
    if (looks := table_second_looks(compared)).rows:
        tables.append(looks)
    tables += [table_rescued(compared)] if compared.splits else []
    tables += [table_3(compared), table_4(compared)] if paper else []
    return [*tables, table_settings(compared)] if len(compared.methods) > 1 else tables


def table_1(compared: Compared, *, paper: bool = False) -> Table:
    """Accuracy after training with 95 % intervals over seeds and prompts, rollouts, on- or off-policy."""
    runs = _all_runs(compared)
    averaged = [AVERAGE] if len(compared.own_splits) > 1 else []
    named = measure(runs, compared.splits)
    kinds = {split: measure(runs, [split]) for split in compared.splits}

    def titled(split: str) -> str:
        return split if kinds[split] == named == ACCURACY else f"{split}, {kinds[split]}"

    header = ["method", "seeds", *map(titled, compared.splits), *averaged, "rollouts", "type", "staleness"]
    rows = [
        [name, DASH, *_accuracies({s: base_accuracy(own, s) for s in compared.splits}, compared), DASH, DASH, DASH]
        for name, own in named_bases(compared).items()
    ]
    for method in compared.methods:
        accuracies = _accuracies({split: final_accuracy(method, split) for split in compared.splits}, compared)
        rollouts = spread([run.ledger.rollouts for run in method.runs], count)
        kind = {True: "on", False: "off", None: DASH}[is_on_policy(method)]
        seeds = _num_seeds(method, compared.splits)
        rows.append([name_of(method), seeds, *accuracies, rollouts, kind, _staleness(method)])
    if paper:
        header, rows = _with_paper_accuracy(compared, header, rows)
    note = (
        f"{_capital(named)} in percent after training, with the 95 % interval over seeds and prompts (crossed; with "
        "one seed over prompts alone). Average: of the splits at their own temperature, each counts the same. "
        "Rollouts: responses sampled for training, fresh and re-evaluated. Type: on-policy when every response trains "
        "once, and was sampled by the weights of its step or of the step before. Staleness: mean steps between "
        "sampling and training of the groups of a batch; responses of several ages count as the oldest."
    )
    return Table(
        key="table-1",
        title=f"Table 1: {named} and rollouts",
        header=tuple(header),
        rows=tuple(map(tuple, rows)),
        note=note,
    )


def _all_runs(compared: Compared) -> list[Measured]:
    return [run for method in compared.methods for run in method.runs]


def _num_seeds(method: Method, splits: Sequence[str]) -> str:
    """Runs that its accuracies are of, the least and the most over splits; all of them where nothing is held out."""
    found = [sum(run.after(split) is not None for run in method.runs) for split in splits] or [len(method.runs)]
    return " to ".join(map(str, sorted({min(found), max(found)})))


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


def _accuracies(found: Mapping[str, Estimate | None], compared: Compared) -> list[str]:
    """One cell per split, and the mean of those at their own temperature where there are several."""
    own = [found[split] for split in compared.own_splits]
    known = [one.mean for one in own if one is not None]
    mean = percent(_mean(known)) if known and len(known) == len(own) else DASH
    return [*map(interval, found.values()), *([mean] if len(own) > 1 else [])]


def table_2(compared: Compared, *, paper: bool = False) -> Table:
    header = [
        "method",
        "steps",
        "updates",
        "training",
        "ratio",
        "start to end",
        "fresh",
        "re-evaluated",
        "evaluation",
        "filled",
    ]
    first = _mean([run.ledger.train_s for run in compared.reference.runs])
    rows = []
    for method in compared.methods:
        seconds = [run.ledger.train_s for run in method.runs]
        walls = [run.wall_s for run in method.runs if run.wall_s is not None]
        rows.append(
            [
                name_of(method),
                spread([run.num_steps for run in method.runs], "{:.0f}".format),
                spread([run.num_updates for run in method.runs], "{:.0f}".format),
                spread(seconds, duration),
                f"x{_mean(seconds) / first:.2f}" if first else DASH,
                spread(walls, duration) if walls else DASH,
                *(_spent(method, purpose) for purpose in ("fresh", "reevaluate", "evaluate")),
                f"{100 * _filled(method):.0f} %",
            ]
        )
    if paper:
        header += ["paper: time, ratio", "paper: filled"]
        rows = [
            [*row, _paper_time(method, compared), _paper_filled(method)]
            for row, method in zip(rows, compared.methods, strict=True)
        ]
    note = (
        "Means over seeds, minimum and maximum in brackets. Updates: optimizer steps, one per mini-batch; an "
        "underfilled batch has fewer. Training: seconds of all learner steps including waits and checkpoints. Start "
        "to end: the whole run including startup and the evaluations before and after, if it was started once. "
        "Responses / tokens by purpose. Filled: groups per batch as a share of B. Concurrent runs on a machine "
        "take longer than a "
        "single one."
    )
    return Table(
        key="table-2", title="Table 2: time and tokens", header=tuple(header), rows=tuple(map(tuple, rows)), note=note
    )


def table_3(compared: Compared) -> Table:
    """The paper's hyper-parameters with the values of BAPO, or of the reference where it is not among the methods."""
    method = next((one for one in compared.methods if one.name == "bapo"), compared.reference)
    note = (
        "The paper's are those of mathematics. Where other methods differ is in the table of settings. Top-k is -1 in "
        "the paper; there is no such setting here, responses are sampled from all tokens."
    )
    return Table(
        key="table-3",
        title=f"Table 3: settings of {method.label}",
        header=("hyper-parameter", "setting", "value", "paper"),
        rows=tuple(hyper_parameters(method.config)),
        note=note,
    )


def hyper_parameters(config: Config) -> Iterator[tuple[str, str, str, str]]:
    """(the paper's name, our key, our value, the paper's value), in the order of the paper's table 3."""
    values = {dotted(key): value for key, value in flatten(config.model_dump(mode="json"))}
    values |= {"algorithm.bad_capacity": config.algorithm.capacity}  # not null where they follow from B
    values |= {"algorithm.max_reevaluated": config.algorithm.most_reevaluated}
    for row in published()["table_3"]:
        if row["key"] in values:  # not where the method has no such part
            yield row["name"], row["key"], shown(values[row["key"]]), shown(row["value"])


def table_4(compared: Compared) -> Table:
    """Problems that trained and problems that were measured; the paper's sets of the nearest task next to them."""
    runs = [run for method in compared.methods for run in method.runs]
    claimed = published()["table_4"].get(section_of(compared.reference.config).removesuffix("_7b"), {})
    trained = spread([len(fresh_visits(run.sampled)) for run in runs], "{:,.0f}".format)
    rows = [("training", trained, DASH, _claimed(claimed, "train"))]
    for split in compared.splits:
        last = runs[0].rows(split)[-1]
        rows.append((split, f"{last['num_prompts']:,}", str(last["num_samples"]), _claimed(claimed, split)))
    missing = [name for name in claimed if name not in ("train", *compared.splits)]
    rows += [(name, DASH, DASH, _claimed(claimed, name)) for name in missing]
    note = (
        "Problems: distinct training problems that were sampled, mean over all runs with minimum and maximum in "
        "brackets; held-out problems of the last evaluation, with their responses per problem (32 in the paper). A "
        "dash: not measured here."
    )
    header = ("data", "problems", "responses each", "paper: problems")
    return Table(key="table-4", title="Table 4: data", header=header, rows=tuple(rows), note=note)


def _claimed(claimed: dict[str, int], name: str) -> str:
    return f"{claimed[name]:,}" if name in claimed else DASH


def table_settings(compared: Compared) -> Table:
    rows = []
    for method in compared.others:
        settings = changed_settings(compared.reference, method)
        rows.append((name_of(method), ", ".join(f"{key} = {value}" for key, value in settings.items()) or "none"))
    note = "Settings that differ from the reference. A star: intentional, as declared by the study."
    return Table(
        key="settings",
        title=f"Settings that differ from {compared.reference.label}",
        header=("method", "settings"),
        rows=tuple(rows),
        note=note,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _filled(method: Method) -> float:
    trained = sum(row[o.value] for run in method.runs for row in run.metrics for o in Origin)
    return float(trained / sum(row["batch_size"] for run in method.runs for row in run.metrics))


def _staleness(method: Method) -> str:
    pairs = [
        (row[origin.value], row[f"staleness_{origin.value}_mean"])
        for run in method.runs
        for row in run.metrics
        for origin in Origin
        if row.get(f"staleness_{origin.value}_mean") is not None
    ]
    total = sum(size for size, _ in pairs)
    return f"{sum(size * mean for size, mean in pairs) / total:.1f}" if total else DASH


def _spent(method: Method, purpose: str) -> str:
    parts = [getattr(run.ledger, purpose) for run in method.runs]
    return f"{count(_mean([part.responses for part in parts]))} / {count(_mean([part.tokens for part in parts]))}"


def _with_paper_accuracy(
    compared: Compared, header: list[str], rows: list[list[str]]
) -> tuple[list[str], list[list[str]]]:
    config = compared.reference.config
    names = [*["base"] * len(bases(compared)), *map(_published_name, compared.methods)]
    columns = list(_paper_columns(compared))
    shown = [
        [*row, *(_paper_cell(published_of(config, name), column, name) for column in columns)]
        for row, name in zip(rows, names, strict=True)
    ]
    return [*header, *(f"paper: {column}" for column in columns)], shown


def _published_name(method: Method) -> str:
    """The method that the paper has numbers of: the run's own name, or its preset's."""
    known = published().get(section_of(method.config), {})
    return method.name if _key(method.name) in known else str(method.config.preset)


def _paper_columns(compared: Compared) -> Iterator[str]:
    section = published().get(section_of(compared.reference.config), {})
    known = {key for values in section.values() for key in values}
    measured = [split for split in compared.splits if split in known]
    yield from measured
    if measured or not compared.splits:
        yield "accuracy"
    yield ROLLOUTS
    yield "type"


def _paper_cell(found: dict[str, float], column: str, name: str) -> str:
    in_table_1a: dict[str, Any] = published()["math"].get(_key(name), {})
    if column == "type":
        return str(in_table_1a.get("type", DASH))
    if column == ROLLOUTS:
        return f"{in_table_1a['rollouts']:.0f}k" if "rollouts" in in_table_1a else DASH
    return DASH if column not in found else f"{found[column]:.1f}"


def _paper_time(method: Method, compared: Compared) -> str:
    ours, first = (published_of(method.config, name).get("time") for name in (method.name, compared.reference.name))
    if ours is None:
        return DASH
    return duration(60 * ours) + (f", x{ours / first:.2f}" if first else "")


def _paper_filled(method: Method) -> str:
    share = published_of(method.config, method.name).get("filled")
    return DASH if share is None else f"{share} %"
