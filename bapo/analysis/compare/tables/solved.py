"""Tables of rescued prompts: how many of those held out, and what had trained those of the training set."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bapo.analysis.compare.gather import Compared, Measured, Method, contrasts
from bapo.analysis.compare.migration import UNTRAINED, Rescue, attribution, rescues
from bapo.analysis.compare.tables.cells import DASH, Table, interval, name_of, percent, points, share
from bapo.analysis.compare.tables.published import rescued_of
from bapo.analysis.compare.unsolved import Unsolved, above_floor, base_of, floor, rescued, rescued_more, unsolved


def table_rescued(compared: Compared) -> Table:
    """Held-out prompts that the base model leaves unsolved, and the share with a right response after training."""
    bases = _bases(compared)
    references = list(dict.fromkeys(one.reference.name for one in contrasts(compared)))
    labels = {method.name: method.label for method in compared.methods}
    rows, sizes = [], []
    for split in compared.splits:
        populations = {base: found for base, runs in bases.items() if (found := unsolved(runs, split))}
        sizes += [f"{found.size:.1f} of {len(found.weights)} of {split}" for found in populations.values()]
        for base, population in populations.items():
            model = "the base model" if len(bases) == 1 else bases[base][0].config.model.path
            dashes = [DASH] * (1 + len(references))
            rows.append((f"floor: {model} again", split, interval(floor(population)), *dashes))
        for method in compared.methods:
            cells = _rescued_cells(compared, method, references, split, populations.get(base_of(method.runs[0])))
            rows.append((name_of(method), split, *cells))
    note = (
        f"Of the held-out prompts that a measurement of the base model leaves without a right response (on average "
        f"{', '.join(sizes) or 'none'}), the percentage with one after training; intervals are over seeds and prompts. "
        "One population for all methods: a prompt counts with the share of all base measurements in which it had no "
        "right response. The floor is the percentage that a base measurement of another seed solves: chance. Above the "
        "floor and to a reference: in points, on the same prompts. No correction for the number of comparisons."
    )
    header = ("method", "split", "rescued, %", "above the floor", *(f"to {labels[name]}" for name in references))
    return Table(key="rescued", title="Rescued prompts, held out", header=header, rows=tuple(rows), note=note)


def table_attribution(compared: Compared, *, paper: bool = False) -> Table:
    """Training prompts all wrong at their first visit: how many were not at their last, and what had trained these."""
    found = {method.name: [one for run in method.runs for one in rescues(run).values()] for method in compared.methods}
    counts = {name: attribution(visits) for name, visits in found.items()}
    kinds = sorted({kind for own in counts.values() for kind in own if kind != UNTRAINED}, key=lambda k: (len(k), k))
    header = ["method", "rescued", *kinds, UNTRAINED]
    rows = [[name_of(m), _rescued_share(found[m.name]), *_counts(counts[m.name], kinds)] for m in compared.methods]
    if paper:
        header.append("paper (0/8, DeepScaleR)")
        shown = [rescued_of(method.name) for method in compared.methods]
        rows = [[*row, DASH if value is None else percent(value)] for row, value in zip(rows, shown, strict=True)]
    note = (
        "Training prompts that were all wrong at their first fresh visit and visited again: how many had a right "
        "response at their last visit, and by the origins of the groups with an advantage that had trained them in "
        "between. These shares rank no method: a part of them is chance, as held out, but how large a part is in no "
        "record (no prompt is asked twice of the same weights by engines that do not start alike), and each method has "
        "prompts of its own, chosen by its own first sample."
    )
    return Table(
        key="attribution",
        title="Rescued prompts, training: what had trained them",
        header=tuple(header),
        rows=tuple(map(tuple, rows)),
        note=note,
    )


def _bases(compared: Compared) -> dict[str, list[Measured]]:
    """Base model -> its runs."""
    found: dict[str, list[Measured]] = {}
    for method in compared.methods:
        for run in method.runs:
            found.setdefault(base_of(run), []).append(run)
    return found


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


def _rescued_share(visits: Sequence[Rescue]) -> str:
    return share(sum(one.rescued for one in visits), len(visits))


def _counts(found: Counter[str], kinds: Sequence[str]) -> list[str]:
    return [str(found[kind]) for kind in [*kinds, UNTRAINED]]
