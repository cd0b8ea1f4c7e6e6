"""Assemble the batch of a step: read a view, let the composer decide, apply the decision at once or not at all.

    view (O(B)) --too old?--> replace_stale, look again
         |
         +--compose (pure)--> Decision --commit_assembly (one atomic operation, fenced)--> batch of step t
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

from bapo.algorithms.composer import AssemblyView, Composer, Decision, Reason
from bapo.algorithms.randomness import rng_for
from bapo.algorithms.selectors.registry import learns
from bapo.config.tree import Config
from bapo.errors import ContractError
from bapo.outcomes import outcomes_of, pack_outcomes
from bapo.types import Fate, Origin, Prompt
from bapo.wire import fate_map
from buffer_service.store import Store
from buffer_service.values import Assembly, BatchRecord, Fresh, GroupRecord, Replacement, Tables, View

log = logging.getLogger(__name__)

_REPEATED = re.compile(r"^(.*)~(\d+)$")


class Assembler:
    """Turns groups into batches by the rule of one composer."""

    def __init__(
        self, store: Store, composer: Composer, config: Config, *, now: Callable[[], float] = time.time
    ) -> None:
        self._store, self._composer, self._config, self._now = store, composer, config, now

    def assemble(self, step: int) -> Assembly | None:
        """Assemble step `step`; None when groups were too old, or another instance was faster: look again.

        Raises: ContractError when the composer breaks the invariants of a Decision.
        """
        num_fresh = self._config.algorithm.batch_size
        view = self._store.view(num_fresh)
        if view.assembled != step - 1 or len(view.fresh) < num_fresh:
            return None
        if stale := [group for group in view.fresh if self._is_stale(group, step)]:
            self._store.replace_stale([self._replacement(group, step) for group in stale])
            log.info("step %d dropped=%d reason=%s: their prompts are asked again", step, len(stale), Reason.STALE)
            return None
        assembly = self._decide(step, view)
        return assembly if self._store.commit_assembly(assembly) else None

    def _is_stale(self, group: Fresh, step: int) -> bool:
        return step - group.record.policy_version > self._config.cadence.max_staleness

    def _replacement(self, group: Fresh, step: int) -> Replacement:
        return Replacement(
            fate=group.record.fate(None, Reason.STALE, birth=step),
            request=replace(
                group.request,
                request_id=repeated_id(group.request.request_id),
                min_version=max(group.request.min_version, self._config.cadence.min_version(step)),
            ),
        )

    def _decide(self, step: int, view: View) -> Assembly:
        fresh = sorted(view.fresh, key=lambda group: group.record.order)
        reevaluated = sorted(view.reevaluated, key=lambda record: record.order)
        before = view.tables
        decision = self._composer.compose(
            AssemblyView(
                step=step,
                fresh=tuple(group.record.stat() for group in fresh),
                reevaluated=tuple(record.stat() for record in reevaluated),
                bad=before.bad,
                high=before.high,
                previous_r_tot=before.r_tot,
            ),
            lambda purpose: rng_for(self._config.run.seed, step, purpose),
        )
        looked_at = [*(group.record for group in fresh), *reevaluated]
        self._check(decision, looked_at, before)
        # A record is None only when another instance has committed meanwhile: then the fence refuses this assembly.
        reused = [record for record in self._store.records(decision.x3) if record is not None]
        fates = [*view.stale, *_fates(step, decision, looked_at, reused, before)]
        return Assembly(
            step=step,
            fresh=tuple(group.record.group_id for group in fresh),
            reevaluated=tuple(record.group_id for record in reevaluated),
            before=before,
            after=Tables(
                step=step, r_tot=decision.r_tot, c2=decision.c2, c3=decision.c3, bad=decision.bad, high=decision.high
            ),
            new_prompts=_new_prompts(decision, before, fresh),
            batch=_batch(step, decision, fates, [*looked_at, *reused]),
            composition=self._composition(step, decision, fates),
            num_stale=len(view.stale),
            fresh_bytes=sum(group.record.num_bytes for group in fresh),
            outcomes=self._outcomes(step, [group.record for group in fresh]),
        )

    def _outcomes(self, step: int, fresh: Sequence[GroupRecord]) -> bytes:
        if not learns(self._config.algorithm.selector):
            return b""
        return pack_outcomes(outcomes_of(step, (record.outcome for record in fresh)))

    def _check(self, decision: Decision, looked_at: Sequence[GroupRecord], before: Tables) -> None:
        """A composer may be anybody's: what it decides is checked before it becomes state."""
        name = self._config.algorithm.name
        known = {record.group_id for record in looked_at}
        available = known | {stat.group_id for stat in before.high}
        trained = [*decision.x1, *decision.x2, *decision.x3]
        if len(set(trained)) != len(trained) or len(trained) > self._config.algorithm.batch_size:
            raise ContractError(f"composer {name!r} trains {len(trained)} groups, some twice, or more than B")
        for what, found in (("trains", set(trained)), ("keeps in B_high", {stat.group_id for stat in decision.high})):
            if unknown := sorted(found - available):
                raise ContractError(f"composer {name!r} {what} groups that the buffer does not hold: {unknown[:3]}")
        if silent := sorted(known - decision.reasons.keys()):
            raise ContractError(f"composer {name!r} gives no reason for {len(silent)} groups: {silent[:3]}")

    def _composition(self, step: int, decision: Decision, fates: Sequence[Fate]) -> dict[str, float | int]:
        ages = [step - fate.policy_version for fate in fates if fate.origin is not None]
        return {
            "step": step,
            "x1": len(decision.x1),
            "x2": len(decision.x2),
            "x3": len(decision.x3),
            "batch_size": self._config.algorithm.batch_size,
            "num_stale": sum(fate.reason == Reason.STALE for fate in fates),
            "staleness_max": max(ages, default=0),
            "r_tot": decision.r_tot,
            "c2": decision.c2,
            "c3": decision.c3,
            "num_bad": len(decision.bad),
            "num_high": len(decision.high),
            "time": self._now(),
        }


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
    """Of every group that this assembly looked at, and of the stored groups that it reuses."""
    origins, reasons = decision.origins, decision.reasons
    births = {stat.group_id: stat.birth for stat in before.high}
    fates = [record.fate(origins.get(record.group_id), reasons[record.group_id], birth=step) for record in looked_at]
    for record in reused:
        key = record.group_id
        fates.append(record.fate(origins[key], reasons.get(key, Reason.REUSED), birth=births[key]))
    return fates


