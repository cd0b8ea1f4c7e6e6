"""Which texts are right for an answer that is a list, and from which columns of a file prompts and answers come."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bapo.cli.training.init import inspect_data
from bapo.core.errors import ConfigError
from bapo.tasks.base import TaskContext
from bapo.tasks.data_files import read_rows
from bapo.tasks.dataset import DatasetOptions, DatasetTask
from bapo.tasks.grading.trial import Trial, read_prompts
from bapo.tasks.registry import load_task
from bapo.tasks.right_answers import gold_text
from tests.support.tasks import maker

make_task = maker("dataset")

Write = Callable[..., str]


def jsonl(path: Path, *rows: Any) -> str:
    path.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path.with_suffix(".jsonl"))


def parquet(path: Path, *rows: Any) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pa.Table.from_pylist([{name: row.get(name) for name in names} for row in rows])
    pq.write_table(table, path.with_suffix(".parquet"))
    return str(path.with_suffix(".parquet"))


both = pytest.mark.parametrize("write", [jsonl, parquet])


def _task(path: str) -> DatasetTask:
    return make_task(path=path)


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        (["7"], ["7", " 7\n"], ["8", '["7"]', ""]),
        (["color", "colour"], ["color", "colour"], ["color, colour", '["color", "colour"]', "col"]),
        ([7, 8.5], ["7", "8.5"], ["7, 8.5", "[7, 8.5]"]),
        ([7.0], ["7", "7.0"], ["7.00"]),
        (0.00001, ["1e-05", "0.00001"], ["0.0001"]),
        ([1e22], ["1e+22", "10000000000000000000000"], ["1"]),
        ([[1.0, 2.5]], ["1.0, 2.5", "1, 2.5"], ["1", "2.5"]),
        ([1.0, 2.0], ["1", "2"], ["1, 2"]),
        ("caf\u00e9 au\nlait", ["cafe\u0301 au\r\nlait", "caf\u00e9\u00a0au\nlait"], ["cafe au\nlait"]),
        (7.0, ["7", "7.0"], ["70"]),
        ([["1", "2"], "3"], ["1, 2", "3"], ["1", "2", "1, 2, 3"]),
        ([[1, 2]], ["1, 2"], ["1", "2"]),
        ('["a", "b"]', ['["a", "b"]'], ["a", "b"]),
        ([True], ["true"], ["1"]),
    ],
    ids=str,
)
def test_any_one_text_of_a_list_is_right_and_the_gold_response_is_the_first(
    tmp_path: Path, answer: Any, right: list[str], wrong: list[str]
) -> None:
    task = _task(jsonl(tmp_path / "train", {"question": "q", "final_answer": answer}))
    (prompt,) = task.prompts("train")
    assert [task.reward(prompt, text) for text in right] == [1.0] * len(right)
    assert [task.reward(prompt, text) for text in wrong] == [0.0] * len(wrong)
    assert task.reward(prompt, task.gold(prompt) or "") == 1.0


@pytest.mark.parametrize("kind", [pa.float32(), pa.float16(), pa.float64()], ids=str)
def test_a_float_is_the_shortest_decimal_of_its_columns_type(tmp_path: Path, kind: pa.DataType) -> None:
    table = pa.table({"prompt": ["q", "r"], "answer": pa.array([[0.1], [0.5, 3.0]], pa.list_(kind)),
                      "reward_model": pa.array([{"x": 0.3}, None], pa.struct([("x", kind)]))})  # fmt: skip
    pq.write_table(table, tmp_path / "train.parquet")
    first, second = make_task(path=str(tmp_path / "train.parquet"), extra_columns=["prompt"]).prompts("train")
    assert (first.answer["answer"], second.answer["answer"]) == ([0.1], [0.5, 3.0])
    (first, _) = read_rows(str(tmp_path / "train.parquet"))
    assert first.get("reward_model.x") == 0.3


class HubTable(SimpleNamespace):
    """What the package `datasets` makes of a table: Arrow's own values, and the schema."""

    def __init__(self, table: pa.Table) -> None:
        super().__init__(
            table=table, column_names=table.column_names, features=SimpleNamespace(arrow_schema=table.schema)
        )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.table.to_pylist())

    def select_columns(self, names: list[str]) -> HubTable:
        return HubTable(self.table.select(names))


@pytest.mark.parametrize("kind", [pa.float32(), pa.float16(), pa.float64()], ids=str)
def test_a_float_of_a_hub_data_set_is_that_of_a_file(monkeypatch: pytest.MonkeyPatch, kind: pa.DataType) -> None:
    table = pa.table({"prompt": ["q", "r"], "answer": pa.array([0.1, 2.5], kind), "level": pa.array([0.3, None], kind),
                      "extra_info": pa.array([{"x": [0.2]}, None], pa.struct([("x", pa.list_(kind))]))})  # fmt: skip
    package = SimpleNamespace(load_dataset=lambda name, split: HubTable(table))
    monkeypatch.setitem(sys.modules, "datasets", cast("ModuleType", package))
    task = make_task(path="owner/name:train")
    first, second = task.prompts("train")
    assert (task.rewards(first, ["0.1", "0.2"]), task.gold(second)) == ([1.0, 0.0], "2.5")
    (first, second) = read_rows("owner/name:train")
    assert (first.get("extra_info.x"), first.get("level"), second.has("level")) == ([0.2], 0.3, False)


def test_one_question_with_two_answers_is_told_with_both_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": p, "answer": a} for p, a in (("a", "1"), ("b", "2"), ("b", "2"), ("a", "3"), ("b", "4"))]
    with caplog.at_level(logging.WARNING):
        _task(jsonl(tmp_path / "train", *rows)).prompts("train")
    told = [record.getMessage() for record in caplog.records if "another answer" in record.getMessage()]
    assert len(told) == 1
    assert told[0].endswith("2 prompts have the text of an earlier one and another answer, the first in rows 1 and 4")


