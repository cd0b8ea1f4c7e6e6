"""Assemble the batch of a step: read a view, let the composer decide, apply the decision atomically.

    view (O(B)) --stale groups?--> replace_stale, read again
         |
         +--decide (pure)--> NeedMore --edit_tables (atomic, fenced)--> read again with another round
                         '-> Decision --tables_after, batch_of (pure)--> commit_assembly (atomic, fenced)
                                                                              |
                                                                              +-- lost the race: read again

The fence is the only check for a lost race: of concurrent assemblies of one step exactly one commits, and all
instances serve the committed batch.
"""

from __future__ import annotations

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from bapo.algorithms.composer import AssemblyView, Composer, Decision, NeedMore, Reason
from bapo.algorithms.randomness import rng_for
from bapo.algorithms.selectors.registry import learns
from bapo.algorithms.settings import AlgorithmConfig
from bapo.config.tree import Config
from bapo.core.batch_items import KINDS, Item, Part, frame_order, item_fields
from bapo.core.codec import result_map
from bapo.core.errors import ContractError
from bapo.core.success_counts import pack_success_counts, success_counts_of
from bapo.core.types import GroupResult, Origin, RolloutRequest
from bapo.transport.messages import BufferStatus, ExtraRound
from buffer_service.state import (
    Assembly,
    BatchRecord,
    Demand,
    GroupRecord,
    Readiness,
    Replacement,
    StepReading,
    Tables,
    View,
)
from buffer_service.store.redis.store import RedisStore

log = logging.getLogger(__name__)

ResultFields = dict[str, Any]
"""A GroupResult as stored in a batch header."""

_REPEATED = re.compile(r"^(.*)~(\d+)$")


class Wait:
    """The missing groups were requested; there is no point in reading again immediately."""


class Assembler:
    """Assembles batches from groups with one composer."""

    def __init__(
        self, store: RedisStore, composer: Composer, config: Config, *, now: Callable[[], float] = time.time
    ) -> None:
        self._store, self._composer, self._config, self._now = store, composer, config, now
        self._schedule = composer.fresh_schedule

    def wanted(self, step: int) -> int:
        """Number of fresh groups the step needs before its view is read, if it is the next step."""
        first = self._schedule.at(step)
        if self._composer.max_rounds == 1 or in_step_order(self._config):
            return first  # in step order, the requests planned for the step determine what is missing
        return self._store.tables().needs(first)

    def read_step(self, step: int) -> StepReading:
        """Read the step from the store."""
        return self._store.read_step(step, self._schedule.at(step) * self._composer.max_rounds)

    def assemble(self, reading: StepReading) -> Assembly | Wait | None:
        """Assemble a step from its reading.

        Returns: Wait if it needs another round of fresh groups; None to read again, because groups were stale or
            another instance committed first.
        Raises: ContractError if the composer violates an invariant of Decision.
        """
        step = reading.step
        if reading.ready.assembled != step - 1:
            return None
        found = reading.view()
        fresh = fresh_of(step, found, self._schedule.at(step), self._config)
        if fresh is None:
            return None if found.tables.demand is None else Wait()
        if stale := [record for record in fresh if is_stale(record, step, self._config)]:
            self._replace(stale, step)
            return None
        view = in_order(found, fresh)
        decision = decide(step, view, self._composer, self._config)
        if isinstance(decision, NeedMore):
            return self._demand(step, view.tables, decision)
        assembly = self._assembly(step, view, decision)
        return assembly if self._store.commit_assembly(assembly) else None

    def _replace(self, stale: Sequence[GroupRecord], step: int) -> None:
        requests = self._store.fresh_requests([record.group_id for record in stale])
        pairs = zip(stale, requests, strict=True)
        # A group without a request was consumed or replaced by another instance.
        left = [self._replacement(record, request, step) for record, request in pairs if request is not None]
        log.info("step %d dropped=%d reason=%s: their prompts are re-sampled", step, len(left), Reason.STALE)
        while left:
            taken = set(self._store.replace_stale(left, hold=keeps_texts(self._config, step)))
            left = [_with_next_id(item) for item in left if item.result.group_id in taken]

    def _replacement(self, record: GroupRecord, request: RolloutRequest, step: int) -> Replacement:
        return Replacement(
            result=record.result(None, Reason.STALE, birth=step),
            request=msgspec.structs.replace(
                request,
                request_id=repeated_id(request.request_id),
                min_version=max(request.min_version, self._config.cadence.min_version(step)),
            ),
        )

    def _demand(self, step: int, before: Tables, wish: NeedMore) -> Wait | None:
        """Record that the step needs another round; fenced, so that concurrent instances request only one."""
        size = self._schedule.at(step)
        demand = Demand(
            step=step,
            rounds=2 if before.demand is None else before.demand.rounds + 1,
            most=self._composer.max_rounds,
            found=wish.found,
            wanted=wish.wanted,
            num_fresh=before.needs(size) + size,
        )
        extra = ExtraRound(step=step, round=demand.rounds, first=before.num_extra, size=size)
        after = replace(
            before,
            demand=demand,
            num_extra=before.num_extra + size,
            extra_rounds=(*before.extra_rounds, extra),
        )
        if not self._store.edit_tables(before, after):
            return None
        log.info("step %d: %s", step, demand.sentence)
        return Wait()

    def _assembly(self, step: int, view: View, decision: Decision) -> Assembly:
        """The assembly that applies the decision.

        A record or request is missing only if another instance consumed its group meanwhile: it is skipped here,
        and the fence rejects the assembly.
        """
        entered = self._store.fresh_requests(entering_bad(view, decision))
        reused = [record for record in self._store.records(reused_ids(view, decision)) if record is not None]
        held = self._held_stale(view)
        results = [result_map(result) for result in (*view.stale, *results_of(step, view, decision, reused))]
        return Assembly(
            step=step,
            fresh=tuple(record.group_id for record in view.fresh),
            reevaluated=tuple(record.group_id for record in view.reevaluated),
            before=view.tables,
            after=tables_after(step, view, decision),
            new_prompts=tuple(request.prompt for request in entered if request is not None),
            batch=batch_of(step, view, decision, results=results, reused=reused, held=held, config=self._config),
            composition={**composition_of(step, view, decision, results, self._config), "time": self._now()},
            num_stale=len(view.stale),
            fresh_bytes=sum(record.num_bytes for record in view.fresh),
            stale=tuple(record.group_id for record in held),
            success_counts=selector_success_counts(step, view, self._config),
        )

    def _held_stale(self, view: View) -> list[GroupRecord]:
        """Records of the stale groups that are still retained for their texts."""
        found = self._store.records([result.group_id for result in view.stale])
        # Skip a later group with the same id: after a restore the prompt may have been re-sampled under it.
        pairs = zip(found, view.stale, strict=True)
        return [record for record, result in pairs if record is not None and record.claimed_at == result.claimed_at]


