"""What the page of a run is told: the overview, prompts, groups and the search, from records small enough to check."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bapo.config.load import load_config, load_resolved
from bapo.config.tree import Config
from bapo.core.errors import ContractError
from bapo.core.types import GroupResult, Origin, Outcome, Purpose
from bapo.runtime.run_directory.layout import RunDirectory
from bapo.runtime.run_directory.recording import RecordedStep
from services.dashboard.assets import answers
from services.dashboard.endpoints import ENDPOINTS, Endpoint, ask, view_of
from services.dashboard.history import History
from services.dashboard.overview import PromptVisits, held_out, table_ages
from services.dashboard.prompts import PromptIndex, exported_prompts
from services.dashboard.run_view import RunView
from tests.support.recorded_responses import GROUP, HOSTILE, LONG, text_row, write_agent_run, write_rollout_run
from tests.support.run_rows import easy_first
from tests.support.synthetic_runs import evaluation_row, metrics_row, result, write_run

CONFIG = Config.model_validate(
    {"algorithm": {"batch_size": 4, "group_size": 4}, "learner": {"minibatch_size": 4}, "rollout": {"num_workers": 1}}
)


OVERVIEW = next(endpoint for endpoint in ENDPOINTS if endpoint.name == "overview")


def visit(prompt: str, rewards: str, step: int, **fields: Any) -> GroupResult:
    return result(prompt, rewards, step=step, birth=step, **fields)


VISITS = {
    # a: 0 right, then 2, then 0 again; b: 1 right, then 3; c: 0 right, then 1; d comes once.
    1: [visit("a", "0000", 1), visit("b", "1000", 1, origin=Origin.X1), visit("c", "0000", 1)],
    2: [
        visit("c", "0100", 2, purpose=Purpose.REEVALUATE, origin=Origin.X2),
        result("b", "1000", step=1, birth=1, origin=Origin.X3, reason="reused"),
        visit("d", "1111", 2),
    ],
    3: [visit("a", "0110", 3, origin=Origin.X1), visit("b", "0111", 3, origin=Origin.X1), visit("c", "0001", 3)],
    4: [visit("a", "0000", 4)],
}


def folded(kind: Any) -> dict[str, list[Any]]:
    fold = kind(CONFIG)
    for step, results in VISITS.items():
        fold.advance(RecordedStep(step=step, results=tuple(results), metrics=metrics_row(step)))
    return fold.columns(0)  # type: ignore[no-any-return]


def test_bins_count_fresh_groups_of_the_step_and_no_reused_or_re_evaluated_ones() -> None:
    assert folded(PromptVisits)["bins"] == [[2, 1, 0, 0, 0], [0, 0, 0, 0, 1], [0, 1, 1, 1, 0], [1, 0, 0, 0, 0]]


def test_the_matrix_moves_a_prompt_from_its_last_bin_to_its_new_one() -> None:
    found = folded(PromptVisits)
    # Cells are first * 5 + last: c 0 -> 1, a 0 -> 2, b 1 -> 3; then a is back at 0.
    assert found["moved"] == [[], [], [1, 1, 2, 1, 8, 1], [0, 1, 2, -1]]
    assert found["revisited"] == [0, 0, 3, 3]


def test_a_rescued_prompt_names_what_trained_it_before_and_is_none_when_it_fails_again() -> None:
    found = folded(PromptVisits)
    assert found["unsolved"] == [0, 0, 2, 2]
    # At its second visit nothing of a had been trained; c had been trained as X2.
    assert found["attribution"] == [{}, {}, {"none of them": 1, "x2": 1}, {"x2": 1}]
    assert found["rescued"] == [0, 0, 2, 1]


def test_an_experts_row_is_no_response_of_the_model() -> None:
    """LUFFY with G = 4: three responses of 10 tokens, none correct at first, and the expert's."""
    config = load_config(["luffy"], ["--algorithm.group_size=4", "--task.name=countdown"])
    index, visits = PromptIndex(config), PromptVisits(config)
    expert = bytes([Outcome.GRADED] * 3 + [Outcome.EXPERT])
    for step, rewards in enumerate(("0001", "0011"), start=1):
        group = replace(visit("a", rewards, step, origin=Origin.X1), outcomes=expert, num_tokens=30)
        for fold in (index, visits):
            fold.advance(RecordedStep(step=step, results=(group,), metrics=metrics_row(step)))
    found = visits.columns(0)
    assert found["bins"] == [[1, 0, 0, 0], [0, 1, 0, 0]]
    assert (found["unsolved"], found["attribution"][1]) == ([0, 1], {"x1": 1})
    assert found["response_tokens"] == [10, 10]
    assert [one.fresh for one in index.prompts()] == [[(1, 0), (2, 1)]]