def _batch(step: int, decision: Decision, fates: Sequence[Fate], records: Sequence[GroupRecord]) -> BatchRecord:
    origins = decision.origins
    sizes = {record.group_id: record.num_bytes for record in records}
    header = {
        "step": step,
        "origins": [origin.value for origin in origins.values()],
        "r_tot": decision.r_tot,
        "c2": decision.c2,
        "c3": decision.c3,
        "num_bad": len(decision.bad),
        "num_high": len(decision.high),
        "fates": [fate_map(fate) for fate in fates],
    }
    num_bytes = sum(sizes.get(group_id, 0) for group_id in origins)
    return BatchRecord(step=step, group_ids=tuple(origins), header=header, num_bytes=num_bytes)


def _new_prompts(decision: Decision, before: Tables, fresh: Sequence[Fresh]) -> tuple[Prompt, ...]:
    """Prompts of the entries that B_bad did not have.

    Raises: ContractError for an entry whose prompt was not among the fresh ones.
    """
    had = {entry.prompt_id for entry in before.bad}
    groups = {group.record.prompt_id: group for group in fresh}
    entered = [entry.prompt_id for entry in decision.bad if entry.prompt_id not in had]
    if unknown := [prompt_id for prompt_id in entered if prompt_id not in groups]:
        raise ContractError(f"the composer puts prompts into B_bad that were not fresh in this step: {unknown[:3]}")
    return tuple(groups[prompt_id].request.prompt for prompt_id in entered)


def origin_counts(assembly: Assembly) -> dict[Origin, int]:
    """How many groups of each origin the batch has."""
    return {origin: int(assembly.composition[origin.value]) for origin in Origin}
