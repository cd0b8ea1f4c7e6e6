"""A reward tried on a data set before it costs a run: does it reward the right answer of every row, and no other?

Each row is graded twice in a process that can be killed: with its own gold answer, and with the next different answer
of the file. The second finds rewards that say yes to everything, and those that fail on what is wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from bapo.core.errors import ConfigError, GradingError
from bapo.core.reward_details import Means, as_columns, details_of, shown_details
from bapo.core.types import SAME_REWARD, Prompt
from bapo.tasks.base import ROW, Task, TaskContext
from bapo.tasks.data_files import read_rows
from bapo.tasks.dataset import DatasetOptions, PromptWriter
from bapo.tasks.grading.pool import GraderPool, Grades, prompt_words
from bapo.tasks.images import Images

RIGHT, PARTLY, WRONG, BUSY = "right", "partly", "wrong", "verifier_busy"
MAX_SHOWN = 80
"""Characters of a response."""


class Grader(Protocol):
    """Grades groups."""

    def grade(self, prompt: Prompt, texts: Sequence[str]) -> Grades:
        """Raises: GradingError."""
        ...


@dataclass(slots=True, kw_only=True)
class Trial:
    """What came of it."""

    results: dict[str, int] = field(default_factory=dict)
    """Gold answers by what became of them: right, partly, wrong, or the reason of a failed grading."""
    unreadable: int = 0
    """Rows that are no prompt with an answer."""
    others_tried: int = 0
    """Rows that were graded with the answer of another row."""
    others_right: int = 0
    """Those of them that were rewarded 1."""
    others_partly: int = 0
    """Those of them that got partial credit."""
    others_failed: int = 0
    """Those of them that got no reward."""
    total_s: float = 0.0
    slowest_s: float = 0.0
    slowest: str = ""
    """Where the row stands whose gold answer took longest."""
    problems: list[tuple[str, str]] = field(default_factory=list)
    """(row, what is wrong with it) for each row that is not right."""
    gold_details: list[Means] = field(default_factory=list)
    """Components and facts of each gold answer that was graded."""
    others_details: list[Means] = field(default_factory=list)
    """Of each answer of another row."""
    others_troubles: dict[str, int] = field(default_factory=dict)
    """Answers of other rows that got no reward, by the reason of the failed grading."""

    @property
    def num_rows(self) -> int:
        return sum(self.results.values()) + self.unreadable

    @property
    def accuracy(self) -> float:
        """Share of all rows whose gold answer was rewarded 1."""
        return self.results.get(RIGHT, 0) / max(1, self.num_rows)


def read_prompts(options: DatasetOptions, context: TaskContext, limit: int, trial: Trial) -> list[Prompt]:
    """The first `limit` rows as prompts; what cannot be read is counted in `trial`. Raises: ConfigError: no file."""
    prompt_of = PromptWriter(options.path, options, context, Images())
    prompts: list[Prompt] = []
    rows = islice(read_rows(options.path), limit)
    while True:
        try:
            row = next(rows, None)
            if row is None:
                return prompts
            prompts.append(prompt_of(row))
        except ConfigError as error:
            trial.unreadable += 1
            where, _, what = str(error).partition(": ")
            trial.problems.append((where, what))


def try_reward(
    graders: GraderPool, prompts: Sequence[Prompt], gold_of: Callable[[Prompt], str], trial: Trial, *, copies: int
) -> Iterator[int]:
    """Grade every prompt; yields how many are done.

    Args:
        copies: of a response that are graded at once: 2 finds a list of the wrong length.
    """
    for done, (prompt, other) in enumerate(zip(prompts, _others(prompts), strict=True), start=1):
        gold, where = gold_of(prompt), str(prompt.answer[ROW])
        began = time.monotonic()
        result, problem = try_response(graders, prompt, gold, copies=copies, details=trial.gold_details)
        took_s = (time.monotonic() - began) / copies
        trial.results[result] = trial.results.get(result, 0) + 1
        trial.total_s += took_s
        if took_s > trial.slowest_s:
            trial.slowest_s, trial.slowest = took_s, where
        if problem:
            trial.problems.append((f"{where} ({gold[:MAX_SHOWN]!r})", problem))
        if other is not None and result in (RIGHT, PARTLY, WRONG):
            trial.others_tried += 1
            gold = gold_of(other)
            result, problem = try_response(graders, prompt, gold, copies=copies, details=trial.others_details)
            trial.others_right += result == RIGHT
            trial.others_partly += result == PARTLY
            if result not in (RIGHT, PARTLY, WRONG):
                trial.others_failed += 1
                trial.others_troubles[result] = trial.others_troubles.get(result, 0) + 1
                trial.problems.append((f"{where} ({gold[:MAX_SHOWN]!r})", f"with another row's answer, {problem}"))
        yield done


def try_first(graders: GraderPool, task: Task) -> tuple[bool, str]:
    """(whether grading fails, what is wrong) with the gold answer of the first training prompt; "": nothing.

    Two responses are graded at once, as functions of groups need it. Raises: ConfigError: no data.
    """
    prompt = task.prompts("train")[0]
    gold = task.gold(prompt)
    result, problem = try_response(graders, prompt, gold or "", copies=2)
    failed = result not in (RIGHT, PARTLY, WRONG)
    if not problem or (gold is None and not failed):
        return False, ""
    advice = "; task.options.gold_format says what a correct response looks like" if result == WRONG else ""
    where = prompt.answer.get(ROW, prompt.prompt_id)
    return failed, f"{where} ({(gold or '')[:MAX_SHOWN]!r}): {problem}{advice}"


def try_response(
    graders: Grader, prompt: Prompt, text: str, *, copies: int, details: list[Means] | None = None
) -> tuple[str, str]:
    """(result, what is wrong) of a gold answer; rows with the same trouble have the same words.

    Args:
        details: gets the components and facts.
    """
    try:
        grades = graders.grade(prompt, [text] * copies)
    except GradingError as error:
        what = str(error).replace(f" (on the response {text[:200]!r})", "")
        return str(getattr(error, "reason", "grading")), what.replace(prompt_words(prompt), "")
    if grades.num_busy:
        return BUSY, "the gold answer keeps the verifier busy"
    reward, found = float(grades.rewards[0]), details_of(grades.details, 0)
    if details is not None:
        details.append(found)
    if reward >= 1 - SAME_REWARD:
        return RIGHT, ""
    parts = shown_details({"reward_parts": as_columns(found).get("reward_parts")})
    shown = f"the reward of the gold answer is {reward:g}{f' ({parts})' if parts else ''}"
    return WRONG if reward <= SAME_REWARD else PARTLY, shown


def _others(prompts: Sequence[Prompt]) -> list[Prompt | None]:
    """For each prompt the next one, round the end, that has another answer; None when all have the same."""
    answers = [repr(prompt.answer["answer"]) for prompt in prompts]
    found: list[Prompt | None] = []
    for i, answer in enumerate(answers):
        order = (*range(i + 1, len(answers)), *range(i))
        found.append(next((prompts[k] for k in order if answers[k] != answer), None))
    return found
