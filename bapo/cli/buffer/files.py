"""`bapo buffer export|snapshot|restore`: save a live buffer to a file, and restore it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from bapo.cli.arguments import Yes
from bapo.cli.buffer.target import Buffer, ParquetFile, following, reach, size, waiting_for
from bapo.core.errors import ConfigError
from bapo.runtime.run_directory.files import ELSEWHERE, replace_file, storing, to_disk

T = TypeVar("T")

AT_ONCE = 64

Force = Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")]


def export(buffer: Buffer, file: ParquetFile, force: Force = False) -> None:
    """Write all groups to a parquet file: one row per group, tokens and log-probs as lists.

    pandas.read_parquet and datasets.load_dataset("parquet", ...) read it; the column places lists the tables of each
    group. Read-only, safe while the buffer is in use; groups consumed meanwhile are skipped and counted.

    Examples:

      bapo buffer export outputs/demo-001 groups.parquet
    """
    from bapo.cli.buffer.group_files import GroupWriter  # imported late: pyarrow takes 0.2 s

    _refuse_existing(file, force=force)
    with reach(buffer) as where, GroupWriter(file) as writer:
        places = {item["group_id"]: item["places"] for item in where.admin.held().items}
        num_written = 0
        for group_ids in _chunks(following(places, "reading", len(places))):
            groups = list(where.admin.read(group_ids))
            if groups:
                writer.write(groups, [places[group.group_id] for group in groups])
            num_written += len(groups)
    gone = len(places) - num_written
    typer.echo(f"{num_written} groups in {file}" + (f"; {gone} were consumed meanwhile" if gone else ""))


def snapshot(
    buffer: Buffer,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write.")],
    force: Force = False,
) -> None:
    """Write the whole state to a file, for bapo buffer restore.

    It contains tables, open requests, batches and all groups except evaluations, is consistent even while the buffer is
    in use, and has a checksum.

    Examples:

      bapo buffer snapshot outputs/demo-001 buffer.snap
    """
    _refuse_existing(file, force=force)
    with reach(buffer) as where, waiting_for("the buffer's snapshot"):
        data = where.client.snapshot()
    with storing(file, when_full=ELSEWHERE):
        replace_file(file, data)
        to_disk(file)
    typer.echo(f"{size(len(data))} in {file}")


def restore(
    buffer: Buffer,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A snapshot.")],
    yes: Yes = False,
) -> None:
    """Replace the whole state by a snapshot; asks for confirmation. A damaged file changes nothing.

    Examples:

      bapo buffer restore outputs/demo-001 buffer.snap
      bapo buffer restore http://127.0.0.1:8700 buffer.snap --yes
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    with reach(buffer, changes=True) as where:
        status = where.client.status()
        held = f"{status.fresh_ready} fresh groups, {size(status.num_bytes)}, step {status.assembled_step}"
        where.confirm(f"replace its state ({held})?", yes=yes)
        with waiting_for(f"the buffer to accept {size(len(data))}"):
            where.client.restore(data)
        status = where.client.status()
    typer.echo(f"restored {size(status.num_bytes)}: step {status.assembled_step}, {status.fresh_ready} fresh groups")


def _refuse_existing(file: Path, *, force: bool) -> None:
    if file.exists() and not force:
        raise ConfigError(f"{file} exists; choose another file, or overwrite it with --force")


def _chunks(items: Iterable[T]) -> Iterator[list[T]]:
    remaining = iter(items)
    while chunk := list(islice(remaining, AT_ONCE)):
        yield chunk
