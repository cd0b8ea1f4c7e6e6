"""`bapo buffer export|import|snapshot|restore`: what a live buffer holds as a file, and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from bapo.commands.buffer_where import Run, Url, Where, Yes, reach, size
from bapo.errors import ConfigError, ContractError, FullError
from bapo.storage import replace_file, storing
from bapo.types import Purpose, RolloutRequest
from bapo.wire import pack_group

if TYPE_CHECKING:
    from bapo.group_files import Row
    from bapo.messages import BufferStatus
    from bapo.types import Group

T = TypeVar("T")

AT_ONCE = 64
WAITING = ("fresh", "reevaluated", "evaluation")
"""First words of the places of groups that no batch has consumed."""

File = Annotated[Path, typer.Argument(metavar="FILE", help="A parquet file.")]
Force = Annotated[bool, typer.Option("--force", help="Replace a file that exists.")]


def export(
    file: File,
    url: Url = None,
    run: Run = None,
    force: Force = False,
) -> None:
    """Write every group of a live buffer into a parquet file: one row per group, tokens and log-probs as lists.

    pandas.read_parquet and datasets.load_dataset("parquet", ...) read it;
    `places` says where each group was. The buffer is not changed and may be
    in use; a group that is consumed meanwhile is left out and counted.

    Example:  bapo buffer export groups.parquet --run outputs/demo-001
    """
    from bapo.group_files import GroupWriter  # here: pyarrow takes 0.2 s

    _refuse_existing(file, force=force)
    with reach(url, run) as where, GroupWriter(file) as writer:
        places = {item["group_id"]: item["places"] for item in where.admin.held().items}
        num_written = 0
        for group_ids in _chunks(places):
            groups = list(where.admin.read(group_ids))
            if groups:
                writer.write(groups, [places[group.group_id] for group in groups])
            num_written += len(groups)
    gone = len(places) - num_written
    typer.echo(f"{num_written} groups in {file}" + (f"; {gone} were consumed meanwhile" if gone else ""))


def import_(
    file: File,
    url: Url = None,
    run: Run = None,
    as_fresh: Annotated[
        bool, typer.Option("--as-fresh", help="Every row becomes a fresh group of the next step.")
    ] = False,
) -> None:
    """Put the groups of a parquet file into a live buffer: each is asked for and answered at once.

    Fresh, re-evaluated and evaluated groups return to their tables. Groups
    that a batch had consumed (B_high, retained batches) are left out, because
    they would train a second time; --as-fresh takes them, too. Doing it twice
    changes nothing.

    Every row is read, and its policy version compared with the learner's,
    before anything is asked for; what is wrong is named with its row. A row
    that the buffer refuses after that ends the import: the rows before it
    are stored, and no request of the import stays open.

    Example:  bapo buffer import groups.parquet --run outputs/mine
              bapo buffer import other.parquet --as-fresh --url http://host:8700
    """
    found = _look_through(file, as_fresh=as_fresh)
    with reach(url, run) as where:
        status = where.client.status()
        _check(file, found, status)
        step = status.assembled_step + 1 if as_fresh else None
        fates = _put_all(where, file, step)
    left_out = found.num_rows - fates.total()
    words = ", ".join(f"{count} {fate}" for fate, count in sorted(fates.items())) or "nothing to store"
    typer.echo(words + (f"; {left_out} left out: a batch had consumed them (--as-fresh)" if left_out else ""))


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
    with reach(url, run) as where:
        data = where.client.snapshot()
    with storing(file):
        replace_file(file, data)
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
    with reach(url, run) as where:
        status = where.client.status()
        held = f"{status.fresh_ready} fresh groups, {size(status.num_bytes)}, step {status.assembled_step}"
        if not yes:
            typer.confirm(f"replace what the buffer of run {status.run} at {where.url} holds ({held})?", abort=True)
        where.client.restore(data)
        status = where.client.status()
    typer.echo(f"restored {size(status.num_bytes)}: step {status.assembled_step}, {status.fresh_ready} fresh groups")


def _refuse_existing(file: Path, *, force: bool) -> None:
    if file.exists() and not force:
        raise ConfigError(f"{file} exists already; name another file, or replace it with --force")


def is_waiting(row: Row) -> bool:
    """Whether no batch had consumed the group, as far as the file says."""
    return not row.places or any(place.startswith(WAITING) for place in row.places)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What an import must know of the whole file before it asks for anything."""

    num_rows: int
    num_reevaluated: int
    newest_version: int
    """That sampled any token of a row that is to be stored; 0 when none is."""
    newest_row: int


