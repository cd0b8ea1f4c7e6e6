"""What the pages of prompts and groups are told, and the search: against records written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bapo.config.load import load_resolved
from bapo.errors import ContractError
from bapo.records import RunDirectory
from bapo.web import text_index
from bapo.web.asking import all_endpoints, ask, view_of
from bapo.web.export import answers
from bapo.web.text_index import TextIndex
from bapo.web.view import RunView
from tests.rollout_run import GROUP, HOSTILE, LONG, text_row, token_row, write_rollout_run


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
    return ask(view, all_endpoints()[endpoint], **query)


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


def test_a_cell_of_the_migration_matrix_is_the_list_of_its_prompts(view: RunView) -> None:
    assert [p["id"] for p in told(view, "prompts", first=0, last=1)["prompts"]] == ["hard"]
    assert [p["id"] for p in told(view, "prompts", first=3, last=4)["prompts"]] == ["easy"]
    assert [p["id"] for p in told(view, "prompts", first=0)["prompts"]] == ["hard", "zero"]
    assert told(view, "prompts", first=2, last=2)["total"] == 0  # `middle` came once
    # Before step 2 no prompt came twice.
    assert told(view, "prompts", first=0, last=1, until=1)["total"] == 0
    assert told(view, "prompts", first=0, last=1, until=2)["total"] == 1
    everything = told(view, "prompts")
    assert everything["total"] == 5
    assert {p["id"]: (p["visits"], p["trained"]) for p in everything["prompts"]}["easy"] == (2, 1)


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


def test_what_is_missing_names_the_way_to_get_it(run: RunDirectory) -> None:
    run.write_batch(1, b"a kept batch")
    text = run.config_path.read_text()
    run.config_path.write_text(text.replace("token_records = 2", "token_records = 0").replace("texts = 2", "texts = 0"))
    view = view_of(run, load_resolved(run.config_path))
    view.refresh()
    why = told(view, "group", id="easy@1")["why_no_text"]
    assert "set diagnostics.texts = 1" in why
    assert "bapo replay RUN --step 1 --token-records" in why
    run.token_files.truncate_after(0)
    run.token_files.write(4, [[token_row(0, ["later"], step=4)]])
    run.config_path.write_text(text)
    view = view_of(run, load_resolved(run.config_path))
    while not view.is_complete:
        view.refresh()
    assert "were removed: diagnostics.token_records_mb was full" in told(view, "group", id=GROUP)["why_no_text"]


def test_a_group_that_did_not_train_has_its_texts_and_says_that_no_numbers_of_tokens_are_known(view: RunView) -> None:
    found = told(view, "group", id="easy@2")
    assert (found["step"], found["origin"], found["why_no_text"]) == (2, None, "")
    assert found["why_no_tokens"].startswith("the group did not train in this step")
    assert [response["pieces"] for response in found["responses"]] == [[f"easy answer {i} {HOSTILE}"] for i in range(4)]
    first = found["responses"][0]
    assert (first["reward"], first["extracted"], first["num_tokens"]) == (1.0, "easy 0", 7)
    assert (first["advantage"], first["rollout"], first["entropy"], first["is_cut"]) == (None, None, None, False)
    assert told(view, "prompt", id="easy")["visits"][-1]["has_text"] is True


def test_a_long_text_without_tokens_is_cut_by_its_characters_until_more_is_asked_for(
    run: RunDirectory, view: RunView
) -> None:
    run.token_files.write(2, [[text_row(0, "y" * 10_000)]])
    cut = told(view, "group", id="easy@2", most=2)["responses"][0]
    assert (cut["pieces"], cut["is_cut"], cut["num_tokens"]) == (["yyyyyyyy"], True, 7)
    whole = told(view, "group", id="easy@2", most=2500)["responses"][0]
    assert (len(whole["pieces"][0]), whole["is_cut"]) == (10_000, False)


def test_a_trained_group_whose_step_has_texts_alone_names_the_way_to_its_numbers(
    run: RunDirectory, view: RunView
) -> None:
    run.write_batch(2, b"a kept batch")
    run.token_files.write(2, [[text_row(0, "12+5+7", group=GROUP, origin="x1", advantage=1.5)]])
    found = told(view, "group", id=GROUP)
    assert found["responses"][0]["advantage"] == 1.5
    assert "diagnostics.token_records = 2" in found["why_no_tokens"]
    assert "bapo replay RUN --step 2 --token-records" in found["why_no_tokens"]


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


def test_records_that_come_later_are_found_without_reading_the_old_ones_again(view: RunView, run: RunDirectory) -> None:
    assert told(view, "search", text="brandnew")["hits"] == []
    run.token_files.write(3, [[token_row(0, ["brand", "new"], step=3)]])
    run.token_files._file(2).unlink()
    found = told(view, "search", text="brandnew")
    assert [(hit["id"], hit["step"]) for hit in found["hits"]] == [(GROUP, 3)]
    assert told(view, "search", text="is 24")["hits"]


def test_an_exported_file_carries_the_prompts_and_the_recorded_groups_with_text_that_ends_no_script(
    view: RunView,
) -> None:
    found = answers(view)
    assert {"prompts", "prompts?first=0&last=1", "prompt?id=hard", f"group?id={GROUP.replace('@', '%40')}"} <= set(
        found
    )
    assert f"group?id={GROUP.replace('@', '%40')}&step=2" in found
    assert not [key for key in found if key.startswith("search")]


def test_a_group_that_does_not_fit_is_left_out_of_an_exported_file(
    view: RunView, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bapo.web.endpoints import group

    monkeypatch.setattr(group, "EXPORTED_TOKENS", 2010)  # hard@2 has 4 + 2 + 3 + 2000 tokens, other@2 8 more
    assert [query["id"] for query in group.exported(view)] == [GROUP, GROUP]


def test_words_are_found_in_any_case_and_the_newest_first() -> None:
    index = TextIndex()
    for number, text in enumerate(["Alpha beta", "beta ALPHA gamma", "İALPHA", "delta"]):
        index.add((number,), text)
    assert [hit.key for hit in index.find("alpha", 9)[0]] == [(2,), (1,), (0,)]
    assert [hit.key for hit in index.find("beta gamma", 9)[0]] == [(1,)]
    assert index.find("alpha", 2) == (index.find("alpha", 9)[0][:2], False)
    assert index.find("alpha", 3)[1] is True
    assert index.find("   ", 9) == ([], True)
    assert index.find("betaalpha", 9)[0] == []  # words of two documents are no hit


def test_a_hit_shows_the_text_around_the_word_as_it_was_written() -> None:
    index = TextIndex()
    index.add(("x",), "a" * 200 + "NeedLe" + "b" * 200)
    assert index.find("needle", 1)[0][0].snippet == "a" * 60 + "NeedLe" + "b" * 60


def test_a_full_index_says_so_and_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_index, "MOST_CHARS", 10)
    index = TextIndex()
    index.add((1,), "12345678")
    index.add((2,), "abcdefgh")
    assert index.is_full
    assert index.find("abc", 9)[0] == []
    assert len(index.find("123", 9)[0]) == 1
