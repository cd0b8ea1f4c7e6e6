"""Pieces of HTML that the sections of a report share. All text is escaped here."""

from __future__ import annotations

import html
from collections.abc import Sequence

Rows = Sequence[Sequence[str]]


def figure(svg: str, alt: str, caption: str) -> str:
    """An inline SVG with its words for readers who do not see it, and its caption."""
    label = html.escape(alt, quote=True)
    return f'<figure role="img" aria-label="{label}">{svg}<figcaption>{html.escape(caption)}</figcaption></figure>'


def table(header: Sequence[str], rows: Rows) -> str:
    """A table of texts."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    lines = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def paragraph(text: str) -> str:
    """Running text."""
    return f"<p>{html.escape(text)}</p>"