def _with_next_id(item: Replacement) -> Replacement:
    """The same replacement with the next id, because this id is in use."""
    return replace(item, request=msgspec.structs.replace(item.request, request_id=repeated_id(item.request.request_id)))


def repeated_id(request_id: str) -> str:
    """Id of the next request for the same prompt: `x`, `x~1`, `x~2`, ... Sorts after `x`."""
    found = _REPEATED.match(request_id)
    base, number = (found[1], int(found[2])) if found else (request_id, 0)
    return f"{base}~{number + 1}"


def fresh_of(step: int, view: View, first: int, config: Config) -> tuple[GroupRecord, ...] | None:
    """The fresh groups of the step's rounds; None while some are missing.

    In step order these are the groups planned for the step, so that a batch does not depend on how far workers have
    sampled ahead; permanently failed requests are skipped. Otherwise they are the first groups to arrive. If every
    group of a further round failed permanently, their replacements count as that round.

    Args:
        first: groups of its first round.
    """
    demand = view.tables.demand
    if demand is None or not in_step_order(config):
        num = view.tables.needs(first)
        return view.fresh[:num] if len(view.fresh) >= num else None
    prefix = view.tables.extra_rounds[-1].prefix
    planned = tuple(record for record in view.fresh if record.step <= step)
    has_its_round = any(record.group_id.startswith(prefix) for record in planned)
    return planned if has_its_round or len(planned) >= demand.num_fresh else None


def is_stale(record: GroupRecord, step: int, config: Config) -> bool:
    """Whether a fresh group is too old to train: its oldest token; with `rollout.stale_tokens = "mask"`, whose learner
    reads old tokens as context, its newest."""
    is_masked = config.rollout.stale_tokens == "mask"
    version = max(record.newest_version, record.policy_version) if is_masked else record.policy_version
    return version < config.cadence.oldest_fresh(step)


