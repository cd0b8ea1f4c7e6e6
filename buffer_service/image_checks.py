"""What is asked of an image that somebody has sent, before anything of the run that it replaces is touched.

A snapshot's checksum finds damage, and says nothing of who wrote the rest: it may come from another machine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Annotated

import msgspec

from bapo.errors import ContractError
from bapo.types import Fate, Prompt, RolloutRequest
from buffer_service.groups import GroupRecord
from buffer_service.image import Image
from buffer_service.ingest import LABEL, NAME, PROMPT_ID

STEPS = 1 << 21
"""As `schemas.Version`: a queue's score has 21 bits for a step."""
COUNTS = 1 << 53
"""Lua holds numbers as doubles."""


Count = Annotated[int, msgspec.Meta(ge=0)]


class _Composition(msgspec.Struct):
    """What the service itself reads of a batch's line; people read the rest."""

    x1: Count
    x2: Count
    x3: Count
    batch_size: Annotated[int, msgspec.Meta(ge=1)]


def require_image(image: Image) -> None:
    """Refuse an image that no run can have left. Raises: ContractError."""
    try:
        # Strict: no bool for a number, no text for bytes, however deep.
        msgspec.convert(msgspec.to_builtins(image, builtin_types=(bytes,)), Image)
        for line in image.compositions:
            json.dumps(line, allow_nan=False)
            msgspec.convert(line, _Composition)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ContractError(f"the snapshot holds what no run has: {error}"[:500]) from error
    for what, step in _steps(image):
        if not 0 <= step < STEPS:
            raise ContractError(f"the snapshot has {what} {step}, not one from 0 to {STEPS - 1}")
    for what, number in _counts(image):
        if not 0 <= number < COUNTS:
            raise ContractError(f"the snapshot has {what} {number}, not one from 0 to {COUNTS - 1}")
    for what, value in _seconds_and_means(image):
        if not math.isfinite(value):
            raise ContractError(f"the snapshot has {what} {value}")
    _require_names(image)
    _require_records(image)


def _requests(image: Image) -> Iterator[RolloutRequest]:
    yield from image.open_requests
    yield from (group.request for group in image.fresh)


def _steps(image: Image) -> Iterator[tuple[str, int]]:
    tables, selector = image.tables, image.selector
    for step in (image.progress.step, image.progress.policy_version, image.committed, image.checkpointed, tables.step):
        yield "a step", step
    for request in _requests(image):
        yield from (("a request of step", request.step), ("a request for version", request.min_version))
    for record in image.all_records.values():
        yield from (("a group of step", record.step), ("a group of version", record.policy_version))
    births = [*(e.birth for e in tables.bad), *(e.birth for e in tables.high), *(e.birth for e in image.stale)]
    for birth in births:
        yield "an entry born in step", birth
    for extra in tables.extra_rounds:
        yield from (("a round of step", extra.step), ("a round", extra.round))
    for batch in image.batches:
        yield "a batch of step", batch.step
    for step in (*image.rounds, *image.outcomes, selector.round, selector.through):
        yield "a round of step", step


def _counts(image: Image) -> Iterator[tuple[str, int]]:
    for number in (image.cursor, image.fresh_dropped, image.fresh_spares, *image.counters.values()):
        yield "a count of", number
    for number in image.rounds.values():
        yield "a round of", number
    for record in image.all_records.values():
        yield from (("bytes of a group", record.num_bytes), ("tokens of a group", record.num_tokens))
    for batch in image.batches:
        yield "bytes of a batch", batch.num_bytes
    for request in _requests(image):
        yield from (("a group size of", request.group_size - 1), ("attempts of", request.attempts))
    for entry in image.tables.bad:
        yield "attempts of", entry.attempts


def _seconds_and_means(image: Image) -> Iterator[tuple[str, float]]:
    tables = image.tables
    yield from (("a threshold", value) for value in (tables.r_tot, tables.c2, tables.c3) if value is not None)
    yield from (("a mean reward", entry.mu) for entry in tables.bad)
    told: list[GroupRecord | Fate] = [*image.all_records.values(), *image.stale]
    for record in told:
        yield from (("a reward", reward) for reward in record.rewards)
        yield from (("a time", value) for value in (record.claimed_at, record.sample_s, record.grade_s))
    yield from (("a reward", reward) for stat in tables.high for reward in (stat.reward_sum, *stat.rewards))


def _require_names(image: Image) -> None:
    records = image.all_records.values()
    requests = list(_requests(image))
    prompts: list[Prompt] = [*image.bad_prompts.values(), *(request.prompt for request in requests)]
    names = [*image.references, *(r.worker_id for r in records), *(r.request_id for r in requests)]
    prompt_ids = [
        *(prompt.prompt_id for prompt in prompts),
        *(record.prompt_id for record in records),
        *(entry.prompt_id for entry in image.tables.bad),
        *(stat.prompt_id for stat in image.tables.high),
    ]
    labels = [*(record.label for record in records), *(request.label for request in requests)]
    for pattern, given in ((NAME, names), (PROMPT_ID, prompt_ids), (LABEL, labels)):
        wrong = next((name for name in given if not pattern.fullmatch(name)), None)
        if wrong is not None:
            raise ContractError(f"the snapshot has the id {wrong!r:.200}, which is no plain name")


def _require_records(image: Image) -> None:
    records: Mapping[str, GroupRecord] = image.all_records
    missing = sorted(image.references.keys() - records.keys())
    if missing:
        raise ContractError(f"the snapshot has no record of group {missing[0]}, which its tables or batches name")
    without = sorted({entry.prompt_id for entry in image.tables.bad} - image.bad_prompts.keys())
    if without:
        raise ContractError(f"the snapshot has no text of the hard prompt {without[0]}")
    for batch in image.batches:
        if sum(records[group_id].num_bytes for group_id in batch.group_ids) != batch.num_bytes:
            raise ContractError(f"the snapshot's batch {batch.step} has not the {batch.num_bytes} bytes that it says")
