"""Tables of benchmarks in the pages of docs/, each between two marks."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

END = "<!-- end -->"


def replace_between(page: Path, begin: str, end: str, table: str) -> None:
    """Write `table` between two marks of a page. Raises: ValueError if the page does not have both, in this order."""
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"{page} does not have {begin} followed by {end}")
    page.write_text(f"{before}{begin}\n\n{table}\n\n{end}{after}", encoding="utf-8")


def print_or_write(table: Callable[[], str], page: Path, begin: str, description: str | None) -> None:
    """The command of a benchmark that has a table in a page.

    Args:
        begin: the line of the page before it; after it comes `END`.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"into {page.name}")
    args = parser.parse_args()
    found = table()
    print(found)
    if args.write:
        replace_between(page, begin, END, found)
