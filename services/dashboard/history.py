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

from bapo.algorithms.composer import Composer, Decision
from bapo.algorithms.composers.registry import load_composer
from bapo.config.tree import Config
from bapo.core.baselines import items_with_advantage
from bapo.core.errors import BapoError
from bapo.core.types import GroupResult, GroupStat, HardPrompt
from bapo.runtime.run_directory.recording import Kind, RecordedStep, kind_of, round_of, stat_of
from bapo.whatif.explanation import clause, meanings, number
from bapo.whatif.simulation import differences_of, next_as_recorded

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
    """What its responses had, and why it trained or did not."""

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
        self.meanings = meanings(self._composer)
        """Reason word -> what it means."""

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

    def _visit(self, index: int, result: GroupResult) -> Visit:
        step = self._steps[index].step
        return Visit(
            step=step,
            kind=kind_of(result, step),
            result=result,
            asked=round_of(result, step),
            stat=stat_of(result).born(result.birth),
            sentence=self._clause(index, result),
        )

    def _clause(self, index: int, result: GroupResult) -> str:
        step = self._steps[index]
        of_prompt = (other for other in step.results if other.prompt_id == result.prompt_id)
        useful = items_with_advantage(of_prompt, step.step, self._config.loss.advantage_pool)
        return clause(result, step.step, self.meanings, useful)

    def _why(self, prompt_id: str, event: _Event) -> str:
        if event.change != "left":
            renewed = ", and its entry was renewed" if event.change == "renewed" else ""
            return f"group with mu = {number(event.mu)}{renewed}"
        index = event.step - 1
        of_prompt = (result for result in self._steps[index].results if result.prompt_id == prompt_id)
        read = [self._clause(index, result) for result in of_prompt]
        return "; ".join(read) or "no group of it was read: it was too old, or younger ones filled the table"


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