def in_order(view: View, fresh: Sequence[GroupRecord]) -> View:
    """The view restricted to these fresh groups, independent of arrival order."""
    return replace(
        view,
        fresh=tuple(sorted(fresh, key=lambda record: record.order)),
        reevaluated=tuple(sorted(view.reevaluated, key=lambda record: record.order)),
    )


def decide(step: int, view: View, composer: Composer, config: Config) -> Decision | NeedMore:
    """The composer's decision, checked. Raises: ContractError."""
    before = view.tables
    decision = composer.compose(
        AssemblyView(
            step=step,
            fresh=tuple(record.stat() for record in view.fresh),
            reevaluated=tuple(record.stat() for record in view.reevaluated),
            bad=before.bad,
            high=before.high,
            previous_r_tot=before.r_tot,
            round=_round_of(before),
        ),
        lambda purpose: rng_for(config.run.seed, step, purpose),
    )
    if isinstance(decision, Decision):
        check_decision(decision, composer, config.algorithm, view)
    return decision


def _round_of(before: Tables) -> int:
    return 1 if before.demand is None else before.demand.rounds


def check_decision(
    decision: Decision,
    composer: Composer,
    settings: AlgorithmConfig,
    view: View,
) -> None:
    """Raises: ContractError for the first invariant of Decision that is violated."""
    name = settings.composer
    known = {record.group_id: (record.prompt_id, len(record.rewards)) for record in _seen(view)}
    available = {**{stat.group_id: (stat.prompt_id, len(stat.rewards)) for stat in view.tables.high}, **known}
    _check_items(name, decision.items, settings.batch_size)
    used = [group_id for item in decision.items for group_id in item.group_ids]
    for what, found in (("trains", used), ("keeps in B_high", [stat.group_id for stat in decision.high])):
        if unknown := sorted(set(found) - available.keys()):
            raise ContractError(f"composer {name!r} {what} groups that are not in the buffer: {unknown[:3]}")
    if again := _twice(stat.group_id for stat in decision.high):
        raise ContractError(f"composer {name!r} keeps a group in B_high more than once: {again[:3]}")
    _check_parts(name, decision.items, available)
    if composer.prompts_once:
        prompts = [available[item.group_ids[0]][0] for item in decision.items if item.kind == "rl"]
        if again := _twice(prompts):
            raise ContractError(f"composer {name!r} trains a prompt more than once in one step: {again[:3]}")
    if silent := sorted(known.keys() - decision.reasons.keys()):
        raise ContractError(f"composer {name!r} gives no reason for {len(silent)} groups: {silent[:3]}")


def _check_items(name: str, items: Sequence[Item], batch_size: int) -> None:
    if again := _twice(item.item_id for item in items):
        raise ContractError(f"composer {name!r} trains an item more than once: {again[:3]}")
    for kind in KINDS:
        if (number := sum(item.kind == kind for item in items)) > batch_size:
            raise ContractError(f"composer {name!r} trains {number} items of kind {kind}, more than B = {batch_size}")


def _check_parts(name: str, items: Sequence[Item], available: Mapping[str, tuple[str, int]]) -> None:
    """Check that an item references rows of groups of one prompt, each row once."""
    for item in items:
        if len(item.parts) == 1 and item.parts[0].rows is None:
            continue  # most items are whole groups, which are valid by construction
        rows = [(part.group_id, row) for part in item.parts for row in (part.rows or ())]
        is_empty = not item.parts or any(part.rows == () for part in item.parts)
        beyond = [group_id for group_id, row in rows if not 0 <= row < available[group_id][1]]
        if is_empty or beyond or _twice(rows) or _twice(item.group_ids):
            raise ContractError(f"composer {name!r}: item {item.item_id!r:.200} has no rows, or repeats one")
        if len({available[group_id][0] for group_id in item.group_ids}) > 1:
            raise ContractError(f"composer {name!r}: item {item.item_id!r:.200} mixes groups of different prompts")


def _twice(values: Iterable[Hashable]) -> list[Hashable]:
    listed = list(values)
    if len(set(listed)) == len(listed):  # almost always true; counting takes five times longer
        return []
    return [value for value, number in Counter(listed).items() if number > 1]


def tables_after(step: int, view: View, decision: Decision) -> Tables:
    """B_bad, B_high and the thresholds after the step."""
    consumed = [record.group_id for record in view.fresh]
    # No group of this round was consumed: the scheduler may not have requested it yet.
    outstanding = (
        extra for extra in view.tables.extra_rounds if not any(name.startswith(extra.prefix) for name in consumed)
    )
    return Tables(
        step=step,
        r_tot=decision.r_tot,
        facts=decision.facts,
        bad=decision.bad,
        high=decision.high,
        num_extra=view.tables.num_extra,
        extra_rounds=tuple(outstanding),
    )


