"""`bapo buffer import`: groups of a file into a live buffer, so that nothing of it waits for an answer afterwards."""

from __future__ import annotations

import hashlib
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from bapo.commands.buffer_where import ParquetFile, Run, Url, Where, following, reach
from bapo.errors import ContractError, FullError, UnavailableError
from bapo.types import Purpose, RolloutRequest
from bapo.wire import pack_group

if TYPE_CHECKING:
    from bapo.group_files import Row
    from bapo.messages import BufferStatus
    from bapo.types import Group

INTERRUPTED = 128 + signal.SIGINT
"""Exit code, as shells have it."""
WAITING = ("fresh", "reevaluated", "evaluation")
"""First words of the places of groups that no batch has consumed."""


def import_(
    file: ParquetFile,
    url: Url = None,
    run: Run = None,
    as_fresh: Annotated[
        bool, typer.Option("--as-fresh", help="Every row becomes a fresh group of the next step.")
    ] = False,
) -> None:
    """Put the groups of a parquet file into a live buffer: each is asked for and answered at once.

    Fresh, re-evaluated and evaluated groups return to their tables. Groups
    that a batch had consumed (B_high, retained batches) are left out, because
    they would train a second time; --as-fresh takes them, too, but under an
    id that the buffer does not hold any more. Doing it twice changes nothing.

    Every row is read, and its policy version compared with the learner's,
    before anything is asked for; what is wrong is named with its row. A row
    that the buffer refuses after that ends the import, and so does Ctrl-C:
    the rows before it are stored, and no request of the import stays open.

    Example:  bapo buffer import groups.parquet --run outputs/mine
              bapo buffer import other.parquet --as-fresh --url http://host:8700
    """
    found = _look_through(file, as_fresh=as_fresh)
    with reach(url, run, changes=True) as where:
        status = where.client.status()
        _check(file, found, status)
        step = status.assembled_step + 1 if as_fresh else None
        with _stopping_between_rows() as stopping:
            fates = _put_all(where, file, found.num_rows, step, stopping)
    left_out = found.num_rows - fates.total()
    words = ", ".join(f"{count} {fate}" for fate, count in sorted(fates.items())) or "nothing to store"
    typer.echo(words + (f"; {left_out} left out: a batch had consumed them (--as-fresh)" if left_out else ""))


def _is_waiting(row: Row) -> bool:
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
    fresh: tuple[tuple[int, int, int], ...]
    """(row, oldest version that sampled it, step that it was planned for) of those that become fresh groups."""


def _look_through(file: Path, *, as_fresh: bool) -> _Found:
    """Read every row once. Raises: ContractError that names the row that is wrong."""
    from bapo.group_files import count_rows, read_groups

    num_rows, num_reevaluated, newest, fresh = 0, 0, (0, 0), []
    known: dict[str, tuple[int, bytes]] = {}
    for row in following(read_groups(file), "looking through", count_rows(file)):
        num_rows += 1
        if as_fresh or _is_waiting(row):
            _refuse_other_content(file, row, known)
            num_reevaluated += row.group.purpose is Purpose.REEVALUATE and not as_fresh
            newest = max(newest, (int(row.group.versions[:, 1].max()), -row.number))  # of equal ones the first row
            if as_fresh or row.group.purpose is Purpose.FRESH:
                fresh.append((row.number, row.group.policy_version, 0 if as_fresh else row.group.step))
    return _Found(
        num_rows=num_rows,
        num_reevaluated=num_reevaluated,
        newest_version=newest[0],
        newest_row=-newest[1],
        fresh=tuple(fresh),
    )


def _refuse_other_content(file: Path, row: Row, known: dict[str, tuple[int, bytes]]) -> None:
    """Raises: ContractError for the id of an earlier row with another content: the buffer would keep the first one, and
    call this one a duplicate."""
    content = hashlib.blake2b(pack_group(row.group), digest_size=16).digest()
    first, held = known.setdefault(row.group.group_id, (row.number, content))
    if held != content:
        raise ContractError(
            f"row {row.number} of {file} has the group_id of row {first} ({row.group.group_id}) and another content; "
            "write another id into one of them. Nothing was asked for"
        )


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
    if status.max_staleness is not None:
        _refuse_old(file, found, status.assembled_step + 1, status.max_staleness)


def _refuse_old(file: Path, found: _Found, next_step: int, most: int) -> None:
    """Raises: ContractError when the batch of a row's step would drop it as sampled too many steps before."""
    for row, version, planned in found.fresh:
        step = max(planned, next_step)
        if step - version > most:
            raise ContractError(
                f"row {row} of {file} was sampled with policy version {version}, and step {step} takes none below "
                f"{step - most} (cadence.v - 1 + cadence.slack): its batch would drop it and have its prompt asked "
                "again. Nothing was asked for; leave such rows out, or configure a larger cadence.slack"
            )


@contextmanager
def _stopping_between_rows() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed: a row that is asked for is answered first. Pressed again, it ends at once."""
    pressed = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        if pressed:
            raise KeyboardInterrupt
        pressed = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _put_all(where: Where, file: Path, num_rows: int, step: int | None, stopping: Callable[[], bool]) -> Counter[str]:
    """Rows by what became of them.

    One at a time: what is refused is known then, and no other row is asked for without its answer.

    Args:
        step: make all rows fresh groups that are planned for this step; None: leave them what they are, without those
            that a batch had consumed.
        stopping: asked before each row.

    Raises: ContractError; FullError; UnavailableError. They say at which row, and how many before it are stored.
    """
    from bapo.group_files import read_groups

    fates: Counter[str] = Counter()
    for row in following(read_groups(file), "storing", num_rows):
        if stopping():
            typer.echo(
                f"stopped before row {row.number}, {fates['stored']} rows are stored; the same import goes on", err=True
            )
            raise typer.Exit(INTERRUPTED)
        if step is None and not _is_waiting(row):
            continue
        group = row.group if step is None else replace(row.group, purpose=Purpose.FRESH, step=step, label="")
        named = f"row {row.number} of {file} (group {group.group_id}), {fates['stored']} rows before it are stored"
        try:
            fates[_put(where, group)] += 1
        except (ContractError, FullError) as error:
            raise type(error)(f"the buffer refuses {named}: {error}") from error
        except UnavailableError as error:
            raise UnavailableError(
                f"the import ended at {named}; import the file again when the buffer answers, because this row may be "
                f"asked for by now and have no answer: {error}"
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
