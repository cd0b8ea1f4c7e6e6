"""Progress of slow checks, which may access the Hub or import torch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

SILENT_S = 2.0
"""A check that takes longer than this prints a line."""


@contextmanager
def announced(what: str) -> Iterator[None]:
    """On a terminal, an animated line that disappears; elsewhere one line on stderr, after two seconds."""
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        with console.status(f"checking {what}"):
            yield
        return
    late = threading.Timer(SILENT_S, lambda: console.print(f"checking {what} ...", markup=False, soft_wrap=True))
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()