def _look_through(file: Path, *, as_fresh: bool) -> _Found:
    """Read every row once. Raises: ContractError that names the row that is wrong."""
    from bapo.group_files import read_groups

    num_rows, num_reevaluated, newest = 0, 0, (0, 0)
    for row in read_groups(file):
        num_rows += 1
        if as_fresh or is_waiting(row):
            num_reevaluated += row.group.purpose is Purpose.REEVALUATE and not as_fresh
            newest = max(newest, (int(row.group.versions[:, 1].max()), -row.number))  # of equal ones the first row
    return _Found(num_rows=num_rows, num_reevaluated=num_reevaluated, newest_version=newest[0], newest_row=-newest[1])


def _check(file: Path, found: _Found, status: BufferStatus) -> None:
    """Raises: ContractError when the buffer would refuse a row for what the whole file and its state say."""
    if found.num_reevaluated and status.reevaluation_rounds:
        raise ContractError(
            f"{file} has {found.num_reevaluated} re-evaluated groups and the buffer has re-evaluation rounds of its "
            "own, which count their answers; import into a fresh service, or with --as-fresh"
        )
    # As the service: the learner publishes a version before it says so, and at most one behind the newest batch.
    published = max(status.assembled_step + 1, status.policy_version)
    if found.newest_version > published:
        raise ContractError(
            f"row {found.newest_row} of {file} was sampled with policy version {found.newest_version}, but the "
            f"learner has published {published} at most; nothing was asked for. Import into the run that made the "
            "file, restore a snapshot instead (bapo buffer restore), or report the learner's progress first "
            "(BufferClient.report_progress)"
        )


def _put_all(where: Where, file: Path, step: int | None) -> Counter[str]:
    """Rows by what became of them.

    One at a time: what is refused is known then, and no other row is asked for without its answer.

    Args:
        step: make all rows fresh groups that are planned for this step; None: leave them what they are, without those
            that a batch had consumed.
    Raises: ContractError; FullError. They say which row was refused, and how many before it are stored.
    """
    from bapo.group_files import read_groups

    fates: Counter[str] = Counter()
    for row in read_groups(file):
        if step is None and not is_waiting(row):
            continue
        group = row.group if step is None else replace(row.group, purpose=Purpose.FRESH, step=step, label="")
        try:
            fates[_put(where, group)] += 1
        except (ContractError, FullError) as error:
            raise type(error)(
                f"the buffer refuses row {row.number} of {file} (group {group.group_id}), {fates['stored']} rows "
                f"before it are stored: {error}"
            ) from error
    return fates


def _put(where: Where, group: Group) -> str:
    """Ask for the group and answer at once; what became of it.

    Raises: ContractError; FullError. Nothing that was asked for here is open then: nobody else would answer it.
    """
    if group.purpose is Purpose.FRESH:
        where.admin.require_room()
    is_new = where.client.enqueue([_request_of(group)]) == 1
    try:
        return where.client.push([pack_group(group)])[group.group_id]
    except (ContractError, FullError) as error:
        if is_new and _is_withdrawn(where, group.group_id):
            raise type(error)(
                f"{error}. Its request is withdrawn; a group of this id is a duplicate now: write another group_id "
                "into the row to import it"
            ) from error
        raise


def _request_of(group: Group) -> RolloutRequest:
    return RolloutRequest(
        request_id=group.group_id,
        prompt=group.prompt,
        group_size=group.size,
        purpose=group.purpose,
        step=group.step,
        min_version=group.policy_version,
        label=group.label,
    )


def _is_withdrawn(where: Where, request_id: str) -> bool:
    """Whether the request was still open."""
    try:
        where.admin.drop_request(request_id)
    except ContractError:
        return False
    return True


def _chunks(items: Iterable[T]) -> Iterator[list[T]]:
    remaining = iter(items)
    while chunk := list(islice(remaining, AT_ONCE)):
        yield chunk
