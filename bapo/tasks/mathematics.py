r"""Mathematics: DeepScaleR to train on, five benchmarks that are held out, and the reward of both.

    [task]
    name = "mathematics"
    options = { path = "deepscaler.parquet", held_out = { aime24 = "aime24.jsonl", amc = "amc.jsonl" } }

A thin composition of task `dataset`: which data, how a question is asked, and `boxed`. `boxed` is a reward for other
tasks too (`reward = "bapo.tasks.mathematics:boxed"`):

    "... so \boxed{\frac12}"  against the row's answer "0.5"  ->  1.0

What texts cannot decide, math-verify does (`bapo/tasks/math_answers.py`). Its own timeouts use signals, which fail
outside of the main thread and were then taken for wrong answers by other frameworks; they are off, and it runs in a
copy of the process. A response whose own text keeps it busy is incorrect, named in the log and counted; the other
responses to the prompt keep their rewards.

Does not cover: answers outside of a box, proofs, units that have to be converted, several answers in several boxes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import cache
from typing import Any, ClassVar

from pydantic import Field, field_validator

from bapo.core.errors import did_you_mean
from bapo.core.types import Prompt
from bapo.tasks import guard
from bapo.tasks.answer_formats import ANSWER, written_answer
from bapo.tasks.base import TRAIN, TaskContext
from bapo.tasks.dataset import DatasetOptions, DatasetTask
from bapo.tasks.math_answers import bare, decided, spelled
from bapo.tasks.math_markup import without_markup
from bapo.tasks.math_numbers import number_of
from bapo.tasks.right_answers import right_answers

NAME = "mathematics"
BOXED = "\\boxed{{answer}}"
QUESTION = "{prompt}\nPlease reason step by step, and put your final answer within \\boxed{}."
MAX_CHARS = 1_000
"""Of a response's answer: sympy may take minutes for what is longer, and no answer of the usual sets is."""
SHORT_CHARS = 100
"""Of a response's answer whose text is compared here; a longer one in a copy, whose start takes some milliseconds."""

PLACES = 60
"""Digits of an exact number next to which a decimal is compared."""
NEARLY = Fraction(1, 10**50)
"""Of a number: what the last of its `PLACES` digits may be wrong by."""
SIZE = 300
"""Powers of ten of numbers that are compared so."""

TRAIN_SET = "agentica-org/DeepScaleR-Preview-Dataset:train"
HELD_OUT_SETS: Mapping[str, str] = {
    "aime24": "HuggingFaceH4/aime_2024:train",
    "amc": "AI-MO/aimo-validation-amc:train",
    "math500": "HuggingFaceH4/MATH-500:test",
    "minerva": "math-ai/minervamath:test",
    "olympiad": "math-ai/olympiadbench:test",
}
"""The five of the paper's table 1 (30, 83, 500, 272 and 674 problems), by name -> Hub id and split."""


class MathematicsOptions(DatasetOptions):
    """The `[task.options]` table: as of task `dataset`, with these defaults."""

    path: str = TRAIN_SET
    """Training data, a Hub id "owner/name:split" or a .parquet or .jsonl file; the problem is in a column problem,
    question or prompt, the answer in answer or final_answer. `expert_column = "solution"` is DeepScaleR's."""
    held_out: dict[str, str] = Field(default_factory=lambda: dict(HELD_OUT_SETS))
    """Names of the benchmarks (aime24, amc, math500, minerva, olympiad), which come from the Hub; or a table name ->
    file or Hub id, of these names and of your own."""
    question_format: str = QUESTION
    chat: bool = True
    reward: str | None = f"{__name__}:boxed"
    gold_format: str | None = BOXED

    @field_validator("held_out", mode="before")
    @classmethod
    def names_are_sets_of_the_hub(cls, held_out: Any) -> Any:
        """Look up the names."""
        if not isinstance(held_out, list | tuple):
            return held_out
        for name in held_out:
            if name not in HELD_OUT_SETS:
                raise ValueError(
                    f"there is no set {name!r}{did_you_mean(str(name), HELD_OUT_SETS)}; there are "
                    f"{', '.join(HELD_OUT_SETS)}. Data of your own: a table of name and file"
                )
        return {name: HELD_OUT_SETS[name] for name in held_out}


