"""Tables of a comparison as rows of text, the same for terminal, page and files.

table 1    accuracy with intervals, rollouts, on- or off-policy
table 2    time and tokens by purpose
settings   in which settings methods differ from the reference

pair_tables.py         each method against its references: at equal steps, equal responses, equal accuracy
composition_tables.py  shares of X1, X2 and X3, what re-evaluations found; entropy, length, gradient norm
rescue_tables.py       prompts at 0/n that had a right response later, and what had trained them
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bapo.analysis.compare.accuracy import base_accuracy, final_accuracy
from bapo.analysis.compare.composition import is_on_policy
from bapo.analysis.compare.gather import Compared, Method, changed_settings
from bapo.analysis.compare.tables.cells import DASH, Table, interval, name_of, spread
from bapo.analysis.compare.tables.composition import table_composition, table_dynamics
from bapo.analysis.compare.tables.pairs import table_against, table_equal_responses, table_responses_for
from bapo.analysis.compare.tables.published import published, published_of, rollouts_of, section_of, type_of
from bapo.analysis.compare.tables.solved import table_attribution, table_rescued
from bapo.core.text import count, duration
from bapo.core.types import Origin

ROLLOUTS = "rollouts (maths)"
"""Column of the paper's, which counts them on mathematics alone."""


def all_tables(compared: Compared, *, paper: bool) -> list[Table]:
    """Every table that these runs have something for."""
    tables = [table_1(compared, paper=paper), table_2(compared, paper=paper)]
    if len(compared.methods) > 1 and compared.splits:
        tables += [table_against(compared), table_equal_responses(compared), table_responses_for(compared)]
    tables += [table_composition(compared, paper=paper), table_dynamics(compared)]
    tables += [table_rescued(compared)] if compared.splits else []
    tables += [table_attribution(compared, paper=paper)]
    return [*tables, table_settings(compared)] if len(compared.methods) > 1 else tables


def table_1(compared: Compared, *, paper: bool = False) -> Table:
    """Accuracy after training with 95 % intervals over seeds and prompts, rollouts, on- or off-policy."""
    runs = [run for method in compared.methods for run in method.runs]
    header = ["method", "seeds", *compared.splits, "rollouts", "type", "staleness"]
    rows = [["base model", DASH, *(interval(base_accuracy(runs, s)) for s in compared.splits), DASH, DASH, DASH]]
    for method in compared.methods:
        accuracies = [interval(final_accuracy(method, split)) for split in compared.splits]
        rollouts = spread([run.ledger.rollouts for run in method.runs], count)
        kind = "on" if is_on_policy(method) else "off"
        rows.append([name_of(method), str(len(method.runs)), *accuracies, rollouts, kind, _staleness(method)])
    if paper:
        header, rows = _with_paper_accuracy(compared, header, rows)
    note = (
        "Accuracy in percent after training, with the 95 % interval over seeds and prompts (crossed; with one seed "
        "over prompts alone). Rollouts: responses sampled for training, fresh and re-evaluated. Type: on-policy when "
        "every response trains once, and was sampled by the weights of its step or of the step before. Staleness: mean "
        "steps between sampling and training, of what one item of a batch trains the oldest."
    )
    return Table(
        key="table-1",
        title="Table 1: accuracy and rollouts",
        header=tuple(header),
        rows=tuple(map(tuple, rows)),
        note=note,
    )


def table_2(compared: Compared, *, paper: bool = False) -> Table:
    """Time, and responses and tokens by purpose: means over seeds."""
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
                str(method.runs[0].num_steps),
                _updates(method),
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
        "Means over seeds, in brackets the least and the most. Updates: of the optimizer, one per mini-batch; a batch "
        "that is not full has fewer of them. Training: seconds of all learner steps with their "
        "waits and checkpoints. Start to end: the whole run with start-up and the measurements before and after, if it "
        "was started once. Responses / tokens by purpose. Filled: share of B groups that batches held. Runs that "
        "shared the machine with another run took longer than alone."
    )
    return Table(
        key="table-2", title="Table 2: time and tokens", header=tuple(header), rows=tuple(map(tuple, rows)), note=note
    )


def table_settings(compared: Compared) -> Table:
    """In which settings methods differ from the reference."""
    rows = []
    for method in compared.others:
        settings = changed_settings(compared.reference, method)
        rows.append((name_of(method), ", ".join(f"{key} = {value}" for key, value in settings.items()) or "none"))
    note = "Settings that are not those of the reference. A star: unequal on purpose, as the study's file says."
    return Table(
        key="settings",
        title=f"Settings that differ from {compared.reference.label}",
        header=("method", "settings"),
        rows=tuple(rows),
        note=note,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _updates(method: Method) -> str:
    return spread([run.num_updates for run in method.runs if run.num_updates is not None], "{:.0f}".format)


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
    names = ["base", *(method.name for method in compared.methods)]
    columns = list(_paper_columns(compared))
    shown = [
        [*row, *(_paper_cell(published_of(config, name), column, name) for column in columns)]
        for row, name in zip(rows, names, strict=True)
    ]
    return [*header, *(f"paper: {column}" for column in columns)], shown


def _paper_columns(compared: Compared) -> Iterator[str]:
    section = published().get(section_of(compared.reference.config), {})
    known = {key for values in section.values() for key in values}
    yield from (split for split in compared.splits if split in known)
    yield "accuracy"
    yield ROLLOUTS
    yield "type"


def _paper_cell(found: dict[str, float], column: str, name: str) -> str:
    if column == "type":
        return type_of(name) or DASH
    if column == ROLLOUTS:
        value = rollouts_of(name)
        return DASH if value is None else f"{value:.0f}k"
    return DASH if column not in found else f"{found[column]:.1f}"


def _paper_time(method: Method, compared: Compared) -> str:
    ours, first = (published_of(method.config, name).get("time") for name in (method.name, compared.reference.name))
    if ours is None:
        return DASH
    return duration(60 * ours) + (f", x{ours / first:.2f}" if first else "")


def _paper_filled(method: Method) -> str:
    share = published_of(method.config, method.name).get("filled")
    return DASH if share is None else f"{share} %"
