"""The real composer over recorded groups: what the batches of a run were, or would have been with other settings.

    as recorded   the run's own settings; every group at the step in which it was seen
    what if       other settings of composition; fresh groups as recorded, rounds of re-evaluation as the composer asks
                  them (`reevaluation.py`), tables and draws by the composer, with the run's keys (seed, step, purpose)

Fresh groups stay those of the recording: in a real run other batches would make other weights, and other weights other
responses. So a simulation answers what the batches would have been, not what the model would have learned.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from bapo.algorithms.composer import AssemblyView, Composer, Decision, NeedMore, Reason, Rng
from bapo.algorithms.composers.registry import load_composer
from bapo.algorithms.randomness import rng_for
from bapo.algorithms.reevaluation import Paid, paid_before
from bapo.analysis.whatif.recording import RecordedStep, Recording, stat_of
from bapo.analysis.whatif.reevaluation import Answer, Answers, Source
from bapo.config.tree import Config
from bapo.core.errors import ConfigError, ContractError
from bapo.core.types import GroupStat, HardPrompt, Origin

SAMPLING_KEYS = ("batch_size", "group_size")
"""Keys of [algorithm] that the recorded groups were sampled under."""
PICKING_KEYS = ("name", "max_reevaluated", "hard_choice", "hard_worth")
"""Keys of [algorithm] that decide whom of B_bad a round asks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedStep:
    """One batch, and what it was made of."""

    view: AssemblyView
    decision: Decision
    answers: Counter[Source] = field(default_factory=Counter)
    """Re-evaluations that were due in this step, by where their outcome comes from."""

    @property
    def step(self) -> int:
        """t."""
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
    return _steps(steps, config, lambda step, *_: [stat_of(fate) for fate in step.reevaluated], keep=1)


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


Arrivals = Callable[[RecordedStep, tuple[HardPrompt, ...], Sequence[SimulatedStep]], list[GroupStat]]
"""(step, B_bad before it, steps before it) -> the re-evaluated groups that its assembly sees."""


def _steps(
    steps: Iterable[RecordedStep], config: Config, arrivals: Arrivals, keep: int | None = None
) -> Iterator[SimulatedStep]:
    """`keep`: how many of the newest steps `arrivals` is shown; None: all."""
    composer = load_composer(config.algorithm)
    done: list[SimulatedStep] = []
    for step in steps:
        before = done[-1].decision if done else None
        view = view_at(step, before, config, arrivals(step, before.bad if before else (), done))
        done.append(SimulatedStep(view=view, decision=_composed(composer, view, rng_at(config, step.step))))
        yield done[-1]
        if keep is not None:
            del done[:-keep]


def next_as_recorded(composer: Composer, config: Config, step: RecordedStep, before: Decision | None) -> SimulatedStep:
    """One step of `as_recorded`, behind the decision of the step before it."""
    view = view_at(step, before, config, [stat_of(fate) for fate in step.reevaluated])
    return SimulatedStep(view=view, decision=_composed(composer, view, rng_at(config, step.step)))