def entering_bad(view: View, decision: Decision) -> list[str]:
    """Ids of the fresh groups whose prompts enter B_bad. Raises: ContractError for a prompt without a fresh group."""
    had = {entry.prompt_id for entry in view.tables.bad}
    entered = [entry.prompt_id for entry in decision.bad if entry.prompt_id not in had]
    groups = {record.prompt_id: record.group_id for record in view.fresh}
    if unknown := [prompt_id for prompt_id in entered if prompt_id not in groups]:
        raise ContractError(f"the composer adds prompts to B_bad that were not fresh in this step: {unknown[:3]}")
    return [groups[prompt_id] for prompt_id in entered]


def reused_ids(view: View, decision: Decision) -> list[str]:
    """Ids of the trained groups that an earlier step has already read, in frame order."""
    new = {record.group_id for record in _seen(view)}
    return [group_id for group_id in frame_order(decision.items) if group_id not in new]


def results_of(step: int, view: View, decision: Decision, reused: Sequence[GroupRecord]) -> list[GroupResult]:
    """Results of the groups of the view and of the reused groups: one per item that contains rows of the group."""
    births = {stat.group_id: stat.birth for stat in view.tables.high}
    uses: dict[str, list[tuple[Item, Part]]] = {}
    for item in decision.items:
        for part in item.parts:
            uses.setdefault(part.group_id, []).append((item, part))
    results = []
    for record in (*_seen(view), *reused):
        key = record.group_id
        birth, reason = births.get(key, step), decision.reasons.get(key, Reason.REUSED)
        if key not in uses:
            results.append(record.result(None, reason, birth))
        for item, part in uses.get(key, ()):
            name = "" if item.is_plain else item.item_id
            results.append(record.result(item.origin, reason, birth, item=name, rows=part.rows, kind=item.kind))
    return results


def batch_of(
    step: int,
    view: View,
    decision: Decision,
    *,
    results: list[ResultFields],
    reused: Sequence[GroupRecord],
    held: Sequence[GroupRecord],
    config: Config,
) -> BatchRecord:
    """The batch without its frames; `held`: stale groups that are still stored."""
    group_ids = frame_order(decision.items)
    sizes = {record.group_id: record.num_bytes for record in (*_seen(view), *reused)}
    trained = set(group_ids)
    untrained = [record for record in (*held, *_seen(view)) if record.group_id not in trained]
    header = {
        "step": step,
        **item_fields(decision.items, frozenset(reused_ids(view, decision))),
        "r_tot": decision.r_tot,
        "facts": decision.reported,
        "results": results,
    }
    return BatchRecord(
        step=step,
        group_ids=group_ids,
        header=header,
        num_bytes=sum(sizes.get(group_id, 0) for group_id in group_ids),
        untrained=held_for_texts(step, untrained, config),
    )


MB = 1_000_000


def keeps_texts(config: Config, step: int) -> bool:
    """Whether the texts of this step are recorded."""
    every = config.diagnostics.texts
    return every > 0 and step % every == 0


def held_for_texts(step: int, untrained: Sequence[GroupRecord], config: Config) -> tuple[str, ...]:
    """Ids of the groups to retain, in order: all if they fit into `diagnostics.texts_mb`, else a uniform sample."""
    if not keeps_texts(config, step):
        return ()
    room = config.diagnostics.texts_mb * MB
    order = list(range(len(untrained)))
    if sum(record.num_bytes for record in untrained) > room:
        rng_for(config.run.seed, step, "texts").shuffle(order)
    held: set[int] = set()
    for index in order:
        if untrained[index].num_bytes <= room:
            room -= untrained[index].num_bytes
            held.add(index)
    return tuple(untrained[index].group_id for index in sorted(held))


def composition_of(
    step: int, view: View, decision: Decision, results: Sequence[ResultFields], config: Config
) -> dict[str, float | int | None]:
    """One entry of `GET /batches`, without the time."""
    ages = [step - result["policy_version"] for result in results if result["origin"] is not None]
    origins = [item.origin for item in decision.items]
    reasons = [decision.reasons.get(record.group_id) for record in view.reevaluated]
    return {
        "step": step,
        **{origin.value: origins.count(origin) for origin in Origin},
        "sft": sum(item.kind == "sft" for item in decision.items),
        "rounds": _round_of(view.tables),
        "batch_size": config.algorithm.batch_size,
        "fresh": len(view.fresh),
        "reevaluated": len(view.reevaluated),
        "improved": sum(reason in (Reason.IMPROVED, Reason.NO_ROOM) for reason in reasons),
        "num_stale": sum(result["reason"] == Reason.STALE for result in results),
        "staleness_max": max(ages, default=0),
        "r_tot": decision.r_tot,
        **decision.reported,
    }


