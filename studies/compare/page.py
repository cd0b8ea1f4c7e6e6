"""A comparison as Markdown, with figures as PNG and PDF and tables as CSV and Markdown next to it.

FOLDER/report.md             tables and figures
       figures/figure-04.png, .pdf ...
       tables/table-1.csv, .md ...
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bapo.runtime.run_directory.files import ELSEWHERE, replace_file, storing
from studies import drawing
from studies.compare.figures import CATALOGUE, Entry
from studies.compare.gather import Compared, remarks
from studies.compare.tables import Table, all_tables, published


def write_comparison(compared: Compared, folder: Path, *, paper: bool) -> Path:
    """Everything into a folder; returns the Markdown page. Raises: StorageError, ConfigError without matplotlib."""
    tables = all_tables(compared, paper=paper)
    with storing(folder, when_full=ELSEWHERE):
        for name in ("figures", "tables"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for table in tables:
            replace_file(folder / "tables" / f"{table.key}.csv", as_csv(table).encode())
            replace_file(folder / "tables" / f"{table.key}.md", as_markdown(table).encode())
    drawn, missing = _draw(compared, folder / "figures")
    page = _page(compared, tables, drawn, missing, paper=paper)
    with storing(folder, when_full=ELSEWHERE):
        replace_file(folder / "report.md", page.encode())
    return folder / "report.md"


def as_csv(table: Table) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([table.header, *table.rows])
    return text.getvalue()


def as_markdown(table: Table) -> str:
    lines = [table.header, ["---"] * len(table.header), *table.rows]
    body = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
    return f"### {table.title}\n\n{body}\n\n{table.note}\n"


def _draw(compared: Compared, folder: Path) -> tuple[list[Entry], dict[Entry, str]]:
    """The figures that were written as PNG and PDF, and figure -> why there is none."""
    drawn: list[Entry] = []
    missing: dict[Entry, str] = {}
    for entry in CATALOGUE:
        with drawing.settings():
            figure = entry.draw(compared)
            if isinstance(figure, str):
                missing[entry] = figure
                continue
            drawing.write_files(figure, folder / entry.key)
            drawn.append(entry)
    return drawn, missing


def _page(
    compared: Compared, tables: Sequence[Table], drawn: Sequence[Entry], missing: Mapping[Entry, str], *, paper: bool
) -> str:
    parts = [
        f"# {compared.name}: comparison",
        _lead(compared),
        "\n".join(f"- {line}" for line in remarks(compared)),
        *(as_markdown(table) for table in tables),
        f"Columns of the paper: {published()['source']}. {PAPER}" if paper else "",
        *map(_figure, drawn),
        *_missing(missing),
    ]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


PAPER = "Different models and sizes: compare rankings and ratios, not values."


def _lead(compared: Compared) -> str:
    config = compared.reference.config
    runs = sum(len(method.runs) for method in compared.methods)
    return (
        f"{runs} runs of {len(compared.methods)} methods: {config.model.path}, task {config.task.name}, "
        f"{config.run.num_steps} learner steps of {config.algorithm.batch_size} prompts x "
        f"{config.algorithm.group_size} responses; compared with {' and '.join(_references(compared))}"
    )


def _references(compared: Compared) -> list[str]:
    labels = {method.name: method.label for method in compared.methods}
    return [labels[name] for name in compared.references] or [compared.reference.label]


def _figure(entry: Entry) -> str:
    file = f"figures/{entry.key}"
    return (
        f"### Figure {entry.number}: {entry.title}\n\n![{entry.ours}]({file}.png)\n\n{entry.ours} ([PDF]({file}.pdf))."
    )


def _missing(missing: Mapping[Entry, str]) -> Iterator[str]:
    if missing:
        yield "### Figures of the paper that are not included"
        yield "\n".join(f"- Figure {entry.number}, {entry.title}: {reason}" for entry, reason in missing.items())
