"""Target of `bapo buffer` commands, a run or a URL; and tables for their output."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from bapo.cli.arguments import complete_run, confirm, open_run, started_line
from bapo.config.load import load_resolved
from bapo.core.errors import DeadlineError, FullError, UnavailableError
from bapo.core.text import plain
from bapo.runtime.auth.token_store import token_for_run
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.transport.buffer_admin import BufferAdmin
from bapo.transport.buffer_client import BufferClient
from bapo.transport.endpoints import buffer_url

T = TypeVar("T")

PIPE_CHARS = 200
LONG_ID = 32
GAP = "  "
RETRY_S = 2.0

_WHERE = "A run directory, latest, or the URL of a buffer service, such as http://host:8700."
Buffer = Annotated[str, typer.Argument(metavar="RUN|URL", help=_WHERE, autocompletion=complete_run)]
"""For commands that change a buffer or take another argument: required, never inferred."""
BufferOrLatest = Annotated[
    str, typer.Argument(metavar="RUN|URL", help=f"{_WHERE} Default: latest.", autocompletion=complete_run)
]
"""For read-only commands."""
ParquetFile = Annotated[Path, typer.Argument(metavar="FILE", help="A parquet file.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    url: str
    client: BufferClient
    admin: BufferAdmin

    def confirm(self, question: str, *, yes: bool) -> None:
        """Print the buffer to stderr and ask for confirmation of an irreversible change.

        Raises: typer.Abort if declined; ConfigError without a terminal and without `yes`.
        """
        typer.echo(f"buffer of run {plain(self.client.status().run)} at {self.url}", err=True)
        confirm(question, yes=yes, loses=True)


@contextmanager
def reach(buffer: str, *, changes: bool = False) -> Iterator[Where]:
    """Connect to the buffer of a run, or at a URL.

    Args:
        changes: the command changes the buffer, so its run is printed to stderr.
    Raises: ConfigError; UnavailableError with a hint if it does not respond.
    """
    url = buffer if "://" in buffer else None
    directory = None if url else open_run(buffer)
    if changes and directory:
        typer.echo(plain(started_line(directory)), err=True)
    hint = _hint(directory)
    try:
        address = url or _announced(directory)
        token = token_for_run(directory.path) if directory else None
        client = BufferClient(address, retry_s=RETRY_S, full_s=RETRY_S, token=token)
        yield Where(url=client.url, client=client, admin=BufferAdmin(address, retry_s=RETRY_S, token=token))
    except FullError:
        raise  # the service is up
    except UnavailableError as error:
        if _is_there(error):
            raise
        raise UnavailableError(f"{error}{hint}") from error


def _is_there(error: UnavailableError) -> bool:
    """Whether the service is up: it reported the failure itself (e.g. of its Redis), or accepts calls but hangs."""
    return error.__cause__ is None or isinstance(error.__cause__, TimeoutError)


def _announced(directory: RunDirectory | None) -> str:
    assert directory is not None
    try:
        return buffer_url(load_resolved(directory.config_path), directory, timeout_s=0.0)
    except DeadlineError as error:
        raise UnavailableError(f"the buffer of run {directory.path} is not listening yet") from error


def _hint(directory: RunDirectory | None) -> str:
    if directory is None:
        return "; is a buffer service running there?"
    return f"; start the run, or only its buffer: bapo up buffer --run {directory.path}"


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))


def make_console(*, stderr: bool = False) -> Console:
    """Console as wide as the terminal; wide enough for any id in a pipe."""
    console = Console(highlight=False, markup=False, stderr=stderr)
    if not console.is_terminal:
        console.width = PIPE_CHARS
    return console


def following(items: Iterable[T], doing: str, total: int) -> Iterator[T]:
    """Iterate with a progress bar on a terminal."""
    console = make_console(stderr=True)
    seen = track(items, doing, total=total, console=console, transient=True, disable=not console.is_terminal)
    return iter(seen)


def waiting_for(what: str) -> AbstractContextManager[object]:
    """Show a spinner during a long call on a terminal."""
    return make_console(stderr=True).status(f"waiting for {what}")


def table(
    columns: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    *,
    ids: Sequence[str] = (),
) -> Table:
    """A table with the given `columns`; numbers are right-aligned.

    Args:
        ids: columns of ids: left-aligned, folded only if very long.
    """
    cells = {name: [shown(row.get(name)) for row in rows] for name in columns}
    longest = {name: max(map(len, [name, *cells[name]])) for name in columns}
    made = Table(box=None, padding=(0, len(GAP), 0, 0), pad_edge=False, header_style="bright_black")
    for name in columns:
        is_whole = not (name in ids and longest[name] > LONG_ID)
        made.add_column(name, justify="left" if name in ids else "right", overflow="fold", no_wrap=is_whole)
    for row in zip(*cells.values(), strict=True):
        made.add_row(*map(Text, row))
    return made


def facts(rows: Sequence[tuple[str, str]]) -> Table:
    made = Table.grid(padding=(0, 2))
    made.add_column(style="bright_black", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in rows:
        made.add_row(name, Text("\n".join(map(plain, value.split("\n")))))
    return made


def shown(value: Any) -> str:
    """Format a cell: 0.125, 12, -, text in one line."""
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else plain(str(value).replace("\n", " "))


def size(num_bytes: float) -> str:
    """Format bytes: 512 B, 1.2 kB, 34.5 MB."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"