def selector_success_counts(step: int, view: View, config: Config) -> bytes:
    """Packed success counts of the fresh groups if the prompt selector uses them, else empty."""
    if not learns(config.algorithm.selector):
        return b""
    return pack_success_counts(success_counts_of(step, (record.outcome for record in view.fresh)))


def _seen(view: View) -> tuple[GroupRecord, ...]:
    return *view.fresh, *view.reevaluated


def origin_counts(assembly: Assembly) -> dict[Origin, int]:
    """Groups of each origin in the batch."""
    return {origin: int(assembly.composition[origin.value]) for origin in Origin}


# Readiness: whether a batch can be assembled, and what it is waiting for.

SILENT_S = 10.0
"""A worker with leases that has sent nothing for this long is reported."""


def must_wait_for_round(step: int, config: Config) -> bool:
    """Whether step t waits for the results of its own re-evaluation round (the paper's order)."""
    is_due = config.algorithm.use_x2 and step % config.cadence.reevaluation_interval == 0
    return config.cadence.wait_for_reevaluation and is_due


def in_step_order(config: Config) -> bool:
    """Whether each step consumes the groups planned for it, i.e. without sampling ahead."""
    return config.cadence.max_steps_ahead == 0


def has_its_fresh(ready: Readiness, config: Config, wanted: int) -> bool:
    """Whether the `wanted` fresh groups of the next step have arrived."""
    return ready.num_fresh >= wanted and not (in_step_order(config) and ready.num_open)


def is_ready(step: int, ready: Readiness, config: Config, wanted: int) -> bool:
    """Whether step t, the next one, can be assembled with `wanted` fresh groups."""
    if not has_its_fresh(ready, config, wanted):
        return False
    return is_answered(ready) or not must_wait_for_round(step, config)


def is_answered(ready: Readiness) -> bool:
    """Whether the step's re-evaluation round was issued and has no open request."""
    return ready.round_left == 0


def readiness_text(step: int, ready: Readiness, status: BufferStatus, config: Config, wanted: int) -> str:
    """For example "96/256 fresh groups, 2 leased, 158 queued; worker-2 silent for 38 s"."""
    parts = [status.demand] if status.demand else []
    parts.append(_missing(step, ready, status, config, wanted))
    silent = {name: w.silent_s for name, w in status.workers.items() if w.leased and w.silent_s >= SILENT_S}
    parts += [f"{name} silent for {silent_s:.0f} s" for name, silent_s in sorted(silent.items())]
    if ready.failures_in_a_row:
        parts.append(f"{ready.failures_in_a_row} groups failed in a row, last: {ready.last_failure}")
    return "; ".join(parts)


def retained_text(status: BufferStatus, config: Config) -> str:
    """Suffix for a message: batches that only a checkpoint releases, and the setting; '' if there are none."""
    first, last = status.checkpointed_step + 1, status.assembled_step
    if first > last:
        return ""
    every = config.checkpoint.every
    return f", or checkpoint more often: batches {first}-{last} wait for the next one (checkpoint.every={every})"


def _missing(step: int, ready: Readiness, status: BufferStatus, config: Config, wanted: int) -> str:
    leased, queued = status.leased["fresh"], status.queued["fresh"]
    if ready.num_fresh < wanted:
        found = f"{ready.num_fresh}/{wanted} fresh groups, {leased} leased, {queued} queued"
        return found if leased or queued else f"{found}: nothing is requested, is the scheduler running?"
    if in_step_order(config) and ready.num_open:
        return f"{ready.num_open} fresh groups of steps up to {step} are open, {leased} leased, {queued} queued"
    if in_step_order(config) and status.demand:
        return "its groups are not requested yet: is the scheduler running?"
    if ready.round_left is None:
        return f"re-evaluation round {step} is not issued: is the scheduler running?"
    leased, queued = status.leased["reevaluate"], status.queued["reevaluate"]
    if not is_answered(ready):
        return f"{ready.round_left} requests of re-evaluation round {step} are open, {leased} leased, {queued} queued"
    return f"step {step} is being assembled"
