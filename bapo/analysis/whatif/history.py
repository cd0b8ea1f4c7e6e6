"""The history of every prompt of a run: its visits, and when it entered and left each table and why. Pure.

    visit        an assembly saw a group of the prompt: fresh, re-evaluated, or reused from B_high
    transition   the prompt entered, was renewed in, or left B_bad or B_high

Steps are added in order (`advance`), so that a live run costs no more than its new steps. Tables are
not recorded; they follow from the groups, and are unknown once the replay differs from the run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from bapo.algorithms.composer import Composer, Decision, Reason
from bapo.algorithms.composers.registry import load_composer
from bapo.analysis.whatif.explanation import OWN_TABLES, Case, clause, in_window, number
from bapo.analysis.whatif.recording import RecordedStep, round_of, stat_of
from bapo.analysis.whatif.simulation import SimulatedStep, differences_of, next_as_recorded, view_at
from bapo.config.tree import Config
from bapo.core.errors import BapoError
from bapo.core.types import GroupResult, GroupStat, HardPrompt, Purpose

Kind = Literal["fresh", "reevaluated", "reused"]
Table = Literal["bad", "high"]
Change = Literal["entered", "renewed", "left"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    step: int
    kind: Kind
    result: GroupResult
    asked: int
    """Step in which it was asked for, if its id has it; else the step itself."""
    stat: GroupStat
    sentence: str
    """Why it trained or did not, with the inequality that decided."""

    @property
    def item(self) -> str:
        """Id of what the batch made of it, and of its text: several groups may be one item."""
        return self.result.item or self.result.group_id


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    step: int
    table: Table
    change: Change
    sentence: str


@dataclass(frozen=True, slots=True)
class _Event:
    step: int
    table: Table
    change: Change
    birth: int
    mu: float


class History:
    """All prompts of one run, as far as its steps were added."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._steps: list[RecordedStep] = []
        self._decisions: list[Decision] = []
        self._visits: dict[str, list[int]] = {}
        """Prompt -> indices of the steps that saw it."""
        self._events: defaultdict[str, list[_Event]] = defaultdict(list)
        self.differs: str = ""
        """From which step on tables are unknown, and why; empty while the replay is exact."""
        self._composer: Composer | None
        try:
            self._composer = load_composer(config.algorithm)
        except BapoError as error:
            self._composer, self.differs = None, str(error)

    def advance(self, step: RecordedStep) -> None:
        index = len(self._steps)
        self._steps.append(step)
        for result in step.results:
            seen = self._visits.setdefault(result.prompt_id, [])
            if not seen or seen[-1] != index:
                seen.append(index)
        self._replay(step)

    @property
    def prompt_ids(self) -> list[str]:
        """Every prompt that some assembly saw, in the order in which they came."""
        return list(self._visits)

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    def decisions(self, first: int) -> Iterator[tuple[int, Decision | None]]:
        """(step, its replayed decision) after the first `first` steps; None where the replay differs."""
        for index in range(first, len(self._steps)):
            yield self._steps[index].step, self._decisions[index] if index < len(self._decisions) else None

    def visits(self, prompt_id: str) -> list[Visit]:
        """Every visit of a prompt, in order; empty for a prompt that no assembly saw."""
        return [
            self._visit(index, result)
            for index in self._visits.get(prompt_id, ())
            for result in self._steps[index].results
            if result.prompt_id == prompt_id
        ]

    def transitions(self, prompt_id: str) -> list[Transition]:
        return [
            Transition(step=event.step, table=event.table, change=event.change, sentence=self._why(prompt_id, event))
            for event in self._events.get(prompt_id, ())
        ]

    def tables_now(self) -> Mapping[str, frozenset[str]]:
        """Prompts in each table after the last step; empty when the replay differs."""
        last = self._decisions[-1] if self._decisions and not self.differs else None
        bad, high = (last.bad, last.high) if last else ((), ())
        return {"bad": frozenset(entry.prompt_id for entry in bad), "high": frozenset(stat.prompt_id for stat in high)}

    def _replay(self, step: RecordedStep) -> None:
        if self.differs or self._composer is None:
            return
        if step.step != len(self._steps) or not step.results:
            self.differs = f"the groups of step {len(self._steps)} are not recorded"
            return
        before = self._decisions[-1] if self._decisions else None
        try:
            found = next_as_recorded(self._composer, self._config, step, before)
        except (BapoError, ArithmeticError, LookupError, ValueError) as error:
            # What lies on the disk may be no step that a composer can decide, for example one without fresh groups.
            self.differs = f"since step {step.step}: {error}"
            return
        difference = next(differences_of(step, found), None)
        if difference is not None:
            self.differs = f"since step {step.step}: {difference}"
            return
        self._decisions.append(found.decision)
        for prompt_id, event in _changes(step.step, before, found.decision):
            self._events[prompt_id].append(event)

    def _state(self, index: int) -> SimulatedStep | None:
        """The replayed step again; None after the first difference."""
        if index >= len(self._decisions):
            return None
        before, step = (self._decisions[index - 1] if index else None), self._steps[index]
        view = view_at(step, before, self._config, [stat_of(result) for result in step.reevaluated])
        return SimulatedStep(view=view, decision=self._decisions[index])

    def _visit(self, index: int, result: GroupResult) -> Visit:
        step = self._steps[index].step
        state = self._state(index)
        sentence = (
            clause(Case(config=self._config, step=state, result=result)) if state else f"recorded as {result.reason!r}"
        )
        return Visit(
            step=step,
            kind=kind_of(result, step),
            result=result,
            asked=round_of(result, step),
            stat=stat_of(result).born(result.birth),
            sentence=sentence,
        )

    def _why(self, prompt_id: str, event: _Event) -> str:
        if self._config.algorithm.name != OWN_TABLES:
            return f"by the rule of the composer {self._config.algorithm.name}"
        if event.change != "left":
            return self._why_in(event)
        return self._why_not_bad(prompt_id, event) if event.table == "bad" else self._why_not_high(event)

    def _why_in(self, event: _Event) -> str:
        settings, decision = self._config.algorithm, self._decisions[event.step - 1]
        again = ", and its entry was renewed" if event.change == "renewed" else ""
        if event.table == "bad":
            return f"fresh group with mu = {number(event.mu)} <= c1 = {number(settings.c1)}{again}"
        if settings.x3_policy == "youngest":
            return f"fresh group with mu = {number(event.mu)} whose rewards differ: no window{again}"
        return f"fresh group with {in_window(decision, event.mu)}{again}"

    def _why_not_bad(self, prompt_id: str, event: _Event) -> str:
        settings, index = self._config.algorithm, event.step - 1
        decided = {Reason.IMPROVED: "trained as X2", Reason.SOLVED: "solved"}
        for result in self._steps[index].reevaluated:
            if result.prompt_id == prompt_id and result.reason in decided:
                state = self._state(index)
                why = clause(Case(config=self._config, step=state, result=result)) if state else result.reason
                return f"{decided[result.reason]}: {why}"
        newer = sum(entry.birth > event.birth for entry in self._decisions[index].bad)
        return (
            f"evicted: the capacity of B_bad is {settings.capacity} prompts, and it has {newer} newer ones (this one "
            f"was added in step {event.birth})"
        )

    def _why_not_high(self, event: _Event) -> str:
        window = self._config.algorithm.high_window
        return f"expired: {event.step} - {event.birth} = {event.step - event.birth} >= {window} = high_window steps"


def kind_of(result: GroupResult, step: int) -> Kind:
    """How the assembly of `step` met a group."""
    if result.birth < step and result.birth > 0 and result.reason != Reason.STALE:
        return "reused"
    return "reevaluated" if result.purpose is Purpose.REEVALUATE else "fresh"


def _changes(step: int, before: Decision | None, now: Decision) -> Iterator[tuple[str, _Event]]:
    tables: list[tuple[Table, tuple[HardPrompt | GroupStat, ...], tuple[HardPrompt | GroupStat, ...]]] = [
        ("bad", before.bad if before else (), now.bad),
        ("high", before.high if before else (), now.high),
    ]
    for table, entries_then, entries_now in tables:
        then = {entry.prompt_id: entry for entry in entries_then}
        here = {entry.prompt_id: entry for entry in entries_now}
        for prompt_id, entry in here.items():
            old = then.get(prompt_id)
            if old is None or old.birth != entry.birth:
                yield prompt_id, _Event(step, table, "renewed" if old else "entered", entry.birth, entry.mu)
        for prompt_id, entry in then.items():
            if prompt_id not in here:
                yield prompt_id, _Event(step, table, "left", entry.birth, entry.mu)
