"""Why a prompt was or was not in a batch, in one sentence with the inequality that decided it.

    seen       the reason of each of its groups in that step, and which table it entered
    not seen   where it stood: B_high and why it was not drawn, B_bad and whether it was asked, or in neither

The tables of a step are not recorded; they follow from the groups of all steps before it (`simulation.as_recorded`).
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from bapo.algorithms import composer
from bapo.algorithms.composer import Decision, Reason
from bapo.algorithms.composers.bapo import prompt_ids, reused
from bapo.algorithms.filters import keep_probability
from bapo.algorithms.reward_levels import is_informative, is_within
from bapo.algorithms.settings import AlgorithmConfig
from bapo.analysis.whatif.recording import RecordedStep, Recording, round_of, stat_of
from bapo.analysis.whatif.simulation import SimulatedStep, rng_at
from bapo.config.tree import Config
from bapo.core.errors import ConfigError, did_you_mean
from bapo.core.types import GroupResult, GroupStat, HardPrompt, Origin, Purpose


@cache
def meanings(algorithm: str) -> dict[str, str]:
    """Reason word -> its docstring in one line, for the composer of this name."""
    modules = (composer, importlib.import_module(f"bapo.algorithms.composers.{algorithm}"))
    return {word: text for module in modules for word, text in _documented(ast.parse(inspect.getsource(module)).body)}


def _documented(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """(value, docstring) of every string constant of a block, and of the classes in it."""
    for node, behind in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef):
            yield from _documented(node.body)
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        text = behind.value if isinstance(behind, ast.Expr) else None
        if _is_text(value) and _is_text(text):
            yield value.value, " ".join(text.value.split())  # type: ignore[union-attr]


def _is_text(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


EVERYTHING = 1 << 30
"""More room than there are groups."""


@dataclass(frozen=True, kw_only=True)
class Case:
    config: Config
    step: SimulatedStep
    result: GroupResult

    @property
    def settings(self) -> AlgorithmConfig:
        return self.config.algorithm

    @property
    def stat(self) -> GroupStat:
        return stat_of(self.result)


def clause(case: Case) -> str:
    """The rule that decided, as the composer of the run has it."""
    reason, name = case.result.reason, case.settings.name
    is_own = reason in EVERYWHERE or name == OWN_TABLES or (reason in BY_FILTER and name in FILTERED)
    return _WRITERS[reason](case) if is_own and reason in _WRITERS else _generic(case)


def number(value: float) -> str:
    return f"{value:.4f}".rstrip("0").rstrip(".")


def in_window(decision: Decision, mu: float) -> str:
    return f"c2 = {number(decision.c2)} <= mu = {number(mu)} <= c3 = {number(decision.c3)}"


def of_size(stat: GroupStat) -> str:
    """`k = 2 of 8`; with partial credit `rewards from 0 to 0.1, mean 0.075`."""
    if is_binary(stat):
        return f"k = {number(stat.reward_sum)} of {stat.size}"
    rewards = [stat.rewards[row] for row in stat.sampled_rows]
    return f"rewards from {number(min(rewards))} to {number(max(rewards))}, mean {number(stat.mu)}"


def is_binary(stat: GroupStat) -> bool:
    return {stat.rewards[row] for row in stat.sampled_rows} <= {0.0, 1.0}


def reusable(config: Config, step: SimulatedStep) -> list[GroupStat]:
    """The candidates of X3 in this step, drawn or not."""
    decision, settings = step.decision, config.algorithm
    taken_ids = {*decision.x1, *decision.x2}
    taken = prompt_ids(stat for stat in (*step.view.fresh, *step.view.reevaluated) if stat.group_id in taken_ids)
    rng = rng_at(config, step.step)("x3")
    return list(reused(settings, step.view, (decision.c2, decision.c3), taken, EVERYTHING, rng))


def room_of(config: Config, step: SimulatedStep) -> int:
    """B - |X1| - |X2| (eq. 7)."""
    return config.algorithm.batch_size - len(step.decision.x1) - len(step.decision.x2)


def _informative(case: Case) -> str:
    needed = f"its fresh group had {of_size(case.stat)}"
    name, stat = case.settings.online_filter, case.stat
    if name == "none":
        return f"{needed}, and the filter `none` keeps every fresh group"
    if name == "uniform":
        return f"{needed}, and the uniform filter sampled it, independent of its rewards"
    if name == "range":
        return f"{needed}, and the range filter needs {_wanted(stat)}"
    drawn = f"its draw kept it with {_probability(case)}" if name == "gaussian" else "it is in the quota of its level"
    return f"{needed}, {_inside(stat)}, and {drawn}"


def _outside(case: Case) -> str:
    if case.settings.online_filter == "uniform":
        return (
            f"its fresh group had {of_size(case.stat)}, and the uniform filter, which keeps a fraction of "
            f"{number(case.settings.uniform_share)} independent of rewards, did not sample it"
        )
    had = f"its fresh group had {of_size(case.stat)}, and the {case.settings.online_filter} filter"
    if is_informative(case.stat):  # recorded by a version that compared the sum of the rewards with 1 and G - 1
        return f"{had} left it out, because this run was made before groups with partial credit trained"
    return f"{had} needs {_wanted(case.stat)}"


def _filtered(case: Case) -> str:
    had = f"its fresh group had {of_size(case.stat)}, {_inside(case.stat)}"
    name, settings = case.settings.online_filter, case.settings
    if name == "gaussian":
        return f"{had}, but the gaussian filter keeps it with {_probability(case)} and it was not sampled"
    if name == "gaussian_quota":
        return f"{had}, but the gaussian_quota filter filled the quota of its level without it"
    return f"{had}, but the {name} filter keeps a fraction of {number(settings.uniform_share)} and did not sample it"


def _no_variance(case: Case) -> str:
    same = f"all {case.stat.size} rewards of its {{}} were {number(case.stat.mu)}, so every advantage would be 0"
    if case.result.purpose is Purpose.FRESH:
        return same.format("fresh group")
    return f"{_asked_again(case)}, but {same.format('new group')}; it stays in B_bad"


def _duplicate(case: Case) -> str:
    if case.result.purpose is Purpose.FRESH:
        return f"its fresh group {case.result.group_id} came after another fresh group of the same prompt"
    if case.stat.prompt_id in {
        stat.prompt_id for stat in case.step.view.fresh if stat.group_id in case.step.decision.x1
    }:
        return f"{_asked_again(case)}, but a fresh group of the same prompt is in X1, and a prompt trains once per step"
    return f"{_asked_again(case)}, but there was a newer re-evaluation of the same prompt"


def _improved(case: Case) -> str:
    return f"{_asked_again(case)}: c1 = {number(case.settings.c1)} < mu' = {number(case.stat.mu)} < 1"


def _still_hard(case: Case) -> str:
    return (
        f"{_asked_again(case)}: mu' = {number(case.stat.mu)} <= c1 = {number(case.settings.c1)}, so it stays in B_bad"
    )


def _solved(case: Case) -> str:
    return f"{_asked_again(case)}: mu' = 1, so it is solved and leaves B_bad"


def _no_room(case: Case) -> str:
    decision = case.step.decision
    improved = [name for name, word in decision.reasons.items() if word in (Reason.IMPROVED, Reason.NO_ROOM)]
    room = case.settings.batch_size - len(decision.x1)
    return (
        f"{_improved(case)}, but not sampled: room {room} (B = {case.settings.batch_size} minus "
        f"|X1| = {len(decision.x1)}), candidates {len(improved)}; it stays in B_bad"
    )


def _left_bad(case: Case) -> str:
    return (
        f"{_asked_again(case)} with {of_size(case.stat)}, but its prompt was no longer in B_bad when it arrived: it "
        "had been trained, solved or evicted meanwhile"
    )


def _not_used(case: Case) -> str:
    why = "use_x2 = false" if not case.settings.use_x2 else f"the composer {case.settings.name} has no X2"
    return f"{_asked_again(case)} with {of_size(case.stat)}, but {why}"


def _stale(case: Case) -> str:
    step, version, most = case.step.step, case.result.policy_version, case.config.cadence.max_staleness
    return (
        f"its fresh group was sampled at version {version}: {step} - {version} = {step - version} > {most} = "
        "cadence.max_staleness; it was dropped and its prompt re-sampled"
    )


def _reused(case: Case) -> str:
    decision, stat = case.step.decision, case.stat
    return (
        f"its stored group of step {case.result.birth} ({of_size(stat)}) was sampled from B_high: "
        f"{in_window(decision, stat.mu)}, "
        f"room {room_of(case.config, case.step)}, candidates {len(reusable(case.config, case.step))}"
    )


def _youngest(case: Case) -> str:
    return (
        f"its stored group of step {case.result.birth} ({of_size(case.stat)}) was among the youngest informative ones "
        f"of B_high, with ties broken by distance to mu = 1/2 (x3_policy = {case.settings.x3_policy})"
    )


def _generic(case: Case) -> str:
    word = case.result.reason
    text = meanings(case.settings.name).get(word, "not documented by the composer").rstrip(".")
    had = of_size(case.stat)
    return f"its {case.result.purpose.value} group had {had} and is {word!r} for {case.settings.name}: {text}"


def _asked_again(case: Case) -> str:
    asked = round_of(case.result, case.step.step)
    late = "" if asked == case.step.step else f", arrived for step {case.step.step}"
    return f"it was re-evaluated (requested in step {asked}{late})"


def _wanted(stat: GroupStat) -> str:
    return f"1 <= k <= {stat.size - 1}" if is_binary(stat) else "rewards that differ"


def _inside(stat: GroupStat) -> str:
    return f"inside {_wanted(stat)}" if is_binary(stat) else "which differ"


def _probability(case: Case) -> str:
    settings, mu = case.settings, case.stat.mu
    chance = keep_probability(mu, settings.gaussian_center, settings.gaussian_width)
    return f"p(mu = {number(mu)}) = {number(chance)}"


_WRITERS: dict[str, Callable[[Case], str]] = {
    Reason.INFORMATIVE: _informative,
    Reason.IMPROVED: _improved,
    Reason.REUSED: _reused,
    Reason.YOUNGEST: _youngest,
    Reason.ALL_INCORRECT: _outside,
    Reason.ALL_CORRECT: _outside,
    Reason.FILTERED: _filtered,
    Reason.DUPLICATE_PROMPT: _duplicate,
    Reason.STILL_HARD: _still_hard,
    Reason.SOLVED: _solved,
    Reason.NO_ROOM: _no_room,
    Reason.LEFT_BAD: _left_bad,
    Reason.NO_VARIANCE: _no_variance,
    Reason.NOT_USED: _not_used,
    Reason.STALE: _stale,
}
"""A word without a writer gets its docstring."""

EVERYWHERE = {Reason.STALE, Reason.NOT_USED}
"""Mean the same for every composer; other words of B_bad and B_high are sentences about `OWN_TABLES` only."""
BY_FILTER = {Reason.INFORMATIVE, Reason.ALL_INCORRECT, Reason.ALL_CORRECT, Reason.FILTERED}
FILTERED = {"bapo", "dots_replay", "grpo", "relift", "remix"}
"""Composers whose fresh groups go through `algorithm.online_filter`."""


OWN_TABLES = "bapo"
"""The composer whose rules for B_bad and B_high are explained here; of others, only what the tables held."""
SHOWN_IDS = 5
SHOWN_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    prompt_id: str
    step: int
    origin: Origin | None
    """None: not in the batch."""
    reasons: tuple[str, ...]
    """Reason words of its groups in this step; empty when none was seen."""
    sentence: str


def explain(recording: Recording, replayed: Sequence[SimulatedStep], prompt_id: str, step: int) -> Explanation:
    """Args: replayed: the run as it was recorded. Raises: ConfigError for a step without records."""
    recorded, state = recording.step(step), replayed[step - 1]
    results = [result for result in recorded.results if result.prompt_id == prompt_id]
    trained = [result for result in results if result.origin is not None]
    origin = trained[0].origin if trained else None
    where = f"in batch {step}" + (f" as {origin.value.upper()}" if origin else "")
    parts = [clause(Case(config=recording.config, step=state, result=result)) for result in trained or results]
    if not results:
        parts = list(_not_looked_at(recording, state, prompt_id))
    parts += _entered(recording, state, recorded, prompt_id)
    return Explanation(
        prompt_id=prompt_id,
        step=step,
        origin=origin,
        reasons=tuple(result.reason for result in results),
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
        raise ConfigError(f"{len(found)} prompts of run {recording.name} begin with {name!r}: {some}; be more specific")
    raise ConfigError(
        f"run {recording.name} has no prompt {name!r}{did_you_mean(name, recording.prompt_ids)}; "
        f"`bapo explain RUN all STEP` lists the prompts of a step"
    )


def _entered(recording: Recording, state: SimulatedStep, recorded: RecordedStep, prompt_id: str) -> Iterator[str]:
    """Which tables its fresh group of this step went into."""
    step, decision, settings = state.step, state.decision, recording.config.algorithm
    own = settings.name == OWN_TABLES
    is_of_window = own and settings.x3_policy == "window"
    fresh = {result.group_id for result in recorded.fresh if result.prompt_id == prompt_id}
    for entry in decision.bad:
        if entry.prompt_id == prompt_id and entry.birth == step:
            yield f"it entered B_bad (mu = {number(entry.mu)}{f' <= c1 = {number(settings.c1)}' if own else ''})"
    for stat in decision.high:
        if stat.group_id in fresh and stat.birth == step:
            if is_of_window:
                yield f"it entered B_high ({in_window(decision, stat.mu)})"
            else:
                rule = ", its rewards differ: no window" if own else ""
                yield f"it entered B_high (mu = {number(stat.mu)}{rule})"


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
        return f"{held}, and the composer {settings.name} did not sample it"
    if not settings.use_x3:
        return f"{held}, but use_x3 = false"
    if not state.step - settings.high_window <= stat.birth < state.step:
        return f"{held}, but {state.step} - {stat.birth} > {settings.high_window} = high_window steps"
    if stat.prompt_id in _training_already(state):
        return f"{held}, but the prompt trains in this step already, and a prompt trains once per step"
    if settings.x3_policy == "youngest":
        return f"{held} ({of_size(stat)}), {_why_not_youngest(room_of(recording.config, state), stat)}"
    if not _in_window(decision, stat):
        return f"{held}, outside {window} ({of_size(stat)})"
    if settings.drop_zero_variance_x3 and stat.homogeneous:
        return f"{held} in {window}, but its rewards are all equal (drop_zero_variance_x3)"
    room, candidates = room_of(recording.config, state), len(reusable(recording.config, state))
    return f"{held} in {window}, but not sampled: room {room}, candidates {candidates}"


def _training_already(state: SimulatedStep) -> set[str]:
    taken = {*state.decision.x1, *state.decision.x2}
    return prompt_ids(stat for stat in (*state.view.fresh, *state.view.reevaluated) if stat.group_id in taken)


def _why_not_youngest(room: int, stat: GroupStat) -> str:
    if not is_informative(stat):
        return "but its rewards are all equal, so it has no advantage"
    if room <= 0:
        return "but X1 and X2 filled the batch"
    others = "another" if room == 1 else f"{room} others"
    return f"but {others}, younger or as young and nearer to mu = 1/2, came first (x3_policy = youngest)"


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
        return f"{held}{tries}; it was re-sampled, but its group arrived for step {later}"
    if not settings.use_x2:
        return f"{held}, and use_x2 = false: it is not re-evaluated"
    if remainder := step % (interval := cadence.reevaluation_interval):
        return f"{held}{tries}, and step {step} does not re-evaluate ({step} mod {interval} = {remainder})"
    most = settings.most_reevaluated
    return f"{held}{tries}, and it got no group in a round up to step {step} (at most {most}, drawn uniformly)"


def _rounds(recording: Recording, prompt_id: str) -> Iterator[tuple[int, int]]:
    """(asked, arrived) of every recorded re-evaluation of a prompt."""
    for step in recording.steps:
        for result in step.reevaluated:
            if result.prompt_id == prompt_id:
                yield round_of(result, step.step), step.step


def _seen(recording: Recording, prompt_id: str) -> str:
    steps = [step.step for step in recording.steps if any(_is(result, prompt_id) for result in step.results)]
    some = ", ".join(map(str, steps[-SHOWN_STEPS:]))
    return f"it was read by assemblies {_times(len(steps))}, last in {some}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _is(result: GroupResult, prompt_id: str) -> bool:
    return result.prompt_id == prompt_id and result.reason != Reason.STALE
