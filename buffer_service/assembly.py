"""Assemble the batch of a step: read a view, let the composer decide, apply the decision at once or not at all.

    view (O(B)) --too old?--> replace_stale, look again
         |
         +--compose (pure)--> NeedMore --edit_tables (one atomic operation, fenced)--> look again with another round
         |                '-> Decision --commit_assembly (one atomic operation, fenced)--> batch of step t
                                                 |
                                                 +-- another instance was faster: look again

The fence makes concurrent assemblies of one step harmless: one of them commits, all hand out what it committed.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from bapo.algorithms.composer import AssemblyView, Composer, Decision, NeedMore, Reason
from bapo.algorithms.randomness import rng_for
from bapo.algorithms.selectors.registry import learns
from bapo.batch_items import frame_order, item_fields
from bapo.config.tree import Config
from bapo.errors import ContractError
from bapo.messages import ExtraRound
from bapo.outcomes import outcomes_of, pack_outcomes
from bapo.rows import Item, Part
from bapo.types import Fate, Origin, Prompt, Purpose, RolloutRequest
from bapo.wire import fate_map
from buffer_service.decisions import check_decision
from buffer_service.demand import Demand
from buffer_service.groups import GroupRecord, Replacement
from buffer_service.reasons import in_step_order
from buffer_service.store import Store
from buffer_service.texts import held_for_texts, keeps_texts
from buffer_service.values import Assembly, BatchRecord, Look, Tables, View

log = logging.getLogger(__name__)

FateFields = dict[str, Any]
"""A fate as the header of a batch has it."""

_REPEATED = re.compile(r"^(.*)~(\d+)$")


class Wait:
    """What is missing was asked for: looking again at once does not help."""


class Assembler:
    """Turns groups into batches by the rule of one composer."""

    def __init__(
        self, store: Store, composer: Composer, config: Config, *, now: Callable[[], float] = time.time
    ) -> None:
        self._store, self._composer, self._config, self._now = store, composer, config, now
        self._schedule = config.algorithm.fresh_schedule

    def wanted(self, step: int) -> int:
        """Fresh groups that must be there before the next step, if it is this one, is worth a look."""
        first = self._schedule.at(step)
        if self._composer.max_rounds == 1 or in_step_order(self._config):
            return first  # in step order, the requests that are planned for the step say what is missing
        return self._store.tables().needs(first)

    def look(self, step: int) -> Look:
        """What there is for step `step`."""
        return self._store.look(step, self._schedule.at(step) * self._composer.max_rounds)

    def assemble(self, look: Look) -> Assembly | Wait | None:
        """Assemble the step of a look; None when groups were too old, or another instance was faster: look again. Wait
        when the step needs another round of fresh groups.

        Raises: ContractError when the composer breaks the invariants of a Decision.
        """
        step = look.step
        if look.ready.assembled != step - 1:
            return None
        view = look.view()
        if (fresh := self._fresh_of(step, view)) is None:
            return None if view.tables.demand is None else Wait()
        if stale := [record for record in fresh if self._is_stale(record, step)]:
            self._replace(stale, step)
            return None
        assembly = self._decide(step, replace(view, fresh=fresh))
        if isinstance(assembly, NeedMore):
            return self._demand(step, view.tables, assembly)
        return assembly if assembly is not None and self._store.commit_assembly(assembly) else None

    def _fresh_of(self, step: int, view: View) -> tuple[GroupRecord, ...] | None:
        """The fresh groups of the step's rounds; None while some are missing.

        In step order these are the groups that were planned for it, so that a batch does not depend on how far workers
        have sampled ahead; what failed for good is not waited for. Else they are the first ones that arrived.
        Of a further round whose groups all failed for good, none comes: what was asked in their place stands for it.
        """
        demand, first = view.tables.demand, self._schedule.at(step)
        if demand is None or not in_step_order(self._config):
            num = view.tables.needs(first)
            return view.fresh[:num] if len(view.fresh) >= num else None
        prefix = view.tables.extra_rounds[-1].prefix
        planned = tuple(record for record in view.fresh if record.step <= step)
        has_its_round = any(record.group_id.startswith(prefix) for record in planned)
        return planned if has_its_round or len(planned) >= demand.num_fresh else None

    def _demand(self, step: int, before: Tables, wish: NeedMore) -> Wait | None:
        """Remember that the step needs another round: fenced, so that two instances ask for one."""
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

    def _is_stale(self, record: GroupRecord, step: int) -> bool:
        return step - record.policy_version > self._config.cadence.max_staleness

    def _replace(self, stale: Sequence[GroupRecord], step: int) -> None:
        requests = self._store.fresh_requests([record.group_id for record in stale])
        pairs = zip(stale, requests, strict=True)
        # Without its request it was consumed, or replaced, by another instance.
        left = [self._replacement(record, request, step) for record, request in pairs if request is not None]
        log.info("step %d dropped=%d reason=%s: their prompts are asked again", step, len(left), Reason.STALE)
        while left:
            taken = set(self._store.replace_stale(left, hold=keeps_texts(self._config, step)))
            left = [_with_next_id(item) for item in left if item.fate.group_id in taken]

    def _replacement(self, record: GroupRecord, request: RolloutRequest, step: int) -> Replacement:
        return Replacement(
            fate=record.fate(None, Reason.STALE, birth=step),
            request=replace(
                request,
                request_id=repeated_id(request.request_id),
                min_version=max(request.min_version, self._config.cadence.min_version(step)),
            ),
        )

    def _decide(self, step: int, view: View) -> Assembly | NeedMore | None:
        """None when another instance has consumed a group of the view."""
        fresh = sorted(view.fresh, key=lambda record: record.order)
        reevaluated = sorted(view.reevaluated, key=lambda record: record.order)
        before = view.tables
        decision = self._composer.compose(
            AssemblyView(
                step=step,
                fresh=tuple(record.stat() for record in fresh),
                reevaluated=tuple(record.stat() for record in reevaluated),
                bad=before.bad,
                high=before.high,
                previous_r_tot=before.r_tot,
                round=1 if before.demand is None else before.demand.rounds,
            ),
            lambda purpose: rng_for(self._config.run.seed, step, purpose),
        )
        if isinstance(decision, NeedMore):
            return decision
        looked_at = [*fresh, *reevaluated]
        check_decision(decision, self._composer, self._config.algorithm, looked_at, before)
        if (new_prompts := self._new_prompts(decision, before, fresh)) is None:
            return None
        new = {record.group_id for record in looked_at}
        group_ids = frame_order(decision.items)
        stored = [group_id for group_id in group_ids if group_id not in new]
        # A record is None only when another instance has committed meanwhile: then the fence refuses this assembly.
        reused = [record for record in self._store.records(stored) if record is not None]
        fates = [fate_map(fate) for fate in (*view.stale, *_fates(step, decision, looked_at, reused, before))]
        stale, trained = self._held_stale(view), set(group_ids)
        untrained = [record for record in (*stale, *looked_at) if record.group_id not in trained]
        return Assembly(
            step=step,
            fresh=tuple(record.group_id for record in fresh),
            reevaluated=tuple(record.group_id for record in reevaluated),
            before=before,
            after=Tables(
                step=step,
                r_tot=decision.r_tot,
                c2=decision.c2,
                c3=decision.c3,
                bad=decision.bad,
                high=decision.high,
                num_extra=before.num_extra,
                extra_rounds=_outstanding(before.extra_rounds, [record.group_id for record in fresh]),
            ),
            new_prompts=new_prompts,
            batch=replace(
                _batch(step, decision, fates, [*looked_at, *reused], group_ids, stored),
                untrained=held_for_texts(step, untrained, self._config),
            ),
            composition=self._composition(step, decision, fates, looked_at, before),
            num_stale=len(view.stale),
            fresh_bytes=sum(record.num_bytes for record in fresh),
            stale=tuple(record.group_id for record in stale),
            outcomes=self._outcomes(step, fresh),
        )

    def _held_stale(self, view: View) -> list[GroupRecord]:
        found = self._store.records([fate.group_id for fate in view.stale])
        # Not a later group of the same id: after a restore the same prompt may have been asked again under it.
        pairs = zip(found, view.stale, strict=True)
        return [record for record, fate in pairs if record is not None and record.claimed_at == fate.claimed_at]

    def _new_prompts(
        self, decision: Decision, before: Tables, fresh: Sequence[GroupRecord]
    ) -> tuple[Prompt, ...] | None:
        """Prompts of the entries that B_bad did not have; None when another instance has consumed one.

        Raises: ContractError for an entry whose prompt was not among the fresh ones.
        """
        had = {entry.prompt_id for entry in before.bad}
        entered = [entry.prompt_id for entry in decision.bad if entry.prompt_id not in had]
        groups = {record.prompt_id: record.group_id for record in fresh}
        if unknown := [prompt_id for prompt_id in entered if prompt_id not in groups]:
            raise ContractError(f"the composer puts prompts into B_bad that were not fresh in this step: {unknown[:3]}")
        requests = self._store.fresh_requests([groups[prompt_id] for prompt_id in entered])
        prompts = tuple(request.prompt for request in requests if request is not None)
        return prompts if len(prompts) == len(entered) else None

    def _outcomes(self, step: int, fresh: Sequence[GroupRecord]) -> bytes:
        if not learns(self._config.algorithm.selector):
            return b""
        return pack_outcomes(outcomes_of(step, (record.outcome for record in fresh)))

    def _composition(
        self,
        step: int,
        decision: Decision,
        fates: Sequence[FateFields],
        looked_at: Sequence[GroupRecord],
        before: Tables,
    ) -> dict[str, float | int]:
        ages = [step - fate["policy_version"] for fate in fates if fate["origin"] is not None]
        origins = [item.origin for item in decision.items]
        return {
            "step": step,
            **{origin.value: origins.count(origin) for origin in Origin},
            "sft": sum(item.kind == "sft" for item in decision.items),
            "rounds": 1 if before.demand is None else before.demand.rounds,
            "batch_size": self._config.algorithm.batch_size,
            **_sampled(looked_at, decision),
            "num_stale": sum(fate["reason"] == Reason.STALE for fate in fates),
            "staleness_max": max(ages, default=0),
            "r_tot": decision.r_tot,
            "c2": decision.c2,
            "c3": decision.c3,
            "num_bad": len(decision.bad),
            "num_high": len(decision.high),
            "time": self._now(),
        }


def _sampled(looked_at: Sequence[GroupRecord], decision: Decision) -> dict[str, int]:
    """Groups that this assembly saw first, and how many of the re-evaluated ones improved, with room or without."""
    again = [record.group_id for record in looked_at if record.purpose is Purpose.REEVALUATE]
    return {
        "fresh": len(looked_at) - len(again),
        "reevaluated": len(again),
        "improved": sum(decision.reasons.get(key) in (Reason.IMPROVED, Reason.NO_ROOM) for key in again),
    }


def _outstanding(rounds: Sequence[ExtraRound], consumed: Sequence[str]) -> tuple[ExtraRound, ...]:
    """Rounds of which no group was consumed: the scheduler may not have asked for them yet."""
    return tuple(extra for extra in rounds if not any(name.startswith(extra.prefix) for name in consumed))


def _with_next_id(item: Replacement) -> Replacement:
    """Somebody has asked for something else under the id: nobody has promised not to use such ids."""
    return replace(item, request=replace(item.request, request_id=repeated_id(item.request.request_id)))


def repeated_id(request_id: str) -> str:
    """Id of the request that asks for the same prompt once more: `x`, `x~1`, `x~2`, ... It sorts behind `x`."""
    found = _REPEATED.match(request_id)
    base, number = (found[1], int(found[2])) if found else (request_id, 0)
    return f"{base}~{number + 1}"


def _fates(
    step: int,
    decision: Decision,
    looked_at: Sequence[GroupRecord],
    reused: Sequence[GroupRecord],
    before: Tables,
) -> list[Fate]:
    """Of every group that this assembly looked at, and of the stored groups that it reuses: once for each item that
    rows of it are part of."""
    births = {stat.group_id: stat.birth for stat in before.high}
    uses: dict[str, list[tuple[Item, Part]]] = {}
    for item in decision.items:
        for part in item.parts:
            uses.setdefault(part.group_id, []).append((item, part))
    fates = []
    for record in (*looked_at, *reused):
        key = record.group_id
        birth, reason = births.get(key, step), decision.reasons.get(key, Reason.REUSED)
        if key not in uses:
            fates.append(record.fate(None, reason, birth))
        for item, part in uses.get(key, ()):
            name = "" if item.is_plain else item.item_id
            fates.append(record.fate(item.origin, reason, birth, item=name, rows=part.rows, kind=item.kind))
    return fates


def _batch(
    step: int,
    decision: Decision,
    fates: list[FateFields],
    records: Sequence[GroupRecord],
    group_ids: tuple[str, ...],
    stored: Sequence[str],
) -> BatchRecord:
    sizes = {record.group_id: record.num_bytes for record in records}
    header = {
        "step": step,
        **item_fields(decision.items, frozenset(stored)),
        "r_tot": decision.r_tot,
        "c2": decision.c2,
        "c3": decision.c3,
        "num_bad": len(decision.bad),
        "num_high": len(decision.high),
        "fates": fates,
    }
    num_bytes = sum(sizes.get(group_id, 0) for group_id in group_ids)
    return BatchRecord(step=step, group_ids=group_ids, header=header, num_bytes=num_bytes)


def origin_counts(assembly: Assembly) -> dict[Origin, int]:
    """How many groups of each origin the batch has."""
    return {origin: int(assembly.composition[origin.value]) for origin in Origin}
