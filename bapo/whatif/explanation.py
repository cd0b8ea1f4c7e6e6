"""Why a prompt was or was not in a batch: what its groups had, the reason of each with its meaning, and its tables.

The tables of a step are not recorded; they follow from the groups of all steps before it (`simulation.as_recorded`).
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from bapo.algorithms.composer import Composer, Reason, Word
from bapo.algorithms.composers.registry import load_composer
from bapo.core.baselines import item_of, items_with_advantage
from bapo.core.errors import ConfigError, did_you_mean
from bapo.core.types import GroupResult, GroupStat, Origin
from bapo.runtime.run_directory.recording import Recording, kind_of, round_of, stat_of
from bapo.whatif.simulation import SimulatedStep

SHOWN_IDS = 5
SHOWN_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    prompt_id: str
    step: int
    origin: Origin | None
    """None: not in the batch."""
    reasons: tuple[str, ...]
    """Reason words of its groups in this step; empty when none was read."""
    sentence: str


def explain(recording: Recording, replayed: Sequence[SimulatedStep], prompt_id: str, step: int) -> Explanation:
    """Args: replayed: the run as it was recorded. Raises: ConfigError for a step without records."""
    results = [result for result in recording.step(step).results if result.prompt_id == prompt_id]
    trained = [result for result in results if result.origin is not None]
    origin, state = (trained[0].origin if trained else None), replayed[step - 1]
    words = meanings(load_composer(recording.config.algorithm))
    useful = items_with_advantage(results, step, recording.config.loss.advantage_pool)
    parts = [clause(result, step, words, useful) for result in trained or results]
    parts += _entered(state, prompt_id) if results else _where_it_is(recording, state, prompt_id)
    where = f"in batch {step}" + (f" as {origin.value.upper()}" if origin else "")
    return Explanation(
        prompt_id=prompt_id,
        step=step,
        origin=origin,
        reasons=tuple(result.reason for result in results),
        sentence=f"prompt {prompt_id} was {'' if origin else 'not '}{where}: {'; '.join(parts)}",
    )


def meanings(composer: Composer | None) -> dict[str, str]:
    """Reason word -> what it means: the words of `Reason`, and those that the composer's file adds."""
    own = [*vars(sys.modules[type(composer).__module__]).values()] if composer else []
    kinds: list[type[Word]] = [Reason, *(kind for kind in own if isinstance(kind, type) and issubclass(kind, Word))]
    return {word.value: word.text for kind in kinds for word in kind}


def clause(result: GroupResult, step: int, words: Mapping[str, str], useful: Collection[str]) -> str:
    """What a group that this step read had, and its reason.

    Args:
        words: `meanings`.
        useful: items of the batch with an advantage (`items_with_advantage`).
    """
    asked = round_of(result, step)
    late = "" if asked == step else f" (requested in step {asked})"
    which = {
        "fresh": "its fresh group",
        "reevaluated": f"its re-evaluated group{late}",
        "reused": f"its stored group of step {result.birth}",
    }[kind_of(result, step)]
    meaning = f": {words[result.reason]}" if result.reason in words else ""
    stat = stat_of(result)
    is_flat = result.origin is not None and result.kind != "sft" and item_of(result) not in useful
    flat = " (all its rewards are equal: it has no advantage)" if is_flat and stat.size > 1 else ""
    return f"{which} had {of_size(stat)}, {result.reason}{meaning}{flat}"


def of_size(stat: GroupStat) -> str:
    """`k = 2 of 8`; with partial credit `rewards from 0 to 0.1, mean 0.075`."""
    rewards = [stat.rewards[row] for row in stat.sampled_rows]
    if {*rewards} <= {0.0, 1.0}:
        return f"k = {number(stat.reward_sum)} of {stat.size}"
    return f"rewards from {number(min(rewards))} to {number(max(rewards))}, mean {number(stat.mu)}"


def number(value: float) -> str:
    return f"{value:.4f}".rstrip("0").rstrip(".")


def find_prompt(recording: Recording, name: str) -> str:
    """The prompt with this id, or the only one whose id begins so. Raises: ConfigError."""
    if name in recording.prompt_ids:
        return name
    found = sorted(prompt_id for prompt_id in recording.prompt_ids if prompt_id.startswith(name))
    if len(found) == 1:
        return found[0]
    if found:
        some = ", ".join(found[:SHOWN_IDS]) + (", ..." if len(found) > SHOWN_IDS else "")
        raise ConfigError(f"{len(found)} prompts of run {recording.name} begin with {name!r}: {some}; be more specific")
    raise ConfigError(
        f"run {recording.name} has no prompt {name!r}{did_you_mean(name, recording.prompt_ids)}; "
        f"`bapo explain RUN all STEP` lists the prompts of a step"
    )


def _entered(state: SimulatedStep, prompt_id: str) -> Iterator[str]:
    """Which tables its fresh group of this step went into."""
    for table, entries in (("B_bad", state.decision.bad), ("B_high", state.decision.high)):
        for entry in entries:
            if entry.prompt_id == prompt_id and entry.birth == state.step:
                yield f"it entered {table} (mu = {number(entry.mu)})"


def _where_it_is(recording: Recording, state: SimulatedStep, prompt_id: str) -> Iterator[str]:
    yield f"no group of it was read by step {state.step}"
    for entry in state.view.bad:
        if entry.prompt_id == prompt_id:
            tries = f", re-evaluated {_times(entry.attempts)} without success" if entry.attempts else ""
            yield f"it was in B_bad since step {entry.birth} with mu = {number(entry.mu)}{tries}"
    for stat in state.view.high:
        if stat.prompt_id == prompt_id:
            yield f"it was in B_high since step {stat.birth} with {of_size(stat)}, and not drawn"
    steps = [step.step for step in recording.steps if any(result.prompt_id == prompt_id for result in step.results)]
    yield f"it was read {_times(len(steps))}, last in step {', '.join(map(str, steps[-SHOWN_STEPS:]))}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
