"""Tables of pairs: each method against its references, at equal steps, at equal responses, and for equal accuracy."""

from __future__ import annotations

from bapo.analysis.compare.accuracy import versus
from bapo.analysis.compare.gather import Compared, both_ways, contrasts
from bapo.analysis.compare.responses import AtEqualResponses, Need, SeedNeed, at_equal_responses, responses_for
from bapo.analysis.compare.tables.cells import DASH, Table, name_of, p, percent, points
from bapo.core.text import count

EXTREME = 1000
"""Beyond this factor, and below one over it, an interval only says that it is very wide."""


def table_against(compared: Compared) -> Table:
    """Each method against its references after training."""
    rows = []
    for one in contrasts(compared):
        for split in compared.splits:
            found = versus(one.reference, one.method, split)
            by_seed = ", ".join(f"s{s.seed} {s.test.better}:{s.test.worse} {p(s.test.p)}" for s in found.by_seed)
            total = found.all_seeds
            rows.append(
                (
                    name_of(one.method),
                    name_of(one.reference),
                    split,
                    points(found.difference),
                    f"{total.better}:{total.worse} {p(total.p)}" if found.by_seed else DASH,
                    by_seed or DASH,
                )
            )
    note = (
        "Difference in points after training, with the 95 % interval over shared seeds and prompts: does the method do "
        "better, with new seeds and new prompts? b:c are prompts on which it was right more often : less often; p is "
        "McNemar's exact test per seed, and its stratified exact form over seeds (Mantel-Haenszel for pairs): do these "
        f"very weights differ? {_kind_of_test(compared)}No correction for the number of comparisons."
    )
    header = ("method", "against", "split", "difference", "McNemar over seeds (b:c)", "by seed (b:c)")
    return Table(key="against", title="At equal steps", header=header, rows=tuple(rows), note=note)


def table_equal_responses(compared: Compared) -> Table:
    """Each method against its references after as many training responses."""
    rows = []
    for one in contrasts(compared):
        for split in compared.splits:
            found = at_equal_responses(one.method, one.reference, split)
            rows.append((name_of(one.method), name_of(one.reference), split, *_equal_cells(found)))
    note = (
        "Difference in points, with the 95 % interval over shared seeds and prompts, after as many training responses "
        "as the cheapest run of the two methods spent. Between two measurements of a run each prompt's accuracy lies "
        "on the straight line; the measurement before training is the point at 0 responses; behind the last one there "
        "is no answer. Prompts: those that all measurements used have, fewer during a run than at its end. Accuracies "
        "are on these prompts, the method's : the reference's."
    )
    header = ("method", "against", "split", "difference", "budget", "prompts x seeds", "accuracies")
    return Table(key="equal-responses", title="At equal responses", header=header, rows=tuple(rows), note=note)


def table_responses_for(compared: Compared) -> Table:
    """How many responses a method needs for the accuracy that its reference ended with."""
    rows = []
    for one in both_ways(compared):
        for split in compared.splits:
            found = responses_for(one.method, one.reference, split)
            cells = (found, DASH, DASH) if isinstance(found, str) else _need_cells(found)
            rows.append((name_of(one.method), name_of(one.reference), split, *cells))
    note = (
        "Training responses until the method first was as accurate as the other one at its end, divided by those until "
        "that one first was; both read off straight lines between measurements, seed by seed. With every seed "
        "reached: geometric mean with its 95 % interval over seeds, on these prompts (one seed: no interval). Else the "
        "least and the most over seeds, no mean. By seed: the method's responses : the other one's, and the factor; x0 "
        "is a base model that was measured as accurate. A first crossing of few and noisy measurements comes early, on "
        "both sides."
    )
    header = ("method", "for accuracy of", "split", "factor", "reached", "responses by seed")
    return Table(key="responses-for", title="Responses for equal accuracy", header=header, rows=tuple(rows), note=note)


def factor(value: float) -> str:
    """x1.31, x24, x0; "<x0.001" and ">x1000" for what lies beyond."""
    if value > EXTREME:
        return f">x{EXTREME}"
    if 0 < value < 1 / EXTREME:
        return f"<x{1 / EXTREME}"
    if value >= 10:
        return f"x{value:.3g}"
    return f"x{value:.2f}" if value >= 0.1 else f"x{value:.2g}"


def _kind_of_test(compared: Compared) -> str:
    n = compared.reference.config.evaluation.num_samples
    shares = (
        f"With {n} responses per prompt a prompt has a share of right ones, not one answer: the test is a sign test on "
        "which share is larger, by however little. "
    )
    return shares if n > 1 else ""


def _equal_cells(found: AtEqualResponses | str) -> tuple[str, ...]:
    if isinstance(found, str):
        return (found, DASH, DASH, DASH)
    accuracies = f"{percent(found.method)} : {percent(found.reference)}"
    sample = f"{found.num_prompts} x {len(found.seeds)}"
    return (points(found.difference), count(found.budget), sample, accuracies)


def _need_cells(found: Need) -> tuple[str, str, str]:
    return _factor_cell(found), f"{found.reached} of {len(found.by_seed)}", ", ".join(map(_seed_cell, found.by_seed))


def _factor_cell(found: Need) -> str:
    """ "x1.31 [x0.90, x1.90]", "x1.31", "x0.80 to x1.31", "x0.80 to beyond x2", "beyond x2"."""
    if found.ratio is not None:
        return f"{factor(found.ratio.mean)} [{factor(found.ratio.low)}, {factor(found.ratio.high)}]"
    if found.bounds is None:
        return "nothing to reach"
    least, most = found.bounds
    if most is not None:
        return factor(least) if len(found.by_seed) == 1 else f"{factor(least)} to {factor(most)}"
    known = max((one.least for one in found.by_seed if one.least is not None), default=least)
    if not any(one.ratio is not None for one in found.by_seed):
        return f"beyond {factor(least)}"
    return f"{factor(least)} to beyond {factor(known)}"


def _seed_cell(one: SeedNeed) -> str:
    """ "s1 18.2k : 13.9k x1.31", "s2 over 49.7k : 24.6k x2.02", or that there was nothing to reach."""
    if one.least is None:
        return f"s{one.seed} nothing to reach"
    needed = f"over {count(one.spent)}" if one.needed is None else count(one.needed)
    return f"s{one.seed} {needed} : {count(one.own)} {factor(one.least)}"
