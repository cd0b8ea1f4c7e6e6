"""`bapo buffer export|snapshot|restore`: what a live buffer holds as a file, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from bapo.cli.buffer.target import ParquetFile, Run, Url, Yes, following, reach, size, waiting_for
from bapo.core.errors import ConfigError
from bapo.runtime.run_directory.files import ELSEWHERE, replace_file, storing, to_disk

T = TypeVar("T")

AT_ONCE = 64

Force = Annotated[bool, typer.Option("--force", help="Replace a file that exists.")]


def export(file: ParquetFile, url: Url = None, run: Run = None, force: Force = False) -> None:
    """Write every group of a live buffer into a parquet file: one row per group, tokens and log-probs as lists.

    pandas.read_parquet and datasets.load_dataset("parquet", ...) read it;
    `places` says where each group was. The buffer is not changed and may be
    in use; a group that is consumed meanwhile is left out and counted.

    Example:  bapo buffer export groups.parquet --run outputs/demo-001
    """
    from bapo.analysis.group_files import GroupWriter  # here: pyarrow takes 0.2 s

    _refuse_existing(file, force=force)
    with reach(url, run) as where, GroupWriter(file) as writer:
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
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write the snapshot.")],
    url: Url = None,
    run: Run = None,
    force: Force = False,
) -> None:
    """Write the whole state of a live buffer into one file: what `bapo buffer restore` and a checkpoint bring back.

    Tables, open requests, batches and all groups but evaluations; consistent
    while the buffer is in use, and with a checksum.

    Example:  bapo buffer snapshot buffer.snap --run outputs/demo-001
    """
    _refuse_existing(file, force=force)
    with reach(url, run) as where, waiting_for("the buffer's snapshot"):
        data = where.client.snapshot()
    with storing(file, when_full=ELSEWHERE):
        replace_file(file, data)
        to_disk(file)
    typer.echo(f"{size(len(data))} in {file}")


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A snapshot.")],
    url: Url = None,
    run: Run = None,
    yes: Yes = False,
) -> None:
    """Replace everything that a live buffer holds by a snapshot, after a question. A damaged one changes nothing.

    Example:  bapo buffer restore buffer.snap --url http://127.0.0.1:8700
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    with reach(url, run, changes=True) as where:
        status = where.client.status()
        held = f"{status.fresh_ready} fresh groups, {size(status.num_bytes)}, step {status.assembled_step}"
        if not yes:
            typer.confirm(f"replace what the buffer of run {status.run} at {where.url} holds ({held})?", abort=True)
        with waiting_for(f"the buffer to take {size(len(data))}"):
            where.client.restore(data)
        status = where.client.status()
    typer.echo(f"restored {size(status.num_bytes)}: step {status.assembled_step}, {status.fresh_ready} fresh groups")


def _refuse_existing(file: Path, *, force: bool) -> None:
    if file.exists() and not force:
        raise ConfigError(f"{file} exists already; name another file, or replace it with --force")


def _chunks(items: Iterable[T]) -> Iterator[list[T]]:
    remaining = iter(items)
    while chunk := list(islice(remaining, AT_ONCE)):
        yield chunk
