"""What a dataset's task shows as the answer of a response: what its gold format says, and nothing that is guessed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bapo.tasks.answer_formats import written_answer
from bapo.tasks.dataset import DatasetTask, make_task
from bapo.tasks.registry import extract_of

TAGS, MARK, BOXED = "<answer>{answer}</answer>", "#### {answer}", "\\boxed{{answer}}"


@pytest.mark.parametrize(
    ("form", "text", "want"),
    [
        (TAGS, "so <answer> 42 </answer>", "42"),
        (TAGS, "<answer>1</answer> no: <answer>2</answer>.", "2"),
        (TAGS, "<answer>1</answer> and then <answer>2", "1"),  # cut off: the last that is whole
        (TAGS, "<answer>a\nb</answer>", "a\nb"),
        (TAGS, "42", None),
        (TAGS, "</answer>42<answer>", None),
        (f"Because.\n{TAGS}\n", "I say <answer>42</answer>", "42"),  # only the line with the answer is looked for
        (MARK, "3 + 4 = 7\n#### 7", "7"),
        (MARK, "#### 7\nwait\n####  1,000 \nbye", "1,000"),
        (MARK, "####", ""),
        (MARK, "7", None),
        (BOXED, r"hence \boxed{42}.", "42"),
        (BOXED, r"\boxed{\frac{1}{2}} or so", r"\frac{1}{2}"),
        (BOXED, r"\boxed{1} and \boxed{2", "1"),
        (BOXED, r"\boxed{", None),
        ("**{answer}**", "**1** or **2**", "2"),
        ("{answer}", "42", None),  # nothing says where it stands
        ("{answer} it is", "42 it is", None),
        ("no field", "42", None),
    ],
)
def test_the_answer_stands_where_the_format_has_it(form: str, text: str, want: str | None) -> None:
    assert written_answer(form, text) == want


def test_a_long_text_with_many_marks_is_read_in_time_that_grows_with_its_length() -> None:
    text = "\\boxed{" * 100_000
    assert written_answer(BOXED, text) is None  # quadratic work would take minutes
    assert written_answer(TAGS, "<answer>" * 100_000) is None


def task_of(tmp_path: Path, **options: Any) -> DatasetTask:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"prompt": "6*7?", "answer": "42"}) + "\n")
    return make_task(path=str(path), **options)


@pytest.mark.parametrize(
    ("options", "another", "want"),
    [
        ({}, False, "so <answer>42</answer>"),  # exact match compares all of it
        ({}, True, None),  # and another reward something else
        ({"reward": "mine.py:f"}, False, None),  # which does not say what it reads
        ({"reward": "mine.py:f", "gold_format": TAGS}, False, "42"),
        ({"gold_format": TAGS}, True, "42"),
        ({"gold_format": "{answer}"}, True, None),
    ],
)
def test_a_dataset_shows_what_its_reward_reads_as_far_as_that_is_known(
    tmp_path: Path, options: dict[str, Any], another: bool, want: str | None
) -> None:
    task = task_of(tmp_path, **options)
    extract = extract_of(task, another_reward=another)
    (prompt,) = task.prompts("train")
    assert (extract(prompt, " so <answer>42</answer>\n") if extract else None) == want


@pytest.mark.parametrize("form", [TAGS, MARK, BOXED])
def test_the_answer_of_a_gold_response_is_the_answer_of_the_row(tmp_path: Path, form: str) -> None:
    task = task_of(tmp_path, reward="mine.py:f", gold_format=form)
    (prompt,) = task.prompts("train")
    assert task.extract(prompt, str(task.gold(prompt))) == "42"
