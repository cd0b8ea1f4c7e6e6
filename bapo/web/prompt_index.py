"""Which prompts a run has looked at, and where each group is. Folds over recorded steps, pure.

First and last are of fresh groups of G responses, as in the accuracy-migration matrix (Fig. 15), so that a cell of the
matrix is the list of its prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from bapo.comparison.migration import right
from bapo.config.tree import Config
from bapo.types import Purpose
from bapo.web.text_index import TextIndex
from bapo.whatif.recording import RecordedStep


@dataclass(slots=True)
class Summary:
    """One prompt so far."""

    prompt_id: str
    fresh: list[tuple[int, int]] = field(default_factory=list)
    """(step, k) of its fresh groups of G responses."""
    num_visits: int = 0
    num_trained: int = 0
    first_step: int = 0
    last_step: int = 0

    def moved(self, until: int = 0) -> tuple[int, int] | None:
        """k of its first and of its last fresh group up to a step (0: all), if these are two groups."""
        found = [k for step, k in self.fresh if not until or step <= until]
        return (found[0], found[-1]) if len(found) > 1 else None


class PromptIndex:
    """Prompts in the order in which they came, and the places of every group."""

    def __init__(self, config: Config) -> None:
        self._size = config.algorithm.group_size
        self._prompts: dict[str, Summary] = {}
        self._groups: dict[str, tuple[str, list[int]]] = {}

    def advance(self, step: RecordedStep) -> None:
        """Take one step."""
        seen: set[str] = set()
        for fate in step.fates:
            found = self._prompts.setdefault(fate.prompt_id, Summary(fate.prompt_id, first_step=step.step))
            found.last_step = step.step
            found.num_trained += fate.origin is not None
            places = self._groups.setdefault(fate.group_id, (fate.prompt_id, []))[1]
            if fate.group_id in seen:  # several items of the batch are made of it
                continue
            seen.add(fate.group_id)
            places.append(step.step)
            found.num_visits += 1
            if fate.purpose is Purpose.FRESH and fate.birth == step.step and len(fate.rewards) == self._size:
                found.fresh.append((step.step, right(fate)))

    def prompt(self, prompt_id: str) -> Summary | None:
        """One prompt; None when no assembly saw it."""
        return self._prompts.get(prompt_id)

    def prompts(self) -> Iterator[Summary]:
        """The prompt that was looked at last comes first."""
        return iter(sorted(self._prompts.values(), key=lambda found: -found.last_step))

    def group(self, group_id: str) -> tuple[str, list[int]] | None:
        """(prompt, steps that looked at it); None for an unknown group."""
        return self._groups.get(group_id)


class Texts:
    """What can be searched: ids of all groups, and texts of those whose tokens are recorded."""

    def __init__(self, config: Config) -> None:
        self.index = TextIndex()
        self.taken: set[int] = set()
        """Steps whose token records are in the index."""
        self.prompts: dict[str, str] = {}
        """Prompt -> its text, as far as some record has it."""
        self._known: set[str] = set()

    def advance(self, step: RecordedStep) -> None:
        """Take the ids of one step."""
        for fate in step.fates:
            for kind, name in (("prompt", fate.prompt_id), ("group", fate.group_id)):
                if name not in self._known:
                    self._known.add(name)
                    self.index.add((kind, name, step.step), name)