def test_a_supervised_step_counts_as_what_trained_a_newly_solved_prompt() -> None:
    expert = bytes([Outcome.GRADED] * 3 + [Outcome.EXPERT])
    config = load_config(["relift"], ["--algorithm.group_size=4", "--task.name=countdown"])
    first, later = (replace(visit("a", rewards, step), outcomes=expert) for step, rewards in ((1, "0001"), (2, "1001")))
    supervised = replace(first, origin=Origin.X3, kind="sft", rows=(3,), item="a@1:3")
    visits = PromptVisits(config)
    for step, groups in enumerate(((first, supervised), (later,)), start=1):
        visits.advance(RecordedStep(step=step, results=groups, metrics=metrics_row(step)))
    assert visits.columns(0)["attribution"][1] == {"x3": 1}


def test_ages_are_those_of_the_replayed_tables() -> None:
    """a, c are hard from step 1 and are put in anew when they are seen again; sizes as the run recorded them."""
    fold = History(CONFIG)
    hard = [visit("a", "0000", 1, reason="all_incorrect"), visit("c", "0000", 1, reason="all_incorrect")]
    fold.advance(
        RecordedStep(step=1, results=tuple(hard), metrics=metrics_row(1, reward_mean=0.0, num_bad=2, num_high=0))
    )
    later = [visit("e", "0000", 2, reason="all_incorrect"), visit("f", "0011", 2, origin=Origin.X1)]
    fold.advance(RecordedStep(step=2, results=tuple(later), metrics=metrics_row(2, num_bad=3)))
    found = table_ages(fold, 0)
    assert [ages[:3] for ages in found["bad_ages"]] == [[2, 0, 0], [1, 2, 0]]
    assert found["bad_oldest"] == [0, 1]


def test_ages_are_unknown_where_the_records_are_none_that_a_composer_can_do_with() -> None:
    fold = History(CONFIG)
    only_old = (result("a", "0110", step=1, birth=1),)
    fold.advance(RecordedStep(step=2, results=only_old, metrics=metrics_row(2)))
    assert table_ages(fold, 0)["bad_ages"] == [None]


def test_a_method_without_thresholds_and_buffers_is_not_shown_any(tmp_path: Path) -> None:
    about = {name: whole(viewed(write_run(tmp_path / name, preset=name)))["run"] for name in ("grpo", "bapo")}
    names = ("c1", "has_window", "has_buffers")
    assert [about["grpo"][name] for name in names] == [None, False, False]
    assert [about["bapo"][name] for name in names] == [0.125, True, True]


def test_a_held_out_change_is_over_the_prompts_that_both_measurements_have(tmp_path: Path) -> None:
    before = evaluation_row("easy", 1, {"p": "1000", "q": "0000", "r": "0000", "s": "1111"})
    during = evaluation_row("easy", 9, {"p": "1100", "q": "1000", "r": "1000"})
    one = evaluation_row("easy", 17, {"p": "1111"})
    run = write_run(tmp_path / "mine", evaluations=[before, during, one])
    (split,) = whole(viewed(run))["held_out"]
    # Each of the three prompts gains 1 of 4 responses.
    assert split["change"] == [None, [0.25, 0.25, 0.25], None]
    assert split["num_prompts"] == [4, 3, 1]


def test_pass_at_k_during_a_run_is_that_of_the_base_model_plus_the_change_on_the_prompts_of_both() -> None:
    (split,) = held_out(easy_first(interval="95%"))
    assert (split["k"], split["passed"]) == (2, [0.75, 0.75])
    assert split["accuracy"] == [0.625, 0.375]


