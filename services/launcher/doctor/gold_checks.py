"""Gold answers graded by whatever will grade, and a row of every shape: a reward may read a column missing in some.

first rows of train             a run in which too many gold answers get 0 learns nothing
first row of each other shape   columns and their types, of all splits: what fails on it fails in the run
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from bapo.core.errors import BapoError, ConfigError
from bapo.core.types import Prompt
from bapo.tasks.base import ROW
from bapo.tasks.grading.pool import GraderPool
from bapo.tasks.grading.trial import BUSY, MAX_SHOWN, PARTLY, RIGHT, WRONG, Grader, try_response
from bapo.tasks.right_answers import gold_text
from services.launcher.doctor.checks import Check
from services.launcher.doctor.here_grader import HereGrader
from services.launcher.doctor.situation import Situation

NAME = "gold answers"
MAX_WRONG = 0.1
"""Share of gold answers with reward 0 that may be errors of the data."""
MAX_SHAPES = 16
"""Shapes of rows of which one is graded."""
GUESSES = ("{answer}", "\\boxed{{answer}}", "<answer>{answer}</answer>", "#### {answer}")
"""Formats to try when none is known."""
HOW_TO_GO_ON = "to start anyway, set task.check_gold = false"


@dataclass(slots=True)
class _Trial:
    """Results so far."""

    num_right: int = 0
    num_partly: int = 0
    num_unknown: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """Descriptions of the rows of the first shape."""
    odd: list[str] = field(default_factory=list)
    """Of other shapes."""

    @property
    def num(self) -> int:
        return self.num_right + self.num_partly + self.num_unknown + len(self.wrong) + len(self.failed)


def gold_answers(situation: Situation) -> Iterator[Check]:
    """The gold answers of the first rows have a reward, and rows of every shape can be graded."""
    trial = _Trial()
    try:
        first = situation.task.prompts("train")[: situation.num_gold]
        with closing(_grader(situation)) as grader:
            until = time.monotonic() + situation.seconds
            for prompt in first:
                _try(grader, prompt, _golds(situation, prompt), trial)
                if time.monotonic() > until:
                    break
            for prompt, num in _odd_rows(situation):
                if time.monotonic() > until:
                    break
                _try_odd(grader, prompt, _golds(situation, prompt), num, trial)
    except ConfigError as error:  # nothing can grade, which check_gold is not about
        yield Check(name=NAME, status="fail", detail=str(error))
        return
    except BapoError as error:
        trial.failed.append(str(error))
    yield _result(situation, trial)


def _grader(situation: Situation) -> Any:
    """What grades in the run: a process that can be killed, unless the task's own verifier needs none."""
    settings = situation.config.task
    if ":" not in settings.name and not _has_own_reward(situation) and situation.task.is_fast:
        return HereGrader(situation.task, settings)
    return GraderPool(settings, num_children=1)


def _try(grader: Grader, prompt: Prompt, texts: list[str], trial: _Trial) -> None:
    """Grade the texts of a gold answer until one has a reward."""
    if not texts:
        trial.num_unknown += 1
        return
    problem = ""
    for text in texts:
        result, problem = try_response(grader, prompt, text, copies=2)
        if result == RIGHT:
            trial.num_right += 1
            return
        if result == PARTLY:
            trial.num_partly += 1
            return
        if result not in (WRONG, BUSY):
            trial.failed.append(f"{_where(prompt)} ({text[:MAX_SHOWN]!r}): {problem}")
            return
    forms = f", also in the formats {' and '.join(GUESSES[1:])}" if len(texts) > 1 else ""
    trial.wrong.append(f"{_where(prompt)} ({texts[0][:MAX_SHOWN]!r}): {problem}{forms}")


def _golds(situation: Situation, prompt: Prompt) -> list[str]:
    """Texts of which one is right: without `gold_format`, a user's reward may read any of the usual formats."""
    gold, settings = situation.task.gold(prompt), situation.config.task
    answer = prompt.answer.get("answer")
    if "gold_format" in settings.options or not _has_own_reward(situation) or answer is None:
        return [] if gold is None else [gold]
    guesses = [form.replace("{answer}", gold_text(answer)) for form in GUESSES]
    return list(dict.fromkeys([*([] if gold is None else [gold]), *guesses]))


def _has_own_reward(situation: Situation) -> bool:
    settings = situation.config.task
    return bool(settings.reward or settings.options.get("reward"))


def _try_odd(grader: Grader, prompt: Prompt, texts: list[str], num: int, trial: _Trial) -> None:
    result, problem = try_response(grader, prompt, texts[0] if texts else "", copies=2)
    if result not in (RIGHT, PARTLY, WRONG, BUSY):
        more = f" and {num - 1:,} more rows with these columns" if num > 1 else ""
        trial.odd.append(f"{_where(prompt)}{more}: {problem}")


def _odd_rows(situation: Situation) -> list[tuple[Prompt, int]]:
    """(first row, number of rows) of each shape that the first training row does not have."""
    first: dict[Any, Prompt] = {}
    counts: Counter[Any] = Counter()
    for split in situation.splits:
        for prompt in situation.task.prompts(split):
            shape = _shape(prompt.answer)
            counts[shape] += 1
            first.setdefault(shape, prompt)
    known = _shape(situation.task.prompts("train")[0].answer)
    return [(prompt, counts[shape]) for shape, prompt in first.items() if shape != known][:MAX_SHAPES]


def _shape(value: Any, depth: int = 2) -> Any:
    """Columns, those inside them, and the types of their values; a null is a type of its own."""
    if isinstance(value, Mapping) and depth:
        return frozenset((key, _shape(inner, depth - 1)) for key, inner in value.items())
    return type(value)


def _where(prompt: Prompt) -> str:
    return str(prompt.answer.get(ROW, f"prompt {prompt.prompt_id}"))


def _result(situation: Situation, trial: _Trial) -> Check:
    bad = [*trial.failed, *trial.wrong]
    is_fatal = bool(trial.odd) or len(bad) > MAX_WRONG * trial.num
    if trial.odd or bad:
        fails = is_fatal and situation.config.task.check_gold and not situation.is_resumed
        lines = [*trial.odd]
        if bad:
            more = f" ({len(bad)} of {trial.num} rows)" if trial.num > 1 else ""
            advice = "" if trial.failed else "; task.options.gold_format says what a correct response looks like"
            lines.append(f"{bad[0]}{more}{advice}")
        lines += [HOW_TO_GO_ON] if fails else []
        return Check(name=NAME, status="fail" if fails else "warn", detail="\n".join(lines))
    if not trial.num_right and not trial.num_partly:
        detail = "not tested: no gold answer is known; task.options.gold_format says what a correct response looks like"
        return Check(name=NAME, status="warn", detail=detail)
    if trial.num_partly:
        detail = f"{trial.num_partly} of {trial.num} get a reward below 1"
        return Check(name=NAME, status="warn", detail=detail)
    return Check(name=NAME, status="ok", detail=f"{trial.num_right} of {trial.num} rewarded 1")
