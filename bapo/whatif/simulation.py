"""The real composer over recorded groups: what the batches of a run were, or would have been with other settings.

    as recorded   the run's own settings; every group at the step in which it was seen
    what if       other settings of composition; fresh groups as recorded, rounds of re-evaluation as the composer asks
                  them (`reevaluation.py`), tables and draws by the composer, with the run's keys (seed, step, purpose)

Fresh groups stay those of the recording: in a real run other batches would make other weights, and other weights other
responses. So a simulation answers what the batches would have been, not what the model would have learned.

The outcome of a re-evaluation that the run did not make: `Answers`. Whether the replay gives the recorded batches:
`compare`.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import msgspec

from bapo.algorithms.composer import AssemblyView, Composer, Decision, NeedMore, Rng
from bapo.algorithms.composers.registry import load_composer
from bapo.algorithms.randomness import rng_for
from bapo.config.tree import Config
from bapo.core.errors import ConfigError, ContractError
from bapo.core.types import GroupStat, HardPrompt, Origin
from bapo.runtime.run_directory.recording import RecordedStep, Recording, round_of, stat_of

DEFAULT_DELAY = 1
"""Steps from a round to the batch that its groups join, where no round was recorded: what sampling ahead gives."""


class Source(StrEnum):
    """Where the outcome of a simulated re-evaluation comes from."""

    RECORDED = "recorded"
    BORROWED = "borrowed"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    source: Source
    arrives_at: int
    """Step whose assembly sees it."""
    stat: GroupStat | None


class Answers:
    """Every recorded group by prompt, and every recorded round."""

    def __init__(self, recording: Recording, *, within: int) -> None:
        """`within`: most steps between a round and the policy version of a group that stands in for its answer."""
        self._within = within
        self._groups: defaultdict[str, list[tuple[int, GroupStat]]] = defaultdict(list)
        self._rounds: defaultdict[int, list[Answer]] = defaultdict(list)
        for step in recording.steps:
            for result in (*step.fresh, *step.reevaluated):
                self._groups[result.prompt_id].append((step.step, stat_of(result)))
            for result in step.reevaluated:
                answer = Answer(source=Source.RECORDED, arrives_at=step.step, stat=stat_of(result))
                self._rounds[round_of(result, step.step)].append(answer)
        delays = [answer.arrives_at - asked for asked, answers in self._rounds.items() for answer in answers]
        waits = recording.config.cadence.wait_for_reevaluation
        self.delay = int(statistics.median(delays)) if delays else 0 if waits else DEFAULT_DELAY
        """Steps from a round to the arrival of a group that the run did not sample."""

    def of_round(self, step: int) -> list[Answer]:
        """The recorded round of a step; empty when it asked nothing."""
        return self._rounds[step]

    def of_prompts(self, step: int, asked: Iterable[str], bad: Iterable[HardPrompt]) -> list[Answer]:
        """The answers to a round that asks these prompts of B_bad, in their order."""
        births = {entry.prompt_id: entry.birth for entry in bad}
        made = {answer.stat.prompt_id: answer for answer in self._rounds[step] if answer.stat}
        return [made.get(prompt_id) or self._borrowed(step, prompt_id, births[prompt_id]) for prompt_id in asked]

    def _borrowed(self, step: int, prompt_id: str, birth: int) -> Answer:
        """The group that made a prompt hard, and older ones, say nothing of how it does later."""
        later = [stat for seen_at, stat in self._groups[prompt_id] if seen_at > birth]
        near = [stat for stat in later if abs(stat.policy_version - step) <= self._within]
        arrives_at = step + self.delay
        if not near:
            return Answer(source=Source.UNKNOWN, arrives_at=arrives_at, stat=None)
        nearest = min(near, key=lambda stat: (abs(stat.policy_version - step), stat.policy_version))
        # Another id: the same group may be fresh in this very step.
        stat = msgspec.structs.replace(nearest, group_id=f"{nearest.group_id}@{step}")
        return Answer(source=Source.BORROWED, arrives_at=arrives_at, stat=stat)


SAMPLING_KEYS = ("batch_size", "group_size")
"""Keys of [algorithm] that the recorded groups were sampled under."""
PICKING_KEYS = ("composer", "most_reevaluated")
"""Fields of [algorithm] that decide whom of B_bad a round asks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    view: AssemblyView
    decision: Decision
    answers: Counter[Source] = field(default_factory=Counter)
    """Re-evaluations that were due in this step, by where their outcome comes from."""

    @property
    def step(self) -> int:
        return self.view.step

    @property
    def batch(self) -> dict[Origin, list[str]]:
        """Origin -> group ids, in the order of the batch."""
        origins = self.decision.origins
        return {origin: [name for name, found in origins.items() if found is origin] for origin in Origin}


