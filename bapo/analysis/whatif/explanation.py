"""Why a prompt was or was not in a batch, in one sentence with the inequality that decided it.

    looked at       the reason of each of its groups in that step (`clauses.py`), and which table it entered
    not looked at   where it stood: B_high and why it was not drawn, B_bad and whether it was asked, or in neither

The tables of a step are not recorded; they follow from the groups of all steps before it (`simulation.as_recorded`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bapo.algorithms.composer import Decision, Reason
from bapo.algorithms.levels import is_within
from bapo.analysis.whatif.clauses import Case, clause, number, of_size, reusable, room_of
from bapo.analysis.whatif.recording import RecordedStep, Recording, round_of
from bapo.analysis.whatif.simulation import SimulatedStep
from bapo.core.errors import ConfigError, did_you_mean
from bapo.core.types import Fate, GroupStat, HardPrompt, Origin

OWN_TABLES = "bapo"
"""The composer whose rules for B_bad and B_high are told here; of others it is only said what the tables held."""
SHOWN_IDS = 5
SHOWN_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The answer for one prompt and one step."""

    prompt_id: str
    step: int
    origin: Origin | None
    """None: not in the batch."""
    reasons: tuple[str, ...]
    """Reason words of its groups in this step; empty when none was looked at."""
    sentence: str


def explain(recording: Recording, replayed: Sequence[SimulatedStep], prompt_id: str, step: int) -> Explanation:
    """Args: replayed: the run as it was recorded. Raises: ConfigError for a step without records."""
    recorded, state = recording.step(step), replayed[step - 1]
    fates = [fate for fate in recorded.fates if fate.prompt_id == prompt_id]
    trained = [fate for fate in fates if fate.origin is not None]
    origin = trained[0].origin if trained else None
    where = f"in batch {step}" + (f" as {origin.value.upper()}" if origin else "")
    parts = [clause(Case(config=recording.config, step=state, fate=fate)) for fate in trained or fates]
    if not fates:
        parts = list(_not_looked_at(recording, state, prompt_id))
    parts += _entered(recording, state, recorded, prompt_id)
    return Explanation(
        prompt_id=prompt_id,
        step=step,
        origin=origin,
        reasons=tuple(fate.reason for fate in fates),
        sentence=f"prompt {prompt_id} was {'' if origin else 'not '}{where}: {'; '.join(parts)}",
    )


def find_prompt(recording: Recording, name: str) -> str:
    """The prompt with this id, or the only one whose id begins so. Raises: ConfigError."""
    if name in recording.prompt_ids:
        return name
    found = sorted(prompt_id for prompt_id in recording.prompt_ids if prompt_id.startswith(name))
    if len(found) == 1:
        return found[0]
    if found:
        some = ", ".join(found[:SHOWN_IDS]) + (", ..." if len(found) > SHOWN_IDS else "")
        raise ConfigError(f"{len(found)} prompts of run {recording.name} begin with {name!r}: {some}; write more of it")
    raise ConfigError(
        f"run {recording.name} never looked at a prompt {name!r}{did_you_mean(name, recording.prompt_ids)}; "
        f"`bapo explain RUN all STEP` lists the prompts of a step"
    )


def _entered(recording: Recording, state: SimulatedStep, recorded: RecordedStep, prompt_id: str) -> Iterator[str]:
    """Which tables its fresh group of this step went into."""
    step, decision, settings = state.step, state.decision, recording.config.algorithm
    own = settings.name == OWN_TABLES
    fresh = {fate.group_id for fate in recorded.fresh if fate.prompt_id == prompt_id}
    for entry in decision.bad:
        if entry.prompt_id == prompt_id and entry.birth == step:
            yield f"it entered B_bad (mu = {number(entry.mu)}{f' <= c1 = {number(settings.c1)}' if own else ''})"
    for stat in decision.high:
        if stat.group_id in fresh and stat.birth == step:
            low, high = (f"c2 = {number(decision.c2)} <= ", f" <= c3 = {number(decision.c3)}") if own else ("", "")
            yield f"it entered B_high ({low}mu = {number(stat.mu)}{high})"


