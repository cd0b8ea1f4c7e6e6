"""Values on their way into JSON, and text on its way to a terminal or into a log."""

from __future__ import annotations

import json
from typing import Any

import msgpack
import numpy as np
import pytest

from bapo.cli.buffer.target import shown
from bapo.core.codec import pack_group, unpack_group
from bapo.core.errors import ContractError
from bapo.core.json_values import plain_value, to_json, to_map
from bapo.core.text import plain
from bapo.core.types import Prompt
from buffer_service.http.schemas import MAX_DETAIL_CHARS, FailBody
from tests.support.factories import make_group, make_request


class Own(str):
    """What a dataset's library may hand out for text."""


def test_numbers_of_numpy_travel_as_numbers() -> None:
    values = {"a": np.int64(3), "b": [np.float32(0.5), np.bool_(True)], "c": {"d": np.uint8(7)}}
    assert json.loads(to_json(values, "x")) == {"a": 3, "b": [0.5, True], "c": {"d": 7}}
    assert msgpack.unpackb(msgpack.packb(values, default=plain_value)) == {"a": 3, "b": [0.5, True], "c": {"d": 7}}
    group = make_group(
        step=np.int64(4),
        prompt=Prompt(prompt_id="p", text="", task="t", answer={"x": Own("7")}),
        rewards="10",
        lengths=[2, 3],
    )  # type: ignore[arg-type]
    again = unpack_group(pack_group(group))
    assert (again.step, again.prompt.answer) == (4, {"x": "7"})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"a": {"b": [1, np.arange(2)]}},
            r"^x: a\.b\.1 is numpy\.ndarray, which is not JSON serializable; use its \.tolist\(\)",
        ),
        ({"a": b"1"}, r"^x: a is bytes, which is not JSON serializable$"),
        ({"a": [{1}]}, r"^x: a\.0 is set, "),
        ({(1, 2): 3}, r"^x: keys must be"),
    ],
)
def test_what_json_has_no_word_for_is_named_with_its_place(value: Any, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        to_json(value, "x")


@pytest.mark.parametrize("answer", [None, "42", ["42"]])
def test_an_answer_that_is_no_map_is_refused_where_its_prompt_is_made(answer: Any) -> None:
    with pytest.raises(ContractError, match=r"^prompt p: the answer must be a map, .* got "):
        Prompt(prompt_id="p", text="1+1=", task="sums", answer=answer)


def test_a_purpose_may_be_its_word_and_another_word_is_refused() -> None:
    assert to_map(make_request(purpose="fresh")) == to_map(make_request())  # type: ignore[arg-type]
    with pytest.raises(ContractError, match="invalid purpose 'frsh', must be one of fresh, reevaluate, evaluate"):
        make_request(purpose="frsh")  # type: ignore[arg-type]


# -- text for terminals and logs


@pytest.mark.parametrize(
    ("text", "shown_as"),
    [
        ("killed after 10 s", "killed after 10 s"),
        ("größer – 例", "größer – 例"),
        ("\x1b[2J\x1b]0;owned\x07", "\\x1b[2J\\x1b]0;owned\\x07"),
        ("one\n2026-11-23 ERROR forged", "one\\n2026-11-23 ERROR forged"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\x9b31m", "\\x9b31m"),
    ],
    ids=["plain", "other scripts", "escape sequences", "a line", "right to left", "C1"],
)
def test_what_a_terminal_obeys_is_shown_as_an_escape(text: str, shown_as: str) -> None:
    assert plain(text) == shown_as


def test_a_cell_of_a_table_is_one_line() -> None:
    assert shown("Solve:\n1 + \x1b[31m2") == "Solve: 1 + \\x1b[31m2"


def test_the_detail_of_a_failure_is_cut_and_plain() -> None:
    given = {"worker_id": "w", "request_id": "r", "reason": "engine_error"}
    assert FailBody(**given, detail="\x1bc\nforged").detail == "\\x1bc\\nforged"
    assert FailBody(**given, detail="x" * 20_000_000).detail == "x" * MAX_DETAIL_CHARS