def as_recorded(recording: Recording) -> list[SimulatedStep]:
    """The run again, with its own settings and its own re-evaluations."""
    return list(replayed(recording.steps, recording.config))


def replayed(steps: Iterable[RecordedStep], config: Config) -> Iterator[SimulatedStep]:
    """The same for steps 1, 2, ... as they come; none is kept."""
    return _steps(steps, config, lambda step, _: [stat_of(result) for result in step.reevaluated])


def what_if(recording: Recording, config: Config, *, within: int) -> list[SimulatedStep]:
    """The batches under other settings.

    While B_bad is what it was in the run, and the rule that picks from it too, the recorded rounds are taken whole: the
    same settings give the same batches.
    Raises: ConfigError for a setting that the recorded groups depend on.
    """
    _refuse_other_samples(recording.config, config)
    rounds = _Rounds(recording, config, Answers(recording, within=within))
    steps = list(_steps(recording.steps, config, rounds.arrivals))
    return [SimulatedStep(view=step.view, decision=step.decision, answers=rounds.answers[step.step]) for step in steps]


Arrivals = Callable[[RecordedStep, tuple[HardPrompt, ...]], list[GroupStat]]
"""(step, B_bad before it) -> the re-evaluated groups that its assembly sees."""


def _steps(steps: Iterable[RecordedStep], config: Config, arrivals: Arrivals) -> Iterator[SimulatedStep]:
    composer = load_composer(config.algorithm)
    before: Decision | None = None
    for step in steps:
        view = view_at(step, before, config, arrivals(step, before.bad if before else ()))
        before = _composed(composer, view, rng_at(config, step.step))
        yield SimulatedStep(view=view, decision=before)


def next_as_recorded(composer: Composer, config: Config, step: RecordedStep, before: Decision | None) -> SimulatedStep:
    """One step of `as_recorded`, after the decision of the step before it."""
    view = view_at(step, before, config, [stat_of(result) for result in step.reevaluated])
    return SimulatedStep(view=view, decision=_composed(composer, view, rng_at(config, step.step)))