def test_pass_at_k_is_at_the_fewest_responses_where_measurements_differ_in_them() -> None:
    rows = [evaluation_row("easy", 1, {"p": "10"}), evaluation_row("easy", 9, {"p": "1000"})]
    # Two of four responses are drawn: 1 - C(3, 2) / C(4, 2) = 1/2.
    assert [(split["k"], split["passed"]) for split in held_out(rows)] == [(2, [1.0, 0.5])]


# -- following a run
def whole(view: RunView, endpoint: Endpoint = OVERVIEW, **query: Any) -> dict[str, Any]:
    while not (found := ask(view, endpoint, **query))["is_complete"]:
        pass
    return found


def viewed(run: RunDirectory) -> RunView:
    return view_of(run, load_resolved(run.config_path))


def test_groups_that_cannot_be_read_are_named_and_the_curves_stay(tmp_path: Path) -> None:
    run = write_run(tmp_path / "mine", metrics=[metrics_row(1, x1=3)])
    found = whole(viewed(run))
    assert "cannot read the groups of step 1" in found["problem"]
    assert (found["steps"]["x1"], found["steps"]["bins"], found["steps"]["bad_ages"]) == ([3], [None], [None])


# -- prompts, groups and the search


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
    assert found["visits"][0]["why"] == "its fresh group had k = 0 of 4, all_incorrect: all rewards are 0"
    assert [visit["has_text"] for visit in found["visits"]] == [False, True]
    assert (found["transitions"][0]["table"], found["transitions"][0]["change"]) == ("bad", "entered")
    assert found["transitions"][0]["why"] == "group with mu = 0"
    assert found["differs"] == ""


