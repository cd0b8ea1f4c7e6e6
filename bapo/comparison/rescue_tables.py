"""Tables of rescued prompts: how many, and what had trained them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from bapo.comparison.cells import DASH, Table, name_of, percent, share
from bapo.comparison.gather import Compared, Measured
from bapo.comparison.migration import UNTRAINED, attribution, floor_matrix, held_out_matrix, rescues
from bapo.comparison.published import rescued_of


def table_rescued(compared: Compared, *, paper: bool = False) -> Table:
    """Prompts without a right response at first, and how many had one at last."""
    runs = [run for method in compared.methods for run in method.runs]
    rows: list[list[str]] = []
    floors = [DASH if (m := floor_matrix(runs, s)) is None else share(m.rescued, m.unsolved) for s in compared.splits]
    rows.append(["floor: the base model again", *floors, DASH])
    for method in compared.methods:
        cells = [name_of(method)]
        for split in compared.splits:
            final = method.runs[0].num_steps + 1
            found = held_out_matrix(method.runs, split, final)
            cells.append(DASH if found is None else share(found.rescued, found.unsolved))
        visits = [one for run in method.runs for one in rescues(run).values()]
        cells.append(share(sum(one.rescued for one in visits), len(visits)))
        rows.append(cells)
    header = ["method", *(f"held out, {split}" for split in compared.splits), "training prompts"]
    if paper:
        header.append("paper (0/8, DeepScaleR)")
        shown = [rescued_of(method.name) for method in compared.methods]
        rows = [[*row, DASH if v is None else percent(v)] for row, v in zip(rows, [None, *shown], strict=True)]
    note = (
        "Prompts with no right response at first, and how many of them had one at last, all seeds together. Held out: "
        "base model against final weights. Training prompts: first against last fresh visit, of those that came twice. "
        "The floor is what a second sample of the base model rescues by chance."
    )
    return Table(key="rescued", title="Rescued prompts", header=tuple(header), rows=tuple(map(tuple, rows)), note=note)


def table_attribution(compared: Compared) -> Table:
    """What had trained the rescued training prompts before their last visit."""
    counts = {method.name: _attributed(method.runs) for method in compared.methods}
    kinds = sorted(
        {kind for found in counts.values() for kind in found if kind != UNTRAINED}, key=lambda k: (len(k), k)
    )
    header = ["method", "rescued", *kinds, UNTRAINED]
    rows = []
    for method in compared.methods:
        found = counts[method.name]
        rows.append((name_of(method), str(sum(found.values())), *(str(found[kind]) for kind in [*kinds, UNTRAINED])))
    note = (
        "Training prompts that were all wrong at their first visit and had a right response at their last, by the "
        "origins of the groups with an advantage that had trained them in between."
    )
    return Table(key="attribution", title="What rescued them", header=tuple(header), rows=tuple(rows), note=note)


def _attributed(runs: Sequence[Measured]) -> Counter[str]:
    found: Counter[str] = Counter()
    for run in runs:
        found += attribution(rescues(run).values())
    return found