def view_at(
    step: RecordedStep, before: Decision | None, config: Config, reevaluated: Iterable[GroupStat]
) -> AssemblyView:
    """What the assembly of a step saw, with the tables that the decision before it left."""
    return AssemblyView(
        step=step.step,
        fresh=tuple(stat_of(result) for result in step.fresh),
        reevaluated=tuple(reevaluated),
        bad=before.bad if before else (),
        high=before.high if before else (),
        previous_r_tot=before.r_tot if before else None,
        round=max(1, len(step.fresh) // load_composer(config.algorithm).fresh_schedule.at(step.step)),
    )


def _composed(composer: Composer, view: AssemblyView, rng: Rng) -> Decision:
    """The decision on the groups that there are: further rounds of generation were not sampled, so none is left."""
    decision = composer.compose(view, rng)
    if isinstance(decision, NeedMore):
        decision = composer.compose(replace(view, round=composer.max_rounds), rng)
    if isinstance(decision, NeedMore):
        raise ContractError(f"{type(composer).__name__} wants more than its max_rounds = {composer.max_rounds}")
    return decision


class _Rounds:
    def __init__(self, recording: Recording, config: Config, answers: Answers) -> None:
        self._recorded, self._config, self._answers = recording.config, config, answers
        self._composer: Composer = load_composer(config.algorithm)
        recorded = as_recorded(recording)
        self._recorded_bad = {step.step: _names(step.view.bad) for step in recorded}
        self._due: defaultdict[int, list[Answer]] = defaultdict(list)
        self.answers: defaultdict[int, Counter[Source]] = defaultdict(Counter)
        """Step -> the answers that its assembly sees, or would see if they were known."""

    def arrivals(self, step: RecordedStep, bad: tuple[HardPrompt, ...]) -> list[GroupStat]:
        if _asks(self._config, step.step):
            for answer in self._round(step, bad):
                self._due[answer.arrives_at].append(answer)
        due = self._due.pop(step.step, [])
        self.answers[step.step].update(answer.source for answer in due)
        return [answer.stat for answer in due if answer.stat]

    def _round(self, step: RecordedStep, bad: tuple[HardPrompt, ...]) -> list[Answer]:
        if self._picks_as_recorded(step.step, bad):
            return self._answers.of_round(step.step)
        excluded = frozenset(result.prompt_id for result in step.fresh)
        rng = rng_at(self._config, step.step)
        asked = self._composer.hard_prompts_to_ask(bad, step.step, excluded, rng)
        return self._answers.of_prompts(step.step, asked, bad)

    def _picks_as_recorded(self, step: int, bad: tuple[HardPrompt, ...]) -> bool:
        now, then = self._config.algorithm, self._recorded.algorithm
        same_rule = all(getattr(now, key) == getattr(then, key) for key in PICKING_KEYS)
        return same_rule and _asks(self._recorded, step) and _names(bad) == self._recorded_bad[step]


def rng_at(config: Config, step: int) -> Rng:
    return lambda purpose: rng_for(config.run.seed, step, purpose)


def _asks(config: Config, step: int) -> bool:
    return config.algorithm.use_x2 and step % config.cadence.reevaluation_interval == 0


def _names(bad: tuple[HardPrompt, ...]) -> list[tuple[str, int]]:
    return [(entry.prompt_id, entry.birth) for entry in bad]


def _refuse_other_samples(recorded: Config, wanted: Config) -> None:
    then, now = recorded.model_dump(), wanted.model_dump()
    for section, fields in then.items():
        for key, value in fields.items() if isinstance(fields, dict) else ():
            may_differ = (section == "algorithm" and key not in SAMPLING_KEYS) or (section, key) == (
                "cadence",
                "reevaluation_interval",
            )
            if not may_differ and now[section][key] != value:
                raise ConfigError(
                    f"{section}.{key} = {now[section][key]}: the run had {value}, and its groups depend on it, "
                    "so a simulation cannot change it; it can change cadence.reevaluation_interval and the "
                    f"keys of [algorithm] except {' and '.join(SAMPLING_KEYS)}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """How many steps came out as they were recorded, and what differs in the first that did not."""

    num_same: int
    num_steps: int
    first: tuple[int, str] | None
    """(step, difference)."""

    @property
    def exact(self) -> bool:
        return self.first is None

    @property
    def sentence(self) -> str:
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
    decision = simulated.decision
    for origin in Origin:
        then, now = recorded.batch[origin], _in_recorded_order(simulated, origin)
        if then != now:
            yield f"{origin.value.upper()} has {_listed(then, now)} recorded, {_listed(now, then)} replayed"
    row = recorded.metrics or {}
    values = {"r_tot" if "r_tot" in row else "reward_mean": decision.r_tot, **decision.reported}
    for name, value in values.items():
        if name in row and row[name] != value:
            yield f"{name} is {row[name]} recorded, {value} replayed"
    for result in (*recorded.fresh, *recorded.reevaluated):
        if decision.reasons.get(result.group_id) != result.reason:
            yield f"{result.group_id} is {result.reason} recorded, {decision.reasons.get(result.group_id)} replayed"


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
