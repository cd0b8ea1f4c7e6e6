"""Task `dataset`: layouts, graders, and that every malformed row is named by file and number."""

import errno
import json
import logging
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bapo.cli.training.init import inspect_data
from bapo.core.errors import ConfigError
from tests.support.tasks import maker

make_task = maker("dataset")

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]


def _jsonl(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def _parquet(path: Path, *rows: dict[str, Any]) -> str:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return str(path)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1+1?", "answer": "2"},
        {"prompt": "1+1?", "reward_model": {"style": "rule", "ground_truth": "2"}, "data_source": "sums"},  # verl
        {"prompt": "1+1?", "reward_spec": {"method": "rule", "ground_truth": "2"}, "env_class": "sums"},  # SkyRL
    ],
)
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_native_verl_and_skyrl_layouts_are_recognised(tmp_path: Path, ending: str, row: dict[str, Any]) -> None:
    write = _jsonl if ending == "jsonl" else _parquet
    task = make_task(path=write(tmp_path / f"train.{ending}", row))
    (prompt,) = task.prompts("train")
    assert (prompt.text, prompt.answer["answer"]) == ("1+1?", "2")
    assert task.reward(prompt, " 2\n") == 1.0
    assert task.reward(prompt, "3") == 0.0
    assert task.gold(prompt) == "2"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "Be brief.\n1+1?\n"),
        ({"message_format": "<{role}>{content}"}, "<system>Be brief.<user>1+1?"),
    ],
)
def test_a_conversation_becomes_text_by_the_message_format(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    path = _parquet(tmp_path / "train.parquet", {"prompt": MESSAGES, "answer": "2"})
    assert make_task(path=path, **options).prompts("train")[0].text == text


def test_a_reward_of_ones_own_grades_and_the_gold_format_says_how_a_right_response_looks(tmp_path: Path) -> None:
    path = _jsonl(tmp_path / "a.jsonl", {"prompt": "12,7,4->80:", "answer": "12*7-4"})
    reward = f"{__name__}:tagged"
    assert make_task(path=path, reward=reward).gold(make_task(path=path).prompts("train")[0]) is None
    task = make_task(path=path, reward=reward, gold_format="<answer>{answer}</answer>")
    (prompt,) = task.prompts("train")
    assert task.gold(prompt) == "<answer>12*7-4</answer>"
    assert (task.reward(prompt, "<answer>12*7-4</answer>"), task.reward(prompt, "12*7-4")) == (1.0, 0.25)


def tagged(prompt: Any, text: str) -> float:
    """A user's reward for the test above."""
    return 1.0 if text == f"<answer>{prompt.answer['answer']}</answer>" else 0.25


def test_held_out_prompts_are_taken_out_of_the_training_split(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    a, b, c = ({"prompt": name, "answer": name} for name in "abc")
    train, test = _jsonl(tmp_path / "train.jsonl", a, b, a, c), _jsonl(tmp_path / "test.jsonl", b)
    task = make_task(path=train, held_out={"test": test})
    with caplog.at_level(logging.WARNING):
        assert [prompt.text for prompt in task.prompts("train")] == ["a", "c"]
    assert [prompt.text for prompt in task.prompts("test")] == ["b"]
    assert task.held_out_splits == ("test",)
    assert "1 duplicate rows" in caplog.text
    assert "1 held-out prompts" in caplog.text


GOOD = '{"prompt": "1+1?", "answer": "2"}\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD + "{oops\n", r"train.jsonl row 2: not JSON"),
        (GOOD + "\n[1]\n", r"train.jsonl row 3: expected an object"),  # an empty line counts as a line
        (GOOD + '{"answer": "2"}\n', r"train.jsonl row 2: column 'prompt' is missing"),
        (GOOD + '{"prompt": "x", "answer": null}\n', r"train.jsonl row 2: column 'answer' is missing or null"),
        (GOOD + '{"prompt": "  ", "answer": "2"}\n', r"train.jsonl row 2: column 'prompt' must be text"),
        (GOOD + '{"prompt": 7, "answer": "2"}\n', r"train.jsonl row 2: column 'prompt' must be text"),
        (GOOD + '{"prompt": [{"role": "user"}], "answer": "2"}\n', r"train.jsonl row 2: .*needs role and content"),
        (GOOD + '{"prompt": "x", "answer": NaN}\n', r"train.jsonl row 2: the answer must consist of JSON"),
        (GOOD + f'{{"prompt": "x", "answer": {2**64}}}\n', r"train.jsonl row 2: .*an integer of 65 bits"),
        (GOOD + '{"prompt": "x\\ud800", "answer": 1}\n', r"train.jsonl row 2: .*half a character"),
        (GOOD + '{"prompt": "x", "answer": "\\ud800"}\n', r"train.jsonl row 2: .*half a character"),
        (GOOD + f'{{"prompt": "x", "answer": {"[" * 32}{"]" * 32}}}\n', r"train.jsonl row 2: .*deeper than 32 levels"),
        (GOOD + f'{{"prompt": "x", "answer": "{"y" * 950_000}"}}\n', r"train.jsonl row 2: .*more than 917504"),
        ('{"prompt": "x", "label": "2"}\n', r"train.jsonl row 1: no answer in any of answer, reward_model"),
        ("[" * 100_000, r"train.jsonl row 1: not JSON"),
        ("", "train.jsonl has no rows"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_number(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        make_task(path=str(path)).prompts("train")


BRIEF, ASKED, EMPTY = ({"role": r, "content": c} for r, c in (("system", "Be brief."), ("user", "1+1?"), ("user", " ")))


@pytest.mark.parametrize("prompt", ["", " \n", [], [EMPTY], [BRIEF, EMPTY], [ASKED, MESSAGES[0], EMPTY]], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"question_format": "{prompt}\nThink."},
        {"chat": True, "message_format": "<{role}>{content}"},
        {"chat": True, "message_format": "<{role}>{content}", "system_prompt": "Be good."},
    ],
    ids=str,
)
def test_a_row_without_a_question_is_refused_whatever_the_options_write_around_it(
    tmp_path: Path, options: dict[str, Any], prompt: Any
) -> None:
    path = _jsonl(tmp_path / "train.jsonl", {"prompt": "a", "answer": "1"}, {"prompt": prompt, "answer": "2"})
    with pytest.raises(ConfigError, match=r"train.jsonl row 2: column 'prompt' must be text or messages"):
        make_task(path=path, **options).prompts("train")


@pytest.mark.parametrize(
    "prompt",
    [[BRIEF], [ASKED, {"role": "assistant", "content": "I call it."}, {"role": "tool", "content": ""}]],
    ids=["system only", "a tool that returns nothing"],
)
def test_what_is_asked_may_be_in_another_message_than_an_empty_one(tmp_path: Path, prompt: Any) -> None:
    path = _jsonl(tmp_path / "train.jsonl", {"prompt": prompt, "answer": "2"})
    assert len(make_task(path=path).prompts("train")) == 1


def test_a_question_in_two_columns_is_refused_unless_one_is_named(tmp_path: Path) -> None:
    alone = {"instruction": "Say hi", "input": " ", "answer": "hi"}
    both = {"instruction": "Translate", "answer": "chat"}
    assert make_task(path=_jsonl(tmp_path / "a.jsonl", alone)).prompts("train")[0].text == "Say hi"
    for value in ("cat", 7):
        path = _jsonl(tmp_path / "b.jsonl", alone, both | {"input": value})
        with pytest.raises(ConfigError, match=r"b.jsonl row 2: .*'instruction' and 'input'"):
            make_task(path=path).prompts("train")
        with pytest.raises(ConfigError, match=r"b.jsonl row 2: .*'instruction' and 'input'"):
            inspect_data(path, None, None)
        assert inspect_data(path, "instruction", None).prompt_column == "instruction"
        assert make_task(path=path, prompt_column="instruction").prompts("train")[1].text == "Translate"
    path = _jsonl(tmp_path / "c.jsonl", both | {"input": "cat", "prompt": "Translate: cat"})
    assert make_task(path=path).prompts("train")[0].text == "Translate: cat"


@pytest.mark.parametrize("answer", [{"text": ["5"], "start": [0]}, [{"text": "5"}]])
def test_an_answer_with_fields_is_no_text_unless_a_reward_reads_it(tmp_path: Path, answer: Any) -> None:
    path = _jsonl(tmp_path / "squad.jsonl", {"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": answer})
    with pytest.raises(ConfigError, match=r"squad.jsonl row 2: column 'answer' .*answer_column = 'answer.FIELD'"):
        make_task(path=path).prompts("train")
    assert len(make_task(path=path, reward=f"{__name__}:tagged").prompts("train")) == 2


def test_a_small_parquet_file_that_unpacks_to_a_gigabyte_is_read_in_little_memory(tmp_path: Path) -> None:
    num, path = 1000, tmp_path / "bomb.parquet"
    same = pa.DictionaryArray.from_arrays(pa.array([0] * num, pa.int32()), pa.array(["x" * 10**6]))
    table = {"prompt": [f"q{i}" for i in range(num)], "answer": list(range(num)), "unused": same}
    pq.write_table(pa.table(table), path, compression="zstd")
    assert path.stat().st_size < 100_000
    tracemalloc.start()
    try:
        assert len(make_task(path=str(path)).prompts("train")) == num
        assert tracemalloc.get_traced_memory()[1] < 200e6
    finally:
        tracemalloc.stop()


def test_a_file_without_line_breaks_is_refused_before_it_fills_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bapo.tasks.data_files.MAX_LINE_BYTES", 100)
    path = tmp_path / "array.jsonl"
    path.write_text(GOOD + "[" + '{"prompt": "x", "answer": "y"},' * 100 + "]")
    with pytest.raises(
        ConfigError, match=r"array\.jsonl row 2: it has more than 100 bytes; each row must be on its own line"
    ):
        make_task(path=str(path)).prompts("train")


def test_a_row_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(GOOD.encode() + b'{"prompt": "\xff\xfe\xfa"}\n')
    with pytest.raises(ConfigError, match="row 2: not JSON"):
        make_task(path=str(path)).prompts("train")


def test_a_broken_parquet_file_and_a_malformed_row_in_a_good_one_are_named(tmp_path: Path) -> None:
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 not really")
    with pytest.raises(ConfigError, match=r"broken.parquet: not a readable parquet file"):
        make_task(path=str(broken)).prompts("train")
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": None, "answer": "2"}]
    with pytest.raises(ConfigError, match=r"some.parquet row 2: column 'prompt' is missing or null"):
        make_task(path=_parquet(tmp_path / "some.parquet", *rows)).prompts("train")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "nowhere.jsonl"}, "nowhere.jsonl not found"),
        ({"path": "data/train.csv"}, "neither a .parquet or .jsonl file nor a Hub id"),
        ({"path": "owner/name:test"}, "pip install datasets"),
        ({"path": "a.jsonl", "held_out": {"train": "b.jsonl"}}, "reserved for the training split"),
        ({"path": "a.jsonl", "extra_columns": ["answer"]}, "extra_columns"),
    ],
)
def test_a_source_that_cannot_be_read_is_refused_with_a_reason(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_task(**options).prompts("train")


def test_a_file_that_this_user_may_not_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _jsonl(tmp_path / "a.jsonl", {"prompt": "a", "answer": "1"})

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ConfigError, match=r"cannot read dataset file .*a\.jsonl: Permission denied"):
        make_task(path=path).prompts("train")