class MathematicsTask(DatasetTask):
    """Problems whose answers are compared as mathematics."""

    name = NAME
    is_fast = False
    origins: ClassVar[Mapping[str, str]] = {TRAIN: TRAIN_SET, **HELD_OUT_SETS}

    def __init__(self, options: MathematicsOptions, context: TaskContext) -> None:
        super().__init__(options, context)


def boxed(prompt: Prompt, text: str) -> float:
    """1.0 if the last box of the response holds the answer, else 0.0; a response without a box is wrong.

    Any answer of a list is right, as all of them together are; a list within it is one answer of several values.
    Raises: ValueError for an answer of the data set that cannot be read: the row is at fault, not the response.
    """
    golds = _golds(prompt)
    found = last_box(text)
    if found is None or len(found) > MAX_CHARS:
        return 0.0
    found = without_markup(found)
    return float(any(_is_same(gold, found) for gold in golds))


def _golds(prompt: Prompt) -> list[str]:
    """Raises: ValueError for an answer that is empty: an empty box would be right."""
    answer = prompt.answer["answer"]
    golds = [without_markup(last_box(part) or part.strip("$ ")) for part in right_answers(answer)]
    if not all(golds):
        raise ValueError(f"the answer {answer!r:.200} of the data set is empty")
    together = ", ".join(golds)
    return [*golds, together, f"[{together}]"] if len(golds) > 1 else golds


def last_box(text: str) -> str | None:
    """What stands in the last box that is closed; None without one."""
    return written_answer(BOXED, text)


def _is_same(gold: str, found: str) -> bool:
    if not found:
        return False
    if len(found) <= SHORT_CHARS and (by_text := decided(gold, found)) is not None:
        return by_text
    _warm_up()
    said = guard.in_copy(_verify(gold, found))
    if said.values and not any(said.values[1:2]):
        raise ValueError(f"the answer {gold!r:.200} of the data set cannot be read as mathematics")
    if not said.ended:
        guard.busy(found)
    return said.values[2:] == (1,)


@cache
def _warm_up() -> None:
    """Import and compile here what every copy would need a second for; only graders do."""
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns of the missing timeout
    assert list(_verify("x+1", "1+x")) == [True, True, True]


def _verify(gold: str, found: str) -> Iterator[bool]:
    """True once the texts are compared; whether the gold answer can be read; whether the response's is the same."""
    from math_verify import verify

    by_text = decided(gold, found) if len(found) > SHORT_CHARS else None
    yield True
    if by_text is not None:
        yield from (True, by_text)
        return
    right = _expressions(spelled(gold, found))
    yield bool(right)
    theirs = _expressions(spelled(found, gold))
    by_value = _same_value(gold, found, right[0], theirs[0]) if right and theirs else False
    yield bool(verify(right, theirs, timeout_seconds=None)) if by_value is None else by_value


def _same_value(gold: str, found: str, right: Any, theirs: Any) -> bool | None:
    """Whether a decimal and an exact expression are the same number; None where it is not these two.

    The verifier itself would compare six decimal places, whichever the size of the numbers.
    """
    ours, written = number_of(bare(gold, found)), number_of(bare(found, gold))
    if (ours is None) == (written is None) or "%" in gold + found:
        return None
    exact = _fraction(theirs if written is None else right)
    if exact is None:
        return None
    if ours is not None:
        return _is_nearly(exact, ours.value) or ours.may_round(exact)
    assert written is not None
    return _is_nearly(exact, written.value) or written.stands_for(exact)


def _is_nearly(exact: Fraction, value: Fraction) -> bool:
    return abs(exact - value) <= abs(value) * NEARLY


def _fraction(expression: Any) -> Fraction | None:
    """The value of a real number to `PLACES` digits; None for what is none, or has hundreds of digits."""
    if not getattr(expression, "is_number", False) or not getattr(expression, "is_real", False):
        return None
    value = expression.evalf(PLACES)
    size = abs(value)
    if not value.is_Float or not (size == 0 or 10.0**-SIZE < size < 10.0**SIZE):
        return None
    return Fraction(str(value))


def _expressions(latex: str) -> list[Any]:
    """Readings of an expression, [] if there is none."""
    from math_verify import LatexExtractionConfig, parse

    found: list[Any] = parse(
        BOXED.replace(ANSWER, latex),
        extraction_config=[LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    return found