def _not_looked_at(recording: Recording, state: SimulatedStep, prompt_id: str) -> Iterator[str]:
    yield f"it was not among the fresh prompts of step {state.step}"
    high = next((stat for stat in state.view.high if stat.prompt_id == prompt_id), None)
    bad = next((entry for entry in state.view.bad if entry.prompt_id == prompt_id), None)
    if high:
        yield _why_not_reused(recording, state, high)
    if bad:
        yield _why_not_asked(recording, state, bad)
    if not high and not bad:
        yield f"it was in neither B_bad nor B_high; {_seen(recording, prompt_id)}"


def _why_not_reused(recording: Recording, state: SimulatedStep, stat: GroupStat) -> str:
    """The first test of X3 that it failed, in the order of the rule."""
    settings, decision = recording.config.algorithm, state.decision
    held = f"in B_high since {stat.birth} with mu = {number(stat.mu)}"
    window = f"[c2 = {number(decision.c2)}, c3 = {number(decision.c3)}]"
    if settings.name != OWN_TABLES:
        return f"{held}, and the composer {settings.name} did not draw it"
    if not settings.use_x3:
        return f"{held}, but use_x3 = false"
    if not state.step - settings.high_window <= stat.birth < state.step:
        return f"{held}, but {state.step} - {stat.birth} > {settings.high_window} = high_window steps"
    if settings.x3_choice == "youngest" or (settings.x3_choice == "refill" and not _in_window(decision, stat)):
        return f"{held} ({of_size(stat)}), and not taken: no room, no advantage, or younger ones came first"
    if not _in_window(decision, stat):
        return f"{held}, outside {window} ({of_size(stat)})"
    if settings.drop_zero_variance_x3 and stat.homogeneous:
        return f"{held} in {window}, but its rewards are all equal (drop_zero_variance_x3)"
    room, candidates = room_of(recording.config, state), len(reusable(recording.config, state))
    return f"{held} in {window}, but not drawn: room {room}, candidates {candidates}"


def _in_window(decision: Decision, stat: GroupStat) -> bool:
    return is_within(stat, decision.c2, decision.c3)


def _why_not_asked(recording: Recording, state: SimulatedStep, entry: HardPrompt) -> str:
    cadence, settings, step = recording.config.cadence, recording.config.algorithm, state.step
    # One that improved and found no room stays there with mu > c1.
    below = f" <= c1 = {number(settings.c1)}" if entry.mu <= settings.c1 else ""
    held = f"in B_bad since {entry.birth} with mu = {number(entry.mu)}{below}"
    tries = f", {_times(entry.attempts)} re-evaluated without success" if entry.attempts else ""
    later = next((arrived for asked, arrived in _rounds(recording, entry.prompt_id) if asked <= step < arrived), None)
    if later:
        return f"{held}{tries}; it was asked again, but its group arrived for step {later}"
    if not settings.use_x2:
        return f"{held}, and use_x2 = false: nobody asks it again"
    if step % cadence.m:
        return (
            f"{held}{tries}, and step {step} is no round of re-evaluation ({step} mod {cadence.m} = {step % cadence.m})"
        )
    most = settings.max_reevaluated
    how = {"uniform": "drawn uniformly", "gain": "those of the largest expected gain"}[settings.hard_choice]
    fewer = "" if settings.hard_worth is None else ", fewer when re-evaluations pay little"
    return (
        f"{held}{tries}, and no group of a round up to step {step} came for it (at most {most} are asked, {how}{fewer})"
    )


def _rounds(recording: Recording, prompt_id: str) -> Iterator[tuple[int, int]]:
    """(asked, arrived) of every recorded re-evaluation of a prompt."""
    for step in recording.steps:
        for fate in step.reevaluated:
            if fate.prompt_id == prompt_id:
                yield round_of(fate, step.step), step.step


def _seen(recording: Recording, prompt_id: str) -> str:
    steps = [step.step for step in recording.steps if any(_is(fate, prompt_id) for fate in step.fates)]
    some = ", ".join(map(str, steps[-SHOWN_STEPS:]))
    return f"assemblies looked at it {_times(len(steps))}, last in {some}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _is(fate: Fate, prompt_id: str) -> bool:
    return fate.prompt_id == prompt_id and fate.reason != Reason.STALE
