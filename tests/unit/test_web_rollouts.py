"""What the pages of prompts and groups are told, and the search: against records written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bapo.config.load import load_resolved
from bapo.core.errors import ContractError
from bapo.runtime.run_directory.layout import RunDirectory
from services.dashboard.assets import answers
from services.dashboard.endpoints import ENDPOINTS, ask, view_of
from services.dashboard.run_view import RunView
from tests.support.recorded_responses import GROUP, HOSTILE, LONG, write_rollout_run


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return write_rollout_run(tmp_path / "mine")


@pytest.fixture
def view(run: RunDirectory) -> RunView:
    found = view_of(run, load_resolved(run.config_path))
    while not found.is_complete:
        found.refresh()
    return found


def told(view: RunView, endpoint: str, **query: Any) -> dict[str, Any]:
    return ask(view, next(one for one in ENDPOINTS if one.name == endpoint), **query)


def test_a_prompt_has_its_visits_and_its_way_through_the_buffers(view: RunView) -> None:
    found = told(view, "prompt", id="hard")
    assert [(v["step"], v["version"], v["k"], v["size"], v["origin"]) for v in found["visits"]] == [
        (1, 1, 0, 4, None),
        (2, 2, 1, 4, "x1"),
    ]
    assert found["visits"][0]["why"] == "its fresh group had k = 0 of 4, and the range filter needs 1 <= k <= 3"
    assert [visit["has_text"] for visit in found["visits"]] == [False, True]
    assert (found["transitions"][0]["table"], found["transitions"][0]["change"]) == ("bad", "entered")
    assert found["transitions"][0]["why"] == "fresh group with mu = 0 <= c1 = 0.125"
    assert found["differs"] == ""


def test_the_prompts_of_a_buffer_are_those_that_are_in_it_now(view: RunView) -> None:
    # `hard` had 1 of 4 in step 2, more than c1; only a re-evaluation takes it out of B_bad again.
    assert {p["id"] for p in told(view, "prompts", table="bad")["prompts"]} == {"hard", "zero"}
    with pytest.raises(ContractError, match="table is bad, high or empty"):
        told(view, "prompts", table="worse")


def test_a_group_has_its_responses_with_every_number_that_was_recorded(view: RunView) -> None:
    found = told(view, "group", id=GROUP)
    assert (found["step"], found["prompt_id"], found["gold"]) == (2, "hard", "12+5+7")
    first, second, third, fourth = found["responses"]
    assert (first["reward"], first["advantage"], first["extracted"]) == (1.0, 1.5, "12+5+7")
    assert first["entropy"] == [0.0, 0.1, 0.2, 0.3]
    assert first["ratio"] == [1.0, 1.1, 1.2, 1.3]
    assert first["clipped"] == [0, 1, 0, 0]
    assert second["pieces"] == [HOSTILE, " no"]
    assert third["pieces"] == [LONG, "\n", "end"]
    assert fourth["entropy"] is None
    assert (fourth["num_tokens"], len(fourth["pieces"])) == (3000, 2000)
    assert len(told(view, "group", id=GROUP, most=5000)["responses"][3]["pieces"]) == 3000


@pytest.mark.parametrize(
    ("group_id", "why"),
    [
        ("hard@1", "it was not the turn of step 1 (diagnostics.texts = 2, diagnostics.token_records = 2; 0: never)"),
        (
            "zero@2",
            "the step has texts, but not of this group: of groups that do not train as many are kept as go into",
        ),
    ],
)
def test_a_group_without_text_says_why_and_still_has_its_rewards(view: RunView, group_id: str, why: str) -> None:
    found = told(view, "group", id=group_id)
    assert found["responses"] == []
    assert found["why_no_text"].startswith(why)
    assert len(found["rewards"]) == 4


def test_a_group_that_did_not_train_has_its_texts_and_says_that_no_numbers_of_tokens_are_known(view: RunView) -> None:
    found = told(view, "group", id="easy@2")
    assert (found["step"], found["origin"], found["why_no_text"]) == (2, None, "")
    assert found["why_no_tokens"].startswith("the group did not train in this step")
    assert [response["pieces"] for response in found["responses"]] == [[f"easy answer {i} {HOSTILE}"] for i in range(4)]
    first = found["responses"][0]
    assert (first["reward"], first["extracted"], first["num_tokens"]) == (1.0, "easy 0", 7)
    assert (first["advantage"], first["rollout"], first["entropy"], first["is_cut"]) == (None, None, None, False)
    assert told(view, "prompt", id="easy")["visits"][-1]["has_text"] is True


@pytest.mark.parametrize(("endpoint", "noun"), [("prompt", "prompt"), ("group", "group")])
def test_an_unknown_id_is_refused(view: RunView, endpoint: str, noun: str) -> None:
    with pytest.raises(ContractError, match=f"no step of run mine looked at a {noun} 'nobody'"):
        told(view, endpoint, id="nobody")


def test_the_search_finds_ids_prompts_and_responses(view: RunView) -> None:
    def hits(text: str) -> list[tuple[str, str, int]]:
        return [(hit["kind"], hit["id"], hit["row"]) for hit in told(view, "search", text=text)["hits"]]

    assert hits("IS 24") == [("response", GROUP, 0)]
    assert hits("no evil") == [("response", GROUP, 1)]  # both words, in any order
    assert hits("12,5,7->") == [("prompt", "easy", 0), ("prompt", "hard", 0)]
    assert hits("easy answer 2") == [("response", "easy@2", 2)]  # it did not train
    assert hits("middle") == [("group", "middle@1", 0), ("prompt", "middle", 0)]
    assert hits("nothing of this") == []
    found = told(view, "search", text="here")
    assert (found["is_whole"], found["taken"], found["recorded"]) == (True, 1, 1)


def test_an_exported_file_carries_the_prompts_and_the_recorded_groups_with_text_that_ends_no_script(
    view: RunView,
) -> None:
    found = answers(view)
    assert {"prompts", "prompts?first=0&last=1", "prompt?id=hard", f"group?id={GROUP.replace('@', '%40')}"} <= set(
        found
    )
    assert f"group?id={GROUP.replace('@', '%40')}&step=2" in found
    assert not [key for key in found if key.startswith("search")]
