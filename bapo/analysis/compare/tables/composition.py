"""Tables of what batches were made of, and of how training went: the numbers behind the paper's claims."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from bapo.analysis.compare.composition import (
    gradient_norm,
    improved_share,
    last_entropy,
    last_length,
    reevaluated,
    retained_share,
    share_of,
    solved_share,
    stored_share,
)
from bapo.analysis.compare.gather import Compared, Measured, Method
from bapo.analysis.compare.migration import Matrix, floor_matrix, held_out_matrix, training_matrix
from bapo.analysis.compare.tables.cells import DASH, Table, name_of, percent, spread
from bapo.analysis.compare.tables.published import published
from bapo.core.types import Origin

SEEDS = "Means over seeds, in brackets the least and the most. "


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
            *(_over_seeds(method, value, percent) for value in shares),
            _over_seeds(method, _num_reevaluated, "{:.0f}".format),
            *(_over_seeds(method, value, percent) for value in (improved_share, solved_share)),
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
        f"{SEEDS}X1, X2, X3: of all that trained. Stored: of the responses that trained, those of groups of earlier "
        "steps, also where they are part of X1 (RePO, ARPO). Retained: of the fresh groups, those that trained in "
        "their own step. Re-evaluated: distinct prompts that were asked again because they were hard. Improved: of "
        "them, those that were then partly right (c1 < mu' < 1), with or without room in the batch. Solved: all right. "
        "A prompt may be both, at different steps. A dash: the method has no such part."
    )
    return Table(key="composition", title="Composition of batches", header=header, rows=tuple(rows), note=note)


def table_dynamics(compared: Compared) -> Table:
    """Entropy and length at the end, gradient norms, and how many prompts got better and worse."""
    runs = [run for method in compared.methods for run in method.runs]
    floor = [floor_matrix(runs, split) for split in compared.splits]
    rows = [("base model again", DASH, DASH, DASH, DASH, _moved(floor), DASH)]
    for method in compared.methods:
        final = method.runs[0].num_steps + 1
        held_out = [held_out_matrix(method.runs, split, final) for split in compared.splits]
        rows.append(
            (
                name_of(method),
                _over_seeds(method, last_entropy, "{:.3f}".format),
                _over_seeds(method, last_length, "{:.1f}".format),
                _over_seeds(method, partial(gradient_norm, share=0.95), "{:.2f}".format),
                _over_seeds(method, partial(gradient_norm, share=1.0), "{:.2f}".format),
                _moved(held_out),
                _moved([training_matrix(method.runs)]),
            )
        )
    note = (
        f"{SEEDS}Entropy in nats per trained token and length in tokens per fresh response: the last twelfth of the "
        "steps. Gradient norm: before clipping, over all steps. Better:worse: prompts with more : with fewer right "
        "responses than at first, all seeds together; held out from the base model to the end, all splits; training "
        "prompts from their first fresh visit to their last. The first row is chance: the base model against itself, "
        "measured by other seeds."
    )
    return Table(
        key="dynamics",
        title="Dynamics and migration",
        header=("method", "entropy", "length", "gradient p95", "gradient max", "held out b:w", "training b:w"),
        rows=tuple(rows),
        note=note,
    )


def _over_seeds(method: Method, value: Callable[[Measured], float | None], shown: Callable[[float], str]) -> str:
    return spread([found for run in method.runs if (found := value(run)) is not None], shown)


def _num_reevaluated(run: Measured) -> float | None:
    return len(reevaluated(run)) if run.config.algorithm.use_x2 else None


def _moved(matrices: Sequence[Matrix | None]) -> str:
    known = [matrix for matrix in matrices if matrix is not None]
    return f"{sum(m.better for m in known)}:{sum(m.worse for m in known)}" if known else DASH