def view_at(
    step: RecordedStep, before: Decision | None, config: Config, reevaluated: Iterable[GroupStat]
) -> AssemblyView:
    """What the assembly of a step saw, with the tables that the decision before it left."""
    return AssemblyView(
        step=step.step,
        fresh=tuple(stat_of(fate) for fate in step.fresh),
        reevaluated=tuple(reevaluated),
        bad=before.bad if before else (),
        high=before.high if before else (),
        previous_r_tot=before.r_tot if before else None,
        round=max(1, len(step.fresh) // config.algorithm.fresh_schedule.at(step.step)),
    )


def _composed(composer: Composer, view: AssemblyView, rng: Rng) -> Decision:
    """The decision on the groups that there are: further rounds of generation were not sampled, so none is left."""
    decision = composer.compose(view, rng)
    if isinstance(decision, NeedMore):
        decision = composer.compose(replace(view, round=composer.max_rounds), rng)
    if isinstance(decision, NeedMore):
        raise ContractError(f"composer {composer.name!r} wants more than its max_rounds = {composer.max_rounds}")
    return decision


class _Rounds:
    """Who is asked again when, and when the answers come."""

    def __init__(self, recording: Recording, config: Config, answers: Answers) -> None:
        self._recorded, self._config, self._answers = recording.config, config, answers
        self._composer: Composer = load_composer(config.algorithm)
        recorded = as_recorded(recording)
        self._recorded_bad = {step.step: _names(step.view.bad) for step in recorded}
        self._recorded_paid = {step.step: paid_by(recorded, step.step) for step in recorded}
        self._due: defaultdict[int, list[Answer]] = defaultdict(list)
        self.answers: defaultdict[int, Counter[Source]] = defaultdict(Counter)
        """Step -> the answers that its assembly sees, or would see if they were known."""

    def arrivals(
        self, step: RecordedStep, bad: tuple[HardPrompt, ...], done: Sequence[SimulatedStep]
    ) -> list[GroupStat]:
        if _asks(self._config, step.step):
            for answer in self._round(step, bad, paid_by(done, step.step)):
                self._due[answer.arrives_at].append(answer)
        due = self._due.pop(step.step, [])
        self.answers[step.step].update(answer.source for answer in due)
        return [answer.stat for answer in due if answer.stat]

    def _round(self, step: RecordedStep, bad: tuple[HardPrompt, ...], paid: Paid) -> list[Answer]:
        if self._picks_as_recorded(step.step, bad, paid):
            return self._answers.of_round(step.step)
        excluded = frozenset(fate.prompt_id for fate in step.fresh)
        rng = rng_at(self._config, step.step)
        asked = self._composer.hard_prompts_to_ask(bad, step.step, excluded, rng, paid)
        return self._answers.of_prompts(step.step, asked, bad)

    def _picks_as_recorded(self, step: int, bad: tuple[HardPrompt, ...], paid: Paid) -> bool:
        now, then = self._config.algorithm, self._recorded.algorithm
        same_rule = all(getattr(now, key) == getattr(then, key) for key in PICKING_KEYS)
        same_pay = now.hard_worth is None or paid == self._recorded_paid[step]
        return same_rule and same_pay and _asks(self._recorded, step) and _names(bad) == self._recorded_bad[step]


def paid_by(steps: Sequence[SimulatedStep], step: int) -> Paid:
    """What sampling has paid before a step, as the buffer's compositions say it in a run."""
    improved = (Reason.IMPROVED, Reason.NO_ROOM)
    lines = [
        {
            "step": done.step,
            "fresh": len(done.view.fresh),
            "x1": len(done.decision.x1),
            "reevaluated": len(done.view.reevaluated),
            "improved": sum(done.decision.reasons.get(stat.group_id) in improved for stat in done.view.reevaluated),
        }
        for done in steps
    ]
    return paid_before(step, lines)


def rng_at(config: Config, step: int) -> Rng:
    """The generators of one step."""
    return lambda purpose: rng_for(config.run.seed, step, purpose)


def _asks(config: Config, step: int) -> bool:
    """Whether hard prompts are asked again at this step."""
    return config.algorithm.use_x2 and step % config.cadence.m == 0


def _names(bad: tuple[HardPrompt, ...]) -> list[tuple[str, int]]:
    return [(entry.prompt_id, entry.birth) for entry in bad]


def _refuse_other_samples(recorded: Config, wanted: Config) -> None:
    then, now = recorded.model_dump(), wanted.model_dump()
    for section, fields in then.items():
        for key, value in fields.items() if isinstance(fields, dict) else ():
            may_differ = (section == "algorithm" and key not in SAMPLING_KEYS) or (section, key) == ("cadence", "m")
            if not may_differ and now[section][key] != value:
                raise ConfigError(
                    f"{section}.{key} = {now[section][key]}: the run had {value}, and its groups would be others "
                    "without, so a simulation cannot change it; it can change cadence.m and the keys of [algorithm] "
                    f"but for {' and '.join(SAMPLING_KEYS)}"
                )