@pytest.mark.parametrize("answer", [[], [[]], [None], ["7", None], [["7", None]], ["7", " "], "", "  "], ids=str)
def test_an_answer_without_a_text_is_the_error_of_its_row(tmp_path: Path, answer: Any) -> None:
    rows = [{"prompt": "a", "answer": ["1"]}, {"prompt": "b", "answer": answer}]
    with pytest.raises(ConfigError, match=r"train\.jsonl row 2: the answer"):
        _task(jsonl(tmp_path / "train", *rows)).prompts("train")


def test_a_users_function_gets_the_list_as_it_is_and_a_gold_response_that_may_be_a_list(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "train", {"prompt": "q", "answer": []}, {"prompt": "r", "answer": [1, 2]})
    prompts = load_task("dataset", {"path": path}, TaskContext(rewards=("mine.py:f",))).prompts("train")
    assert [prompt.answer["answer"] for prompt in prompts] == [[], [1, 2]]
    assert [gold_text(answer) for answer in ([1, 2], ["a", "b"], [7], "x", 7, [])] == [
        "[1, 2]", "a", "7", "x", "7", "[]",
    ]  # fmt: skip


def test_lists_that_may_be_meant_otherwise_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": "a", "answer": ["1", "2"]}, {"prompt": "b", "answer": '["1"]'}, {"prompt": "c", "answer": "[1]"}]
    with caplog.at_level(logging.WARNING):
        _task(jsonl(tmp_path / "train", *rows)).prompts("train")
    assert "1 answers are lists" in caplog.text
    assert "1 answers are texts that look like lists" in caplog.text


def _answers(task: DatasetTask, split: str = "train") -> list[Any]:
    return [prompt.answer["answer"] for prompt in task.prompts(split)]


@both
def test_a_column_is_chosen_by_all_rows_and_a_null_in_it_is_the_error_of_its_row(tmp_path: Path, write: Write) -> None:
    rows = [{"prompt": "a?", "answer": None, "solution": "7"}, {"prompt": "b?", "answer": "8", "solution": "long 8"}]
    for order, number in ((rows, 1), (rows[::-1], 2)):
        with pytest.raises(ConfigError, match=rf"row {number}: column 'answer' is missing or null"):
            _task(write(tmp_path / "train", *order)).prompts("train")


def test_a_column_that_only_later_rows_have_is_the_files_column(tmp_path: Path) -> None:
    rows = [{"prompt": "a?", "solution": "long 7"}, *({"prompt": f"{i}?", "answer": i} for i in range(200))]
    with pytest.raises(ConfigError, match=r"row 1: column 'answer' is missing or null"):
        _task(jsonl(tmp_path / "train", *rows)).prompts("train")
    rows = [{"question": "a?", "answer": 7}, {"prompt": "b?", "answer": 8}]
    with pytest.raises(ConfigError, match=r"row 1: column 'prompt' is missing or null"):
        _task(jsonl(tmp_path / "train", *rows)).prompts("train")


@both
def test_a_column_without_any_value_is_no_column(tmp_path: Path, write: Write) -> None:
    rows = [
        {"prompt": None, "question": f"{i}?", "answer": None, "reward_model": None, "solution": str(i)}
        for i in range(3)
    ]
    assert _answers(_task(write(tmp_path / "train", *rows))) == ["0", "1", "2"]


@both
def test_a_nested_column_with_a_null_in_the_first_row_is_found(tmp_path: Path, write: Write) -> None:
    rows = [
        {"prompt": "a?", "reward_model": {"ground_truth": None, "style": "rule"}, "solution": "x"},
        {"prompt": "b?", "reward_model": {"ground_truth": "8", "style": "rule"}, "solution": "x"},
    ]
    with pytest.raises(ConfigError, match=r"row 1: column 'reward_model.ground_truth' is missing or null"):
        _task(write(tmp_path / "train", *rows)).prompts("train")
    assert _answers(_task(write(tmp_path / "train", *rows[1:]))) == ["8"]


@both
def test_held_out_files_choose_alike_each_by_its_own_columns(tmp_path: Path, write: Write) -> None:
    train = write(tmp_path / "train", {"problem": "a?", "answer": "1", "solution": "long"})
    null = write(tmp_path / "test", {"problem": "b?", "answer": None, "solution": "s"},
                 {"problem": "c?", "answer": "3", "solution": "s"})  # fmt: skip
    with pytest.raises(ConfigError, match=r"test\.\w+ row 1: column 'answer' is missing or null"):
        make_task(path=train, held_out={"test": null}).prompts("train")
    other = write(tmp_path / "test", {"question": "b?", "final_answer": "2"})
    assert _answers(make_task(path=train, held_out={"test": other}), "test") == ["2"]


def test_a_test_of_the_reward_and_init_choose_as_a_run_does(tmp_path: Path) -> None:
    path = jsonl(
        tmp_path / "train",
        {"prompt": "a?", "answer": None, "solution": "7"},
        {"prompt": "b?", "answer": "8", "solution": "long 8"},
    )
    trial = Trial()
    (prompt,) = read_prompts(DatasetOptions(path=path), TaskContext(rewards=("mine.py:f",)), 10, trial)
    assert (prompt.answer["answer"], trial.unreadable) == ("8", 1)
    assert trial.problems[0][0].endswith("row 1")
    assert inspect_data(path, None, None).answer_column is None
    late = jsonl(tmp_path / "late", {"query": "a?", "label": None}, {"query": "b?", "label": "8"})
    assert (inspect_data(late, None, None).prompt_column, inspect_data(late, None, None).answer_column) == (
        "query", "label",
    )  # fmt: skip
