"""Does the replay of a run's records give the batches that the run trained? The test that a simulation rests on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bapo.analysis.whatif.recording import RecordedStep, Recording
from bapo.analysis.whatif.simulation import SimulatedStep
from bapo.core.types import Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """How many steps came out as they were recorded, and what differs in the first that did not."""

    num_same: int
    num_steps: int
    first: tuple[int, str] | None
    """(step, difference)."""

    @property
    def exact(self) -> bool:
        """Every step."""
        return self.first is None

    @property
    def sentence(self) -> str:
        """One line for people."""
        text = f"reproduces the recorded batches: {self.num_same} of {self.num_steps} steps"
        return text if self.first is None else f"{text}; first difference in step {self.first[0]}: {self.first[1]}"


def compare(recording: Recording, simulated: Sequence[SimulatedStep]) -> Reproduction:
    """Group ids in their order, thresholds, table sizes and reasons of every step."""
    found = [
        (step.step, differences)
        for step, other in zip(recording.steps, simulated, strict=True)
        if (differences := list(differences_of(step, other)))
    ]
    return Reproduction(
        num_same=len(recording.steps) - len(found),
        num_steps=len(recording.steps),
        first=(found[0][0], found[0][1][0]) if found else None,
    )


def differences_of(recorded: RecordedStep, simulated: SimulatedStep) -> Iterator[str]:
    """What a replayed step has otherwise than the recorded one."""
    decision = simulated.decision
    for origin in Origin:
        then, now = recorded.batch[origin], _in_recorded_order(simulated, origin)
        if then != now:
            yield f"{origin.value.upper()} has {_listed(then, now)} recorded, {_listed(now, then)} replayed"
    row = recorded.metrics or {}
    values = {
        "reward_mean": decision.r_tot,
        "c2": decision.c2,
        "c3": decision.c3,
        "num_bad": len(decision.bad),
        "num_high": len(decision.high),
    }
    for name, value in values.items():
        if name in row and row[name] != value:
            yield f"{name} is {row[name]} recorded, {value} replayed"
    for fate in (*recorded.fresh, *recorded.reevaluated):
        if decision.reasons.get(fate.group_id) != fate.reason:
            yield f"{fate.group_id} is {fate.reason} recorded, {decision.reasons.get(fate.group_id)} replayed"


def _in_recorded_order(simulated: SimulatedStep, origin: Origin) -> list[str]:
    """Records name the groups that an assembly saw first before the stored ones; a batch may have them the other way
    round (ReLIFT's queue)."""
    seen = {stat.group_id for stat in (*simulated.view.fresh, *simulated.view.reevaluated)}
    items = [item for item in simulated.decision.items if item.origin is origin]
    return [item.item_id for item in sorted(items, key=lambda item: seen.isdisjoint(item.group_ids))]


def _listed(mine: Sequence[str], others: Sequence[str]) -> str:
    """The groups that only one side has, or all of them in another order."""
    only = [name for name in mine if name not in others]
    return ", ".join(only[:3]) + (" ..." if len(only) > 3 else "") if only else f"{len(mine)} groups"