def test_the_prompts_of_a_buffer_are_those_that_are_in_it_now(view: RunView) -> None:
    # `hard` had 1 of 4 in step 2, more than c1; only a re-evaluation takes it out of B_bad again.
    assert {p["id"] for p in told(view, "prompts", table="bad")["prompts"]} == {"hard", "zero"}
    with pytest.raises(ContractError, match="table"):
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
        ("hard@1", "step 1 is not recorded (diagnostics.texts = 2, diagnostics.token_records = 2; 0: never)"),
        (
            "zero@2",
            "the step has texts, but not of this group: groups that do not train are kept up to the limit of",
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


def agents(tmp_path: Path) -> RunView:
    view = viewed(write_agent_run(tmp_path / "agents"))
    while not view.is_complete:
        view.refresh()
    return view


def test_an_episode_has_its_turns_with_context_and_forks(tmp_path: Path) -> None:
    found = told(agents(tmp_path), "group", id="agent@2")
    assert (found["prompt"], found["engine_prompt"]) == ("a+5", "<user>a+5<assistant>")
    grown, forked, single = found["responses"]
    assert [(turn["num_pieces"], turn["context"], turn["fork"]) for turn in grown["turns"]] == [
        (2, "", ""),
        (3, "<tool>37<assistant>", ""),
        (1, "<tool>42<assistant>", ""),
    ]
    assert [turn["fork"] for turn in forked["turns"]] == [
        "", "", "fork: continues turn 0", "history was changed: starts again",
    ]  # fmt: skip
    assert (grown["num_turns"], forked["num_turns"], single["turns"], single["num_turns"]) == (3, 4, None, 1)
    assert [response["is_cut"] for response in found["responses"]] == [False] * 3


def test_what_is_shown_of_an_episode_is_limited_as_are_its_contexts(tmp_path: Path) -> None:
    view = agents(tmp_path)
    cut = told(view, "group", id="agent@2", most=4)["responses"][0]
    assert [(turn["num_pieces"], turn["context"]) for turn in cut["turns"]] == [(2, ""), (2, "<tool>37<assista")]
    assert (cut["pieces"], cut["num_turns"], cut["is_cut"]) == (["get(a)", "<eos>", "calc", "(37+5)"], 3, True)
    (alone,) = told(view, "group", id="easy@2")["responses"]
    assert (alone["pieces"], [len(turn["context"]) for turn in alone["turns"]]) == (["get(b)", "7"], [0, 8000])
    assert alone["is_cut"] is True
    assert told(view, "group", id="easy@2", most=30_000)["responses"][0]["is_cut"] is False


def test_the_search_finds_what_a_tool_said(tmp_path: Path) -> None:
    hits = told(agents(tmp_path), "search", text="tool>37")["hits"]
    assert [(hit["kind"], hit["id"], hit["row"]) for hit in hits] == [
        ("response", "agent@2", 1),
        ("response", "agent@2", 0),
    ]


def test_figures_of_episodes_are_columns_of_the_overview(tmp_path: Path) -> None:
    steps = whole(agents(tmp_path))["steps"]
    assert steps["episode_turns_mean"] == [None, 2.667, 2.667]
    assert steps["episode_calls_mean"][1] == {"get": 0.5, "calc": 0.25}


@pytest.mark.parametrize(("endpoint", "noun"), [("prompt", "prompt"), ("group", "group")])
def test_an_unknown_id_is_refused(view: RunView, endpoint: str, noun: str) -> None:
    with pytest.raises(ContractError, match="nobody"):
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


def test_a_long_text_is_searched_at_both_ends_and_is_counted_as_searched_in_part(tmp_path: Path) -> None:
    run = write_rollout_run(tmp_path / "long")
    middle = "begin " + "x " * 10_000 + "between " + "x " * 10_000 + "\\boxed{4711}"
    edge = "y" * 9_998 + "cutoff" + "y" * 9_998  # 20,002 characters, of which "to" is in neither end
    run.token_files.write(2, [[text_row(0, middle), text_row(1, edge), text_row(2, "z" * 20_000)]])
    view = viewed(run)
    while not view.is_complete:
        view.refresh()
    rows = {text: [hit["row"] for hit in told(view, "search", text=text)["hits"]] for text in ("4711", "begin 4711")}
    assert rows == {"4711": [0], "begin 4711": [0]}
    assert [told(view, "search", text=text)["hits"] for text in ("between", "cutoff", "cuto")] == [[]] * 3
    found = told(view, "search", text="4711")
    assert (found["num_cut"], found["end_chars"], found["has_all"]) == (2, 10_000, True)


def test_an_exported_file_has_all_pages_of_the_prompts_that_it_includes() -> None:
    index = PromptIndex(CONFIG)
    index.advance(RecordedStep(step=1, results=tuple(visit(f"p{i}", "0110", 1) for i in range(301)), metrics=None))
    whole_run: Any = SimpleNamespace(fold=lambda kind: index)
    assert [query["offset"] for query in exported_prompts(whole_run) if "offset" in query] == [100, 200]
    index = PromptIndex(CONFIG)
    index.advance(RecordedStep(step=1, results=tuple(visit(f"p{i}", "0110", 1) for i in range(100)), metrics=None))
    assert not [query for query in exported_prompts(whole_run) if "offset" in query]


def test_an_exported_file_carries_the_prompts_and_the_recorded_groups_with_text_that_ends_no_script(
    view: RunView,
) -> None:
    found = answers(view)
    assert {"prompts", "prompts?first=0&last=1", "prompt?id=hard", f"group?id={GROUP.replace('@', '%40')}"} <= set(
        found
    )
    assert f"group?id={GROUP.replace('@', '%40')}&step=2" in found
    assert not [key for key in found if key.startswith("search")]


def test_an_image_of_the_run_is_an_answer_and_nothing_else_of_the_disk_is(run: RunDirectory, view: RunView) -> None:
    content = b"\x89PNG and so on"
    digest = hashlib.sha256(content).hexdigest()
    run.images.write(digest, content)
    assert told(view, "image", id=digest)["url"] == f"data:image/png;base64,{base64.b64encode(content).decode()}"
    for wrong in ("a" * 64, "../config.toml", ""):
        with pytest.raises(ContractError):
            told(view, "image", id=wrong)
    (run.path / "images" / digest).write_bytes(b"\x89PNG and something else")
    with pytest.raises(ContractError):
        told(view, "image", id=digest)
