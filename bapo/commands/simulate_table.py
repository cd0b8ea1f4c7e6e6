"""The table of `bapo simulate`: recorded against simulated batches, in at most so many rows.

At 80 columns the numbers fit; a wider terminal also shows each batch as a bar of X1, X2, X3 against B.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.table import Table
from rich.text import Text

from bapo.types import Origin
from bapo.whatif.reevaluation import Source
from bapo.whatif.simulation import SimulatedStep

WIDE = 140
"""From this width on there is room for the bars."""
BAR_CHARS = 24
COLOURS = {Origin.X1: "blue", Origin.X2: "dark_orange", Origin.X3: "green"}
BLOCKS = {Origin.X1: "█", Origin.X2: "▓", Origin.X3: "▒"}
"""Different without colours too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """Means over a range of steps."""

    sizes: dict[Origin, float]
    bad: float
    high: float
    r_tot: float
    c2: float
    c3: float

    @property
    def total(self) -> float:
        """Groups in the batch."""
        return sum(self.sizes.values())


def mean_of(steps: Sequence[SimulatedStep]) -> Mean:
    """Means over these steps, at least one."""

    def mean(values: Iterator[float]) -> float:
        return sum(values) / len(steps)

    return Mean(
        sizes={origin: mean(float(len(step.batch[origin])) for step in steps) for origin in Origin},
        bad=mean(float(len(step.decision.bad)) for step in steps),
        high=mean(float(len(step.decision.high)) for step in steps),
        r_tot=mean(step.decision.r_tot for step in steps),
        c2=mean(step.decision.c2 for step in steps),
        c3=mean(step.decision.c3 for step in steps),
    )


def comparison_table(
    recorded: Sequence[SimulatedStep],
    simulated: Sequence[SimulatedStep],
    *,
    batch_size: int,
    changed: bool,
    num_rows: int,
    width: int,
) -> Table:
    """One row per step, or per range of steps where there are more than `num_rows`; a->b: recorded, simulated."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bright_black")
    table.add_column("step", no_wrap=True)
    for origin in Origin:
        table.add_column(origin.value.upper(), justify="right", style=COLOURS[origin], no_wrap=True)
    for name in (f"of {batch_size}", "B_bad", "B_high", "r_tot", "c2-c3"):
        table.add_column(name, justify="right", no_wrap=True)
    bars = ["recorded", "simulated"] if changed else ["batch"]
    if width >= WIDE:
        key = " ".join(f"{origin.value.upper()} {BLOCKS[origin]}" for origin in Origin)
        for name in bars:
            table.add_column(f"{name}: {key}", no_wrap=True)
    if changed:
        table.add_column("unknown", justify="right", no_wrap=True)
    size = -(-len(simulated) // num_rows)
    for start in range(0, len(simulated), size):
        then, now = recorded[start : start + size], simulated[start : start + size]
        table.add_row(*_cells(then, now, batch_size, changed=changed, wide=width >= WIDE))
    return table


def _cells(
    then: Sequence[SimulatedStep], now: Sequence[SimulatedStep], batch_size: int, *, changed: bool, wide: bool
) -> Iterator[str | Text]:
    old, new = mean_of(then), mean_of(now)
    digits = 1 if len(now) > 1 else 0

    def both(before: float, after: float) -> str:
        left, right = f"{before:.{digits}f}", f"{after:.{digits}f}"
        return right if left == right else f"{left}->{right}"

    yield str(now[0].step) if len(now) == 1 else f"{now[0].step}-{now[-1].step}"
    for origin in Origin:
        yield both(old.sizes[origin], new.sizes[origin])
    yield both(old.total, new.total)
    yield both(old.bad, new.bad)
    yield both(old.high, new.high)
    yield f"{new.r_tot:.2f}"
    yield f"{new.c2:.2f}-{new.c3:.2f}"
    if wide:
        yield from (_bar(mean, batch_size) for mean in ([old, new] if changed else [new]))
    if changed:
        yield str(sum(step.answers[Source.UNKNOWN] for step in now) or "-")


def _bar(mean: Mean, batch_size: int) -> Text:
    text = Text(no_wrap=True)
    drawn, total = 0, 0.0
    for origin in Origin:
        total += mean.sizes[origin]
        # Rounding the sums, not the parts, keeps the bar's length right.
        end = round(min(total, batch_size) * BAR_CHARS / batch_size)
        text.append(BLOCKS[origin] * (end - drawn), COLOURS[origin])
        drawn = end
    return text.append("·" * (BAR_CHARS - drawn), "bright_black")
