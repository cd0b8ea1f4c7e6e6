"""An id that stands for two prompts is refused; what is repeated, or is graded with other columns, is not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from bapo.core.errors import ContractError
from bapo.core.types import RolloutRequest
from buffer_service.prompt_texts import PromptTexts
from tests.support.factories import make_request


def altered(request: RolloutRequest, **changes: Any) -> RolloutRequest:
    return msgspec.structs.replace(request, prompt=msgspec.structs.replace(request.prompt, **changes))


def texts(*stored: RolloutRequest) -> PromptTexts:
    known = {request.request_id: request for request in stored}
    return PromptTexts(lambda ids: [known.get(request_id) for request_id in ids])


ONE = make_request(prompt_id="p", request_id="a")
OTHER = make_request(prompt_id="p", request_id="b")
CHANGES: list[dict[str, Any]] = [
    {"text": "another"},
    {"task": "another"},
    {"images": ("0" * 64,)},
    {"text": "3,5->8: "},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_two_prompts_of_one_id_are_refused_in_one_call_and_in_two(change: dict[str, Any]) -> None:
    with pytest.raises(ContractError, match=r"\bp\b"):
        texts().require_same([ONE, altered(OTHER, **change)])
    known = texts()
    known.require_same([ONE])
    with pytest.raises(ContractError, match=r"\bp\b"):
        known.require_same([altered(OTHER, **change)])


def test_a_refused_call_leaves_nothing_behind() -> None:
    known = texts()
    with pytest.raises(ContractError):
        known.require_same([ONE, altered(OTHER, text="another")])
    known.require_same([altered(OTHER, text="another")])


def test_an_open_request_is_compared_with_what_is_stored_also_behind_a_restart() -> None:
    with pytest.raises(ContractError, match=r"\ba\b.*\bp\b"):
        texts(ONE).require_same([altered(ONE, text="another")])
    with pytest.raises(ContractError, match=r"\ba\b.*\bp\b.*\bq\b"):
        texts(ONE).require_same([make_request(prompt_id="q", request_id="a")])


def test_a_repeat_and_other_columns_for_the_reward_are_accepted() -> None:
    known = texts(ONE)
    known.require_same([ONE, ONE, OTHER])
    known.require_same([ONE, altered(OTHER, answer={"numbers": [3], "target": 3, "row": 7})])


def test_after_something_was_deleted_by_hand_a_prompt_may_be_corrected() -> None:
    known = texts()
    known.require_same([ONE])
    known.forget()
    known.require_same([altered(OTHER, text="corrected")])


def test_the_oldest_prompts_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buffer_service.prompt_texts.REMEMBERED", 2)
    known = texts()
    for name in "abac":  # a was used again: b is the oldest
        known.require_same([make_request(prompt_id=name)])
    known.require_same([altered(make_request(prompt_id="b"), text="another")])
    known.require_same([make_request(prompt_id="c")])
    with pytest.raises(ContractError):
        known.require_same([altered(make_request(prompt_id="c"), text="another")])
