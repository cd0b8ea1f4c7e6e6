"""A comparison as one page that opens offline, with figures as PNG and PDF and tables as CSV and Markdown beside it.

FOLDER/index.html            tables and figures, nothing from outside
       figures/figure-04.png, .pdf ...
       tables/table-1.csv, .md ...
"""

from __future__ import annotations

import csv
import html
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from bapo.comparison.catalogue import CATALOGUE, Entry
from bapo.comparison.cells import Table
from bapo.comparison.gather import Compared
from bapo.comparison.published import published
from bapo.comparison.remarks import remarks
from bapo.comparison.tables import all_tables
from bapo.report import drawing
from bapo.storage import ELSEWHERE, replace_file, storing

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem;
       color: light-dark(#1f2328, #d7dbe0); background: light-dark(#fff, #14171b); }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 2.2rem 0 .3rem; }
p { margin: .3rem 0; } p.lead, p.note { opacity: .8; } p.note { font-size: .88rem; max-width: 60rem; }
nav { display: flex; flex-wrap: wrap; gap: .2rem .9rem; font-size: .88rem; margin-top: .8rem; }
a { color: light-dark(#0b57d0, #8ab4f8); }
figure { margin: 0; max-width: 56rem; overflow-x: auto; } svg { width: 100%; min-width: 34rem; height: auto; }
figcaption { font-size: .88rem; opacity: .8; position: sticky; left: 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .88rem; }
th, td { text-align: left; padding: .15rem 1rem .15rem 0; border-bottom: 1px solid #8884; white-space: nowrap; }
th { font-weight: 600; vertical-align: bottom; }
td:last-child { white-space: normal; min-width: 8rem; }
td:first-child, th:first-child { position: sticky; left: 0; background: light-dark(#fff, #14171b); }
ul { padding-left: 1.2rem; } code { font-size: .9em; }
"""


def write_comparison(compared: Compared, folder: Path, *, paper: bool) -> Path:
    """Everything into a folder; returns the page. Raises: StorageError, ConfigError without matplotlib."""
    tables = all_tables(compared, paper=paper)
    with storing(folder, when_full=ELSEWHERE):
        for name in ("figures", "tables"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for table in tables:
            replace_file(folder / "tables" / f"{table.key}.csv", as_csv(table).encode())
            replace_file(folder / "tables" / f"{table.key}.md", as_markdown(table).encode())
    pictures, missing = _draw(compared, folder / "figures")
    page = _page(compared, tables, pictures, missing, paper=paper)
    with storing(folder, when_full=ELSEWHERE):
        replace_file(folder / "index.html", page.encode())
    return folder / "index.html"


def as_csv(table: Table) -> str:
    """Header and rows, comma-separated."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([table.header, *table.rows])
    return text.getvalue()


def as_markdown(table: Table) -> str:
    """A heading, the table and its note."""
    lines = [table.header, ["---"] * len(table.header), *table.rows]
    body = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"### {table.title}\n\n{body}\n\n{table.note}\n"


def _draw(compared: Compared, folder: Path) -> tuple[dict[Entry, str], dict[Entry, str]]:
    """Figure -> its SVG, and figure -> why there is none; PNG and PDF are written."""
    pictures: dict[Entry, str] = {}
    missing: dict[Entry, str] = {}
    for entry in CATALOGUE:
        with drawing.settings():
            drawn = entry.draw(compared)
            if isinstance(drawn, str):
                missing[entry] = drawn
                continue
            drawing.write_files(drawn, folder / entry.key)
            pictures[entry] = drawing.svg(drawn)
    return pictures, missing


def _page(
    compared: Compared, tables: Sequence[Table], pictures: dict[Entry, str], missing: dict[Entry, str], *, paper: bool
) -> str:
    title = html.escape(f"{compared.name}: comparison")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    body = [
        f"<h1>{html.escape(compared.name)}</h1>",
        f'<p class="lead">{html.escape(_lead(compared))}</p>',
        *_remarks(compared),
        _contents(tables, pictures),
        *(_table(table) for table in tables),
        *([f'<p class="note">Columns of the paper: {published()["source"]}. {PAPER}</p>'] if paper else []),
        *(_figure(entry, picture) for entry, picture in pictures.items()),
        *_missing(missing),
    ]
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>\n<body>\n' + "\n".join(
        [*body, "</body></html>\n"]
    )


PAPER = "Other models, other sizes: compare orders and ratios, not values."


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


def _remarks(compared: Compared) -> Iterator[str]:
    lines = remarks(compared)
    if lines:
        yield "<ul>" + "".join(f"<li>{html.escape(line)}</li>" for line in lines) + "</ul>"


def _contents(tables: Sequence[Table], pictures: dict[Entry, str]) -> str:
    links = [(table.key, table.title) for table in tables]
    links += [(entry.key, f"Figure {entry.number}") for entry in pictures]
    return "<nav>" + "".join(f'<a href="#{key}">{html.escape(words)}</a>' for key, words in links) + "</nav>"


def _table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in table.header)
    rows = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows)
    return (
        f'<h2 id="{table.key}">{html.escape(table.title)}</h2>\n<div class="wide"><table><tr>{head}</tr>{rows}</table>'
        f'</div>\n<p class="note">{html.escape(table.note)}</p>'
    )


def _figure(entry: Entry, picture: str) -> str:
    title = html.escape(f"Figure {entry.number}: {entry.title}")
    files = ", ".join(f'<a href="figures/{entry.key}.{kind}">{kind.upper()}</a>' for kind in ("png", "pdf"))
    return (
        f'<h2 id="{entry.key}">{title}</h2>\n<figure role="img" aria-label="{html.escape(entry.ours, quote=True)}">'
        f"{picture}<figcaption>{html.escape(entry.ours)}. {files}</figcaption></figure>"
    )


def _missing(missing: dict[Entry, str]) -> Iterator[str]:
    if missing:
        yield "<h2>Figures of the paper that are not here</h2><ul>"
        for entry, reason in missing.items():
            yield f"<li>Figure {entry.number}, {html.escape(entry.title)}: {html.escape(reason)}</li>"
        yield "</ul>"
