"""A simulation as one page that opens offline: what each batch was made of, recorded above simulated."""

from __future__ import annotations

import html
from collections.abc import Sequence

from bapo.report.data import Composition
from bapo.report.figures import composition_figure
from bapo.report.page import STYLE
from bapo.types import Origin
from bapo.whatif.simulation import SimulatedStep


def make_page(
    title: str, recorded: Sequence[SimulatedStep], simulated: Sequence[SimulatedStep], batch_size: int, notes: list[str]
) -> str:
    """The page as text.

    Args:
        notes: sentences that stand above the figures: settings, how exact it is, what it does not answer.
    """
    parts = [("Recorded", recorded), ("Simulated", simulated)]
    body = [f"<h1>{html.escape(title)}</h1>", *(f"<p>{html.escape(note)}</p>" for note in notes)]
    for name, steps in parts:
        body += [f"<h2>{name}</h2>", f"<figure>{composition_figure(composition_of(steps, batch_size))}</figure>"]
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{html.escape(title)}</title>'
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>\n<body>\n' + "\n".join(
        [*body, "</body></html>\n"]
    )


def composition_of(steps: Sequence[SimulatedStep], batch_size: int) -> Composition:
    """X1, X2, X3 and B of every step."""
    sizes = {origin: [len(step.batch[origin]) for step in steps] for origin in Origin}
    return Composition(
        steps=[step.step for step in steps],
        x1=sizes[Origin.X1],
        x2=sizes[Origin.X2],
        x3=sizes[Origin.X3],
        batch_size=batch_size,
    )
